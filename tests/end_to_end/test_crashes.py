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

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parent))
from doors import SETTINGS, corpus, ended, start

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
    """Kills runs `kills` times in all at random moments, lets them end, and compares them with base/whole."""
    folder, seconds = base
    print(f"\n{kills} kills, NANOCHAT_CRASH_SEED={seed}")
    rng, where, number = random.Random(seed), dict.fromkeys(MOMENTS, 0), 0
    while sum(where.values()) < kills:
        run = folder / f"killed-{kills}-{number}"
        shutil.copytree(folder / "begun", run)
        number += 1
        while sum(where.values()) < kills:
            moment = rng.choice(MOMENTS)
            if not killed_at(moment, run, seconds, rng):
                break  # it came to its end before
            where[moment] += 1
        done, _ = ended(start(f"pretrain --run-dir {run.name}", folder / "out"))
        assert done == 0, (folder / "out").read_text()
        assert_same_end(folder / "whole", run)
    print(f"{number} runs, killed: {where}")


def killed_at(moment, run, seconds, rng):
    """Starts the run, or goes on with it, and kills it at such a moment. False if it ended before."""
    output = run.parent / "out"
    door = moment if moment in ("compiler", "evaluation") else ""
    mark, size, limit = Path(f"{output}.{door}"), size_of(run), time.monotonic() + 120
    mark.unlink(missing_ok=True)
    begun = {
        "start": lambda: True,
        "compiler": mark.exists,
        "step": lambda: size_of(run) > size,
        "save": lambda: any(run.glob("base/*.tmp-*")),
        "evaluation": mark.exists,
    }[moment]
    longest = {"start": min(seconds, 4.0), "step": 0.3, "save": 0.1}.get(moment, 0.05)
    wait, at = rng.uniform(0.0, longest), rng.randrange(1, 8) if moment == "evaluation" else 1
    process = start(f"pretrain --run-dir {run.name}", output, door, at, hold=0.05)
    while process.is_alive() and not begun() and time.monotonic() < limit:
        time.sleep(0.002)
    process.join(wait)
    process.kill()
    process.join()
    assert process.exitcode in (-9, 0), output.read_text()
    return process.exitcode == -9


def assert_same_end(whole, run):
    logs = [records(folder) for folder in (whole, run)]
    for event in (None, "eval", "samples"):
        a, b = ([strip(r) for r in log if r.get("event") == event] for log in logs)
        assert a == b, event  # each step once, and the same to the last bit
    assert [r["step"] for r in logs[1] if "loss" in r] == list(range(1, STEPS + 1))
    states = [checkpoint.load(folder / "base")[0] for folder in (whole, run)]
    assert states[0].keys() == states[1].keys()
    for name, leaf in states[0].items():
        np.testing.assert_array_equal(np.asarray(leaf), np.asarray(states[1][name]), err_msg=name)
    assert not [str(path) for path in run.rglob("*") if ".tmp-" in path.name or path.name.startswith(".seen")]
    assert json.loads((run / "status.json").read_text())["state"] == "done"


def size_of(run):
    path = run / "metrics.jsonl"
    return path.stat().st_size if path.exists() else 0


def strip(record):
    """Without what a clock says."""
    return {k: v for k, v in record.items() if k not in ("seconds", "time", "tokens_per_s", "mfu")}


def test_a_few_kills(base):
    kill_and_continue(base, 3, int(os.environ.get("NANOCHAT_CRASH_SEED") or random.randrange(10**6)))


@pytest.mark.slow
def test_many_kills(base):
    seed = int(os.environ.get("NANOCHAT_CRASH_SEED") or random.randrange(10**6))
    kill_and_continue(base, int(os.environ.get("NANOCHAT_KILLS") or 30), seed)
