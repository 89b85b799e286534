"""The grader's end of the fork server: starting it at the strongest level that works here, and children one by one."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import nanochat_lib
from nanochat_lib.course.grading import confine, programs, wire
from nanochat_lib.course.grading.server import MESSAGE
from nanochat_lib.errors import UserError

STRONG = ("bubblewrap", "namespaces")
START_SECONDS = 120.0  # a cold machine reads JAX from a slow disk


class Child:
    """One child: frames to it, frames from it. The socket is all that the two share."""

    def __init__(self, server: Server, number: int, line: socket.socket) -> None:
        self.server, self.number, self.line = server, number, line
        self.buffer = bytearray()

    def send(self, message: object) -> bool:
        """False when the child does not take it."""
        try:
            self.line.settimeout(20.0)
            self.line.sendall(wire.encode(message))
            self.line.setblocking(False)
            return True
        except OSError:
            return False

    def receive(self) -> bool:
        """Takes what has arrived; False at the end of the line."""
        try:
            part = self.line.recv(1 << 18)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self.buffer += part
        return bool(part)

    def frame(self, most: int) -> bytes | None:
        """The first whole frame that has arrived. wire.BadFrame when it is longer than `most` bytes."""
        if len(self.buffer) < 8:
            return None
        size = int.from_bytes(self.buffer[:8], "big")
        if size > most:
            raise wire.BadFrame(f"a message of {size:,} bytes, {most:,} are allowed")
        if len(self.buffer) < 8 + size:
            return None
        found = bytes(self.buffer[: 8 + size])
        del self.buffer[: 8 + size]
        return found

    def end(self) -> None:
        """Kills the child, whatever it does."""
        self.line.close()
        self.server.order("kill", self.number)


class Server:
    """The fork server's process. `level`: as asked for. `writes`: its children add to `compiled`: no learner's may."""

    def __init__(
        self, level: str, modules: list[str], compiled: Path | None = None, checks: str = "", writes: bool = False
    ) -> None:  # fmt: skip
        self.level, self.modules = level, modules
        self.scratch = tempfile.mkdtemp(prefix="grade-")
        ours, theirs = socket.socketpair()
        command = [sys.executable, "-m", "nanochat_lib.course.grading.server", level, self.scratch, ",".join(modules)]
        more = [str(path) for path in (compiled, checks) if path]
        command += more
        if level == "bubblewrap":
            program = shutil.which("bwrap")
            if program is None:
                raise OSError("bwrap is not installed")
            command = [*confine.around(program, self.scratch, more), *command]
        self.errors = tempfile.TemporaryFile()
        try:
            self.process = subprocess.Popen(
                command, stdin=theirs, stdout=subprocess.DEVNULL, stderr=self.errors, cwd=self.scratch,
                env=environment(self.scratch, compiled, checks, writes), start_new_session=True,
            )  # fmt: skip
        finally:
            theirs.close()
        self.control, self.count = ours, 0
        try:
            self.control.settimeout(START_SECONDS)
            word = self.control.recv(6)
        except OSError:
            word = b""
        if word != b"ready\n":
            self.process.kill()
            self.process.wait()
            self.errors.seek(0)
            last = (self.errors.read().decode(errors="replace").strip().splitlines() or ["no message"])[-1]
            self.close()
            raise OSError(f"the fork server did not start: {last}")
        self.control.setblocking(False)

    def child(self) -> Child:
        """A new child."""
        self.drain()
        ours, theirs = socket.socketpair()
        self.count += 1
        try:
            socket.send_fds(self.control, [_order("start", self.count)], [theirs.fileno()])
        finally:
            theirs.close()
        return Child(self, self.count, ours)

    def order(self, word: str, number: int) -> None:
        with contextlib.suppress(OSError):
            self.control.send(_order(word, number))

    def drain(self) -> None:
        """Reads the reports of children that have ended; their ends show on their own sockets."""
        with contextlib.suppress(BlockingIOError):
            while self.control.recv(4096):
                pass

    def close(self) -> None:
        self.control.close()
        try:
            self.process.wait(5)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.errors.close()
        shutil.rmtree(self.scratch, ignore_errors=True)

    def __enter__(self) -> Server:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _order(word: str, number: int) -> bytes:
    return f"{word} {number}".encode().ljust(MESSAGE)


def environment(scratch: str, compiled: Path | None, checks: str, writes: bool = False) -> dict[str, str]:
    """All that the server and its children find in their environment."""
    cache = {
        "JAX_COMPILATION_CACHE_DIR": str(compiled or ""),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        programs.READ: str(compiled / "programs") if compiled else "",
        programs.WRITE: "1" if writes else "",
    }
    return (cache if compiled else {}) | {
        "PATH": os.defpath,
        "PYTHONPATH": str(Path(nanochat_lib.__file__).parents[1]),
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONHASHSEED": "0",
        "PYTHONNOUSERSITE": "1",
        "JAX_PLATFORMS": "cpu",
        "JAX_CPU_ENABLE_ASYNC_DISPATCH": "0",  # small programs run where they are called: no thread has to wake up
        "JAX_TRACEBACK_IN_LOCATIONS_LIMIT": "0",  # nobody reads them in compiled programs
        "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
        "TF_CPP_MIN_LOG_LEVEL": "3",
        "MPLBACKEND": "Agg",
        "NANOCHAT_COMPILE_CACHE": "0",
        "GRADE_CHECKS": checks,
        "COURSE_HOME": scratch,
        "COURSE_STRICT": "",
        "HOME": scratch,
        "TMPDIR": scratch,
        "LANG": "C.UTF-8",
    }


def start(
    modules: list[str], require: str = "limits", only: str = "", compiled: Path | None = None, checks: str = ""
) -> Server:
    """The server at the strongest level that works here: each is tried with a child. `only`: at this level.

    `compiled`: a folder of compiled programs that the children may read; at the level "limits" they write it, too.
    `checks`: the folder of the course's checks where it is not the package's own.

    Raises UserError when nothing at least as strong as `require` ("limits", "strong" or a level) works.
    """
    least = confine.LEVELS.index("namespaces" if require == "strong" else require)
    reasons = []
    for level in [only] if only else reversed(confine.LEVELS[least:]):
        try:
            server = Server(level, modules, compiled, checks)
        except OSError as error:
            reasons.append(f"{level}: {error}")
            continue
        if _answers(server):
            return server
        server.close()
        reasons.append(f"{level}: this system refuses it")
    how = "grade on Linux with bubblewrap (apt install bubblewrap) or in the container of docs/grading.md"
    raise UserError(f"isolation {only or require!r} does not work here ({'; '.join(reasons)}); {how}")


def _answers(server: Server) -> bool:
    """Does a child come up with its rights given up?"""
    child = server.child()
    empty = {"id": "", "name": "", "restore": {}, "pieces": [], "seconds": 5.0, "wall": 5.0}
    child.send({"do": "load", "word": "try", **empty})
    until = time.monotonic() + 30
    try:
        child.line.settimeout(30)
        while time.monotonic() < until:
            part = child.line.recv(1 << 16)
            child.buffer += part
            if (frame := child.frame(1 << 16)) is not None:
                return wire.decode(frame)["word"] == "try"
            if not part:
                return False
    except OSError:
        return False
    finally:
        child.end()
    return False
