"""The server over real engines: a small random model in the batching engine, anybody's engine, the command itself."""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from dataclasses import replace
from types import SimpleNamespace
from urllib.parse import parse_qs, urlsplit

import httpx
import numpy as np
import pytest
import tiny
from hypothesis import given
from hypothesis import strategies as st
from serving import AE, TOKENIZER, Site, said, site
from upstream_folders import write

from nanochat_lib import convert
from nanochat_lib.batching import BatchingEngine, Piece, Request
from nanochat_lib.cli import main
from nanochat_lib.engine import Engine
from nanochat_lib.presets import CPU
from nanochat_lib.serve import server
from nanochat_lib.serve.app import Settings, make_app
from nanochat_lib.serve.next_tokens import NextTokens
from nanochat_lib.serve.one_at_a_time import OneAtATime
from nanochat_lib.tokenizer import StreamDecoder

SMALL = replace(tiny.TINY, n_layer=1, vocab_size=300, sequence_len=64)


@pytest.fixture(scope="module")
def engine():
    return Engine(SMALL, tiny.filled(SMALL), TOKENIZER)


@pytest.fixture(scope="module")
def served(engine):
    with BatchingEngine(engine, rows=3) as batching:
        app = make_app(batching, TOKENIZER, Settings(), context=engine.context, next_tokens=NextTokens(engine))
        with server.running(app) as url:
            here = Site(url, app, batching)
            with here.client:
                yield here


def alone(engine: Engine, text: str, most: int) -> str:
    """The answer as the engine gives it to this request only, at temperature 0."""
    prompt = said(256, 257, text, 258, 259)
    (sequence,), _ = engine.generate_batch([prompt], max_tokens=most, temperature=0)
    decoder = StreamDecoder(TOKENIZER)
    return "".join(map(decoder.push, sequence[len(prompt) :])) + decoder.flush()


def streamed(response: httpx.Response) -> str:
    events = [json.loads(line[6:]) for line in response.text.splitlines() if line.startswith("data: ")]
    assert response.status_code == 200 and events.pop() == {"done": True}
    return "".join(event["token"] for event in events)


def test_answers_are_the_engine_s_whoever_shares_the_batch(served, engine) -> None:
    texts = [f"{'q' * (i % 5)} {i}" for i in range(5)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        answers = list(pool.map(lambda text: streamed(served.chat(text, temperature=0, max_tokens=12)), texts))
    assert answers == [alone(engine, text, 12) for text in texts]
    assert len(set(answers)) > 1
    stats = served.client.get("/stats").json()
    assert stats["total_workers"] == 3 and stats["tokens_generated"] > 0 and stats["bytes_per_row"] > 0
    assert served.chat("x" * 60).status_code == 400  # 64 tokens


@pytest.mark.slow  # compiles the step that draws
def test_the_same_seed_gives_the_same_answer(served) -> None:
    one, same, other = (streamed(served.chat("Hi", temperature=2, seed=seed, max_tokens=20)) for seed in (1, 1, 2))
    assert one == same != other


def test_probabilities_are_the_model_s(served, engine) -> None:
    messages = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "é"}]
    found = served.client.post("/tokens", json={"messages": messages, "top": 5}).json()
    ids = said(256, 257, "Hi", 258, 259, "é", 260)
    assert [row["id"] for row in found["tokens"]] == ids and found["forgotten"] == 0
    assert [row["mask"] for row in found["tokens"]] == [0] * 6 + [1, 1, 1]
    assert [row["text"] for row in found["tokens"][6:]] == ["\\xc3", "\\xa9", "<|assistant_end|>"]
    # Independent: the plain forward pass, softmax in float64 over the tokenizer's vocabulary.
    logits = tiny.forward(SMALL)(engine.params, np.array([ids]))
    logits = np.asarray(logits, np.float64)[0, :, : TOKENIZER.vocab_size]
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    for place, row in enumerate(found["tokens"]):
        best = np.argsort(-p[place], kind="stable")[:5]
        np.testing.assert_allclose([value for *_, value in row["next"]], p[place][best], atol=2e-6)
        assert [token for token, *_ in row["next"]] == best.tolist()
        if place:
            np.testing.assert_allclose(row["p"], p[place - 1][ids[place]], atol=2e-6)
    assert "p" not in found["tokens"][0]
    asked = served.client.post("/tokens", json={"messages": messages[:1], "top": 0}).json()["tokens"]
    assert asked[-1]["id"] == 259 and "next" not in asked[-1]  # a question waits for its answer
    assert served.client.post("/tokens", json={"messages": messages, "top": 21}).status_code == 400
    long = [{"role": "user", "content": "x" * 61}]
    assert served.client.post("/tokens", json={"messages": long}).status_code == 400


# Anybody's engine


class Scripted:
    """An engine as a learner may write one."""

    def __init__(self, ids: list[int]) -> None:
        self.ids, self.options = ids, []

    def generate(self, tokens, **options):
        self.options.append(options)
        for token in self.ids[: options["max_tokens"]]:
            if token < 0:
                raise ZeroDivisionError("oops")
            yield [token], [1]


def tell(ids: list[int], **options) -> list[Piece]:
    pieces, done = [], threading.Event()

    def deliver(piece: Piece) -> None:
        pieces.append(piece)
        if piece.finish:
            done.set()

    batching = OneAtATime(Scripted(ids), TOKENIZER, context=1000)
    batching.submit(Request([256], **options), deliver)
    assert done.wait(20)
    batching.close()
    assert [piece.finish for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
    return pieces


@given(st.text(st.sampled_from("aé🐕日b"), max_size=12), st.text(st.sampled_from("aé🐕b"), max_size=3))
def test_text_comes_in_whole_characters_and_ends_before_a_stop_string(text: str, stop: str) -> None:
    pieces = tell(said(text, AE, "never"), stop=(stop,) if stop else ())
    before, found, _ = text.partition(stop) if stop else (text, "", "")
    assert "".join(piece.text for piece in pieces) == before
    assert pieces[-1].finish == ("stop" if found else "end")
    assert not any("�" in piece.text for piece in pieces)
    for piece in pieces:  # nothing of the stop string was told before it was whole
        assert not found or stop not in piece.text


def test_an_answer_cut_inside_a_character_is_flushed() -> None:
    pieces = tell(said("a🐕"), max_tokens=3)
    assert "".join(piece.text for piece in pieces) == "a�" and pieces[-1].finish == "length"


def test_of_two_stop_strings_the_one_that_begins_first_ends_the_answer() -> None:
    assert "".join(piece.text for piece in tell(said("abc"), stop=("c", "bc"))) == "a"


def test_the_context_bounds_an_answer() -> None:
    engine, over = Scripted(said("x" * 9)), threading.Event()
    batching = OneAtATime(engine, TOKENIZER, context=6)
    batching.submit(Request([256] * 4, max_tokens=5), lambda piece: piece.finish and over.set())
    assert over.wait(20)
    batching.close()
    assert [options["max_tokens"] for options in engine.options] == [2]


def test_an_engine_that_fails_leaves_the_server_alive() -> None:
    assert tell([65, -1])[-1].finish == "error: ZeroDivisionError: oops"
    engine = Scripted([65, -1])
    with site(OneAtATime(engine, TOKENIZER, context=100)) as here:
        text = here.chat("Hi").text
        assert '"token": "A"' in text and "ZeroDivisionError: oops" in text and text.endswith('{"done": true}\n\n')
        engine.ids = said("fine", AE)
        assert streamed(here.chat("Hi")) == "fine"
        assert set(engine.options[-1]) == {"num_samples", "max_tokens", "temperature", "top_k", "seed"}
        assert here.chat("Hi", top_p=0.5).status_code == 400
        assert here.client.get("/info").json()["probabilities"] is False
        here.batching.close()


def test_nothing_gets_in_line_behind_the_end() -> None:
    """A request that found the engine open gets its last piece, though it is closed before the request is in line."""
    batching, found = OneAtATime(Scripted(said("hi", AE)), TOKENIZER, context=100), []

    real, batching.waiting = batching.waiting, SimpleNamespace(qsize=lambda: 0, get=batching.waiting.get)

    def put(job: object) -> None:
        if job is not None:  # between looking and getting in line another thread closes
            closing = threading.Thread(target=batching.close, daemon=True)
            closing.start()
            closing.join(0.2)
        real.put(job)

    batching.waiting.put = put
    over = threading.Event()
    batching.submit(Request([256]), lambda piece: (found.append(piece.finish), piece.finish and over.set()))
    assert over.wait(20) and found[-1] in ("end", "cancelled")


def test_a_receiver_that_fails_does_not_end_the_thread() -> None:
    batching = OneAtATime(Scripted(said("hi", AE)), TOKENIZER, context=100)
    batching.submit(Request([256]), lambda piece: 1 / 0)
    over = threading.Event()
    batching.submit(Request([256]), lambda piece: piece.finish and over.set())
    assert over.wait(20)
    batching.close()


# The command


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serve")
    source = write(folder / "d2", ranks=1, bf16=False)
    short = {"evaluation.chat_max_new_tokens": 4, "rl.max_new_tokens": 4}  # the context is 16 tokens
    convert.from_upstream(source, folder / "My run", changes=short)
    return folder / "My run"


def test_the_command_serves_a_run_and_ends_when_told(run_dir) -> None:
    command = [sys.executable, "-m", "nanochat_lib", "serve", "--run-dir", str(run_dir), "--port", "0", "--rows", "2"]
    process = subprocess.Popen(
        [*command, "--token", "auto"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env={**os.environ, "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},  # compiles sooner
    )  # fmt: skip
    try:
        first, second = process.stdout.readline(), process.stdout.readline()
        greeting = r"nanochat: (http://127\.0\.0\.1:\d+)/#token=(\S{32}) \(Ctrl-C stops it\)\n"
        url, token = re.fullmatch(greeting, first).groups()
        about = r"My run · base: 2 layers, \S+M parameters, context 16; 2 rows of \S+ \S+, 32 requests may wait"
        assert re.search(about, second), second
        with httpx.Client(base_url=url, timeout=60, headers={"Authorization": f"Bearer {token}"}) as client:
            assert client.get("/health").json()["ready"]
            assert client.get("/v1/models").json()["data"][0]["id"] == "my-run-base"
            answer = client.post("/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}]})
            assert answer.text.endswith('data: {"done": true}\n\n')
            table = client.post("/tokens", json={"messages": [{"role": "user", "content": "Hi"}]}).json()["tokens"]
            assert len(table[-1]["next"]) == 8
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr.read() == "nanochat: stopped\n"
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
        process.stderr.close()


ENDLESS = """
import sys
sys.path.insert(0, sys.argv[1])
from serving import ENDLESS, TOKENIZER
from nanochat_lib.serve import server
from nanochat_lib.serve.app import Settings, make_app
sock = server.bind("127.0.0.1", 0)
print(server.address(sock), flush=True)
server.run(make_app(ENDLESS(), TOKENIZER, Settings(max_tokens=4096), context=100), sock)
"""


def test_sigterm_in_mid_stream_is_a_clean_end() -> None:
    folder = __file__.rpartition("/")[0]
    process = subprocess.Popen(
        [sys.executable, "-c", ENDLESS, folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    url = process.stdout.readline().strip()
    body = {"messages": [{"role": "user", "content": "Hi"}]}
    with httpx.stream("POST", url + "/chat/completions", json=body, timeout=30) as response:
        lines = response.iter_lines()
        assert next(lines) == 'data: {"token": "x", "gpu": 0}'
        process.send_signal(signal.SIGTERM)
        last = [line for line in lines if line][-2:]
    assert last == ['data: {"error": "the server is stopping"}', 'data: {"done": true}']
    assert process.wait(30) == 0 and process.stderr.read() == ""
    process.stdout.close()
    process.stderr.close()


@pytest.mark.parametrize(
    ("options", "words"),
    [(["--port", "70000"], "between 0 and 65535"), (["--host", "no host"], "not known"), (["--rows", "0"], "rows 0"),
     (["--host", "192.0.2.1"], "not an address of this machine"), (["--temperature", "3"], "at most 2"),
     (["--queue", "-1"], "queue -1"), (["--allow-origin", "example.org"], "https://name"),
     (["--run-dir", "nowhere", "--port", "0"], "holds no run")],
)  # fmt: skip
def test_mistakes_are_one_line(options: list[str], words: str, capsys) -> None:
    assert main(["serve", *options]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_a_port_in_use_is_said_before_the_model_is_loaded(capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert main(["serve", "--run-dir", "nowhere", "--port", str(port)]) == 2
    err = capsys.readouterr().err
    assert f"port {port} of 127.0.0.1 is in use" in err and "--port" in err and err.count("\n") == 1


def test_the_greeting_warns_of_an_open_door() -> None:
    stats = {"rows": 8, "bytes_per_row": 3 * 2**20 + 2**19}
    lines = server.greeting("http://127.0.0.1:8000", Settings(host="0.0.0.0", title="runs/x · rl"), "small", stats)
    assert lines[1] == "runs/x · rl: small; 8 rows of 3.5 MiB, 32 requests may wait" and "--token" in lines[2]
    assert len(server.greeting("http://[::1]:1", Settings(host="::1"), "small", stats)) == 2
    lines = server.greeting("http://127.0.0.1:1", Settings(host="0.0.0.0", token="a+b/c&%#=="), "small", stats)
    assert len(lines) == 2  # and the page reads the token from the address as a form's field
    assert parse_qs(urlsplit(lines[0].split()[1]).fragment) == {"token": ["a+b/c&%#=="]}


# Load


@pytest.mark.slow
def test_sixty_four_streams_each_as_if_alone(capsys) -> None:
    config = CPU.gpt_config(1024)
    engine = Engine(config, tiny.filled(config), TOKENIZER)
    texts = [f"{'word ' * (i % 7)}{i}?" for i in range(64)]
    with BatchingEngine(engine, rows=8) as batching:
        app = make_app(batching, TOKENIZER, Settings(queue=64), context=engine.context)
        with server.running(app) as url, httpx.Client(base_url=url, timeout=600) as client:

            def ask(text: str) -> str:
                body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 40}
                return streamed(client.post("/chat/completions", json=body))

            with concurrent.futures.ThreadPoolExecutor(64) as pool:
                answers = list(pool.map(ask, texts))
    assert answers == [alone(engine, text, 40) for text in texts]
    assert len(set(answers)) > 32
