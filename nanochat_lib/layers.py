"""What the model is built of: normalisation, weights, attention and MLP blocks, and the constants of each generation.

Every function takes the compute dtype from its input; float32 masters are cast where they are used.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nanochat_lib.attention import rotate
from nanochat_lib.fp8 import fp8_linear, fp8_pays
from nanochat_lib.sizing import GPTConfig

EPSILON = float(np.finfo(np.float32).eps)


class Generation(NamedTuple):
    """Constants that differ between nanochat's generations."""

    rotary_base: float
    bf16_table: bool
    gate_factor: float
    qk_scale: float
    softcap: float


GENERATIONS = {
    "head": Generation(100_000.0, False, 3.0, 1.2, 15.0),
    "recipe4": Generation(10_000.0, True, 2.0, 1.0, 20.0),
}


def norm(x: jax.Array) -> jax.Array:
    """RMSNorm over the last axis without a weight, in float32 inside (arXiv:1910.07467)."""
    x32 = x.astype(jnp.float32)
    return (x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + EPSILON)).astype(x.dtype)


def once(x: jax.Array) -> jax.Array:
    """x, computed once and kept. A TPU's compiler otherwise repeats cheap producers inside every product that reads
    them, forward and backward, which is dearer than reading the result."""
    return jax.lax.optimization_barrier(x)


def softcap(logits: jax.Array, cap: float) -> jax.Array:
    """cap · tanh(logits / cap) in float32 (Gemma 2, arXiv:2408.00118)."""
    return cap * jnp.tanh(logits.astype(jnp.float32) / cap)


@jax.custom_vjp
def linear(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x Wᵀ in x's dtype: (…, in), float32 [out, in] → (…, out). The weight's gradient is summed in float32.

    A single row is multiplied as a vector, which a CPU does twice as fast as a matrix of one row: XLA merges such a
    product with what stands before and behind it, and the merged loop is slow.
    The derivative is written out because the order of its product matters: see `_weight_gradient`.
    """
    weight = weight.astype(x.dtype)
    if x.size == x.shape[-1]:
        return (weight @ x.reshape(-1)).reshape(*x.shape[:-1], -1)
    return x @ weight.T


def _linear_forward(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return linear(x, weight), (x, weight)


def _linear_backward(saved: tuple[jax.Array, jax.Array], dy: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, weight = saved
    return dy @ weight.astype(dy.dtype), _weight_gradient(x, dy, weight.dtype)


linear.defvjp(_linear_forward, _linear_backward)


def _weight_gradient(x: jax.Array, dy: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
    """dyᵀ x over all leading axes, [out, in]: one product, flattened on a CPU, which has fast plain matrix products;
    elsewhere over the axes as they stand, because flattening makes a TPU copy both operands into another layout.
    """

    def flat(x: jax.Array, dy: jax.Array) -> jax.Array:
        x, dy = x.reshape(-1, x.shape[-1]), dy.reshape(-1, dy.shape[-1])
        return jax.lax.dot_general(dy, x, (((0,), (0,)), ((), ())), preferred_element_type=dtype)

    def as_it_stands(x: jax.Array, dy: jax.Array) -> jax.Array:
        axes = tuple(range(x.ndim - 1))
        return jax.lax.dot_general(dy, x, ((axes, axes), ((), ())), preferred_element_type=dtype)

    return jax.lax.platform_dependent(x, dy, cpu=flat, default=as_it_stands)


@jax.custom_vjp
def relu_squared(x: jax.Array) -> jax.Array:
    """relu(x)² (Primer, arXiv:2109.08668), with the derivative 2·relu(x).

    Left to differentiation, the comparison's result is kept for the backward pass, and packing it into bits costs a
    TPU a quarter of a training step.
    """
    return jnp.square(jax.nn.relu(x))


relu_squared.defvjp(lambda x: (relu_squared(x), x), lambda x, dy: (2 * jax.nn.relu(x) * dy,))


def scaled(x: jax.Array, factor: jax.Array) -> jax.Array:
    """x · factor computed in float32, in x's dtype: a float32 scalar must not lift the stream out of bfloat16."""
    return (x.astype(jnp.float32) * factor).astype(x.dtype)


def uniform(rngs: nnx.Rngs, shape: tuple[int, ...], low: float, high: float) -> jax.Array:
    return jax.random.uniform(rngs.params(), shape, jnp.float32, low, high)


def normal(rngs: nnx.Rngs, shape: tuple[int, ...], std: float) -> jax.Array:
    return std * jax.random.normal(rngs.params(), shape, jnp.float32)


def split_heads(x: jax.Array, head_dim: int) -> jax.Array:
    """(B, T, heads·D) → (B, heads, T, D)."""
    return x.reshape(*x.shape[:2], -1, head_dim).swapaxes(1, 2)


def gated_values(v: jax.Array, ve: jax.Array, x: jax.Array, weight: jax.Array, factor: float) -> jax.Array:
    """The values with what their own tokens bring along: v + factor · sigmoid(x[:n] Wᵀ) · ve, a gate for each head.

    v (B, K, T, D); ve (B, T, K·D), rows of a table; x (B, T, C), the block's input; weight (K, n): the gate reads the
    first n channels of the same position. After ResFormer's value residual (arXiv:2410.17897) and modded-nanoGPT.
    """
    gate = factor * jax.nn.sigmoid(linear(x[..., : weight.shape[1]], weight))
    return v + gate.swapaxes(1, 2)[..., None] * split_heads(ve, v.shape[-1])


def smear(x: jax.Array, previous: jax.Array, weight: jax.Array, strength: jax.Array) -> jax.Array:
    """x + λ · sigmoid(x[:n] Wᵀ) · previous: a gated copy of the token before.

    x and previous (B, T, C), previous not smeared itself; weight (1, n): the gate reads the current token's first n
    channels; strength λ (1,).
    """
    gate = jax.nn.sigmoid(linear(x[..., : weight.shape[1]], weight))
    return x + strength.astype(x.dtype) * gate * previous


class Weight(nnx.Module):
    """One matrix: a linear layer without bias when called, an embedding table when looked up."""

    def __init__(self, value: jax.Array):
        self.weight = nnx.Param(value)

    def __call__(self, x: jax.Array, fp8: bool = False) -> jax.Array:
        """x Wᵀ; with `fp8` in 8-bit floats, if the matrix is large enough for it to pay."""
        weight = self.weight[...]
        return fp8_linear(x, weight) if fp8 and fp8_pays(weight.shape) else linear(x, weight)

    def lookup(self, idx: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        return self.weight[...][idx].astype(dtype)


class CausalSelfAttention(nnx.Module):
    """Projections around attention; `ve_gate` exists only in layers with a value embedding."""

    def __init__(self, config: GPTConfig, layer: int, rngs: nnx.Rngs):
        self.config = config
        c, kv_width = config.n_embd, config.n_kv_head * config.head_dim
        bound = (3 / c) ** 0.5  # uniform with standard deviation 1/√C
        self.c_q = Weight(uniform(rngs, (c, c), -bound, bound))
        self.c_k = Weight(uniform(rngs, (kv_width, c), -bound, bound))
        self.c_v = Weight(uniform(rngs, (kv_width, c), -bound, bound))
        self.c_proj = Weight(jnp.zeros((c, c), jnp.float32))  # zero: at step 0 every block is the identity
        if config.has_value_embedding(layer):
            high = 0.0 if config.recipe == "recipe4" else 0.02
            self.ve_gate = Weight(uniform(rngs, (config.n_kv_head, config.gate_channels), 0.0, high))

    def qkv(
        self, x: jax.Array, ve: jax.Array | None, rotation: tuple[jax.Array, jax.Array], fp8: bool = False
    ) -> tuple[jax.Array, ...]:
        """q (B, H, T, D), k and v (B, K, T, D) of the normalised stream x (B, T, C); ve (B, T, K·D) joins v."""
        gen = GENERATIONS[self.config.recipe]
        head_dim = self.config.head_dim
        q, k, v = (split_heads(project(x, fp8), head_dim) for project in (self.c_q, self.c_k, self.c_v))
        if ve is not None:
            v = gated_values(v, ve, x, self.ve_gate.weight[...], gen.gate_factor)
        q, k = (gen.qk_scale * norm(rotate(a, *rotation)) for a in (q, k))
        return q, k, v

    def output(self, y: jax.Array, fp8: bool = False) -> jax.Array:
        """(B, H, T, D) → (B, T, C)."""
        b, _, t, _ = y.shape
        return self.c_proj(y.swapaxes(1, 2).reshape(b, t, -1), fp8)


class MLP(nnx.Module):
    """relu(x W_fcᵀ)² W_projᵀ with hidden width 4C."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        c = config.n_embd
        bound = (1.0 if config.recipe == "recipe4" else 0.4) * (3 / c) ** 0.5
        self.c_fc = Weight(uniform(rngs, (4 * c, c), -bound, bound))
        self.c_proj = Weight(jnp.zeros((c, 4 * c), jnp.float32))

    def __call__(self, x: jax.Array, fp8: bool = False) -> jax.Array:
        return self.c_proj(relu_squared(self.c_fc(x, fp8)), fp8)


class Block(nnx.Module):
    """Attention and MLP; the residual additions are in the model's trunk."""

    def __init__(self, config: GPTConfig, layer: int, rngs: nnx.Rngs):
        self.attn = CausalSelfAttention(config, layer, rngs)
        self.mlp = MLP(config, rngs)
