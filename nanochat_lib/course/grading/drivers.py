"""How a case calls the learner's function, as plain data: by name where it has one, else its own code.

A case's `call` is a small function around the learner's. Those of the checks (which learners have) are sent by name;
one of a hidden cell as its compiled code and the names it uses. Code travels from the grader to the child only.
"""

from __future__ import annotations

import importlib
import marshal
import types
from collections.abc import Callable

from nanochat_lib.course.grading.wire import any_class


class Unsendable(TypeError):
    """A case's function that cannot be sent to the child."""


def pack(fn: Callable | None, where: str) -> object:
    """A function as plain data; `where` is how an error calls it."""
    if fn is None:
        return None
    module, name = getattr(fn, "__module__", None), getattr(fn, "__qualname__", "")
    if module and module != "__main__" and "<" not in name and _resolves(module, name, fn):
        return {"name": f"{module}:{name}"}
    if not isinstance(fn, types.FunctionType):
        raise Unsendable(f"{where}: only functions can be sent to the child, got {type(fn).__name__}")
    code = fn.__code__
    cells = [cell.cell_contents for cell in fn.__closure__ or ()]
    names = {name: fn.__globals__[name] for name in _names(code) if name in fn.__globals__}
    return {
        "code": marshal.dumps(code),
        "module": module if module and module != "__main__" else "",
        "globals": {key: _reference(value, f"{where}, {key}") for key, value in names.items()},
        "cells": [_reference(value, where) for value in cells],
        "defaults": [_reference(value, where) for value in fn.__defaults__ or ()],
    }


def _resolves(module: str, name: str, fn: object) -> bool:
    try:
        return any_class(f"{module}:{name}") is fn
    except (ImportError, AttributeError):
        return False


def _names(code: types.CodeType) -> set[str]:
    inner = [const for const in code.co_consts if isinstance(const, types.CodeType)]
    return set(code.co_names).union(*map(_names, inner))


def _reference(value: object, where: str) -> object:
    """A value that a function uses: a module or a function by name, or plain data."""
    if isinstance(value, types.ModuleType):
        return {"module": value.__name__}
    if callable(value):
        return {"function": pack(value, where)}
    return {"value": value}


def unpack(packed: object) -> Callable | None:
    """The function again, in the child."""
    if packed is None:
        return None
    if "name" in packed:
        return any_class(packed["name"])
    scope = {"__builtins__": __builtins__, "__name__": packed["module"] or "__hidden__"}
    scope |= {key: _value(item) for key, item in packed["globals"].items()}
    cells = tuple(types.CellType(_value(item)) for item in packed["cells"])
    code = marshal.loads(packed["code"])
    return types.FunctionType(code, scope, code.co_name, tuple(map(_value, packed["defaults"])), cells)


def _value(item: dict) -> object:
    if "module" in item:
        return importlib.import_module(item["module"])
    return unpack(item["function"]) if "function" in item else item["value"]
