# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] id="title" tags=["slide"]
# # Attention kernels
#
# Two kernels compute the same attention of one layer, forward. On a TPU v6e the first needs at least 145 µs, the second
# 42 µs. The first even does *fewer* multiplications. What does it do with its time?
#
# After this chapter you can
#
# - say from two numbers of a chip whether a function waits for memory or for arithmetic,
# - compute a softmax piece by piece, so that no matrix of scores is ever stored,
# - write a flash attention kernel in Pallas, forward and the heart of backward, and run it on your own computer,
# - leave out what a window hides, and share keys among heads,
# - choose tiles for a chip that you do not have, and check the choice with its compiler.
#
# Time: about 210 minutes, 165 of them for nine exercises. You need NumPy, a little JAX, and softmax attention itself,
# as in chapter 02. No accelerator is needed.

# %% id="imports" tags=["setup"]
import json
import subprocess
import sys
from functools import lru_cache, partial
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from nanochat_lib.attention import MASKED, attention
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
)
from nanochat_lib.course.kernel_picture import draw_step
from nanochat_lib.course.kernel_view import cost, record
from nanochat_lib.course.parameters import project_root
from nanochat_lib.hardware import CHIPS
from nanochat_lib.kernels.flash import EMPTY, FIRST, KEY, LAST, QUERY, Band, dot, flash_attention, run_forward
from nanochat_lib.presets import preset
from nanochat_lib.report.plots import BLUE, GREEN, INK, ORANGE, PURPLE, STYLE, new_figure

matplotlib.rcParams.update(STYLE)
CHIP = {chip.name: chip for chip in CHIPS}
V6E, V5E = CHIP["v6e"], CHIP["v5e"]
random = np.random.default_rng(3)

# %% [markdown] id="wall-title"
# ## 1. The memory wall
#
# A chip has two speeds: how many FLOPs it computes a second, and how many bytes its large memory (HBM) delivers. Their
# quotient, the *ridge*, is the number of FLOPs that must be done with every byte, or the arithmetic waits.

# %% id="wall-chips"
for chip in (CHIP["h100"], V5E, V6E):
    peak, bandwidth = chip.peak["bfloat16"], chip.bandwidth
    print(
        f"{chip.name}: {peak / 1e12:.0f} TFLOP/s, {bandwidth / 1e12:.2f} TB/s, ridge {peak / bandwidth:.0f} FLOP/byte"
    )
_ = about(V6E.peak["bfloat16"] / V6E.bandwidth, 560, 1, name="ridge of a v6e")

# %% id="wall-quiz"
quiz("attention.q_wall")

# %% [markdown] id="scores-look"
# Attention as a formula is three lines: scores $s = qk^T/\sqrt D$, weights $p = \text{softmax}(s)$, output $y = pv$.
# Run so, it stores a $T \times T$ matrix for every head. The preset `tpu-v6e-8-d24` has 6 heads of 256 and gives each
# chip 2 sequences of 2048 tokens at a time. Guess first, e.g. `predict("attention.p_scores", 50)`.

# %% id="scores-predict"
predict("attention.p_scores")

# %% id="scores-reveal"
B, H, T, D = 2, 6, 2048, 256
scores_mib = B * H * T * T * 4 / 2**20
reveal("attention.p_scores", scores_mib)
inputs_mib = 3 * B * H * T * D * 2 / 2**20
print(f"q, k and v together, in bfloat16: {inputs_mib:.0f} MiB")

# %% [markdown] id="naive-look"
# 192 MiB of scores from 36 MiB of input, and that for one of 24 layers. They are written, read by the softmax, written
# as weights, read again: some 800 MB, half a millisecond on a v6e, for products that take 0.06 ms. That is the
# **memory wall**.
#
# Your computer's compiler can count it. `"reference"` is the formula word for word; `"xla"` is this library's tiled
# version, which you write yourself in section 3. Below is the scratch memory that each compiled function asks for.

# %% id="naive-count"


def scratch_mib(backend, t):
    """MiB of temporary memory of one compiled attention, float32, one sequence, two heads of 32."""
    array = jax.ShapeDtypeStruct((1, 2, t, 32), jnp.float32)
    compiled = jax.jit(partial(attention, window=t, backend=backend)).lower(array, array, array).compile()
    return compiled.memory_analysis().temp_size_in_bytes / 2**20


lengths = (256, 512) if fast() else (512, 1024, 2048)
scratch = {backend: [scratch_mib(backend, t) for t in lengths] for backend in ("reference", "xla")}
for i, t in enumerate(lengths):
    print(f"T = {t}: whole matrix {scratch['reference'][i]:7.1f} MiB, tiled {scratch['xla'][i]:6.1f} MiB")
growth = scratch["reference"][1] / scratch["reference"][0]
_ = about(growth, 4, 0.3, name="twice the length, times the scratch memory of the whole matrix")

# %% [markdown] id="roofline-look"
# A *roofline* puts both speeds into one picture. To the left of the ridge a function gets what the memory feeds it; to
# the right the arithmetic decides. For attention with stored scores the intensity hardly depends on the length: every
# score costs $4D$ FLOPs and some 16 bytes. A flash kernel with tiles of $b_q$ queries reads $4D$ bytes for each key and
# does $4 D b_q$ FLOPs with them: **its intensity is $b_q$**.

# %% id="roofline" tags=["slide"]


def roofline(points, chip):
    """`points`: name -> FLOPs for each byte."""
    figure, ax = new_figure(height=3.2)
    x = np.geomspace(8, 4000, 200)
    ax.loglog(x, np.minimum(x * chip.bandwidth, chip.peak["bfloat16"]) / 1e12, color=INK)
    for (name, intensity), colour in zip(points.items(), (PURPLE, ORANGE, BLUE, GREEN), strict=True):
        height = min(intensity * chip.bandwidth, chip.peak["bfloat16"]) / 1e12
        beside = {"xytext": (-8, -2), "ha": "right"} if colour == BLUE else {"xytext": (8, -24)}
        words = f"{name}\n{height:.0f} TFLOP/s"
        ax.plot(intensity, height, "o", color=colour)
        ax.annotate(words, (intensity, height), textcoords="offset points", fontsize=8.5, **beside)
    ax.set(xlabel="FLOPs for each byte from HBM", ylabel="TFLOP/s at best", xlim=(8, 4000), ylim=(8, 1400))
    ax.set_xticks([10, 100, 560, 1000], ["10", "100", "560", ""])
    ax.set_yticks([10, 100, 918], ["10", "100", "918"])
    ax.minorticks_off()
    ax.set_title(f"Roofline of a {chip.name}")
    return figure


points = {"scores stored": 4 * D / 16, "tiles of 128": 128, "tiles of 512": 512, "tiles of 1024": 1024}
show(
    roofline(points, V6E),
    alt="Roofline of a TPU v6e: stored scores and tiles of 128 far left of the ridge, 512 just before it",
)


# %% [markdown] id="mask-look"
# ### What a query may see
#
# One thing must be exact before anything is made fast: the mask. In this library, as in FlashAttention, a window of
# $w$ counts the keys *before* the query. A query at position $p$ sees the keys $p-w \dots p$, so $w+1$ of them. At the
# end of the chapter you see what it costs to be off by one.

# %% id="attention.visible" level=1 library="nanochat_lib.attention:visible" minutes=8 nbgrader={"cell_type": "code", "grade": false, "grade_id": "attention-visible", "locked": false, "schema_version": 3, "solution": true, "task": false} points=1 tags=["exercise"]
def visible(queries, keys, window):
    """Boolean mask (…, Tq, Tk) of positions (…, Tq) and (Tk,): a key at most `window` before the query, never after."""
    raise NotImplementedError


# %% id="attention.visible.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "attention-visible-check", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
check("attention.visible", visible)

# %% id="attention.visible.use"
visible = mine("attention.visible")
print(visible(np.arange(6), np.arange(6), 2).astype(int))

# %% [markdown] id="online-title"
# ## 2. Softmax in pieces
#
# Softmax needs the largest score, to keep the exponentials small, and the sum of all exponentials. Both seem to need
# the whole row. They do not: three running numbers for each query are enough.
#
# $$ m = \max s \qquad \ell = \sum e^{s-m} \qquad a = \sum e^{s-m} v \qquad y = a / \ell $$
#
# When a new block of keys raises the maximum from $m$ to $m'$, every old term $e^{s-m}$ must become $e^{s-m'}$: one
# factor $e^{m-m'} \le 1$ for everything that was summed so far. (Milakov and Gimelshein, arXiv:1805.02867; from
# there to attention: FlashAttention, arXiv:2205.14135.)

# %% id="online-quiz"
quiz("attention.q_online")


# %% [markdown] id="absorb-look"
# Write the step. Rows are queries, so m and total are columns (queries, 1). Mark your intermediate results with `note`
# (it returns its value): a failing check then names the first wrong one of `highest`, `p`, `shrink`, `total`, `acc`.
# `dot(a, b, axis_a, axis_b)` is the library's product over one axis of each, summed in float32.

# %% id="attention.absorb" level=2 library="nanochat_lib.kernels.flash:absorb" minutes=20 nbgrader={"cell_type": "code", "grade": false, "grade_id": "attention-absorb", "locked": false, "schema_version": 3, "solution": true, "task": false} points=3 tags=["exercise"]
def absorb(m, total, acc, s, v):
    """(m, total, acc) after one more block of keys.

    m: the largest score so far, (queries, 1). total: the sum of exponentials, (queries, 1). acc: (queries, D).
    s: the block's scores, (queries, keys). v: its values, (keys, D).
    """
    highest = note("highest", ...)  # the largest score so far, this block included
    p = note("p", ...)  # the block's exponentials
    shrink = note("shrink", ...)  # what the old sums must be multiplied with
    raise NotImplementedError


# %% id="attention.absorb.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "attention-absorb-check", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("attention.absorb", absorb)

# %% id="attention.absorb.use"
absorb = mine("attention.absorb")

# %% [markdown] id="online-figure-look"
# One query, twelve keys, three at a time. The estimate acc/total is an average over the keys so far; each time the
# maximum rises, what was collected shrinks.

# %% id="online-figure" tags=["slide"]
s = np.float32([[0.5, 1.0, -1.0, 2.0, 0.0, 1.5, 4.0, 1.0, 3.0, 0.0, 2.0, 3.5]])
v = np.linspace(-1, 1, 12, dtype=np.float32)[:, None]
state = (jnp.full((1, 1), EMPTY, jnp.float32), jnp.zeros((1, 1), jnp.float32), jnp.zeros((1, 1), jnp.float32))
history, step = [], jax.jit(absorb)
for start in range(0, 12, 3):
    state = step(*state, s[:, start : start + 3], v[start : start + 3])
    history.append([float(x[0, 0]) for x in state])
m, total, acc = np.array(history).T
exact = float((jax.nn.softmax(s, axis=1) @ v)[0, 0])
figure, axes = new_figure(1, 3, height=2.3)
keys_seen = [3, 6, 9, 12]
for ax, values, name in zip(axes, (m, total, acc / total), ("m", "total", "acc / total"), strict=True):
    ax.plot(keys_seen, values, "o-", color=BLUE)
    ax.set(title=name, xlabel="keys absorbed", xticks=keys_seen)
axes[2].axhline(exact, color=ORANGE, linestyle="--")
axes[2].text(3, exact, "softmax of all", color=INK, fontsize=8.5, va="top")
show(
    figure,
    alt="Three curves over the absorbed keys: m rises in steps, total falls there, acc over total ends at the softmax",
)
_ = about(acc[-1] / total[-1], exact, 1e-6, name="piece by piece")


# %% [markdown] id="tiling-title"
# ## 3. Tiles in plain JAX
#
# Now both sides are cut. A *tile* is a block of queries against a block of keys. For every block of queries, walk over
# the blocks of keys and absorb one after the other. The largest array you ever make has $b_q \times b_k$ entries.
#
# Scores of hidden keys become `MASKED` = -1e30, not minus infinity, and m starts at `EMPTY` = -1e20. A query that has
# seen nothing yet then computes exp(-1e30 + 1e20) = 0, where infinities would give inf - inf = NaN.

# %% id="attention.blocked" level=2 minutes=20 nbgrader={"cell_type": "code", "grade": false, "grade_id": "attention-blocked", "locked": false, "schema_version": 3, "solution": true, "task": false} points=3 tags=["exercise"]
def blocked(q, k, v, window, block_q, block_kv):
    """Attention of one head without a matrix of all scores: q, k, v (T, D), float32 → (T, D).

    T is a multiple of block_q and of block_kv. Use `visible`, `absorb` and `dot`.
    """
    raise NotImplementedError


# %% id="attention.blocked.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "attention-blocked-check", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("attention.blocked", blocked)

# %% id="attention.blocked.use"
blocked = mine("attention.blocked")
q, k, v = (random.standard_normal((12, 5)).astype(np.float32) for _ in range(3))
y = blocked(q, k, v, 12, 4, 3)
whole_matrix = jax.nn.softmax(jnp.where(visible(np.arange(12), np.arange(12), 12), q @ k.T * 5**-0.5, MASKED)) @ v
print("largest difference to the formula is below 1e-5:", bool(jnp.abs(y - whole_matrix).max() < 1e-5))

# %% [markdown] id="skip-title"
# ## 4. Leave out what nobody sees
#
# Causality hides almost half of all tiles, and a window most of the rest. Your `blocked` computes them all and then
# hides the result. A kernel should not even load them. With tiles of 128, $T = 2048$ has 16 × 16 of them.

# %% id="steps-predict"
predict("attention.p_steps")


# %% [markdown] id="visible-blocks-look"
# A block of queries and a block of keys are two intervals of positions. Whether any query of the one sees any key of
# the other follows from their ends. There may be more keys than queries (a model that continues a text): query $r$
# stands at position $r + t_k - t_q$. The last block of either may be cut short.

# %% id="attention.visible_blocks" level=2 library="nanochat_lib.kernels.flash:visible_blocks" minutes=15 nbgrader={"cell_type": "code", "grade": false, "grade_id": "attention-visible_blocks", "locked": false, "schema_version": 3, "solution": true, "task": false} points=2 tags=["exercise"]
def visible_blocks(tq, tk, window, block_q, block_kv):
    """Boolean (query blocks, key blocks): does any query of the one see any key of the other?"""
    raise NotImplementedError


# %% id="attention.visible_blocks.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "attention-visible_blocks-check", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("attention.visible_blocks", visible_blocks)

# %% id="attention.visible_blocks.use"
visible_blocks = mine("attention.visible_blocks")
seen = visible_blocks(2048, 2048, 512, 128, 128)
reveal("attention.p_steps", int(seen.sum()))

# %% id="blocks-figure" tags=["slide"]
figure, axes = new_figure(1, 4, height=2.4)
for ax, (window, block) in zip(axes, ((2048, 128), (512, 128), (512, 512), (1024, 512)), strict=True):
    seen = visible_blocks(2048, 2048, window, block, block)
    used = sum(min(p, window) + 1 for p in range(2048)) / (seen.sum() * block * block)
    ax.pcolormesh(seen, cmap="Blues", vmin=0, vmax=1.4, edgecolors="white", linewidth=0.6)
    ax.invert_yaxis()
    ax.set_aspect("equal")
    ax.set(xticks=[], yticks=[], xlabel=f"{int(seen.sum())} of {seen.size}\n{100 * used:.0f} % needed")
    ax.set_title(f"window {window}\ntiles of {block}", fontsize=9)
axes[0].set_ylabel("query blocks")
show(
    figure,
    alt="Four maps of tiles: the causal triangle of 136 tiles, a band of 70 tiles of 128, and coarser maps of 512",
)


# %% [markdown] id="schedule-look"
# The share that is *needed* falls when tiles grow: a tile that the edge cuts is computed whole. Keep that in mind for
# section 8.
#
# A Pallas grid is a box of integers, not a staircase. So the kernel walks along a **list**: a small table of integers
# that the chip reads before the blocks, with one column for each tile that shows something. All tiles of one query
# block stand together (a *run*); the kernel must know where a run begins (reset the sums) and where it ends (write the
# result). The backward kernel for keys needs runs of key blocks instead. A block that sees nothing still gets one step:
# its zeros must be written.

# %% id="attention.schedule" level=3 library="nanochat_lib.kernels.flash:schedule" minutes=20 nbgrader={"cell_type": "code", "grade": false, "grade_id": "attention-schedule", "locked": false, "schema_version": 3, "solution": true, "task": false} points=3 tags=["exercise"]
def schedule(seen, run):
    """The grid, int32 (4, steps): query block, key block, does a run begin here, does it end here.

    seen: Boolean (query blocks, key blocks), not to be changed. run: QUERY (0) for runs of query blocks, KEY (1) for
    runs of key blocks: the row of the table whose number stays the same in a run. A block without any tile gets one
    step, with block 0 of the other side.
    """
    raise NotImplementedError


# %% id="attention.schedule.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "attention-schedule-check", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("attention.schedule", schedule)

# %% id="attention.schedule.use"
schedule = mine("attention.schedule")
print(schedule(visible_blocks(2048, 2048, 512, 512, 512), QUERY))

# %% [markdown] id="pallas-title"
# ## 5. Pallas, step by step
#
# A Pallas kernel is a function of *references* to blocks in fast memory. `pallas_call` runs it once for every place of
# a grid. A `BlockSpec` says how large a block is and, from the place in the grid, which one a step needs; Pallas does
# the copies. With `interpret=True` all of it runs as ordinary JAX on your computer: slow, but with the same results.
#
# First the smallest kernel: twice a vector, a block at a time.

# %% id="pallas-first"


def twice_kernel(x_ref, y_ref):
    y_ref[...] = 2 * x_ref[...]


def twice(x, block):
    """2·x for x (rows, columns), `block` rows at a time."""
    spec = pl.BlockSpec((block, x.shape[1]), lambda i: (i, 0))
    return pl.pallas_call(
        twice_kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), grid=(x.shape[0] // block,), in_specs=[spec],
        out_specs=spec, interpret=True,
    )(x)  # fmt: skip


print(twice(jnp.arange(12.0).reshape(6, 2), 2).tolist())

# %% [markdown] id="pallas-sum-look"
# Sums over several steps need memory that stays: *scratch*. `pl.when` runs a part under a condition. This kernel sums
# the columns of every row of blocks: reset at the first step of a row, add at each, write at the last. It is the frame
# of the attention kernel.

# %% id="pallas-sum"


def sum_kernel(x_ref, y_ref, sum_ref):
    column = pl.program_id(1)

    @pl.when(column == 0)
    def begin():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    sum_ref[...] += x_ref[...].sum(axis=1, keepdims=True)

    @pl.when(column == pl.num_programs(1) - 1)
    def end():
        y_ref[...] = sum_ref[...]


def row_sums(x, block):
    """Sums over the columns of x (rows, columns), in blocks of block × block."""
    grid = (x.shape[0] // block, x.shape[1] // block)
    return pl.pallas_call(
        sum_kernel, jax.ShapeDtypeStruct((x.shape[0], 1), x.dtype), grid=grid,
        in_specs=[pl.BlockSpec((block, block), lambda i, j: (i, j))],
        out_specs=pl.BlockSpec((block, 1), lambda i, j: (i, 0)),
        scratch_shapes=[pltpu.VMEM((block, 1), x.dtype)], interpret=True,
    )(x)  # fmt: skip


print(row_sums(jnp.arange(16.0).reshape(4, 4), 2).ravel().tolist())

# %% [markdown] id="view-look"
# What does it cost? Look at the copies. `record` catches the real `pallas_call` while JAX traces the function: its
# grid, its blocks and its index functions. The picture is drawn from these, so it shows what the code says, not what we
# meant. Orange is copied from HBM now, blue is still there from the step before, green is written after this step.

# %% id="view-sum" tags=["slide"]
call = record(row_sums, jax.ShapeDtypeStruct((1024, 1024), jnp.float32), 256)[0]
show(
    draw_step(call, 5),
    alt="Step 6 of 16 of the row sum: one block of x is copied, the block of y is still in fast memory",
)


# %% [markdown] id="fetches-look"
# One rule decides about all copies: **a block is copied if the step before did not use the same one.** There is no
# cache that remembers more. Write the rule down; the picture above, and every count below, stands on it.

# %% id="attention.fetches" level=1 library="nanochat_lib.course.kernel_view:fetches" minutes=8 nbgrader={"cell_type": "code", "grade": false, "grade_id": "attention-fetches", "locked": false, "schema_version": 3, "solution": true, "task": false} points=1 tags=["exercise"]
def fetches(visits):
    """Boolean (steps,): must a block be copied for this step? visits: (steps, axes), the block each step uses."""
    raise NotImplementedError


# %% id="attention.fetches.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "attention-fetches-check", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
check("attention.fetches", fetches)

# %% id="attention.fetches.use"
fetches = mine("attention.fetches")
for one in call.operands:
    copied = fetches(one.visits if not one.output else one.visits[::-1])
    print(f"{one.name}: {int(copied.sum())} copies of {one.block_bytes} bytes in {len(copied)} steps")


# %% [markdown] id="gqa-title"
# ## 6. Heads that share keys, and which block a step needs
#
# In *grouped-query attention* (GQA, arXiv:2305.13245) $G$ query heads read one key/value head. Copying the keys $G$
# times in memory would throw the saving away. Look at q as (B, K, G, T, D) instead, and let the *index function* of the
# keys simply not depend on the head in its group.
#
# The kernels of this library need three kinds of blocks:
#
# | array | shape | what a step sees |
# |---|---|---|
# | queries, output, their gradients | (B, K, G, T, D) | (block_q, D) |
# | keys, values, their gradients | (B, K, T, D) | (block_kv, D) |
# | log-sum-exp, delta | (B, K, G, 1, T) | (1, block_q) |
#
# Forward and dq run over the grid (B, K, G, steps), the dk/dv kernel over (B, K, steps, G): an index function gets the
# place in the grid and, last, the table of steps. `None` in a block's shape means: one entry, and the kernel does not
# see the axis.

# %% id="attention.block_specs" level=2 library="nanochat_lib.kernels.flash:block_specs" minutes=20 nbgrader={"cell_type": "code", "grade": false, "grade_id": "attention-block_specs", "locked": false, "schema_version": 3, "solution": true, "task": false} points=3 tags=["exercise"]
def block_specs(band, d, run):
    """Which block a step needs of an array (B, K, G, Tq, D), of one (B, K, Tk, D), of one (B, K, G, 1, Tq).

    band.block_q, band.block_kv: sizes of the blocks. d: D. run: QUERY, then the grid is (B, K, G, steps), or KEY, then
    it is (B, K, steps, G). Index functions get the grid's place and the table of `schedule`.
    """
    raise NotImplementedError


# %% id="attention.block_specs.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "attention-block_specs-check", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("attention.block_specs", block_specs)

# %% id="attention.block_specs.use"
block_specs = mine("attention.block_specs")

# %% id="gqa-quiz"
quiz("attention.q_gqa")

# %% [markdown] id="gqa-count-look"
# Count it on the library's kernels: 8 query heads of 128, 2048 tokens, tiles of 512, with 8, 2 and 1 key/value heads.
# `k` and `v` shrink in memory. What the *forward* kernel copies of them does not; the dk/dv kernel, whose grid has the
# heads inside, copies each once.

# %% id="gqa-count"


def gradients(q, k, v, **sizes):
    """Forward and backward, so that all three kernels are called."""
    y, pull = jax.vjp(partial(flash_attention, **sizes), q, k, v)
    return pull(y)


@lru_cache(maxsize=64)
def calls_of(heads, kv_heads, d, window, tile, rows=1, t=2048):
    """The three calls of one layer in bfloat16: forward, dq, dk and dv."""
    q, k = (jax.ShapeDtypeStruct((rows, n, t, d), jnp.bfloat16) for n in (heads, kv_heads))
    return record(gradients, q, k, k, window=window, block_q=tile, block_kv=tile)


for kv_heads in (8, 2, 1):
    forward, _, dkv = calls_of(8, kv_heads, 128, 2048, 512)
    stored = forward.operands[1].bytes / 2**20
    print(
        f"{kv_heads} key heads: k is {stored:.1f} MiB; forward copies {forward.operands[1].moved / 2**20:.1f} MiB, "
        f"dk/dv {dkv.operands[1].moved / 2**20:.1f} MiB"
    )


# %% [markdown] id="kernel-title"
# ## 7. The kernel
#
# Everything is ready: the table, the blocks, the step of the softmax. The kernel sees one tile:
#
# - `steps`, the table of `schedule`: column `step` holds the query block, the key block, and whether a run begins or
#   ends (rows `QUERY`, `KEY`, `FIRST`, `LAST`),
# - `q_ref` (block_q, D), `k_ref` and `v_ref` (block_kv, D),
# - results `y_ref` (block_q, D) and `lse_ref` (1, block_q), $\text{lse} = m + \log \ell$: all the backward pass needs,
# - scratch `m_ref`, `l_ref` (block_q, 1) and `acc_ref` (block_q, D), float32, which holds *anything* at the start.
#
# `band.hide(scores, i, j, queries=0)` hides what query block i must not see of key block j. Guard $\log 0$ and $0/0$
# of a query that sees nothing with a least total of 1e-30.

# %% id="attention.forward_kernel" level=3 library="nanochat_lib.kernels.flash:forward_kernel" minutes=30 nbgrader={"cell_type": "code", "grade": false, "grade_id": "attention-forward_kernel", "locked": false, "schema_version": 3, "solution": true, "task": false} points=5 tags=["exercise"]
def forward_kernel(steps, q_ref, k_ref, v_ref, y_ref, lse_ref, m_ref, l_ref, acc_ref, *, band, scale):
    """q (block_q, D) against k and v (block_kv, D); grid (B, K, G, steps)."""
    # begin where steps[FIRST, step] is 1; always absorb the block; write where steps[LAST, step] is 1
    raise NotImplementedError


# %% id="attention.forward_kernel.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "attention-forward_kernel-check", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
check("attention.forward_kernel", forward_kernel)

# %% id="attention.forward_kernel.use"
forward_kernel = mine("attention.forward_kernel")
q, k, v, dy = (random.standard_normal((1, 1, 24, 3)).astype(np.float32) for _ in range(4))
y, lse = run_forward(forward_kernel, q[:, :, None], k, v, Band(24, 24, 10, 4, 6, interpret=True))
formula = jax.jit(partial(attention, window=10, backend="reference"))
print(
    "your kernel against the formula, below 1e-5:", bool(np.abs(np.asarray(y)[:, :, 0] - formula(q, k, v)).max() < 1e-5)
)

# %% [markdown] id="backward-title"
# ### Backward, without the weights
#
# The gradient needs every weight again, and they were never stored. That is no loss: with the kept lse a weight is one
# exponential, $p = e^{s - \text{lse}}$, and computing it takes less time than loading it would. With $dy$, the gradient
# of the output:
#
# $$ dp = dy\,v^T \qquad ds = p\,(dp - \delta), \quad \delta = \sum_d dy\,y \qquad dq = ds\,k/\sqrt D \qquad
# dk = ds^T q/\sqrt D \qquad dv = p^T dy $$

# %% id="delta-quiz"
quiz("attention.q_delta")


# %% [markdown] id="gradients-look"
# Write what both backward kernels share: $p^T$ and $ds^T$ of one tile. Keys stand first, so that lse and delta,
# which are stored as rows (1, block_q), fit without being turned around.

# %% id="attention.weights_and_score_gradients" level=3 library="nanochat_lib.kernels.flash:weights_and_score_gradients" minutes=25 nbgrader={"cell_type": "code", "grade": false, "grade_id": "attention-weights_and_score_gradients", "locked": false, "schema_version": 3, "solution": true, "task": false} points=4 tags=["exercise"]
def weights_and_score_gradients(band, scale, i, j, q, k, v, dy, lse, delta):
    """(pᵀ, dsᵀ), each (block_kv, block_q).

    i, j: numbers of the query and the key block. q, dy: (block_q, D). k, v: (block_kv, D). lse, delta: (1, block_q).
    """
    raise NotImplementedError


# %% id="attention.weights_and_score_gradients.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "attention-weights_and_score_gradients-check", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check("attention.weights_and_score_gradients", weights_and_score_gradients)

# %% [markdown] id="backward-use-look"
# With it a whole backward pass is a walk over tiles, here in plain JAX. JAX's own derivative of the formula is the
# judge. Then the three Pallas kernels of the library in interpret mode, gradients included.

# %% id="attention.weights_and_score_gradients.use"
weights_and_score_gradients = mine("attention.weights_and_score_gradients")


def tiled_gradients(q, k, v, dy, lse, delta, band):
    """(dq, dk, dv) of one head, tile by tile; all (T, D), lse and delta (1, T)."""
    dq, dk, dv, scale = np.zeros_like(q), np.zeros_like(k), np.zeros_like(v), q.shape[1] ** -0.5
    seen = visible_blocks(band.tq, band.tk, band.window, band.block_q, band.block_kv)
    for i, j, _, _ in schedule(seen, QUERY).T.tolist():
        a, b = slice(i * band.block_q, (i + 1) * band.block_q), slice(j * band.block_kv, (j + 1) * band.block_kv)
        p, ds = weights_and_score_gradients(band, scale, i, j, q[a], k[b], v[b], dy[a], lse[:, a], delta[:, a])
        p, ds = np.asarray(p), np.asarray(ds)
        dq[a] += scale * ds.T @ k[b]
        dk[b] += scale * ds @ q[a]
        dv[b] += p @ dy[a]
    return dq, dk, dv


@jax.jit
def true_gradients(q, k, v, dy):
    """JAX's derivative of the formula."""
    return jax.vjp(formula, q, k, v)[1](dy)


delta = (dy[0, 0] * np.asarray(y)[0, 0, 0]).sum(axis=1)[None]
one_head = (q[0, 0], k[0, 0], v[0, 0], dy[0, 0], np.asarray(lse)[0, 0, 0], delta)
ours = tiled_gradients(*one_head, Band(24, 24, 10, 4, 6))
truth = true_gradients(q, k, v, dy)
for name, got, want in zip(("dq", "dk", "dv"), ours, truth, strict=True):
    print(f"{name}: below 1e-4 of JAX's derivative: {bool(np.abs(got - np.asarray(want)[0, 0]).max() < 1e-4)}")

# %% id="backward-library"
if not fast():
    kernel = partial(flash_attention, window=10, block_q=8, block_kv=8, interpret=True)
    pulled = jax.jit(lambda q, k, v, dy: jax.vjp(kernel, q, k, v)[1](dy))(q, k, v, dy)
    worst = max(float(jnp.abs(a - b).max()) for a, b in zip(pulled, truth, strict=True))
    print("the library's three kernels, below 1e-4:", worst < 1e-4)

# %% [markdown] id="chip-title"
# ## 8. Tiles and the chip
#
# The result does not depend on the tiles; the time does. Four things pull:
#
# 1. **Copies.** A block of keys that is loaded meets $b_q$ queries. Larger tiles, fewer bytes.
# 2. **Steps.** Beginning one costs time, about as much as 200,000 scores (fitted to public measurements on a v6e;
#    `nanochat_lib/kernels/tiles.py` says how well that is known). Larger tiles, fewer steps.
# 3. **The edge.** A tile that the mask cuts is computed whole. Larger tiles, more waste.
# 4. **VMEM.** Blocks for this step and the next, scratch, and the tile's scores must fit. Larger tiles, not at all.
#
# First the title's question: how much more does the kernel move with tiles of 128 than with 512?

# %% id="tile-predict"
predict("attention.p_tile")

# %% id="tile-count"


def useful_flops(window, rows=2, heads=6, d=256, t=2048):
    """FLOPs of the forward pass on the scores that are really visible."""
    return 4 * d * rows * heads * sum(min(p, window) + 1 for p in range(t))


costs = {tile: cost(calls_of(6, 6, 256, 2048, tile, 2)[0], V6E) for tile in (128, 256, 512, 1024)}
print("tile  steps  MB moved  GFLOP  spent  memory  products  at least  FLOPs/byte")
for tile, c in costs.items():
    print(
        f"{tile:4} {c.steps:6} {c.hbm_bytes / 1e6:9.1f} {c.flops / 1e9:6.1f} {c.padded_flops / 1e9:6.1f} "
        f"{c.memory_s * 1e6:5.0f} µs {c.compute_s * 1e6:6.0f} µs {c.seconds * 1e6:6.0f} µs {c.intensity:8.0f}"
    )
reveal("attention.p_tile", costs[128].hbm_bytes / costs[512].hbm_bytes)
_ = about(costs[128].seconds * 1e6, 145, 1, name="tiles of 128, µs at least")
_ = about(costs[1024].seconds * 1e6, 42, 1, name="tiles of 1024, µs at least")

# %% [markdown] id="tile-explain" tags=["slide"]
# That is the answer to the question at the top. Tiles of 128 compute the fewest scores, since they follow the diagonal
# most closely, but they read keys and values 8.5 times over. At 115 FLOPs a byte, with a ridge of 560, three quarters
# of the time the matrix unit waits. And 128 × 128 products fill only half of a 256 × 256 unit: see "spent".
#
# > A flash kernel's intensity is its block of queries. **Take tiles about as tall as the chip's ridge**: 560 FLOPs a
# > byte on a v6e, so 512 or 1024.
#
# Now move it yourself. The step slider runs through the grid; the score is the time no kernel can beat (every array
# moved once, only visible scores computed) as a share of this kernel's time at the roofline. One tile scores
# 100 with a window of 512. Which, and why is it not the best one with 2048?

# %% id="widget"


def view(kernel, tile, window, key_heads, step):
    """The kernel at one step; 6 query heads of 256, two sequences of 2048."""
    call = calls_of(6, key_heads, 256, window, tile, 2)[("forward", "dq", "dk and dv").index(kernel)]
    return draw_step(call, step, V6E, useful_flops(window) * len(call.products) / 2)


explore(
    view,
    alt="Blocks of q, k, v and y at one step of the kernel, the copies of all steps, and its time against the roofline",
    kernel=choice(["forward", "dq", "dk and dv"], "forward"),
    tile=choice([128, 256, 512, 1024][:: 3 if fast() else 1], 1024),
    window=choice([512, 1024, 2048][:: 2 if fast() else 1], 2048),
    key_heads=choice([6, 2, 1][:: 2 if fast() else 1], 6),
    step=slider(0, 100, 4, 1),
)

# %% [markdown] id="sweep-look"
# With a window of 512 tiles of 512 load every key once, since the next query block begins with the key block that is
# still there; tiles of 1024 do too, but compute 1.7 times as much. With 2048 the copies decide, and 1024 saves two fifths.
#
# All tiles and windows in one figure, forward and backward, with a step's cost added. On a long window 1024 wins or
# ties; the shorter the window, the more a large tile wastes at its edges.

# %% id="sweep" tags=["slide"]
from nanochat_lib.kernels.tiles import STEP, tiles

STEP_SECONDS = STEP * 4 * 256 / V6E.peak["bfloat16"]  # the scores of one step, as time
tile_sizes, windows = (128, 256, 512, 1024), (512, 2048) if fast() else (512, 1024, 2048)
figure, axes = new_figure(1, len(windows), height=2.6, sharey=True)
best = {}
for ax, window in zip(axes, windows, strict=True):
    parts = [cost(calls_of(6, 6, 256, window, tile, 2), V6E) for tile in tile_sizes]
    bound, begin = np.array([c.seconds for c in parts]), np.array([c.steps * STEP_SECONDS for c in parts])
    names = [str(tile) for tile in tile_sizes]
    ax.bar(names, bound * 1e6, color=BLUE, label="roofline")
    ax.bar(names, begin * 1e6, bottom=bound * 1e6, color=ORANGE, label="beginning steps")
    floor = 3.5 * useful_flops(window) / V6E.peak["bfloat16"]
    ax.axhline(floor * 1e6, color=INK, linestyle="--", linewidth=1, label="useful products alone")
    ax.set(title=f"window {window}", xlabel="tile (tokens a side)")
    best[window] = tile_sizes[int(np.argmin(bound + begin))]
axes[0].set_ylabel("µs a layer")
axes[0].legend(fontsize=8)
show(
    figure,
    alt="Bar charts of time over tile size, one for each window; tiles of 128 are slowest everywhere",
)
for window in windows:
    print(f"window {window}: best here {best[window]}, the library takes {tiles('v6e', 256, 2048, window)}")

# %% [markdown] id="heads-look"
# ### Heads and the matrix unit
#
# A TPU multiplies on a square array: 128 × 128 up to v5p, 256 × 256 on v6e. The head size is the contracted side of
# $qk^T$ and the width of $pv$. Where it is contracted, a head of 128 leaves half of a 256-wide unit idle. Where it is the
# width, the compiler may let it stream through, and nothing is lost; count that way, the best case. Forward and backward
# are nine products in our three kernels, and five of them contract over the head.

# %% id="heads-predict"
predict("attention.p_heads")

# %% id="heads" tags=["slide"]
table = {}
for chip in (V5E, V6E):
    for heads, d in ((12, 128), (6, 256)):
        c = cost(calls_of(heads, heads, d, 2048, 512, 2), chip)
        table[chip.name, d] = c
        print(
            f"{chip.name}, {heads} heads of {d}: {c.flops / 1e9:.0f} GFLOP, {c.padded_flops / 1e9:.0f} are spent, "
            f"at least {c.seconds * 1e6:.0f} µs"
        )
ratio = table["v6e", 128].padded_flops / table["v6e", 128].flops
reveal("attention.p_heads", ratio)
_ = about(ratio, 1.556, 0.002, name="FLOPs spent for each useful one, heads of 128 on a v6e")

# %% [markdown] id="heads-explain"
# 14/9: five products cost twice, four once. (`preflight/attention_cost.py` counts twice for all, to be safe.)
# The parameters and the useful FLOPs are the same with 12 heads of 128 and with 6 of 256. A public port measured 15 to
# 17 % more tokens a second for the whole model with 6 heads of 256 on a v6e; the compiler's estimate for this library's
# step says 16 % (`docs/tpu-step.md`). On a v5e nothing is gained. That is why `tpu-v6e-8-d24` has heads of 256 and
# `tpu-v5e-8-d20` heads of 128.
#
# ### Ask the compiler of a chip you do not have
#
# The compiler for TPUs runs on any computer. It compiles a kernel for a v6e *ahead of time* and says whether it fits.
# It does not say how long a custom kernel takes; only a chip does. Below is a recorded page (one layer of 16 sequences,
# forward and backward, `scripts/record_attention.py`). With the extra `tpu` installed, one line is compiled anew.

# %% id="page"
page = json.loads((project_root() / "assets" / "attention_v6e.json").read_text(encoding="utf-8"))
print(f"recorded with jax {page['jax']}, libtpu {page['libtpu']}, for a {page['chip']}\n")
for name, line in page["lines"].items():
    words = line.get("error") or f"{line['kernels']} kernels, {line['temp_bytes'] / 2**20:7.0f} MiB of scratch in HBM"
    print(f"{name:34} {words}")

# %% id="page-live"
if find_spec("libtpu") and not fast():
    name = "tiles of 512, 6 heads of 256"
    script = project_root() / "scripts" / "record_attention.py"
    done = subprocess.run([sys.executable, str(script), "--print", name], capture_output=True, text=True, check=False)
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    print(f"compiled here, {name}: the same as recorded: {bool(found) and found[0][name] == page['lines'][name]}")
else:
    print("not compiled here: that needs the extra, pip install -e '.[tpu]', and a run that is not the fast one")

# %% id="page-numbers"
lines = page["lines"]
_ = about(lines["plain XLA, 6 heads of 256"]["temp_bytes"] / 2**30, 2.25, 0.05, name="GiB of scratch, plain XLA")
_ = about(lines["tiles of 512, 6 heads of 256"]["temp_bytes"] / 2**30, 0, 0.05, name="GiB of scratch, tiles of 512")

# %% [markdown] id="page-explain"
# Plain XLA asks for 2.25 GiB in one layer; the kernels keep their scores in VMEM and ask for nothing. Tiles of 2048 are
# refused before any chip is rented: 16 MiB of scores, as many of weights, and the compiler's limit is 32.

# %% id="tile-quiz"
quiz("attention.q_tile")

# %% [markdown] id="lesson-title"
# ## 9. Field lesson: two defaults that nobody looked at
#
# ### Tiles of 128
#
# JAX brings a good attention kernel for TPUs, *splash*. Its default tile is 128. In one public log
# of a v6e it was *slower than plain XLA* (8.8 against 14.5 % of the chip's peak for the whole model). Nothing is wrong
# then: no error, the same loss. A public port of nanochat found it by trying: tiles of 512, computed in halves of 256,
# took a model from 22.4 to 41.2 % of peak. The count below, forward and
# backward of one layer, costs nothing and needs no chip.

# %% id="lesson-tiles"
lesson = {tile: cost(calls_of(12, 12, 128, 2048, tile, 2), V6E) for tile in (128, 512)}
for tile, c in lesson.items():
    print(
        f"tiles of {tile}: {c.steps} steps, {c.hbm_bytes / 1e6:.0f} MB, {c.intensity:.0f} FLOPs a byte, "
        f"at least {c.seconds * 1e6:.0f} µs"
    )
_ = about(lesson[128].steps / lesson[512].steps, 13.6, 0.05, name="times the steps")
_ = about(lesson[128].hbm_bytes / lesson[512].hbm_bytes, 2.65, 0.05, name="times the bytes")

# %% [markdown] id="lesson-window-look"
# ### One key too few
#
# The same port trained with windows of $w$ keys before the query, $w+1$ in all. Its decoder, which writes answers one
# token at a time, kept $w$. nanochat had the same slip in a fallback of its own. And the port had a script that
# compared its kernel with the formula; but it never handed the window to the kernel, so windows were never tested.
#
# Here is the slip, and the comparison at three lengths.

# %% id="lesson-window"


@partial(jax.jit, static_argnums=3)
def trained(q, k, v, window):
    """The window of the training run."""
    return attention(q, k, v, window=window, backend="reference")


def decode_one_short(q, k, v, window):
    """The slip: the mask of a cache that keeps `window` keys, the query's own included."""
    return trained(q, k, v, window - 1)


w = 16
q, k, v = (np.random.default_rng(i).standard_normal((1, 1, 4 * w, 8)).astype(np.float32) for i in range(3))
off = np.abs(np.asarray(trained(q, k, v, w)) - np.asarray(decode_one_short(q, k, v, w))).max(axis=(0, 1, 3))
for t in (w, w + 1, 4 * w):  # causal: the first t rows are those of a text of t tokens
    print(f"length {t}: largest difference {off[:t].max():.3f}")

# %% [markdown] id="lesson-window-explain"
# Up to length $w$ the two agree, so every short test passes; at $w+1$ exactly one query is wrong. A test of windows
# must use lengths $w$, $w+1$ and more. Better still, look at *which* keys are read: with the identity as values, the
# output is the weights.

# %% id="lesson-identity" tags=["slide"]
t = w + 4
q, k = (np.random.default_rng(i).standard_normal((1, 1, t, t)).astype(np.float32) for i in range(2))
identity = np.eye(t, dtype=np.float32)[None, None]
read = {
    "trained": np.asarray(trained(q, k, identity, w))[0, 0] > 0,
    "decoded": np.asarray(decode_one_short(q, k, identity, w))[0, 0] > 0,
}
figure, axes = new_figure(1, 2, height=2.7)
for ax, (name, mask) in zip(axes, read.items(), strict=True):
    lost = read["trained"] & ~mask
    ax.pcolormesh(mask + 2.0 * lost, cmap="YlOrRd", vmin=0, vmax=2.6, edgecolors="white", linewidth=0.6)
    ax.invert_yaxis()
    ax.set_aspect("equal")
    ax.set(title=f"{name}: last query reads {int(mask[-1].sum())} keys", xlabel="keys", ylabel="queries")
show(figure, alt="Two maps of keys that are read; in the second a diagonal of keys at distance w is missing")
_ = about(read["trained"][-1].sum(), 17, 0.5, name="keys of the last query, trained")
_ = about(read["decoded"][-1].sum(), 16, 0.5, name="keys of the last query, decoded")

# %% [markdown] id="lesson-cost-look"
# The cost by count, for the model of this course's large preset: each of its short layers loses one key for every token
# after the first window. It is 0.1 % of what a query reads there, no short test complains and no loss curve shows it,
# yet every long answer is written by a model that was never trained.

# %% id="lesson-cost" tags=["slide"]
model = preset("tpu-v6e-8-d24").gpt_config()
short = [window for window in model.windows if window < model.sequence_len]
tokens = model.sequence_len - min(short)  # of a full context: those with a key at distance `window`
print(f"{len(short)} of {model.n_layer} layers have a window of {min(short)}")
print(f"{tokens} of {model.sequence_len} tokens are computed with one key less in each of them")
lost = len(short) * model.n_head * tokens
_ = about(lost, 110_592, 1, name="weights that are missing in one full context")

# %% [markdown] id="takeaway" tags=["slide"]
# > **Takeaway.** Attention is bound by memory until its scores stay on the chip. Three running numbers for each query
# > make softmax a loop over tiles; one number, lse, makes the backward pass another. The intensity of such a kernel is
# > its **block of queries**: take it about as tall as the chip's ridge (512 or 1024 on a v6e, never the default 128),
# > heads as wide as the matrix unit, and walk only along tiles that someone sees. And test a window at lengths $w$,
# > $w+1$ and more, by looking at which keys are read.

# %% [markdown] id="simplified"
# ## What was simplified, and where the real code is
#
# - The kernels you wrote are the library's, line by line: `nanochat_lib/kernels/flash.py` (`forward_kernel`,
#   `dq_kernel`, `dkv_kernel`, `launch`). On a TPU the default is JAX's splash kernel with this library's tiles
#   (`kernels/splash.py`, `kernels/tiles.py`), which makes all gradients in one kernel; ours is `backend="pallas"`.
# - nanochat itself runs FlashAttention 3 on Hopper GPUs and falls back to PyTorch's own attention elsewhere. Here GPUs
#   take cuDNN (`kernels/cudnn.py`) and CPUs the tiled version (`kernels/tiled.py`); `attention.choose_backend` decides.
# - A real kernel's time has more parts than the roofline: how long a copy takes to begin, exponentials on the vector
#   unit, registers that spill. The counts here are exact, the microseconds are floors, and nothing was run on a TPU.
# - Tiles in parts (`block_kv_compute`: 512 keys are loaded, 256 computed at a time) are in splash only.
