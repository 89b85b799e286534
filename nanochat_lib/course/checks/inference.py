"""Checks, hints, quizzes and predictions of chapter 10, inference."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from nanochat_lib import calculator, decoding, gpt, kv_cache
from nanochat_lib.course.cases import (
    Exercise,
    Option,
    Prediction,
    Quiz,
    example,
    prop,
    reference,
    sign,
    suspect,
)
from nanochat_lib.sizing import GPTConfig

# ---- the ring


def _held(pos: np.ndarray, count: int, newest: int = -1, turn: int = 1) -> np.ndarray:
    last = (np.asarray(pos) + newest)[:, None]
    return last - (turn * (last - np.arange(count))) % count


def _held_shown() -> str:
    lines = [f"pos {pos}: slots 0 … 3 hold {_held([pos], 4)[0].tolist()}" for pos in (0, 1, 3, 4, 5, 10)]
    return "A ring of 4 slots. Negative: nothing there yet.\n" + "\n".join(lines)


# ---- one more token


def stored(fn: Callable, cache: dict, layer: int, k: np.ndarray, v: np.ndarray, alive: object) -> dict:
    """`store_token` on a cache of two layers, a ring of 5 slots and 9 full ones; the arrays of the result by name."""
    pos = jnp.asarray(cache["pos"], jnp.int32)
    keys, values = (tuple(map(jnp.asarray, cache[name])) for name in ("k", "v"))
    whole = kv_cache.KVCache(keys, values, pos, jnp.zeros((len(pos), 1, 4)))
    out = fn(whole, layer, jnp.asarray(k), jnp.asarray(v), None if alive is None else jnp.asarray(alive))
    names = {"k of the ring": out.k[0], "v of the ring": out.v[0], "k of the full layer": out.k[1]}
    return {name: np.asarray(x) for name, x in (names | {"v of the full layer": out.v[1], "pos": out.pos}).items()}


def some_slots(rng: np.random.Generator, pos: list[int], layer: int, alive: list[bool] | None) -> tuple:
    """Arguments of `stored`; every number differs."""
    draw = lambda slots: rng.standard_normal((len(pos), 2, slots, 3)).astype(np.float32)  # noqa: E731
    cache = {"pos": np.array(pos, np.int32), "k": [draw(5), draw(9)], "v": [draw(5), draw(9)]}
    return cache, layer, draw(1), draw(1), None if alive is None else np.array(alive)


def _changed(got: object, cache: dict, layer: int) -> np.ndarray | None:
    """Which slots of the layer got a new key: (B, R), None when that cannot be seen."""
    if not isinstance(got, dict):
        return None
    return (got[("k of the ring", "k of the full layer")[layer]] != cache["k"][layer]).any(axis=(1, 3))


def _touched(which: Callable) -> Callable:
    """Whether a row for which `which(pos, alive)` is true has been written to."""

    def seen(got: object, want: object, cache: dict, layer: int, k: object, v: object, alive: object) -> bool:
        changed = _changed(got, cache, layer)
        rows = which(cache["pos"], np.ones(len(cache["pos"]), bool) if alive is None else alive)
        return changed is not None and bool(changed[rows].any())

    return seen


def _unwritten(got: object, want: object, cache: dict, layer: int, *_: object) -> bool:
    changed, right = _changed(got, cache, layer), _changed(want, cache, layer)
    return changed is not None and bool((right & ~changed).any()) and not bool((changed & ~right).any())


def _same_slot(got: object, want: object, cache: dict, layer: int, *_: object) -> bool:
    changed = _changed(got, cache, layer)
    return changed is not None and len(changed) > 1 and bool(changed.any() and (changed == changed[:1]).all())


def _stored_shown() -> str:
    slots = [np.zeros((3, 1, 5, 1), np.float32), np.zeros((3, 1, 9, 1), np.float32)]
    new, cache = np.ones((3, 1, 1, 1), np.float32), {"pos": [2, 7, 9], "k": slots, "v": slots}
    out = stored(kv_cache.store_token, cache, 0, new, new, None)
    lines = [f"row of pos {p}: {out['k of the ring'][i, 0, :, 0].tolist()}" for i, p in enumerate((2, 7, 9))]
    return "A ring of 5 slots in a cache of 9 positions; the new key is 1. The last row is full.\n" + "\n".join(lines)


# ---- attention on a cache


def attended(
    fn: Callable, q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, window: int
) -> np.ndarray:
    return fn(*map(jnp.asarray, (q, k, v)), positions=jnp.asarray(positions, jnp.int32), window=window)


def some_cache(rng: np.random.Generator, positions: list[int], slots: int, window: int, heads: int = 4) -> tuple:
    """(q, k, v, positions, window) with two key/value heads; the slots that hold nothing are full of large numbers."""
    rows, size = len(positions), 6
    q = rng.standard_normal((rows, heads, 1, size)).astype(np.float32)
    k, v = (rng.standard_normal((rows, 2, slots, size)).astype(np.float32) for _ in range(2))
    for row, position in enumerate(positions):
        v[row, :, position + 1 :] = 30.0
    return q, k, v, np.array(positions, np.int32), window


def slow_attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, positions: np.ndarray, window: int, *, empty: bool = True,
    far: bool = True, least: int = 0, scale: float = 0.5, turn: bool = True, spread: bool = False,
) -> np.ndarray:  # fmt: skip
    """`cached_attention`, a head and a row at a time, in float64. The options are what goes wrong."""
    (rows, heads, _, size), slots = q.shape, k.shape[2]
    group = heads // k.shape[1]
    out = np.zeros(q.shape)
    for row in range(rows):
        age = positions[row] - np.arange(slots)
        age = age % slots if turn else age
        seen = (age >= least) & ((age <= positions[row]) | (not empty)) & ((age <= window) | (not far))
        for head in range(heads):
            source = head % k.shape[1] if spread else head // group
            scores = np.where(seen, k[row, source].astype(float) @ q[row, head, 0] / size**scale, -1e30)
            weights = np.where(seen, np.exp(scores - scores.max()), 0)
            out[row, head, 0] = weights / max(weights.sum(), 1e-30) @ v[row, source]
    return out.astype(np.float32)


def _wrong_attention(**how: object) -> Callable:
    return lambda q, k, v, positions, window: slow_attention(q, k, v, positions, window, **how)


def _seen_shown() -> str:
    lines = ["A ring of 5 slots, window 3. Which slots are read (x)?"]
    for position in (0, 2, 4, 5, 8):
        age = (position - np.arange(5)) % 5
        marks = "".join("x" if a <= min(position, 3) else "." for a in age)
        lines.append(f"position {position}: age of each slot {age.tolist()}  {marks}")
    return "\n".join(lines)


# ---- a step of the model

TOY = GPTConfig(
    sequence_len=256, vocab_size=40, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, window_pattern="SL"
)  # layer 0 sees 128 tokens back


@cache
def toy_params(seed: int = 3) -> dict[str, np.ndarray]:
    """Weights that are all different from zero, so that no mistake hides behind one."""
    rng = np.random.default_rng(seed)
    shapes = gpt.param_shapes(TOY)
    return {
        name: (rng.standard_normal(shape) * (0.3 if len(shape) == 1 else 0.25)).astype(np.float32)
        for name, shape in shapes.items()
    }


# Tiny steps that run a few times: compiling takes all of the time.
QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}


@lru_cache(maxsize=4)
def compiled(fn: Callable) -> Callable:
    return jax.jit(fn, static_argnums=0, compiler_options=QUICK)


def stepped(
    fn: Callable, config: GPTConfig, params: int, token: list, cache: dict, dtype: str, alive: list | None
) -> dict:  # fmt: skip
    """Some steps of `decode`, compiled, on a cache of three rows × 136 positions with `pos` tokens of random numbers.

    Layer 0 is a ring of 131 slots, two more than its window needs. token: one row a step. Empty rows hold an old text's
    last embedding.
    """
    rng = np.random.default_rng(cache["seed"])
    start = kv_cache.init_cache(config, 3, 136, dtype, slack=2)
    draw = lambda x: jnp.asarray(rng.standard_normal(x.shape).astype(np.float32))  # noqa: E731
    before = now = kv_cache.KVCache(
        tuple(map(draw, start.k)), tuple(map(draw, start.v)), jnp.array(cache["pos"], jnp.int32), draw(start.prev)
    )
    logits = []
    alive = None if alive is None else jnp.array(alive)
    for column in token:
        out, now = compiled(fn)(config, toy_params(params), jnp.array(column, jnp.int32), now, alive=alive)
        logits.append(np.asarray(out if alive is None else jnp.where(alive[:, None], out, 0)))
    return {
        "logits": np.stack(logits),
        "pos": np.asarray(now.pos),
        "prev": np.asarray(now.prev),
        "k of layer 0": np.asarray(now.k[0]) - np.asarray(before.k[0]),
        "k of layer 1": np.asarray(now.k[1]) - np.asarray(before.k[1]),
        "v of layer 1": np.asarray(now.v[1]) - np.asarray(before.v[1]),
    }


def from_nothing(fn: Callable, config: GPTConfig, params: int, token: list) -> np.ndarray:
    """The logits (steps, B, V) of `decode`, compiled, from an empty cache on, one token a row and step."""
    cache, logits = kv_cache.init_cache(config, len(token[0]), 136, slack=2), []
    for column in token:
        out, cache = compiled(fn)(config, toy_params(params), jnp.array(column, jnp.int32), cache, alive=None)
        logits.append(np.asarray(out))
    return np.stack(logits)


def whole_text(config: GPTConfig, params: int, token: list) -> np.ndarray:
    """The same by the textbook: whole texts through the model, no cache."""
    return np.asarray(compiled(gpt.apply)(config, toy_params(params), jnp.array(token, jnp.int32).T)).swapaxes(0, 1)


def as_the_whole(out: np.ndarray, config: GPTConfig, params: int, token: list) -> str:
    return "the logits are not those of the whole text" if _apart(out, whole_text(config, params, token)) else ""


def some_text(rng: np.random.Generator, steps: int = 5) -> tuple:
    """Arguments of `from_nothing`."""
    return TOY, 3, some_tokens(rng, steps)


def some_steps(rng: np.random.Generator, pos: list[int], alive: list[bool] | None = None, steps: int = 2) -> tuple:
    """Arguments of `stepped`."""
    return TOY, 3, some_tokens(rng, steps), {"pos": pos, "seed": int(rng.integers(1000))}, "float32", alive


def some_tokens(rng: np.random.Generator, steps: int, rows: int = 3) -> list[list[int]]:
    return rng.integers(0, TOY.vocab_size, (steps, rows)).tolist()


def _apart(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and bool(np.abs(a - b).max() > 1e-4 * max(np.abs(b).max(), 1e-3))


def _step(name: str) -> Callable:
    """Whether the part `name` of what `stepped` gives is wrong."""

    def seen(got: object, want: object, *_: object) -> bool:
        return isinstance(got, dict) and isinstance(want, dict) and _apart(got[name], want[name])

    return seen


def _dead_moved(
    got: object, want: object, config: object, params: int, token: list, cache: dict, *rest: object
) -> bool:
    alive = rest[-1]
    dead = [i for i in range(3) if alive and not alive[i]]
    return any(_apart(got[name][dead], want[name][dead]) for name in ("pos", "prev", "k of layer 0") if dead)


def _only_rows(which: Callable) -> Callable:
    """Only the logits of rows with `which(pos)` are wrong."""

    def seen(got: object, want: object, config: object, params: int, token: list, cache: dict, *_: object) -> bool:
        wrong = np.abs(got["logits"] - want["logits"]).max(axis=(0, 2)) > 1e-4
        return bool(wrong.any()) and all(which(p) for p, w in zip(cache["pos"], wrong, strict=True) if w)

    return seen


def _step_shown() -> str:
    out = from_nothing(gpt.decode, TOY, 3, [[5], [9], [2]])[:, 0, :4]
    whole = whole_text(TOY, 3, [[5], [9], [2]])[:, 0, :4]
    lines = ["Text 5 9 2; the first four logits after each token"]
    for a, b in zip(out, whole, strict=True):
        lines.append(f"a step each {np.round(a, 3).tolist()}   the whole text {np.round(b, 3).tolist()}")
    return "\n".join(lines)


# ---- the floor of a step


def floor_of(
    weight_bytes: float, cache_bytes: float, flops: float, rows: int, bandwidth: float, peak: float
) -> float:  # fmt: skip
    """`decode_floor`. Also its fallback."""
    seconds = [(weight_bytes + rows * cache_bytes) / bandwidth, rows * flops / peak]
    return max(seconds)


def _floors_shown() -> str:
    lines = ["weights 1 GB, a cache of 0.1 GB and 1 GFLOP a row, 1 TB/s, 100 TFLOP/s"]
    for rows in (1, 10, 100):
        lines.append(f"{rows:>3} rows: {1e3 * floor_of(1e9, 1e8, 1e9, rows, 1e12, 1e14):.2f} ms")
    return "\n".join(lines)


def some_machine(rng: np.random.Generator) -> tuple:
    """Now bytes bind, now arithmetic."""
    return (
        float(rng.uniform(1e8, 1e9)), float(rng.uniform(0, 1e5)), float(rng.uniform(1e8, 1e9)),
        int(rng.integers(2, 900)), float(rng.uniform(0.5e12, 3e12)), float(rng.uniform(1e14, 9e14)),
    )  # fmt: skip


# ---- sampling


def shares(
    logits: np.ndarray, temperature: float, top_k: int, top_p: float, vocab: int, *, wrong: str = ""
) -> np.ndarray:
    """`probabilities`, one id after the other. Also its fallback. `wrong` names a mistake."""
    real = [float(x) for x in (logits if wrong == "padding" else logits[:vocab])]
    order = sorted(range(len(real)), key=lambda i: -real[i])
    result = np.zeros(len(logits))
    if temperature == 0:
        result[order[0]] = 1.0
        return result
    heat = 1 / temperature if wrong == "temperature" else temperature
    weights = {i: math.exp((real[i] - real[order[0]]) / heat) for i in order}
    whole = math.fsum(weights.values())
    kept = order[: top_k or None]
    total = whole if wrong == "order" else math.fsum(weights[i] for i in kept)
    reached, chosen = 0.0, []
    for i in kept:
        if wrong == "short" and (reached + weights[i] / total >= top_p and top_p < 1):
            break
        chosen.append(i)
        reached += weights[i] / total
        if top_p < 1 and reached >= top_p:
            break
    total = whole if wrong == "sum" else math.fsum(weights[i] for i in chosen)
    for i in chosen:
        result[i] = weights[i] / total
    return result


def some_logits(rng: np.random.Generator, temperature: float, top_k: int, top_p: float, vocab: int = 14) -> tuple:
    """Two ids of padding behind `vocab`, the second with the largest logit of all."""
    logits = rng.normal(0, 2, vocab + 2).astype(np.float32)
    logits[-1] = logits.max() + 1
    return logits, temperature, top_k, top_p, vocab


def _wrong_shares(name: str) -> Callable:
    return lambda logits, *rest: shares(logits, *rest, wrong=name)


def _shares_shown() -> str:
    logits = np.log(np.array([8.0, 4, 2, 1, 1])).astype(np.float32)
    lines = ["logits log 8, log 4, log 2, log 1, log 1; all five are real tokens"]
    for temperature, top_k, top_p in ((1.0, 0, 1.0), (0.5, 0, 1.0), (1.0, 2, 1.0), (1.0, 0, 0.7), (0, 0, 1.0)):
        out = np.round(shares(logits, temperature, top_k, top_p, 5), 3).tolist()
        lines.append(f"temperature {temperature}, top_k {top_k}, top_p {top_p}: {out}")
    return "\n".join(lines)


# ---- tools


def walked(fn: Callable, state: tuple, token: list[int], start: int, end: int) -> list[tuple]:
    """`tool_step` over a whole answer: what each token changes, as (inside, expression, closed call)."""
    state, seen = decoding.ToolState(*state), []
    for one in token:
        state, call = fn(state, one, start, end)
        seen.append((bool(state.inside), list(state.expression), list(call)))
    return seen


NEW = (False, ())


def some_answer(rng: np.random.Generator) -> tuple:
    """Forty tokens 3 … 9, many of them start (7) and end (8)."""
    return NEW, rng.choice([3, 4, 5, 6, 7, 8, 9, 7, 8], 40).tolist(), 7, 8


def decided(tokens: list[int], start: int, end: int) -> list[tuple]:
    return walked(decoding.tool_step, NEW, tokens, start, end)


def _calls(out: object) -> list[list[int]]:
    return [call for _, _, call in out]


def _walk(test: Callable) -> Callable:
    def seen(got: object, want: object, state: tuple, tokens: list[int], start: int, end: int) -> bool:
        return isinstance(got, list) and bool(test(got, want, tokens, start, end))

    return seen


def _walk_shown() -> str:
    tokens = [3, 7, 4, 5, 8, 6]
    rows = zip(tokens, walked(decoding.tool_step, NEW, tokens, 7, 8), strict=True)
    return "start is 7, end is 8\n" + "\n".join(
        f"token {token}: inside {inside!s:<5} expression {expression}  closed {call}"
        for token, (inside, expression, call) in rows
    )


# ---- the calculator


def parsed(parser: type, tokens: list[tuple[str, str]]) -> object:
    """What a parser makes of tokens: a number or a text, or "no result"."""
    try:
        return parser(list(tokens)).whole()
    except (calculator.NoResult, ZeroDivisionError):
        return "no result"


def lexed(text: str) -> tuple[list[tuple[str, str]]]:
    return (calculator.tokens_of(text),)


def some_sum(rng: np.random.Generator) -> tuple[list[tuple[str, str]]]:
    """A random expression with brackets, signs and all operators."""

    def expression(depth: int) -> str:
        if depth == 0:
            return str(rng.choice(["7", "12", "0.5", "3", "40"]))
        sign, bracket = rng.choice(["", "", "-", "--"]), rng.random() < 0.5
        text = expression(depth - 1) + str(rng.choice(["+", "-", "*", "/", "//"])) + expression(depth - 1)
        return f"{sign}({text})" if bracket else sign + text

    return lexed(expression(3))


class ByPython:
    """What Python says to the same tokens: an independent reference, only for sums that are made here."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.text = "".join(text for _, text in tokens)

    def whole(self) -> object:
        return eval(self.text, {"__builtins__": {}})


def _spelling(tokens: list[tuple[str, str]]) -> str:
    return "".join(text for _, text in tokens)


def _on(test: Callable) -> Callable:
    """A sign that looks at the text which was parsed."""
    return lambda got, want, tokens: bool(test(_spelling(tokens), got, want))


def _parsed_shown() -> str:
    texts = ("12/60", "7//2", "2-3-4", "2+3*4", "(2+3)*4", "2*-3", "--5", "2**3", "(1+2", "'strawberry'.count('r')")
    return "\n".join(f"{text:<24} {parsed(calculator.Parser, lexed(text)[0])}" for text in texts)


DEEP = calculator.MAX_DEPTH

EXERCISES = [
    Exercise(
        "inference.held",
        cases=[
            example(
                "a ring that has not turned", (np.array([3], np.int32), 5), np.array([[0, 1, 2, -2, -1]], np.int32)
            ),
            example("exactly full", (np.array([5], np.int32), 5), np.array([[0, 1, 2, 3, 4]], np.int32)),
            example("two more", (np.array([7], np.int32), 5), np.array([[5, 6, 2, 3, 4]], np.int32)),
            reference("four rows", lambda rng: (rng.integers(0, 40, 4).astype(np.int32), 7)),
        ],
        causes=[
            suspect(
                "the token of position `pos` is not there yet: the newest stored one is pos - 1",
                lambda pos, count: _held(pos, count, newest=0),
            ),
            suspect(
                "slot s holds position s only until the ring has turned; then newer positions have overwritten it",
                lambda pos, count: np.tile(np.arange(count), (len(pos), 1)),
            ),
            suspect(
                "the distance goes back from the newest: newest - slot, not slot - newest",
                lambda pos, count: _held(pos, count, turn=-1),
            ),
            suspect(
                "a slot that holds nothing must give a negative number: 0 is a position",
                lambda pos, count: np.maximum(_held(pos, count), 0),
            ),
        ],
        hints=[
            "What is the newest position that is stored? How many positions older is what slot s holds?",
            "The newest is pos - 1. The age of slot s is (newest - s) % count: the remainder is never negative. "
            "Take the "
            "age from the newest. `pos[:, None]` makes rows, `jnp.arange(count)` slots.",
            _held_shown,
        ],
        call=lambda fn, pos, count: fn(jnp.asarray(pos), count),
    ),
    Exercise(
        "inference.store_token",
        cases=[
            reference("rows at different positions", lambda rng: some_slots(rng, [0, 3, 4], 0, None)),
            reference("a ring that has turned", lambda rng: some_slots(rng, [5, 8, 6], 0, None)),
            reference("the layer with all positions", lambda rng: some_slots(rng, [5, 0, 8], 1, None)),
            reference("one row has ended", lambda rng: some_slots(rng, [2, 6, 4], 0, [True, False, True])),
            reference("one row is full", lambda rng: some_slots(rng, [9, 1, 3], 1, None)),
        ],
        causes=[
            sign("a row that is not alive must keep its slots as they are", _touched(lambda pos, alive: ~alive)),
            sign(
                "a row of `cache.length` tokens is full: whatever you write there silently overwrites a token that the "
                "model still reads",
                _touched(lambda pos, alive: pos >= 9),
            ),
            sign("every row is written at the position of the first; each has its own", _same_slot),
            sign("a slot that should be written was not: in a ring of R slots position p goes to p % R", _unwritten),
        ],
        hints=[
            "Where does position p go in a ring of R slots? Which rows must be left alone?",
            "slot = pos % R. For rows that must not be written give them a slot that is not there, such as R, and say "
            '`slots.at[rows, heads, slot[:, None]].set(new[:, :, 0], mode="drop")`, with rows (B, 1) and heads (K,): '
            "JAX then drops what lies outside. "
            "`with_layer(cache, layer, write, k, v)` calls `write(slots, new)` for keys and values.",
            _stored_shown,
        ],
        call=stored,
    ),
    Exercise(
        "inference.cached_attention",
        cases=[
            reference(
                "a slot for every position", lambda rng: some_cache(rng, [6, 2, 7], 8, 8), against=slow_attention
            ),
            reference("a short window", lambda rng: some_cache(rng, [6, 2, 7], 8, 3), against=slow_attention),
            reference("a ring", lambda rng: some_cache(rng, [11, 7, 23], 8, 6), against=slow_attention),
            reference("the first token", lambda rng: some_cache(rng, [0, 0, 1], 8, 4), against=slow_attention),
            reference("as many key as query heads", lambda rng: some_cache(rng, [4, 7, 1], 8, 8, heads=2)),
        ],
        causes=[
            suspect(
                "slots that hold nothing yet are read: their age is larger than the position",
                _wrong_attention(empty=False),
            ),
            suspect("positions further back than `window` are read", _wrong_attention(far=False)),
            suspect("the query does not see its own key: age 0 is inside of every window", _wrong_attention(least=1)),
            suspect("scores must be divided by the root of the head size", _wrong_attention(scale=0.0)),
            suspect(
                "this takes slot s for position s; in a ring that has turned it holds a newer one",
                _wrong_attention(turn=False),
            ),
            suspect(
                "query head h reads key/value head h // (H / K): neighbours share one", _wrong_attention(spread=True)
            ),
            sign(
                "the oldest key of the window is missing: a window w shows w keys before the query and its own",
                lambda got, want, q, k, v, positions, window: bool(
                    np.allclose(np.asarray(got), slow_attention(q, k, v, positions, window - 1), atol=1e-4)
                ),
            ),
        ],
        hints=[
            "How old is what slot s holds, seen from the query's position p? Two limits on that age say what is read.",
            "age = (p - s) % R. It is read when age is at most p (there is something) and at most `window`. Then as in "
            "chapter 03: scores / √D, a large negative number where the mask is false, softmax, weighted values. "
            "Reshape q "
            "to (B, K, H/K, D) and let `jnp.einsum` do both products.",
            _seen_shown,
        ],
        call=attended,
    ),
    Exercise(
        "inference.decode",
        cases=[
            prop("five tokens from nothing, against the whole text", some_text, as_the_whole, call=from_nothing),
            reference("rows of different lengths", lambda rng: some_steps(rng, [7, 30, 64])),
            reference("a row that begins anew", lambda rng: some_steps(rng, [0, 9, 20])),
            reference("a row that has ended", lambda rng: some_steps(rng, [7, 30, 64], [True, False, True])),
            reference("beyond the window", lambda rng: some_steps(rng, [132, 130, 5])),
        ],
        causes=[
            sign("a row that is not alive must stay as it is: its keys, its position, its `prev`", _dead_moved),
            sign("each step makes a row one token longer: pos + 1", _step("pos")),
            sign(
                "`prev` of the new cache is the embedding of this token (before smear), which the next step smears "
                "with",
                _step("prev"),
            ),
            sign(
                "a row without a text has nothing to smear with: where pos is 0, `prev` counts as zero",
                _only_rows(lambda pos: pos == 0),
            ),
            sign(
                "the keys that are stored differ: the rotation is that of the row's own position, table[pos]",
                _step("k of layer 0"),
            ),
            sign("each layer has its own window: config.windows[layer]", _only_rows(lambda pos: pos >= 128)),
            sign("the token must see its own key and value: store first, then attend to the cache", _step("logits")),
        ],
        hints=[
            "One position: look up the token, smear it with the row's `prev`, run the trunk with an `attend` "
            "that stores and "
            "reads the cache, and give the logits and the cache of the next step.",
            "`attend` needs `nonlocal cache`: store_token first, then cached_attention on cache.k[layer][:, :, "
            ":span] and "
            "the values. (cos, sin) are the tables' rows at pos, with two axes for heads and time. New cache: "
            "pos + 1 (or + "
            "alive), prev = the embedding before smear; rows that are not alive keep theirs.",
            _step_shown,
        ],
        call=stepped,
    ),
    Exercise(
        "inference.decode_floor",
        cases=[
            example("one row: the weights bind", (1e9, 1e8, 1e9, 1, 1e12, 1e14), 1.1e-3),
            example("many rows: the caches bind", (1e9, 1e8, 1e9, 50, 1e12, 1e14), 6e-3),
            example("short caches: arithmetic binds", (1e9, 1e4, 1e9, 400, 1e12, 1e14), 4e-3),
            reference("any machine", some_machine, against=floor_of),
        ],
        causes=[
            suspect(
                "bytes and arithmetic go on at the same time: the longer one counts, not the sum",
                lambda w, c, f, rows, b, p: (w + rows * c) / b + rows * f / p,
            ),
            suspect(
                "the weights are read once a step, whatever the number of rows",
                lambda w, c, f, rows, b, p: max(rows * (w + c) / b, rows * f / p),
            ),
            suspect("each row reads a cache of its own", lambda w, c, f, rows, b, p: max((w + c) / b, rows * f / p)),
            suspect("each row needs its own arithmetic", lambda w, c, f, rows, b, p: max((w + rows * c) / b, f / p)),
        ],
        hints=[
            "Two times: for moving what must be read, and for computing. Both go on side by side.",
            "Bytes: the weights once, a cache for every row; divide by the bandwidth. FLOPs: rows times one "
            "row's; divide by "
            "the peak. The step takes at least the larger time.",
            _floors_shown,
        ],
        fallback=floor_of,
    ),
    Exercise(
        "inference.probabilities",
        cases=[
            reference("temperature 1, everything", lambda rng: some_logits(rng, 1.0, 0, 1.0), against=shares),
            reference("a cool one", lambda rng: some_logits(rng, 0.5, 0, 1.0), against=shares),
            reference("top_k 3", lambda rng: some_logits(rng, 0.8, 3, 1.0), against=shares),
            reference("top_p 0.8", lambda rng: some_logits(rng, 1.0, 0, 0.8), against=shares),
            reference("top_k 4, then top_p 0.7", lambda rng: some_logits(rng, 1.5, 4, 0.7), against=shares),
            example(
                "temperature 0, a tie", (np.array([1, 3, 3, 9], np.float32), 0.0, 0, 1.0, 3), np.array([0, 1.0, 0, 0])
            ),
        ],
        causes=[
            sign(
                "temperature 0 takes the first of the largest real logits, and nothing is divided",
                lambda got, want, logits, temperature, *_: temperature == 0,
            ),
            suspect(
                "ids from `vocab` up are padding: no text belongs to them, so their probability is 0",
                _wrong_shares("padding"),
            ),
            suspect(
                "logits are *divided* by the temperature: below 1 the likely ones gain", _wrong_shares("temperature")
            ),
            suspect("the token that makes the sum reach `top_p` belongs to it", _wrong_shares("short")),
            suspect("top_p counts shares of what top_k has left, so top_k comes first", _wrong_shares("order")),
            suspect("what is left must sum to 1 again", _wrong_shares("sum")),
            sign(
                "the probabilities must sum to 1",
                lambda got, want, *_: isinstance(got, np.ndarray) and abs(float(np.sum(got)) - 1) > 1e-6,
            ),
        ],
        hints=[
            "Padding first, then temperature 0, then top_k, the softmax, and top_p on its result. Work in float64.",
            '`order = np.argsort(-logits, kind="stable")` lists ids from the likeliest on. top_k: everything '
            "behind the "
            "first k of `order` gets -inf. top_p: a token goes when the shares *before* it already sum to top_p "
            "(`np.cumsum(p[order]) - p[order]`). Divide by the sum again.",
            _shares_shown,
        ],
        fallback=shares,
    ),
    Exercise(
        "inference.tool_step",
        cases=[
            example(
                "one call",
                (NEW, [3, 7, 4, 5, 8, 6], 7, 8),
                [
                    (False, [], []),
                    (True, [], []),
                    (True, [4], []),
                    (True, [4, 5], []),
                    (False, [], [4, 5]),
                    (False, [], []),
                ],
            ),
            example("an end without a start", (NEW, [4, 8, 5], 7, 8), [(False, [], [])] * 3),
            example("a call without anything in it", (NEW, [7, 8], 7, 8), [(True, [], []), (False, [], [])]),
            reference("any order of tokens", some_answer),
        ],
        causes=[
            sign(
                "text outside of a call belongs to no expression",
                _walk(
                    lambda got, want, tokens, start, end: (
                        any(
                            g[0] and not w[0] and t not in (start, end)
                            for t, g, w in zip(tokens, got, decided(tokens, start, end), strict=True)
                        )
                        and not any(g[0] and t == end for t, g in zip(tokens, got, strict=True))
                    )
                ),
            ),
            sign(
                "`start` inside of a call opens it anew: what stood there is forgotten",
                _walk(
                    lambda got, want, tokens, start, end: any(
                        e and t == start for t, (_, e, _) in zip(tokens, got, strict=True)
                    )
                ),
            ),
            sign(
                "`end` leaves the call: the next token is plain text again",
                _walk(
                    lambda got, want, tokens, start, end: any(
                        i and t == end for t, (i, _, _) in zip(tokens, got, strict=True)
                    )
                ),
            ),
            sign(
                "the expression's tokens are in the wrong order",
                _walk(
                    lambda got, want, tokens, start, end: (
                        _calls(got) != _calls(want)
                        and [sorted(c) for c in _calls(got)] == [sorted(c) for c in _calls(want)]
                    )
                ),
            ),
            sign(
                "`end` closes a call: that is when its expression is handed over",
                _walk(lambda got, want, tokens, start, end: _calls(got) != _calls(want)),
            ),
        ],
        hints=[
            "Three kinds of tokens: start, end, all others. What does each do to `inside` and `expression`?",
            "start: a fresh state, inside, nothing in it. end: a fresh state, outside, and the old expression as "
            "a list is "
            "returned. Others: added to the expression when inside, else nothing changes.",
            _walk_shown,
        ],
        call=walked,
    ),
    Exercise(
        "inference.parser",
        cases=[
            example("a quotient", lambda: lexed("12/60"), 0.2),
            example("whole numbers stay whole", lambda: lexed("1,000*2"), 2000),
            example("two slashes", lambda: lexed("7//2"), 3),
            example("left to right", lambda: lexed("100/10/2"), 5.0),
            example("brackets", lambda: lexed("(2+3)*4"), 20),
            example("signs", lambda: lexed("2*--5-(-3)"), 13),
            example("letters", lambda: lexed("'strawberry'.count('r')"), 3),
            example("two stars are no operator", lambda: lexed("2**3"), "no result"),
            example("a bracket that stays open", lambda: lexed("(1+2"), "no result"),
            example("brackets as deep as they may be", lambda: lexed("(" * DEEP + "7" + ")" * DEEP), 7),
            example("one bracket deeper", lambda: lexed("(" * (DEEP + 1) + "7" + ")" * (DEEP + 1)), "no result"),
            reference("any sum", some_sum, against=ByPython),
        ],
        causes=[
            sign(
                "this is more than the accepted language: was the text run as code? Then a model can run code, too",
                _on(lambda text, got, want: "**" in text and got != "no result"),
            ),
            sign(
                "brackets nested deeper than MAX_DEPTH have no result: the depth of the recursion must have a bound",
                _on(lambda text, got, want: text.count("(") > DEEP and "+" not in text and want == "no result"),
            ),
            sign(
                "the depth goes down again behind every bracket: this is how deep, not how many",
                _on(lambda text, got, want: got == "no result" and text.count("(") > 2),
            ),
            sign("a bracket that is opened must be closed", _on(lambda text, got, want: text == "(1+2")),
            sign(
                "a text is no number: `numbers(left, right)` refuses it",
                _on(lambda text, got, want: "'" in text and want == "no result"),
            ),
            sign("`//` is an operator of its own", _on(lambda text, got, want: text == "7//2")),
            sign("operators of one rank go from left to right", _on(lambda text, got, want: text == "100/10/2")),
            sign("two minus signs are a plus", _on(lambda text, got, want: "--" in text)),
            sign(
                "a number without a point is an int",
                _on(lambda text, got, want: isinstance(want, int) and isinstance(got, float) and got == want),
            ),
            sign("007 is no number in Python, and none here", _on(lambda text, got, want: text.startswith("00"))),
        ],
        hints=[
            "Each method reads one rank of the language and calls the next one for its parts: sum → product → "
            "signed → counted "
            "→ atom, and a bracket begins again with sum. `sum` is written; `product` looks just like it.",
            "signed: collect signs while `take` finds one, read `counted()`, and turn the sign if the number of "
            "minuses is odd. "
            "atom: a bracket, or a text without its quotes, or a number. bracketed: depth up and checked, "
            "`sum()`, depth down, "
            "then `take(')')` or NoResult.",
            _parsed_shown,
        ],
        call=parsed,
    ),
]

QUIZZES = [
    Quiz(
        "inference.q_end",
        "A cache has 256 slots. Token 257 is written with jax.lax.dynamic_update_slice. What happens?",
        [
            Option("An IndexError", why="In NumPy. A compiled program has nowhere to raise it."),
            Option(
                "The write is dropped",
                why="That is what `.at[…].set` does. dynamic_update_slice moves the start so that the piece fits.",
            ),
            Option(
                "It overwrites token 256, without a word",
                right=True,
                why="The start index is clamped to the last place where the piece fits. From then on the model reads "
                "one key that belongs to another position.",
            ),
        ],
    ),
    Quiz(
        "inference.q_prefill",
        "Why is a prompt run in one go, when decode could take it token by token?",
        [
            Option(
                "The results would differ",
                why="They are the same up to rounding: your decode was checked against the whole text.",
            ),
            Option(
                "A step reads all weights, for one token or for many",
                right=True,
                why="In one go they are read once for the whole prompt; token by token, once for each.",
            ),
            Option("The cache can be filled only once", why="Each step of decode fills one more slot."),
        ],
    ),
    Quiz(
        "inference.q_rows",
        "Caches are short, and 8 rows take as long a step as 1. Why not 10,000 rows, then?",
        [
            Option("The weights would have to be read 10,000 times", why="Once a step, for all rows."),
            Option(
                "From some number on arithmetic binds: then twice the rows take twice as long",
                right=True,
                why="And each row needs memory for its cache. Beyond the crossing nobody gains, and everybody waits "
                "longer for each token.",
            ),
            Option("Rows would disturb one another", why="No row reads another one's cache."),
        ],
    ),
    Quiz(
        "inference.q_eval",
        "A calculator does eval(text) with empty built-ins and a timer of three seconds. What is wrong?",
        [
            Option(
                "Nothing: without built-ins no code can do harm",
                why="Every object knows its class, and from there a way leads to all classes that are loaded.",
            ),
            Option("Only that 3 seconds are too long", why="A timer does not stop what happens within the first one."),
            Option(
                "What it accepts is all of Python, minus what somebody thought of",
                right=True,
                why="A parser accepts a language that one can write down, and nothing else; its time and depth have "
                "bounds by construction, in any thread.",
            ),
        ],
    ),
    Quiz(
        "inference.q_smear",
        "The second turn was run behind the first one's cache, and its first token was not smeared. Who notices?",
        [
            Option("The shape check", why="All shapes are right."),
            Option("A NaN guard", why="All numbers are finite, and plausible."),
            Option(
                "A test that compares with the whole text in one go",
                right=True,
                why="Only this one. Every way to cut the same work into parts must give the same logits: write that "
                "test first.",
            ),
        ],
    ),
]

PREDICTIONS = [
    Prediction(
        "inference.p_textbook",
        "A prompt of 128 tokens, an answer of 128. How many tokens run through the model, "
        "when every step runs the whole text?",
        unit="tokens",
    ),
    Prediction(
        "inference.p_rows",
        "One row of d24 with a full context: at most 2,100 tokens a second on an H100. How many "
        "can 64 such rows get, all together?",
        unit="tokens/s",
    ),
    Prediction(
        "inference.p_turns",
        "A chat of 20 exchanges: 30 tokens a question, 30 an answer. How many tokens are prefilled in all, when "
        "each turn runs the whole history anew?",
        unit="tokens",
    ),
]
