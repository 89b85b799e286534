"""Marks as files that other systems take: our own CSV with stable columns, Moodle's and Canvas's, Gradescope's JSON.

A text that a spreadsheet would run as a formula gets an apostrophe before it. Columns only ever get added at the end.
"""

from __future__ import annotations

import csv
import io
import json
import re
from pathlib import Path

from nanochat_lib.course.grading.marks import LearnerMark
from nanochat_lib.course.grading.submissions import learner_name
from nanochat_lib.errors import UserError

FORMULA = ("=", "+", "-", "@", "\t", "\r")
FORMATS = ("csv", "exercises", "moodle", "canvas", "gradescope")


def safe(value: object) -> object:
    """A cell that no spreadsheet takes for a formula; numbers stay numbers."""
    if isinstance(value, str) and value.startswith(FORMULA):
        return "'" + value
    return value


def table(rows: list[list[object]]) -> str:
    out = io.StringIO(newline="")
    csv.writer(out, lineterminator="\r\n").writerows([[safe(value) for value in row] for row in rows])
    return out.getvalue()


def as_csv(found: list[LearnerMark]) -> str:
    """One row a learner and chapter, and one a learner for the total of the chapters that count."""
    head = [
        "learner",
        "chapter",
        "points",
        "of",
        "percent",
        "late_factor",
        "written",
        "adjusted",
        "dropped",
        "isolation",
    ]
    head += ["handed_in", "submission", "bundle", "moodle_id", "canvas_id"]
    rows: list[list[object]] = [head]
    for mark in found:
        for name, one in mark.chapters.items():
            done = one.result
            row = [mark.learner, name, one.earned, one.possible, one.percent, one.factor, one.written, one.adjusted]
            row += [int(name in mark.dropped), one.isolation, iso(done.handed_in) if done else ""]
            row += [done.submission if done else "", done.bundle if done else ""]
            rows.append([*row, mark.ids.get("moodle", ""), mark.ids.get("canvas", "")])
        total = [mark.learner, "total", mark.earned, mark.possible, mark.percent, 1.0, 0.0, 0.0, 0, "", "", "", ""]
        rows.append([*total, mark.ids.get("moodle", ""), mark.ids.get("canvas", "")])
    return table(rows)


def as_exercises(found: list[LearnerMark]) -> str:
    """One row a learner and exercise: learner, chapter, exercise, status, points, of, cases passed and all by group."""
    rows: list[list[object]] = [
        ["learner", "chapter", "exercise", "status", "points", "of", "public", "hidden", "budget", "seconds"]
    ]
    for mark in found:
        for name, one in mark.chapters.items():
            for id, entry in (one.result.exercises if one.result else {}).items():
                groups = [f"{passed} of {count}" for passed, count in entry["groups"].values()]
                rows.append(
                    [mark.learner, name, id, entry["status"], one.points[id], entry["most"], *groups, entry["seconds"]]
                )
    return table(rows)


def as_moodle(found: list[LearnerMark]) -> str:
    """Moodle's grade import: identifier of the participant, full name, grade in percent of each chapter."""
    chapters = sorted({name for mark in found for name in mark.chapters})
    rows: list[list[object]] = [["Identifier", "Full name", *chapters, "Total"]]
    for mark in found:
        identifier = f"Participant {mark.ids['moodle']}" if "moodle" in mark.ids else ""
        rows.append([identifier, mark.learner, *(one.percent for one in mark.chapters.values()), mark.percent])
    return table(rows)


def as_canvas(found: list[LearnerMark], template: str = "") -> str:
    """Canvas's gradebook import. `template`: the CSV that Canvas exports, whose learners and assignments are kept.

    Without one: Student, ID and a column a chapter with its points, as Canvas makes new assignments of them.
    """
    chapters = sorted({name for mark in found for name in mark.chapters})
    if not template:
        rows: list[list[object]] = [["Student", "ID", "SIS User ID", "SIS Login ID", "Section", *chapters]]
        possible = {name: max(m.chapters[name].possible for m in found) for name in chapters}
        rows.append(["Points Possible", "", "", "", "", *possible.values()])
        for mark in found:
            rows.append(
                [mark.learner, mark.ids.get("canvas", ""), "", "", "", *(c.earned for c in mark.chapters.values())]
            )
        return table(rows)
    given = list(csv.reader(io.StringIO(template)))
    if not given or "Student" not in given[0] or "ID" not in given[0]:
        raise UserError("the Canvas file must have the columns Student and ID; export it in Canvas under Grades")
    head = given[0]
    columns = {name: next((i for i, text in enumerate(head) if _same(text, name)), -1) for name in chapters}
    if missing := [name for name, at in columns.items() if at < 0]:
        raise UserError(f"the Canvas file has no assignment called {missing[0]} (an assignment's name must hold it)")
    by_id = {mark.ids["canvas"]: mark for mark in found if "canvas" in mark.ids}
    by_name = {_squeezed(mark.learner): mark for mark in found}
    for row in given[1:]:
        row += [""] * (len(head) - len(row))
        name = row[head.index("Student")]
        mark = by_id.get(row[head.index("ID")]) or by_name.get(_squeezed(name))
        for chapter, at in columns.items() if mark else ():
            row[at] = str(mark.chapters[chapter].earned)
    return table([list(row) for row in given])


def _same(header: str, chapter: str) -> bool:
    return chapter in header or chapter.replace("_", " ") in header.lower()


def _squeezed(name: str) -> str:
    """'Byron, Ada' and 'byronada' are the same to Canvas's file names."""
    return re.sub(r"\W+", "", name.lower())


def as_gradescope(mark: LearnerMark) -> dict:
    """One learner's results.json of Gradescope's autograder: a test an exercise; of hidden cases only how many."""
    tests = []
    for name, one in mark.chapters.items():
        for id, entry in (one.result.exercises if one.result else {}).items():
            parts = [f"{group}: {a} of {b} cases" for group, (a, b) in entry["groups"].items() if b]
            tests.append(
                {
                    "name": id, "number": name[:2], "score": one.points[id], "max_score": entry["most"],
                    "output": f"{entry['status']}; {', '.join(parts)}", "visibility": "visible",
                }
            )  # fmt: skip
        if one.written_most:
            tests.append(
                {
                    "name": "written answers", "number": name[:2], "score": one.written, "max_score": one.written_most,
                    "output": "\n".join(one.comments), "visibility": "visible",
                }
            )  # fmt: skip
    isolation = sorted({one.isolation for one in mark.chapters.values() if one.isolation})
    return {
        "score": mark.earned,
        "output": f"{mark.earned:g} of {mark.possible:g} points",
        "visibility": "visible",
        "stdout_visibility": "hidden",
        "tests": tests,
        "extra_data": {"learner": mark.learner, "isolation": isolation},
    }


def export(found: list[LearnerMark], format: str, target: Path, template: Path | None = None) -> list[Path]:
    """Writes the marks; returns the files. Gradescope gets a folder with a results.json a learner."""
    if format == "gradescope":
        paths = []
        for mark in found:
            path = target / file_name(mark.learner) / "results.json"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(as_gradescope(mark), indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
            paths.append(path)
        return paths
    text = {
        "csv": lambda: as_csv(found),
        "exercises": lambda: as_exercises(found),
        "moodle": lambda: as_moodle(found),
        "canvas": lambda: as_canvas(found, template.read_text(encoding="utf-8-sig") if template else ""),
    }[format]()
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(text.encode())
    return [target]


def file_name(learner: str) -> str:
    """A learner's name as a file name, two learners never the same."""
    import hashlib

    plain = re.sub(r"[^\w.-]+", "_", learner_name(learner)).strip("._")[:60] or "learner"
    return plain if plain == learner else f"{plain}-{hashlib.sha256(learner.encode()).hexdigest()[:6]}"


def iso(seconds: float) -> str:
    import datetime

    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ") if seconds else ""
