"""Power laws against the truth they were made from and numpy's least squares; bands against repeated experiments."""

from __future__ import annotations

import numpy as np
import pytest

from nanochat_lib.errors import UserError
from nanochat_lib.scaling import EXPONENTS, PowerLaw, band, bootstrap, fit_power_law

X = np.geomspace(3e9, 4e11, 6)


@pytest.mark.parametrize("exponent", [0.05, 0.154, 0.5, 1.2])
@pytest.mark.parametrize("floor", [0.0, 0.7])
def test_a_law_without_noise_is_found_again(exponent: float, floor: float) -> None:
    law = PowerLaw(floor, 2.0 * X[0] ** exponent, exponent)
    found = fit_power_law(X, law(X))
    assert found.exponent == pytest.approx(exponent, rel=0.016)  # a step of the grid
    np.testing.assert_allclose(found(X), law(X), atol=3e-3)
    assert found.floor == pytest.approx(floor, abs=0.06)


def test_no_other_exponent_and_no_other_line_fits_better() -> None:
    """Against numpy's least squares at every exponent, with the floor free and at zero."""
    rng = np.random.default_rng(0)
    for number in range(20):
        y = (
            (rng.uniform(0, 1) if number % 2 else -0.3)
            + 3 * (X / X[0]) ** -rng.uniform(0.05, 0.6)
            + 0.05 * rng.standard_normal(len(X))
        )
        found = fit_power_law(X, y)
        least = np.inf
        for exponent in EXPONENTS:
            power = (X / X[0]) ** -exponent
            for columns in (np.stack([np.ones_like(X), power], 1), power[:, None]):
                line, *_ = np.linalg.lstsq(columns, y, rcond=None)
                if len(line) == 1 or line[0] >= 0:
                    least = min(least, float(np.sum((columns @ line - y) ** 2)))
        assert np.sum((found(X) - y) ** 2) == pytest.approx(least, rel=1e-9)
        assert found.floor >= 0
    coarse = fit_power_law(X, 3 * (X / X[0]) ** -0.15 - 0.3, np.array([0.05, 0.15, 1.0]))
    power = (X / X[0]) ** -0.15
    line, *_ = np.linalg.lstsq(power[:, None], 3 * power - 0.3, rcond=None)
    np.testing.assert_allclose(coarse, (0.0, line[0] * X[0] ** 0.15, 0.15), rtol=1e-9)


def test_units_of_x_change_nothing() -> None:
    y = 1 + 2 * (X / X[0]) ** -0.3 + np.array([0.02, -0.01, 0.0, 0.03, -0.02, 0.01])
    here, there = fit_power_law(X, y), fit_power_law(X * 1e9, y)
    np.testing.assert_allclose(here(X), there(X * 1e9), rtol=1e-12)
    assert here.exponent == there.exponent


def test_two_different_x_or_one_at_zero_are_refused() -> None:
    for x in ([1.0, 1.0, 2.0], [0.0, 1.0, 2.0]):
        with pytest.raises(UserError, match="at least 3 different positive"):
            fit_power_law(np.array(x), np.ones(3))


def test_the_same_seed_gives_the_same_laws_and_another_others() -> None:
    y = 1 + 2 * (X / X[0]) ** -0.3 + np.array([0.02, -0.01, 0.0, 0.03, -0.02, 0.01])
    first = bootstrap(X, y, 7, 3)
    assert first.shape == (7, 3)
    np.testing.assert_array_equal(first, bootstrap(X, y, 7, 3))
    assert not np.array_equal(first, bootstrap(X, y, 7, 4))
    with pytest.raises(UserError, match="use 4 or more"):
        bootstrap(X[:3], y[:3], 7, 3)


def test_a_draw_is_the_fit_and_its_residuals_made_larger() -> None:
    x, y = X[:4], np.array([3.0, 2.4, 2.1, 1.8])
    law = fit_power_law(x, y)
    drawn = law(x) + np.random.default_rng(9).choice(2 * (y - law(x)), 4)  # √(4 / (4 - 3)) = 2
    np.testing.assert_array_equal(bootstrap(x, y, 1, 9)[0], fit_power_law(x, drawn))


def test_without_noise_all_draws_are_the_law_itself() -> None:
    law = PowerLaw(0.5, 40.0, float(EXPONENTS[200]))
    laws = bootstrap(X, law(X), 5, 0)
    np.testing.assert_allclose(laws[:, 2], law.exponent)
    low, high = band(laws, np.array([1e12, 1e15]))
    np.testing.assert_allclose(high - low, 0, atol=1e-9)


def test_a_band_grows_beyond_the_runs_and_holds_the_truth_about_as_often_as_it_says() -> None:
    law, rng = PowerLaw(0.8, 2 * X[0] ** 0.25, 0.25), np.random.default_rng(1)
    x = np.concatenate([np.repeat(X, 2)])
    inside, width = 0, []
    for seed in range(60):
        laws = bootstrap(x, law(x) + 0.03 * rng.standard_normal(len(x)), 60, seed)
        low, high = band(laws, np.array([1e11, 1e13]), 0.8)
        inside += bool(low[0] <= law(1e11) <= high[0])
        width.append(high - low)
    assert 0.6 <= inside / 60 <= 0.95
    assert np.mean(width, 0)[1] > 3 * np.mean(width, 0)[0]
    wide = band(laws, np.array([1e11]), 0.95)
    assert wide[0] < low[0] < high[0] < wide[1]
