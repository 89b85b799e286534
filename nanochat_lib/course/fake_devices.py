"""Several devices on a computer that has one: XLA splits the CPU, in a process of its own.

The number of devices must be known before JAX starts. A notebook's JAX runs already, so whatever is to see eight
devices is handed to another process as text, and plain data comes back.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

WRAPPER = """
import json, sys
import nanochat_lib.course  # in fast mode it makes XLA compile quickly
from nanochat_lib.compile_cache import keep_compiled
keep_compiled()
asked = json.load(sys.stdin)
names = dict(asked["values"])
exec(compile(asked["program"], "the program", "exec"), names)
print("\\n" + json.dumps(names["result"]))
"""


def on_devices(program: str, devices: int = 8, **values: object) -> object:
    """What the Python text `program` leaves in the name `result`, run where JAX has `devices` CPU devices.

    `values` are names that the program finds; they and the result are plain data (JSON). Raises RuntimeError with the
    last line of what the program said when it fails.
    """
    from nanochat_lib.preflight.compile_step import environment

    env = os.environ | environment("cpu", devices)
    env["PYTHONPATH"] = os.pathsep.join(os.path.abspath(place) for place in sys.path if place)
    done = subprocess.run(
        [sys.executable, "-c", WRAPPER], input=json.dumps({"program": program, "values": values}), env=env,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.strip()] or ["it said nothing"]
        raise RuntimeError(f"the process with {devices} devices failed: {said[-1]}")
    return json.loads(done.stdout.splitlines()[-1])
