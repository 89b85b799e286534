"""Running the application: uvicorn with an end for everything that could hang.

Ctrl-C or SIGTERM: no new requests, every stream is told and ended, exit code 0. A second signal ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import os
import signal
import socket
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any
from urllib.parse import quote

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from nanochat_lib.errors import UserError
from nanochat_lib.serve.guard import is_loopback

GRACE = 5  # seconds that readers have at the end
PATIENCE = 30.0  # seconds without a whole request, or without taking any of an answer
MOST_CONNECTIONS = 1_000


class Connection(H11Protocol):
    """Drops clients that send half a request, or stop reading, and stay."""

    looked_at: Any = None
    looking: asyncio.TimerHandle | None = None
    stuck: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self.looking = self.loop.call_later(PATIENCE, self.look)

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self.looking, self.stuck):
            if timer:
                timer.cancel()
        super().connection_lost(exc)

    def look(self) -> None:
        """Between two looks a request must have come, unless one is being answered."""
        idle = self.cycle is None or self.cycle.response_complete
        if idle and self.cycle is self.looked_at:
            self.transport.abort()
            return
        self.looked_at = self.cycle
        self.looking = self.loop.call_later(PATIENCE, self.look)

    def pause_writing(self) -> None:
        super().pause_writing()
        self.stuck = self.loop.call_later(PATIENCE, self.transport.abort)

    def resume_writing(self) -> None:
        super().resume_writing()
        if self.stuck:
            self.stuck.cancel()


class Server(uvicorn.Server):
    """uvicorn's server with our end: streams first, and no signal raised again afterwards."""

    def __init__(self, app: Any) -> None:
        config = uvicorn.Config(
            app, http=Connection, ws="none", lifespan="on", log_level="warning", access_log=False, server_header=False,
            timeout_graceful_shutdown=GRACE, limit_concurrency=MOST_CONNECTIONS, proxy_headers=False,
        )  # fmt: skip
        super().__init__(config)
        self.desk = app.state.served.desk

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        if self.should_exit:
            os._exit(128 + sig)  # asked twice
        self.should_exit = True

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self.desk.stop()
        await super().shutdown(sockets)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 is any free one. Raises UserError when the address cannot be had."""
    if not 0 <= port <= 65535:
        raise UserError(f"port {port} must be between 0 and 65535; 0 takes any free one")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError):
        raise UserError(f"host {host!r} is not known; --host takes an address or a name of this machine") from None
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(1024)
    except OSError as error:
        sock.close()
        why = {
            errno.EADDRINUSE: f"port {port} of {host} is in use; stop what runs there or choose another with --port",
            errno.EACCES: f"port {port} of {host} is for the system; choose one from 1024 on with --port",
            errno.EADDRNOTAVAIL: f"host {host!r} is not an address of this machine; --host 0.0.0.0 means all of them",
        }
        raise UserError(why.get(error.errno, f"cannot listen on {host} port {port}: {error.strerror}")) from None
    return sock


def address(sock: socket.socket) -> str:
    """The URL to open; a server on all interfaces is reached at this machine's loopback address too."""
    host, port = sock.getsockname()[:2]
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


def run(app: Any, sock: socket.socket) -> None:
    """Serves until it is told to stop."""
    Server(app).run(sockets=[sock])


@contextlib.contextmanager
def running(app: Any, host: str = "127.0.0.1", port: int = 0) -> Iterator[str]:
    """The server in a thread, for notebooks and tests: `with running(app) as url: …`."""
    sock = bind(host, port)
    server = Server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]}, name="web server", daemon=True)
    thread.start()
    try:
        yield address(sock)
    finally:
        server.should_exit = True
        thread.join()


def greeting(url: str, settings: Any, about: str, stats: dict) -> list[str]:
    """What the terminal shows at the start."""
    secret = f"/#token={quote(settings.token, safe='')}" if settings.token else ""
    lines = [
        f"nanochat: {url}{secret} (Ctrl-C stops it)",
        f"{settings.title}: {about}; {stats['rows']} rows of {readable(stats['bytes_per_row'])}, "
        f"{settings.queue} requests may wait",
    ]
    if settings.host and not is_loopback(settings.host) and not settings.token:
        lines.append(f"everybody who reaches port {url.rpartition(':')[2]} of this machine can use it; see --token")
    return lines


def readable(count: int) -> str:
    """1536 → '1.5 KiB'."""
    size = float(count)
    for unit in ("bytes", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.4g} {unit}"
        size /= 1024
    return f"{size:.4g} GiB"
