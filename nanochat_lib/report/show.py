"""How a notebook cell shows a figure: as a picture that every viewer can draw, with its title as alternative text."""

from __future__ import annotations

from matplotlib.figure import Figure

from nanochat_lib.report.plots import to_png

DPI = 160


def show(*figures: Figure) -> None:
    """Displays figures below the cell, at their size in inches (96 pixels each), sharp on dense screens."""
    from IPython.display import Image, display

    for figure in figures:
        width = round(figure.get_figwidth() * 96)
        titles = [ax.get_title(loc="left") or ax.get_title() for ax in figure.axes]
        display(
            Image(to_png(figure, DPI), format="png", width=width, alt="; ".join(t for t in titles if t) or "figure")
        )
