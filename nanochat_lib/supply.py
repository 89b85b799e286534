"""Is there enough to train on? Asked before the first step: data that run out silently are read again and again."""

from __future__ import annotations

import math
from array import array
from bisect import insort
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np

from nanochat_lib.conversation import render_conversation
from nanochat_lib.errors import UserError
from nanochat_lib.packing import FETCH_DOCS, best_fit
from nanochat_lib.shards import ShardCorpus
from nanochat_lib.shares import smallest_share

if TYPE_CHECKING:
    from nanochat_lib.corpus import Corpus
    from nanochat_lib.tokenizer import Tokenizer

SAMPLE_PLACES = 16  # places of the corpus that are looked at
SIMULATED = 300_000  # documents whose packing is played through; longer streams go on at their steady rate
STEADY_BUFFERS = 30  # the steady rate is measured over this many times the buffer


@dataclass(frozen=True)
class Supply:
    """An estimate of what a split holds, from a sample of its documents."""

    documents: int
    tokens: int  # BOS included
    usable: float  # share of the tokens that become targets; the rest is cut off where rows end
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
    sample_docs: int = 4096,
    world: int = 1,
) -> Supply:
    """Raises UserError when `tokens_needed` targets need more than `epochs` readings of the split.

    Tokens are estimated from documents sampled evenly over the split (all of them when there are few). With
    `sequence_len` the packing of each of `world` processes is played through, by lengths alone, to find what cutting at
    row ends costs; without it nothing is cut. All processes stop when the one with the smallest share has no more.
    """
    size = corpus.num_documents(split)
    if size < 1:
        raise UserError(f"the {split} split has no documents: there is nothing to train on")
    texts, looked_at = sample_texts(corpus, split, sample_docs)
    ids = tokenizer.encode(texts, prepend=tokenizer.bos_id)
    lengths = np.array([len(row) for row in ids if len(row) > 1], np.int64)
    if not len(lengths):
        raise UserError(f"the {split} split has no text: all {looked_at:,} documents looked at are empty")
    with_text = len(lengths) / looked_at
    tokens = round(float(lengths.mean()) * with_text * size)
    share = smallest_share(corpus, split, world, epochs) * with_text  # documents of one process, all readings together
    usable = share * world / (size * with_text * epochs)
    if sequence_len is not None:
        in_order = world == 1 and looked_at == size
        rows = packed_rows(lengths, round(share), sequence_len + 1, buffer_docs, in_order)
        usable = rows * sequence_len * world / (tokens * epochs)
    usable = min(usable, 1.0)
    try:
        readings = readings_needed(tokens_needed, tokens * usable, epochs, f"{size:,} {split} documents")
    except UserError as error:
        if not isinstance(corpus, ShardCorpus):
            raise
        raise UserError(f"{error}{corpus.advice(tokens_needed / (tokens * usable), epochs)}") from None
    return Supply(size, tokens, usable, readings)


def sample_texts(corpus: Corpus, split: str, count: int) -> tuple[list[str], int]:
    """(texts, how many documents were looked at to find them): about `count` from evenly spread places, or all."""
    size = corpus.num_documents(split)
    if isinstance(corpus, ShardCorpus):  # whole row groups are read, so that rows are taken from all over them
        groups = len(corpus.groups(split))
        places = min(groups, SAMPLE_PLACES)
        with ThreadPoolExecutor(places) as pool:
            found = pool.map(lambda i: corpus.read_group(split, i * groups // places), range(places))
            rows = [row for group in found for row in group[:: max(len(group) * places // count, 1)]]
        return [text for text in rows if text is not None], len(rows)
    places = 1 if size <= count else SAMPLE_PLACES
    share = -(-min(size, count) // places)
    texts = [text for i in range(places) for text in islice(corpus.documents(split, i * size // places), share)]
    return texts, len(texts)


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


def packed_rows(lengths: np.ndarray, documents: int, capacity: int, buffer_docs: int, in_order: bool = False) -> float:
    """Rows of `capacity` tokens that one process fills from `documents` documents with lengths like the given ones.

    Best fit cuts the shortest document when none fits. So documents longer than a row stay, and fill the buffer up
    until there are only such left and nearly every row ends in a cut: at first about 2 % of web text is lost, then a
    third. How long that takes depends on the lengths; the steady rate is that of a buffer which begins filled up.
    """
    rng = np.random.default_rng(0)
    kept = np.minimum(lengths, capacity + 1)  # by how much a document is longer than a row makes no difference

    def stream() -> Iterator[int]:
        while True:
            yield from (kept if in_order else rng.permutation(kept)).tolist()

    first = min(documents, SIMULATED)
    rows = sum(1 for _ in best_fit_rows(islice(stream(), first), capacity, buffer_docs, []))
    if documents > first:
        # The end of `first` used the buffer up, which happens once in any case.
        longer = [capacity + 1] * (buffer_docs if (kept > capacity).any() else 0)
        steady = STEADY_BUFFERS * max(buffer_docs, FETCH_DOCS)
        filled = best_fit_rows(islice(stream(), steady), capacity, buffer_docs, longer)
        rows += (sum(1 for _ in filled) - len(longer)) / steady * (documents - first)
    return rows


def best_fit_rows(lengths: Iterator[int], capacity: int, buffer_docs: int, buffer: list[int]) -> Iterator[int]:
    """`BestFitPacker` without the tokens: yields for each full row how many documents wait after it."""
    waiting = Counter(buffer)
    order = sorted(waiting)  # the lengths that occur
    count, room = len(buffer), capacity
    while True:
        while count < buffer_docs and (fetched := list(islice(lengths, FETCH_DOCS))):
            count += len(fetched)
            for length in fetched:
                waiting[length] += 1
                if waiting[length] == 1:
                    insort(order, length)
        at = best_fit(order, room)
        if at is None:
            return
        length = order[at]
        waiting[length] -= 1
        count -= 1
        if not waiting[length]:
            del order[at]
        room -= min(length, room)
        if not room:
            yield count
            room = capacity


@dataclass(frozen=True)
class ChatReport:
    """What a mixture of conversations gives at a row length."""

    conversations: int
    truncated: int  # longer than a row, cut
    dropped: int  # without a supervised token in what fits a row
    tokens: int  # of the conversations kept
    supervised: int  # of these, trained
    rows: int = 0  # they fill, when they are packed


def chat_report(
    mixture: Sequence[dict],
    tokenizer: Tokenizer,
    sequence_len: int,
    *,
    rank: int = 0,
    world: int = 1,
    buffer: int = 0,
    told: Callable[[int], None] = lambda count: None,
) -> ChatReport:
    """Renders process `rank`'s share of the mixture for rows of `sequence_len` + 1 tokens; keeps nothing but lengths.

    With `buffer`, the number of conversations that the packer chooses from, it also says how many rows they fill.
    `told(n)` is called when n more have been rendered.
    """
    counts: Counter[str] = Counter()
    lengths = array("i")
    for place in range(rank, len(mixture), world):
        rendered = render_conversation(tokenizer, mixture[place], max_tokens=sequence_len + 1)
        told(1)
        counts["all"] += 1
        counts["truncated"] += rendered.truncated
        counts["supervised"] += rendered.supervised
        if rendered.supervised:
            lengths.append(len(rendered.ids))
    rows = padded_rows(iter(lengths), sequence_len + 1, buffer) if buffer else 0
    dropped = counts["all"] - len(lengths)
    return ChatReport(counts["all"], counts["truncated"], dropped, sum(lengths), counts["supervised"], rows)


def padded_rows(lengths: Iterator[int], capacity: int, buffer: int) -> int:
    """How many rows `BestFitPacker` fills with documents of these lengths, none cut: packing without the tokens."""
    waiting: Counter[int] = Counter()
    order: list[int] = []  # the lengths that occur
    count, rows, room = 0, 0, 0
    while True:
        while count < buffer and (length := next(lengths, 0)):
            waiting[length] += 1
            count += 1
            if waiting[length] == 1:
                insort(order, length)
        at = best_fit(order, room, crop=False)
        if at is None:
            if not count:
                return rows
            rows, room = rows + 1, capacity
            continue
        length = order[at]
        waiting[length] -= 1
        count -= 1
        if not waiting[length]:
            del order[at]
        room -= length
