"""What makes a JAX submission cheap: nothing is compiled to copy, one context, a right reply is judged once."""

from __future__ import annotations

import copy
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grade_course import MERGE, RIGHT, SCALE, hand_in

from nanochat_lib.course.grading import grade, judge, quick, session, wire
from nanochat_lib.course.grading.submissions import collect

mlir = pytest.importorskip("jax._src.interpreters.mlir")
array_kind = pytest.importorskip("jax._src.array").ArrayImpl


@pytest.fixture
def compiled():
    """How many programs have been compiled or loaded since; a list that grows."""
    found: list[str] = []

    def heard(event: str, seconds: float, **more: object) -> None:
        if event.endswith("backend_compile_duration"):
            found.append(event)

    jax.monitoring.register_event_duration_secs_listener(heard)
    yield found
    jax.monitoring.unregister_event_duration_listener(heard)


def graded(desk, folder):
    return {t.paper.learner: r for t, r in grade.graded(list(grade.tasks(collect(folder), desk, None)), desk, 1)}


def test_copies_and_arguments_compile_nothing(monkeypatch, compiled):
    plain = {"f": np.arange(7, dtype=np.float32).reshape(7, 1), "b": np.ones((3, 11), bool), "i": np.arange(13)}
    arrays = {name: jnp.asarray(value) for name, value in plain.items()} | {"h": jnp.ones((5, 17), jnp.bfloat16)}
    weak, key = jnp.asarray(2.0) * 1.0, jax.random.key(3)
    monkeypatch.setattr(array_kind, "__deepcopy__", array_kind.__deepcopy__)
    quick.plain_copies()
    frame = wire.encode(arrays)
    before = len(compiled)
    copies, read = copy.deepcopy(arrays), wire.decode(frame)
    assert len(compiled) == before
    for name, array in arrays.items():
        for other in (copies[name], read[name]):
            assert type(other) is type(array) and other.dtype == array.dtype and other is not array
            assert other.unsafe_buffer_pointer() != array.unsafe_buffer_pointer()
            np.testing.assert_array_equal(np.asarray(other, np.float32), np.asarray(array, np.float32))
    assert copy.deepcopy(weak).weak_type == weak.weak_type and not copies["f"].weak_type
    assert (jax.random.key_data(copy.deepcopy(key)) == jax.random.key_data(key)).all()


def test_one_context_writes_the_same_programs(monkeypatch):
    def text(factor):
        return jax.jit(lambda x: jnp.tanh(x @ x.T) * factor).lower(jnp.ones((3, 5))).as_text()

    before = text(2.5)
    monkeypatch.setattr(mlir, "make_ir_context", mlir.make_ir_context)
    quick.one_context()
    assert mlir.make_ir_context() is mlir.make_ir_context()
    assert text(2.5) == before != text(3.5)
    with pytest.raises(TypeError):  # a failed program leaves nothing behind in it
        jax.jit(lambda x: jnp.tanh(x, x, x))(1.0)
    assert text(2.5) == before


def test_where_jax_has_changed_its_own_way_stays(monkeypatch):
    monkeypatch.setattr(mlir, "make_ir_context", lambda: object())
    own = mlir.make_ir_context
    quick.one_context()
    assert mlir.make_ir_context is own
    monkeypatch.delattr(mlir, "make_ir_context")
    quick.one_context()
    assert not hasattr(mlir, "make_ir_context")


def test_children_have_it(desk, tmp_path):
    looks = "import gc, sys\nfrom jax._src.interpreters import mlir\n"
    same = "assert mlir.make_ir_context() is mlir.make_ir_context() and gc.get_freeze_count() > 10_000"
    late = "assert 'scipy.linalg.cython_lapack' in sys.modules"
    hand_in(tmp_path, "ada", {"small.scale": f"{looks}{same}\n{late}\n{SCALE}"})
    assert graded(desk, tmp_path)["ada"].exercises["small.scale"]["status"] == "passed"


def test_fingerprints_tell_apart_what_a_verdict_depends_on(desk):
    one = next(iter(desk.keys.values()))
    merge, twice = one.questions["small.merge"], one.questions["small.twice"]
    case, other = merge.cases[0], merge.cases[1]
    reply = {"word": "a", "seconds": 0.5, "patched": False, "got": [1], "changed": ""}

    def mark(question=merge, case=case, seed=0, **more):
        return judge.fingerprint(question, case, seed, reply | more)

    assert mark() == mark(word="b", seconds=9.0, patched=True)
    got = [[1], (1,), [1.0], [True], ["1"], [[1]], np.ones(1, int), np.ones(1), jnp.ones(1), wire.Opaque("a", "b")]
    marks = [mark(got=value) for value in got] + [mark(changed="x"), mark(noted={"a": 1}), mark(seed=1)]
    marks += [mark(question=twice), mark(case=other), mark(error={"text": "no"})]
    assert len(set(marks)) == len(marks) and b"" not in marks
    budget = next(case for case in merge.cases if case.limits)
    assert mark(case=budget) == b""


def test_a_right_reply_is_judged_once_and_a_wrong_one_each_time(desk, tmp_path, monkeypatch):
    one, asked = next(iter(desk.keys.values())), []
    monkeypatch.setattr(one, "passed", set())
    real = session.judge
    monkeypatch.setattr(
        session, "judge", lambda q, case, *rest: asked.append((q.id, case.name)) or real(q, case, *rest)
    )
    wrong = RIGHT | {"small.merge": MERGE.replace("i += 2", "i += 1")}
    for name, answers in (("a", wrong), ("b", RIGHT), ("c", RIGHT), ("d", wrong)):
        hand_in(tmp_path, name, answers)
    found = graded(desk, tmp_path)
    for id, entry in found["a"].exercises.items():
        assert (
            entry["rows"] == found["d"].exercises[id]["rows"] and entry["groups"] == found["d"].exercises[id]["groups"]
        )
    assert found["b"].exercises["small.merge"]["status"] == found["c"].exercises["small.merge"]["status"] == "passed"
    assert asked.count(("small.scale", "ones")) == 1 and asked.count(("small.merge", "one pair")) == 3
    assert asked.count(("small.merge", "a long list")) == 2  # a budget is measured for each


def test_a_class_of_any_size_takes_the_same_memory(desk, tmp_path, monkeypatch):
    one = next(iter(desk.keys.values()))
    monkeypatch.setattr(one, "passed", set())
    monkeypatch.setattr(session, "KEPT", 3)
    cleared: list[int] = []
    monkeypatch.setattr(grade, "TIDY", 1)
    monkeypatch.setattr(jax, "clear_caches", lambda: cleared.append(1))
    hand_in(tmp_path, "ada", RIGHT)
    graded(desk, tmp_path)
    assert cleared == [1]
    assert 0 < len(one.passed) <= 3
    before, kept = set(one.made), set(one.passed)
    salted = types.SimpleNamespace(**vars(desk) | {"salt": "autumn", "salted": "x"})
    ((_, result),) = grade.graded(list(grade.tasks(collect(tmp_path), desk, None)), salted, 1)
    assert all(entry["status"] == "passed" for entry in result.exercises.values())
    assert set(one.made) == before and one.passed == kept
