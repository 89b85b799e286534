"""The form of my_nanochat/<topic>.py: a module with its imports on top and a marked block for each exercise."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Sequence

from nanochat_lib.course.sources import bound_names, single_import, used_names

PACKAGE = "my_nanochat"
MARK = re.compile(r"^# ---- (\S+)\s*$", re.MULTILINE)
HEAD = '''"""Your functions from the chapter on {topic}: each stands here since its checks passed.

Later chapters and `nanochat run --mine` use them. Change them as you like; what no longer passes is not used.
"""
'''


def parse(text: str) -> tuple[list[str], dict[str, str]]:
    """(import statements of one name each, exercise id -> its text). SyntaxError when it is not Python."""
    first = text[: mark.start()].count("\n") + 1 if (mark := MARK.search(text)) else len(text) + 1
    imports = [
        single_import(node, alias)
        for node in ast.parse(text).body
        if isinstance(node, (ast.Import, ast.ImportFrom)) and node.lineno < first
        for alias in node.names
    ]
    return imports, blocks(text)


def blocks(text: str) -> dict[str, str]:
    """Exercise id -> the text below its mark, up to the next mark."""
    parts = MARK.split(text)  # what stands before the first mark, then id, text, id, text, …
    return {name: body.strip("\n") for name, body in zip(parts[1::2], parts[2::2], strict=True)}


def behind(text: str, exercise_id: str) -> str:
    """All text of the file that can matter to one exercise: its block, the blocks and the imports that it uses."""
    imports, found = parse(text)
    needed, queue = {}, [exercise_id]
    while queue:
        name = queue.pop()
        if name in found and name not in needed:
            needed[name] = found[name]
            used = set(used_names(found[name]))
            queue += [other for other in found if used & defined(found[other])]
    body = "\n".join(needed[name] for name in sorted(needed))
    used = set(used_names(body))
    return "\n".join([*(line for line in imports if _bound(line) in used), body])


def defined(text: str) -> set[str]:
    """Top-level names that a block defines."""
    return {name for node in ast.parse(text).body for name in bound_names(node)}


def compose(topic: str, imports: Sequence[str], found: dict[str, str], order: Sequence[str]) -> str:
    """The file's text: head, those imports that are used, and the blocks in the given order of ids."""
    names = sorted(found, key=lambda name: (order.index(name) if name in order else len(order), name))
    used = set(used_names("\n\n".join(found[name] for name in names)))
    parts = [HEAD.format(topic=topic)]
    if needed := [line for line in imports if _bound(line) in used or line.startswith("from __future__")]:
        parts.append("\n".join(_joined(needed)) + "\n")
    parts += [f"\n# ---- {name}\n{found[name]}\n" for name in names]
    return "\n".join(parts)


def _bound(line: str) -> str:
    """The name that a single import binds."""
    alias = ast.parse(line).body[0].names[0]
    return alias.asname or alias.name.split(".")[0]


def _joined(imports: Sequence[str]) -> list[str]:
    """Single imports joined by module: future ones, the standard library, the rest, this project."""
    plain = {line for line in imports if line.startswith("import ")}
    by_module: dict[str, set[str]] = {}
    for line in imports:
        if match := re.fullmatch(r"from (\S+) import (.+)", line):
            by_module.setdefault(match[1], set()).add(match[2])
    froms = {f"from {module} import {', '.join(sorted(names))}" for module, names in by_module.items()}

    def rank(line: str) -> tuple:
        top = line.split()[1].split(".")[0]
        place = 0 if top == "__future__" else 1 if top in sys.stdlib_module_names else 2
        return (3 if top in ("nanochat_lib", PACKAGE) else place, line.startswith("from "), line)

    return sorted(plain | froms, key=rank)
