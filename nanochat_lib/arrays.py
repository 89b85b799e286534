"""The arrays of a state on disk: orbax's format, so that any mesh can read what any mesh wrote.

Every process writes its own pieces into a database of its own, `ocdbt.process_N`; merging adds an index over all of
them. Pieces may therefore come together later, from several machines, and be merged then.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from nanochat_lib import distributed, storage

Arrays = dict[str, Any]
Spec = tuple[str, tuple[int, ...]]  # dtype, shape


def named_leaves(tree: Any) -> Arrays:
    """{"params/lm_head.weight": array, …}: every leaf of a pytree by its path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("two leaves of the state have the same path")
    return named


def spec(leaf: Any) -> Spec:
    """(dtype, shape) of an array, a scalar or a jax.ShapeDtypeStruct."""
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    return str(leaf.dtype), tuple(leaf.shape)


def own_copy(leaf: Any) -> Any:
    """What can be written while the training step reuses the memory of `leaf`.

    An accelerator's array is copied to the host when the writing begins. The CPU's own arrays would be lent instead,
    so they are copied here. In a run of several processes what all of them hold alike is written by process 0.
    """
    if not isinstance(leaf, jax.Array) or (distributed.count() > 1 and leaf.is_fully_addressable):
        return np.array(leaf)
    return leaf.copy() if next(iter(leaf.devices())).platform == "cpu" else leaf


def _handler() -> ocp.PyTreeCheckpointHandler:
    # Floats hardly shrink, and compressing them takes several times as long as writing them.
    return ocp.PyTreeCheckpointHandler(use_compression=False)


def write(place: Path, arrays: Arrays, copied: Callable[[], None] = lambda: None) -> None:
    """Writes this process's pieces of `arrays` into the folder `place`; calls `copied` when all are in host memory."""
    # Made by each process: orbax lets the others wait until they see process 0's, which may be on another disk.
    for folder in (place, place / "array_metadatas"):
        folder.mkdir(exist_ok=True)

    async def begin() -> list:
        return await _handler().async_save(epath.Path(place.absolute()), args=ocp.args.PyTreeSave(arrays)) or []

    with _said_once():
        loop = asyncio.new_event_loop()
        try:
            commits = loop.run_until_complete(begin())
        finally:
            loop.close()
        copied()
        for commit in commits:
            commit.result()


@contextlib.contextmanager
def _said_once() -> Iterator[None]:
    """Orbax prints a page about an error that it raises as well."""
    logger, quiet = logging.getLogger("absl"), lambda record: record.levelno < logging.ERROR
    logger.addFilter(quiet)
    try:
        yield
    finally:
        logger.removeFilter(quiet)


def merge(place: Path) -> None:
    """Makes one whole of what the processes wrote; once, when all pieces are there."""
    _handler().finalize(epath.Path(place.absolute()))


def is_merged(place: Path) -> bool:
    return (place / "manifest.ocdbt").is_file()


def saved_specs(place: Path) -> dict[str, Spec]:
    """What the checkpoint in `place` holds, by name."""
    return {name: (dtype, tuple(shape)) for name, (dtype, shape) in storage.read_json(place / "arrays.json").items()}


def restore(place: Path, wanted: Arrays) -> Arrays:
    """The arrays named by `wanted`, each laid out as its jax array there, else on the default device."""
    saved = saved_specs(place)
    item, how = {}, {}
    for name, leaf in wanted.items():
        dtype, shape = saved[name]
        item[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        # An array that was never bound to its device comes back unbound: else a step would compile again for it.
        bound = isinstance(leaf, jax.ShapeDtypeStruct) or (isinstance(leaf, jax.Array) and leaf.committed)
        sharding = leaf.sharding if bound else None
        # Never the sharding that is stored with the arrays: those devices may not exist here.
        how[name] = (
            ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=item[name].dtype, strict=True)
            if sharding is not None
            else ocp.RestoreArgs(restore_type=np.ndarray)
        )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        arrays = reader.restore(
            place.absolute() / "arrays", args=ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True)
        )
    return {name: _on_device(arrays[name], wanted[name]) for name in wanted}


def _on_device(array: Any, wanted: Any) -> Any:
    """A jax array, except where numpy was asked for and for 64-bit numbers, which JAX would shorten."""
    host = isinstance(wanted, (np.ndarray, np.generic, int, float)) or array.dtype != jnp.dtype(
        jax.dtypes.canonicalize_dtype(array.dtype)
    )
    return array if host or isinstance(array, jax.Array) else jnp.asarray(array)
