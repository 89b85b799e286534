"""Parquet shards on any file system, a row group at a time: footers first, then only the bytes that are asked for.

A footer says how many rows each row group has and where the bytes of its text column lie. So the documents of a hundred
shards are counted without reading one of them, and a row group costs one read (one request, from a bucket).
"""

from __future__ import annotations

import hashlib
import io
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from nanochat_lib.errors import UserError

if TYPE_CHECKING:
    import fsspec

WAITS = (1.0, 2.0, 4.0, 8.0)  # seconds between the attempts to read from something that is not a local disk
TAIL = 1 << 16  # bytes at the end of a file that are read at once: nearly always the whole footer
OLD_WRITERS = 100  # bytes: some files give a column's size without a page header, and pyarrow reads this much more
FINAL = (FileNotFoundError, PermissionError, IsADirectoryError, NotADirectoryError)  # waiting does not help
EXTRA = "install the extra `store` (NANOCHAT_EXTRAS=store bash scripts/setup.sh)"


@dataclass(frozen=True)
class Shard:
    """One file, as its footer describes it."""

    name: str  # below the corpus's folder
    path: str  # for the file system
    size: int  # bytes
    rows: tuple[int, ...]  # of each row group
    characters: int  # bytes of text in all row groups, about
    digest: str  # sha256 of the footer
    footer: bytes = field(repr=False)


def filesystem(url: str) -> tuple[fsspec.AbstractFileSystem, str]:
    """(file system, path on it) of a URL or a local path. UserError for an unknown kind or a missing package."""
    from fsspec.core import url_to_fs

    try:
        return url_to_fs(url)
    except ImportError as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"reading {url} needs a package that is not here ({reason}): {EXTRA}") from None
    except ValueError as error:
        raise UserError(f"{url} cannot be read: {error}; use gs://, s3://, file:// or a local path") from None


def is_local(fs: fsspec.AbstractFileSystem) -> bool:
    return "file" in ([fs.protocol] if isinstance(fs.protocol, str) else fs.protocol)


def retried(fs: fsspec.AbstractFileSystem, what: str, work: Callable[[], Any], done: str = "read") -> Any:
    """`work()`; from a bucket tried again after WAITS, whatever went wrong: a network's errors have no common type.

    UserError with the last error in the end, and at once for what is missing or forbidden. `done` is its word for what
    was tried.
    """
    waits = [] if is_local(fs) else list(WAITS)
    while True:
        try:
            return work()
        except UserError:
            raise
        except Exception as error:
            if isinstance(error, FINAL) or not waits:
                kind, *rest = [type(error).__name__, *str(error).splitlines()]
                raise UserError(
                    f"{what} cannot be {done}: {': '.join([kind, *rest[:1]])}; check name, access and network"
                ) from None
            time.sleep(waits.pop(0))


def read_bytes(fs: fsspec.AbstractFileSystem, path: str, start: int, end: int) -> bytes:
    """Bytes start … end of a file; UserError when they do not all arrive."""

    def work() -> bytes:
        data = fs.cat_file(path, start=start, end=end)
        if len(data) != end - start:
            raise OSError(f"{len(data):,} of {end - start:,} bytes arrived, it was cut short or replaced meanwhile")
        return data

    return retried(fs, path, work)


def damaged(path: str, size: int, reason: object) -> UserError:
    return UserError(
        f"{path} ({size:,} bytes) cannot be read as parquet: {str(reason).splitlines()[0]}; "
        "it is probably cut short: delete it and fetch it again"
    )


def read_footer(fs: fsspec.AbstractFileSystem, path: str, size: int, name: str) -> Shard:
    """Reads the end of a file. UserError, naming it, when it is no whole parquet file or has no column of text."""
    tail = read_bytes(fs, path, max(size - TAIL, 0), size)
    if size < 12 or tail[-4:] != b"PAR1":
        raise damaged(path, size, "it does not end in a footer")
    length = int.from_bytes(tail[-8:-4], "little") + 8
    if length > size:
        raise damaged(path, size, "its footer is longer than the file")
    if length > len(tail):
        tail = read_bytes(fs, path, size - length, size)
    footer = tail[-length:]
    try:
        metadata = _metadata(footer)
        column = _text_column(metadata, path)
        groups = [metadata.row_group(group) for group in range(metadata.num_row_groups)]
        rows = tuple(group.num_rows for group in groups)
        # In plain encoding four bytes of length stand before each text.
        sizes = (group.column(column).total_uncompressed_size - 4 * group.num_rows for group in groups)
        return Shard(name, path, size, rows, max(sum(sizes), 0), hashlib.sha256(footer).hexdigest(), footer)
    except _pyarrow_errors() as error:
        raise damaged(path, size, error) from None


def read_texts(fs: fsspec.AbstractFileSystem, shard: Shard, group: int) -> list[tuple[str | None, str]]:
    """(text, "") of each row of a row group, or (None, reason) for a row that cannot be trained on."""
    import pyarrow.parquet as pq

    try:
        metadata = _metadata(shard.footer)
        chunk = metadata.row_group(group).column(_text_column(metadata, shard.path))
        start = chunk.data_page_offset
        if chunk.has_dictionary_page and chunk.dictionary_page_offset:
            start = min(start, chunk.dictionary_page_offset)
        end = min(start + chunk.total_compressed_size + OLD_WRITERS, shard.size)
        data = read_bytes(fs, shard.path, start, end)
        with pq.ParquetFile(_Window(data, start, shard.size), metadata=metadata) as file:
            column = file.read_row_group(group, columns=["text"], use_threads=False).column("text")
        try:
            texts = column.to_pylist()
        except UnicodeDecodeError:
            return [_usable(text) for text in _decoded(column)]
        return [_usable(text) for text in texts]
    except _pyarrow_errors() as error:
        raise damaged(shard.path, shard.size, f"row group {group}: {error}") from None


def read_rows(fs: fsspec.AbstractFileSystem, shard: Shard, group: int) -> list[tuple[str | None, str]]:
    """`read_texts`, as many as the footer says; else UserError."""
    rows = read_texts(fs, shard, group)
    if len(rows) != shard.rows[group]:
        reason = f"row group {group} has {len(rows):,} rows, its footer says {shard.rows[group]:,}"
        raise damaged(shard.path, shard.size, reason)
    return rows


def _usable(text: str | bytes | None) -> tuple[str | None, str]:
    if text is None:
        return None, "null"
    if isinstance(text, bytes):
        return None, "not UTF-8"
    return (text, "") if text and not text.isspace() else (None, "empty")


def _decoded(column: Any) -> list[str | bytes | None]:
    """The texts of a column of which some are not UTF-8; those stay bytes."""
    import pyarrow

    texts: list[str | bytes | None] = []
    for data in column.cast(pyarrow.large_binary()).to_pylist():
        try:
            texts.append(data if data is None else data.decode())
        except UnicodeDecodeError:
            texts.append(data)
    return texts


def _metadata(footer: bytes) -> Any:
    import pyarrow
    import pyarrow.parquet as pq

    return pq.read_metadata(pyarrow.BufferReader(b"PAR1" + footer))


def _text_column(metadata: Any, path: str) -> int:
    """Which column holds the texts."""
    schema = metadata.schema.to_arrow_schema()
    check_text_column(schema, path)
    return next(i for i in range(metadata.num_columns) if metadata.schema.column(i).path == "text")


def check_text_column(schema: Any, path: str | Path) -> None:
    """UserError, with what was found, when an Arrow schema has no column `text` of strings."""
    import pyarrow

    if "text" not in schema.names:
        raise UserError(f"{path} has no column 'text' (columns: {', '.join(schema.names)}); rename the text column")
    kind = schema.field("text").type
    if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
        raise UserError(f"column 'text' of {path} has type {kind}, needs string; cast it")


def _pyarrow_errors() -> tuple[type[Exception], ...]:
    import pyarrow

    return (pyarrow.ArrowException, OSError, OverflowError)


class _Window(io.RawIOBase):
    """A file of `size` bytes of which only `data`, from `start` on, is here: what pyarrow needs for one row group."""

    def __init__(self, data: bytes, start: int, size: int) -> None:
        super().__init__()
        self.data, self.start, self.size, self.at = data, start, size, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        self.at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self.at, io.SEEK_END: self.size}[whence]
        return self.at

    def read(self, count: int = -1) -> bytes:
        begin = self.at - self.start
        if begin < 0:
            raise OSError(f"byte {self.at:,} does not belong to the row group's text column")
        data = self.data[begin:] if count < 0 else self.data[begin : begin + count]
        self.at += len(data)
        return data
