"""nanochat's whole chat sequence at a tiny size, through the command line: midtraining, SFT, RL, evaluation."""

import json
import os
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[1]))
import chat_sets

from nanochat_lib import checkpoint, identity
from nanochat_lib.cli import main
from nanochat_lib.hub.sets import path_of
from nanochat_lib.tokenizer import Tokenizer

pytestmark = pytest.mark.slow

SETTINGS = (
    "model.sequence_len=512 pretrain.device_rows=2 pretrain.steps=5 mid.mixture=nanochat-historic mid.words=words.txt "
    "sft.mixture=nanochat-after-mid sft.words=words.txt sft.steps=-1 sft.mmlu_copies=0 rl.task=gsm8k rl.steps=2 "
    "rl.reward=exact+0.2*format rl.max_new_tokens=16 rl.rollout_rows=4 rl.eval_questions=3 evaluation.run_code=limits "
    "evaluation.chat_max_per_task=4 evaluation.chat_max_new_tokens=8"
)


def test_midtraining_sft_rl_and_evaluation(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path / "data"))
    monkeypatch.chdir(tmp_path)
    chat_sets.put_all(talks=40, questions=30)
    identity.write(path_of("identity"), "Ada", "us", count=10)
    Path("words.txt").write_text("\n".join(a + b + c for a in "bcdfg" for b in "aeiou" for c in "lmnpr"))
    options = ["--preset", "cpu-smoke", "--run-dir", "run"]
    for setting in SETTINGS.split():
        options += ["-s", setting]
    assert main(["eval", "--stage", "chat", *options]) == 0
    assert main(["report", "--run-dir", "run"]) == 0
    run = Path("run")
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    figures = {p.stem: json.loads(p.read_text())["figures"] for p in run.glob("stages/*.json") if "plan" not in p.stem}
    assert figures["mid"]["conversations"] == 40 + 30 + 30 + 2 * 10 + 200_000 + 80_000
    assert figures["sft"]["conversations"] == 12 + 12 + 4 * 30 + 40 + 2 * 10 + 300 + 300
    assert figures["sft"]["dropped"] == figures["sft"]["truncated"] == 0 and figures["sft"]["epochs"] == 1
    assert figures["mid"]["val_loss_last"] < figures["mid"]["val_loss_first"]
    meta = checkpoint.load_meta(run / "sft")
    assert meta["step"] == figures["sft"]["steps"] and meta["base_step"] == 5  # mid's last step

    steps = [r for r in records if r["stage"] == "rl" and "loss" in r]
    assert len(steps) == 2 and all(r["logprob_diff"] < 1e-4 and abs(r["ratio"] - 1) < 1e-3 for r in steps)
    assert all((r["collapsed"] == 1) == (r["lr"] == 0) for r in steps)
    assert figures["rl"]["reward"] == "exact+0.2*format" and len(figures["rl"]["pass_at_k_unbiased_last"]) == 2
    if figures["rl"]["idle_steps"] == 2:  # nothing to learn from: not one weight has moved
        tokenizer = Tokenizer.load(run / "tokenizer")
        (_, before, _), (_, after, _) = (checkpoint.load_model(run / name, tokenizer) for name in ("sft", "rl"))
        assert all(np.array_equal(before[name], after[name]) for name in before)

    stages = figures["eval_chat"]["stages"]
    assert list(stages) == ["base", "mid", "sft", "rl"] and not figures["eval_chat"]["left_out"]
    assert list(stages["sft"]["tasks"]) == ["ARC-Easy", "ARC-Challenge", "MMLU", "GSM8K", "HumanEval", "SpellingBee"]
    report = json.loads((run / "report.json").read_text())
    assert list(report["stages"]) == ["tokenizer", "pretrain", "eval_base", "mid", "sft", "rl", "eval_chat"]
    assert report["missing"] == ["eval_base"] and not report["problems"]
    assert (
        "## Midtraining" in (run / "report.md").read_text() and "<h2>Midtraining" in (run / "report.html").read_text()
    )

    plan = (run / "stages" / "sft-plan.json").stat().st_mtime_ns
    capsys.readouterr()
    assert main(["rl", "--run-dir", "run"]) == 0  # everything is there
    assert "rl: reused" in capsys.readouterr().out and (run / "stages" / "sft-plan.json").stat().st_mtime_ns == plan
    os.utime(path_of("identity"))  # touched, not changed
    path_of("identity").write_text(path_of("identity").read_text() + "\n")
    assert main(["sft", "--run-dir", "run"]) == 2 and "a file that the settings name changed" in capsys.readouterr().err
