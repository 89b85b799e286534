"""Checkpoints that are whole, named by their step, and checked before they are believed.

A checkpoint is a folder `step_00000100`: the arrays (arrays.py), `arrays.json` with every name, shape and dtype,
`meta.json`, `process-00000.json` with what each process alone knows, and a manifest of sizes and sha256. It is written
under another name and renamed when finished (saver.py). Reading takes the newest one whose manifest holds; others are
named and left alone (step_folders.py).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax

from nanochat_lib import arrays, distributed, storage
from nanochat_lib.errors import UserError
from nanochat_lib.saver import Saver
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.step_folders import latest, problems, step_folder, steps

if TYPE_CHECKING:
    from nanochat_lib.tokenizer import Tokenizer

__all__ = [
    "Saver", "check_config", "check_tokenizer", "latest", "load", "load_meta", "load_model", "load_params", "save",
    "step_folder", "steps",
]  # fmt: skip


def save(
    folder: str | Path, step: int, state: Any, meta: dict, own: dict | None = None, *, keep: int = 2,
    keep_every: int = -1,
) -> Path:  # fmt: skip
    """`Saver.save` and the wait for its end; returns the checkpoint's folder."""
    saver = Saver(folder, None, keep, keep_every)
    place = saver.save(step, state, meta, own)
    saver.settle()
    return place


def _valid_folder(folder: str | Path, step: int | None, verify: bool = True) -> Path:
    """The folder of `step` (None: the newest valid one); UserError when it is not there or damaged."""
    found = steps(folder)
    if step is None:
        step, wrong = latest(folder)
        if step is None:
            why = f": {'; '.join(wrong)}" if wrong else ""
            raise UserError(f"{folder} holds no valid checkpoint{why}; run the stage that writes it first")
        return step_folder(folder, step)
    if step not in found:
        listed = ", ".join(map(str, found)) or "none"
        raise UserError(f"{folder} has no checkpoint of step {step}; steps found: {listed}")
    if wrong := problems(folder, step, checksums=verify):
        others = ", ".join(str(s) for s in found if s != step) or "none"
        raise UserError(f"checkpoint {step} is damaged: {'; '.join(wrong)}; other steps found: {others}")
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
    saved = arrays.saved_specs(place)
    if like is None:
        return arrays.restore(place, dict.fromkeys(saved)), _read_meta(place)
    wanted = arrays.named_leaves(like)
    _check_same(place, saved, {name: arrays.spec(leaf) for name, leaf in wanted.items()})
    restored = arrays.restore(place, wanted)
    return jax.tree.unflatten(jax.tree.structure(like), [restored[name] for name in wanted]), _read_meta(place)


def load_params(folder: str | Path, step: int | None = None, *, verify: bool = True) -> dict[str, jax.Array]:
    """Only the parameters (`state.params`) of checkpoint `step`, by name; the optimiser's arrays are not read."""
    place = _valid_folder(folder, step, verify)
    names = [name for name in arrays.saved_specs(place) if name.startswith("params/")]
    if not names:
        raise UserError(f"{place} holds no params: it was not written by a training stage")
    restored = arrays.restore(place, dict.fromkeys(names))
    return {name.removeprefix("params/"): array for name, array in restored.items()}


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


def load_model(folder: Path, tokenizer: Tokenizer) -> tuple[GPTConfig, dict[str, jax.Array], int]:
    """(model configuration, parameters, step) of the newest valid checkpoint in `folder`, on this process's device.

    Raises UserError when there is none, or when it was trained with another tokenizer.
    """
    step, wrong = latest(folder)
    if step is None:
        found = f" ({'; '.join(wrong)})" if wrong else ""
        raise UserError(f"{folder} holds no valid checkpoint{found}; run the stage that writes it first")
    for problem in wrong:
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
