"""Best-fit packing: which document goes next into a row, found without looking through the buffer.

Rows of a fixed number of tokens are filled from a buffer of tokenised documents (nanochat's rule):
the longest document that still fits is placed; when none fits, pretraining cuts the shortest one to the room that is
left and drops its rest, while chat rows are never cut and end with padding. Among equals the one that came first wins.

The plain way looks at every document of the buffer for each placement. Here documents wait in one queue per length,
and the lengths that occur are kept sorted: a binary search finds the queue, its head is the document.
"""

from __future__ import annotations

import base64
import zlib
from bisect import bisect_right, insort
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

import numpy as np

from nanochat_lib.errors import UserError

FETCH_DOCS = 128  # documents that pretraining tokenises and adds at once


class Document(NamedTuple):
    """`length` tokens, of which the first min(length, capacity) are kept: a row has no room for more."""

    length: int
    ids: np.ndarray  # int32
    mask: np.ndarray | None  # int8, 1 = supervised; None in pretraining, where every token is


class Log(NamedTuple):
    """What has become of a buffer since it was `before`. The lists only grow, so other threads may read them."""

    before: dict[int, Document]
    first: int  # number of the first document added
    added: list[Document]
    taken: list[int]  # numbers


class Mark(NamedTuple):
    """A buffer as it was when so many documents of its log had been added, and so many taken."""

    log: Log
    added: int
    taken: int

    def documents(self) -> list[Document]:
        """In order of arrival."""
        waiting = self.log.before | dict(enumerate(self.log.added[: self.added], self.log.first))
        for number in self.log.taken[: self.taken]:
            del waiting[number]
        return list(waiting.values())


NOTHING = Mark(Log({}, 0, [], []), 0, 0)


def best_fit(lengths: Sequence[int], room: int, crop: bool = True) -> int | None:
    """Index into the ascending `lengths`: the longest that fits into `room`, else the shortest (`crop`), else None."""
    fitting = bisect_right(lengths, room)
    if not lengths or not (fitting or crop):
        return None
    return max(fitting - 1, 0)


class BestFitPacker:
    """Fills rows of `capacity` tokens from a buffer, topped up to `buffer_size` documents before every placement.

    `crop=True` (pretraining) cuts the shortest document when none fits; `crop=False` (chat) pads with `pad_id`, mask 0.
    """

    def __init__(self, capacity: int, buffer_size: int, *, crop: bool = True, pad_id: int = 0) -> None:
        if capacity < 1 or buffer_size < 1:
            raise UserError(f"a packer needs rows and a buffer of at least 1, got {capacity} and {buffer_size}")
        self.capacity, self.buffer_size, self.crop, self.pad_id = capacity, buffer_size, crop, pad_id
        self._waiting: dict[int, Document] = {}  # by number, in order of arrival
        self._queues: dict[int, deque[int]] = {}  # numbers by length, in order of arrival
        self._lengths: list[int] = []  # the keys of _queues, ascending
        self._arrived = 0
        self._log: Log | None = None

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, ids: Sequence[int], mask: Sequence[int] | None = None, *, owned: bool = False) -> None:
        """Puts a document of at least one token at the end of the buffer.

        `owned`: `ids` is an int32 array that nobody else will change, so it need not be copied.
        """
        length = len(ids)
        if not length:
            raise UserError("a document without tokens cannot be packed: drop it before")
        if length > self.capacity and not self.crop:
            raise UserError(
                f"a conversation of {length:,} tokens never fits a row of {self.capacity:,}: "
                "cut it when it is rendered, or use longer rows"
            )
        kept = ids if owned and length <= self.capacity else np.array(ids[: self.capacity], np.int32)
        self._insert(Document(length, kept, None if mask is None else np.array(mask[: self.capacity], np.int8)))

    def _insert(self, document: Document) -> None:
        queue = self._queues.get(document.length)
        if queue is None:
            queue = self._queues[document.length] = deque()
            insort(self._lengths, document.length)
        queue.append(self._arrived)
        self._waiting[self._arrived] = document
        self._arrived += 1
        if self._log is not None:
            self._log.added.append(document)

    def take(self, room: int) -> Document | None:
        """Removes and returns what to place into `room` tokens: longest that fits, else (crop) shortest, else None."""
        at = best_fit(self._lengths, room, self.crop)
        if at is None:
            return None
        length = self._lengths[at]
        queue = self._queues[length]
        number = queue.popleft()
        document = self._waiting.pop(number)
        if self._log is not None:
            self._log.taken.append(number)
        if not queue:
            del self._queues[length], self._lengths[at]
        return document

    def fill_row(self, row: np.ndarray, mask: np.ndarray | None, refill: Callable[[], bool]) -> int:
        """Writes the next row into `row` (capacity,) and, when given, `mask` (capacity,). Returns how much is content.

        `refill` adds at least one document and returns True, or returns False once there are no more.
        The rest of a row that is not full (no document fits, or none is left) is padding.
        """
        position = 0
        while position < self.capacity:
            while len(self._waiting) < self.buffer_size and refill():
                pass
            document = self.take(self.capacity - position)
            if document is None:
                break
            end = min(position + document.length, self.capacity)
            row[position:end] = document.ids[: end - position]
            if mask is not None:
                mask[position:end] = 1 if document.mask is None else document.mask[: end - position]
            position = end
        row[position:] = self.pad_id
        if mask is not None:
            mask[position:] = 0
        return position

    def snapshot(self) -> list[Document]:
        """The buffer in order of arrival."""
        return list(self._waiting.values())

    def mark(self) -> Mark:
        """The buffer as it is now, to be looked at later if at all: with every batch, so it does not copy the buffer.

        It notes how far the log of changes has come, and begins another one when that is longer than the buffer.
        """
        log = self._log
        if log is None or len(log.taken) > len(self._waiting):
            log = self._log = Log(self._waiting.copy(), self._arrived, [], [])
        return Mark(log, len(log.added), len(log.taken))

    def state_dict(self) -> dict:
        """The buffer as plain data for JSON; `load_state` restores it exactly."""
        return encode_documents(self.snapshot())

    def load_state(self, state: dict) -> None:
        """Replaces the buffer by a saved one."""
        self._waiting, self._queues, self._lengths, self._log = {}, {}, [], None
        for document in decode_documents(state, self.capacity):
            self._insert(document)


def encode_documents(documents: Iterable[Document]) -> dict:
    """{"lengths", "ids", "mask"}: true lengths as numbers; arrays joined, compressed, base64. About 2 bytes a token.

    By length, then in the order given: all that a packer's picks depend on.
    """
    documents = sorted(documents, key=lambda document: document.length)
    masks = [d.mask for d in documents if d.mask is not None]
    if len(masks) not in (0, len(documents)):
        raise ValueError("either all documents have a mask or none")
    return {
        "lengths": [d.length for d in documents],
        "ids": _encode([d.ids for d in documents], "<i4"),
        "mask": _encode(masks, "i1") if masks else None,
    }


def decode_documents(state: dict, capacity: int) -> list[Document]:
    """Inverse of `encode_documents`. UserError when the saved data do not fit rows of `capacity` or are damaged."""
    try:
        lengths = [int(n) for n in state["lengths"]]
        ends = np.cumsum([min(n, capacity) for n in lengths], dtype=np.int64)
        ids = _decode(state["ids"], "<i4").astype(np.int32, copy=False)
        masks = None if state["mask"] is None else _decode(state["mask"], "i1")
        total = int(ends[-1]) if lengths else 0
        if min(lengths, default=1) < 1 or len(ids) != total or (masks is not None and len(masks) != total):
            raise ValueError(f"{len(ids):,} token ids for {total:,} places")
    except (KeyError, TypeError, ValueError, zlib.error) as error:
        raise UserError(f"the saved packer buffer does not fit rows of {capacity:,} tokens ({error})") from None
    parts = np.split(ids, ends[:-1]) if lengths else []
    mask_parts = [None] * len(parts) if masks is None else np.split(masks, ends[:-1])
    return [Document(n, i, m) for n, i, m in zip(lengths, parts, mask_parts, strict=True)]


def _encode(arrays: list[np.ndarray], dtype: str) -> str:
    joined = np.concatenate(arrays) if arrays else np.zeros(0)
    return base64.b64encode(zlib.compress(joined.astype(dtype).tobytes(), 1)).decode("ascii")


def _decode(text: str, dtype: str) -> np.ndarray:
    return np.frombuffer(zlib.decompress(base64.b64decode(text)), dtype)
