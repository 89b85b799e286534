"""A state dict of nanochat's and our parameters: which generation it is, what it must hold, and in which types.

Names and shapes come from the PyTorch twin, whose modules are called as nanochat's. Ours are float32 throughout; a
table that was stored in bfloat16 is exact in float32, and goes back to bfloat16 without loss.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from nanochat_lib.errors import UserError
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.twin import GPT

COMPILED = "_orig_mod."  # prefix that torch.compile leaves in front of names
SMEAR = {"smear_gate.weight", "smear_lambda", "backout_lambda"}
PATCHED = {"resid_lambdas": 1.0, "x0_lambdas": 0.0}  # what a layer did before these were learned
FIELDS = ("sequence_len", "vocab_size", "n_layer", "n_head", "n_kv_head", "n_embd", "window_pattern")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


def layout(config: GPTConfig) -> OrderedDict:
    """nanochat's state dict of `config`, in its order, as tensors without memory."""
    with torch.device("meta"):
        return GPT(config).state_dict()


def recipe_of(state: Mapping[str, Any], where: object) -> str:
    """The recipe, "head" or "recipe4": seen in the smear parameters and the width of the value embeddings' gates."""
    smear = SMEAR & state.keys()
    gates = {tensor.shape[-1] for name, tensor in state.items() if name.endswith(".attn.ve_gate.weight")}
    if gates == {12} and smear == SMEAR:
        return "head"
    if gates == {32} and not smear:
        return "recipe4"
    readable = "readable are head (July 2026) and recipe 4 (March 2026)"
    if not gates:
        raise UserError(f"{where} has no gated value embeddings, it is older than January 2026; {readable}")
    width = " and ".join(map(str, sorted(gates)))
    found = f"gates of {width} channels and {', '.join(sorted(smear)) or 'no smear'}"
    raise UserError(f"{where} is of another generation ({found}); {readable}")


def read_config(values: dict, recipe: str, where: object) -> GPTConfig:
    """The GPTConfig of a meta file's model_config. A missing window_pattern means full attention in every layer."""
    values = {"window_pattern": "L"} | values
    if missing := [name for name in FIELDS if name not in values]:
        raise UserError(f"{where}: model_config lacks {', '.join(missing)}")
    for name in FIELDS:
        wanted = str if name == "window_pattern" else int
        if type(values[name]) is not wanted:
            raise UserError(f"{where}: model_config.{name} is {values[name]!r}, must be {wanted.__name__}")
    try:
        return GPTConfig.from_dict(values | {"recipe": recipe})
    except UserError as error:
        raise UserError(f"{where}: {error}") from None


def to_params(state: Any, values: dict, where: object, meta: object) -> tuple[GPTConfig, dict, dict, list[str]]:
    """(configuration, float32 parameters, types that are not float32, parameters that were added).

    `state` is what model_<step>.pt holds, `values` the model_config. Raises UserError naming the first difference.
    """
    tensors = isinstance(state, Mapping) and all(isinstance(name, str) for name in state)
    if not tensors or not all(isinstance(tensor, torch.Tensor) for tensor in state.values()):
        raise UserError(f"{where} is no state dict (a mapping of names to tensors)")
    state = {name.removeprefix(COMPILED): tensor for name, tensor in state.items()}
    config = read_config(values, recipe_of(state, where), meta)
    blocks = sum(name.endswith(".attn.c_q.weight") for name in state)
    if blocks != config.n_layer:
        raise UserError(f"{where} has {blocks} layers, its model_config says n_layer {config.n_layer}: other files")
    wanted = {name: tuple(tensor.shape) for name, tensor in layout(config).items()}
    patched = [name for name in PATCHED if name not in state]
    for name in patched:
        state[name] = torch.full(wanted[name], PATCHED[name])
    given = {name: tuple(tensor.shape) for name, tensor in state.items()}
    if wrong := [name for name in wanted | given if wanted.get(name) != given.get(name)]:
        name = wrong[0]
        raise UserError(
            f"{where} does not fit its model_config: {name} is {given.get(name, 'missing')}, wanted is "
            f"{wanted.get(name, 'no such parameter')} ({len(wrong)} such differences)"
        )
    dtypes = {name: dtype_name(state[name], f"{where}: {name}") for name in wanted}
    params = {name: to_numpy(state[name]) for name in wanted}
    return config, params, {name: dtype for name, dtype in dtypes.items() if dtype != "float32"}, patched


def to_state_dict(
    config: GPTConfig, params: Mapping[str, Any], dtypes: Mapping[str, str], patched: list[str]
) -> OrderedDict:
    """Inverse of `to_params`. UserError when `params` is not the whole model."""
    state = layout(config)
    wanted = {name: tuple(tensor.shape) for name, tensor in state.items()}
    given = {name: tuple(value.shape) for name, value in params.items()}
    if wrong := sorted(name for name in wanted.keys() | given.keys() if wanted.get(name) != given.get(name)):
        raise UserError(f"these parameters are no {config.recipe} model of this configuration: {', '.join(wrong[:3])}")
    for name in wanted:
        if name in patched:
            del state[name]
        else:
            state[name] = to_tensor(params[name], dtypes.get(name, "float32"))
    return state


def dtype_name(tensor: torch.Tensor, where: str) -> str:
    """The name in DTYPES of a tensor's type; other types have no exact place in float32."""
    found = [name for name, dtype in DTYPES.items() if dtype == tensor.dtype]
    if not found or tensor.layout != torch.strided:
        raise UserError(f"{where} is {tensor.dtype}, must be a plain tensor of {', '.join(DTYPES)}")
    return found[0]


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().float().numpy()


def to_tensor(value: Any, dtype: str) -> torch.Tensor:
    """An array as a tensor that owns its memory, so that nothing else is saved with it."""
    return torch.from_numpy(np.array(value, np.float32)).to(DTYPES[dtype])
