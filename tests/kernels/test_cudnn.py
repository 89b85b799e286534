"""What reaches cuDNN, which only runs on its GPU (that the arguments mean the right thing: tests/test_attention.py)."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nanochat_lib.attention import attention


@pytest.mark.parametrize("window", [0, 5, 14, 15, 16, 4096])
def test_the_window_is_causal_never_negative_and_the_kernel_is_named(window, monkeypatch):
    calls = []

    def record(q, k, v, **options):
        calls.append((q.shape, k.shape, v.shape, options))
        return q

    monkeypatch.setattr(jax.nn, "dot_product_attention", record)
    q, k = np.zeros((2, 4, 16, 8), jnp.bfloat16), np.zeros((2, 2, 16, 8), jnp.bfloat16)
    assert attention(q, k, k, window=window, backend="cudnn").shape == q.shape
    options = {"is_causal": True, "implementation": "cudnn", "local_window_size": (window, 0) if window < 15 else None}
    assert calls == [((2, 16, 4, 8), (2, 16, 2, 8), (2, 16, 2, 8), options)]


@pytest.mark.parametrize("window", [100, 255])
def test_the_program_for_a_gpu_calls_cudnn_with_the_window(window, monkeypatch):
    """Lowered for CUDA on a machine without it. cuDNN counts the query itself: window w is its length w + 1."""
    from jax._src.cudnn import fused_attention_stablehlo as cudnn

    monkeypatch.setattr(cudnn, "check_cudnn_version", lambda: 91100)
    monkeypatch.setattr(cudnn, "check_compute_capability", lambda capability: True)
    q, k = (jax.ShapeDtypeStruct((2, heads, 256, 128), jnp.bfloat16) for heads in (4, 2))
    grad = jax.grad(lambda *a: attention(*a, window=window, backend="cudnn").sum(dtype=jnp.float32), argnums=(0, 1, 2))
    program = jax.jit(grad).trace(q, k, k).lower(lowering_platforms=("cuda",)).as_text()
    assert set(re.findall(r"__cudnn\$fmhaSoftmax\w*", program)) == {
        "__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"
    }  # fmt: skip
    assert "256x256" not in program
    config = program.replace("\\22", '"')
    assert set(re.findall(r'"mask_type": *"(\w+)"', config)) == {"CAUSAL"}
    expected = window + 1 if window < 255 else 0
    assert set(re.findall(r'"sliding_window_length": *(\d+)', config)) == {str(expected)}
