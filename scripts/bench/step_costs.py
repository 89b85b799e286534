"""Costs of a compiled training step by kind: of one micro-batch, and of what is left of an optimiser step."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from nanochat_lib.compiled import COLLECTIVES, MATMULS, Instruction, Module

KERNEL = "attention kernel's own"  # what belongs to the kernel that neither side wrote
OUTSIDE = "attention outside the kernel"
KINDS = (
    "matmul", OUTSIDE, "elementwise", "masks", "loss", "embedding gradients", "optimizer",
    "collectives",
)  # fmt: skip
# Instructions that are no work, or whose work is another one's.
FREE = ("parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "partition-id", "after-all")
HOUSEKEEPING = ("ConcatBitcast", "AllocateBuffer", "Sharding")
LARGE = 2**20  # elements of an array of booleans that is worth a kind of its own


@dataclass
class Cost:
    """Of a part of a program, on one chip: estimated cycles by kind; of what has no estimate, results in bytes."""

    cycles: Counter = field(default_factory=Counter)
    uncosted: Counter = field(default_factory=Counter)

    @property
    def total(self) -> float:
        """Cycles without the attention kernel's own."""
        return sum(n for kind, n in self.cycles.items() if kind != KERNEL)

    def add(self, module: Module, instruction: Instruction, times: int, in_loop: bool) -> None:
        if instruction.cycles is not None:
            self.cycles[kind_of(module, instruction, in_loop)] += times * instruction.cycles
        elif name := uncosted_name(module, instruction):
            self.uncosted[name] += times * instruction.bytes


@dataclass
class Program:
    """A compiled step: one micro-batch, and the rest of an optimiser step."""

    micro: Cost
    rest: Cost
    trips: int  # micro-batches of the step


def read(text: str) -> Program:
    """The costs of a program whose dearest loop runs over the micro-batches."""
    module = Module(text)
    if not module.loops:
        raise SystemExit("tpu_estimate: the program has no loop over micro-batches; use --micro 2 or more")
    weight = {body: sum(r.times * (r.instruction.cycles or 0) for r in module.runs(body)) for body in module.loops}
    body = max(weight, key=weight.get)
    program = Program(Cost(), Cost(), module.loops[body])
    inside = set()
    for run in module.runs(body):
        program.micro.add(module, run.instruction, run.times, in_loop=True)
        inside.add(run.computation)
    for run in module.runs():
        if run.computation not in inside:
            program.rest.add(module, run.instruction, run.times, in_loop=False)
    return program


def kind_of(module: Module, instruction: Instruction, in_loop: bool) -> str:
    """One of KINDS, or KERNEL for what is wholly the attention kernel's: a fusion with anything else in it counts."""
    parts = [part for part in module.flat({"": instruction}) if part.opcode not in FREE]
    if named := [part.op_name for part in parts if part.op_name]:
        if all("splash" in name for name in named):
            return KERNEL
    products = [part for part in parts if part.opcode in MATMULS]
    # A fusion is named after its last instruction; the product inside says better what it is for.
    names = [part.op_name for part in products] + [instruction.op_name]
    scopes = {word for name in names for word in re.split(r"[/()]", name)}
    if instruction.opcode.startswith(COLLECTIVES) or "collectives" in scopes:
        return "collectives"
    if "optimizer" in scopes:
        return "optimizer"
    if "embedding_gradients" in scopes or "dynamic_update_index_in_dim" in scopes:  # rows kept for the step's end
        return "embedding gradients"
    if "loss" in scopes:
        return "loss"
    if any(array.dtype in ("u8", "pred") and array.size >= LARGE for array in instruction.arrays):
        return "masks"
    if products:
        return "matmul"
    # What stands in no loop is a weight's copy or cast, named after its first reader.
    return OUTSIDE if "attention" in scopes and in_loop else "elementwise"


def uncosted_name(module: Module, instruction: Instruction) -> str | None:
    """What to call an instruction without an estimate; None when it does nothing worth listing."""
    opcode = instruction.opcode
    if opcode in FREE or opcode.endswith("-start") or instruction.bytes < 2**12:
        return None
    if opcode in ("copy-done", "slice-done"):
        return "prefetches, beside other work"
    if opcode == "custom-call":
        target = re.search(r'custom_call_target="([^"]*)"', instruction.attributes)
        name = re.sub(r"[.\d]+$", "", instruction.name)
        return None if target and target[1] in HOUSEKEEPING else f"kernel {name}"
    if opcode == "fusion":
        inner = {part.opcode for part in module.flat({"": instruction})}
        return f"fused {next((o for o in ('scatter', 'gather', 'sort', *MATMULS) if o in inner), 'moves')}"
    return opcode.removesuffix("-done")


def extrapolate(costs: dict[int, Cost], depth: int) -> Cost:
    """The line through one or two depths' figures, at `depth`."""
    shallow, deep = min(costs), max(costs)
    if shallow == deep:
        return costs[deep]
    share = (depth - shallow) / (deep - shallow)

    def line(a: Counter, b: Counter) -> Counter:
        return Counter({key: a[key] + share * (b[key] - a[key]) for key in a | b})

    a, b = costs[shallow], costs[deep]
    return Cost(line(a.cycles, b.cycles), line(a.uncosted, b.uncosted))
