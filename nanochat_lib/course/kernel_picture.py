"""Pictures of what `kernel_view` has recorded: one step of a kernel's grid, and its bytes and FLOPs against a chip."""

from __future__ import annotations

import math

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from nanochat_lib.course.kernel_view import Call, Operand, budget, cost
from nanochat_lib.hardware import Chip
from nanochat_lib.report.plots import BLUE, FAINT, GREEN, INK, ORANGE, SKY, STYLE, new_figure

UNTOUCHED, BEFORE, HELD, COPIED, WRITTEN = range(5)
COLOURS = ("#f2f2f2", "#cfcfcf", SKY, ORANGE, GREEN)
WORDS = ("not used yet", "used before", "still in VMEM", "copied from HBM now", "written to HBM after this step")


def size_of(size: float) -> str:
    """Bytes in words: 96 KiB, 2.5 MiB."""
    for unit, name in ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB")):
        if size >= unit:
            return f"{size / unit:.3g} {name}"
    return f"{size:.0f} B"


@matplotlib.rc_context(STYLE)
def draw_step(call: Call, step: int, chip: Chip | None = None, useful_flops: float = 0) -> Figure:
    """One step: which blocks of each array it uses, which of them are copied, and when copies happen in all steps.

    With `chip` the copies and products of all steps are set against its roofline, and against the floor for
    `useful_flops`.
    """
    step = min(max(int(step), 0), len(call.places) - 1)
    operands = call.operands
    figure, _ = new_figure(height=5.0)
    figure.clear()
    grid = figure.add_gridspec(2, 1, height_ratios=(1.25, 1))
    above = grid[0].subgridspec(1, len(operands))
    for place, one in enumerate(operands):
        draw_blocks(figure.add_subplot(above[place]), one, step)
    below = grid[1].subgridspec(1, 2, width_ratios=(2.2, 1)) if chip else grid[1].subgridspec(1, 1)
    draw_copies(figure.add_subplot(below[0]), call, step)
    if chip:
        draw_cost(figure.add_subplot(below[1]), call, chip, useful_flops)
    now = sum(one.block_bytes for one in operands if one.copies[step])
    work = sum(2 * math.prod(sizes) for sizes in call.products)
    figure.suptitle(
        f"{call.name}, step {step + 1} of {len(call.places)}, grid {tuple(call.places[step].tolist())} of {call.grid}: "
        f"{size_of(now)} copied" + (f", {work / 1e9:.2g} GFLOP" if work else ""),
        fontsize=9.5, x=0.01, ha="left", color=INK,
    )  # fmt: skip
    figure.legend(
        handles=[Patch(color=colour, label=word) for colour, word in zip(COLOURS, WORDS, strict=True)],
        loc="outside lower center", ncols=3, fontsize=8, frameon=False, labelcolor=INK,
    )  # fmt: skip
    return figure


def states(operand: Operand, step: int) -> np.ndarray:
    """One state for each block, (rows, blocks): the last axis that is cut is the row's, all others are flattened."""
    state = np.full(operand.blocks, UNTOUCHED)
    for visited in operand.visits[:step]:
        state[tuple(visited)] = BEFORE
    copied = operand.copies[step]
    state[tuple(operand.visits[step])] = (WRITTEN if operand.output else COPIED) if copied else HELD
    shape = [count for count in operand.blocks if count > 1] or [1]
    return state.reshape(-1, shape[-1])


def draw_blocks(ax: Axes, operand: Operand, step: int) -> None:
    state = states(operand, step)
    ax.pcolormesh(state, cmap=ListedColormap(COLOURS), vmin=0, vmax=len(COLOURS) - 1, edgecolors="white", linewidth=1)
    ax.invert_yaxis()
    ax.set(xticks=[], yticks=[])
    ax.grid(False)
    for spine in ax.spines.values():
        spine.set_visible(False)
    block = " × ".join(str(size) for size in operand.block if size > 1) or "1"
    ax.set_title(f"{operand.name}\n{block}", fontsize=8.5, loc="left", color=INK)
    ax.set_xlabel(f"{size_of(operand.block_bytes)} a block\n{size_of(operand.moved)} moved", fontsize=8, color=INK)


def draw_copies(ax: Axes, call: Call, step: int) -> None:
    for row, one in enumerate(call.operands):
        at = np.flatnonzero(one.copies)
        ax.broken_barh([(x, 1) for x in at], (row - 0.35, 0.7), color=COLOURS[WRITTEN if one.output else COPIED], lw=0)
    ax.axvspan(step, step + 1, color=INK, alpha=0.18, linewidth=0)
    ax.set(xlim=(0, len(call.places)), yticks=range(len(call.operands)), ylim=(len(call.operands) - 0.5, -0.5))
    ax.set_yticklabels([one.name for one in call.operands])
    ax.tick_params(labelsize=8)
    ax.set_title("copies over all steps", fontsize=8.5)
    ax.set_xlabel("step", fontsize=8)
    ax.grid(False)


def draw_cost(ax: Axes, call: Call, chip: Chip, useful_flops: float) -> None:
    found = cost(call, chip)
    floor, score = budget(call, chip, useful_flops)
    bars = {"memory": (found.memory_s, ORANGE), "products": (found.compute_s, BLUE), "floor": (floor, FAINT)}
    names = [f"{name}\n{seconds * 1e6:.3g} µs" for name, (seconds, _) in bars.items()]
    ax.barh(names, [seconds * 1e6 for seconds, _ in bars.values()], color=[colour for _, colour in bars.values()])
    ax.invert_yaxis()
    ax.tick_params(labelsize=8)
    ax.set_title(f"{chip.name}: score {score:.0f} of 100", fontsize=8.5)
    ax.set_xlabel("µs", fontsize=8)
    ax.grid(False)
