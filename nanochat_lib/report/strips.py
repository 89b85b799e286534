"""Figures that show data itself: tokens of a text, the loss mask of a conversation, a batch, rewards and advantages."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties, findfont, get_font
from matplotlib.patches import Rectangle
from matplotlib.ticker import MaxNLocator

from nanochat_lib.report.plots import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, RED, SKY, STYLE, WIDTH, new_figure

TINTS = (SKY, ORANGE, GREEN, PURPLE)
COLUMNS = 76  # characters of a line
FONT_SIZE = 9.2
ADVANCE = 0.602 * FONT_SIZE / 72  # inches a character of DejaVu Sans Mono takes
LINE_HEIGHT = 0.25  # inches
MAX_LINES = 24


def visible(text: str) -> str:
    """Spaces as ·, line ends as ↵, tabs as →, other control characters and glyphs the font lacks as □."""
    known = get_font(findfont("DejaVu Sans Mono")).get_charmap()
    swap = {" ": "·", "\n": "↵", "\t": "→", "\r": "␍"}
    shown = (swap.get(c, c) for c in text)
    return "".join(c if c.isprintable() and ord(c) in known else "□" for c in shown)


def layout(pieces: Sequence[str], columns: int = COLUMNS) -> list[tuple[int, int, int, str]]:
    """(piece index, line, column, text) of every run of characters; a piece that does not fit starts a new line."""
    runs, line, column = [], 0, 0
    for index, piece in enumerate(pieces):
        text = visible(piece)
        if column and column + len(text) > columns:
            line, column = line + 1, 0
        while text:
            runs.append((index, line, column, text[: columns - column]))
            column += len(runs[-1][3])
            text = text[len(runs[-1][3]) :]
            if text:
                line, column = line + 1, 0
    return runs


def _strip(pieces: Sequence[str], colours: Sequence[str | None], title: str, legend: dict[str, str]) -> Figure:
    """Text in a fixed-width font, each piece on its own tint (None: no tint)."""
    runs = [run for run in layout(pieces) if run[1] < MAX_LINES]
    lines = 1 + max((run[1] for run in runs), default=0)
    height = lines * LINE_HEIGHT + (0.62 if legend else 0.36)
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(WIDTH, height))
        figure.patch.set_alpha(0)
        margin = 0.1  # inches
        ax = figure.add_axes((margin / WIDTH, 0, COLUMNS * ADVANCE / WIDTH, 1))
        ax.set_xlim(0, COLUMNS)
        ax.set_ylim(height, 0)  # inches from the top
        ax.axis("off")
        ax.text(0, 0.2, title, fontsize=10.5, fontweight="bold", va="center")
        font = FontProperties(family="DejaVu Sans Mono", size=FONT_SIZE)
        for index, line, column, text in runs:
            top = 0.36 + line * LINE_HEIGHT
            if colours[index]:
                ax.add_patch(Rectangle((column + 0.06, top + 0.015), len(text) - 0.12, LINE_HEIGHT - 0.03, linewidth=0,
                                       facecolor=to_rgba(colours[index], 0.42)))  # fmt: skip
            ax.text(column, top + LINE_HEIGHT / 2, text, va="center_baseline", fontproperties=font)
        column = 0
        for label, colour in legend.items():
            y = height - 0.13
            ax.add_patch(Rectangle((column, y - 0.06), 2, 0.12, linewidth=0.4 if not colour else 0, edgecolor=FAINT,
                                   facecolor=to_rgba(colour, 0.42) if colour else "none"))  # fmt: skip
            ax.text(column + 2.6, y, label, va="center_baseline", fontsize=8.5)
            column += len(label) + 6
    return figure


def token_strip(pieces: Sequence[str], title: str = "One text as the model sees it") -> Figure:
    """A text cut into its tokens, neighbours in different tints."""
    characters = sum(len(piece) for piece in pieces)
    title = f"{title}: {len(pieces)} tokens, {characters} characters"
    return _strip(pieces, [TINTS[i % len(TINTS)] for i in range(len(pieces))], title, {})


def mask_strip(pieces: Sequence[str], mask: Sequence[int], title: str = "What SFT trains") -> Figure:
    """The tokens of a conversation; tinted are the ones whose prediction counts in the loss (mask 1)."""
    share = sum(mask) / max(len(mask), 1)
    tints = [GREEN if trained else None for trained in mask]
    legend = {"trained": GREEN, "read, not trained": None}
    return _strip(pieces, tints, f"{title}: {sum(mask)} of {len(mask)} tokens ({share:.0%})", legend)


def special_strip(pieces: Sequence[str], special: Sequence[bool], title: str) -> Figure:
    """The tokens of a text; tinted are the special ones."""
    tints = [RED if marked else None for marked in special]
    legend = {"special token": RED, "ordinary token": None}
    return _strip(pieces, tints, f"{title}: {sum(special)} special tokens of {len(pieces)}", legend)


def batch_grid(inputs: np.ndarray, bos_id: int, targets: np.ndarray | None = None, title: str = "A batch") -> Figure:
    """A batch (B, T) seen from above: one row a training row, documents in alternating tints, ignored targets grey."""
    inputs = np.asarray(inputs)
    document = np.cumsum(inputs == bos_id, axis=1)
    image = np.empty((*inputs.shape, 4))
    for i in range(inputs.shape[0]):
        for j, tint in enumerate(TINTS):
            image[i, document[i] % len(TINTS) == j] = to_rgba(tint, 0.75)
    if targets is not None:
        image[np.asarray(targets) < 0] = to_rgba(FAINT, 0.25)
    figure, ax = new_figure(height=0.75 + 0.13 * inputs.shape[0])
    with matplotlib.rc_context(STYLE):
        ax.imshow(image, aspect="auto", interpolation="nearest")
        ax.set_title(f"{title}: {inputs.shape[0]} rows of {inputs.shape[1]} tokens, a new tint is a new document")
        if targets is not None:
            ax.set_title(f"{title}: {inputs.shape[0]} rows of {inputs.shape[1]} tokens, grey is not trained")
        ax.set_xlabel("position in the row")
        ax.set_ylabel("row")
        ax.yaxis.set_major_locator(MaxNLocator(integer=True))
        ax.grid(visible=False)
    return figure


def advantage_plot(rewards: np.ndarray) -> Figure:
    """Rewards (Q, S) of S sampled answers to each of Q questions, and beside it reward minus the question's mean."""
    rewards = np.asarray(rewards, float)
    advantages = rewards - rewards.mean(axis=1, keepdims=True)
    figure, (left, right) = new_figure(1, 2, height=0.95 + 0.3 * rewards.shape[0], sharey=True)
    with matplotlib.rc_context(STYLE):
        for ax, values, title in ((left, rewards, "reward"), (right, advantages, "advantage = reward − mean")):
            for (row, column), value in np.ndenumerate(values):
                strength = min(abs(value), 1) * 0.65
                tint = to_rgba(BLUE if value > 0 else RED, strength)
                ax.add_patch(
                    Rectangle((column - 0.46, row - 0.44), 0.92, 0.88, facecolor=tint, edgecolor=FAINT, lw=0.4)
                )
                text = f"{value:.0f}" if ax is left else f"{value:+.2f}" if value else "0"
                ax.text(column, row, text, ha="center", va="center", fontsize=7, color=INK)
            ax.set_xlim(-0.6, rewards.shape[1] - 0.4)
            ax.set_ylim(rewards.shape[0] - 0.4, -0.6)
            ax.set_xticks(range(rewards.shape[1]), range(1, rewards.shape[1] + 1))
            ax.set_yticks(range(rewards.shape[0]), [f"question {i + 1}" for i in range(rewards.shape[0])])
            ax.set_title(title)
            ax.set_xlabel("sampled answer")
            ax.grid(visible=False)
            ax.spines[:].set_visible(False)
            ax.tick_params(length=0)
    return figure
