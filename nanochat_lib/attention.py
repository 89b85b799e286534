"""Causal attention with a sliding window, grouped query heads and rotary position embedding.

Shapes: B batch, H query heads, K key/value heads, T time, D head size; heads stand before time, so that every head's
product runs over contiguous matrices. One function, `attention`, hides how the result is computed:

- "reference": the whole score matrix, the formula word for word; for tests and reading.
- "xla": tiles of queries, each against only the keys it can see, in plain JAX (`kernels/tiled.py`). Every device.
- "pallas": our own flash kernel (`kernels/flash.py`), for TPUs.
- "splash": JAX's kernel for TPUs with our tile sizes (`kernels/splash.py`); "splash:v6e" names the chip whose tiles.
- "cudnn": NVIDIA's kernel (`kernels/cudnn.py`), for float16 and bfloat16.
- "pallas-interpret" and "splash-interpret": the TPU kernels run as plain JAX, for tests on a CPU.

A program calls `choose_backend` once, with the platform of its mesh, and hands the name down; nothing looks for a
device while a function is traced, since code for a TPU is also compiled on machines that have none.

The window counts the keys before the query, as in FlashAttention: with window w a query at position p sees the keys
at p-w … p, that is w+1 keys, itself included. Window 0 is "only itself"; a window of at least T-1 is full causal
attention.
"""

from __future__ import annotations

import re
import warnings
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from nanochat_lib.errors import UserError
from nanochat_lib.hardware import find_chip
from nanochat_lib.kernels.tiled import query_tile, tiled_attention, wide

# What `choose_backend` can name; "splash" may be followed by a chip, as in "splash:v6e".
BACKENDS = ("xla", "pallas", "splash", "cudnn", "reference", "pallas-interpret", "splash-interpret")
DEFAULTS = {"cpu": "xla", "tpu": "splash", "gpu": "cudnn", "cuda": "cudnn"}  # by platform
HOPPER_OR_LATER = ("h100", "h200", "h800", "b100", "b200", "gb200")
OTHER_GPU = re.compile(r"AMD|Radeon|gfx|\bMI\d|\b(V100|T4|P100|P40|P4|K80|M60|GTX|TITAN|Quadro)\b|RTX 20[678]0", re.I)
SQUARE = ("splash", "cudnn")  # need as many queries as keys
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

    q (B, H, Tq, D), k and v (B, K, Tk, D); query head h reads key/value head h // (H/K). Scores are float32, or float64
    for float64 inputs.
    """
    b, h, tq, d = q.shape
    kv_heads = k.shape[1]
    q = q.reshape(b, kv_heads, h // kv_heads, tq, d)
    k, v = k[:, :, None], v[:, :, None]
    scores = jnp.matmul(q, k.swapaxes(-1, -2), preferred_element_type=wide(q.dtype)) * (1 / d**0.5)
    scores = jnp.where(mask, scores, MASKED)
    # The largest score cancels in the quotient: no gradient flows through it.
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True)))
    weights = jnp.where(mask, weights, 0.0)
    weights = weights / jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
    return (weights.astype(v.dtype) @ v).reshape(b, h, tq, d)


def masked_attention(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
    """Queries that see what a mask says: q (B, H, Tq, D), k and v (B, K, Tk, D), mask (B, Tq, Tk) → (B, H, Tq, D)."""
    return _softmax_average(q, k, v, mask[:, None, None])


@lru_cache(maxsize=64)
def parse_backend(backend: str) -> tuple[str, str, bool]:
    """(kernel, chip, interpret) of a backend's name: "splash:v6e" is ("splash", "v6e", False)."""
    name, colon, chip = backend.partition(":")
    kernel = name.removesuffix("-interpret")
    if name not in BACKENDS or (colon and kernel != "splash"):
        raise UserError(f"attention: backend {backend!r} is unknown, use {', '.join(BACKENDS)}")
    return kernel, chip, name != kernel


def attention(q: jax.Array, k: jax.Array, v: jax.Array, *, window: int, backend: str = "xla") -> jax.Array:
    """Causal attention of Tq queries on Tk keys; the last query stands at the last key.

    Args:
        q: (B, H, Tq, D). k, v: (B, K, Tk, D) with H a multiple of K; query head h uses key/value head h // (H/K).
        window: keys seen before the query's own position, at least 0.
        backend: one of BACKENDS, "splash" also with the chip whose tiles it takes ("splash:v6e").
    Returns:
        (B, H, Tq, D) in the inputs' dtype. A query that sees no key (possible only when Tq > Tk) gives 0.
    Raises:
        UserError: unknown backend, negative window, head counts that do not divide, or Tq ≠ Tk for splash and cudnn.
    """
    kernel, chip, interpret = parse_backend(backend)
    if window < 0:
        raise UserError(f"attention: window {window} is negative; use 0 for self only, the length for full attention")
    if q.shape[1] % k.shape[1]:
        raise UserError(f"attention: {q.shape[1]} query heads are not a multiple of {k.shape[1]} key/value heads")
    tq, tk = q.shape[2], k.shape[2]
    if kernel in SQUARE and tq != tk:
        raise UserError(f"attention: {kernel} needs as many queries as keys, got {tq} and {tk}; use xla")
    if kernel == "xla":
        return tiled_attention(q, k, v, window=window)
    if kernel == "reference":
        return _softmax_average(q, k, v, visible(np.arange(tk - tq, tk), np.arange(tk), window))
    # Imported when used: Pallas and splash are experimental parts of JAX, on which other backends shall not depend.
    if kernel == "pallas":
        from nanochat_lib.kernels.flash import flash_attention

        return flash_attention(q, k, v, window=window, interpret=interpret)
    if kernel == "splash":
        from nanochat_lib.kernels.splash import splash_attention

        return splash_attention(q, k, v, window=window, chip=chip, interpret=interpret)
    from nanochat_lib.kernels.cudnn import cudnn_attention

    return cudnn_attention(q, k, v, window=window)


def cached_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, positions: jax.Array, window: int) -> jax.Array:
    """One query a row against a cache: q (B, H, 1, D) at `positions` (B,), k and v (B, K, R, D) → (B, H, 1, D).

    Slot s holds the newest position up to the row's own that leaves s when divided by R: with a slot for every position
    it holds position s, and what stands in later slots is never read.
    """
    (b, h, _, d), (_, kv_heads, count, _) = q.shape, k.shape
    distance = (positions[:, None] - jnp.arange(count, dtype=positions.dtype)) % count
    mask = (distance <= jnp.minimum(positions, window)[:, None])[:, None, None]
    q = q.reshape(b, kv_heads, h // kv_heads, d)
    # As _softmax_average, but divided at the end: a CPU is up to three times as fast on products of this form.
    scores = jnp.einsum("bkgd,bksd->bkgs", q, k, preferred_element_type=wide(q.dtype)) * (1 / d**0.5)
    scores = jnp.where(mask, scores, MASKED)
    weights = jnp.where(mask, jnp.exp(scores - scores.max(axis=-1, keepdims=True)), 0.0)
    total = jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
    y = jnp.einsum("bkgs,bksd->bkgd", weights.astype(v.dtype), v, preferred_element_type=wide(v.dtype)) / total
    return y.reshape(b, h, 1, d).astype(q.dtype)


def chunk_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, old_k: jax.Array, old_v: jax.Array, *, held: jax.Array, pos: jax.Array,
    window: int,
) -> jax.Array:  # fmt: skip
    """T new queries a row on what a cache holds and on themselves: q (B, H, T, D), k and v (B, K, T, D) → (B, H, T, D).

    Query t stands at position pos + t, pos (B,). old_k, old_v (B, K, R, D): the cache before the new keys are stored;
    held (B, R): the position of each of its slots, negative for an empty one.
    """
    new = pos[:, None] + jnp.arange(q.shape[2])
    # A slot that holds nothing is put behind every query.
    keys = jnp.concatenate([jnp.where(held < 0, pos[:, None] + q.shape[2], held), new], axis=1)
    distance = new[:, :, None] - keys[:, None]
    mask = (distance >= 0) & (distance <= window)
    joined = (jnp.concatenate([old.astype(x.dtype), x], axis=2) for old, x in ((old_k, k), (old_v, v)))
    return _softmax_average(q, *joined, mask[:, None, None])


def obstacle(kernel: str, platform: str, device_kind: str, head_dim: int, dtype: str) -> str:
    """Why `kernel` cannot compute this model's attention on these devices; "" when it can."""
    device = f"{device_kind} ({platform})" if device_kind else platform
    if kernel in ("pallas", "splash"):
        if platform != "tpu":
            return f"{kernel} runs on TPUs, not on {device}"
        if dtype not in ("float32", "bfloat16"):
            return f"{kernel} computes in float32 and bfloat16, not in {dtype}"
        if head_dim > 256:
            return f"{kernel} takes head sizes up to 256, not {head_dim}"
    if kernel == "cudnn":
        if platform not in ("gpu", "cuda") or OTHER_GPU.search(device_kind):
            return f"cudnn runs on NVIDIA GPUs from the Ampere generation on, not on {device}"
        if dtype not in ("float16", "bfloat16"):
            return f"cudnn computes in bfloat16 and float16, not in {dtype}"
        chip = find_chip(device_kind)
        most = 256 if chip and chip.name.startswith(HOPPER_OR_LATER) else 128
        if head_dim % 8 or head_dim > most:
            return f"cudnn takes head sizes that are multiples of 8 up to {most} on {device}, not {head_dim}"
    return ""


def choose_backend(
    setting: str, platform: str, *, device_kind: str = "", length: int, head_dim: int, dtype: str
) -> str:  # fmt: skip
    """The backend that a program hands down; chosen once, never in traced code.

    Args:
        setting: "auto", or one of BACKENDS, which is then only checked.
        platform, device_kind: of the mesh's devices, as JAX names them ("tpu", "TPU v6 lite").
        length, head_dim, dtype: T, D and compute dtype ("bfloat16") of the model.
    Returns:
        A name for `attention`. "auto" is splash on a TPU, cuDNN on an NVIDIA GPU and xla on a CPU. Where an accelerator
        has no kernel for the job, xla does it, with a warning that says why and what it costs.
    Raises:
        UserError: an unknown setting, or one that cannot work on these devices.
    """
    chip = find_chip(device_kind)
    splash = f"splash:{chip.name}" if chip else "splash"
    if setting != "auto":
        kernel, _, interpret = parse_backend(setting)
        problem = "" if interpret else obstacle(kernel, platform, device_kind, head_dim, dtype)
        if problem:
            raise UserError(f"attention backend {setting!r}: {problem}; use auto or xla")
        return splash if setting == "splash" else setting
    kernel = DEFAULTS.get(platform, "")
    problem = obstacle(kernel, platform, device_kind, head_dim, dtype) if kernel else f"no flash kernel for {platform}"
    if problem:
        warnings.warn(
            f"attention: {problem}; xla does it instead: the same numbers, but slower, and with "
            f"{min(length, query_tile(length))} × {length} scores of every head in main memory",
            stacklevel=2,
        )
        return "xla"
    return splash if kernel == "splash" else kernel
