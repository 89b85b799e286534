"""Bar figures: scores before and after, CORE by task, time by stage."""

from __future__ import annotations

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from nanochat_lib.report.plots import BLUE, FAINT, INK, ORANGE, RED, SKY, STYLE, empty, finite, new_figure
from nanochat_lib.report.tables import clean

STAGE_COLOURS = {"base": SKY, "sft": BLUE, "rl": ORANGE}
STAGE_NAMES = {"base": "base", "sft": "after SFT", "rl": "after RL"}
LABEL_WIDTH = 0.06  # of "99%", as a share of the axis


def before_after_bars(stages: dict[str, dict]) -> Figure:
    """Accuracy per chat task after each stage, with the score of guessing. `stages` as in the eval_chat figures."""
    present = [s for s in STAGE_COLOURS if (stages.get(s) or {}).get("tasks")]
    tasks = list(dict.fromkeys(name for s in present for name in stages[s]["tasks"]))
    entries = {task: [stages[s]["tasks"].get(task) or {} for s in present] for task in tasks}
    guesses = {task: next((e.get("baseline") for e in entries[task] if e), None) for task in tasks}
    figure, ax = new_figure(height=0.9 + 0.62 * max(len(tasks), 1))
    with matplotlib.rc_context(STYLE):
        thick = 0.8 / max(len(present), 1)
        for i, stage in enumerate(present):
            for row, task in enumerate(tasks):
                entry = entries[task][i]
                value = entry.get("accuracy")
                at = row - 0.4 + thick * (i + 0.5)
                if finite(value):
                    ax.barh(at, value, thick * 0.92, color=STAGE_COLOURS[stage],
                            label=STAGE_NAMES[stage] if row == 0 else None,
                            xerr=entry.get("stderr"), error_kw={"ecolor": FAINT, "elinewidth": 1})  # fmt: skip
                    edge = value + (entry.get("stderr") or 0)
                    if finite(guesses[task]) and guesses[task] - LABEL_WIDTH < edge < guesses[task]:
                        edge = guesses[task]  # or the line would run through the label
                    ax.annotate(f"{value:.0%}", (edge, at), xytext=(3, 0), textcoords="offset points",
                                va="center", fontsize=8)  # fmt: skip
        for row, task in enumerate(tasks):
            guess = guesses[task]
            if finite(guess) and guess > 0:
                ax.plot([guess, guess], [row - 0.42, row + 0.42], color=INK, linestyle=":", linewidth=1.4,
                        label="guessing" if "guessing" not in ax.get_legend_handles_labels()[1] else None)  # fmt: skip
        ax.set_yticks(range(len(tasks)), [clean(task) for task in tasks])
        _percent_bars(ax, "Chat tasks, stage by stage", "share of right answers")
        if not tasks:
            empty(ax, "not evaluated")
    return figure


def core_bars(tasks: dict[str, dict]) -> Figure:
    """Centred score per CORE task: 0 is guessing, 1 is perfect."""
    labels = list(tasks)
    figure, ax = new_figure(height=0.9 + 0.3 * max(len(labels), 1))
    with matplotlib.rc_context(STYLE):
        values = [tasks[label].get("centered") for label in labels]
        for row, value in enumerate(values):
            if finite(value):
                ax.barh(row, value, 0.7, color=BLUE if value >= 0 else RED)
                ax.annotate(f"{value:.2f}", (max(value, 0), row), xytext=(3, 0), textcoords="offset points",
                            va="center", fontsize=8)  # fmt: skip
        ax.axvline(0, color=INK, linewidth=1)
        ax.set_yticks(range(len(labels)), [clean(label) for label in labels])
        _percent_bars(ax, "CORE: centred accuracy", "0 = guessing, 1 = perfect", percent=False)
        low = min([v for v in values if finite(v)] + [0])
        ax.set_xlim(min(low * 1.15, -0.02), 1.08)
        if not labels:
            empty(ax, "not evaluated")
    return figure


def _percent_bars(ax: object, title: str, x: str, percent: bool = True) -> None:
    ax.set_title(title)
    ax.set_xlabel(x)
    ax.invert_yaxis()
    ax.grid(axis="y", visible=False)
    if percent:
        ax.set_xlim(0, 1.08)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda v, _: f"{v:.0%}" if v <= 1 else ""))
    entries = dict(zip(*reversed(ax.get_legend_handles_labels()), strict=True))
    if entries:
        guess = entries.pop("guessing", None)
        entries |= {"guessing": guess} if guess else {}
        ax.figure.legend(entries.values(), entries.keys(), loc="outside lower center", ncols=4, fontsize=8.5)


def time_bars(seconds: dict[str, float | None]) -> Figure:
    """How long each stage took."""
    known = {name: value for name, value in seconds.items() if finite(value)}
    figure, ax = new_figure(height=0.8 + 0.3 * max(len(known), 1))
    with matplotlib.rc_context(STYLE):
        scale, unit = (3600, "hours") if sum(known.values()) > 7200 else (60, "minutes")
        for row, value in enumerate(known.values()):
            ax.barh(row, value / scale, 0.7, color=SKY)
            ax.annotate(f"{value / scale:.2g}" if value < 10 * scale else f"{value / scale:.0f}", (value / scale, row),
                        xytext=(3, 0), textcoords="offset points", va="center", fontsize=8)  # fmt: skip
        if not known:
            empty(ax, "nothing has run yet")
        ax.set_yticks(range(len(known)), list(known))
        ax.invert_yaxis()
        ax.grid(axis="y", visible=False)
        ax.margins(x=0.08)
        ax.set_title("Time per stage")
        ax.set_xlabel(unit)
    return figure
