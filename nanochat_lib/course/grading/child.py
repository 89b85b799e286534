"""What runs beside a learner's code: reads arguments, calls the learner's function, sends back what it gave.

It knows no right result, so a learner's code can find none here, whatever it does to this process. Everything that goes
back is checked by the grader; each message carries the word that the request came with.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time

from nanochat_lib.course import checker, mishaps, namespace, registry
from nanochat_lib.course.grading import drivers, wire

MEASURING = (  # what a budget or a harness measures with; whoever changes it is not measured
    "jax:make_jaxpr", "jax:jit", "time:process_time", "time:perf_counter", "tracemalloc:get_traced_memory",
    "nanochat_lib.course.budgets:measured", "nanochat_lib.course.checker:observe",
)  # fmt: skip


class Line:
    """Frames on a socket."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def read(self) -> object | None:
        """The next message; None at the end."""
        head = self._take(8)
        if head is None:
            return None
        rest = self._take(int.from_bytes(head, "big"))
        return None if rest is None else wire.decode(head + rest, wire.any_class, on_jax=True)

    def _take(self, size: int) -> bytes | None:
        parts = []
        while size:
            part = os.read(self.fd, min(size, 1 << 20))
            if not part:
                return None
            parts.append(part)
            size -= len(part)
        return b"".join(parts)

    def write(self, message: object) -> None:
        data = memoryview(wire.encode(message))
        while data:
            data = data[os.write(self.fd, data) :]


def work(fd: int) -> None:
    """Serves one submission: exercise after exercise, as the grader asks."""
    line, names, functions, before = Line(fd), namespace.fresh(), {}, _measuring()
    while (request := line.read()) is not None:
        reply = _load(request, names, functions) if request["do"] == "load" else _call(request, functions)
        line.write({"word": request["word"], "patched": not before.items() <= _measuring().items(), **reply})


def _load(request: dict, names: dict, functions: dict) -> dict:
    """Runs pieces of code one after the other: the chapter's own, or the learner's cell, whose function is kept."""
    for name, symbol in request["restore"].items():  # an earlier exercise that failed: a right one stands in
        right = registry.resolve(symbol[8:]) if symbol.startswith("library:") else registry.exercise(symbol).fallback
        names[name] = right
    for source, label, learners in request["pieces"]:
        try:
            with mishaps.staying(), mishaps.patience(request["wall"]), mishaps.patience(request["seconds"], busy=True):
                namespace.run(source, label, names)
        except BaseException as error:  # noqa: B036 - whatever a learner's cell raises is told, not raised
            where = f", line {error.lineno}" if isinstance(error, SyntaxError) else ""
            text = _safely(lambda e=error: str(getattr(e, "msg", e)))
            words = f"{label} does not run ({type(error).__name__}: {text}{where})"
            return {"problem": words[:500], "own": not learners}
    name = request["name"]
    if name and not callable(names.get(name)):
        return {"problem": f"the cell defines no function {name}", "own": False}
    functions[request["id"]] = names.get(name)
    return {"problem": "", "own": False}


def _call(request: dict, functions: dict) -> dict:
    """One case: the function's result, or what was measured."""
    fn, args = functions[request["id"]], wire.decode(request["args"], wire.any_class)
    exercise = dataclasses.replace(STANDING, id=request["id"], mutates=request["mutates"])
    call = drivers.unpack(request["call"]) or (lambda fn, *args: fn(*args))
    began = time.monotonic()
    checker.PATIENCE = request["wall"]
    if request["limits"]:
        case = checker.Case(request["case"], "budget", tuple, limits=request["limits"])
        with mishaps.patience(request["seconds"], busy=True):
            measured = checker.measure(exercise, case, fn, args, call, drivers.unpack(request["against"]))
        reply = {"error": _fields(measured)} if isinstance(measured, mishaps.Raised) else {"measured": measured}
    else:
        with mishaps.patience(request["seconds"], busy=True):
            seen = checker.observe(exercise, fn, args, call)
        reply = {"error": _fields(seen.error)} if seen.error else {"got": seen.got, "changed": seen.changed[:80]}
        if request["notes"]:
            reply["noted"] = {str(key): value for key, value in list(seen.noted.items())[:20]}
    return {"seconds": time.monotonic() - began, **_bounded(reply, request["most"])}


def _bounded(reply: dict, most: int) -> dict:
    """What is told of the case as a frame of its own, or a word about its size: too large is not worth sending.

    The same results give the same bytes, so that the grader knows what most learners give without reading it.
    """
    told = wire.encode(reply)
    if len(told) > most and reply.pop("noted", None) is not None:
        told = wire.encode(reply)
    return {"told": told} if len(told) <= most else {"large": len(told)}


def _fields(error: mishaps.Raised) -> dict:
    fields = dataclasses.asdict(error)
    fields["kinds"] = [name[:120] for name in error.kinds[:20]]
    return fields | {"text": error.text[:500], "line": error.line[:200]}


def _safely(words: object) -> str:
    try:
        return words()
    except Exception:  # an exception's own __str__ may raise
        return ""


def _measuring() -> dict[str, int]:
    """Which functions measure, as they stand now."""
    found = {}
    for name in MEASURING:
        module, _, attribute = name.partition(":")
        if module in sys.modules:
            found[name] = id(getattr(sys.modules[module], attribute, None))
    return found


STANDING = registry.Exercise("none", [], ("", "", lambda: ""))  # the child needs no cases, causes or hints
