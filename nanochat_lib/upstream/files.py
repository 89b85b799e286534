"""The files of a nanochat checkpoint: found by step, and read without running any code that may be in them.

    model_000020.pt            weights by name
    meta_000020.json           model configuration and how the run stood
    optim_000020_rank0.pt      the optimiser's state, one file for each process that trained

A .pt file is a zip archive with a pickle inside, and a pickle is a program. torch's restricted reader builds tensors
and plain data only; whatever asks for more is refused by name.
"""

from __future__ import annotations

import json
import re
import zipfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from nanochat_lib import storage
from nanochat_lib.errors import UserError

MODEL = re.compile(r"model_(\d+)\.pt")
OPTIMIZER = re.compile(r"optim_(\d+)_rank(\d+)\.pt")
FOREIGN = re.compile(r"GLOBAL ([\w.]+)")  # how torch's restricted reader names what it refuses


@dataclass(frozen=True)
class Files:
    """One checkpoint's files."""

    step: int
    model: Path
    meta: Path
    optimizer: dict[int, Path]  # by rank; empty when only the model was published


def find(folder: str | Path, step: int | None = None) -> Files:
    """The files of `step` (None: the largest) in `folder`. UserError when there are none, naming the steps found."""
    folder = Path(folder)
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder: name the one that holds model_<step>.pt")
    names = [path.name for path in folder.iterdir() if path.is_file()]
    models = {int(found[1]): name for name in names if (found := MODEL.fullmatch(name))}
    if not models:
        raise UserError(f"{folder} holds no model_<step>.pt: name nanochat's checkpoint folder, such as one named d12")
    chosen = max(models) if step is None else step
    if chosen not in models:
        raise UserError(f"{folder} has no checkpoint of step {chosen}; steps found: {listed(models)}")
    model = folder / models[chosen]
    shards = [(found, name) for name in names if (found := OPTIMIZER.fullmatch(name))]
    ranks = {int(found[2]): folder / name for found, name in shards if int(found[1]) == chosen}
    return Files(chosen, model, folder / model.name.replace("model_", "meta_").replace(".pt", ".json"), ranks)


def listed(numbers: Iterable[int]) -> str:
    return ", ".join(map(str, sorted(numbers)))


def read_torch(path: Path) -> Any:
    """Tensors and plain data of a .pt file, on the CPU. UserError for anything else and for a damaged file."""
    if not path.is_file():
        raise UserError(f"{path} does not exist")
    size = path.stat().st_size
    if not zipfile.is_zipfile(path):
        why = "is empty (0 bytes)" if not size else f"is cut short or no .pt file of torch ({size:,} bytes)"
        raise UserError(f"{path} {why}: copy it again")
    try:
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged:
            raise UserError(f"{path} is damaged ({damaged} has another checksum): copy it again")
        return torch.load(path, map_location="cpu", weights_only=True)
    except UserError:
        raise
    except Exception as error:
        if found := FOREIGN.search(str(error)):
            raise UserError(
                f"{path} holds more than tensors and plain data ({found[1]}): reading it could run code, so it is "
                "refused"
            ) from None
        raise UserError(f"{path} is damaged or no .pt file of torch ({type(error).__name__}): copy it again") from None


def read_meta(path: Path) -> tuple[dict, str]:
    """(content, text) of a meta file."""
    meta = storage.read_json(path)
    if not isinstance(meta, dict) or not isinstance(meta.get("model_config"), dict):
        raise UserError(f"{path} has no model_config: it is no meta file of nanochat")
    return meta, path.read_bytes().decode("utf-8")  # line ends as they are


def write_checkpoint(folder: Path, step: int, model: dict, meta: str, shards: list[dict]) -> None:
    """The files of one checkpoint under nanochat's names."""
    torch.save(model, folder / f"model_{step:06d}.pt")
    for rank, shard in enumerate(shards):
        torch.save(shard, folder / f"optim_{step:06d}_rank{rank}.pt")
    storage.atomic_write_text(folder / f"meta_{step:06d}.json", meta)


def meta_text(meta: dict) -> str:
    return json.dumps(meta, indent=2)
