"""Clients that die, dawdle, send halves or nonsense: the server stays up, and nothing of them stays."""

from __future__ import annotations

import gc
import json
import os
import signal
import struct
import subprocess
import sys
import time

import psutil
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import FakeBatching, post, site

from nanochat_lib.serve import bodies, server

HI = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
PATHS = ("/chat/completions", "/v1/chat/completions", "/tokens")
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
FIELDS = ("temperature", "top_k", "top_p", "max_tokens", "seed", "stop", "stream", "n", "top", "stream_options",
          "response_format", "logit_bias", "tools", "forget_oldest", "details")  # fmt: skip
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "system"]) | JSON, "content": st.text(max_size=9) | JSON}
)
BODY = st.fixed_dictionaries(
    {"messages": st.lists(MESSAGE, max_size=3) | JSON, "model": st.just("nanochat")},
    optional=dict.fromkeys(FIELDS, JSON),
)


@pytest.fixture(scope="module")
def sturdy():
    with site(FakeBatching(lambda request: ["a", "b"])) as here:
        yield here


@settings(max_examples=100)
@given(st.sampled_from(PATHS), BODY | JSON)
def test_any_json_is_answered_or_refused_but_never_fails(sturdy, path: str, body: object) -> None:
    headers = {"Content-Type": "application/json"}
    response = sturdy.client.post(path, content=json.dumps(body), headers=headers)
    assert response.status_code in (200, 400, 404, 422), response.text
    if response.status_code != 200:
        assert set(response.json()) in ({"detail"}, {"error"})
        assert len(response.text) < 5000


@settings(max_examples=60)
@given(st.sampled_from(PATHS), st.binary(max_size=60), st.integers(0, len(HI)))
def test_any_bytes_are_refused(sturdy, path: str, noise: bytes, at: int) -> None:
    body = HI[:at] + noise + HI[at:]
    response = sturdy.client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 400, 404, 422)


@settings(max_examples=30)
@given(st.binary(max_size=200))
def test_no_http_at_all(sturdy, noise: bytes) -> None:
    sock = sturdy.raw(noise)
    sock.close()
    assert sturdy.client.get("/health").status_code == 200


def test_half_requests_are_dropped_in_time(monkeypatch) -> None:
    monkeypatch.setattr(server, "PATIENCE", 0.3)
    monkeypatch.setattr(bodies, "READ_SECONDS", 0.3)
    whole = post("/chat/completions", HI)
    with site(FakeBatching(lambda request: ["x"])) as here:
        used = here.raw(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")  # a good request, then half of one
        assert b'"ok"' in used.recv(2000)
        used.sendall(b"GET /health HTT")
        for sock in (here.raw(), here.raw(b"POST /chat"), here.raw(whole[:60]), here.raw(whole[:-5]), used):
            answer = b""
            while more := sock.recv(2000):  # "" when the server has closed
                answer += more
            assert not answer or b" 408 " in answer
            sock.close()
        assert here.chat("Hi").status_code == 200
        assert not here.batching.stats()["busy"]


def test_a_request_may_take_its_time_between_others(monkeypatch) -> None:
    monkeypatch.setattr(server, "PATIENCE", 0.3)
    with site(FakeBatching(lambda request: ["x"] * 20, pause=0.05)) as here:  # longer than two looks
        assert here.chat("Hi").text.count("token") == 20


def test_a_reader_that_stops_reading_is_dropped(monkeypatch) -> None:
    monkeypatch.setattr(server, "PATIENCE", 0.3)
    with site(FakeBatching(lambda request: ["x" * 8000] * 100_000, pause=0.0001), max_tokens=4096) as here:
        sock = here.raw(post("/chat/completions", HI))
        assert b" 200 " in sock.recv(100)
        here.until(lambda: here.desk.open)
        here.until(here.idle)  # it reads no more, yet its row becomes free
        assert here.chat("Hi", max_tokens=1).status_code == 200
        sock.close()


def test_many_bodies_at_once_hold_no_memory(sturdy) -> None:
    big = post("/chat/completions", b" " * (bodies.MOST_BYTES + 1))
    for _ in range(5):
        socks = [sturdy.raw(big[:100_000]) for _ in range(10)]
        for sock in socks:
            assert b" 413 " in sock.recv(1000)
            # Reset instead of a polite end.
            sock.setsockopt(1, 13, struct.pack("ii", 1, 0))
            sock.close()
    assert sturdy.client.get("/health").status_code == 200


CLIENT = """
import sys, httpx
with httpx.stream("POST", sys.argv[1], json={"messages": [{"role": "user", "content": "Hi"}]}, timeout=60) as response:
    for line in response.iter_lines():
        print(line, flush=True)
"""


def test_a_client_killed_in_mid_stream_frees_its_row() -> None:
    with site(FakeBatching(lambda request: ["x"] * 10**6, pause=0.002)) as here:
        command = [sys.executable, "-c", CLIENT, here.url + "/chat/completions"]
        clients = [subprocess.Popen(command, stdout=subprocess.PIPE) for _ in range(2)]
        for client in clients:
            assert client.stdout.readline().startswith(b"data: ")
        assert here.batching.stats()["busy"] == 2
        for client in clients:
            client.send_signal(signal.SIGKILL)
            client.wait()
            client.stdout.close()
        here.until(here.idle)
        assert here.desk.left == 2


@pytest.mark.slow
def test_memory_and_descriptors_return() -> None:
    process = psutil.Process(os.getpid())
    with site(FakeBatching(lambda request: ["x" * 1000] * 300, rows=4), queue=100) as here:

        def wave() -> None:
            socks = []
            for i in range(60):
                socks.append(here.raw(post("/chat/completions", HI)[: None if i % 3 else -5]))
                if i % 3 == 1:
                    socks[-1].recv(500)
            for sock in socks:
                sock.close()
            for _ in range(10):
                assert here.chat("Hi").status_code == 200
            here.until(here.idle, 60)

        for _ in range(3):
            wave()
        gc.collect()
        memory, descriptors = process.memory_info().rss, process.num_fds()
        for _ in range(15):
            wave()
        here.until(lambda: process.num_fds() <= descriptors + 3)
        gc.collect()
        time.sleep(0.2)
        assert process.memory_info().rss - memory < 30e6
