"""Corpora of shards: nothing but footers at the start, shares of row groups, exact resume, buckets that fail."""

import gc
import json
import signal
import sys
import threading
from collections import Counter
from dataclasses import replace
from itertools import islice
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shaky import Shaky, damaged_inside, folder, shard
from test_loader import TOKENIZER, ByteTokenizer, arrays

from nanochat_lib import parquet
from nanochat_lib.corpus import FileCorpus, open_corpus
from nanochat_lib.errors import UserError
from nanochat_lib.loader import PretrainLoader, deal_anew, share_states
from nanochat_lib.presets import DataConfig, preset
from nanochat_lib.pretrain import step_batches
from nanochat_lib.shards import KNOWN, ShardCorpus
from nanochat_lib.shares import EveryRowGroup, deal_groups, open_share, smallest_share

sys.path.append(str(Path(__file__).parents[1] / "scripts" / "bench"))
from loader import plain_loader

BUCKET = "shaky://bucket/corpus"


@pytest.fixture(autouse=True)
def bucket(monkeypatch):
    """An empty bucket, no waiting between attempts, and 60 seconds in which a test must end."""
    Shaky.fresh()
    monkeypatch.setattr(parquet, "WAITS", (0.0, 0.0, 0.0))
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("the test does not end")))
    signal.alarm(60)
    yield Shaky
    signal.alarm(0)


def opened(url, **data):
    return open_corpus(DataConfig(corpus=str(url), **data), seed=0)


def error(url) -> str:
    with pytest.raises(UserError) as caught:
        opened(url)
    message = str(caught.value)
    assert "\n" not in message
    return message


def read_all(share, most=3):
    """All texts of a share until its end, and how many documents were read."""
    texts, count = [], 0
    while (fetched := share.fetch(most))[0]:
        count += fetched[0]
        texts += fetched[1]
        assert fetched[0] <= most and count <= share.read < 10 * share.documents
    share.close()
    return texts, count


layouts = st.lists(st.lists(st.integers(0, 5), max_size=4), min_size=1, max_size=4).filter(lambda x: sum(map(sum, x)))


def corpus_of(layout):
    Shaky.fresh()
    return ShardCorpus(folder(BUCKET, layout))


def count_groups(layout):
    return sum(rows > 0 for shard in layout for rows in shard)


# ---- opening


def test_the_same_documents_from_everywhere(tmp_path):
    layout = [[3, 4], [0], [5, 0, 1]]
    urls = [folder(tmp_path / "here", layout), f"file://{tmp_path}/here", f"{folder(BUCKET, layout)}/"]
    urls += [folder("memory://some/place", layout), f"{BUCKET}/shard_*.parquet", f"file://{tmp_path}/here/*.parquet"]
    found = [opened(url) for url in urls]
    files = FileCorpus(tmp_path / "here", sorted((tmp_path / "here").glob("*")))
    for corpus in found:
        assert isinstance(corpus, ShardCorpus)
        for split in ("train", "val", "tokenizer"):
            assert list(corpus.documents(split)) == list(files.documents(split))
            assert corpus.num_documents(split) == files.num_documents(split)
        assert corpus.fingerprint == found[0].fingerprint and len(corpus.fingerprint) == 64
    assert list(found[0].documents("train")) == [f"{i:05d}" for i in range(13)]


def test_a_single_parquet_file_stays_a_corpus_of_documents(tmp_path):
    shard(tmp_path / "one.parquet", [[f"text {i}" for i in range(40)]])
    assert isinstance(opened(tmp_path / "one.parquet"), FileCorpus) and isinstance(opened(tmp_path), FileCorpus)
    (tmp_path / "two.txt").write_text("another")
    assert isinstance(opened(tmp_path), FileCorpus)


def test_opening_reads_the_ends_of_files_only():
    rng = np.random.default_rng(0)
    for i in range(5):
        texts = [rng.bytes(4000).hex() for _ in range(64)]
        shard(f"{BUCKET}/shard_{i}.parquet", [texts[:32], texts[32:]])
    corpus = opened(BUCKET)
    assert len(Shaky.requests) == 5
    sizes = {path: len(file.getvalue()) for path, file in Shaky.store.items()}
    for path, start, end in Shaky.requests:
        assert end == sizes[path] and end - start == min(parquet.TAIL, end) < sizes[path]
    assert corpus.num_documents("train") == 256 and corpus.report.documents == 320
    assert corpus.report.characters == pytest.approx(320 * 8000, rel=0.001)  # from the footers
    assert "shard_4.parquet" in corpus.report.notes[0]
    Shaky.requests.clear()
    corpus.read_group("train", 3)
    ((path, start, end),) = Shaky.requests  # one request, and no more than its bytes
    assert path.endswith("shard_1.parquet") and end - start < 0.6 * sizes[path]


def test_a_footer_longer_than_the_first_read(monkeypatch):
    monkeypatch.setattr(parquet, "TAIL", 16)
    corpus = corpus_of([[1] * 30])
    assert corpus.num_documents("train") == 30 and list(corpus.documents("train"))[-1] == "00029"


def test_fingerprint_follows_names_sizes_and_footers():
    prints = [corpus_of(layout).fingerprint for layout in ([[3, 4]], [[3, 4]], [[4, 3]], [[3], [4]], [[3, 5]])]
    assert prints[0] == prints[1] and len(set(prints)) == 4
    folder(BUCKET, [[3, 4]])
    fsspec.filesystem("shaky").mv("/bucket/corpus/shard_00000.parquet", "/bucket/corpus/renamed_.parquet")
    assert ShardCorpus(BUCKET).fingerprint != prints[0]
    fs, path = fsspec.filesystem("shaky"), "/bucket/corpus/shard_00001.parquet"
    before, data = corpus_of([[3, 4]]).fingerprint, fs.cat_file(path)
    fs.pipe_file(path, data.replace(b"parquet-cpp", b"parquet-CPP"))  # the writer's name in a footer of the same size
    assert ShardCorpus(BUCKET).fingerprint != before


def test_documents_start_anywhere_without_reading_what_lies_before():
    corpus = corpus_of([[3, 4], [1], [0, 5]])
    whole = list(corpus.documents("train"))
    read, real = [], corpus.read_group
    corpus.read_group = lambda split, number: read.append(number) or real(split, number)
    for start in range(15):
        read.clear()
        assert list(corpus.documents("train", start)) == whole[start:]
        assert read == list(range(sum(start >= end for end in (3, 7, 8, 13)), 4))
    assert [corpus.place("train", i) for i in (0, 2, 3, 7, 8, 12)] == [
        "shard_00000:0", "shard_00000:0", "shard_00000:1", "shard_00001:0", "shard_00002:1", "shard_00002:1",
    ]  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_the_validation_shard_is_pinned_whatever_was_downloaded(tmp_path, monkeypatch, name):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    known = KNOWN[name]
    place, val = tmp_path / known.where, known.validation()
    assert f"nanochat data get {name} --shards" in error(name) and str(place) in error(name)
    folder(place, [[2], [2]])
    message = error(name)
    assert val in message and f"`nanochat data get {name} --shards 3`" in message
    (place / "shard_99999.parquet").write_bytes((place / "shard_00001.parquet").read_bytes())  # last by name, not val
    shard(place / val, [["held out"]])
    for extra in range(2, 5):
        shard(place / f"shard_{extra:05d}.parquet", [["more", "text"]])
        corpus = opened(name)
        assert list(corpus.documents("val")) == ["held out"]
        assert "held out" not in list(corpus.documents("train")) and corpus.num_documents("train") >= 2 + extra
    for url in (place, f"file://{place}", f"file://{place}/*.parquet"):
        assert list(opened(url).documents("val")) == ["held out"]
    (place / val).unlink()
    for url in (name, place, f"file://{place}", f"file://{place}/*.parquet"):
        assert val in error(url)


def test_an_empty_split_is_an_error_at_the_start(tmp_path):
    folder(tmp_path / "a", [[0, 0], [0]])
    assert "0 documents for training, 1 for validation" in error(tmp_path / "a")
    folder(tmp_path / "b", [[3]], val=0)
    assert "3 documents for training, 0 for validation" in error(tmp_path / "b")
    shard(f"{BUCKET}/only.parquet", [["a"]])
    assert "1 shards (only.parquet)" in error(BUCKET) and "only.parquet" in error(f"{BUCKET}/only.parquet")


# ---- damage


@pytest.mark.parametrize("share", [0, 0.1, 0.5, 0.98])
def test_a_shard_cut_short_is_named_with_the_number_of_others(tmp_path, share):
    folder(tmp_path / "a", [[50] * 20, [50] * 20, [50]])
    for i in (0, 1):
        path = tmp_path / "a" / f"shard_0000{i}.parquet"
        path.write_bytes(path.read_bytes()[: int(share * path.stat().st_size)])
    message = error(tmp_path / "a")
    assert "shard_00000.parquet" in message and "fetch it again" in message and "1 more shards of 4" in message


def test_other_bytes_than_parquet(tmp_path):
    folder(tmp_path / "a", [[5], [5]])
    path = tmp_path / "a" / "shard_00001.parquet"
    data = path.read_bytes()
    for bad in (b"not parquet at all", data[:-8] + b"\xff\xff\xff\x7fPAR1", data[:-200] + bytes(192) + data[-8:]):
        path.write_bytes(bad)
        assert "shard_00001.parquet" in error(tmp_path / "a") and "fetch it again" in error(tmp_path / "a")


def test_damage_inside_a_shard_is_named_when_it_is_read(tmp_path):
    texts = damaged_inside(tmp_path)
    corpus = opened(tmp_path)
    assert corpus.read_group("train", 0) == texts[:50]
    with pytest.raises(UserError, match=r"a\.parquet .* row group 1: .* fetch it again"):
        corpus.read_group("train", 1)
    (tmp_path / "a.parquet").write_bytes((tmp_path / "a.parquet").read_bytes()[:5000])  # after it was opened
    with pytest.raises(UserError, match=r"a\.parquet .* bytes arrived"):
        corpus.read_group("train", 0)


def test_wrong_columns_are_named_at_the_start(tmp_path):
    folder(tmp_path, [[3]])
    pq.write_table(pa.table({"content": ["a"], "n": [1]}), tmp_path / "shard_00000.parquet")
    assert "shard_00000.parquet" in error(tmp_path) and "content, n" in error(tmp_path)
    pq.write_table(pa.table({"text": [1, 2]}), tmp_path / "shard_00000.parquet")
    assert "int64" in error(tmp_path)


def test_other_writers_other_columns_and_dictionaries(tmp_path):
    texts = [f"text {i % 7}" for i in range(100)]
    for i, options in enumerate(({}, {"compression": "none"}, {"use_dictionary": True, "data_page_version": "2.0"})):
        table = pa.table({"id": range(100), "text": pa.array(texts, pa.large_string()), "tags": [["x", "y"]] * 100})
        pq.write_table(table, tmp_path / f"{i}.parquet", row_group_size=30, **options)
    shard(tmp_path / "val.parquet", [["v"]])
    assert list(opened(tmp_path).documents("train")) == texts * 3


def test_unusable_documents_are_left_out_and_counted_once(tmp_path):
    raw = pa.array([b"good", b"\xff\xfe broken", None, b"", b" \n\t", "gut ü".encode()], pa.binary())
    column = pa.StringArray.from_buffers(len(raw), *raw.buffers()[1:], raw.buffers()[0])
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet", row_group_size=3)
    shard(tmp_path / "b.parquet", [["v"]])
    corpus = opened(tmp_path)
    assert corpus.report.skipped == 0 and corpus.num_documents("train") == 6  # unknown before reading
    for _ in range(2):
        assert list(corpus.documents("train")) == ["good", "gut ü"]
        assert (corpus.report.skipped, corpus.report.empty) == (4, 2)
    assert corpus.report.broken == [
        ("a.parquet, row group 0, row 2", "not UTF-8"),
        ("a.parquet, row group 0, row 3", "null"),
        ("a.parquet, row group 1, row 1", "empty"),
        ("a.parquet, row group 1, row 2", "empty"),
    ]
    with PretrainLoader(corpus, TOKENIZER, "train", 1, 4, 1, epochs=None, prefetch=0) as stream:
        steps = list(islice(step_batches(stream, 1), 6))
        assert stream.dropped == 4 * stream.epoch == 12  # once a reading
    assert steps[0].log == {"shard": "a:0", "skipped": 2} and steps[-1].log == {"shard": "a:1", "skipped": 12}


# ---- shares


@settings(max_examples=60, deadline=None)
@given(layouts, st.integers(1, 6), st.sampled_from([0.4, 1, 2.3]), st.integers(1, 7))
def test_shares_add_up_to_every_document_once_an_epoch(layout, world, epochs, most):
    corpus = corpus_of(layout)
    groups, total = count_groups(layout), corpus.num_documents("train")
    if groups < world:
        with pytest.raises(UserError, match=rf"rank {world - 1} of world {world}: .* only {groups} row groups"):
            open_share(corpus, "train", world - 1, world, epochs)
        return
    shares = [open_share(corpus, "train", rank, world, epochs) for rank in range(world)]
    read = [read_all(share, most) for share in shares]
    texts = Counter(text for found, _ in read for text in found)
    limit = int(np.ceil(epochs * total))
    every = [f"{i:05d}" for i in range(total)]
    assert texts == Counter((every * 4)[:limit])  # the first `limit` of reading again and again
    assert min(count for _, count in read) == smallest_share(corpus, "train", world, epochs)
    items = [share.position for share in shares]
    assert max(items) - min(items) <= 2 * world  # nobody is more than a row group ahead


def test_a_process_decodes_its_own_row_groups_only():
    corpus = corpus_of([[2] * 5, [2] * 4])
    read, real = [], corpus.read_group
    corpus.read_group = lambda split, number: read.append(number) or real(split, number)
    for rank in range(4):
        read.clear()
        read_all(open_share(corpus, "train", rank, 4, 1))
        assert read == list(range(rank, 9, 4))


def test_more_processes_than_row_groups_is_an_error_with_the_numbers(tmp_path):
    corpus = opened(folder(tmp_path / "a", [[4, 4]]))
    with pytest.raises(UserError, match=r"rank 7 of world 8: .*2 row groups in 1 shards \(shard_00000.parquet\)") as e:
        PretrainLoader(corpus, TOKENIZER, "train", 1, 4, 1, epochs=None, rank=7, world=8)
    assert "at most 2 processes" in str(e.value) and "\n" not in str(e.value)
    corpus = opened(folder(tmp_path / "b", [[4, 4], [], [0], [1, 0], [4, 4, 4], [4, 4]]))  # 8 in all, 3 in a file
    shares = [open_share(corpus, "train", rank, 8, 1) for rank in range(8)]
    assert sorted(text for share in shares for text in read_all(share)[0]) == [f"{i:05d}" for i in range(29)]
    with pytest.raises(UserError, match="rank 8 of world 8"):
        open_share(corpus, "train", 8, 8, 1)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_row_groups_without_text_are_no_endless_loop(prefetch):
    def stream(groups, **options):
        shard(f"{BUCKET}/a.parquet", groups)
        shard(f"{BUCKET}/b.parquet", [["v"]])
        return PretrainLoader(ShardCorpus(BUCKET), TOKENIZER, "train", 1, 4, 2, prefetch=prefetch, **options)

    with stream([[None, None], ["", " "]], epochs=None) as batches:
        with pytest.raises(UserError, match="no text: all 4 documents are empty"):
            next(batches)
    with stream([["some text"], [None], []], epochs=None, rank=1, world=2) as batches:  # its first reading has nothing
        with pytest.raises(UserError, match="no text"):
            next(batches)
    with stream([[None], ["text"], [None, ""], [None]], epochs=None) as batches:
        assert [bytes(b.targets[0].tolist()) for b in islice(batches, 5)] == [b"text"] * 5
    with stream([[None, None], [None]], epochs=1) as batches:
        with pytest.raises(UserError, match="no text|ran out"):
            next(batches)


# ---- resume


@settings(max_examples=60, deadline=None)
@given(layouts, st.integers(1, 4), st.integers(1, 4), st.lists(st.integers(0, 9), min_size=2, max_size=4), st.data())
def test_resume_reads_on_where_it_stood(layout, world, most, stops, data):
    if count_groups(layout) < world:
        return
    corpus, rank = corpus_of(layout), data.draw(st.integers(0, world - 1))
    share = open_share(corpus, "train", rank, world, None)
    whole = []
    for _ in range(sum(stops) + 5):
        whole.append((*share.fetch(most), share.place(), share.epoch, share.shard))
    share.close()
    again = []
    state = None
    for stop in [*stops, 5]:
        share = open_share(corpus, "train", rank, world, None)
        if state:
            share.restore(json.loads(json.dumps(state)))
        for _ in range(stop):
            again.append((*share.fetch(most), share.place(), share.epoch, share.shard))
        state = share.place()
        share.close()
    assert again == whole


@settings(max_examples=25, deadline=None)
@given(layouts, st.integers(1, 3), st.integers(1, 8), st.sampled_from([1, 3, 128]), st.integers(1, 20))
def test_a_stopped_loader_goes_on_token_for_token(layout, world, stop, fetch_docs, buffer):
    """T = 12, B = 2; also across epochs, with documents and row groups that no batch divides."""
    if count_groups(layout) < world:
        return
    corpus = corpus_of(layout)
    options = {"epochs": None, "rank": world - 1, "world": world, "fetch_docs": fetch_docs, "prefetch": 0}

    def stream(state=None):
        return PretrainLoader(corpus, TOKENIZER, "train", 2, 12, buffer, state=state, **options)

    with stream() as batches:
        whole = list(islice(batches, stop + 5))
    with stream(json.loads(json.dumps(whole[stop - 1].state))) as batches:
        rest = list(islice(batches, 5))
    assert arrays(rest) == arrays(whole[stop:]) and [b.state for b in rest] == [b.state for b in whole[stop:]]
    assert [(b.epoch, b.shard, b.consumed) for b in rest] == [(b.epoch, b.shard, b.consumed) for b in whole[stop:]]
    assert all(b.inputs.shape == b.targets.shape == (2, 12) for b in whole)


def test_a_resume_opens_the_row_group_it_needs_and_none_before():
    corpus = corpus_of([[4] * 10, [4] * 10])
    with PretrainLoader(corpus, TOKENIZER, "train", 1, 5, 1, epochs=None, fetch_docs=1, prefetch=0) as batches:
        *_, last = islice(batches, 50)
    read, real = [], corpus.read_group
    corpus.read_group = lambda split, number: read.append(number) or real(split, number)
    state = last.state
    with PretrainLoader(corpus, TOKENIZER, "train", 1, 5, 1, epochs=None, fetch_docs=1, prefetch=0, state=state) as on:
        next(on)
    assert state["position"] == 13 and read[0] == 12 and set(read) <= {12, 13, 14, 15}


@pytest.mark.parametrize("change", [{"size": 3}, {"kind": "documents"}, {"world": 2}])
def test_a_state_of_another_corpus_is_refused(change):
    corpus = corpus_of([[4, 4]])
    with PretrainLoader(corpus, TOKENIZER, "train", 1, 5, 1, epochs=None, prefetch=0) as batches:
        state = next(batches).state | change
    with pytest.raises(UserError, match=next(iter(change))):
        PretrainLoader(corpus, TOKENIZER, "train", 1, 5, 1, epochs=None, state=state)


@settings(max_examples=40, deadline=None)
@given(layouts, st.lists(st.integers(1, 5), min_size=2, max_size=4), st.sampled_from([1, 2]), st.data())
def test_another_number_of_processes_reads_nothing_twice_and_leaves_nothing_out(layout, worlds, epochs, data):
    corpus = corpus_of(layout)
    worlds = [min(world, count_groups(layout)) for world in worlds]
    states, texts, read = [], [], 0
    for world in worlds:
        shares = [open_share(corpus, "train", rank, world, epochs) for rank in range(world)]
        if states:
            starts, _ = deal_anew([state["position"] for state in states], world)
            for rank, share in enumerate(shares):
                share.restore(json.loads(json.dumps(deal_groups(states, starts, rank))))
        assert sum(share.read for share in shares) == read
        for share in shares:
            for _ in range(data.draw(st.integers(0, 4))):
                texts += share.fetch(2)[1]
        read = sum(share.read for share in shares)
        assert read == len(texts)
        states = [share.place() for share in shares]
        last = shares
    for share in last:
        texts += read_all(share)[0]
    assert Counter(texts) == Counter([f"{i:05d}" for i in range(corpus.num_documents("train"))] * epochs)


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (1, 4)])
def test_states_of_loaders_are_shared_out_with_their_buffers(before, after):
    """Every document is trained on by somebody or waits: rows of one document each, in two numbers of processes."""
    corpus, seen = corpus_of([[3, 5, 4], [6, 2], [7]]), []

    def loaders(world, states):
        for rank in range(world):
            state = states[rank] if states else None
            yield PretrainLoader(
                corpus, TOKENIZER, "train", 1, 5, 3, epochs=1, rank=rank, world=world, fetch_docs=2, state=state,
            )  # fmt: skip

    saved = []
    for rank, stream in enumerate(loaders(before, None)):
        with stream:
            batches = list(islice(stream, 2 + rank))
        seen += [bytes(b.targets[0].tolist()) for b in batches]
        saved.append(batches[-1].state)
    shared = [share_states(saved, rank, after) for rank in range(after)]
    assert {skipped for _, skipped in shared} == {0}
    for stream in loaders(after, [state for state, _ in shared]):
        with stream, pytest.raises(UserError, match="ran out"):
            for batch in stream:
                seen.append(bytes(batch.targets[0].tolist()))
    assert sorted(seen) == [b"%05d" % i for i in range(27)]


# ---- the algorithm


@pytest.mark.parametrize("rank_world", [(0, 1), (1, 2)])
def test_rows_are_those_of_the_plain_algorithm(tmp_path, rank_world):
    rng = np.random.default_rng(2)
    groups = [["x" * int(n) for n in rng.lognormal(3, 1, rows)] for rows in (300, 129, 40, 128, 300, 1)]
    shard(tmp_path / "a.parquet", groups[:4])  # an even number, so that turns within files and over files are the same
    shard(tmp_path / "b.parquet", groups[4:])
    shard(tmp_path / "v.parquet", [["v"]])
    rank, world = rank_world
    plain = plain_loader([tmp_path / "a.parquet", tmp_path / "b.parquet"], TOKENIZER, 64, 200, rank, world)
    options = {"epochs": None, "rank": rank, "world": world, "prefetch": 0}
    with PretrainLoader(opened(tmp_path), TOKENIZER, "train", 3, 64, 200, **options) as batches:
        for batch in islice(batches, 100):
            for inputs, targets in zip(batch.inputs, batch.targets, strict=True):
                row = next(plain)
                assert (inputs == row[:-1]).all() and (targets == row[1:]).all()


def test_epoch_and_shard_are_of_the_newest_document():
    corpus = corpus_of([[2, 1], [1]])
    with PretrainLoader(corpus, TOKENIZER, "train", 1, 5, 1, epochs=None, fetch_docs=1, prefetch=0) as batches:
        found = [(b.epoch, b.shard) for b in islice(batches, 6)]
    one = [(1, "shard_00000:0")] * 2 + [(1, "shard_00000:1"), (1, "shard_00001:0")]
    assert found == one + [(2, "shard_00000:0")] * 2


def test_small_corpora_say_where_they_are_too(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(f"text {i}" for i in range(30)))
    (tmp_path / "b.txt").write_text("\n\n".join(f"more {i}" for i in range(30)))
    with PretrainLoader(opened(tmp_path), TOKENIZER, "train", 1, 8, 1, epochs=1, fetch_docs=1, prefetch=0) as batches:
        logs = [step.log for step in islice(step_batches(batches, 1), 25)]
    found = [log.pop("shard") for log in logs]
    assert not any(logs) and set(found) == {"a", "b"} and found == sorted(found)


# ---- buckets


def test_a_request_that_fails_is_tried_again(bucket):
    folder(BUCKET, [[3, 4], [5]])
    want = list(opened(BUCKET).documents("train"))
    for bucket.short in (False, True):
        bucket.tries, bucket.failures = {}, 3
        corpus = opened(BUCKET)
        with PretrainLoader(corpus, TOKENIZER, "train", 1, 5, 1, epochs=1, prefetch=2) as batches:
            found = [bytes(batch.targets[0].tolist()).decode() for batch in islice(batches, 12)]
        assert found == want and set(bucket.tries.values()) >= {4}


@pytest.mark.parametrize(
    ("failure", "tries", "says"),
    [
        (ConnectionError("reset by peer"), 4, "reset by peer"),
        (RuntimeError("HTTP 503\nslow down"), 4, "503"),
        (PermissionError("denied"), 1, "denied"),
        (FileNotFoundError("gone"), 1, "gone"),
    ],
)
def test_what_fails_for_good_is_named(bucket, failure, tries, says):
    corpus = opened(folder(BUCKET, [[3]]))
    bucket.tries, bucket.failures, bucket.error = {}, 99, failure
    with pytest.raises(UserError, match=rf"shard_00000.parquet cannot be read: .*{says}") as caught:
        with PretrainLoader(corpus, TOKENIZER, "train", 1, 5, 1, epochs=1) as batches:
            next(batches)
    assert list(bucket.tries.values()) == [tries] and "\n" not in str(caught.value)
    assert says in error(BUCKET)


def test_local_files_are_not_waited_for(tmp_path, monkeypatch):
    monkeypatch.setattr(parquet, "WAITS", (100.0,))
    corpus = opened(folder(tmp_path / "a", [[3]]))
    (tmp_path / "a" / "shard_00000.parquet").unlink()
    with pytest.raises(UserError, match=r"shard_00000\.parquet cannot be read"):
        corpus.read_group("train", 0)


def test_the_next_row_group_is_fetched_while_one_is_used(bucket):
    corpus = opened(folder(BUCKET, [[4] * 8]))
    share = EveryRowGroup(corpus, "train", 0, 1, 1)
    arrived, real = [threading.Event() for _ in range(8)], corpus.read_group

    def read_group(split, number):
        texts = real(split, number)
        arrived[number].set()
        return texts

    corpus.read_group = read_group
    assert share.fetch(1) == (1, ["00000"])
    assert arrived[1].wait(20) and arrived[2].wait(20)  # one waits, one is in the thread's hand
    assert not arrived[4].wait(0.2)
    bucket.hold = threading.Event()  # from here on requests hang: what is there is enough for a while
    assert [share.fetch(4)[0] for _ in range(2)] == [3, 4]
    bucket.hold.set()
    share.close()
    assert not [t for t in threading.enumerate() if "_produce" in t.name]


def test_closing_a_loader_ends_its_threads():
    corpus = corpus_of([[4] * 8])
    for prefetch in (0, 2):
        stream = PretrainLoader(corpus, TOKENIZER, "train", 1, 5, 1, epochs=None, prefetch=prefetch)
        next(stream)
        stream.close()
        assert not [t for t in threading.enumerate() if "_produce" in t.name]
    stream = PretrainLoader(corpus, TOKENIZER, "train", 1, 5, 1, epochs=None)
    share = open_share(corpus, "train", 0, 1, None)
    share.fetch(1)
    next(stream)
    assert len([t for t in threading.enumerate() if "_produce" in t.name]) == 3
    del stream, share  # forgotten, not closed
    gc.collect()
    assert not [t for t in threading.enumerate() if "_produce" in t.name]


def test_very_large_row_groups_are_not_read_ahead(monkeypatch):
    monkeypatch.setattr("nanochat_lib.shards.AHEAD_BYTES", 1)
    corpus = corpus_of([[4] * 8])
    share = EveryRowGroup(corpus, "train", 0, 1, 1)
    share.fetch(1)
    assert not [t for t in threading.enumerate() if "_produce" in t.name]
    assert len(read_all(share)[0]) == 31


def test_a_missing_package_names_the_extra():
    fsspec.register_implementation("nopackage", "no_such_package.Files", errtxt="Please install nopackagefs")
    message = error("nopackage://bucket/shards")
    assert "nopackagefs" in message and "NANOCHAT_EXTRAS=store" in message
    assert "nosuchkind" in error("nosuchkind://bucket") and "gs://" in error("nosuchkind://bucket")


def test_an_empty_place_is_an_error():
    assert "no parquet shards" in error(BUCKET) and "no parquet shards" in error(f"{BUCKET}/*.parquet")
    fsspec.filesystem("shaky").pipe_file("/bucket/corpus/readme.txt", b"hello")
    fsspec.filesystem("shaky").pipe_file("/bucket/corpus/.cache/part.parquet", b"half")
    assert "no parquet shards" in error(BUCKET)


def test_a_run_keeps_a_url_as_it_is(tmp_path, monkeypatch):
    from nanochat_lib.pipeline import open_run

    config = preset("cpu-smoke")
    for corpus, kept in ((BUCKET, BUCKET), ("some/texts", str(Path("some/texts").absolute())), ("fineweb-edu",) * 2):
        run = open_run(tmp_path / "run" / kept[-5:], replace(config, data=DataConfig(corpus=corpus)), accelerator=False)
        run.close()
        assert run.config.data.corpus == kept


def test_encoding_is_asked_for_in_chunks_of_one_row_group():
    asked = []

    class Noting(ByteTokenizer):
        def encode(self, text, prepend=None, append=None):
            asked.append(len(text))
            return [ByteTokenizer().encode(one, prepend) for one in text]

    corpus = corpus_of([[5, 2], [4]])
    with PretrainLoader(corpus, Noting(), "train", 1, 5, 1, epochs=1, fetch_docs=4, prefetch=0) as batches:
        list(islice(batches, 11))
    assert asked == [4, 1, 2, 4]
