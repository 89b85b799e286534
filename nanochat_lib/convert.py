"""A nanochat checkpoint folder as a run folder of ours, and a run of ours as a nanochat checkpoint folder.

What our checkpoints have no room for (types of tables, param_groups, the meta file) travels in the metadata of the
converted checkpoint, so that converting back writes the same tensors bit for bit and the same meta file. A checkpoint
that was trained further here has none of it: its files are then those nanochat would have written for such a run.
"""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from nanochat_lib import checkpoint, gpt, optim, presets, schedules, storage, upstream
from nanochat_lib.errors import UserError
from nanochat_lib.metrics import MetricsLog, plain
from nanochat_lib.pipeline import CHAT_STAGES, last_stage
from nanochat_lib.presets import RunConfig
from nanochat_lib.sft import stage_rates
from nanochat_lib.sizing import GPTConfig, count_params, flops_per_token
from nanochat_lib.tokenizer import Tokenizer
from nanochat_lib.train_step import TrainState
from nanochat_lib.upstream.model import FIELDS
from nanochat_lib.upstream.optimizer import group_dicts

BASE_PRESET = "cpu"  # settings of the stages to come; it runs on every machine
METRICS_NAMES = {"base": "pretrain", "mid": "mid", "sft": "sft", "rl": "rl"}  # model -> its stage in metrics.jsonl
OPTIM_SETTINGS = (
    "embedding_lr", "unembedding_lr", "matrix_lr", "scalar_lr", "weight_decay", "warmup_steps", "warmdown_ratio",
    "final_lr_frac",
)  # fmt: skip


def from_upstream(
    source: str | Path,
    run_dir: str | Path,
    *,
    step: int | None = None,
    tokenizer: str | Path | None = None,
    changes: dict[str, object] | None = None,
) -> str:
    """Makes the run folder `run_dir` with the model in nanochat's checkpoint folder `source` as its base model.

    `step`, `tokenizer`: as in `upstream.load`. `changes` are settings of the run, e.g. {"sft.steps": 100}; those of
    the model come from the checkpoint. Returns a line that says what was found. UserError when `run_dir` exists; it
    is made whole or not at all.
    """
    run_dir = Path(run_dir)
    if run_dir.exists():
        raise UserError(f"{run_dir} exists already: remove it or choose another name")
    found = upstream.load(source, step, tokenizer=tokenizer)
    config = run_config(found, changes or {})
    temporary = storage.temporary_name(run_dir)
    try:
        with storage.clear_disk_errors(run_dir):
            write_run(temporary, config, found, str(source))
            storage.publish_dir(temporary, run_dir)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    state = "no optimiser (it starts anew)" if found.opt_state is None else optimizer_of(found.extras.ranks)
    return f"{run_dir}: {describe(found.config)}, step {found.step}, {state}"


def describe(config: GPTConfig) -> str:
    return (
        f"{config.recipe}, {config.n_layer} layers, {config.n_embd} wide, vocabulary {config.vocab_size:,}, "
        f"{count_params(config)['total']:,} parameters"
    )


def optimizer_of(ranks: int) -> str:
    return f"optimiser of {ranks} rank{'s' if ranks > 1 else ''}"


def run_config(found: upstream.Checkpoint, changes: dict[str, object]) -> RunConfig:
    """A RunConfig with the checkpoint's model, batch and rates. What nanochat does not record is the preset's."""
    model, meta = found.config, found.meta
    user = meta.get("user_config") if isinstance(meta.get("user_config"), dict) else {}
    given = {**user, **meta}

    def number(name: str, default: float) -> float:
        value = given.get(name)
        usable = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value < math.inf
        return value if usable else default

    base, defaults = presets.preset(BASE_PRESET), presets.OptimConfig()
    rows = int(number("device_batch_size", base.pretrain.device_rows))
    tokens = int(number("total_batch_size", -1))
    if tokens % (rows * model.sequence_len):
        tokens = rows * model.sequence_len
    settings = {
        "model.depth": model.n_layer,
        "model.aspect_ratio": int(number("aspect_ratio", max(model.n_embd // model.n_layer, 1))),
        "model.head_dim": model.head_dim,
        "model.n_embd": model.n_embd,
        "model.kv_groups": model.n_head // model.n_kv_head,
        "model.sequence_len": model.sequence_len,
        "model.window_pattern": model.window_pattern,
        "model.recipe": model.recipe,
        "tokenizer.vocab_size": model.vocab_size,
        "pretrain.steps": int(number("num_iterations", -1)),
        "pretrain.ratio": float(number("target_param_data_ratio", base.pretrain.ratio)),
        "pretrain.batch_tokens": tokens,
        "pretrain.device_rows": rows,
        "pretrain.optim.transfer": True,
        "pretrain.optim.smear_lr": defaults.smear_lr,
    }
    for name in OPTIM_SETTINGS:
        default = getattr(defaults, name)
        settings[f"pretrain.optim.{name}"] = type(default)(number(name, default))
    if fixed := sorted(name for name in changes if name.startswith(("model.", "tokenizer."))):
        raise UserError(f"{fixed[0]} comes from the checkpoint and cannot be set")
    return presets.override(base, settings | changes)


def write_run(folder: Path, config: RunConfig, found: upstream.Checkpoint, source: str) -> None:
    """The files of a run whose tokenizer and base model are finished."""
    storage.atomic_write_json(folder / "config.json", presets.to_dict(config))
    found.tokenizer.save(folder / "tokenizer")
    params = dict(found.params)
    opt_state = found.opt_state
    if opt_state is None:
        opt_state = optim.make_optimizer(found.config, config.pretrain.optim).init(params)
    state = TrainState(params, opt_state, np.int32(found.step))
    batch = found.meta.get("total_batch_size")
    loop = found.meta.get("loop_state") if isinstance(found.meta.get("loop_state"), dict) else {}
    seconds = plain(loop.get("total_training_time")) or 0.0
    tokens = found.step * batch if isinstance(batch, int) else 0
    meta = {
        "model": found.config.to_dict(), "tokenizer": found.tokenizer.fingerprint, "step": found.step, "loader": None,
        "seconds": seconds, "tokens": tokens, "upstream": asdict(found.extras),
    }  # fmt: skip
    checkpoint.save(folder / CHAT_STAGES["base"], found.step, state, meta)

    metrics = {"val_bpb": plain(found.meta.get("val_bpb"))}
    MetricsLog(folder / "metrics.jsonl").append(stage="pretrain", step=found.step, event="eval", **metrics)
    figures = {
        "tokenizer": {"vocab_size": found.tokenizer.vocab_size, "fingerprint": found.tokenizer.fingerprint},
        "pretrain": {
            "val_bpb_last": metrics["val_bpb"], "steps": found.step, "tokens": tokens, "train_seconds": seconds,
            "params": count_params(found.config), "flops_per_token": flops_per_token(found.config),
            "model": found.config.to_dict(),
        },
    }  # fmt: skip
    for name, values in figures.items():
        values = {key: value for key, value in values.items() if value is not None} | {"converted_from": source}
        # No settings lead to this key: the stage is finished, and running it again is refused.
        key = hashlib.sha256(json.dumps([name, values]).encode()).hexdigest()
        record = {
            "name": name, "key": key, "seconds": values.get("train_seconds", 0.0), "figures": values, "finished": True,
        }  # fmt: skip
        storage.atomic_write_json(folder / "stages" / f"{name}.json", record)


def to_upstream(
    run_dir: str | Path,
    folder: str | Path,
    *,
    stage: str | None = None,
    step: int | None = None,
    ranks: int | None = None,
) -> str:
    """Writes checkpoint `step` (None: the newest) of the run in `run_dir` as nanochat's files into the new `folder`.

    `stage`: "base", "mid", "sft" or "rl" (None: the last one trained). `ranks`: how many processes the optimiser is
    written for (None: as many as a converted checkpoint came from, else 1). Returns a line that says what was written.
    """
    run_dir = Path(run_dir)
    config = presets.from_dict(storage.read_json(run_dir / "config.json"))
    stage = stage or last_stage(run_dir)
    tokenizer = Tokenizer.load(run_dir / "tokenizer")
    state, meta, model = load_state(run_dir / CHAT_STAGES[stage], step)
    checkpoint.check_tokenizer(meta, tokenizer.fingerprint)
    if "upstream" in meta:
        extras = upstream.Extras(**meta["upstream"])
        content = json.loads(extras.meta)
    else:
        content, groups = own_meta(config, model, stage, meta, MetricsLog(run_dir / "metrics.jsonl"), state.params)
        extras = upstream.Extras(param_groups=groups)
    found = upstream.Checkpoint(model, state.params, state.opt_state, tokenizer, meta["step"], content, extras)
    upstream.save(folder, found, ranks=ranks)
    written = optimizer_of(extras.ranks if ranks is None else ranks)
    return f"{folder}: {describe(model)}, {stage} model of step {meta['step']}, {written}"


def load_state(folder: Path, step: int | None) -> tuple[TrainState, dict, GPTConfig]:
    """(parameters and optimiser, metadata, model configuration) of a checkpoint of ours."""
    meta = checkpoint.load_meta(folder, step)
    model = GPTConfig.from_dict(meta["model"])
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in gpt.param_shapes(model).items()}
    opt_state = jax.eval_shape(optim.make_optimizer(model, presets.OptimConfig()).init, params)
    like = TrainState(params, opt_state, jax.ShapeDtypeStruct((), jnp.int32))
    return checkpoint.load(folder, meta["step"], like)[0], meta, model


def own_meta(
    config: RunConfig, model: GPTConfig, stage: str, meta: dict, log: MetricsLog, params: dict[str, Any]
) -> tuple[dict, list[dict]]:
    """(meta file, param_groups) that nanochat would have written for this checkpoint of a run of ours."""
    plan, step = config.horizon(model.vocab_size), meta["step"]
    records = [r for r in log.read(METRICS_NAMES[stage]) if r.get("step", 0) <= step]
    trained = [r for r in records if "lr" in r]
    bpb = [r["val_bpb"] for r in records if r.get("val_bpb") is not None]
    if stage == "rl":
        lrs = config.rl
    elif stage == "base":
        lrs = schedules.transferred(config.pretrain.optim, plan)
    else:
        lrs = stage_rates(getattr(config, stage), config.pretrain.optim)
    last = trained[-1] if trained else {"lr": 1.0, "momentum": 0.95, "weight_decay": 0.0, "loss": 0.0}
    shapes = {name: tuple(array.shape) for name, array in params.items()}
    groups = group_dicts(model, shapes, lrs, last["lr"], last["momentum"], last["weight_decay"])
    rates = {name: getattr(config.pretrain.optim, name) for name in OPTIM_SETTINGS}
    content = {
        "step": step,
        "val_bpb": bpb[-1] if bpb else None,
        "model_config": {name: getattr(model, name) for name in FIELDS},
        "user_config": {
            "run": "dummy", "device_type": "", "fp8": False, "fp8_recipe": "tensorwise", "depth": model.n_layer,
            "aspect_ratio": config.model.aspect_ratio, "head_dim": model.head_dim, "max_seq_len": model.sequence_len,
            "window_pattern": model.window_pattern, "num_iterations": plan.steps, "target_flops": -1.0,
            "target_param_data_ratio": config.pretrain.ratio, "device_batch_size": config.pretrain.device_rows,
            "total_batch_size": plan.batch_tokens, **rates, "resume_from_step": -1,
            "eval_every": config.pretrain.eval_every, "eval_tokens": config.pretrain.eval_tokens,
            "core_metric_every": -1, "core_metric_max_per_task": config.evaluation.core_max_per_task,
            "sample_every": config.pretrain.sample_every, "save_every": config.pretrain.save_every, "model_tag": None,
        },
        "device_batch_size": config.pretrain.device_rows,
        "max_seq_len": model.sequence_len,
        "total_batch_size": plan.batch_tokens,
        "dataloader_state_dict": {"pq_idx": 0, "rg_idx": 0, "epoch": 1},  # ours says nothing about nanochat's shards
        "loop_state": {
            "min_val_bpb": min(bpb, default=math.inf), "smooth_train_loss": last["loss"],
            "total_training_time": meta.get("seconds", 0.0),
        },
    }  # fmt: skip
    return content, groups
