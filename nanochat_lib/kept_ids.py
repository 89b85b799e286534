"""Token ids of shards, kept beside them: encoded once, and read instead of the texts by every run after that.

A file of ids belongs to one shard and one tokenizer: its footer names the tokenizer's fingerprint and the shard's size
and digest, and a file that names others is not used. It holds a block for each row group, with a checksum, so that a
row group costs one read and damage is found where it lies. A shard whose ids are missing, of other make, or damaged is
encoded from its text; the rows are the same either way.

    MAGIC  block 0  block 1 …  footer (JSON)  its length (uint32)  its CRC-32 (uint32)  MAGIC
    block: lengths (R,) int32, then ids (N,) uint16, or uint32 where the vocabulary needs it; all little-endian

The length of row r is the number of its ids, BOS included, or says why the row has no text (REASONS).
"""

from __future__ import annotations

import json
import struct
import sys
import zlib
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, BinaryIO

import numpy as np

from nanochat_lib import parquet
from nanochat_lib.errors import UserError
from nanochat_lib.shards import FOOTER_READERS, ShardCorpus

if TYPE_CHECKING:
    import fsspec

    from nanochat_lib.parquet import Shard
    from nanochat_lib.tokenizer import Tokenizer

MAGIC = b"NANOIDS1"  # its last character is the version of the layout
END = struct.Struct("<II8s")  # after the footer
SUFFIX = ".ids"
REASONS = {"null": -1, "empty": -2, "not UTF-8": -3}  # length of a row without text
WORDS = {length: reason for reason, length in REASONS.items()}
ANEW = "`nanochat data encode` makes it anew"


class Unusable(Exception):
    """Why a file of ids, or one of its blocks, is not used."""


@dataclass(frozen=True)
class Block:
    """Where the ids of one row group stand."""

    start: int  # byte in the file
    rows: int
    ids: int
    crc32: int

    def size(self, dtype: np.dtype) -> int:
        return 4 * self.rows + dtype.itemsize * self.ids


@dataclass(frozen=True)
class KeptFile:
    """The ids of one shard, as their footer describes them."""

    path: str
    dtype: np.dtype
    blocks: tuple[Block, ...]  # of each row group, empty ones too


class GroupIds:
    """The ids of a row group's rows: a slice of it is a list with an array for each row, None for one without text.

    The arrays are views of one block: whoever keeps one for long copies it, or the whole block stays in memory.
    """

    def __init__(self, lengths: np.ndarray, ids: np.ndarray) -> None:
        """`lengths` (R,) int32 as in a block; `ids` (N,) of all rows one after another."""
        self.lengths, self.ids = lengths, ids
        self._ends = np.maximum(lengths, 0).cumsum(dtype=np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, rows: slice) -> list[np.ndarray | None]:
        ids, ends = self.ids, self._ends[rows].tolist()
        lengths = self.lengths[rows].tolist()
        return [ids[end - length : end] if length > 0 else None for length, end in zip(lengths, ends, strict=True)]

    def without_text(self) -> list[tuple[int, str]]:
        """(row, why) of the rows that have no text."""
        return [(int(row), WORDS[int(self.lengths[row])]) for row in np.flatnonzero(self.lengths < 0)]


def dtype_for(vocab_size: int) -> np.dtype:
    """The smallest type that holds every id of a vocabulary."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


def folder_of(shards: Sequence[Shard], fingerprint: str) -> str:
    """Where the ids of these shards lie for a tokenizer: a folder beside the shards."""
    first = shards[0]
    return f"{first.path[: len(first.path) - len(first.name)]}ids-{fingerprint[:16]}"


def path_of(folder: str, shard: Shard) -> str:
    return f"{folder}/{shard.name}{SUFFIX}"


# ---- writing


class Writer:
    """Writes the ids of one shard into an open file, a row group at a time, in order."""

    def __init__(self, file: BinaryIO, shard: Shard, tokenizer: Tokenizer) -> None:
        self.file, self.shard, self.tokenizer = file, shard, tokenizer
        self.dtype = dtype_for(tokenizer.vocab_size)
        self.blocks: list[Block] = []
        self.at = file.write(MAGIC)
        self.tokens = 0

    def add(self, rows: list[tuple[str | None, str]]) -> None:
        """Encodes the rows of the next row group, as `parquet.read_texts` gives them."""
        encoded = iter(encode_texts(self.tokenizer, [text for text, _ in rows if text is not None]))
        arrays = [None if text is None else next(encoded) for text, _ in rows]
        lengths = [REASONS[reason] if ids is None else len(ids) for ids, (_, reason) in zip(arrays, rows, strict=True)]
        joined = np.concatenate([np.zeros(0, np.int32), *(ids for ids in arrays if ids is not None)])
        data = np.array(lengths, "<i4").tobytes() + joined.astype(self.dtype).tobytes()
        self.blocks.append(Block(self.at, len(rows), len(joined), zlib.crc32(data)))
        self.at += self.file.write(data)
        self.tokens += len(joined)

    def finish(self) -> int:
        """Writes the footer, without which the file does not count. Returns the file's size."""
        content = {
            "tokenizer": self.tokenizer.fingerprint,
            "shard": {"size": self.shard.size, "digest": self.shard.digest},
            "dtype": self.dtype.str,
            "blocks": [[block.start, block.rows, block.ids, block.crc32] for block in self.blocks],
        }
        footer = json.dumps(content, separators=(",", ":")).encode()
        return self.at + self.file.write(footer + END.pack(len(footer), zlib.crc32(footer), MAGIC))


def encode_texts(tokenizer: Tokenizer, texts: list[str]) -> list[np.ndarray]:
    """The ids of each text, BOS in front, made in this thread."""
    if hasattr(tokenizer, "encode_arrays"):  # a stand-in may know lists only
        return tokenizer.encode_arrays(texts, prepend=tokenizer.bos_id, num_threads=1)
    return [np.array(ids, np.int32) for ids in tokenizer.encode(texts, prepend=tokenizer.bos_id)]


def write_shard(
    fs: fsspec.AbstractFileSystem,
    shard: Shard,
    tokenizer: Tokenizer,
    file: BinaryIO,
    told: Callable[[int, int], None] = lambda rows, tokens: None,
) -> tuple[int, int]:
    """Encodes a shard into an open file. Returns (bytes, ids); `told(rows, ids)` is called after each row group."""
    writer = Writer(file, shard, tokenizer)
    for group, count in enumerate(shard.rows):
        before = writer.tokens
        writer.add(parquet.read_rows(fs, shard, group))
        told(count, writer.tokens - before)
    return writer.finish(), writer.tokens


# ---- reading


def read_kept(fs: fsspec.AbstractFileSystem, path: str, size: int, shard: Shard, fingerprint: str) -> KeptFile:
    """The footer of a file of ids. Unusable unless it is whole and belongs to this shard and this tokenizer."""
    try:
        tail = parquet.read_bytes(fs, path, max(size - parquet.TAIL, 0), size)
        if len(tail) < END.size or tail[-len(MAGIC) :] != MAGIC:
            raise Unusable("it was never finished, or is of another version")
        length, crc32, _ = END.unpack(tail[-END.size :])
        if length + END.size > size:
            raise Unusable("its footer is longer than the file")
        if length + END.size > len(tail):
            tail = parquet.read_bytes(fs, path, size - length - END.size, size)
    except UserError as error:
        raise Unusable(str(error)) from None
    footer = tail[-END.size - length : -END.size]
    if zlib.crc32(footer) != crc32:
        raise Unusable("its footer is damaged")
    content = json.loads(footer)
    if content["tokenizer"] != fingerprint:
        raise Unusable("it was made with another tokenizer")
    if content["shard"] != {"size": shard.size, "digest": shard.digest}:
        raise Unusable("the shard has changed since")
    dtype, blocks = np.dtype(content["dtype"]), tuple(Block(*block) for block in content["blocks"])
    end = len(MAGIC) + sum(block.size(dtype) for block in blocks)
    if tuple(block.rows for block in blocks) != shard.rows or end + length + END.size != size:
        raise Unusable("its blocks are not those of the shard")
    return KeptFile(path, dtype, blocks)


def read_block(fs: fsspec.AbstractFileSystem, kept: KeptFile, group: int) -> GroupIds:
    """The ids of a row group. Unusable when they cannot be read or are damaged."""
    block = kept.blocks[group]
    try:
        data = parquet.read_bytes(fs, kept.path, block.start, block.start + block.size(kept.dtype))
    except UserError as error:
        raise Unusable(str(error)) from None
    if zlib.crc32(data) != block.crc32:
        raise Unusable(f"row group {group} is damaged: its checksum differs")
    lengths = np.frombuffer(data, "<i4", block.rows)
    return GroupIds(lengths, np.frombuffer(data, kept.dtype, block.ids, 4 * block.rows))


class KeptIds:
    """The ids that are kept of a corpus of shards for one tokenizer; what they lack is left to the texts."""

    def __init__(self, corpus: ShardCorpus, fingerprint: str, warn: Callable[[str], None] | None = None) -> None:
        """Reads the footers of the files there; `problems` has a line for each that is not used.

        `warn` gets a line when ids turn out damaged while they are read (default: printed on stderr).
        """
        self.corpus, self.fs = corpus, corpus.fs
        self.warn = warn or (lambda line: print(line, file=sys.stderr, flush=True))
        shards = [shard for split in corpus.shards.values() for shard in split]
        self.folder = folder_of(shards, fingerprint)
        self.files: dict[str, KeptFile] = {}  # by the shard's name
        self.problems: list[str] = []
        self.bytes = 0  # of all files there
        try:
            there = _listing(self.fs, self.folder)
        except UserError as error:
            self.problems.append(str(error))
            return
        self.bytes = sum(there.values())

        def read(shard: Shard) -> KeptFile | str | None:
            path = path_of(self.folder, shard)
            if path not in there:
                return None
            try:
                return read_kept(self.fs, path, there[path], shard, fingerprint)
            except Unusable as reason:
                return f"{path}: {reason}"

        with ThreadPoolExecutor(FOOTER_READERS) as pool:
            for shard, found in zip(shards, pool.map(read, shards), strict=True):
                if isinstance(found, KeptFile):
                    self.files[shard.name] = found
                elif found:
                    self.problems.append(found)

    def count(self, split: str) -> tuple[int, int]:
        """(shards of a split whose ids are kept, all of its shards)."""
        shards = self.corpus.shards[split]
        return sum(shard.name in self.files for shard in shards), len(shards)

    def line(self) -> str:
        """What is kept, for the start of a run."""
        train, shards = self.count("train")
        if not self.files and not self.problems:
            return (
                "token ids: none kept, texts are encoded while they are read; "
                "`nanochat data encode` keeps them, before a chip is rented"
            )
        val = "and the validation shard" if self.count("val")[0] else "without the validation shard"
        line = f"token ids: kept for {train:,} of {shards:,} training shards {val}, in {self.folder}"
        if self.problems:
            more = f" and {len(self.problems) - 1:,} more" if len(self.problems) > 1 else ""
            line += f"; not used: {self.problems[0]}{more}; {ANEW}"
        return line

    def read_group(self, split: str, number: int) -> GroupIds | list[str | None]:
        """The ids of row group `number` of a split; its texts where none are kept, as `ShardCorpus.read_group`."""
        group = self.corpus.groups(split)[number]
        name = group.shard.name
        kept = self.files.get(name)
        if kept is not None:
            try:
                found = read_block(self.fs, kept, group.index)
            except Unusable as reason:
                if self.files.pop(name, None):  # once, whoever comes first
                    self.warn(f"{kept.path} is not used from here on, the shard's texts are encoded: {reason}; {ANEW}")
            else:
                self.corpus.note_without_text(split, number, found.without_text)
                return found
        return self.corpus.read_group(split, number)


def _listing(fs: fsspec.AbstractFileSystem, folder: str) -> dict[str, int]:
    """{path: bytes} of the files of ids in a folder; empty when there is none."""

    def find() -> dict:
        try:
            return fs.find(folder, detail=True)
        except FileNotFoundError:
            return {}

    fs.invalidate_cache(folder)  # another process may have written there since
    found = parquet.retried(fs, folder, find)
    return {path: int(info["size"]) for path, info in found.items() if path.endswith(SUFFIX)}
