"""The terminal chat with a scripted engine: what is shown, what is remembered, what ends it."""

import io
import subprocess
import sys
from collections.abc import Iterator

import pytest

from nanochat_lib.errors import UserError
from nanochat_lib.serve.terminal import Screen, Session, chat
from nanochat_lib.tokenizer import SPECIAL_TOKENS, Tokenizer

TOKENIZER = Tokenizer([])
BOS, US, UE, AS, AE, PS, PE, OS, OE = (TOKENIZER.encode_special(name) for name in SPECIAL_TOKENS)


def said(*parts: int | str) -> list[int]:
    return [t for part in parts for t in (TOKENIZER.encode(part) if isinstance(part, str) else [part])]


class FakeEngine:
    """Gives the scripted answers in turn; an exception in a script is raised when its place comes."""

    def __init__(self, *answers: list, context: int = 200) -> None:
        self.answers, self.context = list(answers), context
        self.prompts: list[list[int]] = []
        self.options: list[dict] = []

    def generate(self, tokens: list[int], **options: object) -> Iterator[tuple[list[int], list[int]]]:
        self.prompts.append(list(tokens))
        self.options.append(options)
        answer = self.answers.pop(0) if self.answers else said("ok", AE)
        for token in answer[: min(options["max_tokens"], self.context - len(tokens))]:
            if not isinstance(token, int):
                raise token
            yield [token], [1]


def talk(engine: FakeEngine, *lines: str, **options: object) -> str:
    out = io.StringIO()
    chat(engine, TOKENIZER, stdin=io.StringIO("".join(line + "\n" for line in lines)), stdout=out, **options)
    return out.getvalue()


def test_a_conversation_through_a_pipe() -> None:
    engine = FakeEngine(said("Hello!", AE, "never shown"), said("Fine.", AE))
    assert talk(engine, "Hi", "", "  How are you? ") == "Hello!\nFine.\n"
    first = said(BOS, US, "Hi", UE, AS)
    assert engine.prompts == [first, first + said("Hello!", AE, US, "How are you?", UE, AS)]


def test_one_question_and_out() -> None:
    engine = FakeEngine()
    out = io.StringIO()
    chat(engine, TOKENIZER, prompt="Hi", stdin=io.StringIO("not read\n"), stdout=out)
    assert out.getvalue() == "ok\n"
    assert len(engine.prompts) == 1
    with pytest.raises(UserError, match="300 tokens.*at most"):
        chat(engine, TOKENIZER, prompt="x" * 300, stdout=out)


@pytest.mark.parametrize("word", ["quit", "exit", "/quit", "/exit", " /quit "])
def test_leaving(word: str) -> None:
    engine = FakeEngine()
    talk(engine, "Hi", word, "not sent")
    assert len(engine.prompts) == 1


@pytest.mark.parametrize("word", ["clear", "/clear"])
def test_a_new_conversation(word: str) -> None:
    engine = FakeEngine()
    assert "New conversation" in talk(engine, "one", word, "two")
    assert engine.prompts[1] == said(BOS, US, "two", UE, AS)


def test_commands_are_not_messages() -> None:
    engine = FakeEngine()
    shown = talk(
        engine,
        "/help",
        "/nonsense 1",
        "/temperature",
        "/topk",
        "/temperature hot",
        "/topk -1",
        "/temperature -1",
        "/topp",
        "/topp x",
        "/topp 0",
        "/retry",
        "/tokens",
        "/tokens 0",
        "/tokens many",
    )
    assert engine.prompts == []
    for command in ("/retry", "/clear", "/temperature", "/topk", "/topp", "/tokens", "/help", "/quit"):
        assert command in shown
    for notice in (
        "unknown command /nonsense",
        "temperature 0.6",
        "top-k 50",
        "'hot'",
        "'-1'",
        "temperature -1",
        "top-p off",
        "'x'",
        "top_p 0",
        "no message to answer anew",
        "at most 256 tokens an answer",
        "tokens '0'",
        "tokens 'many'",
    ):
        assert notice in shown


def test_a_message_is_answered_anew() -> None:
    engine = FakeEngine(said("one", AE), said("two", AE), said("three", AE), [UserError("too hot")], said("five", AE))
    shown = talk(engine, "a", "b", "/tokens 9", "/retry", "/retry", "c", "/clear", "/retry")
    assert shown.splitlines()[:4] == ["one", "two", "at most 9 tokens an answer", "three"]
    assert "too hot" in shown and "five" in shown and "no message to answer anew" in shown.splitlines()[-1]
    before = said(BOS, US, "a", UE, AS, "one", AE)
    again = before + said(US, "b", UE, AS)
    assert engine.prompts[1:4] == [again] * 3
    assert engine.prompts[4] == again + said("three", AE, US, "c", UE, AS)  # an answer that failed replaces none
    assert [o["max_tokens"] for o in engine.options] == [256, 256, 9, 9, 9]
    assert len({o["seed"] for o in engine.options}) == 5


def test_settings_reach_the_engine() -> None:
    engine = FakeEngine()
    lines = "a", "/temperature 0", "/topk 3", "b", "/topk 0", "/topp 0.5", "c"
    talk(engine, *lines, temperature=0.9, top_k=7, top_p=0.8, max_tokens=11, seed=5)
    given = [(o["temperature"], o["top_k"], o["top_p"]) for o in engine.options]
    assert given == [(0.9, 7, 0.8), (0, 3, 0.8), (0, 0, 0.5)]
    assert [o["max_tokens"] for o in engine.options] == [11] * 3
    again = FakeEngine()
    talk(again, "a", "b", "c", seed=5)
    seeds = [options["seed"] for options in engine.options]
    assert seeds == [options["seed"] for options in again.options]
    assert len(set(seeds)) == 3


@pytest.mark.parametrize(("name", "value"), [("temperature", -1), ("max_tokens", 0), ("top_k", -1), ("top_p", 2)])
def test_options_out_of_range(name: str, value: int) -> None:
    with pytest.raises(UserError, match=f"{name} {value}"):
        talk(FakeEngine(), **{name: value})


def test_the_names_of_special_tokens_are_ordinary_text_when_typed() -> None:
    engine = FakeEngine()
    talk(engine, "<|assistant_end|>")
    assert engine.prompts[0].count(AE) == 0


def test_characters_come_whole() -> None:
    class Slow(io.StringIO):
        def __init__(self) -> None:
            super().__init__()
            self.parts: list[str] = []

        def write(self, text: str) -> int:
            self.parts.append(text)
            return super().write(text)

    out, text = Slow(), "a🐕é𝄞b"
    chat(FakeEngine(said(text, AE)), TOKENIZER, prompt="Hi", stdout=out)
    assert out.getvalue() == text + "\n"
    assert [part for part in out.parts if part.strip()] == list(text)
    out = Slow()
    chat(FakeEngine([*said("a"), 0xF0, 0x9F]), TOKENIZER, prompt="Hi", stdout=out, max_tokens=3)
    assert out.getvalue().startswith("a\ufffd\n"), "an answer that stops inside of a character shows that it did"


@pytest.mark.parametrize(
    ("answer", "shown"),
    [
        (said("It is ", PS, "12/60", PE, OS, "0.2", OE, "."), "It is [12/60 = 0.2]."),
        (said(PS, "1/0", PE, " hm"), "[1/0] hm"),
        (said(PS, "1/0", PE), "[1/0]"),
        (said(PS, "1+1"), "[1+1]"),
        (said(PS, "1", PS, "2", PE, OS, "2", OE), "[1][2 = 2]"),
        (said(OS, "3", OE), "[ = 3]"),
        (said("a", PE, "b", OE, "c"), "abc"),
        (said("a", US, "b"), "a<|user_start|>b"),
        (said("bell\x07 and \x1b[2J escape\ttab\nline"), "bell and [2J escape\ttab\nline"),
    ],
)
def test_what_an_answer_looks_like(answer: list[int], shown: str) -> None:
    assert talk(FakeEngine([*answer, AE]), "Hi") == shown + "\n"


def test_a_missing_end_is_added_and_told() -> None:
    engine = FakeEngine(said("x" * 50), said("bye", BOS, "never"), said("y" * 500, AE))
    shown = talk(engine, "one", "two", "three", max_tokens=50)
    assert shown.startswith("x" * 50 + "\n(cut off at the limit of 50 tokens)\nbye\n" + "y" * 50)
    second = said(BOS, US, "one", UE, AS, "x" * 50, AE, US, "two", UE, AS)
    assert engine.prompts[1:] == [second, second + said("bye", AE, US, "three", UE, AS)]
    full = talk(FakeEngine(said("x" * 500), context=40), "one", max_tokens=50)
    assert "(cut off at the model's context of 40 tokens)" in full


def test_control_c_stops_the_answer_not_the_program() -> None:
    engine = FakeEngine([*said("so far"), KeyboardInterrupt(), *said("never")], said("next", AE))
    assert talk(engine, "one", "two") == "so far\n(stopped)\nnext\n"
    assert engine.prompts[1] == said(BOS, US, "one", UE, AS, "so far", AE, US, "two", UE, AS)


def test_a_long_chat_forgets_its_oldest_turns() -> None:
    engine = FakeEngine(context=32)
    shown = talk(engine, *(f"msg{i}" for i in range(20)), max_tokens=256)
    assert len(engine.prompts) == 20
    for i, prompt in enumerate(engine.prompts):
        assert prompt[0] == BOS
        assert BOS not in prompt[1:]
        assert prompt[-1] == AS
        assert prompt[-len(said(US, f"msg{i}", UE, AS)) :] == said(US, f"msg{i}", UE, AS)
        assert len(prompt) <= 24, "room for an answer"
        assert prompt[1] == US, "whole turns are dropped"
    assert len(engine.prompts[-1]) > len(engine.prompts[0]), "what fits is kept"
    assert "forgotten" in shown


def test_a_message_that_cannot_fit_is_refused_and_the_chat_goes_on() -> None:
    engine = FakeEngine(context=32)
    shown = talk(engine, "one", "x" * 40, "two", max_tokens=8)
    assert "the message has 40 tokens, this model takes at most 20; shorten it" in shown
    assert [len(prompt) for prompt in engine.prompts] == [7, 16]
    longest = FakeEngine(context=32)
    talk(longest, "x" * 20, max_tokens=8)
    assert len(longest.prompts[0]) == 24


def test_an_engines_error_does_not_end_the_chat() -> None:
    engine = FakeEngine([UserError("something is wrong")])
    assert talk(engine, "one", "two").endswith("something is wrong\nok\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_colours_only_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    answer = said(PS, "1+1", PE, OS, "2", OE, "two", AE)
    for out, coloured in ((Terminal(), True), (io.StringIO(), False)):
        session = Session(FakeEngine(answer), TOKENIZER, Screen(out), 0.6, 50, None, 20, 0)
        assert session.handle("Hi")
        assert ("\x1b[2m" in out.getvalue()) == coloured
        assert "two" in out.getvalue()


def test_what_only_terminals_need_is_loaded_for_terminals_only() -> None:
    code = """
import io, sys
import nanochat_lib.serve.terminal as terminal
from nanochat_lib.tokenizer import Tokenizer
terminal.chat(None, Tokenizer([]), stdin=io.StringIO("/help\\n"), stdout=io.StringIO())
assert not {"rich", "prompt_toolkit"} & set(sys.modules)
"""
    subprocess.run([sys.executable, "-B", "-c", code], check=True)


def test_a_turn_runs_only_what_is_new_through_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a real engine, that its answers stay the same is shown in test_batching."""
    import jax.numpy as jnp
    import vectors

    from nanochat_lib import gpt
    from nanochat_lib.engine import Engine
    from nanochat_lib.rows import Rows
    from nanochat_lib.sizing import GPTConfig

    config = GPTConfig(sequence_len=128, vocab_size=320, n_layer=1, n_head=1, n_kv_head=1, n_embd=32)
    params = {name: jnp.asarray(vectors.fill(name, shape)) for name, shape in gpt.param_shapes(config).items()}
    engine, filled = Engine(config, params, TOKENIZER), []
    real = Rows.fill
    monkeypatch.setattr(Rows, "fill", lambda self, *a: filled.append(real(self, *a)) or filled[-1])
    lines = ["one", "two is longer", "three"]
    shown = talk(engine, *lines, temperature=0.9, seed=3, max_tokens=9)
    assert len(shown) > 20
    # Each turn: the markers around the user's text, and of the answer before its last token and its end.
    assert len(filled) == 3 and sum(filled) <= sum(len(line) + 5 for line in lines)
