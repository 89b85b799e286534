"""`nanochat course site`: chapters executed, turned into pages for learners and for instructors, and looked through."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

from nanochat_lib.course import coursemap, glossary, rules
from nanochat_lib.course.build import build, sources
from nanochat_lib.course.coursemap import Stop
from nanochat_lib.course.grammar import Cell
from nanochat_lib.course.mutants import pick
from nanochat_lib.course.site import book, front, pages, slides, verify, wrong
from nanochat_lib.course.site.executed import Wanted, executed
from nanochat_lib.errors import UserError
from nanochat_lib.progress import Progress

WORK = Path("build") / "course"  # executed notebooks and what the pages are made from; never handed out
TITLE = "Nanochat in JAX"
MARK = ".nanochat-course-site"  # in every site's folder: only such a folder is ever replaced
SHOWN = 12  # problems in one message


def build_site(
    root: Path, target: Path, views: Iterable[str] = ("learner", "instructor"), fast: bool = False,
    wanted: Iterable[str] = (), reuse: bool = False,
) -> dict[str, Path]:  # fmt: skip
    """Writes target/learner and target/instructor; returns view -> its front page.

    `wanted` chapters only ("01", "muon"), else all. Chapters run in `root`/build/course and are kept there. UserError
    for a chapter that is out of date or fails, and for anything in the pages that must not be there. A view's pages are
    put in their place when they are whole and looked through; until then an earlier site stays as it is.
    """
    book.need_packages()
    views = list(views)
    for view in views:
        check_target(target / view)
    build(check=True, root=root)
    chapters = sources(root)
    stems = [pick(name, list(chapters)) for name in wanted] or list(chapters)
    work = root / WORK
    runs = {
        view: [Wanted(root / folder / f"{stem}.ipynb", view == "instructor", fast) for stem in sorted(set(stems))]
        for view, folder in (("learner", "chapters"), ("instructor", "solutions"))
        if view in views
    }
    notebooks = executed([one for group in runs.values() for one in group], work / "executed", reuse)
    found = {}
    for view, group in runs.items():
        shown = {one.path.stem: notebooks[one] for one in group}
        found[view] = one_view(root, target / view, view, shown, chapters, fast, reuse)
    return found


def one_view(
    root: Path, target: Path, view: str, notebooks: dict[str, object], chapters: dict[str, list[Cell]], fast: bool,
    reuse: bool,
) -> Path:  # fmt: skip
    """The pages of one view in the folder `target`."""
    source, solved = root / WORK / view, view == "instructor"
    stops = coursemap.course_map(root)
    tried = [stem for stem in notebooks if (root / rules.CHECKS / f"{rules.topic(stem)}.py").exists()] if solved else []
    extras = wrong_answers(root, tried, reuse) if tried else {}
    made = root / WORK / f"{view}.html"
    for folder in (source, made):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
    book.write_settings(source, TITLE + (": instructor's view" if solved else ""))
    decks = {stem: notebook for stem, notebook in notebooks.items() if slides.has_slides(notebook)}
    write_pages(source, stops, notebooks, view, fast, set(decks), extras)
    book.make_html(source, made, root / WORK / f"{view}.doctrees")
    slides.add_slides(decks, made / "slides", mathjax="../_static")
    problems = verify.problems(made)
    problems += [] if solved else verify.leaks(made, chapters)
    if problems:
        shutil.rmtree(made)
        more = [f"and {len(problems) - SHOWN} more"] if len(problems) > SHOWN else []
        raise UserError(f"site, {view}: " + "".join(f"\n  {line}" for line in problems[:SHOWN] + more))
    (made / MARK).touch()
    replace(made, target)
    return target / "index.html"


def write_pages(
    source: Path, stops: list[Stop], notebooks: dict[str, object], view: str, fast: bool, decks: set[str],
    extras: dict[str, dict[str, str]],
) -> None:  # fmt: skip
    """The Markdown and notebooks that Sphinx reads."""
    import nbformat

    built = set(notebooks)
    texts = {
        "index.md": front.index(TITLE, stops, built, view, fast),
        "map.md": front.map_page(stops, built),
        "glossary.md": front.glossary_page(stops, built),
    }
    for name, text in texts.items():
        (source / name).write_text(text, encoding="utf-8")
    (source / "chapters").mkdir()
    for stop in stops:
        if stop.stem in built:
            line = front.chapter_line(stop, stops, built, stop.stem in decks, view == "instructor")
            made = pages.page(notebooks[stop.stem], stop.stem, source, line, extras.get(stop.stem))
            nbformat.write(made, source / "chapters" / f"{stop.stem}.ipynb")


def wrong_answers(root: Path, stems: list[str], reuse: bool) -> dict[str, dict[str, str]]:
    """Chapter -> HTML by the id of each exercise's hidden cell."""
    found: dict[str, dict[str, str]] = {}
    with Progress(len(stems), "trying wrong answers", unit="chapter") as progress:
        for stem in stems:
            progress.update(0, now=stem)
            answers = wrong.told(stem, root, root / WORK / "executed", reuse)
            cells = json.loads((root / "solutions" / f"{stem}.ipynb").read_text(encoding="utf-8"))["cells"]
            found[stem] = {
                cell["id"]: wrong.as_html(answers[id])
                for cell in cells
                if "hidden" in cell["metadata"].get("tags", [])
                for id in answers
                if f'hidden("{id}"' in "".join("".join(cell["source"]).split())
            }
            progress.update(1)
    return found


def check_target(folder: Path) -> None:
    """UserError for a place that holds something that is not a site."""
    if folder.exists() and not folder.is_dir():
        raise UserError(f"{folder} is a file; name another folder")
    if folder.exists() and any(folder.iterdir()) and not (folder / MARK).exists():
        raise UserError(f"{folder} is not empty and holds no site; name another folder")


def replace(made: Path, target: Path) -> None:
    """Puts a finished site in the place of an earlier one; the copy between disks happens before anything goes."""
    target.parent.mkdir(parents=True, exist_ok=True)
    new, old = (target.with_name(f".{target.name}.{word}") for word in ("new", "old"))
    for left in (new, old):  # of a start that was killed here
        shutil.rmtree(left, ignore_errors=True)
    shutil.move(made, new)
    if target.exists():
        target.rename(old)
    new.rename(target)
    shutil.rmtree(old, ignore_errors=True)


def print_site(target: str, view: str, fast: bool, chapters: str, reuse: bool) -> None:
    """Builds, and says where the front pages are."""
    from nanochat_lib.course.parameters import project_root

    root = project_root()
    if problems := glossary.problems(root):
        raise UserError("site: " + "".join(f"\n  {line}" for line in problems[:SHOWN]))
    views = ("learner", "instructor") if view == "both" else (view,)
    wanted = [name.strip() for name in chapters.split(",") if name.strip()]
    for name, page in build_site(root, Path(target), views, fast, wanted, reuse).items():
        print(f"{name}: {page}")
