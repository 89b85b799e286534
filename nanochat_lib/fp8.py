"""fp8 linear layers: tensorwise dynamic scaling, float32 masters, all three products of a layer in 8 bits.

Activations and weights are e4m3 (3 mantissa bits, ±448), gradients e5m2 (2 bits, ±57344), as in Micikevicius et al.,
arXiv:2209.05433. Only training uses it: a model is evaluated and sampled from with `layers.linear`. Numerics are
tested on the CPU, which emulates the products; speed on hardware with fp8 units is unmeasured.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
FLOOR = 1e-12  # smallest |x| that a scale is made for: an all-zero tensor must not divide by zero
MULTIPLE, SMALLEST = 16, 128  # of a matrix's sides: what the hardware wants, and what is worth its casts
FAST, EXACT = jax.lax.Precision.DEFAULT, jax.lax.Precision.HIGHEST

Quantised = tuple[jax.Array, jax.Array]  # fp8 values, float32 () that multiplies them


def fp8_applies(name: str, shape: tuple[int, ...]) -> bool:
    """Whether the weight `name` of `shape` [out, in] is computed in fp8: the blocks' matrices with both sides a
    multiple of 16 and at least 128.

    Gates never are, they are too thin. Neither is the head, although nanochat converts it by that same rule: its
    logits set the loss directly, and here its product is part of `losses.head_cross_entropy`. Embeddings are looked
    up, not multiplied.
    """
    return name.startswith("transformer.h.") and "gate" not in name and fp8_pays(shape)


def fp8_pays(shape: tuple[int, ...]) -> bool:
    """The rule of sizes in `fp8_applies`."""
    return len(shape) == 2 and all(side % MULTIPLE == 0 and side >= SMALLEST for side in shape)


def saturating_cast(x: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """x as fp8 `dtype`, rounded to nearest even; too large becomes the largest finite value, NaN stays NaN.

    A plain cast turns 500 into NaN in e4m3 and 1e6 into inf in e5m2.
    """
    largest = float(jnp.finfo(dtype).max)
    return jnp.clip(x.astype(jnp.float32), -largest, largest).astype(dtype)


def quantise(x: jax.Array, dtype: jax.typing.DTypeLike) -> Quantised:
    """(q, inverse scale): x ≈ q · inverse, with one float32 scale for the tensor that puts max|x| at the largest fp8.

    A NaN in x is a NaN in q, at least at its place (a maximum may overlook it: XLA's on CPUs does, in jax 0.10.2);
    an infinity makes everything that q is multiplied with NaN.
    """
    x = x.astype(jnp.float32)
    scale = float(jnp.finfo(dtype).max) / jnp.maximum(jnp.max(jnp.abs(x)), FLOOR)
    return saturating_cast(x * scale, dtype), 1.0 / scale


@jax.custom_vjp
def fp8_linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """`layers.linear` in fp8: (…, in), float32 [out, in] → (…, out) in x's dtype. dW is in the weight's dtype.

    y = x(e4m3) · W(e4m3)ᵀ, dx = dy(e5m2) · W(e4m3), dW = dy(e5m2)ᵀ · x(e4m3), summed in float32. The fp8 copies of x
    and W made in the forward pass are what is kept for the backward one.
    """
    return _forward(x, weight)[0]


def _product(a: Quantised, b: Quantised, contract: tuple[int, int], precision: jax.lax.Precision) -> jax.Array:
    """Float32 product of two quantised matrices over axis contract[0] of a and contract[1] of b.

    fp8 operands straight into the product and one scalar afterwards is the form that XLA turns into a scaled fp8
    kernel on GPUs; dequantised operands it has to recognise first, and does not always (jax#22313, xla#17887).
    There, precision DEFAULT also means fast accumulation, which nanochat has on forward and off backward.
    """
    (qa, inverse_a), (qb, inverse_b) = a, b
    dimensions = (((contract[0],), (contract[1],)), ((), ()))
    raw = jax.lax.dot_general(qa, qb, dimensions, precision=precision, preferred_element_type=jnp.float32)
    return raw * (inverse_a * inverse_b)


def _forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple]:
    xq, wq = quantise(x.reshape(-1, x.shape[-1]), E4M3), quantise(weight, E4M3)
    y = _product(xq, wq, (1, 1), FAST).astype(x.dtype)
    return y.reshape(*x.shape[:-1], -1), (xq, wq, jnp.zeros(0, weight.dtype))


def _backward(saved: tuple, dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    xq, wq, like_weight = saved
    dyq = quantise(dy.reshape(-1, dy.shape[-1]), E5M2)
    dx = _product(dyq, wq, (1, 0), EXACT).astype(dy.dtype)
    dweight = _product(dyq, xq, (0, 0), EXACT).astype(like_weight.dtype)
    return dx.reshape(*dy.shape[:-1], -1), dweight


fp8_linear.defvjp(_forward, _backward)
