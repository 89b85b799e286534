"""What cells tagged `hidden` are written with: cases that learners never see, and wrong answers.

    from nanochat_lib.course.author import example, hidden, mutant

    hidden("tokenizer.merge", example("overlap", ([1, 1, 1], (1, 1), 9), [9, 1]), …)
    mutant("tokenizer.merge", "i += 2", "i += 1", says="overlap")

In an instructor's notebook `hidden` runs its cases on the function of the notebook. `nanochat course mutants` collects
both and tries every right and every wrong answer on all cases.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from textwrap import dedent, indent

from nanochat_lib.course.cases import Case, budget, example, prop, reference
from nanochat_lib.course.grammar import Cell, solution, split_regions
from nanochat_lib.errors import UserError

__all__ = ["budget", "example", "hidden", "mutant", "prop", "reference"]


@dataclass(frozen=True)
class Mutant:
    """A wrong answer: the right one with `old` replaced by `new`, or with another `body`; and what its failure says."""

    old: str
    new: str
    says: str
    body: str | None = None

    @property
    def label(self) -> str:
        if self.body is not None:
            return f"body `{self.body.strip().splitlines()[0].strip()} …`"
        return f"`{self.old.strip()}` → `{self.new.strip()}`"

    def source(self, cell: Cell) -> str:
        """The exercise cell with this wrong answer. Raises UserError when `old` does not stand there exactly once."""
        lines = cell.source.split("\n")
        regions = split_regions(cell)
        if self.body is not None:
            text = dedent(self.body).strip("\n")
            if text.startswith(("def ", "class ", "@", "import ", "from ")):
                return text
            if len(regions) != 1:
                raise UserError(f"{self.label}: the exercise has {len(regions)} regions; give the whole def as body")
            _, start, end = regions[0]
            first = next((line for line in lines[start + 1 : end] if line.strip()), "")
            lines[start + 1 : end] = indent(text, first[: len(first) - len(first.lstrip())]).split("\n")
            return solution(Cell(cell.kind, "\n".join(lines))).source
        answer = ["\n".join(lines[start + 1 : end]) for _, start, end in regions]
        where = [i for i, text in enumerate(answer) if self.old in text]
        if len(where) == 1 and answer[where[0]].count(self.old) == 1:
            _, start, end = regions[where[0]]
            lines[start + 1 : end] = answer[where[0]].replace(self.old, self.new).split("\n")
            return solution(Cell(cell.kind, "\n".join(lines))).source
        whole = solution(cell).source
        if where or whole.count(self.old) != 1:
            count = whole.count(self.old)
            raise UserError(f"{self.label}: {self.old!r} stands {count} times in the answer, it must stand there once")
        return whole.replace(self.old, self.new)


@dataclass
class Notes:
    """What a chapter's hidden cells say about one exercise."""

    cases: list[Case] = field(default_factory=list)
    mutants: list[Mutant] = field(default_factory=list)


_collecting: list[dict[str, Notes]] = []


@contextmanager
def collecting() -> Iterator[dict[str, Notes]]:
    """Inside the block `hidden` and `mutant` run nothing; what they are given is in the dictionary, by exercise."""
    _collecting.append({})
    try:
        yield _collecting[-1]
    finally:
        _collecting.pop()


def hidden(exercise_id: str, *cases: Case) -> None:
    """Runs cases on the notebook's answer and shows the result; with COURSE_STRICT=1 a failure raises CourseError."""
    if _collecting:
        _collecting[-1].setdefault(exercise_id, Notes()).cases += cases
        return
    from nanochat_lib.course import checker, saved
    from nanochat_lib.course.mode import CourseError, strict
    from nanochat_lib.course.showing import emit

    name = saved.name_of(exercise_id)
    fn = getattr(sys.modules["__main__"], name, None)
    if fn is None:
        raise UserError(f"hidden({exercise_id!r}): the notebook defines no {name}; run the exercise's cell first")
    result = checker.run_cases(exercise_id, fn, list(cases))
    if strict() and not result.passed:
        raise CourseError(f"{exercise_id}, hidden cases\n{result.text}")
    emit(result.text, result.html)


def mutant(exercise_id: str, old: str = "", new: str = "", *, says: str, body: str | None = None) -> None:
    """Registers a wrong answer that the public or hidden cases must catch, with `says` in the failure's text.

    Either `old` (which stands exactly once in the answer) becomes `new`, or `body` stands in the answer's place: the
    lines between `# --- solution` and `# --- end`, or the whole cell when it starts with def, class, @ or an import.
    """
    if not says.strip():
        raise UserError(f"mutant({exercise_id!r}, {old!r}): says must be words of the message that the failure gives")
    if (body is None) == (not old) or (body is None and old == new):
        raise UserError(f"mutant({exercise_id!r}): give the text to change and another in its place, or body=")
    if _collecting:
        _collecting[-1].setdefault(exercise_id, Notes()).mutants.append(Mutant(old, new, says, body))
