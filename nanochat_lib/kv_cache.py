"""The key/value cache of generation: every row at its own position, every layer with the slots that its window needs.

Position p of a row is stored in slot p mod R of a layer with R slots. A layer that sees everything has a slot for each
position. A layer with a window w needs only its newest w+1 positions, so it keeps a ring of that many and overwrites
the oldest: its memory does not grow with the text. `slack` more slots let a row step back: its last `slack` tokens can
be taken away and others written (`steps_back`).

Right-padding of prompts is never stored, so rows of different lengths share a batch.
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
    """k, v: per layer (B, K, R, D), keys after rotary and scaling, values after the value embedding; R slots a row.

    pos (B,) int32: tokens already stored, so also the position of the row's next token. prev (B, 1, C): embedding of
    the row's last token before smear, zero while the row is empty.
    """

    k: tuple[jax.Array, ...]
    v: tuple[jax.Array, ...]
    pos: jax.Array
    prev: jax.Array

    @property
    def length(self) -> int:
        """Positions a row may hold: the last layer sees all of them. Beyond, `store_token` writes nothing."""
        return self.k[-1].shape[2]


def slots(config: GPTConfig, length: int, slack: int = 0) -> tuple[int, ...]:
    """Slots R of each layer for rows of `length` positions: the window, the query's own, `slack`; never over `length`.

    The last layer always has all of them.
    """
    return *(min(length, window + 1 + slack) for window in config.windows[:-1]), length


def steps_back(config: GPTConfig, length: int, slack: int, written: int) -> int:
    """How many of the `written` positions a row can forget and go on from there with the same numbers.

    Everything as long as no ring has overwritten anything; then `slack`, and one more: the next query's own slot.
    """
    rings = [(r, w) for r, w in zip(slots(config, length, slack), config.windows, strict=True) if r < written]
    return min((r - w for r, w in rings), default=written)


def row_bytes(config: GPTConfig, length: int, dtype: jax.typing.DTypeLike = jnp.float32, slack: int = 0) -> dict:
    """Bytes that one row takes, by kind of layer: {"full": …, "window": …, "state": …, "total": …}.

    "full" layers keep every position, "window" layers a ring; "state" is the position and the embedding that smear
    reads. Exact: what `init_cache` allocates.
    """
    size = jnp.dtype(dtype).itemsize
    position = 2 * config.n_kv_head * config.head_dim * size
    counts = slots(config, length, slack)
    full = sum(position * r for r in counts if r == length)
    window = sum(position * r for r in counts if r < length)
    state = config.n_embd * size + 4
    return {"full": full, "window": window, "state": state, "total": full + window + state}


def init_cache(
    config: GPTConfig, batch: int, length: int, dtype: jax.typing.DTypeLike = jnp.float32, slack: int = 0
) -> KVCache:
    """An empty cache: `batch` rows of `length` positions. `dtype`: what the model that fills it computes in."""
    if batch < 1 or length < 1 or slack < 0:
        raise UserError(f"cache of {batch} rows × {length} positions, slack {slack}: at least 1, 1 and 0")
    shapes = [(batch, config.n_kv_head, r, config.head_dim) for r in slots(config, length, slack)]
    return KVCache(
        k=tuple(jnp.zeros(shape, dtype) for shape in shapes),
        v=tuple(jnp.zeros(shape, dtype) for shape in shapes),
        pos=jnp.zeros(batch, jnp.int32),
        prev=jnp.zeros((batch, 1, config.n_embd), dtype),
    )


def repeat_cache(cache: KVCache, n: int) -> KVCache:
    """Each row n times in a row (b0, b0, …, b1, b1, …): several samples continue one prefilled prompt."""
    return jax.tree.map(lambda leaf: jnp.repeat(leaf, n, axis=0), cache)


def take_row(cache: KVCache, row: jax.Array) -> KVCache:
    """Row `row` as a cache of one row."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_slice_in_dim(leaf, row, 1), cache)


def put_row(cache: KVCache, row: jax.Array, one: KVCache) -> KVCache:
    """The cache with the one row of `one` in place of row `row`."""
    return jax.tree.map(lambda leaf, new: jax.lax.dynamic_update_slice_in_dim(leaf, new, row, 0), cache, one)


def held(pos: jax.Array, count: int) -> jax.Array:
    """The position that each of `count` slots holds in rows of `pos` (B,) tokens: (B, R), negative where none."""
    newest = pos[:, None] - 1
    return newest - (newest - jnp.arange(count)) % count


def store_chunk(cache: KVCache, layer: int, k: jax.Array, v: jax.Array, lengths: jax.Array) -> KVCache:
    """Writes k, v (B, K, T, D), of which `lengths` (B,) are real tokens, behind what the rows hold.

    Of more tokens than slots the last ones stay. Padding leaves the slots as they are.
    """
    wanted = held(cache.pos + lengths, cache.k[layer].shape[2]) - cache.pos[:, None]  # which new token a slot gets
    fresh, index = (wanted >= 0)[:, None, :, None], jnp.maximum(wanted, 0)[:, None, :, None]

    def write(slots: jax.Array, new: jax.Array) -> jax.Array:
        return jnp.where(fresh, jnp.take_along_axis(new, index, axis=2), slots)

    return with_layer(cache, layer, write, k, v)


def store_token(cache: KVCache, layer: int, k: jax.Array, v: jax.Array, alive: jax.Array | None = None) -> KVCache:
    """Writes k, v (B, K, 1, D) of one layer into each row's next slot; rows that are not `alive` (B,), or full, keep
    theirs."""
    rows, heads, count = jnp.arange(k.shape[0])[:, None], jnp.arange(k.shape[1]), cache.k[layer].shape[2]
    free = cache.pos < cache.length
    slot = jnp.where(free if alive is None else free & alive, cache.pos % count, count)  # a slot that is not there

    def write(slots: jax.Array, new: jax.Array) -> jax.Array:
        # Heads are named one by one: of a row that is written as a whole, alone in its batch, XLA makes an update of a
        # slice, for which a CPU copies all the cache four times a step.
        return slots.at[rows, heads, slot[:, None]].set(new[:, :, 0], mode="drop")

    return with_layer(cache, layer, write, k, v)


def with_layer(cache: KVCache, layer: int, write, k: jax.Array, v: jax.Array) -> KVCache:
    """The cache whose layer holds `write(slots, new)`, done for its keys with k and for its values with v."""
    keys, values = list(cache.k), list(cache.v)
    keys[layer] = write(keys[layer], k.astype(keys[layer].dtype))
    values[layer] = write(values[layer], v.astype(values[layer].dtype))
    return replace(cache, k=tuple(keys), v=tuple(values))
