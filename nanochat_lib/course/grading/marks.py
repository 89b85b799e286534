"""Marks of learners from a gradebook's rows: points by exercise, what a late hand-in costs, adjustments, totals."""

from __future__ import annotations

from dataclasses import dataclass, field

from nanochat_lib.course.grading.gradebook import Gradebook, Note, Result
from nanochat_lib.course.grading.policy import Policy


@dataclass
class ChapterMark:
    """One chapter of one learner."""

    chapter: str
    points: dict[str, float] = field(default_factory=dict)  # exercise -> earned, before adjustments
    most: dict[str, float] = field(default_factory=dict)  # exercise -> its points
    adjusted: float = 0.0
    reasons: list[str] = field(default_factory=list)
    factor: float = 1.0  # what lateness leaves
    written: float = 0.0
    comments: list[str] = field(default_factory=list)  # on written answers
    written_most: float = 0.0
    isolation: str = ""
    result: Result | None = None

    @property
    def earned(self) -> float:
        """Never below 0; an adjustment is not made smaller by lateness."""
        return round(max(0.0, (sum(self.points.values()) + self.written) * self.factor + self.adjusted), 2)

    @property
    def possible(self) -> float:
        return round(sum(self.most.values()) + self.written_most, 2)

    @property
    def percent(self) -> float:
        return round(100 * self.earned / self.possible, 2) if self.possible else 0.0


@dataclass
class LearnerMark:
    learner: str
    chapters: dict[str, ChapterMark] = field(default_factory=dict)
    dropped: tuple[str, ...] = ()
    ids: dict[str, str] = field(default_factory=dict)

    @property
    def counted(self) -> list[ChapterMark]:
        return [mark for name, mark in self.chapters.items() if name not in self.dropped]

    @property
    def earned(self) -> float:
        return round(sum(mark.earned for mark in self.counted), 2)

    @property
    def possible(self) -> float:
        return round(sum(mark.possible for mark in self.counted), 2)

    @property
    def percent(self) -> float:
        return round(100 * self.earned / self.possible, 2) if self.possible else 0.0


def marks(book: Gradebook, policy: Policy, written_most: dict[str, float] | None = None) -> list[LearnerMark]:
    """Everybody's marks, by name. A chapter that others handed in and a learner did not counts 0 of its points.

    `written_most`: chapter -> points that its written answers can give.
    """
    current, known, notes = book.current(), book.known(), book.notes()
    learners = sorted({*(learner for learner, _ in current), *known, *(note.learner for note in notes)})
    chapters = sorted({chapter for _, chapter in current})
    most = {}
    for (_, chapter), result in current.items():
        most.setdefault(chapter, {}).update({id: entry["most"] for id, entry in result.exercises.items()})
    found = []
    for learner in learners:
        mark = LearnerMark(learner, ids=known.get(learner, {}))
        for chapter in chapters:
            one = ChapterMark(chapter, most=dict(most[chapter]), written_most=(written_most or {}).get(chapter, 0.0))
            if result := current.get((learner, chapter)):
                _fill(one, result, policy)
            mark.chapters[chapter] = one
        _by_hand(mark, [note for note in notes if note.learner == learner])
        mark.dropped = _lowest(mark, policy.drop_lowest)
        found.append(mark)
    return found


def _fill(one: ChapterMark, result: Result, policy: Policy) -> None:
    one.result, one.isolation = result, result.isolation
    for id, entry in result.exercises.items():
        groups = {name: tuple(pair) for name, pair in entry["groups"].items()}
        one.points[id] = policy.points(entry["most"], groups)
    if (due := policy.due.get(result.chapter[:2])) is not None:
        one.factor = policy.late.factor(result.handed_in - due)


def _by_hand(mark: LearnerMark, notes: list[Note]) -> None:
    written: dict[tuple[str, str], Note] = {}
    for note in notes:
        one = mark.chapters.get(note.chapter)
        if one is None:
            continue
        if note.kind == "adjust":
            one.adjusted += note.points
            one.reasons.append(f"{note.points:+g} {note.item or 'the chapter'}: {note.reason} ({note.who})")
        elif note.kind == "written":
            written[note.chapter, note.item] = note  # the newest counts
    for (chapter, item), note in written.items():
        mark.chapters[chapter].written += note.points
        mark.chapters[chapter].comments.append(
            f"{item}: {note.points:g} point{'' if note.points == 1 else 's'} ({note.reason})"
        )


def _lowest(mark: LearnerMark, count: int) -> tuple[str, ...]:
    """The chapters that cost a learner most, at most all but one."""
    ranked = sorted(mark.chapters.values(), key=lambda one: (one.percent, one.chapter))
    return tuple(one.chapter for one in ranked[: max(0, min(count, len(ranked) - 1))])
