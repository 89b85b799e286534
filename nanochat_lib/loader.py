"""Batches of packed rows, prepared by a thread ahead of time, resumable to the token.

Every batch owns its arrays: on a CPU `jax.device_put` may keep using the host buffer it was given, so a buffer that is
filled again would change batches that are already on their way. With each batch comes the state of the stream right
after it, whatever the thread has read ahead since.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from nanochat_lib.errors import UserError
from nanochat_lib.packing import FETCH_DOCS, BestFitPacker, decode_documents, encode_documents
from nanochat_lib.prefetch import Prefetcher
from nanochat_lib.shares import EveryRowGroup, deal_groups, open_share
from nanochat_lib.streams import Batch, ConversationRows, Cursor, DocumentRows
from nanochat_lib.supply import ChatReport, chat_report, check_enough

if TYPE_CHECKING:
    from nanochat_lib.corpus import Corpus
    from nanochat_lib.kept_ids import KeptIds
    from nanochat_lib.tokenizer import Tokenizer

__all__ = [
    "Batch",
    "ChatLoader",
    "ChatReport",
    "PretrainLoader",
    "chat_report",
    "chat_steps",
    "check_enough",
    "count_chat_steps",
    "deal_anew",
    "distinct_microbatches",
    "share_states",
]

BUFFER_CONVERSATIONS = 100  # conversations the chat packer chooses from


class _Loader(Prefetcher):
    """Hands out batches, and says where the newest one stands. Use as a context manager, or call `close()`."""

    last: Batch | None = None

    def __init__(self, batches: Generator[Batch, None, None], prefetch: int, state: dict | None) -> None:
        super().__init__(batches, prefetch)
        self.begun_with = state or {}

    def __next__(self) -> Batch:
        self.last = super().__next__()
        return self.last

    @property
    def consumed(self) -> int:
        """Documents that this process has placed or dropped, up to the newest batch handed out."""
        return self.last.consumed if self.last else 0

    @property
    def epoch(self) -> int:
        """Epoch of the newest batch handed out, from 1."""
        return self.last.epoch if self.last else 1

    @property
    def dropped(self) -> int:
        """Documents that this process has left out as having no text, up to the newest batch handed out."""
        return self.last.after["dropped"] if self.last else self.begun_with.get("dropped", 0)


class PretrainLoader(_Loader):
    """Batches of (B, T) inputs and targets from the documents of a split, without end or for `epochs` readings.

    Every row starts with BOS and is full. Documents without text are left out and counted. With `state` (of a batch of
    an earlier loader with the same settings) the stream goes on token for token after that batch. Raises UserError for
    an empty split, more processes than documents (or than row groups, of shards), a state of other settings, and when
    `epochs` readings are used up. Algorithm: nanochat's BOS-aligned best fit.

    `kept` ids of the corpus are read instead of encoding its texts; batches, counts and states are the same.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer,
        split: str,
        batch_rows: int,
        sequence_len: int,
        buffer_docs: int = 1000,
        *,
        epochs: float | None,
        rank: int = 0,
        world: int = 1,
        prefetch: int = 2,
        fetch_docs: int = FETCH_DOCS,
        state: dict | None = None,
        kept: KeptIds | None = None,
    ) -> None:
        share = open_share(corpus, split, rank, world, epochs, kept)
        rows = DocumentRows(
            tokenizer,
            split,
            fetch_docs,
            share,
            packer=BestFitPacker(sequence_len + 1, buffer_docs),
            batch_rows=batch_rows,
            setup={
                "kind": share.kind,
                "corpus": corpus.fingerprint,
                "split": split,
                "tokenizer": tokenizer.fingerprint,
                "sequence_len": sequence_len,
                "buffer_docs": buffer_docs,
            },
            state=state,
        )
        super().__init__(rows.batches(), prefetch, state)


class ChatLoader(_Loader):
    """Batches of (B, T) inputs and targets from conversations, packed whole; targets are -1 where nothing is learned.

    Conversations longer than a row (T + 1 tokens) are cut when they are rendered; those without any supervised token
    in what is left are dropped. Both are counted in `batch.after`, and for the whole mixture in `report`.
    `one_pass` reads each conversation once and ends with a padded batch; else the mixture is read again and again.
    `all_tokens` trains every token that is not padding, questions and tool results too.
    """

    def __init__(
        self,
        mixture: Sequence[dict],
        tokenizer: Tokenizer,
        batch_rows: int,
        sequence_len: int,
        *,
        one_pass: bool = False,
        all_tokens: bool = False,
        buffer_conversations: int = BUFFER_CONVERSATIONS,
        rank: int = 0,
        world: int = 1,
        prefetch: int = 2,
        state: dict | None = None,
    ) -> None:
        size = len(mixture)
        rows = ConversationRows(
            mixture,
            tokenizer,
            all_tokens,
            packer=BestFitPacker(sequence_len + 1, buffer_conversations, crop=False, pad_id=tokenizer.bos_id),
            share=Cursor(size, rank, world, size if one_pass else None, "the mixture (conversations)"),
            batch_rows=batch_rows,
            setup={
                "kind": "conversations",
                "tokenizer": tokenizer.fingerprint,
                "sequence_len": sequence_len,
                "buffer_docs": buffer_conversations,
                "one_pass": one_pass,
                "all_tokens": all_tokens,
            },
            state=state,
        )
        self._whole = (mixture, tokenizer, sequence_len)
        super().__init__(rows.batches(), prefetch, state)

    @cached_property
    def report(self) -> ChatReport:
        """Counts over the whole mixture. Renders every conversation once."""
        return chat_report(*self._whole)


def count_chat_steps(
    mixture: Sequence[dict], tokenizer: Tokenizer, batch_rows: int, sequence_len: int, micro_batches: int = 1,
    **share: int,
) -> int:  # fmt: skip
    """Optimiser steps of `micro_batches` batches in one pass over the mixture, found by packing it.

    `share` (rank, world): in one pass of that process over its share; another may need more or fewer.
    """
    report = chat_report(mixture, tokenizer, sequence_len, buffer=BUFFER_CONVERSATIONS, **share)
    return chat_steps(report, batch_rows, micro_batches)


def chat_steps(report: ChatReport, batch_rows: int, micro_batches: int = 1) -> int:
    """Optimiser steps in one pass over the conversations of `report`, made with `buffer=BUFFER_CONVERSATIONS`."""
    if not report.rows:
        raise UserError(
            f"none of {report.conversations:,} conversations has an assistant token within a row: nothing would be "
            "trained; use longer rows (model.sequence_len) or other conversations"
        )
    return -(-report.rows // (batch_rows * micro_batches))


def distinct_microbatches(inputs: np.ndarray | Sequence[np.ndarray], targets: np.ndarray | None = None) -> None:
    """Raises UserError when two of the A micro-batches (A, B, T) of a step are equal: a guard for the first steps.

    A loader that hands out one buffer again and again trains on its last content A times, without any other sign.
    Micro-batches without a trained target (all -1) may be equal: they are padding.
    """
    seen: dict[bytes, int] = {}
    for i, batch in enumerate(inputs):
        if targets is not None and (targets[i] < 0).all():
            continue
        digest = hashlib.blake2b(np.ascontiguousarray(batch), digest_size=16).digest()
        if digest in seen:
            raise UserError(
                f"micro-batches {seen[digest]} and {i} of one step are equal: "
                "the loader reuses a buffer, or the data repeat; use more documents or smaller batches"
            )
        seen[digest] = i


def deal_anew(positions: Sequence[int], world: int) -> tuple[list[int], int]:
    """(where each of `world` processes goes on, items left out) when len(positions) processes stop at `positions`.

    Process r of W had read the items r, r + W, … below its position. Reading goes on after the furthest item read, so
    that nothing is read twice; what slower processes had not reached before it is left out.
    """
    before = len(positions)
    frontier = max(positions) - before + 1
    skipped = sum(len(range(position, frontier, before)) for position in positions)
    return [frontier + (rank - frontier) % world for rank in range(world)], skipped


def share_states(states: Sequence[dict], rank: int, world: int) -> tuple[dict, int]:
    """(this process's state, items left out) of a stream that len(states) processes saved and `world` continue.

    With the same number of processes the stream goes on exactly. With another number, what was read but not yet placed
    is dealt out anew, and reading goes on after the furthest item that any process had read: the items before it that
    slower processes had not reached are left out of this epoch, and counted. Nothing is read twice. Row groups of
    shards are kept track of one by one, so of them nothing is left out either.
    """
    if len(states) == world or not states[0]:  # a stage without a stream saves nothing
        return states[min(rank, len(states) - 1)], 0
    positions, skipped = deal_anew([state["position"] for state in states], world)
    capacity = states[0]["sequence_len"] + 1
    waiting = [document for state in states for document in decode_documents(state["buffer"], capacity)]
    total = {name: sum(state[name] for state in states) // world for name in ("batches", "dropped", "truncated")}
    buffer = encode_documents(waiting[rank::world])
    place = {"rank": rank, "world": world, "position": positions[rank], "buffer": buffer}
    if states[0]["kind"] == EveryRowGroup.kind:
        place, skipped = place | deal_groups(states, positions, rank), 0
    return states[0] | total | place, skipped
