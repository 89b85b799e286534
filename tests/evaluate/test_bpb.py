"""Bits per byte of models whose value is known in advance."""

import math

import numpy as np
import pytest

from nanochat_lib.evaluate.bpb import bits_per_byte, loss_and_bits, mean_loss, per_token_and_byte
from nanochat_lib.losses import token_nll

V = 7
BYTES = np.array([1, 1, 2, 3, 5, 1, 0], np.int32)  # the last id is special


def uniform(params, inputs, targets, token_bytes):
    """An eval step whose model gives every id the same probability."""
    nll = np.asarray(token_nll(np.zeros((*targets.shape, V), np.float32), targets))
    sizes = np.where(targets >= 0, token_bytes[np.where(targets >= 0, targets, 0)], 0)
    return (nll * (sizes > 0)).sum(), sizes.sum(), nll.sum(), (targets >= 0).sum()


def test_uniform_model():
    rng = np.random.default_rng(0)
    batches = [(None, rng.integers(0, V, (3, 5)).astype(np.int32)) for _ in range(4)]
    ids = np.concatenate([t.ravel() for _, t in batches])
    wanted = (ids != 6).sum() * math.log2(V) / BYTES[ids].sum()
    assert bits_per_byte(uniform, {}, batches, BYTES) == pytest.approx(wanted, rel=1e-6)
    assert mean_loss(uniform, {}, batches, BYTES) == pytest.approx(math.log(V), rel=1e-6)


def test_ignored_targets_change_nothing():
    rng = np.random.default_rng(1)
    kept = rng.integers(0, 6, (2, 8)).astype(np.int32)
    padded = np.concatenate([kept, np.full((2, 8), -1, np.int32)], axis=1)
    assert bits_per_byte(uniform, {}, [(None, padded)], BYTES) == bits_per_byte(uniform, {}, [(None, kept)], BYTES)


@pytest.mark.parametrize("ids", [6, -1])
def test_nothing_to_count_is_infinity_not_a_crash(ids):
    assert bits_per_byte(uniform, {}, [(None, np.full((1, 4), ids, np.int32))], BYTES) == math.inf


def test_no_batches_is_nan_for_the_loss():
    assert math.isnan(mean_loss(uniform, {}, [], BYTES))


def test_batches_are_added_up_before_anything_is_divided():
    sums = [(math.log(2), 1, 4.0, 2), (3 * math.log(2), 7, 6.0, 8)]  # the batches' means: 2 and 0.75, 1 and 3/7
    assert per_token_and_byte(sums) == pytest.approx((1.0, 0.5))
    assert per_token_and_byte([(0.0, 0, 5.0, 1)])[0] == 5.0
    assert all(map(math.isnan, per_token_and_byte([])))
    loss, bits = per_token_and_byte([(0.0, 0, 6.0, 3)])  # special tokens alone
    assert loss == 2.0 and math.isnan(bits)


def test_one_reading_gives_both_figures():
    rng = np.random.default_rng(2)
    batches = [(None, rng.integers(0, V, (2, n)).astype(np.int32)) for n in (3, 9)]
    loss, bits = loss_and_bits(uniform, {}, batches, BYTES)
    assert loss == mean_loss(uniform, {}, batches, BYTES)
    assert bits == pytest.approx(bits_per_byte(uniform, {}, batches, BYTES))
