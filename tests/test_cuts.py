"""Texts cut so that no look-ahead is needed split into the same pieces."""

import regex
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat_lib import bpe, cuts
from nanochat_lib.tokenizer import Tokenizer

BLANKS = " \t\n\r\x0b\x0c\x85\xa0\u1680\u2003\u2028\u3000"
# Signs between which the pattern decides, letters of several scripts, a long s, marks, an emoji of two characters.
knots = st.text(st.sampled_from(BLANKS + "  \n'''sSlLveREtx19²٣.!-…éß中かनſ\u0301🇩\x1c\u200b"), max_size=40)


def pieces(text, pattern=bpe.SPLIT_PATTERN):
    return [piece for part in cuts.cut(text, 0) for piece in regex.findall(cuts.without_look_ahead(pattern), part)]


@settings(max_examples=300, deadline=None)
@given(st.one_of(knots, st.text(max_size=30)))
def test_the_pieces_are_those_of_the_pattern(text):
    assert "".join(cuts.cut(text, 0)) == text
    assert pieces(text) == bpe.split(text)


def test_every_blank_is_cut_at():
    for code in map(chr, range(0x10000)):
        text = f"a{code}{code}b {code} c\n{code}{code}d{code}"
        if regex.match(r"\s", code):
            assert pieces(text) == bpe.split(text), hex(ord(code))
        if code.isspace() and not regex.match(r"\s", code):
            assert pieces(text) == bpe.split(text), hex(ord(code))


def test_patterns_of_other_digits_are_known_and_others_are_not():
    for digits in (1, 2, 3):
        pattern = bpe.split_pattern(digits)
        assert pieces("on 12345  or", pattern) == regex.findall(pattern, "on 12345  or")
        assert not regex.search(r"\(\?!|\+\+|\?\+", cuts.without_look_ahead(pattern))
    assert cuts.without_look_ahead(r"\s+(?!\S)|\S+") is None


def test_parts_that_are_too_short_are_not_made():
    assert cuts.cut("a" * 40 + "  " + "b" * 70) == ["a" * 40 + " ", " " + "b" * 70]
    assert cuts.cut("a  b") is None and cuts.cut("ab") == ["ab"] and cuts.cut("") == [""]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(knots, st.integers(1, 9)), max_size=6))
def test_ids_of_long_texts_with_few_runs_of_blanks(parts):
    text = "".join("a plain sentence of some words, as most are. " * count + knot for knot, count in parts)
    for pattern in (bpe.SPLIT_PATTERN, r"\s+(?!\S)|\S+"):
        tokenizer = Tokenizer([b"  ", b"    ", b" a", b"\n\n", b"\n ", b"ai", b"s,"], pattern=pattern)
        (ids,) = tokenizer.encode_arrays([text], 7)
        assert ids.tolist() == [7, *tokenizer.encode(text)]
