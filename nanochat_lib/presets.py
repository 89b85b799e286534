"""A run described by one tree of frozen dataclasses, the named presets, and strict overrides.

What a preset leaves open (-1) follows from `model.depth` by the rules in sizing.py.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
from dataclasses import dataclass, field, replace

from nanochat_lib.errors import UserError
from nanochat_lib.sizing import REFERENCE_DEPTH, GPTConfig, Horizon, horizon, width_from_depth


@dataclass(frozen=True)
class Target:
    """The machine a preset is meant for."""

    kind: str = "cpu"  # cpu, gpu, tpu
    chip: str = "any"
    devices: int = 1


@dataclass(frozen=True)
class ModelConfig:
    depth: int = 20
    aspect_ratio: int = 64  # width = depth × this, rounded up to whole heads
    head_dim: int = 128
    n_embd: int = -1  # a width of its own instead of depth × aspect_ratio
    kv_groups: int = 1  # query heads per key/value head
    sequence_len: int = 2048
    window_pattern: str = "SSSL"
    recipe: str = "head"
    dtype: str = "auto"  # compute dtype: auto = float32 on CPU, bfloat16 on accelerators


@dataclass(frozen=True)
class TokenizerConfig:
    vocab_size: int = 32768  # specials included
    max_chars: int = 2_000_000_000
    doc_cap: int = 10_000  # characters of a document that are read


@dataclass(frozen=True)
class DataConfig:
    corpus: str = "primer"  # "primer", or a path: .txt, .jsonl, .parquet, or a folder of these
    epochs: float = 1.0  # how often the documents may be read; needing more is an error before step 0
    buffer_docs: int = 1000  # documents the packer chooses from
    real_share: float = 0.4  # primer: share of characters that is real text, the rest is the world
    world_chars: int = 3_000_000  # primer: characters of the invented world
    passage_chars: int = 280  # primer: real documents are cut into passages of about this length


@dataclass(frozen=True)
class OptimConfig:
    """Learning rates at batch 2^19 and width 768; `transfer` carries them over to the run's own batch."""

    embedding_lr: float = 0.3
    unembedding_lr: float = 0.008
    matrix_lr: float = 0.02
    scalar_lr: float = 0.5
    smear_lr: float = 0.2  # smear and backout; absolute, never transferred
    weight_decay: float = 0.28
    warmup_steps: int = 40
    warmup_ratio: float = 0.0  # > 0: share of the steps, instead of warmup_steps
    warmdown_ratio: float = 0.65
    final_lr_frac: float = 0.05
    transfer: bool = True


@dataclass(frozen=True)
class PretrainConfig:
    steps: int = -1  # -1: from ratio
    ratio: float = 12.0  # tokens per scaling parameter
    batch_tokens: int = -1  # tokens an optimiser step; -1: from depth
    device_rows: int = 32  # rows of a micro-batch on one device
    optim: OptimConfig = field(default_factory=OptimConfig)
    eval_every: int = 250
    eval_tokens: int = 80 * 524288
    sample_every: int = 2000
    save_every: int = 1000
    keep: int = 2  # checkpoints kept, the final one included
    log_every: int = 10


@dataclass(frozen=True)
class SFTConfig:
    mixture: str = "primer"
    conversations: int = -1  # primer: training conversations that are generated; -1: what the tasks hold
    steps: int = -1  # -1: one pass over the mixture
    batch_tokens: int = -1  # -1: as in pretraining
    device_rows: int = -1  # -1: as in pretraining
    lr_frac: float = 0.8  # of pretraining's rates
    warmup_ratio: float = 0.0
    warmdown_ratio: float = 0.5
    final_lr_frac: float = 0.0
    eval_every: int = 200
    eval_tokens: int = 40 * 524288
    save_every: int = 1000
    keep: int = 2
    log_every: int = 10


@dataclass(frozen=True)
class RLConfig:
    task: str = "primer-word-sums"
    steps: int = -1  # -1: one pass over the task's training questions
    questions_per_step: int = 16
    samples: int = 16  # answers sampled per question
    max_new_tokens: int = 256
    temperature: float = 1.0
    top_k: int = 50
    embedding_lr: float = 0.2
    unembedding_lr: float = 0.004
    matrix_lr: float = 0.02
    scalar_lr: float = 0.5
    smear_lr: float = 0.2
    lr_frac: float = 0.05
    eval_every: int = 60
    eval_questions: int = 400
    eval_samples: int = 8
    save_every: int = 60
    keep: int = 2
    log_every: int = 1


@dataclass(frozen=True)
class EvalConfig:
    core_max_per_task: int = -1
    chat_max_per_task: int = -1
    chat_max_new_tokens: int = 512
    batch_rows: int = 32
    bigram: bool = True  # also measure the byte-bigram model, the yardstick of the CPU presets


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run computes. Written as `config.json` into the run's folder."""

    preset: str
    about: str
    target: Target = field(default_factory=Target)
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    sft: SFTConfig = field(default_factory=SFTConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)

    def gpt_config(self, vocab_size: int | None = None, depth: int | None = None) -> GPTConfig:
        """The model's shape; `vocab_size` is the tokenizer's real one when it is known."""
        model = self.model
        depth = depth or model.depth
        n_embd, n_head = width_from_depth(depth, model.aspect_ratio, model.head_dim)
        if model.n_embd > 0 and depth == model.depth:
            n_embd, n_head = model.n_embd, model.n_embd // model.head_dim
        if n_head % model.kv_groups:
            raise UserError(f"model.kv_groups {model.kv_groups} does not divide the {n_head} query heads")
        return GPTConfig(
            sequence_len=model.sequence_len,
            vocab_size=vocab_size or self.tokenizer.vocab_size,
            n_layer=depth,
            n_head=n_head,
            n_kv_head=n_head // model.kv_groups,
            n_embd=n_embd,
            window_pattern=model.window_pattern,
            recipe=model.recipe,
        )

    def horizon(self, vocab_size: int | None = None) -> Horizon:
        """Steps, batch and transferred hyper-parameters of pretraining."""
        # The d12 yardstick exists only for families whose width follows from depth; kv_groups may not divide it.
        reference = replace(self, model=replace(self.model, kv_groups=1)).gpt_config(vocab_size, REFERENCE_DEPTH)
        stage = self.pretrain
        return horizon(self.gpt_config(vocab_size), reference, stage.ratio, stage.steps, stage.batch_tokens)


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
    sft=SFTConfig(steps=10, lr_frac=0.4, eval_every=5, eval_tokens=4096, save_every=5, log_every=1),
    rl=RLConfig(
        steps=3, questions_per_step=2, samples=4, max_new_tokens=32, lr_frac=0.2, embedding_lr=0.12,
        unembedding_lr=0.0033, scalar_lr=0.2, smear_lr=0.05, eval_every=3, eval_questions=16, eval_samples=2,
        save_every=2,
    ),
    evaluation=EvalConfig(core_max_per_task=16, chat_max_per_task=16, chat_max_new_tokens=32, batch_rows=16),
)  # fmt: skip

SPEEDRUN = PretrainConfig(ratio=8.0, device_rows=16)
CLIMBMIX = DataConfig(corpus="climbmix")
CHAT = {"sft": SFTConfig(mixture="nanochat"), "rl": RLConfig(task="gsm8k"), "evaluation": EvalConfig(bigram=False)}


def _big(name: str, about: str, target: Target, **parts: object) -> RunConfig:
    return RunConfig(preset=name, about=about, target=target, **({"data": CLIMBMIX} | CHAT | parts))


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
            "tpu-v6e-8-d24", "recipe 4 sizes with 6 heads of 256, one matrix unit wide", Target("tpu", "v6e", 8),
            model=ModelConfig(24, head_dim=256, recipe="recipe4"), pretrain=replace(SPEEDRUN, ratio=9.5),
        ),
        _big(
            "tpu-v5e-8-d20", "heads of 128 for the 128×128 matrix unit", Target("tpu", "v5e", 8),
            model=ModelConfig(20), pretrain=replace(SPEEDRUN, device_rows=4),
        ),
        _big(
            "tpu-v5p-8-d24", "heads of 128 for the 128×128 matrix unit", Target("tpu", "v5p", 8),
            model=ModelConfig(24), pretrain=SPEEDRUN,
        ),
        _big(
            "tpu-v6e-64-d32", "64 chips over several hosts", Target("tpu", "v6e", 64),
            model=ModelConfig(32, head_dim=256), pretrain=replace(SPEEDRUN, device_rows=8),
        ),
        _big(
            "gpu-8-little-lm", "3.8B parameters: 28 layers of 3072, 24 query and 8 key/value heads",
            Target("gpu", "h200", 8),
            model=ModelConfig(28, n_embd=3072, kv_groups=3, window_pattern="L"),
            tokenizer=TokenizerConfig(vocab_size=50257),
            pretrain=PretrainConfig(
                steps=25_000, batch_tokens=1280 * 2048, device_rows=8,
                optim=OptimConfig(warmup_ratio=0.05, warmdown_ratio=0.5, final_lr_frac=0.05, transfer=False),
            ),
        ),
    )
}  # fmt: skip


def nearest(name: str, known: list[str]) -> str:
    """The end of an "unknown name" message: the names that end in `name`, else the closest one, else all of them."""
    matches = [k for k in known if k.rsplit(".", 1)[-1] == name and k != name]
    matches = matches or difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    return f"did you mean {' or '.join(matches)}?" if matches else f"known: {', '.join(known)}"


def preset(name: str) -> RunConfig:
    """The named preset; an unknown name is a UserError that names the nearest one."""
    if name not in PRESETS:
        raise UserError(f"unknown preset {name!r}; {nearest(str(name), list(PRESETS))}")
    return PRESETS[name]


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
    "max_new_tokens", "eval_questions", "eval_samples", "chat_max_new_tokens", "batch_rows",
}  # fmt: skip
OPEN_OR_POSITIVE = {"steps", "batch_tokens", "device_rows", "n_embd", "conversations", "vocab_size"}
DTYPES = ("auto", "float32", "bfloat16")
MAX_DEPTH = 1000
MAX_DOC_CAP = 500_000  # characters: longer runs of blanks crash the tokenizer's trainer


def check_ranges(config: RunConfig) -> None:
    """Every number is finite and in its range, so that nothing later divides by zero or trains on NaN."""
    for name, value in flatten(config).items():
        if isinstance(value, bool | str):
            continue
        if not math.isfinite(value):
            raise UserError(f"{name} is {value}, must be a finite number")
        if name.rsplit(".", 1)[-1] in POSITIVE:
            if value <= 0:
                raise UserError(f"{name} is {value}, must be above 0")
        elif value == 0 and name.rsplit(".", 1)[-1] in OPEN_OR_POSITIVE:
            raise UserError(f"{name} is 0, must be above 0, or -1 (left open)")
        elif value < 0 and not (value == -1 and isinstance(value, int)):
            open_too = " or -1 (left open)" if isinstance(value, int) else ""
            raise UserError(f"{name} is {value}, must be at least 0{open_too}")
    if not 0 <= config.seed < 2**31:
        raise UserError(f"seed is {config.seed}, must be from 0 to {2**31 - 1}")
    if config.model.depth > MAX_DEPTH:
        raise UserError(f"model.depth is {config.model.depth}, must be at most {MAX_DEPTH}")


def validate(config: RunConfig) -> None:
    """Checks that settings are in range and fit each other, before anything is spent. Raises UserError."""
    check_ranges(config)
    gpt = config.gpt_config()
    rows = config.pretrain.device_rows * gpt.sequence_len
    batch = config.horizon().batch_tokens
    if config.pretrain.device_rows < 1 or batch % rows:
        below = max(batch // rows, 1) * rows if rows > 0 else 0
        raise UserError(
            f"pretrain.batch_tokens {batch:,} is not a multiple of device_rows × sequence_len = {rows:,}; "
            f"use {below:,} or {below + rows:,}"
        )
    sft_rows = config.sft.device_rows if config.sft.device_rows > 0 else config.pretrain.device_rows
    sft_batch = config.sft.batch_tokens if config.sft.batch_tokens > 0 else batch
    if sft_batch % (sft_rows * gpt.sequence_len):
        raise UserError(
            f"sft.batch_tokens {sft_batch:,} is not a multiple of sft.device_rows × sequence_len = "
            f"{sft_rows * gpt.sequence_len:,}"
        )
    if config.model.dtype not in DTYPES:
        raise UserError(f"model.dtype {config.model.dtype!r} is unknown, use {', '.join(DTYPES)}")
    if config.tokenizer.doc_cap > MAX_DOC_CAP:
        raise UserError(f"tokenizer.doc_cap is {config.tokenizer.doc_cap:,}, must be at most {MAX_DOC_CAP:,}")
    if config.rl.top_k < 0:
        raise UserError(f"rl.top_k is {config.rl.top_k}, must be at least 0 (0 = the whole vocabulary)")
    longest = max(config.rl.max_new_tokens, config.evaluation.chat_max_new_tokens)
    if longest >= gpt.sequence_len:
        raise UserError(
            f"rl.max_new_tokens and evaluation.chat_max_new_tokens must stay below model.sequence_len "
            f"{gpt.sequence_len}, got {longest}"
        )
    if not 0 < config.data.real_share <= 1:
        raise UserError(f"data.real_share {config.data.real_share} must be above 0 and at most 1")
    if config.data.epochs <= 0:
        raise UserError(f"data.epochs {config.data.epochs} must be above 0")
    if config.rl.samples < 2:
        raise UserError(f"rl.samples {config.rl.samples} must be at least 2: advantages compare answers")


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
