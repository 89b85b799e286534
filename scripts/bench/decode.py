"""Tokens a second of the engine and of a plain per-token loop, at several numbers of rows, in one run.

The plain loop is what one writes first: a compiled step that takes one token a row and a cache with a slot for every
position, called once a token; the host takes the likeliest token from the logits and calls again. Both sides have the
same weights and prompts and must give the same tokens; a ratio is only printed for equal work. Weights are random, from
a seed. `--torch` adds the same loop in eager PyTorch, with the twin's layers, as nanochat's own engine runs. Example:

    python scripts/bench/decode.py --rows 1 8 32 --torch
    python scripts/bench/decode.py --depth 12 --width 768 --context 2048 --vocab 32768 --rows 8 --new 32
"""

from __future__ import annotations

import argparse
import threading
import time
from functools import partial
from itertools import islice, product

import jax
import jax.numpy as jnp
import numpy as np

from nanochat_lib import gpt
from nanochat_lib.batching import SLACK, BatchingEngine, Piece, Request
from nanochat_lib.engine import Engine
from nanochat_lib.kv_cache import row_bytes
from nanochat_lib.layers import norm
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.tokenizer import SPECIAL_TOKENS, Tokenizer


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


class EagerLoop:
    """The plain loop once more, with the PyTorch twin's layers: a prompt in one pass, then a token a row and call."""

    def __init__(self, config: GPTConfig, params: gpt.Params, threads: int) -> None:
        import torch

        from nanochat_lib import twin

        torch.set_num_threads(threads)
        self.torch, self.twin, self.config, self.model = torch, twin, config, twin.build(config, params)
        like = torch.zeros(1)
        self.tables = twin.rotation(config.sequence_len, config.n_embd // config.n_head, self.model.recipe, like)

    def step(self, idx, at: int):
        """Logits (B, V) behind the tokens idx (B, T) at positions at …; T is 1, or the cache is empty."""
        model, norm, count = self.model, self.twin.norm, idx.size(1)
        embedded = norm(model.transformer["wte"](idx))
        x = embedded
        if model.recipe.smear:
            gate = model.smear_lambda * self.torch.sigmoid(model.smear_gate(x[..., : self.twin.SMEAR_CHANNELS]))
            x = x + gate * self.torch.cat([self.prev, embedded[:, :-1]], dim=1)
            self.prev = embedded[:, -1:]
        x0 = middle = x
        cos, sin = (table[at : at + count] for table in self.tables)
        for i, block in enumerate(model.transformer["h"]):
            x = model.resid_lambdas[i] * x + model.x0_lambdas[i] * x0
            ve = model.value_embeds[str(i)](idx) if str(i) in model.value_embeds else None
            self.twin.attend = partial(self.attend, i, at)
            x = x + block.attn(norm(x), ve, cos, sin)
            x = x + block.mlp(norm(x))
            if i == self.config.n_layer // 2:
                middle = x
        if model.recipe.smear:
            x = x - model.backout_lambda * middle
        logits = model.lm_head(norm(x[:, -1]))[:, : self.config.vocab_size]
        return model.recipe.softcap * self.torch.tanh(logits / model.recipe.softcap)

    def attend(self, layer: int, at: int, q, k, v, window: int):
        """The twin's attention with a cache of (B, T, K, D) a layer; a single query sees its window by a slice."""
        end = at + k.size(1)
        for cache, new in zip(self.cache[layer], (k, v), strict=True):
            cache[:, at:end] = new
        first = max(0, end - 1 - window) if k.size(1) == 1 else 0
        keys, values = (cache[:, first:end] for cache in self.cache[layer])
        if k.size(1) > 1:
            return self.plain(q, keys, values, window)
        q, keys, values = (x.transpose(1, 2) for x in (q, keys, values))
        grouped = q.size(1) != keys.size(1)
        y = self.torch.nn.functional.scaled_dot_product_attention(q, keys, values, enable_gqa=grouped)
        return y.transpose(1, 2)

    def __call__(self, prompts: np.ndarray, new: int) -> tuple[np.ndarray, float]:
        """(new tokens (B, new), seconds from the end of the prompt on)."""
        torch, config, self.plain = self.torch, self.config, self.twin.attend
        shape = len(prompts), config.sequence_len, config.n_kv_head, config.head_dim
        self.cache = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(config.n_layer)]
        self.prev = torch.zeros(len(prompts), 1, config.n_embd)
        tokens, length = [], prompts.shape[1]
        try:
            with torch.inference_mode():
                token = self.step(torch.from_numpy(prompts).long(), 0).argmax(-1)
                started = time.perf_counter()
                for at in range(length, length + new):
                    tokens.append(token)
                    token = self.step(token[:, None], at).argmax(-1)
                took = time.perf_counter() - started
        finally:
            self.twin.attend = self.plain
        return torch.stack(tokens, dim=1).numpy(), took


def batched(engine: BatchingEngine, prompts: np.ndarray, new: int) -> tuple[np.ndarray, float]:
    """(new tokens (B, new), seconds from handing in the requests to the last piece of all).

    The prompts but for their last token have been run before, by requests of their own, and are only continued.
    """
    ask(engine, prompts[:, :-1], 1)
    started = time.perf_counter()
    answers = ask(engine, prompts, new)
    return answers, time.perf_counter() - started


def ask(engine: BatchingEngine, prompts: np.ndarray, new: int) -> np.ndarray:
    """Every prompt's answer (B, new)."""
    answers, over = [[] for _ in prompts], threading.Semaphore(0)

    def deliver(row: int, piece: Piece) -> None:
        answers[row] += piece.tokens
        if piece.finish:
            over.release()

    for row, prompt in enumerate(prompts):
        engine.submit(Request(prompt.tolist(), new, temperature=0), partial(deliver, row))
    for _ in prompts:
        over.acquire()
    return np.array(answers)


def offline(engine: Engine, prompts: np.ndarray, new: int) -> tuple[np.ndarray, float]:
    """(new tokens (B, new), seconds of the whole call, the prompts too)."""
    started = time.perf_counter()
    rows = engine.generate_batch(prompts.tolist(), max_tokens=new, temperature=0).sequences
    return np.array(rows)[:, prompts.shape[1] :], time.perf_counter() - started


def random_params(config: GPTConfig) -> gpt.Params:
    """Every matrix drawn, also those that start at zero, so that every layer does something. No special tokens."""
    rng, params = np.random.default_rng(0), {}
    for name, shape in gpt.param_shapes(config).items():
        values = rng.normal(0, shape[-1] ** -0.5, shape) if len(shape) > 1 else np.full(shape, 0.5)
        params[name] = jnp.asarray(values, jnp.float32)
    special = config.vocab_size - len(SPECIAL_TOKENS)
    return params | {"lm_head.weight": params["lm_head.weight"].at[special:].set(0)}


def any_tokenizer(vocab: int) -> Tokenizer:
    """A tokenizer of that many tokens, made of letters."""
    words = (bytes(word) for length in (2, 3, 4) for word in product(range(97, 123), repeat=length))
    return Tokenizer(list(islice(words, vocab - 256 - len(SPECIAL_TOKENS))))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8, 32], help="rows (default 1 8 32)")
    parser.add_argument("--depth", type=int, default=4, help="layers (default 4, the cpu preset's)")
    parser.add_argument("--width", type=int, default=128, help="channels (default 128)")
    parser.add_argument("--heads", type=int, default=2, help="query and key/value heads (default 2)")
    parser.add_argument("--vocab", type=int, default=1024, help="tokens (default 1024)")
    parser.add_argument("--context", type=int, default=128, help="context (default 128)")
    parser.add_argument("--windows", default="L", help="window pattern (default L)")
    parser.add_argument("--prompt", type=int, default=24, help="tokens of a prompt (default 24)")
    parser.add_argument("--new", type=int, default=97, help="tokens of an answer (default 97)")
    parser.add_argument(
        "--repeat", type=int, default=5, help="runs of each side, by turns; the best counts (default 5)"
    )
    parser.add_argument(
        "--torch", type=int, nargs="?", const=1, metavar="THREADS",
        help="also the twin's eager loop in PyTorch, on so many threads (default 1: more pay for large models)",
    )  # fmt: skip
    args = parser.parse_args()

    heads = {"n_head": args.heads, "n_kv_head": args.heads}
    config = GPTConfig(
        sequence_len=args.context, vocab_size=args.vocab, n_layer=args.depth, n_embd=args.width,
        window_pattern=args.windows, **heads,
    )  # fmt: skip
    params, tokenizer = random_params(config), any_tokenizer(args.vocab)
    engine, new = Engine(config, params, tokenizer), args.new
    print(f"{config.n_layer} layers of {config.n_embd}, context {config.sequence_len:,}, {config.vocab_size:,} tokens;")
    print(
        f"prompts of {args.prompt}, answers of {new}, float32 on {jax.default_backend()}, greedy, best of {args.repeat}"
    )
    plain_row = sum(leaf.nbytes for leaf in jax.tree.leaves(plain_cache(config, 1)))
    sizes = row_bytes(config, config.sequence_len, slack=SLACK)
    print(
        f"memory of a row: {plain_row:,} bytes in the plain loop; {sizes['total']:,} in the engine "
        f"({sizes['full']:,} full layers, {sizes['window']:,} windows, {sizes['state']:,} state)"
    )
    eager = EagerLoop(config, params, args.torch) if args.torch else None
    print(
        f"{'rows':>5} {'plain loop':>16} {'batching':>16} {'ratio':>7} {'offline':>16} {'ratio':>7}"
        + f" {'eager PyTorch':>16} {'batching to it':>15}" * (eager is not None)
    )
    for rows in args.rows:
        prompts = np.random.default_rng(rows).integers(0, args.vocab - 16, (rows, args.prompt)).astype(np.int32)
        with BatchingEngine(engine, rows) as batching:
            sides = {
                "plain": lambda prompts=prompts: plain_loop(config, params, prompts, new),
                "batched": lambda prompts=prompts, batching=batching: batched(batching, prompts, new),
                "offline": lambda prompts=prompts: offline(engine, prompts, new),
            }
            if eager:
                sides["eager"] = lambda prompts=prompts: eager(prompts, new)
            seconds: dict[str, list[float]] = {name: [] for name in sides}
            for run in range(args.repeat + 1):  # the first one compiles
                tokens = {}
                for name, side in sides.items():
                    tokens[name], took = side()
                    seconds[name] += [took] * (run > 0)
                if any(not np.array_equal(tokens["plain"], other) for other in tokens.values()):
                    raise SystemExit(f"{rows} rows: the sides give different tokens")
        speed = {name: rows * new / min(took) for name, took in seconds.items()}
        ratios = [speed[name] / speed["plain"] for name in ("batched", "offline")]
        print(
            f"{rows:>5} {speed['plain']:>10,.0f} tok/s {speed['batched']:>10,.0f} tok/s {ratios[0]:>6.1f}x "
            f"{speed['offline']:>10,.0f} tok/s {ratios[1]:>6.1f}x"
            + (f" {speed['eager']:>10,.0f} tok/s {speed['batched'] / speed['eager']:>14.1f}x" if eager else "")
        )


if __name__ == "__main__":
    main()
