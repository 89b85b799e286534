"""Sum of rows by segment on a TPU: row v of the result is the sum of the input rows whose id is v.

A scatter-add walks the rows one at a time; here the matrix unit adds them. The rows come sorted by id, cut into chunks
of CHUNK rows, and the result is cut into tiles of TILE segments. For a chunk that holds rows of a tile,

    tile += onehot(ids of the chunk - first id of the tile) @ chunk        (TILE, CHUNK) @ (CHUNK, C)

A chunk that straddles tiles is multiplied once for each; ids of other tiles match no row of the one-hot matrix. So the
pairs (tile, chunk) form a staircase of at most tiles + chunks - 1 steps, which is the kernel's grid: `plan` lists them
and Pallas fetches by the list, one step ahead. A block that stays the same from one step to the next is not moved
again, so each row is read once and each sum written once, whatever the ids are.

Sorting the rows is XLA's gather, one read and one write more. The kernel could not fetch them unsorted: two bfloat16
rows share each 32-bit word of a TPU's memory, and no copy takes one of them alone.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

TILE = 256  # segments of a tile: each row costs 2·TILE·C FLOPs, on a v5e or v6e no more time than its bytes
CHUNK = 512  # rows of a chunk
ROW_BYTES = 3072  # of a row, at a time; with TILE and CHUNK some 7 MiB of the 16 MiB of VMEM a kernel gets unasked


class Plan(NamedTuple):
    """What the kernel must know about the ids, shared by all arrays whose rows belong to them. All int32."""

    order: jax.Array  # (M,) positions sorted by id, M = N rounded up to chunks; padded with position 0
    ids: jax.Array  # (1, M) their ids; one past the last tile for rows that count nowhere
    tile: jax.Array  # (S,) tile of each step, never falling, every tile at least once
    chunk: jax.Array  # (S,) chunk of each step, never falling
    live: jax.Array  # (S,) 0 where a step only writes the zeros of an empty tile, or is left over


def steps(n: int, num_segments: int, *, tile: int = TILE, chunk: int = CHUNK) -> int:
    """Steps that suffice for any n ids: each but the first moves on to the next tile, the next chunk, or both."""
    return pl.cdiv(num_segments, tile) + pl.cdiv(n, chunk) - 1


def plan(ids: jax.Array, num_segments: int, *, tile: int = TILE, chunk: int = CHUNK) -> Plan:
    """Sorts ids (N,), N ≥ 1, and lists the steps. Rows with an id outside 0 … num_segments-1 count nowhere."""
    n, tiles, chunks = ids.size, pl.cdiv(num_segments, tile), pl.cdiv(ids.size, chunk)
    nowhere = tiles * tile
    ids = jnp.where((ids >= 0) & (ids < num_segments), ids.astype(jnp.int32), nowhere)
    # The position as second key makes the order stable, and the sorted ids come with it.
    ids, order = jax.lax.sort((ids, jnp.arange(n, dtype=jnp.int32)), num_keys=2, is_stable=False)
    padding = (0, chunks * chunk - n)
    order = jnp.pad(order, padding)
    ids = jnp.pad(ids, padding, constant_values=nowhere)

    bounds = jnp.searchsorted(ids, jnp.arange(tiles + 1, dtype=jnp.int32) * tile, method="compare_all")
    start, stop = bounds[:-1], bounds[1:]  # rows of each tile
    empty = start == stop
    first = jnp.minimum(start // chunk, chunks - 1)  # chunks of each tile
    last = jnp.where(empty, first, (stop - 1) // chunk)
    end = jnp.cumsum(last - first + 1)  # step after the tile's last one

    step = jnp.arange(steps(n, num_segments, tile=tile, chunk=chunk), dtype=jnp.int32)
    at = jnp.minimum(jnp.searchsorted(end, step, side="right", method="compare_all"), tiles - 1)
    # Counted back from the tile's end. Steps left over stay at the last blocks, so that they move nothing.
    at_chunk = last[at] - jnp.maximum(end[at] - 1 - step, 0)
    live = (step < end[-1]) & ~empty[at]
    return Plan(order, ids[None], *(x.astype(jnp.int32) for x in (at, at_chunk, live)))


def columns(c: int, dtype: jax.typing.DTypeLike) -> int:
    """Columns that the kernel takes at a time: all C, or an even share in whole lanes of 128."""
    limit = ROW_BYTES // jnp.dtype(dtype).itemsize
    return c if c <= limit else pl.cdiv(pl.cdiv(c, pl.cdiv(c, limit)), 128) * 128


def segment_sum(
    rows: jax.Array, plan: Plan, num_segments: int, *, tile: int = TILE, chunk: int = CHUNK, interpret: bool = False
) -> jax.Array:
    """Rows in the plan's order, (M, C) bfloat16 or float32 → (num_segments, C) float32.

    `tile` and `chunk` are those of the plan. bfloat16 rows are added in float32 without rounding; float32 rows take
    the matrix unit's full precision, six passes instead of one. A row that is not finite spoils every tile that its
    chunk touches, also when its id counts nowhere. `interpret` runs the kernel without a TPU, slowly.
    """
    m, c = rows.shape
    width = columns(c, rows.dtype)
    precision = jax.lax.Precision.HIGHEST if rows.dtype == jnp.float32 else jax.lax.Precision.DEFAULT

    def kernel(tile_of, _, live, ids_ref, rows_ref, sums_ref):
        step = pl.program_id(1)

        @pl.when((step == 0) | (tile_of[step] != tile_of[jnp.maximum(step - 1, 0)]))
        def _():
            sums_ref[...] = jnp.zeros_like(sums_ref)

        @pl.when(live[step] != 0)
        def _():
            segments = jax.lax.broadcasted_iota(jnp.int32, (tile, chunk), 0) + tile_of[step] * tile
            onehot = jnp.where(segments == ids_ref[...], 1.0, 0.0).astype(rows_ref.dtype)
            sums_ref[...] += jnp.dot(onehot, rows_ref[...], precision=precision, preferred_element_type=jnp.float32)

    flops, bytes_accessed = cost(m, num_segments, c, rows.dtype, tile=tile, chunk=chunk)
    varying = jax.typeof(rows).manual_axis_type  # inside a shard_map the result varies as the rows do
    return pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((num_segments, c), jnp.float32, manual_axis_type=varying),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=3,
            grid=(pl.cdiv(c, width), plan.tile.size),
            in_specs=[
                pl.BlockSpec((1, chunk), lambda j, i, tile_of, chunk_of, live: (0, chunk_of[i])),
                pl.BlockSpec((chunk, width), lambda j, i, tile_of, chunk_of, live: (chunk_of[i], j)),
            ],
            out_specs=pl.BlockSpec((tile, width), lambda j, i, tile_of, chunk_of, live: (tile_of[i], j)),
        ),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        cost_estimate=pl.CostEstimate(flops=flops, bytes_accessed=bytes_accessed, transcendentals=0),
        interpret=interpret,
        name="segment_sum",
    )(plan.tile, plan.chunk, plan.live, plan.ids, rows)


def cost(
    n: int, num_segments: int, c: int, dtype: jax.typing.DTypeLike, *, tile: int = TILE, chunk: int = CHUNK
) -> tuple[int, int]:
    """(FLOPs, bytes of HBM) of one call on n rows of c columns, for the worst ids; sort and gather are not in it.

    FLOPs as XLA counts a matrix product, 2·TILE·CHUNK·C a step, in whichever precision.
    """
    m = pl.cdiv(n, chunk) * chunk
    flops = 2 * tile * chunk * c * steps(n, num_segments, tile=tile, chunk=chunk)
    ids = 4 * m * pl.cdiv(c, columns(c, dtype))
    return flops, ids + m * c * jnp.dtype(dtype).itemsize + 4 * num_segments * c
