"""The page's own files. They are complete: nothing is fetched from elsewhere, and nothing may be."""

from __future__ import annotations

import hashlib
from importlib import resources

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

KINDS = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; base-uri 'none'; "
    "form-action 'none'; require-trusted-types-for 'script'; "
    # A notebook on this machine may show the page in a frame.
    "frame-ancestors 'self' http://localhost:* http://127.0.0.1:*"
)


def _load() -> dict[str, tuple[bytes, str]]:
    """{path: (content, media type)}."""
    folder = resources.files("nanochat_lib.serve") / "page"
    files = {}
    for file in folder.iterdir():
        kind = KINDS.get("." + file.name.rpartition(".")[2])
        if kind:
            path = {"index.html": "/", "logo.svg": "/logo.svg"}.get(file.name, f"/page/{file.name}")
            files[path] = file.read_bytes(), kind
    return files


FILES = _load()
PATHS = frozenset(FILES)


def router() -> APIRouter:
    routes = APIRouter()
    for path, (content, kind) in FILES.items():
        tag = f'"{hashlib.sha256(content).hexdigest()[:16]}"'

        async def file(request: Request, content: bytes = content, kind: str = kind, tag: str = tag) -> Response:
            headers = {"Cache-Control": "no-cache", "ETag": tag, "Content-Security-Policy": POLICY}
            if request.headers.get("if-none-match") == tag:
                return Response(status_code=304, headers=headers)
            return Response(content, media_type=kind, headers=headers)

        routes.add_route(path, file, methods=["GET", "HEAD"])
    return routes
