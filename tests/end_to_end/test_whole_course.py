"""scripts/solve_course.py: every exercise solved, the pipeline run with all of it, and the same numbers as without."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import script_modules

from nanochat_lib.course.build import sources
from nanochat_lib.course.exercises import units
from nanochat_lib.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "solve_course.py"
SMALL = ("pretrain.steps=4", "sft.steps=3", "rl.steps=1", "evaluation.chat_max_per_task=4")


@pytest.fixture(scope="module")
def script():
    return script_modules.load("solve_course")


def start(folder, *words):
    keep = {"NANOCHAT_COMPILE_CACHE": "1", "NANOCHAT_BASE_DIR": str(folder.parent / "kept")}  # one run's for the other
    command = [sys.executable, SCRIPT, folder, *words]
    return subprocess.run(command, cwd=ROOT, env=os.environ | keep, capture_output=True, text=True)


def test_the_course_is_solved_and_the_pipeline_of_the_answers_gives_the_same_numbers(tmp_path):
    done = start(tmp_path / "solved", *(word for setting in SMALL for word in ("-s", setting)))
    assert done.returncode == 0, done.stdout + done.stderr
    chapters = {stem: units(cells) for stem, cells in sources(ROOT).items() if units(cells)}
    for stem, exercises in chapters.items():
        assert f"{stem}: {len(exercises)} solved" in done.stdout
    report = json.loads((tmp_path / "solved/runs/mine/report.json").read_text())
    found = report["certificate"]
    assert found["own"]["share"] == 1 and found["own"]["functions"] == report["mine"]["functions"] > 50
    assert found["course"]["passed"] == found["course"]["exercises"] == sum(map(len, chapters.values()))
    equal, of, count = done.stdout.splitlines()[-1].split(" figures")[0].split()
    assert of == "of" and equal == count and int(equal) > 300


def test_an_answer_that_is_wrong_is_named(script, tmp_path, monkeypatch, capsys):
    cells = sources(ROOT)["00_start"]
    broken = units(cells)[0].cell
    source = broken.source.replace("# --- solution", "# --- solution\n    return None", 1)
    assert source != broken.source
    wrong = [type(cell)(**{**vars(cell), "source": source}) if cell is broken else cell for cell in cells]
    monkeypatch.setenv("COURSE_HOME", "")  # put back afterwards
    script.take(tmp_path)
    problems = script.solve(tmp_path, {"00_start": wrong})
    assert problems[0] == f"00_start: {units(cells)[0].id} not solved"
    assert f"{len(units(cells)) - 1} passed, 1 failed" in problems[1]


def test_a_number_that_differs_and_a_function_that_is_refused_are_named(script, tmp_path, monkeypatch):
    def pretend(*words):
        run = Path(words[words.index("--run-dir") + 1])
        run.mkdir(parents=True)
        loss = 1.0 if run.name == "library" else 1.0 + 1e-12
        record = {"stage": "sft", "loss": loss, "time": len(words), "tokens_per_s": len(words)}
        (run / "metrics.jsonl").write_text(json.dumps(record))
        (run / "report.json").write_text(json.dumps({"stages": {"sft": {"seconds": loss, "steps": 3}}, "samples": []}))
        (run / "mine.json").write_text(json.dumps({"used": ["a.b"], "functions": 2, "refused": {"a.c": "why"}}))
        return subprocess.CompletedProcess(words, 0, "", "")

    monkeypatch.setattr(script, "nanochat", pretend)
    assert script.run_both(tmp_path, "cpu-smoke", [], all_of=True) == [
        "a.c: not used, why", "metrics.jsonl:1:loss: 1.0 and 1.000000000001",
    ]  # fmt: skip


def test_bad_input_is_found_before_anything_is_solved(tmp_path):
    done = start(tmp_path / "solved", "-s", "rl.step=1")
    assert done.returncode == 1 and done.stderr == "unknown setting 'rl.step'; did you mean rl.steps?\n"
    assert done.stdout == "" and not (tmp_path / "solved").exists()
    done = start(tmp_path / "solved", "--chapters", "77")
    assert done.returncode == 2 and "no chapter 77 with exercises; there are 00, 01" in done.stdout


def test_files_of_others_are_left_alone_and_a_damaged_record_is_made_anew(script, tmp_path, monkeypatch):
    monkeypatch.setenv("COURSE_HOME", "")
    for folder, words in ((ROOT, "not of this script"), (Path(__file__), "is a file")):
        with pytest.raises(UserError, match=words):
            script.take(folder)
    first = start(tmp_path / "solved", "--no-run", "--chapters", "00")
    (tmp_path / "solved/.course/progress.json").write_text("{")
    again = start(tmp_path / "solved", "--no-run", "--chapters", "00")
    assert first.returncode == again.returncode == 0, again.stderr
    assert "00_start: 5 solved" in again.stdout and "progress.json could not be read" in again.stdout
