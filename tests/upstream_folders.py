"""Folders as nanochat leaves them, made with torch and pickle alone, and exact comparison of what is in two of them."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import tiktoken
import torch
import vectors

from nanochat_lib import gpt, twin
from nanochat_lib.bpe import SPLIT_PATTERN
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.tokenizer import SPECIAL_TOKENS
from nanochat_lib.twin_optim import MuonAdamW

torch.set_num_threads(1)  # small matrices: a second thread costs more than it does

STEP = 20
# 384 padded rows divide by 3. Two layers: the windows, a layer with and one without value embeddings.
HEAD = GPTConfig(sequence_len=16, vocab_size=380, n_layer=2, n_head=2, n_kv_head=1, n_embd=32, window_pattern="SL")
CONFIGS = {"head": HEAD, "recipe4": replace(HEAD, recipe="recipe4")}
MERGES = [bytes([97 + i // 20, 97 + i % 20]) for i in range(HEAD.vocab_size - 256 - 9)]
RATES = {"unembedding_lr": 0.008, "embedding_lr": 0.3, "matrix_lr": 0.02, "scalar_lr": 0.5, "weight_decay": 0.1}
TABLES = ("transformer.wte.weight", "value_embeds.1.weight")


def trained(config: GPTConfig, bf16: bool) -> tuple[twin.GPT, MuonAdamW]:
    """A model with an optimiser that has made two steps."""
    params = {name: torch.from_numpy(vectors.fill(name, shape)) for name, shape in gpt.param_shapes(config).items()}
    if bf16:
        params |= {name: params[name].bfloat16() for name in TABLES}
    model = twin.build(config, params)
    optimizer = MuonAdamW(model, **RATES)
    idx = torch.arange(32).reshape(2, 16)
    for _ in range(2):
        optimizer.zero_grad()
        model(idx, (7 * idx + 3) % 380).backward()
        optimizer.step()
    return model, optimizer


def shard(state: dict, rank: int, ranks: int) -> dict:
    """What one of several ranks holds of an optimiser's state, by nanochat's rules."""
    kinds = {group["params"][0]: group["kind"] for group in state["param_groups"]}
    result = {}
    for number, entry in state["state"].items():
        mine = {}
        for key, value in entry.items():
            if kinds.get(number) == "muon":
                chunk = -(-len(value) // ranks)
                mine[key] = torch.zeros(chunk, *value.shape[1:])
                owned = value[rank * chunk : (rank + 1) * chunk]
                mine[key][: len(owned)] = owned
            elif key != "step" and value.numel() >= 1024:
                rows = len(value) // ranks
                mine[key] = value[rank * rows : (rank + 1) * rows].clone()
            else:
                mine[key] = value
        result[number] = mine
    return {"state": result, "param_groups": state["param_groups"]}


def pickled(merges: list[bytes] = MERGES, specials: dict[str, int] | None = None) -> bytes:
    ranks = {token: i for i, token in enumerate([bytes([b]) for b in range(256)] + merges)}
    specials = specials or {name: len(ranks) + i for i, name in enumerate(SPECIAL_TOKENS)}
    encoding = tiktoken.Encoding("rustbpe", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=specials)
    return pickle.dumps(encoding, protocol=4)


def write(folder: Path, recipe: str = "head", ranks: int = 1, bf16: bool = False) -> Path:
    """A checkpoint folder as nanochat leaves it."""
    config = CONFIGS[recipe]
    model, optimizer = trained(config, bf16)
    state = optimizer.state_dict()
    (folder / "tokenizer").mkdir(parents=True)
    torch.save(model.state_dict(), folder / f"model_{STEP:06d}.pt")
    for rank in range(ranks):
        torch.save(shard(state, rank, ranks), folder / f"optim_{STEP:06d}_rank{rank}.pt")
    meta = {
        "step": STEP, "val_bpb": 3.25, "model_config": {k: v for k, v in config.to_dict().items() if k != "recipe"},
        "user_config": {"depth": 2, "matrix_lr": 0.02}, "loop_state": {"min_val_bpb": float("inf")},
    }  # fmt: skip
    (folder / f"meta_{STEP:06d}.json").write_text(json.dumps(meta, indent=2))
    (folder / "tokenizer" / "tokenizer.pkl").write_bytes(pickled())
    counts = [1] * 256 + [2] * len(MERGES) + [0] * 9
    torch.save(torch.tensor(counts, dtype=torch.int32), folder / "tokenizer" / "token_bytes.pt")
    return folder


def read(path: Path):
    return torch.load(path, weights_only=True)


def same(a, b) -> bool:
    """Equal in structure, types and every bit."""
    if isinstance(a, torch.Tensor):
        view = lambda x: x.contiguous().view(torch.uint8 if x.ndim else torch.int32)  # noqa: E731
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(view(a), view(b))
    if isinstance(a, dict):
        return isinstance(b, dict) and list(a) == list(b) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return type(a) is type(b) and len(a) == len(b) and all(map(same, a, b))
    return type(a) is type(b) and a == b
