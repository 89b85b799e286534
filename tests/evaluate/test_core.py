"""The CORE method against a naive one: one prompt at a time, scores computed in numpy."""

import json
import random

import jax
import numpy as np
import pytest

from nanochat_lib import gpt
from nanochat_lib.errors import UserError
from nanochat_lib.evaluate import core
from nanochat_lib.evaluate.core import CoreTask, Span, common_prefix, load_bundle, render_prompts, shots_for, spans
from nanochat_lib.evaluate.spans import cut_front, scored_parts
from nanochat_lib.sizing import GPTConfig

CONFIG = GPTConfig(sequence_len=128, vocab_size=300, n_layer=2, n_head=2, n_kv_head=2, n_embd=32, window_pattern="SL")


class Bytes:
    """A tokenizer with one id a byte, BOS = 299."""

    bos_id = 299

    def encode_arrays(self, texts, prepend):
        return [np.array([prepend, *text.encode()], np.int32) for text in texts]


@pytest.fixture(scope="module")
def params():
    drawn = gpt.init_params(CONFIG, jax.random.key(3))
    rng = np.random.default_rng(0)  # fresh blocks are the identity: give every matrix something to say
    return {name: x + rng.normal(0, 0.1, x.shape).astype(np.float32) for name, x in drawn.items()}


def test_order_and_shots_are_nanochats():
    order = list(range(10))
    random.Random(core.SHUFFLE_SEED).shuffle(order)
    assert order == [0, 3, 7, 2, 1, 6, 4, 5, 8, 9]
    assert shots_for(5, 20, 3) == [2, 9, 15]
    assert shots_for(0, 2, 10) == [1]  # more shots asked for than there are examples


def task(kind, examples, shots=1, delimiter=" ", baseline=0.0):
    return CoreTask("t", kind, shots, delimiter, baseline, examples)


def test_prompt_strings():
    mc = [{"query": "Q", "choices": ["a", "b"], "gold": 0}, {"query": "S", "choices": ["x", "y"], "gold": 1}]
    assert (
        render_prompts(task("multiple_choice", mc, delimiter="\nAnswer: "), mc, 0)[0] == "S\nAnswer: y\n\nQ\nAnswer: a"
    )
    schema = [
        {"context_options": ["c0", "c1"], "continuation": "z", "gold": 0},
        {"context_options": ["d1", "d2"], "continuation": "w", "gold": 1},
    ]
    assert render_prompts(task("schema", schema), schema, 0)[1] == "d2 w\n\nc1 z"
    lm = [{"context": " ctx ", "continuation": "k"}, {"context": "e", "continuation": "f"}]
    assert render_prompts(task("language_modeling", lm), lm, 0) == ["e f\n\nctx", "e f\n\nctx k"]


def test_spans_score_only_what_differs():
    tok = Bytes()
    mc = task("multiple_choice", [])
    found = spans(mc, ["ab cd", "ab ce"], tok, 999)
    assert [s.ids[s.start : s.end].tolist() for s in found] == [list(b"d"), list(b"e")]
    found = spans(task("schema", []), ["xx same", "y same"], tok, 999)
    assert all(bytes(s.ids[s.start : s.end].tolist()) == b" same" for s in found)
    (found,) = spans(task("language_modeling", []), ["ctx", "ctx k"], tok, 999)
    assert bytes(found.ids[found.start : found.end].tolist()) == b" k"


@pytest.mark.parametrize("texts", [["ab", "abc"], ["ab", "ab"], ["a", "a b"]])
def test_equal_and_prefix_choices_still_have_something_to_score(texts):
    for kind in ("multiple_choice", "schema"):
        assert all(s.end > s.start >= 1 for s in spans(task(kind, []), texts, Bytes(), 999))


def test_truncation_keeps_the_end_and_says_so():
    text = "x" * 50
    (span,) = spans(task("language_modeling", []), [text, text + " yes"], Bytes(), 20)
    assert (len(span.ids), span.cut, span.length) == (20, 55 - 20, 55)
    assert bytes(span.ids[span.start : span.end].tolist()) == b" yes"


@jax.jit
def forward(params, ids):
    return gpt.apply(CONFIG, params, ids)


def logits_of(params, ids):
    """One prompt alone, padded behind to one shape: what comes later changes nothing."""
    padded = np.zeros((1, 128), np.int32)
    padded[0, : len(ids)] = ids
    return np.asarray(forward(params, padded), np.float64)[0, : len(ids)]


def naive(params, ids, start, end):
    logits = logits_of(params, ids)
    logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    picked = [logp[t - 1, ids[t]] for t in range(start, end)]
    return -np.mean(picked), all(logits[t - 1].argmax() == ids[t] for t in range(start, end))


def test_batched_scores_equal_one_by_one(params):
    rng = np.random.default_rng(1)
    items = []
    for length in map(int, rng.choice([3, 17, 41, 64, 99], 23)):
        ids = rng.integers(0, 299, length).tolist()
        start = int(rng.integers(1, length))
        items.append(Span(ids, start, length))
    # One span that is exactly what the model would say, so that "exact" is not always False.
    ids = items[0].ids[:5]
    ids.append(int(logits_of(params, ids)[-1].argmax()))
    items.append(Span(ids, 5, 6))
    counted = []
    scorer = core.scorer_for(CONFIG)
    nll, exact = core.score_spans(scorer, scorer.place(params), items, 299, counted.append)
    for i, span in enumerate(items):
        wanted = naive(params, span.ids, span.start, span.end)
        assert nll[i] == pytest.approx(wanted[0], abs=2e-5)
        assert exact[i] == wanted[1]
    assert exact[-1] and not exact.all() and sum(counted) == len(items)
    assert scorer.compiled._cache_size() <= 3  # prefixes up to 100 tokens: at most three padded lengths


ENTRY = "icl_tasks: [{label: demo, icl_task_type: %s, dataset_uri: %s, num_fewshot: [%s], continuation_delimiter: %s}]"
DAMAGED_YAML = [
    (ENTRY % ("[schema]", "demo.jsonl", "0", "' '"), "has type"),
    (ENTRY % ("{a: b}", "demo.jsonl", "0", "' '"), "has type"),
    (ENTRY % ("multiple_choice", "''", "0", "' '"), "is missing"),
    (ENTRY % ("multiple_choice", "demo.jsonl", "-1", "' '"), "broken entry"),
    (ENTRY % ("multiple_choice", "demo.jsonl", ".inf", "' '"), "broken entry"),
    (ENTRY % ("multiple_choice", "demo.jsonl", "1", "[1]"), "broken entry"),
    ("icl_tasks: [{label: demo,", "core.yaml or"),
    ("[" * 3000, "core.yaml or"),
]


def write_bundle(folder, examples, kind="multiple_choice", baseline=25):
    (folder / "eval_data").mkdir(parents=True)
    (folder / "core.yaml").write_text(
        "icl_tasks:\n- label: demo\n  dataset_uri: demo.jsonl\n  num_fewshot: [1]\n"
        f"  icl_task_type: {kind}\n  has_categories: true\n"
    )
    (folder / "eval_meta_data.csv").write_text(f"Eval Task,Random baseline\ndemo,{baseline}\n")
    (folder / "eval_data" / "demo.jsonl").write_text("".join(json.dumps(e) + "\n" for e in examples))


def test_a_bundle_end_to_end(tmp_path, params):
    rng = random.Random(5)
    examples = [
        {"query": f"q{i}", "choices": [rng.choice("abcdef") * 3 + str(j) for j in range(4)], "gold": i % 4}
        for i in range(30)
    ]
    write_bundle(tmp_path, examples)
    out = core.evaluate_core(CONFIG, params, Bytes(), tmp_path, rows=16)
    (read,) = load_bundle(tmp_path)
    right = 0
    for i, example in enumerate(read.examples):
        scores = [
            naive(params, s.ids, s.start, s.end)[0]
            for s in spans(read, render_prompts(read, read.examples, i), Bytes(), 999)
        ]
        right += int(np.argmin(scores)) == example["gold"]
    figures = out["core_tasks"]["demo"]
    assert figures["accuracy"] == right / 30
    assert figures["centered"] == pytest.approx((right / 30 - 0.25) / 0.75)
    assert figures["truncated_share"] == 0 and out["core"] == figures["centered"]
    short = core.evaluate_core(CONFIG, params, Bytes(), tmp_path, rows=16, context=8, max_per_task=5)
    assert short["core_tasks"]["demo"]["truncated_share"] == 1 and short["core_tasks"]["demo"]["examples"] == 5


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda d: (d / "core.yaml").unlink(), "core.yaml"),
        (lambda d: (d / "core.yaml").write_text("- [broken"), "broken"),
        (
            lambda d: (d / "eval_meta_data.csv").write_text("Eval Task,Random baseline\nother,1\n"),
            "no row for task demo",
        ),
        (lambda d: (d / "eval_data" / "demo.jsonl").unlink(), "demo.jsonl is missing"),
        (lambda d: (d / "eval_data" / "demo.jsonl").write_text("\n\n"), "holds no examples"),
        (lambda d: (d / "eval_data" / "demo.jsonl").write_text("{broken\n"), "line 1: not JSON"),
        (lambda d: (d / "eval_data" / "demo.jsonl").write_text('{"query": "q"}\n'), "line 1: lacks choices, gold"),
        (lambda d: (d / "eval_data" / "demo.jsonl").write_text("7\n"), "line 1: must be a JSON object"),
        (
            lambda d: (d / "eval_data" / "demo.jsonl").write_text('{"query": "q", "choices": ["a"], "gold": "a"}\n'),
            "line 1: gold must be a whole number",
        ),
        (lambda d: (d / "eval_data" / "demo.jsonl").write_bytes(b'{"query": "\xff"}\n'), "not UTF-8"),
        (lambda d: (d / "core.yaml").write_text("icl_tasks: null\n"), "lists no tasks"),
        (lambda d: (d / "core.yaml").write_text("icl_tasks:\n- label: demo\n"), "broken entry"),
        (lambda d: (d / "core.yaml").write_text("icl_tasks:\n- 7\n"), "broken entry"),
        (
            lambda d: (d / "core.yaml").write_text(
                "icl_tasks: [{label: demo, icl_task_type: schema, dataset_uri: demo.jsonl, num_fewshot: []}]"
            ),
            "broken entry",
        ),
        *((lambda d, y=y: (d / "core.yaml").write_text(y), words) for y, words in DAMAGED_YAML),
        (lambda d: ((d / "core.yaml").unlink(), (d / "core.yaml").mkdir()), "core.yaml cannot be read"),
        (lambda d: (d / "eval_meta_data.csv").write_text('a,"' + "x" * 200_000), "eval_meta_data.csv is broken"),
    ],
)
def test_a_broken_bundle_is_named(tmp_path, params, damage, words):
    write_bundle(tmp_path, [{"query": "q", "choices": ["a", "b"], "gold": 0}] * 3)
    damage(tmp_path)
    with pytest.raises(UserError, match=words) as e:
        core.evaluate_core(CONFIG, params, Bytes(), tmp_path)
    assert "\n" not in str(e.value)


@pytest.mark.parametrize(
    ("kind", "rows", "wanted"),
    [
        ("multiple_choice", [[0, 5, 6, 11], [0, 5, 6, 12, 13]], [(3, 4), (3, 5)]),
        ("multiple_choice", [[0, 5, 11], [0, 5, 11, 12]], [(2, 3), (2, 4)]),  # one answer begins the other
        ("multiple_choice", [[4, 5], [6, 7]], [(1, 2), (1, 2)]),
        ("schema", [[0, 11, 5, 6], [0, 12, 13, 5, 6]], [(2, 4), (3, 5)]),
        ("schema", [[0, 5], [0, 6]], [(1, 2), (1, 2)]),  # nothing in common at the end
        ("language_modeling", [[0, 5, 6], [0, 5, 6, 11, 12]], [(3, 5)]),
        ("language_modeling", [[0, 5, 6], [0, 5, 61, 12]], [(2, 4)]),  # the last token melts with the continuation
        ("language_modeling", [[0, 5, 6], [0, 5, 6]], [(2, 3)]),
    ],
)
def test_what_is_scored(kind, rows, wanted):
    found = scored_parts(kind, [np.array(row) for row in rows])
    assert [(span.start, span.end) for span in found] == wanted
    kept = rows[-1:] if kind == "language_modeling" else rows
    assert [span.ids.tolist() for span in found] == kept


def test_a_cut_takes_the_front_and_moves_the_scored_part():
    span = Span(np.arange(100, 110), 7, 9)
    for context, cut in ((12, 0), (10, 0), (6, 4), (2, 8)):
        short = cut_front(span, context)
        assert (short.cut, short.length) == (cut, 10) and short.ids.tolist() == list(range(100 + cut, 110))
        assert (short.start, short.end) == (7 - cut, 9 - cut) and short.fits == (cut < 7)
    assert (span.start, span.cut, len(span.ids)) == (7, 0, 10)  # itself unchanged


def test_common_prefix():
    assert common_prefix([[1, 2, 3], [1, 2, 4]]) == 2
    assert common_prefix([[1], [1, 2]]) == 1
