"""The report of whole, partial and damaged runs; its page is safe, self-contained, and says what is missing."""

from __future__ import annotations

import json
import os
import re
import shutil
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from nanochat_lib.errors import UserError
from nanochat_lib.report import STAGES, bars, build_report, plots, read_metrics, strips, tables, write_report

EVIL = "<script>alert('x')</script><img src=x onerror=alert(1)> | `a` $b$ **c** \x00\x1b[31m </td>"
MACHINE = {"system": "Linux x86_64", "cpu": "test cpu", "cores": 2, "devices": 1, "device_kind": "cpu",
           "memory_free_bytes": 5, "disk_free_bytes": 6, "usd_hour": None}  # fmt: skip


def chat(core: float, accuracy: float) -> dict:
    def task(kind: str, baseline: float, ended: float | None) -> dict:
        return {"accuracy": accuracy, "baseline": baseline, "stderr": 0.03, "ended_share": ended, "type": kind}

    tasks = {"primer-sums": task("generative", 0.0, 0.5), "primer-choice": task("categorical", 0.25, None)}
    return {"chatcore": core, "tasks": tasks}


FIGURES = {
    "tokenizer": {"vocab_size": 512, "bytes_per_token": 2.5, "examples": [["Hel", "lo", " \n", EVIL]]},
    "pretrain": {
        "val_bpb_first": 4.0, "val_bpb_last": 2.0, "val_bpb_world_first": 4.2, "val_bpb_world_last": 0.5,
        "byte_bigram_bpb": 3.7, "tokens": 20480, "tokens_per_s": 900.0, "mfu": 0.2, "steps": 20,
        "params": {"wte": 1, "total": 1234567}, "samples": [{"prompt": "Once", "text": EVIL}],
    },
    "eval_base": {
        "core": 0.61, "core_before": 0.01, "core_facts": 0.7,
        "core_tasks": {
            "facts " + EVIL: {
                "accuracy": 0.9, "centered": 0.87, "baseline": 0.25, "examples": 64, "shots": 10,
                "truncated_share": 0.125,
                "median_prompt_tokens": 90, "type": "multiple_choice",
            }
        },
    },
    "sft": {"conversations": 800, "tokens": 10240, "val_loss_first": 3.0, "val_loss_last": 1.0, "dropped": 2},
    "rl": {"task": "primer-word-sums", "reward_first": 0.4, "reward_last": 0.6, "pass_at_k_first": [0.4, 0.5],
           "pass_at_k_last": [0.6, 0.7], "steps": 3, "questions": 6, "collapsed_share": 0.5},
    "eval_chat": {
        "stages": {"base": chat(0.0, 0.02), "sft": chat(0.5, 0.6), "rl": chat(0.55, 0.7)},
        "samples": [
            {"stage": s, "question": "2+2? " + EVIL, "answer": EVIL, "reference": "4"} for s in ("base", "sft", "rl")
        ],
    },
}  # fmt: skip
RECORDS = [
    *(
        {"stage": "pretrain", "step": s, "loss": 6 - s / 5, "lr": 1.0, "momentum": 0.9, "tokens_per_s": 900.0}
        for s in range(1, 21)
    ),
    *(
        {"stage": "pretrain", "step": s, "event": "eval", "val_bpb": 4 - s / 10, "val_bpb_world": 4.2}
        for s in (0, 10, 20)
    ),
    *({"stage": "sft", "step": s, "loss": 3 - s / 10, "lr": 1.0} for s in range(1, 11)),
    *({"stage": "sft", "step": s, "event": "eval", "val_loss": 3 - s / 10} for s in (0, 10)),
    *({"stage": "rl", "step": s, "loss": 0.0, "lr": 0.5, "reward": 0.5} for s in range(1, 4)),
    *({"stage": "rl", "step": s, "event": "eval", "reward_heldout": 0.4 + s / 30} for s in (0, 3)),
]  # fmt: skip


def make_run(folder: Path, stages: tuple[str, ...] = STAGES, records: list[dict] = RECORDS) -> Path:
    (folder / "stages").mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps({"preset": "cpu-smoke", "seed": 3}))
    for i, name in enumerate(stages):
        record = {"name": name, "key": "k", "seconds": 10.0 + i, "figures": FIGURES[name], "finished": True}
        (folder / "stages" / f"{name}.json").write_text(json.dumps(record))
    (folder / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    return folder


@pytest.fixture(scope="module")
def full(tmp_path_factory) -> Path:
    """The folder of a whole run with its report; tests only read it."""
    run = make_run(tmp_path_factory.mktemp("full") / "run")
    write_report(run, MACHINE)
    return run


class Page(HTMLParser):
    """What a browser would see: elements, attributes, text outside <style>."""

    VOID = {"meta", "img", "br", "link", "input", "hr"}

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags, self.attributes, self.text, self.open, self.ids = [], [], [], [], []
        self.feed(html)
        assert not self.open, f"unclosed: {self.open}"

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        self.ids += [value for name, value in attrs if name == "id"]

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.text.append(data)


def test_report_json_has_the_contract_shape(full):
    report = build_report(full, MACHINE)
    assert json.loads((full / "report.json").read_text(encoding="utf-8")) == report
    assert list(report["stages"]) == ["tokenizer", "pretrain", "eval_base", "sft", "rl", "eval_chat"]
    assert report["preset"] == "cpu-smoke" and report["seed"] == 3 and report["cost_usd"] is None
    assert report["total_seconds"] == sum(10.0 + i for i in range(6))
    assert report["stages"]["pretrain"]["seconds"] == 11.0
    assert report["stages"]["pretrain"]["val_bpb_last"] == 2.0
    assert report["stages"]["eval_base"]["core_tasks"]["facts " + EVIL]["truncated_share"] == 0.125
    assert report["stages"]["eval_chat"]["stages"]["sft"]["chatcore"] == 0.5
    assert [s.get("stage", "base") for s in report["samples"]] == ["base", "base", "sft", "rl"]
    assert report["machine"]["cpu"] == "test cpu" and "disk_free_bytes" not in report["machine"]
    assert report["missing"] == [] and report["problems"] == []


def test_cost_follows_the_hourly_price(tmp_path):
    run = make_run(tmp_path / "run")
    report = build_report(run, MACHINE | {"usd_hour": 24.0})
    assert report["cost_usd"] == pytest.approx(24 * report["total_seconds"] / 3600, abs=1e-4)
    assert tables.time_table(report).rows[-1][2] == f"${report['cost_usd']:.2f}"


def test_the_page_is_one_file_without_scripts_and_model_text_cannot_run(full):
    html = (full / "report.html").read_text(encoding="utf-8")
    page = Page(html)
    assert not {"script", "iframe", "object", "link", "img", "form", "base"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    links = [value for name, value in page.attributes if name in ("src", "href", "xlink:href")]
    assert links and all(value.startswith("#") for value in links), "everything the page shows is inside it"
    assert not re.search(r"url\((?!#)|@import", html)
    assert "default-src 'none'" in html
    text = "".join(page.text)
    assert text.count("<script>alert('x')</script>") >= 6  # shown as what it is: sample, question, answers, labels
    assert "\x00" not in html and "\x1b" not in html


def test_ids_of_the_figures_do_not_clash(full):
    html = (full / "report.html").read_text(encoding="utf-8")
    ids = Page(html).ids
    assert len(ids) > 100 and len(set(ids)) == len(ids)
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', html)) <= set(ids)


def test_the_page_shows_every_part(full):
    text = "".join(Page((full / "report.html").read_text(encoding="utf-8")).text)
    for part in (
        "Loss in pretraining", "Held-out text", "byte bigram, text: 3.70", "Learning rate", "Muon momentum",
        "Training speed", "Loss in SFT", "Reward", "Chat tasks, stage by stage", "CORE: centred accuracy",
        "Before and after",
        "truncated", "12%", "1,234,567", "Time per stage", "own machine", "test cpu", "primer-word-sums", "40% → 60%",
        "4.00 → 2.00", "0.54 × a byte-bigram model",
    ):  # fmt: skip
        assert part in text, part


def test_markdown_keeps_the_field_s_headings_and_escapes(full):
    text = (full / "report.md").read_text(encoding="utf-8")
    assert text.startswith("# nanochat training report\n")
    headings = re.findall(r"^## (.+)$", text, re.MULTILINE)
    assert headings[:3] == ["Summary", "Environment", "Tokenizer training"] and "Base model training" in headings
    assert "| Metric | BASE | SFT | RL |" in text and "Total time of the stages: 1:15" in text
    assert not re.search(r"(?<!\\)<(?!br>)", text) and "\x1b" not in text
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        columns = {len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}
        assert len(columns) == 1, f"a cell broke out of its table: {block}"


def test_same_run_same_bytes(full, tmp_path):
    names = ("report.json", "report.md", "report.html")
    again = tmp_path / "run"
    shutil.copytree(full, again)
    for name in names:
        (again / name).unlink()
    write_report(again, MACHINE)
    assert [(again / name).read_bytes() for name in names] == [(full / name).read_bytes() for name in names]


@pytest.mark.parametrize("done", [0, 2, 4])
def test_a_partial_run_says_what_is_not_evaluated(tmp_path, done):
    run = make_run(tmp_path / "run", STAGES[:done], [r for r in RECORDS if r["stage"] in STAGES[:done]])
    report = write_report(run, MACHINE)
    assert report["missing"] == list(STAGES[done:])
    assert all(report["stages"][name] is None for name in STAGES[done:])
    page = Page((run / "report.html").read_text(encoding="utf-8"))
    for text in ("".join(page.text), (run / "report.md").read_text(encoding="utf-8")):
        assert text.count("not evaluated") >= len(STAGES) - done
        assert tables.STAGE_TITLES["eval_chat"] in text


@pytest.mark.parametrize("mixture", ["none", "nanochat-historic"])
def test_midtraining_stands_in_the_report_of_a_run_that_has_it(tmp_path, mixture):
    run = make_run(tmp_path / "run")
    (run / "config.json").write_text(json.dumps({"preset": "cpu-smoke", "seed": 3, "mid": {"mixture": mixture}}))
    if mixture != "none":
        report = build_report(run, MACHINE)
        assert report["missing"] == ["mid"] and list(report["stages"]) == [*STAGES[:3], "mid", *STAGES[3:]]
    figures = {"mixture": mixture, "val_loss_first": 4.0, "val_loss_last": 2.5, "tokens": 5120}
    record = {"name": "mid", "key": "k", "seconds": 30.0, "figures": figures, "finished": True}
    (run / "stages" / "mid.json").write_text(json.dumps(record))
    report = write_report(run, MACHINE)
    here = mixture != "none"
    assert report["missing"] == [] and ("mid" in report["stages"]) == here
    assert report["total_seconds"] == sum(10 + i for i in range(6)) + 30 * here
    for name in ("report.md", "report.html"):
        assert ("Midtraining" in (run / name).read_text(encoding="utf-8")) == here


def test_a_stage_that_was_stopped_is_told_apart_from_one_that_never_ran(tmp_path):
    run = make_run(tmp_path / "run", STAGES[:2])
    record = {"name": "sft", "key": "k", "seconds": 7.0, "figures": {}, "finished": False}
    (run / "stages" / "sft.json").write_text(json.dumps(record))
    report = build_report(run, MACHINE)
    assert report["stages"]["sft"] is None and "sft" in report["missing"]
    assert report["problems"] == ["sft was stopped after 7 s and has no result yet"]
    assert report["total_seconds"] == 10 + 11 + 7


def test_a_run_that_has_only_begun_and_a_folder_that_is_none(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"preset": "cpu"}')
    report = write_report(tmp_path / "run", MACHINE)
    assert report["missing"] == list(STAGES) and report["problems"] == ["metrics.jsonl is missing"]
    with pytest.raises(UserError, match="holds no run"):
        build_report(tmp_path / "nothing", MACHINE)


def test_evaluations_that_were_switched_off_are_no_crash(tmp_path):
    run = make_run(tmp_path / "run", records=[r for r in RECORDS if r.get("event") != "eval"])
    for name in STAGES:
        record = {"name": name, "key": "k", "seconds": 1.0, "figures": {}, "finished": True}
        (run / "stages" / f"{name}.json").write_text(json.dumps(record))
    report = write_report(run, MACHINE)
    assert report["missing"] == []
    text = "".join(Page((run / "report.html").read_text(encoding="utf-8")).text)
    assert text.count("not evaluated") >= 4  # bpb, CORE, chat, summary


@pytest.mark.parametrize("broken", ['{"stage": "pretr', "[1, 2]", "null", '{"step": 3}', "\udcff\udcfe"])
def test_broken_metrics_lines_are_counted_and_named(tmp_path, broken):
    run = make_run(tmp_path / "run")
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines()
    lines.insert(4, broken)
    path.write_bytes("\n".join([*lines, broken]).encode("utf-8", "surrogateescape"))
    records, problems = read_metrics(path)
    assert len(records) == len(RECORDS)
    assert problems == [f"metrics.jsonl: 2 lines are not a record and left out (line 5, {len(lines) + 1})"]
    assert build_report(run, MACHINE)["problems"] == problems


@pytest.mark.parametrize(
    "content",
    ["", "{", "[]", '{"seconds": "long", "figures": {}}', '{"seconds": 1}', '{"seconds": NaN, "figures": {}}'],
)
def test_a_broken_stage_record_is_named_and_left_out(tmp_path, content):
    run = make_run(tmp_path / "run")
    (run / "stages" / "rl.json").write_text(content)
    report = build_report(run, MACHINE)
    assert report["stages"]["rl"] is None and len(report["problems"]) == 1 and "rl.json" in report["problems"][0]


def test_numbers_that_are_not_finite_become_null_and_are_named(tmp_path):
    run = make_run(tmp_path / "run")
    record = {"name": "rl", "key": "k", "seconds": 1.0, "finished": True,
              "figures": {"reward_first": float("nan"), "pass_at_k_last": [0.5, float("inf")]}}  # fmt: skip
    (run / "stages" / "rl.json").write_text(json.dumps(record))
    report = build_report(run, MACHINE)
    assert report["stages"]["rl"] == {
        "seconds": 1.0,
        "cost_usd": None,
        "reward_first": None,
        "pass_at_k_last": [0.5, None],
    }
    assert report["problems"] == ["rl.reward_first is nan", "rl.pass_at_k_last[1] is inf"]


def test_the_machine_is_the_one_that_ran_not_the_one_that_reports(tmp_path):
    run = make_run(tmp_path / "run")
    (run / "report.json").write_text(json.dumps({"machine": MACHINE}))
    assert build_report(run)["machine"]["cpu"] == "test cpu"
    newer = (run / "report.json").stat().st_mtime + 5
    os.utime(run / "stages" / "rl.json", (newer, newer))
    assert build_report(run)["machine"]["cpu"] != "test cpu"


# ---- figures


def axes_text(figure: plots.Figure) -> str:
    return " ".join(t.get_text() for ax in figure.axes for t in ax.texts)


def test_points_takes_the_last_line_of_a_step_and_only_finite_numbers():
    records = [
        {"stage": "pretrain", "step": 2, "loss": 3.0}, {"stage": "pretrain", "step": 1, "loss": 4.0},
        {"stage": "pretrain", "step": 2, "loss": 2.5}, {"stage": "pretrain", "step": 3, "loss": float("nan")},
        {"stage": "pretrain", "step": 4, "loss": None}, {"stage": "pretrain", "step": "5", "loss": 1.0},
        {"stage": "sft", "step": 1, "loss": 9.0}, {"stage": "pretrain", "step": 6, "event": "eval", "loss": 8.0},
    ]  # fmt: skip
    assert plots.points(records, "pretrain", "loss") == ([1, 2], [4.0, 2.5])


def test_long_runs_are_thinned_but_keep_both_ends():
    records = [{"stage": "pretrain", "step": s, "loss": float(s)} for s in range(1, 25_001)]
    xs, ys = plots.points(records, "pretrain", "loss")
    assert len(xs) <= plots.MAX_POINTS and xs[0] == 1 and xs[-1] == 25_000 and ys == [float(x) for x in xs]


def test_smooth_keeps_a_line_and_drops_a_spike():
    line = [float(x) for x in range(200)]
    np.testing.assert_allclose(plots.smooth(line)[20:-20], line[20:-20], atol=1e-9)
    flat = [1.0] * 100
    flat[50] = 50.0
    assert max(plots.smooth(flat)) < 1.5


@pytest.mark.parametrize("records", [[], RECORDS], ids=["empty", "full"])
def test_every_curve_draws_with_and_without_data(records):
    figures = [
        plots.loss_curve(records, "pretrain"), plots.loss_curve(records, "sft"), plots.loss_curve(records, "rl"),
        plots.bpb_curve(records, 3.7, None), plots.schedule_plot(records, "pretrain"), plots.throughput_plot(records),
        plots.reward_curve(records), bars.time_bars({}), bars.time_bars({"a": 3.0, "b": None}),
        bars.core_bars({}), bars.before_after_bars({}), bars.before_after_bars({"base": chat(0, 0.1), "sft": None}),
    ]  # fmt: skip
    for figure in figures:
        assert plots.to_png(figure, 40).startswith(b"\x89PNG")
        assert all(not ax.spines[side].get_visible() for ax in figure.axes for side in ("top", "right"))
        assert all(ax.get_title(loc="left") for ax in figure.axes)


def test_curves_show_the_data():
    (ax,) = plots.bpb_curve(RECORDS, 3.7).axes
    np.testing.assert_allclose(ax.lines[0].get_xydata(), [(0, 4.0), (10, 3.0), (20, 2.0)])
    assert ax.lines[-1].get_ydata()[0] == 3.7 and ax.get_ylabel() == "bits per byte"
    widths = sorted(
        round(p.get_width(), 2)
        for p in bars.core_bars({"a": {"centered": 0.8}, "b": {"centered": -0.1}}).axes[0].patches
    )
    assert widths == [-0.1, 0.8]


def test_dark_pages_get_light_ink():
    svg = plots.to_svg(plots.loss_curve(RECORDS, "pretrain"), "x")
    assert plots.INK not in svg and "currentColor" in svg and svg.count("<svg") == 1


def test_text_from_data_is_not_read_as_markup():
    tasks = {"$x^2$": {"centered": 0.5}, "<b>&": {"centered": 0.2}}
    svg = plots.to_svg(bars.core_bars(tasks), "x")
    assert "$x^2$" in svg and "&lt;b&gt;&amp;" in svg
    plots.to_png(strips.token_strip(["$\\frac{$", "x"]), 40)  # as mathematics this would be an error
    assert "$a$" in plots.to_svg(bars.before_after_bars({"base": {"tasks": {"$a$": {"accuracy": 0.5}}}}), "x")


def test_token_layout_keeps_every_character_in_order():
    pieces = ["ab", "c" * 10, "de", "", "世\n", "f"]
    runs = strips.layout(pieces, columns=6)
    assert "".join(text for *_, text in runs) == "".join(strips.visible(p) for p in pieces)
    assert all(column + len(text) <= 6 for _, _, column, text in runs)
    assert [i for i, *_ in runs] == sorted(i for i, *_ in runs)


def test_mask_strip_tints_exactly_the_trained_tokens():
    figure = strips.mask_strip(["<|bos|>", "Hi", "?", "Yes", "<end>"], [0, 0, 0, 1, 1])
    tinted = [p for p in figure.axes[0].patches if p.get_facecolor()[3] > 0]
    assert len(tinted) == 2 + 1  # two tokens and the legend's square
    assert "2 of 5 tokens (40%)" in axes_text(figure)


def test_batch_grid_greys_what_is_not_trained():
    inputs = np.array([[1, 5, 6, 1, 7], [1, 5, 1, 5, 5]])
    targets = np.array([[5, -1, -1, 7, -1], [5, 5, 5, 5, 5]])
    (ax,) = strips.batch_grid(inputs, 1, targets).axes
    image = ax.images[0].get_array()
    grey = np.isclose(np.asarray(image)[..., 3], 0.25)
    np.testing.assert_array_equal(grey, targets < 0)
    (ax,) = strips.batch_grid(inputs, 1).axes
    image = np.asarray(ax.images[0].get_array())
    assert (image[0, 0] == image[0, 2]).all() and (image[0, 2] != image[0, 3]).any()


def test_advantages_are_rewards_minus_the_questions_mean():
    figure = strips.advantage_plot(np.array([[1, 0, 0, 1], [1, 1, 1, 1]]))
    left, right = ([t.get_text() for t in ax.texts] for ax in figure.axes)
    assert left == ["1", "0", "0", "1", "1", "1", "1", "1"]
    assert right == ["+0.50", "-0.50", "-0.50", "+0.50", "0", "0", "0", "0"]


# ---- tables


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (None, "number", "–"), (float("nan"), "percent", "–"), (0.5, "percent", "50%"), (0.031, "percent", "3.1%"),
        (0.0, "percent", "0%"), (1234567, "count", "1,234,567"), (2.0, "number", "2.000"), (6.1e6, "big", "6.10e+06"),
        ([0.5, None], "percents", "50% / –"), ("primer", "text", "primer"), (True, "number", "True"),
    ],
)  # fmt: skip
def test_numbers_as_text(value, kind, text):
    assert tables.number(value, kind) == text


def test_long_answers_are_cut_and_control_characters_visible():
    assert tables.clean("a" * 1000) == "a" * tables.MAX_TEXT + "…"
    assert tables.clean("a\x07b\r\nc") == "a�b\nc"


def test_answers_stand_side_by_side_in_order():
    samples = [
        {"stage": "sft", "question": "q", "answer": "s", "reference": "r"},
        {"stage": "base", "question": "q", "answer": "b", "reference": "r"},
        {"prompt": "p", "text": "t"},
    ]
    assert tables.answers_table(samples).rows == [("q", "b", "s", "–", "r")]


@pytest.mark.parametrize(("decay", "panels"), [(0.0, 2), (0.2, 3)])
def test_weight_decay_is_drawn_where_there_is_any(decay, panels):
    records = [
        {"stage": "pretrain", "step": i, "loss": 1.0, "lr": 1.0, "momentum": 0.9, "weight_decay": decay}
        for i in (1, 2, 3)
    ]
    assert len(plots.schedule_plot(records, "pretrain").axes) == panels
