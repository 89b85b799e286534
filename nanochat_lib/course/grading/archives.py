"""Zip files that strangers send: what is in them, without ever writing a path of theirs.

Members are read into memory under limits, counted as they come, so that a bomb ends at the limit and not at the disk.
Absolute paths, paths that climb, links, devices, encrypted members and zips inside zips are refused by name.
"""

from __future__ import annotations

import lzma
import stat
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

MEMBERS = 5000
MEMBER_BYTES = 32 << 20
TOTAL_BYTES = 512 << 20
DAMAGE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    NotImplementedError,
    EOFError,
    OSError,
    ValueError,
    RuntimeError,
)
WANTED = (".ipynb", ".py")
LEFT_OUT = (".ipynb_checkpoints", "__MACOSX", "__pycache__", ".git", "node_modules", "site-packages")


@dataclass(frozen=True)
class Member:
    """A file as it was handed in, wherever it lay."""

    path: str  # with "/", relative
    data: bytes
    modified: float  # seconds since 1970; 0 where nobody knows


class Refused(Exception):
    """Why an archive or one of its members is not read, in words for the instructor."""


def read(path: Path) -> tuple[list[Member], list[str]]:
    """(notebooks and Python files in the zip, remarks on what was refused). Refused for an archive that is none."""
    try:
        with zipfile.ZipFile(path) as archive:
            return members(archive, path.name)
    except DAMAGE as error:
        raise Refused(f"{path.name} cannot be read as a zip ({type(error).__name__}: {str(error)[:80]})") from None


def members(archive: zipfile.ZipFile, name: str) -> tuple[list[Member], list[str]]:
    entries = archive.infolist()
    if len(entries) > MEMBERS:
        raise Refused(f"{name} holds {len(entries):,} files, {MEMBERS:,} are the most")
    found, remarks, total = [], [], 0
    for entry in entries:
        if entry.is_dir() or ignored(entry.filename):
            continue
        if why := refusal(entry):
            remarks.append(f"{name}: {shown(entry.filename)} {why}; it was not read")
            continue
        if PurePosixPath(entry.filename).suffix.lower() not in WANTED:
            continue
        try:
            data = read_member(archive, entry, min(MEMBER_BYTES, TOTAL_BYTES - total))
        except DAMAGE as error:
            remarks.append(f"{name}: {shown(entry.filename)} is damaged ({str(error)[:60]}); it was not read")
            continue
        if data is None:
            remarks.append(f"{name}: {shown(entry.filename)} is larger than any notebook may be; it was not read")
            continue
        total += len(data)
        found.append(Member(entry.filename, data, time_of(entry)))
    return found, remarks


def refusal(entry: zipfile.ZipInfo) -> str:
    path = PurePosixPath(entry.filename)
    kind = stat.S_IFMT(entry.external_attr >> 16)
    if kind and kind != stat.S_IFREG:
        return "is a link or a device, not a file"
    if path.is_absolute() or ".." in path.parts or (path.parts and ":" in path.parts[0]) or "\x00" in entry.filename:
        return "has a path that leads out of the archive"
    if entry.flag_bits & 1:
        return "is encrypted"
    if path.suffix.lower() in (".zip", ".7z", ".rar", ".tar", ".gz", ".tgz"):
        return "is an archive inside an archive"
    return ""


def read_member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, most: int) -> bytes | None:
    """The member, or None when it is larger than `most` bytes, whatever its header says."""
    parts, size = [], 0
    with archive.open(entry) as file:
        while part := file.read(1 << 16):
            size += len(part)
            if size > most:
                return None
            parts.append(part)
    return b"".join(parts)


def time_of(entry: zipfile.ZipInfo) -> float:
    import datetime

    try:
        return datetime.datetime(*entry.date_time).timestamp()
    except (ValueError, OverflowError):
        return 0.0


def ignored(path: str) -> bool:
    """Whether a path belongs to a tool's own folder or is hidden."""
    parts = path.replace("\\", "/").split("/")
    return bool(set(LEFT_OUT) & set(parts)) or parts[-1].startswith(("._", "~$"))


def shown(name: str) -> str:
    """A stranger's file name, fit for one line of a terminal."""
    return ascii(name)[1:-1][:80]
