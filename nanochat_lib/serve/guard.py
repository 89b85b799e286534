"""Who may talk to the server at all. In front of every route, in this order:

- Host: a server on the loopback address answers to local names only. A foreign page whose own name was made to point at
  127.0.0.1 (DNS rebinding) would otherwise be of the same origin as this server.
- Origin: a page of another origin is refused unless it was named (CORS is closed).
- Token, where one is set: `Authorization: Bearer …`. The page's own files and /health need none and tell nothing.
"""

from __future__ import annotations

import hmac
import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanochat_lib.serve.refusal import Refused

LOCAL_NAMES = ("localhost", "127.0.0.1", "::1")
SAFE = {
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
}


def is_loopback(host: str) -> bool:
    """Whether a server bound to `host` is reached from this machine alone."""
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return host == "localhost"


class Guard:
    """`host`: what the server is bound to (None: do not check). `open_paths` need no token."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        host: str | None,
        token: str | None,
        allow_origins: tuple[str, ...],
        open_paths: frozenset[str],
    ) -> None:
        self.app, self.token, self.open_paths = app, token and token.encode(), open_paths
        self.origins = {origin.rstrip("/").lower() for origin in allow_origins}
        names = {urlsplit(origin).hostname for origin in self.origins}
        self.names = {*LOCAL_NAMES, host, *names} if host and is_loopback(host) and "*" not in self.origins else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        if scope["type"] != "http":  # a websocket: there is none here
            return await send({"type": "websocket.close", "code": 1000})
        headers = Headers(scope=scope)
        origin = headers.get("origin", "").rstrip("/").lower()
        allowed = bool(origin) and (origin in self.origins or "*" in self.origins)

        async def guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                for name, value in SAFE.items():
                    answer.setdefault(name, value)
                if self.origins:
                    answer.add_vary_header("Origin")
                if allowed:
                    answer["Access-Control-Allow-Origin"] = origin
                    answer["Access-Control-Expose-Headers"] = "Retry-After"
            await send(message)

        try:
            self.check_host(headers)
            if origin and not allowed and not self.same_origin(origin, headers):
                raise Refused(403, f"pages of {origin[:100]} may not use this server; --allow-origin lets them")
            preflight = scope["method"] == "OPTIONS" and "access-control-request-method" in headers
            if allowed and preflight:
                answer = Response(status_code=204, headers=self.permission(headers))
            else:
                self.check_token(scope, headers)
                answer = self.app
        except Refused as refused:
            answer = refused.response(scope["path"])
        await answer(scope, receive, guarded)

    def check_host(self, headers: Headers) -> None:
        if self.names is None:
            return
        try:
            name = urlsplit(f"//{headers.get('host', '')}").hostname
        except ValueError:
            name = None
        if name not in self.names:
            raise Refused(
                403, "this server answers to localhost and 127.0.0.1 only; --allow-origin adds the name of a proxy"
            )

    @staticmethod
    def same_origin(origin: str, headers: Headers) -> bool:
        return origin.split("://", 1)[-1] == headers.get("host", "").lower()

    def check_token(self, scope: Scope, headers: Headers) -> None:
        if self.token is None or scope["path"] in self.open_paths:
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), self.token):
            raise Refused(
                401,
                "this server needs its token: Authorization: Bearer …",
                code="invalid_api_key",
                headers={"WWW-Authenticate": "Bearer"},
            )

    @staticmethod
    def permission(headers: Headers) -> dict[str, str]:
        return {
            "Access-Control-Allow-Methods": "GET, POST",
            "Access-Control-Allow-Headers": headers.get("access-control-request-headers", ""),
            "Access-Control-Max-Age": "600",
        }
