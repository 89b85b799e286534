"""Cross-entropy against float64 numpy and PyTorch; ignored targets contribute nothing, not even to gradients."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat_lib.losses import cross_entropy, token_nll

nll = jax.jit(token_nll)
total = jax.jit(cross_entropy)
gradient = jax.jit(jax.grad(lambda logits, targets: cross_entropy(logits, targets)[0]))
weighted_gradient = jax.jit(jax.grad(lambda logits, targets, w: cross_entropy(logits, targets, w)[0]))


def draw(seed, masked=0.3, shape=(2, 5), vocab=7):
    random = np.random.default_rng(seed)
    logits = (4 * random.standard_normal((*shape, vocab))).astype(np.float32)
    targets = random.integers(0, vocab, shape).astype(np.int32)
    return logits, np.where(random.random(shape) < masked, -1, targets).astype(np.int32)


def torch_sum(logits, targets, weights=None):
    """(sum of the losses, gradient) by PyTorch in float64."""
    tensor = torch.tensor(logits, dtype=torch.float64, requires_grad=True)
    flat = torch.from_numpy(targets).long().reshape(-1)
    losses = torch.nn.functional.cross_entropy(
        tensor.reshape(-1, logits.shape[-1]), flat, ignore_index=-1, reduction="none"
    )
    loss = (losses * (1 if weights is None else torch.from_numpy(weights).double().reshape(-1))).sum()
    loss.backward()
    return loss.item(), tensor.grad.numpy()


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 2**31), masked=st.sampled_from([0.0, 0.3, 1.0]))
def test_sum_count_and_gradient_equal_torch(seed, masked):
    logits, targets = draw(seed, masked)
    expected, expected_gradient = torch_sum(logits, targets)
    loss, count = total(logits, targets)
    assert loss.dtype == jnp.float32 and count.dtype == jnp.int32
    assert int(count) == (targets >= 0).sum()
    np.testing.assert_allclose(loss, expected, rtol=2e-6, atol=1e-5)
    np.testing.assert_allclose(gradient(logits, targets), expected_gradient, atol=2e-6)


@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31))
def test_weights_scale_each_position_but_not_the_count(seed):
    logits, targets = draw(seed)
    weights = np.random.default_rng(seed + 1).standard_normal(targets.shape).astype(np.float32)
    expected, expected_gradient = torch_sum(logits, targets, weights)
    loss, count = total(logits, targets, weights)
    assert int(count) == (targets >= 0).sum()
    np.testing.assert_allclose(loss, expected, rtol=1e-5, atol=2e-5)
    np.testing.assert_allclose(weighted_gradient(logits, targets, weights), expected_gradient, atol=5e-6)


def test_ignored_positions_are_zero_whatever_stands_there():
    logits, targets = draw(1)
    losses = np.asarray(nll(logits, targets))
    assert losses.shape == targets.shape and losses.dtype == np.float32
    assert not losses[targets < 0].any() and losses[targets >= 0].all()
    changed = logits.copy()
    changed[targets < 0] = 1e4
    assert np.array_equal(nll(changed, targets), losses)


def test_minus_one_does_not_read_the_last_class():
    """The last class is certain: reading it would give loss 0 and pull on its logit."""
    logits = np.full((1, 1, 4), -50, np.float32)
    logits[..., -1] = 50
    assert float(nll(logits, np.array([[0]]))[0, 0]) == pytest.approx(100)
    assert float(nll(logits, np.array([[-1]]))[0, 0]) == 0
    assert not np.asarray(gradient(logits, np.array([[-1]]))).any()


def test_everything_masked_is_zero_with_a_zero_finite_gradient():
    logits, targets = draw(2, masked=1.1)
    assert [float(a) for a in total(logits, targets)] == [0, 0]
    g = np.asarray(gradient(logits, targets))
    assert np.isfinite(g).all() and not g.any()
    mean = jax.grad(lambda z: cross_entropy(z, targets)[0] / jnp.maximum(cross_entropy(z, targets)[1], 1))
    assert not np.asarray(mean(logits)).any()


def test_uniform_logits_give_log_of_the_vocabulary():
    np.testing.assert_allclose(
        nll(np.zeros((2, 3, 300), np.float32), np.zeros((2, 3), np.int32)), np.log(300), rtol=1e-6
    )


def test_bfloat16_logits_are_summed_in_float32():
    logits, targets = draw(3, masked=0, shape=(8, 64), vocab=512)
    rounded = jnp.asarray(logits, jnp.bfloat16)
    loss, _ = total(rounded, targets)
    assert loss.dtype == jnp.float32
    np.testing.assert_allclose(loss, torch_sum(np.asarray(rounded, np.float32), targets)[0], rtol=1e-5)


def test_micro_batches_add_up_to_the_whole():
    logits, targets = draw(4, shape=(4, 6))
    parts = [total(logits[i : i + 2], targets[i : i + 2]) for i in (0, 2)]
    whole = total(logits, targets)
    np.testing.assert_allclose(sum(p[0] for p in parts), whole[0], rtol=1e-6)
    assert int(sum(p[1] for p in parts)) == int(whole[1])
