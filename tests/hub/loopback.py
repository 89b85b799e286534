"""A server on 127.0.0.1 with the hub's routes, which can be told to misbehave; large files lie in a "bucket"."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

COMMIT = "c" * 40


class Fault:
    """What the server does with one request for a file's bytes."""

    def __init__(self, kind: str, value: object = None, headers: dict[str, str] | None = None) -> None:
        self.kind, self.value, self.headers = kind, value, headers or {}


class LoopbackHub:
    """`files[repo][revision][path] = bytes`; `beside[name] = bytes` are files outside of the hub.

    `faults[end of a path]` is a list: each request for that file takes the first one, and a file without any is served
    as it should be. `log` holds (method, path, headers) of every request.
    """

    def __init__(self, redirect_to: str = "") -> None:
        self.files: dict[str, dict[str, dict[str, bytes]]] = {}
        self.beside: dict[str, bytes] = {}
        self.faults: dict[str, list[Fault]] = {}
        self.log: list[tuple[str, str, dict[str, str]]] = []
        self.released = threading.Event()  # ends every stall
        self.lock = threading.Lock()
        self.server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": self}))
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.bucket = redirect_to or self.url
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def close(self) -> None:
        self.released.set()
        self.server.shutdown()
        self.server.server_close()

    def add(self, repo: str, path: str, data: bytes, revision: str = "main") -> None:
        self.files.setdefault(repo, {}).setdefault(revision, {})[path] = data

    def fault(self, name: str) -> Fault | None:
        with self.lock:
            for end, faults in self.faults.items():
                if name.endswith(end) and faults:
                    return faults.pop(0)
        return None

    def asked(self, method: str, end: str) -> list[dict[str, str]]:
        """Headers of the requests of `method` whose path ends like this."""
        return [headers for m, path, headers in self.log if m == method and urlsplit(path).path.endswith(end)]


class _Handler(BaseHTTPRequestHandler):
    hub: LoopbackHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *args: object) -> None:
        pass

    def reply(self, status: int, body: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def handle_one_request(self) -> None:
        with suppress(ConnectionError):  # the client was stopped
            super().handle_one_request()

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0))).decode()
        self.note()
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        repo, files = self.repo("/".join(parts[2:4]), parts[5] if len(parts) > 5 else "")
        if parts[:2] != ["api", "datasets"] or files is None:
            return self.reply(404, X_Error_Code="RepoNotFound")
        fault = self.hub.fault(f"{repo}/paths-info")
        if fault and fault.kind == "stall":
            self.hub.released.wait(20)
        elif fault:
            return self.reply(fault.value, b"<html>log in</html>", **fault.headers)
        paths = parse_qs(body).get("paths", [])
        return self.reply(200, json.dumps([_record(p, files[p], "path") for p in paths if p in files]).encode())

    def do_GET(self) -> None:
        self.note()
        parts = unquote(urlsplit(self.path).path).strip("/").split("/")
        if parts[:2] == ["api", "datasets"] and parts[4:5] == ["revision"]:
            repo, files = self.repo("/".join(parts[2:4]), "/".join(parts[5:]))
            if files is None:
                return self.reply(404, X_Error_Code="RevisionNotFound")
            siblings = [_record(path, data, "rfilename") for path, data in files.items()]
            info = {"id": repo, "sha": COMMIT, "private": False, "tags": [], "downloads": 0, "likes": 0}
            return self.reply(200, json.dumps(info | {"siblings": siblings}).encode())
        if parts[0] == "datasets" and parts[3:4] == ["resolve"]:
            path = "/".join(parts[5:])
            _, files = self.repo("/".join(parts[1:3]), parts[4])
            fault = self.hub.fault(f"resolve/{path}")
            if fault:
                return self.reply(fault.value, b"no", **fault.headers)
            if files is None or path not in files:
                return self.reply(404, X_Error_Code="EntryNotFound")
            sha = hashlib.sha256(files[path]).hexdigest()
            return self.reply(
                302, Location=f"{self.hub.bucket}/bucket/{'/'.join(parts[1:3])}/{path}?key=1", X_Repo_Commit=COMMIT,
                X_Linked_Size=str(len(files[path])), X_Linked_Etag=f'"{sha}"', Accept_Ranges="bytes", ETag='"pointer"',
            )  # fmt: skip
        if parts[0] == "bucket":
            revisions = self.hub.files.get("/".join(parts[1:3]), {})
            found = [files["/".join(parts[3:])] for files in revisions.values() if "/".join(parts[3:]) in files]
            return self.send(found[0]) if found else self.reply(404)
        if parts[0] == "beside":
            fault = self.hub.fault(f"beside/{parts[1]}")
            if fault and fault.kind == "bare":  # neither size nor version
                self.send_response(200)
                return self.end_headers()
            if fault:
                return self.reply(fault.value, b"no", **fault.headers)
            return self.send(self.hub.beside[parts[1]]) if parts[1] in self.hub.beside else self.reply(404)
        return self.reply(404)

    def note(self) -> None:
        with self.hub.lock:
            self.hub.log.append((self.command, self.path, dict(self.headers)))

    def repo(self, name: str, revision: str) -> tuple[str, dict[str, bytes] | None]:
        revisions = self.hub.files.get(name, {})
        exports = [r for r in revisions if r.startswith("refs/")]
        return name, revisions.get(exports[0] if revision == COMMIT and exports else revision)

    def send(self, data: bytes) -> None:
        """The bytes asked for, spoiled if this file has a fault left."""
        fault = self.hub.fault(urlsplit(self.path).path) if self.command == "GET" else None
        kind = fault.kind if fault else ""
        asked = self.headers.get("Range", "").removeprefix("bytes=").rstrip("-")
        start = int(asked) if asked and kind != "no range" else 0
        if kind == "status":
            return self.reply(fault.value, b"no", **fault.headers)
        if start >= len(data) and start:
            return self.reply(416, Content_Range=f"bytes */{len(data)}")
        body = data[start:]
        if kind == "flip":
            body = bytes([body[0] ^ 1]) + body[1:]
        if kind == "longer":
            body += b"x" * fault.value
        self.send_response(206 if start else 200)
        if start:
            self.send_header("Content-Range", f"bytes {start}-{len(data) - 1}/{len(data)}")
        self.send_header("ETag", f'"{hashlib.md5(data).hexdigest()}"')
        self.send_header("Accept-Ranges", "bytes")
        if kind == "unannounced":  # a body whose end is the connection's end, and comes too early
            self.send_header("Connection", "close")
        else:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return None
        if kind in ("cut", "stall", "unannounced"):
            self.wfile.write(body[: fault.value])
            self.wfile.flush()
            if kind == "stall":
                self.hub.released.wait(20)
            self.close_connection = True
        elif kind == "slow":  # `value` seconds in all
            for i in range(0, len(body), max(len(body) // 20, 1)):
                self.wfile.write(body[i : i + max(len(body) // 20, 1)])
                self.wfile.flush()
                time.sleep(fault.value / 20)
        else:
            self.wfile.write(body)
        return None


def _record(path: str, data: bytes, name: str) -> dict:
    """A file as the hub's API lists it: those in large-file storage with their sha256, small ones with a git id."""
    record = {"type": "file", name: path, "size": len(data), "oid": "0" * 40, "blobId": "0" * 40}
    sha = hashlib.sha256(data).hexdigest()
    lfs = {"size": len(data), "pointerSize": 134, "sha256": sha, "oid": sha}
    return record | {"lfs": lfs} if path.endswith(".parquet") else record
