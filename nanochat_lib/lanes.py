"""What makes a small model decode faster on a CPU: a lane of rows for each core, and matrices stored as they are used.

Matrix products of a few rows run on one core, whatever XLA could do with more. So rows are dealt to lanes, each with a
cache of its own, and the lanes take their steps at the same time. And x Wᵀ with W stored [out, in] takes up to twice
as long there as with Wᵀ stored; a single row is the other way round. Numbers stay the same but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import TypeVar

import jax

from nanochat_lib.hardware import cores

LEAST = 4  # rows of a lane: fewer are not worth their own steps
LARGEST = 1 << 24  # bytes of matrices that a core's cache may keep; larger ones should be read once for all rows
MATRICES = {"c_q", "c_k", "c_v", "c_proj", "c_fc", "lm_head"}
TURNED = ".T"  # ends the name of a matrix that is stored [in, out]
T = TypeVar("T")


def is_small(params: dict[str, jax.Array]) -> bool:
    """Whether these weights are on one CPU device and small enough for what is in this file."""
    matrices = [leaf for name, leaf in params.items() if _is_matrix(name)]
    here = bool(matrices) and all(isinstance(leaf, jax.Array) for leaf in matrices)
    if not here or sum(leaf.nbytes for leaf in matrices) > LARGEST:
        return False
    devices = matrices[0].devices()
    return len(devices) == 1 and next(iter(devices)).platform == "cpu"


def _is_matrix(name: str) -> bool:
    return name.endswith(".weight") and name.split(".")[-2] in MATRICES


def lanes_for(rows: int, params: dict[str, jax.Array]) -> int:
    """How many lanes of equal width `rows` rows are dealt to: 1 unless that is faster."""
    most = min(cores(), rows // LEAST) if is_small(params) else 1
    return next((count for count in range(most, 1, -1) if rows % count == 0), 1)


def together(tasks: Sequence[Callable[[], T]]) -> list[T]:
    """The results of the tasks, which run at the same time. All have ended when an exception of one is raised."""
    if len(tasks) == 1:
        return [tasks[0]()]
    with ThreadPoolExecutor(len(tasks), thread_name_prefix="lane") as pool:
        running = [pool.submit(task) for task in tasks]
    return [task.result() for task in running]


def turned(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """The same weights, the matrices of a small model copied into the order [in, out]."""
    if not is_small(params):
        return params
    return {f"{name}{TURNED}" if _is_matrix(name) else name: leaf for name, leaf in _turn(params).items()}


class Weights:
    """Weights, and their copy for decode steps, made when it is first wanted. New weights are another object."""

    def __init__(self, params: dict[str, jax.Array]) -> None:
        self.params = params

    @cached_property
    def turned(self) -> dict[str, jax.Array]:
        return turned(self.params)

    def for_steps(self, rows: int) -> dict[str, jax.Array]:
        """In the order in which steps of so many rows are fastest."""
        return self.params if rows == 1 else self.turned


@jax.jit
def _turn(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    return {name: leaf.T if _is_matrix(name) else leaf for name, leaf in params.items()}


def upright(params: dict[str, jax.Array]) -> dict[str, jax.Array]:
    """Inverse of `turned`, inside of a compiled function: nothing is moved there."""
    return {name.removesuffix(TURNED): leaf.T if name.endswith(TURNED) else leaf for name, leaf in params.items()}
