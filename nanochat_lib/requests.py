"""What is asked of the batching engine, what comes back, and what it keeps of a request meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from nanochat_lib.answer_text import AnswerText
from nanochat_lib.rows import Draw


@dataclass(frozen=True)
class Request:
    """A prompt, which begins with `<|bos|>`, and how to answer it.

    max_tokens None: until the context is full. top_k None or 0, top_p None or 1: off. stop: the answer ends before the
    first of these strings, which is not delivered.
    """

    tokens: Sequence[int]
    max_tokens: int | None = None
    temperature: float = 1.0
    top_k: int | None = None
    top_p: float | None = None
    seed: int = 0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True)
class Piece:
    """What became ready since the last piece.

    mask: 1 for a token that the model sampled, 0 for one that a tool inserted. text: whole characters; tool tokens by
    name, the end token never (it is not among the tokens either). finish: None while the answer goes on; in the last
    piece "end", "length", "stop", "cancelled" or "error: …".
    """

    tokens: list[int]
    mask: list[int]
    text: str
    finish: str | None


class Ticket:
    """A request on its way."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake, self.cancelled = wake, False

    def cancel(self) -> None:
        """Ends the answer before the next decode step, with finish "cancelled", and frees its row. From any thread."""
        self.cancelled = True
        self._wake()


@dataclass(eq=False)
class Job:
    """A request with its ticket and, from the time it has a row, its answer so far."""

    request: Request
    deliver: Callable[[Piece], None]
    ticket: Ticket
    limit: int
    text: AnswerText
    rest: list[int] = field(default_factory=list)  # of the prompt, to be run before the first step; newest excluded
    newest: int = 0
    answer: list[int] = field(default_factory=list)
    forced: list[int] = field(default_factory=list)  # tokens to insert

    def draw(self) -> Draw:
        r = self.request
        return Draw(
            self.newest, r.seed % 2**32, self.forced, self.limit, len(self.answer), r.temperature, r.top_k or 0,
            r.top_p or 1.0,
        )  # fmt: skip
