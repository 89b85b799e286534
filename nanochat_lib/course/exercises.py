"""Exercises among a chapter's cells: which cells belong to one, what it is called, and what nbgrader needs to know."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from nanochat_lib.course.grammar import Cell

Calls = list[tuple[str, ast.Call]]


@dataclass(frozen=True)
class Unit:
    """An exercise of a chapter: its cell, and the check cell and hidden cell after it where they are there."""

    cell: Cell
    check: Cell | None
    hidden: Cell | None

    @property
    def id(self) -> str:
        return self.cell.metadata["id"]

    @property
    def library(self) -> str | None:
        return self.cell.metadata.get("library")

    @property
    def name(self) -> str:
        """Of the function or class that a learner writes: the last part of the library symbol, else of the id."""
        return re.split(r"[:.]", self.library or self.id)[-1]


def units(cells: list[Cell]) -> list[Unit]:
    """The exercises of a chapter, in order."""
    found = []
    for i, cell in enumerate(cells):
        if "exercise" not in cell.tags:
            continue
        check, hidden = [*cells[i + 1 : i + 3], None, None][:2]
        if not (
            check and check.kind == "code" and "hidden" not in check.tags and checked(check) == [cell.metadata["id"]]
        ):
            check, hidden = None, check
        if not (hidden and "hidden" in hidden.tags):
            hidden = None
        found.append(Unit(cell, check, hidden))
    return found


def checked(cell: Cell) -> list[str]:
    """Ids that a cell gives to `check`."""
    return [id for id, _ in calls(cell.source, "check")]


def defined(source: str) -> list[str]:
    """Functions and classes that a cell defines at its top level."""
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
    return [node.name for node in ast.parse(source).body if isinstance(node, kinds)]


def calls(source: str, name: str) -> Calls:
    """(first argument, call) of every call of `name` in a cell whose first argument is a text, in order."""
    return [(node.args[0].value, node) for node in _calls(source) if node.func.id == name and _text(node)]


def _calls(source: str) -> Iterator[ast.Call]:
    found = [n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)]
    return iter(sorted(found, key=lambda node: (node.lineno, node.col_offset)))


def _text(node: ast.Call) -> bool:
    return bool(node.args) and isinstance(node.args[0], ast.Constant) and isinstance(node.args[0].value, str)


def for_nbgrader(cells: list[Cell]) -> list[Cell]:
    """The cells with nbgrader's metadata (schema 3): exercises are solutions, their check cells locked tests."""
    grading = {}
    for unit in units(cells):
        name = unit.id.replace(".", "-")
        grading[id(unit.cell)] = _nbgrader(name, solution=True)
        if unit.check:
            grading[id(unit.check)] = _nbgrader(f"{name}-check", points=unit.cell.metadata["points"])
    return [
        replace(cell, metadata=cell.metadata | {"nbgrader": grading[id(cell)]}) if id(cell) in grading else cell
        for cell in cells
    ]


def _nbgrader(name: str, solution: bool = False, points: int | None = None) -> dict:
    grade = points is not None
    entry = {"cell_type": "code", "grade": grade, "grade_id": name, "locked": grade}
    entry |= {"points": points} if grade else {}
    return entry | {"schema_version": 3, "solution": solution, "task": False}
