"""Where batches come from: a process's share of documents or conversations, packed into rows, resumable exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from nanochat_lib.conversation import render_conversation
from nanochat_lib.errors import UserError
from nanochat_lib.packing import BestFitPacker, Document, encode_documents

if TYPE_CHECKING:
    from nanochat_lib.corpus import Corpus
    from nanochat_lib.tokenizer import Tokenizer


@dataclass(frozen=True, eq=False)
class Batch:
    """One micro-batch, and where its stream stands after it."""

    inputs: np.ndarray  # (B, T) int32
    targets: np.ndarray  # (B, T) int32, -1 = not trained
    epoch: int  # of the newest document read, from 1
    consumed: int  # documents this process has placed or dropped so far
    progress: float  # share of the allowed readings (chat without end: of the first pass) consumed by all processes
    after: dict  # the state without its buffer
    buffered: list[Document]  # the packer's buffer

    @cached_property
    def state(self) -> dict:
        """Plain data for JSON; a loader with `state=` this goes on exactly here. Built when asked for: milliseconds."""
        return self.after | {"buffer": encode_documents(self.buffered)}


@dataclass
class Cursor:
    """One process's place among items 0, 1, 2, … that are read again and again: item p is number p % size of its epoch.

    Process `rank` of `world` takes every world-th item, so the shares add up to the whole, each item once an epoch.
    """

    size: int
    rank: int
    world: int
    limit: int | None  # items that all processes together may read, None = no limit
    what: str  # for messages
    position: int = -1

    def __post_init__(self) -> None:
        if not 0 <= self.rank < self.world:
            raise UserError(f"rank {self.rank} of world {self.world}: rank counts from 0 to world - 1")
        if self.size < 1:
            raise UserError(f"{self.what} is empty: there is nothing to read")
        if self.size < self.world:
            raise UserError(
                f"rank {self.rank} of world {self.world}: {self.what} has only {self.size:,}, "
                f"one for each process at least; start at most {self.size} processes"
            )
        if self.position < 0:
            self.position = self.rank

    @property
    def done(self) -> bool:
        return self.limit is not None and self.position >= self.limit

    @property
    def read(self) -> int:
        return (self.position - self.rank) // self.world

    @property
    def epoch(self) -> int:
        return max(self.position - self.world, 0) // self.size + 1


class Rows:
    """What both loaders share: a packer, a cursor, and batches made from them."""

    def __init__(self, packer: BestFitPacker, cursor: Cursor, batch_rows: int, setup: dict, state: dict | None) -> None:
        if batch_rows < 1:
            raise UserError(f"a batch needs at least 1 row, got {batch_rows}")
        self.packer, self.cursor, self.batch_rows, self.setup = packer, cursor, batch_rows, setup
        self.counts = {"batches": 0, "dropped": 0, "truncated": 0}
        if state is not None:
            self._restore(state)

    def _restore(self, state: dict) -> None:
        wanted = self.setup | {"rank": self.cursor.rank, "world": self.cursor.world, "size": self.cursor.size}
        for name, value in wanted.items():
            if state.get(name) != value:
                raise UserError(
                    f"the saved stream has {name} {state.get(name)!r}, this run has {value!r}; "
                    "continue with the same settings or start a new run"
                )
        self.packer.load_state(state["buffer"])
        self.cursor.position = state["position"]
        self.counts = {name: state[name] for name in self.counts}

    def batch(self, inputs: np.ndarray, targets: np.ndarray) -> Batch:
        self.counts["batches"] += 1
        cursor = self.cursor
        consumed = cursor.read - len(self.packer)
        progress = min(consumed * cursor.world / (cursor.limit or cursor.size), 1.0)
        after = self.setup | {"rank": cursor.rank, "world": cursor.world, "size": cursor.size}
        after |= {"position": cursor.position, "consumed": consumed, "epoch": cursor.epoch} | self.counts
        return Batch(inputs, targets, cursor.epoch, consumed, progress, after, self.packer.snapshot())


class DocumentRows(Rows):
    """Pretraining rows: documents with BOS in front, cut where a row ends, every position trained."""

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer, split: str, fetch_docs: int, **rows: object) -> None:
        super().__init__(**rows)
        self.corpus, self.tokenizer, self.split, self.fetch_docs = corpus, tokenizer, split, fetch_docs
        self.texts: Iterator[str] | None = None
        self.ahead = 0  # position of the next item of `texts`
        self.barren = 0  # documents without text since the last one with text

    def fetch(self) -> list[str]:
        """The next texts of this process; fewer than `fetch_docs` only at the end."""
        cursor, chunk = self.cursor, []
        while len(chunk) < self.fetch_docs and not cursor.done:
            epoch, index = divmod(cursor.position, cursor.size)
            if self.texts is None or self.ahead // cursor.size != epoch:
                self.close()
                self.texts, self.ahead = iter(self.corpus.documents(self.split, index)), cursor.position
            text = next(islice(self.texts, cursor.position - self.ahead, None), None)
            if text is None:
                raise UserError(
                    f"the {self.split} split ended before document {index:,} of {cursor.size:,}: "
                    "the corpus changed while it was read; start again"
                )
            chunk.append(text)
            self.ahead = cursor.position + 1
            if self.ahead % cursor.size == 0:  # the epoch's last document
                self.close()
            cursor.position += cursor.world
        return chunk

    def refill(self) -> bool:
        while texts := self.fetch():
            rows = self.tokenizer.encode(texts, prepend=self.tokenizer.bos_id)
            rows = [ids for ids in rows if len(ids) > 1]  # a document without text would put two BOS side by side
            self.counts["dropped"] += len(texts) - len(rows)
            self.barren = 0 if rows else self.barren + len(texts)
            for ids in rows:
                self.packer.add(ids)
            if rows:
                return True
            if self.barren >= self.cursor.size:
                raise UserError(f"the {self.split} split has no text: all {self.cursor.size:,} documents are empty")
        return False

    def batches(self) -> Iterator[Batch]:
        try:
            while True:
                rows = np.empty((self.batch_rows, self.packer.capacity), np.int32)
                if any(self.packer.fill_row(row, None, self.refill) < len(row) for row in rows):
                    raise UserError(
                        f"the {self.split} documents ran out after {self.counts['batches']:,} batches: "
                        f"{self.cursor.size:,} documents read {self.cursor.limit / self.cursor.size:g} times "
                        "(data.epochs) are used up; raise data.epochs, add documents, or train fewer steps"
                    )
                yield self.batch(rows[:, :-1].copy(), rows[:, 1:].copy())
        finally:
            self.close()

    def close(self) -> None:
        texts, self.texts = self.texts, None
        if hasattr(texts, "close"):
            texts.close()  # a generator may hold a file open


class ConversationRows(Rows):
    """Chat rows: whole conversations, the rest padding; only what the assistant says is trained."""

    def __init__(self, mixture: Sequence[dict], tokenizer: Tokenizer, **rows: object) -> None:
        super().__init__(**rows)
        self.mixture, self.tokenizer = mixture, tokenizer
        self.barren = 0

    def refill(self) -> bool:
        while not self.cursor.done:
            conversation = self.mixture[self.cursor.position % self.cursor.size]
            rendered = render_conversation(self.tokenizer, conversation, max_tokens=self.packer.capacity)
            self.cursor.position += self.cursor.world
            self.counts["truncated"] += rendered.truncated
            if rendered.supervised:
                self.barren = 0
                self.packer.add(rendered.ids, rendered.mask)
                return True
            self.counts["dropped"] += 1
            self.barren += 1
            if self.barren >= self.cursor.size:
                break
        if self.cursor.read == self.counts["dropped"] or self.barren >= self.cursor.size:
            raise UserError(
                f"none of {self.cursor.size:,} conversations has an assistant token within {self.packer.capacity:,} "
                "tokens: nothing would be trained; use longer rows (model.sequence_len) or other conversations"
            )
        return False

    def batches(self) -> Iterator[Batch]:
        while True:
            rows = np.empty((self.batch_rows, self.packer.capacity), np.int32)
            masks = np.empty(rows.shape, np.int8)
            used = [self.packer.fill_row(row, mask, self.refill) for row, mask in zip(rows, masks, strict=True)]
            if not any(used):
                return
            yield self.batch(rows[:, :-1].copy(), np.where(masks[:, 1:] == 1, rows[:, 1:], -1).astype(np.int32))
