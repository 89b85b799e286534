"""Which names a piece of code needs from outside: found by reading it, without running it."""

from __future__ import annotations

import ast
import builtins
import symtable

BUILTINS = frozenset(dir(builtins)) | {"__name__"}


def needed(source: str) -> set[str]:
    """Names that `source` (a cell) uses and does not define, at its top level or in any function."""
    top = symtable.symtable(source, "cell", "exec")
    own = {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}
    used = {s.get_name() for s in top.get_symbols() if s.is_referenced()}
    tables = list(top.get_children())
    while tables:
        table = tables.pop()
        tables += table.get_children()
        used |= {s.get_name() for s in table.get_symbols() if s.is_global() and s.is_referenced()}
        own |= {s.get_name() for s in table.get_symbols() if s.is_declared_global() and s.is_assigned()}
    return used - own - BUILTINS


def provided(source: str) -> set[str]:
    """Names that `source` defines at its top level."""
    top = symtable.symtable(source, "cell", "exec")
    return {s.get_name() for s in top.get_symbols() if s.is_assigned() or s.is_imported() or s.is_namespace()}


def imports(source: str) -> str:
    """The import statements that stand at the top level of a cell, as source, each at the line where it was."""
    lines = [""] * (source.count("\n") + 1)
    for node in ast.parse(source).body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            lines[node.lineno - 1] += ("; " if lines[node.lineno - 1] else "") + ast.unparse(node)
    return "\n".join(lines).rstrip()
