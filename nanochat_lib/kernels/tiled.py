"""Attention in plain JAX, one tile of queries after the other, each against only the keys that it can see.

A small window then costs little memory, and most of the masked half of the score matrix is never computed. Like a flash
kernel (arXiv:2307.08691, and `flash.py` for the formulas) it keeps one number per query, the logarithm of the softmax's
denominator, and makes the weights again in the backward pass: storing them took longer than this, and T² memory.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

MASKED, EMPTY = -1e30, -1e20  # a hidden score; the least maximum of a row. exp(MASKED - EMPTY) = 0: no inf, no NaN


def query_tile(length: int) -> int:
    """Queries of one tile: at most eight tiles, multiples of 128."""
    return 128 * max(1, -(-length // 1024))


def tiles(q: jax.Array, k: jax.Array, window: int) -> Iterator[tuple[slice, slice, np.ndarray]]:
    """(queries, keys, mask) of every tile; query r stands at position r + Tk - Tq. Mask rows: G times the queries."""
    group, tq, offset, size = q.shape[2], q.shape[3], k.shape[2] - q.shape[3], query_tile(q.shape[3])
    for start in range(0, tq, size):
        stop = min(start + size, tq)
        first, last = max(0, offset + start - window), max(1, offset + stop)
        distance = offset + np.arange(start, stop)[:, None] - np.arange(first, last)
        yield slice(start, stop), slice(first, last), np.tile((distance >= 0) & (distance <= window), (group, 1))


def rows(x: jax.Array, queries: slice) -> jax.Array:
    """A tile of x (B, K, G, Tq, …) as (B, K, G·tile, …): the heads that share keys are rows of one product."""
    b, kv_heads, *_, d = x.shape
    return x[:, :, :, queries].reshape(b, kv_heads, -1, d)


def heads(x: jax.Array, group: int) -> jax.Array:
    """The inverse of `rows`: (B, K, G·tile, D) as (B, K, G, tile, D)."""
    b, kv_heads, count, d = x.shape
    return x.reshape(b, kv_heads, group, count // group, d)


def wide(dtype: jax.typing.DTypeLike) -> jax.typing.DTypeLike:
    """What scores and sums are computed in: float32, or float64 for float64 inputs."""
    return jnp.float64 if dtype == jnp.float64 else jnp.float32


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """a @ b, summed in the wide dtype."""
    return jnp.matmul(a, b, preferred_element_type=wide(a.dtype))


def transposed(x: jax.Array) -> jax.Array:
    return x.swapaxes(-1, -2)


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def grouped(q: jax.Array, k: jax.Array, v: jax.Array, window: int) -> jax.Array:
    """Attention of q (B, K, G, Tq, D) on k and v (B, K, Tk, D)."""
    return forward(q, k, v, window)[0]


def forward(q: jax.Array, k: jax.Array, v: jax.Array, window: int):
    ys, lses = [], []
    for queries, keys, mask in tiles(q, k, window):
        scores = product(rows(q, queries), transposed(k[:, :, keys])) * q.shape[-1] ** -0.5
        scores = jnp.where(mask, scores, MASKED)
        most = jnp.maximum(scores.max(axis=-1, keepdims=True), EMPTY)
        weights = jnp.exp(scores - most)
        total = jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
        y = product(weights.astype(v.dtype), v[:, :, keys]) / total
        ys.append(heads(y.astype(q.dtype), q.shape[2]))
        lses.append(most + jnp.log(total))
    y = jnp.concatenate(ys, axis=3)
    return y, (q, k, v, y, lses)


def backward(window: int, saved, dy: jax.Array):
    q, k, v, y, lses = saved
    scale, exact = q.shape[-1] ** -0.5, wide(q.dtype)
    # as a product: XLA sums short rows on a CPU ten times more slowly than it multiplies them
    delta = jnp.einsum("bkgtd,bkgtd->bkgt", dy, y, preferred_element_type=exact)[..., None]
    dq, dk, dv = [], jnp.zeros(k.shape, exact), jnp.zeros(v.shape, exact)
    for (queries, keys, mask), lse in zip(tiles(q, k, window), lses, strict=True):
        q_tile, dy_tile, k_tile, v_tile = rows(q, queries), rows(dy, queries), k[:, :, keys], v[:, :, keys]
        scores = jnp.where(mask, product(q_tile, transposed(k_tile)) * scale, MASKED)
        weights = jnp.exp(scores - lse)
        dscores = weights * (product(dy_tile, transposed(v_tile)) - rows(delta, queries))
        weights, dscores = weights.astype(dy.dtype), dscores.astype(q.dtype)
        dq.append(heads((product(dscores, k_tile) * scale).astype(q.dtype), q.shape[2]))
        dk = add_at(dk, keys, product(transposed(dscores), q_tile))
        dv = add_at(dv, keys, product(transposed(weights), dy_tile))
    return jnp.concatenate(dq, axis=3), (dk * scale).astype(k.dtype), dv.astype(v.dtype)


def add_at(total: jax.Array, keys: slice, part: jax.Array) -> jax.Array:
    """`total` (B, K, Tk, D) with `part` added at the positions `keys`.

    All positions need no scatter, whose empty index array ends jaxlib 0.11.2's partitioner with a segmentation fault.
    """
    if part.shape[2] == total.shape[2]:
        return total + part
    return total.at[:, :, keys].add(part)


grouped.defvjp(forward, backward)


def tiled_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, window: int) -> jax.Array:
    """The contract of `nanochat_lib.attention.attention`, on every device and for every float dtype."""
    b, h, tq, d = q.shape
    kv_heads = k.shape[1]
    return grouped(q.reshape(b, kv_heads, h // kv_heads, tq, d), k, v, window).reshape(b, h, tq, d)
