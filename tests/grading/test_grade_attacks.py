"""What a submission can try against the grader: it is worth nothing, and nobody else suffers."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import grade_course
import pytest

from nanochat_lib.course import rules
from nanochat_lib.course.grading import attacks, grade, pool, session
from nanochat_lib.course.grading.submissions import collect

LEVELS = ("bubblewrap", "namespaces")
MARKER = Path(attacks.MARKER)
FORBIDDEN = tuple(attacks.forbidden("", 0, ""))


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
def second(course, desk, tmp_path_factory):
    """A server at the second level, which bubblewrap does not help."""
    if desk.server.level != "bubblewrap":
        pytest.skip("the second level is the one that all tests run at")
    with pool.start(desk.server.modules, only="namespaces", checks=str((course / rules.CHECKS).resolve())) as server:
        yield grade.Desk(desk.keys, server, lambda one: desk.limits_of(one.stem))


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_forbidden_is_refused(course, desk, level, request, tmp_path, listening):
    """Right answers, so that only a refusal keeps them from passing; and an honest one among them."""
    if level == "namespaces":
        desk = request.getfixturevalue("second")
    if desk.server.level != level:
        pytest.skip("this system has no bubblewrap")
    secret = str(course / "solutions" / f"{grade_course.STEM}.py")
    for name, text in attacks.forbidden(secret, listening.getsockname()[1], grade_course.MERGE).items():
        grade_course.hand_in(tmp_path, name, {"small.merge": text})
    grade_course.hand_in(tmp_path, "honest", {"small.merge": grade_course.MERGE})
    MARKER.unlink(missing_ok=True)
    waiting = list(grade.tasks(collect(tmp_path), desk, None))
    found = {task.paper.learner: result.exercises["small.merge"] for task, result in grade.graded(waiting, desk, 4)}
    assert found.pop("honest")["status"] == "passed" and set(found) == set(FORBIDDEN)
    assert [name for name, entry in found.items() if any(passed for passed, _ in entry["groups"].values())] == []
    test_nothing_is_left_behind(None, listening)


def test_namespaces_hold_the_network_and_other_processes_by_themselves(tmp_path):
    """Without what lies above them, so that one layer more is really one layer more."""
    code = """if True:
        import os, socket, sys
        from nanochat_lib.course.grading import confine
        try:
            confine.enter_namespaces(sys.argv[1], confine.Bounds())
        except OSError:
            print("refused here", flush=True)
            os._exit(0)
        names = [name for _, name in socket.if_nameindex()]
        print(names, os.getpid(), os.getppid(), os.listdir(sys.argv[1]), flush=True)
        os._exit(0)
    """
    (tmp_path / "somebody's").touch()
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=60)
    if "refused here" in done.stdout:
        pytest.skip("this system refuses namespaces")
    assert done.stdout.strip() == "['lo'] 1 0 []", done


def test_less_isolation_than_required_is_refused(monkeypatch):
    from nanochat_lib.errors import UserError

    def nothing(level, *rest):
        raise OSError("not here")

    monkeypatch.setattr(pool, "Server", nothing)
    with pytest.raises(UserError, match="isolation 'strong' does not work here .*bubblewrap"):
        pool.start([], "strong")
