"""Who may talk to the server: names, origins, the token; and that the page can be nothing but what it is."""

from __future__ import annotations

import re
from pathlib import Path

import httpx
import pytest
from serving import FakeBatching, site

from nanochat_lib.cli import build_parser
from nanochat_lib.serve import files
from nanochat_lib.serve.guard import is_loopback

PAGE = Path(files.__file__).parent / "page"
HI = {"messages": [{"role": "user", "content": "Hi"}]}
EVIL = "https://evil.example"


@pytest.fixture(scope="module")
def closed():
    """As it starts by default."""
    with site() as here:
        yield here


@pytest.fixture(scope="module")
def opened():
    """With a token, and one foreign origin."""
    with site(token="s3cret", allow_origins=("https://good.example",)) as here:
        yield here


def test_only_this_machine_unless_asked() -> None:
    args = build_parser().parse_args(["serve"])
    assert args.host == "127.0.0.1" and args.allow_origin == [] and args.token is None
    assert is_loopback("127.0.0.1") and is_loopback("127.8.9.10") and is_loopback("::1") and is_loopback("localhost")
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.168.1.5", "example.org", "127.0.0.1.example.org")))


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8000", "127.0.0.1.evil.example", "", "[::1", "a@b"])
def test_a_foreign_name_for_this_machine_is_refused(closed, host: str) -> None:
    for path in ("/", "/health", "/v1/models"):
        response = closed.client.get(path, headers={"Host": host})
        assert response.status_code == 403 or (host == "" and response.status_code == 400)
    assert closed.client.post("/chat/completions", json=HI, headers={"Host": host}).status_code in (400, 403)


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:8000", "127.0.0.1:1", "[::1]:8000"])
def test_local_names_are_answered(closed, host: str) -> None:
    assert closed.client.get("/health", headers={"Host": host}).status_code == 200


def test_a_server_for_the_network_answers_to_any_name() -> None:
    with site(host="0.0.0.0") as here:
        assert here.client.get("/health", headers={"Host": "nanochat.example"}).status_code == 200


@pytest.mark.parametrize("origin", [EVIL, "null", "http://localhost:1", "file://", "https://good.example.evil.example"])
def test_foreign_pages_are_refused_and_get_no_permission(closed, opened, origin: str) -> None:
    for here in closed, opened:
        response = here.client.post(
            "/chat/completions", json=HI, headers={"Origin": origin, "Authorization": "Bearer s3cret"}
        )
        assert response.status_code == 403
        ask = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        preflight = here.client.options("/chat/completions", headers=ask)
        assert preflight.status_code == 403
        for found in response, preflight:
            assert not [name for name in found.headers if name.startswith("access-control")]


def test_another_port_of_this_machine_is_another_origin(closed) -> None:
    foreign = closed.url.rpartition(":")[0] + ":9"
    assert closed.client.post("/chat/completions", json=HI, headers={"Origin": foreign}).status_code == 403


def test_the_page_s_own_origin_and_named_ones_may(closed, opened) -> None:
    own = closed.client.post("/chat/completions", json=HI, headers={"Origin": closed.url})
    assert own.status_code == 200
    good = {"Origin": "https://good.example"}
    ask = {**good, "Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization,x-y"}
    preflight = opened.client.options("/v1/chat/completions", headers=ask)  # a browser sends no token with it
    assert preflight.status_code == 204
    assert preflight.headers["access-control-allow-origin"] == "https://good.example"
    assert preflight.headers["access-control-allow-headers"] == "authorization,x-y"
    assert "access-control-allow-credentials" not in preflight.headers
    named = opened.client.post("/chat/completions", json=HI, headers={**good, "Authorization": "Bearer s3cret"})
    assert named.status_code == 200 and named.headers["access-control-allow-origin"] == "https://good.example"
    assert "Origin" in named.headers["vary"]
    assert opened.client.get("/health", headers={"Host": "good.example"}).status_code == 200  # a proxy's name


@pytest.mark.parametrize("given", [None, "", "Bearer", "Bearer s3cre", "Bearer s3cret1", "Basic s3cret",
                                   "Bearer S3CRET", "s3cret"])  # fmt: skip
def test_without_the_token_nothing_is_told(opened, given: str | None) -> None:
    headers = {} if given is None else {"Authorization": given}
    for path in ("/stats", "/info", "/v1/models", "/nosuch"):
        response = opened.client.get(path, headers=headers)
        assert response.status_code == 401 and response.headers["www-authenticate"] == "Bearer"
    refused = opened.client.post("/v1/chat/completions", json={"model": "nanochat", **HI}, headers=headers)
    assert refused.status_code == 401 and refused.json()["error"]["code"] == "invalid_api_key"
    assert opened.client.post("/tokens", json=HI, headers=headers).status_code == 401


def test_with_the_token_and_what_needs_none(opened) -> None:
    for given in "Bearer s3cret", "bearer s3cret":
        assert opened.client.get("/stats", headers={"Authorization": given}).status_code == 200
    latin = httpx.Headers({b"Authorization": "Bearer s3cré".encode("latin-1")})
    assert opened.client.get("/stats", headers=latin).status_code == 401
    for path in ("/", "/logo.svg", "/health", "/page/main.js", "/page/style.css"):
        assert opened.client.get(path).status_code == 200


def test_the_page_is_told_to_load_nothing_else(closed) -> None:
    for path, kind in {"/": "text/html", "/page/main.js": "text/javascript", "/logo.svg": "image/svg+xml"}.items():
        response = closed.client.get(path)
        assert response.headers["content-type"].startswith(kind)
        policy = dict(part.split(" ", 1) for part in response.headers["content-security-policy"].split("; "))
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["style-src"] == "'self'"
        assert policy["require-trusted-types-for"] == "'script'" and "unsafe" not in str(policy)
        assert response.headers["x-content-type-options"] == "nosniff"
        again = closed.client.get(path, headers={"If-None-Match": response.headers["etag"]})
        assert again.status_code == 304 and again.content == b""
        assert closed.client.head(path).status_code == 200


def test_the_page_s_files_name_no_other_place_and_never_write_html() -> None:
    sources = {file.name: file.read_text(encoding="utf-8") for file in PAGE.iterdir()}
    assert {"index.html", "main.js", "markdown.js", "style.css", "logo.svg"} <= set(sources)
    for name, text in sources.items():
        text = text.replace('xmlns="http://www.w3.org/2000/svg"', "")
        assert not re.search(r"(src|href)=.(https?:)?//|@import|url\(", text), name
        writers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function"
        assert not re.search(writers, text), name
        assert not re.search(r"\son\w+=|style=", text) or not name.endswith(".html"), name
    used = set(re.findall(r"(?:src|href)=\"(?:page/)?([\w.]+)\"", sources["index.html"]))
    used |= set(re.findall(r"from \"\./([\w.]+)\"", "".join(sources.values())))
    assert used == set(sources) - {"index.html"}  # nothing is missing, nothing is left over
    assert sum(len(text) for text in sources.values()) < 80_000  # light


def test_no_websocket_and_no_generated_pages(closed) -> None:
    for path in ("/docs", "/redoc", "/openapi.json"):
        assert closed.client.get(path).status_code == 404
    head = "GET /chat/completions HTTP/1.1\r\nHost: localhost\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    key = "Sec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n"
    sock = closed.raw((head + key).encode())
    assert b" 101 " not in sock.recv(1000)
    sock.close()
    assert isinstance(closed.batching, FakeBatching)
