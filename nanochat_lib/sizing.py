"""Every size that follows from a model's configuration: widths, parameter counts, FLOPs, batch size and horizon.

Plain arithmetic, no arrays: usable before anything is built. The rules are nanochat's (head of July 2026) and its
"recipe 4" (March 2026). Batch size follows tokens^0.383 (Power Lines, arXiv:2505.13738), weight decay keeps
batch/(lr·decay·tokens) constant (arXiv:2405.13698).
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields

from nanochat_lib.errors import UserError

VOCAB_MULTIPLE = 64  # tables are padded to a multiple of this, so that they divide over devices
REFERENCE_BATCH = 2**19  # tokens a step of the d12 from which learning rates and decay are transferred
REFERENCE_DEPTH = 12


@dataclass(frozen=True)
class GPTConfig:
    """The model's shape. The first seven fields are nanochat's own model_config; `recipe` selects its generation."""

    sequence_len: int = 2048
    vocab_size: int = 32768
    n_layer: int = 12
    n_head: int = 6
    n_kv_head: int = 6
    n_embd: int = 768
    window_pattern: str = "SSSL"
    recipe: str = "head"  # "head" (July 2026) or "recipe4" (March 2026)

    def __post_init__(self) -> None:
        for name in ("sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd"):
            if getattr(self, name) < 1:
                raise UserError(f"model: {name} is {getattr(self, name)}, must be at least 1")
        if self.n_embd % self.n_head:
            raise UserError(f"model: n_embd {self.n_embd} is not a multiple of n_head {self.n_head}")
        if self.head_dim % 2:
            raise UserError(f"model: head size {self.head_dim} is odd, rotary embedding needs an even one")
        if self.n_head % self.n_kv_head:
            raise UserError(f"model: n_head {self.n_head} is not a multiple of n_kv_head {self.n_kv_head}")
        if self.n_embd < self.smear_channels:
            raise UserError(f"model: n_embd {self.n_embd} is below {self.smear_channels}, which the gates read")
        if not self.window_pattern or set(self.window_pattern.upper()) - set("SL"):
            raise UserError(f"model: window_pattern {self.window_pattern!r} may hold only the letters S and L")
        if self.recipe not in ("head", "recipe4"):
            raise UserError(f"model: recipe {self.recipe!r} is unknown, use head or recipe4")

    @property
    def head_dim(self) -> int:
        return self.n_embd // self.n_head

    @property
    def padded_vocab_size(self) -> int:
        return VOCAB_MULTIPLE * math.ceil(self.vocab_size / VOCAB_MULTIPLE)

    @property
    def gate_channels(self) -> int:
        """Channels of the block input that the value-embedding gate reads."""
        return 32 if self.recipe == "recipe4" else 12

    @property
    def smear_channels(self) -> int:
        return 24

    @property
    def windows(self) -> tuple[int, ...]:
        """Left window of each layer: a query sees itself and so many keys before it. The last layer is always long."""
        long = self.sequence_len
        short = long // 2 if self.recipe == "recipe4" else 128 * math.ceil(long / 512)
        pattern = self.window_pattern.upper()
        letters = [pattern[i % len(pattern)] for i in range(self.n_layer)]
        letters[-1] = "L"
        return tuple(long if letter == "L" else short for letter in letters)

    def has_value_embedding(self, layer: int) -> bool:
        """Every other layer, always including the last."""
        return layer % 2 == (self.n_layer - 1) % 2

    @property
    def value_embedding_layers(self) -> tuple[int, ...]:
        return tuple(i for i in range(self.n_layer) if self.has_value_embedding(i))

    def to_dict(self) -> dict:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict) -> GPTConfig:
        """Inverse of `to_dict`; also reads nanochat's seven-key model_config. Unknown keys are an error."""
        known = {f.name for f in fields(cls)}
        if unknown := sorted(set(values) - known):
            raise UserError(
                f"model configuration has unknown keys {', '.join(unknown)}; known: {', '.join(sorted(known))}"
            )
        return cls(**values)


def width_from_depth(depth: int, aspect_ratio: int = 64, head_dim: int = 128) -> tuple[int, int]:
    """(n_embd, n_head): depth × aspect ratio, rounded up to whole heads."""
    n_embd = head_dim * math.ceil(depth * aspect_ratio / head_dim)
    return n_embd, n_embd // head_dim


def count_params(config: GPTConfig) -> dict[str, int]:
    """Parameters by group, the padded rows of the tables included; `total` is their sum."""
    c, v, layers = config.n_embd, config.padded_vocab_size, config.n_layer
    kv_width = config.n_kv_head * config.head_dim
    n_ve = len(config.value_embedding_layers)
    matrices = layers * (2 * c * c + 2 * c * kv_width + 8 * c * c) + n_ve * config.gate_channels * config.n_kv_head
    groups = {
        "wte": v * c,
        "value_embeds": n_ve * v * kv_width,
        "lm_head": v * c,
        "transformer_matrices": matrices,
        "scalars": 2 * layers + (config.smear_channels + 2 if config.recipe == "head" else 0),
    }
    return groups | {"total": sum(groups.values())}


def scaling_params(config: GPTConfig) -> int:
    """Parameters that set horizon, batch size and decay: the blocks' matrices and the output head."""
    groups = count_params(config)
    return groups["transformer_matrices"] + groups["lm_head"]


def flops_per_token(config: GPTConfig) -> int:
    """Training FLOPs a token (forward and backward): 6 per matrix weight, 12·H·D per visible key of each layer."""
    matmul_weights = scaling_params(config) + (config.smear_channels if config.recipe == "head" else 0)
    attention = sum(12 * config.n_embd * min(window, config.sequence_len) for window in config.windows)
    return 6 * matmul_weights + attention


def batch_for(tokens: float, reference_tokens: float) -> int:
    """Tokens an optimiser step of a run of `tokens`: a power of two.

    The reference run, 2^19 tokens a step, has `reference_tokens`; from there the batch grows as tokens^0.383, to the
    nearest power of two in the logarithm.
    """
    return 2 ** round(math.log2(REFERENCE_BATCH * (tokens / reference_tokens) ** 0.383))


def transfer_scales(batch_tokens: int, tokens: float, reference_tokens: float) -> tuple[float, float]:
    """Factors on every learning rate and on Muon's weight decay, from the reference run to one of this size.

    Rates follow √batch; the decay keeps batch / (rate · decay · tokens) what it is in the reference.
    """
    scale = math.sqrt(batch_tokens / REFERENCE_BATCH)
    return scale, scale * reference_tokens / tokens


@dataclass(frozen=True)
class Horizon:
    """How long to train and with which transferred hyper-parameters."""

    tokens: int  # target tokens by the ratio
    batch_tokens: int  # tokens an optimiser step
    steps: int
    lr_scale: float  # √(batch / reference batch), applied to every learning rate
    decay_scale: float  # factor on Muon's weight decay


def horizon(config: GPTConfig, reference: GPTConfig, ratio: float, steps: int = -1, batch_tokens: int = -1) -> Horizon:
    """Horizon of `config` at `ratio` tokens per scaling parameter.

    `reference` is the d12 of the same family. A positive `steps` or `batch_tokens` overrides the derived one; the
    learning-rate and decay transfer apply in either case.
    """
    target = int(ratio * scaling_params(config))
    reference_target = ratio * scaling_params(reference)
    if batch_tokens <= 0:
        batch_tokens = batch_for(target, reference_target)
    lr_scale, decay_scale = transfer_scales(batch_tokens, target, reference_target)
    return Horizon(
        tokens=target,
        batch_tokens=batch_tokens,
        steps=steps if steps > 0 else target // batch_tokens,
        lr_scale=lr_scale,
        decay_scale=decay_scale,
    )
