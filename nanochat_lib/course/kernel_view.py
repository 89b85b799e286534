"""What a Pallas kernel does to a TPU's memory, step by step, on a computer without a TPU.

A kernel on a TPU sees blocks. Before each step of its grid the chip copies the blocks that the step reads from its
large memory (HBM) into its small fast one (VMEM), and only those that the step before did not use already.
Everything that decides this stands in the call itself: the grid, and for each array the shape of a block and the
function that says which block a step needs. `record` catches these while JAX traces the function, so what is drawn is
what the kernel says, and it computes nothing.

    calls = record(flash_attention, q, k, v, …)     # arrays or their shapes
    cost(calls[0], chip)                            # bytes, FLOPs, seconds at the roofline
    draw_step(calls[0], step)                       # the grid, the blocks and the copies of one step

The copies are those of Pallas' own pipeline. What is not in the picture: how long a copy takes to begin, whether it
hides behind a product, and arithmetic outside of the products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl

from nanochat_lib.errors import UserError
from nanochat_lib.hardware import Chip


@dataclass(frozen=True)
class Operand:
    """One array of a call and the blocks that the steps of the grid use of it."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    block: tuple[int, ...]  # sizes of a block, one for each axis of the array
    visits: np.ndarray  # (steps, axes): which block each step uses
    output: bool

    @property
    def block_bytes(self) -> int:
        return math.prod(self.block) * jnp.dtype(self.dtype).itemsize

    @property
    def bytes(self) -> int:
        """Of the whole array."""
        return math.prod(self.shape) * jnp.dtype(self.dtype).itemsize

    @property
    def blocks(self) -> tuple[int, ...]:
        """How many blocks there are along each axis."""
        return tuple(-(-size // block) for size, block in zip(self.shape, self.block, strict=True))

    @property
    def copies(self) -> np.ndarray:
        """Boolean (steps,): is a block copied for this step, from HBM for an input, to HBM after it for an output?"""
        if self.output:
            return fetches(self.visits[::-1])[::-1]
        return fetches(self.visits)

    @property
    def moved(self) -> int:
        """Bytes between HBM and VMEM."""
        return int(self.copies.sum()) * self.block_bytes


@dataclass(frozen=True)
class Call:
    """One `pallas_call`: its grid, its arrays, and the products (m, k, n) of one step."""

    name: str
    grid: tuple[int, ...]
    places: np.ndarray  # (steps, grid axes), in the order in which they run
    operands: tuple[Operand, ...]
    scratch_bytes: int
    products: tuple[tuple[int, int, int], ...]

    @property
    def vmem_bytes(self) -> int:
        """Blocks of this step and of the next, and what is kept between steps; intermediate results come on top."""
        return 2 * sum(operand.block_bytes for operand in self.operands) + self.scratch_bytes


@dataclass(frozen=True)
class Cost:
    """What calls move and compute, and the least time a chip needs for that."""

    steps: int
    hbm_bytes: int
    flops: int
    padded_flops: int  # what the matrix unit spends on them
    vmem_bytes: int  # of the call that needs most
    memory_s: float
    compute_s: float

    @property
    def seconds(self) -> float:
        """Copies and products at the same time, at best."""
        return max(self.memory_s, self.compute_s)

    @property
    def intensity(self) -> float:
        """FLOPs for each byte that is moved."""
        return self.flops / self.hbm_bytes


def fetches(visits: np.ndarray) -> np.ndarray:
    """Boolean (steps,): must a block be copied for this step? visits: (steps, axes), the block each step uses."""
    return np.r_[True, (visits[1:] != visits[:-1]).any(axis=1)]


def record(fn: Callable, *args: object, **options: object) -> list[Call]:
    """The Pallas calls that `fn(*args, **options)` makes, in order. Nothing is computed.

    args: arrays, or `jax.ShapeDtypeStruct` for arrays that need not exist; anything else is passed as it is.
    """
    arrays = [arg for arg in args if hasattr(arg, "shape")]

    def traced(*given: object) -> object:
        left = iter(given)
        return fn(*(next(left) if hasattr(arg, "shape") else arg for arg in args), **options)

    with recording() as calls:
        jax.eval_shape(traced, *arrays)
    if not calls:
        raise UserError(f"{getattr(fn, '__name__', 'the function')} makes no pallas_call, so there is nothing to show")
    return calls


@contextmanager
def recording() -> Iterator[list[Call]]:
    """Inside the block every `pl.pallas_call` is written down, and gives zeros."""
    calls: list[Call] = []
    original = pl.pallas_call

    def pallas_call(kernel: Callable, out_shape: object, **options: object) -> Callable:
        def call(*operands: object) -> object:
            calls.append(read(kernel, out_shape, options, operands, original))
            return jax.tree.map(lambda out: jnp.zeros(out.shape, out.dtype), out_shape)

        return call

    pl.pallas_call = pallas_call
    try:
        yield calls
    finally:
        pl.pallas_call = original


def read(kernel: Callable, out_shape: object, options: dict, operands: tuple, original: Callable) -> Call:
    spec = options.get("grid_spec")
    field = (lambda name, default: getattr(spec, name, default)) if spec is not None else options.get
    grid = field("grid", ())
    grid = tuple(grid) if isinstance(grid, (tuple, list)) else (grid,)
    tables = field("num_scalar_prefetch", 0)
    prefetched = [np.asarray(table) for table in operands[:tables]]
    outputs = jax.tree.leaves(out_shape)
    arrays = [*operands[tables:], *outputs]
    specs = [*leaves(field("in_specs", ()), len(operands) - tables), *leaves(field("out_specs", ()), len(outputs))]
    scratch = jax.tree.leaves(field("scratch_shapes", ()), is_leaf=lambda x: hasattr(x, "inner_aval"))
    function = getattr(kernel, "func", kernel)
    names = function.__code__.co_varnames[tables : tables + len(arrays)]
    places = np.array(list(product(*map(range, grid))), int).reshape(-1, len(grid))
    return Call(
        name=function.__name__,
        grid=grid,
        places=places,
        operands=tuple(
            operand(name.removesuffix("_ref"), array, spec, places, prefetched, i >= len(arrays) - len(outputs))
            for i, (name, array, spec) in enumerate(zip(names, arrays, specs, strict=True))
        ),
        scratch_bytes=sum(math.prod(s.inner_aval.shape) * s.inner_aval.dtype.itemsize for s in scratch),
        products=tuple(products(jax.make_jaxpr(original(kernel, out_shape, **options))(*operands).jaxpr)),
    )


def leaves(specs: object, count: int) -> list:
    """One spec for each of `count` arrays; no specs at all means whole arrays."""
    found = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, pl.BlockSpec))
    return found if len(found) == count else [pl.BlockSpec()] * count


def operand(name: str, array: object, spec: pl.BlockSpec, places: np.ndarray, tables: list, output: bool) -> Operand:
    shape = tuple(array.shape)
    block = tuple(
        size if given is None and spec.block_shape is None else 1 if given is None else int(given)
        for size, given in zip(shape, spec.block_shape or [None] * len(shape), strict=True)
    )
    if spec.index_map is None or not shape:
        visits = np.zeros((len(places), len(shape)), int)
    else:
        visits = np.array([[int(i) for i in spec.index_map(*place, *tables)] for place in places.tolist()])
    return Operand(name, shape, jnp.dtype(array.dtype).name, block, visits, output)


def products(jaxpr: object) -> Iterator[tuple[int, int, int]]:
    """(m, k, n) of the matrix products in a jaxpr and in all that it calls; of branches the one with most of them."""
    for equation in jaxpr.eqns:
        if equation.primitive.name == "dot_general":
            ((left, right), (batch, _)), a, b = equation.params["dimension_numbers"], *equation.invars
            k = math.prod(a.aval.shape[i] for i in left)
            many = math.prod(a.aval.shape[i] for i in batch)
            m, n = a.aval.size // (k * many), b.aval.size // (math.prod(b.aval.shape[i] for i in right) * many)
            yield from [(m, k, n)] * many
            continue
        inner = [getattr(x, "jaxpr", x) for x in jax.tree.leaves(list(equation.params.values()), is_leaf=is_jaxpr)]
        found = [list(products(x)) for x in inner if hasattr(x, "eqns")]
        if equation.primitive.name == "cond":
            yield from max(found, key=lambda branch: sum(map(math.prod, branch)), default=[])
        else:
            yield from sum(found, [])


def is_jaxpr(x: object) -> bool:
    return hasattr(x, "eqns") or hasattr(x, "jaxpr")


def padded(sizes: tuple[int, int, int], unit: int) -> int:
    """Multiplications that a unit × unit array spends on a product m × k × n.

    Two of the three sizes are filled up to whole arrays, the third streams through in groups of 8; the best choice.
    """
    up = lambda size, to: -(-size // to) * to  # noqa: E731
    return min(math.prod(up(s, 8 if i == streamed else unit) for i, s in enumerate(sizes)) for streamed in (0, 2))


def cost(calls: Call | list[Call], chip: Chip) -> Cost:
    """Bytes, FLOPs and roofline of one call or of several, one after the other, on a TPU in bfloat16."""
    calls = [calls] if isinstance(calls, Call) else calls
    unit = chip.matrix_unit or 16
    steps = sum(len(call.places) for call in calls)
    moved = sum(operand.moved for call in calls for operand in call.operands)
    flops = sum(2 * len(call.places) * math.prod(sizes) for call in calls for sizes in call.products)
    spent = sum(2 * len(call.places) * padded(sizes, unit) for call in calls for sizes in call.products)
    return Cost(
        steps, moved, flops, spent, max(call.vmem_bytes for call in calls),
        moved / chip.bandwidth, spent / chip.peak["bfloat16"],
    )  # fmt: skip


def budget(calls: Call | list[Call], chip: Chip, useful_flops: float) -> tuple[float, float]:
    """(seconds no kernel can beat, score of these calls: the share of their own time that this is, in percent).

    The floor moves every array once and computes `useful_flops`, the FLOPs of the visible scores, without padding.
    """
    calls = [calls] if isinstance(calls, Call) else calls
    once = sum(operand.bytes for call in calls for operand in call.operands)
    floor = max(once / chip.bandwidth, useful_flops / chip.peak["bfloat16"])
    return floor, 100 * floor / cost(calls, chip).seconds
