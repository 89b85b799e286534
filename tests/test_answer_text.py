"""Text of a growing answer: equal to cutting the whole text, whatever the tokens' borders; nothing of a stop string."""

from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanochat_lib.answer_text import AnswerText
from nanochat_lib.tokenizer import StreamDecoder, Tokenizer

BYTES = Tokenizer([])
PIECES = Tokenizer([b"ab", b"bc", b"abc", "é".encode(), b"a\xc3", b"\xa9b", "🐕".encode()[:3], b"ST", b"OP"])
PS = BYTES.encode_special("<|python_start|>")


def first_stop(text: str, stop: tuple[str, ...]) -> int | None:
    """Where to cut: the stop string that is complete first; read character by character."""
    for end in range(1, len(text) + 1):
        starts = [end - len(s) for s in stop if text[:end].endswith(s)]
        if starts:
            return min(starts)
    return None


def feed(tokenizer: Tokenizer, tokens: list[int], stop: tuple[str, ...], every: int = 1) -> tuple[list, AnswerText]:
    """All parts, taken every so many tokens and at the end."""
    answer, parts = AnswerText(tokenizer, stop), []
    for count, token in enumerate(tokens, 1):
        over = answer.push(token, count % 2)
        if over or count % every == 0:
            parts.append(answer.take())
        if over:
            break
    return [*parts, answer.take(final=True)], answer


alphabet = st.sampled_from([*(PIECES.encode("a")), *range(256, PIECES.vocab_size), 97, 98, 99, 0xC3, 0xA9, 0xF0, 0x95])
strings = st.text(alphabet="abcé🐕SO�", min_size=1, max_size=4)


@given(st.lists(alphabet, max_size=14), st.lists(strings, max_size=3).map(tuple), st.integers(1, 5))
@example([97, 98, 97, 98, 99], ("abc",), 1)  # the first beginning of the stop string comes to nothing
@example([97, 98, 99], ("abcd", "bc"), 1)  # the one that is complete first, though the other begins before it
@example([97, 0xC3], ("a",), 1)
@settings(max_examples=300, deadline=None)
def test_any_tokens_give_the_text_before_the_first_stop_string(tokens: list[int], stop: tuple, every: int) -> None:
    parts, answer = feed(PIECES, tokens, stop, every)
    text = "".join(part.text for part in parts)
    decoder = StreamDecoder(PIECES)
    streamed = "".join(map(decoder.push, tokens))  # half a character at the end is no text yet
    cut = first_stop(streamed, stop)
    assert answer.stopped == (cut is not None)
    assert text == (streamed + decoder.flush() if cut is None else streamed[:cut])
    given = [t for part in parts for t in part.tokens]
    assert given == tokens[: len(given)]
    assert [m for part in parts for m in part.mask] == [(i + 1) % 2 for i in range(len(given))]
    if cut is None:
        assert given == tokens
    else:  # whole tokens before the stop string, and no token that reaches into it
        assert text.startswith(PIECES.decode(given)) or "�" in text
        following = PIECES.decode(tokens[: len(given) + 1])
        assert "�" in following or len(following) > cut


@given(st.text(alphabet="aé🐕𝄞�", max_size=8))
@settings(max_examples=60, deadline=None)
def test_characters_come_whole(text: str) -> None:
    parts, _ = feed(BYTES, BYTES.encode(text), ())
    assert [part.text for part in parts if part.text] == list(text)
    assert [t for part in parts for t in part.tokens] == BYTES.encode(text)


def test_an_answer_that_ends_inside_a_character_says_so() -> None:
    parts, _ = feed(BYTES, [97, 0xF0, 0x9F], ())
    assert [part.text for part in parts] == ["a", "", "", "�"]
    assert [part.tokens for part in parts] == [[97], [], [], [0xF0, 0x9F]]


def test_what_may_become_a_stop_string_waits() -> None:
    answer = AnswerText(BYTES, ("STOP", "SO"))
    shown = []
    for token in BYTES.encode("aSTSTOx"):
        answer.push(token, 1)
        shown.append(answer.take().text)
    assert shown == ["a", "", "", "ST", "", "", "STOx"]
    assert not answer.stopped and answer.take(final=True).text == ""


def test_tool_tokens_are_shown_by_name_and_can_be_stop_strings() -> None:
    parts, answer = feed(BYTES, [97, PS, 49], ())
    assert "".join(part.text for part in parts) == "a<|python_start|>1"
    parts, answer = feed(BYTES, [97, PS, 49], ("<|python_start|>",))
    assert answer.stopped and [t for part in parts for t in part.tokens] == [97]
