"""The field's terms in plain words, each with the chapter that introduces it: `nanochat course glossary`.

glossary.yml is the only source; the site makes a page of it, and a test looks for every term in its chapter.
"""

from __future__ import annotations

import re
import textwrap
from dataclasses import dataclass
from pathlib import Path

from nanochat_lib.errors import UserError
from nanochat_lib.presets import nearest

FILE = Path(__file__).with_name("glossary.yml")


@dataclass(frozen=True)
class Term:
    term: str
    chapter: str  # topic, e.g. "tokenizer"
    text: str
    short: str = ""  # an abbreviation, e.g. "BPE"
    seen: tuple[str, ...] = ()  # how the chapter writes it, where that differs

    @property
    def name(self) -> str:
        return f"{self.term} ({self.short})" if self.short else self.term

    @property
    def anchor(self) -> str:
        """The term's place on the site's page."""
        return "term-" + re.sub(r"[^a-z0-9]+", "-", self.term.lower()).strip("-")


def terms(file: Path = FILE) -> list[Term]:
    """All terms in the file's order. UserError naming an entry that cannot be used."""
    import yaml

    found = []
    for entry in yaml.safe_load(file.read_text(encoding="utf-8")):
        try:
            term = Term(**{**entry, "seen": tuple(entry.get("seen", ()))})
        except TypeError as error:
            raise UserError(f"{file.name}: {entry!r} is not a term with chapter and text ({error})") from None
        found.append(term)
    return found


def problems(root: str | Path | None = None, file: Path = FILE) -> list[str]:
    """Lines about terms that stand twice, out of order, too long, or not in the chapter that they name."""
    from nanochat_lib.course import registry
    from nanochat_lib.course.coursemap import source

    chapters = {chapter.topic: source(chapter, root) for chapter in registry.chapters(root)}
    found = terms(file)
    names = [term.term.lower() for term in found]
    lines = [f"{name} stands there twice" for name in sorted(set(names)) if names.count(name) > 1]
    lines += [f"{b} must stand before {a}" for a, b in zip(names, names[1:], strict=False) if b < a]
    for term in found:
        if len(re.findall(r"[.?!](?=\s|$)", term.text)) > 3 or len(term.text) > 240:
            lines.append(f"{term.term}: more than two or three short sentences")
        if term.chapter not in chapters:
            lines.append(f"{term.term}: there is no chapter {term.chapter}")
        elif not occurs(term, chapters[term.chapter]):
            lines.append(f"{term.term} does not occur in chapter {term.chapter}")
    return [f"{file.name}: {line}" for line in lines]


def occurs(term: Term, text: str) -> bool:
    """Does a chapter's source hold the term, or one of the spellings given for it? Line breaks do not count."""
    flat = re.sub(r"\s+(# )?", " ", text)
    spellings = term.seen or (term.term, *filter(None, [term.short]))
    return any(re.search(rf"(?<!\w){re.escape(word)}s?(?!\w)", flat, re.IGNORECASE) for word in spellings)


def find(word: str) -> list[Term]:
    """The terms that a word means: exactly, else by a part of their name. UserError with the nearest one if none."""
    wanted, found = word.lower(), terms()
    for same in (
        [t for t in found if wanted in (t.term.lower(), t.short.lower())],
        [t for t in found if wanted in t.name.lower()],
    ):
        if same:
            return same
    raise UserError(f"the glossary has no {word!r}; {nearest(word, [term.term for term in found])}")


def as_text(found: list[Term], width: int = 100) -> str:
    """Terms as text: the name with its chapter's number, then what it means."""
    from nanochat_lib.course import registry

    numbers = {chapter.topic: chapter.number for chapter in registry.chapters()}
    parts = []
    for term in found:
        meaning = textwrap.fill(term.text, width, initial_indent="    ", subsequent_indent="    ")
        parts.append(f"{term.name}, chapter {numbers.get(term.chapter, term.chapter)}\n{meaning}")
    return "\n".join(parts)
