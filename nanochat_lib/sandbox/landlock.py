"""Landlock: the kernel's own allow-list of paths for one process and its children (linux/landlock.h).

It stands behind the mounts: should a path become visible by some mistake, it still can't be written. It also refuses
TCP (from version 4), and signals and abstract sockets to processes outside (from version 6).
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct

from nanochat_lib.sandbox import syscalls

EXECUTE, WRITE_FILE, READ_FILE, READ_DIR = 1 << 0, 1 << 1, 1 << 2, 1 << 3
MAKE_CHAR, MAKE_BLOCK, REFER, TRUNCATE, IOCTL_DEV = 1 << 6, 1 << 11, 1 << 13, 1 << 14, 1 << 15
READ = EXECUTE | READ_FILE | READ_DIR
FILE_RIGHTS = EXECUTE | WRITE_FILE | READ_FILE | TRUNCATE | IOCTL_DEV  # the others have a meaning for folders only
TCP_BIND, TCP_CONNECT = 1, 2
SCOPE_ABSTRACT_SOCKETS, SCOPE_SIGNALS = 1, 2


def version() -> int:
    """Landlock's version here; 0 where there is none."""
    try:
        return syscalls.call("syscall", syscalls.LANDLOCK_CREATE, 0, 0, 1)
    except (OSError, AttributeError):
        return 0


def handled(abi: int) -> int:
    """Every right on files that this version can refuse."""
    bits = (1 << 13) - 1
    return bits | (REFER if abi >= 2 else 0) | (TRUNCATE if abi >= 3 else 0) | (IOCTL_DEV if abi >= 5 else 0)


def restrict(readable: list[str], writable: list[str]) -> int:
    """From here on only these trees can be read (and programs in them started), only `writable` ones changed.

    Returns Landlock's version, 0 where there is none and nothing happened. Needs no_new_privs.
    """
    abi = version()
    if not abi:
        return 0
    rights = handled(abi)
    fields = [rights]
    if abi >= 4:
        fields.append(TCP_BIND | TCP_CONNECT)
    if abi >= 6:
        fields.append(SCOPE_ABSTRACT_SOCKETS | SCOPE_SIGNALS)
    head = struct.pack(f"{len(fields)}Q", *fields)
    rules = syscalls.call("syscall", syscalls.LANDLOCK_CREATE, ctypes.create_string_buffer(head), len(head), 0)
    for path in readable:
        _allow(rules, path, READ)
    for path in writable:
        _allow(rules, path, rights & ~(MAKE_CHAR | MAKE_BLOCK))
    syscalls.call("syscall", syscalls.LANDLOCK_RESTRICT, rules, 0)
    os.close(rules)
    return abi


def _allow(rules: int, path: str, rights: int) -> None:
    where = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        if not stat.S_ISDIR(os.fstat(where).st_mode):
            rights &= FILE_RIGHTS
        rights &= handled(version())
        rule = ctypes.create_string_buffer(struct.pack("=Qi", rights, where))
        syscalls.call("syscall", syscalls.LANDLOCK_ADD, rules, 1, rule, 0)
    finally:
        os.close(where)
