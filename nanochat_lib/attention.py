"""Causal attention with a sliding window, grouped query heads and rotary position embedding.

Shapes: B batch, H query heads, K key/value heads, T time, D head size; heads stand before time, so that every head's
product runs over contiguous matrices. One function, `attention`, hides how the result is computed:

- "reference": the whole score matrix, the formula word for word; for tests and reading.
- "xla": the same numbers in tiles of queries, each against only the keys it can see, so that a small window costs
  little memory and the masked half of the score matrix is mostly never computed. Runs on every device.

The window counts the keys before the query, as in FlashAttention: with window w a query at position p sees the keys
at p-w … p, that is w+1 keys, itself included. Window 0 is "only itself"; a window of at least T-1 is full causal
attention.
"""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from nanochat_lib.errors import UserError

BACKENDS = ("xla", "reference")
MASKED = -1e30  # finite, so that a row without any key stays free of inf - inf


@lru_cache(maxsize=32)
def rotary_table(length: int, head_dim: int, base: float, bf16_table: bool = False) -> tuple[np.ndarray, np.ndarray]:
    """(cos, sin), float32 (length, D/2): angle t · base^(-2j/D) at position t and pair j (RoFormer, arXiv:2104.09864).

    Frequencies and angles are rounded to float32 as nanochat does: exact ones move the cosine by 1e-4 at t = 2000.
    `bf16_table` rounds the result to bfloat16, which the March 2026 generation did on every device.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    power = np.float32(np.float64(base) ** np.float64(exponent))
    angle = np.arange(length, dtype=np.float32)[:, None] * (np.float32(1) / power)
    cos, sin = (np.float32(f(np.float64(angle))) for f in (np.cos, np.sin))
    if bf16_table:
        cos, sin = (table.astype(jnp.bfloat16).astype(np.float32) for table in (cos, sin))
    cos.flags.writeable = sin.flags.writeable = False
    return cos, sin


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    """Rotates the pairs (x[j], x[j + D/2]) of the last axis by minus the angle, nanochat's sign."""
    x1, x2 = jnp.split(x, 2, axis=-1)
    return jnp.concatenate([x1 * cos + x2 * sin, x2 * cos - x1 * sin], axis=-1)


def visible(queries: jax.Array, keys: jax.Array, window: int) -> jax.Array:
    """Boolean mask (…, Tq, Tk) of positions (…, Tq) and (Tk,): a key at most `window` before the query, never after."""
    distance = queries[..., :, None] - keys
    return (distance >= 0) & (distance <= window)


def _softmax_average(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """softmax(q·k/√D) v over the keys that the mask (…, Tq, Tk) shows; 0 for a query that sees none.

    q (B, H, Tq, D), k and v (B, K, Tk, D); query head h reads key/value head h // (H/K). Scores are float32.
    """
    b, h, tq, d = q.shape
    kv_heads = k.shape[1]
    q = q.reshape(b, kv_heads, h // kv_heads, tq, d)
    k, v = k[:, :, None], v[:, :, None]
    scores = jnp.matmul(q, k.swapaxes(-1, -2), preferred_element_type=jnp.float32) * (1 / d**0.5)
    scores = jnp.where(mask, scores, MASKED)
    # The largest score cancels in the quotient: no gradient flows through it.
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    weights = jnp.where(mask, weights, 0.0)
    weights = weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
    return (weights.astype(v.dtype) @ v).reshape(b, h, tq, d)


def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, window: int, backend: str = "xla") -> jax.Array:
    """Causal attention of Tq queries on Tk keys; the last query stands at the last key.

    Args:
        q: (B, H, Tq, D). k, v: (B, K, Tk, D) with H a multiple of K; query head h uses key/value head h // (H/K).
        window: keys seen before the query's own position, at least 0.
        backend: "xla" or "reference".
    Returns:
        (B, H, Tq, D) in v's dtype. A query that sees no key (possible only when Tq > Tk) gives 0.
    Raises:
        UserError: unknown backend, negative window, or head counts that do not divide.
    """
    if backend not in BACKENDS:
        raise UserError(f"attention: backend {backend!r} is unknown, use {' or '.join(BACKENDS)}")
    if window < 0:
        raise UserError(f"attention: window {window} is negative; use 0 for self only, the length for full attention")
    if q.shape[1] % k.shape[1]:
        raise UserError(f"attention: {q.shape[1]} query heads are not a multiple of {k.shape[1]} key/value heads")
    tq, tk = q.shape[2], k.shape[2]
    offset = tk - tq  # position of the first query
    tile = tq if backend == "reference" else query_tile(tq)
    parts = []
    for start in range(0, tq, tile):
        stop = min(start + tile, tq)
        first, last = max(0, offset + start - window), max(1, offset + stop)
        mask = visible(offset + np.arange(start, stop), np.arange(first, last), window)
        parts.append(_softmax_average(q[:, :, start:stop], k[:, :, first:last], v[:, :, first:last], mask))
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=2)


def query_tile(length: int) -> int:
    """Queries of one tile: at most eight tiles, multiples of 128."""
    return 128 * max(1, -(-length // 1024))


def cached_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, positions: jax.Array, window: int) -> jax.Array:
    """One query a row against a cache: q (B, H, 1, D) at `positions` (B,), k and v (B, K, S, D) → (B, H, 1, D).

    The key in slot s has position s; slots after a row's own position are never read.
    """
    mask = visible(positions[:, None], jnp.arange(k.shape[2], dtype=positions.dtype), window)
    return _softmax_average(q, k, v, mask[:, None, None])
