"""A corpus of many parquet shards, local or in a bucket: known from its footers, read a row group at a time.

Opening it reads the end of each file and nothing else, whatever the amount of text. One shard is for validation: the
one that the data set's makers fixed, else the last by name. Documents that cannot be trained on (empty, null, not
UTF-8) keep their row, are left out when their row group is read, and are counted in `report` once for each of them.
"""

from __future__ import annotations

import hashlib
import math
import os
import threading
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from nanochat_lib import parquet
from nanochat_lib.corpus_base import Corpus, Report
from nanochat_lib.errors import UserError
from nanochat_lib.hub.sets import SETS, Shards
from nanochat_lib.prefetch import Prefetcher

if TYPE_CHECKING:
    import fsspec

FOOTER_READERS = 32  # footers that are read at the same time: from a bucket each of them is mostly waiting
AHEAD_BYTES = 1 << 28  # shards whose row groups are larger are not read ahead: two more would stand in memory


KNOWN = {name: known for name, known in SETS.items() if isinstance(known, Shards)}  # climbmix, fineweb-edu


@dataclass(frozen=True)
class Group:
    """A row group that holds rows."""

    shard: parquet.Shard
    index: int  # in its shard
    rows: int

    @property
    def label(self) -> str:
        """Short, for log lines: shard_00012:37."""
        return f"{PurePosixPath(self.shard.name).stem}:{self.index}"


class ShardCorpus(Corpus):
    """Row groups 0, 1, 2, … of each split, counted through over its shards in name order."""

    def __init__(self, url: str | Path, known: Shards | None = None) -> None:
        """`url`: a folder or a pattern of shards, on any file system. `known` fixes the validation shard.

        Raises UserError for a missing or broken shard, a missing validation shard, or a split without documents.
        """
        self.name = str(url)
        self.fs, self.path = parquet.filesystem(self.name)
        files = _listing(self.fs, self.name, self.path)
        self.known = known or _known_by_folder(self.path)
        val = self._validation([name for name, _, _ in files])
        shards = _footers(self.fs, files)
        digest = hashlib.sha256(val.encode())
        for shard in shards:
            digest.update(f"\n{shard.name} {shard.size} {shard.digest}".encode())
        self.fingerprint = digest.hexdigest()  # names, sizes and footers, not the texts
        self.shards = {
            "train": [shard for shard in shards if shard.name != val],
            "val": [shard for shard in shards if shard.name == val],
        }
        self._groups = {split: _numbered(found) for split, found in self.shards.items()}
        self._starts = {
            split: list(accumulate((group.rows for group in groups), initial=0))
            for split, groups in self._groups.items()
        }
        self._check_splits()
        self.report = Report(
            documents=sum(starts[-1] for starts in self._starts.values()),
            characters=sum(shard.characters for shard in shards),
            notes=[
                f"{len(shards):,} shards, {sum(map(len, self._groups.values())):,} row groups, by their footers; "
                f"validation on {val}; documents without text are counted while reading"
            ],
        )
        self._seen: set[tuple[str, int]] = set()
        self._lock = threading.Lock()

    def _validation(self, names: list[str]) -> str:
        if self.known is None:
            return names[-1]
        val = self.known.validation()
        found = next((name for name in names if PurePosixPath(name).name == val), None)
        if found is None:
            raise UserError(
                f"the validation shard {val} is missing in {self.name}; fetch it with "
                f"`nanochat data get {self.known.name} --shards {len(names)}`, it makes validation losses comparable"
            )
        return found

    def _check_splits(self) -> None:
        train, val = (self._starts[split][-1] for split in ("train", "val"))
        if train and val:
            return
        shards = [shard.name for split in self.shards.values() for shard in split]
        known = f"; fetch more with `nanochat data get {self.known.name} --shards N`" if self.known else ""
        raise UserError(
            f"the corpus {self.name} has {train:,} documents for training, {val:,} for validation: one of its "
            f"{len(shards)} shards ({', '.join(shards[:3])}{', …' if len(shards) > 3 else ''}) is held out for "
            f"validation, at least one other with rows is needed{known}"
        )

    def groups(self, split: str) -> list[Group]:
        """The row groups of one epoch, without those that have no rows."""
        return self._groups[self._side(split)]

    def starts(self, split: str) -> list[int]:
        """The first document of each row group, and the number of all documents at the end."""
        return self._starts[self._side(split)]

    def _side(self, split: str) -> str:
        return "val" if self._known(split) == "val" else "train"

    def num_documents(self, split: str) -> int:
        """Rows by the footers, those without text included."""
        return self.starts(split)[-1]

    def read_group(self, split: str, number: int) -> list[str | None]:
        """The texts of row group `number`, None where a row has none that can be trained on."""
        split = self._side(split)
        group = self._groups[split][number]
        rows = parquet.read_rows(self.fs, group.shard, group.index)
        self.note_without_text(
            split, number, lambda: [(row, reason) for row, (text, reason) in enumerate(rows) if text is None]
        )
        return [text for text, _ in rows]

    def note_without_text(self, split: str, number: int, found: Callable[[], list[tuple[int, str]]]) -> None:
        """Counts the rows `found()` (row, why) of a row group in the report, when it is read for the first time."""
        split = self._side(split)
        with self._lock:
            if (split, number) in self._seen:
                return
            self._seen.add((split, number))
            group = self._groups[split][number]
            for row, reason in found():
                self.report.skip(f"{group.shard.name}, row group {group.index}, row {row + 1}", reason)

    def read_ahead(
        self, split: str, numbers: Iterable[int], read: Callable[[str, int], Sequence] | None = None
    ) -> Prefetcher:
        """(number, rows) of the row groups `numbers`; a thread fetches the next ones meanwhile. Close it.

        `read(split, number)` gives the rows, by default their texts.
        """
        read = read or self.read_group
        largest = max(shard.size // len(shard.rows) for shard in self.shards[self._side(split)] if shard.rows)

        def groups() -> Iterator[tuple[int, Sequence]]:
            for number in numbers:
                yield number, read(split, number)

        return Prefetcher(groups(), depth=1 if largest < AHEAD_BYTES else 0)

    def documents(self, split: str, start: int = 0) -> Iterator[str]:
        """One epoch of documents from row `start` on; those without text are left out. Seeks, reads no row before."""
        starts = self.starts(split)
        if start >= starts[-1]:
            return
        first = bisect_right(starts, start) - 1
        yield from filter(None, self.read_group(split, first)[start - starts[first] :])
        with self.read_ahead(split, range(first + 1, len(starts) - 1)) as groups:
            for _, texts in groups:
                yield from filter(None, texts)

    def place(self, split: str, index: int) -> str:
        """Where document `index` stands, short."""
        return self.groups(split)[bisect_right(self.starts(split), index) - 1].label

    def advice(self, readings: float, epochs: float) -> str:
        """How to get enough when the shards here must be read `readings` times and may be `epochs` times."""
        if self.known is None:
            return ""
        here = len(self.shards["train"])
        wanted = math.ceil(here * readings / epochs * 1.02)  # shards differ a little in size
        if wanted > self.known.last:
            return f" ({self.known.name} has {self.known.last:,} training shards, {here:,} are here)"
        return f" (`nanochat data get {self.known.name} --shards {wanted}`; {here:,} training shards are here)"


def _is_pattern(path: str) -> bool:
    return any(sign in path for sign in "*?[")


def _known_by_folder(path: str) -> Shards | None:
    """A copy of a published set is recognised by the name of its folder, which nanochat gave it."""
    folder = PurePosixPath(path).parent.name if _is_pattern(path) else PurePosixPath(path).name
    return next((known for known in KNOWN.values() if known.where == folder), None)


def _listing(fs: fsspec.AbstractFileSystem, url: str, path: str) -> list[tuple[str, str, int]]:
    """(name below the folder, path, bytes) of the parquet files in a folder or of a pattern, in name order."""
    find = fs.glob if _is_pattern(path) else fs.find
    found = parquet.retried(fs, url, lambda: find(path, detail=True))
    files = {
        name: int(info["size"])
        for name, info in found.items()
        if info["type"] != "directory" and name.lower().endswith(".parquet") and "/." not in name[len(path) :]
    }
    if not files:
        raise UserError(
            f"no parquet shards (*.parquet) at {url}: nothing by that name, or other files only; "
            "give a folder or a pattern of shards"
        )
    root = os.path.commonpath([PurePosixPath(name).parent for name in files])
    return sorted((os.path.relpath(name, root), name, size) for name, size in files.items())


def _footers(fs: fsspec.AbstractFileSystem, files: list[tuple[str, str, int]]) -> list[parquet.Shard]:
    def read(file: tuple[str, str, int]) -> parquet.Shard | UserError:
        name, path, size = file
        try:
            return parquet.read_footer(fs, path, size, name)
        except UserError as error:
            return error

    with ThreadPoolExecutor(FOOTER_READERS) as pool:
        found = list(pool.map(read, files))
    errors = [shard for shard in found if isinstance(shard, UserError)]
    if errors:
        more = f" ({len(errors) - 1} more shards of {len(files)} are broken)" if len(errors) > 1 else ""
        raise UserError(f"{errors[0]}{more}")
    return found


def _numbered(shards: list[parquet.Shard]) -> list[Group]:
    return [Group(shard, i, rows) for shard in shards for i, rows in enumerate(shard.rows) if rows]
