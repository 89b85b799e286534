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
from nanochat_lib.course.grading import for_nbgrader, grade, policy
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


@pytest.mark.slow
def test_nbgrader_agrees(tmp_path, monkeypatch):
    """generate, three submissions, autograde, export; needs the extra `nbgrader` (or its folder on PYTHONPATH)."""
    if importlib.util.find_spec("nbgrader") is None:
        pytest.skip("nbgrader is not installed")
    folder, stem = tmp_path / "nb", "00_start"
    for_nbgrader.export(ROOT, folder, "00")
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    env = os.environ | {"PYTHONPATH": os.pathsep.join(paths), "COURSE_FAST": "1", "COURSE_HOME": str(tmp_path / "home")}
    env["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), env["PATH"]])

    def nbgrader(*words: str) -> None:
        command = [sys.executable, "-m", "nbgrader", *words]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[-3000:]

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
