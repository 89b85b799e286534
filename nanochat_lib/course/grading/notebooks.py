"""A handed-in file as cells, whatever wrote it: notebooks of formats 3 and 4, with or without ids, and Python files.

And which chapter it is: by its exercises, however the file is called.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from nanochat_lib.course.grading.answers import skeleton
from nanochat_lib.course.grading.archives import Member, shown
from nanochat_lib.course.grading.key import Key
from nanochat_lib.course.grading.submissions import AGAIN, Submission
from nanochat_lib.course.learner import LearnerCell, _cell, _defines
from nanochat_lib.course.registry import chapters
from nanochat_lib.errors import UserError

HEAD = re.compile(r"^# ?%%(.*)$")
CELLS = 20_000


@dataclass
class Paper:
    """One chapter of one learner: the file that counts."""

    learner: str
    stem: str  # chapter
    path: str
    cells: list[LearnerCell]
    modified: float
    remarks: list[str] = field(default_factory=list)


def read(file: Member) -> list[LearnerCell]:
    """The file's cells. Raises UserError in one line for what is neither a notebook nor Python."""
    try:
        text = file.data.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise UserError(f"{shown(file.path)} is not UTF-8 text, so it is no notebook") from None
    if file.path.lower().endswith(".py"):
        return _percent(text)
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        raise UserError(f"{shown(file.path)} is damaged and cannot be read as a notebook") from None
    if not isinstance(document, dict):
        raise UserError(f"{shown(file.path)} is JSON, but no notebook")
    entries = document.get("cells")
    if not isinstance(entries, list):  # format 3 keeps them in worksheets
        sheets = document.get("worksheets")
        sheets = [sheet for sheet in sheets if isinstance(sheet, dict)] if isinstance(sheets, list) else []
        entries = [cell for sheet in sheets for cell in sheet.get("cells") or []]
        if not sheets:
            raise UserError(f"{shown(file.path)} is JSON, but no notebook of format 3 or 4")
    found = []
    for number, entry in enumerate(entries[:CELLS], 1):
        if isinstance(entry, dict):
            source = entry.get("source", entry.get("input", ""))
            metadata = entry.get("metadata") if isinstance(entry.get("metadata"), dict) else {}
            if not isinstance(source, (str, list)):
                source = ""
            if not isinstance(metadata.get("tags"), list):
                metadata = {key: value for key, value in metadata.items() if key != "tags"}
            found.append(_cell(number, str(entry.get("cell_type", "")), source, metadata, str(entry.get("id", ""))))
    return found


def _percent(text: str) -> list[LearnerCell]:
    """The cells of a py:percent file, tolerant: any header, any metadata; a file without marks is one cell."""
    from nanochat_lib.course.registry import _metadata

    lines = text.replace("\r\n", "\n").split("\n")
    heads = [i for i, line in enumerate(lines) if HEAD.match(line)]
    if not heads:
        return [_cell(1, "code", text, {}, "")]
    found = []
    for number, (start, end) in enumerate(zip(heads, [*heads[1:], len(lines)], strict=True), 1):
        head = HEAD.match(lines[start])[1]
        kind = "markdown" if "[markdown]" in head or "[md]" in head else "raw" if "[raw]" in head else "code"
        metadata = _metadata(lines[start])
        if not isinstance(metadata.get("tags"), list):
            metadata.pop("tags", None)
        body = lines[start + 1 : end]
        if kind != "code":
            body = [line[2:] if line.startswith("# ") else line.lstrip("#") for line in body]
        found.append(_cell(number, kind, "\n".join(body).strip("\n"), metadata, ""))
    return found


def belongs_to(cells: list[LearnerCell], path: str, keys: list[Key]) -> Key | None:
    """The chapter that a file is: the one whose exercises it has most of, else the one its name says.

    A file that is called as a chapter which is not graded, and has no cell of one that is, belongs to none of them,
    though it may define a function of the same name.
    """

    def count(key: Key) -> int:
        ids = {skeleton(id).replace("-", ".").replace("_", ".") for cell in cells for id in cell.ids}
        return sum(skeleton(id).replace("_", ".") in ids for id in key.wanted)

    def functions(key: Key) -> int:
        return sum(any(_defines(cell, name) for cell in cells) for name in key.wanted.values())

    name = skeleton(PurePosixPath(path).stem)
    elsewhere = _another_chapter(path) and not any(key.stem in name for key in keys)
    for measure in (count,) if elsewhere else (count, functions):
        best = max(keys, key=measure, default=None)
        if best is not None and measure(best):
            return best
    return next((key for key in keys if key.stem in name or name.startswith((key.number, key.stem[3:]))), None)


def _another_chapter(path: str) -> bool:
    """Is it called as a chapter of the course is? Beside the one that is graded nobody wonders about it."""
    return any(f"{one.number}_{one.topic}" in skeleton(PurePosixPath(path).stem) for one in chapters())


def papers(submission: Submission, keys: list[Key]) -> tuple[list[Paper], list[str]]:
    """(the papers of one learner, one a chapter; remarks on files that are none).

    Of several files for one chapter the notebook that changed last counts, and a remark names the others.
    """
    by_chapter: dict[str, list[Paper]] = {}
    remarks, beside = list(submission.remarks), []
    for file in submission.files:
        try:
            cells = read(file)
        except UserError as error:
            remarks.append(str(error))
            continue
        key = belongs_to(cells, file.path, keys)
        if key is None:
            line = f"{shown(file.path)} has none of the exercises that are graded"
            (beside if _another_chapter(file.path) else remarks).append(line)
            continue
        by_chapter.setdefault(key.stem, []).append(Paper(submission.learner, key.stem, file.path, cells, file.modified))
    found = []
    for several in by_chapter.values():
        several.sort(key=_rank)
        paper = several[-1]
        if others := [other for other in several[:-1] if other.cells != paper.cells]:
            names = ", ".join(shown(other.path) for other in others)
            paper.remarks.append(f"several files for this chapter: {shown(paper.path)} counts, not {names}")
        found.append(paper)
    return sorted(found, key=lambda paper: paper.stem), remarks if found else [*remarks, *beside]


def _rank(paper: Paper) -> tuple:
    """Later is better; then the one that was handed in again; a notebook before the .py that is kept beside it."""
    again = AGAIN.search(PurePosixPath(paper.path).name)
    count = int(next(filter(None, again.groups()))) if again else 0
    return round(paper.modified / 60), count, paper.path.lower().endswith(".ipynb"), paper.path
