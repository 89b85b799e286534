"""What a submission can try against the grader: it is worth nothing, and nobody else suffers."""

from __future__ import annotations

import socket
from pathlib import Path

import grade_course
import pytest

from nanochat_lib.course import rules
from nanochat_lib.course.grading import attacks, grade, pool, session
from nanochat_lib.course.grading.submissions import collect

LEVELS = ("bubblewrap", "namespaces")
MARKER = Path(attacks.MARKER)
AROUND_BUBBLEWRAP = (  # what bubblewrap alone would stop is tried without it, too; each is over in an instant
    "a file of the instructor", "the instructor's folder", "another's work", "a file by another door",
    "a link to a file", "a hard link to a file", "the environment of others", "the memory of the server",
    "a TCP connection", "a socket of the system", "another program", "a fork that writes, too",
    "a signal to the server", "a signal to all", "rights regained", "a debugger", "the package changed",
    "a file where everybody may write", "a pickle",
)  # fmt: skip


@pytest.fixture(scope="module")
def listening():
    """A port on which the test waits for somebody who should not come."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        yield server


@pytest.fixture(scope="module")
def marked(course, desk, tmp_path_factory, listening):
    """Every attack and three honest learners, graded in one batch: learner -> result."""
    if desk.server.level not in LEVELS:
        pytest.skip("this system isolates nothing")
    secret, folder = course / "solutions" / f"{grade_course.STEM}.py", tmp_path_factory.mktemp("handed_in")
    assert grade_course.SECRET in secret.read_text()
    for name, text in attacks.attacks(str(secret), listening.getsockname()[1]).items():
        grade_course.hand_in(folder, name, {"small.merge": text})
    for name, text in attacks.CHEATED.items():
        answers = {"small.merge": text + grade_course.MERGE, "small.scale": text + grade_course.SCALE}
        grade_course.hand_in(folder, name, answers)
    for name in ("aaa honest", "mmm honest", "zzz honest"):
        grade_course.hand_in(folder, name, grade_course.RIGHT)
    MARKER.unlink(missing_ok=True)
    with pytest.MonkeyPatch.context() as patch:  # nobody waits long for an endless loop
        for name, seconds in {"FLOOR": 1.0, "LOADING": 1.5, "WALL": 3.0, "GRACE": 0.5}.items():
            patch.setattr(session, name, seconds)
        waiting = list(grade.tasks(collect(folder), desk, None))
        return {task.paper.learner: result for task, result in grade.graded(waiting, desk, 6)}


@pytest.mark.parametrize("name", attacks.attacks("", 0))
def test_an_attack_is_worth_nothing(marked, name):
    result = marked[name]
    assert not isinstance(result, Exception), result
    entry = result.exercises["small.merge"]
    assert entry["status"] == "failed" and not any(passed for passed, _ in entry["groups"].values()), entry
    assert result.isolation in LEVELS
    assert grade_course.SECRET not in repr(result).lower()


@pytest.mark.parametrize("name", attacks.CHEATED)
def test_a_patched_measure_does_not_count(marked, name):
    exercises = marked[name].exercises
    budgets = [row for entry in exercises.values() for row in entry["rows"] if row["kind"] in ("budget", "property")]
    assert budgets and any("changes what measures it" in row.get("cause", "") for row in budgets), budgets
    assert any(entry["status"] != "passed" for entry in exercises.values())


def test_there_are_at_least_forty(marked):
    assert len(attacks.attacks("", 0)) + len(attacks.CHEATED) >= 40


@pytest.mark.parametrize("name", ["aaa honest", "mmm honest", "zzz honest"])
def test_the_honest_do_not_suffer(marked, name):
    rows = [row for entry in marked[name].exercises.values() for row in entry["rows"]]
    assert [row for row in rows if row["status"] != "passed"] == []


def test_nothing_is_left_behind(marked, listening):
    assert not MARKER.exists()
    with pytest.raises(BlockingIOError):
        listening.accept()


@pytest.fixture(scope="module")
def second(course, desk, tmp_path_factory, listening):
    """Some attacks and an honest learner at the second level, where the first is what all other tests run at."""
    if desk.server.level != "bubblewrap":
        pytest.skip("the second level is the one that all tests run at")
    secret, folder = course / "solutions" / f"{grade_course.STEM}.py", tmp_path_factory.mktemp("second")
    every = attacks.attacks(str(secret), listening.getsockname()[1])
    for name in AROUND_BUBBLEWRAP:
        grade_course.hand_in(folder, name, {"small.merge": every[name]})
    grade_course.hand_in(folder, "honest", {"small.merge": grade_course.MERGE})
    MARKER.unlink(missing_ok=True)
    checks = str((course / rules.CHECKS).resolve())
    with pool.start(desk.server.modules, only="namespaces", checks=checks) as server:
        weaker = grade.Desk(desk.keys, server, desk.limits)
        waiting = list(grade.tasks(collect(folder), weaker, None))
        return {task.paper.learner: result for task, result in grade.graded(waiting, weaker, 4)}


def test_the_second_level_stops_them_too(second, listening):
    assert {result.isolation for result in second.values()} == {"namespaces"}
    for name in AROUND_BUBBLEWRAP:
        entry = second[name].exercises["small.merge"]
        assert entry["status"] == "failed" and not any(passed for passed, _ in entry["groups"].values()), (name, entry)
        assert grade_course.SECRET not in repr(second[name]).lower(), name
    assert second["honest"].exercises["small.merge"]["status"] == "passed"
    test_nothing_is_left_behind(second, listening)


def test_less_isolation_than_required_is_refused(monkeypatch):
    from nanochat_lib.errors import UserError

    def nothing(level, *rest):
        raise OSError("not here")

    monkeypatch.setattr(pool, "Server", nothing)
    with pytest.raises(UserError, match="isolation 'strong' does not work here .*bubblewrap"):
        pool.start([], "strong")
