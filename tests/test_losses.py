"""Cross-entropy against float64 numpy and PyTorch; ignored targets contribute nothing, not even to gradients."""

from __future__ import annotations

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanochat_lib.errors import UserError
from nanochat_lib.layers import linear, softcap
from nanochat_lib.losses import cross_entropy, head_cross_entropy, nats_and_bytes, token_nll

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


# --- the head and the loss in one

CAP = 15.0


def draw_head(seed, shape=(2, 5), channels=8, vocab=7, extra=0, masked=0.3):
    """x, head, targets, weights; logits have a standard deviation of about 5, so the cap acts on them."""
    random = np.random.default_rng(seed)
    x = random.standard_normal((*shape, channels)).astype(np.float32)
    head = (5 / np.sqrt(channels) * random.standard_normal((vocab + extra, channels))).astype(np.float32)
    targets = np.where(random.random(shape) < masked, -1, random.integers(0, vocab, shape)).astype(np.int32)
    return x, head, targets, random.standard_normal(shape).astype(np.float32)


def run_head(x, head, targets, weights=None, **options):
    """((loss, count), gradients of x, head and, if given, weights), compiled."""
    count = 2 if weights is None else 3
    loss = lambda *given: head_cross_entropy(*given[:2], targets, *given[2:], cap=CAP, **options)  # noqa: E731
    return jax.jit(jax.value_and_grad(loss, tuple(range(count)), has_aux=True))(*(x, head, weights)[:count])


def torch_head(x, head, targets, weights, vocab):
    """(loss, sum of its terms' magnitudes, gradients of x, head and weights) by PyTorch in float64."""
    x, head, weights = (torch.tensor(np.asarray(a, np.float64), requires_grad=True) for a in (x, head, weights))
    logits = CAP * torch.tanh(x @ head[:vocab].T / CAP)
    flat = torch.from_numpy(targets).long().reshape(-1)
    losses = torch.nn.functional.cross_entropy(logits.reshape(-1, vocab), flat, ignore_index=-1, reduction="none")
    terms = losses * weights.reshape(-1)
    terms.sum().backward()
    return terms.sum().item(), terms.abs().sum().item(), [a.grad.numpy() for a in (x, head, weights)]


def off_by(got, expected):
    """Largest difference, relative to the largest entry where that is above 1: what is added up has entries near 1."""
    return np.abs(np.asarray(got, np.float64) - expected).max() / max(np.abs(expected).max(), 1.0)


def off(got, expected):
    """Largest difference relative to the largest entry."""
    return np.abs(np.asarray(got, np.float64) - expected).max() / max(np.abs(expected).max(), 1e-30)


@settings(max_examples=12, deadline=None)
@example(seed=1_361_889_699, shape=(1,), channels=1, vocab=2, extra=0, masked=0.0, chunks=1, weighted=False)
@given(
    seed=st.integers(0, 2**31),
    shape=st.one_of(st.tuples(st.integers(1, 24)), st.tuples(st.integers(1, 4), st.integers(1, 11))),
    channels=st.integers(1, 40),
    vocab=st.integers(2, 90),
    extra=st.sampled_from([0, 0, 5]),
    masked=st.sampled_from([0.0, 0.3]),
    chunks=st.integers(1, 7),
    weighted=st.booleans(),
)
def test_head_loss_and_gradients_equal_torch_in_float64_and_the_plain_form(
    seed, shape, channels, vocab, extra, masked, chunks, weighted
):
    """1e-6, for gradients of the largest entry or of 1.

    Where a target's probability is near 1, its gradient is a difference of two numbers near 1, each with its own
    rounding: 2.9e-6 of an entry of 0.03 was seen with two classes, which is 8.8e-8.
    """
    x, head, targets, weights = draw_head(seed, shape, channels, vocab, extra, masked)
    if not weighted:
        weights = np.ones_like(weights)
    expected, size, gradients = torch_head(x, head, targets, weights, vocab)
    given_weights = weights if weighted else None
    (loss, count), got = run_head(x, head, targets, given_weights, vocab_size=vocab, chunks=chunks)
    assert loss.dtype == jnp.float32 and count.dtype == jnp.int32 and int(count) == (targets >= 0).sum()
    assert abs(float(loss) - expected) <= 1e-6 * max(size, 1.0)
    for a, b in zip(got, gradients, strict=False):
        assert a.shape == b.shape and off_by(a, b) <= 1e-6
    assert not np.asarray(got[1])[vocab:].any()

    plain = lambda x, head: cross_entropy(softcap(x @ head[:vocab].T, CAP), targets, given_weights)[0]  # noqa: E731
    by_parts, plain_gradients = jax.jit(jax.value_and_grad(plain, (0, 1)))(x, head)
    assert abs(float(loss - by_parts)) <= 1e-6 * max(size, 1.0)
    for a, b in zip(got, plain_gradients, strict=False):
        assert off_by(a, np.asarray(b, np.float64)) <= 1e-6


@pytest.mark.parametrize("chunks", [1, 3])
def test_head_padding_rows_are_never_read(chunks):
    """NaN in them reaches nothing, and they get a gradient of exactly zero."""
    x, head, targets, weights = draw_head(11, shape=(3, 7), vocab=50, extra=14)
    expected, got = (
        run_head(x, table, targets, weights, vocab_size=50, chunks=chunks)
        for table in (head, np.where(np.arange(64)[:, None] < 50, head, np.nan))
    )
    assert all(np.array_equal(a, b) for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True))
    assert not np.asarray(got[1][1])[50:].any() and np.asarray(got[1][1])[:50].any()


@pytest.mark.parametrize("chunks", [1, 3])
def test_head_ignored_positions_contribute_nothing(chunks):
    x, head, targets, weights = draw_head(12, shape=(3, 7), vocab=9)
    (loss, count), got = run_head(x, head, targets, weights, vocab_size=9, chunks=chunks)
    keep = targets >= 0
    assert 0 < keep.sum() < keep.size and not np.asarray(got[0])[~keep].any() and not np.asarray(got[2])[~keep].any()
    loud = np.where(keep[..., None], x, 1e3).astype(np.float32), head, targets, np.where(keep, weights, np.inf)
    (loud_loss, loud_count), again = run_head(*loud, vocab_size=9, chunks=chunks)
    assert float(loud_loss) == float(loss) and int(loud_count) == int(count) == keep.sum()
    assert all(np.array_equal(a, b) for a, b in zip(again, got, strict=True))
    nothing = run_head(x, head, np.full_like(targets, -1), weights, vocab_size=9, chunks=chunks)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(nothing))


def test_head_in_bfloat16():
    """Logits are not rounded: the loss is float64's to 1e-6. The gradient is rounded twice to bfloat16, where it
    leaves the logits and, for x, at the end; the head's is summed in float32. Seen: x 0.0040, head 0.0024."""
    x, head, targets, weights = draw_head(13, shape=(4, 33), channels=64, vocab=200)
    x, rounded = jnp.asarray(x, jnp.bfloat16), jnp.asarray(head, jnp.bfloat16)
    expected, size, gradients = torch_head(x, rounded, targets, weights, 200)
    for chunks in (1, 5):
        (loss, _), (dx, dhead, _) = run_head(x, head, targets, weights, vocab_size=200, chunks=chunks)
        assert abs(float(loss) - expected) <= 1e-6 * size
        assert dx.dtype == jnp.bfloat16 and dhead.dtype == jnp.float32
        assert off(dx, gradients[0]) <= 5e-3 and off(dhead, gradients[1]) <= 3.5e-3
    logits = softcap(x @ rounded.T, CAP)
    assert abs(float(cross_entropy(logits, targets, weights)[0]) - expected) > 1e-5 * size  # what rounded logits cost
    _, (_, in_bfloat16, _) = run_head(x, rounded, targets, weights, vocab_size=200)
    assert in_bfloat16.dtype == jnp.bfloat16


def test_head_scale_and_outer_factors():
    """Inside or outside, a factor is a factor; it can be traced and differentiated."""
    x, head, targets, weights = draw_head(14, shape=(2, 9))
    options = {"cap": CAP, "vocab_size": 7, "chunks": 2}
    inside = lambda x, head, w, s: head_cross_entropy(x, head, targets, w, scale=s, **options)[0]  # noqa: E731
    outside = lambda x, head, w, s: head_cross_entropy(x, head, targets, w, **options)[0] * s  # noqa: E731
    given = x, head, weights, np.float32(-0.37)
    a, b = (jax.jit(jax.value_and_grad(f, (0, 1, 2, 3)))(*given) for f in (inside, outside))
    for first, second in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        assert off(first, np.asarray(second, np.float64)) <= 3e-6 and np.any(first)


@pytest.mark.parametrize("target", [7, 9])
def test_head_target_outside_of_the_vocabulary_shows(target):
    """NaN, as from the plain form, whether or not the padded table has such a row."""
    x, head, targets, _ = draw_head(15, extra=2, masked=0)
    targets[0, 3] = target
    assert np.isnan(cross_entropy(x @ head[:7].T, targets)[0])
    for chunks in (1, 2):
        assert np.isnan(head_cross_entropy(x, head, targets, cap=CAP, vocab_size=7, chunks=chunks)[0])


def largest_buffer(compiled, dtype=r"[a-z]+\d+\w*"):
    """Most elements of any array of `dtype` in a compiled module, in whatever shape and layout."""
    shapes = re.findall(rf"\b{dtype}\[([\d,]+)\]", compiled.as_text())
    return max(math.prod(map(int, shape.split(","))) for shape in shapes)


@pytest.mark.parametrize(("shape", "chunks"), [((4, 48), 4), ((190,), 5), ((3, 50), 7)])
def test_no_buffer_of_all_logits_exists_with_chunks(shape, chunks):
    """N · V elements are nowhere in the compiled step, in no type; the plain form has them, in float32."""
    channels, vocab = 16, 640
    everything = math.prod(shape) * vocab
    x, head, targets, weights = draw_head(16, shape, channels, vocab)

    def compiled(loss):
        return jax.jit(jax.value_and_grad(lambda *given: loss(*given)[0], (0, 1, 2))).lower(x, head, weights).compile()

    plain = compiled(lambda x, head, w: cross_entropy(softcap(linear(x, head), CAP), targets, w))
    assert largest_buffer(plain, "f32") >= everything
    options = {"cap": CAP, "vocab_size": vocab}
    whole = compiled(lambda x, head, w: head_cross_entropy(x, head, targets, w, **options))
    assert largest_buffer(whole, "f32") >= everything
    parts = compiled(lambda x, head, w: head_cross_entropy(x, head, targets, w, chunks=chunks, **options))
    assert largest_buffer(parts) <= 1.2 * everything / chunks  # the last chunk may be padded
    assert parts.memory_analysis().temp_size_in_bytes < plain.memory_analysis().temp_size_in_bytes / 2


@pytest.mark.parametrize("chunks", [1, 4])
def test_loss_and_gradients_take_three_products(chunks):
    """One for the logits and one for each gradient, on the compute dtype, with float32 logits and head gradient."""
    x, head, targets, _ = draw_head(17, shape=(2, 12))
    loss = lambda x, head: head_cross_entropy(x, head, targets, cap=CAP, vocab_size=7, chunks=chunks)[0]  # noqa: E731
    products = lambda f: re.findall(  # noqa: E731
        r"dot_general .*: \(tensor<[\dx]+x(\w+)>, tensor<[\dx]+x(\w+)>\) -> tensor<[\dx]+x(\w+)>",
        jax.jit(f).lower(jnp.asarray(x, jnp.bfloat16), head).as_text(),
    )
    assert products(loss) == [("bf16", "bf16", "f32")]
    expected = [("bf16", "bf16", "bf16"), ("bf16", "bf16", "f32"), ("bf16", "bf16", "f32")]
    assert sorted(products(jax.value_and_grad(loss, (0, 1)))) == expected


def test_head_loss_names_what_does_not_fit():
    x, head, targets, weights = draw_head(18)
    call = lambda x=x, head=head, targets=targets, weights=weights, cap=CAP, vocab=7, chunks=1: head_cross_entropy(  # noqa: E731
        x, head, targets, weights, cap=cap, vocab_size=vocab, chunks=chunks
    )
    call()
    for wrong, message in (
        ({"targets": targets[:, :4]}, r"x \(2, 5, 8\), targets and weights \[\(2, 4\), \(2, 5\)\]"),
        ({"weights": weights[0]}, r"targets and weights \[\(2, 5\), \(5,\)\]"),
        ({"head": head[:, :3]}, r"head \(7, 3\); need at least 7 rows of 8 channels"),
        ({"vocab": 8}, "need at least 8 rows"),
        ({"chunks": 0}, "0 chunks"),
        ({"cap": 0.0}, "soft cap 0.0"),
        ({"cap": 36.0}, "0 < cap ≤ 35"),
    ):
        with pytest.raises(UserError, match=message):
            call(**wrong)


@given(st.integers(0, 10**6))
@settings(max_examples=20, deadline=None)
def test_nats_and_bytes_count_only_targets_that_stand_for_text(seed):
    """Against a loop in float64; exact for the bytes. Ignored and special targets carry a loss that must not count."""
    random = np.random.default_rng(seed)
    token_bytes = np.append(random.integers(1, 9, 5), [0, 0]).astype(np.int32)
    targets = random.integers(-1, 7, (2, 6)).astype(np.int32)
    values = random.exponential(2, (2, 6)).astype(np.float32)
    counted = [(float(v), int(token_bytes[t])) for v, t in zip(values.flat, targets.flat, strict=True) if 0 <= t < 5]
    nats, size = nats_and_bytes(jnp.asarray(values), jnp.asarray(targets), jnp.asarray(token_bytes))
    assert int(size) == sum(b for _, b in counted)
    assert float(nats) == pytest.approx(math.fsum(v for v, _ in counted), rel=1e-5, abs=1e-7)
