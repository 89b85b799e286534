"""Progress is kept on disk: whole after two writers, after a broken file, and with every attempt."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from demo_course import exercise, make_course, merge

from nanochat_lib.course import check, hint, predict, progress, quiz, reveal, state
from nanochat_lib.course.cases import Option, Prediction, Quiz, example
from nanochat_lib.course.predicting import read_guess
from nanochat_lib.errors import UserError

ONE = example("one pair", ([1, 2, 3, 1, 2], (1, 2), 9), [9, 3, 9])
QUIZ = Quiz(
    "demo.q", "Which pair wins?", [Option("the first", "ties go by `id`"), Option("the least", "yes", right=True)]
)
GUESS = Prediction("demo.p", "How many tokens?", unit="tokens")


@pytest.fixture
def home(monkeypatch, tmp_path):
    other = exercise(ONE, id="demo.other", library="")
    return make_course(monkeypatch, tmp_path, [exercise(ONE), other], [QUIZ], [GUESS])


def record(home: Path) -> dict:
    return json.loads((home / ".course" / "progress.json").read_text(encoding="utf-8"))


def wrong(tokens, pair, new):
    return tokens[:2]


def test_attempts_are_counted_and_a_pass_stays_one(home) -> None:
    check("demo.merge", wrong)
    assert record(home)["exercises"]["demo.merge"] == {"attempts": 1, "passed": False, "status": "failed"}
    check("demo.merge", wrong)
    assert record(home)["exercises"]["demo.merge"]["attempts"] == 1, "the same text again is no new attempt"
    check("demo.merge", merge)
    check("demo.merge", wrong)
    kept = record(home)["exercises"]["demo.merge"]
    assert (kept["attempts"], kept["passed"], kept["status"], kept["saved"]) == (3, True, "failed", 2)
    assert [(n, s) for n, s, _ in state.attempts("demo.merge")] == [(1, "failed"), (2, "passed"), (3, "failed")]


def test_a_broken_record_is_set_aside_and_counted_again(home, capsys) -> None:
    check("demo.merge", merge)
    path = home / ".course" / "progress.json"
    for number, broken in enumerate(("{half", "[]", '{"exercises": {"demo.merge": 3}}', "\x00"), start=1):
        path.write_text(broken, encoding="utf-8")
        capsys.readouterr()
        assert state.exercise_record("demo.merge")["passed"]
        assert f"kept as .course/progress.broken-{number}.json" in capsys.readouterr().out
        assert (home / ".course" / f"progress.broken-{number}.json").read_text(encoding="utf-8") == broken
        assert record(home)["exercises"]["demo.merge"]["saved"] == 1
    path.write_bytes(b"\xff\xfe")
    assert state.exercise_record("demo.merge")["passed"]
    path.unlink()
    assert state.exercise_record("demo.merge")["passed"], "a lost record is counted again as well"


def test_two_processes_lose_nothing(home) -> None:
    code = (
        "import sys\nfrom nanochat_lib.course import state\n"
        "for i in range(25):\n"
        "    with state.change() as data: data['hints'][f'{sys.argv[1]}.{i}'] = {'level': 1}\n"
    )
    env = {**os.environ, "COURSE_HOME": str(home)}
    root = Path(__file__).parents[2]
    both = [subprocess.Popen([sys.executable, "-c", code, name], env=env, cwd=root) for name in "ab"]
    assert [process.wait(60) for process in both] == [0, 0]
    assert len(record(home)["hints"]) == 50


def test_a_folder_that_cannot_be_written_is_one_clear_line(home, monkeypatch, tmp_path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="set COURSE_HOME to a folder of your own"):
        check("demo.merge", wrong)


def test_an_error_while_changing_writes_nothing(home) -> None:
    with pytest.raises(ZeroDivisionError), state.change() as data:
        data["hints"]["x"] = {"level": 1}
        raise ZeroDivisionError
    assert state.read()["hints"] == {}


def test_only_so_many_failed_attempts_are_kept(home, monkeypatch) -> None:
    monkeypatch.setattr(state, "KEPT", 4)
    state.add_attempt("demo.merge", "passed", "a = 0\n")
    for i in range(8):
        state.add_attempt("demo.merge", "failed", f"a = {i}\n")
    kept = [(n, s) for n, s, _ in state.attempts("demo.merge")]
    assert kept[0] == (1, "passed") and len(kept) == 4 and kept[-1] == (9, "failed")


def test_hints_come_one_after_the_other(home, capsys) -> None:
    for expected in ("Hint 1 of 3 for demo.merge: look at the pairs", "two at a time", "[9, 3, 9]", "[9, 3, 9]"):
        hint("demo.merge")
        assert expected in capsys.readouterr().out
    hint("demo.merge", 1)
    assert "look at the pairs" in capsys.readouterr().out
    assert record(home)["hints"]["demo.merge"]["level"] == 3
    with pytest.raises(UserError, match="hints 1, 2 and 3, not 4"):
        hint("demo.merge", 4)


def test_quiz_as_text(home, capsys) -> None:
    assert quiz("demo.q") is None
    asked = capsys.readouterr().out
    assert asked.startswith('Which pair wins?\n  (a) the first\n  (b) the least\n(answer with quiz("demo.q", "a"))')
    assert quiz("demo.q", "a") is False
    assert "Not quite. (a) the first: ties go by `id`" in capsys.readouterr().out
    assert quiz("demo.q", "B") is True
    assert quiz("demo.q", "a") is False
    assert record(home)["quizzes"]["demo.q"] == {"answer": "a", "right": True, "tries": 2}
    with pytest.raises(UserError, match="one letter from a to b"):
        quiz("demo.q", "c")


@pytest.mark.parametrize(
    ("guess", "true", "words"),
    [
        (10, 12, "You guessed 10 tokens; it is 12 tokens. Your guess is 17% too low."),
        (12, 12, "Right."),
        (1000, 12, "83.3 times too high"),
        (1.99, 2.0, "Right."),
        (-1, 2, "off by 3"),
        ("relu", "softmax", "Not the same."),
    ],
)
def test_a_guess_stands_beside_the_truth(home, capsys, guess, true, words) -> None:
    predict("demo.p", guess)
    reveal("demo.p", true)
    assert words in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "unit", "guess"),
    [
        ("1,500", "", 1500),
        (" 6.2 nats ", "nats", 6.2),
        ("12 %", "", 12),
        ("30%", "%", 30),
        ("−6", "as a power of ten", -6),
        ("1e3", "", 1000.0),
        ("relu, I think", "", "relu, I think"),
    ],
)
def test_a_typed_guess_is_a_number_where_it_can_be(typed, unit, guess) -> None:
    found = read_guess(typed, unit)
    assert found == guess and type(found) is type(guess)


def test_without_a_guess_only_the_truth(home, capsys) -> None:
    predict("demo.p")
    reveal("demo.p", 1234)
    out = capsys.readouterr().out
    assert 'write your guess into this cell: predict("demo.p", …)' in out and out.endswith("It is 1,234 tokens.\n")
    predict("demo.p", 5)
    predict("demo.p")
    assert "your guess so far: 5 tokens" in capsys.readouterr().out


def test_progress_names_points_minutes_and_what_is_next(home, capsys) -> None:
    progress()
    before = capsys.readouterr().out
    assert "00 A demo  ░░░░░░░░░░░░  0/2 exercises   0/4 points  20 min left" in before
    assert "Next: demo.merge in chapter 00 (about 10 minutes)." in before
    check("demo.merge", merge)
    quiz("demo.q", "b")
    capsys.readouterr()
    progress()
    after = capsys.readouterr().out
    assert "██████░░░░░░  1/2 exercises   2/4 points  10 min left" in after
    assert "1 of 2 exercises, 2 of 4 points. Next: demo.other" in after
    assert "Quizzes: 1 right of 1 answered." in after
