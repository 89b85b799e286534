"""`nanochat course pull NN`: what an edited learner notebook would change in `solutions/NN_topic.py`, as a diff.

A maintainer who edits prose, code or stubs in JupyterLab sees here what belongs into the source. Nothing is written;
answers and hidden cells stay as the source has them.
"""

from __future__ import annotations

import difflib
import json
from dataclasses import replace
from pathlib import Path

from nanochat_lib.course.build import cell_ids
from nanochat_lib.course.exercises import for_nbgrader
from nanochat_lib.course.grammar import KEYS, Cell, for_learner, parse, split_regions, stub, write_cell
from nanochat_lib.errors import UserError


def pull(source: Path, notebook: Path) -> str:
    """A unified diff from `source` to what it would be with the notebook's changes; "" when there are none."""
    text = source.read_text(encoding="utf-8")
    cells = parse(text, source.name)
    shown = for_learner(for_nbgrader(cells))
    ids = dict(zip(cell_ids(shown, source.stem), [c for c in cells if "hidden" not in c.tags], strict=True))
    lines = text.splitlines(True)
    starts = [cell.line - 1 for cell in cells]
    blocks = {id(c): lines[a:b] for c, a, b in zip(cells, starts, [*starts[1:], len(lines)], strict=True)}
    wanted = lines[: starts[0]]
    for old, new in merge(cells, ids, read(notebook)):
        if new is old:
            wanted += blocks[id(old)]
            continue
        blank = 1 if old is None else len(blocks[id(old)]) - len("".join(blocks[id(old)]).rstrip("\n").split("\n"))
        if wanted[-1].strip():
            wanted.append("\n")
        wanted += write_cell(new).splitlines(True) + ["\n"] * blank
    while wanted and not wanted[-1].strip():
        wanted.pop()
    name = f"solutions/{source.name}"
    return "".join(difflib.unified_diff(lines, wanted, name, f"{name} with {notebook.name}"))


def read(notebook: Path) -> list[tuple[str, Cell]]:
    """(cell id, cell) of a notebook; metadata that the source form does not know are left out."""
    try:
        document = json.loads(notebook.read_text(encoding="utf-8"))
        entries = document["cells"]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{notebook} cannot be read as a notebook") from None
    found = []
    for entry in entries:
        metadata = {key: value for key, value in entry.get("metadata", {}).items() if key in KEYS and key != "nbgrader"}
        source = entry.get("source", "")
        source = source if isinstance(source, str) else "".join(source)
        found.append((entry.get("id", ""), Cell(entry["cell_type"], source.rstrip("\n"), metadata)))
    return found


def merge(cells: list[Cell], ids: dict[str, Cell], edited: list[tuple[str, Cell]]) -> list[tuple[Cell | None, Cell]]:
    """(cell of the source or None, what it becomes) in the notebook's order. Hidden cells stay behind their cell."""
    followers: dict[int, list[Cell]] = {}
    last = 0
    for cell in cells:
        if "hidden" in cell.tags:
            followers.setdefault(last, []).append(cell)
        else:
            last = id(cell)
    by_id = {cell.metadata["id"]: cell for cell in ids.values() if "id" in cell.metadata}
    merged: list[tuple[Cell | None, Cell]] = [(cell, cell) for cell in followers.get(0, [])]
    used = set()
    for name, new in edited:
        old = ids.get(name) or by_id.get(new.metadata.get("id"))
        if old is None or id(old) in used:  # a new cell, or a copy of one
            merged.append((None, replace(new, metadata={k: v for k, v in new.metadata.items() if old is None})))
            continue
        used.add(id(old))
        merged.append((old, update(old, new)))
        merged += [(cell, cell) for cell in followers.get(id(old), [])]
    return merged


def update(old: Cell, new: Cell) -> Cell:
    """The source cell with what the notebook's cell says, the very same where it says nothing new."""
    before = stub(old).source
    if new.kind == old.kind and new.source == before:
        return old
    source = with_answer(old.source, before, new.source) if split_regions(old) else new.source
    return replace(old, kind=new.kind, source=source)


def with_answer(source: str, shown: str, edited: str) -> str:
    """`source` (stub and answer) after the learner's view of it changed from `shown` to `edited`."""
    lines, before, after = source.split("\n"), shown.split("\n"), edited.split("\n")
    regions = split_regions(Cell("code", source))
    where = [  # the source's line of every line that is shown
        i for i in range(len(lines)) if not any(i == a or b <= i <= c for a, b, c in regions)
    ]
    out: list[tuple[int, int, list[str]]] = []
    for kind, i1, i2, j1, j2 in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        if i2 > i1:  # line by line, so that markers between changed lines stay where they are
            chunks = [after[j1 + k : j1 + k + 1] for k in range(i2 - i1 - 1)] + [after[j1 + i2 - i1 - 1 : j2]]
            out += [(where[i1 + k], where[i1 + k] + 1, chunk) for k, chunk in enumerate(chunks)]
        else:
            at = where[i1] if i1 < len(where) else len(lines)
            out.append((at, at, after[j1:j2]))
    for start, end, new in reversed(out):
        lines[start:end] = new
    return "\n".join(lines)
