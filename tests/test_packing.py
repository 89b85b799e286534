"""The fast packer makes, document for document, the rows of the plain algorithm."""

import json
from itertools import count

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat_lib import packing
from nanochat_lib.errors import UserError
from nanochat_lib.packing import BestFitPacker, best_fit


def naive_rows(documents, capacity, buffer_size, chunk, crop, pad):
    """The rule as nanochat words it, looking at the whole buffer each time. Yields (row, mask) until documents end."""
    waiting, buffer = list(documents), []
    while True:
        row, mask = [], []
        while len(row) < capacity:
            while len(buffer) < buffer_size and waiting:
                buffer += waiting[:chunk]
                del waiting[:chunk]
            room = capacity - len(row)
            best = None
            for i, (ids, _) in enumerate(buffer):
                if len(ids) <= room and (best is None or len(ids) > len(buffer[best][0])):
                    best = i
            if best is None and crop and buffer:
                for i, (ids, _) in enumerate(buffer):
                    if best is None or len(ids) < len(buffer[best][0]):
                        best = i
            if best is None:
                break
            ids, bits = buffer.pop(best)
            row += ids[:room]
            mask += bits[:room]
        if not row:
            return
        yield row + [pad] * (capacity - len(row)), mask + [0] * (capacity - len(row)), len(row)


def packed_rows(documents, capacity, buffer_size, chunk, crop, pad, save_at=-1):
    """The same rows from the packer; after row `save_at` it is replaced by one restored from its JSON state."""
    packer = BestFitPacker(capacity, buffer_size, crop=crop, pad_id=pad)
    waiting = list(documents)

    def refill():
        for ids, mask in waiting[:chunk]:
            packer.add(ids, mask)
        added = bool(waiting[:chunk])
        del waiting[:chunk]
        return added

    for number in count():
        row, mask = np.full(capacity, -7, np.int32), np.full(capacity, 9, np.int8)
        used = packer.fill_row(row, mask, refill)
        if not used:
            return
        yield row.tolist(), mask.tolist(), used
        if number == save_at:
            state = json.loads(json.dumps(packer.state_dict()))
            packer = BestFitPacker(capacity, buffer_size, crop=crop, pad_id=pad)
            packer.load_state(state)


@st.composite
def cases(draw):
    crop = draw(st.booleans())
    capacity = draw(st.integers(1, 24))
    longest = draw(st.sampled_from([2, capacity, capacity + 9] if crop else [capacity, max(capacity // 2, 1)]))
    lengths = draw(st.lists(st.integers(1, longest), max_size=60))
    # Every document's tokens are its own number: a tie broken the other way shows.
    documents = [
        ([i + 1] * n, draw(st.lists(st.integers(0, 1), min_size=n, max_size=n))) for i, n in enumerate(lengths)
    ]
    buffer_size, chunk = draw(st.integers(1, 12)), draw(st.integers(1, 5))
    return documents, capacity, buffer_size, chunk, crop, draw(st.integers(0, 3))


@settings(max_examples=300, deadline=None)
@given(cases(), st.integers(-1, 6))
def test_equals_the_plain_algorithm(case, save_at):
    assert list(packed_rows(*case, save_at=save_at)) == list(naive_rows(*case))


def test_long_random_stream_equals_the_plain_algorithm():
    rng = np.random.default_rng(5)
    lengths = np.minimum(rng.lognormal(3.5, 1.0, 3000).astype(int) + 1, 700)
    documents = [([i] * n, [1] * n) for i, n in enumerate(lengths)]
    case = (documents, 129, 400, 128, True, 0)
    assert list(packed_rows(*case)) == list(naive_rows(*case))


LENGTHS = [17, 6, 5, 9, 16, 10, 16, 12, 10, 9, 8, 6, 18, 9, 14, 2, 13, 8, 14, 7, 18, 2, 4, 11, 16]


def test_nanochat_example_by_hand():
    """T = 16, two rows a batch, buffer 10, fetched by 8; BOS = 0, the other tokens of document k are k + 1."""
    documents = [([0] + [k + 1] * (n - 1), [1] * n) for k, n in enumerate(LENGTHS)]
    # 8 + 8 documents are there for the first rows, 24 after; at the end of the 25 reading starts again.
    rows = list(packed_rows(documents * 2, 17, 10, 8, True, 0))
    assert [row[:-1] for row, _, _ in rows[:6]] == [
        [0] + [1] * 15,
        [0] + [5] * 15,
        [0] + [7] * 15,
        [0] + [15] * 13 + [0, 2],
        [0] + [19] * 13 + [0, 22],
        [0] + [17] * 12 + [0, 12, 12],
    ]


def test_chat_rows_by_hand():
    documents = [([1] * 4, [0, 1, 1, 1]), ([2] * 6, [0, 0, 1, 1, 1, 1]), ([3] * 3, [0, 0, 1]), ([4] * 4, [0] * 4)]
    rows = list(packed_rows(documents, 9, 10, 1, False, 8))
    assert rows == [
        ([2] * 6 + [3] * 3, [0, 0, 1, 1, 1, 1, 0, 0, 1], 9),
        ([1] * 4 + [4] * 4 + [8], [0, 1, 1, 1, 0, 0, 0, 0, 0], 8),
    ]


@pytest.mark.parametrize(
    ("lengths", "room", "crop", "at"),
    [
        ([2, 5, 9], 5, True, 1), ([2, 5, 9], 8, True, 1), ([2, 5, 9], 9, True, 2), ([2, 5, 9], 99, False, 2),
        ([2, 5, 9], 1, True, 0), ([2, 5, 9], 1, False, None), ([], 4, True, None), ([], 4, False, None),
    ],
)  # fmt: skip
def test_best_fit_by_hand(lengths, room, crop, at):
    assert best_fit(lengths, room, crop) == at


def test_cropping_takes_the_first_of_the_shortest():
    packer = BestFitPacker(4, 10)
    for ids in ([1] * 9, [2] * 7, [3] * 7):
        packer.add(ids)
    assert packer.take(4).ids.tolist() == [2] * 4
    assert packer.take(4).ids.tolist() == [3] * 4
    assert len(packer) == 1


def test_too_long_for_a_chat_row():
    packer = BestFitPacker(8, 4, crop=False)
    packer.add([1] * 8)
    with pytest.raises(UserError, match="9 tokens never fits a row of 8"):
        packer.add([1] * 9)
    with pytest.raises(UserError, match="without tokens"):
        packer.add([])


@pytest.mark.parametrize("sizes", [(0, 5), (5, 0)])
def test_sizes_are_checked(sizes):
    with pytest.raises(UserError, match="at least 1"):
        BestFitPacker(*sizes)


def test_added_documents_are_copied():
    packer = BestFitPacker(4, 4)
    buffer = np.array([1, 2, 3], np.int32)
    packer.add(buffer)
    buffer[:] = 9
    assert packer.take(4).ids.tolist() == [1, 2, 3]


def test_state_of_an_empty_buffer():
    packer = BestFitPacker(4, 4)
    state = packer.state_dict()
    packer.add([1])
    packer.load_state(state)
    assert len(packer) == 0 and packer.take(4) is None


@pytest.mark.parametrize("change", [{"lengths": [3]}, {"ids": "!"}, {"lengths": [0, 2]}, {"lengths": None}])
def test_damaged_state_is_a_clear_error(change):
    packer = BestFitPacker(4, 4)
    packer.add([1])
    packer.add([2])
    with pytest.raises(UserError, match="saved packer buffer"):
        packer.load_state(packer.state_dict() | change)


def test_a_pick_does_not_look_through_the_buffer():
    """Comparisons for a pick among 10,000 documents: counted, not timed."""
    looked = 0

    class Counted(int):
        def __lt__(self, other):
            nonlocal looked
            looked += 1
            return int(self) < int(other)

        def __gt__(self, other):
            nonlocal looked
            looked += 1
            return int(self) > int(other)

        __hash__ = int.__hash__

    packer = BestFitPacker(2048, 10_000)
    rng = np.random.default_rng(0)
    for n in rng.integers(1, 3000, 10_000):
        packer.add([0] * int(n))
    packer._lengths = [Counted(n) for n in packer._lengths]
    for room in range(1, 2001):
        packer.take(room)
    assert looked / 2000 < 20


def test_encoding_is_compact():
    rng = np.random.default_rng(1)
    packer = BestFitPacker(129, 400)
    for n in rng.integers(20, 300, 400):
        packer.add(rng.integers(0, 1024, n).tolist())
    kept = sum(len(d.ids) for d in packer.snapshot())
    assert len(json.dumps(packer.state_dict())) < 3 * kept
    assert all(len(d.ids) <= 129 for d in packer.snapshot())


def test_masks_are_all_or_none():
    documents = [packing.Document(1, np.ones(1, np.int32), None), packing.Document(1, np.ones(1, np.int32), np.ones(1))]
    with pytest.raises(ValueError, match="mask"):
        packing.encode_documents(documents)


@pytest.mark.parametrize("size", [1, 3, 40])
def test_a_mark_is_the_buffer_as_it_was(size):
    """Looked at later, after any number of documents have come and gone, and from a log begun anew many times."""
    rng = np.random.default_rng(size)
    packer, kept = BestFitPacker(50, size), []
    for _ in range(400):
        for _ in range(rng.integers(0, 3)):
            packer.add(rng.integers(0, 9, rng.integers(1, 70)))
        for _ in range(rng.integers(0, 3)):
            packer.take(int(rng.integers(1, 51)))
        kept.append((packer.mark(), packer.snapshot()))
    for mark, documents in kept:
        assert [id(document) for document in mark.documents()] == [id(document) for document in documents]
    logs = {id(mark.log) for mark, _ in kept}
    assert 3 < len(logs) < 400
    state = packer.state_dict()
    packer.load_state(state)
    assert packing.encode_documents(packer.mark().documents()) == state


def test_an_array_that_is_handed_over_is_kept_unless_it_is_longer_than_a_row():
    packer, fits, long = BestFitPacker(8, 4), np.arange(8, dtype=np.int32), np.arange(9, dtype=np.int32)
    packer.add(fits, owned=True)
    packer.add(long, owned=True)
    kept = [document.ids for document in packer.snapshot()]
    assert kept[0] is fits and kept[1].tolist() == list(range(8)) and not np.shares_memory(kept[1], long)
