"""Any engine behind the server: one answer after the other, in a thread of its own.

    class MyEngine:
        def generate(self, tokens, num_samples, max_tokens, temperature, top_k, seed): yield [token], [mask]

is enough. It has what the server needs of nanochat_lib.batching.BatchingEngine, without rows that share a step.
"""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable
from typing import Any

from nanochat_lib.batching import Piece, Request
from nanochat_lib.errors import UserError
from nanochat_lib.tokenizer import StreamDecoder


class Ticket:
    """A request that was handed in; `cancel` from any thread."""

    def __init__(self) -> None:
        self.cancelled = False

    def cancel(self) -> None:
        self.cancelled = True


class OneAtATime:
    """`engine.generate` (see nanochat_lib.Engine) for one request after the other. `context`: most tokens of a row."""

    def __init__(self, engine: Any, tokenizer: Any, context: int) -> None:
        self.engine, self.tokenizer, self.context = engine, tokenizer, context
        special = tokenizer.encode_special
        self.ends = special("<|assistant_end|>"), special("<|bos|>")
        self.waiting: queue.SimpleQueue = queue.SimpleQueue()
        self.busy = self.tokens = 0
        self.closed = False
        self.door = threading.Lock()  # nothing gets in line behind the word that ends the thread
        self.thread = threading.Thread(target=self.work, name="one at a time", daemon=True)
        self.thread.start()

    def submit(self, request: Request, deliver: Callable[[Piece], None]) -> Ticket:
        """Returns at once; `deliver` is called from the engine's thread. Raises UserError for too long a prompt."""
        if not 0 < len(request.tokens) < self.context:
            raise UserError(f"the prompt has {len(request.tokens):,} tokens, allowed are 1 to {self.context - 1:,}")
        if request.top_p not in (None, 1.0):
            raise UserError("this engine has no top_p; leave it out")
        ticket = Ticket()
        with self.door:
            if self.closed:
                raise UserError("the engine is closed")
            self.waiting.put((request, deliver, ticket))
        return ticket

    def stats(self) -> dict[str, int]:
        return {
            "rows": 1,
            "busy": self.busy,
            "waiting": self.waiting.qsize(),
            "tokens_generated": self.tokens,
            "bytes_per_row": 0,
        }

    def close(self) -> None:
        """Ends the thread after the token in the making; what still waits is cancelled."""
        with self.door:
            self.closed = True
            self.waiting.put(None)
        self.thread.join()

    def work(self) -> None:
        while (job := self.waiting.get()) is not None:
            request, deliver, ticket = job
            self.busy = 1
            try:
                finish = "cancelled"
                if not (ticket.cancelled or self.closed):
                    finish = self.answer(request, deliver, ticket)
            except Exception as error:  # whatever a learner's engine does, the server goes on
                finish = f"error: {type(error).__name__}: {error}"
            self.busy = 0
            with contextlib.suppress(Exception):  # the receiver is gone
                deliver(Piece([], [], "", finish))

    def answer(self, request: Request, deliver: Callable[[Piece], None], ticket: Ticket) -> str:
        """Delivers all but the last piece and returns why it ended."""
        decoder, held = StreamDecoder(self.tokenizer), ""  # held: what may be the beginning of a stop string
        room = self.context - len(request.tokens)
        columns = self.engine.generate(
            list(request.tokens),
            num_samples=1,
            max_tokens=room if request.max_tokens is None else min(request.max_tokens, room),
            temperature=request.temperature,
            top_k=request.top_k,
            seed=request.seed,
        )
        finish = "length"
        for (token,), (mask,) in columns:
            if ticket.cancelled or self.closed:
                return "cancelled"
            self.tokens += 1
            if token in self.ends:
                finish = "end"
                break
            held += decoder.push(token)
            stopped = [at for at in map(held.find, request.stop) if at >= 0]
            if stopped:
                deliver(Piece([token], [mask], held[: min(stopped)], None))
                return "stop"
            safe = len(held) - max((overlap(held, stop) for stop in request.stop), default=0)
            deliver(Piece([token], [mask], held[:safe], None))
            held = held[safe:]
        deliver(Piece([], [], held + decoder.flush(), None))
        return finish


def overlap(text: str, stop: str) -> int:
    """How many characters at the end of `text` could be the beginning of `stop`."""
    return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
