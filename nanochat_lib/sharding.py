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


def row_spec(shape: tuple[int, ...], mesh: Mesh) -> P:
    """Rows (axis 0) over all devices; small arrays and those whose rows do not divide stay whole."""
    size = int(np.prod(shape)) if shape else 1
    if size < SMALL or shape[0] % mesh.size:
        return P()
    return P(STATE_AXES)


def batch_spec() -> P:
    """(A, B, T): rows over all devices."""
    return P(None, BATCH_AXES)


def state_sharding(mesh: Mesh, state: Any) -> Any:
    """The NamedSharding of every leaf of a TrainState (arrays or ShapeDtypeStructs)."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, row_spec(leaf.shape, mesh)), state)


def param_sharding(mesh: Mesh, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NamedSharding]:
    """The NamedSharding of every parameter by name."""
    return {name: NamedSharding(mesh, row_spec(shape, mesh)) for name, shape in shapes.items()}
