"""How one training step moves data between devices: gather the parameters, compute alone, scatter the gradients.

Between steps every device owns a slice of each parameter (sharding.py). These functions run inside `jax.shard_map`,
where all arrays are a device's own; without a mesh each of them is the identity.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from nanochat_lib.sharding import BATCH_AXES, split_axis


@dataclass(frozen=True)
class Collectives:
    """The moves of a step on `mesh`; `split` names the axis along which each parameter is cut, None where it is not."""

    mesh: Mesh | None
    split: dict[str, int | None]

    @classmethod
    def of(cls, mesh: Mesh | None, shapes: dict[str, tuple[int, ...]]) -> Collectives:
        return cls(mesh, {name: None if mesh is None else split_axis(shape, mesh) for name, shape in shapes.items()})

    @property
    def fsdp(self) -> bool:
        return self.mesh is not None and self.mesh.shape["fsdp"] > 1

    def total(self, x: jax.Array) -> jax.Array:
        """Sum over all devices."""
        return x if self.mesh is None else jax.lax.psum(x, BATCH_AXES)

    def working_copy(self, name: str, mine: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """What a step computes with: a matrix in the compute dtype, gathered along `data`, once a step."""
        if mine.ndim == 2:
            mine = mine.astype(dtype)
        axis = self.split[name]
        if axis is None or self.mesh.shape["data"] == 1:
            return mine
        return jax.lax.all_gather(mine, "data", axis=axis, tiled=True)

    def gather(
        self, blocks: dict[str, jax.Array], micro: dict[str, jax.Array], dtype: jax.typing.DTypeLike
    ) -> dict[str, jax.Array]:
        """The whole of each float32 block, gathered along `fsdp` where it is used and dropped after."""
        if not self.fsdp:
            return blocks
        # Tied to the micro-batch: a compiler would move the gathering of what never changes out of the loop, and all
        # parameters would stand whole in memory.
        blocks, _ = jax.lax.optimization_barrier((blocks, micro))
        split = lambda name: self.split[name]  # noqa: E731
        return {
            name: block if split(name) is None else _gather(split(name), jnp.dtype(dtype).name, block)
            for name, block in blocks.items()
        }

    def lookup(self, name: str, block: jax.Array, idx: jax.Array) -> jax.Array:
        """Rows (B, T, C) of a table of which this device holds the rows of its place along `fsdp`.

        The ids travel and the rows come back, which is far less than gathering a table.
        """
        if self.split[name] is None or not self.fsdp:
            return block[idx]
        if self.split[name] == 1:
            return jax.lax.all_gather(block, "fsdp", axis=1, tiled=True)[idx]
        wanted = jax.lax.all_gather(idx, "fsdp", axis=0, tiled=True)
        place = wanted - jax.lax.axis_index("fsdp") * block.shape[0]
        mine = (place >= 0) & (place < block.shape[0])
        rows = jnp.where(mine[..., None], block[jnp.where(mine, place, 0)], 0)
        return jax.lax.psum_scatter(rows, "fsdp", scatter_dimension=0, tiled=True)

    def own_share(self, name: str, grad: jax.Array, *, whole: bool) -> jax.Array:
        """This device's slice of a gradient summed over all devices. `whole`: not yet summed along `fsdp`."""
        axis = self.split[name]
        if self.mesh is None:
            return grad
        if axis is None:
            return jax.lax.psum(grad, BATCH_AXES)
        for along in ("fsdp", "data") if whole else ("data",):
            if self.mesh.shape[along] > 1:
                grad = jax.lax.psum_scatter(grad, along, scatter_dimension=axis, tiled=True)
        return grad

    def forget_gathered(self, function: Callable) -> Callable:
        """`function` whose backward pass gathers along `fsdp` again instead of keeping whole parameters."""
        if not self.fsdp:
            return function
        return jax.checkpoint(function, policy=lambda primitive, *_, **params: not gathers(params))


def gathers(params: dict) -> bool:
    """Whether an operation with these parameters is a call of `_gather`, as a policy of jax.checkpoint sees it."""
    called = params.get("call_jaxpr")
    return called is not None and any(eqn.primitive.name == "all_gather" for eqn in called.jaxpr.eqns)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _gather(axis: int, dtype: str, block: jax.Array) -> jax.Array:
    """Gathers in `dtype`, returns float32: the gradient comes back, and is summed, in float32."""
    whole = jax.lax.all_gather(block.astype(dtype), "fsdp", axis=axis, tiled=True)
    return whole.astype(jnp.float32)


def _gather_backward(axis: int, dtype: str, _: None, grad: jax.Array) -> tuple[jax.Array]:
    return (jax.lax.psum_scatter(grad, "fsdp", scatter_dimension=axis, tiled=True),)


_gather.defvjp(lambda axis, dtype, block: (_gather(axis, dtype, block), None), _gather_backward)
