"""`progress()`: chapters, points, minutes and what is next, from the local record."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape

from nanochat_lib.course import registry, state
from nanochat_lib.course.registry import Chapter, Entry
from nanochat_lib.course.showing import emit
from nanochat_lib.progress import bar_html

WIDTH = 12  # characters of a bar


@dataclass(frozen=True)
class Line:
    """One chapter's state."""

    chapter: Chapter
    done: int
    points: int
    minutes_left: int
    next: Entry | None

    @property
    def count(self) -> int:
        return len(self.chapter.exercises)

    @property
    def all_points(self) -> int:
        return sum(entry.points for entry in self.chapter.exercises)


def lines() -> list[Line]:
    """One line for each chapter that has exercises."""
    records = state.read()["exercises"]
    found = []
    for chapter in registry.chapters():
        open_ = [e for e in chapter.exercises if not records.get(e.id, {}).get("passed")]
        if chapter.exercises:
            points = sum(e.points for e in chapter.exercises) - sum(e.points for e in open_)
            minutes = sum(e.minutes for e in open_)
            done = len(chapter.exercises) - len(open_)
            found.append(Line(chapter, done, points, minutes, open_[0] if open_ else None))
    return found


def summary(found: list[Line]) -> str:
    """The last line: totals and what is next."""
    done, count = sum(line.done for line in found), sum(line.count for line in found)
    points, all_points = sum(line.points for line in found), sum(line.all_points for line in found)
    following = next((line for line in found if line.next), None)
    total = f"{done} of {count} exercises, {points} of {all_points} points."
    if following is None:
        return f"{total} All done." if found else "No exercises found: start in the course's folder."
    entry = following.next
    return f"{total} Next: {entry.id} in chapter {following.chapter.number} (about {entry.minutes} minutes)."


def quizzes_line() -> str:
    answered = state.read()["quizzes"].values()
    right = sum(bool(q.get("right")) for q in answered)
    return f"Quizzes: {right} right of {len(answered)} answered." if answered else ""


def as_text(found: list[Line]) -> str:
    wide = max((len(line.chapter.title) for line in found), default=0)
    rows = []
    for line in found:
        filled = round(WIDTH * line.done / line.count)
        bar = "█" * filled + "░" * (WIDTH - filled)
        left = f"{line.minutes_left} min left" if line.next else "done"
        rows.append(
            f"{line.chapter.number} {line.chapter.title:<{wide}}  {bar}  {line.done}/{line.count} exercises  "
            f"{line.points:>2}/{line.all_points} points  {left}"
        )
    return "\n".join([*rows, *filter(None, [summary(found), quizzes_line()])])


def as_html(found: list[Line]) -> str:
    cell = "text-align:left;padding:.15em .8em .15em 0;background:transparent"
    rows = []
    for line in found:
        bar = bar_html(line.done / line.count)
        left = f"{line.minutes_left} min left" if line.next else "done"
        texts = [f"{line.done}/{line.count} exercises", f"{line.points}/{line.all_points} points", left]
        cells = [f"{line.chapter.number} {escape(line.chapter.title)}", bar, *texts]
        rows.append("<tr>" + "".join(f'<td style="{cell}">{text}</td>' for text in cells) + "</tr>")
    tail = "".join(f"<div>{escape(text)}</div>" for text in (summary(found), quizzes_line()) if text)
    return f'<table style="border-collapse:collapse">{"".join(rows)}</table>{tail}'


def progress() -> None:
    """Shows how far you are: a bar, points and minutes for each chapter, and the next exercise."""
    found = lines()
    emit(as_text(found), as_html(found))
