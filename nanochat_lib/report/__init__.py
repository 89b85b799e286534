"""What a run did, from its folder: report.json for programs, report.md and report.html for people.

Everything is read from the files a run leaves (config.json, stages/*.json, metrics.jsonl), so a report can be made of a
run that is half done, or that ran elsewhere. What has not run is said to be "not evaluated".
"""

from __future__ import annotations

import json
import math
from pathlib import Path

from nanochat_lib.errors import UserError
from nanochat_lib.preflight import outcome
from nanochat_lib.report import certificate, money
from nanochat_lib.storage import atomic_write_json, atomic_write_text, read_json

STAGES = ("tokenizer", "pretrain", "eval_base", "sft", "rl", "eval_chat")
MACHINE_NOISE = ("memory_free_bytes", "disk_free_bytes")  # of the moment, not of the machine


def read_metrics(path: str | Path) -> tuple[list[dict], list[str]]:
    """(records, problems) of a metrics.jsonl. Lines that are not a record are counted and named, never fatal."""
    path = Path(path)
    records, broken = [], []
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return [], [f"{path.name} is missing"]
    for number, line in enumerate(text.splitlines(), 1):
        try:
            record = json.loads(line)
        except ValueError:
            record = None
        if isinstance(record, dict) and isinstance(record.get("stage"), str):
            records.append(record)
        else:
            broken.append(number)
    if not broken:
        return records, []
    shown = ", ".join(map(str, broken[:5])) + (", …" if len(broken) > 5 else "")
    lines = "1 line is" if len(broken) == 1 else f"{len(broken)} lines are"
    return records, [f"{path.name}: {lines} not a record and left out (line {shown})"]


def build_report(run_dir: str | Path, machine: dict | None = None) -> dict:
    """The content of report.json for the run in `run_dir`.

    `preset`, `seed`, `machine`, `stages` (each with `seconds` and its figures, null when it has not finished),
    `total_seconds` and `cost_usd` over all stages (each has its own `cost_usd` too; null on an own machine and where no
    price is known), `restarts` (money.restarts; null when there were none), `prediction` (preflight/outcome.py: what
    was `predicted` beside the `actual`, null when nothing was), `mine` (which exercise functions of the course were the
    learner's, null when none was asked for), `certificate` (report/certificate.py: null where nothing of the course was
    done), `samples`, `missing` (stages without a result) and `problems` (files or
    lines that could not be read). `machine` defaults to this one.
    Raises UserError when the folder holds no run.
    """
    folder = Path(run_dir)
    if not (folder / "config.json").exists():
        raise UserError(
            f"{folder} holds no run (config.json is missing); start one with nanochat run --run-dir {folder}"
        )
    config = read_json(folder / "config.json")
    config = config if isinstance(config, dict) else {}
    problems: list[str] = []
    machine = dict(machine or _machine(folder, config))
    stages: dict[str, dict | None] = {}
    costs: dict[str, float | None] = {}
    rates: dict[str, float | None] = {}  # USD an hour
    total, samples = 0.0, []
    for name in stages_of(config):
        record = _stage_record(folder / "stages" / f"{name}.json", problems)
        stages[name] = None
        if not record:
            continue
        total += record["seconds"]
        costs[name] = money.cost(record, machine.get("usd_hour"))
        rates[name] = costs[name] and costs[name] / (record["seconds"] or 1.0) * 3600
        if not record.get("finished"):
            problems.append(f"{name} was stopped after {record['seconds']:.0f} s and has no result yet")
            continue
        figures = _finite(record["figures"], name, problems)
        samples += [s for s in figures.pop("samples", None) or [] if isinstance(s, dict)]
        stages[name] = {"seconds": record["seconds"], "cost_usd": costs[name], **figures}
    records, found = read_metrics(folder / "metrics.jsonl")
    problems += found
    mine = _mine(folder, problems)
    return {
        "preset": config.get("preset"),
        "seed": config.get("seed"),
        "machine": {name: value for name, value in machine.items() if name not in MACHINE_NOISE},
        "stages": stages,
        "total_seconds": total,
        "cost_usd": money.total(list(costs.values())),
        "restarts": money.restarts(records, rates),
        "prediction": outcome.compare(folder, records),
        "mine": mine,
        "certificate": certificate.of_run(folder, stages, mine, problems),
        "samples": samples,
        "missing": [name for name, stage in stages.items() if stage is None],
        "problems": problems,
    }


def stages_of(config: dict) -> tuple[str, ...]:
    """The stages of a run with this config.json: STAGES, and `mid` before `sft` where the run has it."""
    mid = config.get("mid") if isinstance(config.get("mid"), dict) else {}
    if mid.get("mixture", "none") == "none":
        return STAGES
    at = STAGES.index("sft")
    return (*STAGES[:at], "mid", *STAGES[at:])


def write_report(run_dir: str | Path, machine: dict | None = None) -> dict:
    """Writes report.json, report.md and report.html into the run's folder; returns the content of report.json."""
    from nanochat_lib.report.page import to_html, to_markdown

    folder = Path(run_dir)
    report = build_report(folder, machine)
    records, _ = read_metrics(folder / "metrics.jsonl")
    atomic_write_json(folder / "report.json", report)
    atomic_write_text(folder / "report.md", to_markdown(report))
    atomic_write_text(folder / "report.html", to_html(report, records))
    return report


def _stage_record(path: Path, problems: list[str]) -> dict | None:
    """A stage's record, or None when there is none or it cannot be read (then `problems` says so)."""
    if not path.exists():
        return None
    try:
        record = read_json(path)
    except UserError as error:
        problems.append(f"stage record left out: {path.name}: {str(error).removeprefix(f'{path} ')}")
        return None
    good = isinstance(record, dict) and isinstance(record.get("figures"), dict)
    if not good or not isinstance(record.get("seconds"), (int, float)) or not math.isfinite(record["seconds"]):
        problems.append(f"stage record left out: {path.name} has no seconds and figures")
        return None
    return record


def _mine(folder: Path, problems: list[str]) -> dict | None:
    """What the run used of the learner's functions (mine.json), or None."""
    path = folder / "mine.json"
    if not path.exists():
        return None
    try:
        record = read_json(path)
        used, refused = list(record["used"]), dict(record["refused"])
        return {
            "used": used,
            "refused": refused,
            "functions": int(record["functions"]),
            "share": float(record["share"]),
        }
    except (UserError, KeyError, TypeError, ValueError):
        problems.append(f"{path.name} cannot be read, so the share of your own functions is left out")
        return None


def _finite(value: object, where: str, problems: list[str]) -> object:
    """`value` with numbers that are not finite replaced by None, each one named in `problems`."""
    if isinstance(value, dict):
        return {str(k): _finite(v, f"{where}.{k}", problems) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(v, f"{where}[{i}]", problems) for i, v in enumerate(value)]
    if isinstance(value, float) and not math.isfinite(value):
        problems.append(f"{where} is {value}")
        return None
    return value


def _machine(folder: Path, config: dict) -> dict:
    """Where the run ran and its price: its last report's machine when no stage has run since, else this one."""
    from nanochat_lib.presets import OpsConfig
    from nanochat_lib.price import price

    found, saved = _where(folder), config.get("ops") or {}
    ops = OpsConfig(usd_per_hour=saved.get("usd_per_hour", -1.0), spot=saved.get("spot", False))
    usd, source = price(ops, found.get("device_kind") or "cpu", found.get("devices") or 1)
    return found | {"usd_hour": usd, "price": source}


def _where(folder: Path) -> dict:
    from nanochat_lib.hardware import machine

    earlier = folder / "report.json"
    records = list((folder / "stages").glob("*.json"))
    if earlier.exists() and all(r.stat().st_mtime <= earlier.stat().st_mtime for r in records):
        try:
            saved = read_json(earlier)
        except UserError:
            saved = None
        if isinstance(saved, dict) and isinstance(saved.get("machine"), dict):
            return saved["machine"]
    return machine(folder).to_dict()
