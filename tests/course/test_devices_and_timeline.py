"""Several CPU devices in a process of their own, and timelines out of profiles."""

import jax
import jax.numpy as jnp
import pytest

from nanochat_lib.course.fake_devices import on_devices
from nanochat_lib.course.timeline import read, record


def test_a_program_sees_as_many_devices_as_it_was_given_and_its_values():
    program = "import jax\nresult = {'devices': jax.device_count(), 'sum': sum(numbers)}"
    assert on_devices(program, 3, numbers=[1, 2, 4]) == {"devices": 3, "sum": 7}


def test_a_failing_program_says_why():
    with pytest.raises(RuntimeError, match="NameError: name 'lost' is not defined"):
        on_devices("result = lost", 2)


def event(name, start, length, thread=1, **args):
    return {"ph": "X", "pid": 7, "tid": thread, "name": name, "ts": start, "dur": length, "args": args}


def test_nested_notes_of_a_call_count_once_and_overlapping_work_is_one_span_from_the_first_call_on():
    found = read(
        [
            event("add.0", 900, 50, 2, hlo_op="add.0"),
            event("PjitFunction(step)", 1000, 300),
            event("PjitFunction(step)", 1001, 290),
            event("dot.1", 1100, 400, 2, hlo_op="dot.1"),
            event("add.2", 1400, 300, 3, hlo_op="add.2"),
            event("PjitFunction(step)", 2000, 100),
            event("end: dot.1", 1500, 400, 2),
            event("dot.1", 2100, 900, 2, hlo_op="dot.1"),
            {"ph": "M", "name": "thread_name"},
        ]
    )
    assert found.started == {"step": 2} and found.dispatches == 2
    assert found.busy == [(0.1, 0.7), (1.1, 2.0)]
    assert found.length == 2.0 and found.idle == pytest.approx(0.25)


def test_a_recorded_run_has_its_calls_and_its_work():
    twice, half = jax.jit(lambda x: x @ x), jax.jit(lambda x: x / 2)
    x = jnp.ones((64, 64))
    half(twice(x))
    found = record(lambda: [half(twice(x)) for _ in range(3)])
    assert found.dispatches == 6 and found.busy and 0 <= found.idle < 1
