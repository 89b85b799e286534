"""One difference between two results: what kind, where, how large, and as a small picture."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

HEAT_ROWS, HEAT_COLUMNS = 10, 24


@dataclasses.dataclass
class Difference:
    kind: str  # none, type, length, keys, shape, dtype, nan, value, object
    message: str  # one sentence
    path: str = ""  # where in a nested result: "[2]", "['loss']", ".mean"
    index: tuple[int, ...] | None = None  # first differing place of an array or sequence
    got: object = None  # the parts that differ, below `path`
    want: object = None
    largest: float | None = None  # largest |got - want|
    allowed: float | None = None
    heat: list[list[float]] | None = None  # |got - want| between 0 and 1, at most 10 by 24

    def __post_init__(self) -> None:
        if self.path and not self.message.startswith("at "):
            self.message = f"at {self.path}: {self.message}"


def place(index: tuple[int, ...]) -> str:
    return f"[{', '.join(map(str, index))}]"


def number(value: object) -> str:
    value = value.item() if hasattr(value, "item") else value
    return f"{value:.5g}" if isinstance(value, (float, complex)) else str(value)


def heat(off: np.ndarray) -> list[list[float]]:
    """Differences of any array as a small picture: its last axis across, all others down, blocks by their largest."""
    off = np.nan_to_num(np.asarray(off, np.float64), nan=np.inf, posinf=np.inf)
    table = off.reshape(-1, off.shape[-1]) if off.ndim else off.reshape(1, 1)
    for axis, most in ((0, HEAT_ROWS), (1, HEAT_COLUMNS)):
        parts = np.array_split(table, min(most, table.shape[axis]), axis=axis)
        table = np.concatenate([part.max(axis=axis, keepdims=True) for part in parts], axis=axis)
    finite = table[np.isfinite(table)]
    top = finite.max() if finite.size and finite.max() > 0 else 1.0
    return [[1.0 if math.isinf(v) else float(v / top) for v in row] for row in table.tolist()]
