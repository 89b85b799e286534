"""Schedules against nanochat's table, and the shapes every schedule must have."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat_lib.errors import UserError
from nanochat_lib.presets import OptimConfig, RLConfig, SFTConfig, preset
from nanochat_lib.schedules import Hyper, base_schedule, rl_schedule, sft_schedule, transferred

# nanochat's d12: 2520 steps. step: (lr factor, momentum, weight decay)
TABLE = {
    0: (0.025, 0.85, 0.28),
    39: (1, 0.8617, 0.279835),
    200: (1, 0.91, 0.275671),
    399: (1, 0.9697, 0.263034),
    882: (1, 0.97, 0.203559),
    1260: (0.780769, 0.953846, 0.14),
    2519: (0.050580, 0.900043, 0.0),
}


@pytest.mark.parametrize("step", TABLE)
def test_base_schedule_equals_nanochat(step):
    hyper = base_schedule(step, 2520, OptimConfig())
    assert hyper == pytest.approx(TABLE[step], abs=5e-7)
    assert all(type(value) is float for value in hyper)


@pytest.mark.parametrize("total", [1, 2, 10, 45, 100, 700, 2520])
@pytest.mark.parametrize("recipe", ["head", "recipe4"])
@pytest.mark.parametrize("ratio", [0.0, 0.05, 0.5])
def test_base_rate_never_rises_after_warmup_and_stays_positive(total, recipe, ratio):
    cfg = OptimConfig(warmup_ratio=ratio)
    warmup = round(ratio * total) if ratio else 40
    run = [base_schedule(step, total, cfg, recipe) for step in range(total)]
    rates = [hyper.lr for hyper in run]
    assert all(0 < rate <= 1 for rate in rates)
    assert rates[:warmup] == sorted(rates[:warmup])
    assert rates[warmup:] == sorted(rates[warmup:], reverse=True)
    decays = [hyper.weight_decay for hyper in run]
    assert decays == sorted(decays, reverse=True) and decays[0] == cfg.weight_decay
    assert all(0.85 <= hyper.momentum <= 0.97 for hyper in run)


def test_ten_steps_without_warmup_fall_from_one_to_the_final_fraction():
    cfg = OptimConfig(warmup_steps=0, warmdown_ratio=1.0, final_lr_frac=0.1)
    rates = [base_schedule(step, 10, cfg).lr for step in range(10)]
    assert rates == pytest.approx([1 - 0.09 * step for step in range(10)])
    assert rates[0] == 1 and rates == sorted(rates, reverse=True)


def test_warmup_is_counted_in_steps_or_as_a_share():
    assert base_schedule(9, 1000, OptimConfig()).lr == 10 / 40
    assert base_schedule(9, 1000, OptimConfig(warmup_ratio=0.05)).lr == 10 / 50
    assert base_schedule(0, 1000, OptimConfig(warmup_steps=0)).lr == 1


def test_plateau_ends_exactly_where_the_warmdown_begins():
    cfg = OptimConfig(warmup_steps=0, warmdown_ratio=0.5, final_lr_frac=0.0)
    assert [base_schedule(step, 10, cfg).lr for step in (5, 6, 9)] == [1, 4 / 5, 1 / 5]
    assert base_schedule(9, 10, replace(cfg, warmdown_ratio=0.0)) == pytest.approx(
        (1, 0.85 + 0.12 * 9 / 400, 0.28 * 0.02447174), rel=1e-6
    )


def test_momentum_rises_to_step_400_even_inside_the_warmdown():
    """500 steps: the warm-down begins at 175, yet the rise goes on to 400 and only then the fall takes over."""
    momenta = [base_schedule(step, 500, OptimConfig()).momentum for step in (175, 399, 400, 499)]
    assert momenta == pytest.approx([0.9025, 0.9697, 0.97 - 0.07 * 225 / 325, 0.97 - 0.07 * 324 / 325])


def test_recipe4_has_its_own_momentum_and_a_linear_decay():
    cfg = OptimConfig(weight_decay=0.2, warmup_steps=0, warmdown_ratio=0.5, final_lr_frac=0.0)
    assert base_schedule(0, 1000, cfg, "recipe4") == pytest.approx((1, 0.85, 0.2))
    assert base_schedule(150, 1000, cfg, "recipe4") == pytest.approx((1, 0.90, 0.17))
    assert base_schedule(999, 1000, cfg, "recipe4") == pytest.approx((1 / 500, 0.95, 0.2 / 1000))


def test_sft_follows_progress_for_the_rate_and_steps_for_the_momentum():
    cfg = SFTConfig(lr_frac=0.8, warmup_ratio=0.1, warmdown_ratio=0.5, final_lr_frac=0.0)
    assert sft_schedule(0.0, 0, cfg) == pytest.approx((0.8e-7, 0.85, 0))
    assert sft_schedule(0.05, 30, cfg) == pytest.approx((0.4, 0.86, 0), rel=1e-6)
    assert sft_schedule(0.5, 300, cfg) == pytest.approx((0.8, 0.95, 0))
    assert sft_schedule(0.75, 900, cfg) == pytest.approx((0.4, 0.95, 0))
    assert sft_schedule(1.2, 901, cfg) == pytest.approx((0, 0.95, 0))
    assert sft_schedule(0.5, 0, SFTConfig(momentum_steps=0)).momentum == 0.95
    rates = [sft_schedule(i / 100, i, SFTConfig()).lr for i in range(101)]
    assert rates == sorted(rates, reverse=True) and rates[0] == 0.8 and rates[-1] == 0


def test_rl_falls_linearly_to_zero():
    run = [rl_schedule(step, 467, RLConfig()) for step in range(467)]
    assert run[0] == Hyper(0.05, 0.95, 0.0)
    assert run[-1].lr == pytest.approx(0.05 / 467)
    rates = [hyper.lr for hyper in run]
    assert rates == sorted(rates, reverse=True) and min(rates) > 0


TRAPEZOID = OptimConfig(schedule="trapezoid", warmup_ratio=0.05, warmdown_ratio=0.5, final_lr_frac=0.05)
COSINE = replace(TRAPEZOID, schedule="cosine")


def test_trapezoid_of_the_large_run():
    """25,000 steps: 1,250 up, 11,250 flat, 12,500 down to 5 %; a straight line passes each of these points."""
    found = {step: base_schedule(step, 25_000, TRAPEZOID).lr for step in (0, 624, 1249, 1250, 12_499, 18_749, 24_999)}
    assert found == pytest.approx({0: 0.0008, 624: 0.5, 1249: 1, 1250: 1, 12_499: 1, 18_749: 0.525, 24_999: 0.05})
    assert base_schedule(12_500, 25_000, TRAPEZOID).lr == pytest.approx(1 - 0.95 / 12_500)


def test_cosine_by_hand():
    """1,000 steps, 50 up: the 950 after them fall through the quarters of half a cosine."""
    found = [base_schedule(49 + quarter * 190, 1000, replace(COSINE, final_lr_frac=0.1)).lr for quarter in range(6)]
    assert found == pytest.approx([0.1 + 0.9 * (1 + math.cos(math.pi * q / 5)) / 2 for q in range(6)])
    assert base_schedule(24, 1000, COSINE).lr == 0.5 and base_schedule(999, 1000, COSINE).lr == 0.05
    assert base_schedule(524, 1000, COSINE).lr == pytest.approx((1 + 0.05) / 2)  # half-way down


@pytest.mark.parametrize("schedule", ["trapezoid", "cosine"])
def test_trapezoid_and_cosine_leave_momentum_and_decay_alone(schedule):
    for recipe in ("head", "recipe4"):
        run = [base_schedule(step, 900, replace(TRAPEZOID, schedule=schedule), recipe) for step in range(900)]
        assert {(hyper.momentum, hyper.weight_decay) for hyper in run} == {(0.95, 0.28)}
        assert all(type(value) is float for hyper in run for value in hyper)


@given(
    st.sampled_from(["trapezoid", "cosine"]),
    st.integers(1, 300),
    st.integers(0, 400),
    st.sampled_from([0.0, 0.001, 0.05, 0.3, 1.0]),
    st.sampled_from([0.0, 0.001, 0.5, 0.7, 1.0]),
    st.sampled_from([0.0, 0.05, 1.0]),
)
def test_rates_rise_then_fall_without_a_jump_and_end_where_they_should(
    schedule, total, warmup_steps, warmup_ratio, warmdown_ratio, final
):
    cfg = OptimConfig(
        schedule=schedule, warmup_steps=warmup_steps, warmup_ratio=warmup_ratio, warmdown_ratio=warmdown_ratio,
        final_lr_frac=final,
    )  # fmt: skip
    rates = [base_schedule(step, total, cfg).lr for step in range(total)]
    warmup = round(warmup_ratio * total) if warmup_ratio else warmup_steps
    warmdown = round(warmdown_ratio * total) if schedule == "trapezoid" else total - warmup
    assert all(0 <= rate <= 1 for rate in rates)
    top = rates.index(max(rates))
    assert rates[: top + 1] == sorted(rates[: top + 1]) and rates[top:] == sorted(rates[top:], reverse=True)
    # No step changes by more than the steeper of the two slopes; half a cosine is π/2 times as steep as a line.
    steepest = max(1 / max(warmup, 1), (math.pi / 2 if schedule == "cosine" else 1) / max(warmdown, 1))
    assert all(abs(b - a) <= steepest + 1e-12 for a, b in zip(rates, rates[1:], strict=False))
    if warmup < total and warmdown > 0:
        assert rates[-1] == final
    if 0 < warmup <= total and warmup + warmdown <= total:
        assert rates[warmup - 1] == 1 and rates[0] == 1 / warmup
    if warmup >= total and schedule == "cosine":  # a warm-up longer than the run: it never gets further
        assert rates == [(step + 1) / warmup for step in range(total)]


def test_an_unknown_schedule_is_named():
    with pytest.raises(UserError, match="schedule 'linear' is unknown, use nanochat, trapezoid or cosine"):
        base_schedule(0, 10, OptimConfig(schedule="linear"))


@pytest.mark.parametrize(("step", "total"), [(-1, 10), (10, 10), (0, 0)])
def test_a_step_outside_the_run_is_named(step, total):
    for schedule, cfg in ((base_schedule, OptimConfig()), (rl_schedule, RLConfig())):
        with pytest.raises(UserError, match=f"step {step} .* {total} steps"):
            schedule(step, total, cfg)


def test_transfer_of_the_d24_speedrun():
    config = preset("gpu-8-d24")
    lrs = transferred(config.pretrain.optim, config.horizon())
    assert (lrs.matrix_lr, lrs.scalar_lr) == pytest.approx((0.0282843, 0.7071068), rel=1e-5)
    assert (lrs.embedding_lr, lrs.unembedding_lr) == pytest.approx((0.4242641, 0.0113137), rel=1e-5)
    assert lrs.weight_decay == pytest.approx(0.0597, abs=5e-5)
    assert transferred(lrs, config.horizon()) == lrs, "transferring twice must not scale twice"
    cpu = preset("cpu")
    assert transferred(cpu.pretrain.optim, cpu.horizon()) == cpu.pretrain.optim
