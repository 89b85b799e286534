"""The engine: answers to prompts, streamed or in batches that start together, from one set of weights.

Requests that come and go at any time are `batching`'s.

Limit of a row: `max_tokens`, and prompt and answer together never exceed the model's sequence length, the longest text
it has learned. How a batch is decoded, and how tools are used, is in `decoding`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nanochat_lib import gpt, lanes
from nanochat_lib.decoding import CHUNK, SHORTEST, Batch, Generated, Options, Setup
from nanochat_lib.errors import UserError
from nanochat_lib.runtime import check_preempted
from nanochat_lib.sampling import check_sampling, is_greedy, next_power, row_keys
from nanochat_lib.sizing import GPTConfig

AT_ONCE = 8  # columns that a stream computes at a time: each call has a price, and the first column is to come soon


class Engine:
    """Generates from `params` of a model of shape `config`, whose vocabulary holds that of `tokenizer`.

    `dtype` is the dtype of computation and cache. `engine.params = …` swaps the weights without compiling again.
    `model` holds the functions init_cache, prefill, decode and repeat_cache (see nanochat_lib.gpt).
    A row's random numbers depend on its seed, its prompt's place in the batch and its sample number, on nothing else.
    """

    def __init__(
        self, config: GPTConfig, params: gpt.Params, tokenizer: Any, *, dtype: Any = jnp.float32, model: Any = gpt
    ) -> None:
        if tokenizer.vocab_size > config.vocab_size:
            raise UserError(
                f"the tokenizer has {tokenizer.vocab_size} tokens but the model only {config.vocab_size}; "
                "load the tokenizer that the model was trained with"
            )
        pairs = ("assistant_end", "bos"), ("python_start", "python_end"), ("output_start", "output_end")
        tokens = [tuple(tokenizer.encode_special(f"<|{name}|>") for name in pair) for pair in pairs]
        self.tokenizer, self.context = tokenizer, config.sequence_len
        self.setup = Setup(model, config, jnp.dtype(dtype).name, tokenizer.vocab_size, *tokens)
        self.params = params

    @property
    def params(self) -> gpt.Params:
        return self.weights.params

    @params.setter
    def params(self, params: gpt.Params) -> None:
        # Matrices are cast to the compute dtype at every use anyway: doing it once saves reading float32 each token.
        dtype = self.setup.dtype
        cast = {name: leaf.astype(dtype) if leaf.ndim > 1 else leaf for name, leaf in params.items()}
        self.weights = lanes.Weights(cast)

    def generate(
        self,
        tokens: Sequence[int],
        num_samples: int = 1,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 42,
        top_p: float | None = None,
    ) -> Iterator[tuple[list[int], list[int]]]:
        """Yields (token column, mask column), an entry for each of `num_samples` answers to the prompt `tokens`.

        At most `max_tokens` columns (None: until the context is full). Mask 1: sampled, 0: inserted by a tool. A row
        that has ended repeats `<|assistant_end|>` with mask 0 until all have. temperature, top_k, top_p: see
        sampling.sample. Raises UserError, at once, for a prompt or an option out of range.
        """
        limits = self.limits([tokens], num_samples, max_tokens)
        options = self._options(temperature, top_k, top_p, logprobs=False)
        return self._columns(self._batch([tokens], limits, range(num_samples), [0], [seed], options))

    def _columns(self, batch: Batch) -> Iterator[tuple[list[int], list[int]]]:
        while batch.alive.any():
            first = batch.step
            batch.advance(AT_ONCE)
            for column, forced in zip(batch.tokens.T[first : batch.step], batch.forced.T[first:], strict=False):
                mask = (column >= 0) & (forced < 0)
                yield np.where(column >= 0, column, self.setup.ends[0]).tolist(), mask.astype(int).tolist()

    def generate_batch(
        self,
        prompts: Sequence[Sequence[int]],
        num_samples: int = 1,
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int | Sequence[int] = 42,
        include_end: bool = False,
        logprobs: bool = False,
        batch_rows: int | None = None,
        top_p: float | None = None,
    ) -> Generated:
        """`num_samples` answers to each of the prompts, which may differ in length.

        The end token is left out unless `include_end`. `seed` may be a list, one a prompt: an answer then does not
        depend on what else is in the batch. `batch_rows` bounds the rows that the device holds at a time and changes no
        random number. Raises UserError for a prompt or an option out of range; in a training loop a preemption ends it
        between two chunks of tokens (preempted.Preempted).
        """
        limits = self.limits(prompts, num_samples, max_tokens)
        options = self._options(temperature, top_k, top_p, logprobs)
        places = range(len(prompts))
        if np.ndim(seed):
            if len(seed) != len(prompts):
                raise UserError(f"got {len(seed)} seeds for {len(prompts)} prompts; give one for each, or one number")
            places = [0] * len(prompts)
        seeds = np.broadcast_to(seed, len(prompts)).tolist()
        if batch_rows is not None and batch_rows < 1:
            raise UserError(f"batch_rows {batch_rows} must be at least 1")
        total = max(len(prompts) * num_samples, 1)
        rows = min(batch_rows or total, total)
        at_once = lanes.lanes_for(rows, self.params)
        rows //= at_once
        per_prompt = min(num_samples, rows)  # more samples than rows: the prompts go one by one, in several rounds
        parts = [
            (slice(first, first + rows // per_prompt), range(start, min(start + per_prompt, num_samples)))
            for first in range(0, len(prompts), rows // per_prompt)
            for start in range(0, num_samples, per_prompt)
        ]
        done = Generated()
        for place in range(0, len(parts), at_once):
            batches = [
                self._batch(prompts[part], limits[part], samples, places[part], seeds[part], options)
                for part, samples in parts[place : place + at_once]
            ]
            while living := [batch for batch in batches if batch.alive.any()]:
                check_preempted()
                lanes.together([partial(batch.advance, CHUNK) for batch in living])
            for batch in batches:
                batch.collect(done, include_end)
        return done

    def limits(self, prompts: Sequence[Sequence[int]], num_samples: int, max_tokens: int | None) -> list[int]:
        """How many tokens each prompt's answers may have; UserError for prompts and counts out of range."""
        if num_samples < 1:
            raise UserError(f"num_samples {num_samples} must be at least 1")
        if max_tokens is not None and max_tokens < 0:
            raise UserError(f"max_tokens {max_tokens} must be at least 0")
        for place, prompt in enumerate(prompts):
            if len(prompt) == 0:
                raise UserError(f"prompt {place} is empty; it needs at least one token, such as <|bos|>")
            if len(prompt) >= self.context:
                raise UserError(
                    f"prompt {place} has {len(prompt):,} tokens; the model's context of {self.context:,} must also "
                    f"hold the answer: shorten the prompt to at most {self.context - 1:,}"
                )
            gpt.check_ids(self.setup.config, prompt)
        return [min(self.context - len(p), self.context if max_tokens is None else max_tokens) for p in prompts]

    def _options(self, temperature: float, top_k: int | None, top_p: float | None, logprobs: bool) -> Options:
        check_sampling(temperature, top_k, top_p)
        return Options(float(temperature), int(top_k or 0), float(top_p or 1), is_greedy(temperature, top_k), logprobs)

    def _batch(
        self,
        prompts: Sequence[Sequence[int]],
        limits: list[int],
        samples: range,
        places: Sequence[int],
        seeds: Sequence[int],
        options: Options,
    ) -> Batch:
        """The rows of these prompts, their number filled up to a power of two. Seeds count modulo 2³²."""
        filled = [0] * (next_power(len(prompts)) - len(prompts))
        columns = [seed % 2**32 for seed in seeds] + filled, [*places] + filled
        seed, place = (np.repeat(np.array(column, np.uint32), len(samples)) for column in columns)
        keys = row_keys(seed, place, np.tile(np.array(samples, np.uint32), len(prompts) + len(filled)))
        prompts = [list(prompt) for prompt in prompts]
        return Batch(self.setup, self.weights, self.tokenizer, prompts, limits, samples, keys, options)


_logits = jax.jit(gpt.apply, static_argnums=(0, 3))


def naive_generate(
    config: GPTConfig,
    params: gpt.Params,
    tokens: Sequence[int],
    max_tokens: int,
    temperature: float = 1.0,
    top_k: int | None = None,
    seed: int = 42,
    dtype: Any = jnp.float32,
) -> Iterator[int]:
    """The textbook loop, kept as the reference: the whole text through the model for every token. No tools, no end."""
    check_sampling(temperature, top_k)
    ids, key = list(tokens), jax.random.key(seed)
    for step in range(max_tokens):
        padded = ids + [0] * (next_power(len(ids), SHORTEST) - len(ids))  # changes nothing: attention is causal
        logits = _logits(config, params, np.array([padded], np.int32), jnp.dtype(dtype).name)[0, len(ids) - 1]
        if top_k:
            logits = jnp.where(logits < jnp.sort(logits)[-min(top_k, len(logits))], -jnp.inf, logits)
        if temperature == 0:
            ids.append(int(jnp.argmax(logits)))
        else:
            ids.append(int(jax.random.categorical(jax.random.fold_in(key, step), logits / temperature)))
        yield ids[-1]
