"""nbgrader's own tools on our source tree: three submissions get the same points there as here."""

from __future__ import annotations

import csv
import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat_lib.course import rules
from nanochat_lib.course.grading import for_nbgrader, grade, policy, rubric
from nanochat_lib.course.grading.gradebook import Gradebook
from nanochat_lib.course.grading.marks import marks
from nanochat_lib.errors import UserError

ROOT = Path(grade.__file__).parents[3]


def test_the_tree_has_no_python_and_answers_only_between_the_marks(course, tmp_path):
    paths = for_nbgrader.export(course, tmp_path / "nb")
    assert [p.relative_to(tmp_path / "nb").as_posix() for p in paths] == [
        "source/07_small/07_small.ipynb", "nbgrader_config.py",
    ]  # fmt: skip
    cells = {cell["metadata"].get("id"): cell for cell in json.loads(paths[0].read_text())["cells"]}
    exercise, check = ("".join(cells[id]["source"]) for id in ("small.merge", "small.merge.check"))
    assert exercise.index("### BEGIN SOLUTION") < exercise.index("while i <") < exercise.index("### END SOLUTION")
    assert check.startswith('check("small.merge", merge)\n### BEGIN HIDDEN TESTS\n')
    assert "[7, 7, 7]" in check and "mutant(" not in check and check.endswith("### END HIDDEN TESTS")
    assert cells["small.merge.check"]["metadata"]["nbgrader"]["points"] == 4
    everything = json.dumps([cell for cell in cells.values() if cell["metadata"].get("nbgrader") is None])
    assert "[7, 7, 7]" not in everything and "hidden(" not in everything
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("x")
    with pytest.raises(UserError, match="other files"):
        for_nbgrader.export(course, tmp_path / "mine")


def test_the_cell_s_value_is_the_mark_that_we_give(course, tmp_path):
    rules.add_checks(course)
    path = for_nbgrader.export(course, tmp_path / "nb")[0]
    cells = json.loads(path.read_text())["cells"]
    check = next("".join(c["source"]) for c in cells if c["metadata"].get("id") == "small.merge.check")
    setup = next("".join(c["source"]) for c in cells if "setup" in c["metadata"].get("tags", []))
    tests = "value = points_of" + check.split("### BEGIN HIDDEN TESTS")[1].split("### END")[0].split("points_of", 2)[2]
    head = check.split("### BEGIN HIDDEN TESTS")[1].rsplit("points_of(", 1)[0]
    import grade_course

    for answer, points in (
        (grade_course.MERGE, 4.0),
        (grade_course.MERGE.replace("i += 2", "i += 1"), 4 * (0.4 * 0 + 0.4 * 0 + 0.2 * 0)),
        ("def merge(*a):\n    raise NotImplementedError", 0.0),
        ("def merge(*a):\n    return [9, 3, 9]", 4 * 0.4 / 2),
    ):
        names: dict = {}
        exec(setup + "\n" + answer + "\n" + head + "\n" + tests, names)
        assert names["value"] == pytest.approx(points), answer


def test_a_written_question_is_a_cell_that_is_graded_by_hand(course, tmp_path):
    text = (course / "solutions" / "07_small.py").read_text()
    file = course / "solutions" / "rubric.yaml"
    criteria = "[{name: a, points: 2}, {name: b, points: 0.5}]"
    asked = f"questions:\n- {{id: ID, chapter: 07_small, prompt: 'why?', criteria: {criteria}}}\n"
    first = next(line for line in text.split("\n") if line.startswith("# %% [markdown]"))
    id = json.loads(first.split("id=")[1].split()[0])
    try:
        file.write_text(asked.replace("ID", id))
        cells = json.loads(for_nbgrader.export(course, tmp_path / "nb")[0].read_text())["cells"]
        (entry,) = [c["metadata"]["nbgrader"] for c in cells if c["metadata"].get("id") == id]
        assert entry == {
            "cell_type": "markdown", "grade": True, "grade_id": id.replace(".", "-"), "locked": False, "points": 2.5,
            "schema_version": 3, "solution": True, "task": False,
        }  # fmt: skip
        assert len([c for c in cells if c["metadata"].get("nbgrader", {}).get("points") == 2.5]) == 1
        file.write_text(asked.replace("ID", "small.nowhere"))
        with pytest.raises(UserError, match="07_small has no cell small.nowhere"):
            for_nbgrader.export(course, tmp_path / "other")
        assert not (tmp_path / "other").exists()
    finally:
        file.unlink()


@pytest.mark.slow
def test_nbgrader_and_we_count_written_answers_alike(tmp_path, monkeypatch):
    """Chapter 05's question: generate, an answer and an untouched cell, autograde, marks by hand, export; the extra."""
    api = pytest.importorskip("nbgrader.api")
    folder, stem, id = tmp_path / "nb", "05_muon", "muon.why_not_tables"
    for_nbgrader.export(ROOT, folder, "05")
    nbgrader = tool(folder, tmp_path / "home")
    nbgrader("generate_assignment", stem, "--force")
    released = (folder / "release" / stem / f"{stem}.ipynb").read_text()
    for learner in ("ada", "cy"):
        document = json.loads(released)
        (cell,) = [cell for cell in document["cells"] if cell["metadata"].get("id") == id]
        cell["source"] = "Because rows are tokens." if learner == "ada" else cell["source"]
        for path in (folder / "submitted" / learner / stem, tmp_path / "submissions" / learner):
            path.mkdir(parents=True)
            (path / f"{stem}.ipynb").write_text(json.dumps(document))
    nbgrader("autograde", stem, "--create")
    with api.Gradebook(f"sqlite:///{folder / 'gradebook.db'}") as theirs:
        for learner in ("ada", "cy"):
            grades = theirs.find_submission_notebook(stem, stem, learner).grades
            (grade_of,) = [one for one in grades if one.name == id.replace(".", "-")]
            assert grade_of.max_score == 3 and grade_of.needs_manual_grade == (learner == "ada")
            if learner == "ada":
                grade_of.manual_score, grade_of.needs_manual_grade = 2, False
        theirs.db.commit()
    nbgrader("export")
    rows = list(csv.DictReader((folder / "grades.csv").open()))
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "home"))
    assert grade.run(tmp_path / "submissions", tmp_path / "book.sqlite", ROOT, "05", say=lambda words: None) == 0
    (question,) = [q for q in rubric.load(ROOT / "solutions" / "rubric.yaml", [stem, "11_scale"]) if q.id == id]
    with Gradebook(tmp_path / "book.sqlite") as book:
        for criterion in question.criteria[:2]:
            book.note("written", "ada", stem, f"{id}/{criterion.name}", 1, "seen", "me")
        ours = {mark.learner: mark for mark in marks(book, policy.Policy(), {stem: question.most})}
    assert {row["student_id"]: float(row["score"]) for row in rows} == {n: mark.earned for n, mark in ours.items()}
    assert ours["ada"].earned == 2 and ours["cy"].earned == 0


def tool(folder, home):
    """nbgrader's programs, run in its folder."""
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COURSE_FAST": "1", "COURSE_HOME": str(home)}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])

    def nbgrader(*words: str) -> None:
        command = [sys.executable, "-m", "nbgrader", *words]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]

    return nbgrader


@pytest.mark.slow
def test_nbgrader_agrees(tmp_path, monkeypatch):
    """generate, three submissions, autograde, export; needs the extra `nbgrader` (or its folder on PYTHONPATH)."""
    if importlib.util.find_spec("nbgrader") is None:
        pytest.skip("nbgrader is not installed")
    folder, stem = tmp_path / "nb", "00_start"
    for_nbgrader.export(ROOT, folder, "00")
    nbgrader = tool(folder, tmp_path / "home")
    nbgrader("generate_assignment", stem, "--force")
    released = folder / "release" / stem / f"{stem}.ipynb"
    text = released.read_text()
    assert "BEGIN HIDDEN" not in text and "jnp.tanh(logits" not in text and not list((folder / "release").rglob("*.py"))
    solved = json.loads((folder / "source" / stem / f"{stem}.ipynb").read_text())
    answers = {c["metadata"]["id"]: c["source"] for c in solved["cells"] if "exercise" in c["metadata"].get("tags", [])}
    clip = "def softcap(logits, cap):\n    return jnp.clip(logits, -cap, cap)"
    ours = tmp_path / "submissions"
    for learner, given in (("ada", answers), ("bob", answers | {"start.softcap": clip}), ("cy", {})):
        document = json.loads(text)
        for cell in document["cells"]:
            if cell["metadata"].get("id") in given:
                cell["source"] = given[cell["metadata"]["id"]]
        for path in (folder / "submitted" / learner / stem / f"{stem}.ipynb", ours / learner / f"{stem}.ipynb"):
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(document))
    nbgrader("autograde", stem, "--create")
    nbgrader("export")
    rows = list(csv.DictReader((folder / "grades.csv").open()))
    theirs = {row["student_id"]: float(row["score"]) for row in rows}
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "home"))
    assert grade.run(ours, tmp_path / "book.sqlite", ROOT, "00", say=lambda words: None) == 0
    with Gradebook(tmp_path / "book.sqlite") as book:
        assert theirs == {mark.learner: mark.earned for mark in marks(book, policy.Policy())}
    assert theirs["ada"] == 8 and theirs["cy"] == 0 < theirs["bob"] < 8
