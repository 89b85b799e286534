"""Continuous batching: every answer is the one that its request gets alone, whatever happens to the others."""

from __future__ import annotations

import random
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vectors

from nanochat_lib import batching, gpt, rows
from nanochat_lib.batching import BatchingEngine, Piece, Request
from nanochat_lib.decoding import CHUNK, COMPILES
from nanochat_lib.engine import Engine
from nanochat_lib.errors import UserError
from nanochat_lib.kv_cache import row_bytes
from nanochat_lib.sampling import row_keys, sample
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.tokenizer import Tokenizer

TOKENIZER = Tokenizer([bytes([97, 97 + i]) for i in range(26)] + [bytes([98, 97 + i]) for i in range(9)])  # 300


@dataclass(frozen=True)
class Windowed(GPTConfig):
    """Attention windows far below nanochat's least, 128, so that short texts go around the rings many times."""

    @property
    def windows(self) -> tuple[int, ...]:
        return (5, 9, self.sequence_len)


CONFIG = Windowed(sequence_len=96, vocab_size=300, n_layer=3, n_head=2, n_kv_head=1, n_embd=32)
PROMPTS = random.Random(7)


class Inbox:
    """Collects the pieces of one request."""

    def __init__(self) -> None:
        self.pieces: list[Piece] = []
        self.over, self.begun = threading.Event(), threading.Event()

    def __call__(self, piece: Piece) -> None:
        assert not self.over.is_set(), "a piece after the last one"
        self.pieces.append(piece)
        if piece.tokens:
            self.begun.set()
        if piece.finish is not None:
            self.over.set()

    def wait(self) -> Inbox:
        assert self.over.wait(60), "the answer never ended"
        return self

    tokens = property(lambda self: [t for piece in self.pieces for t in piece.tokens])
    mask = property(lambda self: [m for piece in self.pieces for m in piece.mask])
    text = property(lambda self: "".join(piece.text for piece in self.pieces))
    finish = property(lambda self: self.pieces[-1].finish)


def ask(engine: BatchingEngine, *requests: Request) -> list[Inbox]:
    boxes = [Inbox() for _ in requests]
    for request, box in zip(requests, boxes, strict=True):
        engine.submit(request, box)
    return [box.wait() for box in boxes]


@pytest.fixture(scope="module")
def solo() -> Engine:
    params = {name: jnp.asarray(vectors.fill(name, shape)) for name, shape in gpt.param_shapes(CONFIG).items()}
    return Engine(CONFIG, params | {"lm_head.weight": params["lm_head.weight"].at[291:].set(0)}, TOKENIZER)


@pytest.fixture(scope="module")
def shared(solo: Engine) -> Iterator[BatchingEngine]:
    with BatchingEngine(solo, rows=3, slack=3) as engine:
        yield engine


def prompt(length: int) -> list[int]:
    return [PROMPTS.randrange(290) for _ in range(length)]


@lru_cache
def textbook_step():
    """The whole text through the model for one more token: (ids (1, T), length, key, step, options) -> token."""

    def step(params: gpt.Params, ids: jax.Array, length: int, key: jax.Array, step: int, *options: float) -> jax.Array:
        logits = gpt.apply(CONFIG, params, ids)[:, length - 1]
        return sample(logits, key, step, *options, False, TOKENIZER.vocab_size)[0][0]

    return jax.jit(step)


def expected(solo: Engine, request: Request) -> tuple[list[int], list[int], str]:
    """(tokens, mask, finish) of the request answered alone, without a cache and without tools."""
    ids, start = np.zeros((1, CONFIG.sequence_len), np.int32), len(request.tokens)
    ids[0, :start] = request.tokens
    key = row_keys(*(np.array([n], np.uint32) for n in (request.seed, 0, 0)))
    options = float(request.temperature), request.top_k or 0, float(request.top_p or 1)
    stop = min(CONFIG.sequence_len, start + (CONFIG.sequence_len if request.max_tokens is None else request.max_tokens))
    for length in range(start, stop):
        token = int(textbook_step()(solo.params, ids, length, key, length - start, *options))
        if token in solo.setup.ends:
            return ids[0, start:length].tolist(), [1] * (length - start), "end"
        ids[0, length] = token
    return ids[0, start:stop].tolist(), [1] * (stop - start), "length"


KINDS = [
    {"temperature": 0},
    {"temperature": 0.8},
    {"temperature": 1.3, "top_k": 7},
    {"temperature": 1.0, "top_p": 0.6},
    {"temperature": 0.7, "top_k": 40, "top_p": 0.9},
]


def test_answers_do_not_depend_on_company(solo: Engine, shared: BatchingEngine) -> None:
    """Twenty requests of all kinds in three rows; prompts of one token up to the whole context. Few programs do it."""
    before = COMPILES.copy()
    lengths = [1, 2, 95, 94, 17, 16, 30, 5, 64, 65, 50, 3, 1, 80, 9, 10, 11, 40, 33, 18]
    requests = [
        Request(prompt(length), PROMPTS.choice([None, 1, 12, 30]), seed=place, **KINDS[place % len(KINDS)])
        for place, length in enumerate(lengths)
    ]
    boxes = ask(shared, *requests)
    for request, box in zip(requests, boxes, strict=True):
        assert (box.tokens, box.mask, box.finish) == expected(solo, request), request
        assert box.text == TOKENIZER.decode(box.tokens)
    assert max(len(box.tokens) + len(r.tokens) for r, box in zip(requests, boxes, strict=True)) == 96, "context full"
    again = ask(shared, *reversed(requests))  # other company, other rows, other order
    assert [box.tokens for box in again[::-1]] == [box.tokens for box in boxes]
    assert 0 < (COMPILES - before)["decode"] <= 2
    assert 0 < (COMPILES - before)["fill"] <= 2 * len(rows.FILLS)
    stats = shared.stats()
    assert stats["busy"] == stats["waiting"] == 0 and stats["rows"] == 3
    assert stats["tokens_generated"] >= 2 * sum(len(box.tokens) for box in boxes)


def test_a_conversation_is_only_run_from_where_it_goes_on(solo: Engine, shared: BatchingEngine) -> None:
    text, reused = prompt(20), []
    for _turn in range(4):
        before = shared.stats()
        (box,) = ask(shared, Request(text, 9, temperature=0))
        assert box.tokens == expected(solo, Request(text, 9, temperature=0))[0]
        after = shared.stats()
        reused.append(after["tokens_reused"] - before["tokens_reused"])
        new = len(text) - 1 - reused[-1]
        assert after["tokens_prefilled"] - before["tokens_prefilled"] == new
        text = text + box.tokens + prompt(5)
    assert reused == [0, 28, 42, 56], "prompt and answer, but for the answer's last token, are there already"


def test_a_row_goes_back_as_far_as_its_rings_allow(solo: Engine, shared: BatchingEngine) -> None:
    """Rings of windows 5 and 9 with 3 spare slots: four tokens can be taken back once the larger went around."""
    for back in range(8):
        text = prompt(40)
        (box,) = ask(shared, Request(text, 20, temperature=0))
        before = shared.stats()["tokens_reused"]
        other = (text + box.tokens)[: 59 - back] + prompt(3)
        (again,) = ask(shared, Request(other, 10, temperature=0))
        assert again.tokens == expected(solo, Request(other, 10, temperature=0))[0]
        assert (shared.stats()["tokens_reused"] - before > 0) == (back <= 4)
    text = prompt(9)  # nothing is overwritten yet: all the way back
    ask(shared, Request(text, 1, temperature=0))
    for length in (8, 7, 8):
        other = text[:length] + prompt(12 - length)
        (again,) = ask(shared, Request(other, 1, temperature=0))
        assert again.tokens == expected(solo, Request(other, 1, temperature=0))[0]


def test_a_row_that_was_set_back_and_never_run_is_continued_rightly(solo: Engine) -> None:
    """The cache's own note of the last token is then that of a token taken back."""
    store, text = rows.Rows(solo.setup, 3, CONFIG.sequence_len, 3), prompt(30)
    row, _ = store.claim(text, range(3))
    store.fill(solo.params, row, text[:-1])
    other = [*text[:27], 5]
    assert store.claim(other, range(3)) == (row, 26) and not store.rows[row].high == 26
    assert store.claim(other[:27], range(3)) == (row, 25), "one token more has to be run"
    store.fill(solo.params, row, other[25:26])
    assert store.claim(other[:27], range(3)) == (row, 26)
    assert store.rows[row].known == other[:26]


def test_the_longest_unused_row_is_given_away(solo: Engine) -> None:
    with BatchingEngine(solo, rows=3, slack=3) as engine:
        first, second, third, fourth = (prompt(20) for _ in range(4))
        for text in (first, second, third, first, third, fourth):  # second's row is the one to go
            ask(engine, Request(text + [7], 2, temperature=0))
        before = engine.stats()["tokens_reused"]
        ask(engine, Request(first + [7, 8], 2, temperature=0))
        assert engine.stats()["tokens_reused"] - before >= 20
        before = engine.stats()["tokens_reused"]
        ask(engine, Request(second + [7, 8], 2, temperature=0))
        assert engine.stats()["tokens_reused"] == before


def test_new_weights_count_and_old_texts_do_not(solo: Engine) -> None:
    engine = Engine(CONFIG, solo.params, TOKENIZER)
    other = {name: -leaf for name, leaf in solo.params.items()}
    text = prompt(30)
    with BatchingEngine(engine, rows=3, slack=3) as batched:
        ask(batched, Request(text, 5, temperature=0))
        engine.params = other
        (box,) = ask(batched, Request(text, 5, temperature=0))
        assert box.tokens == expected(engine, Request(text, 5, temperature=0))[0]
        assert batched.stats()["tokens_reused"] == 0


def test_memory_of_a_row_is_what_the_device_holds(shared: BatchingEngine) -> None:
    leaves = jax.tree.leaves(shared.rows.caches)
    stats = shared.stats()
    assert 3 * stats["bytes_per_row"] == sum(leaf.nbytes for leaf in leaves)
    sizes = stats["bytes_per_row_by_layer"]
    position = 2 * 1 * 16 * 4  # k and v, one head of 16, float32
    assert (sizes["full"], sizes["window"]) == (96 * position, (5 + 1 + 3 + 9 + 1 + 3) * position)
    assert row_bytes(CONFIG, 96)["window"] == (6 + 10) * position


def test_a_stream_and_the_engines_own_form(solo: Engine, shared: BatchingEngine) -> None:
    text = prompt(12)
    pieces = list(shared.stream(Request(text, 6, temperature=0)))
    tokens = [t for piece in pieces for t in piece.tokens]
    assert tokens == expected(solo, Request(text, 6, temperature=0))[0] and pieces[-1].finish == "length"
    for seed in range(3):
        options = {"max_tokens": 6, "temperature": 0.7, "top_k": 40, "top_p": 0.9, "seed": seed}
        assert list(shared.generate(text, **options)) == list(solo.generate(text, **options))
    left = shared.stream(Request(text, temperature=0))
    next(left)
    left.close()  # cancels
    assert list(left) == []
    ask(shared, Request(text, 1))
    assert shared.stats()["busy"] == 0


def test_a_stream_that_is_never_begun_is_cancelled() -> None:
    with scripted(script("x" * 150)) as engine:
        dropped = engine.stream(Request([0], temperature=0))
        closed = engine.stream(Request([0], temperature=0))
        tickets = [dropped.ticket, closed.ticket]
        del dropped
        closed.close()
        assert [ticket.cancelled for ticket in tickets] == [True, True]


# A scripted model: what it says, and what goes wrong ------------------------------------------------------------------

BYTES = Tokenizer([])
BOS, END, PS, PE, OS, OE = (
    BYTES.encode_special(f"<|{name}|>")
    for name in ("bos", "assistant_end", "python_start", "python_end", "output_start", "output_end")
)
TALK = GPTConfig(sequence_len=128, vocab_size=320, n_layer=1, n_head=1, n_kv_head=1, n_embd=32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Told:
    pos: jax.Array
    k: jax.Array


class Scripted:
    """A prompt is one token, the number of its script; position decides what is said. `trouble` raises while set."""

    trouble = None

    @staticmethod
    def init_cache(_config, batch, _length, _dtype, _slack=0):
        return Told(jnp.zeros(batch, jnp.int32), jnp.zeros(batch, jnp.int32))

    @staticmethod
    def decode(config, params, token, cache, dtype, alive, span):
        del dtype, span
        told = jnp.where(cache.pos == 0, token, cache.k)
        wanted = params["script"][told, cache.pos][:, None]
        logits = jnp.where(jnp.arange(config.vocab_size) == wanted, 50.0, 0.0)
        return logits, Told(cache.pos + alive, jnp.where(alive, told, cache.k))


def script(*parts: int | str) -> list[int]:
    return [t for part in parts for t in (BYTES.encode(part) if isinstance(part, str) else [part])]


def scripted(
    *scripts: list[int], rows: int = 3, after: int = END, context: int = 128, **options: object
) -> BatchingEngine:
    table = np.full((8, context + 32), after, np.float32)
    for row, tokens in enumerate(scripts):
        table[row, : len(tokens)] = tokens
    config = replace(TALK, sequence_len=context)
    return BatchingEngine(Engine(config, {"script": jnp.asarray(table)}, BYTES, model=Scripted), rows, **options)


def test_tools_ends_and_limits() -> None:
    long = "9" * 30 + "+1"
    says = [
        script("so ", PS, "6*7", PE, "????", "!", END, "never"),
        script(PS, long, PE, "?" * 33, "done", END),
        script(PS, "1/0", PE, "hm", BOS, "never"),
        script("x" * 120),
        script(PE, "1+1", PE, "y", END),
    ]
    with scripted(*says) as engine:
        boxes = ask(engine, *(Request([row], 100, temperature=0) for row in range(5)))
        tokens = [
            script("so ", PS, "6*7", PE, OS, "42", OE, "!"),
            script(PS, long, PE, OS, "1" + "0" * 30, OE, "done"),
            script(PS, "1/0", PE, "hm"),
            script("x" * 100),
            script(PE, "1+1", PE, "y"),
        ]
        assert [box.tokens for box in boxes] == tokens
        assert [box.finish for box in boxes] == ["end", "end", "end", "length", "end"]
        assert boxes[0].mask == [1] * 7 + [1] + [0] * 4 + [1]
        assert boxes[0].text == "so <|python_start|>6*7<|python_end|><|output_start|>42<|output_end|>!"
        for limit in (0, 1, 8, 9, 11, 12, 13):  # a result is inserted whole or not at all
            (box,) = ask(engine, Request([0], limit, temperature=0))
            fits = limit >= 12
            assert box.tokens == tokens[0][: limit if fits else min(limit, 8)]
            assert box.finish == "length"


def test_stop_strings() -> None:
    with scripted(script("one two STOP three"), script("a🐕b"), script("n" * 90)) as engine:

        def until(row: int, *stop: str) -> tuple:
            (box,) = ask(engine, Request([row], 60, temperature=0, stop=stop))
            return box.text, box.finish, len(box.tokens)

        assert until(0, "STOP") == ("one two ", "stop", 8)
        assert until(0, "three!", "two") == ("one ", "stop", 4)
        assert until(0, "three!") == ("one two STOP three", "end", 18)
        assert until(1, "b") == ("a🐕", "stop", 5)
        assert until(1, "🐕") == ("a", "stop", 1)
        assert until(2, "nnnnnnn") == ("", "stop", 0)
        assert ask(engine, Request([2], 5, temperature=0))[0].text == "nnnnn", "the row is clean for the next"


def test_cancelling_frees_the_row_at_once() -> None:
    with scripted(script("x" * 126), script("yes", END), rows=1, latency=0.0) as engine:
        for _ in range(3):
            running, waiting, last = Inbox(), Inbox(), Inbox()
            ticket = engine.submit(Request([0], temperature=0), running)
            queued = engine.submit(Request([0], temperature=0), waiting)
            engine.submit(Request([1], temperature=0), last)
            assert running.begun.wait(60)
            queued.cancel()
            ticket.cancel()
            ticket.cancel()
            assert last.wait().text == "yes"
            assert (running.finish, waiting.finish, waiting.tokens) == ("cancelled", "cancelled", [])
            assert 0 < len(running.tokens) < 126


def test_turns_are_long_alone_and_short_while_another_request_waits() -> None:
    with scripted(script("x" * 3 * CHUNK, END), rows=1, context=4 * CHUNK, latency=60.0) as engine:
        real, turns, second = engine._steps, [], Inbox()

        def steps() -> int:
            queued = bool(engine.waiting)  # only this thread takes requests from there
            turns.append((queued, real()))
            return turns[-1][1]

        engine._steps = steps
        ask(engine, Request([0], temperature=0))
        assert max(turns) == (False, CHUNK)
        turns.clear()
        first = Inbox()
        engine.submit(Request([0], temperature=0), first)
        engine.submit(Request([0], temperature=0), second)
        assert first.wait().text == second.wait().text == "x" * 3 * CHUNK
        assert (True, batching.QUEUED) in turns and (False, CHUNK) in turns
        assert all(taken <= batching.QUEUED for queued, taken in turns if queued)


def test_closing_ends_everything() -> None:
    engine, boxes = scripted(script("x" * 126), rows=1, latency=0.0), [Inbox(), Inbox()]
    for box in boxes:
        engine.submit(Request([0], temperature=0), box)
    assert boxes[0].begun.wait(60)
    engine.close()
    engine.close()
    assert [box.finish for box in boxes] == ["cancelled", "cancelled"] and not engine.thread.is_alive()
    with pytest.raises(UserError, match="closed"):
        engine.submit(Request([0]), boxes[0])


def test_a_failing_step_ends_its_requests_and_the_engine_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    real, failures = rows.compiled_decode, []

    def failing(*args: object, **named: object) -> object:
        if failures:
            raise RuntimeError(failures.pop())
        return real(*args, **named)

    monkeypatch.setattr(rows, "compiled_decode", failing)
    with scripted(script("fine", END)) as engine:
        failures.append("out of memory\nmore lines")
        boxes = ask(engine, Request([0], temperature=0))
        assert boxes[0].finish == "error: RuntimeError: out of memory"
        assert ask(engine, Request([0], temperature=0))[0].text == "fine"
        failures.extend(["a", "b"])
        assert [ask(engine, Request([0]))[0].finish[:5] for _ in range(2)] == ["error"] * 2
        assert ask(engine, Request([0], temperature=0))[0].text == "fine", "two in a row are not the end"
        failures.extend("d" * batching.FAILURES)
        for _ in range(batching.FAILURES):
            assert ask(engine, Request([0]))[0].finish.startswith("error: RuntimeError: d")
        engine.thread.join(60)
        with pytest.raises(UserError, match="broken: RuntimeError: d; restart"):
            engine.submit(Request([0]), Inbox())
        assert "broken" in engine.stats()["broken"]


def test_a_bad_receiver_or_tool_hurts_nobody_else(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_piece: Piece) -> None:
        raise ValueError("the client is gone")

    with scripted(script("x" * 90, END), script(PS, "1+1", PE, "y" * 80, END), latency=0.0) as engine:
        engine.submit(Request([0], temperature=0), broken)
        assert ask(engine, Request([0], temperature=0))[0].text == "x" * 90
        monkeypatch.setattr(batching, "tool_output", lambda *_: 1 / 0)
        first, second = ask(engine, Request([0], temperature=0), Request([1], temperature=0))
        assert first.text == "x" * 90 and first.finish == "end"
        assert second.finish.startswith("error: ZeroDivisionError") and engine.stats()["busy"] == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tokens": []}, "empty"),
        ({"tokens": [1] * 128}, "128 tokens.*at most 127"),
        ({"tokens": [320]}, "token id 320"),
        ({"tokens": [-1]}, "token id -1"),
        ({"tokens": [1.5]}, "integers"),
        ({"max_tokens": -1}, "max_tokens -1"),
        ({"temperature": -1}, "temperature -1"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_k": -1}, "top_k -1"),
        ({"top_p": 0}, "top_p 0"),
        ({"top_p": 1.1}, "top_p 1.1"),
        ({"top_p": float("nan")}, "top_p nan"),
        ({"seed": "x"}, "seed 'x'"),
        ({"stop": ("",)}, "stop string ''"),
        ({"stop": (3,)}, "stop string 3"),
    ],
)
def test_bad_requests_are_refused_at_once(options: dict, message: str, shared: BatchingEngine) -> None:
    del shared
    with scripted(script("a", END), rows=1) as engine, pytest.raises(UserError, match=message):
        engine.submit(Request(**({"tokens": [0]} | options)), Inbox())


def test_many_threads_submit() -> None:
    """More requests than rows, from many threads: each gets its own script, whole."""
    says = [script(chr(97 + row) * (CHUNK + row), END) for row in range(8)]
    with scripted(*says, rows=3, context=2 * CHUNK) as engine:
        boxes = [[Inbox() for _ in range(4)] for _ in says]

        def client(row: int) -> None:
            for box in boxes[row]:
                engine.submit(Request([row], temperature=0), box)

        threads = [threading.Thread(target=client, args=(row,)) for row in range(8)]
        for thread in threads:
            thread.start()
        for row, own in enumerate(boxes):
            assert {box.wait().text for box in own} == {chr(97 + row) * (CHUNK + row)}
