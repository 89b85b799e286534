"""A folder of checkpoints: how they and their small files are named, which are valid, and which may be removed."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from nanochat_lib import storage
from nanochat_lib.errors import UserError

STEP_NAME = re.compile(r"^step_(\d+)$")
LARGE_META = 32_768  # characters of JSON from which a value of the metadata gets its own file


def step_folder(folder: str | Path, step: int) -> Path:
    return Path(folder) / f"step_{step:08d}"


def process_file(index: int) -> str:
    """The file of what process `index` alone knows."""
    return f"process-{index:05d}.json"


def meta_files(meta: dict) -> dict[str, Any]:
    """meta.json, and a file of its own for each value that would make it hard to read."""
    files: dict[str, Any] = {}
    small: dict[str, Any] = {}
    for name, value in meta.items():
        if len(json.dumps(value, allow_nan=False)) < LARGE_META:
            small[name] = value
        else:
            files[f"meta-{name}.json"] = value
    return {"meta.json": small, **files}


def steps(folder: str | Path) -> list[int]:
    """Steps of the finished checkpoints in `folder`, ascending by number, valid or not."""
    folder = Path(folder)
    names = [path.name for path in folder.iterdir() if path.is_dir()] if folder.is_dir() else []
    return sorted(int(found[1]) for name in names if (found := STEP_NAME.match(name)))


def problems(folder: str | Path, step: int, *, checksums: bool = True) -> list[str]:
    """What is wrong with checkpoint `step`, a line each; empty when it is valid. Without checksums no array is read."""
    return problems_in(step_folder(folder, step), step, checksums=checksums)


def problems_in(place: Path, step: int, *, checksums: bool = True) -> list[str]:
    """`problems` of the folder `place`, whatever its name, if it is to be checkpoint `step`."""
    found = storage.verify_manifest(place, checksums=checksums)
    if found:
        return found
    try:
        says = storage.read_json(place / "meta.json").get("step", step)
    except UserError as error:
        return [str(error)]
    return [] if says == step else [f"{place} holds step {says}: it was copied under another name"]


def latest(folder: str | Path) -> tuple[int | None, list[str]]:
    """(newest valid step or None, what is wrong with newer ones and with unfinished folders, a line each)."""
    folder = Path(folder)
    wrong = []
    if folder.is_dir():
        unfinished = sorted(path for path in folder.iterdir() if storage.TEMPORARY in path.name)
        wrong = [f"{path} was never finished" for path in unfinished if path.name.startswith("step_")]
    for step in reversed(steps(folder)):
        found = problems(folder, step)
        if not found:
            return step, wrong
        wrong += found
    return None, wrong


def complete(folder: Path) -> list[int]:
    """Steps of the checkpoints that are complete by their sizes, ascending."""
    return [step for step in steps(folder) if not problems(folder, step, checksums=False)]


def check_keep(keep: int, keep_every: int) -> None:
    if keep < 1:
        raise UserError(f"keep={keep}: at least the newest checkpoint has to stay")
    if keep_every == 0 or keep_every < -1:
        raise UserError(f"keep_every={keep_every}: give a number of steps, or -1 to keep none but the newest")


def superfluous(steps: Iterable[int], keep: int, keep_every: int = -1) -> list[int]:
    """Of the steps of complete checkpoints those to remove: not among the newest `keep`, no multiple of `keep_every`.

    So the newest always stays, and with it the last one of a finished run.
    """
    ordered = sorted(steps)
    return [step for step in ordered[: max(len(ordered) - keep, 0)] if keep_every < 1 or step % keep_every]


def prune(folder: Path, keep: int, keep_every: int, known: Collection[int]) -> None:
    """Removes the superfluous checkpoints. `known` are the steps whose checksums need not be compared once more."""
    for step in superfluous(complete(folder), keep, keep_every):
        # Damage that only the checksum shows must not be removed either.
        if step not in known and problems(folder, step):
            continue
        # Renamed first: a removal that is interrupted must not leave something that looks like a checkpoint.
        place = step_folder(folder, step)
        shutil.rmtree(place.rename(storage.temporary_name(place)))
