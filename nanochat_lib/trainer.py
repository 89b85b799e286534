"""The loop every training stage shares: batches in, one compiled step each, metrics, evaluations, checkpoints, resume.

What differs between pretraining, SFT and RL comes in as functions: the source of batches, the schedule, the evaluation.
With several processes all of them run this loop and decide alike; process 0 alone prints and writes the metrics.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from nanochat_lib import checkpoint, distributed, guards, loader, stall, stopping
from nanochat_lib.durable import RunCopy
from nanochat_lib.errors import UserError
from nanochat_lib.hardware import mfu, this_chip
from nanochat_lib.metrics import MetricsLog
from nanochat_lib.preempted import Preempted
from nanochat_lib.presets import PretrainConfig, RLConfig, RunConfig, SFTConfig, to_dict
from nanochat_lib.progress import Progress
from nanochat_lib.runtime import check_preempted
from nanochat_lib.schedules import Hyper
from nanochat_lib.sharding import global_batch, make_mesh
from nanochat_lib.sizing import GPTConfig, flops_per_token
from nanochat_lib.storage import TEMPORARY, clear_disk_errors
from nanochat_lib.tokenizer import Tokenizer
from nanochat_lib.train_step import TrainState


@dataclass
class StepBatch:
    """What one optimiser step needs: this process's rows, (A, b, T), and where its stream stands after them."""

    arrays: dict[str, np.ndarray]
    epoch: int = 1
    loader_state: Callable[[], dict] = dict  # where the stream stands after this batch; asked for when it is saved
    progress: float = 0.0  # share of the data consumed, for schedules that follow it
    log: dict = field(default_factory=dict)  # extra figures for the metrics line and the progress line
    quiet: dict = field(default_factory=dict)  # those for the metrics line alone


def to_step(group: list[loader.Batch]) -> StepBatch:
    """A loader batches of (b, T) as one step's arrays (A, b, T)."""
    last = group[-1]
    arrays = {name: np.stack([getattr(batch, name) for batch in group]) for name in ("inputs", "targets")}
    return StepBatch(arrays, last.epoch, lambda: last.state, last.progress)


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
    mesh: Mesh | None = None  # None: one device, which takes the batches as they are
    rows: int | None = None  # B of a micro-batch over all devices, when it is known beforehand
    evaluate: Callable[[int, TrainState], dict] | None = None
    eval_every: int = -1
    save_every: int = -1
    keep: int = 2
    keep_every: int = -1
    durable: str = ""  # where the run has its copy (ops.durable)
    log_every: int = 10
    flops_per_token: int = 0
    bytes_per_token: float = 0.0  # turns the training loss into bits per byte for the progress line
    guard_steps: int = 10  # guards.py: steps of each start that are checked whole
    first_loss: guards.FirstLoss | None = None  # where the loss of step 0 has to lie
    low_share: float = 0.0  # of trained positions, below which a line warns
    own_samples: bool = False  # batches are the model's own answers, which may repeat
    probe: Callable[[dict], float] | None = None  # the loss of a fixed batch, by which a restored state is known
    usd_hour: float | None = None  # what the machine costs; None: nothing is known, or it is an own one

    @classmethod
    def of(
        cls, settings: PretrainConfig | SFTConfig | RLConfig, model: GPTConfig, tokenizer: Tokenizer, meta: dict,
        **parts: Any,
    ) -> Stage:  # fmt: skip
        """A stage with the cadence of its settings, for a model and a tokenizer that every checkpoint names."""
        names = ("eval_every", "save_every", "keep", "keep_every", "log_every")
        cadence = {name: getattr(settings, name) for name in names}
        meta = {"model": model.to_dict(), "tokenizer": tokenizer.fingerprint} | meta
        return cls(meta=meta, flops_per_token=flops_per_token(model), **cadence, **parts)

    def due(self, every: int, done: int) -> bool:
        """Whether something that happens every so many steps, and at the end, happens after `done` of them."""
        return done == self.steps or (every > 0 and done % every == 0)


def open_mesh(config: RunConfig, tokenizer: Tokenizer, **hashes: str) -> Mesh | None:
    """Starts the processes, compares what they are about to run, and returns their devices' mesh (None: one device).

    `hashes` are compared too. Raises UserError when JAX does not find the kind of device that the run is for.
    """
    distributed.start()
    distributed.check_platform(config.target.kind)
    mesh = make_mesh(config.compute.fsdp)
    distributed.agree(config=distributed.text_hash(to_dict(config)), tokenizer=tokenizer.fingerprint, **hashes)
    return mesh if mesh.size > 1 else None


def on_devices(mesh: Mesh | None, batches: Iterable[tuple[np.ndarray, np.ndarray]]) -> Iterator[tuple]:
    """Evaluation batches (inputs, targets) of this process's rows, each as arrays over all devices."""
    for inputs, targets in batches:
        yield (inputs, targets) if mesh is None else tuple(global_batch(mesh, {"i": inputs, "t": targets}).values())


def prepare_folder(stage: Stage) -> checkpoint.Saver:
    """Makes the stage's folder, clears what a killed save left, and returns what writes its checkpoints.

    All processes share the folder, or the run has a copy through which they share what they save.
    """
    folder, copy = stage.folder, RunCopy.of(stage.durable, stage.folder.parent)
    with clear_disk_errors(folder):
        shared = distributed.is_shared(folder)
    if not shared and copy is None:
        distributed.shared_folder(folder)  # says which folder differs
    with distributed.everyone(), clear_disk_errors(folder):
        if copy is not None:
            copy.store.check()
        if distributed.first() or not shared:
            folder.mkdir(parents=True, exist_ok=True)
            for leftover in folder.glob(f"*{TEMPORARY}*"):  # the run's folder is ours alone
                shutil.rmtree(leftover, ignore_errors=True)
    return checkpoint.Saver(folder, copy, stage.keep, stage.keep_every, shared)


def resume(stage: Stage, saver: checkpoint.Saver, like: TrainState) -> tuple[TrainState, dict] | None:
    """(state, meta) of the newest valid checkpoint of this stage, or None. Invalid ones are named and left alone."""
    step, problems = saver.newest()
    for problem in problems:
        distributed.say(f"{stage.name}: checkpoint left alone: {problem}")
    if step is None:
        return None
    state, meta = checkpoint.load(stage.folder, step, like, verify=False)
    for name, value in stage.meta.items():
        if isinstance(value, dict):
            checkpoint.check_config(meta, value, name)
        elif meta.get(name) != value:
            raise UserError(
                f"{stage.folder}: checkpoint {step} has {name} {meta.get(name)!r}, this run has {value!r}; "
                "use another run folder"
            )
    distributed.say(f"{stage.name}: continuing from step {step}")
    before, now = meta.get("devices"), device_count(like)
    if before not in (None, now) and len(meta["processes"]) == distributed.count():
        distributed.say(
            f"{stage.name}: {now} devices go on where {before} stopped: same data, sums rounded differently"
        )
    return state, meta


def train(stage: Stage, state: TrainState) -> TrainState:
    """Runs `stage` to its last step, from its newest checkpoint when it has one.

    Evaluations happen before step 0, every `eval_every` steps and at the end; checkpoints every `save_every` steps and
    at the end. A loss that is not finite stops the run with a UserError; the checkpoints written before it stay.
    SIGTERM and Ctrl-C save and raise preempted.Preempted. All processes call this together, with states laid out on the
    same mesh.
    """
    with stopping.watching(), distributed.together(), stall.resting(), contextlib.ExitStack() as around:
        return _train(stage, state, around)


def _train(stage: Stage, state: TrainState, around: contextlib.ExitStack) -> TrainState:
    saver = prepare_folder(stage)
    found = resume(stage, saver, state)
    loader_state, start, seconds, tokens = None, 0, 0.0, 0
    entered = time.monotonic()
    if found:
        state, meta = found
        start, seconds, tokens = meta["step"], meta["seconds"], meta["tokens"]
        guards.check_restored(stage.name, stage.folder, state, meta, stage.probe)
        loader_state = own_stream(stage, meta["processes"])
    before = seconds
    stage.metrics.rewind(stage.name, start if found else -1)
    devices = device_count(state)
    if start < stage.steps:
        stage.metrics.start(stage.name, start, devices)
        stall.starts(stage.name, start, stage.steps)
    holder = [state]  # the step donates its input, so rollouts must always ask for the present state
    batches = stage.batches(loader_state, lambda: holder[0])
    chip = this_chip()
    window_tokens, window_seconds = 0, 0.0
    guard = guards.Guards(
        stage.name, stage.meta["model"]["vocab_size"], stage.guard_steps, stage.first_loss, stage.own_samples,
        stage.low_share,
    )  # fmt: skip
    done, unsaved = start, None  # the newest finished step, and what a stop here would have to save of it
    around.enter_context(stopping.deferred())
    try:
        with show_progress(stage, start) as bar:
            if not found or evaluation_missing(stage, start):
                evaluate(stage, start, holder[0])
            for step in range(start, stage.steps):
                clock = time.perf_counter()
                batch = next(batches)
                hyper = stage.hyper(step, batch)
                scalars = {name: np.float32(getattr(hyper, name)) for name in ("lr", "momentum", "weight_decay")}
                arrays = batch.arrays if stage.mesh is None else global_batch(stage.mesh, batch.arrays, stage.rows)
                count = arrays["targets"].size
                guard.before(step, batch.arrays)
                holder[0], out = stage.step_fn(holder[0], arrays, scalars)
                out = {name: value.item() for name, value in jax.device_get(out).items()}
                check_finite(stage, saver, step, out)
                guard.after(step, out, count)
                took = time.perf_counter() - clock
                done = step + 1
                seconds += took
                tokens += count
                stall.step(stage.name, done, stage.steps, took)
                if step > start + 1:  # the first steps compile
                    window_tokens, window_seconds = window_tokens + count, window_seconds + took
                rate = window_tokens / window_seconds if window_seconds else None
                used = mfu(stage.flops_per_token, rate, devices, chip) if rate else None
                record = {
                    "stage": stage.name, "step": done, "loss": out["loss"], "lr": hyper.lr, "momentum": hyper.momentum,
                    "weight_decay": hyper.weight_decay,
                    "tokens": tokens, "tokens_per_s": rate, "mfu": used,
                    "grad_norm": out["grad_norm"], "epoch": batch.epoch, "seconds": seconds,
                    "time": round(time.time(), 1), **batch.log, **batch.quiet,
                }  # fmt: skip
                if stage.usd_hour:
                    record["cost_usd"] = stage.usd_hour * (before + time.monotonic() - entered) / 3600
                if done % max(stage.log_every, 1) == 0 or done == stage.steps:
                    stage.metrics.append(**record)
                    if done % (10 * max(stage.log_every, 1)) == 0:
                        window_tokens, window_seconds = 0, 0.0
                if bar:
                    bar.update(1, **shown(stage, record, batch))
                unsaved = {"step": done, "seconds": seconds, "tokens": tokens}, batch
                check_preempted()
                if stage.due(stage.eval_every, done):
                    evaluate(stage, done, holder[0])
                if stage.due(stage.save_every, done):
                    save(stage, saver, holder[0], *unsaved)
                    unsaved = None
                saver.poll()
    except Preempted as stop:
        with stopping.saving():
            if unsaved:
                save(stage, saver, holder[0], *unsaved)
            saver.settle()
        raise stop.after(stage.name, start, done) from None
    finally:
        close = getattr(batches, "close", None)
        if close:
            close()
        with stopping.saving(), stall.phase("save"):
            saver.wait()
    return holder[0]


def own_stream(stage: Stage, saved: list[dict]) -> dict:
    """Where this process's stream goes on, from what each process had saved."""
    state, skipped = loader.share_states(saved, distributed.index(), distributed.count())
    if len(saved) != distributed.count():
        distributed.say(
            f"{stage.name}: {distributed.count()} processes go on where {len(saved)} stopped; the data are dealt out "
            f"anew, so their order is approximate: {skipped} items that some had not reached are left out"
        )
    return state


def save(stage: Stage, saver: checkpoint.Saver, state: TrainState, totals: dict, batch: StepBatch) -> None:
    """Begins a checkpoint: the state, the figures so far, and where each process's stream stands."""
    with stopping.saving(), stall.phase("save"):
        meta = stage.meta | totals | {"devices": device_count(state), "mark": guards.mark(state, stage.probe)}
        saver.save(totals["step"], state, meta, batch.loader_state())


def device_count(state: TrainState) -> int:
    """How many devices hold the state."""
    return len(jax.tree.leaves(state)[0].sharding.device_set)


def show_progress(stage: Stage, start: int) -> contextlib.AbstractContextManager[Progress | None]:
    """The progress bar, in process 0."""
    return Progress(stage.steps, stage.name, start=start) if distributed.first() else contextlib.nullcontext()


def shown(stage: Stage, record: dict, batch: StepBatch) -> dict:
    """The few figures of the progress line."""
    figures = {"loss": record["loss"]}
    if stage.bytes_per_token:
        figures["bpb"] = record["loss"] / math.log(2) / stage.bytes_per_token
    if record["tokens_per_s"]:
        figures["tok/s"] = round(record["tokens_per_s"])
    if record["mfu"]:
        figures["mfu"] = f"{record['mfu']:.0%}"
    if "cost_usd" in record:
        figures["cost"] = f"${record['cost_usd']:,.2f}"
    return figures | {"epoch": batch.epoch} | batch.log


def evaluate(stage: Stage, step: int, state: TrainState) -> None:
    """Evaluates and logs, when the stage has an evaluation."""
    if stage.evaluate:
        with stall.phase("evaluation"):
            figures = stage.evaluate(step, state) | ({"probe_loss": stage.probe(state.params)} if stage.probe else {})
        stage.metrics.append(stage=stage.name, step=step, event="eval", **figures)


def evaluation_missing(stage: Stage, step: int) -> bool:
    """Whether the evaluation that belongs to the checkpoint of `step` never happened: a preemption left no time."""
    if not stage.evaluate or not stage.due(stage.eval_every, step):
        return False
    records = distributed.from_first(lambda: stage.metrics.read(stage.name))
    return not any(r.get("event") == "eval" and r["step"] == step for r in records)


def check_finite(stage: Stage, saver: checkpoint.Saver, step: int, out: dict) -> None:
    """Stops the run as soon as loss or gradient is not a number."""
    for name in ("loss", "grad_norm"):
        if not math.isfinite(out[name]):
            saver.settle()
            kept, _ = distributed.from_first(lambda: checkpoint.latest(stage.folder))
            saved = f"the last good checkpoint is step {kept}" if kept is not None else "there is no checkpoint yet"
            raise UserError(
                f"{stage.name}: {name} is {out[name]} at step {step + 1}; {saved} in {stage.folder}. "
                "Lower the learning rates (pretrain.optim.*, sft.lr_frac, rl.lr_frac) and use a new run folder"
            )
