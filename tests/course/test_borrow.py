"""A run with the learner's functions: installed before anything else, kept for the next start, named in the report."""

from __future__ import annotations

import json

import pytest

from nanochat_lib import pipeline, presets, run_folder
from nanochat_lib.course import borrow, install, registry
from nanochat_lib.course.install import Share
from nanochat_lib.errors import UserError
from nanochat_lib.report import build_report
from nanochat_lib.report.page import mine_lines, to_html, to_markdown

SMOKE = presets.preset("cpu-smoke")


@pytest.fixture
def learner(monkeypatch):
    """Stands in for the learner's functions: `passing` ones are installed; `asked` keeps what was asked for."""

    class Learner:
        passing, asked = {"a.x"}, []

    state = Learner()
    state.asked = []

    def fake(ids):
        state.asked.append(ids)
        names = ["a.x", "a.y"] if ids == "all" else ids.split(",") if isinstance(ids, str) else ids
        used = [name for name in names if name in state.passing]
        refused = {name: "yours has not passed yet" for name in names if name not in state.passing}
        return Share(used, refused, functions=8, all_points=20)

    def exercise(name):
        if not name.startswith("a."):
            raise UserError(f"there is no {name!r}")

    monkeypatch.setattr(install, "install", fake)
    monkeypatch.setattr(registry, "exercise", exercise)
    return state


def test_nothing_asked_for_is_nothing_done(tmp_path, learner):
    assert borrow.begin(tmp_path, "") is None and learner.asked == [] and list(tmp_path.iterdir()) == []


def test_what_a_run_began_with_is_what_it_goes_on_with(tmp_path, learner, capsys):
    borrow.begin(tmp_path, "a.x,a.y")
    out = capsys.readouterr().out
    assert "1 of 8 exercise functions in this pipeline are yours: 12 %" in out
    assert "a.y: the library's (yours has not passed yet)" in out
    learner.passing = {"a.x", "a.y"}  # solved since, but the run began without it
    (tmp_path / "stages").mkdir()
    (tmp_path / "stages" / "tokenizer.json").write_text("{}", encoding="utf-8")
    for words in ("", "a.x,a.y"):
        assert borrow.begin(tmp_path, words)["used"] == ["a.x"]
    assert learner.asked == ["a.x,a.y", ["a.x"], ["a.x"]]


def test_half_a_run_with_other_code_is_refused(tmp_path, learner):
    borrow.begin(tmp_path, "all")
    with pytest.raises(UserError, match="holds a run with --mine all; use the same or another --run-dir"):
        borrow.begin(tmp_path, "a.x")
    learner.passing = set()
    with pytest.raises(UserError, match=r"began with your a\.x, but yours has not passed yet.*course undo a\.x"):
        borrow.begin(tmp_path, "")
    other = tmp_path / "other"
    (other / "stages").mkdir(parents=True)
    (other / "stages" / "tokenizer.json").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match="began without functions of yours"):
        borrow.begin(other, "all")


def test_a_parent_process_only_looks_at_the_names(tmp_path, learner):
    assert borrow.begin(tmp_path, "a.x", now=False) is None and learner.asked == []
    with pytest.raises(UserError, match="there is no 'b.z'"):
        borrow.begin(tmp_path, "a.x,b.z", now=False)


@pytest.mark.parametrize("accelerator", [True, False])
def test_an_unknown_exercise_makes_no_folder(tmp_path, learner, accelerator):
    with pytest.raises(UserError, match="there is no 'b.z'"):
        pipeline.open_run(tmp_path / "run", SMOKE, accelerator, mine="a.x, b.z")
    assert list(tmp_path.iterdir()) == []


def test_open_run_installs_and_lets_go_of_the_folder_when_it_cannot(tmp_path, learner):
    pipeline.open_run(tmp_path / "r", SMOKE, mine="all").close()
    assert json.loads((tmp_path / "r" / borrow.FILE).read_text(encoding="utf-8"))["used"] == ["a.x"]
    with pytest.raises(UserError, match="--mine all"):
        pipeline.open_run(tmp_path / "r", SMOKE, mine="a.x")
    assert not run_folder.held(tmp_path / "r")


def test_the_report_names_the_share_and_every_fallback(tmp_path, learner):
    pipeline.open_run(tmp_path / "r", SMOKE, mine="a.x,a.y").close()
    report = build_report(tmp_path / "r", machine={})
    assert report["mine"]["used"] == ["a.x"] and report["mine"]["share"] == 1 / 8
    assert mine_lines(report["mine"]) == [
        "1 of 8 exercise functions in this pipeline are yours: 12 %.", "Yours: a.x.",
        "The library's: a.y (yours has not passed yet).",
    ]  # fmt: skip
    for page in (to_markdown(report), to_html(report, [])):
        assert "Your functions" in page and "a.y" in page
    (tmp_path / "r" / borrow.FILE).write_text("[]", encoding="utf-8")
    report = build_report(tmp_path / "r", machine={})
    assert report["mine"] is None and any("mine.json cannot be read" in line for line in report["problems"])
    assert "Your functions" not in to_html(report, [])


def test_a_run_without_functions_of_the_learners_says_nothing_of_them(tmp_path):
    pipeline.open_run(tmp_path / "r", SMOKE).close()
    report = build_report(tmp_path / "r", machine={})
    assert report["mine"] is None and "Your functions" not in to_markdown(report)
