"""Every attention backend against float64 and against each rule of the contract: window, causality, heads, edges."""

from __future__ import annotations

import warnings
from functools import lru_cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from exact import draw, exact, largest_errors, seen, with_gradients
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat_lib.attention import (
    BACKENDS,
    attention,
    cached_attention,
    choose_backend,
    parse_backend,
    rotary_table,
    rotate,
    visible,
)
from nanochat_lib.errors import UserError
from nanochat_lib.kernels import tiled, tiles
from nanochat_lib.kernels.cudnn import cudnn_attention

# cuDNN needs its GPU; the same arguments without it show that they mean the right thing.
RUNNABLE = {name: partial(attention, backend=name) for name in ("reference", "xla", "pallas-interpret")}
RUNNABLE["cudnn's arguments"] = jax.numpy_dtype_promotion("standard")(partial(cudnn_attention, implementation="xla"))
SPLASH = partial(attention, backend="splash-interpret")


@pytest.fixture
def small_tiles(monkeypatch):
    """Tiles of 16 queries, so that short sequences already cross the borders of the xla backend's tiles."""
    monkeypatch.setattr(tiled, "query_tile", lambda length: 16)


@pytest.fixture
def small_splash_tiles(monkeypatch):
    """Splash tiles of 128, so that 256 tokens are four of them."""
    monkeypatch.setattr(tiles, "LARGEST", {("v6e", 256): (128, 128)})
    tiles.tiles.cache_clear()
    yield
    tiles.tiles.cache_clear()


@lru_cache
def compiled(name: str, window: int):
    return with_gradients(partial(RUNNABLE.get(name, SPLASH), window=window))


def naive(q, k, v, window, positions=None):
    """Loops over every (row, head, query) in float64; queries stand at `positions`, by default at the last keys."""
    q, k, v = (np.asarray(a, np.float64) for a in (q, k, v))
    (b, h, tq, d), (kv_heads, tk) = q.shape, k.shape[1:3]
    y = np.zeros((b, h, tq, d))
    for row in range(b):
        for head in range(h):
            kv = head // (h // kv_heads)
            for t in range(tq):
                p = tk - tq + t if positions is None else int(positions[row])
                keys = [s for s in range(tk) if p - window <= s <= p]
                if keys:
                    scores = np.array([q[row, head, t] @ k[row, kv, s] for s in keys]) / np.sqrt(d)
                    weights = np.exp(scores - scores.max())
                    y[row, head, t] = (weights / weights.sum()) @ v[row, kv, keys]
    return y


@pytest.mark.parametrize(("h", "kv_heads", "tq", "tk", "window"), [(2, 2, 9, 9, 3), (6, 2, 5, 12, 4), (3, 1, 7, 4, 9)])
def test_the_float64_reference_equals_naive_loops(h, kv_heads, tq, tk, window):
    q, k, v, _ = draw(tq, 2, h, kv_heads, tq, tk, 8)
    np.testing.assert_allclose(exact(q, k, v, window)[0], naive(q, k, v, window), atol=1e-13)


@pytest.mark.parametrize(("window", "h", "kv_heads"), [(0, 2, 2), (3, 4, 2), (7, 4, 1), (50, 2, 2)])
def test_the_float64_reference_and_its_gradients_equal_torch(window, h, kv_heads):
    q, k, v, dy = (a.astype(np.float64) for a in draw(7, 2, h, kv_heads, 11, 11, 8))
    tensors = [torch.tensor(a, requires_grad=True) for a in (q, k, v)]
    mask = torch.from_numpy(seen(11, 11, window))
    y = torch.nn.functional.scaled_dot_product_attention(*tensors, attn_mask=mask, enable_gqa=True)
    y.backward(torch.from_numpy(dy))
    for ours, theirs in zip(exact(q, k, v, window, dy), (y, *(t.grad for t in tensors)), strict=True):
        np.testing.assert_allclose(ours, theirs.detach().numpy(), atol=1e-12)


# --- Values and gradients of every backend


def check_parity(name: str, window: int, h: int, kv_heads: int, dtype: str, t: int = 40, d: int = 16) -> None:
    """Float32 to 1e-5, gradients to 1e-4; bfloat16 to its own rounding of weights and scores."""
    arrays = draw(window, 2, h, kv_heads, t, t, d, jnp.dtype(dtype))
    ours = compiled(name, window)(*arrays)
    assert [a.dtype for a in ours] == [jnp.dtype(dtype)] * 4
    q, k, v, dy = arrays
    limits = (1e-5, 1e-4, 1e-4, 1e-4) if dtype == "float32" else (2e-2,) * 4
    assert all(
        error < limit for error, limit in zip(largest_errors(ours, exact(q, k, v, window, dy)), limits, strict=True)
    )


@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize(("h", "kv_heads", "dtype"), [(2, 2, "float32"), (4, 2, "float32"), (4, 2, "bfloat16")])
@pytest.mark.parametrize("window", [7, 39])
@pytest.mark.parametrize("name", RUNNABLE)
def test_parity(name, window, h, kv_heads, dtype):
    check_parity(name, window, h, kv_heads, dtype)


@pytest.mark.usefixtures("small_splash_tiles")
@pytest.mark.parametrize(
    ("window", "h", "kv_heads", "dtype", "t"),
    [
        (100, 4, 2, "float32", 200),
        (255, 2, 2, "bfloat16", 256),
        *(
            pytest.param(window, h, kv_heads, dtype, t, marks=pytest.mark.slow)
            for window, t in ((0, 256), (127, 129), (128, 128), (128, 129), (199, 200), (300, 200))
            for h, kv_heads, dtype in ((2, 2, "float32"), (4, 2, "bfloat16"), (4, 1, "float32"))
        ),
    ],
)
def test_parity_of_splash(window, h, kv_heads, dtype, t):
    """Lengths that are no multiple of 128 are padded inside."""
    check_parity("splash-interpret", window, h, kv_heads, dtype, t, d=32)


shapes = st.tuples(
    st.integers(1, 3), st.integers(1, 40), st.integers(-3, 9),
    st.sampled_from([(1, 1), (2, 2), (4, 2), (6, 2), (3, 1)]),
    st.sampled_from([2, 4, 8, 16]), st.integers(0, 45), st.integers(0, 2**31),
)  # fmt: skip


@settings(max_examples=8, deadline=None)
@given(name=st.sampled_from(["xla", "reference"]), shape=shapes)
def test_random_shapes_with_more_or_fewer_keys_than_queries(name, shape):
    b, tq, extra, (h, kv_heads), d, window, seed = shape
    q, k, v, dy = draw(seed, b, h, kv_heads, tq, max(1, tq + extra), d)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiled, "query_tile", lambda length: 16)
        ours = with_gradients(partial(attention, window=window, backend=name))(q, k, v, dy)
    assert max(largest_errors(ours, exact(q, k, v, window, dy))) < 1e-5


@pytest.mark.parametrize("name", ["reference", "xla"])
def test_float64_stays_float64(name):
    arrays = [a.astype(np.float64) for a in draw(2, 1, 2, 1, 40, 40, 8)]
    with jax.enable_x64(True):
        ours = with_gradients(partial(attention, window=7, backend=name))(*arrays)
    assert [a.dtype for a in ours] == [np.float64] * 4
    assert max(largest_errors(ours, exact(*arrays[:3], 7, arrays[3]))) < 1e-13


@pytest.mark.parametrize("t", [7, 8, 9])
@pytest.mark.parametrize("name", RUNNABLE)
def test_lengths_around_the_window(name, t):
    q, k, v, dy = draw(t, 1, 2, 2, t, t, 8)
    assert max(largest_errors(compiled(name, 8)(q, k, v, dy), exact(q, k, v, 8, dy))) < 1e-5


@pytest.mark.parametrize(
    ("name", "t", "window"),
    [("xla", 512, 1), ("xla", 512, 512), ("xla", 513, 2), ("xla", 513, 128), ("pallas-interpret", 513, 128)],
)
def test_long_sequences(name, t, window):
    q, k, v, dy = draw(t, 1, 2, 1, t, t, 4)
    assert max(largest_errors(compiled(name, window)(q, k, v, dy), exact(q, k, v, window, dy))) < 1e-5


# --- What a query sees


def check_what_a_query_sees(name: str, window: int, t: int) -> None:
    """With v the identity the output is the weights; and neither values nor gradients cross from the future."""
    q, k, _, dy = draw(1, 1, 1, 1, t, t, t)
    f = compiled(name, window)
    eye = np.eye(t, dtype=np.float32)[None, None]
    weights = np.asarray(f(q, k, eye, dy)[0])[0, 0]
    assert np.array_equal(weights != 0, seen(t, t, window))
    np.testing.assert_allclose(weights.sum(axis=1), 1, atol=2e-6)
    before = [np.asarray(a) for a in f(q, k, eye, dy)]
    for cut in sorted({1, 2, t // 2, t - 1}):
        changed = [a.copy() for a in (q, k, eye)]
        for a in changed:
            a[:, :, cut:] = 1e3
        past = dy.copy()
        past[:, :, cut:] = 0
        y, dq, dk, dv = (np.asarray(a) for a in f(*changed, past))
        assert np.array_equal(y[:, :, :cut], before[0][:, :, :cut])
        assert np.array_equal(dq[:, :, :cut], before[1][:, :, :cut])
        assert not dq[:, :, cut:].any() and not dk[:, :, cut:].any() and not dv[:, :, cut:].any()
        assert dv[:, :, :cut].any()


@pytest.mark.parametrize("window", [0, 1, 16])
@pytest.mark.parametrize("name", RUNNABLE)
def test_a_query_sees_its_window_and_itself_and_nothing_of_the_future(name, window):
    check_what_a_query_sees(name, window, 16)


@pytest.mark.usefixtures("small_splash_tiles")
@pytest.mark.parametrize(
    "window", [100, *(pytest.param(window, marks=pytest.mark.slow) for window in (0, 1, 127, 128, 255, 300))]
)
def test_a_query_of_splash_sees_its_window_and_itself_and_nothing_of_the_future(window):
    check_what_a_query_sees("splash-interpret", window, 256)


@pytest.mark.parametrize("name", ["reference", "xla", "pallas-interpret"])
def test_a_query_without_keys_gives_zero_and_finite_gradients(name):
    """Five queries on two keys: the first three stand before every key."""
    q, k, v, _ = draw(5, 1, 2, 2, 5, 2, 4)
    y, dq, dk, dv = (np.asarray(a) for a in compiled(name, 9)(q, k, v, np.ones_like(q)))
    assert not y[:, :, :3].any() and not dq[:, :, :3].any()
    assert max(largest_errors((y, dq, dk, dv), exact(q, k, v, 9))) < 1e-5


@pytest.mark.parametrize("name", RUNNABLE)
def test_large_scores_do_not_overflow(name):
    q, k, v, dy = draw(9, 1, 1, 1, 16, 16, 16)
    y, *gradients = compiled(name, 15)(q * 1e4, k * 1e4, v, dy)
    np.testing.assert_allclose(y, exact(q * 1e4, k * 1e4, v, 15)[0], atol=1e-5)
    assert all(np.isfinite(g).all() for g in gradients)


@pytest.mark.parametrize("name", ["xla", "pallas", "splash:v6e"])
@pytest.mark.parametrize("window", [128, 4096])
def test_no_backend_builds_the_full_score_matrix(name, window):
    shape = jax.ShapeDtypeStruct((1, 2, 4096, 128), jnp.float32)
    grad = jax.grad(lambda q, k, v: attention(q, k, v, window=window, backend=name).sum(), argnums=(0, 1, 2))
    program = str(jax.make_jaxpr(grad)(shape, shape, shape))
    assert "4096,128" in program and "4096,4096" not in program


def test_a_small_window_needs_little_memory():
    shape = jax.ShapeDtypeStruct((1, 2, 4096, 8), jnp.float32)
    grad = jax.grad(lambda q, k, v: attention(q, k, v, window=128).sum(), argnums=(0, 1, 2))
    biggest = jax.jit(grad).lower(shape, shape, shape).compile().memory_analysis().temp_size_in_bytes
    assert biggest < 2 * 4096 * 4096 * 4  # one float32 score matrix of the two heads


# --- Decoding


@lru_cache
def cached(window):
    return jax.jit(lambda q, k, v, positions: cached_attention(q, k, v, positions=positions, window=window))


def test_a_cached_row_without_keys_gives_zero():
    q, k, v, dy = draw(6, 3, 2, 2, 1, 4, 4)
    f = with_gradients(lambda *a: cached_attention(*a, positions=jnp.asarray([-1, 0, -1]), window=3))
    y, *gradients = f(q, k, v, dy)
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
    q, k, v, _ = draw(seed, len(positions), *heads, 1, 12, 4)
    for row, p in enumerate(positions):  # slots after the row's own position hold garbage
        k[row, :, p + 1 :] = v[row, :, p + 1 :] = 1e3
    y = cached(window)(q, k, v, jnp.asarray(positions))
    np.testing.assert_allclose(y, naive(q, k, v, window, positions), atol=3e-6)


# --- Names and choice of a backend


def test_mistakes_are_user_errors():
    q, k, v, _ = draw(11, 1, 3, 2, 4, 4, 4)
    with pytest.raises(UserError, match="3 query heads .* 2 key/value heads"):
        attention(q, k, v, window=1)
    for name in BACKENDS:
        with pytest.raises(UserError, match="window -1 is negative"):
            attention(q, q, q, window=-1, backend=name)
    with pytest.raises(UserError, match="'flash' is unknown, use xla, pallas, splash"):
        attention(q, q, q, window=1, backend="flash")
    for name in ("splash", "splash-interpret", "cudnn"):
        with pytest.raises(UserError, match="as many queries as keys, got 3 and 4"):
            attention(q[:, :, :3], q, q, window=1, backend=name)


def test_names_of_backends():
    assert parse_backend("xla") == ("xla", "", False)
    assert parse_backend("splash:v6e") == ("splash", "v6e", False)
    assert parse_backend("splash-interpret:v5e") == ("splash", "v5e", True)
    assert parse_backend("pallas-interpret") == ("pallas", "", True)
    for wrong in (
        "",
        "xla:v6e",
        "xla-interpret",
        "cudnn-interpret",
        "reference-interpret",
        "SPLASH",
        "auto",
        "pallas:",
    ):
        with pytest.raises(UserError, match="unknown"):
            parse_backend(wrong)


MODEL = {"length": 2048, "head_dim": 128, "dtype": "bfloat16"}


@pytest.mark.parametrize(
    ("platform", "kind", "change", "expected"),
    [
        ("cpu", "cpu", {}, "xla"),
        ("cpu", "", {"dtype": "float64", "head_dim": 3}, "xla"),
        ("tpu", "TPU v6 lite", {}, "splash:v6e"),
        ("tpu", "TPU v5 lite", {"dtype": "float32"}, "splash:v5e"),
        ("tpu", "TPU v5p", {"length": 1000}, "splash:v5p"),
        ("tpu", "TPU v9", {"head_dim": 256}, "splash"),
        ("gpu", "NVIDIA H100 80GB HBM3", {}, "cudnn"),
        ("gpu", "NVIDIA H100 80GB HBM3", {"head_dim": 256}, "cudnn"),
        ("gpu", "NVIDIA A100-SXM4-80GB", {"dtype": "float16", "head_dim": 64}, "cudnn"),
        ("cuda", "", {}, "cudnn"),
        ("gpu", "NVIDIA RTX 2000 Ada Generation", {}, "cudnn"),
    ],
)
def test_auto_takes_the_devices_own_kernel(platform, kind, change, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_backend("auto", platform, device_kind=kind, **(MODEL | change)) == expected


@pytest.mark.parametrize(
    ("platform", "kind", "change", "reason"),
    [
        ("gpu", "NVIDIA H100 80GB HBM3", {"dtype": "float32"}, "bfloat16 and float16, not in float32"),
        ("gpu", "NVIDIA A100-SXM4-80GB", {"head_dim": 256}, "up to 128 on NVIDIA A100"),
        ("gpu", "NVIDIA H100 80GB HBM3", {"head_dim": 264}, "up to 256 on NVIDIA H100"),
        ("gpu", "NVIDIA H100 80GB HBM3", {"head_dim": 100}, "multiples of 8 .* not 100"),
        ("gpu", "Tesla T4", {}, "from the Ampere generation on, not on Tesla T4"),
        ("gpu", "Tesla V100-SXM2-16GB", {}, "Ampere"),
        ("gpu", "NVIDIA GeForce RTX 2080 Ti", {}, "Ampere"),
        ("gpu", "AMD Instinct MI300X", {}, "NVIDIA GPUs"),
        ("tpu", "TPU v6 lite", {"dtype": "float16"}, "float32 and bfloat16, not in float16"),
        ("tpu", "TPU v6 lite", {"head_dim": 512}, "up to 256, not 512"),
        ("metal", "Apple M3", {}, "no flash kernel for metal"),
    ],
)
def test_an_accelerator_that_falls_back_warns_why_and_what_it_costs(platform, kind, change, reason):
    with pytest.warns(UserWarning, match=f"{reason}.*slower, and with 256 × 2048 scores"):
        assert choose_backend("auto", platform, device_kind=kind, **(MODEL | change)) == "xla"


@pytest.mark.parametrize(
    ("setting", "platform", "kind", "expected"),
    [
        ("xla", "tpu", "TPU v6 lite", "xla"),
        ("reference", "gpu", "", "reference"),
        ("splash", "tpu", "TPU v6 lite", "splash:v6e"),
        ("splash:v5e", "tpu", "TPU v6 lite", "splash:v5e"),
        ("pallas", "tpu", "TPU v6 lite", "pallas"),
        ("cudnn", "gpu", "NVIDIA H200", "cudnn"),
        ("splash-interpret", "cpu", "cpu", "splash-interpret"),
        ("pallas-interpret", "cpu", "cpu", "pallas-interpret"),
    ],
)
def test_a_setting_is_kept(setting, platform, kind, expected):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert choose_backend(setting, platform, device_kind=kind, **MODEL) == expected


@pytest.mark.parametrize(
    ("setting", "platform", "change", "reason"),
    [
        ("splash", "cpu", {}, "splash runs on TPUs, not on cpu"),
        ("splash:v6e", "gpu", {}, "splash runs on TPUs, not on gpu"),
        ("pallas", "cpu", {}, "pallas runs on TPUs, not on cpu"),
        ("pallas", "tpu", {"dtype": "float16"}, "not in float16"),
        ("cudnn", "cpu", {}, "cudnn runs on NVIDIA GPUs"),
        ("cudnn", "gpu", {"dtype": "float32"}, "not in float32"),
        ("cudnn", "gpu", {"head_dim": 136}, "up to 128"),
        ("nosuch", "cpu", {}, "'nosuch' is unknown"),
    ],
)
def test_a_setting_that_cannot_work_is_a_user_error(setting, platform, change, reason):
    with pytest.raises(UserError, match=reason):
        choose_backend(setting, platform, **(MODEL | change))


# --- Rotary position embedding


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
