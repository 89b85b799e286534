"""A process that has just been forked gives up what a learner's code does not need, for good.

Levels, weakest first:

    limits       time, memory, file sizes and open files (any POSIX system)
    namespaces   and no network, no other processes, a file system of its own size, read-only files by Landlock, no new
                 processes or programs by seccomp (Linux)
    bubblewrap   and the fork server around it sees no file but the interpreter's and the package's

The order within one process: `limit`, `enter_namespaces` (which forks), `lock`. OSError where the system refuses.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import struct
from dataclasses import dataclass
from pathlib import Path

import nanochat_lib
from nanochat_lib.sandbox import landlock, seccomp, syscalls, view

PACKAGE = Path(nanochat_lib.__file__).parent
LEVELS = ("limits", "namespaces", "bubblewrap")
NEW = (
    syscalls.CLONE_NEWNS | syscalls.CLONE_NEWUTS | syscalls.CLONE_NEWIPC | syscalls.CLONE_NEWUSER
    | syscalls.CLONE_NEWPID | syscalls.CLONE_NEWNET
)  # fmt: skip
MS_NOSUID, MS_NODEV, MS_REC, MS_PRIVATE = 2, 4, 0x4000, 0x40000
# What graded code needs even less than other code in a sandbox: numbers on x86-64 and arm64.
SOCKET, CONNECT, BIND, EXEC, EXECAT, PRCTL = (41, 198), (42, 203), (49, 200), (59, 221), (322, 281), (157, 167)


@dataclass(frozen=True)
class Bounds:
    """What one child may use."""

    memory_bytes: int = 4 << 30  # of address space; JAX itself takes 1.5 GiB of it
    file_bytes: int = 16 << 20  # of one file
    scratch_bytes: int = 64 << 20  # of all files together (namespaces)
    cpu_seconds: int = 900
    files: int = 64


def limit(bounds: Bounds) -> None:
    """Limits that every POSIX system knows."""

    def at_most(kind: int, value: int) -> None:
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))

    at_most(resource.RLIMIT_CORE, 0)
    at_most(resource.RLIMIT_FSIZE, bounds.file_bytes)
    at_most(resource.RLIMIT_NOFILE, bounds.files)
    at_most(resource.RLIMIT_CPU, bounds.cpu_seconds)
    if platform.system() != "Darwin":  # which refuses to limit address space
        at_most(resource.RLIMIT_AS, bounds.memory_bytes)


def enter_namespaces(scratch: str, bounds: Bounds) -> None:
    """Continues as the first process of new namespaces; the process that called waits and ends as this one ends."""
    uid, gid = os.getuid(), os.getgid()
    syscalls.call("unshare", NEW)
    syscalls.set_id_map("/proc/self/setgroups", "deny")
    syscalls.set_id_map("/proc/self/uid_map", f"{uid} {uid} 1")
    syscalls.set_id_map("/proc/self/gid_map", f"{gid} {gid} 1")
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    child = os.fork()
    if child:
        os.closerange(0, 256)
        _, status = os.waitpid(child, 0)
        os._exit(os.waitstatus_to_exitcode(status) & 0xFF)
    syscalls.prctl(syscalls.PR_SET_PDEATHSIG, signal.SIGKILL)
    syscalls.call("mount", "none", "/", None, MS_REC | MS_PRIVATE, None)
    options = f"size={bounds.scratch_bytes},nr_inodes=2000,mode=700"
    syscalls.call("mount", "tmpfs", scratch, "tmpfs", MS_NOSUID | MS_NODEV, options)


def lock(scratch: str, readable: list[str]) -> None:
    """No rights over the system, no files but these, no sockets, programs or processes; nothing can be taken back."""
    syscalls.drop_capabilities()
    syscalls.prctl(syscalls.PR_SET_NO_NEW_PRIVS, 1)
    if not landlock.restrict([path for path in readable if os.path.exists(path)], [scratch]):
        raise OSError(errno.ENOSYS, "this kernel has no Landlock")
    if not seccomp.available():
        raise OSError(errno.ENOSYS, "no list of system calls for this machine")
    _refuse_more()
    seccomp.install(single_process=True)


def _refuse_more() -> None:
    """A second filter: no sockets at all, no programs, and no way to outlive the server (prctl of the death signal)."""
    column = 0 if syscalls.MACHINE == "x86_64" else 1
    lines = [(0x20, 0, 0, 0)]  # the call's number; the architecture is the first filter's matter
    for call in (SOCKET, CONNECT, BIND, EXEC, EXECAT):
        lines += [(0x15, 0, 1, call[column]), (0x06, 0, 0, seccomp.ERROR | errno.EPERM)]
    lines += [(0x15, 0, 2, PRCTL[column]), (0x20, 0, 0, seccomp.ARGUMENT), (0x15, 1, 0, syscalls.PR_SET_PDEATHSIG)]
    lines += [(0x06, 0, 0, seccomp.ALLOW), (0x06, 0, 0, seccomp.ERROR | errno.EPERM)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in lines))
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(lines), ctypes.addressof(code)))
    syscalls.prctl(syscalls.PR_SET_SECCOMP, 2, ctypes.addressof(head))


def readable_paths(more: list[str]) -> list[str]:
    """What the interpreter and the package need to be read: never the instructor's folder around the package."""
    found = [str(PACKAGE), *view.python_paths(), *view.SYSTEM, *view.SMALL, *more]
    found += ["/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu"]
    found += ["/dev/urandom", "/dev/random", "/dev/zero", "/dev/null"]
    return list(dict.fromkeys(os.path.realpath(path) for path in found if os.path.exists(path)))


def around(program: str, scratch: str, more: list[str]) -> list[str]:
    """bubblewrap's command line that shows what follows it nothing but these files, and no network."""
    shown, links = view.view([PACKAGE, *map(Path, more)])
    words = [program, "--unshare-all", "--die-with-parent", "--proc", "/proc", "--dev", "/dev", "--tmpfs", scratch]
    for source, place in shown:
        words += ["--ro-bind", source, place]
    for link, target in links:
        words += ["--symlink", target, link]
    words += ["--ro-bind-try", "/sys/devices/system/cpu", "/sys/devices/system/cpu"]
    return [*words, "--chdir", scratch, "--"]
