"""How splash attention is called: its cache, its tiles and its scale (numbers and windows: tests/test_attention.py)."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nanochat_lib.kernels import splash
from nanochat_lib.kernels.tiles import tiles


def shapes(t: int = 300, d: int = 128):
    return tuple(jax.ShapeDtypeStruct((2, heads, t, d), jnp.bfloat16) for heads in (4, 2, 2))


@pytest.fixture
def calls(monkeypatch):
    """Arguments of every kernel that is asked for."""
    found = []
    monkeypatch.setattr(splash, "kernel", lambda *args: found.append(args) or (lambda q, k, v: q))
    return found


def test_a_kernel_that_was_built_while_tracing_holds_no_tracer():
    """First use under two nested traces, then its tables are read outside of them."""
    splash.kernel.cache_clear()
    jax.make_jaxpr(jax.grad(lambda *a: splash.splash_attention(*a, window=100).sum(dtype=jnp.float32)))(*shapes())
    assert splash.kernel.cache_info().currsize == 1
    made = splash.kernel(4, 100, tiles("", 128, 300, 100), False)
    leaves = jax.tree.leaves(made)
    assert leaves and all(type(leaf) is np.ndarray for leaf in leaves)
    assert made.fwd_mask_info.partial_mask_blocks is None  # the window is computed in the kernel, not loaded


def test_the_chips_tiles_reach_the_kernel(calls):
    jax.eval_shape(partial(splash.splash_attention, window=512, chip="v6e"), *shapes(2048))
    assert calls == [(4, 512, tiles("v6e", 128, 2048, 512), False)]


@pytest.mark.parametrize(
    ("t", "window", "expected"), [(300, 298, 298), (300, 299, 384), (300, 4096, 384), (512, 511, 512)]
)
def test_a_window_that_hides_nothing_is_plain_causality(calls, t, window, expected):
    """Although the padded length would still have room for a window."""
    jax.eval_shape(partial(splash.splash_attention, window=window), *shapes(t))
    assert calls[0][1] == expected and calls[0][2].length == tiles("", 128, t, window).length


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("d", [32, 64, 128])
def test_queries_are_scaled_in_float32(calls, d, dtype):
    """The stand-in returns the scaled queries."""
    q = np.random.default_rng(0).standard_normal((1, 1, 128, d)).astype(np.float32).astype(dtype)
    ours = np.asarray(splash.splash_attention(q, q, q, window=3))
    assert ours.dtype == dtype
    once = (q.astype(np.float64) / np.sqrt(d)).astype(dtype)
    limit = 0 if dtype == jnp.bfloat16 else 2e-7
    np.testing.assert_allclose(ours.astype(np.float64), once.astype(np.float64), rtol=limit)
