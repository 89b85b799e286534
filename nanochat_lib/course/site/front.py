"""The pages around the chapters: the front page, the map and the glossary. All from the sources, as Markdown."""

from __future__ import annotations

from html import escape

from nanochat_lib.course import coursemap, glossary
from nanochat_lib.course.coursemap import Stop

VIEWS = {
    "learner": "Every chapter as you open it, with its figures. Solve the exercises in your own copy: "
    "`bash scripts/lab.sh` opens it in JupyterLab.",
    "instructor": "**For instructors only:** answers, hidden cases, and what each wrong answer is told.",
}
FAST = (
    "This site was made in fast mode: runs are short, so numbers in outputs differ from those in the text. "
    "`nanochat course site` without `--fast` makes the real one."
)


def index(title: str, stops: list[Stop], built: set[str], view: str, fast: bool) -> str:
    """The front page, with the table of contents. `built`: stems of the chapters that are pages of this site."""
    lines = [f"# {title}", "", VIEWS[view], ""]
    lines += [f":::{{note}}\n{FAST}\n:::", ""] if fast else []
    lines += ["[The map of the course](map.md) · [Glossary](glossary.md)", ""]
    for stop in stops:
        if stop.stem in built:
            size = f" *{stop.exercises} exercises, {stop.minutes} minutes.*" if stop.exercises else ""
            lines += [f"**[{stop.number} {stop.short}](chapters/{stop.stem}.ipynb).** {stop.question}{size}", ""]
    entries = [f"{stop.number} {stop.short} <chapters/{stop.stem}>" for stop in stops if stop.stem in built]
    lines += ["```{toctree}", ":hidden:", "", *entries, "Map of the course <map>", "Glossary <glossary>", "```", ""]
    return "\n".join(lines)


def map_page(stops: list[Stop], built: set[str]) -> str:
    """The map as a drawing whose titles are links, and as a table."""
    names = {stop.number: link(stop, built) for stop in stops}
    lines = ["# Map of the course", ""]
    lines += [
        "Arcs lead from each chapter to the earlier ones that it uses; a bar is the time of its exercises. Small "
    ]
    lines += ["print names the files of `nanochat_lib` that you write parts of.", ""]
    lines += ["```{raw} html", drawing(stops, built), "```", "", "## As a table", ""]
    lines += ["| chapter | uses | exercises | minutes | builds in `nanochat_lib` |", "|---|---|--:|--:|---|"]
    for stop in stops:
        if stop.exercises:
            parts = [
                names[n] + (f" ({', '.join(f'`{w}`' for w in what)})" if what else "") for n, what in stop.uses.items()
            ]
        else:
            parts = ["all of them"] if stop.uses else []
        cells = [names[stop.number], ", ".join(parts), stop.exercises or "", stop.minutes or ""]
        cells.append(", ".join(f"`{room}`" for room in stop.rooms))
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join([*lines, ""])


def drawing(stops: list[Stop], built: set[str]) -> str:
    """The map as inline SVG with its words; it takes the page's colours."""
    from nanochat_lib.report.plots import to_svg

    svg = to_svg(coursemap.figure([*stops], link=lambda s: f"chapters/{s.stem}.html" if s.stem in built else ""), "map")
    svg = svg.replace("<svg ", f'<svg aria-label="{escape(coursemap.words(stops))}" ', 1)
    return f'<div class="course-wide">{svg}</div>'


def link(stop: Stop, built: set[str]) -> str:
    name = f"{stop.number} {stop.short}"
    return f"[{name}](chapters/{stop.stem}.ipynb)" if stop.stem in built else name


def glossary_page(stops: list[Stop], built: set[str]) -> str:
    """All terms, each with an address of its own and the chapter that introduces it."""
    chapters = {stop.topic: link(stop, built) for stop in stops}
    lines = [
        "# Glossary",
        "",
        "The field's terms as this course uses them, each with the chapter that introduces it.",
        "",
    ]
    for term in glossary.terms():
        where = f" *Chapter {chapters[term.chapter]}.*" if term.chapter in chapters else ""
        lines += [f"({term.anchor})=", f"**{term.name}**", f": {term.text}{where}", ""]
    return "\n".join(lines)


def chapter_line(stop: Stop, stops: list[Stop], built: set[str], slides: bool, solved: bool) -> str:
    """What stands below a chapter's title."""
    by_number = {other.number: other for other in stops}
    parts = [f"Chapter {stop.number}"]
    if stop.exercises:
        parts.append(f"{stop.exercises} exercises, {stop.points} points, {stop.minutes} minutes")
        used = [link(by_number[number], built).replace("chapters/", "") for number in stop.uses]
        parts += [f"uses {', '.join(used)}"] if used else []
    parts.append(f"`{'solutions' if solved else 'chapters'}/{stop.stem}.ipynb`")
    if slides:
        parts.append(f'<a href="../slides/{stop.stem}.html">slides</a>')
    return " · ".join(parts)
