"""The process between the caller and the program: starts it at a level, feeds it, watches its limits, ends all of it.

A small Python of its own (no site-packages), so that a caller full of threads never forks, and so that the program dies
with the caller: the supervisor sees the caller's pipe close and kills all; should the supervisor be killed, the kernel
does. Reads 8 bytes of length, the specification and the program's input; writes a length, the outcome and both outputs.
"""

from __future__ import annotations

import marshal
import os
import select
import sys
import time

from nanochat_lib.sandbox import bubblewrap, jail, processes, syscalls
from nanochat_lib.sandbox.confine import become

PEEK = 0.005  # seconds between two looks at the limits, at first and at most
PEEK_MOST = 0.025


class Caught(Exception):
    """A limit was passed; its name and the words for the person."""


def main() -> None:
    lifeline = int(sys.argv[1])
    head, stdin = _exchange_in(sys.stdin.buffer.read())
    if head["linux"]:
        syscalls.prctl(syscalls.PR_SET_PDEATHSIG, syscalls.SIGKILL)
        syscalls.prctl(syscalls.PR_SET_CHILD_SUBREAPER, 1)  # whoever detaches at the weakest level comes here
    outcome, out, err = supervise(head, stdin, lifeline)
    outcome["sizes"] = [len(out), len(err)]
    text = marshal.dumps(outcome)
    sys.stdout.buffer.write(len(text).to_bytes(8, "big") + text + out + err)
    sys.stdout.buffer.flush()


def _exchange_in(data: bytes) -> tuple[dict, bytes]:
    size = int.from_bytes(data[:8], "big")
    return marshal.loads(data[8 : 8 + size]), data[8 + size :]


def start(spec: dict) -> tuple[int, int, int, int, int]:
    """Forks the program at the level asked for: its process, our ends of stdin, stdout, stderr and of the report."""
    ends = [os.pipe() for _ in range(4)]
    (stdin, to_program), (from_out, stdout), (from_err, stderr), (from_report, report) = ends
    tasks = 0 if spec["strong"] else processes.tasks_of_user()
    if spec["level"] == "namespaces":
        jail.enter()
    child = os.fork()
    if not child:
        try:
            for end in (to_program, from_out, from_err, from_report):
                os.close(end)
            if spec["linux"]:
                syscalls.prctl(syscalls.PR_SET_PDEATHSIG, syscalls.SIGKILL)
            if spec["level"] == "limits":
                become(spec, (stdin, stdout, stderr), report, tasks)
            if spec["level"] == "bubblewrap":
                bubblewrap.become(spec, (stdin, stdout, stderr), report)
            os.setsid()
            jail.build_tree(spec)
            jail.init(spec, (stdin, stdout, stderr), report)
        except BaseException as error:
            os.write(report, f"refused {type(error).__name__}: {error}\n".encode())
        finally:
            os._exit(127)
    for end in (stdin, stdout, stderr, report):
        os.close(end)
    return child, to_program, from_out, from_err, from_report


class Watch:
    """The limits on the whole family of processes, looked at again and again."""

    def __init__(self, spec: dict, child: int) -> None:
        self.spec, self.child = spec, child
        self.deadline = time.monotonic() + spec["timeout"]
        self.next_files, self.files_before = 0.0, (0, 0)
        if spec["watched"]:
            self.files_before = usage(spec["watched"], None)

    def members(self) -> list[int]:
        """Processes of the program: not process 1 of the namespace, nor bubblewrap."""
        if self.spec["level"] == "limits":
            return processes.family(os.getpid())
        first = self.child
        if self.spec["level"] == "bubblewrap":
            below = processes.children(first)
            if not below:
                return []
            first = below[0]
        return processes.family(first)

    def look(self) -> None:
        """Raises Caught when a limit is passed."""
        spec = self.spec
        if time.monotonic() > self.deadline:
            raise Caught("timeout", f"killed after {spec['timeout']:g} seconds")
        members = self.members()
        if len(members) > spec["processes"]:
            raise Caught("processes", f"killed: more than {spec['processes']} process{'es' * (spec['processes'] > 1)}")
        if processes.threads(members) > spec["processes"] + spec["threads"]:
            raise Caught("threads", f"killed: more than {spec['threads']} threads")
        limit = spec["memory_bytes"]
        if limit is not None and processes.memory(members, limit) > limit:
            raise Caught("memory", f"killed: more than {limit >> 20} MiB of memory")
        seconds = spec["cpu_seconds"]
        if seconds is not None and processes.cpu_seconds(members) > seconds:
            raise Caught("cpu", f"killed: more than {seconds:g} seconds of processor time")
        self.look_at_files(members)

    def look_at_files(self, members: list[int]) -> None:
        now = time.monotonic()
        if now < self.next_files:
            return
        spec, size, entries = self.spec, 0, 0
        if spec["watched"]:
            most = (self.files_before[0] + spec["files_bytes"], self.files_before[1] + jail.INODES)
            size, entries = usage(spec["watched"], most)
            size += processes.deleted_files(members)
            size, entries = size - self.files_before[0], entries - self.files_before[1]
        if spec["level"] == "bubblewrap" and members:  # its tmpfs has no limit on entries, in old versions none on size
            for folder in ("/tmp", "/dev/shm"):
                used = memory_folder(members[0], folder)
                size, entries = max(size, used[0]), max(entries, used[1])
        if size > spec["files_bytes"]:
            raise Caught("files", f"killed: more than {spec['files_bytes'] >> 20} MiB of files")
        if entries > jail.INODES:
            raise Caught("files", f"killed: more than {jail.INODES} files")
        self.next_files = now + max(0.05, 10 * (time.monotonic() - now))


def memory_folder(pid: int, folder: str) -> tuple[int, int]:
    """Bytes and entries in a tmpfs that only process `pid` sees."""
    try:
        state = os.statvfs(f"/proc/{pid}/root{folder}")
    except OSError:
        return 0, 0
    return (state.f_blocks - state.f_bfree) * state.f_frsize, state.f_files - state.f_ffree


def usage(folder: str, most: tuple[int, int] | None) -> tuple[int, int]:
    """Bytes and entries below a folder; stops counting above `most`. Never follows a link."""
    size = entries = 0
    queue = [folder]
    while queue:
        try:
            with os.scandir(queue.pop()) as found:
                for entry in found:
                    entries += 1
                    try:
                        size += entry.stat(follow_symlinks=False).st_blocks * 512
                    except OSError:
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        queue.append(entry.path)
                    if most and (size > most[0] or entries > most[1]):
                        return size, entries
        except OSError:
            continue  # gone meanwhile, or closed to us
    return size, entries


def supervise(spec: dict, stdin: bytes, lifeline: int) -> tuple[dict, bytes, bytes]:
    """Runs the program to its end or to the first limit. Returns the outcome, standard output and standard error."""
    began = time.monotonic()
    outcome: dict = {"exit_code": None, "caught": None, "error": None, "notes": [], "truncated": False}
    try:
        child, to_program, from_out, from_err, from_report = start(spec)
    except OSError as error:
        outcome["refused"] = str(error)
        return outcome, b"", b""
    streams = {from_out: bytearray(), from_err: bytearray(), from_report: bytearray()}
    most = {from_out: spec["output_bytes"], from_err: spec["output_bytes"], from_report: 1 << 16}
    watch, ended, statuses, pause = Watch(spec, child), False, {}, PEEK
    unsent = memoryview(stdin)
    os.set_blocking(to_program, False)
    open_ends = set(streams)
    bell = open_bell(child)
    try:
        while not ended:
            readers = [*open_ends, lifeline, *bell]
            ready, writable, _ = select.select(readers, [to_program] if to_program >= 0 else [], [], pause)
            if lifeline in ready:  # the caller is gone
                raise Caught("caller", "the caller has ended")
            for end in ready:
                if end not in bell:
                    outcome["truncated"] |= not _take(end, streams, most, open_ends)
            if writable:
                unsent, to_program = _send(to_program, unsent)
            statuses |= processes.reap()
            ended = child in statuses
            if not ended:
                watch.look()
                pause = min(PEEK_MOST, pause * 1.2)
        watch.next_files = 0.0
        watch.look_at_files([])  # what it wrote since the last look
    except Caught as caught:
        outcome["caught"], outcome["error"] = caught.args
    statuses |= _end(spec, child)
    outcome["seconds"] = time.monotonic() - began
    for end in list(open_ends):
        os.set_blocking(end, False)
        while end in open_ends:
            try:
                outcome["truncated"] |= not _take(end, streams, most, open_ends)
            except BlockingIOError:
                break
    _read_report(bytes(streams[from_report]).decode("utf-8", "replace"), outcome)
    if spec["level"] == "limits" and child in statuses:
        outcome["exit_code"] = os.waitstatus_to_exitcode(statuses[child])
    if outcome["caught"]:
        outcome["exit_code"] = None
    return outcome, bytes(streams[from_out]), bytes(streams[from_err])


def open_bell(child: int) -> list[int]:
    """A file that can be read as soon as the child has ended, on Linux from 5.3; elsewhere it is looked for."""
    try:
        return [os.pidfd_open(child)]
    except (AttributeError, OSError):
        return []


def _take(end: int, streams: dict, most: dict, open_ends: set) -> bool:
    """Reads once; keeps what there is room for. False when something was cut off."""
    data = os.read(end, 1 << 16)
    if not data:
        open_ends.discard(end)
        return True
    room = most[end] - len(streams[end])
    streams[end] += data[: max(room, 0)]
    return len(data) <= room


def _send(end: int, unsent: memoryview) -> tuple[memoryview, int]:
    """Writes what the pipe takes; closes it when all is sent or nobody reads. -1: closed."""
    try:
        unsent = unsent[os.write(end, unsent[: 1 << 16]) :] if unsent else unsent
    except BlockingIOError:
        return unsent, end
    except OSError:
        unsent = unsent[:0]
    if not unsent:
        os.close(end)
        return unsent, -1
    return unsent, end


def _end(spec: dict, child: int) -> dict[int, int]:
    """Nobody is left when this returns. Killing process 1 of a namespace kills all in it, at once and for sure."""
    if spec["strong"]:
        for pid in [*processes.children(child), child] if spec["level"] == "bubblewrap" else [child]:
            try:
                os.kill(pid, syscalls.SIGKILL)
            except OSError:
                pass
    return processes.end_family(child)


def _read_report(text: str, outcome: dict) -> None:
    outcome["started"] = False
    for line in text.splitlines():
        word, _, rest = line.partition(" ")
        if word == "started":
            outcome["started"] = True
        elif word == "refused":
            outcome["refused"] = rest
        elif word == "note":
            outcome["notes"].append(rest)
        elif word == "exit":
            outcome["exit_code"] = int(rest)
