"""OpenAI's interface, judged by OpenAI's own client where it can."""

from __future__ import annotations

import json

import openai
import pytest
from serving import AE, AS, BOS, UE, US, FakeBatching, said, site

TOOL = ["<|python_start|>", "6*7", "<|python_end|>", "<|output_start|>", "42", "<|output_end|>", "42."]
HI = {"model": "nanochat", "messages": [{"role": "user", "content": "Hi é🐕"}]}


@pytest.fixture(scope="module")
def here():
    with site(token="s3cret", model="runs-cpu-rl") as here:
        here.client.headers["Authorization"] = "Bearer s3cret"
        yield here


@pytest.fixture(scope="module")
def client(here):
    with openai.OpenAI(base_url=here.url + "/v1", api_key="s3cret", max_retries=0, timeout=20) as client:
        yield client


def test_the_official_client_streams(client) -> None:
    stream = client.chat.completions.create(**HI, stream=True, stream_options={"include_usage": True})
    *chunks, last = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [chunk.choices[0].delta.content for chunk in chunks[1:-1]] == list("Hi é🐕")
    assert [chunk.choices[0].finish_reason for chunk in chunks] == [None] * (len(chunks) - 1) + ["stop"]
    assert last.choices == [] and (last.usage.prompt_tokens, last.usage.completion_tokens) == (13, 5)
    assert len({(chunk.id, chunk.model) for chunk in [*chunks, last]}) == 1 and last.model == "runs-cpu-rl"


def test_the_official_client_gets_a_whole_answer(client, here) -> None:
    answer = client.chat.completions.create(**HI, temperature=0, seed=1, stop="x", top_p=0.5, max_completion_tokens=4)
    assert answer.object == "chat.completion" and answer.choices[0].message.role == "assistant"
    assert answer.choices[0].message.content == "Hi é" and answer.choices[0].finish_reason == "length"
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (13, 4, 17)
    request = here.batching.requests[-1]
    assert (request.temperature, request.seed, request.stop, request.top_p, request.max_tokens) == (
        0,
        1,
        ("x",),
        0.5,
        4,
    )


def test_the_raw_stream(here) -> None:
    response = here.client.post("/v1/chat/completions", json={**HI, "stream": True})
    events = response.text.split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    for event in events[:-2]:
        chunk = json.loads(event.removeprefix("data: "))
        assert chunk["object"] == "chat.completion.chunk" and "usage" not in chunk and chunk["choices"][0]["index"] == 0
    assert "🐕" in response.text


def test_system_messages_and_parts_of_text(client, here) -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "system", "content": "Be brief."}, {"role": "developer", "content": "And kind."},
        {"role": "user", "content": parts}, {"role": "assistant", "content": "c"}, {"role": "user", "content": "d"},
    ]  # fmt: skip
    client.chat.completions.create(model="nanochat", messages=messages)
    expected = said(BOS, US, "Be brief.\n\nAnd kind.\n\nab", UE, AS, "c", AE, US, "d", UE, AS)
    assert here.batching.requests[-1].tokens == expected


def test_tool_calls_survive_the_round_trip() -> None:
    with site(FakeBatching(lambda request: TOOL)) as here:
        client = openai.OpenAI(base_url=here.url + "/v1", api_key="any", max_retries=0)
        content = client.chat.completions.create(**HI).choices[0].message.content
        assert content == "".join(TOOL)
        messages = [*HI["messages"], {"role": "assistant", "content": content}, {"role": "user", "content": "and?"}]
        client.chat.completions.create(model="nanochat", messages=messages)
        start, end = (here.app.state.served.tokenizer.encode_special(f"<|python_{at}|>") for at in ("start", "end"))
        tokens = here.batching.requests[-1].tokens
        assert tokens[tokens.index(start) + 1 : tokens.index(end)] == said("6*7")


def test_models(client) -> None:
    assert [model.id for model in client.models.list()] == ["runs-cpu-rl"]
    assert client.models.retrieve("runs-cpu-rl").owned_by == "nanochat"
    with pytest.raises(openai.NotFoundError, match="no model 'gpt-9'"):
        client.models.retrieve("gpt-9")


@pytest.mark.parametrize(
    ("change", "param"),
    [({"n": 2}, "n"), ({"logprobs": True}, "logprobs"), ({"frequency_penalty": 0.5}, "frequency_penalty"),
     ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"), ({"logit_bias": {"5": 1}}, "logit_bias"),
     ({"response_format": {"type": "json_object"}}, "response_format"), ({"temperature": 2.5}, "temperature"),
     ({"max_tokens": 0}, "max_tokens"), ({"messages": []}, "messages"), ({"stop": ["a"] * 5}, "stop"),
     ({"messages": [{"role": "tool", "content": "x", "tool_call_id": "1"}]}, "messages"),
     ({"messages": [{"role": "system", "content": "x"}]}, "messages"),
     ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages"),
     ({"messages": [{"role": "assistant", "content": None}]}, "messages"),
     ({"messages": [{"role": "user", "content": "x" * 1999}]}, "messages")],
)  # fmt: skip
def test_what_cannot_be_honoured_is_refused_by_name(client, change: dict, param: str) -> None:
    with pytest.raises(openai.BadRequestError) as raised:
        client.chat.completions.create(**{**HI, **change})
    assert raised.value.param == param and raised.value.type == "invalid_request_error"


def test_defaults_written_out_are_no_demand(client) -> None:
    idle = {"n": 1, "logprobs": False, "frequency_penalty": 0, "presence_penalty": 0.0, "logit_bias": {}, "tools": [],
            "response_format": {"type": "text"}, "user": "me", "stream": False, "stop": None}  # fmt: skip
    assert client.chat.completions.create(**HI, **idle).choices[0].finish_reason == "stop"


def test_refusals_are_of_the_client_s_own_kinds(client, here) -> None:
    with pytest.raises(openai.NotFoundError) as raised:
        client.chat.completions.create(**{**HI, "model": "gpt-9"})
    assert raised.value.code == "model_not_found"
    with pytest.raises(openai.AuthenticationError):
        client.with_options(api_key="wrong").models.list()
    with pytest.raises(openai.UnprocessableEntityError, match="messages"):
        client.chat.completions.create(model="nanochat", messages=3)
    assert here.client.get("/v1/nosuch").json()["error"]["type"] == "not_found_error"


def test_an_error_in_mid_stream_reaches_the_client() -> None:
    with site(FakeBatching(lambda request: ["a", "\0error: no memory"])) as here:
        client = openai.OpenAI(base_url=here.url + "/v1", api_key="any", max_retries=0)
        stream = iter(client.chat.completions.create(**HI, stream=True))
        assert next(stream).choices[0].delta.content == "" and next(stream).choices[0].delta.content == "a"
        with pytest.raises(openai.APIError, match="no memory"):
            next(stream)
        with pytest.raises(openai.InternalServerError, match="no memory"):
            client.chat.completions.create(**HI)
