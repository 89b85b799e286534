"""What a corpus is: documents in a fixed order, a name, a fingerprint, a split, and a report of what was left out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from nanochat_lib.errors import UserError

NAMED = 100  # skipped documents that are named; more are only counted


@dataclass
class Report:
    """What was found. `broken` holds (where, reason) of the first skipped documents; `skipped` counts them all."""

    documents: int = 0
    characters: int = 0
    empty: int = 0
    skipped: int = 0  # empty ones included
    broken: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def skip(self, where: str, reason: str) -> None:
        self.empty += reason == "empty"
        self.skipped += 1
        if len(self.broken) < NAMED:
            self.broken.append((where, reason))


class Corpus:
    """Documents of a name and a fingerprint, in a fixed order, split into "train" and "val".

    "tokenizer" names the documents that the tokenizer learns from: those of "train". The primer's "val" is real text
    only; it has two more streams: "train-real", the real part of "train", and "val-world", a second draw of the world.
    """

    name: str
    fingerprint: str  # sha256, hex: equal ones give the same documents in the same order
    report: Report

    def num_documents(self, split: str) -> int:
        """Documents of one epoch."""
        raise NotImplementedError

    def documents(self, split: str, start: int = 0) -> Iterator[str]:
        """One epoch of documents from index `start` on."""
        raise NotImplementedError

    def place(self, split: str, index: int) -> str:
        """Where document `index` comes from (file, row group), short enough for log lines."""
        raise NotImplementedError

    def splits(self) -> tuple[str, ...]:
        """The streams that `documents` knows."""
        return ("train", "val", "tokenizer")

    def _known(self, split: str) -> str:
        if split not in self.splits():
            raise UserError(f"unknown split {split!r} of the corpus; known: {', '.join(self.splits())}")
        return split
