"""Values as plain data on a stream: JSON beside raw array bytes. Nothing that is read can run anything.

A frame is its length (8 bytes), the length of its JSON part (4), the JSON part, and the bytes that it points into.
Numbers, texts, bytes, lists, tuples, dicts, sets, arrays of numpy and JAX, and records (dataclasses and named tuples)
travel; anything else becomes `Opaque`, which equals nothing. Subclasses travel as what they hold: a list that claims to
equal everything is a list again on the other side.
"""

from __future__ import annotations

import base64
import dataclasses
import importlib
import json
import math
import struct
from collections.abc import Callable

import numpy as np

HEAD = struct.Struct(">QI")
LONGEST_INT = 4096  # bits
DEPTH = 60
KINDS = "biufcUS"  # numpy dtypes that are plain numbers and texts
SHORT_FLOATS = ("bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz")


class BadFrame(Exception):
    """What came is not a frame, or is larger than it may be."""


@dataclasses.dataclass(frozen=True, eq=False)
class Opaque:
    """Stands for a value that is no plain data: `kind` is its type's name, `words` say what it is."""

    kind: str
    words: str

    def __eq__(self, other: object) -> bool:
        return False

    def __hash__(self) -> int:
        return id(self)

    def __repr__(self) -> str:
        return self.words


# ---- values to frames


class _Writer:
    def __init__(self) -> None:
        self.parts: list[bytes] = []
        self.size = 0

    def put(self, data: bytes) -> list[int]:
        at = self.size
        self.parts.append(data)
        self.size += len(data)
        return [at, len(data)]

    def value(self, value: object, depth: int = 0) -> object:
        """The JSON form of a value; long things go into the byte part."""
        if depth > DEPTH:
            return {"o": ["nested", f"a value nested more than {DEPTH} deep"]}
        if value is None or value is True or value is False:
            return value
        kind = type(value)
        if isinstance(value, np.generic):
            return self.array(np.asarray(value), "scalar")
        if isinstance(value, int):
            value = int.__index__(value)
            if value.bit_length() > LONGEST_INT:
                return {"o": ["int", f"a whole number of {value.bit_length():,} bits"]}
            return value if abs(value) < 2**53 else {"i": hex(value)}
        if isinstance(value, float):
            value = float.__float__(value)
            return value if math.isfinite(value) else {"f": str(value)}
        if isinstance(value, complex):
            return {"c": [self.value(value.real), self.value(value.imag)]}
        if isinstance(value, str):
            return self.text(str.__str__(value))
        if isinstance(value, (bytes, bytearray)):
            return {"b": self.put(bytes(value))}
        if isinstance(value, np.ndarray):
            return self.array(np.asarray(value), "numpy")
        if isinstance(value, tuple) and hasattr(kind, "_fields"):
            return self.record(value, [str(name) for name in kind._fields], tuple.__iter__(value), depth)
        if isinstance(value, (list, tuple)):
            items = [
                self.value(item, depth + 1) for item in (list if isinstance(value, list) else tuple).__iter__(value)
            ]
            return items if isinstance(value, list) else {"t": items}
        if isinstance(value, dict):
            return {"d": [[self.value(k, depth + 1), self.value(v, depth + 1)] for k, v in dict.items(value)]}
        if isinstance(value, (set, frozenset)):
            base = set if isinstance(value, set) else frozenset
            return {"s": sorted((self.value(item, depth + 1) for item in base.__iter__(value)), key=repr)}
        if _is_jax(value):
            return self.jax_array(value)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            return self.record(value, names, (getattr(value, name, None) for name in names), depth)
        return {"o": [_name(kind), _words(value)]}

    def text(self, text: str) -> object:
        try:
            text.encode()
        except UnicodeEncodeError:  # lone surrogates
            return {"u": base64.b64encode(text.encode("utf-8", "surrogatepass")).decode()}
        return text

    def array(self, array: np.ndarray, kind: str) -> object:
        name = array.dtype.name if array.dtype.name in SHORT_FLOATS else array.dtype.newbyteorder("<").str
        if array.dtype.kind not in KINDS and name not in SHORT_FLOATS:
            return {"o": ["ndarray", f"an array of {array.dtype}"[:80]]}
        axes = _axes(array)
        data = np.ascontiguousarray(array.transpose(axes))
        if name not in SHORT_FLOATS:
            data = data.astype(array.dtype.newbyteorder("<"), copy=False)
        order = [] if axes == sorted(axes) else [axes]  # a transposed view arrives as one
        return {"a": [kind, name, list(array.shape), *self.put(data.tobytes()), *order]}

    def jax_array(self, value: object) -> object:
        if any(base.__name__ == "Tracer" for base in type(value).__mro__):
            return {"o": ["Tracer", "a traced value, which holds no numbers"]}
        if str(value.dtype).startswith("key<"):
            import jax

            return self.array(np.asarray(jax.random.key_data(value)), "key")
        return self.array(np.asarray(value), "jax")

    def record(self, value: object, names: list[str], items: object, depth: int) -> object:
        kind = type(value)
        fields = [[name, self.value(item, depth + 1)] for name, item in zip(names, items, strict=False)]
        return {"n": [f"{kind.__module__}:{kind.__qualname__}", fields]}


def _axes(array: np.ndarray) -> list[int]:
    """The axes in the order in which memory is laid out, the slowest first."""
    every = list(range(array.ndim))
    return every if array.flags.c_contiguous else sorted(every, key=lambda axis: -abs(array.strides[axis]))


def _is_jax(value: object) -> bool:
    return (
        hasattr(value, "dtype")
        and hasattr(value, "shape")
        and type(value).__module__.split(".")[0] in ("jax", "jaxlib")
    )


def _name(kind: type) -> str:
    return str(kind.__name__)[:60]


def _words(value: object) -> str:
    if callable(value):
        return f"the function {str(getattr(value, '__name__', _name(type(value))))[:60]}"
    return f"an object of type {_name(type(value))}"


def encode(value: object) -> bytes:
    """A value as a frame."""
    writer = _Writer()
    head = json.dumps(writer.value(value), ensure_ascii=False, separators=(",", ":"), allow_nan=False).encode()
    return b"".join([HEAD.pack(4 + len(head) + writer.size, len(head)), head, *writer.parts])


# ---- frames to values


def decode(frame: bytes, classes: Callable[[str], type | None] = lambda name: None, on_jax: bool = True) -> object:
    """The value of a frame (with its head). Raises BadFrame for anything that is not one.

    `classes` gives the class of a record by "module:name", None for one that must not be made: it becomes Opaque. No
    constructor is called. `on_jax`: arrays that were JAX's become JAX's again, else numpy's.
    """
    try:
        total, head = HEAD.unpack_from(frame)
        if total != len(frame) - 8 or head > total - 4:
            raise BadFrame("the lengths do not fit")
        tree = json.loads(frame[HEAD.size : HEAD.size + head].decode())
        return _Reader(memoryview(frame)[HEAD.size + head :], classes, on_jax).value(tree)
    except BadFrame:
        raise
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError, struct.error) as error:
        raise BadFrame(f"{type(error).__name__}: {str(error)[:80]}") from None


@dataclasses.dataclass
class _Reader:
    data: memoryview
    classes: Callable[[str], type | None]
    on_jax: bool

    def value(self, tree: object) -> object:
        if isinstance(tree, list):
            return [self.value(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        ((tag, body),) = tree.items()
        return getattr(self, f"_{tag}")(body) if tag in "tdsbiufcano" and len(tag) == 1 else _bad(tag)

    def _t(self, body: list) -> tuple:
        return tuple(self.value(item) for item in body)

    def _d(self, body: list) -> dict:
        return {self.value(key): self.value(item) for key, item in body}

    def _s(self, body: list) -> set:
        return {self.value(item) for item in body}

    def _b(self, body: list) -> bytes:
        return bytes(self._bytes(*body))

    def _i(self, body: str) -> int:
        if len(body) > LONGEST_INT // 4 + 8:
            raise BadFrame("a number is too long")
        return int(body, 16)

    def _u(self, body: str) -> str:
        return base64.b64decode(body, validate=True).decode("utf-8", "surrogatepass")

    def _f(self, body: str) -> float:
        return float(body)

    def _c(self, body: list) -> complex:
        return complex(self.value(body[0]), self.value(body[1]))

    def _o(self, body: list) -> Opaque:
        return Opaque(str(body[0])[:80], str(body[1])[:120])

    def _bytes(self, at: int, size: int) -> memoryview:
        if type(at) is not int or type(size) is not int or at < 0 or size < 0 or at + size > len(self.data):
            raise BadFrame("points outside the frame")
        return self.data[at : at + size]

    def _a(self, body: list) -> object:
        kind, name, shape, at, size, *order = body
        if name in SHORT_FLOATS:
            import ml_dtypes

            dtype = np.dtype(getattr(ml_dtypes, name))
        else:
            dtype = np.dtype(str(name))
            if dtype.kind not in KINDS or dtype.fields or dtype.hasobject:
                raise BadFrame(f"arrays of {str(name)[:20]} are not plain")
        if (
            len(shape) > 32
            or not all(type(n) is int and n >= 0 for n in shape)
            or math.prod(shape) * dtype.itemsize != size
        ):
            raise BadFrame("an array's shape does not fit its bytes")
        (axes,) = order or [list(range(len(shape)))]
        if sorted(axes) != list(range(len(shape))):
            raise BadFrame("an array's axes do not fit its shape")
        array = np.frombuffer(self._bytes(at, size), dtype).reshape([shape[axis] for axis in axes]).copy()
        array = array.transpose(np.argsort(axes).astype(int).tolist())
        if kind == "scalar":
            return array.reshape(())[()]
        if kind not in ("jax", "key") or not self.on_jax:
            return array
        import jax

        made = jax.random.wrap_key_data(array) if kind == "key" else jax.device_put(array)
        return made if kind == "key" or made.dtype == array.dtype else array

    def _n(self, body: list) -> object:
        name, fields = str(body[0]), {str(key): self.value(item) for key, item in body[1]}
        kind = self.classes(name)
        if kind is None:
            return Opaque(name.split(":")[-1][:80], f"an object of type {name.split(':')[-1]}"[:120])
        if hasattr(kind, "_fields"):
            return tuple.__new__(kind, [fields[key] for key in kind._fields])
        made = object.__new__(kind)
        for key, item in fields.items():
            object.__setattr__(made, key, item)
        return made


def _bad(tag: str) -> object:
    raise BadFrame(f"unknown tag {str(tag)[:20]!r}")


def any_class(name: str) -> type | None:
    """The class "module:name" by importing it: only for frames from the parent, whom the child trusts."""
    module, _, path = name.partition(":")
    found = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part)
    return found


def classes_in(value: object) -> Callable[[str], type | None]:
    """Those classes of records that occur in `value` (a right result): only they may come back."""
    found: dict[str, type] = {}

    def walk(item: object, depth: int = 0) -> None:
        kind = type(item)
        if dataclasses.is_dataclass(item) or hasattr(kind, "_fields"):
            found[f"{kind.__module__}:{kind.__qualname__}"] = kind
        if depth < 8 and isinstance(item, (list, tuple)):
            for part in item[:64]:
                walk(part, depth + 1)
        if depth < 8 and isinstance(item, dict):
            for part in list(item.values())[:64]:
                walk(part, depth + 1)

    walk(value)
    return found.get
