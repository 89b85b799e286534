# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] id="title" tags=["slide"]
# # Data: where a third of the text goes
#
# Why does a good data loader throw **35 of every 100 tokens** away?
#
# nanochat's does, on purpose. You will build that loader, see what each token that is dropped buys, and then repeat a
# mistake that cost its port to TPUs ten days: a batch that did not own its memory.
#
# When you are through you can
#
# - split documents into training and validation so that no page stands on both sides,
# - fill rows of equal length by best fit, and say what is cropped and what is wasted,
# - stop a stream of batches and go on token for token, also with another number of processes,
# - say what a mask between documents does, and why large runs leave it out,
# - refuse a run that has too little data, and catch a batch that is not what you think.
#
# Eight exercises, about 125 minutes; with the reading some 160 minutes. The solved chapter runs in under three.

# %% id="setup" tags=["setup"]
import hashlib
import json
import math
import tempfile
from bisect import bisect_right, insort
from itertools import islice
from pathlib import Path
from pydoc_data.topics import topics

import jax
import jax.numpy as jnp
import numpy as np

# %% [markdown] id="shards-text"
# ## 1. Shards
#
# A training set is too large for one file. ClimbMix, the text that nanochat trains on, is about 400 billion tokens in
# **6,543 shards**: parquet files of one column `text`, each with at least 250 million characters, some 90 MB once it
# is compressed. All documents were shuffled *once* before they were written, so that a run may read shards in order,
# and any prefix of them is a fair sample. A shard holds *row groups* of 1,024 documents; a reader takes one group at a
# time, so nobody ever needs the whole file in memory.
#
# Here is the same in small: the language reference that comes with Python, in four shards.

# %% id="shards"
import pyarrow as pa
import pyarrow.parquet as pq

from nanochat_lib.corpus import HELD_OUT, FileCorpus
from nanochat_lib.course import (  # noqa: F401
    about,
    check,
    choice,
    explore,
    fast,
    hint,
    mine,
    note,
    predict,
    progress,
    quiz,
    reveal,
    show,
    slider,
    undo,
)
from nanochat_lib.errors import UserError
from nanochat_lib.loader import PretrainLoader, share_states
from nanochat_lib.packing import encode_documents
from nanochat_lib.primer.names import fraction
from nanochat_lib.report.plots import BLUE, FAINT, GREEN, ORANGE, PURPLE, RED, SKY, new_figure
from nanochat_lib.report.strips import batch_grid
from nanochat_lib.supply import check_enough
from nanochat_lib.tokenizer import Tokenizer

passages = [part for name in sorted(topics) for part in topics[name].split("\n\n") if len(part) > 20]
order = np.random.default_rng(42).permutation(len(passages))
scratch = tempfile.TemporaryDirectory()
shards = np.array_split(order, 4)
for i, part in enumerate(shards):
    table = pa.table({"text": [passages[j] for j in part]})
    pq.write_table(table, Path(scratch.name) / f"shard_{i:05d}.parquet", row_group_size=128)

files = sorted(Path(scratch.name).glob("*.parquet"))
for file in files:
    meta = pq.ParquetFile(file).metadata
    print(f"{file.name}: {meta.num_rows} documents in {meta.num_row_groups} row groups")

# %% [markdown] id="split-text"
# Which documents are for validation? With shards the rule is simple: **the last one**. nanochat's download always
# fetches shard 06542, so that everybody measures on the same text, however many shards they train on. With only one
# file, or a folder of your own texts, something else must decide.

# %% id="corpus"
corpus = FileCorpus(Path(scratch.name), files)
for split in ("train", "val"):
    print(f"{split}: {corpus.num_documents(split)} documents")

# %% id="split-quiz"
quiz("data.q_split")


# %% [markdown] id="held-out-text"
# So the *content* decides. A hash of the text gives a number that looks random, yet is the same for equal texts, on
# every machine and in every order. About one text in twenty falls below 0.05.

# %% id="data.held_out" level=1 library="nanochat_lib.corpus:held_out" minutes=10 nbgrader={"cell_type": "code", "grade": false, "grade_id": "data-held_out", "locked": false, "schema_version": 3, "solution": true, "task": false} points=1 tags=["exercise"]
def held_out(text: str, share: float = HELD_OUT) -> bool:
    """Whether a document is for validation.

    Take the sha256 of the text in UTF-8 as hexadecimal digits. `fraction("val", digits)` is a number in [0, 1) that
    depends on nothing else. The document is held out when that number is below `share`.
    """
    raise NotImplementedError


# %% id="data.held_out.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "data-held_out-check", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
check("data.held_out", held_out)

# %% id="held-out-run"
held_out_rule = mine("data.held_out")
pages = [f"page {i}" for i in range(2000)]
twice = pages + pages[::-1]
sides = [held_out_rule(text) for text in twice]
print(
    f"{sum(sides)} of {len(twice)} held out; copies on different sides: "
    f"{sum(a != b for a, b in zip(sides[:2000], sides[:1999:-1], strict=True))}"
)
every_20th = [i % 20 == 0 for i in range(len(twice))]
print(
    "every 20th instead; copies on different sides: "
    f"{sum(a != b for a, b in zip(every_20th[:2000], every_20th[:1999:-1], strict=True))}"
)


# %% [markdown] id="concat-text"
# ## 2. End to end: the naive rows
#
# A model trains on rows of equal length: $T$ tokens to read and, moved by one, $T$ tokens to say. So a row holds
# $T+1$ tokens. Documents have any length. Each begins with the token BOS, "beginning of sequence", which tells the
# model that what stood before does not matter.
#
# The simplest way wastes nothing: write all documents end to end, and cut the ribbon every $T+1$ tokens.

# %% id="data.concat_rows" level=1 minutes=10 nbgrader={"cell_type": "code", "grade": false, "grade_id": "data-concat_rows", "locked": false, "schema_version": 3, "solution": true, "task": false} points=1 tags=["exercise"]
def concat_rows(documents: list, capacity: int) -> np.ndarray:
    """All `documents` (lists of token ids, BOS in front) end to end, cut every `capacity` tokens.

    Returns (rows, capacity) int32. The rest at the end that fills no row is left out.
    """
    raise NotImplementedError


# %% id="data.concat_rows.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "data-concat_rows-check", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
check("data.concat_rows", concat_rows)

# %% id="concat-run" tags=["slide"]
tokenizer = Tokenizer.train(corpus.documents("train"), 512)
documents = tokenizer.encode(list(corpus.documents("train")), prepend=tokenizer.bos_id)
T = 64  # tokens of a row
print(f"{len(documents)} documents, {np.mean([len(d) for d in documents]):.0f} tokens on average")
naive = mine("data.concat_rows")(documents, T + 1)
show(
    batch_grid(naive[:14, :-1], tokenizer.bos_id, title="End to end"),
    alt="fourteen rows of 64 tokens, documents in tints; most rows begin in the middle of a document",
)


# %% [markdown] id="concat-look"
# Nothing is lost, but look at the left edge: most rows start in the middle of a document, which is blue here. The model
# is asked to go on with a sentence whose beginning it cannot see. It is punished for not knowing the unknowable, and it
# learns to guess at the start of a row. nanochat did it this way until January 2026.

# %% [markdown] id="fit-text"
# ## 3. Best fit
#
# Every row shall start where a document starts, and be full. So choose from a **buffer** of waiting documents:
#
# 1. the *longest* that fits into the room that is left goes in;
# 2. when none fits, the *shortest* is cut to the room, and its rest is dropped.
#
# Then the row is full. The packer asks the same question over and over: here are the lengths that wait, here is the
# room. Which one? A buffer of 1,000 documents is asked a few times for each row, so an answer that looks at every
# length is too slow.

# %% id="data.best_fit" level=2 library="nanochat_lib.packing:best_fit" minutes=15 nbgrader={"cell_type": "code", "grade": false, "grade_id": "data-best_fit", "locked": false, "schema_version": 3, "solution": true, "task": false} points=2 tags=["exercise"]
def best_fit(lengths: list, room: int, crop: bool = True) -> int | None:
    """Index into `lengths` (ascending, each once) of the document to place into `room` tokens.

    The longest that fits. When none fits: the shortest, to be cut, if `crop`, else None. None when nothing waits.
    Look at few lengths only: `bisect_right(a, x)` says how many of the sorted `a` are at most x.
    """
    raise NotImplementedError


# %% id="data.best_fit.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "data-best_fit-check", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("data.best_fit", best_fit)

# %% [markdown] id="cropped-text"
# ## 4. What is cropped, what is wasted
#
# How much text does the rule cost? We need no words for that, only lengths. Those of web pages are close to
# log-normal: many short ones, a few very long. Two numbers that nanochat measured for rows of 2,048 fix the curve:
# documents longer than a row must lose **22.9 %** of all tokens whatever one does, and taking documents in order,
# cutting each at the row's end, loses **39.4 %**.

# %% id="lengths"
ROW = 2049


def web_lengths(count: int, seed: int = 0) -> np.ndarray:
    """Lengths in tokens of so many web-like documents."""
    return np.random.default_rng(seed).lognormal(6.32, 1.1, count).astype(int) + 2


def titled(ax, title, x="", y=""):
    """Title and axis labels in the course's style."""
    ax.set_title(title, loc="left", fontweight="bold", fontsize=10)
    ax.set_xlabel(x)
    ax.set_ylabel(y)


def in_order(lengths: np.ndarray, capacity: int) -> float:
    """Share of tokens lost when documents are placed as they come and cut at the row's end."""
    room, dropped = capacity, 0
    for n in lengths.tolist():
        dropped += max(n - room, 0)
        room = room - n if n < room else capacity
    return dropped / lengths.sum()


sample = web_lengths(100_000)
about(sample.mean(), 1000, within=60, name="tokens of a document")
about(100 * (sample > ROW).mean(), 11.8, within=1, name="documents longer than a row, %")
about(100 * np.maximum(sample - ROW, 0).sum() / sample.sum(), 22.9, within=1.5, name="unavoidable, %")
_ = about(100 * in_order(sample, ROW), 39.4, within=1.5, name="cut in order, %")

# %% [markdown] id="cropped-predict-text"
# Best fit must lie between these two. Where? Guess before you run: `predict("data.p_cropped", 30)`.

# %% id="cropped-predict"
predict("data.p_cropped")

# %% id="cropped-run"
choose = mine("data.best_fit")


def pack_lengths(lengths: np.ndarray, capacity: int, buffer_size: int) -> tuple[list, list]:
    """(rows, too long): each row is a list of (tokens kept, tokens dropped), until the buffer runs low.

    Too long: how many waiting documents no row could hold, after each row.
    """
    todo, waiting = iter(lengths.tolist()), []
    rows, too_long = [[]], []
    room = capacity
    while True:
        while len(waiting) < buffer_size:
            if (n := next(todo, None)) is None:
                return rows[:-1], too_long
            insort(waiting, n)
        n = waiting.pop(choose(waiting, room))
        rows[-1].append((min(n, room), max(n - room, 0)))
        room -= n
        if room <= 0:
            rows.append([])
            room = capacity
            too_long.append(len(waiting) - bisect_right(waiting, capacity))


def dropped_share(rows: list) -> float:
    kept, dropped = np.array([place for row in rows for place in row]).sum(0)
    return float(dropped / (kept + dropped))


DOCS = 9_000 if fast() else 60_000
web = web_lengths(DOCS)
best, too_long = pack_lengths(web, ROW, 1000)
windows = [100 * dropped_share(best[i : i + 500]) for i in range(0, len(best) - 499, 500)]
reveal("data.p_cropped", round(windows[-1], 1))

# %% [markdown] id="silt-text"
# nanochat reports 34.6 % for best fit on real text, so the curve fits well. But the answer depends on *when* you look,
# which no single figure shows.

# %% id="silt" tags=["slide"]
cut_first, _ = pack_lengths(np.minimum(web, ROW), ROW, 1000)
excess = np.maximum(web - ROW, 0).sum() / web.sum()
cut_windows = [
    100 * (excess + (1 - excess) * dropped_share(cut_first[i : i + 500])) for i in range(0, len(cut_first) - 499, 500)
]
greedy = 100 * in_order(web, ROW)

figure, (left, right) = new_figure(1, 2, height=2.9, width=7.6)
left.axhline(greedy, color=FAINT, linestyle=":", label="in order")
left.plot(np.arange(1, len(windows) + 1) * 0.5, windows, color=BLUE, label="best fit, buffer 1,000")
left.plot(
    np.arange(1, len(cut_windows) + 1) * 0.5, cut_windows, color=GREEN, linestyle="--", label="long ones cut first"
)
left.axhline(100 * excess, color=FAINT, linestyle="-.", label="unavoidable")
titled(left, "Tokens dropped", "rows made (thousands)", "% of tokens read")
left.set_ylim(0, 56)
left.legend(fontsize=8, ncols=2, loc="upper center")
right.plot(np.arange(1, len(too_long) + 1) / 1000, np.array(too_long) / 10, color=RED)
titled(right, "The buffer silts up", "rows made (thousands)", "% longer than a row")
right.set_ylim(0, 104)
show(
    figure,
    alt="left: the dropped share of best fit starts near 2 % and rises to that of cutting in order; cutting long "
    "documents first stays near the unavoidable share. right: the share of the buffer too long for a row rises to 100 %",
)

# %% [markdown] id="silt-look" tags=["slide"]
# Best fit starts brilliantly, below even the unavoidable share, because it postpones the long documents. They never
# fit. They leave the buffer only when nothing shorter waits, so they collect, until nearly all of the 1,000 places are
# taken by documents that no row can hold. What is left of the buffer has no choice to offer, and the loss climbs to
# 35 %, not far from that of cutting in order.
#
# One line changes it: cut a document to the length of a row *before* it enters the buffer. Then it fits an empty row,
# is placed at once, and the loss stays below 27 %. This library keeps nanochat's rule, so that its rows can
# be compared; you have just seen how a figure from a short test can differ from the long run.

# %% id="silt-numbers"
_ = about(windows[0], 2, within=1, name="best fit at first, %")
if not fast():
    about(windows[-1], 34.8, within=2, name="best fit in the long run, %")
    _ = about(cut_windows[-1], 25.6, within=1.5, name="long ones cut first, in the long run, %")

# %% [markdown] id="headless-text"
# And what did the end-to-end rows cost? They drop nothing. Count instead the tokens whose document began in an earlier
# row: they are trained without their beginning.

# %% id="headless"
begins = np.cumsum(sample[:4000]) - sample[:4000]
owner = np.repeat(begins, sample[:4000])
headless = (owner // ROW != np.arange(len(owner)) // ROW).mean()
_ = about(100 * headless, 47, within=5, name="tokens without the beginning of their document, %")

# %% [markdown] id="headless-look" tags=["slide"]
# So this is what the third buys. End to end, almost half of all tokens are read without their beginning; with best fit, none.
# The dropped text is no loss as long as there is more text than a run can read: 400 billion tokens are on offer, and a
# d24 run reads six billion.

# %% id="scale-quiz"
quiz("data.q_scale")

# %% [markdown] id="widget-text"
# Try it. Which lengths make a large buffer worthless? What changes with the rows that were made before?
# When is nothing dropped at all? The red ends are tokens that no
# row has room for.

# %% id="widget"
KINDS = {
    "web pages": lambda rng, n: rng.lognormal(-0.75, 1.1, n),
    "short chats": lambda rng, n: rng.lognormal(-1.9, 0.6, n),
    "books": lambda rng, n: rng.lognormal(0.9, 0.5, n),
    "all of one third": lambda rng, n: np.full(n, 1 / 3),
}


def draw_rows(documents="web pages", row_tokens=200, buffer=50, rows_before=100):
    rng = np.random.default_rng(1)
    lengths = np.maximum(KINDS[documents](rng, buffer + 9 * (rows_before + 20)) * row_tokens, 2).astype(int)
    rows, _ = pack_lengths(lengths, row_tokens, buffer)
    rows = rows[rows_before : rows_before + 14]
    kept, dropped = np.array([place for row in rows for place in row]).sum(0)
    orderly = 100 * in_order(lengths, row_tokens)
    figure, ax = new_figure(height=3.3, width=7.6)
    tints = (SKY, ORANGE, GREEN, PURPLE)
    for i, row in enumerate(rows):
        at = 0
        for j, (keep, drop) in enumerate(row):
            ax.barh(i, keep, left=at, color=tints[(i + j) % 4], alpha=0.75, height=0.8)
            at += keep
            if drop:
                ax.barh(i, min(drop, row_tokens), left=row_tokens, color=RED, alpha=0.35, height=0.8)
    ax.axvline(row_tokens, color=RED, linewidth=1)
    ax.set(ylim=(len(rows) - 0.4, -0.6), xlim=(0, 2.02 * row_tokens))
    share = dropped / (kept + dropped)
    titled(ax, f"{kept:,} tokens kept, {dropped:,} dropped ({share:.0%}); in order {orderly:.0f} %", "tokens", "row")
    ax.grid(visible=False)
    return figure


explore(
    draw_rows,
    alt="fourteen full rows of documents, and behind the row's end in red what was cut off them",
    documents=choice(list(KINDS), "web pages"),
    row_tokens=slider(50, 800, 200, 50),
    buffer=slider(1, 400, 50, 1),
    rows_before=slider(0, 300, 100, 10),
)

# %% [markdown] id="stream-text"
# ## 5. A stream that can stop
#
# A run of days will be interrupted. When it goes on, which text comes next? nanochat saves the shard and row group
# that were read last, and starts one further; the thousand documents in the buffer are lost. That is harmless for the
# model, but two runs of the same seed then differ, and you can no longer tell a bug from a restart.
#
# Exact is not hard: all later rows depend on the documents that wait and on the place of the next one. Yield both
# after each row.

# %% id="state-quiz"
quiz("data.q_state")


# %% id="data.pack_rows" level=3 minutes=35 nbgrader={"cell_type": "code", "grade": false, "grade_id": "data-pack_rows", "locked": false, "schema_version": 3, "solution": true, "task": false} points=5 tags=["exercise"]
def pack_rows(documents: list, capacity: int, buffer_size: int, state: dict | None = None):
    """Yields (row, state after it): rows of `capacity` token ids, as lists, by best fit with cropping.

    Before every placement the buffer takes further `documents` (lists of ids), in order, until `buffer_size` wait or
    none is left. Place the longest that fits; when none fits, cut the shortest to the room. Among equals the first to
    come wins. Ends when a row cannot be filled.

    `state` is {"next": index of the next document, "waiting": [the documents that wait]}, and may go through JSON. It
    must not change when the stream goes on. Called with it, `pack_rows` yields the rows that were still to come.
    """
    raise NotImplementedError
    yield


# %% id="data.pack_rows.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "data-pack_rows-check", "locked": true, "points": 5, "schema_version": 3, "solution": false, "task": false}
check("data.pack_rows", pack_rows)

# %% id="resume-run" tags=["slide"]
stream = mine("data.pack_rows")
packed = [row for row, _ in islice(stream(documents, T + 1, 200), 300)]
show(
    batch_grid(np.array(packed[100:280:13])[:, :-1], tokenizer.bos_id, title="Best fit"),
    alt="fourteen rows of 64 tokens, documents in tints; every row begins where a document begins",
)


# %% [markdown] id="resume-look"
# No row begins in blue any more, with the rest of a document from the row before. Now the real loader,
# `PretrainLoader`: the same rule with a faster buffer, batches of (B, T) prepared by a thread ahead of time, and a state
# with each batch. Stop it after batch 12 and go on.

# %% id="resume-loader"
def open_stream(split="train", rows=2, state=None, epochs=4.0):
    return PretrainLoader(corpus, tokenizer, split, rows, T, 200, epochs=epochs, state=state, prefetch=0)


with open_stream() as whole:
    batches = list(islice(whole, 24))
saved = json.dumps(batches[11].state)
with open_stream(state=json.loads(saved)) as rest:
    again = list(islice(rest, 12))
same = all((a.inputs == b.inputs).all() for a, b in zip(batches[12:], again, strict=True))
print(f"12 batches after the pause, all equal: {same}")
print(
    f"the state: document {batches[11].after['position']} comes next, {len(batches[11].buffered)} wait, "
    f"{len(saved) / 1024:.0f} KiB as JSON"
)

forgetful = json.loads(saved) | {"buffer": encode_documents([])}
with open_stream(state=forgetful) as rest:
    other = list(islice(rest, 12))
equal = sum(bool((a.inputs == b.inputs).all()) for a, b in zip(batches[12:], other, strict=True))
print(f"with the buffer forgotten: {equal} of 12 batches are equal")


# %% [markdown] id="deal-text"
# One process is not enough for long. With $W$ of them, process $r$ reads documents $r$, $r+W$, $r+2W$, …: each document
# is read once. But the spot machine with three processes is gone, and the next one has two. Each of the old processes
# had a *position*, its next document, and they were not equally fast. Where do the new ones start?

# %% id="data.deal_anew" level=3 library="nanochat_lib.loader:deal_anew" minutes=20 nbgrader={"cell_type": "code", "grade": false, "grade_id": "data-deal_anew", "locked": false, "schema_version": 3, "solution": true, "task": false} points=3 tags=["exercise"]
def deal_anew(positions: list, world: int) -> tuple[list, int]:
    """(where each of `world` processes goes on, items left out) when len(positions) processes stop at `positions`.

    Old process r of W = len(positions) had read the items r, r + W, … below positions[r]. New process r of `world`
    reads the items of its own share from its start on. Nothing may be read twice: all go on after the furthest item
    that any process had read. What slower processes had not reached before it is left out; count it.
    """
    raise NotImplementedError


# %% id="data.deal_anew.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "data-deal_anew-check", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("data.deal_anew", deal_anew)

# %% id="deal-run"
deal = mine("data.deal_anew")
for positions, world in (([6, 4, 8], 2), ([30, 31, 32, 33], 8)):
    starts, skipped = deal(positions, world)
    print(f"{len(positions)} processes stopped at {positions}; {world} go on at {starts}, {skipped} items left out")

# %% [markdown] id="deal-look"
# `share_states` in `loader.py` does this for the buffers as well: the documents that waited are dealt out to the new
# processes like cards.

# %% id="deal-states"
with open_stream() as stream_of_one:
    one = next(islice(stream_of_one, 30, None)).state
for rank in range(2):
    state, _ = share_states([one], rank, 2)
    print(
        f"process {rank} of 2 gets {len(state['buffer']['lengths'])} waiting documents, goes on at {state['position']}"
    )


# %% [markdown] id="mask-text"
# ## 6. Masks between documents
#
# A row holds several documents that have nothing to do with each other. Attention looks back over all of them. Should
# it? A **document mask** lets a token see its own document only: key $j$ is visible to query $i$ if $j \le i$ and no
# BOS stands between them.

# %% id="data.document_mask" level=2 minutes=15 nbgrader={"cell_type": "code", "grade": false, "grade_id": "data-document_mask", "locked": false, "schema_version": 3, "solution": true, "task": false} points=2 tags=["exercise"]
def document_mask(inputs: jax.Array, bos: int) -> jax.Array:
    """(B, T, T) bool: which keys (last axis) each query (middle axis) sees: not later ones, and its own document only.

    inputs (B, T): token ids; a document starts at every `bos`. Useful step: `note("document", …)` with the number of
    the document at each position, (B, T), counted from 1.
    """
    raise NotImplementedError


# %% id="data.document_mask.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "data-document_mask-check", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("data.document_mask", document_mask)

# %% id="mask-look" tags=["slide"]
masks = jax.jit(mine("data.document_mask"), static_argnums=1)
rows = np.array(packed)[:, :-1]
row = rows[[(rows == tokenizer.bos_id).sum(1).argmax()]]  # the row with the most documents
seen = np.asarray(masks(jnp.asarray(row), tokenizer.bos_id))[0]
causal = np.tri(T, dtype=bool)
figure, ax = new_figure(height=3.0, width=4.6)
ax.imshow(np.where(~causal, 0.0, np.where(seen, 1.0, 0.45)), cmap="Blues", vmax=1.3, interpolation="nearest")
titled(ax, "Keys that a query sees", "key", "query")
ax.grid(visible=False)
ax.text(60, 8, "dark: own document\nlight: other documents", ha="right", va="center", fontsize=8.5)
show(
    figure,
    alt="a triangle of visible keys; dark triangles along the diagonal are the documents, the light rest is other "
    "documents",
)
share = 1 - np.asarray(masks(jnp.asarray(rows), tokenizer.bos_id)).sum() / (len(rows) * causal.sum())
print(f"{share:.0%} of all visible pairs cross a border between documents, in {len(rows)} rows")

# %% [markdown] id="toy-text"
# Does it matter? Train and see. A transformer of one layer, 64 channels wide, is enough for this and for the next
# section. It is written out here because it takes a mask, which the library's model does not.

# %% id="toy"
import optax

V, C, HEADS = tokenizer.vocab_size, 64, 4
A, B = 8, 2  # micro-batches of a step, rows of a micro-batch
STEPS, EVERY = (8, 4) if fast() else (200, 20)


def fresh_params(seed):
    normal = np.random.default_rng(seed).standard_normal
    sizes = {"token": (V, C, 0.5), "place": (T, C, 0.1), "qkv": (C, 3 * C, 0.125), "out": (C, C, 0.0125),
             "up": (C, 4 * C, 0.125), "down": (4 * C, C, 0.006), "head": (C, V, 0.0125)}  # fmt: skip
    return {name: jnp.asarray(scale * normal((a, b)), jnp.float32) for name, (a, b, scale) in sizes.items()}


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def nll(p, inputs, targets, mask):
    """Mean loss in nats; inputs, targets (B, T), mask (B, T, T)."""
    x = p["token"][inputs] + p["place"]
    q, k, v = (part.reshape(*inputs.shape, HEADS, -1) for part in jnp.split(norm(x) @ p["qkv"], 3, -1))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / math.sqrt(C // HEADS)
    weights = jax.nn.softmax(jnp.where(mask[:, None], scores, -1e30))
    x = x + jnp.einsum("bhqk,bkhd->bqhd", weights, v).reshape(x.shape) @ p["out"]
    x = x + jnp.square(jax.nn.relu(norm(x) @ p["up"])) @ p["down"]
    logits = norm(x) @ p["head"]
    chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, -1) - chosen)


adam = optax.adam(optax.cosine_decay_schedule(6e-3, STEPS))


def view(inputs, masked):
    """The mask (rows, T, T) that a model trained with or without document masks sees."""
    return masks(jnp.asarray(inputs), tokenizer.bos_id) if masked else np.broadcast_to(causal, (len(inputs), T, T))


@jax.jit
def update(params, moments, inputs, targets, mask):
    loss, gradients = jax.value_and_grad(nll)(params, inputs, targets, mask)
    updates, moments = adam.update(gradients, moments)
    return optax.apply_updates(params, updates), moments, loss


with open_stream("val", rows=64, epochs=None) as held:
    held_inputs, held_targets = (
        np.concatenate(parts) for parts in zip(*((b.inputs, b.targets) for b in islice(held, 2)), strict=True)
    )
held_loss = jax.jit(nll)


def train(steps, masked=False, seed=0):
    """(loss of each step, held-out losses every EVERY steps); `steps` yields rows (A, B, T + 1)."""
    params = fresh_params(seed)
    moments, losses, held = adam.init(params), [], []
    for step, rows in enumerate(steps, start=1):
        flat = rows.reshape(-1, T + 1)  # A·B rows at once: the mean gradient of A micro-batches of B rows
        inputs, targets = flat[:, :-1], flat[:, 1:]
        params, moments, loss = update(params, moments, inputs, targets, view(inputs, masked))
        losses.append(float(loss))
        if step % EVERY == 0:
            held.append(float(held_loss(params, held_inputs, held_targets, view(held_inputs, masked))))
    return losses, held


def micro_batches(count):
    """Rows (B, T + 1), one micro-batch after the other."""
    with open_stream(rows=B) as loader:
        for batch in islice(loader, count):
            yield np.concatenate([batch.inputs, batch.targets[:, -1:]], 1)


def steps_of(source):
    """(A, B, T + 1) for each step: every micro-batch is copied."""
    return [np.stack([np.array(next(source)) for _ in range(A)]) for _ in range(STEPS)]


right_steps = steps_of(micro_batches(STEPS * A))
print(f"{STEPS * A * B * T:,} tokens in {STEPS} steps" if not fast() else "a short run")

# %% id="mask-run"
plain_losses, plain_held = train(right_steps)
if not fast():
    _, masked_held = train(right_steps, masked=True)
    _, other_seed = train(right_steps, seed=1)
    print(
        f"held-out loss: {plain_held[-1]:.3f} without mask, {masked_held[-1]:.3f} with, "
        f"{other_seed[-1]:.3f} without mask from another seed"
    )
    _ = about(plain_held[-1] - masked_held[-1], 0.043, within=0.025, name="gain of the mask, nats")

# %% [markdown] id="mask-verdict"
# The mask helps this toy by some 0.04 nats, several times more than another seed changes. So why do large runs leave it out?
# Because somebody measured there. nanochat at depth 16 ended at 0.85427 bits per byte with masks and 0.85407 without:
# noise. A public run of 3.8 billion parameters built the mask, and removed it again: the same result. Your toy has one
# layer, 200 steps, and rows of 64 tokens in which a large part of the view is foreign. A deep model with long rows
# learns what BOS means, and is left with a kernel that is harder to write. **A result at toy scale is a question, not
# an answer.**

# %% id="mask-quiz"
quiz("data.q_mask")


# %% [markdown] id="supply-text"
# ## 7. Running out of data
#
# A loader that starts again from the first shard when the last is used up never fails. It only trains on the same text
# a second time, and nobody notices: one of the incidents of nanochat's port was exactly that, an over-trained model
# from data that had silently wrapped. So count first. Tokens that a run needs against tokens that one reading gives;
# more than the `epochs` that were asked for is an error *before step 0*.

# %% id="data.readings_needed" level=1 library="nanochat_lib.supply:readings_needed" minutes=10 nbgrader={"cell_type": "code", "grade": false, "grade_id": "data-readings_needed", "locked": false, "schema_version": 3, "solution": true, "task": false} points=2 tags=["exercise"]
def readings_needed(tokens_needed: int, tokens: float, epochs: float, what: str = "the documents") -> float:
    """How often data that give `tokens` targets a reading must be read for `tokens_needed`.

    More than `epochs` is a UserError: one line with the tokens needed, `what`, the tokens that `epochs` readings give
    (both with commas: 1,000,000), and the number of epochs that would do, rounded up to two digits.
    """
    raise NotImplementedError


# %% id="data.readings_needed.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "data-readings_needed-check", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("data.readings_needed", readings_needed)

# %% id="supply-run"
supply = check_enough(corpus, tokenizer, 50_000, 1.0, sequence_len=T, buffer_docs=200)
print(f"{supply.documents:,} documents, {supply.usable:.0%} of their tokens become targets")
try:
    check_enough(corpus, tokenizer, 1_000_000, 4.0, sequence_len=T, buffer_docs=200)
except UserError as error:
    print(f"UserError: {error}")

wrapped = open_stream(epochs=None, rows=64)
epochs = [batch.epoch for batch in islice(wrapped, 45)]
wrapped.close()
print(f"without the check: batch 45 comes from reading {epochs[-1]}, and no line says so")

# %% [markdown] id="shards-needed-text"
# The same arithmetic for the real thing. nanochat's d24 run at 8 tokens per scaling parameter reads 5.84 billion tokens. A
# shard has 250 million characters, about 4.8 to a token, and best fit keeps 65 %.

# %% id="shards-needed"
from nanochat_lib.presets import preset

tokens = preset("gpu-8-d24").horizon().tokens
of_a_shard = 250e6 / 4.8 * 0.65
_ = about(tokens / of_a_shard, 172, within=2, name="shards for a d24 run")


# %% [markdown] id="shards-needed-look"
# nanochat's speedrun downloads 170. Keep the rule: **a d24 needs about 170 shards, 15 GB, 2.6 % of the set.**

# %% [markdown] id="lesson-text" tags=["slide"]
# ## 8. Field lesson: every micro-batch was the last one
#
# When nanochat was ported to TPUs, the port's model stayed at a CORE score of 0.08 to 0.13; nanochat had 0.26. No
# error, no NaN, every shape right, the loss falling. It took ten days and about 275 dollars of machine time to find.
#
# The loader kept *one* array and filled it anew for each batch, which is fine as long as a batch is used before the
# next one is asked for. A step, however, collects several micro-batches first.

# %% id="lesson-loader"
def one_buffer(source):
    """A loader that hands out the same array again and again, each time filled with the next rows."""
    buffer = np.empty((B, T + 1), np.int32)
    for rows in source:
        buffer[:] = rows
        yield buffer


# %% [markdown] id="lesson-predict-text"
# A step takes eight of them: `[np.asarray(next(loader)) for _ in range(8)]`. How many different micro-batches does it
# train on? Say it first: `predict("data.p_distinct", 8)`.

# %% id="lesson-predict"
predict("data.p_distinct")

# %% id="lesson-collect"
loader = one_buffer(micro_batches(STEPS * A))
group = [np.asarray(next(loader)) for _ in range(A)]
reveal("data.p_distinct", len({rows.tobytes() for rows in group}))
print("all of them share one piece of memory:", all(np.shares_memory(group[0], rows) for rows in group))


# %% [markdown] id="lesson-why"
# `np.asarray` copies nothing when it is given an array: it is a second name for it. `np.array` copies. One letter pair
# is the whole bug. Here is what it costs: the same loader, the same model, the same steps.

# %% id="lesson-run" tags=["slide"]
def wrong_steps(source):
    return [np.stack([np.asarray(rows) for rows in [next(source) for _ in range(A)]]) for _ in range(STEPS)]


wrong = wrong_steps(one_buffer(micro_batches(STEPS * A)))
wrong_losses, wrong_held = train(wrong)

figure, (left, right) = new_figure(1, 2, height=2.8, width=7.6, sharey=True)
x = np.arange(1, STEPS + 1)
left.plot(x, plain_losses, color=BLUE, linewidth=1.2, label="copied")
left.plot(x, wrong_losses, color=RED, linewidth=1.2, alpha=0.8, label="np.asarray")
titled(left, "What the run logs", "step", "loss (nats a token)")
left.legend(fontsize=8.5)
at = np.arange(EVERY, STEPS + 1, EVERY)
right.plot(at, plain_held, color=BLUE, marker="o", markersize=4, label="copied")
right.plot(at, wrong_held, color=RED, marker="s", markersize=4, linestyle="--", label="np.asarray")
titled(right, "Held-out text", "step")
right.legend(fontsize=8.5)
show(
    figure,
    alt="left: the training losses of both runs fall, that of the buggy run is higher and noisier. right: on "
    "held-out text the buggy run stays clearly above the right one",
)
if not fast():
    print(f"held-out loss: {plain_held[-1]:.2f} copied, {wrong_held[-1]:.2f} with np.asarray")
    _ = about(wrong_held[-1] - plain_held[-1], 0.61, within=0.2, name="what the bug costs, nats")


# %% [markdown] id="lesson-look" tags=["slide"]
# Look at the left picture alone, as you would during a run. Both curves fall. Without the blue one beside it, would
# you have stopped the red one? The step paid for eight micro-batches and learned from one: seven eighths of the data
# were read, tokenised, packed, and thrown away.
#
# The guard is cheap, because equal micro-batches practically never happen in honest data: **hash the content of each
# micro-batch of a step, and stop if two are equal.** It is needed in the first steps only.

# %% id="data.distinct_microbatches" level=2 library="nanochat_lib.loader:distinct_microbatches" minutes=10 nbgrader={"cell_type": "code", "grade": false, "grade_id": "data-distinct_microbatches", "locked": false, "schema_version": 3, "solution": true, "task": false} points=2 tags=["exercise"]
def distinct_microbatches(inputs: np.ndarray, targets: np.ndarray | None = None) -> None:
    """Raises UserError, one line that names both indices, when two of the micro-batches (A, B, T) of a step are equal.

    Micro-batches whose `targets` are all negative (nothing is trained) are padding, and may be equal.
    """
    raise NotImplementedError


# %% id="data.distinct_microbatches.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "data-distinct_microbatches-check", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("data.distinct_microbatches", distinct_microbatches)

# %% id="guard-run"
guard = mine("data.distinct_microbatches")
guard(right_steps[0])
print("the right step passes")
try:
    guard(wrong[0])
except UserError as error:
    print(f"UserError: {error}")

# %% [markdown] id="guard-look"
# Every training stage in this library runs the guard on its first ten steps (`ops.guard_steps`), with others beside it:
# ids in range, targets one position on, a first loss near ln V. And its batches own their memory: the loader makes new
# arrays for each. The second is the cure, the first tells you when somebody undoes it.

# %% [markdown] id="takeaway" tags=["slide"]
# > **Takeaway.** A row that is full and starts at a BOS costs about a third of the text, and text is cheap: count what
# > is dropped, over a long stream and not only at its beginning. Everything a stream will yield follows from the place
# > of the next document and the documents that wait: save both. Compare tokens needed with tokens on disk before step
# > 0. A batch owns its memory when it leaves the loader, and a content hash proves it.

# %% [markdown] id="simplified"
# ## What was simplified
#
# - The rows and buffers are nanochat's, scaled down: rows of 2,048, a buffer of 1,000 documents fetched 128 at a time.
#   `BestFitPacker` in `nanochat_lib/packing.py` does it with one queue per length, so that a pick is a binary search.
# - nanochat's processes take turns by row group, and its resume is approximate; here they take turns by document, and
#   resume is exact: `Cursor` and `DocumentRows` in `nanochat_lib/streams.py`, `share_states` in `nanochat_lib/loader.py`.
# - A thread prepares the next batches while a step computes: `Prefetcher` in `nanochat_lib/prefetch.py`.
# - Each reading encodes the text again, which is most of the loader's work. `nanochat data encode` does it once, before
#   a chip is rented: `nanochat_lib/kept_ids.py`.
# - Chat rows are never cropped; they end in padding that is not trained: `ConversationRows` in
#   `nanochat_lib/streams.py`, more in the chapter on fine-tuning.
# - The supply is an estimate from a sample of documents: `check_enough` in `nanochat_lib/supply.py`.
# - The toy of section 6 stands in for the model of `nanochat_lib/gpt.py`, which has no document mask.
# - Figures of nanochat are from its own documentation, those of the port and of the 3.8B run from their public reports.
#   On packing without truncation see Ding et al., arXiv:2404.10830.

# %% id="end"
progress()
