# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] id="title"
# # Inference: one token at a time
#
# An H100 does 989 trillion operations a second. A token of nanochat's d24 needs 1.6 billion. That makes 620,000 tokens a
# second. **Why does one answer get at most 2,100 of them?**
#
# Because the chip is not computing. It is reading: for each token, every weight and everything that was said before. This
# chapter builds what makes an answer fast: a memory of the past, steps that many answers share, and then an engine
# around it that samples, calls a calculator and serves a web page. At the end you talk to your own engine in a browser.
#
# When you are through you can
#
# - write a key/value cache whose rows are of different lengths, and whose window layers forget in time,
# - run a model token by token, with the same numbers as the whole text in one go,
# - compute from bytes how fast a step can be, on a chip that you do not have, and measure how near you come on yours,
# - turn logits into a choice: temperature, top-k, top-p, and ids that no text belongs to,
# - let a model call a calculator, and read its expression without ever running it as code,
# - find the mistake that a second chat turn brings into a cache, before a user does.
#
# Eight exercises, about 150 minutes; with the reading some three hours. The solved chapter runs in about two minutes.

# %% tags=["setup"] id="setup"
import contextlib
import json
import threading
import time
import urllib.request
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.patches import Rectangle
from matplotlib.ticker import FuncFormatter, NullFormatter

from nanochat_lib import gpt, optim
from nanochat_lib.attention import MASKED
from nanochat_lib.calculator import (
    MAX_DEPTH,
    MAX_RESULT_CHARS,
    NoResult,
    Value,
    calculate,
    numbers,
    result_text,
    tokens_of,
)
from nanochat_lib.conversation import render_conversation, render_for_completion
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
)
from nanochat_lib.decoding import ToolState
from nanochat_lib.gpt import WTE, Params, build
from nanochat_lib.hardware import CHIPS, cpu_peak
from nanochat_lib.kernels.tiled import wide
from nanochat_lib.kv_cache import KVCache, init_cache, put_row, row_bytes, with_layer
from nanochat_lib.layers import norm
from nanochat_lib.packing import BestFitPacker
from nanochat_lib.presets import CPU_OPTIM
from nanochat_lib.primer.documents import world_documents
from nanochat_lib.primer.world import World
from nanochat_lib.report.plots import BLUE, FAINT, INK, ORANGE, RED, SKY, new_figure
from nanochat_lib.serve.app import Settings, make_app
from nanochat_lib.serve.one_at_a_time import OneAtATime
from nanochat_lib.serve.server import running
from nanochat_lib.sizing import GPTConfig, scaling_params, width_from_depth
from nanochat_lib.tasks.primer import PrimerSpelling, PrimerSums, sft_mixture
from nanochat_lib.tokenizer import Tokenizer
from nanochat_lib.train_step import init_train_state, make_train_step


def compiled(fn, static=0, donate=()):
    """jax.jit. In fast mode, where compiling takes most of the time, with less of it."""
    quick = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
    return jax.jit(fn, static_argnums=static, donate_argnums=donate, compiler_options=quick if fast() else None)


def label(ax, title, x="", y=""):
    """Title and axes in the course's style."""
    ax.set_title(title, loc="left", fontsize=10, fontweight="bold")
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    for axis, scale in ((ax.xaxis, ax.get_xscale()), (ax.yaxis, ax.get_yscale())):
        if scale == "log" and not axis.get_ticklabels()[0].get_text().isdigit():
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}" if value >= 1 else f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())


# %% [markdown] id="model-text"
# ## 1. The textbook loop
#
# First a model to talk to. Two layers, trained on the primer's chats alone (chapter 08 says how): sums with a calculator,
# words spelled, small talk. Its tokenizer has 500 tokens, its table 512 rows. Remember the twelve that nobody uses. The
# training takes about a minute.

# %% id="model"
CONTEXT, BATCH = 256, 8
world = World(0)
tokenizer = Tokenizer.train(world_documents(world, 150_000 if fast() else 600_000), 500)
config = GPTConfig(
    sequence_len=CONTEXT, vocab_size=512, n_layer=2, n_head=2, n_kv_head=2, n_embd=64 if fast() else 128,
    window_pattern="SL",
)  # fmt: skip


def random_params(config, seed=0):
    """Weights that nobody has trained."""
    rng = np.random.default_rng(seed)
    return {
        name: jnp.asarray(0.15 * rng.standard_normal(shape, dtype=np.float32))
        for name, shape in gpt.param_shapes(config).items()
    }


def packed_chats(count):
    """(rows, targets) of the primer's chats, as in chapter 08."""
    packer, rows, targets = BestFitPacker(CONTEXT + 1, count, crop=False, pad_id=tokenizer.bos_id), [], []
    for chat in sft_mixture(world, count):
        rendered = render_conversation(tokenizer, chat, CONTEXT + 1)
        packer.add(rendered.ids, rendered.mask)
    while len(packer):
        row, mask = np.empty(CONTEXT + 1, np.int32), np.empty(CONTEXT + 1, np.int8)
        packer.fill_row(row, mask, lambda: False)
        rows.append(row)
        targets.append(np.where(mask[1:] == 1, row[1:], -1))
    order = np.random.default_rng(0).permutation(len(rows))  # packing puts long chats first
    return np.array(rows)[order], np.array(targets)[order]


def trained_params(rows, targets, steps):
    """(weights, loss of the last step) after so many steps; the rate is constant, then falls over the last half."""
    optimizer = optim.make_optimizer(config, CPU_OPTIM)
    train_step = make_train_step(config, optimizer, donate=False)
    state = init_train_state(config, optimizer, jax.random.key(0))
    for i in range(steps):
        pick = np.arange(i * BATCH, (i + 1) * BATCH) % len(rows)
        hyper = {"lr": min(1, 2 * (1 - i / steps)), "momentum": 0.95, "weight_decay": 0.0}
        batch = {"inputs": rows[pick][None, :, :-1], "targets": targets[pick][None]}
        state, out = train_step(state, batch, {name: jnp.float32(value) for name, value in hyper.items()})
    return state.params, float(out["loss"])


if fast():  # there is no time to train: random weights, which babble
    params = random_params(config)
else:
    params, loss = trained_params(*packed_chats(2000), 250)
    _ = about(loss, 0.06, within=0.04, name="loss of the last step, nats a target")
print(f"{tokenizer.vocab_size} tokens in a table of {config.vocab_size}")

# %% [markdown] id="textbook-text"
# A model reads a text and says what comes next. So the shortest program that answers is a loop: the whole text through
# the model, take the likeliest token, append it, again.


# %% tags=["slide"] id="textbook"
whole = compiled(gpt.apply)
special = tokenizer.encode_special
END, BOS = special("<|assistant_end|>"), tokenizer.bos_id


def prompt_for(question):
    """The ids of a chat that asks `question` and waits for the answer."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": ""}]
    return render_for_completion(tokenizer, {"messages": messages}, CONTEXT - 1)


def textbook(ids, steps):
    """The likeliest `steps` tokens after `ids`, or fewer if the model ends; the text is padded so that one shape compiles."""
    ids, said = list(ids), []
    while len(said) < steps and END not in said:
        padded = np.array([ids + [BOS] * (CONTEXT - len(ids))], np.int32)  # causal: what follows changes nothing
        said.append(int(jnp.argmax(whole(config, params, padded)[0, len(ids) - 1, : tokenizer.vocab_size])))
        ids.append(said[-1])
    return said


question = "How much is 12 + 30?"
expected = textbook(prompt_for(question), 24)
print(repr(tokenizer.decode(expected)))

# %% [markdown] id="textbook-look"
# Look at what follows `12+30<|python_end|>`. The result of a sum was never the model's to say: it had mask 0 in training
# (chapter 08). So the model calls, and then babbles on its own, since nobody answers. That is an engine's job, and we will
# come to it. (In fast mode the weights are random, and all of it is babble.)
#
# How much work is this? A prompt of 128 tokens, an answer of 128: how many tokens run through the model in all? Guess:
# `predict("inference.p_textbook", …)`.

# %% id="textbook-predict"
predict("inference.p_textbook")

# %% id="textbook-count"
PROMPT = 128
lengths = np.arange(1, 129)
again = np.cumsum(PROMPT + lengths - 1)  # every step runs all that is there
once = PROMPT + lengths - 1  # the prompt in one go, then one token a step
reveal("inference.p_textbook", int(again[-1]))

figure, ax = new_figure(height=2.6, width=6.2)
ax.plot(lengths, again, color=RED, label="the whole text for every token")
ax.plot(lengths, once, color=BLUE, linestyle="--", label="each token once")
ax.set_yscale("log")
ax.legend(fontsize=8.5)
label(ax, "Tokens run through the model, prompt of 128", "tokens of the answer", "tokens, in all")
show(
    figure,
    alt="two curves over the length of the answer, logarithmic: running the whole text each time climbs from 128 to over "
    "twenty thousand tokens, running each token once stays below three hundred",
)

# %% [markdown] id="cache-text"
# ## 2. What the past leaves behind
#
# Nearly all of that work is repeated. Attention is causal: what a position computes depends on earlier positions only, so
# a longer text does not change it. And what does a *later* position need of an earlier one? Its key and its value in each
# layer, nothing else. (One thing more in nanochat: smear reads the embedding of the token just before.)
#
# So keep keys and values. That is the **KV cache**. Here are the keys that the model stores for 10 tokens, and for 20 that
# begin with the same 10.

# %% id="past"
prefill = compiled(gpt.prefill)


def read_prompt(ids):
    """(logits (1, V), cache of one row) after a prompt."""
    padded = np.array([list(ids) + [BOS] * (CONTEXT - len(ids))], np.int32)
    return prefill(config, params, padded, jnp.array([len(ids)]), init_cache(config, 1, CONTEXT))


text20 = np.random.default_rng(1).integers(0, 256, 20).tolist()
k10, k20 = (np.asarray(read_prompt(text20[:n])[1].k[1][0, :, :10]) for n in (10, 20))
print("keys of the first 10 tokens in the last layer, shape (K, T, D):", k10.shape)
print("the longer text has the same ones:", bool(np.allclose(k10, k20, atol=1e-5)))

# %% [markdown] id="ring-text"
# A layer that sees everything needs a slot for each position. A layer with a **window** $w$ sees itself and $w$ keys back.
# Older ones are never read again, so their slots can be used anew: a **ring** of $R$ slots, position $p$ in slot
# $p \bmod R$. Its memory does not grow with the text.
#
# In nanochat's d24 three of four layers have a window of 512 in a context of 2,048. A row's cache is 132 MB instead of 302.

# %% tags=["slide"] id="ring-bytes"
width, heads = width_from_depth(24)
d24 = GPTConfig(n_layer=24, n_embd=width, n_head=heads, n_kv_head=heads)
with_windows = row_bytes(d24, 2048, "bfloat16")["total"]
without = row_bytes(replace(d24, window_pattern="L"), 2048, "bfloat16")["total"]
about(with_windows / 1e6, 132.2, within=0.1, name="one row of d24, 2,048 positions, MB")
_ = about(without / 1e6, 302, within=0.1, name="the same without windows, MB")

# %% [markdown] id="held-text"
# Which position does a slot hold? Everything that reads a ring must know.


# %% tags=["exercise"] id="inference.held" points=2 minutes=10 level=2 library="nanochat_lib.kv_cache:held"
def held(pos: jax.Array, count: int) -> jax.Array:
    """(B, R) positions that the slots 0 … R-1 hold, in rings of `count` = R slots that `pos` (B,) tokens went through.

    The tokens' positions are 0 … pos-1, the newest in slot (pos-1) % R. Negative where a slot holds nothing yet.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    newest = pos[:, None] - 1
    return newest - (newest - jnp.arange(count)) % count
    # --- end


# %% id="inference.held.check"
check("inference.held", held)

# %% tags=["hidden"] id="author"
from nanochat_lib.course.author import example, hidden, mutant, prop, reference
from nanochat_lib.course.checks import inference as checks

hidden(
    "inference.held",
    reference("a ring of one slot", lambda rng: (rng.integers(0, 9, 3).astype(np.int32), 1)),
    reference("many rows", lambda rng: (rng.integers(0, 300, 12).astype(np.int32), 13)),
    example("nothing yet", (np.array([0], np.int32), 3), np.array([[-3, -2, -1]], np.int32)),
)
mutant("inference.held", "pos[:, None] - 1", "pos[:, None]", says="not there yet")
mutant(
    "inference.held", "(newest - jnp.arange(count)) % count", "newest + jnp.arange(count)", says="until the ring has"
)
mutant("inference.held", "(newest - jnp.arange(count))", "(jnp.arange(count) - newest)", says="not slot - newest")
mutant(
    "inference.held",
    body="""
    newest = pos[:, None] - 1
    return jnp.maximum(newest - (newest - jnp.arange(count)) % count, 0)
    """,
    says="negative number",
)

# %% id="held-run"
held = mine("inference.held")
SLOTS, TIMES = 5, 13
figure, ax = new_figure(height=2.5, width=7.2)
ax.grid(False)
for n, column in enumerate(np.asarray(held(jnp.arange(TIMES), SLOTS))):
    for slot, position in enumerate(column):
        new = position == n - 1
        colour = "white" if position < 0 else SKY if new else "#e8eef2"
        ax.add_patch(Rectangle((n - 0.5, slot - 0.5), 1, 1, fc=colour, ec=FAINT))
        ax.text(n, slot, "" if position < 0 else position, ha="center", va="center", fontsize=8.5, color=INK)
ax.set_xlim(-0.5, TIMES - 0.5)
ax.set_ylim(SLOTS - 0.5, -0.5)
ax.set_xticks(range(TIMES))
ax.set_yticks(range(SLOTS))
label(ax, "A ring of 5 slots: which position each holds", "tokens stored", "slot")
show(
    figure,
    alt="a table of 5 slots over 0 to 12 stored tokens. the slots fill one by one; from the sixth token on the newest "
    "position, marked blue, replaces the oldest, going round and round",
)

# %% [markdown] id="store-text"
# Now write into it. A cache holds several **rows**, one for each answer in the making, and every row has its own length:
# `cache.pos`. `cache.k[layer]` and `cache.v[layer]` are (B, K, R, D): rows, key/value heads, slots, head size.
#
# Two kinds of rows must stay as they are: those that have ended (not `alive`), and those that are *full*. Why the second?
# See for yourself what happens beyond the end of an array.

# %% id="beyond"
four = np.zeros(4, int)
try:
    four[6] = 7
except IndexError as error:
    print("NumPy:                   ", error)
print("JAX .at[6].set:          ", jnp.asarray(four).at[6].set(7))
print("JAX dynamic_update_slice:", jax.lax.dynamic_update_slice(jnp.asarray(four), jnp.array([7]), (6,)))

# %% id="beyond-quiz"
quiz("inference.q_end")

# %% [markdown] id="beyond-look"
# No error in either of the two. In a compiled program nobody can raise one. The first forgets the new token, the second
# destroys an old one, and the model goes on talking in both cases. What is not checked on the host, before the step, is
# never noticed.


# %% tags=["exercise"] id="inference.store_token" points=3 minutes=15 level=2 library="nanochat_lib.kv_cache:store_token"
def store_token(cache: KVCache, layer: int, k: jax.Array, v: jax.Array, alive: jax.Array | None = None) -> KVCache:
    """The cache with one more token a row: k and v (B, K, 1, D) of `layer` in each row's next slot.

    Rows that are not `alive` (B,) keep their slots, and so do full ones, of `cache.length` tokens; None: all are alive.
    `with_layer(cache, layer, write, k, v)` returns the cache in which write(slots, new) was done for keys and for
    values; slots (B, K, R, D). `pos` stays: it moves when all layers have stored.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    rows, heads, count = jnp.arange(k.shape[0])[:, None], jnp.arange(k.shape[1]), cache.k[layer].shape[2]
    free = cache.pos < cache.length
    slot = jnp.where(free if alive is None else free & alive, cache.pos % count, count)  # a slot that is not there

    def write(slots: jax.Array, new: jax.Array) -> jax.Array:
        # Heads are named one by one: of a row that is written as a whole, alone in its batch, XLA makes an update of a
        # slice, for which a CPU copies all the cache four times a step.
        return slots.at[rows, heads, slot[:, None]].set(new[:, :, 0], mode="drop")

    return with_layer(cache, layer, write, k, v)
    # --- end


# %% id="inference.store_token.check"
check("inference.store_token", store_token)

# %% tags=["hidden"] id="inference.store_token.hidden"
hidden(
    "inference.store_token",
    reference("full, ended and living rows", lambda rng: checks.some_slots(rng, [9, 7, 0], 0, [True, False, True])),
    reference("a single row", lambda rng: checks.some_slots(rng, [8], 1, [True])),
    reference("nobody lives", lambda rng: checks.some_slots(rng, [1, 2, 3], 1, [False, False, False])),
)
mutant("inference.store_token", "cache.pos % count, count", "cache.pos, count", says="position p goes to p % R")
mutant("inference.store_token", 'mode="drop"', 'mode="clip"', says="not alive")
mutant("inference.store_token", "free if alive is None else free & alive", "free", says="not alive")
mutant("inference.store_token", "cache.pos < cache.length", "cache.pos >= 0", says="silently overwrites")
mutant("inference.store_token", "cache.pos % count, count", "cache.pos[0] % count, count", says="each has its own")

# %% [markdown] id="attention-text"
# Then read it. One query a row, at position $p$, against all $R$ slots. Seen from there slot $s$ is $(p - s) \bmod R$
# positions old, and two limits say whether it counts: there must be something in it (age at most $p$), and it must lie in
# the window (age at most $w$). The rest is chapter 03's attention, for a single query.


# %% tags=["exercise"] id="inference.cached_attention" points=4 minutes=25 level=3 library="nanochat_lib.attention:cached_attention"
def cached_attention(q: jax.Array, k: jax.Array, v: jax.Array, *, positions: jax.Array, window: int) -> jax.Array:
    """One query a row against a cache: q (B, H, 1, D) at `positions` (B,), k and v (B, K, R, D) → (B, H, 1, D).

    The row's own token is stored already, so slot s holds the newest position up to `positions` that leaves s when
    divided by R. Query head h reads key/value head h // (H/K). Scores are divided by √D and masked with MASKED.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    (b, h, _, d), (_, kv_heads, count, _) = q.shape, k.shape
    distance = (positions[:, None] - jnp.arange(count, dtype=positions.dtype)) % count
    mask = (distance <= jnp.minimum(positions, window)[:, None])[:, None, None]
    q = q.reshape(b, kv_heads, h // kv_heads, d)
    scores = jnp.einsum("bkgd,bksd->bkgs", q, k, preferred_element_type=wide(q.dtype)) * (1 / d**0.5)
    scores = jnp.where(mask, scores, MASKED)
    weights = jnp.where(mask, jnp.exp(scores - scores.max(axis=-1, keepdims=True)), 0.0)
    total = jnp.maximum(weights.sum(axis=-1, keepdims=True), 1e-30)
    y = jnp.einsum("bkgs,bksd->bkgd", weights.astype(v.dtype), v, preferred_element_type=wide(v.dtype)) / total
    return y.reshape(b, h, 1, d).astype(q.dtype)
    # --- end


# %% id="inference.cached_attention.check"
check("inference.cached_attention", cached_attention)

# %% tags=["hidden"] id="inference.cached_attention.hidden"
hidden(
    "inference.cached_attention",
    reference("window 0", lambda rng: checks.some_cache(rng, [3, 9, 4], 8, 0), against=checks.slow_attention),
    reference("round and round", lambda rng: checks.some_cache(rng, [40, 12, 7], 8, 7), against=checks.slow_attention),
)
mutant(
    "inference.cached_attention",
    "jnp.minimum(positions, window)",
    "jnp.minimum(window + 0 * positions, window)",
    says="hold nothing yet",
)
mutant("inference.cached_attention", "jnp.minimum(positions, window)", "positions", says="further back than")
mutant("inference.cached_attention", "(distance <= jnp", "(distance < jnp", says="oldest key")
mutant("inference.cached_attention", " * (1 / d**0.5)", "", says="root of the head size")
mutant("inference.cached_attention", "dtype=positions.dtype)) % count", "dtype=positions.dtype))", says="newer one")
mutant(
    "inference.cached_attention",
    body="""
    (b, h, _, d), (_, kv_heads, count, _) = q.shape, k.shape
    age = (positions[:, None] - jnp.arange(count)) % count
    mask = (age <= jnp.minimum(positions, window)[:, None])[:, None]
    k, v = (jnp.tile(x, (1, h // kv_heads, 1, 1)) for x in (k, v))
    scores = jnp.where(mask, jnp.einsum("bhd,bhsd->bhs", q[:, :, 0], k) / d**0.5, MASKED)
    return jnp.einsum("bhs,bhsd->bhd", jax.nn.softmax(scores), v)[:, :, None]
    """,
    says="neighbours share one",
)

# %% [markdown] id="decode-text"
# ## 3. Prefill and decode
#
# Now the model. An answer has two phases:
#
# - **prefill**: the whole prompt in one go. All its positions are computed at once, as in training; the keys and values go
#   into the cache, and the logits of the last position say the first token.
# - **decode**: one token a row and step. It goes through all the layers alone, and meets the others only in the cache.
#
# The library's `prefill` is the forward pass that you know with `store_chunk` in its attention. Decode is yours. The model
# helps: `model.lookup` gives the rows of the tables, `model.smear(x, previous)` mixes in the token before, `model.trunk`
# runs all blocks and calls your `attend(layer, q, k, v)` in each, `model.logits` is the head.

# %% id="parts"
store_token = mine("inference.store_token")
cached_attention = mine("inference.cached_attention")


# %% tags=["exercise"] id="inference.decode" points=5 minutes=30 level=3 library="nanochat_lib.gpt:decode"
def decode(
    config: GPTConfig,
    params: Params,
    token: jax.Array,
    cache: KVCache,
    dtype: jax.typing.DTypeLike = jnp.float32,
    alive: jax.Array | None = None,
    span: int | None = None,
) -> tuple[jax.Array, KVCache]:
    """One more token (B,) a row, each at its own position: (logits (B, V), cache of the next step).

    Rows that are not `alive` (B,) stay as they are; their logits mean nothing. `span`, above every living row's pos:
    slots that are looked at, None for all. `cache.prev` (B, 1, C) is the embedding of the token before, for smear; a row
    without tokens (pos 0) has none, whatever stands there.
    """
    model = build(config, params)
    rows, pos = model.lookup(token[:, None], dtype), cache.pos
    embedded = norm(rows[WTE])
    # --- stub
    cos, sin = model.rotation(cache.length, dtype)  # (length, D/2) each: take every row's position
    raise NotImplementedError
    # --- solution
    cos, sin = (table[pos][:, None, None] for table in model.rotation(cache.length, dtype))

    def attend(layer: int, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        nonlocal cache
        cache = store_token(cache, layer, k, v, alive)
        keys, values = (slots[layer][:, :, :span] for slots in (cache.k, cache.v))
        return cached_attention(q, keys, values, positions=pos, window=config.windows[layer])

    prev = jnp.where(pos[:, None, None] > 0, cache.prev, 0).astype(dtype)
    x = model.trunk(model.smear(embedded, prev), rows, (cos, sin), attend)
    prev = embedded.astype(cache.prev.dtype)
    if alive is None:
        return model.logits(x[:, 0]), replace(cache, pos=pos + 1, prev=prev)
    prev = jnp.where(alive[:, None, None], prev, cache.prev)
    return model.logits(x[:, 0]), replace(cache, pos=pos + alive, prev=prev)
    # --- end


# %% id="inference.decode.check"
check("inference.decode", decode)

# %% tags=["hidden"] id="inference.decode.hidden"
hidden(
    "inference.decode",
    reference("two of three have ended", lambda rng: checks.some_steps(rng, [131, 3, 0], [False, True, False])),
    prop("another text, against the whole of it", checks.some_text, checks.as_the_whole, call=checks.from_nothing),
)
mutant("inference.decode", "pos=pos + 1", "pos=pos", says="one token longer")
mutant("inference.decode", "pos=pos + 1, prev=prev", "pos=pos + 1", says="next step smears with")
mutant(
    "inference.decode", "jnp.where(pos[:, None, None] > 0, cache.prev, 0)", "cache.prev", says="nothing to smear with"
)
mutant("inference.decode", "table[pos]", "table[pos + 1]", says="row's own position")
mutant(
    "inference.decode", "store_token(cache, layer, k, v, alive)", "store_token(cache, layer, k, v)", says="not alive"
)
mutant("inference.decode", "window=config.windows[layer]", "window=config.sequence_len", says="its own window")
mutant(
    "inference.decode",
    """        cache = store_token(cache, layer, k, v, alive)
        keys, values = (slots[layer][:, :, :span] for slots in (cache.k, cache.v))
""",
    """        keys, values = (slots[layer][:, :, :span] for slots in (cache.k, cache.v))
        cache = store_token(cache, layer, k, v, alive)
""",
    says="store first",
)

# %% [markdown] id="same-text"
# The same question with a cache. `donate` lets the step write into the old cache's memory (chapter 06).

# %% id="same"
decode = mine("inference.decode")
step = compiled(decode, donate=3)
logits, cache = read_prompt(prompt_for(question))
said = []
while len(said) < 24 and END not in said:
    said.append(int(jnp.argmax(logits[0, : tokenizer.vocab_size])))
    logits, cache = step(config, params, jnp.array(said[-1:]), cache)
print(repr(tokenizer.decode(said)))
print("token for token that of the textbook loop:", said == expected)
assert said == expected

# %% id="prefill-quiz"
quiz("inference.q_prefill")

# %% [markdown] id="bytes-text"
# ## 4. A step reads everything
#
# How fast can a step be? Count what it must do.
#
# - *Bytes*: every matrix is read once. (Tables are only looked up, one row each.) And each row reads its own cache.
# - *FLOPs*: each row needs two for every weight of a matrix, and two for every cached number that attention meets.
#
# A chip reads and computes at the same time. So the longer of the two is a floor: no program for this model is faster.


# %% tags=["exercise"] id="inference.decode_floor" points=2 minutes=10 level=1
def decode_floor(
    weight_bytes: float, cache_bytes: float, flops: float, rows: int, bandwidth: float, peak: float
) -> float:  # fmt: skip
    """The least seconds that a decode step of `rows` rows can take.

    weight_bytes: of all matrices. cache_bytes and flops: of *one* row in one step. bandwidth in bytes/s, peak in FLOP/s.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    reading = (weight_bytes + rows * cache_bytes) / bandwidth
    computing = rows * flops / peak
    return max(reading, computing)
    # --- end


# %% id="inference.decode_floor.check"
check("inference.decode_floor", decode_floor)

# %% tags=["hidden"] id="inference.decode_floor.hidden"
hidden(
    "inference.decode_floor",
    reference("another machine", checks.some_machine, against=checks.floor_of),
    example("nothing is cached", (2e9, 0.0, 2e9, 3, 1e12, 1e14), 2e-3),
)
mutant("inference.decode_floor", "max(reading, computing)", "reading + computing", says="not the sum")
mutant(
    "inference.decode_floor",
    "(weight_bytes + rows * cache_bytes)",
    "rows * (weight_bytes + cache_bytes)",
    says="once a step",
)
mutant("inference.decode_floor", "rows * cache_bytes", "cache_bytes", says="cache of its own")
mutant("inference.decode_floor", "rows * flops / peak", "flops / peak", says="its own arithmetic")

# %% [markdown] id="d24-text"
# Put in d24, in bfloat16, with a context that is full. 730 million weights are in matrices: 1.46 GB. One row's cache is
# 0.13 GB. An H100 reads 3.35 TB/s. That makes 0.48 ms a step, 2,100 tokens a second. The arithmetic alone would take a
# three-hundredth of it.

# %% tags=["slide"] id="d24"
floor = mine("inference.decode_floor")
chips = {chip.name: chip for chip in CHIPS if chip.name in ("v6e", "h100")}
matrices = 2 * scaling_params(d24)  # bytes


def of_a_row(context):
    """(bytes, FLOPs) of one row's part of a step of d24, when it holds `context` tokens."""
    seen = sum(min(window, context) for window in d24.windows)
    return row_bytes(d24, context, "bfloat16")["total"], 2 * scaling_params(d24) + 4 * d24.n_embd * seen


def best(chip, context, count):
    """Most tokens a second, all rows together."""
    return count / floor(matrices, *of_a_row(context), count, chip.bandwidth, chip.peak["bfloat16"])


for name, chip in chips.items():
    seconds = floor(matrices, *of_a_row(2048), 1, chip.bandwidth, chip.peak["bfloat16"])
    arithmetic = of_a_row(2048)[1] / chip.peak["bfloat16"]
    print(f"{name}: at least {1e3 * seconds:.2f} ms a step, of which {1e3 * arithmetic:.4f} ms would do to compute")
about(best(chips["h100"], 2048, 1), 2104, within=5, name="tokens/s of one row, H100, at most")
_ = about(best(chips["v6e"], 2048, 1), 1030, within=5, name="tokens/s of one row, v6e, at most")

# %% [markdown] id="prefill-floor-text"
# And prefill? It is the same formula: tokens of a prompt share the weights as rows do. 2,048 tokens in one go on the H100,
# beside 2,048 steps of decode:

# %% tags=["slide"] id="prefill-floor"
h100 = chips["h100"]
at_once = floor(matrices, 0, 2 * scaling_params(d24), 2048, h100.bandwidth, h100.peak["bfloat16"])
one_by_one = sum(16 / best(h100, context, 1) for context in range(16, 2049, 16))
about(1e3 * at_once, 3.0, within=0.1, name="prefill of 2,048 tokens, matrices alone, ms at least")
_ = about(1e3 * one_by_one, 946, within=3, name="the same by decode, ms at least")

# %% [markdown] id="prefill-floor-look"
# Three hundred times as fast, and bound by arithmetic. That is why a long prompt is read in a moment and a short answer
# takes its time.

# %% [markdown] id="rows-text"
# The weights are read once a step, whoever is served. So a second row costs little. How many tokens a second can 64 rows
# get on the H100, all together? `predict("inference.p_rows", …)`.

# %% id="rows-predict"
predict("inference.p_rows")

# %% id="rows-reveal"
reveal("inference.p_rows", round(best(chips["h100"], 2048, 64)))
_ = about(
    best(chips["h100"], 2048, 64) / best(chips["h100"], 2048, 1), 10.3, within=0.1, name="as many as one row, times"
)

# %% [markdown] tags=["slide"] id="rows-look"
# Ten times as many, not 64 times. The weights are shared, the caches are not: from 11 rows on this step reads more cache
# than weights. With full contexts of 2,048 tokens decode *never* becomes bound by arithmetic, on either chip. With short
# ones it does: then a row costs 1.46 GFLOP and hardly a byte, and the lines bend where the chip's FLOPs per byte are used up.
#
# Move the context and the number of rows.


# %% id="widget-bytes"
def draw_floors(context=2048, rows=64):
    counts = np.unique(np.geomspace(1, 1024, 60).round().astype(int))
    figure, (left, right) = new_figure(1, 2, height=2.9, width=7.6, width_ratios=(1.7, 1))
    for (name, chip), colour, line in zip(chips.items(), (ORANGE, BLUE), ("--", "-"), strict=True):
        left.plot(counts, [best(chip, context, n) for n in counts], line, color=colour, label=name)
        left.plot([rows], [best(chip, context, rows)], "o", color=colour)
        left.plot(counts, counts * best(chip, context, 1), ":", color=colour, linewidth=1)
    left.set_xscale("log")
    left.set_yscale("log")
    left.legend(fontsize=8.5)
    label(left, f"d24, context of {context:,}: at most", "rows", "tokens/s, all rows")
    cache_bytes, _ = of_a_row(context)
    right.bar([0, 1], [matrices / 1e9, rows * cache_bytes / 1e9], color=[SKY, RED], width=0.6)
    right.set_xticks([0, 1], ["weights", f"{rows} caches"])
    label(right, "Read by one step", "", "GB")
    return figure


explore(
    draw_floors,
    alt="left: the most tokens a second of d24 over the number of rows, on an H100 and a v6e, both axes logarithmic; the "
    "curves leave the dotted lines of proportional growth at about ten rows and become flat. right: two bars, the bytes of "
    "the weights and the much larger ones of 64 caches",
    context=choice([16, 128, 512, 1024, 2048], 2048),
    rows=slider(1, 512, 64, 1),
)

# %% [markdown] id="measure-text"
# ### Measured, here
#
# The same for the machine that this notebook runs on. Its bandwidth: copy a large array, count what was read and written.
# Its peak: a large matrix product (`cpu_peak`). The model: your `decode` on wide layers, so that the weights are far larger
# than a processor's caches. Contexts are short, so arithmetic must bind at some number of rows.

# %% id="measure"
wide_config = GPTConfig(
    sequence_len=128, vocab_size=512, n_layer=1 if fast() else 2, n_head=8, n_kv_head=8, n_embd=256 if fast() else 1024,
    window_pattern="L",
)  # fmt: skip
counts = (1, 8) if fast() else (1, 2, 4, 8, 16, 32)


def fastest(work, times):
    """Least seconds of several runs of `work`."""
    seconds = []
    for _ in range(times):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def measure():
    """(bandwidth in bytes/s, seconds of a decode step for each of `counts`)."""
    source = np.ones(2**23 if fast() else 2**26, np.float32)
    target = np.empty_like(source)
    bandwidth = 2 * source.nbytes / fastest(lambda: np.copyto(target, source), 4)
    wide_params, seconds = random_params(wide_config), []
    wide_step = compiled(decode, donate=3)
    for count in counts:
        state = [None, init_cache(wide_config, count, 128)]
        token = jnp.zeros(count, jnp.int32)

        def one_step(state=state, token=token):
            state[:] = wide_step(wide_config, wide_params, token, state[1])
            state[0].block_until_ready()

        one_step()  # compiles
        seconds.append(fastest(one_step, 4 if fast() else 16))
    return bandwidth, seconds


bandwidth, measured = measure()
peak = cpu_peak()
print(f"{4 * scaling_params(wide_config) / 1e6:.0f} MB of matrices, {len(counts)} sizes of a batch measured")

# %% tags=["slide"] id="measure-figure"
weights = 4 * scaling_params(wide_config)
row = row_bytes(wide_config, 128)["total"], 2 * scaling_params(wide_config)
smooth = np.geomspace(1, counts[-1], 40)
floors = np.array([floor(weights, *row, n, bandwidth, peak) for n in smooth])
figure, (left, right) = new_figure(1, 2, height=2.8, width=7.6)
for ax, line, points, title, y in (
    (left, 1e3 * floors, 1e3 * np.array(measured), "One step", "ms"),
    (right, smooth / floors, np.array(counts) / measured, "All rows together", "tokens/s"),
):
    ax.plot(smooth, line, color=BLUE, label="floor")
    ax.plot(counts, points, "o--", color=ORANGE, label="measured")
    ax.set_xscale("log", base=2)
    ax.set_xticks(counts, counts)
    ax.set_ylim(0)
    label(ax, title, "rows", y)
left.legend(fontsize=8.5)
show(
    figure,
    alt="left: milliseconds of a decode step over the number of rows, floor and measured: nearly flat for few rows, then "
    "rising. right: tokens a second of all rows together, floor and measured: both grow with the rows, the floor's until "
    "arithmetic binds, then it is flat. measured steps are slower than the floor",
)
show(volatile(f"{bandwidth / 1e9:.0f} GB/s copied, {peak / 1e9:.0f} GFLOP/s in matrix products"))

# %% [markdown] id="measure-look"
# The *shape* is what matters. Few rows: a step takes the same time for one or for four, since it reads the same weights,
# and tokens a second grow with the rows. Many: arithmetic binds, the step gets longer with each row, and the curve levels
# off. How far your points lie above the floor is this machine's and its compiler's own story. Where this was written, a step
# took about twice its floor, and one with a *single* row three to four times as long as one with two: the compiler has a
# fast product for matrices, and a slow one for a single row. A floor tells you that there is something to look for.

# %% id="rows-quiz"
quiz("inference.q_rows")

# %% [markdown] id="batch-text"
# ## 5. Many answers at once
#
# So answers should share steps. Your `decode` can do it already: each row has its own position, and `alive` says who is
# still talking. Prompts are read one by one and put into their rows, then all move along together.
#
# A draft of this cell looked at the length of the *first* answer only. That one ended, another one never did, and the loop
# ran on for seven minutes, far beyond the 256 slots, without a word: the silent writes of section 2. A limit belongs to
# every row.

# %% id="batch"
questions = ["How much is 12 + 30?", "Spell pordono", "How are you?", "How much is 7 * 6?"]
together = init_cache(config, len(questions), CONTEXT)
first = []
for i, asked in enumerate(questions):
    logits, one = read_prompt(prompt_for(asked))
    together = put_row(together, i, one)
    first.append(int(jnp.argmax(logits[0, : tokenizer.vocab_size])))
newest, alive, answers = jnp.array(first), np.array([t != END for t in first]), [[t] for t in first]
while alive.any() and max(map(len, answers)) < 24:
    logits, together = step(config, params, newest, together, alive=jnp.asarray(alive))
    newest = jnp.argmax(logits[:, : tokenizer.vocab_size], axis=-1)
    for i in np.flatnonzero(alive):
        answers[i].append(int(newest[i]))
    alive &= np.asarray(newest) != END
for asked, answer in zip(questions, answers, strict=True):
    print(f"{asked:<22} {tokenizer.decode(answer)!r}")
print("the first one as it was alone:", answers[0] == expected[: len(answers[0])])

# %% [markdown] id="schedule-text"
# When a row ends early, what becomes of its place? If the batch waits for its longest answer, most rows idle. Better: a row
# that is free takes the next request at once. This is *continuous batching* (Orca, Yu et al., OSDI 2022). Here are 24
# requests of different lengths in 6 rows, both ways; a step of decode costs the same in both.


# %% tags=["slide"] id="schedule"
needed = np.minimum(6 + np.random.default_rng(4).exponential(28, 24), 120).round().astype(int)


def waiting(needed, rows):
    """(row, begin, end) of each answer when every batch waits for its longest."""
    places, now = [], 0
    for first in range(0, len(needed), rows):
        group = needed[first : first + rows]
        places += [(row, now, now + n) for row, n in enumerate(group)]
        now += max(group)
    return places


def refilled(needed, rows):
    """The same when a free row takes the next request at once."""
    free, places = [0] * rows, []
    for n in needed:
        row = free.index(min(free))
        places.append((row, free[row], free[row] + n))
        free[row] += n
    return places


figure, axes = new_figure(2, 1, height=3.4, width=7.2, sharex=True)
used = {}
for ax, (name, plan) in zip(axes, {"the batch waits": waiting, "rows are refilled": refilled}.items(), strict=True):
    places = plan(needed, 6)
    last = max(end for _, _, end in places)
    used[name] = last, needed.sum() / (6 * last)
    for i, (row_number, begin, end) in enumerate(places):
        ax.barh(row_number, end - begin, left=begin, height=0.8, color=(BLUE, SKY)[i // 6 % 2], edgecolor="white")
    ax.axvline(last, color=RED, linewidth=1.2)
    ax.set_yticks(range(6))
    ax.invert_yaxis()
    label(ax, f"{name}: {last} steps, {used[name][1]:.0%} of the places used", "", "row")
axes[1].set_xlabel("decode step")
show(
    figure,
    alt="two timelines of six rows. above: answers of different lengths start together and the short ones leave gaps until "
    "the longest ends. below: each row takes the next answer at once, there are hardly any gaps and all is done earlier",
)
about(used["the batch waits"][0], 395, within=0.5, name="steps when batches wait")
_ = about(used["rows are refilled"][0], 226, within=0.5, name="steps when rows are refilled")

# %% [markdown] id="schedule-look"
# `BatchingEngine` in `nanochat_lib/batching.py` does this in a thread: prompts in chunks between the steps of the others,
# tools, cancelled requests, and rows that remember their text for the next turn.
#
# ## 6. From logits to a token
#
# Taking the likeliest token always gives the same answer, and a dull one. So one *draws*:
#
# 1. ids from `vocab` up get nothing. The table has 512 rows and the tokenizer 500 tokens; no text belongs to the other 12,
#    and the model was never taught to avoid them.
# 2. temperature: logits are divided by it. Below 1 the likely tokens gain, above 1 the others do; 0 takes the likeliest.
# 3. top_k: only the `top_k` likeliest stay (0: all).
# 4. top_p: of those, the fewest whose shares sum to `top_p` (nucleus sampling, Holtzman et al., arXiv:1904.09751).
#
# nanochat has no top_p; its page uses temperature 0.8 and top_k 50.


# %% tags=["exercise"] id="inference.probabilities" points=3 minutes=20 level=2
def probabilities(logits: np.ndarray, temperature: float, top_k: int, top_p: float, vocab: int) -> np.ndarray:
    """(V,) float64: the probability of each id to be drawn. logits (V,).

    Ids from `vocab` up get 0. temperature 0: 1 for the first of the largest, 0 for all others. top_k 0: off, top_p 1: off.
    Of equal logits the lower ids come first.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    logits = np.array(logits, np.float64)
    logits[vocab:] = -np.inf
    order = np.argsort(-logits, kind="stable")
    if temperature == 0:
        top_k, temperature = 1, 1.0
    if top_k:
        logits[order[top_k:]] = -np.inf
    weights = np.exp((logits - logits.max()) / temperature)
    shares = weights / weights.sum()
    if top_p < 1:
        before = np.cumsum(shares[order]) - shares[order]
        shares[order[before >= top_p]] = 0
    return shares / shares.sum()
    # --- end


# %% id="inference.probabilities.check"
check("inference.probabilities", probabilities)

# %% tags=["hidden"] id="inference.probabilities.hidden"
hidden(
    "inference.probabilities",
    reference("hot, both limits", lambda rng: checks.some_logits(rng, 2.0, 6, 0.9), against=checks.shares),
    reference("top_k above the vocabulary", lambda rng: checks.some_logits(rng, 1.0, 50, 1.0), against=checks.shares),
    reference("a tiny top_p keeps one", lambda rng: checks.some_logits(rng, 1.0, 0, 0.01), against=checks.shares),
)
mutant("inference.probabilities", "logits[vocab:] = -np.inf", "pass", says="padding")
mutant("inference.probabilities", "logits.max()) / temperature", "logits.max()) * temperature", says="*divided*")
mutant("inference.probabilities", "before >= top_p", "before + shares[order] >= top_p", says="belongs to it")
mutant("inference.probabilities", "return shares / shares.sum()", "return shares", says="sum to 1")
mutant(
    "inference.probabilities",
    "        top_k, temperature = 1, 1.0",
    "        temperature = 1.0",
    says="first of the largest",
)
mutant("inference.probabilities", "logits[order[top_k:]]", "logits[order[top_k + 1 :]]", says="expected")

# %% [markdown] id="widget-text"
# Here is what the model thinks at three places of a chat: at the beginning of an answer, inside of a sum, and where a word
# is about to be spelled. Move the controls. Blue can be drawn, grey cannot.

# %% id="widget"
shares_of = mine("inference.probabilities")
places = {
    "an answer begins": prompt_for("Hello"),
    "a sum goes on": prompt_for("How much is 12 + 30?") + [special("<|python_start|>"), *tokenizer.encode("12")],
    "a word is spelled": prompt_for("Spell pordono") + tokenizer.encode("Letters:"),
}
thoughts = {name: np.asarray(read_prompt(ids)[0][0]) for name, ids in places.items()}


def draw_choice(place="an answer begins", temperature=1.0, top_k=0, top_p=0.9):
    logits = thoughts[place]
    plain = shares_of(logits, max(temperature, 0.01), 0, 1.0, tokenizer.vocab_size)
    cut = shares_of(logits, temperature, top_k, top_p, tokenizer.vocab_size)
    likeliest = np.argsort(-logits[: tokenizer.vocab_size], kind="stable")[:16]
    figure, ax = new_figure(height=2.7, width=7.4)
    ax.bar(range(16), 100 * plain[likeliest], color="#cccccc", width=0.85, label="by temperature alone")
    ax.bar(range(16), 100 * cut[likeliest], color=BLUE, width=0.5, label="what can be drawn")
    ax.set_xticks(
        range(16), [repr(tokenizer.decode([int(i)]))[1:-1] for i in likeliest], rotation=50, ha="right", fontsize=7.5
    )
    ax.legend(fontsize=8.5)
    label(ax, f"{place}: {int((cut > 0).sum())} of {tokenizer.vocab_size} tokens can be drawn", "", "probability, %")
    return figure


explore(
    draw_choice,
    alt="bars of the 16 likeliest next tokens with their probabilities: grey by temperature alone, blue what is left to be "
    "drawn from after top_k and top_p",
    place=choice(list(places), "an answer begins"),
    temperature=slider(0.0, 3.0, 1.0, 0.1),
    top_k=slider(0, 50, 0, 1),
    top_p=slider(0.05, 1.0, 0.9, 0.05),
)

# %% [markdown] id="tools-text"
# ## 7. Tools
#
# The model writes `<|python_start|>12+30<|python_end|>` and then needs an answer. The engine watches each token that is
# added, and keeps a small state for each row: inside of a call or not, and which tokens the call holds. When a call closes,
# it evaluates the expression and *forces* the result: the next tokens of this row are `<|output_start|>`, the digits,
# `<|output_end|>`, whatever the model would have sampled. They count as part of the answer and have mask 0.


# %% tags=["exercise"] id="inference.tool_step" points=2 minutes=12 level=2 library="nanochat_lib.decoding:tool_step"
def tool_step(state: ToolState, token: int, start: int, end: int) -> tuple[ToolState, list[int]]:
    """The state after one more token of an answer, and the expression's tokens if it closes a call, else [].

    A ToolState has `inside` (False at first) and `expression`, a tuple of tokens. `start` opens a call, and inside of one
    opens it anew. `end` closes it, and means nothing outside of one.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    if token == start:
        return ToolState(True), []
    if token == end:
        return ToolState(), list(state.expression)
    if state.inside:
        state = ToolState(True, (*state.expression, token))
    return state, []
    # --- end


# %% id="inference.tool_step.check"
check("inference.tool_step", tool_step)

# %% tags=["hidden"] id="inference.tool_step.hidden"
hidden(
    "inference.tool_step",
    reference("other tokens", checks.some_answer),
    example("opened twice", (checks.NEW, [7, 3, 7, 4, 8], 7, 8), [
        (True, [], []), (True, [3], []), (True, [], []), (True, [4], []), (False, [], [4]),
    ]),
    example("closed twice", (checks.NEW, [7, 3, 8, 8], 7, 8), [(True, [], []), (True, [3], []), (False, [], [3]), (False, [], [])]),
)  # fmt: skip
mutant(
    "inference.tool_step", "return ToolState(True), []", "return state._replace(inside=True), []", says="opens it anew"
)
mutant(
    "inference.tool_step",
    "ToolState(), list(state.expression)",
    "state, list(state.expression)",
    says="plain text again",
)
mutant("inference.tool_step", "if state.inside:", "if True:", says="outside of a call")
mutant("inference.tool_step", "(*state.expression, token)", "(token, *state.expression)", says="wrong order")
mutant("inference.tool_step", "ToolState(), list(state.expression)", "ToolState(), []", says="handed over")

# %% [markdown] id="eval-text"
# Who evaluates `12+30`? The shortest answer is Python: `eval(text)`. But the text comes from a *model*, and what a model
# writes anybody can steer who talks to it. nanochat calls `eval` without built-ins, behind a list of letters that may occur
# and a list of words that must not, with an alarm after three seconds. Is a Python without built-ins harmless?

# %% id="eval"
reach = eval("().__class__.__mro__[1].__subclasses__()", {"__builtins__": {}}, {})
print("an expression without any built-in function reaches more than 100 classes:", len(reach) > 100)

# %% id="eval-quiz"
quiz("inference.q_eval")

# %% [markdown] id="parser-text"
# nanochat's list has `__` on it, so this one is refused. A list of what is *not* allowed is as good as the imagination of
# who wrote it. The alarm works in the main thread only, while a web server answers in others. And since all commas are
# dropped first, `"a,b".count(',')` counts nothing at all in "ab", and is 3.
#
# So turn it round: say what *is* allowed, and read that with a small parser. The language is sums and products of numbers,
# brackets, and `'text'.count('part')`. `tokens_of` cuts a text into (kind, text) pairs and raises `NoResult` at the first
# foreign sign. The parser has a method for each rank, and each calls the next: sum → product → signed → counted → atom.

# %% id="tokens"
for text in ("2*(3+4)", "'strawberry'.count('r')", "2**3", "import os"):
    try:
        print(f"{text:<24} {tokens_of(text)}")
    except NoResult:
        print(f"{text:<24} no result")


# %% tags=["exercise"] id="inference.parser" points=4 minutes=25 level=3 library="nanochat_lib.calculator:Parser"
class Parser:
    """Recursive descent with Python's precedence: signs, then `* / //`, then `+ -`; left to right.

    Raises NoResult for whatever is not in the language. `numbers(a, b)` gives both back, or NoResult if one is a text.
    """

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0

    def take(self, *signs: str) -> str | None:
        kind, sign = self.tokens[self.at]
        if kind != "sign" or sign not in signs:
            return None
        self.at += 1
        return sign

    def whole(self) -> Value:
        value = self.sum()
        if self.tokens[self.at][0] != "end":
            raise NoResult
        return value

    def sum(self) -> Value:
        value = self.product()
        while sign := self.take("+", "-"):
            left, right = numbers(value, self.product())
            value = left + right if sign == "+" else left - right
        return value

    def product(self) -> Value:
        """Signed values with `*`, `/` and `//` between them."""
        # --- stub
        raise NotImplementedError
        # --- solution
        value = self.signed()
        while sign := self.take("*", "/", "//"):
            left, right = numbers(value, self.signed())
            value = left * right if sign == "*" else left / right if sign == "/" else left // right
        return value
        # --- end

    def signed(self) -> Value:
        """A counted value with any number of signs before it; only numbers have signs."""
        # --- stub
        raise NotImplementedError
        # --- solution
        signs = ""
        while sign := self.take("-", "+"):
            signs += sign
        value = self.counted()
        if signs:
            (value,) = numbers(value)
        return -value if signs.count("-") % 2 else value
        # --- end

    def counted(self) -> Value:
        value = self.atom()
        while self.take(".count("):
            part = self.bracketed()
            if not isinstance(value, str) or not isinstance(part, str):
                raise NoResult
            value = value.count(part)
        return value

    def atom(self) -> Value:
        """A bracket; or a text without its quotes; or a number: float with a point, else int. 007 is none."""
        # --- stub
        raise NotImplementedError
        # --- solution
        if self.take("("):
            return self.bracketed()
        kind, text = self.tokens[self.at]
        self.at += 1
        if kind == "text":
            return text[1:-1]
        if kind != "number" or (text.isdigit() and text[0] == "0" and text.strip("0")):
            raise NoResult
        return float(text) if "." in text else int(text)
        # --- end

    def bracketed(self) -> Value:
        """What follows an opening bracket, up to and with the closing one. Deeper than MAX_DEPTH: NoResult."""
        # --- stub
        raise NotImplementedError
        # --- solution
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NoResult
        value = self.sum()
        self.depth -= 1
        if not self.take(")"):
            raise NoResult
        return value
        # --- end


# %% id="inference.parser.check"
check("inference.parser", Parser)

# %% tags=["hidden"] id="inference.parser.hidden"
hidden(
    "inference.parser",
    reference("other sums", checks.some_sum, against=checks.ByPython),
    example("many brackets side by side", lambda: checks.lexed("+".join(["(1)"] * 40)), 40),
    example("a text times a number", ([("text", "'ab'"), ("sign", "*"), ("number", "3"), ("end", "")],), "no result"),
    example("divided by zero", lambda: checks.lexed("1/0"), "no result"),
    example("a number that is none", lambda: checks.lexed("007"), "no result"),
)
mutant("inference.parser", 'self.take("*", "/", "//")', 'self.take("*", "/")', says="operator of its own")
mutant("inference.parser", "numbers(value, self.signed())", "(value, self.signed())", says="a text is no number")
mutant("inference.parser", 'signs.count("-") % 2', '"-" in signs', says="two minus signs")
mutant("inference.parser", "self.depth > MAX_DEPTH", "self.depth > 10 * MAX_DEPTH", says="must have a bound")
mutant("inference.parser", "self.depth -= 1", "self.depth -= 0", says="not how many")
mutant("inference.parser", 'if not self.take(")"):', 'if self.take(")") and False:', says="must be closed")
mutant("inference.parser", 'float(text) if "." in text else int(text)', "float(text)", says="without a point")
mutant(
    "inference.parser",
    body="""
class Parser:
    def __init__(self, tokens):
        self.text = "".join(text for _, text in tokens)

    def whole(self):
        try:
            return eval(self.text, {"__builtins__": {}})
        except Exception:
            raise NoResult from None
""",
    says="run as code",
)

# %% tags=["slide"] id="calculator"
Parser = mine("inference.parser")


def my_calculate(text):
    """The value of a text, or None. As calculate() in nanochat_lib/calculator.py, with your parser."""
    try:
        value = Parser(tokens_of(text)).whole()
    except (NoResult, ZeroDivisionError):
        return None
    return None if isinstance(value, str) or len(str(value)) > MAX_RESULT_CHARS else value


for text in ("12/60", "1,000*2", "'strawberry'.count('r')", "2**3", "10/3", "9*" * 120 + "9", "().__class__", "1/0"):
    shown = text if len(text) < 30 else text[:12] + " …"
    print(f"{shown:<26} {my_calculate(text)}")
    assert my_calculate(text) == calculate(text)

# %% [markdown] id="engine-text"
# ## 8. The engine
#
# All parts are there: put them together. Read the loop once, line by line; it is short, and it is all that an engine is.
# Sampling happens in NumPy, so each request can have options of its own.


# %% id="engine"
tool_step = mine("inference.tool_step")
OPEN, CLOSE = special("<|python_start|>"), special("<|python_end|>")


class MyEngine:
    """Answers to prompts, one at a time, from the functions of this chapter."""

    def __init__(self, config, params, tokenizer):
        self.config, self.params, self.tokenizer = config, params, tokenizer
        self.said = []  # what it has generated, to look at

    def read(self, tokens):
        """(logits (1, V), cache) after the prompt."""
        return read_prompt(tokens)

    def generate(self, tokens, num_samples=1, max_tokens=64, temperature=0.0, top_k=None, seed=0):
        """Yields ([token], [mask]); mask 0 for what the calculator says."""
        rng, vocab = np.random.default_rng(seed), self.tokenizer.vocab_size
        logits, cache = self.read(tokens)
        state, forced = ToolState(), []
        for _ in range(max_tokens):
            if forced:
                token, mask = forced.pop(0), 0
            else:
                shares = shares_of(np.asarray(logits[0]), temperature, top_k or 0, 1.0, vocab)
                token, mask = int(rng.choice(len(shares), p=shares)), 1
            self.said.append(token)
            yield [token], [mask]
            if token in (END, BOS):
                return
            state, call = tool_step(state, token, OPEN, CLOSE)
            value = my_calculate(self.tokenizer.decode(call)) if call else None
            if value is not None:
                digits = self.tokenizer.encode(result_text(value))
                forced = [special("<|output_start|>"), *digits, special("<|output_end|>")]
            logits, cache = step(self.config, self.params, jnp.array([token]), cache)


my_engine = MyEngine(config, params, tokenizer)
columns = list(my_engine.generate(prompt_for("How much is 97 + 86?"), max_tokens=40))
spoken, forced_mask = [t for (t,), _ in columns], [m for _, (m,) in columns]
print(tokenizer.decode(spoken))
print("mask", "".join(map(str, forced_mask)))

# %% [markdown] id="engine-look"
# The tokens with mask 0 are the calculator's. Does it say what the library's engine says? Three questions, temperature 0,
# token for token. And how many of some sums and words that were not in the training does it get right?

# %% id="engine-same"
from nanochat_lib.engine import Engine

if not fast():  # it compiles programs of its own
    prompts = [prompt_for(asked) for asked in questions[:3]]
    theirs = Engine(config, params, tokenizer).generate_batch(prompts, max_tokens=24, temperature=0.0, include_end=True)
    for prompt, sequence in zip(prompts, theirs.sequences, strict=True):
        assert [t for (t,), _ in my_engine.generate(prompt, max_tokens=24)] == sequence[len(prompt) :]
    print("the same tokens as nanochat_lib.engine.Engine")

graded = 1 if fast() else 30
tests = [(task, task[i]) for task in (PrimerSums(world, "test"), PrimerSpelling(world, "test")) for i in range(graded)]


def right_answers(engine, tests):
    """Share of the tests that `engine` answers rightly."""
    marks = []
    for task, chat in tests:
        ids = render_for_completion(tokenizer, chat, CONTEXT - 1)
        text = tokenizer.decode([t for (t,), _ in engine.generate(ids, max_tokens=40)])
        marks.append(task.evaluate(chat, text.removesuffix("<|assistant_end|>")))
    return float(np.mean(marks))


share = right_answers(my_engine, tests)
print(f"{len(tests)} questions asked")
if not fast():
    _ = about(100 * share, 97, within=6, name="answers that are right, %")

# %% [markdown] id="serve-text"
# ## 9. The real page
#
# The library's web server takes any engine with `generate`. `OneAtATime` puts requests in line and runs them in a thread;
# `make_app` is the application that `nanochat serve` runs, with its page and its endpoints. The cell starts it on a free
# port of this machine, asks for the page, and then does what the page does when you press Enter: it posts the conversation
# and reads the stream of events.

# %% tags=["slide"] id="serve"
KEEP = False  # True: the page stays open until you interrupt the kernel (the square button)


def post(url, body):
    """The events of an answer, as they come."""
    data = json.dumps(body).encode()
    request = urllib.request.Request(url + "/chat/completions", data, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        for line in answer:
            if line.startswith(b"data: "):
                yield json.loads(line[6:])


def serve(engine, keep):
    """Starts the server, asks it one question, and stays if wanted: (page, events, what the engine said)."""
    batching = OneAtATime(engine, tokenizer, CONTEXT)
    settings = Settings(max_tokens=64, temperature=0.7, top_k=20, title="my engine, chapter 10")
    try:
        with running(make_app(batching, tokenizer, settings, context=CONTEXT)) as url:
            page = urllib.request.urlopen(url, timeout=60).read().decode()
            chat = [{"role": "user", "content": "How much is 97 + 86?"}]
            events = list(post(url, {"messages": chat, "temperature": 0, "max_tokens": 24}))
            said = list(engine.said)
            if keep:
                show(volatile(f"Open {url} in a browser on this machine. Interrupt the kernel to close it."))
                with contextlib.suppress(KeyboardInterrupt):
                    threading.Event().wait()
    finally:
        batching.close()
    return page, events, said


my_engine.said.clear()
page, events, said = serve(my_engine, KEEP)
print("the page:", page[page.index("<title>") : page.index("</title>") + 8], f"and {page.count('<')} tags")
for event in events[:4]:
    print("data:", json.dumps(event, ensure_ascii=False))
print(f"… {len(events)} events; the last: {events[-1]}")
streamed = "".join(event.get("token", "") for event in events)
print("what came through the wire:", streamed)
print("what your engine had said: ", tokenizer.decode([t for t in said if t != END]))

# %% [markdown] id="serve-look"
# The same text: what came through the wire is what your `decode`, `probabilities`, `tool_step` and `Parser` made. Now set
# `KEEP = True`, run the cell again, open the address and talk to it. Try `/temperature 1.5`, and the Tokens panel. When the
# notebook runs on another machine, forward the port first: `ssh -L 8000:127.0.0.1:PORT machine`. Set it back to `False`
# before you run the whole notebook again: the cell would wait for you.

# %% id="whose"
names = ("held", "store_token", "cached_attention", "decode", "decode_floor", "probabilities", "tool_step", "parser")
for name in names:
    _ = mine(f"inference.{name}")

# %% [markdown] id="field-text"
# ## 10. Field lesson: the second turn
#
# A chat sends the whole conversation with each question. nanochat's chat prefills all of it anew, each time. A chat of 20
# exchanges: each question has 30 tokens, each answer 30. How many tokens are prefilled in all?
# `predict("inference.p_turns", …)`.

# %% id="field-predict"
predict("inference.p_turns")

# %% tags=["slide"] id="field-cost"
turns = np.arange(20)
anew, kept = np.cumsum(60 * turns + 30), 30 * (turns + 1)
reveal("inference.p_turns", int(anew[-1]))
print(f"with a cache that stays: {kept[-1]}; anew, {anew[-1] // kept[-1]} times as many")

# %% [markdown] id="trap-text"
# The cure is plain: the row still holds the first turn, so run only the new tokens behind it. In nanochat's model there is
# a trap. Smear mixes into each token the embedding of the one before. Its rule for a call with a cache: several tokens at
# once are a prompt, and the *first* of them has nothing before it. True for a first turn. In a second one it has: the last
# token of the turn before. Nobody mixes it in. On a small test model the logits then differ by up to 0.19; in one go
# against token by token they differ by 0.0000004. No error, no NaN, and all shapes are right.
#
# `gpt.extend` runs tokens behind what a row holds. It takes the token before them, `previous`; −1 says there is none. So
# we can make the mistake: prompts of sums, cut into parts of 2, 4, 8 or 16 tokens.


# %% tags=["slide"] id="trap"
extend = compiled(gpt.extend)


class InParts(MyEngine):
    """Reads prompts in parts. `careful`: the first token of a part is smeared with the last one of the part before."""

    def __init__(self, size, careful):
        super().__init__(config, params, tokenizer)
        self.size, self.careful = size, careful

    def read(self, tokens):
        cache = init_cache(self.config, 1, CONTEXT)
        for begin in range(0, len(tokens), self.size):
            part = tokens[begin : begin + self.size]
            padded = np.array([part + [BOS] * (self.size - len(part))], np.int32)
            previous = tokens[begin - 1] if self.careful and begin else -1
            logits, cache = extend(
                self.config, self.params, padded, jnp.array([len(part)]), jnp.array([previous]), cache
            )
        return logits, cache


sizes = (4,) if fast() else (2, 4, 8, 16)
sums = [(task, chat) for task, chat in tests if isinstance(task, PrimerSums)]
asked = [render_for_completion(tokenizer, chat, CONTEXT - 1) for _, chat in sums]
reference_logits = [np.asarray(my_engine.read(ids)[0][0, : tokenizer.vocab_size]) for ids in asked]
apart, marks = {}, {}
for size in sizes:
    for careful in (True, False):
        engine = InParts(size, careful)
        found = [np.asarray(engine.read(ids)[0][0, : tokenizer.vocab_size]) for ids in asked]
        apart[size, careful] = max(np.abs(a - b).max() for a, b in zip(found, reference_logits, strict=True))
        marks[size, careful] = right_answers(engine, sums)

figure, (left, right) = new_figure(1, 2, height=2.7, width=7.6)
where = np.arange(len(sizes))
for shift, careful, colour, name in ((-0.2, True, BLUE, "smeared across the cut"), (0.2, False, RED, "not smeared")):
    left.bar(where + shift, [apart[size, careful] for size in sizes], 0.38, color=colour, label=name)
    right.bar(where + shift, [100 * marks[size, careful] for size in sizes], 0.38, color=colour)
    right.set_ylim(0, 105)
for ax in (left, right):
    ax.set_xticks(where, sizes)
left.set_yscale("log")
left.set_ylim(1e-7, 300)
left.legend(fontsize=7.5, loc="upper left", ncol=2)
label(left, "First logits: largest difference", "tokens a part", "from the prompt in one go")
label(right, "Sums answered rightly", "tokens a part", "%")
show(
    figure,
    alt="left, logarithmic: logits of prompts read in parts differ by about a millionth when the first token of each part is "
    "smeared with the one before, and by about a tenth or more when it is not. right: share of sums answered rightly, lower "
    "without smear when the parts are short",
)

# %% id="trap-numbers"
print("smeared across the cut, the prompt in parts is the prompt:", bool(max(apart[s, True] for s in sizes) < 1e-3))
assert max(apart[size, True] for size in sizes) < 1e-3
if not fast():
    about(apart[16, False], 0.4, within=0.3, name="not smeared, parts of 16: largest difference of logits")
    about(apart[2, False], 1.6, within=1.0, name="not smeared, parts of 2")
    about(100 * marks[16, False], 100, within=7, name="sums right, not smeared, parts of 16, %")
    _ = about(100 * marks[2, False], 57, within=40, name="sums right, not smeared, parts of 2, %")

# %% id="smear-quiz"
quiz("inference.q_smear")

# %% [markdown] id="field-look"
# Parts of 16 tokens: the logits are off by 0.4, and every sum is right. Parts of 2: off by 1.6, and nearly half of the
# sums are wrong. A chat has one cut a turn, so it is of the first kind. Nobody sees it, users least of all; the model is just
# a little worse than it was trained to be, in every turn but the first. Only a comparison can tell, and it is one line:
# *every way to cut the same text into parts gives the same logits.* Your `decode` was checked like this (five tokens from
# nothing, against the whole text), and so is the library's `extend`.

# %% [markdown] tags=["slide"] id="takeaway"
# > **Takeaway.** A decode step reads all weights once and every row's cache: its time is bytes over bandwidth, so rows
# > share the weights until their caches weigh more, or arithmetic binds. A cache is a ring for each window layer, with a
# > position for each row, and writes beyond its end are silent. Sample only ids that have a text. Read what a model
# > writes with a parser, never with `eval`. And test that every way of cutting a text gives the same logits.

# %% [markdown] id="simplified"
# ## What was simplified
#
# - `prefill` writes whole prompts into rings: `store_chunk` in `nanochat_lib/kv_cache.py`; prompts behind what a row holds:
#   `extend` and `chunk_attention` in `nanochat_lib/gpt.py` and `attention.py`.
# - The loop of an engine runs on the device, up to 32 steps a dispatch, and comes back when a row closes a tool call:
#   `compiled_decode` in `nanochat_lib/decoding.py`. Yours asks the host after each token.
# - Sampling there is compiled, for all rows at once, without sorting: `sample` in `nanochat_lib/sampling.py`.
# - Continuous batching, rows that keep their text for the next turn (`steps_back` says how far a ring can go back):
#   `nanochat_lib/batching.py`, `rows.py`. What a row shows of its text, whole characters and stop strings:
#   `answer_text.py`.
# - The server, its limits, tokens of access and OpenAI's interface: `nanochat_lib/serve/`, described in `docs/serving.md`.
# - nanochat itself: one cache for all layers with every position in all of them, all rows of one length, no windows kept
#   small, `eval` as calculator, no top_p, the whole history prefilled each turn. Its web server was removed in July 2026.
#   The differences of logits are from the test vectors of this project's specification.
# - Not here: speculative decoding, quantised weights and caches, paged caches. Each moves fewer bytes for a token.

# %% id="end"
progress()
