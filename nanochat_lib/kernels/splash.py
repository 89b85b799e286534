"""Splash attention: the sparse flash kernel that JAX brings for TPUs, with our window, scale and tile sizes.

What it leaves to its caller is done here: it does not divide by √D; it takes keys in blocks of at least 128, so other
lengths are padded (behind the last token, where causality hides them); its own tiles of 128 are slower than plain XLA,
so they come from `tiles.py`. Its mask tables are kept as numpy arrays: a cache of JAX arrays that is filled while one
function is traced would hand that trace's arrays to the next function.

Under `shard_map` pass `check_vma=False`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.pallas.ops.tpu import splash_attention as splash

from nanochat_lib.kernels.tiles import Tiles, tiles


@lru_cache(maxsize=64)
def kernel(heads: int, window: int, sizes: Tiles, interpret: bool) -> Callable[..., jax.Array]:
    """The kernel of one row of the batch, for q (H, T, D), k and v (K, T, D) with T = sizes.length."""
    shape = (sizes.length, sizes.length)
    causal = window >= sizes.length - 1
    mask = splash.CausalMask(shape) if causal else splash.LocalMask(shape, (window, 0), offset=0)
    blocks = splash.BlockSizes(
        block_q=sizes.block_q,
        block_kv=sizes.block_kv,
        block_kv_compute=sizes.block_kv_compute,
        block_q_dkv=sizes.block_q_dkv,
        block_kv_dkv=sizes.block_kv_dkv,
        block_kv_dkv_compute=sizes.block_kv_dkv_compute,
        use_fused_bwd_kernel=sizes.use_fused_bwd_kernel,
    )
    with jax.ensure_compile_time_eval():
        made = splash.make_splash_mha(
            splash.MultiHeadMask([mask] * heads), block_sizes=blocks, head_shards=1, q_seq_shards=1, interpret=interpret
        )
        return jax.tree.map(np.asarray, made)


def splash_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, window: int, chip: str = "", interpret: bool = False
) -> jax.Array:
    """The contract of `nanochat_lib.attention.attention` for q (B, H, T, D), k and v (B, K, T, D).

    chip: name of the TPU whose tiles are used, e.g. "v6e"; "" takes tiles that fit every TPU. Float32 or bfloat16.
    """
    (_, h, t, d) = q.shape
    sizes = tiles(chip, d, t, window)
    # In float32, since 1/√D is itself rounded in bfloat16 unless D is a power of four.
    q = (q.astype(jnp.float32) * d**-0.5).astype(q.dtype)
    q, k, v = (jnp.pad(x, ((0, 0), (0, 0), (0, sizes.length - t), (0, 0))) for x in (q, k, v))
    full = window >= t - 1
    attend = kernel(h, sizes.length if full else window, sizes, interpret)
    return jax.vmap(attend)(q, k, v)[:, :, :t]
