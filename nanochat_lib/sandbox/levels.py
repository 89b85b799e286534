"""Which isolation works on this machine: found out by trying it, once."""

from __future__ import annotations

import functools
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import warnings

from nanochat_lib.errors import UserError

LEVELS = ("limits", "namespaces", "bubblewrap")  # weakest first
INSTALL = (
    "install bubblewrap (apt-get install bubblewrap, dnf install bubblewrap) on a Linux that allows user namespaces"
)
_lock = threading.Lock()
_found: dict[str, object] = {}


def level() -> str:
    """The strongest level that works here. The first call tries them (about 0.3 s), later ones know."""
    _find()
    return str(_found["level"])


def proc_works() -> bool:
    """Whether a /proc of its own can be mounted inside: not in containers that hide parts of theirs."""
    _find()
    return bool(_found["proc"])


def reasons() -> dict[str, str]:
    """Why each stronger level does not work here."""
    _find()
    return dict(_found["reasons"])  # type: ignore[call-overload]


def describe() -> str:
    """One line for `nanochat doctor`."""
    found, why = level(), reasons()
    words = {
        "bubblewrap": "own processes, network and files",
        "namespaces": "own processes, network and files",
        "limits": "limits on time, memory and output only: not a security boundary",
    }[found]
    return f"{found} ({words})" + "".join(f"; {name}: {reason}" for name, reason in why.items())


def required(wanted: str) -> str:
    """The level to use; UserError when less than `wanted` works here."""
    if wanted not in LEVELS:
        raise UserError(f"there is no isolation level {wanted!r}: use one of {', '.join(LEVELS)}")
    found = level()
    if LEVELS.index(found) < LEVELS.index(wanted):
        why = "; ".join(f"{name}: {reason}" for name, reason in reasons().items())
        raise UserError(
            f"isolation {wanted} is asked for, here works only {found} ({why}): {INSTALL}, see docs/sandbox.md"
        )
    return found


def _find() -> None:
    with _lock:
        if "level" in _found:
            return
        why: dict[str, str] = {}
        _found.update(level="limits", proc=False, reasons=why)
        for name in reversed(LEVELS[1:]):
            for proc in (True, False):
                reason = trial(name, proc)
                if reason is None:
                    _found.update(level=name, proc=proc)
                    return
            why[name] = reason or ""
        if not sys.platform.startswith("linux"):
            warnings.warn(
                "the sandbox has no isolation on this system, only limits: run untrusted code in a container",
                stacklevel=4,
            )


def trial(name: str, proc: bool) -> str | None:
    """None when a program runs at this level and sees neither the network nor this user's files, else why not."""
    from nanochat_lib.sandbox.execute import Refused, execute

    if not sys.platform.startswith("linux"):
        return "needs Linux"
    if name == "bubblewrap" and not bubblewrap():
        return "not installed"
    with tempfile.NamedTemporaryFile(prefix="sandbox-canary-") as canary:
        look = (
            "import os, socket; s = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)\n"
            "try: s.connect(('192.0.2.1', 9)); print('network')\n"
            "except OSError: pass\n"
            f"print('ready', os.path.exists({canary.name!r}), os.getpid() < 10)"
        )
        try:
            done = execute([sys.executable, "-I", "-S", "-B", "-c", look], level=name, proc=proc, timeout=20.0)
        except Refused as refused:
            return str(refused).strip().splitlines()[-1]
    if done.stdout.split() != ["ready", "False", "True"]:
        return (done.stderr.strip().splitlines() or [f"did not isolate: {done.stdout.strip()!r}"])[-1]
    return None


@functools.cache
def bubblewrap() -> str | None:
    """The program's path, where it is installed."""
    return shutil.which("bwrap")


@functools.cache
def bubblewrap_sizes() -> bool:
    """Whether it knows --size (0.7 and later)."""
    done = subprocess.run([bubblewrap() or "bwrap", "--version"], capture_output=True, text=True, check=False)
    numbers = re.findall(r"\d+", done.stdout)
    return tuple(map(int, numbers[:2])) >= (0, 7)
