"""Attention in float64 numpy, written from the definition: what every backend is compared with."""

from __future__ import annotations

import jax
import numpy as np


def seen(tq: int, tk: int, window: int) -> np.ndarray:
    """Boolean (tq, tk): the last query stands at the last key and sees `window` keys before its own."""
    distance = np.arange(tq)[:, None] + (tk - tq) - np.arange(tk)
    return (0 <= distance) & (distance <= window)


def exact(q, k, v, window: int, dy=None) -> tuple[np.ndarray, ...]:
    """(y, dq, dk, dv) in float64 for q, dy (B, H, Tq, D) and k, v (B, K, Tk, D); dy None is all ones.

    With P the weights and S the scores: dP = dy Vᵀ, dS = P (dP - Σ P dP), and the rest is linear.
    """
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    dy = np.ones_like(q) if dy is None else np.asarray(dy, np.float64)
    group, scale = q.shape[1] // k.shape[1], 1 / np.sqrt(q.shape[3])
    every_k, every_v = (np.repeat(a, group, axis=1) for a in (k, v))
    mask = seen(q.shape[2], k.shape[2], window)
    scores = np.where(mask, q @ every_k.swapaxes(2, 3) * scale, -np.inf)
    most = scores.max(axis=3, keepdims=True)
    weights = np.exp(scores - np.where(np.isfinite(most), most, 0))
    total = weights.sum(axis=3, keepdims=True)
    weights = weights / np.where(total == 0, 1, total)
    dweights = dy @ every_v.swapaxes(2, 3)
    dscores = weights * (dweights - (weights * dweights).sum(axis=3, keepdims=True))
    shared = lambda a: a.reshape(k.shape[0], k.shape[1], group, *k.shape[2:]).sum(axis=2)  # noqa: E731
    return (
        weights @ every_v,
        dscores @ every_k * scale,
        shared(dscores.swapaxes(2, 3) @ q * scale),
        shared(weights.swapaxes(2, 3) @ dy),
    )


def draw(seed: int, b: int, h: int, kv_heads: int, tq: int, tk: int, d: int, dtype=np.float32) -> list[np.ndarray]:
    """Normal q (b, h, tq, d), k and v (b, kv_heads, tk, d), and dy shaped like q, rounded to `dtype`."""
    random = np.random.default_rng(seed)
    shapes = (b, h, tq, d), (b, kv_heads, tk, d), (b, kv_heads, tk, d), (b, h, tq, d)
    return [random.standard_normal(shape).astype(np.float32).astype(dtype) for shape in shapes]


def with_gradients(f):
    """(q, k, v, dy) → (y, dq, dk, dv), compiled as one function; a dtype that changes by itself is an error."""

    @jax.jit
    @jax.numpy_dtype_promotion("strict")
    def all_of_it(q, k, v, dy):
        y, pull = jax.vjp(f, q, k, v)
        return y, *pull(dy.astype(y.dtype))

    return all_of_it


def largest_errors(ours, expected) -> list[float]:
    """Largest absolute difference of each array, as a share of the largest number in it (at least 1)."""
    return [
        float(np.abs(np.asarray(a, np.float64) - b).max() / max(1.0, np.abs(b).max()))
        for a, b in zip(ours, expected, strict=True)
    ]
