"""What turns fetched files into a data set that others may open: a split's manifest, a bundle's folder."""

from __future__ import annotations

import shutil
import zipfile
from collections.abc import Collection
from pathlib import Path, PurePosixPath

from nanochat_lib.errors import UserError
from nanochat_lib.home import base_dir
from nanochat_lib.hub.fetch import Remote
from nanochat_lib.hub.local import MANIFEST
from nanochat_lib.hub.sets import DataSet, OneFile, Tasks
from nanochat_lib.storage import (
    atomic_write_json,
    check_room,
    clear_disk_errors,
    publish_dir,
    temporary_name,
    write_manifest,
)

LISTING, SCORES = "core.yaml", "eval_meta_data.csv"  # what a bundle must hold, beside eval_data/


def finish(entry: DataSet, remotes: list[Remote], failed: Collection[str]) -> None:
    """`remotes`: all files of the parts that were missing; those not named in `failed` are in their places now.

    UserError when the bundle is none.
    """
    if isinstance(entry, Tasks):
        unfinished = {remote.path.parent for remote in remotes if remote.label in failed}
        for folder in sorted({remote.path.parent for remote in remotes} - unfinished):
            names = sorted(remote.path.name for remote in remotes if remote.path.parent == folder)
            atomic_write_json(folder / MANIFEST, names)
    elif isinstance(entry, OneFile) and entry.file.endswith(".zip") and not failed:
        unpack(base_dir() / entry.file, base_dir() / entry.where)


def unpack(archive: Path, folder: Path) -> None:
    """Unpacks an evaluation bundle (a zip that was checked) into `folder`, whole or not at all, and removes the zip.

    The zip may hold the bundle in a folder of its own, and other things beside it, which are left out. UserError when
    it holds none, and the zip is removed then too.
    """
    temporary = temporary_name(folder)
    with zipfile.ZipFile(archive) as opened:
        try:
            members = _members(opened)
        except UserError:
            archive.unlink()
            raise
        check_room(folder.parent, sum(info.file_size for info in members.values()))
        try:
            for name, info in members.items():
                target = temporary / name
                with clear_disk_errors(target):
                    target.parent.mkdir(parents=True, exist_ok=True)
                    with opened.open(info) as source, open(target, "wb") as out:
                        shutil.copyfileobj(source, out)
            write_manifest(temporary)
            if folder.exists():  # a damaged one, else nothing would have been fetched
                shutil.rmtree(folder)
            publish_dir(temporary, folder)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    archive.unlink()


def _members(opened: zipfile.ZipFile) -> dict[str, zipfile.ZipInfo]:
    """{path below the bundle: member}; UserError when a path leads out of it or the bundle lacks something."""
    files = {PurePosixPath(info.filename): info for info in opened.infolist() if not info.is_dir()}
    files = {path: info for path, info in files.items() if path.parts[0] != "__MACOSX"}
    for path in files:
        if path.is_absolute() or ".." in path.parts or "\\" in str(path):
            raise UserError(f"{opened.filename} holds {path}, a path out of its folder: it was tampered with")
    top = min((path.parent for path in files if path.name == LISTING), key=lambda path: len(path.parts), default=None)
    members = {
        path.relative_to(top).as_posix(): info
        for path, info in files.items()
        if top is not None and path.is_relative_to(top)
    }
    if SCORES not in members or not any(name.startswith("eval_data/") for name in members):
        raise UserError(f"{opened.filename} is no evaluation bundle: it lacks {LISTING}, {SCORES} or eval_data/")
    return members
