"""One submission from code to rows: exercise by exercise in a child of the fork server, several submissions at a time.

A submission is a generator that yields whenever it waits for its child, so that one thread, the main one, serves all;
judging happens there too, under a time limit. A child that hangs, dies or breaks the rules of the line is ended, its
case fails, and a new child goes on with the next exercise.
"""

from __future__ import annotations

import secrets
import select
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, field
from inspect import Parameter, Signature

from nanochat_lib.course import checker, mishaps
from nanochat_lib.course.cases import MISSING, Case
from nanochat_lib.course.grading import wire
from nanochat_lib.course.grading.answers import Answer, Answers
from nanochat_lib.course.grading.key import Key, Put, Question
from nanochat_lib.course.grading.pool import Child, Server
from nanochat_lib.course.result import FAILED, NOT_ATTEMPTED, NOT_RUN, PASSED, Row

FLOOR, TIMES = 4.0, 10.0  # seconds that a case may always take, and how many times the right answer's
GRACE = 2.0  # seconds after which a case that does not end by itself is ended from outside
LOADING = 30.0
JUDGING = 20.0  # seconds for comparing one result: a property's own code on a strange one
SMALL = 1 << 16


@dataclass
class Judged:
    """One exercise of one submission."""

    id: str
    rows: list[Row] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)  # case -> in the child
    handed_in: bool = True

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.status == PASSED for row in self.rows)


class Names:
    """Stands for the learner's function where a message names its arguments."""

    def __init__(self, name: str, parameters: tuple[str, ...]) -> None:
        named = [Parameter(parameter, Parameter.POSITIONAL_OR_KEYWORD) for parameter in parameters]
        self.__name__, self.__signature__ = name, Signature(named)

    def __call__(self, *args: object) -> None:
        raise TypeError("a learner's function is never called in the grader")


def NONE(name: str) -> None:
    """No records may come back."""


class Ended(Exception):
    """The child is gone; the message says why, in words for the learner."""


Wait = Generator[tuple[Child, float], None, object]


@dataclass
class Session:
    """One submission with its child."""

    server: Server
    key: Key
    answers: Answers
    seed: int
    limits: dict[tuple[str, str], float]  # (exercise, case) -> seconds of the right answer
    child: Child | None = None
    failed: dict[str, str] = field(default_factory=dict)  # function -> what stands in for it
    done: list[str] = field(default_factory=list)  # exercises that are loaded, or failed

    def run(self) -> Generator[tuple[Child, float], None, list[Judged]]:
        """All exercises of the chapter; yields (child, until when) while it waits."""
        found = []
        try:
            for question in self.key.questions.values():
                judged = yield from self._question(question)
                found.append(judged)
                self.done.append(question.id)
                if not judged.passed:
                    self.failed[question.unit.name] = self.key.stand_in(question.id)
        finally:
            self._end()
        return found

    def _end(self) -> None:
        if self.child:
            self.child.end()
        self.child = None

    def _question(self, question: Question) -> Generator[tuple[Child, float], None, Judged]:
        answer = self.answers.found.get(question.id)
        judged = Judged(question.id, handed_in=answer is not None)
        if answer is None:
            judged.rows = [Row(case.name, case.kind, NOT_ATTEMPTED) for case in question.cases]
            return judged
        if not answer.problem:
            try:
                yield from self._load(question, answer, judged)
            except Ended as end:
                self._end()
                answer = Answer(problem=str(end))
        if answer.problem or judged.remarks:
            why = answer.problem or judged.remarks[-1]
            judged.rows = [Row(case.name, case.kind, FAILED, cause=why) for case in question.cases]
            return judged
        ordinary = [case for case in question.cases if case.kind != "budget"]
        over = ""
        for case in ordinary:
            row = (
                Row(case.name, case.kind, NOT_RUN) if over else (yield from self._case(question, case, answer, judged))
            )
            judged.rows.append(row)
            if row.status == NOT_ATTEMPTED:
                judged.rows = [Row(other.name, other.kind, NOT_ATTEMPTED) for other in question.cases]
                return judged
            over = over or ("endless" if row.endless else "" if self.child else "ended")
        right = all(row.status == PASSED for row in judged.rows)
        for case in question.cases:
            if case.kind == "budget":
                run = right and self.child
                row = (
                    (yield from self._case(question, case, answer, judged))
                    if run
                    else Row(case.name, "budget", NOT_RUN)
                )
                judged.rows.append(row)
        order = [case.name for case in question.cases]
        judged.rows.sort(key=lambda row: order.index(row.case))
        return judged

    # ---- talking to the child

    def _ask(self, message: dict, seconds: float, most: int, classes: Callable = NONE) -> Wait:
        """The child's reply. Raises Ended when there is none."""
        child, word = self.child, secrets.token_hex(8)
        if not child.send({**message, "word": word}):
            raise Ended("the code left the process unable to go on")
        until = time.monotonic() + seconds
        while True:
            try:
                frame = child.frame(most + 4096)
                reply = None if frame is None else wire.decode(frame, classes)
            except wire.BadFrame as error:
                raise Ended(f"the code wrote into the line to the grader ({error})") from None
            if reply is not None:
                if not isinstance(reply, dict) or reply.get("word") != word or child.buffer:
                    raise Ended("the code wrote into the line to the grader")
                return reply
            if time.monotonic() > until:
                raise Ended(
                    f"it was still running after {seconds:.0f} seconds, so it was stopped: does a loop never end?"
                )
            alive = yield child, until
            if not alive and child.frame(most + 4096) is None:
                raise Ended("the code ended Python (os._exit, a crash, or more memory than there is)")

    def _load(self, question: Question, answer: Answer, judged: Judged) -> Wait:
        """Brings the child to where the learner's cell has run."""
        if self.child is None:
            self.child = self.server.child()
            for earlier in self.done:
                yield from self._pieces(self._before(earlier), "", {})
                other = self.key.questions[earlier]
                if other.unit.name not in self.failed:
                    pieces = [(*piece, True) for piece in self.answers.found[earlier].pieces]
                    yield from self._pieces(pieces, "", {})
        restore = {name: symbol for name, symbol in self.failed.items() if symbol}
        reply = yield from self._pieces(self._before(question.id), "", restore)
        reply = yield from self._pieces([(*piece, True) for piece in answer.pieces], question.unit.name, restore)
        if reply.get("problem"):
            judged.remarks.append(str(reply["problem"]))

    def _pieces(self, pieces: list, name: str, restore: dict) -> Wait:
        message = {"do": "load", "pieces": pieces, "name": name, "restore": restore, "seconds": LOADING}
        reply = yield from self._ask(message, LOADING + GRACE, SMALL)
        if reply.get("own"):
            raise RuntimeError(f"the chapter's own code fails in the child: {reply['problem']}")
        return reply

    def _before(self, exercise: str) -> list[tuple[str, str, bool]]:
        """The chapter's own pieces that stand directly before an exercise."""
        found: list[tuple[str, str, bool]] = []
        for source, label, id in self.key.steps:
            if id == exercise:
                break
            found = [] if id else [*found, (source, label, False)]
        return found

    def seconds(self, question: Question, case: Case) -> float:
        times = 4 * TIMES if case.kind == "budget" else TIMES
        return FLOOR + times * self.limits.get((question.id, case.name), LOADING / TIMES)

    def _case(self, question: Question, case: Case, answer: Answer, judged: Judged) -> Generator[tuple, None, Row]:
        """The row of one case."""
        put, seconds = self.key.put(question, case, self.seed), self.seconds(question, case)
        message = {"do": "case", "id": question.id, "name": question.unit.name, "case": case.kind, "args": put.frame}
        message |= {"call": self.key.call(question, case), "limits": dict(case.limits), "most": put.most}
        message |= {"against": self.key.against(question, case) if case.limits else None, "seconds": seconds}
        message |= {"mutates": question.exercise.mutates, "notes": question.exercise.steps is not None}
        row = Row(case.name, case.kind, PASSED)
        try:
            reply = yield from self._ask(message, seconds + GRACE, put.most, wire.classes_in(put.want))
        except Ended as end:
            self._end()
            row.fail(cause=str(end))
            return row
        judged.seconds[case.name] = _number(reply.get("seconds"))
        if "large" in reply:
            row.fail(cause="the result is far larger than the right one")
            return row
        if reply.get("patched") and (case.limits or case.kind == "property"):
            row.fail(cause="the code changes what measures it (jax, time or the checks), so this case does not count")
            return row
        try:
            with mishaps.patience(JUDGING):
                return judge(question, case, put, reply, Names(question.unit.name, answer.parameters))
        except (Exception, mishaps.TookTooLong) as error:  # a result may be anything at all
            row.fail(cause=f"the result cannot be compared with the right one ({type(error).__name__})")
            return row


def judge(question: Question, case: Case, put: Put, reply: dict, names: Names) -> Row:
    """A child's reply against the right result."""
    error = reply.get("error")
    if error is not None:
        fields = {key: error[key] for key in ("kinds", "text", "line", "stub", "endless")}
        error = mishaps.Raised(tuple(map(str, fields.pop("kinds"))) or ("?:?",), **fields)
    if case.limits:
        row = Row(case.name, "budget", PASSED)
        measured = error or {
            name: (float(reply["measured"][name][0]), float(reply["measured"][name][1])) for name in case.limits
        }
        checker.judge_budget(row, case, measured)
        return row
    noted = reply.get("noted") if isinstance(reply.get("noted"), dict) else {}
    seen = checker.Observed(reply.get("got", MISSING) if error is None else MISSING, error, noted)
    seen.changed = str(reply.get("changed") or "")
    if error is None and "got" not in reply:
        raise wire.BadFrame("neither a result nor an error")
    return checker.judged(question.exercise, case, put.args, put.want, seen, names)


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and value == value else 0.0


def run_all(sessions: Iterable[tuple[object, Session]], jobs: int) -> Iterator[tuple[object, list[Judged] | Exception]]:
    """Runs sessions, `jobs` at a time; gives each one's label with its result as it is done."""
    waiting, running = iter(sessions), {}
    while True:
        while len(running) < jobs and (item := next(waiting, None)) is not None:
            label, session = item
            program = session.run()
            result = _step(program, None)
            if isinstance(result, tuple):
                running[id(program)] = (label, program, result)
            else:
                yield label, result
        if not running:
            return
        now = time.monotonic()
        lines = {wait[0].line: (key, wait) for key, (_, _, wait) in running.items()}
        nearest = min(until for _, _, (_, until) in running.values())
        ready, _, _ = select.select(list(lines), [], [], max(0.0, min(nearest - now, 5.0)))
        for line, (key, (child, until)) in lines.items():
            if line not in ready and time.monotonic() <= until:
                continue
            label, program, _ = running[key]
            result = _step(program, child.receive() if line in ready else True)
            if isinstance(result, tuple):
                running[key] = (label, program, result)
            else:
                del running[key]
                yield label, result


def _step(program: Generator, value: object) -> tuple[Child, float] | list[Judged] | Exception:
    """The next wait of a session, or its result; an error of the grader itself is a result too and stops no other."""
    try:
        return program.send(value)
    except StopIteration as stop:
        return stop.value
    except Exception as error:
        return error
