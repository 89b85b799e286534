"""`nanochat course mutants`: do the cases of every exercise pass the right answer and catch the wrong ones?

A check that lets a plausible mistake through, or refuses a right answer on another seed, in 64 bits or on one thread,
is worse than none. Each chapter's imports, setup cells and answers are run once; the rest of the chapter is not.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path

from nanochat_lib.course import author, namespace, rules
from nanochat_lib.course.exercises import Unit, units
from nanochat_lib.course.grammar import Cell, solution
from nanochat_lib.errors import UserError

SEEDS = (0, 1)
# Where right answers must pass too. One process each, over all chapters.
SETTINGS: dict[str, dict[str, str]] = {
    "64 bits": {"JAX_ENABLE_X64": "1"},
    "one thread": {"XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false", "OMP_NUM_THREADS": "1", "COURSE_ONE_CORE": "1"},
}


@dataclass
class Outcome:
    """One exercise: how many of its wrong answers were caught, and what went wrong."""

    exercise: str
    caught: int = 0
    mutants: int = 0
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0


class Prepared:
    """A chapter's answers as functions, with the hidden cases and mutants of its exercises."""

    def __init__(self, stem: str, cells: list[Cell]) -> None:
        self.stem, self.cells, self.units = stem, cells, units(cells)
        self.names = namespace.fresh()
        self.before: dict[str, dict] = {}  # exercise -> the names that its cell starts with
        code = [
            (
                solution(cell).source,
                f"{stem}.py:{cell.line}",
                "setup" in cell.tags or "hidden" in cell.tags,
                cell.metadata["id"] if "exercise" in cell.tags else "",
            )
            for cell in cells
            if cell.kind == "code"
        ]
        with author.collecting() as self.notes, contextlib.redirect_stdout(io.StringIO()):
            for piece in namespace.pieces(code):
                if piece.exercise:
                    self.before[piece.exercise] = dict(self.names)
                try:
                    namespace.run(piece.source, piece.label, self.names)
                except Exception as error:
                    raise UserError(f"{piece.label} does not run ({type(error).__name__}: {error})") from error

    def cases(self, unit: Unit) -> list:
        from nanochat_lib.course import registry

        return [*registry.exercise(unit.id).cases, *self.notes.get(unit.id, author.Notes()).cases]


def answers(chapters: Iterable[Prepared], seeds: Iterable[int]) -> list[Outcome]:
    """Runs every right answer on all cases; problems are cases that it fails."""
    found = []
    for chapter in chapters:
        for unit in chapter.units:
            began, outcome = time.monotonic(), Outcome(unit.id)
            for seed in seeds:
                passed, text = judged(unit, chapter.names[unit.name], chapter, seed)
                if not passed:
                    outcome.problems.append(f"seed {seed}: the right answer fails\n{text}")
            outcome.seconds = time.monotonic() - began
            found.append(outcome)
    return found


def judged(unit: Unit, fn: object, chapter: Prepared, seed: int) -> tuple[bool, str]:
    """(passed?, the result's text) of `fn` on all cases; a case that is itself at fault does not pass."""
    from nanochat_lib.course.checker import run_cases

    try:
        with contextlib.redirect_stdout(io.StringIO()):
            result = run_cases(unit.id, fn, chapter.cases(unit), seed)
    except Exception as error:
        return False, f"(the cases themselves fail) {type(error).__name__}: {error}"
    return result.passed, result.text


def wrong_answers(chapter: Prepared) -> list[Outcome]:
    """Runs every mutant of a chapter; problems are mutants that pass, or fail with other words than theirs."""
    found = []
    for unit in chapter.units:
        began = time.monotonic()
        notes = chapter.notes.get(unit.id, author.Notes())
        outcome = Outcome(unit.id, mutants=len(notes.mutants))
        if len(notes.cases) < rules.HIDDEN_CASES:
            outcome.problems.append(f"{len(notes.cases)} hidden cases, {rules.HIDDEN_CASES} are the least")
        for mutant in notes.mutants:
            problem = survives(chapter, unit, mutant)
            outcome.caught += not problem
            outcome.problems += [f"mutant {mutant.label}: {problem}"] if problem else []
        outcome.seconds = time.monotonic() - began
        found.append(outcome)
    return found


def survives(chapter: Prepared, unit: Unit, mutant: author.Mutant) -> str:
    """ "" when the cases catch the mutant with its words, else what happened."""
    try:
        source = mutant.source(unit.cell)
        names = dict(chapter.before[unit.id])
        with contextlib.redirect_stdout(io.StringIO()):
            namespace.run(source, f"{chapter.stem}.py:{unit.cell.line} (mutant)", names)
    except UserError as error:
        return str(error).removeprefix(f"{mutant.label}: ")
    except Exception as error:
        return f"its cell does not run ({type(error).__name__}: {error})"
    if unit.name not in names or names[unit.name] is chapter.before[unit.id].get(unit.name):
        return f"its cell defines no {unit.name}"
    passed, text = judged(unit, names[unit.name], chapter, SEEDS[0])
    if passed:
        return "passes all cases"
    if mutant.says not in text:
        return f"is caught, but {mutant.says!r} does not stand in\n{text}"
    return ""


def prepare(root: Path, wanted: str = "") -> list[Prepared]:
    """The chapters below `root` that have exercises; only the one called `wanted` ("01", "tokenizer") if given."""
    from nanochat_lib.course.build import sources

    chapters = {stem: cells for stem, cells in sources(root).items() if units(cells)}
    if wanted:
        chapters = {stem: chapters[stem] for stem in [pick(wanted, list(chapters))]}
    rules.add_checks(root)
    os.environ.setdefault("COURSE_HOME", _nobodys().name)
    return [Prepared(stem, cells) for stem, cells in chapters.items()]


@cache
def _nobodys() -> tempfile.TemporaryDirectory:
    """A folder of course state that is no learner's; it goes when the process ends."""
    return tempfile.TemporaryDirectory(prefix="course-")


def pick(wanted: str, stems: list[str]) -> str:
    """The chapter that "1", "01", "tokenizer" or "01_tokenizer" means."""
    names = {name: stem for stem in stems for name in (stem, stem[:2], stem[:2].lstrip("0") or "0", rules.topic(stem))}
    if wanted not in names:
        raise UserError(f"no chapter is called {wanted!r}; there are {', '.join(stems) or 'none with exercises'}")
    return names[wanted]


def in_settings(root: Path, wanted: str = "") -> dict[str, list[Outcome]]:
    """Setting -> outcomes of the right answers, each in a process of its own."""
    found = {}
    program = "import sys; from nanochat_lib.course.mutants import child; child(*sys.argv[1:])"
    for name, variables in SETTINGS.items():
        environment = os.environ | variables | {"JAX_PLATFORMS": "cpu"}
        command = [sys.executable, "-c", program, str(root), wanted]
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if done.returncode:
            raise UserError(f"right answers with {name}: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        found[name] = [Outcome(**fields) for fields in json.loads(done.stdout.splitlines()[-1])]
    return found


def child(root: str, wanted: str) -> None:
    """Prints the outcomes of the right answers as JSON."""
    if os.environ.get("COURSE_ONE_CORE") and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    print(json.dumps([asdict(outcome) for outcome in answers(prepare(Path(root), wanted), SEEDS[:1])]))


def print_mutants(root: str | Path = ".", wanted: str = "", settings: bool = True) -> int:
    """The whole report on the screen; 0 when every mutant is caught and every right answer passes, else 1."""
    root = Path(root)
    prepared = prepare(root, wanted)
    right = {outcome.exercise: outcome for outcome in answers(prepared, SEEDS)}
    problems: list[str] = [f"{o.exercise}: {line}" for o in right.values() for line in o.problems]
    print(f"{'exercise':<32} {'caught':>8} {'seconds':>8}")
    for chapter in prepared:
        for outcome in wrong_answers(chapter):
            seconds = outcome.seconds + right[outcome.exercise].seconds
            print(f"{outcome.exercise:<32} {outcome.caught:>4} / {outcome.mutants} {seconds:>7.1f}", flush=True)
            problems += [f"{outcome.exercise}: {line}" for line in outcome.problems]
    if settings:
        for name, outcomes in in_settings(root, wanted).items():
            failed = [o for o in outcomes if o.problems]
            print(f"right answers with {name}: {len(outcomes) - len(failed)} of {len(outcomes)} pass")
            problems += [f"{o.exercise}, {name}: {line}" for o in failed for line in o.problems]
    for problem in problems:
        print(f"\n{problem}")
    return 1 if problems else 0
