"""Supervised fine-tuning: the base model learns the form of a conversation, and to answer in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from nanochat_lib import checkpoint, distributed, guards, loader, optim, schedules
from nanochat_lib.evaluate.bpb import mean_loss
from nanochat_lib.gpt import param_shapes
from nanochat_lib.metrics import MetricsLog, first_and_last
from nanochat_lib.plan import compute_here
from nanochat_lib.presets import RunConfig
from nanochat_lib.price import price_here
from nanochat_lib.sharding import check_parameters, micro_batches, own_rows
from nanochat_lib.tasks.common import TaskMixture
from nanochat_lib.tokenizer import Tokenizer
from nanochat_lib.train_step import TrainState, init_train_state, make_eval_step, make_train_step
from nanochat_lib.trainer import Stage, StepBatch, on_devices, open_mesh, to_step, train


def chat_batches(
    stream: loader.ChatLoader, micro_batches: int, shape: tuple[int, int], state: dict | None = None
) -> Iterator[StepBatch]:
    """Steps of A micro-batches of `shape` (b, T) each, without end, from a stream that began at `state`.

    Where a single pass ends, micro-batches without targets follow. They fill up the last step, and whole steps in a
    process whose share was packed into fewer rows than another's.
    """
    nothing = loader.Batch(np.zeros(shape, np.int32), np.full(shape, -1, np.int32), 1, 0, 1.0, {}, [])
    reached = state
    try:
        while True:
            group = list(islice(stream, micro_batches))
            step = to_step(group + [nothing] * (micro_batches - len(group)))
            if group:
                reached = group[-1]
                step = replace(step, epoch=reached.epoch, progress=reached.progress)
            yield replace(step, loader_state=lambda at=reached: at if isinstance(at, dict) else at.state)
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
    mesh = open_mesh(config, tokenizer)
    model, params, base_step = checkpoint.load_model(base_folder, tokenizer)
    check_parameters(mesh, param_shapes(model))
    devices = mesh.size if mesh else 1
    device_rows = stage.device_rows if stage.device_rows > 0 else config.pretrain.device_rows
    rows, length = device_rows * devices, model.sequence_len
    mine = own_rows(mesh, rows)
    compute = compute_here(config.compute, model, mesh, device_rows)
    dtype = compute.dtype
    batch_tokens = stage.batch_tokens if stage.batch_tokens > 0 else config.horizon(model.vocab_size).batch_tokens
    parts = micro_batches(batch_tokens, device_rows, length, devices, "sft")
    share = {"rank": distributed.index(), "world": distributed.count()}

    one_pass = stage.steps <= 0
    steps = stage.steps
    if one_pass:
        own_steps = loader.count_chat_steps(mixture, tokenizer, len(mine), length, parts, **share)
        steps = int(distributed.gather(np.array([own_steps], np.int32)).max())
    optimizer = optim.make_optimizer(model, config.pretrain.optim, dtype, mesh=mesh)  # rates as given, not batch-scaled
    state = init_train_state(model, optimizer, params, mesh=mesh, masters=config.compute.masters)
    warm, _ = checkpoint.load(base_folder, base_step, state, verify=False)
    state = TrainState(state.params, warm.opt_state, state.step)

    token_bytes = tokenizer.token_bytes()
    eval_step = make_eval_step(model, dtype=dtype)
    with loader.ChatLoader(held_out, tokenizer, rows, length, one_pass=True, prefetch=0) as chats:
        count = max(stage.eval_tokens // (rows * length), 1)
        fixed = [(batch.inputs[mine].copy(), batch.targets[mine].copy()) for batch in islice(chats, count)]
    probed = guards.probe_rows(fixed[0], mine, device_rows)
    probe = guards.probe(eval_step, next(on_devices(mesh, [probed])), token_bytes)

    def evaluate(_step: int, state: TrainState) -> dict:
        return {"val_loss": mean_loss(eval_step, state.params, on_devices(mesh, fixed), token_bytes)}

    def batches(loader_state: dict | None, _state: Callable[[], TrainState]) -> Iterator[StepBatch]:
        options = share | {"one_pass": one_pass, "state": loader_state}
        stream = loader.ChatLoader(mixture, tokenizer, len(mine), length, **options)
        return chat_batches(stream, parts, (len(mine), length), loader_state)

    def hyper(step: int, batch: StepBatch) -> schedules.Hyper:
        # Only one process's own progress is known here, and the rates must be the same in all of them.
        progress = batch.progress if one_pass and distributed.count() == 1 else step / steps
        return schedules.sft_schedule(progress, step, stage)

    train(
        Stage.of(
            stage, model, tokenizer, {"base_step": base_step},
            name="sft", folder=folder, durable=config.ops.durable,
            steps=steps, metrics=metrics, mesh=mesh, rows=rows, batches=batches,
            step_fn=make_train_step(model, optimizer, compute=compute, mesh=mesh), evaluate=evaluate, hyper=hyper,
            usd_hour=price_here(config.ops), guard_steps=config.ops.guard_steps, low_share=guards.LOW_SHARE,
            probe=probe, first_loss=guards.not_worse_than(model.vocab_size, probe(state.params)),
        ),
        state,
    )  # fmt: skip
    report = loader.chat_report(mixture, tokenizer, length)
    return first_and_last(metrics, "sft", ["val_loss"]) | {
        "steps": steps,
        "conversations": len(mixture),
        "dropped": report.dropped,
        "truncated": report.truncated,
    }
