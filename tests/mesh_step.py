"""Run by tests/test_mesh_step.py in a process with eight CPU devices: one JSON object of what was seen."""

import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding

from nanochat_lib import gpt, optim, sharding, train_step
from nanochat_lib.compiled import Module
from nanochat_lib.preflight import accounting
from nanochat_lib.presets import OptimConfig
from nanochat_lib.sizing import GPTConfig

CONFIG = GPTConfig(64, 256, 2, 4, 2, 64)
HYPER = {"lr": 0.05, "momentum": 0.9, "weight_decay": 0.1}
random = np.random.default_rng(0)
ids = random.integers(0, CONFIG.vocab_size, (3, 8, 65)).astype(np.int32)
batch = {"inputs": ids[:, :, :-1].copy(), "targets": ids[:, :, 1:].copy()}
batch["targets"][0, :3, :5] = -1
weights = random.uniform(-1, 1, batch["targets"].shape).astype(np.float32)


def run(fsdp: int | None) -> dict:
    mesh = None if fsdp is None else sharding.make_mesh(fsdp)
    optimizer = optim.make_optimizer(CONFIG, OptimConfig(), mesh=mesh)
    state = train_step.init_train_state(CONFIG, optimizer, jax.random.key(1), mesh=mesh)
    step = train_step.make_train_step(CONFIG, optimizer, mesh=mesh)
    placed = batch if mesh is None else jax.device_put(batch, NamedSharding(mesh, sharding.batch_spec()))
    losses = []
    module = Module(step.lower(state, placed, HYPER).compile().as_text())
    for _ in range(5):
        state, metrics = step(state, placed, HYPER)
        losses.append(float(metrics["loss"]))
    traced = jax.make_jaxpr(lambda p, b: train_step.loss_and_gradients(CONFIG, p, b, mesh=mesh))(state.params, placed)
    leaves = jax.tree.leaves(state)
    products = accounting.matmuls(module)
    in_loops = [r for r in module.runs() if r.computation in module.loops]
    return {
        "losses": losses,
        "grad_norm": float(metrics["grad_norm"]),
        "compiles": step.compiles,
        "gathers": str(traced).count("all_gather["),
        "share": sum(x.addressable_shards[0].data.nbytes for x in leaves) / sum(x.nbytes for x in leaves),
        "collectives": accounting.collectives(module),
        "looped": sorted({r.instruction.opcode for r in in_loops if r.instruction.opcode in accounting.COLLECTIVES}),
        "muon_flops": sum(p.flops for p in products if p.times == 1),
        "model_flops": sum(p.flops for p in products if p.times == len(batch["inputs"])),
    }


def weighted(fsdp: int | None) -> list[float]:
    """Loss and gradient norms of a batch with weights (RL's advantages)."""
    mesh = None if fsdp is None else sharding.make_mesh(fsdp)
    optimizer = optim.make_optimizer(CONFIG, OptimConfig(), mesh=mesh)
    params = train_step.init_train_state(CONFIG, optimizer, jax.random.key(2), mesh=mesh).params
    values = batch | {"weights": weights}
    placed = values if mesh is None else jax.device_put(values, NamedSharding(mesh, sharding.batch_spec()))
    loss, grads, count = jax.jit(lambda p, b: train_step.loss_and_gradients(CONFIG, p, b, mesh=mesh))(params, placed)
    return [float(loss), int(count)] + [float(jnp.linalg.norm(grads[name])) for name in sorted(grads)]


json.dump(
    {
        "params": gpt.param_shapes(CONFIG),
        "runs": {str(fsdp): run(fsdp) for fsdp in (None, 1, 8, 2)},
        "weighted": {str(fsdp): weighted(fsdp) for fsdp in (None, 2)},
    },
    sys.stdout,
)
