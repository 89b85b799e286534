# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] id="title"
# # RL: learning from answers that are only marked
#
# A chat model solves **4.55 %** of the school problems of GSM8K. For 467 steps it hears of each of its answers only
# "right" or "wrong". Then it solves 7.58 %. Who told it how?
#
# Nobody: it said the right thing by chance, and was made a little likelier to say it again. These are nanochat's
# figures for its d20 model; the stage took an hour and a half on 8×H100, more than any other but pretraining. Yours
# takes a few seconds, on a model so small that you can look at all of it. So you can also break it, in the ways in
# which large runs break.
#
# When you are through you can
#
# - derive the gradient of an expected reward, and estimate it from samples,
# - say what a group's mean does to it, and which groups teach nothing,
# - turn answers into a training step, and choose what a token weighs,
# - measure pass@k before and after, with several seeds,
# - tell whether sampler and trainer are the same model,
# - write a reward, game one, see a policy collapse, and know it from the log.
#
# Eight exercises, about 110 minutes; with the reading some 150 minutes. The solved chapter runs in under three.

# %% tags=["setup"] id="setup"
import math
from functools import lru_cache, partial
from itertools import combinations

import jax
import jax.numpy as jnp
import numpy as np

# %% id="imports"
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
)
from nanochat_lib.errors import UserError
from nanochat_lib.evaluate.scores import unbiased_pass_at_k
from nanochat_lib.losses import cross_entropy, token_nll
from nanochat_lib.report.plots import BLUE, FAINT, GREEN, ORANGE, PURPLE, RED, SKY, new_figure
from nanochat_lib.report.strips import advantage_plot
from nanochat_lib.rl import MOST_NATS
from nanochat_lib.rollouts import aligned
from nanochat_lib.sampling import row_keys, sample
from nanochat_lib.tasks.common import extract_answer, last_text

# %% [markdown] id="gradient-text"
# ## 1. The gradient of an expected reward
#
# The smallest policy there is: one token. It has logits $z$, the probabilities are $p = \mathrm{softmax}(z)$, and token
# $a$ earns the reward $r_a$. What we want to be large is the *expected* reward
#
# $$J(z) = \sum_a p_a\, r_a .$$
#
# Nothing in it is random, so you can differentiate it. Of a softmax you know
# $\partial p_a / \partial z_i = p_a\,(1 - p_a)$ for $a = i$ and $-p_a\, p_i$ otherwise.


# %% tags=["exercise"] id="rl.exact_gradient" points=2 minutes=15 level=1
def exact_gradient(logits: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """The gradient (V,) of the expected reward with respect to the logits (V,); rewards (V,). float64."""
    # --- stub
    raise NotImplementedError
    # --- solution
    weights = np.exp(logits - logits.max())
    p = weights / weights.sum()
    return p * (rewards - p @ rewards)
    # --- end


# %% id="rl.exact_gradient.check"
check("rl.exact_gradient", exact_gradient)

# %% tags=["hidden"] id="author"
from nanochat_lib.course.author import example, hidden, mutant, prop, reference
from nanochat_lib.course.checks import rl as checks

hidden(
    "rl.exact_gradient",
    reference("nine tokens", lambda rng: checks.bandit(rng, 9), against=checks.exact_gradient, rtol=1e-7),
    reference(
        "large logits",
        lambda rng: (800 + 3 * rng.standard_normal(4), rng.uniform(0, 1, 4)),
        against=checks.exact_gradient,
        rtol=1e-6,
    ),
    prop("slope", lambda rng: checks.bandit(rng, 7), checks.finite_differences),
)
mutant("rl.exact_gradient", "(rewards - p @ rewards)", "rewards", says="subtract the expected reward")
mutant("rl.exact_gradient", "p * (rewards - p @ rewards)", "rewards - p @ rewards", says="multiply by the probability")
mutant("rl.exact_gradient", "rewards - p @ rewards", "p @ rewards - rewards", says="goes downhill")
mutant("rl.exact_gradient", "p @ rewards)", "rewards.mean())", says="plain mean does not")
mutant("rl.exact_gradient", "logits - logits.max()", "logits", says="nan")

# %% tags=["slide"] id="gradient-run"
gradient = mine("rl.exact_gradient")
logits, rewards = np.array([0.5, 0.0, 0.0, -1.0]), np.array([2.0, 2.0, 3.0, 5.0])
p = np.asarray(jax.nn.softmax(logits))
exact = gradient(logits, rewards)
for a in range(4):
    print(f"token {a}: p {p[a]:.3f}  reward {rewards[a]:.0f}  gradient {exact[a]:+.3f}")
print(f"expected reward {p @ rewards:.3f}")

# %% [markdown] id="gradient-look"
# Read your formula: $\partial J/\partial z_i = p_i\,(r_i - J)$. What is better than *expected* goes up. Tokens 0 and 1
# earn a reward of 2, and still go down. And the best token of all moves less than it deserves: it has a
# probability of a tenth only.
#
# A language model has more answers than you can sum over. You can only draw some. The trick is from
# Williams (1992): $\nabla p_a = p_a \nabla \log p_a$, so
#
# $$\nabla J = \sum_a p_a\, r_a \nabla \log p_a = \mathbb{E}_{a \sim p}\left[\, r_a \nabla \log p_a \right].$$
#
# The right side is a mean over draws. Draw $N$ tokens, and average $A_n \nabla \log p_{a_n}$, where $A_n$, the
# *advantage*, is what the $n$-th draw earned (later: less a baseline).


# %% tags=["exercise"] id="rl.score_gradient" points=2 minutes=15 level=2
def score_gradient(logits: np.ndarray, actions: np.ndarray, advantages: np.ndarray) -> np.ndarray:
    """The estimate (V,) of the gradient from N samples: actions (N,) drawn tokens, advantages (N,). float64."""
    # --- stub
    raise NotImplementedError
    # --- solution
    weights = np.exp(logits - logits.max())
    score = np.eye(len(logits))[actions] - weights / weights.sum()
    return (advantages[:, None] * score).mean(axis=0)
    # --- end


# %% id="rl.score_gradient.check"
check("rl.score_gradient", score_gradient)

# %% tags=["hidden"] id="rl.score_gradient.hidden"
hidden(
    "rl.score_gradient",
    reference("forty samples", lambda rng: checks.drawn(rng, 6, 40), against=checks.score_gradient, rtol=1e-7),
    reference("one token's draws", lambda rng: checks.drawn(rng, 3, 1), against=checks.score_gradient, rtol=1e-7),
    example("no advantage, no gradient", (np.float64([1, 2]), np.array([0, 1]), np.zeros(2)), np.zeros(2), atol=1e-12),
)
mutant("rl.score_gradient", " - weights / weights.sum()", "", says="subtract the probabilities")
mutant("rl.score_gradient", ".mean(axis=0)", ".sum(axis=0)", says="not their sum")
mutant("rl.score_gradient", "(advantages[:, None]", "(-advantages[:, None]", says="loss's gradient")
mutant("rl.score_gradient", "advantages[:, None] * score", "score", says="expected")

# %% [markdown] id="baseline-text"
# How good is the estimate? It is right *on average*, but all rewards here are positive: whatever is drawn goes up, and
# only the differences between many draws cancel out. Subtracting a number $b$ from every reward should help.

# %% id="baseline-quiz"
quiz("rl.q_baseline")

# %% [markdown] id="group-text"
# Which $b$? The expected reward would be good, but nobody knows it. The mean of the samples at hand is for free: draw a
# *group* of $S$, and compare each with the group's mean. There is a catch: each sample is part of its own baseline.
# With $S = 1$ the advantage is always 0. What is left with $S = 4$? `predict("rl.p_group", 50)`.

# %% id="group-predict"
predict("rl.p_group")

# %% id="group-run"
estimate = mine("rl.score_gradient")
rng = np.random.default_rng(0)
GROUPS = 400 if fast() else 4000


def estimates(size: int, centre: bool) -> np.ndarray:
    """How far along the exact gradient GROUPS estimates point, each from a group of `size`; 1 is exactly right."""
    found = []
    for actions in rng.choice(4, (GROUPS, size), p=p):
        earned = rewards[actions]
        found.append(estimate(logits, actions, earned - earned.mean() if centre else earned) @ exact)
    return np.array(found) / (exact @ exact)


sizes = (2, 4, 8, 16, 32)
plain, centred = ({size: estimates(size, centre) for size in sizes} for centre in (False, True))
reveal("rl.p_group", round(100 * float(centred[4].mean())))
print(f"16 samples: spread {plain[16].std():.2f} without, {centred[16].std():.2f} with the group's mean")
if not fast():
    about(100 * centred[4].mean(), 75, within=5, name="group of 4, % of the exact gradient")
    _ = about(plain[16].std() / centred[16].std(), 3.0, within=0.4, name="spread without beside with, 16 samples")

# %% tags=["slide"] id="group-figure"
figure, (left, right) = new_figure(1, 2, height=2.6, width=7.6)
bins = np.linspace(-3, 5, 45)
left.hist(plain[16], bins, color=ORANGE, alpha=0.75, label="reward")
left.hist(centred[16], bins, color=BLUE, alpha=0.75, label="reward − group's mean")
left.axvline(1, color=FAINT, linestyle="--")
left.set_title("Estimates from 16 samples", loc="left", fontweight="bold", fontsize=10)
left.set_xlabel("along the exact gradient (1 is right)")
left.set_ylabel("groups")
left.set_ylim(0, 0.32 * GROUPS)
left.legend(fontsize=8)
curve = np.arange(1, 33)
right.plot(curve, 1 - 1 / curve, color=FAINT, linestyle="--", label="1 − 1/S")
right.plot(sizes, [centred[s].mean() for s in sizes], "o", color=BLUE, label="measured")
right.set_title("What the own mean takes away", loc="left", fontweight="bold", fontsize=10)
right.set_xlabel("samples in a group, S")
right.set_ylabel("mean estimate / exact")
right.set_ylim(0, 1.1)
right.legend(fontsize=8)
show(
    figure,
    alt="left: histograms of estimates from 16 samples; both have their middle near 1, those of plain rewards spread "
    "three times as far. right: the mean estimate with the group's mean as baseline follows the curve 1 − 1/S",
)

# %% [markdown] id="group-look"
# The group's mean shrinks the gradient to $1 - 1/S$ of itself, and turns it nowhere. That is a smaller learning rate,
# 6 % smaller for 16 samples. In return the noise falls to a third. (Compare each sample with the mean of the
# *others* and the factor is gone: that is RLOO, Ahmadian et al., arXiv:2402.14740.)

# %% [markdown] id="advantages-text"
# ## 2. Groups
#
# With questions instead of one token, this is the heart of GRPO (Shao et al., arXiv:2402.03300): ask each question $S$
# times, and compare the answers to *the same* question. No second network that predicts rewards, as PPO has.


# %% tags=["exercise"] id="rl.advantages" points=1 minutes=5 level=1 library="nanochat_lib.rollouts:advantages"
def advantages(rewards: np.ndarray) -> np.ndarray:
    """Rewards (Q, S) of S answers to each of Q questions -> how much better each is than its question's mean."""
    # --- stub
    raise NotImplementedError
    # --- solution
    return rewards - rewards.mean(axis=1, keepdims=True)
    # --- end


# %% id="rl.advantages.check"
check("rl.advantages", advantages)

# %% tags=["hidden"] id="rl.advantages.hidden"
hidden(
    "rl.advantages",
    reference("twelve questions", lambda rng: checks.rewards_of(rng, 12, 4), atol=1e-6),
    example("a single answer", (np.float32([[1.0], [0.0]]),), np.zeros((2, 1), np.float32)),
)
mutant("rl.advantages", "axis=1", "axis=0", says="axis 1")
mutant("rl.advantages", "rewards.mean(axis=1, keepdims=True)", "rewards.mean()", says="praises easy questions")
mutant(
    "rl.advantages",
    "return rewards - rewards.mean(axis=1, keepdims=True)",
    "return rewards.mean(axis=1, keepdims=True) - rewards",
    says="better than the mean is positive",
)
mutant(
    "rl.advantages",
    "return rewards - rewards.mean(axis=1, keepdims=True)",
    "centred = rewards - rewards.mean(axis=1, keepdims=True)\n    return centred / np.maximum(centred.std(axis=1, "
    "keepdims=True), 1e-6)",
    says="do not divide",
)

# %% id="advantages-run"
compare = mine("rl.advantages")
marks = np.float32([[0, 0, 0, 0, 0, 0, 0, 1], [1, 0, 1, 1, 0, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1, 0], [0] * 8])
show(
    advantage_plot(marks),
    alt="four questions with eight answers each; the only right answer of the first has an advantage of +0.88, the only "
    "wrong one of the third −0.88, half right gives ±0.5, and the question without a right answer zeros",
)
for row in marks:
    gains = compare(row[None])[0]
    divided = gains / max(gains.std(), 1e-6)
    print(
        f"{row.sum():.0f} of 8 right: a right one gets {gains.max():.2f}; divided by the deviation {divided.max():.2f}"
    )

# %% [markdown] id="deviation-look"
# GRPO as published also *divides* by the group's deviation. Look at the last column: it gives rare groups, nearly all
# wrong or nearly all right, the same power as balanced ones and more. Liu et al. (arXiv:2503.20783) call it a bias
# towards questions that are too hard or too easy. nanochat leaves it out, and so does this library.
#
# And the last row is all zeros. A group in which nothing differs teaches *nothing*: it is **dead**. You have paid
# for all of its answers.


# %% tags=["exercise"] id="rl.collapsed" points=1 minutes=5 level=1 library="nanochat_lib.rollouts:collapsed"
def collapsed(rewards: np.ndarray) -> float:
    """Share of the questions (Q, S) whose S answers all got the same reward: they teach nothing."""
    # --- stub
    raise NotImplementedError
    # --- solution
    return float(np.mean(rewards.max(axis=1) == rewards.min(axis=1)))
    # --- end


# %% id="rl.collapsed.check"
check("rl.collapsed", collapsed)

# %% tags=["hidden"] id="rl.collapsed.hidden"
hidden(
    "rl.collapsed",
    reference("other nine questions", checks.alike),
    example("all of them", (np.float32([[0, 0], [1, 1]]),), 1.0),
    example("negative rewards", (np.float32([[-1, -1], [-1, 1], [2, 2], [0, 0]]),), 0.75),
)
mutant(
    "rl.collapsed", "rewards.max(axis=1) == rewards.min(axis=1)", "rewards.max(axis=1) == 0", says="all right are dead"
)
mutant("rl.collapsed", "==", "!=", says="groups that live")
mutant("rl.collapsed", "np.mean(", "np.sum(", says="not how many")
mutant(
    "rl.collapsed",
    "rewards.max(axis=1) == rewards.min(axis=1)",
    "(rewards.max(axis=1) == 0) | (rewards.min(axis=1) == 1)",
    says="other numbers than 0 and 1",
)
mutant(
    "rl.collapsed",
    "rewards.max(axis=1) == rewards.min(axis=1)",
    "rewards.max(axis=0) == rewards.min(axis=0)",
    says="axis 1",
)

# %% [markdown] id="dead-text"
# Take nanochat's start: 4.55 % right, groups of 16. Suppose that every question had this same chance. How many groups
# are without a single right answer? `predict("rl.p_dead", 10)`.

# %% id="dead-predict"
predict("rl.p_dead")

# %% tags=["slide"] id="dead-run"
share_dead = mine("rl.collapsed")
drawn = (np.random.default_rng(1).random((20_000, 16)) < 0.0455).astype(np.float32)
reveal("rl.p_dead", round(100 * (1 - 0.0455) ** 16, 1))
_ = about(100 * share_dead(drawn), 47.5, within=1.5, name="dead among 20,000 drawn groups, %")

# %% [markdown] id="dead-look"
# Nearly half of 467 × 16 × 16 answers are thrown away. And the truth is worse. Questions differ; a few are easy, most
# are hopeless, and for the same mean that makes more groups dead. Large groups help the hard ones, and cost.
# The other end counts as well: who answers nearly everything learns from nearly nothing.
#
# Play with it. A row is a question, a cell one answer; pale rows are dead.


# %% id="widget"
def draw_groups(chance=0.05, spread="all questions alike", samples=16):
    rng = np.random.default_rng(56)
    mean = min(max(chance, 0.01), 0.99)
    strength = {"all questions alike": 1e6, "some easier": 4, "few easy, most hopeless": 0.5}[spread]
    odds = rng.beta(mean * strength, (1 - mean) * strength, 4000)
    right = rng.random((4000, samples)) < odds[:, None]
    dead = right.all(axis=1) | ~right.any(axis=1)
    figure, (left, middle) = new_figure(1, 2, height=2.8, width=7.6, width_ratios=(1.2, 1))
    tints = np.array([[int(c[k : k + 2], 16) / 255 for k in (1, 3, 5)] for c in (RED, BLUE)])
    cells = tints[right[:16].astype(int)]
    cells[dead[:16]] = 1 - 0.2 * (1 - cells[dead[:16]])
    left.pcolormesh(np.arange(samples + 1), np.arange(17), cells, edgecolors="white", linewidth=1.2)
    left.set_title(f"16 questions, {dead[:16].sum()} dead", loc="left", fontweight="bold", fontsize=10)
    left.set_xlabel("answers (blue: right)")
    left.set_ylabel("question")
    left.set_xticks(np.arange(0, samples + 1, max(samples // 4, 1)))
    left.set_yticks([0, 4, 8, 12, 16])
    left.set_ylim(16, 0)
    chances = np.linspace(0, 1, 201)
    for size, shade in ((4, ORANGE), (8, GREEN), (16, BLUE), (64, PURPLE)):
        middle.plot(chances, chances**size + (1 - chances) ** size, color=shade, label=f"S = {size}")
    middle.plot(mean, dead.mean(), "k*", markersize=11, label="yours")
    middle.set_title(f"Dead groups; yours: {dead.mean():.0%}", loc="left", fontweight="bold", fontsize=10)
    middle.set_xlabel("chance of a right answer")
    middle.set_ylabel("share of dead groups")
    middle.legend(fontsize=7.5)
    return figure


explore(
    draw_groups,
    alt="left: sixteen questions with sixteen answers each, right ones blue, wrong ones red, pale rows have no difference. "
    "right: share of dead groups against the chance of a right answer for groups of 4, 8, 16 and 64: high at both ends, "
    "the lower the larger the group; a star marks the chosen values",
    chance=slider(0.01, 0.99, 0.05, 0.01),
    spread=choice(["all questions alike", "some easier", "few easy, most hopeless"], "all questions alike"),
    samples=choice([4, 8, 16, 64], 16),
)

# %% [markdown] id="batch-text"
# ## 3. From answers to a step
#
# An answer is many tokens, and $\log p(\text{answer}) = \sum_t \log p(\text{token}_t)$. So every token that the model
# *sampled* gets the advantage of its whole answer, and the loss is the one you know:
#
# $$L = -\frac{\sum_{b,t} A_b \log p(\text{token}_{b,t})}{\text{number of sampled tokens}} .$$
#
# That is cross-entropy with a weight for each row. A wrong answer has a negative weight. Nothing else changes: the
# same compiled step as in pretraining takes `inputs`, `targets` and `weights`, each (A, B, T): A micro-batches of B rows.
#
# Which tokens did the model sample? Not the prompt, not what a tool wrote, not padding. The masks say it, a number for
# each token of a sequence, and like in chapter 08 the mask belongs to the token as a *target*.


# %% tags=["exercise"] id="rl.to_batch" points=3 minutes=25 level=3 library="nanochat_lib.rollouts:to_batch"
def to_batch(
    sequences: list[list[int]], masks: list[list[int]], weights: np.ndarray, length: int, pad_id: int, micro_rows: int
) -> dict[str, np.ndarray]:
    """{"inputs", "targets" int32, "weights" float32}, each (A, micro_rows, length), of a step.

    sequences: prompt and answer of each row, at most length + 1 ids; masks: 1 where the model sampled the token.
    weights (Q, S): the advantages; question by question they belong to the rows. Targets that were not sampled are -1.
    Rows and what is missing to whole micro-batches are filled up with `pad_id`, with targets -1 and weights 0.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    rows = micro_rows * math.ceil(len(sequences) / micro_rows)
    ids = np.full((rows, length + 1), pad_id, np.int32)
    sampled = np.zeros((rows, length + 1), bool)
    for row, (sequence, mask) in enumerate(zip(sequences, masks, strict=True)):
        ids[row, : len(sequence)] = sequence
        sampled[row, : len(mask)] = mask
    per_token = np.zeros((rows, length), np.float32)
    per_token[: len(sequences)] = weights.reshape(-1, 1)
    shape = (-1, micro_rows, length)
    return {
        "inputs": ids[:, :-1].reshape(shape).copy(),
        "targets": np.where(sampled[:, 1:], ids[:, 1:], -1).astype(np.int32).reshape(shape),
        "weights": per_token.reshape(shape),
    }
    # --- end


# %% id="rl.to_batch.check"
check("rl.to_batch", to_batch)

# %% tags=["hidden"] id="rl.to_batch.hidden"
hidden(
    "rl.to_batch",
    reference("five rows a micro-batch", lambda rng: checks.answers(rng, 4, 3, 5)),
    reference("one row a micro-batch", lambda rng: checks.answers(rng, 2, 2, 1)),
    reference("one answer", lambda rng: checks.answers(rng, 1, 1, 3)),
)
mutant("rl.to_batch", "np.where(sampled[:, 1:]", "np.where(sampled[:, :-1]", says="mask belongs to the target")
mutant("rl.to_batch", "np.where(sampled[:, 1:], ids[:, 1:], -1)", "ids[:, 1:]", says="no targets")
mutant(
    "rl.to_batch",
    "math.ceil(len(sequences) / micro_rows)",
    "max(len(sequences) // micro_rows, 1)",
    says="index past the end",
)
mutant("rl.to_batch", "weights.reshape(-1, 1)", "weights.T.reshape(-1, 1)", says="next to each other")
mutant(
    "rl.to_batch", "np.where(sampled[:, 1:], ids[:, 1:], -1)", "np.where(sampled[:, :-1], ids[:, :-1], -1)", says="NEXT"
)
mutant(
    "rl.to_batch",
    "np.full((rows, length + 1), pad_id, np.int32)",
    "np.zeros((rows, length + 1), np.int32)",
    says="inputs",
)

# %% id="batch-run"
batch_of = mine("rl.to_batch")
small = batch_of([[50, 3, 7, 9], [50, 3, 8, 2, 9]], [[0, 0, 1, 1], [0, 0, 1, 0, 1]], np.float32([[0.5, -0.5]]), 6, 0, 2)
for name, array in small.items():
    for row in array[0]:
        print(f"{name:<8} {row.tolist()}")

# %% [markdown] id="toy-text"
# ## 4. A policy that you can see
#
# The toy model adds: `3 + 4`, for the 55 pairs of digits whose sum has one digit. It writes 13 tokens: ten
# digits, a blank, `#### ` and the end. What it says next depends on the question and on the last token:
# a table `last` for what follows which token, and for each question a row of its own, which counts right after `#### `.
# So its knowledge is 55 guesses, and its manners are one table that all questions share.
#
# Everything else is the library's: the sampler, the loss, your batches, your advantages.

# %% id="toy"
PIECES = [*"0123456789", " ", "#### "]
TAG, END, ASK, VOCAB = 11, 12, 13, 13  # ids from ASK up are questions
LIMIT, QUESTIONS, SAMPLES = 16, 8, 8  # tokens an answer, questions a step, answers a question
ROWS = QUESTIONS * SAMPLES
SEEDS, STEPS, RATE = (2, 10, 40.0) if fast() else (12, 200, 40.0)
PAIRS = [(a, b) for a in range(10) for b in range(10) if a + b <= 9]
HELD_OUT, TRAINED = PAIRS[::4], [pair for i, pair in enumerate(PAIRS) if i % 4]


def conversation(pair: tuple[int, int]) -> dict:
    question, answer = f"{pair[0]} + {pair[1]}", f"#### {pair[0] + pair[1]}"
    return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}


def as_text(ids: tuple[int, ...]) -> str:
    return "".join(PIECES[i] for i in ids if i != END)


def prompts(pairs: list, samples: int) -> np.ndarray:
    return np.repeat([ASK + 10 * a + b for a, b in pairs], samples)


def next_logits(policy: dict, question: jax.Array, last: jax.Array) -> jax.Array:
    """Logits (…, VOCAB) of what follows token `last` in an answer to `question`, two arrays of ids."""
    own = policy["own"][question - ASK] * (last == TAG)[..., None]
    return policy["last"][jnp.minimum(last, ASK)] + own


@partial(jax.jit, static_argnames="greedy")
def write_rows(policy: dict, questions: jax.Array, first: int, seed: int, temperature: float, greedy: bool) -> tuple:
    """Answers (SEEDS, ROWS, LIMIT) of SEEDS policies to `questions` (ROWS,), rows `first` and on, and log-probabilities."""
    seeds, rows = jnp.divmod(jnp.arange(SEEDS * ROWS, dtype=jnp.uint32), ROWS)
    keys = row_keys(jnp.broadcast_to(jnp.uint32(seed), rows.shape), seeds, rows + jnp.uint32(first))

    def one(last: jax.Array, step: jax.Array) -> tuple:
        logits = jax.vmap(next_logits, (0, None, 0))(policy, questions, last).reshape(-1, VOCAB)
        token, logprob = sample(logits, keys, step, temperature, 0, 1.0, greedy, VOCAB)
        token = token.reshape(last.shape)
        return token, (token, logprob.reshape(last.shape))

    _, (tokens, logprobs) = jax.lax.scan(one, jnp.tile(questions, (SEEDS, 1)), jnp.arange(LIMIT))
    return jnp.moveaxis(tokens, 0, 2), jnp.moveaxis(logprobs, 0, 2)


def write(policy: dict, questions: np.ndarray, seed: int, temperature: float = 1.0, greedy: bool = False) -> tuple:
    """The same for any number of questions, ROWS at a time, so that one program does it all."""
    filled = np.pad(questions, (0, -len(questions) % ROWS), constant_values=ASK)
    parts = [
        write_rows(policy, filled[i : i + ROWS], i, seed, temperature, greedy) for i in range(0, len(filled), ROWS)
    ]
    return tuple(np.concatenate(arrays, axis=1)[:, : len(questions)] for arrays in zip(*parts, strict=True))


def forward(policy: dict, inputs: jax.Array) -> jax.Array:
    """Logits (B, T, VOCAB) of whole rows (B, T), as a trainer computes them."""
    return next_logits(policy, jnp.broadcast_to(inputs[:, :1], inputs.shape), inputs)


@jax.jit
@partial(jax.vmap, in_axes=(0, 0, None))
def update(policy: dict, batch: dict, rate: float) -> dict:
    """One step of each policy on its micro-batch, whose arrays are (SEEDS, ROWS, LIMIT)."""

    def loss(policy: dict) -> jax.Array:
        total, count = cross_entropy(forward(policy, batch["inputs"]), batch["targets"], batch["weights"])
        return total / jnp.maximum(count, 1)

    return jax.tree.map(lambda x, slope: x - rate * slope, policy, jax.grad(loss)(policy))


# %% [markdown] id="base-text"
# **The start** is SFT on answers of a bad teacher: the sum plus a random error, with some loose numbers in front.
# Twelve teachers, twelve policies: everything below runs with twelve seeds at once.


# %% id="base"
def stacked(batches: list[dict]) -> dict:
    """The batches of the seeds as arrays (SEEDS, A, ROWS, LIMIT)."""
    return {name: np.stack([batch[name] for batch in batches]) for name in batches[0]}


def part(batch: dict, number: int) -> dict:
    return {name: array[:, number % array.shape[1]] for name, array in batch.items()}


def taught(seed: int) -> dict:
    """A batch of six answers to each question of the training set, from teacher `seed`; 10 % lack the ####."""
    rng, rows = np.random.default_rng(seed), []
    for a, b in TRAINED * 6:
        number = int(np.clip(a + b + round(rng.normal(0, 1.5)), 0, 9))
        aloud = [[int(rng.integers(10)), 10] for _ in range(rng.integers(1, 3))] if rng.random() > 0.75 else []
        rows.append([ASK + 10 * a + b, *sum(aloud, []), *([TAG] if rng.random() < 0.9 else []), number, END])
    return batch_of(rows, [[0] + [1] * (len(r) - 1) for r in rows], np.ones((1, len(rows))), LIMIT, END, ROWS)


lessons = stacked([taught(seed) for seed in range(SEEDS)])
start = {"last": jnp.zeros((SEEDS, ASK + 1, VOCAB)), "own": jnp.zeros((SEEDS, 100, VOCAB))}
for step in range(20 if fast() else 100):
    start = update(start, part(lessons, step), 8.0)


def cut(row: list[int]) -> tuple[int, ...]:
    """The ids of an answer up to its end token, if there is one."""
    return tuple(row[: row.index(END) + 1] if END in row else row)


def examples(policy: dict, pair: tuple[int, int], count: int = 6) -> str:
    tokens, _ = write(policy, prompts([pair], count), 7)
    return ", ".join(repr(as_text(cut(row))) for row in tokens[0].tolist())


print("3 + 4:", examples(start, (3, 4)))

# %% [markdown] id="reward-text"
# **The reward.** 1 for the right number, else 0. But where in the text *is* the answer? GSM8K's form is a line
# `#### 42`, and `extract_answer(text)` reads it: the number as text in one fixed form, or `None`.


# %% tags=["exercise"] id="rl.same_number" points=2 minutes=10 level=2 library="nanochat_lib.tasks.common:same_number"
def same_number(conversation: dict[str, object], completion: str) -> float:
    """1.0 when both `####` numbers agree, else 0.0. A missing answer is never right; a missing reference is a UserError.

    `last_text(conversation)` is the reference answer's text, `completion` what the model wrote.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    reference = extract_answer(last_text(conversation))
    if reference is None:
        raise UserError(f"the reference answer has no '#### number' line: {last_text(conversation)[:80]!r}")
    return float(extract_answer(completion) == reference)
    # --- end


# %% id="rl.same_number.check"
check("rl.same_number", same_number)

# %% tags=["hidden"] id="rl.same_number.hidden"
hidden(
    "rl.same_number",
    reference("other sums", checks.sums),
    example("no form", (checks.question("#### 12"), "12"), 0.0),
    example("the first of two", (checks.question("#### 5"), "#### 5\n#### 6"), 1.0),
    example(
        "in parts",
        ({"messages": [{"role": "assistant", "content": [{"type": "text", "text": "#### 8"}]}]}, "#### 8"),
        1.0,
    ),
)
mutant(
    "rl.same_number",
    "float(extract_answer(completion) == reference)",
    "float(reference in completion)",
    says="can be gamed",
)
mutant("rl.same_number", "if reference is None:", "if False:", says="bad input was accepted")
mutant(
    "rl.same_number",
    "float(extract_answer(completion) == reference)",
    "float(extract_answer(completion) is not None)",
    says="not yet right",
)
mutant(
    "rl.same_number",
    "float(extract_answer(completion) == reference)",
    "float(completion == last_text(conversation))",
    says="not texts",
)

# %% [markdown] id="train-text"
# **The loop**: sample with the present policy, reward, compare, step, throw the answers away. They were drawn from a
# policy that no longer exists after the step. That is *on-policy*: each answer is used once.
#
# Read the loop. It has some switches, all at their right values; later you will flip one after the other.

# %% id="train"
exactly = mine("rl.same_number")


@lru_cache(None)
def scored(reward, pair: tuple[int, int], ids: tuple[int, ...]) -> float:
    return reward(conversation(pair), as_text(ids))


def train(
    policy,
    reward,
    rate=RATE,
    steps=STEPS,
    temperature=1.0,  # of the sampler
    refresh=1,  # the sampler gets the trainer's weights every so many steps
    train_end=True,  # the end token is a target like any other
    by_answer=False,  # every answer weighs the same, not every token
    watch=None,  # called at every fifth step with (policy, batch, the sampler's log-probabilities)
) -> tuple[dict, dict]:
    """(policies, log); each entry of the log is (steps, SEEDS)."""
    log = {name: [] for name in ("reward", "right", "tokens", "ended", "dead")}
    rng, sampler = np.random.default_rng(3), policy
    for step in range(steps):
        if step % refresh == 0:
            sampler = policy
        pairs = [TRAINED[i] for i in rng.choice(len(TRAINED), QUESTIONS, replace=False)]
        asked = prompts(pairs, SAMPLES)
        tokens, logprobs = write(sampler, asked, step, temperature)
        batches, entries = [], []
        for seed in range(SEEDS):
            found = [cut(row) for row in tokens[seed].tolist()]
            earned, right = (
                np.float32([scored(f, pairs[i // SAMPLES], ids) for i, ids in enumerate(found)])
                for f in (reward, exactly)
            )
            earned, lengths = earned.reshape(QUESTIONS, SAMPLES), np.array([len(ids) for ids in found])
            gains = compare(earned)
            if by_answer:
                gains = gains * lengths.mean() / lengths.reshape(gains.shape)
            rows = [[int(question), *ids] for question, ids in zip(asked, found, strict=True)]
            masks = [[0] + [int(train_end or i != END) for i in ids] for ids in found]
            batches.append(batch_of(rows, masks, gains, LIMIT, END, ROWS))
            ended = np.mean([END in ids for ids in found])
            entries.append((earned.mean(), right.mean(), lengths.mean(), ended, share_dead(earned)))
        batch = stacked(batches)
        if watch and step % 5 == 0:
            watch(policy, batch, logprobs)
        policy = update(policy, part(batch, 0), rate)
        for name, values in zip(log, zip(*entries, strict=True), strict=True):
            log[name].append(values)
    return policy, {name: np.array(values) for name, values in log.items()}


tuned, log = train(start, exactly)
print("3 + 4:", examples(tuned, (3, 4)))

# %% [markdown] id="curve-text"
# One run is an anecdote: another seed, another curve. So a reward curve is drawn with a band over seeds. Here the band
# leaves out the lowest and the highest tenth of twelve, each smoothed over ten steps.


# %% tags=["slide"] id="curve"
def smooth(values: np.ndarray) -> np.ndarray:
    width = min(10, max(1, len(values) // 2))
    return np.apply_along_axis(lambda v: np.convolve(v, np.ones(width) / width, "valid"), 0, values)


def band(ax, values: np.ndarray, colour: str, label: str, style: str = "-") -> None:
    curves = smooth(values)
    x = np.arange(len(curves)) + len(values) - len(curves)
    low, high = np.quantile(curves, (0.1, 0.9), axis=1)
    ax.fill_between(x, low, high, color=colour, alpha=0.2, linewidth=0)
    ax.plot(x, curves.mean(axis=1), color=colour, label=label, linestyle=style)


def named(ax, title: str, x: str, y: str) -> None:
    ax.set_title(title, loc="left", fontweight="bold", fontsize=10)
    ax.set_xlabel(x)
    ax.set_ylabel(y)


def late(values: np.ndarray) -> float:
    return float(values[-20:].mean())


figure, (left, right) = new_figure(1, 2, height=2.6, width=7.6)
band(left, log["reward"], BLUE, "reward")
named(left, "Reward, all seeds", "step", "share of right answers")
left.set_ylim(0, 1)
band(right, log["dead"], RED, "dead")
named(right, "Dead groups", "step", "share of the groups")
right.set_ylim(0, 1)
show(
    figure,
    alt="left: the mean reward rises from below 0.2 to nearly 0.9, steeply at first; the band over seeds is about "
    "0.1 wide at the end. right: a third of the groups is dead at first, two thirds at the end",
)
if not fast():
    about(log["reward"][:5].mean(), 0.2, within=0.05, name="reward of the first five steps")
    about(late(log["reward"]), 0.9, within=0.05, name="reward of the last 20 steps")
    _ = about(late(log["dead"]), 0.69, within=0.08, name="dead groups of the last 20 steps")

# %% [markdown] id="curve-look"
# The policy teaches itself from a fifth to nine tenths. And look right: the better it gets, the less there is to learn
# from. At the end two of three groups are dead, now mostly because all of their answers are right.

# %% [markdown] id="passk-text"
# **Did it learn anything new?** Ask each question 32 times, before and after, and score with *pass@k*: the chance that one
# of $k$ answers is right (chapter 07). pass@1 is what users see. pass@32 is what the model *could* say.


# %% tags=["slide"] id="passk"
def sampled_marks(policy: dict, pairs: list, count: int) -> np.ndarray:
    """Right or not, (SEEDS, pairs, count), sampled at temperature 1."""
    tokens, _ = write(policy, prompts(pairs, count), 12345)
    found = [[scored(exactly, pairs[i // count], cut(row)) for i, row in enumerate(rows)] for rows in tokens.tolist()]
    return np.array(found).reshape(SEEDS, len(pairs), count)


COUNT = 8 if fast() else 32
before, after = sampled_marks(start, TRAINED, COUNT), sampled_marks(tuned, TRAINED, COUNT)
unseen = [sampled_marks(policy, HELD_OUT, COUNT) for policy in (start, tuned)]
figure, (left, right) = new_figure(1, 2, height=2.8, width=7.6)
ks = np.arange(1, COUNT + 1)
for values, colour, label, style in (
    (before, ORANGE, "before", "-"),
    (after, BLUE, "after", "-"),
    (unseen[0], ORANGE, "before, held out", ":"),
    (unseen[1], BLUE, "after, held out", ":"),
):
    curves = np.array([unbiased_pass_at_k(marks) for marks in values])
    left.fill_between(ks, *np.quantile(curves, (0.1, 0.9), axis=0), color=colour, alpha=0.15, linewidth=0)
    left.plot(ks, curves.mean(axis=0), color=colour, linestyle=style, label=label)
left.set_xscale("log", base=2)
left.set_xticks([k for k in (1, 2, 4, 8, 16, 32) if k <= COUNT], [str(k) for k in (1, 2, 4, 8, 16, 32) if k <= COUNT])
left.set_ylim(0, 1)
named(left, "pass@k, before and after", "k", "share of the questions")
left.legend(fontsize=7.5)
chances = before.mean(axis=2).ravel(), after.mean(axis=2).ravel()
right.plot(*chances, "o", color=BLUE, alpha=0.3, markersize=5, markeredgewidth=0)
named(right, "Each question and seed", "chance before", "chance after")
show(
    figure,
    alt="left: pass@k of the trained questions starts at 0.17 and reaches 0.9 at k = 32 before; after RL it is 0.9 at once "
    "and hardly grows; held-out curves are nearly the same before and after. right: chance of each question after against "
    "before: nearly all lie at 1, those that stayed near 0 had a chance near 0 before",
)
lost = after.mean(axis=2) < 0.5
sums = np.array([a + b for a, b in TRAINED])
drift = np.asarray(tuned["last"] - start["last"])[:, TAG, :10]
drift = (drift - drift.mean(axis=1, keepdims=True))[:, sums]  # (SEEDS, questions): of the right digit
for name, which in (("found", ~lost), ("lost", lost)):
    if which.any():
        counts = np.bincount(np.broadcast_to(sums, which.shape)[which], minlength=10)
        print(f"{name:<6} {which.mean():4.0%}   chance before {before.mean(axis=2)[which].mean():.3f}", end="   ")
        print(f"shared logit of the right digit {drift[which].mean():+.1f}   with sum 0 … 9: {counts.tolist()}")

# %% id="passk-numbers"
if not fast():
    about(before.mean(), 0.17, within=0.04, name="pass@1 before")
    about(after.mean(), 0.9, within=0.05, name="pass@1 after")
    about(before.any(axis=2).mean(), 0.94, within=0.05, name="pass@32 before")
    about(after.any(axis=2).mean(), 0.97, within=0.03, name="pass@32 after")
    about(lost.mean(), 0.04, within=0.03, name="share of the questions that are lost")
    about(sums[np.nonzero(lost)[1]].mean(), 2.9, within=1.2, name="mean sum of the lost")
    about(drift[lost].mean(), -1.7, within=0.7, name="shared logit of the right digit, lost")
    about(drift[~lost].mean(), 0.4, within=0.3, name="shared logit of the right digit, found")
    about(unseen[1].mean() - unseen[0].mean(), 0.03, within=0.03, name="held out, pass@1 after less before")
    falls = unseen[0].any(axis=2).mean() - unseen[1].any(axis=2).mean()
    _ = about(falls, 0.05, within=0.05, name="held out, pass@32 before less after")

# %% [markdown] id="passk-look"
# pass@1 grows from 0.17 to 0.91; pass@32 from 0.94 to 0.97. RL moved what the model *could* say to what it *does* say.
# (For large models see Yue et al., arXiv:2504.13837.)
#
# And some questions are **lost**, 4 % of them. Look at their sums: all small, which few questions have. Each of them had
# a chance, one in twenty. But what is learned on other questions also moves the table that all share: there the logit of
# their right digit, after `#### `, fell by 1.7 nats, while it rose for those that were found. So they were sampled right
# ever less often, and who never says it is never rewarded for it.
#
# And the dotted lines: on held-out questions almost nothing happened. This toy has a row of its own for each question,
# so little could carry over: manners, such as `#### `, and a taste for some digits. pass@1 gains three
# hundredths, pass@32 falls. The reward curve of the *training* questions says nothing about that. The library asks held-out
# questions, before, during and after a run.
#
# nanochat asks 400 test questions, eight answers each, and reports pass@k from the *first* k. The library reports that
# and the unbiased one, which uses all eight for every k.

# %% [markdown] id="norm-text"
# ## 5. Token or sequence
#
# The loss divides by the number of sampled tokens. Of what? There are three habits.
#
# | one token weighs | divided by | where |
# |---|---|---|
# | $A / |\text{answer}|$ | its own answer's tokens, then the answers' number | GRPO as published |
# | $A / |\text{pass}|$ | the tokens of its pass of eight answers | nanochat |
# | $A / |\text{step}|$ | all tokens of the step | DAPO (arXiv:2503.14476), this library |

# %% id="norm-quiz"
quiz("rl.q_norm")

# %% tags=["slide"] id="norm-figure"
lengths = np.array([4, 4, 5, 4, 6, 4, 12, 5, 12, 12, 6, 12, 11, 12, 4, 12])
passes = np.repeat([lengths[:8].sum(), lengths[8:].sum()], 8)
habits = {
    "own answer": 1 / lengths / len(lengths),
    "own pass of 8": 1 / passes / 2,
    "whole step": np.full(len(lengths), 1 / lengths.sum()),
}
figure, ax = new_figure(height=2.5, width=7.2)
for i, ((name, weights), colour) in enumerate(zip(habits.items(), (ORANGE, SKY, BLUE), strict=True)):
    ax.bar(np.arange(16) + 0.27 * (i - 1), 1000 * weights, width=0.27, color=colour, label=name)
ax.set_xticks(range(16), lengths)
ax.axvline(7.5, color=FAINT, linestyle="--")
named(
    ax,
    "What one token weighs, for the same advantage",
    "tokens of the answer (the dashed line parts two passes)",
    "weight × 1000",
)
ax.set_ylim(0, 20)
ax.legend(fontsize=8, ncols=3)
show(
    figure,
    alt="bars of the weight of one token in sixteen answers of 4 to 12 tokens: divided by its own answer, tokens of short "
    "answers weigh three times as much as those of long ones; divided by its pass, all of the first eight weigh nearly "
    "twice as much as all of the last eight; divided by the whole step all are equal",
)
for name, weights in habits.items():
    print(f"{name:<14} heaviest token / lightest: {weights.max() / weights.min():.1f}")

# %% [markdown] id="norm-look"
# Divided by its own answer, a token of a short answer weighs three times as much. Right and short is praised more, wrong
# and *long* is blamed less: answers that will be wrong had better be long (Liu et al., arXiv:2503.20783). Divided by the
# pass, a token's weight depends on its neighbours: the same answer counts more among short ones.
#
# Does it matter in the toy?

# %% id="norm-run"
_, log_answer = train(start, exactly, by_answer=True)
for name, found in (("by token", log), ("by answer", log_answer)):
    print(f"{name:<10} right {late(found['right']):.2f}   tokens an answer {late(found['tokens']):.2f}")
if not fast():
    about(late(log["tokens"]), 4.1, within=0.5, name="tokens, by token")
    _ = about(late(log_answer["tokens"]), 3.5, within=0.3, name="tokens, by answer")

# %% [markdown] id="norm-end"
# It does, and not as you may have thought. By token the answers come out *longer*, 4.1 tokens instead of 3.5. Most answers
# of this toy are right soon, and then it is the praise that counts: by token a right answer that rambles is praised for
# each of its tokens, by answer it gets no more in total than a short one. The blame for long wrong answers counts
# where most answers are wrong, as at the start of a hard task. Neither habit is neutral. An effect that you expect is
# still one that you measure, on your task.

# %% [markdown] id="temperature-text"
# ## 6. Temperature
#
# The sampler divides its logits by a temperature. Below 1 the likely gets likelier. Here are three runs that differ in
# nothing else. What do their logs say, and what do the models do afterwards, all sampled at 1?

# %% id="temperature-quiz"
quiz("rl.q_temperature")

# %% tags=["slide"] id="temperature"
heats = {0.3: ORANGE, 1.0: BLUE, 2.0: PURPLE}
runs = {1.0: (tuned, log)} | {heat: train(start, exactly, temperature=heat) for heat in (0.3, 2.0)}
figure, (left, middle, right) = new_figure(1, 3, height=2.6, width=7.8)
afterwards = {}
for heat, colour in heats.items():
    band(left, runs[heat][1]["reward"], colour, f"T = {heat:g}")
    band(middle, runs[heat][1]["dead"], colour, f"T = {heat:g}")
    afterwards[heat] = sampled_marks(runs[heat][0], TRAINED, COUNT).mean(axis=(1, 2))
named(left, "Logged reward", "step", "reward")
named(middle, "Dead groups", "step", "share")
left.legend(fontsize=7.5)
for i, (heat, colour) in enumerate(heats.items()):
    right.bar(i, afterwards[heat].mean(), color=colour, width=0.6)
    right.plot([i] * SEEDS, afterwards[heat], "k.", markersize=4)
right.set_xticks(range(3), [f"{heat:g}" for heat in heats])
named(right, "Afterwards, at T = 1", "temperature of training", "right")
for ax in (left, middle, right):
    ax.set_ylim(0, 1)
show(
    figure,
    alt="left: logged reward; temperature 0.3 starts at 0.4 and is ahead early, 1 ends highest, 2 rises slowly. middle: dead "
    "groups; at 0.3 most are dead early. right: right answers at temperature 1 after training: 0.4 for 0.3, 0.9 for 1, "
    "0.8 for 2, points for the seeds",
)
if not fast():
    about(runs[0.3][1]["reward"][:10].mean(), 0.46, within=0.08, name="logged at first at 0.3")
    about(afterwards[0.3].mean(), 0.4, within=0.08, name="trained at 0.3, right at 1")
    about(late(runs[0.3][1]["dead"]), 0.93, within=0.06, name="dead groups at the end at 0.3")
    _ = about(afterwards[2.0].mean(), 0.8, within=0.08, name="trained at 2, right at 1")

# %% [markdown] id="temperature-look"
# At 0.3 the log looks best for a long time, from the first step on, before anything was learned: colder answers are better
# answers. But cold groups are all alike, so most are dead, and what was learned is enough for the cold sampler only. Ask
# at 1, and four in ten are right. At 2 the log looks worst and the model is fine.
#
# Compare rewards at one temperature only. And training wants variety: nanochat samples at 1.0, from the 50 likeliest
# tokens.
#
# There is more to it. The gradient is of $\log p$ at temperature 1, the answers are from another distribution: not
# quite on-policy. Which brings us to the sampler.

# %% [markdown] id="agree-text"
# ## 7. Sampler and trainer
#
# The mean over draws *is* the gradient only if the draws come from the policy that is trained. In a real system these are two
# programs: a sampler with a cache, in bfloat16, perhaps on other chips, and a trainer. They can come apart: old weights,
# positions off by one, another template, a top-k of one of them. Nothing crashes. The reward may even rise.
#
# So compare them on every step. The sampler tells the log-probability of each token it drew; the trainer's forward pass gives
# one for the same token. $d = \log p_\text{trainer} - \log p_\text{sampler}$ should be 0, apart from rounding, and
# $e^d$ is the *importance ratio*, which PPO and GRPO use, clipped, to correct for it.


# %% tags=["exercise"] id="rl.apart" points=2 minutes=15 level=2 library="nanochat_lib.rl:apart"
def apart(logprobs: jax.Array, sampled: jax.Array, trained: jax.Array) -> tuple:
    """(Σ|d|, max|d|, Σ exp d, how many) of d = logprobs − sampled at the positions that are `trained`; all (B, T).

    d beyond ±MOST_NATS counts as ±MOST_NATS in exp d, so that one impossible token does not make the sum infinite.
    The number of positions is int32.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    difference = jnp.where(trained, logprobs - sampled, 0.0)
    ratio = jnp.where(trained, jnp.exp(jnp.clip(difference, -MOST_NATS, MOST_NATS)), 0.0)
    away = jnp.abs(difference)
    return away.sum(), away.max(), ratio.sum(), trained.sum(dtype=jnp.int32)
    # --- end


# %% id="rl.apart.check"
check("rl.apart", apart)

# %% tags=["hidden"] id="rl.apart.hidden"
hidden(
    "rl.apart",
    reference("far apart", lambda rng: checks.measured(rng, 3.0)),
    reference("other impossible tokens", checks.impossible),
    example(
        "nothing is trained",
        lambda: (np.float32([[-1, -2]]), np.float32([[-3, 0]]), np.array([[False, False]])),
        (np.float32(0), np.float32(0), np.float32(0), np.int32(0)),
    ),
)
mutant("rl.apart", "jnp.clip(difference, -MOST_NATS, MOST_NATS)", "difference", says="is inf")
mutant("rl.apart", "logprobs - sampled", "sampled - logprobs", says="upside down")
mutant("rl.apart", "jnp.where(trained, logprobs - sampled, 0.0)", "logprobs - sampled", says="only trained positions")
mutant(
    "rl.apart",
    "jnp.where(trained, jnp.exp(jnp.clip(difference, -MOST_NATS, MOST_NATS)), 0.0)",
    "jnp.exp(jnp.clip(difference, -MOST_NATS, MOST_NATS))",
    says="exp 0 is 1",
)
mutant("rl.apart", "jnp.abs(difference)", "difference", says="expected")

# %% [markdown] id="stale-text"
# Three runs: a sampler that gets the new weights at every step, every 20 steps, and never. The last is a real
# mistake: `engine.params = …` was forgotten, or done before the first step only.

# %% tags=["slide"] id="stale"
distance = mine("rl.apart")


@jax.jit
@jax.vmap
def spoken(policy: dict, batch: dict) -> jax.Array:
    """The trainer's log-probabilities of the targets of a micro-batch."""
    return -token_nll(forward(policy, batch["inputs"]), batch["targets"])


def watched(**options) -> tuple[dict, dict]:
    """`train` with a log of mean |d| and the mean ratio."""
    seen = []

    def watch(policy: dict, batch: dict, logprobs: np.ndarray) -> None:
        ours = spoken(policy, part(batch, 0))
        for seed in range(SEEDS):
            targets = batch["targets"][seed]
            theirs = aligned([[0.0, *row] for row in logprobs[seed]], targets)[0]
            targets = targets[0]
            total, _, ratio, count = map(float, distance(ours[seed], theirs, targets >= 0))
            seen.append((total / count, ratio / count))

    policy, log = train(start, exactly, watch=watch, **options)
    seen = np.array(seen).reshape(-1, SEEDS, 2)
    return policy, log | {"away": seen[..., 0], "ratio": seen[..., 1]}


delays = {"every step": 1, "every 20 steps": 20, "never": 10**9}
stale = {name: watched(refresh=delay) for name, delay in delays.items()}
tints = dict(zip(delays, (BLUE, ORANGE, RED), strict=True))
figure, (left, middle, right) = new_figure(1, 3, height=2.6, width=7.8)
for i, (name, (policy, found)) in enumerate(stale.items()):
    band(left, found["reward"], tints[name], name)
    middle.plot(5 * np.arange(len(found["away"])), found["away"].mean(axis=1), color=tints[name], label=name)
    scores = sampled_marks(policy, TRAINED, COUNT).mean(axis=(1, 2))
    right.bar(i, scores.mean(), color=tints[name], width=0.6)
    right.plot([i] * SEEDS, scores, "k.", markersize=4)
named(left, "Logged reward", "step", "reward")
named(middle, "Sampler and trainer apart", "step", "mean |d|, nats")
named(right, "The trained model", "new weights", "right")
middle.set_ylim(-0.5, 17)
middle.legend(fontsize=7.5, title="new weights", title_fontsize=7.5)
left.set_ylim(0, 1)
right.set_ylim(0, 1)
right.set_xticks(range(3), ["every step", "every 20", "never"], fontsize=8)
show(
    figure,
    alt="left: logged reward: rises to 0.9 with new weights at every step, stays at about 0.4 with new weights every 20 steps, flat "
    "at 0.16 when never. middle: mean difference of log-probabilities: zero, a saw-tooth, and growing without end. right: "
    "the trained models' right answers at temperature 1",
)
for name, (_, found) in stale.items():
    print(f"{name:<15} mean |d|: step 0 {found['away'][0].mean():.4f}, at the end {found['away'][-4:].mean():.2f} nats")
if not fast():
    about(late(stale["every step"][1]["away"]), 1e-6, within=1e-5, name="mean |d|, every step")
    about(late(stale["every 20 steps"][1]["reward"]), 0.43, within=0.12, name="reward, every 20 steps")
    about(late(stale["never"][1]["reward"]), 0.16, within=0.05, name="logged reward, never")
    _ = about(
        sampled_marks(stale["never"][0], TRAINED, COUNT).mean(), 0.56, within=0.12, name="the trained model, never"
    )

# %% [markdown] id="stale-look"
# Never: the log says that nothing is learned. One would raise the rate, look for the bug in the reward, and not find it.
# And the trainer's model is not what the log shows: asked by itself, it gets more than half right, for it has been trained
# 200 times on answers that it would no longer give. Every 20 steps: it learns at first, then each block of 20
# overshoots, and more than half of the gain is gone. In both, $|d|$ tells at the first stale step.
#
# The library logs it at every step: `logprob_diff`, its largest, and the ratio's mean. Look at them *before* the reward.
# One thing they cannot show is a temperature: the sampler reports log-probabilities as they were before it.

# %% id="apart-quiz"
quiz("rl.q_apart")

# %% [markdown] id="hack-text"
# ## 8. A flawed reward
#
# `extract_answer` is strict: models of this size often know the number and miss the form. Why not be kind, and give 1
# whenever the right number stands *anywhere* in the answer? All answers that were right are right still.
# Here is that reward, and the curves beside those of the strict one. What do you expect of the share of answers that
# are really right? `predict("rl.p_hack", 90)`.

# %% id="hack-predict"
predict("rl.p_hack")


# %% tags=["slide"] id="hack"
def anywhere(conversation: dict, completion: str) -> float:
    return float(extract_answer(last_text(conversation)) in completion)


hacked, log_hack = train(start, anywhere)
figure, (left, middle, right) = new_figure(1, 3, height=2.6, width=7.8)
for found, colour, name in ((log, BLUE, "strict"), (log_hack, RED, "kind")):
    band(left, found["reward"], colour, name)
    band(middle, found["right"], colour, name)
    band(right, found["tokens"], colour, name)
named(left, "What the run logs", "step", "its own reward")
named(middle, "What is true", "step", "right answers")
named(right, "What it costs", "step", "tokens an answer")
left.legend(fontsize=8)
left.set_ylim(0, 1.02)
middle.set_ylim(0, 1.02)
right.set_ylim(0, LIMIT + 0.5)
show(
    figure,
    alt="left: the kind reward's own curve rises faster and higher, to nearly 1, than the strict one's 0.9. middle: right "
    "answers reach nearly 0.9 with the strict reward and less than 0.6 with the kind one. right: tokens an answer stay at "
    "4 with the strict one and go to nearly 16, the limit, with the kind one",
)
reveal("rl.p_hack", round(100 * late(log_hack["right"])))
for pair in ((3, 4), (2, 1)):
    print(f"{pair[0]} + {pair[1]}: {examples(hacked, pair, 4)}")

# %% id="hack-numbers"
if not fast():
    about(late(log_hack["reward"]), 0.96, within=0.03, name="kind reward, as logged")
    about(late(log_hack["right"]), 0.58, within=0.08, name="right answers under the kind reward")
    about(late(log_hack["tokens"]), 15.2, within=0.7, name="tokens an answer under the kind reward")
    _ = about(late(log_hack["ended"]), 0.1, within=0.08, name="answers that end under the kind reward")

# %% [markdown] id="hack-look"
# The log of the flawed run is the *better* one: 0.96 against 0.90. What it does: it guesses again and again and never
# stops. A list of numbers holds the right one. Each answer costs nearly four times as much, two in five are wrong, and
# nine in ten never end. The model did not cheat; it did what was paid for.
#
# Three things would have told: answers that reach the limit, a measure that is *not* the reward (`correct` in the library's
# log, whatever is rewarded), and reading ten answers. The cause is always a reward that more than one behaviour can earn.
#
# **The fix** is a reward that only the wanted behaviour can earn. The strict one does not mind what comes after the first
# `#### 7`. So write a better one.


# %% tags=["exercise"] id="rl.right_and_brief" points=2 minutes=20 level=2
def right_and_brief(conversation: dict, completion: str) -> float:
    """A reward of your own: 0 for a wrong answer, 0.5 to 1 for a right one, and more for the shorter of two right ones.

    Right means that the `####` numbers agree. However long a right answer is, it earns at least 0.5. Length is
    len(completion), in characters, up to some thousands.
    """
    # --- stub
    raise NotImplementedError
    # --- solution
    right = extract_answer(completion) == extract_answer(last_text(conversation))
    return float(right) * (0.5 + 0.5 / (1 + len(completion) / 20))
    # --- end


# %% id="rl.right_and_brief.check"
check("rl.right_and_brief", right_and_brief)

# %% tags=["hidden"] id="rl.right_and_brief.hidden"
hidden(
    "rl.right_and_brief",
    prop("other answers", checks.some_answers, checks.fair, call=checks.rewarded),
    prop(
        "very long ones",
        lambda rng: (
            checks.question("#### 5"),
            ["#### 5", "#### 5" + " " * 500, "#### 5" + " " * 4000, "#### 6", "5", ""],
        ),
        checks.fair,
        call=checks.rewarded,
    ),
)
mutant("rl.right_and_brief", "float(right) * ", "", says="expected")
mutant("rl.right_and_brief", "0.5 + 0.5 / (1 + len(completion) / 20)", "1.0", says="the shorter must earn more")
mutant(
    "rl.right_and_brief", "0.5 + 0.5 / (1 + len(completion) / 20)", "1 - len(completion) / 200", says="0.5 to 1 each"
)
mutant(
    "rl.right_and_brief",
    "extract_answer(completion) == extract_answer(last_text(conversation))",
    "extract_answer(last_text(conversation)) in completion",
    says="expected",
)
mutant("rl.right_and_brief", "len(completion) / 20", "20 / (1 + len(completion))", says="the shorter must earn more")

# %% [markdown] id="own-text"
# Run it, twice: from the policy that the flawed reward has spoiled, and from the start.

# %% id="own-run"
my_reward = mine("rl.right_and_brief")
late_fix, log_late = train(hacked, my_reward)
brief, log_brief = train(start, my_reward)
figure, (left, right) = new_figure(1, 2, height=2.6, width=7.6)
for found, colour, name in (
    (log_late, RED, "yours, from the spoiled policy"),
    (log, BLUE, "strict, from the start"),
    (log_brief, GREEN, "yours, from the start"),
):
    band(left, found["right"], colour, name)
    band(right, found["tokens"], colour, name)
named(left, "Right answers", "step", "share")
named(right, "Tokens an answer", "step", "tokens")
left.set_ylim(0, 1)
right.set_ylim(0, LIMIT + 0.5)
left.legend(fontsize=7.5)
show(
    figure,
    alt="left: right answers reach about 0.9 in all three runs. right: from the spoiled policy answers stay at about 15 "
    "tokens for all 200 steps; from the start they stay at 4 with the strict reward and fall to 3 with your own",
)
print("from the spoiled policy:", examples(late_fix, (3, 4), 3))
print("from the start:         ", examples(brief, (3, 4), 3))
if not fast():
    about(late(log_late["right"]), 0.84, within=0.08, name="right, from the spoiled policy")
    about(late(log_late["tokens"]), 14.6, within=0.9, name="tokens, from the spoiled policy")
    about(late(log_brief["right"]), 0.9, within=0.06, name="right, yours from the start")
    _ = about(late(log_brief["tokens"]), 3.1, within=0.25, name="tokens, yours from the start")

# %% [markdown] id="own-look"
# From the start your reward gives three tokens, `#### `, the digit and the end: nothing shorter is right. From the spoiled
# policy it repairs most of the numbers, and hardly the rambling: 200 steps take away half a token. Right answers that
# end early have become so rare that hardly a group holds one that could be praised. A better reward does not bring back what is never sampled. Go back to the checkpoint
# *before* the flaw; that is why runs keep more than one.
#
# In a real run a reward is a file. `nanochat run --preset cpu --set rl.reward=rewards/mine.py:right_and_brief` takes
# your function, and `exact+0.1*format` a sum of built-in ones. But be warned: each term that you add is another thing to
# game.

# %% [markdown] id="collapse-text"
# ## 9. Collapse
#
# Now too much of a good thing: the same loop with 12 and 40 times the rate.

# %% tags=["slide"] id="collapse"
rates = {RATE: BLUE, 12 * RATE: ORANGE, 40 * RATE: RED}
fates = {RATE: (tuned, log)} | {rate: train(start, exactly, rate=rate) for rate in rates if rate != RATE}


def different(policy: dict) -> float:
    """How many different answers the policies give to the questions of the training set, each its likeliest one."""
    tokens, _ = write(policy, prompts(TRAINED, 1), 0, greedy=True)
    return float(np.mean([len({as_text(cut(row)) for row in rows}) for rows in tokens.tolist()]))


figure, (left, middle, right) = new_figure(1, 3, height=2.6, width=7.8)
for rate, colour in rates.items():
    band(left, fates[rate][1]["right"], colour, f"rate {rate:g}")
    band(middle, fates[rate][1]["dead"], colour, f"rate {rate:g}")
    curves = np.array([unbiased_pass_at_k(m) for m in sampled_marks(fates[rate][0], TRAINED, COUNT)])
    right.plot(ks, curves.mean(axis=0), color=colour, label=f"rate {rate:g}")
right.plot(ks, np.mean([unbiased_pass_at_k(m) for m in before], axis=0), color=FAINT, linestyle="--", label="before RL")
right.legend(fontsize=7.5, loc="center right")
named(left, "Right answers", "step", "share")
named(middle, "Dead groups", "step", "share")
named(right, "pass@k afterwards", "k", "share")
for ax in (left, middle, right):
    ax.set_ylim(0, 1.02)
show(
    figure,
    alt="left: right answers for three rates: near 0.9 at 40; later and a wide band over seeds at 480; near 0.25 at 1600. middle: dead "
    "groups: at 1600 all are dead within a few steps. right: pass@k: flat at 0.25 for 1600, which is below the dashed curve "
    "from before RL for all larger k",
)
for name, policy in (("before", start), *((f"rate {rate:g}", fates[rate][0]) for rate in rates)):
    print(f"{name:<10} different answers to {len(TRAINED)} questions: {different(policy):.1f}")
print(f"2 + 1 at rate {40 * RATE:g}: {examples(fates[40 * RATE][0], (2, 1), 4)}")

# %% id="collapse-numbers"
if not fast():
    ends = fates[12 * RATE][1]["right"][-20:].mean(axis=0)
    about(late(fates[40 * RATE][1]["right"]), 0.27, within=0.12, name="right at the highest rate")
    about(late(fates[40 * RATE][1]["dead"]), 0.99, within=0.03, name="dead groups at the highest rate")
    poorer = np.mean([unbiased_pass_at_k(m)[-1] for m in sampled_marks(fates[12 * RATE][0], TRAINED, COUNT)])
    about(poorer, 0.86, within=0.06, name="pass@32 at 12 times the rate")
    _ = about(ends.max() - ends.min(), 0.5, within=0.3, name="best less worst seed at 12 times the rate")

# %% [markdown] id="collapse-look"
# Within a few steps the policy says the same few things to every question. What all questions *share* is learned
# fastest, and a large step makes it certain. A policy that is certain draws groups that are all alike, every group is
# dead, the gradient is zero: **there is no way back**. pass@32 is *below* the start: it has lost what it could say.
#
# In between, at 12 times the rate, seeds end 0.5 apart: one nearly perfect, one that has lost half of the questions.
# A single run would have told you either story. And pass@32 ends below the start's, though pass@1 is nearly five times
# as high: a policy can get better and poorer at once.
#
# The first sign is the share of dead groups that rises while the reward does not. A public report on
# a port of nanochat to one GPU tells of a collapse after some 400 steps, with a rate that falls in a line, and none with a
# cosine (unofficial). The library sets the rate of a step to 0 when all of its groups are dead, so that momentum alone does not move a
# policy that nothing has been learned about.

# %% [markdown] id="field-text"
# ## 10. Field lesson: the end that nobody trained
#
# nanochat's engine returns a sampled answer *without* the token that ended it. RL builds its targets from what the engine
# returns. So `<|assistant_end|>` is never a target in nanochat's RL. No error, and the reward rises as it should.
#
# One switch of your loop does the same: `train_end=False`.

# %% tags=["slide"] id="field"
endless, log_end = train(start, exactly, train_end=False)
each = [found["tokens"][-20:].mean(axis=0) for found in (log, log_end)]
figure, (left, middle, right) = new_figure(1, 3, height=2.6, width=7.8)
for found, colour, name in ((log, BLUE, "end trained"), (log_end, RED, "end left out")):
    band(left, found["reward"], colour, name)
    band(middle, found["ended"], colour, name)
named(left, "Reward", "step", "right answers")
named(middle, "Answers that end", "step", "share")
right.plot([3, 8], [3, 8], color=FAINT, linestyle="--")
right.plot(*each, "o", color=RED)
named(right, "Tokens, seed by seed", "end trained", "end left out")
left.set_ylim(0, 1)
middle.set_ylim(0, 1.02)
left.legend(fontsize=8)
show(
    figure,
    alt="left: the rewards of both runs are the same curve. middle: with the end left out the share of answers that end falls "
    "further than with it trained. right: tokens an answer of each seed with the end left out against with it trained; most "
    "points lie above the diagonal, some by far",
)
ratios = [
    each[1][list(chosen)].mean() / each[0][list(chosen)].mean() for chosen in combinations(range(SEEDS), min(5, SEEDS))
]
print(
    f"tokens, end left out beside trained: {each[1].mean() / each[0].mean():.2f}; more in {(each[1] > each[0]).sum()} of {SEEDS} seeds"
)
print(f"the same from five seeds only: {min(ratios):.2f} to {max(ratios):.2f}, as they happen to be chosen")
if not fast():
    about(late(log["reward"]) - late(log_end["reward"]), 0, within=0.05, name="reward lost")
    about(late(log["ended"]), 0.97, within=0.03, name="answers that end, end trained")
    about(late(log_end["ended"]), 0.88, within=0.08, name="answers that end, end left out")
    _ = about(each[1].mean() / each[0].mean(), 1.36, within=0.2, name="tokens, left out beside trained")

# %% [markdown] id="field-look"
# The reward shows nothing. The cost is in the other two pictures: a third more tokens, and four times as many
# answers that run into the limit. Every token of a right answer is praised, `#### ` and digits and blanks, except for the
# one that stops. The probabilities of a place sum to one: what is never praised is what gives way.
#
# Each sampled token is time, so this is money, and nanochat's limit is 256 tokens and not 16. The
# library's sequences keep the end token (`include_end=True`), and its log has `ended`.
#
# And there is a second lesson in the last line of numbers. With five of these twelve seeds you might have measured
# anything from 6 % to 75 % more. Compare the *same* seeds with and without, and enough of them, before you believe a
# difference between two RL runs.

# %% [markdown] tags=["slide"] id="takeaway"
# > **Takeaway.** RL makes likelier what was sampled and was better than the rest of its group. It needs groups that differ:
# > all-wrong and all-right teach nothing. It sharpens what a model can already say; pass@1 rises, pass@k at large k need not.
# > Know what a token weighs, and watch the lengths. Sample at temperature 1, from the weights that you train, and log $|d|$, dead groups, length,
# > ended and a measure that is not the reward, over several seeds. A rising reward proves that the reward rises.

# %% [markdown] id="simplified"
# ## What was simplified
#
# - The real stage: `rl` in `nanochat_lib/rl.py`; sampling with tools, rewards and masks: `rollout` in
#   `nanochat_lib/rollouts.py`. Own rewards, files and sums: `nanochat_lib/rewards.py`. Held-out pass@k: `held_out_reward`.
# - nanochat: 16 questions a step, 16 answers each, at most 256 tokens, temperature 1.0, top-k 50, one pass over 7,473
#   problems: 467 steps. Rates are 0.05 of pretraining's and fall to 0 in a line; Muon and AdamW instead of the plain steps
#   here: `rl_rates`, and `rl_schedule` in `nanochat_lib/schedules.py`.
# - No reference model, no KL term, no clipped ratios, in nanochat and here: one step a batch, so the ratio is 1.
# - nanochat averages within each pass and leaves the end token out; its seeds are hashes of (step, question, pass).
#   Here a question's answers depend on its seed alone, on any number of machines.
# - Sampler and trainer are compared on a real model by `make_compare_step`; its tests break weights, positions and temperature.
# - The toy's policy is a table, its optimiser plain gradient ascent, and 40 a rate for it, not for a language model.
# - 4.55 and 7.58 % are from nanochat's published report of its d20 run. REINFORCE: Williams, Machine Learning 8 (1992).

# %% id="end"
progress()
