"""fp8 layers against float64 arithmetic on the same rounded values, and against the layer without fp8."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat_lib import gpt
from nanochat_lib.fp8 import E4M3, E5M2, fp8_applies, fp8_linear, quantise, saturating_cast
from nanochat_lib.layers import linear
from nanochat_lib.sizing import GPTConfig

LARGEST = {E4M3: 448.0, E5M2: 57344.0}
SHAPES = (96, 160), (128, 160), (96, 128)  # x, weight, dy


def passes(layer):
    """x, weight, dy → y, dx, dweight, compiled together, so that the compiler could cheat."""

    def run(x, weight, dy):
        y, back = jax.vjp(layer, x, weight)
        return y, *back(dy)

    return jax.jit(run)


fp8_passes, exact_passes = passes(fp8_linear), passes(linear)
cast = {dtype: jax.jit(lambda x, dtype=dtype: saturating_cast(x, dtype)) for dtype in LARGEST}
quantised = {dtype: jax.jit(lambda x, dtype=dtype: quantise(x, dtype)) for dtype in LARGEST}


def draw(seed, dtype=jnp.float32, sizes=(1.0, 0.1, 1e-3)):
    random = np.random.default_rng(seed)
    x, weight, dy = (size * random.standard_normal(shape) for size, shape in zip(sizes, SHAPES, strict=True))
    return jnp.asarray(x, dtype), jnp.asarray(weight, jnp.float32), jnp.asarray(dy, dtype)


def by_hand(x, dtype):
    """(rounded values, inverse scale) in float64 by numpy and ml_dtypes."""
    x, largest = np.asarray(x, np.float32), LARGEST[dtype]
    scale = np.float32(largest / max(float(np.abs(x).max()), 1e-12))
    q = np.clip(x * scale, -largest, largest).astype(ml_dtypes.finfo(dtype).dtype)
    return q.astype(np.float64), 1.0 / np.float64(scale)


def emulated(x, weight, dy):
    (x, sx), (weight, sw), (dy, sd) = by_hand(x, E4M3), by_hand(weight, E4M3), by_hand(dy, E5M2)
    return x @ weight.T * (sx * sw), dy @ weight * (sd * sw), dy.T @ x * (sd * sx)


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**31), size=st.sampled_from([1e-30, 1e-9, 1.0, 1e9, 1e30]))
def test_equals_float64_on_the_same_rounded_values(seed, size):
    """1e-6 of the largest entry, most of it the float32 sums; sizes as far as float32 reaches."""
    given_arrays = draw(seed, sizes=(size, 0.1, 1e-3))
    for got, expected in zip(fp8_passes(*given_arrays), emulated(*given_arrays), strict=True):
        assert got.dtype == jnp.float32 and got.shape == expected.shape
        assert np.abs(got - expected).max() <= 1e-6 * np.abs(expected).max()


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_distance_from_the_layer_without_fp8(dtype):
    """Relative error in the Frobenius norm. Measured on these draws: y 0.038, gradients 0.060."""
    for seed in range(5):
        x, weight, dy = draw(seed, dtype)
        exact = exact_passes(x.astype(jnp.float32), weight, dy.astype(jnp.float32))
        for got, expected, bound in zip(fp8_passes(x, weight, dy), exact, (0.042, 0.066, 0.066), strict=True):
            error = float(jnp.linalg.norm(got.astype(jnp.float32) - expected) / jnp.linalg.norm(expected))
            assert 0.005 < error <= bound  # too near would mean that nothing was rounded


def test_types_and_leading_axes():
    x, weight, dy = draw(1, jnp.bfloat16)
    flat, deep = (fp8_passes(x.reshape(*rows, 160), weight, dy.reshape(*rows, 128)) for rows in ((96,), (2, 3, 16)))
    assert [a.dtype for a in deep] == [jnp.bfloat16, jnp.bfloat16, jnp.float32]
    assert [a.shape for a in deep] == [(2, 3, 16, 128), (2, 3, 16, 160), (128, 160)]
    assert all(np.array_equal(a.ravel(), b.ravel()) for a, b in zip(flat, deep, strict=True))
    for got, expected in zip(deep, emulated(x, weight, dy), strict=True):  # rounded once more, by half a step of 2^-7
        flat = np.asarray(got, np.float64).reshape(expected.shape)
        np.testing.assert_allclose(flat, expected, rtol=2**-8, atol=1e-6 * np.abs(expected).max())
    assert fp8_passes(x, weight.astype(jnp.bfloat16), dy)[2].dtype == jnp.bfloat16


@pytest.mark.parametrize("dtype", LARGEST, ids=["e4m3", "e5m2"])
def test_saturating_cast_rounds_as_ml_dtypes_and_never_overflows(dtype):
    random = np.random.default_rng(3)
    x = (random.standard_normal(200_000) * 10.0 ** random.uniform(-9, 7, 200_000)).astype(np.float32)
    largest = LARGEST[dtype]
    x[:6] = 500, -500, 1e6, -np.inf, np.inf, largest
    expected = np.clip(x, -largest, largest).astype(ml_dtypes.finfo(dtype).dtype)
    assert np.array_equal(np.asarray(cast[dtype](x)).view(np.uint8), expected.view(np.uint8))
    assert float(np.abs(np.asarray(cast[dtype](x), np.float32)).max()) == largest
    assert np.isnan(float(cast[dtype](np.float32(np.nan))))
    assert not np.isfinite(float(jnp.float32(1e6).astype(dtype)))  # why it is needed


@pytest.mark.parametrize("dtype", LARGEST, ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("size", [0.0, 1e-40, 1e-13, 1e-12, 1e-3, 1.0, 3.3e38])
def test_quantise_puts_the_largest_at_the_end_of_the_range(dtype, size):
    x = size * np.linspace(-1, 0.5, 64, dtype=np.float32)
    q, inverse = quantised[dtype](x)
    expected, expected_inverse = by_hand(x, dtype)
    assert q.dtype == dtype and inverse.dtype == jnp.float32 and inverse.shape == ()
    np.testing.assert_allclose(inverse, expected_inverse, rtol=2e-7)
    assert np.array_equal(np.asarray(q, np.float64), expected)
    if size >= 1e-12:
        assert float(q[0]) == -LARGEST[dtype]
        step = 2.0**-4 if dtype == E4M3 else 2.0**-3  # half of the last mantissa bit
        np.testing.assert_allclose(np.asarray(q, np.float64) * float(inverse), x, rtol=1.001 * step, atol=1e-4 * size)


def test_zeros_give_zeros():
    x, weight, dy = draw(4)
    for zeroed in ((0 * x, weight, dy), (x, 0 * weight, dy), (x, weight, 0 * dy), (0 * x, 0 * weight, 0 * dy)):
        results = fp8_passes(*zeroed)
        zero = [
            not np.any(a) or not np.any(b) for a, b in ((zeroed[0], zeroed[1]), (zeroed[2], zeroed[1]), zeroed[::2])
        ]
        assert [not np.any(r) for r in results] == zero and all(np.isfinite(r).all() for r in results)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize(("argument", "touched"), [(0, (0, 2)), (1, (0, 1)), (2, (1, 2))])
def test_one_bad_number_shows_wherever_it_went(bad, argument, touched):
    """Every result entry that such a number enters is NaN, and results that it does not enter are finite."""
    arrays = list(draw(5))
    arrays[argument] = arrays[argument].at[3, 4].set(bad)
    for i, (got, reference) in enumerate(zip(fp8_passes(*arrays), exact_passes(*arrays), strict=True)):
        entered = ~np.isfinite(np.asarray(reference))
        assert entered.any() == (i in touched)
        assert np.isnan(np.asarray(got)[entered]).all()
        assert i in touched or np.isfinite(got).all()


def test_products_are_of_fp8_and_only_fp8_is_kept():
    """What XLA's rewriter needs, fp8 operands with a float32 result; e5m2 only for the gradient that comes in."""
    x, weight, dy = draw(6, jnp.bfloat16)
    tensor = r"tensor<[\dx]+x(\w+)>"
    pattern = rf"dot_general .*precision = \[(\w+), \w+\] : \({tensor}, {tensor}\) -> {tensor}"
    products = re.findall(pattern, fp8_passes.lower(x, weight, dy).as_text())
    forward, back = ("DEFAULT", "f8E4M3FN", "f8E4M3FN", "f32"), ("HIGHEST", "f8E5M2", "f8E4M3FN", "f32")
    assert products == [forward, back, back]
    kept = jax.tree.leaves(jax.eval_shape(lambda: jax.vjp(fp8_linear, x, weight)[1]))
    assert sum(a.size * a.dtype.itemsize for a in kept) <= x.size + weight.size + 8


def test_only_the_blocks_matrices_are_converted():
    config = GPTConfig(n_layer=4, n_head=6, n_kv_head=2, n_embd=768)
    converted = {name for name, shape in gpt.param_shapes(config).items() if fp8_applies(name, shape)}
    matrices = "attn.c_q", "attn.c_k", "attn.c_v", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"
    assert converted == {f"transformer.h.{i}.{matrix}.weight" for i in range(4) for matrix in matrices}
    name = "transformer.h.0.mlp.c_fc.weight"
    assert fp8_applies(name, (128, 144)) and not any(
        fp8_applies(name, shape) for shape in ((112, 512), (512, 112), (512, 136), (136, 512), (512,), (2, 512, 512))
    )
    for excluded in ("lm_head.weight", "transformer.wte.weight", "transformer.h.0.attn.ve_gate.weight"):
        assert not fp8_applies(excluded, (1024, 1024))


def test_a_small_network_learns_as_well_with_fp8():
    """Thirty steps of Adam on a two-layer regression. Measured: from 0.742 to 0.157 with fp8, to 0.156 without."""
    random = np.random.default_rng(7)
    x = random.standard_normal((256, 128)).astype(np.float32)
    y = np.tanh(x @ random.standard_normal((128, 128)).astype(np.float32) / 12)
    start = [random.standard_normal((128, 128)).astype(np.float32) / 12 for _ in range(2)]
    optimizer = optax.adam(3e-3)

    def train(layer):
        def loss(weights):
            return jnp.mean((layer(jax.nn.relu(layer(x, weights[0])), weights[1]) - y) ** 2)

        def step(state, _):
            value, gradients = jax.value_and_grad(loss)(state[0])
            updates, moments = optimizer.update(gradients, state[1])
            return (optax.apply_updates(state[0], updates), moments), value

        return jax.jit(lambda: jax.lax.scan(step, (start, optimizer.init(start)), length=30)[1])()

    with_fp8, without = train(fp8_linear), train(linear)
    assert without[-1] < 0.25 * without[0] and not np.array_equal(with_fp8, without)
    assert with_fp8[-1] < 1.05 * without[-1]
