"""What the splash kernels of one micro-step cost, by their own tiles: the compiler does not cost custom kernels."""

from __future__ import annotations

from dataclasses import dataclass

from nanochat_lib.hardware import Chip
from nanochat_lib.kernels.tiles import tiles, visible
from nanochat_lib.sizing import GPTConfig

FORWARD, BACKWARD = 2, 5  # products of two tiles: q·kᵀ and p·v; the scores again, dv, dp, dq and dk


@dataclass(frozen=True)
class AttentionCost:
    """Of one micro-batch on one device, forward and backward."""

    flops: float  # of all computed tiles, hidden scores in them included
    padded_flops: float  # what the matrix unit spends on them
    hbm_bytes: float

    def seconds(self, chip: Chip) -> float:
        """At the chip's peak, or at the speed of its memory, whichever is slower."""
        return max(self.padded_flops / chip.peak["bfloat16"], self.hbm_bytes / chip.bandwidth)


def attention_cost(model: GPTConfig, chip: Chip, rows: int) -> AttentionCost:
    """The kernels' cost for `rows` sequences in bfloat16 on a TPU."""
    d, unit = model.head_dim, chip.matrix_unit
    flops = moved = 0.0
    for window in model.windows:
        size = tiles(chip.name, d, model.sequence_len, window)
        scores = visible(size.length, size.block_q, window) * size.block_q * size.block_kv
        flops += rows * model.n_head * 2 * d * scores * (FORWARD + BACKWARD)
        # Forward reads q, k, v and writes y; backward reads those and dy, writes dk, dv and a dq for each column of
        # tiles, which are summed after.
        columns = size.length // size.block_kv_dkv
        arrays = (2 * model.n_head + 2 * model.n_kv_head) + (3 + columns) * model.n_head + 4 * model.n_kv_head
        moved += rows * size.length * d * 2 * arrays
    # The head size is the contracted side or the width of every product: it fills whole columns of the unit.
    return AttentionCost(flops, flops * (-(-d // unit) * unit) / d, moved)
