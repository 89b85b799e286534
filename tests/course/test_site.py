"""The site: what is looked for in finished pages, figures and words, outputs kept by hash, a small course built."""

from __future__ import annotations

import base64
import importlib.util
from pathlib import Path
from types import SimpleNamespace

import demo
import nbformat
import pytest
from nbformat import v4

from nanochat_lib.course.build import build, sources
from nanochat_lib.course.grammar import HEADER, parse
from nanochat_lib.course.site import book, executed, front, pages, verify
from nanochat_lib.course.site.build import MARK, build_site, check_target, replace
from nanochat_lib.errors import UserError

PNG = (  # one grey pixel
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAAAAAA6fptVAAAACklEQVR4nGNoAAAAggCBd81ytgAAAABJRU5ErkJggg=="
)
CELLS = parse(demo.CHAPTER, "x.py")


def notebook(*cells):
    made = v4.new_notebook(cells=list(cells))
    made.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3"}
    return made


def figure(alt: str = "a grey point"):
    return v4.new_output("display_data", {"image/png": PNG}, metadata={"image/png": {"alt": alt}})


def site(tmp_path: Path, body: str, name: str = "index.html", head: str = "") -> Path:
    path = tmp_path / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"<html><head>{head}</head><body>{body}</body></html>", encoding="utf-8")
    return tmp_path


# --- Links, words, other hosts ----------------------------------------------------------------------------------------


def test_a_good_site_has_no_problems(tmp_path):
    site(tmp_path, '<h1 id="top">x</h1><a href="../index.html#end">e</a><svg aria-hidden="true"></svg>', "sub/a.html")
    (tmp_path / "style.css").write_text("a { background: url(data:image/png;base64,x) }", encoding="utf-8")
    (tmp_path / "a b.png").write_bytes(b"")
    site(
        tmp_path,
        '<a href="sub/a.html#top">in</a><a href="https://arxiv.org/abs/1?x=1#2">out</a><a href="#end">here</a>'
        '<a href="#a%C2%B2">as written</a><h2 id="a%C2%B2">a²</h2><a href="#b%C2%B2">decoded</a><h2 id="b²">b²</h2>'
        '<a href="mailto:a@b.org">m</a><p id="end"></p><img src="a%20b.png" alt="words"><svg><title>t</title></svg>',
        head='<link rel="stylesheet" href="style.css?v=1"><link rel="canonical" href="https://a.org/">',
    )
    assert verify.problems(tmp_path) == []


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ('<a href="gone.html">x</a>', "the link gone.html leads to no file"),
        ('<a href="index.html#gone">x</a>', "the link index.html#gone leads to no place on that page"),
        ('<a href="#gone">x</a>', "the link #gone leads to no place"),
        ('<a href="sub">x</a>', "the link sub leads to a folder"),
        ('<a href="https:/arxiv">x</a>', "the link https:/arxiv is no web address"),
        ('<svg><a xlink:href="gone.html">x</a><title>t</title></svg>', "the link gone.html leads to no file"),
        ('<script src="https://cdn.org/a.js"></script>', "loads https://cdn.org/a.js, which another host has"),
        ('<script src="//cdn.org/a.js"></script>', "loads //cdn.org/a.js, which another host has"),
        ('<img src="gone.png" alt="words">', "loads gone.png, which does not exist"),
        ("<style>@import 'https://fonts.org/a.css';</style>", "loads https://fonts.org/a.css"),
        ('<p style="background: url(gone.png)">x</p>', "loads gone.png, which does not exist"),
        ('<img src="data:image/png;base64,x" data-cell="muon-duel">', "words for it: cell muon-duel"),
        ('<img src="data:image/png;base64,x" alt=" ">', "a picture without words"),
        ('<svg><path d="M0 0"/></svg>', "an <svg> without aria-label or title"),
    ],
)
def test_every_kind_of_problem_is_named_with_its_page(tmp_path, body, words):
    (tmp_path / "sub").mkdir()
    (line,) = verify.problems(site(tmp_path, body))
    assert line.startswith("index.html: ") and words in line


def test_style_sheets_are_looked_through_and_a_picture_named_by_its_file_has_no_words(tmp_path):
    site(tmp_path, '<img src="a.png" alt="a.png">')
    (tmp_path / "a.png").write_bytes(b"")
    (tmp_path / "s.css").write_text("@font-face { src: url('https://fonts.org/f.woff2') }", encoding="utf-8")
    assert len(verify.problems(tmp_path)) == 2
    assert any(line.startswith("s.css: loads https://fonts.org/f.woff2") for line in verify.problems(tmp_path))


def test_a_folder_without_pages_is_no_site(tmp_path):
    assert verify.problems(tmp_path) == [f"{tmp_path} holds no page"]


# --- Leaks ------------------------------------------------------------------------------------------------------------

ANSWER = "if i + 1 < len(tokens) and (tokens[i], tokens[i + 1]) == pair:"


@pytest.mark.parametrize(
    "body",
    [
        "<pre><span>if</span> <span>i</span> <span>+</span> <span>1</span> &lt; len(tokens) <b>and</b> "
        "(tokens[i],\n tokens[i <i>+</i> 1]) == pair:</pre>",
        f'<img alt="{ANSWER.replace("<", "&lt;")}" src="x">',
        f"<!-- {ANSWER} -->",
        f"<script>const answer = `{ANSWER}`</script>",
        '<pre>example("overlap", ([7, 7, 7], (7, 7), 9), [9, 7]),</pre>',
    ],
)
def test_an_answer_in_a_page_is_found_whatever_stands_between(tmp_path, body):
    (line,) = verify.leaks(site(tmp_path, body, "chapters/a.html"), {demo.STEM: CELLS})
    assert line.startswith("chapters/a.html shows an answer or hidden text of 03_pairs")


def test_an_answer_in_another_file_is_found_and_a_clean_page_is_not(tmp_path):
    site(tmp_path, "<pre>merge(tokens, pair, new): raise NotImplementedError</pre>")
    assert verify.leaks(tmp_path, {demo.STEM: CELLS}) == []
    (tmp_path / "searchindex.js").write_text(f'Search.setIndex("{ANSWER}")', encoding="utf-8")
    assert verify.leaks(tmp_path, {demo.STEM: CELLS})[0].startswith("searchindex.js shows")


# --- Pages ------------------------------------------------------------------------------------------------------------


def test_a_page_has_figures_as_files_with_their_words(tmp_path):
    cell = v4.new_code_cell("show(fig)", id="demo-fig", outputs=[figure('a "grey" point')])
    setup = v4.new_code_cell("import math", id="demo-setup", metadata={"tags": ["setup"]})
    head = {"tags": ["exercise"], "id": "demo.f", "points": 2, "minutes": 15, "level": 3}
    exercise = v4.new_code_cell("def f(): ...", id="demo-f", metadata=head)
    hidden = v4.new_code_cell("hidden()", id="demo-h", metadata={"tags": ["hidden"]})
    cells = [v4.new_markdown_cell("# Demo\n\ntext"), setup, cell, exercise, hidden, v4.new_raw_cell("gone")]
    made = pages.page(notebook(*cells), "00_demo", tmp_path, "the line", {"demo-h": "<p>told</p>"})
    html = made.cells[2].outputs[0]["data"]["text/html"]
    assert (
        'alt="a &quot;grey&quot; point"' in html and 'data-cell="demo-fig"' in html and 'width="1" height="1"' in html
    )
    (picture,) = (tmp_path / pages.FIGURES).iterdir()
    assert picture.read_bytes() == base64.b64decode(PNG) and f"../{pages.FIGURES}/{picture.name}" in html
    assert made.cells[0].source.split("\n") == ["# Demo", "", "{.course-line}", "the line", "", "text"]
    assert made.cells[1].metadata["tags"] == ["hide-input"] and made.cells[5].metadata["tags"] == ["course-hidden"]
    assert "<code>demo.f</code> · 2 points · 15 minutes · hard" in made.cells[3].source
    assert made.cells[5].outputs[0]["data"]["text/html"] == "<p>told</p>" and len(made.cells) == 6


@pytest.mark.parametrize("alt", ["", "  "])
def test_a_figure_without_words_is_refused_by_its_cell(tmp_path, alt):
    cell = v4.new_code_cell("show(fig)", id="demo-fig", outputs=[figure(alt)])
    with pytest.raises(UserError, match="00_demo, cell demo-fig: a figure without words"):
        pages.page(notebook(v4.new_markdown_cell("# D"), cell), "00_demo", tmp_path, "")
    image = v4.new_markdown_cell("![ ](a.png)", id="demo-md")
    with pytest.raises(UserError, match="00_demo, cell demo-md: an image without words"):
        pages.page(notebook(image), "00_demo", tmp_path, "")


def test_signs_that_only_myst_knows_stay_text():
    assert pages.plain_markdown("% a\n(x)=\n+++\n:::{n}\na % b") == "\\% a\n\\(x)=\n\\+++\n\\:::{n}\na % b"
    assert pages.plain_markdown("```\n% a\n```\n% b") == "```\n% a\n```\n\\% b"


# --- Outputs kept by hash ---------------------------------------------------------------------------------------------


def small_course(tmp_path: Path, code: str = "print(1)", text: str = "words") -> executed.Wanted:
    path = tmp_path / "chapters" / "00_demo.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(notebook(v4.new_markdown_cell(text, id="a"), v4.new_code_cell(code, id="b")), path)
    return executed.Wanted(path, solved=False, fast=True)


@pytest.fixture
def runs(monkeypatch):
    """Executions are counted, not made; each shows its number."""
    count = []

    def execute(path, **options):
        count.append(options)
        made = nbformat.read(path, 4)
        place = (options["given"] or {}).get("run_dir", "")
        made.cells[-1].outputs = [v4.new_output("stream", text=f"run {len(count)}" + (f" in {place}" if place else ""))]
        return SimpleNamespace(notebook=made, seconds=1.0, errors=[])

    monkeypatch.setattr(executed, "execute", execute)
    monkeypatch.setattr(executed, "library", lambda root: (root / "lib").read_text() if (root / "lib").exists() else "")
    return count


def shown(tmp_path: Path, one: executed.Wanted, reuse: bool = False) -> tuple[str, str]:
    made = executed.executed([one], tmp_path / "keep", reuse)[one]
    return made.cells[0].source, made.cells[1].outputs[0]["text"]


def test_a_chapter_runs_again_only_when_its_code_or_the_library_changed(tmp_path, runs, capfd):
    assert shown(tmp_path, small_course(tmp_path)) == ("words", "run 1")
    assert shown(tmp_path, small_course(tmp_path, text="other words")) == ("other words", "run 1")
    assert shown(tmp_path, small_course(tmp_path, code="print(2)")) == ("words", "run 2")
    (tmp_path / "lib").write_text("changed")
    one = small_course(tmp_path, code="print(2)")
    assert shown(tmp_path, one, reuse=True) == ("words", "run 2")
    assert shown(tmp_path, one) == ("words", "run 3")
    assert shown(tmp_path, small_course(tmp_path, code="print(3)"), reuse=True) == ("words", "run 4")
    assert len(list((tmp_path / "keep").iterdir())) == 1  # what no longer fits is gone
    assert "executing: 1/1 notebooks" in capfd.readouterr().err
    assert runs[0] == {"strict": False, "fast": True, "limit": executed.LIMIT, "given": {}}


def test_a_notebook_that_trains_gets_an_empty_folder_and_in_fast_mode_the_smallest_preset(tmp_path, runs):
    one = small_course(tmp_path, code='preset: str = "cpu"\nrun_dir: str = ""')
    text = one.path.read_text(encoding="utf-8").replace('"metadata": {},', '"metadata": {"tags": ["parameters"]},')
    one.path.write_text(text, encoding="utf-8")
    (tmp_path / "runs" / "cpu-smoke").mkdir(parents=True)
    (tmp_path / "runs" / "cpu-smoke" / "old").write_text("x")
    made = executed.executed([one, executed.Wanted(one.path, False, False)], tmp_path / "keep")
    assert made[one].cells[1].outputs[0]["text"] == "run 1 in runs/cpu-smoke"
    folder = str(tmp_path / "runs" / "cpu")
    assert [run["given"] for run in runs] == [
        {"preset": "cpu-smoke", "run_dir": f"{folder}-smoke"},
        {"run_dir": folder},
    ]
    assert not (tmp_path / "runs" / "cpu-smoke").exists()


def test_learners_and_solved_notebooks_and_fast_and_full_runs_are_kept_apart(tmp_path, runs):
    one = small_course(tmp_path)
    for other in (one, executed.Wanted(one.path, True, True), executed.Wanted(one.path, False, False)):
        executed.executed([other], tmp_path / "keep")
    assert [(r["strict"], r["fast"]) for r in runs] == [(False, True), (True, True), (False, False)]


def test_a_cell_that_fails_is_named_and_not_kept_but_a_stub_may(tmp_path, monkeypatch):
    one = small_course(tmp_path)
    stub = SimpleNamespace(id="demo-f", metadata={"tags": ["exercise"]})
    other = SimpleNamespace(id="demo-x", metadata={})
    errors = [(stub, "NotImplementedError: "), (other, "ValueError: no\nmore")]
    bad = SimpleNamespace(notebook=nbformat.read(one.path, 4), seconds=1.0, errors=errors)
    monkeypatch.setattr(executed, "execute", lambda *a, **k: bad)
    with pytest.raises(UserError, match="00_demo, cell demo-x: ValueError: no$"):
        executed.executed([one], tmp_path / "keep")
    assert not list((tmp_path / "keep").iterdir())
    assert (
        len(executed.failures(one, bad)) == 1
        and len(executed.failures(executed.Wanted(one.path, True, True), bad)) == 2
    )


def test_the_hash_of_the_library_sees_its_code_but_not_the_sites(tmp_path):
    before = executed.library(tmp_path)
    (tmp_path / "nanochat_lib" / "course" / "site").mkdir(parents=True)
    (tmp_path / "nanochat_lib" / "course" / "site" / "book.py").write_text("x")
    assert executed.library(tmp_path) == before
    (tmp_path / "nanochat_lib" / "bpe.py").write_text("x")
    assert executed.library(tmp_path) != before


# --- The whole --------------------------------------------------------------------------------------------------------

TAIL = """
# %% tags=["slide"] id="drawn"
from matplotlib.figure import Figure

from nanochat_lib.course import show

drawn = Figure(figsize=(1, 1))
drawn.subplots().plot([1, 2])
show(drawn, alt="A line that rises & rises")

# %% [markdown] id="formula"
# The rule is $a < b$, see [the checks](#the-rule).
"""


@pytest.fixture(scope="module")
def course(tmp_path_factory):
    """Two chapters: the demo with a figure and a slide, and one without exercises."""
    root = tmp_path_factory.mktemp("course")
    demo.write(root, demo.CHAPTER + TAIL)
    text = '# %% [markdown] id="title"\n# # The end\n#\n# What is next?\n\n# %% id="one"\nprint("some" + "thing")\n'
    (root / "solutions" / "09_end.py").write_text(f"{HEADER}\n{text}", encoding="utf-8")
    build(root=root)
    return root


@pytest.fixture
def packages():
    missing = [name for name in book.NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        pytest.skip(f"needs the extra site: {', '.join(missing)}")


@pytest.mark.usefixtures("packages")
def test_both_views_of_a_small_course(course, tmp_path, capfd):
    made = build_site(course, tmp_path / "site", fast=True)
    assert list(made) == ["learner", "instructor"] and all(path.exists() for path in made.values())
    learner, instructor = (verify.read(made[view].parent / "chapters" / "03_pairs.html") for view in made)
    text, more = "".join(learner.text), "".join(instructor.text)
    assert "not attempted yet" in text and "raise NotImplementedError" in text and ANSWER not in text
    assert ANSWER in more and "What 3 wrong answers are told" in more and "wrong answers" not in text
    assert more.count("expected 7, got 9") > 1  # in the hidden cell, and in what the wrong answer is really told
    for view, path in made.items():
        root = path.parent
        assert verify.problems(root) == []
        assert "A line that rises & rises" in text and "2 points" in text
        index = "".join(verify.read(path).text)
        assert "What is next?" in index and ("For instructors only" in index) == (view == "instructor")
        assert "fast mode" in index
        assert {"map.html", "glossary.html", "search.html", "searchindex.js"} <= {p.name for p in root.iterdir()}
        assert "../slides/03_pairs.html" in learner.links and (root / "slides" / "03_pairs.html").exists()
        assert "uses 03" in "".join(verify.read(root / "map.html").text)
    assert any(url.split("?")[0].endswith(book.MATHJAX) for url in learner.loads)
    assert "ValueError" not in capfd.readouterr().err
    # The second time nothing is executed; an answer that a cell's output shows is found, and the earlier site stays.
    kept = course / "build" / "course" / "executed"
    (planted,) = kept.glob("09_end.learner.fast.*.ipynb")
    planted.write_text(planted.read_text(encoding="utf-8").replace("something\\n", ANSWER + "\\n"), encoding="utf-8")
    with pytest.raises(UserError, match=r"chapters/09_end\.html shows an answer or hidden text of 03_pairs"):
        build_site(course, tmp_path / "site", views=("learner",), fast=True)
    assert made["learner"].exists() and verify.leaks(made["learner"].parent, sources(course)) == []
    assert not (course / "build" / "course" / "learner.html").exists() and made["instructor"].exists()
    assert "executing" not in capfd.readouterr().err


def test_a_missing_package_is_one_line_with_the_command(monkeypatch, tmp_path):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match="the site needs sphinx, .*NANOCHAT_EXTRAS=site bash scripts/setup.sh"):
        build_site(tmp_path, tmp_path / "site")


def test_a_chapter_that_is_out_of_date_or_unknown_is_refused(course, tmp_path, monkeypatch):
    monkeypatch.setattr(book, "need_packages", lambda: None)
    with pytest.raises(UserError, match="no chapter is called '7'"):
        build_site(course, tmp_path / "site", wanted=["7"])
    page = course / "chapters" / "09_end.ipynb"
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace("What is", "Who is"), encoding="utf-8")
    with pytest.raises(UserError, match="09_end.ipynb differs from its source"):
        build_site(course, tmp_path / "site")
    page.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("name", ["thesis.tex", "index.html"])
def test_a_folder_with_other_files_is_left_alone(course, tmp_path, monkeypatch, name):
    monkeypatch.setattr(book, "need_packages", lambda: None)
    (tmp_path / "learner").mkdir()
    (tmp_path / "learner" / name).write_text("years")
    with pytest.raises(UserError, match="holds no site; name another folder"):  # before anything is executed
        build_site(course, tmp_path, views=("learner",))
    assert (tmp_path / "learner" / name).read_text() == "years"
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="is a file"):
        check_target(tmp_path / "file")


def test_a_finished_site_takes_the_place_of_an_earlier_one_also_after_a_kill(tmp_path):
    target, made = tmp_path / "site" / "learner", tmp_path / "made"
    for text in ("first", "second", "third"):
        made.mkdir()
        (made / MARK).touch()
        (made / f"{text}.html").write_text(text)
        for word in ("new", "old"):  # what a start that was killed while it replaced has left
            (tmp_path / "site" / f".learner.{word}" / "half").mkdir(parents=True)
        check_target(target)
        replace(made, target)
        assert sorted(p.name for p in target.iterdir()) == [MARK, f"{text}.html"] and not made.exists()
        assert [p.name for p in (tmp_path / "site").iterdir()] == ["learner"]


def test_the_settings_are_a_python_file_that_asks_for_nothing_from_elsewhere(tmp_path, monkeypatch):
    monkeypatch.setattr(book, "add_mathjax", lambda folder: None)
    book.write_settings(tmp_path, "A 'title'")
    settings: dict = {}
    exec((tmp_path / "conf.py").read_text(encoding="utf-8"), settings)
    assert settings["html_title"] == "A 'title'" and settings["nb_execution_mode"] == "off"
    assert settings["mathjax_path"] == book.MATHJAX and not settings["html_copy_source"]
    assert "http" not in (tmp_path / "conf.py").read_text(encoding="utf-8")
    assert (tmp_path / "_static" / "site.css").exists()


def test_pages_around_the_chapters_link_only_to_chapters_that_are_there(course):
    from nanochat_lib.course.coursemap import course_map

    stops = course_map(course)
    text = front.index("T", stops, {"09_end"}, "learner", fast=False)
    assert "chapters/09_end.ipynb" in text and "03_pairs" not in text and "fast mode" not in text
    table = front.map_page(stops, {"03_pairs"})
    assert "[03 Byte pairs](chapters/03_pairs.ipynb)" in table and "09_end.ipynb" not in table and "aria-label" in table
    assert sources(course).keys() == {stop.stem for stop in stops}
