"""Bits per byte: the loss of a model on text, independent of its tokenizer.

bpb = Σ nats / (ln 2 · Σ bytes) over all targets that stand for text; special tokens count for neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator

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
    nats, size = 0.0, 0
    for text_nats, text_bytes, *_ in _sums(eval_step, params, batches, token_bytes):
        nats, size = nats + text_nats, size + text_bytes
    return nats / (math.log(2) * size) if size else math.inf


def mean_loss(eval_step: Callable, params: dict, batches: Iterable, token_bytes: np.ndarray) -> float:
    """Mean cross-entropy in nats over all targets ≥ 0, special tokens included; NaN when there are none."""
    return loss_and_bits(eval_step, params, batches, token_bytes)[0]


def loss_and_bits(eval_step: Callable, params: dict, batches: Iterable, token_bytes: np.ndarray) -> tuple[float, float]:
    """(`mean_loss`, `bits_per_byte`) from one reading of the batches; NaN where there is nothing to count."""
    return per_token_and_byte(_sums(eval_step, params, batches, token_bytes))


def per_token_and_byte(sums: Iterable[tuple[float, int, float, int]]) -> tuple[float, float]:
    """(nats a token, bits a byte) of batches, of which each tells four sums; NaN where there is nothing to count.

    The sums: nats of the targets that stand for text, bytes of these, nats of all targets, number of all targets.
    """
    nats, size, total, count = 0.0, 0, 0.0, 0
    for text_nats, text_bytes, all_nats, targets in sums:
        nats, size = nats + text_nats, size + text_bytes
        total, count = total + all_nats, count + targets
    return (total / count if count else math.nan), (nats / (math.log(2) * size) if size else math.nan)


def _sums(
    eval_step: Callable, params: dict, batches: Iterable, token_bytes: np.ndarray
) -> Iterator[tuple[float, int, float, int]]:
    """The four sums of each batch as Python numbers."""
    for inputs, targets in batches:
        check_preempted()
        nats, size, total, count = jax.device_get(eval_step(params, inputs, targets, token_bytes))
        yield float(nats), int(size), float(total), int(count)
