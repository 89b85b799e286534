"""What a family of processes uses, and its end. On Linux from /proc, elsewhere from `ps`."""

from __future__ import annotations

import os
import stat
import time

from nanochat_lib.sandbox.syscalls import SIGKILL

PAGE = os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else 4096
PROC = os.path.isdir("/proc/self/task")  # Linux's; other systems have `ps`
TICKS = os.sysconf("SC_CLK_TCK") if hasattr(os, "sysconf") else 100


def _read(path: str) -> str:
    try:
        with open(path, encoding="ascii", errors="replace") as file:
            return file.read()
    except OSError:
        return ""  # it has ended meanwhile


def _ps(*options: str) -> list[str]:
    import subprocess  # takes long to load and Linux does without

    try:
        return subprocess.run(["ps", *options], capture_output=True, text=True, check=False).stdout.splitlines()
    except OSError:
        return []  # not even that: only this process's own child is watched


def _parents() -> dict[int, list[int]]:
    """Parent → children, of every process that can be seen."""
    found: dict[int, list[int]] = {}
    if PROC:
        for name in os.listdir("/proc"):
            if name.isdigit() and (text := _read(f"/proc/{name}/stat")):
                found.setdefault(int(text.rpartition(")")[2].split()[1]), []).append(int(name))
        return found
    for line in _ps("-axo", "pid=,ppid="):
        pid, parent = map(int, line.split())
        found.setdefault(parent, []).append(pid)
    return found


def children(pid: int) -> list[int]:
    """The processes that `pid` started and that have not ended."""
    if not PROC or not os.path.exists(f"/proc/{pid}/task/{pid}/children"):
        return _parents().get(pid, [])
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return []
    return [int(child) for thread in threads for child in _read(f"/proc/{pid}/task/{thread}/children").split()]


def family(pid: int) -> list[int]:
    """All that descends from `pid`, itself not among them."""
    if not PROC:
        table = _parents()
        found, queue = [], [pid]
        while queue:
            new = table.get(queue.pop(), [])
            found += new
            queue += new
        return found
    found, queue = [], [pid]
    while queue and len(found) < 10_000:
        new = children(queue.pop())
        found += new
        queue += new
    return found


def memory(pids: list[int], limit: int) -> int:
    """Bytes of memory these processes hold; pages they share count once, if the quick sum is above `limit`."""
    if not PROC:
        return sum(int(line) * 1024 for line in _ps("-o", "rss=", "-p", ",".join(map(str, pids)))) if pids else 0
    resident = {pid: int((_read(f"/proc/{pid}/statm").split() or ["0", "0"])[1]) * PAGE for pid in pids}
    if len(pids) < 2 or sum(resident.values()) <= limit:
        return sum(resident.values())
    total = 0
    for pid, most in resident.items():
        lines = [line.split() for line in _read(f"/proc/{pid}/smaps_rollup").splitlines()]
        shares = [int(words[1]) * 1024 for words in lines if words and words[0] == "Pss:"]
        total += shares[0] if shares else most
    return total


def threads(pids: list[int]) -> int:
    """Threads of these processes (on Linux; elsewhere one each)."""
    total = 0
    for pid in pids:
        try:
            total += os.stat(f"/proc/{pid}/task").st_nlink - 2
        except OSError:
            total += 1
    return total


def deleted_files(pids: list[int]) -> int:
    """Bytes of files that these processes hold open after they were deleted: no folder shows them."""
    found: dict[tuple[int, int], int] = {}
    for pid in pids:
        try:
            for name in os.listdir(f"/proc/{pid}/fd"):
                state = os.stat(f"/proc/{pid}/fd/{name}")
                if not state.st_nlink and stat.S_ISREG(state.st_mode):
                    found[state.st_dev, state.st_ino] = state.st_blocks * 512
        except OSError:
            continue
    return sum(found.values())


def cpu_seconds(pids: list[int]) -> float:
    """Seconds of processor time of these processes and of those they have waited for."""
    total = 0
    for pid in pids:
        words = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
        total += sum(map(int, words[11:15]))
    return total / TICKS


def tasks_of_user() -> int:
    """Threads of this user on the whole machine: what RLIMIT_NPROC counts where there is no user namespace."""
    total = 0
    for name in os.listdir("/proc") if PROC else ():
        try:
            if name.isdigit() and os.stat(f"/proc/{name}").st_uid == os.getuid():
                total += len(os.listdir(f"/proc/{name}/task"))
        except OSError:
            pass
    return total


def reap() -> dict[int, int]:
    """Takes leave of every child that has ended: pid → wait status."""
    ended = {}
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if not pid:
            return ended
        ended[pid] = status


def end_family(group: int, patience: float = 3.0) -> dict[int, int]:
    """Kills the process group and all that descends from this process, until nobody is left."""
    ended: dict[int, int] = {}
    limit = time.monotonic() + patience
    while True:
        try:
            os.killpg(group, SIGKILL)
        except OSError:
            pass
        for pid in family(os.getpid()):
            try:
                os.kill(pid, SIGKILL)
            except OSError:
                pass
        ended |= reap()
        if not family(os.getpid()) or time.monotonic() > limit:
            return ended
        time.sleep(0.002)
