"""Programs found by what they compute: equal words only for equal programs, equal results, the unclear left alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from grade_course import SCALE, hand_in

from nanochat_lib.course.grading import grade, programs
from nanochat_lib.course.grading.submissions import collect

pjit = pytest.importorskip("jax._src.pjit")
compilation_cache = pytest.importorskip("jax._src.compilation_cache")
pytestmark = pytest.mark.skipif(
    not hasattr(pjit, "_pjit_call_impl_python") or jax.device_count() != 1, reason="JAX's insides have changed"
)


@pytest.fixture
def calls(monkeypatch):
    """(arguments, parameters) of every program that JAX starts; what is set here goes back to JAX's own."""
    found: list[tuple[tuple, dict]] = []
    own = pjit._pjit_call_impl_python

    def call(*args, **params):
        found.append((args, params))
        return own(*args, **params)

    monkeypatch.setattr(compilation_cache, "get_executable_and_time", compilation_cache.get_executable_and_time)
    monkeypatch.setattr(pjit, "_pjit_call_impl_python", call)
    jax.clear_caches()
    yield found
    jax.clear_caches()


def steps(number, axis, left):
    """Small functions of a matrix that differ by a number, a parameter or an order."""
    return [
        lambda x: x * number,
        lambda x: jnp.sum(x, axis=axis, keepdims=True) + x,
        lambda x: x.T @ x if left else x @ x.T,
        lambda x: jax.nn.relu(x),
        lambda x: jnp.roll(x, 1 + axis, axis=0),
        lambda x: jax.lax.scan(lambda c, row: ((c * number).astype(c.dtype), c + row), x[0], x)[1],
        lambda x: jnp.where(x > number, x, np.asarray([number], np.float32).item()),
        lambda x: jax.lax.cond(x.sum() > number, lambda y: y + 1, lambda y: y - axis, x),
        lambda x: x.astype(jnp.float32)[:, ::-1][..., : 1 + axis],
        lambda x: jax.vmap(lambda row: jnp.cumsum(row))(x),
        lambda x: jax.lax.rev(x, (axis,)),
    ]


def random_program(rng):
    """Some of these one after the other, with an argument: which ones, shapes, types and numbers, by chance."""
    rows, columns = (int(n) for n in rng.integers(1, 4, 2))
    kind = [jnp.float32, jnp.bfloat16, jnp.int32][rng.integers(3)]
    every = steps(rng.choice([0.5, 0.25, -0.0, 0.0, 2.0]).item(), int(rng.integers(2)), rng.integers(2))
    chosen = [every[i] for i in rng.integers(len(every), size=rng.integers(1, 3))]

    def f(x):
        for step in chosen:
            x = step(x) if x.ndim == 2 else x
        return x

    return f, jnp.asarray((rng.normal(size=(rows, columns)) * 3).astype(kind))


def test_equal_words_only_for_equal_programs(monkeypatch):
    """Against the module that JAX itself writes: two programs with the same words have the same text."""

    class Said(Exception):
        pass

    def say(*args, **params):
        raise Said(described.program(args, params))

    described, texts, known = programs.Describer(), {}, 0
    some = [random_program(np.random.default_rng(seed)) for seed in [*range(40), *range(10)]]
    square, ways = jnp.ones((2, 2)), ((0.5, 0, 0), (0.0, 0, 0), (-0.0, 0, 0), (0.5, 1, 0), (0.5, 0, 1))
    some += [(f, square) for way in ways for f in steps(*way)]  # each beside its like
    monkeypatch.setattr(pjit, "_pjit_call_impl_python", say)
    for f, x in some:
        for precision in (None, "highest"):
            with jax.default_matmul_precision(precision):
                with pytest.raises(Said) as words:
                    jax.jit(f)(x)
                text, words = jax.jit(f).lower(x).as_text(), str(words.value)
                known += words in texts
                assert texts.setdefault(words, text) == text
    assert known >= 40 and len(texts) > 90  # both happened: known words and new ones


def test_settings_and_kinds_of_arguments_are_told_apart(calls):
    described, found = programs.Describer(), []

    def words(f, *args):
        jax.clear_caches()
        calls.clear()
        f(*args)
        return described.program(*calls[-1])

    x = jnp.ones((2, 3))
    add = lambda a, b: a + b  # noqa: E731
    for one, other in (
        (x, x),
        (x, 2.0),
        (x, np.float32(2)),
        (x, np.ones((2, 3), np.float32)),
        (x, jnp.asarray(2.0) * 1),
    ):
        found.append(words(jax.jit(add), one, other))
    found.append(words(jax.jit(lambda a, b: a - b), x, x))
    found += [words(jax.jit(lambda a, n=n: a * n), x) for n in (0.0, -0.0, 1, 3)]
    with jax.enable_x64(True):
        found.append(words(jax.jit(add), x, 2.0))
    assert len(set(found)) == len(found)
    assert words(jax.jit(add), x, x) == found[0]


def test_what_words_cannot_say_goes_jax_s_own_way(calls, tmp_path):
    described, table = programs.Describer(), jnp.arange(40.0)
    seen = []

    def callback(x):
        jax.debug.callback(lambda y: seen.append(float(y.sum())), x)
        return x + 1

    device = jax.devices()[0]
    for f, args in (
        (jax.jit(lambda x: x + table), (table,)),  # a constant, whose values no words hold
        (jax.jit(callback), (table,)),
        (jax.jit(lambda x: x + 1, donate_argnums=0), (table + 1,)),
        (jax.jit(lambda x: x + 1), (jax.device_put(table, device),)),
        (jax.jit(jnp.linalg.cholesky), (jnp.eye(3),)),  # calls LAPACK, which is connected when JAX lowers
        (jax.jit(lambda k: jax.random.normal(k, (3,))), (jax.random.key(0),)),
    ):
        calls.clear()
        f(*args)
        with pytest.raises((programs.Unclear, KeyError)):
            described.program(*calls[-1])
    jax.effects_barrier()
    assert seen == [780.0]


def test_what_was_written_runs_without_a_compiler_and_gives_the_same_bits(calls, tmp_path):
    own, heard = pjit._pjit_call_impl_python, []
    rng = np.random.default_rng(1)
    some = [random_program(rng) for _ in range(12)]

    def results():
        jax.clear_caches()
        return [np.asarray(jax.jit(f)(x)) for f, x in some]

    want = results()
    programs.install(str(tmp_path), write=True)
    results()
    files = list(tmp_path.iterdir())
    assert len(files) > 8 and all(file.name.startswith("program-") for file in files)
    pjit._pjit_call_impl_python = own
    programs.install(str(tmp_path), write=False)
    listen = lambda event, seconds, **more: heard.append(event)  # noqa: E731
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        got = results()
        assert not [event for event in heard if "backend_compile" in event or "jaxpr_to_mlir" in event]
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
    for a, b in zip(want, got, strict=True):
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
    for file in files:  # written by halves: not used
        file.write_bytes(file.read_bytes()[:100])
    pjit._pjit_call_impl_python = own
    programs.install(str(tmp_path), write=False)
    assert [a.tobytes() for a in results()] == [a.tobytes() for a in want]
    jax.jit(lambda x: jnp.sin(x) * 7 + 3)(jnp.ones((2, 5)))
    assert sorted(tmp_path.iterdir()) == sorted(files)  # and nothing is added


def test_children_read_the_programs_and_cannot_add_any(desk, tmp_path):
    looks = (
        "import os, pathlib, jax\nfrom jax._src import pjit\n"
        "assert pjit._pjit_call_impl_python.__module__ == 'nanochat_lib.course.grading.programs'\n"
        "here = pathlib.Path(jax.config.jax_compilation_cache_dir) / 'programs'\n"
        "assert any(here.iterdir()) and not [n for n in os.environ if n.startswith('GRADE_')]\n"
        "for path in (here / 'mine', here.parent / 'mine', next(here.iterdir())):\n"
        "    try:\n        path.write_text('x')\n    except OSError:\n        continue\n"
        "    raise AssertionError('a child can write here')\n"
    )
    if desk.server.level == "limits":
        pytest.skip("at this level nothing stops a child from writing")
    hand_in(tmp_path, "ada", {"small.scale": looks + SCALE})
    ((_, result),) = grade.graded(list(grade.tasks(collect(tmp_path), desk, None)), desk, 1)
    assert result.exercises["small.scale"]["status"] == "passed", result.exercises["small.scale"]
