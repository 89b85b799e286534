"""How memory is allocated where JAX computes on a CPU: large blocks stay in the process, in huge pages.

XLA takes a training step's temporary memory as one block and gives it back when the step is done. glibc returns such a
block to the system every time, which then has to clear and map it page by page again: 120,000 page faults a step for
467 MB, an eighth of the step's CPU time. docs/tpu-step.md, "On a CPU", has the figures. The price is that a process
keeps the most it ever had.
"""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from pathlib import Path

from nanochat_lib.launch import tpu_chips

# Huge pages; never a mapping of its own for a block; nothing given back below 8 GiB; one heap for all threads.
TUNABLES = (
    "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0:glibc.malloc.trim_threshold=8589934592:glibc.malloc.arena_max=1"
)
OPTIONS = {-4: 0, -1: -1, -8: 1}  # mallopt's M_MMAP_MAX, M_TRIM_THRESHOLD (-1: never) and M_ARENA_MAX


def applies(env: Mapping[str, str]) -> bool:
    """Whether this is Linux with glibc, JAX will compute on the CPU as far as can be told without it, and the user has
    not tuned glibc's malloc."""
    if platform.system() != "Linux" or platform.libc_ver()[0] != "glibc":
        return False
    if "glibc.malloc" in env.get("GLIBC_TUNABLES", "") or any(name.startswith("MALLOC_") for name in env):
        return False
    platforms = env.get("JAX_PLATFORMS", "")
    return platforms == "cpu" or not (platforms or tpu_chips(env) or _gpu())


def _gpu() -> bool:
    return any(any(Path("/dev").glob(device)) for device in ("nvidia[0-9]*", "kfd"))


def keep_memory() -> bool:
    """Sets this process's malloc; call it before JAX starts its threads. True if it is set, here or by `TUNABLES`.

    Huge pages cannot be asked for in a running process: those come only with `environment`, to the processes it starts.
    """
    if TUNABLES in os.environ.get("GLIBC_TUNABLES", ""):
        return True
    return applies(os.environ) and all(ctypes.CDLL(None).mallopt(*option) == 1 for option in OPTIONS.items())


def environment(env: Mapping[str, str]) -> dict[str, str]:
    """What to add to the environment of a process that trains: `TUNABLES` where they apply, else nothing."""
    if not applies(env):
        return {}
    return {"GLIBC_TUNABLES": ":".join(filter(None, (env.get("GLIBC_TUNABLES"), TUNABLES)))}
