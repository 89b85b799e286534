"""The loop every training stage shares: batches in, one compiled step each, metrics, evaluations, checkpoints, resume.

What differs between pretraining, SFT and RL comes in as functions: the source of batches, the schedule, the evaluation.
"""

from __future__ import annotations

import json
import math
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import jax
import numpy as np

from nanochat_lib import checkpoint
from nanochat_lib.errors import UserError
from nanochat_lib.hardware import mfu, this_chip
from nanochat_lib.progress import Progress
from nanochat_lib.schedules import Hyper
from nanochat_lib.storage import TEMPORARY, atomic_write_text
from nanochat_lib.train_step import TrainState


class MetricsLog:
    """`metrics.jsonl`: one object a line, appended; the file a run's curves are drawn from."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def append(self, **values: object) -> None:
        line = json.dumps({name: plain(value) for name, value in values.items()})
        with open(self.path, "a", encoding="utf-8") as out:
            out.write(line + "\n")

    def read(self, stage: str | None = None) -> list[dict]:
        """All records (of one stage). A last line that a kill cut short is left out."""
        records = []
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    records.append(json.loads(line))
                except json.JSONDecodeError:
                    continue
        return [r for r in records if stage is None or r.get("stage") == stage]

    def rewind(self, stage: str, step: int) -> None:
        """Forgets what `stage` logged after `step`: a resumed run logs those steps again."""
        records = self.read()
        kept = [r for r in records if r.get("stage") != stage or r.get("step", 0) <= step]
        if len(kept) < len(records) or self.path.exists():
            atomic_write_text(self.path, "".join(json.dumps(r) + "\n" for r in kept))


def plain(value: object) -> object:
    """A JSON value: numpy scalars become Python's, non-finite numbers become null."""
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class StepBatch:
    """What one optimiser step needs: arrays of shape (A, B, T), and where the stream stands after it."""

    arrays: dict[str, np.ndarray]
    epoch: int = 1
    loader_state: Callable[[], dict] = dict  # where the stream stands after this batch; asked for when it is saved
    progress: float = 0.0  # share of the data consumed, for schedules that follow it
    log: dict = field(default_factory=dict)  # extra figures for the metrics line


@dataclass
class Stage:
    """What one training stage is made of."""

    name: str  # pretrain, sft, rl
    folder: Path  # its checkpoints
    steps: int
    step_fn: Callable  # train_step.make_train_step(...)
    hyper: Callable[[int, StepBatch], Hyper]
    batches: Callable[[dict | None, Callable[[], TrainState]], Iterator[StepBatch]]  # from a loader state
    metrics: MetricsLog
    meta: dict  # goes into every checkpoint: model configuration, tokenizer fingerprint, …
    evaluate: Callable[[int, TrainState], dict] | None = None
    eval_every: int = -1
    save_every: int = -1
    keep: int = 2
    log_every: int = 10
    flops_per_token: int = 0
    bytes_per_token: float = 0.0  # turns the training loss into bits per byte for the progress line


def resume(stage: Stage, like: TrainState) -> tuple[TrainState, dict] | None:
    """(state, meta) of the newest valid checkpoint of this stage, or None. Invalid ones are named and left alone."""
    step, problems = checkpoint.latest(stage.folder)
    for problem in problems:
        print(f"{stage.name}: checkpoint left alone: {problem}")
    if step is None:
        return None
    state, meta = checkpoint.load(stage.folder, step, like)
    for name, value in stage.meta.items():
        if meta.get(name) != value:
            raise UserError(
                f"{stage.folder}: checkpoint {step} has {name} {meta.get(name)!r}, this run has {value!r}; "
                "use another run folder"
            )
    print(f"{stage.name}: continuing from step {step}")
    return state, meta


def train(stage: Stage, state: TrainState) -> TrainState:
    """Runs `stage` to its last step, from its newest checkpoint when it has one.

    Evaluations happen before step 0, every `eval_every` steps and at the end; checkpoints every `save_every` steps and
    at the end. A loss that is not finite stops the run with a UserError; the checkpoints written before it stay.
    """
    stage.folder.mkdir(parents=True, exist_ok=True)
    for leftover in stage.folder.glob(f"*{TEMPORARY}*"):  # of a killed save; the run's folder is ours alone
        shutil.rmtree(leftover, ignore_errors=True)
    found = resume(stage, state)
    loader_state, start, seconds, tokens = None, 0, 0.0, 0
    if found:
        state, meta = found
        loader_state, start = meta["loader"], meta["step"]
        seconds, tokens = meta["seconds"], meta["tokens"]
    stage.metrics.rewind(stage.name, start if found else -1)
    holder = [state]  # the step donates its input, so rollouts must always ask for the present state
    batches = stage.batches(loader_state, lambda: holder[0])
    chip = this_chip()
    devices = len(jax.tree.leaves(state)[0].sharding.device_set)
    window_tokens, window_seconds = 0, 0.0
    try:
        with Progress(stage.steps, stage.name, start=start) as bar:
            if not found:
                evaluate(stage, 0, holder[0])
            for step in range(start, stage.steps):
                clock = time.perf_counter()
                batch = next(batches)
                hyper = stage.hyper(step, batch)
                arrays = {name: np.float32(getattr(hyper, name)) for name in ("lr", "momentum", "weight_decay")}
                holder[0], out = stage.step_fn(holder[0], batch.arrays, arrays)
                out = {name: value.item() for name, value in jax.device_get(out).items()}
                check_finite(stage, step, out)
                took = time.perf_counter() - clock
                done = step + 1
                seconds += took
                count = int(batch.arrays["targets"].size)
                tokens += count
                if step > start + 1:  # the first steps compile
                    window_tokens, window_seconds = window_tokens + count, window_seconds + took
                rate = window_tokens / window_seconds if window_seconds else None
                used = mfu(stage.flops_per_token, rate, devices, chip) if rate else None
                record = {
                    "stage": stage.name, "step": done, "loss": out["loss"], "lr": hyper.lr, "momentum": hyper.momentum,
                    "weight_decay": hyper.weight_decay,
                    "tokens": tokens, "tokens_per_s": rate, "mfu": used,
                    "grad_norm": out["grad_norm"], "epoch": batch.epoch, "seconds": seconds, **batch.log,
                }  # fmt: skip
                if done % max(stage.log_every, 1) == 0 or done == stage.steps:
                    stage.metrics.append(**record)
                    if done % (10 * max(stage.log_every, 1)) == 0:
                        window_tokens, window_seconds = 0, 0.0
                bar.update(1, **shown(stage, record, batch))
                last = done == stage.steps
                if last or (stage.eval_every > 0 and done % stage.eval_every == 0):
                    evaluate(stage, done, holder[0])
                if last or (stage.save_every > 0 and done % stage.save_every == 0):
                    meta = stage.meta | {
                        "step": done,
                        "loader": batch.loader_state(),
                        "seconds": seconds,
                        "tokens": tokens,
                    }
                    checkpoint.save(stage.folder, done, holder[0], meta, keep=stage.keep)
    finally:
        close = getattr(batches, "close", None)
        if close:
            close()
    return holder[0]


def shown(stage: Stage, record: dict, batch: StepBatch) -> dict:
    """The few figures of the progress line."""
    figures = {"loss": record["loss"]}
    if stage.bytes_per_token:
        figures["bpb"] = record["loss"] / math.log(2) / stage.bytes_per_token
    if record["tokens_per_s"]:
        figures["tok/s"] = round(record["tokens_per_s"])
    if record["mfu"]:
        figures["mfu"] = f"{record['mfu']:.0%}"
    return figures | {"epoch": batch.epoch} | batch.log


def evaluate(stage: Stage, step: int, state: TrainState) -> None:
    """Evaluates and logs, when the stage has an evaluation."""
    if stage.evaluate:
        figures = stage.evaluate(step, state)
        stage.metrics.append(stage=stage.name, step=step, event="eval", **figures)


def check_finite(stage: Stage, step: int, out: dict) -> None:
    """Stops the run as soon as loss or gradient is not a number."""
    for name in ("loss", "grad_norm"):
        if not math.isfinite(out[name]):
            kept, _ = checkpoint.latest(stage.folder)
            saved = f"the last good checkpoint is step {kept}" if kept is not None else "there is no checkpoint yet"
            raise UserError(
                f"{stage.name}: {name} is {out[name]} at step {step + 1}; {saved} in {stage.folder}. "
                "Lower the learning rates (pretrain.optim.*, sft.lr_frac, rl.lr_frac) and use a new run folder"
            )
