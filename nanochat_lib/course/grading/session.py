"""One submission from code to rows: exercise by exercise in a child of the fork server, several submissions at a time.

A submission is a generator that yields whenever it waits for its child, so that one thread, the main one, serves all;
judging happens there too, under a time limit. A child that hangs, dies or breaks the rules of the line is ended, its
case fails, and a new child goes on with the next exercise.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator
from dataclasses import dataclass, field, replace

from nanochat_lib.course import mishaps
from nanochat_lib.course.cases import Case
from nanochat_lib.course.grading import wire
from nanochat_lib.course.grading.answers import Answers
from nanochat_lib.course.grading.judge import Judged, Names, fingerprint, judge, slim
from nanochat_lib.course.grading.key import Key, Put, Question
from nanochat_lib.course.grading.pool import Child, Server
from nanochat_lib.course.result import FAILED, NOT_ATTEMPTED, NOT_RUN, PASSED, Row

# Of processor time, so that a busy machine fails nobody: what a case may always take, how many times the right
# answer's, and what a cell may take when it is run.
FLOOR, TIMES, LOADING = 4.0, 10.0, 20.0
WALL = 4.0  # times that by the clock on the wall, for code that waits
GRACE = 2.0  # seconds after which what does not end by itself is ended from outside
JUDGING = 20.0  # seconds for comparing one result: a property's own code on a strange one
SMALL = 1 << 16
KEPT = 100_000  # fingerprints of right replies of a chapter, 32 bytes each
WROTE = "the code wrote into the line to the grader"
KEPT_WRONG = 4000  # rows of wrong replies of a chapter, about 1 KB each


class Ended(Exception):
    """The child is gone; the message says why, in words for the learner."""


class Spoilt(Exception):
    """The chapter's own code does not run in this child."""


Wait = Generator[tuple[Child, float], None, object]


@dataclass
class Session:
    """One submission with its child.

    All public cases come first, hidden ones after them: what feedback tells of public cases was made before the
    learner's code had seen a hidden argument that it could pass on.
    """

    server: Server
    key: Key
    answers: Answers
    seed: int
    limits: dict[tuple[str, str], float]  # (exercise, case) -> seconds of the right answer
    child: Child | None = None
    loaded: list[str] = field(default_factory=list)  # exercises that stand in this child
    judged: dict[str, Judged] = field(default_factory=dict)

    def run(self) -> Generator[tuple[Child, float], None, list[Judged]]:
        """All exercises of the chapter; yields (child, until when) while it waits."""
        try:
            for question in self.key.questions.values():
                self.judged[question.id] = yield from self._public(question)
            for question in self.key.questions.values():
                if not self.judged[question.id].closed:
                    yield from self._hidden(question, self.judged[question.id])
        finally:
            self._end()
            self.key.forget(self.seed)
        for question in self.key.questions.values():
            order = [case.name for case in question.cases]
            self.judged[question.id].rows.sort(key=lambda row, order=order: order.index(row.case))
        return list(self.judged.values())

    def _end(self) -> None:
        if self.child:
            self.child.end()
        self.child, self.loaded = None, []

    def _public(self, question: Question) -> Generator[tuple[Child, float], None, Judged]:
        answer = self.answers.found.get(question.id)
        judged = Judged(question.id, handed_in=answer is not None)
        if answer is None:
            return judged.close(question, NOT_ATTEMPTED)
        problem = answer.problem
        if not problem:
            try:
                problem = yield from self._stand(question)
            except Ended as end:
                self._end()
                problem = str(end)
        if problem:
            judged.remarks.append(problem)
            return judged.close(question, FAILED, problem)
        public = [case for case in question.cases if case.name not in question.hidden]
        yield from self._cases(question, judged, [case for case in public if case.kind != "budget"])
        if any(row.status == NOT_ATTEMPTED for row in judged.rows):
            return judged.close(question, NOT_ATTEMPTED)
        yield from self._budgets(question, judged, public)
        return judged

    def _hidden(self, question: Question, judged: Judged) -> Generator[tuple[Child, float], None, None]:
        cases = [case for case in question.cases if case.name in question.hidden]
        stopped = any(row.status == NOT_RUN and row.kind != "budget" or row.endless for row in judged.rows)
        try:
            problem = "stopped" if stopped else (yield from self._stand(question))
        except Ended as end:
            self._end()
            problem = str(end)
        if problem:
            judged.rows += [Row(case.name, case.kind, NOT_RUN) for case in cases]
            return
        yield from self._cases(question, judged, [case for case in cases if case.kind != "budget"])
        if not judged.right:  # a cheap wrong answer is worth nothing
            for row in judged.rows:
                row.status = NOT_RUN if row.kind == "budget" else row.status
        yield from self._budgets(question, judged, cases)

    def _cases(self, question: Question, judged: Judged, cases: list[Case]) -> Generator[tuple, None, None]:
        """Ordinary cases; none after an endless one or after the child's end."""
        over = False
        for case in cases:
            row = Row(case.name, case.kind, NOT_RUN)
            if not over:
                row = yield from self._case(question, case, judged)
            judged.rows.append(row)
            if row.status == NOT_ATTEMPTED:
                return
            over = over or row.endless or self.child is None

    def _budgets(self, question: Question, judged: Judged, cases: list[Case]) -> Generator[tuple, None, None]:
        for case in cases:
            if case.kind == "budget":
                row = Row(case.name, case.kind, NOT_RUN)
                if judged.right and self.child:
                    row = yield from self._case(question, case, judged)
                judged.rows.append(row)

    def _failed_before(self, question: Question) -> dict[str, str]:
        """Functions of earlier exercises that failed, with what stands in for them: nobody fails twice for one."""
        found = {}
        for id, judged in self.judged.items():
            if id == question.id:
                break
            if not judged.right and (symbol := self.key.stand_in(id)):
                found[self.key.questions[id].unit.name] = symbol
        return found

    def _stand(self, question: Question) -> Wait:
        """Brings the child to where the learner's cell has run; returns why it has not, or ""."""
        for learners in (True, False):
            try:
                return (yield from self._build(question, learners))
            except Spoilt:  # an earlier cell has broken what the chapter's own code needs
                self._end()
        raise RuntimeError(f"the chapter's own code before {question.id} fails in the child")

    def _build(self, question: Question, learners: bool) -> Wait:
        """`learners`: earlier exercises as the learner wrote them; without, right ones stand in for all of them."""
        if self.child is None:
            self.child, self.loaded = self.server.child(), []
        restore, problem = self._failed_before(question), ""
        for id in self.key.questions:
            if id not in self.loaded:
                yield from self._pieces(self._before(id), "", {})
                answer, own = self.answers.found.get(id), id == question.id
                if not learners and not own and (symbol := self.key.stand_in(id)):
                    restore[self.key.questions[id].unit.name] = symbol
                elif own or (answer and not answer.problem and self.judged[id].right):
                    pieces = [(*piece, True) for piece in answer.pieces]
                    reply = yield from self._pieces(pieces, id, restore if own else {})
                    problem = str(reply.get("problem") or "") if own else ""
                self.loaded.append(id)
            if id == question.id:
                break
        if restore:
            yield from self._pieces([], "", restore)
        return problem

    # ---- talking to the child

    def _ask(self, message: dict, seconds: float, most: int) -> Wait:
        """The child's reply. Raises Ended when there is none."""
        child, word = self.child, secrets.token_hex(8)
        if not child.send({**message, "word": word}):
            raise Ended("the code left the process unable to go on")
        until = time.monotonic() + seconds
        while True:
            try:
                frame = child.frame(most + 4096)
                reply = None if frame is None else wire.decode(frame)
            except wire.BadFrame as error:
                raise Ended(f"{WROTE} ({error})") from None
            if reply is not None:
                if not isinstance(reply, dict) or reply.get("word") != word or child.buffer:
                    raise Ended(WROTE)
                return reply
            if time.monotonic() > until:
                raise Ended(
                    f"it was still running after {seconds:.0f} seconds, so it was stopped: does a loop never end?"
                )
            alive = yield child, until
            if not alive:
                raise Ended("the code ended Python (os._exit, a crash, or more memory than there is)")

    def _pieces(self, pieces: list, id: str, restore: dict) -> Wait:
        """Runs code in the child; `id`: the exercise that it is the answer to."""
        name = self.key.questions[id].unit.name if id else ""
        message = {"do": "load", "pieces": pieces, "id": id, "name": name, "restore": restore}
        message |= {"seconds": LOADING, "wall": WALL * LOADING}
        reply = yield from self._ask(message, WALL * LOADING + GRACE, SMALL)
        if reply.get("own"):
            raise Spoilt(str(reply.get("problem")))
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

    def _case(self, question: Question, case: Case, judged: Judged) -> Generator[tuple, None, Row]:
        """The row of one case."""
        put, seconds = self.key.put(question, case, self.seed), self.seconds(question, case)
        message = {"do": "case", "id": question.id, "case": case.kind, "args": put.frame}
        message |= {"call": self.key.call(question, case), "limits": dict(case.limits), "most": put.most}
        message |= {"against": self.key.against(question, case) if case.limits else None}
        message |= {"seconds": seconds, "wall": WALL * seconds}
        message |= {"mutates": question.exercise.mutates, "notes": question.exercise.steps is not None}
        row = Row(case.name, case.kind, PASSED)
        try:
            reply = yield from self._ask(message, WALL * seconds + GRACE, put.most)
        except Ended as end:
            self._end()
            row.fail(cause=str(end))
            return row
        took = reply.get("seconds")
        judged.seconds[case.name] = float(took) if isinstance(took, float) and took >= 0 else 0.0
        if "large" in reply:
            row.fail(cause="the result is far larger than the right one")
            return row
        if reply.get("patched") and (case.limits or case.kind == "property"):
            row.fail(cause="the code changes what measures it (jax, time or the checks), so this case does not count")
            return row
        try:
            with mishaps.patience(JUDGING):
                return self._judge(question, case, put, reply.get("told"))
        except Ended as end:
            self._end()
            row.fail(cause=str(end))
            return row
        except (Exception, mishaps.TookTooLong) as error:  # a result may be anything at all
            row.fail(cause=f"the result cannot be compared with the right one ({type(error).__name__})")
            return row

    def _judge(self, question: Question, case: Case, put: Put, told: object) -> Row:
        """The verdict on a reply. The same reply has the same verdict, and a verdict may cost a compilation."""
        if type(told) is not bytes:
            raise Ended(WROTE)
        parameters = self.answers.found[question.id].parameters
        same, right, wrong = fingerprint(question, case, self.seed, told), self.key.passed, self.key.failed
        if same in right:
            return Row(case.name, case.kind, PASSED)
        if (same, parameters) in wrong:
            return replace(wrong[same, parameters])
        try:
            reply = wire.decode(told, wire.classes_in(put.want))
        except wire.BadFrame as error:
            raise Ended(f"{WROTE} ({error})") from None
        row = judge(question, case, put, reply, Names(question.unit.name, parameters))
        if not same or self.seed:  # budgets are measured each time; nobody else has a learner's own cases
            return row
        if row.status == PASSED:
            if len(right) >= KEPT:
                right.clear()
            right.add(same)
        else:
            if len(wrong) >= KEPT_WRONG:
                wrong.clear()
            wrong[same, parameters] = slim(row)
        return row
