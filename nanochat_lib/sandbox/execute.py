"""`run` and `run_code`: the caller's side of the sandbox."""

from __future__ import annotations

import contextlib
import marshal
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from nanochat_lib.errors import UserError
from nanochat_lib.sandbox import levels, portable
from nanochat_lib.sandbox.bubblewrap import BOOT
from nanochat_lib.sandbox.guard import GUARD, MEMORY_EXIT
from nanochat_lib.sandbox.remove import remove_tree
from nanochat_lib.sandbox.view import checked, view

MIB = 2**20
HERE = str(Path(__file__).parent)
START = BOOT + "from nanochat_lib.sandbox.supervisor import main\nmain()\n"
WRITABLE = ("/tmp", "/dev/shm", "/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom")
GRACE = 15.0  # seconds after the limit in which the supervisor must have answered


@dataclass(frozen=True)
class Result:
    """What became of a program.

    `error`: one line, None on success. `timeout`, `memory_exceeded`: that limit ended it. `level`: the isolation it ran
    under. `exit_code`: negative for a signal, None when a limit ended it. `truncated`: there was more output than fits.
    `notes`: limits that this system does not have. `stdout_bytes`: standard output as it was, undecoded.
    """

    success: bool
    stdout: str
    stderr: str
    error: str | None
    timeout: bool
    memory_exceeded: bool
    level: str
    exit_code: int | None
    seconds: float
    truncated: bool = False
    notes: tuple[str, ...] = ()
    stdout_bytes: bytes = b""


class Refused(Exception):
    """The level could not be set up; why, in the words of whoever refused."""


def run_code(
    code: str,
    *,
    stdin: str = "",
    timeout: float = 5.0,
    memory_bytes: int | None = 256 * MIB,
    processes: int = 1,
    output_bytes: int = MIB,
    files_bytes: int = 64 * MIB,
    require: str = "limits",
    use: str | None = None,
) -> Result:
    """Runs Python code in a fresh interpreter, in an empty folder that is gone afterwards.

    Success is exit code 0; `error` is the last line of standard error. On a timeout both outputs are empty. Memory is
    exceeded when an uncaught MemoryError ended the code or the watch on its memory did, whatever its output says.
    `use`: exactly this level, to compare levels; else the strongest that works. Other arguments as in `run`.
    """
    program = code.encode("utf-8", "surrogatepass")
    result = run(
        [sys.executable, "-I", "-B", "-X", "utf8", "-c", GUARD, str(len(program))],
        stdin=program + stdin.encode(),
        timeout=timeout,
        memory_bytes=memory_bytes,
        cpu_seconds=timeout,
        processes=processes,
        threads=32,
        output_bytes=output_bytes,
        files_bytes=files_bytes,
        big_virtual=False,
        require=require,
        use=use,
    )
    fields = dict(result.__dict__)
    if result.exit_code == MEMORY_EXIT:
        fields.update(memory_exceeded=True, exit_code=1)
    if result.timeout:
        fields.update(stdout="", stderr="", stdout_bytes=b"")
    return Result(**fields)


def run(
    argv: Sequence[str],
    *,
    stdin: bytes = b"",
    scratch: Path | None = None,
    readable: Sequence[Path] = (),
    env: dict[str, str] | None = None,
    timeout: float = 5.0,
    memory_bytes: int | None = 1024 * MIB,
    cpu_seconds: float | None = None,
    processes: int = 1,
    threads: int = 512,
    output_bytes: int = MIB,
    files_bytes: int = 64 * MIB,
    big_virtual: bool = True,
    require: str = "limits",
    use: str | None = None,
) -> Result:
    """Runs a program: no network, no files but the interpreter's and `readable` (read-only) and the scratch folder.

    argv: the program and its arguments; sys.executable is visible, other programs only when `readable` names them.
    scratch: its working folder, which keeps what the program leaves (treat it with suspicion: links, odd names); None:
    an empty one that is gone afterwards. env: added to PATH, HOME, TMPDIR, LANG and one OpenMP thread; the caller's own
    environment is never passed on. Limits for the program and all it starts: wall seconds, bytes of memory really used,
    processor seconds, processes and (per process) threads, bytes of standard output and error each (the rest is read
    and dropped), bytes of files. `big_virtual`: for programs such as JAX that reserve far more addresses than they use;
    False also limits the address space to memory_bytes. UserError: `require` is more than works here, or the
    arguments can't be used. Safe to call from many threads at once.
    """
    found = levels.required(require)
    if use is not None and use not in levels.LEVELS:
        raise UserError(f"there is no isolation level {use!r}: use one of {', '.join(levels.LEVELS)}")
    if timeout <= 0 or output_bytes < 0 or files_bytes <= 0 or processes < 1 or threads < 0:
        raise UserError("the sandbox's limits must be positive (processes at least 1)")
    try:
        return execute(
            argv, stdin=stdin, scratch=scratch, readable=readable, env=env, timeout=timeout, memory_bytes=memory_bytes,
            cpu_seconds=cpu_seconds, processes=processes, threads=threads, output_bytes=output_bytes,
            files_bytes=files_bytes, big_virtual=big_virtual, level=use or found, proc=levels.proc_works(),
        )  # fmt: skip
    except Refused as refused:
        raise UserError(f"the program could not be started in the sandbox ({use or found}): {refused}") from None


def execute(
    argv: Sequence[str],
    *,
    level: str,
    proc: bool,
    timeout: float,
    stdin: bytes = b"",
    scratch: Path | None = None,
    readable: Sequence[Path] = (),
    env: dict[str, str] | None = None,
    memory_bytes: int | None = None,
    cpu_seconds: float | None = None,
    processes: int = 1,
    threads: int = 64,
    output_bytes: int = MIB,
    files_bytes: int = 64 * MIB,
    big_virtual: bool = True,
) -> Result:
    """`run` at one level, whether it is the best or not. Refused when it can't be set up."""
    strong = level != "limits"
    with contextlib.ExitStack() as stack:
        folder = None
        if scratch is not None:
            folder = os.path.realpath(scratch)
            if not os.path.isdir(folder):
                raise UserError(f"the scratch folder {scratch} is not a folder: make it first")
        elif not strong:
            folder = os.path.realpath(tempfile.mkdtemp(prefix="sandbox-"))
            stack.callback(remove_tree, folder)
        cwd = folder or "/tmp"
        shown, links = view(checked(readable)) if strong else ([], [])
        spec = {
            "argv": list(argv), "cwd": cwd, "env": {**environment(cwd), **(env or {})},
            "level": level, "strong": strong,
            "proc": proc, "linux": sys.platform.startswith("linux"), "view": shown, "links": links,
            "scratch": folder if strong else None, "watched": folder,
            "writable": [*WRITABLE, *([folder] if folder else [])],
            "timeout": timeout, "memory_bytes": memory_bytes, "cpu_seconds": cpu_seconds, "processes": processes,
            "threads": threads, "output_bytes": output_bytes, "files_bytes": files_bytes, "big_virtual": big_virtual,
        }  # fmt: skip
        if level == "bubblewrap":
            spec |= {"bwrap": levels.bubblewrap(), "bwrap_size": levels.bubblewrap_sizes(), "package": HERE}
            spec["python"] = sys.executable
        if not portable.POSIX:
            outcome, out, err = portable.supervise(spec, stdin)
        else:
            outcome, out, err = supervised(spec, stdin)
    return as_result(outcome, out, err, level)


def environment(home: str) -> dict[str, str]:
    """All a program is told of the outside."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PATH": "/usr/bin:/bin", "HOME": home, "TMPDIR": home, "LANG": "C.UTF-8", **threads}


def supervised(spec: dict, stdin: bytes) -> tuple[dict, bytes, bytes]:
    """Starts a supervisor and waits for its answer. Whatever happens here, program and supervisor end."""
    head = marshal.dumps(spec)
    message = len(head).to_bytes(8, "big") + head + stdin
    theirs, lifeline = os.pipe()
    try:
        process = subprocess.Popen(
            [sys.executable, "-I", "-S", "-c", START, HERE, str(theirs)], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, pass_fds=[theirs], start_new_session=True, cwd="/", env={},
        )  # fmt: skip
        try:
            answer, trouble = process.communicate(message, timeout=spec["timeout"] + GRACE)
        except subprocess.TimeoutExpired:
            raise Refused("the supervisor did not answer") from None
        finally:
            if process.poll() is None:
                process.kill()
                process.wait()
            for pipe in (process.stdin, process.stdout, process.stderr):
                pipe.close()
    finally:
        os.close(theirs)
        os.close(lifeline)
    if len(answer) < 8:
        raise Refused(trouble.decode("utf-8", "replace").strip() or "the supervisor was killed")
    size = 8 + int.from_bytes(answer[:8], "big")
    outcome = marshal.loads(answer[8:size])
    cut = size + outcome["sizes"][0]
    return outcome, answer[size:cut], answer[cut:]


def as_result(outcome: dict, out: bytes, err: bytes, level: str) -> Result:
    """The outcome in the words of the contract."""
    stdout, stderr = out.decode("utf-8", "replace"), err.decode("utf-8", "replace")
    caught, code = outcome["caught"], outcome["exit_code"]
    if "refused" in outcome or (not outcome["started"] and not caught):
        raise Refused(outcome.get("refused") or stderr.strip() or "the program did not start")
    error = outcome["error"]
    if not caught and code != 0:
        error = (stderr.strip().splitlines() or ["Execution failed"])[-1]
        if code is None:
            error = "killed from outside"
        elif code < 0 and not stderr.strip():
            error = f"ended by signal {-code}"
    return Result(
        success=caught is None and code == 0,
        stdout=stdout,
        stderr=stderr,
        error=error,
        timeout=caught == "timeout",
        memory_exceeded=caught == "memory",
        level=level,
        exit_code=code,
        seconds=outcome["seconds"],
        truncated=outcome["truncated"],
        notes=tuple(outcome["notes"]),
        stdout_bytes=out,
    )
