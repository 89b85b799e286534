"""Attention against independent float64 numpy and against PyTorch, in values and gradients."""

from __future__ import annotations

import importlib
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat_lib.attention import attention, cached_attention, rotary_table, rotate, visible
from nanochat_lib.errors import UserError

module = importlib.import_module("nanochat_lib.attention")  # the package's attribute of that name is the function


def naive(q, k, v, window, positions=None):
    """Loops over every (row, head, query) in float64; queries stand at `positions`, by default at the last keys."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    (b, tq, h, d), (tk, kv_heads) = q.shape, k.shape[1:3]
    y = np.zeros((b, tq, h, d))
    for row in range(b):
        for head in range(h):
            kv = head // (h // kv_heads)
            for t in range(tq):
                p = tk - tq + t if positions is None else int(positions[row])
                seen = [s for s in range(tk) if p - window <= s <= p]
                if seen:
                    scores = np.array([q[row, t, head] @ k[row, s, kv] for s in seen]) / np.sqrt(d)
                    weights = np.exp(scores - scores.max())
                    y[row, t, head] = (weights / weights.sum()) @ v[row, seen, kv]
    return y


def draw(seed, b, tq, tk, h, kv_heads, d):
    random = np.random.default_rng(seed)
    shapes = (b, tq, h, d), (b, tk, kv_heads, d), (b, tk, kv_heads, d)
    return [random.standard_normal(s).astype(np.float32) for s in shapes]


def compiled(window, backend="xla"):
    return jax.jit(lambda q, k, v: attention(q, k, v, window=window, backend=backend))


@lru_cache
def cached(window):
    return jax.jit(lambda q, k, v, positions: cached_attention(q, k, v, positions=positions, window=window))


def values_and_gradients(f, q, k, v, g):
    """(f(q, k, v), its gradients for the cotangent g), compiled as one."""

    @jax.jit
    def both(q, k, v, g):
        y, pull = jax.vjp(f, q, k, v)
        return y, pull(g)

    return both(q, k, v, g)


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of five queries, so that short sequences already cross tile borders."""
    monkeypatch.setattr(module, "query_tile", lambda length: 5)


shapes = st.tuples(
    st.integers(1, 3), st.integers(1, 17), st.integers(0, 9), st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (3, 1)]),
    st.sampled_from([2, 4, 8, 16]), st.integers(0, 20), st.integers(0, 2**31),
)  # fmt: skip


@settings(max_examples=12, deadline=None)
@given(backend=st.sampled_from(["xla", "reference"]), shape=shapes)
def test_equals_naive_loops(backend, shape):
    b, tq, extra, (h, kv_heads), d, window, seed = shape
    q, k, v = draw(seed, b, tq, tq + extra, h, kv_heads, d)
    np.testing.assert_allclose(compiled(window, backend)(q, k, v), naive(q, k, v, window), atol=3e-6)


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("extra", [0, 3])
@pytest.mark.parametrize("window", [0, 1, 4, 5, 6, 12])
def test_tiles_equal_naive_loops(window, extra):
    q, k, v = draw(window, 2, 13, 13 + extra, 4, 2, 8)
    np.testing.assert_allclose(compiled(window)(q, k, v), naive(q, k, v, window), atol=3e-6)


@pytest.mark.parametrize("tiled", [False, True])
@pytest.mark.parametrize(("window", "h", "kv_heads"), [(0, 2, 2), (3, 4, 2), (7, 4, 1), (50, 2, 2)])
def test_values_and_gradients_equal_torch(window, h, kv_heads, tiled, monkeypatch):
    if tiled:
        monkeypatch.setattr(module, "query_tile", lambda length: 4)
    q, k, v = draw(7, 2, 11, 11, h, kv_heads, 8)
    g = np.random.default_rng(8).standard_normal(q.shape).astype(np.float32)
    rows, cols = np.arange(11)[:, None], np.arange(11)[None]
    mask = torch.from_numpy((cols <= rows) & (rows - cols <= window))
    tensors = [torch.tensor(a.transpose(0, 2, 1, 3), requires_grad=True) for a in (q, k, v)]
    y = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True)
    (y * torch.from_numpy(g.transpose(0, 2, 1, 3))).sum().backward()
    ours, gradients = values_and_gradients(lambda *a: attention(*a, window=window), q, k, v, g)
    np.testing.assert_allclose(ours, y.detach().numpy().transpose(0, 2, 1, 3), atol=2e-6)
    for mine, theirs in zip(gradients, tensors, strict=True):
        np.testing.assert_allclose(mine, theirs.grad.numpy().transpose(0, 2, 1, 3), atol=5e-6)


@pytest.mark.parametrize(("length", "window"), [(512, 1), (513, 2), (513, 128), (1100, 512), (1100, 4096)])
def test_long_sequences_equal_the_reference(length, window):
    q, k, v = draw(length, 1, length, length, 2, 1, 4)
    np.testing.assert_allclose(compiled(window)(q, k, v), compiled(window, "reference")(q, k, v), atol=3e-6)


def test_a_small_window_never_builds_the_full_score_matrix():
    shape = jax.ShapeDtypeStruct((1, 4096, 2, 8), jnp.float32)
    grad = jax.grad(lambda q, k, v: attention(q, k, v, window=128).sum(), argnums=(0, 1, 2))
    assert "4096,4096" not in str(jax.make_jaxpr(grad)(shape, shape, shape))
    biggest = jax.jit(grad).lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes
    assert biggest < 2 * 4096 * 4096 * 4  # one float32 score matrix of the two heads


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize("window", [0, 1, 7, 30])
def test_visible_set_is_the_window_and_oneself(window, backend):
    """With v the identity the output is the attention weights themselves."""
    t = 8
    q, k, _ = draw(1, 1, t, t, 1, 1, t)
    weights = np.asarray(compiled(window, backend)(q, k, np.eye(t, dtype=np.float32)[None, :, None]))
    for query in range(t):
        assert set(np.flatnonzero(weights[0, query, 0])) == set(range(max(0, query - window), query + 1))
    np.testing.assert_allclose(weights.sum(-1), 1, atol=1e-6)


@pytest.mark.parametrize("backend", ["xla", "reference"])
@pytest.mark.parametrize("window", [0, 4])
def test_future_tokens_do_not_change_a_bit(window, backend):
    q, k, v = draw(3, 2, 12, 12, 2, 2, 8)
    f = jax.jit(lambda q, k, v: attention(q, k, v, window=window, backend=backend))
    before = np.asarray(f(q, k, v))
    for t in range(11):
        q2, k2, v2 = (a.copy() for a in (q, k, v))
        for a in (q2, k2, v2):
            a[:, t + 1 :] = 1e4
        assert np.array_equal(np.asarray(f(q2, k2, v2))[:, : t + 1], before[:, : t + 1])


@pytest.mark.parametrize("backend", ["xla", "reference"])
def test_a_query_without_keys_gives_zero_and_a_finite_gradient(backend):
    """Five queries on two keys: the first three stand before every key."""
    q, k, v = draw(5, 1, 5, 2, 2, 2, 4)
    y, gradients = values_and_gradients(lambda *a: attention(*a, window=9, backend=backend), q, k, v, np.ones_like(q))
    assert np.array_equal(y[:, :3], np.zeros((1, 3, 2, 4)))
    np.testing.assert_allclose(y, naive(q, k, v, 9), atol=2e-6)
    assert all(np.isfinite(g).all() for g in gradients)
    assert not np.any(gradients[0][:, :3])


def test_a_cached_row_without_keys_gives_zero():
    q, k, v = draw(6, 3, 1, 4, 2, 2, 4)
    positions = jnp.asarray([-1, 0, 9])
    f = lambda *a: cached_attention(*a, positions=positions, window=3)  # noqa: E731
    y, gradients = values_and_gradients(f, q, k, v, np.ones_like(q))
    assert not np.any(y[0]) and not np.any(y[2]) and np.any(y[1])
    assert all(np.isfinite(g).all() for g in gradients)


@settings(max_examples=15, deadline=None)
@given(
    positions=st.lists(st.integers(0, 11), min_size=3, max_size=3),
    window=st.sampled_from([0, 2, 11]),
    heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
    seed=st.integers(0, 2**31),
)
def test_cached_attention_equals_naive_loops(positions, window, heads, seed):
    q, k, v = draw(seed, len(positions), 1, 12, *heads, 4)
    for row, p in enumerate(positions):  # slots after the row's own position hold garbage
        k[row, p + 1 :] = v[row, p + 1 :] = 1e3
    y = cached(window)(q, k, v, jnp.asarray(positions))
    np.testing.assert_allclose(y, naive(q, k, v, window, positions), atol=3e-6)


def test_large_scores_do_not_overflow():
    q, k, v = draw(9, 1, 6, 6, 1, 1, 4)
    y = attention(q * 1e4, k * 1e4, v, window=6)
    np.testing.assert_allclose(y, naive(q * 1e4, k * 1e4, v, 6), atol=1e-5)


def test_bfloat16_keeps_its_dtype_and_float32_scores():
    q, k, v = (jnp.asarray(a, jnp.bfloat16) for a in draw(10, 2, 16, 16, 2, 1, 8))
    y = attention(q, k, v, window=5)
    assert y.dtype == jnp.bfloat16
    np.testing.assert_allclose(np.asarray(y, np.float64), naive(q, k, v, 5), atol=2e-2)


def test_mistakes_are_user_errors():
    q, k, v = draw(11, 1, 4, 4, 3, 2, 4)
    with pytest.raises(UserError, match="3 query heads .* 2 key/value heads"):
        attention(q, k, v, window=1)
    with pytest.raises(UserError, match="window -1 is negative"):
        attention(q, q, q, window=-1)
    with pytest.raises(UserError, match="'flash' is unknown, use xla or reference"):
        attention(q, q, q, window=1, backend="flash")


@pytest.mark.parametrize("head_dim", [16, 64, 128])
@pytest.mark.parametrize("base", [10_000.0, 100_000.0])
def test_rotary_table_equals_torch(head_dim, base):
    """Torch in float32, operation by operation as nanochat does it; the tables agree to two float32 roundings."""
    channels = torch.arange(0, head_dim, 2, dtype=torch.float32)
    angle = torch.outer(torch.arange(2048, dtype=torch.float32), 1.0 / base ** (channels / head_dim))
    for mine, theirs in zip(rotary_table(2048, head_dim, base), (angle.cos(), angle.sin()), strict=True):
        # One rounding of a frequency moves the last angle by 2048 · 6e-8.
        np.testing.assert_allclose(mine, theirs.numpy(), atol=1.3e-4)
        assert (mine == theirs.numpy()).mean() > 0.9


def test_rotary_table_of_recipe_4_holds_bfloat16_values():
    exact, rounded = rotary_table(300, 16, 10_000.0), rotary_table(300, 16, 10_000.0, True)
    for a, b in zip(exact, rounded, strict=True):
        assert b.dtype == np.float32
        assert np.array_equal(b, torch.from_numpy(a.copy()).to(torch.bfloat16).float().numpy())
        assert not np.array_equal(a, b)


def test_rotation_is_by_minus_the_angle_and_relative():
    """As complex numbers x1 + i·x2 the pair is multiplied by e^(-iθ), so q·k depends on the distance alone."""
    cos, sin = rotary_table(32, 8, 10_000.0)
    x = np.random.default_rng(0).standard_normal((32, 8)).astype(np.float32)
    y = np.asarray(rotate(x, cos, sin))
    expected = (x[:, :4] + 1j * x[:, 4:]) * (cos - 1j * sin)
    np.testing.assert_allclose(y[:, :4] + 1j * y[:, 4:], expected, atol=1e-6)
    q, k = (np.asarray(rotate(np.broadcast_to(x[i], (32, 8)), cos, sin)) for i in (0, 1))
    products = q @ k.T
    for distance in (0, 1, 7):
        np.testing.assert_allclose(np.diag(products, distance), products[0, distance], atol=2e-5)


def test_visible_counts():
    mask = np.asarray(visible(np.arange(6), np.arange(6), 2))
    assert mask.sum(axis=1).tolist() == [1, 2, 3, 3, 3, 3]
