"""What Python starts on the device, and when the device really works: read from JAX's own profile."""

from __future__ import annotations

import gzip
import json
import re
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Timeline:
    """One profiled run."""

    started: dict[str, int]  # compiled functions by name: how often Python started each
    busy: list[tuple[float, float]]  # ms after the first start: spans in which some operation ran, in order

    @property
    def dispatches(self) -> int:
        return sum(self.started.values())

    @property
    def length(self) -> float:
        """ms from the first start to the last operation's end."""
        return self.busy[-1][1] if self.busy else 0.0

    @property
    def idle(self) -> float:
        """The share of `length` in which no operation ran."""
        return 1 - sum(end - start for start, end in self.busy) / self.length if self.busy else 0.0


def record(run: Callable[[], object]) -> Timeline:
    """The timeline of `run()`. Call the functions once before, so that nothing is compiled in it."""
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # one event for each Python call would be the profile's largest part
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            jax.block_until_ready(run())
        (path,) = Path(folder).rglob("*.trace.json.gz")
        return read(json.loads(gzip.decompress(path.read_bytes()))["traceEvents"])


def read(events: Iterable[dict]) -> Timeline:
    """A timeline out of a profile's events (the trace viewer's form, times in µs)."""
    timed = sorted((e for e in events if e.get("ph") == "X"), key=lambda e: (e["ts"], -e["dur"]))
    started, begin, last = Counter(), None, {}
    spans: list[list[float]] = []
    for event in timed:
        start, end, thread = event["ts"], event["ts"] + event["dur"], (event["pid"], event["tid"])
        if called := re.fullmatch(r"PjitFunction\((.*)\)", event["name"]):
            begin = start if begin is None else begin
            if start >= last.get(thread, 0.0):  # a call is noted twice, the second inside the first
                started[called[1]] += 1
                last[thread] = end
        elif begin is not None and "hlo_op" in event.get("args", {}):  # not what was still running before
            if spans and start <= spans[-1][1]:
                spans[-1][1] = max(spans[-1][1], end)
            else:
                spans.append([start, end])
    return Timeline(dict(started), [((start - begin) / 1e3, (end - begin) / 1e3) for start, end in spans])
