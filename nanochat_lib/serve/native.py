"""nanochat's own endpoints: the chat stream, health and figures, and what the page needs besides."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from nanochat_lib.batching import Request as Wanted
from nanochat_lib.serve import bodies, prompts
from nanochat_lib.serve.desk import Answer
from nanochat_lib.serve.refusal import as_json
from nanochat_lib.serve.streams import PING, EventStream, event


def router(served: Any) -> APIRouter:
    """The routes of `served` (app.Served)."""
    routes = APIRouter()

    @routes.post("/chat/completions")
    async def chat(request: Request) -> Response:
        body = await bodies.read(request, bodies.ChatBody)
        turns = bodies.check_messages(body.messages)
        options = bodies.check_options(body, served.settings)
        room = prompts.room_for_prompt(served.context, options["max_tokens"], body.forget_oldest)
        ids, _, forgotten = prompts.render(served.tokenizer, turns, room, answer=True, forget=body.forget_oldest)
        answer = served.desk.enter(Wanted(tokens=ids, **options))
        start = {"start": {"seed": options["seed"], "prompt_tokens": len(ids), "forgotten": forgotten}}
        return EventStream(served.desk, answer, chat_events(answer, start if body.details else None))

    @routes.get("/health")
    async def health() -> Response:
        free = served.desk.rows - served.stats()["busy"]
        return as_json({"status": "ok", "ready": served.ready, "num_gpus": 1, "available_workers": max(free, 0)})

    @routes.get("/stats")
    async def stats() -> Response:
        engine, rows = served.stats(), served.desk.rows
        busy = min(engine["busy"], rows)
        figures = {
            "total_workers": rows,
            "available_workers": rows - busy,
            "busy_workers": busy,
            "workers": [{"gpu_id": 0, "device": served.settings.device} for _ in range(rows)],
            "queue": served.desk.queue,
            "answered": served.desk.answered,
            "left": served.desk.left,
            "refused": served.desk.refused,
            "uptime_s": round(time.monotonic() - served.began, 1),
        }
        return as_json({**engine, **figures})

    @routes.get("/info")
    async def info() -> Response:
        settings = served.settings
        return as_json(
            {
                "model": settings.model,
                "title": settings.title,
                "context": served.context,
                "rows": served.desk.rows,
                "defaults": {
                    "temperature": settings.temperature,
                    "top_k": settings.top_k or 0,
                    "top_p": settings.top_p or 1.0,
                    "max_tokens": settings.max_tokens,
                },
                "limits": {
                    "messages": bodies.MOST_MESSAGES,
                    "characters": bodies.MOST_CHARS,
                    "characters_in_all": bodies.MOST_CHARS_IN_ALL,
                    "max_tokens": bodies.MOST_TOKENS,
                },
                "probabilities": served.tokens.next_tokens is not None,
            }
        )

    @routes.post("/tokens")
    async def tokens(request: Request) -> Response:
        body = await bodies.read(request, bodies.TokensBody)
        turns = bodies.check_messages(body.messages, least=0)
        waiting = bool(turns) and turns[-1][0] == "user"  # for an answer
        ids, mask, forgotten = prompts.render(
            served.tokenizer, turns, served.context, answer=waiting, forget=body.forget_oldest
        )
        return as_json({"tokens": await served.tokens.table(ids, mask, body.top), "forgotten": forgotten})

    return routes


async def chat_events(answer: Answer, start: dict | None) -> AsyncGenerator[bytes]:
    """nanochat's events; with `start`, that one in front and the reason of the end in the last one."""
    if start:
        yield event(start)
    async for piece in answer.pieces():
        if piece is None:
            yield PING
            continue
        if piece.text:
            yield event({"token": piece.text, "gpu": 0})
        if piece.finish is None:
            continue
        if piece.finish.startswith("error"):
            yield event({"error": piece.finish.removeprefix("error: ")})
        seconds = round(time.monotonic() - answer.began, 3)
        ending = {"finish": piece.finish.split(":")[0], "tokens": answer.tokens, "seconds": seconds} if start else {}
        yield event({"done": True, **ending})
