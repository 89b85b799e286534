"""How the kept wrong answers (mutants) of a chapter fail, so that a class's failures can be named after them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from nanochat_lib.course.grading.answers import Answer, Answers
from nanochat_lib.course.grading.batch import run_all
from nanochat_lib.course.grading.grade import Desk
from nanochat_lib.course.grading.key import Key
from nanochat_lib.course.grading.session import Session
from nanochat_lib.course.grammar import solution
from nanochat_lib.course.result import FAILED
from nanochat_lib.errors import UserError

Signature = list[list[str]]  # [case, cause] of each failed case
Signatures = dict[str, dict[str, Signature]]  # exercise -> mutant's label -> how it fails
ALIKE = 0.5  # share of failures in common from which an answer is said to behave like a mutant


def signatures(desk: Desk, one: Key, cache: Path, jobs: int, say: Callable[[str], None] = print) -> Signatures:
    """How every mutant of a chapter fails, in the same child and by the same cases as submissions; kept in `cache`."""
    path = cache / f"{one.stem}-{one.bundle}-mutants.json"
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        pass
    say(f"{one.stem}: running the kept wrong answers")
    right = {id: Answer(text, "right", [(text, "right")]) for id, text in _right(one).items()}
    waiting = []
    for id, notes in one.right.notes.items():
        for mutant in notes.mutants if id in one.questions else ():
            try:
                text = mutant.source(one.questions[id].unit.cell)
            except UserError:
                continue
            answers = Answers({**right, id: Answer(text, "mutant", [(text, "mutant")])})
            waiting.append(((id, mutant.label), Session(desk.server, one, answers, 0, desk.limits_of(one.stem))))
    found: Signatures = {}
    for (id, label), judged in run_all(waiting, jobs):
        if not isinstance(judged, Exception):
            rows = next(item.rows for item in judged if item.id == id)
            found.setdefault(id, {})[label] = [[row.case, row.cause] for row in rows if row.status == FAILED]
    path.write_text(json.dumps(found), encoding="utf-8")
    return found


def _right(one: Key) -> dict[str, str]:
    return {id: solution(question.unit.cell).source for id, question in one.questions.items()}


def nearest_mutant(rows: list[dict], known: dict[str, Signature]) -> str:
    """The label of the mutant whose failures are most like these rows', "" when none is like enough."""
    here = {(row["case"], row.get("cause", "")) for row in rows if row["status"] == FAILED}

    def alike(label: str) -> float:
        there = {tuple(pair) for pair in known[label]}
        return len(here & there) / len(here | there) if here | there else 0.0

    best = max(sorted(known), key=alike, default="")
    return best if best and alike(best) >= ALIKE else ""
