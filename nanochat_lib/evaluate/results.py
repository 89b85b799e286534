"""Results of an evaluation, a file a task: what a stopped evaluation goes on from, and what two models are compared by.

    RUN/evaluations/<model>/step_00001234/<kind>-<hash>/options.json, <task>.json

The hash is over everything that decides the numbers: the weights, the tokenizer, the questions, the options. So a
result is found again by who needs exactly that one, and never taken for another's. A file is whole or absent.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import numpy as np

from nanochat_lib import distributed
from nanochat_lib.errors import UserError
from nanochat_lib.storage import atomic_write_json, read_json

FOLDER = "evaluations"
OPTIONS = "options.json"


def pack(right: np.ndarray) -> dict:
    """Right or wrong, (N,) or (N, S), -1 where nothing was scored, in a bit or two each."""
    right = np.asarray(right, np.int8)
    encode = lambda bits: base64.b64encode(np.packbits(bits.ravel()).tobytes()).decode()  # noqa: E731
    left_out = right < 0
    return {"shape": list(right.shape), "right": encode(right > 0)} | (
        {"left_out": encode(left_out)} if left_out.any() else {}
    )


def unpack(stored: dict) -> np.ndarray:
    """Inverse of `pack`, int8."""
    shape = tuple(stored["shape"])
    count = int(np.prod(shape))

    def decode(name: str) -> np.ndarray:
        raw = np.frombuffer(base64.b64decode(stored[name]), np.uint8)
        return np.unpackbits(raw, count=count).reshape(shape).astype(np.int8)

    right = decode("right")
    return np.where(decode("left_out") > 0, np.int8(-1), right) if "left_out" in stored else right


class Results:
    """The results of one evaluation, in a folder of its own below `place`; `place` None keeps nothing.

    Process 0 alone reads and writes. `saved()` is called in it after each task.
    """

    def __init__(self, place: Path | None, kind: str, options: dict, saved: Callable[[], None] = lambda: None) -> None:
        text = json.dumps({"kind": kind} | options, sort_keys=True)
        self.options, self.saved = {"kind": kind} | options, saved
        self.folder = None if place is None else place / f"{kind}-{hashlib.sha256(text.encode()).hexdigest()[:12]}"

    def path(self, task: str) -> Path:
        return self.folder / f"{quote(task, safe=' ')}.json"

    def done(self, identities: dict[str, str]) -> dict[str, dict]:
        """{task: stored result} of those that are there and ask the same questions. All processes call it together."""
        if self.folder is None:
            return {}

        def read() -> dict[str, dict]:
            found = {}
            for task, identity in identities.items():
                stored = read_result(self.path(task)) if self.path(task).exists() else None
                if stored and stored["identity"] == identity:
                    found[task] = stored
            return found

        return distributed.from_first(read) if distributed.count() > 1 else read()

    def save(self, task: str, identity: str, figures: dict, right: np.ndarray) -> None:
        if self.folder is None or not distributed.first():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        if not (self.folder / OPTIONS).exists():
            atomic_write_json(self.folder / OPTIONS, self.options)
        content = {"task": task, "identity": identity, "figures": figures} | pack(right)
        atomic_write_json(self.path(task), content, indent=None)
        self.saved()


def read_result(path: Path) -> dict | None:
    """A stored task's result, None when the file is damaged: it is computed again."""
    try:
        stored = read_json(path)
        good = isinstance(stored["figures"], dict) and isinstance(stored["identity"], str)
        return stored if good and unpack(stored).size else None
    except (UserError, KeyError, TypeError, ValueError):
        return None


# ---- each process its share


def own_share(count: int) -> list[int]:
    """The examples of this process: every n-th of `count`."""
    return list(range(distributed.index(), count, distributed.count()))


def gather_shares(values: np.ndarray, count: int, fill: int = -1) -> np.ndarray:
    """(count, …) in the examples' order, from every process's `values` for its `own_share`. All call this together."""
    world = distributed.count()
    if world == 1:
        return values
    most = -(-count // world)
    padded = np.full((most, *values.shape[1:]), fill, values.dtype)
    padded[: len(values)] = values
    every = distributed.gather(padded).reshape(world, most, *values.shape[1:])
    return every.swapaxes(0, 1).reshape(world * most, *values.shape[1:])[:count]
