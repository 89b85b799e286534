"""The web application: a page to chat with, nanochat's endpoints, and OpenAI's, over one batching engine.

    app = make_app(BatchingEngine(engine), tokenizer, context=engine.context)
    app = make_app(OneAtATime(my_engine, tokenizer), tokenizer, context=128)     # any engine with `generate`

Generation runs in the engine's own thread; the event loop only carries text, so /health answers meanwhile.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from fastapi import FastAPI
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

from nanochat_lib.errors import UserError
from nanochat_lib.sampling import check_sampling
from nanochat_lib.serve import files, native, openai_api
from nanochat_lib.serve.bodies import MOST_TOKENS
from nanochat_lib.serve.desk import Desk
from nanochat_lib.serve.guard import Guard
from nanochat_lib.serve.next_tokens import TokenTable
from nanochat_lib.serve.refusal import Refused


@dataclass(frozen=True)
class Settings:
    """What the server offers and to whom. The first four are the defaults of a request that does not say."""

    temperature: float = 0.8
    top_k: int | None = 50
    top_p: float | None = None
    max_tokens: int = 512
    queue: int = 32  # requests that may wait for a row; more are told to come back (429)
    host: str | None = "127.0.0.1"  # what the server is bound to; a loopback address answers to local names only
    token: str | None = None
    allow_origins: tuple[str, ...] = ()
    model: str = "nanochat"  # its name in OpenAI's interface
    title: str = "nanochat"  # what the page shows
    device: str = "cpu"


@dataclass
class Served:
    """What the routes share."""

    settings: Settings
    tokenizer: Any
    context: int
    desk: Desk
    tokens: TokenTable
    began: float

    def stats(self) -> dict[str, Any]:
        return self.desk.batching.stats()

    @property
    def ready(self) -> bool:
        return not (self.desk.stopping or self.stats().get("broken"))


def make_app(
    batching: Any,
    tokenizer: Any,
    settings: Settings | None = None,
    *,
    context: int,
    next_tokens: Callable[[list[int]], tuple[Any, Any, Any]] | None = None,
) -> FastAPI:
    """The application over `batching` (submit, stats and close of nanochat_lib.batching.BatchingEngine).

    `context`: most tokens of prompt and answer together. `next_tokens` (NextTokens) lets the page show what the model
    thought; without it the page shows the tokens alone. The application does not close `batching`. Raises UserError
    for settings out of range.
    """
    settings = settings or Settings()
    check_settings(settings)
    served = Served(
        settings, tokenizer, context, Desk(batching, settings.queue), TokenTable(tokenizer, next_tokens),
        time.monotonic(),
    )  # fmt: skip

    @contextlib.asynccontextmanager
    async def lifespan(_app: FastAPI) -> AsyncIterator[None]:
        yield
        served.desk.stop()
        served.tokens.close()

    # No generated documentation pages: they load scripts from elsewhere.
    app = FastAPI(title="nanochat", docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan)
    app.state.served = served
    app.include_router(files.router())
    app.include_router(native.router(served))
    app.include_router(openai_api.router(served))
    app.add_exception_handler(Refused, _refused)
    app.add_exception_handler(HTTPException, _http_error)
    app.add_exception_handler(Exception, _failed)
    app.add_middleware(
        Guard,
        host=settings.host,
        token=settings.token,
        allow_origins=settings.allow_origins,
        open_paths=files.PATHS | {"/health"},
    )
    return app


def check_settings(settings: Settings) -> None:
    check_sampling(settings.temperature, settings.top_k)
    if settings.temperature > 2:
        raise UserError(f"temperature {settings.temperature} must be at most 2")
    if settings.top_k is not None and settings.top_k > 200:
        raise UserError(f"top_k {settings.top_k} must be at most 200; 0 keeps the full vocabulary")
    if settings.top_p is not None and not 0 < settings.top_p <= 1:
        raise UserError(f"top_p {settings.top_p} must be above 0 and at most 1")
    if not 1 <= settings.max_tokens <= MOST_TOKENS:
        raise UserError(f"max_tokens {settings.max_tokens} must be between 1 and {MOST_TOKENS:,}")
    if settings.queue < 0:
        raise UserError(f"queue {settings.queue} must be at least 0")
    token = settings.token
    if token is not None and not (token and token.isascii() and token.isprintable() and token == token.strip()):
        raise UserError("the token must be of printable ASCII characters, without blanks around them")
    for origin in settings.allow_origins:
        if origin != "*" and (not origin.startswith(("http://", "https://")) or origin.rstrip("/").count("/") != 2):
            raise UserError(f"origin {origin!r} must look like https://name or http://name:port, without a path")


async def _refused(request: Request, refused: Refused) -> Response:
    return refused.response(request.url.path)


async def _http_error(request: Request, error: HTTPException) -> Response:
    message = {404: "there is nothing here", 405: "this address takes another method"}.get(error.status_code)
    return Refused(error.status_code, message or str(error.detail), headers=error.headers).response(request.url.path)


async def _failed(request: Request, error: Exception) -> Response:
    return Refused(500, "the server failed; its terminal says why").response(request.url.path)
