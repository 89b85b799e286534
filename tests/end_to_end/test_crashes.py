"""kill -9 at random moments of a training command: the run that is started again and again ends as one never killed.

NANOCHAT_KILLS sets the number of kills of the long variant (`-m slow`); NANOCHAT_CRASH_SEED repeats one.
"""

import json
import os
import random
import shutil
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
MOMENTS = ("start", "compiler", "step", "save", "evaluation")


@pytest.fixture(scope="module")
def base(tmp_path_factory):
    """(folder of a run with its tokenizer, the command that trains it, seconds of a training never interrupted)."""
    folder = tmp_path_factory.mktemp("crashes")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = str(folder / "compiled")
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    settings = f"{SETTINGS} {TRAINING} --corpus {corpus(folder)}"
    assert ended(start(f"tokenizer --run-dir whole {settings}", folder / "out"))[0] == 0, (folder / "out").read_text()
    shutil.copytree(folder / "whole", folder / "begun")
    began = time.monotonic()
    assert ended(start("pretrain --run-dir whole", folder / "out"))[0] == 0, (folder / "out").read_text()
    yield folder, time.monotonic() - began
    del os.environ["JAX_COMPILATION_CACHE_DIR"], os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"]


def records(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def kill_and_continue(base, kills, seed):
    """Kills a run `kills` times at random moments, lets it end, and compares it with base/whole."""
    folder, seconds = base
    print(f"\n{kills} kills, NANOCHAT_CRASH_SEED={seed}")
    rng, run, where = random.Random(seed), folder / f"killed-{kills}", dict.fromkeys(MOMENTS, 0)
    shutil.copytree(folder / "begun", run)
    order = rng.sample(MOMENTS, len(MOMENTS))
    for number in range(kills):
        moment = order[number % len(order)]
        door = moment if moment in ("compiler", "evaluation") else ""
        mark, size, limit = Path(f"{folder / 'out'}.{door}"), size_of(run), time.monotonic() + 120
        mark.unlink(missing_ok=True)
        begun = {
            "start": lambda: True,
            "compiler": mark.exists,
            "step": lambda size=size: size_of(run) > size,
            "save": lambda: any(run.glob("base/*.tmp-*")),
            "evaluation": mark.exists,
        }[moment]
        longest = {"start": seconds, "step": 0.3, "save": 0.1}.get(moment, 0.05)
        at = rng.randrange(1, 8) if moment == "evaluation" else 1
        wait = rng.uniform(0.0, longest)
        process = start(f"pretrain --run-dir {run.name}", folder / "out", door, at, hold=0.05)
        while process.is_alive() and not begun() and time.monotonic() < limit:
            time.sleep(0.002)
        process.join(wait)
        where[moment] += process.is_alive()
        process.kill()
        process.join()
        assert process.exitcode in (-9, 0), (folder / "out").read_text()
        if process.exitcode == 0:
            break  # it came to its end before
    done, _ = ended(start(f"pretrain --run-dir {run.name}", folder / "out"))
    assert done == 0, (folder / "out").read_text()
    print(f"killed: {where}")
    whole, killed = records(folder / "whole"), records(run)
    for event in (None, "eval", "samples"):
        a, b = ([strip(r) for r in log if r.get("event") == event] for log in (whole, killed))
        assert a == b, event  # each step once, and the same to the last bit
    assert [r["step"] for r in killed if "loss" in r] == list(range(1, STEPS + 1))
    states = [checkpoint.load(place / "base")[0] for place in (folder / "whole", run)]
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
