"""Batches: exact resume, shares of processes, budgets of data, chat masks, and arrays that belong to the batch."""

import gc
import json
import threading
import time
import tracemalloc
from dataclasses import replace
from itertools import islice

import numpy as np
import pytest
from shaky import shard

from nanochat_lib import loader
from nanochat_lib.conversation import render_conversation
from nanochat_lib.errors import UserError
from nanochat_lib.loader import (
    ChatLoader,
    PretrainLoader,
    check_enough,
    count_chat_steps,
    deal_anew,
    distinct_microbatches,
    share_states,
)
from nanochat_lib.packing import BestFitPacker, decode_documents
from nanochat_lib.shards import ShardCorpus
from nanochat_lib.supply import best_fit_rows, packed_rows, readings_needed

BOS = 256


class ByteTokenizer:
    """One token a byte, and the nine ids of nanochat's special tokens behind them."""

    names = "bos user_start user_end assistant_start assistant_end python_start python_end output_start output_end"
    special_tokens = {f"<|{name}|>": BOS + i for i, name in enumerate(names.split())}
    bos_id, vocab_size, fingerprint = BOS, 265, "bytes"

    def encode(self, text, prepend=None, append=None):
        if isinstance(text, list):
            return [self.encode(t, prepend, append) for t in text]
        ends = ([] if end is None else [self.special_tokens.get(end, end)] for end in (prepend, append))
        return next(ends) + list(text.encode()) + next(ends)

    def encode_special(self, name):
        return self.special_tokens[name]


class Documents:
    """A corpus of given texts; `opened` notes every start of reading."""

    def __init__(self, train, val=(), fingerprint="texts"):
        self.splits = {"train": list(train), "val": list(val)}
        self.fingerprint, self.opened, self.open_now = fingerprint, [], 0

    def num_documents(self, split):
        return len(self.splits[split])

    def documents(self, split, start=0):
        self.opened.append(start)
        self.open_now += 1
        try:
            yield from self.splits[split][start:]
        finally:
            self.open_now -= 1


def texts(count, seed=0, longest=40):
    """Distinct documents: the number in front makes each of them its own."""
    rng = np.random.default_rng(seed)
    return [f"{i:05d}" + "x" * int(rng.integers(0, longest)) for i in range(count)]


TOKENIZER = ByteTokenizer()


def pretrain(corpus, rows=2, length=32, buffer=7, *, epochs=None, **options):
    return PretrainLoader(corpus, TOKENIZER, "train", rows, length, buffer, epochs=epochs, fetch_docs=3, **options)


def arrays(batches):
    return [(b.inputs.tolist(), b.targets.tolist()) for b in batches]


def test_readings_by_hand():
    assert readings_needed(300, 200, 1.5) == 1.5
    with pytest.raises(UserError, match="needs 301 tokens, but 7 documents give about 300 .* to 1.51") as caught:
        readings_needed(301, 200, 1.5, "7 documents")
    assert "\n" not in str(caught.value)


def test_deal_anew_leaves_no_item_out_and_reads_none_twice():
    rng = np.random.default_rng(3)
    for before, after in ((3, 2), (2, 5), (4, 4), (1, 3), (5, 1)):
        read = [rank + before * np.arange(rng.integers(0, 9)) for rank in range(before)]
        stopped = [rank + before * len(items) for rank, items in enumerate(read)]
        done = {int(i) for items in read for i in items}
        starts, skipped = deal_anew(stopped, after)
        assert [start % after for start in starts] == list(range(after))
        coming = {i for start in starts for i in range(start, 200, after)}
        assert not coming & done
        left_out = set(range(200)) - coming - done
        assert len(left_out) == skipped and all(i < max(done, default=0) for i in left_out)


# ---- pretraining: content


def test_rows_begin_with_bos_and_targets_are_shifted():
    with pretrain(Documents(texts(50))) as stream:
        for batch in islice(stream, 20):
            assert batch.inputs.shape == batch.targets.shape == (2, 32)
            assert batch.inputs.dtype == batch.targets.dtype == np.int32
            assert (batch.inputs[:, 0] == BOS).all()
            assert (batch.inputs[:, 1:] == batch.targets[:, :-1]).all()
            assert (batch.targets >= 0).all()


def test_nanochat_example():
    """T = 16, B = 2, buffer 10, fetched by 8: the rows of upstream's loader for these lengths."""
    lengths = [17, 6, 5, 9, 16, 10, 16, 12, 10, 9, 8, 6, 18, 9, 14, 2, 13, 8, 14, 7, 18, 2, 4, 11, 16]

    class Numbered(ByteTokenizer):
        bos_id = 0

        def encode(self, text, prepend=None, append=None):
            return [[prepend] + [int(t) + 1] * (lengths[int(t)] - 1) for t in text]

    corpus = Documents([str(i) for i in range(25)])
    stream = PretrainLoader(corpus, Numbered(), "train", 2, 16, 10, epochs=None, fetch_docs=8, prefetch=0)
    assert [b.inputs.tolist() for b in islice(stream, 3)] == [
        [[0] + [1] * 15, [0] + [5] * 15],
        [[0] + [7] * 15, [0] + [15] * 13 + [0, 2]],
        [[0] + [19] * 13 + [0, 22], [0] + [17] * 12 + [0, 12, 12]],
    ]


def test_empty_documents_never_give_two_bos_in_a_row():
    corpus = Documents(["", "abc", "", "", "d" * 50, ""] * 5)
    with pretrain(corpus, rows=4) as stream:
        batches = list(islice(stream, 10))
    for batch in batches:
        rows = np.concatenate([batch.inputs, batch.targets[:, -1:]], 1)
        assert not ((rows[:, :-1] == BOS) & (rows[:, 1:] == BOS)).any()
    assert batches[-1].after["dropped"] > 10


@pytest.mark.parametrize("prefetch", [0, 2])
def test_only_empty_documents_is_an_error_not_an_endless_search(prefetch):
    with pretrain(Documents([""] * 10), prefetch=prefetch) as stream:
        with pytest.raises(UserError, match="10 documents are empty"):
            next(stream)


def test_empty_split_is_an_error_before_anything_runs():
    with pytest.raises(UserError, match="val split .* is empty"):
        PretrainLoader(Documents(["a"]), TOKENIZER, "val", 2, 8, 10, epochs=None)


# ---- resume


def jsoned(state):
    return json.loads(json.dumps(state))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("world", [1, 3])
def test_resume_goes_on_token_for_token(prefetch, world):
    corpus = Documents(["", *texts(37, longest=60)])  # several epochs, longer documents than rows
    options = {"rank": world - 1, "world": world}
    with pretrain(corpus, prefetch=prefetch, **options) as stream:
        whole = []
        for batch in islice(stream, 26):
            if prefetch:
                time.sleep(0.002)  # lets the thread run ahead before the state is asked for
            whole.append((batch, jsoned(batch.state)))
    for stop in range(1, 25):
        with pretrain(corpus, prefetch=prefetch, state=whole[stop - 1][1], **options) as stream:
            rest = list(islice(stream, 26 - stop))
        assert arrays(rest) == arrays(b for b, _ in whole[stop:])
        assert [b.state for b in rest] == [s for _, s in whole[stop:]]
        assert [(b.epoch, b.consumed) for b in rest] == [(b.epoch, b.consumed) for b, _ in whole[stop:]]


def test_resume_reads_from_the_cursor_not_from_the_start():
    corpus = Documents(texts(200))
    with pretrain(corpus, prefetch=0) as stream:
        state = list(islice(stream, 9))[-1].state
    with pretrain(corpus, prefetch=0, state=state) as stream:
        next(stream)
    assert corpus.opened == [0, state["position"]]


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"length": 16}, "sequence_len 32, this run has 16"),
        ({"buffer": 8}, "buffer_docs 7, this run has 8"),
        ({"world": 2}, "world 1, this run has 2"),
        ({"corpus": Documents(texts(30), fingerprint="others")}, "corpus 'texts', this run has 'others'"),
    ],
)
def test_a_state_of_other_settings_is_refused(change, name):
    with pretrain(Documents(texts(30)), prefetch=0) as stream:
        state = next(stream).state
    corpus = change.pop("corpus", Documents(texts(30)))
    with pytest.raises(UserError, match=name):
        pretrain(corpus, state=state, prefetch=0, **change)


def test_state_is_small():
    corpus = Documents(texts(3000, longest=400))
    with PretrainLoader(corpus, TOKENIZER, "train", 4, 128, 400, epochs=1, prefetch=0) as stream:
        batch = next(stream)
    assert len(batch.buffered) >= 300
    assert len(json.dumps(batch.state)) < 3 * sum(len(d.ids) for d in batch.buffered)


# ---- budgets


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("epochs", [0.5, 1, 2.25])
def test_running_out_is_an_error_with_numbers_after_the_last_batch(epochs, prefetch):
    corpus = Documents(texts(40))
    given = []
    with pretrain(corpus, epochs=epochs, prefetch=prefetch) as stream:
        with pytest.raises(UserError, match=rf"after (\d+) batches: 40 documents read {epochs:g} times") as caught:
            given.extend(stream)
        with pytest.raises(UserError):
            next(stream)
    assert f"after {len(given)} batches" in str(caught.value) and "raise data.epochs" in str(caught.value)
    assert given[-1].consumed <= 40 * epochs
    assert max(b.epoch for b in given) == int(np.ceil(epochs))
    assert 0.8 < given[-1].progress <= 1
    with pretrain(corpus, epochs=None, prefetch=0) as endless:  # until near the end, the budget changes nothing
        half = len(given) // 2
        assert arrays(islice(endless, half)) == arrays(given[:half])


def test_epoch_is_in_every_batch():
    with pretrain(Documents(texts(20))) as stream:
        epochs = [b.epoch for b in islice(stream, 30)]
        assert stream.epoch == epochs[-1] and stream.consumed > 0
    assert epochs == sorted(epochs) and set(epochs) == set(range(1, epochs[-1] + 1)) and epochs[-1] > 2


def test_enough_data_is_checked_before_the_first_step():
    corpus = Documents(["x" * 99] * 50)  # 100 tokens each with BOS
    supply = check_enough(corpus, TOKENIZER, 9_000, 2)
    assert (supply.documents, supply.tokens, supply.usable, supply.epochs_needed) == (50, 5_000, 1.0, 1.8)
    message = r"11,000 tokens, but 50 train documents give about 10,000 at data.epochs 2"
    with pytest.raises(UserError, match=message) as caught:
        check_enough(corpus, TOKENIZER, 11_000, 2)
    assert "raise data.epochs to 2.2" in str(caught.value)


def test_enough_data_counts_what_packing_cuts_off():
    corpus = Documents(["x" * 59] * 200)  # 60 tokens in rows of 100: 40 of the second are used, 20 lost
    supply = check_enough(corpus, TOKENIZER, 1_000, 1, sequence_len=99, buffer_docs=10)
    assert supply.usable == pytest.approx(99 / 120, rel=0.02)
    with pytest.raises(UserError, match="raise data.epochs"):
        check_enough(corpus, TOKENIZER, 11_000, 1, sequence_len=99, buffer_docs=10)
    check_enough(corpus, TOKENIZER, 11_000, 1)


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("longest", [30, 200])
def test_the_estimate_is_near_what_the_loader_gives(longest, epochs):
    corpus = Documents(texts(3000, longest=longest))
    supply = check_enough(corpus, TOKENIZER, 1, epochs, sequence_len=64, buffer_docs=100, sample_docs=1024)
    batches = 0
    with PretrainLoader(corpus, TOKENIZER, "train", 4, 64, 100, epochs=epochs, prefetch=0) as stream:
        with pytest.raises(UserError):
            for _ in stream:
                batches += 1
    assert batches * 4 * 64 == pytest.approx(supply.tokens * supply.usable * epochs, rel=0.04)


def naive_rows(lengths, capacity, buffer_size):
    """Rows that the packer itself fills from documents of these lengths."""
    packer, rest, row = BestFitPacker(capacity, buffer_size), iter(lengths), np.empty(capacity, np.int32)
    tokens = np.zeros(max(lengths), np.int32)

    def refill():
        chunk = list(islice(rest, 128))
        for length in chunk:
            packer.add(tokens[:length])
        return bool(chunk)

    rows = 0
    while packer.fill_row(row, None, refill) == capacity:
        rows += 1
    return rows


@pytest.mark.parametrize("buffer", [1, 10, 300])
@pytest.mark.parametrize("median", [3, 30, 90])
def test_packing_by_lengths_alone_fills_as_many_rows(median, buffer):
    lengths = np.clip(np.random.default_rng(median).lognormal(np.log(median), 1, 4000), 2, 900).astype(int)
    rows = naive_rows(lengths.tolist(), 65, buffer)
    kept = np.minimum(lengths, 66).tolist()
    assert sum(1 for _ in best_fit_rows(iter(kept), 65, buffer, [])) == rows
    assert packed_rows(lengths, len(lengths), 65, buffer, in_order=True) == rows


@pytest.mark.parametrize("simulated", [300_000, 10_000])
def test_the_estimate_holds_over_a_long_stream(monkeypatch, simulated):
    """200 times the buffer, a third of the tokens cut off: within 3 % from a sample, 1.5 % from the exact lengths."""
    monkeypatch.setattr("nanochat_lib.supply.SIMULATED", simulated)
    rng = np.random.default_rng(4)
    draw = lambda count: np.clip(rng.lognormal(np.log(42), 1.2, count), 2, 20_000).astype(int)  # noqa: E731
    lengths, sample = draw(40_000), draw(4096)
    rows = naive_rows(lengths.tolist(), 145, 200)
    assert 0.6 < rows * 144 / lengths.sum() < 0.7
    assert packed_rows(sample, 40_000, 145, 200) == pytest.approx(rows, rel=0.03)
    assert packed_rows(lengths, 40_000, 145, 200) == pytest.approx(rows, rel=0.015)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_estimate_knows_that_the_smallest_share_ends_the_run(world, tmp_path):
    """Five row groups on two processes: three and two. Within 4 % of what the loaders give until one runs out."""
    rng = np.random.default_rng(1)
    groups = [["x" * int(n) for n in rng.integers(5, 90, 300)] for _ in range(5)]
    shard(tmp_path / "a.parquet", groups)
    shard(tmp_path / "b.parquet", [["v"]])
    corpus = ShardCorpus(tmp_path)
    supply = check_enough(corpus, TOKENIZER, 1, 1, sequence_len=64, buffer_docs=50, world=world)
    counts = []
    for rank in range(world):
        options = {"epochs": 1, "prefetch": 0, "rank": rank, "world": world}
        with PretrainLoader(corpus, TOKENIZER, "train", 1, 64, 50, **options) as stream:
            counts.append(0)
            with pytest.raises(UserError, match="ran out"):
                for _ in stream:
                    counts[-1] += 1
    assert supply.tokens == sum(len(text) + 1 for group in groups for text in group)
    assert min(counts) * 64 * world == pytest.approx(supply.tokens * supply.usable, rel=0.04)


def test_shards_are_counted_from_footers_and_a_sample(tmp_path):
    groups = [[None if i % 4 == 0 else "x" * 49 for i in range(400)] for _ in range(40)]  # a quarter has no text
    shard(tmp_path / "a.parquet", groups)
    shard(tmp_path / "b.parquet", [["v"]])
    corpus, read = ShardCorpus(tmp_path), []
    real = corpus.read_group
    corpus.read_group = lambda split, number: read.append(number) or real(split, number)
    supply = check_enough(corpus, TOKENIZER, 400_000, 1)
    assert supply.documents == 16_000 and supply.tokens == pytest.approx(600_000, rel=0.01)
    assert len(read) == 16 and set(read) == {i * 40 // 16 for i in range(16)}


@pytest.mark.parametrize(
    ("needed", "says"), [(3000, "--shards 7`; 2 training"), (9_000_000, "has 6,542 training shards")]
)
def test_too_few_shards_of_a_known_set_say_how_many_to_fetch(tmp_path, needed, says):
    place = tmp_path / "base_data_climbmix"
    place.mkdir()
    for i in (0, 1, 6542):
        shard(place / f"shard_{i:05d}.parquet", [["x" * 49] * 10])
    corpus = ShardCorpus(place)
    check_enough(corpus, TOKENIZER, 1000, 1)
    with pytest.raises(UserError, match="give about 1,000 at data.epochs 1: raise data.epochs to") as caught:
        check_enough(corpus, TOKENIZER, needed, 1)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("train", [[], ["", ""]])
def test_no_text_at_all_is_an_error(train):
    with pytest.raises(UserError, match="no documents|no text"):
        check_enough(Documents(train), TOKENIZER, 10, 1)


# ---- several processes


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("world", [1, 2, 3, 7])
def test_shares_add_up_to_the_whole(world, epochs):
    train = [f"{i:010d}" for i in range(53)]  # each fills a row of its own
    shares = []
    for rank in range(world):
        with pretrain(Documents(train), 1, 10, rank=rank, world=world, epochs=epochs) as stream:
            share = []
            with pytest.raises(UserError, match="ran out"):
                for batch in stream:
                    share.append(bytes(batch.targets[0].tolist()).decode())
        shares.append(share)
    assert sorted(sum(shares, [])) == sorted(train * epochs)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def numbers(state):
    """Which of `texts` wait in a saved buffer."""
    return [int(bytes(d.ids[1:6].tolist())) for d in decode_documents(state["buffer"], state["sequence_len"] + 1)]


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 5), (4, 1), (1, 3), (2, 2)])
@pytest.mark.parametrize("uneven", [False, True])
def test_another_number_of_processes_shares_out_what_is_left(before, after, uneven):
    """Every document is placed, waits, will be read, or is counted as left out; none twice (in one reading)."""
    corpus, states = Documents(texts(200)), []
    for rank in range(before):
        with pretrain(corpus, 1, 10, rank=rank, world=before, epochs=1) as stream:
            *_, last = islice(stream, 5 + 4 * rank * uneven)
            states.append(json.loads(json.dumps(last.state)))
    waiting = sorted(n for state in states for n in numbers(state))
    read = {n for rank, state in enumerate(states) for n in range(rank, state["position"], before)}
    shares = [share_states(states, rank, after) for rank in range(after)]
    (skipped,) = {skipped for _, skipped in shares}
    assert sorted(n for state, _ in shares for n in numbers(state)) == waiting
    counts = [len(numbers(state)) for state, _ in shares]
    assert before == after or max(counts) - min(counts) <= 1
    coming = [n for state, _ in shares for n in range(state["position"], 200, after)]
    assert len(coming) == len(set(coming)) and not read & set(coming)
    assert 200 - len(read) - len(coming) == skipped
    if before == after:
        assert [state for state, _ in shares] == states and skipped == 0
    for rank, (state, _) in enumerate(shares):
        with pretrain(corpus, 1, 10, rank=rank, world=after, epochs=2, state=state | {"size": 200}) as stream:
            assert next(stream).consumed >= 0


def test_a_stage_without_a_stream_has_nothing_to_share():
    assert share_states([{}, {}], 0, 1) == ({}, 0) and share_states([{}], 2, 3) == ({}, 0)


@pytest.mark.parametrize(("rank", "world"), [(7, 8), (0, 3)])
def test_more_processes_than_documents(rank, world):
    with pytest.raises(UserError, match=rf"rank {rank} of world {world}: .*only 2"):
        pretrain(Documents(["a", "b"]), rank=rank, world=world)


@pytest.mark.parametrize(("rank", "world"), [(2, 2), (-1, 2), (0, 0)])
def test_impossible_ranks(rank, world):
    with pytest.raises(UserError, match=f"rank {rank} of world {world}"):
        pretrain(Documents(texts(9)), rank=rank, world=world)


# ---- the thread


def test_batches_own_their_memory():
    with pretrain(Documents(texts(50))) as stream:
        batches = list(islice(stream, 8))
    before = arrays(batches)
    everything = [a for b in batches for a in (b.inputs, b.targets)]
    for i, a in enumerate(everything):
        assert a.flags.owndata and a.flags.c_contiguous
        assert not any(np.shares_memory(a, other) for other in everything[i + 1 :])
    batches[0].inputs[:] = -5
    assert arrays(batches)[1:] == before[1:]


def test_errors_keep_their_type_and_come_after_the_good_batches():
    class Broken(Documents):
        def documents(self, split, start=0):
            yield from self.splits[split][:30]
            raise ZeroDivisionError("in the reader")

    with pretrain(Broken(texts(60))) as stream:
        given = []
        with pytest.raises(ZeroDivisionError, match="in the reader"):
            given.extend(stream)
        assert len(given) >= 3
        with pytest.raises(ZeroDivisionError):
            next(stream)


def test_a_corpus_that_shrinks_is_named():
    corpus = Documents(texts(40))
    stream = pretrain(corpus, prefetch=0)
    del corpus.splits["train"][20:]
    with pytest.raises(UserError, match="ended before document 20 of 40"):
        list(islice(stream, 50))


def prefetch_threads():
    return [t for t in threading.enumerate() if "_produce" in t.name]


@pytest.mark.parametrize("how", ["close", "with", "forgotten"])
def test_the_thread_ends_and_closes_the_corpus(how):
    assert prefetch_threads() == []
    corpus = Documents(texts(50))
    stream = pretrain(corpus)
    batch = next(stream)
    assert len(prefetch_threads()) == 1
    if how == "close":
        stream.close()
        stream.close()
        with pytest.raises(StopIteration):
            next(stream)
    elif how == "with":
        with stream:
            next(stream)
    del stream
    gc.collect()
    assert prefetch_threads() == [] and corpus.open_now == 0
    assert (batch.inputs[:, 0] == BOS).all()


def test_the_thread_stays_at_most_two_batches_ahead():
    made = []

    class Counting(ByteTokenizer):
        def encode(self, text, prepend=None, append=None):
            made.append(text)
            return [ByteTokenizer().encode(t, prepend) for t in text]

    corpus = Documents(["x" * 31] * 1000)  # a document a row
    with PretrainLoader(corpus, Counting(), "train", 1, 31, 1, epochs=None, fetch_docs=1) as stream:
        next(stream)
        time.sleep(0.3)
        assert len(made) <= 1 + 2 + 1  # handed out, waiting, in the thread's hand


# ---- the guard


def test_equal_microbatches_are_found():
    rng = np.random.default_rng(0)
    inputs = rng.integers(0, 9, (4, 2, 8), dtype=np.int32)
    distinct_microbatches(inputs)
    staging = inputs[0].copy()
    with pytest.raises(UserError, match="micro-batches 0 and 1 of one step are equal"):
        distinct_microbatches([staging, staging, staging])  # one buffer, filled again and again
    inputs[3] = inputs[1]
    with pytest.raises(UserError, match="micro-batches 1 and 3"):
        distinct_microbatches(inputs)
    targets = np.full(inputs.shape, -1)
    targets[:2] = 3
    distinct_microbatches(inputs, targets)  # 2 and 3 are padding


# ---- chat


def chat(*pairs):
    messages = []
    for user, assistant in pairs:
        messages += [{"role": "user", "content": user}, {"role": "assistant", "content": assistant}]
    return {"messages": messages}


def chats(count, longest=30, seed=0):
    rng = np.random.default_rng(seed)
    return [chat((f"{i:03d}", f"{i:03d}" + "a" * int(rng.integers(0, longest)))) for i in range(count)]


def chat_loader(mixture, rows=2, length=48, **options):
    return ChatLoader(mixture, TOKENIZER, rows, length, **options)


def test_targets_of_a_conversation_by_hand():
    special = TOKENIZER.special_tokens
    us, ue, s, e = (special[f"<|{n}|>"] for n in ("user_start", "user_end", "assistant_start", "assistant_end"))
    (batch,) = chat_loader([chat(("hi", "yo"), ("q", "r"))], rows=1, length=18, one_pass=True)
    u = list(b"hi"), list(b"q")
    ids = [BOS, us, *u[0], ue, s, *b"yo", e, us, *u[1], ue, s, *b"r", e]
    assert batch.inputs.tolist() == [ids + [BOS] * (18 - len(ids))]
    learned = [-1] * 5 + [*b"yo", e] + [-1] * 4 + [*b"r", e]
    assert batch.targets.tolist() == [learned + [-1] * (18 - len(learned))]


def test_one_pass_uses_every_conversation_once_and_pads_the_end():
    mixture = chats(57)
    with chat_loader(mixture, rows=4, one_pass=True, buffer_conversations=10) as stream:
        batches = list(stream)
        assert stream.consumed == 57
    ends = sum((b.targets == TOKENIZER.encode_special("<|assistant_end|>")).sum() for b in batches)
    users = sum((b.inputs == TOKENIZER.encode_special("<|user_start|>")).sum() for b in batches)
    assert ends == users == 57
    assert all(b.inputs.shape == (4, 48) for b in batches)
    assert batches[-1].progress == 1.0 and [b.progress for b in batches] == sorted(b.progress for b in batches)
    assert not any((b.targets == BOS).any() for b in batches)  # neither padding nor the next BOS is learned


def test_steps_of_one_pass():
    mixture = [chat(("a", "b" * 40))] * 10  # 47 tokens: one a row
    assert [count_chat_steps(mixture, TOKENIZER, 2, 48, micro) for micro in (1, 2, 5, 7)] == [5, 3, 1, 1]


@pytest.mark.parametrize(("count", "rows", "parts", "world"), [(57, 4, 1, 1), (301, 2, 3, 1), (130, 1, 2, 3)])
def test_counted_steps_are_those_of_the_loader(count, rows, parts, world):
    """Lengths alone give the rows that packing the tokens gives, process by process, cut conversations included."""
    mixture = chats(count, longest=70, seed=count)
    for rank in range(world):
        share = {"rank": rank, "world": world}
        with chat_loader(mixture, rows=rows, one_pass=True, **share) as stream:
            batches = list(stream)
        assert count_chat_steps(mixture, TOKENIZER, rows, 48, parts, **share) == -(-len(batches) // parts)
        report = loader.chat_report(mixture, TOKENIZER, 48, buffer=100, **share)
        assert report.supervised == sum(int((b.targets >= 0).sum()) for b in batches)
        assert report.truncated == batches[-1].after["truncated"] and report.conversations == len(mixture[rank::world])


@pytest.mark.parametrize("buffer", [1, 4, 20])
def test_counted_rows_depend_on_the_buffer_as_packing_does(buffer):
    mixture = chats(400, longest=30, seed=3)
    with chat_loader(mixture, rows=1, one_pass=True, buffer_conversations=buffer) as stream:
        rows = sum(1 for _ in stream)
    assert loader.chat_report(mixture, TOKENIZER, 48, buffer=buffer).rows == rows
    assert rows > loader.chat_report(mixture, TOKENIZER, 48, buffer=100).rows


def test_counting_keeps_no_conversation():
    """Memory of a pass over a large mixture: a number a conversation."""

    class Made(list):
        def __len__(self):
            return 3000

        def __getitem__(self, index):
            return chat(("q", "a" * 2000))

    tracemalloc.start()
    report = loader.chat_report(Made(), TOKENIZER, 4096, buffer=100)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert report.tokens == 3000 * 2006 and peak < 1e6, peak


def test_all_tokens_are_trained_but_padding():
    (batch,) = chat_loader([chat(("hi", "yo"), ("q", "r"))], rows=1, length=18, one_pass=True, all_tokens=True)
    (masked,) = chat_loader([chat(("hi", "yo"), ("q", "r"))], rows=1, length=18, one_pass=True)
    assert batch.inputs.tolist() == masked.inputs.tolist()
    ids = batch.inputs[0].tolist()
    used = 15
    assert batch.targets[0].tolist() == [*ids[1:used], *[-1] * (18 - used + 1)]
    with pytest.raises(UserError, match="all_tokens"):  # a stream is not continued as the other kind
        chat_loader(chats(9), all_tokens=True, state=next(iter(chat_loader(chats(9)))).state)


def test_conversations_longer_than_a_row_do_not_stall_the_loader():
    """Upstream renders at 2048 tokens whatever the row: such conversations fill the buffer and every row is padding."""
    mixture = chats(20, longest=30) + [chat(("q", "z" * 500))] * 120 + [chat(("u" * 500, "never seen"))] * 3
    with chat_loader(mixture, buffer_conversations=100) as stream:
        batches = list(islice(stream, 150))
        report = stream.report
    assert all((b.targets >= 0).any(axis=1).all() for b in batches)  # no row is only padding
    assert (report.conversations, report.truncated, report.dropped) == (143, 123, 3)
    assert batches[-1].after["truncated"] > 100 and batches[-1].after["dropped"] >= 3


def test_a_conversation_that_fills_a_row_is_not_cut():
    mixture = [chat(("a", "b" * 43))]  # 49 tokens: T + 1
    assert len(render_conversation(TOKENIZER, mixture[0]).ids) == 49
    (batch,) = chat_loader(mixture, rows=1, one_pass=True)
    assert batch.targets[0, -1] == TOKENIZER.encode_special("<|assistant_end|>") and batch.after["truncated"] == 0


def test_nothing_to_learn_is_an_error():
    mixture = [chat(("u" * 100, "x"))] * 5
    for options in ({}, {"one_pass": True}):
        with chat_loader(mixture, **options) as stream, pytest.raises(UserError, match="none of 5 conversations"):
            next(stream)
    with pytest.raises(UserError, match="mixture .* is empty"):
        chat_loader([])


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("one_pass", [True, False])
def test_chat_resume_goes_on_token_for_token(one_pass, prefetch):
    mixture = chats(60, longest=70)
    options = {"one_pass": one_pass, "buffer_conversations": 9, "prefetch": prefetch}
    with chat_loader(mixture, **options) as stream:
        whole = list(islice(stream, 30))
    for stop in range(1, len(whole)):
        with chat_loader(mixture, state=jsoned(whole[stop - 1].state), **options) as stream:
            rest = list(islice(stream, 30 - stop))
        assert arrays(rest) == arrays(whole[stop:])
        assert [b.state for b in rest] == [b.state for b in whole[stop:]]


def test_a_chat_batch_can_be_changed_with_replace():
    batch = next(chat_loader(chats(9), prefetch=0))
    empty = replace(batch, targets=np.full_like(batch.targets, -1))
    assert empty.state == batch.state and (empty.targets == -1).all()


def test_chat_shares_add_up():
    mixture = chats(50)
    seen = []
    for rank in range(3):
        with chat_loader(mixture, rank=rank, world=3, one_pass=True) as stream:
            for batch in stream:
                inputs = batch.inputs.tolist()
                for row in inputs:
                    seen += [bytes(row[i + 1 : i + 4]) for i, t in enumerate(row) if t == BOS + 1]
    assert sorted(seen) == sorted(b"%03d" % i for i in range(50))


def test_chat_wraps_into_the_next_epoch():
    with chat_loader(chats(12), buffer_conversations=4) as stream:
        epochs = [b.epoch for b in islice(stream, 40)]
    assert epochs[0] == 1 and epochs == sorted(epochs) and epochs[-1] > 3
    assert loader.BUFFER_CONVERSATIONS == 100
