"""Written answers: which cells hold them and what they are marked by, from a YAML file.

questions:
  - id: attention.why_blocks            # the id of the learner's cell, of any kind
    chapter: 03_attention
    prompt: Why does the kernel never hold all scores?
    criteria:
      - {name: names the memory, points: 1}
      - {name: gives the number, points: 0.5}
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from nanochat_lib.course.grading.notebooks import Paper
from nanochat_lib.errors import UserError
from nanochat_lib.presets import nearest


@dataclass(frozen=True)
class Criterion:
    name: str
    points: float


@dataclass(frozen=True)
class Question:
    id: str
    chapter: str
    prompt: str
    criteria: tuple[Criterion, ...]

    @property
    def most(self) -> float:
        return sum(criterion.points for criterion in self.criteria)


def load(path: Path, chapters: list[str]) -> list[Question]:
    """The questions of a rubric. UserError, with the question's place, for what means nothing."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML ({str(error).splitlines()[0]})") from None
    entries = found.get("questions") if isinstance(found, dict) else None
    if not isinstance(entries, list) or not entries:
        raise UserError(f"{path} must hold questions:, a list")
    questions = [_question(entry, f"{path}, question {i}", chapters) for i, entry in enumerate(entries, 1)]
    ids = [question.id for question in questions]
    if twice := next((id for id in ids if ids.count(id) > 1), ""):
        raise UserError(f"{path}: {twice} stands there twice")
    return questions


def _question(entry: object, where: str, chapters: list[str]) -> Question:
    known = ("id", "chapter", "prompt", "criteria")
    if not isinstance(entry, dict):
        raise UserError(f"{where}: must have {', '.join(known)}")
    for key in entry:
        if key not in known:
            raise UserError(f"{where}: there is no {key!r}; {nearest(str(key), list(known))}")
    if missing := [key for key in known if not entry.get(key)]:
        raise UserError(f"{where}: lacks {', '.join(missing)}")
    if entry["chapter"] not in chapters:
        raise UserError(
            f"{where}: there is no chapter {entry['chapter']!r}; {nearest(str(entry['chapter']), chapters)}"
        )
    if not isinstance(entry["criteria"], list):
        raise UserError(f"{where}: criteria must be a list")
    criteria = tuple(_criterion(one, where) for one in entry["criteria"])
    names = [criterion.name for criterion in criteria]
    if len(set(names)) < len(names):
        raise UserError(f"{where}: two criteria have the same name")
    return Question(str(entry["id"]), entry["chapter"], str(entry["prompt"]), criteria)


def _criterion(one: object, where: str) -> Criterion:
    if not isinstance(one, dict) or set(one) != {"name", "points"}:
        raise UserError(f"{where}: a criterion is {{name: …, points: …}}, got {one!r}")
    points = one["points"]
    if isinstance(points, bool) or not isinstance(points, (int, float)) or not 0 < points < math.inf:
        raise UserError(f"{where}: the points of {one['name']!r} must be a number above 0, got {points!r}")
    return Criterion(str(one["name"]), float(points))


def most(questions: list[Question]) -> dict[str, float]:
    """Chapter -> points that its written answers can give."""
    found: dict[str, float] = {}
    for question in questions:
        found[question.chapter] = found.get(question.chapter, 0.0) + question.most
    return found


def answer(paper: Paper, question: Question) -> str:
    """The text of the cell that holds an answer, "" when there is none. Of several cells the last that has text."""
    spelled = {question.id, question.id.replace(".", "-"), question.id.replace(".", "-").replace("_", "-")}
    texts = [cell.source.strip() for cell in paper.cells if spelled & set(cell.ids)]
    return next((text for text in reversed(texts) if text), "")
