# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["slide"] id="title"
# # Muon
#
# A weight matrix of 128 × 64 can be moved in 64 directions at right angles to each other. **How many of them does a
# gradient step really use?** In the small model below, 16 hold nine tenths of it. Muon uses all 64. It pays for
# that with matrix products; in one public run they made every step 4 % slower, and seven eighths of that were wasted.
#
# After this chapter you can
#
# - say what an update does to a matrix, in singular values;
# - write Muon: momentum, the iteration that makes an update orthogonal, and nanochat's three refinements;
# - decide which parameters it may have, and carry its learning rate to another width, batch and length;
# - compute what it costs on any machine, and find the waste before you rent one.
#
# Nine exercises, about two hours in all.

# %% tags=["setup"] id="setup"
import math
import os
import subprocess
import sys
import time
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.ticker import FuncFormatter, NullFormatter

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
from nanochat_lib.muon import NEWTON_SCHULZ, POLAR_EXPRESS, frobenius, init_stack, update_stack
from nanochat_lib.optim import ADAMW_NAMES, BLOCK, VALUE_EMBEDDING, Group, adamw_step, param_groups
from nanochat_lib.report.plots import BLUE, FAINT, GREEN, ORANGE, RED, SKY, new_figure
from nanochat_lib.sizing import REFERENCE_BATCH, GPTConfig, flops_per_token


def label(ax, title, x, y, legend=True):
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


# %% [markdown] id="model-look"
# ## 1. What an update does to a matrix
#
# We need a model that trains in seconds. It reads 8 bytes and guesses the next one: 8 embeddings side by side, two
# residual MLPs with relu², a soft-capped head. Names and shapes are nanochat's, weights are [out, in]. Its text is
# the small world that the course invents for itself.

# %% id="model"
from nanochat_lib.primer.documents import world_documents
from nanochat_lib.primer.world import World

LAYERS = 1 if fast() else 2
CONTEXT = 8  # bytes that are read to guess the next
text = np.frombuffer("\n".join(world_documents(World(0), 400_000)).encode(), np.uint8)


def batches(steps, rows, seed=0):
    """(steps, rows, 9) int32: random places of the text."""
    start = np.random.default_rng(seed).integers(0, len(text) - CONTEXT - 1, (steps, rows))
    return jnp.asarray(text[start[..., None] + np.arange(CONTEXT + 1)].astype(np.int32))


def init_params(width, layers=LAYERS, seed=0):
    """Parameters by nanochat's names; width C, MLP 2C."""
    keys = iter(jax.random.split(jax.random.key(seed), layers + 2))
    bound = 0.4 * (3 / width) ** 0.5
    params = {
        "transformer.wte.weight": 0.8 * jax.random.normal(next(keys), (256, width // CONTEXT)),
        "lm_head.weight": 0.001 * jax.random.normal(next(keys), (256, width)),
    }
    for i in range(layers):
        fc = jax.random.uniform(next(keys), (2 * width, width), minval=-bound, maxval=bound)
        params[f"transformer.h.{i}.mlp.c_fc.weight"] = fc
        params[f"transformer.h.{i}.mlp.c_proj.weight"] = jnp.zeros((width, 2 * width))
    return params


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def loss_fn(params, batch):
    """Mean nats a byte of batch (B, 9)."""
    x = norm(params["transformer.wte.weight"][batch[:, :-1]].reshape(len(batch), -1))  # (B, C)
    for i in range((len(params) - 2) // 2):
        h = jnp.square(jax.nn.relu(norm(x) @ params[f"transformer.h.{i}.mlp.c_fc.weight"].T))
        x = x + h @ params[f"transformer.h.{i}.mlp.c_proj.weight"].T
    logits = 15 * jnp.tanh(norm(x) @ params["lm_head.weight"].T / 15)
    return jnp.mean(jax.nn.logsumexp(logits, -1) - jnp.take_along_axis(logits, batch[:, -1:], 1)[:, 0])


# %% [markdown] id="train-look"
# One training run is one compiled loop. `route` says which optimiser a parameter belongs to. The learning rate of the
# matrices is an argument, so that one compilation serves many rates. It rises over 20
# steps and falls linearly over the second half.

# %% id="train"
TABLE_RATES = {"transformer.wte.weight": 0.03, "lm_head.weight": 0.01}  # at width 64; they follow 1/√width


def train(width, route, matrix_step, rate, data):
    """(losses (steps,), final params) of one run on data (steps, B, 9)."""
    params, total = init_params(width), len(data)
    stacks = {}
    for name, value in params.items():
        if route(name) == "muon":
            stacks.setdefault(value.shape, []).append(name)
    others = [name for name in params if route(name) != "muon"]
    stack_state = {str(shape): init_stack(len(names), shape) for shape, names in stacks.items()}
    moments = {name: (jnp.zeros_like(params[name]),) * 2 for name in others}

    def step(carry, inputs):
        params, stack_state, moments = carry
        batch, i = inputs
        loss, grads = jax.value_and_grad(loss_fn)(params, batch)
        factor = jnp.minimum(jnp.minimum((i + 1) / 20, 1.0), (total - i) / (0.5 * total))
        new, new_stacks, new_moments = dict(params), {}, {}
        for name in others:
            betas = (0.8, 0.95) if name in TABLE_RATES else (0.9, 0.95)
            lr = TABLE_RATES[name] * (width / 64) ** -0.5 if name in TABLE_RATES else rate
            group = Group(name, "adamw", (name,), 1.0, betas)
            change, *new_moments[name] = adamw_step(
                grads[name], params[name], *moments[name], i + 1, factor * lr, group
            )
            new[name] = params[name] + change
            new_moments[name] = tuple(new_moments[name])
        for shape, names in stacks.items():
            pick = lambda tree: jnp.stack([tree[name] for name in names])  # noqa: B023, E731
            change, new_stacks[str(shape)] = matrix_step(
                pick(grads), pick(params), stack_state[str(shape)], factor * rate, 0.95, 0.0
            )
            new |= {name: params[name] + delta for name, delta in zip(names, change, strict=True)}
        return (new, new_stacks, new_moments), loss

    (params, *_), losses = jax.lax.scan(step, (params, stack_state, moments), (data, jnp.arange(total)))
    return losses, params


STEPS = 24 if fast() else 150
WIDTHS = (64,) if fast() else (32, 64, 128)
RATES = {
    "muon": np.float32([0.02, 0.08] if fast() else [0.005, 0.01, 0.02, 0.04, 0.08]),
    "adamw": np.float32([0.002, 0.004] if fast() else [0.0005, 0.001, 0.002, 0.004, 0.008]),
}


def sweep(width, route, matrix_step, rates, data):
    """(losses (rates, steps), params (rates, …), the compiled run) of training once with each of the rates."""
    run = jax.jit(jax.vmap(partial(train, width, route, matrix_step), in_axes=(0, None)))
    compiled = run.lower(rates, data).compile({"xla_llvm_disable_expensive_passes": True} if fast() else None)
    losses, params = compiled(rates, data)
    return np.asarray(losses), params, compiled


def last(losses):
    """Mean loss of the last twentieth of the steps, by rate."""
    return np.mean(losses[..., -max(STEPS // 20, 3) :], axis=-1)


adamw_everywhere = lambda name: "adamw"  # noqa: E731
runs = {("adamw", 64): sweep(64, adamw_everywhere, None, RATES["adamw"], batches(STEPS, 256))}
losses, trained, _ = runs["adamw", 64]
best = last(losses).argmin()
params = {name: value[best] for name, value in trained.items()}
print(f"loss {losses[best, 0]:.2f} nats a byte before training, {last(losses)[best]:.2f} after {STEPS} steps of AdamW")

# %% [markdown] id="spectrum-look"
# Every matrix is $X = U S V^\top$: it takes an input apart along the rows of $V^\top$, stretches each part by a
# *singular value* $s_i$, and lays the parts along the columns of $U$. An update is a matrix, too. Its singular values
# say how far it moves the layer in each of its directions.
#
# Guess first: `predict("muon.p_rank", 20)`.

# %% id="spectrum-predict"
predict("muon.p_rank")

# %% tags=["slide"] id="spectrum"
NAME = f"transformer.h.{LAYERS - 1}.mlp.c_fc.weight"  # 128 × 64
gradients = jax.jit(jax.vmap(jax.grad(loss_fn), in_axes=(None, 0)))(params, batches(64, 256, seed=1))
G = gradients[NAME][0]  # of one batch
values = np.linalg.svd(np.asarray(G), compute_uv=False)
share = np.cumsum(values**2) / np.sum(values**2)
count = int(np.searchsorted(share, 0.9) + 1)
reveal("muon.p_rank", count)
if not fast():
    about(count, 16, within=4, name="singular values hold 90 % of the squared norm")

fig, (left, right) = new_figure(1, 2, height=2.6)
left.semilogy(np.arange(1, 65), values / values[0], color=BLUE, marker="o", markersize=3)
label(left, "A gradient's singular values", "number, largest first", "share of the largest", legend=False)
right.plot(np.arange(1, 65), 100 * share, color=ORANGE)
right.axhline(90, color=FAINT, linestyle=":")
label(right, "The largest together", "how many", "% of the squared norm", legend=False)
show(fig, alt="Singular values of a 128 × 64 gradient fall by orders of magnitude; few hold most of the squared norm.")

# %% [markdown] tags=["slide"] id="spectrum-explain"
# A gradient step of any length is mostly a step in a minority of the directions. The others are not useless: they are
# where rarer things are written, and they move ten to sixty times less.
#
# Which step lowers the loss most? That depends on what counts as a step of length 1. If the *Frobenius* norm is
# limited, the gradient itself. But a layer feels an update through the largest singular value: no input can be changed
# by more than that. If *that* is limited, the best step makes all singular values equal (Bernstein and Newhouse 2024,
# arXiv:2409.20325):
#
# $$ \arg\max_{\|O\|_2 \le 1} \langle G, O \rangle = U V^\top . $$

# %% id="q-update"
quiz("muon.q_update")

# %% [markdown] id="orthogonal-look"
# ### Exercise: all singular values 1
#
# Return $U V^\top$, exactly, for one matrix or a stack.


# %% tags=["exercise"] id="muon.orthogonal" points=1 minutes=8 level=1
def orthogonal(x):
    """U Vᵀ of each X = U S Vᵀ in x (…, R, N) float32, by singular value decomposition."""
    # --- stub
    raise NotImplementedError
    # --- solution
    u, _, vt = jnp.linalg.svd(x, full_matrices=False)
    return u @ vt
    # --- end


# %% id="muon.orthogonal.check"
check("muon.orthogonal", orthogonal)

# %% tags=["hidden"] id="author"
from nanochat_lib.course.author import budget, example, hidden, mutant, prop, reference
from nanochat_lib.course.checks import muon as public

hidden(
    "muon.orthogonal",
    reference("wide", lambda rng: (public.normal(rng, 4, 7),), against=public.orthogonal, rtol=1e-3),
    reference("another stack", lambda rng: (public.normal(rng, 2, 7, 4),), against=public.orthogonal, rtol=1e-3),
    prop("very small numbers", lambda rng: (public.normal(rng, 7, 4, scale=1e-6),), public.right_angles),
)
mutant("muon.orthogonal", "return u @ vt", "return jnp.sign(x)", says="signs of the entries")
mutant("muon.orthogonal", "return u @ vt", "return x / frobenius(x)", says="only the length")
mutant("muon.orthogonal", "return u @ vt", "return jnp.swapaxes(u @ vt, -1, -2)", says="transposed")
mutant("muon.orthogonal", "full_matrices=False", "full_matrices=True", says="shapes that do not fit")

# %% [markdown] id="step-compare-look"
# Now give both steps the same largest singular value and look at the first-order fall of the loss, $\langle G, O\rangle$.

# %% id="step-compare"
orthogonal = mine("muon.orthogonal")
g = np.asarray(G)
gain = np.sum(g * np.asarray(orthogonal(G))) / (np.sum(g * g) / np.linalg.norm(g, 2))
print(f"with equal largest singular value, U Vᵀ lowers the loss {gain:.1f} times as far, to first order")

# %% [markdown] id="momentum-look"
# ## 2. Momentum
#
# Making all directions equally strong has a price: the small singular values of one batch's gradient are mostly noise,
# and now they count in full. So average first. Muon keeps a running mean of gradients, the *buffer*
#
# $$ M \leftarrow \mu M + (1-\mu)\, G , $$
#
# and mixes the newest gradient in once more (Nesterov): the update is made from $\mu M + (1-\mu) G$. Weights μ and
# 1 − μ make a mean, not a sum. The sum's length would not matter to Muon anyway, since the length goes.
#
# ### Exercise: momentum


# %% tags=["exercise"] id="muon.nesterov" points=2 minutes=10 level=1 library="nanochat_lib.muon:nesterov"
def nesterov(grads, buffer, momentum):
    """(update, new buffer), both shaped like grads (K, R, N): two weighted means, one after the other."""
    # --- stub
    raise NotImplementedError
    # --- solution
    buffer = momentum * buffer + (1 - momentum) * grads
    return momentum * buffer + (1 - momentum) * grads, buffer
    # --- end


# %% id="muon.nesterov.check"
check("muon.nesterov", nesterov)

# %% tags=["hidden"] id="muon.nesterov.hidden"
hidden(
    "muon.nesterov",
    example("no momentum", (2.0, 5.0, 0.0), (2.0, 2.0)),
    reference("another μ", lambda rng: (public.normal(rng, 3, 4), public.normal(rng, 3, 4), 0.97)),
    reference("large gradients", lambda rng: (public.normal(rng, 3, 4, scale=1e30), public.normal(rng, 3, 4), 0.85)),
)
mutant(
    "muon.nesterov",
    "return momentum * buffer + (1 - momentum) * grads, buffer",
    "return buffer, buffer",
    says="Nesterov goes a step ahead",
)
mutant(
    "muon.nesterov",
    "return momentum * buffer + (1 - momentum) * grads, buffer",
    "return buffer, momentum * buffer + (1 - momentum) * grads",
    says="swapped",
)
mutant(
    "muon.nesterov",
    body="buffer = momentum * buffer + grads\nreturn grads + momentum * buffer, buffer",
    says="that is a sum of gradients",
)
mutant(
    "muon.nesterov",
    body="buffer = (1 - momentum) * buffer + momentum * grads\nreturn (1 - momentum) * buffer + momentum * grads, buffer",
    says="not the other way round",
)

# %% [markdown] id="momentum-run-look"
# How much of the true gradient's direction is in an update? Take 32 batches at the same weights, and the mean of 32
# others as the truth. Cosine 1 would be the very same direction.

# %% tags=["slide"] id="momentum-run"
nesterov = mine("muon.nesterov")
truth = jnp.mean(gradients[NAME][32:], axis=0)
momenta = np.float32([0.0, 0.5, 0.8, 0.9, 0.95])


@jax.jit
@partial(jax.vmap, in_axes=(0, None))
def final_update(momentum, grads):
    """The last update of a run through grads (steps, R, N)."""
    buffer = jnp.zeros_like(grads[0])
    buffer = jax.lax.scan(lambda buffer, g: (nesterov(g, buffer, momentum)[1], None), buffer, grads[:-1])[0]
    return nesterov(grads[-1], buffer, momentum)[0]


def cosines(updates, truth):
    updates, truth = np.asarray(updates), np.asarray(truth)
    return np.sum(updates * truth, axis=(1, 2)) / np.linalg.norm(updates, axis=(1, 2)) / np.linalg.norm(truth)


updates = jnp.concatenate([final_update(momenta, gradients[NAME][:32]), truth[None]])
straight = orthogonal(updates)
raw, straight = cosines(updates[:-1], truth), cosines(straight[:-1], straight[-1])
fig, ax = new_figure(height=2.6)
places = np.arange(len(momenta))
ax.bar(places - 0.2, raw, 0.38, color=SKY, label="the update as it is")
ax.bar(places + 0.2, straight, 0.38, color=BLUE, label="with all singular values 1")
ax.set_xticks(places, [f"{m:.2f}" for m in momenta])
label(ax, "How well an update agrees with the true gradient", "momentum μ", "cosine")
ax.set_ylim(0, 1.3)
show(fig, alt="Cosine with the true gradient rises with momentum, most of all for orthogonalised updates.")

# %% [markdown] id="iteration-look"
# ## 3. An SVD without the SVD
#
# A singular value decomposition is slow on an accelerator and does not exist in bfloat16. Matrix products are what
# the chip is made for, and they can do it. Insert $X = U S V^\top$ into an odd polynomial:
#
# $$ aX + b\,(XX^\top)X + c\,(XX^\top)^2X = U\,(aS + bS^3 + cS^5)\,V^\top . $$
#
# The directions stay; each singular value goes through the polynomial $p(s) = as + bs^3 + cs^5$. So choose a
# polynomial that pushes everything in $(0, 1]$ towards 1, apply it a few times, and never compute $U$ or $V$.
#
# - **Newton–Schulz**, as in the first Muon (Jordan et al. 2024): the same triple (3.4445, −4.7750, 2.0315) five times.
# - **Polar Express** (Amsel et al. 2025, arXiv:2505.16932): another triple for each step, the best possible for what
#   the steps before have left over. nanochat uses it.
#
# Start with $X / \|X\|_F$, so that no singular value is above 1.
#
# ### Exercise: one step
#
# $(XX^\top)X = X(X^\top X)$: for a tall matrix make the small product. The check counts FLOPs.


# %% tags=["exercise"] id="muon.polynomial_step" points=3 minutes=15 level=2 library="nanochat_lib.muon:polynomial_step"
def polynomial_step(x, a, b, c):
    """a X + b (X Xᵀ) X + c (X Xᵀ)² X of each X in x (…, R, N), with the gram matrix of the short side.

    note("gram", …) and note("polynomial", …) (b·gram + c·gram²) are compared one after the other.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    tall = x.shape[-2] > x.shape[-1]
    gram = x.mT @ x if tall else x @ x.mT
    polynomial = b * gram + c * (gram @ gram)
    return a * x + (x @ polynomial if tall else polynomial @ x)
    # --- end


# %% id="muon.polynomial_step.check"
check("muon.polynomial_step", polynomial_step)

# %% tags=["hidden"] id="muon.polynomial_step.hidden"
hidden(
    "muon.polynomial_step",
    reference("square, Newton–Schulz", lambda rng: (public.unit(rng, 5, 5), *NEWTON_SCHULZ[0])),
    reference("a stack of wide ones", lambda rng: (public.unit(rng, 3, 4, 7), *POLAR_EXPRESS[0])),
    budget(
        "the short side of a stack",
        lambda rng: (public.unit(rng, 3, 64, 8), *public.TRIPLE),
        flops_ratio=1.3,
        why=public.LONG_SIDE,
    ),
    budget("few operations", lambda rng: (public.unit(rng, 6, 3), *public.TRIPLE), jaxpr=16),
)
mutant("muon.polynomial_step", "c * (gram @ gram)", "c * gram * gram", says="entry by entry")
mutant("muon.polynomial_step", "a * x + (", "(", says="a·X is missing")
mutant("muon.polynomial_step", " + c * (gram @ gram)", "", says="fifth power")
mutant("muon.polynomial_step", "tall = x.shape[-2] > x.shape[-1]", "tall = False", says="the FLOPs are not")
mutant(
    "muon.polynomial_step",
    "tall = x.shape[-2] > x.shape[-1]",
    "tall = x.shape[0] > x.shape[1]",
    says="the FLOPs are not",
)
mutant(
    "muon.polynomial_step",
    "x.mT @ x if tall else x @ x.mT",
    "x.T @ x if tall else x @ x.T",
    says="matmul",
)
mutant("muon.polynomial_step", body="return a * x + b * x**3 + c * x**5", says="powers of the entries")

# %% [markdown] id="polynomial-look"
# What do five steps do to a singular value?

# %% tags=["slide"] id="polynomial"
polynomial_step = mine("muon.polynomial_step")


def curve(s, coefficients):
    """The polynomials of `coefficients`, one after the other, on numbers."""
    for a, b, c in coefficients:
        s = a * s + b * s**3 + c * s**5
    return s


s = np.geomspace(1e-4, 1, 600)
fig, (left, right) = new_figure(1, 2, height=2.9)
even = np.linspace(0, 1, 300)
left.plot(even, curve(even, NEWTON_SCHULZ[:1]), color=RED, linestyle="--", label="Newton–Schulz")
for number, colour in ((0, BLUE), (1, SKY), (4, GREEN)):
    left.plot(even, curve(even, POLAR_EXPRESS[number : number + 1]), color=colour, label=f"Polar Express {number + 1}")
left.plot(even, even, color=FAINT, linewidth=0.8)
left.set_ylim(0, 3.4)
label(left, "One step", "singular value before", "after")
right.semilogx(s, curve(s, NEWTON_SCHULZ), color=RED, linestyle="--", label="Newton–Schulz")
right.semilogx(s, curve(s, POLAR_EXPRESS), color=BLUE, label="Polar Express")
right.axhline(1, color=FAINT, linewidth=0.8)
right.set_ylim(0, 1.4)
label(right, "Five steps", "singular value before", "after")
show(
    fig,
    alt="Left: single polynomials; right: five steps bring singular values from 0.001 to near 1, Polar Express closer.",
)

# %% [markdown] id="polynomial-explain"
# Neither gives exactly 1, and neither needs to: nanochat's log found no visible difference between the two. Near zero the product of the
# slopes decides, and there Polar Express reaches down to about 0.001 in the same five steps.

# %% id="p-iterations-predict"
predict("muon.p_iterations")

# %% id="p-iterations"
steps_needed = next(n for n in range(1, 20) if curve(0.001, NEWTON_SCHULZ[:1] * n) > 0.5)
reveal("muon.p_iterations", steps_needed)
for name, coefficients in (("Newton–Schulz", NEWTON_SCHULZ), ("Polar Express", POLAR_EXPRESS)):
    print(f"{name}: 0.001 becomes {curve(0.001, coefficients):.2f} in five steps")

# %% id="q-iteration"
quiz("muon.q_iteration")

# %% [markdown] id="spectra-look"
# Now the real thing: the gradient of section 1, step by step.


# %% tags=["slide"] id="spectra"
def spectra_after(x, coefficients):
    """Singular values of x / ‖x‖_F before the first step and after each one."""
    x = x / (1.01 * frobenius(x))
    found = [np.linalg.svd(np.asarray(x), compute_uv=False)]
    for triple in coefficients:
        x = polynomial_step(x, *triple)
        found.append(np.linalg.svd(np.asarray(x), compute_uv=False))
    return found


fig, axes = new_figure(1, 2, height=2.8, sharey=True)
for ax, name, coefficients in zip(
    axes, ("Newton–Schulz", "Polar Express"), (NEWTON_SCHULZ, POLAR_EXPRESS), strict=True
):
    for number, (found, colour) in enumerate(
        zip(spectra_after(G, coefficients), (FAINT, SKY, BLUE, GREEN, ORANGE, RED), strict=True)
    ):
        ax.semilogy(np.arange(1, 65), found, color=colour, label=f"{number} steps")
    label(ax, name, "number, largest first", "singular value" if ax is axes[0] else "", legend=False)
fig.legend(*axes[0].get_legend_handles_labels(), loc="outside right center", frameon=False, fontsize=8.5)
show(fig, alt="The singular values of the gradient rise step by step to a plateau near 1, with Polar Express sooner.")

# %% [markdown] id="widget-look"
# ### Drag the coefficients
#
# One triple, used again and again. The slope at zero (a) lifts small values; b and c must catch what comes near 1.
# Find a triple that is better than the original after five steps. What happens with a = 4.2? (Beyond some point the
# values above 1 run away.)


# %% id="widget"
def draw(a, b, c, steps, matrix):
    x = np.asarray(G) if matrix == "gradient" else np.random.default_rng(3).standard_normal(G.shape)
    before = np.linalg.svd(x / (1.01 * np.linalg.norm(x)), compute_uv=False)
    with np.errstate(over="ignore", invalid="ignore"):
        after = np.clip(np.nan_to_num(curve(before, [(a, b, c)] * int(steps)), nan=9.0), -9.0, 9.0)
        line = curve(s, [(a, b, c)] * int(steps))
    fig, (left, right) = new_figure(1, 2, height=2.8)
    left.semilogx(s, np.clip(np.nan_to_num(line, nan=9.0), -9, 9), color=BLUE)
    left.axhspan(0.7, 1.3, color=GREEN, alpha=0.15)
    left.plot(before, after, ".", color=ORANGE)
    left.set_ylim(-0.5, 2.5)
    label(left, f"Where {int(steps)} steps take a value", "singular value before", "after", legend=False)
    right.hist(np.clip(before, 0, 2), bins=np.linspace(0, 2, 41), color=FAINT, alpha=0.6, label="before")
    right.hist(np.clip(after, 0, 2), bins=np.linspace(0, 2, 41), color=BLUE, alpha=0.8, label="after")
    good = np.mean((after > 0.7) & (after < 1.3))
    label(right, f"{100 * good:.0f} % in 0.7 … 1.3", "singular value", "how many")
    return fig


explore(
    draw,
    alt="Where five polynomial steps take each singular value of the gradient, and the spectrum before and after.",
    a=slider(1.0, 4.5, 3.4445, 0.0005),
    b=slider(-7.0, 0.0, -4.775, 0.005),
    c=slider(0.0, 3.0, 2.0315, 0.0005),
    steps=slider(1, 10, 5),
    matrix=choice(["gradient", "random"], "gradient"),
)

# %% [markdown] id="rows-look"
# ## 4. Three refinements
#
# nanochat adds three small things. Its experiment log calls the gain of the first two "very slight" and that of
# the third clear.
#
# **Row equilibration** (MuonEq): before the iteration, every row gets the same length, and the whole keeps its
# Frobenius norm. A row is what one output neuron receives. Rows of very different length mean singular values of very
# different size, and five steps only reach so far down.
#
# ### Exercise: rows of equal length


# %% tags=["exercise"] id="muon.equilibrate_rows" points=2 minutes=10 level=1 library="nanochat_lib.muon:equilibrate_rows"
def equilibrate_rows(x):
    """x (K, R, N) with every row scaled to ‖X‖_F / √R, computed in float32, returned in x's dtype.

    A row's norm is taken to be at least 1e-6. frobenius(x) is float32 (K, 1, 1).
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    wide = x.astype(jnp.float32)
    rows = jnp.sqrt(jnp.sum(wide * wide, axis=-1, keepdims=True))
    factor = frobenius(x) / x.shape[-2] ** 0.5 / jnp.maximum(rows, 1e-6)
    return x * factor.astype(x.dtype)
    # --- end


# %% id="muon.equilibrate_rows.check"
check("muon.equilibrate_rows", equilibrate_rows)

# %% tags=["hidden"] id="muon.equilibrate_rows.hidden"
hidden(
    "muon.equilibrate_rows",
    reference("a stack of wide ones", lambda rng: (public.ragged(rng, 2, 3, 5),)),
    reference("zeros", lambda rng: (jnp.zeros((6, 3)),)),
    reference("bfloat16", lambda rng: (public.ragged(rng, 3, 5, dtype=jnp.bfloat16),), dtype=True),
)
mutant("muon.equilibrate_rows", " / x.shape[-2] ** 0.5", "", says="divide by √R")
mutant("muon.equilibrate_rows", "x.shape[-2] ** 0.5", "x.shape[-1] ** 0.5", says="not the N columns")
mutant("muon.equilibrate_rows", "frobenius(x) / x.shape[-2] ** 0.5 / ", "1.0 / ", says="the rows have length 1")
mutant("muon.equilibrate_rows", "jnp.maximum(rows, 1e-6)", "rows", says="a row of zeros has norm 0")
mutant("muon.equilibrate_rows", "factor.astype(x.dtype)", "factor", says="bfloat16")
mutant(
    "muon.equilibrate_rows",
    body="columns = jnp.linalg.norm(x, axis=-2, keepdims=True)\nreturn x * frobenius(x) / x.shape[-1] ** 0.5 / columns",
    says="those are the columns",
)

# %% [markdown] id="variance-look"
# **Variance reduction** (NorMuon, Li et al. 2025, arXiv:2510.05491): after the iteration all *directions* are equal,
# but some neurons still get longer updates than others, step after step. Keep a running mean square of each row and
# divide by its root, as Adam does for each entry; then give the update back its Frobenius norm. Wide matrices (R < N)
# have the statistic of each column instead: always the longer side.
#
# With $q$ the mean squares of this update, $S \leftarrow S + (1-\beta_2)(q - S)$ and $t = 1/\sqrt{\max(S, 10^{-10})}$,
#
# $$ u \leftarrow u \cdot t \cdot \frac{\|u\|_F}{\|u \cdot t\|_F}, \qquad
# \|u\|_F^2 = n \sum q, \quad \|u \cdot t\|_F^2 = n \sum q\,t^2 , $$
#
# with $n$ the length of the averaged axis. No second pass over the matrix is needed for the norms.
#
# ### Exercise: variance reduction


# %% tags=["exercise"] id="muon.normalise_variance" points=4 minutes=25 level=3 library="nanochat_lib.muon:normalise_variance"
def normalise_variance(u, second, beta2):
    """(new update, new second) of u (K, R, N); `second` is (K, R, 1) if R ≥ N, else (K, 1, N), float32.

    note("square", …), note("second", …) and note("inverse", …) are compared step by step. Statistics are float32, the
    update keeps u's dtype. Guards: S at least 1e-10 under the root, ‖u·t‖ at least 1e-10.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    axis = -1 if u.shape[-2] >= u.shape[-1] else -2
    size = u.shape[axis]
    square = jnp.mean(jnp.square(u.astype(jnp.float32)), axis=axis, keepdims=True)
    note("square", square)
    second = second + (1 - beta2) * (square - second)
    note("second", second)
    inverse = jax.lax.rsqrt(jnp.maximum(second, 1e-10))
    note("inverse", inverse)
    total = lambda q: jnp.sqrt(size * jnp.sum(q, axis=(-2, -1), keepdims=True))  # noqa: E731
    factor = inverse * total(square) / jnp.maximum(total(square * inverse * inverse), 1e-10)
    return u * factor.astype(u.dtype), second
    # --- end


# %% id="muon.normalise_variance.check"
check("muon.normalise_variance", normalise_variance)

# %% tags=["hidden"] id="muon.normalise_variance.hidden"
hidden(
    "muon.normalise_variance",
    reference("square", lambda rng: public.variance_arguments(rng, 4, 4)),
    reference("another stack", lambda rng: public.variance_arguments(rng, 2, 3, 5)),
    reference("nothing at all", lambda rng: (jnp.zeros((6, 4)), jnp.zeros((6, 1)), 0.95)),
    reference("bfloat16", lambda rng: public.variance_arguments(rng, 6, 4, dtype=jnp.bfloat16)),
)
mutant("muon.normalise_variance", "(1 - beta2)", "beta2", says="1 − β₂ the new mean square")
mutant(
    "muon.normalise_variance",
    "jax.lax.rsqrt(jnp.maximum(second, 1e-10))",
    "1 / jnp.maximum(second, 1e-10)",
    says="root of the mean square",
)
mutant("muon.normalise_variance", "jnp.maximum(second, 1e-10)", "second", says="under the root")
mutant(
    "muon.normalise_variance",
    "inverse * total(square) / jnp.maximum(total(square * inverse * inverse), 1e-10)",
    "inverse",
    says="old norm / new norm",
)
mutant("muon.normalise_variance", "-1 if u.shape[-2] >= u.shape[-1] else -2", "-1", says="wide ones one a column")
mutant(
    "muon.normalise_variance",
    "-1 if u.shape[-2] >= u.shape[-1] else -2",
    "-2 if u.shape[-2] >= u.shape[-1] else -1",
    says="square:",
)
mutant(
    "muon.normalise_variance",
    "inverse = jax.lax.rsqrt(jnp.maximum(second, 1e-10))",
    "inverse = jax.lax.rsqrt(jnp.maximum((second - (1 - beta2) * square) / beta2, 1e-10))",
    says="running mean square first",
)

# %% [markdown] id="rows-run-look"
# Both at work on the gradient of section 1: how long are the rows?

# %% id="rows-run"
equilibrate_rows, normalise_variance = mine("muon.equilibrate_rows"), mine("muon.normalise_variance")


def orthogonalise(x, coefficients=POLAR_EXPRESS, margin=1.01):
    """Your iteration on x (K, R, N): the library's polar_express, as a loop that compiles one step."""
    x = x / (frobenius(x) * margin + 1e-6).astype(x.dtype)
    return jax.lax.scan(lambda x, triple: (polynomial_step(x, *triple), None), x, jnp.asarray(coefficients, x.dtype))[0]


def row_norms(x):
    rows = np.sort(np.linalg.norm(np.asarray(x[0]), axis=-1))
    return rows / np.sqrt(np.mean(rows**2))


@jax.jit
def stages(x):
    straight = orthogonalise(equilibrate_rows(x))
    return orthogonalise(x), straight, normalise_variance(straight, jnp.zeros((1, x.shape[1], 1)), 0.9)[0]


plain, straight, even_rows = stages(G[None])
fig, ax = new_figure(height=2.7)
for x, colour, name in (
    (G[None], FAINT, "gradient"),
    (plain, SKY, "orthogonalised"),
    (straight, BLUE, "rows equilibrated, orthogonalised"),
    (even_rows, GREEN, "and variance reduced"),
):
    ax.semilogy(row_norms(x), color=colour, label=name)
label(ax, "Length of the rows (one a neuron)", "row, shortest first", "share of the mean length")
show(
    fig, alt="Row lengths of the gradient span a wide range; after each refinement the curve is flatter, at last level."
)

# %% [markdown] id="decay-look"
# **Cautious decay** (Chen et al. 2025, arXiv:2510.12402): weight decay pulls every weight towards zero, also those
# that the update is just enlarging. There the two pull against each other. So decay only where the update already
# goes towards zero or stays: where $u \cdot p \ge 0$, since the step is $-u$.
#
# $$ p \leftarrow p - \eta\,u - \eta\lambda\,p \cdot [u\,p \ge 0] $$
#
# ### Exercise: the step itself


# %% tags=["exercise"] id="muon.descend" points=2 minutes=12 level=2 library="nanochat_lib.muon:descend"
def descend(u, params, lr, weight_decay, cautious=True):
    """What to add to params (K, R, N) float32, for an update u of the same shape; float32.

    η = lr and λ = weight_decay, the decay being η·λ·params, are rounded to u's dtype before they are used (u may be
    bfloat16). Without `cautious` every weight decays.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    rate = jnp.asarray(lr, u.dtype)
    decay = rate * jnp.asarray(weight_decay, u.dtype)
    agree = u.astype(jnp.float32) * params >= 0
    decayed = jnp.where(agree, params, 0.0) if cautious else params
    return -((rate * u).astype(jnp.float32) + decay.astype(jnp.float32) * decayed)
    # --- end


# %% id="muon.descend.check"
check("muon.descend", descend)

# %% tags=["hidden"] id="muon.descend.hidden"
hidden(
    "muon.descend",
    reference("no update, only decay", lambda rng: (jnp.zeros((4, 5)), public.normal(rng, 4, 5), 0.02, 0.28)),
    reference("no decay", lambda rng: (public.normal(rng, 4, 5), public.normal(rng, 4, 5), 0.02, 0.0)),
    reference(
        "bfloat16 updates",
        lambda rng: (public.normal(rng, 4, 5, dtype=jnp.bfloat16), public.normal(rng, 4, 5), 0.02, 0.2),
        dtype="float32",
    ),
)
mutant("muon.descend", "* params >= 0", "* params > 0", says="≥, not >")
mutant("muon.descend", "* params >= 0", "* params <= 0", says="wrong way round")
mutant(
    "muon.descend",
    "rate * jnp.asarray(weight_decay, u.dtype)",
    "jnp.asarray(weight_decay, u.dtype)",
    says="multiplied by the learning rate too",
)
mutant("muon.descend", "jnp.where(agree, params, 0.0) if cautious else params", "params", says="must leave out")
mutant("muon.descend", " if cautious else params", "", says="every weight")
mutant("muon.descend", "return -(", "return (", says="what is *added*")

# %% [markdown] id="assemble-look"
# ### Your Muon
#
# The parts make one step. Two scalings are left: after the iteration the Frobenius norm becomes $\sqrt{\min(R, N)}$,
# as if all singular values were exactly 1, and the rate of a tall matrix is multiplied by $\sqrt{R/N}$.

# %% id="assemble"
descend = mine("muon.descend")


def muon_step(grads, params, state, lr, momentum, weight_decay):
    """What to add to a stack (K, R, N), and the new (momentum, second)."""
    rows, columns = grads.shape[-2:]
    u, buffer = nesterov(grads, state.momentum, momentum)
    u = orthogonalise(equilibrate_rows(u))
    u = u * (min(rows, columns) ** 0.5 / jnp.maximum(frobenius(u), 1e-6))
    u, second = normalise_variance(u, state.second, 0.9)
    return descend(u, params, lr * max(1.0, rows / columns) ** 0.5, weight_decay), state._replace(
        momentum=buffer, second=second
    )


names = [f"transformer.h.{i}.mlp.c_fc.weight" for i in range(LAYERS)]
stack = jnp.stack([gradients[name][0] for name in names]), jnp.stack([params[name] for name in names])
zero = init_stack(LAYERS, G.shape)
ours, _ = jax.jit(muon_step)(*stack, zero, 0.02, 0.95, 0.1)
theirs, _ = jax.jit(update_stack)(*stack, zero, 0.02, 0.95, 0.1)
# Not one by one: where an update is 0 but for rounding, the cautious rule may fall either way.
apart = jnp.abs(ours - theirs) > 1e-4 * jnp.abs(theirs).max()
_ = about(100 * float(apart.mean()), 0.0, within=0.02, name="numbers that differ from the library's, %")

# %% [markdown] id="where-look"
# ## 5. Which parameters it may have
#
# Muon treats a matrix as a map from one space of features to another, in which no direction is special. A *table* is a
# matrix only by its shape: each row of an embedding belongs to one token. Tokens differ in frequency by orders of
# magnitude, and an update that makes everything equally strong moves a token seen once as far as one seen a thousand
# times. Tables, gates and scalars go to AdamW, whose step is made entry by entry.
#
# So route by **name**, never by rank.
#
# ### Exercise: who goes where

# %% id="where-names"
for name in sorted({**dict.fromkeys(ADAMW_NAMES), "value_embeds.1.weight": None}):
    print(f"{name:<28} {ADAMW_NAMES.get(name, 'value_embeds')}")
print("transformer.h.<layer>.<matrix>.weight goes to muon; its pattern is BLOCK:", BLOCK.pattern)


# %% tags=["exercise"] id="muon.group_of" points=2 minutes=8 level=1 library="nanochat_lib.optim:group_of"
def group_of(name):
    """ "muon" for the matrices of the blocks (BLOCK), "value_embeds" (VALUE_EMBEDDING), a group of ADAMW_NAMES, or ""."""
    # --- stub
    raise NotImplementedError
    # --- solution
    if BLOCK.fullmatch(name):
        return "muon"
    return "value_embeds" if VALUE_EMBEDDING.fullmatch(name) else ADAMW_NAMES.get(name, "")
    # --- end


# %% id="muon.group_of.check"
check("muon.group_of", group_of)

# %% tags=["hidden"] id="muon.group_of.hidden"
hidden(
    "muon.group_of",
    example("a deep layer", ("transformer.h.103.attn.c_proj.weight",), "muon"),
    example("longer than a name", ("transformer.h.0.mlp.c_fc.weight.scale",), ""),
    example("no number", ("value_embeds.x.weight",), ""),
)
mutant("muon.group_of", 'ADAMW_NAMES.get(name, "")', 'ADAMW_NAMES.get(name, "muon")', says="nobody knows")
mutant("muon.group_of", "BLOCK.fullmatch(name)", 'name.endswith(".weight")', says="a table is a matrix too")
mutant(
    "muon.group_of",
    "BLOCK.fullmatch(name)",
    'BLOCK.fullmatch(name) and "gate" not in name',
    says="the gates of the value embeddings",
)
mutant(
    "muon.group_of",
    "BLOCK.fullmatch(name)",
    'BLOCK.fullmatch(name) or "gate" in name',
    says="smear_gate.weight is no part",
)
mutant("muon.group_of", "BLOCK.fullmatch(name)", "BLOCK.match(name)", says="longer than a name")

# %% [markdown] id="q-where-look"
# A quick question, then what nanochat's own d12 looks like.

# %% id="q-where"
quiz("muon.q_where")

# %% id="where-groups"
from nanochat_lib.presets import OptimConfig

group_of = mine("muon.group_of")
d12 = GPTConfig()
C, V, gates = d12.n_embd, d12.padded_vocab_size, (d12.n_kv_head, d12.gate_channels)
shapes = {"transformer.wte.weight": (V, C), "lm_head.weight": (V, C), "resid_lambdas": (12,), "x0_lambdas": (12,)}
shapes |= {"smear_gate.weight": (1, 24), "smear_lambda": (1,), "backout_lambda": (1,)}
for i in range(d12.n_layer):
    block = {"attn.c_q": (C, C), "attn.c_k": (C, C), "attn.c_v": (C, C), "attn.c_proj": (C, C)}
    block |= {"mlp.c_fc": (4 * C, C), "mlp.c_proj": (C, 4 * C)}
    if d12.has_value_embedding(i):
        block["attn.ve_gate"] = gates
        shapes[f"value_embeds.{i}.weight"] = (V, C)
    shapes |= {f"transformer.h.{i}.{name}.weight": shape for name, shape in block.items()}
print(f"{'group':<14} {'kind':<6} {'members':>7} {'parameters':>12} {'rate':>8}")
for group in param_groups(d12, OptimConfig(), shapes):
    assert {group_of(name) for name in group.params} == {"muon" if group.kind == "muon" else group.name}
    size = sum(math.prod(shapes[name]) for name in group.params)
    print(f"{group.name:<14} {group.kind:<6} {len(group.params):>7} {size:>12,} {group.lr:>8.4f}")

# %% [markdown] id="transfer-look"
# ## 6. A learning rate that travels
#
# ### To another width
#
# A Muon step of rate η changes every matrix by about η in each direction, whatever its size. So the change of a
# layer's *output*, relative to its input, is the same at width 64 and at width 1536, and so is the best rate: nanochat
# uses 0.02 at every width. An AdamW step changes every *entry* by about η, and entries that agree add up over the
# width: its best rate falls as the width grows (Yang et al. 2022, arXiv:2203.03466). The tables, still with AdamW, get
# rates that follow $1/\sqrt{\text{width}}$.
#
# Below, the matrices' rate is swept at several widths. All else is equal.

# %% id="width"
ROUTES = {"muon": group_of, "adamw": adamw_everywhere}
data = batches(STEPS, 256)
for kind, route in ROUTES.items():
    for width in WIDTHS:
        if (kind, width) not in runs:
            runs[kind, width] = sweep(width, route, muon_step, RATES[kind], data)

# %% tags=["slide"] id="width-plot"
fig, axes = new_figure(1, 2, height=2.9, sharey=True)
for ax, kind, title in zip(axes, ROUTES, ("Muon", "AdamW on the matrices"), strict=True):
    for width, colour, marker in zip(WIDTHS, (SKY, BLUE, GREEN), "os^", strict=False):
        final = last(runs[kind, width][0])
        ax.semilogx(RATES[kind], final, color=colour, marker=marker, markersize=4, label=f"width {width}")
        ax.plot(RATES[kind][final.argmin()], final.min(), marker="o", markersize=11, color=colour, fillstyle="none")
    label(ax, title, "learning rate of the matrices", "last losses (nats a byte)" if ax is axes[0] else "")
    ax.set_xticks(RATES[kind], [f"{rate:g}" for rate in RATES[kind]])
show(fig, alt="Last loss over learning rate at several widths, for Muon and AdamW; rings mark the best rates.")

# %% [markdown] id="width-explain"
# With Muon 0.02 is a good rate at each of the three widths, and it is the one that nanochat uses at 768 and 1536.
# AdamW's best rate at widths 32 and 64 is 0.004. At 128 the same rate costs 0.6 nats, and the best one is half of it.

# %% id="width-best"
if not fast():

    def excess(kind, width, rate):
        """How far a rate's last loss is above the best of its sweep."""
        final = last(runs[kind, width][0])
        return final[np.abs(RATES[kind] - rate).argmin()] - final.min()

    for width in WIDTHS:
        about(excess("muon", width, 0.02), 0.0, within=0.1, name=f"nats lost with Muon's 0.02 at width {width}")
    about(excess("adamw", 64, 0.004), 0.0, within=0.1, name="nats lost with AdamW's 0.004 at width 64")
    about(excess("adamw", 128, 0.004), 0.6, within=0.4, name="nats lost with AdamW's 0.004 at width 128")

# %% [markdown] id="batch-look"
# ### To another batch and length
#
# A larger batch has a cleaner gradient and may take larger steps: rates follow $\sqrt{B}$. nanochat tunes everything
# on its d12 at $2^{19}$ = 524,288 tokens a step and multiplies. The weight decay must move too, or a long run would
# forget more than a short one: what a weight remembers is set by
#
# $$ \frac{B}{\eta\,\lambda\,D} , \qquad D \text{ the tokens of the whole run,} $$
#
# which is kept (Wang and Aitchison 2024, arXiv:2405.13698).
#
# ### Exercise: the two factors


# %% tags=["exercise"] id="muon.transfer_scales" points=2 minutes=10 level=2 library="nanochat_lib.sizing:transfer_scales"
def transfer_scales(batch_tokens, tokens, reference_tokens):
    """(factor on every learning rate, factor on Muon's decay), from a run of REFERENCE_BATCH and reference_tokens to
    one of batch_tokens a step and `tokens` in all."""
    # --- stub
    raise NotImplementedError
    # --- solution
    scale = math.sqrt(batch_tokens / REFERENCE_BATCH)
    return scale, scale * reference_tokens / tokens
    # --- end


# %% id="muon.transfer_scales.check"
check("muon.transfer_scales", transfer_scales)

# %% tags=["hidden"] id="muon.transfer_scales.hidden"
hidden(
    "muon.transfer_scales",
    example("a quarter of the batch", (2**17, 1e9, 1e9), (0.5, 0.5)),
    reference("more random runs", public.batch_of),
)
mutant(
    "muon.transfer_scales",
    "scale * reference_tokens / tokens",
    "reference_tokens / tokens",
    says="depends on the batch as well",
)
mutant(
    "muon.transfer_scales",
    "scale * reference_tokens / tokens",
    "scale * tokens / reference_tokens",
    says="shrink in a longer run",
)
mutant(
    "muon.transfer_scales",
    "scale * reference_tokens / tokens",
    "scale**2 * reference_tokens / tokens",
    says="the rate itself stands in the constant",
)
mutant("muon.transfer_scales", "return scale,", "return scale**2,", says="root of the batch")

# %% [markdown] id="batch-run-look"
# Does the square root hold for our model? Three batches, the same number of steps, Muon at each rate.

# %% id="batch-run"
transfer_scales = mine("muon.transfer_scales")
BATCHES = (256,) if fast() else (64, 256, 1024)
by_batch = {
    rows: runs["muon", 64] if rows == 256 else sweep(64, group_of, muon_step, RATES["muon"], batches(STEPS, rows))
    for rows in BATCHES
}
fig, ax = new_figure(height=2.8)
for (rows, (found, *_)), colour, marker in zip(by_batch.items(), (ORANGE, BLUE, GREEN), "os^", strict=False):
    final = last(found)
    ax.semilogx(RATES["muon"], final, color=colour, marker=marker, markersize=4, label=f"{rows} bytes a step")
    ax.plot(RATES["muon"][final.argmin()], final.min(), marker="o", markersize=11, color=colour, fillstyle="none")
label(ax, "Muon at width 64 with other batches", "learning rate", "last losses (nats a byte)")
ax.set_xticks(RATES["muon"], [f"{rate:g}" for rate in RATES["muon"]])
show(fig, alt="Last loss over learning rate for three batch sizes; rings mark the best rates.")
for depth, batch, tokens in ((12, 2**19, 1.0), (24, 2**20, 4.0)):
    rate, decay = transfer_scales(batch, tokens, 1.0)
    print(f"d{depth}: batch {batch:>9,}, {tokens:.0f} × the tokens: rates × {rate:.3f}, Muon's decay × {decay:.3f}")

# %% [markdown] id="batch-explain"
# The larger the batch, the further to the right lies the bottom, as it should. But with so few steps the valley is
# flat above 0.02. This model can show the direction of the rule, not the exponent ½. That
# one is nanochat's measurement at real sizes; a small proxy would not have found it.

# %% [markdown] id="duel-look"
# ## 7. Muon against AdamW
#
# Per step, and per second: an optimiser that wins by step may lose by the clock. Both at their best rate of section 6;
# the tables have AdamW in both. Time is measured on this machine, in steps of AdamW.

# %% tags=["slide"] id="duel"
curves, seconds = {}, {"muon": math.inf, "adamw": math.inf}
for _ in range(1 if fast() else 2):  # one after the other, so that whatever else the machine does meets both
    for kind in ROUTES:
        losses, _, compiled = runs[kind, 64]
        began = time.perf_counter()
        jax.block_until_ready(compiled(RATES[kind], data))
        seconds[kind] = min(seconds[kind], time.perf_counter() - began)
        curves[kind] = losses[last(losses).argmin()]
slower = seconds["muon"] / seconds["adamw"]
window = max(STEPS // 30, 2)
smooth = {kind: np.convolve(found, np.ones(window) / window, "valid") for kind, found in curves.items()}
fig, axes = new_figure(1, 2, height=2.8, sharey=True)
for kind, colour, name, cost in (("adamw", ORANGE, "AdamW", 1.0), ("muon", BLUE, "Muon", slower)):
    at = np.arange(len(smooth[kind])) + window
    axes[0].plot(at, smooth[kind], color=colour, label=name)
    axes[1].plot(at * cost, smooth[kind], color=colour, label=name)
label(axes[0], "Per step", "step", "loss (nats a byte)")
label(axes[1], "Per second", "time, in steps of AdamW", "")
show(
    fig,
    alt="Loss of Muon and AdamW over steps and over time; Muon is below per step, and each of its steps takes longer.",
)
if not fast():
    reached = int(np.argmax(smooth["muon"] <= smooth["adamw"][-1])) + window
    about(reached, 73, within=15, name=f"steps until Muon is where AdamW ends, after {STEPS}")
show(volatile(f"a Muon step took {slower:.2f} times as long as an AdamW step, in this run on this machine"))

# %% [markdown] id="duel-explain"
# Muon needs about half of AdamW's steps to reach the same loss. Each of its steps costs more. How
# much more is written above for your machine; runs on a shared machine with two cores gave anything from 1.3 to 2.3.
# Below 2, Muon wins by the clock as well; above, it loses here in spite of its better steps. But 256 bytes a step is
# tiny. The next section counts why that matters.
#
# Look at the start, too: AdamW sits on a plateau at 3.4 nats, which is what byte frequencies alone give. Its first
# steps move every entry by the same amount, which is again a step in few directions.

# %% [markdown] id="cost-look"
# ## 8. What it costs
#
# The iteration is made once a *step*, whatever the batch; the model's own work grows with every token. So the share
# depends on the tokens that a device sees between two updates.
#
# ### Exercise: FLOPs of the iteration
#
# A product of an (i, k) and a (k, j) matrix takes $2ikj$ FLOPs. Count the matrix products only.


# %% tags=["exercise"] id="muon.orthogonal_flops" points=2 minutes=10 level=2
def orthogonal_flops(rows, columns, steps=5):
    """FLOPs of the matrix products in `steps` polynomial steps on one (rows, columns) matrix, as an int."""
    # --- stub
    raise NotImplementedError
    # --- solution
    m, longer = sorted((rows, columns))
    gram = 2 * m * longer * m
    square = 2 * m**3
    return steps * (gram + square + gram)
    # --- end


# %% id="muon.orthogonal_flops.check"
check("muon.orthogonal_flops", orthogonal_flops)

# %% tags=["hidden"] id="muon.orthogonal_flops.hidden"
hidden(
    "muon.orthogonal_flops",
    reference("wide", lambda rng: (int(rng.integers(2, 90)), 97, 3), against=public.orthogonal_flops),
    prop("square, as compiled", lambda rng: (64, 64, 1), public.near_compiler),
    example("five steps unless told otherwise", (4, 8), 3200),
)
mutant("muon.orthogonal_flops", "gram + square + gram", "gram + gram", says="squared is missing")
mutant("muon.orthogonal_flops", "gram + square + gram", "gram + square", says="with X itself, is missing")
mutant(
    "muon.orthogonal_flops",
    "m, longer = sorted((rows, columns))",
    "longer, m = sorted((rows, columns))",
    says="long side",
)
mutant("muon.orthogonal_flops", "return steps * (", "return (", says="multiply by steps")
mutant(
    "muon.orthogonal_flops",
    "return steps * (gram + square + gram)",
    "return steps * (gram + square + gram) // 2",
    says="two FLOPs",
)

# %% [markdown] id="cost-run-look"
# For a square matrix of width C that is $30\,C^3$ in five steps. The training itself needs $6\,C^2$ for each token
# (forward and backward). The share of Muon is then $5C / \text{tokens}$, tokens counted between two updates **on one
# device**. For a 4C × C matrix of the MLP it is a little less: $90\,C^3$ to $24\,C^2$. In our duel, with 256 bytes,
# it was 69 %; real runs see hundreds of thousands of tokens.

# %% tags=["slide"] id="cost-run"
orthogonal_flops = mine("muon.orthogonal_flops")


def muon_flops(config):
    """FLOPs of Muon's iterations in one step, every matrix of the blocks once."""
    c, kv = config.n_embd, config.n_kv_head * config.head_dim
    shapes = [(c, c), (c, c), (kv, c), (kv, c), (4 * c, c), (c, 4 * c)]
    return config.n_layer * sum(orthogonal_flops(*shape) for shape in shapes)


MODELS = {  # name: configuration, tokens of a step, devices
    "d12": (GPTConfig(), 2**19, 8),
    "d24": (GPTConfig(n_layer=24, n_embd=1536, n_head=12, n_kv_head=12), 2**20, 8),
    "3.8B": (
        GPTConfig(n_layer=28, n_embd=3072, n_head=24, n_kv_head=8, vocab_size=50304, window_pattern="L"),
        1280 * 2048,
        8,
    ),
}
iteration = LAYERS * (orthogonal_flops(128, 64) + orthogonal_flops(64, 128))
weights = LAYERS * 2 * 128 * 64 + 256 * 64  # the matrices and the head of our model at width 64
own_share = 100 * iteration / (6 * weights * 256)
if not fast():
    about(own_share, 69, within=1, name="% more FLOPs in a Muon step of section 7")
tokens = np.geomspace(2**10, 2**20, 60)
fig, ax = new_figure(height=2.9)
for (name, (config, batch, devices)), colour in zip(MODELS.items(), (SKY, BLUE, ORANGE), strict=True):
    per_token = flops_per_token(config)
    ax.loglog(tokens, 100 * muon_flops(config) / (per_token * tokens), color=colour, label=name)
    share = 100 * muon_flops(config) / (per_token * batch / devices)
    ax.plot(batch / devices, share, "o", color=colour)
    print(f"{name:>5}: {batch // devices:>9,} tokens a device and step, Muon on every device adds {share:.1f} % FLOPs")
label(ax, "Muon's FLOPs, in % of the model's own", "tokens on one device between two updates", "%")
ax.set_xticks([1024 * 4**k for k in range(6)], ["1k", "4k", "16k", "64k", "256k", "1M"])
show(fig, alt="Share of Muon's FLOPs falls with the tokens on a device; dots mark real runs at 2 to 4 percent.")

# %% [markdown] tags=["slide"] id="field-look"
# ## 9. Field lesson: eight devices, one result
#
# A public run trained the 3.8B model above on eight GPUs with plain data parallelism: each device holds all weights,
# gets its own rows, gradients are averaged, and then **each device makes the same update**. Nothing is wrong with the
# numbers. But every device orthogonalises all 168 matrices, and seven of eight do it for nothing. The run's notes:
# Muon made a step about 25 % slower, about 4 % when the step was spread over 7 accumulated micro-batches; sharding the
# work was not tried. The run took 43 hours and 998 dollars.
#
# Can we get those two numbers from an exercise about matrix products? Guess the second: `predict("muon.p_share", …)`.

# %% id="field-predict"
predict("muon.p_share")

# %% id="field"
config, batch, devices = MODELS["3.8B"]
own = flops_per_token(config) * batch / devices
share = 100 * muon_flops(config) / own
reveal("muon.p_share", round(share, 1))
about(share, 3.0, within=0.2, name="% more FLOPs with 7 micro-batches a step (the run: about 4)")
about(7 * share, 21, within=2, name="% more with one micro-batch a step (the run: about 25)")
about(share / 8, 0.4, within=0.1, name="% when the matrices are dealt out to 8 devices")
print(
    f"of 43 hours: {43 * share / (100 + share):.1f} hours of Muon, {43 * share / (100 + share) * 7 / 8:.1f} of them wasted"
)

# %% [markdown] id="field-explain"
# FLOPs alone explain most of what was measured, as if both kinds of products ran equally fast. More than an hour of
# eight GPUs, some 30 dollars of the bill, bought nothing.
#
# The cure: **deal the matrices out.** Gradients have to be averaged over the devices anyway. So average each matrix
# only *on* the device that owns it (reduce-scatter), orthogonalise it there, and send the finished update to all
# (all-gather). Together the two move as many bytes as the all-reduce did. Momentum then also lives on one device only.
# This library does so in `update_dealt`; a stack of K matrices on n devices is filled up with zeros to
# $\lceil K/n \rceil$ for each.
#
# Eight devices can be had on a laptop: XLA splits the CPU. A second process compiles the same step both ways and
# lets the compiler count what *one* device does.

# %% id="devices"
PROGRAM = """
import jax, json
from functools import partial
from jax.sharding import NamedSharding, PartitionSpec as P
from nanochat_lib.muon import init_stack, update_stack
from nanochat_lib.optim import update_dealt
from nanochat_lib.sharding import make_mesh

mesh, counts = make_mesh(), {}
for count in (16, 12):
    matrix = jax.ShapeDtypeStruct((count, 256, 64), "float32")
    state = jax.eval_shape(lambda: init_stack(count, (256, 64)))
    same = NamedSharding(mesh, P())
    step = {"every device": update_stack, "dealt": partial(update_dealt, mesh)}
    for name, fn in step.items():
        whole = lambda g, p, s: fn(g, p, s, 0.02, 0.95, 0.1)
        compiled = jax.jit(whole, in_shardings=same, out_shardings=same).lower(matrix, matrix, state).compile()
        counts[f"{count} {name}"] = compiled.cost_analysis()["flops"]
print(json.dumps(counts))
"""
import json

if fast():
    print("(left out in fast mode: it starts a second process)")
else:
    env = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=env, capture_output=True, text=True, check=True)
    counts = json.loads(done.stdout.splitlines()[-1])
    for count in (16, 12):
        ratio = counts[f"{count} every device"] / counts[f"{count} dealt"]
        expected = count / math.ceil(count / 8)
        about(ratio, expected, within="10%", name=f"times fewer FLOPs a device, {count} matrices dealt to 8")

# %% [markdown] id="devices-explain"
# Sixteen matrices: two each, an eighth of the work. Twelve: still two for the busiest device, so only a sixth. That is
# why stacks of one shape are kept together, over all layers: the longer the stack, the less is lost to rounding up.

# %% [markdown] id="written"
# **In your own words.** Why is it good for a matrix of the blocks that all its directions move equally, and why would
# the same be bad for the embedding table? Three or four sentences. (In a class your instructor reads them; alone,
# compare with sections 1 and 5.)

# %% [markdown] id="muon.why_not_tables"
# *Write your answer here, in place of this line.*

# %% [markdown] tags=["slide"] id="takeaway"
# > **Takeaway.** A gradient moves a few directions of a matrix; Muon moves all of them equally, with five polynomial
# > steps made of matrix products. It gets the blocks' matrices, by name; tables and scalars keep AdamW. Its rate
# > travels over widths unchanged and with $\sqrt{B}$ over batches. It costs about $5C$ divided by the tokens on a device
# > in FLOPs: under a few percent in a real run, and an n-th of that when n devices deal the matrices out.

# %% [markdown] id="simplified"
# ## What was simplified
#
# - The model has no attention and 2C wide MLPs; nanochat's has both kinds of matrices, and its iteration runs in
#   bfloat16 where the model does. The real step is `update_stack` in `nanochat_lib/muon.py`; this chapter's
#   `muon_step` leaves out its guard against overflow in huge gradients and its switches for older recipes.
# - Momentum, rate and decay follow schedules (`nanochat_lib/schedules.py`): the momentum rises from 0.85 to 0.97 over
#   400 steps, the decay falls to zero. Here they stood still.
# - Groups, AdamW and the dealing of matrices to devices: `param_groups`, `adamw_step` and `update_dealt` in
#   `nanochat_lib/optim.py`. Transfer to other sizes: `horizon` in `nanochat_lib/sizing.py`.
# - Both optimisers got one sweep of the matrices' rate, on one seed. A claim about optimisers needs more: several
#   seeds, every hyper-parameter of both tuned, at the size that counts.
