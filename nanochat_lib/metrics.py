"""A run's figures, a line each, and what a stage reports of them."""

from __future__ import annotations

import json
import math
import os
import time
from pathlib import Path
from typing import BinaryIO

import numpy as np

from nanochat_lib import distributed
from nanochat_lib.storage import atomic_write_text, clear_disk_errors


class MetricsLog:
    """`metrics.jsonl`: one object a line, appended by process 0; the file a run's curves are drawn from."""

    def __init__(self, path: Path) -> None:
        self.path = Path(path)

    def append(self, **values: object) -> None:
        if distributed.first():
            line = json.dumps({name: plain(value) for name, value in values.items()})
            with clear_disk_errors(self.path), open(self.path, "a+b") as out:
                if out.tell() and not self._whole(out):
                    line = "\n" + line
                out.write((line + "\n").encode())

    @staticmethod
    def _whole(file: BinaryIO) -> bool:
        """Whether the last line has its end: a kill may have cut it short."""
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"

    def start(self, stage: str, step: int, devices: int) -> None:
        """Notes that `stage` starts, or starts again, after `step`; `time` is in unix seconds."""
        self.append(
            stage=stage, event="start", step=step, time=time.time(), processes=distributed.count(), devices=devices
        )

    def read(self, stage: str | None = None) -> list[dict]:
        """All records (of one stage). A last line that a kill cut short is left out."""
        records = []
        if self.path.exists():
            for line in self.path.read_text(encoding="utf-8").splitlines():
                try:
                    records.append(json.loads(line))
                except json.JSONDecodeError:
                    continue
        return [r for r in records if stage is None or r.get("stage") == stage]

    def rewind(self, stage: str, step: int) -> None:
        """Forgets what `stage` logged after `step`, except its starts and stops: a resumed run logs it again.

        A record of event "stop" says what is lost with it: the last step, its time, the seconds that are spent twice.
        """
        if not distributed.first() or not self.path.exists():
            return
        old = lambda r: r.get("step", 0) <= step or r.get("event") in ("start", "stop")  # noqa: E731
        records = self.read()
        kept = [r for r in records if r.get("stage") != stage or old(r)]
        lost = [r for r in records if r.get("stage") == stage and not old(r) and "loss" in r]
        if lost:
            base = [r["seconds"] for r in kept if r.get("stage") == stage and "loss" in r and r.get("seconds")]
            last, again = lost[-1], lost[-1].get("seconds", 0.0) - max(base, default=0.0)
            stop = {"stage": stage, "event": "stop", "step": max(step, 0), "reached": last["step"]}
            kept.append(stop | {"again_seconds": again, "time": last.get("time")})
        atomic_write_text(self.path, "".join(json.dumps(r) + "\n" for r in kept))


def plain(value: object) -> object:
    """A JSON value: numpy scalars become Python's, non-finite numbers become null."""
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not math.isfinite(value) else value


def first_and_last(metrics: MetricsLog, stage: str, names: list[str]) -> dict:
    """Stage figures out of the metrics: first and last value of each evaluated name, and the training's own totals.

    The same in all processes, which call it together.
    """
    records = distributed.from_first(lambda: metrics.read(stage))
    figures: dict = {}
    for name in names:
        values = [r[name] for r in records if r.get("event") == "eval" and r.get(name) is not None]
        figures |= {f"{name}_first": values[0], f"{name}_last": values[-1]} if values else {}
    steps = [r for r in records if "loss" in r]
    if steps:
        rates = [r["tokens_per_s"] for r in steps if r["tokens_per_s"]]
        utilisation = [r["mfu"] for r in steps if r["mfu"]]
        figures |= {
            "tokens": steps[-1]["tokens"],
            "train_seconds": steps[-1]["seconds"],
            "loss_last": steps[-1]["loss"],
            "tokens_per_s": float(np.median(rates)) if rates else None,
            "mfu": float(np.median(utilisation)) if utilisation else None,
            "epochs": steps[-1]["epoch"],
        }
    return {name: None if isinstance(v, float) and math.isnan(v) else v for name, v in figures.items()}
