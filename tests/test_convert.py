"""A nanochat folder as a run, and a run as a nanochat folder: usable, exact on the way back, whole or not there."""

from __future__ import annotations

import errno
import json
import shlex
import shutil
import types
from dataclasses import replace
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from upstream_folders import CONFIGS, HEAD, RATES, STEP, read, same, write

from nanochat_lib import checkpoint, convert, pipeline, presets, report, storage, upstream
from nanochat_lib.cli import build_parser, main
from nanochat_lib.errors import UserError
from nanochat_lib.storage import read_json
from nanochat_lib.trainer import MetricsLog

MODEL, META = f"model_{STEP:06d}.pt", f"meta_{STEP:06d}.json"


@pytest.fixture(scope="module")
def source(tmp_path_factory) -> Path:
    return write(tmp_path_factory.mktemp("source") / "d2", ranks=3, bf16=True)


@pytest.fixture(scope="module")
def converted(source, tmp_path_factory) -> Path:
    run = tmp_path_factory.mktemp("converted") / "run"
    changes = {"evaluation.chat_max_new_tokens": 4, "rl.max_new_tokens": 4, "sft.steps": "5"}
    said = convert.from_upstream(source, run, changes=changes)
    assert said.startswith(f"{run}: head, 2 layers, 32 wide, vocabulary 380, ") and "optimiser of 3 ranks" in said
    return run


@pytest.fixture
def run(converted, tmp_path) -> Path:
    """A converted run to work in."""
    return Path(shutil.copytree(converted, tmp_path / "run"))


SHORT = {"evaluation.chat_max_new_tokens": 4, "rl.max_new_tokens": 4}  # the tests' context is 16 tokens

# --- From nanochat


def test_a_converted_run_is_a_run(converted, source) -> None:
    config = presets.from_dict(read_json(converted / "config.json"))
    assert config.gpt_config(380) == HEAD and config.sft.steps == 5
    run, found = pipeline.Run(converted, config), upstream.load(source)
    assert pipeline.last_stage(converted) == "base"
    model, params, tokenizer = run.load_model("base")
    assert model == HEAD and tokenizer.fingerprint == found.tokenizer.fingerprint
    assert params.keys() == found.params.keys()
    assert all(np.array_equal(params[name], p) for name, p in found.params.items())
    state, meta, _ = convert.load_state(converted / "base", None)
    assert meta["step"] == int(state.step) == STEP
    equal = jax.tree.map(np.array_equal, state.opt_state, found.opt_state)
    assert all(jax.tree.leaves(equal)) and len(jax.tree.leaves(equal)) == 1 + 2 * 8 + 2 * 5


def test_chat_answers_from_a_converted_run(converted, capsys) -> None:
    options = ["--temperature", "0", "--max-tokens", "3"]
    assert main(["chat", "--run-dir", str(converted), "-p", "aa", *options]) == 0
    assert capsys.readouterr().out.strip()


def test_evaluation_finds_what_it_needs_and_a_report_can_be_made(run, monkeypatch) -> None:
    from nanochat_lib.evaluate import core

    seen = []

    def evaluate_core(config, params, tokenizer, bundle, **options):
        seen.append(config)
        return {"core": 0.5, "core_tasks": {task: {"centered": 0.5} for task in FACT_TASKS}}

    from nanochat_lib.primer.bundle import FACT_TASKS

    monkeypatch.setattr(core, "evaluate_core", evaluate_core)
    config = presets.from_dict(read_json(run / "config.json"))
    opened = pipeline.open_run(run, config)
    try:
        assert opened.eval_base().figures["core"] == 0.5 and seen == [HEAD, HEAD]
        opened.__dict__["corpus"] = types.SimpleNamespace(fingerprint="of some text")
        with pytest.raises(UserError, match="tokenizer was begun with other inputs"):
            opened.tokenizer()  # it is finished; nothing is trained over it
    finally:
        opened.close()
    stages = report.build_report(run)["stages"]
    assert stages["pretrain"]["val_bpb_last"] == 3.25 and stages["tokenizer"]["vocab_size"] == 380


def test_the_settings_follow_the_checkpoint(source) -> None:
    found = upstream.load(source)
    user = {
        "matrix_lr": 0.03, "warmup_steps": 7, "num_iterations": 99, "aspect_ratio": 16, "scalar_lr": "much",
        "embedding_lr": float("nan"), "final_lr_frac": True,
    }  # fmt: skip
    meta = {"user_config": user, "device_batch_size": 4, "total_batch_size": 128}
    config = convert.run_config(replace(found, meta=meta), SHORT)
    optim, defaults = config.pretrain.optim, presets.OptimConfig()
    assert (optim.matrix_lr, optim.warmup_steps, optim.transfer) == (0.03, 7, True)
    assert (optim.scalar_lr, optim.embedding_lr, optim.final_lr_frac, optim.smear_lr) == (
        defaults.scalar_lr, defaults.embedding_lr, defaults.final_lr_frac, defaults.smear_lr,
    )  # fmt: skip
    assert (config.pretrain.steps, config.model.aspect_ratio) == (99, 16)
    assert (config.pretrain.device_rows, config.pretrain.batch_tokens) == (4, 128)
    for broken in ({}, {"user_config": None}, {"total_batch_size": 100}):
        config = convert.run_config(replace(found, meta=broken), SHORT)
        assert config.pretrain.batch_tokens == config.pretrain.device_rows * 16
    other = convert.run_config(replace(found, config=CONFIGS["recipe4"]), SHORT)
    assert other.gpt_config(380) == CONFIGS["recipe4"]


def test_a_model_without_optimiser_gets_a_fresh_one(source, tmp_path) -> None:
    bare = Path(shutil.copytree(source, tmp_path / "d2", ignore=shutil.ignore_patterns("optim*")))
    said = convert.from_upstream(bare, tmp_path / "run", changes=SHORT)
    assert "no optimiser" in said
    state, _, _ = convert.load_state(tmp_path / "run" / "base", None)
    assert int(state.step) == STEP and int(state.opt_state.step) == 0
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(state.opt_state))


# --- To nanochat


def test_the_way_back_is_exact(converted, source, tmp_path) -> None:
    back = tmp_path / "new" / "d2"
    said = convert.to_upstream(converted, back)
    assert said.startswith(f"{back}: head") and "base model of step 20, optimiser of 3 ranks" in said
    files = sorted(path.relative_to(source) for path in source.rglob("*") if path.is_file())
    assert files == sorted(path.relative_to(back) for path in back.rglob("*") if path.is_file())
    for name in files:
        if name.suffix == ".pt":
            assert same(read(source / name), read(back / name)), name
        else:
            assert (source / name).read_bytes() == (back / name).read_bytes(), name
    convert.to_upstream(converted, tmp_path / "one", ranks=1)
    assert [path.name for path in (tmp_path / "one").glob("optim*")] == [f"optim_{STEP:06d}_rank0.pt"]


@pytest.mark.parametrize("stage", ["base", "sft", "rl"])
def test_what_was_trained_here_is_written_as_nanochat_would(stage, run, tmp_path) -> None:
    state, meta, _ = convert.load_state(run / "base", None)
    del meta["upstream"]
    checkpoint.save(run / stage, 30, state, meta | {"step": 30, "seconds": 2.5})
    log = MetricsLog(run / "metrics.jsonl")
    name = "pretrain" if stage == "base" else stage
    log.append(stage=name, step=25, event="eval", val_bpb=2.0)
    log.append(stage=name, step=30, loss=1.5, lr=0.25, momentum=0.9, weight_decay=0.125)
    log.append(stage=name, step=40, loss=9.0, lr=9.0, momentum=9.0, weight_decay=9.0)
    log.append(stage=name, step=40, event="eval", val_bpb=9.0)
    convert.to_upstream(run, tmp_path / "d2", stage=stage)
    found = upstream.load(tmp_path / "d2")
    assert found.config == HEAD and found.step == found.meta["step"] == 30
    assert found.meta["val_bpb"] == found.meta["loop_state"]["min_val_bpb"] == 2.0
    assert found.meta["loop_state"] == {"min_val_bpb": 2.0, "smooth_train_loss": 1.5, "total_training_time": 2.5}
    assert list(found.meta["model_config"]) == [
        "sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "window_pattern",
    ]  # fmt: skip
    config = presets.from_dict(read_json(run / "config.json"))
    assert found.meta["user_config"]["matrix_lr"] == config.pretrain.optim.matrix_lr == 0.02
    assert found.meta["total_batch_size"] == config.pretrain.batch_tokens
    groups = found.extras.param_groups
    scale = config.horizon(380).lr_scale if stage == "base" else 1.0
    matrix_lr = (config.rl if stage == "rl" else config.pretrain.optim).matrix_lr * scale
    assert [group["kind"] for group in groups] == ["adamw"] * 6 + ["muon"] * 5
    assert groups[-1]["initial_lr"] == pytest.approx(matrix_lr, rel=1e-12)
    assert groups[-1]["lr"] == pytest.approx(matrix_lr / 4, rel=1e-12)
    assert (groups[-1]["momentum"], groups[-1]["weight_decay"]) == (0.9, 0.125)
    assert type(read(tmp_path / "d2" / "optim_000030_rank0.pt")["param_groups"][0]["betas"]) is tuple
    assert {p.dtype for p in read(tmp_path / "d2" / "model_000030.pt").values()} == {torch.float32}


def test_without_metrics_the_meta_file_is_still_what_nanochat_can_read(run, tmp_path) -> None:
    state, meta, _ = convert.load_state(run / "base", None)
    del meta["upstream"]
    checkpoint.save(run / "base", STEP + 1, state, meta | {"step": STEP + 1})
    (run / "metrics.jsonl").unlink()
    convert.to_upstream(run, tmp_path / "d2")
    loop = json.loads((tmp_path / "d2" / f"meta_{STEP + 1:06d}.json").read_text())["loop_state"]
    assert loop["min_val_bpb"] == float("inf") and loop["smooth_train_loss"] == 0.0


# --- What is refused


def one_line(error: pytest.ExceptionInfo, *words: str) -> None:
    text = str(error.value)
    assert "\n" not in text and all(word in text for word in words), text


def test_a_run_is_made_whole_or_not_at_all(source, tmp_path, monkeypatch) -> None:
    target = tmp_path / "runs" / "d2"

    def full(*args, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", full)
        with pytest.raises(UserError) as e:
            convert.from_upstream(source, target, changes=SHORT)
        one_line(e, str(target), "No space left")
    assert list((tmp_path / "runs").iterdir()) == []
    for changes, words in (
        ({"sft.stepz": 1}, ["sft.stepz", "sft.steps"]),
        ({"model.depth": 3}, ["model.depth", "comes from the checkpoint"]),
        ({}, ["rl.max_new_tokens", "sequence_len 16"]),
    ):
        with pytest.raises(UserError) as e:
            convert.from_upstream(source, target, changes=changes and SHORT | changes)
        one_line(e, *words)
    target.mkdir()
    with pytest.raises(UserError) as e:
        convert.from_upstream(source, target, changes=SHORT)
    one_line(e, str(target), "exists already")
    assert list(target.iterdir()) == []


def test_what_cannot_be_written_back(converted, tmp_path) -> None:
    for options, words in (
        ({"stage": "sft"}, ["sft", "no valid checkpoint"]),
        ({"step": 7}, ["no checkpoint of step 7", "20"]),
        ({"ranks": 5}, ["384 rows", "5 ranks"]),
    ):
        with pytest.raises(UserError) as e:
            convert.to_upstream(converted, tmp_path / "d2", **options)
        one_line(e, *words)
    with pytest.raises(UserError) as e:
        convert.to_upstream(tmp_path / "nothing", tmp_path / "d2")
    one_line(e, "config.json does not exist")
    assert not list(tmp_path.iterdir())


def test_another_tokenizer_in_the_run_is_noticed(run, tmp_path) -> None:
    from nanochat_lib.tokenizer import Tokenizer

    shutil.rmtree(run / "tokenizer")
    Tokenizer([b"zz"]).save(run / "tokenizer")
    with pytest.raises(UserError, match="trained with tokenizer"):
        convert.to_upstream(run, tmp_path / "d2")


# --- The command line


def test_the_commands(source, tmp_path, capsys) -> None:
    run, back = str(tmp_path / "run"), str(tmp_path / "back")
    short = [part for name, value in SHORT.items() for part in ("-s", f"{name}={value}")]
    assert main(["convert", "from-upstream", str(source), run, "--step", "20", *short]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"{run}: head") and f"nanochat chat --run-dir {run}" in out
    assert main(["convert", "to-upstream", run, back, "--stage", "base", "--ranks", "2"]) == 0
    assert "optimiser of 2 ranks" in capsys.readouterr().out
    assert same(read(source / MODEL), read(Path(back) / MODEL))
    assert main(["convert", "from-upstream", back, str(tmp_path / "other"), "--step", "21", *short]) == 2
    error = capsys.readouterr().err
    assert error.startswith("nanochat: ") and error.count("\n") == 1 and "no checkpoint of step 21" in error


@pytest.mark.parametrize("direction", ["from-upstream", "to-upstream"])
def test_each_direction_has_help_with_an_example_that_parses(direction, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    with pytest.raises(SystemExit) as stop:
        main(["convert", direction, "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    (example,) = [line for line in out.splitlines() if line.startswith("example: nanochat ")]
    args = build_parser().parse_args(shlex.split(example)[2:])
    assert args.direction == direction and "--debug" in out
    with pytest.raises(SystemExit):
        main(["convert", direction, "only-one"])
    assert "nanochat convert" in capsys.readouterr().err


def test_rates_of_the_test_folder_are_the_ones_nanochat_would_have(source) -> None:
    """The folder's groups come from the twin; ours for the same rates are equal to the last bit."""
    from nanochat_lib.upstream.optimizer import group_dicts

    found = upstream.load(source)
    rates = presets.OptimConfig(**{name: value for name, value in RATES.items() if name != "weight_decay"})
    shapes = {name: p.shape for name, p in found.params.items()}
    assert group_dicts(HEAD, shapes, rates, 1.0, 0.95, RATES["weight_decay"]) == found.extras.param_groups


def test_the_folder_is_published_in_one_step(source, tmp_path, monkeypatch) -> None:
    published = []
    publish = storage.publish_dir

    def watch(temporary, final):
        published.append((Path(final), Path(final).exists(), sorted(p.name for p in Path(temporary).iterdir())))
        return publish(temporary, final)

    monkeypatch.setattr(storage, "publish_dir", watch)
    convert.from_upstream(source, tmp_path / "run", changes=SHORT)
    final, existed, names = published[-1]
    assert final == tmp_path / "run" and not existed
    assert names == ["base", "config.json", "metrics.jsonl", "stages", "tokenizer"]
