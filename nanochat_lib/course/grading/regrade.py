"""`nanochat grade regrade`: after a case was fixed, who changes and by how much, before anything is written."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nanochat_lib.course.grading import grade
from nanochat_lib.course.grading.gradebook import Gradebook, Result
from nanochat_lib.course.grading.policy import Policy
from nanochat_lib.errors import UserError


@dataclass(frozen=True)
class Change:
    """One learner's chapter before and after, in points without lateness and adjustments."""

    learner: str
    chapter: str
    before: float | None  # None: not graded before
    after: float
    exercises: tuple[str, ...]  # whose points differ


def points(result: Result, policy: Policy) -> dict[str, float]:
    """Exercise -> points of one result."""
    return {
        id: policy.points(entry["most"], {name: tuple(pair) for name, pair in entry["groups"].items()})
        for id, entry in result.exercises.items()
    }


def change(old: Result | None, new: Result, policy: Policy) -> Change:
    before = points(old, policy) if old else {}
    after = points(new, policy)
    differing = tuple(id for id in after if before.get(id) != after[id])
    total = round(sum(before.values()), 2) if old else None
    return Change(new.learner, new.chapter, total, round(sum(after.values()), 2), differing)


def regrade(
    where: Path, book_path: Path, policy: Policy, write: bool, root: Path = Path("."), chapter: str = "", jobs: int = 1,
    require: str = "limits", salt: str = "", say: Callable[[str], None] = print,
) -> list[Change]:  # fmt: skip
    """Grades the papers again that the present bundle has not graded; says who changes; adds the rows with `write`."""
    if not book_path.exists():
        raise UserError(f"{book_path} does not exist, so there is nothing to grade again")
    cache = book_path.with_suffix(".cache")
    with Gradebook(book_path) as book, grade.open_desk(root, cache, chapter, require, salt, say) as desk:
        current = book.current()
        every = list(grade.tasks(grade.learners(where), desk, None))
        waiting = [
            task
            for task in every
            for one in [desk.keys[task.paper.stem]]
            if not book.has(task.paper.learner, one.stem, task.submission, one.bundle, desk.salted)
        ]
        found = []
        for task, result in grade.graded(waiting, desk, jobs):
            if isinstance(result, Exception):
                say(f"{task.paper.learner}, {task.paper.stem}: the grader itself failed ({result})")
                continue
            found.append((change(current.get((result.learner, result.chapter)), result, policy), result))
        found.sort(key=lambda pair: (pair[0].chapter, pair[0].learner))
        changes = [one for one, _ in found]
        for one in changes:
            if one.before != one.after:
                before = "not graded" if one.before is None else f"{one.before:g}"
                say(f"{one.learner}  {one.chapter}  {before} -> {one.after:g}  ({', '.join(one.exercises)})")
        same = sum(one.before == one.after for one in changes) + len(every) - len(waiting)
        say(f"{sum(one.before != one.after for one in changes)} marks change, {same} papers keep theirs")
        if write:
            for _, result in found:
                book.add(result)
            say(f"written to {book_path}; the older rows stay in it")
        elif found:
            say("nothing was written; the same command with --write does it")
        return changes
