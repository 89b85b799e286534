"""`nanochat grade run`: from a folder of submissions to rows in the gradebook.

The right answers go through the very same way first: that proves the set-up, fills the cache of compiled programs, and
says how long each case may take. What is in the gradebook already is not run again, so that a stopped batch goes on.
"""

from __future__ import annotations

import builtins
import contextlib
import ctypes
import gc
import hashlib
import json
import sys
import time
from collections.abc import Callable, Iterator, Sized
from dataclasses import dataclass, field
from pathlib import Path

from nanochat_lib import __version__
from nanochat_lib.compile_cache import keep_compiled
from nanochat_lib.course import rules
from nanochat_lib.course.grading import confine, key, pool, programs
from nanochat_lib.course.grading.answers import Answers, gather
from nanochat_lib.course.grading.batch import run_all
from nanochat_lib.course.grading.borrowed import borrowed
from nanochat_lib.course.grading.gradebook import Gradebook, Result
from nanochat_lib.course.grading.judge import Judged
from nanochat_lib.course.grading.key import ENGINE, GROUPS, Key
from nanochat_lib.course.grading.notebooks import Paper, papers
from nanochat_lib.course.grading.session import Session
from nanochat_lib.course.grading.submissions import Submission, collect
from nanochat_lib.course.grammar import solution
from nanochat_lib.course.learner import LearnerCell
from nanochat_lib.course.result import FAILED, NOT_ATTEMPTED, PASSED, Row
from nanochat_lib.errors import UserError

WORDS = 400  # characters of one remark or description that are kept
TIDY = 40  # compiled programs of wrong answers, up to 1 MB each, after which the grader lets go of all
Say = Callable[[str], None]
Limits = dict[tuple[str, str], float]  # (exercise, case) -> seconds that the right answer took
KINDS = {
    "none": "nothing (None) was returned", "type": "another type", "length": "another length", "keys": "other keys",
    "shape": "another shape", "dtype": "another dtype", "nan": "not a number (NaN)", "value": "other values",
}  # fmt: skip


@dataclass
class Desk:
    """What a run of grading needs: keys, a server, and what the right answers take."""

    keys: dict[str, Key]
    server: pool.Server
    prove: Callable[[Key], Limits]
    limits: dict[str, Limits] = field(default_factory=dict)  # by chapter, of those that were asked for
    salt: str = ""

    @property
    def salted(self) -> str:
        return hashlib.sha256(f"salt\n{self.salt}".encode()).hexdigest()[:8] if self.salt else ""

    def limits_of(self, stem: str) -> Limits:
        """Of a chapter whose right answers get full marks; UserError where they do not."""
        if stem not in self.limits:
            self.limits[stem] = self.prove(self.keys[stem])
        return self.limits[stem]

    def close(self) -> None:
        self.server.close()

    def __enter__(self) -> Desk:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def open_desk(
    root: Path, cache: Path, chapter: str = "", require: str = "limits", salt: str = "", say: Say = print,
    only: str = "",
) -> Desk:  # fmt: skip
    """Keys and a server at the strongest level. A chapter's right answers are tried there before anybody is graded.

    `cache`: a folder of this machine's for compiled programs and times. `only`: at this level, neither stronger nor
    weaker.
    """
    keep_compiled()  # of suspected causes; children have programs of their own, which they cannot write
    keys = {one.stem: one for one in key.keys(root, chapter)}
    folder = (root / rules.CHECKS).resolve()
    checks = "" if folder == confine.PACKAGE / "course" / "checks" else str(folder)
    cache.mkdir(parents=True, exist_ok=True)
    compiled = (cache / "compiled").resolve()
    (compiled / "programs").mkdir(parents=True, exist_ok=True)
    modules = key.modules(list(keys.values()))
    server = pool.start(modules, require, only, compiled=compiled, checks=checks)
    return Desk(keys, server, lambda one: _proven(one, server, cache, compiled, checks, say), salt=salt)


def _proven(one: Key, server: pool.Server, cache: Path, compiled: Path, checks: str, say: Say) -> Limits:
    """Seconds that each case of the right answers took when nothing was compiled yet. UserError when one fails."""
    path = cache / f"{one.stem}-{one.bundle}-{server.level}-{programs.machine()[:8]}.json"
    try:
        return {(id, case): seconds for id, case, seconds in json.loads(path.read_text(encoding="utf-8"))}
    except (OSError, ValueError, TypeError):
        pass
    say(f"{one.stem}: trying the right answers first")
    with pool.Server("limits", server.modules, compiled, checks, writes=True) as writing:
        found = _right(one, writing)
    seconds = {(judged.id, case): took for judged in found for case, took in judged.seconds.items()}
    for judged in _right(one, server, seconds):
        if not judged.passed:
            row = next(row for row in judged.rows if row.status != PASSED)
            why = row.cause or row.where or row.status
            raise UserError(
                f"the right answer to {judged.id} fails {row.case!r} in the grader ({why}); nobody was graded"
            )
    path.write_text(json.dumps([[id, case, took] for (id, case), took in seconds.items()]), encoding="utf-8")
    return seconds


def _right(one: Key, server: pool.Server, limits: dict | None = None) -> list[Judged]:
    cells = [
        LearnerCell(number, cell.kind, solution(cell).source, (str(cell.metadata.get("id", "")),), tuple(cell.tags))
        for number, cell in enumerate(one.right.cells, 1)
        if "hidden" not in cell.tags
    ]
    answers = gather(cells, one.wanted, one.known)
    ((_, found),) = run_all([("", Session(server, one, answers, 0, limits or {}))], 1)
    if isinstance(found, Exception):
        raise found
    return found


# ---- submissions


@dataclass
class Task:
    """One paper that is to be graded."""

    paper: Paper
    answers: Answers
    submission: str  # hash
    remarks: list[str]


def learners(where: Path, shard: str = "") -> list[Submission]:
    """The submissions, or those of one shard "2/5": by the learner's name, so late ones fall to the same shard."""
    found = collect(where)
    if not shard:
        return found
    part, count = shard_of(shard)
    return [s for s in found if int(hashlib.sha256(s.learner.encode()).hexdigest(), 16) % count == part - 1]


def shard_of(text: str) -> tuple[int, int]:
    part, slash, count = text.partition("/")
    if not slash or not part.isdigit() or not count.isdigit() or not 1 <= int(part) <= int(count):
        raise UserError(f"--shard is i/n with i from 1 to n, as in 2/5; got {text!r}")
    return int(part), int(count)


def tasks(submissions: list[Submission], desk: Desk, book: Gradebook | None) -> Iterator[Task]:
    """Papers with their answers, learner by learner; what cannot be read becomes a line in the gradebook."""
    for submission in submissions:
        try:
            found, remarks = papers(submission, list(desk.keys.values()))
        except Exception as error:  # one strange file must not stop the batch
            found, remarks = [], [f"could not be read ({type(error).__name__}: {str(error)[:100]})"]
        if book is not None:
            book.know(submission.learner, "seen", "1")
            for kind, value in submission.ids.items():
                book.know(submission.learner, kind, value)
            if remarks and not found:
                book.know(submission.learner, "problem", "; ".join(remarks)[:WORDS])
        for paper in found:
            one = desk.keys[paper.stem]
            answers = gather(paper.cells, one.wanted, one.known)
            late = ["the download marks it as late"] if submission.late else []
            more = [*paper.remarks, *answers.remarks, *remarks, *late]
            refuse_borrowed(answers, one)
            yield Task(paper, answers, paper_hash(paper), [line[:WORDS] for line in more])


def refuse_borrowed(answers: Answers, one: Key) -> None:
    """Answers that call the library's own give nothing to run."""
    chapter = [source for source, _, _ in one.steps if source]
    for id, answer in answers.found.items():
        library = one.questions[id].unit.library
        if library and not answer.problem:
            texts = [*chapter, *(source for source, _ in answer.pieces)]
            if name := borrowed("\n".join(source for source, _ in answer.pieces), texts, library):
                answer.problem = f"it uses the library's own {name}, which is what the exercise asks for"


def paper_hash(paper: Paper) -> str:
    """Of what counts in a paper: its cells without outputs."""
    cells = [[cell.kind, cell.source, list(cell.ids), list(cell.tags)] for cell in paper.cells]
    return hashlib.sha256(json.dumps(cells).encode("utf-8", "surrogatepass")).hexdigest()[:32]


def graded(tasks: list[Task], desk: Desk, jobs: int) -> Iterator[tuple[Task, Result | Exception]]:
    """Grades papers, `jobs` at a time, and gives each as soon as it is done."""

    def sessions() -> Iterator[tuple[Task, Session]]:
        for task in tasks:
            one = desk.keys[task.paper.stem]
            seed = key.seed_of(desk.salt, task.paper.learner)
            yield task, Session(desk.server, one, task.answers, seed, desk.limits_of(one.stem))

    for stem in sorted({task.paper.stem for task in tasks}):
        desk.limits_of(stem)
    floor = programs.alive()
    for task, found in run_all(sessions(), jobs):
        yield task, found if isinstance(found, Exception) else result(task, found, desk)
        if programs.alive() >= floor + TIDY:
            tidy()
            floor = programs.alive()


def tidy() -> None:
    """Judging wrong results compiles programs that nobody needs again; over a class they would add up.

    glibc keeps what is freed between other things, a hundred MB of it here, until it is asked.
    """
    if jax := sys.modules.get("jax"):
        jax.clear_caches()
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def result(task: Task, judged: list[Judged], desk: Desk) -> Result:
    one = desk.keys[task.paper.stem]
    exercises = {}
    for item in judged:
        question = one.questions[item.id]
        groups = {name: [0, 0] for name in GROUPS}
        rows = []
        for row, case in zip(item.rows, question.cases, strict=True):
            group = question.group(case)
            groups[group][1] += 1
            groups[group][0] += row.status == PASSED
            rows.append(_row(row, group, case.name in question.hidden, {c.words for c in question.exercise.causes}))
        status = _status(item)
        exercises[item.id] = {
            "status": status, "most": question.points, "groups": groups, "rows": rows,
            "remarks": [line[:WORDS] for line in item.remarks], "seconds": round(sum(item.seconds.values()), 3),
        }  # fmt: skip
    engine = f"{__version__}, engine {ENGINE}"
    return Result(
        task.paper.learner, task.paper.stem, task.submission, one.bundle, desk.salted, task.paper.path[:WORDS],
        task.paper.modified, time.time(), desk.server.level, engine, exercises, task.remarks,
    )  # fmt: skip


def _status(item: Judged) -> str:
    if not item.handed_in:
        return "not handed in"
    if item.passed:
        return PASSED
    return NOT_ATTEMPTED if any(row.status == NOT_ATTEMPTED for row in item.rows) else FAILED


def _row(row: Row, group: str, hidden: bool, named: set[str]) -> dict:
    """A row as the gradebook keeps it: everything, for the instructor, and `told`, all that a learner may read of it.

    Of a hidden case that is no value: its kind of difference, and a cause in fixed words, without any number.
    """
    found = {"case": row.case, "kind": row.kind, "group": group, "hidden": hidden, "status": row.status}
    if row.status == FAILED:
        difference = row.difference.kind if row.difference else ""
        more = {"difference": difference, "cause": row.cause, "where": row.where, "expected": row.expected}
        more |= {"got": row.got, "called": row.called, "step": row.step}
        found |= {name: text[:WORDS] for name, text in more.items() if text}
        fixed = row.cause in named or not any(c.isdigit() for c in row.cause)
        found["told"] = [_kind(row), row.cause[:WORDS] if fixed or not hidden else ""]
    return found


def _kind(row: Row) -> str:
    """What is wrong in kind, without a value: what feedback says of a hidden case."""
    if row.difference:
        return KINDS.get(row.difference.kind, "another value")
    raised = row.got.split(":")[0].strip()
    if isinstance(vars(builtins).get(raised), type) and raised.endswith(("Error", "Exception", "Exit", "Interrupt")):
        return f"it raised {raised}"
    return ""


def run(
    where: Path, book_path: Path, root: Path = Path("."), chapter: str = "", jobs: int = 1, require: str = "limits",
    salt: str = "", shard: str = "", say: Say = print,
) -> int:  # fmt: skip
    """Grades everything below `where` that the gradebook does not have yet; 0 when all of it was graded."""
    submissions = learners(where, shard)
    if not submissions and shard and learners(where):  # a small class in many parts
        Gradebook(book_path).close()  # to be merged like the others
        say(f"no learner of this class falls to part {shard}; {book_path} stays without results")
        return 0
    if not submissions:
        raise UserError(f"{where} holds no submissions; it should hold a folder, notebook or zip for each learner")
    cache = book_path.with_suffix(".cache")
    with Gradebook(book_path) as book, open_desk(root, cache, chapter, require, salt, say) as desk:
        waiting, kept, nothing = [], 0, {s.learner for s in submissions}
        for task in tasks(submissions, desk, book):
            nothing.discard(task.paper.learner)
            one = desk.keys[task.paper.stem]
            if book.has(task.paper.learner, one.stem, task.submission, one.bundle, desk.salted):
                kept += 1
            else:
                waiting.append(task)
        counts = f"{_count(submissions, 'learner')}, {_count(waiting, 'paper')} to grade, {kept} unchanged"
        say(f"{counts}; isolation {desk.server.level}")
        for learner in sorted(nothing):
            say(f"{learner}: nothing that could be graded ({book.known()[learner].get('problem', 'no notebook')})")
        began, failed = time.monotonic(), 0
        for count, (task, found) in enumerate(graded(waiting, desk, jobs), 1):
            if isinstance(found, Exception):
                failed += 1
                words = f"the grader itself failed ({type(found).__name__}: {found})"
                say(f"{task.paper.learner}, {task.paper.stem}: {words}")
                continue
            book.add(found)
            left = (time.monotonic() - began) / count * (len(waiting) - count)
            say(f"{count} of {len(waiting)}  {line(found)}{_eta(left)}")
    return 1 if failed else 0


def line(result: Result) -> str:
    """One learner's chapter in a line."""
    passed = sum(entry["status"] == PASSED for entry in result.exercises.values())
    return f"{result.learner}  {result.chapter}  {passed} of {len(result.exercises)} exercises pass"


def _count(things: Sized, name: str) -> str:
    return f"{len(things)} {name}{'' if len(things) == 1 else 's'}"


def _eta(seconds: float) -> str:
    if seconds < 1:
        return ""
    return f"   about {seconds:.0f} s left" if seconds < 100 else f"   about {seconds / 60:.0f} min left"
