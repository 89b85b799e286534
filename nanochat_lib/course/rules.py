"""What a chapter must keep to be a course and stay one: every rule that the build refuses to break.

The source is read, not run; only the chapter's checks module is imported. Problems come as lines, all at once.
"""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from types import ModuleType

from nanochat_lib.course.exercises import Unit, calls, checked, defined, units
from nanochat_lib.course.grammar import Cell, solution, stub
from nanochat_lib.course.names import imports, needed, provided
from nanochat_lib.course.symbols import difference
from nanochat_lib.errors import UserError

CHECKS = Path("nanochat_lib") / "course" / "checks"
HIDDEN_CASES = 2
MUTANTS = (3, 8)


def topic(stem: str) -> str:
    """ "01_tokenizer" -> "tokenizer"."""
    return stem.split("_", 1)[1]


def problems(stem: str, cells: list[Cell], root: Path) -> list[str]:
    """Lines saying what is wrong with the chapter `stem`; [] when nothing is."""
    found = units(cells)
    path = root / CHECKS / f"{topic(stem)}.py"
    if not found and not path.exists():
        return []  # a chapter without exercises needs no checks
    if not path.exists():
        return [f"{stem}.py has exercises, but {CHECKS / path.name} with their checks is missing"]
    checks = load(path)
    lines = [line for unit in found for line in of_unit(unit, stem)]
    lines += unknown_names(cells, stem)
    lines += against_checks(found, checks, stem, path.name)
    lines += asked(cells, checks, stem, path.name)
    return lines


def load(path: Path) -> ModuleType:
    """The checks module in `path`, wherever the course's folder is."""
    spec = importlib.util.spec_from_file_location(f"_checks_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:  # compiled from the text: two writes within a second must not meet an old cache
        exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
    except Exception as error:
        raise UserError(f"{path.name} cannot be imported ({type(error).__name__}: {error})") from error
    return module


def add_checks(root: str | Path) -> None:
    """Lets `load_checks` find the checks of a course's folder that this package does not lie in."""
    from nanochat_lib.course import checks

    folder = str((Path(root) / CHECKS).resolve())
    if folder not in checks.__path__:
        checks.__path__.append(folder)


def of_unit(unit: Unit, stem: str) -> list[str]:
    """One exercise: its cells, its hidden cases and mutants, its answer against the library's."""
    where = f"{stem}.py:{unit.cell.line}: {unit.id}"
    lines = []
    if not unit.id.startswith(f"{topic(stem)}."):
        lines.append(f"{where} must start with the chapter's topic, {topic(stem)}.")
    for version in (stub, solution):
        if unit.name not in defined(version(unit.cell).source):
            lines.append(f"{where}: its {version.__name__} defines no {unit.name}")
    if unit.check is None:
        lines.append(f'{where} has no check cell directly after it; add one with check("{unit.id}", {unit.name})')
    if unit.hidden is None:
        lines.append(f"{where} has no cell tagged hidden directly after its check cell")
        return lines
    given = [call for id, call in calls(unit.hidden.source, "hidden") if id == unit.id]
    count = sum(len(call.args) - 1 for call in given)
    starred = any(isinstance(a, ast.Starred) for call in given for a in call.args)  # counted when they are run
    if count < HIDDEN_CASES and not starred:
        lines.append(f"{where} has {count} hidden cases, {HIDDEN_CASES} are the least")
    mutants = sum(id == unit.id for id, _ in calls(unit.hidden.source, "mutant"))
    if not MUTANTS[0] <= mutants <= MUTANTS[1]:
        lines.append(f"{where} has {mutants} mutants, it needs {MUTANTS[0]} to {MUTANTS[1]}")
    strangers = {id for name in ("hidden", "mutant") for id, _ in calls(unit.hidden.source, name)} - {unit.id}
    if strangers:
        lines.append(f"{where}: its hidden cell speaks of {', '.join(sorted(strangers))}")
    if unit.library and (line := difference(solution(unit.cell).source, unit.library)):
        lines.append(f"{where}: {line}; change one of the two so that they agree")
    return lines


def unknown_names(cells: list[Cell], stem: str) -> list[str]:
    """Names in setup and exercise cells that neither imports, setup cells nor earlier exercises define."""
    code = [cell for cell in cells if cell.kind == "code" and "hidden" not in cell.tags]
    imported = {name for cell in code for name in provided(imports(solution(cell).source))}
    setup = {name for cell in code if "setup" in cell.tags for name in provided(cell.source)}
    known, lines = imported | setup, []
    for cell in code:
        if "setup" in cell.tags:
            lost = needed(cell.source) - known
        elif "exercise" in cell.tags:
            lost = (needed(stub(cell).source) | needed(solution(cell).source)) - known
            known = known | provided(solution(cell).source)
        else:
            continue
        if lost:
            lines.append(
                f"{stem}.py:{cell.line}: uses {', '.join(sorted(lost))}, which no import, setup cell or earlier "
                "exercise defines"
            )
    return lines


def against_checks(found: list[Unit], checks: ModuleType, stem: str, file: str) -> list[str]:
    """The chapter's exercises against the checks module's."""
    known = {exercise.id: exercise for exercise in getattr(checks, "EXERCISES", [])}
    lines = [f"{file} has checks for {id}, which {stem}.py has no exercise for" for id in known]
    here = {unit.id for unit in found}
    lines = [line for id, line in zip(known, lines, strict=True) if id not in here]
    for unit in found:
        if unit.id not in known:
            lines.append(f"{file} has no Exercise({unit.id!r}, …)")
            continue
        exercise = known[unit.id]
        if not exercise.cases:
            lines.append(f"{file}: {unit.id} has no public case")
        if unit.library and exercise.fallback is not None:
            lines.append(f"{file}: {unit.id} has a library symbol, so it needs no fallback")
    ids = [exercise.id for exercise in getattr(checks, "EXERCISES", [])]
    return lines + [f"{file}: {id} stands there twice" for id in sorted({id for id in ids if ids.count(id) > 1})]


def asked(cells: list[Cell], checks: ModuleType, stem: str, file: str) -> list[str]:
    """Quizzes, predictions and exercises that the chapter's cells call by id, against the ones that are defined."""
    code = [cell for cell in cells if cell.kind == "code" and "hidden" not in cell.tags]

    def used(name: str) -> set[str]:
        return {id for cell in code for id, _ in calls(solution(cell).source, name)}

    lines = []
    for kind, listed, callers in (
        ("quiz", "QUIZZES", ("quiz",)),
        ("prediction", "PREDICTIONS", ("predict", "reveal")),
        ("exercise", "EXERCISES", ("check",)),
    ):
        defined = {entry.id for entry in getattr(checks, listed, [])}
        for caller in callers:
            lines += [
                f"{stem}.py: {caller}({id!r}), but {file} has no such {kind}" for id in sorted(used(caller) - defined)
            ]
            lines += [f"{file}: {kind} {id} is never given to {caller}()" for id in sorted(defined - used(caller))]
    own = {id for id in used("mine") | used("hint") | used("undo") if id.startswith(f"{topic(stem)}.")}
    exercises = {id for cell in code for id in checked(cell)}
    return lines + [f"{stem}.py: no exercise is called {id}" for id in sorted(own - exercises)]
