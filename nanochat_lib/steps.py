"""Many decode steps in a row: `gpt.decode` for the loop of one compiled call, arranged for what a step costs.

A step of a small model is a hundred short operations, so what counts is how many there are and what they copy:

- The cache is only read. What the steps add goes into a small block beside it, at the same place for every row, and is
  stored at the end of the call. A loop that writes into the cache itself copies all of it several times a token.
- Queries, keys, values and the gates of the value embeddings come from one product a layer.
- A product has the weights, as they lie in memory, on its left: a CPU is up to twice as fast as with x Wᵀ.
- norm(x) Wᵀ is x Wᵀ divided by x's length, so the product need not wait for the norm, and the division joins what is
  done to the result.
- Scores are bounded, as queries and keys have a known length: the softmax needs no largest score.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from nanochat_lib import gpt
from nanochat_lib.attention import rotate
from nanochat_lib.gpt import Params
from nanochat_lib.gpt import extend as extend
from nanochat_lib.gpt import prefill as prefill
from nanochat_lib.kernels.tiled import wide
from nanochat_lib.kv_cache import KVCache, held, store_chunk
from nanochat_lib.kv_cache import init_cache as init_cache
from nanochat_lib.kv_cache import repeat_cache as repeat_cache
from nanochat_lib.layers import EPSILON, GENERATIONS, relu_squared, scaled, smear, softcap
from nanochat_lib.sizing import GPTConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Recent:
    """What the steps of one call have added: k, v per layer (B·K, size, D), of which the first `count` are there.

    taken (B,): how many of them are a row's own, the others came after its end. prev (B, C): as KVCache.prev.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    count: jax.Array
    taken: jax.Array
    prev: jax.Array


class Steps:
    """Up to `size` tokens more in the rows of `cache`, of which no living one holds more than `span` when they begin.

    To be made and used while tracing.
    """

    def __init__(self, config: GPTConfig, params: Params, cache: KVCache, *, dtype: str, span: int, size: int) -> None:
        self.config, self.params, self.old, self.dtype = config, params, cache, jnp.dtype(dtype)
        self.generation, self.model = GENERATIONS[config.recipe], gpt.build(config, params)
        rows, kv_heads, dim = len(cache.pos), config.n_kv_head, config.head_dim
        flat = lambda slots: slots[:, :, :span].reshape(rows * kv_heads, -1, dim)  # noqa: E731
        self.k, self.v = ([flat(slots) for slots in layers] for layers in (cache.k, cache.v))
        self.held = [held(cache.pos, slots.shape[2])[:, :span] for slots in cache.k]
        self.qkv = [self.fused(layer) for layer in range(config.n_layer)]
        blank = (jnp.zeros((rows * kv_heads, size, dim), cache.k[0].dtype),) * config.n_layer
        prev = jnp.where(cache.pos[:, None] > 0, cache.prev[:, 0], 0).astype(self.dtype)
        self.recent = Recent(blank, blank, jnp.int32(0), jnp.zeros(rows, jnp.int32), prev)

    def weight(self, layer: int, name: str) -> jax.Array:
        return self.params[f"transformer.h.{layer}.{name}.weight"].astype(self.dtype)

    def fused(self, layer: int) -> jax.Array:
        """The rows of c_q, c_k, c_v and of the gate, which reads the first channels only: zeros for the others."""
        weights = [self.weight(layer, f"attn.{name}") for name in ("c_q", "c_k", "c_v")]
        if self.config.has_value_embedding(layer):
            gate = self.weight(layer, "attn.ve_gate")
            weights.append(jnp.pad(gate, ((0, 0), (0, self.config.n_embd - gate.shape[1]))))
        return jnp.concatenate(weights)

    def step(self, recent: Recent, token: jax.Array, alive: jax.Array) -> tuple[jax.Array, Recent]:
        """One more token (B,) a row: (logits (B, V), recent with it). Logits of rows not `alive` (B,) mean nothing."""
        config, params, dtype = self.config, self.params, self.dtype
        pos = self.old.pos + recent.count
        look = lambda name: params[name].at[token].get(mode="clip").astype(dtype)  # noqa: E731
        tables = self.model.rotation(self.old.length, dtype)
        rotation = tuple(table.at[pos].get(mode="clip")[:, None] for table in tables)
        x = look(gpt.WTE)
        x = prev = scaled(x, inverse_rms(x))
        if config.recipe == "head":
            x = smear(x, recent.prev, params["smear_gate.weight"], params["smear_lambda"])
        x0 = middle = x
        keys, values = list(recent.k), list(recent.v)
        for i in range(config.n_layer):
            x = scaled(x, params["resid_lambdas"][i]) + scaled(x0, params["x0_lambdas"][i])
            ve = look(gpt.value_table(i)) if config.has_value_embedding(i) else None
            q, *new = self.project(i, x, ve, rotation)
            keys[i], values[i] = (
                jax.lax.dynamic_update_slice_in_dim(block, a[:, None].astype(block.dtype), recent.count, 1)
                for block, a in zip((keys[i], values[i]), new, strict=True)
            )
            x = x + product(self.attend(i, q, keys[i], values[i], pos, recent.count), self.weight(i, "attn.c_proj"))
            inner = relu_squared(normed_product(x, self.weight(i, "mlp.c_fc")))
            x = x + product(inner, self.weight(i, "mlp.c_proj"))
            if i == config.n_layer // 2:
                middle = x
        if config.recipe == "head":
            x = x - scaled(middle, params["backout_lambda"][0])
        head = params["lm_head.weight"][: config.vocab_size].astype(dtype)
        prev = jnp.where(alive[:, None], prev, recent.prev)
        recent = Recent(tuple(keys), tuple(values), recent.count + 1, recent.taken + alive, prev)
        return softcap(normed_product(x, head), self.generation.softcap), recent

    def project(self, layer: int, x: jax.Array, ve: jax.Array | None, rotation: tuple) -> tuple[jax.Array, ...]:
        """q (B·K, H/K, D), k and v (B·K, D) of the stream x (B, C); ve (B, K·D) joins v."""
        (heads, kv_heads, dim), rows = (self.config.n_head, self.config.n_kv_head, self.config.head_dim), len(x)
        qkv = normed_product(x, self.qkv[layer])
        qk = qkv[:, : (heads + kv_heads) * dim].reshape(rows, -1, dim)
        v = qkv[:, (heads + kv_heads) * dim : (heads + 2 * kv_heads) * dim].reshape(rows * kv_heads, dim)
        if ve is not None:
            gate = self.generation.gate_factor * jax.nn.sigmoid(qkv[:, (heads + 2 * kv_heads) * dim :])
            v = v + gate.reshape(-1, 1) * ve.reshape(-1, dim)
        qk = rotate(qk, *rotation)
        qk = self.generation.qk_scale * scaled(qk, inverse_rms(qk))
        return qk[:, :heads].reshape(rows * kv_heads, -1, dim), qk[:, heads:].reshape(-1, dim), v

    def attend(
        self, layer: int, q: jax.Array, new_k: jax.Array, new_v: jax.Array, pos: jax.Array, count: jax.Array
    ) -> jax.Array:
        """One query a row at `pos` (B,) on the cache and on the `count` + 1 newest: (B, H·D)."""
        window, kv_heads = self.config.windows[layer], self.config.n_kv_head
        behind = pos[:, None] - self.held[layer]
        seen = (self.held[layer] >= 0) & (behind <= window)
        back = count - jnp.arange(new_k.shape[1])
        total, y = self.weigh(q, self.k[layer], self.v[layer], jnp.repeat(seen, kv_heads, axis=0)[:, None])
        here, newest = self.weigh(q, new_k, new_v, (back >= 0) & (back <= window))
        return ((y + newest) / (total + here)).reshape(len(pos), -1).astype(q.dtype)

    def weigh(self, q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The sum of exp(q·k/√D - most) over what the mask shows, (B·K, H/K, 1), and the values' sum with it."""
        root = q.shape[-1] ** 0.5
        most = self.generation.qk_scale**2 * root  # no score is above it, and none below minus it
        scores = jnp.einsum("bgd,bsd->bgs", q, k, preferred_element_type=wide(q.dtype)) / root
        weights = jnp.exp(jnp.where(mask, scores - most, -jnp.inf))
        y = jnp.einsum("bgs,bsd->bgd", weights.astype(v.dtype), v, preferred_element_type=wide(v.dtype))
        return weights.sum(axis=-1, keepdims=True), y

    def cache(self, recent: Recent) -> KVCache:
        """The cache with what the rows have taken."""
        cache, (rows, kv_heads) = self.old, self.old.k[0].shape[:2]
        for layer in range(self.config.n_layer):
            block = (x[layer].reshape(rows, kv_heads, *x[layer].shape[1:]) for x in (recent.k, recent.v))
            cache = store_chunk(cache, layer, *block, recent.taken)
        return KVCache(cache.k, cache.v, cache.pos + recent.taken, recent.prev[:, None].astype(cache.prev.dtype))


def inverse_rms(x: jax.Array) -> jax.Array:
    """The factor that norm(x) has, float32 (…, 1). Summed in parts: of a long sum a CPU makes three steps."""
    part = math.gcd(x.shape[-1], 16)
    squares = jnp.square(x.astype(jnp.float32)).reshape(*x.shape[:-1], -1, part)
    return jax.lax.rsqrt(squares.sum(axis=(-2, -1))[..., None] / x.shape[-1] + EPSILON)


def normed_product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """norm(x) Wᵀ."""
    return scaled(product(x, weight), inverse_rms(x))


def product(x: jax.Array, weight: jax.Array) -> jax.Array:
    """x Wᵀ: (B, in), [out, in] → (B, out). A single row is a vector: as a matrix XLA merges the product with what is
    before and behind it, and its loops are then several times as slow."""
    if x.shape[0] == 1:
        return (weight @ x[0])[None]
    return jax.lax.dot_general(weight, x, (((1,), (1,)), ((), ()))).T
