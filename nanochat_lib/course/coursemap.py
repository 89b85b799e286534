"""The course on one page: chapters, which ones each uses, how long it takes, which files of the library it builds.

All of it is read from the chapters' sources. A chapter uses an earlier one when it takes a function of it with
`mine(…)`, imports a function that is an exercise there, imports from a file that only that chapter builds, or names it
in its text. A chapter without exercises brings everything together, so it uses all before it.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nanochat_lib.course import registry
from nanochat_lib.course.registry import Chapter
from nanochat_lib.errors import UserError

NAMED = re.compile(r"\b[Cc]hapters?\s+((?:\d\d(?:\s*(?:,|and|to)\s*)?)+)")
ARC_WIDTH, ROW = 1.5, 0.5  # inches


@dataclass(frozen=True)
class Stop:
    """One chapter on the map."""

    number: str
    topic: str
    stem: str
    title: str
    question: str
    exercises: int
    points: int
    minutes: int
    rooms: tuple[str, ...]  # files and folders of nanochat_lib, e.g. "bpe", "kernels.flash"
    uses: dict[str, tuple[str, ...]]  # number of an earlier chapter -> functions and files of it, () if only named

    @property
    def short(self) -> str:
        """The title up to its colon."""
        return self.title.split(":")[0]


def course_map(root: str | Path | None = None) -> list[Stop]:
    """The chapters of the course below `root`, in order. UserError when there are none."""
    stops: list[Stop] = []
    for chapter in registry.chapters(root):
        text = source(chapter, root)
        rooms = dict.fromkeys(room(entry.library) for entry in chapter.exercises if entry.library)
        uses = used(chapter, text, stops, registry.chapters(root))
        stops.append(
            Stop(
                chapter.number,
                chapter.topic,
                f"{chapter.number}_{chapter.topic}",
                chapter.title,
                question(text),
                len(chapter.exercises),
                sum(e.points for e in chapter.exercises),
                sum(e.minutes for e in chapter.exercises),
                tuple(rooms),
                uses,
            )  # fmt: skip
        )
    if not stops:
        raise UserError("no chapters found; run this in the course's folder")
    return stops


def source(chapter: Chapter, root: str | Path | None) -> str:
    """What learners get of a chapter's source where it is there, else their own file's text; "" without either."""
    from nanochat_lib.course.parameters import project_root

    for folder in [Path(root)] if root else [registry.PACKAGE.parent, project_root()]:
        for place in ("solutions", "chapters"):
            path = folder / place / f"{chapter.number}_{chapter.topic}.py"
            if path.exists():
                cells = re.split(r"^(?=# ?%%)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
                return "".join(cell for cell in cells if '"hidden"' not in cell.split("\n", 1)[0])
    return ""


def room(symbol: str) -> str:
    """'nanochat_lib.kernels.flash:absorb' -> 'kernels.flash'."""
    return symbol.split(":")[0].removeprefix("nanochat_lib.")


def used(chapter: Chapter, text: str, before: list[Stop], chapters: tuple[Chapter, ...]) -> dict[str, tuple[str, ...]]:
    """Numbers of the earlier chapters that a chapter uses, in order, with what it uses of them."""
    if not chapter.exercises:
        return {stop.number: () for stop in before}
    earlier = {stop.topic: stop.number for stop in before}
    symbols = {e.library: c.number for c in chapters if c.topic in earlier for e in c.exercises if e.library}
    found: dict[str, list[str]] = {}
    for topic, name in re.findall(r'\bmine\(\s*"([a-z0-9_]+)\.([\w.]+)', text):
        if topic in earlier:
            found.setdefault(earlier[topic], []).append(name)
    for module, name in imported(text):
        if f"{module}:{name}" in symbols:
            found.setdefault(symbols[f"{module}:{name}"], []).append(name)
            continue
        builders = [stop.number for stop in before if room(module) in stop.rooms]
        if len(builders) == 1:
            found.setdefault(builders[0], []).append(room(module))
    for names in NAMED.findall(prose(text)):
        for number in set(re.findall(r"\d\d", names)) & set(earlier.values()):
            found.setdefault(number, [])
    return {number: tuple(dict.fromkeys(found[number])) for number in sorted(found)}


def prose(text: str) -> str:
    """The Markdown of a source as one running text."""
    return " ".join(line[2:] for line in text.split("\n") if line.startswith("# ") and not line.startswith("# %%"))


def imported(text: str) -> list[tuple[str, str]]:
    """(module, name) of everything that a chapter imports from the library."""
    try:
        tree = ast.parse(text)
    except SyntaxError:  # a learner's file, half written
        return []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("nanochat_lib"):
            found += [(node.module, alias.name) for alias in node.names]
            found += [(f"{node.module}.{alias.name}", "") for alias in node.names]
    return found


def question(text: str) -> str:
    """What a chapter asks: its text from the title to the first question mark, as Markdown."""
    body = text.split("\n# # ", 1)[-1].split("\n")[1:]
    lines = []
    for line in body:
        if not line.startswith("#") or line.startswith("# %%"):
            break
        lines.append(line[2:].strip())
    paragraph = " ".join(lines).strip()
    asked = re.match(r".*?\?(?:\*\*)?", paragraph)
    return asked[0] if asked else ""


def as_text(stops: list[Stop]) -> str:
    """The map as a table for a terminal."""
    wide = max(len(stop.short) for stop in stops)
    rows = [f"{'':2} {'chapter':<{wide}}  {'uses':<14} {'exercises':>9} {'minutes':>8}  builds in nanochat_lib"]
    for stop in stops:
        numbers = list(stop.uses)
        uses = " ".join(numbers) if len(numbers) < 5 else f"{numbers[0]} to {numbers[-1]}"
        rooms = ", ".join(stop.rooms)
        rows.append(
            f"{stop.number} {stop.short:<{wide}}  {uses:<14} {stop.exercises or '':>9} {stop.minutes or '':>8}  {rooms}"
        )
    exercises, minutes = sum(stop.exercises for stop in stops), sum(stop.minutes for stop in stops)
    rows.append(f"\n{exercises} exercises, about {minutes / 60:.0f} hours with them alone; reading comes on top.")
    return "\n".join(row.rstrip() for row in rows)


def words(stops: list[Stop]) -> str:
    """The map's alternative text: each chapter with the ones it uses."""
    parts = []
    for stop in stops:
        uses = f"uses {', '.join(stop.uses)}" if stop.uses else "uses none before it"
        parts.append(f"{stop.number} {stop.short} {uses}")
    return (
        "A map of the course: chapters one below the other, arcs from each to those it uses. " + "; ".join(parts) + "."
    )


def figure(stops: list[Stop], link: Callable[[Stop], str] = lambda stop: "") -> object:
    """The map as a matplotlib Figure. `link` gives the address that a chapter's title leads to in SVG, "" for none."""
    from matplotlib.figure import Figure
    from matplotlib.patches import Arc, Rectangle

    from nanochat_lib.report.plots import BLUE, FAINT, GREEN, INK, ORANGE, PURPLE, RED, SKY

    colours = (BLUE, ORANGE, GREEN, PURPLE, RED, SKY)
    place = {stop.number: len(stops) - 1 - i for i, stop in enumerate(stops)}
    drawing = Figure(figsize=(7.6, ROW * (len(stops) + 1)))
    drawing.patch.set_alpha(0)
    ax = drawing.add_axes([0, 0, 1, 1])
    ax.set_axis_off()
    ax.set(xlim=(-ARC_WIDTH - 0.1, 7.5 - ARC_WIDTH), ylim=(-ROW, ROW * len(stops)))
    most = max(stop.minutes for stop in stops) or 1
    for stop in stops:
        y, colour = ROW * place[stop.number], colours[int(stop.number) % len(colours)]
        for number in stop.uses:
            far = ROW * (place[number] - place[stop.number])
            wide = 2 * ARC_WIDTH * 0.95 * min(1.0, (0.18 + 0.82 * far / (ROW * max(len(stops) - 1, 1))))
            everything = stop.exercises == 0
            ax.add_patch(
                Arc((-0.1, y + far / 2), wide, far, theta1=90, theta2=270, color=FAINT if everything else colour,
                    linewidth=0.7 if everything else 1.5)
            )  # fmt: skip
        ax.plot([-0.1], [y], "o", color=colour, markersize=6)
        name = ax.text(
            0.08, y + 0.07, f"{stop.number}  {stop.short}", color=INK, fontsize=10, fontweight="bold", va="center"
        )
        name.set_url(link(stop) or None)
        ax.text(
            0.08,
            y - 0.13,
            " · ".join(dict.fromkeys(room.split(".")[0] for room in stop.rooms)),
            color=FAINT,
            fontsize=7,
            va="center",
        )
        if stop.minutes:
            ax.add_patch(Rectangle((3.6, y - 0.02), 1.1 * stop.minutes / most, 0.16, color=colour, linewidth=0))
            told = f"{stop.minutes} min, {stop.exercises} exercises"
            ax.text(3.6 + 1.1 * stop.minutes / most + 0.08, y + 0.055, told, color=INK, fontsize=8, va="center")
    return drawing


def print_map(save: str = "") -> None:
    """The map on the screen; with `save` also as a picture, .svg or .png."""
    stops = course_map()
    print(as_text(stops))
    if save:
        from nanochat_lib.report.plots import to_png, to_svg

        path = Path(save)
        if path.suffix not in (".svg", ".png"):
            raise UserError(f"--save {save}: the map can be saved as .svg or .png")
        drawn = figure(stops)
        path.write_bytes(to_png(drawn) if path.suffix == ".png" else to_svg(drawn, "map").encode())
        print(f"wrote {path}")
