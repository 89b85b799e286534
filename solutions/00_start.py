# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] tags=["slide"] id="title"
# # Start
#
# Can the computer in front of you train a language model and talk to it within **two minutes**?
#
# Yes. It will be a tiny one, about 100,000 numbers where a large model has a thousand billion, but every stage of it
# is the real thing: the same code trains the large presets. By the end of this chapter you have
#
# - asked the *doctor* what your machine can do,
# - solved five small exercises, and seen how checks, hints and your own parts work,
# - trained a model and read its first sentences,
# - seen the map of the course and of the library behind it.
#
# Plan about 45 minutes. Nothing you do here leaves your computer.

# %% tags=["setup"] id="setup"
import math

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np

from nanochat_lib.course import (  # noqa: F401
    about,
    check,
    explore,
    fast,
    hint,
    mine,
    predict,
    progress,
    quiz,
    reveal,
    show,
    slider,
    undo,
    volatile,
)
from nanochat_lib.report.plots import STYLE

plt.rcParams.update(STYLE)

# %% [markdown] id="doctor-title"
# ## Ask the doctor first
#
# Before anybody trains anything, one question: does this machine have what it takes? `nanochat doctor` answers it on the
# command line. Here is the same answer in the notebook. It differs from machine to machine, so no text relies on it.
# %% tags=["slide"] id="doctor"
from nanochat_lib.doctor import diagnose

found = diagnose("cpu")
lines = [f"Ready: {'yes' if found['ok'] else 'no'}"]
lines += [f"{problem['what']}\n    what to do: {problem['fix']}" for problem in found["problems"]]
lines += [f"{name}: {'fits' if fits['fits'] else fits['reason']}" for name, fits in found["presets"].items()]
show(volatile("\n".join(lines)))

# %% [markdown] id="presets-words"
# Each line after the first is a *preset*: a full recipe for one kind of machine. A laptop fits `cpu` and `cpu-smoke`. The
# others want rented chips. You can still study them: chapters 03 and 06 compile for those chips without having one.

# %% [markdown] id="exercise-title"
# ## How an exercise works
#
# An exercise is one cell with one function. Its text says what the function must do. You replace
# `raise NotImplementedError`, run the cell, and run the check below it. A check never judges style, only behaviour.
#
# Start with the most useful number in this course. A language model gives every possible next token a probability.
# Its *loss* on a token is $-\ln p$ of the token that really came, in nats. What is the loss of a model that knows
# nothing and spreads its bets evenly over $V$ tokens?

# %% id="predict-uniform"
predict("start.p_uniform")


# %% tags=["exercise"] id="start.uniform_loss" points=1 minutes=3 level=1
def uniform_loss(vocab_size):
    """The loss in nats, a Python float, of a model that gives each of `vocab_size` tokens the same probability."""
    # --- stub
    raise NotImplementedError
    # --- solution
    return math.log(vocab_size)
    # --- end


# %% id="start.uniform_loss.check"
check("start.uniform_loss", uniform_loss)

# %% tags=["hidden"] id="author"
from nanochat_lib.course.author import example, hidden, mutant, prop, reference

hidden(
    "start.uniform_loss",
    example("one token is no surprise", (1,), 0.0),
    example("a large vocabulary", (131_072,), 11.783502069519071),
    prop(
        "twice the tokens cost ln 2 more",
        make=lambda rng: (2 * int(rng.integers(2, 5000)),),
        holds=lambda out, v: "" if abs(out - math.log(v / 2) - math.log(2)) < 1e-9 else f"ln 2 is missing at {v}",
    ),
)
mutant("start.uniform_loss", "math.log(vocab_size)", "math.log2(vocab_size)", says="bits")
mutant("start.uniform_loss", "math.log(vocab_size)", "1 / vocab_size", says="probability")
mutant("start.uniform_loss", "math.log(vocab_size)", "-math.log(vocab_size)", says="sign")
mutant("start.uniform_loss", "return math.log(vocab_size)", "math.log(vocab_size)", says="return")

# %% id="reveal-uniform"
uniform_loss = mine("start.uniform_loss")
reveal("start.p_uniform", round(uniform_loss(512), 2))

# %% [markdown] id="check-words"
# Keep this number in mind: the first loss of every run in this course must be close to $\ln V$. If it is not, something
# is wrong *before* training begins. It is the cheapest test there is.
#
# Did the check fail? Then it told you the first case that went wrong, what it expected, what it got, and often why. If
# the exercise still stands as it was, the check says so and nothing breaks: later cells then use the library's function.

# %% [markdown] id="hint-title"
# ## Hints, undo and your own parts
#
# Stuck? `hint("start.uniform_loss")` gives a first push; run the cell again for a clearer one. The third shows what the
# right answer *produces*, never its code. Try it.

# %% id="hint"
hint("start.uniform_loss")

# %% [markdown] id="mine-words"
# When a check passes, your function is saved as source code in the folder `my_nanochat/`. From then on
# `mine("start.uniform_loss")` gives back *your* version: in this chapter, in later chapters, and in a whole training run
# (`nanochat run --mine all`). If you break a function later, `undo("start.uniform_loss")` brings the last passing version
# back. All of it is in plain files on your disk: `my_nanochat/` and `.course/`.

# %% id="quiz-mine"
quiz("start.q_mine")

# %% [markdown] id="width-title"
# ## One dial: depth
#
# Large models have hundreds of settings. This course turns **one** dial: the depth, the number of layers. Width, heads,
# batch, learning rates and training length follow from it. The rule for the width: depth × 64, rounded *up* to whole
# attention heads.


# %% tags=["exercise"] id="start.width_from_depth" points=2 minutes=8 level=1 library="nanochat_lib.sizing:width_from_depth"
def width_from_depth(depth, aspect_ratio=64, head_dim=128):
    """(width, heads): depth × aspect_ratio channels, rounded up to a whole number of heads of head_dim channels each."""
    # --- stub
    raise NotImplementedError
    # --- solution
    n_embd = head_dim * math.ceil(depth * aspect_ratio / head_dim)
    return n_embd, n_embd // head_dim
    # --- end


# %% id="start.width_from_depth.check"
check("start.width_from_depth", width_from_depth)

# %% tags=["hidden"] id="start.width_from_depth.hidden"
hidden(
    "start.width_from_depth",
    example("odd depth", (7,), (512, 4)),
    reference(
        "any depth", lambda rng: (int(rng.integers(1, 60)), int(rng.integers(20, 130)), int(rng.choice([32, 64, 256])))
    ),
)
mutant(
    "start.width_from_depth",
    "math.ceil(depth * aspect_ratio / head_dim)",
    "(depth * aspect_ratio // head_dim)",
    says="down",
)
mutant("start.width_from_depth", "math.ceil", "round", says="to the nearest")
mutant("start.width_from_depth", "n_embd, n_embd // head_dim", "n_embd // head_dim, n_embd", says="order")
mutant(
    "start.width_from_depth",
    "head_dim * math.ceil(depth * aspect_ratio / head_dim)",
    "depth * aspect_ratio",
    says="whole",
)

# %% tags=["slide"] id="width-figure"
width_from_depth = mine("start.width_from_depth")
depths = np.arange(2, 33)
widths = [width_from_depth(int(depth))[0] for depth in depths]
figure, axes = plt.subplots(figsize=(6.4, 3.2))
axes.step(depths, widths, where="mid", label="width")
axes.plot(depths, depths * 64, "--", lw=1, label="depth × 64")
axes.set(xlabel="depth (layers)", ylabel="width (channels)", title="The width follows the depth in whole heads of 128")
axes.legend(frameon=False)
show(
    figure,
    alt="Width against depth from 2 to 32 layers: a staircase of steps of 128 channels above the line depth times 64",
)

# %% [markdown] id="power-title"
# ## Round numbers for the compiler
#
# JAX compiles a program for every *shape* of its inputs. A program that meets 200 different lengths compiles 200 times,
# and every compilation costs seconds. So lengths are rounded up, here to the next power of two: at most a dozen
# programs, at the price of some padding.


# %% tags=["exercise"] id="start.next_power" points=1 minutes=6 level=2 library="nanochat_lib.sampling:next_power"
def next_power(n, least=1):
    """The smallest power of two that is at least `n` and at least `least` (itself a power of two). n is a whole number."""
    # --- stub
    raise NotImplementedError
    # --- solution
    return max(least, 1 << max(n - 1, 0).bit_length())
    # --- end


# %% id="start.next_power.check"
check("start.next_power", next_power)

# %% tags=["hidden"] id="start.next_power.hidden"
hidden(
    "start.next_power",
    example("just above a power", (1025,), 2048),
    example("zero", (0,), 1),
    example("too large for a float", (2**60 + 1,), 2**61),
    reference("any", lambda rng: (int(rng.integers(0, 10**6)), 2 ** int(rng.integers(0, 8)))),
)
mutant("start.next_power", "max(n - 1, 0).bit_length()", "n.bit_length()", says="already a power")
mutant(
    "start.next_power", "max(least, 1 << max(n - 1, 0).bit_length())", "1 << max(n - 1, 0).bit_length()", says="least"
)
mutant(
    "start.next_power", "1 << max(n - 1, 0).bit_length()", "1 << max(n - 1, 0).bit_length() >> 1", says="smaller than n"
)
mutant(
    "start.next_power",
    "return max(least, 1 << max(n - 1, 0).bit_length())",
    "return max(least, 2 ** math.ceil(math.log2(max(n, 1))))",
    says="float",
)

# %% [markdown] id="schedule-title"
# ## How fast to learn, and when
#
# A training run takes thousands of small steps. The *learning rate* says how large they are. It is not constant: it
# stays at its full value for a while and then falls in a straight line to a small rest, so that the model settles down.
# That last part is the *warm-down*.


# %% tags=["exercise"] id="start.falling" points=2 minutes=10 level=2 library="nanochat_lib.schedules:falling"
def falling(left, warmdown, final):
    """The factor on the learning rate when `left` steps are left of a run.

    1.0 while at least `warmdown` steps are left; then a straight line that reaches `final` when none is left.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    if left >= warmdown:
        return 1.0
    share = left / warmdown
    return share + (1 - share) * final
    # --- end


# %% id="start.falling.check"
check("start.falling", falling)

# %% tags=["hidden"] id="start.falling.hidden"
hidden(
    "start.falling",
    example("no warm-down at all", (0, 0, 0.1), 1.0),
    prop(
        "a straight line",
        make=lambda rng: (float(rng.uniform(10, 90)), 100.0, float(rng.uniform(0, 0.5))),
        holds=lambda out, left, warmdown, final: (
            ""
            if abs(out - (final + (1 - final) * left / warmdown)) < 1e-9
            else f"{out:.4f} is not on the line from 1 to {final:.2f}"
        ),
    ),
    reference("any", lambda rng: (float(rng.uniform(0, 90)), float(rng.uniform(100, 200)), float(rng.uniform(0, 1)))),
)
mutant("start.falling", "share + (1 - share) * final", "share", says="final")
mutant("start.falling", "share + (1 - share) * final", "max(share, final)", says="floor")
mutant("start.falling", "share = left / warmdown", "share = 1 - left / warmdown", says="rises")
mutant("start.falling", "if left >= warmdown:", "if left > 10**9:", says="above 1")
mutant("start.falling", "left >= warmdown", "left > warmdown", says="ZeroDivisionError")

# %% [markdown] id="schedule-play"
# Drag the warm-down and the rest. The shaded area is what a run can still move: it is the sum of all its step sizes.

# %% tags=["slide"] id="schedule-explore"
falling = mine("start.falling")


def draw_schedule(warmdown, final):
    steps = 1000
    factor = [falling(steps - i, warmdown / 100 * steps, final / 100) for i in range(steps + 1)]
    figure, axes = plt.subplots(figsize=(6.4, 3))
    axes.fill_between(range(steps + 1), factor, alpha=0.25)
    axes.plot(factor)
    axes.set(xlabel="step", ylabel="learning rate / peak", ylim=(0, 1.08), xlim=(0, steps))
    axes.set_title(
        f"warm-down over {warmdown:.0f} % of the run, down to {final:.0f} %: mean rate {np.mean(factor):.2f}"
    )
    return figure


explore(
    draw_schedule,
    alt="Learning rate over a run of 1,000 steps: constant at its peak, then a straight fall; the area below is shaded",
    warmdown=slider(0, 100, 65, 5),
    final=slider(0, 50, 5, 5),
)

# %% [markdown] id="softcap-title"
# ## Arrays: the soft cap
#
# So far everything was plain Python. The model itself computes with arrays. Its last step keeps the logits within
# bounds: $\mathrm{cap} \cdot \tanh(\mathrm{logits} / \mathrm{cap})$. Small logits pass almost unchanged, huge ones end
# just below the cap. Compute in float32, whatever comes in.


# %% tags=["exercise"] id="start.softcap" points=2 minutes=8 level=1 library="nanochat_lib.layers:softcap"
def softcap(logits, cap):
    """cap · tanh(logits / cap), elementwise: any shape and float dtype → the same shape in float32."""
    # --- stub
    raise NotImplementedError
    # --- solution
    return cap * jnp.tanh(logits.astype(jnp.float32) / cap)
    # --- end


# %% id="start.softcap.check"
check("start.softcap", softcap)

# %% tags=["hidden"] id="start.softcap.hidden"
hidden(
    "start.softcap",
    reference("three axes", lambda rng: (jnp.asarray(20 * rng.normal(size=(2, 3, 5)), jnp.float32), 15.0)),
    reference(
        "bfloat16 in", lambda rng: (jnp.asarray(20 * rng.normal(size=(4, 7)), jnp.bfloat16), 20.0), dtype="float32"
    ),
)
mutant("start.softcap", "cap * jnp.tanh", "jnp.tanh", says="factor")
mutant("start.softcap", " / cap", "", says="divide")
mutant("start.softcap", ".astype(jnp.float32)", "", says="float32")
mutant(
    "start.softcap",
    "cap * jnp.tanh(logits.astype(jnp.float32) / cap)",
    "jnp.clip(logits.astype(jnp.float32), -cap, cap)",
    says="clip",
)

# %% [markdown] tags=["slide"] id="train-title"
# ## Train a model, now
#
# Enough parts. The next cell runs three stages on text that the library carries with it: it learns a tokenizer, trains a
# base model on documents, and fine-tunes it on conversations. The preset is `cpu-smoke`, the smallest there is, with a
# few more steps. Started again, it reuses what is finished.

# %% id="predict-loss"
predict("start.p_loss")

# %% id="train"
from nanochat_lib import pipeline, presets
from nanochat_lib.course.state import home
from nanochat_lib.report import read_metrics

steps = 20 if fast() else 300
settings = {
    "pretrain.steps": steps,
    "pretrain.eval_every": -1,
    "pretrain.save_every": -1,
    "sft.steps": 10 if fast() else 100,
}
config = presets.override(presets.preset("cpu-smoke"), settings)
run = pipeline.open_run(home() / "runs" / f"start-{steps}", config)
for stage in (run.tokenizer, run.pretrain) if fast() else (run.tokenizer, run.pretrain, run.sft):
    stage()
records = [record for record in read_metrics(run.dir / "metrics.jsonl")[0] if record.get("stage") == "pretrain"]
losses = [(record["step"], record["loss"]) for record in records if "loss" in record]
print(f"{steps} steps: loss {losses[0][1]:.2f} at first, {losses[-1][1]:.2f} at last")

# %% id="reveal-loss"
reveal("start.p_loss", round(losses[0][1], 2))

# %% tags=["slide"] id="loss-figure"
figure, axes = plt.subplots(figsize=(6.4, 3.2))
axes.plot(*zip(*losses, strict=True), lw=1, alpha=0.45, label="loss of the model")
means = np.convolve([loss for _, loss in losses], np.full(16, 1 / 16), "valid")
axes.plot(range(16, 16 + len(means)), means, color="C0", label="mean of 16 steps")
axes.axhline(uniform_loss(config.tokenizer.vocab_size), ls="--", color="gray", label="knows nothing: ln V")
axes.set(xlabel="step", ylabel="loss (nats per token)", title="Your first training run", ylim=(0, 8.5))
axes.legend(ncols=2, loc="upper right", fontsize=8.5)
show(
    figure,
    alt="The loss of the smoke model starts at the dashed line ln V and falls in a zigzag; its mean falls in small waves",
)

# %% [markdown] id="first-loss-words"
# The curve starts *on* the dashed line, as it must: before its first step the model knows nothing. The thin
# line goes up and down from batch to batch; the mean of 16 steps shows where it is going.

# %% id="first-loss"
_ = about(losses[0][1] / uniform_loss(config.tokenizer.vocab_size), 1.0, within=0.03, name="first loss / ln V")

# %% [markdown] id="talk-title"
# ## Talk to it
#
# What it says is mostly wrong and often funny. It has read less than a child's first book for some seconds. Look at the
# *form*: after fine-tuning it answers instead of going on with your question.

# %% tags=["slide"] id="talk"
from nanochat_lib.conversation import render_for_completion

tokenizer, engine = run.load_tokenizer(), run.engine("base" if fast() else "sft")
for question in ("What is 2 + 3?", "Spell the word apple."):
    chat = {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": ""}]}
    prompt = render_for_completion(tokenizer, chat, config.model.sequence_len)
    answer = engine.generate_batch([prompt], max_tokens=24, temperature=0.0).sequences[0]
    print(f"> {question}\n{tokenizer.decode(list(answer)[len(prompt) :])}\n")
run.close()

# %% [markdown] id="talk-more"
# A preset that really learns is `cpu`: about ten minutes, and it answers questions about facts it never saw in a chat.
# That is the capstone, chapter 12; open it whenever you like, or start it on the command line with `nanochat run`.

# %% [markdown] id="map-title"
# ## The map
#
# The course follows the path of a text through the system. Each box is a chapter; the small line names the part of the
# library it opens.

# %% tags=["slide"] id="map"
from matplotlib.patches import FancyBboxPatch

stops = [
    ("01 Tokenizer", "bpe.py", 0, 2),
    ("04 Data", "packing.py", 1, 2),
    ("02 The model", "gpt.py, layers.py", 2, 2),
    ("03 Attention", "kernels/flash.py", 3, 2),
    ("05 Muon", "muon.py", 3, 1),
    ("06 Train step", "train_step.py", 2, 1),
    ("07 Evaluation", "evaluate/", 1, 1),
    ("08 SFT", "sft.py", 0, 1),
    ("09 RL", "rl.py", 0, 0),
    ("10 Inference", "engine.py", 1, 0),
    ("11 Scale, cost", "preflight/", 2, 0),
    ("12 Capstone", "pipeline.py", 3, 0),
]
figure, axes = plt.subplots(figsize=(8.4, 3.9))
for (_, _, x0, y0), (_, _, x1, y1) in zip(stops, stops[1:], strict=False):
    down = y1 != y0
    start, end = (
        ((x0, y0 - 0.29), (x1, y1 + 0.29)) if down else ((x0 + 0.39 * (x1 - x0), y0), (x1 - 0.39 * (x1 - x0), y1))
    )
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": "#777"})
for name, part, x, y in stops:
    box = FancyBboxPatch((x - 0.36, y - 0.26), 0.72, 0.52, boxstyle="round,pad=0.02", fc="#cfe3f7", ec="#7a8ca0")
    axes.add_patch(box)
    axes.text(x, y + 0.08, name, ha="center", va="center", weight="bold", color="#222")
    axes.text(x, y - 0.13, part, ha="center", va="center", size=7.5, color="#444")
axes.set(xlim=(-0.6, 3.6), ylim=(-0.6, 2.6))
axes.axis("off")
axes.set_title("From text to a chat")
show(
    figure,
    alt="Map of the course: twelve chapters in three rows joined by arrows, from tokenizer over data, model, attention, Muon, train step, evaluation, fine-tuning, RL, inference and cost to the capstone, with the library file that each opens",
)

# %% id="progress"
progress()

# %% [markdown] tags=["slide"] id="lesson-title"
# ## Field lesson: thirty per cent of a run that hardly moved
#
# A public run of a 3.8-billion-parameter model on eight rented chips cost about 1,000 dollars and took 43 hours. Its first
# attempt had failed. One reason its author gives: the learning rate followed half a cosine wave down to *zero*, and the
# last 30 % of the steps had next to nothing left to learn with. The recipe that worked holds the rate and falls in a
# straight line over the last half, to 5 % of the peak.
#
# How bad is "next to nothing"? No GPU is needed to find out: add up the rates.

# %% id="predict-starved"
predict("start.p_starved")

# %% tags=["slide"] id="lesson"
total = 1000
cosine = np.array([0.5 * (1 + math.cos(math.pi * i / total)) for i in range(total)])
trapezoid = np.array([min((i + 1) / (0.05 * total), falling(total - i, 0.5 * total, 0.05)) for i in range(total)])
shares = {
    name: rates[int(0.7 * total) :].sum() / rates.sum()
    for name, rates in (("cosine", cosine), ("trapezoid", trapezoid))
}
figure, axes = plt.subplots(figsize=(6.4, 3.2))
for (name, share), rates, colour in zip(shares.items(), (cosine, trapezoid), ("C3", "C0"), strict=True):
    axes.plot(rates, color=colour, label=f"{name}: {share:.0%} of its movement in the last 30 %")
    axes.fill_between(range(700, total), rates[700:], color=colour, alpha=0.2)
axes.set(
    xlabel="step", ylabel="learning rate / peak", ylim=(0, 1.3), title="What is left for the last 30 % of the steps"
)
axes.legend(frameon=False, loc="upper right")
show(
    figure,
    alt="Two schedules over 1,000 steps; in the shaded last 30 per cent the cosine has a far smaller area than the trapezoid",
)
reveal("start.p_starved", round(100 * shares["cosine"], 1))

# %% id="lesson-cost"
about(100 * shares["cosine"], 4.3, within=0.2, name="cosine to zero, % of all movement in the last 30 % of the steps")
about(100 * shares["trapezoid"], 13.6, within=0.3, name="trapezoid, % of all movement in the last 30 % of the steps")
_ = about(0.3 * 998, 300, within=2, name="what 30 % of such a run costs, $")

# %% [markdown] id="lesson-words"
# So about 300 dollars of chips would have bought 4 % of the movement. The lesson is not "never use a cosine": it is that two
# lines of arithmetic on a laptop show what a schedule spends where, *before* anything is rented. That is how this whole
# course works.

# %% id="quiz-cosine"
quiz("start.q_cosine")

# %% [markdown] tags=["slide"] id="takeaway"
# > **Takeaway.** The first loss must be **ln V**. One dial, the depth, sets the rest. Everything that can go wrong on a
# > thousand-dollar machine can be found on this one first, in seconds, if you know which number to look at.

# %% [markdown] id="simplified"
# ## What was simplified
#
# The smoke model has 2 layers, 64 channels and 512 tokens; nanochat's smallest serious model has 12, 768 and 32,768. Text is
# the library's own primer instead of billions of web documents. The schedule here has one factor; nanochat also changes
# Muon's momentum and its weight decay from step to step (`nanochat_lib/schedules.py`, `nanochat_schedule`). The sizes are
# in `nanochat_lib/sizing.py`, the stages in `nanochat_lib/pipeline.py`, and every exercise's real code is named in its
# cell's metadata. Next: chapter 01, where the bytes of your own text become tokens.
