"""`install(ids)`: a learner's functions in the place of the library's, for `nanochat run --mine`.

Call it before anything is compiled: a function that JAX has traced already stays inside what it was traced into.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable
from dataclasses import dataclass, field

from nanochat_lib.course import registry, saved
from nanochat_lib.errors import UserError


@dataclass
class Share:
    """How much of the pipeline is the learner's."""

    used: list[str] = field(default_factory=list)  # exercise ids
    refused: dict[str, str] = field(default_factory=dict)  # id -> why the library's is used
    functions: int = 0  # exercises that name a library function
    points: int = 0  # of the functions used
    all_points: int = 0  # of all functions

    def to_dict(self) -> dict:
        """For report.json."""
        return {
            "used": self.used,
            "refused": self.refused,
            "functions": self.functions,
            "share": len(self.used) / self.functions if self.functions else 0.0,
            "points": self.points,
            "all_points": self.all_points,
        }


_undo: list[tuple[object, str, object]] = []  # (module, dict or class; name; what stood there)


def install(ids: str | Iterable[str]) -> Share:
    """Puts the learner's passing functions into the library: "all", "id,id" or ids.

    Each is checked first; what does not pass is left to the library and named in `refused`. Raises UserError for an id
    that does not exist or names no library function.
    """
    entries = {e.id: e for chapter in registry.chapters() for e in chapter.exercises if e.library}
    if isinstance(ids, str):
        ids = list(entries) if ids == "all" else [name.strip() for name in ids.split(",") if name.strip()]
    else:
        ids = list(ids)
    for name in ids:
        if name not in entries:
            registry.exercise(name)
            raise UserError(f"{name} stands for no function of the library, so it cannot be put in its place")
    share = Share(functions=len(entries), all_points=sum(e.points for e in entries.values()))
    found = {name: saved.own(name) for name in dict.fromkeys(ids)}  # all are judged against the library as it is
    for name, (fn, why) in found.items():
        if fn is None:
            share.refused[name] = why
            continue
        _replace(entries[name].library, fn)
        share.used.append(name)
        share.points += entries[name].points
    return share


def _replace(symbol: str, fn: object) -> None:
    """Puts `fn` in the place of a library object wherever a module of the library or of the learner holds it."""
    old = registry.resolve(symbol)
    if old is fn:
        return
    registry.originals.setdefault(symbol, old)
    module_name, _, path = symbol.partition(":")
    owner = importlib.import_module(module_name)
    *outer, last = path.split(".")
    for part in outer:
        owner = getattr(owner, part)
    _put(owner, last, fn)
    for name, module in list(sys.modules.items()):
        if name.split(".")[0] not in ("nanochat_lib", saved.PACKAGE) or name.startswith("nanochat_lib.course"):
            continue
        for attribute, value in list(vars(module).items()):
            if value is old:
                _put(module, attribute, fn)
            elif type(value) is dict:
                for key, item in list(value.items()):
                    if item is old:
                        _put(value, key, fn)


def _put(owner: object, name: str, value: object) -> None:
    if isinstance(owner, dict):
        _undo.append((owner, name, owner[name]))
        owner[name] = value
    else:
        _undo.append((owner, name, vars(owner)[name]))
        setattr(owner, name, value)


def uninstall() -> None:
    """Puts the library's own functions back."""
    while _undo:
        owner, name, value = _undo.pop()
        if isinstance(owner, dict):
            owner[name] = value
        else:
            setattr(owner, name, value)
    registry.originals.clear()
