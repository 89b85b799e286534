"""`nanochat grade feedback`: one page a learner with what passed, what failed and why, probably; and the class's page.

Of public cases a page shows all that the notebook's own check shows. Of hidden cases it shows name, kind of difference
and a cause in fixed words: never a value, nor a text that the learner's code could have put one into.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

from nanochat_lib.course import registry
from nanochat_lib.course.grading.exports import file_name, iso
from nanochat_lib.course.grading.marks import ChapterMark, LearnerMark
from nanochat_lib.course.grading.page import Raw, page, table
from nanochat_lib.course.result import FAILED, NOT_RUN, PASSED
from nanochat_lib.errors import UserError

LABELS = {
    "called": "called with",
    "expected": "expected",
    "got": "got",
    "where": "difference",
    "step": "first wrong step",
}
SHOWN = 3  # failed cases of one exercise that are told in full


def learner_page(mark: LearnerMark) -> str:
    """The page of one learner."""
    parts = [f"<h1>{escape(mark.learner)}: {mark.earned:g} of {mark.possible:g} points</h1>"]
    rows = []
    for name, one in mark.chapters.items():
        note = "does not count (your lowest)" if name in mark.dropped else "" if one.result else "not handed in"
        rows.append([name, f"{one.earned:g} of {one.possible:g}", f"{one.percent:g} %", note])
    parts.append(table(["chapter", "points", "", ""], rows, numbers=(1, 2)))
    parts += [_chapter(name, one) for name, one in mark.chapters.items() if one.result]
    return page(f"Feedback for {mark.learner}", "\n".join(parts))


def _chapter(name: str, one: ChapterMark) -> str:
    result = one.result
    parts = [f"<h2>{escape(name)}</h2>"]
    lines = [f"handed in {iso(result.handed_in)}"] if result.handed_in else []
    if one.factor < 1:
        lines.append(f"late: {100 * one.factor:.0f} % of the points count")
    if one.written_most:
        lines.append(f"written answers: {one.written:g} of {one.written_most:g} points")
    lines += one.comments + one.reasons + result.remarks
    parts.append("<ul>" + "".join(f"<li>{escape(line)}</li>" for line in lines) + "</ul>" if lines else "")
    for id, entry in result.exercises.items():
        parts.append(_exercise(id, entry, one.points[id]))
    parts.append(f'<p class="dim">submission {escape(result.submission)}, bundle {escape(result.bundle)}</p>')
    return "\n".join(parts)


def _exercise(id: str, entry: dict, points: float) -> str:
    kind = "good" if entry["status"] == PASSED else "bad"
    mark = f'<span class="{kind}">{escape(entry["status"])}</span>'
    head = f"<h3>{escape(id)}: {mark}, {points:g} of {entry['most']:g}</h3>"
    if entry["status"] not in (PASSED, FAILED):
        return head
    counts = [f"{group}: {a} of {b}" for group, (a, b) in entry["groups"].items() if b]
    parts = [head, f"<p>Cases passed: {escape(', '.join(counts))}.</p>"]
    failed = [row for row in entry["rows"] if row["status"] == FAILED]
    if entry["remarks"]:  # nothing could be run
        return "\n".join([*parts, *(f"<p>{escape(line)}</p>" for line in entry["remarks"])])
    items = [_failed(row) for row in failed[:SHOWN]]
    items += [f"<li>{escape(row['case'])}{_brief(row)}</li>" for row in failed[SHOWN:]]
    parts.append(f"<ul>{''.join(items)}</ul>")
    if waiting := [row["case"] for row in entry["rows"] if row["status"] == NOT_RUN]:
        parts.append(f'<p class="dim">Not run: {escape(", ".join(waiting))}.</p>')
    if failed and (hint := _hint(id)):
        parts.append(f"<p><b>Hint:</b> {escape(hint)}</p>")
    return "\n".join(parts)


def _failed(row: dict) -> str:
    if row["hidden"]:
        return f"<li>{escape(row['case'])} (a hidden case){_brief(row)}</li>"
    pairs = [(label, row[key]) for key, label in LABELS.items() if row.get(key)]
    rows = [[label, Raw(f"<code>{escape(text)}</code>")] for label, text in pairs]
    rows += [["likely cause", Raw(f"<b>{escape(row['cause'])}</b>")]] if row.get("cause") else []
    return f"<li>{escape(row['case'])}{table(['', ''], rows)}</li>"


def _brief(row: dict) -> str:
    words = [text for text in _told(row) if text]
    return escape(": " + "; ".join(words)) if words else ""


def _told(row: dict) -> list[str]:
    """[kind of difference, cause] that a learner may read of any row; rows of older engines have none."""
    return row.get("told") or ["", ""]


def _hint(id: str) -> str:
    """The exercise's first hint, as the notebook gives it."""
    try:
        return str(registry.exercise(id).hints[0])
    except (UserError, ImportError):
        return ""


def write(found: list[LearnerMark], folder: Path, class_page: str) -> list[Path]:
    """A page for each learner in `folder`/learners, and the instructor's own beside that."""
    pages = folder / "learners"
    pages.mkdir(parents=True, exist_ok=True)
    paths = []
    for mark in found:
        path = pages / f"{file_name(mark.learner)}.html"
        path.write_text(learner_page(mark), encoding="utf-8")
        paths.append(path)
    (folder / "class.html").write_text(class_page, encoding="utf-8")
    return [*paths, folder / "class.html"]
