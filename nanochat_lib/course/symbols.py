"""An exercise's answer and the library symbol that it names, compared as syntax trees: neither may drift.

What says nothing about what is computed is left out: docstrings, annotations, `note(…)` lines, decorators.
"""

from __future__ import annotations

import ast
from itertools import zip_longest
from pathlib import Path

import nanochat_lib

PACKAGE = Path(nanochat_lib.__file__).parent
Definition = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef


def difference(answer: str, library: str) -> str:
    """ "" when `answer` (a cell's source) defines what `library` ("nanochat_lib.bpe:merge") is, else how it differs."""
    name = library.split(":")[1].split(".")[-1]
    own = find(ast.parse(answer), name)
    if own is None:
        return f"the answer defines no {name}, which {library} is called"
    theirs = library_symbol(library)
    if theirs is None:
        return f"{library} does not exist"
    lines = zip_longest(_lines(own), _lines(theirs), fillvalue="(nothing)")
    for mine, other in lines:
        if mine != other:
            return f"the answer is not {library}: `{mine.strip()}` here, `{other.strip()}` there"
    return ""


def library_symbol(library: str) -> Definition | None:
    """The definition of "nanochat_lib.module:name" (or name.method), read from its file; None when there is none."""
    module, _, path = library.partition(":")
    tree = _module(module)
    node: ast.AST | None = tree
    for part in path.split("."):
        node = find(node, part) if node is not None else None
    return node


def _module(module: str) -> ast.Module | None:
    stem = PACKAGE.joinpath(*module.split(".")[1:])
    for path in (stem.with_suffix(".py"), stem / "__init__.py"):
        if path.exists():
            return ast.parse(path.read_text(encoding="utf-8"))
    return None


def find(tree: ast.AST, name: str) -> Definition | None:
    """The last function or class called `name` directly in `tree`."""
    found = [n for n in getattr(tree, "body", []) if isinstance(n, Definition) and n.name == name]
    return found[-1] if found else None


def _lines(node: Definition) -> list[str]:
    plain = _Plain().visit(ast.parse(ast.unparse(node))).body[0]
    plain.decorator_list = []
    return ast.unparse(plain).split("\n")


class _Plain(ast.NodeTransformer):
    """Takes out what does not change what is computed."""

    def visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        if isinstance(node, Definition):
            node.body = [n for n in node.body if not _silent(n)] or [ast.Pass()]
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        if isinstance(node, ast.arg):
            node.annotation = None
        for field in ("body", "orelse", "finalbody"):
            block = getattr(node, field, None)
            if isinstance(block, list) and not isinstance(node, ast.Module | Definition):
                setattr(node, field, [n for n in block if not _note(n)])
        if isinstance(node, ast.AnnAssign):
            if node.value is not None:
                return ast.copy_location(ast.Assign([node.target], node.value, lineno=node.lineno), node)
            node.annotation = ast.Constant(...)
        return node


def _note(node: ast.AST) -> bool:
    """Is it a line `note("name", value)`?"""
    call = node.value if isinstance(node, ast.Expr) else None
    return isinstance(call, ast.Call) and isinstance(call.func, ast.Name) and call.func.id == "note"


def _silent(node: ast.AST) -> bool:
    """A note, a docstring or any other text that stands alone."""
    text = isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
    return text or _note(node)
