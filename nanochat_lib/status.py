"""RUN/status.json: what became of a run, for programs that watch it from outside.

{"state": "running" | "done" | "failed" | "preempted" | "stalled", "stage", "step", "of" (its last step), "time" (unix
seconds of writing), "reason"}. A process that was killed leaves "running" with a time that grows old.
"""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path

from nanochat_lib.errors import UserError
from nanochat_lib.storage import atomic_write_json

FILE = "status.json"
EVERY = 30.0  # seconds between writes while steps come
EMPTY = {"state": "running", "stage": "", "step": 0, "of": 0, "time": 0.0, "reason": ""}


def read(folder: str | Path) -> dict:
    """What status.json says; EMPTY where there is none, or it cannot be read."""
    try:
        found = json.loads((Path(folder) / FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return dict(EMPTY)
    return EMPTY | found if isinstance(found, dict) else dict(EMPTY)


class Status:
    """Writes the file of the run in `folder`; a process other than the first only writes that the run failed.

    A disk that refuses is no reason to stop: the run itself says so at its next save.
    """

    def __init__(self, folder: str | Path, first: bool = True) -> None:
        self.folder, self.first = Path(folder), first
        self.now = read(folder)
        self.written = -EVERY

    def write(self, state: str, reason: str = "", **place: object) -> None:
        """`place`: stage, step, of, where they have changed."""
        self.now |= {"state": state, "reason": reason, **place, "time": time.time()}
        if self.first or state == "failed":
            with contextlib.suppress(UserError, OSError):
                atomic_write_json(self.folder / FILE, self.now)
        self.written = time.monotonic()

    def progress(self, stage: str, step: int, of: int) -> None:
        """After a step: written now and then."""
        self.now |= {"stage": stage, "step": step, "of": of}
        if time.monotonic() - self.written >= EVERY:
            self.write("running")
