"""`nanochat course build`: chapters and instructor notebooks out of `solutions/NN_topic.py`, one way and byte for byte.

    solutions/NN_topic.py ─┬─> solutions/NN_topic.ipynb   with answers and hidden cells
                           ├─> chapters/NN_topic.py       stubs only
                           ├─> chapters/NN_topic.ipynb    the same, to open in JupyterLab
                           └─> nanochat_lib/course/checks/topic.json   what exercises there are, for programs

Nothing flows back: an edit in a generated file is reported by `--check` and lost at the next build.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from nanochat_lib.course import lock, rules
from nanochat_lib.course.exercises import for_nbgrader, units
from nanochat_lib.course.grammar import KEYS, Cell, for_instructor, for_learner, parse
from nanochat_lib.course.leaks import leaks
from nanochat_lib.errors import UserError
from nanochat_lib.storage import atomic_write_text

CHAPTER = re.compile(r"\d\d_[a-z0-9_]+")
PAIR_METADATA = "kernelspec,-jupytext"  # as in chapters/jupytext.toml
SHOWN = 8  # problems in one message


def build(check: bool = False, root: str | Path = ".") -> list[Path]:
    """Writes every generated file of the course below `root` that is not up to date; returns their paths.

    Raises UserError for a chapter that breaks a rule of rules.py, for a published exercise that has vanished, and for
    any answer or hidden text in what learners get. With `check` nothing is written, and files that differ from what
    the sources give are named too.
    """
    root = Path(root)
    chapters = sources(root)
    expected: dict[str, str] = {}
    broken = same_ids(chapters)
    for stem, cells in chapters.items():
        broken += rules.problems(stem, cells, root)
        expected |= render(cells, stem)
    ids = [unit.id for cells in chapters.values() for unit in units(cells)]
    expected[lock.NAME], vanished = lock.update(_read(root / lock.NAME) or "", ids)
    if broken or vanished:
        raise UserError(f"course: {_several(broken + vanished)}")
    differing = [name for name, text in expected.items() if _read(root / name) != text]
    problems = [f"{name} differs from its source" for name in differing] if check else []
    if not check:
        for name in differing:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            atomic_write_text(root / name, expected[name])
    problems += [f"{name} has no source in solutions/" for name in strays(root, expected)]
    problems += leaks(root, chapters)
    if problems:
        raise UserError(f"course: {_several(problems)}; edit solutions/*.py, then run nanochat course build")
    return [root / name for name in differing]


def sources(root: Path) -> dict[str, list[Cell]]:
    """Chapter, e.g. "01_tokenizer" -> its cells, for every source below `root`, checked as far as the grammar goes."""
    found = sorted((root / "solutions").glob("*.py"))
    if not found:
        raise UserError(f"{root / 'solutions'} holds no chapter (NN_topic.py); run this in the course's folder")
    for path in found:
        if not CHAPTER.fullmatch(path.stem):
            raise UserError(f"{path}: a chapter is named NN_topic.py, two digits and lower-case words")
    return {path.stem: parse(path.read_text(encoding="utf-8"), path.name) for path in found}


def same_ids(chapters: dict[str, list[Cell]]) -> list[str]:
    """Lines about exercise ids that two exercises, and topics that two chapters, share."""
    first: dict[str, str] = {}
    lines = []
    for stem, cells in chapters.items():
        for name, where in [(rules.topic(stem), f"{stem}.py")] + [
            (unit.id, f"{stem}.py:{unit.cell.line}") for unit in units(cells)
        ]:
            if name in first:
                lines.append(f"{where}: {name} is taken by {first[name]}")
            first[name] = where
    return lines


def _several(lines: list[str]) -> str:
    """Lines as one; or below one another when they are several."""
    if len(lines) == 1:
        return lines[0]
    more = [f"and {len(lines) - SHOWN} more"] if len(lines) > SHOWN else []
    return "".join(f"\n  {line}" for line in lines[:SHOWN] + more)


def render(cells: list[Cell], stem: str) -> dict[str, str]:
    """Generated file -> text, for the cells of the chapter called `stem`, e.g. "12_capstone"."""
    cells = for_nbgrader(cells)
    learner = for_learner(cells)
    opened = notebook(learner, stem)
    files = {
        f"solutions/{stem}.ipynb": notebook(for_instructor(cells), stem),
        f"chapters/{stem}.py": saved_beside(opened),
        f"chapters/{stem}.ipynb": opened,
    }
    if units(cells):
        files[(rules.CHECKS / f"{rules.topic(stem)}.json").as_posix()] = catalogue(cells, stem)
    return files


def catalogue(cells: list[Cell], stem: str) -> str:
    """The chapter's exercises as JSON: what a program must know of them without reading the chapter."""
    keys = ("points", "minutes", "level")
    entries = [
        {"id": unit.id, "name": unit.name, "library": unit.library} | {key: unit.cell.metadata[key] for key in keys}
        for unit in units(cells)
    ]
    titles = [m[1] for cell in cells if cell.kind == "markdown" and (m := re.match(r"# +(.+)", cell.source))]
    document = {"chapter": stem, "title": titles[0] if titles else rules.topic(stem), "exercises": entries}
    return json.dumps(document, indent=1, ensure_ascii=False) + "\n"


def _read(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8")
    except (FileNotFoundError, UnicodeDecodeError):
        return None


def notebook(cells: list[Cell], stem: str) -> str:
    """Cells as the text of an .ipynb file (format 4.5), with stable ids and no outputs."""
    entries = []
    for cell, name in zip(cells, cell_ids(cells, stem), strict=True):
        entry = {"cell_type": cell.kind, "id": name, "metadata": cell.metadata, "source": cell.source.splitlines(True)}
        if cell.kind == "code":
            entry |= {"execution_count": None, "outputs": []}
        entries.append(entry)
    kernel = {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"}
    document = {
        "cells": entries,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def saved_beside(text: str) -> str:
    """The py:percent file that JupyterLab writes beside the notebook `text`, so that a first save changes nothing."""
    import jupytext

    pair = jupytext.reads(text, "ipynb")
    pair.metadata["jupytext"] = {"cell_metadata_filter": ",".join(KEYS), "notebook_metadata_filter": PAIR_METADATA}
    return jupytext.writes(pair, "py:percent")


def cell_ids(cells: list[Cell], stem: str) -> list[str]:
    """`<chapter>-<name>` for every cell, from its id, its heading, or its place below the last heading.

    The chapter's number is left out, so renumbering keeps the ids. Two cells with one id are a UserError.
    """
    chapter = slug(stem.split("_", 1)[1])
    ids, lines = [], {}
    section, place = "start", 0
    for cell in cells:
        heading = re.match(r"#+ +(.+)", cell.source) if cell.kind == "markdown" else None
        if "id" in cell.metadata:
            name, place = slug(str(cell.metadata["id"])), place + 1
        elif heading:
            name, section, place = slug(heading[1]), slug(heading[1]), 0
        else:
            place += 1
            name = f"{section}-{place}"
        full = (name if name.startswith(f"{chapter}-") else f"{chapter}-{name}")[:64].rstrip("-")
        if full in lines:
            raise UserError(
                f"{stem}.py:{cell.line}: two cells are called {full} (the other at line {lines[full]}); "
                'give one an id="…" of its own'
            )
        lines[full] = cell.line
        ids.append(full)
    return ids


def slug(text: str) -> str:
    """'Merge: the `rule`' -> 'merge-the-rule'."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-") or "cell"


def strays(root: Path, expected: dict[str, str]) -> list[str]:
    """Chapter-like files in chapters/ and solutions/ that no source accounts for."""
    found = [
        f"{folder}/{path.name}"
        for folder, pattern in (("chapters", "*.py"), ("chapters", "*.ipynb"), ("solutions", "*.ipynb"))
        for path in (root / folder).glob(f"[0-9][0-9]_{pattern}")
    ]
    found += [path.relative_to(root).as_posix() for path in (root / rules.CHECKS).glob("*.json")]
    return sorted(set(found) - set(expected))
