"""Is there enough to train on? Asked before the first step: data that run out silently are read again and again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from typing import TYPE_CHECKING

import numpy as np

from nanochat_lib.conversation import render_conversation
from nanochat_lib.errors import UserError
from nanochat_lib.packing import FETCH_DOCS, BestFitPacker

if TYPE_CHECKING:
    from nanochat_lib.corpus import Corpus
    from nanochat_lib.tokenizer import Tokenizer

SAMPLE_PLACES = 16  # places of the corpus that are looked at
PACKED_BUFFERS = 8  # the packing of a large corpus is tried on this many times the buffer


@dataclass(frozen=True)
class Supply:
    """An estimate of what a split holds, from a sample of its documents."""

    documents: int
    tokens: int  # BOS included
    usable: float  # share of the tokens that become targets, the rest is cut off where rows end
    epochs_needed: float


def check_enough(
    corpus: Corpus,
    tokenizer: Tokenizer,
    tokens_needed: int,
    epochs: float,
    *,
    split: str = "train",
    sequence_len: int | None = None,
    buffer_docs: int = 1000,
    sample_docs: int = 2048,
) -> Supply:
    """Raises UserError when `tokens_needed` targets need more than `epochs` readings of the split.

    Tokens are estimated from documents sampled evenly over the split (all of them when there are few). With
    `sequence_len` the sample is packed as well, to find what cutting at row ends costs; without it nothing is cut.
    """
    size = corpus.num_documents(split)
    if size < 1:
        raise UserError(f"the {split} split has no documents: there is nothing to train on")
    places = 1 if size <= sample_docs else SAMPLE_PLACES
    share = -(-min(size, sample_docs) // places)
    texts = [text for i in range(places) for text in islice(corpus.documents(split, i * size // places), share)]
    sample = [ids for ids in tokenizer.encode(texts, prepend=tokenizer.bos_id) if len(ids) > 1]
    if not sample:
        raise UserError(f"the {split} split has no text: all {len(texts):,} documents looked at are empty")
    tokens = round(sum(map(len, sample)) / len(texts) * size)
    usable = 1.0
    if sequence_len is not None:
        count = min(math.ceil(size * epochs * len(sample) / len(texts)), PACKED_BUFFERS * max(buffer_docs, FETCH_DOCS))
        usable = packed_share(sample, count, sequence_len, buffer_docs)
    readings = readings_needed(tokens_needed, tokens * usable, epochs, f"{size:,} {split} documents")
    return Supply(size, tokens, usable, readings)


def readings_needed(tokens_needed: int, tokens: float, epochs: float, what: str = "the documents") -> float:
    """How often data that give `tokens` targets a reading are read for `tokens_needed`; UserError above `epochs`."""
    readings = tokens_needed / tokens
    if readings > epochs:
        most = int(epochs * tokens)
        raise UserError(
            f"training needs {tokens_needed:,} tokens, but {what} give about {most:,} at data.epochs {epochs:g}: "
            f"raise data.epochs to {math.ceil(readings * 100) / 100:g}, train {most / tokens_needed:.0%} of the steps, "
            "or add documents"
        )
    return readings


def packed_share(sample: list[list[int]], count: int, sequence_len: int, buffer_docs: int) -> float:
    """Share of tokens that end up as targets when `count` documents, the sample over and over, are packed into rows."""
    packer = BestFitPacker(sequence_len + 1, buffer_docs)
    documents = islice(cycle(sample), count)
    total = rows = 0

    def refill() -> bool:
        nonlocal total
        chunk = list(islice(documents, FETCH_DOCS))
        for document in chunk:
            packer.add(document)
        total += sum(map(len, chunk))
        return bool(chunk)

    row = np.empty(packer.capacity, np.int32)
    while packer.fill_row(row, None, refill) == packer.capacity:
        rows += 1
    return min(max(rows, 1) * sequence_len / total, 1.0)


@dataclass(frozen=True)
class ChatReport:
    """What a mixture of conversations gives at a row length."""

    conversations: int
    truncated: int  # longer than a row, cut
    dropped: int  # without a supervised token in what fits a row
    tokens: int  # of the conversations kept
    supervised: int  # of these, trained


def chat_report(mixture: Sequence[dict], tokenizer: Tokenizer, sequence_len: int) -> ChatReport:
    """Renders the whole mixture for rows of `sequence_len` + 1 tokens and counts."""
    every = [render_conversation(tokenizer, mixture[i], max_tokens=sequence_len + 1) for i in range(len(mixture))]
    kept = [rendered for rendered in every if rendered.supervised]
    return ChatReport(
        conversations=len(every),
        truncated=sum(bool(rendered.truncated) for rendered in every),
        dropped=len(every) - len(kept),
        tokens=sum(len(rendered.ids) for rendered in kept),
        supervised=sum(rendered.supervised for rendered in kept),
    )
