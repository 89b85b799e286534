"""Many files at once: a few workers, one line of progress, a list of what failed."""

from __future__ import annotations

import sys
import time
from collections import deque
from queue import Empty, SimpleQueue
from threading import Event, Thread

from nanochat_lib.hub import ledger
from nanochat_lib.hub.fetch import Remote, Stopped, fetch
from nanochat_lib.hub.patience import GaveUp
from nanochat_lib.progress import Progress, format_seconds

RECENT = 20.0  # seconds over which the rate is measured


def format_bytes(count: float) -> str:
    """88_000_000 -> '88.0 MB', in powers of 1000 as disks and lines are sold."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 999.95:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} TB"


class ByteProgress(Progress):
    """Progress in bytes: what is there, files, rate over the last seconds, time left."""

    def __init__(self, total: int, files: int, start: int) -> None:
        super().__init__(total, "download", unit="B", start=start)
        self.files, self.finished = files, 0
        self.recent = deque([(self.began, start)])
        if self.bar is not None:
            self.bar.unit_scale = True

    def rate(self) -> float:
        """Bytes a second lately."""
        now = time.monotonic()
        if now - self.recent[-1][0] >= 0.5:
            self.recent.append((now, self.done))
        while len(self.recent) > 2 and now - self.recent[1][0] > RECENT:
            self.recent.popleft()
        then, had = self.recent[0]
        return max(self.done - had, 0) / (now - then) if now - then > 0.05 else 0.0

    def line(self) -> str:
        rate, seconds = self.rate(), time.monotonic() - self.began
        total = f" of {format_bytes(self.total)}" if self.total >= self.done else ""  # else the server did not say
        parts = [f"{self.desc}: {format_bytes(self.done)}{total}"]
        parts.append(f"{self.finished:,} of {self.files:,} files")
        if self.finished == self.files:
            parts.append(f"took {format_seconds(seconds)}")
        else:
            left = format_seconds((self.total - self.done) / rate) if rate and total else "unknown"
            parts += [f"{format_bytes(rate)}/s", f"{left} left"]
        return " · ".join(parts)

    def _show(self) -> None:
        if self.bar is not None:
            self.fields = {"files": f"{self.finished}/{self.files}"}
        super()._show()

    def say(self, text: str) -> None:
        """A line of its own, above the bar where there is one."""
        if self.bar is not None:
            self.bar.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)


def download(remotes: list[Remote], workers: int) -> dict[str, str]:
    """Fetches all `remotes`, `workers` at a time, in their order. Returns {label: why} of those that failed.

    Whatever happens, finished files stay and unfinished ones go on next time. UserError when the disk refuses, since no
    other file would come then either; KeyboardInterrupt stops the workers after at most one piece.
    """
    queue: SimpleQueue[Remote] = SimpleQueue()
    events: SimpleQueue[tuple] = SimpleQueue()
    stop = Event()
    for remote in remotes:
        queue.put(remote)

    def work() -> None:
        while not stop.is_set():
            try:
                remote = queue.get_nowait()
            except Empty:
                return
            say = lambda text, label=remote.label: events.put(("say", f"{label}: {text}"))  # noqa: E731
            try:
                fetch(remote, lambda n: events.put(("gained", n)), say, stop)
                events.put(("done", remote.label, ""))
            except Stopped:
                return
            except GaveUp as error:
                events.put(("done", remote.label, str(error)))
            except BaseException as error:  # a full disk, a mistake of ours: the main thread raises it
                events.put(("fatal", error))
                return

    threads = [Thread(target=work, daemon=True, name=f"download-{i}") for i in range(min(workers, len(remotes)))]
    started = sum(remote.here() for remote in remotes)
    failed: dict[str, str] = {}
    began = time.monotonic()
    with ByteProgress(sum(remote.size or 0 for remote in remotes), len(remotes), started) as progress:
        try:
            for thread in threads:
                thread.start()
            while any(thread.is_alive() for thread in threads) or not events.empty():
                try:
                    kind, *told = events.get(timeout=0.2)
                except Empty:
                    progress.update(0)
                    continue
                if kind == "gained":
                    progress.update(told[0])
                elif kind == "say":
                    progress.say(told[0])
                elif kind == "done":
                    progress.finished += not told[1]
                    failed |= {told[0]: told[1]} if told[1] else {}
                    progress.update(0)
                else:
                    raise told[0]
        finally:
            stop.set()
            for thread in threads:
                thread.join(timeout=1.0)  # one that waits for a server is left to end with the process
            ledger.note_rate(progress.done - started, time.monotonic() - began, workers)
    return failed
