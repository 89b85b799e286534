"""Which documents a process reads: every world-th of them, or, from shards, every world-th row group.

Both kinds of share add up to the whole, each document once an epoch, and go on exactly where they stood.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, count, islice, takewhile
from typing import TYPE_CHECKING

from nanochat_lib.errors import UserError
from nanochat_lib.shards import ShardCorpus
from nanochat_lib.streams import Cursor

if TYPE_CHECKING:
    import numpy as np

    from nanochat_lib.corpus import Corpus
    from nanochat_lib.kept_ids import GroupIds, KeptIds
    from nanochat_lib.prefetch import Prefetcher


class EveryDocument(Cursor):
    """Documents rank, rank + world, … of a split. Each process reads all of them, and leaves the others' alone."""

    kind = "documents"

    def __init__(self, corpus: Corpus, split: str, rank: int, world: int, epochs: float | None) -> None:
        size = corpus.num_documents(split)
        limit = None if epochs is None else math.ceil(epochs * size)
        super().__init__(size, rank, world, limit, f"the {split} split (documents)")
        self.corpus, self.split = corpus, split
        self.texts: Iterator[str] | None = None
        self.ahead = 0  # position of the next item of `texts`

    @property
    def documents(self) -> int:
        return self.size

    @property
    def shard(self) -> str:
        where = getattr(self.corpus, "place", None)  # a corpus that does not know its files does without
        return where(self.split, max(self.position - self.world, 0) % self.size) if where else ""

    def fetch(self, most: int) -> tuple[int, list[str]]:
        """The next texts of this process; fewer than `most` only at the end."""
        chunk: list[str] = []
        while len(chunk) < most and not self.done:
            epoch, index = divmod(self.position, self.size)
            if self.texts is None or self.ahead // self.size != epoch:
                self.close()
                self.texts, self.ahead = iter(self.corpus.documents(self.split, index)), self.position
            text = next(islice(self.texts, self.position - self.ahead, None), None)
            if text is None:
                raise UserError(
                    f"the {self.split} split ended before document {index:,} of {self.size:,}: "
                    "the corpus changed while it was read; start again"
                )
            chunk.append(text)
            self.ahead = self.position + 1
            if self.ahead % self.size == 0:  # the epoch's last document
                self.close()
            self.position += self.world
        return len(chunk), chunk

    def close(self) -> None:
        texts, self.texts = self.texts, None
        if hasattr(texts, "close"):
            texts.close()  # a generator may hold a file open


@dataclass(frozen=True)
class Readings:
    """Row groups, as items 0, 1, 2, … without end: item p is row group p % size, in its epoch p // size."""

    rows: Sequence[int]  # of each row group
    starts: Sequence[int]  # the first document of each, and how many there are at the end
    limit: int | None  # documents that all processes together may read

    def allowed(self, item: int) -> int:
        """How many rows of an item may be read before the limit."""
        epoch, number = divmod(item, len(self.rows))
        if self.limit is None:
            return self.rows[number]
        return max(min(self.rows[number], self.limit - epoch * self.starts[-1] - self.starts[number]), 0)


class EveryRowGroup:
    """Row groups rank, rank + world, … of a corpus of shards, counted through over all shards and epochs.

    Item p is row group p % size of its epoch. What a process has begun, or took over from others, is `pending`: pairs
    of an item and the rows of it that have been read. So no process decodes what another one reads, and a resume opens
    the row group it needs. nanochat deals out each file anew; counted through, shares differ by one group at most.
    """

    kind = "row groups"

    def __init__(
        self, corpus: ShardCorpus, split: str, rank: int, world: int, epochs: float | None, kept: KeptIds | None = None
    ) -> None:
        """`kept`: ids that are handed out in place of texts where there are any."""
        self.corpus, self.split, self.rank, self.world = corpus, split, rank, world
        self._read = kept.read_group if kept else None
        self.groups = corpus.groups(split)
        self.size, self.documents = len(self.groups), corpus.num_documents(split)
        limit = None if epochs is None else math.ceil(epochs * self.documents)
        self.readings = Readings([group.rows for group in self.groups], corpus.starts(split), limit)
        if not 0 <= rank < world:
            raise UserError(f"rank {rank} of world {world}: rank counts from 0 to world - 1")
        if self.size < world:
            shards = list(dict.fromkeys(group.shard.name for group in self.groups))
            raise UserError(
                f"rank {rank} of world {world}: the {split} split has only {self.size:,} row groups in {len(shards):,} "
                f"shards ({shards[0]}{' …' if len(shards) > 1 else ''}), each process reads whole ones; start at most "
                f"{self.size} processes, add shards, or write them with smaller row groups"
            )
        self.position, self.read = rank, 0
        self.pending: list[list[int]] = []
        self.newest = rank  # the item that was read last
        self._stream: Prefetcher | None = None
        self._item, self._in_hand = -1, []  # a row group

    @property
    def goal(self) -> int:
        return self.readings.limit or self.documents

    @property
    def epoch(self) -> int:
        return self.newest // self.size + 1

    @property
    def shard(self) -> str:
        return self.groups[self.newest % self.size].label

    def place(self) -> dict:
        """Plain data from which `restore` goes on."""
        pending = [list(pair) for pair in self.pending]
        return {"position": self.position, "pending": pending, "newest": self.newest, "read": self.read}

    def restore(self, state: dict) -> None:
        self.position, self.newest, self.read = state["position"], state["newest"], state["read"]
        self.pending = [list(pair) for pair in state["pending"]]

    def fetch(self, most: int) -> tuple[int, list[str] | list[np.ndarray]]:
        """The next rows of one row group, as nanochat fetches them; those without text are left out.

        Texts, or ids where they are kept: arrays that begin with BOS, to be copied before they are kept for long.
        """
        while self.pending or self.readings.allowed(self.position):
            if not self.pending:
                self.pending.append([self.position, 0])
                self.position += self.world
            item, row = self.pending[0]
            end = min(row + most, self.readings.allowed(item))
            if row < end:
                chunk = self._rows(item)[row:end]
                self.pending[0][1], self.newest, self.read = end, item, self.read + len(chunk)
            if end == self.readings.allowed(item) or row >= end:
                del self.pending[0]
            if row < end:
                return len(chunk), [row for row in chunk if row is not None]
        return 0, []

    def _rows(self, item: int) -> list[str | None] | GroupIds:
        if item != self._item:
            if self._stream is None:
                self._stream = self.corpus.read_ahead(self.split, self._coming(), self._read)
            self._item, (_, self._in_hand) = item, next(self._stream)
        return self._in_hand

    def _coming(self) -> Iterator[int]:
        """The row groups that will be asked for, in order. Knows nothing of this object: a thread runs ahead in it."""
        allowed, size = self.readings.allowed, self.size
        begun = [item for item, _ in self.pending]
        later = takewhile(allowed, count(self.position, self.world))
        return (item % size for item in chain(begun, later))

    def close(self) -> None:
        """Ends the reading thread; the next `fetch` begins a new one."""
        stream, self._stream = self._stream, None
        self._item, self._in_hand = -1, []
        if stream is not None:
            stream.close()


def deal_groups(states: Sequence[dict], starts: Sequence[int], rank: int) -> dict:
    """The place of process `rank` when the row groups of len(states) processes go to len(starts), from `starts` on.

    Everything below the starts that was not read, whole row groups and rests of them, is dealt out like cards.
    """
    before, world = len(states), len(starts)
    left = [pair for state in states for pair in state["pending"]]
    left += [[item, 0] for state in states for item in range(state["position"], min(starts), before)]
    read = sum(state["read"] for state in states)
    return {
        "position": starts[rank],
        "pending": sorted(left)[rank::world],
        "newest": max(state["newest"] for state in states),
        "read": (read + world - 1 - rank) // world,
    }


def open_share(
    corpus: Corpus, split: str, rank: int, world: int, epochs: float | None, kept: KeptIds | None = None
) -> EveryDocument | EveryRowGroup:
    """The share of process `rank` of `world` in `epochs` readings of a split (None: without end).

    From shards it hands out the ids that are `kept` of them.
    """
    if isinstance(corpus, ShardCorpus):
        return EveryRowGroup(corpus, split, rank, world, epochs, kept)
    return EveryDocument(corpus, split, rank, world, epochs)


def smallest_share(corpus: Corpus, split: str, world: int, epochs: float) -> int:
    """Documents that the process with the fewest reads in `epochs` readings: where the first one runs out, all do."""
    share = open_share(corpus, split, 0, world, epochs)
    if isinstance(share, EveryDocument):
        return share.goal // world
    totals = [0] * world
    for item in takewhile(share.readings.allowed, count()):
        totals[item % world] += share.readings.allowed(item)
    return min(totals)
