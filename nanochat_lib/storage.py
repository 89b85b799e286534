"""Files that are either whole or absent: atomic writes, atomic publication of a folder, manifests with size and sha256.

Everything is written under a temporary name beside its final place, flushed to the disk, and renamed; a rename within
one file system happens entirely or not at all. A reader therefore never meets a half-written file, and a run that is
killed leaves at most a temporary name that nobody reads.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from nanochat_lib.errors import UserError

MANIFEST = "manifest.json"
PROBE_BYTES = 1 << 22  # written and removed again to see whether a folder takes it
OS_ERROR = re.compile(r"os_error_code='(\d+)'")  # how tensorstore words what the disk refused
TEMPORARY = ".tmp-"  # part of every temporary name; readers skip names that contain it

ADVICE = {
    errno.ENOSPC: "free space there or choose another folder",
    errno.EDQUOT: "your quota there is used up: delete something or choose another folder",
    errno.EFBIG: "files there may not grow so large: raise the limit (ulimit -f) or choose another folder",
    errno.EROFS: "the disk is mounted read-only: choose another folder",
    errno.EACCES: "you may not write there: change its permissions or choose another folder",
    errno.EPERM: "you may not write there: change its permissions or choose another folder",
    errno.ENOTDIR: "a part of that path is a file: choose another folder",
    errno.ENOENT: "a folder on that path was removed meanwhile: try again",
}


@contextlib.contextmanager
def clear_disk_errors(path: str | Path) -> Iterator[None]:
    """Turns what the disk refuses to the block into one UserError that names `path`, the cause and the fix."""
    try:
        yield
    except (OSError, ValueError, RuntimeError) as error:
        number, reason = getattr(error, "errno", None), getattr(error, "strerror", None) or str(error)
        if not isinstance(error, OSError):
            found = OS_ERROR.search(str(error))
            if not found:
                raise
            number, reason = int(found[1]), os.strerror(int(found[1]))
        free = _free_text(path) if number == errno.ENOSPC else ""
        raise UserError(f"cannot write {path}: {reason}{free}; {ADVICE.get(number, 'check the disk')}") from error


def _free_text(path: str | Path) -> str:
    try:
        return f" ({free_bytes(path):,} bytes free)"
    except OSError:
        return ""


def free_bytes(path: str | Path) -> int:
    """Bytes that an ordinary user may still write on the disk that holds `path` (which need not exist yet)."""
    place = Path(path).absolute()
    while not place.exists():
        place = place.parent
    return shutil.disk_usage(place).free


def check_room(folder: str | Path, needed: int) -> None:
    """UserError when `needed` bytes cannot be written into `folder`: too little space, a quota, a read-only disk."""
    if (free := free_bytes(folder)) < needed:
        raise UserError(
            f"cannot write to {folder}: it needs {needed:,} bytes and {free:,} are free; "
            "free space there or choose another folder"
        )
    probe = Path(folder) / "probe"
    atomic_write_bytes(probe, bytes(min(needed, PROBE_BYTES)))
    probe.unlink()


def sha256_file(path: str | Path) -> str:
    """Hexadecimal SHA-256 of a file's bytes."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def temporary_name(path: str | Path) -> Path:
    """A fresh name beside `path` (same file system, so a rename to `path` is atomic)."""
    path = Path(path)
    return path.with_name(f"{path.name}{TEMPORARY}{uuid.uuid4().hex[:8]}")


@contextlib.contextmanager
def atomic_file(path: str | Path) -> Iterator[BinaryIO]:
    """An open file that becomes `path` when the block ends well, and is gone when it does not.

    Folders on the way are made. UserError when the disk refuses.
    """
    path = Path(path)
    temporary = temporary_name(path)
    with clear_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(temporary, "wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _flush(path.parent)


def atomic_write_bytes(path: str | Path, data: bytes) -> None:
    """Writes `data` to `path`, whole or not at all; folders on the way are made. UserError when the disk refuses."""
    with atomic_file(path) as file:
        file.write(data)


def atomic_write_text(path: str | Path, text: str) -> None:
    """`atomic_write_bytes` of UTF-8 text; line ends are written as they are."""
    atomic_write_bytes(path, text.encode("utf-8"))


def atomic_write_json(path: str | Path, value: object, *, indent: int | None = 1) -> None:
    """`atomic_write_bytes` of a JSON document. NaN and infinity are refused: they are not JSON."""
    text = json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)
    atomic_write_text(path, text + "\n")


def read_json(path: str | Path) -> object:
    """The document in `path`. UserError when the file is missing, empty or not JSON."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if not data.strip():
        raise UserError(f"{path} is empty ({len(data)} bytes): delete it and create it again")
    try:
        return json.loads(data)
    except ValueError as error:
        raise UserError(f"{path} is not valid JSON ({error}): delete it and create it again") from None


@contextlib.contextmanager
def alone(path: str | Path, wait: float, doing: str, what: str, say: Callable[[str], None]) -> Iterator[None]:
    """Holds the lock file `path`; another process that does the same is waited for, `wait` seconds at most.

    `doing` and `what` word it for messages: "fetching", "climbmix". The lock is the operating system's, so it ends with
    the process that holds it, however that ends.
    """
    import fcntl

    path = Path(path)
    with clear_disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = open(path, "a", encoding="utf-8")
    with handle:
        began, told = time.monotonic(), False
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - began
            if waited >= wait:
                raise UserError(
                    f"another process has been {doing} {what} into {path.parent} for {waited:.0f} s or more: "
                    "wait for it, end it, or allow more with --wait SECONDS"
                )
            if not told:
                say(f"another process is {doing} it; waiting for it up to {wait:.0f} s")
                told = True
            time.sleep(min(0.5, wait - waited))
        yield


def publish_dir(temporary: str | Path, final: str | Path) -> Path:
    """Renames a finished folder to its final name in one step. UserError when `final` exists: it is never replaced."""
    temporary, final = Path(temporary), Path(final)
    if final.exists():
        raise UserError(f"{final} exists already: remove it or choose another name")
    with clear_disk_errors(final):
        for path in sorted(temporary.rglob("*")):
            _flush(path)
        _flush(temporary)
        os.rename(temporary, final)
        _flush(final.parent)
    return final


def set_aside(place: Path) -> Path | None:
    """Gives the folder `place`, if there is one, another name beside it, which says whether it was whole."""
    if not place.exists():
        return None
    word = "damaged" if verify_manifest(place) else "replaced"
    return place.rename(place.with_name(f"{place.name}.{word}-{uuid.uuid4().hex[:8]}"))


def _flush(path: Path) -> None:
    """Asks the disk to keep what was written, so that a power cut after a rename cannot leave an empty file."""
    if os.name == "nt" and path.is_dir():
        return  # folders cannot be opened there
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:  # some network file systems cannot sync a folder; the data are there all the same
        if not (path.is_dir() and error.errno in (errno.EINVAL, errno.ENOTSUP)):
            raise
    finally:
        os.close(handle)


def list_files(folder: Path) -> dict[str, dict[str, object]]:
    """{name: {"size", "sha256"}} of every file under `folder`, its manifest and temporary files apart."""
    return {
        path.relative_to(folder).as_posix(): {"size": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST and TEMPORARY not in path.name
    }


def write_manifest(folder: str | Path) -> dict[str, dict[str, object]]:
    """Lists every file under `folder` with size in bytes and sha256 in its manifest.json, and returns the list."""
    folder = Path(folder)
    files = list_files(folder)
    atomic_write_json(folder / MANIFEST, {"files": files})
    return files


def verify_manifest(folder: str | Path, *, checksums: bool = True) -> list[str]:
    """What is wrong with `folder`, one line a problem; an empty list means every listed file is there, unchanged.

    `checksums=False` looks at sizes only and reads no file. Files that the manifest does not list are no problem:
    a file browser may have left one.
    """
    folder = Path(folder)
    if not folder.is_dir():
        return [f"{folder} is not a folder"]
    if not (folder / MANIFEST).is_file():
        return [f"{folder / MANIFEST} is missing: the folder was never finished"]
    try:
        files = read_json(folder / MANIFEST)["files"]
        wanted = [(str(name), int(entry["size"]), str(entry["sha256"])) for name, entry in files.items()]
    except (UserError, KeyError, TypeError, ValueError, AttributeError):
        return [f"{folder / MANIFEST} is damaged: it does not list files with size and sha256"]
    found = (_problem(folder / name, size, sha256 if checksums else None) for name, size, sha256 in wanted)
    return [problem for problem in found if problem]


def _problem(path: Path, size: int, sha256: str | None) -> str | None:
    if not path.is_file():
        return f"{path} is missing"
    try:
        if (found := path.stat().st_size) != size:
            return f"{path} has {found:,} bytes instead of {size:,}"
        if sha256 is not None and sha256_file(path) != sha256:
            return f"{path} was changed: its sha256 differs from the manifest's"
    except OSError as error:
        return f"{path} cannot be read: {error.strerror or error}"
    return None
