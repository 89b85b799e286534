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


# ---- checks before anything is compiled


def micro_batches(batch_tokens: int, device_rows: int, length: int, devices: int, stage: str = "pretrain") -> int:
    """A: how many micro-batches of `device_rows` rows of `length` tokens on each device make a step's `batch_tokens`.

    Raises UserError, naming what would fit, when that is not a whole number: a step trains exactly what was planned.
    """
    unit = device_rows * length * devices
    if device_rows > 0 and batch_tokens % unit == 0:
        return batch_tokens // unit
    rows = batch_tokens // (length * devices)
    fitting = [n for n in divisors(rows) if n <= max(device_rows, 1)] if batch_tokens % (length * devices) == 0 else []
    below = batch_tokens // unit * unit if device_rows > 0 else 0
    advice = [f"{stage}.device_rows {' or '.join(map(str, fitting[-3:]))}"] if fitting else []
    advice += (
        [f"{stage}.batch_tokens {' or '.join(f'{n:,}' for n in (below, below + unit) if n > 0)}"] if unit > 0 else []
    )
    raise UserError(
        f"{stage}.batch_tokens {batch_tokens:,} is not a multiple of device_rows {device_rows} × {devices} devices × "
        f"{length:,} tokens a row = {unit:,}; use {', or '.join(advice)}"
    )


def divisors(n: int) -> list[int]:
    return [d for d in range(1, n + 1) if n % d == 0]


def check_parameters(mesh: Mesh | None, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Raises UserError when a large parameter cannot be cut evenly: every device would hold, and update, all of it."""

    def uncut(mesh: Mesh | jax.sharding.AbstractMesh) -> list[str]:
        large = {name: shape for name, shape in shapes.items() if int(np.prod(shape)) >= SMALL}
        return [name for name, shape in large.items() if mesh.size > 1 and split_axis(shape, mesh) is None]

    if mesh is not None and (names := uncut(mesh)):
        counts = range(1, mesh.size + 1)
        valid = [n for n in counts if not uncut(jax.sharding.AbstractMesh((n, 1), mesh.axis_names))]
        raise UserError(
            f"{names[0]} {tuple(shapes[names[0]])} does not divide over {mesh.size} devices; "
            f"use {', '.join(map(str, valid))} devices, or a width and vocabulary that are multiples of {mesh.size}"
        )


# ---- a process's own rows and the whole arrays


def rows_of(process: int, owners: Sequence[int], rows: int) -> np.ndarray:
    """Which of a batch's `rows` rows lie on the devices of `process`; owners[d] is the process of the mesh's device d.

    Every row belongs to exactly one process. Raises UserError when the devices' shares are not equal.
    """
    if rows % len(owners):
        raise UserError(f"{rows} rows do not divide over {len(owners)} devices; use a multiple of {len(owners)}")
    return np.flatnonzero(np.repeat(np.asarray(owners) == process, rows // len(owners)))


def own_rows(mesh: Mesh | None, rows: int) -> np.ndarray:
    """`rows_of` this process; without a mesh all rows are its own."""
    if mesh is None:
        return np.arange(rows)
    return rows_of(jax.process_index(), [device.process_index for device in mesh.devices.flat], rows)


def global_batch(mesh: Mesh, arrays: Mapping[str, np.ndarray], rows: int | None = None) -> dict[str, jax.Array]:
    """A process's own rows, (A, b, T) or (b, T) each, as arrays (A, B, T) or (B, T) over all devices of all processes.

    The rows are copied: on a CPU the device would go on using the caller's buffer. Raises UserError when the whole
    has other than the planned `rows` (B): a process that brought too many or too few would go unnoticed.
    """
    local, placed = len(mesh.local_devices), {}
    for name, x in arrays.items():
        spec = batch_spec() if x.ndim == 3 else P(BATCH_AXES)
        own = x.shape[-2]
        if own % local or (rows is not None and own * mesh.size != rows * local):
            wanted = f"{rows * local // mesh.size} of {rows}" if rows is not None else f"a multiple of {local}"
            raise UserError(
                f"{name}: this process brought {own} rows for its {local} of {mesh.size} devices, not {wanted}"
            )
        shape = (*x.shape[:-2], own // local * mesh.size, x.shape[-1])
        placed[name] = jax.make_array_from_process_local_data(NamedSharding(mesh, spec), np.array(x, order="C"), shape)
    return placed


def replicate(params: Mapping[str, jax.Array], dtype: Any = None) -> dict[str, jax.Array]:
    """Whole parameters on this process's first device, matrices in `dtype`: for sampling, which a process does alone.

    All processes call this together. On a single device they come back as they are.
    """
    leaf = next(iter(params.values()))
    if len(leaf.sharding.device_set) == 1:
        return dict(params)
    cast = lambda x: x.astype(dtype) if dtype is not None and x.ndim > 1 else x  # noqa: E731
    whole = NamedSharding(leaf.sharding.mesh, P())
    gathered = jax.jit(lambda tree: jax.tree.map(cast, tree), out_shardings=whole)(dict(params))
    return {name: gathered[name].addressable_data(0) for name in params}


def state_sharding(mesh: Mesh, state: Any) -> Any:
    """The NamedSharding of every leaf of a TrainState (arrays or ShapeDtypeStructs)."""
    return jax.tree.map(lambda leaf: NamedSharding(mesh, state_spec(leaf.shape, mesh)), state)


def param_sharding(mesh: Mesh, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, NamedSharding]:
    """The NamedSharding of every parameter by name."""
    return {name: NamedSharding(mesh, state_spec(shape, mesh)) for name, shape in shapes.items()}
