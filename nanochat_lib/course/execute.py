"""Runs a chapter's notebook from top to bottom in a fresh kernel, and looks for what a reader should not see in it.

The kernel cannot reach the network, deprecated calls of the notebook are errors, and nothing of the learner's is read
or written. `nanochat course execute` and the tests use it.
"""

from __future__ import annotations

import os
import re
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

from nanochat_lib.course.grammar import ABSOLUTE
from nanochat_lib.course.symbols import PACKAGE
from nanochat_lib.errors import UserError

WIDGET = "application/vnd.jupyter.widget-view+json"
ADDRESS = re.compile(r"\bat 0x[0-9a-f]{6,}|<[\w.]+ object at 0x")
GUARD = "course-guard"  # ids of the two cells that are put in, and taken out again
METER = "course-meter"
GIVEN = "course-given"  # one more, with values for the parameters
GUARD_SOURCE = '''
import sys as _sys, warnings as _warnings
_warnings.filterwarnings("error", category=DeprecationWarning, module="__main__")
def _offline(event, args):
    """Raises when Python code asks for an address that is not this machine's."""
    if event == "socket.connect" and isinstance(args[1], tuple):
        host = args[1][0]
    elif event in ("socket.getaddrinfo", "socket.gethostbyname"):
        host = args[0]
    else:
        return
    host = host.decode() if isinstance(host, bytes) else host
    if host and host != "localhost" and host != "::1" and not host.startswith("127."):
        raise OSError(f"the course runs offline, but something asked for {host}")
_sys.addaudithook(_offline)
'''
# Linux counts ru_maxrss of the process that started the kernel too; VmHWM is the kernel's own.
METER_SOURCE = """\
import re, resource
try:
    print(re.search(r"VmHWM:\\s+(\\d+) kB", open("/proc/self/status").read())[1])
except OSError:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@dataclass
class Execution:
    """An executed notebook: its cells with outputs, what it cost, and the cells that failed."""

    notebook: object
    seconds: float
    peak_gb: float
    errors: list[tuple[object, str]] = field(default_factory=list)  # (cell, "NotImplementedError: …")


def execute(
    path: Path, strict: bool, fast: bool = True, limit: int = 600, home: Path | None = None,
    given: dict[str, object] | None = None,
) -> Execution:  # fmt: skip
    """Runs the notebook at `path`. `strict`: the solved one, whatever fails raises there; `limit`: seconds a cell.

    `home` is the learner's folder (default: an empty one that is gone afterwards); `given` are values for parameters,
    set after the cell tagged parameters.
    """
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, 4)
    new = nbformat.v4.new_code_cell
    more = f"from nanochat_lib.course.rules import add_checks as _add\n_add({str(path.resolve().parents[1])!r})\n"
    for i, cell in enumerate(notebook.cells if given else []):
        if "parameters" in cell.metadata.get("tags", []):
            source = "".join(f"{name} = {value!r}\n" for name, value in given.items())
            notebook.cells.insert(i + 1, new(source, id=GIVEN))
            break
    notebook.cells = [new(GUARD_SOURCE + more, id=GUARD), *notebook.cells, new(METER_SOURCE, id=METER)]
    with tempfile.TemporaryDirectory(prefix="course-") as scratch:
        environment = os.environ | {
            "COURSE_FAST": "1" if fast else "",
            "COURSE_STRICT": "1" if strict else "",
            "COURSE_WIDGETS": "0",
            "COURSE_HOME": str(home or scratch),
            "JUPYTER_PREFER_ENV_PATH": "1",
            "PYTHONHASHSEED": "random",  # a set in an output shows
        }
        environment.setdefault("JAX_PLATFORMS", "cpu")
        paths = [str(PACKAGE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]  # the kernel's library is this one
        environment["PYTHONPATH"] = os.pathsep.join(paths)
        environment.pop("MPLBACKEND", None)
        client = NotebookClient(
            notebook, timeout=limit, kernel_name="python3", allow_errors=True,
            extra_arguments=["--log-level=ERROR"],  # no warning about loopback TCP
            resources={"metadata": {"path": str(path.parent)}},
        )  # fmt: skip
        began = time.monotonic()
        client.execute(env=environment)
        seconds = time.monotonic() - began
    meter = notebook.cells.pop().outputs
    guard = notebook.cells.pop(0)
    if guard.outputs:
        raise UserError(f"{path.name}: the kernel did not start as it should: {guard.outputs[0]}")
    notebook.cells = [cell for cell in notebook.cells if cell.id != GIVEN]
    peak = int(meter[0].text) * (1 if os.uname().sysname == "Darwin" else 1024) / 1e9 if meter else 0.0
    done = Execution(notebook, seconds, peak)
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            if output.output_type == "error":
                done.errors.append((cell, f"{output.ename}: {output.evalue}"))
    return done


def blemishes(notebook: object) -> list[str]:
    """Lines about outputs that must not be there: dead widgets, machine paths, memory addresses, bare figures."""
    found = []
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {})
            if WIDGET in data:
                found.append(f"{cell.id}: a widget, which is dead when the notebook is opened again")
            if "image/png" in data and not output.metadata.get("image/png", {}).get("alt", "").strip():
                found.append(f'{cell.id}: a figure without words for it; use show(figure, alt="…")')
            if output.output_type == "error":
                continue
            text = "\n".join(text_of(output))
            if match := ABSOLUTE.search(text):
                found.append(f"{cell.id}: a path of one machine: {text[match.start() :][:60]!r}")
            if match := ADDRESS.search(text):
                found.append(f"{cell.id}: a memory address: {text[max(match.start() - 20, 0) :][:60]!r}")
            if output.get("name") == "stderr" and output.text.strip():
                found.append(f"{cell.id}: a message on stderr: {output.text.strip()[:200]!r}")
    return found


def text_of(output: object) -> list[str]:
    """The texts of one output."""
    if output.output_type == "stream":
        return [output.text]
    return [str(text) for kind, text in output.get("data", {}).items() if kind.startswith("text/")]


def lasting(notebook: object) -> list[tuple[str, str]]:
    """(cell, text) of every output that a second run must repeat: plain text that is not marked as volatile."""
    found = []
    for cell in notebook.cells:
        text = []
        for output in cell.get("outputs", []):
            if output.output_type == "stream":
                text.append(output.text)
            elif not output.get("metadata", {}).get("course", {}).get("volatile"):
                text.append(str(output.get("data", {}).get("text/plain", "")))
        found.append((cell.id, "".join(text)))
    return found


def print_execution(path: Path, strict: bool, fast: bool, save: Path | None) -> int:
    """Runs a notebook and says what it cost and what is wrong with it; 0 when nothing is."""
    import nbformat

    done = execute(path, strict, fast)
    figures = sum("image/png" in o.get("data", {}) for c in done.notebook.cells for o in c.get("outputs", []))
    print(f"{path.name}: {done.seconds:.1f} s, at most {done.peak_gb:.2f} GB, {figures} figures")
    problems = blemishes(done.notebook)
    for cell, line in done.errors:
        exercise = "exercise" in cell.metadata.get("tags", [])
        if strict or not (exercise and line.startswith("NotImplementedError")):
            problems.append(f"{cell.id}: {line}")
    if save:
        nbformat.write(done.notebook, save)
    for problem in problems:
        print(problem)
    return 1 if problems else 0
