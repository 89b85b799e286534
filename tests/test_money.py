"""Money: the hourly price, what each stage and each restart cost, and what was predicted beside what happened."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from test_report import MACHINE, make_run
from test_trainer import Stop, fresh, stage

from nanochat_lib import cli, pipeline, preflight, presets, trainer
from nanochat_lib.errors import UserError
from nanochat_lib.hardware import CHIPS
from nanochat_lib.metrics import MetricsLog
from nanochat_lib.preflight import outcome, page
from nanochat_lib.presets import OpsConfig, preset
from nanochat_lib.price import price, price_here
from nanochat_lib.report import build_report, money, tables, write_report
from nanochat_lib.storage import read_json
from nanochat_lib.trainer import train

# ---- the price of a machine


@pytest.mark.parametrize(
    ("ops", "kind", "devices", "usd", "source"),
    [
        ({}, "NVIDIA H100 80GB HBM3", 8, 24.0, "on demand"),
        ({}, "TPU v6 lite", 8, 21.60, "on demand"),
        ({"spot": True}, "TPU v6 lite", 64, 64 * 0.540137, "spot"),
        ({"spot": True}, "NVIDIA H100 80GB HBM3", 8, None, "price unknown"),  # never the other price instead
        ({}, "TPU v5 lite", 8, None, "price unknown"),
        ({}, "TPU v5", 8, None, "price unknown"),
        ({}, "an unheard-of chip", 8, None, "price unknown"),
        ({"usd_per_hour": 9.6}, "TPU v5 lite", 8, 9.6, "ops.usd_per_hour"),  # of the whole machine
        ({"usd_per_hour": 33.61, "spot": True}, "NVIDIA H100 80GB HBM3", 8, 33.61, "ops.usd_per_hour"),
        ({"usd_per_hour": 0.0}, "NVIDIA H100 80GB HBM3", 8, None, "own machine"),
        ({}, "cpu", 1, None, "own machine"),
        ({"usd_per_hour": 0.2}, "cpu", 1, 0.2, "ops.usd_per_hour"),  # a rented virtual machine without accelerator
    ],
)
def test_the_price_of_the_whole_machine(ops, kind, devices, usd, source):
    found, where = price(OpsConfig(**ops), kind, devices)
    assert found == (usd if usd is None else pytest.approx(usd)) and where == source


def test_the_price_here_is_of_the_devices_that_are_here():
    assert price_here(OpsConfig()) is None and price_here(OpsConfig(usd_per_hour=3.5)) == 3.5


def test_a_preset_of_unknown_price_says_what_to_set():
    config = preset("tpu-v5e-8-d20")
    assert "price unknown, set ops.usd_per_hour" in page.page(preflight.preflight(config, compile_it=False))
    priced = presets.override(config, {"ops.usd_per_hour": 10.0})
    report = preflight.preflight(priced, compile_it=False)
    assert report["bound"]["usd_given"] == pytest.approx(10.0 * report["bound"]["hours"])
    assert f"${report['bound']['usd_given']:,.0f}" in page.page(report) and "price unknown" not in page.page(report)


# ---- what a stage costs


def test_the_progress_and_the_metrics_carry_the_cost(tmp_path, capsys, monkeypatch):
    options = {"usd_hour": 3600.0 * 100, "save_every": 2}  # 100 dollars a second
    train(stage(tmp_path / "a", 2, **options), fresh())
    first = [r for r in MetricsLog(tmp_path / "a" / "metrics.jsonl").read() if "loss" in r]
    assert first[0]["cost_usd"] > 100 * first[0]["seconds"] * 0.99 and first[1]["cost_usd"] > first[0]["cost_usd"]
    assert f"cost ${first[1]['cost_usd']:,.2f}" in capsys.readouterr().err
    real = trainer.resume
    with monkeypatch.context() as patched:  # as if the steps before had taken an hour
        patched.setattr(trainer, "resume", lambda *a: (real(*a)[0], real(*a)[1] | {"seconds": 3600.0}))
        train(stage(tmp_path / "a", 4, **options), fresh())
    later = [r for r in MetricsLog(tmp_path / "a" / "metrics.jsonl").read() if "loss" in r][2]
    assert later["cost_usd"] > 360_000  # what was paid before the restart is in it
    train(stage(tmp_path / "b", 1), fresh())
    assert "cost_usd" not in MetricsLog(tmp_path / "b" / "metrics.jsonl").read()[-1]


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("\n\n".join(f"This is document number {i} about {i * 7} things and words." for i in range(200)))
    return path


def test_each_start_of_a_stage_is_paid_at_its_own_price(tmp_path, text, monkeypatch):
    from nanochat_lib.tokenizer import Tokenizer

    small = {"data.corpus": str(text), "tokenizer.vocab_size": 280}
    config = presets.override(preset("cpu-smoke"), small | {"ops.usd_per_hour": 3600.0})  # a dollar a second
    run = pipeline.open_run(tmp_path / "r", config)
    with monkeypatch.context() as patched:
        patched.setattr(Tokenizer, "save", lambda self, folder: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run.tokenizer()
    first = read_json(tmp_path / "r" / "stages" / "tokenizer.json")
    assert first["usd"] == pytest.approx(first["seconds"]) and not first["finished"]
    run.close()
    dearer = presets.override(config, {"ops.usd_per_hour": 36000.0})
    run = pipeline.open_run(tmp_path / "r", dearer)
    run.tokenizer()
    second = read_json(tmp_path / "r" / "stages" / "tokenizer.json")
    assert second["usd"] == pytest.approx(first["usd"] + 10 * (second["seconds"] - first["seconds"]))
    run.close()
    own = presets.override(config, {"ops.usd_per_hour": 0.0})
    pipeline.open_run(tmp_path / "r", own).tokenizer()  # reused: nothing new is paid
    report = build_report(tmp_path / "r")
    assert report["cost_usd"] == report["stages"]["tokenizer"]["cost_usd"] == pytest.approx(second["usd"], abs=1e-4)


def priced_run(folder, stages, records=()):
    """A run whose stages took 10, 11, … seconds, `stages`: name -> dollars paid (None: unknown)."""
    run = make_run(folder, tuple(stages), list(records))
    for name, usd in stages.items():
        path = run / "stages" / f"{name}.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | {"usd": usd}))
    return run


def test_the_report_gives_the_price_of_each_stage(tmp_path):
    run = priced_run(tmp_path / "run", {"tokenizer": None, "pretrain": 40.5, "sft": 2.25})
    report = build_report(run, MACHINE)
    assert {name: s and s["cost_usd"] for name, s in report["stages"].items()} == {
        "tokenizer": None, "pretrain": 40.5, "eval_base": None, "sft": 2.25, "rl": None, "eval_chat": None,
    }  # fmt: skip
    assert report["cost_usd"] == 42.75
    cells = {row[0]: row[2] for row in tables.time_table(report).rows}
    assert cells["Base model training"] == "$40.50" and cells["Chat SFT"] == "$2.25" and cells["total"] == "$42.75"
    assert cells["Tokenizer training"] == "own machine" and cells["Chat RL"] == ""


def test_a_rented_machine_without_a_known_price_is_no_own_one(tmp_path):
    run = make_run(tmp_path / "run", ("tokenizer",), [])
    (run / "report.json").write_text(json.dumps({"machine": MACHINE | {"device_kind": "TPU v5 lite", "devices": 8}}))
    report = write_report(run)
    assert report["cost_usd"] is None and report["machine"]["price"] == "price unknown"
    assert tables.time_table(report).rows[0][2] == "price unknown"
    assert "unknown, set ops.usd_per_hour" in (run / "report.html").read_text()
    config = json.loads((run / "config.json").read_text()) | {"ops": {"usd_per_hour": 36.0, "spot": False}}
    (run / "config.json").write_text(json.dumps(config))
    report = write_report(run)  # set afterwards: the time that was not priced is priced now
    assert report["cost_usd"] == 0.1 and "$36.00 (ops.usd\\_per\\_hour)" in (run / "report.md").read_text()


# ---- what restarts cost

HOUR = 1_700_000_000.0
STEP = {"stage": "pretrain", "loss": 2.0, "tokens": 1000, "tokens_per_s": 500.0}
START = {"stage": "pretrain", "event": "start", "processes": 1, "devices": 8}
RESTARTED = [
    START | {"step": 0, "time": HOUR},
    STEP | {"step": 100, "seconds": 900.0, "time": HOUR + 1000},
    {"stage": "pretrain", "event": "stop", "step": 100, "reached": 140, "again_seconds": 360.0, "time": HOUR + 1400},
    START | {"step": 100, "time": HOUR + 5000},  # an hour after the last sign of life
    STEP | {"step": 200, "seconds": 1800.0, "time": HOUR + 6000},
    START | {"step": 200, "time": HOUR + 6030},  # stopped with a save
    STEP | {"step": 300, "seconds": 2700.0, "time": HOUR + 7000},
    START | {"stage": "sft", "step": 0, "time": HOUR + 9000},  # another stage: no restart
    STEP | {"stage": "sft", "step": 10, "seconds": 9.0, "time": HOUR + 9100},
]


def test_what_restarts_cost():
    found = money.restarts(RESTARTED, {"pretrain": 36.0, "sft": None})
    assert found == {
        "count": 2, "steps_twice": 40, "again_seconds": 360.0, "waiting_seconds": 3630.0, "lost_seconds": 3990.0,
        "lost_usd": 3.6, "waiting_usd": 36.3,
    }  # fmt: skip
    assert money.restarts(RESTARTED, {})["lost_usd"] is None
    once = [RESTARTED[0], RESTARTED[1], RESTARTED[7], RESTARTED[8]]
    assert money.restarts(once, {"pretrain": 36.0}) is None and money.restarts([], {}) is None


def test_a_restart_notes_what_is_computed_twice(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    with pytest.raises(Stop):
        train(stage(tmp_path, 12, stop_at=6), fresh())  # two steps after the save of step 4
    before = [r for r in log.read("pretrain") if "loss" in r]
    train(stage(tmp_path, 12), fresh())
    stops = [r for r in log.read() if r.get("event") == "stop"]
    assert len(stops) == 1 and (stops[0]["step"], stops[0]["reached"]) == (4, 6)
    assert stops[0]["again_seconds"] == pytest.approx(before[5]["seconds"] - before[3]["seconds"])
    assert stops[0]["time"] == before[5]["time"] > 1e9
    train(stage(tmp_path, 12), fresh())
    assert [r for r in log.read() if r.get("event") == "stop"] == stops  # nothing more was lost


def test_starts_and_stops_survive_a_run_that_goes_back_further(tmp_path):
    log = MetricsLog(tmp_path / "metrics.jsonl")
    log.path.write_text("".join(json.dumps(r) + "\n" for r in RESTARTED))
    log.rewind("pretrain", -1)
    assert [r["step"] for r in log.read("pretrain") if r.get("event") == "start"] == [0, 100, 200]
    assert [r["reached"] for r in log.read("pretrain") if r.get("event") == "stop"] == [140, 300]
    assert log.read("sft") == RESTARTED[-2:] and not [r for r in log.read("pretrain") if "loss" in r]
    assert log.read("pretrain")[-1]["again_seconds"] == 2700.0


def test_the_report_shows_restarts_only_where_there_were_any(tmp_path):
    run = priced_run(tmp_path / "run", {"pretrain": 0.1}, RESTARTED)  # 10 seconds: 36 dollars an hour
    report = write_report(run, MACHINE)
    assert report["restarts"]["count"] == 2 and report["restarts"]["lost_usd"] == 3.6
    for name in ("report.md", "report.html"):
        shown = (run / name).read_text()
        for words in ("lost to 2 restarts", "40 steps computed twice", "1:00:30", "36.30 if the machine stayed on"):
            assert words in shown, (name, words)
    calm = make_run(tmp_path / "calm", ("pretrain",))
    assert write_report(calm, MACHINE)["restarts"] is None
    assert "estarts" not in (calm / "report.md").read_text() + (calm / "report.html").read_text()


# ---- predicted and actual


def h100_run(folder, finished=True, **changes):
    """A run of gpu-8-d24 with its prediction, half as fast as the roofline."""
    config = presets.override(preset("gpu-8-d24"), changes)
    expected = outcome.prediction(config, preflight.base_report(config))
    records = [STEP | {"step": 100, "seconds": 60.0, "tokens_per_s": expected["tokens_per_s"] / 2}]
    run = make_run(folder, ("pretrain",), records)
    (run / "config.json").write_text(json.dumps(presets.to_dict(config)))
    outcome.save(run, config, preflight.base_report(config))
    hours = 2.5 * expected["hours"]
    figures = {"tokens_per_s": expected["tokens_per_s"] / 2, "train_seconds": hours * 3600, "device_peak_gb": 64.0}
    record = {"name": "pretrain", "key": "k", "seconds": hours * 4000, "usd": hours * 4000 / 150, "finished": True}
    record |= {"figures": figures} if finished else {"figures": {}, "finished": False}
    (run / "stages" / "pretrain.json").write_text(json.dumps(record))
    return run, config, expected


def test_predicted_stands_beside_actual(tmp_path):
    run, config, expected = h100_run(tmp_path / "run")
    chip = next(c for c in CHIPS if c.name == "h100")
    assert expected["usd"] == pytest.approx(8 * chip.usd_hour * expected["hours"]) and expected["chip"] == "h100"
    assert expected["tokens_per_s"] * expected["hours"] * 3600 == pytest.approx(5568 * 2**20)
    report = write_report(run, MACHINE)
    found = report["prediction"]["actual"]
    assert found["finished"] and found["hours"] == pytest.approx(2.5 * expected["hours"])
    assert found["usd"] == pytest.approx(24.0 * found["hours"]) and found["memory_bytes"] == 64e9
    rows = {row[0]: row[1:] for row in tables.prediction_table(report["prediction"]).rows}
    assert list(rows) == [label for _, label, _ in outcome.ROWS]
    assert [row[2] for row in rows.values()] == ["0.50", "2.50", "2.50", f"{64e9 / expected['memory_bytes']:.2f}"]
    assert rows["cost of these hours"][:2] == (f"${expected['usd']:,.2f}", f"${2.5 * expected['usd']:,.2f}")
    for name in ("report.md", "report.html"):
        shown = (run / name).read_text()
        assert "Predicted and actual" in shown and "predicted for 8 × h100 (roofline, at best)." in shown


def test_a_run_that_is_half_done_is_measured_by_its_speed(tmp_path):
    run, config, expected = h100_run(tmp_path / "run", finished=False)
    found = build_report(run, MACHINE)["prediction"]["actual"]
    assert found == {
        "finished": False, "step": 100, "tokens_per_s": expected["tokens_per_s"] / 2,
        "hours": pytest.approx(2 * expected["hours"]), "usd": pytest.approx(48 * expected["hours"]),
    }  # fmt: skip
    assert outcome.title(expected, found).endswith("; the run stands at step 100")
    assert outcome.rows(expected, found)[-1][2:] == ("–", "–")  # memory is known at the end


def test_preflight_of_a_runs_folder_shows_the_same_table(tmp_path, capsys):
    run, config, expected = h100_run(tmp_path / "run")
    assert cli.main(["preflight", "--run-dir", str(run)]) == 0
    shown = capsys.readouterr().out
    for row in outcome.rows(expected, build_report(run, MACHINE)["prediction"]["actual"]):
        assert any(all(cell in line for cell in row) for line in shown.splitlines()), row
    assert cli.main(["preflight", "--run-dir", str(run), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["outcome"]["predicted"] == expected


def test_a_saved_prediction_is_kept_when_the_run_starts(tmp_path, capsys):
    new = tmp_path / "new"
    assert cli.main(["preflight", "--preset", "gpu-8-d24", "--save"]) == 2
    assert "--run-dir" in capsys.readouterr().err
    assert cli.main(["preflight", "--preset", "gpu-8-d24", "--run-dir", str(new), "--save"]) == 0
    assert "actual" not in capsys.readouterr().out  # nothing has begun
    saved = (new / outcome.FILE).read_bytes()
    outcome.predict_here(new, preset("gpu-8-d24"))
    assert (new / outcome.FILE).read_bytes() == saved
    outcome.predict_here(new, presets.override(preset("gpu-8-d24"), {"pretrain.steps": 10}))  # another run
    assert outcome.load(new)["settings"]["pretrain"]["steps"] == 10
    whole = json.loads(saved)
    for damaged in ("{", "[]", "{}", json.dumps(whole | {"hours": "x"}), json.dumps(whole | {"tokens_per_s": 0})):
        (new / outcome.FILE).write_text(damaged)
        assert outcome.load(new) is None


def test_the_compilers_cycles_count_for_more_than_the_roofline():
    config = preset("tpu-v6e-8-d24")
    report = preflight.base_report(config)
    slower = 3 * report["bound"]["step_seconds"]
    plain, cycles = (outcome.prediction(config, report | more) for more in ({}, {"profile": {"seconds": slower}}))
    assert plain["source"] == "roofline, at best" and cycles["source"] == "the compiler's cycles"
    assert cycles["hours"] == pytest.approx(3 * plain["hours"]) and cycles["usd"] == pytest.approx(3 * plain["usd"])
    spot = replace(config, ops=OpsConfig(spot=True))
    assert outcome.prediction(spot, report)["usd"] == pytest.approx(plain["usd"] * 0.540137 / 2.70)


def test_of_a_cpu_only_the_memory_is_predicted(tmp_path):
    config = preset("cpu")
    run = make_run(tmp_path / "run", ("pretrain",))
    outcome.predict_here(run, config)
    record = json.loads((run / "stages" / "pretrain.json").read_text())
    record["figures"]["peak_memory_gb"] = 1.5
    (run / "stages" / "pretrain.json").write_text(json.dumps(record))
    report = build_report(run, MACHINE)
    assert outcome.rows(*report["prediction"].values()) == [
        ("peak memory of the process", "1.63 GiB", "1.40 GiB", "0.86")
    ]
    assert "rule of thumb" in outcome.title(**report["prediction"])


def test_a_run_without_a_prediction_says_nothing(tmp_path):
    run = make_run(tmp_path / "run", ("pretrain",))
    assert write_report(run, MACHINE)["prediction"] is None
    assert "Predicted" not in (run / "report.md").read_text()


def test_a_wrong_setting_is_refused():
    with pytest.raises(UserError, match=r"ops.guard_steps is -2, must be at least 0 or -1"):
        presets.override(preset("cpu"), {"ops.guard_steps": -2})
