"""Figures of a tokenizer at work: the tokens of a text with ids and bytes, and the merges that made one piece."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import matplotlib
from matplotlib.axes import Axes
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from nanochat_lib.bpe import merge
from nanochat_lib.report.plots import FAINT, GREEN, INK, ORANGE, STYLE, WIDTH
from nanochat_lib.report.strips import TINTS, visible
from nanochat_lib.tokenizer import Tokenizer

MONO = "DejaVu Sans Mono"
CHAR = 0.078  # inches a character of 9 points takes
LINE = 0.62  # inches: text, id and bytes of a line of tokens
ROUND = 0.34  # inches a round of merges takes
MAX_LINES = 9
MAX_ROUNDS = 12


def as_text(token: bytes) -> str:
    """A token as readable signs; bytes that are no whole characters in hexadecimal."""
    try:
        return visible(token.decode())
    except UnicodeDecodeError:
        return token.hex(" ")


def canvas(height: float, title: str) -> tuple[Figure, Axes]:
    """A figure whose coordinates are inches from the top left."""
    figure = Figure(figsize=(WIDTH, height))
    figure.patch.set_alpha(0)
    ax = figure.add_axes((0, 0, 1, 1))
    ax.set_xlim(0, WIDTH)
    ax.set_ylim(height, 0)
    ax.axis("off")
    ax.text(0.1, 0.2, title, fontsize=10.5, fontweight="bold", va="center")
    return figure, ax


def _box(ax: Axes, x: float, y: float, width: float, height: float, colour: str) -> None:
    ax.add_patch(Rectangle((x, y), width, height, linewidth=0, facecolor=to_rgba(colour, 0.42)))


def token_map(ids: Sequence[int], tokenizer: Tokenizer, mask: Sequence[int] | None = None) -> Figure:
    """Every token as a box: its text, under it its id, under that its bytes in hexadecimal, or its `mask` if given.

    With a mask the trained tokens (1) are green, the others grey.
    """
    cells = []
    for k, i in enumerate(ids):
        token = tokenizer.id_to_bytes(i)
        hexadecimal = token.hex(" ") if len(token) <= 6 else f"{token[:5].hex(' ')} …"
        cells.append((as_text(token), str(i), hexadecimal if mask is None else f"mask {mask[k]}"))
    places, x, line = [], 0.1, 0
    for text, number, hexadecimal in cells:
        width = max(len(text) * CHAR, len(number) * 0.062, len(hexadecimal) * 0.052) + 0.1
        if x + width > WIDTH - 0.05 and x > 0.1:
            x, line = 0.1, line + 1
        places.append((x, line, width))
        x += width + 0.04
    lines = min(1 + max((line for _, line, _ in places), default=0), MAX_LINES)
    size = sum(len(tokenizer.id_to_bytes(i)) for i in ids)
    ratio = f", {size / len(ids):.2f} bytes a token" if ids else ""
    title = f"{size} bytes in {len(ids)} tokens{ratio}: text, id, bytes"
    tints = [TINTS[k % len(TINTS)] for k in range(len(ids))]
    if mask is not None:
        title = f"{sum(mask)} of {len(ids)} tokens are trained (green): text, id, mask"
        tints = [GREEN if learn else FAINT for learn in mask]
    with matplotlib.rc_context(STYLE):
        figure, ax = canvas(0.45 + lines * LINE, title)
        for k, ((text, number, hexadecimal), (x, line, width)) in enumerate(zip(cells, places, strict=True)):
            if line >= lines:
                break
            top = 0.4 + line * LINE
            _box(ax, x, top, width, 0.24, tints[k])
            middle = x + width / 2
            ax.text(middle, top + 0.12, text, family=MONO, fontsize=9, ha="center", va="center")
            ax.text(middle, top + 0.32, number, family=MONO, fontsize=7.2, ha="center", va="center")
            ax.text(middle, top + 0.45, hexadecimal, family=MONO, fontsize=6, ha="center", va="center", color=FAINT)
    return figure


def rounds(piece: bytes, ranks: dict[bytes, int]) -> list[tuple[list[bytes], bytes | None]]:
    """(parts, token just made) before the first and after every round of encoding a piece."""
    parts = [bytes([byte]) for byte in piece]
    found: list[tuple[list[bytes], bytes | None]] = [(parts, None)]
    while known := {(a, b): ranks[a + b] for a, b in pairwise(parts) if a + b in ranks}:
        a, b = min(known, key=known.get)
        parts = merge(parts, (a, b), a + b)
        found.append((parts, a + b))
    return found


def merge_replay(piece: bytes, merges: Sequence[bytes]) -> Figure:
    """How one piece is encoded: a row a round, from its bytes to its tokens, the token just made in orange."""
    ranks = {token: rank for rank, token in enumerate([*(bytes([byte]) for byte in range(256)), *merges])}
    steps = rounds(piece, ranks)
    shown = steps[:MAX_ROUNDS] + (steps[-1:] if len(steps) > MAX_ROUNDS else [])
    left, unit = 1.75, min((WIDTH - 1.85) / max(len(piece), 1), 0.55)
    count = len(steps[-1][0])
    with matplotlib.rc_context(STYLE):
        title = f"{as_text(piece)}: {len(piece)} bytes → tokens: {count}, rounds of merging: {len(steps) - 1}"
        figure, ax = canvas(0.5 + len(shown) * ROUND, title)
        for row, (parts, made) in enumerate(shown):
            y, x = 0.42 + row * ROUND, left
            label = f"rank {ranks[made]}: {as_text(made)}" if made else "bytes"
            ax.text(0.1, y + 0.13, label[:23], family=MONO, fontsize=8, va="center", color=INK)
            for part in parts:
                width = len(part) * unit
                _box(ax, x + 0.015, y, width - 0.03, 0.26, ORANGE if part == made else FAINT)
                name = as_text(part)
                fits = max(1, int(width / (CHAR * 0.85)))
                shown_name = name if len(name) <= fits else name[: max(fits - 1, 0)] + "…"
                ax.text(x + width / 2, y + 0.13, shown_name, family=MONO, fontsize=8, ha="center", va="center")
                x += width
    return figure
