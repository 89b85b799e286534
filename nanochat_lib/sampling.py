"""From logits to the next token: greedy, temperature and top-k, each row with random numbers of its own."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from nanochat_lib.errors import UserError

FEWEST_CANDIDATES = 16


def check_sampling(temperature: float, top_k: int | None) -> None:
    """UserError unless temperature ≥ 0 and top_k ≥ 0 (0 or None: off)."""
    if not (isinstance(temperature, (int, float)) and math.isfinite(temperature) and temperature >= 0):
        raise UserError(f"temperature {temperature} must be a number of at least 0; 0 always takes the likeliest token")
    if top_k is not None and (not isinstance(top_k, int) or top_k < 0):
        raise UserError(f"top_k {top_k} must be a whole number of at least 0; 0 keeps the full vocabulary")


def candidate_count(temperature: float, top_k: int | None, vocab: int) -> int:
    """How many of the likeliest tokens a compiled step looks at: 1 greedy, 0 the full vocabulary, else a power of two.

    top_k itself stays a run-time number below this, so trying many values compiles only a few steps.
    """
    if temperature == 0 or top_k == 1:
        return 1
    if not top_k or top_k >= vocab:
        return 0
    return min(next_power(top_k, FEWEST_CANDIDATES), vocab)


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
    candidates: int,
    vocab: int,
) -> tuple[jax.Array, jax.Array]:
    """logits (B, V) float32, keys (B,) -> (token (B,) int32, its log-probability (B,) float32).

    Ids from `vocab` up are never chosen. Greedy takes the first of equal logits; otherwise the token is drawn from
    softmax(logits / temperature) over the `top_k` likeliest, by adding Gumbel noise from fold_in(key, step) and taking
    the largest (Gumbel-max trick). The log-probability is the model's own, before temperature and top-k.
    """
    logits = jnp.where(jnp.arange(logits.shape[-1]) < vocab, logits, -jnp.inf)
    if candidates == 1:
        token = jnp.argmax(logits, axis=-1)
    else:
        values, ids = jax.lax.top_k(logits, candidates) if candidates else (logits, None)
        if candidates:
            values = jnp.where(jnp.arange(candidates) < top_k, values, -jnp.inf)
        scaled = (values - jnp.max(values, axis=-1, keepdims=True)) / temperature
        noise = jax.vmap(lambda key: jax.random.gumbel(jax.random.fold_in(key, step), values.shape[-1:]))(keys)
        choice = jnp.argmax(scaled + noise, axis=-1)[:, None]
        token = (jnp.take_along_axis(ids, choice, axis=-1) if candidates else choice)[:, 0]
    chosen = jnp.take_along_axis(logits, token[:, None], axis=-1)[:, 0]
    return token.astype(jnp.int32), chosen - jax.nn.logsumexp(logits, axis=-1)
