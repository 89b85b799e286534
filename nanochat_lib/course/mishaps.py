"""Exceptions of a learner's function in words: what, on which line, why, probably; and functions that never end."""

from __future__ import annotations

import inspect
import os
import signal
import threading
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager


def is_stub(error: BaseException | None) -> bool:
    """True for the NotImplementedError of an exercise's stub, not for one from inside a library."""
    if not isinstance(error, NotImplementedError):
        return False
    frames = traceback.extract_tb(error.__traceback__)
    return not frames or not any(part in frames[-1].filename for part in ("site-packages", "dist-packages"))


def error_words(error: BaseException) -> str:
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def error_line(error: BaseException, fn: Callable) -> str:
    """The line of the learner's function in which the exception came up."""
    code = getattr(inspect.unwrap(fn) if callable(fn) else fn, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    if code is None:
        return ""
    inside = [frame for frame in frames if frame.filename == code.co_filename and frame.line]
    return f"raised at: {inside[-1].line}" if inside else ""


def error_cause(error: BaseException) -> str:
    text = str(error)
    if isinstance(error, TookTooLong):
        return "does a loop never end?"
    if isinstance(error, NameError):
        return "a name that the cell does not know: a typing mistake, or a cell above that was not run"
    if type(error).__name__ in ("TracerBoolConversionError", "ConcretizationTypeError", "TracerIntegerConversionError"):
        return "Python's if, while or int() on a traced value; use jnp.where, lax.cond or a static argument"
    if type(error).__name__ == "TracerArrayConversionError":
        return "numpy on a traced value; use jax.numpy"
    if isinstance(error, TypeError) and "positional argument" in text:
        return "the function takes other arguments than the exercise gives it; keep the first line as it was"
    if isinstance(error, IndexError):
        return "an index past the end: does a loop run one step too far?"
    if isinstance(error, RecursionError):
        return "the function calls itself without end"
    if "broadcast" in text or "incompatible shapes" in text or "dot_general" in text or "core dimension" in text:
        return "shapes that do not fit together: print both .shape before this line"
    return ""


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
def patience(seconds: float) -> Iterator[None]:
    """Stops the block with TookTooLong after `seconds`, where the system can (main thread, POSIX)."""
    if not hasattr(signal, "setitimer") or threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(*_: object) -> None:
        raise TookTooLong(f"still running after {seconds:.0f} seconds, so it was stopped")

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
