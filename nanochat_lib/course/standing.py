"""Where a learner stands, kept in a run's folder (course.json) so that the run's report can have a certificate."""

from __future__ import annotations

from pathlib import Path

from nanochat_lib.course import borrow, overview, registry, state
from nanochat_lib.errors import UserError
from nanochat_lib.report.tables import Table
from nanochat_lib.storage import atomic_write_json, read_json

FILE = "course.json"


def standing() -> dict:
    """Exercises and points, passed and in all, together and for each chapter; from the learner's own record."""
    chapters = [
        {
            "number": line.chapter.number,
            "title": line.chapter.title,
            "passed": line.done,
            "exercises": line.count,
            "points": line.points,
            "all_points": line.all_points,
        }
        for line in overview.lines()
    ]
    sums = {key: sum(c[key] for c in chapters) for key in ("passed", "exercises", "points", "all_points")}
    return sums | {"chapters": chapters}


def keep(folder: Path) -> None:
    """Writes course.json where an exercise has passed here; else what a run brought from another machine stays."""
    try:
        found = standing()
    except UserError as error:  # a report needs no certificate
        print(f"the report has no new certificate: {error}")
        return
    if found["passed"]:
        atomic_write_json(Path(folder) / FILE, found)


def parts_table(folder: Path) -> Table:
    """The pipeline's functions that are exercises, by chapter: how many there are, have passed, and are in this run."""
    path = Path(folder) / borrow.FILE
    used = set(read_json(path)["used"]) if path.exists() else set()
    records, rows = state.read()["exercises"], []
    for chapter in registry.chapters():
        names = [entry.id for entry in chapter.exercises if entry.library]
        if names:
            passed = sum(bool(records.get(name, {}).get("passed")) for name in names)
            rows.append((f"{chapter.number} {chapter.title}", len(names), passed, len(used & set(names))))
    rows.append(
        ("together", *(sum(column) for column in list(zip(*rows, strict=True))[1:])) if rows else ("none", 0, 0, 0)
    )
    return Table(("chapter", "functions in the pipeline", "yours that passed", "yours in this run"),
                 [tuple(map(str, row)) for row in rows])  # fmt: skip
