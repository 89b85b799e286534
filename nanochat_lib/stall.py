"""A run that stands still: noticed by a thread, shown by the stacks of all threads, and ended when that is wanted.

Signs of life are finished steps, evaluation batches and decoded tokens (runtime.check_preempted). No sign for
`ops.stall_factor` median steps, and at least `ops.stall_seconds`, is a stall; evaluations, saves and compilations may
take a multiple of it. Time counts in the thread's own ticks, so that a suspended laptop or a stopped process, whose
clock jumps, has not stalled.
"""

from __future__ import annotations

import contextlib
import os
import statistics
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator

from nanochat_lib import beside, stopping
from nanochat_lib.run_config import OpsConfig
from nanochat_lib.status import Status

POLL = 1.0
PATIENCE = {"step": 1.0, "evaluation": 3.0, "save": 3.0, "compile": 6.0}  # times the limit; "compile": a first step too
STEPS = 101  # that the median is taken of
CODE = 75  # exit code of a run that was ended: start the same command again


class Detector(threading.Thread):
    """Watches one stage. It is armed by the first step, evaluation or save, and disarmed by `resting`."""

    def __init__(self, status: Status, ops: OpsConfig, label: str = "") -> None:
        super().__init__(name="stall", daemon=True)
        self.status, self.ops, self.label = status, ops, label
        self.steps: deque[float] = deque(maxlen=STEPS)
        self.phases: list[str] = []
        self.idle, self.seen = 0.0, stopping.beats
        self.armed = self.stalled = False
        self.ended = threading.Event()
        self.poll = min(POLL, ops.stall_seconds / 10)

    def run(self) -> None:
        last = time.monotonic()
        while not self.ended.wait(self.poll):
            now = time.monotonic()
            self.tick(now - last)
            last = now

    def tick(self, passed: float) -> None:
        if stopping.beats != self.seen:
            if self.stalled:
                self.stalled = False
                self.status.write("running")
                beside.say(f"{self.status.now['stage']}: it goes on, after {self.idle:.0f} s")
            self.seen, self.idle = stopping.beats, 0.0
            return
        if self.armed:
            self.idle += min(passed, 3 * self.poll)  # longer than that, and this thread has not run either
            if not self.stalled and self.idle > self.limit() and not stopping.noticed():
                self.alarm()

    def limit(self) -> float:
        """Seconds without a sign of life, from here on a stall."""
        median = statistics.median(self.steps) if self.steps else 0.0
        phase = self.phases[-1] if self.phases else "step" if self.steps else "compile"
        patience = PATIENCE[phase]
        if patience < PATIENCE["compile"] and beside.compiling():
            patience = PATIENCE["compile"]
        return patience * max(self.ops.stall_seconds, self.ops.stall_factor * median)

    def alarm(self) -> None:
        self.stalled = True
        path = self.status.folder / f"stall-{time.strftime('%Y%m%d-%H%M%S')}{self.label}.txt"
        stop = self.ops.on_stall == "stop"
        where = self.phases[-1] if self.phases else "step"
        usual = f", a step takes {statistics.median(self.steps):.2g} s" if self.steps else ""
        line = f"{self.status.now['stage']}: stalled, no {where} was finished for {self.idle:.0f} s{usual}"

        def report() -> None:
            beside.dump(path)
            self.status.write("stalled", line)
            also = ", and is ended: start the same command again" if stop else ""
            beside.say(f"{line}; what all threads were doing is in {path}{also}")

        beside.briefly(report, 10.0)
        if stop:
            if _before_exit:
                _before_exit(line)
            os._exit(CODE)


_detector: Detector | None = None
_before_exit: Callable[[str], None] | None = None


def before_exit(call: Callable[[str], None] | None) -> None:
    """`call(reason)` is made before a stalled process is ended."""
    global _before_exit
    _before_exit = call


@contextlib.contextmanager
def detecting(status: Status, ops: OpsConfig, label: str = "") -> Iterator[None]:
    """In the block stalls are noticed. `label`: part of the dump's name, where several processes share the folder."""
    global _detector
    before, _detector = _detector, Detector(status, ops, label)
    _detector.start()
    try:
        yield
    finally:
        _detector.ended.set()
        _detector = before


def starts(stage: str, done: int, of: int) -> None:
    """The stage is about to go on after step `done`."""
    stopping.keeps(done)
    if _detector:
        _detector.status.write("running", stage=stage, step=done, of=of)


def step(stage: str, done: int, of: int, seconds: float) -> None:
    """A step of the stage was finished, which took so many seconds."""
    stopping.beats += 1
    if _detector:
        _detector.steps.append(seconds)
        _detector.armed = True
        _detector.status.progress(stage, done, of)


@contextlib.contextmanager
def phase(name: str) -> Iterator[None]:
    """In the block work of that kind (a key of PATIENCE) is done instead of steps."""
    detector = _detector
    if detector is None:
        yield
        return
    stopping.beats += 1
    detector.phases.append(name)
    detector.armed = True
    try:
        yield
    finally:
        detector.phases.pop()
        stopping.beats += 1


@contextlib.contextmanager
def resting() -> Iterator[None]:
    """After the block steps are over: what comes then has no measure of its own."""
    try:
        yield
    finally:
        if _detector:
            _detector.armed = False
