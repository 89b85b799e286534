"""What a compiled program does: products and their dtypes, bytes moved, messages between devices, estimated cycles.

Counts come from the program's text (compiled.py) with every loop's body counted as often as it runs, which XLA's own
cost analysis does not do.
"""

from __future__ import annotations

import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass

from nanochat_lib.compiled import COLLECTIVES, MATMULS, Array, Instruction, Module, Run

SPLASH = ("splash", "flash_attention")
KINDS = (
    "matmul", "attention", "elementwise", "masks", "loss", "embedding gradients", "optimizer", "collectives",
)  # fmt: skip
# The part of the program an instruction belongs to, by the named scopes of the step; the first that matches.
SCOPES = ("embedding_gradients", "optimizer", "loss", "attention", "mlp", "embedding", "collectives")


@dataclass(frozen=True)
class Matmul:
    """One matrix product of the program: (batch) m × k times k × n."""

    scope: str
    batch: int
    m: int
    k: int
    n: int
    operands: tuple[str, str]  # dtypes
    result: str  # dtype in which the sum comes out of the matrix unit
    precision: str  # "default", "high" or "highest"
    times: int  # runs in one call of the program

    @property
    def flops(self) -> int:
        """Of one call of the program."""
        return 2 * self.batch * self.m * self.k * self.n * self.times

    def padded_flops(self, unit: int) -> int:
        """FLOPs that a unit × unit array spends on it."""
        return 2 * self.batch * padded(self.m, self.k, self.n, unit) * self.times


def padded(m: int, k: int, n: int, unit: int) -> int:
    """Multiplications that a unit × unit array spends on m × k times k × n: k and one of m, n are filled up to whole
    arrays, the other streams through in groups of 8. The compiler may choose which; this is the best choice."""

    def up(size: int, to: int) -> int:
        return math.ceil(size / to) * to

    return min(up(m, 8) * up(k, unit) * up(n, unit), up(m, unit) * up(k, unit) * up(n, 8))


def scope_of(instruction: Instruction) -> str:
    """The named scope an instruction stems from, "other" when none."""
    words = re.split(r"[/()]", instruction.op_name)
    return next((scope for scope in SCOPES if scope in words), "other")


def matmuls(module: Module) -> list[Matmul]:
    """Every matrix product, those inside of fusions too."""
    found = []
    for run in module.runs():
        for computation, instruction in inside(module, run.computation, run.instruction):
            if instruction.opcode in MATMULS:
                named = instruction if instruction.op_name else origin(module, run)
                found.append(as_matmul(module, computation, instruction, run.times, scope_of(named)))
    return found


def origin(module: Module, run: Run) -> Instruction:
    """What an instruction is taken to stem from: itself if it has a name, else the nearest named one it reads from.

    The compiler forgets the names of products whose batch axis of one it removes: a stack of a single matrix.
    """
    reached, seen, scope = [run.instruction], {run.instruction.name}, module.computations[run.computation]
    for instruction in reached:  # breadth first: the list grows while it is read
        if instruction.op_name:
            return instruction
        reached += [scope[name] for name in instruction.operands if name in scope and name not in seen]
        seen.update(instruction.operands)
    return run.instruction


def inside(module: Module, computation: str, instruction: Instruction) -> Iterator[tuple[str, Instruction]]:
    """The instruction, and what a fusion consists of, each with its computation."""
    yield computation, instruction
    inner = instruction.called("calls")
    if instruction.opcode == "fusion" and inner:
        for part in module.computations.get(inner, {}).values():
            yield from inside(module, inner, part)


def as_matmul(module: Module, computation: str, instruction: Instruction, times: int, scope: str) -> Matmul:
    left, right = (module.computations[computation][name].arrays[0] for name in instruction.operands[:2])
    out = instruction.arrays[0]
    contracted, batch = contraction(instruction, left), batch_size(instruction, left)
    m = left.size // (contracted * batch)
    n = out.size // max(m * batch, 1)
    precision = re.search(r"operand_precision=\{(\w+)", instruction.attributes)
    return Matmul(
        scope, batch, m, contracted, n, (left.dtype, right.dtype), out.dtype,
        precision[1] if precision else "default", times,
    )  # fmt: skip


def axes(text: str, name: str) -> list[int]:
    found = re.search(rf"{name}=\{{([\d,]*)\}}", text)
    return [int(axis) for axis in found[1].split(",") if axis] if found else []


def contraction(instruction: Instruction, left: Array) -> int:
    """Length of the contracted axes. A TPU writes products as convolutions: the features of the left operand, and
    the window when an axis is summed by sliding nothing over it."""
    if instruction.opcode == "dot":
        return math.prod(left.dims[axis] for axis in axes(instruction.attributes, "lhs_contracting_dims"))
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.attributes)
    size, batched = window_of(instruction)
    return left.dims[labels[1].index("f")] * (1 if batched else size) if labels else 1


def window_of(instruction: Instruction) -> tuple[int, bool]:
    """(size of a convolution's window, whether it stands for a batch: such a one is dilated so that each position of
    the left operand meets its own of the right one)."""
    found = re.search(r"window=\{size=([\dx]+)([^}]*)\}", instruction.attributes)
    return (math.prod(int(n) for n in found[1].split("x")), "lhs_dilate" in found[2]) if found else (1, False)


def batch_size(instruction: Instruction, left: Array) -> int:
    if instruction.opcode == "dot":
        return math.prod(left.dims[axis] for axis in axes(instruction.attributes, "lhs_batch_dims"))
    groups = re.search(r"(?:batch|feature)_group_count=(\d+)", instruction.attributes)
    size, batched = window_of(instruction)
    return size if batched else int(groups[1]) if groups else 1


def collectives(module: Module) -> dict[str, tuple[int, int]]:
    """By kind: (how many times, bytes of their results on one device) in one call of the program."""
    count, size = Counter(), Counter()
    for run in module.runs():
        kind = run.instruction.opcode.removesuffix("-start")
        if kind in COLLECTIVES:
            arrays = run.instruction.arrays
            if run.instruction.opcode.endswith("-start") and len(arrays) > 1:
                arrays = arrays[len(arrays) // 2 :]  # (operands, results)
            count[kind] += run.times
            size[kind] += run.times * sum(array.bytes for array in arrays)
    return {kind: (count[kind], size[kind]) for kind in count}


FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all", "partition-id", "iota", "while",
    "call", "conditional",
}  # fmt: skip


def hbm_bytes(module: Module, computation: str, instruction: Instruction) -> int:
    """Bytes that one run reads from and writes to the chip's large memory.

    Slices that are read from, or written in place into, a larger array count with their own size.
    """
    if instruction.opcode in FREE or instruction.opcode.endswith("-done"):
        return 0
    if instruction.opcode in ("copy-start", "slice-start"):  # to or from the chip's own memory, beside other work
        ends = [array for array in instruction.arrays if array.bytes > 16]
        return min((array.bytes for array in ends), default=0) * sum(not array.space for array in ends)
    scope = module.computations[computation]
    inner = module.computations.get(instruction.called("calls") or "", {}) if instruction.opcode == "fusion" else {}
    total = 0
    parameters = [i for i in inner.values() if i.opcode == "parameter"]
    by_number = {int(p.constant): p.name for p in parameters if p.constant.isdigit()}
    for number, name in enumerate(instruction.operands):
        for array in scope[name].arrays if name in scope else ():
            if array.space:
                continue
            users = [i for i in inner.values() if by_number.get(number) in i.operands]
            if users and all(sliced(user, by_number[number]) for user in users):
                total += sum(0 if u.opcode == "dynamic-update-slice" else u.bytes for u in users)
            else:
                total += array.bytes
    results = sum(array.bytes for array in instruction.arrays if not array.space)
    for update in (i for i in inner.values() if i.opcode == "dynamic-update-slice"):
        results -= update.bytes - (inner[update.operands[1]].bytes if update.operands[1] in inner else 0)
    return total + max(results, 0)


def sliced(user: Instruction, name: str) -> bool:
    """Whether `user` touches only a part of its operand `name`."""
    return user.opcode in ("dynamic-slice", "gather", "dynamic-update-slice") and user.operands[0] == name


def memory_traffic(module: Module) -> int:
    """HBM bytes of one call of the program on one device."""
    return sum(run.times * hbm_bytes(module, run.computation, run.instruction) for run in module.runs())


@dataclass
class Cycles:
    """The TPU compiler's estimate by kind; what it does not cost stands in `uncosted`, bytes by name."""

    by_kind: dict[str, int]
    uncosted: dict[str, int]

    @property
    def total(self) -> int:
        return sum(self.by_kind.values())


def estimated_cycles(module: Module, computation: str | None = None) -> Cycles:
    """Estimated cycles of one call of the program, or of one run of `computation` (a loop's body)."""
    by_kind: dict[str, int] = defaultdict(int)
    uncosted: dict[str, int] = defaultdict(int)
    for run in module.runs(computation):
        instruction = run.instruction
        if instruction.cycles is not None:
            by_kind[kind_of(module, run.computation, instruction)] += run.times * instruction.cycles
        elif instruction.opcode in ("fusion", "custom-call", "scatter", "sort") and not housekeeping(instruction):
            uncosted[label(instruction)] += run.times * hbm_bytes(module, run.computation, instruction)
    return Cycles(dict(by_kind), dict(uncosted))


def housekeeping(instruction: Instruction) -> bool:
    """Custom calls that only reserve or rename memory."""
    return any(word in instruction.attributes for word in ("AllocateBuffer", "ConcatBitcast", "Sharding"))


def label(instruction: Instruction) -> str:
    """An instruction's name without its number."""
    return re.sub(r"[.\d]+$", "", instruction.name)


def kind_of(module: Module, computation: str, instruction: Instruction) -> str:
    """One of KINDS. The kernel's own preparations count as attention, wherever products are fused as matmul."""
    scope = scope_of(instruction)
    if any(word in instruction.op_name for word in SPLASH):
        return "attention"
    if instruction.opcode.startswith(COLLECTIVES) or scope == "collectives":
        return "collectives"
    if scope in ("optimizer", "loss"):
        return scope
    if scope in ("embedding", "embedding_gradients"):
        return "embedding gradients"
    if any(array.dtype in ("u8", "pred") and array.size > 2**16 for array in instruction.arrays):
        return "masks"
    if any(part.opcode in MATMULS for _, part in inside(module, computation, instruction)):
        return "matmul"
    return "elementwise"
