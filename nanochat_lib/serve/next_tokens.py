"""What the model thinks at every place of a conversation: the likeliest next tokens, by one forward pass."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nanochat_lib import gpt
from nanochat_lib.sampling import next_power
from nanochat_lib.serve.refusal import Refused

SHORTEST = 64  # texts are padded to powers of two from here on, so that few shapes compile
CHUNK = 64  # positions whose logits are held at a time
MOST_NEXT = 20
MOST_WAITING = 8


class NextTokens:
    """next_tokens(ids) → (ids (T, 20), probabilities (T, 20), probability of the text's own next token (T,)).

    Of the model of `engine` (nanochat_lib.Engine) at temperature 1, over the tokenizer's vocabulary. The last own
    probability means nothing.
    """

    def __init__(self, engine: Any) -> None:
        self.engine = engine

    def __call__(self, ids: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        setup = self.engine.setup
        padded = np.zeros(next_power(len(ids), SHORTEST), np.int32)  # changes nothing: attention is causal
        padded[: len(ids)] = ids
        shape = {"config": setup.config, "vocab": setup.vocab, "dtype": setup.dtype}
        found = likeliest(self.engine.params, padded, **shape, top=min(MOST_NEXT, setup.vocab))
        return tuple(np.asarray(part)[: len(ids)] for part in found)


@partial(jax.jit, static_argnames=("config", "vocab", "dtype", "top"))
def likeliest(params, ids, *, config, vocab, dtype, top):
    """ids (T,) → (ids (T, top), probabilities (T, top), probability of ids[t + 1] after t (T,))."""
    x = gpt.hidden(config, params, ids[None], dtype)[0]  # (T, C)

    def piece(part):
        x, following = part
        logp = jax.nn.log_softmax(gpt.head(config, params, x)[:, :vocab])
        best, tokens = jax.lax.top_k(logp, top)
        return tokens, jnp.exp(best), jnp.exp(jnp.take_along_axis(logp, following[:, None], -1)[:, 0])

    parts = x.reshape(-1, CHUNK, x.shape[-1]), jnp.roll(ids, -1).reshape(-1, CHUNK)
    return [out.reshape(len(ids), *out.shape[2:]) for out in jax.lax.map(piece, parts)]


class TokenTable:
    """Rows for the page: each token's id, text, mask, probability and what else could have followed it.

    The forward pass runs in a thread of its own, so neither the event loop nor the engine's thread waits for it.
    """

    def __init__(self, tokenizer: Any, next_tokens: Any) -> None:
        self.tokenizer, self.next_tokens = tokenizer, next_tokens
        self.special = set(tokenizer.special_tokens.values())
        self.pool, self.waiting = ThreadPoolExecutor(1, "next-tokens"), 0

    async def table(self, ids: list[int], mask: list[int], top: int) -> list[dict]:
        """`top`: how many next tokens, 0 to 20. Refused with 429 when too many ask at once."""
        if not 0 <= top <= MOST_NEXT:
            raise Refused(400, f"top {top} must be between 0 and {MOST_NEXT}", param="top")
        found = None
        if self.next_tokens is not None and top:
            if self.waiting >= MOST_WAITING:
                raise Refused(429, "too many ask for probabilities; try again later", headers={"Retry-After": "2"})
            self.waiting += 1
            try:
                found = await asyncio.get_running_loop().run_in_executor(self.pool, self.next_tokens, ids)
            finally:
                self.waiting -= 1
        rows: list[dict] = [
            {"id": token, "text": self.text(token), "special": token in self.special, "mask": learn}
            for token, learn in zip(ids, mask, strict=True)
        ]
        if found is not None:
            for place, row in enumerate(rows):
                if place:
                    row["p"] = round(float(found[2][place - 1]), 6)
                pairs = zip(found[0][place][:top].tolist(), found[1][place][:top].tolist(), strict=True)
                row["next"] = [[token, self.text(token), round(p, 6)] for token, p in pairs]
        return rows

    def text(self, token: int) -> str:
        """A token alone; bytes that are only a part of a character appear as \\x…."""
        return self.tokenizer.id_to_bytes(token).decode("utf-8", "backslashreplace")

    def close(self) -> None:
        self.pool.shutdown(wait=False, cancel_futures=True)
