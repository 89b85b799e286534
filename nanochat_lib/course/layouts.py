"""The training step of a small model in three layouts on all of JAX's devices, compiled and read, never run.

For chapter 06: called where there are eight devices (fake_devices.py). Plain data comes out.
"""

from __future__ import annotations

LAYOUTS = {"copies": 0, "cut by data": 1, "fully cut": -1}  # fsdp; -1: as many as there are devices
KEPT = ("memory", "collectives", "matmul_flops", "optimizer_flops")
QUICK = {"xla_backend_optimization_level": 0}  # what LLVM would gain is of no use here


def read_layouts(model: dict, micro: int) -> dict[str, dict]:
    """Layout -> the pre-flight's findings for a step of `micro` micro-batches with one row a device, and the places of
    a few arrays: name -> [shape, for each device the (start, stop) of every axis]. `model`: fields of GPTConfig."""
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    from nanochat_lib.optim import make_optimizer
    from nanochat_lib.preflight.compile_step import read
    from nanochat_lib.presets import OptimConfig
    from nanochat_lib.sharding import batch_spec, make_mesh
    from nanochat_lib.sizing import GPTConfig
    from nanochat_lib.train_step import HYPER, abstract_state, make_train_step

    config, result = GPTConfig(**model), {}
    hyper = {name: jax.ShapeDtypeStruct((), "float32") for name in HYPER}
    for name, fsdp in LAYOUTS.items():
        mesh = make_mesh(jax.device_count() if fsdp < 0 else max(fsdp, 1))
        own = mesh if fsdp else None  # copies: the step of a single device, which XLA spreads over all
        optimizer = make_optimizer(config, OptimConfig(), mesh=own)
        state = abstract_state(config, optimizer, own)
        if own is None:
            whole = NamedSharding(mesh, PartitionSpec())
            state = jax.tree.map(lambda x, w=whole: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=w), state)
        shape = (micro, mesh.size, config.sequence_len)
        tokens = jax.ShapeDtypeStruct(shape, "int32", sharding=NamedSharding(mesh, batch_spec()))
        step = make_train_step(config, optimizer, mesh=own)
        compiled = step.jitted.lower(state, {"inputs": tokens, "targets": tokens}, hyper).compile(QUICK)
        found = read(compiled, "cpu", None)
        arrays = {"rows of the batch": tokens, "c_fc of a layer": state.params["transformer.h.0.mlp.c_fc.weight"]}
        c = config.n_embd
        arrays |= {f"Muon, {k}": state.opt_state.muon[k].momentum for k in (f"{c}x{c}", f"{4 * c}x{c}")}
        result[name] = {k: found[k] for k in KEPT} | {"places": {k: places(x) for k, x in arrays.items()}}
    return result


def places(x: object) -> list:
    """[shape, for each device its part of every axis] of an array or of its description."""
    parts = x.sharding.devices_indices_map(x.shape).values()
    return [list(x.shape), [[list(cut.indices(n)[:2]) for cut, n in zip(p, x.shape, strict=True)] for p in parts]]
