"""The key/value cache of generation: one slot a position, and every row at its own position.

Because each row counts for itself, prompts of different lengths share a batch: right-padding is written too, but never
read, and the row's next tokens overwrite it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from nanochat_lib.errors import UserError
from nanochat_lib.sizing import GPTConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """k, v: per layer (B, K, S, D), keys after rotary and scaling, values after the value embedding; S slots a row.

    pos (B,) int32: tokens already stored, so also the position of the row's next token. prev (B, 1, C): embedding of
    the row's last token before smear, zero while the row is empty.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    pos: jax.Array
    prev: jax.Array

    @property
    def length(self) -> int:
        """Slots of a row. Decoding beyond them is the caller's mistake: such a write is dropped."""
        return self.k[0].shape[2]


def init_cache(config: GPTConfig, batch: int, length: int, dtype: jax.typing.DTypeLike = jnp.float32) -> KVCache:
    """An empty cache of `batch` rows with `length` slots; `dtype` is the compute dtype of the model that fills it."""
    if batch < 1 or length < 1:
        raise UserError(f"cache of {batch} rows × {length} slots: both must be at least 1")
    shape = (batch, config.n_kv_head, length, config.head_dim)
    return KVCache(
        k=tuple(jnp.zeros(shape, dtype) for _ in range(config.n_layer)),
        v=tuple(jnp.zeros(shape, dtype) for _ in range(config.n_layer)),
        pos=jnp.zeros(batch, jnp.int32),
        prev=jnp.zeros((batch, 1, config.n_embd), dtype),
    )


def repeat_cache(cache: KVCache, n: int) -> KVCache:
    """Each row n times in a row (b0, b0, …, b1, b1, …): several samples continue one prefilled prompt."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, n, axis=0), cache)


def store_prompt(cache: KVCache, layer: int, k: jax.Array, v: jax.Array) -> KVCache:
    """Writes k, v (B, K, T, D) into slots 0 … T-1 of one layer."""
    return _with_layer(cache, layer, lambda slots, new: slots.at[:, :, : new.shape[2]].set(new), k, v)


def store_token(cache: KVCache, layer: int, k: jax.Array, v: jax.Array) -> KVCache:
    """Writes k, v (B, K, 1, D) of one layer into each row's own next slot."""
    rows = jnp.arange(cache.pos.shape[0])
    return _with_layer(cache, layer, lambda slots, new: slots.at[rows, :, cache.pos].set(new[:, :, 0]), k, v)


def _with_layer(cache: KVCache, layer: int, write, k: jax.Array, v: jax.Array) -> KVCache:
    keys, values = list(cache.k), list(cache.v)
    keys[layer] = write(keys[layer], k.astype(keys[layer].dtype))
    values[layer] = write(values[layer], v.astype(values[layer].dtype))
    return replace(cache, k=tuple(keys), v=tuple(values))
