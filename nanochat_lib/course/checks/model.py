"""Chapter 02: public checks, hints, quizzes and predictions of the model, piece by piece and as a whole."""

from __future__ import annotations

from functools import lru_cache

import jax
import jax.numpy as jnp
import numpy as np

from nanochat_lib import gpt
from nanochat_lib.attention import attention, rotary_table, rotate, visible
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
)
from nanochat_lib.course.notes import note, recording
from nanochat_lib.layers import gated_values, norm, smear, softcap
from nanochat_lib.sizing import GPTConfig, count_params, flops_per_token, scaling_params


def on_jax(fn, *args):
    """`fn` on the arguments, numpy arrays as JAX arrays."""
    return fn(*(jnp.asarray(a) if isinstance(a, np.ndarray) else a for a in args))


def normal(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


# The whole model --------------------------------------------------------------------------------------------------


def random_params(config, rng):
    """Weights of which none is zero or one: nothing can hide behind its initial value."""
    params = {}
    for name, shape in gpt.param_shapes(config).items():
        if len(shape) == 1:
            params[name] = rng.uniform(0.4, 1.1, shape).astype(np.float32)
        else:
            fan_in = 1 if "wte" in name or "value_embeds" in name else shape[1]
            params[name] = normal(rng, *shape) * np.float32((9 if name == "lm_head.weight" else 1) / fan_in) ** 0.5
    return {name: jnp.asarray(value) for name, value in params.items()}


def whole_model(rng, length=140, rows=1, **changes):
    """(config, params, ids) with grouped heads, a padded vocabulary and a first layer that sees 128 tokens back."""
    heads = {"n_layer": 3, "n_head": 4, "n_kv_head": 2, "n_embd": 32, "window_pattern": "SL"}
    config = GPTConfig(**({"sequence_len": 512, "vocab_size": 50} | heads | changes))
    return config, random_params(config, rng), jnp.asarray(rng.integers(0, config.vocab_size, (rows, length)))


QUICK = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}  # runs once: compile it fast


def one_layer(rng):
    return whole_model(rng, length=9, rows=2, n_layer=1, n_kv_head=4, vocab_size=64, window_pattern="L")


@lru_cache(maxsize=8)
def jitted(fn, config):
    """(params, ids) → (logits, notes by name), compiled once for a function and a configuration."""

    def run(params, ids):
        with recording() as noted:
            return fn(config, params, ids), dict(noted)

    return jax.jit(run, compiler_options=QUICK)


def compiled(fn, config, params, ids):
    """`fn` under jit, which is seconds faster than step by step; its notes come out as numbers."""
    logits, noted = jitted(fn, config)(params, ids)
    for name, value in noted.items():
        note(name, value)
    return logits


def stages(config, params, ids):
    """The right intermediates of a forward pass, in order."""
    model, seen = gpt.build(config, params), {}
    rows = model.lookup(ids, jnp.float32)
    x = norm(rows[gpt.WTE])
    x = seen["smeared embedding"] = model.smear(x, gpt.before(x))

    def attend(i, q, k, v):
        seen.update({f"layer {i}, q": q, f"layer {i}, k": k, f"layer {i}, v": v})
        return attention(q, k, v, window=config.windows[i])

    def watch(i, x):
        seen[f"stream after layer {i}"] = x

    rotation = model.rotation(ids.shape[1], jnp.float32)
    seen["what the head reads"] = model.trunk(x, rows, rotation, attend, watch=watch)
    return seen


# Figures for the last hints ---------------------------------------------------------------------------------------


def rotation_picture():
    """A vector of two numbers, turned as the positions go on."""
    from nanochat_lib.report.plots import BLUE, new_figure

    figure, ax = new_figure(height=2.6, width=3.2)
    cos, sin = rotary_table(6, 2, 100_000.0)
    for t in range(6):
        x, y = np.asarray(rotate(jnp.array([1.0, 0.0]), jnp.asarray(cos[t]), jnp.asarray(sin[t])))
        ax.annotate("", (x, y), (0, 0), arrowprops={"arrowstyle": "->", "color": BLUE})
        ax.text(1.13 * x, 1.13 * y, str(t), ha="center", va="center")
    ax.set(
        xlim=(-1.4, 1.4), ylim=(-1.4, 1.4), aspect="equal", xlabel="x1", ylabel="x2", title="(1, 0) at positions 0 … 5"
    )
    return figure


def mask_text():
    rows = np.asarray(visible(jnp.arange(5), jnp.arange(5), 2))
    lines = ["".join(" ■" if seen else " ·" for seen in row) for row in rows]
    return "positions 0 … 4 (down) and the keys they see (across), window 2:\n" + "\n".join(lines)


def softcap_text():
    x = np.array([-100.0, -15.0, -1.0, 0.0, 1.0, 15.0, 100.0])
    return "\n".join(f"{a:7.1f} → {b:7.3f}" for a, b in zip(x, np.asarray(softcap(jnp.asarray(x), 15.0)), strict=True))


def norm_text():
    x = jnp.array([[3.0, 4.0], [300.0, 400.0], [0.0, 0.0]])
    return f"norm of\n{np.asarray(x)}\nis\n{np.asarray(norm(x)).round(4)}"


def gate_text():
    v, ve, x = jnp.zeros((1, 2, 1, 2)), jnp.array([[[1.0, 2.0, 3.0, 4.0]]]), jnp.array([[[1.0, -1.0, 0.5]]])
    first, second = np.asarray(gated_values(v, ve, x, jnp.array([[4.0], [0.0]]), 3.0))[0, :, 0].round(3)
    return (
        "v of zeros, two heads of size 2, ve = [1 2 3 4], x = [1 -1 0.5], gate weights [[4], [0]], factor 3.\n"
        f"The gates are 3·sigmoid(4) = 2.946 and 3·sigmoid(0) = 1.5: head 0 gets {first}, head 1 gets {second}."
    )


def smear_text():
    x = jnp.array([[[1.0, 0.0, 0.0], [0.0, 1.0, 0.0]]])
    out = smear(x, gpt.before(x), jnp.array([[0.0, 2.0]]), jnp.array([0.5]))
    return (
        "x = [1 0 0], [0 1 0]; gate weights [0 2], λ = 0.5. The second gate is sigmoid(2) = 0.881.\n"
        f"Result: {np.asarray(out)[0, 0].round(3)}, {np.asarray(out)[0, 1].round(3)}"
    )


def forward_text():
    config, params, ids = whole_model(np.random.default_rng(0))
    lines = [f"{name}: {tuple(x.shape)}, rms {float(jnp.sqrt(jnp.mean(x * x))):.3f}" for name, x in
             stages(config, params, ids).items()]  # fmt: skip
    return "\n".join([*lines, f"logits: {tuple(gpt.apply(config, params, ids).shape)}"])


def count_text():
    return "d12, vocabulary 32,768:\n" + "\n".join(f"{k:22}{n:>13,}" for k, n in count_params(D12).items())


def flops_text():
    matrices = 6 * (scaling_params(D12) + 24)
    return f"d12: {matrices:,} for matrices + {flops_per_token(D12) - matrices:,} for attention"


# Configurations to count ------------------------------------------------------------------------------------------

D12 = GPTConfig()
ODD = GPTConfig(sequence_len=640, vocab_size=1000, n_layer=5, n_head=6, n_kv_head=2, n_embd=96)  # nothing divides well
OLD = GPTConfig(sequence_len=1024, vocab_size=50257, n_layer=4, n_head=4, n_kv_head=4, n_embd=256, recipe="recipe4")


def with_count(group, wrong):
    """count_params with one group counted as `wrong(config)`."""

    def counted(config):
        groups = count_params(config) | {group: wrong(config)}
        return groups | {"total": sum(n for name, n in groups.items() if name != "total")}

    return counted


def kv_width(config):
    return config.n_kv_head * config.head_dim


def differs_only_in(got, want, group):
    return isinstance(got, dict) and {k for k in want if got.get(k) != want[k]} <= {group, "total"} and got != want


def visible_args(rng):
    return np.arange(3, 8), np.arange(1, 6), 3


def batch_positions(rng):
    return rng.integers(0, 9, (2, 3)), np.arange(5), 4


def value_args(rng, heads=3, size=4, channels=5, dtype=np.float32):
    b, t, c = 2, 6, 16
    return (
        normal(rng, b, heads, t, size, dtype=dtype), normal(rng, b, t, heads * size, dtype=dtype),
        normal(rng, b, t, c, dtype=dtype), normal(rng, heads, channels), 3.0,
    )  # fmt: skip


def smear_args(rng, dtype=np.float32):
    return normal(rng, 2, 5, 9, dtype=dtype), normal(rng, 2, 5, 9, dtype=dtype), normal(rng, 1, 4), np.float32([0.7])


EXERCISES = [
    Exercise(
        "model.norm",
        call=on_jax,
        cases=[
            example(
                "three rows",
                (np.float32([[3, 4, 0, 0], [6, 8, 0, 0], [0, 0, -3, 4]]),),
                np.float32([[1.2, 1.6, 0, 0], [1.2, 1.6, 0, 0], [0, 0, -1.2, 1.6]]),
            ),
            prop(
                "the mean square of a row is 1",
                make=lambda rng: (normal(rng, 3, 4) * 5,),
                holds=lambda out, x: (
                    bool(np.allclose(np.mean(np.square(out), -1), 1, atol=1e-5))
                    or "the mean square of the last axis is not 1"
                ),
            ),
            example("a row of zeros stays zeros", (np.zeros((3, 4), np.float32),), np.zeros((3, 4), np.float32)),
            reference(
                "float16 in, float16 out", make=lambda rng: (normal(rng, 3, 4, dtype=np.float16) * 400,), dtype=True
            ),
            budget("operations", make=lambda rng: (normal(rng, 3, 4),), jaxpr=20),
        ],
        causes=[
            sign(
                "0/0: EPSILON belongs inside the root, added to the mean square",
                lambda got, want, x: bool(np.isnan(np.asarray(got, np.float32)).any()),
            ),
            sign(
                "the squares overflowed: 400² is too large for float16, so square a float32 copy",
                lambda got, want, x: x.dtype == np.float16 and not np.asarray(got).any(),
            ),
            suspect(
                "that divides by the root of the sum of squares; RMSNorm takes their mean",
                lambda x: norm(x) / x.shape[-1] ** 0.5,
            ),
            suspect(
                "you normalised over the first axis; every row of the last axis is one vector",
                lambda x: jnp.swapaxes(norm(jnp.swapaxes(x, 0, -1)), 0, -1),
            ),
            suspect(
                "you subtracted the mean: that is LayerNorm; RMSNorm leaves the mean alone",
                lambda x: norm(x - x.mean(-1, keepdims=True)),
            ),
        ],
        hints=[
            "Three steps: the mean of the squares along the last axis, its root, a division.",
            "`jnp.mean(…, axis=-1, keepdims=True)` keeps the axis, so the division fits; `jax.lax.rsqrt` is "
            "one over the "
            "root. Work in float32 and go back to `x.dtype` at the very end.",
            norm_text,
        ],
    ),
    Exercise(
        "model.rotate",
        call=on_jax,
        cases=[
            example(
                "a quarter turn",
                (np.float32([[1, 2, 3, 4]]), np.zeros((1, 2), np.float32), np.ones((1, 2), np.float32)),
                np.float32([[3, 4, -1, -2]]),
            ),
            prop(
                "no vector gets longer or shorter",
                make=lambda rng: (normal(rng, 2, 3, 5, 8), *rotary_table(5, 8, 100.0)),
                holds=lambda out, x, cos, sin: (
                    bool(np.allclose(np.square(out).sum(-1), np.square(x).sum(-1), rtol=1e-4))
                    or "a rotation keeps lengths, this does not"
                ),
            ),
            reference("random heads", make=lambda rng: (normal(rng, 2, 3, 5, 8), *rotary_table(5, 8, 100.0))),
        ],
        causes=[
            suspect(
                "it turns the other way: nanochat turns by minus the angle, so the sines change places",
                lambda x, cos, sin: rotate(x, cos, -sin),
            ),
            suspect(
                "you paired neighbours, (x[0], x[1]), (x[2], x[3]) …; nanochat pairs x[j] with x[j + D/2]",
                lambda x, cos, sin: rotate(jnp.concatenate([x[..., ::2], x[..., 1::2]], -1), cos, sin),
            ),
            suspect(
                "the two halves of the result are in the wrong order",
                lambda x, cos, sin: jnp.roll(rotate(x, cos, sin), x.shape[-1] // 2, -1),
            ),
        ],
        hints=[
            "Cut the last axis into two halves. Each pair (x1[j], x2[j]) is a point in a plane; turn it.",
            "The rotation by −θ has rows (cos, sin) and (−sin, cos). Write both halves of the result, then join them "
            "along the last axis.",
            rotation_picture,
        ],
    ),
    Exercise(
        "model.visible",
        call=on_jax,
        cases=[
            example(
                "five positions, window 2",
                (np.arange(5), np.arange(5), 2),
                np.tril(np.ones((5, 5), bool)) & ~np.tril(np.ones((5, 5), bool), -3),
            ),
            example("window 0 is only itself", (np.arange(5), np.arange(5), 0), np.eye(5, dtype=bool)),
            reference("queries 3 … 7, keys 1 … 5", make=visible_args),
            reference("rows at positions of their own", make=batch_positions),
        ],
        causes=[
            suspect(
                "a query sees one key too few: window w means itself and w keys before it",
                lambda q, k, w: visible(q, k, w - 1),
            ),
            suspect(
                "queries see the future: a key after the query must be hidden",
                lambda q, k, w: visible(q, k, w) | ~visible(q, k, 10**6),
            ),
            suspect("nothing is too old: the window is not applied", lambda q, k, w: visible(q, k, 10**6)),
            suspect(
                "query and key are exchanged: this is the mask of the future",
                lambda q, k, w: (k - q[..., :, None] >= 0) & (k - q[..., :, None] <= w),
            ),
            suspect("a query does not see itself", lambda q, k, w: visible(q, k, w) & ~visible(q, k, 0)),
        ],
        hints=[
            "Subtract each key's position from each query's: (Tq, 1) − (Tk,) gives a (Tq, Tk) table of distances.",
            "A key is visible when its distance is not negative and not above the window. Join two "
            "comparisons with `&`, "
            "each in brackets. A new axis before the last: `queries[..., None]`.",
            mask_text,
        ],
    ),
    Exercise(
        "model.gated_values",
        call=on_jax,
        cases=[
            reference("three heads of four", make=value_args),
            reference(
                "a gate that is shut or open",
                dtype=True,
                make=lambda rng: (*value_args(rng)[:3], 100 * value_args(rng)[3], 3.0),
            ),
        ],
        causes=[
            suspect(
                "the factor is missing: a gate goes from 0 to `factor`",
                lambda v, ve, x, weight, factor: gated_values(v, ve, x, weight, 1.0),
            ),
            suspect(
                "the values themselves got lost: add to v",
                lambda v, ve, x, weight, factor: gated_values(v, ve, x, weight, factor) - v,
            ),
            suspect(
                "ve was cut wrongly: in (B, T, K·D) the heads stand inside each position; split_heads moves them",
                lambda v, ve, x, weight, factor: (
                    v + gated_values(jnp.zeros_like(v), jnp.ones_like(ve), x, weight, factor) * ve.reshape(v.shape)
                ),
            ),
            suspect(
                "the gate reads the wrong channels: it takes the first ones of x",
                lambda v, ve, x, weight, factor: gated_values(v, ve, x[..., -weight.shape[1] :], weight, factor),
            ),
            suspect(
                "the gate went on v; it belongs on ve",
                lambda v, ve, x, weight, factor: (
                    ve.reshape(*ve.shape[:2], -1, v.shape[-1]).swapaxes(1, 2)
                    + v * gated_values(jnp.zeros_like(v), jnp.ones_like(ve), x, weight, factor)
                ),
            ),
            sign(
                "tanh, or no squashing at all? The gates must lie between 0 and `factor`: use the sigmoid",
                lambda got, want, v, ve, x, weight, factor: got.shape == want.shape,
            ),
        ],
        hints=[
            "First the gates, (B, T, K): a linear layer on the first channels of x, a sigmoid, a factor.",
            "`linear(x[..., :n], weight)` with n = weight.shape[1]. Then bring the gates to (B, K, T, 1) and ve to "
            "(B, K, T, D), and add their product to v.",
            gate_text,
        ],
    ),
    Exercise(
        "model.smear",
        call=on_jax,
        cases=[
            reference("random stream", make=smear_args),
            example(
                "strength 0 changes nothing",
                (
                    np.float32([[[1, 2], [3, 4]]]),
                    np.float32([[[5, 6], [7, 8]]]),
                    np.float32([[1.0]]),
                    np.float32([0.0]),
                ),
                np.float32([[[1, 2], [3, 4]]]),
            ),
            reference("float16 stays float16", make=lambda rng: smear_args(rng, np.float16), dtype=True),
        ],
        causes=[
            suspect(
                "the gate looks at the token before; it must look at the current one",
                lambda x, previous, weight, strength: x + smear(previous, previous, weight, strength) - previous,
            ),
            suspect(
                "the strength λ is missing",
                lambda x, previous, weight, strength: smear(x, previous, weight, jnp.ones(1)),
            ),
            suspect(
                "the stream was smeared with itself; add `previous`",
                lambda x, previous, weight, strength: smear(x, x, weight, strength),
            ),
            suspect(
                "the gate reads the wrong channels: it takes the first ones of x",
                lambda x, previous, weight, strength: (
                    x
                    - x[..., -weight.shape[1] :].sum() * 0
                    + smear(jnp.roll(x, weight.shape[1], -1), previous, weight, strength)
                    - jnp.roll(x, weight.shape[1], -1)
                ),
            ),
            sign(
                "a float32 λ lifts the whole stream to float32: cast the strength to x.dtype first",
                lambda got, want, x, *_: got.dtype == np.float32 and x.dtype == np.float16,
            ),
            sign(
                "the gate must lie between 0 and 1: is the sigmoid there?",
                lambda got, want, *_: got.shape == want.shape,
            ),
        ],
        hints=[
            "A gate of one number per position, (B, T, 1), times λ, times the embedding before, added to x.",
            "`linear(x[..., :n], weight)` with n = weight.shape[1] gives (B, T, 1). Mind the dtype of λ.",
            smear_text,
        ],
    ),
    Exercise(
        "model.softcap",
        call=on_jax,
        cases=[
            example(
                "0, ±15, ±1.5 and a million",
                (np.float32([0, 15, -15, 1e6, -1e6, 1.5, -1.5]), 15.0),
                np.float32([0, 11.423913, -11.423913, 15, -15, 1.49502, -1.49502]),
            ),
            reference("random logits, cap 15", make=lambda rng: (normal(rng, 7) * 30, 15.0)),
            reference(
                "float16 logits come out in float32",
                make=lambda rng: (normal(rng, 7, dtype=np.float16), 20.0),
                dtype=True,
            ),
        ],
        causes=[
            suspect(
                "that is a hard clip: its gradient is exactly 0 outside of the cap",
                lambda x, cap: jnp.clip(x, -cap, cap),
            ),
            suspect(
                "the result lies between −1 and 1: multiply by the cap again", lambda x, cap: softcap(x, cap) / cap
            ),
            suspect(
                "divide by the cap before the tanh, so that small logits stay as they are",
                lambda x, cap: softcap(x * cap, cap),
            ),
            sign("cast to float32 first: the loss needs the digits", lambda got, want, x, cap: got.dtype != np.float32),
        ],
        hints=[
            "Squash into −1 … 1, then stretch to −cap … cap.",
            "`jnp.tanh` squashes. What must go in so that a small logit comes out as it was?",
            softcap_text,
        ],
    ),
    Exercise(
        "model.forward",
        call=compiled,
        cases=[
            reference("140 tokens through three layers", make=whole_model, rtol=2e-4),
        ],
        causes=[
            sign(
                "the table's padding rows are still there: cut the head's weight to vocab_size before multiplying",
                lambda got, want, config, *_: got.shape[-1] == config.padded_vocab_size != config.vocab_size,
            ),
            sign(
                "the soft cap of 15 on the logits is missing",
                lambda got, want, *_: bool(np.allclose(softcap(got, 15.0), want, atol=1e-3)),
            ),
        ],
        steps=stages,
        fallback=gpt.apply,
        hints=[
            "Follow the drawing above from top to bottom; call `note(name, x)` where it says so, and the "
            "check names the "
            "first wrong station.",
            "Before each layer the whole stream is rescaled: resid_lambdas[i]·x + x0_lambdas[i]·x0. "
            "Attention and MLP read "
            "norm(x). q and k: project, split, rotate, norm, × 1.2, in this order. Keep the stream behind "
            "layer L // 2 for "
            "the backout, which comes before the last norm.",
            forward_text,
        ],
    ),
    Exercise(
        "model.count_params",
        cases=[
            example(
                "d12",
                (D12,),
                {
                    "wte": 25_165_824,
                    "value_embeds": 150_994_944,
                    "lm_head": 25_165_824,
                    "transformer_matrices": 84_935_088,
                    "scalars": 50,
                    "total": 286_261_730,
                },
            ),
            reference("grouped heads, five layers, vocabulary 1000", make=lambda rng: (ODD,)),
        ],
        causes=[
            sign(
                "every layer has a value table in your count; only every other one has, "
                "config.value_embedding_layers says which",
                lambda got, want, config: (
                    got["value_embeds"] * len(config.value_embedding_layers) == want["value_embeds"] * config.n_layer
                ),
            ),
            sign(
                "the tables are padded: use padded_vocab_size",
                lambda got, want, config: got["wte"] == config.vocab_size * config.n_embd != want["wte"],
            ),
            sign(
                "the head is a table of its own: nanochat does not tie it to the embedding",
                lambda got, want, config: got["lm_head"] == 0,
            ),
            sign(
                "grouped heads: keys, values and value tables are n_kv_head · head_dim wide, not n_embd",
                lambda got, want, config: (
                    kv_width(config) != config.n_embd and got["transformer_matrices"] > want["transformer_matrices"]
                ),
            ),
            sign(
                "the gates of the value embeddings belong to the matrices: gate_channels · n_kv_head each",
                lambda got, want, config: (
                    want["transformer_matrices"] - got["transformer_matrices"]
                    == len(config.value_embedding_layers) * config.gate_channels * config.n_kv_head
                ),
            ),
            sign(
                "the MLP has two matrices of C × 4C, 8C² together",
                lambda got, want, config: (
                    want["transformer_matrices"] - got["transformer_matrices"] == 4 * config.n_layer * config.n_embd**2
                ),
            ),
            sign(
                "scalars: two λ a layer; the generation `head` has the smear's gate, its λ and the backout's too",
                lambda got, want, config: differs_only_in(got, want, "scalars"),
            ),
        ],
        hints=[
            "Write C, V (padded), L and the key/value width as four short names; then one line a group.",
            "A block has c_q and c_proj (C² each), c_k and c_v (C · kv width each), c_fc and c_proj of the "
            "MLP (4C² each). "
            "config.value_embedding_layers lists the layers that have a table and a gate.",
            count_text,
        ],
    ),
    Exercise(
        "model.flops_per_token",
        cases=[
            example("d12", (D12,), 759_696_048),
            reference("grouped heads, short windows", make=lambda rng: (ODD,)),
        ],
        causes=[
            suspect(
                "2 a weight is the forward pass alone; the backward pass costs twice as much again: 6",
                lambda c: (
                    flops_per_token(c) - 4 * (scaling_params(c) + (c.smear_channels if c.recipe == "head" else 0))
                ),
            ),
            suspect(
                "a lookup costs nothing: the tables wte and value_embeds are not multiplied",
                lambda c: flops_per_token(c) + 6 * (count_params(c)["total"] - scaling_params(c)),
            ),
            suspect(
                "short windows are cheaper: count min(window, sequence_len) keys of each layer",
                lambda c: (
                    flops_per_token(c)
                    + sum(12 * c.n_embd * (c.sequence_len - min(w, c.sequence_len)) for w in c.windows)
                ),
            ),
            suspect(
                "the attention's own products are missing",
                lambda c: flops_per_token(c) - sum(12 * c.n_embd * min(w, c.sequence_len) for w in c.windows),
            ),
            suspect(
                "attention multiplies twice, q·k and weights·v: 12 · n_embd a visible key, backward pass included",
                lambda c: flops_per_token(c) - sum(6 * c.n_embd * min(w, c.sequence_len) for w in c.windows),
            ),
            suspect(
                "the smear's gate is a matrix too, of 24 weights",
                lambda c: flops_per_token(c) - (6 * c.smear_channels if c.recipe == "head" else 0),
            ),
        ],
        hints=[
            "Two terms: 6 for every weight that is multiplied, and the attention's own products.",
            "scaling_params(config) counts the blocks' matrices and the head; the smear's gate adds its "
            "channels when the "
            "recipe is head. Attention: 12 · n_embd · visible keys, summed over config.windows.",
            flops_text,
        ],
    ),
]

QUIZZES = [
    Quiz(
        "model.q_order",
        "QK-norm stands after the rotation. What would change if it stood before it?",
        [
            Option(
                "Nothing but rounding",
                right=True,
                why="A rotation keeps lengths, so the norm divides by the same number before and after it.",
            ),
            Option(
                "The scores would grow with the distance",
                why="The rotation's angle never enters the length of a vector.",
            ),
            Option(
                "Positions would be lost", why="The rotation is still there; only a positive factor is applied earlier."
            ),
        ],
    ),
    Quiz(
        "model.q_padding",
        "50 tokens live in a table of 64 rows. Why are the 14 padding columns cut off *before* the softmax?",
        [
            Option(
                "They would get probability, and gradients",
                right=True,
                why="A logit of about 0 is not a probability "
                "of 0: every padding column would take its share, and training would spend gradients on pushing "
                "it down.",
            ),
            Option("To save memory", why="It saves a little, but the memory was allocated for the product already."),
            Option(
                "Otherwise the soft cap fails",
                why="The soft cap works on each logit alone; it does not know its neighbours.",
            ),
        ],
    ),
    Quiz(
        "model.q_init",
        "Both output projections of a block start as zeros. What does the whole model compute at step 0?",
        [
            Option(
                "Every block passes the stream through; only the λ scale it",
                right=True,
                why="Attention and MLP add "
                "exactly zero, so the logits come from the embedding alone, and gradients first reach the projections.",
            ),
            Option(
                "Nothing: all logits are zero and no gradient flows",
                why="The stream goes around the blocks, so the head reads the embedding and gets gradients at once.",
            ),
            Option(
                "The same as with random projections, but slower to train",
                why="Random projections add noise of the "
                "stream's own size at every layer; zeros start from a clean stream.",
            ),
        ],
    ),
]

PREDICTIONS = [
    Prediction(
        "model.p_tables", "What share of d12's 286 million numbers is only looked up, never multiplied?", unit="%"
    ),
    Prediction(
        "model.p_twin",
        "By how much will the largest logit differ between JAX and PyTorch? Give the exponent: -3 means about 0.001.",
        unit="as a power of ten",
    ),
    Prediction(
        "model.p_sign",
        "The trained model has some loss per token. How many nats will it be when the rotation turns the wrong way?",
        unit="nats",
    ),
]
