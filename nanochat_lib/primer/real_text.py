"""The real half of the primer: the language reference and the docstrings that every Python installation carries.

Docstrings are read from source files with `ast`; nothing is imported or run. Paragraphs that occur twice are kept once.
The split is by groups: documents that share twelve consecutive words are one group and stand on the same side, so a
near copy of a held-out page is never trained on.
"""

from __future__ import annotations

import ast
import functools
import os
import re
import sysconfig
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from nanochat_lib.errors import UserError
from nanochat_lib.primer.names import fraction

HELD_OUT = 0.05  # share of the characters
LARGEST_HELD_OUT = 0.01  # a group above this share of the text always stays in training
SHARED_WORDS = 12  # documents that share this many consecutive words belong together
SMALLEST = 200  # characters of a document worth keeping
ENOUGH = 200_000  # characters; below this the installation lacks its sources

SKIPPED = {"test", "tests", "idlelib", "lib2to3", "site-packages", "dist-packages", "__pycache__", "turtledemo",
           "ensurepip", "encodings", "pydoc_data", "distutils", "config"}  # fmt: skip
DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
BLOCKS = {"body", "handlers", "orelse", "finalbody", "cases"}  # fields that hold statements, or what holds them
TYPOGRAPHY = str.maketrans({"\u201c": '"', "\u201d": '"', "\u2018": "'", "\u2019": "'", "\u2013": "-", "\u2014": "-",
                            "\u2026": "...", "\u2022": "*", "\u00a0": " ", "\u2192": "->"})  # fmt: skip


@dataclass(frozen=True)
class RealText:
    """Documents by side of the split, in a fixed order. The split does not depend on any seed."""

    train: tuple[str, ...]
    val: tuple[str, ...]


def _plain(text: str) -> str:
    text = text.translate(TYPOGRAPHY).expandtabs(4).encode("ascii", "ignore").decode()
    return re.sub(r"[ ]+$", "", text, flags=re.MULTILINE)


def language_reference() -> list[str]:
    """The pages of Python's language reference, as they are; empty where the installation left them out."""
    try:
        from pydoc_data.topics import topics
    except ImportError:  # some distributions leave it out
        return []
    return [topics[name] for name in sorted(topics)]


def _statements(tree: ast.Module) -> Iterator[ast.AST]:
    """What `ast.walk` gives, in its order, without expressions: nine nodes of ten, and none of them has a docstring."""
    level: list[ast.AST] = [tree]
    while level:
        yield from level
        blocks = (getattr(node, name, ()) for node in level for name in node._fields if name in BLOCKS)
        level = [child for block in blocks for child in block]


def _docstrings(path: Path) -> list[str]:
    """The docstrings of one source file, outermost first; a file that does not parse has none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tree = ast.parse(path.read_bytes())
    except (SyntaxError, ValueError, OSError):
        return []
    pages = []
    for node in _statements(tree):
        if isinstance(node, DOCUMENTED) and (doc := ast.get_docstring(node)):
            name = getattr(node, "name", path.parent.name if path.stem == "__init__" else path.stem)
            pages.append(f"{name}\n\n{doc}" if len(doc) > 80 else f"{name}: {doc}")
    return pages


def _modules() -> list[str]:
    """The docstrings of each file of the standard library, joined; installed packages are not even looked at."""
    paths = []
    for folder, folders, files in os.walk(sysconfig.get_path("stdlib")):
        folders[:] = [name for name in folders if name not in SKIPPED]
        paths += [Path(folder, name) for name in files if name.endswith(".py")]
    return ["\n\n".join(_docstrings(path)) for path in sorted(paths)]


def _without_repeats(documents: list[str]) -> list[str]:
    """Each paragraph once over the whole text (short ones, such as headings, may repeat)."""
    seen: set[str] = set()
    kept = []
    for document in documents:
        paragraphs = []
        for paragraph in re.split(r"\n\s*\n", document):
            key = " ".join(paragraph.split())
            if not key or (len(key) > 40 and key in seen):
                continue
            seen.add(key)
            paragraphs.append(paragraph.strip("\n"))
        if len(text := "\n\n".join(paragraphs)) >= SMALLEST:
            kept.append(text)
    return kept


def shingles(text: str) -> set[int]:
    """Every run of SHARED_WORDS consecutive words, hashed; punctuation and case are ignored."""
    words = re.findall(r"[a-z0-9]+", text.lower())
    return {hash(tuple(words[i : i + SHARED_WORDS])) for i in range(len(words) - SHARED_WORDS + 1)}


def _groups(documents: list[str]) -> list[list[int]]:
    """Indices of documents, together when a chain of shared passages connects them (union-find)."""
    parent = list(range(len(documents)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = i = parent[parent[i]]
        return i

    first: dict[int, int] = {}
    for i, document in enumerate(documents):
        for shingle in shingles(document):
            parent[root(i)] = root(first.setdefault(shingle, i))
    groups: dict[int, list[int]] = {}
    for i in range(len(documents)):
        groups.setdefault(root(i), []).append(i)
    return sorted(groups.values())


@functools.cache
def real_text() -> RealText:
    """The installation's own documentation, de-duplicated and split. UserError when the sources are missing."""
    documents = _without_repeats([_plain(page) for page in language_reference() + _modules()])
    total = sum(map(len, documents))
    if total < ENOUGH:
        raise UserError(
            f"this Python carries only {total:,} characters of documentation, the primer needs {ENOUGH:,}: "
            "use a Python that comes with its sources, or your own text with --corpus PATH (data.corpus)"
        )
    held_out: set[int] = set()
    size = 0
    for group in sorted(_groups(documents), key=lambda group: fraction("real", documents[group[0]])):
        characters = sum(len(documents[i]) for i in group)
        if size < HELD_OUT * total and characters <= LARGEST_HELD_OUT * total:
            held_out.update(group)
            size += characters
    return RealText(
        train=tuple(text for i, text in enumerate(documents) if i not in held_out),
        val=tuple(text for i, text in enumerate(documents) if i in held_out),
    )


def cut(text: str, characters: int) -> list[str]:
    """`text` in passages of about that many characters, cut between paragraphs, or between lines of a long one."""
    pieces = []
    for paragraph in text.split("\n\n"):
        lines = [paragraph] if len(paragraph) <= characters else paragraph.split("\n")
        pieces += [(line, "\n\n" if i == 0 else "\n") for i, line in enumerate(lines)]
    passages: list[str] = []
    current = ""
    for piece, joint in pieces:
        if current and len(current) + len(piece) > characters:
            passages.append(current)
            current = ""
        current = f"{current}{joint}{piece}" if current else piece
    if current and passages and len(current) < characters // 4:
        passages[-1] += "\n\n" + current
    elif current:
        passages.append(current)
    return [passage for passage in passages if passage.strip()]
