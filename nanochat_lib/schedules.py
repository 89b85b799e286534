"""Learning rate, Muon momentum and Muon weight decay of every step, as plain Python functions.

The compiled step receives the three numbers as arguments, so a changing value never compiles again. The rules are
nanochat's: a short warm-up, a plateau, a linear warm-down (trapezoid), momentum that rises early and falls in the
warm-down, weight decay that falls to zero (cosine; linear in recipe 4).
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

from nanochat_lib.errors import UserError
from nanochat_lib.presets import OptimConfig, RLConfig, SFTConfig
from nanochat_lib.sizing import Horizon


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
    """Hyper-parameters of pretraining step `step` (0 … total−1); `cfg.weight_decay` is the decay at step 0.

    Raises UserError when `step` lies outside the run.
    """
    check_step(step, total)
    warmup = round(cfg.warmup_ratio * total) if cfg.warmup_ratio > 0 else cfg.warmup_steps
    warmdown = round(cfg.warmdown_ratio * total)
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

    The learning rate follows the progress, the momentum the steps (0.85 → 0.95 over 300). `lr` contains
    `cfg.lr_frac`, so the optimiser is built with pretraining's rates. Muon's weight decay is zero.
    """
    progress = min(max(progress, 0.0), 1.0)
    if progress < cfg.warmup_ratio:
        factor = (progress + 1e-8) / cfg.warmup_ratio
    else:
        factor = falling(1 - progress, cfg.warmdown_ratio, cfg.final_lr_frac)
    return Hyper(cfg.lr_frac * factor, rising_momentum(step, 300, 0.85, 0.95), 0.0)


def rl_schedule(step: int, total: int, cfg: RLConfig) -> Hyper:
    """Hyper-parameters of RL step `step` (0 … total−1): the rate falls linearly from `cfg.lr_frac` to zero."""
    check_step(step, total)
    return Hyper(cfg.lr_frac * (1 - step / total), 0.95, 0.0)


def falling(left: float, warmdown: float, final: float) -> float:
    """1 while more than `warmdown` is left of the run, then linear to `final` at its end."""
    if left >= warmdown:
        return 1.0
    share = left / warmdown
    return share + (1 - share) * final


def rising_momentum(step: int, steps: int, first: float, last: float) -> float:
    return first + (last - first) * min(step / steps, 1.0)


def check_step(step: int, total: int) -> None:
    if not 0 <= step < total:
        raise UserError(f"schedule: step {step} is outside the run's {total} steps, use 0 to {total - 1}")
