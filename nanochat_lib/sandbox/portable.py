"""The level `limits` where there is no fork (Windows): a time limit and a cut on the output, nothing else."""

from __future__ import annotations

import os
import subprocess
import threading
import time

POSIX = os.name == "posix"
NOTE = "only time and output are limited on this system"


def supervise(spec: dict, stdin: bytes) -> tuple[dict, bytes, bytes]:
    """As the supervisor's function of this name, in the caller's own process."""
    began = time.monotonic()
    system = {
        name: os.environ[name] for name in ("SYSTEMROOT",) if name in os.environ
    }  # Windows starts nothing without
    outcome: dict = {"exit_code": None, "caught": None, "error": None, "notes": [NOTE], "truncated": False}
    try:
        process = subprocess.Popen(
            spec["argv"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=spec["cwd"],
            env={**system, **spec["env"]},
        )  # fmt: skip
    except OSError as error:
        return {**outcome, "refused": str(error)}, b"", b""
    texts = {process.stdout: bytearray(), process.stderr: bytearray()}

    def drain(pipe) -> None:
        while data := pipe.read1(1 << 16):
            room = max(spec["output_bytes"] - len(texts[pipe]), 0)
            outcome["truncated"] |= len(data) > room
            texts[pipe] += data[:room]

    def feed() -> None:
        try:
            process.stdin.write(stdin)
            process.stdin.close()
        except OSError:
            pass  # it does not read

    threads = [threading.Thread(target=drain, args=[pipe], daemon=True) for pipe in texts]
    threads.append(threading.Thread(target=feed, daemon=True))
    for thread in threads:
        thread.start()
    try:
        outcome["exit_code"] = process.wait(spec["timeout"])
    except subprocess.TimeoutExpired:
        outcome.update(caught="timeout", error=f"killed after {spec['timeout']:g} seconds")
    finally:
        process.kill()
        process.wait()
    for thread in threads:
        thread.join(1.0)
    outcome.update(started=True, seconds=time.monotonic() - began)
    return outcome, bytes(texts[process.stdout]), bytes(texts[process.stderr])
