"""Small models of several shapes, filled with synthetic weights and compiled once for all tests that use them."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import vectors

from nanochat_lib import gpt, losses
from nanochat_lib.sizing import GPTConfig

TINY = GPTConfig(sequence_len=6, vocab_size=50, n_layer=3, n_head=4, n_kv_head=2, n_embd=32, window_pattern="L")
OLD = replace(TINY, n_layer=2, window_pattern="SL", recipe="recipe4")  # windows 3 and 6
CONFIGS = {
    "grouped heads": TINY,
    "recipe 4": OLD,
    "one layer": replace(TINY, n_layer=1, n_kv_head=4, sequence_len=20),
    "one kv head": replace(TINY, n_layer=4, n_kv_head=1, sequence_len=4),
}


@lru_cache
def filled(config: GPTConfig) -> dict[str, jax.Array]:
    return {name: jnp.asarray(vectors.fill(name, shape)) for name, shape in gpt.param_shapes(config).items()}


@lru_cache
def forward(config: GPTConfig, dtype=jnp.float32):
    return jax.jit(lambda params, idx: gpt.apply(config, params, idx, dtype=dtype))


@lru_cache
def cached(config: GPTConfig, dtype=jnp.float32):
    """(prefill, decode), compiled."""
    return (
        jax.jit(lambda params, idx, lengths, cache: gpt.prefill(config, params, idx, lengths, cache, dtype=dtype)),
        jax.jit(lambda params, token, cache: gpt.decode(config, params, token, cache, dtype=dtype)),
    )


ROWS, LENGTH, PROMPT, SLOTS = 6, 23, 15, 24  # one shape for nearly everything: each other one is a compilation


def full(config: GPTConfig, params: dict, idx: np.ndarray, dtype=jnp.float32) -> np.ndarray:
    """Logits of ids (b, t), computed in the common shape; what is added comes later or stands in other rows."""
    idx = np.asarray(idx)
    (b, t) = idx.shape
    return np.asarray(forward(config, dtype)(params, np.pad(idx, ((0, ROWS - b), (0, LENGTH - t)))))[:b, :t]


@lru_cache
def gradient(config: GPTConfig):
    """Gradient of the summed loss of predicting `targets`, compiled."""
    loss = lambda params, idx, targets: losses.cross_entropy(gpt.apply(config, params, idx), targets)[0]  # noqa: E731
    return jax.jit(jax.grad(loss))


def ids(config: GPTConfig, rows: int, length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, config.vocab_size, (rows, length)).astype(np.int32)
