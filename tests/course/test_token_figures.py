"""The figures of chapter 01 show what the tokenizer really does, and the texts it compares are parallel."""

import pytest

from nanochat_lib import bpe
from nanochat_lib.course.parallel_text import PARALLEL
from nanochat_lib.course.token_figures import as_text, merge_replay, rounds, token_map
from nanochat_lib.tokenizer import Tokenizer

TEXT = "low lower newest widest naïve 中文 🐕 " * 3
TOKENIZER = Tokenizer(bpe.learn_merges([TEXT], 40))
RANKS = {TOKENIZER.id_to_bytes(i): i for i in range(TOKENIZER.bos_id)}


@pytest.mark.parametrize("piece", [piece.encode() for piece in sorted(set(bpe.split(TEXT)))] + [b"", b"\xff"])
def test_the_replay_ends_where_encoding_ends(piece):
    steps = rounds(piece, RANKS)
    assert [RANKS[part] for part in steps[-1][0]] == bpe.encode_piece(piece, RANKS)
    made = [RANKS[token] for _, token in steps[1:]]
    assert made == sorted(made)  # a merge never makes room for one of a lower rank
    assert all(b"".join(parts) == piece for parts, _ in steps)


@pytest.mark.parametrize("text", [TEXT, "", "a", "x" * 900])
def test_any_text_can_be_drawn(text):
    shown = " ".join(t.get_text() for t in token_map(TOKENIZER.encode(text), TOKENIZER).axes[0].texts)
    assert shown.startswith(f"{len(text.encode())} bytes in {len(TOKENIZER.encode(text))} tokens")
    assert merge_replay(text.encode()[:40], TOKENIZER.merges).axes


def test_a_mask_stands_under_the_ids():
    shown = [t.get_text() for t in token_map([97, 98, 99], TOKENIZER, [0, 1, 1]).axes[0].texts]
    assert shown[0].startswith("2 of 3 tokens are trained")
    assert [text for text in shown if text.startswith("mask")] == ["mask 0", "mask 1", "mask 1"]


def test_half_a_character_is_shown_as_its_byte():
    assert as_text("é".encode()[:1]) == "c3" and as_text(b" low") == "·low"


def test_every_language_tells_the_same_nine_sentences():
    assert {len(sentences) for sentences in PARALLEL.values()} == {9}
    assert len({sentence for sentences in PARALLEL.values() for sentence in sentences}) == 9 * len(PARALLEL)
