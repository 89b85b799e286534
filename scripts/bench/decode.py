"""Tokens a second of the engine and of a plain per-token loop, at several numbers of rows, in one run.

The plain loop is what one writes first: a compiled step that takes one token a row and a cache with a slot for every
position, called once a token; the host takes the likeliest token from the logits and calls again. Both sides have the
same weights and prompts and must give the same tokens; a ratio is only printed for equal work. Weights are random, from
a seed. Example:

    python scripts/bench/decode.py --rows 1 8 32
    python scripts/bench/decode.py --depth 12 --width 768 --context 2048 --vocab 32768 --rows 8 --new 32
"""

from __future__ import annotations

import threading
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from nanochat_lib import gpt
from nanochat_lib.batching import BatchingEngine, Request
from nanochat_lib.engine import Engine
from nanochat_lib.layers import norm
from nanochat_lib.sizing import GPTConfig


def plain_cache(config: GPTConfig, rows: int) -> list[tuple[jax.Array, jax.Array]]:
    shape = rows, config.sequence_len, config.n_kv_head, config.head_dim
    return [(jnp.zeros(shape), jnp.zeros(shape)) for _ in range(config.n_layer)]


@partial(jax.jit, static_argnums=0)
def plain_step(config: GPTConfig, params: gpt.Params, cache: list, before: jax.Array, token: jax.Array, at: jax.Array):
    """Logits (B, V) after token (B,) at position `at`, the cache with it, and its embedding for the next smear."""
    model, cache = gpt.build(config, params), list(cache)
    rows = model.lookup(token[:, None], jnp.float32)
    x = norm(rows[gpt.WTE])
    rotation = tuple(
        jax.lax.dynamic_slice_in_dim(table, at, 1) for table in model.rotation(config.sequence_len, "float32")
    )

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        new = zip(cache[layer], (k, v), strict=True)
        keys, values = (jax.lax.dynamic_update_slice_in_dim(old, x.swapaxes(1, 2), at, 1) for old, x in new)
        cache[layer] = keys, values
        group = config.n_head // config.n_kv_head
        keys, values = (jnp.repeat(x, group, axis=2) for x in (keys, values))
        scores = jnp.einsum("bhqd,bkhd->bhqk", q, keys) / config.head_dim**0.5
        distance = at - jnp.arange(config.sequence_len)
        seen = (distance >= 0) & (distance <= config.windows[layer])
        weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1)
        return jnp.einsum("bhqk,bkhd->bhqd", weights, values)

    hidden = model.trunk(model.smear(x, before), rows, rotation, attend)
    return model.logits(hidden[:, 0]), cache, x


def plain_loop(config: GPTConfig, params: gpt.Params, prompts: np.ndarray, new: int) -> tuple[np.ndarray, float]:
    """(new tokens (B, new), seconds from the end of the prompt on)."""
    rows, length = prompts.shape
    cache, before = plain_cache(config, rows), jnp.zeros((rows, 1, config.n_embd))
    for at in range(length):
        logits, cache, before = plain_step(config, params, cache, before, prompts[:, at], at)
    token, tokens = np.argmax(np.asarray(logits), axis=-1).astype(np.int32), []
    started = time.perf_counter()
    for at in range(length, length + new):
        tokens.append(token)
        logits, cache, before = plain_step(config, params, cache, before, token, at)
        token = np.argmax(np.asarray(logits), axis=-1).astype(np.int32)
    return np.stack(tokens, axis=1), time.perf_counter() - started


def batching(engine: BatchingEngine, prompts: np.ndarray, new: int) -> tuple[list[list[int]], float]:
    """(new tokens of every row, seconds from the first piece to the last of all)."""
    answers, ends, first = [[] for _ in prompts], threading.Semaphore(0), []

    def deliver(row: int, piece) -> None:
        first.append(time.perf_counter())
        answers[row] += piece.tokens
        if piece.finish:
            ends.release()

    for row, prompt in enumerate(prompts):
        engine.submit(Request(prompt.tolist(), new, temperature=0), partial(deliver, row))
    for _ in prompts:
        ends.acquire()
    return answers, max(first) - min(first)


def offline(engine: Engine, prompts: np.ndarray, new: int) -> tuple[list[list[int]], float]:
    """(new tokens of every row, seconds of the whole call)."""
    started = time.perf_counter()
    rows = engine.generate_batch(prompts.tolist(), max_tokens=new, temperature=0).sequences
    return [row[prompts.shape[1] :] for row in rows], time.perf_counter() - started


def random_params(config: GPTConfig) -> gpt.Params:
    """Every matrix drawn, also those that start at zero: otherwise no layer does anything. Ends are never likely."""
    rng, params = np.random.default_rng(0), {}
    for name, shape in gpt.param_shapes(config).items():
        scale = 1 / np.sqrt(shape[-1]) if len(shape) > 1 else 1
        params[name] = jnp.asarray(
            rng.normal(0, scale, shape).astype(np.float32) if len(shape) > 1 else np.full(shape, 0.5, np.float32)
        )
    return params | {"lm_head.weight": params["lm_head.weight"].at[config.vocab_size - 9 :].set(0)}
