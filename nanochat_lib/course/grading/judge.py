"""What a child sent back against the right result: rows, as the learner's own notebook shows them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from inspect import Parameter, Signature

from nanochat_lib.course import checker, mishaps
from nanochat_lib.course.cases import MISSING, Case, Exercise
from nanochat_lib.course.grading import wire
from nanochat_lib.course.grading.key import Put, Question
from nanochat_lib.course.result import PASSED, Row


@dataclass
class Judged:
    """One exercise of one submission."""

    id: str
    rows: list[Row] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # case -> in the child
    handed_in: bool = True
    closed: bool = False  # nothing is left to run

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.status == PASSED for row in self.rows)

    @property
    def right(self) -> bool:
        """So far nothing but budgets has failed."""
        return bool(self.rows) and all(row.status == PASSED for row in self.rows if row.kind != "budget")

    def close(self, question: Question, status: str, cause: str = "") -> Judged:
        """The same for all cases."""
        self.rows = [Row(case.name, case.kind, status, cause=cause) for case in question.cases]
        self.closed = True
        return self


class Names:
    """Stands for the learner's function where a message names its arguments."""

    def __init__(self, name: str, parameters: tuple[str, ...]) -> None:
        named = [Parameter(parameter, Parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters]
        self.__name__, self.__signature__ = name, Signature(named)

    def __call__(self, *args: object) -> None:
        raise TypeError("a learner's function is never called in the grader")


def judge(question: Question, case: Case, put: Put, reply: dict, names: Names) -> Row:
    """A child's reply against the right result."""
    error = reply.get("error")
    if error is not None:
        fields = {key: error[key] for key in ("kinds", "text", "line", "stub", "endless")}
        error = mishaps.Raised(tuple(map(str, fields.pop("kinds"))) or ("?:?",), **fields)
    if case.limits:
        row = Row(case.name, "budget", PASSED)
        measured = error or {
            name: (float(reply["measured"][name][0]), float(reply["measured"][name][1])) for name in case.limits
        }
        checker.judge_budget(row, case, measured)
        return row
    noted = reply.get("noted") if isinstance(reply.get("noted"), dict) else {}
    seen = checker.Observed(reply.get("got", MISSING) if error is None else MISSING, error, noted)
    if changed := reply.get("changed"):  # a name from the child; one that is none of the function's is not repeated
        known = [*names.__signature__.parameters, *(f"number {i + 1}" for i in range(len(put.args)))]
        seen.changed = changed if changed in known else "(one of them)"
    if error is None and "got" not in reply:
        raise wire.BadFrame("neither a result nor an error")
    return checker.judged(*remembering(question.exercise, case, put), put.args, put.want, seen, names)


def plainly(fn: Callable, *args: object) -> object:
    return fn(*args)


class Known:
    """A function of a case's arguments alone, called once for all learners: a suspected cause, the right steps."""

    def __init__(self, fn: Callable, kept: dict, name: object) -> None:
        self.fn, self.kept, self.name = fn, kept, name

    def __call__(self, *args: object) -> object:
        return self.under(plainly, args)

    def under(self, call: Callable, args: tuple) -> object:
        """Its result, or the exception that it raised, when `call` calls it."""
        name = self.name, call
        if name not in self.kept:
            try:
                self.kept[name] = call(self.fn, *args), None
            except Exception as error:
                self.kept[name] = None, error.with_traceback(None)
        value, error = self.kept[name]
        if error is not None:
            raise error.with_traceback(None)
        return value


def remembering(exercise: Exercise, case: Case, put: Put) -> tuple[Exercise, Case]:
    """Both such that what does not depend on the learner's result is computed once for these arguments.

    A suspected cause is a JAX program of its own for each case; a class of wrong answers asks for it again and again.
    """
    call = case.call or exercise.call or plainly

    def asked(fn: object, *args: object) -> object:
        return fn.under(call, args) if isinstance(fn, Known) else call(fn, *args)

    causes = [
        replace(cause, wrong=Known(cause.wrong, put.known, number)) if cause.wrong else cause
        for number, cause in enumerate(exercise.causes)
    ]
    steps = exercise.steps and Known(exercise.steps, put.known, "steps")
    return replace(exercise, causes=causes, steps=steps), replace(case, call=asked)


def fingerprint(question: Question, case: Case, seed: int, told: bytes) -> bytes:
    """The same for replies that must be judged alike: of all that a verdict depends on. b"" for a budget's.

    `told`: the child's frame about the case.
    """
    if case.limits:
        return b""
    return hashlib.sha256(wire.encode([question.id, case.name, seed]) + told).digest()


def slim(row: Row) -> Row:
    """A row without the arrays that it was made from: all that is told of it, and fit to be kept."""
    found = row.difference and replace(row.difference, got=None, want=None)
    return replace(row, heat=None, difference=found)
