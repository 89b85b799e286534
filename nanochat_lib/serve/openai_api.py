"""The part of OpenAI's interface that a small chat model can honour: chat completions, streamed or whole, and models.

What would change the answer and is not supported is refused; fields that only describe the caller are ignored. Tool
calls stay in the text by their tokens' names, and a conversation sent back with them is understood.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from nanochat_lib.batching import Request as Wanted
from nanochat_lib.serve import bodies, prompts
from nanochat_lib.serve.desk import Answer
from nanochat_lib.serve.refusal import Refused, as_json, openai_error
from nanochat_lib.serve.streams import PING, EventStream, event

ALIAS = "nanochat"  # every server's model answers to this name too
NOT_SUPPORTED = {  # field: the values that change nothing
    "n": (None, 1), "frequency_penalty": (None, 0), "presence_penalty": (None, 0), "logprobs": (None, False),
    "logit_bias": (None, {}), "tools": (None, []), "functions": (None, []),
    "response_format": (None, {}, {"type": "text"}),
}  # fmt: skip


def router(served: Any) -> APIRouter:
    """The routes of `served` (app.Served)."""
    routes = APIRouter()
    model = {"id": served.settings.model, "object": "model", "created": int(time.time()), "owned_by": "nanochat"}

    def check_model(name: str) -> None:
        if name not in (model["id"], ALIAS):
            message = f"there is no model {name[:80]!r} here; this server has {model['id']!r}"
            raise Refused(404, message, param="model", code="model_not_found")

    @routes.get("/v1/models")
    async def models() -> Response:
        return as_json({"object": "list", "data": [model]})

    @routes.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        check_model(name)
        return as_json(model)

    @routes.post("/v1/chat/completions")
    async def completions(request: Request) -> Response:
        body = await bodies.read(request, bodies.OpenAIBody)
        check_model(body.model)
        check_supported(body)
        turns = bodies.check_messages(plain_messages(body.messages))
        if body.max_completion_tokens is not None:
            body.max_tokens = body.max_completion_tokens
        options = bodies.check_options(body, served.settings)
        room = prompts.room_for_prompt(served.context, options["max_tokens"], forget=False)
        ids, _, _ = prompts.render(served.tokenizer, turns, room, answer=True, forget=False)
        answer = served.desk.enter(Wanted(tokens=ids, **options))
        head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model["id"]}
        if body.stream:
            usage = bool(body.stream_options and body.stream_options.include_usage)
            return EventStream(served.desk, answer, chunks(answer, head, usage))
        done: list[Response] = []
        await served.desk.attend(answer, request.receive, whole(answer, head, done))
        return done[0] if done else Response(status_code=499)  # nobody is there to read it

    return routes


def check_supported(body: bodies.OpenAIBody) -> None:
    for name, idle in NOT_SUPPORTED.items():
        if getattr(body, name) not in idle:
            raise Refused(400, f"{name} is not supported by this server", param=name, code="unsupported_parameter")


def plain_messages(messages: list[bodies.OpenAIMessage]) -> list[bodies.Message]:
    """Roles user and assistant with strings. A system message goes in front of the user's, as it does in training."""
    plain, system = [], ""
    for i, message in enumerate(messages):
        content = message.content
        if isinstance(content, list):
            other = next((part.type for part in content if part.type != "text" or part.text is None), None)
            if other is not None:
                raise Refused(400, f"message {i}: content of type {other[:40]!r} is not supported", param="messages")
            content = "".join(part.text for part in content)
        if content is None:
            raise Refused(400, f"message {i} has no content", param="messages")
        if message.role in ("system", "developer"):
            if plain:
                raise Refused(400, f"message {i}: a system message must come first", param="messages")
            system += content + "\n\n"
        else:
            if system and message.role == "user":
                content, system = system + content, ""
            plain.append(bodies.Message(role=message.role, content=content))
    if system:
        raise Refused(400, "a user message must follow the system message", param="messages")
    return plain


def reason(finish: str) -> str:
    """OpenAI's finish_reason."""
    return "length" if finish == "length" else "stop"


def used(answer: Answer) -> dict:
    prompt = len(answer.request.tokens)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": answer.tokens,
        "total_tokens": prompt + answer.tokens,
    }


async def chunks(answer: Answer, head: dict, usage: bool) -> AsyncGenerator[bytes]:
    """The answer as chat.completion.chunk events, then [DONE]."""
    head = {**head, "object": "chat.completion.chunk"}

    def chunk(delta: dict, finish: str | None = None) -> bytes:
        extra = {"usage": None} if usage else {}
        return event({**head, "choices": [{"index": 0, "delta": delta, "finish_reason": finish}], **extra})

    yield chunk({"role": "assistant", "content": ""})
    async for piece in answer.pieces():
        if piece is None:
            yield PING
            continue
        if piece.text:
            yield chunk({"content": piece.text})
        if piece.finish is None:
            continue
        if piece.finish.startswith("error"):
            yield event(openai_error(Refused(500, piece.finish.removeprefix("error: "))))
        else:
            yield chunk({}, reason(piece.finish))
    if usage:
        yield event({**head, "choices": [], "usage": used(answer)})
    yield event("[DONE]")


async def whole(answer: Answer, head: dict, done: list[Response]) -> None:
    """Collects the answer; its response is put into `done`."""
    text = ""
    async for piece in answer.pieces():
        if piece is None:
            continue
        text += piece.text
        if piece.finish is None:
            continue
        if piece.finish.startswith("error"):
            done.append(Refused(500, piece.finish.removeprefix("error: ")).response("/v1"))
            return
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason(piece.finish)}
        done.append(as_json({**head, "object": "chat.completion", "choices": [choice], "usage": used(answer)}))
