"""Server-sent events: one `data:` line of JSON an event, flushed as it comes, until the answer or its reader ends."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanochat_lib.serve.desk import Answer, Desk
from nanochat_lib.serve.refusal import to_json

PING = b": waiting\n\n"  # a comment, which clients skip; it tells proxies that the line is alive


def event(content: Any) -> bytes:
    """One event. JSON text holds no line break, so it is one line."""
    return f"data: {content if isinstance(content, str) else to_json(content)}\n\n".encode()


class EventStream(Response):
    """`events` reads `answer`; when the client leaves, the answer's row is freed."""

    media_type = "text/event-stream"

    def __init__(self, desk: Desk, answer: Answer, events: AsyncGenerator[bytes]) -> None:
        super().__init__(headers={"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self.desk, self.answer, self.events = desk, answer, events

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.desk.attend(self.answer, receive, self.write(send))

    async def write(self, send: Send) -> None:
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            async for chunk in self.events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            await self.events.aclose()
