"""`nanochat course build`: chapters and instructor notebooks out of `solutions/NN_topic.py`, one way and byte for byte.

    solutions/NN_topic.py ─┬─> solutions/NN_topic.ipynb   with answers and hidden cells
                           ├─> chapters/NN_topic.py       stubs only
                           └─> chapters/NN_topic.ipynb    the same, to open in JupyterLab

Nothing flows back: an edit in a generated file is reported by `--check` and lost at the next build.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

from nanochat_lib.course.grammar import Cell, for_instructor, for_learner, parse, secrets, write
from nanochat_lib.errors import UserError
from nanochat_lib.storage import atomic_write_text

CHAPTER = re.compile(r"\d\d_[a-z0-9_]+")
SECRET_LINE = 24  # characters from which a single line of an answer counts as a leak


def build(check: bool = False, root: str | Path = ".") -> list[Path]:
    """Writes every generated file of the course below `root` that is not up to date; returns their paths.

    With `check` nothing is written: UserError names the files that differ from what the sources give, the generated
    files without a source, and any answer or hidden text found in `chapters/`.
    """
    root = Path(root)
    sources = sorted((root / "solutions").glob("*.py"))
    if not sources:
        raise UserError(f"{root / 'solutions'} holds no chapter (NN_topic.py); run this in the course's folder")
    expected: dict[str, str] = {}
    hidden: dict[str, list[str]] = {}
    for path in sources:
        if not CHAPTER.fullmatch(path.stem):
            raise UserError(f"{path}: a chapter is named NN_topic.py, two digits and lower-case words")
        cells = parse(path.read_text(encoding="utf-8"), path.name)
        expected |= render(cells, path.stem)
        hidden[path.stem] = secrets(cells)
    differing = [name for name, text in expected.items() if _read(root / name) != text]
    problems = [f"{name} differs from its source" for name in differing] if check else []
    if not check:
        for name in differing:
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            atomic_write_text(root / name, expected[name])
    problems += [f"{name} has no source in solutions/" for name in strays(root, expected)]
    problems += leaks(root, hidden)
    if problems:
        more = f" and {len(problems) - 5} more" if len(problems) > 5 else ""
        raise UserError(f"course: {'; '.join(problems[:5])}{more}; edit solutions/*.py, then run nanochat course build")
    return [root / name for name in differing]


def render(cells: list[Cell], stem: str) -> dict[str, str]:
    """Generated file -> text, for the cells of the chapter called `stem`, e.g. "12_capstone"."""
    learner = for_learner(cells)
    return {
        f"solutions/{stem}.ipynb": notebook(for_instructor(cells), stem),
        f"chapters/{stem}.py": write(learner),
        f"chapters/{stem}.ipynb": notebook(learner, stem),
    }


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
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    document = {
        "cells": entries,
        "metadata": {"kernelspec": kernel, "language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(document, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


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
        full = f"{chapter}-{name}"[:64].rstrip("-")
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
    return sorted(set(found) - set(expected))


def leaks(root: Path, hidden: dict[str, list[str]]) -> list[str]:
    """Problems: answers or hidden text of any chapter, and outputs, found in any text file below chapters/.

    Notebooks are searched as decoded text (every string in them, metadata and outputs too), whitespace apart. A whole
    answer counts, and so does any single line of it that is long enough not to be a coincidence.
    """
    wanted = {}
    for stem, texts in hidden.items():
        for text in texts:
            wanted[_squeeze(text)] = stem
            for line in text.split("\n"):
                if len(line.strip()) >= SECRET_LINE and not line.strip().startswith(("import ", "from ", "#")):
                    wanted[_squeeze(line)] = stem
    problems = []
    for path in sorted(p for p in (root / "chapters").rglob("*") if p.is_file()):
        if any(part.startswith(".") for part in path.relative_to(root).parts):
            continue  # editors' checkpoints and caches, which git ignores
        text = _read(path)
        if text is None:
            continue
        if path.suffix == ".ipynb":
            text, outputs = _strings(path, text)
            if outputs:
                problems.append(f"{path.relative_to(root)} holds outputs")
        squeezed = _squeeze(text)
        for stem in sorted({stem for needle, stem in wanted.items() if len(needle) >= 8 and needle in squeezed}):
            problems.append(f"{path.relative_to(root)} shows an answer or hidden text of {stem}")
    return problems


def _squeeze(text: str) -> str:
    return re.sub(r"[\s#]+", "", text)


def _strings(path: Path, text: str) -> tuple[str, bool]:
    """All strings of a notebook joined, and whether any code cell has outputs."""
    try:
        document = json.loads(text)
    except ValueError:
        raise UserError(f"{path} is not a notebook; delete it and run nanochat course build") from None
    found: list[str] = []

    def walk(node: object) -> None:
        if isinstance(node, str):
            found.append(node)
        elif isinstance(node, dict):
            for value in node.values():
                walk(value)
        elif isinstance(node, list):
            for value in node:
                walk(value)

    walk(document)
    cells = document.get("cells", []) if isinstance(document, dict) else []
    return "".join(found), any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
