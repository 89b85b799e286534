"""cuDNN's flash attention on NVIDIA GPUs, through `jax.nn.dot_product_attention`.

Three of its traps are closed here. Without `implementation` it quietly runs plain XLA, on a GPU too. Its window
(-1, 0) is not "everything before": it shows the future. And it knows causality only together with `is_causal`, which
counts from the first query, so there must be as many queries as keys.
"""

from __future__ import annotations

import jax


def cudnn_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, *, window: int, implementation: str = "cudnn"
) -> jax.Array:  # fmt: skip
    """The contract of `nanochat_lib.attention.attention` for q (B, H, T, D), k and v (B, K, T, D), float16 or bfloat16.

    `implementation="xla"` computes the same arguments without cuDNN, on any device; for tests.
    """
    q, k, v = (x.swapaxes(1, 2) for x in (q, k, v))
    before = None if window >= q.shape[1] - 1 else (window, 0)
    y = jax.nn.dot_product_attention(
        q, k, v, is_causal=True, local_window_size=before, implementation=implementation
    )  # fmt: skip
    return y.swapaxes(1, 2)
