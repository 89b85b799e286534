"""Values in a few words, arrays of any library as numpy, and copies that a function may do as it likes with."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Set

import numpy as np

WIDTH = 76  # characters that a described value may take
DEEP = 100_000_000  # bytes above which an array's values are not all read to describe it


def is_array(value: object) -> bool:
    """numpy, JAX and PyTorch arrays, and objects that stand for one (nnx.Param); not numpy's scalars."""
    if isinstance(value, (np.generic, type)):
        return False
    if isinstance(value, np.ndarray):
        return True
    if not all(hasattr(value, name) for name in ("shape", "dtype", "ndim")):
        return False
    return hasattr(value, "__array__") or str(value.dtype).startswith("key<")


def dtype_name(value: object) -> str:
    """'float32', 'bfloat16', 'int64', …; Python's own numbers count as 64 bits wide."""
    if isinstance(value, bool):
        return "bool"
    if isinstance(value, (int, float, complex)):
        return {int: "int64", float: "float64", complex: "complex128"}.get(type(value), type(value).__name__)
    return str(getattr(value, "dtype", type(value).__name__)).removeprefix("torch.")


def array_kind(value: object) -> str:
    """bool, int, float, complex or the dtype's own name."""
    name = dtype_name(value)
    for kind, starts in {
        "bool": "bool",
        "int": ("int", "uint"),
        "float": ("float", "bfloat"),
        "complex": "complex",
    }.items():
        if name.startswith(starts):
            return kind
    return name


def to_numpy(value: object) -> np.ndarray:
    """The values of any array; the short floats as float32."""
    name = dtype_name(value)
    if type(value).__module__.startswith("torch"):
        value = value.detach().cpu()
        value = value.float().numpy() if name.startswith(("bfloat", "float8")) else value.numpy()
    elif name.startswith("key<"):
        import jax

        value = jax.random.key_data(value)
    array = np.asarray(value)
    return array.astype(np.float32) if array.dtype.kind == "V" and not array.dtype.fields else array


def is_traced(value: object) -> bool:
    """True for the stand-ins that JAX passes while it traces a function: they hold no numbers."""
    return any(base.__name__ == "Tracer" and base.__module__.startswith("jax") for base in type(value).__mro__)


def describe(value: object, width: int = WIDTH) -> str:
    """One line: what kind of value, its shape and first elements."""
    if is_traced(value):
        return f"a traced {dtype_name(value)}{list(value.shape)}"
    if is_array(value):
        head = f"{dtype_name(value)}{list(value.shape)}"
        try:
            flat = to_numpy(value).ravel()
        except Exception:  # whatever pretends to be an array
            return head
        shown = " ".join(_short(v) for v in flat[:6].tolist())
        return _cut(f"{head} {shown}{' …' if flat.size > 6 else ''}" if flat.size else head, width)
    if isinstance(value, np.generic):
        return _cut(f"{value.item()!r} ({value.dtype})", width)
    if isinstance(value, float):
        return f"{value:.6g}" if value == value and abs(value) != float("inf") else str(value)
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        marks = "[]" if isinstance(value, list) else "()"
        inside, used = [], 0
        for item in value:
            text = (
                describe(item, width // 2)
                if not isinstance(item, (list, tuple)) or len(value) < 4
                else _cut(repr(item), 24)
            )
            used += len(text) + 2
            if used > width - 8:
                inside.append(f"… {len(value):,} in all")
                break
            inside.append(text)
        comma = "," if len(value) == 1 and marks == "()" else ""
        return f"{marks[0]}{', '.join(inside)}{comma}{marks[1]}"
    if isinstance(value, Mapping):
        inside = ", ".join(f"{k!r}: {describe(v, 24)}" for k, v in list(value.items())[:6])
        more = f", … {len(value):,} in all" if len(value) > 6 else ""
        return _cut(f"{{{inside}{more}}}", width)
    if isinstance(value, Set):
        return _cut("{" + ", ".join(sorted(map(repr, value))) + "}", width)
    if isinstance(value, (str, bytes)) and len(value) > width:
        return f"{value[: width - 16]!r}… ({len(value):,} long)"
    if callable(value):
        return f"the function {getattr(value, '__name__', type(value).__name__)}"
    text = repr(value)
    return f"an object of type {type(value).__name__}" if " at 0x" in text else _cut(text, width)


def _short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, (float, complex)) else str(value)


def _cut(text: str, width: int) -> str:
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"


def fresh(args: tuple) -> tuple:
    """A copy of the arguments all the way down; what cannot be copied (a generator, a lock) is passed as it is."""
    copies: dict[int, object] = {}
    out = []
    for arg in args:
        try:
            out.append(copy.deepcopy(arg, copies))
        except Exception:  # any object may refuse
            out.append(arg)
    return tuple(out)
