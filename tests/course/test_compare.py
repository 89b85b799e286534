"""Results are compared by type, shape, dtype and value, and a difference says where it is."""

from collections import Counter, namedtuple
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from nanochat_lib.course.compare import difference, heat
from nanochat_lib.course.values import describe, to_numpy

Pair = namedtuple("Pair", "loss grad")
Other = namedtuple("Other", "loss grad")


@dataclass
class State:
    step: int
    mean: object


SAME = {
    "none": (None, None),
    "number": (3, 3),
    "numpy number for a Python one": (np.int64(3), 3),
    "whole number for a float": (3, 3.0),
    "array without axes for a number": (jnp.asarray(2.5), 2.5),
    "number for an array without axes": (2.5, np.float32(2.5)),
    "text": ("aé", "aé"),
    "bytes": (b"ab", b"ab"),
    "list": ([1, [2, 3]], [1, [2, 3]]),
    "tuple": ((1, "a"), (1, "a")),
    "floats of a list, to rounding": ([0.1 + 0.2, 1.0], [0.3, 1.0]),
    "dict in another order": ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    "Counter and dict": (Counter("aab"), {"a": 2, "b": 1}),
    "set": ({1, 2}, {2, 1}),
    "named tuple": (Pair(1.0, [2]), Pair(1.0, [2])),
    "dataclass": (State(1, np.ones(2)), State(1, np.ones(2))),
    "jax and numpy": (jnp.ones((2, 3)), np.ones((2, 3), np.float32)),
    "torch and numpy": (torch.ones(2), np.ones(2, np.float32)),
    "torch bfloat16 and jax": (torch.ones(2, dtype=torch.bfloat16), jnp.ones(2, jnp.bfloat16)),
    "float32 result, expected written down in decimals": (jnp.asarray([0.1, 0.2]), np.array([0.1, 0.2])),
    "nan where nan is expected": (np.array([np.nan, 1.0]), np.array([np.nan, 1.0])),
    "infinite where expected": (np.array([-np.inf, 1.0]), np.array([-np.inf, 1.0])),
    "empty array": (np.zeros((0, 3)), np.zeros((0, 3))),
    "keys": (jax.random.key(1), jax.random.key(1)),
}

DIFFERENT = {
    "None for a number": (None, 3, "none", "got None, expected 3"),
    "None for an array": (None, np.ones(2), "none", "got None"),
    "a number for None": (3, None, "type", "expected None"),
    "None inside a list": ([1, None], [1, 2], "none", "at [1]: got None"),
    "True for 1": (True, 1, "dtype", "True/False"),
    "1 for True": (1, True, "dtype", "whole numbers"),
    "a float for a whole number": (3.0, 3, "dtype", "whole numbers, got floats"),
    "off by one": (4, 3, "value", "expected 3, got 4"),
    "a little off": (1.001, 1.0, "value", "allowed"),
    "NaN": (float("nan"), 1.0, "nan", "got NaN"),
    "one number, got an array": (np.ones(2), 1.0, "shape", "one number"),
    "tuple for a list": ((1, 2), [1, 2], "type", "expected a list"),
    "list for a tuple": ([1, 2], (1, 2), "type", "expected a tuple"),
    "list for an array": ([1.0], np.ones(1), "type", "expected an array"),
    "array for a list": (np.ones(1), [1.0], "type", "expected a list"),
    "generator for a list": ((i for i in [1]), [1], "type", "generator"),
    "shorter list": ([1, 2], [1, 2, 3], "length", "3 elements expected, got 2; the first 2 agree"),
    "longer and different": ([1, 5, 3, 4], [1, 2, 3], "length", "first difference at [1]: expected 2, got 5"),
    "inside a list": ([1, [2, 9]], [1, [2, 3]], "value", "at [1][1]: expected 3, got 9"),
    "text": ("hallo", "hello", "value", "first difference at [1]"),
    "text for bytes": ("ab", b"ab", "type", "expected b'ab'"),
    "dict lacks": ({"a": 1}, {"a": 1, "b": 2}, "keys", "lacks 'b'"),
    "dict has too much": ({"a": 1, "c": 1}, {"a": 1}, "keys", "has 'c' too much"),
    "dict value": ({"a": 1}, {"a": 2}, "value", "at ['a']: expected 2, got 1"),
    "set": ({1}, {1, 2}, "keys", "lacks 2"),
    "another named tuple": ((1, 2), Pair(1, 2), "type", "expected Pair(loss, grad)"),
    "named tuple's field": (Pair(1, 5), Pair(1, 2), "value", "at .grad: expected 2, got 5"),
    "dataclass field": (State(1, np.ones(2)), State(1, np.zeros(2)), "value", "at .mean"),
    "shape": (np.ones((3, 2)), np.ones((2, 3)), "shape", "expected shape (2, 3), got (3, 2)"),
    "dtype kind": (np.ones(2, int), np.ones(2), "dtype", "floats (float64), got whole numbers"),
    "float32 for bfloat16": (jnp.ones(2), jnp.ones(2, jnp.bfloat16), "dtype", "expected dtype bfloat16, got float32"),
    "values": (np.eye(3), np.eye(3) + 2 * np.eye(1, 9, 5).reshape(3, 3), "value", "first at [1, 2]: expected 2, got 0"),
    "NaNs": (np.array([[1, 2], [3, np.nan]]), np.ones((2, 2)), "nan", "1 of 4 values are NaN, first at [1, 1]"),
    "NaN alone": (np.array([1.0, np.nan]), np.ones(2), "nan", "1 of 2 values are NaN, first at [1]"),
    "finite for infinite": (np.array([0.0, 1.0]), np.array([-np.inf, 1.0]), "value", "first at [0]"),
    "integers exactly": (np.array([2**40 + 1]), np.array([2**40]), "value", "1 of 1"),
    "torch values": (torch.ones(2), torch.tensor([1.0, 2.0]), "value", "first at [1]"),
    "keys": (jax.random.key(1), jax.random.key(2), "value", "differ"),
    "object": (object, 3, "type", "expected the number 3"),
}  # fmt: skip


@pytest.mark.parametrize("name", SAME)
def test_same(name: str) -> None:
    got, want = SAME[name]
    assert difference(got, want) is None


@pytest.mark.parametrize("name", DIFFERENT)
def test_different(name: str) -> None:
    got, want, kind, words = DIFFERENT[name]
    found = difference(got, want)
    assert found is not None and (found.kind, words in found.message) == (kind, True), found


@pytest.mark.parametrize(
    ("dtype", "near", "far"),
    [(np.float64, 5e-10, 5e-9), (np.float32, 1e-5, 1e-4), (np.float16, 1e-2, 5e-2), (jnp.bfloat16, 1e-2, 5e-2)],
)
def test_tolerance_follows_the_dtype_and_the_largest_magnitude(dtype: type, near: float, far: float) -> None:
    want = np.array([1.0, 100.0]).astype(dtype)
    for off, same in ((near * 100, True), (far * 100, False)):
        got = (want.astype(np.float64) + np.array([off, 0])).astype(dtype)
        assert (difference(got, want) is None) is same


def test_arguments_of_low_precision_widen_the_tolerance_and_results_of_low_precision_do_not() -> None:
    want = np.array([1.0])
    assert difference(want + 1e-6, want) is not None
    assert difference(want + 1e-6, want, args=([np.ones(2, np.float32)],)) is None
    assert difference(jnp.asarray(want + 1e-2, jnp.bfloat16), want) is not None
    assert difference(1.05, 1.0, rtol=0.1) is None and difference(1.0001, 1.0, rtol=1e-5) is not None
    assert difference(np.array([1e-6]), np.array([0.0]), atol=1e-5) is None
    assert difference(np.array([1e-3]), np.array([0.0])) is not None


def test_an_exact_dtype_can_be_asked_for() -> None:
    got = np.ones(2, np.float32)
    assert difference(got, np.ones(2)) is None
    assert difference(got, np.ones(2), dtype=True).message == "expected dtype float64, got float32"
    assert difference(got, np.ones(2), dtype="float32") is None
    assert difference(np.ones(2), np.ones(2), dtype="float32").kind == "dtype"


def test_heat_keeps_the_place_of_a_difference_in_any_number_of_axes() -> None:
    off = np.zeros((2, 30, 100))
    off[1, 29, 99] = 3.0
    picture = np.array(heat(off))
    assert picture.shape == (10, 24) and picture[9, 23] == 1 and picture.sum() == 1
    assert heat(np.array([0.0, 1.0, 2.0])) == [[0.0, 0.5, 1.0]]
    assert heat(np.array([[np.nan, 1.0]])) == [[1.0, 1.0]]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (np.arange(8.0).reshape(2, 4), "float64[2, 4] 0 1 2 3 4 5 …"),
        (jnp.ones((1,), jnp.bfloat16), "bfloat16[1] 1"),
        ([1, 2], "[1, 2]"),
        ((1,), "(1,)"),
        (len, "the function len"),
        (object(), "an object of type object"),
        (0.1 + 0.2, "0.3"),
    ],
)
def test_describe(value: object, text: str) -> None:
    assert describe(value) == text


def test_long_values_are_described_in_one_short_line() -> None:
    for value in (list(range(10_000)), "x" * 1000, dict.fromkeys(range(50), "y" * 50), [[1] * 50] * 50):
        text = describe(value)
        assert len(text) < 120 and "\n" not in text, text


def test_torch_bfloat16_with_a_gradient_becomes_numpy() -> None:
    value = torch.ones(2, dtype=torch.bfloat16, requires_grad=True)
    assert to_numpy(value).tolist() == [1.0, 1.0]
