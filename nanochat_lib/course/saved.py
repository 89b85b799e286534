"""`mine(id)` and `undo(id)`: functions that passed live on in my_nanochat/<topic>.py, as text to read and change."""

from __future__ import annotations

import importlib
import importlib.util
import os
import re
import sys
import types
from collections.abc import Callable
from pathlib import Path

from nanochat_lib.course import checker, learner_file, registry, state
from nanochat_lib.course.learner_file import PACKAGE
from nanochat_lib.course.result import NOT_ATTEMPTED, Result
from nanochat_lib.course.sources import Block, Unsaveable, block_of
from nanochat_lib.errors import UserError
from nanochat_lib.storage import atomic_write_text


def module_file(topic: str) -> Path:
    return state.home() / PACKAGE / f"{topic}.py"


def keep(exercise_id: str, fn: Callable, result: Result, source: str | None = None) -> str:
    """Records a check's outcome, saves a passing function; returns a line about it."""
    record = state.exercise_record(exercise_id)
    kept = f'your version that passed is kept: undo("{exercise_id}") shows it' if record.get("passed") else ""
    if result.status == NOT_ATTEMPTED:
        return kept
    if result.passed and fn is registry.library_function(exercise_id):
        return "This is the library's own function, so nothing is saved as yours."
    topic = exercise_id.split(".")[0]
    try:
        block = block_of(fn, source, frozenset(_names_in_file(topic, exercise_id)), f"{PACKAGE}.{topic}")
    except Unsaveable as problem:
        state.set_status(exercise_id, **_outcome(result, record))
        return f"It was not saved for later chapters: {problem}." if result.passed else kept
    number = state.add_attempt(exercise_id, "passed" if result.passed else "failed", block.module())
    if not result.passed:
        return kept or f'Stuck? hint("{exercise_id}")'
    line = _save(exercise_id, block, number)
    text = module_file(topic).read_text(encoding="utf-8")
    _judged[exercise_id, learner_file.behind(text, exercise_id)] = ""  # it has just passed: mine() need not ask again
    return line


def _outcome(result: Result, record: dict) -> dict:
    passed = result.passed
    return {
        "attempts": record.get("attempts", 0) + 1,
        "status": "passed" if passed else "failed",
        "passed": passed or record.get("passed", False),
    }


def _save(exercise_id: str, block: Block, number: int) -> str:
    """Puts a block into the topic's file, and sees that the file still loads."""
    topic = exercise_id.split(".")[0]
    path = module_file(topic)
    order = [entry.id for chapter in registry.chapters() for entry in chapter.exercises]
    with state.locked():
        imports, blocks, line = _read(path, topic)
        blocks[exercise_id] = block.body
        text = learner_file.compose(topic, [*imports, *block.imports], blocks, order)
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            atomic_write_text(path, text)
    state.set_status(exercise_id, saved=number, name=block.name)
    try:
        _load(topic)
    except Exception as error:  # whatever the learner's file does when it is loaded
        return f"{line}Saved in {PACKAGE}/{topic}.py, which does not load by itself ({type(error).__name__}: {error})."
    return f"{line}Saved in {PACKAGE}/{topic}.py."


def _read(path: Path, topic: str) -> tuple[list[str], dict[str, str], str]:
    """(imports, id -> text, "") of a topic's file. A broken one is set aside, which the third says."""
    try:
        return *learner_file.parse(path.read_text(encoding="utf-8")), ""
    except FileNotFoundError:
        return [], {}, ""
    except (SyntaxError, ValueError):
        number = 1
        while (aside := path.with_name(f"{path.stem}.broken-{number}.py")).exists():
            number += 1
        os.replace(path, aside)
        return *_from_attempts(topic), f"{PACKAGE}/{path.name} was not valid Python; it is kept as {aside.name}. "


def _from_attempts(topic: str) -> tuple[list[str], dict[str, str]]:
    """Imports and blocks of a topic from the passing attempts that are kept."""
    imports, blocks = [], {}
    for exercise_id, record in state.read()["exercises"].items():
        if exercise_id.split(".")[0] == topic and "saved" in record:
            some, body = _attempt(exercise_id, record["saved"])
            imports += some
            if body:
                blocks[exercise_id] = body
    return imports, blocks


def _attempt(exercise_id: str, number: int) -> tuple[list[str], str]:
    """(imports, text) of one kept attempt; ([], "") when it is gone."""
    for n, _, path in state.attempts(exercise_id):
        if n == number:
            lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
            count = 0
            while count < len(lines) and lines[count].startswith(("import ", "from ")):
                count += 1
            return lines[:count], "\n".join(lines[count:]).strip("\n")
    return [], ""


def _names_in_file(topic: str, without: str) -> set[str]:
    """Names of this topic's saved exercises, apart from one."""
    records = state.read()["exercises"]
    found = set()
    for exercise_id, record in records.items():
        if exercise_id.split(".")[0] == topic and exercise_id != without and "saved" in record:
            found.add(record.get("name") or name_of(exercise_id))
    return found


def name_of(exercise_id: str) -> str:
    """The function's name: the last part of the library's symbol, else of the id."""
    symbol = registry.entry(exercise_id).library
    return re.split(r"[:.]", symbol or exercise_id)[-1]


_modules: dict[tuple[str, int, int], types.ModuleType] = {}


def _load(topic: str) -> types.ModuleType:
    """The topic's file as the module my_nanochat.<topic>; read again when it changed."""
    path = module_file(topic)
    info = path.stat()
    key = (str(path), info.st_mtime_ns, info.st_size)
    if key not in _modules:
        package = types.ModuleType(PACKAGE)
        package.__path__ = [str(path.parent)]
        sys.modules[PACKAGE] = package
        name = f"{PACKAGE}.{topic}"
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        before = sys.modules.get(name)
        sys.modules[name] = module
        try:  # compiled from the text: two writes within a second must not meet an old cache
            exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)
        except BaseException:
            sys.modules.pop(name)
            if before is not None:
                sys.modules[name] = before
            raise
        _modules[key] = module
    return _modules[key]


_judged: dict[tuple[str, str], str] = {}  # (id, all text that matters to it) -> "" when it passes, else why not


def own(exercise_id: str) -> tuple[Callable | None, str]:
    """(the learner's function, "") when it is saved and passes the public cases now, else (None, why not)."""
    record = state.exercise_record(exercise_id)
    if "saved" not in record:
        saved = "yours has passed, but it could not be saved"
        return None, saved if record.get("passed") else "yours has not passed yet"
    topic = exercise_id.split(".")[0]
    try:
        text = module_file(topic).read_text(encoding="utf-8")
    except OSError:
        return None, f'{PACKAGE}/{topic}.py is gone; undo("{exercise_id}") writes it again'
    try:
        fn = getattr(_load(topic), record.get("name") or name_of(exercise_id))
    except Exception as error:  # the learner's file may do anything
        return None, f"{PACKAGE}/{topic}.py does not load: {type(error).__name__}: {error}"
    key = (exercise_id, learner_file.behind(text, exercise_id))
    if key not in _judged:
        _judged[key] = _judge(exercise_id, fn)
    return (None if _judged[key] else fn), _judged[key]


def _judge(exercise_id: str, fn: Callable) -> str:
    result = checker.run_cases(exercise_id, fn, budgets_too=False)
    if result.passed:
        return ""
    wrong = next(row for row in result.rows if row.status != "passed")
    return f"yours no longer passes, first at {wrong.case!r}"


def mine(exercise_id: str) -> Callable:
    """Your function when it passes, else the library's; a line says which."""
    fn, why = own(exercise_id)
    if fn is not None:
        print(f"{exercise_id}: yours")
        return fn
    right = registry.library_function(exercise_id)
    if right is None:
        raise UserError(f"{exercise_id}: {why}, and the library has no such function; solve the exercise first")
    print(f"{exercise_id}: the library's ({why})")
    return right


def undo(exercise_id: str) -> None:
    """Brings back the last version that passed: prints it, saves it again, and in JupyterLab puts it into a new cell.

    When the newest version passes already, the one before it comes back.
    """
    registry.exercise(exercise_id)
    record = state.exercise_record(exercise_id)
    passed = [(number, path) for number, status, path in state.attempts(exercise_id) if status == "passed"]
    if not passed:
        raise UserError(f"{exercise_id}: no version of yours has passed yet, so there is nothing to go back to")
    topic = exercise_id.split(".")[0]
    saved = record.get("saved", passed[-1][0])
    number = next((n for n, _ in reversed(passed) if n <= saved), passed[0][0])
    if record.get("status") == "passed" and _in_file(exercise_id, saved):
        earlier = [n for n, _ in passed if n < saved]
        if not earlier:
            print(f"{exercise_id}: there is no earlier version that passed; the saved one stays")
            return
        number = earlier[-1]
    imports, body = _attempt(exercise_id, number)
    _save(exercise_id, Block(record.get("name") or name_of(exercise_id), imports, body), number)
    state.set_status(exercise_id, status="passed", passed=True)
    print(f"{exercise_id}: back to attempt {number}, saved in {PACKAGE}/{topic}.py\n\n{body}")
    _new_cell(body)


def _in_file(exercise_id: str, number: int) -> bool:
    """Whether the topic's file holds that attempt, unchanged."""
    path = module_file(exercise_id.split(".")[0])
    try:
        text = path.read_text(encoding="utf-8")
    except OSError:
        return False
    return learner_file.blocks(text).get(exercise_id) == _attempt(exercise_id, number)[1]


def _new_cell(text: str) -> None:
    from nanochat_lib.course.mode import widgets_wanted

    if widgets_wanted():
        sys.modules["IPython"].get_ipython().set_next_input(text)
