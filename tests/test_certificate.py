"""The report's certificate: when there is one, which goals count as reached, and what a damaged record does to it."""

import json
from html.parser import HTMLParser

import pytest
from test_report import MACHINE, make_run

from nanochat_lib.course import registry, standing, state
from nanochat_lib.report import certificate, plots, write_report

PASSED = {
    "passed": 3, "exercises": 5, "points": 4, "all_points": 9,
    "chapters": [
        {"number": "01", "title": "One <b>", "passed": 3, "exercises": 3, "points": 4, "all_points": 4},
        {"number": "02", "title": "Two", "passed": 0, "exercises": 2, "points": 0, "all_points": 5},
    ],
}  # fmt: skip
MINE = {"used": ["a.b", "a.c"], "refused": {"a.d": "it fails"}, "functions": 8, "share": 0.25}


@pytest.fixture
def run(tmp_path):
    return make_run(tmp_path / "run")


def write(run, **files):
    for name, value in files.items():
        (run / f"{name}.json").write_text(json.dumps(value))
    report = write_report(run, MACHINE)
    return report, (run / "report.html").read_text(), (run / "report.md").read_text()


def test_without_the_course_there_is_none(run):
    report, html, markdown = write(run)
    assert report["certificate"] is None and "Certificate" not in html + markdown
    report, html, _ = write(run, mine=MINE | {"used": [], "share": 0.0})
    assert report["certificate"] is None and "Certificate" not in html


def test_it_says_own_code_exercises_and_goals(run):
    report, html, markdown = write(run, course=PASSED, mine=MINE)
    found = report["certificate"]
    assert found["own"] == {"functions": 8, "used": 2, "share": 0.25}
    assert found["course"]["chapters"][0]["title"] == "One <b>"
    for line in (
        "Own code: 2 of 8 (25 %) of the exercise functions in this pipeline.",
        "Exercises: 3 of 5 passed, 4 of 9 points.",
        "Goals: 1 of 4 reached.",  # of this run only the bits per byte come with what is needed to judge
    ):
        assert line in html and line in markdown
    assert "One &lt;b&gt;" in html and "One <b>" not in html
    section = Section(html)
    assert "contenteditable" in section.attributes and section.rows == ["01 One <b>", "02 Two"]


def test_one_part_is_enough(run):
    report, html, _ = write(run, course=PASSED)
    assert report["certificate"]["own"] is None and "Own code: none of the exercise functions" in html
    (run / "course.json").unlink()
    report, html, _ = write(run, mine=MINE)
    assert report["certificate"]["course"] is None and "Exercises:" not in html and "Own code: 2 of 8" in html


@pytest.mark.parametrize("damage", ["{", "[]", '{"passed": 1}', json.dumps(PASSED | {"points": "many"})])
def test_a_damaged_record_is_named_and_the_report_is_whole(run, damage):
    (run / "course.json").write_text(damage)
    report, html, _ = write(run)
    assert report["certificate"] is None and report["missing"] == []
    assert [p for p in report["problems"] if p.startswith("course.json cannot be read")] and "course.json" in html


STAGES = {
    "pretrain": {"val_bpb_first": 4.0, "val_bpb_last": 2.0, "byte_bigram_bpb": 3.7},
    "eval_base": {"core": 0.3, "core_interval": [0.1, 0.5], "core_tasks": {}},
    "rl": {"reward_first": 0.5, "reward_last": 0.7, "heldout_questions": 128},
    "eval_chat": {"stages": {"sft": {"chatcore": 0.2, "chatcore_interval": [0.1, 0.3]}, "rl": None}},
}


def verdicts(**changes):
    stages = {name: {**stage, **changes.get(name, {})} for name, stage in STAGES.items()}
    return {goal["label"]: goal["reached"] for goal in certificate.goals(stages)}


def test_a_goal_is_reached_by_more_than_noise():
    every = {"bits per byte": True, "CORE": True, "ChatCORE": True, "held-out reward of RL": True}
    assert verdicts() == every
    # the same gain on fewer questions, or a smaller one, is noise
    assert verdicts(rl={"heldout_questions": 16}) == every | {"held-out reward of RL": False}
    assert verdicts(rl={"reward_last": 0.55}) == every | {"held-out reward of RL": False}
    assert verdicts(rl={"reward_first": 0.7, "reward_last": 0.5}) == every | {"held-out reward of RL": False}
    assert verdicts(eval_base={"core_interval": [-0.1, 0.5]}) == every | {"CORE": False}
    assert verdicts(pretrain={"val_bpb_last": 3.8}) == every | {"bits per byte": False}
    assert verdicts(pretrain={"val_bpb_last": 3.8, "byte_bigram_bpb": None}) == every  # better than its beginning
    worse = {"sft": STAGES["eval_chat"]["stages"]["sft"], "rl": {"chatcore": 0.05, "chatcore_interval": [-0.1, 0.2]}}
    assert verdicts(eval_chat={"stages": worse}) == every | {"ChatCORE": False}  # the last model counts


def test_what_was_not_measured_is_not_evaluated():
    assert set(verdicts(eval_base={"core_interval": None}, rl={"heldout_questions": None}).values()) == {True, None}
    nothing = [goal["reached"] for goal in certificate.goals(dict.fromkeys(STAGES))]
    assert nothing == [None] * 4
    # a reward function of one's own may give any number: no share, no test
    assert verdicts(rl={"reward_first": -2.0})["held-out reward of RL"] is None


def test_the_whole_bundle_is_held_against_gpt2():
    tasks = {str(number): {} for number in range(22)}
    assert verdicts(eval_base={"core_tasks": tasks})["CORE against GPT-2"] is False
    assert verdicts(eval_base={"core_tasks": tasks, "core_interval": [0.26, 0.5]})["CORE against GPT-2"] is True


def test_standing_is_the_learners_record_and_outlives_a_move(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_HOME", str(tmp_path))
    standing.keep(tmp_path)
    assert not (tmp_path / standing.FILE).exists()
    with state.change() as record:
        record["exercises"]["tokenizer.merge"] = {"passed": True}
    standing.keep(tmp_path)
    kept = json.loads((tmp_path / standing.FILE).read_text())
    assert kept["passed"] == 1 and kept["exercises"] > 60 and kept["points"] == 2
    tokenizer = next(c for c in kept["chapters"] if c["number"] == "01")
    assert tokenizer["passed"] == 1 and sum(c["passed"] for c in kept["chapters"]) == 1
    (tmp_path / standing.FILE).write_text("{")  # a damaged one is written anew, and the report goes on
    standing.keep(tmp_path)
    assert json.loads((tmp_path / standing.FILE).read_text()) == kept
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "another machine"))
    standing.keep(tmp_path)
    assert json.loads((tmp_path / standing.FILE).read_text()) == kept


def test_the_parts_that_are_the_learners(tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_HOME", str(tmp_path))
    with state.change() as record:
        for name in ("tokenizer.merge", "tokenizer.get_pair_counts"):
            record["exercises"][name] = {"passed": True}
    (tmp_path / "mine.json").write_text(json.dumps({"used": ["tokenizer.merge"]}))
    rows = {row[0][:2]: row[1:] for row in standing.parts_table(tmp_path).rows}
    of = [entry.id for c in registry.chapters() if c.number == "01" for entry in c.exercises if entry.library]
    passed = len({"tokenizer.merge", "tokenizer.get_pair_counts"} & set(of))
    assert rows["01"] == (str(len(of)), str(passed), "1") and rows["02"][1:] == ("0", "0")
    assert rows["to"] == (str(sum(int(row[0]) for key, row in rows.items() if key != "to")), str(passed), "1")


def test_any_logged_figure_is_drawn_and_one_that_is_not_logged_says_so():
    records = [{"stage": "sft", "step": n, "loss": 1 / n} for n in (1, 2, 4)] + [
        {"stage": "rl", "step": 1, "loss": None}
    ]
    line = plots.any_curve(records, "sft", "loss").axes[0].lines[0]
    assert line.get_xydata().tolist() == [[1, 1], [2, 0.5], [4, 0.25]]
    for stage, figure in (("rl", "loss"), ("sft", "reward"), ("nothing", "loss")):
        ax = plots.any_curve(records, stage, figure).axes[0]
        assert not ax.lines and ax.texts[0].get_text() == f"{stage} logs no {figure}"


class Section(HTMLParser):
    """The certificate's section: attributes in it, and the first cells of its last table's rows."""

    def __init__(self, html):
        super().__init__()
        self.attributes, self.rows, self.inside, self.cell = set(), [], False, False
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.inside |= ("class", "certificate") in attrs
        if self.inside:
            self.attributes |= {name for name, _ in attrs}
            self.rows = [] if tag == "table" else self.rows
            self.cell = tag == "td" or (self.cell and tag != "tr")
            self.first = tag == "td" and self.row_started
            self.row_started = tag == "tr"

    def handle_data(self, data):
        if self.inside and getattr(self, "first", False):
            self.rows.append(data)
            self.first = False
