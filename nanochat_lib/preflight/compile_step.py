"""Compiles a preset's real training step ahead of time and writes down what the compiler says. Runs in a process of
its own (`python -m nanochat_lib.preflight.compile_step`): libtpu makes `import jax` noisy, and a CPU with several
devices must be asked for before JAX starts. Configuration as JSON on the standard input, findings as JSON into a file.
"""

from __future__ import annotations

import json
import os
import re
import sys
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

from nanochat_lib.hardware import CHIPS, TOPOLOGIES, Chip
from nanochat_lib.presets import RunConfig, Target, from_dict

LARGEST = 12


def environment(kind: str, devices: int) -> dict[str, str]:
    """What the process must be started with."""
    common = {"JAX_PLATFORMS": "cpu"}
    if kind == "tpu":
        return common | {"TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    return common | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}


def chip_named(name: str) -> Chip | None:
    return next((chip for chip in CHIPS if chip.name == name), None)


def findings(config: RunConfig) -> dict:
    """Compiles the step of `config` for its target and reads the result."""
    import jax

    from nanochat_lib import sharding
    from nanochat_lib.plan import step_plan

    target = config.target
    if target.kind == "tpu":
        from jax.experimental import topologies

        devices = topologies.get_topology_desc(
            platform="tpu", topology_name=TOPOLOGIES[target.chip, target.devices].name
        ).devices
    else:
        devices = jax.devices()[: target.devices]
    mesh = sharding.make_mesh(config.compute.fsdp, devices) if len(devices) > 1 else None
    plan = step_plan(config, mesh, target.kind, devices[0].device_kind)
    start = time.perf_counter()
    lowered = plan.lower()
    found = {"lower_seconds": time.perf_counter() - start, "micro_batches": plan.micro_batches, "rows": plan.rows}
    found |= {"attention": plan.compute.attention, "dtype": plan.compute.dtype, "loss_chunks": plan.compute.loss_chunks}
    start = time.perf_counter()
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return found | {"compile_seconds": time.perf_counter() - start} | exhausted(str(error))
    found["compile_seconds"] = time.perf_counter() - start
    return found | read(compiled, target.kind, chip_named(target.chip))


def exhausted(message: str) -> dict:
    """What the compiler says about a program that does not fit."""
    sizes = dict(re.findall(r"(Used|of) ([\d.]+[KMGT])", message))
    buffers = re.findall(r"Size: ([\d.]+[KMGT])\s+(?:Operator: op_name=\"([^\"]*)\"\s+)?Shape: (\S+)", message)
    return {
        "fits": False,
        "needed": to_bytes(sizes.get("Used", "0")),
        "buffers": [
            {"bytes": to_bytes(size), "shape": shape.split("{")[0], "where": where} for size, where, shape in buffers
        ][:LARGEST],
    }


def to_bytes(size: str) -> float:
    unit = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
    return float(size[:-1]) * unit[size[-1]] if size[-1] in unit else float(size)


def read(compiled: object, kind: str, chip: Chip | None) -> dict:
    """Memory, products, traffic, messages and cycles of a compiled step, per device and call."""
    from nanochat_lib.compiled import Module
    from nanochat_lib.preflight import accounting

    sizes = compiled.memory_analysis()
    module = Module(compiled.as_text())
    products = accounting.matmuls(module)
    memory = memory_parts(sizes)
    cost = compiled.cost_analysis() or {}
    found = {
        "fits": True,
        "memory": memory,
        "needed": sum(memory.values()),
        "aliased": sizes.alias_size_in_bytes,
        "buffers": largest_buffers(module),
        "matmuls": summary(products, chip),
        "matmul_flops": sum(p.flops for p in products if p.scope != "optimizer"),
        "optimizer_flops": sum(p.flops for p in products if p.scope == "optimizer"),
        "compiler_flops": cost.get("flops"),
        "hbm_bytes": accounting.memory_traffic(module),
        "collectives": accounting.collectives(module),
    }
    if kind == "tpu":
        body = max(module.loops, key=lambda name: len(module.computations[name]), default=None)
        whole = accounting.estimated_cycles(module)
        micro = accounting.estimated_cycles(module, body) if body else whole
        found["cycles"] = {"step": whole.by_kind, "micro": micro.by_kind, "uncosted": whole.uncosted}
    return found


def memory_parts(sizes: Any) -> dict[str, int]:
    """Bytes of one device by what they hold, out of a compiled program's memory_analysis(); the sum is the peak.

    A result that is written over a donated argument (aliased) needs no place of its own.
    """
    return {
        "arguments": sizes.argument_size_in_bytes,
        "results": sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        "temporary": sizes.temp_size_in_bytes,
        "program": sizes.generated_code_size_in_bytes,
    }


def summary(products: list, chip: Chip | None) -> list[dict]:
    """Equal products of one scope together, the dearest first; `waste`: share of the matrix unit's work on padding."""
    groups: dict[tuple, list] = defaultdict(list)
    for p in products:
        groups[p.scope, p.batch, p.m, p.k, p.n, p.operands, p.result, p.precision].append(p)
    unit = chip.matrix_unit if chip else None
    rows = []
    for (scope, batch, m, k, n, operands, result, precision), members in groups.items():
        flops = sum(p.flops for p in members)
        rows.append(
            {
                "scope": scope, "batch": batch, "m": m, "k": k, "n": n, "operands": operands, "result": result,
                "precision": precision, "runs": sum(p.times for p in members), "flops": flops,
                "waste": 1 - flops / sum(p.padded_flops(unit) for p in members) if unit else None,
            }
        )  # fmt: skip
    return sorted(rows, key=lambda row: -row["flops"])


def largest_buffers(module: object) -> list[dict]:
    """The largest arrays of the scheduled program, equal ones once."""
    seen: dict[tuple[str, str], dict] = {}
    for run in module.runs():
        for array in run.instruction.arrays:
            if not array.space and run.instruction.opcode not in ("tuple", "get-tuple-element", "bitcast", "while"):
                key = str(array), run.instruction.op_name.rsplit("/", 1)[-1]
                entry = {"bytes": array.bytes, "shape": str(array), "where": run.instruction.op_name, "count": 0}
                seen.setdefault(key, entry)["count"] += 1
    return sorted(seen.values(), key=lambda b: -b["bytes"])[:LARGEST]


def main(output: str) -> None:
    values = json.load(sys.stdin)
    config = replace(from_dict(values), target=Target(**values["target"]))  # it may be another than the preset's
    Path(output).write_text(json.dumps(findings(config)), encoding="utf-8")


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main(sys.argv[1])
