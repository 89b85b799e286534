"""Which chapters and exercises there are, and which library function each exercise builds.

Read from the exercise cells' headers: of `solutions/` where the course's folder has it, else of the tables that the
build keeps beside the checks (checks/<topic>.json), else of `chapters/`.
"""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nanochat_lib.course.cases import Exercise, Prediction, Quiz
from nanochat_lib.course.parameters import project_root
from nanochat_lib.errors import UserError
from nanochat_lib.presets import nearest

PACKAGE = Path(__file__).parents[1]
TABLES = Path(__file__).parent / "checks"
CHAPTER_FILES = "[0-9][0-9]_*.py"


@dataclass(frozen=True)
class Entry:
    """One exercise, as its cell's header states it."""

    id: str
    points: int = 1
    minutes: int = 0
    level: int = 1
    library: str = ""  # "nanochat_lib.bpe:merge", "" where the library has no such function

    @property
    def topic(self) -> str:
        return self.id.split(".")[0]


@dataclass(frozen=True)
class Chapter:
    number: str  # "01"
    topic: str  # "tokenizer"
    title: str
    exercises: tuple[Entry, ...]


@dataclass(frozen=True)
class Checks:
    """A checks module, by id."""

    exercises: dict[str, Exercise]
    quizzes: dict[str, Quiz]
    predictions: dict[str, Prediction]


def chapters(root: str | Path | None = None) -> tuple[Chapter, ...]:
    """All chapters in order. `root` is the course's folder; without it the one around the package or around here."""
    roots = [Path(root)] if root else [PACKAGE.parent, project_root()]
    for folder in roots:
        if files := sorted((folder / "solutions").glob(CHAPTER_FILES)):
            return _scan(tuple((path, path.stat().st_mtime_ns) for path in files))
    if root is None and (found := _read_tables()):
        return found
    for folder in roots:
        if files := sorted((folder / "chapters").glob(CHAPTER_FILES)):
            return _scan(tuple((path, path.stat().st_mtime_ns) for path in files))
    return ()


_scanned: dict[tuple, tuple[Chapter, ...]] = {}


def _scan(files: tuple[tuple[Path, int], ...]) -> tuple[Chapter, ...]:
    if files not in _scanned:
        _scanned.clear()
        _scanned[files] = tuple(_read_chapter(path) for path, _ in files)
    return _scanned[files]


def _read_chapter(path: Path) -> Chapter:
    """A chapter's title and exercises; tolerant, since a learner's editor may have changed the file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    number, topic = path.stem.split("_", 1)
    title = next((line[4:].strip() for line in lines if line.startswith("# # ")), topic)
    entries = []
    for line in lines:
        if re.match(r"# ?%%", line):
            head = _metadata(line)
            if "exercise" in head.get("tags", []) and isinstance(head.get("id"), str):
                entries.append(Entry(**{key: head[key] for key in Entry.__dataclass_fields__ if key in head}))
    return Chapter(number, topic, title, tuple(entries))


def _metadata(header: str) -> dict:
    """key=JSON pairs of one cell header; what cannot be read is left out."""
    found = {}
    for match in re.finditer(r"\b(\w+)=(?=[\[\"\d{tfn-])", header):
        try:
            found.setdefault(match[1], json.JSONDecoder().raw_decode(header, match.end())[0])
        except ValueError:
            continue
    return found


def _read_tables() -> tuple[Chapter, ...]:
    """The chapters as the build last wrote them beside the checks, <topic>.json each."""
    found = []
    for path in TABLES.glob("*.json"):
        table = json.loads(path.read_text(encoding="utf-8"))
        entries = [
            {key: e[key] or "" if key == "library" else e[key] for key in Entry.__dataclass_fields__ if key in e}
            for e in table["exercises"]
        ]
        found.append(
            Chapter(table["chapter"].split("_")[0], path.stem, table["title"], tuple(Entry(**e) for e in entries))
        )
    return tuple(sorted(found, key=lambda chapter: chapter.number))


def entry(exercise_id: str) -> Entry:
    """The header of one exercise; a bare Entry for one that has checks but no cell yet."""
    for chapter in chapters():
        for found in chapter.exercises:
            if found.id == exercise_id:
                return found
    return Entry(exercise_id, library=exercise(exercise_id).library)


def load_checks(topic: str) -> Checks:
    """The checks module of a topic. UserError when there is none."""
    name = f"nanochat_lib.course.checks.{topic}"
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name:
            raise
        known = sorted(path.stem for path in (Path(__file__).parent / "checks").glob("[!_]*.py"))
        raise UserError(f"there is no topic {topic!r}; {nearest(topic, known)}") from None
    kinds = []
    for attribute in ("EXERCISES", "QUIZZES", "PREDICTIONS"):
        items = getattr(module, attribute, [])
        table = {item.id: item for item in items}
        if len(table) != len(items):
            raise TypeError(f"{name}: two {attribute.lower()} have the same id")
        kinds.append(table)
    return Checks(*kinds)


def _find(kind: str, name: str) -> object:
    table = getattr(load_checks(name.split(".")[0]), kind)
    if name not in table:
        raise UserError(f"there is no {name!r} among the {kind}; {nearest(name, list(table))}")
    return table[name]


def exercise(exercise_id: str) -> Exercise:
    return _find("exercises", exercise_id)


def quiz_data(quiz_id: str) -> Quiz:
    return _find("quizzes", quiz_id)


def prediction(prediction_id: str) -> Prediction:
    return _find("predictions", prediction_id)


originals: dict[str, object] = {}  # symbol -> the library's own, while a learner's function stands in its place


def library_function(exercise_id: str) -> Callable | None:
    """The library's function for an exercise, else the check's fallback, else None."""
    symbol = entry(exercise_id).library or exercise(exercise_id).library
    if not symbol:
        return exercise(exercise_id).fallback
    return originals[symbol] if symbol in originals else resolve(symbol)


def resolve(symbol: str) -> object:
    """'nanochat_lib.bpe:merge' -> that object. UserError when it does not exist."""
    module, _, path = symbol.partition(":")
    try:
        value = importlib.import_module(module)
        for part in path.split("."):
            value = getattr(value, part)
    except (ImportError, AttributeError) as error:
        raise UserError(f"library {symbol!r} does not exist ({error})") from None
    return value
