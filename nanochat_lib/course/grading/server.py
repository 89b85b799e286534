"""The fork server: a process that has imported what chapters need and forks once for each submission.

    python -m nanochat_lib.course.grading.server LEVEL SCRATCH MODULE,MODULE… [READABLE…]    (stdin is a socket)

The grader sends a number and one end of a socket; the server forks a child for it, which gives up its rights
(confine.py) and only then reads what to do from that socket. So the server never sees a learner's code, nor does one
learner's child find another's in its memory. `kill N` ends a child; the end of each is reported as `N status`.
"""

from __future__ import annotations

import importlib
import os
import select
import signal
import socket
import sys

from nanochat_lib.course.grading import confine, quick
from nanochat_lib.sandbox import syscalls

MESSAGE = 24  # bytes of one order to the server
PR_SET_CHILD_SUBREAPER = 36


def serve(control: socket.socket, level: str, scratch: str, modules: list[str], more: list[str]) -> None:
    """Until the grader closes its end."""
    if folder := os.environ.pop("GRADE_CHECKS", ""):
        importlib.import_module("nanochat_lib.course.checks").__path__.append(folder)
    for name in modules:
        importlib.import_module(name)
    quick.prepare()
    _still_forkable()
    if level != "limits":  # a child's first process is killed with it and cannot wait for it, so that this one does
        syscalls.prctl(PR_SET_CHILD_SUBREAPER, 1)
    bounds, readable = confine.Bounds(), confine.readable_paths(more)
    wake_read, wake_write = os.pipe()
    os.set_blocking(wake_write, False)
    signal.set_wakeup_fd(wake_write, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    children: dict[int, int] = {}  # process -> number
    control.sendall(b"ready\n")
    while True:
        ready, _, _ = select.select([control, wake_read], [], [])
        if wake_read in ready:
            os.read(wake_read, 4096)
            while pid_status := _ended():
                pid, status = pid_status
                if pid in children:
                    control.sendall(f"{children.pop(pid)} {os.waitstatus_to_exitcode(status)}\n".encode())
        if control in ready:
            message, fds, _, _ = socket.recv_fds(control, MESSAGE, 1)
            if len(message) < MESSAGE:
                break
            word, number = message.decode().split()
            if word == "start":
                pid = os.fork()
                if not pid:
                    control.close()
                    os.close(wake_read), os.close(wake_write)
                    _child(fds[0], level, scratch, readable, bounds)
                os.close(fds[0])
                children[pid] = int(number)
            else:
                for pid in [pid for pid, known in children.items() if known == int(number)]:
                    _end(pid)
    for pid in children:
        _end(pid)


def _ended() -> tuple[int, int] | None:
    """One process that has ended and how, None when there is none."""
    try:
        pid, status = os.waitpid(-1, os.WNOHANG)
    except ChildProcessError:
        return None
    return (pid, status) if pid else None


def _still_forkable() -> None:
    """A JAX that has started computing has threads, which a forked child would lack. SystemExit then."""
    if "jax" in sys.modules:
        from jax._src import xla_bridge

        if xla_bridge.backends_are_initialized():
            raise SystemExit("an imported module starts JAX's backend, so children cannot be forked any more")


def _end(pid: int) -> None:
    """Ends a child; in a namespace of its own everything that it started ends with it."""
    for kill in (os.killpg, os.kill):
        try:
            kill(pid, signal.SIGKILL)
        except OSError:
            pass


def _child(fd: int, level: str, scratch: str, readable: list[str], bounds: confine.Bounds) -> None:
    """Never returns."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        os.dup2(fd, 3)
        nothing = os.open(os.devnull, os.O_RDWR)
        for stream in (0, 1, 2):
            os.dup2(nothing, stream)
        os.closerange(4, 4096)
        if level != "limits":
            confine.enter_namespaces(scratch, bounds)
        os.chdir(scratch)
        confine.limit(bounds)
        if level != "limits":
            confine.lock(scratch, readable)
        from nanochat_lib.course.grading import child

        child.work(3)
        code = 0
    finally:
        os._exit(code)


if __name__ == "__main__":
    os.dup2(0, 9)
    names = [name for name in sys.argv[3].split(",") if name]
    serve(socket.socket(fileno=9), sys.argv[1], sys.argv[2], names, sys.argv[4:])
