"""SIGTERM and Ctrl-C as such: when they interrupt, when they are only noted, when the process is ended for it."""

import json
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from nanochat_lib import stopping
from nanochat_lib.preempted import Interrupted, Preempted

ROOT = Path(stopping.__file__).parents[1]
START = """
import os, signal, sys, threading, time
from nanochat_lib import runtime, stopping
from nanochat_lib.preempted import Interrupted, Preempted
signal.signal(signal.SIGINT, signal.default_int_handler)
me = lambda number: os.kill(os.getpid(), number)
def busy(seconds):
    end = time.monotonic() + seconds
    while time.monotonic() < end: pass
def in_c(seconds):
    import ctypes
    libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(128)
    libc.pthread_mutex_lock(mutex)
    threading.Timer(seconds, libc.pthread_mutex_unlock, [mutex]).start()
    libc.pthread_mutex_lock(mutex)
"""


def child(code, limit=30):
    return subprocess.run([sys.executable, "-c", START + code], cwd=ROOT, capture_output=True, text=True, timeout=limit)


def test_it_interrupts_where_nothing_is_lost():
    done = child("""
before = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
for number, kind in ((signal.SIGTERM, Preempted), (signal.SIGINT, Interrupted)):
    try:
        with stopping.watching():
            me(number)
            busy(5)
    except KeyboardInterrupt as stop:
        assert type(stop) is kind and not stop.agreed, stop
        print(stop.code, stop)
    else:
        raise SystemExit("not interrupted")
assert before == [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGINT)]
assert threading.active_count() == 1 and len(os.listdir("/proc/self/fd")) < 8
""")
    lines = [f"{code} stopped by {word}; the same command goes on where this one left off" for code, word in
             ((75, "SIGTERM"), (130, "Ctrl-C"))]  # fmt: skip
    assert done.returncode == 0 and done.stdout.splitlines() == lines, done.stderr


def test_in_a_loop_it_is_noted_until_the_loop_asks():
    done = child("""
with stopping.watching():
    try:
        with stopping.deferred():
            me(signal.SIGTERM)
            busy(0.7)
            print("still here", stopping.noticed().__name__)
            runtime.check_preempted()
    except Preempted:
        me(signal.SIGTERM)  # the same request: it disturbs nothing any more
        busy(0.2)
        print("saved")
""")
    assert done.returncode == 0 and done.stdout == "still here Preempted\nsaved\n", done.stderr
    assert done.stderr.count("SIGTERM: this step is finished and saved") == 1


def test_a_notice_that_nobody_asked_for_comes_at_the_end_of_the_loop():
    done = child("""
with stopping.watching():
    with stopping.deferred():
        me(signal.SIGINT)
        busy(0.1)
        print("saved", flush=True)
""")
    assert done.stdout == "saved\n" and "Interrupted: stopped by Ctrl-C" in done.stderr


@pytest.mark.parametrize(("number", "code"), [("SIGTERM", 75), ("SIGINT", 130)])
def test_who_cannot_be_interrupted_is_ended_after_the_grace_time(number, code):
    done = child(f"""
words = []
with stopping.watching(0.5), stopping.last_words(lambda line: print("said:", line, flush=True)):
    threading.Timer(0.3, me, [signal.{number}]).start()
    in_c(20)
""")
    assert done.returncode == code and "it was busy still and is ended" in done.stderr
    assert done.stdout.startswith("said: stopped by ") and "what was finished before counts" in done.stdout


def test_a_save_is_finished_first_and_its_end_leaves_time_to_end_well():
    done = child("""
stopping.keeps(40)
stopping.UNWIND = 1.5
with stopping.watching(0.3, whole=True), stopping.deferred():
    me(signal.SIGTERM)
    with stopping.saving():
        in_c(1.0)
    print("saved", flush=True)
    busy(0.8)
    print("unwound", flush=True)
    in_c(20)
""")
    assert (
        done.returncode == 75 and done.stdout == "saved\nunwound\n" and "step 40, the last that is saved" in done.stderr
    )


def test_a_process_that_has_to_end_is_held_to_it_until_it_has():
    done = child("""
try:
    with stopping.watching(1.0, whole=True):
        me(signal.SIGTERM)
        busy(5)
except Preempted:
    pass
in_c(20)  # a thread or an exit handler that hangs
""")
    assert done.returncode == 75, done.stderr


def test_a_second_signal_ends_it_at_once_and_the_same_one_twice_does_not():
    done = child("""
with stopping.watching(60), stopping.deferred():
    me(signal.SIGTERM)
    busy(0.3)
    me(signal.SIGTERM)
    busy(0.3)
    print("still here", flush=True)
    threading.Timer(stopping.AGAIN, me, [signal.SIGTERM]).start()
    in_c(20)
""")
    assert done.returncode == 75 and done.stdout == "still here\n" and "a second signal" in done.stderr


def test_a_job_that_was_born_deaf_to_ctrl_c_stays_so():
    done = child("""
signal.signal(signal.SIGINT, signal.SIG_IGN)
with stopping.watching():
    me(signal.SIGINT)
    busy(0.2)
    print("went on")
""")
    assert done.returncode == 0 and done.stdout == "went on\n", done.stderr


def test_a_forked_child_is_ended_like_any_process_and_its_parent_is_not():
    done = child("""
with stopping.watching(1.0), stopping.deferred():
    for _ in range(40):  # as soon as it is there, with its parent's handlers
        sleeper = os.fork()
        if not sleeper:
            time.sleep(100)
        os.kill(sleeper, signal.SIGTERM)
        assert os.waitstatus_to_exitcode(os.waitpid(sleeper, 0)[1]) == -signal.SIGTERM
    if not (sleeper := os.fork()):
        os._exit(stopping.is_deferred())  # of its parent's block it knows nothing
    assert os.waitstatus_to_exitcode(os.waitpid(sleeper, 0)[1]) == 0
    busy(0.7)
    assert stopping.noticed() is None
    print("went on")
""")
    assert done.returncode == 0 and done.stdout == "went on\n", done.stderr


def test_output_that_nobody_reads_does_not_keep_it_alive():
    process = subprocess.Popen(
        [sys.executable, "-c", START + "import fcntl\n"
         "with stopping.watching(0.5), stopping.deferred():\n"
         "    fcntl.fcntl(2, 1031, 4096); os.set_blocking(2, False)\n"
         "    try:\n        while True: os.write(2, b'x' * 4096)\n    except BlockingIOError: pass\n"
         "    os.set_blocking(2, True)\n"
         "    print('full', flush=True); in_c(60)\n"],
        cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout.readline() == b"full\n"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 75
    finally:
        process.kill()
        process.communicate()


def test_beside_the_main_thread_and_within_itself_it_does_nothing():
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def elsewhere():
        with stopping.watching():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert found == [before]
    with stopping.watching():
        mine = signal.getsignal(signal.SIGTERM)
        with stopping.watching():
            assert signal.getsignal(signal.SIGTERM) == mine != before
        assert signal.getsignal(signal.SIGTERM) == mine
    assert signal.getsignal(signal.SIGTERM) == before


class Others:
    """The link to the other processes of a run, as this process sees it."""

    def __init__(self, heard=False):
        self.told, self.said = [], heard

    def link(self):
        return stopping.Link(1, lambda: self.told.append(1), lambda: self.said)


@pytest.fixture
def several():
    others = Others()
    stopping.link(others.link())
    yield others
    stopping.link(None)


def test_the_others_are_told_before_a_process_of_several_is_gone():
    done = child("""
def tell():
    time.sleep(0.5)
    os.write(1, b"told")
stopping.link(stopping.Link(1, tell, lambda: False))
with stopping.watching(whole=True):
    me(signal.SIGTERM)
    time.sleep(20)
""")
    assert done.returncode == Preempted.code and done.stdout == "told", done.stderr
    assert "no training was under way" in done.stderr


def wait_for(condition, limit=20):
    end = time.monotonic() + limit
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    assert condition()


def test_a_notice_goes_to_the_other_processes_and_nobody_stops_alone(several, monkeypatch):
    from nanochat_lib import runtime

    with pytest.raises(Preempted), stopping.watching(60), stopping.deferred():
        signal.raise_signal(signal.SIGTERM)
        wait_for(lambda: several.told)
        monkeypatch.setattr(runtime, "_notifier", None)  # no preemption service: nobody finds a common step
        runtime.check_preempted()
        with pytest.raises(Preempted) as stop, stopping.alone():
            runtime.check_preempted()
        stopping.link(None)  # else this process would be ended: the others know
    assert several.told == [1] and not stop.value.agreed


def test_a_thread_that_goes_at_its_own_pace_decides_for_itself_only(several):
    inside, leave = threading.Event(), threading.Event()

    def elsewhere():
        with stopping.alone():
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=elsewhere)
    with stopping.alone():
        thread.start()
        assert inside.wait(20) and stopping.deciding_alone()
    assert not stopping.deciding_alone()  # the other thread still is in its block
    leave.set()
    thread.join()
    assert not stopping.deciding_alone()


@pytest.mark.parametrize(("before", "between"), [(0.2, 0), (0, 0.2)])
def test_a_notice_is_whole_whenever_the_thread_looks(before, between):
    """The thread runs between any two instructions of the handler: it must never see half a notice."""
    done = child(f"""
def tell():
    time.sleep(0.3)
    os.write(1, b"told")
stopping.link(stopping.Link(1, tell, lambda: False))
clock = time.monotonic
def slowly():
    now = clock()
    if threading.current_thread() is threading.main_thread():
        time.sleep({before})
    return now
begin = threading.Thread.start
def later(self):
    if threading.current_thread() is threading.main_thread() and self.name != "stopping":
        time.sleep({between})
    begin(self)
threading.Thread.start = later
with stopping.watching(whole=True):
    time.monotonic = slowly
    me(signal.SIGTERM)
    time.sleep(20)
""")
    assert done.returncode == Preempted.code and done.stdout == "told", done.stderr
    assert "no training was under way" in done.stderr


def test_a_service_that_fails_is_no_preemption(several, monkeypatch):
    from jax.experimental import multihost_utils

    from nanochat_lib import runtime

    def off(step):
        raise RuntimeError("preemption sync manager has not been initialized")

    monkeypatch.setattr(runtime, "_notifier", 1)
    monkeypatch.setattr(runtime, "_tell", lambda: None)
    monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", off)
    with stopping.watching(60), stopping.deferred():
        runtime.check_preempted()
        monkeypatch.setattr(multihost_utils, "reached_preemption_sync_point", lambda step: True)
        with pytest.raises(Preempted) as stop:
            runtime.check_preempted()
    assert stop.value.agreed and not several.told


def test_a_notice_of_another_process_counts_here(several):
    several.said = True
    with stopping.watching(60), stopping.deferred():
        wait_for(lambda: stopping.noticed() is Preempted)
        stopping.link(None)
        stopping._watch.notice = None
    assert not several.told  # it came from there


def test_the_message_says_where_the_run_goes_on():
    assert str(Preempted().after("sft", 3, 3)) == (
        "sft: stopped by SIGTERM before another step was done; the same command goes on from step 3"
    )
    assert str(Interrupted(agreed=True).after("sft", 3, 5)) == (
        "sft: stopped by Ctrl-C after step 5, which is saved; the same command goes on from there"
    )
    assert Interrupted().after("sft", 3, 5).code == 130 and Preempted("x", True).after("sft", 0, 0).agreed


def test_an_error_that_is_felt_before_its_notice_is_that_notice(tmp_path):
    """One of two processes has ended, the other's connection breaks before it has heard why."""
    done = child(f"""
from pathlib import Path
from nanochat_lib.run_config import OpsConfig
from nanochat_lib.supervise import supervised
said = []
with stopping.watching(whole=True):
    stopping.link(stopping.Link(1, lambda: None, lambda: bool(said)))
    for folder in ("alone", "overtaken"):
        try:
            Path({str(tmp_path)!r}, folder).mkdir()
            with supervised(Path({str(tmp_path)!r}, folder), "pretrain", OpsConfig()):
                said += [1] if folder == "overtaken" else []
                raise RuntimeError("connection lost")
        except RuntimeError as error:
            print(error, stopping.overtaken())
        except Preempted as stop:
            print(stop)
            sys.exit(stop.code)
""")
    assert done.returncode == 75, done.stderr
    first, second = done.stdout.splitlines()
    assert first == "connection lost None"
    assert second.startswith("stopped by SIGTERM, while another process of the run ended; the same command goes on")
    states = [json.loads((tmp_path / folder / "status.json").read_text())["state"] for folder in ("alone", "overtaken")]
    assert states == ["failed", "preempted"]
