"""Readers of document files: (where, text, "") for a document, (where, None, reason) for one that cannot be used."""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

from nanochat_lib.parquet import check_text_column, damaged

Document = tuple[str, str | None, str]


def _decoded(data: bytes) -> tuple[str | None, str]:
    try:
        return data.decode("utf-8"), ""
    except UnicodeDecodeError as error:
        return None, f"not UTF-8 (byte {error.start} of the document)"


def _read_txt(path: Path) -> Iterator[Document]:
    """Documents stand between blank lines."""
    lines: list[bytes] = []
    first = 1
    with open(path, "rb") as file:
        for number, line in enumerate(chain(file, [b"\n"]), start=1):
            if line.strip(b"\xef\xbb\xbf \t\r\n"):
                first = first if lines else number
                lines.append(line)
            elif lines:
                data = b"".join(lines).removeprefix(b"\xef\xbb\xbf").replace(b"\r\n", b"\n").rstrip(b"\n")
                yield f"line {first}", *_decoded(data)
                lines = []


def _read_jsonl(path: Path) -> Iterator[Document]:
    """One JSON object a line, the document in its "text"; blank lines are no documents."""
    with open(path, "rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:  # UnicodeDecodeError is a ValueError
                yield f"line {number}", None, f"not JSON ({error})"
                continue
            if not isinstance(row, dict) or "text" not in row:
                found = ", ".join(map(str, row)) if isinstance(row, dict) else type(row).__name__
                yield f"line {number}", None, f'no "text" (found: {found})'
            elif row["text"] is None:
                yield f"line {number}", None, "null"
            elif not isinstance(row["text"], str):
                yield f"line {number}", None, f'"text" is {type(row["text"]).__name__}, not a string'
            else:
                yield f"line {number}", row["text"], ""


def _read_parquet(path: Path) -> Iterator[Document]:
    """Column `text`, row group by row group."""
    import pyarrow
    import pyarrow.parquet as pq

    try:
        with pq.ParquetFile(path) as file:
            check_text_column(file.schema_arrow, path)
            row = 0
            for group in range(file.num_row_groups):
                for text in file.read_row_group(group, columns=["text"]).column("text").to_pylist():
                    row += 1
                    yield f"row {row}", text, "" if text is not None else "null"
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise damaged(path, path.stat().st_size, error) from None


READERS = {".txt": _read_txt, ".jsonl": _read_jsonl, ".parquet": _read_parquet}
