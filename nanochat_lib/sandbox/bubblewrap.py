"""The level `bubblewrap`: its program makes the namespaces and the tree of files, our process 1 runs inside it."""

from __future__ import annotations

import marshal
import os

from nanochat_lib.sandbox import jail

PACKAGE_INSIDE = "/run/sandbox"  # where this folder of the package is seen inside

# A Python that loads modules of this folder alone: no site-packages, no nanochat_lib/__init__.py.
BOOT = """
import sys, types
for name, path in (("nanochat_lib", []), ("nanochat_lib.sandbox", [sys.argv.pop(1)])):
    module = sys.modules[name] = types.ModuleType(name)
    module.__path__ = path
"""
START_INSIDE = BOOT + "from nanochat_lib.sandbox.bubblewrap import inside\ninside()\n"


def command(spec: dict, report: int) -> list[str]:
    """bubblewrap's own command line up to the program it starts."""
    size = ["--size", str(spec["files_bytes"])] if spec["bwrap_size"] else []
    words = [spec["bwrap"], "--unshare-all", "--unshare-user", "--die-with-parent", "--new-session", "--as-pid-1"]
    words += ["--uid", str(jail.INSIDE_UID), "--gid", str(jail.INSIDE_UID), "--cap-drop", "ALL", "--clearenv"]
    words += [*size, "--tmpfs", "/tmp", "--dev", "/dev", *size, "--tmpfs", "/dev/shm"]
    for source, target in [*spec["view"], (spec["package"], PACKAGE_INSIDE)]:
        words += ["--ro-bind", source, target]
    if spec["scratch"]:
        words += ["--bind", spec["scratch"], spec["scratch"]]
    for link, target in spec["links"]:
        words += ["--symlink", target, link]
    words += ["--proc", "/proc"] if spec["proc"] else ["--dir", "/proc"]
    for path in () if spec["proc"] else jail.PROC_FILES:
        words += ["--ro-bind", path, path]
    words += ["--remount-ro", "/dev", "--remount-ro", "/", "--chdir", "/"]
    inner = {key: spec[key] for key in INNER}
    return [
        *words,
        "--",
        spec["python"],
        "-I",
        "-S",
        "-B",
        "-c",
        START_INSIDE,
        PACKAGE_INSIDE,
        str(report),
        marshal.dumps(inner).hex(),
    ]


INNER = (
    "argv", "cwd", "env", "linux", "strong", "writable", "files_bytes", "processes", "threads", "cpu_seconds",
    "memory_bytes", "big_virtual",
)  # fmt: skip


def become(spec: dict, pipes: tuple[int, int, int], report: int) -> None:
    """Turns this forked process into bubblewrap. What it says itself goes to the program's standard error."""
    for target, source in enumerate(pipes):
        os.dup2(source, target)
    os.set_inheritable(report, True)
    os.execve(spec["bwrap"], command(spec, report), {"PATH": "/usr/bin:/bin"})


def inside() -> None:
    """Runs as process 1 in bubblewrap's namespaces."""
    import sys

    report, spec = int(sys.argv[1]), marshal.loads(bytes.fromhex(sys.argv[2]))
    os.set_inheritable(report, False)
    jail.init(spec, tuple(os.dup(end) for end in range(3)), report)
