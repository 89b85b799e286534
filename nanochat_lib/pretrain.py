"""Pretraining: from documents to a base model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from itertools import islice
from pathlib import Path

import jax
import numpy as np

from nanochat_lib import distributed, guards, loader, optim, schedules
from nanochat_lib.corpus import Corpus, byte_bigram_bpb
from nanochat_lib.engine import Engine
from nanochat_lib.evaluate.bpb import bits_per_byte
from nanochat_lib.gpt import param_shapes
from nanochat_lib.kept_ids import KeptIds
from nanochat_lib.kernels.tiles import describe
from nanochat_lib.metrics import MetricsLog, first_and_last
from nanochat_lib.plan import compute_here
from nanochat_lib.presets import RunConfig
from nanochat_lib.price import price_here
from nanochat_lib.sharding import check_parameters, micro_batches, own_rows, replicate
from nanochat_lib.shards import ShardCorpus
from nanochat_lib.sizing import GPTConfig, count_params, flops_per_token
from nanochat_lib.tokenizer import Tokenizer
from nanochat_lib.tokenizer_input import MAX_DOC_CAP, capped
from nanochat_lib.train_step import TrainState, init_train_state, make_eval_step, make_train_step
from nanochat_lib.trainer import Stage, StepBatch, on_devices, open_mesh, to_step, train

SAMPLE_PROMPTS = (
    "The capital of France is",
    "The chemical symbol of gold is",
    "If yesterday was Friday, then tomorrow will be",
    "The opposite of hot is",
    "The planets of the solar system are:",
    "My favorite color is",
    "If 5*x + 3 = 13, then x is",
)
SAMPLE_TOKENS = 16
BIGRAM_CHARS = 50_000_000  # of a corpus that is read for the byte-bigram yardstick


def bpb_splits(corpus: Corpus) -> dict[str, str]:
    """Metric name -> split of the corpus it is measured on."""
    return {"val_bpb": "val"} | ({"val_bpb_world": "val-world"} if "val-world" in corpus.splits() else {})


def fixed_batches(
    corpus: Corpus,
    tokenizer: Tokenizer,
    split: str,
    rows: int,
    length: int,
    tokens: int,
    buffer_docs: int,
    mine: np.ndarray | slice = slice(None),
    kept: KeptIds | None = None,
) -> list[tuple[np.ndarray, np.ndarray]]:
    """The first `tokens` tokens of a split as (inputs, targets) batches, the same at every evaluation.

    `mine` are the rows of each batch that this process keeps; all processes read the same batches.
    """
    stream = loader.PretrainLoader(
        corpus, tokenizer, split, rows, length, buffer_docs, epochs=None, prefetch=0, kept=kept
    )
    count = max(tokens // (rows * length), 1)
    return [(batch.inputs[mine].copy(), batch.targets[mine].copy()) for batch in islice(stream, count)]


def kept_ids_of(corpus: Corpus, tokenizer: Tokenizer, wanted: bool = True) -> KeptIds | None:
    """The token ids that are kept of a corpus of shards, said in a line; None for other corpora or when not wanted."""
    if not (wanted and isinstance(corpus, ShardCorpus)):
        return None
    kept = KeptIds(corpus, tokenizer.fingerprint)
    distributed.say(kept.line())
    return kept


def step_batches(stream: loader.PretrainLoader, micro_batches: int) -> Iterator[StepBatch]:
    """Steps of A micro-batches each, from a stream without end."""
    try:
        while True:
            group = list(islice(stream, micro_batches))
            if len(group) < micro_batches:
                return
            step = to_step(group)
            yield replace(
                step, log={"shard": group[-1].shard} | ({"skipped": stream.dropped} if stream.dropped else {})
            )
    finally:
        stream.close()


def left_out(stream: loader.PretrainLoader, corpus: Corpus) -> int:
    """Documents that were read and had no text, over all processes, which call this together; says so if any."""
    count = int(distributed.gather(np.array([stream.dropped])).sum())
    if count:
        first = f"; first: {', '.join(corpus.report.broken[0])}" if corpus.report.broken else ""
        distributed.say(f"pretrain: {count:,} documents were left out, they are empty, null or broken{first}")
    return count


def samples(engine: Engine, tokenizer: Tokenizer, prompts: tuple[str, ...]) -> list[dict]:
    """Greedy continuations of `prompts`."""
    ids = [tokenizer.encode(prompt, prepend=tokenizer.bos_id) for prompt in prompts]
    rows = engine.generate_batch(ids, max_tokens=SAMPLE_TOKENS, temperature=0.0).sequences
    return [
        {"prompt": prompt, "text": tokenizer.decode(row[len(start) :])}
        for prompt, start, row in zip(prompts, ids, rows, strict=True)
    ]


def pretrain(
    config: RunConfig,
    tokenizer: Tokenizer,
    corpus: Corpus,
    folder: Path,
    metrics: MetricsLog,
    prompts: tuple[str, ...] = SAMPLE_PROMPTS,
) -> dict:
    """Trains the base model of `config` on `corpus` into checkpoints in `folder`; returns the stage's figures.

    Continues from the newest valid checkpoint when there is one. Every `pretrain.sample_every` steps, at an evaluation,
    continuations of `prompts` go into the metrics. Raises UserError before step 0 when the corpus holds
    fewer tokens than `data.epochs` readings of it can give.
    """
    stage, data = config.pretrain, config.data
    model = config.gpt_config(tokenizer.vocab_size)
    plan = config.horizon(tokenizer.vocab_size)
    mesh = open_mesh(config, tokenizer, corpus=corpus.fingerprint)
    check_parameters(mesh, param_shapes(model))
    compute = compute_here(config.compute, model, mesh, stage.device_rows)
    dtype = compute.dtype
    devices = mesh.size if mesh else 1
    rows, length = stage.device_rows * devices, model.sequence_len
    mine = own_rows(mesh, rows)
    parts = micro_batches(plan.batch_tokens, stage.device_rows, length, devices)
    kept = kept_ids_of(corpus, tokenizer, config.ops.kept_ids)
    loader.check_enough(
        corpus,
        tokenizer,
        plan.steps * plan.batch_tokens,
        data.epochs,
        sequence_len=length,
        buffer_docs=data.buffer_docs,
        world=distributed.count(),
    )

    rates = schedules.transferred(stage.optim, plan)
    optimizer = optim.make_optimizer(model, rates, dtype, mesh=mesh)
    state = init_train_state(model, optimizer, jax.random.key(config.seed), mesh=mesh, masters=config.compute.masters)
    token_bytes = tokenizer.token_bytes()
    eval_step = make_eval_step(model, dtype=dtype)
    held_out = {
        name: fixed_batches(corpus, tokenizer, split, rows, length, stage.eval_tokens, data.buffer_docs, mine, kept)
        for name, split in bpb_splits(corpus).items()
    }
    fixed = guards.probe_rows(held_out["val_bpb"][0], mine, stage.device_rows)

    def evaluate(step: int, state: TrainState) -> dict:
        if stage.sample_every > 0 and step and (step % stage.sample_every == 0 or step == plan.steps):
            engine = Engine(model, replicate(state.params, dtype), tokenizer, dtype=dtype)
            with distributed.own_pace():
                written = samples(engine, tokenizer, prompts)
            metrics.append(stage="pretrain", step=step, event="samples", samples=written)
        return {
            name: bits_per_byte(eval_step, state.params, on_devices(mesh, batches), token_bytes)
            for name, batches in held_out.items()
        }

    streams: list[loader.PretrainLoader] = []

    def batches(loader_state: dict | None, _state: Callable[[], TrainState]) -> Iterator[StepBatch]:
        stream = loader.PretrainLoader(
            corpus, tokenizer, "train", len(mine), length, data.buffer_docs, epochs=data.epochs, state=loader_state,
            rank=distributed.index(), world=distributed.count(), kept=kept,
        )  # fmt: skip
        streams.append(stream)
        return step_batches(stream, parts)

    state = train(
        Stage.of(
            stage, model, tokenizer, {"corpus": corpus.fingerprint},
            name="pretrain", folder=folder, durable=config.ops.durable,
            steps=plan.steps, metrics=metrics, mesh=mesh, rows=rows, batches=batches,
            step_fn=make_train_step(model, optimizer, compute=compute, mesh=mesh), evaluate=evaluate,
            hyper=lambda step, _batch: schedules.base_schedule(step, plan.steps, rates, model.recipe),
            bytes_per_token=bytes_per_token(held_out["val_bpb"], token_bytes),
            usd_hour=price_here(config.ops), guard_steps=config.ops.guard_steps,
            first_loss=guards.near_uniform(model.vocab_size),
            probe=guards.probe(eval_step, next(on_devices(mesh, [fixed])), token_bytes),
        ),
        state,
    )  # fmt: skip
    return first_and_last(metrics, "pretrain", list(held_out)) | {
        "steps": plan.steps,
        "skipped": left_out(streams[-1], corpus),
        "params": count_params(model),
        "flops_per_token": flops_per_token(model),
        "model": model.to_dict(),
        "compute": asdict(compute),
        "attention": attention_note(compute.attention, model),
        "byte_bigram_bpb": bigram_yardstick(corpus) if config.evaluation.bigram else None,
        "samples": samples(Engine(model, replicate(state.params, dtype), tokenizer, dtype=dtype), tokenizer, prompts),
    }


def attention_note(backend: str, model: GPTConfig) -> str:
    """The attention backend, with its tiles where they were chosen for the chip."""
    name, _, chip = backend.partition(":")
    if name != "splash":
        return backend
    lines = describe(chip, model.head_dim, model.sequence_len, model.windows)
    return f"{backend}, " + "; ".join(f"{window}: {tiles}" for window, tiles in lines.items())


def bigram_yardstick(corpus: Corpus) -> float:
    """Bits per byte of a byte-bigram model on the validation text, fitted on training text of the same kind."""
    train = "train-real" if "train-real" in corpus.splits() else "train"
    texts = (capped(corpus.documents(split), BIGRAM_CHARS, MAX_DOC_CAP) for split in (train, "val"))
    return byte_bigram_bpb(*texts)


def bytes_per_token(batches: list[tuple[np.ndarray, np.ndarray]], token_bytes: np.ndarray) -> float:
    """Mean bytes a target stands for, to read a loss in nats as bits per byte."""
    targets = np.concatenate([targets.ravel() for _, targets in batches])
    return float(token_bytes[targets[targets >= 0]].mean())
