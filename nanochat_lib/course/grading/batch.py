"""Several submissions at a time in one thread, the main one: who waits for a child lets others go on."""

from __future__ import annotations

import select
import time
from collections.abc import Generator, Iterable, Iterator

from nanochat_lib.course.grading.judge import Judged
from nanochat_lib.course.grading.pool import Child
from nanochat_lib.course.grading.session import Session


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
