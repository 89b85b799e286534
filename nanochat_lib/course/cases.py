"""What a checks module is written in: exercises with their cases and causes, quizzes, predictions.

    Exercise("tokenizer.merge", cases=[example(…), prop(…), reference(…), budget(…)], causes=[suspect(…), sign(…)], …)

Plain data; checker.py runs it. `make` functions get a numpy Generator that depends on the exercise, the case and the
seed alone, and return the tuple of arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


class Missing:
    """Stands for "no expected value given", which is not the same as None."""

    def __repr__(self) -> str:
        return "MISSING"


MISSING = Missing()


@dataclass(frozen=True)
class raises:  # reads as a word in a case
    """Expected "value" of a case that must end in an exception, with `words` in its message."""

    error: type[BaseException]
    words: str = ""


@dataclass(frozen=True)
class Case:
    name: str
    kind: str  # example, property, reference, budget
    make: Callable  # (rng) -> tuple of arguments
    expected: object = MISSING
    holds: Callable | None = None  # (out, *args) -> "" or what is wrong
    against: Callable | None = None  # in place of the library's function
    call: Callable | None = None  # (fn, *args) -> result
    rtol: float | None = None
    atol: float | None = None
    dtype: str | bool | None = None  # the exact dtype of the result; True: that of the expected one
    limits: Mapping[str, float] = field(default_factory=dict)
    why: str = ""  # the likely cause when a budget is exceeded


def example(
    name: str,
    args: tuple | Callable[[], tuple],
    expected: object,
    *,
    call: Callable | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    dtype: str | bool | None = None,
) -> Case:
    """`fn(*args)` must give `expected`. `args` may be a function without arguments that makes the tuple."""
    if not callable(args) and not isinstance(args, tuple):
        raise TypeError(f"case {name!r}: the arguments must be a tuple, got {type(args).__name__}; one is written (x,)")
    make = (lambda rng: args()) if callable(args) else (lambda rng: args)
    return Case(name, "example", make, expected, call=call, rtol=rtol, atol=atol, dtype=dtype)


def prop(name: str, make: Callable, holds: Callable, *, call: Callable | None = None) -> Case:
    """`holds(fn(*args), *args)` must give "" (or True); a sentence says what is wrong, False says only that it is."""
    return Case(name, "property", make, holds=holds, call=call)


def reference(
    name: str,
    make: Callable,
    *,
    against: Callable | None = None,
    call: Callable | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    dtype: str | bool | None = None,
) -> Case:
    """The result must be that of the library's function (or of `against`) on the same arguments.

    Tolerance by default from the dtype: 1e-9 of the largest expected magnitude in float64, 2e-5 in float32, 2e-2 below.
    """
    return Case(name, "reference", make, against=against, call=call, rtol=rtol, atol=atol, dtype=dtype)


RESOURCES = ("time", "jaxpr", "flops", "bytes", "temp_bytes", "peak_bytes")


def budget(
    name: str,
    make: Callable,
    *,
    against: Callable | None = None,
    call: Callable | None = None,
    why: str = "",
    **limits: float,
) -> Case:
    """At most so much of a resource, with the results checked by the other cases first.

    time=5.0           at most 5 times the library's (or `against`'s) time, measured side by side in this run
    jaxpr=40           at most 40 equations, nested ones counted; wrappers such as jit count only what they hold
    flops=, bytes=     what the compiler counts (cost_analysis)
    temp_bytes=        the compiled function's scratch memory (memory_analysis)
    peak_bytes=        Python and numpy memory at its highest during the call (tracemalloc)
    X_ratio=1.2        any of them as a multiple of the library's

    `why` is the likely cause that is said when it costs more.
    """
    known = {*RESOURCES, *(f"{name}_ratio" for name in RESOURCES[1:])}
    if not limits or set(limits) - known:
        raise TypeError(f"case {name!r}: limits {sorted(limits)} must be among {', '.join(sorted(known))}")
    return Case(name, "budget", make, against=against, call=call, limits=limits, why=why)


@dataclass(frozen=True)
class Cause:
    """Said as the likely cause when `test(got, want, args, call)` is true."""

    words: str
    wrong: Callable | None = None  # suspect: (*args) -> a known wrong result
    seen: Callable | None = None  # sign: (got, want, *args) -> bool


def suspect(words: str, wrong: Callable) -> Cause:
    """The likely cause when the learner's result equals `wrong(*args)` (with or without the exercise's harness)."""
    return Cause(words, wrong=wrong)


def sign(words: str, seen: Callable) -> Cause:
    """The likely cause when `seen(got, want, *args)` is true; where a case has no expected value, `want` is None."""
    return Cause(words, seen=seen)


@dataclass(frozen=True)
class Exercise:
    id: str
    cases: Sequence[Case]
    hints: Sequence[object]  # two texts and a function that gives a text, a figure or a list of them
    causes: Sequence[Cause] = ()
    steps: Callable | None = None  # (*args) -> right intermediates by name, in order
    call: Callable | None = None  # (fn, *args) -> result, for every case that has none of its own
    fallback: Callable | None = None  # stands in for the library's function where there is none
    library: str = ""  # "nanochat_lib.bpe:merge", only where no exercise cell says it
    mutates: bool = False  # the function may change its arguments

    def __post_init__(self) -> None:
        names = [case.name for case in self.cases]
        if len(set(names)) != len(names):
            raise TypeError(f"{self.id}: two cases have the same name")
        if len(self.hints) != 3 or not callable(self.hints[2]) or any(callable(h) for h in self.hints[:2]):
            raise TypeError(f"{self.id}: hints are exactly three: text, text, a function that gives the right output")


@dataclass(frozen=True)
class Option:
    text: str
    why: str
    right: bool = False


@dataclass(frozen=True)
class Quiz:
    id: str
    question: str
    options: Sequence[Option]

    def __post_init__(self) -> None:
        if len(self.options) < 2 or sum(option.right for option in self.options) != 1:
            raise TypeError(f"{self.id}: a quiz has two options or more, of which one is right")
        if not all(option.why.strip() for option in self.options):
            raise TypeError(f"{self.id}: every option says why it is right or wrong")


@dataclass(frozen=True)
class Prediction:
    id: str
    question: str
    unit: str = ""
