"""`nanochat data get`: what is missing of the named data sets is located, fetched and made ready by one process."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

from nanochat_lib import storage
from nanochat_lib.errors import UserError
from nanochat_lib.home import base_dir
from nanochat_lib.hub import ledger
from nanochat_lib.hub.local import file_problem, lacking
from nanochat_lib.hub.sets import DataSet, OneFile, Shards
from nanochat_lib.storage import check_room

NAMED = 5  # missing files that a message names


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def alone(entry: DataSet, wait: float) -> contextlib.AbstractContextManager[None]:
    """Holds the data set for this process; another one that fetches it is waited for, `wait` seconds at most."""
    path = base_dir() / f".{entry.name}.lock"
    return storage.alone(path, wait, "fetching", entry.name, lambda text: say(f"{entry.name}: {text}"))


def get(entries: list[DataSet], shards: int, workers: int, wait: float) -> int:
    """Fetches what is missing of `entries`; returns the exit code: 0 when all of it is there, 1 when files failed.

    Raises UserError in offline mode, without room on the disk, and when another process holds a data set for too long.
    """
    missing = {entry: parts for entry in entries if (parts := _missing(entry, shards))}
    if not missing:
        return 0
    _refuse_offline(missing)
    with contextlib.ExitStack() as locks:
        for entry in sorted(missing, key=lambda entry: entry.name):  # one order, so that no two wait for each other
            locks.enter_context(alone(entry, wait))
        return _get(list(missing), shards, workers)


def _missing(entry: DataSet, shards: int) -> dict[str, str]:
    """`lacking`, told to the user."""
    missing = lacking(entry, shards)
    if not missing:
        say(f"{entry.name}: all there, in {base_dir() / entry.where}")
    for part, problem in missing.items():
        if problem != "missing":
            say(f"{entry.name}: {part} will be fetched again: {problem}")
    return missing


def _refuse_offline(missing: dict[DataSet, dict[str, str]]) -> None:
    from huggingface_hub.constants import HF_HUB_OFFLINE

    names = [f"{entry.name}/{part}" for entry, parts in missing.items() for part in parts]
    if HF_HUB_OFFLINE:
        more = f" and {len(names) - NAMED:,} more" if len(names) > NAMED else ""
        raise UserError(
            f"offline mode (HF_HUB_OFFLINE) and {', '.join(names[:NAMED])}{more} not in {base_dir()}: "
            "unset it, or copy them there"
        )


def _get(entries: list[DataSet], shards: int, workers: int) -> int:
    from nanochat_lib.hub.finish import finish
    from nanochat_lib.hub.patience import ABSENT, GaveUp
    from nanochat_lib.hub.pool import download, format_bytes
    from nanochat_lib.hub.remote import locate

    failed: dict[str, str] = {}
    found: dict[DataSet, list] = {}
    for entry in entries:
        missing = lacking(entry, shards)  # again, for another process may have fetched it
        if not missing:
            continue
        try:
            found[entry], absent = locate(entry, list(missing), lambda text, name=entry.name: say(f"{name}: {text}"))
            failed |= {f"{entry.name}/{part}": why for part, why in absent.items()}
        except GaveUp as error:
            if isinstance(entry, OneFile) and entry.optional and error.status in ABSENT:
                say(f"{entry.name}: cannot be fetched ({error}); it is optional, everything else works without it")
            else:
                failed[entry.name] = str(error)
    known = ledger.sizes()
    wanted = [remote for remotes in found.values() for remote in remotes if not _is_here(remote, known)]
    if wanted:
        size = sum(remote.size or 0 for remote in wanted)
        check_room(base_dir(), max(size - sum(remote.here() for remote in wanted), 0))
        told = format_bytes(size) if all(remote.size for remote in wanted) else "size unknown"
        say(f"fetching {len(wanted):,} file{'s' * (len(wanted) > 1)}, {told}, into {base_dir()}")
        failed |= download(wanted, workers)
    for entry, remotes in found.items():
        finish(entry, remotes, failed.keys() & {remote.label for remote in remotes})
    if failed:
        say(f"nanochat: {len(failed):,} not fetched; what is finished stays, the same command goes on with the rest:")
        for label, why in failed.items():
            say(f"  {label}: {why}")
    return 1 if failed else 0


def _is_here(remote: object, known: dict[str, int]) -> bool:
    """Whether an earlier start finished this file of a data set that is not finished as a whole."""
    path: Path = remote.path
    return path.is_file() and os.path.getsize(path) == remote.size and not file_problem(path, known)


def count_of(entries: list[DataSet], shards: int | None, preset: str | None) -> int:
    """How many training shards are asked for: by number, or by what a preset trains on. UserError when unsaid."""
    if not any(isinstance(entry, Shards) for entry in entries):
        return 0
    if shards is not None:
        return shards
    names = ", ".join(entry.name for entry in entries if isinstance(entry, Shards))
    if preset is None:
        raise UserError(
            f"how much of {names}? --shards N takes N training shards, --preset NAME as many as it trains on"
        )
    from nanochat_lib.hub.plan import shards_for
    from nanochat_lib.presets import preset as named_preset

    return max(shards_for(named_preset(preset), entry) for entry in entries if isinstance(entry, Shards))
