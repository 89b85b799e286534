"""Tile sizes of splash attention: a table of what fits each chip, and a rule that chooses within it.

Measured in public, all on a v6e at length 2048, one size for everything: with tiles of 128 (the library's default) a
whole model reached 8.8 % of the chip's peak, less than with plain XLA; with 256 17 %, with 512 22 %, with 1024 25 %.
Tiles of 2048 do not fit the fast memory. Elsewhere tiles of 512, computed in halves, took a model from 22 % to 41 %.

The rule: a tile costs its scores, plus `STEP` for beginning it. Large tiles begin seldom, but a tile that a window cuts
computes hidden scores too, so the best size depends on length and window. The four figures above only say that `STEP`
is at least about 100 thousand scores; anywhere from 150 to 300 thousand the choices at length 2048 are the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from nanochat_lib.errors import UserError

LANES = 128  # the width of a TPU's registers; lengths and tiles are multiples of it
STEP = 200_000  # scores that could be computed while one tile is begun

# By chip and head size: the largest tile, and the largest part of it that is computed at once. Compiled ahead of time,
# forward and backward, in float32 and bfloat16.
LARGEST = {
    ("v6e", 128): (1024, 512),
    ("v6e", 256): (1024, 512),
    ("v5e", 128): (1024, 512),
    ("v5e", 256): (512, 512),
    ("v5p", 128): (1024, 512),
    ("v5p", 256): (512, 512),
    ("v4", 128): (1024, 512),
    ("v4", 256): (512, 512),
}


@dataclass(frozen=True)
class Tiles:
    """Queries (q) and keys (kv) of a tile, forward and backward (dkv), in tokens; `compute`: keys of one product."""

    length: int  # the padded length that the tiles divide
    block_q: int
    block_kv: int
    block_kv_compute: int
    block_q_dkv: int
    block_kv_dkv: int
    block_kv_dkv_compute: int
    use_fused_bwd_kernel: bool = True  # one backward kernel for dq, dk and dv, which makes the weights once

    def __str__(self) -> str:
        return f"{self.block_q} × {self.block_kv}, computed by {self.block_kv_compute}"


def padded(length: int, largest: int = 1024) -> int:
    """The least multiple of 128 from `length` on that has a divisor between 256 and `largest` (or is 128)."""
    lanes, sizes = -(-length // LANES), range(2, largest // LANES + 1)
    while lanes > 1 and sizes and all(lanes % size for size in sizes):
        lanes += 1
    return lanes * LANES


def visible(length: int, block: int, window: int) -> int:
    """Tiles of block × block that a causal window leaves something of."""
    return sum(i - max(0, i * block - window) // block + 1 for i in range(length // block))


@lru_cache(maxsize=256)
def tiles(chip: str, head_dim: int, length: int, window: int) -> Tiles:
    """The tiles for sequences of `length` tokens that see `window` tokens before their own.

    chip: "v6e", "v5e", "v5p", "v4"; another name, or "", takes what fits all of them. The tiles divide the padded
    length, which is `length` itself for multiples of 128 with a divisor of at least 256.
    """
    if head_dim > max(d for _, d in LARGEST) or length < 1 or window < 0:
        raise UserError(f"splash attention: head size {head_dim} (at most 256), length {length}, window {window}")
    row = min(d for _, d in LARGEST if head_dim <= d)
    fitting = min(sizes for (_, d), sizes in LARGEST.items() if d == row)
    largest, largest_compute = LARGEST.get((chip, row), fitting)
    total = padded(length, largest)
    sizes = [size for size in range(LANES, min(total, largest) + 1, LANES) if total % size == 0]
    block = min(sizes, key=lambda size: (visible(total, size, window) * (size * size + STEP), -size))
    most = min(largest_compute, block if block < 512 else block // 2)
    compute = max(size for size in range(LANES, most + 1, LANES) if block % size == 0)
    return Tiles(total, block, block, compute, block, block, compute)


def describe(chip: str, head_dim: int, length: int, windows: tuple[int, ...]) -> dict[str, str]:
    """What preflight and report show: for every window of the model its tiles and how many of them are computed."""
    lines = {}
    for window in sorted(set(windows)):
        size = tiles(chip, head_dim, length, window)
        count, side = visible(size.length, size.block_q, window), size.length // size.block_q
        lines[f"window {window}"] = f"tiles {size}; {count} of {side * side} are visible"
    return lines
