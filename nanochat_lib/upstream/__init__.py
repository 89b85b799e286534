"""nanochat's own checkpoint folders, both ways: model, optimiser of any number of ranks, meta file, tokenizer.

    found = upstream.load("base_checkpoints/d12")          # found.config, found.params, found.opt_state, …
    upstream.save("copy", found)                           # the same tensors, bit for bit

Files are read without running code that may be in them. The generation, head or recipe 4, is recognised by what the
state dict holds. The format is nanochat's of July 2026.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from nanochat_lib import storage
from nanochat_lib.errors import UserError
from nanochat_lib.optim import OptState
from nanochat_lib.presets import OptimConfig
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.tokenizer import Tokenizer
from nanochat_lib.upstream import files, model, optimizer
from nanochat_lib.upstream import tokenizer as tokenizers

__all__ = ["Checkpoint", "Extras", "load", "save"]

SPARE_BYTES = 1 << 22  # room asked for beside the arrays


@dataclass(frozen=True)
class Extras:
    """What nanochat's files hold and our own have no room for. Plain data; the defaults suit a run of ours."""

    dtypes: dict[str, str] = field(default_factory=dict)  # parameters not stored in float32
    moments: dict[str, str] = field(default_factory=dict)  # optimiser state not stored in float32
    patched: list[str] = field(default_factory=list)  # parameters that were missing, and are again when written
    param_groups: list[dict] = field(default_factory=list)  # of the optimiser
    ranks: int = 1
    tokenizer: dict = field(default_factory=dict)  # name, pickle protocol, way of counting bytes
    meta: str = ""  # the meta file, word for word


@dataclass(frozen=True)
class Checkpoint:
    """One checkpoint, in our terms."""

    config: GPTConfig
    params: Mapping[str, Any]  # float32 arrays by name
    opt_state: OptState | None  # None: the folder holds the model only
    tokenizer: Tokenizer
    step: int
    meta: dict  # content of the meta file
    extras: Extras = Extras()


def load(folder: str | Path, step: int | None = None, *, tokenizer: str | Path | None = None) -> Checkpoint:
    """Reads checkpoint `step` (None: the newest) of nanochat's checkpoint folder `folder`.

    Arrays are numpy float32, on the host. `tokenizer` is the folder of tokenizer.pkl when it is neither in `folder` nor
    where nanochat keeps it. UserError, one line, for missing, damaged or foreign files, for a generation that is not
    supported, and for a tokenizer of another vocabulary.
    """
    found = files.find(folder, step)
    meta, text = files.read_meta(found.meta)
    state = files.read_torch(found.model)
    config, params, dtypes, patched = model.to_params(state, meta["model_config"], found.model, found.meta)
    del state
    known, token_extras = tokenizers.load(tokenizer or tokenizers.find(folder))
    if known.vocab_size != config.vocab_size:
        raise UserError(
            f"{found.model} has a vocabulary of {config.vocab_size:,} tokens, the tokenizer one of "
            f"{known.vocab_size:,}: give the model's own tokenizer"
        )
    opt_state, moments, groups, ranks = None, {}, [], 1
    if found.optimizer:
        shards = {rank: files.read_torch(path) for rank, path in found.optimizer.items()}
        shapes = {name: array.shape for name, array in params.items() if name not in patched}
        opt_state, groups, moments, ranks = optimizer.merge(shards, config, shapes, found.model.parent)
        opt_state = with_zeros(opt_state, {name: params[name] for name in patched})
    extras = Extras(dtypes, moments, patched, groups, ranks, token_extras, text)
    return Checkpoint(config, params, opt_state, known, found.step, meta, extras)


def with_zeros(state: OptState, params: Mapping[str, Any]) -> OptState:
    """`state` with moments of zero for `params`, which it does not have yet."""
    zeros = {name: 0 * array for name, array in params.items()}
    return state._replace(exp_avg=state.exp_avg | zeros, exp_avg_sq=state.exp_avg_sq | zeros)


def save(folder: str | Path, checkpoint: Checkpoint, *, ranks: int | None = None) -> Path:
    """Writes nanochat's files into the new folder `folder`, whole or not at all: optimiser for `ranks` processes
    (None: as many as it came from), tokenizer in `folder/tokenizer`. Returns `folder`.

    nanochat resumes only with the number of processes that the optimiser was written for. UserError when `folder`
    exists, when the tables' rows do not divide by `ranks`, and when the disk refuses.
    """
    folder, extras, config = Path(folder), checkpoint.extras, checkpoint.config
    if folder.exists():
        raise UserError(f"{folder} exists already: remove it or choose another name")
    ranks = extras.ranks if ranks is None else ranks
    if ranks < 1:
        raise UserError(f"ranks {ranks} must be at least 1")
    state = model.to_state_dict(config, checkpoint.params, extras.dtypes, extras.patched)
    shards = []
    if checkpoint.opt_state is not None:
        shapes = {name: tuple(tensor.shape) for name, tensor in state.items()}
        groups = extras.param_groups or optimizer.group_dicts(config, shapes, OptimConfig(), 1.0, 0.95, 0.0)
        shards = optimizer.split(checkpoint.opt_state, config, shapes, groups, extras.moments, ranks)
    text = extras.meta or files.meta_text(checkpoint.meta)
    temporary = storage.temporary_name(folder)
    needed = sum(tensor.nbytes for tensor in state.values()) * (3 if shards else 1) + SPARE_BYTES
    try:
        with storage.clear_disk_errors(folder):
            temporary.mkdir(parents=True)
            storage.check_room(temporary, needed)
            files.write_checkpoint(temporary, checkpoint.step, state, text, shards)
            tokenizers.save(temporary / "tokenizer", checkpoint.tokenizer, extras.tokenizer)
            return storage.publish_dir(temporary, folder)
    except RuntimeError as error:  # how torch words a disk that refuses
        raise UserError(f"cannot write {folder}: {str(error).splitlines()[0][:200]}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
