"""Between the event loop and the engine's thread: who may enter, what becomes of a request, and the end of all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

from nanochat_lib.batching import Piece, Request
from nanochat_lib.errors import UserError
from nanochat_lib.serve.refusal import Refused

STOPPING = "the server is stopping"
PING_SECONDS = 15.0


class Answer:
    """One answer on its way. Its pieces pile up here, at most a token's text each, however slow the reader is."""

    def __init__(self, request: Request) -> None:
        self.request, self.began = request, time.monotonic()
        self.loop, self.arrived = asyncio.get_running_loop(), asyncio.Queue()
        self.ticket: Any = None
        self.tokens = 0

    def deliver(self, piece: Piece) -> None:
        """Called by the engine's thread; never waits."""
        try:
            self.loop.call_soon_threadsafe(self.arrived.put_nowait, piece)
        except RuntimeError:  # the loop has ended
            pass

    async def pieces(self) -> AsyncIterator[Piece | None]:
        """Up to and with the one that has `finish`. None now and then while nothing comes."""
        while True:
            try:
                async with asyncio.timeout(PING_SECONDS):
                    piece = await self.arrived.get()
            except TimeoutError:
                yield None
                continue
            self.tokens += len(piece.tokens)
            yield piece
            if piece.finish is not None:
                return


class Desk:
    """Takes requests for `batching` while no more than `queue` of them would wait. Lives in the event loop."""

    def __init__(self, batching: Any, queue: int) -> None:
        self.batching, self.queue = batching, queue
        self.rows = int(batching.stats()["rows"])
        self.open: set[Answer] = set()
        self.stopping = False
        self.seconds = 2.0  # an answer takes, on a moving average
        self.answered = self.refused = self.left = 0

    def enter(self, request: Request) -> Answer:
        """Hands the request to the engine. Refused: 429 when too many wait, 503 at the end, 400 from the engine."""
        if self.stopping:
            raise Refused(503, STOPPING, headers={"Retry-After": "5", "Connection": "close"})
        if broken := self.batching.stats().get("broken"):
            raise Refused(503, broken)
        waiting = len(self.open) - self.rows
        if waiting >= self.queue:
            self.refused += 1
            wait = self.seconds * (waiting + 1) / self.rows
            raise Refused(
                429,
                f"{self.rows} answers are being written and {waiting} requests wait already; try again later",
                code="rate_limit_exceeded",
                headers={"Retry-After": str(min(max(round(wait), 1), 60))},
            )
        answer = Answer(request)
        try:
            answer.ticket = self.batching.submit(request, answer.deliver)
        except UserError as error:
            raise Refused(400, str(error)) from None
        self.open.add(answer)
        return answer

    def leave(self, answer: Answer, whole: bool) -> None:
        """The answer is over, for its reader at least: its row is free at once."""
        if answer not in self.open:
            return
        self.open.remove(answer)
        if whole:
            self.answered += 1
            self.seconds += 0.2 * (time.monotonic() - answer.began - self.seconds)
        else:
            self.left += 1
            answer.ticket.cancel()

    def stop(self) -> None:
        """No new requests; every answer under way ends now, and its reader is told."""
        self.stopping = True
        for answer in self.open:
            answer.ticket.cancel()
            answer.arrived.put_nowait(Piece([], [], "", f"error: {STOPPING}"))

    async def attend(self, answer: Answer, receive: Callable, work: Awaitable) -> bool:
        """Does `work`, which reads the answer to its end, unless the client leaves first. True: it was done."""
        working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_gone(receive))
        whole = False
        try:
            await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if working.done():
                working.result()
                whole = True
            return whole
        finally:
            self.leave(answer, whole)
            for task in (working, leaving):
                task.cancel()
            await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Callable) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
