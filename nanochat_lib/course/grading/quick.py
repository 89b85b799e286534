"""What lets JAX start quickly in a process that lives for a second; results stay the same.

A chapter's cases run some hundred tiny programs, each once. Of what JAX does for each, one part can be done once for
all of them (the compiler's context: a third of the time), programs that only copy are not needed at all, and those of
the right answers are found by what they compute (programs.py).

Forking from a process whose backend has started would save the rest and does not work: the client's threads are gone in
the child, and loading a program, which waits for one of them, never ends.
"""

from __future__ import annotations

import contextlib
import gc
import glob
import importlib
import importlib.machinery
import os
import sys
from collections.abc import Iterable

import numpy as np

from nanochat_lib.course.grading import programs

# Module -> what it imports only when it first needs it, in every child anew: SVD's LAPACK, Pallas's interpreter, ...
LATE = {
    "jax": (
        "scipy.linalg.cython_lapack",
        "jax.experimental.multihost_utils",
        "jaxlib.mlir.dialects.builtin",
        "jax.experimental.serialize_executable",
    ),
    "jax.experimental.pallas": ("jax.extend", "jax.experimental.pallas.mosaic_gpu"),
}


def prepare() -> None:
    """All of it, in the process that children are forked from."""
    precompiled(importlib.import_module("nanochat_lib.course.checks").__path__)
    if "jax" in sys.modules:
        for name in [late for module, names in LATE.items() if module in sys.modules for late in names]:
            with contextlib.suppress(ImportError):  # what is not here is not needed here
                importlib.import_module(name)
        one_context()
        plain_copies()
        plugins()
        if folder := os.environ.pop(programs.READ, ""):
            programs.install(folder, write=bool(os.environ.pop(programs.WRITE, "")))
    gc.freeze()  # nothing of this is garbage, so a child need not look through it


def precompiled(folders: Iterable[str]) -> None:
    """The chapters' checks as code, not yet run: a child imports some, which without compiled files takes 20 ms."""
    paths = [path for folder in folders for path in sorted(glob.glob(os.path.join(folder, "*.py")))]
    loader, codes = importlib.machinery.SourceFileLoader, {}
    for path in paths:
        with contextlib.suppress(OSError, SyntaxError, ValueError):  # the import itself says what is wrong
            codes[path] = loader("checks", path).get_code("checks")
    before = loader.get_code
    loader.get_code = lambda self, name: codes.get(self.path) or before(self, name)


def plugins() -> None:
    """JAX looks through everything that is installed for plugins when it starts: once for all children."""
    with contextlib.suppress(Exception):  # then each child does, and says what is wrong
        from jax._src import xla_bridge

        xla_bridge._discover_and_register_pjrt_plugins()


def one_context() -> None:
    """All programs of a process are written in one MLIR context; JAX makes a new one for each, which takes 5 ms.

    Without threads of its own a context survives a fork. Where JAX's insides have changed, its own way stays.
    """
    try:
        from jax._src.interpreters import mlir

        context = mlir.make_ir_context()
        context.enable_multithreading(False)
    except (ImportError, AttributeError, TypeError):
        return
    mlir.make_ir_context = lambda: context


def plain_copies() -> None:
    """copy.deepcopy of a JAX array copies its bytes; JAX compiles a program for each shape, 6 ms."""
    try:
        import jax
        from jax._src.array import ArrayImpl

        before = ArrayImpl.__deepcopy__
    except (ImportError, AttributeError):
        return

    def copied(array: object, memo: dict) -> object:
        plain = array.is_fully_addressable and len(array.sharding.device_set) == 1 and not array.weak_type
        return jax.device_put(np.array(array)) if plain else before(array, memo)

    ArrayImpl.__deepcopy__ = copied
