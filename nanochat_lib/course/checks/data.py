"""Checks, hints, quizzes and predictions of chapter 04, Data."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import jax
import numpy as np

from nanochat_lib import corpus, loader, packing, supply
from nanochat_lib.course.cases import (
    Exercise,
    Option,
    Prediction,
    Quiz,
    budget,
    example,
    prop,
    raises,
    reference,
    sign,
    suspect,
)
from nanochat_lib.errors import UserError

BOS = 0
# Document lengths, BOS included, of the worked example of nanochat's rule: rows of 17 tokens, a buffer of 10.
LENGTHS = (17, 6, 5, 9, 16, 10, 16, 12, 10, 9, 8, 6, 18, 9, 14, 2, 13, 8, 14, 7, 18, 2, 4, 11, 16)


def numbered(lengths: Sequence[int]) -> list[list[int]]:
    """Documents of these lengths: BOS, then the document's own number again and again, so that a mix-up shows."""
    return [[BOS] + [k + 1] * (int(n) - 1) for k, n in enumerate(lengths)]


def random_documents(rng: np.random.Generator, count: int, longest: int) -> list[list[int]]:
    return numbered(rng.integers(2, longest + 1, count))


# ---- rows with the library's packer, in the form that the exercise asks for


def packed_rows(documents: list[list[int]], capacity: int, buffer_size: int, state: dict | None = None) -> Iterator:
    """(row, state) like the exercise `data.pack_rows`, made with `BestFitPacker`. `waiting` stands in another order."""
    packer = packing.BestFitPacker(capacity, buffer_size)
    ahead = (state or {"next": 0})["next"]
    for ids in (state or {"waiting": []})["waiting"]:
        packer.add(ids)

    def refill() -> bool:
        nonlocal ahead
        if ahead == len(documents):
            return False
        packer.add(documents[ahead])
        ahead += 1
        return True

    row = np.empty(capacity, np.int32)
    while packer.fill_row(row, None, refill) == capacity:
        # The packer keeps `capacity` tokens of a longer document; its true length is made up so that order stays.
        waiting = [d.ids.tolist() + [0] * (d.length - len(d.ids)) for d in packer.snapshot()]
        yield row.tolist(), {"next": ahead, "waiting": waiting}


def rows_only(fn: Callable, documents: list[list[int]], capacity: int, buffer_size: int) -> list[list[int]]:
    return [list(map(int, row)) for row, _ in islice(fn(documents, capacity, buffer_size), 500)]


def interrupted(
    fn: Callable, documents: list[list[int]], capacity: int, buffer_size: int, stop: int
) -> list[list[int]]:
    """All rows, when the stream is stopped after `stop` rows and goes on from its state, which was saved as JSON."""
    rows, state = [], None
    for row, after in islice(fn(documents, capacity, buffer_size), stop):
        rows.append(row)
        state = json.dumps(after)
    if state is None:
        raise ValueError(f"the stream ended before row {stop}")
    rest = fn(documents, capacity, buffer_size, json.loads(state))
    return [list(map(int, row)) for row in rows] + [list(map(int, row)) for row, _ in islice(rest, 500)]


def states_kept(fn: Callable, documents: list[list[int]], capacity: int, buffer_size: int, stop: int) -> list:
    """The rows after row `stop`, from a state that was kept while the stream went on for ten more rows."""
    kept = [state for _, state in islice(fn(documents, capacity, buffer_size), stop + 10)]
    return [list(map(int, row)) for row, _ in islice(fn(documents, capacity, buffer_size, kept[stop - 1]), 500)]


def fresh_rest(documents: list[list[int]], capacity: int, buffer_size: int, stop: int) -> list[list[int]]:
    """What `interrupted` gives when the waiting documents are forgotten."""
    before = list(islice(packed_rows(documents, capacity, buffer_size), stop))
    emptied = {"next": before[-1][1]["next"], "waiting": []}
    return [row for row, _ in before + list(packed_rows(documents, capacity, buffer_size, emptied))]


# ---- hints: what the right answers give


def _held_out_shown() -> str:
    texts = [f"page {i}" for i in range(10_000)]
    chosen = [text for text in texts if corpus.held_out(text)]
    return f"of 10,000 texts 'page 0' … 'page 9999', {len(chosen)} are held out, the first: {', '.join(chosen[:6])}"


def _grid(rows: list[list[int]], title: str) -> object:
    from nanochat_lib.report.strips import batch_grid

    return batch_grid(np.array(rows), BOS, title=title)


def _mask_shown() -> object:
    from nanochat_lib.report.plots import new_figure

    figure, ax = new_figure(height=2.6, width=3.2)
    ids = [0, 5, 5, 0, 6, 6, 6, 0, 7]
    document = [1, 1, 1, 2, 2, 2, 2, 3, 3]
    seen = np.array([[j <= i and document[i] == document[j] for j in range(9)] for i in range(9)])
    ax.imshow(~seen, cmap="gray", vmin=-1, vmax=1.4)
    ax.set_xticks(range(9), ids)
    ax.set_yticks(range(9), ids)
    ax.set_title("visible (dark) keys")
    ax.grid(visible=False)
    return figure


def _dealt_shown() -> str:
    lines = []
    for positions, world in (([6, 7, 5], 2), ([9, 4], 3)):
        starts, skipped = loader.deal_anew(positions, world)
        lines.append(f"stopped at {positions}: {world} processes go on at {starts}, {skipped} left out")
    return "\n".join(lines)


def _refusal_shown() -> str:
    try:
        supply.readings_needed(1_000_000, 400_000, 2.0)
    except UserError as error:
        return f"UserError: {error}"
    return ""


def _equal_shown() -> str:
    batch = np.arange(12).reshape(3, 2, 2)
    batch[2] = batch[0]
    try:
        loader.distinct_microbatches(batch)
    except UserError as error:
        return f"UserError: {error}"
    return ""


# ---- properties


def _one_side(out: list[bool], texts: list[str]) -> str:
    share = sum(out) / len(out)
    if not 0.03 < share < 0.08:
        return f"{share:.1%} of {len(out):,} texts are held out, not about 5 %"
    return "" if all(isinstance(side, (bool, np.bool_)) for side in out) else "answers must be True or False"


def _dealt_right(out: object, positions: list[int], world: int) -> str:
    starts, skipped = out
    before = len(positions)
    done = {i for r, stop in enumerate(positions) for i in range(r, stop, before)}
    end = max(positions) + 40
    coming: list[int] = [i for start in starts for i in range(int(start), end, world)]
    if len(starts) != world or any(int(start) % world != rank for rank, start in enumerate(starts)):
        return f"process r of {world} must read items r, r + {world}, …; it goes on at {list(starts)}"
    if twice := sorted(done & set(coming)):
        return f"item {twice[0]} is read twice"
    lost = sorted(set(range(end)) - done - set(coming))
    if late := [i for i in lost if i > max(done, default=-1)]:
        return f"item {late[0]} is after everything that was read, yet nobody reads it"
    return "" if skipped == len(lost) else f"{len(lost)} items are left out, you count {skipped}"


def _names_both(fn: Callable, *args: object) -> str:
    """The message of the UserError, with all but digits and spaces removed; "" when nothing is raised."""
    try:
        fn(*args)
    except UserError as error:
        return str(error)
    return ""


def _says(*words: str) -> Callable:
    def holds(out: str, *args: object) -> str:
        if not out:
            return "nothing was raised: it must be a UserError"
        if "\n" in out:
            return "the message must be one line"
        missing = [word for word in words if word not in out]
        return f"the message lacks {', '.join(missing)}: {out!r}" if missing else ""

    return holds


def _silent(out: str, *args: object) -> str:
    return f"a false alarm: {out}" if out else ""


def micro_batches(rng: np.random.Generator, a: int = 5) -> np.ndarray:
    return rng.integers(0, 9, (a, 2, 3)).astype(np.int32) + 10 * np.arange(a, dtype=np.int32)[:, None, None]


def with_equal(rng: np.random.Generator, first: int, second: int) -> tuple[np.ndarray]:
    batch = micro_batches(rng)
    batch[second] = batch[first]
    return (batch,)


def same_numbers(rng: np.random.Generator) -> tuple[np.ndarray]:
    """Micro-batches of the same tokens in different order: equal sums, first rows and sets, yet not equal."""
    return (np.array([[[1, 2], [3, 4]], [[1, 2], [4, 3]], [[2, 1], [3, 4]], [[3, 4], [1, 2]]], np.int32),)


def padding(rng: np.random.Generator, trained: bool) -> tuple[np.ndarray, np.ndarray]:
    """The last two micro-batches are equal, and padding but for one trained target in each when `trained`."""
    inputs = micro_batches(rng)
    inputs[3:] = 0
    targets = inputs.copy()
    targets[3:] = -1
    if trained:
        targets[3:, 0, 1] = 7
    return inputs, targets


def _many(fn: Callable, texts: list[str]) -> list[bool]:
    return [fn(text) for text in texts]


def some_texts(rng: np.random.Generator, count: int = 60) -> tuple[list[str]]:
    words = ["snow", "é", "  tabs\t", "\nline", "x = 1", "日本"]
    return ([" ".join(rng.choice(words, 3)) + f" {rng.integers(10**6)}" for _ in range(count)],)


def bos_rows(rng: np.random.Generator, shape: tuple[int, int] = (3, 11)) -> tuple[np.ndarray, int]:
    """Random ids (B, T) with BOS = 4 in front and here and there."""
    inputs = rng.integers(5, 9, shape).astype(np.int32)
    inputs[rng.random(shape) < 0.25] = 4
    inputs[:, 0] = 4
    return inputs, 4


def seen_slowly(inputs: np.ndarray, bos: int) -> np.ndarray:
    """(B, T, T) bool: for each query, walk back to the nearest BOS."""
    batch, time = inputs.shape
    out = np.zeros((batch, time, time), bool)
    for b in range(batch):
        for i in range(time):
            for j in range(i, -1, -1):
                out[b, i, j] = True
                if inputs[b, j] == bos:
                    break
    return out


def slow_mask(inputs: jax.Array, bos: int) -> jax.Array:
    """The fallback of `data.document_mask`: right, also inside of jit, and slow, because it leaves the device."""
    batch, time = inputs.shape
    shape = jax.ShapeDtypeStruct((batch, time, time), bool)
    return jax.pure_callback(lambda ids: seen_slowly(np.asarray(ids), bos), shape, inputs)


def long_lengths(rng: np.random.Generator) -> tuple[list[int], int]:
    return np.unique(rng.integers(1, 500_000, 50_000)).tolist(), 250_000


def many_picks(fn: Callable, lengths: list[int], room: int) -> list:
    return [fn(lengths, room + i) for i in range(5)]


EXERCISES = [
    Exercise(
        "data.held_out",
        cases=[
            example(
                "six letters, half held out",
                (["a", "b", "c", "d", "e", "f"],),
                [False, False, True, True, True, True],
                call=lambda fn, texts: [fn(text, 0.5) for text in texts],
            ),
            reference(
                "sixty texts at a share of 0.3",
                lambda rng: some_texts(rng),
                call=lambda fn, texts: [bool(fn(text, 0.3)) for text in texts],
            ),
            prop(
                "about one in twenty",
                lambda rng: ([f"{i} {rng.integers(9)}" for i in range(3000)],),
                _one_side,
                call=_many,
            ),
        ],
        causes=[
            suspect(
                "the key is ('val', digest): with another first part the split is another one",
                lambda texts: [corpus.fraction("train", _hex(t)) < 0.3 for t in texts],
            ),
            suspect(
                "the comparison points the other way: a *small* fraction is held out",
                lambda texts: [corpus.fraction("val", _hex(t)) >= 0.3 for t in texts],
            ),
            suspect(
                "the text is hashed, not what is left of it after strip()",
                lambda texts: [corpus.fraction("val", _hex(t.strip())) < 0.3 for t in texts],
            ),
            sign(
                "Python's hash(text) changes with every process, and other digests give another split: use sha256",
                lambda got, want, texts: want is not None and isinstance(got, list) and got != want,
            ),
        ],
        hints=[
            "Three steps: the text's sha256 as a hex string, a number in [0, 1) from it, a comparison with the share.",
            "`hashlib.sha256(…)` wants bytes: encode the text. Its `.hexdigest()` is the second part of the key that "
            "`fraction` is called with; the first part is the word val.",
            _held_out_shown,
        ],
    ),
    Exercise(
        "data.concat_rows",
        cases=[
            example(
                "three documents, rows of 4",
                ([[0, 1, 1], [0, 2, 2, 2, 2], [0, 3]], 4),
                np.array([[0, 1, 1, 0], [2, 2, 2, 2]], np.int32),
            ),
            example("one row is exactly full", ([[0, 1], [0, 2]], 4), np.array([[0, 1, 0, 2]], np.int32)),
            prop(
                "no token is lost but the last, unfinished row",
                lambda rng: (random_documents(rng, 40, 30), 16),
                lambda out, documents, capacity: (
                    ""
                    if np.asarray(out).ravel().tolist() == [t for d in documents for t in d][: np.asarray(out).size]
                    and np.asarray(out).size == sum(map(len, documents)) // capacity * capacity
                    else "the rows, read one after the other, are not the stream of documents"
                ),
            ),
        ],
        causes=[
            sign(
                "the last row is padded or left too short: drop the rest that fills no row",
                lambda got, want, *_: getattr(got, "ndim", 0) == 2 and want is not None and len(got) == len(want) + 1,
            ),
            sign(
                "a row is missing: a rest of no tokens is not a rest",
                lambda got, want, *_: getattr(got, "ndim", 0) == 2 and want is not None and len(got) == len(want) - 1,
            ),
            sign(
                "the numbers stand column by column: reshape to (rows, capacity), not (capacity, rows)",
                lambda got, want, *_: (
                    want is not None and getattr(got, "shape", None) == want.shape[::-1] and got.shape != want.shape
                ),
            ),
        ],
        hints=[
            "First one long array of all documents, then cut it, then reshape it.",
            "How many whole rows fit? Floor division says it; keep that many times `capacity` tokens of the stream.",
            lambda: _grid([[0, 1, 1, 1, 1, 1, 0, 2], [2, 2, 2, 2, 2, 0, 3, 3], [3, 0, 4, 4, 4, 4, 4, 4]], "End to end"),
        ],
        fallback=lambda documents, capacity: _concatenated(documents, capacity),
    ),
    Exercise(
        "data.best_fit",
        cases=[
            example("a document of exactly the room", ([2, 5, 9], 5), 1),
            example("the longest that fits", ([2, 5, 9], 8), 1),
            example("nothing fits: the shortest is cut", ([4, 5, 9], 3), 0),
            example("nothing fits, and chat rows are never cut", ([4, 5, 9], 3, False), None),
            example("nothing waits", ([], 3), None),
            reference(
                "two hundred rooms",
                lambda rng: (np.unique(rng.integers(2, 90, 12)).tolist(), rng.integers(1, 99, 200).tolist()),
                call=lambda fn, lengths, rooms: [fn(lengths, room) for room in rooms],
            ),
            budget("does not look at every length", long_lengths, time=40.0, call=many_picks),
        ],
        causes=[
            sign(
                "-1 is the *longest* document: when nothing fits the shortest is cut",
                lambda got, want, *_: got == -1 or (isinstance(got, list) and -1 in got),
            ),
            sign(
                "a document of exactly the room fits: count the lengths that are at most room",
                lambda got, want, lengths, room, *_: _differs_where(got, want, room, lambda n: n in lengths),
            ),
            sign(
                "an empty buffer has nothing to give: answer None",
                lambda got, want, lengths, *_: lengths == [] and got is not None,
            ),
            sign(
                "None means that nothing can be placed; with crop=True something always can",
                lambda got, want, *_: got is None and want == 0,
            ),
            sign(
                "this is the shortest that fits; the longest leaves the least room to fill",
                lambda got, want, *_: set(_listed(got)) == {0} and set(_listed(want)) != {0},
            ),
        ],
        hints=[
            "The lengths are sorted. How many of them are at most `room`? Then where is the longest of those?",
            "`bisect_right(lengths, room)` counts them by halving. Treat three cases: no lengths at all, some fit, "
            "none fits (cut the shortest, index 0, or answer None).",
            lambda: "\n".join(
                f"best_fit([4, 5, 9], {room}) -> {packing.best_fit([4, 5, 9], room)}" for room in (3, 4, 7, 9, 20)
            ),
        ],
    ),
    Exercise(
        "data.pack_rows",
        cases=[
            example(
                "nanochat's example: rows of 17, a buffer of 10",
                lambda: (numbered(LENGTHS[:18]), 17, 10),
                [[0] + [1] * 16, [0] + [5] * 15 + [0]],
                call=lambda fn, *args: rows_only(fn, *args)[:2],
            ),
            reference(
                "two hundred documents",
                lambda rng: (random_documents(rng, 200, 40), 16, 12),
                against=packed_rows,
                call=rows_only,
            ),
            reference(
                "stopped after row 9, saved as JSON, continued",
                lambda rng: (random_documents(rng, 120, 30), 16, 9, 9),
                against=packed_rows,
                call=interrupted,
            ),
        ],
        causes=[
            suspect(
                "after the pause the waiting documents are gone: they belong to the state",
                lambda documents, capacity, buffer_size, stop=1: fresh_rest(documents, capacity, buffer_size, stop),
            ),
            sign(
                "with the order of arrival lost, ties go to the wrong document: the first of equals wins",
                lambda got, want, *_: (
                    isinstance(got, list)
                    and want is not None
                    and len(got) == len(want)
                    and [[t == BOS for t in row] for row in got] == [[t == BOS for t in row] for row in want]
                ),
            ),
            sign(
                "every row must be full: cut a document only to the room that is left",
                lambda got, want, documents, capacity, *_: (
                    isinstance(got, list) and any(len(row) != capacity for row in got)
                ),
            ),
            sign(
                "rows are missing at the end: go on until no document waits and none is left to read",
                lambda got, want, *_: isinstance(got, list) and want is not None and len(got) < len(want),
            ),
            sign(
                "the buffer is topped up before *every* placement, not once a row",
                lambda got, want, *_: isinstance(got, list) and want is not None and got != want,
            ),
        ],
        hints=[
            "Two loops: over rows, and inside over placements until the row is full. Before each placement the buffer "
            "is topped up to `buffer_size`, if there are documents left.",
            "Among the waiting documents that fit take the longest (`max(…, key=len)` gives the first of equals), else "
            "the shortest of all; remove it, and append at most `room` of its tokens. The state after a row is the "
            "place of the next document and a *copy* of the list that waits.",
            lambda: _grid([row for row, _ in packed_rows(numbered(LENGTHS), 17, 10)], "Best fit, the worked example"),
        ],
        fallback=packed_rows,
    ),
    Exercise(
        "data.document_mask",
        cases=[
            example(
                "two documents of 2 and 1",
                lambda: (np.array([[4, 7, 4]], np.int32), 4),
                np.array([[[True, False, False], [True, True, False], [False, False, True]]]),
            ),
            reference("three rows of eleven", bos_rows, against=seen_slowly),
        ],
        causes=[
            suspect(
                "a query sees the keys after it: keep the lower triangle",
                lambda inputs, bos: _same_document(inputs, bos),
            ),
            suspect(
                "documents are not told apart: number them along time",
                lambda inputs, bos: np.broadcast_to(
                    np.tri(inputs.shape[1], dtype=bool), (*inputs.shape, inputs.shape[1])
                ),
            ),
            sign(
                "number the documents along time, the last axis; along the batch rows are mixed",
                lambda got, want, *_: (
                    want is not None
                    and getattr(got, "shape", None) == want.shape
                    and bool((np.asarray(got) != want).any())
                    and not bool(np.triu(np.asarray(got), 1).any())
                ),
            ),
            sign(
                "this is the transpose: queries are the rows, keys the columns",
                lambda got, want, *_: (
                    want is not None
                    and getattr(got, "shape", None) == want.shape
                    and bool((np.asarray(got).swapaxes(1, 2) == want).all())
                ),
            ),
        ],
        steps=lambda inputs, bos: {"document": np.cumsum(np.asarray(inputs) == bos, axis=-1)},
        hints=[
            "Number the documents of each row: how many BOS tokens have been seen up to here?",
            "A cumulative sum of `inputs == bos` along time is that number, (B, T). Compare it with itself, once as a "
            "column of queries and once as a row of keys, and keep the lower triangle.",
            _mask_shown,
        ],
        fallback=slow_mask,
    ),
    Exercise(
        "data.deal_anew",
        cases=[
            example("even: three stopped together, two go on", ([6, 7, 8], 2), ([6, 7], 0)),
            example("one process of three was slower", ([6, 4, 8], 2), ([6, 7], 1)),
            prop(
                "nothing twice, nothing lost but what is counted",
                lambda rng: ([r + 3 * int(rng.integers(0, 9)) for r in range(3)], 4),
                _dealt_right,
            ),
            reference(
                "five processes become two", lambda rng: ([r + 5 * int(rng.integers(0, 9)) for r in range(5)], 2)
            ),
        ],
        causes=[
            sign(
                "the processes of the new run start at the frontier; each must start at an item of its own share",
                lambda got, want, positions, world: any(s % world != r for r, s in enumerate(_starts(got))),
            ),
            sign(
                "these starts leave out items that nobody had read: the furthest item *read* is one stride before the "
                "furthest position",
                lambda got, want, *_: _starts(got) and _starts(want) and min(_starts(got)) > min(_starts(want)),
            ),
            sign(
                "these starts read items a second time: go on after the furthest item that anyone had read",
                lambda got, want, *_: _starts(got) and _starts(want) and min(_starts(got)) < min(_starts(want)),
            ),
            sign(
                "the starts are right, the count of items left out is not: count the items of each old share from its "
                "position up to the frontier",
                lambda got, want, *_: _starts(got) and _starts(got) == _starts(want),
            ),
        ],
        hints=[
            "Write down who had read what for `[6, 4, 8]`: process 1 had read item 1 only, items 4 and 7 are missing. "
            "Which item is the furthest that anyone had read? Reading goes on right after it.",
            "A position is the *next* item, one stride (the old number of processes) after the last one read. For the "
            "new start of a process: the first number from the frontier on that is its rank modulo their number.",
            _dealt_shown,
        ],
    ),
    Exercise(
        "data.readings_needed",
        cases=[
            example("one and a half readings of two allowed", (300, 200, 2.0), 1.5),
            example("exactly what is allowed is enough", (400, 200, 2.0), 2.0),
            example("more than allowed is an error", (401, 200, 2.0), raises(UserError)),
            prop(
                "the error says what is needed, what there is, and the epochs that would do",
                lambda rng: (1_000_000, 400_000, 2.0, "1,234 train documents"),
                _says("1,000,000", "800,000", "1,234 train documents", "2.5"),
                call=_names_both,
            ),
        ],
        causes=[
            sign(
                "exactly `epochs` readings are allowed: only more is an error",
                lambda got, want, *_: want == 2.0 and got != 2.0,
            ),
            sign(
                "the ratio is upside down: tokens needed over tokens of one reading",
                lambda got, want, *_: isinstance(got, float) and want == 1.5 and abs(got - 2 / 3) < 1e-9,
            ),
        ],
        hints=[
            "Readings needed = tokens needed / tokens that one reading gives.",
            "When that is more than `epochs`, raise UserError with one line: tokens needed, tokens there "
            "(`int(epochs * tokens)`), and the readings needed, rounded *up* to two digits.",
            _refusal_shown,
        ],
    ),
    Exercise(
        "data.distinct_microbatches",
        cases=[
            prop("all different: silent", lambda rng: (micro_batches(rng),), _silent, call=_names_both),
            prop("neighbours 1 and 2 are equal", lambda rng: with_equal(rng, 1, 2), _says("1", "2"), call=_names_both),
            prop(
                "0 and 3 are equal, with others between",
                lambda rng: with_equal(rng, 0, 3),
                _says("0", "3"),
                call=_names_both,
            ),
            prop("the same numbers in another order are not equal", same_numbers, _silent, call=_names_both),
            prop("padding may repeat", lambda rng: padding(rng, trained=False), _silent, call=_names_both),
        ],
        hints=[
            "Walk through the micro-batches with a dictionary from content to index. Content seen before: raise.",
            "A hash stands for the content: `hashlib.blake2b(…, digest_size=16).digest()` of the array, made "
            "contiguous first. Leave out micro-batches whose targets are all negative, when there are targets.",
            _equal_shown,
        ],
    ),
]


def _hex(text: str) -> str:
    import hashlib

    return hashlib.sha256(text.encode()).hexdigest()


def _concatenated(documents: Sequence[Sequence[int]], capacity: int) -> np.ndarray:
    rows: list[list[int]] = [[]]
    for token in (int(t) for document in documents for t in document):
        if len(rows[-1]) == capacity:
            rows.append([])
        rows[-1].append(token)
    return np.array([row for row in rows if len(row) == capacity], np.int32).reshape(-1, capacity)


def _same_document(inputs: np.ndarray, bos: int) -> np.ndarray:
    mask = seen_slowly(np.asarray(inputs), bos)
    return mask | mask.swapaxes(1, 2)


def _listed(out: object) -> list:
    return out if isinstance(out, list) else [out]


def _differs_where(got: object, want: object, rooms: object, where: Callable) -> bool:
    """Whether got and want, answers to one room or to many, differ, and only for rooms of a kind."""
    gots, wants, rooms = map(_listed, (got, want, rooms))
    if not len(gots) == len(wants) == len(rooms):
        return False
    wrong = [room for a, b, room in zip(gots, wants, rooms, strict=True) if a != b]
    return bool(wrong) and all(map(where, wrong))


def _starts(out: object) -> list[int]:
    try:
        return [int(start) for start in out[0]]
    except (TypeError, IndexError, ValueError):
        return []


QUIZZES = [
    Quiz(
        "data.q_split",
        "A page stands twice in your files. Every 20th document goes to validation. What happens?",
        [
            Option(
                "Nothing, one page in a million does not matter",
                why="One does not. Web text repeats a lot, though, and every copy that lies on both sides is a "
                "question whose answer was trained.",
            ),
            Option(
                "The copies may land on both sides, and validation then measures memory",
                right=True,
                why="A rule by content puts equal documents on the same side, wherever they stand.",
            ),
            Option(
                "Training fails: a document must be unique",
                why="Nothing fails. That is the trouble: the loss only looks better than it is.",
            ),
        ],
    ),
    Quiz(
        "data.q_scale",
        "You switch from end-to-end rows to best fit. The training loss falls by 0.05 at once. Is the model better?",
        [
            Option(
                "Yes, loss is loss",
                why="The rows changed: fewer positions lack the start of their document, so the same model finds "
                "the text easier to guess.",
            ),
            Option(
                "One cannot say: loss on different rows is a different measurement",
                right=True,
                why="Compare on one fixed set of validation rows, or on tasks. nanochat's own log says that losses "
                "before and after the switch are not comparable.",
            ),
            Option(
                "No, the model is worse, since a third of the text is thrown away",
                why="What is thrown away is never seen, but the web is larger than any run: 400 billion tokens are "
                "there, a d24 run reads a few billion.",
            ),
        ],
    ),
    Quiz(
        "data.q_state",
        "A run must go on token for token. What has to be in its saved state?",
        [
            Option(
                "The index of the next document",
                why="Then the documents that wait in the buffer are lost: a thousand of them in nanochat.",
            ),
            Option(
                "The index, and the documents in the buffer in an order that keeps ties",
                right=True,
                why="All later picks depend on nothing else. Tokeniser, row length and buffer size are compared, so "
                "that a state of other settings is refused.",
            ),
            Option("The random seed", why="Nothing is drawn here: the order of documents is fixed."),
        ],
    ),
    Quiz(
        "data.q_mask",
        "Why do nanochat and the 3.8B run train without a mask between documents?",
        [
            Option(
                "The mask is wrong: documents of a row belong together",
                why="They do not: they are neighbours because their lengths fit.",
            ),
            Option(
                "Measured at their size it changed nothing, and it costs code and kernels",
                right=True,
                why="At depth 16: 0.85427 against 0.85407 bits per byte, which is noise. A deep model learns what "
                "BOS means.",
            ),
            Option(
                "Masks do not work with flash attention",
                why="They do: variable-length kernels exist, and nanochat tried one.",
            ),
        ],
    ),
]

PREDICTIONS = [
    Prediction(
        "data.p_cropped",
        "Rows of 2,049 tokens, web-like documents of 1,000 tokens on average, a buffer of 1,000 documents to choose "
        "from. What share of all tokens does best fit throw away in the long run?",
        unit="%",
    ),
    Prediction(
        "data.p_distinct",
        "A step collects 8 micro-batches with np.asarray from a loader that reuses its array. How many different "
        "micro-batches does the step train on?",
    ),
]
