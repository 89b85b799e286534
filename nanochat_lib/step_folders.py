"""A folder of checkpoints: how they are named, which are valid, and which may be removed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from nanochat_lib import storage
from nanochat_lib.errors import UserError

STEP_NAME = re.compile(r"^step_(\d+)$")


def step_folder(folder: str | Path, step: int) -> Path:
    return Path(folder) / f"step_{step:08d}"


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


def check_keep(keep: int, keep_every: int) -> None:
    if keep < 1:
        raise UserError(f"keep={keep}: at least the newest checkpoint has to stay")
    if keep_every == 0 or keep_every < -1:
        raise UserError(f"keep_every={keep_every}: give a number of steps, or -1 to keep none but the newest")


def superfluous(complete: Iterable[int], keep: int, keep_every: int = -1) -> list[int]:
    """Of the steps of complete checkpoints those to remove: not among the newest `keep`, no multiple of `keep_every`.

    So the newest always stays, and with it the last one of a finished run.
    """
    ordered = sorted(complete)
    return [step for step in ordered[: max(len(ordered) - keep, 0)] if keep_every < 1 or step % keep_every]
