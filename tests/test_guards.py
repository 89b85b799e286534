"""Guards: each fault is planted in a real tiny training run and stops it with one line; sound runs pass unnoticed."""

import math
from dataclasses import replace

import jax
import numpy as np
import pytest
from test_trainer import MODEL, OPTIMIZER, STEP, Words, fresh, leaves, stage

from nanochat_lib import checkpoint, guards, loader, train_step, trainer
from nanochat_lib.errors import UserError
from nanochat_lib.evaluate.bpb import mean_loss
from nanochat_lib.metrics import MetricsLog
from nanochat_lib.pipeline import open_run
from nanochat_lib.presets import PRESETS, override
from nanochat_lib.pretrain import fixed_batches, step_batches
from nanochat_lib.train_step import make_eval_step, make_train_step
from nanochat_lib.trainer import StepBatch, to_step, train

WORDS = Words()
EVAL_STEP = make_eval_step(MODEL)
TOKEN_BYTES = np.ones(64, np.int32)


def refused(tmp_path, *words, state=None, **options):
    """Trains with a planted fault; the run stops with one line that has all `words`, and saves nothing."""
    with pytest.raises(UserError) as e:
        train(stage(tmp_path, 8, save_every=99, **options), state or fresh())
    text = str(e.value)
    assert "\n" not in text
    for word in words:
        assert word in text, text
    assert checkpoint.steps(tmp_path / "base") == []


def stream():
    return loader.PretrainLoader(WORDS, WORDS, "train", 2, 16, 20, epochs=9, fetch_docs=7, prefetch=0)


def changed(change, at=2):
    """A source of batches in which `change(arrays)` is done to that of step `at`."""

    def batches(_state, _present):
        for number, batch in enumerate(step_batches(stream(), 2), 1):
            if number == at:
                change(batch.arrays)
            yield batch

    return batches


# ---- the loader of the public port: one staging buffer, filled again and again


def staged(micro_batches, views):
    """Steps out of one reused buffer: np.asarray makes a view of it, np.array a copy."""
    buffer = {name: np.empty((2, 16), np.int32) for name in ("inputs", "targets")}

    def batches(_state, _present):
        source, hand_out = stream(), np.asarray if views else np.array
        while True:
            group = []
            for _ in range(micro_batches):
                batch = next(source)
                for name, array in buffer.items():
                    array[:] = getattr(batch, name)
                group.append(replace(batch, **{name: hand_out(array) for name, array in buffer.items()}))
            if micro_batches > 1:
                yield to_step(group)
            else:  # nothing is stacked, so nothing is copied on the way
                yield StepBatch({name: getattr(group[0], name)[None] for name in buffer})

    return batches


def test_views_of_a_reused_buffer_make_all_micro_batches_equal(tmp_path):
    """No NaN and no wrong shape: every micro-batch is the last one. It cost its finders ten days."""
    refused(tmp_path, "pretrain step 1", "micro-batches 0 and 1 of one step are equal", batches=staged(2, views=True))


def test_a_batch_that_is_filled_again_behind_our_back(tmp_path):
    words = ("pretrain step 2", "the inputs of the step before have changed", "np.array")
    refused(tmp_path, *words, batches=staged(1, views=True))


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_copies_out_of_the_same_buffer_are_welcome(tmp_path, micro_batches):
    assert train(stage(tmp_path, 3, batches=staged(micro_batches, views=False)), fresh()).step == 3


def test_a_batch_of_the_step_before(tmp_path):
    def batches(_state, _present):
        for batch in step_batches(stream(), 2):
            yield batch
            yield StepBatch({name: x[::-1].copy() for name, x in batch.arrays.items()})

    refused(tmp_path, "step 2: micro-batch 0 is equal to micro-batch 1 of the step before", batches=batches)
    train(stage(tmp_path, 3, batches=batches, own_samples=True), fresh())  # a model may answer alike twice


def test_padding_may_repeat(tmp_path):
    def batches(_state, _present):
        for batch in step_batches(stream(), 2):
            for x, value in zip(batch.arrays.values(), (0, -1), strict=True):
                x[1] = value
            yield batch

    assert train(stage(tmp_path, 3, batches=batches), fresh()).step == 3


# ---- ids and labels


def put(name, value, at=(1, 1, 5)):
    def change(arrays):
        arrays[name][at] = value

    return change


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (put("inputs", 64), ("inputs hold 64 (micro-batch 1, row 1, position 5)", "0 … 63")),
        (put("inputs", -1), ("inputs hold -1",)),
        (put("targets", 70, (0, 0, 15)), ("targets hold 70 (micro-batch 0, row 0, position 15)", "-1")),
        (put("targets", -100), ("targets hold -100", "-1 where nothing is trained")),
        (lambda a: a.update(inputs=a["inputs"].astype(np.float32)), ("inputs are float32", "int32")),
    ],
)
def test_ids_that_are_none(tmp_path, change, words):
    refused(tmp_path, "pretrain step 2", *words, batches=changed(change))


def test_ids_are_looked_at_after_the_first_steps_too(tmp_path):
    fault = changed(put("inputs", 64), at=6)
    refused(tmp_path / "a", "pretrain step 6", batches=fault, guard_steps=2)
    train(stage(tmp_path / "b", 8, batches=fault, guard_steps=0), fresh())  # 0: the guards are off


@pytest.mark.parametrize(
    "targets",
    [
        lambda inputs: inputs.copy(),  # learns to copy
        lambda inputs: np.roll(inputs, -2, -1),  # learns to skip one
        lambda inputs: np.roll(inputs, 1, -1),  # learns to look back
    ],
)
def test_targets_that_are_not_the_next_input(tmp_path, targets):
    change = lambda arrays: arrays.update(targets=targets(arrays["inputs"]))  # noqa: E731
    refused(tmp_path, "step 2", "trained targets are not the next input", "[:, 1:]", batches=changed(change))


def test_one_wrong_label_is_found_and_a_mask_is_none(tmp_path):
    words = ("1 of 60 trained targets", "micro-batch 1, row 0, position 3", "target 7, next input")
    refused(tmp_path / "b", *words, batches=changed(put("targets", 7, (1, 0, 3))))
    masked = changed(lambda a: a["targets"].__setitem__((slice(None), slice(None), slice(3, 9)), -1))
    train(stage(tmp_path / "c", 3, batches=masked), fresh())


# ---- what is trained


def test_a_step_without_anything_to_train_on(tmp_path):
    nothing = changed(lambda arrays: arrays["targets"].fill(-1), at=5)
    refused(tmp_path, "pretrain step 5: none of the batch's 64 targets is trained", batches=nothing, guard_steps=2)


def test_a_small_share_of_trained_positions_is_said_once(tmp_path, capsys):
    def keep(share):
        def batches(_state, _present):
            for batch in step_batches(stream(), 2):
                batch.arrays["targets"][..., share:] = -1
                yield batch

        return batches

    options = {"guard_steps": 3, "low_share": 0.1, "save_every": 99}
    train(stage(tmp_path / "a", 6, batches=keep(1), **options), fresh())
    said = [line for line in capsys.readouterr().out.splitlines() if "are trained" in line]
    assert len(said) == 1 and "only 6.2% of the positions are trained (12 of 192 in 3 steps)" in said[0]
    train(stage(tmp_path / "b", 6, batches=keep(2), **options), fresh())
    assert "are trained" not in capsys.readouterr().out


def test_a_gradient_that_is_exactly_zero(tmp_path, monkeypatch):
    real = train_step.loss_and_gradients

    def cut_off(*args):
        loss, grads, count = real(*args)
        return loss, jax.tree.map(jax.numpy.zeros_like, grads), count

    monkeypatch.setattr(train_step, "loss_and_gradients", cut_off)
    step = make_train_step(MODEL, OPTIMIZER)
    refused(tmp_path, "step 1: the gradient is exactly 0 with a loss of 4.1", "stop_gradient", step_fn=step)


def test_no_gradient_is_expected_where_all_weights_are_zero(tmp_path):
    """RL: all answers of all questions earned the same."""

    def batches(_state, _present):
        for batch in step_batches(stream(), 2):
            batch.arrays["weights"] = np.zeros(batch.arrays["targets"].shape, np.float32)
            yield batch

    train(stage(tmp_path, 2, batches=batches, own_samples=True), fresh())


# ---- the first loss


def test_a_fresh_model_starts_at_ln_v(tmp_path):
    band = guards.near_uniform(64)
    train(stage(tmp_path / "a", 2, first_loss=band), fresh())
    state = fresh()
    loud = state._replace(params=state.params | {"lm_head.weight": 300 * state.params["lm_head.weight"]})
    refused(tmp_path / "b", "the first loss is", "ln 64 = 4.159 ± 0.05", "initial weights", state=loud, first_loss=band)


def test_a_loss_that_is_a_sum_is_not_near_ln_v(tmp_path):
    def summed(state, batch, hyper):
        state, out = STEP(state, batch, hyper)
        return state, out | {"loss": out["loss"] * out["tokens"]}

    refused(tmp_path, "the first loss is 266.", "mean", step_fn=summed, first_loss=guards.near_uniform(64))


def test_the_first_loss_is_asked_for_once(tmp_path):
    """A restart goes on with a trained model."""
    band = guards.near_uniform(64)
    train(stage(tmp_path, 4, first_loss=band), fresh())
    assert train(stage(tmp_path, 8, first_loss=replace(band, low=9.0, high=10.0)), fresh()).step == 8


@pytest.mark.parametrize(
    ("held_out", "limit"), [(0.5, 2.5), (5.0, 7.0), (99.0, math.log(64) + 4), (None, math.log(64) + 4)]
)
def test_the_next_stage_starts_near_what_its_model_loses_on_held_out_data(tmp_path, held_out, limit):
    band = guards.not_worse_than(64, held_out)
    assert band.high == pytest.approx(limit)
    if held_out == 0.5:
        words = ("sft step 1: the first loss is 4.1", "at most 2.500; on held-out data the same model has 0.500")
        refused(tmp_path, *words, "tokenizer", name="sft", first_loss=band)
    elif held_out is None:
        train(stage(tmp_path, 1, first_loss=band), fresh())


def test_a_policy_gradients_loss_may_be_negative_but_not_huge():
    band = guards.not_worse_than(64)
    guards.check_first_loss("rl step 1", -0.3, band)
    with pytest.raises(UserError, match="the first loss is -9.000, expected at most 8.159"):
        guards.check_first_loss("rl step 1", -9.0, band)


# ---- a state that only looks restored


def probe(rows=2):
    batch = fixed_batches(WORDS, WORDS, "val", 4, 16, 64, 20)[0]
    return guards.probe(EVAL_STEP, guards.probe_rows(batch, np.arange(4), rows), TOKEN_BYTES)


def interrupted(folder, capsys):
    """A run of 8 steps of which 4 are done, with its marks."""
    train(stage(folder, 4, probe=probe()), fresh())
    return checkpoint.load_meta(folder / "base", 4)["mark"]


def test_a_sound_restart_gives_back_every_mark(tmp_path, capsys):
    saved = interrupted(tmp_path, capsys)
    assert set(saved) == {"step", "params_norm", "optimizer_norm", "probe_loss"} and saved["step"] == 4
    state, _ = checkpoint.load(tmp_path / "base", 4, fresh())
    assert guards.mark(state, probe()) == saved  # on one machine to the last bit
    whole = np.sqrt(sum(np.sum(np.float64(x) ** 2) for x in jax.tree.leaves(state.params)))
    assert saved["params_norm"] == pytest.approx(whole, rel=1e-5)
    batch = fixed_batches(WORDS, WORDS, "val", 2, 16, 32, 20)
    assert saved["probe_loss"] == pytest.approx(mean_loss(EVAL_STEP, state.params, batch, TOKEN_BYTES), abs=1e-6)
    train(stage(tmp_path, 8, probe=probe()), fresh())


def test_the_probe_is_logged_with_every_evaluation(tmp_path):
    train(stage(tmp_path, 4, probe=probe(), evaluate=lambda *_: {"val_bpb": 1.0}, eval_every=2), fresh())
    found = [r["probe_loss"] for r in MetricsLog(tmp_path / "metrics.jsonl").read() if r.get("event") == "eval"]
    assert len(found) == 3 and found[0] == pytest.approx(math.log(64), abs=0.01) and found[2] < found[0]


def lose(**parts):
    """checkpoint.load as it was, but for what a careless line forgets to put back."""
    real = checkpoint.load

    def load(folder, step=None, like=None, **options):
        state, meta = real(folder, step, like, **options)
        return state._replace(**{name: part(state, like) for name, part in parts.items()}), meta

    return load


@pytest.mark.parametrize(
    ("parts", "words"),
    [
        ({"params": lambda _, like: like.params}, ("params norm",)),
        ({"opt_state": lambda _, like: like.opt_state}, ("optimizer norm", "saved")),
        ({"step": lambda _, like: like.step}, ("step 0, saved 4",)),
        ({"params": lambda state, _: permuted(state.params)}, ("probe loss", "tolerance 0.005")),
    ],
)
def test_a_state_that_is_restored_in_part_stops_the_run(tmp_path, monkeypatch, capsys, parts, words):
    interrupted(tmp_path, capsys)
    monkeypatch.setattr(trainer.checkpoint, "load", lose(**parts))
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(UserError) as e:
        train(stage(tmp_path, 8, probe=probe()), fresh())
    text = str(e.value)
    assert "\n" not in text and "step 4" in text and "remove that checkpoint" in text
    for word in words:
        assert word in text, text
    assert (tmp_path / "metrics.jsonl").read_text() == before and checkpoint.steps(tmp_path / "base") == [4]


def permuted(params):
    """The same numbers in other places: no norm sees it."""
    table = params["transformer.wte.weight"]
    return params | {"transformer.wte.weight": table[::-1]}


def test_a_checkpoint_without_marks_passes(tmp_path, monkeypatch, capsys):
    interrupted(tmp_path, capsys)
    real = checkpoint.load

    def load(*args, **options):
        state, meta = real(*args, **options)
        return state, {name: value for name, value in meta.items() if name != "mark"}

    monkeypatch.setattr(trainer.checkpoint, "load", load)
    train(stage(tmp_path, 5, probe=probe()), fresh())


def test_the_probe_is_the_same_on_any_number_of_devices():
    """Twice the devices make a batch of twice the rows; only those that one device had count."""
    losses = []
    for rows in (2, 4, 8):
        batch = fixed_batches(WORDS, WORDS, "val", rows, 16, rows * 16, 20)[0]
        fixed = guards.probe_rows(batch, np.arange(rows), 2)
        losses.append(guards.probe(EVAL_STEP, fixed, TOKEN_BYTES)(fresh().params))
        halves = [guards.probe_rows([x[i::2] for x in batch], np.arange(rows)[i::2], 2)[1] for i in (0, 1)]
        assert sum(int((half >= 0).sum()) for half in halves) == 32  # two processes, each with every other row
    assert losses == pytest.approx([losses[0]] * 3, abs=1e-6)


# ---- guards change nothing


def test_guards_change_nothing_and_end_in_time(tmp_path, monkeypatch):
    seen = []
    real = guards.digests
    monkeypatch.setattr(guards, "digests", lambda array: seen.append(1) or real(array))
    states = [train(stage(tmp_path / str(n), 6, guard_steps=n), fresh()) for n in (0, 2)]
    for one, other in zip(*map(leaves, states), strict=True):
        np.testing.assert_array_equal(one, other)
    assert len(seen) == 2 * 2 * 2  # two steps, two arrays, hashed when handed out and once more a step later


# ---- the presets' own first steps


@pytest.mark.parametrize("name", list(PRESETS))
def test_every_presets_initial_weights_meet_the_band(name):
    """Logits of a fresh head (weights of deviation 0.001, C inputs of size 1) cost half their variance, C·10⁻⁶/2."""
    assert PRESETS[name].gpt_config().n_embd * 1e-6 / 2 < guards.NEAR_UNIFORM / 20


def test_the_preset_cpu_passes_its_guards(tmp_path, monkeypatch):
    """The preset's own model, rates and batches; with less text and fewer steps. cpu-smoke runs whole elsewhere."""
    monkeypatch.setattr("nanochat_lib.pretrain.samples", lambda *_: [])  # text is not what this is about
    less = {
        "data.world_chars": 200_000, "tokenizer.max_chars": 300_000, "pretrain.steps": 3, "pretrain.eval_tokens": 2048,
        "evaluation.bigram": False, "ops.guard_steps": -1,
    }  # fmt: skip
    run = open_run(tmp_path, override(PRESETS["cpu"], less))
    assert run.pretrain().figures["steps"] == 3
    evaluations = [r for r in run.metrics.read() if r.get("event") == "eval"]
    assert all(r["probe_loss"] > 0 for r in evaluations)
    assert evaluations[0]["probe_loss"] == pytest.approx(math.log(1024), abs=0.01)
    run.close()
