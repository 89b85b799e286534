"""The tree of frozen dataclasses that describes a run.

What it leaves open (-1) follows from `model.depth` by the rules in sizing.py. The named presets and everything callers
need are in presets.py; overrides and checks are in settings.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from nanochat_lib.errors import UserError
from nanochat_lib.sizing import REFERENCE_DEPTH, GPTConfig, Horizon, horizon, width_from_depth

ATTENTION = ("auto", "reference", "xla", "pallas", "splash", "cudnn")
MASTERS = ("float32", "bfloat16")
REMAT = ("auto", "none", "blocks")
SCHEDULES = ("nanochat", "trapezoid", "cosine")
ON_STALL = ("report", "stop")
ON_FINISH = ("stay", "shutdown")
MIXTURES = ("primer", "nanochat", "nanochat-historic", "nanochat-after-mid")  # chat_data.py says what they hold
MID_MIXTURES = ("none", "primer", "nanochat", "nanochat-historic")
RL_TASKS = ("primer-word-sums", "primer-sums", "primer-spelling", "gsm8k")
RUN_CODE = ("no", "limits", "namespaces", "bubblewrap")  # then sandbox.LEVELS, weakest first


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
    recipe: str = "head"  # "head" (July 2026) or "recipe4" (March 2026)


@dataclass(frozen=True)
class ComputeConfig:
    """How a run computes, not what: precision, kernels, memory, and how the work is spread over devices."""

    dtype: str = "auto"  # of activations and matrix products: auto = float32 on CPU, bfloat16 on accelerators
    attention: str = "auto"  # the backend, one of ATTENTION
    masters: str = "float32"  # dtype in which the weights are kept between steps
    fp8: bool = False  # the blocks' matrix products in 8-bit floats while training; never the head, never evaluation
    loss_chunks: int = -1  # pieces in which logits and loss are computed; -1: by rule
    fsdp: int = 1  # devices over which the working copy of the weights is split; the state is split over all
    remat: str = "auto"  # what the backward pass computes again instead of keeping: none, or the blocks' insides


@dataclass(frozen=True)
class TokenizerConfig:
    vocab_size: int = 32768  # specials included
    max_chars: int = 2_000_000_000
    doc_cap: int = 10_000  # characters of a document that are read


@dataclass(frozen=True)
class DataConfig:
    corpus: str = "primer"  # climbmix, fineweb-edu, a path (.txt, .jsonl, .parquet, a folder), or a URL of shards
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
    warmdown_ratio: float = 0.65  # share of the steps; not read by cosine, which falls from the end of the warm-up
    final_lr_frac: float = 0.05
    schedule: str = "nanochat"  # or trapezoid, cosine: schedules.py says what each of them does
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
    keep: int = 2  # newest checkpoints kept, the final one included
    keep_every: int = -1  # checkpoints whose step is a multiple of this are kept for good
    log_every: int = 10


@dataclass(frozen=True)
class SFTConfig:
    """Training on conversations: the section `sft`, and `mid`, an optional stage of the same kind before it."""

    mixture: str = "primer"  # one of MIXTURES; of `mid` one of MID_MIXTURES, "none" leaves that stage out
    conversations: int = -1  # primer: training conversations that are generated; -1: what the tasks hold
    mmlu_copies: int = 3  # nanochat's mixtures: how often MMLU's training questions occur
    gsm8k_copies: int = 4
    identity_copies: int = 2  # of the mixtures that have identity conversations
    identity: str = ""  # their file; "": where `nanochat data identity` or `nanochat data get identity` puts it
    words: str = ""  # file of words to spell, one a line; "": words of Python's own documentation
    all_tokens: bool = False  # train questions and tool results too, as in pretraining
    warm_start: bool = True  # go on with the optimiser's state of the stage before
    embedding_lr: float = -1.0  # -1: pretraining's; these three before any transfer to the batch
    unembedding_lr: float = -1.0
    matrix_lr: float = -1.0
    steps: int = -1  # -1: one pass over the mixture
    batch_tokens: int = -1  # -1: as in pretraining
    device_rows: int = -1  # -1: as in pretraining
    lr_frac: float = 0.8  # of the rates
    warmup_ratio: float = 0.0
    warmdown_ratio: float = 0.5
    final_lr_frac: float = 0.0
    momentum_steps: int = 300  # in which Muon's momentum rises from 0.85 to 0.95; 0: it is 0.95 from the start
    eval_every: int = 200
    eval_tokens: int = 40 * 524288
    save_every: int = 1000
    keep: int = 2
    keep_every: int = -1
    log_every: int = 10


# nanochat's midtraining of 2025: every token trained, rates of its own that fall over the last fifth.
MID = SFTConfig(
    mixture="none", mmlu_copies=1, gsm8k_copies=1, all_tokens=True, warm_start=False, embedding_lr=0.2,
    unembedding_lr=0.004, matrix_lr=0.02, batch_tokens=524288, lr_frac=1.0, warmdown_ratio=0.2, eval_every=150,
    eval_tokens=20 * 524288,
)  # fmt: skip


@dataclass(frozen=True)
class RLConfig:
    task: str = "primer-word-sums"  # one of RL_TASKS
    reward: str = "exact"  # what is maximised: exact, format, module:function, file.py:function, or a sum of them
    steps: int = -1  # -1: one pass over the task's training questions
    questions_per_step: int = 16
    samples: int = 16  # answers sampled per question
    rollout_rows: int = 128  # answers that a device writes at a time, which bounds the memory of their cache
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
    keep_every: int = -1
    log_every: int = 1


@dataclass(frozen=True)
class EvalConfig:
    core_max_per_task: int = -1
    chat_max_per_task: int = -1
    chat_max_new_tokens: int = 512
    batch_rows: int = 32
    run_code: str = "no"  # HumanEval runs what the model wrote: the weakest isolation that is accepted, one of RUN_CODE
    bigram: bool = True  # also measure the byte-bigram model, the yardstick of the CPU presets


@dataclass(frozen=True)
class OpsConfig:
    """How a run is kept, watched and paid for. Nothing here changes what is computed, so a restart may change it."""

    durable: str = ""  # folder or URL (gs://…, s3://…) that outlives the machine: checkpoints and the run's small files
    ephemeral_ok: bool = False  # an accelerator's run without `durable`: yes, it may be lost with the machine
    stall_factor: float = 30.0  # no step for this many times the median step counts as a stall,
    stall_seconds: float = 600.0  # but never sooner than this
    on_stall: str = "report"  # report: dump the stacks and mark the run; stop: end the process as well, to be restarted
    on_finish: str = "stay"  # shutdown: the machine is switched off when the run is done, has failed or was ended
    finish_seconds: float = 120.0  # between the line that says so and the switching off
    grace_seconds: float = 25.0  # from SIGTERM or Ctrl-C to the end, whatever the process is doing
    kept_ids: bool = True  # pretraining reads the token ids kept beside shards (`nanochat data encode`); false: encodes
    guard_steps: int = 10  # steps of each start that guards.py checks whole; -1: all, 0: none
    usd_per_hour: float = -1.0  # what the whole machine costs; 0: an own one; -1: by hardware.py's table of chips
    spot: bool = False  # the machine is rented at the price of one that may be taken away


@dataclass(frozen=True)
class RunConfig:
    """Everything that decides what a run computes, and how. Written as `config.json` into the run's folder."""

    preset: str
    about: str
    target: Target = field(default_factory=Target)
    seed: int = 0
    model: ModelConfig = field(default_factory=ModelConfig)
    compute: ComputeConfig = field(default_factory=ComputeConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    data: DataConfig = field(default_factory=DataConfig)
    pretrain: PretrainConfig = field(default_factory=PretrainConfig)
    mid: SFTConfig = MID
    sft: SFTConfig = field(default_factory=SFTConfig)
    rl: RLConfig = field(default_factory=RLConfig)
    evaluation: EvalConfig = field(default_factory=EvalConfig)
    ops: OpsConfig = field(default_factory=OpsConfig)

    def gpt_config(self, vocab_size: int | None = None, depth: int | None = None) -> GPTConfig:
        """The model's shape; `vocab_size` is the tokenizer's real one when it is known."""
        model = self.model
        depth = depth or model.depth
        n_embd, n_head = width_from_depth(depth, model.aspect_ratio, model.head_dim)
        if model.n_embd > 0 and depth == model.depth:
            n_embd, n_head = model.n_embd, model.n_embd // model.head_dim
            if n_embd % model.head_dim:
                near = max(n_head, 1) * model.head_dim
                raise UserError(
                    f"model.n_embd {n_embd} is not a multiple of model.head_dim {model.head_dim}; "
                    f"use {near} or {near + model.head_dim}"
                )
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

    @property
    def has_mid(self) -> bool:
        """Whether there is a stage between pretraining and SFT."""
        return self.mid.mixture != "none"

    def horizon(self, vocab_size: int | None = None) -> Horizon:
        """Steps, batch and transferred hyper-parameters of pretraining."""
        # The d12 yardstick exists only for families whose width follows from depth; kv_groups may not divide it.
        reference = replace(self, model=replace(self.model, kv_groups=1)).gpt_config(vocab_size, REFERENCE_DEPTH)
        stage = self.pretrain
        return horizon(self.gpt_config(vocab_size), reference, stage.ratio, stage.steps, stage.batch_tokens)
