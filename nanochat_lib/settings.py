"""Settings by their dotted names: strict overrides, and checks that they are in range and fit each other."""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import replace

from nanochat_lib.errors import UserError
from nanochat_lib.hardware import DTYPES
from nanochat_lib.run_config import (
    ATTENTION,
    MASTERS,
    MID_MIXTURES,
    MIXTURES,
    ON_FINISH,
    ON_STALL,
    REMAT,
    RL_TASKS,
    RUN_CODE,
    SCHEDULES,
    RunConfig,
)


def nearest(name: str, known: list[str]) -> str:
    """The end of an "unknown name" message: the names with the same last part, else the closest, else all of them."""
    last = name.rsplit(".", 1)[-1]
    matches = [k for k in known if k.rsplit(".", 1)[-1] == last]
    matches = matches or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {' or '.join(matches)}?" if matches else f"known: {', '.join(known)}"


def flatten(config: object, prefix: str = "") -> dict[str, object]:
    """{"pretrain.optim.matrix_lr": 0.02, …}: every leaf of the tree by its dotted name."""
    leaves: dict[str, object] = {}
    for f in dataclasses.fields(config):
        value = getattr(config, f.name)
        if dataclasses.is_dataclass(value):
            leaves |= flatten(value, f"{prefix}{f.name}.")
        else:
            leaves[prefix + f.name] = value
    return leaves


FIXED = ("preset", "about", "target.kind", "target.chip", "target.devices")  # identity, not a setting


def _typed(name: str, value: object, current: object) -> object:
    """`value` as the type of the setting it replaces; text is read as on a command line."""
    wanted = type(current)
    if isinstance(value, str) and wanted is not str:
        lowered = value.strip().lower()
        try:
            if wanted is bool:
                value = {"true": True, "false": False}[lowered]
            else:
                value = wanted(lowered.replace("_", ""))
        except (KeyError, ValueError):
            raise UserError(f"{name} must be {wanted.__name__}, got {value!r}") from None
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) is not wanted:
        raise UserError(f"{name} must be {wanted.__name__}, got {value!r} ({type(value).__name__})")
    return value


def override(config: RunConfig, changes: dict[str, object]) -> RunConfig:
    """`config` with dotted settings replaced, e.g. {"pretrain.steps": 100, "seed": 3}.

    Raises UserError for an unknown name (naming the nearest one) or a value of the wrong type.
    """
    leaves = flatten(config)
    known = [name for name in leaves if name not in FIXED]
    for name, value in changes.items():
        if name not in known:
            raise UserError(f"unknown setting {name!r}; {nearest(str(name), known)}")
        config = _replace(config, name.split("."), _typed(name, value, leaves[name]))
    validate(config)
    return config


def _replace(node: object, path: list[str], value: object) -> object:
    if len(path) > 1:
        value = _replace(getattr(node, path[0]), path[1:], value)
    return replace(node, **{path[0]: value})


# Settings that must be above 0, by the last part of their name. All other numbers: at least 0, or -1 = left open.
POSITIVE = {
    "depth", "aspect_ratio", "head_dim", "kv_groups", "sequence_len", "max_chars", "doc_cap", "epochs", "buffer_docs",
    "world_chars", "passage_chars", "ratio", "eval_tokens", "keep", "log_every", "questions_per_step", "samples",
    "max_new_tokens", "eval_questions", "eval_samples", "chat_max_new_tokens", "batch_rows", "stall_factor",
    "stall_seconds", "grace_seconds", "rollout_rows",
}  # fmt: skip
OPEN_OR_POSITIVE = {
    "steps", "batch_tokens", "device_rows", "n_embd", "conversations", "vocab_size", "loss_chunks", "keep_every",
}  # fmt: skip
RATES = ("embedding_lr", "unembedding_lr", "matrix_lr")
OPEN = {"ops.usd_per_hour", *(f"{stage}.{rate}" for stage in ("mid", "sft") for rate in RATES)}  # fractions, may be -1
COUNTS = {"mmlu_copies", "gsm8k_copies", "identity_copies"}  # at least 0, never left open
SHARES = {"warmup_ratio", "warmdown_ratio", "final_lr_frac"}  # at most 1
CHOICES = {
    "compute.dtype": DTYPES,
    "compute.attention": ATTENTION,
    "compute.masters": MASTERS,
    "compute.remat": REMAT,
    "pretrain.optim.schedule": SCHEDULES,
    "mid.mixture": MID_MIXTURES,
    "sft.mixture": MIXTURES,
    "rl.task": RL_TASKS,
    "evaluation.run_code": RUN_CODE,
    "ops.on_stall": ON_STALL,
    "ops.on_finish": ON_FINISH,
}
MAX_DEPTH = 1000
SHORTEST_PROMPT = 16  # tokens that an open question needs at least
MAX_DOC_CAP = 500_000  # characters: longer runs of blanks crash the tokenizer's trainer


def check_ranges(config: RunConfig) -> None:
    """Every number is finite and in its range, so that nothing later divides by zero or trains on NaN."""
    for name, value in flatten(config).items():
        if name in CHOICES and value not in CHOICES[name]:
            raise UserError(f"{name} {value!r} is unknown, use {listed(CHOICES[name])}")
        if isinstance(value, bool | str):
            continue
        if not math.isfinite(value):
            raise UserError(f"{name} is {value}, must be a finite number")
        last = name.rsplit(".", 1)[-1]
        if last in SHARES and value > 1:
            raise UserError(f"{name} is {value}, must be at most 1")
        if last in POSITIVE:
            if value <= 0:
                raise UserError(f"{name} is {value}, must be above 0")
        elif value == 0 and last in OPEN_OR_POSITIVE:
            raise UserError(f"{name} is 0, must be above 0, or -1 (left open)")
        elif value < 0 and not (value == -1 and may_be_open(name, value)):
            open_too = " or -1 (left open)" if may_be_open(name, value) else ""
            raise UserError(f"{name} is {value}, must be at least 0{open_too}")
    if not 0 <= config.seed < 2**31:
        raise UserError(f"seed is {config.seed}, must be from 0 to {2**31 - 1}")
    if config.model.depth > MAX_DEPTH:
        raise UserError(f"model.depth is {config.model.depth}, must be at most {MAX_DEPTH}")


def may_be_open(name: str, value: float) -> bool:
    """Whether -1 stands for "left open" in this setting."""
    return name in OPEN or (isinstance(value, int) and name.rsplit(".", 1)[-1] not in COUNTS)


def listed(values: tuple | list) -> str:
    """The values as they stand in a message: "a, b or c"."""
    *others, last = map(str, values)
    return f"{', '.join(others)} or {last}" if others else last


def check_compute(config: RunConfig) -> None:
    """Precision and sharding fit each other and the preset's devices."""
    compute, devices = config.compute, config.target.devices
    if compute.fp8 and compute.dtype == "float32":
        raise UserError(
            "compute.fp8 needs bfloat16 around it, compute.dtype is float32; "
            "use compute.dtype=bfloat16 or compute.fp8=false"
        )
    if compute.fsdp < 1 or devices % compute.fsdp:
        valid = listed([n for n in range(1, devices + 1) if devices % n == 0])
        ours = f"{devices} device{'s' * (devices > 1)}"
        raise UserError(f"compute.fsdp {compute.fsdp} does not divide the preset's {ours}; use {valid}")


def check_batch(name: str, batch: int, rows: int, sequence_len: int, devices: int) -> None:
    """A step is a whole number of micro-batches on every device: `name`.batch_tokens is a multiple of their tokens."""
    if rows < 1:
        raise UserError(f"{name}.device_rows is {rows}, must be at least 1")
    tokens = rows * sequence_len * devices
    if batch % tokens:
        below = max(batch // tokens, 1) * tokens
        raise UserError(
            f"{name}.batch_tokens {batch:,} is not a multiple of device_rows {rows} × sequence_len {sequence_len:,} × "
            f"{devices} device{'s' * (devices > 1)} = {tokens:,}; use {below:,} or {below + tokens:,}"
        )


def least_room(context: int) -> int:
    """Tokens of a context that the longest answer must leave for its question."""
    return min(SHORTEST_PROMPT, context // 2)


def validate(config: RunConfig) -> None:
    """Checks that settings are in range and fit each other, before anything is spent. Raises UserError."""
    check_compute(config)
    check_ranges(config)
    gpt, devices = config.gpt_config(), config.target.devices
    batch = config.horizon().batch_tokens
    check_batch("pretrain", batch, config.pretrain.device_rows, gpt.sequence_len, devices)
    for name, stage in {"mid": config.mid, "sft": config.sft}.items():
        if stage.mixture != "none":
            rows = stage.device_rows if stage.device_rows > 0 else config.pretrain.device_rows
            tokens = stage.batch_tokens if stage.batch_tokens > 0 else batch
            check_batch(name, tokens, rows, gpt.sequence_len, devices)
    if config.tokenizer.doc_cap > MAX_DOC_CAP:
        raise UserError(f"tokenizer.doc_cap is {config.tokenizer.doc_cap:,}, must be at most {MAX_DOC_CAP:,}")
    if config.rl.top_k < 0:
        raise UserError(f"rl.top_k is {config.rl.top_k}, must be at least 0 (0 = the whole vocabulary)")
    limits = {
        "rl.max_new_tokens": config.rl.max_new_tokens,
        "evaluation.chat_max_new_tokens": config.evaluation.chat_max_new_tokens,
    }
    for name, tokens in limits.items():
        room = least_room(gpt.sequence_len)
        if tokens > gpt.sequence_len - room:
            raise UserError(
                f"{name} is {tokens:,}, must be at most {gpt.sequence_len - room:,}: model.sequence_len "
                f"{gpt.sequence_len:,} holds the question too, at least {room} tokens"
            )
    if not 0 < config.data.real_share <= 1:
        raise UserError(f"data.real_share {config.data.real_share} must be above 0 and at most 1")
    if config.data.epochs <= 0:
        raise UserError(f"data.epochs {config.data.epochs} must be above 0")
    if config.rl.samples < 2:
        raise UserError(f"rl.samples {config.rl.samples} must be at least 2: advantages compare answers")
