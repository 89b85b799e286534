"""Top-k and top-p row by row against sorting in float64; hostile logits; ids that are no tokens are never drawn."""

from functools import partial

import jax
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from nanochat_lib.course.checks.inference import shares
from nanochat_lib.sampling import is_greedy, row_keys, sample

WIDTH, VOCAB, ROWS = 40, 33, 6  # logits, tokens that exist, rows


@partial(jax.jit, static_argnames=("greedy", "draws"))
def many(logits, seeds, temperature, top_k, top_p, *, greedy, draws):
    """(draws, B) tokens and log-probabilities: the same logits at so many steps."""
    zeros = np.zeros(logits.shape[0], np.uint32)
    keys = row_keys(seeds, zeros, zeros)
    one = lambda step: sample(logits, keys, step, temperature, top_k, top_p, greedy, VOCAB)  # noqa: E731
    return jax.lax.map(one, np.arange(draws), batch_size=16)


def allowed(logits: np.ndarray, temperature: float, top_k: int, top_p: float) -> np.ndarray:
    """Probabilities (VOCAB,) that are drawn from, by sorting."""
    logits = logits[:VOCAB].astype(np.float64)
    order = np.argsort(-logits, kind="stable")
    if temperature == 0:
        return np.eye(VOCAB)[order[0]]
    share = np.exp((logits - logits.max()) / temperature)
    share[order[top_k or VOCAB :]] = 0
    share /= share.sum()
    before = np.cumsum(share[order]) - share[order]
    share[order[before >= top_p]] = 0
    return share / share.sum()


OPTIONS = [(0.0, 0, 1.0), (1.0, 0, 1.0), (1.5, 5, 1.0), (0.7, 0, 0.8), (2.0, 12, 0.5), (1.0, 1, 1.0)]
COLUMNS = tuple(np.array(column, kind) for column, kind in zip(zip(*OPTIONS, strict=True), "fif", strict=True))


@pytest.mark.parametrize("options", OPTIONS)
def test_the_course_checks_against_the_same_distribution(options: tuple) -> None:
    """Chapter 10 asks for probabilities, and its checks have a reference of their own, with padding behind VOCAB."""
    logits = np.random.default_rng(8).normal(0, 2, WIDTH).astype(np.float32)
    share = shares(logits, *options, VOCAB)
    np.testing.assert_allclose(share[:VOCAB], allowed(logits, *options), rtol=1e-9)
    assert not share[VOCAB:].any()


@pytest.mark.parametrize("kind", ["smooth", "tied"])
def test_each_row_is_drawn_by_its_own_options(kind: str) -> None:
    rng, draws = np.random.default_rng(3), 2048
    logits = rng.normal(0, 2, (ROWS, WIDTH)).astype(np.float32)
    if kind == "tied":  # as in bfloat16: many equal logits, also at the border of top-k
        logits = np.round(logits)
    logits[:, VOCAB:] = 50  # the likeliest ids are no tokens
    tokens, logprobs = map(np.asarray, many(logits, np.arange(6, dtype=np.uint32), *COLUMNS, greedy=False, draws=draws))
    own = logits[:, :VOCAB] - np.log(np.exp(logits[:, :VOCAB]).sum(axis=1, keepdims=True))
    for row, options in enumerate(OPTIONS):
        share = allowed(logits[row], *options)
        drawn = np.bincount(tokens[:, row], minlength=VOCAB) / draws
        assert not drawn[share == 0].any(), options
        np.testing.assert_allclose(drawn, share, atol=0.045)  # over 4 deviations of 2,048 draws
        np.testing.assert_allclose(logprobs[:, row], own[row][tokens[:, row]], atol=1e-5)


def test_a_row_draws_the_same_in_any_company() -> None:
    rng = np.random.default_rng(4)
    logits = np.round(rng.normal(0, 2, (ROWS, WIDTH)).astype(np.float32), 1)
    seeds, columns = np.arange(6, dtype=np.uint32), list(COLUMNS)
    together = np.asarray(many(logits, seeds, *columns, greedy=False, draws=2048)[0])
    order = rng.permutation(6)
    shuffled = many(logits[order], seeds[order], *(c[order] for c in columns), greedy=False, draws=2048)[0]
    assert np.array_equal(together[:, order], shuffled)
    for row in range(6):  # beside rows without any options
        alone = [
            np.where(np.arange(6) == row, c, off).astype(c.dtype) for c, off in zip(columns, (1, 0, 1), strict=True)
        ]
        assert np.array_equal(
            np.asarray(many(logits, seeds, *alone, greedy=False, draws=2048)[0])[:, row], together[:, row]
        )
    greedy = np.zeros(6, np.float32), np.zeros(6, np.int32), np.ones(6, np.float32)
    tokens, logprobs = many(logits, seeds, *greedy, greedy=True, draws=4)
    assert (np.asarray(tokens) == logits[:, :VOCAB].argmax(axis=1)).all() and np.asarray(logprobs).max() < 0


HOSTILE = [np.inf, -np.inf, np.nan, 0.0, -0.0, 1e38, -1e38, 3.4e38, 1e-45, 50.0]


@given(
    st.lists(st.sampled_from(HOSTILE), min_size=WIDTH, max_size=WIDTH),
    st.sampled_from([0.0, 1e-30, 1.0, 1e30, np.inf]),
    st.sampled_from([0, 1, 2, 5, VOCAB, VOCAB + 1, 10_000]),
    st.sampled_from([1e-6, 0.5, 1.0]),
)
@example([0.0] * WIDTH, np.inf, 0, 1.0)  # what 1e39 is in float32
@settings(max_examples=25, deadline=None)
def test_whatever_the_logits_only_tokens_are_drawn(logits: list, temperature: float, top_k: int, top_p: float) -> None:
    table = np.array([logits] * 5 + [[0.0] * VOCAB + [np.inf] * (WIDTH - VOCAB)], np.float32)
    options = (np.full(6, x, kind) for x, kind in ((temperature, np.float32), (top_k, np.int32), (top_p, np.float32)))
    tokens, _ = many(table, np.arange(6, dtype=np.uint32), *options, greedy=is_greedy(temperature, top_k), draws=2048)
    assert 0 <= tokens.min() and tokens.max() < VOCAB


def test_at_least_one_token_is_kept() -> None:
    logits = np.zeros((ROWS, WIDTH), np.float32)
    logits[:, 7] = 9.0
    options = np.ones(6, np.float32), np.full(6, 16, np.int32), np.full(6, 1e-6, np.float32)
    tokens, _ = many(logits, np.arange(6, dtype=np.uint32), *options, greedy=False, draws=2048)
    assert set(np.asarray(tokens).ravel()) == {7}
