"""`nanochat grade audit`: on the instructor's own machine, does nothing leak, and does no attack earn a point?"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nanochat_lib.course.exercises import units
from nanochat_lib.course.grading import attacks, grade, handout, pool, session
from nanochat_lib.course.grading.answers import Answers, gather
from nanochat_lib.course.grading.batch import run_all
from nanochat_lib.course.grading.key import Key
from nanochat_lib.course.grading.session import Session
from nanochat_lib.course.grammar import solution
from nanochat_lib.course.learner import LearnerCell
from nanochat_lib.course.result import PASSED
from nanochat_lib.errors import UserError

TARGET = "nanochat_lib.bpe:merge"  # the exercise that the attacks are written for
IMPATIENT = {"FLOOR": 2.0, "LOADING": 2.0, "WALL": 2.0, "GRACE": 0.5}  # nobody waits long for an endless loop
HONEST = 3


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at; `wrong` is "" when it is as it should be."""

    what: str
    wrong: str = ""


def audit(
    root: Path, cache: Path, require: str = "limits", jobs: int = 2, say: Callable[[str], None] = print, only: str = ""
) -> int:
    """Prints what was found; 0 when nothing is wrong. `only`: the level to try, else the strongest that works."""
    found = [_leaks(root), *_attacked(root, cache, require, only, jobs, say)]
    wrong = [finding for finding in found if finding.wrong]
    for finding in wrong:
        say(f"NOT SAFE  {finding.what}: {finding.wrong}")
    say(f"{len(found) - len(wrong)} of {len(found)} findings are as they should be")
    return 1 if wrong else 0


def _leaks(root: Path) -> Finding:
    with tempfile.TemporaryDirectory() as folder:
        try:
            about = handout.bundle(root, Path(folder) / "course.zip")
        except UserError as error:
            return Finding("the learner's bundle", str(error))
    return Finding(f"the learner's bundle {about['hash']}: {about['files']} files, no answer and no hidden case")


def _attacked(root: Path, cache: Path, require: str, only: str, jobs: int, say: Callable[[str], None]) -> list[Finding]:
    from nanochat_lib.course.build import sources

    stems = {u.library: stem for stem, cells in sources(root).items() for u in units(cells)}
    if TARGET not in stems:
        raise UserError(f"no chapter has an exercise for {TARGET}, which the attacks are written for")
    with (
        grade.open_desk(root, cache, stems[TARGET], require, say=say, only=only) as desk,
        socket.create_server(("127.0.0.1", 0)) as listening,
    ):
        (one,) = desk.keys.values()
        desk.limits_of(one.stem)  # the right answers first
        say(f"isolation {desk.server.level}; trying the attacks")
        marker = Path(attacks.MARKER)
        marker.unlink(missing_ok=True)
        listening.setblocking(False)
        id = next(id for id, question in one.questions.items() if question.unit.library == TARGET)
        secret = str((root / "solutions" / f"{one.stem}.py").resolve())
        port, right = listening.getsockname()[1], solution(one.questions[id].unit.cell).source
        cases = _harmless(attacks.attacks(secret, port), desk.server.level, say)
        cases |= attacks.forbidden(secret, port, right)
        before = {name: getattr(session, name) for name in IMPATIENT}
        try:
            for name, seconds in IMPATIENT.items():
                setattr(session, name, seconds)
            found = list(_judged(one, id, cases, desk, jobs))
        finally:
            for name, seconds in before.items():
                setattr(session, name, seconds)
        try:
            listening.accept()
            found.append(Finding("network", "an attack reached a port of this machine"))
        except BlockingIOError:
            found.append(Finding("network"))
        found.append(Finding("files", f"an attack wrote {marker}" if marker.exists() else ""))
    return found


def _harmless(cases: dict[str, str], level: str, say: Callable[[str], None]) -> dict[str, str]:
    """The attacks that may be tried: at the strong levels all of them."""
    if level in pool.STRONG:
        return cases
    say(f"not tried, since nothing would stop them here: {', '.join(sorted(attacks.HARMFUL))}")
    return {name: text for name, text in cases.items() if name not in attacks.HARMFUL}


def _judged(one: Key, id: str, cases: dict[str, str], desk: grade.Desk, jobs: int):
    """A finding for each attack, and for honest answers graded among them."""
    name = one.wanted[id]
    right = solution(one.questions[id].unit.cell).source

    def prepared(text: str) -> Answers:
        cell = LearnerCell(1, "code", text, (id,), ())
        answers = gather([cell], {id: name}, one.known)
        grade.refuse_borrowed(answers, one)
        return answers

    every = max(1, len(cases) // HONEST)
    work = []
    for i, (what, text) in enumerate(cases.items()):
        work += [(f"honest {i}", right)] if i % every == 0 else []
        work.append((what, text))
    waiting = [(what, Session(desk.server, one, prepared(text), 0, desk.limits_of(one.stem))) for what, text in work]
    for what, judged in run_all(waiting, jobs):
        if isinstance(judged, Exception):
            yield Finding(what, f"the grader itself failed ({judged})")
            continue
        rows = next(item.rows for item in judged if item.id == id)
        passed = [row.case for row in rows if row.status == PASSED]
        if what.startswith("honest"):
            yield Finding(what, "" if len(passed) == len(rows) else "an honest answer lost points")
        else:
            yield Finding(what, _worth(passed, rows))


def _worth(passed: list[str], rows: list) -> str:
    """An attack may by luck give the right result of a case whose result is empty; more is wrong."""
    return f"it passed {', '.join(passed)}" if len(passed) > len(rows) // 5 else ""
