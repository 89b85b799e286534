"""What differs between two results: type, shape, dtype, NaN, length, keys or values, and where first.

Works on numbers, text, bytes, lists, tuples, dicts, sets, named tuples, dataclasses and on arrays of numpy, JAX and
PyTorch, nested as one likes. None equals None only; `True` is not 1.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set

import numpy as np

from nanochat_lib.course.differences import Difference, heat, number, place
from nanochat_lib.course.values import array_kind, describe, dtype_name, is_array, to_numpy

TOLERANCE = {"float64": 1e-9, "float32": 2e-5, "float16": 2e-2, "bfloat16": 2e-2}
HALF = ("bfloat16", "float16")


def difference(
    got: object,
    want: object,
    *,
    rtol: float | None = None,
    atol: float | None = None,
    dtype: str | bool | None = None,
    args: object = (),
) -> Difference | None:
    """The first difference, None when there is none.

    Floats may be off by `rtol` × the largest |want| of their array + `atol`. Without `rtol` it follows from the least
    precise float dtype among want, `args` and (for double-precision expectations) got. `dtype` asks for an exact dtype.
    """
    return _compare(got, want, "", _Rule(rtol, atol, dtype, coarsest(args)))


@dataclasses.dataclass(frozen=True)
class _Rule:
    rtol: float | None
    atol: float | None
    dtype: str | bool | None
    coarsest: float  # tolerance that the arguments' precision allows

    def allowed(self, got: np.ndarray, want: np.ndarray, got_name: str, want_name: str) -> float:
        rtol = self.rtol
        if rtol is None:
            rtol = max(TOLERANCE.get(want_name, 1e-9), self.coarsest)
            if got_name not in HALF:
                rtol = max(rtol, TOLERANCE.get(got_name, 0.0))
        finite = np.abs(want[np.isfinite(want)])
        scale = float(finite.max()) if finite.size else 0.0
        atol = (self.atol or 0.0) if scale or self.atol is not None else rtol
        return rtol * scale + atol


def coarsest(value: object, depth: int = 4) -> float:
    """The tolerance of the least precise float array inside `value`; 0 when there is none."""
    if is_array(value):
        return TOLERANCE.get(dtype_name(value), 0.0)
    if depth and isinstance(value, Mapping):
        value = list(value.values())
    if depth and isinstance(value, (list, tuple)):
        return max((coarsest(item, depth - 1) for item in value[:64]), default=0.0)
    return 0.0


def _compare(got: object, want: object, path: str, rule: _Rule) -> Difference | None:
    def differs(kind: str, message: str, **more: object) -> Difference:
        return Difference(kind, message, path, got=got, want=want, **more)

    if want is None or got is None:
        if want is got:
            return None
        if got is None:
            return differs("none", f"got None, expected {describe(want)}")
        return differs("type", f"expected None, got {describe(got)}")
    if is_array(want) and (want.ndim or not is_number(got)):
        if not is_array(got):
            return differs("type", f"expected an array, got {describe(got)}")
        return _arrays(got, want, path, rule)
    if is_number(want) or is_array(want):
        return _numbers(got, want, path, rule)
    if isinstance(want, (str, bytes, bytearray)):
        return _text(got, want, path)
    if isinstance(want, Mapping):
        return _mappings(got, want, path, rule)
    if isinstance(want, (list, tuple)):
        return _sequences(got, want, path, rule)
    if isinstance(want, Set):
        if not isinstance(got, Set):
            return differs("type", f"expected a set, got {describe(got)}")
        lacks, extra = sorted(map(repr, want - got)), sorted(map(repr, got - want))
        if lacks or extra:
            return differs("keys", _lacks_and_extra(lacks, extra))
        return None
    if dataclasses.is_dataclass(want) and not isinstance(want, type):
        if type(got).__name__ != type(want).__name__:
            return differs("type", f"expected {type(want).__name__}, got {describe(got)}")
        for field in dataclasses.fields(want):
            part = _compare(getattr(got, field.name, None), getattr(want, field.name), f"{path}.{field.name}", rule)
            if part:
                return part
        return None
    if got is want or (type(got) is type(want) and _plainly_equal(got, want)):
        return None
    return differs("object", f"expected {describe(want)}, got {describe(got)}")


def _plainly_equal(got: object, want: object) -> bool:
    try:
        return bool(got == want)
    except Exception:  # an object's own __eq__ may do anything
        return False


def is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float, complex, np.generic)) and not isinstance(value, (np.str_, np.bytes_))


def _numbers(got: object, want: object, path: str, rule: _Rule) -> Difference | None:
    """Scalars: Python's, numpy's, and arrays of one element without axes."""

    def differs(kind: str, message: str, **more: object) -> Difference:
        return Difference(kind, message, path, got=got, want=want, **more)

    if is_array(got) and got.ndim:
        return differs("shape", f"expected one number, got an array of shape {tuple(got.shape)}")
    if not (is_number(got) or is_array(got)):
        return differs("type", f"expected the number {describe(want)}, got {describe(got)}")
    got_kind, want_kind = array_kind(got), array_kind(want)
    if got_kind != want_kind and (got_kind, want_kind) not in (("int", "float"), ("float", "complex")):
        return differs("dtype", f"expected {_kind_words(want_kind)}, got {_kind_words(got_kind)}: {describe(got)}")
    if wrong := _wrong_dtype(got, want, rule):
        return differs("dtype", wrong)
    a, b = np.asarray(to_numpy(got)), np.asarray(to_numpy(want))
    if want_kind in ("bool", "int"):
        if a == b:
            return None
        off = abs(int(a) - int(b)) if want_kind == "int" else None
        return differs("value", f"expected {describe(want)}, got {describe(got)}", largest=off, allowed=0)
    if np.isnan(a) and not np.isnan(b):
        return differs("nan", f"got NaN, expected {describe(want)}")
    if (np.isnan(a) and np.isnan(b)) or a == b:
        return None
    allowed = rule.allowed(a, b, dtype_name(got), dtype_name(want))
    off = float(np.abs(a.astype(complex) - b.astype(complex)))
    if off <= allowed:
        return None
    return differs(
        "value", f"expected {describe(want)}, got {describe(got)} (off by {off:.3g}, allowed {allowed:.2g})",
        largest=off, allowed=allowed,
    )  # fmt: skip


def _kind_words(kind: str) -> str:
    return {"int": "whole numbers", "float": "floats", "bool": "True/False", "complex": "complex numbers"}.get(
        kind, kind
    )


def _wrong_dtype(got: object, want: object, rule: _Rule) -> str:
    """What is wrong about got's exact dtype, "" when nothing."""
    if not is_array(got):
        return ""
    name, expected = dtype_name(got), dtype_name(want)
    if isinstance(rule.dtype, str):
        return "" if name == rule.dtype else f"expected dtype {rule.dtype}, got {name}"
    asked = rule.dtype is True or (rule.dtype is None and is_array(want) and expected in HALF)
    return f"expected dtype {expected}, got {name}" if asked and name != expected else ""


def _arrays(got: object, want: object, path: str, rule: _Rule) -> Difference | None:
    def differs(kind: str, message: str, **more: object) -> Difference:
        return Difference(kind, message, path, got=got, want=want, **more)

    if tuple(got.shape) != tuple(want.shape):
        return differs("shape", f"expected shape {tuple(want.shape)}, got {tuple(got.shape)}")
    got_kind, want_kind = array_kind(got), array_kind(want)
    if got_kind != want_kind:
        words = f"expected {_kind_words(want_kind)} ({dtype_name(want)}), got {_kind_words(got_kind)}"
        return differs("dtype", f"{words} ({dtype_name(got)})")
    if wrong := _wrong_dtype(got, want, rule):
        return differs("dtype", wrong)
    a, b = to_numpy(got), to_numpy(want)
    if not a.size:
        return None
    if want_kind not in ("float", "complex"):
        off = (a != b) if a.dtype.kind in "bOSU" else np.abs(a.astype(np.float64) - b.astype(np.float64))
        bad, allowed = a != b, 0.0
    else:
        wide = np.complex128 if want_kind == "complex" else np.float64
        a, b = a.astype(wide), b.astype(wide)
        allowed = rule.allowed(a, b, dtype_name(got), dtype_name(want))
        with np.errstate(invalid="ignore"):
            same = (a == b) | (np.isnan(a) & np.isnan(b))
            off = np.where(same, 0.0, np.abs(a - b))
        bad = ~(off <= allowed)
    if not bad.any():
        return None
    index = tuple(int(i) for i in np.argwhere(bad)[0])
    off = np.asarray(off, np.float64)
    finite = off[np.isfinite(off)]
    largest = float(finite.max()) if finite.size else math.inf
    more = {"index": index, "largest": largest, "allowed": allowed, "heat": heat(np.where(bad, off, 0.0))}
    if want_kind in ("float", "complex") and (lost := int((np.isnan(a) & ~np.isnan(b)).sum())):
        first = tuple(int(i) for i in np.argwhere(np.isnan(a) & ~np.isnan(b))[0])
        more["index"] = first
        return differs("nan", f"{lost:,} of {a.size:,} values are NaN, first at {place(first)}", **more)
    where = f"first at {place(index)}: expected {number(b[index])}, got {number(a[index])}"
    size = f"; largest difference {largest:.3g}, allowed {allowed:.2g}" if allowed or want_kind == "float" else ""
    return differs("value", f"{int(bad.sum()):,} of {a.size:,} values differ, {where}{size}", **more)


def _text(got: object, want: str | bytes, path: str) -> Difference | None:
    base = str if isinstance(want, str) else (bytes, bytearray)
    if not isinstance(got, base):
        return Difference("type", f"expected {describe(want)}, got {describe(got)}", path, got=got, want=want)
    if got == want:
        return None
    at = next((i for i, (a, b) in enumerate(zip(got, want, strict=False)) if a != b), min(len(got), len(want)))
    lengths = "" if len(got) == len(want) else f"; {len(want):,} long expected, got {len(got):,}"
    around = slice(max(at - 8, 0), at + 16)
    message = f"first difference at [{at}]: expected {want[around]!r}, got {got[around]!r} there{lengths}"
    return Difference("value", message, path, (at,), got, want)


def _mappings(got: object, want: Mapping, path: str, rule: _Rule) -> Difference | None:
    if not isinstance(got, Mapping):
        return Difference("type", f"expected a dict, got {describe(got)}", path, got=got, want=want)
    lacks, extra = [repr(k) for k in want if k not in got], [repr(k) for k in got if k not in want]
    if lacks or extra:
        return Difference("keys", _lacks_and_extra(lacks, extra), path, got=got, want=want)
    parts = (_compare(got[key], want[key], f"{path}[{key!r}]", rule) for key in want)
    return next((part for part in parts if part), None)


def _lacks_and_extra(lacks: list[str], extra: list[str]) -> str:
    def some(names: list[str]) -> str:
        return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")

    return "; ".join(
        part for part in (lacks and f"lacks {some(lacks)}", extra and f"has {some(extra)} too much") if part
    )


def _sequences(got: object, want: Sequence, path: str, rule: _Rule) -> Difference | None:
    def differs(kind: str, message: str, **more: object) -> Difference:
        return Difference(kind, message, path, got=got, want=want, **more)

    fields = getattr(want, "_fields", None)
    if fields is not None:
        if getattr(got, "_fields", None) != fields:
            return differs("type", f"expected {type(want).__name__}({', '.join(fields)}), got {describe(got)}")
    elif not isinstance(got, list if isinstance(want, list) else tuple):
        return differs("type", f"expected a {'list' if isinstance(want, list) else 'tuple'}, got {describe(got)}")
    if _all_floats(want) and len(got) == len(want) and all(is_number(g) and not isinstance(g, bool) for g in got):
        part = _arrays(np.asarray(got, float), np.asarray(want, float), path, rule)
        if part:
            part.got, part.want = got, want
        return part
    for i, (a, b) in enumerate(zip(got, want, strict=False)):
        name = f"{path}.{fields[i]}" if fields else f"{path}[{i}]"
        part = _compare(a, b, name, rule)
        if part and len(got) != len(want):
            first = f"first difference at [{i}]: expected {describe(b)}, got {describe(a)}"
            return differs("length", f"{_count(want)} expected, got {len(got):,}; {first}", index=(i,))
        if part:
            if not path and part.index is None and part.kind == "value":
                part.index = (i,)
            return part
    if len(got) != len(want):
        shorter = min(len(got), len(want))
        rest = f"the first {shorter:,} agree" if shorter else "nothing to compare"
        return differs("length", f"{_count(want)} expected, got {len(got):,}; {rest}", index=(shorter,))
    return None


def _count(values: Sequence) -> str:
    return f"{len(values):,} element{'' if len(values) == 1 else 's'}"


def _all_floats(values: Sequence) -> bool:
    return bool(values) and all(isinstance(v, (float, np.floating)) for v in values)
