"""Branches that share a prefix score as sequences of their own would; shapes stay few and nothing is lost in them."""

from dataclasses import replace

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.extend.core import jaxprs_in_params

from nanochat_lib import gpt
from nanochat_lib.evaluate import scorer as scoring
from nanochat_lib.evaluate.scorer import Scorer, Shape, branch_slots, fill, rows_of, rung
from nanochat_lib.evaluate.spans import Span
from nanochat_lib.sizing import GPTConfig

HEAD = GPTConfig(sequence_len=12, vocab_size=90, n_layer=2, n_head=4, n_kv_head=2, n_embd=32, window_pattern="SL")
CONFIGS = {"head": HEAD, "recipe 4": replace(HEAD, recipe="recipe4")}  # windows of 12; of 6 and 12


def drawn(config):
    rng = np.random.default_rng(0)  # fresh blocks are the identity: give every matrix something to say
    params = gpt.init_params(config, jax.random.key(1))
    return {name: x + rng.normal(0, 0.15, x.shape).astype(np.float32) for name, x in params.items()}


def questions(rng, count, vocab):
    """Spans of questions with one to five answers each."""
    items = []
    for _ in range(count):
        prefix = rng.integers(0, vocab, int(rng.integers(1, 33)))
        for _ in range(int(rng.integers(1, 6))):
            ids = np.concatenate([prefix, rng.integers(0, vocab, int(rng.integers(1, 9)))]).astype(np.int32)
            items.append(Span(ids, len(prefix), len(ids)))
    return items


@pytest.mark.parametrize("name", CONFIGS)
def test_answers_beside_each_other_score_as_if_alone(name):
    config = CONFIGS[name]
    params, rng = drawn(config), np.random.default_rng(2)
    items = questions(rng, 12, config.vocab_size)
    scorer = Scorer(config, "float32", "xla", (jax.devices()[0],), 512)
    nll, exact = scorer(scorer.place(params), items, 89)
    assert scorer.compiled._cache_size() <= 2
    forward = jax.jit(lambda ids: gpt.apply(config, params, ids))
    likeliest = []
    for i, span in enumerate(items):
        ids = np.zeros((1, 48), np.int32)
        ids[0, : span.end] = span.ids
        logits = np.asarray(forward(ids), np.float64)[0, span.start - 1 : span.end - 1]
        logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
        wanted = -np.mean(logp[np.arange(len(logp)), span.ids[span.start :]])
        assert nll[i] == pytest.approx(wanted, abs=2e-5)  # float32 sums in another order
        assert exact[i] == (logits.argmax(-1) == span.ids[span.start :]).all()
        likeliest.append(Span(np.append(span.ids[: span.start], logits[0].argmax()), span.start, span.start + 1))
    assert scorer(scorer.place(params), likeliest, 89)[1].all()


def test_the_whole_vocabulary_is_read_for_scored_tokens_alone():
    config = replace(HEAD, vocab_size=1000, n_layer=1)
    shape = Shape(256, 64)
    arrays = fill(shape, [], 64, 0)
    traced = jax.make_jaxpr(lambda *args: scoring._score(config, "float32", "xla", *args))(drawn(config), *arrays)
    widths = set()

    def look(jaxpr):
        for eqn in jaxpr.eqns:
            widths.update(v.aval.shape[:-1] for v in eqn.outvars if v.aval.shape[-1:] == (1000,))
            for inner in jaxprs_in_params(eqn.params):
                look(inner)

    look(traced.jaxpr)
    assert (scoring.CHUNK,) in widths and max(np.prod(shape) for shape in widths) <= scoring.CHUNK


@given(st.lists(st.tuples(st.integers(1, 3000), st.lists(st.integers(1, 300), min_size=1, max_size=12)), max_size=30))
@settings(max_examples=60)
def test_every_branch_has_its_place_and_shapes_are_few(drawn_questions):
    items = []
    for number, (start, answers) in enumerate(drawn_questions):
        prefix = np.full(start, number, np.int32)
        items += [Span(np.concatenate([prefix, np.arange(n, dtype=np.int32)]), start, start + n) for n in answers]
    rows = rows_of(items)
    scorer = Scorer(HEAD, "float32", "xla", (jax.devices()[0],), 2048)
    batches = list(scorer.batches(rows))
    placed = sorted(i for _, batch in batches for row in batch for i, _ in row.branches)
    assert placed == list(range(len(items)))
    for shape, batch in batches:
        assert len(batch) <= scorer.rows(shape) and shape.branches in branch_slots(shape.prefix)
        for row in batch:
            assert len(row.prefix) <= shape.prefix and row.used <= shape.branches
    longest = max((start for start, _ in drawn_questions), default=1)
    ladder = {rung(n) for n in range(1, max(rung(longest), 2048) + 1)}  # 300 tokens side by side need a large rung
    assert len({shape for shape, _ in batches}) <= 2 * len(ladder) and len(ladder) <= 12


def test_the_ladder_holds_every_length_and_wastes_little():
    for n in range(1, 9000):
        assert rung(n) >= n and rung(rung(n)) == rung(n)
        assert n <= 256 or rung(n) < 1.51 * n


def test_the_answers_of_a_question_cost_its_prompt_once():
    prefix = np.arange(700, dtype=np.int32)
    items = [Span(np.append(prefix, [k, k + 1]).astype(np.int32), 700, 702) for k in range(4)]
    ((shape, rows),) = rows_of(items).items()
    assert shape == Shape(768, 48) and len(rows) == 1
