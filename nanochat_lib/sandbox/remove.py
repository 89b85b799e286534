"""Removes a folder that an untrusted program wrote: closed folders, very deep ones, odd names."""

from __future__ import annotations

import os
import stat


def remove_tree(folder: str | os.PathLike) -> None:
    """Removes `folder` and all below it without following a link and without recursion. What resists stays."""
    folder = os.fspath(folder)
    lifted = 0
    queue = [folder]
    while queue:
        here = queue.pop()
        try:
            os.chmod(here, stat.S_IRWXU)
            entries = list(os.scandir(here))
        except OSError:
            continue
        for entry in entries:
            try:
                if not entry.is_dir(follow_symlinks=False):
                    os.unlink(entry.path)
                    continue
                os.chmod(entry.path, stat.S_IRWXU)
                try:
                    os.rmdir(entry.path)
                except OSError:  # not empty: lift it up, so that no path grows too long
                    lifted += 1
                    target = entry.path
                    if here != folder:
                        target = os.path.join(folder, f".lifted-{lifted}")
                        os.rename(entry.path, target)
                    queue.append(target)
            except OSError:
                continue
    for path in [os.path.join(folder, name) for name in _names(folder)] + [folder]:
        try:
            os.rmdir(path)
        except OSError:
            pass


def _names(folder: str) -> list[str]:
    try:
        return os.listdir(folder)
    except OSError:
        return []
