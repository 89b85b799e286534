"""Flash attention (arXiv:2205.14135, arXiv:2307.08691) as three Pallas kernels: one forward, two backward.

The score matrix s = q kᵀ/√D has Tq · Tk entries and is never stored. A kernel sees one block of queries and one of keys
at a time, in fast memory, and carries three things from block to block for every query:

    m    the largest score so far
    l    Σ exp(s - m) over the keys so far
    acc  Σ exp(s - m) v over the keys so far

A block that raises m first shrinks l and acc by exp(m_old - m_new). After the last block the output is y = acc / l, and
lse = m + log l is kept: with it the backward pass makes every weight again, as p = exp(s - lse), and then, with dy the
gradient of y,

    delta = Σ_d dy y      ds = p (dy vᵀ - delta)      dq = ds k/√D      dk = dsᵀ q/√D      dv = pᵀ dy

The grid is a list. A causal window leaves most pairs (query block, key block) without one visible score; only the other
pairs stand in the list, so what the window hides is neither loaded nor computed. The list is a small table of integers,
which the chip reads before the blocks (scalar prefetch).

G query heads that share one key/value head read the same blocks: q is seen as (B, K, G, T, D), keys are never repeated.

The kernels run on a TPU, and on a CPU as plain JAX with `interpret=True`. Under `shard_map` pass `check_vma=False`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

BLOCK = 512  # queries and keys of a block: 2 MiB of float32 scores and weights
MASKED, EMPTY = -1e30, -1e20  # a hidden score; m before the first key. exp(MASKED - EMPTY) = 0: no inf, no NaN
QUERY, KEY, FIRST, LAST = range(4)  # rows of the table of steps


def visible_blocks(tq: int, tk: int, window: int, block_q: int, block_kv: int) -> np.ndarray:
    """Boolean (query blocks, key blocks): does any query of the one see any key of the other?"""
    first_q = np.arange(0, tq, block_q) + tk - tq
    last_q = np.minimum(first_q + block_q, tk) - 1
    first_k = np.arange(0, tk, block_kv)
    last_k = np.minimum(first_k + block_kv, tk) - 1
    return (first_k <= last_q[:, None]) & (last_k >= first_q[:, None] - window)


def schedule(seen: np.ndarray, run: int) -> np.ndarray:
    """The grid, int32 (4, steps): query block, key block, does a run begin here, does it end here.

    A run is all steps of one query block (`run` QUERY) or one key block (KEY): its sums are kept in scratch memory and
    written out at its end. A block that sees nothing gets one step too, so that its zeros are written.
    """
    pairs = np.array(seen if run == QUERY else seen.T)
    pairs[~pairs.any(axis=1), 0] = True
    table = np.argwhere(pairs) if run == QUERY else np.argwhere(pairs)[:, ::-1]
    change = table[1:, run] != table[:-1, run]
    return np.stack([*table.T, np.r_[True, change], np.r_[change, True]]).astype(np.int32)


@dataclass(frozen=True)
class Band:
    """Which keys each query sees, and the blocks both are cut into. Query r stands at position r + tk - tq."""

    tq: int
    tk: int
    window: int
    block_q: int
    block_kv: int
    interpret: bool = False

    def steps(self, run: int) -> np.ndarray:
        """The grid: `schedule` of the visible blocks."""
        seen = visible_blocks(self.tq, self.tk, self.window, self.block_q, self.block_kv)
        return schedule(seen, run)

    def hide(self, scores: jax.Array, i: jax.Array, j: jax.Array, queries: int) -> jax.Array:
        """The scores of query block i and key block j, the hidden ones MASKED. `queries`: the axis of the queries."""
        query = i * self.block_q + (self.tk - self.tq) + lax.broadcasted_iota(jnp.int32, scores.shape, queries)
        key = j * self.block_kv + lax.broadcasted_iota(jnp.int32, scores.shape, 1 - queries)
        return jnp.where((key <= query) & (key >= query - self.window), scores, MASKED)


def dot(a: jax.Array, b: jax.Array, axis_a: int, axis_b: int) -> jax.Array:
    """The product of two matrices over one axis of each, summed in float32; float32 inputs are not rounded before."""
    precision = lax.Precision.HIGHEST if a.dtype == jnp.float32 else lax.Precision.DEFAULT
    contract = (((axis_a,), (axis_b,)), ((), ()))
    return lax.dot_general(a, b, contract, precision=precision, preferred_element_type=jnp.float32)


def absorb(m: jax.Array, total: jax.Array, acc: jax.Array, s: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """(m, total, acc) after one more block of keys.

    m: the largest score so far, (queries, 1). total: the l of the formulas, (queries, 1). acc: (queries, D).
    s: the block's scores, (queries, keys), hidden ones MASKED. v: its values, (keys, D).
    """
    highest = jnp.maximum(m, s.max(axis=1, keepdims=True))
    p = jnp.exp(s - highest)
    shrink = jnp.exp(m - highest)
    total = shrink * total + p.sum(axis=1, keepdims=True)
    acc = shrink * acc + dot(p.astype(v.dtype), v, 1, 0)
    return highest, total, acc


def forward_kernel(steps, q_ref, k_ref, v_ref, y_ref, lse_ref, m_ref, l_ref, acc_ref, *, band: Band, scale: float):
    """q (block_q, D) against k and v (block_kv, D); grid (B, K, G, steps)."""
    step = pl.program_id(3)

    @pl.when(steps[FIRST, step] == 1)
    def begin():
        m_ref[...] = jnp.full_like(m_ref, EMPTY)
        l_ref[...] = jnp.zeros_like(l_ref)
        acc_ref[...] = jnp.zeros_like(acc_ref)

    s = band.hide(scale * dot(q_ref[...], k_ref[...], 1, 1), steps[QUERY, step], steps[KEY, step], queries=0)
    m_ref[...], l_ref[...], acc_ref[...] = absorb(m_ref[...], l_ref[...], acc_ref[...], s, v_ref[...])

    @pl.when(steps[LAST, step] == 1)
    def end():
        total = jnp.maximum(l_ref[...], 1e-30)
        y_ref[...] = (acc_ref[...] / total).astype(y_ref.dtype)
        lse_ref[...] = (m_ref[...] + jnp.log(total)).T


def weights_and_score_gradients(band: Band, scale: float, i, j, q, k, v, dy, lse, delta):
    """(pᵀ, dsᵀ), each (block_kv, block_q): with keys first, lse and delta (1, block_q) fit as they are stored."""
    p = jnp.exp(band.hide(scale * dot(k, q, 1, 1), i, j, queries=1) - lse)
    return p, p * (dot(v, dy, 1, 1) - delta)


def dq_kernel(steps, q_ref, k_ref, v_ref, dy_ref, lse_ref, delta_ref, dq_ref, acc_ref, *, band: Band, scale: float):
    """Sums over the key blocks that a query block sees; grid (B, K, G, steps)."""
    step = pl.program_id(3)

    @pl.when(steps[FIRST, step] == 1)
    def begin():
        acc_ref[...] = jnp.zeros_like(acc_ref)

    blocks = [ref[...] for ref in (q_ref, k_ref, v_ref, dy_ref, lse_ref, delta_ref)]
    _, ds = weights_and_score_gradients(band, scale, steps[QUERY, step], steps[KEY, step], *blocks)
    acc_ref[...] += dot(ds.astype(k_ref.dtype), k_ref[...], 0, 0)

    @pl.when(steps[LAST, step] == 1)
    def end():
        dq_ref[...] = (scale * acc_ref[...]).astype(dq_ref.dtype)


def dkv_kernel(
    steps, q_ref, k_ref, v_ref, dy_ref, lse_ref, delta_ref, dk_ref, dv_ref, dk_acc, dv_acc, *, band: Band, scale: float
):
    """Sums over the query blocks that see a key block, and over the heads that share it; grid (B, K, steps, G)."""
    step, head = pl.program_id(2), pl.program_id(3)

    @pl.when((steps[FIRST, step] == 1) & (head == 0))
    def begin():
        dk_acc[...] = jnp.zeros_like(dk_acc)
        dv_acc[...] = jnp.zeros_like(dv_acc)

    blocks = [ref[...] for ref in (q_ref, k_ref, v_ref, dy_ref, lse_ref, delta_ref)]
    p, ds = weights_and_score_gradients(band, scale, steps[QUERY, step], steps[KEY, step], *blocks)
    dv_acc[...] += dot(p.astype(dy_ref.dtype), dy_ref[...], 1, 0)
    dk_acc[...] += dot(ds.astype(q_ref.dtype), q_ref[...], 1, 0)

    @pl.when((steps[LAST, step] == 1) & (head == pl.num_programs(3) - 1))
    def end():
        dk_ref[...] = (scale * dk_acc[...]).astype(dk_ref.dtype)
        dv_ref[...] = dv_acc[...].astype(dv_ref.dtype)


def block_specs(band: Band, d: int, run: int) -> tuple[pl.BlockSpec, pl.BlockSpec, pl.BlockSpec]:
    """Which block a step needs of an array (B, K, G, Tq, D), of one (B, K, Tk, D), of one (B, K, G, 1, Tq)."""

    def at(place):
        if run == QUERY:  # grid (B, K, G, steps)
            return lambda b, kv_head, head, step, table: place(b, kv_head, head, table[QUERY, step], table[KEY, step])
        return lambda b, kv_head, step, head, table: place(b, kv_head, head, table[QUERY, step], table[KEY, step])

    return (
        pl.BlockSpec((None, None, None, band.block_q, d), at(lambda b, kv_head, head, i, j: (b, kv_head, head, i, 0))),
        pl.BlockSpec((None, None, band.block_kv, d), at(lambda b, kv_head, head, i, j: (b, kv_head, j, 0))),
        pl.BlockSpec((None, None, None, 1, band.block_q), at(lambda b, kv_head, head, i, j: (b, kv_head, head, 0, i))),
    )


def launch(kernel, band: Band, run: int, operands, in_specs, out_shape, out_specs, scratch):
    """Runs a kernel over batch, heads and the steps of its runs. `scratch`: shapes of its float32 sums."""
    b, kv_heads, group, _, d = operands[0].shape
    steps = band.steps(run)
    inner = (group, steps.shape[1]) if run == QUERY else (steps.shape[1], group)
    order = ("parallel", "arbitrary") if run == QUERY else ("arbitrary", "arbitrary")
    return pl.pallas_call(
        partial(kernel, band=band, scale=d**-0.5),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(b, kv_heads, *inner),
            in_specs=in_specs,
            out_specs=out_specs,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in scratch],
        ),
        out_shape=out_shape,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "parallel", *order)),
        interpret=band.interpret,
    )(steps, *operands)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped(q: jax.Array, k: jax.Array, v: jax.Array, band: Band) -> jax.Array:
    """Attention of q (B, K, G, Tq, D) on k, v (B, K, Tk, D), both times whole numbers of blocks."""
    return forward(q, k, v, band)[0]


def run_forward(kernel, q: jax.Array, k: jax.Array, v: jax.Array, band: Band) -> tuple[jax.Array, jax.Array]:
    """(y, lse) by `kernel`, which is `forward_kernel` or one that computes the same."""
    *heads, t, d = q.shape
    queries, keys, rows = block_specs(band, d, QUERY)
    return launch(
        kernel, band, QUERY, (q, k, v), [queries, keys, keys],
        [jax.ShapeDtypeStruct(q.shape, q.dtype), jax.ShapeDtypeStruct((*heads, 1, t), jnp.float32)], [queries, rows],
        [(band.block_q, 1), (band.block_q, 1), (band.block_q, d)],
    )  # fmt: skip


def forward(q: jax.Array, k: jax.Array, v: jax.Array, band: Band):
    y, lse = run_forward(forward_kernel, q, k, v, band)
    return y, (q, k, v, y, lse)


def backward(band: Band, saved, dy: jax.Array):
    q, k, v, y, lse = saved
    d = q.shape[-1]
    delta = jnp.sum(dy.astype(jnp.float32) * y.astype(jnp.float32), axis=-1)[..., None, :]
    operands = (q, k, v, dy, lse, delta)
    queries, keys, rows = block_specs(band, d, QUERY)
    dq = launch(
        dq_kernel, band, QUERY, operands, [queries, keys, keys, queries, rows, rows],
        jax.ShapeDtypeStruct(q.shape, q.dtype), queries, [(band.block_q, d)],
    )  # fmt: skip
    queries, keys, rows = block_specs(band, d, KEY)
    dk, dv = launch(
        dkv_kernel, band, KEY, operands, [queries, keys, keys, queries, rows, rows],
        [jax.ShapeDtypeStruct(k.shape, k.dtype), jax.ShapeDtypeStruct(v.shape, v.dtype)], [keys, keys],
        [(band.block_kv, d), (band.block_kv, d)],
    )  # fmt: skip
    return dq, dk, dv


grouped.defvjp(forward, backward)


def flash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, window: int, block_q: int = BLOCK, block_kv: int = BLOCK,
    interpret: bool = False,
) -> jax.Array:  # fmt: skip
    """Causal attention with a sliding window, the contract of `nanochat_lib.attention.attention`.

    Args:
        q: (B, H, Tq, D). k, v: (B, K, Tk, D) with H a multiple of K; the last query stands at the last key.
        window: keys seen before the query's own position, at least 0.
        block_q, block_kv: queries and keys of a block; shorter sequences take one smaller block. On a TPU multiples
            of 128, the width of its registers.
        interpret: run as plain JAX, on any device and slowly.
    Returns:
        (B, H, Tq, D) in q's dtype, computed in float32; 0 for a query that sees no key.
    """
    b, h, tq, d = q.shape
    kv_heads, tk = k.shape[1:3]
    block_q, block_kv = (min(block, -(-t // 128) * 128) for block, t in ((block_q, tq), (block_kv, tk)))
    band = Band(tq, tk, window, block_q, block_kv, interpret)
    # The padding stands behind the last query and key: only padded queries see padded keys.
    q, k, v = (
        jnp.pad(x, ((0, 0), (0, 0), (0, -x.shape[2] % block), (0, 0)))
        for x, block in ((q, block_q), (k, block_kv), (v, block_kv))
    )
    y = grouped(q.reshape(b, kv_heads, h // kv_heads, -1, d), k, v, band)
    return y.reshape(b, h, -1, d)[:, :, :tq]
