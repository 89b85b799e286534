"""Every chapter as a reader meets it: run from top to bottom in a fresh kernel, offline, solved and unsolved.

Two kernels run at a time; a chapter's notebook is executed once for all that is asked of it.
"""

from __future__ import annotations

import ast
import os
import re
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

from nanochat_lib.course.build import sources
from nanochat_lib.course.execute import blemishes, execute, lasting
from nanochat_lib.course.exercises import calls, units
from nanochat_lib.course.mutants import answers as right_answers
from nanochat_lib.course.mutants import in_settings, prepare, wrong_answers
from nanochat_lib.course.names import imports

ROOT = Path(__file__).parents[2]
CHAPTERS = {stem: cells for stem, cells in sources(ROOT).items() if units(cells)}  # the capstone has its own tests
KILL_SECONDS = 300  # a cell; not a measure, only the end of patience
PEAK_GB = 2.5
TWICE = ("01_tokenizer",)  # run a second time by default; the others with -m slow
SETTINGS = ("right answers", "in other settings", 1)
each = pytest.mark.parametrize("stem", CHAPTERS)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """The kernels keep what they compile, as they do for a reader; here for each other."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("NANOCHAT_BASE_DIR", str(tmp_path_factory.mktemp("kept")))
        patch.setenv("NANOCHAT_COMPILE_CACHE", "1")
        patch.delenv("XLA_FLAGS")  # times are compared there
        yield


@pytest.fixture(scope="module")
def runs(request, kept):
    """runs(stem, folder, number) -> the executed notebook. All that is selected starts at once, two at a time."""
    futures: dict[tuple[str, str, int], Future] = {}
    with ThreadPoolExecutor(min(2, os.cpu_count() or 1)) as pool:

        def start(stem: str, folder: str, number: int = 1) -> Future:
            key = stem, folder, number
            if key not in futures:
                path = ROOT / folder / f"{stem}.ipynb"
                futures[key] = pool.submit(execute, path, strict=folder == "solutions", limit=KILL_SECONDS)
            return futures[key]

        for item in request.session.items:
            stem = getattr(item, "callspec", None) and item.callspec.params.get("stem")
            if stem and item.path == Path(__file__):
                for folder in ("solutions", "chapters"):
                    if folder in item.originalname:
                        start(stem, folder)
            if "64_bits" in item.name:
                futures[SETTINGS] = pool.submit(in_settings, ROOT)
        yield lambda *key: (futures.get(key) or start(*key)).result()


def report(done, what: str) -> None:
    print(f"{what}: {done.seconds:.1f} s, at most {done.peak_gb:.2f} GB")


@each
def test_solutions_run_green_with_nothing_in_them_that_should_not_be_there(stem, runs, capsys):
    done = runs(stem, "solutions")
    with capsys.disabled():
        report(done, f"\n{stem}, solved")
    assert [f"{cell.id}: {line}" for cell, line in done.errors] == []
    assert blemishes(done.notebook) == []
    assert 0 < done.peak_gb <= PEAK_GB
    figures = sum("image/png" in o.get("data", {}) for c in done.notebook.cells for o in c.get("outputs", []))
    assert figures >= 2


@each
def test_chapters_run_to_the_end_without_a_single_answer(stem, runs, capsys):
    done = runs(stem, "chapters")
    with capsys.disabled():
        report(done, f"\n{stem}, unsolved")
    wrong = [
        f"{cell.id}: {line}"
        for cell, line in done.errors
        if not ("exercise" in cell.metadata.get("tags", []) and line.startswith("NotImplementedError"))
    ]
    assert wrong == [] and blemishes(done.notebook) == []
    assert 0 < done.peak_gb <= PEAK_GB
    ran = [cell for cell in done.notebook.cells if cell.cell_type == "code"]
    assert all(cell.execution_count for cell in ran)
    waiting = "".join(text for _, text in lasting(done.notebook))
    assert all(f"{unit.id}: not attempted yet" in waiting for unit in units(CHAPTERS[stem]))


def same_twice(stem, runs):
    first, second = (lasting(runs(stem, "solutions", number).notebook) for number in (1, 2))
    assert [pair for pair in zip(first, second, strict=True) if pair[0] != pair[1]] == []


@pytest.mark.parametrize("stem", [stem for stem in CHAPTERS if stem in TWICE])
def test_solutions_say_the_same_twice(stem, runs):
    same_twice(stem, runs)


@pytest.mark.slow
@pytest.mark.parametrize("stem", [stem for stem in CHAPTERS if stem not in TWICE])
def test_all_solutions_say_the_same_twice(stem, runs):
    same_twice(stem, runs)


@each
def test_chapter_has_the_parts_that_every_chapter_has(stem):
    cells = CHAPTERS[stem]
    words = "\n".join(cell.source for cell in cells if cell.kind == "markdown")
    code = [cell for cell in cells if cell.kind == "code" and "hidden" not in cell.tags]
    assert cells[0].kind == "markdown" and cells[0].source.startswith("# ")
    assert "?" in cells[0].source and any(c.isdigit() for c in cells[0].source)  # one plain question with a number
    assert "> **Takeaway.**" in words and "What was simplified" in words and "ield lesson" in words
    assert 5 <= len(units(cells)) <= 9
    # what the course's own messages tell a learner to call is there before the first exercise
    first = next(i for i, cell in enumerate(code) if "exercise" in cell.tags)
    imported = imports("\n".join(cell.source for cell in code[:first]))
    assert all(re.search(rf"\b{name}\b", imported) for name in ("check", "hint", "mine", "quiz", "undo"))
    assert [cell.metadata.get("id") for cell in code if ends_with_about(cell.source)] == []  # it would show its value
    names = [node.func.id for cell in code for node in every_call(cell.source)]
    assert "explore" in names and "check" in names
    assert sum(1 for cell in code for _ in calls(cell.source, "predict")) >= 1


def ends_with_about(source: str) -> bool:
    last = ast.parse(source).body[-1:]
    return bool(last) and ast.unparse(last[0]).startswith("about(")


def every_call(source: str):
    return (n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.Call) and isinstance(n.func, ast.Name))


@each
def test_exercises_mostly_build_the_library(stem):
    found = units(CHAPTERS[stem])
    assert sum(bool(unit.library) for unit in found) >= 0.6 * len(found)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory):
    return {chapter.stem: chapter for chapter in prepare(ROOT)} if CHAPTERS else {}


@each
def test_checks_pass_right_answers_and_catch_wrong_ones(stem, prepared):
    outcomes = [*right_answers([prepared[stem]], (0, 1)), *wrong_answers(prepared[stem])]
    assert [f"{o.exercise}: {line}" for o in outcomes for line in o.problems] == []


@pytest.mark.skipif(not CHAPTERS, reason="no chapter has exercises")
def test_checks_pass_right_answers_in_64_bits_and_on_one_thread(runs):
    outcomes = runs(*SETTINGS)
    problems = {name: [f"{o.exercise}: {p}" for o in found for p in o.problems] for name, found in outcomes.items()}
    assert problems == {"64 bits": [], "one thread": []}
