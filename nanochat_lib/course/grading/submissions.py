"""A folder of submissions, in whatever layout it was downloaded: who handed in which notebooks, and when.

    SUBMISSIONS/ada/03_attention.ipynb                                      a folder a learner
    SUBMISSIONS/ada.zip, SUBMISSIONS/ada.ipynb                              a file a learner
    SUBMISSIONS/Ada Byron_412_assignsubmission_file_/03_attention.ipynb     Moodle's download
    SUBMISSIONS/byronada_LATE_4711_99_03_attention.ipynb                    Canvas's download
    submissions.zip                                                         any of these as one zip

Nobody is lost: whatever cannot be read stays as a submission with a problem.
"""

from __future__ import annotations

import hashlib
import io
import re
import unicodedata
import zipfile
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from nanochat_lib.course.grading import archives
from nanochat_lib.course.grading.archives import LEFT_OUT, Member, Refused, shown
from nanochat_lib.errors import UserError

MOODLE = re.compile(r"(?P<who>.+)_(?P<id>\d+)_assignsubmission_(?:file|onlinetext)_?")
CANVAS = re.compile(r"(?P<who>[^_]+)(?:_(?P<late>LATE))?_(?P<id>\d+)_(?P<submission>\d+)_(?P<file>.+)")
AGAIN = re.compile(r"(?:[-_ ]?\((\d+)\)|-(\d{1,2}))(?=\.\w+$)")  # name (2).ipynb, name-1.ipynb: handed in again
FLAT = re.compile(r"(?P<who>.+?)[-_ ]\d\d_[a-z_]+(?:[-_ ]?\(?\d*\)?)?")  # ada_03_attention.ipynb


@dataclass
class Submission:
    """What one learner handed in."""

    learner: str  # the name that marks go by
    files: list[Member] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    ids: dict[str, str] = field(default_factory=dict)  # "moodle" or "canvas" -> the id that the download carries
    late: bool = False  # the download itself says so

    @property
    def modified(self) -> float:
        return max((file.modified for file in self.files), default=0.0)

    @property
    def hash(self) -> str:
        """Of all bytes that were handed in."""
        found = hashlib.sha256()
        for file in sorted(self.files, key=lambda file: file.path):
            found.update(f"{file.path}\n{len(file.data)}\n".encode("utf-8", "surrogateescape") + file.data)
        return found.hexdigest()[:32]


def collect(where: Path) -> list[Submission]:
    """All submissions below a folder or in a zip, by learner, in the learners' order."""
    if not where.exists():
        raise UserError(f"{where} does not exist; name the folder or the zip of submissions")
    found: dict[str, Submission] = {}
    if where.is_file():
        if where.suffix.lower() != ".zip":
            raise UserError(f"{where} is neither a folder nor a zip of submissions")
        _outer_zip(where, found)
    else:
        for path in sorted(where.iterdir(), key=lambda path: path.name):
            if path.name in LEFT_OUT or path.name.startswith("."):
                continue
            _entry(path, where, found)
    return [found[key] for key in sorted(found)]


def learner_name(text: str) -> str:
    """One spelling for one name: composed Unicode, no control signs, no slashes, single blanks."""
    text = unicodedata.normalize("NFC", text)
    text = "".join(" " if unicodedata.category(c) in ("Cc", "Cf", "Zl", "Zp") or c in "/\\" else c for c in text)
    return " ".join(text.split())[:120] or "nameless"


def _get(found: dict[str, Submission], name: str) -> Submission:
    name = learner_name(name)
    return found.setdefault(name, Submission(name))


def _entry(path: Path, root: Path, found: dict[str, Submission]) -> None:
    """One file or folder directly below the folder of submissions."""
    if path.is_symlink():
        _get(found, _who(path.name)[0]).remarks.append(f"{shown(path.name)} is a link; it was not followed")
    elif path.is_dir():
        who, ids, late = _who(path.name)
        submission = _get(found, who)
        submission.ids |= ids
        submission.late |= late
        _folder(path, submission)
    elif path.suffix.lower() in (*archives.WANTED, ".zip"):
        who, ids, late = _who(path.name)
        submission = _get(found, who)
        submission.ids |= ids
        submission.late |= late
        _file(path, root, submission)


def _who(name: str) -> tuple[str, dict[str, str], bool]:
    """(learner, ids, late?) from the name of a file or folder of any layout."""
    if match := MOODLE.match(name):
        return match["who"], {"moodle": match["id"]}, False
    if match := CANVAS.fullmatch(name):
        return match["who"], {"canvas": match["id"]}, bool(match["late"])
    if PurePosixPath(name).suffix.lower() not in (".zip", *archives.WANTED):
        return name, {}, False
    stem = PurePosixPath(name).stem
    flat = FLAT.fullmatch(stem)
    return (flat["who"] if flat else stem), {}, False


def _folder(path: Path, submission: Submission) -> None:
    for file in sorted(path.rglob("*")):
        inside = file.relative_to(path).as_posix()
        if archives.ignored(inside):
            continue
        if file.is_symlink():
            submission.remarks.append(f"{shown(inside)} is a link; it was not followed")
        elif any((path / part).is_symlink() for part in PurePosixPath(inside).parents if str(part) != "."):
            continue
        elif file.is_file() and file.suffix.lower() in (*archives.WANTED, ".zip"):
            _file(file, path, submission)


def _file(file: Path, root: Path, submission: Submission) -> None:
    name = file.relative_to(root).as_posix()
    try:
        if file.suffix.lower() == ".zip":
            found, remarks = archives.read(file)
            submission.files += found
            submission.remarks += remarks
            if not found:
                submission.remarks.append(f"{shown(name)} holds no notebook")
        elif file.stat().st_size > archives.MEMBER_BYTES:
            submission.remarks.append(f"{shown(name)} is larger than any notebook may be; it was not read")
        else:
            canvas = CANVAS.fullmatch(file.name)
            inside = canvas["file"] if canvas else name
            submission.files.append(Member(inside, file.read_bytes(), file.stat().st_mtime))
    except (Refused, OSError) as error:
        submission.remarks.append(str(error)[:200])


def _outer_zip(path: Path, found: dict[str, Submission]) -> None:
    """A zip of everybody's submissions: its top folders and files are the learners'; their own zips are opened too."""
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                if entry.is_dir() or archives.ignored(entry.filename):
                    continue
                parts = PurePosixPath(entry.filename).parts
                who, ids, late = _who(parts[0])
                submission = _get(found, who)
                submission.ids |= ids
                submission.late |= late
                _member(archive, entry, parts, submission)
    except archives.DAMAGE as error:
        raise UserError(f"{path} cannot be read as a zip ({error})") from None


def _member(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, parts: tuple[str, ...], submission: Submission) -> None:
    suffix = PurePosixPath(entry.filename).suffix.lower()
    nested = suffix == ".zip"
    why = archives.refusal(entry)
    if why and not (nested and why.startswith("is an archive")):
        submission.remarks.append(f"{shown(entry.filename)} {why}; it was not read")
        return
    if suffix not in (*archives.WANTED, ".zip"):
        return
    try:
        data = archives.read_member(archive, entry, archives.MEMBER_BYTES)
    except archives.DAMAGE as error:
        submission.remarks.append(f"{shown(entry.filename)} is damaged ({str(error)[:60]}); it was not read")
        return
    if data is None:
        submission.remarks.append(f"{shown(entry.filename)} is larger than any notebook may be; it was not read")
    elif nested:
        try:
            with zipfile.ZipFile(io.BytesIO(data)) as inner:
                found, remarks = archives.members(inner, parts[-1])
            submission.files += found
            submission.remarks += remarks
        except (Refused, *archives.DAMAGE) as error:
            submission.remarks.append(f"{shown(entry.filename)} cannot be read as a zip ({str(error)[:80]})")
    else:
        canvas = CANVAS.fullmatch(parts[-1])
        inside = canvas["file"] if canvas else "/".join(parts[1:] or parts)
        submission.files.append(Member(inside, data, archives.time_of(entry)))
