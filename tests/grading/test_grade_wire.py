"""Values as plain data: what goes over the line comes back the same, and nothing else comes back at all."""

from __future__ import annotations

import dataclasses
import json
import math
import pickle
import struct
from collections import Counter, namedtuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat_lib.course.compare import difference
from nanochat_lib.course.grading import drivers, wire

Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass(frozen=True)
class Band:
    window: int
    rows: tuple


plain = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary()
    | st.complex_numbers(allow_nan=False),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.tuples(st.integers(), st.text()), inner, max_size=3)
    ),
    max_leaves=12,
)


def same(a, b):
    if isinstance(a, float) and isinstance(b, float):
        return a == b or (math.isnan(a) and math.isnan(b))
    if type(a) is not type(b):
        return False
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    return a == b


@given(plain)
@settings(max_examples=150)
def test_plain_values_come_back(value):
    assert same(wire.decode(wire.encode(value)), value)


@pytest.mark.parametrize(
    "dtype", ["bool", "int8", "uint64", "float16", "float32", "float64", "complex64", "<U3", ">i4"]
)
def test_arrays_come_back_with_shape_and_dtype(dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    back = wire.decode(wire.encode(array))
    assert type(back) is np.ndarray and back.dtype == array.dtype.newbyteorder("=") and (back == array).all()
    scalar = wire.decode(wire.encode(array[0, 1]))
    assert scalar == array[0, 1] and type(scalar) is type(array.astype(array.dtype.newbyteorder("="))[0, 1])


@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1), (2, 0, 1), (1, 2, 0)], ids=str)
def test_a_transposed_view_comes_back_as_one(order):
    """A function may be right for contiguous arrays only."""
    view = np.arange(24.0).reshape(2, 3, 4).transpose(order)
    back = wire.decode(wire.encode(view))
    assert (back == view).all() and back.strides == view.strides
    for odd in (view[::2], np.broadcast_to(view[0], view.shape), view[:0], np.asfortranarray(view)):
        back = wire.decode(wire.encode(odd))
        assert back.shape == odd.shape and (back == odd).all()


def test_jax_arrays_keys_and_short_floats_come_back():
    for value in (jnp.ones((2, 3), jnp.bfloat16), jnp.arange(4), jnp.float32(2.5)):
        back = wire.decode(wire.encode(value))
        assert isinstance(back, jax.Array) and back.dtype == value.dtype and (back == value).all()
        assert isinstance(wire.decode(wire.encode(value), on_jax=False), (np.ndarray, np.generic))
    key = wire.decode(wire.encode(jax.random.key(3)))
    assert difference(key, jax.random.key(3)) is None
    assert wire.decode(wire.encode(np.asarray(jnp.ones(2, jnp.bfloat16)))).dtype == jnp.bfloat16


def test_subclasses_come_back_as_what_they_hold():
    class All(list):
        def __eq__(self, other):
            return True

        def __iter__(self):
            return iter([9, 9])

    assert type(wire.decode(wire.encode(All([1])))) is list and wire.decode(wire.encode(All([1]))) == [1]
    assert wire.decode(wire.encode(Counter("aab"))) == {"a": 2, "b": 1}


def test_records_come_back_only_where_their_class_is_expected():
    for value in (Band(3, (1, 2)), Pair(1, [2])):
        frame = wire.encode(value)
        assert wire.decode(frame, wire.classes_in([value])) == value
        assert isinstance(wire.decode(frame), wire.Opaque)
        assert wire.decode(frame) != value


@pytest.mark.parametrize(
    "value",
    [print, object(), (i for i in "ab"), Band, np.array([object()]), np.zeros(2, "i4,f4"), 1 << 5000],
    ids=["function", "object", "generator", "class", "objects", "structured", "long"],
)
def test_what_is_no_plain_data_equals_nothing(value):
    back = wire.decode(wire.encode(value))
    assert isinstance(back, wire.Opaque) and back != back and len(back.words) < 130
    assert difference(back, [1]) is not None


def test_deep_and_endless_values_end():
    deep = []
    for _ in range(100):
        deep = [deep]
    endless = []
    endless.append(endless)
    for value in (deep, endless):
        assert "nested" in repr(wire.decode(wire.encode(value)))


def frame(tree: object, data: bytes = b"") -> bytes:
    head = json.dumps(tree).encode()
    return struct.pack(">QI", 4 + len(head) + len(data), len(head)) + head + data


BAD = {
    "nothing": b"",
    "junk": b"junk",
    "an array without bytes": frame({"a": ["numpy", "<f8", [2], 0, 16]}),
    "objects": frame({"a": ["numpy", "O", [1], 0, 8]}, bytes(8)),
    "objects in fields": frame({"a": ["numpy", "i4,O", [1], 0, 12]}, bytes(12)),
    "a negative size": frame({"a": ["numpy", "<i8", [-1], 0, 8]}, bytes(8)),
    "an axis twice": frame({"a": ["numpy", "<i8", [1, 1], 0, 8, [0, 0]]}, bytes(8)),
    "an axis too many": frame({"a": ["numpy", "<i8", [1], 0, 8, [0, 1]]}, bytes(8)),
    "axes that are none": frame({"a": ["numpy", "<i8", [1], 0, 8, ["0"]]}, bytes(8)),
    "axes of axes": frame({"a": ["numpy", "<i8", [1], 0, 8, [0], [0]]}, bytes(8)),
    "forty axes": frame({"a": ["numpy", "<i8", [1] * 40, 0, 8]}, bytes(8)),
    "bytes before the frame": frame({"b": [-8, 8]}, bytes(8)),
    "a size that is no number": frame({"b": [0, True]}),
    "a list as a key": frame({"d": [[[1], 2]]}),
    "an unknown tag": frame({"x": 1}),
    "a name of Python's": frame({"__class__": 1}),
    "the reader's own name": frame({"value": 1}),
    "two tags": frame({"a": 1, "b": 2}),
    "no tag": frame({}),
    "a very long number": frame({"i": "f" * 9999}),
    "no base 64": frame({"u": "not base 64"}),
    "more than the frame": frame([]) + b"more",
    "a pickle": pickle.dumps([1]),
    "brackets": b"[" * 99999,
    "too long a promise": struct.pack(">QI", 2**63, 4) + b"null",
    "very deep": struct.pack(">QI", 200004, 200000) + b"[" * 200000,
}


@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
def test_bad_frames_are_refused(bad):
    with pytest.raises(wire.BadFrame):
        wire.decode(bad)


@given(st.binary(max_size=60))
@settings(max_examples=200)
def test_any_bytes_are_a_value_or_refused(data):
    for bytes_ in (data, struct.pack(">QI", 4 + len(data), len(data)) + data):
        try:
            value = wire.decode(bytes_)
        except wire.BadFrame as refusal:
            assert str(refusal)
        else:
            assert isinstance(wire.encode(value), bytes)  # plain data, which can be sent again


def operations(fn, x):
    return len(jax.make_jaxpr(fn)(x).jaxpr.eqns)


def test_a_case_s_function_comes_back():
    factor = 3
    for fn in (operations, lambda fn, x: fn(x) * factor, lambda fn, x, more=jnp: more.sum(fn(x)) + np.float32(1)):
        packed = wire.decode(wire.encode(drivers.pack(fn, "here")))
        again = drivers.unpack(packed)
        assert again(jnp.sin, jnp.ones(2)) is not None
        assert (np.asarray(again(jnp.sin, jnp.ones(2))) == np.asarray(fn(jnp.sin, jnp.ones(2)))).all()
    assert drivers.unpack(drivers.pack(None, "here")) is None
    with pytest.raises(drivers.Unsendable, match="here"):
        drivers.pack(Band(1, ()).__eq__, "here")


@pytest.mark.parametrize("place", [[0, 9], [4, 1], [-1, 2], [0, -1], [0.0, 1], [True, 1]])
def test_bytes_outside_the_frame_are_refused(place):
    head, data = json.dumps({"b": place}).encode(), b"abcd"
    with pytest.raises(wire.BadFrame, match="outside"):
        wire.decode(wire.HEAD.pack(4 + len(head) + len(data), len(head)) + head + data)
