"""Reinforcement learning: advantages, batches, and a step that makes rewarded answers likelier."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from nanochat_lib import gpt
from nanochat_lib.losses import token_nll
from nanochat_lib.rl import advantages, pass_at_k, question_order, to_batch
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.train_step import loss_and_gradients

MODEL = GPTConfig(16, 40, 1, 1, 1, 32, "L")


def test_advantages_compare_within_a_question():
    rewards = np.array([[1, 0, 0, 1], [1, 1, 1, 1], [0, 0, 0, 0]], np.float32)
    np.testing.assert_allclose(advantages(rewards), [[0.5, -0.5, -0.5, 0.5], [0] * 4, [0] * 4])
    # Rewards of other questions, or how many there are, change nothing.
    np.testing.assert_allclose(advantages(rewards[:1]), advantages(rewards)[:1])


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
    loss, _, count = loss_and_gradients(MODEL, params, batch)
    total = tokens = 0
    for ids, mask, weight in zip(sequences, masks, weights.ravel(), strict=True):
        logits = gpt.apply(MODEL, params, np.array([ids[:-1]]))
        nll = np.asarray(token_nll(logits, np.array([ids[1:]])))[0]
        total += weight * (nll * mask[1:]).sum()
        tokens += sum(mask[1:])
    assert int(count) == tokens
    assert float(loss) == pytest.approx(total / tokens, abs=1e-6)


def test_micro_batches_of_any_size_give_one_gradient(params):
    """Micro-batches with different numbers of targets must not count equally (inputs that broke others)."""
    grads = []
    for micro_rows in (8, 2, 3):
        *_, batch = random_batch(np.random.default_rng(3), micro_rows)
        grads.append(loss_and_gradients(MODEL, params, batch)[1])
    for other in grads[1:]:
        for name in grads[0]:
            np.testing.assert_allclose(grads[0][name], other[name], atol=1e-6)


def test_equal_rewards_give_no_gradient(params):
    sequences, masks, _, _ = random_batch(np.random.default_rng(4), 8)
    batch = to_batch(sequences, masks, advantages(np.ones((2, 4), np.float32)), 15, 0, 8)
    loss, grads, _ = loss_and_gradients(MODEL, params, batch)
    assert float(loss) == 0 and all(not np.any(g) for g in grads.values())


def test_a_small_step_makes_the_better_answer_likelier(params):
    good, bad = [5, 6, 7, 8, 9], [5, 6, 1, 2, 3]
    masks = [[0, 0, 1, 1, 1]] * 2
    batch = to_batch([good, bad], masks, np.array([[0.5, -0.5]], np.float32), 15, 0, 2)
    _, grads, _ = loss_and_gradients(MODEL, params, batch)
    moved = {n: x - 0.01 * grads[n] for n, x in params.items()}

    def logp(weights, ids):
        nll = token_nll(gpt.apply(MODEL, weights, jnp.array([ids[:-1]])), jnp.array([ids[1:]]))
        return -float(nll[0, 1:].sum())

    assert logp(moved, good) > logp(params, good) and logp(moved, bad) < logp(params, bad)


def test_pass_at_k_counts_any_of_the_first_k():
    assert pass_at_k(np.array([[0, 1, 0], [0, 0, 0], [1, 0, 0], [0, 0, 1]])) == [0.25, 0.5, 0.75]


def test_every_question_once_an_epoch_and_the_same_again():
    steps = [question_order(10, 7, step, 4) for step in range(5)]
    flat = sum(steps, [])
    assert sorted(flat[:10]) == sorted(flat[10:]) == list(range(10))
    assert flat[:10] != flat[10:] and steps == [question_order(10, 7, step, 4) for step in range(5)]
