"""Exceptions of a learner's function in words: what, on which line, why, probably; and functions that never end."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(frozen=True)
class Raised:
    """An exception of a learner's function as plain data."""

    kinds: tuple[str, ...]  # "module:name" of its class and of those above it
    text: str = ""
    line: str = ""  # of the learner's function, as a sentence
    stub: bool = False  # the NotImplementedError of an exercise's stub
    endless: bool = False  # not raised by the function: it was stopped

    @property
    def name(self) -> str:
        return self.kinds[0].split(":")[-1]

    @property
    def words(self) -> str:
        first = (self.text.strip().splitlines() or [""])[0]
        return f"{self.name}: {first}" if first else self.name

    def is_a(self, kind: type[BaseException]) -> bool:
        return kind_name(kind) in self.kinds

    @property
    def cause(self) -> str:
        """The likely cause, "" when nothing fits."""
        if self.endless:
            return "does a loop never end?"
        if self.is_a(NameError):
            return "a name that the cell does not know: a typing mistake, or a cell above that was not run"
        if self.name in ("TracerBoolConversionError", "ConcretizationTypeError", "TracerIntegerConversionError"):
            return "Python's if, while or int() on a traced value; use jnp.where, lax.cond or a static argument"
        if self.name == "TracerArrayConversionError":
            return "numpy on a traced value; use jax.numpy"
        if self.is_a(TypeError) and "positional argument" in self.text:
            return "the function takes other arguments than the exercise gives it; keep the first line as it was"
        if self.is_a(IndexError):
            return "an index past the end: does a loop run one step too far?"
        if self.is_a(RecursionError):
            return "the function calls itself without end"
        shapes = ("broadcast", "incompatible shapes", "dot_general", "core dimension")
        if any(words in self.text for words in shapes):
            return "shapes that do not fit together: print both .shape before this line"
        return ""


def kind_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def raised(error: BaseException, fn: Callable) -> Raised:
    """What an exception says, and where in `fn` it came up."""
    kinds = tuple(kind_name(kind) for kind in type(error).__mro__)
    return Raised(kinds, str(error), _line(error, fn), _is_stub(error), isinstance(error, TookTooLong))


def _is_stub(error: BaseException) -> bool:
    """True for the NotImplementedError of an exercise's stub, not for one from inside a library."""
    if not isinstance(error, NotImplementedError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return not frames or not any(part in frames[-1].filename for part in ("site-packages", "dist-packages"))


def _line(error: BaseException, fn: Callable) -> str:
    """The line of the learner's function in which the exception came up."""
    code = getattr(inspect.unwrap(fn) if callable(fn) else fn, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    if code is None:
        return ""
    inside = [frame for frame in frames if frame.filename == code.co_filename and frame.line]
    return f"raised at: {inside[-1].line}" if inside else ""


@contextmanager
def staying() -> Iterator[None]:
    """Within the block os._exit raises SystemExit instead of ending Python silently, in this process at least."""
    leave, process = os._exit, os.getpid()

    def stay(status: int) -> None:
        if os.getpid() != process:  # a forked child ends as it always does
            leave(status)
        raise SystemExit(f"os._exit({status}) would end Python at once; return a result instead")

    os._exit = stay
    try:
        yield
    finally:
        os._exit = leave


class TookTooLong(BaseException):
    """A case ran longer than it may. No Exception: a learner's `except Exception` inside the loop must not catch it."""


@contextmanager
def patience(seconds: float, busy: bool = False) -> Iterator[None]:
    """Stops the block with TookTooLong after `seconds`, where the system can (main thread, POSIX).

    `busy`: of processor time, so that other work on the machine does not count.
    """
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TookTooLong(f"still running after {seconds:.0f} seconds, so it was stopped")

    number, timer = (signal.SIGPROF, signal.ITIMER_PROF) if busy else (signal.SIGALRM, signal.ITIMER_REAL)
    before = signal.signal(number, stop)
    signal.setitimer(timer, seconds)
    try:
        yield
    finally:
        signal.setitimer(timer, 0)
        signal.signal(number, before)
