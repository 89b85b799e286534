"""From a preset to the training step of one machine: what is left to "auto", and the shapes of a step.

The stages and the pre-flight resolve their settings here, so what is compiled ahead of time is what will run.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding

from nanochat_lib import optim, schedules, sharding
from nanochat_lib.attention import choose_backend
from nanochat_lib.compute import Compute, loss_chunks
from nanochat_lib.hardware import compute_dtype
from nanochat_lib.presets import ComputeConfig, RunConfig
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.train_step import TrainState, TrainStep, abstract_state, make_train_step


def compute_for(
    settings: ComputeConfig, model: GPTConfig, platform: str, device_kind: str = "", rows: int = 1
) -> Compute:
    """How the training step computes on devices of `platform` ("cpu", "gpu", "tpu") and `device_kind` ("TPU v6 lite").

    rows: of a micro-batch on one device. Warns when an accelerator gets the plain attention; UserError when a setting
    cannot work there.
    """
    dtype = compute_dtype(settings.dtype, platform)
    return Compute(
        dtype=dtype,
        attention=choose_backend(
            settings.attention, platform, device_kind=device_kind, length=model.sequence_len, head_dim=model.head_dim,
            dtype=dtype,
        ),
        fp8=settings.fp8,
        loss_chunks=loss_chunks(
            settings.loss_chunks, platform, rows, model.sequence_len, model.padded_vocab_size
        ),
        table_gradients="pallas" if platform == "tpu" else "xla",
        remat=settings.remat == "blocks",
    )  # fmt: skip


def compute_here(settings: ComputeConfig, model: GPTConfig, mesh: Mesh | None, rows: int = 1) -> Compute:
    """`compute_for` the devices of the mesh, or without one the device that JAX computes on."""
    device = jax.devices()[0] if mesh is None else mesh.devices.flat[0]
    return compute_for(settings, model, device.platform, device.device_kind, rows)


@dataclass(frozen=True)
class StepPlan:
    """The pretraining step of a preset on a mesh, without any array."""

    model: GPTConfig
    compute: Compute
    optimizer: Any
    mesh: Mesh | None
    micro_batches: int  # A
    rows: int  # of a micro-batch, on all devices together
    masters: str

    def train_step(self) -> TrainStep:
        return make_train_step(self.model, self.optimizer, compute=self.compute, mesh=self.mesh)

    def abstract_state(self) -> TrainState:
        return abstract_state(self.model, self.optimizer, self.mesh, self.masters)

    def abstract_batch(self) -> dict[str, jax.ShapeDtypeStruct]:
        shape = (self.micro_batches, self.rows, self.model.sequence_len)
        place = None if self.mesh is None else NamedSharding(self.mesh, sharding.batch_spec())
        return {name: jax.ShapeDtypeStruct(shape, jnp.int32, sharding=place) for name in ("inputs", "targets")}

    def lower(self) -> Any:
        """The step lowered for the mesh's devices; `.compile()` is what takes long."""
        hyper = {name: jax.ShapeDtypeStruct((), jnp.float32) for name in ("lr", "momentum", "weight_decay")}
        return self.train_step().jitted.lower(self.abstract_state(), self.abstract_batch(), hyper)


def step_plan(config: RunConfig, mesh: Mesh | None, platform: str, device_kind: str = "") -> StepPlan:
    """The pretraining step of `config` on `mesh` (None: one device)."""
    model, horizon = config.gpt_config(), config.horizon()
    devices = 1 if mesh is None else mesh.size
    rows = config.pretrain.device_rows
    compute = compute_for(config.compute, model, platform, device_kind, rows)
    rates = schedules.transferred(config.pretrain.optim, horizon)
    return StepPlan(
        model=model,
        compute=compute,
        optimizer=optim.make_optimizer(model, rates, jnp.dtype(compute.dtype), mesh=mesh),
        mesh=mesh,
        micro_batches=max(horizon.batch_tokens // (rows * devices * model.sequence_len), 1),
        rows=rows * devices,
        masters=config.compute.masters,
    )
