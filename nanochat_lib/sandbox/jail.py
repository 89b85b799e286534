"""The level `namespaces`: own users, processes, network, IPC, host name and an own tree of files, by the kernel alone.

`enter` makes the namespaces, `build_tree` the view of files, `init` is process 1 in there: it starts the program, waits
for it and ends; the kernel then ends whatever else is left in the namespace. bubblewrap replaces the first two.
"""

from __future__ import annotations

import ctypes
import os
import struct

from nanochat_lib.sandbox import syscalls
from nanochat_lib.sandbox.confine import become

MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_REMOUNT, MS_BIND, MS_REC, MS_PRIVATE = (
    1, 2, 4, 8, 32, 4096, 16384, 1 << 18,
)  # fmt: skip
MNT_DETACH, AT_RECURSIVE = 2, 0x8000
MOUNT_ATTR_RDONLY, MOUNT_ATTR_NOSUID, MOUNT_ATTR_NODEV = 1, 2, 4
DEVICES = ("null", "zero", "full", "random", "urandom")
PROC_FILES = ("/proc/cpuinfo", "/proc/meminfo")  # JAX reads them; shown where a whole /proc can't be
INODES = 10_000  # files and folders in the scratch folder
INSIDE_UID = 1000


def enter() -> None:
    """New namespaces for this process (processes and files: for its next child). OSError where the system refuses."""
    uid, gid = os.getuid(), os.getgid()
    wanted = syscalls.CLONE_NEWUSER | syscalls.CLONE_NEWPID | syscalls.CLONE_NEWNET | syscalls.CLONE_NEWIPC
    syscalls.call("unshare", wanted | syscalls.CLONE_NEWUTS)
    syscalls.set_id_map("/proc/self/setgroups", "deny")
    syscalls.set_id_map("/proc/self/gid_map", f"{INSIDE_UID} {gid} 1")
    syscalls.set_id_map("/proc/self/uid_map", f"{INSIDE_UID} {uid} 1")


def build_tree(spec: dict) -> None:
    """A root of its own: what `spec` shows, read-only, an empty /tmp of limited size, five devices, its own /proc."""
    syscalls.call("unshare", syscalls.CLONE_NEWNS)
    syscalls.call("mount", None, "/", None, MS_REC | MS_PRIVATE, None)
    # The old root moves to /old, so that a path below the mount point (/tmp) stays reachable while the tree is built.
    syscalls.call("mount", "tmpfs", "/tmp", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m")
    os.mkdir("/tmp/old")
    os.mkdir("/tmp/new")
    syscalls.call(
        "syscall", syscalls.PIVOT_ROOT[syscalls.MACHINE], ctypes.c_char_p(b"/tmp"), ctypes.c_char_p(b"/tmp/old")
    )
    os.chdir("/")
    syscalls.call("mount", "tmpfs", "/new", "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755,size=1m")
    _scratch_memory(spec["files_bytes"])
    for source, target in spec["view"]:
        _show(source, target, read_only=True)
    for name in DEVICES:
        _show(f"/dev/{name}", f"/dev/{name}", read_only=False)
    for name, target in (("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")):
        os.symlink(f"/proc/self/{target}", f"/new/dev/{name}")
    if spec["scratch"]:
        _show(spec["scratch"], spec["scratch"], read_only=False)
    for link, target in spec["links"]:
        os.makedirs(os.path.dirname(f"/new{link}"), exist_ok=True)
        os.symlink(target, f"/new{link}")
    os.mkdir("/new/proc")
    if spec["proc"]:
        syscalls.call("mount", "proc", "/new/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY, None)
    else:
        for path in PROC_FILES:
            _show(path, path, read_only=True)
    _seal("/new", recursive=False)
    os.chdir("/new")
    syscalls.call("syscall", syscalls.PIVOT_ROOT[syscalls.MACHINE], ctypes.c_char_p(b"."), ctypes.c_char_p(b"."))
    syscalls.call("umount2", ".", MNT_DETACH)
    os.chdir("/")


def _scratch_memory(size: int) -> None:
    """/tmp and /dev/shm: two folders of one tmpfs, so that they share one limit."""
    os.mkdir("/memory")
    syscalls.call(
        "mount", "tmpfs", "/memory", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=0755,size={size},nr_inodes={INODES}"
    )
    for name, target in (("tmp", "/new/tmp"), ("shm", "/new/dev/shm")):
        os.mkdir(f"/memory/{name}", 0o777)
        os.makedirs(target)
        syscalls.call("mount", f"/memory/{name}", target, None, MS_BIND, None)


def _show(source: str, target: str, read_only: bool) -> None:
    source, target = f"/old{source}", f"/new{target}"
    if os.path.isdir(source):
        os.makedirs(target, exist_ok=True)
    else:
        os.makedirs(os.path.dirname(target), exist_ok=True)
        if not os.path.exists(target):
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
    syscalls.call("mount", source, target, None, MS_BIND | MS_REC, None)
    if read_only:
        _seal(target, recursive=True)


def _seal(target: str, recursive: bool) -> None:
    """Read-only from here on, with all that is mounted below where the kernel can do that (5.12)."""
    if recursive:
        wanted = MOUNT_ATTR_RDONLY | MOUNT_ATTR_NOSUID | MOUNT_ATTR_NODEV
        attributes = ctypes.create_string_buffer(struct.pack("4Q", wanted, 0, 0, 0))
        try:
            path = ctypes.c_char_p(target.encode())
            syscalls.call("syscall", syscalls.MOUNT_SETATTR, -100, path, AT_RECURSIVE, attributes, 32)
            return
        except OSError:
            pass
    flags = os.statvfs(target).f_flag & 0b1110 | MS_RDONLY | MS_NOSUID  # what the system locked must be said again
    flags |= os.statvfs(target).f_flag & (1024 | 2048)  # noatime, nodiratime
    syscalls.call("mount", None, target, None, MS_REMOUNT | MS_BIND | flags, None)


def init(spec: dict, pipes: tuple[int, int, int], report: int) -> None:
    """Process 1: starts the program, collects orphans, reports "exit STATUS" when the program has ended, and ends."""
    tasks = 8  # the supervisor, this process, and bubblewrap's
    program = os.fork()
    if not program:
        become(spec, pipes, report, tasks)
    syscalls.prctl(syscalls.PR_SET_DUMPABLE, 0)  # the program may not look into this process
    for pipe in pipes:
        os.close(pipe)
    while True:
        pid, status = os.wait()
        if pid == program:
            os.write(report, f"exit {os.waitstatus_to_exitcode(status)}\n".encode())
            os._exit(0)
