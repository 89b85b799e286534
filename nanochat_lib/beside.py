"""What a thread can do beside a main thread that does not come back: speak, look at it, write down where it is."""

from __future__ import annotations

import faulthandler
import sys
import threading
from collections.abc import Callable
from pathlib import Path


def say(line: str) -> None:
    print(f"nanochat: {line}", file=sys.stderr, flush=True)


def briefly(call: Callable[[], object], seconds: float = 5.0) -> None:
    """Does `call`, but waits no longer than that for it: output and disks may hang too."""
    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)


def compiling() -> bool:
    """Whether the main thread is in XLA's compiler."""
    frame = sys._current_frames().get(threading.main_thread().ident)
    while frame:
        if frame.f_code.co_filename.endswith("jax/_src/compiler.py"):
            return True
        frame = frame.f_back
    return False


def dump(path: Path) -> None:
    """Writes where every Python thread of this process is."""
    with open(path, "w", encoding="utf-8") as out:
        faulthandler.dump_traceback(out, all_threads=True)
