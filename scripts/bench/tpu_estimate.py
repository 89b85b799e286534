"""Two training steps compiled for a TPU that is not there, and the cycles its compiler expects of each.

Straightforward: the step most JAX users would write (straightforward.py). Ours: nanochat_lib.train_step. The model is
recipe 4 at d24's width; both read the same micro-batches, have the same attention kernel and the same optimiser.

The compiler estimates every fusion but neither custom kernels, nor gathers, nor messages between chips; those are
listed with their bytes. Needs the `tpu` extra, no TPU. Small depths are compiled and carried on linearly, because a
layer takes half a minute to some minutes on two cores; `--layers 24` compiles the real thing.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")  # do not ask the network what TPU this machine is
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

import jax
import jax.numpy as jnp
import numpy as np
import straightforward
from jax.experimental import topologies
from jax.sharding import Mesh
from step_costs import KERNEL, KINDS, Cost, Program, extrapolate, read

from nanochat_lib import sharding
from nanochat_lib.attention import attention
from nanochat_lib.hardware import CHIPS, TOPOLOGIES, Chip
from nanochat_lib.kernels import segment_sum
from nanochat_lib.optim import make_optimizer
from nanochat_lib.plan import StepPlan, compute_for
from nanochat_lib.presets import OptimConfig, preset
from nanochat_lib.progress import format_seconds
from nanochat_lib.sizing import GPTConfig

EXAMPLE = "example: python scripts/bench/tpu_estimate.py --layers 2,4 --rows 2 --heads 12 --json estimate.json"
SIDES = ("straightforward", "ours")
PRESET = "tpu-v6e-8-d24-h128"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=EXAMPLE, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    slices = [topology.name for topology in TOPOLOGIES.values()]
    parser.add_argument("--layers", default="2,4", help="one depth, or two to extrapolate from (default 2,4)")
    parser.add_argument("--depth", type=int, default=24, help="layers of the table when two are compiled (default 24)")
    parser.add_argument("--rows", type=int, default=2, help="sequences of a micro-batch on a chip (default 2)")
    parser.add_argument(
        "--heads", type=int, choices=(6, 12), default=12, help="12 of 128 channels or 6 of 256 (default 12)"
    )
    parser.add_argument("--topology", default="v6e:2x4", choices=slices, metavar="SLICE", help=" ".join(slices))
    parser.add_argument("--micro", type=int, default=-1, help="micro-batches a step (default: those of 2^20 tokens)")
    parser.add_argument("--loss-chunks", type=int, default=-1, help="parts of the logits (default: our rule)")
    parser.add_argument("--side", choices=(*SIDES, "both"), default="both", help="compile one side only")
    parser.add_argument("--json", type=Path, help="write every figure to this file")
    parser.add_argument("--text", type=Path, help="keep the compiled programs' text in this folder")
    return parser.parse_args()


@dataclasses.dataclass(frozen=True)
class Setting:
    """What both sides are compiled for."""

    config: GPTConfig  # at the depth of the tables
    chip: Chip
    devices: np.ndarray
    rows: int  # of a micro-batch on one chip
    batches: int  # micro-batches of a step
    layers: tuple[int, ...]  # the depths that are compiled, one or two
    loss_chunks: int = -1  # parts of the logits in our step; -1: by rule

    def at(self, depth: int) -> GPTConfig:
        return dataclasses.replace(self.config, n_layer=depth)

    def __str__(self) -> str:
        c, last = self.config, f" (from {' and '.join(map(str, self.layers))})" if len(self.layers) > 1 else ""
        return (
            f"{self.devices.size} chips of {self.chip.name}, {c.n_layer} layers{last}, width {c.n_embd}, "
            f"{c.n_head} heads of {c.head_dim}, {self.rows} × {c.sequence_len} tokens a chip and micro-batch, "
            f"{self.batches} micro-batches a step"
        )


def setting_of(args: argparse.Namespace) -> Setting:
    layers = tuple(sorted({int(n) if n.isdigit() else 0 for n in args.layers.split(",")}))
    if not 1 <= len(layers) <= 2 or layers[0] < 1 or args.rows < 1:
        raise SystemExit(
            f"tpu_estimate: --layers {args.layers} --rows {args.rows}; give one or two depths, both at least 1"
        )
    chip = next(chip for chip in CHIPS if chip.name == args.topology.partition(":")[0])
    devices = np.array(topologies.get_topology_desc(platform="tpu", topology_name=args.topology).devices)
    run = preset(PRESET)
    config = dataclasses.replace(
        run.gpt_config(),
        n_layer=args.depth if len(layers) > 1 else layers[0],
        n_head=args.heads,
        n_kv_head=args.heads,
    )
    batches = run.horizon().batch_tokens // (args.rows * devices.size * config.sequence_len)
    if args.micro > 0:
        batches = args.micro
    if batches < 2:
        raise SystemExit(f"tpu_estimate: {batches} micro-batches of {args.rows} rows; use --micro 2 or more")
    return Setting(config, chip, devices, args.rows, batches, layers, args.loss_chunks)


def our_plan(setting: Setting, config: GPTConfig) -> StepPlan:
    """The step that a run of the preset would compile."""
    mesh, rows = sharding.make_mesh(1, setting.devices), setting.rows
    settings = dataclasses.replace(preset(PRESET).compute, loss_chunks=setting.loss_chunks)
    compute = compute_for(settings, config, "tpu", setting.devices[0].device_kind, rows)
    optimizer = make_optimizer(config, OptimConfig(), jnp.dtype(compute.dtype), mesh=mesh)
    return StepPlan(config, compute, optimizer, mesh, setting.batches, rows * mesh.size, "float32")


def lower_straightforward(setting: Setting, config: GPTConfig) -> Any:
    plan, mesh = our_plan(setting, config), Mesh(setting.devices, "data")
    attend = lambda q, k, v, window: attention(q, k, v, window=window, backend=plan.compute.attention)  # noqa: E731
    dtype = jnp.dtype(plan.compute.dtype)
    optimizer = make_optimizer(config, OptimConfig(), dtype)
    step = straightforward.make_step(config, optimizer, mesh, dtype, attend)
    return step.lower(*straightforward.abstract_arguments(config, optimizer, mesh, plan.micro_batches, plan.rows))


def lower_ours(setting: Setting, config: GPTConfig) -> Any:
    return our_plan(setting, config).lower()


LOWER: dict[str, Callable] = {"straightforward": lower_straightforward, "ours": lower_ours}


def compiled(setting: Setting, side: str, depth: int, folder: Path | None) -> Program:
    with elapsed(f"{side}, {depth} layers"):
        lowered = LOWER[side](setting, setting.at(depth))
        try:
            executable = lowered.compile()
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            said = re.search(r"Used [\d.]+\w+ of [\d.]+\w+ hbm", str(error))
            raise SystemExit(
                f"tpu_estimate: {side}, {depth} layers do not fit a chip's memory{f' ({said[0]})' if said else ''}; "
                "take fewer layers, rows or micro-batches"
            ) from None
    text, sizes = executable.as_text(), executable.memory_analysis()
    if folder:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{side}-{depth}.txt").write_text(text, encoding="utf-8")
    program = read(text)
    print(
        f"{side:15} {depth:2} layers: {program.micro.total / 1e6:8.2f} million cycles a micro-batch, "
        f"{program.rest.total / 1e6:8.2f} once a step, "
        f"{(sizes.argument_size_in_bytes + sizes.temp_size_in_bytes) / 2**30:.2f} GiB, loop of {program.trips}",
        flush=True,
    )
    return program


def table_gradient_cycles(setting: Setting) -> float:
    """Cycles a step of our kernel that sums the tables' gradients, which the compiler does not cost: the larger of its
    products at the chip's peak and its bytes at the chip's bandwidth, and the gather of its rows, read and written."""
    config, chip = setting.config, setting.chip
    n = setting.batches * setting.rows * config.sequence_len
    flops, moved = segment_sum.cost(n, config.padded_vocab_size, config.n_embd, jnp.bfloat16)
    seconds = max(flops / chip.peak["bfloat16"], moved / chip.bandwidth) + 2 * 2 * n * config.n_embd / chip.bandwidth
    return (1 + len(config.value_embedding_layers)) * seconds * chip.clock_hz


@contextmanager
def elapsed(what: str, every: float = 30.0) -> Iterator[None]:
    """Says on the standard error how long the work has taken, now and then and at the end."""
    start, done = time.monotonic(), threading.Event()

    def say(state: str) -> None:
        print(f"{what}: {state} {format_seconds(time.monotonic() - start)}", file=sys.stderr, flush=True)

    def watch() -> None:
        while not done.wait(every):
            say("compiling,")

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
        say("compiled in")
    finally:
        done.set()
        thread.join()


def table(title: str, rows: dict[str, tuple[float, ...]], unit: float) -> Iterator[str]:
    """Lines of a table with one column a side, and the second as a share of the first."""
    yield f"{title:44}{''.join(f'{side:>17}' for side in SIDES)}{'ours / it':>11}"
    for name, values in rows.items():
        if any(values):
            share = f"{values[1] / values[0]:11.3f}" if values[0] else f"{'':11}"
            yield f"  {name:42}{''.join(f'{value / unit:17,.2f}' for value in values)}{share}"


def report(micro: dict[str, Cost], rest: dict[str, Cost], tables: dict[str, float], batches: int) -> Iterator[str]:
    """The tables. `tables`: cycles of the kernel for the embeddings' gradients, by side."""
    pick = lambda costs, get: tuple(get(costs[side]) for side in SIDES)  # noqa: E731
    by_kind = lambda costs: {kind: pick(costs, lambda c: c.cycles[kind]) for kind in KINDS}  # noqa: E731, B023
    sums = pick(micro, lambda c: c.total)
    kernel = {KERNEL + ", not in the sum": pick(micro, lambda c: c.cycles[KERNEL])}
    yield from table("A micro-batch, million estimated cycles", by_kind(micro) | {"sum": sums} | kernel, 1e6)
    yield ""
    outside = by_kind(rest) | {"table gradients: kernel, by roofline": tuple(tables[side] for side in SIDES)}
    step = tuple(sum(values) for values in zip(*outside.values(), strict=True))
    share = tuple(value / batches for value in step)
    whole = tuple(a + b for a, b in zip(sums, share, strict=True))
    lines = {"sum": step, f"sum / {batches} micro-batches": share, "micro-batch and its share": whole}
    yield from table("Once a step, million cycles", outside | lines, 1e6)
    for title, costs in (("a micro-batch", micro), ("once a step", rest)):
        yield ""
        names = sorted(set().union(*(costs[side].uncosted for side in SIDES)))
        rows = {name: pick(costs, lambda c: c.uncosted[name]) for name in names}  # noqa: B023
        yield from table(f"No estimate, {title}, MB of results", rows, 1e6)


NOTES = """\
Attention kernels have no estimate and are the same on both sides, and so is their own code around them. The
straightforward step sums the gradients of all tables by products, which the estimate holds; ours by a kernel once a
step, which it does not hold: "micro-batch and its share" adds it, by roofline. Gathers read the embeddings on both
sides. Nothing is said about messages between chips. The straightforward optimiser is ours made without a mesh, so every
chip updates everything."""
CARRIED_ON = """\
Carried on from small depths, a fusion that the compiler made differently in one of them counts several times over.
Our optimiser deals equal matrices out to the chips, so it grows with the depth in steps, not in a line."""


def figures(cost: Cost) -> dict:
    return {"cycles": dict(cost.cycles), "sum": cost.total, "uncosted_bytes": dict(cost.uncosted)}


def main() -> None:
    args = arguments()
    if importlib.util.find_spec("libtpu") is None:
        raise SystemExit("tpu_estimate: the TPU compiler is not installed; pip install -e '.[tpu]'")
    setting = setting_of(args)
    sides = SIDES if args.side == "both" else (args.side,)
    programs: dict[str, dict[int, Program]] = {side: {} for side in sides}
    for depth in setting.layers:
        for side in sides:
            programs[side][depth] = compiled(setting, side, depth, args.text)

    depth = setting.config.n_layer
    micro, rest = {side: Cost() for side in SIDES}, {side: Cost() for side in SIDES}
    for side, found in programs.items():
        micro[side] = extrapolate({n: program.micro for n, program in found.items()}, depth)
        rest[side] = extrapolate({n: program.rest for n, program in found.items()}, depth)
    tables = {"straightforward": 0.0, "ours": table_gradient_cycles(setting)}
    print(f"\n{setting}\n")
    print("\n".join(report(micro, rest, tables, setting.batches)), NOTES, sep="\n\n")
    if len(setting.layers) > 1:
        print(CARRIED_ON)
    if args.json:
        result = {
            side: {"micro": figures(micro[side]), "once": figures(rest[side]), "table_gradients": tables[side]}
            | {f"{n} layers": {"micro": figures(p.micro), "once": figures(p.rest)} for n, p in programs[side].items()}
            for side in sides
        }
        args.json.write_text(json.dumps({"setting": str(setting)} | result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
