"""Checks, hints, quizzes and predictions of chapter 09, RL."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from nanochat_lib import rl, rollouts
from nanochat_lib.course.cases import (
    Exercise,
    Option,
    Prediction,
    Quiz,
    example,
    prop,
    raises,
    reference,
    sign,
    suspect,
)
from nanochat_lib.errors import UserError
from nanochat_lib.tasks import common

# ---- a policy of one token


def softmax(logits: np.ndarray) -> np.ndarray:
    weights = np.exp(logits - np.max(logits, axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def bandit(rng: np.random.Generator, size: int = 5) -> tuple:
    """(logits, rewards) of `size` tokens."""
    return 2 * rng.standard_normal(size), rng.uniform(-1, 2, size)


def exact_gradient(logits: np.ndarray, rewards: np.ndarray) -> np.ndarray:
    """The same through the Jacobian of the softmax, diag(p) − p pᵀ."""
    p = softmax(logits)
    return (np.diag(p) - np.outer(p, p)) @ rewards


def finite_differences(out: np.ndarray, logits: np.ndarray, rewards: np.ndarray) -> str:
    step, worst = 1e-5, 0.0
    for i in range(len(logits)):
        nudge = step * (np.arange(len(logits)) == i)
        slope = (softmax(logits + nudge) - softmax(logits - nudge)) @ rewards / (2 * step)
        worst = max(worst, abs(float(out[i]) - slope))
    return "" if worst < 1e-6 else f"an entry is {worst:.3g} away from the slope of the expected reward"


def exact_output() -> str:
    logits, rewards = np.zeros(3), np.float64([0.0, 0.0, 1.0])
    rows = [f"three tokens alike, rewards 0 0 1: {np.round(exact_gradient(logits, rewards), 3).tolist()}"]
    rows.append(f"all rewards 1:                     {np.round(exact_gradient(logits, np.ones(3)), 3).tolist()}")
    return "\n".join(rows)


def drawn(rng: np.random.Generator, size: int = 4, count: int = 7) -> tuple:
    """(logits, actions, advantages) of `count` samples."""
    return 2 * rng.standard_normal(size), rng.integers(0, size, count), rng.standard_normal(count)


def score_gradient(logits: np.ndarray, actions: np.ndarray, advantages: np.ndarray) -> np.ndarray:
    """The same, counted: how much advantage fell on each token, minus what its probability would have had."""
    got = np.bincount(actions, weights=advantages, minlength=len(logits))
    return (got - advantages.sum() * softmax(logits)) / len(actions)


def only_chosen(logits: np.ndarray, actions: np.ndarray, advantages: np.ndarray) -> np.ndarray:
    return np.bincount(actions, weights=advantages, minlength=len(logits)) / len(actions)


def score_output() -> str:
    logits = np.zeros(3)
    return "\n".join(
        f"three tokens alike, drew {action} with advantage {gain:+.0f}: "
        f"{np.round(score_gradient(logits, np.array([action]), np.array([gain])), 3).tolist()}"
        for action, gain in ((0, 1.0), (0, -1.0), (2, 1.0))
    )


# ---- groups


def rewards_of(rng: np.random.Generator, questions: int = 3, samples: int = 5) -> tuple:
    return (rng.integers(0, 2, (questions, samples)).astype(np.float32) + rng.random((questions, 1), np.float32),)


def standardised(rewards: np.ndarray) -> np.ndarray:
    centred = rollouts.advantages(rewards)
    return centred / np.maximum(centred.std(axis=1, keepdims=True), 1e-6)


def groups_add_to_zero(out: np.ndarray, rewards: np.ndarray) -> str:
    away = float(np.abs(np.sum(out, axis=1)).max())
    return "" if away < 1e-5 else f"the advantages of a question add up to {away:.3g}, not to 0"


def advantages_output() -> str:
    rewards = np.float32([[1, 0, 0, 0], [1, 1, 1, 0], [0, 0, 0, 0]])
    pairs = zip(rewards.tolist(), rollouts.advantages(rewards).tolist(), strict=True)
    return "\n".join(f"rewards {row}   advantages {found}" for row, found in pairs)


def alike(rng: np.random.Generator) -> tuple:
    """Rewards (9, 3) of 0, 0.5 and 1: rows that are all alike, of any height, and rows that are not."""
    rewards = rng.integers(0, 3, (9, 3)) / 2
    rewards[:4] = rewards[:4, :1]
    rewards[8] = (0, 0.5, 1)
    return (rewards.astype(np.float32),)


def collapsed_output() -> str:
    rows = ([0, 0, 0], [0, 1, 0], [1, 1, 1])
    table = "\n".join(f"rewards {row}   all alike: {len(set(row)) == 1}" for row in rows)
    return f"{table}\nshare {rollouts.collapsed(np.float32(rows)):.3f}"


# ---- the batch


def answers(rng: np.random.Generator, questions: int = 2, samples: int = 3, micro_rows: int = 4) -> tuple:
    """(sequences, masks, weights, length, pad_id, micro_rows); tool output stands inside some answers."""
    sequences, masks = [], []
    for _ in range(questions * samples):
        prompt, answer = int(rng.integers(1, 4)), int(rng.integers(1, 6))
        mask = [0] * prompt + rng.integers(0, 2, answer).tolist()
        mask[-1] = 1
        masks.append(mask)
        sequences.append(rng.integers(10, 99, len(mask)).tolist())
    return sequences, masks, rng.standard_normal((questions, samples)), 9, 7, micro_rows


def retargeted(arguments: tuple, targets: object) -> dict:
    sequences, masks, _, length, pad_id, _ = arguments
    right = rollouts.to_batch(*arguments)
    rows = right["inputs"].size // length
    ids, sampled = np.full((rows, length + 1), pad_id, np.int32), np.zeros((rows, length + 1), bool)
    for row, (sequence, mask) in enumerate(zip(sequences, masks, strict=True)):
        ids[row, : len(sequence)], sampled[row, : len(mask)] = sequence, mask
    return right | {"targets": targets(ids, sampled).astype(np.int32).reshape(right["inputs"].shape)}


def late_mask(*arguments: object) -> dict:
    return retargeted(arguments, lambda ids, sampled: np.where(sampled[:, :-1], ids[:, 1:], -1))


def no_mask(*arguments: object) -> dict:
    return retargeted(arguments, lambda ids, sampled: ids[:, 1:])


def own_targets(*arguments: object) -> dict:
    return retargeted(arguments, lambda ids, sampled: np.where(sampled[:, :-1], ids[:, :-1], -1))


def answers_first(sequences: list, masks: list, weights: np.ndarray, *rest: object) -> dict:
    return rollouts.to_batch(sequences, masks, np.asarray(weights).T, *rest)


SMALL = ([[5, 6, 1, 2], [5, 6, 3]], [[0, 0, 1, 1], [0, 0, 1]], np.float32([[0.5, -0.5]]), 4, 0, 2)


def batch_output() -> str:
    out = rollouts.to_batch(*SMALL)
    rows = ["sequences [5 6 1 2] and [5 6 3]: prompt 5 6, the rest sampled; advantages 0.5 and -0.5"]
    return "\n".join([*rows, *(f"{name:>8}: {out[name][0].tolist()}" for name in ("inputs", "targets", "weights"))])


# ---- sampler and trainer


def measured(rng: np.random.Generator, far: float = 0.3) -> tuple:
    sampled = -rng.exponential(1.0, (3, 5)).astype(np.float32)
    trained = rng.random((3, 5)) < 0.6
    trained[0, 0], trained[0, 1] = True, False
    return (sampled + far * rng.standard_normal((3, 5)).astype(np.float32)).astype(np.float32), sampled, trained


def impossible(rng: np.random.Generator) -> tuple:
    logprobs, sampled, trained = measured(rng)
    sampled[0, 0] = logprobs[0, 0] - 300
    return logprobs, sampled, trained


def upside_down(logprobs: np.ndarray, sampled: np.ndarray, trained: np.ndarray) -> tuple:
    return tuple(map(np.asarray, rl.apart(sampled, logprobs, trained)))


def everywhere(logprobs: np.ndarray, sampled: np.ndarray, trained: np.ndarray) -> tuple:
    away, most, ratio, _ = rl.apart(logprobs, sampled, np.ones_like(trained))
    inside = rl.apart(logprobs, sampled, trained)
    return tuple(map(np.asarray, (away, most, inside[2], inside[3])))


def ones_outside(logprobs: np.ndarray, sampled: np.ndarray, trained: np.ndarray) -> tuple:
    away, most, ratio, count = rl.apart(logprobs, sampled, trained)
    return tuple(map(np.asarray, (away, most, ratio + (~trained).sum(), count)))


def apart_output() -> str:
    logprobs, trained = np.float32([[-1.0, -2.0, -3.0]]), np.array([[False, True, True]])
    lines = []
    for name, sampled in (("the same", logprobs), ("one nat apart", logprobs - np.float32([[9, 0, 1]]))):
        away, most, ratio, count = map(float, rl.apart(logprobs, sampled, trained))
        lines.append(f"{name:>14}: Σ|d| {away:.3f}   max|d| {most:.3f}   Σ exp d {ratio:.3f}   tokens {count:.0f}")
    return "\n".join(lines)


# ---- the reward


def question(answer: str) -> dict:
    return {"messages": [{"role": "user", "content": "2 + 3"}, {"role": "assistant", "content": answer}]}


def anywhere(conversation: dict, completion: str) -> float:
    return float(str(common.extract_answer(common.last_text(conversation))) in completion)


def formatted(conversation: dict, completion: str) -> float:
    return float(common.extract_answer(completion) is not None)


def same_text(conversation: dict, completion: str) -> float:
    return float(common.last_text(conversation) == completion)


def sums(rng: np.random.Generator) -> tuple:
    right = int(rng.integers(100, 999))
    return question(f"It is {right}.\n#### {right}"), f"Well,\n#### {right + int(rng.integers(0, 2))}"


def reward_output() -> str:
    rows = (("5", "#### 5"), ("5", "5"), ("5", "#### 5.0"), ("5", "#### 6, no: 5"), ("1,250", "#### 1250"))
    return "\n".join(
        f"reference '#### {want}'  completion {got!r:<17} {common.same_number(question(f'#### {want}'), got):.0f}"
        for want, got in rows
    )


# ---- a reward of one's own


def rewarded(fn: Callable, conversation: dict, completions: list[str]) -> list[float]:
    """What `fn` gives to each of several answers to one question."""
    return [float(fn(conversation, completion)) for completion in completions]


def right_and_brief(conversation: dict, completion: str) -> float:
    """One of many: between 1 and 0.5, half of the way lost at 20 characters. Also the exercise's fallback."""
    wanted = common.extract_answer(common.last_text(conversation))
    return (0.5 + 0.5 / (1 + len(completion) / 20)) if common.extract_answer(completion) == wanted else 0.0


def some_answers(rng: np.random.Generator) -> tuple[dict, list[str]]:
    """Three right answers, ever longer, up to 600 characters, then three wrong ones, of which one names the number."""
    right, other = int(rng.integers(10, 50)), int(rng.integers(50, 99))
    words = [" ".join(["so"] * int(n)) for n in np.cumsum(rng.integers(3, 60, 2))]
    good = [f"#### {right}", *(f"{text}\n#### {right}" for text in words)]
    return question(f"#### {right}"), [*good, f"{right} or {other}", f"{right}\n#### {other}", ""]


def fair(out: list[float], conversation: dict, completions: list[str]) -> str:
    if any(value != 0 for value in out[3:]):
        return f"the wrong answers {completions[3:]} got {out[3:]}: a wrong answer earns 0, however it is written"
    if not all(0.5 <= value <= 1 for value in out[:3]):
        return f"right answers of {[len(text) for text in completions[:3]]} characters got {out[:3]}: 0.5 to 1 each"
    if not out[0] > out[1] > out[2]:
        return f"right answers, ever longer, got {out[:3]}: of two right ones the shorter must earn more"
    return ""


def brief_output() -> str:
    conversation = question("#### 5")
    rows = ("#### 5", "2 and 3 is 5, so\n#### 5", "#### 5" + " #### 5" * 20, "#### 6", "5")
    return "\n".join(f"{right_and_brief(conversation, text):.2f}  {text[:40]!r}" for text in rows)


EXERCISES = [
    Exercise(
        "rl.exact_gradient",
        cases=[
            example(
                "three tokens alike", (np.zeros(3), np.float64([0, 0, 1])), np.float64([-1, -1, 2]) / 9, dtype=False
            ),
            example("equal rewards teach nothing", (np.float64([1, 2, 3]), np.ones(3)), np.zeros(3), atol=1e-12),
            prop("the slope of the expected reward", bandit, finite_differences),
            reference("random", bandit, against=exact_gradient, rtol=1e-7),
        ],
        causes=[
            suspect(
                "subtract the expected reward first: equal rewards must give 0",
                lambda logits, rewards: softmax(logits) * rewards,
            ),
            suspect(
                "multiply by the probability: a token that is never drawn hardly changes the expectation",
                lambda logits, rewards: rewards - softmax(logits) @ rewards,
            ),
            suspect("that goes downhill; this is a reward", lambda logits, rewards: -exact_gradient(logits, rewards)),
            suspect(
                "the expectation weighs rewards by the policy, the plain mean does not",
                lambda logits, rewards: softmax(logits) * (rewards - rewards.mean()),
            ),
        ],
        hints=[
            "dp_a/dlogit_i is p_a (1 − p_a) for a = i and −p_a p_i otherwise. Sum reward_a over it.",
            "The sum collapses to two factors: p_i, and how much reward_i is above the expected reward.",
            exact_output,
        ],
        fallback=exact_gradient,
    ),
    Exercise(
        "rl.score_gradient",
        cases=[
            example(
                "one sample",
                (np.zeros(4), np.array([1]), np.float64([2.0])),
                np.float64([-0.5, 1.5, -0.5, -0.5]),
            ),
            reference("seven samples", drawn, against=score_gradient, rtol=1e-7),
            prop(
                "adds up to 0",
                drawn,
                lambda out, *args: (
                    "" if abs(np.sum(out)) < 1e-9 else "a softmax's gradient adds up to 0 over the logits"
                ),
            ),
        ],
        causes=[
            suspect("subtract the probabilities: ∇ log p(a) is (1 at a) − p", only_chosen),
            suspect("the mean over the samples, not their sum", lambda *args: len(args[1]) * score_gradient(*args)),
            suspect("that is the loss's gradient; ascend", lambda *args: -score_gradient(*args)),
        ],
        hints=[
            "For one sample a: the gradient of log p(a) with respect to the logits, times its advantage.",
            "One row a sample: a 1 at the drawn token (`np.eye` has such rows), less the probabilities."
            " Weigh each row by its own advantage, then average over the samples.",
            score_output,
        ],
        fallback=score_gradient,
    ),
    Exercise(
        "rl.advantages",
        cases=[
            example("one of four", lambda: (np.float32([[1, 0, 0, 0]]),), np.float32([[0.75, -0.25, -0.25, -0.25]])),
            example("nothing to compare", lambda: (np.float32([[1, 1], [0, 0]]),), np.zeros((2, 2), np.float32)),
            reference("three questions", rewards_of, atol=1e-6),
            prop("adds up to 0", rewards_of, groups_add_to_zero),
        ],
        causes=[
            suspect(
                "the mean of a question's own answers (axis 1): here other questions' answers are in it",
                lambda rewards: rewards - rewards.mean(axis=0, keepdims=True),
            ),
            suspect(
                "every question has a mean of its own; the mean of all rewards praises easy questions",
                lambda rewards: rewards - rewards.mean(),
            ),
            suspect("do not divide by the deviation: the next cell shows what that weighs", standardised),
            suspect("better than the mean is positive", lambda rewards: -rollouts.advantages(rewards)),
        ],
        hints=[
            "Which answers may be compared with each other? Only those to the same question: a row.",
            "Subtract rewards.mean over axis 1 and keep that axis, so that (Q, 1) fits (Q, S).",
            advantages_output,
        ],
    ),
    Exercise(
        "rl.collapsed",
        cases=[
            example("two of four", lambda: (np.float32([[0, 0], [0, 1], [1, 1], [1, 0]]),), 0.5),
            example("any reward, not only 0 and 1", lambda: (np.float32([[0.25] * 3, [0.25, 0.25, 0.5]]),), 0.5),
            reference("nine questions", alike),
        ],
        causes=[
            suspect(
                "groups that are all right are dead as well: nothing differs",
                lambda rewards: float(np.mean(rewards.max(axis=1) == 0)),
            ),
            suspect(
                "rewards may be other numbers than 0 and 1: compare with each other",
                lambda rewards: float(np.mean(rewards.min(axis=1) == 1) + np.mean(rewards.max(axis=1) == 0)),
            ),
            suspect("the share of the questions, not how many", lambda r: len(r) * rollouts.collapsed(r)),
            suspect("that is the share of the groups that live", lambda rewards: 1 - rollouts.collapsed(rewards)),
            suspect(
                "a question's answers stand in a row: axis 1",
                lambda rewards: float(np.mean(rewards.max(axis=0) == rewards.min(axis=0))),
            ),
        ],
        hints=[
            "When are all numbers of a row alike? Compare its largest with another one.",
            "Two numbers a question, both along axis 1, are alike or not. The mean of truth values is a share.",
            collapsed_output,
        ],
    ),
    Exercise(
        "rl.to_batch",
        cases=[
            example(
                "two answers to one question",
                lambda: SMALL,
                {
                    "inputs": np.int32([[[5, 6, 1, 2], [5, 6, 3, 0]]]),
                    "targets": np.int32([[[-1, 1, 2, -1], [-1, 3, -1, -1]]]),
                    "weights": np.float32([[[0.5] * 4, [-0.5] * 4]]),
                },
            ),
            reference("micro-batches that fit", lambda rng: answers(rng, 2, 3, 3)),
            reference("six rows in micro-batches of four", answers),
        ],
        causes=[
            suspect("the mask belongs to the target: shift it together with the ids", late_mask),
            suspect("the prompt, tool output and padding are no targets: -1 where the mask is 0", no_mask),
            suspect("the target of a position is the NEXT token", own_targets),
            suspect("a question's answers stand next to each other: row i has weights.reshape(-1)[i]", answers_first),
            sign(
                "rows are filled up to whole micro-batches: round up",
                lambda got, want, *rest: np.size(got["inputs"]) < np.size(want["inputs"]),
            ),
        ],
        hints=[
            "Make one wide table of ids (rows, length + 1) first, filled with pad_id, and one of what was sampled.",
            "Inputs leave out the table's last column, targets its first, and what was sampled is cut like the targets."
            " `np.where` puts the -1. The last step is a reshape to micro-batches.",
            batch_output,
        ],
    ),
    Exercise(
        "rl.same_number",
        cases=[
            example("right", (question("#### 5"), "2 + 3 = 5\n#### 5"), 1.0),
            example("wrong", (question("#### 5"), "#### 6"), 0.0),
            example(
                "the number stands there, but is not the answer", (question("#### 5"), "5 and 5 more\n#### 10"), 0.0
            ),
            example("another spelling of it", (question("#### 1,250"), "#### 1250.0"), 1.0),
            example("a reference without a number", (question("five"), "five"), raises(UserError, "five")),
            reference("sums", sums),
        ],
        causes=[
            suspect("a number anywhere in the text is no answer: this reward can be gamed", anywhere),
            suspect("an answer in the right form is not yet right", formatted),
            suspect("compare numbers, not texts: they may be spelled differently", same_text),
        ],
        hints=[
            "Two texts, one comparison: what does extract_answer give for each of them?",
            "The conversation's own number comes from its `last_text`. A question without one is an error of the data,"
            " not of the answer; everything else is a comparison.",
            reward_output,
        ],
    ),
    Exercise(
        "rl.apart",
        cases=[
            example(
                "nothing apart",
                lambda: (np.float32([[-1, -2]]), np.float32([[-1, -2]]), np.array([[True, True]])),
                (np.float32(0), np.float32(0), np.float32(2), np.int32(2)),
            ),
            reference("some tokens", measured),
            reference("a token that the sampler never expects", impossible),
        ],
        causes=[
            sign(
                "exp of 300 nats is inf: clip d to ±MOST_NATS before exp",
                lambda got, want, *rest: not np.isfinite(np.asarray(got[2])),
            ),
            suspect("the ratio is upside down: trainer minus sampler", upside_down),
            suspect("the prompt has no sampled log-probability: count only trained positions", everywhere),
            suspect("exp 0 is 1: put 0 where nothing is trained after exp, too", ones_outside),
        ],
        hints=[
            "Four sums over the same positions. What must stand at the others, before and after exp?",
            "`jnp.where(condition, a, b)` takes a or b at each place; `jnp.clip(x, low, high)` bounds. Clip"
            " what goes into exp, not what you sum or compare.",
            apart_output,
        ],
    ),
    Exercise(
        "rl.right_and_brief",
        cases=[
            example(
                "wrong answers earn nothing",
                (question("#### 5"), ["#### 6", "5", "", "0 1 2 3 4 5 6 7 8 9"]),
                [0.0] * 4,
                call=rewarded,
            ),
            prop("right first, brief second", some_answers, fair, call=rewarded),
        ],
        hints=[
            "Two factors: one for right or wrong, which same_number has shown you, and one that falls with the length.",
            "The second factor must stay between 0.5 and 1 for any length: 1 / (1 + length / scale) falls and never"
            " reaches 0; half of it on top of a half does.",
            brief_output,
        ],
        fallback=right_and_brief,
    ),
]

QUIZZES = [
    Quiz(
        "rl.q_baseline",
        "You subtract the same number b from the reward of every sample, whatever was drawn. What changes?",
        [
            Option(
                "the expected gradient",
                why="∇ log p(a) has mean 0 under p, so b times it has mean 0 as well. Only the noise changes.",
            ),
            Option(
                "only how much the gradient varies from batch to batch",
                right=True,
                why="The mean stays, and a b near the expected reward takes away most of the noise.",
            ),
            Option("nothing at all", why="A single batch's gradient does change: look at its spread in the figure."),
        ],
    ),
    Quiz(
        "rl.q_norm",
        "Each answer's tokens are averaged first, then the answers. A wrong answer of 100 tokens and a wrong one of 10"
        " have the same advantage. Which one is pushed down harder, per token?",
        [
            Option(
                "the long one",
                why="Its advantage is divided by 100: each of its tokens gets a tenth of what the short one's get.",
            ),
            Option(
                "the short one",
                right=True,
                why="Each of its tokens carries a tenth of the push, the long one's a hundredth. So long wrong answers"
                " survive, and answers grow.",
            ),
            Option("both alike", why="That is so when all tokens of the step are divided by the same number."),
        ],
    ),
    Quiz(
        "rl.q_temperature",
        "Sampled at temperature 0.3, the very first step logs a reward of 0.4; at temperature 1 it logs 0.15. Why?",
        [
            Option(
                "A low temperature learns faster",
                why="At the first step nothing has been learned by anyone.",
            ),
            Option(
                "The same policy is marked, but colder answers are likelier ones, and these are right more often",
                right=True,
                why="It is another way of asking, not another model. Rewards compare at one temperature only.",
            ),
            Option(
                "The reward is divided by the temperature",
                why="Only the sampler's logits are. A reward is 1 or 0.",
            ),
        ],
    ),
    Quiz(
        "rl.q_apart",
        "In the first step of a run the mean ratio is 1.00, but the mean |d| is 0.4 nats. What do you suspect?",
        [
            Option(
                "rounding in bfloat16",
                why="Rounding moves log-probabilities by far less than 0.4 nats on average.",
            ),
            Option(
                "sampler and trainer see different weights or positions",
                right=True,
                why="The ratio's mean is 1 for ANY two policies, because it is an expectation under the sampler."
                " The absolute difference is what tells.",
            ),
            Option(
                "nothing: the ratio is what counts",
                why="The mean ratio is Σ q · p/q = Σ p = 1 however far p and q are apart. It cannot warn you.",
            ),
        ],
    ),
]

PREDICTIONS = [
    Prediction(
        "rl.p_group",
        "A group of 4 samples with its own mean as baseline: how large is the expected gradient, as a share of the"
        " exact one?",
        unit="%",
    ),
    Prediction(
        "rl.p_dead",
        "A model gets 4.55 % of the questions right, each with that same chance. In what share of groups of 16 samples"
        " is no answer right?",
        unit="%",
    ),
    Prediction(
        "rl.p_hack",
        "Rewarded whenever the right digit stands anywhere in the answer, the policy reaches a reward near 1. What"
        " share of its answers is right?",
        unit="%",
    ),
]
