"""The folder of a run: one process's own, one configuration's, and the same as the copy that outlives the machine."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import IO, TYPE_CHECKING

from nanochat_lib import presets
from nanochat_lib.errors import InUse, UserError
from nanochat_lib.presets import RunConfig
from nanochat_lib.storage import atomic_write_json, free_bytes, read_json

if TYPE_CHECKING:
    from nanochat_lib.durable import RunCopy

MIN_FREE_BYTES = 300 * 2**20


def take(folder: Path, config: RunConfig, models: Iterable[str]) -> None:
    """Makes the folder this process's own and writes what the run is, or compares it with what is there.

    `models` name its folders of checkpoints. Raises UserError when that cannot be, and lets go of the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock(folder)
    except OSError as e:
        raise UserError(
            f"run folder {folder} cannot be written ({e.strerror}); choose another with --run-dir"
        ) from None
    try:
        free = free_bytes(folder)
        if free < MIN_FREE_BYTES:
            raise UserError(
                f"{folder}: {free / 2**20:.0f} MB of disk are free, a run needs {MIN_FREE_BYTES / 2**20:.0f} MB; "
                "free some space or choose another --run-dir"
            )
        saved, path = presets.to_dict(config), folder / "config.json"
        copy = _open_copy(folder, config) if config.ops.durable else None
        if path.exists():
            before = read_json(path)
            check_same(folder, before, saved)
        if not path.exists() or before != saved:  # `ops` may change from start to start
            atomic_write_json(path, saved)
        if copy:
            copy.push_files()
            for said in filter(None, [copy.catch_up(folder / name) for name in models]):
                print(said)
    except BaseException:
        release(folder)
        raise


def _open_copy(folder: Path, config: RunConfig) -> RunCopy:
    """The run's copy (ops.durable), after what another machine left there was taken from it."""
    from nanochat_lib.durable import RunCopy

    copy = RunCopy(config.ops.durable, folder)
    place = copy.store.folder
    if place and place.resolve().is_relative_to(folder.resolve()):
        raise UserError(f"ops.durable {place} lies in the run's own folder; name a place that outlives the machine")
    there = copy.config()
    if there is not None:
        check_same(Path(copy.url), there, presets.to_dict(config))
        said = copy.open()
        if said:
            print(said)
    return copy


_held: dict[Path, IO] = {}  # folders that this process works in: a notebook cell that opens its run again may do so


def lock(folder: Path) -> None:
    """Holds `folder` for this process until `release` or the end of the process, however it ends."""
    import fcntl

    folder = folder.resolve()
    if folder in _held:
        return
    handle = open(folder / ".lock", "a", encoding="utf-8")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        handle.close()
        raise InUse(f"{folder} is in use by another run; wait for it or choose another --run-dir") from None
    _held[folder] = handle


def release(folder: Path) -> None:
    """Lets go of `folder`, so that another process may work in it."""
    handle = _held.pop(folder.resolve(), None)
    if handle:
        handle.close()


def held(folder: Path) -> bool:
    """Whether this process works in `folder`."""
    return folder.resolve() in _held


def check_same(folder: Path, saved: dict, wanted: dict) -> None:
    """Raises UserError naming the settings in which the run in `folder` differs from the one asked for."""

    def flat(node: dict, prefix: str = "") -> dict:
        leaves = {}
        for key, value in node.items():
            leaves |= flat(value, f"{prefix}{key}.") if isinstance(value, dict) else {prefix + key: value}
        return leaves

    old, new = flat(saved), flat(wanted)
    free = lambda name: name == "about" or name.startswith("ops.")  # noqa: E731
    differing = [n for n in sorted(old.keys() | new.keys()) if not free(n) and old.get(n) != new.get(n)]
    if differing:
        named = ", ".join(f"{n} {old.get(n)!r} (asked for {new.get(n)!r})" for n in differing[:3])
        more = f" and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise UserError(f"{folder} holds a run with {named}{more}; use another --run-dir or the same settings")
