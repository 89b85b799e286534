"""What makes a JAX submission cheap: nothing is compiled to copy, one context, a right reply is judged once."""

from __future__ import annotations

import copy
import dataclasses
import os
import platform
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grade_course import MERGE, RIGHT, SCALE, hand_in

import nanochat_lib
from nanochat_lib.course.cases import sign, suspect
from nanochat_lib.course.grading import grade, judge, programs, quick, session, wire
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
    late = "assert 'scipy.linalg.cython_lapack' in sys.modules\n"
    once = (
        "from jax._src import xla_bridge\nassert xla_bridge._plugins_registered\n"
        "import importlib.machinery\n"
        "importlib.machinery.SourceFileLoader.source_to_code = None\n"
        "sys.modules.pop('nanochat_lib.course.checks.small', None)\nimport nanochat_lib.course.checks.small\n"
    )
    hand_in(tmp_path, "ada", {"small.scale": f"{looks}{same}\n{late}{once}{SCALE}"})
    assert graded(desk, tmp_path)["ada"].exercises["small.scale"]["status"] == "passed"


def test_fingerprints_tell_apart_what_a_verdict_depends_on(desk):
    one = next(iter(desk.keys.values()))
    merge, twice = one.questions["small.merge"], one.questions["small.twice"]
    case, other = merge.cases[0], merge.cases[1]
    told = {"got": [1], "changed": ""}

    def mark(question=merge, case=case, seed=0, **more):
        return judge.fingerprint(question, case, seed, wire.encode(told | more))

    got = [[1], (1,), [1.0], [True], ["1"], [[1]], np.ones(1, int), np.ones(1), jnp.ones(1), wire.Opaque("a", "b")]
    marks = [mark(got=value) for value in got] + [mark(changed="x"), mark(noted={"a": 1}), mark(seed=1)]
    marks += [mark(question=twice), mark(case=other), mark(error={"text": "no"})]
    assert len(set(marks)) == len(marks) and b"" not in marks
    budget = next(case for case in merge.cases if case.limits)
    assert mark(case=budget) == b""


def test_a_reply_is_judged_once_for_all_who_give_it(desk, tmp_path, monkeypatch):
    one, asked = next(iter(desk.keys.values())), []
    monkeypatch.setattr(one, "passed", set())
    monkeypatch.setattr(one, "failed", {})
    real = session.judge
    monkeypatch.setattr(
        session, "judge", lambda q, case, *rest: asked.append((q.id, case.name)) or real(q, case, *rest)
    )
    wrong = RIGHT | {"small.merge": MERGE.replace("i += 2", "i += 1")}
    renamed = wrong | {"small.merge": wrong["small.merge"].replace("tokens", "text")}
    for name, answers in (("a", wrong), ("b", RIGHT), ("c", RIGHT), ("d", wrong), ("e", renamed)):
        hand_in(tmp_path, name, answers)
    found = graded(desk, tmp_path)
    for id, entry in found["a"].exercises.items():
        assert (
            entry["rows"] == found["d"].exercises[id]["rows"] and entry["groups"] == found["d"].exercises[id]["groups"]
        )
    assert found["b"].exercises["small.merge"]["status"] == found["c"].exercises["small.merge"]["status"] == "passed"
    assert asked.count(("small.scale", "ones")) == 1 and asked.count(("small.merge", "one pair")) == 3
    assert "tokens=" in str(found["d"].exercises) and "text=" in str(found["e"].exercises)  # its own names in its row
    assert asked.count(("small.merge", "a long list")) == 2  # a budget is measured for each


def papers_with_other_results(folder, count):
    for n in range(count):
        hand_in(folder, f"learner{n:02d}", RIGHT | {"small.scale": f"def scale(x, factor):\n    return x * {n + 5}.0"})


def with_cause(desk, monkeypatch, cause):
    """The small chapter's JAX exercise with one more likely cause."""
    one = next(iter(desk.keys.values()))
    question = one.questions["small.scale"]
    monkeypatch.setitem(
        one.questions, question.id, replace(question, exercise=replace(question.exercise, causes=[cause]))
    )
    monkeypatch.setattr(one, "failed", {})
    monkeypatch.setattr(one, "made", {})


def test_a_suspected_cause_is_computed_once_for_all_wrong_results(desk, tmp_path, monkeypatch):
    asked: list[tuple] = []

    def squared(x, factor):
        asked.append(x.shape)
        return x * factor**2

    papers_with_other_results(tmp_path, 6)
    with_cause(desk, monkeypatch, suspect("the factor was used twice", squared))
    hand_in(tmp_path, "twice", RIGHT | {"small.scale": "def scale(x, factor):\n    return x * factor * factor"})
    found = graded(desk, tmp_path)
    assert sorted(asked) == [(2, 2), (3,), (4,), (4,), (5,)]  # once a case, whoever asks; (4,) with its harness, too
    assert "the factor was used twice" in str(found["twice"].exercises["small.scale"]["rows"])
    assert "the factor was used twice" not in str(found["learner01"].exercises["small.scale"]["rows"])


def test_programs_of_wrong_results_do_not_add_up_over_a_class(desk, tmp_path, monkeypatch):
    """Each wrong reply compiles one of its own: a sign that is new for each."""
    alive, held = [], []

    def seen(got, want, x, factor):
        n = len(alive) + 2
        held.append(jax.jit(lambda y: y * n))
        out = held[-1](x)
        alive.append(programs.alive())
        return bool(out.sum() == 0)

    jax.clear_caches()
    papers_with_other_results(tmp_path, 6)
    with_cause(desk, monkeypatch, sign("never", seen))
    monkeypatch.setattr(grade, "TIDY", 4)
    graded(desk, tmp_path)
    cases = len(alive) // 6
    assert alive[cases - 1] > 2 and max(alive[cases:]) <= alive[cases - 1] + 4, alive  # those of one learner, and four


GIVES_BACK = """
import jax, jax.numpy as jnp
from nanochat_lib.course.grading import grade, programs
def memory():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmRSS")).split()[1])
def many(count):
    for n in range(count):
        x = jnp.ones((n + 2, 4))
        jax.block_until_ready(jax.jit(lambda x: jnp.tanh(x @ x.T) * n + jax.nn.softmax(x @ x.T))(x))
many(3)
grade.tidy()
before = memory()
many(20)
full, held = memory(), programs.alive()
grade.tidy()
print(before, full, memory(), held, programs.alive())
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other C libraries give back by themselves")
def test_tidying_gives_memory_back_to_the_system():
    """In a process of its own: what is freed between other things stays with glibc, 1 MB a program, until asked."""
    env = os.environ | {"NANOCHAT_COMPILE_CACHE": "0", "PYTHONPATH": str(Path(nanochat_lib.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", GIVES_BACK], env=env, capture_output=True, text=True, timeout=300)
    before, full, after, held, left = map(int, done.stdout.split())
    assert held >= 20 and left <= 1
    assert full - after > (full - before) / 2, done.stdout


def test_a_class_of_any_size_takes_the_same_memory(desk, tmp_path, monkeypatch):
    one = next(iter(desk.keys.values()))
    monkeypatch.setattr(one, "passed", set())
    monkeypatch.setattr(session, "KEPT", 3)
    monkeypatch.setattr(session, "KEPT_WRONG", 2)
    papers_with_other_results(tmp_path / "wrong", 4)
    graded(desk, tmp_path / "wrong")
    assert 0 < len(one.failed) <= 2
    folder = tmp_path / "right"
    hand_in(folder, "ada", RIGHT)
    graded(desk, folder)
    assert 0 < len(one.passed) <= 3
    before, kept = set(one.made), set(one.passed)
    salted = dataclasses.replace(desk, salt="autumn")
    ((_, result),) = grade.graded(list(grade.tasks(collect(folder), desk, None)), salted, 1)
    assert all(entry["status"] == "passed" for entry in result.exercises.values())
    assert set(one.made) == before and one.passed == kept
