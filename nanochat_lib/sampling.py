"""From logits to the next token: greedy, temperature, top-k and top-p, each row with options and random numbers of its
own."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from nanochat_lib.errors import UserError


def check_sampling(temperature: float, top_k: int | None, top_p: float | None = None) -> None:
    """UserError unless temperature ≥ 0, top_k ≥ 0 (0 or None: off) and 0 < top_p ≤ 1 (1 or None: off)."""
    if not (_number(temperature) and temperature >= 0):
        raise UserError(f"temperature {temperature} must be a number of at least 0; 0 always takes the likeliest token")
    if top_k is not None and (not isinstance(top_k, int) or top_k < 0):
        raise UserError(f"top_k {top_k} must be a whole number of at least 0; 0 keeps the full vocabulary")
    if top_p is not None and not (_number(top_p) and 0 < top_p <= 1):
        raise UserError(f"top_p {top_p} must be a number above 0 and at most 1; 1 keeps every token")


def _number(value: object) -> bool:
    return isinstance(value, (int, float)) and math.isfinite(value)


def is_greedy(temperature: float, top_k: int | None) -> bool:
    """Whether there is nothing to draw. Steps are compiled once for such rows alone and once for all others."""
    return temperature == 0 or top_k == 1


def next_power(n: int, least: int = 1) -> int:
    """The smallest power of two that is at least `n` and at least `least` (itself a power of two)."""
    return max(least, 1 << max(n - 1, 0).bit_length())


@jax.jit
def row_keys(seeds: jax.Array, places: jax.Array, samples: jax.Array) -> jax.Array:
    """One typed key a row from its seed, its prompt's place in the batch and its sample number; all (B,) uint32."""

    def key(seed: jax.Array, place: jax.Array, sample: jax.Array) -> jax.Array:
        return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), place), sample)

    return jax.vmap(key)(seeds, places, samples)


def sample(
    logits: jax.Array,
    keys: jax.Array,
    step: jax.Array,
    temperature: jax.Array,
    top_k: jax.Array,
    top_p: jax.Array,
    greedy: bool,
    vocab: int,
) -> tuple[jax.Array, jax.Array]:
    """logits (B, V) float32, keys (B,) -> (token (B,) int32, its log-probability (B,) float32).

    step, temperature, top_k (0: off) and top_p (1: off) are numbers or (B,). `greedy`: all rows are (`is_greedy`), so
    nothing need be drawn. Ids from `vocab` up are never chosen. At temperature 0 a row takes the first of its largest
    logits. Otherwise its token is drawn from softmax(logits / temperature) over the `top_k` likeliest, and of these the
    fewest whose probabilities sum to `top_p` (nucleus sampling, arXiv:1904.09751); of equal logits the first ids are
    kept. Drawn by the Gumbel-max trick: noise from fold_in(key, step) is added, one number an id, and the largest sum
    wins. The log-probability is the model's own, before temperature, top-k and top-p.
    """
    logits = jnp.where(jnp.arange(logits.shape[-1]) < vocab, logits, -jnp.inf)
    token = first_largest(logits)
    if not greedy:
        rows = token.shape
        step, temperature, top_k, top_p = (jnp.broadcast_to(x, rows) for x in (step, temperature, top_k, top_p))
        top_k = jnp.where((top_k == 0) | (top_k > vocab), vocab, top_k)
        values = (logits - jnp.max(logits, axis=-1, keepdims=True)) / jnp.where(temperature > 0, temperature, 1)[
            :, None
        ]
        values = jnp.where(logits > -jnp.inf, values, -jnp.inf)  # -inf / inf, a large temperature in float32, is none
        values = jax.lax.cond((top_k < vocab).any(), lambda: _top_k(values, logits, top_k), lambda: values)
        values = jax.lax.cond((top_p < 1).any(), lambda: _top_p(values, top_p), lambda: values)
        noise = jax.vmap(lambda k, n: jax.random.gumbel(jax.random.fold_in(k, n), logits.shape[-1:]))(keys, step)
        drawn = first_largest(values + noise)
        token = jnp.where(temperature > 0, drawn, token)
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return token.astype(jnp.int32), chosen - jax.nn.logsumexp(logits, axis=-1)


def first_largest(values: jax.Array) -> jax.Array:
    """argmax over the last axis, in two passes, both of which a CPU does with vectors; `jnp.argmax` goes one by one."""
    largest = values.max(axis=-1, keepdims=True)
    ids = jnp.arange(values.shape[-1], dtype=jnp.int32)
    return jnp.where((values == largest) | jnp.isnan(values), ids, values.shape[-1] - 1).min(axis=-1)


def _top_k(values: jax.Array, logits: jax.Array, top_k: jax.Array) -> jax.Array:
    return jnp.where(_heaviest(logits, jnp.ones_like(logits), top_k), values, -jnp.inf)


def _top_p(values: jax.Array, top_p: jax.Array) -> jax.Array:
    shares = jax.nn.softmax(values, axis=-1)
    kept = _heaviest(values, shares, jnp.where(top_p < 1, top_p, jnp.inf))
    return jnp.where(kept, values, -jnp.inf)


def _heaviest(values: jax.Array, weights: jax.Array, target: jax.Array) -> jax.Array:
    """Mask (B, V) of the fewest of the largest values whose weights sum to at least target (B,); all if none do.

    Without sorting, which a CPU takes longer for than for the whole model: the bits of the smallest kept value are
    found one by one, from the top, and then the bits of the last kept id among those equal to it.
    """
    bits = jax.lax.bitcast_convert_type(values, jnp.int32)
    order = jnp.where(bits < 0, ~bits, bits ^ jnp.int32(-(2**31))).astype(jnp.uint32)  # sorts as the floats do
    ids = jnp.arange(values.shape[-1], dtype=jnp.uint32)[::-1]  # earlier ids first

    def search(keys: jax.Array, among: jax.Array, target: jax.Array) -> jax.Array:
        """The largest t (B, 1) for which the weights of keys ≥ t sum to the target."""

        def narrow(i: jax.Array, found: jax.Array) -> jax.Array:
            trial = found | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
            reached = jnp.where(among & (keys >= trial), weights, 0).sum(axis=-1, keepdims=True) >= target
            return jnp.where(reached, trial, found)

        return jax.lax.fori_loop(0, 32, narrow, jnp.zeros((values.shape[0], 1), jnp.uint32))

    target = target[:, None].astype(jnp.float32)
    least = search(order, jnp.ones_like(order, bool), target)
    above = order > least
    missing = target - jnp.where(above, weights, 0).sum(axis=-1, keepdims=True)
    tied = order == least
    return above | (tied & (ids >= search(jnp.broadcast_to(ids, order.shape), tied, missing)))
