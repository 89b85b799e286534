"""Progress on long work: a bar in a terminal and in a notebook, a line now and then in a log.

A run that is driven from outside (papermill) also leaves its latest line in the file named by NANOCHAT_PROGRESS_FILE,
so that the driver can show what the notebook's kernel is doing.
"""

from __future__ import annotations

import os
import sys
import time
from html import escape

LINE_SECONDS = 5.0  # how often a log gets a line
NOTEBOOK_SECONDS = 1.0  # how often the notebook's bar is redrawn
VOLATILE = {"course": {"volatile": True}}  # metadata of an output that no second run will repeat


def in_notebook() -> bool:
    """True inside a Jupyter kernel (JupyterLab, papermill), False in scripts and in terminal IPython."""
    ipython = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython else None
    return shell is not None and type(shell).__name__ == "ZMQInteractiveShell"


def format_seconds(seconds: float) -> str:
    """73 -> '1:13', 3700 -> '1:01:40'."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def format_value(value: object) -> str:
    """Four significant digits for fractions, thousands separators for large counts."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def bar_html(share: float) -> str:
    """A bar of which `share` (0 to 1) is filled; plain HTML, so it still stands when the notebook is opened again."""
    percent = f"{100 * min(max(share, 0.0), 1.0):.0f}%"
    return (
        '<div style="width:9em;height:.75em;border:1px solid rgba(128,128,128,.6);border-radius:3px">'
        f'<div style="width:{percent};height:100%;background:#009E73"></div></div>'
    )


class Progress:
    """Counts `total` units of work and shows them with rate and time left.

    Use as a context manager, `update(n, loss=…)` after each piece of work. Nothing is computed from the fields:
    pass plain numbers that are already on the host.
    """

    def __init__(self, total: int, desc: str, unit: str = "step", start: int = 0) -> None:
        self.total, self.desc, self.unit = total, desc, unit
        self.done, self.start = start, start
        self.began = self.shown = time.monotonic()
        self.fields: dict[str, object] = {}
        self.file = os.environ.get("NANOCHAT_PROGRESS_FILE")
        self.bar = self.handle = None
        if in_notebook():
            from IPython.display import display

            self.handle = display(self._bundle(self.line()), metadata=VOLATILE, raw=True, display_id=True)
            self.every = NOTEBOOK_SECONDS
        elif sys.stderr.isatty():
            from tqdm import tqdm

            self.bar = tqdm(total=total, desc=desc, unit=unit, initial=start, leave=True, dynamic_ncols=True)
            self.every = 0.2
        else:
            self.every = LINE_SECONDS

    def update(self, n: int = 1, **fields: object) -> None:
        """`n` more units are done; `fields` (loss, tokens/s, …) replace the ones shown before."""
        self.done += n
        self.fields.update(fields)
        now = time.monotonic()
        if now - self.shown >= self.every:
            self.shown = now
            self._show()

    def line(self) -> str:
        """The state as one line of text."""
        elapsed = time.monotonic() - self.began
        fresh = self.done - self.start
        left = (self.total - self.done) * elapsed / fresh if fresh else None
        parts = [f"{self.desc}: {self.done:,}/{self.total:,} {self.unit}s"]
        parts += [f"{name} {format_value(value)}" for name, value in self.fields.items()]
        done = self.done >= self.total
        parts.append(f"took {format_seconds(elapsed)}" if done or left is None else f"{format_seconds(left)} left")
        return " · ".join(parts)

    def _bundle(self, line: str) -> dict[str, str]:
        """The line for a notebook: as text, and with a bar before it where HTML is shown."""
        share = self.done / self.total if self.total else 1.0
        cell = "text-align:left;padding:0 .8em 0 0;background:transparent"
        cells = "".join(f'<td style="{cell}">{part}</td>' for part in (bar_html(share), escape(line)))
        return {"text/plain": line, "text/html": f'<table style="margin:0"><tr>{cells}</tr></table>'}

    def _show(self) -> None:
        line = self.line()
        if self.file:
            temporary = f"{self.file}.{os.getpid()}"
            with open(temporary, "w", encoding="utf-8") as out:
                out.write(line)
            os.replace(temporary, self.file)
        if self.bar is not None:
            self.bar.set_postfix({k: format_value(v) for k, v in self.fields.items()}, refresh=False)
            self.bar.n = self.done
            self.bar.refresh()
        elif self.handle is not None:
            self.handle.update(self._bundle(line), metadata=VOLATILE, raw=True)
        else:
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Shows the last state and ends the bar."""
        self._show()
        if self.bar is not None:
            self.bar.close()

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
