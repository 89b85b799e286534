"""Rows of a data set on disk, one at a time: the hub's parquet files of a split, in nanochat's shuffled order.

Parquet is read a whole row group at a time, so a shuffled walk through a large split would decode each group thousands
of times. Splits above SMALL bytes are therefore written once, beside their parquet files, as an Arrow file that the
operating system maps into memory: a row is then read where it lies, and the process holds nothing but the page it
needs. Small splits stay in memory as Arrow columns. Either way no row is a Python object before it is asked for.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from nanochat_lib.errors import UserError
from nanochat_lib.hub.local import MANIFEST
from nanochat_lib.hub.sets import SETS, path_of
from nanochat_lib.storage import check_room, clear_disk_errors, read_json, temporary_name

if TYPE_CHECKING:
    import pyarrow

SMALL = 16 * 2**20  # bytes of parquet files; below it a split is read into memory
BATCH_ROWS = 1024  # rows that are decoded and written at once
SHUFFLE_SEED = 42
MAPPED = "rows.arrow"


class Rows:
    """The rows of a split as dicts of plain Python values: `rows[i]`, `len(rows)`; i counts in the shuffled order."""

    def __init__(self, folder: Path, columns: tuple[str, ...], seed: int | None = SHUFFLE_SEED) -> None:
        """Opens `<folder>/manifest.json` and the files it names. UserError for damaged files and missing `columns`."""
        self.folder = folder
        self.batches = _open(folder)
        found = self.batches[0].schema.names if self.batches else columns
        if lost := [name for name in columns if name not in found]:
            raise UserError(
                f"{folder} has no column {' and '.join(map(repr, lost))} (columns: {', '.join(found)}): it is another "
                "data set's, or its layout has changed; delete the folder and fetch it again"
            )
        self.columns = list(columns)
        self.ends = np.cumsum([batch.num_rows for batch in self.batches], dtype=np.int64)
        count = int(self.ends[-1]) if self.batches else 0
        # datasets.Dataset.shuffle(seed) is this permutation, and so is nanochat's.
        shuffled = np.arange(count) if seed is None else np.random.default_rng(seed).permutation(count)
        self.order = shuffled.astype(np.int32)

    def __len__(self) -> int:
        return len(self.order)

    def __getitem__(self, index: int) -> dict:
        row = int(self.order[index])
        batch = int(np.searchsorted(self.ends, row, side="right"))
        begin = int(self.ends[batch - 1]) if batch else 0
        columns = self.batches[batch]
        try:
            return {name: columns.column(name)[row - begin].as_py() for name in self.columns}
        except UnicodeDecodeError as error:
            raise UserError(
                f"{self.folder}: row {row:,} is not UTF-8 ({error.reason}), a file is damaged: delete the folder and "
                "fetch it again"
            ) from None


def open_rows(name: str, subset: str, split: str, columns: tuple[str, ...]) -> Rows:
    """The rows of `subset`/`split` of the hub's data set `name`; UserError with the command when it is not here."""
    folder = path_of(name) / subset / split
    if not (folder / MANIFEST).is_file():
        raise UserError(missing(name, folder))
    return Rows(folder, columns)


def missing(name: str, folder: Path) -> str:
    return f"{name} is not here ({folder} has no {MANIFEST}): run `nanochat data get {name}`"


def lacking(wanted: dict[str, tuple[str, ...]]) -> list[str]:
    """Names of the data sets of which a split is not on this disk; `wanted`: {name: ("subset/split", …)}."""
    here = lambda name, split: (path_of(name) / split / MANIFEST).is_file()  # noqa: E731
    return [name for name, splits in wanted.items() if name in SETS and not all(here(name, s) for s in splits)]


def _open(folder: Path) -> list[pyarrow.RecordBatch]:
    """The split's rows in the order of its files: mapped from MAPPED, which is written when needed, or in memory."""
    names = read_json(folder / MANIFEST)
    if not isinstance(names, list) or not names:
        raise UserError(f"{folder / MANIFEST} names no files: delete {folder} and fetch it again")
    files = [folder / str(name) for name in names]
    if lost := [path for path in files if not path.is_file()]:
        raise UserError(f"{lost[0]} is missing, {MANIFEST} names it: delete {folder} and fetch it again")
    if sum(path.stat().st_size for path in files) <= SMALL:
        return [batch for path in files for batch in _decoded(path)]
    return _mapped(folder / MAPPED, files)


def _decoded(path: Path) -> Iterator[pyarrow.RecordBatch]:
    """The rows of a parquet file, BATCH_ROWS at a time."""
    import pyarrow.parquet as pq

    with _naming(path), pq.ParquetFile(path, pre_buffer=False) as file:
        yield from file.iter_batches(BATCH_ROWS, use_threads=False)


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Turns what pyarrow says of a damaged file in the block into a UserError that names the file."""
    import pyarrow

    try:
        yield
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{path} ({path.stat().st_size:,} bytes) cannot be read as parquet: {str(error).splitlines()[0]}; "
            "it is probably cut short: delete its folder and fetch it again"
        ) from None


def _mapped(path: Path, files: list[Path]) -> list[pyarrow.RecordBatch]:
    """The Arrow file `path` of the parquet `files`, made by one process at a time when it is not there or of others."""
    stats = [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    source = hashlib.sha256(repr(stats).encode()).hexdigest()
    batches = _read_mapped(path, source)
    if batches is None:
        with _alone(path):
            batches = _read_mapped(path, source)  # another process may have written it meanwhile
            if batches is None:
                _write_mapped(path, files, source)
                batches = _read_mapped(path, source)
    return batches


def _read_mapped(path: Path, source: str) -> list[pyarrow.RecordBatch] | None:
    import pyarrow

    try:
        reader = pyarrow.ipc.open_file(pyarrow.memory_map(str(path)))
        if (reader.schema.metadata or {}).get(b"source") != source.encode():
            return None
        return [reader.get_batch(i) for i in range(reader.num_record_batches)]
    except (pyarrow.ArrowException, OSError):
        return None


def _write_mapped(path: Path, files: list[Path], source: str) -> None:
    import pyarrow
    import pyarrow.parquet as pq

    with _naming(files[0]):
        schema = pq.read_schema(files[0]).with_metadata({"source": source})
    check_room(path.parent, sum(_size(file) for file in files))
    temporary = temporary_name(path)
    try:
        with clear_disk_errors(path), pyarrow.ipc.new_file(str(temporary), schema) as writer:
            for file in files:
                for batch in _decoded(file):
                    writer.write(batch.cast(schema) if batch.schema != schema else batch)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _size(path: Path) -> int:
    """Bytes of the decoded columns, about."""
    import pyarrow.parquet as pq

    with _naming(path):
        metadata = pq.read_metadata(path)
    return sum(metadata.row_group(i).total_byte_size for i in range(metadata.num_row_groups))


@contextlib.contextmanager
def _alone(path: Path) -> Iterator[None]:
    """Waits until no other process writes `path`; the lock ends with its process."""
    with clear_disk_errors(path), open(path.with_name(f".{path.name}.lock"), "a", encoding="utf-8") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
