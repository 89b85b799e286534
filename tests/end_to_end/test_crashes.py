"""kill -9 at random moments of a training command: the run that is started again and again ends as one never killed.

NANOCHAT_KILLS sets the number of kills of the long variant (`-m slow`); NANOCHAT_CRASH_SEED repeats one.
"""

import json
import os
import random
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from tiny import SETTINGS, corpus, ended, start

from nanochat_lib import checkpoint

STEPS = 60
TRAINING = f"-s pretrain.steps={STEPS} -s pretrain.save_every=7 -s pretrain.eval_every=9 -s pretrain.sample_every=27"
MOMENTS = ("start", "step", "save", "evaluation")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(folder of a run with its tokenizer, the command that trains it, seconds of a training never interrupted)."""
    folder = tmp_path_factory.mktemp("crashes")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.1"
    settings = f"{SETTINGS} {TRAINING} --corpus {corpus(folder)}"
    assert ended(start(f"tokenizer --run-dir whole {settings}", folder / "out"))[0] == 0, (folder / "out").read_text()
    (folder / "killed").mkdir()
    for name in ("config.json", "tokenizer", "stages"):
        os.system(f"cp -r '{folder}/whole/{name}' '{folder}/killed/'")
    began = time.monotonic()
    assert ended(start("pretrain --run-dir whole", folder / "out"))[0] == 0, (folder / "out").read_text()
    yield folder, time.monotonic() - began
    del os.environ["JAX_COMPILATION_CACHE_DIR"], os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def kill_and_continue(base, kills, seed):
    """Kills the run in base/killed `kills` times at random moments, lets it end, and compares it with base/whole."""
    folder, seconds = base
    print(f"\n{kills} kills, NANOCHAT_CRASH_SEED={seed}")
    rng, run, where = random.Random(seed), folder / "killed", dict.fromkeys(MOMENTS, 0)
    for number in range(kills):
        process = start("pretrain --run-dir killed", folder / "out")
        moment = rng.choice(MOMENTS)
        wait = rng.uniform(0.0, seconds) if moment == "start" else rng.uniform(0.0, 0.25)
        signs = {
            "start": lambda: True,
            "step": lambda size=size_of(run): size_of(run) > size,
            "save": lambda: any(run.glob("base/*.tmp-*")),
            "evaluation": lambda: 1,
        }  # fmt: skip
        end = time.monotonic() + 120
        while process.is_alive() and not signs[moment]() and time.monotonic() < end:
            time.sleep(0.002)
        process.join(wait if moment != "save" else wait / 10)
        where[moment] += process.is_alive()
        process.kill()
        process.join()
        assert process.exitcode in (-9, 0), (folder / "out").read_text()
        if process.exitcode == 0:
            break
    done, _ = ended(start("pretrain --run-dir killed", folder / "out"))
    assert done == 0, (folder / "out").read_text()
    print(f"killed: {where}")
    whole, killed = records(folder / "whole"), records(run)
    for event in (None, "eval", "samples"):
        a, b = ([strip(r) for r in log if r.get("event") == event] for log in (whole, killed))
        assert a == b, event  # each step once, and the same to the last bit
    assert [r["step"] for r in killed if "loss" in r] == list(range(1, STEPS + 1))
    states = [checkpoint.load(folder / name / "base")[0] for name in ("whole", "killed")]
    assert states[0].keys() == states[1].keys()
    for name, leaf in states[0].items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(states[1][name]), err_msg=name)
    left = [str(path) for path in run.rglob("*") if ".tmp-" in path.name or path.name.startswith(".seen")]
    assert not left
    assert json.loads((run / "status.json").read_text())["state"] == "done"


def size_of(run):
    path = run / "metrics.jsonl"
    return path.stat().st_size if path.exists() else 0


def strip(record):
    """Without what a clock says."""
    return {k: v for k, v in record.items() if k not in ("seconds", "tokens_per_s", "mfu")}


def test_a_few_kills(base):
    kill_and_continue(base, 5, int(os.environ.get("NANOCHAT_CRASH_SEED") or random.randrange(10**6)))


@pytest.mark.slow
def test_many_kills(base):
    seed = int(os.environ.get("NANOCHAT_CRASH_SEED") or random.randrange(10**6))
    kill_and_continue(base, int(os.environ.get("NANOCHAT_KILLS") or 30), seed)


def test_the_platform_is_one_whose_results_repeat():
    assert jax.default_backend() == "cpu"
