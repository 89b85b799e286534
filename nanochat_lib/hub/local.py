"""What is on this disk, and whether it can be used. Asks nobody: this is all that a machine without network needs."""

from __future__ import annotations

import json
import zipfile
import zlib
from pathlib import Path

from nanochat_lib.errors import UserError
from nanochat_lib.home import base_dir
from nanochat_lib.hub import ledger
from nanochat_lib.hub.sets import DataSet, OneFile, Shards
from nanochat_lib.storage import TEMPORARY, read_json, verify_manifest

MANIFEST = "manifest.json"  # of a split: the list of its files, written last


def content_problem(path: Path, kind: str) -> str:
    """Why the bytes of `path` are not a whole file of `kind` (".parquet", ".zip", ".jsonl"); "" when they are."""
    if path.stat().st_size == 0:
        return "0 bytes"
    return {".parquet": _parquet_problem, ".zip": _zip_problem, ".jsonl": _jsonl_problem}[kind](path)


def _parquet_problem(path: Path) -> str:
    import pyarrow
    import pyarrow.parquet as pq

    try:
        pq.read_metadata(path)
    except (pyarrow.ArrowException, OSError) as error:
        return f"no parquet footer, so it was cut short ({str(error).splitlines()[0][:80]})"
    return ""


def _zip_problem(path: Path) -> str:
    try:
        with zipfile.ZipFile(path) as archive:
            broken = archive.testzip()
    except (zipfile.BadZipFile, EOFError, zlib.error, OSError, NotImplementedError) as error:
        return f"not a whole zip archive ({error})"
    return f"{broken} in it is damaged" if broken else ""


def _jsonl_problem(path: Path) -> str:
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                if line.strip():
                    json.loads(line)
            except ValueError:
                return f"line {number} is not JSON"
    return ""


def file_problem(path: Path, known: dict[str, int]) -> str:
    """Why a file that should lie at `path` cannot be used: missing, empty, another size than was fetched, no footer."""
    if not path.is_file():
        return "missing"
    size = path.stat().st_size
    was = known.get(path.relative_to(base_dir()).as_posix(), size)
    if size != was:
        return f"{size:,} bytes instead of {was:,}"
    return content_problem(path, path.suffix)


def _split_problem(folder: Path, known: dict[str, int]) -> str:
    if not (folder / MANIFEST).is_file():
        return "missing"
    try:
        names = [str(name) for name in read_json(folder / MANIFEST)]
    except (UserError, TypeError):
        return f"{MANIFEST} is damaged"
    for name in names:
        if problem := file_problem(folder / name, known):
            return f"{name}: {problem}"
    return ""


def lacking(entry: DataSet, shards: int = 0) -> dict[str, str]:
    """{part: what is wrong with it} of the parts that must be fetched; a part is a shard, a split, or the one file."""
    folder, known = base_dir() / entry.where, ledger.sizes()
    if isinstance(entry, OneFile):
        if entry.file.endswith(".zip"):
            problems = verify_manifest(folder, checksums=False) if folder.exists() else ["missing"]
        else:
            problems = [file_problem(folder, known)]
        return {entry.where: problems[0]} if problems and problems[0] else {}
    check = file_problem if isinstance(entry, Shards) else _split_problem
    found = {part: check(folder / part, known) for part in entry.parts(shards)}
    return {part: problem for part, problem in found.items() if problem}


def shards_here(entry: Shards) -> list[str]:
    """Names of the shards on disk, usable or not, the validation shard included."""
    folder = base_dir() / entry.where
    return sorted(path.name for path in folder.glob("shard_*.parquet"))


def ids_here(entry: Shards) -> list[Path]:
    """Files of token ids that `nanochat data encode` keeps beside the shards, of all tokenizers, usable or not."""
    return sorted((base_dir() / entry.where).glob("ids-*/*.ids"))


def bytes_here(entry: DataSet) -> tuple[int, int]:
    """(bytes of finished files, bytes of unfinished ones) on disk, without token ids."""
    path = base_dir() / entry.where
    files = [file for file in path.rglob("*") if file.is_file()] if path.is_dir() else [path] if path.is_file() else []
    if isinstance(entry, Shards):
        files = [file for file in files if not file.parent.name.startswith("ids-")]
    if isinstance(entry, OneFile):
        files += list(base_dir().glob(f"{entry.file}{TEMPORARY}*"))
    sizes = [(TEMPORARY in file.name, file.stat().st_size) for file in files]
    return sum(size for part, size in sizes if not part), sum(size for part, size in sizes if part)
