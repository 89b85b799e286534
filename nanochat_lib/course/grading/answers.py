"""The code that is graded: a learner's exercise cells, and what those need of the learner's other cells.

A helper or an import that stands in another cell is taken along by name; nothing else of a notebook is ever run. The
texts are read here, never run.
"""

from __future__ import annotations

import ast
import re
import unicodedata
from dataclasses import dataclass, field

from nanochat_lib.course.learner import LearnerCell, find, plain
from nanochat_lib.course.names import needed
from nanochat_lib.course.sources import bound_names, single_import

# Letters of other alphabets that look like Latin ones (a small part of Unicode's confusables).
ALIKE = {
    "а": "a", "в": "b", "с": "c", "ԁ": "d", "е": "e", "һ": "h", "і": "i", "ј": "j", "к": "k", "м": "m", "о": "o",
    "р": "p", "ѕ": "s", "т": "t", "у": "y", "х": "x", "α": "a", "ε": "e", "ι": "i", "κ": "k", "ν": "v", "ο": "o",
    "ρ": "p", "τ": "t", "υ": "u", "χ": "x", "ı": "i", "ɡ": "g",
}  # fmt: skip


@dataclass
class Answer:
    """One exercise of one learner."""

    source: str = ""  # the exercise's cell
    label: str = ""  # "cell 12"
    pieces: list[tuple[str, str]] = field(default_factory=list)  # (source, label): helpers, then the cell
    problem: str = ""  # why there is nothing to run
    parameters: tuple[str, ...] = ()  # names of the function's parameters


@dataclass
class Answers:
    """All of a chapter's exercises that a submission holds."""

    found: dict[str, Answer] = field(default_factory=dict)  # exercise -> what is there; absent: not handed in
    remarks: list[str] = field(default_factory=list)


def gather(cells: list[LearnerCell], wanted: dict[str, str], known: frozenset[str]) -> Answers:
    """The answers in a notebook's cells. `wanted`: exercise -> function; `known`: what the chapter's own code gives."""
    where = find(cells, wanted)
    answers = Answers(remarks=list(where.remarks))
    answers.remarks += _look_alikes(cells, [id for id in wanted if id not in where.cells])
    earlier: set[str] = set()
    taken = {cell.number for cell in where.cells.values()}
    for exercise, name in wanted.items():
        if cell := where.cells.get(exercise):
            others = [other for other in cells if other.number not in taken and "hidden" not in other.tags]
            answers.found[exercise] = _answer(cell, name, others, known | earlier, answers.remarks)
        earlier.add(name)
    return answers


def _answer(cell: LearnerCell, name: str, others: list[LearnerCell], known: set[str], remarks: list[str]) -> Answer:
    source, label = plain(cell.source), f"cell {cell.number}"
    answer = Answer(source, label)
    try:
        tree = ast.parse(source)
        lacking = needed(source) - known
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
        answer.problem = f"{label} is not valid Python ({getattr(error, 'msg', None) or type(error).__name__}{where})"
        return answer
    answer.parameters = _parameters(tree, name)
    helpers = _helpers(lacking, others, known)
    for helper, number in helpers.values():
        if not helper.startswith(("import ", "from ")):
            remarks.append(f"{label} uses a name that cell {number} defines; it was taken along")
    answer.pieces = [(text, f"cell {number}") for text, number in helpers.values()] + [(source, label)]
    return answer


def _parameters(tree: ast.Module, name: str) -> tuple[str, ...]:
    for node in reversed(tree.body):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name:
            return tuple(arg.arg for arg in [*node.args.posonlyargs, *node.args.args])
    return ()


def _helpers(lacking: set[str], others: list[LearnerCell], known: set[str]) -> dict[str, tuple[str, int]]:
    """Name -> (text, cell) of the statements of other cells that bind what is lacking, and what those need."""
    bound: dict[str, tuple[str, int]] = {}
    for cell in others:
        if cell.kind == "code":
            bound |= _bound(cell)
    found: dict[str, tuple[str, int]] = {}

    def add(name: str, trail: tuple[str, ...] = ()) -> None:
        if name in found or name in trail or name not in bound or len(found) > 200:
            return
        try:
            for used in sorted(needed(bound[name][0]) - known):
                add(used, (*trail, name))
        except (SyntaxError, RecursionError):
            return
        found[name] = bound[name]

    for name in sorted(lacking):
        add(name)
    return found


def _bound(cell: LearnerCell) -> dict[str, tuple[str, int]]:
    try:
        source = plain(cell.source)
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return {}
    found = {}
    for node in tree.body:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                found[alias.asname or alias.name.split(".")[0]] = single_import(node, alias), cell.number
        else:
            text = ast.get_source_segment(source, node) or ""
            decorators = getattr(node, "decorator_list", [])
            if decorators:
                text = "\n".join(source.split("\n")[decorators[0].lineno - 1 : node.end_lineno])
            found |= dict.fromkeys(bound_names(node), (text, cell.number))
    return found


def _look_alikes(cells: list[LearnerCell], missing: list[str]) -> list[str]:
    """Lines about cells whose id looks like an exercise's but is written with other letters."""
    lines = []
    for cell in cells:
        for id in cell.ids:
            for exercise in missing:
                spelled = {exercise, exercise.replace(".", "-"), exercise.replace(".", "-").replace("_", "-")}
                if id not in spelled and skeleton(id) in {skeleton(text) for text in spelled}:
                    odd = sorted({f"U+{ord(c):04X}" for c in id if ord(c) > 127}) or [ascii(id)]
                    lines.append(
                        f"{exercise}: cell {cell.number} has an id that only looks like it ({', '.join(odd[:4])})"
                    )
    return list(dict.fromkeys(lines))


def skeleton(text: str) -> str:
    """A text as one sees it: compatibility forms folded, look-alike letters as Latin ones, invisible signs left out."""
    folded = unicodedata.normalize("NFKD", text).casefold()
    seen = "".join(ALIKE.get(c, c) for c in folded if unicodedata.category(c)[0] not in "MC")
    return re.sub(r"\s+", "", seen)
