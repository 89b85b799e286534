"""The named presets, and the one import path of everything that describes a run.

The tree of dataclasses is in run_config.py, overrides and checks are in settings.py.
"""

from __future__ import annotations

import dataclasses
from dataclasses import replace

from nanochat_lib.errors import UserError
from nanochat_lib.run_config import (
    MID,
    ComputeConfig,
    DataConfig,
    EvalConfig,
    ModelConfig,
    OpsConfig,
    OptimConfig,
    PretrainConfig,
    RLConfig,
    RunConfig,
    SFTConfig,
    Target,
    TokenizerConfig,
)
from nanochat_lib.settings import FIXED, flatten, nearest, override, validate

__all__ = [
    "CPU", "CPU_OPTIM", "FIXED", "MID", "PRESETS", "ComputeConfig", "DataConfig", "EvalConfig", "ModelConfig",
    "OpsConfig", "OptimConfig", "PretrainConfig", "RLConfig", "RunConfig", "SFTConfig", "Target", "TokenizerConfig",
    "flatten", "from_dict", "nearest", "override", "preset", "to_dict", "validate",
]  # fmt: skip


def _cpu(name: str, about: str, **parts: object) -> RunConfig:
    return RunConfig(preset=name, about=about, target=Target("cpu"), **parts)


CPU_OPTIM = OptimConfig(
    embedding_lr=0.12,
    unembedding_lr=0.0033,
    matrix_lr=0.02,
    scalar_lr=0.2,
    smear_lr=0.05,
    weight_decay=0.0,
    warmup_steps=20,
    warmdown_ratio=0.6,
    transfer=False,
)

# Off unless asked for (mid.mixture=primer): at this size SFT alone learns the form of a conversation.
CPU_MID = replace(
    MID, batch_tokens=-1, lr_frac=0.3, warm_start=True, embedding_lr=-1.0, unembedding_lr=-1.0, matrix_lr=-1.0
)

CPU = _cpu(
    "cpu",
    "the whole course on a laptop: every stage visibly improves its metric",
    model=ModelConfig(depth=4, aspect_ratio=32, head_dim=64, sequence_len=128, window_pattern="L"),
    tokenizer=TokenizerConfig(vocab_size=1024, max_chars=6_000_000),
    data=DataConfig(epochs=4.0, buffer_docs=400),
    pretrain=PretrainConfig(
        steps=1500, batch_tokens=2048, device_rows=16, optim=CPU_OPTIM, eval_every=150, eval_tokens=32768,
        sample_every=-1, save_every=150,
    ),
    mid=replace(CPU_MID, steps=100, eval_every=50, eval_tokens=16384, save_every=50),
    sft=SFTConfig(steps=200, lr_frac=0.3, eval_every=50, eval_tokens=16384, save_every=50),
    rl=RLConfig(
        steps=50, questions_per_step=8, samples=8, max_new_tokens=32, lr_frac=0.15, top_k=50,
        embedding_lr=0.12, unembedding_lr=0.0033, scalar_lr=0.2, smear_lr=0.05, eval_every=25, eval_questions=128,
        eval_samples=4, save_every=25,
    ),
    evaluation=EvalConfig(core_max_per_task=128, chat_max_per_task=128, chat_max_new_tokens=32, batch_rows=128),
)  # fmt: skip

CPU_SMOKE = _cpu(
    "cpu-smoke",
    "every stage runs, nothing is learned well: a check in minutes",
    model=ModelConfig(depth=2, aspect_ratio=32, head_dim=32, sequence_len=128, window_pattern="L"),
    tokenizer=TokenizerConfig(vocab_size=512, max_chars=300_000),
    data=DataConfig(epochs=4.0, buffer_docs=100, world_chars=200_000),
    pretrain=PretrainConfig(
        steps=20, batch_tokens=1024, device_rows=8, optim=CPU_OPTIM, eval_every=10, eval_tokens=4096,
        sample_every=-1, save_every=10, log_every=1,
    ),
    mid=replace(CPU_MID, steps=5, eval_every=5, eval_tokens=4096, save_every=5, log_every=1),
    sft=SFTConfig(steps=10, lr_frac=0.4, eval_every=5, eval_tokens=4096, save_every=5, log_every=1),
    rl=RLConfig(
        steps=3, questions_per_step=2, samples=4, max_new_tokens=32, lr_frac=0.2, embedding_lr=0.12,
        unembedding_lr=0.0033, scalar_lr=0.2, smear_lr=0.05, eval_every=3, eval_questions=16, eval_samples=2,
        save_every=2,
    ),
    evaluation=EvalConfig(core_max_per_task=16, chat_max_per_task=16, chat_max_new_tokens=32, batch_rows=16),
)  # fmt: skip

CLIMBMIX = DataConfig(corpus="climbmix")
CHAT = {"sft": SFTConfig(mixture="nanochat"), "rl": RLConfig(task="gsm8k"), "evaluation": EvalConfig(bigram=False)}
SPEEDRUN = PretrainConfig(ratio=8.0, device_rows=16)

# nanochat's sequence of 2025: midtraining on everything, then a short, gentle SFT on a small mixture, rates falling
# from the start. It had 32 conversations a step, one a row; packed, that is about 16 thousand tokens.
MIDTRAINED = CHAT | {
    "mid": replace(MID, mixture="nanochat-historic"),
    "sft": SFTConfig(
        mixture="nanochat-after-mid", mmlu_copies=0, gsm8k_copies=1, identity_copies=1, warm_start=False,
        embedding_lr=0.2, unembedding_lr=0.004, matrix_lr=0.02, batch_tokens=16384, device_rows=1, lr_frac=0.02,
        warmdown_ratio=1.0, momentum_steps=0, eval_every=100, eval_tokens=4 * 524288,
    ),
}  # fmt: skip

# nanochat of March 2026, leaderboard entry 4, and the public TPU port's reproduction of it: 6,612 steps of 2^20 tokens.
RECIPE4 = PretrainConfig(
    ratio=9.5, device_rows=2,
    optim=OptimConfig(
        unembedding_lr=0.004, weight_decay=0.2, warmup_steps=0, warmdown_ratio=0.5, final_lr_frac=0.0,
    ),
)  # fmt: skip

# The public run of 3.8B parameters on 8×B200 fixes steps, schedule and sizes, 65.3B tokens in all at context 2048.
# 1,280 rows a step are the nearest batch that 8 devices share evenly: 65.5B. Its learning rates are not published, so
# they follow from batch and depth like everybody's.
LITTLE_LM = PretrainConfig(
    steps=25_000, batch_tokens=1280 * 2048, device_rows=8,
    optim=OptimConfig(schedule="trapezoid", warmup_ratio=0.05, warmdown_ratio=0.5, final_lr_frac=0.05),
)  # fmt: skip


def _big(name: str, about: str, target: Target, **parts: object) -> RunConfig:
    return RunConfig(preset=name, about=about, target=target, **({"data": CLIMBMIX} | CHAT | parts))


# device_rows and fsdp are what memory allows. A chip without fsdp holds 16 bytes a parameter (weight, gradient, two
# moments in float32); d24 keeps about 0.45 GiB a layer for each 2 rows of 2048 tokens (compiled for v6e).
PRESETS: dict[str, RunConfig] = {
    config.preset: config
    for config in (
        CPU_SMOKE,
        CPU,
        _big("gpu-1-d12", "nanochat's research size on one large GPU", Target("gpu", "any", 1), model=ModelConfig(12)),
        _big(
            "gpu-8-d24", "the speedrun recipe on 8×H100/H200", Target("gpu", "h100", 8),
            model=ModelConfig(24), pretrain=SPEEDRUN,
        ),
        _big(
            "gpu-8-d24-midtrain", "the same, its chat trained as in 2025: midtraining, then a short SFT",
            Target("gpu", "h100", 8), model=ModelConfig(24), pretrain=SPEEDRUN, **MIDTRAINED,
        ),
        _big(
            "tpu-v6e-8-d24", "recipe 4 with 6 heads of 256, one matrix unit wide", Target("tpu", "v6e", 8),
            model=ModelConfig(24, head_dim=256, recipe="recipe4"), pretrain=RECIPE4,
        ),
        _big(
            "tpu-v6e-8-d24-h128", "recipe 4 with its own 12 heads of 128", Target("tpu", "v6e", 8),
            model=ModelConfig(24, recipe="recipe4"), pretrain=RECIPE4,
        ),
        _big(
            "tpu-v5e-8-d20", "heads of 128 for the 128×128 matrix unit", Target("tpu", "v5e", 8),
            model=ModelConfig(20), pretrain=replace(SPEEDRUN, device_rows=2), compute=ComputeConfig(fsdp=8),
        ),
        _big(
            "tpu-v5p-8-d24", "heads of 128 for the 128×128 matrix unit", Target("tpu", "v5p", 8),
            model=ModelConfig(24), pretrain=replace(SPEEDRUN, device_rows=8),
        ),
        _big(
            "tpu-v6e-64-d32", "64 chips over several hosts", Target("tpu", "v6e", 64),
            model=ModelConfig(32, head_dim=256), pretrain=replace(SPEEDRUN, device_rows=2),
            compute=ComputeConfig(fsdp=8),
        ),
        _big(
            "gpu-8-little-lm", "3.8B parameters: 28 layers of 3072, 24 query and 8 key/value heads",
            Target("gpu", "h200", 8),
            model=ModelConfig(28, n_embd=3072, kv_groups=3, window_pattern="L"),
            compute=ComputeConfig(fp8=True), tokenizer=TokenizerConfig(vocab_size=50257), pretrain=LITTLE_LM,
        ),
    )
}  # fmt: skip


def preset(name: str) -> RunConfig:
    """The named preset; an unknown name is a UserError that names the nearest one."""
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}; {nearest(str(name), list(PRESETS))}")
    return PRESETS[name]


def to_dict(config: RunConfig) -> dict:
    """The tree as plain data, for config.json."""
    return dataclasses.asdict(config)


def from_dict(values: dict) -> RunConfig:
    """Inverse of `to_dict`. Unknown or missing keys are a UserError."""
    base = preset(values.get("preset", ""))
    flat: dict[str, object] = {}

    def walk(node: dict, prefix: str) -> None:
        for key, value in node.items():
            if isinstance(value, dict):
                walk(value, f"{prefix}{key}.")
            else:
                flat[prefix + key] = value

    walk(values, "")
    if missing := sorted(set(flatten(base)) - set(flat)):
        raise UserError(f"configuration lacks {', '.join(missing)}; it was written by another version")
    return override(base, {name: value for name, value in flat.items() if name not in FIXED})
