"""Executed chapters, kept by hash: a chapter runs again only when its code, its checks or the library changed.

Text alone does not count: what a cell showed is put into the notebook as it is now, cell by cell.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nanochat_lib.course.execute import blemishes, execute
from nanochat_lib.errors import UserError
from nanochat_lib.progress import Progress

LIMIT = 1800  # seconds a cell
NOT_RUN = ("course/site", "course/grading", "serve")  # folders of the library that no chapter's output comes from


@dataclass(frozen=True)
class Wanted:
    """One notebook to show: chapters/NN.ipynb as a learner opens it, or solutions/NN.ipynb with everything."""

    path: Path
    solved: bool
    fast: bool

    @property
    def prefix(self) -> str:
        kind = "solved" if self.solved else "learner"
        return f"{self.path.stem}.{kind}.{'fast' if self.fast else 'full'}"


def executed(wanted: Iterable[Wanted], keep: Path, reuse: bool = False) -> dict[Wanted, object]:
    """Each notebook with its outputs; what is not kept in the folder `keep` is run, with progress and time left.

    `reuse` takes kept outputs although the library has changed since, as long as the chapter's code is the same.
    UserError naming chapter and cell when a cell fails or shows what a reader should not see.
    """
    import nbformat

    keep.mkdir(parents=True, exist_ok=True)
    found, missing, problems = {}, [], []
    for one in wanted:
        kept = kept_at(one, keep, reuse)
        if kept is None:
            missing.append(one)
        else:
            found[one] = with_outputs(nbformat.read(one.path, 4), nbformat.read(kept, 4))
    if missing:
        with Progress(len(missing), "executing", unit="notebook") as progress:
            for one in missing:
                progress.update(0, now=one.prefix)
                given = run_parameters(one, keep.parent / "runs")
                done = execute(one.path, strict=one.solved, fast=one.fast, limit=LIMIT, given=given)
                if given:
                    hide_folder(done.notebook, Path(given["run_dir"]))
                wrong = failures(one, done)
                problems += wrong
                if not wrong:
                    target = keep / f"{one.prefix}.{fingerprint(one)}.ipynb"
                    for old in keep.glob(f"{one.prefix}.*.ipynb"):
                        old.unlink()
                    nbformat.write(done.notebook, target)
                    found[one] = done.notebook
                progress.update(1, now=f"{one.prefix} took {done.seconds:.0f} s")
    if problems:
        raise UserError("site: " + "".join(f"\n  {line}" for line in problems))
    return found


def run_parameters(one: Wanted, runs: Path) -> dict[str, object]:
    """For a notebook that trains into a run's folder: an empty one of its own, and in fast mode the smallest preset."""
    cells = json.loads(one.path.read_text(encoding="utf-8"))["cells"]
    tagged = "".join("".join(c["source"]) for c in cells if "parameters" in c["metadata"].get("tags", []))
    if not re.search(r"^run_dir\b", tagged, re.MULTILINE):
        return {}
    preset = {"preset": "cpu-smoke"} if one.fast else {}
    folder = runs.resolve() / preset.get("preset", "cpu")
    shutil.rmtree(folder, ignore_errors=True)
    return preset | {"run_dir": str(folder)}


def hide_folder(notebook: object, folder: Path) -> None:
    """In outputs, runs/<name> in the place of the folder that only this machine has."""
    for cell in notebook.cells:
        for out in cell.get("outputs", []):
            for holder, key in [(out, "text")] + [(out.get("data", {}), kind) for kind in out.get("data", {})]:
                if isinstance(holder.get(key), str):
                    holder[key] = holder[key].replace(str(folder), f"runs/{folder.name}")


def failures(one: Wanted, done: object) -> list[str]:
    """Lines about cells that fail, or show what a page must not hold."""
    lines = [f"{one.path.stem}, cell {line}" for line in blemishes(done.notebook)]
    for cell, line in done.errors:
        stub = "exercise" in cell.metadata.get("tags", []) and line.startswith("NotImplementedError")
        if one.solved or not stub:
            lines.append(f"{one.path.stem}, cell {cell.id}: {line.splitlines()[0]}")
    return lines


def kept_at(one: Wanted, keep: Path, reuse: bool) -> Path | None:
    """The kept notebook that fits, or None."""
    exact = keep / f"{one.prefix}.{fingerprint(one)}.ipynb"
    if exact.exists():
        return exact
    code = hashlib.sha256(json.dumps(sources(one.path)).encode()).hexdigest()[:8]
    for path in sorted(keep.glob(f"{one.prefix}.{code}-*.ipynb")) if reuse else []:
        return path
    return None


def fingerprint(one: Wanted) -> str:
    """What the outputs depend on: the notebook's code, then the library with its checks and the course's data."""
    code = hashlib.sha256(json.dumps(sources(one.path)).encode()).hexdigest()[:8]
    return f"{code}-{library(one.path.resolve().parents[1])}"


def sources(path: Path) -> list[str]:
    """The code cells of a notebook."""
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def library(root: Path) -> str:
    """A hash of the library and the data beside it."""
    import nanochat_lib

    found = hashlib.sha256()
    places = {root / "nanochat_lib", Path(nanochat_lib.__file__).parent}
    for folder in [*sorted(places), root / "assets"]:
        for path in sorted(p for p in folder.rglob("*") if p.suffix in (".py", ".json")):
            name = path.relative_to(folder).as_posix()
            if not name.startswith(NOT_RUN):
                found.update(f"{name}\n".encode() + path.read_bytes())
    return found.hexdigest()[:8]


def with_outputs(notebook: object, kept: object) -> object:
    """`notebook` with the outputs of `kept`, whose code cells are the same ones."""
    old = [cell for cell in kept.cells if cell.cell_type == "code"]
    new = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for cell, before in zip(new, old, strict=True):
        cell.outputs, cell.execution_count = before.outputs, before.execution_count
    return notebook
