"""The course's figures: each function takes plain data and returns a matplotlib Figure, for notebook and report alike.

No pyplot and no global state, so a figure can be made in any thread. Colours are Okabe and Ito's, which colour-blind
readers can tell apart; series also differ by line style or marker. Text that comes from data is never read as markup.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Sequence
from io import BytesIO, StringIO

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

INK, FAINT = "#222222", "#8a8a8a"
BLUE, ORANGE, GREEN, RED, PURPLE, SKY = "#0072B2", "#E69F00", "#009E73", "#D55E00", "#CC79A7", "#56B4E9"
STAGES = {"pretrain": "pretraining", "mid": "midtraining", "sft": "SFT", "rl": "RL"}
WIDTH = 7.0  # inches: the width of a notebook's text
MAX_POINTS = 600  # of a line; more would only make the file larger

STYLE = {
    "font.family": "sans-serif",
    "font.size": 9.5,
    "axes.titlesize": 10.5,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.edgecolor": FAINT,
    "axes.labelcolor": INK,
    "axes.titlecolor": INK,
    "text.color": INK,
    "text.parse_math": False,
    "xtick.color": INK,
    "ytick.color": INK,
    "axes.grid": True,
    "grid.color": "#bbbbbb",
    "grid.linewidth": 0.4,
    "grid.alpha": 0.5,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.labelcolor": INK,
    "lines.linewidth": 1.8,
    "svg.fonttype": "none",
}


def new_figure(rows: int = 1, columns: int = 1, height: float = 2.7, width: float = WIDTH, **options: object) -> tuple:
    """(figure, axes) in the course's style."""
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(width, height), layout="constrained")
        figure.get_layout_engine().set(w_pad=0.08, h_pad=0.07)
        figure.patch.set_alpha(0)
        axes = figure.subplots(rows, columns, **options)
        for ax in np.atleast_1d(axes).ravel():
            ax.patch.set_alpha(0)
    return figure, axes


def to_svg(figure: Figure, name: str) -> str:
    """The figure as an inline <svg> element. Ids start with `name`, so several figures fit on one page.

    The ink colour becomes the page's text colour, so the same figure reads on light and on dark pages.
    """
    out = StringIO()
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}):
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None})
    svg = out.getvalue()
    svg = svg[svg.index("<svg") :].strip()
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = re.sub(r'(url\(#|href="#)', rf"\g<1>{name}-", svg)
    size = f'style="max-width:{figure.get_figwidth() * 96:.0f}px" role="img"'
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    svg = re.sub(r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf"<svg \1 {size} {names}>", svg, count=1)
    return svg.replace(INK, "currentColor")


def to_png(figure: Figure, dpi: int = 160) -> bytes:
    """The figure as PNG on white."""
    out = BytesIO()
    figure.patch.set_alpha(1)
    with matplotlib.rc_context(STYLE):
        figure.savefig(out, format="png", dpi=dpi, facecolor="white", bbox_inches="tight")
    figure.patch.set_alpha(0)
    return out.getvalue()


def points(records: Sequence[dict], stage: str, y: str, x: str = "step", event: str | None = None) -> tuple[list, list]:
    """(xs, ys) of one quantity of a stage, in order of x; of a step that was logged twice the last line counts.

    `event` "eval" takes evaluations, None the training steps. Lines without a finite number for x and y are left out.
    """
    found = {}
    for record in records:
        if record.get("stage") == stage and record.get("event") == event:
            a, b = record.get(x), record.get(y)
            if finite(a) and finite(b):
                found[a] = b
    xs = sorted(found)
    if len(xs) > MAX_POINTS:
        xs = [xs[i] for i in np.linspace(0, len(xs) - 1, MAX_POINTS).round().astype(int)]
    return xs, [found[a] for a in xs]


def finite(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def smooth(values: Sequence[float], share: float = 0.06) -> list[float]:
    """Centred running median and mean over `share` of the points: calm, and it does not lag."""
    half = max(int(len(values) * share / 2), 1)
    windows = [values[max(i - half, 0) : i + half + 1] for i in range(len(values))]
    medians = [statistics.median(w) for w in windows]
    return [statistics.fmean(medians[max(i - half, 0) : i + half + 1]) for i in range(len(values))]


def count_label(value: float, _position: object = None) -> str:
    """1200 -> '1.2k', 614400 -> '614k', 2e9 -> '2B'."""
    for limit, letter in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}"
    return f"{value:.3g}"


def _finish(ax: object, title: str, x: str, y: str, legend: bool = True) -> None:
    ax.set_title(title)
    ax.set_xlabel(x)
    ax.set_ylabel(y)
    ax.xaxis.set_major_formatter(FuncFormatter(count_label))
    ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
    ax.margins(x=0.01)
    if legend and ax.get_legend_handles_labels()[0]:
        ax.legend(fontsize=8.5)


def empty(ax: object, text: str = "nothing logged yet") -> None:
    ax.text(0.5, 0.5, text, ha="center", va="center", transform=ax.transAxes, color=FAINT)
    ax.tick_params(labelbottom=False, labelleft=False, length=0)
    ax.grid(visible=False)


def loss_curve(records: Sequence[dict], stage: str, *, width: float = WIDTH) -> Figure:
    """Training loss over steps, as logged and smoothed, with the held-out loss where the stage measures one."""
    figure, ax = new_figure(width=width)
    with matplotlib.rc_context(STYLE):
        xs, ys = points(records, stage, "loss")
        if xs:
            ax.plot(xs, ys, color=BLUE, alpha=0.5, linewidth=1, label="each logged step")
            ax.plot(xs, smooth(ys), color=BLUE, label="smoothed")
        else:
            empty(ax)
        held_x, held_y = points(records, stage, "val_loss", event="eval")
        if held_x:
            ax.plot(held_x, held_y, color=ORANGE, marker="o", markersize=4, linestyle="--", label="held out")
        unit = "advantage-weighted loss" if stage == "rl" else "loss (nats per token)"
        _finish(ax, f"Loss in {STAGES.get(stage, stage)}", "optimiser step", unit)
    return figure


def bpb_curve(
    records: Sequence[dict], bigram: float | None = None, bigram_world: float | None = None, *, width: float = WIDTH
) -> Figure:
    """Validation bits per byte over steps, on real text and on the invented world, against a byte-bigram model."""
    figure, ax = new_figure(width=width)
    with matplotlib.rc_context(STYLE):
        series = (("val_bpb", "real text", BLUE, "o"), ("val_bpb_world", "the invented world", GREEN, "s"))
        for key, label, colour, marker in series:
            xs, ys = points(records, "pretrain", key, event="eval")
            if xs:
                ax.plot(xs, ys, color=colour, marker=marker, markersize=4)
                _mark(ax, f"{label}: {ys[-1]:.2f}", (xs[-1], ys[-1]), "data", 5)
        drawn = bool(ax.lines)
        for value, colour, label in ((bigram, BLUE, "byte bigram, text"), (bigram_world, GREEN, "byte bigram, world")):
            if finite(value):
                ax.axhline(value, color=colour, linestyle=":", linewidth=1.4)
                _mark(ax, f"{label}: {value:.2f}", (1, value), ("axes fraction", "data"), 2)
        _finish(ax, "Held-out text", "optimiser step", "bits per byte")
        if drawn:
            ax.set_ylim(bottom=0)
        else:
            empty(ax, "not evaluated")
    return figure


def _mark(ax: object, text: str, at: tuple, coordinates: object, above: float) -> None:
    """A label that ends at `at`, a little above it."""
    ax.annotate(text, at, xycoords=coordinates, xytext=(0, above), textcoords="offset points", ha="right", va="bottom",
                fontsize=8.5)  # fmt: skip


def any_curve(records: list[dict], stage: str, figure: str, width: float = WIDTH) -> Figure:
    """One logged figure of one stage over its steps, whatever it is; says so where the stage does not log it."""
    points = [(r["step"], r[figure]) for r in records if r["stage"] == stage and finite(r.get(figure)) and "step" in r]
    made, ax = new_figure(width=width)
    if points:
        steps, values = zip(*points, strict=True)
        ax.plot(steps, values, color=BLUE, marker="." if len(points) < 60 else None)
        ax.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        ax.set_xlabel("step")
    else:
        ax.text(0.5, 0.5, f"{stage} logs no {figure}", ha="center", va="center", transform=ax.transAxes)
        ax.set_axis_off()
    ax.set_title(f"{figure}, {stage}", loc="left")
    return made


def schedule_plot(records: Sequence[dict], stage: str, *, width: float = WIDTH) -> Figure:
    """What the schedules did: learning-rate multiplier, Muon's momentum, and its weight decay where there is any."""
    quantities = [
        ("lr", "Learning rate ×", BLUE),
        ("momentum", "Muon momentum", RED),
        ("weight_decay", "Weight decay", PURPLE),
    ]
    series = [(label, colour, *points(records, stage, key)) for key, label, colour in quantities]
    series = [s for s in series if s[2] and (any(s[3]) or s[0] != "Weight decay")]
    series = series or [("Learning rate ×", BLUE, [], [])]
    figure, axes = new_figure(1, len(series), height=2.1, width=width, squeeze=False)
    with matplotlib.rc_context(STYLE):
        for ax, (label, colour, xs, ys) in zip(axes[0], series, strict=True):
            if xs:
                ax.plot(xs, ys, color=colour)
                ax.set_ylim(bottom=0 if label.startswith("Learning") else None)
            else:
                empty(ax)
            ax.xaxis.set_major_locator(MaxNLocator(3))
            _finish(ax, label, f"step, {STAGES.get(stage, stage)}", "")
    return figure


def throughput_plot(records: Sequence[dict], *, width: float = WIDTH) -> Figure:
    """Tokens a second of each training stage over its steps."""
    figure, ax = new_figure(height=2.3, width=width)
    with matplotlib.rc_context(STYLE):
        drawn = False
        lines = ("pretrain", SKY, "-"), ("mid", GREEN, ":"), ("sft", BLUE, "--"), ("rl", ORANGE, "-.")
        for stage, colour, style in lines:
            xs, ys = points(records, stage, "tokens_per_s")
            if xs:
                drawn = True
                ax.plot(xs, ys, color=colour, linestyle=style, label=stage)
        if drawn:
            ax.set_ylim(bottom=0)
            ax.yaxis.set_major_formatter(FuncFormatter(count_label))
        else:
            empty(ax)
        _finish(ax, "Training speed", "optimiser step of the stage", "tokens per second")
    return figure


def reward_curve(records: Sequence[dict], *, width: float = WIDTH) -> Figure:
    """Mean reward of the sampled answers in training, and on held-out questions, over RL's steps."""
    figure, ax = new_figure(width=width)
    with matplotlib.rc_context(STYLE):
        xs, ys = points(records, "rl", "reward")
        if xs:
            ax.plot(xs, ys, color=ORANGE, alpha=0.5, linewidth=1, label="each step's samples")
            ax.plot(xs, smooth(ys, 0.2), color=ORANGE, label="smoothed")
        shown = (("reward_heldout", "held out, sampled", BLUE, "o"), ("reward_greedy", "held out, greedy", GREEN, "s"))
        for key, label, colour, marker in shown:
            held_x, held_y = points(records, "rl", key, event="eval")
            if held_x:
                ax.plot(held_x, held_y, color=colour, marker=marker, markersize=5, linestyle="--", label=label)
        if not ax.lines:
            empty(ax)
        ax.set_ylim(-0.03, 1.03)
        _finish(ax, "Reward", "RL step", "share of right answers")
    return figure
