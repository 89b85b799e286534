"""Marks: the append-only gradebook, merging, policy, what other systems take."""

from __future__ import annotations

import csv
import io
import json
import sqlite3

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat_lib.course.grading import exports, policy
from nanochat_lib.course.grading.gradebook import Gradebook, Result
from nanochat_lib.course.grading.marks import marks
from nanochat_lib.errors import UserError


def entry(public=(3, 3), hidden=(2, 2), budget=(0, 0), most=4, status="passed"):
    groups = {"public": list(public), "hidden": list(hidden), "budget": list(budget)}
    return {"status": status, "most": most, "groups": groups, "rows": [], "remarks": [], "seconds": 0.1}


def result(learner="ada", chapter="03_attention", submission="s1", bundle="b1", at=100.0, graded=200.0, **exercises):
    exercises = {f"x.{name}": value for name, value in exercises.items()} or {"x.one": entry()}
    return Result(
        learner, chapter, submission, bundle, "", "n.ipynb", at, graded, "bubblewrap", "1", exercises, ["note"]
    )


@pytest.fixture
def book(tmp_path):
    with Gradebook(tmp_path / "book.sqlite") as found:
        yield found


def test_the_same_result_is_there_once(book):
    assert book.add(result()) and not book.add(result(graded=999.0)) and len(book.results()) == 1
    assert book.results()[0] == result() and book.has("ada", "03_attention", "s1", "b1", "")
    assert (
        book.add(result(bundle="b2")) and book.add(result(learner="bob")) and not book.has("ada", "03", "s1", "b1", "")
    )


@pytest.mark.parametrize("table", ["results", "notes", "learners"])
def test_nothing_is_ever_changed_or_deleted(book, table):
    book.add(result())
    book.note("adjust", "ada", "03_attention", "", 1.0, "why", "me")
    book.know("ada", "moodle", "7")
    for statement in (f"DELETE FROM {table}", f"UPDATE {table} SET learner='x'"):
        with pytest.raises(sqlite3.DatabaseError, match="append-only"):
            book.db.execute(statement)


def test_the_submission_handed_in_last_counts_as_graded_last(book):
    book.add(result(submission="new", at=300.0, graded=500.0, one=entry(hidden=(0, 2))))
    book.add(result(submission="old", at=100.0, graded=900.0))
    book.add(result(submission="new", bundle="b2", at=300.0, graded=700.0))
    assert book.current()["ada", "03_attention"].bundle == "b2"


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from("xy"), st.integers(0, 2)), max_size=12),
    st.integers(0, 99),
)
@settings(max_examples=6)
def test_merging_is_a_union_whatever_the_order(tmp_path_factory, rows, seed):
    folder = tmp_path_factory.mktemp("merge")
    whole = Gradebook(folder / "whole.sqlite")
    parts = [Gradebook(folder / f"{i}.sqlite") for i in range(3)]
    for i, (learner, submission, bundle) in enumerate(rows):
        row = result(learner, submission=submission, bundle=str(bundle), graded=float(bundle))
        whole.add(row)
        parts[(i * 7 + seed) % 3].add(row)
        parts[(i * 5 + seed) % 3].add(row)
    for first, others in ((0, (1, 2, 1, 0)), (2, (1, 0, 2))):
        for other in others:
            parts[first].merge(folder / f"{other}.sqlite")
        assert sorted(map(repr, parts[first].results())) == sorted(map(repr, whole.results()))
        assert parts[first].merge(folder / "whole.sqlite")["results"] == 0
    for one in (whole, *parts):
        one.close()


def test_no_gradebook_is_said(tmp_path, book):
    (tmp_path / "x").write_text("this is not a database, but a text that is long enough to be one" * 20)
    with pytest.raises(UserError, match="not a gradebook"):
        Gradebook(tmp_path / "x")
    with pytest.raises(UserError, match="does not exist"):
        book.merge(tmp_path / "none")
    with pytest.raises(UserError, match="reason"):
        book.note("adjust", "ada", "03", "", 1.0, "  ", "me")
    book.db.execute("PRAGMA user_version=99")
    with pytest.raises(UserError, match="newer version"):
        Gradebook(book.path)


# ---- marks


def test_partial_credit_by_group():
    rule = policy.Policy()
    assert rule.points(4, {"public": (3, 3), "hidden": (2, 2), "budget": (1, 1)}) == 4
    assert rule.points(4, {"public": (3, 3), "hidden": (0, 2), "budget": (0, 1)}) == 1.6
    assert rule.points(4, {"public": (3, 3), "hidden": (1, 2), "budget": (0, 0)}) == 3  # no budget: its share drops out
    assert rule.points(4, {"public": (0, 3), "hidden": (0, 2)}) == rule.points(4, {}) == 0
    assert policy.Policy({"hidden": 1.0}).points(4, {"public": (0, 3), "hidden": (2, 2)}) == 4


def test_late_policy():
    late = policy.Late(10, 15, 50, 14)
    day = 86400
    assert [late.factor(s) for s in (-5, 0, 900, 901, 900 + day, 901 + day, 900 + 9 * day, 900 + 15 * day)] == [
        1, 1, 1, 0.9, 0.9, 0.8, 0.5, 0,
    ]  # fmt: skip


def test_totals_adjustments_and_the_lowest_dropped(book):
    book.add(result(one=entry(), two=entry(public=(0, 3), hidden=(0, 2), most=2, status="failed")))
    book.add(result(chapter="04_data", one=entry(most=6)))
    book.add(result("bob", "04_data", one=entry(hidden=(0, 2), most=6)))
    book.know("cy", "seen", "1")
    book.note("adjust", "ada", "03_attention", "x.two", 1.5, "right idea", "me")
    book.note("adjust", "bob", "04_data", "", -99.0, "handed in another's work", "me")
    book.note("written", "ada", "03_attention", "why/clear", 1.0, "short", "me")
    book.note("written", "ada", "03_attention", "why/clear", 2.0, "seen again", "me")
    ada, bob, cy = marks(book, policy.Policy(drop_lowest=1), {"03_attention": 3.0})
    assert (ada.chapters["03_attention"].earned, ada.chapters["03_attention"].possible) == (7.5, 9.0)
    assert ada.dropped == ("03_attention",) and (ada.earned, ada.percent) == (6.0, 100.0)
    assert bob.chapters["04_data"].earned == 0 and "another's work (me)" in bob.chapters["04_data"].reasons[0]
    assert (cy.earned, cy.possible) in ((0, 6.0), (0, 9.0)) and cy.chapters["04_data"].result is None
    due = policy.Policy(due={"03": 0.0}, late=policy.Late(grace_minutes=0))
    assert marks(book, due)[0].chapters["03_attention"].earned == round((4 + 2) * 0.9 + 1.5, 2)


def test_policy_files(tmp_path):
    path = tmp_path / "grading.yaml"
    assert policy.load(path) == policy.Policy()
    path.write_text(
        'weights: {public: 1}\nlate: {percent_per_day: 5}\ndue: {3: "2026-12-01T23:59+00:00"}\ndrop_lowest: 1\n'
    )
    found = policy.load(path)
    assert found.weights == {"public": 1.0} and found.late.percent_per_day == 5 and found.drop_lowest == 1
    assert found.due == {"03": 1796169540.0}
    weights = ("weights: {secret: 1}", "weights: {public: -1}", "weights: {public: 0}", "wieghts: {}")
    others = (
        "a: [",
        "late: {day: 1}",
        "due: {3: soon}",
        "drop_lowest: 1.5",
        "late: {grace_minutes: .nan}",
        "- 1",
        "due: 7",
    )
    for text in weights + others:
        path.write_text(text)
        with pytest.raises(UserError, match="grading.yaml"):
            policy.load(path)


# ---- exports


def everybody(book):
    book.add(result("ada"))
    book.add(result('=HYPERLINK("http://x")', one=entry(hidden=(0, 2))))
    book.add(result("Bö, O'Hara", chapter="04_data"))
    book.know("ada", "moodle", "412")
    book.know("ada", "canvas", "4711")
    return marks(book, policy.Policy())


def rows(text):
    return list(csv.reader(io.StringIO(text)))


def test_csv_columns_are_stable(book):
    head, *lines = rows(exports.as_csv(everybody(book)))
    assert head == [
        "learner", "chapter", "points", "of", "percent", "late_factor", "written", "adjusted", "dropped", "isolation",
        "handed_in", "submission", "bundle", "moodle_id", "canvas_id",
    ]  # fmt: skip
    assert all(len(line) == len(head) for line in lines) and len(lines) == 9
    assert ["Bö, O'Hara", "04_data", "4.0", "4.0", "100.0"] in [line[:5] for line in lines]
    assert rows(exports.as_exercises(everybody(book)))[0][:6] == [
        "learner",
        "chapter",
        "exercise",
        "status",
        "points",
        "of",
    ]


@pytest.mark.parametrize("make", [exports.as_csv, exports.as_exercises, exports.as_moodle, exports.as_canvas])
def test_no_cell_is_a_formula(book, make):
    cells = [cell for row in rows(make(everybody(book))) for cell in row]
    assert not [cell for cell in cells if cell.startswith(("=", "+", "@", "\t"))]
    assert any(cell.startswith("'=HYPERLINK") for cell in cells)


def test_moodle_and_canvas_ids(book):
    found = everybody(book)
    assert ["Participant 412", "ada", "100.0", "0.0", "50.0"] in rows(exports.as_moodle(found))
    template = (
        "Student,ID,SIS User ID,Section,03_attention (77),04 data (78),Final Score\n"
        "    Points Possible,,,,4,4,(read only)\n"
        '"Byron, Ada",4711,s1,A,,,\n"O\'Hara, Bö",9,s2,A,,7,\nNobody,8,,A,,3,\n'
    )
    out = rows(exports.as_canvas(found, template))
    assert out[2][4:6] == ["4.0", "0.0"] and out[3][5] == "7" and out[4][5] == "3" and out[1][4] == "4"
    with pytest.raises(UserError, match="Student and ID"):
        exports.as_canvas(found, "a,b\n1,2\n")
    with pytest.raises(UserError, match="no assignment called 04_data"):
        exports.as_canvas(found, "Student,ID,03_attention\n")


def test_gradescope(book, tmp_path):
    paths = exports.export(everybody(book), "gradescope", tmp_path / "gs")
    assert len(paths) == len({p.parent.name.lower() for p in paths}) == 3
    assert all(p.parent.parent == tmp_path / "gs" for p in paths)
    found = json.loads((tmp_path / "gs" / "ada" / "results.json").read_text())
    assert (
        found["score"] == 4.0 and found["tests"][0]["max_score"] == 4 and found["tests"][0]["visibility"] == "visible"
    )
    assert exports.file_name("../../x") != exports.file_name("x") and "/" not in exports.file_name("../../x")


def test_notes_come_oldest_first(book, monkeypatch):
    from nanochat_lib.course.grading import gradebook

    moments = iter(range(100, 112))
    monkeypatch.setattr(gradebook.time, "time", lambda: float(next(moments)))
    for i in range(12):
        book.note("adjust", "ada", "03_attention", "", float(i), "why", "me")
    assert [note.points for note in book.notes()] == list(range(12))
