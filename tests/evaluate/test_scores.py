"""Intervals against their definitions, and against how often they hold the truth; pass@k against counting by hand."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import optimize, stats

from nanochat_lib.evaluate import scores


@pytest.mark.parametrize(("right", "count"), [(0, 5), (3, 7), (50, 100), (9999, 10000), (12, 12)])
def test_wilson_bounds_are_where_the_score_test_turns(right, count):
    """The bounds are the p for which the observed share is exactly Z standard errors away."""
    share = right / count
    off = lambda p: (share - p) ** 2 - scores.Z**2 * p * (1 - p) / count  # noqa: E731
    low, high = scores.wilson(right, count)
    if right:
        assert low == pytest.approx(optimize.brentq(off, 1e-12, share - 1e-12), abs=1e-6)
    else:
        assert low == 0
    if right < count:
        assert high == pytest.approx(optimize.brentq(off, share + 1e-12, 1 - 1e-12), abs=1e-6)
    else:
        assert high == 1


def test_nothing_counted_is_no_knowledge():
    assert scores.wilson(0, 0) == (0.0, 1.0)


def held(draws, truth):
    return np.mean([low <= truth <= high for low, high in draws])


def test_intervals_hold_the_truth_in_95_of_100_cases():
    """Simulated evaluations; the bounds on the share are five standard errors of a share of 0.95 in 2,000 draws."""
    rng, times = np.random.default_rng(0), 2000
    low, high = 0.95 - 5 * math.sqrt(0.95 * 0.05 / times), 0.985
    single = [scores.wilson(x, 80) for x in rng.binomial(80, 0.3, times)]
    assert low < held(single, 0.3) < high

    p, n, baselines = (0.3, 0.62, 0.05), (40, 200, 90), (0.25, 0.5, 0.0)
    truth = np.mean([scores.centered(a, b) for a, b in zip(p, baselines, strict=True)])
    means = []
    for rights in zip(*(rng.binomial(count, chance, times) for count, chance in zip(n, p, strict=True)), strict=True):
        parts = list(zip(rights, n, baselines, strict=True))
        values = [scores.centered(x / count, b) for x, count, b in parts]
        intervals = [scores.centered_interval(scores.wilson(x, count), b) for x, count, b in parts]
        means.append(scores.mean_interval(values, intervals))
    assert low < held(means, truth) < high
    assert np.mean([b - a for a, b in means]) < 0.2  # and they say something

    unpaired = [scores.unpaired_difference(a / 60, 60, b / 150, 150)
                for a, b in zip(rng.binomial(60, 0.4, times), rng.binomial(150, 0.55, times), strict=True)]  # fmt: skip
    assert low < held([d.interval for d in unpaired], 0.15) < high

    easy = rng.random((times, 100))  # both models find the same questions easy
    a, b = easy < 0.5, (easy < 0.5) ^ (rng.random((times, 100)) < 0.1)
    paired = [scores.paired_difference(x, y) for x, y in zip(a, b, strict=True)]
    assert low < held([d.interval for d in paired], 0.0) <= 1
    assert np.mean([d.p < 0.05 for d in paired]) < 0.05  # the sign test is exact, so rather too careful
    wide = scores.unpaired_difference(a[0].mean(), 100, b[0].mean(), 100).interval
    assert np.diff(paired[0].interval) < 0.75 * np.diff(wide)  # what pairing is for


@pytest.mark.parametrize(("better", "worse"), [(0, 0), (1, 0), (3, 9), (40, 22), (700, 610)])
def test_the_sign_test_is_the_binomial_test(better, worse):
    throws = better + worse
    both = 2 * sum(math.comb(throws, k) for k in range(min(better, worse) + 1)) / 2**throws
    assert scores.sign_test(better, worse) == pytest.approx(min(both, 1.0), rel=1e-9)
    low, high = scores.clopper_pearson(better, throws)
    exact = stats.binomtest(better, throws).proportion_ci(method="exact") if throws else (0.0, 1.0)
    assert (low, high) == pytest.approx(tuple(exact), abs=1e-9)


def test_an_interval_without_zero_and_a_small_p_go_together():
    for better, worse in itertools.product(range(12), range(12)):
        a = np.array([0] * better + [1] * worse + [0] * 200)
        b = np.array([1] * better + [0] * worse + [0] * 200)
        found = scores.paired_difference(a, b)
        if found.interval[0] > 0 or found.interval[1] < 0:
            assert found.p < 0.05
        assert found.interval[0] < found.value < found.interval[1]


def test_a_paired_difference_is_b_minus_a():
    a, b = [1, 1, 0, 0, 0, 0, 0, 0], [1, 0, 1, 1, 1, 1, 1, 0]
    found = scores.paired_difference(np.array(a), np.array(b))
    assert found.value == (5 - 1) / 8 and found.paired
    assert found.interval[0] < found.value < found.interval[1]
    assert found.p == pytest.approx(stats.binomtest(1, 6).pvalue)
    same = scores.paired_difference(np.ones(9), np.ones(9))
    assert same.value == 0 and same.p == 1 and same.interval[0] < 0 < same.interval[1]


def test_holm_raises_p_values_in_order():
    assert scores.holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert scores.holm([0.5, 0.9]) == [1.0, 1.0] and scores.holm([]) == []


@given(st.integers(1, 6), st.integers(1, 6), st.randoms(use_true_random=False))
def test_pass_at_k_is_what_counting_says(questions, samples, draw):
    correct = np.array([[draw.random() < 0.3 for _ in range(samples)] for _ in range(questions)])
    first = scores.pass_at_k(correct)
    unbiased = scores.unbiased_pass_at_k(correct)
    for k in range(1, samples + 1):
        assert first[k - 1] == pytest.approx(sum(any(row[:k]) for row in correct.tolist()) / questions)
        chosen = [
            [any(row[i] for i in c) for c in itertools.combinations(range(samples), k)] for row in correct.tolist()
        ]
        assert unbiased[k - 1] == pytest.approx(np.mean([np.mean(one) for one in chosen]))
    assert unbiased[0] == pytest.approx(correct.mean())


def test_the_unbiased_estimate_stays_a_share_with_many_samples():
    correct = np.zeros((3, 2000), bool)
    correct[0, 0], correct[1, :1000] = True, True
    found = scores.unbiased_pass_at_k(correct)
    assert all(0 <= x <= 1 for x in found) and found == sorted(found) and found[-1] == pytest.approx(2 / 3)
