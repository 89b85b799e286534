"""Tables of scores: intervals beside them, prompt lengths, warnings, several samples, two models side by side."""

import json
import re

from test_report import MACHINE, make_run

from nanochat_lib.report import build_report, scores, tables, write_report

TASK = {
    "accuracy": 0.5131, "interval": [0.496, 0.530], "centered": -0.281, "centered_interval": [-0.33, -0.24],
    "baseline": 0.62, "examples": 3270, "skipped": 3, "shots": 10, "type": "multiple_choice", "context": 1024,
    "median_prompt_tokens": 1500.0, "prompt_tokens": {"p50": 1500, "p90": 2010, "max": 3123}, "truncated_share": 0.998,
    "truncated_tokens": 476.0, "beyond_training_context_share": 0.998,
    "warning": "99.8% of the prompts were cut to 1,024 tokens and the score is no better than guessing",
}  # fmt: skip
WHOLE = TASK | {
    "truncated_share": 0.0,
    "warning": "",
    "skipped": 0,
    "accuracy": None,
    "interval": None,
    "centered": None,
}


def test_a_core_row_shows_interval_lengths_and_what_was_cut():
    table = scores.core_table({"boolq": TASK, "none": WHOLE})
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    assert cells["accuracy (95 %)"] == "51% (50 – 53)" and cells["tokens p50 / p90 / max"] == "1,500 / 2,010 / 3,123"
    assert cells["truncated"] == "100% !" and cells["skipped"] == "3" and "untrained" not in cells
    assert dict(zip(table.columns, table.rows[1], strict=True))["accuracy (95 %)"] == "–"
    with_untrained = scores.core_table({"boolq": TASK | {"centered_untrained": 0.1}})
    assert dict(zip(with_untrained.columns, with_untrained.rows[0], strict=True))["untrained"] == "0.100"
    assert scores.warnings({"boolq": TASK, "none": WHOLE}) == [f"boolq: {TASK['warning']}"]


def test_every_form_of_the_report_has_intervals_and_warnings(tmp_path):
    run = make_run(tmp_path / "run")
    path = run / "stages" / "eval_base.json"
    record = json.loads(path.read_text())
    record["figures"] = {
        "core": -0.281, "core_interval": [-0.33, -0.24], "core_tasks": {"boolq": TASK}, "val_bpb": 0.75,
        "samples": [{"kind": "prompted", "prompt": "The capital of France is", "text": " Paris"},
                    {"kind": "free", "prompt": "", "text": "once"}],
    }  # fmt: skip
    path.write_text(json.dumps(record))
    write_report(run, MACHINE)
    stage = json.loads((run / "report.json").read_text())["stages"]["eval_base"]
    assert stage["core_interval"] == [-0.33, -0.24] and stage["core_tasks"]["boolq"]["truncated_share"] == 0.998
    assert stage["core_tasks"]["boolq"]["interval"] == [0.496, 0.530]
    for name in ("report.md", "report.html"):
        text = (run / name).read_text().replace("\\", "")
        assert ('nowrap">(50 – 53)</span>' in text) == (name == "report.html")
        text = re.sub("</?span[^>]*>", "", text)
        for words in (TASK["warning"], "51% (50 – 53)", "1,500 / 2,010 / 3,123", "-0.281 (-0.33 – -0.24)", "(nothing)",
                      "Paris"):  # fmt: skip
            assert words in text, (name, words)
    base, pretrain = (build_report(run, MACHINE)["stages"][name] for name in ("eval_base", "pretrain"))
    assert "samples" not in base and pretrain["val_bpb_last"] == 2.0


def chat(accuracy, **more):
    task = {"accuracy": accuracy, "interval": [accuracy - 0.1, accuracy + 0.1], "baseline": 0.0, "type": "generative",
            "ended_share": 0.9, "unparsed": 4, "samples": 1} | more  # fmt: skip
    return {"chatcore": accuracy, "chatcore_interval": [0.1, 0.3], "tasks": {"GSM8K": task}}


def test_chat_rows_show_intervals_and_answers_that_cannot_be_read():
    table = scores.chat_table({"base": chat(0.2), "sft": chat(0.5)})
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    assert cells["base"] == "20% (10 – 30)" and cells["SFT"] == "50% (40 – 60)" and cells["RL"] == "–"
    assert cells["unreadable"] == "4 / 4 / –" and cells["answers ended"] == "90% / 90% / –"
    assert table.rows[-1][3] == "0.200 (0.10 – 0.30)" and "mid" not in table.columns
    assert "mid" in scores.chat_table({"base": chat(0.2), "mid": chat(0.3)}).columns
    assert tables.chat_table({"sft": chat(0.5)}).rows == scores.chat_table({"sft": chat(0.5)}).rows


def test_pass_at_k_has_a_table_of_its_own():
    several = chat(0.5, samples=2, pass_at_k=[0.25, 0.5], pass_at_k_unbiased=[0.3, 0.5])
    assert scores.pass_table({"sft": several}).rows == [
        ("GSM8K, SFT", "any of the first k", "25% / 50%"),
        ("GSM8K, SFT", "unbiased", "30% / 50%"),
    ]
    assert not scores.pass_table({"sft": chat(0.5)}).rows
    assert scores.chat_table({"sft": several}).rows[0][0] == "GSM8K, any of 2"


def test_a_comparison_shows_signs_and_verdicts():
    rows = [
        {"kind": "core", "task": "boolq", "a": 0.5, "b": 0.62, "examples": 9, "difference": 0.12,
         "interval": [0.05, 0.2], "p": 0.01, "p_holm": 0.02, "paired": True, "verdict": "more than noise"},
        {"kind": "core", "task": "squad", "a": None, "b": 0.1, "examples": 0},
    ]  # fmt: skip
    mean = {"kind": "core", "task": "CORE, 1 tasks", "a": 0.1, "b": 0.2, "difference": 0.1, "interval": [0.0, 0.2],
            "paired": False, "verdict": "noise"}  # fmt: skip
    shown = scores.comparison_table({"a": "one", "b": "two", "tasks": rows, "means": [mean]}).rows
    assert shown[0] == ("boolq", "50%", "62%", "+12.0", "+5.0 … +20.0", "paired", "more than noise")
    assert shown[1] == ("squad", "–", "10%", "–", "–", "", "no score")
    assert shown[2] == ("CORE, 1 tasks", "0.100", "0.200", "+0.100", "+0.000 … +0.200", "unpaired", "noise")
