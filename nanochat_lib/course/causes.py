"""The likely cause of a wrong result in words: the exercise's own suspects first, then what goes wrong everywhere."""

from __future__ import annotations

import inspect
from collections.abc import Callable

import numpy as np

from nanochat_lib.course.cases import MISSING, Cause
from nanochat_lib.course.compare import Difference, difference
from nanochat_lib.course.values import array_kind, dtype_name, fresh, is_array, is_traced, to_numpy

CLOSE = 1e-4  # two results this near to a simple relation have it


def likely_cause(
    got: object,
    want: object,
    args: tuple,
    found: Difference | None,
    causes: tuple[Cause, ...],
    call: Callable,
    fn: object,
) -> str:
    """One sentence, or "" when nothing fits. `found` is the difference between got and want where want is known."""
    for cause in causes:
        if _fits(cause, got, want, args, call):
            return cause.words
    try:
        return generic(got, want, found, fn) if found else ""
    except Exception:  # a result may be anything at all; the difference itself is told in any case
        return ""


def _fits(cause: Cause, got: object, want: object, args: tuple, call: Callable) -> bool:
    """Whether a cause of the exercise explains the result. A cause that raises does not fit."""
    if cause.seen is not None:
        try:
            return bool(cause.seen(got, None if want is MISSING else want, *fresh(args)))
        except Exception:
            return False
    for way in (lambda: call(cause.wrong, *fresh(args)), lambda: cause.wrong(*fresh(args))):
        try:
            wrong = way()
        except Exception:
            continue
        if wrong is not None and difference(got, wrong, args=args) is None:
            return True
    return False


def generic(got: object, want: object, found: Difference, fn: object) -> str:
    """What the difference looks like, whatever the exercise."""
    if found.kind == "none":
        return _returned_nothing(found, fn)
    if found.kind == "type":
        return _wrong_type(found.got, found.want)
    got, want = found.got, found.want
    if found.kind in ("shape", "dtype", "nan", "value") and _numeric(got) and _numeric(want):
        a, b = np.asarray(to_numpy(got)), np.asarray(to_numpy(want))
        if found.kind == "shape":
            return _wrong_shape(a, b)
        if found.kind == "dtype":
            return _wrong_dtype(got, want)
        if found.kind == "nan":
            return (
                "NaN comes from 0/0, inf - inf, 0 × inf, the log or root of something negative, or a row masked whole"
            )
        if a.size and a.dtype.kind in "biufc":
            return _relation(a.astype(complex), b.astype(complex), found)
    if found.kind == "length" and isinstance(got, (list, tuple, str, bytes)):
        return _wrong_length(got, want)
    if found.kind == "value" and isinstance(want, (str, bytes)) and isinstance(got, type(want)):
        if got[::-1] == want:
            return "it is the right result, reversed"
        if sorted(got) == sorted(want):
            return "the right elements, in another order"
    return ""


def _numeric(value: object) -> bool:
    if is_array(value):
        return not is_traced(value)
    if isinstance(value, (list, tuple)):
        return bool(value) and all(isinstance(v, (int, float, np.number)) for v in value)
    return isinstance(value, (int, float, complex, np.generic))


def _returned_nothing(found: Difference, fn: object) -> str:
    if found.path:
        return f"None stands at {found.path}: was it never filled in?"
    try:
        source = inspect.getsource(fn)
    except (OSError, TypeError):
        source = "return"
    if "return" not in source:
        return "the function has no `return`, so it gives None"
    return "the function returned None: does every path end in `return` with the result?"


def _wrong_type(got: object, want: object) -> str:
    if inspect.isgenerator(got):
        return "the function has a `yield`, so it gives a generator; collect the values and return them"
    if callable(got):
        return "a function was returned, not its result: are the call's brackets missing?"
    if is_traced(got):
        return "a value of jit or grad got out of the traced function; return it instead of keeping it outside"
    if isinstance(got, tuple) and not isinstance(want, tuple):
        return "more was returned than asked for (a tuple): a trailing comma, or several values after `return`?"
    if isinstance(want, list) and is_array(got):
        return "turn the array into a list with .tolist()"
    if is_array(want) and isinstance(got, (list, tuple)):
        return "make an array of it, with jnp.asarray or np.asarray"
    if isinstance(want, bytes) and isinstance(got, str):
        return "text and bytes are different things: .encode() makes bytes of text"
    if isinstance(want, str) and isinstance(got, bytes):
        return "text and bytes are different things: .decode() makes text of bytes"
    return ""


def _wrong_shape(got: np.ndarray, want: np.ndarray) -> str:
    if got.ndim == want.ndim and got.ndim >= 2 and sorted(got.shape) == sorted(want.shape):
        for axes in _axis_swaps(got.ndim):
            swapped = got.transpose(axes)
            if swapped.shape == want.shape and np.allclose(swapped, want, rtol=1e-3, equal_nan=True):
                return "it is the right result, transposed"
        return "the right sizes in another order: are two axes swapped?"
    if got.squeeze().shape == want.squeeze().shape:
        return "an axis of size 1 too many or too few: see keepdims=, [:, None] or squeeze"
    if got.size == want.size:
        return "the right number of values in the wrong shape: a reshape is missing or has its axes mixed"
    if got.ndim < want.ndim:
        return "an axis is lost: was it summed or averaged over, or indexed away?"
    if got.ndim > want.ndim:
        return "an axis too many: was a sum or mean over it forgotten, or did two shapes broadcast against each other?"
    off = [(i, a - b) for i, (a, b) in enumerate(zip(got.shape, want.shape, strict=True)) if a != b]
    if len(off) == 1 and abs(off[0][1]) == 1:
        return f"axis {off[0][0]} is one too {'long' if off[0][1] > 0 else 'short'}: a slice that is off by one?"
    return ""


def _axis_swaps(ndim: int) -> list[list[int]]:
    swaps = []
    for i in range(ndim):
        for j in range(i + 1, ndim):
            axes = list(range(ndim))
            axes[i], axes[j] = j, i
            swaps.append(axes)
    return swaps


def _wrong_dtype(got: object, want: object) -> str:
    got_kind, want_kind = array_kind(got), array_kind(want)
    if (got_kind, want_kind) == ("int", "float"):
        return "whole numbers where fractions are wanted: `//` in place of `/`, or a cast to int?"
    if (got_kind, want_kind) == ("float", "int"):
        return "fractions where whole numbers are wanted: `/` in place of `//`, or a cast that is missing?"
    if got_kind == want_kind:
        return f"cast the result with .astype({dtype_name(want)}), or keep the input's dtype"
    return ""


def _relation(got: np.ndarray, want: np.ndarray, found: Difference) -> str:
    """How an array of the right shape relates to the right one."""
    if not np.isfinite(want).all():
        infinite = np.isinf(want)
        if infinite.any() and np.isfinite(got[infinite]).any():
            return "values that must be infinite (masked) are finite"
        return ""
    if not np.isfinite(got).all():
        return "infinite values: a division by zero, or an exponential that overflows?"
    scale = np.abs(want).max() or 1.0

    def same(a: np.ndarray, b: np.ndarray) -> bool:
        return a.shape == b.shape and float(np.abs(a - b).max()) <= CLOSE * scale

    if found.largest is not None and found.allowed and found.largest <= 30 * found.allowed:
        return "nearly right: a lower precision in between, or an epsilon in another place?"
    if got.size > 1 and not got.any():
        return "every value is zero"
    if got.ndim >= 2:
        for axes in _axis_swaps(got.ndim):
            if same(got.transpose(axes), want):
                return "it is the right result, transposed"
    big = np.abs(want) > 1e-3 * scale
    if (big.sum() > 1 or got.size == 1) and big.any():
        ratios = got[big] / want[big]
        factor = ratios.flat[0]
        if np.abs(ratios - factor).max() <= CLOSE * max(abs(factor), 1e-30) and same(got, want * factor):
            if abs(factor + 1) < CLOSE:
                return "the sign is wrong"
            if got.size > 1 and factor.imag == 0 and abs(factor) > 1e-12:
                return f"every value is {_factor(factor.real)} the right one: a factor is missing or too many"
    if got.size > 1:
        offset = (got - want).flat[0]
        if same(got, want + offset):
            return f"every value is off by the same {offset.real:.4g}"
    for axis in range(got.ndim):
        if got.shape[axis] > 1:
            if same(np.flip(got, axis), want):
                return f"it is the right result, reversed along axis {axis}" if got.ndim > 1 else "it is reversed"
            for step in (1, -1):
                if got.shape[axis] > 2 and same(*_shifted(got, want, axis, step)):
                    return f"the values are shifted by one place{f' along axis {axis}' if got.ndim > 1 else ''}"
    if got.size > 2 and same(np.sort(got.ravel()), np.sort(want.ravel())):
        return "the right values, in another order"
    if got.size == 1 and want.item().imag == 0 and want.item().real.is_integer() and abs((got - want).item()) == 1:
        return "off by one"
    return _where(np.abs(got - want) > (found.allowed or 0.0))


def _shifted(got: np.ndarray, want: np.ndarray, axis: int, step: int) -> tuple[np.ndarray, np.ndarray]:
    early = [slice(None)] * got.ndim
    late = list(early)
    early[axis], late[axis] = slice(None, -1), slice(1, None)
    return (got[tuple(late)], want[tuple(early)]) if step > 0 else (got[tuple(early)], want[tuple(late)])


def _factor(factor: float) -> str:
    for text, value in (("half", 0.5), ("twice", 2.0), ("a third of", 1 / 3), ("a quarter of", 0.25)):
        if abs(factor / value - 1) < CLOSE:
            return text
    return f"{factor:.4g} times" if abs(factor) >= 1 else f"{factor:.4g} times (1/{1 / factor:.4g} of)"


def _where(bad: np.ndarray) -> str:
    """Names the one row, column, … that holds every wrong value."""
    for axis in range(bad.ndim):
        rest = tuple(a for a in range(bad.ndim) if a != axis)
        lines = np.flatnonzero(bad.any(axis=rest)) if rest else np.flatnonzero(bad)
        if len(lines) == 1 and bad.shape[axis] > 2:
            at = int(lines[0])
            name = {0: "the first", bad.shape[axis] - 1: "the last"}.get(at, f"number {at}")
            return (
                f"all wrong values stand in {name} along axis {axis}" if bad.ndim > 1 else f"only {name} value is wrong"
            )
    return ""


def _wrong_length(got: object, want: object) -> str:
    if not len(got):
        return "the result is empty"
    if len(got) == len(want) - 1:
        if list(got) == list(want)[:-1]:
            return "the last element is missing: a loop that ends one too early?"
        if list(got) == list(want)[1:]:
            return "the first element is missing"
    if len(got) == len(want) + 1:
        if list(got)[:-1] == list(want):
            return "one element too many at the end: a loop that ends one too late?"
        if list(got)[1:] == list(want):
            return "one element too many at the front"
    return ""
