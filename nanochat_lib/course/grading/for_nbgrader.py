"""`nanochat grade export-nbgrader DIR`: the chapters as a source tree that nbgrader generates, grades and exports.

Each check cell becomes nbgrader's locked test: the check that learners see, and below it, between nbgrader's marks for
hidden tests, all cases with the points that they earn as the cell's value (nbgrader's partial credit). A question of
the rubric becomes a cell that is graded by hand, with the rubric's points. No .py file goes along: nbgrader would hand
it out as it is. In nbgrader learners' code runs beside the hidden cases and unconfined; for people whom you trust.
"""

from __future__ import annotations

import ast
import contextlib
import io
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from nanochat_lib.course.build import notebook, sources
from nanochat_lib.course.cases import Case
from nanochat_lib.course.exercises import Unit, for_nbgrader, units
from nanochat_lib.course.grading import policy, rubric
from nanochat_lib.course.grammar import Cell, split_regions
from nanochat_lib.errors import UserError

CONFIG = """\
# nbgrader's settings for this tree; the course's package must be installed where nbgrader runs.
c = get_config()  # noqa: F821
c.CourseDirectory.course_id = "nanochat"
c.CourseDirectory.ignore = [".ipynb_checkpoints", "*.pyc", "__pycache__", "*.py"]
c.ExecutePreprocessor.timeout = 300
c.OverwriteCells.add_missing_cells = True
"""


def export(root: Path, target: Path, chapter: str = "") -> list[Path]:
    """Writes TARGET/source/<chapter>/<chapter>.ipynb and nbgrader_config.py; returns the files."""
    from nanochat_lib.course.mutants import pick

    chapters = {stem: cells for stem, cells in sources(root).items() if units(cells)}
    if chapter:
        chapters = {stem: chapters[stem] for stem in [pick(chapter, list(chapters))]}
    if target.exists() and any(target.iterdir()) and not (target / "nbgrader_config.py").exists():
        raise UserError(f"{target} holds other files; name a new folder, or one of nbgrader's")
    asked = _questions(root, list(sources(root)))
    for question in asked:
        cells = chapters.get(question.chapter, [])
        if question.chapter in chapters and question.id not in [cell.metadata.get("id") for cell in cells]:
            raise UserError(f"{question.chapter} has no cell {question.id}, which the rubric asks for; add it there")
    found = []
    for stem, cells in chapters.items():
        cells = _by_hand(cells, [question for question in asked if question.chapter == stem])
        path = target / "source" / stem / f"{stem}.ipynb"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(_without_library(notebook(_cells(cells), stem)), encoding="utf-8")
        found.append(path)
    (target / "nbgrader_config.py").write_text(CONFIG, encoding="utf-8")
    return [*found, target / "nbgrader_config.py"]


def _questions(root: Path, chapters: list[str]) -> list[rubric.Question]:
    """The rubric's: of the one that grading.yaml names, else of the course's own; none where there is none."""
    named = policy.load(root / "grading.yaml").rubric
    path = root / (named or "solutions/rubric.yaml")
    return rubric.load(path, chapters) if named or path.exists() else []


def _by_hand(cells: list[Cell], asked: list[rubric.Question]) -> list[Cell]:
    """The cells with nbgrader's marks on those that hold answers in words: a person gives their points."""
    most = {question.id: question.most for question in asked}
    found = []
    for cell in cells:
        if (id := cell.metadata.get("id")) in most:
            entry = {"cell_type": cell.kind, "grade": True, "grade_id": id.replace(".", "-"), "locked": False}
            entry |= {"points": most[id], "schema_version": 3, "solution": True, "task": False}
            cell = replace(cell, metadata=cell.metadata | {"nbgrader": entry})
        found.append(cell)
    return found


def _without_library(text: str) -> str:
    """Metadata that only our own build reads are left out; ids, tags and nbgrader's stay."""
    document = json.loads(text)
    for cell in document["cells"]:
        cell["metadata"] = {key: value for key, value in cell["metadata"].items() if key in ("id", "tags", "nbgrader")}
    return json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def _cells(cells: list[Cell]) -> list[Cell]:
    """The chapter without hidden cells, with nbgrader's marks in exercises and checks."""
    marked = for_nbgrader(cells)
    by_id = {unit.cell.metadata["id"]: unit for unit in units(marked)}
    imports = "\n".join(_imports(cell.source) for cell in marked if "hidden" in cell.tags)
    checks = {id(unit.check): unit for unit in by_id.values() if unit.check}
    found = []
    for cell in marked:
        if "hidden" in cell.tags:
            continue
        if "exercise" in cell.tags:
            cell = replace(cell, source=_solution_marks(cell))
        elif id(cell) in checks:
            cell = replace(cell, source=_with_tests(cell, checks[id(cell)], imports))
        found.append(cell)
    return found


def _solution_marks(cell: Cell) -> str:
    """The exercise with its answer between nbgrader's marks; nbgrader puts its own stub there."""
    lines = cell.source.split("\n")
    for a, b, c in reversed(split_regions(cell)):
        indent = lines[a][: len(lines[a]) - len(lines[a].lstrip())]
        answer = lines[b + 1 : c]
        lines[a : c + 1] = [f"{indent}### BEGIN SOLUTION", *answer, f"{indent}### END SOLUTION"]
    return "\n".join(lines)


def _imports(source: str) -> str:
    kept = [node for node in ast.parse(source).body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return "\n".join(ast.unparse(node) for node in kept)


def _with_tests(cell: Cell, unit: Unit, imports: str) -> str:
    """The check cell with the hidden cases behind it, and the points as its value."""
    kept, cases = [], ""
    for node in ast.parse(unit.hidden.source if unit.hidden else "").body:
        call = node.value if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call) else None
        name = call.func.id if call and isinstance(call.func, ast.Name) else ""
        if name == "hidden":
            cases += "".join(f",\n    {ast.unparse(arg)}" for arg in call.args[1:])
        elif name != "mutant" and not isinstance(node, (ast.Import, ast.ImportFrom)):
            kept.append(ast.unparse(node))
    points = unit.cell.metadata["points"]
    tests = [
        "### BEGIN HIDDEN TESTS", imports, "from nanochat_lib.course.grading.for_nbgrader import points_of", *kept,
        f'points_of("{unit.id}", {unit.name}, {points}{cases})', "### END HIDDEN TESTS",
    ]  # fmt: skip
    return "\n".join([cell.source, *filter(None, tests)])


def points_of(exercise_id: str, fn: Callable, most: float, *hidden: Case) -> float:
    """The points that a function earns by the default weights: the value of nbgrader's test cells."""
    from nanochat_lib.course import registry
    from nanochat_lib.course.checker import run_cases
    from nanochat_lib.course.grading.policy import Policy
    from nanochat_lib.course.result import PASSED

    public = list(registry.exercise(exercise_id).cases)
    names = {case.name for case in public}
    kept = [replace(case, name=f"{case.name} (hidden)") if case.name in names else case for case in hidden]
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        result = run_cases(exercise_id, fn, [*public, *kept])  # a word on stderr would cost all points
    groups: dict[str, list[int]] = {}
    secret = {case.name for case in kept}
    for row in result.rows:
        group = "budget" if row.kind == "budget" else "hidden" if row.case in secret else "public"
        counts = groups.setdefault(group, [0, 0])
        counts[0] += row.status == PASSED
        counts[1] += 1
    return float(Policy().points(most, {name: (a, b) for name, (a, b) in groups.items()}))
