"""Two models side by side, from results that are written as an evaluation writes them."""

import json

import numpy as np
import pytest

from nanochat_lib.cli import main
from nanochat_lib.errors import UserError
from nanochat_lib.evaluate.compare import compare
from nanochat_lib.evaluate.results import Results
from nanochat_lib.evaluate.scores import centered, centered_interval, wilson

RNG = np.random.default_rng(0)
EASY = RNG.random(400)


def figures(right, baseline=0.25, **more):
    scored = right[right >= 0]
    accuracy, interval = float(scored.mean()), wilson(int(scored.sum()), len(scored))
    return {"accuracy": accuracy, "interval": list(interval), "baseline": baseline, "examples": len(scored),
            "centered": centered(accuracy, baseline),
            "centered_interval": list(centered_interval(interval, baseline))} | more  # fmt: skip


def keep(folder, model, kind, task, right, identity="same", step=20, **more):
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text("{}")
    place = folder / "evaluations" / model / f"step_{step:08d}"
    results = Results(place, kind, {"context": more.get("context")})
    results.save(task, identity, figures(right, **more), right.astype(np.int8))


@pytest.fixture
def runs(tmp_path):
    """b is clearly better on one task, the same on another; only a has a third."""
    a, b = tmp_path / "a", tmp_path / "b"
    keep(a, "base", "core", "much", EASY < 0.4)
    keep(b, "base", "core", "much", EASY < 0.55)
    keep(a, "base", "core", "same", EASY < 0.5)
    keep(b, "base", "core", "same", (EASY < 0.5) ^ (np.arange(400) % 57 == 0))
    keep(a, "base", "core", "alone", EASY < 0.5)
    return a, b


def row(found, task):
    (one,) = [row for row in found["tasks"] if row["task"] == task]
    return one


def test_what_is_more_than_noise(runs):
    a, b = runs
    found = compare(str(a), f"{b}:base")
    much, same = row(found, "much"), row(found, "same")
    assert much["paired"] and much["verdict"] == "more than noise" and much["p_holm"] < 1e-6
    assert much["difference"] == pytest.approx(np.mean(EASY < 0.55) - np.mean(EASY < 0.4))
    assert same["verdict"] == "noise" and same["interval"][0] < 0 < same["interval"][1]
    (core,) = found["means"]
    assert core["difference"] == pytest.approx((much["difference"] + same["difference"]) / 2 / 0.75)
    assert core["interval"][0] < core["difference"] < core["interval"][1] and core["verdict"] == "more than noise"
    assert found["notes"] == [f"only {a}:base has alone: left out"]


def test_turned_round_it_is_the_opposite(runs):
    there, back = compare(*map(str, runs)), compare(*map(str, reversed(runs)))
    for one, other in zip(there["means"], back["means"], strict=True):
        assert one["difference"] == pytest.approx(-other["difference"])
        assert one["interval"] == pytest.approx([-x for x in reversed(other["interval"])])
    assert {r["verdict"] for r in compare(str(runs[0]), str(runs[0]))["tasks"]} == {"noise"}


def test_many_tasks_make_one_small_p_less_of_a_surprise(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    for i in range(20):
        right = np.arange(100) < 50
        other = right.copy()
        other[50:57] = i == 0  # seven more and none fewer: p = 1/64
        keep(a, "base", "core", f"t{i:02}", right)
        keep(b, "base", "core", f"t{i:02}", other)
    found = compare(str(a), str(b))
    assert row(found, "t00")["p"] == pytest.approx(1 / 64) and row(found, "t00")["verdict"] == "perhaps"


def test_other_questions_are_refused(runs):
    a, b = runs
    keep(b, "base", "core", "alone", EASY < 0.5, identity="other")
    with pytest.raises(UserError, match="answered different questions of alone: another bundle") as e:
        compare(str(a), str(b))
    assert "\n" not in str(e.value)


def test_an_answer_that_one_left_out_is_no_pair(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    right = np.where(np.arange(60) < 30, 1, 0)
    keep(a, "sft", "core", "t", right, context=100)
    keep(b, "sft", "core", "t", np.where(np.arange(60) < 10, -1, right), context=50)
    found = compare(str(a), str(b))
    assert row(found, "t")["difference"] == 0 and row(found, "t")["examples"] == 50
    assert "evaluated with context 100 and 50" in found["notes"]


def test_several_answers_a_question_count_as_any(tmp_path):
    a, b = tmp_path / "a", tmp_path / "b"
    once = np.zeros((30, 3), np.int8)
    once[:20, 1] = 1
    keep(a, "sft", "chat", "GSM8K", np.zeros((30, 1), np.int8), baseline=0.0)
    keep(b, "sft", "chat", "GSM8K", once, baseline=0.0)
    assert row(compare(str(a), str(b)), "GSM8K")["difference"] == pytest.approx(20 / 30)


def test_results_without_single_answers_are_compared_unpaired(runs, tmp_path):
    old = tmp_path / "old"
    (old / "stages").mkdir(parents=True)
    (old / "config.json").write_text("{}")
    record = {"figures": {"core_tasks": {"much": figures(EASY < 0.41)}}}
    (old / "stages" / "eval_base.json").write_text(json.dumps(record))
    found = compare(str(old), str(runs[1]))
    assert not row(found, "much")["paired"] and row(found, "much")["verdict"] == "more than noise"
    assert any("single answers were not kept" in note for note in found["notes"])


def test_the_newest_checkpoint_counts(runs):
    a, _ = runs
    keep(a, "base", "core", "much", EASY < 0.9, step=40)
    assert row(compare(str(a), str(runs[1])), "much")["a"] == pytest.approx(np.mean(EASY < 0.9))


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("{a}", "{tmp}/none"), "holds no run"),
        (("{a}:basis", "{b}"), "unknown model 'basis'"),
        (("{a}:rl", "{b}"), "holds no results; evaluate it first"),
        (("{a}", "{c}"), "share no task: one has CORE tasks, the other chat tasks"),
    ],
)
def test_mistakes_are_one_line(runs, tmp_path, capsys, names, words):
    keep(tmp_path / "c", "sft", "chat", "sums", EASY < 0.3)
    named = [name.format(a=runs[0], b=runs[1], c=tmp_path / "c", tmp=tmp_path) for name in names]
    assert main(["eval", "compare", *named]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1


def test_the_command_prints_a_table_or_json(runs, capsys):
    names = [str(run) for run in runs]
    assert main(["eval", "compare", *names]) == 0
    out = capsys.readouterr().out
    shown = f"{100 * row(compare(*names), 'much')['difference']:+.1f}"
    assert all(words in out for words in ("CORE, 2 tasks", "more than noise", "note: only", shown, "paired"))
    assert main(["eval", "compare", *names, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == compare(*names)
