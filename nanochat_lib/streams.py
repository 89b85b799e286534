"""Where batches come from: a process's share of documents or conversations, packed into rows, resumable exactly."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import numpy as np

from nanochat_lib.conversation import render_conversation
from nanochat_lib.errors import UserError
from nanochat_lib.packing import BestFitPacker, Document, Mark, encode_documents

if TYPE_CHECKING:
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
    mark: Mark  # the packer's buffer
    shard: str = ""  # file and row group of the newest document read, short

    @property
    def buffered(self) -> list[Document]:
        """What waited in the packer's buffer."""
        return self.mark.documents()

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

    shard = ""  # where the newest item came from, for streams that know

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
    def goal(self) -> int:
        """Items that all processes together are to read, one epoch when there is no limit."""
        return self.limit or self.size

    @property
    def epoch(self) -> int:
        return max(self.position - self.world, 0) // self.size + 1

    def place(self) -> dict:
        """Plain data from which `restore` goes on."""
        return {"position": self.position}

    def restore(self, state: dict) -> None:
        self.position = state["position"]


class Share(Protocol):
    """One process's share of what is read: a Cursor, or one of `shares`."""

    rank: int
    world: int
    size: int  # items of one epoch
    read: int  # documents that this process has read
    goal: int  # documents that all processes together are to read
    epoch: int
    shard: str

    def place(self) -> dict: ...

    def restore(self, state: dict) -> None: ...


class DocumentShare(Share, Protocol):
    documents: int  # in one epoch, over all processes

    def fetch(self, most: int) -> tuple[int, list[str] | list[np.ndarray]]:
        """(documents read, at most `most`; the texts of those that have one, or their ids); (0, []) at the end."""

    def close(self) -> None: ...


class Rows:
    """What both loaders share: a packer, a share of the items, and batches made from them."""

    def __init__(self, packer: BestFitPacker, share: Share, batch_rows: int, setup: dict, state: dict | None) -> None:
        if batch_rows < 1:
            raise UserError(f"a batch needs at least 1 row, got {batch_rows}")
        self.packer, self.share, self.batch_rows = packer, share, batch_rows
        self.setup = setup | {"rank": share.rank, "world": share.world, "size": share.size}
        self.counts = {"batches": 0, "dropped": 0, "truncated": 0}
        if state is not None:
            self._restore(state)

    def _restore(self, state: dict) -> None:
        for name, value in self.setup.items():
            if state.get(name) != value:
                raise UserError(
                    f"the saved stream has {name} {state.get(name)!r}, this run has {value!r}; "
                    "continue with the same settings or start a new run"
                )
        self.packer.load_state(state["buffer"])
        self.share.restore(state)
        self.counts = {name: state[name] for name in self.counts}

    def batch(self, inputs: np.ndarray, targets: np.ndarray) -> Batch:
        self.counts["batches"] += 1
        share = self.share
        consumed = share.read - len(self.packer)
        progress = min(consumed * share.world / share.goal, 1.0)
        after = self.setup | share.place() | {"consumed": consumed, "epoch": share.epoch} | self.counts
        return Batch(inputs, targets, share.epoch, consumed, progress, after, self.packer.mark(), share.shard)


class DocumentRows(Rows):
    """Pretraining rows: documents with BOS in front, cut where a row ends, every position trained."""

    def __init__(self, tokenizer: Tokenizer, split: str, fetch_docs: int, share: DocumentShare, **rows: object) -> None:
        super().__init__(share=share, **rows)
        self.share: DocumentShare = share
        self.tokenizer, self.split, self.fetch_docs = tokenizer, split, fetch_docs
        self.arrays = hasattr(tokenizer, "encode_arrays")  # a stand-in may know lists only
        self.encode = tokenizer.encode_arrays if self.arrays else tokenizer.encode
        self.barren = 0  # documents without text since the last one with text

    def refill(self) -> bool:
        while (fetched := self.share.fetch(self.fetch_docs))[0]:
            count, rows = fetched
            kept = bool(rows) and isinstance(rows[0], np.ndarray)
            if not kept:
                rows = self.encode(rows, prepend=self.tokenizer.bos_id)
            rows = [ids for ids in rows if len(ids) > 1]  # a document without text would put two BOS side by side
            self.counts["dropped"] += count - len(rows)
            self.barren = 0 if rows else self.barren + count
            for ids in rows:
                self.packer.add(ids, owned=self.arrays and not kept)
            if rows:
                return True
            if self.barren >= self.share.documents:
                raise UserError(f"the {self.split} split has no text: all {self.share.documents:,} documents are empty")
        return False

    def batches(self) -> Iterator[Batch]:
        try:
            while True:
                rows = np.empty((self.batch_rows, self.packer.capacity), np.int32)
                if any(self.packer.fill_row(row, None, self.refill) < len(row) for row in rows):
                    share = self.share
                    raise UserError(
                        f"the {self.split} documents ran out after {self.counts['batches']:,} batches: "
                        f"{share.documents:,} documents read {share.goal / share.documents:g} times "
                        "(data.epochs) are used up; raise data.epochs, add documents, or train fewer steps"
                    )
                yield self.batch(rows[:, :-1].copy(), rows[:, 1:].copy())
        finally:
            self.share.close()


class ConversationRows(Rows):
    """Chat rows: whole conversations, the rest padding; only what the assistant says is trained, or (`all_tokens`) all
    that is not padding."""

    def __init__(self, mixture: Sequence[dict], tokenizer: Tokenizer, all_tokens: bool, **rows: object) -> None:
        super().__init__(**rows)
        self.mixture, self.tokenizer, self.all_tokens = mixture, tokenizer, all_tokens
        self.barren = 0

    def refill(self) -> bool:
        while not self.share.done:
            conversation = self.mixture[self.share.position % self.share.size]
            rendered = render_conversation(self.tokenizer, conversation, max_tokens=self.packer.capacity)
            self.share.position += self.share.world
            self.counts["truncated"] += rendered.truncated
            if rendered.supervised:
                self.barren = 0
                self.packer.add(rendered.ids, [1] * len(rendered.ids) if self.all_tokens else rendered.mask)
                return True
            self.counts["dropped"] += 1
            self.barren += 1
            if self.barren >= self.share.size:
                break
        if self.share.read == self.counts["dropped"] or self.barren >= self.share.size:
            raise UserError(
                f"none of {self.share.size:,} conversations has an assistant token within {self.packer.capacity:,} "
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
