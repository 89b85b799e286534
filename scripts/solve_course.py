"""The whole course as a learner who gets everything right: every exercise solved, then the pipeline run with all of it.

    python scripts/solve_course.py SOLVED                     # a new folder; about seven minutes on two cores
    python scripts/solve_course.py SOLVED --chapters 01 05    # only these chapters
    python scripts/solve_course.py SOLVED --no-run            # the checks alone

Into SOLVED go the learners' notebooks with the answers of solutions/ in their exercise cells, the progress and the
functions that come of `nanochat course check` for each of them, and two runs of the pipeline with the same seed, one
with `--mine all`. Ends with 1 when an exercise is not solved, when a function is not taken, or when the runs differ in
a number. Started again, it does what is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

from nanochat_lib import presets
from nanochat_lib.cli import settings
from nanochat_lib.course import grammar, state
from nanochat_lib.course.build import sources
from nanochat_lib.course.exercises import units
from nanochat_lib.errors import UserError

ROOT = Path(__file__).resolve().parents[1]
MARK = ".solved-course"
TIMES = ("time", "seconds", "per_s", "mfu", "memory", "usd")  # in the names of figures that no two runs share


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="SOLVED", help="the folder to make")
    parser.add_argument("--chapters", nargs="+", metavar="NN", help="only these (default: all that have exercises)")
    parser.add_argument("--no-run", action="store_true", help="solve the exercises, run no pipeline")
    parser.add_argument("--preset", default="cpu-smoke", help="of both runs (default: %(default)s)")
    parser.add_argument("-s", "--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of both runs")
    args = parser.parse_args()
    presets.override(presets.preset(args.preset), settings(args.set))  # what is wrong with them is said now
    folder = args.folder.resolve()
    found = {stem: cells for stem, cells in sources(ROOT).items() if units(cells)}
    chosen = {stem: c for stem, c in found.items() if not args.chapters or stem[:2] in args.chapters}
    if missing := sorted(set(args.chapters or []) - {stem[:2] for stem in found}):
        print(f"no chapter {missing[0]} with exercises; there are {', '.join(stem[:2] for stem in found)}")
        return 2
    take(folder)
    problems = solve(folder, chosen)
    if not problems and not args.no_run:
        problems = run_both(folder, args.preset, args.set, all_of=len(chosen) == len(found))
    for problem in problems:
        print(problem)
    return 1 if problems else 0


def take(folder: Path) -> None:
    """Makes the folder, or goes on in one that this script has made; the course's own files are never written over."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name a new folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).exists():
        raise UserError(f"{folder} is not empty and not of this script; name a new folder")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MARK).touch()
    os.environ["COURSE_HOME"] = str(folder)  # where `state` reads, and the commands write


def solve(folder: Path, chapters: dict[str, list]) -> list[str]:
    """Fills in and checks one notebook after the other; the lines of what went wrong."""
    count, points, began = 0, 0, time.monotonic()
    for number, (stem, cells) in enumerate(chapters.items(), 1):
        path = fill_in(folder, stem, cells)
        wanted = [unit.id for unit in units(cells)]
        if not set(wanted) <= passed():
            done = nanochat("course", "check", stem, "--file", str(path))
            if unsolved := [name for name in wanted if name not in passed()]:
                return [f"{stem}: {', '.join(unsolved)} not solved", done.stdout, done.stderr]
        count += len(wanted)
        points += sum(unit.cell.metadata.get("points", 1) for unit in units(cells))
        print(f"{number}/{len(chapters)} {stem}: {len(wanted)} solved, {time.monotonic() - began:.0f} s", flush=True)
    print(f"{count} exercises, {points} points")
    return []


def fill_in(folder: Path, stem: str, cells: list) -> Path:
    """The learner's notebook with the answers in its exercise cells."""
    notebook = json.loads((ROOT / "chapters" / f"{stem}.ipynb").read_text(encoding="utf-8"))
    answers = {unit.id: grammar.solution(unit.cell).source for unit in units(cells)}
    for cell in notebook["cells"]:
        if (name := cell["metadata"].get("id")) in answers:
            cell["source"] = answers.pop(name).splitlines(keepends=True)
    if answers:
        raise UserError(f"chapters/{stem}.ipynb has no cell for {', '.join(answers)}; run nanochat course build")
    path = folder / "chapters" / f"{stem}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(notebook, indent=1), encoding="utf-8")
    return path


def passed() -> set[str]:
    return {name for name, record in state.read()["exercises"].items() if record.get("passed")}


def run_both(folder: Path, preset: str, changes: list[str], all_of: bool) -> list[str]:
    """The pipeline with the library's functions and with those in `folder`; the lines of what differs."""
    words = ["--preset", preset, *(word for change in changes for word in ("-s", change))]
    for name, more in (("library", []), ("mine", ["--mine", "all"])):
        print(f"{preset} with {name} functions", flush=True)
        done = nanochat("run", *words, "--run-dir", str(folder / "runs" / name), *more)
        if done.returncode:
            return [f"the run with {name} functions ended with {done.returncode}", done.stdout, done.stderr]
    used = json.loads((folder / "runs/mine/mine.json").read_text(encoding="utf-8"))
    print(f"{len(used['used'])} of {used['functions']} functions of the pipeline are those of the exercises")
    problems = [f"{name}: not used, {why}" for name, why in used["refused"].items() if all_of]
    both = [figures(folder / "runs" / name) for name in ("library", "mine")]
    names = sorted(set(both[0]) | set(both[1]))
    differing = [name for name in names if both[0].get(name) != both[1].get(name)]
    print(f"{len(names) - len(differing)} of {len(names)} figures of the runs are equal")
    return problems + [f"{name}: {both[0].get(name)} and {both[1].get(name)}" for name in differing[:20]]


def figures(run: Path) -> dict[str, object]:
    """Every figure of a run that does not depend on the machine's mood: "metrics.jsonl:3:loss" -> its value."""
    report = json.loads((run / "report.json").read_text(encoding="utf-8"))
    found = dict(flat("report.json", {name: report[name] for name in ("stages", "samples")}))
    for number, line in enumerate((run / "metrics.jsonl").read_text(encoding="utf-8").splitlines(), 1):
        found |= flat(f"metrics.jsonl:{number}", json.loads(line))
    return {name: value for name, value in found.items() if not any(t in name.rsplit(":", 1)[1] for t in TIMES)}


def flat(name: str, value: object) -> list[tuple[str, object]]:
    if isinstance(value, dict):
        return [pair for key, item in value.items() for pair in flat(f"{name}:{key}", item)]
    if isinstance(value, list):
        return [pair for key, item in enumerate(value) for pair in flat(f"{name}:{key}", item)]
    return [(name, value)]


def nanochat(*words: str) -> subprocess.CompletedProcess:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "COURSE_WIDGETS": "0"}
    command = [sys.executable, "-m", "nanochat_lib", *words]
    return subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, check=False)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except UserError as error:
        sys.exit(f"{error}")
