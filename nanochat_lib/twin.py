"""The same network as `gpt`, in PyTorch: written a second time from nanochat's description, to check the first.

It shares no line with the JAX model: constants, windows, rotation, attention and loss stand here again, in the form
a PyTorch program would have. Modules carry nanochat's names, so `state_dict()` has the keys, shapes and order of
nanochat's own checkpoints. Whole sequences only, no cache. Works as it is and under `torch.compile`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from nanochat_lib.sizing import GPTConfig


class Recipe(NamedTuple):
    """What differs between head (July 2026) and recipe 4 (March 2026)."""

    smear: bool  # smear and backout exist
    gate_channels: int  # of the block input, read by the value embeddings' gate
    gate_factor: float
    qk_scale: float
    softcap: float
    rotary_base: float
    table_dtype: torch.dtype | None  # None: that of the activations


RECIPES = {
    "head": Recipe(True, 12, 3.0, 1.2, 15.0, 100_000.0, None),
    "recipe4": Recipe(False, 32, 2.0, 1.0, 20.0, 10_000.0, torch.bfloat16),
}
SMEAR_CHANNELS = 24


def windows(config: GPTConfig) -> list[int]:
    """Keys before the query that each layer sees: S or L by the tiled pattern, the last layer always L."""
    long = config.sequence_len
    short = long // 2 if config.recipe == "recipe4" else 128 * math.ceil(long / 4 / 128)
    letters = [config.window_pattern.upper()[i % len(config.window_pattern)] for i in range(config.n_layer)]
    return [long if letter == "L" else short for letter in [*letters[:-1], "L"]]


def norm(x: Tensor) -> Tensor:
    return F.rms_norm(x, (x.size(-1),))


def rotation(length: int, head_dim: int, recipe: Recipe, like: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin, (length, 1, D/2), in the dtype of `like`."""
    channels = torch.arange(0, head_dim, 2, dtype=torch.float32, device=like.device)
    frequency = 1.0 / (recipe.rotary_base ** (channels / head_dim))
    angle = torch.outer(torch.arange(length, dtype=torch.float32, device=like.device), frequency)
    dtype = recipe.table_dtype or like.dtype
    return tuple(f(angle).to(dtype).to(like.dtype)[:, None] for f in (torch.cos, torch.sin))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = x.size(-1) // 2
    x1, x2 = x[..., :half], x[..., half:]
    return torch.cat([x1 * cos + x2 * sin, -x1 * sin + x2 * cos], dim=-1)


def attend(q: Tensor, k: Tensor, v: Tensor, window: int) -> Tensor:
    """Causal attention over the query's own position and `window` before it: (B, T, H, D), (B, T, K, D) twice."""
    length = q.size(1)
    mask = None
    if window < length:
        position = torch.arange(length, device=q.device)
        distance = position[:, None] - position[None, :]
        mask = (distance >= 0) & (distance <= window)
    grouped = q.size(2) != k.size(2)
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=grouped)
    return y.transpose(1, 2)


class Linear(nn.Linear):
    """x Wᵀ with the float32 weight cast to the dtype of x."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    def __init__(self, config: GPTConfig, window: int, gated: bool) -> None:
        super().__init__()
        self.recipe, self.window, self.head_dim = RECIPES[config.recipe], window, config.n_embd // config.n_head
        width, kv_width = config.n_embd, config.n_kv_head * self.head_dim
        self.c_q = Linear(width, width)
        self.c_k = Linear(width, kv_width)
        self.c_v = Linear(width, kv_width)
        self.c_proj = Linear(width, width)
        if gated:
            self.ve_gate = Linear(self.recipe.gate_channels, config.n_kv_head)

    def forward(self, x: Tensor, ve: Tensor | None, cos: Tensor, sin: Tensor) -> Tensor:
        recipe = self.recipe
        q, k, v = (layer(x).unflatten(-1, (-1, self.head_dim)) for layer in (self.c_q, self.c_k, self.c_v))
        if ve is not None:
            gate = recipe.gate_factor * torch.sigmoid(self.ve_gate(x[..., : recipe.gate_channels]))
            v = v + gate.unsqueeze(-1) * ve.unflatten(-1, (-1, self.head_dim))
        q, k = (norm(rotate(a, cos, sin)) * recipe.qk_scale for a in (q, k))
        return self.c_proj(attend(q, k, v, self.window).flatten(-2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.c_fc = Linear(width, 4 * width)
        self.c_proj = Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.c_proj(F.relu(self.c_fc(x)).square())


class Block(nn.Module):
    def __init__(self, config: GPTConfig, window: int, gated: bool) -> None:
        super().__init__()
        self.attn = Attention(config, window, gated)
        self.mlp = MLP(config.n_embd)


class GPT(nn.Module):
    """`model(idx)` gives logits (B, T, V) float32, `model(idx, targets)` the loss in nats.

    idx and targets are int64 (B, T), a target of -1 is ignored. `compute_dtype` is that of the activations. The
    parameters are not initialised in nanochat's way: `build` makes a model of given ones.
    """

    def __init__(self, config: GPTConfig, compute_dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.config, self.compute_dtype, self.recipe = config, compute_dtype, RECIPES[config.recipe]
        layers, width = config.n_layer, config.n_embd
        kv_width, vocab = config.n_kv_head * (width // config.n_head), 64 * math.ceil(config.vocab_size / 64)
        gated = [i % 2 == (layers - 1) % 2 for i in range(layers)]
        self.resid_lambdas = nn.Parameter(torch.ones(layers))
        self.x0_lambdas = nn.Parameter(torch.zeros(layers))
        if self.recipe.smear:
            self.smear_lambda = nn.Parameter(torch.zeros(1))
            self.backout_lambda = nn.Parameter(torch.zeros(1))
        blocks = [Block(config, window, has) for window, has in zip(windows(config), gated, strict=True)]
        self.transformer = nn.ModuleDict({"wte": nn.Embedding(vocab, width), "h": nn.ModuleList(blocks)})
        self.lm_head = Linear(width, vocab)
        if self.recipe.smear:
            self.smear_gate = Linear(SMEAR_CHANNELS, 1)
        self.value_embeds = nn.ModuleDict({str(i): nn.Embedding(vocab, kv_width) for i in range(layers) if gated[i]})

    def forward(self, idx: Tensor, targets: Tensor | None = None, reduction: str = "mean") -> Tensor:
        x = norm(self.transformer["wte"](idx).to(self.compute_dtype))
        if self.recipe.smear:
            gate = self.smear_lambda.to(x.dtype) * torch.sigmoid(self.smear_gate(x[:, 1:, :SMEAR_CHANNELS]))
            x = torch.cat([x[:, :1], x[:, 1:] + gate * x[:, :-1]], dim=1)
        x0 = middle = x
        cos, sin = rotation(idx.size(1), self.config.n_embd // self.config.n_head, self.recipe, x)
        for i, block in enumerate(self.transformer["h"]):
            x = self.resid_lambdas[i] * x + self.x0_lambdas[i] * x0
            ve = self.value_embeds[str(i)](idx).to(x.dtype) if str(i) in self.value_embeds else None
            x = x + block.attn(norm(x), ve, cos, sin)
            x = x + block.mlp(norm(x))
            if i == self.config.n_layer // 2:
                middle = x
        if self.recipe.smear:
            x = x - self.backout_lambda.to(x.dtype) * middle
        logits = self.lm_head(norm(x))[..., : self.config.vocab_size].float()
        logits = self.recipe.softcap * torch.tanh(logits / self.recipe.softcap)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1, reduction=reduction)


def build(
    config: GPTConfig,
    params: Mapping[str, Any],
    compute_dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
) -> GPT:
    """The twin with copies of `params`: {name: tensor, numpy or JAX array}, as `gpt.init_params` or nanochat have them.

    float32, bfloat16 and the device are kept as given for tensors; arrays become float32. Raises RuntimeError, by
    torch, that lists every name or shape that does not fit.
    """
    with torch.device("meta"):
        model = GPT(config, compute_dtype)
    tensors = {
        name: value.detach().clone() if isinstance(value, Tensor) else torch.from_numpy(np.array(value, np.float32))
        for name, value in params.items()
    }
    model.load_state_dict(tensors, strict=True, assign=True)
    return model.to(device)
