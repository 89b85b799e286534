"""Predicted and actual: what was expected of a run before it began, kept in its folder, beside what came of it.

RUN/preflight.json is written at the start of pretraining, from formulas for the devices that are really there, unless
`nanochat preflight --run-dir RUN --save` has put a prediction for the same settings there before.
"""

from __future__ import annotations

import statistics
from dataclasses import asdict, replace
from pathlib import Path

from nanochat_lib.doctor import estimate_bytes
from nanochat_lib.errors import UserError
from nanochat_lib.hardware import GIB
from nanochat_lib.presets import RunConfig, Target
from nanochat_lib.price import price
from nanochat_lib.storage import atomic_write_json, read_json

FILE = "preflight.json"
PARTS = ("model", "compute", "pretrain")  # what a prediction depends on


def prediction(config: RunConfig, report: dict) -> dict:
    """The figures of a pre-flight report that a run can be held against; plain data.

    Time is the compiler's estimate of a step where there is one, else the roofline, which no program beats. A CPU gets
    the rule of thumb for its memory and nothing else.
    """
    found = {"settings": settings(config), "devices": report["devices"], "chip": report["chip"]}
    if config.target.kind == "cpu":
        return found | {"source": "rule of thumb", "memory_bytes": estimate_bytes(config)}
    seconds = report.get("profile", {}).get("seconds")
    source = "the compiler's cycles" if seconds else "roofline, at best"
    seconds = seconds or report["bound"]["step_seconds"]
    hours = seconds * report["steps"] / 3600
    usd_hour, _ = price(config.ops, device_name(report["chip"]), report["devices"])
    return found | {
        "source": source, "tokens_per_s": report["batch_tokens"] / seconds, "hours": hours,
        "usd": usd_hour and usd_hour * hours, "memory_bytes": report["needed"],
    }  # fmt: skip


def device_name(chip: str) -> str:
    """A name that `hardware.find_chip` reads as the chip of the table."""
    from nanochat_lib.hardware import CHIPS

    return next((c.match[0] for c in CHIPS if c.name == chip), chip)


def settings(config: RunConfig) -> dict:
    return {part: asdict(getattr(config, part)) for part in PARTS} | {"vocab_size": config.tokenizer.vocab_size}


def save(folder: str | Path, config: RunConfig, report: dict) -> None:
    """Keeps the prediction in a run's folder, made when it is new."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write_json(folder / FILE, prediction(config, report))


def load(folder: str | Path) -> dict | None:
    """The prediction in a run's folder; None where there is none that can be read."""
    path = Path(folder) / FILE
    try:
        found = read_json(path) if path.exists() else None
    except UserError:
        return None
    if not isinstance(found, dict) or not {"settings", "devices", "chip", "source"} <= found.keys():
        return None
    figures = [found[name] for name, *_ in ROWS if found.get(name) is not None]
    return found if all(isinstance(x, (int, float)) and x > 0 for x in figures) else None


def predict_here(folder: str | Path, config: RunConfig) -> None:
    """Predicts the run for the devices that JAX has here and keeps it, unless the folder has a prediction for it.

    Process 0 does so for all. Nothing is predicted for chips that are not in the table.
    """
    import jax

    from nanochat_lib import distributed
    from nanochat_lib.hardware import find_chip
    from nanochat_lib.preflight import base_report

    if not distributed.first() or (load(folder) or {}).get("settings") == settings(config):
        return
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        save(folder, replace(config, target=Target()), {"devices": 1, "chip": "cpu"})
    elif chip := find_chip(device.device_kind):
        here = replace(config, target=Target(chip.kind, chip.name, jax.device_count()))
        save(folder, here, base_report(here))


def actual(folder: str | Path, expected: dict, records: list[dict]) -> dict:
    """The same figures as they came out, so far or in the end; those not known yet are left out.

    `records` are the run's metrics. Hours and cost are of the training steps, evaluations and saves apart; of a run
    that is not finished they are what all its steps will take at its speed.
    """
    steps = [r for r in records if r.get("stage") == "pretrain" and "loss" in r]
    stage = read_record(Path(folder))
    figures = stage.get("figures", {})
    finished = bool(stage.get("finished"))
    rates = [r["tokens_per_s"] for r in steps if r.get("tokens_per_s")]
    found: dict = {"finished": finished}
    rate = figures.get("tokens_per_s") or (statistics.median(rates) if rates else None)
    if steps:
        found["step"] = steps[-1]["step"]
    if rate:
        found["tokens_per_s"] = rate
    if finished and figures.get("train_seconds"):
        found["hours"] = figures["train_seconds"] / 3600
    elif rate and expected.get("hours"):
        found["hours"] = expected["tokens_per_s"] * expected["hours"] / rate
    usd_hour = stage["usd"] / stage["seconds"] * 3600 if stage.get("usd") and stage.get("seconds") else None
    if usd_hour and "hours" in found:
        found["usd"] = usd_hour * found["hours"]
    peak = figures.get("peak_memory_gb") if expected.get("chip") == "cpu" else figures.get("device_peak_gb")
    if peak:
        found["memory_bytes"] = peak * 1e9
    return found


def compare(folder: str | Path, records: list[dict], otherwise: dict | None = None) -> dict | None:
    """{"predicted", "actual"} of the run in `folder` with these metrics; None without a prediction or a first step.

    `otherwise` is the prediction to use where the folder keeps none.
    """
    expected = load(folder) or otherwise
    if not expected:
        return None
    found = actual(folder, expected, records)
    return {"predicted": expected, "actual": found} if "step" in found else None


def read_record(folder: Path) -> dict:
    path = folder / "stages" / "pretrain.json"
    try:
        found = read_json(path) if path.exists() else {}
    except UserError:
        return {}
    return found if isinstance(found, dict) and isinstance(found.get("figures"), dict) else {}


ROWS = (  # figure, label, how it is written
    ("tokens_per_s", "tokens per second", lambda x: f"{x:,.0f}"),
    ("hours", "hours in training steps", lambda x: f"{x:.2f}" if x >= 1 else f"{x:.3f}"),
    ("usd", "cost of these hours", lambda x: f"${x:,.2f}"),
    ("memory_bytes", "peak memory of a device", lambda x: f"{x / GIB:.2f} GiB"),
)


def rows(expected: dict, found: dict) -> list[tuple[str, str, str, str]]:
    """(what, predicted, actual, actual ÷ predicted) of every figure that was predicted, as text."""
    table = []
    for name, label, text in ROWS:
        if expected.get(name) and (name in found or name != "usd"):
            ratio = f"{found[name] / expected[name]:.2f}" if name in found else "–"
            if name == "memory_bytes" and expected.get("chip") == "cpu":
                label = "peak memory of the process"
            table.append((label, text(expected[name]), text(found[name]) if name in found else "–", ratio))
    return table


def title(predicted: dict, actual: dict) -> str:
    """What the comparison is of, in a line."""
    made = f"predicted for {predicted['devices']} × {predicted['chip']} ({predicted['source']})"
    return made if actual.get("finished") else f"{made}; the run stands at step {actual['step']:,}"
