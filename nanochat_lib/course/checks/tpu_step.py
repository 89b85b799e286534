"""Public checks, hints, quizzes and predictions of chapter 06: the TPU train step."""

from __future__ import annotations

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from nanochat_lib import hardware, sharding, train_step
from nanochat_lib.course.cases import (
    Exercise,
    Option,
    Prediction,
    Quiz,
    budget,
    example,
    prop,
    reference,
    sign,
    suspect,
)  # fmt: skip
from nanochat_lib.hardware import CHIPS, Chip
from nanochat_lib.preflight import accounting, analytic, compile_step
from nanochat_lib.sizing import GPTConfig, count_params

CHIP = {chip.name: chip for chip in CHIPS}
V6E, V5P = CHIP["v6e"], CHIP["v5p"]

# ---- accumulation


def weigh(micro: dict) -> tuple:
    """What one micro-batch gives here: (sums to be added up, something that is kept)."""
    hidden = jnp.tanh(micro["x"][:, None] * jnp.linspace(-1.0, 1.0, 8))  # an activation, larger than its batch
    return {"loss": jnp.sum(hidden**2 * micro["weight"]), "grad": jnp.sum(hidden, axis=0)}, micro["x"][0]


def accumulated(fn: object, x: jax.Array, weight: jax.Array) -> tuple:
    """The harness: x (A, B) and weight (A,) go into `fn` as a batch, with zeros to begin with."""
    zeros = {"loss": jnp.zeros(()), "grad": jnp.zeros(8)}
    return fn(weigh, zeros, {"x": x, "weight": weight})


def batch_of(rng: np.random.Generator, micro: int, rows: int) -> tuple:
    return jnp.asarray(rng.standard_normal((micro, rows)), jnp.float32), jnp.asarray(
        rng.uniform(1, 2, micro), "float32"
    )


def from_ten(fn: object, x: jax.Array) -> tuple:
    """Sums that begin with ten."""
    return fn(lambda micro: (jnp.sum(micro), micro[-1]), jnp.full((), 10.0), x)


def together(one: object, zeros: object, batch: object) -> tuple:
    """Right numbers, but all micro-batches at the same time."""
    found, kept = jax.vmap(one)(batch)
    return jax.tree.map(lambda start, all_: start + all_.sum(0), zeros, found), kept


def only_last(one: object, zeros: object, batch: object) -> tuple:
    sums, kept = train_step.accumulate(one, zeros, batch)
    return one(jax.tree.map(lambda x: x[-1], batch))[0], kept


def mean_of(one: object, zeros: object, batch: object) -> tuple:
    sums, kept = train_step.accumulate(one, zeros, batch)
    return jax.tree.map(lambda s: s / len(jax.tree.leaves(batch)[0]), sums), kept


def without_start(one: object, zeros: object, batch: object) -> tuple:
    return train_step.accumulate(one, jax.tree.map(jnp.zeros_like, zeros), batch)


ALL_AT_ONCE = "all micro-batches are in memory at a time: take them one after the other, jax.lax.scan does"
UNROLLED = "a Python loop writes the step down once for each micro-batch: jax.lax.scan keeps one copy"


def accumulate_output() -> str:
    x = jnp.arange(6.0).reshape(3, 2)
    sums, kept = train_step.accumulate(lambda micro: (jnp.sum(micro), micro[0]), jnp.zeros(()), x)
    rows = ", ".join(f"({a:.0f}, {b:.0f})" for a, b in x.tolist())
    return f"micro-batches {rows}; one(micro) gives (sum, first)\nsums {float(sums):.0f}, kept {kept.tolist()}"


# ---- memory


class Sizes(NamedTuple):
    """What memory_analysis() says of a compiled program, as far as it is read."""

    argument_size_in_bytes: int
    output_size_in_bytes: int
    alias_size_in_bytes: int
    temp_size_in_bytes: int
    generated_code_size_in_bytes: int


def some_sizes(rng: np.random.Generator) -> tuple:
    arguments, outputs, temp, code = (int(n) for n in rng.integers(5_000, 90_000, 4))
    return (Sizes(arguments, outputs, int(rng.integers(100, min(arguments, outputs))), temp, code),)


def changed_parts(**other: object) -> object:
    """memory_parts with some parts made in another way."""
    return lambda s: compile_step.memory_parts(s) | {name: make(s) for name, make in other.items()}


def one_chip(out: dict, s: Sizes) -> str:
    whole = s.argument_size_in_bytes + s.output_size_in_bytes + s.temp_size_in_bytes + s.generated_code_size_in_bytes
    total = sum(out.values())
    return "" if total == whole - s.alias_size_in_bytes else f"the parts add up to {total:,} bytes, not to the peak"


def parts_output() -> str:
    step = lambda w, g: (w - 0.1 * g, jnp.sum(g))  # noqa: E731
    array, lines = jax.ShapeDtypeStruct((256, 256), jnp.float32), []
    for donated in ((), (0,)):
        compiled = jax.jit(step, donate_argnums=donated).lower(array, array).compile()
        parts = compile_step.memory_parts(compiled.memory_analysis())
        lines.append(f"donated {donated!s:>4}: arguments {parts['arguments']:,}, results {parts['results']:,} bytes")
    return "\n".join(lines)


# ---- types

RATES = {"lr": 0.02, "momentum": 1, "weight_decay": np.float64(0.1)}
MORE = {"lr": np.float32(0.02), "momentum": jnp.asarray(0.9, jnp.bfloat16), "weight_decay": 0}


def strong(out: dict, values: dict) -> str:
    if not isinstance(out, dict) or list(out) != list(values):
        return "the names are not those of `values`, in their order"
    for name, x in out.items():
        if not isinstance(x, jax.Array):
            return f"{name} is a {type(x).__name__}, not a JAX array"
        if jnp.shape(x) != ():
            return f"{name} has shape {jnp.shape(x)}, not ()"
        if jax.typeof(x).weak_type:
            return f"{name} is weakly typed: with a float32 from elsewhere the step would be traced again"
        if x.dtype != jnp.float32:
            return f"{name} is {x.dtype}, not float32"
    return ""


def versions(fn: object, *calls: dict) -> int:
    """How often a jitted step is traced when all its calls get what `fn` makes of the values."""
    traced = []

    @jax.jit
    def step(hyper: dict) -> jax.Array:
        traced.append(len(traced))
        return sum(hyper.values())

    for values in calls:
        step(fn(values))
    return len(traced)


def inside_a_program(fn: object, x: float) -> float:
    return float(jax.jit(lambda lr: fn({"lr": lr})["lr"] * 2)(x))


def scalars_output() -> str:
    lines = []
    for name, value in RATES.items():
        right = train_step.scalars({name: value})[name]
        lines.append(
            f"{name:>13}: {type(value).__name__:>8} {value!s:>5}  ->  {jax.typeof(right)!s}, weak: {right.weak_type}"
        )
    return "\n".join(lines)


# ---- layouts


class Mesh(NamedTuple):
    """What there is to ask of JAX's abstract mesh; plain data, so that it can be sent to whoever grades."""

    data: int
    fsdp: int = 1
    axis_names = ("data", "fsdp")

    @property
    def size(self) -> int:
        return self.data * self.fsdp

    @property
    def shape(self) -> dict[str, int]:
        return {"data": self.data, "fsdp": self.fsdp}


def some_layout(rng: np.random.Generator) -> tuple:
    sizes = lambda: tuple(int(n) for n in rng.choice([3, 8, 12, 16, 20, 64, 96], int(rng.integers(2, 4))))  # noqa: E731
    return tuple(sizes() for _ in range(12)), Mesh(int(rng.choice([2, 4, 8])), int(rng.choice([1, 2])))


def each_shape(fn: object, shapes: tuple, mesh: object) -> tuple:
    return tuple(fn(shape, mesh) for shape in shapes)


def first_that(test: object) -> object:
    """A wrong split_axis: the first axis whose length fulfils `test`, small arrays whole."""

    def wrong(shape: tuple, mesh: object) -> int | None:
        if mesh.size == 1 or math.prod(shape) < sharding.SMALL:
            return None
        return next((axis for axis, length in enumerate(shape) if test(length, mesh)), None)

    return wrong


def longest(shape: tuple, mesh: object) -> int | None:
    axis = sharding.split_axis(shape, mesh)
    fits = [a for a, n in enumerate(shape) if n % mesh.size == 0]
    return None if axis is None else max(fits, key=lambda a: shape[a])


def small_ones_too(shape: tuple, mesh: object) -> int | None:
    return next((axis for axis, n in enumerate(shape) if n % mesh.size == 0), None) if mesh.size > 1 else None


def layout_output() -> str:
    shapes = {"c_q.weight": (1536, 1536), "momentum of 12 matrices": (12, 1536, 6144), "resid_lambdas": (24,)}
    return "\n".join(f"{n:>24} {s!s:>18}: axis {sharding.split_axis(s, Mesh(8))}" for n, s in shapes.items())


# ---- messages

KINDS = ("all-gather", "reduce-scatter", "all-reduce", "all-to-all")


def sent_bytes(kind: str, result: float, devices: int) -> float:
    """In a ring every step passes one part on; a part is 1/n of the whole array."""
    if kind == "reduce-scatter":
        return result * (devices - 1)  # the result is a part already
    part = result / devices
    return part * (devices - 1) * (2 if kind == "all-reduce" else 1)


def message(kind: str) -> object:
    return lambda rng: (kind, 1024 * int(rng.integers(1, 99)), int(rng.choice([2, 4, 8])))


def ring(kind: str, result: float, devices: int) -> float:
    """Counted by playing the ring: how many numbers device 0 hands on."""
    part = result if kind == "reduce-scatter" else result / devices
    rounds = {"all-gather": 1, "reduce-scatter": 1, "all-reduce": 2, "all-to-all": 1}[kind]
    return sum(part for _ in range(rounds) for _ in range(devices - 1))


def messages_output() -> str:
    lines = ["8 devices, a result of 8 MiB on each:"]
    return "\n".join(lines + [f"{kind:>15}: {sent_bytes(kind, 8, 8):5.1f} MiB sent by each" for kind in KINDS])


# ---- utilisation


def some_run(rng: np.random.Generator) -> tuple:
    return float(rng.uniform(1e9, 6e9)), float(rng.uniform(2e4, 3e5)), 8, V6E


def one_device(flops: float, rate: float, devices: int, chip: Chip | None, dtype: str = "bfloat16") -> float | None:
    return None if chip is None else hardware.mfu(flops, rate / max(devices, 1), 1, chip, dtype) * max(devices, 1)


def mfu_output() -> str:
    lines = []
    for name, rate in (("1.43 s a step", 2**19 / 1.43), ("2.00 s a step", 2**19 / 2.0)):
        lines.append(f"{name}: {hardware.mfu(4.775e9, rate, 8, V6E):.4f}")
    return "\n".join([*lines, f"an unknown chip: {hardware.mfu(4.775e9, 1e5, 8, None)}"])


CPU_LIKE = Chip("cpu", "cpu", (), {"float32": 2e11}, measured=True)

# ---- the matrix unit


def some_product(rng: np.random.Generator) -> tuple:
    m, k, n = (int(x) for x in rng.integers(1, 900, 3))
    return m, k, n, int(rng.choice([128, 256]))


def up(size: int, to: int) -> int:
    return -(-size // to) * to


def all_filled(m: int, k: int, n: int, unit: int) -> int:
    return up(m, unit) * up(k, unit) * up(n, unit)


def always(streamed: str) -> object:
    def wrong(m: int, k: int, n: int, unit: int) -> int:
        sizes = {"m": m, "k": k, "n": n}
        return math.prod(up(size, 8 if name == streamed else unit) for name, size in sizes.items())

    return wrong


def k_streams_too(m: int, k: int, n: int, unit: int) -> int:
    return min(always(name)(m, k, n, unit) for name in "mkn")


def unfilled_stream(m: int, k: int, n: int, unit: int) -> int:
    return min(m * up(k, unit) * up(n, unit), up(m, unit) * up(k, unit) * n)


def below_the_product(out: int, m: int, k: int, n: int, unit: int) -> str:
    return "" if out >= m * k * n else f"{out:,} is less than the {m * k * n:,} that the product itself needs"


def padded_output() -> str:
    rows = ((2048, 128, 2048), (2048, 2048, 128), (2048, 256, 2048))
    lines = [
        f"{m} × {k} times {k} × {n}: {accounting.padded(m, k, n, 256) / (m * k * n):.2f} times" for m, k, n in rows
    ]
    return "\n".join(["on a 256 × 256 unit:", *lines])


# ---- state


def some_model(rng: np.random.Generator) -> tuple:
    heads = int(rng.integers(1, 5))
    config = GPTConfig(
        n_layer=int(rng.integers(1, 9)), n_head=heads, n_kv_head=heads, n_embd=64 * heads, vocab_size=1024
    )
    return count_params(config), int(rng.choice([2, 4])), int(rng.choice([1, 4, 8]))


def moments(matrices: int, others: int) -> object:
    """state_memory with other bytes a number for the moments."""

    def wrong(groups: dict, master: int, devices: int) -> dict:
        m, total = groups["transformer_matrices"], groups["total"]
        right = analytic.state_memory(groups, master, devices)
        return right | {"moments": (matrices * m + others * (total - m)) / devices}

    return wrong


def moments_of_master(groups: dict, master: int, devices: int) -> dict:
    m, total = groups["transformer_matrices"], groups["total"]
    right = analytic.state_memory(groups, master, devices)
    return right | {"moments": (master * m + 2 * master * (total - m)) / devices}


SMALL_GROUPS = {"transformer_matrices": 6000, "wte": 2500, "lm_head": 1400, "scalars": 100, "total": 10000}


def state_output() -> str:
    d24 = GPTConfig(n_layer=24, n_embd=1536, n_head=6, n_kv_head=6, recipe="recipe4")
    lines = []
    for devices in (1, 8):
        right = analytic.state_memory(count_params(d24), 4, devices)
        lines.append(
            f"d24 on {devices}: " + ", ".join(f"{name} {size / 2**30:.2f} GiB" for name, size in right.items())
        )
    return "\n".join(lines)


EXERCISES = [
    Exercise(
        "tpu_step.accumulate",
        cases=[
            reference("five micro-batches", lambda rng: batch_of(rng, 5, 3)),
            example(
                "sums that begin with ten",
                lambda: (jnp.arange(6.0).reshape(3, 2),),
                (np.float32(25.0), np.float32([1.0, 3.0, 5.0])),
                call=from_ten,
            ),
            budget("one copy of the step", lambda rng: batch_of(rng, 24, 2), jaxpr=40, why=UNROLLED),
            budget("one after the other", lambda rng: batch_of(rng, 64, 64), temp_bytes_ratio=4.0, why=ALL_AT_ONCE),
        ],
        causes=[
            suspect("that is the last micro-batch alone: add it to what came before", only_last),
            suspect("these are means: add up, the step divides by the number of targets itself", mean_of),
            suspect("the sums must begin with `zeros`, whatever is in it", without_start),
            sign(
                "what is kept must be stacked in the order of the micro-batches",
                lambda got, want, *rest: np.array_equal(np.asarray(got[1])[::-1], np.asarray(want[1])),
            ),
        ],
        call=accumulated,
        hints=[
            "jax.lax.scan(f, start, xs) walks over the leading axis of a whole tree. What is carried, what is stacked?",
            "f(carry, micro) returns (carry + found, kept); jax.tree.map(jnp.add, carry, found) adds two trees.",
            accumulate_output,
        ],
    ),
    Exercise(
        "tpu_step.memory_parts",
        cases=[
            example(
                "a donated state",
                lambda: (Sizes(1000, 900, 800, 70, 5),),
                {"arguments": 1000, "results": 100, "temporary": 70, "program": 5},
            ),
            prop("the sum is the peak", some_sizes, one_chip),
            reference("other programs", some_sizes),
        ],
        causes=[
            suspect(
                "donated arguments are counted twice: results that lie over them need no place of their own",
                changed_parts(results=lambda s: s.output_size_in_bytes),
            ),
            suspect(
                "the alias belongs to both; count it with the arguments, which are there before and after",
                changed_parts(
                    arguments=lambda s: s.argument_size_in_bytes - s.alias_size_in_bytes,
                    results=lambda s: s.output_size_in_bytes,
                ),
            ),
            suspect(
                "what is aliased lies over arguments, not in the scratch memory",
                changed_parts(
                    results=lambda s: s.output_size_in_bytes,
                    temporary=lambda s: s.temp_size_in_bytes - s.alias_size_in_bytes,
                ),
            ),
        ],
        hints=[
            "Four of the five numbers are parts. The fifth says how much two of them share.",
            "results = output_size_in_bytes − alias_size_in_bytes; the others are taken as they are.",
            parts_output,
        ],
    ),
    Exercise(
        "tpu_step.scalars",
        cases=[
            prop("numbers of three kinds", lambda rng: (RATES,), strong),
            prop("arrays of another dtype", lambda rng: (MORE,), strong),
            example("one version for all calls", (RATES, MORE, RATES), 1, call=versions),
            example("inside a program", (0.25,), 0.5, call=inside_a_program),
        ],
        hints=[
            "A weak type comes from a Python number. Which function of jax.numpy takes a number and a dtype?",
            "jnp.asarray(value, jnp.float32) for every value, in a dictionary with the same names.",
            scalars_output,
        ],
    ),
    Exercise(
        "tpu_step.split_axis",
        cases=[
            example("a matrix", ((64, 96), Mesh(8)), 0),
            example("three layers' matrices", ((3, 64, 96), Mesh(4, 2)), 1),
            example("scalars of the blocks", ((24,), Mesh(8)), None),
            example("one device", ((64, 96), Mesh(1)), None),
            reference("a dozen shapes", some_layout, call=each_shape),
        ],
        causes=[
            suspect("it must divide evenly: being long enough is not enough", first_that(lambda n, m: n >= m.size)),
            suspect(
                "all devices count, not those of one axis of the mesh",
                first_that(lambda n, m: n % m.shape["data"] == 0),
            ),
            suspect("the *first* axis that divides, not the longest", longest),
            suspect("arrays with fewer than SMALL numbers stay whole", small_ones_too),
            sign("one device has nothing to share: None", lambda got, want, shape, mesh: mesh.size == 1),
            sign(
                "exactly SMALL numbers are not fewer", lambda got, want, shape, mesh: math.prod(shape) == sharding.SMALL
            ),
            sign("where no axis divides, the answer is None", lambda got, want, *rest: want is None),
        ],
        hints=[
            "Two reasons to leave an array whole come first. Then look for an axis from the left.",
            "next((axis for axis, length in enumerate(shape) if …), None) gives the first that fits, or None.",
            layout_output,
        ],
    ),
    Exercise(
        "tpu_step.sent_bytes",
        cases=[
            example("gathering 8 MiB on 8 devices", ("all-gather", 8.0, 8), 7.0),
            example("two devices exchange gradients", ("all-reduce", 6.0, 2), 6.0),
            reference("scattering", message("reduce-scatter"), against=ring),
            reference("all to all", message("all-to-all"), against=ring),
        ],
        causes=[
            suspect(
                "a device does not send its own part to itself: n − 1 parts",
                lambda k, r, n: sent_bytes(k, r, n) * n / (n - 1),
            ),
            suspect(
                "the result of a reduce-scatter is one part already: it was n times as large before",
                lambda k, r, n: r / n * (n - 1) if k == "reduce-scatter" else None,
            ),
            suspect(
                "an all-reduce is a reduce-scatter and an all-gather: twice",
                lambda k, r, n: r / n * (n - 1) if k == "all-reduce" else None,
            ),
            suspect(
                "only an all-reduce goes round twice",
                lambda k, r, n: 2 * sent_bytes(k, r, n) if k != "all-reduce" else None,
            ),
        ],
        hints=[
            "Draw four devices in a ring. In every round each hands one part to its neighbour. How many rounds?",
            "A part is result / n, but the result of a reduce-scatter *is* a part. n − 1 rounds; an all-reduce goes "
            "round twice.",
            messages_output,
        ],
        fallback=sent_bytes,
    ),
    Exercise(
        "tpu_step.mfu",
        cases=[
            example("half of one chip", (4.59e9, 1e5, 1, V6E), 0.5),
            example("an unknown chip", (1e9, 1e5, 8, None), None),
            example("no step yet", (1e9, 0.0, 8, V6E), None),
            reference("eight chips", some_run),
            reference("a CPU", lambda rng: (1e6, float(rng.uniform(1e3, 1e5)), 8, CPU_LIKE)),
        ],
        causes=[
            sign(
                "tokens_per_s counts all devices together: divide by the peak of all of them",
                lambda got, want, flops, rate, devices, *rest: bool(want) and np.isclose(got, want * devices),
            ),
            sign(
                "a share above 1 is impossible: peak and device do not belong together, return None",
                lambda got, want, *rest: want is None and got is not None and got > 1,
            ),
            sign(
                "a CPU is one device, and its peak is in float32",
                lambda got, want, f, r, n, chip, *rest: chip.kind == "cpu",
            ),
            sign(
                "a chip without a peak for this dtype has no MFU: None",
                lambda got, want, f, r, n, chip, dtype: want is None,
            ),
        ],
        hints=[
            "Write what the model needs a second, then what the chips could do in that second.",
            "flops_per_token · tokens_per_s / (devices · chip.peak[dtype]), and None in the cases of the docstring.",
            mfu_output,
        ],
    ),
    Exercise(
        "tpu_step.padded",
        cases=[
            example("a perfect fit", (256, 512, 1024, 256), 256 * 512 * 1024),
            example("eight rows", (8, 512, 1024, 256), 8 * 512 * 1024),
            example("a head of 128, contracted", (2048, 128, 2048, 256), 2048 * 256 * 2048),
            example("a head of 128, streamed", (2048, 2048, 128, 256), 2048 * 2048 * 128),
            prop("never less than the product", some_product, below_the_product),
            reference("any sizes", some_product),
        ],
        causes=[
            suspect("n may be the one that streams, too: take the better of the two", always("m")),
            suspect("m may be the one that streams, too: take the better of the two", always("n")),
            suspect("one of m and n may stream through in groups of 8; you filled up all three", all_filled),
            suspect("k is summed inside of the unit: it is always filled up", k_streams_too),
            suspect("what streams does so in groups of 8", unfilled_stream),
            sign("round up, not down", lambda got, want, m, k, n, unit: got < want),
        ],
        hints=[
            "There are two ways to lay the product on the unit. Compute what each spends and take the smaller.",
            "math.ceil(size / to) * to rounds up. First way: m to 8, k and n to the unit. Second: n to 8, m and k to "
            "the unit.",
            padded_output,
        ],
    ),
    Exercise(
        "tpu_step.state_memory",
        cases=[
            example(
                "ten thousand weights on two devices",
                (SMALL_GROUPS, 4, 2),
                {"master weights": 20000.0, "moments": 28000.0},
            ),
            example("weights in bfloat16", (SMALL_GROUPS, 2, 1), {"master weights": 20000.0, "moments": 56000.0}),
            reference("other models", some_model),
        ],
        causes=[
            suspect("Muon keeps one moment of its matrices, not two", moments(8, 8)),
            suspect("AdamW keeps two moments of everything that is not Muon's", moments(4, 4)),
            suspect("Muon has the matrices of the blocks, AdamW the rest: the other way round", moments(8, 4)),
            suspect("moments are float32 whatever the weights are kept in", moments_of_master),
            sign(
                "every device keeps 1/devices of the state",
                lambda got, want, groups, master, devices: np.isclose(sum(got.values()), sum(want.values()) * devices),
            ),
        ],
        hints=[
            "How many float32 numbers does each optimiser keep for a weight? How many weights has each?",
            "groups has transformer_matrices (Muon) and total. 4 bytes a moment. Everything is shared by the devices.",
            state_output,
        ],
    ),
]

QUIZZES = [
    Quiz(
        "tpu_step.q_dispatch",
        "A step has 32 micro-batches. Which loop keeps a TPU busy?",
        [
            Option(
                "a Python loop that calls a jitted function and reads float(loss) after each micro-batch",
                why="Reading the loss waits for the chip; while Python prepares the next call it has nothing to do.",
            ),
            Option(
                "a Python loop that calls a jitted function and reads nothing",
                why="Better, since calls queue up. But gradients go out to memory and come back between the calls, "
                "nothing is fused across them, and a slow host still starves the chip.",
            ),
            Option(
                "one jitted function with the loop inside, its loss read a step later",
                right=True,
                why="One dispatch a step. The compiler sees the sum, the update and what can be moved out of the loop.",
            ),
        ],
    ),
    Quiz(
        "tpu_step.q_precision",
        "Weights and activations are bfloat16. What does precision='highest' change in their product on a TPU?",
        [
            Option(
                "the product runs in float32",
                why="Its operands are bfloat16. Splitting a bfloat16 number into several gives the number and zeros.",
            ),
            Option(
                "nothing: same operands, same cycles, same rounding of the result",
                right=True,
                why="Sums are float32 inside the unit either way. To keep them, ask for a float32 *result* "
                "(preferred_element_type), which is free.",
            ),
            Option(
                "it gets six times slower",
                why="That happens to float32 operands, which are then multiplied in several passes. Here one will do.",
            ),
        ],
    ),
    Quiz(
        "tpu_step.q_fsdp",
        "Eight chips, 32 micro-batches a step. Gathering the weights layer by layer (fsdp) instead of once a step …",
        [
            Option(
                "saves memory and sends less",
                why="It saves memory. But every micro-batch gathers the weights again, forward and backward.",
            ),
            Option(
                "saves memory and sends many times as much",
                right=True,
                why="No chip ever holds all weights; for that they travel 64 times a step instead of once. Worth it "
                "when the model would not fit otherwise.",
            ),
            Option(
                "changes the result of the step",
                why="Where numbers live does not change what is computed, up to the order of sums.",
            ),
        ],
    ),
    Quiz(
        "tpu_step.q_chip",
        "v5p has half the bf16 peak of v6e, 1.7 times the bandwidth, three times the memory and a 128 × 128 unit. "
        "Which change of the v6e preset makes sense there?",
        [
            Option(
                "heads of 256 stay the only sensible choice",
                why="On a 128-wide unit heads of 128 waste nothing; the choice may follow the recipe again.",
            ),
            Option(
                "more sequences in a micro-batch, heads of 128 if the recipe wants them",
                right=True,
                why="Memory is there, and heads of 128 fill a 128 × 128 unit. The preset tpu-v5p-8-d24 does both.",
            ),
            Option(
                "float32 products, since the memory is faster",
                why="Bandwidth does not make products cheaper: float32 costs several bfloat16 passes.",
            ),
        ],
    ),
]

PREDICTIONS = [
    Prediction(
        "tpu_step.p_dispatches",
        "A step of 8 micro-batches in three jitted functions: how many programs does Python start?",
        unit="programs",
    ),
    Prediction(
        "tpu_step.p_fsdp",
        "Four micro-batches a step on eight devices. How many times as much does fsdp send as gathering once a step?",
        unit="times",
    ),
    Prediction(
        "tpu_step.p_memory",
        "1.38 billion parameters, 2 × 2048 tokens a chip and micro-batch, eight v6e of 32 GiB, state cut over all: "
        "how much memory does a step need on one chip?",
        unit="GiB",
    ),
    Prediction(
        "tpu_step.p_flops",
        "How many FLOPs has one chip to do in a step of 1,048,576 tokens, in units of 10¹²?",
        unit="TFLOP",
    ),
    Prediction(
        "tpu_step.p_bound",
        "With 12 heads of 128 on a 256 × 256 matrix unit: what is the highest MFU that any program could reach?",
        unit="%",
    ),
]
