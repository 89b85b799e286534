"""The gate for checks: a right answer that fails and a wrong one that passes are both found, and said clearly."""

from __future__ import annotations

import sys

import demo
import pytest

from nanochat_lib.course import checks, mutants
from nanochat_lib.course.author import Mutant
from nanochat_lib.course.grammar import parse
from nanochat_lib.course.mutants import pick, prepare, print_mutants, wrong_answers
from nanochat_lib.errors import UserError


@pytest.fixture(autouse=True)
def apart(monkeypatch, tmp_path):
    """The demo course's checks are found, and forgotten again."""
    monkeypatch.setattr(checks, "__path__", list(checks.__path__))
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "home"))
    sys.modules.pop("nanochat_lib.course.checks.pairs", None)
    yield
    sys.modules.pop("nanochat_lib.course.checks.pairs", None)


def found(tmp_path, chapter=demo.CHAPTER, checks=demo.CHECKS):
    (prepared,) = prepare(demo.write(tmp_path, chapter, checks))
    return [line for o in [*mutants.answers([prepared], (0, 1)), *wrong_answers(prepared)] for line in o.problems]


def test_right_answers_pass_and_wrong_ones_are_caught_in_every_setting(tmp_path, capsys):
    assert print_mutants(demo.write(tmp_path)) == 0
    said = capsys.readouterr().out
    assert "pairs.merge                         3 / 3" in said and "pairs.twice                         3 / 3" in said
    assert "64 bits: 2 of 2 pass" in said and "one thread: 2 of 2 pass" in said


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"NEW + 1", "NEW + 2", says="11"', '"NEW + 1", "1 + NEW", says="11"', "passes all cases"),
        ('says="IndexError"', 'says="KeyError"', "'KeyError' does not stand in"),
        ('"i += 2", "i += 1"', '"out.append(", "out.add("', "it must stand there once"),
        ('"NEW + 1", "NEW + 2", says="11"', '"NEW + 1", "NEW +", says="11"', "does not run (SyntaxError"),
        ('"i += 2", "i += 1", says="expected 7, got 9"', 'body="def other(): pass", says="x"', "defines no merge"),
        ('example("overlap", ([7, 7, 7], (7, 7), 9), [9, 7])', 'example("overlap", ([7, 7, 7], (7, 7), 9), [7, 9])',
         "seed 1: the right answer fails"),
        ('hidden("pairs.twice", ', 'hidden("pairs.twice", *[])\n((), ', "0 hidden cases"),
    ],
)  # fmt: skip
def test_what_is_wrong_with_an_exercise_is_found(tmp_path, old, new, message):
    assert old in demo.CHAPTER
    assert any(message in line for line in found(tmp_path, demo.CHAPTER.replace(old, new)))


def test_a_case_that_fails_by_itself_ends_nothing(tmp_path):
    broken = demo.CHECKS.replace(
        '[example("both", ([1, 2, 1, 2], (1, 2)), [10])]', "[example('both', lambda: 1 / 0, [10])]"
    )
    lines = found(tmp_path, checks=broken)
    assert lines and all("the cases themselves fail" in line for line in lines)


def test_a_chapter_that_needs_more_than_imports_setup_and_answers_does_not_run(tmp_path):
    text = demo.CHAPTER.replace('# %% tags=["setup"] id="setup"', '# %% id="setup"')
    with pytest.raises(UserError, match=r"03_pairs\.py:\d+ does not run \(NameError"):
        found(tmp_path, text.replace("def twice(tokens, pair):", "def twice(tokens, pair, new=NEW):"))


def test_the_source_of_a_mutant():
    merge, twice = (c for c in parse(demo.CHAPTER, "x.py") if "exercise" in c.tags)
    assert "    out, i = [], 0\n    out = list(tokens)\n    return out" in Mutant(
        "", "", "x", "out = list(tokens)"
    ).source(merge)
    assert Mutant("", "", "x", "def twice(a, b):\n    return a").source(twice) == "def twice(a, b):\n    return a"
    assert "i += 1\n        else" in Mutant("i += 2", "i += 1", "x").source(merge)
    assert "out, i = [], 1" in Mutant("[], 0", "[], 1", "x").source(merge)  # outside the region, once in the cell
    for old in ("nosuch", "out.append("):
        with pytest.raises(UserError, match="must stand there once"):
            Mutant(old, "", "x").source(merge)


def test_chapters_by_any_of_their_names():
    stems = ["00_start", "01_tokenizer"]
    assert [pick(name, stems) for name in ("1", "01", "tokenizer", "01_tokenizer", "0")] == [stems[1]] * 4 + [stems[0]]
    with pytest.raises(UserError, match="no chapter is called '7'; there are 00_start, 01_tokenizer"):
        pick("7", stems)
