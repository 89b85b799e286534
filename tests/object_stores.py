"""Object stores on this machine: moto's S3 behind a switch that makes it refuse, and an emulator of Google's."""

import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "x", "AWS_SECRET_ACCESS_KEY": "y", "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_MAX_ATTEMPTS": "1",
}  # fmt: skip


class S3Server:
    """`fault(method, path)` may return an HTTP status to refuse a request with; None lets it pass."""

    def __init__(self) -> None:
        from moto.moto_server.werkzeug_app import DomainDispatcherApplication, create_backend_app
        from werkzeug.serving import WSGIRequestHandler, make_server

        class Silent(WSGIRequestHandler):
            def log(self, *args: object) -> None:
                pass

        self.fault: Callable[[str, str], int | None] = lambda method, path: None
        self._app = DomainDispatcherApplication(create_backend_app)
        self._server = make_server("127.0.0.1", 0, self._answer, threaded=True, request_handler=Silent)
        self.address = f"http://127.0.0.1:{self._server.port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def _answer(self, environ: dict, start: Callable) -> Iterator[bytes]:
        status = self.fault(environ["REQUEST_METHOD"], environ["PATH_INFO"])
        if status is None:
            return self._app(environ, start)
        start(f"{status} Refused", [("Content-Type", "application/xml")])
        code = {403: "AccessDenied", 404: "NoSuchBucket"}.get(status, "InternalError")
        return [f"<Error><Code>{code}</Code><Message>refused for the test</Message></Error>".encode()]

    def request(self, method: str, path: str, data: bytes | None = None) -> None:
        urllib.request.urlopen(urllib.request.Request(f"{self.address}/{path}", data, method=method)).close()

    def bucket(self, name: str) -> str:
        self.request("PUT", name)
        return f"s3://{name}"

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


@contextmanager
def s3_server() -> Iterator[S3Server]:
    """A running server that s3:// URLs of this process go to."""
    pytest.importorskip("moto.moto_server.werkzeug_app")
    pytest.importorskip("s3fs")
    server = S3Server()
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (ENVIRONMENT | {"AWS_ENDPOINT_URL": server.address}).items():
            patch.setenv(name, value)
        yield server
    server.stop()


@contextmanager
def gs_server(bucket: str) -> Iterator[str]:
    """A running server that gs:// URLs of this process go to; the URL of its one bucket."""
    emulator = pytest.importorskip("gcp_storage_emulator.server")
    pytest.importorskip("gcsfs")
    server = emulator.create_server("127.0.0.1", 0, in_memory=True, default_bucket=bucket)
    server.start()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("STORAGE_EMULATOR_HOST", f"http://127.0.0.1:{server._api._httpd.server_address[1]}")
        yield f"gs://{bucket}"
    server.stop()
