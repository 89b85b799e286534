"""What a training run will cost where machines are taken away and new ones are hard to get.

A machine lives for an exponentially distributed time of mean `mtbf`, its mean time between failures: an hour is as
dangerous as any other. Work is kept by checkpoints; a machine that goes takes what was done since the last of them. The
next one is waited for, which costs nothing, and set up, which does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np

from nanochat_lib.errors import UserError
from nanochat_lib.hardware import CHIPS, PRICE_DATE, Chip
from nanochat_lib.price import price_of
from nanochat_lib.run_config import RunConfig
from nanochat_lib.sizing import flops_per_token

HOUR = 3600.0
MOST_TIMES = 1000.0  # as long as without failures: nobody waits for such a run


class Cost(NamedTuple):
    """Seconds of a run from the first request to the last checkpoint."""

    wall: float  # that pass
    paid: float  # in which there is a machine
    machines: float  # how many were needed


def checkpoint_interval(save: float, mtbf: float) -> float:
    """Seconds of work between checkpoints that cost `save` seconds each, for the least time lost: √(2·save·mtbf).

    Saving costs the share save / interval, a failure on average half an interval (Young, 1974; Daly, 2006, gives the
    next terms, which matter when `save` is not small beside `mtbf`).
    """
    return math.sqrt(2 * save * mtbf)


def uninterrupted(seconds: float, mtbf: float) -> float:
    """Machine time that is spent, on average, until `seconds` have passed in a row without a failure.

    mtbf · (e^(seconds / mtbf) - 1), from E = seconds·P(it lasts) + (its life, and E again)·P(it does not).
    """
    return seconds if math.isinf(mtbf) else mtbf * math.expm1(min(seconds / mtbf, 700.0))


def expected_cost(work: float, interval: float, save: float, setup: float, mtbf: float, wait: float) -> Cost:
    """The mean of `replay` over machines that live `mtbf` seconds and are waited for `wait` seconds, on average.

    A machine needs `setup` seconds before it works. Each piece of `interval` seconds of work (the last may be shorter)
    with its `save` is done when a machine has survived it; one that did not leaves a set-up to be paid as well.
    """
    whole, rest = divmod(work, interval)
    start = uninterrupted(setup, mtbf)
    paid = start + whole * (uninterrupted(setup + interval + save, mtbf) - start)
    if rest:
        paid += uninterrupted(setup + rest + save, mtbf) - start
    machines = 1 + paid / mtbf
    return Cost(paid + machines * wait, paid, machines)


def replay(
    work: float, interval: float, save: float, setup: float, lives: Sequence[float], waits: Sequence[float]
) -> Cost:
    """One run on machines whose lives, and the waits before them, are given; all in seconds.

    A machine is set up, then does pieces of `interval` seconds of work (the last may be shorter), each followed by a
    save of `save` seconds. A piece counts once it is saved: what a machine's end interrupts is done again by the next.
    Raises UserError when the machines do not suffice.
    """
    done = wall = paid = 0.0
    for machines, (life, wait) in enumerate(zip(lives, waits, strict=True), 1):
        clock = setup
        while done < work:
            piece = min(interval, work - done)
            if clock + piece + save > life:
                break
            clock += piece + save
            done += piece
        spent = clock if done >= work else life
        wall, paid = wall + wait + spent, paid + spent
        if done >= work:
            return Cost(wall, paid, machines)
    raise UserError(f"{len(lives)} machines did {done / work:.0%} of the work: save more often, or give more machines")


def simulate(
    work: float, interval: float, save: float, setup: float, mtbf: float, granted: float, ask: float,
    runs: int, seed: int,
) -> np.ndarray:  # fmt: skip
    """(runs, 3): wall seconds, paid seconds and machines of so many runs, drawn from `seed`.

    A machine is asked for every `ask` seconds, and each request is granted with probability `granted`, whatever came
    of the others.
    """
    rng = np.random.default_rng(seed)
    most = int(20 + 10 * expected_cost(work, interval, save, setup, mtbf, 0.0).machines)
    found = []
    for _ in range(runs):
        lives, waits = rng.exponential(mtbf, most), ask * rng.geometric(granted, most)
        found.append(replay(work, interval, save, setup, lives, waits))
    return np.array(found)


def mtbf_bounds(failures: int, hours: float, share: float = 0.9) -> tuple[float, float]:
    """(shortest, longest) mean time between failures, in hours, that so few or many failures in `hours` go with.

    The exact interval of a Poisson rate (Garwood, 1936): at the shortest as few failures have a chance of only
    (1 - share) / 2, at the longest as many have. Without failures there is no longest one: infinity.
    """
    tail = (1 - share) / 2

    def fewer(mean: float, count: int) -> float:
        """Probability of at most `count` failures where `mean` are expected."""
        return sum(math.exp(-mean + k * math.log(mean) - math.lgamma(k + 1)) for k in range(count + 1))

    def solve(chance: float, count: int) -> float:
        low, high = 1e-9, 10.0 * (failures + 10)
        for _ in range(200):
            middle = (low + high) / 2
            low, high = (middle, high) if fewer(middle, count) > chance else (low, middle)
        return low

    longest = hours / solve(1 - tail, failures - 1) if failures else math.inf
    return hours / solve(tail, failures), longest


class Plan(NamedTuple):
    """A run on rented machines, by arithmetic. Hours and dollars; dollars None where the table has no price."""

    work_hours: float  # of training, without any failure
    interval_minutes: float  # between checkpoints
    expected: Cost  # in hours
    usd_hour: float | None
    usd: float | None
    source: str  # where the price comes from, or why there is none


def plan(
    config: RunConfig, chip: Chip, devices: int, mfu: float, *, spot: bool = False, mtbf_hours: float = math.inf,
    save_seconds: float = 60.0, setup_minutes: float = 15.0, wait_minutes: float = 0.0,
) -> Plan:  # fmt: skip
    """Pretraining of `config` on `devices` chips that reach the share `mfu` of their bfloat16 peak.

    Without failures one checkpoint at the end is enough. Evaluation and the other stages come on top. What an hour
    costs is price.price_of's answer. UserError for terms that describe no machine, and for machines on which the run
    would not end in MOST_TIMES the time it takes without failures.
    """
    check_terms(devices, mfu, mtbf_hours, save_seconds, setup_minutes, wait_minutes)
    horizon = config.horizon()
    flops = flops_per_token(config.gpt_config()) * horizon.steps * horizon.batch_tokens
    work, mtbf = flops / (devices * chip.peak["bfloat16"] * mfu), mtbf_hours * HOUR
    interval = work if math.isinf(mtbf) else min(checkpoint_interval(save_seconds, mtbf), work)
    seconds = expected_cost(work, interval, save_seconds, setup_minutes * 60, mtbf, wait_minutes * 60)
    if not seconds.paid <= MOST_TIMES * (work + setup_minutes * 60):
        raise UserError(
            f"plan: with a failure every {mtbf_hours:g} h this run practically never ends: set-up, work and a save "
            "must pass without one; look for machines that last longer (--mtbf-hours)"
        )
    rate, source = price_of(replace(config.ops, spot=spot), chip, devices)
    cost = Cost(seconds.wall / HOUR, seconds.paid / HOUR, seconds.machines)
    return Plan(work / HOUR, interval / 60, cost, rate, rate and rate * cost.paid, source)


def check_terms(
    devices: int, mfu: float, mtbf_hours: float, save_seconds: float, setup_minutes: float, wait_minutes: float
) -> None:
    """UserError for the first number that describes no machine."""
    if not 0 < mfu <= 1:
        raise UserError(f"plan: an MFU of {mfu:g} is not a share of the chips' peak, use one above 0 and up to 1")
    if devices < 1:
        raise UserError(f"plan: {devices} devices train nothing, use 1 or more (--devices)")
    if not mtbf_hours > 0:
        raise UserError(f"plan: --mtbf-hours {mtbf_hours:g} is no time between failures, use one above 0, or none")
    if not 0 <= save_seconds < math.inf or (save_seconds == 0 and math.isfinite(mtbf_hours)):
        raise UserError(f"plan: --save-seconds {save_seconds:g} is no checkpoint's time, use one above 0")
    for name, minutes in (("setup", setup_minutes), ("wait", wait_minutes)):
        if not 0 <= minutes < math.inf:
            raise UserError(f"plan: --{name}-minutes {minutes:g} is no time, use 0 or more")


def print_plan(
    config: RunConfig, chip: str | None, devices: int | None, mfu: float, spot: bool, **terms: float
) -> None:
    """`nanochat plan`: the plan in words. `chip` and `devices` are the preset's own where they are not given."""
    chips = {known.name: known for known in CHIPS}
    name, devices = chip or config.target.chip, config.target.devices if devices is None else devices
    if name not in chips:
        what = f"preset {config.preset} is for any chip" if name == "any" else f"no peak is known of the chip {name!r}"
        raise UserError(f"plan: {what}; name one with --chip: {', '.join(chips)}")
    made, horizon = plan(config, chips[name], devices, mfu, spot=spot, **terms), config.horizon()
    often = "at the end" if math.isinf(terms["mtbf_hours"]) else f"every {made.interval_minutes:.0f} min"
    hourly = f"{made.source}; give it as -s ops.usd_per_hour=…"
    if made.usd_hour:
        known = "as ops.usd_per_hour says" if config.ops.usd_per_hour > 0 else f"{made.source} ({PRICE_DATE})"
        hourly = f"${made.usd_hour:.2f} an hour, {known}"
    lines = {
        "run": f"pretraining of {config.preset}: {horizon.steps:,} steps of {horizon.batch_tokens:,} tokens",
        "machine": f"{devices} × {name} at an MFU of {mfu:.1%}",
        "work": f"{made.work_hours:.1f} h without failures",
        "save": often,
        "on average": f"{made.expected.paid:.1f} h paid, {made.expected.wall:.1f} h with waiting, "
        f"{made.expected.machines:.1f} machines",
        "price": hourly,
        "in all": f"${made.usd:,.0f}, evaluation and the other stages not included" if made.usd else "?",
    }
    print("\n".join(f"{part:<12}{words}" for part, words in lines.items()))
