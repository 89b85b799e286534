"""The prose of the chapters and of the documents: short sentences, one idea a cell, no known misspelling."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nanochat_lib.course.build import sources

ROOT = Path(__file__).parents[2]
CHAPTERS = sources(ROOT)
WORDS = 34  # of the longest sentence
CELL = 250  # words of the longest cell


def sentences(markdown: str) -> Iterator[str]:
    """The sentences of a text cell; code and formulas count as a word, items of lists by themselves, tables not."""
    text = re.sub(r"```.*?```|\$\$.*?\$\$", "", markdown, flags=re.DOTALL)
    text = re.sub(r"`[^`]*`|\$[^$\n]*\$", "code", text)
    lines = [line.lstrip("> ") for line in text.splitlines() if not line.lstrip().startswith(("|", "#"))]
    for block in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", "\n".join(lines)):
        yield from re.split(r"(?<=[.?!:;])[\"*)]*\s+", " ".join(block.split()))


@pytest.mark.parametrize("stem", CHAPTERS)
def test_sentences_are_short_and_cells_hold_one_idea(stem):
    texts = [(cell.metadata.get("id"), cell.source) for cell in CHAPTERS[stem] if cell.kind == "markdown"]
    assert texts
    long = [(name, s) for name, text in texts for s in sentences(text) if len(s.split()) > WORDS]
    full = [name for name, text in texts if sum(len(s.split()) for s in sentences(text)) > CELL]
    assert (long, full) == ([], [])


def amounts(markdown: str) -> list[str]:
    """What a notebook would set as a formula although it is not one: two dollar amounts, and the words between them."""
    text = re.sub(r"```.*?```|`[^`]*`|\$\$.*?\$\$", "", markdown, flags=re.DOTALL)
    found = []
    for block in re.split(r"\n\s*\n", text):
        inside = re.split(r"\$", block)[1::2]
        plain = [re.sub(r"\\[a-z]+(\{[^}]*\})?", "", part) for part in inside]
        found += [part for part in plain if len(re.findall(r"[A-Za-z]{3,}", part)) > 1]
    return found


@pytest.mark.parametrize("stem", CHAPTERS)
def test_no_amount_of_money_becomes_a_formula(stem):
    found = [(c.metadata.get("id"), a) for c in CHAPTERS[stem] if c.kind == "markdown" for a in amounts(c.source)]
    assert found == []
    assert amounts("It cost $30 in all, not $40, and\nmore.") == ["30 in all, not "]
    assert amounts("With $\\text{all of them}$ and `$5 and more $` a $2^k$ is $x$.") == []


def test_the_counter_counts_sentences():
    text = (
        "# A title\n\nOne two `x y z` three. Four\nfive:\n\n- six\n- seven eight\n\n> nine\n\n| a | b |\n\n$$ x + y $$"
    )
    assert list(filter(None, sentences(text))) == [
        "One two code three.",
        "Four five:",
        "- six",
        "- seven eight",
        "nine",
    ]


def spelling(*paths: str, folder: Path = ROOT) -> str:
    command = [sys.executable, "-m", "codespell_lib", "--toml", str(ROOT / "pyproject.toml"), *paths]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stdout


def test_no_known_misspelling(tmp_path):
    assert (
        spelling("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "docs", *map(str, ROOT.glob("solutions/*.py"))) == ""
    )
    (tmp_path / "one.md").write_text("What you recieve.")
    assert "recieve ==> receive" in spelling("one.md", folder=tmp_path)
