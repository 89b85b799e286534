"""Bits per byte of a model on any text, and what it writes by itself."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np

from nanochat_lib.engine import Engine
from nanochat_lib.errors import UserError
from nanochat_lib.losses import IGNORED
from nanochat_lib.progress import Progress
from nanochat_lib.runtime import check_preempted
from nanochat_lib.tokenizer import Tokenizer

FREE_SAMPLES, FREE_TOKENS, FREE_SEED = 8, 128, 42  # unconditioned samples, as nanochat draws them


def read_text(path: Path) -> tuple[str, int]:
    """(the text of a file, its bytes as they are on the disk). UserError for one that is empty or not UTF-8."""
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from None
    if not data:
        raise UserError(f"{path} is empty: there is nothing to measure")
    try:
        return data.decode("utf-8"), len(data)
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text (byte {error.start:,}); convert it first") from None


def windows(ids: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """(inputs, targets), (R, context) each, that score every id but the first one exactly once; -1 elsewhere.

    A window begins half a context after the one before and scores only its second half (the first window all of it):
    so every id is predicted from at least half a context, or from all there is before it.
    """
    stride = max(context // 2, 1)
    rows: list[tuple[np.ndarray, np.ndarray]] = []
    scored, total = 0, len(ids) - 1  # targets are ids[1:]
    while scored < total:
        end = min(max(scored + stride, context), total)
        begin = max(end - context, 0)
        inputs, targets = np.full(context, ids[0], np.int32), np.full(context, IGNORED, np.int32)
        inputs[: end - begin] = ids[begin:end]
        targets[scored - begin : end - begin] = ids[scored + 1 : end + 1]
        rows.append((inputs, targets))
        scored = end
    return np.stack([inputs for inputs, _ in rows]), np.stack([targets for _, targets in rows])


def bpb_of_text(
    eval_step: Callable, params: dict, tokenizer: Tokenizer, text: str, size: int, context: int, rows: int, title: str
) -> dict:
    """Bits per byte of `text`: {"bpb", "bytes", "tokens", "bytes_per_token"}.

    `size` is the number of bytes of the original, by which the bits are divided, whatever a tokenizer makes of the text
    (it may replace what is not Unicode). `eval_step` is train_step.make_eval_step's. Infinity for a size of 0.
    """
    ids = np.asarray(tokenizer.encode(text, prepend=tokenizer.bos_id), np.int32)
    nats, every = 0.0, np.ones(tokenizer.vocab_size, np.int32)  # every token of the text counts
    if len(ids) > 1:
        inputs, targets = windows(ids, context)
        blank = -len(inputs) % rows
        inputs = np.pad(inputs, ((0, blank), (0, 0)))
        targets = np.pad(targets, ((0, blank), (0, 0)), constant_values=IGNORED)
        with Progress(len(inputs), title, unit="window") as bar:
            for first in range(0, len(inputs), rows):
                check_preempted()
                part = slice(first, first + rows)
                nats += float(jax.device_get(eval_step(params, inputs[part], targets[part], every)[2]))
                bar.update(rows)
    return {
        "bpb": nats / (math.log(2) * size) if size else math.inf,
        "bytes": size,
        "tokens": len(ids) - 1,
        "bytes_per_token": size / (len(ids) - 1) if len(ids) > 1 else math.nan,
    }


def continuations(engine: Engine, tokenizer: Tokenizer, prompts: Sequence[str], tokens: int) -> list[dict]:
    """The likeliest continuations of `prompts`, `tokens` long."""
    ids = [tokenizer.encode(prompt, prepend=tokenizer.bos_id) for prompt in prompts]
    rows = engine.generate_batch(ids, max_tokens=tokens, temperature=0.0).sequences
    return [
        {"kind": "prompted", "prompt": prompt, "text": tokenizer.decode(row[len(start) :])}
        for prompt, start, row in zip(prompts, ids, rows, strict=True)
    ]


def unconditioned(engine: Engine, tokenizer: Tokenizer) -> list[dict]:
    """What the model writes from nothing: 8 samples of 128 tokens at temperature 1."""
    start = [tokenizer.bos_id]
    tokens = min(FREE_TOKENS, engine.context - 1)
    out = engine.generate_batch([start], FREE_SAMPLES, max_tokens=tokens, temperature=1.0, seed=FREE_SEED)
    return [{"kind": "free", "prompt": "", "text": tokenizer.decode(row[1:])} for row in out.sequences]
