"""A check says which case failed, what was expected, what came, where first, and why, probably."""

import os
import signal
import subprocess
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from demo_course import HINTS, exercise, make_course, merge

from nanochat_lib import bpe
from nanochat_lib.course import checker, note, registry
from nanochat_lib.course.cases import Exercise, Option, Quiz, budget, example, prop, raises, reference, sign, suspect
from nanochat_lib.course.causes import likely_cause
from nanochat_lib.course.checker import check, run_cases
from nanochat_lib.course.compare import difference
from nanochat_lib.course.mode import CourseError

ONE = example("one pair", ([1, 2, 3, 1, 2], (1, 2), 9), [9, 3, 9])
RANDOM = reference("random ids", lambda rng: (rng.integers(0, 3, 40).tolist(), (1, 1), 9))
SHORTER = prop(
    "never longer",
    lambda rng: (rng.integers(0, 3, 30).tolist(), (1, 2), 9),
    lambda out, tokens, pair, new: "" if len(out) <= len(tokens) else "the result is longer than the input",
)


@pytest.fixture
def course(monkeypatch, tmp_path):
    def build(*cases, **more):
        return make_course(monkeypatch, tmp_path, [exercise(*cases, **more)])

    return build


def softmax(x):
    e = jnp.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


SOFTMAX = [reference("rows", lambda rng: (rng.normal(size=(3, 4)).astype(np.float32),), against=softmax)]


def test_a_right_answer_passes_and_says_so(course) -> None:
    course(ONE, SHORTER, RANDOM)
    result = run_cases("demo.merge", merge)
    assert result.passed and result.text.splitlines()[0] == "demo.merge: passed, all 3 cases"
    assert [row.case for row in result.rows] == ["one pair", "never longer", "random ids"]


def test_a_failure_names_case_expected_got_index_and_cause(course) -> None:
    lost = sign("the last token got lost", lambda got, want, tokens, pair, new: got == want[:-1])
    course(ONE, RANDOM, causes=[lost])
    result = run_cases("demo.merge", lambda tokens, pair, new: merge(tokens, pair, new)[:-1])
    row = result.rows[0]
    assert not result.passed and row.index == (2,)
    for part in (
        "✗ one pair",
        "called with:      tokens=[1, 2, 3, 1, 2], pair=(1, 2), new=9",
        "expected:         [9, 3, 9]",
        "got:              [9, 3]",
        "3 elements expected, got 2; the first 2 agree",
        "likely cause:     the last token got lost",
    ):
        assert part in result.text
        assert "[1, 2, 3, 1, 2]" in result.html and "the last token got lost" in result.html
    assert result.text.count("called with") == 1, "only the first failure is told in full"
    assert result.text.count("the last token got lost") == 2


def test_a_suspect_is_named_when_the_result_is_the_suspects(course) -> None:
    def backwards(tokens, pair, new):
        return merge(tokens[::-1], pair[::-1], new)[::-1]

    overlap = example("overlap", ([1, 1, 1], (1, 1), 9), [9, 1])
    course(overlap, causes=[suspect("you merged nothing", lambda t, p, n: t), suspect("from right to left", backwards)])
    assert "likely cause:     from right to left" in run_cases("demo.merge", backwards).text
    assert "nothing" in run_cases("demo.merge", lambda t, p, n: list(t)).rows[0].cause


def test_a_cause_that_raises_is_passed_over(course) -> None:
    course(ONE, causes=[suspect("a", lambda *a: 1 / 0), sign("b", lambda *a: 1 / 0), sign("c", lambda *a: True)])
    assert run_cases("demo.merge", lambda *a: []).rows[0].cause == "c"


@pytest.mark.parametrize(
    ("wrong", "cause"),
    [
        (lambda x: None, "no `return`"),
        (lambda x: softmax(x).T, "transposed"),
        (lambda x: softmax(x) * 2, "twice"),
        (lambda x: -softmax(x), "the sign is wrong"),
        (lambda x: softmax(x) + 0.5, "off by the same 0.5"),
        (lambda x: softmax(x)[:, None], "an axis of size 1"),
        (lambda x: softmax(x).sum(-1), "an axis is lost"),
        (lambda x: softmax(x).tolist(), "make an array"),
        (lambda x: (softmax(x),), "more was returned"),
        (lambda x: softmax(x).astype(jnp.int32), "whole numbers"),
        (lambda x: softmax(x).at[1, 2].set(jnp.nan), "NaN comes from"),
        (lambda x: softmax(x) / 0, "infinite values"),
        (lambda x: softmax(x).at[:, 3].set(0), "the last along axis 1"),
        (lambda x: softmax(x)[:, ::-1], "reversed along axis 1"),
        (lambda x: jnp.roll(softmax(x), 1, 1), "shifted by one place along axis 1"),
        (lambda x: softmax(x) * 0, "every value is zero"),
        (lambda x: softmax(x) * (1 + 1e-4), "nearly right"),
        (lambda x: softmax, "a function was returned"),
        (lambda x: softmax(x)[:, :3], "axis 1 is one too short"),
        (lambda x: [][3], "an index past the end"),
        (lambda x: softmax(y), "does not know"),  # noqa: F821
        (lambda: 1, "other arguments"),
        (lambda x: x @ x, "do not fit together"),
        (jax.jit(lambda x: softmax(x) if x[0, 0] > 0 else x), "jnp.where"),
    ],
)
def test_generic_causes(course, wrong, cause: str) -> None:
    course(*SOFTMAX, library="")
    row = run_cases("demo.merge", wrong).rows[0]
    if cause == "no `return`":
        assert "return" in row.cause
    else:
        assert row.status == "failed" and cause in row.cause, row


@pytest.mark.parametrize(("got", "want"), [([11], [10]), (11, 10), (np.array([11]), np.array([10])), (3.0, 2.0)])
def test_off_by_one(got: object, want: object) -> None:
    assert likely_cause(got, want, (), difference(got, want), (), None, None) == "off by one"


def test_a_heat_map_shows_where(course) -> None:
    course(*SOFTMAX, library="")
    result = run_cases("demo.merge", lambda x: softmax(x).at[1, 2].add(0.3).at[0, 0].add(0.03))
    lines = result.text.splitlines()
    start = lines.index("      where it differs (dark: most):")
    assert lines[start + 1 : start + 4] == ["        |░   |", "        |  █ |", "        |    |"]
    assert result.html.count("rgba(213,94,0,1.00)") == 1 and "where it differs" in result.html


def test_html_escapes_what_the_learner_returns(course) -> None:
    course(ONE)
    html = run_cases("demo.merge", lambda *a: "<script>alert(1)</script>").html
    assert "<script" not in html and "&lt;script" in html


def test_none_is_never_right_by_accident(course) -> None:
    nothing = reference("library gives None", lambda rng: (1,), against=lambda x: None)
    course(nothing, library="")
    with pytest.raises(TypeError, match="returned None, which would prove nothing"):
        run_cases("demo.merge", lambda x: None)
    course(prop("holds always", lambda rng: (1,), lambda out, x: ""), library="")
    assert "returned None" in run_cases("demo.merge", lambda x: None).rows[0].cause
    course(example("pair", (1,), (1, 2)), library="")
    assert "None stands at [1]" in run_cases("demo.merge", lambda x: (1, None)).rows[0].cause
    course(example("none on purpose", (1,), None), library="")
    assert run_cases("demo.merge", lambda x: None).passed and not run_cases("demo.merge", lambda x: x).passed


def test_changing_an_argument_is_caught(course) -> None:
    def greedy(tokens, pair, new):
        out = merge(tokens, pair, new)
        tokens.clear()
        return out

    course(ONE)
    assert "changed its argument tokens" in run_cases("demo.merge", greedy).rows[0].cause
    course(ONE, mutates=True)
    assert run_cases("demo.merge", greedy).passed

    def scaled(x):
        x *= 2
        return x / 2

    course(reference("array", lambda rng: (rng.normal(size=3),), against=lambda x: x + 0), library="")
    assert "changed its argument x" in run_cases("demo.merge", scaled).rows[0].cause


def test_the_stub_is_not_attempted_and_a_missing_rule_of_jax_is_a_failure(course) -> None:
    def stub(tokens, pair, new):
        raise NotImplementedError("your turn")

    course(ONE, RANDOM)
    result = run_cases("demo.merge", stub)
    assert result.status == "not attempted" and result.text == "demo.merge: not attempted yet"

    names: dict = {}
    exec(compile("def rule(x): raise NotImplementedError('no rule')", "lib/site-packages/jax/rules.py", "exec"), names)
    course(reference("x", lambda rng: (1.0,), against=lambda x: x), library="")
    missing = run_cases("demo.merge", lambda x: names["rule"](x))
    assert missing.status == "failed" and missing.rows[0].got == "NotImplementedError: no rule"
    assert run_cases("demo.merge", jax.jit(lambda x: stub(x, 1, 1))).status == "not attempted"


def test_the_first_wrong_step_is_named(course) -> None:
    steps = lambda x: {"largest": x.max(), "shifted": x - x.max(), "sum": np.exp(x - x.max()).sum()}  # noqa: E731

    def mine(x, largest):
        note("largest", x.max())
        note("shifted", x - largest)
        return np.exp(note("again", x)) / note("sum", np.exp(x - largest).sum())

    right = reference("row", lambda rng: (rng.normal(size=5),), against=lambda x: x / 7)
    course(right, library="", steps=steps)
    row = run_cases("demo.merge", lambda x: mine(x, x.min())).rows[0]
    assert row.step.startswith("shifted: 5 of 5 values differ, first at [0]")
    assert "first wrong step: shifted" in run_cases("demo.merge", lambda x: mine(x, x.min())).text
    assert run_cases("demo.merge", lambda x: mine(x, x.max())).rows[0].step == ""
    assert "first wrong step" not in run_cases("demo.merge", jax.jit(lambda x: note("largest", x))).text
    assert note("outside", 3) == 3


def test_an_expected_exception(course) -> None:
    def strict(tokens, pair, new):
        if len(pair) != 2:
            raise ValueError("a pair has two parts")
        return tokens

    course(example("a triple", ([1], (1, 2, 3), 9), raises(ValueError, "two parts")))
    assert run_cases("demo.merge", strict).passed
    assert "bad input was accepted" in run_cases("demo.merge", merge).rows[0].cause
    assert "another kind" in run_cases("demo.merge", lambda *a: 1 / 0).rows[0].cause
    wordless = run_cases("demo.merge", lambda *a: (_ for _ in ()).throw(ValueError("no")))
    assert "message" in wordless.rows[0].cause


def test_an_exception_names_the_line(course) -> None:
    def falls(tokens, pair, new):
        return tokens[len(tokens)]  # one too far

    course(ONE)
    row = run_cases("demo.merge", falls).rows[0]
    assert row.got == "IndexError: list index out of range" and "one too far" in row.where
    assert row.expected == "[9, 3, 9]"


def test_an_endless_loop_is_stopped(course, monkeypatch) -> None:
    def endless(tokens, pair, new):
        while True:
            try:
                sum(tokens)
            except Exception:
                pass

    course(ONE)
    monkeypatch.setattr(checker, "PATIENCE", 0.2)
    began = time.monotonic()
    result = run_cases("demo.merge", endless, [ONE, example("another", ([7], (1, 2), 9), [7])])
    assert "never end" in result.rows[0].cause and not result.passed
    assert {row.status for row in result.rows[1:]} == {"not run"} and "not run after an endless one" in result.text
    assert time.monotonic() - began < 5
    assert run_cases("demo.merge", merge).passed
    assert signal.getitimer(signal.ITIMER_REAL) == (0, 0), "an alarm left behind goes off later"


def test_leaving_python_is_only_a_failure(course) -> None:
    course(ONE)
    assert run_cases("demo.merge", lambda *a: exit(3)).rows[0].got.startswith("SystemExit")
    leave = os._exit
    row = run_cases("demo.merge", lambda *a: os._exit(0)).rows[0]
    assert row.got == "SystemExit: os._exit(0) would end Python at once; return a result instead"
    assert os._exit is leave


def test_a_forked_child_still_ends_as_it_does() -> None:
    program = """if True:
        import os
        from nanochat_lib.course.mishaps import staying
        with staying():
            if child := os.fork():
                print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            else:
                os._exit(7)
    """
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "7\n"


def test_the_same_seed_gives_the_same_arguments_and_another_seed_others(course) -> None:
    course(RANDOM)
    first = checker.arguments("demo.merge", RANDOM, 0)
    assert first == checker.arguments("demo.merge", RANDOM, 0) != checker.arguments("demo.merge", RANDOM, 1)
    assert first != checker.arguments("demo.other", RANDOM, 0)


def test_a_harness_wraps_learner_and_library_alike(course) -> None:
    def grad(fn, x):
        return jax.grad(fn)(x)

    rows = lambda rng: (rng.normal(size=4).astype(np.float32),)  # noqa: E731
    gradient = reference("gradient", rows, against=lambda x: (x**3).sum(), call=grad)
    course(gradient, library="", causes=[suspect("squared", lambda x: (x**2).sum())])
    assert run_cases("demo.merge", lambda x: (x * x * x).sum()).passed
    assert run_cases("demo.merge", lambda x: (x * x).sum()).rows[0].cause == "squared"


def test_right_answers_pass_in_float64_too(course) -> None:
    course(*SOFTMAX, example("written down", (np.array([0.0, 0.0]),), np.array([0.5, 0.5])), library="")
    other = lambda x: jax.nn.softmax(jnp.asarray(x))  # noqa: E731
    for mode in (False, True):
        with jax.enable_x64(mode):
            assert run_cases("demo.merge", other).passed
            assert not run_cases("demo.merge", lambda x: other(x) * 1.001).passed


def test_check_shows_records_and_never_raises_unless_strict(course, capsys, monkeypatch) -> None:
    course(ONE)
    result = check("demo.merge", lambda *a: [])
    assert capsys.readouterr().out.startswith("demo.merge: 0 of 1 cases pass") and not result.passed
    assert repr(result) == "<check of demo.merge: failed>"
    assert "needs the function itself" in check("demo.merge", [9, 3, 9]).text
    monkeypatch.setenv("COURSE_STRICT", "1")
    with pytest.raises(CourseError, match=r"(?s)demo.merge.*expected:.*\[9, 3, 9\]"):
        check("demo.merge", lambda *a: [])
    assert check("demo.merge", merge).passed


def test_budget_waits_for_right_results_and_compares_with_the_library(course, monkeypatch) -> None:
    def slow(tokens, pair, new):
        for _ in range(12):
            out = bpe.merge(tokens, pair, new)
        return out

    speed = budget("speed", lambda rng: (rng.integers(0, 3, 500).tolist(), (1, 1), 9), time=4.0, why="it does it again")
    course(ONE, speed)
    assert "(measured once the results are right)" in run_cases("demo.merge", lambda *a: []).text
    row = run_cases("demo.merge", slow).rows[1]
    assert (
        "times the time of the library's function; allowed are 4 times" in row.where and row.cause == "it does it again"
    )
    assert run_cases("demo.merge", merge).passed
    assert run_cases("demo.merge", bpe.merge).passed
    assert [row.case for row in run_cases("demo.merge", slow, budgets_too=False).rows] == ["one pair"]


def test_checks_and_their_mistakes(course) -> None:
    course(ONE)
    with pytest.raises(Exception, match="did you mean demo.merge"):
        registry.exercise("demo.merg")
    with pytest.raises(Exception, match="there is no topic 'nosuch'"):
        registry.load_checks("nosuch")
    with pytest.raises(TypeError, match="must be a tuple"):
        example("x", [1], 2)
    with pytest.raises(TypeError, match="exactly three"):
        Exercise("a.b", cases=[ONE], hints=["a", "b"])
    with pytest.raises(TypeError, match="same name"):
        Exercise("a.b", cases=[ONE, ONE], hints=HINTS)
    with pytest.raises(TypeError, match="must be among"):
        budget("x", lambda rng: (), seconds=3)
    with pytest.raises(TypeError, match="one is right"):
        Quiz("a.q", "?", [Option("a", "b"), Option("c", "d")])
    with pytest.raises(TypeError, match="says why"):
        Quiz("a.q", "?", [Option("a", "b", right=True), Option("c", "")])
    with pytest.raises(TypeError, match="no cases"):
        run_cases("demo.merge", merge, [])
