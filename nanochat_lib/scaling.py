"""Scaling laws: a power law with a floor through a few runs, and how far it may be trusted beyond them.

y = floor + scale · x^-exponent, x the training FLOPs (or tokens, or parameters) and y a loss or bits per byte, as in
"Scaling Laws for Neural Language Models" (Kaplan et al., arXiv:2001.08361) and "Training Compute-Optimal Large Language
Models" (Hoffmann et al., arXiv:2203.15556). The floor is what no amount of x removes: the text's own uncertainty.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from nanochat_lib.errors import UserError

EXPONENTS = np.geomspace(0.005, 2.0, 401)  # neighbours differ by 1.5 %


class PowerLaw(NamedTuple):
    floor: float  # y for endless x, never negative
    scale: float  # what is above it at x = 1; negative where y rises with x, which no loss should
    exponent: float  # > 0: ten times x divides what is above the floor by 10^exponent

    def __call__(self, x: np.ndarray | float) -> np.ndarray:
        return self.floor + self.scale * np.asarray(x, np.float64) ** -self.exponent


def fit_power_law(x: np.ndarray, y: np.ndarray, exponents: np.ndarray = EXPONENTS) -> PowerLaw:
    """The law with the least sum of squared errors in y among those with one of `exponents` (E,).

    x, y (n,), x positive and three of them different. With the exponent fixed the law is a straight line in
    x^-exponent, so floor and scale follow by least squares. Where that asks for a negative floor, the best law without
    a floor stands in its place.
    """
    x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
    if len(set(x.tolist())) < 3 or x.min() <= 0:
        raise UserError(f"power law: x are {x.tolist()}, at least 3 different positive ones are needed")
    power = (x / x.min()) ** -exponents[:, None]  # (E, n); at most 1, whatever the units of x
    mean = power.mean(1)
    centred = power - mean[:, None]
    tilt = centred @ y / np.sum(centred**2, 1)
    free = y.mean() - tilt * mean
    floor = np.maximum(free, 0.0)
    scale = np.where(free > 0, tilt, power @ y / np.sum(power**2, 1))
    best = np.argmin(np.sum((floor[:, None] + scale[:, None] * power - y) ** 2, 1))
    exponent = float(exponents[best])
    return PowerLaw(float(floor[best]), float(scale[best] * x.min() ** exponent), exponent)


def bootstrap(x: np.ndarray, y: np.ndarray, draws: int, seed: int) -> np.ndarray:
    """(draws, 3): floor, scale and exponent of laws fitted to the same x with y drawn anew.

    Each draw adds to the fitted values residuals of the fit, drawn with replacement and made √(n / (n - 3)) as large,
    since a fit of three numbers leaves n - 3 of n errors free (Efron and Tibshirani, 1993). With n = 3 there is
    nothing to draw: a UserError.
    """
    n = len(y)
    if n < 4:
        raise UserError(f"bootstrap: {n} points fix the law's three numbers and leave no error to draw, use 4 or more")
    fitted = fit_power_law(x, y)
    residuals = (np.asarray(y, np.float64) - fitted(x)) * np.sqrt(n / (n - 3))
    draw = np.random.default_rng(seed)
    return np.array([fit_power_law(x, fitted(x) + draw.choice(residuals, n)) for _ in range(draws)])


def band(laws: np.ndarray, x: np.ndarray, share: float = 0.8) -> tuple[np.ndarray, np.ndarray]:
    """(low, high), each like x (m,): between them lie `share` of the laws (draws, 3) of `bootstrap`."""
    found = np.array([PowerLaw(*law)(x) for law in laws])
    low, high = np.quantile(found, [(1 - share) / 2, (1 + share) / 2], axis=0)
    return low, high
