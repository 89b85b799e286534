"""Supervised fine-tuning: the base model learns the form of a conversation, and to answer in it.

Midtraining, nanochat's stage between pretraining and SFT in 2025, is the same with other settings (the section `mid`):
every token is trained, the mixture is large, the rates are its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from itertools import islice
from pathlib import Path

import numpy as np

from nanochat_lib import checkpoint, distributed, guards, loader, optim, packing, schedules
from nanochat_lib.evaluate.bpb import loss_and_bits
from nanochat_lib.gpt import param_shapes
from nanochat_lib.metrics import MetricsLog, first_and_last
from nanochat_lib.plan import compute_here
from nanochat_lib.presets import OptimConfig, RunConfig, SFTConfig
from nanochat_lib.price import price_here
from nanochat_lib.progress import Progress
from nanochat_lib.sharding import check_parameters, micro_batches, own_rows
from nanochat_lib.storage import atomic_write_json, read_json
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
    nothing = loader.Batch(np.zeros(shape, np.int32), np.full(shape, -1, np.int32), 1, 0, 1.0, {}, packing.NOTHING)
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


REPORT_AT_MOST = 50_000  # conversations that are rendered once more for the report


def stage_rates(stage: SFTConfig, base: OptimConfig) -> OptimConfig:
    """The optimiser's rates: pretraining's as they are given, not those scaled to its batch, or the stage's own."""
    own = {name: getattr(stage, name) for name in ("embedding_lr", "unembedding_lr", "matrix_lr")}
    return replace(base, **{name: rate for name, rate in own.items() if rate >= 0})


def one_pass_plan(
    path: Path, mixture: TaskMixture, tokenizer: Tokenizer, rows: int, length: int, parts: int, name: str
) -> dict:
    """{"steps", "dropped", "truncated"} of one pass over the mixture, found by rendering and packing all of it.

    Of a large mixture that takes minutes, so it is kept in `path` and taken from there by a restart.
    """
    few = [mixture[i] for i in range(0, len(mixture), max(len(mixture) // 16, 1))]
    settings = [tokenizer.fingerprint, len(mixture), rows, length, parts, distributed.count()]
    key = distributed.text_hash(settings + few)
    kept = distributed.from_first(lambda: read_json(path) if path.exists() else {})
    if kept.get("key") == key:
        return kept
    share = {"rank": distributed.index(), "world": distributed.count()}
    total = len(range(share["rank"], len(mixture), share["world"]))
    with Progress(total, f"{name}, counting", unit="conversation") if distributed.first() else nullcontext() as bar:
        told = bar.update if bar else lambda count: None
        report = loader.chat_report(
            mixture, tokenizer, length, buffer=loader.BUFFER_CONVERSATIONS, told=told, **share
        )  # fmt: skip
    steps = loader.chat_steps(report, rows, parts)
    every = distributed.gather(np.array([[steps, report.dropped, report.truncated]], np.int32))
    found = {
        "key": key,
        "steps": int(every[:, 0].max()),
        "dropped": int(every[:, 1].sum()),
        "truncated": int(every[:, 2].sum()),
    }
    if distributed.first():
        atomic_write_json(path, found)
    return found


def sft(
    config: RunConfig,
    tokenizer: Tokenizer,
    mixture: TaskMixture,
    held_out: TaskMixture,
    source: Path,
    folder: Path,
    metrics: MetricsLog,
    name: str = "sft",
) -> dict:
    """Trains the newest model in `source` on `mixture`, checkpoints in `folder`; returns the stage's figures.

    `name` is the stage and its section of the settings, "sft" or "mid". `held_out` is measured over the same kind of
    tokens as are trained. The optimiser starts from the source's own state (`warm_start`) or afresh.
    """
    stage: SFTConfig = getattr(config, name)
    mesh = open_mesh(config, tokenizer)
    model, params, source_step = checkpoint.load_model(source, tokenizer)
    check_parameters(mesh, param_shapes(model))
    devices = mesh.size if mesh else 1
    device_rows = stage.device_rows if stage.device_rows > 0 else config.pretrain.device_rows
    rows, length = device_rows * devices, model.sequence_len
    mine = own_rows(mesh, rows)
    compute = compute_here(config.compute, model, mesh, device_rows)
    dtype = compute.dtype
    batch_tokens = stage.batch_tokens if stage.batch_tokens > 0 else config.horizon(model.vocab_size).batch_tokens
    parts = micro_batches(batch_tokens, device_rows, length, devices, name)
    share = {"rank": distributed.index(), "world": distributed.count()}

    one_pass, steps = stage.steps <= 0, stage.steps
    counts = None
    if one_pass:
        path = folder.parent / "stages" / f"{name}-plan.json"
        counts = one_pass_plan(path, mixture, tokenizer, len(mine), length, parts, name)
        steps = counts["steps"]
    optimizer = optim.make_optimizer(model, stage_rates(stage, config.pretrain.optim), dtype, mesh=mesh)
    state = init_train_state(model, optimizer, params, mesh=mesh, masters=config.compute.masters)
    if stage.warm_start:
        warm, _ = checkpoint.load(source, source_step, state, verify=False)
        state = TrainState(state.params, warm.opt_state, state.step)

    token_bytes = tokenizer.token_bytes()
    eval_step = make_eval_step(model, dtype=dtype)
    kind = {"all_tokens": stage.all_tokens}
    with loader.ChatLoader(held_out, tokenizer, rows, length, one_pass=True, prefetch=0, **kind) as chats:
        count = max(stage.eval_tokens // (rows * length), 1)
        fixed = [(batch.inputs[mine].copy(), batch.targets[mine].copy()) for batch in islice(chats, count)]
    probed = guards.probe_rows(fixed[0], mine, device_rows)
    probe = guards.probe(eval_step, next(on_devices(mesh, [probed])), token_bytes)

    def evaluate(_step: int, state: TrainState) -> dict:
        loss, bits = loss_and_bits(eval_step, state.params, on_devices(mesh, fixed), token_bytes)
        return {"val_loss": loss, "val_bpb_chat": bits}

    def batches(loader_state: dict | None, _state: Callable[[], TrainState]) -> Iterator[StepBatch]:
        options = share | kind | {"one_pass": one_pass, "state": loader_state}
        stream = loader.ChatLoader(mixture, tokenizer, len(mine), length, **options)
        return chat_batches(stream, parts, (len(mine), length), loader_state)

    def hyper(step: int, batch: StepBatch) -> schedules.Hyper:
        # Only one process's own progress is known here, and the rates must be the same in all of them.
        progress = batch.progress if one_pass and distributed.count() == 1 else step / steps
        return schedules.sft_schedule(progress, step, stage)

    train(
        Stage.of(
            stage, model, tokenizer, {"base_step": source_step},
            name=name, folder=folder, durable=config.ops.durable,
            steps=steps, metrics=metrics, mesh=mesh, rows=rows, batches=batches,
            step_fn=make_train_step(model, optimizer, compute=compute, mesh=mesh), evaluate=evaluate, hyper=hyper,
            usd_hour=price_here(config.ops), guard_steps=config.ops.guard_steps, low_share=guards.LOW_SHARE,
            probe=probe, first_loss=guards.not_worse_than(model.vocab_size, probe(state.params)),
        ),
        state,
    )  # fmt: skip
    if counts is None and len(mixture) <= REPORT_AT_MOST:
        report = loader.chat_report(mixture, tokenizer, length)
        counts = {"dropped": report.dropped, "truncated": report.truncated}
    return first_and_last(metrics, name, ["val_loss", "val_bpb_chat"]) | {
        "mixture": stage.mixture,
        "steps": steps,
        "conversations": len(mixture),
        "dropped": counts and counts["dropped"],
        "truncated": counts and counts["truncated"],
    }
