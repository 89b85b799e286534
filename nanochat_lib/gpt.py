"""The model: nanochat's GPT as a flax nnx module, and pure functions over a flat dict of its parameters.

Decoder-only transformer with rotary embedding, QK norm, relu² MLP, untied head, gated value embeddings in every other
layer, per-layer residual scalars, "smear" (a gated copy of the previous token's embedding) and "backout" (the middle
layer's stream is subtracted at the end). Two generations: head (July 2026) and recipe 4 (March 2026), which has no
smear and no backout.

Attribute paths joined by "." are nanochat's state-dict names, weights are [out, in], so a checkpoint maps by name.
`Params` is that flat dict. The functions at the end take (config, params, …); the module is rebuilt from them while
tracing only, so a jitted call carries the plain leaves and no module machinery.

Masters are float32; `dtype` is the compute dtype to which a weight is cast where it is used.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from nanochat_lib.attention import attention, cached_attention, chunk_attention, rotary_table
from nanochat_lib.compute import PLAIN, Compute
from nanochat_lib.errors import UserError
from nanochat_lib.kv_cache import KVCache, held, init_cache, repeat_cache, store_chunk, store_token
from nanochat_lib.layers import GENERATIONS, Block, Weight, linear, norm, normal, once, scaled, smear, softcap, uniform
from nanochat_lib.losses import head_cross_entropy
from nanochat_lib.sizing import GPTConfig

__all__ = [
    "GPT", "GPTConfig", "KVCache", "Params", "apply", "build", "check_ids", "decode", "extend", "get_params", "head",
    "hidden", "init_cache", "init_params", "param_shapes", "prefill", "repeat_cache",
]  # fmt: skip

Params = dict[str, jax.Array]
Rows = dict[str, jax.Array]  # by the name of the table they come from
DType = jax.typing.DTypeLike
WTE = "transformer.wte.weight"


def table_names(config: GPTConfig) -> tuple[str, ...]:
    """Parameters that are only looked up."""
    return WTE, *(value_table(i) for i in config.value_embedding_layers)


def value_table(layer: int | str) -> str:
    """Name of a layer's value-embedding table."""
    return f"value_embeds.{layer}.weight"


class Transformer(nnx.Module):
    """Token embedding and blocks."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        std = 1.0 if config.recipe == "recipe4" else 0.8
        self.wte = Weight(normal(rngs, (config.padded_vocab_size, config.n_embd), std))
        self.h = nnx.List([Block(config, i, rngs) for i in range(config.n_layer)])


class GPT(nnx.Module):
    """`GPT(config, rngs)` draws nanochat's initial weights; calling it with ids (B, T) gives logits (B, T, V)."""

    def __init__(self, config: GPTConfig, rngs: nnx.Rngs):
        self.config = config
        layers, head = config.n_layer, config.recipe == "head"
        depth = jnp.arange(layers, dtype=jnp.float32) / max(layers - 1, 1)
        self.resid_lambdas = nnx.Param(1.15 - 0.10 * depth if head else jnp.ones(layers, jnp.float32))
        self.x0_lambdas = nnx.Param(0.20 - 0.15 * depth if head else jnp.full(layers, 0.1, jnp.float32))
        if head:
            self.smear_lambda = nnx.Param(jnp.zeros(1, jnp.float32))
            self.backout_lambda = nnx.Param(jnp.full(1, 0.2, jnp.float32))
        self.transformer = Transformer(config, rngs)
        vocab, width = config.padded_vocab_size, config.n_embd
        self.lm_head = Weight(normal(rngs, (vocab, width), 0.001))
        if head:
            self.smear_gate = Weight(uniform(rngs, (1, config.smear_channels), 0.0, 0.02))
        bound, kv_width = (3 / width) ** 0.5, config.n_kv_head * config.head_dim
        tables = {
            str(i): Weight(uniform(rngs, (vocab, kv_width), -bound, bound)) for i in config.value_embedding_layers
        }
        self.value_embeds = nnx.Dict(tables)

    def __call__(self, idx: jax.Array, dtype: DType = jnp.float32) -> jax.Array:
        return self.logits(self.hidden(self.lookup(idx, dtype)))

    def lookup(self, idx: jax.Array, dtype: DType) -> Rows:
        """The rows of every table that the ids (B, T) select: wte's (B, T, C), value embeddings (B, T, K·D)."""
        tables = {WTE: self.transformer.wte} | {value_table(i): t for i, t in self.value_embeds.items()}
        return {name: table.lookup(idx, dtype) for name, table in tables.items()}

    def smear(self, x: jax.Array, previous: jax.Array) -> jax.Array:
        """x with a gated copy of `previous`, (B, T, C) both; x itself in a generation without smear."""
        if self.config.recipe != "head":
            return x
        return smear(x, previous, self.smear_gate.weight[...], self.smear_lambda[...])

    def rotation(self, length: int, dtype: DType) -> tuple[jax.Array, jax.Array]:
        """(cos, sin) of positions 0 … length-1, (length, D/2)."""
        gen = GENERATIONS[self.config.recipe]
        tables = rotary_table(length, self.config.head_dim, gen.rotary_base, gen.bf16_table)
        return tuple(jnp.asarray(table, dtype) for table in tables)

    def trunk(
        self,
        x: jax.Array,
        rows: Rows,
        rotation: tuple[jax.Array, jax.Array],
        attend,
        fp8=False,
        remat=False,
        watch=None,
    ) -> jax.Array:
        """All blocks and the final norm. `attend(layer, q, k, v) -> y` is where training, prefill and decode differ.

        `watch(layer, x)` is shown the stream behind each block, for looking at a model.
        """
        x0 = middle = x
        for i, block in enumerate(self.transformer.h):

            def layer(x: jax.Array, x0: jax.Array, ve: jax.Array | None, i: int = i, block: Block = block) -> jax.Array:
                x = once(scaled(x, self.resid_lambdas[i]) + scaled(x0, self.x0_lambdas[i]))
                with jax.named_scope("attention"):
                    q, k, v = block.attn.qkv(once(norm(x)), ve, rotation, fp8)
                    x = once(x + block.attn.output(attend(i, q, k, v), fp8))
                with jax.named_scope("mlp"):
                    return once(x + block.mlp(once(norm(x)), fp8))

            if remat:  # keeps what matrix products made and computes the rest again
                layer = jax.checkpoint(layer, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable)
            x = layer(x, x0, rows.get(value_table(i)))
            if watch:
                watch(i, x)
            if i == self.config.n_layer // 2:
                middle = x
        if self.config.recipe == "head":
            x = x - scaled(middle, self.backout_lambda[0])
        return norm(x)

    def hidden(self, rows: Rows, compute: Compute = PLAIN) -> jax.Array:
        """Rows of the tables → (B, T, C): what the head reads, in the rows' dtype."""
        x = norm(rows[WTE])
        x = self.smear(x, before(x))
        windows = self.config.windows
        attend = lambda i, q, k, v: attention(q, k, v, window=windows[i], backend=compute.attention)  # noqa: E731
        return self.trunk(x, rows, self.rotation(x.shape[1], x.dtype), attend, compute.fp8, compute.remat)

    def logits(self, x: jax.Array) -> jax.Array:
        """(…, C) → (…, V) float32, soft-capped. The table's padding rows are cut off before anything reads them."""
        logits = linear(x, self.lm_head.weight[: self.config.vocab_size])
        return softcap(logits, GENERATIONS[self.config.recipe].softcap)

    def loss(
        self, x: jax.Array, targets: jax.Array, weights: jax.Array | None, scale: jax.Array, chunks: int
    ) -> jax.Array:
        """Σ nll · weight · scale of hidden states x (B, T, C), without ever holding all logits when chunks > 1."""
        cap = GENERATIONS[self.config.recipe].softcap
        return head_cross_entropy(
            x, self.lm_head.weight[...], targets, weights, cap=cap, vocab_size=self.config.vocab_size, chunks=chunks,
            scale=scale,
        )[0]  # fmt: skip


def before(x: jax.Array) -> jax.Array:
    """x (B, T, C) moved one position later: entry t is x[t-1], entry 0 is zero."""
    return jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))


def get_params(model: GPT) -> Params:
    """The flat dict of `model`'s parameters, in nanochat's names."""
    return {".".join(map(str, path)): leaf[...] for path, leaf in nnx.to_flat_state(nnx.state(model, nnx.Param))}


@lru_cache(maxsize=32)
def _skeleton(config: GPTConfig) -> tuple[nnx.GraphDef, tuple[tuple[str, tuple, tuple[int, ...]], ...]]:
    """(graph definition, (name, path, shape) of each parameter): everything about the module except its numbers."""
    graph, state = nnx.split(nnx.eval_shape(lambda: GPT(config, nnx.Rngs(0))))
    flat = nnx.to_flat_state(state)
    return graph, tuple((".".join(map(str, path)), path, leaf.shape) for path, leaf in flat)


def param_shapes(config: GPTConfig) -> dict[str, tuple[int, ...]]:
    """Shape of every parameter by name."""
    return {name: shape for name, _, shape in _skeleton(config)[1]}


def init_params(config: GPTConfig, key: jax.Array) -> Params:
    """Fresh float32 parameters from a typed key. Under jit with out_shardings they are drawn where they belong."""
    return get_params(GPT(config, nnx.Rngs(params=key)))


def build(config: GPTConfig, params: Params) -> GPT:
    """The module that holds `params`. Cheap while tracing, but not meant for every step outside of jit."""
    graph, names = _skeleton(config)
    wanted = {name: shape for name, _, shape in names}
    given = {name: tuple(leaf.shape) for name, leaf in params.items()}
    if wrong := sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name)):
        name = wrong[0]
        raise UserError(
            f"parameters do not fit the model: {name} is {given.get(name, 'missing')}, the configuration wants "
            f"{wanted.get(name, 'no such parameter')} ({len(wrong)} such differences)"
        )
    return nnx.merge(graph, nnx.from_flat_state([(path, nnx.Param(params[name])) for name, path, _ in names]))


def apply(config: GPTConfig, params: Params, idx: jax.Array, dtype: DType = jnp.float32) -> jax.Array:
    """Logits (B, T, V) float32 of ids (B, T); V is the true vocabulary."""
    return build(config, params)(idx, dtype)


def hidden(config: GPTConfig, params: Params, idx: jax.Array, dtype: DType = jnp.float32) -> jax.Array:
    """What the head reads, (B, T, C) in `dtype`."""
    model = build(config, params)
    return model.hidden(model.lookup(idx, dtype))


def head(config: GPTConfig, params: Params, x: jax.Array) -> jax.Array:
    """Logits (…, V) float32 of hidden states (…, C)."""
    return build(config, params).logits(x)


def prefill(
    config: GPTConfig, params: Params, idx: jax.Array, lengths: jax.Array, cache: KVCache, dtype: DType = jnp.float32
) -> tuple[jax.Array, KVCache]:
    """Runs prompts (B, T), padded on the right to T with any valid id, through the model into an empty cache.

    lengths (B,): real tokens of each row, 1 … T. Returns the logits (B, V) after each row's last real token, and the
    cache. Equals the full forward pass of each row alone.
    """
    model = build(config, params)
    row, last = jnp.arange(idx.shape[0]), lengths - 1
    rows = model.lookup(idx, dtype)
    x = norm(rows[WTE])
    cache = replace(cache, pos=jnp.zeros_like(cache.pos), prev=x[row, last][:, None].astype(cache.prev.dtype))

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        nonlocal cache
        cache = store_chunk(cache, layer, k, v, lengths)
        return attention(q, k, v, window=config.windows[layer])

    x = model.trunk(model.smear(x, before(x)), rows, model.rotation(idx.shape[1], dtype), attend)
    return model.logits(x[row, last]), replace(cache, pos=lengths.astype(jnp.int32))


def extend(
    config: GPTConfig,
    params: Params,
    idx: jax.Array,
    lengths: jax.Array,
    previous: jax.Array,
    cache: KVCache,
    dtype: DType = jnp.float32,
) -> tuple[jax.Array, KVCache]:
    """`prefill` behind what the rows hold already: a prompt can be run in parts, or continue an earlier text.

    idx (B, T), lengths (B,) as there; previous (B,): the row's token before idx, any negative number for an empty row.
    The cache's own `prev` is not read, so `pos` may be set back before (kv_cache.steps_back says how far). Unlike in
    nanochat, a text run in parts gives the same numbers as in one: the first token of a part is smeared too.
    """
    model = build(config, params)
    row, last, pos = jnp.arange(idx.shape[0]), lengths - 1, cache.pos
    rows = model.lookup(idx, dtype)
    x = norm(rows[WTE])
    first = norm(model.lookup(jnp.maximum(previous, 0)[:, None], dtype)[WTE])
    first = jnp.where(previous[:, None, None] >= 0, first, 0).astype(dtype)
    cache = replace(cache, prev=x[row, last][:, None].astype(cache.prev.dtype))
    at = jnp.minimum(pos[:, None] + jnp.arange(idx.shape[1]), cache.length - 1)  # padding may reach beyond the table
    cos, sin = (table[at][:, None] for table in model.rotation(cache.length, dtype))

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        nonlocal cache
        old_k, old_v, window = cache.k[layer], cache.v[layer], config.windows[layer]
        cache = store_chunk(cache, layer, k, v, lengths)
        return chunk_attention(q, k, v, old_k, old_v, held=held(pos, old_k.shape[2]), pos=pos, window=window)

    x = model.trunk(model.smear(x, jnp.concatenate([first, x[:, :-1]], axis=1)), rows, (cos, sin), attend)
    return model.logits(x[row, last]), replace(cache, pos=pos + lengths.astype(jnp.int32))


def decode(
    config: GPTConfig,
    params: Params,
    token: jax.Array,
    cache: KVCache,
    dtype: DType = jnp.float32,
    alive: jax.Array | None = None,
    span: int | None = None,
) -> tuple[jax.Array, KVCache]:
    """One more token (B,) a row, each at its own position: (logits (B, V), cache). Needs pos < cache.length.

    Rows that are not `alive` (B,) stay as they are; their logits mean nothing. `span`, above every living row's pos:
    positions that are looked at. Short texts in a long cache then cost what they are worth.
    """
    model = build(config, params)
    rows, pos = model.lookup(token[:, None], dtype), cache.pos
    embedded = norm(rows[WTE])
    cos, sin = (table[pos][:, None, None] for table in model.rotation(cache.length, dtype))

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        nonlocal cache
        cache = store_token(cache, layer, k, v, alive)
        keys, values = (slots[layer][:, :, :span] for slots in (cache.k, cache.v))
        return cached_attention(q, keys, values, positions=pos, window=config.windows[layer])

    prev = jnp.where(pos[:, None, None] > 0, cache.prev, 0).astype(dtype)
    x = model.trunk(model.smear(embedded, prev), rows, (cos, sin), attend)
    prev = embedded.astype(cache.prev.dtype)
    if alive is None:
        return model.logits(x[:, 0]), replace(cache, pos=pos + 1, prev=prev)
    prev = jnp.where(alive[:, None, None], prev, cache.prev)
    return model.logits(x[:, 0]), replace(cache, pos=pos + alive, prev=prev)


def check_ids(config: GPTConfig, ids: object) -> np.ndarray:
    """`ids` as int32, or a UserError when one is outside of the vocabulary.

    For the host: inside a compiled function an id that is too large silently reads the table's last row.
    """
    array = np.asarray(ids)
    if array.size and not np.issubdtype(array.dtype, np.integer):
        raise UserError(f"token ids must be integers, got {array.dtype}")
    outside = array[(array < 0) | (array >= config.vocab_size)]
    if outside.size:
        raise UserError(
            f"token id {outside[0]} is outside of the model's vocabulary 0 … {config.vocab_size - 1}; "
            "use the tokenizer that the model was trained with"
        )
    return array.astype(np.int32)
