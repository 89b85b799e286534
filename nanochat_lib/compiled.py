"""Reads a compiled program: what XLA made of a function, instruction by instruction.

`compiled.as_text()` is the only complete account of a program: which matrix products run in which dtype, what is sent
between devices, how often a loop's body runs, and, for a TPU, how many cycles the compiler expects each fusion to
take. Everything here is text in, plain data out; no device and no JAX is needed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

BYTES = {
    "pred": 1, "s4": 0.5, "u4": 0.5, "s8": 1, "u8": 1, "s16": 2, "u16": 2, "s32": 4, "u32": 4, "s64": 8, "u64": 8,
    "bf16": 2, "f16": 2, "f32": 4, "f64": 8, "f8e4m3fn": 1, "f8e5m2": 1, "f8e4m3": 1, "c64": 8, "c128": 16,
}  # fmt: skip
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all")
MATMULS = ("dot", "convolution")

HEADER = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
LINE = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = ")
ARRAY = re.compile(r"([a-z]+\d*(?:e\dm\d(?:fn)?)?)\[([\d,]*)\](\{[^}]*\})?")
NAME = re.compile(r"%?([\w.\-]+)")


@dataclass(frozen=True)
class Array:
    """One array type of the program text."""

    dtype: str
    dims: tuple[int, ...]
    space: int = 0  # memory space: 0 is a chip's large memory (HBM), anything else is on the chip

    @property
    def size(self) -> int:
        return math.prod(self.dims)

    @property
    def bytes(self) -> int:
        return int(self.size * BYTES.get(self.dtype, 0))

    def __str__(self) -> str:
        return f"{self.dtype}[{','.join(map(str, self.dims))}]"


@dataclass(frozen=True)
class Instruction:
    """One line of a computation."""

    name: str
    opcode: str
    shape: str
    operands: tuple[str, ...]
    attributes: str
    constant: str  # what stands between the parentheses of a constant or parameter

    @property
    def arrays(self) -> tuple[Array, ...]:
        """The result's arrays; one unless it is a tuple."""
        found = []
        for dtype, dims, layout in ARRAY.findall(self.shape):
            space = re.search(r"S\((\d+)\)", layout)
            found.append(Array(dtype, tuple(int(n) for n in dims.split(",") if n), int(space[1]) if space else 0))
        return tuple(found)

    @property
    def bytes(self) -> int:
        return sum(array.bytes for array in self.arrays)

    @property
    def op_name(self) -> str:
        """Where in the Python program it comes from: nested transformations and named scopes."""
        found = re.search(r'op_name="([^"]*)"', self.attributes)
        return found[1] if found else ""

    @property
    def cycles(self) -> int | None:
        """The TPU compiler's estimate of one run; None for what it does not cost."""
        found = re.search(r'"estimated_cycles":"(\d+)"', self.attributes)
        return int(found[1]) if found else None

    @property
    def branches(self) -> list[str]:
        """The computations a conditional chooses from."""
        found = re.search(r"branch_computations=\{([^}]*)\}", self.attributes)
        return NAME.findall(found[1]) if found else []

    def called(self, what: str) -> str | None:
        """The computation named by an attribute: body, condition, calls, to_apply."""
        found = re.search(rf"\b{what}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else None


@dataclass(frozen=True)
class Run:
    """An instruction of the scheduled program and how often a call of the program runs it."""

    instruction: Instruction
    computation: str
    times: int


class Module:
    """The computations of one program by name, `entry` among them."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.computations: dict[str, dict[str, Instruction]] = {}
        self.entry = ""
        current: dict[str, Instruction] = {}
        for line in text.splitlines():
            if header := HEADER.match(line):
                current = self.computations.setdefault(header[2], {})
                self.entry = header[2] if header[1] else self.entry
            elif start := LINE.match(line):
                current[start[1]] = parse(start[1], line[start.end() :])

    def trips(self, loop: Instruction) -> int:
        """How often a while loop runs: known to the compiler, or the constant its condition compares with."""
        if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.attributes):
            return int(known[1])
        condition = self.computations.get(loop.called("condition") or "", {})
        limits = [int(i.constant) for i in self.flat(condition) if i.opcode == "constant" and i.constant.isdigit()]
        return max(limits, default=1)

    def flat(self, computation: dict[str, Instruction]) -> Iterator[Instruction]:
        """The instructions of a computation and of the fusions it calls."""
        for instruction in computation.values():
            yield instruction
            inner = instruction.called("calls")
            if inner and instruction.opcode == "fusion":
                yield from self.flat(self.computations.get(inner, {}))

    def runs(self, computation: str | None = None, times: int = 1) -> Iterator[Run]:
        """Every scheduled instruction with the number of its runs; loops and calls are entered, fusions are not."""
        name = computation or self.entry
        for instruction in self.computations.get(name, {}).values():
            if instruction.opcode == "while":
                yield from self.runs(instruction.called("body"), times * self.trips(instruction))
            elif instruction.opcode == "conditional":
                for branch in instruction.branches:
                    yield from self.runs(branch, times)
            elif instruction.opcode in ("call", "async-start"):
                yield Run(instruction, name, times)
                if inner := (instruction.called("to_apply") or instruction.called("calls")):
                    yield from self.runs(inner, times)
            else:
                yield Run(instruction, name, times)

    @cached_property
    def loops(self) -> dict[str, int]:
        """Trip count of every loop by its body's name."""
        return {
            i.called("body"): self.trips(i)
            for c in self.computations.values()
            for i in c.values()
            if i.opcode == "while"
        }

    def operand_arrays(self, instruction: Instruction, computation: str) -> tuple[Array, ...]:
        """The array types of an instruction's operands."""
        scope = self.computations[computation]
        return tuple(array for name in instruction.operands if name in scope for array in scope[name].arrays)


def parse(name: str, rest: str) -> Instruction:
    """An instruction out of what follows its name: `shape opcode(operands), attributes`."""
    shape, rest = split_shape(rest)
    opcode, _, rest = rest.partition("(")
    inside, attributes = split_parentheses(rest)
    operands = () if opcode in ("constant", "parameter") else tuple(operand_names(inside))
    return Instruction(name, opcode, shape, operands, attributes, inside if not operands else "")


def split_shape(text: str) -> tuple[str, str]:
    if text.startswith("("):
        inside, rest = split_parentheses(text[1:])
        return f"({inside})", rest.lstrip()
    shape, _, rest = text.partition(" ")
    return shape, rest


def split_parentheses(text: str) -> tuple[str, str]:
    """(what stands before the closing parenthesis, what comes after it)."""
    depth = 1
    for position, character in enumerate(text):
        depth += (character == "(") - (character == ")")
        if not depth:
            return text[:position], text[position + 1 :]
    return text, ""


def operand_names(text: str) -> Iterator[str]:
    """Names in an operand list, which may carry types and comments."""
    text = re.sub(r"/\*.*?\*/", "", text)
    depth, start = 0, 0
    for position, character in enumerate(text + ","):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and not depth:
            words = NAME.findall(text[start:position].rsplit(" ", 1)[-1])
            if words:
                yield words[-1]
            start = position + 1
