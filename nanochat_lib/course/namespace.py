"""The part of a chapter that its exercises stand on, run without the rest: imports, setup cells, exercise cells."""

from __future__ import annotations

import linecache
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from nanochat_lib.course.names import imports


@dataclass(frozen=True)
class Piece:
    """A piece of code and how errors call it."""

    source: str
    label: str
    exercise: str = ""  # id, "" for imports and setup


def pieces(code: Iterable[tuple[str, str, bool, str]]) -> Iterator[Piece]:
    """Of (source, label, is it setup?, exercise id or "") cells in order: whole ones, or only their imports."""
    for source, label, setup, exercise in code:
        kept = source if setup or exercise else imports(source)
        if kept.strip():
            yield Piece(kept, label, exercise)


def run(source: str, label: str, namespace: dict) -> None:
    """Runs code in `namespace`; tracebacks and inspect find its lines under `label`."""
    linecache.cache[label] = (len(source), None, source.splitlines(True), label)
    exec(compile(source, label, "exec", dont_inherit=True), namespace)


def fresh() -> dict:
    return {"__name__": "__main__", "__builtins__": __builtins__}
