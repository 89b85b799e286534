"""What a Python needs to see of the machine: its own folders and the system's shared libraries, nothing else."""

from __future__ import annotations

import functools
import os
import site
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path

from nanochat_lib.errors import UserError

SYSTEM = ("/lib", "/lib32", "/lib64", "/usr/lib", "/usr/lib32", "/usr/lib64", "/usr/libexec/coreutils", "/nix/store")
SMALL = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/localtime", "/usr/share/zoneinfo")
SHARED_PREFIXES = ("/", "/usr", "/usr/local")  # the whole of their `bin` is not Python's


@functools.cache
def python_paths() -> tuple[str, ...]:
    """Files and folders of this interpreter, its standard library and its installed packages."""
    found = [sys.executable, os.path.realpath(sys.executable)]
    for prefix in {sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix}:
        parts = ["lib", "lib64", "pyvenv.cfg"] + ([] if prefix in SHARED_PREFIXES else ["bin"])
        found += [os.path.join(prefix, part) for part in parts]
    paths = sysconfig.get_paths()
    found += [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    found += site.getsitepackages() if hasattr(site, "getsitepackages") else []
    return tuple(path for path in dict.fromkeys(found) if os.path.exists(path))


def view(readable: Sequence[Path]) -> tuple[list[list[str]], list[list[str]]]:
    """[source, place inside] of each tree to show, parents first, and [link, target] of the links to them."""
    links, shown = [], {}
    for path in SYSTEM:
        if os.path.islink(path):
            links.append([path, os.readlink(path)])
        elif os.path.isdir(path):
            shown[path] = path
    for path in [*SMALL, *python_paths(), *map(str, readable)]:
        if not os.path.lexists(path):
            continue
        source = os.path.realpath(path)
        shown[os.path.abspath(path)] = source
        shown[source] = source
    kept: dict[str, str] = {}
    for place in sorted(shown, key=lambda place: (place.count("/"), place)):
        above = [str(parent) for parent in Path(place).parents]
        behind_link = any(place.startswith(link + "/") for link, _ in links)
        same_tree = any(p in kept and os.path.join(kept[p], os.path.relpath(place, p)) == shown[place] for p in above)
        # a link inside a shown tree stays a link: its target is shown at its own place
        is_link_inside = any(p in kept for p in above) and place != shown[place]
        if not behind_link and not same_tree and not is_link_inside:
            kept[place] = shown[place]
    return [[source, place] for place, source in kept.items()], links


def checked(readable: Sequence[Path]) -> list[Path]:
    """`readable` as absolute paths; UserError for one that is not there or that is everything."""
    paths = []
    for path in readable:
        path = Path(os.path.abspath(path))
        if not path.exists():
            raise UserError(f"{path} is to be readable in the sandbox, but there is no such file or folder")
        if path.resolve() == Path("/"):
            raise UserError("the whole machine (/) can't be made readable in the sandbox: name the folders it needs")
        paths.append(path)
    return paths
