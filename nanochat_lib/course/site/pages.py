"""An executed chapter as a page: figures become files with alternative text, and each exercise says what it asks."""

from __future__ import annotations

import base64
import hashlib
import re
import struct
from html import escape
from pathlib import Path

from nanochat_lib.errors import UserError

FIGURES = "_static/figures"
BARE_IMAGE = re.compile(r"!\[\s*\]\(")
# At the start of a line MyST reads these as a comment, a target, a break and a directive; in a chapter they are text.
MYST = re.compile(r"^(?=%|\([\w-]+\)=\s*$|\+\+\+|:::)", re.MULTILINE)
FENCE = re.compile(r"^(```|~~~)")


def page(notebook: object, stem: str, source: Path, line: str, extra: dict[str, str] | None = None) -> object:
    """The notebook that the site shows of an executed one. Figures go to `source`/_static/figures.

    `line` (Markdown) stands below the title, which is the first line; `extra` is HTML to show below a cell, by the
    cell's id. UserError naming the cell for a figure without words.
    """
    import nbformat

    new, cells = nbformat.v4, []
    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "raw":
            continue
        if cell.cell_type == "markdown":
            if BARE_IMAGE.search(cell.source):
                raise UserError(f"{stem}, cell {cell.id}: an image without words for it; write ![what one sees](…)")
            text = plain_markdown(cell.source)
            if not cells:
                heading, _, rest = text.partition("\n")
                text = f"{heading}\n\n{{.course-line}}\n{line}\n{rest}"
            cells.append(new.new_markdown_cell(text, id=cell.id))
            continue
        if "exercise" in tags:
            cells.append(new.new_markdown_cell(exercise_line(cell.metadata)))
        shown = new.new_code_cell(cell.source, id=cell.id, execution_count=cell.execution_count)
        shown.metadata["tags"] = ["hide-input"] if {"setup", "hide-input"} & set(tags) else []
        if "hidden" in tags:
            shown.metadata["tags"].append("course-hidden")
        shown.outputs = [out for o in cell.outputs for out in [output(o, stem, cell.id, source)] if out]
        if extra and cell.id in extra:
            shown.outputs.append(new.new_output("display_data", {"text/html": extra[cell.id], "text/plain": ""}))
        cells.append(shown)
    made = new.new_notebook(cells=cells)
    made.metadata = {"kernelspec": notebook.metadata["kernelspec"], "language_info": {"name": "python"}}
    return made


def plain_markdown(text: str) -> str:
    """Markdown of a chapter for MyST, which knows more signs than JupyterLab: those are text here."""
    lines, fenced = [], False
    for line in text.split("\n"):
        if FENCE.match(line):
            fenced = not fenced
        lines.append(line if fenced else MYST.sub(r"\\", line))
    return "\n".join(lines)


def exercise_line(metadata: dict) -> str:
    """What a learner sees in the status table, above the exercise's cell."""
    minutes, points = metadata["minutes"], metadata["points"]
    level = ("easy", "medium", "hard")[metadata["level"] - 1]
    words = [
        f"<code>{escape(metadata['id'])}</code>",
        f"{points} point{'s' * (points > 1)}",
        f"{minutes} minutes",
        level,
    ]
    return f'<p class="course-exercise">Exercise {" · ".join(words)}</p>'


def output(out: object, stem: str, cell: str, source: Path) -> object | None:
    """One output as the site shows it: PNGs as files, Progress bars and other HTML as they stand."""
    import nbformat

    data = out.get("data", {})
    if "image/png" not in data:
        return out
    words = out.metadata.get("image/png", {}).get("alt", "").strip()
    if not words:
        raise UserError(f'{stem}, cell {cell}: a figure without words for it; use show(figure, alt="…")')
    picture = base64.b64decode(data["image/png"])
    wide, high = png_size(picture)
    name = f"{cell}-{hashlib.sha256(picture).hexdigest()[:8]}.png"
    (source / FIGURES).mkdir(parents=True, exist_ok=True)
    (source / FIGURES / name).write_bytes(picture)
    html = (
        f'<img class="course-figure" src="../{FIGURES}/{name}" alt="{escape(words)}" width="{wide}" height="{high}" '
        f'data-cell="{escape(cell)}">'
    )
    return nbformat.v4.new_output("display_data", {"text/html": html, "text/plain": f"[figure: {words}]"})


def png_size(picture: bytes) -> tuple[int, int]:
    """Width and height in pixels, from the header (PNG specification, section 11.2.2)."""
    return struct.unpack(">II", picture[16:24])
