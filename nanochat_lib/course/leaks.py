"""The search for answers and hidden cells where learners would find them."""

from __future__ import annotations

import json
import re
from pathlib import Path

from nanochat_lib.errors import UserError

SECRET_LINE = 24  # characters from which a single line of an answer counts as a leak


def leaks(root: Path, hidden: dict[str, list[str]]) -> list[str]:
    """Problems: answers or hidden text of any chapter, and outputs, found in any text file below chapters/.

    Notebooks are searched as decoded text (every string in them, metadata and outputs too), whitespace apart. A whole
    answer counts, and so does any single line of it that is long enough not to be a coincidence.
    """
    wanted: dict[str, tuple[str, str]] = {}  # what to look for -> chapter, how the message calls it
    for stem, texts in hidden.items():
        for text in texts:
            wanted[_squeeze(text)] = stem, text.strip().split("\n")[0]
            for line in text.split("\n"):
                if len(line.strip()) >= SECRET_LINE and not line.strip().startswith(("import ", "from ", "#")):
                    wanted[_squeeze(line)] = stem, line.strip()
    problems = []
    for path in sorted(p for p in (root / "chapters").rglob("*") if p.is_file()):
        if any(part.startswith(".") for part in path.relative_to(root).parts):
            continue  # editors' checkpoints and caches, which git ignores
        text = _text(path)
        if text is None:
            continue
        if path.suffix == ".ipynb":
            text, outputs = _strings(path, text)
            if outputs:
                problems.append(f"{path.relative_to(root)} holds outputs")
        squeezed = _squeeze(text)
        found = {wanted[needle][0]: wanted[needle][1] for needle in wanted if len(needle) >= 8 and needle in squeezed}
        for stem, line in sorted(found.items()):
            problems.append(f"{path.relative_to(root)} shows an answer or hidden text of {stem} (`{line}`)")
    return problems


def _text(path: Path) -> str | None:
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None


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
