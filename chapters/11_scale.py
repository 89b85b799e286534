# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] id="title"
# # Scale and cost
#
# On January 7, 2026 nanochat's author laid a curve through eleven small runs and read from it what it would take to
# match GPT-2: depth 38, 22.7 hours, 546 dollars. He called it a long extrapolation himself. On January 29 a depth of 24 did
# it, in 3 hours, for 73 dollars. **What may you ask of a curve through small runs, and what will a run cost that has to be
# paid for?**
#
# After this chapter you can
#
# - derive a whole run from one number, its depth;
# - fit a scaling law with a floor, and say how far it may be trusted;
# - plan a run for a budget: chips, hours, spot or not, price, and how often to save;
# - simulate machines that are hard to get and are taken away, and find the cheapest way through;
# - tell five expensive incidents from their logs, and name the guard that prevents each;
# - take a published recipe apart into what was measured and what was only believed.
#
# Seven exercises, about 115 minutes; with the reading some 160 minutes. You train eleven small models, for which two
# cores are enough.

# %% id="setup" tags=["setup"]
import math
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.flatten_util import ravel_pytree
from matplotlib.ticker import FuncFormatter, NullFormatter

from nanochat_lib.budget import HOUR, Cost, mtbf_bounds, plan, uninterrupted
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
    progress,
    quiz,
    reveal,
    show,
    slider,
    undo,
    volatile,
)  # fmt: skip
from nanochat_lib.errors import UserError
from nanochat_lib.hardware import CHIPS
from nanochat_lib.presets import override, preset
from nanochat_lib.report.plots import BLUE, FAINT, GREEN, ORANGE, PURPLE, RED, SKY, new_figure
from nanochat_lib.scaling import EXPONENTS, PowerLaw, band
from nanochat_lib.sizing import REFERENCE_BATCH, count_params, flops_per_token, scaling_params


def label(ax, title, x="", y="", legend=False):
    """Title, axes and legend in the course's style."""
    ax.set_title(title, loc="left", fontsize=10, fontweight="bold")
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    for axis, scale in ((ax.xaxis, ax.get_xscale()), (ax.yaxis, ax.get_yscale())):
        if scale == "log":
            axis.set_minor_formatter(NullFormatter())
    if x == "training FLOPs":
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"1e{math.log10(value):.0f}"))
    if legend:
        ax.legend(frameon=False, fontsize=8)


# %% [markdown] id="depth-look"
# ## 1. Depth to everything
#
# nanochat has one dial. With $d$ layers, heads of 128 and $r$ tokens for each *scaling parameter* (the blocks'
# matrices and the output head, $P$):
#
# $$ C = 64\,d, \qquad D = r\,P, \qquad B = 2^{\mathrm{round}\left(\log_2\left(2^{19}\,(D/D_{12})^{0.383}\right)\right)},
# \qquad \text{steps} = \lfloor D/B \rfloor, $$
#
# and rates and decay follow from $B$ and $D$ as in chapter 05. $P$ grows about as $d^3$: $d$ layers of $12\,C^2$. The
# FLOPs, $6\,P$ a token times $r\,P$ tokens, grow about as its square. So: twice the depth, how much more work?

# %% id="depth-predict"
predict("scale.p_depth")


# %% [markdown] id="batch-look"
# ### Exercise: the batch
#
# The exponent 0.383 was measured by others ("Power Lines", Bergsma et al., arXiv:2505.13738). Everything is relative
# to a d12, the reference, which takes $2^{19}$ tokens a step.

# %% id="scale.batch_for" level=1 library="nanochat_lib.sizing:batch_for" minutes=10 nbgrader={"cell_type": "code", "grade": false, "grade_id": "scale-batch_for", "locked": false, "schema_version": 3, "solution": true, "task": false} points=1 tags=["exercise"]
def batch_for(tokens: float, reference_tokens: float) -> int:
    """Tokens an optimiser step of a run of `tokens`: a power of two.

    The reference run, REFERENCE_BATCH = 2^19 tokens a step, has `reference_tokens`; from there the batch grows as
    tokens^0.383, to the nearest power of two in the logarithm.
    """
    raise NotImplementedError


# %% id="scale.batch_for.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "scale-batch_for-check", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
check("scale.batch_for", batch_for)

# %% id="depths"
batch_for = mine("scale.batch_for")
H100, V6E, B200 = (next(chip for chip in CHIPS if chip.name == name) for name in ("h100", "v6e", "b200"))


def run_of(depth, ratio=12.0):
    """The settings of a run of nanochat's family."""
    return override(preset("gpu-8-d24"), {"model.depth": str(depth), "pretrain.ratio": str(ratio)})


def flops_of(config):
    """Training FLOPs of a whole run."""
    horizon = config.horizon()
    return flops_per_token(config.gpt_config()) * horizon.steps * horizon.batch_tokens


DEPTHS = (4, 8, 12, 16, 20, 24, 28, 32)
REFERENCE_TOKENS = 12 * scaling_params(run_of(12).gpt_config())
print("depth  width   parameters    tokens    a step   steps    FLOPs")
sizes = {}
for depth in DEPTHS:
    config = run_of(depth)
    model, horizon = config.gpt_config(), config.horizon()
    batch = batch_for(horizon.tokens, REFERENCE_TOKENS)
    sizes[depth] = (count_params(model)["total"], scaling_params(model), horizon.tokens, flops_of(config))
    print(
        f"{depth:>5} {model.n_embd:>6} {sizes[depth][0] / 1e6:>9.0f} M {horizon.tokens / 1e9:>7.2f} B {batch:>9,} "
        f"{horizon.tokens // batch:>7,} {sizes[depth][3]:>8.2g}"
    )
reveal("scale.p_depth", round(sizes[24][3] / sizes[12][3], 1))
_ = about(sizes[24][3] / sizes[12][3], 41.7, 0.1, "times the FLOPs at twice the depth")

# %% id="depths-figure" tags=["slide"]
fig, ax = new_figure(height=2.7, width=5.6)
lines = (("parameters", ORANGE, "s", 0), ("tokens (and scaling parameters)", GREEN, "D", 2), ("FLOPs", BLUE, "o", 3))
for name, colour, marker, column in lines:
    values = [sizes[depth][column] / sizes[12][column] for depth in DEPTHS]
    slope = math.log2(values[5] / values[2])  # depth 24 beside 12
    ax.plot(DEPTHS, values, color=colour, marker=marker, markersize=4, label=f"{name}, about depth^{slope:.1f}")
ax.set_xscale("log")
ax.set_yscale("log")
ax.set_xticks(DEPTHS, DEPTHS)
ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
label(ax, "Everything follows from depth", "depth", "times the d12", legend=True)
show(
    fig,
    alt="Parameters, tokens and FLOPs against depth, both axes logarithmic: nearly straight lines, that of the FLOPs by far the steepest.",
)

# %% [markdown] id="depth-explain"
# Not 64 times, because the output head and the attention do not grow as fast as the matrices. Nobody tries things out
# at d32. You try them at d12, where a run costs a two-hundredth, and hope that a law carries you up. Let us make such
# a law.

# %% [markdown] id="family-look"
# ## 2. Small runs
#
# Your laptop has its own miniseries: depths 2 to 5, width $8\,d$, heads of 8, 4 tokens for each scaling parameter. A
# token is a byte here, the text is the documentation of Python and its library. The network has what matters of
# nanochat: rotary positions, normalised queries and keys, relu², a soft cap. The optimiser is plain Adam, its
# rate warmed up and warmed down.
#
# The layers are a `scan`, so that depth costs no compile time. The same compiled program evaluates: with a rate of
# zero a training step is a measurement.

# %% id="family"
from nanochat_lib.primer.real_text import language_reference, real_text

CONTEXT, ROWS, CHUNK, HEAD = 64, 8, 20, 8
angles = np.arange(CONTEXT)[:, None, None] * 10000.0 ** (-np.arange(HEAD // 2) / (HEAD // 2))
COS, SIN, PAST = np.float32(np.cos(angles)), np.float32(np.sin(angles)), np.tril(np.ones((CONTEXT, CONTEXT), bool))


def fresh(depth, seed):
    """New parameters: one flat vector, and how to cut it into arrays again."""
    width, rng = 8 * depth, np.random.default_rng(seed)
    uniform = lambda *shape: rng.uniform(-1, 1, shape) * (3 / width) ** 0.5  # noqa: E731
    params = {
        "embedding": 0.8 * rng.standard_normal((256, width)),
        "head": 0.001 * rng.standard_normal((256, width)),
        "qkv": uniform(depth, width, 3 * width),
        "out": np.zeros((depth, width, width)),
        "up": 0.4 * uniform(depth, width, 4 * width),
        "down": np.zeros((depth, 4 * width, width)),
    }
    return ravel_pytree(jax.tree.map(np.float32, params))


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def turn(x):
    """Rotary positions of x (B, T, H, D)."""
    a, b = jnp.split(x, 2, -1)
    return jnp.concatenate([a * COS + b * SIN, b * COS - a * SIN], -1)


def loss_fn(params, rows):
    """Mean nats a byte of rows (B, T + 1)."""
    x = norm(params["embedding"][rows[:, :-1]])
    heads = (*x.shape[:2], x.shape[2] // HEAD, 3 * HEAD)

    def layer(x, p):
        q, k, v = jnp.split((norm(x) @ p["qkv"]).reshape(heads), 3, -1)
        scores = jnp.einsum("bqhd,bkhd->bhqk", norm(turn(q)), norm(turn(k)))
        seen = jax.nn.softmax(jnp.where(PAST, scores, -1e9), -1)
        x = x + jnp.einsum("bhqk,bkhd->bqhd", seen, v).reshape(x.shape) @ p["out"]
        return x + jnp.square(jax.nn.relu(norm(x) @ p["up"])) @ p["down"], None

    x, _ = jax.lax.scan(layer, x, {name: params[name] for name in ("qkv", "out", "up", "down")})
    logits = 15 * jnp.tanh(norm(x) @ params["head"].T / 15)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, rows[:, 1:, None], -1)[..., 0])


# %% id="program"
def program(depth):
    """CHUNK compiled training steps of that depth: (state, rows (CHUNK, B, T + 1), rates) -> (state, losses)."""
    flat, cut = fresh(depth, 0)

    def step(state, data):
        params, first, second = state
        batch, rate = data
        loss, g = jax.value_and_grad(lambda flat: loss_fn(cut(flat), batch))(params)
        first, second = 0.9 * first + 0.1 * g, 0.95 * second + 0.05 * g * g
        return (params - rate * first / (jnp.sqrt(second) + 1e-8), first, second), loss

    many = jax.jit(lambda state, rows, rates: jax.lax.scan(step, state, (rows, rates)))
    rows = np.zeros((CHUNK, ROWS, CONTEXT + 1), np.int32)
    lowered = many.lower((flat, flat, flat), rows, np.zeros(CHUNK, np.float32))
    return lowered.compile({"xla_backend_optimization_level": 1})  # half the compile time, the same speed


def rows_of(pages):
    """The pages as rows of bytes (n, T + 1), shuffled."""
    text = np.frombuffer("\n\n".join(pages).encode("ascii", "ignore"), np.uint8)
    rows = text[: len(text) // (CONTEXT + 1) * (CONTEXT + 1)].reshape(-1, CONTEXT + 1).astype(np.int32)
    return rows[np.random.default_rng(0).permutation(len(rows))]


def matrices(depth):
    """Scaling parameters of the small family."""
    width = 8 * depth
    return 12 * depth * width**2 + 256 * width


def train(run, depth, seed, steps, rows, looks=1):
    """{"flops", "bpb" (held out, at the end), "curve" (training, a number a step), "held" [(step, bpb)]}."""
    flat, _ = fresh(depth, seed)
    state, curve, held = (jnp.asarray(flat), jnp.zeros_like(flat), jnp.zeros_like(flat)), [], []
    at = np.arange(steps)
    decline = np.minimum(1, (steps - at) / (0.65 * steps) * 0.95 + 0.05)
    rates = np.float32(0.01 * (64 / (8 * depth)) ** 0.5 * np.minimum((at + 1) / 20, 1) * decline)
    for start in range(0, steps, CHUNK):
        picked = np.arange(start * ROWS, (start + CHUNK) * ROWS) % len(rows)
        batch = rows[picked].reshape(CHUNK, ROWS, -1)
        state, losses = run(state, batch, rates[start : start + CHUNK])
        curve += (np.asarray(losses) / math.log(2)).tolist()
        done = start + CHUNK
        if done == steps or done * looks // steps > start * looks // steps:
            _, losses = run(state, held_out.reshape(CHUNK, ROWS, -1), np.zeros(CHUNK, np.float32))
            held.append((done, float(np.mean(losses)) / math.log(2)))
    tokens = steps * ROWS * CONTEXT
    flops = (6 * matrices(depth) + 12 * depth * 8 * depth * CONTEXT) * tokens
    return {"depth": depth, "flops": flops, "tokens": tokens, "bpb": held[-1][1], "curve": curve, "held": held}


# %% id="small-runs"
if fast():
    everything = rows_of(language_reference())
    held_out, pages = everything[: CHUNK * ROWS], everything[CHUNK * ROWS :]
    WANTED, NEXT = [(2, 0, 20), (2, 1, 20), (2, 0, 40), (2, 1, 60)], (2, 0, 80)
else:
    text = real_text()
    held_out, pages = rows_of(text.val)[: CHUNK * ROWS], rows_of(text.train)
    length = lambda depth: 4 * matrices(depth) // (ROWS * CONTEXT) // CHUNK * CHUNK  # noqa: E731
    WANTED = [(depth, seed, length(depth)) for depth, seeds in ((2, 3), (3, 3), (4, 2)) for seed in range(seeds)]
    NEXT = (5, 0, length(5))
programs = {depth: program(depth) for depth in sorted({depth for depth, _, _ in WANTED})}
small = [train(programs[depth], depth, seed, steps, pages) for depth, seed, steps in WANTED]
for found in small:
    print(
        f"depth {found['depth']}: {found['tokens']:>7,} bytes, {found['flops']:.2g} FLOPs, {found['bpb']:.2f} bits per byte"
    )
if not fast():
    for depth, expected in ((2, 4.56), (3, 3.98), (4, 3.50)):
        mean = np.mean([found["bpb"] for found in small if found["depth"] == depth])
        _ = about(mean, expected, 0.15, f"bits per byte at depth {depth}, mean of its seeds")

# %% id="small-figure" tags=["slide"]
fig, ax = new_figure(height=2.7, width=5.8)
shades = {2: SKY, 3: BLUE, 4: PURPLE}
for found in small:
    curve = np.array(found["curve"])
    smooth = np.convolve(curve, np.ones(10) / 10, "valid")
    spent = found["flops"] * (np.arange(len(smooth)) + 10) / len(curve)
    ax.plot(spent, smooth, color=shades[found["depth"]], linewidth=1, alpha=0.8)
    ax.plot(found["flops"], found["bpb"], "o", color=shades[found["depth"]], markersize=5)
for depth in sorted(programs):
    ax.plot([], [], "o-", color=shades[depth], label=f"depth {depth}")
ax.set_xscale("log")
label(ax, "Small runs, each to the end of its schedule", "training FLOPs", "bits per byte", legend=True)
show(fig, alt="Training curves of eight small runs against FLOPs; their held-out ends lie along a falling line.")


# %% [markdown] id="small-explain"
# Only the *ends* belong to a law. A run that is stopped half-way still has its high learning rate and lies above what
# a run planned for that length reaches. This is why earlier laws were wrong (Hoffmann et al., arXiv:2203.15556). And seeds of one size differ: that is the noise any claim has to beat.

# %% [markdown] id="fit-look"
# ## 3. A law through the points
#
# $$ L(x) = E + A\,x^{-\alpha} $$
#
# $E$, the **floor**, is what no amount of compute removes: the text's own surprise. With $\alpha$ fixed, $L$ is a
# straight line in the number $x^{-\alpha}$, and a line is fitted in closed form. So try many $\alpha$, and keep the
# best.
#
# ### Exercise: fit
#
# Least squares for a line $y = E + s\,p$: $s = \sum (p-\bar p)\,y / \sum (p-\bar p)^2$, $E = \bar y - s\,\bar p$. If
# $E$ comes out negative, the best admissible law is the one with $E = 0$, and $s = \sum p\,y / \sum p^2$.

# %% id="scale.fit_power_law" level=3 library="nanochat_lib.scaling:fit_power_law" minutes=25 nbgrader={"cell_type": "code", "grade": false, "grade_id": "scale-fit_power_law", "locked": false, "schema_version": 3, "solution": true, "task": false} points=4 tags=["exercise"]
def fit_power_law(x: np.ndarray, y: np.ndarray, exponents: np.ndarray = EXPONENTS) -> PowerLaw:
    """PowerLaw(floor, scale, exponent) with the least sum of squared errors in y among `exponents` (E,).

    x, y (n,), x positive and three of them different, else a UserError. The floor is not negative: where the best line
    asks for that, the best law without a floor stands in. `scale` is what stands above the floor at x = 1. Use x divided
    by its smallest, or the powers of 10^18 lose their digits.
    """
    raise NotImplementedError


# %% id="scale.fit_power_law.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "scale-fit_power_law-check", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check("scale.fit_power_law", fit_power_law)

# %% [markdown] id="next-look"
# Now an honest test. The law has seen depths 2, 3 and 4. What will depth 5 reach, with more than three times the
# FLOPs of anything it has seen? Write your guess down; then the law's; then train it.

# %% id="next-predict"
predict("scale.p_next")

# %% id="next"
fit_power_law = mine("scale.fit_power_law")
x, y = (np.array([found[key] for found in small], float) for key in ("flops", "bpb"))
law = fit_power_law(x, y)
depth, seed, steps = NEXT
run = programs.get(depth) or program(depth)
following = train(run, depth, seed, steps, pages)
reveal("scale.p_next", round(following["bpb"], 2))
expected = float(law(following["flops"]))
print(
    f"the law: floor {law.floor:.2f}, exponent {law.exponent:.3f}; it expects {expected:.2f}, the run has {following['bpb']:.2f}"
)
if not fast():
    about(following["bpb"], 3.09, 0.15, "bits per byte of the depth-5 run")
    _ = about(expected - following["bpb"], 0.12, 0.1, "by which the law expected more")


# %% [markdown] id="bootstrap-look"
# How wrong may it be? Ask the errors of the fit. The **bootstrap** (Efron and Tibshirani, 1993) makes worlds that
# might have happened: the fitted values plus errors drawn, with replacement, from those that occurred. Fit each of
# them. The spread of the laws is the uncertainty, as far as noise goes.
#
# ### Exercise: bootstrap
#
# One correction: three numbers were fitted to $n$ points, so the errors that are left are too small. Stretch them by
# $\sqrt{n/(n-3)}$.

# %% id="scale.bootstrap" level=2 library="nanochat_lib.scaling:bootstrap" minutes=15 nbgrader={"cell_type": "code", "grade": false, "grade_id": "scale-bootstrap", "locked": false, "schema_version": 3, "solution": true, "task": false} points=3 tags=["exercise"]
def bootstrap(x: np.ndarray, y: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """(draws, 3): floor, scale and exponent of laws fitted to the same x with y drawn anew.

    Each draw adds to the fitted values n residuals of the fit, drawn with replacement by its `choice` (one generator,
    made from `seed`) and stretched by √(n / (n - 3)). With n below 4 there is nothing to draw: a UserError.
    """
    raise NotImplementedError


# %% id="scale.bootstrap.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "scale-bootstrap-check", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("scale.bootstrap", bootstrap)

# %% id="growing" tags=["slide"]
bootstrap = mine("scale.bootstrap")
DRAWS = 60 if fast() else 400
low, high = band(bootstrap(x, y, DRAWS, 0), np.array([following["flops"]]))
print(
    f"80 % of the laws through the first runs expect {low[0]:.2f} to {high[0]:.2f}; depth 5 has {following['bpb']:.2f}"
)

# %% [markdown] id="growing-look"
# In full mode the run lies *below* the band: better than four laws in five allow. The law was off by 4 % and did not
# know it. A band holds the noise of the points, not a wrong form. Look at the small runs again: 80 steps at depth 2,
# and its curves have only just left the plateau, where a model knows how frequent each byte is and no more. Such
# points need not lie on the line of larger ones. Every law has a smallest size from which on it holds, and nobody
# tells you.
#
# Take that run into the fit, and go on to where the money is.

# %% id="far"
x, y = np.append(x, following["flops"]), np.append(y, following["bpb"])
law, laws = fit_power_law(x, y), bootstrap(x, y, DRAWS, 0)
targets = {"ten times more": 10 * x.max()} | {f"d{depth}": sizes[depth][3] for depth in (12, 24, 32)}
spans = {}
for name, flops in targets.items():
    low, high = (float(side[0]) for side in band(laws, np.array([flops])))
    spans[name] = (low, high)
    print(f"{name:>15} ({flops:.1e} FLOPs): {float(law(flops)):.2f}, 80 % of the laws between {low:.2f} and {high:.2f}")
if not fast():
    about(np.diff(spans["ten times more"])[0], 0.26, 0.2, "width of the band ten times beyond")
    about(np.diff(spans["d12"])[0], 1.1, 0.7, "width at a d12")
    _ = about(float(law(sizes[12][3])), 0.94, 0.7, "what the best law says of a d12")
floors = np.quantile(laws[:, 0], [0.1, 0.9])
print(f"the floor: 80 % of the laws between {floors[0]:.2f} and {floors[1]:.2f} bits per byte")

# %% id="law-figure" tags=["slide"]
JANUARY = (  # depth, million parameters, billion tokens, bits per byte, CORE: nanochat's miniseries of January 7, 2026
    (10, 91, 0.73, 1.0312, 0.0710), (11, 112, 0.89, 1.0096, 0.0918), (12, 135, 1.08, 0.9825, 0.1059),
    (13, 163, 1.30, 0.9644, 0.1015), (14, 194, 1.55, 0.9437, 0.1185), (15, 229, 1.83, 0.9257, 0.1158),
    (16, 268, 2.15, 0.9101, 0.1332), (17, 313, 2.50, 0.8952, 0.1518), (18, 362, 2.90, 0.8817, 0.1611),
    (19, 417, 3.33, 0.8687, 0.1659), (20, 477, 3.82, 0.8572, 0.1708),
)  # fmt: skip
spent = np.array([6 * millions * 1e6 * billions * 1e9 for _, millions, billions, _, _ in JANUARY])
measured = np.array([bpb for _, _, _, bpb, _ in JANUARY])

fig, ax = new_figure(height=3.2)
wide = np.geomspace(x.min() / 2, 1e21, 120)
for share, alpha in ((0.95, 0.15), (0.8, 0.25)):
    low, high = band(laws, wide, share)
    ax.fill_between(wide, low, high, color=BLUE, alpha=alpha, linewidth=0, label=f"{share:.0%} of the laws")
ax.plot(wide, law(wide), color=BLUE, label="best law")
ax.plot(x, y, "o", color=ORANGE, markersize=5, label="your runs")
ax.plot(spent, measured, "s", color=RED, markersize=3.5, label="nanochat, other text")
for depth in (12, 24, 32):
    ax.axvline(sizes[depth][3], color=FAINT, linewidth=0.8, linestyle=":")
    ax.text(sizes[depth][3], 5.05, f"d{depth}", ha="center", fontsize=8, color=FAINT)
ax.set_xscale("log")
ax.set_xticks(10.0 ** np.arange(9, 22, 2))
ax.set_ylim(0, 5)
label(ax, "", "training FLOPs", "bits per byte", legend=True)
show(
    fig,
    alt="The law through the laptop's runs goes on for nine decades; its band opens from a line to the range from under 1 to "
    "over 2 bits per byte. nanochat's runs lie inside of the band.",
)

# %% [markdown] id="law-explain"
# Look where nanochat's points lie: at the lower edge of the blue, next to the best law. Does a laptop predict a d12?

# %% id="q-band"
quiz("scale.q_band")

# %% [markdown] id="law-honest"
# **What a laptop's law can say.** That a run three times as large will be better, and by about how much: it was wrong
# by 4 %. **What it cannot say.** Where the floor is: runs between 4.6 and 3.1 bits per byte fit floors from 0 to
# nearly 2 equally well, and at a d24's FLOPs the floor is most of it. So of a d24 it says: between 0.6 and 2. Nor do
# the bands know all: they hold the noise of *these* points, given that the law has this form and the recipe stays the
# same. Eight decades beyond the data, form and recipe decide.

# %% [markdown] id="published-look"
# ## 4. A law on its own ground
#
# Give the law a better chance: nanochat's own eleven runs of January 7, one recipe, one text, depths 10 to 20 (FLOPs
# here: 6 × parameters × tokens). Fit the seven smallest, and ask for the other four.

# %% id="published" tags=["slide"]
small_law = fit_power_law(spent[:7], measured[:7])
for (depth, *_), flops, bpb in zip(JANUARY[7:], spent[7:], measured[7:], strict=True):
    print(f"d{depth}: expected {float(small_law(flops)):.4f}, measured {bpb:.4f}")
_ = about(np.abs(small_law(spent[7:]) - measured[7:]).max(), 0.0036, 0.001, "bits per byte, the largest miss")

# %% [markdown] id="published-explain"
# On its own ground, over less than one decade, a law is good to half a per cent. So the author went on to CORE, the
# score that counts, with the same form and no floor. His post gives $\mathrm{CORE} = 1 - 3.7555\,x^{-0.0344}$. It put
# GPT-2's 0.2565 at d38, 22.7 hours, 546 dollars. Two larger runs of his are public with FLOPs and score. Do they lie on it?

# %% id="core"
core = np.array([score for *_, score in JANUARY])
late = spent >= spent[2]  # d12 and larger, as in the published fit
published = PowerLaw(1.0, -3.7555, 0.0344)  # as CORE, not as its distance from 1
core_laws = bootstrap(spent[late], 1 - core[late], DRAWS, 1)
LARGER = (("d24, January 29, 2026", 4.33e19, 0.2585), ("d32, October 2025", 4.54e20, 0.3168))
for name, flops, score in LARGER:
    low, high = (1 - float(side[0]) for side in band(core_laws, np.array([flops]))[::-1])
    print(
        f"{name}: the published law says {float(published(flops)):.3f}, 80 % of ours {low:.3f} to {high:.3f}, measured {score:.4f}"
    )
_ = about(float(published(4.33e19)), 0.207, 0.002, "CORE of the published law at the FLOPs of the d24")
_ = about(
    (3.7555 / (1 - 0.256525)) ** (1 / 0.0344) / 4.33e19, 6, 2, "times the d24's FLOPs, where the law reaches GPT-2"
)

# %% id="core-figure" tags=["slide"]
fig, (left, right) = new_figure(1, 2, height=2.9)
left.plot(spent[:7], measured[:7], "o", color=BLUE, markersize=4, label="in the fit")
left.plot(spent[7:], measured[7:], "s", color=ORANGE, markersize=4, label="not in the fit")
wide = np.geomspace(spent[0], spent[-1], 50)
left.plot(wide, small_law(wide), color=BLUE)
low, high = band(bootstrap(spent[:7], measured[:7], DRAWS, 2), wide)
left.fill_between(wide, low, high, color=BLUE, alpha=0.25, linewidth=0)
wide = np.geomspace(spent[0], 1e21, 80)
low, high = band(core_laws, wide)
right.fill_between(wide, 1 - high, 1 - low, color=BLUE, alpha=0.25, linewidth=0)
right.plot(wide, published(wide), color=BLUE, label="published law")
right.plot(spent, core, "o", color=BLUE, markersize=3.5)
for (name, flops, score), colour in zip(LARGER, (RED, PURPLE), strict=True):
    right.plot(flops, score, "D", color=colour, markersize=6, label=name)
right.axhline(0.256525, color=FAINT, linestyle=":")
right.text(spent[0], 0.262, "GPT-2", fontsize=8, color=FAINT)
left.set_xscale("log")
right.set_xscale("log")
label(left, "Bits per byte, d10 to d20", "training FLOPs", legend=True)
right.set_xticks(10.0 ** np.arange(18, 22))
label(right, "CORE", "training FLOPs", legend=True)
show(
    fig,
    alt="Left: the law through seven runs meets the next four. Right: both larger runs lie clearly above the band of laws for "
    "CORE; the d24 reaches GPT-2's line where the law expects 0.21.",
)

# %% [markdown] id="core-explain"
# Both lie above the band. For the d24 one reason is known: between January 7 and January 29 the *recipe* changed (a
# better Muon, sliding windows, rows that begin at a document's start, value embeddings). The d32 is of the first
# recipe, with 20 tokens a parameter instead of 8, and lies above all the same. So over one and a half decades the
# form fails, too, or the ratio counts; the public figures do not tell which. A law through runs of one recipe says
# what a little more compute buys **that recipe**.
#
# Is it noise? CORE varies by about 0.006 from run to run, a tenth of the gap. And bits per byte cannot decide,
# because the new loader alone lowers them.
#
# At $10^{18}$ FLOPs nanochat's best run had 0.978 bits per byte on January 7 and 0.897 on January 27. So use laws to
# choose sizes and token ratios *within* a recipe, and compare recipes at the scale where they will be used.

# %% [markdown] id="price-look"
# ## 5. What it costs
#
# $$ \text{hours} = \frac{\text{FLOPs}}{\text{chips} \times \text{peak} \times \text{MFU} \times 3600}, \qquad
# \text{dollars} = \text{hours} \times \text{price}. $$
#
# The only uncertain factor is the MFU, so take a measured one: 24.5 % on a v6e-8 (the public port), 50 % on 8×H100
# (nanochat). `plan` in `nanochat_lib/budget.py` does the arithmetic. Does it meet the published bills?

# %% id="price"
ported = preset("tpu-v6e-8-d24-h128")
spot = plan(ported, V6E, 8, 0.2455, spot=True, save_seconds=0, setup_minutes=0)
dear = plan(ported, V6E, 8, 0.2455, save_seconds=0, setup_minutes=0)
_ = about(spot.work_hours, 5.28, 0.06, "hours of the port's d24 (measured: 5.28)")
_ = about(spot.usd, 22.8, 0.3, "dollars at the spot price (published: 22.8)")
_ = about(dear.usd, 114, 1.5, "dollars on demand (published: 114)")
_ = about(
    4.3308e19 / (8 * H100.peak["bfloat16"] * 10949), 0.50, 0.005, "MFU of nanochat's d24 of January 29, from its time"
)

# %% [markdown] id="price-rest"
# So much for pretraining's steps. The port's whole run took 12.2 hours instead of 5.3: 44 minutes for compiling and
# saving, the evaluations and SFT. And its spot machine was taken away once. That is the next question.
#
# ## 6. Machines that are taken away
#
# A **spot** machine costs a fifth (v6e, June 2026: 0.54 dollars a chip and hour instead of 2.70), and may be taken back at
# any minute. How often? The port says: once in its last 12.19 hours. What does one event tell about a rate?

# %% id="mtbf"
shortest, longest = mtbf_bounds(1, 12.19)
print(f"one failure in 12.19 hours: a failure every {shortest:.1f} to {longest:.0f} hours (90 %)")
_ = about(shortest, 2.57, 0.02, "hours, at the shortest")
shortest_of_none, _ = mtbf_bounds(0, 12.19)
print(f"none in 12.19 hours: every {shortest_of_none:.1f} hours or more rarely")


# %% [markdown] id="mtbf-explain"
# From 2.6 hours to ten days: one event says next to nothing. So plan with several values, and choose what is nearly
# right for all of them. In what follows a machine dies every **4 hours** on average, a pessimist's number.
#
# How often should one save? Each save costs $\delta$ seconds; each failure throws away half an interval $\tau$ on
# average, and comes every $M$ seconds. Per second of work that is
#
# $$ \frac{\delta}{\tau} + \frac{\tau}{2M}. $$
#
# ### Exercise: the interval
#
# Find the $\tau$ with the least cost (Young, 1974).

# %% id="scale.checkpoint_interval" level=1 library="nanochat_lib.budget:checkpoint_interval" minutes=8 nbgrader={"cell_type": "code", "grade": false, "grade_id": "scale-checkpoint_interval", "locked": false, "schema_version": 3, "solution": true, "task": false} points=1 tags=["exercise"]
def checkpoint_interval(save: float, mtbf: float) -> float:
    """Seconds of work between checkpoints that cost `save` seconds each, with a failure every `mtbf` seconds."""
    raise NotImplementedError


# %% id="scale.checkpoint_interval.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "scale-checkpoint_interval-check", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
check("scale.checkpoint_interval", checkpoint_interval)

# %% id="interval"
checkpoint_interval = mine("scale.checkpoint_interval")
SAVE, SETUP, MTBF, ASK, GRANTED = 120.0, 900.0, 4 * HOUR, 600.0, 208 / 575
best = checkpoint_interval(SAVE, MTBF)
_ = about(best / 60, 31, 0.1, "minutes between saves of 2 minutes, with a failure every 4 hours")
_ = about(checkpoint_interval(SAVE, shortest * HOUR) / 60, 24.8, 0.2, "minutes, if it is every 2.6 hours")
_ = about(checkpoint_interval(SAVE, longest * HOUR) / 60, 239, 3, "minutes, if it is every ten days")

# %% id="q-interval"
quiz("scale.q_interval")


# %% [markdown] id="expected-look"
# (The port saved every 500 steps, 24 minutes. Its 44 minutes for compiling and 13 saves mean that a save took at most
# 3.4 minutes; we take 2. This library saves while training goes on, so that only the copying to the machine's memory
# costs time: seconds.)
#
# Young's formula is the first term of something exact. Let a machine's life be **exponential** with mean $M$: an hour
# is as dangerous as any other. How long must one pay, on average, until $t$ seconds pass *without* a failure,
# beginning anew after each?
#
# $$ U(t) = t\,e^{-t/M} + \int_0^t \bigl(s + U(t)\bigr)\,\tfrac{1}{M} e^{-s/M}\,ds \quad\Rightarrow\quad U(t) = M\,(e^{t/M} - 1). $$
#
# That is `uninterrupted(t, M)`. Now the run. The first machine needs its set-up: $U(\text{setup})$. A piece of work
# with its save then costs $U(\text{setup} + \tau + \delta) - U(\text{setup})$: the set-up comes again only after a
# failure (Daly, 2006).
#
# ### Exercise: the expected bill
#
# While you pay, failures come at the rate $1/M$. Each needs another machine, and each machine a wait.

# %% id="scale.expected_cost" level=2 library="nanochat_lib.budget:expected_cost" minutes=15 nbgrader={"cell_type": "code", "grade": false, "grade_id": "scale-expected_cost", "locked": false, "schema_version": 3, "solution": true, "task": false} points=3 tags=["exercise"]
def expected_cost(work: float, interval: float, save: float, setup: float, mtbf: float, wait: float) -> Cost:
    """Cost(wall, paid, machines) on average, in seconds; `mtbf` may be infinite.

    `work` is cut into pieces of `interval` seconds, the last may be shorter; a piece is done when a machine has survived
    it and its `save`. Every machine is waited for `wait` seconds, which is not paid, and set up, which is.
    """
    raise NotImplementedError


# %% id="scale.expected_cost.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "scale-expected_cost-check", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("scale.expected_cost", expected_cost)

# %% [markdown] id="capacity-look"
# ## 7. Machines that are not there
#
# The other cost is capacity. The port counted: of **2,885** requests for a TPU between April and July 2026, **1,632**
# ended in an error. The best region gave a machine for 208 of 575 requests, **36 %**; most gave none at all. Nobody
# published how long a request takes. Say that you ask every ten minutes.

# %% id="wait-predict"
predict("scale.p_wait")

# %% id="wait"
rng = np.random.default_rng(0)
waits = ASK / 60 * rng.geometric(GRANTED, 20_000)
reveal("scale.p_wait", round(float(waits.mean())))
_ = about(waits.mean(), 27.6, 0.8, "minutes on average")
_ = about(100 * np.mean(waits > 60), 6.8, 0.6, "% wait longer than an hour")

fig, ax = new_figure(height=2.6, width=5.8)
at = np.arange(0, 361, 10)
for regions, colour, style in ((1, BLUE, "-"), (2, SKY, "--"), (4, ORANGE, "-."), (8, RED, ":")):
    rounds = rng.geometric(GRANTED, 4_000)
    which = rng.integers(1, regions + 1, 4_000)  # the place of the good region in your list
    got = ASK / 60 * ((rounds - 1) * regions + which)
    name = "the good region only" if regions == 1 else f"{regions} regions in turn, one is good"
    share = [100 * np.mean(got <= minutes + 0.5) for minutes in at]
    ax.step(at, share, where="post", color=colour, linestyle=style, label=name)
label(ax, "Who has a machine by then?", "minutes of asking", "% of the runs", legend=True)
show(
    fig,
    alt="Share of runs that have a machine against minutes of asking, one request every ten minutes: nearly all within an hour "
    "and a half in the good region, half of them only after two hours when eight regions are asked in turn.",
)


# %% [markdown] id="wait-explain"
# The port's preemption in its last run cost 17 minutes, set-up included: lucky. The lower curves are why a recipe
# must ask by itself, in several places at the same time, at night too; a person at a console does not. A request that
# waits costs nothing.
#
# ### Exercise: one run, played through
#
# Formulas have means. To see the spread, play a run: machines with lives and waits, given as lists.

# %% id="scale.replay" level=3 library="nanochat_lib.budget:replay" minutes=25 nbgrader={"cell_type": "code", "grade": false, "grade_id": "scale-replay", "locked": false, "schema_version": 3, "solution": true, "task": false} points=4 tags=["exercise"]
def replay(work: float, interval: float, save: float, setup: float, lives: list, waits: list) -> Cost:
    """Cost(wall, paid, machines) of one run on machines with these lives, after these waits; all in seconds.

    A machine is set up, then does pieces of `interval` seconds of work (the last may be shorter), each followed by a
    save. A piece counts once it is saved, what a machine's end interrupts is done again by the next. A machine is paid from
    the beginning of its set-up to the end of its life, or of the work. UserError when the machines do not suffice.
    """
    raise NotImplementedError


# %% id="scale.replay.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "scale-replay-check", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check("scale.replay", replay)

# %% [markdown] id="spot-look"
# Everything is there for the question that matters. The port's d24, 5.28 hours of work on a v6e-8. Spot costs a fifth
# an hour, machines last 4 hours, are waited for, set up in 15 minutes. What share of the on-demand bill is left?

# %% id="spot-predict"
predict("scale.p_spot")

# %% id="simulation"
expected_cost, replay = mine("scale.expected_cost"), mine("scale.replay")
WORK, WAIT = spot.work_hours * HOUR, ASK / GRANTED
BILL = dear.usd + SETUP / HOUR * dear.usd_hour


def played(interval, runs, seed=0):
    """(runs, 2): wall hours and dollars of so many simulated runs."""
    rng, found = np.random.default_rng(seed), []
    for _ in range(runs):
        cost = replay(WORK, interval, SAVE, SETUP, rng.exponential(MTBF, 400), ASK * rng.geometric(GRANTED, 400))
        found.append((cost.wall / HOUR, cost.paid / HOUR * spot.usd_hour))
    return np.array(found)


intervals = np.unique(WORK / np.ceil(WORK / np.geomspace(3 * 60, WORK, 9 if fast() else 18)))  # whole pieces
runs = [played(interval, 40 if fast() else 400) for interval in intervals]
chosen = expected_cost(WORK, best, SAVE, SETUP, MTBF, WAIT)
once = expected_cost(WORK, WORK, SAVE, SETUP, MTBF, WAIT)
reveal("scale.p_spot", round(100 * chosen.paid / HOUR * spot.usd_hour / BILL))
_ = about(chosen.paid / HOUR * spot.usd_hour, 29.1, 0.8, "dollars on spot, saved every 31 minutes")
_ = about(chosen.wall / HOUR, 8.0, 0.4, "hours from the first request to the end")
_ = about(chosen.machines, 2.7, 0.1, "machines")
_ = about(once.paid / HOUR * spot.usd_hour, 53, 3, "dollars on spot when only the end is saved")
_ = about(BILL, 119, 2, "dollars on demand, set-up included")
if not fast():
    bills = played(best, 2000, 1)[:, 1]
    about(bills.mean() / (chosen.paid / HOUR * spot.usd_hour), 1, 0.03, "simulated mean over the formula")
    about(np.quantile(bills, 0.9), 33, 2, "dollars: nine runs in ten stay below, saved every 31 minutes")
    _ = about(np.quantile(runs[-1][:, 1], 0.9), 97, 25, "dollars, when only the end is saved")

# %% id="interval-figure" tags=["slide"]
fig, axes = new_figure(1, 2, height=3.0)
smooth = np.geomspace(3 * 60, WORK, 300)
smooth = np.unique(WORK / np.ceil(WORK / smooth))  # whole pieces only: the formula is jagged in between
curves = [expected_cost(WORK, interval, SAVE, SETUP, MTBF, WAIT) for interval in smooth]
for ax, column, values, title, unit in (
    (axes[0], 0, [c.wall / HOUR for c in curves], "Wall-clock", "hours"),
    (axes[1], 1, [c.paid / HOUR * spot.usd_hour for c in curves], "Bill", "dollars"),
):
    minutes = intervals / 60
    low, high = np.quantile([found[:, column] for found in runs], [0.1, 0.9], axis=1)
    ax.fill_between(minutes, low, high, color=BLUE, alpha=0.2, linewidth=0, label="80 % of the runs")
    ax.plot(minutes, [found[:, column].mean() for found in runs], "o", color=BLUE, markersize=4, label="simulated mean")
    ax.plot(smooth / 60, values, color=ORANGE, label="formula")
    least = smooth[int(np.argmin(values))] / 60
    ax.axvline(best / 60, color=RED, linestyle="--", label=f"Young: {best / 60:.0f} min")
    ax.axvline(least, color=GREEN, linestyle=":", label=f"cheapest: {least:.0f} min")
    ax.set_xscale("log")
    ax.set_xticks([3, 10, 30, 100, 300], [3, 10, 30, 100, 300])
    ax.set_ylim(0, 1.05 * high.max())
    label(ax, title, "minutes between checkpoints", unit, legend=column == 0)
show(
    fig,
    alt="Wall-clock hours and dollars against the minutes between checkpoints: dear at 3 minutes, least near 30, twice as dear "
    "when only the end is saved; simulated means lie on the formula's curve, Young's interval close to its minimum.",
)
least = smooth[int(np.argmin([c.paid for c in curves]))]
ratio = chosen.paid / min(c.paid for c in curves)
print(f"cheapest at {least / 60:.0f} minutes; Young's interval costs {100 * (ratio - 1):.1f} % more than that")

# %% [markdown] id="interval-explain"
# Three things to see. The valley is *flat*: between 15 and 60 minutes the bill changes by a few per cent, so a badly
# known rate does little harm. Its right side is steep: saving only at the end nearly doubles the mean. And it widens
# the band: with a save every 31 minutes nine runs in ten stay below 33 dollars, with one save at the end the tenth pays
# about three times as much. Checkpoints are an insurance, too. Even so, spot is cheaper than 119 dollars throughout.

# %% id="regret" tags=["slide"]
for hours in (shortest, 12.19, longest):
    bills = []
    for interval in (best, min(checkpoint_interval(SAVE, hours * HOUR), WORK)):
        whole_pieces = WORK / math.ceil(WORK / interval)
        bills.append(expected_cost(WORK, whole_pieces, SAVE, SETUP, hours * HOUR, WAIT).paid / HOUR * spot.usd_hour)
    print(
        f"a failure every {hours:5.1f} h: ${bills[0]:.2f} when saved every {best / 60:.0f} min, ${bills[1]:.2f} with its own best"
    )
_ = about(100 * (bills[0] / bills[1] - 1), 4.9, 0.3, "% too much, if failures are sixty times as rare as assumed")

# %% [markdown] id="regret-explain"
# That is how to plan with a rate nobody knows: take a pessimist's. Save as if machines lived
# 4 hours, and be wrong by a factor of sixty: it costs a dollar.

# %% id="q-spot"
quiz("scale.q_spot")

# %% [markdown] id="budget-look"
# **A plan for 100 dollars.** Which depth can you afford, at 9.5 tokens a scaling parameter? Machines: a v6e-8, spot (a
# failure every 4 hours, asked for as above) or on demand, at 24.5 % MFU; 8×H100 at 24 dollars an hour, at 50 %.

# %% id="budget" tags=["slide"]
MACHINES = {
    "v6e-8 spot": (V6E, 0.2455, {"spot": True, "mtbf_hours": MTBF / HOUR, "wait_minutes": WAIT / 60}),
    "v6e-8 on demand": (V6E, 0.2455, {"wait_minutes": WAIT / 60}),
    "8×H100": (H100, 0.50, {}),
}
print(f"{'':16} depth  chips  $/hour  work h  wall h  save every      $")
for name, (chip, utilisation, terms) in MACHINES.items():
    plans = {d: plan(run_of(d, 9.5), chip, 8, utilisation, save_seconds=SAVE, **terms) for d in range(12, 41, 2)}
    deepest = max(d for d, found in plans.items() if found.usd <= 100)
    for depth in sorted({24, deepest}):
        found = plans[depth]
        often = f"{found.interval_minutes:.0f} min" if "mtbf_hours" in terms else "the end"
        print(
            f"{name:16} d{depth:<5} {8:>4} {found.usd_hour:>9.2f} {found.work_hours:>7.1f} {found.expected.wall:>7.1f} {often:>11} "
            f"{found.usd:>6.0f}{'  <- the deepest for $100' if depth == deepest else ''}"
        )


# %% [markdown] id="budget-explain"
# The plan counts pretraining alone. In the port's run the evaluations and SFT took more hours than the steps. And it
# takes machines as they come: a deadline turns every sum around, since on demand does not wait for itself to be taken
# away.
#
# ### Plan your own run
#
# On the command line it is `nanochat plan --preset tpu-v6e-8-d24 --spot --mtbf-hours 4 --wait-minutes 30`. Here, move
# the dials. Where does spot stop being worth it? What does a save of ten minutes do? On demand nothing is taken away:
# there the failures' dial does nothing, and only the end is saved.

# %% id="widget"
def planner(depth, machine, mtbf_hours, save_seconds, granted):
    chip, utilisation, _ = MACHINES[machine]
    is_spot = machine.endswith("spot")
    mtbf = mtbf_hours * HOUR if is_spot else math.inf
    bare = plan(run_of(depth, 9.5), chip, 8, utilisation, spot=is_spot, save_seconds=0, setup_minutes=0)
    work, wait = bare.work_hours * HOUR, ASK / granted
    interval = min(checkpoint_interval(save_seconds, mtbf), work) if is_spot else work
    cost = expected_cost(work, interval, save_seconds, SETUP, mtbf, wait)
    saves = math.ceil(work / interval) * save_seconds
    parts = {
        "training": work,
        "saves": saves,
        "set-up, repeated work": cost.paid - work - saves,
        "waiting": cost.wall - cost.paid,
    }
    fig, (left, right) = new_figure(1, 2, height=2.9)
    start = 0.0
    for (part, seconds), colour in zip(parts.items(), (BLUE, ORANGE, RED, FAINT), strict=True):
        left.barh(0, seconds / HOUR, 0.5, left=start, color=colour, label=part)
        start += seconds / HOUR
    left.set_yticks([])
    left.set_ylim(-0.5, 1.3)
    left.legend(frameon=False, fontsize=8, ncols=2, loc="upper left")
    label(left, f"d{depth}: {cost.wall / HOUR:.1f} hours, ${cost.paid / HOUR * bare.usd_hour:,.0f}", "hours")
    tried = np.unique(work / np.arange(1, 120))
    bills = [expected_cost(work, t, save_seconds, SETUP, mtbf, wait).paid / HOUR * bare.usd_hour for t in tried]
    right.plot(tried / 60, bills, color=ORANGE)
    said = f"every {interval / 60:.0f} min" if is_spot else "saved at the end only"
    right.plot(interval / 60, cost.paid / HOUR * bare.usd_hour, "o", color=RED, label=said)
    right.set_xscale("log")
    right.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    right.set_ylim(0, min(max(bills), 4 * min(bills)) * 1.1)
    label(right, "Bill by checkpoint interval", "minutes", "dollars", legend=True)
    return fig


explore(
    planner,
    alt="Hours of a planned run by training, saves, repeated work and waiting; and its bill against the checkpoint interval",
    depth=slider(12, 32, 24, 2),
    machine=choice(list(MACHINES), "v6e-8 spot"),
    mtbf_hours=slider(1, 24, 4, 1),
    save_seconds=slider(10, 600, 120, 10),
    granted=slider(0.04, 1.0, 0.36, 0.04),
)

# %% [markdown] id="game-look"
# ## 8. Five incidents: find the fault
#
# Machines that are taken away are nobody's fault. The port also had **five incidents** that were: about 585
# together, of 2,500 dollars in all. They are public; the lines below were written for this chapter, in this library's
# format. For each: read, decide what has happened, answer (`quiz("scale.q_incident_1", "a")`), and only then run the
# cell that shows the guard.
#
# **Incident 1.** The machine was taken away at 02:14. The new one does not start.

# %% id="incident-1"
print("""\
02:11:40  pretrain step 4,990 of 6,612  loss 2.512  364,600 tokens/s
02:12:09  pretrain step 5,000 of 6,612  loss 2.498  saving
02:31:55  new machine, 8 devices; runs/d24 is there
02:32:40  EOFError: No data left in file
02:33:20  EOFError: No data left in file
base/step_00004500   params.npz  5,536,488,960 bytes   optimizer.npz  8,203,118,592 bytes
base/step_00005000   params.npz              0 bytes   optimizer.npz  8,203,118,592 bytes""")
quiz("scale.q_incident_1")

# %% id="guard-1"
from nanochat_lib import step_folders, storage

with tempfile.TemporaryDirectory() as folder:
    for step in (4500, 5000):
        place = step_folders.step_folder(folder, step)
        place.mkdir()
        storage.atomic_write_json(place / "meta.json", {"step": step})
        storage.atomic_write_bytes(place / "params.npz", bytes(1000))
        storage.write_manifest(place)
    (step_folders.step_folder(folder, 5000) / "params.npz").write_bytes(b"")
    newest, problems = step_folders.latest(folder)
    print("goes on from step", newest, "- because", problems[0].replace(str(Path(folder)), "base"))

# %% [markdown] id="guard-1-explain"
# A checkpoint here is written under another name, flushed, listed with size and checksum, and renamed in one step.
# The newest *valid* one counts, broken ones are named and kept (`nanochat_lib/storage.py`,
# `nanochat_lib/step_folders.py`). Cost of going back to 4,500: 500 steps, 24 minutes.
#
# **Incident 2.** The run went through. The bill is three times what was planned.

# %% id="incident-2"
rng = np.random.default_rng(4)
hours = np.arange(0, 14.5, 0.05)
speed = np.where(hours < 5.3, 364.6 + 2 * rng.standard_normal(len(hours)), 0.0)
speed[(hours > 2.1) & (hours < 2.25)] = 0
fig, (left, right) = new_figure(1, 2, height=2.4)
left.plot(hours, speed, color=BLUE)
label(left, "Thousand tokens a second", "hours since the start")
right.plot(hours, spot.usd_hour * hours, color=RED)
right.axhline(spot.usd, color=FAINT, linestyle=":")
right.text(14.4, spot.usd + 1.5, "planned", fontsize=8, color=FAINT, ha="right")
label(right, "Dollars so far", "hours since the start")
show(
    fig,
    alt="Left: steady speed for 5.3 hours, with a short pause, then zero for nine hours. Right: dollars rise in a straight line.",
)
print("05:18:12  pretrain step 6,612 of 6,612  loss 2.401  saved\n05:18:13  status: done")
quiz("scale.q_incident_2")

# %% id="guard-2"
from nanochat_lib.run_config import OpsConfig
from nanochat_lib.stall import Detector
from nanochat_lib.status import Status

with tempfile.TemporaryDirectory() as folder:
    detector = Detector(Status(folder), OpsConfig(on_finish="shutdown"))
    detector.steps.extend([2.876] * 50)
    limit = detector.limit()
print(f"a step takes 2.876 s; without one for {limit:.0f} s the run counts as stalled")
_ = about(9 * spot.usd_hour, 38.9, 0.2, "dollars for nine idle hours, spot")
_ = about(9 * dear.usd_hour, 194, 1, "dollars, on demand")

# %% [markdown] id="guard-2-explain"
# `-s ops.on_finish=shutdown` switches the machine off when the run is done, has failed or stands still
# (`nanochat_lib/finish.py`), and `-s ops.on_stall=stop` ends one that hangs, with the stacks of all threads
# (`nanochat_lib/stall.py`). The scripts for rented machines delete what they made, whatever happens.
#
# **Incident 3.** A slice of 16 chips, four machines. Nothing happens, for hours.

# %% id="incident-3"
print("""\
worker 0  09:02:11  nanochat pretrain --preset tpu-v6e-8-d24 ...
worker 0  09:02:19  connecting to the coordinator 10.0.0.2:8476
worker 1  $
worker 2  $
worker 3  $
worker 0  (nothing more; 0 steps; 16 chips on the bill)""")
quiz("scale.q_incident_3")

# %% id="guard-3"
from nanochat_lib import rendezvous

try:
    rendezvous.meet("127.0.0.1:0", 4, 0, timeout=0.3)
except UserError as error:
    print("\n".join(str(error).splitlines()[:3]))

# %% [markdown] id="guard-3-explain"
# The workers meet before JAX starts, and whoever waits says *who* is missing, and ends
# (`nanochat_lib/rendezvous.py`). Two processes on your own machine rehearse it for nothing:
# `docs/rented-machines.md`, first section.
#
# **Incident 4.** Another preemption. This time the new machine does start.

# %% id="incident-4"
print("""\
09:41:30  pretrain step 3,850 of 6,612  loss 2.634  saved runs/d24/base/step_003500
09:42:02  SIGTERM
10:04:10  new machine, 8 devices; runs/d24 is new
10:11:25  pretrain step 10 of 6,612  loss 10.397
10:11:54  pretrain step 20 of 6,612  loss 9.214""")
quiz("scale.q_incident_4")

# %% id="guard-4"
from nanochat_lib.pipeline import check_durable

try:
    check_durable(preset("tpu-v6e-8-d24"))
except UserError as error:
    print(error)
_ = about(3850 * 2.876 / HOUR * spot.usd_hour, 13.3, 0.1, "dollars for steps that are done twice, spot")

# %% [markdown] id="guard-4-explain"
# A preset that rents a machine does not start without `ops.durable`, a place that outlives it, or a word of consent
# (`nanochat_lib/durable.py`). Every save is copied there while training goes on.
#
# ## 9. Field lesson: a splendid training loss
#
# **Incident 5** you produce yourself. The port's first d24 ended with 1.00 bits per byte and a CORE of 0.13, where a
# sound run of that size has 0.72 and 0.27. Below are the two curves of such a run, at your laptop's scale; the other
# run has the same size, seed and steps.

# %% id="repeat-predict"
predict("scale.p_repeat")

# %% id="incident-5"
if fast():
    depth, steps = 2, 40
else:
    depth, steps = 4, length(4)
few = pages[: steps * ROWS // 80]
once_run = train(programs[depth], depth, 0, steps, pages, looks=11)
again_run = train(programs[depth], depth, 0, steps, few, looks=11)
fig, axes = new_figure(1, 2, height=2.7, sharey=True)
for ax, found, title in ((axes[0], again_run, "The first d24's way"), (axes[1], once_run, "The other run")):
    ax.plot(np.convolve(found["curve"], np.ones(8) / 8, "valid"), color=BLUE, linewidth=1.2, label="training")
    ax.plot(*zip(*found["held"], strict=True), color=ORANGE, marker="o", markersize=4, label="held out")
    label(ax, title, "step", "bits per byte" if ax is axes[0] else "", legend=True)
show(
    fig,
    alt="Left: training bits per byte fall far below those of held-out text, which rise again after a quarter of the steps. "
    "Right: both fall together to the end.",
)
quiz("scale.q_incident_5")

# %% id="incident-5-numbers"
reveal("scale.p_repeat", round(again_run["bpb"], 2))
print(f"held out: read once {once_run['bpb']:.2f}, read 80 times {again_run['bpb']:.2f} bits per byte")
print(f"training, last steps: {np.mean(once_run['curve'][-20:]):.2f} and {np.mean(again_run['curve'][-20:]):.2f}")
if not fast():
    about(again_run["bpb"] - once_run["bpb"], 3.7, 1.2, "bits per byte lost on text that was not read")
    _ = about(np.mean(again_run["curve"][-20:]), 1.45, 0.6, "training bits per byte in its log")

# %% [markdown] id="incident-5-explain"
# The port's loader had five shards. When they were used up it began again, without a word: 80 times. A run that
# learns its pages by heart has a splendid training loss. Yours fares worse than the port's, because its pages are 44
# rows of 64 bytes: in the end new text surprises it nearly as much as a model that knows nothing (8 bits). A look at
# held-out text, even once, at a third of the way, would have stopped it. The port's next two runs cost about 205 dollars
# each.
#
# This is what the library says before step 0, if the run was to read as many tokens as those after it.

# %% id="guard-5"
from nanochat_lib.supply import readings_needed

try:
    readings_needed(8_757_727_488, 8_757_727_488 / 80, 1.0, "5 shards")
except UserError as error:
    print(error)


# %% [markdown] id="symptoms-look"
# ### Exercise: read a log by program
#
# Three of the five leave traces in `metrics.jsonl`: work that is done twice, a long silence, an epoch that begins
# again. Find them in the records `{"step", "time" (seconds), "epoch"}`.

# %% id="scale.symptoms" level=2 minutes=15 nbgrader={"cell_type": "code", "grade": false, "grade_id": "scale-symptoms", "locked": false, "schema_version": 3, "solution": true, "task": false} points=2 tags=["exercise"]
def symptoms(records: list[dict], patience: float) -> list[tuple[str, int]]:
    """(kind, step) of what neighbouring records show, in the order of the log, with the step of the later one.

    "lost": its step is not above that of the record before. "stalled": more than `patience` times the usual time has
    passed, which is the median over all neighbours. "wrapped": its epoch is above that before. One record may show
    several, in this order.
    """
    raise NotImplementedError


# %% id="scale.symptoms.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "scale-symptoms-check", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("scale.symptoms", symptoms)

# %% id="symptoms-run"
symptoms = mine("scale.symptoms")
log, step, clock = [], 0, 0.0
for number in range(1, 200):
    step, clock = step + 10, clock + 28.8
    if number == 90:
        step, clock = 500, clock + 1900  # taken away, and back to the last checkpoint
    log.append({"step": step, "time": clock, "epoch": 1 + (number > 150)})
for kind, where in symptoms(log, 10.0):
    print(f"step {where}: {kind}")

# %% [markdown] id="recipe-look"
# ## 10. The 3.8B recipe, taken apart
#
# One engineer trained 3.848 billion parameters (28 layers of 3072, 24 query and 8 key/value heads, 14 value tables)
# on 65.3 billion tokens, alone, on 8×B200: 43 hours, **998 dollars**, CORE **0.384**. It is `gpu-8-little-lm` here. First,
# do the published numbers agree with each other?

# %% id="recipe-arithmetic"
little = preset("gpu-8-little-lm")
model = little.gpt_config()
groups = count_params(model)
_ = about(groups["total"] / 1e9, 3.848, 0.002, "billion parameters")
_ = about(100 * groups["value_embeds"] / groups["total"], 18.7, 0.2, "% of them in value tables (published: 19)")
_ = about(65.3e9 / 437e3 / HOUR, 41.5, 0.1, "hours for the tokens at 437,000 a second (published, all in all: 43)")
_ = about(998 / 43, 23.2, 0.1, "dollars an hour for eight chips")
reached = flops_per_token(model) * 437e3 / 8
_ = about(reached / 1e12, 1090, 5, "TFLOP/s a chip by our count of FLOPs (published: 1047)")
_ = about(100 * reached / B200.peak["bfloat16"], 48, 1, "% of the bfloat16 peak (published: about 50)")
_ = about(65.3e9 / (groups["transformer_matrices"] + groups["lm_head"]), 22, 0.3, "tokens a scaling parameter")

# %% [markdown] id="recipe-table"
# It was the second attempt. The first, 858 million parameters on 16.4 billion tokens, got 60.45 % in PIQA, where
# GPT-2 with 124 million has about 63 %. What did each choice give since? All figures are the engineer's own, each
# from a comparison at the size given.
#
# | choice | what was compared | what it gave |
# |---|---|---|
# | trapezoid: warm-up 5 %, flat, down over the last 50 % to 5 % | against the first attempt's cosine to zero | that starved its last 30 % of steps; four things were changed at once |
# | Muon for matrices | a step against AdamW's | 25 % slower; 4 % when spread over 7 accumulation steps |
# | fp8 in all three products of a linear layer | tokens a second | +25 % |
# | vocabulary padded from 50,257 to 50,304 | with fp8 | +33 % together |
# | output head fused with the loss | with both | 6 % slower a step, 8 GB free, a larger micro-batch: +44 % together |
# | relu² without a gate for SwiGLU | a small model | 183,035 to 214,173 tokens/s, 6 GB less |
# | bfloat16 master weights | 1.5B, step 4,000 | −27 % memory, 640 thousand to 1.4 million tokens/s; CORE 0.22 against 0.23 |
# | value tables | 12,500 steps with and without | loss −0.46 %, CORE 0.3147 against 0.3047, same speed |
# | mask across documents | built, compared, removed | nothing: rows begin with BOS anyway |
# | a rotary kernel 2.2 times as fast | in training | nothing; a norm kernel was *slower* than the framework's |
# | shards on the local disk | against streaming | +2 to 3 %, no stalls |
# | context 2048 instead of 1024 | two runs to the end | −9 % speed; CORE 0.338 to 0.384, the loss equal to four digits |

# %% id="recipe-figure" tags=["slide"]
SPEED = (
    ("bf16 master weights (1.5B)", 100 * (1400 / 640 - 1)), ("fp8 + padding + fused loss", 44.0), ("fp8 + padding", 33.0),
    ("fp8", 25.0), ("relu² for SwiGLU", 100 * (214_173 / 183_035 - 1)), ("local shards", 2.5),
    ("value tables", 100 * (479_445 / 477_908 - 1)), ("rotary kernel", 0.0), ("Muon, spread", -4.0), ("context 2048", -9.0),
)  # fmt: skip
SCORE = (("context 2048", 0.384 - 0.338), ("value tables", 0.3147 - 0.3047), ("bf16 master weights", 0.22 - 0.23))
fig, (left, right) = new_figure(1, 2, height=3.0, width_ratios=(1.3, 1))
for ax, rows in ((left, SPEED), (right, SCORE)):
    values = [value for _, value in rows]
    ax.barh(range(len(rows)), values, 0.6, color=[GREEN if value >= 0 else RED for value in values])
    ax.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    ax.invert_yaxis()
    ax.axvline(0, color=FAINT, linewidth=0.8)
    ax.grid(axis="y", visible=False)
noise = 0.006
right.axvspan(-noise, noise, color=FAINT, alpha=0.25, linewidth=0)
label(left, "Tokens a second, % more", "%")
label(right, "CORE (grey: one run's noise)", "points")
show(
    fig,
    alt="Bars of what each choice gave: master weights in bfloat16 far ahead in speed; in CORE the longer context, then the value "
    "tables, which stand out from the noise of one run only just, and master weights with a small loss.",
)
hours_saved = 1200 / 25_000 * 43
_ = about(hours_saved, 2.1, 0.1, "hours that the value tables saved (worth about 1,200 of 25,000 steps)")
_ = about(hours_saved * 998 / 43, 48, 1, "dollars")
_ = about(100 * 0.83 * (0.384 - 0.338) / 0.338, 11.3, 0.3, "% of CORE from two tasks whose prompts were cut before")

# %% [markdown] id="recipe-explain"
# Read the right side with chapter 07 in mind. The largest gain, the longer context, is to 83 % the work of **two** of
# 22 tasks, SQuAD and BoolQ, whose prompts no longer were cut: the evaluation changed, not the model. One run of each
# kind was made, and CORE's run-to-run noise (0.006 in twenty repeats of a nanochat recipe) is more than half of the
# value tables' gain; their lower *loss*, which is far less noisy, is the better evidence.
#
# **What is still untested**, by the engineer's own account: Muon's learning rate was not tuned. The trapezoid was
# compared with the cosine only. QK-norm was never off. The ratio of query to key/value heads was chosen for memory.
# Muon was not sharded: each of the eight chips repeats the same orthogonalisation (chapter 05 shows what that
# wastes).

# %% id="q-untested"
quiz("scale.q_untested")

# %% [markdown] id="recipe-test"
# So a plan to test one of these is a plan for a budget. A d12 costs about two dollars of H100 time and shows
# differences in bits per byte of 0.001. What it shows must then be *confirmed at the target's size*: nanochat's 320
# runs at d12 found gains of 0.002 of which one setting survived at d20.

# %% id="recipe-price"
for depth in (12, 20, 24):
    found = plan(run_of(depth, 12), H100, 8, 0.5, save_seconds=0, setup_minutes=0)
    print(f"d{depth}: {60 * found.work_hours:>5.0f} minutes, ${found.usd:.0f} on 8×H100")

# %% [markdown] id="written"
# **In your own words.** A colleague's change gained 0.002 bits per byte at d12, on one seed, and should go into next
# week's d24 run. What do you answer, and what would settle it at what price? Three or four sentences. (In a class your
# instructor reads them.)

# %% [markdown] id="scale.small_gain"
# *Write your answer here, in place of this line.*

# %% [markdown] id="takeaway" tags=["slide"]
# > **Takeaway.** Depth sets everything, and work grows about as its 5.4th power. A scaling law is a statement about
# > one recipe: good for a step of three or ten times, open beyond; the floor is what small runs cannot see. Hours are
# > FLOPs over chips × peak × MFU. Save every √(2 · save · time between failures); the valley is flat, its right side
# > is not. Spot costs a fifth and stays cheap until machines die within a piece. Expensive mistakes are boring: a
# > disk, an epoch, an idle machine, an empty file, a worker. Each has a guard that runs before step 0. And a choice
# > that was never compared has no price tag.

# %% [markdown] id="simplified"
# ## What was simplified
#
# - Your miniseries is bytes, widths of 16 to 40, Adam for everything, no value tables. nanochat's is `run_of(depth)`:
#   sizes in `nanochat_lib/sizing.py` (`horizon`, `batch_for`, `transfer_scales`), its runs `nanochat pretrain -s
#   model.depth=…`.
# - One ratio of tokens to parameters. nanochat found its ratio by runs of equal FLOPs and a parabola in the logarithm
#   of the parameters (Hoffmann et al.'s second way): 10.5 in January, 12 since March 2026.
# - Residuals were drawn as if all sizes had the same noise. The law: `nanochat_lib/scaling.py`.
# - Lives are exponential, requests independent. Real capacity comes in waves: after a preemption the same zone has
#   none. The model is `nanochat_lib/budget.py`; `simulate` there draws whole batches of runs.
# - Saves stop the work here. This library's do not (`nanochat_lib/saver.py`), and SIGTERM's half minute saves the
#   step that is being done (`nanochat_lib/stopping.py`).
# - Real renting: `scripts/cloud/`, with what to expect in `docs/rented-machines.md`. What a run has really cost, its
#   restarts included, stands in its report (`nanochat_lib/report/money.py`).
# - Sources: nanochat's leaderboard, logs and posts (January to July 2026); the public port's and the 3.8B run's own
#   reports; Kaplan et al., arXiv:2001.08361; Hoffmann et al., arXiv:2203.15556; Young, Communications of the ACM 17
#   (1974); Daly, Future Generation Computer Systems 22 (2006); Garwood, Biometrika 28 (1936).

# %% id="end"
progress()
