"""`check(id, fn)`: runs an exercise's cases on a function and says what is wrong, where first, and why, probably."""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from nanochat_lib.course import budgets, registry
from nanochat_lib.course.cases import MISSING, Case, Exercise, raises
from nanochat_lib.course.causes import likely_cause
from nanochat_lib.course.compare import Difference, difference
from nanochat_lib.course.mishaps import Raised, TookTooLong, patience, raised, staying
from nanochat_lib.course.mode import CourseError, strict
from nanochat_lib.course.notes import recording
from nanochat_lib.course.result import FAILED, NOT_ATTEMPTED, NOT_RUN, PASSED, Result, Row
from nanochat_lib.course.values import describe, fresh, is_traced

PATIENCE = 60.0  # seconds after which a case is stopped


def check(exercise_id: str, fn: Callable, source: str | None = None) -> Result:
    """Runs the public cases of an exercise on your function, shows the result, and keeps what passes.

    A passing function is saved in my_nanochat/ for later chapters. `source` is its text, where Python cannot find it.
    With COURSE_STRICT=1 anything but a pass raises CourseError.
    """
    from nanochat_lib.course import saved
    from nanochat_lib.course.showing import emit

    result = run_cases(exercise_id, fn)
    line = saved.keep(exercise_id, fn, result, source)
    result.footer = [line] if line else []
    if strict() and not result.passed:
        raise CourseError(f"{exercise_id}\n{result.text}")
    emit(result.text, result.html)
    return result


def run_cases(
    exercise_id: str, fn: Callable, cases: Sequence[Case] | None = None, seed: int = 0, budgets_too: bool = True
) -> Result:
    """Runs `cases` (by default the public ones) of an exercise on `fn`. Shows and records nothing.

    Budgets are measured when everything else passes. A mistake in the cases themselves (the library's function fails or
    gives None) is raised, not reported as the learner's.
    """
    exercise = registry.exercise(exercise_id)
    cases = list(exercise.cases if cases is None else cases)
    if not cases:
        raise TypeError(f"{exercise_id} has no cases to run")
    if not callable(fn):
        row = Row("call", "example", FAILED, cause=f"check needs the function itself, got {describe(fn)}")
        return Result(exercise_id, [row])
    rows: list[Row] = []
    ordinary = [case for case in cases if case.kind != "budget"]
    for case in ordinary:
        if rows and rows[-1].endless:  # one minute of waiting is enough
            rows += [Row(other.name, other.kind, NOT_RUN) for other in ordinary[len(rows) :]]
            break
        row = _run(exercise, case, fn, seed)
        rows.append(row)
        if row.status == NOT_ATTEMPTED:
            rows = [Row(other.name, other.kind, NOT_ATTEMPTED) for other in cases]
            return Result(exercise_id, rows)
    right = all(row.status == PASSED for row in rows)
    for case in cases:
        if case.kind == "budget":
            rows.append(
                _budget(exercise, case, fn, seed) if right and budgets_too else Row(case.name, "budget", NOT_RUN)
            )
    order = {case.name: i for i, case in enumerate(cases)}
    rows.sort(key=lambda row: order[row.case])
    if not budgets_too:
        rows = [row for row in rows if row.kind != "budget"]
    return Result(exercise_id, rows)


def arguments(exercise_id: str, case: Case, seed: int = 0) -> tuple:
    """The arguments of a case: the same for the same exercise, case and seed."""
    entropy = [zlib.crc32(exercise_id.encode()), zlib.crc32(case.name.encode()), seed]
    args = case.make(np.random.default_rng(entropy))
    if not isinstance(args, tuple):
        raise TypeError(f"{exercise_id}, case {case.name!r}: make must return a tuple, got {type(args).__name__}")
    return args


def _plain_call(fn: Callable, *args: object) -> object:
    return fn(*args)


@dataclass
class Observed:
    """What one call gave: a result or an exception, what it noted, and the argument that it changed."""

    got: object = MISSING
    error: Raised | None = None
    noted: dict[str, object] = field(default_factory=dict)
    changed: str = ""


def _run(exercise: Exercise, case: Case, fn: Callable, seed: int) -> Row:
    """One case that is not a budget."""
    args = arguments(exercise.id, case, seed)
    call = calling(exercise, case)
    return judged(exercise, case, args, wanted(exercise, case, args), observe(exercise, fn, args, call), fn)


def calling(exercise: Exercise, case: Case) -> Callable:
    """How a case calls the function: (fn, *args) -> result."""
    return case.call or exercise.call or _plain_call


def observe(exercise: Exercise, fn: Callable, args: tuple, call: Callable) -> Observed:
    """Calls the function on a copy of the arguments."""
    used = fresh(args)
    with recording() as noted:
        seen = Observed(noted=noted)
        try:
            with staying(), patience(PATIENCE):
                seen.got = budgets.wait(call(fn, *used))
        except (Exception, SystemExit, TookTooLong) as error:  # whatever a learner's function may raise
            seen.error = raised(error, fn)
    if seen.error is None and not exercise.mutates:
        seen.changed = mutated(used, args, fn)
    return seen


def judged(exercise: Exercise, case: Case, args: tuple, want: object, seen: Observed, fn: Callable) -> Row:
    """The row of a case, from what was wanted and what was seen. `fn` gives names only; it is not called."""
    row, got, error = Row(case.name, case.kind, PASSED, called=called_with(fn, args)), seen.got, seen.error
    if error is not None and error.stub and not isinstance(want, raises):
        return Row(case.name, case.kind, NOT_ATTEMPTED)
    if isinstance(want, raises):
        _judge_error(row, want, got, error)
        return row
    if error is not None:
        row.fail(got=error.words, cause=error.cause, expected=_expectation(want))
        row.where, row.endless = error.line, error.endless
        row.step = first_wrong_step(exercise, args, seen.noted)
        return row
    found = None
    if case.kind == "property":
        _judge_property(row, case, got, args)
    else:
        found = difference(got, want, rtol=case.rtol, atol=case.atol, dtype=case.dtype, args=args)
        if found:
            row.fail(got=describe(got), expected=describe(want), where=found.message)
            row.index, row.heat, row.difference = found.index, found.heat, found
    if row.status == PASSED and seen.changed:
        row.fail(cause=f"the function changed its argument {seen.changed}; work on a copy, or build a new value")
    if row.status == FAILED and not row.cause:
        row.step = first_wrong_step(exercise, args, seen.noted)
        row.cause = likely_cause(got, want, args, found, tuple(exercise.causes), calling(exercise, case), fn)
    return row


def wanted(exercise: Exercise, case: Case, args: tuple) -> object:
    """The expected value of a case; MISSING for a property."""
    if case.kind == "property" or case.expected is not MISSING:
        return case.expected
    right = case.against or registry.library_function(exercise.id)
    if right is None:
        raise TypeError(f"{exercise.id}, case {case.name!r}: names neither a library function nor against=")
    want = budgets.wait(calling(exercise, case)(right, *fresh(args)))
    if want is None:
        raise TypeError(f"{exercise.id}, case {case.name!r}: the reference returned None, which would prove nothing")
    return want


def _judge_error(row: Row, want: raises, got: object, error: Raised | None) -> None:
    expected = f"{want.error.__name__}{f' that says {want.words!r}' if want.words else ''}"
    if error is None:
        row.fail(expected=expected, got=describe(got), cause=f"bad input was accepted; raise {want.error.__name__}")
    elif not error.is_a(want.error):
        row.fail(expected=expected, got=error.words, cause="another kind of exception than asked for")
    elif want.words.lower() not in error.text.lower():
        row.fail(expected=expected, got=error.words, cause="the message does not say what it should")


def _judge_property(row: Row, case: Case, got: object, args: tuple) -> None:
    if got is None:
        row.fail(got="None", expected=case.name, where="got None, so the property cannot be checked")
        row.difference = Difference("none", "", got=None, want=MISSING)
        row.cause = "the function returned None: does every path end in `return` with the result?"
        return
    try:
        verdict = case.holds(got, *fresh(args))
    except Exception as error:  # a result of the wrong kind breaks the property's own code
        verdict = f"the result cannot be examined ({type(error).__name__}: {error})"
    if isinstance(verdict, str):
        if verdict:
            row.fail(got=describe(got), expected=case.name, where=verdict)
    elif not bool(verdict):
        row.fail(got=describe(got), expected=case.name, where="the property does not hold")


def _budget(exercise: Exercise, case: Case, fn: Callable, seed: int) -> Row:
    args = arguments(exercise.id, case, seed)
    row = Row(case.name, "budget", PASSED, called=called_with(fn, args))
    measured = measure(exercise, case, fn, args, calling(exercise, case), compared_with(exercise, case))
    judge_budget(row, case, measured)
    return row


def compared_with(exercise: Exercise, case: Case) -> Callable | None:
    """The function that a budget's ratios compare with."""
    right = case.against or registry.library_function(exercise.id)
    if right is None and any(name == "time" or name.endswith("_ratio") for name in case.limits):
        raise TypeError(f"{exercise.id}, case {case.name!r}: a ratio needs a library function or against=")
    return right


def measure(
    exercise: Exercise, case: Case, fn: Callable, args: tuple, call: Callable, right: Callable | None
) -> dict[str, tuple[float, float]] | Raised:
    """What the function costs beside `right`, by the names of the case's limits; or the exception that it raised."""
    try:
        with staying(), patience(2 * PATIENCE):
            return budgets.measured(
                lambda *a: call(fn, *a), right and (lambda *a: call(right, *a)), args, case.limits, exercise.mutates
            )
    except (Exception, SystemExit, TookTooLong) as error:
        return raised(error, fn)


def judge_budget(row: Row, case: Case, measured: dict[str, tuple[float, float]] | Raised) -> None:
    """Fails the row of a budget when more was used than is allowed."""
    if isinstance(measured, Raised):
        row.fail(got=measured.words, cause=measured.cause)
        row.where = measured.line
    elif over := budgets.over(measured, case.limits):
        row.fail(where="; ".join(over))
        row.cause = case.why or "right, but it costs too much"


def first_wrong_step(exercise: Exercise, args: tuple, noted: dict[str, object]) -> str:
    """The first noted intermediate that differs from the right one, as a sentence; "" when none does."""
    if exercise.steps is None or not noted:
        return ""
    for name, right in exercise.steps(*fresh(args)).items():
        if name in noted and not is_traced(noted[name]):
            found = difference(noted[name], right, args=args)
            if found:
                return f"{name}: {found.message}"
    return ""


def mutated(used: tuple, args: tuple, fn: Callable) -> str:
    """The name of the first argument that no longer equals its copy, "" when none changed."""
    for i, (after, before) in enumerate(zip(used, args, strict=True)):
        found = difference(after, before, rtol=0.0, atol=0.0)
        if found and found.kind != "object":
            return _names(fn, len(args))[i]
    return ""


def _names(fn: Callable, count: int) -> list[str]:
    """Names of the first `count` arguments, as far as the function tells."""
    try:
        names = [p.name for p in inspect.signature(fn).parameters.values() if p.kind is not p.VAR_POSITIONAL]
    except (TypeError, ValueError):
        names = []
    if len(names) < count:  # a harness gives the case's arguments another meaning
        names = []
    return [names[i] if i < len(names) else f"number {i + 1}" for i in range(count)]


def called_with(fn: Callable, args: tuple) -> str:
    return ", ".join(f"{name}={describe(arg, 48)}" for name, arg in zip(_names(fn, len(args)), args, strict=True))


def _expectation(want: object) -> str:
    return "" if want is MISSING else describe(want)
