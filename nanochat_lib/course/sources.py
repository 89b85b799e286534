"""A function from a notebook as text that stands alone: its own lines, with the imports and helpers it uses."""

from __future__ import annotations

import ast
import builtins
import importlib
import inspect
import linecache
import symtable
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field


class Unsaveable(Exception):
    """Why a function cannot be written to a file, in words for the learner."""


@dataclass
class Block:
    """One function ready to be written into a module."""

    name: str
    imports: list[str] = field(default_factory=list)  # one name a statement
    body: str = ""  # helpers first, then the function

    def module(self) -> str:
        """The block as a module of its own."""
        head = "\n".join(self.imports)
        return f"{head}\n\n\n{self.body}\n" if head else f"{self.body}\n"


def block_of(fn: Callable, source: str | None = None, kept: frozenset[str] = frozenset(), package: str = "") -> Block:
    """Everything that `fn` needs to stand in a file. Raises Unsaveable.

    `source` is the text that defines it, where Python cannot find it. `kept` are names that the file defines already;
    `package` is where that file will be ("my_nanochat.tokenizer"), so that its own functions need no import.
    """
    base = inspect.unwrap(fn) if callable(fn) else fn
    name = getattr(base, "__name__", "")
    if name == "<lambda>" or not name:
        raise Unsaveable("only functions written with def (and classes) can be saved")
    texts = [*cell_sources(), *([source] if source else []), text_of(base)]
    finder = _Finder(texts, _globals(base), kept - {name}, package)
    finder.add_definition(name)
    return Block(name, finder.imports, "\n\n\n".join(finder.parts))


def cell_sources() -> list[str]:
    """The sources of the notebook's cells in the order they ran; empty outside a notebook."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    if shell is None:
        return []
    found = []
    for cell in shell.user_ns.get("In", []):
        try:
            found.append(shell.transform_cell(cell))
        except Exception:  # a cell that was never valid
            continue
    return found


def text_of(base: object) -> str:
    """The whole text of the file or cell in which a function or class stands; "" when it is not to be had."""
    code = getattr(base, "__code__", None)
    if code is None and isinstance(base, type):
        methods = (inspect.unwrap(m) for m in vars(base).values() if callable(m))
        codes = [m.__code__ for m in methods if hasattr(m, "__code__") and m.__module__ == base.__module__]
        code = next((c for c in codes if not c.co_filename.startswith("<")), None)
    if code is None:
        return ""
    linecache.checkcache(code.co_filename)
    return "".join(linecache.getlines(code.co_filename))


def _globals(base: object) -> dict:
    if hasattr(base, "__globals__"):
        return base.__globals__
    for method in vars(base).values() if isinstance(base, type) else ():
        method = inspect.unwrap(method) if callable(method) else method
        if hasattr(method, "__globals__") and method.__module__ == base.__module__:
            return method.__globals__
    return vars(sys.modules.get(getattr(base, "__module__", ""), types.ModuleType("empty")))


class _Finder:
    """Collects the definitions and imports behind a name."""

    def __init__(self, texts: list[str], names: dict, kept: frozenset[str], package: str) -> None:
        self.names, self.kept, self.package = names, kept, package
        self.imports: list[str] = []
        self.parts: list[str] = []
        self.seen: set[str] = set()
        self.bound: dict[str, tuple[ast.stmt, str]] = {}  # name -> the last statement that binds it, and its text
        self.imported: dict[str, list[str]] = {}  # name -> import statements that bind it
        for text in texts:
            self._read(text)

    def _read(self, text: str) -> None:
        try:
            tree = ast.parse(text)
        except (SyntaxError, ValueError):
            return
        lines = text.splitlines()
        for node in tree.body:
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                for alias in node.names:
                    bound = alias.asname or alias.name.split(".")[0]
                    self.imported.setdefault(bound, []).append(single_import(node, alias))
                continue
            for name in bound_names(node):
                self.bound[name] = (node, _segment(node, lines))

    def add_definition(self, name: str) -> None:
        """Adds the statement that binds a name, after everything it uses."""
        if name in self.seen:
            return
        self.seen.add(name)
        if name not in self.bound:
            raise Unsaveable(f"the text of {name} was not found")
        text = self.bound[name][1]
        for used in used_names(text):
            if used != name and used in self.names:
                self._add_name(used)
        self.parts.append(text)

    def _add_name(self, name: str) -> None:
        value = self.names[name]
        if name in self.seen or getattr(builtins, name, self) is value:
            return
        if line := self._import_line(name, value):
            self.seen.add(name)
            self.imports.append(line)
            return
        module = getattr(value, "__module__", None)
        if isinstance(module, str) and module == self.package and name in self.kept:
            return
        if isinstance(value, (types.FunctionType, type)) or callable(value):
            if name in self.kept:
                return  # an exercise of this chapter that the file has
            self.add_definition(name)
            return
        try:
            plain = ast.literal_eval(repr(value)) == value and len(repr(value)) < 2000
        except Exception:  # not a literal
            plain = False
        if name in self.bound:
            self.add_definition(name)
        elif plain:
            self.seen.add(name)
            self.parts.append(f"{name} = {value!r}")
        else:
            raise Unsaveable(f"it uses {name}, whose definition was not found; pass it as an argument")

    def _import_line(self, name: str, value: object) -> str:
        """The import statement that gives `value` under `name`: the notebook's own, else one that is sure to work."""
        for line in reversed(self.imported.get(name, [])):
            if _gives(line, name, value):
                return line
        if isinstance(value, types.ModuleType):
            return f"import {value.__name__}" if value.__name__ == name else f"import {value.__name__} as {name}"
        module, inside = getattr(value, "__module__", None), getattr(value, "__qualname__", "")
        if isinstance(module, str) and module not in ("__main__", "builtins", self.package) and inside.isidentifier():
            line = f"from {module} import {inside}" + (f" as {name}" if inside != name else "")
            if _gives(line, name, value):
                return line
        return ""


def single_import(node: ast.Import | ast.ImportFrom, alias: ast.alias) -> str:
    """The statement that imports one of the names of an import statement."""
    return ast.unparse(
        ast.Import([alias]) if isinstance(node, ast.Import) else ast.ImportFrom(node.module, [alias], node.level)
    )


def _gives(line: str, name: str, value: object) -> bool:
    """Whether an import statement binds `name` to that very object."""
    node = ast.parse(line).body[0]
    try:
        if isinstance(node, ast.Import):
            alias = node.names[0]
            module = importlib.import_module(alias.name)
            return (module if alias.asname else sys.modules[alias.name.split(".")[0]]) is value
        if node.level:
            return False
        module = importlib.import_module(node.module)
        wanted = node.names[0].name
        return getattr(module, wanted, None) is value
    except Exception:  # an import that fails here gives nothing
        return False


def bound_names(node: ast.stmt) -> list[str]:
    """Names that a top-level statement gives a value."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return [n.id for target in targets for n in ast.walk(target) if isinstance(n, ast.Name)]


def _segment(node: ast.stmt, lines: list[str]) -> str:
    first = min([node.lineno, *(d.lineno for d in getattr(node, "decorator_list", []))])
    return "\n".join(lines[first - 1 : node.end_lineno])


def used_names(text: str) -> list[str]:
    """Global names that a piece of code reads, in the order of their names."""
    found: set[str] = set()

    def walk(table: symtable.SymbolTable, top: bool) -> None:
        for symbol in table.get_symbols():
            if symbol.is_referenced() and (top or symbol.is_global()):
                found.add(symbol.get_name())
        for child in table.get_children():
            walk(child, False)

    walk(symtable.symtable(text, "<cell>", "exec"), True)
    return sorted(found)
