"""Slides from cells tagged `slide`, by nbconvert's slides converter and reveal.js.

Each tagged cell is a slide. Of a code cell only what it showed is on it, below the heading of its section. The text
between two of them becomes the speaker's notes (key S), with the minutes of the exercises that stand there.
"""

from __future__ import annotations

import base64
import re
import shutil
from collections.abc import Iterable
from html import escape
from pathlib import Path

from nanochat_lib.course.site import book
from nanochat_lib.course.site.executed import Wanted, executed
from nanochat_lib.errors import UserError

FOLDER = Path(__file__).parent
HEIGHT = 500  # pixels for the figures of a slide, together
HEADING = re.compile(r"^#+ +(?!Exercise)(.+)$", re.MULTILINE)
INNER_LINK = re.compile(r"(?<!!)\[([^\]]*)\]\((?!\w+:)[^)]*\)")  # to a place of the chapter that the slides lack
# Lines that mine(…) and explore(…) print for those who work in the notebook.
FOR_LEARNERS = re.compile(r"^(?:[\w.]+: the library's.*|\(drawn with .*\))\n?", re.MULTILINE)
# What the slides load; reveal.js's other themes fetch fonts from elsewhere.
REVEAL = (
    "LICENSE",
    "dist/reveal.js",
    "dist/reveal.css",
    "dist/theme/white.css",
    "dist/theme/fonts",
    "plugin/notes/notes.js",
)


def has_slides(notebook: object) -> bool:
    return any("slide" in cell.metadata.get("tags", []) for cell in notebook.cells)


def add_slides(notebooks: dict[str, object], target: Path, mathjax: str = "") -> list[Path]:
    """Writes target/<chapter>.html for each executed notebook, with reveal.js beside them; returns their paths.

    `mathjax` is the folder, seen from `target`, where MathJax lies already; "" puts it beside the slides.
    """
    found = []
    for stem, notebook in notebooks.items():
        target.mkdir(parents=True, exist_ok=True)
        path = target / f"{stem}.html"
        path.write_text(deck(notebook, stem, f"{mathjax}/{book.MATHJAX}".lstrip("/")), encoding="utf-8")
        found.append(path)
    if found:
        add_reveal(target / "reveal")
        if not mathjax:
            book.add_mathjax(target)
    return found


def add_reveal(target: Path) -> None:
    """Puts reveal.js into the folder `target`."""
    shipped = book.package_folder("sphinx_revealjs", "_static/revealjs")
    for name in REVEAL:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        if (shipped / name).is_dir():
            shutil.copytree(shipped / name, target / name, dirs_exist_ok=True)
        else:
            shutil.copy(shipped / name, target / name)


def deck(notebook: object, stem: str, mathjax: str) -> str:
    """The HTML of one chapter's slides."""
    from nbconvert import SlidesExporter

    exporter = SlidesExporter(
        template_name="course_slides", extra_template_basedirs=[str(FOLDER)], reveal_url_prefix="reveal",
        reveal_theme="white",
    )  # fmt: skip
    cells = [convert(cell, stem) for cell in arranged(notebook)]
    made = type(notebook)(notebook)
    made["cells"] = cells
    resources = {
        "metadata": {"name": title(notebook) or stem},
        "course": {
            "mathjax": mathjax,
            "mathjax_settings": deck_settings(),
            "css": (FOLDER / "slides.css").read_text(encoding="utf-8"),
        },
    }
    return exporter.from_notebook_node(made, resources)[0]


def deck_settings() -> dict:
    """MathJax's settings where Markdown's own signs for formulas are still in the page."""
    signs = {"inlineMath": [["$", "$"]], "displayMath": [["$$", "$$"]]}
    return book.MATHJAX_SETTINGS | {"tex": book.MATHJAX_SETTINGS["tex"] | signs}


def title(notebook: object) -> str:
    return next((m[1] for cell in notebook.cells if (m := re.match(r"# (.+)", cell.source))), "")


def arranged(notebook: object) -> list:
    """The cells of the slides in order, each with nbconvert's slide_type."""
    import nbformat

    new, cells, heading, notes = nbformat.v4, [], "", []

    def end_notes() -> None:
        if notes and cells:
            cell = new.new_markdown_cell("\n\n".join(notes))
            cell.metadata["slideshow"] = {"slide_type": "notes"}
            cells.append(cell)
        notes.clear()

    for cell in notebook.cells:
        tags = cell.metadata.get("tags", [])
        if cell.cell_type == "markdown":
            heading = next(iter(HEADING.findall(cell.source)), heading)
        if "slide" in tags:
            end_notes()
            kind = {"slideshow": {"slide_type": "slide"}}
            if cell.cell_type == "code":
                cells.append(new.new_markdown_cell(f"## {heading}", metadata=kind))
                cells.append(new.new_code_cell(cell.source, id=cell.id, outputs=cell.outputs))
                if cell.outputs:
                    cells[-1].metadata["transient"] = {"remove_source": True}
            else:
                own = HEADING.search(cell.source) or cell.source.startswith(">")  # a box is a slide by itself
                text = cell.source if own else f"## {heading}\n\n{cell.source}"
                cells.append(new.new_markdown_cell(text, id=cell.id, metadata=kind))
        elif cell.cell_type == "markdown":
            notes.append(cell.source)
        elif "exercise" in tags:
            notes.append(f"Exercise {cell.metadata['id']}: {cell.metadata['minutes']} minutes.")
    end_notes()
    return cells


def convert(cell: object, stem: str) -> object:
    """A cell whose pictures are HTML with their words, which nbconvert leaves out; without lines for learners."""
    import nbformat

    if cell.cell_type == "markdown":
        cell.source = INNER_LINK.sub(r"\1", cell.source)
    for out in cell.get("outputs", []):
        if out.output_type == "stream":
            out.text = FOR_LEARNERS.sub("", out.text)
    if cell.cell_type == "code":
        cell.outputs = [out for out in cell.outputs if out.get("text", "filled").strip()]
    pictures = sum("image/png" in out.get("data", {}) for out in cell.get("outputs", []))
    for i, out in enumerate(cell.get("outputs", [])):
        data = out.get("data", {})
        if "image/png" in data:
            words = out.metadata.get("image/png", {}).get("alt", "").strip()
            if not words:
                raise UserError(f'{stem}, cell {cell.id}: a figure without words for it; use show(figure, alt="…")')
            picture = base64.b64encode(base64.b64decode(data["image/png"])).decode()
            size = f"max-height:{HEIGHT // pictures}px"
            source = f"data:image/png;base64,{picture}"
            html = f'<img class="course-figure" style="{size}" alt="{escape(words)}" src="{source}">'
            cell.outputs[i] = nbformat.v4.new_output("display_data", {"text/html": html})
    return cell


def print_slides(chapter: str, target: str, fast: bool, reuse: bool) -> None:
    """Makes the slides of one chapter, or of all that have any, and says where they are."""
    import nbformat

    from nanochat_lib.course.build import build, sources
    from nanochat_lib.course.mutants import pick
    from nanochat_lib.course.parameters import project_root
    from nanochat_lib.course.site import verify
    from nanochat_lib.course.site.build import WORK

    book.need_packages()
    root = project_root()
    build(check=True, root=root)
    chapters = sources(root)
    stems: Iterable[str] = [pick(chapter, list(chapters))] if chapter else chapters
    paths = {stem: root / "chapters" / f"{stem}.ipynb" for stem in stems}
    tagged = [stem for stem, path in paths.items() if has_slides(nbformat.read(path, 4))]
    if not tagged:
        raise UserError(f'no cell of {", ".join(paths)} is tagged slide; add tags=["slide"] to cells in solutions/')
    ran = executed([Wanted(paths[stem], False, fast) for stem in tagged], root / WORK / "executed", reuse)
    made = add_slides({one.path.stem: notebook for one, notebook in ran.items()}, Path(target))
    if problems := verify.problems(Path(target)) + verify.leaks(Path(target), chapters):
        for path in made:
            path.unlink()
        raise UserError("slides: " + "".join(f"\n  {line}" for line in problems[:12]))
    for path in made:
        print(path)
