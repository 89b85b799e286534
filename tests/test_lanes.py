"""Lanes and turned matrices change how fast a small model decodes, and nothing else."""

from __future__ import annotations

import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from test_batching import CONFIG, TOKENIZER, ask, expected, prompt, solo  # noqa: F401

from nanochat_lib import gpt, lanes, rows
from nanochat_lib.batching import BatchingEngine, Request
from nanochat_lib.engine import Engine
from nanochat_lib.layers import linear


@pytest.fixture(autouse=True)
def four_cores(monkeypatch):
    monkeypatch.setattr(lanes, "cores", lambda: 4)


@pytest.fixture(scope="module")
def params():
    return gpt.init_params(CONFIG, jax.random.key(0))


def test_turned_matrices_are_the_same_weights(params):
    moved = lanes.turned(params)
    assert {name for name in params if name not in moved} == {
        name
        for name in params
        if params[name].ndim == 2 and not any(x in name for x in ("wte", "value_embeds", "gate"))
    }
    back = lanes.upright(moved)
    assert back.keys() == params.keys()
    assert all((back[name] == params[name]).all() and back[name].shape == params[name].shape for name in params)


def test_steps_multiply_with_the_matrix_as_it_is_stored():
    weight, x = jnp.ones((48, 32)), jnp.ones((4, 32))
    step = jax.jit(lambda params, x: linear(x, lanes.upright(params)["a.c_fc.weight"]))
    text = step.lower(lanes.turned({"a.c_fc.weight": weight}), x).compile().as_text()
    assert "dot(" in text and "transpose(" not in text and "rhs_contracting_dims={0}" in text


def test_only_small_models_on_one_cpu_device_have_lanes(params, monkeypatch):
    assert [lanes.lanes_for(count, params) for count in (1, 4, 7, 8, 9, 12, 16, 32)] == [1, 1, 1, 2, 1, 3, 4, 4]
    monkeypatch.setattr(lanes, "cores", lambda: 1)
    assert lanes.lanes_for(32, params) == 1
    monkeypatch.setattr(lanes, "LARGEST", 1000)
    assert not lanes.is_small(params) and lanes.turned(params) is params
    monkeypatch.undo()
    assert not lanes.is_small({"script": jnp.zeros(3)})
    assert not lanes.is_small({name: np.asarray(leaf) for name, leaf in params.items()})


def test_lanes_run_at_the_same_time_and_end_together():
    meeting = threading.Barrier(3, timeout=30)
    assert lanes.together([lambda i=i: (meeting.wait(), i)[1] for i in range(3)]) == [0, 1, 2]
    done = []

    def fails():
        raise RuntimeError("one")

    with pytest.raises(RuntimeError, match="one"):
        lanes.together([fails, lambda: (meeting.wait(), done.append(1)), meeting.wait, meeting.wait])
    assert done == [1]


def test_rows_in_lanes_answer_as_alone(solo):  # noqa: F811
    requests = [Request(prompt(5 + i), 20 + i % 3, temperature=i % 2, seed=i) for i in range(19)]
    with BatchingEngine(solo, rows=8, slack=3) as batched:
        assert [len(batched.rows.caches), batched.rows.width] == [2, 4]
        for request, box in zip(requests, ask(batched, *requests), strict=True):
            assert (box.tokens, box.mask) == tuple(expected(solo, request)[:2])
        (again,) = ask(batched, Request([*requests[-1].tokens, *box.tokens, 7], 5, temperature=0))
        assert batched.stats()["tokens_reused"] >= 25
        assert again.tokens == expected(solo, Request([*requests[-1].tokens, *box.tokens, 7], 5, temperature=0))[0]


@pytest.mark.parametrize(("prompts", "samples", "most"), [(8, 1, None), (3, 4, None), (1, 16, None), (9, 2, 8)])
def test_a_batch_in_lanes_is_the_batch(solo, monkeypatch, prompts, samples, most):  # noqa: F811
    texts = [prompt(4 + 3 * i) for i in range(prompts)]
    options = {"num_samples": samples, "max_tokens": 40, "batch_rows": most, "logprobs": True, "seed": 3}
    for temperature in (0, 1.0):
        in_lanes = solo.generate_batch(texts, temperature=temperature, **options)
        with monkeypatch.context() as patch:
            patch.setattr(lanes, "cores", lambda: 1)
            alone = solo.generate_batch(texts, temperature=temperature, **options)
        assert (in_lanes.sequences, in_lanes.masks, in_lanes.finished) == (alone.sequences, alone.masks, alone.finished)
        for mine, theirs in zip(in_lanes.logprobs, alone.logprobs, strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-4)


def test_a_lane_that_fails_ends_all_requests_and_the_engine_goes_on(solo, monkeypatch):  # noqa: F811
    real, failures = rows.compiled_decode, ["boom"]

    def failing(*args, **named):
        if failures:
            raise RuntimeError(failures.pop())
        return real(*args, **named)

    monkeypatch.setattr(rows, "compiled_decode", failing)
    requests = [Request(prompt(6), 10, temperature=0) for _ in range(8)]
    with BatchingEngine(solo, rows=8, slack=3) as batched:
        assert any(box.finish == "error: RuntimeError: boom" for box in ask(batched, *requests))
        for request, box in zip(requests, ask(batched, *requests), strict=True):
            assert box.tokens == expected(solo, request)[0]


def test_new_weights_are_turned_anew(solo):  # noqa: F811
    engine = Engine(CONFIG, solo.params, TOKENIZER)
    before, text = engine.weights.turned, [prompt(9)] * 8
    engine.params = {name: -leaf for name, leaf in solo.params.items()}
    fresh = Engine(CONFIG, engine.params, TOKENIZER)
    assert engine.weights.turned is not before and engine.weights.for_steps(1) is engine.params
    assert engine.weights.for_steps(4) is engine.weights.turned
    one, other = (e.generate_batch(text, max_tokens=12, temperature=0).sequences for e in (engine, fresh))
    assert one == other
