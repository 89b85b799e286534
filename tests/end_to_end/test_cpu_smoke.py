"""The main job as a user starts it: `nanochat run` with every stage, killed on the way and started again."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import nbformat
import pytest

ROOT = Path(__file__).resolve().parents[2]
STAGES = ("tokenizer", "pretrain", "eval_base", "sft", "rl", "eval_chat")


def nanochat(*words, **options):
    return subprocess.run(
        [sys.executable, "-m", "nanochat_lib", *map(str, words)], capture_output=True, text=True, cwd=ROOT, **options
    )


def metrics(folder):
    path = folder / "metrics.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


@pytest.fixture(scope="module")
def killed_and_finished(tmp_path_factory):
    """(run folder, what the second start printed): the first start was killed with -9 while it pretrained."""
    folder = tmp_path_factory.mktemp("smoke") / "run with a space"
    command = [sys.executable, "-m", "nanochat_lib", "run", "--preset", "cpu-smoke", "--run-dir", str(folder)]
    first = subprocess.Popen(
        command, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    while not list(folder.glob("base/step_*/manifest.json")) and first.poll() is None:
        time.sleep(0.1)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    deadline = time.time() + 60  # the kernel notices that its parent is gone, and lets go of the folder
    while time.time() < deadline:
        done = nanochat("run", "--preset", "cpu-smoke", "--run-dir", folder)
        if "in use by another run" not in done.stderr:
            break
        time.sleep(1)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder, done.stdout


def test_the_second_start_continued(killed_and_finished):
    folder, said = killed_and_finished
    notebook = nbformat.read(folder / "capstone.ipynb", 4)
    printed = "".join(
        o.get("text", "") for c in notebook.cells for o in c.get("outputs", []) if o.output_type == "stream"
    )
    assert "tokenizer: reused" in printed and "pretrain: continuing from step" in printed
    assert "report" in said and "chat" in said
    steps = [r["step"] for r in metrics(folder) if r["stage"] == "pretrain" and "loss" in r]
    assert steps == list(range(1, 21))  # each step once, although some were run twice


def test_report_json_keeps_its_contract(killed_and_finished):
    report = json.loads((killed_and_finished[0] / "report.json").read_text())
    assert report["preset"] == "cpu-smoke" and report["cost_usd"] is None and report["machine"]
    stages = report["stages"]
    assert set(stages) == set(STAGES) and all(stages[name]["seconds"] > 0 for name in STAGES)
    for name in ("pretrain", "sft", "rl"):  # the first start's time is not lost with its kill
        assert stages[name]["seconds"] >= stages[name]["train_seconds"]
    pretrain = stages["pretrain"]
    for name in ("val_bpb_first", "val_bpb_last", "tokens", "tokens_per_s", "mfu"):
        assert pretrain[name] is not None, name
    assert pretrain["tokens"] == 20 * 1024 and pretrain["val_bpb_last"] < pretrain["val_bpb_first"]
    assert {"truncated_share", "centered", "accuracy"} <= set(next(iter(stages["eval_base"]["core_tasks"].values())))
    assert -1 <= stages["eval_base"]["core"] <= 1
    assert {"reward_first", "reward_last"} <= set(stages["rl"])
    assert set(stages["eval_chat"]["stages"]) == {"base", "sft", "rl"}
    assert report["samples"]


def test_the_executed_notebook_reads_without_walls_of_log(killed_and_finished):
    notebook = nbformat.read(killed_and_finished[0] / "capstone.ipynb", 4)
    pictures = 0
    for cell in notebook.cells:
        for output in cell.get("outputs", []):
            assert output.output_type != "error"
            data = output.get("data", {})
            text = output.get("text", "") or ("" if "text/html" in data else data.get("text/plain", ""))
            assert len(text.splitlines()) <= 40, f"cell {cell.id} prints a wall of text"
            pictures += "image/png" in data or "image/svg+xml" in data
    assert pictures >= 8


def test_the_report_is_one_file_with_its_plots_inside(killed_and_finished):
    html = (killed_and_finished[0] / "report.html").read_text()
    assert html.count("data:image/") + html.count("<svg") >= 5
    assert 'src="http' not in html and 'href="http' not in html.replace('href="https://arxiv', "")
    assert "# " in (killed_and_finished[0] / "report.md").read_text()


def test_metrics_have_the_contracts_fields(killed_and_finished):
    wanted = {"stage", "step", "loss", "lr", "tokens", "tokens_per_s", "mfu", "grad_norm", "epoch", "seconds"}
    records = [r for r in metrics(killed_and_finished[0]) if "loss" in r]
    assert {r["stage"] for r in records} == {"pretrain", "sft", "rl"} and all(wanted <= set(r) for r in records)


def test_plain_papermill_reuses_everything(killed_and_finished, tmp_path):
    folder, _ = killed_and_finished
    before = (folder / "metrics.jsonl").read_bytes()
    done = subprocess.run(
        [sys.executable, "-m", "papermill", "chapters/12_capstone.ipynb", str(tmp_path / "out.ipynb"), "-k", "python3",
         "-p", "preset", "cpu-smoke", "-p", "run_dir", str(folder), "--no-progress-bar"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    notebook = nbformat.read(tmp_path / "out.ipynb", 4)
    printed = "".join(
        o.get("text", "") for c in notebook.cells for o in c.get("outputs", []) if o.output_type == "stream"
    )
    assert all(f"{stage}: reused" in printed for stage in STAGES)
    assert (folder / "metrics.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("name", "value", "words"),
    [
        ("presett", "cpu", "preset"),
        pytest.param(
            "preset", "cpuu", "did you mean cpu", marks=pytest.mark.slow
        ),  # course/test_parameters.py has them
        pytest.param("seed", "one", "seed must be int", marks=pytest.mark.slow),
    ],
)
def test_papermill_with_a_bad_parameter_stops_at_once(tmp_path, name, value, words):
    done = subprocess.run(
        [sys.executable, "-m", "papermill", "chapters/12_capstone.ipynb", str(tmp_path / "out.ipynb"), "-k", "python3",
         "-p", name, value, "-p", "run_dir", str(tmp_path / "r"), "--no-progress-bar"],
        capture_output=True, text=True, cwd=ROOT,
    )  # fmt: skip
    assert done.returncode != 0 and words in done.stderr
    assert not (tmp_path / "r").exists()


def test_chat_answers_from_a_pipe(killed_and_finished):
    done = nanochat("chat", "--run-dir", killed_and_finished[0], "-p", "Who are you?", "--max-tokens", "8")
    assert done.returncode == 0 and done.stdout.strip(), done.stderr


def test_another_configuration_in_the_same_folder_is_one_line(killed_and_finished):
    folder, _ = killed_and_finished
    before = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    done = nanochat("run", "--preset", "cpu-smoke", "--run-dir", folder, "--seed", "5")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and "seed" in done.stderr
    after = {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}
    assert {p.name for p in before if before[p] != after.get(p)} <= {".lock"}


def test_chat_with_another_tokenizer_is_refused(killed_and_finished, tmp_path):
    """The weights would run and talk nonsense: the fingerprint in the checkpoint stops it."""
    import shutil

    from nanochat_lib.tokenizer import Tokenizer

    folder = tmp_path / "copy"
    shutil.copytree(killed_and_finished[0], folder)
    shutil.rmtree(folder / "tokenizer")
    Tokenizer.train(["some other text with other words in it"] * 9, 512, strict=False).save(folder / "tokenizer")
    done = nanochat("chat", "--run-dir", folder, "-p", "Hi")
    assert done.returncode == 2 and len(done.stderr.strip().splitlines()) == 1 and "tokenizer" in done.stderr
