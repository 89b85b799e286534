"""Chapter 00, the start: public checks, hints, quizzes and predictions."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np

from nanochat_lib import layers, sampling, schedules, sizing
from nanochat_lib.course.cases import Exercise, Option, Prediction, Quiz, example, prop, reference, sign, suspect

WAVE = np.array([-80.0, -15.0, -1.0, -0.1, 0.0, 0.1, 1.0, 15.0, 80.0])


def near(got: object, value: float) -> bool:
    return isinstance(got, (int, float)) and math.isclose(got, value, rel_tol=1e-6, abs_tol=1e-9)


EXERCISES = [
    Exercise(
        "start.uniform_loss",
        cases=[
            example("512 tokens", (512,), 6.238324625039508),
            example("two tokens: one bit, in nats", (2,), 0.6931471805599453),
            prop(
                "more tokens, more surprise",
                make=lambda rng: (int(rng.integers(3, 10**6)),),
                holds=lambda out, v: "" if out > 0 and math.isclose(math.exp(out), v, rel_tol=1e-9)
                else f"exp(loss) should be {v}, it is {math.exp(min(out, 700)):.6g}",
            ),
        ],
        causes=[
            sign("that is the number of bits: use the natural logarithm", lambda got, want, v: near(got, math.log2(v))),
            sign("that is the probability itself: the loss is its negative logarithm",
                 lambda got, want, v: near(got, 1 / v)),
            sign("the sign is wrong: a probability below 1 has a negative logarithm",
                 lambda got, want, v: want != 0 and near(got, -math.log(v))),
        ],
        hints=[
            "What probability does each of V tokens get, when all get the same? Put it into −ln p.",
            "−ln(1/V) can be written without a fraction. `math.log` is the natural logarithm.",
            lambda: "V = 2: 0.693\nV = 512: 6.238\nV = 131,072: 11.784",
        ],
        fallback=lambda vocab_size: math.log(vocab_size),
    ),
    Exercise(
        "start.width_from_depth",
        cases=[
            example("depth 4", (4,), (256, 2)),
            example("depth 3 is rounded up", (3,), (256, 2)),
            example("depth 20", (20,), (1280, 10)),
            example("depth 5, heads of 64, 40 a layer", (5, 40, 64), (256, 4)),
            reference("any", make=lambda rng: (int(rng.integers(1, 40)), int(rng.integers(30, 100)), 128)),
        ],
        causes=[
            suspect("you rounded down (or to the nearest): a part of a head does not exist, take the next whole one",
                    lambda d, a=64, h=128: (d * a // h * h, d * a // h)),
            suspect("the order is (width, heads)", lambda d, a=64, h=128: sizing.width_from_depth(d, a, h)[::-1]),
            sign("the width must be a whole number of heads",
                 lambda got, want, d, a=64, h=128: isinstance(got, tuple) and len(got) == 2 and got[0] == d * a),
        ],
        hints=[
            "First the number of heads: how many of head_dim channels does it take to hold depth × aspect_ratio?",
            "`math.ceil` rounds up. The width is the number of heads times head_dim.",
            lambda: "\n".join(f"depth {d}: {sizing.width_from_depth(d)}" for d in (2, 3, 4, 12, 24)),
        ],
    ),
    Exercise(
        "start.next_power",
        cases=[
            example("5", (5,), 8),
            example("a power stays", (64,), 64),
            example("1", (1,), 1),
            example("not below the least", (3, 16), 16),
            example("too large for a float", (2**53 + 1,), 2**54),
            prop(
                "a power of two, and the smallest",
                make=lambda rng: (int(rng.integers(1, 10**9)),),
                holds=lambda out, n: "" if isinstance(out, int) and out & (out - 1) == 0 and out >= n > out // 2
                else f"{out} is not the smallest power of two that holds {n}",
            ),
        ],
        causes=[
            sign("n is already a power of two and should stay", lambda got, want, n, least=1: got == 2 * want),
            sign("the result is below `least`", lambda got, want, n, least=1: isinstance(got, int) and got < least),
            sign("the result is smaller than n", lambda got, want, n, least=1: isinstance(got, int) and got < n <= want
                 and n < 2**50),
            sign("a float cannot hold numbers this large exactly: stay with whole numbers",
                 lambda got, want, n, least=1: n > 2**50),
        ],
        hints=[
            "Doubling 1 until it is large enough is a fine answer. A shorter one looks at the bits of n.",
            "`(n - 1).bit_length()` is the number of bits it takes to write n − 1. How large is 1 << that?",
            lambda: "\n".join(f"{n} -> {sampling.next_power(n)}" for n in (1, 2, 3, 4, 5, 9, 1000)),
        ],
    ),
    Exercise(
        "start.falling",
        cases=[
            example("half a run is left", (500, 300, 0.1), 1.0),
            example("the warm-down begins", (300, 300, 0.1), 1.0),
            example("nothing left", (0, 300, 0.1), 0.1),
            example("near the end", (15, 300, 0.3), 0.335),
            example("in the middle", (150, 300, 0.1), 0.55),
            example("no warm-down", (0, 0, 0.3), 1.0),
            reference("any", make=lambda rng: (float(rng.uniform(0, 90)), 100.0, float(rng.uniform(0, 1)))),
        ],
        causes=[
            sign("the line ends at 0, not at `final`",
                 lambda got, want, left, w, final: w > 0 and near(got, left / w) and final > 0),
            sign("`final` is where the line ends, not a floor under another line",
                 lambda got, want, left, w, final: w > 0 and near(got, max(left / w, final))),
            sign("your line rises towards the end: `left` is what is left, not what is done",
                 lambda got, want, left, w, final: 0 < left < w and near(got, final + (1 - final) * (1 - left / w))),
            sign("your line rises towards the end: `left` is what is left, not what is done",
                 lambda got, want, left, w, final: left == 0 and w > 0 and near(got, 1.0)),
            sign("the factor must never be above 1: the line holds in the warm-down only",
                 lambda got, want, left, w, final: isinstance(got, float) and got > 1.0 + 1e-9),
        ],
        hints=[
            "Two cases: before the warm-down the factor is 1. Inside it, how much of the warm-down is left?",
            "With s = left / warmdown the value moves from 1 (s = 1) to final (s = 0) in a straight line.",
            lambda: _falling_figure(),
        ],
    ),
    Exercise(
        "start.softcap",
        cases=[
            example("from far below to far above", (jnp.asarray(WAVE, jnp.float32), 15.0),
                    (15 * np.tanh(WAVE / 15)).astype(np.float32), rtol=1e-5),
            reference("random", make=lambda rng: (jnp.asarray(30 * rng.normal(size=(3, 5)), jnp.float32), 7.0)),
            reference("bfloat16 in, float32 out", dtype="float32",
                      make=lambda rng: (jnp.asarray(30 * rng.normal(size=(2, 4)), jnp.bfloat16), 15.0)),
        ],
        causes=[
            suspect("the factor in front is missing: tanh alone stays below 1",
                    lambda x, cap: jnp.tanh(x.astype(jnp.float32) / cap)),
            suspect("divide by the cap inside of tanh", lambda x, cap: cap * jnp.tanh(x.astype(jnp.float32))),
            suspect("that is a clip: its slope is 0 beyond the cap, so nothing is learned there",
                    lambda x, cap: jnp.clip(x.astype(jnp.float32), -cap, cap)),
            sign("convert to float32 before anything is computed",
                 lambda got, want, x, cap: x.dtype == jnp.bfloat16 and getattr(got, "shape", None) == x.shape),
        ],
        hints=[
            "`jnp.tanh` works on whole arrays. Its result lies between −1 and 1.",
            "Divide by the cap, take tanh, multiply by the cap. `x.astype(jnp.float32)` comes first.",
            lambda: _softcap_figure(),
        ],
    ),
]  # fmt: skip


def _falling_figure():
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(5, 2.4))
    axes.plot([schedules.falling(200 - i, 100, 0.1) for i in range(201)])
    axes.set(xlabel="step of 200", ylabel="factor", title="falling(left, 100, 0.1)")
    return figure


def _softcap_figure():
    import matplotlib.pyplot as plt

    x = np.linspace(-60, 60, 241)
    figure, axes = plt.subplots(figsize=(5, 2.6))
    axes.plot(x, np.asarray(layers.softcap(jnp.asarray(x, jnp.float32), 15.0)))
    axes.set(xlabel="logit", ylabel="after the cap of 15", title="softcap(logits, 15)")
    return figure


QUIZZES = [
    Quiz(
        "start.q_mine",
        "Your function passed its check. Later you change it and it fails. What does mine(…) give you then?",
        [
            Option(
                "The broken one", why="It would carry your mistake into later chapters. Only passing code is saved."
            ),
            Option(
                "Your last passing version",
                right=True,
                why="It was saved in my_nanochat/ when its check passed; a failing check does not replace it.",
            ),
            Option("An error", why="Nothing stops: where no passing version of yours exists, the library's is used."),
        ],
    ),
    Quiz(
        "start.q_cosine",
        "Why did the cosine starve the end of the run?",
        [
            Option("It starts too high", why="Both schedules start at the same peak."),
            Option(
                "It is nearly flat where it reaches zero",
                right=True,
                why="A cosine reaches its end with slope zero: the rate is tiny for a long time before the last step.",
            ),
            Option("It takes more steps", why="Both have the same number of steps and cost the same."),
        ],
    ),
]
PREDICTIONS = [
    Prediction("start.p_uniform", "What is the loss of a model that knows nothing, with 512 tokens?", unit="nats"),
    Prediction("start.p_loss", "At what loss will your model's very first step be?", unit="nats"),
    Prediction(
        "start.p_starved",
        "What share of all its movement does half a cosine leave for the last 30 % of the steps?",
        unit="%",
    ),
]
