"""The tokenizer against nanochat's published vectors, the plain-Python oracle, and inputs that broke others."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import regex
import tiktoken
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanochat_lib import bpe, storage, tokenizer_input
from nanochat_lib import tokenizer as tokenizer_module
from nanochat_lib.compression import compression_report
from nanochat_lib.errors import UserError
from nanochat_lib.tokenizer import (
    SPECIAL_TOKENS,
    SPLIT_PATTERN,
    StreamDecoder,
    Tokenizer,
    single_token_after,
    train_bpe_python,
)
from nanochat_lib.tokenizer_input import capped, replace_surrogates

DOCUMENTS = [
    "low low low low lower lower newest newest newest widest",
    "aaaa aaaa bbbb abab",
    "It's 12345 and 99.\n\n  Done!\n",
] * 3
MERGES = [
    "aa", "lo", "low", " low", "es", "ne", "est", " ne", "bb", "west", " newest", " a", "er", "aaaa", " lower", "\n\n",
    " D", " w", " bb", " aaaa", "!\n", "'s", ".\n\n", "12", "34", "99", "It", "ab", "bab", "dest",
]  # fmt: skip
ENCODINGS = {
    "newest lower": [261, 265, 270],
    "aaaa abab": [269, 267, 284],
    "It's 12345 and 99.\n\n  Done!\n": [
        282,
        277,
        32,
        279,
        280,
        53,
        267,
        110,
        100,
        32,
        281,
        278,
        32,
        272,
        111,
        261,
        276,
    ],
    "  x\n\n  y": [32, 32, 120, 271, 32, 32, 121],
    "naïve": [110, 97, 195, 175, 118, 101],
    "<|bos|>hi": [60, 124, 98, 111, 115, 124, 62, 104, 105],
    "": [],
}
ONE_LINE = r"^[^\n]+$"

# Few distinct signs make ties, overlaps and repeats likely; the second strategy covers all of Unicode.
knots = st.text(alphabet="aab 1\n!'é", max_size=30)
whole = st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=60)


LEARNED = Tokenizer.train(DOCUMENTS, 295)


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return LEARNED


# --- the pattern


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        (
            "Hello world! It's 12345.  two  spaces\n\n  indented\tTab\r\nend",
            ["Hello", " world", "!", " It", "'s", " ", "12", "34", "5", ".", " ", " two", " ", " spaces", "\n\n", " "]
            + [" indented", "\tTab", "\r\n", "end"],
        ),
        (
            "I'M you'RE don't  ...---  99.5% x²",
            ["I", "'M", " you", "'RE", " don", "'t", " ", " ...---", " ", " ", "99", ".", "5", "%", " x", "²"],
        ),
        ("a\n \n b", ["a", "\n \n", " b"]),
        (" 12345", [" ", "12", "34", "5"]),
    ],
)
def test_split(text, pieces):
    assert bpe.split(text) == pieces


def test_pattern_is_the_published_one():
    assert len(SPLIT_PATTERN) == 109
    assert SPLIT_PATTERN == (
        r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}"
        r"| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
    )


@pytest.mark.parametrize(("digits", "pieces"), [(1, "1 2 3 4 5"), (2, "12 34 5"), (3, "123 45"), (5, "12345")])
def test_digits_come_in_runs_of_the_size_asked_for(digits, pieces):
    assert regex.findall(bpe.split_pattern(digits), "12345") == pieces.split()


# --- training


def test_published_merges(tokenizer):
    assert [token.decode() for token in tokenizer.merges] == MERGES
    assert tokenizer.vocab_size == 295
    assert tokenizer.special_tokens == {name: 286 + i for i, name in enumerate(SPECIAL_TOKENS)}
    assert tokenizer.bos_id == 286


def test_oracle_learns_the_published_merges():
    assert [token.decode() for token in train_bpe_python(DOCUMENTS, 295)] == MERGES


@settings(max_examples=150, deadline=None)
@given(st.lists(knots, min_size=1, max_size=6), st.integers(0, 40))
@example(["aaaa aaa aa a"], 10)  # overlaps
@example(["ab ba cd dc"], 20)  # only ties
def test_trainer_equals_oracle(documents, count):
    size = 265 + count
    if not any(documents):
        documents = ["x"]
    assert list(Tokenizer.train(documents, size, strict=False).merges) == train_bpe_python(documents, size)


def test_ties_go_to_the_smallest_pair():
    assert Tokenizer.train(["ba", "ab", "Zz"], 266).merges == (b"Zz",)
    assert train_bpe_python(["ba", "ab", "Zz"], 266) == [b"Zz"]


def test_count_pairs_counts_overlaps_and_merge_does_not():
    assert bpe.count_pairs([([97] * 4, 5)]) == {(97, 97): 15}
    assert bpe.merge([97] * 5, (97, 97), 256) == [256, 256, 97]
    assert bpe.merge([1, 2, 3, 1, 2], (1, 2), 9) == [9, 3, 9]


def test_exhausted_text_reports_the_real_size():
    small = Tokenizer.train(["ab"], 295, strict=False)
    assert (small.vocab_size, small.bos_id, small.merges) == (266, 257, (b"ab",))
    ids = [small.encode_special(name) for name in SPECIAL_TOKENS]
    assert ids == list(range(257, 266))
    assert len(small.token_bytes()) == small.vocab_size
    with pytest.raises(UserError, match=r"1,000 is more than this text allows: ask for at most 267"):
        Tokenizer.train(["ab ab"], 1000)
    assert Tokenizer.train(["ab ab"], 267).vocab_size == 267


@pytest.mark.parametrize("documents", [[], iter([]), ["", ""]])
def test_empty_corpus_is_an_error(documents):
    with pytest.raises(UserError, match="holds no text"):
        Tokenizer.train(documents, 300)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((["ab"], 264), "too small.*265"),
        (("one long string", 300), "many documents"),
        ((["a", None], 300), "document 1 .*NoneType"),
        ((["a", b"b"], 300), "document 1 .*bytes"),
    ],
)
def test_bad_training_input(arguments, message):
    with pytest.raises(UserError, match=message):
        Tokenizer.train(*arguments)


def test_an_error_inside_the_stream_comes_through():
    def broken():
        yield "abc"
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        Tokenizer.train(broken(), 265)


def test_caps_apply_while_streaming():
    taken = []

    def documents():
        for i in range(10):
            taken.append(i)
            yield "x" * 10_000_000 if i == 0 else "yz " * 1000

    read = list(capped(documents(), max_chars=15_000, doc_cap=10_000))
    assert [len(text) for text in read] == [10_000, 3000, 3000]  # the document that crosses the total is still read
    assert taken == [0, 1, 2]


def test_document_cap_reaches_the_trainer():
    assert Tokenizer.train(["ab" + "cd" * 50], 300, doc_cap=2, strict=False).merges == (b"ab",)
    assert Tokenizer.train(["ab", "cd", "cd"], 300, max_chars=1, strict=False).merges == (b"ab",)


@pytest.mark.parametrize("limits", [{"doc_cap": 0}, {"max_chars": 0}, {"doc_cap": 2_000_000}])
def test_bad_caps(limits):
    with pytest.raises(UserError, match="doc_cap"):
        Tokenizer.train(["ab"], 265, **limits)


def test_long_corpora_show_progress(monkeypatch, capsys):
    monkeypatch.setattr(tokenizer_input, "SHOW_FROM", 100)
    Tokenizer.train(["hello there "] * 50, 270)
    assert "reading text for the tokenizer: 600/600 characters" in capsys.readouterr().err
    monkeypatch.setattr(tokenizer_input, "SHOW_FROM", 10**6)
    Tokenizer.train(["hello there "] * 50, 270)
    assert capsys.readouterr().err == ""


# --- encoding and decoding


@pytest.mark.parametrize(("text", "ids"), ENCODINGS.items())
def test_published_encodings(tokenizer, text, ids):
    assert tokenizer.encode(text) == ids
    assert tokenizer(text) == ids
    assert bpe.encode(text, list(tokenizer.merges)) == ids
    assert tokenizer.decode(ids) == text


@settings(max_examples=200, deadline=None)
@given(st.one_of(knots, whole))
def test_round_trip(text):
    tokenizer = TOKENIZER
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.token_bytes()[ids].sum() == len(text.encode())


@settings(max_examples=150, deadline=None)
@given(st.lists(knots, min_size=1, max_size=5), knots)
def test_encoder_equals_oracle(documents, text):
    tokenizer = Tokenizer.train([*documents, "ab"], 300, strict=False)
    assert tokenizer.encode(text) == bpe.encode(text, list(tokenizer.merges))


@pytest.mark.parametrize(
    "text",
    [
        "a\x00b",
        "\ufeffabc",
        "a\r\nb\rc",
        "\u00e9",
        "e\u0301",
        "👩\u200d👩\u200d👧",
        "\x1c\x1d\x85\u2028 \u3000x",
        " \t \n",
    ],
)
def test_unusual_text_is_kept_byte_for_byte(tokenizer, text):
    ids = tokenizer.encode(text)
    assert b"".join(map(tokenizer.id_to_bytes, ids)) == text.encode()
    assert bpe.encode(text, list(tokenizer.merges)) == ids


def test_lone_surrogates_become_the_replacement_character(tokenizer):
    assert replace_surrogates("a\ud800b\udfff\ud83d\ude42") == "a\ufffdb\ufffd🙂"
    assert tokenizer.encode("a\ud800b") == [97, 239, 191, 189, 98]
    assert tokenizer.encode(["a\ud800b"] * 20) == [[97, 239, 191, 189, 98]] * 20
    assert (
        Tokenizer.train(["\ud800\ud800"], 270, strict=False).merges
        == Tokenizer.train(["\ufffd\ufffd"], 270, strict=False).merges
    )
    assert train_bpe_python(["\ud800"], 266) == [b"\xbf\xbd"]


def test_batch_equals_one_by_one_in_order(tokenizer):
    texts = [text * (i % 7) for i, text in enumerate(list(ENCODINGS) * 40)]
    assert tokenizer.encode(texts) == [tokenizer.encode(text) for text in texts]
    assert tokenizer.encode(texts, num_threads=1) == tokenizer.encode(texts, num_threads=3)
    assert tokenizer.encode([]) == []
    assert tokenizer.encode(text for text in ["aa", "lo"]) == [[256], [257]]


@settings(max_examples=100, deadline=None)
@given(st.lists(st.one_of(knots, whole, st.sampled_from(["<|bos|>", "\ud83d", "a<|user_end|>b", ""])), max_size=9))
def test_arrays_hold_the_same_ids(texts):
    arrays = LEARNED.encode_arrays(texts, LEARNED.bos_id, num_threads=2)
    assert [row.tolist() for row in arrays] == LEARNED.encode(texts, prepend=LEARNED.bos_id)
    assert all(row.dtype == np.int32 and row.flags.owndata for row in arrays)


def test_arrays_of_long_runs_of_blanks(tokenizer):
    text = "a!" + " " * 100_001 + "b"
    (row,) = tokenizer.encode_arrays([text], 7)
    assert row.tolist() == [7, *tokenizer.encode(text)]


def test_many_threads_share_one_tokenizer(tokenizer):
    texts = list(ENCODINGS) * 20
    expected = [ENCODINGS[text] for text in texts]
    with ThreadPoolExecutor(8) as pool:
        assert all(result == expected for result in pool.map(lambda _: tokenizer.encode(texts), range(16)))


def test_prepend_and_append(tokenizer):
    end = tokenizer.encode_special("<|assistant_end|>")
    assert tokenizer.encode("aa", prepend="<|bos|>", append=end) == [286, 256, 290]
    assert tokenizer.encode(["aa", ""], prepend=tokenizer.bos_id) == [[286, 256], [286]]
    with pytest.raises(UserError, match="outside the vocabulary"):
        tokenizer.encode("aa", prepend=295)
    with pytest.raises(UserError, match="not a special token"):
        tokenizer.encode("aa", append="aa")


@pytest.mark.parametrize("text", [None, 3, b"abc", ["a", None], [["a"]]])
def test_encode_refuses_what_is_no_text(tokenizer, text):
    with pytest.raises(UserError, match="a string or a list of strings"):
        tokenizer.encode(text)


@pytest.mark.parametrize("name", SPECIAL_TOKENS)
def test_special_tokens_are_single_ids_after_the_ordinary_ones(tokenizer, name):
    special = tokenizer.encode_special(name)
    assert special >= 256 + len(tokenizer.merges)
    assert tokenizer.decode([special]) == name
    assert special not in tokenizer.encode(name) and tokenizer.decode(tokenizer.encode(name)) == name
    assert tokenizer.token_bytes()[special] == 0


@pytest.mark.parametrize("name", ["t", "", "hello world", "aa", "<|eos|>"])
def test_only_declared_names_are_special(tokenizer, name):
    with pytest.raises(UserError, match=r"not a special token.*<\|bos\|>.*<\|output_end\|>"):
        tokenizer.encode_special(name)


@pytest.mark.parametrize("bad", [295, 300, 10**12, -1])
def test_ids_outside_the_vocabulary_are_an_ordinary_error(tokenizer, bad):
    with pytest.raises(UserError, match=f"{bad} is outside the vocabulary of 295"):
        tokenizer.decode([97, bad])
    with pytest.raises(UserError, match="outside the vocabulary"):
        tokenizer.id_to_bytes(bad)


def test_decode_takes_arrays_and_replaces_broken_bytes(tokenizer):
    assert tokenizer.decode(np.array([269, 267], np.int32)) == "aaaa a"
    assert tokenizer.decode([195]) == "\ufffd"


def test_token_bytes_counts_raw_bytes(tokenizer):
    table = tokenizer.token_bytes()
    assert table.dtype == np.int32 and table.shape == (295,)
    assert (table[:256] == 1).all()  # also the bytes from 0x80 on, which are no text of their own
    assert list(table[256:286]) == [len(text) for text in MERGES]
    assert (table[286:] == 0).all()


# --- long input


@pytest.mark.parametrize("sign", ["a", " ", "!", "é", "\n", "1"])
@pytest.mark.parametrize("encode", ["tiktoken", "oracle"])
def test_time_grows_about_linearly_on_runs_without_a_split(tokenizer, sign, encode):
    function = tokenizer.encode if encode == "tiktoken" else lambda text: bpe.encode(text, list(tokenizer.merges))
    short, long = min(_cpu_times(function, sign * 8_000, 5)), min(_cpu_times(function, sign * 128_000, 3))
    assert long / short < 80  # 16 times as long: a quadratic encoder takes 256 times as long


def _cpu_times(function, text: str, repeats: int) -> list[float]:
    times = []
    for _ in range(repeats):
        began = time.thread_time()
        function(text)
        times.append(max(time.thread_time() - began, 1e-4))
    return times


blanky = st.lists(
    st.one_of(
        st.sampled_from(["a", "b", "!", "'s", "1", "é", "\u0301"]),
        st.text(alphabet=" \n\r\t\xa0", min_size=1, max_size=9),
    ),
    max_size=12,
).map("".join)


@settings(max_examples=400, deadline=None)
@given(blanky)
@example("!\n\n\n   \nx")
@example("!\n\n\n    x")
@example("a\n\n\n\nx")
@example("    ")
@example("   \n")
def test_long_runs_of_blanks_are_cut_like_the_pattern_cuts_them(text):
    usual = TOKENIZER._encoding.encode_ordinary(text)
    limit, tokenizer_module.LONG_BLANKS = tokenizer_module.LONG_BLANKS, 3
    try:
        assert BLANK_TOKENIZER._encode_long(text) == BLANK_TOKENIZER._encoding.encode_ordinary(text)
        assert TOKENIZER._encode_long(text) == usual
    finally:
        tokenizer_module.LONG_BLANKS = limit


@pytest.mark.parametrize("text", [" " * 1_200_000, "x" + "\t " * 600_000 + "x", "!\n" + " " * 1_200_000 + "\r\n x"])
def test_blanks_beyond_the_pattern_engines_stack(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


# --- on disk


@pytest.fixture
def saved(tokenizer, tmp_path):
    tokenizer.save(tmp_path / "tokenizer")
    return tmp_path / "tokenizer"


def test_save_and_load(tokenizer, saved):
    again = Tokenizer.load(saved)
    assert again.fingerprint == tokenizer.fingerprint and again.special_tokens == tokenizer.special_tokens
    assert [again.encode(text) for text in ENCODINGS] == list(ENCODINGS.values())
    table = np.load(saved / "token_bytes.npy", allow_pickle=False)
    assert table.dtype == np.int32 and (table == tokenizer.token_bytes()).all()
    assert sorted(os.listdir(saved)) == ["token_bytes.npy", "tokenizer.json"]
    assert json.loads((saved / "tokenizer.json").read_text("utf-8"))["fingerprint"] == tokenizer.fingerprint


def test_saving_is_repeatable_and_replaces(tokenizer, saved):
    before = (saved / "tokenizer.json").read_bytes()
    Tokenizer.train(["ab"], 266).save(saved)
    assert Tokenizer.load(saved).vocab_size == 266
    tokenizer.save(saved)
    assert (saved / "tokenizer.json").read_bytes() == before


def test_fingerprint_depends_on_everything_that_decides_ids(tokenizer):
    merges = list(tokenizer.merges)
    others = [
        Tokenizer(merges[:-1]),
        Tokenizer([*merges[:-2], merges[-1], merges[-2]]),
        Tokenizer(merges, SPECIAL_TOKENS[:-1]),
        Tokenizer(merges, [*SPECIAL_TOKENS[:-2], SPECIAL_TOKENS[-1], SPECIAL_TOKENS[-2]]),
        Tokenizer(merges, pattern=SPLIT_PATTERN.replace("{1,2}", "{1,3}")),
    ]
    prints = {other.fingerprint for other in others}
    assert len(prints) == len(others) and tokenizer.fingerprint not in prints
    assert Tokenizer(merges).fingerprint == tokenizer.fingerprint
    # fixed for ever: checkpoints carry it
    assert tokenizer.fingerprint == "50024d04d7a1c8086f411217328e7c6361f1846cb4a4eb295370049a8a65c6bb"


def _edit(**changes):
    def apply(data: bytes) -> bytes:
        return json.dumps(json.loads(data) | changes).encode()

    return apply


def _swap_merges(data: bytes) -> bytes:
    content = json.loads(data)
    content["merges"][0], content["merges"][1] = content["merges"][1], content["merges"][0]
    return json.dumps(content).encode()


def _shift_special(data: bytes) -> bytes:
    content = json.loads(data)
    content["special_tokens"]["<|output_end|>"] += 1
    return json.dumps(content).encode()


DAMAGE = {
    "half": lambda data: data[: len(data) // 2],
    "empty": lambda data: b"",
    "not an object": lambda data: b"[]",
    "binary": lambda data: bytes(range(256)),
    "swapped": _swap_merges,
    "shifted": _shift_special,
    "no merges": _edit(merges=[]),
    "merges null": _edit(merges=None),
    "not hex": _edit(merges=["zz"]),
    "number": _edit(merges=[7]),
    "duplicates": _edit(merges=["6161", "6161"]),
    "empty token": _edit(merges=[""]),
    "pattern": _edit(pattern="(", merges=[]),
    "no pattern": _edit(pattern=None),
    "specials": _edit(special_tokens=["<|bos|>"]),
    "fingerprint": _edit(fingerprint="0" * 64),
    "format": _edit(format="other"),
}


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE.keys())
def test_a_damaged_file_is_named(saved, damage):
    path = saved / "tokenizer.json"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError, match=ONE_LINE) as error:
        Tokenizer.load(saved)
    assert str(path) in str(error.value)
    assert "again" in str(error.value)  # how to mend it


@pytest.mark.parametrize("damage", ["missing", "half", "other", "pickle"])
def test_a_damaged_table_is_named(saved, damage):
    path = saved / "token_bytes.npy"
    if damage == "missing":
        path.unlink()
    elif damage == "half":
        path.write_bytes(path.read_bytes()[:200])
    elif damage == "other":
        np.save(path, np.arange(295, dtype=np.int32))
    else:
        np.save(path, np.array([{"a": 1}], dtype=object), allow_pickle=True)
    with pytest.raises(UserError, match="token_bytes.npy is missing, damaged or another"):
        Tokenizer.load(saved)


def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(UserError, match=r"tokenizer\.json does not exist"):
        Tokenizer.load(tmp_path / "nowhere")


def test_an_interrupted_save_leaves_the_old_file(tokenizer, saved, monkeypatch):
    before = (saved / "tokenizer.json").read_bytes()

    def fail(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(storage.os, "replace", fail)
    with pytest.raises(UserError):
        Tokenizer(tokenizer.merges[:3]).save(saved)
    monkeypatch.undo()
    assert (saved / "tokenizer.json").read_bytes() == before
    assert sorted(os.listdir(saved)) == ["token_bytes.npy", "tokenizer.json"]
    assert Tokenizer.load(saved).vocab_size == 295


def test_constructor_refuses_what_cannot_be_a_tokenizer():
    for merges in ([b"aa", b"aa"], [b"a"], [b""]):
        with pytest.raises(UserError, match="different tokens"):
            Tokenizer(merges)
    with pytest.raises(UserError, match="listed twice"):
        Tokenizer([], ["<|bos|>", "<|bos|>"])
    with pytest.raises(UserError, match=r"<\|bos\|>.*not a special token"):
        _ = Tokenizer([], ["<|other|>"]).bos_id


# --- streams, answers, compression


@settings(max_examples=150, deadline=None)
@given(whole)
@example("🐕é")
def test_streaming_never_shows_half_a_character(text):
    decoder = StreamDecoder(TOKENIZER)
    parts = [decoder.push(i) for i in TOKENIZER.encode(text)]
    assert "".join(parts) == text and decoder.flush() == ""
    if "\ufffd" not in text:
        assert not any("\ufffd" in part for part in parts)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.integers(0, 294), max_size=30))
def test_streaming_any_ids_equals_decode(ids):
    decoder = StreamDecoder(TOKENIZER)
    assert "".join([*map(decoder.push, ids), decoder.flush()]) == TOKENIZER.decode(ids)


def test_streaming_holds_back_only_what_is_incomplete(tokenizer):
    decoder = StreamDecoder(tokenizer)
    assert [decoder.push(i) for i in [97, 195, 169, 256]] == ["a", "", "é", "aa"]
    assert decoder.push(195) == "" and decoder.flush() == "\ufffd"


def test_answer_letters_must_be_one_token_after_the_prompt():
    learned = Tokenizer.train(["red=A blue=B"] * 3, 280, strict=False)
    assert b"=A" in learned.merges  # the pattern glues a sign to the letters after it
    with pytest.raises(UserError, match="'A' is not one token after 'red='"):
        single_token_after(learned, "red=", "A")
    glued = Tokenizer([b"=A", b" A"])
    assert glued.encode("=A") == [256] and glued.encode(" A") == [257]
    with pytest.raises(UserError, match="'A' is not one token after 'red='"):
        single_token_after(glued, "red=", "A")
    with pytest.raises(UserError, match="not one token"):
        single_token_after(glued, "Answer: ", "A")
    assert single_token_after(glued, "Answer:", " A") == 257
    assert single_token_after(glued, "Answer:\n", "B") == ord("B")
    regrouped = Tokenizer([b"bc", b"ab"])  # ab | then a, bc: one id more, but not the same ids before it
    with pytest.raises(UserError, match="not one token"):
        single_token_after(regrouped, "ab", "c")
    with pytest.raises(UserError, match="not one token"):
        single_token_after(glued, "Answer:", " AB")
    with pytest.raises(UserError, match="not one token"):
        single_token_after(glued, "Answer:", "")


def test_compression_report(tokenizer):
    texts = {"known": DOCUMENTS[0], "korean": "안녕", "broken": "\ud800", "none": ""}
    rows = compression_report({"bytes": Tokenizer([]), "own": tokenizer}, texts)
    assert [(row["text"], row["tokenizer"]) for row in rows] == [(t, k) for t in texts for k in ("bytes", "own")]
    for row in rows[::2]:
        assert row["tokens"] == row["bytes"] and row["saved_percent"] == 0
    own = rows[1]
    tokens = len(tokenizer.encode(DOCUMENTS[0]))
    assert own["bytes"] == 55 and own["tokens"] == tokens and own["bytes_per_token"] == 55 / tokens
    assert own["saved_percent"] == pytest.approx(100 * (55 - tokens) / 55)
    assert [row["round_trip"] for row in rows] == [True] * 4 + [False] * 2 + [True] * 2


def test_encoder_agrees_with_tiktoken_built_from_the_same_ranks(tokenizer):
    ranks = {tokenizer.id_to_bytes(i): i for i in range(286)}
    other = tiktoken.Encoding("other", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens={})
    for text in ENCODINGS:
        assert other.encode_ordinary(text) == tokenizer.encode(text)


TOKENIZER = Tokenizer([text.encode() for text in MERGES])
BLANK_TOKENIZER = Tokenizer([b"  ", b"    ", b"\n\n", b"!\n", b"!\n\n", b" a", b"\r\n", b"\n ", b" \n", b"  \n"])
