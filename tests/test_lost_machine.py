"""SFT and RL that lose their machine end bit-equal to those that did not; everything they go on from is in the copy."""

import shutil
from contextlib import contextmanager

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from nanochat_lib import checkpoint, presets, trainer
from nanochat_lib.metrics import MetricsLog
from nanochat_lib.pipeline import open_run
from nanochat_lib.train_step import TrainState

pytestmark = pytest.mark.slow  # a minute and a half: four stages, each compiled

TINY = presets.override(
    presets.preset("cpu-smoke"),
    {
        "model.depth": 1, "data.world_chars": 60_000, "tokenizer.max_chars": 60_000, "evaluation.bigram": False,
        "pretrain.steps": 2, "pretrain.eval_every": -1, "pretrain.eval_tokens": 512, "pretrain.save_every": -1,
        "sft.steps": 4, "sft.save_every": 2, "sft.eval_every": -1, "sft.eval_tokens": 512, "sft.conversations": 60,
        "rl.steps": 4, "rl.save_every": 2, "rl.eval_every": -1, "rl.eval_questions": 2, "rl.max_new_tokens": 4,
        "rl.samples": 2,
    },
)  # fmt: skip


class Lost(BaseException):
    """The machine is gone."""


def lose_machine_at(monkeypatch, step):
    plain = trainer.check_finite

    def check(stage, saver, at, out):
        if at == step:
            saver.settle()  # what was being saved had the time
            raise Lost
        plain(stage, saver, at, out)

    monkeypatch.setattr(trainer, "check_finite", check)


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """(a run left alone, one whose machine was lost with all it held in SFT's and in RL's fourth step)."""
    top = tmp_path_factory.mktemp("runs")
    with compiled_once(top / "compiled"):
        yield two_runs(top)


@contextmanager
def compiled_once(folder):
    """The same programs are compiled for each start of a run."""
    settings = {"jax_compilation_cache_dir": str(folder), "jax_persistent_cache_min_compile_time_secs": 0.0}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    yield
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def two_runs(top):
    whole = open_run(top / "whole", TINY)
    whole.tokenizer()
    whole.pretrain()
    shutil.copytree(top / "whole", top / "lost")
    whole.sft()
    whole.rl()
    whole.close()
    config = presets.override(TINY, {"ops.durable": str(top / "store")})
    for stage in ("sft", "rl"):
        run = open_run(top / "lost", config)  # the first one brings the finished stages to the store
        with pytest.MonkeyPatch.context() as patch, pytest.raises(Lost):
            lose_machine_at(patch, 3)
            getattr(run, stage)()
        run.close()
        shutil.rmtree(top / "lost")
        run = open_run(top / "lost", config)
        getattr(run, stage)()
        run.close()
    return top / "whole", top / "lost"


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_parameters_optimiser_and_step_are_bit_equal(runs, stage):
    (one, meta), (other, other_meta) = (checkpoint.load(run / stage) for run in runs)
    assert one.keys() == other.keys() and meta["step"] == other_meta["step"] == 4
    assert {name.split("/")[0] for name in one} == set(TrainState._fields)
    for name in one:
        np.testing.assert_array_equal(np.asarray(one[name]), np.asarray(other[name]), name)
    assert meta["processes"] == other_meta["processes"]


@pytest.mark.parametrize("stage", ["sft", "rl"])
def test_the_curves_are_the_same_without_a_gap(runs, stage):
    curves = []
    for run in runs:
        records = [r for r in MetricsLog(run / "metrics.jsonl").read(stage) if r.get("event") not in ("start", "stop")]
        clock = ("seconds", "time", "tokens_per_s", "mfu")
        curves.append([{k: v for k, v in r.items() if k not in clock} for r in records])
    assert curves[0] == curves[1]
    assert [r["step"] for r in curves[0] if "loss" in r] == [1, 2, 3, 4]


def test_nothing_but_the_last_checkpoints_came_back(runs):
    _, lost = runs
    assert checkpoint.steps(lost / "sft") == [4] and checkpoint.steps(lost / "rl") == [2, 4]
    assert not (lost / "base").exists()  # RL does not need it
