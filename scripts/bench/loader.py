"""Tokens a second of the whole loader, parquet to rows, and of a plain implementation of nanochat's algorithm.

Both read the same shards with the same tokenizer, and their rows are compared, so a ratio is only printed for equal
work. "Per core" divides by CPU seconds of all threads, "wall" by the clock. The second table leaves byte-pair encoding
out: a stand-in for the tokenizer hands out ids that were made before, what remains is reading, packing and copying. The
third compares what a run does whose shards were encoded before (`nanochat data encode`) with the plain implementation,
which encodes at every reading; what encoding them once has cost is beside it. The last reads the shards from a bucket.

    python scripts/bench/loader.py --rows 512 --buffers 100 1000 10000
    python scripts/bench/loader.py --shards ~/.cache/nanochat/base_data_climbmix --tokenizer runs/x/tokenizer
"""

from __future__ import annotations

import argparse
import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from fsspec.implementations.memory import MemoryFileSystem

from nanochat_lib.corpus import open_corpus
from nanochat_lib.kept_ids import KeptIds, path_of, write_shard
from nanochat_lib.loader import PretrainLoader
from nanochat_lib.presets import DataConfig
from nanochat_lib.shards import ShardCorpus
from nanochat_lib.storage import atomic_file
from nanochat_lib.tokenizer import Tokenizer

BATCH_ROWS = 8
TURN_ROWS = 4 * BATCH_ROWS
LONGER = 20  # ids that are kept are read so fast that a figure by itself needs more rows


def plain_loader(
    paths: list[Path], tokenizer: Tokenizer, length: int, buffer_size: int, rank: int = 0, world: int = 1
) -> Iterator[np.ndarray]:
    """Rows (T + 1,) as nanochat's algorithm is worded: documents encoded one by one, the buffer searched each time."""

    def chunks() -> Iterator[list[str]]:
        while True:
            for path in paths:
                file = pq.ParquetFile(path)
                for group in range(rank, file.num_row_groups, world):
                    texts = file.read_row_group(group, columns=["text"]).column("text").to_pylist()
                    for start in range(0, len(texts), 128):
                        yield texts[start : start + 128]

    stream = chunks()
    buffer: list[list[int]] = []
    capacity = length + 1
    while True:
        row, position = np.empty(capacity, np.int32), 0
        while position < capacity:
            while len(buffer) < buffer_size:
                buffer.extend(tokenizer.encode(text, prepend=tokenizer.bos_id) for text in next(stream))
            room, best, longest = capacity - position, -1, 0
            for i, document in enumerate(buffer):
                if longest < len(document) <= room:
                    best, longest = i, len(document)
            if best < 0:
                best = min(range(len(buffer)), key=lambda i: len(buffer[i]))
            document = buffer.pop(best)[:room]
            row[position : position + len(document)] = document
            position += len(document)
        yield row


def our_loader(
    corpus: ShardCorpus, tokenizer: Tokenizer, length: int, buffer_size: int, kept: KeptIds | None = None
) -> Iterator[tuple]:
    """The same rows from the library, as inputs and targets."""
    options = {"epochs": None, "prefetch": 0, "kept": kept}
    with PretrainLoader(corpus, tokenizer, "train", BATCH_ROWS, length, buffer_size, **options) as batches:
        for batch in batches:
            yield from zip(batch.inputs, batch.targets, strict=True)


def whole(row: np.ndarray | tuple) -> np.ndarray:
    """(T + 1,) of a row of either loader."""
    return np.append(row[0], row[1][-1]) if isinstance(row, tuple) else row


class OneThread:
    """A tokenizer that works in the thread that asks: two threads on one core would make its seconds look like more."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer, self.fingerprint, self.bos_id = tokenizer, tokenizer.fingerprint, tokenizer.bos_id

    def encode(self, text: str, prepend: int) -> list[int]:
        return self.tokenizer.encode(text, prepend=prepend)

    def encode_arrays(self, texts: list[str], prepend: int) -> list[np.ndarray]:
        return self.tokenizer.encode_arrays(texts, prepend, num_threads=1)


class ReadyIds:
    """In place of a tokenizer: the ids of texts that were encoded before, as lists and as arrays."""

    fingerprint = "ready ids"

    def __init__(self, tokenizer: Tokenizer, texts: list[str]) -> None:
        self.bos_id = tokenizer.bos_id
        keys = list(map(self.key, texts))
        if len(set(keys)) < len(set(texts)):
            raise SystemExit("two documents look alike to the stand-in: make `key` look at more of them")
        self.lists = dict(zip(keys, tokenizer.encode(texts, prepend=self.bos_id), strict=True))
        self.arrays = dict(zip(keys, tokenizer.encode_arrays(texts, self.bos_id), strict=True))

    @staticmethod
    def key(text: str) -> tuple:
        """To find a whole text takes as long as to pack it, and is no part of either loader."""
        return len(text), text[:100], text[-100:]

    def encode(self, text: str, prepend: int) -> list[int]:
        return self.lists[self.key(text)]

    def encode_arrays(self, texts: list[str], prepend: int) -> list[np.ndarray]:
        return [self.arrays[self.key(text)] for text in texts]


class Bucket(MemoryFileSystem):
    """Files in memory, of which every request takes `delay` seconds, as from an object store."""

    protocol = "slow"
    store: dict = {}
    pseudo_dirs = [""]
    delay = 0.0

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return MemoryFileSystem._strip_protocol(str(path).replace("slow://", "memory://", 1))

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **options: object) -> bytes:
        time.sleep(self.delay)
        return super().cat_file(path, start, end, **options)


def write_shards(folder: Path, documents: int, characters: float) -> None:
    """Shards of 1,024 documents a row group: excerpts of the primer, their lengths log-normal as on the web."""
    rng = np.random.default_rng(0)
    whole = "\n\n".join(open_corpus(DataConfig(), 0).documents("train"))
    shards = -(-documents // 2048) + 1
    for shard in range(shards):
        lengths = np.clip(rng.lognormal(np.log(characters), 0.9, 2048), 10, 200_000).astype(int)
        starts = rng.integers(0, len(whole) - lengths)
        texts = [whole[start : start + length] for start, length in zip(starts, lengths, strict=True)]
        table = pa.table({"text": texts})
        path = folder / f"shard_{shard:05d}.parquet"
        options = {"compression": "zstd", "compression_level": 3, "use_dictionary": False, "write_statistics": False}
        pq.write_table(table, path, row_group_size=1024, **options)


def measured(streams: list[Iterator], count: int, same: bool = True) -> list[tuple[float, float]]:
    """(CPU seconds, seconds) of `count` rows of each stream, after those that fill its buffer.

    The streams work in turn, a few batches each, so that what else the machine does meets all of them. Ends
    the program when their rows differ, which are to be the `same`.
    """
    for stream in streams:
        for _ in range(BATCH_ROWS):
            next(stream)
    # The collector would visit each number of the plain loader's lists now and then, in whoever's turn it is.
    gc.collect()
    gc.freeze()
    spent = np.zeros((len(streams), 2))
    for _ in range(count // TURN_ROWS):
        made = []
        for i, stream in enumerate(streams):
            before = time.process_time(), time.perf_counter()
            made.append([next(stream) for _ in range(TURN_ROWS)])
            spent[i] += np.subtract((time.process_time(), time.perf_counter()), before)
        if same and any(
            (whole(a) != whole(b)).any() for other in made[1:] for a, b in zip(made[0], other, strict=True)
        ):
            raise SystemExit("the loaders disagree: their rows are not the same")
    for stream in streams:
        stream.close()
    return spent.tolist()


def compare(
    paths: list[Path],
    corpus: ShardCorpus,
    tokenizer: OneThread | ReadyIds,
    options: argparse.Namespace,
    kept: KeptIds | None = None,
) -> list[list[float]]:
    """A line for each buffer size; (plain, ours) CPU seconds a token of each."""
    costs = []
    tokens = options.rows * options.sequence_len
    print(
        f"{'buffer':>8} {'plain: per core':>17} {'wall':>13} {'ours: per core':>17} {'wall':>13} {'ratio per core':>15}"
    )
    for size in options.buffers:
        plain = plain_loader(paths, tokenizer, options.sequence_len, size)
        ours = our_loader(corpus, tokenizer, options.sequence_len, size, kept)
        found = measured([plain, ours], options.rows)
        figures = [tokens / seconds for pair in found for seconds in pair]
        print(
            f"{size:>8,} {figures[0]:>11,.0f} tok/s {figures[1]:>7,.0f} tok/s "
            f"{figures[2]:>11,.0f} tok/s {figures[3]:>7,.0f} tok/s {figures[2] / figures[0]:>14.2f}x"
        )
        costs.append([cpu / tokens for cpu, _ in found])
    return costs


def compare_kept(
    paths: list[Path], corpus: ShardCorpus, tokenizer: Tokenizer, options: argparse.Namespace, encoding: float
) -> None:
    """With ids that are kept, against the plain loader; by themselves; and against encoding at every reading.

    `encoding`: CPU seconds a trained token of our loader when it encodes, at the last of the buffers' sizes.
    """
    kept, once = keep(corpus, tokenizer)
    compare(paths, corpus, OneThread(tokenizer), options, kept)
    count, length = LONGER * options.rows, options.sequence_len
    streams = [our_loader(corpus, tokenizer, length, size, kept) for size in options.buffers]
    costs = [cpu / (count * length) for cpu, _ in measured(streams, count, same=False)]
    speeds = ", ".join(f"{1 / cost:,.0f} at {size:,}" for size, cost in zip(options.buffers, costs, strict=True))
    print(
        f"ours in turn, {count:,} rows each: tok/s per core {speeds}; slowest / fastest {min(costs) / max(costs):.2f}"
    )
    how = {"epochs": None, "prefetch": 0, "kept": kept}
    with PretrainLoader(corpus, tokenizer, "train", BATCH_ROWS, length, options.buffers[-1], **how) as batches:
        *_, last = islice(batches, count // BATCH_ROWS)
    tokens = sum(block.ids for shard in corpus.shards["train"] for block in kept.files[shard.name].blocks)
    trained = count * length / (last.consumed / corpus.num_documents("train") * tokens)  # the others are cut off
    print(
        f"encoding once: {1 / once:,.0f} tok/s per core, {kept.bytes / 1e6:,.1f} MB beside "
        f"{sum(path.stat().st_size for path in paths) / 1e6:,.1f} MB of shards; it has paid after "
        f"{once / (trained * (encoding - costs[-1])):.2f} readings by this loader, which encodes otherwise"
    )


def keep(corpus: ShardCorpus, tokenizer: Tokenizer) -> tuple[KeptIds, float]:
    """(the ids of the training shards, kept now; CPU seconds that took for each token, in this process alone)."""
    kept = KeptIds(corpus, tokenizer.fingerprint)
    tokens, before = 0, time.process_time()
    for shard in corpus.shards["train"]:
        with atomic_file(path_of(kept.folder, shard)) as file:
            tokens += write_shard(corpus.fs, shard, tokenizer, file)[1]
    return KeptIds(corpus, tokenizer.fingerprint), (time.process_time() - before) / tokens


def from_buckets(folder: Path, tokenizer: Tokenizer, options: argparse.Namespace) -> None:
    """Local shards, and the same shards in a bucket without and with latency."""
    fsspec.register_implementation("slow", Bucket, clobber=True)
    bucket = fsspec.filesystem("slow")
    tokens = options.rows * options.sequence_len
    for path in folder.glob("*.parquet"):
        bucket.pipe_file(f"/bucket/{path.name}", path.read_bytes())
    print(f"{'shards':>24} {'opened in':>10} {'first batch':>12} {'per core':>17} {'wall':>17}")
    for name, url, delay in (
        ("local", str(folder), 0.0),
        ("bucket", "slow://bucket", 0.0),
        (f"bucket, {options.latency:g} ms", "slow://bucket", options.latency / 1000),
    ):
        Bucket.delay = delay
        clock = time.perf_counter()
        corpus = ShardCorpus(url)
        opened = time.perf_counter()
        rows = our_loader(corpus, tokenizer, options.sequence_len, 1000)
        next(rows)
        first = time.perf_counter()
        ((cpu, wall),) = measured([rows], options.rows)
        print(
            f"{name:>24} {opened - clock:>8.3f} s {first - opened:>10.2f} s "
            f"{tokens / cpu:>11,.0f} tok/s {tokens / wall:>11,.0f} tok/s"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=512, help="rows timed for each figure (default 512)")
    parser.add_argument("--sequence-len", type=int, default=2048, help="T; a row holds T + 1 tokens (default 2048)")
    parser.add_argument("--buffers", type=int, nargs="+", default=[100, 1000, 10000], help="documents in the buffer")
    parser.add_argument("--documents", type=int, default=4096, help="documents that are written (default 4096)")
    parser.add_argument("--characters", type=float, default=2400, help="their median length (default 2400)")
    parser.add_argument("--latency", type=float, default=50, help="of a bucket's request, in ms (default 50)")
    parser.add_argument("--shards", type=Path, help="a folder of shards to read, instead of writing some")
    parser.add_argument("--tokenizer", type=Path, help="a tokenizer's folder, instead of training one")
    options = parser.parse_args()
    options.rows = max(options.rows // TURN_ROWS, 1) * TURN_ROWS
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.shards or Path(scratch)
        if not options.shards:
            write_shards(folder, options.documents, options.characters)
        corpus = ShardCorpus(folder)
        train: Callable[[], Tokenizer] = lambda: Tokenizer.train(  # noqa: E731
            corpus.documents("train"), 8192, max_chars=5_000_000, strict=False
        )
        tokenizer = Tokenizer.load(options.tokenizer) if options.tokenizer else train()
        paths = [folder / shard.name for shard in corpus.shards["train"]]
        size = corpus.num_documents("train")
        print(
            f"{size:,} documents, {options.rows:,} rows of {options.sequence_len + 1:,} tokens, same rows on both sides"
        )
        print("\nthe whole loader, encoding in one thread")
        encoding = compare(paths, corpus, OneThread(tokenizer), options)
        print("\nwithout byte-pair encoding: ids that were made before, lists for the plain loader, arrays for ours")
        compare(paths, corpus, ReadyIds(tokenizer, list(corpus.documents("train"))), options)
        print("\nids kept: ours reads the ids of an earlier `data encode`, the plain loader encodes")
        compare_kept(paths, corpus, tokenizer, options, encoding[-1][1])
        print("\nlocal shards and a bucket, buffer 1,000, encoding in as many threads as there are cores")
        from_buckets(folder, tokenizer, options)


if __name__ == "__main__":
    main()
