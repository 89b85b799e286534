"""Memory and time of a training step from the configuration alone: for chips that no compiler here knows, and as the
figure to hold the compiler's against. Estimates, each by a formula that stands beside it.
"""

from __future__ import annotations

from nanochat_lib.hardware import Chip
from nanochat_lib.presets import RunConfig
from nanochat_lib.sizing import count_params, flops_per_token

# Bytes that a token leaves behind in one layer for the backward pass, in units of C channels of the compute dtype:
# stream, its norm, q, k, v before and after rotation and norm, attention's result, the second norm, the MLP's 4C.
KEPT_PER_LAYER = 16.0
KEPT_WITH_REMAT = 11.0  # what products made: q, k, v, attention's result, both projections, the MLP's 4C


def memory(config: RunConfig, bytes_per_value: int, loss_chunks: int) -> dict[str, float]:
    """Bytes of one device by what they hold; the sum is the peak."""
    model, devices, fsdp = config.gpt_config(), config.target.devices, config.compute.fsdp
    groups = count_params(model)
    tables, total = groups["wte"] + groups["value_embeds"], groups["total"]
    dense = total - tables
    master = 2 if config.compute.masters == "bfloat16" else 4
    tokens = config.pretrain.device_rows * model.sequence_len  # of a micro-batch
    step_tokens = config.horizon().batch_tokens // devices
    kept = KEPT_WITH_REMAT if config.compute.remat == "blocks" else KEPT_PER_LAYER
    width = groups["value_embeds"] // model.padded_vocab_size + model.n_embd  # of all tables together
    return state_memory(groups, master, devices) | {
        "working copy": total * bytes_per_value / fsdp if devices > 1 or bytes_per_value != master else 0,
        "gradients": dense * 4 / fsdp,
        "table rows' gradients": step_tokens * width * bytes_per_value,
        "one table's gradient": model.padded_vocab_size * model.n_embd * 4,
        "activations": tokens * model.n_layer * kept * model.n_embd * bytes_per_value,
        "logits": tokens / loss_chunks * model.padded_vocab_size * (4 + bytes_per_value),
    }


def state_memory(groups: dict[str, int], master: int, devices: int) -> dict[str, float]:
    """Bytes of one device between steps: the state is cut over all `devices`, `master` bytes a weight.

    groups: sizing.count_params. Muon keeps one float32 moment of its matrices, AdamW two of everything else.
    """
    matrices, total = groups["transformer_matrices"], groups["total"]
    return {
        "master weights": total * master / devices,
        "moments": (4 * matrices + 8 * (total - matrices)) / devices,
    }


def step_flops(config: RunConfig) -> float:
    """Useful FLOPs of one optimiser step on one device, by nanochat's formula."""
    return flops_per_token(config.gpt_config()) * config.horizon().batch_tokens / config.target.devices


def seconds(config: RunConfig, chip: Chip, bytes_per_value: int) -> dict[str, float]:
    """Lower bounds of a step on one device: time of the products, and time of the memory traffic."""
    model, devices, fsdp = config.gpt_config(), config.target.devices, config.compute.fsdp
    groups = count_params(model)
    dense = groups["total"] - groups["wte"] - groups["value_embeds"]
    tokens = config.pretrain.device_rows * model.sequence_len
    micro = max(config.horizon().batch_tokens // (devices * tokens), 1)
    kept = KEPT_PER_LAYER * model.n_embd * model.n_layer * bytes_per_value
    traffic = (
        micro * (3 * dense * bytes_per_value + 8 * dense / fsdp + 2 * tokens * kept) + 5 * 4 * groups["total"] / devices
    )
    return {"products": product_seconds(config, chip), "memory": traffic / chip.bandwidth if chip.bandwidth else 0.0}


def product_seconds(config: RunConfig, chip: Chip) -> float:
    """Time of the products at the chip's peak: those of the blocks at the float8 rate under fp8, where it has one."""
    flops, peak = step_flops(config), chip.peak["bfloat16"]
    if not config.compute.fp8 or "float8" not in chip.peak:
        return flops / peak
    groups = count_params(config.gpt_config())
    tokens = config.horizon().batch_tokens / config.target.devices
    quantised = 6 * groups["transformer_matrices"] * tokens
    return quantised / chip.peak["float8"] + (flops - quantised) / peak
