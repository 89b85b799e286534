"""Tests the project with the newest versions of everything it depends on, whatever pyproject.toml allows.

Works in a fresh copy of the last commit, takes the upper bounds out of its pyproject.toml (torch stays: each newer one
is a download of gigabytes), sets it up, passes the tests and writes a report: which versions differ from
scripts/versions.txt, and what failed. The exit status is that of the tests. Made for a machine that starts it every
week (.github/workflows/newest.yml); nothing in this folder changes unless --lock is given.

    python scripts/newest.py                            set up, test, write newest.md
    python scripts/newest.py --report out/new.md        write the report there
    python scripts/newest.py --only tests/test_cli.py   only these tests
    python scripts/newest.py --lock                     write the versions of .venv into scripts/versions.txt
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LOCK = Path("scripts") / "versions.txt"
WHERE = "python_version == '3.11' and sys_platform == 'linux'"
HEADER = """\
# The versions that the tests last passed with. scripts/setup.sh installs these on the system they were tried on;
# elsewhere, with the extras nbgrader and cloud or with NANOCHAT_NEWEST=1 the newest that pyproject.toml allows.
# Written by `python scripts/newest.py --lock`; `python scripts/newest.py` tries newer ones.
"""
KEPT = ("torch",)  # pinned in pyproject.toml, and named differently by each of its builds


def loosened(project: str) -> str:
    """pyproject.toml without upper bounds: `"jax>=0.10.2,<0.12"` becomes `"jax>=0.10.2"`."""
    return re.sub(r'("[\w\-\[\]]+>=[\w.]+),<[\w.]+"', r'\1"', project)


def versions(python: Path) -> dict[str, str]:
    """Installed versions by lower-case name, the project itself left out."""
    command = [python, "-m", "pip", "freeze", "--exclude-editable"]
    lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
    return {name: version for name, version in parsed(lines).items() if name not in KEPT}


def parsed(lines: list[str]) -> dict[str, str]:
    """{name: version} of the lines `name==version`, with or without a condition behind them."""
    pairs = (re.match(r"([\w.\-]+)==([^\s;]+)", line) for line in lines)
    return {pair[1].lower().replace("_", "-"): pair[2] for pair in pairs if pair}


def differences(known: dict[str, str], found: dict[str, str]) -> list[str]:
    """A table's rows, a package each: what differs."""
    names = sorted(known.keys() | found.keys())
    return [
        f"| {name} | {known.get(name, 'none')} | {found.get(name, 'none')} |"
        for name in names
        if known.get(name) != found.get(name)
    ]


def report(known: dict[str, str], found: dict[str, str], output: str, status: int) -> str:
    """The report in Markdown."""
    failed = [line for line in output.splitlines() if line.startswith(("FAILED ", "ERROR "))]
    last = next((line for line in reversed(output.splitlines()) if line.strip()), "the tests printed nothing")
    title = "The tests pass with the newest versions" if status == 0 else "The newest versions break something"
    rows = differences(known, found)
    lines = [f"# {title}", "", last.strip("= "), ""]
    lines += [*(f"- `{line}`" for line in failed), ""] if failed else []
    lines += (
        ["| package | scripts/versions.txt | newest |", "|---|---|---|", *rows] if rows else ["No version differs."]
    )
    return "\n".join(lines) + "\n"


def try_newest(work: Path, only: list[str]) -> tuple[dict[str, str], str, int]:
    """(installed versions, the tests' output, their exit status), in a copy of the last commit in `work`."""
    if subprocess.run(["git", "clone", "--quiet", ROOT, work]).returncode:
        raise SystemExit(f"newest: {ROOT} cannot be cloned with git; run this in a clone of the project")
    project = work / "pyproject.toml"
    project.write_text(loosened(project.read_text(encoding="utf-8")), encoding="utf-8")
    command = ["bash", "scripts/test.sh", *only]
    done = subprocess.Popen(
        command, cwd=work, env=os.environ | {"NANOCHAT_NEWEST": "1"}, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip
    lines = []
    for line in done.stdout:
        print(line, end="", flush=True)
        lines.append(line)
    status, python = done.wait(), work / ".venv/bin/python"
    return versions(python) if python.exists() else {}, "".join(lines), status


def main(words: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__.splitlines()[0],
        epilog=__doc__.split("\n\n", 2)[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--report", type=Path, default=Path("newest.md"), help="where to write (default newest.md)")
    parser.add_argument("--only", nargs="+", default=[], metavar="TEST", help="these tests instead of all")
    parser.add_argument("--lock", action="store_true", help="take over the versions of .venv; tests nothing")
    args = parser.parse_args(words)
    if args.lock:
        python = ROOT / ".venv/bin/python"
        if not python.exists():
            parser.error("--lock reads .venv, which is not there; run bash scripts/test.sh first")
        lines = [f"{name}=={version} ; {WHERE}" for name, version in sorted(versions(python).items())]
        (ROOT / LOCK).write_text(HEADER + "\n".join(lines) + "\n", encoding="utf-8")
        print(f"{LOCK}: {len(lines)} packages")
        return 0
    try:  # before the tests, which take long
        args.report.parent.mkdir(parents=True, exist_ok=True)
        args.report.touch()
    except OSError as error:
        parser.error(f"--report {args.report} cannot be written ({error.strerror}); name another file")
    with tempfile.TemporaryDirectory() as folder:
        found, output, status = try_newest(Path(folder) / "nanochat", args.only)
    known = parsed((ROOT / LOCK).read_text(encoding="utf-8").splitlines())
    args.report.write_text(report(known, found, output, status), encoding="utf-8")
    print(args.report)
    return status


if __name__ == "__main__":
    sys.exit(main())
