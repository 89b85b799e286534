"""A filter of system calls: what no exercise needs and past escapes went through. Everything else is allowed.

The filter is a small program that the kernel runs at each call (man 2 seccomp, linux/filter.h): load a word of
`struct seccomp_data`, compare, return allow or an error number. A refused call fails with that error.
"""

from __future__ import annotations

import ctypes
import errno
import struct
import sys

from nanochat_lib.sandbox import syscalls

# name: number on x86_64, number on aarch64 (None: that machine has no such call)
REFUSED = {
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "kcmp": (312, 272),
    "pidfd_getfd": (438, 438), "userfaultfd": (323, 282), "perf_event_open": (298, 241), "bpf": (321, 280),
    "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51), "unshare": (272, 97),
    "setns": (308, 268), "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430),
    "fsconfig": (431, 431), "fsmount": (432, 432), "fspick": (433, 433), "mount_setattr": (442, 442),
    "keyctl": (250, 219), "add_key": (248, 217), "request_key": (249, 218), "syslog": (103, 116),
    "settimeofday": (164, 170), "clock_settime": (227, 112), "clock_adjtime": (305, 266), "adjtimex": (159, 171),
    "sethostname": (170, 161), "setdomainname": (171, 162), "reboot": (169, 142), "swapon": (167, 224),
    "swapoff": (168, 225), "acct": (163, 89), "quotactl": (179, 60), "quotactl_fd": (443, 443),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "init_module": (175, 105), "finit_module": (313, 273),
    "delete_module": (176, 106), "iopl": (172, None), "ioperm": (173, None), "modify_ldt": (154, None),
    "name_to_handle_at": (303, 264), "open_by_handle_at": (304, 265), "fanotify_init": (300, 262),
    "vhangup": (153, 58), "personality": (135, 92), "lookup_dcookie": (212, 18),
    "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    # memory that belongs to no process, which no limit would see
    "memfd_create": (319, 279), "memfd_secret": (447, 447), "shmget": (29, 194), "msgget": (68, 186),
    "semget": (64, 190), "mq_open": (240, 180),
}  # fmt: skip
FORK = {"fork": (57, None), "vfork": (58, None)}
CLONE, CLONE3, SOCKET, SOCKETPAIR, IOCTL = (56, 220), (435, 435), (41, 198), (53, 199), (16, 29)
AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
# AF_INET, AF_INET6: the others know no network namespace (vsock, alg, …), AF_UNIX reaches sockets in readable folders
FAMILIES, PAIR_FAMILIES = (2, 10), (1,)
TIOCSTI, TIOCLINUX = 0x5412, 0x541C  # would type into a terminal
NEW_NAMESPACES, CLONE_THREAD = 0x7E020080, 0x00010000

LOAD, EQUAL, AT_LEAST, ANY_BIT, RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
ALLOW, KILL, ERROR = 0x7FFF0000, 0x80000000, 0x00050000
NUMBER, ARCH, ARGUMENT = 0, 4, 16  # places in struct seccomp_data; argument i stands at 16 + 8 i, low half first


def _line(code: int, value: int, if_true: int = 0, if_false: int = 0) -> bytes:
    return struct.pack("HBBI", code, if_true, if_false, value)


def _refuse(number: int, error: int) -> list[bytes]:
    return [_line(EQUAL, number, 0, 1), _line(RETURN, ERROR | error)]


def program(machine: str, single_process: bool) -> bytes:
    """The filter as bytes of `struct sock_filter`. `single_process`: threads may start, processes may not."""
    column = 0 if machine == "x86_64" else 1
    lines = [_line(LOAD, ARCH), _line(EQUAL, AUDIT_ARCH[machine], 1, 0), _line(RETURN, KILL), _line(LOAD, NUMBER)]
    if machine == "x86_64":  # the x32 numbers are other names for the same calls
        lines += [_line(AT_LEAST, 0x40000000, 0, 1), _line(RETURN, ERROR | errno.ENOSYS)]
    for numbers in REFUSED.values():
        if numbers[column] is not None:
            lines += _refuse(numbers[column], errno.EPERM)
    # clone3 hides its flags behind a pointer; without it, every C library falls back to clone
    lines += _refuse(CLONE3[column], errno.ENOSYS)
    if single_process:
        for numbers in FORK.values():
            if numbers[column] is not None:
                lines += _refuse(numbers[column], errno.EAGAIN)
    lines += [_line(EQUAL, CLONE[column], 0, 6 if single_process else 4), _line(LOAD, ARGUMENT)]
    lines += [_line(ANY_BIT, NEW_NAMESPACES, 0, 1), _line(RETURN, ERROR | errno.EPERM)]
    if single_process:
        lines += [_line(ANY_BIT, CLONE_THREAD, 1, 0), _line(RETURN, ERROR | errno.EAGAIN)]
    lines += [_line(RETURN, ALLOW)]
    for number, families in ((SOCKET[column], FAMILIES), (SOCKETPAIR[column], PAIR_FAMILIES)):
        lines += [_line(EQUAL, number, 0, 3 + len(families)), _line(LOAD, ARGUMENT)]
        lines += [_line(EQUAL, family, len(families) - i, 0) for i, family in enumerate(families)]
        lines += [_line(RETURN, ERROR | errno.EAFNOSUPPORT), _line(RETURN, ALLOW)]
    lines += [_line(EQUAL, IOCTL[column], 0, 4), _line(LOAD, ARGUMENT + 8)]
    lines += [_line(EQUAL, TIOCSTI, 1, 0), _line(EQUAL, TIOCLINUX, 0, 1), _line(RETURN, ERROR | errno.EPERM)]
    lines += [_line(RETURN, ALLOW)]
    return b"".join(lines)


def available() -> bool:
    return syscalls.MACHINE in AUDIT_ARCH and sys.maxsize > 2**32


def install(single_process: bool) -> None:
    """Filters this process and all it starts, for good. Needs no_new_privs."""
    code = ctypes.create_string_buffer(program(syscalls.MACHINE, single_process))
    lines = (len(code) - 1) // 8
    head = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", lines, ctypes.addressof(code)))
    syscalls.prctl(syscalls.PR_SET_SECCOMP, 2, ctypes.addressof(head))
