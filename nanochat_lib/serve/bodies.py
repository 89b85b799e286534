"""What may stand in a request: types first (HTTP 422), then nanochat's limits (HTTP 400). Nothing is clamped.

A body is read with a limit on its size and its time before anything looks into it.
"""

from __future__ import annotations

import asyncio
import math
import random
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from starlette.requests import ClientDisconnect, Request

from nanochat_lib.serve.refusal import Refused

MOST_MESSAGES, MOST_CHARS, MOST_CHARS_IN_ALL = 500, 8_000, 32_000  # nanochat's
MOST_TOKENS = 4_096
MOST_STOPS, MOST_STOP_CHARS = 4, 200
MOST_BYTES = 1 << 20  # 32,000 characters take at most 384,000 bytes as JSON, escapes included
READ_SECONDS = 30.0  # for a whole body
Shape = TypeVar("Shape", bound=BaseModel)


class Body(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", allow_inf_nan=False)


class Message(Body):
    role: str
    content: str


class Options(Body):
    """How an answer is drawn; what is missing or null is the server's default."""

    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    seed: int | None = None


class ChatBody(Options):
    """POST /chat/completions. The first four are nanochat's; `forget_oldest` and `details` are for the page."""

    messages: list[Message]
    stop: str | list[str] | None = None
    forget_oldest: bool = False  # drop the oldest exchanges of a conversation that is too long, instead of refusing it
    details: bool = False  # an event in front with what was forgotten, and the reason of the end in the last one


class TokensBody(Body):
    """POST /tokens."""

    messages: list[Message]
    top: int = 8
    forget_oldest: bool = False


class Part(Body):
    type: str
    text: str | None = None


class OpenAIMessage(Body):
    role: str
    content: str | list[Part] | None = None


class StreamOptions(Body):
    include_usage: bool = False


class OpenAIBody(Options):
    """POST /v1/chat/completions: what of OpenAI's request this server understands, and what it must refuse."""

    model: str
    messages: list[OpenAIMessage]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    max_completion_tokens: int | None = None
    n: int | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logprobs: bool | None = None
    logit_bias: dict[str, float] | None = None
    tools: list | None = None
    functions: list | None = None
    response_format: dict | None = None


async def read(request: Request, shape: type[Shape]) -> Shape:
    """The request's body as a `shape`. Refused: 413 too large, 408 too slow, 415 not JSON, 422 malformed."""
    kind = request.headers.get("content-type", "").split(";")[0].strip().lower()
    if kind != "application/json" and not kind.endswith("+json"):
        # A form on a foreign page could send any other type without asking.
        raise Refused(415, "send JSON with the header Content-Type: application/json")
    length = request.headers.get("content-length", "")
    if length.isdecimal() and (len(length) > 12 or int(length) > MOST_BYTES):
        raise _too_large()
    body = bytearray()
    try:
        async with asyncio.timeout(READ_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > MOST_BYTES:
                    raise _too_large()
    except TimeoutError:
        raise Refused(408, f"the body did not come within {READ_SECONDS:.0f} seconds") from None
    except ClientDisconnect:
        raise Refused(400, "the client left before its body was whole") from None
    try:
        return shape.model_validate_json(bytes(body))
    except ValidationError as error:
        problems = error.errors(include_url=False, include_input=False, include_context=False)[:10]
        param = str(problems[0]["loc"][0]) if problems[0]["loc"] else None
        raise Refused(422, problems, param=param) from None


def _too_large() -> Refused:
    return Refused(413, f"the body is larger than {MOST_BYTES:,} bytes", headers={"Connection": "close"})


def check_messages(messages: list[Message], least: int = 1) -> list[tuple[str, str]]:
    """(role, content) of each message, or Refused with the limit that is broken."""
    if not least <= len(messages) <= MOST_MESSAGES:
        raise Refused(
            400, f"messages: there are {len(messages)}, allowed are {least} to {MOST_MESSAGES}", param="messages"
        )
    for i, message in enumerate(messages):
        if message.role not in ("user", "assistant"):
            raise Refused(
                400, f"message {i}: the role must be user or assistant, not {message.role[:40]!r}", param="messages"
            )
        if not message.content:
            raise Refused(400, f"message {i} is empty", param="messages")
        if len(message.content) > MOST_CHARS:
            raise Refused(
                400,
                f"message {i} has {len(message.content):,} characters, allowed are {MOST_CHARS:,}",
                param="messages",
            )
    total = sum(len(message.content) for message in messages)
    if total > MOST_CHARS_IN_ALL:
        raise Refused(
            400, f"the messages have {total:,} characters together, allowed are {MOST_CHARS_IN_ALL:,}", param="messages"
        )
    return [(message.role, message.content) for message in messages]


def check_options(body: Any, defaults: Any) -> dict[str, Any]:
    """temperature, top_k, top_p, max_tokens, seed and stop for the engine, `defaults` filled in; or Refused."""

    def within(name: str, least: float, most: float) -> Any:
        value = getattr(body, name)
        if value is None:
            return getattr(defaults, name, None)
        if not (math.isfinite(value) and least <= value <= most):
            raise Refused(400, f"{name} {value:g} must be between {least:g} and {most:g}", param=name)
        return value

    top_p = within("top_p", 0.0, 1.0)
    if top_p == 0:
        raise Refused(400, "top_p 0 would let no token be drawn; it must be above 0 and at most 1", param="top_p")
    seed = body.seed if body.seed is not None else random.randrange(2**31)
    if not -(2**63) <= seed < 2**63:
        raise Refused(400, "seed must fit into 64 bits", param="seed")
    stop = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop or ())
    if len(stop) > MOST_STOPS or any(not 1 <= len(text) <= MOST_STOP_CHARS for text in stop):
        raise Refused(400, f"stop: at most {MOST_STOPS} strings of 1 to {MOST_STOP_CHARS} characters", param="stop")
    return {
        "temperature": within("temperature", 0.0, 2.0),
        "top_k": within("top_k", 0, 200) or None,
        "top_p": None if top_p == 1 else top_p,
        "max_tokens": within("max_tokens", 1, MOST_TOKENS),
        "seed": seed % 2**32,
        "stop": stop,
    }
