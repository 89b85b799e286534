"""A batch of answers in the making: one compiled prefill, then compiled decode steps on a KV cache, and tool use.

The device runs many steps on its own and hands control back only when a row closes a tool call, when all rows have
ended, or when the caller wants the tokens. What the host does per token is then next to nothing, however many rows.

Tool use follows nanochat: when a row closes `<|python_start|> … <|python_end|>`, the calculator's result is put into
the row as `<|output_start|> … <|output_end|>`. These forced tokens count as part of the answer and carry mask 0.

Rows end at `<|assistant_end|>` or `<|bos|>`, or at their limit. An ended row is frozen: no more tokens, no tools.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nanochat_lib import lanes
from nanochat_lib.calculator import calculate, result_text
from nanochat_lib.sampling import next_power, sample
from nanochat_lib.sizing import GPTConfig

CHUNK = 128  # most decode steps of one dispatch: each costs the host as much as several steps of a small model
SHORTEST = 16  # prompts and caches are padded to powers of two from here on, so that few shapes compile
SPAN = 128  # decode steps are compiled for texts of up to so many tokens, four times as many, …
COMPILES: Counter[str] = Counter()  # how often "prefill" and "decode" were compiled in this process


@dataclass(frozen=True)
class ToolCall:
    """An expression the model asked to evaluate, and the value (None: no result, nothing was inserted)."""

    expression: str
    result: int | float | None


@dataclass(frozen=True)
class Generated:
    """Rows in the order of the prompts, the samples of a prompt next to each other. Unpacks as (sequences, masks)."""

    sequences: list[list[int]] = field(default_factory=list)  # prompt and answer
    masks: list[list[int]] = field(default_factory=list)  # 1 for a token the model sampled
    finished: list[str] = field(default_factory=list)  # "end" (the model's own end token) or "length"
    tool_calls: list[list[ToolCall]] = field(default_factory=list)
    logprobs: list[list[float]] = field(default_factory=list)  # of sampled tokens, before temperature and top-k; else 0

    def __iter__(self) -> Iterator[list[list[int]]]:
        return iter((self.sequences, self.masks))


@dataclass(frozen=True)
class Setup:
    """What is fixed while compiled: the model's functions and shape, the dtype, and the tokens that matter."""

    model: Any
    config: GPTConfig
    dtype: str
    vocab: int  # the tokenizer's, which may be smaller than the model's
    ends: tuple[int, int]  # assistant_end, bos
    python: tuple[int, int]  # start, end
    output: tuple[int, int]


class Options(NamedTuple):
    """How to sample; the first three are run-time numbers of the compiled functions."""

    temperature: float
    top_k: int
    top_p: float
    greedy: bool
    logprobs: bool


@partial(jax.jit, static_argnames=("setup", "num_samples", "cache_len", "greedy"))
def compiled_prefill(params, idx, lengths, keys, sampling, *, setup, num_samples, cache_len, greedy):
    """Prompts (P, T) -> the first token of each of the P·num_samples rows, its log-probability, and the rows' cache.

    sampling: (temperature, top_k, top_p), each one number or (B,).
    """
    COMPILES["prefill"] += 1
    cache = setup.model.init_cache(setup.config, idx.shape[0], cache_len, setup.dtype)
    logits, cache = setup.model.prefill(setup.config, params, idx, lengths, cache, dtype=setup.dtype)
    logits, cache = jnp.repeat(logits, num_samples, axis=0), setup.model.repeat_cache(cache, num_samples)
    return *sample(logits, keys, 0, *sampling, greedy, setup.vocab), cache


@partial(jax.jit, static_argnames=("setup", "greedy", "span", "logprobs"), donate_argnames=("cache",))
def compiled_decode(
    params, cache, token, keys, forced, alive, limit, held, steps, sampling, *, setup, greedy, span, logprobs=False
):
    """Up to `steps` more tokens a row; fewer when a living row closes a tool call or none is left.

    token (B,): the newest one; forced (B, CHUNK): the tokens to insert, -1 where the model chooses; limit (B,): tokens
    a row's answer may hold, of which `held`, one number or (B,), are there; sampling as above; span: see `span_of`.
    params may be those of `lanes.turned`.
    Returns (tokens (B, CHUNK) with -1 where there is none, log-probabilities if wanted or None, newest token, cache).
    """
    COMPILES["decode"] += 1
    ends = jnp.array(setup.ends, jnp.int32)

    def proceed(state):
        n, alive, paused = state[:3]
        return (n < steps) & alive.any() & ~paused

    def advance(state):
        n, alive, _, tokens, chances, token, cache = state
        model, dtype = setup.model, setup.dtype
        weights = lanes.upright(params)
        logits, cache = model.decode(setup.config, weights, token, cache, dtype=dtype, alive=alive, span=span)
        sampled, logprob = sample(logits, keys, held + n, *sampling, greedy, setup.vocab)
        new = jnp.where(forced[:, n] >= 0, forced[:, n], sampled)
        tokens = tokens.at[:, n].set(jnp.where(alive, new, -1))
        chances = chances.at[:, n].set(logprob) if logprobs else None
        token = jnp.where(alive, new, token)
        alive &= ~jnp.isin(token, ends) & (held + n + 1 < limit)
        return n + 1, alive, (alive & (token == setup.python[1])).any(), tokens, chances, token, cache

    blank = jnp.full(forced.shape, -1, jnp.int32), jnp.zeros(forced.shape, jnp.float32) if logprobs else None
    state = jax.lax.while_loop(proceed, advance, (jnp.int32(0), alive, jnp.bool_(False), *blank, token, cache))
    return state[3:]


def span_of(longest: int, length: int) -> int:
    """The span of a decode whose longest text has, at its end, `longest` tokens, in a cache of `length` positions."""
    span = SPAN
    while span < longest:
        span *= 4
    return min(span, length)


class ToolState(NamedTuple):
    """Where an answer stands with tools: inside of a call, and the tokens of its expression so far."""

    inside: bool = False
    expression: tuple[int, ...] = ()


def tool_step(state: ToolState, token: int, start: int, end: int) -> tuple[ToolState, list[int]]:
    """The state after one more token of an answer, and the expression's tokens if it closes a call, else [].

    `start` opens a call, and inside of one opens it anew; `end` closes it, and means nothing outside of one.
    """
    if token == start:
        return ToolState(True), []
    if token == end:
        return ToolState(), list(state.expression)
    if state.inside:
        state = ToolState(True, (*state.expression, token))
    return state, []


def tool_output(setup: Setup, tokenizer: Any, answer: list[int]) -> tuple[ToolCall | None, list[int]]:
    """What an answer that has just written `<|python_end|>` asked for, and the tokens to insert: (call, tokens).

    No call when it never opened one, closed it before or put nothing into it; no tokens when there is no result.
    """
    (start, end), (output_start, output_end) = setup.python, setup.output
    state, call = ToolState(), []
    for token in answer:
        state, call = tool_step(state, token, start, end)
    if not call:
        return None, []
    expression = tokenizer.decode(call)
    value = calculate(expression)
    output = [] if value is None else [output_start, *tokenizer.encode(result_text(value)), output_end]
    return ToolCall(expression, value), output


class Batch:
    """Rows on their way: their tokens, which of them live, what is to be inserted, and the device's state.

    `samples` numbers the answers that every prompt gets; a row's index is prompt · len(samples) + place in `samples`.
    """

    def __init__(
        self,
        setup: Setup,
        weights: lanes.Weights,
        tokenizer: Any,
        prompts: list[list[int]],
        limits: list[int],
        samples: range,
        keys: jax.Array,
        options: Options,
    ) -> None:
        self.setup, self.weights, self.tokenizer = setup, weights, tokenizer
        self.prompts, self.samples, self.keys, self.options = prompts, len(samples), keys, options
        self.limit = np.zeros(len(keys), np.int32)  # rows past the last prompt only fill up the compiled shape
        self.limit[: len(prompts) * len(samples)] = np.repeat(limits, len(samples))
        self.alive = self.limit > 0
        shape = (len(keys), int(self.limit.max()) + CHUNK)
        self.tokens = np.full(shape, -1, np.int32)  # -1 where the row had ended
        self.forced = np.full(shape, -1, np.int32)  # tokens to insert, -1 where the model chooses
        self.logprobs = np.zeros(shape, np.float32)
        self.calls: list[list[ToolCall]] = [[] for _ in self.limit]
        self.step = 0  # tokens that every living row holds

    def advance(self, steps: int) -> None:
        """At least one and at most `steps` more tokens. At least one row must be alive."""
        if self.step == 0:
            tokens, logprobs = self.prefill()
        else:
            forced = self.forced[:, self.step : self.step + CHUNK]
            state = self.cache, self.newest, self.keys, forced, self.alive, self.limit, self.step, min(steps, CHUNK)
            state += (self.options[:3],)
            tokens, logprobs, self.newest, self.cache = compiled_decode(
                self.weights.for_steps(len(self.keys)),
                *state,
                setup=self.setup,
                greedy=self.options.greedy,
                span=self.span(),
                logprobs=self.options.logprobs,
            )
        self.append(np.asarray(tokens), logprobs)

    def prefill(self) -> tuple[np.ndarray, jax.Array]:
        """Fills the cache with the prompts and takes the first token of every row."""
        lengths, context = [len(prompt) for prompt in self.prompts], self.setup.config.sequence_len
        shape = len(self.keys) // self.samples, min(next_power(max(lengths), SHORTEST), context)
        idx = np.full(shape, self.setup.ends[1], np.int32)
        for row, prompt in enumerate(self.prompts):
            idx[row, : len(prompt)] = prompt
        lengths = np.array(lengths + [1] * (len(idx) - len(lengths)), np.int32)
        longest = int((lengths + self.limit[:: self.samples]).max())
        self.cache_len = min(next_power(longest, SHORTEST), context)
        self.newest, logprob, self.cache = compiled_prefill(
            self.weights.params,
            idx,
            lengths,
            self.keys,
            self.options[:3],
            setup=self.setup,
            num_samples=self.samples,
            cache_len=self.cache_len,
            greedy=self.options.greedy,
        )
        return np.where(self.alive, self.newest, -1)[:, None], logprob[:, None]

    def span(self) -> int:
        longest = max(map(len, self.prompts)) + min(self.step + CHUNK, int(self.limit.max()))
        return span_of(longest, self.cache_len)

    def append(self, tokens: np.ndarray, logprobs: jax.Array | None) -> None:
        """Takes in new columns: unused ones, -1 in every row, come last; only the last used one closes tool calls."""
        used = int((tokens >= 0).any(axis=0).sum())
        tokens, new = tokens[:, :used], slice(self.step, self.step + used)
        self.tokens[:, new] = tokens
        if self.options.logprobs:
            self.logprobs[:, new] = np.asarray(logprobs)[:, :used]
        self.step += used
        self.alive &= ~np.isin(tokens, self.setup.ends).any(axis=1) & (self.step < self.limit)
        for row in np.flatnonzero(self.alive & (tokens[:, -1] == self.setup.python[1])):
            self.use_tool(row)

    def use_tool(self, row: int) -> None:
        """Row `row` has just closed a tool call: evaluates it and plans to insert the result."""
        call, output = tool_output(self.setup, self.tokenizer, self.tokens[row, : self.step].tolist())
        if call:
            self.calls[row].append(call)
        if self.step + len(output) <= self.limit[row]:
            self.forced[row, self.step : self.step + len(output)] = output
        else:
            self.alive[row] = False  # half a result would be worse than none: the row ends here, for length

    def collect(self, done: Generated, include_end: bool) -> None:
        """Appends the finished rows to `done`."""
        for row in range(len(self.prompts) * self.samples):
            prompt = self.prompts[row // self.samples]
            count = int((self.tokens[row] >= 0).sum())
            ended = count > 0 and int(self.tokens[row, count - 1]) in self.setup.ends
            count -= ended and not include_end
            sampled = self.forced[row, :count] < 0
            done.sequences.append(prompt + self.tokens[row, :count].tolist())
            done.masks.append([0] * len(prompt) + sampled.astype(int).tolist())
            done.finished.append("end" if ended else "length")
            done.tool_calls.append(self.calls[row])
            if self.options.logprobs:
                done.logprobs.append([0.0] * len(prompt) + np.where(sampled, self.logprobs[row, :count], 0.0).tolist())
