"""A chapter as grading knows it: its own code, its exercises with all their cases, and their right results.

Arguments and right results are made here, in the grader, from a seed; they are kept for all learners with that seed.
"""

from __future__ import annotations

import ast
import hashlib
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import nanochat_lib
from nanochat_lib.course import checker, namespace, registry, rules
from nanochat_lib.course.cases import Case, Exercise
from nanochat_lib.course.exercises import Unit
from nanochat_lib.course.grading import drivers, wire
from nanochat_lib.course.mutants import Prepared, pick
from nanochat_lib.course.names import provided
from nanochat_lib.course.result import Row
from nanochat_lib.errors import UserError

ENGINE = 2  # raised when grading itself changes what a submission is worth
GROUPS = ("public", "hidden", "budget")
ROOM = 1 << 20  # bytes that a result may take beyond sixteen times the right one


@dataclass(frozen=True)
class Question:
    """One exercise with its cases, public ones first."""

    unit: Unit
    exercise: Exercise
    cases: tuple[Case, ...]
    hidden: frozenset[str]  # names of cases that learners never see

    @property
    def id(self) -> str:
        return self.unit.id

    @property
    def points(self) -> int:
        return self.unit.cell.metadata["points"]

    def group(self, case: Case) -> str:
        return "budget" if case.kind == "budget" else "hidden" if case.name in self.hidden else "public"


@dataclass(frozen=True)
class Put:
    """One case made for a seed."""

    args: tuple
    want: object
    frame: bytes  # the arguments as the child gets them
    most: int  # bytes that the reply may have
    known: dict = field(default_factory=dict)  # judge.Known: what suspected causes give for these arguments


@dataclass
class Key:
    """A chapter's key. `steps`: the chapter's own code pieces and its exercises, in the chapter's order."""

    stem: str
    title: str
    questions: dict[str, Question]
    steps: list[tuple[str, str, str]]  # (source, label, "") or ("", "", exercise)
    known: frozenset[str]  # names that the chapter's own code gives
    bundle: str  # hash of all that decides on marks
    right: Prepared
    made: dict[tuple, Put] = field(default_factory=dict)
    passed: set[bytes] = field(default_factory=set)  # fingerprints of replies that were judged right
    failed: dict[tuple, Row] = field(default_factory=dict)  # wrong replies: (fingerprint, names of parameters) -> row

    @property
    def number(self) -> str:
        return self.stem[:2]

    @property
    def wanted(self) -> dict[str, str]:
        """Exercise -> its function's name."""
        return {id: question.unit.name for id, question in self.questions.items()}

    def put(self, question: Question, case: Case, seed: int) -> Put:
        """A case's arguments and right result. The same for the same seed."""
        name = question.id, case.name, seed
        if name not in self.made:
            args = checker.arguments(question.id, case, seed)
            want = None if case.kind == "budget" else checker.wanted(question.exercise, case, args)
            frame = wire.encode(args)
            size = max(len(frame), len(wire.encode(want)))
            self.made[name] = Put(args, want, frame, ROOM + 16 * size)
        return self.made[name]

    def forget(self, seed: int) -> None:
        """Lets go of what was made for one learner alone, so that a class of any size takes the same memory."""
        if seed:
            for name in [name for name in self.made if name[2] == seed]:
                del self.made[name]

    def call(self, question: Question, case: Case) -> object:
        """How the child calls the function, as plain data."""
        return drivers.pack(case.call or question.exercise.call, f"{question.id}, case {case.name!r}")

    def against(self, question: Question, case: Case) -> object:
        return drivers.pack(checker.compared_with(question.exercise, case), f"{question.id}, case {case.name!r}")

    def stand_in(self, exercise: str) -> str:
        """What takes the place of a failed exercise for later ones: "library:symbol", its id (the check's fallback)."""
        symbol = self.questions[exercise].unit.library
        if symbol:
            return f"library:{symbol}"
        return exercise if self.questions[exercise].exercise.fallback else ""


def keys(root: Path, wanted: str = "") -> list[Key]:
    """The keys of all chapters with exercises below `root`, or of one ("03", "attention")."""
    from nanochat_lib.course.build import sources
    from nanochat_lib.course.exercises import units

    if not any((root / "solutions").glob("*.py")):
        raise UserError(
            f"{root} holds no solutions/, and without them nobody can grade; run this in the course's folder"
        )
    chapters = {stem: cells for stem, cells in sources(root).items() if units(cells)}
    if wanted:
        chapters = {stem: chapters[stem] for stem in [pick(wanted, list(chapters))]}
    rules.add_checks(root)
    return [_key(root, stem, Prepared(stem, cells)) for stem, cells in chapters.items()]


def _key(root: Path, stem: str, right: Prepared) -> Key:
    questions = {}
    for unit in right.units:
        exercise = registry.exercise(unit.id)
        public = {case.name for case in exercise.cases}
        hidden = right.cases(unit)[len(exercise.cases) :]
        hidden = [replace(c, name=f"{c.name} (hidden)") if c.name in public else c for c in hidden]
        names = frozenset(case.name for case in hidden)
        if len(names) < len(hidden):
            raise UserError(f"{unit.id}: two of its hidden cases have the same name; rename one")
        questions[unit.id] = Question(unit, exercise, (*exercise.cases, *hidden), names)
    steps = list(_steps(stem, right.cells))
    known = frozenset(name for source, _, _ in steps if source for name in provided(source))
    title = next((c.source.lstrip("# ").split("\n")[0] for c in right.cells if c.kind == "markdown"), stem)
    return Key(stem, title, questions, steps, known, bundle_hash(root, stem), right)


def _steps(stem: str, cells: list) -> Iterator[tuple[str, str, str]]:
    """What a learner's exercises stand on: imports and setup cells of the chapter, never a hidden cell."""
    from nanochat_lib.course.grammar import stub

    code = [
        (stub(cell).source, f"{stem}.py:{cell.line}", "setup" in cell.tags, cell.metadata["id"] if exercise else "")
        for cell in cells
        if cell.kind == "code" and "hidden" not in cell.tags
        for exercise in ["exercise" in cell.tags]
    ]
    for piece in namespace.pieces(code):
        yield ("", "", piece.exercise) if piece.exercise else (piece.source, piece.label, "")


def modules(keys: list[Key]) -> list[str]:
    """What the fork server imports once for all children: all that the chapters and their checks import.

    The checks themselves are left to the children: some make arrays when they are imported.
    """
    found = {"numpy", "jax", "jax.numpy", "nanochat_lib.course.grading.child", "nanochat_lib.course.registry"}
    for key in keys:
        path = sys.modules[f"nanochat_lib.course.checks.{rules.topic(key.stem)}"].__file__
        for text in [Path(path).read_text(encoding="utf-8"), *(source for source, _, _ in key.steps)]:
            found |= imported(text)
    return sorted(name for name in found if not name.startswith("nanochat_lib.course.checks"))


def imported(text: str) -> set[str]:
    """Modules that a text imports at its top level."""
    found = set()
    for node in ast.parse(text).body:
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            found |= {name for name in names if name in sys.modules}
    return {name for name in found if name in sys.modules}


def bundle_hash(root: Path, stem: str) -> str:
    """Of everything that can change a mark: the chapter's source, the package, and this engine's number."""
    found = hashlib.sha256(f"engine {ENGINE}".encode())
    package = Path(nanochat_lib.__file__).parent
    skipped = {"grading", "serve"}  # pages, exports and commands change no mark; ENGINE says when grading does
    files = [path for path in package.rglob("*.py") if not skipped & set(path.relative_to(package).parts)]
    checks = root / rules.CHECKS / f"{rules.topic(stem)}.py"
    for path in [root / "solutions" / f"{stem}.py", checks, *sorted(files)]:
        found.update(f"\n{path.name}\n".encode() + path.read_bytes())
    return found.hexdigest()[:16]


def seed_of(salt: str, learner: str) -> int:
    """0 without a salt; with one, a learner's own seed, the same each time."""
    if not salt:
        return 0
    return int.from_bytes(hashlib.sha256(f"{salt}\n{learner}".encode()).digest()[:6], "big")
