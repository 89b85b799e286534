"""nanochat's optimiser files and our OptState: shards of several ranks are merged, and cut again for any number.

Parameters are numbered through the groups in order. Each rank stores (ZeRO-2): of AdamW parameters with 1024 numbers or
more its slice of the rows, of smaller ones everything; of a Muon group of K matrices, under the number of its first
parameter, ceil(K / ranks) of them, the last ranks padded with zeros.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from nanochat_lib import optim
from nanochat_lib.errors import UserError
from nanochat_lib.muon import HEAD, RECIPE4, StackState
from nanochat_lib.optim import Group, OptState
from nanochat_lib.presets import OptimConfig
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.upstream.model import dtype_name, to_numpy, to_tensor

SMALL = 1024  # AdamW parameters below so many numbers are not sharded
ADAMW = ("exp_avg", "exp_avg_sq")
MUON = ("momentum_buffer", "second_momentum_buffer")

Shapes = Mapping[str, tuple[int, ...]]


def numbered(config: GPTConfig, shapes: Shapes, lrs: Any = None) -> list[tuple[int, Group]]:
    """(number of its first parameter, group) of every group."""
    groups = optim.param_groups(config, lrs or OptimConfig(), shapes)
    return list(zip(accumulate((len(group.params) for group in groups), initial=0), groups, strict=False))


def group_dicts(config: GPTConfig, shapes: Shapes, lrs: Any, lr: float, momentum: float, weight_decay: float) -> list:
    """nanochat's param_groups for the rates `lrs`, as they stand after a step with these three hyper-parameters."""
    muon = RECIPE4 if config.recipe == "recipe4" else HEAD
    result = []
    for first, group in numbered(config, shapes, lrs):
        common = {"initial_lr": group.lr, "params": list(span(first, group))}
        entry = {"kind": group.kind, "lr": group.lr * lr}
        if group.kind == "adamw":
            entry |= {"betas": group.betas, "eps": optim.EPS, "weight_decay": group.weight_decay}
        else:
            entry |= {
                "momentum": momentum, "ns_steps": len(muon.coefficients), "beta2": muon.beta2,
                "weight_decay": weight_decay,
            }  # fmt: skip
        result.append(entry | common)
    return result


def merge(
    shards: Mapping[int, Any], config: GPTConfig, shapes: Shapes, where: object
) -> tuple[OptState, list[dict], dict[str, str], int]:
    """(state, param_groups, types of moments that are not float32, number of ranks) of the files {rank: content}.

    Types are keyed by parameter, for Muon by the group's name. Raises UserError when a rank is missing, when the files
    are not of one run, or when they are another model's.
    """
    groups = numbered(config, shapes)
    for rank, shard in shards.items():
        check_layout(shard, groups, f"{where}, rank {rank}")
    any_shard = next(iter(shards.values()))
    rows = any_shard["state"][0]["exp_avg"].shape[:1].numel() or 1  # lm_head is number 0
    ranks = max(shapes["lm_head.weight"][0] // rows, 1)
    if set(shards) != set(range(ranks)):
        found = ", ".join(map(str, sorted(shards)))
        raise UserError(f"{where}: its optimiser is in the files of {ranks} ranks, here are those of {found}: copy all")
    states = [shards[rank]["state"] for rank in range(ranks)]
    param_groups = any_shard["param_groups"]
    if any(shard["param_groups"] != param_groups for shard in shards.values()):
        raise UserError(f"{where}: the ranks' optimiser files have different param_groups: they are not of one step")

    dtypes: dict[str, str] = {}

    def whole(number: int, key: str, shape: tuple[int, ...], sharded: bool, name: str) -> np.ndarray:
        parts = [state[number][key] for state in states if number in state]
        label = f"{where}: {key} of {name}"
        if not sharded and any(not torch.equal(part, parts[0]) for part in parts):
            raise UserError(f"{label} differs between the ranks: the files are not of one run")
        found = [tuple(part.shape) for part in parts]
        fits = all(size[1:] == shape[1:] for size in found)
        joined = (torch.cat(parts)[: shape[0]] if sharded else parts[0]) if fits and parts else None
        if joined is None or joined.shape != shape:
            raise UserError(f"{label} has the shapes {', '.join(map(str, found))}, together it must be {shape}")
        if (dtype := dtype_name(joined, label)) != "float32":
            dtypes[name] = dtype
        return to_numpy(joined)

    steps, moments, stacks = set(), {key: {} for key in ADAMW}, {}
    for first, group in groups:
        if group.kind == "muon":
            r, n = shapes[group.params[0]]
            k = len(group.params)
            second = (k, r, 1) if r >= n else (k, 1, n)
            pairs = zip(MUON, ((k, r, n), second), strict=True)
            stacks[group.name] = StackState(*(whole(first, key, shape, True, group.name) for key, shape in pairs))
            continue
        for number, name in enumerate(group.params, first):
            steps |= {state[number]["step"] for state in states}
            sharded = math.prod(shapes[name]) >= SMALL
            for key in ADAMW:
                moments[key][name] = whole(number, key, shapes[name], sharded, name)
    if len(steps) > 1:
        found = ", ".join(map(str, sorted(steps)))
        raise UserError(f"{where}: the parameters have seen different numbers of steps ({found}), ours have one count")
    state = OptState(step=np.int32(steps.pop()), **moments, muon=stacks)
    return state, param_groups, dtypes, ranks


def check_layout(shard: Any, groups: list[tuple[int, Group]], where: str) -> None:
    """UserError unless `shard` has these groups, and for every one of them a state of the right form."""
    adamw = {"step": int} | dict.fromkeys(ADAMW, torch.Tensor)
    form, muon = {}, {first for first, group in groups if group.kind == "muon"}
    for first, group in groups:
        form |= (
            {first: dict.fromkeys(MUON, torch.Tensor)} if first in muon else dict.fromkeys(span(first, group), adamw)
        )
    try:
        found = {number: {key: type(value) for key, value in entry.items()} for number, entry in shard["state"].items()}
        found = {number: form[number] for number in muon} | found  # a rank that owns none of a group may have no state
        same_groups = [(g["kind"], list(g["params"])) for g in shard["param_groups"]] == [
            (group.kind, list(span(first, group))) for first, group in groups
        ]
        json.dumps(shard["param_groups"], allow_nan=False)  # an error unless plain data
        fits = found == form and same_groups
    except (TypeError, KeyError, AttributeError, ValueError):
        fits = False
    if not fits:
        raise UserError(f"{where}: this is not the optimiser's state of this model")


def span(first: int, group: Group) -> range:
    """The numbers of a group's parameters."""
    return range(first, first + len(group.params))


def split(
    state: OptState, config: GPTConfig, shapes: Shapes, param_groups: list[dict], dtypes: Mapping[str, str], ranks: int
) -> list[dict]:
    """Inverse of `merge`: the content of the optimiser file of each rank."""
    shards: list[dict] = [{} for _ in range(ranks)]
    for first, group in numbered(config, shapes):
        if group.kind == "muon":
            dtype, chunk = dtypes.get(group.name, "float32"), -(-len(group.params) // ranks)
            for rank, shard in enumerate(shards):
                shard[first] = {}
                for key, stack in zip(MUON, state.muon[group.name], strict=True):
                    part = np.asarray(stack)[rank * chunk : (rank + 1) * chunk]
                    padding = ((0, chunk - len(part)), (0, 0), (0, 0))
                    shard[first][key] = to_tensor(np.pad(part, padding), dtype)
            continue
        for number, name in enumerate(group.params, first):
            rows, dtype = shapes[name][0], dtypes.get(name, "float32")
            sharded = math.prod(shapes[name]) >= SMALL
            if sharded and rows % ranks:
                raise UserError(f"{name} has {rows} rows, which {ranks} ranks cannot share equally: use a divisor")
            for rank, shard in enumerate(shards):
                mine = slice(rank * rows // ranks, (rank + 1) * rows // ranks) if sharded else slice(None)
                moments = {key: np.asarray(getattr(state, key)[name])[mine] for key in ADAMW}
                shard[number] = {"step": int(state.step)} | {k: to_tensor(m, dtype) for k, m in moments.items()}
    seen: dict = {}  # equal texts and tuples are one object, as in nanochat: pickle writes each object once

    def shared(value: Any) -> Any:
        if isinstance(value, list) and not all(isinstance(item, int) for item in value):
            value = tuple(value)  # betas: JSON knows no tuples
        return seen.setdefault(value, value) if isinstance(value, (str, tuple)) else value

    groups = [{shared(key): shared(value) for key, value in entry.items()} for entry in param_groups]
    return [{"state": shard, "param_groups": groups} for shard in shards]
