"""Stalls by the detector's own ticks, without waiting; and the status file it writes."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from nanochat_lib import beside, stall, status
from nanochat_lib.presets import OpsConfig
from nanochat_lib.status import Status

ROOT = Path(stall.__file__).parents[1]


@pytest.fixture
def detector(tmp_path, monkeypatch):
    """A detector that runs only when `pass_time` lets it; 10 s or 5 median steps are a stall."""
    found = stall.Detector(Status(tmp_path), OpsConfig(stall_seconds=10.0, stall_factor=5.0))
    monkeypatch.setattr(stall, "_detector", found)
    return found


def pass_time(detector, seconds):
    for _ in range(int(seconds)):
        detector.tick(1.0)


def state(detector):
    return json.loads((detector.status.folder / "status.json").read_text())["state"]


def test_no_step_for_long_is_a_stall_and_the_next_one_its_end(detector, capsys):
    for done in range(1, 6):
        stall.step("pretrain", done, 100, 0.5)
    pass_time(detector, 10)
    assert state(detector) == "running" and not detector.stalled
    pass_time(detector, 2)
    found = json.loads((detector.status.folder / "status.json").read_text())
    assert found["state"] == "stalled" and (found["stage"], found["step"], found["of"]) == ("pretrain", 5, 100)
    (dump,) = detector.status.folder.glob("stall-*.txt")
    assert "test_stall.py" in dump.read_text()
    pass_time(detector, 50)
    said = capsys.readouterr().err
    line = "pretrain: stalled, no step was finished for 11 s, a step takes 0.5 s"
    assert said == f"nanochat: {line}; what all threads were doing is in {dump}\n" and found["reason"] == line
    stall.step("pretrain", 6, 100, 0.5)
    pass_time(detector, 1)
    assert state(detector) == "running" and "it goes on" in capsys.readouterr().err
    pass_time(detector, 12)
    assert state(detector) == "stalled"  # it is noticed again


def test_slow_steps_are_given_a_multiple_of_the_median(detector):
    for seconds in (100.0, 6.0, 6.0, 6.0, 0.1):
        stall.step("pretrain", 1, 100, seconds)
    pass_time(detector, 30)
    assert not detector.stalled
    pass_time(detector, 3)
    assert detector.stalled


@pytest.mark.parametrize(("phase", "seconds"), [("evaluation", 30), ("save", 30), ("compile", 60)])
def test_what_takes_longer_has_more_time(detector, phase, seconds):
    stall.step("pretrain", 1, 100, 0.5)
    with stall.phase(phase):
        detector.tick(1.0)
        pass_time(detector, seconds - 1)
        assert not detector.stalled
        pass_time(detector, 3)
        assert detector.stalled
    pass_time(detector, 1)
    assert not detector.stalled and not detector.phases


def test_batches_of_an_evaluation_are_signs_of_life(detector):
    from nanochat_lib import runtime

    with stall.phase("evaluation"):
        for _ in range(20):
            pass_time(detector, 20)
            runtime.check_preempted()
    assert not detector.stalled


def test_before_the_first_step_and_in_a_compiler_there_is_more_time(detector, monkeypatch):
    pass_time(detector, 500)  # set-up: nothing is known of it
    detector.armed = True
    pass_time(detector, 59)
    assert not detector.stalled
    stall.step("pretrain", 1, 100, 0.5)
    monkeypatch.setattr(beside, "compiling", lambda: True)
    pass_time(detector, 59)
    assert not detector.stalled
    monkeypatch.setattr(beside, "compiling", lambda: False)
    pass_time(detector, 1)
    assert detector.stalled


def test_a_suspended_laptop_has_not_stalled(detector):
    stall.step("pretrain", 1, 100, 0.5)
    pass_time(detector, 3)
    detector.tick(8 * 3600.0)  # the clock of the whole machine, or of a stopped process, jumps
    assert not detector.stalled
    pass_time(detector, 2)
    assert not detector.stalled


def test_after_the_last_step_nothing_is_expected(detector):
    with stall.resting():
        stall.step("pretrain", 100, 100, 0.5)
        pass_time(detector, 1)
    pass_time(detector, 500)
    assert not detector.stalled


def test_a_compilation_is_seen():
    import jax
    import jax.numpy as jnp
    from jax._src import compiler

    found, function = [], compiler.compile_or_get_cached

    def looking(*args, **options):
        found.append(beside.compiling())
        return function(*args, **options)

    looking.__code__ = looking.__code__.replace(co_filename=compiler.__file__)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiler, "compile_or_get_cached", looking)
        jax.jit(lambda x: jnp.sin(x) * 1.2345)(1.0)
    assert found and all(found) and not beside.compiling()
    assert "compile_or_get_cached" in Path(compiler.__file__).read_text()


STOP = """
import sys, threading, time
from nanochat_lib import stall
from nanochat_lib.presets import OpsConfig
from nanochat_lib.status import Status
stall.before_exit(lambda reason: print("at last:", reason, flush=True))
with stall.detecting(Status(sys.argv[1]), OpsConfig(stall_seconds=0.5, stall_factor=1.0, on_stall="stop"), "-p1"):
    stall.step("rl", 3, 9, 0.1)
    time.sleep(60)
"""


@pytest.mark.parametrize("folder", ["here", "missing/there"])
def test_with_on_stall_stop_the_process_ends_whatever_hangs(tmp_path, folder):
    (tmp_path / "here").mkdir()
    command = [sys.executable, "-c", STOP, str(tmp_path / folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 75 and done.stdout.startswith("at last: rl: stalled, no step was finished for ")
    if folder == "here":
        assert "start the same command again" in done.stderr
        (dump,) = (tmp_path / folder).glob("stall-*-p1.txt")
        assert "line 9 in <module>" in dump.read_text() and status.read(tmp_path / folder)["state"] == "stalled"


# ---- status.json


def test_the_status_is_written_now_and_then(tmp_path):
    found = Status(tmp_path)
    found.write("running", stage="pretrain", step=0, of=50)
    before = (tmp_path / "status.json").read_bytes()
    found.progress("pretrain", 1, 50)
    assert (tmp_path / "status.json").read_bytes() == before  # cheap: not at every step
    found.written -= status.EVERY
    found.progress("pretrain", 2, 50)
    written = status.read(tmp_path)
    assert abs(written.pop("time") - time.time()) < 60
    assert written == {"state": "running", "stage": "pretrain", "step": 2, "of": 50, "reason": ""}


def test_only_process_0_writes_except_that_the_run_failed(tmp_path):
    Status(tmp_path).write("running", stage="sft", step=3, of=5)
    other = Status(tmp_path, first=False)
    other.write("preempted", "x")
    assert status.read(tmp_path)["state"] == "running"
    other.write("failed", "process 1: the disk is gone")
    found = status.read(tmp_path)
    assert (found["state"], found["stage"], found["step"], found["reason"]) == (
        "failed", "sft", 3, "process 1: the disk is gone",
    )  # fmt: skip


@pytest.mark.parametrize("content", [None, "", "{", "[1]", '{"state": "running", "st'])
def test_a_status_that_cannot_be_read_or_written_stops_nothing(tmp_path, content):
    if content is not None:
        (tmp_path / "status.json").write_text(content)
    assert status.read(tmp_path) == status.EMPTY
    (tmp_path / "file").write_text("")
    Status(tmp_path / "file").write("running")
