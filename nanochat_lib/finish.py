"""How a command ends: the last word in status.json, and, for a rented machine, switching it off.

With `ops.on_finish=shutdown` that happens when the command is done, has failed, or was ended because it stalled; never
after Ctrl-C, since a person is there, and never after SIGTERM, since the machine is taken anyway. It is asked for at
each start: a run's saved configuration alone switches nothing off.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nanochat_lib import stall
from nanochat_lib.errors import InUse, explain
from nanochat_lib.progress import format_seconds
from nanochat_lib.run_config import OpsConfig
from nanochat_lib.status import Status

VARIABLE = "NANOCHAT_SHUTDOWN"  # the command, where `shutdown` is not enough: "sky down -y mine", "gcloud … delete …"
LIMIT = 600.0  # seconds that the command may take


class Stalled(RuntimeError):
    """The process that did the work was ended because it stood still; the same command goes on."""

    code = stall.CODE


@dataclass
class Ending:
    """What `finishing` is told: whether the run was opened, so that its folder may be written to."""

    opened: bool = False


@contextlib.contextmanager
def finishing(folder: str | Path, ops: OpsConfig) -> Iterator[Ending]:
    """Around all work of a command on the run in `folder`: says how it ended and does what `ops.on_finish` asks for."""
    ending = Ending()

    def last_word(state: str, reason: str = "") -> None:
        if ending.opened:
            Status(folder, first()).write(state, reason)

    stall.before_exit(lambda reason: switch_off(ops, reason))
    try:
        yield ending
    except KeyboardInterrupt as stop:
        last_word("preempted", str(stop) or "stopped by Ctrl-C")
        raise
    except Stalled as stalled:
        switch_off(ops, str(stalled))
        raise
    except BaseException as error:
        last_word("failed", explain(error))
        if not isinstance(error, InUse):  # somebody else's run goes on here
            switch_off(ops, f"failed: {explain(error)}")
        raise
    else:
        last_word("done")
        if first() or not os.environ.get(VARIABLE):  # once is enough for a command that removes all machines
            switch_off(ops, "done")
    finally:
        stall.before_exit(None)


def first() -> bool:
    """Whether this is process 0, or the only one."""
    from nanochat_lib import distributed

    return distributed.place().index == 0


def off_command() -> list[str]:
    """What switches this machine off."""
    if named := os.environ.get(VARIABLE):
        return shlex.split(named)
    sudo = ["sudo", "-n"] if os.geteuid() != 0 and shutil.which("sudo") else []
    return [*sudo, "shutdown", "-h", "now"]


def switch_off(ops: OpsConfig, reason: str) -> None:
    """Where `ops.on_finish` asks for it: waits `ops.finish_seconds`, then runs the command. Ctrl-C stops that."""
    if ops.on_finish != "shutdown":
        return
    command = off_command()
    shown, wait = shlex.join(command), format_seconds(ops.finish_seconds)
    _say(reason)
    _say(f"the machine is switched off in {wait} by `{shown}`; Ctrl-C here, or kill {os.getpid()}, stops that")
    try:
        time.sleep(ops.finish_seconds)
    except KeyboardInterrupt:
        _say("the machine stays on")
        return
    wrong = ""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, stdin=subprocess.DEVNULL)
        if done.returncode:
            wrong = done.stderr.strip() or done.stdout.strip() or f"exit code {done.returncode}"
    except (OSError, subprocess.TimeoutExpired) as error:
        wrong = str(error)
    if wrong:
        _say(f"`{shown}` failed, the machine is still on: {wrong.splitlines()[-1]}")


def _say(line: str) -> None:
    sys.stdout.flush()
    print(f"nanochat: {line}", file=sys.stderr, flush=True)
