"""Generation: the engine against the textbook loop, sampling against its distribution, tool use against a script."""

import re
from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import vectors
from hypothesis import given
from hypothesis import strategies as st

from nanochat_lib import gpt
from nanochat_lib.decoding import CHUNK, COMPILES, ToolCall, ToolState, compiled_decode, tool_step
from nanochat_lib.engine import Engine, naive_generate
from nanochat_lib.errors import UserError
from nanochat_lib.sampling import is_greedy, row_keys, sample
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.tokenizer import Tokenizer

# A model that says what a script tells it ---------------------------------------------------------------------------

BYTES = Tokenizer([])  # 256 bytes and the special tokens
BOS, END = BYTES.bos_id, BYTES.encode_special("<|assistant_end|>")
PS, PE = BYTES.encode_special("<|python_start|>"), BYTES.encode_special("<|python_end|>")
OS, OE = BYTES.encode_special("<|output_start|>"), BYTES.encode_special("<|output_end|>")
FLAT = -1  # in a script: all tokens are equally likely
SCRIPT_CONFIG = GPTConfig(sequence_len=128, vocab_size=320, n_layer=1, n_head=1, n_kv_head=1, n_embd=32)


class Scripted:
    """Stands in for nanochat_lib.gpt. A prompt's first id is the number of its script; position decides the token."""

    @staticmethod
    def init_cache(_config, batch, _length, _dtype):
        return {"row": jnp.zeros(batch, jnp.int32), "at": jnp.zeros(batch, jnp.int32)}

    @staticmethod
    def logits(config, params, cache):
        wanted = params["script"][cache["row"], cache["at"]][:, None]
        return jnp.where(jnp.arange(config.vocab_size) == wanted, 50.0, 0.0)

    @staticmethod
    def prefill(config, params, idx, _lengths, cache, dtype):
        del dtype
        cache = cache | {"row": idx[:, 0]}
        return Scripted.logits(config, params, cache), cache

    @staticmethod
    def decode(config, params, _token, cache, dtype, alive, span):
        del dtype, span
        cache = cache | {"at": cache["at"] + alive}
        return Scripted.logits(config, params, cache), cache

    @staticmethod
    def repeat_cache(cache, n):
        return jax.tree.map(lambda leaf: jnp.repeat(leaf, n), cache)


def script(*parts: int | str) -> list[int]:
    """Text as its bytes, tokens as they are."""
    return [t for part in parts for t in (BYTES.encode(part) if isinstance(part, str) else [part])]


def scripted(*scripts: list[int], after: int = END, context: int = 128) -> Engine:
    table = np.full((300, 2 * context), after, np.float32)
    for row, tokens in enumerate(scripts):
        table[row, : len(tokens)] = tokens
    return Engine(replace(SCRIPT_CONFIG, sequence_len=context), {"script": jnp.asarray(table)}, BYTES, model=Scripted)


# A real model -------------------------------------------------------------------------------------------------------

TOKENIZER = Tokenizer([bytes([97, 97 + i]) for i in range(26)] + [bytes([98, 97 + i]) for i in range(9)])
TINY = GPTConfig(sequence_len=64, vocab_size=300, n_layer=1, n_head=2, n_kv_head=1, n_embd=32)


def filled(config: GPTConfig) -> gpt.Params:
    return {name: jnp.asarray(vectors.fill(name, shape)) for name, shape in gpt.param_shapes(config).items()}


@pytest.fixture(scope="module")
def params() -> gpt.Params:
    params = filled(TINY)
    table = params["lm_head.weight"]
    return params | {"lm_head.weight": table.at[291:].set(0)}  # special tokens are never the likeliest


@pytest.fixture(scope="module")
def engine(params: gpt.Params) -> Engine:
    return Engine(TINY, params, TOKENIZER)


def answer(engine: Engine, prompt: list[int], **options: object) -> list[int]:
    return [column[0] for column, _mask in engine.generate(prompt, **options)]


def test_greedy_gives_nanochats_tokens() -> None:
    """The prompts differ in length by far; the longer one goes past the short attention windows."""
    config, params = vectors.config(), filled(vectors.config())
    assert TOKENIZER.vocab_size == config.vocab_size
    prompts = [list(prompt) for prompt, _ids in vectors.GREEDY]
    out = Engine(config, params, TOKENIZER).generate_batch(prompts, max_tokens=12, temperature=0)
    for prompt, row, (_prompt, ids) in zip(prompts, out.sequences, vectors.GREEDY, strict=True):
        assert row == [*prompt, *ids]
        assert list(naive_generate(config, params, prompt, 12, temperature=0)) == list(ids)


def test_a_batch_of_different_lengths_equals_its_rows_alone(engine: Engine, params: gpt.Params) -> None:
    prompts = [[5, 17, 200], [291], [9, 8, 7, 6, 5, 4, 3], [(37 * i + 11) % 290 for i in range(11)], [60, 61]]
    together = engine.generate_batch(prompts, max_tokens=10, temperature=0).sequences
    for prompt, row in zip(prompts, together, strict=True):
        assert row == prompt + list(naive_generate(TINY, params, prompt, 10, temperature=0))
        assert len(row) == len(prompt) + 10


def test_the_engine_decodes_with_the_functions_that_learners_write(params, monkeypatch) -> None:
    """Their own versions take the library's place by name; a second decode beside it would never call them."""
    called = []
    for name in ("decode", "store_token", "cached_attention"):
        before = getattr(gpt, name)
        monkeypatch.setattr(gpt, name, lambda *a, name=name, before=before, **k: called.append(name) or before(*a, **k))
    jax.clear_caches()  # what was compiled before would not be traced again
    answer(Engine(TINY, params, TOKENIZER), [1, 2], max_tokens=3, temperature=0)
    assert set(called) == {"decode", "store_token", "cached_attention"}


def test_the_textbook_loop_samples_within_top_k(params: gpt.Params) -> None:
    draw = lambda **options: list(naive_generate(TINY, params, [5, 17], 4, **options))  # noqa: E731
    assert draw(top_k=1, seed=1) == draw(temperature=0)
    assert draw(seed=1) == draw(seed=1) == draw(seed=1, top_k=0)
    assert draw(seed=1) != draw(seed=2)
    with pytest.raises(UserError, match="temperature -1"):
        draw(temperature=-1)


def test_filling_the_context_to_the_end(engine: Engine, params: gpt.Params) -> None:
    prompts = [[(31 * i + 5) % 290 for i in range(length)] for length in (59, 63, 40)]
    out = engine.generate_batch(prompts, max_tokens=10, temperature=0)
    assert [len(s) - len(p) for s, p in zip(out.sequences, prompts, strict=True)] == [5, 1, 10]
    assert out.finished == ["length"] * 3
    assert out.sequences[0][59:] == list(naive_generate(TINY, params, prompts[0], 5, temperature=0))
    full = engine.generate_batch(prompts, temperature=0).sequences  # no max_tokens: until the context is full
    assert [len(row) for row in full] == [64] * 3
    assert full[2][:50] == out.sequences[2]


def test_log_probabilities_are_the_models_own(engine: Engine, params: gpt.Params) -> None:
    prompts = [[5, 17, 200], [9, 8, 7, 6, 5, 4]]
    out = engine.generate_batch(prompts, 2, max_tokens=14, temperature=0.7, top_k=20, logprobs=True)
    forward = jax.jit(gpt.apply, static_argnums=0)
    for row, (ids, logprobs) in enumerate(zip(out.sequences, out.logprobs, strict=True)):
        length, count = len(prompts[row // 2]), len(ids)
        own = np.asarray(jax.nn.log_softmax(forward(TINY, params, np.array([ids + [0] * (32 - count)]))[0]))
        expected = own[np.arange(count - 1), ids[1:]]
        np.testing.assert_allclose(logprobs[length:], expected[length - 1 :], atol=1e-5)
        assert logprobs[:length] == [0.0] * length
    assert engine.generate_batch(prompts, 2, max_tokens=14, top_k=20).logprobs == []


def test_weights_can_be_exchanged_and_are_cast_once(params: gpt.Params) -> None:
    engine = Engine(TINY, params, TOKENIZER, dtype=jnp.bfloat16)
    assert engine.params["lm_head.weight"].dtype == jnp.bfloat16
    assert engine.params["resid_lambdas"].dtype == jnp.float32
    assert params["lm_head.weight"].dtype == jnp.float32
    first = answer(engine, [5, 17, 200], max_tokens=4, temperature=0)
    assert all(0 <= token < 300 for token in first)
    compiled = COMPILES.copy()
    engine.params = {name: -leaf for name, leaf in params.items()}
    assert answer(engine, [5, 17, 200], max_tokens=4, temperature=0) != first
    engine.params = params
    assert answer(engine, [5, 17, 200], max_tokens=4, temperature=0) == first
    assert compiled == COMPILES


# Sampling -----------------------------------------------------------------------------------------------------------


def test_samples_of_a_prompt_differ_from_the_first_token_on() -> None:
    engine = scripted([FLAT] * (CHUNK + 9), context=2 * CHUNK)
    out = engine.generate_batch([[0]], 16, max_tokens=CHUNK + 5, seed=3)
    assert len(out.sequences) == 16
    assert len({tuple(row) for row in out.sequences}) == 16
    assert len({row[1] for row in out.sequences}) > 10


def test_streaming_and_batches_draw_the_same() -> None:
    engine = scripted([FLAT] * (CHUNK + 9), context=2 * CHUNK)
    options = {"num_samples": 16, "max_tokens": CHUNK + 5, "seed": 7}
    columns = list(engine.generate([0], **options))
    streamed = [[0, *(column[row] for column, mask in columns if mask[row])] for row in range(16)]
    assert streamed == engine.generate_batch([[0]], include_end=True, **options).sequences


def test_the_seed_decides_the_output(engine: Engine) -> None:
    def draw(**options: object) -> list[list[int]]:
        return engine.generate_batch([[5, 17, 200], [9, 8, 7, 6, 5, 4]], 2, max_tokens=14, **options).sequences

    assert draw(seed=1, top_k=20) == draw(seed=1, top_k=20)
    assert draw(seed=1, top_k=20) != draw(seed=2, top_k=20)
    assert draw(seed=-1, top_k=20) == draw(seed=2**32 - 1, top_k=20)
    assert draw(seed=1, temperature=0) == draw(seed=2, temperature=0)


def test_random_numbers_do_not_depend_on_how_rows_are_grouped() -> None:
    engine, prompts = scripted(*[[FLAT] * 40] * 3), [[0, 9], [1], [2, 9, 9]]
    options = {"num_samples": 4, "max_tokens": 6}
    whole = engine.generate_batch(prompts, seed=5, **options).sequences
    assert len({tuple(row[len(prompts[i // 4]) :]) for i, row in enumerate(whole)}) == 12
    for rows in (3, 4):  # two rounds a prompt; prompt by prompt
        assert engine.generate_batch(prompts, seed=5, batch_rows=rows, **options).sequences == whole
    seeds = [11, 12, 13]
    listed = engine.generate_batch(prompts, seed=seeds, **options).sequences
    for i, prompt in enumerate(prompts):
        assert engine.generate_batch([prompt], seed=seeds[i], **options).sequences == listed[4 * i : 4 * i + 4]


@pytest.mark.parametrize("count", [1, 4, 10])
def test_as_many_rows_as_samples_asked_for(count: int) -> None:
    engine = scripted([FLAT] * 9)
    assert {len(column) for column, _mask in engine.generate([0], count, max_tokens=3, temperature=0)} == {count}
    out = engine.generate_batch([[0], [0, 1]], count, max_tokens=3, batch_rows=8, temperature=0)
    assert [len(field) for field in (out.sequences, out.masks, out.finished, out.tool_calls)] == [2 * count] * 4
    sequences, masks = out
    assert (sequences, masks) == (out.sequences, out.masks)


@pytest.mark.parametrize("length", [0, 1, 2, CHUNK, CHUNK + 1, CHUNK + 2, 2 * CHUNK + 1])
def test_no_more_than_max_tokens(length: int) -> None:
    engine = scripted(script("x" * 3 * CHUNK), context=3 * CHUNK)
    assert answer(engine, [0], max_tokens=length, temperature=0) == script("x" * length)
    out = engine.generate_batch([[0, 1]], max_tokens=length, include_end=True, temperature=0)
    assert out.sequences == [[0, 1, *script("x" * length)]]
    assert out.masks == [[0, 0] + [1] * length]
    assert out.finished == ["length"]


def test_nothing_to_do() -> None:
    assert scripted().generate_batch([]).sequences == []


@pytest.mark.parametrize("top_k", [None, 0, 1, 5, BYTES.vocab_size, BYTES.vocab_size + 1, 10_000])
@pytest.mark.parametrize("temperature", [0, 1e-30, 1.0, 100.0])
def test_ids_without_a_token_are_never_sampled(top_k: int | None, temperature: float) -> None:
    assert BYTES.vocab_size < SCRIPT_CONFIG.vocab_size
    engine = scripted([BYTES.vocab_size, 319, *[300] * 8])
    rows = engine.generate_batch([[0]], 16, max_tokens=10, temperature=temperature, top_k=top_k).sequences
    assert all(token < BYTES.vocab_size for row in rows for token in row)


LOGITS = jnp.array([0.3, 1.7, -0.4, 1.7, 0.9, -2.0, 1.0, 5.0])  # the last one is beyond the vocabulary of 7


compiled_sample = jax.jit(sample, static_argnums=(6, 7))


def draws(temperature: float, top_k: int | None, rows: int = 20_000) -> tuple[np.ndarray, np.ndarray]:
    numbers, zeros = np.arange(rows, dtype=np.uint32), np.zeros(rows, np.uint32)
    keys = row_keys(zeros, zeros, numbers)
    out = compiled_sample(
        jnp.tile(LOGITS, (rows, 1)), keys, 4, float(temperature), top_k or 0, 1.0, is_greedy(temperature, top_k), 7
    )
    return tuple(np.asarray(part) for part in out)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("top_k", [None, 0, 2, 3, 5, 7, 9])
def test_draws_follow_the_softmax_of_the_top_k(temperature: float, top_k: int | None) -> None:
    tokens, logprobs = draws(temperature, top_k)
    logits = np.asarray(LOGITS[:7], np.float64)
    weights = np.exp(logits / temperature)
    if top_k:
        weights[np.argsort(-logits, kind="stable")[top_k:]] = 0
    shares = np.bincount(tokens, minlength=7) / len(tokens)
    np.testing.assert_allclose(shares, weights / weights.sum(), atol=0.015)  # 4 deviations of 20,000 draws
    own = logits - np.log(np.exp(logits).sum())
    np.testing.assert_allclose(logprobs, own[tokens], atol=1e-5)


@pytest.mark.parametrize(("temperature", "top_k"), [(0, None), (0, 5), (0.0, 0), (1.0, 1)])
def test_the_first_of_equal_logits_is_the_greedy_one(temperature: float, top_k: int | None) -> None:
    assert set(draws(temperature, top_k, 50)[0]) == {1}


def test_steps_and_rows_draw_independently() -> None:
    rows = np.arange(64, dtype=np.uint32)
    keys = row_keys(np.zeros_like(rows), np.zeros_like(rows), rows)
    drawn = np.stack(
        [compiled_sample(jnp.zeros((64, 97)), keys, step, 1.0, 0, 1.0, False, 97)[0] for step in range(64)]
    )
    assert len(set(drawn[0])) > 30
    assert len(set(drawn[:, 0])) > 30
    assert abs(np.corrcoef(drawn[0], drawn[1])[0, 1]) < 0.5


def test_few_shapes_compile() -> None:
    config = GPTConfig(sequence_len=128, vocab_size=321, n_layer=1, n_head=1, n_kv_head=1, n_embd=32)
    table = jnp.full((300, 256), FLAT, jnp.float32)
    before = COMPILES.copy()
    engine = Engine(config, {"script": table}, BYTES, model=Scripted)

    def compiled() -> Counter:
        return COMPILES - before

    for length in range(1, 9):
        engine.generate_batch([[0] * length] * 4, max_tokens=8, top_k=40)
    assert compiled() == {"prefill": 1, "decode": 1}
    for top_k, temperature, top_p in ((33, 1.0, None), (None, 0.3, 0.5), (2, 2.0, 0.9)):
        engine.generate_batch([[0] * 5] * 3, max_tokens=11, top_k=top_k, temperature=temperature, top_p=top_p)
    Engine(config, {"script": table + 1}, BYTES, model=Scripted).generate_batch([[0]] * 4, max_tokens=9, top_k=40)
    assert compiled() == {"prefill": 1, "decode": 1}
    list(engine.generate([0] * 9, 4, max_tokens=5, top_k=40))
    assert compiled() == {"prefill": 2, "decode": 1}, "four samples of one prompt: another prefill, the same decode"
    engine.generate_batch([[0]] * 4, max_tokens=9, temperature=0)
    assert compiled() == {"prefill": 3, "decode": 2}, "greedy"
    engine.generate_batch([[0] * 17] * 4, max_tokens=9, temperature=0)
    assert compiled() == {"prefill": 4, "decode": 3}, "longer prompts need a larger cache"


# Ends and limits ----------------------------------------------------------------------------------------------------


def test_an_ended_row_is_frozen() -> None:
    dead = script("hi", END, PS, "1+1", PE, "x" * 30)
    alive = script("y" * 19, END)
    engine = scripted(dead, alive)
    out = engine.generate_batch([[0], [1]], max_tokens=60, include_end=True, temperature=0)
    assert out.sequences == [[0, *script("hi", END)], [1, *alive]]
    assert out.tool_calls == [[], []]
    assert out.finished == ["end", "end"]

    class Twins(Scripted):  # both rows of one prompt, but the second follows script 1
        @staticmethod
        def repeat_cache(cache, n):
            return Scripted.repeat_cache(cache, n) | {"row": jnp.arange(n, dtype=jnp.int32)}

    # The first token is sampled before the split: both scripts begin alike.
    table = scripted(script("h", END, PS, "1+1", PE), script("h", "y" * 9)).params
    twins = Engine(SCRIPT_CONFIG, table, BYTES, model=Twins)
    columns = list(twins.generate([0], 2, max_tokens=60, temperature=0))
    assert [column[0] for column, _ in columns] == script("h", END) + [END] * 9
    assert [mask[0] for _, mask in columns] == [1, 1] + [0] * 9
    assert [column[1] for column, _ in columns] == script("h", "y" * 9, END)


@pytest.mark.parametrize("end", [END, BOS])
def test_end_tokens(end: int) -> None:
    engine = scripted(script("ok", end, "never"), [end])
    out = engine.generate_batch([[0, 5], [1]], max_tokens=20, temperature=0)
    assert out.sequences == [[0, 5, *script("ok")], [1]]
    assert out.masks == [[0, 0, 1, 1], [0]]
    assert out.finished == ["end", "end"]
    shown = engine.generate_batch([[0, 5], [1]], max_tokens=20, include_end=True, temperature=0)
    assert shown.sequences == [[0, 5, *script("ok", end)], [1, end]]
    assert shown.masks == [[0, 0, 1, 1, 1], [0, 1]]
    assert answer(engine, [0], max_tokens=20, temperature=0) == script("ok", end)
    assert engine.generate_batch([[0, 5]], max_tokens=2, temperature=0).finished == ["length"]
    assert engine.generate_batch([[0, 5]], max_tokens=3, temperature=0).finished == ["end"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"temperature": -0.1}, "temperature -0.1"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"temperature": float("inf")}, "temperature inf"),
        ({"temperature": "hot"}, "temperature hot"),
        ({"top_k": -1}, "top_k -1"),
        ({"top_k": 2.5}, "top_k 2.5"),
        ({"num_samples": 0}, "num_samples 0"),
        ({"max_tokens": -1}, "max_tokens -1"),
        ({"tokens": []}, "prompt 0 is empty"),
        ({"tokens": [0] * 128}, "128 tokens.*at most 127"),
        ({"tokens": [0, 320]}, "token id 320"),
        ({"tokens": [-1]}, "token id -1"),
    ],
)
def test_options_out_of_range_are_named_at_once(options: dict, message: str) -> None:
    engine = scripted([FLAT])
    options = {"tokens": [0]} | options
    with pytest.raises(UserError, match=message):
        engine.generate(**options)  # not only when the first token is asked for
    with pytest.raises(UserError, match=message):
        engine.generate_batch([options.pop("tokens")], **options)


def test_more_misuse() -> None:
    engine = scripted([FLAT])
    with pytest.raises(UserError, match="2 seeds for 1 prompts"):
        engine.generate_batch([[0]], seed=[1, 2])
    with pytest.raises(UserError, match="batch_rows 0"):
        engine.generate_batch([[0]], batch_rows=0)
    with pytest.raises(UserError, match="prompt 1 is empty"):
        engine.generate_batch([[0], []])
    with pytest.raises(UserError, match="265 tokens but the model only 264"):
        small = GPTConfig(sequence_len=128, vocab_size=264, n_layer=1, n_head=1, n_kv_head=1, n_embd=32)
        Engine(small, engine.params, BYTES, model=Scripted)


# Tools --------------------------------------------------------------------------------------------------------------

LONG = "9" * 30 + "+1"
LONG_RESULT = "1" + "0" * 30
GAP = script("?" * 40)  # what the model would say where tokens are inserted

# name: (script, answer as (text or token, inserted?) pairs, calls); a script ends with END
TOOL_CASES = {
    "a call": (
        script(PS, "1+1", PE, "???", " so 2"),
        [(PS, 0), ("1+1", 0), (PE, 0), (OS, 1), ("2", 1), (OE, 1), (" so 2", 0)],
        [ToolCall("1+1", 2)],
    ),
    "text before": (
        script("well ", PS, "6*7", PE, "????", "!"),
        [("well ", 0), (PS, 0), ("6*7", 0), (PE, 0), (OS, 1), ("42", 1), (OE, 1), ("!", 0)],
        [ToolCall("6*7", 42)],
    ),
    "no result": (
        script(PS, "1/0", PE, "oh"),
        [(PS, 0), ("1/0", 0), (PE, 0), ("oh", 0)],
        [ToolCall("1/0", None)],
    ),
    "the model's own output": (
        script(PS, "hm", PE, OS, "3", OE),
        [(PS, 0), ("hm", 0), (PE, 0), (OS, 0), ("3", 0), (OE, 0)],
        [ToolCall("hm", None)],
    ),
    "two calls": (
        script(PS, "1+1", PE, "???", PS, "2+2", PE, "???", "."),
        [(PS, 0), ("1+1", 0), (PE, 0), (OS, 1), ("2", 1), (OE, 1),
         (PS, 0), ("2+2", 0), (PE, 0), (OS, 1), ("4", 1), (OE, 1), (".", 0)],
        [ToolCall("1+1", 2), ToolCall("2+2", 4)],
    ),
    "a result longer than a chunk": (
        script(PS, LONG, PE, "?" * (len(LONG_RESULT) + 2), "done"),
        [(PS, 0), (LONG, 0), (PE, 0), (OS, 1), (LONG_RESULT, 1), (OE, 1), ("done", 0)],
        [ToolCall(LONG, int(LONG_RESULT))],
    ),
    "start without end": (script(PS, "1+1"), [(PS, 0), ("1+1", 0)], []),
    "end without start": (script("1+1", PE, "x"), [("1+1", 0), (PE, 0), ("x", 0)], []),
    "nothing between": (script(PS, PE, "x"), [(PS, 0), (PE, 0), ("x", 0)], []),
    "started twice": (
        script(PS, "7", PS, "1+1", PE, "???"),
        [(PS, 0), ("7", 0), (PS, 0), ("1+1", 0), (PE, 0), (OS, 1), ("2", 1), (OE, 1)],
        [ToolCall("1+1", 2)],
    ),
    "ended twice": (
        script(PS, "1/0", PE, "5", PE, "x"),
        [(PS, 0), ("1/0", 0), (PE, 0), ("5", 0), (PE, 0), ("x", 0)],
        [ToolCall("1/0", None)],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", TOOL_CASES)
def test_tool_use(name: str) -> None:
    says, expected, calls = TOOL_CASES[name]
    tokens = [t for part, _ in expected for t in script(part)]
    sampled = [1 - inserted for part, inserted in expected for _ in script(part)]
    engine = scripted(says)
    out = engine.generate_batch([[0, 1]], 2, max_tokens=100, temperature=0)
    assert out.sequences == [[0, 1, *tokens]] * 2
    assert out.masks == [[0, 0, *sampled]] * 2
    assert out.tool_calls == [calls] * 2
    assert out.finished == ["end"] * 2
    columns = list(engine.generate([0, 1], max_tokens=100, temperature=0))
    assert [column[0] for column, _ in columns] == [*tokens, END]
    assert [mask[0] for _, mask in columns] == [*sampled, 1]


@given(st.text("SEab", max_size=30))
def test_the_tool_state_machine_is_a_regular_expression(answer: str) -> None:
    state = ToolState()
    for at, letter in enumerate(answer):
        state, call = tool_step(state, ord(letter), ord("S"), ord("E"))
        closed = re.search(r"S([ab]*)E$", answer[: at + 1])
        assert "".join(map(chr, call)) == (closed[1] if closed else "")
        assert state.inside == bool(re.search(r"S[ab]*$", answer[: at + 1]))


def test_rows_use_tools_independently() -> None:
    engine = scripted(*(says for says, _, _ in TOOL_CASES.values()))
    out = engine.generate_batch([[i] for i in range(len(TOOL_CASES))], max_tokens=99, temperature=0)
    for i, (name, (_says, expected, calls)) in enumerate(TOOL_CASES.items()):
        assert out.sequences[i] == [i, *(t for part, _ in expected for t in script(part))], name
        assert out.tool_calls[i] == calls, name


def test_a_result_is_inserted_whole_or_not_at_all() -> None:
    engine = scripted(script(PS, "6*7", PE, "????", "!"), script("y" * 20))
    call, output = script(PS, "6*7", PE), script(OS, "42", OE)
    for length in range(1, 12):
        out = engine.generate_batch([[0], [1]], max_tokens=length, include_end=True, temperature=0)
        fits = length >= len(call) + len(output)
        expected = (call + output + script("!", END))[:length] if fits else call[:length]
        assert out.sequences[0] == [0, *expected]
        assert out.finished[0] == ("end" if length == 11 else "length")
        assert out.sequences[1] == [1, *script("y" * length)], "the other row goes on"
        assert out.tool_calls[0] == ([ToolCall("6*7", 42)] if length > len(call) else [])


def test_a_turn_starts_with_a_clean_state() -> None:
    engine = scripted(script(PS, "1+1"), script("2+2", PE, "x"), script(PS, "6*7", PE))
    assert answer(engine, [0], max_tokens=9, temperature=0) == script(PS, "1+1", END)
    assert answer(engine, [1], max_tokens=9, temperature=0) == script("2+2", PE, "x", END)
    stopped = engine.generate([2], max_tokens=20, temperature=0)
    for _ in range(6):  # the result waits to be inserted
        next(stopped)
    del stopped
    assert answer(engine, [1], max_tokens=9, temperature=0) == script("2+2", PE, "x", END)
    first, second = (
        engine.generate([2], max_tokens=20, temperature=0),
        engine.generate([2], max_tokens=20, temperature=0),
    )
    both = [(a[0][0], b[0][0]) for a, b in zip(first, second, strict=True)]
    assert both == [(t, t) for t in script(PS, "6*7", PE, OS, "42", OE, END)]


def test_inserted_tokens_are_what_the_model_reads_next() -> None:
    class Chain(Scripted):  # the token before decides, not the position
        @staticmethod
        def decode(config, params, token, cache, dtype, alive, span):
            del dtype, alive, span
            wanted = params["script"][0][token][:, None]
            return jnp.where(jnp.arange(config.vocab_size) == wanted, 50.0, 0.0), cache

    follows = np.full((1, 300), END, np.float32)
    said = script(PS, "1+2", PE, "x")
    follows[0, 0] = PS
    follows[0, said[:-1]] = said[1:]
    follows[0, [OE, script("Z")[0]]] = [*script("Z"), END]
    engine = Engine(SCRIPT_CONFIG, {"script": jnp.asarray(follows)}, BYTES, model=Chain)
    assert answer(engine, [0], max_tokens=20, temperature=0) == script(PS, "1+2", PE, OS, "3", OE, "Z", END)


def test_decode_steps_copy_no_cache() -> None:
    # A loop that copies every layer's keys and values four times a token takes twice as long with one row.
    config = GPTConfig(sequence_len=48, vocab_size=300, n_layer=2, n_head=2, n_kv_head=2, n_embd=32)
    engine = Engine(config, gpt.init_params(config, jax.random.key(0)), BYTES)
    for rows in (1, 3):
        cache = gpt.init_cache(config, rows, 48)
        whole = np.zeros(rows, np.int32)
        keys = row_keys(*[np.zeros(rows, np.uint32)] * 3)
        state = cache, whole, keys, np.full((rows, CHUNK), -1, np.int32), whole == 0, whole + 40, 0, CHUNK
        lowered = compiled_decode.lower(engine.params, *state, (0.0, 0, 1.0), setup=engine.setup, greedy=True, span=48)
        shape = ",".join(map(str, cache.k[0].shape))
        copies = re.findall(rf"copy\S* = \w+\[{shape}\]", lowered.compile().as_text())
        assert len(copies) <= 2 * config.n_layer, f"{rows} rows: {len(copies)} copies"  # into the loop, never in it
