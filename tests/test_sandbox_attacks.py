"""Every attack of sandbox_attacks*.py, at every level that works here and without a sandbox.

At the strong levels none succeeds. The weakest lets exactly those through that docs/sandbox.md lists. Without a sandbox
they succeed: an attack that nobody's code can carry out would prove nothing.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest
from sandbox_attack import Attack
from sandbox_attacks import ATTACKS
from sandbox_attacks_files import FILES

from nanochat_lib import sandbox
from nanochat_lib.errors import UserError

pytestmark = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="the attacks are written for Linux")
LEVELS = sandbox.LEVELS[: sandbox.LEVELS.index(sandbox.level()) + 1] if sys.platform.startswith("linux") else ()
PYTHON = [sys.executable, "-I", "-S", "-B", "-c"]
DOCS = Path(__file__).parents[1] / "docs" / "sandbox.md"
OUTPUT = 1 << 20
ROOT = os.geteuid() == 0


class Target:
    """What one attack aims at, and whether it was hit."""

    def __init__(self, attack: Attack) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="target-"))
        self.scratch, self.shared, self.other = (self.folder / name for name in ("scratch", "shared", "other"))
        for folder in (self.scratch, self.shared, self.other):
            folder.mkdir()
        for path in (self.folder / "secret", self.shared / "data", self.other / "answer"):
            path.write_text("canary")
        self.held = os.open(self.folder / "secret", os.O_RDONLY)
        os.set_inheritable(self.held, True)
        self.victim = None
        if "victim" in attack.code:
            self.victim = subprocess.Popen(["sleep", "60"], env={"CANARY": "canary", "PATH": os.environ["PATH"]})
        self.sockets = {
            "tcp": socket.socket(), "udp": socket.socket(type=socket.SOCK_DGRAM), "abstract": socket.socket(1),
            "unix": socket.socket(1), "shared": socket.socket(1),
        }  # fmt: skip
        self.sockets["tcp"].bind(("127.0.0.1", 0))
        self.sockets["udp"].bind(("127.0.0.1", 0))
        self.sockets["abstract"].bind(f"\0{self.folder.name}")
        self.sockets["unix"].bind(str(self.folder / "unix"))
        self.sockets["shared"].bind(str(self.shared / "socket"))
        for name, listener in self.sockets.items():
            listener.setblocking(False)
            if name != "udp":
                listener.listen()

    def words(self) -> str:
        return repr(
            {
                "secret": str(self.folder / "secret"), "out": str(self.folder / "out"), "shared": str(self.shared),
                "other": str(self.other), "victim": self.victim.pid if self.victim else 0,
                "tcp": self.sockets["tcp"].getsockname()[1], "udp": self.sockets["udp"].getsockname()[1],
                "abstract": self.folder.name, "unix": str(self.folder / "unix"),
            }
        )  # fmt: skip

    def hit(self, attack: Attack) -> str | None:
        """The damage done outside the program, in words."""
        if "late" in attack.code:
            time.sleep(1.3)  # longer than the process left behind waits
        if (self.folder / "out").exists():
            return "wrote outside"
        if (self.scratch / "late").exists():
            return "lived on"
        if self.victim and "kill(P" in attack.code:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.victim.wait(1)  # on a busy machine a signal needs a moment
                return "killed the victim"
        for name, listener in self.sockets.items():
            try:
                listener.recv(100) if name == "udp" else listener.accept()[0].close()
                return f"reached {name}"
            except BlockingIOError:
                pass
        return None

    def close(self) -> None:
        os.close(self.held)
        if self.victim:
            self.victim.kill()
            self.victim.wait()
        for listener in self.sockets.values():
            listener.close()
        sandbox.remove_tree(self.folder)


def bare(attack: Attack, target: Target) -> str | None:
    """The attack without a sandbox, as a plain child process."""
    began = time.monotonic()
    process = subprocess.Popen(
        [*PYTHON, attack.program(), target.words()], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, cwd=target.scratch, close_fds=False, start_new_session=True,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=1.5 if "timeout" in attack.options else 10)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "did not end"
    damage = target.hit(attack)
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    if b"HARM" in out or max(len(out), len(err)) > OUTPUT or time.monotonic() - began > 5:
        return "HARM"
    return damage


def sandboxed(attack: Attack, target: Target, use: str) -> str | None:
    """The attack at one level; the damage in words, None for none."""
    options = {"timeout": 10.0, "output_bytes": OUTPUT, **attack.options}
    own = attack.keeps or "late" in attack.code
    before = set(Path(tempfile.gettempdir()).glob("sandbox-*")) if attack.name == "stubborn-folder" else set()
    began = time.monotonic()
    try:
        result = sandbox.run(
            [*PYTHON, attack.program(), target.words()], readable=[target.shared], use=use,
            scratch=target.scratch if own else None, **options,
        )  # fmt: skip
    except UserError as error:
        return f"broke the sandbox: {error}"
    seconds = time.monotonic() - began
    if damage := target.hit(attack):
        return damage
    if "HARM" in result.stdout and result.error is None:
        return "HARM"
    if max(len(result.stdout), len(result.stderr)) > OUTPUT:
        return "too much output"
    if seconds > options["timeout"] + 4 or (attack.name == "hold-output" and seconds > 4):
        return f"took {seconds:.1f} s"
    if "timeout" in attack.options and not result.timeout:
        return f"no timeout: {result}"
    if attack.name == "stubborn-folder":
        left = set(Path(tempfile.gettempdir()).glob("sandbox-*")) - before
        if any((folder / "closed").exists() or (folder / "deep").exists() for folder in left):
            return "left a folder"
    assert result.level == use
    return None


def carry_out(attack: Attack, how: str) -> str | None:
    target = Target(attack)
    try:
        return bare(attack, target) if how == "bare" else sandboxed(attack, target, how)
    finally:
        target.close()


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest):
    """(attack, how) → its outcome: all that were selected, several at a time, the long ones first."""
    os.environ["NANOCHAT_TEST_CANARY"] = "canary"
    wanted = []
    for item in request.session.items:
        values = getattr(item, "callspec", None) and item.callspec.params
        if values and "attack" in values and item.module is request.module:
            wanted.append((values["attack"], values.get("how", "bare")))
        elif item.name == "test_the_documented_list_is_what_gets_through":
            wanted += [(attack, "limits") for attack in ATTACKS]
    wanted = list(dict.fromkeys((attack.name, how) for attack, how in wanted))
    by_name = {attack.name: attack for attack in ATTACKS}
    with ThreadPoolExecutor(6) as pool:
        waits = ("sleep", "late", "while")
        wanted.sort(key=lambda pair: not any(word in by_name[pair[0]].code for word in waits))
        futures: dict[tuple[str, str], Future] = {
            (name, how): pool.submit(carry_out, by_name[name], how) for name, how in wanted
        }
        yield futures
        for future in futures.values():
            future.cancel()
    del os.environ["NANOCHAT_TEST_CANARY"]


def strong_cases() -> list:
    """Every attack at every strong level. bubblewrap confines by the same code, but with another tree and processes."""
    again = [attack.name for attack in FILES] + ["signal", "daemon", "kill-supervisor", "tcp", "udp", "abstract-socket"]
    again += ["unix-socket", "shared-socket", "environment", "memory-device", "many-files", "new-user-namespace"]
    cases = []
    for how in LEVELS[1:]:
        for attack in ATTACKS:
            late = how == "bubblewrap" and attack.name not in again
            cases.append(pytest.param(attack, how, marks=pytest.mark.slow if late else (), id=f"{attack.name}-{how}"))
    return cases


@pytest.mark.parametrize(("attack", "how"), strong_cases())
def test_strong_levels_hold(attack: Attack, how: str, outcomes: dict) -> None:
    assert outcomes[attack.name, how].result() is None, f"{attack.name} {attack.tries}"


@pytest.mark.parametrize(
    "attack",
    [
        pytest.param(a, marks=pytest.mark.slow if a.bare == "depends" else (), id=a.name)
        for a in ATTACKS
        if a.bare is not None
    ],
)
def test_without_a_sandbox_it_succeeds(attack: Attack, outcomes: dict) -> None:
    damage = outcomes[attack.name, "bare"].result()
    if damage is None and (attack.bare == "depends" or (attack.bare == "root" and not ROOT)):
        pytest.skip("not on this machine or not for this user")
    assert damage, f"{attack.name} no longer {attack.tries} even without a sandbox"


def documented() -> dict[str, str]:
    """Attack → words, from the list of what `limits` lets through."""
    text = DOCS.read_text(encoding="utf-8").partition("<!-- limits lets through -->")[2].partition("<!-- end -->")[0]
    return dict(re.findall(r"^- `([a-z0-9-]+)`:? (.+)$", text, re.MULTILINE))


def test_the_documented_list_is_what_gets_through(outcomes: dict) -> None:
    listed = documented()
    through = {attack.name for attack in ATTACKS if outcomes[attack.name, "limits"].result() is not None}
    surely = {attack.name for attack in ATTACKS if attack.limits == "lets"}
    assert through <= set(listed), f"docs/sandbox.md does not say that limits lets through {through - set(listed)}"
    assert surely <= through, f"limits stops {surely - through} now: mend docs/sandbox.md and sandbox_attacks.py"
    assert set(listed) == {attack.name for attack in ATTACKS if attack.limits != "stops"}
    for attack in ATTACKS:
        if attack.name in listed:
            assert listed[attack.name].startswith(attack.tries), attack.name


def test_there_are_enough_of_them() -> None:
    assert len({attack.name for attack in ATTACKS}) == len(ATTACKS) >= 40
    assert sum(attack.bare is True for attack in ATTACKS) >= 30
