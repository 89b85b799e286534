"""Checkpoints that are whole, named by their step, and checked before they are believed.

A checkpoint is a folder `step_00000100`: the arrays (orbax, so any mesh can read what any mesh wrote), `arrays.json`
with every name, shape and dtype, `meta.json`, `process-00000.json` with what each process alone knows, and a manifest
of sizes and sha256. It is written under another name and renamed when finished. Reading takes the newest one whose
manifest holds; others are named and left alone.

Several processes write and read one folder that all of them see: a local one on one machine, a shared file system on
many. Each writes its own arrays; process 0 alone makes, completes and publishes the folder.
"""

from __future__ import annotations

import json
import re
import shutil
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from nanochat_lib import distributed, storage
from nanochat_lib.errors import UserError
from nanochat_lib.sizing import GPTConfig

if TYPE_CHECKING:
    from nanochat_lib.tokenizer import Tokenizer

STEP_NAME = re.compile(r"^step_(\d+)$")
LARGE_META = 32_768  # characters of JSON from which a value of the metadata gets its own file
SPARE_BYTES = 1 << 20  # room asked for beside the arrays

Arrays = dict[str, Any]


def step_folder(folder: str | Path, step: int) -> Path:
    return Path(folder) / f"step_{step:08d}"


def steps(folder: str | Path) -> list[int]:
    """Steps of the finished checkpoints in `folder`, ascending by number, valid or not."""
    folder = Path(folder)
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted(int(found[1]) for name in names if (found := STEP_NAME.match(name)))


def named_leaves(tree: Any) -> Arrays:
    """{"params/lm_head.weight": array, …}: every leaf of a pytree by its path."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    named = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}
    if len(named) != len(leaves):
        raise ValueError("two leaves of the state have the same path")
    return named


def _spec(leaf: Any) -> tuple[str, tuple[int, ...]]:
    """(dtype, shape) of an array, a scalar or a jax.ShapeDtypeStruct."""
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    return str(leaf.dtype), tuple(leaf.shape)


def save(folder: str | Path, step: int, state: Any, meta: dict, own: dict | None = None, *, keep: int = 2) -> Path:
    """Writes the pytree of arrays `state` and `meta` (plain data) as checkpoint `step`; the newest `keep` stay.

    Returns the checkpoint's folder. When the disk refuses, one UserError says so; what was there before is untouched.
    A checkpoint of the same step is replaced; one that is damaged is set aside under another name.
    With several processes all of them call this together, on a folder that all of them see. `meta` is process 0's;
    `own` is what this process alone knows, and comes back among the others' in meta["processes"].
    """
    if keep < 1:
        raise UserError(f"keep={keep}: at least the newest checkpoint has to stay")
    folder, final = Path(folder), step_folder(folder, step)
    arrays = {name: _writable(leaf) for name, leaf in named_leaves(state).items()}
    needed = sum(leaf.nbytes for leaf in arrays.values()) + SPARE_BYTES
    files = {"arrays.json": {name: _spec(leaf) for name, leaf in arrays.items()}, **_meta_files(meta)}
    mark, processes = distributed.from_first(lambda: uuid.uuid4().hex[:8]), range(distributed.count())
    temporary = final.with_name(f"{final.name}{storage.TEMPORARY}{mark}")

    try:
        with distributed.everyone(), storage.clear_disk_errors(final):
            if distributed.first():
                temporary.mkdir(parents=True)
                # The array writer meets a full disk half-way, with a screen full of tracebacks: ask before.
                storage.check_room(temporary, needed)
        with storage.clear_disk_errors(final), ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as writer:
            writer.save(temporary.absolute() / "arrays", args=ocp.args.PyTreeSave(arrays))
        if own is not None:
            with distributed.everyone(), storage.clear_disk_errors(final):
                storage.atomic_write_json(temporary / _process_file(distributed.index()), own, indent=None)
        with distributed.everyone(), storage.clear_disk_errors(final):
            if distributed.first():
                for name, value in files.items():
                    storage.atomic_write_json(temporary / name, value, indent=None)
                listed = storage.write_manifest(temporary)
                if own is not None and (unseen := [i for i in processes if _process_file(i) not in listed]):
                    raise UserError(f"{final}: process 0 does not see what process {unseen[0]} wrote; share the folder")
                _publish(temporary, final)
                _prune(folder, keep)
    except BaseException:
        if distributed.first():
            shutil.rmtree(temporary, ignore_errors=True)
        raise
    return final


def _process_file(index: int) -> str:
    return f"process-{index:05d}.json"


def _writable(leaf: Any) -> Any:
    """What orbax can write from every process: global arrays as they are, all else as numpy."""
    if isinstance(leaf, jax.Array) and (distributed.count() == 1 or not leaf.is_fully_addressable):
        return leaf
    return np.asarray(leaf)


def _publish(temporary: Path, final: Path) -> None:
    if not final.exists():
        storage.publish_dir(temporary, final)
        return
    word = "damaged" if storage.verify_manifest(final) else "replaced"
    aside = final.with_name(f"{final.name}.{word}-{temporary.name[-8:]}")
    final.rename(aside)
    storage.publish_dir(temporary, final)
    if word == "replaced":
        shutil.rmtree(aside)


def _prune(folder: Path, keep: int) -> None:
    """Removes all but the newest `keep` complete checkpoints; damaged ones stay for a person to look at."""
    places = [step_folder(folder, step) for step in steps(folder)]
    complete = [place for place in places if not storage.verify_manifest(place, checksums=False)]
    for place in complete[:-keep]:
        if storage.verify_manifest(place):
            continue
        # Renamed first: a removal that is interrupted must not leave something that looks like a checkpoint.
        doomed = place.rename(storage.temporary_name(place))
        shutil.rmtree(doomed)


def _meta_files(meta: dict) -> dict[str, Any]:
    """meta.json, and a file of its own for each value that would make it hard to read."""
    files: dict[str, Any] = {}
    small: dict[str, Any] = {}
    for name, value in meta.items():
        if len(json.dumps(value, allow_nan=False)) < LARGE_META:
            small[name] = value
        else:
            files[f"meta-{name}.json"] = value
    return {"meta.json": small, **files}


def latest(folder: str | Path) -> tuple[int | None, list[str]]:
    """(newest valid step or None, what is wrong with newer ones and with unfinished folders, a line each)."""
    folder = Path(folder)
    problems = []
    if folder.is_dir():
        unfinished = sorted(path for path in folder.iterdir() if storage.TEMPORARY in path.name)
        problems = [f"{path} was never finished" for path in unfinished if path.name.startswith("step_")]
    for step in reversed(steps(folder)):
        found = storage.verify_manifest(step_folder(folder, step))
        if not found:
            return step, problems
        problems += found
    return None, problems


def _valid_folder(folder: str | Path, step: int | None, verify: bool = True) -> Path:
    """The folder of `step` (None: the newest valid one); UserError when it is not there or damaged."""
    found = steps(folder)
    if step is None:
        step, problems = latest(folder)
        if step is None:
            why = f": {'; '.join(problems)}" if problems else ""
            raise UserError(f"{folder} holds no valid checkpoint{why}; run the stage that writes it first")
        return step_folder(folder, step)
    if step not in found:
        listed = ", ".join(map(str, found)) or "none"
        raise UserError(f"{folder} has no checkpoint of step {step}; steps found: {listed}")
    if problems := storage.verify_manifest(step_folder(folder, step), checksums=verify):
        others = ", ".join(str(s) for s in found if s != step) or "none"
        raise UserError(f"checkpoint {step} is damaged: {'; '.join(problems)}; other steps found: {others}")
    return step_folder(folder, step)


def load_meta(folder: str | Path, step: int | None = None, *, verify: bool = True) -> dict:
    """The metadata of checkpoint `step` (None: the newest valid one)."""
    return _read_meta(_valid_folder(folder, step, verify))


def _read_meta(place: Path) -> dict:
    meta = storage.read_json(place / "meta.json")
    for path in sorted(place.glob("meta-*.json")):
        meta[path.stem.removeprefix("meta-")] = storage.read_json(path)
    processes = [storage.read_json(path) for path in sorted(place.glob("process-*.json"))]
    return meta | ({"processes": processes} if processes else {})


def load(folder: str | Path, step: int | None = None, like: Any = None, *, verify: bool = True) -> tuple[Any, dict]:
    """(state, meta) of checkpoint `step` (None: the newest valid one).

    `like` is a pytree of the wanted structure (arrays or jax.ShapeDtypeStruct): names, shapes and dtypes have to agree
    exactly, else a UserError names the first that does not. Arrays come back laid out as `like`'s own arrays are,
    whatever mesh wrote them. Without `like` the state is a flat dict of arrays by path. meta["processes"] lists what
    each process saved as its own. `verify=False`: the checksums have been compared already (`latest` does).
    """
    place = _valid_folder(folder, step, verify)
    saved = _saved_specs(place)
    if like is None:
        return _restore(place, dict.fromkeys(saved)), _read_meta(place)
    wanted = named_leaves(like)
    _check_same(place, saved, {name: _spec(leaf) for name, leaf in wanted.items()})
    arrays = _restore(place, wanted)
    return jax.tree.unflatten(jax.tree.structure(like), [arrays[name] for name in wanted]), _read_meta(place)


def load_params(folder: str | Path, step: int | None = None, *, verify: bool = True) -> dict[str, jax.Array]:
    """Only the parameters (`state.params`) of checkpoint `step`, by name; the optimiser's arrays are not read."""
    place = _valid_folder(folder, step, verify)
    names = [name for name in _saved_specs(place) if name.startswith("params/")]
    if not names:
        raise UserError(f"{place} holds no params: it was not written by a training stage")
    arrays = _restore(place, dict.fromkeys(names))
    return {name.removeprefix("params/"): array for name, array in arrays.items()}


def _saved_specs(place: Path) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (dtype, tuple(shape)) for name, (dtype, shape) in storage.read_json(place / "arrays.json").items()}


def _check_same(place: Path, saved: dict, wanted: dict) -> None:
    """Orbax would cast a dtype silently; a state that only looks restored is worse than none."""
    for name in wanted:
        if name not in saved:
            raise UserError(f"{place} has no {name}: use the settings it was written with")
    for name, (dtype, shape) in saved.items():
        if name not in wanted:
            raise UserError(f"{place} has {name}, which this run has not: use the settings it was written with")
        if (dtype, shape) != wanted[name]:
            found, asked = f"{dtype}{list(shape)}", f"{wanted[name][0]}{list(wanted[name][1])}"
            raise UserError(f"{place}: {name} is {found}, this run needs {asked}: use the settings it was written with")


def _restore(place: Path, wanted: Arrays) -> Arrays:
    """The arrays named by `wanted`, each laid out as its jax array there, else on the default device."""
    saved = _saved_specs(place)
    item, how = {}, {}
    for name, leaf in wanted.items():
        dtype, shape = saved[name]
        item[name] = jax.ShapeDtypeStruct(shape, jnp.dtype(dtype))
        # An array that was never bound to its device comes back unbound: else a step would compile again for it.
        bound = isinstance(leaf, jax.ShapeDtypeStruct) or (isinstance(leaf, jax.Array) and leaf.committed)
        sharding = leaf.sharding if bound else None
        # Never the sharding that is stored with the arrays: those devices may not exist here.
        how[name] = (
            ocp.ArrayRestoreArgs(sharding=sharding, global_shape=leaf.shape, dtype=item[name].dtype, strict=True)
            if sharding is not None
            else ocp.RestoreArgs(restore_type=np.ndarray)
        )
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as reader:
        arrays = reader.restore(
            place.absolute() / "arrays", args=ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True)
        )
    return {name: _on_device(arrays[name], wanted[name]) for name in wanted}


def _on_device(array: Any, wanted: Any) -> Any:
    """A jax array, except where numpy was asked for and for 64-bit numbers, which JAX would shorten."""
    host = isinstance(wanted, (np.ndarray, np.generic, int, float)) or array.dtype != jnp.dtype(
        jax.dtypes.canonicalize_dtype(array.dtype)
    )
    return array if host or isinstance(array, jax.Array) else jnp.asarray(array)


def load_model(folder: Path, tokenizer: Tokenizer) -> tuple[GPTConfig, dict[str, jax.Array], int]:
    """(model configuration, parameters, step) of the newest valid checkpoint in `folder`, on this process's device.

    Raises UserError when there is none, or when it was trained with another tokenizer.
    """
    step, problems = latest(folder)
    if step is None:
        found = f" ({'; '.join(problems)})" if problems else ""
        raise UserError(f"{folder} holds no valid checkpoint{found}; run the stage that writes it first")
    for problem in problems:
        distributed.say(f"{folder.name}: checkpoint left alone: {problem}")
    meta = load_meta(folder, step, verify=False)
    check_tokenizer(meta, tokenizer.fingerprint)
    return GPTConfig.from_dict(meta["model"]), load_params(folder, step, verify=False), step


def check_tokenizer(meta: dict, fingerprint: str) -> None:
    """Raises UserError when the checkpoint was trained with another tokenizer."""
    if meta.get("tokenizer") != fingerprint:
        raise UserError(
            f"the checkpoint was trained with tokenizer {str(meta.get('tokenizer'))[:12]}, the one given is "
            f"{fingerprint[:12]}: use the tokenizer of its own run folder"
        )


def check_config(meta: dict, config: dict, name: str = "model") -> None:
    """Raises UserError when `meta[name]` differs from `config` (plain data), naming each setting with both values."""
    saved = meta.get(name) or {}
    keys = list(dict.fromkeys([*saved, *config]))
    different = [f"{key} {saved.get(key)!r} / {config.get(key)!r}" for key in keys if saved.get(key) != config.get(key)]
    if different:
        raise UserError(f"the checkpoint's {name} differs from this run's: {', '.join(different)}; use its settings")
