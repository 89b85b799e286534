"""The training loop: exact resume after a stop anywhere, a stop at the first bad number, metrics without duplicates."""

import json
import shutil
import time
from itertools import islice

import jax
import numpy as np
import pytest

from nanochat_lib import checkpoint, loader, optim, schedules, trainer
from nanochat_lib.errors import UserError
from nanochat_lib.metrics import MetricsLog, plain
from nanochat_lib.presets import CPU_OPTIM
from nanochat_lib.pretrain import step_batches
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.train_step import init_train_state, make_train_step
from nanochat_lib.trainer import Stage, StepBatch, train

MODEL = GPTConfig(sequence_len=16, vocab_size=64, n_layer=1, n_head=1, n_kv_head=1, n_embd=32, window_pattern="L")
OPTIMIZER = optim.make_optimizer(MODEL, CPU_OPTIM, "float32")
STEP = make_train_step(MODEL, OPTIMIZER)


class Words:
    """A corpus of 300 documents and a tokenizer of 64 ids, BOS = 63."""

    fingerprint, bos_id = "words", 63

    def num_documents(self, split):
        return 300

    def documents(self, split, start=0):
        return (str(i) for i in range(start, 300))

    def encode(self, texts, prepend=None):
        return [[63, *np.random.default_rng(int(t)).integers(0, 63, 3 + int(t) % 9).tolist()] for t in texts]


class Stop(Exception):
    pass


def stage(tmp_path, steps, stop_at=None, **options):
    """A stage over the words; `stop_at` raises inside the loop, as Ctrl-C would."""
    words = Words()

    def batches(state, _present):
        stream = loader.PretrainLoader(words, words, "train", 2, 16, 20, epochs=9, state=state, fetch_docs=7)
        for number, batch in enumerate(step_batches(stream, 2)):
            if number == stop_at:
                stream.close()
                raise Stop
            yield batch

    return Stage(
        **{
            "name": "pretrain", "folder": tmp_path / "base", "steps": steps, "step_fn": STEP, "batches": batches,
            "hyper": lambda step, _batch: schedules.base_schedule(step, 12, CPU_OPTIM),
            "metrics": MetricsLog(tmp_path / "metrics.jsonl"), "meta": {"model": MODEL.to_dict(), "tokenizer": "words"},
            "save_every": 4, "log_every": 1, "keep": 3, **options,
        }
    )  # fmt: skip


def fresh():
    return init_train_state(MODEL, OPTIMIZER, jax.random.key(0))


def leaves(state):
    return [np.asarray(x) for x in jax.tree.leaves(state)]


def test_a_stopped_run_ends_bit_equal_to_one_that_was_not(tmp_path):
    whole = train(stage(tmp_path / "a", 12), fresh())
    with pytest.raises(Stop):
        train(stage(tmp_path / "b", 12, stop_at=6), fresh())  # two steps after the last save
    assert checkpoint.latest(tmp_path / "b" / "base")[0] == 4
    resumed = train(stage(tmp_path / "b", 12), fresh())
    for one, other in zip(leaves(whole), leaves(resumed), strict=True):
        np.testing.assert_array_equal(one, other)
    curves = [
        [(r["step"], r["loss"]) for r in MetricsLog(tmp_path / d / "metrics.jsonl").read() if "loss" in r] for d in "ab"
    ]
    assert curves[0] == curves[1] and [s for s, _ in curves[0]] == list(range(1, 13))


def test_a_finished_stage_does_nothing_more(tmp_path):
    train(stage(tmp_path, 4), fresh())
    before = (tmp_path / "metrics.jsonl").read_text()
    train(stage(tmp_path, 4), fresh())
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_a_broken_newest_checkpoint_is_left_alone(tmp_path, capsys):
    train(stage(tmp_path, 8), fresh())
    newest = checkpoint.step_folder(tmp_path / "base", 8)
    victim = max((p for p in newest.rglob("*") if p.is_file()), key=lambda p: p.stat().st_size)
    victim.write_bytes(b"")
    train(stage(tmp_path, 8, keep=9), fresh())
    said = capsys.readouterr().out
    assert "left alone" in said and "continuing from step 4" in said


def test_evaluations_at_the_start_in_between_and_at_the_end(tmp_path):
    seen = []

    def evaluate(step, state):
        seen.append((step, int(state.step)))
        return {"val_bpb": 1.0 / (step + 1)}

    train(stage(tmp_path, 7, evaluate=evaluate, eval_every=3), fresh())
    assert seen == [(0, 0), (3, 3), (6, 6), (7, 7)]
    events = [r for r in MetricsLog(tmp_path / "metrics.jsonl").read("pretrain") if r.get("event") == "eval"]
    assert [r["step"] for r in events] == [0, 3, 6, 7]


@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_a_loss_that_is_not_a_number_stops_the_run_and_keeps_what_was_saved(tmp_path, poison):
    def batches(state, _present):
        rng = np.random.default_rng(0)
        for number in range(99):
            ids = rng.integers(0, 63, (1, 2, 17)).astype(np.int32)
            weights = np.full((1, 2, 16), poison if number == 5 else 1.0, np.float32)
            yield StepBatch({"inputs": ids[..., :-1], "targets": ids[..., 1:].copy(), "weights": weights})

    with pytest.raises(UserError, match="at step 6; the last good checkpoint is step 4") as e:
        train(stage(tmp_path, 12, batches=batches), fresh())
    assert "\n" not in str(e.value)
    state, _ = checkpoint.load(tmp_path / "base", 4, fresh())
    assert all(np.isfinite(x).all() for x in leaves(state))


def test_a_checkpoint_of_another_tokenizer_is_refused(tmp_path):
    train(stage(tmp_path, 4), fresh())
    with pytest.raises(UserError, match="tokenizer"):
        train(stage(tmp_path, 8, meta={"model": MODEL.to_dict(), "tokenizer": "other"}), fresh())


def test_another_number_of_devices_is_said(tmp_path, capsys, monkeypatch):
    train(stage(tmp_path, 4), fresh())
    monkeypatch.setattr(trainer, "device_count", lambda state: 4)
    train(stage(tmp_path, 6), fresh())
    assert "4 devices go on where 1 stopped: same data, sums rounded differently" in capsys.readouterr().out


@pytest.mark.parametrize(("one", "other"), [(2, 8), (8, 4)])
def test_the_rows_of_a_step_do_not_depend_on_how_many_devices_share_them(one, other):
    """B × A is the same: so another number of devices goes on with the same data."""

    def rows(stream, count):
        with stream:
            batches = list(islice(stream, count))
        return np.concatenate([batch.inputs for batch in batches]), batches[-1].state

    def open_stream(size, state=None):
        words = Words()
        return loader.PretrainLoader(words, words, "train", size, 16, 20, epochs=9, state=state, fetch_docs=7)

    whole, _ = rows(open_stream(one), 48 // one)
    first, state = rows(open_stream(one), 16 // one)
    rest, _ = rows(open_stream(other, state), 32 // other)
    np.testing.assert_array_equal(whole, np.concatenate([first, rest]))


def test_a_folder_that_is_removed_under_the_run_is_one_line(tmp_path):
    def batches(state, _present):
        for number, batch in enumerate(stage(tmp_path, 9).batches(state, _present)):
            if number == 6:
                while not checkpoint.step_folder(tmp_path / "base", 4).exists():
                    time.sleep(0.01)
                shutil.rmtree(tmp_path / "base")
            yield batch

    with pytest.raises(UserError, match="base was removed while the run was using it") as e:
        train(stage(tmp_path, 9, batches=batches), fresh())
    assert "\n" not in str(e.value)


def test_metrics_that_cannot_be_written_are_one_line(tmp_path):
    log = MetricsLog(tmp_path / "gone" / "metrics.jsonl")
    with pytest.raises(UserError, match="cannot write .*metrics.jsonl: No such file"):
        log.append(step=1)


def test_metrics_survive_a_line_cut_short(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.append(stage="pretrain", step=1, loss=np.float32(2.5), mfu=float("nan"))
    with open(log.path, "a") as out:
        out.write('{"stage": "pretrain", "st')
    assert log.read() == [{"stage": "pretrain", "step": 1, "loss": 2.5, "mfu": None}]
    log.start("pretrain", 7, 1)  # a start after the checkpoint that this one goes back to: it was, and cost time
    log.append(stage="pretrain", step=8, loss=2.0)
    log.rewind("pretrain", 1)
    assert [json.loads(line)["step"] for line in log.path.read_text().splitlines()] == [1, 7, 1]
    assert plain(np.int64(3)) == 3 and plain(float("inf")) is None
