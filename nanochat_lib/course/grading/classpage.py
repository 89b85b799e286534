"""The instructor's page: how marks are spread, how each exercise did, which wrong ways were common."""

from __future__ import annotations

import math
from collections import Counter
from html import escape

from nanochat_lib.course.grading.marks import LearnerMark
from nanochat_lib.course.grading.page import bars, page, table
from nanochat_lib.course.grading.resemble import Signatures, nearest_mutant
from nanochat_lib.course.result import FAILED, PASSED

NOTE = (
    "Discrimination: the correlation of an exercise with the rest of the marks; near 0 or below it the exercise tells "
    "the strong from the weak badly. Looks like: the kept wrong answers that fail in the same cases."
)
FEW = 5  # learners from which a correlation says something


def class_page(found: list[LearnerMark], signatures: Signatures) -> str:
    """The page of the whole class. `signatures`: how the kept wrong answers fail, by exercise."""
    percents = [mark.percent for mark in found]
    counts = [sum(min(int(p // 10), 9) == i for p in percents) for i in range(10)]
    labels = [f"{10 * i}–{10 * i + 10}" for i in range(10)]
    parts = [f"<h1>{len(found)} learners</h1>", bars(counts, labels, "learners by percent of the points")]
    if percents:
        ordered = sorted(percents)
        middle = (ordered[(len(ordered) - 1) // 2] + ordered[len(ordered) // 2]) / 2
        parts.append(f"<p>Mean {sum(percents) / len(percents):.1f} %, median {middle:.1f} %.</p>")
    for chapter in sorted({name for mark in found for name in mark.chapters}):
        parts.append(_chapter(chapter, found, signatures))
    lost = [mark for mark in found if not any(one.result for one in mark.chapters.values())]
    if lost:
        rows = [[mark.learner, mark.ids.get("problem", "no notebook")] for mark in lost]
        parts.append(f"<h2>Nothing to grade</h2>{table(['learner', 'why'], rows)}")
    parts.append(f'<p class="dim">{escape(NOTE)}</p>')
    return page("The class", "\n".join(parts))


def _chapter(chapter: str, found: list[LearnerMark], signatures: Signatures) -> str:
    handed_in = [(mark, mark.chapters[chapter]) for mark in found if mark.chapters[chapter].result]
    rows = []
    exercises = list(dict.fromkeys(id for _, one in handed_in for id in one.result.exercises))
    for id in exercises:
        entries = [(mark, one, one.result.exercises[id]) for mark, one in handed_in if id in one.result.exercises]
        shares = [one.points[id] / entry["most"] for _, one, entry in entries]
        rest = [mark.earned - one.points[id] for mark, one, _ in entries]
        tried = [entry for _, _, entry in entries if entry["status"] in (PASSED, FAILED)]
        passed = sum(entry["status"] == PASSED for entry in tried)
        rows.append(
            [
                id, len(tried), f"{passed / len(tried):.0%}" if tried else "–", f"{sum(shares) / len(shares):.0%}",
                correlation(shares, rest), _common(entries), _wrong_ways(id, entries, signatures),
            ]
        )  # fmt: skip
    head = ["exercise", "tried", "solved", "mean", "discrimination", "cases most often failed", "looks like"]
    isolation = ", ".join(sorted({one.isolation for _, one in handed_in}))
    note = f"{len(handed_in)} of {len(found)} handed in; isolation: {isolation or '–'}."
    return f"<h2>{escape(chapter)}</h2><p>{escape(note)}</p>{table(head, rows, numbers=(1, 2, 3, 4))}"


def correlation(a: list[float], b: list[float]) -> str:
    """Pearson's, of an exercise with the rest of the marks: near 0 or below it the exercise tells the strong from the
    weak badly. A dash where too few or equal marks say nothing."""
    n = len(a)
    if n < FEW:
        return "–"
    mean_a, mean_b = sum(a) / n, sum(b) / n
    spread = math.sqrt(sum((x - mean_a) ** 2 for x in a) * sum((y - mean_b) ** 2 for y in b))
    if spread < 1e-12:
        return "–"
    found = sum((x - mean_a) * (y - mean_b) for x, y in zip(a, b, strict=True)) / spread
    return f"{round(found, 2) + 0.0:.2f}"  # never -0.00


def _common(entries: list) -> str:
    counts = Counter(row["case"] for _, _, entry in entries for row in entry["rows"] if row["status"] == FAILED)
    return "; ".join(f"{case} ({count})" for case, count in counts.most_common(3))


def _wrong_ways(id: str, entries: list, signatures: Signatures) -> str:
    """Which kept wrong answers the failed ones behave like, and how many do."""
    if id not in signatures:  # they were left out
        return "–"
    failed = [entry["rows"] for _, _, entry in entries if entry["status"] == FAILED]
    near = Counter(nearest_mutant(rows, signatures.get(id, {})) for rows in failed)
    other = near.pop("", 0)
    words = [f"{label} ({count})" for label, count in near.most_common(3)]
    return "; ".join([*words, *([f"none of them ({other})"] if other else [])])
