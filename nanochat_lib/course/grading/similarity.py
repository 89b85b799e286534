"""`nanochat grade similarity`: answers that are alike in their syntax trees, with what everybody has taken out.

Names, comments, layout, docstrings and annotations do not count; a tree becomes a row of node kinds, a row becomes
fingerprints of GRAM nodes each (winnowing after Schleimer, Wilkerson and Aiken 2003). Fingerprints of the stub, of the
library's answer and of more than COMMON of the class are boilerplate.
"""

from __future__ import annotations

import ast
import hashlib
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from nanochat_lib.course.grading.answers import gather
from nanochat_lib.course.grading.key import keys
from nanochat_lib.course.grading.notebooks import papers
from nanochat_lib.course.grading.submissions import collect
from nanochat_lib.course.grammar import solution, stub

GRAM, WINDOW = 10, 4
COMMON = 0.25  # share of the class (and at least COMMON_LEAST learners) from which a fingerprint is everybody's
COMMON_LEAST = 4
FEWEST = 6  # fingerprints of its own that an answer must have to be compared
ALIKE = 0.6

CANNOT = (
    "Alike is not copied: short exercises have few good answers, and hints, lectures and the library lead to the same\n"
    "ones. What was rewritten, or comes from outside (a chat model, an older year), is not seen. Look at both\n"
    "answers, and ask, before you decide."
)


@dataclass(frozen=True)
class Pair:
    """Two learners whose answers to an exercise are alike. `share`: of the smaller one's own fingerprints."""

    exercise: str
    first: str
    second: str
    share: float
    own: int  # fingerprints that were compared
    same_text: bool  # to the letter, comments included


def nodes(source: str) -> list[str]:
    """The kinds of a tree's nodes in order, with operators, constants' types and the names of attributes."""
    found: list[str] = []

    def walk(node: ast.AST) -> None:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            return  # a docstring, or a text that stands alone
        name = type(node).__name__
        if isinstance(node, ast.Constant):
            name += type(node.value).__name__
        elif isinstance(node, ast.Attribute):
            name += node.attr
        elif isinstance(node, ast.expr_context):
            return
        found.append(name)
        for field, value in ast.iter_fields(node):
            if field in ("annotation", "returns", "type_comment", "ctx"):
                continue
            for item in value if isinstance(value, list) else [value]:
                if isinstance(item, ast.AST):
                    walk(item)

    try:
        walk(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    return found


def fingerprints(source: str) -> frozenset[int]:
    """A few hashes that stand for the whole tree."""
    kinds = nodes(source)
    grams = [" ".join(kinds[i : i + GRAM]) for i in range(max(0, len(kinds) - GRAM + 1))]
    hashes = [int.from_bytes(hashlib.blake2b(gram.encode(), digest_size=8).digest(), "big") for gram in grams]
    if len(hashes) < WINDOW:
        return frozenset(hashes)
    return frozenset(min(hashes[i : i + WINDOW]) for i in range(len(hashes) - WINDOW + 1))


def alike(answers: dict[str, dict[str, str]], boilerplate: dict[str, Iterable[str]]) -> list[Pair]:
    """Pairs of learners, most alike first. `answers`: exercise -> learner -> source; `boilerplate`: what was given."""
    found = []
    for exercise, by_learner in answers.items():
        prints = {learner: fingerprints(source) for learner, source in by_learner.items()}
        given = frozenset().union(*(fingerprints(text) for text in boilerplate.get(exercise, ())))
        counts = Counter(one for own in prints.values() for one in own)
        often = {one for one, count in counts.items() if count >= max(COMMON_LEAST, COMMON * len(prints))}
        own = {learner: marks - given - often for learner, marks in prints.items()}
        for a, b in combinations(sorted(own), 2):
            least = min(len(own[a]), len(own[b]))
            if least < FEWEST:
                continue
            share = len(own[a] & own[b]) / least
            if share >= ALIKE:
                same = by_learner[a].strip() == by_learner[b].strip()
                found.append(Pair(exercise, a, b, round(share, 2), least, same))
    return sorted(found, key=lambda pair: (-pair.share, -pair.own, pair.first, pair.second, pair.exercise))


def compared(where: Path, root: Path, chapter: str = "") -> tuple[list[Pair], dict[str, dict[str, str]]]:
    """The pairs of a folder of submissions, and all answers: exercise -> learner -> source. Nobody's code is run."""
    found = keys(root, chapter)
    by_stem = {one.stem: one for one in found}
    answers: dict[str, dict[str, str]] = {}
    for submission in collect(where):
        for paper in papers(submission, found)[0]:
            one = by_stem[paper.stem]
            for id, answer in gather(paper.cells, one.wanted, one.known).found.items():
                answers.setdefault(id, {})[submission.learner] = answer.source
    given = {}
    for one in found:
        for id, question in one.questions.items():
            given[id] = [stub(question.unit.cell).source, solution(question.unit.cell).source]
    return alike(answers, given), answers


def report(pairs: list[Pair]) -> str:
    """The report as text."""
    if not pairs:
        return f"no two answers are alike beyond what everybody has\n\n{CANNOT}"
    by_pair: dict[tuple[str, str], list[Pair]] = {}
    for pair in pairs:
        by_pair.setdefault((pair.first, pair.second), []).append(pair)
    lines = []
    for (a, b), several in sorted(by_pair.items(), key=lambda item: -sum(pair.share for pair in item[1])):
        lines.append(f"{a}, {b}: {len(several)} exercise{'' if len(several) == 1 else 's'}")
        for pair in several:
            text = ", the same text" if pair.same_text else ""
            lines.append(f"    {pair.exercise:<32} {pair.share:.0%} of {pair.own} marks of their own{text}")
    return "\n".join([*lines, "", CANNOT])
