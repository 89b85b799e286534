"""Slides: which cells become one, what stands on it and in the notes, and a deck that loads nothing from elsewhere."""

from __future__ import annotations

import importlib.util

import pytest
from nbformat import v4
from test_site import figure, notebook

from nanochat_lib.course.grammar import HEADER, parse
from nanochat_lib.course.site import book, slides, verify
from nanochat_lib.errors import UserError

SLIDE = {"tags": ["slide"]}


def chapter():
    stream = v4.new_output("stream", text="pairs.merge: the library's (yours has not passed yet)\nseven pairs\n")
    return notebook(
        v4.new_markdown_cell("# Byte pairs\n\nWhy $a < b$?", id="a", metadata=SLIDE),
        v4.new_markdown_cell("## The rule\n\nLong [words](#the-rule).", id="b"),
        v4.new_code_cell("def f(): ...", id="c", metadata={"tags": ["exercise"], "id": "pairs.f", "minutes": 12}),
        v4.new_code_cell("draw()", id="d", metadata=SLIDE, outputs=[stream, figure("a point")]),
        v4.new_markdown_cell("### Exercise: a name\n\nSo it is.", id="e", metadata=SLIDE),
        v4.new_markdown_cell("> **Takeaway.** Count.", id="f", metadata=SLIDE),
    )


def test_tagged_cells_become_slides_and_what_lies_between_becomes_notes():
    cells = slides.arranged(chapter())
    kinds = [cell.metadata.get("slideshow", {}).get("slide_type", "-") for cell in cells]
    assert kinds == ["slide", "notes", "slide", "-", "slide", "slide"]
    assert cells[1].source == "## The rule\n\nLong [words](#the-rule).\n\nExercise pairs.f: 12 minutes."
    assert cells[2].source == "## The rule" and cells[3].metadata["transient"]["remove_source"]
    assert cells[4].source.startswith("## The rule\n\n### Exercise") and cells[5].source.startswith("> **Takeaway")


def test_a_text_that_does_not_fit_is_refused_when_the_chapter_is_built():
    text = f'{HEADER}\n# %% [markdown] tags=["slide"] id="t"\n# {"x" * 1000}'
    assert parse(text, "x.py")
    with pytest.raises(UserError, match="x.py:9: 1001 characters do not fit on a slide"):
        parse(text + "x", "x.py")


def test_a_bare_figure_is_named():
    with pytest.raises(UserError, match="03_pairs, cell d: a figure without words"):
        slides.convert(v4.new_code_cell("", id="d", outputs=[figure("")]), "03_pairs")


def test_a_line_for_learners_leaves_nothing_behind():
    stream = v4.new_output("stream", text="pairs.merge: the library's (yours has not passed yet)\n")
    assert slides.convert(v4.new_code_cell("x", outputs=[stream]), "03_pairs").outputs == []


def test_only_chapters_with_a_tagged_cell_have_slides():
    assert slides.has_slides(chapter())
    assert not slides.has_slides(notebook(v4.new_markdown_cell("# x")))


def test_a_deck_shows_outputs_with_words_and_loads_only_what_lies_beside_it(tmp_path):
    if importlib.util.find_spec("sphinx_revealjs") is None or importlib.util.find_spec(book.MATHJAX_FOLDER) is None:
        pytest.skip("needs the extra site")
    (path,) = slides.add_slides({"03_pairs": chapter()}, tmp_path)
    assert verify.problems(tmp_path) == []
    page = verify.read(path)
    text = "".join(page.text)
    assert text.count("Long words.") == 1 and "seven pairs" in text and "a point" in text and "Count." in text
    assert "the library's" not in text and "draw()" not in text
    assert {"reveal/dist/reveal.js", "reveal/dist/theme/white.css", book.MATHJAX} <= set(page.loads)
    html = path.read_text(encoding="utf-8")
    assert html.count('<aside class="notes">') == 1 and html.count("<section") == 8  # each slide is one in a column
    assert "https://" not in "".join(page.scripts) + "".join(page.loads)


@pytest.mark.parametrize("other", ["exercise", "hidden"])
def test_neither_exercises_nor_hidden_cells_are_slides(other):
    text = f'{HEADER}\n# %% tags=["{other}", "slide"] id="a.b" points=1 minutes=1 level=1\nx = 1\n'
    with pytest.raises(UserError, match="x.py:9: a slide shows neither exercises nor hidden cells"):
        parse(text, "x.py")


def test_the_tag_stays_in_the_notebooks_of_learners(tmp_path):
    from nanochat_lib.course.build import render

    cells = parse(f'{HEADER}\n# %% [markdown] tags=["slide"] id="t"\n# # T\n', "00_t.py")
    assert all('"slide"' in text for text in render(cells, "00_t").values())
