"""Token ids kept beside shards: rows, states and counts are those of encoding, whatever is kept, lost or damaged."""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from itertools import islice
from pathlib import Path

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from object_stores import gs_server, s3_server
from shaky import Shaky, damaged_inside, folder, shard
from test_loader import TOKENIZER, ByteTokenizer, arrays

from nanochat_lib import encode_ids, kept_ids, parquet, storage
from nanochat_lib.corpus import open_corpus
from nanochat_lib.errors import UserError
from nanochat_lib.kept_ids import KeptIds
from nanochat_lib.loader import PretrainLoader, share_states
from nanochat_lib.presets import DataConfig
from nanochat_lib.pretrain import fixed_batches
from nanochat_lib.shards import ShardCorpus
from nanochat_lib.tokenizer import Tokenizer

BUCKET = "shaky://bucket/corpus"
ROOT = Path(__file__).parents[1]


@pytest.fixture(autouse=True)
def bucket(monkeypatch):
    Shaky.fresh()
    monkeypatch.setattr(parquet, "WAITS", (0.0, 0.0, 0.0))
    return Shaky


def encoded(url, tokenizer=TOKENIZER, **options):
    """A corpus whose ids have been made."""
    corpus = ShardCorpus(url)
    encode_ids.encode(corpus, tokenizer, 1, **options)
    return corpus


def kept_of(corpus, tokenizer=TOKENIZER):
    lines = []
    kept = KeptIds(corpus, tokenizer.fingerprint, lines.append)
    kept.lines = lines
    return kept


def ids_files(url):
    fs, path = parquet.filesystem(str(url))
    return sorted(name for name in fs.find(path) if name.endswith(".ids"))


def write(path, data):
    with fsspec.open(f"shaky://{path}", "wb") as file:
        file.write(data)


def stream(corpus, kept=None, rows=2, length=12, buffer=5, **options):
    options = {"epochs": None, "prefetch": 0} | options
    return PretrainLoader(corpus, TOKENIZER, "train", rows, length, buffer, kept=kept, **options)


def everything(batches):
    """All that a batch says."""
    return [
        (a, b.epoch, b.shard, b.consumed, b.progress, b.state) for a, b in zip(arrays(batches), batches, strict=True)
    ]


texts = st.one_of(st.none(), st.sampled_from(["", " \n", "ü", "a"]), st.text(max_size=30))
corpora = st.lists(st.lists(st.lists(texts, max_size=5), max_size=4), min_size=1, max_size=3).filter(
    lambda shards: sum(bool(text and text.strip()) for groups in shards for group in groups for text in group) > 1
)


def corpus_of(shards):
    Shaky.fresh()
    for i, groups in enumerate(shards):
        shard(f"{BUCKET}/shard_{i}.parquet", [[t and t.encode("utf-8", "replace").decode() for t in g] for g in groups])
    shard(f"{BUCKET}/val.parquet", [["held out"]])
    return ShardCorpus(BUCKET)


# ---- the same as encoding


@settings(max_examples=40, deadline=None)
@given(corpora, st.integers(1, 3), st.integers(1, 6), st.sampled_from([1, 3, 128]), st.integers(1, 9), st.data())
def test_batches_states_and_counts_are_those_of_encoding(shards, world, stop, fetch_docs, buffer, data):
    """Some shards' ids lost; stopped anywhere, gone on with the other way."""
    corpus = corpus_of(shards)
    world = min(world, len(corpus.groups("train")))
    encoded(BUCKET)
    for path in ids_files(BUCKET):
        if data.draw(st.integers(0, 3)) == 0:
            fsspec.filesystem("shaky").rm(path)
    options = {"rank": data.draw(st.integers(0, world - 1)), "world": world, "fetch_docs": fetch_docs, "buffer": buffer}
    plain, with_ids = ShardCorpus(BUCKET), ShardCorpus(BUCKET)
    kept = kept_of(with_ids)
    assert not kept.problems
    try:
        with stream(plain, **options) as batches:
            wanted = everything(list(islice(batches, stop + 4)))
    except UserError as error:  # this process has no text
        with stream(with_ids, kept, **options) as batches, pytest.raises(UserError, match=str(error)[:30]):
            next(batches)
        return
    with stream(with_ids, kept, **options) as batches:
        found = list(islice(batches, stop + 4))
    assert everything(found) == wanted and not kept.lines
    assert (plain.report.skipped, plain.report.empty) == (with_ids.report.skipped, with_ids.report.empty)
    assert plain.report.broken == with_ids.report.broken
    state = json.loads(json.dumps(found[stop - 1].state))
    for on, ids in ((plain, None), (with_ids, kept)):
        with stream(on, ids, state=state, **options) as batches:
            assert everything(list(islice(batches, 4))) == wanted[stop:]


def test_unusable_documents_of_every_kind(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    raw = pa.array([b"good", b"\xff\xfe broken", None, b"", b" \n\t", "gut ü".encode()], pa.binary())
    column = pa.StringArray.from_buffers(len(raw), *raw.buffers()[1:], raw.buffers()[0])
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet", row_group_size=3)
    shard(tmp_path / "b.parquet", [["v"]])
    plain, corpus = ShardCorpus(tmp_path), encoded(tmp_path)
    corpus = ShardCorpus(tmp_path)
    kept = kept_of(corpus)
    for _ in range(2):
        for number in range(2):
            ids, words = kept.read_group("train", number)[:], plain.read_group("train", number)
            assert [None if row is None else bytes(row[1:].tolist()).decode() for row in ids] == words
    assert corpus.report == plain.report and corpus.report.skipped == 4 and not kept.lines
    with stream(corpus, kept, rows=1, length=4, buffer=1) as batches:
        *_, last = islice(batches, 6)
    assert last.after["dropped"] == 4 * last.epoch == 12


def test_another_number_of_processes_goes_on_with_the_other_way():
    corpus = encoded(folder(BUCKET, [[3, 5, 4], [6, 2], [7]]))
    kept = kept_of(corpus)
    saved = []
    for rank in range(2):
        with stream(corpus, kept if rank else None, rank=rank, world=2, fetch_docs=2) as batches:
            *_, last = islice(batches, 2 + rank)
        saved.append(last.state)
    for rank in range(3):
        state, _ = share_states(saved, rank, 3)
        found = []
        for ids in (None, kept):
            with stream(corpus, ids, rank=rank, world=3, state=state) as batches:
                found.append(everything(list(islice(batches, 5))))
        assert found[0] == found[1]


def test_ids_are_those_of_the_real_tokenizer_in_the_smallest_type(tmp_path):
    rng = np.random.default_rng(0)
    words = ["".join(rng.choice(list("abcdeü \n"), 30)) for _ in range(300)]
    shard(tmp_path / "a.parquet", [words[:100], words[100:250]])
    shard(tmp_path / "b.parquet", [words[250:]])
    tokenizer = Tokenizer.train(words, 300)
    kept = kept_of(encoded(tmp_path, tokenizer), tokenizer)
    assert kept.count("train") == (1, 1) and kept.count("val") == (1, 1)
    rows = [row for number in range(2) for row in kept.read_group("train", number)[:]]
    assert [row.tolist() for row in rows] == tokenizer.encode(words[:250], prepend=tokenizer.bos_id)
    assert {row.dtype for row in rows} == {np.dtype("uint16")}
    size = sum(os.path.getsize(path) for path in ids_files(tmp_path))
    assert size < 2 * sum(map(len, rows)) * 300 / 250 + 4 * 300 + 1500


def test_large_vocabularies_get_four_bytes(tmp_path):
    assert [kept_ids.dtype_for(size).itemsize for size in (65535, 65536, 65537)] == [2, 2, 4]

    class Large(ByteTokenizer):
        vocab_size, fingerprint = 100_000, "large"

        def encode(self, text, prepend=None, append=None):
            return [[99_999, *(70_000 + b for b in one.encode())] for one in text]

    kept = kept_of(encoded(folder(tmp_path, [[2]]), Large()), Large())
    assert kept.read_group("train", 0)[:][1].tolist() == [99_999, *(70_000 + b for b in b"00001")]


def test_a_row_group_is_one_request_and_footers_are_read_at_the_start():
    rng = np.random.default_rng(0)
    for i in range(3):
        words = [rng.bytes(1000).hex() for _ in range(80)]
        shard(f"{BUCKET}/shard_{i}.parquet", [words[:40], words[40:]])
    corpus = encoded(BUCKET)
    Shaky.requests.clear()
    kept = kept_of(corpus)
    assert len(Shaky.requests) == 3 and all(end - start <= parquet.TAIL for _, start, end in Shaky.requests)
    Shaky.requests.clear()
    kept.read_group("train", 3)
    ((path, start, end),) = Shaky.requests
    assert path.endswith("shard_1.parquet.ids") and end - start == 40 * 4 + 40 * 2001 * 2


def test_a_long_footer(monkeypatch):
    monkeypatch.setattr(parquet, "TAIL", 64)
    corpus = encoded(folder(BUCKET, [[1] * 40]))
    assert kept_of(corpus).count("train") == (1, 1)


def test_the_buffer_keeps_no_row_group_in_memory():
    """Documents that wait are copies: views would hold whole row groups."""

    class Arrays(ByteTokenizer):
        def encode_arrays(self, texts, prepend, num_threads=8):
            return [np.array(self.encode(text, prepend), np.int32) for text in texts]

    corpus = encoded(folder(BUCKET, [[50, 50]]), Arrays())
    options = {"epochs": None, "prefetch": 0, "kept": kept_of(corpus)}
    with PretrainLoader(corpus, Arrays(), "train", 2, 12, 30, **options) as batches:
        waiting = next(batches).buffered
    assert len(waiting) >= 30 and all(document.ids.base is None for document in waiting)
    assert {document.ids.dtype for document in waiting} == {np.dtype("int32")}


def test_no_text_is_read_where_ids_are_kept(monkeypatch):
    corpus = encoded(folder(BUCKET, [[3, 5], [6]]))
    kept = kept_of(corpus)
    with stream(ShardCorpus(BUCKET)) as batches:
        wanted = everything(list(islice(batches, 10)))
    monkeypatch.setattr(parquet, "read_texts", None)
    for prefetch in (0, 2):
        with stream(corpus, kept, prefetch=prefetch) as batches:
            assert everything(list(islice(batches, 10))) == wanted
    tried = [fixed_batches(corpus, TOKENIZER, "val", 1, 4, 8, 1, kept=kept) for _ in range(2)]
    assert bytes(tried[0][0][1][0][:2].tolist()) == b"v0"


def test_a_run_goes_on_with_the_other_way_bit_for_bit(tmp_path, monkeypatch, capsys):
    """Encoding before and ids after the stop, and the reverse: the weights and the log of a run that only encoded."""
    from nanochat_lib import checkpoint
    from nanochat_lib.cli import main
    from nanochat_lib.primer.documents import world_documents
    from nanochat_lib.primer.world import World
    from nanochat_lib.step_folders import step_folder

    (tmp_path / "texts").mkdir()
    texts = list(world_documents(World(0), 60_000))
    size = len(texts) // 4
    for i in range(4):
        shard(
            tmp_path / f"texts/{i}.parquet",
            [texts[i * size : (i + 1) * size - 9], ["", *texts[(i + 1) * size - 9 :][:9]]],
        )
    settings = (
        "model.depth=1 tokenizer.vocab_size=400 data.epochs=1000 pretrain.batch_tokens=512 pretrain.device_rows=4 "
        "pretrain.eval_tokens=512 pretrain.steps=6 pretrain.save_every=3 pretrain.eval_every=3 evaluation.bigram=false"
    )
    options = [part for setting in settings.split() for part in ("-s", setting)]

    def pretrain(name, *more):
        places = ["--run-dir", str(tmp_path / name), "--corpus", str(tmp_path / "texts")]
        assert main(["pretrain", "--preset", "cpu-smoke", *places, *options, *more]) == 0
        return capsys.readouterr().out

    def outcome(name):
        clock = ("seconds", "time", "tokens_per_s", "mfu", "cost_usd")
        lines = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        log = [
            {k: v for k, v in line.items() if k not in clock}
            for line in lines
            if line.get("event") not in ("start", "stop")
        ]
        state = checkpoint.load(tmp_path / name / "base")[0]
        figures = json.loads((tmp_path / name / "stages/pretrain.json").read_text())["figures"]
        return log, {k: np.asarray(v).tobytes() for k, v in state.items()}, figures["skipped"], figures["val_bpb_last"]

    def stopped(source, name):
        """As `source` was after step 3."""
        shutil.copytree(tmp_path / source, tmp_path / name)
        shutil.rmtree(step_folder(tmp_path / name / "base", 6))
        (tmp_path / name / "stages/pretrain.json").unlink()

    assert "token ids: none kept" in pretrain("encoded")
    stopped("encoded", "then_kept")
    assert main(["data", "encode", "--run-dir", str(tmp_path / "encoded"), "--jobs", "1"]) == 0
    splits, read = set(), KeptIds.read_group
    monkeypatch.setattr(KeptIds, "read_group", lambda kept, *group: splits.add(group[0]) or read(kept, *group))
    said = pretrain("then_kept")
    assert splits == {"train", "val"}
    assert f"token ids: kept for 3 of 3 training shards and the validation shard, in {tmp_path}/texts/ids-" in said
    assert "continuing from step 3" in said
    pretrain("kept")
    stopped("kept", "then_encoded")
    assert "token ids" not in pretrain("then_encoded", "-s", "ops.kept_ids=false")
    wanted = outcome("encoded")
    assert wanted[2] > 0 and len(wanted[0]) > 3
    for name in ("then_kept", "kept", "then_encoded"):
        for found, as_wanted in zip(outcome(name), wanted, strict=True):
            assert found == as_wanted, name


def test_tokenizer_and_ids_are_made_before_a_chip_is_rented(tmp_path, capsys):
    """On a machine that the preset is not for; the copy in the store leads the rented one to the same ids."""
    from nanochat_lib.cli import main

    rng = np.random.default_rng(0)
    for i in range(3):
        words = ["".join(rng.choice(list("abcdefgh \n"), 300)) for _ in range(64)]
        (tmp_path / "texts").mkdir(exist_ok=True)
        shard(tmp_path / f"texts/{i}.parquet", [words])
    run = ["--preset", "gpu-1-d12", "--corpus", str(tmp_path / "texts"), "-s", "tokenizer.vocab_size=300"]
    run += ["-s", f"ops.durable={tmp_path / 'store'}", "--run-dir", str(tmp_path / "run")]
    assert main(["tokenizer", *run]) == 2 and "JAX sees cpu here" in capsys.readouterr().err
    assert main(["tokenizer", *run, "--any-machine"]) == 0
    assert main(["data", "encode", "--run-dir", str(tmp_path / "run"), "--jobs", "1"]) == 0
    assert main(["pretrain", *run]) == 2 and "JAX sees cpu here" in capsys.readouterr().err
    tokenizer = Tokenizer.load(tmp_path / "store/tokenizer")
    assert kept_of(ShardCorpus(tmp_path / "texts"), tokenizer).count("train") == (2, 2)


# ---- what is not used


def damage(path, where, with_=b"\xa5"):
    fs = fsspec.filesystem("shaky")
    data = bytearray(fs.cat_file(path))
    data[where] ^= 0xA5
    write(path, bytes(data))


def lines_of(kept):
    assert "\n" not in kept.line() and all("\n" not in line for line in [*kept.problems, *kept.lines])
    return kept.line()


@pytest.mark.parametrize("case", ["cut", "empty", "header only", "footer", "last byte", "another version", "too long"])
def test_half_written_and_damaged_files_are_named_and_not_used(case):
    corpus = encoded(folder(BUCKET, [[3], [4]]))
    path = ids_files(BUCKET)[1]
    data = fsspec.filesystem("shaky").cat_file(path)
    write(path, {
        "cut": data[:-30], "empty": b"", "header only": data[:8], "footer": data[:-40] + b"x" + data[-39:],
        "last byte": data[:-1] + b"\0", "another version": data.replace(b"NANOIDS1", b"NANOIDS0"),
        "too long": data[:8] + b"more" + data[8:],
    }[case])  # fmt: skip
    kept = kept_of(corpus)
    line = lines_of(kept)
    assert "kept for 1 of 2 training shards and the validation shard" in line and "data encode" in line
    assert len(kept.problems) == 1 and "shard_00001.parquet.ids" in kept.problems[0] and kept.problems[0] in line
    with stream(corpus, kept) as with_ids, stream(ShardCorpus(BUCKET)) as without:
        assert everything(list(islice(with_ids, 6))) == everything(list(islice(without, 6)))
    encode_ids.encode(ShardCorpus(BUCKET), TOKENIZER, 1)
    assert fsspec.filesystem("shaky").cat_file(path) == data


def test_every_byte_that_is_damaged_is_noticed():
    """Anywhere in the file: the rows are the same, and one line says why."""
    corpus = encoded(folder(BUCKET, [[2, 1]]))
    path = ids_files(BUCKET)[0]
    data = fsspec.filesystem("shaky").cat_file(path)
    wanted = [corpus.read_group("train", number) for number in range(2)]
    for where in range(8, len(data)):
        write(path, data)
        damage(path, where)
        kept = kept_of(corpus)
        for number in range(2):
            found = kept.read_group("train", number)[:]
            assert [row if isinstance(row, str) else bytes(row[1:].tolist()).decode() for row in found] == wanted[
                number
            ]
        assert len(kept.problems) + len(kept.lines) == 1, where
        lines_of(kept)


def test_a_file_that_lacks_a_row_group_is_not_used():
    corpus = ShardCorpus(folder(BUCKET, [[2, 1]]))
    (first,) = corpus.shards["train"]
    with fsspec.open(f"shaky://{kept_ids.path_of(kept_of(corpus).folder, first)}", "wb") as file:
        writer = kept_ids.Writer(file, first, TOKENIZER)
        writer.add(parquet.read_rows(corpus.fs, first, 0))
        writer.finish()
    kept = kept_of(corpus)
    assert "not those of the shard" in lines_of(kept) and kept.count("train") == (0, 1)


def test_damage_found_while_reading_is_said_once_and_the_shard_is_encoded():
    corpus = encoded(folder(BUCKET, [[3, 4, 2], [5]]))
    path = ids_files(BUCKET)[0]
    damage(path, 8 + 3 * 4 + 3 * 6 * 2 + 20)  # the second block
    kept = kept_of(corpus)
    assert kept.count("train") == (2, 2)
    with stream(corpus, kept) as with_ids, stream(ShardCorpus(BUCKET)) as without:
        assert everything(list(islice(with_ids, 20))) == everything(list(islice(without, 20)))
    (line,) = kept.lines
    assert "row group 1 is damaged" in line and path in line and kept.count("train") == (1, 2)
    encode_ids.encode(ShardCorpus(BUCKET), TOKENIZER, 1)  # footers alone are right
    assert kept_of(corpus).count("train") == (2, 2)
    encode_ids.encode(ShardCorpus(BUCKET), TOKENIZER, 1, check=True)
    again = kept_of(corpus)
    assert [len(again.read_group("train", number)[:]) for number in range(4)] == [3, 4, 2, 5] and not again.lines


def test_a_file_that_vanishes_meanwhile():
    corpus = encoded(folder(BUCKET, [[3, 4]]))
    kept = kept_of(corpus)
    fsspec.filesystem("shaky").rm(ids_files(BUCKET)[0])
    assert kept.read_group("train", 0) == ["00000", "00001", "00002"]
    assert len(kept.lines) == 1 and "FileNotFoundError" in lines_of(kept) + kept.lines[0]


def test_ids_of_another_tokenizer_or_a_shard_that_changed():
    corpus = encoded(folder(BUCKET, [[3], [4]]))
    other = ByteTokenizer()
    other.fingerprint = "other"
    assert kept_of(corpus, other).count("train") == (0, 2) and "none kept" in kept_of(corpus, other).line()
    fs = fsspec.filesystem("shaky")
    fs.copy(kept_of(corpus).folder, kept_of(corpus, other).folder, recursive=True)
    found = kept_of(corpus, other)
    assert found.count("train") == (0, 2) and all("another tokenizer" in problem for problem in found.problems)
    assert "and 2 more" in lines_of(found)
    first = f"{BUCKET}/shard_00000.parquet"
    same = len(fs.cat_file(first))
    shard(first, [["00000", "00001", "other"]])
    changed = ShardCorpus(BUCKET)
    kept = kept_of(changed)
    assert kept.count("train") == (1, 2) or len(fs.cat_file(first)) == same
    data = fs.cat_file("/bucket/corpus/shard_00001.parquet")
    write("/bucket/corpus/shard_00001.parquet", data.replace(b"parquet-cpp", b"parquet-CPP"))  # the same size
    kept = kept_of(ShardCorpus(BUCKET))
    assert "shard_00001" in " ".join(kept.problems) and "the shard has changed" in kept.problems[-1]


@pytest.mark.parametrize(
    ("error", "says"), [(PermissionError, "denied"), (FileNotFoundError, "none kept")], ids=["denied", "not there"]
)
def test_a_place_that_cannot_be_listed_is_no_reason_to_stop(monkeypatch, error, says):
    corpus = encoded(folder(BUCKET, [[3]]))

    def find(path, **options):
        raise error("denied")

    monkeypatch.setattr(corpus.fs, "find", find, raising=False)
    kept = kept_of(corpus)
    assert says in lines_of(kept) and kept.read_group("train", 0) == ["00000", "00001", "00002"]


# ---- making them


def test_encoding_again_makes_what_is_missing_only(capsys):
    encoded(folder(BUCKET, [[3], [4], [2]]))
    before = {path: fsspec.filesystem("shaky").modified(path) for path in ids_files(BUCKET)}
    fsspec.filesystem("shaky").rm(ids_files(BUCKET)[1])
    encoded(BUCKET)
    after = {path: fsspec.filesystem("shaky").modified(path) for path in ids_files(BUCKET)}
    assert [path for path in before if before[path] != after[path]] == [ids_files(BUCKET)[1]]
    assert "1 of 4 shards to encode" in capsys.readouterr().err
    encoded(BUCKET)
    assert "all 4 shards have their ids" in capsys.readouterr().err


def test_a_plan_says_what_it_takes_and_writes_nothing(tmp_path, capsys):
    rng = np.random.default_rng(1)
    words = ["".join(rng.choice(list("abc "), 2000)) for _ in range(200)]
    shard(tmp_path / "a.parquet", [words[:100], words[100:]])
    shard(tmp_path / "b.parquet", [["v"]])
    encoded(tmp_path, plan=True)
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a.parquet", "b.parquet"]
    said = capsys.readouterr().err
    assert "2 of 2 shards to encode: about 0.4M tokens, 80" in said and "are free" in said  # 800 kB


def test_other_corpora_are_told_so(tmp_path):
    (tmp_path / "a.txt").write_text("\n\n".join(f"text {i}" for i in range(30)))
    with pytest.raises(UserError, match="is no corpus of shards") as caught:
        encode_ids.encode(open_corpus(DataConfig(corpus=str(tmp_path)), 0), TOKENIZER, 1)
    assert "\n" not in str(caught.value)


def test_a_full_disk_is_one_line_and_leaves_nothing_half_written(tmp_path, monkeypatch):
    folder(tmp_path, [[3], [4], [2]])
    real, count = kept_ids.Writer.add, []

    def add(self, rows):
        count.append(1)
        if len(count) == 2:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, rows)

    monkeypatch.setattr(kept_ids.Writer, "add", add)
    with pytest.raises(UserError, match=r"shard_00001.parquet.ids: No space left .* \(1 of 4 shards are encoded") as e:
        encoded(tmp_path)
    assert "\n" not in str(e.value) and "goes on with the rest" in str(e.value)
    monkeypatch.undo()
    assert [Path(path).name for path in ids_files(tmp_path)] == ["shard_00000.parquet.ids"]
    assert not [path for path in tmp_path.rglob("*") if storage.TEMPORARY in path.name]
    assert kept_of(encoded(tmp_path)).count("train") == (3, 3)
    monkeypatch.setattr(storage, "free_bytes", lambda folder: 10)
    (tmp_path / kept_of(ShardCorpus(tmp_path)).folder / "shard_00000.parquet.ids").unlink()
    with pytest.raises(UserError, match="bytes and 10 are free"):
        encoded(tmp_path)


def test_a_bucket_that_takes_nothing_or_half(monkeypatch):
    corpus = ShardCorpus(folder(BUCKET, [[3]]))
    real = Shaky.put_file

    def refuse(self, local, path, **options):
        raise PermissionError("no writing")

    monkeypatch.setattr(Shaky, "put_file", refuse)
    with pytest.raises(UserError, match=r"shard_00000.parquet.ids cannot be written: PermissionError: no writing") as e:
        encode_ids.encode(corpus, TOKENIZER, 1)
    assert "\n" not in str(e.value) and not ids_files(BUCKET)
    tries = []

    def half(self, local, path, **options):
        tries.append(path)
        if len(tries) < 3:
            return write(path, b"half")
        return real(self, local, path, **options)

    monkeypatch.setattr(Shaky, "put_file", half)
    encode_ids.encode(corpus, TOKENIZER, 1)
    assert len(tries) == 4 and kept_of(corpus).count("train") == (1, 1)


def test_a_damaged_shard_is_named(tmp_path):
    damaged_inside(tmp_path)
    with pytest.raises(UserError, match=r"a\.parquet .* row group 1"):
        encoded(tmp_path)
    assert not ids_files(tmp_path)


# ---- the command


@pytest.fixture(scope="module")
def real(tmp_path_factory):
    """(a folder of shards, a tokenizer's folder)."""
    place = tmp_path_factory.mktemp("real")
    rng = np.random.default_rng(0)
    for i in range(4):
        words = ["".join(rng.choice(list("abcdefgh \n"), 3000)) for _ in range(64)]
        (place / "shards").mkdir(exist_ok=True)
        shard(place / f"shards/shard_{i}.parquet", [words[:20], words[20:40], words[40:]])
    Tokenizer.train(words, 400).save(place / "tokenizer")
    return place / "shards", place / "tokenizer"


@pytest.fixture
def fresh(real):
    """The same, without ids."""
    for path in real[0].glob("ids-*"):
        shutil.rmtree(path)
    return real


def start(shards, tokenizer, *more, hold=""):
    code = f"import sys\nfrom nanochat_lib import kept_ids\nfrom nanochat_lib.cli import main\n{hold}\nsys.exit(main())"
    command = [sys.executable, "-c", code, "data", "encode", str(shards), "--tokenizer", str(tokenizer), *more]
    return subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )  # fmt: skip


def finish(process):
    out, err = process.communicate(timeout=60)
    assert "Traceback" not in err, err
    return process.returncode, err


def test_several_processes_make_what_one_makes(fresh):
    shards, tokenizer = fresh
    assert finish(start(shards, tokenizer, "--jobs", "3"))[0] == 0
    many = {path: Path(path).read_bytes() for path in ids_files(shards)}
    corpus = ShardCorpus(shards)
    for path in many:
        Path(path).unlink()
    encode_ids.encode(corpus, Tokenizer.load(tokenizer), 1)
    assert len(many) == 4 and {path: Path(path).read_bytes() for path in ids_files(shards)} == many


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_several_processes_write_into_a_real_store(real, kind, tmp_path):
    """Their clients, in processes of their own; then ids and texts of one row group each by one request."""
    with s3_server() if kind == "s3" else gs_server("bucket") as server:
        url = f"{server.bucket('texts')}/corpus" if kind == "s3" else f"{server}/corpus"
        for path in real[0].glob("*.parquet"):
            with fsspec.open(f"{url}/{path.name}", "wb") as file:
                file.write(path.read_bytes())
        code, err = finish(start(url, real[1], "--jobs", "2"))
        assert code == 0 and "4 of 4 shards to encode" in err, err
        tokenizer = Tokenizer.load(real[1])
        corpus = ShardCorpus(url)
        kept = kept_of(corpus, tokenizer)
        assert kept.count("train") == (3, 3) and kept.count("val") == (1, 1)
        texts = corpus.read_group("train", 4)
        ids = [row.tolist() for row in kept.read_group("train", 4)[:]]
        assert ids == tokenizer.encode(texts, prepend=tokenizer.bos_id) and not kept.lines


def test_two_at_once_encode_each_shard_once(fresh):
    told = [finish(process) for process in [start(*fresh, "--jobs", "1") for _ in range(2)]]
    assert [code for code, _ in told] == [0, 0], told
    assert sum("4 of 4 shards to encode" in err for _, err in told) == 1, told


SLOW = """
import time
real = kept_ids.Writer.add
kept_ids.Writer.add = lambda self, rows: time.sleep(0.4) or real(self, rows)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGINT, signal.SIGTERM])
def test_stopped_in_the_middle_and_started_again(fresh, how):
    shards, tokenizer = fresh
    process = start(shards, tokenizer, "--jobs", "1", hold=SLOW)
    end = time.monotonic() + 40
    while len(ids_files(shards)) < 1 or not list(shards.glob("ids-*/*.tmp-*")):
        assert process.poll() is None and time.monotonic() < end, process.communicate()
        time.sleep(0.02)
    process.send_signal(how)
    _, err = process.communicate(timeout=30)
    assert process.returncode == (130 if how == signal.SIGINT else -how) and "Traceback" not in err
    assert 1 <= len(ids_files(shards)) < 4
    code, err = finish(start(shards, tokenizer, "--jobs", "1"))
    assert code == 0 and "of 4 shards to encode" in err and "4 of 4" not in err.split("to encode")[0]
    assert len(ids_files(shards)) == 4 and not list(shards.glob("ids-*/*.tmp-*"))
    assert kept_of(ShardCorpus(shards), Tokenizer.load(tokenizer)).count("train") == (3, 3)


def test_the_examples_of_the_help_parse():
    from nanochat_lib.cli import build_parser
    from nanochat_lib.encode_commands import EXAMPLES

    for line in EXAMPLES.splitlines():
        assert build_parser().parse_args(line.split()[1:]).action == "encode"


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--jobs", "0"], "--jobs 0 is out of range"),
        ([], "which corpus and which tokenizer?"),
        (["{shards}"], "which corpus and which tokenizer?"),
        (["{shards}", "--tokenizer", "nowhere"], "nowhere holds no tokenizer"),
        (["--run-dir", "nowhere"], "nowhere holds no run; begin it with"),
    ],
    ids=["jobs", "nothing", "no tokenizer", "not there", "no run"],
)
def test_mistakes_are_one_line(real, capsys, more, says):
    from nanochat_lib.cli import main

    assert main(["data", "encode", *(m.format(shards=real[0], tokenizer=real[1]) for m in more)]) == 2
    said = capsys.readouterr().err
    assert says in said and said.count("\n") == 1
