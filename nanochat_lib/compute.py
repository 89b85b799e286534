"""How a program computes, as opposed to what: one static value that every function of the training path takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Compute:
    """Choices that change speed, memory and rounding, but not the formula.

    dtype: of activations and of the weights where they are used ("float32" or "bfloat16"). attention: its backend.
    fp8: the blocks' linear layers multiply in float8 (training only). loss_chunks: parts in which the logits are made.
    table_gradients: "xla" or "pallas", how the embedding tables' gradients are summed. remat: the blocks'
    elementwise work is done again in the backward pass instead of being stored.
    """

    dtype: str = "float32"
    attention: str = "xla"
    fp8: bool = False
    loss_chunks: int = 1
    table_gradients: str = "xla"
    remat: bool = False


PLAIN = Compute()
LOGIT_BYTES = {"cpu": 2**23, "gpu": 2**30, "tpu": 2**30}  # float32 logits that may exist at a time


def loss_chunks(setting: int, platform: str, rows: int, length: int, vocab_size: int) -> int:
    """Parts in which the logits of a micro-batch of `rows` rows are made: as set, or (-1) so many that they stay small.

    One part is the fastest on a TPU as long as it fits: every further one reads and writes the head's gradient again.
    """
    if setting > 0:
        return setting
    logits = rows * length * vocab_size * 4
    return max(1, min(-(-logits // LOGIT_BYTES.get(platform, 2**30)), length))
