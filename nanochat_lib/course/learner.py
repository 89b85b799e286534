"""A learner's notebook as it comes: exercises found by id however the cells were moved, copied, split or retyped.

`nanochat course check NN` runs its imports, setup cells and exercise cells, then the same checks as the notebook does.
Whatever is odd about the notebook becomes one line; the other exercises go on.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from nanochat_lib.course import grammar, namespace
from nanochat_lib.course.exercises import defined
from nanochat_lib.course.mishaps import staying
from nanochat_lib.course.names import imports
from nanochat_lib.errors import UserError


@dataclass(frozen=True)
class LearnerCell:
    number: int  # from 1, as one counts cells in the notebook
    kind: str
    source: str
    ids: tuple[str, ...]  # every name the cell may be known by: its own id, nbgrader's, the notebook's
    tags: tuple[str, ...]


@dataclass
class Found:
    """What a notebook holds of a chapter's exercises."""

    cells: dict[str, LearnerCell] = field(default_factory=dict)  # exercise -> the cell that counts
    remarks: list[str] = field(default_factory=list)


def read(path: Path) -> list[LearnerCell]:
    """The cells of an .ipynb or py:percent file. Raises UserError in one line for what is neither."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise UserError(f"{path} does not exist") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file, so it is no notebook") from None
    if path.suffix == ".py":
        cells = grammar.read(text, path.name)
        return [_cell(i, c.kind, c.source, c.metadata, "") for i, c in enumerate(cells, 1)]
    try:
        document = json.loads(text)
        version = document.get("nbformat")
        entries = document["cells"] if version == 4 else None
    except (ValueError, KeyError, AttributeError):
        how = "JupyterLab keeps an older copy in .ipynb_checkpoints/ beside it"
        raise UserError(f"{path} is damaged and cannot be read as a notebook; {how}") from None
    if not isinstance(entries, list):
        raise UserError(f"{path} is a notebook of format {version}; open it in JupyterLab and save it once")
    return [
        _cell(i, e.get("cell_type", ""), e.get("source", ""), e.get("metadata") or {}, str(e.get("id", "")))
        for i, e in enumerate(entries, 1)
        if isinstance(e, dict)
    ]


def _cell(number: int, kind: str, source: str | list[str], metadata: dict, name: str) -> LearnerCell:
    graded = metadata.get("nbgrader")
    ids = (metadata.get("id"), graded.get("grade_id") if isinstance(graded, dict) else None, name)
    text = source if isinstance(source, str) else "".join(map(str, source))
    tags = tuple(tag for tag in metadata.get("tags") or [] if isinstance(tag, str))
    return LearnerCell(number, kind, text, tuple(str(i) for i in ids if i), tags)


def find(cells: list[LearnerCell], wanted: dict[str, str]) -> Found:
    """The cell of every exercise in `wanted` (id -> function's name) that is there.

    By id first, whatever became of the cell's type; then, for a cell that lost its metadata, by the function it
    defines. Of several the last one that defines the function counts.
    """
    found = Found()
    for exercise, name in wanted.items():
        spelled = {exercise, exercise.replace(".", "-"), exercise.replace(".", "-").replace("_", "-")}
        named = [cell for cell in cells if spelled & set(cell.ids)]
        defining = [cell for cell in named if _defines(cell, name)]
        strangers = [c for c in cells if c.kind == "code" and _defines(c, name) and "hidden" not in c.tags]
        if not named and not strangers:
            found.remarks.append(f"{exercise}: its cell is not in the notebook, so it counts as not attempted")
            continue
        cell = (defining or [c for c in strangers if c not in named] or named)[-1]
        if len(named) > 1:
            which = ", ".join(str(c.number) for c in named)
            found.remarks.append(f"{exercise}: cells {which} carry its id; cell {cell.number} counts")
        elif cell not in named:
            found.remarks.append(f"{exercise}: cell {cell.number} defines {name} and counts as its cell")
        if cell.kind != "code":
            found.remarks.append(f"{exercise}: cell {cell.number} has become a {cell.kind} cell; it is read as code")
        found.cells[exercise] = cell
    return found


def _defines(cell: LearnerCell, name: str) -> bool:
    try:
        return name in defined(plain(cell.source))
    except (SyntaxError, ValueError):
        return bool(re.search(rf"^(?:async )?(?:def|class) {re.escape(name)}\b", cell.source, re.MULTILINE))


def plain(source: str) -> str:
    """The source without lines that only a notebook understands (`%magic`, `!command`)."""
    return "\n".join("" if re.match(r"[%!]", line.lstrip()) else line for line in source.split("\n"))


@dataclass
class Loaded:
    """The learner's functions, and why others are missing."""

    names: dict[str, object] = field(default_factory=namespace.fresh)  # what the functions see
    functions: dict[str, object] = field(default_factory=dict)
    broken: dict[str, str] = field(default_factory=dict)  # exercise -> why its cell gives no function
    remarks: list[str] = field(default_factory=list)
    text: str = ""  # all that was run


def load(cells: Iterable[LearnerCell], found: Found, wanted: dict[str, str]) -> Loaded:
    """Runs imports, setup cells and the exercise cells that count, in the notebook's order."""
    loaded = Loaded()
    by_number = {cell.number: exercise for exercise, cell in found.cells.items()}
    texts = []
    for cell in cells:
        exercise = by_number.get(cell.number, "")
        if (
            "hidden" in cell.tags
            or (cell.kind != "code" and not exercise)
            or ("exercise" in cell.tags and not exercise)
        ):
            continue
        source, label = plain(cell.source), f"cell {cell.number}"
        try:
            ast.parse(source)
            source = source if exercise or "setup" in cell.tags else imports(source)
            with staying(), contextlib.redirect_stdout(io.StringIO()):
                namespace.run(source, label, loaded.names)
        except (Exception, SystemExit) as error:
            where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
            line = f"cell {cell.number} does not run ({type(error).__name__}: {getattr(error, 'msg', error)}{where})"
            if exercise:
                loaded.broken[exercise] = line
            else:
                loaded.remarks.append(line)
            continue
        texts.append(source)
        if exercise:
            if wanted[exercise] in defined(source):
                loaded.functions[exercise] = loaded.names[wanted[exercise]]
            else:
                loaded.broken[exercise] = f"{label} defines no {wanted[exercise]}"
    loaded.text = "\n\n".join(texts)
    return loaded


def print_checks(path: Path, wanted: dict[str, str], only: str | None = None) -> int:
    """Checks the exercises of a learner's notebook, as text; 1 when one that was attempted fails, else 0."""
    from nanochat_lib.course import registry
    from nanochat_lib.course.checker import check, run_cases
    from nanochat_lib.course.result import NOT_ATTEMPTED

    if only is not None and only not in wanted:
        raise UserError(f"{path.stem} has no exercise {only!r}; it has {', '.join(wanted)}")
    cells = read(path)
    found = find(cells, wanted)
    loaded = load(cells, found, wanted)
    remarks = found.remarks + loaded.remarks
    for line in remarks if only is None else [r for r in remarks if r.startswith((f"{only}:", "cell "))]:
        print(f"note: {line}")
    failed = attempted = 0
    shown = list(wanted) if only is None else [only]
    for exercise in wanted:
        passed = False
        if exercise in loaded.functions and exercise in shown:
            result = check(exercise, loaded.functions[exercise], loaded.text)
            passed = result.passed
            attempted += result.status != NOT_ATTEMPTED
            failed += not passed and result.status != NOT_ATTEMPTED
        elif exercise in loaded.functions:
            passed = run_cases(exercise, loaded.functions[exercise], budgets_too=False).passed
        elif exercise in shown:
            print(f"{exercise}: {loaded.broken.get(exercise, 'not attempted yet')}")
            attempted += exercise in loaded.broken
            failed += exercise in loaded.broken
        if not passed and (right := registry.library_function(exercise)):
            loaded.names[wanted[exercise]] = right  # later exercises build on a right one
    print(f"{attempted - failed} passed, {failed} failed, {len(shown) - attempted} not attempted")
    return 1 if failed else 0
