"""Where every array of a training run lives: the device mesh and one table of rules.

Two mesh axes. Both split the batch, and both split the state between steps (ZeRO, arXiv:1910.02054): every device owns
1/N of each parameter's rows, of AdamW's moments and of Muon's stacks. They differ in the working copy of the
parameters that a step computes with: along `data` it is gathered once a step, along `fsdp` layer by layer and thrown
away again (arXiv:2304.11277), which saves memory and costs traffic with every micro-batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from nanochat_lib.errors import UserError

BATCH_AXES = ("data", "fsdp")  # the order of the devices: a process's rows stand together
STATE_AXES = ("fsdp", "data")  # gathered over `data` first, what is left is one contiguous block of rows
SMALL = 1024  # arrays with fewer numbers are kept whole on every device


def make_mesh(fsdp: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """All `devices` (default: every device of every process) as a mesh (data, fsdp).

    Raises UserError when `fsdp` does not divide their number.
    """
    devices = np.asarray(jax.devices() if devices is None else devices)
    if fsdp < 1 or devices.size % fsdp:
        valid = ", ".join(str(n) for n in range(1, devices.size + 1) if devices.size % n == 0)
        raise UserError(f"compute.fsdp {fsdp} does not divide the {devices.size} devices; use {valid}")
    return Mesh(devices.reshape(-1, fsdp), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)


def split_axis(shape: tuple[int, ...], mesh: Mesh) -> int | None:
    """The axis along which an array of the state is cut: the first that divides; None for small ones, kept whole."""
    if mesh.size == 1 or int(np.prod(shape)) < SMALL:
        return None
    return next((axis for axis, length in enumerate(shape) if length % mesh.size == 0), None)


def state_spec(shape: tuple[int, ...], mesh: Mesh) -> P:
    """Where an array of the state lives: cut over all devices along `split_axis`, else on every one."""
    axis = split_axis(shape, mesh)
    return P() if axis is None else P(*[None] * axis, owners(mesh))


def owners(mesh: Mesh) -> tuple[str, ...]:
    """The axes that cut the state. Those of one device are left out, as JAX does in what it returns: layouts that
    differ in them alone count as different, and the second step would compile anew."""
    return tuple(axis for axis in STATE_AXES if mesh.shape[axis] > 1)


def batch_spec() -> P:
    """(A, B, T): rows over all devices."""
    return P(None, BATCH_AXES)


def state_sharding(mesh: Mesh, state: Any) -> Any:
    """The NamedSharding of every leaf of a TrainState (arrays or ShapeDtypeStructs)."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, state_spec(leaf.shape, mesh)), state)


def param_sharding(mesh: Mesh, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NamedSharding]:
    """The NamedSharding of every parameter by name."""
    return {name: NamedSharding(mesh, state_spec(shape, mesh)) for name, shape in shapes.items()}
