"""The few Linux calls that Python's own library lacks, through ctypes. Only the supervisor uses them."""

from __future__ import annotations

import ctypes
import os
import sys

MACHINE = os.uname().machine if hasattr(os, "uname") else ""
LINUX = sys.platform == "linux"
SIGKILL, SIGPIPE, SIGXFSZ = 9, 13, 25  # the module signal would cost the supervisor a third of its start

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC = 0x00020000, 0x04000000, 0x08000000
CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, CLONE_NEWCGROUP = 0x10000000, 0x20000000, 0x40000000, 0x02000000
PIVOT_ROOT = {"x86_64": 155, "aarch64": 41}
MOUNT_SETATTR, LANDLOCK_CREATE, LANDLOCK_ADD, LANDLOCK_RESTRICT = 442, 444, 445, 446  # the same on every machine

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_CAPBSET_DROP, PR_SET_CHILD_SUBREAPER = 1, 4, 24, 36
PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL = 22, 38, 47, 4

_libc = ctypes.CDLL(None, use_errno=True) if os.name == "posix" else None


def call(name: str, *arguments: object) -> int:
    """A function of the C library; OSError when it returns -1. Text becomes bytes, numbers become longs."""
    converted = [a.encode() if isinstance(a, str) else ctypes.c_long(a) if isinstance(a, int) else a for a in arguments]
    result = getattr(_libc, name)(*converted)
    if result == -1:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def prctl(option: int, *arguments: int) -> int:
    return call("prctl", option, *arguments, *[0] * (4 - len(arguments)))


def set_id_map(path: str, text: str) -> None:
    with open(path, "w") as file:
        file.write(text)


def drop_capabilities() -> None:
    """None is left, and none can come back: not by a program file, not by being root."""
    for capability in range(64):
        try:
            prctl(PR_CAPBSET_DROP, capability)
        except OSError:  # past the last one, or none of ours to drop
            break
    try:
        prctl(PR_CAP_AMBIENT, PR_CAP_AMBIENT_CLEAR_ALL)
    except OSError:
        pass  # kernels before 4.3 have no ambient ones
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)  # version 3, this process
    call("capset", header, (ctypes.c_uint32 * 6)())
