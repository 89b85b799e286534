"""A headless Chromium, driven over its DevTools protocol: no driver program is needed besides."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
KEYS = {"Enter": 13, "Escape": 27, "ArrowRight": 39, "ArrowLeft": 37, "Home": 36, "End": 35, "Tab": 9}


def path() -> str | None:
    """The browser's program; $CHROMIUM names another one."""
    return shutil.which(os.environ.get("CHROMIUM", "")) or next(filter(None, map(shutil.which, NAMES)), None)


class Page:
    """One page. `run` evaluates JavaScript (awaiting promises) and returns its value as plain data."""

    def __init__(self, connection: object) -> None:
        self.connection, self.number, self.events = connection, 0, []
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: object) -> dict:
        self.number += 1
        self.connection.send(json.dumps({"id": self.number, "method": method, "params": params}))
        while True:
            message = json.loads(self.connection.recv(timeout=30))
            if message.get("id") == self.number:
                assert "error" not in message, message
                return message["result"]
            self.events.append(message)

    def open(self, url: str) -> None:
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && document.querySelector('#facts')?.textContent")

    def run(self, code: str) -> object:
        found = self.call("Runtime.evaluate", expression=code, awaitPromise=True, returnByValue=True, userGesture=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def until(self, condition: str, seconds: float = 15.0) -> object:
        """Waits until the JavaScript `condition` is true, and returns its value."""
        end = time.monotonic() + seconds
        while not (value := self.run(f"(v => v instanceof Node || v)({condition})")):
            assert time.monotonic() < end, f"never true: {condition}\n{self.run('document.body.innerText')[-500:]}"
            time.sleep(0.02)
        return value

    def click(self, selector: str, index: int = 0) -> None:
        """A real click in the middle of what `selector` finds; fails if something else lies above it."""
        found = f"document.querySelectorAll({json.dumps(selector)})[{index}]"
        x, y = self.run(
            f"(() => {{ const e = {found}; e.scrollIntoView({{block: 'center'}}); const r = e.getBoundingClientRect();"
            f" const x = r.x + r.width / 2, y = r.y + r.height / 2, top = document.elementFromPoint(x, y);"
            f" if (!e.contains(top)) throw new Error('covered by ' + (top && top.outerHTML)); return [x, y] }})()"
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def point(self, selector: str, index: int = 0) -> None:
        found = f"document.querySelectorAll({json.dumps(selector)})[{index}]"
        x, y = self.run(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({found}.getBoundingClientRect())")
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def type(self, text: str) -> None:
        self.call("Input.insertText", text=text)

    def press(self, key: str, modifiers: int = 0) -> None:
        """modifiers: 1 Alt, 2 Ctrl, 8 Shift."""
        code = KEYS.get(key, ord(key[0].upper()))
        text = {"text": "\r"} if key == "Enter" else {}
        common = {"key": key, "windowsVirtualKeyCode": code, "modifiers": modifiers}
        self.call("Input.dispatchKeyEvent", type="keyDown" if text else "rawKeyDown", **common, **text)
        self.call("Input.dispatchKeyEvent", type="keyUp", **common)

    def size(self, width: int, height: int, mobile: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=mobile)

    def scheme(self, name: str) -> None:
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def picture(self, file: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        file.write_bytes(base64.b64decode(data))

    def problems(self) -> list[str]:
        """What the console has complained about so far: exceptions, broken policies, missing files."""
        self.run("0")
        found = []
        for event in self.events:
            params = event.get("params", {})
            if event.get("method") == "Runtime.exceptionThrown":
                found.append(json.dumps(params["exceptionDetails"])[:500])
            elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
                found.append(f"{params['entry']['text']} {params['entry'].get('url', '')}")
        return found


@contextlib.contextmanager
def browser() -> Iterator[Page]:
    """A fresh browser without a history, ended with all its processes."""
    from websockets.sync.client import connect

    # Its profile may be written to until its last process is gone.
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [
            path(), "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
            "--disable-extensions", "--disable-background-networking", "--disable-component-update", "--disable-sync",
            "--hide-scrollbars", "--remote-debugging-port=0", f"--user-data-dir={folder}", "--window-size=1200,800",
            "about:blank",
        ]  # fmt: skip
        process = subprocess.Popen(
            command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, start_new_session=True
        )
        try:
            for line in process.stderr:
                if found := re.search(r"ws://([^/\s]+)/", line):
                    break
            else:
                raise AssertionError("the browser did not start")
            import httpx

            targets = httpx.get(f"http://{found[1]}/json/list", timeout=20).json()
            target = next(target for target in targets if target["type"] == "page")
            with connect(target["webSocketDebuggerUrl"], max_size=None) as connection:
                yield Page(connection)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.stderr.close()
            process.wait()
