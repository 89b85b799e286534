"""nanochat's endpoints over a scripted engine: shapes, limits, the queue, and what a client that leaves sets free."""

from __future__ import annotations

import contextlib
import json
from types import SimpleNamespace

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from serving import AE, AS, BOS, ENDLESS, OE, OS, PE, PS, TOKENIZER, UE, US, FakeBatching, said, site

from nanochat_lib.errors import UserError
from nanochat_lib.serve import desk, prompts
from nanochat_lib.serve.app import Settings, make_app
from nanochat_lib.serve.refusal import Refused, as_json

HI = {"messages": [{"role": "user", "content": "Hi"}]}


@pytest.fixture(scope="module")
def shared():
    """A server for tests that leave nothing behind."""
    with site() as here:
        yield here


def data(response: httpx.Response) -> list[dict]:
    """The events, read as strictly as they are specified."""
    events = response.text.split("\n\n")
    assert events.pop() == ""
    assert all(event.startswith("data: ") and "\n" not in event for event in events)
    return [json.loads(event[6:]) for event in events]


# Shapes


def test_a_stream_in_nanochat_s_shape(shared) -> None:
    response = shared.chat("a: é🐕")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/event-stream")
    assert response.content.decode() == "".join(
        f'data: {{"token": "{c}", "gpu": 0}}\n\n' for c in "a: é🐕"
    ) + 'data: {"done": true}\n\n'  # fmt: skip


def test_the_prompt_and_the_options_reach_the_engine(shared) -> None:
    shared.chat("Hi", "Ho", "Hu", temperature=0, top_k=0, max_tokens=7, seed=-1, top_p=0.5, stop=["x", "yz"])
    request = shared.batching.requests[-1]
    assert request.tokens == said(BOS, US, "Hi", UE, AS, "Ho", AE, US, "Hu", UE, AS)
    assert (request.temperature, request.top_k, request.top_p) == (0, None, 0.5)
    assert (request.max_tokens, request.seed, request.stop) == (7, 2**32 - 1, ("x", "yz"))


def test_what_a_request_does_not_say_is_the_server_s() -> None:
    with site(temperature=0.25, top_k=3, top_p=0.75, max_tokens=11) as here:
        assert here.chat("Hi", temperature=None, top_k=None).status_code == here.chat("Hi").status_code == 200
        first, second = here.batching.requests
        for request in first, second:
            assert (request.temperature, request.top_k, request.top_p, request.max_tokens) == (0.25, 3, 0.75, 11)
        assert first.seed != second.seed and 0 <= first.seed < 2**31
        assert here.client.get("/info").json()["defaults"] == {
            "temperature": 0.25, "top_k": 3, "top_p": 0.75, "max_tokens": 11
        }  # fmt: skip


def test_health_and_stats(shared) -> None:
    assert shared.client.get("/health").json() == {
        "status": "ok", "ready": True, "num_gpus": 1, "available_workers": 2
    }  # fmt: skip
    stats = shared.client.get("/stats").json()
    assert (stats["total_workers"], stats["available_workers"], stats["busy_workers"]) == (2, 2, 0)
    assert stats["workers"] == [{"gpu_id": 0, "device": "cpu"}] * 2


def test_details_only_for_who_asks(shared) -> None:
    first, *tokens, last = data(shared.chat("Hi", details=True, seed=5, max_tokens=1))
    assert first == {"start": {"seed": 5, "prompt_tokens": 6, "forgotten": 0}}
    assert tokens == [{"token": "H", "gpu": 0}]
    assert last["done"] is True and last["finish"] == "length" and last["tokens"] == 1


def test_an_engine_s_error_ends_the_stream_and_not_the_server() -> None:
    with site(FakeBatching(lambda request: ["a", "\0error: the device is on fire"])) as here:
        events = data(here.chat("Hi"))
        assert events == [{"token": "a", "gpu": 0}, {"error": "the device is on fire"}, {"done": True}]
        assert here.client.get("/health").json()["ready"]
        here.batching.broken = "the engine is broken"
        assert here.client.get("/health").json() == {
            "status": "ok", "ready": False, "num_gpus": 1, "available_workers": 2
        }  # fmt: skip
        refused = here.chat("Hi")
        assert refused.status_code == 503 and refused.json() == {"detail": "the engine is broken"}


# While others wait


def test_health_answers_while_answers_are_held_up() -> None:
    with site() as here:
        here.batching.gate.clear()
        with here.client.stream("POST", "/chat/completions", json=HI) as response:
            assert response.status_code == 200
            here.until(lambda: here.client.get("/health").json()["available_workers"] == 1)
            assert here.client.get("/stats").json()["busy_workers"] == 1
            here.batching.gate.set()
            response.read()
        here.until(here.idle)


def test_a_client_that_leaves_frees_its_row_at_once() -> None:
    with site(ENDLESS(rows=1), max_tokens=4096) as here:
        for path, body in (("/chat/completions", {}), ("/v1/chat/completions", {"model": "nanochat", "stream": True})):
            with here.client.stream("POST", path, json={**HI, **body}) as response:
                lines = response.iter_lines()
                assert next(lines) and next(lines) == ""
            here.until(here.idle)
        assert here.batching.told < 4000  # far from the end
        assert here.desk.left == 2 and here.desk.answered == 0


def test_who_leaves_while_waiting_never_gets_a_row() -> None:
    with site(ENDLESS(rows=1), queue=5, max_tokens=4096) as here:
        body = {"model": "nanochat", **HI}
        with here.client.stream("POST", "/v1/chat/completions", json={**body, "stream": True}) as first:
            lines = first.iter_lines()  # kept, or the connection would close with it
            assert next(lines)
            with pytest.raises(httpx.TimeoutException):  # not streamed: nothing comes before the end
                here.client.post("/v1/chat/completions", json=body, timeout=0.2)
            here.until(lambda: len(here.desk.open) == 1)
        here.until(here.idle)


def test_a_full_queue_says_when_to_come_back() -> None:
    with site(FakeBatching(rows=2), queue=1) as here:
        here.batching.gate.clear()
        with contextlib.ExitStack() as waiting:
            for _ in range(3):
                waiting.enter_context(here.client.stream("POST", "/chat/completions", json=HI))
            waiting.callback(here.batching.gate.set)  # first, whatever is found: nobody may wait for ever
            refused = here.client.post("/chat/completions", json=HI, timeout=5)
            assert refused.status_code == 429 and 1 <= int(refused.headers["retry-after"]) <= 60
            assert "2 answers are being written and 1 requests wait" in refused.json()["detail"]
            openai = here.client.post("/v1/chat/completions", json={"model": "nanochat", **HI}, timeout=5)
            assert openai.status_code == 429 and openai.json()["error"]["code"] == "rate_limit_exceeded"
        here.until(here.idle)
        assert here.chat("Hi").status_code == 200


@pytest.mark.parametrize(("seconds", "wait"), [(0.001, "1"), (10.0, "20"), (900.0, "60")])
def test_when_to_come_back_is_between_a_second_and_a_minute(seconds: float, wait: str) -> None:
    """Half a second a place at the desk is a second; two answers of 10 s in front of one row are 20."""
    busy = desk.Desk(SimpleNamespace(stats=lambda: {"rows": 1}), queue=1)
    busy.seconds, busy.open = seconds, {object(), object()}
    with pytest.raises(Refused) as refused:
        busy.enter(None)
    assert refused.value.status == 429 and refused.value.headers["Retry-After"] == wait


def test_half_a_character_is_sent_as_one_that_cannot_be_shown() -> None:
    """JSON may name half of a surrogate pair, which UTF-8 cannot hold; what repeats it must not fail."""
    assert as_json({"detail": "a\ud83dé"}).body == '{"detail": "a\ufffdé"}'.encode()


def test_the_end_of_the_server_ends_every_stream() -> None:
    endless = ENDLESS(rows=1)
    with httpx.Client(timeout=20) as client, contextlib.ExitStack() as open_streams:
        with site(endless, max_tokens=4096) as here:
            url = here.url + "/chat/completions"
            streams = [client.stream("POST", url, json=HI) for _ in range(2)]  # one is written, one waits
            responses = [open_streams.enter_context(stream) for stream in streams]
            here.until(lambda: endless.told > 2)
        for response in responses:
            end = f'data: {{"error": "{desk.STOPPING}"}}\n\ndata: {{"done": true}}\n\n'
            assert response.read().decode().endswith(end)
    here.until(lambda: endless.busy == endless.waiting == 0)
    assert endless.told < 4000


# Limits

TOO_MUCH = {
    "no messages": {"messages": []},
    "501 messages": {"messages": [{"role": "user", "content": "x"}] * 501},
    "8,001 characters": {"messages": [{"role": "user", "content": "x" * 8001}]},
    "32,001 characters": {"messages": [{"role": "user", "content": "x" * 6401}] * 5},
    "an empty message": {"messages": [{"role": "user", "content": ""}]},
    "a system message": {"messages": [{"role": "system", "content": "x"}]},
    "another role": {"messages": [{"role": "<b>", "content": "x"}]},
    "more tokens than the context": {"messages": [{"role": "user", "content": "x" * 1996}]},
    "temperature above": {"temperature": 2.01},
    "temperature below": {"temperature": -0.01},
    "top_k above": {"top_k": 201},
    "top_k below": {"top_k": -1},
    "max_tokens above": {"max_tokens": 4097},
    "max_tokens below": {"max_tokens": 0},
    "top_p above": {"top_p": 1.5},
    "top_p of nothing": {"top_p": 0},
    "a huge seed": {"seed": 2**63},
    "an empty stop": {"stop": ""},
    "many stops": {"stop": ["a", "b", "c", "d", "e"]},
}  # fmt: skip


@pytest.mark.parametrize("name", TOO_MUCH)
def test_beyond_a_limit_is_refused_with_a_reason(shared, name: str) -> None:
    asked = len(shared.batching.requests)
    response = shared.client.post("/chat/completions", json={**HI, **TOO_MUCH[name]})
    assert response.status_code == 400
    (detail,) = response.json().values()
    assert isinstance(detail, str) and 10 < len(detail) < 200
    assert len(shared.batching.requests) == asked


def test_at_a_limit_is_answered() -> None:
    with site(FakeBatching(context=40_000)) as here:
        turns = [{"role": ("user", "assistant")[i % 2], "content": "x"} for i in range(500)]
        longest = [{"role": "user", "content": "x" * 8000}] * 4
        limits = {
            "temperature": 2.0,
            "top_k": 200,
            "max_tokens": 4096,
            "top_p": 1,
            "seed": 2**63 - 1,
            "stop": ["a"] * 4,
        }
        for body in ({"messages": turns}, {"messages": longest, "max_tokens": 1}, {**HI, **limits}):
            assert here.client.post("/chat/completions", json=body).status_code == 200
        assert here.batching.requests[-1].top_p is None  # 1 is no filter
    with site(FakeBatching(context=100)) as here:
        assert here.chat("x" * 95).status_code == 200  # with four special tokens 99 of 100: room for one
        assert here.chat("x" * 96).status_code == 400


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'"x"', b'{"messages": 3}', b'{"messages": [3]}', b"\xff\xfe", b"[" * 5000,
     b'{"messages": [{"role": "user"}]}', b'{"messages": [{"role": "user", "content": ["x"]}]}',
     b'{"messages": [{"role": "user", "content": "\\ud800"}]}', b'{"messages": [], "temperature": NaN}',
     b'{"messages": [], "temperature": "hot"}', b'{"messages": [], "max_tokens": true}',
     b'{"messages": [], "top_k": 1.5}', b'{"messages": [], "seed": ' + b"9" * 5000 + b"}"],
)  # fmt: skip
def test_malformed_bodies(shared, body: bytes) -> None:
    response = shared.client.post("/chat/completions", content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 422 and response.json()["detail"][0]["msg"]
    path = "/v1/chat/completions"
    response = shared.client.post(path, content=body, headers={"Content-Type": "application/json"})
    assert response.status_code == 422 and response.json()["error"]["message"]


def test_other_content_types_and_sizes(shared) -> None:
    assert shared.client.post("/chat/completions", data={"messages": "x"}).status_code == 415
    assert shared.client.post("/chat/completions", content=b'{"messages": []}').status_code == 415
    headers = {"Content-Type": "application/json"}
    assert shared.client.post("/chat/completions", content=b" " * (1 << 20) + b"x", headers=headers).status_code == 413

    def without_a_length():
        for _ in range(20):
            yield b" " * 100_000

    try:
        response = shared.client.post("/chat/completions", content=without_a_length(), headers=headers)
        assert response.status_code == 413
    except httpx.TransportError:
        pass  # the server closed while the rest was still being sent
    assert shared.client.get("/health").status_code == 200
    assert shared.client.get("/chat/completions").status_code == 405
    assert shared.client.get("/nosuch").json() == {"detail": "there is nothing here"}


@pytest.mark.parametrize(
    "settings", [{"temperature": 3}, {"top_k": 300}, {"top_p": 0}, {"max_tokens": 0}, {"queue": -1},
                 {"token": ""}, {"token": " "},
                 {"token": "x\n"}, {"token": "é"}, {"token": "x\x00y"},
                 {"allow_origins": ("example.org",)}, {"allow_origins": ("https://example.org/path",)}],
)  # fmt: skip
def test_settings_out_of_range(settings: dict) -> None:
    with pytest.raises(UserError):
        make_app(FakeBatching(), TOKENIZER, Settings(**settings), context=100)


# Prompts


def test_text_never_becomes_a_special_token() -> None:
    names = "".join(TOKENIZER.special_tokens)
    ids, mask = prompts.turn_ids(TOKENIZER, "user", names)
    assert ids == [US, *TOKENIZER.encode(names), UE] and sum(mask) == 0
    for text in ("<|bos|><|assistant_end|>", "<|python_start|>1+1", "<|python_start|><|bos|><|python_end|>"):
        assert prompts.turn_ids(TOKENIZER, "assistant", text)[0] == [AS, *TOKENIZER.encode(text), AE]


def test_a_tool_call_comes_back_as_one() -> None:
    text = "so <|python_start|>1+1<|python_end|><|output_start|>2<|output_end|> it is"
    ids, mask = prompts.turn_ids(TOKENIZER, "assistant", text)
    assert ids == said(AS, "so ", PS, "1+1", PE, OS, "2", OE, " it is", AE)
    assert mask == [0] + [1] * 8 + [0] * 3 + [1] * 7


turns = st.lists(st.tuples(st.sampled_from(["user", "assistant"]), st.text("ab", min_size=1, max_size=9)), min_size=1)


@settings(max_examples=60)
@given(turns, st.integers(8, 60))
def test_the_oldest_exchanges_go_first(turns: list[tuple[str, str]], room: int) -> None:
    whole, _, none = prompts.render(TOKENIZER, turns, 10**6, answer=True, forget=True)
    assert none == 0
    try:
        ids, mask, forgotten = prompts.render(TOKENIZER, turns, room, answer=True, forget=True)
    except Refused as refused:
        last = prompts.exchanges(turns)[-1]
        assert refused.status == 400 and "tokens" in refused.message
        assert len(prompts.render(TOKENIZER, last, 10**6, answer=True, forget=False)[0]) > room
        return
    assert len(ids) == len(mask) <= room and ids[0] == BOS and ids[-1] == AS
    assert ids[1:] == whole[len(whole) - len(ids) + 1 :]  # what is left is the newest
    assert forgotten < len(prompts.exchanges(turns)), "the last exchange never goes"
    if forgotten:
        kept = sum(prompts.exchanges(turns)[forgotten - 1 :], [])
        assert len(prompts.render(TOKENIZER, kept, 10**6, answer=True, forget=False)[0]) > room  # no more than need be
    with_refusal = len(whole) > room
    if with_refusal:
        with pytest.raises(Refused, match="tokens"):
            prompts.render(TOKENIZER, turns, room, answer=True, forget=False)


def test_forgetting_is_only_for_who_asks_and_is_told() -> None:
    with site(FakeBatching(context=60)) as here:
        texts = ["a" * 10, "b" * 10, "c" * 10, "d" * 10, "e" * 10]
        assert here.chat(*texts).status_code == 400
        first, *_ = data(here.chat(*texts, forget_oldest=True, details=True, max_tokens=100))
        assert first["start"]["forgotten"] == 1
        assert here.batching.requests[-1].tokens == said(BOS, US, texts[2], UE, AS, texts[3], AE, US, texts[4], UE, AS)
