"""What a run cost, and what its restarts cost it."""

from __future__ import annotations

import math


def number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def cost(record: dict, usd_hour: float | None) -> float | None:
    """USD of a stage's record: what was paid while it ran, else its time at `usd_hour`; None where neither is known."""
    if number(record.get("usd")):
        return round(record["usd"], 4)
    return round(usd_hour * record["seconds"] / 3600, 4) if usd_hour else None


def total(costs: list[float | None]) -> float | None:
    """The sum of what is known; None when nothing is."""
    known = [usd for usd in costs if usd is not None]
    return round(sum(known), 4) if known else None


def restarts(records: list[dict], rates: dict[str, float | None]) -> dict | None:
    """What the restarts of the training stages cost, from the metrics; None when there were none.

    `count`, `steps_twice` and `again_seconds` (computed a second time, at least: up to the last logged step),
    `waiting_seconds` (from a stop's last sign of life to the restart), `lost_seconds` (both), `lost_usd` (of the steps
    computed twice: who pays while a run waits depends on whether its machine was taken away) and `waiting_usd` (of the
    waiting, had the machine stayed on). `rates`: USD an hour of each stage.
    """
    found = {"count": 0, "steps_twice": 0, "again_seconds": 0.0, "waiting_seconds": 0.0}
    money = {"lost_usd": [], "waiting_usd": []}
    alive: dict[str, float] = {}  # stage -> time of its last sign of life
    started: set[str] = set()
    for r in records:
        stage, event = r["stage"], r.get("event")
        rate = rates.get(stage)
        if event == "stop":
            again = r["again_seconds"] if number(r.get("again_seconds")) else 0.0
            found["steps_twice"] += max(int(r.get("reached", 0)) - int(r.get("step", 0)), 0)
            found["again_seconds"] += again
            money["lost_usd"].append(rate and rate * again / 3600)
        if event == "start" and stage in started:
            waited = max(r["time"] - alive[stage], 0.0) if number(r.get("time")) and stage in alive else 0.0
            found["count"] += 1
            found["waiting_seconds"] += waited
            money["waiting_usd"].append(rate and rate * waited / 3600)
        if event == "start":
            started.add(stage)
        if number(r.get("time")):
            alive[stage] = r["time"]
    if not found["count"]:
        return None
    found["lost_seconds"] = found["again_seconds"] + found["waiting_seconds"]
    return found | {name: total(parts) for name, parts in money.items()}
