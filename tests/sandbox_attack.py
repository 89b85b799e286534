"""An attack of test_sandbox_attacks.py: what it tries, and how one sees that it succeeded.

An attack is a program. `P` holds what it may aim at: `secret` a file of the user's, `out` a place outside to write,
`victim` a process of the user's, `tcp`, `udp`, `abstract`, `unix` sockets that the test listens at, `shared` a readable
folder, `other` another program's scratch folder. It has succeeded when it prints HARM or when the test sees the damage:
`out` or `late` (in the scratch folder, after the end) exists, the victim is dead, a listener heard something.

limits: what the weakest level does about it: "stops", "lets" through, or it "depends" on the machine or the user.
bare: without a sandbox it succeeds (True), only as root ("root"), depending on the machine ("depends"), or it isn't
tried because it would harm the machine or has no bare form (None).
"""

from __future__ import annotations

from dataclasses import dataclass, field

START = """
import ctypes, os, sys, time
P = eval(sys.argv[1])
libc = ctypes.CDLL(None, use_errno=True)
HERE = os.uname().machine
def call(x86, arm, *args):
    number = {"x86_64": x86, "aarch64": arm}[HERE]
    return libc.syscall(ctypes.c_long(number), *[ctypes.c_long(a) if isinstance(a, int) else a for a in args])
def harm(yes=True):
    if yes: os.write(1, b"HARM")
def reads(path):
    harm(b"canary" in open(path, "rb").read(1000))
def touched(size, pages):
    for place in range(0, size, 4096): pages[place] = 1
    harm()
"""
MIB = 2**20


@dataclass(frozen=True)
class Attack:
    name: str
    tries: str
    code: str
    limits: str = "lets"
    bare: bool | str | None = True
    keeps: bool = False  # runs in a scratch folder that the caller keeps
    options: dict = field(default_factory=dict)

    def program(self) -> str:
        used = [name for name in ("mmap", "signal", "socket", "stat", "struct", "threading") if f"{name}." in self.code]
        return f"import {', '.join(used)}\n{START}{self.code}" if used else START + self.code
