"""A batch from hand-in to marks: restart, reuse, shards, salts, damage; and every chapter's right answers."""

from __future__ import annotations

import contextlib
import os
import time
import zipfile
from dataclasses import replace
from pathlib import Path

import grade_course
import pytest
from grade_course import MERGE, RIGHT, SCALE, TWICE, hand_in

from nanochat_lib.course.grading import grade, key, policy, resemble, session
from nanochat_lib.course.grading.gradebook import Gradebook
from nanochat_lib.course.grading.marks import marks
from nanochat_lib.course.grading.submissions import collect
from nanochat_lib.course.result import Row
from nanochat_lib.errors import UserError
from nanochat_lib.sandbox.processes import family

WRONG = MERGE.replace("i += 2", "i += 1")


def graded(desk, folder, jobs=2):
    found = {}
    for task, result in grade.graded(list(grade.tasks(collect(folder), desk, None)), desk, jobs):
        found[task.paper.learner] = result
    return found


def causes(result, exercise):
    return {
        row["case"]: row.get("cause", "") for row in result.exercises[exercise]["rows"] if row["status"] != "passed"
    }


def test_right_wrong_and_empty(desk, tmp_path):
    hand_in(tmp_path, "right", RIGHT)
    hand_in(tmp_path, "wrong", RIGHT | {"small.merge": WRONG})
    hand_in(tmp_path, "empty", dict.fromkeys(RIGHT, "def merge(*a): raise NotImplementedError\nscale = twice = merge"))
    hand_in(
        tmp_path,
        "broken",
        {"small.merge": "def merge(tokens, pair, new):\n    return lost", "small.scale": "1/0\n" + SCALE},
    )
    found = graded(desk, tmp_path)
    assert all(e["status"] == "passed" for e in found["right"].exercises.values()), found["right"]
    assert found["right"].exercises["small.merge"]["groups"] == {"public": [2, 2], "hidden": [3, 3], "budget": [1, 1]}
    wrong = found["wrong"].exercises
    assert wrong["small.merge"]["status"] == "failed" and wrong["small.merge"]["groups"]["budget"] == [0, 1]
    assert "a token was used twice" in causes(found["wrong"], "small.merge").values()
    assert wrong["small.twice"]["status"] == "passed"  # the library's merge stands in for the failed one
    assert {e["status"] for e in found["empty"].exercises.values()} == {"not attempted"}
    assert "does not know" in causes(found["broken"], "small.merge")["one pair"]
    assert "cell 2 does not run (ZeroDivisionError" in causes(found["broken"], "small.scale")["ones"]
    assert found["broken"].exercises["small.twice"]["status"] == "not handed in"


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ("def scale(x, factor):\n    return np.asarray(x, np.float64) * factor", "dtype"),
        ("def scale(x, factor):\n    return (x * factor)[None]", "axis"),
        ("def scale(x, factor):\n    return [1, 2]", "array"),
        ("def scale(x, factor):\n    return x * np.nan", "NaN"),
        ("def scale(x, factor):\n    return (x + 1) * factor", "off by the same"),
        ("def scale(x, factor):\n    pass", "None"),
        ("def scale(x):\n    return x", "other arguments"),
    ],
)
def test_type_shape_dtype_and_values_are_compared(desk, tmp_path, answer, says):
    hand_in(tmp_path, "ada", {"small.scale": answer})
    found = graded(desk, tmp_path)["ada"]
    assert any(says in cause for cause in causes(found, "small.scale").values()), found.exercises["small.scale"]


def test_an_argument_that_was_changed_is_seen(desk, tmp_path):
    hand_in(tmp_path, "ada", {"small.merge": MERGE.replace("return out", "tokens.clear()\n    return out")})
    assert "changed its argument tokens" in causes(graded(desk, tmp_path)["ada"], "small.merge")["one pair"]


def test_a_dead_child_costs_its_exercise_only(desk, tmp_path):
    hand_in(tmp_path, "ada", RIGHT | {"small.merge": "import posix\ndef merge(*a):\n    posix._exit(1)"})
    found = graded(desk, tmp_path)["ada"]
    assert "ended Python" in causes(found, "small.merge")["one pair"]
    assert found.exercises["small.scale"]["status"] == found.exercises["small.twice"]["status"] == "passed"


def test_the_learners_own_earlier_answer_is_used_where_it_is_right(desk, tmp_path):
    own = RIGHT | {"small.merge": MERGE + "merge.own = True", "small.twice": TWICE.replace(":\n", ":\n    merge.own\n")}
    hand_in(tmp_path, "ada", own)
    hand_in(tmp_path, "bob", own | {"small.merge": WRONG + "merge.own = True"})
    found = graded(desk, tmp_path)
    assert found["ada"].exercises["small.twice"]["status"] == "passed"
    assert "AttributeError" in str(found["bob"].exercises["small.twice"]["rows"])  # the library's has no such thing


def test_a_case_may_take_a_multiple_of_the_right_answers_time(desk):
    one = next(iter(desk.keys.values()))
    question = one.questions["small.merge"]
    budget, plain = (next(c for c in question.cases if bool(c.limits) is wanted) for wanted in (True, False))
    known = session.Session(desk.server, one, None, 0, {(question.id, c.name): 0.5 for c in (budget, plain)})
    assert known.seconds(question, plain) == session.FLOOR + 5 and known.seconds(question, budget) == session.FLOOR + 20
    unknown = session.Session(desk.server, one, None, 0, {})
    assert unknown.seconds(question, plain) == session.FLOOR + session.LOADING


def test_right_answers_are_tried_once_for_a_machine(desk, tmp_path, monkeypatch):
    asked: list[dict] = []
    served = lambda *args, **more: asked.append(more) or contextlib.nullcontext(desk.server)  # noqa: E731
    monkeypatch.setattr(grade.pool, "Server", served)
    one, said = next(iter(desk.keys.values())), []
    first = grade._proven(one, desk.server, tmp_path, None, "", said.append)
    assert len(said) == 1 and first and grade._proven(one, desk.server, tmp_path, None, "", said.append) == first
    assert len(said) == 1 and asked == [{"writes": True}]
    monkeypatch.setattr(grade.programs, "machine", lambda: "another version of JAX")
    assert grade._proven(one, desk.server, tmp_path, None, "", said.append) and len(said) == 2


def test_only_chapters_that_were_handed_in_are_tried(desk, tmp_path):
    (one,), tried = desk.keys.values(), []
    keys = {"08_more": replace(one, stem="08_more", questions={}), one.stem: one}
    more = grade.Desk(keys, desk.server, lambda key: tried.append(key) or {})
    hand_in(tmp_path, "ada", RIGHT)
    waiting = list(grade.tasks(collect(tmp_path), more, None))
    assert tried == [] and [found.learner for _, found in grade.graded(waiting, more, 1)] == ["ada"]
    assert [key.stem for key in tried] == [one.stem]


def test_a_right_answer_that_fails_stops_all_before_anybody_is_graded(desk, tmp_path):
    def fails(_key):
        raise UserError("the right answer to small.twice fails")

    hand_in(tmp_path, "ada", RIGHT)
    more = grade.Desk(desk.keys, desk.server, fails)
    waiting = list(grade.tasks(collect(tmp_path), more, None))
    with pytest.raises(UserError, match="the right answer"):
        next(grade.graded(waiting, more, 1))


def test_a_batch_goes_on_where_it_stopped(course, desk, tmp_path, monkeypatch):
    monkeypatch.setattr(grade, "open_desk", lambda *args, **more: contextlib.nullcontext(desk))
    folder, book = tmp_path / "in", tmp_path / "book.sqlite"
    for name in ("ada", "bob", "cy"):
        hand_in(folder, name, RIGHT)
    (folder / "dora").mkdir()
    (folder / "dora" / "x.ipynb").write_text("{")
    said: list[str] = []
    real, count = Gradebook.add, []

    def stops(self, result):
        if len(count) == 2:
            raise KeyboardInterrupt
        count.append(result.learner)
        return real(self, result)

    monkeypatch.setattr(Gradebook, "add", stops)
    with pytest.raises(KeyboardInterrupt):
        grade.run(folder, book, course, jobs=1, say=said.append)
    monkeypatch.setattr(Gradebook, "add", real)
    assert grade.run(folder, book, course, jobs=1, say=said.append) == 0
    assert "4 learners, 1 paper to grade, 2 unchanged" in said[-3] and "dora: nothing that could be graded" in said[-2]
    with Gradebook(book) as found:
        assert len(found.results()) == 3 and [m.learner for m in marks(found, policy.Policy())] == [
            "ada",
            "bob",
            "cy",
            "dora",
        ]
        assert found.results()[0].isolation in ("bubblewrap", "namespaces", "limits")
    hand_in(folder, "ada", RIGHT | {"small.merge": WRONG})
    grade.run(folder, book, course, say=said.append)
    with Gradebook(book) as found:
        assert (
            len(found.results()) == 4
            and found.current()["ada", "07_small"].exercises["small.merge"]["status"] == "failed"
        )


def test_shards_take_everybody_once(tmp_path):
    for i in range(20):
        hand_in(tmp_path, f"learner {i}", RIGHT)
    parts = [[s.learner for s in grade.learners(tmp_path, f"{i}/3")] for i in (1, 2, 3)]
    assert sorted(sum(parts, [])) == sorted(s.learner for s in collect(tmp_path)) and min(map(len, parts)) > 0
    for bad in ("0/3", "4/3", "1", "a/b", "1/0"):
        with pytest.raises(UserError, match="--shard"):
            grade.shard_of(bad)


def test_all_that_is_wrong_with_a_hand_in_is_told(desk, tmp_path):
    (tmp_path / "in" / "eve").mkdir(parents=True)
    with zipfile.ZipFile(tmp_path / "in" / "eve" / "mine.zip", "w") as archive:
        archive.writestr("../07_small.ipynb", "{}")
        archive.writestr("inner.zip", "")
    with Gradebook(tmp_path / "book.sqlite") as book:
        assert list(grade.tasks(collect(tmp_path / "in"), desk, book)) == []
        told = book.known()["eve"]["problem"]
    assert all(words in told for words in ("leads out of the archive", "archive inside an archive", "no notebook"))


def test_a_part_without_learners_is_no_mistake(tmp_path):
    """A class of one in two parts: one of the parts is empty, and its gradebook is there to be merged."""
    hand_in(tmp_path / "in", "ada", RIGHT)
    empty = next(f"{i}/2" for i in (1, 2) if not grade.learners(tmp_path / "in", f"{i}/2"))
    said: list[str] = []
    assert grade.run(tmp_path / "in", tmp_path / "part.sqlite", shard=empty, say=said.append) == 0
    assert said == [f"no learner of this class falls to part {empty}; {tmp_path / 'part.sqlite'} stays without results"]
    with Gradebook(tmp_path / "book.sqlite") as book:
        assert book.merge(tmp_path / "part.sqlite") == {"results": 0, "learners": 0, "notes": 0}
    (tmp_path / "nobody").mkdir()
    with pytest.raises(UserError, match="holds no submissions"):
        grade.run(tmp_path / "nobody", tmp_path / "part.sqlite", shard=empty, say=said.append)


def test_salts_give_everybody_their_own_cases_the_same_each_time(desk):
    one = next(iter(desk.keys.values()))
    question = one.questions["small.merge"]
    case = next(c for c in question.cases if c.name == "random")
    seeds = [key.seed_of("salt", name) for name in ("ada", "bob")]
    assert key.seed_of("", "ada") == 0 and seeds[0] != seeds[1] == key.seed_of("salt", "bob")
    a, b = (one.put(question, case, seed) for seed in seeds)
    assert a.args != b.args and a.want != b.want and one.put(question, case, seeds[0]).args == a.args


def test_a_wrong_key_grades_nobody(desk, tmp_path, monkeypatch):
    monkeypatch.setattr(grade.pool, "Server", lambda *args, **more: contextlib.nullcontext(desk.server))

    def fails(question, case, *rest):
        return Row(case.name, case.kind, "failed", cause="a defect")

    monkeypatch.setattr(session, "judge", fails)
    one = next(iter(desk.keys.values()))
    monkeypatch.setattr(one, "passed", set())
    with pytest.raises(UserError, match="the right answer to small.merge fails .*a defect.*nobody was graded"):
        grade._proven(one, desk.server, tmp_path, None, "", lambda words: None)


def test_hidden_results_never_reach_the_child(desk, monkeypatch):
    """Everything that goes to the child, looked through for the right results of hidden cases."""
    from nanochat_lib.course.grading import pool, wire

    sent = []
    real = pool.Child.send
    monkeypatch.setattr(pool.Child, "send", lambda self, message: sent.append(message) or real(self, message))
    one = next(iter(desk.keys.values()))
    grade._right(one, desk.server, desk.limits_of(one.stem))
    everything = b"".join(map(wire.encode, sent))
    assert grade_course.SECRET.encode() not in everything
    for question in one.questions.values():
        for case in question.cases:
            want = wire.encode(one.put(question, case, 0).want)[12:]
            if case.name in question.hidden and len(want) > 12:
                assert want not in everything, case.name


def test_a_submission_takes_well_under_a_second(desk, tmp_path):
    """Not a promise about this machine, only that the server forks instead of starting Python and JAX anew."""
    for i in range(4):
        hand_in(tmp_path, f"l{i}", RIGHT | {"small.twice": TWICE + f"\n# {i}"})
    began = time.monotonic()
    assert len(graded(desk, tmp_path, jobs=1)) == 4
    assert time.monotonic() - began < 4 * 4


@pytest.fixture(params=[f"{number:02}" for number in range(12)])
def chapter_desk(request, tmp_path, monkeypatch):
    """A desk for one of the course's own chapters."""
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "home"))
    root = Path(grade.__file__).parents[3]
    with grade.open_desk(root, tmp_path / "cache", request.param, say=lambda words: None) as desk:
        yield desk


@pytest.mark.slow
def test_the_right_answers_of_every_chapter_get_full_marks(chapter_desk):
    (one,) = chapter_desk.keys.values()
    for judged in grade._right(one, chapter_desk.server, chapter_desk.limits_of(one.stem)):
        assert judged.passed, judged


@pytest.mark.slow
def test_every_kept_wrong_answer_of_a_chapter_fails(chapter_desk, tmp_path):
    (one,) = chapter_desk.keys.values()
    found = resemble.signatures(chapter_desk, one, tmp_path, 2, say=lambda words: None)
    passed = [(id, label) for id, mutants in found.items() for label, rows in mutants.items() if not rows]
    assert passed == [] and set(found) == set(one.questions)


@pytest.mark.parametrize("level", ["namespaces", "bubblewrap"])
def test_processor_time_of_children_is_counted_when_they_are_killed(course, tmp_path, level):
    """By the server, whatever a child left behind: a process in a namespace ends without anybody waiting for it."""
    try:
        desk = grade.open_desk(course, tmp_path / "cache", say=lambda words: None, only=level)
    except UserError:
        pytest.skip(f"{level} does not work here")
    with desk:
        server, busy = desk.server.process.pid, ("while True: pass", "busy", True)
        time.sleep(1.0)  # the child that was started to try the level has ended
        used, below = processor_time(server), len(family(server))
        child = desk.server.child()
        message = {"do": "load", "word": "try", "id": "", "name": "", "restore": {}, "pieces": [busy]}
        assert child.send({**message, "seconds": 60.0, "wall": 60.0})
        until = time.monotonic() + 60
        while processor_time(server) - used < 0.6 and time.monotonic() < until:
            time.sleep(0.05)
        child.end()
        while len(family(server)) > below and time.monotonic() < until:
            time.sleep(0.05)
        assert len(family(server)) == below  # nobody is left, not even as an entry of what has ended
        assert processor_time(server) - used >= 0.5


def processor_time(process):
    """Seconds of it, of the processes below it and of those below that have ended and were waited for."""
    found = 0
    for one in [process, *family(process)]:
        with contextlib.suppress(OSError):
            found += sum(map(int, Path(f"/proc/{one}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return found / os.sysconf("SC_CLK_TCK")
