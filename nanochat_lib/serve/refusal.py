"""What the server says no to, in the words and the JSON shape of the two interfaces.

nanochat's endpoints answer `{"detail": …}`; those below /v1 answer OpenAI's `{"error": {"message": …}}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

KINDS = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class Refused(Exception):
    """A request that is not answered: HTTP status, one line why, and for OpenAI's clients the parameter at fault."""

    def __init__(
        self,
        status: int,
        message: Any,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.param, self.code, self.headers = status, message, param, code, headers

    def response(self, path: str) -> Response:
        """The answer to a request for `path`."""
        content = openai_error(self) if is_openai(path) else {"detail": self.message}
        return as_json(content, self.status, self.headers)


def is_openai(path: str) -> bool:
    return path == "/v1" or path.startswith("/v1/")


def openai_error(refused: Refused) -> dict:
    kind = KINDS.get(refused.status, "invalid_request_error" if refused.status < 500 else "server_error")
    message = refused.message if isinstance(refused.message, str) else _first(refused.message)
    return {"error": {"message": message, "type": kind, "param": refused.param, "code": refused.code}}


def _first(problems: list[dict]) -> str:
    """One line of pydantic's list of problems."""
    where = ".".join(str(part) for part in problems[0]["loc"])
    return f"{where}: {problems[0]['msg']}" if where else problems[0]["msg"]


def to_json(content: Any) -> str:
    """JSON with every character as itself; halves of characters, which UTF-8 cannot hold, become U+FFFD."""
    text = json.dumps(content, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
    return text if text.isascii() else text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")


def as_json(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(to_json(content), status, dict(headers or {}), media_type="application/json")
