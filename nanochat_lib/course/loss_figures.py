"""What a model made of a prompt: every token with its loss, the scored ones framed, those that were cut away grey."""

from __future__ import annotations

from collections.abc import Sequence

import matplotlib
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nanochat_lib.course.token_figures import canvas
from nanochat_lib.report.plots import FAINT, INK, ORANGE, STYLE, WIDTH
from nanochat_lib.report.strips import visible

MONO = "DejaVu Sans Mono"
CHAR = 0.072  # inches a character of 8.5 points takes
LINE = 0.42  # inches: text and loss of a line of tokens
HOT = 6.0  # nats from which a token has the full tint
MAX_LINES = 16


def loss_map(
    pieces: Sequence[str], losses: Sequence[float | None], scored: tuple[int, int], cut: int, title: str = ""
) -> Figure:
    """Tokens as boxes: the text, under it its nats (None: nothing predicted it), the more of them the more orange.

    The first `cut` pieces are what the model did not see: grey, without losses. `scored` (start, end) are framed. Of a
    prompt that is too long for the figure the end is shown, and a line says how many tokens stand before it.
    """
    places, x, line = [], 0.1, 0
    for piece in pieces:
        width = max(len(visible(piece)) * CHAR, 0.26) + 0.06
        if x + width > WIDTH - 0.05 and x > 0.1:
            x, line = 0.1, line + 1
        places.append((x, line, width))
        x += width + 0.03
    hidden = max(0, 1 + line - MAX_LINES)
    lost = sum(place[1] < hidden for place in places)
    lines = 1 + line - hidden
    start, end = scored
    height = 0.62 + lines * LINE
    with matplotlib.rc_context(STYLE):
        figure, ax = canvas(height, title)
        above = f"{lost} more tokens before these; " if lost else ""
        legend = f"{above}number: nats; framed: scored; grey: cut away ({cut} of {len(pieces)} tokens)"
        ax.text(0.1, 0.39, legend, fontsize=8.5, va="center")
        for i, (piece, loss, (x, line, width)) in enumerate(zip(pieces, losses, places, strict=True)):
            if line < hidden:
                continue
            top, away = 0.54 + (line - hidden) * LINE, i < cut
            tint = to_rgba(FAINT, 0.16) if away else to_rgba(ORANGE, 0.08 + 0.72 * min((loss or 0.0) / HOT, 1.0))
            framed = start <= i < end
            ax.add_patch(
                Rectangle(
                    (x, top), width, 0.21, facecolor=tint, edgecolor=INK if framed else "none",
                    linewidth=1.6 if framed else 0,
                )
            )  # fmt: skip
            ink = FAINT if away else INK
            ax.text(x + width / 2, top + 0.105, visible(piece), family=MONO, fontsize=8.5, ha="center", va="center",
                    color=ink)  # fmt: skip
            if loss is not None and not away:
                ax.text(x + width / 2, top + 0.29, f"{loss:.1f}", family=MONO, fontsize=6.5, ha="center", va="center")
    return figure
