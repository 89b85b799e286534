"""The map of the course and the glossary: read from the sources, complete, and the same in the terminal."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from nanochat_lib.cli import main
from nanochat_lib.course import coursemap, glossary
from nanochat_lib.course.grammar import HEADER
from nanochat_lib.errors import UserError

ROOT = Path(__file__).parents[2]
EXERCISE = '# %% tags=["exercise"] id="{id}" points=2 minutes={minutes} level=1 library="{library}"\ndef f(): ...\n'


def chapter(root: Path, stem: str, body: str, title: str = "A title: and more", question: str = "Why so?") -> None:
    (root / "solutions").mkdir(exist_ok=True)
    text = f'{HEADER}\n# %% [markdown] id="title"\n# # {title}\n#\n# It is so.\n# **{question}** And then?\n\n{body}'
    (root / "solutions" / f"{stem}.py").write_text(text, encoding="utf-8")


@pytest.fixture
def course(tmp_path):
    chapter(tmp_path, "00_a", EXERCISE.format(id="a.f", minutes=5, library="nanochat_lib.bpe:f"))
    chapter(tmp_path, "01_b", EXERCISE.format(id="b.g", minutes=20, library="nanochat_lib.kernels.flash:g"))
    chapter(tmp_path, "02_c", EXERCISE.format(id="c.h", minutes=7, library="nanochat_lib.bpe:h"))
    chapter(
        tmp_path, "03_mine", EXERCISE.format(id="mine.x", minutes=1, library="nanochat_lib.x:x") + 'g = mine("b.g")'
    )
    body = "from nanochat_lib.bpe import f\nfrom nanochat_lib.kernels import flash\n"
    chapter(tmp_path, "04_imports", EXERCISE.format(id="imports.x", minutes=1, library="nanochat_lib.y:x") + body)
    body = "# %% [markdown]\n# See chapters 00 and\n# 02, and chapter 09.\n# %%\nfrom nanochat_lib.bpe import split\n"
    body += '# %% tags=["hidden"]\nmine("b.g")'
    chapter(tmp_path, "05_text", EXERCISE.format(id="text.x", minutes=1, library="nanochat_lib.z:x") + body)
    chapter(tmp_path, "06_end", "# %%\n1\n", title="The end")
    return tmp_path


def test_the_map_is_read_from_the_sources(course):
    stops = {stop.number: stop for stop in coursemap.course_map(course)}
    assert {n: s.uses for n, s in stops.items()} == {
        "00": {}, "01": {}, "02": {},
        "03": {"01": ("g",)},
        "04": {"00": ("f",), "01": ("kernels.flash",)},
        "05": {"00": (), "02": ()},  # no hidden cells, no file of two chapters, no chapter to come
        "06": dict.fromkeys(("00", "01", "02", "03", "04", "05"), ()),
    }  # fmt: skip
    assert (stops["01"].minutes, stops["01"].points, stops["01"].rooms) == (20, 2, ("kernels.flash",))
    assert stops["00"].short == "A title" and stops["00"].question == "It is so. **Why so?**"


def test_a_new_chapter_is_on_the_map_in_words_and_in_the_drawing(course):
    from nanochat_lib.report.plots import to_svg

    chapter(course, "07_new", 'x = mine("c.h")', title="Fresh")
    stops = coursemap.course_map(course)
    assert re.search(r"^07 Fresh +00 to 06", coursemap.as_text(stops), re.MULTILINE)
    assert "07 Fresh uses 00, 01" in coursemap.words(stops) and "03 A title uses 01;" in coursemap.words(stops)
    svg = to_svg(coursemap.figure(stops, link=lambda stop: f"{stop.stem}.html" if stop.number == "07" else ""), "map")
    assert "Fresh" in svg and 'href="07_new.html"' in svg and "06_end.html" not in svg and "20 min, 1 exercises" in svg


def test_a_folder_without_chapters_has_no_map(tmp_path):
    with pytest.raises(UserError, match="no chapters found"):
        coursemap.course_map(tmp_path)


def test_the_commands_print_map_and_terms(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert not main(["course", "map", "--save", str(tmp_path / "map.svg")])
    told = capsys.readouterr().out
    assert "05 Muon" in told and "muon, optim" in told and (tmp_path / "map.svg").read_text().startswith("<svg")
    assert not main(["course", "glossary", "bpe"])
    assert capsys.readouterr().out.startswith("byte pair encoding (BPE), chapter 01\n    Learning a vocabulary")
    assert main(["course", "glossary", "atention"]) and "attention" in capsys.readouterr().err


# --- The glossary -----------------------------------------------------------------------------------------------------


def test_every_term_of_the_glossary_stands_in_its_chapter():
    assert glossary.problems(ROOT) == []
    assert 80 <= len(glossary.terms()) <= 160
    assert len({term.anchor for term in glossary.terms()}) == len(glossary.terms())


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        ("{term: quark, chapter: a, text: A thing.}", "quark does not occur in chapter a"),
        ("{term: title, chapter: nowhere, text: A thing.}", "title: there is no chapter nowhere"),
        ("{term: title, chapter: a, seen: [titel], text: A thing.}", "title does not occur"),
        ("{term: itle, chapter: a, text: The end of a word.}", "itle does not occur"),
        ("{term: titl, chapter: a, text: The start of a word.}", "titl does not occur"),
        ("{term: title, chapter: a, text: One. Two. Three. Four.}", "more than two or three short sentences"),
        ("{term: title, chapter: a, text: A thing.}\n- {term: so, chapter: a, text: B.}", "so must stand before title"),
        ("{term: so, chapter: a, text: A.}\n- {term: so, chapter: a, text: B.}", "so stands there twice"),
    ],
)
def test_a_term_that_is_wrong_is_named(course, entry, words):
    file = course / "terms.yml"
    file.write_text(f"- {entry}\n", encoding="utf-8")
    assert any(words in line for line in glossary.problems(course, file))


def test_a_term_may_break_over_lines_or_be_a_plural(course):
    file = course / "terms.yml"
    file.write_text("- {term: chapters 00 and 02, chapter: text, text: A.}\n- {term: title, chapter: a, text: B.}\n")
    assert glossary.problems(course, file) == []
    file.write_text("- {term: so, text: A.}\n")
    with pytest.raises(UserError, match="is not a term with chapter and text"):
        glossary.terms(file)


def test_a_word_finds_its_terms():
    assert [t.term for t in glossary.find("SFT")] == ["supervised fine-tuning"]
    assert {"residual stream"} <= {t.term for t in glossary.find("stream")}
