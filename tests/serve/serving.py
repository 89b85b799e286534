"""A batching engine that tells a script, and a real server around it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

import httpx

from nanochat_lib.batching import Piece, Request
from nanochat_lib.serve import server
from nanochat_lib.serve.app import Settings, make_app
from nanochat_lib.tokenizer import SPECIAL_TOKENS, Tokenizer

TOKENIZER = Tokenizer([])  # every byte is a token
BOS, US, UE, AS, AE, PS, PE, OS, OE = (TOKENIZER.encode_special(name) for name in SPECIAL_TOKENS)


def said(*parts: int | str) -> list[int]:
    return [t for part in parts for t in (TOKENIZER.encode(part) if isinstance(part, str) else [part])]


def echo(request: Request) -> list[str]:
    """The user's last message again, a character a piece."""
    text = TOKENIZER.decode(request.tokens).rpartition("<|user_start|>")[2].partition("<|user_end|>")[0]
    return list(text)


class FakeBatching:
    """What `script` gives for a request is told piece by piece, a `pause` before each. A str is a piece's text, or the
    finish if it starts with NUL. At most `rows` at a time, the others in order."""

    def __init__(
        self, script: Callable[[Request], list[str]] = echo, *, rows: int = 2, pause: float = 0.0, context: int = 2000
    ) -> None:
        self.script, self.rows, self.pause, self.context = script, rows, pause, context
        self.requests: list[Request] = []
        self.told = 0  # pieces, over all requests
        self.lock, self.free = threading.Lock(), threading.Semaphore(rows)
        self.busy = self.waiting = 0
        self.broken = ""
        self.gate = threading.Event()  # while not set, nothing is told
        self.gate.set()

    def submit(self, request: Request, deliver: Callable[[Piece], None]) -> Ticket:
        ticket = Ticket()
        with self.lock:
            self.requests.append(request)
            self.waiting += 1
        threading.Thread(target=self.tell, args=(request, deliver, ticket), daemon=True).start()
        return ticket

    def tell(self, request: Request, deliver: Callable[[Piece], None], ticket: Ticket) -> None:
        with self.free:
            with self.lock:
                self.waiting -= 1
                self.busy += 1
            finish = "end"
            for n, text in enumerate(self.script(request)):
                while not (self.gate.wait(0.01) or ticket.cancelled.is_set()):
                    pass
                if ticket.cancelled.wait(self.pause) if self.pause else ticket.cancelled.is_set():
                    finish = "cancelled"
                elif text.startswith("\0"):
                    finish = text[1:]
                elif request.max_tokens is not None and n >= request.max_tokens:
                    finish = "length"
                else:
                    self.told += 1
                    deliver(Piece([65], [1], text, None))
                    continue
                break
            with self.lock:
                self.busy -= 1
            deliver(Piece([], [], "", finish))

    def stats(self) -> dict:
        with self.lock:
            return {
                "rows": self.rows, "busy": self.busy, "waiting": self.waiting, "bytes_per_row": 1, "broken": self.broken
            }  # fmt: skip

    def close(self) -> None:
        pass


class Ticket:
    def __init__(self) -> None:
        self.cancelled = threading.Event()

    def cancel(self) -> None:
        self.cancelled.set()


class Site:
    """A running server: its address, the engine behind it, a client."""

    def __init__(self, url: str, app: object, batching: FakeBatching) -> None:
        self.url, self.app, self.batching = url, app, batching
        self.client = httpx.Client(base_url=url, timeout=20)

    @property
    def desk(self) -> object:
        return self.app.state.served.desk

    def chat(self, *texts: str, **body: object) -> httpx.Response:
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
        return self.client.post("/chat/completions", json={"messages": messages, **body})

    def until(self, holds: Callable[[], object], seconds: float = 10.0) -> None:
        """Waits until `holds()`; how long depends on the machine, that it comes true does not."""
        end = time.monotonic() + seconds
        while not holds():
            assert time.monotonic() < end, "it never came true"
            time.sleep(0.01)

    def idle(self) -> bool:
        stats = self.batching.stats()
        return stats["busy"] == stats["waiting"] == 0 and not self.desk.open

    def raw(self, data: bytes = b"") -> socket.socket:
        """A bare connection that has sent `data`."""
        host, port = self.url.removeprefix("http://").rsplit(":", 1)
        sock = socket.create_connection((host, int(port)), timeout=20)
        sock.sendall(data)
        return sock


@contextlib.contextmanager
def site(batching: object | None = None, next_tokens: object = None, **settings: object) -> Iterator[Site]:
    batching = batching or FakeBatching()
    context = batching.context
    app = make_app(batching, TOKENIZER, Settings(**settings), context=context, next_tokens=next_tokens)
    with server.running(app) as url:
        here = Site(url, app, batching)
        with here.client:
            yield here


def post(path: str, body: bytes, *headers: str) -> bytes:
    lines = [f"POST {path} HTTP/1.1", "Host: localhost", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body
