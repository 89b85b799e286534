"""Costs by formula against simulated machines and numerical minima, and one run by hand."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import numpy as np
import pytest

from nanochat_lib import cli
from nanochat_lib.budget import (
    HOUR,
    checkpoint_interval,
    expected_cost,
    mtbf_bounds,
    plan,
    replay,
    simulate,
    uninterrupted,
)
from nanochat_lib.errors import UserError
from nanochat_lib.hardware import CHIPS
from nanochat_lib.presets import preset
from nanochat_lib.sizing import REFERENCE_BATCH, batch_for

V6E = next(chip for chip in CHIPS if chip.name == "v6e")


def test_a_run_by_hand() -> None:
    # 25 s of work in pieces of 10, saves of 1, set-up 2. The first machine does 2 + 11, and 5 s more that are lost.
    assert replay(25, 10, 1, 2, [18, 100], [4, 6]) == (4 + 18 + 6 + (2 + 11 + 6), 18 + 19, 2)
    assert replay(25, 10, 1, 2, [30], [0]) == (30, 30, 1)  # exactly long enough
    assert replay(25, 10, 1, 2, [29.9, 8], [0, 0]) == (29.9 + 8, 29.9 + 8, 2)  # the last piece alone is done again
    assert replay(25, 10, 1, 2, [1, 40], [3, 5]) == (3 + 1 + 5 + 30, 31, 2)  # gone while it was set up


def test_too_few_machines_are_said() -> None:
    with pytest.raises(UserError, match="2 machines did 40% of the work"):
        replay(25, 10, 1, 2, [14, 12], [0, 0])
    with pytest.raises(ValueError, match="zip"):
        replay(25, 10, 1, 2, [14, 12], [0])


@pytest.mark.parametrize("interval", [300.0, 1500.0, 4000.0, 20000.0])
def test_the_formula_is_the_mean_of_many_runs(interval: float) -> None:
    work, save, setup, mtbf, ask, granted = 20000.0, 60.0, 900.0, 2 * HOUR, 600.0, 0.36
    runs = simulate(work, interval, save, setup, mtbf, granted, ask, 4000, 0)
    formula = expected_cost(work, interval, save, setup, mtbf, ask / granted)
    error = runs.std(0) / math.sqrt(len(runs))
    assert (np.abs(runs.mean(0) - formula) < 4 * error).all()


def test_simulations_are_drawn_from_their_seed() -> None:
    args = (9000.0, 900.0, 30.0, 300.0, 3600.0, 0.5, 60.0, 20)
    np.testing.assert_array_equal(simulate(*args, 1), simulate(*args, 1))
    assert not np.array_equal(simulate(*args, 1), simulate(*args, 2))


def test_without_failures_nothing_is_lost() -> None:
    assert expected_cost(1000, 300, 10, 50, math.inf, 7) == (1000 + 4 * 10 + 50 + 7, 1000 + 40 + 50, 1)
    assert expected_cost(900, 300, 10, 50, math.inf, 0).paid == 900 + 30 + 50
    assert uninterrupted(5.0, 1e12) == pytest.approx(5.0)
    assert math.isfinite(uninterrupted(1e9, 1.0))


def test_the_interval_is_close_to_the_cheapest() -> None:
    for save, mtbf in ((20.0, 3 * HOUR), (120.0, 12 * HOUR), (120.0, 2 * HOUR)):
        work = 40 * HOUR
        candidates = np.geomspace(60, 10 * HOUR, 400)
        cost = lambda t: expected_cost(work, work / round(work / t) if work > t else work, save, 600, mtbf, 0).paid  # noqa: B023, E731
        cheapest = min(cost(t) for t in candidates)
        assert cost(checkpoint_interval(save, mtbf)) < 1.003 * cheapest


def test_bounds_of_the_time_between_failures_are_the_published_ones() -> None:
    # Exact 90 % limits of a Poisson mean (Garwood, 1936): 0 → 2.996, 1 → 0.0513 … 4.744, 10 → 5.425 … 16.962.
    for failures, least, most in ((0, None, 2.9957), (1, 0.05129, 4.7439), (10, 5.4254, 16.9622)):
        shortest, longest = mtbf_bounds(failures, 100.0)
        assert shortest == pytest.approx(100 / most, rel=1e-4)
        assert longest == (math.inf if least is None else pytest.approx(100 / least, rel=1e-3))
    assert mtbf_bounds(1, 100.0, 0.5)[0] > mtbf_bounds(1, 100.0, 0.9)[0]


def test_a_plan_is_the_published_run() -> None:
    """The public port: 6,612 steps of 2^20 tokens on a v6e-8 at an MFU of 24.55 % took 5.28 hours, $22.8 spot."""
    config = preset("tpu-v6e-8-d24-h128")
    found = plan(config, V6E, 8, 0.2455, spot=True, save_seconds=0, setup_minutes=0)
    assert found.work_hours == pytest.approx(5.28, rel=0.01)
    assert found.usd == pytest.approx(22.8, rel=0.01)
    assert found.expected.wall == pytest.approx(found.work_hours)
    dear = plan(config, V6E, 8, 0.2455, save_seconds=0, setup_minutes=0)
    assert dear.usd == pytest.approx(114, rel=0.01)
    often = plan(config, V6E, 8, 0.2455, spot=True, mtbf_hours=4, wait_minutes=20)
    assert often.interval_minutes == pytest.approx(math.sqrt(2 * 60 * 4 * HOUR) / 60)
    assert often.expected.wall - often.expected.paid == pytest.approx(often.expected.machines / 3)
    assert often.usd == pytest.approx(often.usd_hour * often.expected.paid)
    assert often.usd > found.usd and often.expected.wall > often.expected.paid > often.work_hours
    with pytest.raises(UserError, match="an MFU of 25 is not a share"):
        plan(config, V6E, 8, 25)
    assert plan(config, replace(V6E, usd_hour_spot=None), 8, 0.25, spot=True).usd is None


def test_batches_are_the_published_ones() -> None:
    # Tokens a run at ratio 12, and the tokens a step that nanochat derives from them.
    tokens = {4: 138_412_608, 8: 503_318_784, 10: 841_485_840, 12: 1_321_210_944, 18: 3_892_850_064, 32: 20_132_696_064}
    batches = {4: 2**18, 8: 2**18, 10: 2**19, 12: REFERENCE_BATCH, 18: 2**20, 32: 2**21}
    assert {depth: batch_for(count, tokens[12]) for depth, count in tokens.items()} == batches


def test_the_command_says_what_the_plan_says(capsys) -> None:
    options = ["plan", "--preset", "tpu-v6e-8-d24-h128", "--mfu", "0.2455", "--spot"]
    assert cli.main([*options, "--save-seconds", "0", "--setup-minutes", "0"]) == 0
    out = capsys.readouterr().out
    assert "6,612 steps of 1,048,576 tokens" in out and "5.3 h without failures" in out
    assert "8 × v6e at an MFU of 24.6%" in out or "8 × v6e at an MFU of 24.5%" in out
    assert "$4.32 an hour, spot" in out and "$23, evaluation" in out and re.search(r"^save +at the end$", out, re.M)
    assert cli.main([*options, "--mtbf-hours", "4", "--save-seconds", "120"]) == 0
    assert re.search(r"^save +every 31 min$", capsys.readouterr().out, re.M)
    assert cli.main(["plan", "--preset", "tpu-v5p-8-d24", "-s", "ops.usd_per_hour=10"]) == 0
    assert "$10.00 an hour, as ops.usd_per_hour says" in capsys.readouterr().out
    assert cli.main(["plan", "--preset", "tpu-v5p-8-d24"]) == 0
    assert re.search(r"^in all +\?$", capsys.readouterr().out, re.M)
    assert cli.main(["plan", "--preset", "cpu"]) == 2
    assert "preset cpu is for any chip; name one with --chip: " in capsys.readouterr().err
    assert cli.main(["plan", "--preset", "cpu", "--chip", "h100", "--devices", "8"]) == 0
    assert "8 × h100" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--mtbf-hours 0", "--mtbf-hours 0 is no time between failures"),
        ("--mtbf-hours=-1", "--mtbf-hours -1 is no time between failures"),
        ("--mtbf-hours nan", "--mtbf-hours nan is no time between failures"),
        ("--mtbf-hours 1e-9", "practically never ends"),
        ("--mtbf-hours 4 --save-seconds 0", "--save-seconds 0 is no checkpoint's time"),
        ("--save-seconds=-1", "--save-seconds -1 is no checkpoint's time"),
        ("--save-seconds nan", "--save-seconds nan is no checkpoint's time"),
        ("--devices 0", "0 devices train nothing"),
        ("--devices=-3", "-3 devices train nothing"),
        ("--mfu nan", "an MFU of nan is not a share"),
        ("--setup-minutes=-5", "--setup-minutes -5 is no time"),
        ("--wait-minutes inf", "--wait-minutes inf is no time"),
        ("--chip abc", "no peak is known of the chip 'abc'"),
    ],
)
def test_terms_that_describe_no_machine_are_one_line(options, words, capsys) -> None:
    assert cli.main(["plan", "--preset", "tpu-v6e-8-d24", *options.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and words in err and err.count("\n") == 1


def test_an_own_machine_costs_nothing_that_is_known(capsys) -> None:
    assert cli.main(["plan", "--preset", "tpu-v6e-8-d24", "-s", "ops.usd_per_hour=0"]) == 0
    assert re.search(r"^price +own machine", capsys.readouterr().out, re.M)
