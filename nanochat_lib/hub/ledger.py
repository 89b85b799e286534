"""downloads.jsonl: what was fetched into this folder, one line a file or a command, and how fast it went.

Lines are appended in one write each, so several processes may add to it and a killed one leaves at most a broken line.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from pathlib import Path

from nanochat_lib.home import base_dir

NAME = "downloads.jsonl"
TELLING = 1 << 24  # bytes from which a download says how fast the line is


def _append(record: dict) -> None:
    with contextlib.suppress(OSError):  # the data are what matters; on a full disk the note is lost, not the file
        handle = os.open(base_dir() / NAME, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            os.write(handle, json.dumps(record).encode() + b"\n")
        finally:
            os.close(handle)


def _records() -> list[dict]:
    records = []
    with contextlib.suppress(OSError):
        for line in (base_dir() / NAME).read_text(encoding="utf-8", errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                if isinstance(record := json.loads(line), dict):
                    records.append(record)
    return records


def note_file(path: Path, size: int, sha256: str | None) -> None:
    """Remembers a verified file: its size in bytes and, where the hub gave one, its sha256."""
    _append({"file": path.relative_to(base_dir()).as_posix(), "size": size, "sha256": sha256})


def sizes() -> dict[str, int]:
    """{path below base_dir(): bytes} of every file that was verified here."""
    return {r["file"]: r["size"] for r in _records() if isinstance(r.get("size"), int) and "file" in r}


def note_rate(fetched: int, seconds: float, workers: int) -> None:
    """Remembers how fast `fetched` bytes came; too few to tell are left out."""
    if fetched >= TELLING and seconds > 0:
        _append({"bytes": fetched, "seconds": round(seconds, 3), "workers": workers, "time": int(time.time())})


def last_rate() -> tuple[float, str] | None:
    """(bytes a second, date) of the last download that could tell; None when there was none."""
    rates = [r for r in _records() if {"bytes", "seconds", "time"} <= r.keys()]
    if not rates:
        return None
    last = rates[-1]
    return last["bytes"] / last["seconds"], time.strftime("%Y-%m-%d", time.localtime(last["time"]))
