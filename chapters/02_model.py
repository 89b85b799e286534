# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] id="title" tags=["slide"]
# # The model: from ids to logits
#
# A nanochat of depth 12 holds 286 million numbers. How many of them are multiplied when it reads one token, and what
# does each of them do?
#
# When you are through, you can
#
# - write the whole forward pass, from token ids to logits, in about 25 lines,
# - say for each piece (norm, rotation, windows, gates, smear, backout, soft cap) what breaks without it,
# - count parameters and FLOPs of any depth by hand,
# - show that two programs compute the same model, and find out why when they do not.
#
# About 150 minutes: 130 for the nine exercises, 20 for the rest. Everything here runs on two CPU cores.

# %% id="setup" tags=["setup"]
import jax
import jax.numpy as jnp
import matplotlib
import numpy as np

from nanochat_lib import gpt
from nanochat_lib.attention import attention, rotary_table
from nanochat_lib.course import about, check, explore, fast, hint, mine, note, predict, quiz, reveal, show, undo  # noqa: F401
from nanochat_lib.layers import EPSILON, linear, relu_squared, split_heads
from nanochat_lib.report import strips
from nanochat_lib.report.plots import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, RED, SKY, STYLE, count_label, new_figure
from nanochat_lib.sizing import GPTConfig, scaling_params

matplotlib.rcParams.update(STYLE)
if fast():  # a run that only sees whether everything works: most of its time would be the compiler's
    jax.config.update("jax_disable_most_optimizations", True)


# %% [markdown] id="map" tags=["slide"]
# ## The map
#
# One token goes down this path. Shapes: B rows, T tokens, C channels, H heads of size D, V words, L layers.
#
# ```
# ids (B, T)
#   │  lookup in wte, norm
#   ▼
# x (B, T, C) ── smear: a little of the token before
#   │                         ┌─────────────── L times ────────────────┐
#   ├─ x0, kept               │ x = resid_lambda·x + x0_lambda·x0      │
#   ▼                         │ x = x + attention(norm(x))             │
# the residual stream ───────▶│ x = x + MLP(norm(x))                   │
#                             └──── the stream behind layer L//2 is kept
#   │  minus backout_lambda · the kept stream, norm
#   ▼
# logits (B, T, V) = 15·tanh(head(x) / 15)
# ```
#
# The *stream* x is the model's working memory: every block reads a normalised copy of it and adds something. Nothing
# is ever overwritten, only added and rescaled. You write the pieces first, then the path.

# %% [markdown] id="norm-title"
# ## 1. Norm
#
# Blocks add and add, so the stream grows. What reads it should see the same size every time. *RMSNorm* divides each
# position's vector by its root mean square:
#
# $$ \text{norm}(x) = \frac{x}{\sqrt{\frac{1}{C}\sum_c x_c^2 + \varepsilon}} $$
#
# nanochat's has no learned weight at all: the next matrix can do that scaling itself
# (Zhang & Sennrich, arXiv:1910.07467).

# %% id="model.norm" level=1 library="nanochat_lib.layers:norm" minutes=10 nbgrader={"cell_type": "code", "grade": false, "grade_id": "model-norm", "locked": false, "schema_version": 3, "solution": true, "task": false} points=1 tags=["exercise"]
def norm(x):
    """x (…, C) over the root mean square of its last axis. Float32 inside, x's dtype outside. Add EPSILON under the root."""
    raise NotImplementedError


# %% id="model.norm.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "model-norm-check", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
check("model.norm", norm)

# %% [markdown] id="norm-use"
# From here on the chapter uses your function if it passes, and the library's if not; the line below says which. Stuck?
# `hint("model.norm")` in a new cell helps in three steps; `undo("model.norm")` brings back the last version that passed.

# %% id="norm-use-code"
norm = mine("model.norm")
stream = jnp.array([[3.0, 4.0], [300.0, 400.0]])
print(norm(stream))


# %% [markdown] id="rotary-title"
# ## 2. Where am I? Rotary position embedding and its sign
#
# Attention compares a query with keys by a dot product. That product must know how *far apart* two tokens are.
# Rotary embedding (RoFormer, arXiv:2104.09864) turns pairs of channels by an angle that grows with the position t:
# pair j turns by $\theta_{t,j} = t \cdot 100000^{-2j/D}$. Two turned vectors then compare as if only their distance
# had been turned:
#
# $$ (R_t\, q) \cdot (R_s\, k) = q \cdot R_{s-t}\, k . $$
#
# Two conventions have to be known, since no shape betrays them. nanochat pairs channel j with channel $j + D/2$, not
# neighbours. And it turns by **minus** the angle:
#
# $$ y_1 = x_1 \cos\theta + x_2 \sin\theta, \qquad y_2 = -x_1 \sin\theta + x_2 \cos\theta . $$

# %% id="model.rotate" level=2 library="nanochat_lib.attention:rotate" minutes=15 nbgrader={"cell_type": "code", "grade": false, "grade_id": "model-rotate", "locked": false, "schema_version": 3, "solution": true, "task": false} points=2 tags=["exercise"]
def rotate(x, cos, sin):
    """Turns the pairs (x[j], x[j + D/2]) of the last axis by minus the angle. x (…, T, D); cos, sin (T, D/2)."""
    raise NotImplementedError


# %% id="model.rotate.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "model-rotate-check", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("model.rotate", rotate)

# %% id="rotary-look" tags=["slide"]
rotate = mine("model.rotate")
distance = np.arange(2048)
figure, (left, right) = new_figure(1, 2, height=2.7)
for base, colour in ((10_000.0, ORANGE), (100_000.0, BLUE)):
    cos, sin = rotary_table(2048, 128, base)
    turned = rotate(jnp.ones((2048, 128)), jnp.asarray(cos), jnp.asarray(sin))
    left.plot(distance, np.asarray(turned @ turned[0]) / 128, color=colour, lw=1, label=f"base {base:,.0f}")
    period = 2 * np.pi * base ** (np.arange(0, 128, 2) / 128)
    right.semilogy(period, color=colour, label=f"base {base:,.0f}")
right.yaxis.set_major_formatter(count_label)
right.minorticks_off()
right.axhline(2048, color=FAINT, ls=":")
right.text(63, 1500, "context: 2048", color=FAINT, fontsize=8.5, ha="right", va="top")
left.set(title="Score of two equal vectors", xlabel="distance in tokens", ylabel="score / score at distance 0")
right.set(title="Tokens for a full turn", xlabel="pair of channels j (D = 128)", ylabel="tokens")
left.legend(fontsize=8.5)
show(figure, alt="Left: the score of two equal vectors falls with their distance, slower with base 100,000. Right: fast "
     "pairs turn once in 6 tokens, the slowest in about 540,000.")  # fmt: skip

# %% [markdown] id="rotary-explain"
# Read the right picture first: the first pairs are fast clocks that tell neighbours apart, the last ones hardly move
# within the context and act as if there were no position at all. The left picture is their sum: near tokens match
# better than far ones before anything is learned. nanochat moved the base from 10,000 to 100,000 in 2026, which slows
# the slow clocks.

# %% [markdown] id="qknorm-title"
# ## 3. QK-norm: scores that cannot explode
#
# After the rotation, q and k are normalised over the head's D channels and multiplied by 1.2 each. A vector of D
# channels with root mean square 1 has length $\sqrt D$, so after the usual $1/\sqrt D$ no score can be larger than
# $1.2 \cdot 1.2 \cdot \sqrt D$: 16.3 for D = 128. Without it, weights that grow make attention look at exactly one
# token, and its gradient dies. The cell multiplies the weights and counts over how many of 64 keys attention spreads.

# %% id="qknorm-look"
draw = np.random.default_rng(0)
q, k = draw.standard_normal((2, 64, 128), np.float32)


def spread(q, k):
    """exp(entropy) of the attention weights: over how many keys they spread, 1 … 64."""
    weights = np.exp(np.asarray(q @ k.T) / 128**0.5)
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return np.exp(-np.sum(weights * np.log(weights + 1e-30), axis=-1)).mean()


print("weights times   keys without norm   keys with QK-norm")
for scale in (0.5, 1, 2, 4):
    print(
        f"{scale:>10}  {spread(scale * q, scale * k):>16.1f}  {spread(1.2 * norm(scale * q), 1.2 * norm(scale * k)):>17.1f}"
    )
limit = 1.2 * 1.2 * 128**0.5
_ = about(limit, 16.3, within=0.05, name="largest possible score at D = 128")

# %% id="qknorm-quiz"
quiz("model.q_order")


# %% [markdown] id="windows-title"
# ## 4. Windows: who sees whom
#
# A query may look at itself and at keys before it, never at later ones: they are what it must predict. nanochat also
# limits how far back: three layers of four are **S**hort, the fourth is **L**ong, and the last one is always long
# (pattern `SSSL`). With a context of 2048, S is 512. The window counts the keys *before* the query, so window w
# shows w + 1 keys.

# %% id="model.visible" level=1 library="nanochat_lib.attention:visible" minutes=10 nbgrader={"cell_type": "code", "grade": false, "grade_id": "model-visible", "locked": false, "schema_version": 3, "solution": true, "task": false} points=2 tags=["exercise"]
def visible(queries, keys, window):
    """Which keys each query sees: positions (…, Tq) and (Tk,) → booleans (…, Tq, Tk). True: not later, at most `window` before."""
    raise NotImplementedError


# %% id="model.visible.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "model-visible-check", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("model.visible", visible)

# %% id="windows-look" tags=["slide"]
visible = mine("model.visible")
config = GPTConfig()  # depth 12, context 2048
positions = jnp.arange(0, 2048, 8)
figure, axes = new_figure(1, 4, height=2.3)
for i, ax in enumerate(axes):
    ax.imshow(
        visible(positions, positions, config.windows[i]), cmap="Blues", extent=(0, 2048, 2048, 0), vmin=0, vmax=1.6
    )
    ax.set(title=f"layer {i}: {config.windows[i]}", xticks=(0, 2048), yticks=(0, 2048) if i == 0 else (), xlabel="key")
    ax.grid(visible=False)
axes[0].set_ylabel("query")
show(figure, alt="Four squares of queries against keys: in layers 0 to 2 a band of 512 below the diagonal, in layer 3 the "
     "whole triangle.")  # fmt: skip
seen = [float(visible(positions, positions, window).mean()) for window in config.windows]
_ = about(100 * sum(seen) / (config.n_layer * seen[3]), 58, within=1, name="% of a full triangle's work that d12 does")


# %% [markdown] id="windows-explain"
# Attention itself is then five lines: scores, mask, softmax, average. This is the formula, without any care for
# memory; chapter 03 is about doing it well. Query head h reads key/value head h // (H/K).

# %% id="attention-formula"
def attention_by_formula(q, k, v, window):
    """q (B, H, T, D), k and v (B, K, T, D) → (B, H, T, D)."""
    length, groups = q.shape[2], q.shape[1] // k.shape[1]
    k, v = jnp.repeat(k, groups, axis=1), jnp.repeat(v, groups, axis=1)
    scores = q @ k.swapaxes(-1, -2) / q.shape[-1] ** 0.5
    scores = jnp.where(visible(jnp.arange(length), jnp.arange(length), window), scores, -jnp.inf)
    return jax.nn.softmax(scores, axis=-1) @ v


q, k, v = (draw.standard_normal((1, heads, 20, 8), np.float32) for heads in (4, 2, 2))
formula, library = jax.jit(lambda *qkv: (attention_by_formula(*qkv, 6), attention(*qkv, window=6)))(q, k, v)
print("the formula and the library agree:", bool(abs(formula - library).max() < 1e-5))


# %% [markdown] id="values-title"
# ## 5. Value tables and their gates
#
# In every other layer, the last one included, each token brings a vector of its own straight into the values: a row
# of a table `value_embeds`, as large as the vocabulary. Attention can then copy *which word* stood somewhere without
# the layers below having to carry that through the stream. A gate a head decides how much:
#
# $$ v \leftarrow v + 3\,\sigma(x_{0 \ldots 11} W^\top) \cdot ve . $$
#
# The gate reads just 12 channels of the block's input. The table is a lookup, so it costs memory and almost no
# arithmetic. A public run of 3.8B parameters measured the gain: 19 % more parameters, no loss of speed, and the loss
# of step 14,000 already at step 12,500, worth about 1,200 of its 25,000 steps.

# %% id="model.gated_values" level=2 library="nanochat_lib.layers:gated_values" minutes=15 nbgrader={"cell_type": "code", "grade": false, "grade_id": "model-gated_values", "locked": false, "schema_version": 3, "solution": true, "task": false} points=2 tags=["exercise"]
def gated_values(v, ve, x, weight, factor):
    """v + gate · ve, with one gate for each head: factor · sigmoid of `linear` on the first n channels of x.

    v (B, K, T, D); ve (B, T, K·D); x (B, T, C); weight (K, n). `split_heads(a, D)` brings (B, T, K·D) to (B, K, T, D),
    `linear(a, weight)` multiplies (B, T, n) to (B, T, K).
    """
    raise NotImplementedError


# %% id="model.gated_values.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "model-gated_values-check", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("model.gated_values", gated_values)


# %% [markdown] id="mlp-title"
# ## 6. The MLP: relu²
#
# Attention moves information between positions; the MLP works on each position alone. It widens the stream to 4C,
# applies $\max(0, x)^2$ and comes back: $\text{relu}(x W_{fc}^\top)^2\, W_{proj}^\top$ (So et al., arXiv:2109.08668). There is no gate
# and no exponential. The square makes strong matches count more, exact zeros stay zeros, and the derivative
# $2\max(0, x)$ has no jump. A public run of 3.8B parameters went from 183,035 to 214,173 tokens a second in a test
# of relu² against the gated SwiGLU.

# %% [markdown] id="cap-title"
# ## 7. The soft cap
#
# The last piece is the smallest. Logits go through $15 \tanh(\text{logit} / 15)$: small ones stay what they are,
# none gets past ±15, and unlike with a clip the gradient never vanishes at once (Gemma 2, arXiv:2408.00118).

# %% id="model.softcap" level=1 library="nanochat_lib.layers:softcap" minutes=5 nbgrader={"cell_type": "code", "grade": false, "grade_id": "model-softcap", "locked": false, "schema_version": 3, "solution": true, "task": false} points=1 tags=["exercise"]
def softcap(logits, cap):
    """Squashes logits smoothly into −cap … cap; the result is float32, and small logits stay as they are."""
    raise NotImplementedError


# %% id="model.softcap.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "model-softcap-check", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
check("model.softcap", softcap)

# %% id="curves" tags=["slide"]
softcap = mine("model.softcap")
figure, (left, right) = new_figure(1, 2, height=2.5)
x = np.linspace(-2, 2, 201)
for name, f, colour, style in (
    ("relu²", relu_squared, BLUE, "-"),
    ("relu", jax.nn.relu, ORANGE, "--"),
    ("gelu", jax.nn.gelu, GREEN, ":"),
):
    left.plot(x, f(x), color=colour, ls=style, label=name)
left.set(title="What the MLP does to a channel", xlabel="input", ylabel="output")
x = np.linspace(-45, 45, 201)
right.plot(x, softcap(jnp.asarray(x), 15.0), color=BLUE, label="15·tanh(x/15)")
right.plot(x, np.clip(x, -15, 15), color=ORANGE, ls="--", label="hard clip")
right.plot(
    x, 15 * jax.vmap(jax.grad(lambda a: softcap(a, 15.0)))(x), color=FAINT, ls=":", label="slope of the soft cap × 15"
)
right.set(title="The soft cap", xlabel="logit", ylabel="capped logit")
for ax in (left, right):
    ax.legend(fontsize=8, loc="upper left")
right.set_ylim(-16, 38)
show(figure, alt="Left: relu² beside relu and gelu. Right: the soft cap bends smoothly to plus and minus 15, its slope "
     "falls to zero slowly; the hard clip has a corner.")  # fmt: skip


# %% [markdown] id="smear-title"
# ## 8. Smear, residual scalars, backout
#
# Three cheap tricks act on the stream itself. An automated search found smear and backout worth keeping after both had
# failed when they were tried by hand (nanochat's log, March 2026).
#
# - **Smear**: each position gets a gated copy of the token before, so that pairs of tokens are visible before the
# first attention. The gate reads the *current* token's first 24 channels; the copy is the *unsmeared* embedding.
# $$ x_t \leftarrow x_t + \lambda\,\sigma(w \cdot x_{t,\,0 \ldots 23})\; x_{t-1} $$
# - **Residual scalars**: before each layer $x \leftarrow \lambda^{resid}_i x + \lambda^{x0}_i x_0$. The first is about 1,
# the second lets each layer reach back to the embedding.
# - **Backout**: the stream in the middle, behind layer L // 2, times 0.2 at the start of training, is taken off at the
# end. What only the lower layers needed does not have to reach the head.

# %% id="model.smear" level=2 library="nanochat_lib.layers:smear" minutes=10 nbgrader={"cell_type": "code", "grade": false, "grade_id": "model-smear", "locked": false, "schema_version": 3, "solution": true, "task": false} points=2 tags=["exercise"]
def smear(x, previous, weight, strength):
    """x + strength · gate · previous, the gate a sigmoid of `linear` on the first n channels of x.

    x, previous (B, T, C) in one dtype, which the result keeps; weight (1, n); strength λ, float32 (1,).
    """
    raise NotImplementedError


# %% id="model.smear.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "model-smear-check", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("model.smear", smear)

# %% id="smear-quiz"
gated_values, smear = mine("model.gated_values"), mine("model.smear")
quiz("model.q_init")

# %% [markdown] id="forward-title"
# ## 9. The whole path
#
# Now put it together: ids in, logits out, all on a flat dict of weights with nanochat's own names. Weights are
# `[out, in]`, so a layer is `linear(x, weight)`. The names:
#
# | name | shape | name | shape |
# |---|---|---|---|
# | `transformer.wte.weight` | (V, C) | `resid_lambdas`, `x0_lambdas` | (L,) |
# | `transformer.h.{i}.attn.c_q.weight` | (C, C) | `smear_gate.weight` | (1, 24) |
# | `transformer.h.{i}.attn.c_k.weight`, `c_v` | (K·D, C) | `smear_lambda`, `backout_lambda` | (1,) |
# | `transformer.h.{i}.attn.c_proj.weight` | (C, C) | `value_embeds.{i}.weight`, in some layers | (V, K·D) |
# | `transformer.h.{i}.mlp.c_fc.weight` | (4C, C) | `transformer.h.{i}.attn.ve_gate.weight`, in these | (K, 12) |
# | `transformer.h.{i}.mlp.c_proj.weight` | (C, 4C) | `lm_head.weight` | (V, C) |
#
# `config` knows `n_layer`, `head_dim`, `windows`, `vocab_size` and `has_value_embedding(i)`. The tables have more
# rows than the vocabulary: V is rounded up to a multiple of 64. Constants: rotary base 100,000, gate factor 3,
# q and k times 1.2, soft cap 15. `attention(q, k, v, window=…)` is the library's.
#
# On the way, show your stations to the check: `note(name, value)` with the names *smeared embedding*; *layer 0, q*,
# *layer 0, k*, *layer 0, v* (as they go into the attention) and *stream after layer 0*, the same for every layer; *what
# the head reads*. Notes do nothing by themselves, but the check can then name the **first** station that is wrong.

# %% id="padding-quiz"
quiz("model.q_padding")


# %% id="model.forward" level=3 minutes=40 nbgrader={"cell_type": "code", "grade": false, "grade_id": "model-forward", "locked": false, "schema_version": 3, "solution": true, "task": false} points=5 tags=["exercise"]
def forward(config, params, ids):
    """Logits (B, T, vocab_size), float32, of token ids (B, T)."""
    raise NotImplementedError


# %% id="model.forward.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "model-forward-check", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
check("model.forward", forward)

# %% [markdown] id="count-title"
# ## 10. Counting parameters
#
# You know every matrix now, so count them. Groups: `wte`, `value_embeds`, `lm_head` (padded tables),
# `transformer_matrices` (everything in the blocks, the value gates too), `scalars` (the λ, and the smear's gate of 24
# weights), `total`.
#
# First a guess. Tables are only looked up; matrices are multiplied.

# %% id="tables-predict"
predict("model.p_tables")


# %% id="model.count_params" level=2 library="nanochat_lib.sizing:count_params" minutes=15 nbgrader={"cell_type": "code", "grade": false, "grade_id": "model-count_params", "locked": false, "schema_version": 3, "solution": true, "task": false} points=2 tags=["exercise"]
def count_params(config):
    """Parameters by group, as a dict with the six keys above.

    config has n_layer, n_embd, n_kv_head, head_dim, padded_vocab_size, gate_channels (of a value gate), smear_channels,
    value_embedding_layers (a tuple) and recipe; only the recipe "head" has smear and backout.
    """
    raise NotImplementedError


# %% id="model.count_params.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "model-count_params-check", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("model.count_params", count_params)

# %% id="tables-reveal"
count_params = mine("model.count_params")
counts = count_params(GPTConfig())
looked_up = counts["wte"] + counts["value_embeds"]
reveal("model.p_tables", 100 * looked_up / counts["total"])
_ = about(100 * looked_up / counts["total"], 61.5, within=0.1, name="% of d12 that is only looked up")


# %% [markdown] id="flops-title"
# ## 11. Counting FLOPs
#
# A matrix weight costs one multiplication and one addition for each token: 2 FLOPs forward. The backward pass needs
# the gradient of the input and of the weight: 4 more. So training costs **6 FLOPs a weight and token**. Attention has
# two products of its own, q·k and weights·v; each costs 2 · H·D for a visible key, again three times with the backward
# pass: **12 · H·D a visible key**. Lookups cost nothing.
#
# `scaling_params(config)` gives the matrices of the blocks and the head together.

# %% id="model.flops_per_token" level=2 library="nanochat_lib.sizing:flops_per_token" minutes=15 nbgrader={"cell_type": "code", "grade": false, "grade_id": "model-flops_per_token", "locked": false, "schema_version": 3, "solution": true, "task": false} points=2 tags=["exercise"]
def flops_per_token(config):
    """Training FLOPs a token, forward and backward. A layer sees min(window, sequence_len) keys; smear has 24 weights."""
    raise NotImplementedError


# %% id="model.flops_per_token.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "model-flops_per_token-check", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("model.flops_per_token", flops_per_token)

# %% id="count-look" tags=["slide"]
flops_per_token = mine("model.flops_per_token")
width_from_depth = mine("start.width_from_depth")  # from chapter 00: yours, if it passed there
depths = (4, 8, 12, 16, 20, 24, 32)
models = [
    GPTConfig(n_layer=d, n_embd=width_from_depth(d)[0], n_head=width_from_depth(d)[1], n_kv_head=width_from_depth(d)[1])
    for d in depths
]
figure, (left, right) = new_figure(1, 2, height=3.3)
bottom = np.zeros(len(depths))
for name, colour in (("transformer_matrices", BLUE), ("lm_head", SKY), ("wte", ORANGE), ("value_embeds", PURPLE)):
    share = np.array([100 * count_params(c)[name] / count_params(c)["total"] for c in models])
    left.bar(range(len(depths)), share, bottom=bottom, color=colour, label=name)
    bottom += share
left.set(title="Where the parameters are", ylabel="% of all", xlabel="depth", ylim=(0, 100))
matrix = np.array([6 * scaling_params(c) for c in models], float)
whole = np.array([flops_per_token(c) for c in models], float)
right.bar(range(len(depths)), 100 * matrix / whole, color=BLUE, label="matrices")
right.bar(
    range(len(depths)), 100 * (1 - matrix / whole), bottom=100 * matrix / whole, color=RED, label="attention's products"
)
right.set(title="Where the FLOPs are", ylabel="% of all", xlabel="depth", ylim=(0, 100))
for ax in (left, right):
    ax.set_xticks(range(len(depths)), depths)
    ax.legend(fontsize=8, loc="upper center", bbox_to_anchor=(0.5, -0.22), ncols=2)
show(figure, alt="Left: at depth 4 two thirds of the parameters are tables, at depth 32 two fifths. Right: attention's own "
     "products take about 13 % of the FLOPs at depth 12 and less at larger depths.")  # fmt: skip
print(f"d12: {flops_per_token(models[2]):,} FLOPs a token, d24: {flops_per_token(models[5]):,}")
_ = about(100 * (1 - matrix[2] / whole[2]), 13.0, within=0.2, name="% of d12's FLOPs in attention's products")

# %% [markdown] id="count-answer" tags=["slide"]
# That answers the question at the top. d12 reads a token with 110 million multiplied weights out of 286 million; the
# other 176 million wait in tables, of which one row each is read. Training costs $7.6 \cdot 10^8$ FLOPs a token.
#
# **Why it pays to count by hand.** nanochat's own counter walks over the model's linear layers. When training switched
# to 8-bit floats, these layers became another class, the walk no longer found them, and the log of d12 reported
# $9.909 \cdot 10^7$ FLOPs a token. What was left is the attention term alone:

# %% id="count-defect"
reported = sum(12 * models[2].n_embd * window for window in models[2].windows)
print(f"the log said {reported:,}, the truth is {flops_per_token(models[2]):,}")
_ = about(flops_per_token(models[2]) / reported, 7.67, within=0.02, name="times too small")

# %% [markdown] id="count-defect-cost"
# A run that is told to stop after a given number of FLOPs would have gone on 7.67 times too long. It would have cost
# 7.67 times as much. And its utilisation (MFU) would have read 6 % instead of 47 %.

# %% [markdown] id="train-title"
# ## 12. A small model to look at
#
# To look inside, we need a trained model: three layers of 64 channels, trained with *your* `forward` on the course's
# invented world (short stories and facts about people, towns and pets). Plain Adam does it here; Muon is chapter 05,
# real data are chapter 04. The initial weights are nanochat's: zeros where a block writes into the stream, a small head,
# everything else of the size that keeps a vector's length. The result is kept in the course's state folder, so the cell
# is fast the second time.

# %% id="train" tags=["slide"]
import optax

from nanochat_lib.course import state
from nanochat_lib.losses import cross_entropy
from nanochat_lib.primer.documents import world_documents
from nanochat_lib.primer.world import World
from nanochat_lib.tokenizer import Tokenizer

forward = mine("model.forward")
documents = world_documents(World(0), 600_000)
tokenizer = Tokenizer.train(documents, 512)
stream = np.concatenate([tokenizer.encode(document, prepend=tokenizer.bos_id) for document in documents])
rows = stream[: len(stream) // 65 * 65].reshape(-1, 65)  # 64 tokens, and the one after each
held_out, rows = rows[:64], rows[64:]
layers = 2 if fast() else 3
small = GPTConfig(
    sequence_len=64, vocab_size=512, n_layer=layers, n_head=4, n_kv_head=4, n_embd=64, window_pattern="L"
)  # fmt: skip
steps = 12 if fast() else 600
optimizer = optax.adam(optax.linear_schedule(6e-3, 3e-4, steps))


def initial(rng):
    """Fresh weights by name, as nanochat draws them."""
    depth, bound = np.arange(layers) / (layers - 1), (3 / small.n_embd) ** 0.5  # uniform ±bound has deviation 1/√C
    scalars = {
        "resid_lambdas": 1.15 - 0.1 * depth,
        "x0_lambdas": 0.2 - 0.15 * depth,
        "smear_lambda": [0],
        "backout_lambda": [0.2],
    }
    tables = {"transformer.wte.weight": 0.8, "lm_head.weight": 0.001}  # standard deviations
    params = {}
    for name, shape in gpt.param_shapes(small).items():
        if name in scalars:
            value = scalars[name]
        elif name in tables:
            value = tables[name] * rng.standard_normal(shape)
        elif "gate" in name:
            value = rng.uniform(0, 0.02, shape)
        elif "c_proj" in name:
            value = np.zeros(shape)
        else:
            value = (0.4 if "c_fc" in name else 1) * rng.uniform(-bound, bound, shape)
        params[name] = jnp.asarray(value, jnp.float32)
    return params


def loss_of(params, batch):
    """Nats a token of rows (B, T + 1)."""
    total, count = cross_entropy(forward(small, params, batch[:, :-1]), batch[:, 1:])
    return total / count


@jax.jit
def train_step(params, moments, batch):
    loss, gradients = jax.value_and_grad(loss_of)(params, batch)
    updates, moments = optimizer.update(gradients, moments)
    return optax.apply_updates(params, updates), moments, loss


def trained():
    """(parameters, loss of each step): from the state folder, or trained now."""
    kept = state.folder() / "cache" / f"model-{small.n_layer}x{small.n_embd}-{steps}.npz"
    if kept.exists():
        arrays = dict(np.load(kept))
        return {name: jnp.asarray(a) for name, a in arrays.items() if name != "losses"}, arrays["losses"]
    params = initial(np.random.default_rng(0))
    moments, losses = optimizer.init(params), []
    order = np.random.default_rng(0).permutation(len(rows))
    for step in range(steps):
        params, moments, loss = train_step(
            params, moments, rows[order[np.arange(16 * step, 16 * step + 16) % len(rows)]]
        )
        losses.append(loss)
    kept.parent.mkdir(parents=True, exist_ok=True)
    np.savez(kept, losses=np.array(losses), **params)
    return params, np.array(losses)


params, losses = trained()
figure, ax = new_figure(height=2.3)
ax.plot(losses, color=BLUE, lw=1)
ax.axhline(np.log(small.vocab_size), color=FAINT, ls=":")
ax.text(steps - 1, np.log(small.vocab_size) + 0.15, "guessing: ln 512 = 6.24", ha="right", va="bottom", color=FAINT)
ax.set(title="Training the small model", xlabel="step", ylabel="nats per token", ylim=(0, 7.4))
show(figure, alt="The training loss falls from 6.2 nats, which is guessing, to about 1.3 over 600 steps.")
print(f"first step {losses[0]:.2f}, last steps {losses[-10:].mean():.1f} nats a token")

# %% [markdown] id="scalars-look"
# What has training done to the scalars? They started at 1.15 … 1.05 (resid), 0.20 … 0.05 (x0), 0 (smear), 0.2 (backout).

# %% id="scalars"
for name in ("resid_lambdas", "x0_lambdas", "smear_lambda", "backout_lambda"):
    print(f"{name:15}", " ".join(f"{value:6.2f}" for value in np.asarray(params[name])))

# %% [markdown] id="look-title"
# ## 13. Look inside
#
# Below, one layer's attention and the residual stream on a text of your choice. **Attention**: each row is a query, each
# column a key it looks at. **Stream**: behind each layer, what would the head say if the model ended here? That is the *logit
# lens*: apply the last norm and the head to the stream in the middle. Watch when the right word appears, and in which
# layer attention finds the earlier mention of a name.

# %% id="look" tags=["slide"]
from nanochat_lib.course import choice, slider, text


@jax.jit
def inside(params, ids):
    """(attention weights (L, H, T, T), logit lens (L + 1, T, V)) of ids (1, T)."""
    model, weights, streams = gpt.build(small, params), [], []
    table_rows = model.lookup(ids, jnp.float32)
    x = model.smear(norm(table_rows[gpt.WTE]), gpt.before(norm(table_rows[gpt.WTE])))
    streams.append(x)
    mask = visible(jnp.arange(ids.shape[1]), jnp.arange(ids.shape[1]), small.sequence_len)

    def attend(i, q, k, v):
        scores = jnp.where(mask, q @ k.swapaxes(-1, -2) / small.head_dim**0.5, -jnp.inf)
        weights.append(jax.nn.softmax(scores, axis=-1)[0])
        return weights[-1] @ v

    last = model.trunk(
        x, table_rows, model.rotation(ids.shape[1], jnp.float32), attend, watch=lambda i, x: streams.append(x)
    )
    lens = jnp.stack([model.logits(norm(x))[0] for x in streams[:-1]] + [model.logits(last)[0]])
    return jnp.stack(weights), lens


def draw_inside(prompt, layer, head):
    """Attention of one layer beside the logit lens of the last 12 tokens."""
    ids = tokenizer.encode(prompt or " ", prepend=tokenizer.bos_id)[:48]
    weights, lens = inside(params, jnp.asarray([ids + [tokenizer.bos_id] * (48 - len(ids))]))
    n, words = len(ids), ["bos", *(strips.visible(tokenizer.decode([i])) for i in ids[1:])]
    chosen = weights[layer].mean(0) if head == "mean of all" else weights[layer, int(head)]
    figure, (left, right) = new_figure(1, 2, height=4.3, width=9.5, width_ratios=(1, 1.25))
    left.imshow(np.asarray(chosen)[:n, :n] ** 0.5, cmap="Blues", vmin=0, vmax=1)
    left.set_xticks(range(n), words, rotation=90, fontsize=6.5)
    left.set_yticks(range(n), words, fontsize=6.5)
    left.set(xlabel="key", ylabel="query")
    left.set_title(f"Attention, layer {layer}, head: {head}")
    start = max(n - 12, 0)
    chance = np.asarray(jax.nn.softmax(lens, axis=-1))[:, start:n]
    right.imshow(chance.max(-1).T, cmap="Greens", vmin=0, vmax=1.3, aspect="auto")
    for row in range(n - start):
        for column in range(len(lens)):
            best = strips.visible(tokenizer.decode([int(chance[column, row].argmax())]))
            ink = "white" if chance[column, row].max() > 0.8 else INK
            right.text(column, row, best, ha="center", va="center", fontsize=8, color=ink)
    right.set_xticks(
        range(len(lens)), ["embedding", *(f"layer {i}" for i in range(len(lens) - 2)), "at the end"], fontsize=8
    )
    right.set_yticks(range(n - start), words[start:n], fontsize=8)
    right.set_title("Next token, read off the stream")
    for ax in (left, right):
        ax.grid(visible=False)
    return figure


world = World(0)
person = world.people[0]
town, pet = (fact for fact in world.facts if fact.person == person and fact.relation in ("town", "pet"))
explore(
    draw_inside,
    alt="Left: a triangle of attention weights, a query a row. Right: a table of tokens down and layers across, with the "
    "likeliest next token in each field, darker green where the model is surer.",
    prompt=text(f"{town.statement()} {pet.statement()} The home of {person} is in"),
    layer=slider(0, small.n_layer - 1, 1, 1),
    head=choice(["mean of all", "0", "1", "2", "3"], "mean of all"),
)

# %% [markdown] id="look-explain"
# Try the same text with each head of layer 0: some look at the token just before, some at the beginning of the text (`bos`),
# where a head parks its weight when it has nothing to say. In the right table, the embedding column knows
# frequent pairs only, and the last column is the model's answer.

# %% [markdown] id="twin-title"
# ## 14. The same weights in PyTorch
#
# nanochat is a PyTorch program. The library holds the model a second time, written in PyTorch from nanochat's
# description and sharing no line with the JAX one. If both give the same logits for the same weights, either both are
# right or both are wrong in the same way. How close will they come in float32?

# %% id="twin-predict"
predict("model.p_twin")

# %% id="twin"
import torch

from nanochat_lib import twin

ids = held_out[:4, :-1].astype(np.int32)
logits = np.asarray(jax.jit(forward, static_argnums=0)(small, params, jnp.asarray(ids)))
with torch.no_grad():
    twins = twin.build(small, params)(torch.from_numpy(ids).long()).numpy()
exponent = float(np.log10(np.abs(logits - twins).max()))
reveal("model.p_twin", round(exponent))
_ = about(exponent, -5.2, within=1.0, name="log10 of the largest difference")

# %% [markdown] id="twin-explain"
# The difference is a few times the spacing of float32 numbers near 10: two programs that add in another order. That is
# the yardstick for the next section: **1e-5 is rounding; 1e-1 is a mistake.**

# %% [markdown] id="lesson-title"
# ## Field lesson: the sign that trains but cannot load
#
# Suppose a port rotates by +θ, as the textbooks write it. Every shape is right. Trained from scratch, the port is
# exactly as good. Then it loads a published checkpoint. Guess what happens to the loss of the small model.

# %% id="sign-predict"
predict("model.p_sign")


# %% id="sign" tags=["slide"]
@jax.jit
def loss_turned(params, cos, sin):
    """Nats a held-out token when the model uses these rotary tables."""
    model = gpt.build(small, params)
    table_rows = model.lookup(jnp.asarray(held_out[:, :-1]), jnp.float32)
    x = norm(table_rows[gpt.WTE])

    def attend(i, q, k, v):
        return attention(q, k, v, window=small.windows[i])

    x = model.trunk(model.smear(x, gpt.before(x)), table_rows, (cos, sin), attend)
    total, count = cross_entropy(model.logits(x), jnp.asarray(held_out[:, 1:]))
    return total / count


def swap_halves(params):
    """The repair: exchange the two halves of every head's rows in c_q and c_k."""

    def swap(weight):
        return jnp.roll(weight.reshape(small.n_head, small.head_dim, -1), small.head_dim // 2, axis=1).reshape(
            weight.shape
        )

    return {name: swap(w) if ".c_q." in name or ".c_k." in name else w for name, w in params.items()}


cos, sin = (jnp.asarray(table) for table in rotary_table(64, small.head_dim, 100_000.0))
later = [jnp.asarray(table[36:]) for table in rotary_table(100, small.head_dim, 100_000.0)]
old = [jnp.asarray(table) for table in rotary_table(64, small.head_dim, 10_000.0)]
outcomes = {
    "right": loss_turned(params, cos, sin),
    "all positions + 36": loss_turned(params, *later),
    "base 10,000, as in March": loss_turned(params, *old),
    "no rotation": loss_turned(params, jnp.ones_like(cos), jnp.zeros_like(sin)),
    "sign flipped": loss_turned(params, cos, -sin),
    "sign flipped, halves swapped": loss_turned(swap_halves(params), cos, -sin),
}
outcomes = {name: float(loss) for name, loss in outcomes.items()}
reveal("model.p_sign", outcomes["sign flipped"])
figure, ax = new_figure(height=2.5)
colours = [GREEN if abs(loss - outcomes["right"]) < 1e-3 else RED for loss in outcomes.values()]
ax.barh(list(outcomes), list(outcomes.values()), color=colours, height=0.65)
for y, loss in enumerate(outcomes.values()):
    ax.text(loss, y, f" {loss:.2f}", va="center")
ax.invert_yaxis()
ax.set(
    title="One trained model, six rotations",
    xlabel="held-out loss, nats per token",
    xlim=(0, 1.15 * max(outcomes.values())),
)
show(figure, alt="Bars of the held-out loss: the right rotation, shifted positions and the repaired flip are equally low; "
     "another base is a little higher; no rotation at all and the flipped sign are far higher.")  # fmt: skip
same = abs(outcomes["right"] - outcomes["all positions + 36"]) < 1e-3
repaired = abs(outcomes["right"] - outcomes["sign flipped, halves swapped"]) < 1e-3
print(f"shifting every position changes nothing: {same}; swapping halves repairs the flip: {repaired}")
if not fast():
    about(outcomes["right"], 1.3, within=0.2, name="right, nats a token")
    about(outcomes["sign flipped"], 1.8, within=0.3, name="sign flipped, nats a token")
    calm = np.convolve(losses, np.ones(10) / 10, "valid")  # mean of ten steps
    back = int((calm < outcomes["sign flipped"]).argmax())
    about(back, 85, within=40, name="the step of 600 at which training had a loss like the flipped model's")

# %% [markdown] id="lesson-explain"
# **What it costs.** The flipped model is as good as the right one was after about 85 of its 600 steps: six sevenths of
# the training are gone, and a model without any rotation is hardly worse. Yet the program runs and writes almost-words; it
# looks like a badly trained model, so the search starts at the data and the optimiser. A public port of nanochat spent about
# 275 dollars and ten days on a regression that announced itself the same way, as a score that was just too low. Training again
# under the other sign costs the whole run, about 48 dollars on 8×H100; the repair is one line: exchange the two halves of each
# head's rows in c_q and c_k, and the flipped rotation computes the very same scores.
#
# **What finds it.** Not the loss of a fresh run, which is equally good under either sign. One comparison of *logits*
# against another program with the *same weights*, as above: 1e-5, or not. Note how mild the wrong base is. Near misses
# are the expensive ones; a test on numbers sees them, an eye on samples does not.

# %% [markdown] id="takeaway" tags=["slide"]
# > **Takeaway.** The stream is read through a norm and only ever added to. Every piece is one to five lines, and the
# > conventions (pairing, sign, window w means w + 1 keys, where the middle is) are as binding as the shapes. Count
# > **6 FLOPs a multiplied weight and token plus 12·H·D a visible key**; tables are memory, not arithmetic. A port is right when
# > the same weights give the same logits to 1e-5, and not before.

# %% [markdown] id="simplified"
# ## What was simplified
#
# - Weights here are float32. The library keeps float32 masters and casts each weight to bfloat16 where it is used:
# `linear` and `Weight` in `nanochat_lib/layers.py`.
# - `forward` is a function over a dict. The library's `GPT` in `nanochat_lib/gpt.py` is a flax module with the same
# names; its `trunk` is shared by training, prefill and decoding with a cache.
# - `gpt.hidden` stops before the head, because training never holds all logits at once: `head_cross_entropy` in
# `nanochat_lib/losses.py`.
# - The generation of March 2026 (`recipe="recipe4"`) differs in constants and has no smear and no backout:
# `GENERATIONS` in `nanochat_lib/layers.py`.
# - Initial weights (`CausalSelfAttention`, `MLP`) and the training recipe come in chapter 05; attention that does not
# write its scores to memory is chapter 03.
