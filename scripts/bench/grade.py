"""Submissions a second, start-up and memory of grading; beside nbgrader on the same submissions where it is installed.

Run it in the project's folder. A class is made of right answers and of the kept wrong ones, no two papers the same.
After each chapter it says how cost and memory grow from the smallest class to the largest, and a child's own memory.
With --nbgrader the same notebooks go through `nbgrader autograde`; its programs must be on the PATH, as they are with
the extra nbgrader. Example:

    python scripts/bench/grade.py --chapters 00 05 --learners 10 100 --jobs 1 2 --nbgrader 3
    python scripts/bench/grade.py --chapters 05 --learners 20 200 --cache /tmp/bench
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import replace
from pathlib import Path

from nanochat_lib.course.build import notebook
from nanochat_lib.course.grading import for_nbgrader, grade
from nanochat_lib.course.grading.key import Key
from nanochat_lib.course.grading.submissions import collect
from nanochat_lib.course.grammar import solution
from nanochat_lib.sandbox.processes import family


def memory_mb(process: int | str = "self") -> float:
    """Resident memory of a process; not a number where /proc does not tell."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmRSS")) / 1000
    except (OSError, StopIteration):
        return float("nan")


PEAKS = 5  # submissions after the timing in which the children's memory is watched


class Peak(threading.Thread):
    """Watches the processes below another and keeps the most memory that one of them had of its own, in MB.

    A forked child shares what it has not written to with the server; that is not counted again.
    """

    def __init__(self, process: int, server: int) -> None:
        super().__init__(daemon=True)
        self.process, self.server, self.most, self.over = process, server, 0.0, threading.Event()

    def run(self) -> None:
        while not self.over.wait(0.05):
            for one in family(self.process):
                if one != self.server:
                    self.most = max(self.most, own_mb(one))

    def __enter__(self) -> Peak:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.over.set()
        self.join()


def own_mb(process: int) -> float:
    """Memory that no other process shares; 0 where it has ended."""
    try:
        lines = Path(f"/proc/{process}/smaps_rollup").read_text().splitlines()
        return sum(int(line.split()[1]) for line in lines if line.startswith("Private_")) / 1000
    except (OSError, ValueError):
        return 0.0


def server_of(process: int) -> int:
    """The fork server itself, bubblewrap's own processes may be above it: the largest while there is no child."""
    return max([process, *family(process)], key=memory_mb)


def cpu_seconds(process: int) -> float:
    """Processor time of this process and of those below another, dead ones too; not a number where /proc is missing."""
    used = time.process_time()
    try:
        for one in [process, *family(process)]:
            words = Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()
            used += sum(map(int, words[11:15])) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError):
        return float("nan")
    return used


def growth(found: list[tuple[int, float, float, float, float]]) -> str:
    """From the smallest class to the largest: (submissions, s each, s of processor each, MB of grader, of server)."""
    (few, clock, used, grader, server), (many, *after) = found[0], found[-1]
    cost = f"clock ×{after[0] / clock:.2f}, processor ×{after[1] / used:.2f}"
    return f"from {few} to {many}: {cost}, grader {after[2] - grader:+.0f} MB, server {after[3] - server:+.0f} MB"


def papers(one: Key, count: int, folder: Path, seed: int = 0) -> None:
    """A notebook a learner: each exercise right, or wrong in one of the kept ways."""
    rng = random.Random(seed)
    for i in range(count):
        cells = []
        for cell in one.right.cells:
            if "hidden" in cell.tags:
                continue
            if "exercise" in cell.tags:
                mutants = one.right.notes[cell.metadata["id"]].mutants
                wrong = rng.random() < 0.25 and mutants
                cell = replace(cell, source=rng.choice(mutants).source(cell)) if wrong else solution(cell)
                cell = replace(cell, source=f"{cell.source}\n# learner {i}")
            cells.append(cell)
        path = folder / f"learner{i:03d}" / f"{one.stem}.ipynb"
        path.parent.mkdir(parents=True)
        path.write_text(notebook(cells, one.stem), encoding="utf-8")


def by_nbgrader(root: Path, one: Key, folder: Path, count: int) -> float:
    """Seconds a submission of `nbgrader autograde` on the first `count` of the same notebooks."""
    for_nbgrader.export(root, folder, one.number)
    env = os.environ | {
        "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")]),
        "COURSE_FAST": "1",
    }
    env["COURSE_HOME"] = str(folder / "home")

    def run(*words: str) -> None:
        command = [sys.executable, "-m", "nbgrader", *words]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"nbgrader {words[0]} failed:\n{done.stderr[-2000:]}")

    run("generate_assignment", one.stem, "--force")
    released = json.loads((folder / "release" / one.stem / f"{one.stem}.ipynb").read_text())
    for learner in sorted((folder.parent / f"{one.stem}-in").iterdir())[:count]:
        theirs = json.loads((learner / f"{one.stem}.ipynb").read_text())
        answers = {cell["metadata"].get("id"): cell["source"] for cell in theirs["cells"]}
        for cell in released["cells"]:
            if cell["metadata"].get("nbgrader", {}).get("solution"):
                cell["source"] = answers[cell["metadata"]["id"]]
        path = folder / "submitted" / learner.name / one.stem / f"{one.stem}.ipynb"
        path.parent.mkdir(parents=True)
        path.write_text(json.dumps(released))
    began = time.monotonic()
    run("autograde", one.stem, "--create")
    return (time.monotonic() - began) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chapters", nargs="+", default=["00", "05"], help="plain ones and JAX ones (default: 00 05)")
    parser.add_argument("--learners", nargs="+", type=int, default=[10, 40], help="sizes of the class (default: 10 40)")
    parser.add_argument("--jobs", nargs="+", type=int, default=[os.cpu_count() or 1], help="one after the other")
    parser.add_argument("--cache", type=Path, metavar="DIR", help="keep compiled programs there for the next run")
    parser.add_argument("--nbgrader", type=int, default=0, metavar="N", help="N of the same by nbgrader, too")
    args = parser.parse_args()
    root = Path(".").resolve()
    with tempfile.TemporaryDirectory(prefix="bench-grade-") as scratch:
        place = Path(scratch)
        os.environ["COURSE_HOME"], cache = str(place / "home"), args.cache or place / "cache"
        for chapter in args.chapters:
            quiet = lambda words: None  # noqa: E731
            with grade.open_desk(root, cache, chapter, say=quiet) as desk:
                for stem in desk.keys:  # the first time on a machine: right answers tried, everything compiled
                    desk.limits_of(stem)
            began = time.monotonic()
            with grade.open_desk(root, cache, chapter, say=quiet) as desk:
                (one,) = desk.keys.values()
                took = time.monotonic() - began
                print(f"{one.stem}: start-up {took:.1f} s, isolation {desk.server.level}")
                folder = place / f"{one.stem}-in"
                papers(one, max(args.learners), folder)
                every = list(grade.tasks(collect(folder), desk, None))
                list(grade.graded(every[:1], desk, 1))  # the grader's own right results are made
                server = server_of(desk.server.process.pid)
                for jobs in args.jobs:
                    found = []
                    for count in sorted(args.learners):
                        began, used = time.monotonic(), cpu_seconds(desk.server.process.pid)
                        failed = [r for _, r in grade.graded(every[:count], desk, jobs) if isinstance(r, Exception)]
                        each = (time.monotonic() - began) / count
                        time.sleep(0.2)  # the last children's ends are counted, too
                        used = (cpu_seconds(desk.server.process.pid) - used) / count
                        assert not failed, failed[0]
                        found.append((count, each, used, memory_mb(), memory_mb(server)))
                        speed = f"{each:.3f} s each, {1 / each:.1f} a second, {used:.3f} s of processor each"
                        memory = f"grader {found[-1][3]:.0f} MB, server {found[-1][4]:.0f} MB"
                        load = f"load {os.getloadavg()[0]:.1f}"
                        print(f"  {count:>4} submissions, {jobs} at a time: {speed}; {memory}; {load}", flush=True)
                    print(f"  {growth(found)}", flush=True)
                with Peak(desk.server.process.pid, server) as peak:  # not while the clock runs
                    list(grade.graded(every[:PEAKS], desk, 1))
                print(f"  a child has at most {peak.most:.0f} MB of its own ({PEAKS} submissions)", flush=True)
            if args.nbgrader:
                theirs = by_nbgrader(root, one, place / f"{one.stem}-nb", args.nbgrader)
                print(f"  nbgrader: {theirs:.1f} s each, {theirs / each:.0f} times as long", flush=True)


if __name__ == "__main__":
    main()
