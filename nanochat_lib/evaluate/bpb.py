"""Bits per byte: the loss of a model on text, independent of its tokenizer.

bpb = Σ nats / (ln 2 · Σ bytes) over all targets that stand for text; special tokens count for neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import jax
import numpy as np

from nanochat_lib.runtime import check_preempted


def bits_per_byte(
    eval_step: Callable, params: dict, batches: Iterable[tuple[np.ndarray, np.ndarray]], token_bytes: np.ndarray
) -> float:
    """Bits per byte of `params` over `batches` of (inputs, targets), each (B, T) int32, targets -1 where ignored.

    `eval_step` is train_step.make_eval_step(config); `token_bytes` (V,) is Tokenizer.token_bytes(). Returns infinity
    when no target stands for a byte. On a mesh the parameters stay where training keeps them, and the batches are
    global arrays. In a training loop a preemption ends it between two batches (preempted.Preempted).
    """
    nats, count = 0.0, 0
    for inputs, targets in batches:
        check_preempted()
        step_nats, step_bytes, *_ = jax.device_get(eval_step(params, inputs, targets, token_bytes))
        nats, count = nats + float(step_nats), count + int(step_bytes)
    return nats / (math.log(2) * count) if count else math.inf


def mean_loss(eval_step: Callable, params: dict, batches: Iterable, token_bytes: np.ndarray) -> float:
    """Mean cross-entropy in nats over all targets ≥ 0, special tokens included; NaN when there are none."""
    total, count = 0.0, 0
    for inputs, targets in batches:
        check_preempted()
        *_, nll, n = jax.device_get(eval_step(params, inputs, targets, token_bytes))
        total, count = total + float(nll), count + int(n)
    return total / count if count else math.nan
