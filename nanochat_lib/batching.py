"""Many requests at once: answers of different lengths share one compiled decode step, in a thread of its own.

There is a fixed number of rows. A request takes a row as soon as one is free, its prompt is run into the row's cache in
chunks between the steps of the others, and then it moves along with them; when it ends, or is cancelled, the row is
free for the next. An answer depends on its request alone, never on who shares the batch, and is the one that
`Engine.generate` gives, up to the rounding of sums whose order depends on the number of rows.

Prompt and answer together fill at most the model's context: the answer then ends with finish "length". A prompt that
leaves no room is refused.
"""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

from nanochat_lib.answer_text import AnswerText
from nanochat_lib.decoding import CHUNK, COMPILES, tool_output
from nanochat_lib.engine import Engine
from nanochat_lib.errors import UserError
from nanochat_lib.kv_cache import row_bytes
from nanochat_lib.lanes import lanes_for
from nanochat_lib.requests import Job, Piece, Request, Ticket
from nanochat_lib.rows import Rows
from nanochat_lib.sampling import check_sampling

__all__ = ["BatchingEngine", "Piece", "Request", "Ticket"]

SLACK = 64  # see rows.Rows
QUEUED = 32  # most decode steps of one dispatch while a request waits for a row or for the rest of its prompt
LATENCY = 0.05  # seconds that may pass between two deliveries, when the device is fast enough
FAILURES = 3  # failures of the device in a row after which the engine gives up


class BatchingEngine:
    """Answers requests with `engine`'s weights in `rows` rows at a time. `slack`: see kv_cache.steps_back.

    `with BatchingEngine(engine) as batching: …` closes it at the end. New weights (`engine.params = …`) count from the
    next step on; later requests then continue no earlier text.
    """

    def __init__(self, engine: Engine, rows: int = 8, *, slack: int = SLACK, latency: float = LATENCY) -> None:
        if rows < 1:
            raise UserError(f"rows {rows} must be at least 1")
        self.engine, self.latency = engine, latency
        self.rows = Rows(engine.setup, rows, engine.context, slack, lanes_for(rows, engine.params))
        self.jobs: dict[int, Job] = {}  # by row; only the thread touches it
        self.waiting: deque[Job] = deque()
        self.changed = threading.Condition()
        self.closed, self.broken, self.failures = False, "", 0
        self.generated = self.reused = self.prefilled = 0
        self.step_seconds: deque[float] = deque(maxlen=8)
        self.weights = engine.weights
        self.thread = threading.Thread(target=self._run, name="generation", daemon=True)
        self.thread.start()

    def submit(self, request: Request, deliver: Callable[[Piece], None]) -> Ticket:
        """Puts a request in line and returns at once. From any thread.

        `deliver` is called from the generation thread with every piece; it must not block. If it raises, the request is
        dropped. Raises UserError for a prompt without room for an answer, an option out of range or an id that does not
        exist, and when the engine is closed or broken.
        """
        check_sampling(request.temperature, request.top_k, request.top_p)
        if not isinstance(request.seed, int):
            raise UserError(f"seed {request.seed!r} must be a whole number")
        for stop in request.stop:
            if not isinstance(stop, str) or not stop:
                raise UserError(f"stop string {stop!r} must be a text of at least one character")
        (limit,) = self.engine.limits([request.tokens], 1, request.max_tokens)
        text = AnswerText(self.engine.tokenizer, tuple(request.stop))
        job = Job(request, deliver, Ticket(self.wake), limit, text)
        with self.changed:
            if self.closed or self.broken:
                raise UserError(self.broken or "the engine is closed; start a new one")
            self.waiting.append(job)
            self.changed.notify()
        return job.ticket

    def stream(self, request: Request) -> Iterator[Piece]:
        """Submits a request and yields its pieces. Leaving the loop early, or never beginning it, cancels it."""
        pieces: queue.SimpleQueue[Piece] = queue.SimpleQueue()
        return _Arriving(self.submit(request, pieces.put), pieces)

    def generate(
        self,
        tokens: Sequence[int],
        max_tokens: int | None = None,
        temperature: float = 1.0,
        top_k: int | None = None,
        seed: int = 42,
        top_p: float | None = None,
    ) -> Iterator[tuple[list[int], list[int]]]:
        """One answer in the form of `Engine.generate`. UserError when the engine fails."""
        for piece in self.stream(Request(tokens, max_tokens, temperature, top_k, top_p, seed)):
            for token, mask in zip(piece.tokens, piece.mask, strict=True):
                yield [token], [mask]
            if piece.finish == "end":
                yield [self.engine.setup.ends[0]], [1]
            elif piece.finish and piece.finish.startswith("error"):
                raise UserError(piece.finish)

    @property
    def context(self) -> int:
        """Tokens that prompt and answer may have together."""
        return self.rows.length

    def stats(self) -> dict:
        """rows, busy and waiting requests; tokens generated, run through from prompts, and reused from earlier texts;
        bytes_per_row by kind of layer (kv_cache.row_bytes); programs compiled in this process; broken: "" or why."""
        rows, setup = self.rows, self.engine.setup
        sizes = row_bytes(setup.config, rows.length, setup.dtype, rows.slack)
        with self.changed:
            return {
                "rows": len(rows.rows),
                "busy": len(self.jobs),
                "waiting": len(self.waiting),
                "tokens_generated": self.generated,
                "tokens_prefilled": self.prefilled,
                "tokens_reused": self.reused,
                "bytes_per_row": sizes["total"],
                "bytes_per_row_by_layer": sizes,
                "compiles": dict(COMPILES),
                "broken": self.broken,
            }

    def wake(self) -> None:
        """Makes the thread look at its requests again."""
        with self.changed:
            self.changed.notify()

    def close(self) -> None:
        """Cancels what runs or waits and ends the thread."""
        with self.changed:
            self.closed = True
            self.changed.notify()
        if threading.current_thread() is not self.thread:
            self.thread.join()

    def __enter__(self) -> BatchingEngine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # The thread ------------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            while True:
                with self.changed:
                    while not (self.closed or self.waiting or self.jobs):
                        self.changed.wait()
                if self.closed:
                    self._end_all("cancelled")
                    return
                self._round()
        except BaseException as error:
            self.broken = self.broken or f"the engine is broken: {_said(error)}; restart it"
            self._end_all(f"error: {self.broken}")
            if not isinstance(error, Exception):
                raise
        finally:
            self.rows.free_memory()

    def _round(self) -> None:
        """Frees, admits, fills for a while, and decodes a few steps."""
        if self.engine.weights is not self.weights:
            self.weights = self.engine.weights
            self.rows.forget()
        self._sweep()
        self._admit()
        try:
            self._fill()
            self._decode()
            self.failures = 0
        except Exception as error:
            # The cache was given to the failed call, so no row can go on.
            self.failures += 1
            self._end_rows(f"error: {_said(error)}")
            if self.failures >= FAILURES:
                raise
            self.rows.reset()

    def _sweep(self) -> None:
        """Ends what was cancelled."""
        with self.changed:
            gone = [job for job in self.waiting if job.ticket.cancelled]
            for job in gone:
                self.waiting.remove(job)
        for job in gone:
            self._deliver(job, "cancelled")
        for row in [row for row, job in self.jobs.items() if job.ticket.cancelled]:
            self._finish(row, "cancelled")

    def _admit(self) -> None:
        while True:
            free = [row for row in range(len(self.rows.rows)) if row not in self.jobs]
            with self.changed:
                if not free or not self.waiting:
                    return
                job = self.waiting.popleft()
                prompt = list(map(int, job.request.tokens))
                row, shared = self.rows.claim(prompt, free)
                self.jobs[row] = job
                self.reused += shared
            job.rest, job.newest = prompt[shared:-1], prompt[-1]
            if job.limit < 1:
                self._finish(row, "length")

    def _fill(self) -> None:
        """Runs chunks of prompts, first come first served, for about `latency` seconds."""
        started = time.perf_counter()
        for row, job in list(self.jobs.items()):
            while job.rest:
                done = self.rows.fill(self.weights.params, row, job.rest)
                job.rest = job.rest[done:]
                self.prefilled += done
                self.rows.wait(row)
                if time.perf_counter() - started > self.latency:
                    return

    def _decode(self) -> None:
        draws = {row: job.draw() for row, job in self.jobs.items() if not job.rest}
        if not draws:
            return
        started = time.perf_counter()
        new = self.rows.decode(self.weights.for_steps(self.rows.width), draws, self._steps())
        taken = max(map(len, new.values()))
        self.step_seconds.append((time.perf_counter() - started) / max(taken, 1))
        for row, tokens in new.items():
            try:
                self._append(row, tokens)
            except Exception as error:
                self._finish(row, f"error: {_said(error)}")

    def _steps(self) -> int:
        """Steps that one dispatch may take. A step's time: the fastest of the last ones, the slow ones compiled."""
        if not self.step_seconds:
            return 1
        queued = bool(self.waiting) or any(job.rest for job in self.jobs.values())
        return max(1, min(QUEUED if queued else CHUNK, int(self.latency / min(self.step_seconds))))

    def _append(self, row: int, tokens: list[int]) -> None:
        """A job's new tokens: what they mean for its text, its end and its tools."""
        job, setup = self.jobs[row], self.engine.setup
        for place, token in enumerate(tokens):
            if token in setup.ends:
                self._finish(row, "end")
                return
            job.answer.append(token)
            self.generated += 1
            if job.text.push(token, int(place >= len(job.forced))):
                self._finish(row, "stop")
                return
        job.forced, job.newest = job.forced[len(tokens) :], tokens[-1]
        full = len(job.answer) >= job.limit
        if not full and job.newest == setup.python[1]:
            _, output = tool_output(setup, self.engine.tokenizer, job.answer)
            full = len(job.answer) + len(output) > job.limit  # half a result would be worse than none
            job.forced = output
        if full:
            self._finish(row, "length")
        else:
            self._deliver(job, None)

    def _finish(self, row: int, finish: str) -> None:
        with self.changed:
            job = self.jobs.pop(row)
        self._deliver(job, finish)

    def _deliver(self, job: Job, finish: str | None) -> None:
        part = job.text.take(final=finish is not None)
        if job.ticket.cancelled and finish is None:
            return
        if part.tokens or part.text or finish:
            try:
                job.deliver(Piece(*part, finish))
            except Exception:  # the receiver is gone or broken: nothing more is for it
                job.ticket.cancelled, job.deliver = True, _nowhere

    def _end_rows(self, finish: str) -> None:
        for row in list(self.jobs):
            self._finish(row, finish)

    def _end_all(self, finish: str) -> None:
        self._end_rows(finish)
        with self.changed:
            waiting, self.waiting = list(self.waiting), deque()
        for job in waiting:
            self._deliver(job, finish)


class _Arriving:
    """The pieces of a request. Not a generator: one that was never started does not notice that it is dropped."""

    def __init__(self, ticket: Ticket, pieces: queue.SimpleQueue[Piece]) -> None:
        self.ticket, self.pieces, self.over = ticket, pieces, False

    def __iter__(self) -> Iterator[Piece]:
        return self

    def __next__(self) -> Piece:
        if self.over:
            raise StopIteration
        piece = self.pieces.get()
        self.over = piece.finish is not None
        return piece

    def close(self) -> None:
        if not self.over:
            self.over = True
            self.ticket.cancel()

    __del__ = close


def _nowhere(_piece: Piece) -> None:
    pass


def _said(error: BaseException) -> str:
    """The first line of an exception, short enough to be shown."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__
