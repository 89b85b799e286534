"""The corpus: the user's own files with the worst inputs, splits, order and fingerprint; the byte-bigram yardstick."""

import json
import math
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from nanochat_lib.corpus import byte_bigram_bpb, held_out, open_corpus
from nanochat_lib.errors import UserError
from nanochat_lib.presets import DataConfig

TEXTS = [f"document number {i} says {i * i}" for i in range(60)]


def opened(path):
    return open_corpus(DataConfig(corpus=str(path)), seed=0)


def both(corpus):
    return [*corpus.documents("train"), *corpus.documents("val")]


def write(path: Path, texts, row_group_size=7, **table) -> Path:
    """`texts` in the format of the path's suffix."""
    if path.suffix == ".txt":
        path.write_text("\n\n".join(texts), encoding="utf-8")
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")
    else:
        pq.write_table(pa.table({"text": pa.array(texts, pa.string()), **table}), path, row_group_size=row_group_size)
    return path


def error(path) -> str:
    with pytest.raises(UserError) as caught:
        opened(path)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("suffix", [".txt", ".jsonl", ".parquet"])
def test_every_format_gives_its_documents_once_split_in_two(tmp_path, suffix):
    corpus = opened(write(tmp_path / f"a{suffix}", TEXTS))
    train, val = list(corpus.documents("train")), list(corpus.documents("val"))
    assert sorted(train + val) == sorted(TEXTS)
    assert 1 <= len(val) <= 10
    assert train == [text for text in TEXTS if text in set(train)], "file order"
    assert (corpus.num_documents("train"), corpus.num_documents("val")) == (len(train), len(val))
    assert corpus.report.documents == 60 and corpus.report.skipped == 0
    assert corpus.report.characters == sum(map(len, TEXTS))
    assert list(corpus.documents("tokenizer")) == train


def test_formats_agree_on_the_split(tmp_path):
    """It depends on the documents, not on where or in which order they stand."""
    vals = [
        sorted(opened(write(tmp_path / name, texts)).documents("val"))
        for name, texts in (("a.txt", TEXTS), ("b.jsonl", TEXTS[::-1]), ("c.parquet", TEXTS))
    ]
    assert vals[0] == vals[1] == vals[2]


def test_start_skips_documents_over_file_borders(tmp_path):
    write(tmp_path / "a.txt", TEXTS[:25])
    write(tmp_path / "b.jsonl", TEXTS[25:40])
    write(tmp_path / "c.parquet", TEXTS[40:])
    corpus = opened(tmp_path)
    for split in ("train", "val"):
        whole = list(corpus.documents(split))
        for start in range(len(whole) + 2):
            assert list(corpus.documents(split, start)) == whole[start:]


def test_folder_of_shards_keeps_the_last_for_validation(tmp_path):
    for i in (2, 0, 1):
        write(tmp_path / f"shard_{i}.parquet", TEXTS[20 * i : 20 * i + 20])
    corpus = opened(tmp_path)
    assert list(corpus.documents("train")) == TEXTS[:40]
    assert list(corpus.documents("val")) == TEXTS[40:]


def test_equal_documents_stand_on_one_side(tmp_path):
    corpus = opened(write(tmp_path / "a.jsonl", TEXTS * 3))
    assert not set(corpus.documents("train")) & set(corpus.documents("val"))


@pytest.mark.parametrize("count", [2, 3, 5])
def test_few_documents_still_have_both_sides(tmp_path, count):
    for first in range(20):
        texts = [f"{first}-{i}" for i in range(count)]
        corpus = opened(write(tmp_path / "a.txt", texts))
        assert corpus.num_documents("train") >= 1 and corpus.num_documents("val") >= 1
        assert sorted(both(corpus)) == sorted(texts)
        assert len(list(corpus.documents("train"))) == corpus.num_documents("train")


def test_documents_that_would_all_be_validation_leave_one_for_training(tmp_path):
    whole = opened(write(tmp_path / "many.txt", [f"text {i}" for i in range(400)]))
    texts = list(whole.documents("val"))[:3]
    corpus = opened(write(tmp_path / "few.txt", texts))
    assert (corpus.num_documents("train"), corpus.num_documents("val")) == (1, 2)
    assert sorted(both(corpus)) == sorted(texts)


def test_fingerprint_follows_the_documents(tmp_path):
    prints = [
        opened(write(tmp_path / "a.jsonl", texts)).fingerprint
        for texts in (TEXTS, TEXTS, TEXTS[::-1], [*TEXTS[:-1], "x"], TEXTS[:-1])
    ]
    assert prints[0] == prints[1] and len(set(prints)) == 4


def test_skipped_documents_are_counted_and_named(tmp_path):
    path = tmp_path / "bad.jsonl"
    lines = [
        b'{"text": "good one"}',
        b'{"text": "cut off',
        b"",
        b'{"text": null}',
        b'{"text": "  \\n "}',
        b'{"text": 7}',
        b'{"body": "other"}',
        b"[1, 2]",
        b'{"text": "\xff\xfe"}',
        b'{"text": "half \\ud83d"}',
        b"[" * 100_000,
        b'{"text": "good two"}',
    ]
    path.write_bytes(b"\n".join(lines))
    corpus = opened(path)
    assert sorted(both(corpus)) == ["good one", "good two"]
    report = corpus.report
    assert (report.documents, report.empty, report.skipped) == (2, 1, 9)
    reasons = dict(report.broken)
    assert list(reasons) == [f"bad.jsonl, line {n}" for n in (2, 4, 5, 6, 7, 8, 9, 10, 11)]
    for line, word in ((4, "null"), (5, "empty"), (6, "int"), (7, "body"), (8, "list"), (10, "surrogate")):
        assert word in reasons[f"bad.jsonl, line {line}"]


def test_text_that_is_not_utf8_is_skipped_alone(tmp_path):
    path = tmp_path / "a.txt"
    path.write_bytes(b"\xef\xbb\xbffirst\r\nline\r\n\r\nbr\xffken\nline\n\n\n \t\nlast")
    corpus = opened(path)
    assert sorted(both(corpus)) == ["first\nline", "last"]
    assert corpus.report.broken[0][0] == "a.txt, line 4" and "UTF-8" in corpus.report.broken[0][1]


def test_parquet_nulls_and_empty_strings(tmp_path):
    corpus = opened(write(tmp_path / "a.parquet", [None, "a", "", "b", "   ", "c"]))
    assert sorted(both(corpus)) == ["a", "b", "c"]
    assert corpus.report.empty == 2 and corpus.report.skipped == 3
    assert ("a.parquet, row 1", "null") in corpus.report.broken


def test_many_broken_documents_are_all_counted_but_not_all_named(tmp_path):
    corpus = opened(write(tmp_path / "a.parquet", TEXTS + [""] * 5000))
    assert corpus.report.empty == 5000 and len(corpus.report.broken) == 100


def test_a_shard_without_rows_is_no_endless_loop(tmp_path):
    write(tmp_path / "a.parquet", [])
    write(tmp_path / "b.parquet", TEXTS[:5])
    write(tmp_path / "c.parquet", TEXTS[5:9])
    assert list(opened(tmp_path).documents("train")) == TEXTS[:5]


def test_errors_name_the_file_and_the_way_out(tmp_path):
    write(tmp_path / "one.txt", ["only one"])
    assert "1 usable" in error(tmp_path / "one.txt")
    write(tmp_path / "same.txt", ["same", "same", "same"])
    assert "3 usable" in error(tmp_path / "same.txt")
    (tmp_path / "empty.txt").write_bytes(b"")
    assert "empty.txt is empty: 0 usable documents" in error(tmp_path / "empty.txt")
    write(tmp_path / "blank.jsonl", ["", " ", "\n"])
    assert "3 empty" in error(tmp_path / "blank.jsonl")
    assert "no corpus at" in error(tmp_path / "nothing.txt")
    (tmp_path / "a.csv").write_text("text\nx")
    assert ".parquet" in error(tmp_path / "a.csv")
    (tmp_path / "folder").mkdir()
    assert "holds no" in error(tmp_path / "folder")
    (tmp_path / "folder" / "readme.md").write_text("hello")
    assert "holds no" in error(tmp_path / "folder")


def test_parquet_errors_name_file_and_columns(tmp_path):
    pq.write_table(pa.table({"content": ["a", "b"], "n": [1, 2]}), tmp_path / "columns.parquet")
    message = error(tmp_path / "columns.parquet")
    assert "columns.parquet" in message and "content, n" in message
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "ints.parquet")
    assert "int64" in error(tmp_path / "ints.parquet")


def test_validation_must_not_be_empty(tmp_path):
    """Before training, not after the first epoch."""
    write(tmp_path / "a.parquet", TEXTS)
    write(tmp_path / "b.parquet", [])
    assert "0 for validation" in error(tmp_path)


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.98])
def test_half_downloaded_parquet(tmp_path, share):
    path = write(tmp_path / "cut.parquet", TEXTS * 50)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    assert "cut.parquet" in error(path) and "fetch it again" in error(path)


def test_damage_inside_a_parquet_file_is_named(tmp_path):
    path = write(tmp_path / "hole.parquet", [str(np.random.default_rng(i).bytes(300)) for i in range(200)])
    data = bytearray(path.read_bytes())
    data[200 : len(data) // 2] = bytes(len(data) // 2 - 200)
    path.write_bytes(data)
    assert "hole.parquet" in error(path)


def test_climbmix_without_shards_says_where_it_looked(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    message = error("climbmix")
    assert str(tmp_path / "base_data_climbmix") in message and "--corpus" in message and "cpu" in message


def test_climbmix_validation_shard_is_pinned(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    folder = tmp_path / "base_data_climbmix"
    folder.mkdir()
    write(folder / "shard_00000.parquet", TEXTS[:20])
    write(folder / "shard_00001.parquet", TEXTS[20:40])
    assert "shard_06542.parquet" in error("climbmix")
    write(folder / "shard_06542.parquet", TEXTS[40:])
    assert list(opened("climbmix").documents("val")) == TEXTS[40:]


def test_unknown_split(tmp_path):
    corpus = opened(write(tmp_path / "a.txt", TEXTS))
    for call in (corpus.num_documents, lambda split: list(corpus.documents(split))):
        with pytest.raises(UserError, match="known: train, val"):
            call("test")


def test_byte_bigram_against_counting():
    train, val, alpha = ["abab", "é"], ["abb", "bé"], 0.5
    pairs, firsts = {}, {}
    for text in train:
        data = [0, *text.encode()]
        for a, b in zip(data, data[1:], strict=False):
            pairs[a, b] = pairs.get((a, b), 0) + 1
            firsts[a] = firsts.get(a, 0) + 1
    bits, count = 0.0, 0
    for text in val:
        data = [0, *text.encode()]
        for a, b in zip(data, data[1:], strict=False):
            bits -= math.log2((pairs.get((a, b), 0) + alpha) / (firsts.get(a, 0) + 256 * alpha))
            count += 1
    assert byte_bigram_bpb(train, val, alpha) == pytest.approx(bits / count, rel=1e-12)
    assert byte_bigram_bpb([], ["anything"]) == pytest.approx(8.0)
    with pytest.raises(UserError):
        byte_bigram_bpb(["a"], [""])


def test_held_out_is_decided_by_content():
    texts = [f"document {i} é" for i in range(4000)]
    sides = [held_out(text) for text in texts]
    assert 0.04 < sum(sides) / len(sides) < 0.06
    assert sides == [held_out("".join(text)) for text in texts]
    assert [held_out(text, 0.5) for text in ("a", "b", "c", "d", "e", "f")] == [False, False, True, True, True, True]
