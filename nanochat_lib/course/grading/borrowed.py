"""Does a learner's answer call the very library function that the exercise asks for? Found by reading it.

The library is open, and a learner's copy of it holds every answer; what is graded is that they wrote one. Reading finds
the plain ways (import and call), not every way there is.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import re
import sys
import types
from collections.abc import Iterable
from pathlib import Path


def borrowed(answer: str, texts: Iterable[str], library: str) -> str:
    """The name under which `answer` uses "nanochat_lib.bpe:merge", "" when it does not. `texts` hold its imports."""
    wanted = library.replace(":", ".").rpartition(".")[2]
    right = _object(library.replace(":", "."), wanted)
    try:
        tree = ast.parse(answer)
        names: dict[str, str] = {}
        for text in (*texts, answer):
            for node in ast.walk(ast.parse(text)):
                names |= _imported(node)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ""
    for node in ast.walk(tree):
        dotted = _dotted(node)
        if isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                if _object(f"{node.module}.{alias.name}", wanted) is right and right is not None:
                    return f"{node.module}.{alias.name}"
        if not dotted:
            continue
        first, dot, rest = dotted.partition(".")
        if first in names and right is not None and _object(names[first] + dot + rest, wanted) is right:
            return names[first] + dot + rest
    return ""


def _imported(node: ast.AST) -> dict[str, str]:
    """Name -> what it stands for, of an import statement."""
    if isinstance(node, ast.Import):
        return {a.asname or a.name.split(".")[0]: a.name if a.asname else a.name.split(".")[0] for a in node.names}
    if isinstance(node, ast.ImportFrom) and node.module and not node.level:
        return {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return {}


def _dotted(node: ast.AST) -> str:
    """'bpe.merge' of such an expression, else ""."""
    parts = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return (
        ".".join([node.id, *reversed(parts)])
        if isinstance(node, ast.Name) and parts or isinstance(node, ast.Name)
        else ""
    )


def _object(dotted: str, wanted: str) -> object:
    """What a dotted name of the library stands for; None for anything else."""
    parts = dotted.split(".")
    if parts[0] != "nanochat_lib":
        return None
    for i in range(len(parts), 0, -1):
        module = _module(".".join(parts[:i]), wanted)
        if isinstance(module, types.ModuleType):
            found: object = module
            for part in parts[i:]:
                if not isinstance(found, (types.ModuleType, type)):
                    return None
                found = vars(found).get(part)
            return found
    return None


def _module(name: str, wanted: str) -> types.ModuleType | None:
    """A module of the library: one that is loaded, or one whose text has the word `wanted`. Others may be large."""
    with contextlib.suppress(Exception):  # there is no such module, or it needs what is not here
        if name not in sys.modules and not name.endswith("__main__"):
            source = Path(importlib.util.find_spec(name).origin).read_text(encoding="utf-8")
            if re.search(rf"\b{wanted}\b", source):
                importlib.import_module(name)
    return sys.modules.get(name)
