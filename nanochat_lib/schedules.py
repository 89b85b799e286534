"""Learning rate, Muon momentum and Muon weight decay of every step, as plain Python functions.

The compiled step receives the three numbers as arguments, so a changing value never compiles again. Pretraining has
three schedules:

- "nanochat": a short warm-up, a plateau, a linear warm-down; momentum that rises early and falls in the warm-down;
  weight decay that falls to zero (by a half-cosine; linearly in recipe 4).
- "trapezoid": only the rate changes: linear warm-up, plateau, linear warm-down. A public run of 3.8B parameters used
  it with 5 %, 50 % and a final 5 % of the peak.
- "cosine": only the rate changes: linear warm-up, then half a cosine. That run's first attempt fell to zero this way
  and starved the last 30 % of its steps; it is here to be compared.

The last two keep Muon's momentum at 0.95 and its weight decay as given. A step takes rate × decay off a weight, so even
a constant decay fades with the rate; nanochat found one that also falls by itself better, and has it in its schedule.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from nanochat_lib.errors import UserError
from nanochat_lib.presets import OptimConfig, RLConfig, SFTConfig
from nanochat_lib.sizing import Horizon

MOMENTUM = 0.95  # of Muon where a schedule leaves it alone


class Hyper(NamedTuple):
    """What changes from step to step; Python floats."""

    lr: float  # factor on every group's own learning rate
    momentum: float  # of Muon
    weight_decay: float  # of Muon; AdamW's decays are constants of their groups


def transferred(lrs: OptimConfig, horizon: Horizon) -> OptimConfig:
    """`lrs` carried from the reference batch to this run's: rates × lr_scale, Muon decay × decay_scale.

    Unchanged when `lrs.transfer` is off. The smear group's rate is absolute in nanochat and stays as it is.
    """
    if not lrs.transfer:
        return lrs
    rates = ("embedding_lr", "unembedding_lr", "matrix_lr", "scalar_lr")
    scaled = {name: getattr(lrs, name) * horizon.lr_scale for name in rates}
    return replace(lrs, weight_decay=lrs.weight_decay * horizon.decay_scale, transfer=False, **scaled)


def base_schedule(step: int, total: int, cfg: OptimConfig, recipe: str = "head") -> Hyper:
    """Hyper-parameters of pretraining step `step` (0 … total−1) by `cfg.schedule`.

    `cfg.weight_decay` is the decay at step 0; `recipe` matters to "nanochat" only. Raises UserError for an unknown
    schedule and for a `step` outside the run.
    """
    check_step(step, total)
    if cfg.schedule == "nanochat":
        return nanochat_schedule(step, total, cfg, recipe)
    if cfg.schedule == "trapezoid":
        return Hyper(trapezoid(step, total, cfg), MOMENTUM, cfg.weight_decay)
    if cfg.schedule == "cosine":
        return Hyper(cosine(step, total, cfg), MOMENTUM, cfg.weight_decay)
    raise UserError(f"schedule {cfg.schedule!r} is unknown, use nanochat, trapezoid or cosine")


def warmup_steps(total: int, cfg: OptimConfig) -> int:
    return round(cfg.warmup_ratio * total) if cfg.warmup_ratio > 0 else cfg.warmup_steps


def trapezoid(step: int, total: int, cfg: OptimConfig) -> float:
    """Rate factor: (step + 1)/warm-up, 1, then linear so that the last step has exactly `final_lr_frac`.

    Where warm-up and warm-down overlap, the smaller of the two holds: the rate never jumps.
    """
    warmup, warmdown = warmup_steps(total, cfg), round(cfg.warmdown_ratio * total)
    rise = min((step + 1) / max(warmup, 1), 1.0)
    return min(rise, falling(total - 1 - step, warmdown, cfg.final_lr_frac))


def cosine(step: int, total: int, cfg: OptimConfig) -> float:
    """Rate factor: (step + 1)/warm-up, then ½(1 + cos πp) from 1 to exactly `final_lr_frac` at the last step, p = 1.

    Stochastic gradient descent with warm restarts (arXiv:1608.03983), without restarts.
    """
    warmup = warmup_steps(total, cfg)
    if step < warmup:
        return (step + 1) / warmup
    share = 0.5 * (1 + math.cos(math.pi * (step + 1 - warmup) / (total - warmup)))
    return share + (1 - share) * cfg.final_lr_frac


def nanochat_schedule(step: int, total: int, cfg: OptimConfig, recipe: str) -> Hyper:
    """nanochat's own; the warm-up wins over the warm-down, and the rise of the momentum (400 steps) over its fall."""
    warmup, warmdown = warmup_steps(total, cfg), round(cfg.warmdown_ratio * total)
    if step < warmup:
        lr = (step + 1) / warmup
    else:
        lr = falling(total - step, warmdown, cfg.final_lr_frac)
    if recipe == "recipe4":
        momentum = rising_momentum(step, 300, 0.85, 0.95)
        return Hyper(lr, momentum, cfg.weight_decay * (1 - step / total))
    momentum = rising_momentum(step, 400, 0.85, 0.97)
    into_warmdown = step - (total - warmdown)
    if step >= 400 and warmdown and into_warmdown >= 0:
        momentum = 0.97 + (0.90 - 0.97) * into_warmdown / warmdown
    return Hyper(lr, momentum, cfg.weight_decay * 0.5 * (1 + math.cos(math.pi * step / total)))


def sft_schedule(progress: float, step: int, cfg: SFTConfig) -> Hyper:
    """Hyper-parameters of fine-tuning at `progress` (share of the data seen, 0 … 1) and optimiser step `step`.

    The learning rate follows the progress, the momentum the steps (0.85 → 0.95). `lr` contains
    `cfg.lr_frac`, so the optimiser is built with pretraining's rates. Muon's weight decay is zero.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < cfg.warmup_ratio:
        factor = (progress + 1e-8) / cfg.warmup_ratio
    else:
        factor = falling(1 - progress, cfg.warmdown_ratio, cfg.final_lr_frac)
    return Hyper(cfg.lr_frac * factor, rising_momentum(step, cfg.momentum_steps, 0.85, 0.95), 0.0)


def rl_schedule(step: int, total: int, cfg: RLConfig) -> Hyper:
    """Hyper-parameters of RL step `step` (0 … total−1): the rate falls linearly from `cfg.lr_frac` to zero."""
    check_step(step, total)
    return Hyper(cfg.lr_frac * (1 - step / total), MOMENTUM, 0.0)


def falling(left: float, warmdown: float, final: float) -> float:
    """1 while more than `warmdown` is left of the run, then linear to `final` at its end."""
    if left >= warmdown:
        return 1.0
    share = left / warmdown
    return share + (1 - share) * final


def rising_momentum(step: int, steps: int, first: float, last: float) -> float:
    return first + (last - first) * min(step / steps, 1.0) if steps > 0 else last


def check_step(step: int, total: int) -> None:
    if not 0 <= step < total:
        raise UserError(f"schedule: step {step} is outside the run's {total} steps, use 0 to {total - 1}")
