# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["slide"] id="title"
# # The TPU train step
#
# A public port of nanochat rented eight chips that can do 918 TFLOP/s each, and its training used 16 % of that. The same
# model, merged into one compiled function: 22 %. With attention in larger tiles and heads of another size it would have
# been more. **Where were the other 84 of every 100 seconds, and could one have known without renting anything?**
#
# After this chapter you can
#
# - turn a Python loop of compiled functions into one step, and see the difference in a profile;
# - say what a step keeps in memory, what donation saves, and why a step is compiled twice;
# - read a compiled step: which product runs in which dtype, what travels between devices, how many bytes;
# - cut a training state over eight devices, by data or by parameters;
# - compute utilisation, its ceiling and the memory of a step for a chip that you do not have.
#
# Eight exercises, about an hour and three quarters in all. No TPU is needed: the compiler and arithmetic are enough.

# %% tags=["setup"] id="setup"
import json
import math
import subprocess
import sys
from dataclasses import replace
from functools import partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.ticker import FuncFormatter, NullFormatter

from nanochat_lib.compiled import Module
from nanochat_lib.course import (  # noqa: F401
    about,
    check,
    choice,
    explore,
    fast,
    hint,
    mine,
    note,
    predict,
    quiz,
    reveal,
    show,
    slider,
    undo,
    volatile,
)  # fmt: skip
from nanochat_lib.course.parameters import project_root
from nanochat_lib.hardware import CHIPS, GIB
from nanochat_lib.presets import Target, override, preset
from nanochat_lib.report.plots import BLUE, FAINT, GREEN, ORANGE, PURPLE, RED, SKY, new_figure
from nanochat_lib.sharding import SMALL
from nanochat_lib.sizing import count_params, flops_per_token, scaling_params


def label(ax, title, x="", y="", legend=False):
    """Title, axes and legend in the course's style."""
    ax.set_title(title, loc="left", fontsize=10.5, fontweight="bold")
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    for axis, scale in ((ax.xaxis, ax.get_xscale()), (ax.yaxis, ax.get_yscale())):
        if scale == "log":
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())
    if legend:
        ax.legend(frameon=False, fontsize=8.5)


# %% [markdown] id="loop-look"
# ## 1. Three compiled functions and a loop
#
# A step of the port had sixteen micro-batches. In its first form three functions shared the work, each compiled: the
# gradients of the first micro-batch, the gradients of every other one added to the sum, the update. Python went round
# and read the loss each time, for the progress bar. Here is that step for a small network, with 8 micro-batches.

# %% id="loop"
WIDTH, LAYERS, MICRO, ROWS = 256, 4, 8, 64


def loss_fn(params, x):
    """Mean square of what a residual network makes of x (rows, width); it learns to send everything to zero."""
    for w in params:
        x = x + 0.1 * jnp.square(jax.nn.relu(x @ w))
    return jnp.mean(x**2)


def fresh():
    """A new training state: weights and their momentum."""
    params = [0.02 * jax.random.normal(key, (WIDTH, WIDTH)) for key in jax.random.split(jax.random.key(0), LAYERS)]
    return {"params": params, "momentum": [jnp.zeros((WIDTH, WIDTH)) for _ in params]}


def load(number):
    """One micro-batch: the loader's work on the host."""
    return np.random.default_rng(number).standard_normal((ROWS, WIDTH)).astype(np.float32)


def descend(state, sums):
    """The state after one step along the mean of the summed gradients."""
    momentum = [0.9 * m + g / MICRO for m, g in zip(state["momentum"], sums[1], strict=True)]
    return {"params": [p - 0.05 * m for p, m in zip(state["params"], momentum, strict=True)], "momentum": momentum}


gradients = jax.value_and_grad(loss_fn)
first = jax.jit(gradients)
more = jax.jit(lambda params, sums, x: jax.tree.map(jnp.add, sums, gradients(params, x)))
update = jax.jit(descend)


def three_functions(state, steps):
    """Training as a Python loop over three compiled functions."""
    for step in range(steps):
        sums = first(state["params"], load(step * MICRO))
        float(sums[0])  # somebody wants to see the loss
        for i in range(1, MICRO):
            sums = more(state["params"], sums, load(step * MICRO + i))
            float(sums[0])
        state = update(state, sums)
    return state


loop_result = three_functions(fresh(), 1)
print("ran", len(loop_result["params"]), "weight matrices through one step")

# %% [markdown] id="dispatch-look"
# Each call from Python *dispatches* a program to the device. How many in a step? Guess:
# `predict("tpu_step.p_dispatches", …)`.

# %% id="dispatch-predict"
predict("tpu_step.p_dispatches")

# %% [markdown] id="dispatch-explain"
# JAX has a profiler. `record` runs a function under it and reads two things from the profile: which compiled functions
# Python started, and the spans of time in which the device worked.

# %% tags=["slide"] id="dispatch"
from nanochat_lib.course.timeline import record

STEPS = 3


def timeline(train):
    """The shortest of three recordings, since other programs run on this machine too."""
    runs = []
    for _ in range(3):
        start = jax.block_until_ready(fresh())
        runs.append(record(lambda start=start: train(start, STEPS)))
    return min(runs, key=lambda run: run.length)


looped = timeline(three_functions)
reveal("tpu_step.p_dispatches", looped.dispatches // STEPS)
print(f"in {STEPS} steps Python started {looped.dispatches} programs")
show(volatile(f"in this run nothing computed for {looped.idle:.0%} of the time"))

# %% [markdown] id="accumulate-look"
# ## 2. One function
#
# Gradients of micro-batches are added up, since a large batch does not fit. `jax.lax.scan` is a loop *inside* of a
# compiled program:
#
# $$ \text{scan}(f, c_0, x): \quad (c_{i+1}, y_i) = f(c_i, x_i), \qquad \text{result } (c_A, [y_0 \dots y_{A-1}]) . $$
#
# The body $f$ is compiled once, whatever $A$ is, and one micro-batch's activations are in memory at a time.
#
# ### Exercise: accumulate
#
# `one` returns two trees. The first must be added up: loss and gradients of the matrices. The second must be kept of
# every micro-batch: this library keeps the gradients of embedding rows and sums them at the end of the step.


# %% tags=["exercise"] id="tpu_step.accumulate" points=3 minutes=20 level=2 library="nanochat_lib.train_step:accumulate"
def accumulate(one, zeros, batch):
    """(sums, rest) over the A micro-batches of `batch`, a tree of arrays (A, …), one after the other.

    one(micro) -> (a tree like `zeros`, which is added up; a tree which is kept of each, stacked to (A, …)).
    The sums begin with `zeros`.
    """
    # --- stub
    raise NotImplementedError

    # --- solution
    def add(carry, micro):
        found, kept = one(micro)
        return jax.tree.map(jnp.add, carry, found), kept

    return jax.lax.scan(add, zeros, batch)
    # --- end


# %% id="tpu_step.accumulate.check"
check("tpu_step.accumulate", accumulate)

# %% tags=["hidden"] id="author"
from nanochat_lib.course.author import example, hidden, mutant, prop, reference
from nanochat_lib.course.checks import tpu_step as public

hidden(
    "tpu_step.accumulate",
    reference("one micro-batch", lambda rng: public.batch_of(rng, 1, 4)),
    reference("many", lambda rng: public.batch_of(rng, 17, 2)),
    example(
        "a single number", lambda: (jnp.full((1, 1), 2.0),), (np.float32(12.0), np.float32([2.0])), call=public.from_ten
    ),
)
mutant(
    "tpu_step.accumulate", "jax.tree.map(jnp.add, carry, found), kept", "found, kept", says="the last micro-batch alone"
)
mutant(
    "tpu_step.accumulate",
    "return jax.lax.scan(add, zeros, batch)",
    "return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, zeros), batch)",
    says="must begin with `zeros`",
)
mutant(
    "tpu_step.accumulate",
    body="""
count = len(jax.tree.leaves(batch)[0])
sums, kept = zeros, []
for i in range(count):
    found, rest = one(jax.tree.map(lambda x: x[i], batch))
    sums = jax.tree.map(jnp.add, sums, found)
    kept.append(rest)
return sums, jax.tree.map(lambda *rows: jnp.stack(rows), *kept)
""",
    says="a Python loop writes the step down",
)
mutant(
    "tpu_step.accumulate",
    body="""
found, kept = jax.vmap(one)(batch)
return jax.tree.map(lambda z, x: z + x.sum(0), zeros, found), kept
""",
    says="all micro-batches are in memory at a time",
)
mutant(
    "tpu_step.accumulate",
    body="""
count = len(jax.tree.leaves(batch)[0])

def add(carry, micro):
    found, kept = one(micro)
    return jax.tree.map(lambda c, f: c + f / count, carry, found), kept

return jax.lax.scan(add, zeros, batch)
""",
    says="these are means",
)

# %% [markdown] id="fused-look"
# Now the whole step is one function: all micro-batches, the update, everything. It is called once a step and nobody
# waits for its loss, so the loader already makes the next batch while the device computes.

# %% id="fused"
accumulate = mine("tpu_step.accumulate")


def whole_step(state, data):
    """(new state, mean loss) of one step; data (A, rows, width)."""
    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, state["params"])
    sums, _ = accumulate(lambda micro: (gradients(state["params"], micro), None), zeros, data)
    return descend(state, sums), sums[0] / len(data)


fused = jax.jit(whole_step, donate_argnums=0)


def one_function(state, steps):
    """Training with one compiled function a step."""
    for step in range(steps):
        state, _ = fused(state, np.stack([load(step * MICRO + i) for i in range(MICRO)]))
    return state


fused_result = one_function(fresh(), 1)
same = jax.tree.map(partial(np.allclose, rtol=1e-4, atol=1e-6), fused_result, loop_result)
print("the same new state as with three functions:", all(jax.tree.leaves(same)))
single = timeline(one_function)
print(f"in {STEPS} steps Python started {single.dispatches} programs instead of {looped.dispatches}")

# %% tags=["slide"] id="gaps"
fig, axes = new_figure(2, 1, height=2.7, sharex=True)
for ax, found, colour, name in ((axes[0], looped, ORANGE, "Three functions"), (axes[1], single, BLUE, "One function")):
    ax.broken_barh([(a, max(b - a, 0.01)) for a, b in found.busy], (0.15, 0.7), color=colour)
    ax.axvspan(0, found.length, color=FAINT, alpha=0.12, linewidth=0)
    ax.set_yticks([])
    ax.set_ylim(0, 1)
    label(ax, f"{name}: {found.dispatches} programs, nothing computes for {found.idle:.0%} of the time")
axes[1].set_xlabel("ms; coloured where the device works, grey where it waits for Python")
show(
    fig,
    alt="Two timelines of three steps; with three functions the device's work is full of gaps, with one it is dense.",
)

# %% [markdown] id="gaps-explain"
# Every gap is the host's: it reads a number, makes a batch, goes through its caches, calls. Here a gap lasts a fraction
# of a millisecond beside work of about the same length. On the port's chips a micro-batch took about 90 ms, and the gaps
# still cost **up to 26.7 % of the step**: its loader packed documents in Python while the chips stood still.
#
# A CPU shows the gap's cause, not its size. The *count* is the same everywhere: one dispatch a step, or nine.

# %% id="q-dispatch"
quiz("tpu_step.q_dispatch")

# %% [markdown] id="scan-memory-look"
# What does the loop inside cost? Three ways to do the same micro-batches in one program: all rows at once, a Python loop
# (which writes the body down $A$ times), a scan. The compiler says how much scratch memory each asks for and how many
# instructions the program has.


# %% tags=["slide"] id="scan-memory"
def at_once(params, data):
    return gradients(params, data.reshape(-1, WIDTH))


def python_loop(params, data):
    sums = gradients(params, data[0])
    for micro in data[1:]:
        sums = jax.tree.map(jnp.add, sums, gradients(params, micro))
    return sums


def scanned(params, data):
    zeros = jnp.zeros(()), jax.tree.map(jnp.zeros_like, params)
    return accumulate(lambda micro: (gradients(params, micro), None), zeros, data)[0]


QUICK = {"xla_backend_optimization_level": 0}  # these programs are read, not run
counts = (1, 4, 16) if fast() else (1, 2, 4, 8, 16)
weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), "float32")] * 2
scratch, length = {}, {}
for way in (at_once, python_loop, scanned):
    for count in counts:
        data = jax.ShapeDtypeStruct((count, ROWS, WIDTH), "float32")
        compiled = jax.jit(way).lower(weights, data).compile(QUICK)
        scratch[way.__name__, count] = compiled.memory_analysis().temp_size_in_bytes
        length[way.__name__, count] = sum(map(len, Module(compiled.as_text()).computations.values()))
fig, (left, right) = new_figure(1, 2, height=2.6)
for name, colour, marker in (("at_once", RED, "s"), ("python_loop", ORANGE, "^"), ("scanned", BLUE, "o")):
    words = name.replace("_", " ")
    left.plot(
        counts, [scratch[name, c] / 2**20 for c in counts], color=colour, marker=marker, markersize=4, label=words
    )
    right.plot(counts, [length[name, c] for c in counts], color=colour, marker=marker, markersize=4)
for ax in (left, right):
    ax.set_xticks(counts)
label(left, "Scratch memory", "micro-batches of 64 rows", "MiB", legend=True)
label(right, "Length of the program", "micro-batches of 64 rows", "instructions")
show(
    fig,
    alt="Scratch memory grows at once and in a Python loop, whose program grows too; a scan keeps both flat.",
)
grown = {name: scratch[name, 16] / scratch[name, 4] for name in ("at_once", "scanned")}
print(
    f"from 4 to 16 micro-batches scratch grows {grown['at_once']:.1f} times at once, {grown['scanned']:.1f} times in a scan"
)

# %% [markdown] id="donate-look"
# ## 3. Donation
#
# A step reads a state and makes a new one. For a moment both exist, unless the old one is *donated*: then the
# compiler writes results over arguments. The caller's arrays are gone afterwards.

# %% id="donate"
old = fresh()
new, _ = fused(old, np.zeros((MICRO, ROWS, WIDTH), np.float32))
print(
    "the old weights are deleted:",
    old["params"][0].is_deleted(),
    "- the new ones are there:",
    not new["params"][0].is_deleted(),
)

# %% [markdown] id="memory-look"
# ### Exercise: what one chip holds
#
# `compiled.memory_analysis()` has five numbers. Arguments and outputs count what is donated **both** times; the alias
# says how much that is. Make the four parts whose sum is the peak.


# %% tags=["exercise"] id="tpu_step.memory_parts" points=1 minutes=10 level=1 library="nanochat_lib.preflight.compile_step:memory_parts"
def memory_parts(sizes):
    """{"arguments", "results", "temporary", "program"}: bytes of one device. A result that lies over a donated argument
    needs no place of its own.

    sizes has argument_size_in_bytes, output_size_in_bytes, alias_size_in_bytes, temp_size_in_bytes and
    generated_code_size_in_bytes.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    return {
        "arguments": sizes.argument_size_in_bytes,
        "results": sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        "temporary": sizes.temp_size_in_bytes,
        "program": sizes.generated_code_size_in_bytes,
    }
    # --- end


# %% id="tpu_step.memory_parts.check"
check("tpu_step.memory_parts", memory_parts)

# %% tags=["hidden"] id="tpu_step.memory_parts.hidden"
hidden(
    "tpu_step.memory_parts",
    example(
        "nothing donated",
        lambda: (public.Sizes(10, 20, 0, 30, 40),),
        {"arguments": 10, "results": 20, "temporary": 30, "program": 40},
    ),
    reference("a random program", public.some_sizes),
)
mutant("tpu_step.memory_parts", " - sizes.alias_size_in_bytes", "", says="counted twice")
mutant(
    "tpu_step.memory_parts",
    """sizes.argument_size_in_bytes,
        "results": sizes.output_size_in_bytes - sizes.alias_size_in_bytes,""",
    """sizes.argument_size_in_bytes - sizes.alias_size_in_bytes,
        "results": sizes.output_size_in_bytes,""",
    says="count it with the arguments",
)
mutant(
    "tpu_step.memory_parts",
    """sizes.output_size_in_bytes - sizes.alias_size_in_bytes,
        "temporary": sizes.temp_size_in_bytes,""",
    """sizes.output_size_in_bytes,
        "temporary": sizes.temp_size_in_bytes - sizes.alias_size_in_bytes,""",
    says="not in the scratch memory",
)

# %% tags=["slide"] id="memory"
memory_parts = mine("tpu_step.memory_parts")
state_shape = jax.eval_shape(fresh)
data_shape = jax.ShapeDtypeStruct((MICRO, ROWS, WIDTH), "float32")
parts = {}
for name, donated in (("kept", ()), ("donated", (0,))):
    compiled = jax.jit(whole_step, donate_argnums=donated).lower(state_shape, data_shape).compile(QUICK)
    parts[name] = {what: size / 2**20 for what, size in memory_parts(compiled.memory_analysis()).items()}
fig, ax = new_figure(height=1.9)
for row, found in enumerate(parts.values()):
    left = 0.0
    for (what, size), colour in zip(found.items(), (SKY, ORANGE, FAINT, GREEN), strict=True):
        ax.barh(row, size, 0.6, left=left, color=colour, label=what if row == 0 else None)
        left += size
ax.set_yticks([0, 1], [f"state {name}" for name in parts])
ax.grid(axis="y", visible=False)
label(ax, "Memory of the small step", "MiB")
ax.legend(frameon=False, fontsize=8.5, ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.35))
show(fig, alt="Two stacked bars: without donation the results need as much memory again as the state.")
saved = parts["kept"]["results"] - parts["donated"]["results"]
_ = about(saved, 2.0, within=0.01, name="MiB saved: 4 matrices of 256 × 256 float32 and their momentum")

# %% [markdown] id="memory-explain"
# The second copy of the state is gone. The peak falls by less: as long as the results are empty, the compiler uses their
# place as scratch, and without it asks for scratch of its own. So look at the sum. Between steps the difference is
# plain: a state is there once, or twice when the caller still holds the old one.

# %% [markdown] id="weak-look"
# ## 4. Compiled twice
#
# A jitted function is compiled for the *types* of its arguments: shape, dtype, place, and one thing that nobody
# sees. A Python number has a *weak* type: `0.5 * x` should not turn a bfloat16 x into float32. Weak and strong are
# different types. The body of a jitted function runs once for each version, so a list that is appended to in there
# counts them.


# %% id="weak"
def count_versions(*rates):
    """What a jitted step was traced for when it got these learning rates."""
    seen = []

    @jax.jit
    def step(w, lr):
        kind = jax.typeof(lr)
        seen.append(f"{kind.dtype}{', weak' if kind.weak_type else ''}")
        return w - lr * w

    for rate in rates:
        step(jnp.ones(4), rate)
    return seen


print("rates 0.1, 0.2, 0.3:              ", count_versions(0.1, 0.2, 0.3))
print("a schedule in numpy, then a number:", count_versions(np.float32(0.1), 0.2))
print("1, 0.5, an array:                  ", count_versions(1, 0.5, jnp.float32(0.25)))

# %% [markdown] id="weak-explain"
# The warm-up returns `1`, the decay `0.5`, a resumed run an array: three versions of the step. Each costs a
# compilation. This library's whole step for a d24 took 23 minutes to compile on two busy cores (`docs/tpu-step.md`), and a
# public port met a first evaluation that compiled for 50. The step's *results* matter too: a counter that starts as `0`
# comes back as a strong int32, and the second call compiles anew.
#
# ### Exercise: scalars
#
# Give every hyper-parameter one type.


# %% tags=["exercise"] id="tpu_step.scalars" points=1 minutes=8 level=1 library="nanochat_lib.train_step:scalars"
def scalars(values):
    """{name: float32 JAX array of shape ()} of {name: number}: strongly typed, also inside of a compiled function."""
    # --- stub
    raise NotImplementedError
    # --- solution
    return {name: jnp.asarray(value, jnp.float32) for name, value in values.items()}
    # --- end


# %% id="tpu_step.scalars.check"
check("tpu_step.scalars", scalars)

# %% tags=["hidden"] id="tpu_step.scalars.hidden"
hidden(
    "tpu_step.scalars",
    prop("a single whole number", lambda rng: ({"x": 3},), public.strong),
    prop("nothing", lambda rng: ({},), public.strong),
    example("another order of calls", (public.MORE, public.RATES), 1, call=public.versions),
)
mutant("tpu_step.scalars", "jnp.asarray(value, jnp.float32)", "jnp.asarray(value)", says="weakly typed")
mutant("tpu_step.scalars", "jnp.asarray(value, jnp.float32)", "float(value)", says="not a JAX array")
mutant("tpu_step.scalars", "jnp.asarray(value, jnp.float32)", "np.float32(value)", says="not a JAX array")
mutant("tpu_step.scalars", "jnp.asarray(value, jnp.float32)", "jnp.asarray(value, jnp.bfloat16)", says="bfloat16")
mutant("tpu_step.scalars", "jnp.asarray(value, jnp.float32)", "jnp.asarray([value], jnp.float32)", says="shape (1,)")
mutant("tpu_step.scalars", "jnp.asarray(value, jnp.float32)", "jnp.asarray(float(value), jnp.float32)", says="racer")

# %% id="scalars-use"
scalars = mine("tpu_step.scalars")
rates = [scalars({"lr": rate})["lr"] for rate in (1, 0.5, np.float32(0.1), jnp.float32(0.25))]
versions = count_versions(*rates)
print("1, 0.5, numpy, an array, each through scalars:", versions)
assert len(versions) == 1

# %% [markdown] id="precision-look"
# ## 5. Which product runs in what
#
# A TPU's matrix unit multiplies bfloat16 and adds in float32. Give it float32 and it *rounds the operands* first, unless
# asked for more: `precision="highest"` splits each number into several bfloat16 parts and multiplies those. Two
# places say what happens: the program that JAX hands over, and what the compiler made of it.


# %% id="precision"
def multiply(dtype, precision, result):
    """A product (64, 32) × (32, 128), lowered."""
    x, w = jax.ShapeDtypeStruct((64, 32), dtype), jax.ShapeDtypeStruct((32, 128), dtype)
    return jax.jit(lambda x, w: jnp.matmul(x, w, precision=precision, preferred_element_type=result)).lower(x, w)


def asked(lowered):
    """The types and the precision of the product in the program that JAX hands to the compiler."""
    line = next(line for line in lowered.as_text().splitlines() if "dot_general" in line)
    types = line.rpartition(" : ")[2]
    for old, new in (("tensor<", ""), (">", ""), ("(", ""), (")", ""), (" -", " ->")):
        types = types.replace(old, new)
    return f"{types:40} {line.partition('precision = ')[2].partition(']')[0].strip('[')}"


for dtype, precision, result in (
    ("float32", "default", None),
    ("float32", "highest", None),
    ("bfloat16", "default", None),
    ("bfloat16", "highest", None),
    ("bfloat16", "default", "float32"),
):
    print(asked(multiply(dtype, precision, result)))

# %% [markdown] id="precision-tpu-look"
# The flag is in the fourth line, and the operands are still bfloat16. What does the compiler for a v6e make of it? The
# page was recorded by `scripts/record_tpu_step.py`, which compiles for a TPU that is not here. With the extra `tpu`
# installed, one line is compiled anew.

# %% id="precision-tpu"
page = json.loads((project_root() / "assets" / "tpu_step.json").read_text(encoding="utf-8"))
print(f"one product, {page['product']}; jax {page['jax']}, libtpu {page['libtpu']}, a v6e\n")
for name, found in page["products"].items():
    print(f"{name:26} {found['cycles'] / 1e3:6.0f} thousand cycles   {', '.join(found['dtypes'])}")
if find_spec("libtpu") and not fast():
    script, name = project_root() / "scripts" / "record_tpu_step.py", "bfloat16, highest"
    done = subprocess.run([sys.executable, str(script), "--print", name], capture_output=True, text=True, check=False)
    again = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print("\ncompiled here, the same as recorded:", bool(again) and again[0][name] == page["products"][name])
products = page["products"]
_ = about(
    products["bfloat16, highest"]["cycles"] / products["bfloat16, default"]["cycles"],
    1.0,
    0.01,
    "times the cycles, bfloat16",
)
_ = about(
    products["float32, highest"]["cycles"] / products["float32, default"]["cycles"],
    4.65,
    0.3,
    "times the cycles, float32",
)

# %% [markdown] id="precision-step-look"
# And a whole step? The same script compiled the preset's step for eight v6e, cut down to two layers, as
# `nanochat preflight` does. Of the FLOPs of all its products outside the attention kernel:

# %% id="precision-step"
compiled_step = page["steps"]["v6e"]
total = sum(compiled_step["flops_by_dtype"].values())
for name, flops in compiled_step["flops_by_dtype"].items():
    print(f"{name:20} {flops / total:.1%}")
_ = about(100 * compiled_step["flops_by_dtype"]["bf16 × bf16 -> f32"] / total, 45.7, 0.2, "% with a float32 result")

# %% [markdown] id="precision-step-explain"
# There is no float32 operand left, so `highest` would find nothing to do. Gradients and logits leave the unit in float32,
# since the library asks for that; the rest is rounded.

# %% [markdown] id="precision-numbers-look"
# So much for cost. What does each buy? Errors against float64, of the same product with 1536 summands.

# %% id="precision-numbers"
rng = np.random.default_rng(0)
x, w = rng.standard_normal((64, 1536)), rng.standard_normal((1536, 64))
exact = x @ w
half = lambda a: jnp.asarray(a, jnp.bfloat16)  # noqa: E731
rounded = np.asarray(half(x), np.float64) @ np.asarray(half(w), np.float64)  # bfloat16 in, exact sums


def error(found, truth):
    return float(np.abs(np.asarray(found, np.float64) - truth).max() / np.abs(truth).max())


errors = {
    "bfloat16 operands and result": error(half(rounded), exact),
    "bfloat16 operands, float32 result": error(rounded.astype(np.float32), exact),
    "float32 all through": error(x.astype(np.float32).astype(np.float64) @ w.astype(np.float32), exact),
}
for name, found in errors.items():
    print(f"{name:34} {found:.1e} of the largest")
_ = about(error(half(rounded), rounded) * 1e3, 3.3, 0.3, "thousandths lost by rounding the result alone")

# %% [markdown] id="precision-explain"
# With bfloat16 operands most is lost before the product begins, and no flag brings it back. What can be saved is the
# rounding of the *result*: ask for float32 there, which costs no cycles. This library does so for the logits.
#
# > Never trust a precision flag; read the compiled step. `nanochat preflight --preset … --precision` prints every product
# > of it with operands, result and share.

# %% id="q-precision"
quiz("tpu_step.q_precision")

# %% [markdown] id="devices-look"
# ## 6. Eight devices
#
# Every device gets its own rows of the batch. Where do 1.38 billion weights, gradients and moments live?
#
# - **Copies**: all of it on every device. Gradients are summed over all (all-reduce), and every device makes the same
#   update.
# - **Cut by data** (ZeRO, arXiv:1910.02054): each device owns an eighth of every array. Once a step the weights are
#   gathered; once a step the gradients are summed onto their owners (reduce-scatter), who update their share.
# - **Fully cut** (fsdp, arXiv:2304.11277): the same, but the weights are gathered layer by layer in every micro-batch and
#   forgotten again.
#
# ### Exercise: where to cut
#
# An array is cut along its first axis that divides by the number of devices. Small ones are not worth a message.


# %% tags=["exercise"] id="tpu_step.split_axis" points=2 minutes=12 level=1 library="nanochat_lib.sharding:split_axis"
def split_axis(shape, mesh):
    """The axis along which an array is cut over all mesh.size devices: the first that divides; None for arrays with
    fewer than SMALL numbers, where no axis divides, and on a single device."""
    # --- stub
    raise NotImplementedError
    # --- solution
    if mesh.size == 1 or int(np.prod(shape)) < SMALL:
        return None
    return next((axis for axis, length in enumerate(shape) if length % mesh.size == 0), None)
    # --- end


# %% id="tpu_step.split_axis.check"
check("tpu_step.split_axis", split_axis)

# %% tags=["hidden"] id="tpu_step.split_axis.hidden"
hidden(
    "tpu_step.split_axis",
    example("exactly SMALL numbers", ((8, 128), public.Mesh(8)), 0),
    example("nothing divides", ((50, 50), public.Mesh(8)), None),
    example("the first divides by two only", ((6, 400), public.Mesh(2, 4)), 1),
    reference("more shapes", public.some_layout, call=public.each_shape),
)
mutant("tpu_step.split_axis", "length % mesh.size == 0", "length >= mesh.size", says="must divide evenly")
mutant("tpu_step.split_axis", "length % mesh.size", 'length % mesh.shape["data"]', says="all devices count")
mutant("tpu_step.split_axis", "int(np.prod(shape)) < SMALL", "int(np.prod(shape)) <= SMALL", says="exactly SMALL")
mutant("tpu_step.split_axis", " or int(np.prod(shape)) < SMALL", "", says="stay whole")
mutant("tpu_step.split_axis", "mesh.size == 1 or ", "", says="one device has nothing to share")
mutant("tpu_step.split_axis", "== 0), None)", "== 0), 0)", says="None")

# %% [markdown] id="devices-run-look"
# The number of devices must be known before JAX starts, and it runs here already with one. So the next cell hands a
# program to *another process*, which XLA gives eight CPU devices. It compiles this library's real training step in the
# three layouts, for a small model and four micro-batches, and reads the result as the pre-flight does: products,
# messages, memory. Nothing is run. The program is `read_layouts` in `nanochat_lib/course/layouts.py`.

# %% id="devices"
from nanochat_lib.course.fake_devices import on_devices

MODEL = {"sequence_len": 32, "vocab_size": 128, "n_layer": 4, "n_head": 2, "n_kv_head": 2, "n_embd": 64}
A = 4  # micro-batches
if fast():
    layouts = page["layouts"]  # recorded by scripts/record_tpu_step.py
else:
    program = "from nanochat_lib.course.layouts import read_layouts\nresult = read_layouts(model, micro)"
    layouts = on_devices(program, 8, model=MODEL, micro=A)
done = {name: found["matmul_flops"] + found["optimizer_flops"] for name, found in layouts.items()}
muon = {name: flops - layouts["copies"]["matmul_flops"] for name, flops in done.items()}  # beside the model's own
for name, found in layouts.items():
    size = found["memory"]["arguments"] / 2**10
    print(
        f"{name:12} a device holds {size:7.1f} KiB between steps, Muon makes {muon[name] / 1e6:5.1f} MFLOP of products"
    )
_ = about(muon["copies"] / muon["cut by data"], 5.0, 0.01, "times fewer of Muon's products on a device")

# %% [markdown] id="places-look"
# Who owns what? Each colour is a device; an array in one colour for all is on every device.

# %% tags=["slide"] id="places"
COLOURS = (BLUE, ORANGE, GREEN, RED, PURPLE, SKY, "#F0E442", "#444444")
shown = list(layouts["copies"]["places"])
fig, axes = new_figure(2, 4, height=3.2)
for row, name in zip(axes, ("copies", "cut by data"), strict=True):
    for ax, key in zip(row, shown, strict=True):
        shape, places = layouts[name]["places"][key]
        rows, columns = (shape[-3] * shape[-2], shape[-1]) if len(shape) == 3 else shape
        for device, index in enumerate(places):
            (r0, r1), (c0, c1) = index[-2:]
            if len(shape) == 3:  # the first axis in strips, one below the other
                strips = range(*index[0])
                boxes = [(s * shape[-2] + r0, s * shape[-2] + r1) for s in strips]
            else:
                boxes = [(r0, r1)]
            whole = len({json.dumps(place) for place in places}) == 1
            for top, bottom in boxes:
                ax.fill_between([c0, c1], top, bottom, color=FAINT if whole else COLOURS[device], linewidth=0)
        ax.set_xlim(0, columns)
        ax.set_ylim(rows, 0)
        ax.set_xticks([])
        ax.set_yticks([])
        ax.set_title(f"{key}\n{' × '.join(map(str, shape))}" if name == "copies" else "", fontsize=8, loc="left")
    row[0].set_ylabel(name, fontsize=9)
show(
    fig,
    alt="Batch rows, a weight matrix and Muon's stacks, coloured by owning device; copies are grey, cut ones have eight colours.",
)

# %% [markdown] id="muon-sharded"
# The batch is cut either way. In the second row so is the state, each array along its first axis that divides by
# eight: weights by rows, the stack of 16 matrices by matrices, the stack of 4 by the matrices' rows.
#
# For the update whole matrices travel to owners and back (all-to-all), so that none is made orthogonal twice. 16
# matrices of attention are two for each device instead of sixteen; of the MLP's 4 and 4 one each instead of four. A matrix
# of 4C × C costs three times as much as one of C × C: $(2 + 3 + 3) / (16 + 12 + 12)$, a fifth. The compiler counts the same.
#
# A public port cut a stack only where its length divided by 8. How many MLP matrices of each kind does one chip then
# have to make orthogonal, and how many when the stack is filled up with zeros, as here?

# %% id="muon-counts"
for depth in (12, 20, 24, 26):
    port = depth // 8 if depth % 8 == 0 else depth
    print(
        f"d{depth}: {depth} matrices; only where it divides: {port:2} a chip; filled up: {math.ceil(depth / 8)} a chip"
    )

# %% [markdown] id="sent-look"
# ### Exercise: bytes that travel
#
# The compiled program says how large the *result* of each message is on one device. What a device has to send depends
# on the kind. Picture eight devices in a ring; in each round everybody hands one part to the neighbour. A part is an
# eighth of the whole array.
#
# - *all-gather*: everybody has a part, everybody ends with the whole.
# - *reduce-scatter*: everybody has a whole, everybody ends with one part of the sum. The result is that part.
# - *all-reduce*: everybody ends with the whole sum. That is a reduce-scatter, then an all-gather.
# - *all-to-all*: everybody has a part for each of the others.


# %% tags=["exercise"] id="tpu_step.sent_bytes" points=2 minutes=15 level=2
def sent_bytes(kind, result, devices):
    """Bytes that one device sends for a message of this kind whose result on a device has `result` bytes."""
    # --- stub
    raise NotImplementedError
    # --- solution
    part = result if kind == "reduce-scatter" else result / devices
    turns = 2 if kind == "all-reduce" else 1
    return turns * part * (devices - 1)
    # --- end


# %% id="tpu_step.sent_bytes.check"
check("tpu_step.sent_bytes", sent_bytes)

# %% tags=["hidden"] id="tpu_step.sent_bytes.hidden"
hidden(
    "tpu_step.sent_bytes",
    example("one device sends nothing", ("all-gather", 4096.0, 1), 0.0),
    reference("gathering", public.message("all-gather"), against=public.ring),
    reference("reducing", public.message("all-reduce"), against=public.ring),
)
mutant("tpu_step.sent_bytes", "(devices - 1)", "devices", says="its own part to itself")
mutant(
    "tpu_step.sent_bytes",
    'result if kind == "reduce-scatter" else result / devices',
    "result / devices",
    says="one part already",
)
mutant("tpu_step.sent_bytes", '2 if kind == "all-reduce" else 1', "1", says="twice")
mutant("tpu_step.sent_bytes", '2 if kind == "all-reduce" else 1', "2", says="only an all-reduce")

# %% [markdown] id="traffic-look"
# Now count. With four micro-batches in a step, how many times as much does "fully cut" send as "cut by data"? Guess.

# %% id="traffic-predict"
predict("tpu_step.p_fsdp")

# %% tags=["slide"] id="traffic"
sent_bytes = mine("tpu_step.sent_bytes")
KINDS = {"all-gather": BLUE, "reduce-scatter": GREEN, "all-reduce": RED, "all-to-all": PURPLE}
traffic = {
    name: {kind: sent_bytes(kind, found["collectives"].get(kind, (0, 0))[1], 8) / 2**10 for kind in KINDS}
    for name, found in layouts.items()
}
fig, ax = new_figure(height=2.3)
for row, sent in enumerate(traffic.values()):
    left = 0.0
    for kind, colour in KINDS.items():
        ax.barh(row, sent[kind], 0.6, left=left, color=colour, label=kind if row == 0 else None)
        left += sent[kind]
ax.set_yticks(range(3), list(traffic))
fig.legend(loc="outside right center", frameon=False, fontsize=8.5)
ax.invert_yaxis()
ax.grid(axis="y", visible=False)
label(ax, "What one device sends in a step of four micro-batches", "KiB")
show(fig, alt="Stacked bars of bytes sent by kind of message for three layouts.")
for name, found in layouts.items():
    counts = ", ".join(
        f"{count} × {kind}" for kind, (count, _) in sorted(found["collectives"].items()) if kind in KINDS
    )
    print(f"{name:12} {sum(traffic[name].values()):8.0f} KiB: {counts}")
times = sum(traffic["fully cut"].values()) / sum(traffic["cut by data"].values())
reveal("tpu_step.p_fsdp", round(times, 1))
_ = about(times, 3.1, 0.1, "times as much as cut by data")

# %% [markdown] tags=["slide"] id="traffic-explain"
# - *Cut by data*: weights out once, gradients back once, Muon's matrices to their owners and home.
# - *Fully cut*: weights out in every micro-batch, forward and again backward, gradients back in every micro-batch. No
#   device ever holds all weights. By the pre-flight's formulas that saves a d24 on eight chips 4.6 of 17.2 GiB.
# - *Copies*: the compiler for CPUs sums the gradients of the matrices in every micro-batch. The one for TPUs moves that sum
#   out of the loop; somebody who compiled the port's step for a v6e found so, and had expected the opposite. Read it.
#
# Weights are gathered in float32 here. On a TPU the gathered copy is bfloat16, half of it.

# %% id="q-fsdp"
quiz("tpu_step.q_fsdp")

# %% [markdown] id="mfu-look"
# ## 7. How fast is fast
#
# The **model FLOP utilisation** is what the model needs, over what the chips could have done in that time. What it
# needs is counted from its structure, never from the program: doing things twice must not make it look better.
#
# ### Exercise: MFU


# %% tags=["exercise"] id="tpu_step.mfu" points=2 minutes=12 level=2 library="nanochat_lib.hardware:mfu"
def mfu(flops_per_token, tokens_per_s, devices, chip, dtype="bfloat16"):
    """flops_per_token · tokens_per_s / (devices · peak of one), as a share. tokens_per_s counts all devices together.

    chip.peak is a dictionary by dtype. A chip whose kind is "cpu" counts as one device, and bfloat16 means float32 there.
    None: no chip (None), no device, no speed yet (0), no peak for this dtype, or a result above 1, which cannot be.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    if chip is None or devices < 1 or not tokens_per_s > 0:
        return None
    if chip.kind == "cpu":
        devices, dtype = 1, "float32" if dtype == "bfloat16" else dtype
    peak = chip.peak.get(dtype)
    if peak is None:
        return None
    share = flops_per_token * tokens_per_s / (devices * peak)
    return share if share <= 1 else None
    # --- end


# %% id="tpu_step.mfu.check"
check("tpu_step.mfu", mfu)

# %% tags=["hidden"] id="tpu_step.mfu.hidden"
hidden(
    "tpu_step.mfu",
    example("more than possible", (1e9, 1e9, 1, public.V6E), None),
    example("no peak for this dtype", (1e9, 1e5, 8, public.V6E, "float8"), None),
    reference("four v5p", lambda rng: (float(rng.uniform(1e9, 5e9)), 1e5, 4, public.V5P)),
)
mutant("tpu_step.mfu", "(devices * peak)", "peak", says="divide by the peak of all")
mutant("tpu_step.mfu", "return share if share <= 1 else None", "return share", says="above 1 is impossible")
mutant(
    "tpu_step.mfu",
    'devices, dtype = 1, "float32" if dtype == "bfloat16" else dtype',
    "pass",
    says="a CPU is one device",
)
mutant(
    "tpu_step.mfu",
    "chip.peak.get(dtype)",
    'chip.peak.get(dtype, chip.peak["bfloat16"] if "bfloat16" in chip.peak else None)',
    says="no MFU",
)
mutant("tpu_step.mfu", "chip is None or ", "", says="NoneType")

# %% [markdown] id="mfu-use-look"
# The port published its runs; check its figures. A token of its model costs 4.775 GFLOP (4.945 in the second recipe), a step
# was 524,288 tokens (1,048,576), on eight v6e.

# %% id="mfu-use"
mfu = mfu_by_hand = mine("tpu_step.mfu")
CHIP = {chip.name: chip for chip in CHIPS}
V6E, V5P = CHIP["v6e"], CHIP["v5p"]
RUNS = {  # name: FLOPs a token, tokens a step, seconds a step as published
    "first row, conservative": (4.775e9, 2**19, 1.58),
    "first recipe, later": (4.775e9, 2**19, 1.43),
    "second recipe": (4.945e9, 2**20, 2.876),
}
for name, (flops, tokens, seconds) in RUNS.items():
    print(f"{name:24} {tokens / seconds:9,.0f} tokens/s   MFU {100 * mfu(flops, tokens / seconds, 8, V6E):.1f} %")
_ = about(100 * mfu(4.945e9, 2**20 / 2.876, 8, V6E), 24.5, 0.1, "% in the second recipe, as its author says")

# %% [markdown] id="roofline-look"
# Could it be the memory? A product $m \times k$ times $k \times n$ in bfloat16 does $2mkn$ FLOPs and moves at least
# $2(mk + kn + mn)$ bytes. The ratio is its *intensity*. A chip needs its **ridge**, peak over bandwidth, to be busy: below
# it the memory decides, above it the matrix unit.

# %% tags=["slide"] id="roofline"
model = preset("tpu-v6e-8-d24").gpt_config()
C, V = model.n_embd, model.padded_vocab_size


def intensity(m, k, n):
    """FLOPs for each byte of a product in bfloat16, every array moved once."""
    return m * k * n / (m * k + k * n + m * n)


def products_of(rows):
    """The kinds of products in a step of d24, by name, for `rows` sequences of 2048 tokens on a chip."""
    tokens = rows * model.sequence_len
    return {"attention": (tokens, C, C), "MLP": (tokens, C, 4 * C), "head": (tokens, C, V)}


def draw_roofline(ax, chips, rows):
    reach = np.geomspace(20, 4000, 200)
    for chip, colour in zip(chips, (BLUE, ORANGE, GREEN), strict=False):
        peak, bandwidth = chip.peak["bfloat16"], chip.bandwidth
        ax.loglog(reach, np.minimum(peak, reach * bandwidth) / 1e12, color=colour, label=chip.name)
        for (_, size), marker in zip(products_of(rows).items(), "osD", strict=True):
            at = intensity(*size)
            ax.plot(at, min(peak, at * bandwidth) / 1e12, marker, color=colour, markersize=6)
    label(ax, f"{rows} × 2048 tokens a chip", "FLOPs a byte", "TFLOP/s", legend=True)


fig, axes = new_figure(1, 2, height=2.7, sharey=True)
for ax, rows in zip(axes, (1, 2), strict=True):
    draw_roofline(ax, (V6E, V5P), rows)
axes[1].set_ylabel("")
show(
    fig,
    alt="Rooflines of v6e and v5p; circles, squares and diamonds mark attention, MLP and head products near or right of the ridge.",
)
for chip in (V6E, V5P):
    print(f"{chip.name}: ridge {chip.peak['bfloat16'] / chip.bandwidth:.0f} FLOPs a byte")
for name, size in products_of(2).items():
    print(f"{name:9} {' × '.join(map(str, size)):20} {intensity(*size):5.0f} FLOPs a byte")
_ = about(V6E.peak["bfloat16"] / V6E.bandwidth, 560, 1, "FLOPs a byte, the ridge of a v6e")

# %% [markdown] id="roofline-explain"
# Circles are attention's projections, squares the MLP, diamonds the head. With 2 × 2048 tokens all products of a d24 lie
# right of the ridge of 560, with 1 × 2048 attention's lie on it. So memory is no excuse for 24 %; on a v5p, with its
# ridge of 166, still less.
#
# ### Exercise: the matrix unit
#
# A v6e multiplies on a square array of 256 × 256, earlier chips on 128 × 128. Sizes that do not fill it are filled up
# with zeros, which cost as much as numbers. $k$, over which one sums, is always filled up to whole arrays. So is one of
# $m$ and $n$. The other one streams through in groups of 8. The compiler may choose which; take the better.


# %% tags=["exercise"] id="tpu_step.padded" points=2 minutes=15 level=2 library="nanochat_lib.preflight.accounting:padded"
def padded(m, k, n, unit):
    """Multiplications that a unit × unit array spends on m × k times k × n, zeros included, as an int."""
    # --- stub
    raise NotImplementedError

    # --- solution
    def up(size, to):
        return math.ceil(size / to) * to

    return min(up(m, 8) * up(k, unit) * up(n, unit), up(m, unit) * up(k, unit) * up(n, 8))
    # --- end


# %% id="tpu_step.padded.check"
check("tpu_step.padded", padded)

# %% tags=["hidden"] id="tpu_step.padded.hidden"
hidden(
    "tpu_step.padded",
    example("a single number", (1, 1, 1, 128), 8 * 128 * 128),
    reference("on 128", lambda rng: (*public.some_product(rng)[:3], 128)),
    reference("on 256", lambda rng: (*public.some_product(rng)[:3], 256)),
)
mutant(
    "tpu_step.padded",
    "up(m, 8) * up(k, unit) * up(n, unit), up(m, unit) * up(k, unit) * up(n, 8)",
    "up(m, unit) * up(k, unit) * up(n, unit), up(m, unit) * up(k, unit) * up(n, unit)",
    says="filled up all three",
)
mutant("tpu_step.padded", ", up(m, unit) * up(k, unit) * up(n, 8))", ", math.inf)", says="n may be the one")
mutant("tpu_step.padded", "min(up(m, 8) * up(k, unit) * up(n, unit), ", "min(math.inf, ", says="m may be the one")
mutant(
    "tpu_step.padded", "min(up(m, 8)", "min(up(m, unit) * up(k, 8) * up(n, unit), up(m, 8)", says="k is summed inside"
)
mutant(
    "tpu_step.padded",
    "up(m, 8) * up(k, unit) * up(n, unit), up(m, unit) * up(k, unit) * up(n, 8)",
    "m * up(k, unit) * up(n, unit), up(m, unit) * up(k, unit) * n",
    says="groups of 8",
)
mutant("tpu_step.padded", "math.ceil(size / to) * to", "max(size // to, 1) * to", says="round up")

# %% [markdown] id="padding-look"
# In a d24 every weight matrix fits a 256-wide unit. Only attention does not: its products have the head size as a side. This
# is what one head costs on each unit, forward: $q k^\top$ contracts over the head, $p v$ has it as its width.

# %% id="padding"
padded = mine("tpu_step.padded")
for chip in (V5P, V6E):
    for d in (128, 256):
        sizes = ((2048, d, 2048), (2048, 2048, d))
        spent = [padded(*size, chip.matrix_unit) / math.prod(size) for size in sizes]
        print(f"{chip.name}, head of {d}: q·k {spent[0]:.1f}, p·v {spent[1]:.1f} times the useful work")

# %% [markdown] id="bound-look"
# Two of those lines differ from 1. How much of a whole step is that? Guess the ceiling first: with 12 heads of 128 on a
# v6e, what is the highest MFU that any program could reach?

# %% id="bound-predict"
predict("tpu_step.p_bound")

# %% id="bound"
from nanochat_lib.preflight.attention_cost import attention_cost


def ceiling(model, chip, rows=2):
    """(MFU that no program can beat, TFLOP spent by a micro-batch): dense products fit, attention counts with its padding.

    Attention's tiles compute some hidden scores too; that is in it.
    """
    tokens = rows * model.sequence_len
    spent = 6 * scaling_params(model) * tokens + attention_cost(model, chip, rows).padded_flops
    return flops_per_token(model) * tokens / spent, spent / 1e12


by_heads = {"6 × 256": model, "12 × 128": preset("tpu-v6e-8-d24-h128").gpt_config()}
for chip in (V6E, V5P):
    for name, config in by_heads.items():
        print(f"{chip.name}, heads {name:8} at most {100 * ceiling(config, chip)[0]:.1f} % MFU")
highest = {name: ceiling(config, V6E)[0] for name, config in by_heads.items()}
reveal("tpu_step.p_bound", round(100 * highest["12 × 128"], 1))
_ = about(100 * highest["12 × 128"], 82.9, 0.5, "% by hand (compiled: 82.6)")
_ = about(100 * highest["6 × 256"], 95.6, 0.5, "% by hand (compiled, with its memory traffic: 91.7)")

# %% [markdown] tags=["slide"] id="bound-explain"
# The compiled step of each preset was read by `nanochat preflight` (`docs/tpu-step.md`): 82.6 % with heads of 128, 91.7 %
# with heads of 256, where the memory traffic of everything between the products comes to count. So no cleverness would
# have taken the port beyond 83 % with heads of 128, and its 24 % have another reason.

# %% [markdown] id="state-look"
# ## 8. The pre-flight
#
# Before a machine is rented, three questions: does the step fit, what does it do, how fast can it be. First the part of
# the memory that is there between two steps.
#
# ### Exercise: the state
#
# Muon keeps one moment of each number of its matrices, AdamW two of everything else, all in float32 (4 bytes).
# Everything is cut over all devices.


# %% tags=["exercise"] id="tpu_step.state_memory" points=2 minutes=12 level=2 library="nanochat_lib.preflight.analytic:state_memory"
def state_memory(groups, master, devices):
    """{"master weights", "moments"}: bytes on one device between steps, `master` bytes a weight.

    groups["transformer_matrices"] numbers belong to Muon, the rest of groups["total"] to AdamW.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    matrices, total = groups["transformer_matrices"], groups["total"]
    return {
        "master weights": total * master / devices,
        "moments": (4 * matrices + 8 * (total - matrices)) / devices,
    }
    # --- end


# %% id="tpu_step.state_memory.check"
check("tpu_step.state_memory", state_memory)

# %% tags=["hidden"] id="tpu_step.state_memory.hidden"
hidden(
    "tpu_step.state_memory",
    reference("a random model", public.some_model),
    reference("a d24", lambda rng: (count_params(preset("tpu-v6e-8-d24").gpt_config()), 4, 8)),
)
mutant("tpu_step.state_memory", "4 * matrices + 8 * (total - matrices)", "8 * total", says="Muon keeps one moment")
mutant("tpu_step.state_memory", "8 * (total - matrices)", "4 * (total - matrices)", says="AdamW keeps two")
mutant(
    "tpu_step.state_memory",
    "4 * matrices + 8 * (total - matrices)",
    "8 * matrices + 4 * (total - matrices)",
    says="the other way round",
)
mutant(
    "tpu_step.state_memory",
    "(4 * matrices + 8 * (total - matrices))",
    "master * (matrices + 2 * (total - matrices))",
    says="moments are float32",
)
mutant(
    "tpu_step.state_memory",
    """total * master / devices,
        "moments": (4 * matrices + 8 * (total - matrices)) / devices,""",
    """total * master,
        "moments": 4 * matrices + 8 * (total - matrices),""",
    says="1/devices",
)

# %% [markdown] id="trust-look"
# Do formulas deserve trust? Hold them against the compiler, on the eight small devices of section 6: arguments of the
# compiled step against the state, its products against the model's FLOPs.

# %% id="trust"
from nanochat_lib.sizing import GPTConfig

state_memory = mine("tpu_step.state_memory")
small = GPTConfig(**MODEL)
found = layouts["cut by data"]
formula = sum(state_memory(count_params(small), 4, 8).values())
held, made = found["memory"]["arguments"], layouts["copies"]["matmul_flops"]
flops = flops_per_token(small) * A * small.sequence_len  # of one device in a step
print(f"state by formula {formula / 2**10:.1f} KiB, arguments of the program {held / 2**10:.1f} KiB")
print(f"FLOPs by formula {flops / 1e6:.2f} M, products of the program, Muon's left out, {made / 1e6:.2f} M")
_ = about(held / formula, 1.014, 0.005, "arguments over formula: the batch, and what is too small to be cut")
_ = about(made / flops, 1.0, 0.001, "products over formula")

# %% [markdown] id="preflight-predict-look"
# Now the real thing: d24 on eight v6e, 2 × 2048 tokens a chip and micro-batch, 1,048,576 tokens a step. Guess memory and
# work of one chip.

# %% id="memory-predict"
predict("tpu_step.p_memory")

# %% id="flops-predict"
predict("tpu_step.p_flops")

# %% id="preflight"
from nanochat_lib.preflight import base_report

COMPILED = {"6 × 256": 24.1, "12 × 128": 24.7}  # GiB of a chip, docs/tpu-step.md
config = preset("tpu-v6e-8-d24")
report = base_report(config)
reveal("tpu_step.p_memory", COMPILED["6 × 256"])
reveal("tpu_step.p_flops", round(report["formula_flops"] / 1e12))
for name, size in report["memory_by_formula"].items():
    print(f"{name:22} {size / GIB:5.2f} GiB")
_ = about(report["needed"] / GIB, 17.2, 0.1, "GiB by formulas (the compiled step: 24.1)")
_ = about(report["formula_flops"] / 1e12, 648, 1, "TFLOP of a chip and step")
_ = about(
    sum(state_memory(count_params(config.gpt_config()), 4, 1).values()) / GIB,
    12.9,
    0.1,
    "GiB of state, not cut: twice without donation",
)

# %% [markdown] id="preflight-explain"
# The formulas are 30 % below the compiled step. They count what must be there, not what the compiler keeps to be faster,
# nor alignment. That is the reason to compile: `nanochat preflight --preset tpu-v6e-8-d24 --profile` does so with the extra
# `tpu`, on a computer without a TPU, and takes some coffee: 23 minutes on two busy cores.
#
# ### v6e or v5p?
#
# The same step on eight chips of each kind, by formulas and by hand. A v6e has twice the peak, a v5p has the memory.

# %% id="compare"
CASES = {
    "v6e, 6 × 256": (config, "v6e"),
    "v6e, 12 × 128": (preset("tpu-v6e-8-d24-h128"), "v6e"),
    "v5p, 6 × 256": (config, "v5p"),
    "v5p, 12 × 128": (preset("tpu-v6e-8-d24-h128"), "v5p"),
    "v5p, 12 × 128, 8 rows": (override(preset("tpu-v6e-8-d24-h128"), {"pretrain.device_rows": "8"}), "v5p"),
}
print(f"{'':22}   memory by formula    step at least   MFU at most")
reports = {}
for name, (base, chip) in CASES.items():
    chosen = replace(base, target=Target("tpu", chip, 8))
    reports[name] = found = base_report(chosen)
    rows = chosen.pretrain.device_rows
    bound, spent = ceiling(chosen.gpt_config(), CHIP[chip], rows)
    products = spent * 1e12 * found["micro_batches"] / CHIP[chip].peak["bfloat16"]
    found["by_hand"] = {"matrix unit": products, "memory": found["bound"]["memory_seconds"]}
    print(
        f"{name:22} {found['needed'] / GIB:5.1f} of {found['hbm_bytes_limit'] / GIB:2.0f} GiB "
        f"{max(found['by_hand'].values()):14.2f} s {100 * bound:11.1f} %"
    )
_ = about(
    reports["v5p, 6 × 256"]["by_hand"]["matrix unit"] / reports["v6e, 6 × 256"]["by_hand"]["matrix unit"],
    1.93,
    0.03,
    "times as long on eight v5p",
)

# %% tags=["slide"] id="compare-figure"
fig, (left, right) = new_figure(1, 2, height=3.1, sharey=True)
PARTS = (SKY, BLUE, GREEN, ORANGE, PURPLE, FAINT, RED, "#F0E442")
for row, found in enumerate(reports.values()):
    start = 0.0
    for (part, size), colour in zip(found["memory_by_formula"].items(), PARTS, strict=True):
        left.barh(row, size / GIB, 0.6, left=start, color=colour, label=part if row == 0 else None)
        start += size / GIB
    limit = found["hbm_bytes_limit"] / GIB
    left.plot([limit, limit], [row - 0.4, row + 0.4], color="#222222", linewidth=2)
    right.barh(
        row - 0.17,
        found["by_hand"]["matrix unit"],
        0.3,
        color=BLUE,
        label="time: matrix unit" if row == 0 else None,
    )
    right.barh(
        row + 0.17, found["by_hand"]["memory"], 0.3, color=ORANGE, label="time: memory traffic" if row == 0 else None
    )
left.set_yticks(range(len(reports)), list(reports))
left.invert_yaxis()
for ax in (left, right):
    ax.grid(axis="y", visible=False)
label(left, "Memory (line: what a chip has)", "GiB")
label(right, "A step takes at least", "seconds")
handles, names = (a + b for a, b in zip(*(ax.get_legend_handles_labels() for ax in (left, right)), strict=True))
fig.legend(handles, names, loc="outside lower left", ncols=4, frameon=False, fontsize=7.5)
show(
    fig,
    alt="Stacked memory bars against each chip's limit, and the least time of a step by matrix unit and by memory, for five cases.",
)

# %% [markdown] id="compiled-look"
# So much for formulas. The recorded page has the step of two layers (width 1536, four micro-batches, eight v6e) as the
# compiler sees it. Its cycles leave out messages between chips.

# %% id="compiled"
LINES = {
    "memory": f"{compiled_step['needed'] / GIB:.2f} GiB, by formula {compiled_step['by_formula'] / GIB:.2f}",
    "products": f"{compiled_step['matmul_flops'] / 1e12:.2f} TFLOP and {compiled_step['attention_flops'] / 1e12:.2f} of attention",
    "memory traffic": f"{compiled_step['hbm_bytes'] / 1e9:.1f} GB",
    "messages": ", ".join(f"{kind} {size / 2**20:.0f} MiB" for kind, (_, size) in compiled_step["collectives"].items()),
    "padding": f"{compiled_step['padding_waste']:.2%}",
    "at least": f"{1e3 * compiled_step['bound']['step_seconds']:.1f} ms",
    "by cycles": f"{1e3 * compiled_step['seconds']:.1f} ms, an MFU of {compiled_step['mfu']:.0%}",
}
for name, text in LINES.items():
    print(f"{name:16}{text}")
_ = about(compiled_step["by_formula"] / compiled_step["needed"], 0.82, 0.01, "of the compiled memory is in the formula")

# %% [markdown] id="compiled-explain"
# With two layers the head, 32,768 tokens wide, is most of the work and the memory's traffic decides. A whole v5p step has
# not been compiled for this page: `nanochat preflight --preset tpu-v5p-8-d24` does it.

# %% id="q-chip"
quiz("tpu_step.q_chip")

# %% [markdown] id="widget-look"
# ### Plan your own step
#
# Take a chip, a head size, sequences a chip, and gathering once a step or layer by layer. What fits? What is
# the ceiling? Find a setting for a v5e (16 GiB) that fits.

# %% id="widget"


def plan(chip, head, rows, weights):
    chosen = override(
        preset("tpu-v6e-8-d24"),
        {
            "model.head_dim": str(head),
            "pretrain.device_rows": str(rows),
            "compute.fsdp": "8" if weights == "layer by layer" else "1",
        },
    )
    found = base_report(replace(chosen, target=Target("tpu", chip, 8)))
    bound, spent = ceiling(chosen.gpt_config(), CHIP[chip], rows)
    fig, (left, right) = new_figure(1, 2, height=2.9)
    draw_roofline(left, (CHIP[chip],), rows)
    start, limit = 0.0, found["hbm_bytes_limit"] / GIB
    for (part, size), colour in zip(found["memory_by_formula"].items(), PARTS, strict=True):
        right.bar(0, size / GIB, 0.5, bottom=start, color=colour, label=part)
        start += size / GIB
    right.axhline(limit, color="#222222", linewidth=2)
    right.set_xlim(-0.5, 0.5)
    right.set_ylim(0, 1.1 * max(start, limit))
    right.set_xticks([])
    verdict = "fits" if start <= limit else "does not fit"
    label(right, f"{start:.1f} of {limit:.0f} GiB: {verdict}", "", "GiB")
    left.set_title(f"{chip}: MFU at most {bound:.0%}", loc="left", fontsize=10.5, fontweight="bold")
    handles, names = right.get_legend_handles_labels()
    fig.legend(handles[::-1], names[::-1], frameon=False, fontsize=8, loc="outside right center")
    return fig


explore(
    plan,
    alt="Roofline of the chosen chip with the step's products, and the memory of one chip by parts against its limit",
    chip=choice(["v6e", "v5p", "v5e"], "v6e"),
    head=choice([128, 256], 256),
    rows=choice([1, 2, 4, 8], 2),
    weights=choice(["once a step", "layer by layer"], "once a step"),
)

# %% [markdown] id="field-look"
# ## 9. Field lesson: three findings of one port
#
# The port at the top spent about 375 of its 2,500 dollars on speed. Three of its findings, each of which you have now made on a
# CPU.
#
# **One jit.** Utilisation rose from 16 to 22 % when the three functions became one. What share of the time had been
# gaps? Utilisation is inverse to time, so the arithmetic is short.

# %% id="field-jit"
before, after = (4.775e9 * 2**19 / (8 * V6E.peak["bfloat16"] * share) for share in (0.16, 0.22))
_ = about(before, 2.13, 0.02, "seconds a step at 16 %")
_ = about(after, 1.55, 0.02, "seconds a step at 22 %")
_ = about(100 * (before - after) / before, 27, 0.5, "% of the step were gaps (the port measured up to 26.7)")
hours = 16_704 * (before - after) / 3600
_ = about(hours, 2.7, 0.1, "hours that its run of 16,704 steps would have waited")
_ = about(8 * hours * V6E.usd_hour_spot, 11.6, 0.5, "dollars at the spot price of eight v6e")

# %% [markdown] id="field-flag"
# **The flag that did nothing.** Convinced that bfloat16 products had cost it quality, the port switched the output head to
# `highest`. The weights were bfloat16 already, so there was no float32 product left that could have become better: section 5,
# line four. Quality had another cause altogether, a loader that handed out one micro-batch many times (chapter 04). The
# flag stayed in the published recipe.
#
# **Head size and matrix unit.** The recipe's 12 heads of 128 came from GPUs. On a v6e half of a 256-wide unit idles where a
# head is contracted. Six heads of 256 have the same parameters and FLOPs; the port measured about 17 % more tokens a
# second. What do our ceilings say?

# %% id="field-heads"
_ = about(100 * (highest["6 × 256"] / highest["12 × 128"] - 1), 15.3, 0.5, "% more by hand (measured: about 17)")
_ = about(
    100 * (43.8 / 37.6 - 1), 16.5, 0.1, "% more by the compiler's cycles for this library's step (docs/tpu-step.md)"
)

# %% [markdown] tags=["slide"] id="takeaway"
# > **Takeaway.** A training step is *one* compiled function: a scan over micro-batches, the update, a donated state, every
# > number of one type. Then the host cannot starve the chip, and the compiled text is the whole truth: read from it which
# > product runs in what, what travels and what it needs. MFU = needed FLOPs over possible ones; its ceiling follows from
# > the ridge and the matrix unit. All of it can be known for a chip that you have not rented.

# %% [markdown] id="simplified"
# ## What was simplified
#
# - The small network has no attention, and its step neither clips nor measures anything. The real step is
#   `make_train_step` in `nanochat_lib/train_step.py`; it keeps the rows' gradients of the embedding tables and sums them
#   once (`nanochat_lib/table_gradient.py`).
# - Layouts: `nanochat_lib/sharding.py`. Messages: `Collectives` in `nanochat_lib/collectives.py`. Muon's owners:
#   `update_dealt` in `nanochat_lib/optim.py`.
# - A ring is one way to send; a TPU's torus has several links and uses them at the same time. Bytes stay the same, time does
#   not. Nothing here says how much of the traffic hides behind products.
# - Roofline and padding are bounds. Cycles are the compiler's estimate. `docs/tpu-step.md` has what was tried with them; only
#   a chip decides.
# - The pre-flight: `nanochat_lib/preflight/`, its reader of compiled programs `nanochat_lib/compiled.py`.
