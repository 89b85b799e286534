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
    return loss_and_bits(eval_step, params, batches, token_bytes)[0]


def loss_and_bits(eval_step: Callable, params: dict, batches: Iterable, token_bytes: np.ndarray) -> tuple[float, float]:
    """(`mean_loss`, `bits_per_byte`) from one reading of the batches; NaN where there is nothing to count."""
    nats, size, total, count = 0.0, 0, 0.0, 0
    for inputs, targets in batches:
        check_preempted()
        found = jax.device_get(eval_step(params, inputs, targets, token_bytes))
        nats, size = nats + float(found[0]), size + int(found[1])
        total, count = total + float(found[2]), count + int(found[3])
    return (total / count if count else math.nan), (nats / (math.log(2) * size) if size else math.nan)
