"""Reinforcement learning: advantages, batches, and a step that makes rewarded answers likelier."""

import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat_lib import gpt
from nanochat_lib.conversation import render_conversation
from nanochat_lib.decoding import tool_output
from nanochat_lib.engine import Engine
from nanochat_lib.evaluate.scores import pass_at_k
from nanochat_lib.losses import token_nll
from nanochat_lib.presets import RLConfig
from nanochat_lib.rl import MOST_NATS, apart, compared, held_out_reward, make_compare_step
from nanochat_lib.rollouts import advantages, collapsed, question_order, rollout, to_batch
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.tasks.common import Task
from nanochat_lib.tasks.gsm8k import parts_of
from nanochat_lib.tokenizer import Tokenizer
from nanochat_lib.train_step import loss_and_gradients

MODEL = GPTConfig(16, 40, 1, 1, 1, 32, "L")
gradients = jax.jit(lambda params, batch: loss_and_gradients(MODEL, params, batch))  # compiled once a shape
forward = jax.jit(lambda params, idx: gpt.apply(MODEL, params, idx))


def test_advantages_compare_within_a_question():
    rewards = np.array([[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]], np.float32)
    np.testing.assert_allclose(advantages(rewards), [[0.5, -0.5, -0.5, 0.5], [0] * 4, [0] * 4])
    # Rewards of other questions, or how many there are, change nothing.
    np.testing.assert_allclose(advantages(rewards[:1]), advantages(rewards)[:1])


def test_collapsed_groups_are_those_that_teach_nothing():
    rewards = np.array([[0.5, 0.5, 0.5], [0, 0, 0], [1, 1, 0], [0.2, 0.3, 0.2]], np.float32)
    assert collapsed(rewards) == 0.5
    assert collapsed(rewards[2:]) == 0 and collapsed(rewards[:2]) == 1
    silent = [not gains.any() for gains in advantages(rewards)]
    assert collapsed(rewards) == np.mean(silent)


def test_batch_trains_sampled_tokens_only():
    sequences = [[9, 1, 2, 3], [9, 1, 4, 5, 6, 7]]
    masks = [[0, 0, 1, 1], [0, 0, 1, 0, 0, 1]]  # 5 and 6 were forced by a tool
    batch = to_batch(sequences, masks, np.array([[0.5, -0.5]], np.float32), 8, 0, 4)
    assert batch["inputs"].shape == (1, 4, 8)
    np.testing.assert_array_equal(batch["inputs"][0, 1], [9, 1, 4, 5, 6, 7, 0, 0])
    np.testing.assert_array_equal(batch["targets"][0, 0], [-1, 2, 3, -1, -1, -1, -1, -1])
    np.testing.assert_array_equal(batch["targets"][0, 1], [-1, 4, -1, -1, 7, -1, -1, -1])
    assert (batch["targets"][0, 2:] == -1).all()  # rows that only fill up the micro-batch
    assert set(batch["weights"][0, 0]) == {0.5} and set(batch["weights"][0, 1]) == {-0.5}
    assert {name: x.dtype.name for name, x in batch.items()} == {
        "inputs": "int32", "targets": "int32", "weights": "float32"
    }  # fmt: skip


def random_batch(rng, micro_rows, length=15):
    sequences = [rng.integers(0, 40, rng.integers(4, length)).tolist() for _ in range(8)]
    masks = [[0, 0] + rng.integers(0, 2, len(s) - 2).tolist() for s in sequences]
    weights = advantages(rng.random((2, 4)).astype(np.float32))
    return sequences, masks, weights, to_batch(sequences, masks, weights, length, 0, micro_rows)


@pytest.fixture(scope="module")
def params():
    rng = np.random.default_rng(0)
    fresh = gpt.init_params(MODEL, jax.random.key(1))
    return {n: x + rng.normal(0, 0.1, x.shape).astype(np.float32) for n, x in fresh.items()}


def test_loss_is_the_policy_gradient_over_all_tokens(params):
    rng = np.random.default_rng(2)
    sequences, masks, weights, batch = random_batch(rng, 8)
    loss, _, count = gradients(params, batch)
    total = tokens = 0
    for ids, mask, weight in zip(sequences, masks, weights.ravel(), strict=True):
        padded = np.pad([ids], ((0, 0), (0, 16 - len(ids))))  # causal: what follows changes nothing; one shape
        nll = np.asarray(token_nll(forward(params, padded[:, :-1]), padded[:, 1:]))[0, : len(ids) - 1]
        total += weight * (nll * mask[1:]).sum()
        tokens += sum(mask[1:])
    assert int(count) == tokens
    assert float(loss) == pytest.approx(total / tokens, abs=1e-6)


def test_micro_batches_of_any_size_give_one_gradient(params):
    """Micro-batches with different numbers of targets must not count equally (inputs that broke others)."""
    grads = []
    for micro_rows in (8, 2, 3):
        *_, batch = random_batch(np.random.default_rng(3), micro_rows)
        grads.append(gradients(params, batch)[1])
    for other in grads[1:]:
        for name in grads[0]:
            np.testing.assert_allclose(grads[0][name], other[name], atol=1e-6)


def test_equal_rewards_give_no_gradient(params):
    sequences, masks, _, _ = random_batch(np.random.default_rng(4), 8)
    batch = to_batch(sequences, masks, advantages(np.ones((2, 4), np.float32)), 15, 0, 8)
    loss, grads, _ = gradients(params, batch)
    assert float(loss) == 0 and all(not np.any(g) for g in grads.values())


def test_a_small_step_makes_the_better_answer_likelier(params):
    good, bad = [5, 6, 7, 8, 9], [5, 6, 1, 2, 3]
    masks = [[0, 0, 1, 1, 1]] * 2
    batch = to_batch([good, bad], masks, np.array([[0.5, -0.5]], np.float32), 15, 0, 2)
    _, grads, _ = gradients(params, batch)
    moved = {n: x - 0.01 * grads[n] for n, x in params.items()}

    def logp(weights, ids):
        padded = np.pad([ids], ((0, 0), (0, 16 - len(ids))))
        nll = token_nll(forward(weights, padded[:, :-1]), padded[:, 1:])
        return -float(nll[0, 1 : len(ids) - 1].sum())

    assert logp(moved, good) > logp(params, good) and logp(moved, bad) < logp(params, bad)


def test_pass_at_k_counts_any_of_the_first_k():
    assert pass_at_k(np.array([[0, 1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 1]])) == [0.25, 0.5, 0.75]


def test_every_question_once_an_epoch_and_the_same_again():
    steps = [question_order(10, 7, step, 4) for step in range(5)]
    flat = sum(steps, [])
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:] and steps == [question_order(10, 7, step, 4) for step in range(5)]


# ---- padding, collapsed groups


@pytest.mark.parametrize("pads", [0, 10])
def test_padding_changes_no_advantage_and_no_loss(params, pads):
    """RL-03, RL-07: every sampled token has its row's advantage, whatever the row is padded to."""
    sequences, masks = [[9, 1, 2, 3], [9, 1, 4, 5, 6]], [[0, 0, 1, 1], [0, 0, 1, 0, 1]]
    gains = advantages(np.array([[2.5, 0.5]], np.float32))
    batch = to_batch(sequences, masks, gains, 5 + pads, 0, 2)
    trained = batch["targets"][0] >= 0
    assert [batch["weights"][0, row][trained[row]].tolist() for row in (0, 1)] == [[1, 1], [-1, -1]]
    loss, _, count = gradients(params, batch)
    other = gradients(params, to_batch(sequences, masks, gains, 15 - pads, 0, 2))
    assert int(count) == 4 and float(loss) == pytest.approx(float(other[0]), abs=1e-6)


def test_a_row_without_sampled_tokens_counts_nowhere(params):
    """RL-04, RL-05: an empty answer has no last valid token, a batch of them no division by zero."""
    good, mask = [9, 1, 2, 3], [0, 0, 1, 1]
    alone = to_batch([good, good], [mask, mask], np.array([[0.5, -0.5]], np.float32), 15, 0, 2)
    empty = to_batch([good, [9, 1]], [mask, [0, 0]], np.array([[0.5, -0.5]], np.float32), 15, 0, 2)
    assert (empty["targets"][0, 1] == -1).all() and int(gradients(params, alone)[2]) == 4
    assert int(gradients(params, empty)[2]) == 2
    none = to_batch([[9, 1]] * 2, [[0, 0]] * 2, np.array([[0.5, -0.5]], np.float32), 15, 0, 2)
    loss, grads, count = gradients(params, none)
    assert (float(loss), int(count)) == (0, 0) and all(not np.any(g) for g in grads.values())


def test_one_and_nine_tokens_in_two_micro_batches(params):
    """RL-09: each micro-batch is divided by the tokens of the whole step, not by its own."""
    sequences, masks = [[5, 6, 7], [5, *range(10, 20)]], [[0, 0, 1], [0, 0, *[1] * 9]]
    gains = np.array([[0.5, -0.5]], np.float32)
    one, two = (gradients(params, to_batch(sequences, masks, gains, 15, 0, rows)) for rows in (2, 1))
    assert int(one[2]) == int(two[2]) == 10
    for name in one[1]:
        np.testing.assert_allclose(one[1][name], two[1][name], atol=1e-6)


# ---- rollouts by a real engine, whose log-probabilities the trainer must find again

BYTES = Tokenizer([])
SAMPLER = GPTConfig(64, BYTES.vocab_size, 1, 1, 1, 32, "L")


class Echo(Task):
    """Ask for a letter; an answer with an even number of characters is right."""

    name = "echo"

    def num_examples(self):
        return 4

    def get_example(self, index):
        return {
            "messages": [
                {"role": "user", "content": "ab"[: 1 + index % 2] * (index + 1)},
                {"role": "assistant", "content": "aa"},
            ]
        }

    def evaluate(self, conversation, completion):
        return float(len(completion) % 2 == 0)


def settings(**changes) -> RLConfig:
    return replace(RLConfig(max_new_tokens=6, rollout_rows=8, top_k=0), **changes)


@pytest.fixture(scope="module")
def engine():
    rng = np.random.default_rng(0)
    fresh = gpt.init_params(SAMPLER, jax.random.key(1))
    filled = {n: x + rng.normal(0, 0.2, x.shape).astype(np.float32) for n, x in fresh.items()}
    return Engine(SAMPLER, filled, BYTES)


def sample(engine, questions, samples, stage=None, **options):
    seeds = [100 + q for q in questions]
    return rollout(engine, BYTES, Echo(), questions, samples, stage or settings(), seeds, **options)


@pytest.fixture(scope="module")
def sampled(engine):
    return sample(engine, [0, 1], 4)


@pytest.mark.parametrize(("samples", "rows"), [(4, 8), (10, 4), (3, 1)])
def test_any_number_of_samples_in_rounds_of_any_size(engine, samples, rows):
    """RL-02: 10 samples in rounds of 4 are 10, and 4 with room for 8 are 4."""
    out = sample(engine, [2], samples, settings(rollout_rows=rows, max_new_tokens=3))
    assert len(out.sequences) == len(out.masks) == samples and out.rewards.shape == (1, samples)
    assert len({tuple(s) for s in out.sequences}) > 1


def test_an_answer_and_its_reward_depend_on_their_question_alone(engine, sampled):
    """RL-08: alone, beside another question, or in smaller rounds."""
    for stage in (settings(), settings(rollout_rows=2)):
        alone = sample(engine, [1], 4, stage)
        assert alone.sequences == sampled.sequences[4:]
        np.testing.assert_array_equal(alone.rewards[0], sampled.rewards[1])


def test_first_tokens_differ(engine):
    """RL-06: the first token is drawn for each sample, not once for all of them."""
    flat = Engine(SAMPLER, {n: x * 0 if n == "lm_head.weight" else x for n, x in engine.params.items()}, BYTES)
    out = sample(flat, [0], 16, settings(max_new_tokens=2, rollout_rows=16))
    prompt = len(out.masks[0]) - out.masks[0][::-1].index(0) if 1 in out.masks[0] else 0
    assert len({s[prompt] for s in out.sequences}) > 4


def test_the_end_token_is_trained_but_not_judged(engine):
    """An answer of two characters and the end token is right (even); the end token has mask 1 and becomes a target."""
    end = BYTES.encode_special("<|assistant_end|>")
    out = sample(engine, [0, 1, 2, 3], 8, settings(max_new_tokens=24, rollout_rows=32))
    ended = [(s, m) for s, m in zip(out.sequences, out.masks, strict=True) if s[-1] == end]
    assert ended and out.ended.sum() >= len(ended)
    for row, (ids, _mask) in enumerate(zip(out.sequences, out.masks, strict=True)):
        place = divmod(row, 8)
        start = out.masks[row].index(1)
        text = BYTES.decode(ids[start:]).removesuffix("<|assistant_end|>").removesuffix("<|bos|>")
        assert out.rewards[place] == (len(text) % 2 == 0)
        assert out.lengths[place] == len(ids) - start
    sequence, mask = ended[0]
    batch = to_batch([sequence], [mask], np.ones((1, 1), np.float32), 63, 0, 1)
    assert batch["targets"][0, 0, len(sequence) - 2] == end


def test_rewards_may_be_other_than_right_or_wrong(engine, sampled):
    out = sample(engine, [0, 1], 4, reward=lambda conversation, completion: -0.5)
    assert (out.rewards == -0.5).all()
    np.testing.assert_array_equal(out.correct, sampled.correct)


def differences(engine, out, params=None, logprobs=None):
    arrays = to_batch(out.sequences, out.masks, out.rewards, 31, 0, 4)
    compare = make_compare_step(SAMPLER, jnp.float32)
    return compared(compare, params or engine.params, None, arrays, logprobs or out.logprobs)


def test_sampler_and_trainer_agree(engine, sampled):
    found = differences(engine, sampled)
    assert found["logprob_diff"] < 1e-5 and found["logprob_diff_max"] < 1e-4
    assert found["ratio"] == pytest.approx(1, abs=1e-5)
    naive, tokens = 0.0, 0  # the same by hand
    for ids, mask, logs in zip(sampled.sequences, sampled.masks, sampled.logprobs, strict=True):
        padded = np.pad([ids], ((0, 0), (0, 32 - len(ids))))
        nll = np.asarray(token_nll(gpt.apply(SAMPLER, engine.params, padded[:, :-1]), padded[:, 1:]))[0, : len(ids) - 1]
        naive += sum(abs(-n - one) for n, one, m in zip(nll, logs[1:], mask[1:], strict=True) if m)
        tokens += sum(mask)
    assert found["logprob_diff"] == pytest.approx(naive / tokens, abs=1e-6)


@pytest.mark.parametrize("impossible", [False, True])
def test_apart_counts_trained_tokens_as_in_float64(impossible):
    rng = np.random.default_rng(3)
    logprobs, sampled = (-rng.exponential(1.0, (3, 5)).astype(np.float32) for _ in range(2))
    trained = rng.random((3, 5)) < 0.5
    trained[0, :2] = True, False
    if impossible:  # the first of these tokens counts, the second does not
        sampled[0, :2] = logprobs[0, 0] - 300, -np.inf
    got = apart(logprobs, sampled, trained)
    d = (logprobs.astype(float) - sampled)[trained]
    want = np.abs(d).sum(), np.abs(d).max(), np.exp(np.minimum(d, MOST_NATS)).sum(), trained.sum()
    np.testing.assert_allclose([float(x) for x in got], want, rtol=1e-5)
    assert got[3].dtype == jnp.int32 and all(np.isfinite(x) for x in got)


@pytest.mark.parametrize("what", ["weights", "place", "temperature", "none"])
def test_a_mismatch_of_sampler_and_trainer_shows(engine, sampled, what):
    params, logprobs = None, None
    if what == "weights":  # the sampler still had older ones
        params = {n: x * 1.05 if x.ndim > 1 else x for n, x in engine.params.items()}
    if what == "place":  # shifted by one token
        logprobs = [[0.0, *row[:-1]] for row in sampled.logprobs]
    if what == "temperature":
        logprobs = [[0.7 * x for x in row] for row in sampled.logprobs]
    found = differences(engine, sampled, params, logprobs)
    assert (found["logprob_diff"] > 0.01) == (what != "none") and np.isfinite(list(found.values())).all()
    assert (abs(found["ratio"] - 1) > 1e-3) == (what != "none")


def test_a_broken_engine_says_so_without_overflow(engine, sampled):
    found = differences(engine, sampled, logprobs=[[-1e4] * len(row) for row in sampled.logprobs])
    assert found["logprob_diff_max"] > 9000 and np.isfinite(found["ratio"])


def test_held_out_figures(engine):
    figures = held_out_reward(engine, BYTES, Echo(), settings(eval_questions=3, eval_samples=2))
    assert len(figures["pass_at_k"]) == len(figures["pass_at_k_unbiased"]) == 2
    assert figures["pass_at_k"][1] == pytest.approx(figures["pass_at_k_unbiased"][1])
    assert 0 <= figures["reward_greedy"] <= 1 and 0 <= figures["ended_heldout"] <= 1


# ---- tool results: one form in training and in chats

EXPRESSIONS = st.sampled_from(
    ["2+3", "80000*1.5", "10/3", "1/8", "11/18*162", ".5*4", "1,000*2", "'banana'.count('a')", "7//2", "0*-1"]
)


@given(st.lists(st.tuples(st.sampled_from(["", "so ", "that is "]), EXPRESSIONS), min_size=1, max_size=3))
def test_the_engine_writes_what_training_data_hold(calls):
    """Both ways: after each call of a rendered answer the engine inserts the very ids that follow it, and an answer
    that the engine produced, read as parts and rendered again, is the same ids."""
    setup = Engine(SAMPLER, {}, BYTES).setup
    solution = "".join(f"{text}<<{call}=?>>1" for text, call in calls) + "\n#### 1"
    parts = parts_of(solution)
    messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": parts}]
    ids = render_conversation(BYTES, {"messages": messages}).ids
    answer = ids[ids.index(BYTES.encode_special("<|assistant_start|>")) + 1 :]
    produced, rest = [], list(answer)
    while rest:
        produced.append(rest.pop(0))
        if produced[-1] == setup.python[1]:
            call, inserted = tool_output(setup, BYTES, produced)
            assert inserted and rest[: len(inserted)] == inserted, call
            produced, rest = produced + inserted, rest[len(inserted) :]
    text = BYTES.decode(produced).removesuffix("<|assistant_end|>")
    pieces = re.split(r"<\|(python|output)_start\|>(.*?)<\|\1_end\|>", text)
    read = [{"type": "text", "text": pieces[0]}]
    for kind, inside, after in zip(pieces[1::3], pieces[2::3], pieces[3::3], strict=True):
        read += [{"type": "python_output" if kind == "output" else "python", "text": inside}]
        read += [{"type": "text", "text": after}]
    assert render_conversation(BYTES, {"messages": [messages[0], {"role": "assistant", "content": read}]}).ids == ids
