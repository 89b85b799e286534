"""Supervised fine-tuning: the base model learns the form of a conversation, and to answer in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import jax
import numpy as np

from nanochat_lib import checkpoint, loader, optim, schedules
from nanochat_lib.compute import Compute
from nanochat_lib.errors import UserError
from nanochat_lib.evaluate.bpb import mean_loss
from nanochat_lib.hardware import compute_dtype
from nanochat_lib.presets import RunConfig
from nanochat_lib.pretrain import first_and_last, to_step
from nanochat_lib.sizing import GPTConfig, flops_per_token
from nanochat_lib.tasks.common import TaskMixture
from nanochat_lib.tokenizer import Tokenizer
from nanochat_lib.train_step import TrainState, init_train_state, make_eval_step, make_train_step
from nanochat_lib.trainer import MetricsLog, Stage, StepBatch, train


def load_model(folder: Path, tokenizer: Tokenizer) -> tuple[GPTConfig, dict, int]:
    """(model configuration, parameters, step) of the newest valid checkpoint in `folder`.

    Raises UserError when there is none, or when it was trained with another tokenizer.
    """
    step, problems = checkpoint.latest(folder)
    if step is None:
        found = f" ({'; '.join(problems)})" if problems else ""
        raise UserError(f"{folder} holds no valid checkpoint{found}; run the stage that writes it first")
    for problem in problems:
        print(f"{folder.name}: checkpoint left alone: {problem}")
    meta = checkpoint.load_meta(folder, step)
    checkpoint.check_tokenizer(meta, tokenizer.fingerprint)
    return GPTConfig.from_dict(meta["model"]), checkpoint.load_params(folder, step), step


def chat_batches(stream: loader.ChatLoader, micro_batches: int) -> Iterator[StepBatch]:
    """Steps of A micro-batches each; the last step of a single pass is filled up with micro-batches without targets."""
    try:
        while group := list(islice(stream, micro_batches)):
            missing = micro_batches - len(group)
            empty = replace(group[-1], targets=np.full_like(group[-1].targets, -1))
            step = to_step(group + [empty] * missing)
            yield replace(step, loader_state=lambda last=group[-1]: last.state)
    finally:
        stream.close()


def sft(
    config: RunConfig,
    tokenizer: Tokenizer,
    mixture: TaskMixture,
    held_out: TaskMixture,
    base_folder: Path,
    folder: Path,
    metrics: MetricsLog,
) -> dict:
    """Fine-tunes the newest base model on `mixture`, checkpoints in `folder`; returns the stage's figures.

    `held_out` is measured as mean loss over the assistant's tokens. The optimiser starts from the base model's own
    state, its rates from `sft.lr_frac` of pretraining's.
    """
    stage = config.sft
    model, params, _ = load_model(base_folder, tokenizer)
    dtype = compute_dtype(config.compute.dtype, jax.default_backend())
    rows = stage.device_rows if stage.device_rows > 0 else config.pretrain.device_rows
    length = model.sequence_len
    batch_tokens = stage.batch_tokens if stage.batch_tokens > 0 else config.horizon(model.vocab_size).batch_tokens
    micro_batches = batch_tokens // (rows * length)

    def stream(task: TaskMixture, **options: object) -> loader.ChatLoader:
        return loader.ChatLoader(task, tokenizer, rows, length, **options)

    one_pass = stage.steps <= 0
    steps = stage.steps if stage.steps > 0 else loader.count_chat_steps(mixture, tokenizer, rows, length, micro_batches)
    optimizer = optim.make_optimizer(model, config.pretrain.optim, dtype)  # the rates as given, not batch-scaled
    state = init_train_state(model, optimizer, params)
    base_step, _ = checkpoint.latest(base_folder)
    warm, _ = checkpoint.load(base_folder, base_step, state)
    state = TrainState(state.params, warm.opt_state, state.step)

    token_bytes = tokenizer.token_bytes()
    eval_step = make_eval_step(model, dtype=dtype)
    with stream(held_out, one_pass=True, prefetch=0) as chats:
        count = max(stage.eval_tokens // (rows * length), 1)
        fixed = [(batch.inputs, batch.targets) for batch in islice(chats, count)]

    def evaluate(_step: int, state: TrainState) -> dict:
        return {"val_loss": mean_loss(eval_step, state.params, fixed, token_bytes)}

    def batches(loader_state: dict | None, _state: Callable[[], TrainState]) -> Iterator[StepBatch]:
        return chat_batches(stream(mixture, one_pass=one_pass, state=loader_state), micro_batches)

    def hyper(step: int, batch: StepBatch) -> schedules.Hyper:
        progress = batch.progress if one_pass else step / steps
        return schedules.sft_schedule(progress, step, stage)

    state = train(
        Stage(
            name="sft",
            folder=folder,
            steps=steps,
            step_fn=make_train_step(model, optimizer, compute=Compute(dtype)),
            hyper=hyper,
            batches=batches,
            metrics=metrics,
            meta={"model": model.to_dict(), "tokenizer": tokenizer.fingerprint, "base_step": base_step},
            evaluate=evaluate,
            eval_every=stage.eval_every,
            save_every=stage.save_every,
            keep=stage.keep,
            log_every=stage.log_every,
            flops_per_token=flops_per_token(model),
        ),
        state,
    )
    report = loader.chat_report(mixture, tokenizer, length)
    return first_and_last(metrics.read("sft"), ["val_loss"]) | {
        "steps": steps,
        "conversations": len(mixture),
        "dropped": report.dropped,
        "truncated": report.truncated,
    }
