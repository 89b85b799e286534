"""How sure a score is: confidence intervals, differences between two scores, pass@k.

Every interval is at 95 %. An accuracy gets Wilson's score interval (Wilson 1927), which stays inside 0 … 1 and does not
shrink to nothing at 0 or 1 right answers, as "± standard error" does. A mean of several scores, such as CORE, gets the
intervals of its parts carried over: distances from the estimate to each part's bounds add up in squares ("MOVER", Zou
and Donner, Statistics in Medicine 27, 2008). The difference of two independent accuracies is the same rule applied to
a − b (Newcombe 1998). When both answered the same questions, only those count that one got right and the other wrong.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

Z = 1.959963984540054  # the standard normal's 97.5 % point: intervals at 95 %

Interval = tuple[float, float]


def wilson(right: float, count: int) -> Interval:
    """Wilson's interval of the accuracy right/count; (0, 1) when nothing was counted."""
    if count == 0:
        return 0.0, 1.0
    share = right / count
    middle = (share + Z**2 / (2 * count)) / (1 + Z**2 / count)
    half = Z / (1 + Z**2 / count) * math.sqrt(share * (1 - share) / count + Z**2 / (4 * count**2))
    return min(max(middle - half, 0.0), share), max(min(middle + half, 1.0), share)  # rounding must not pass the share


def centered(value: float, baseline: float) -> float:
    """(value − baseline) / (1 − baseline): 0 is guessing, 1 is perfect. `baseline` is a share, below 1."""
    return (value - baseline) / (1 - baseline)


def centered_interval(interval: Interval, baseline: float) -> Interval:
    return centered(interval[0], baseline), centered(interval[1], baseline)


def mean_interval(values: Sequence[float], intervals: Sequence[Interval]) -> Interval:
    """Interval of the mean of independent `values`, each with its own interval."""
    mean, count = sum(values) / len(values), len(values)
    below = math.sqrt(sum((value - low) ** 2 for value, (low, _) in zip(values, intervals, strict=True))) / count
    above = math.sqrt(sum((high - value) ** 2 for value, (_, high) in zip(values, intervals, strict=True))) / count
    return mean - below, mean + above


# ---- pass@k


def pass_at_k(correct: np.ndarray) -> list[float]:
    """Share of questions with a right answer among the first k samples, k = 1 … S, from right or wrong (Q, S)."""
    right = np.maximum.accumulate(np.asarray(correct) > 0, axis=1)
    return [float(share) for share in right.mean(axis=0)]


def unbiased_pass_at_k(correct: np.ndarray) -> list[float]:
    """Chance that one of k samples drawn from the S at hand is right, k = 1 … S, mean over questions.

    1 − C(S − c, k) / C(S, k) for c right ones among S, as a product, which never leaves 0 … 1 (Chen et al. 2021,
    arXiv:2107.03374). It uses all samples for every k, so it varies less than the first k alone.
    """
    correct = np.asarray(correct) > 0
    samples = correct.shape[1]
    wrong = samples - correct.sum(axis=1)  # (Q,)
    none = np.ones(len(correct))  # chance that k samples are all wrong
    found = []
    for k in range(1, samples + 1):
        none = none * np.maximum(wrong - k + 1, 0) / (samples - k + 1)
        found.append(float(np.mean(1.0 - none)))
    return found


# ---- differences


class Difference(NamedTuple):
    """b − a, its interval, and the chance p of one at least as large if both were equally good. Paired: same items."""

    value: float
    interval: Interval
    p: float
    paired: bool


def paired_difference(a: np.ndarray, b: np.ndarray) -> Difference:
    """Of two models that answered the same questions, right or wrong (N,) each.

    p is the exact sign test's (McNemar): the questions on which they differ fall to either side like a fair coin's
    throws. The interval is the wider one, on either side, of two: what that test does not refuse (Clopper and Pearson's
    for the share of "better" among those questions), so that an interval without 0 has p < 0.05; and Agresti and Min's
    (2005), which adds half a question to each of the four counts and says something too when they never differ.
    """
    a, b = np.asarray(a, bool), np.asarray(b, bool)
    count, better, worse = len(a), int((~a & b).sum()), int((a & ~b).sum())
    value, differ = (better - worse) / count, (better + worse) / count
    n, up, down = count + 2, better + 0.5, worse + 0.5
    middle = (up - down) / n
    half = Z * math.sqrt(max(up + down - (up - down) ** 2 / n, 0.0)) / n
    low, high = clopper_pearson(better, better + worse)
    interval = min(middle - half, (2 * low - 1) * differ), max(middle + half, (2 * high - 1) * differ)
    return Difference(value, (max(interval[0], -1.0), min(interval[1], 1.0)), sign_test(better, worse), True)


def clopper_pearson(right: int, count: int) -> Interval:
    """The shares that an exact binomial test does not refuse; (0, 1) when nothing was counted."""
    from scipy.special import betaincinv

    low = float(betaincinv(right, count - right + 1, 0.025)) if right else 0.0
    return low, float(betaincinv(right + 1, count - right, 0.975)) if right < count else 1.0


def sign_test(better: int, worse: int) -> float:
    """Two-sided chance of a split at least as uneven as better : worse among fair throws."""
    from scipy.special import bdtr

    return 1.0 if better == worse else min(1.0, 2 * float(bdtr(min(better, worse), better + worse, 0.5)))


def unpaired_difference(a: float, count_a: int, b: float, count_b: int) -> Difference:
    """Of accuracies over different questions, or without their single answers: Newcombe's interval, the z test's p."""
    low_a, high_a = wilson(a * count_a, count_a)
    low_b, high_b = wilson(b * count_b, count_b)
    value = b - a
    interval = value - math.hypot(b - low_b, high_a - a), value + math.hypot(high_b - b, a - low_a)
    pooled = (a * count_a + b * count_b) / (count_a + count_b)
    spread = math.sqrt(pooled * (1 - pooled) * (1 / count_a + 1 / count_b))
    p = math.erfc(abs(value) / spread / math.sqrt(2)) if spread else 1.0
    return Difference(value, interval, p, False)


def holm(ps: Sequence[float]) -> list[float]:
    """p values of a family of tests, raised so that one of all is below 0.05 by chance in 5 % of cases (Holm 1979)."""
    adjusted, floor = [0.0] * len(ps), 0.0
    for place, i in enumerate(sorted(range(len(ps)), key=lambda i: ps[i])):
        floor = max(floor, min(1.0, (len(ps) - place) * ps[i]))
        adjusted[i] = floor
    return adjusted
