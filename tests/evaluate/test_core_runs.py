"""An evaluation as a whole: stopped and started, split over processes, with answers longer than the context."""

import json
import threading

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_core import CONFIG, Bytes, params, task  # noqa: F401

from nanochat_lib import distributed
from nanochat_lib.errors import UserError
from nanochat_lib.evaluate import core
from nanochat_lib.evaluate.bundle import shots_for
from nanochat_lib.evaluate.results import Results, gather_shares, own_share, pack, unpack
from nanochat_lib.evaluate.spans import length_figures, length_warning, spans

TASKS = {
    "choose": ("multiple_choice", 2, 25, lambda i: {
        "query": f"q{i * 7 % 11}", "choices": [f"{'abcdef'[(i + j) % 6] * 3}{j}" for j in range(4)], "gold": i % 4}),
    "complete": ("language_modeling", 1, 0, lambda i: {
        "context": f"c{i}" + "x" * (i % 5), "continuation": "y" * (1 + i % 3)}),
    "whose": ("schema", 0, 50, lambda i: {
        "context_options": [f"a{i}", f"bb{i}"], "continuation": "z" * (1 + i % 4), "gold": i % 2}),
}  # fmt: skip


@pytest.fixture
def bundle(tmp_path):
    folder = tmp_path / "bundle"
    (folder / "eval_data").mkdir(parents=True)
    listing, baselines = "icl_tasks:\n", "Eval Task,Random baseline\n"
    for label, (kind, shots, baseline, make) in TASKS.items():
        lines = [json.dumps(make(i)) + "\n" for i in range(13)]
        (folder / "eval_data" / f"{label}.jsonl").write_text("".join(lines))
        listing += f"- {{label: {label}, dataset_uri: {label}.jsonl, num_fewshot: [{shots}], icl_task_type: {kind}}}\n"
        baselines += f"{label},{baseline}\n"
    (folder / "core.yaml").write_text(listing)
    (folder / "eval_meta_data.csv").write_text(baselines)
    return folder


def test_a_stopped_evaluation_goes_on_with_the_task_it_was_in(tmp_path, bundle, params, monkeypatch):  # noqa: F811
    whole = core.evaluate_core(CONFIG, params, Bytes(), bundle)
    real, calls = core.score_spans, []

    def stops(*args):
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return real(*args)

    results = lambda **options: Results(tmp_path / "kept", "core", {"step": 3} | options)  # noqa: E731
    monkeypatch.setattr(core, "score_spans", stops)
    with pytest.raises(KeyboardInterrupt):
        core.evaluate_core(CONFIG, params, Bytes(), bundle, results=results())
    assert core.evaluate_core(CONFIG, params, Bytes(), bundle, results=results()) == whole
    assert len(calls) == 4  # the first task was kept, the second began again
    assert core.evaluate_core(CONFIG, params, Bytes(), bundle, results=results()) == whole and len(calls) == 4

    damaged = results().path("complete")
    damaged.write_text(damaged.read_text()[:40])
    assert core.evaluate_core(CONFIG, params, Bytes(), bundle, results=results()) == whole and len(calls) == 5
    core.evaluate_core(CONFIG, params, Bytes(), bundle, results=results(step=4))  # other weights are not these
    assert len(calls) == 8
    data = bundle / "eval_data" / "whose.jsonl"
    data.write_text(data.read_text().replace("zzzz", "zzzy"))
    core.evaluate_core(CONFIG, params, Bytes(), bundle, results=results())  # nor are other questions
    assert len(calls) == 9


class Pretended:
    """Two processes as two threads that meet when they gather."""

    def __init__(self, monkeypatch):
        self.own, self.barrier, self.parts = threading.local(), threading.Barrier(2), [None, None]
        monkeypatch.setattr(distributed, "count", lambda: 2 if hasattr(self.own, "index") else 1)
        monkeypatch.setattr(distributed, "index", lambda: self.own.index)
        monkeypatch.setattr(distributed, "gather", self.gather)
        monkeypatch.setattr(distributed, "from_first", lambda value: value())

    def gather(self, values):
        self.parts[self.own.index] = np.asarray(values)
        self.barrier.wait(120)
        whole = np.concatenate(self.parts)
        self.barrier.wait(120)
        return whole

    def run(self, work):
        found, errors = [None, None], []

        def one(index):
            self.own.index = index
            try:
                found[index] = work()
            except BaseException as error:
                errors.append(error)
                self.barrier.abort()

        threads = [threading.Thread(target=one, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors, errors
        return found


def test_two_processes_find_what_one_does(tmp_path, bundle, params, monkeypatch):  # noqa: F811
    """13 examples do not divide by two."""
    kept = lambda place: Results(tmp_path / place, "core", {})  # noqa: E731
    alone = core.evaluate_core(CONFIG, params, Bytes(), bundle, results=kept("one"))
    monkeypatch.setattr(distributed, "first", lambda: True)
    both = Pretended(monkeypatch).run(
        lambda: core.evaluate_core(CONFIG, params, Bytes(), bundle, results=kept(f"two-{distributed.index()}"))
    )
    assert both == [alone, alone]
    for label in TASKS:
        assert kept("one").path(label).read_text() == kept("two-0").path(label).read_text()


def test_shares_come_back_in_order(monkeypatch):
    for count in (0, 1, 5, 6):
        values = np.arange(10, 10 + 2 * count, dtype=np.int32).reshape(count, 2)
        found = Pretended(monkeypatch).run(lambda v=values, n=count: gather_shares(v[own_share(n)], n))
        assert all(np.array_equal(one, values) for one in found)


@given(st.lists(st.sampled_from([-1, 0, 1]), min_size=1, max_size=40))
def test_answers_are_kept_to_the_bit(values):
    right = np.array(values, np.int8)
    assert np.array_equal(unpack(json.loads(json.dumps(pack(right)))), right)
    assert np.array_equal(unpack(pack(np.stack([right, right], 1))), np.stack([right, right], 1))


# ---- lengths


@given(st.integers(1, 40), st.integers(1, 40), st.integers(2, 60))
def test_a_cut_prompt_never_scores_a_part_of_its_answer_or_of_the_question(prompt, answer, context):
    before = "p" * prompt
    (span,) = spans(task("language_modeling", []), [before, before + "y" * answer], Bytes(), context)
    if span.fits:
        assert span.ids[span.start : span.end].tolist() == [ord("y")] * answer and len(span.ids) <= context
    else:
        assert answer > context - 1


def test_answers_longer_than_the_context_are_left_out_and_counted(bundle, params):  # noqa: F811
    out = core.evaluate_core(CONFIG, params, Bytes(), bundle, context=4)["core_tasks"]
    long = sum(1 + i % 3 + 1 > 3 for i in range(13))  # the blank and up to three letters, one place for what is before
    assert (out["complete"]["skipped"], out["complete"]["examples"]) == (long, 13 - long)
    assert out["complete"]["truncated_share"] == 1 and out["complete"]["truncated_tokens"] > 0
    none = core.evaluate_core(CONFIG, params, Bytes(), bundle, context=2)
    assert (
        none["core_tasks"]["whose"] | {"accuracy": None, "centered": None, "interval": None, "examples": 0}
        == (none["core_tasks"]["whose"])
    )
    assert "no answer fits into the context of 2" in none["core_tasks"]["whose"]["warning"]
    scored = [t["centered"] for t in none["core_tasks"].values() if t["centered"] is not None]
    assert none["core"] == (pytest.approx(np.mean(scored)) if scored else None)


def figures(lengths, context, accuracy, baseline, training=2048):
    centred = (accuracy - baseline) / (1 - baseline)
    return {"centered": centred} | length_figures(np.asarray(lengths), context, training)


@pytest.mark.parametrize(
    ("case", "words"),
    [
        # The public 3.8B run at 1024 and 2048 tokens: share cut, accuracy, baseline.
        (("SQuAD at 1024", 1.0, 1024, 0.0007, 0.0), "no better than guessing"),
        (("SQuAD at 2048", 0.47, 2048, 0.3114, 0.0), ""),
        (("BoolQ at 1024", 0.998, 1024, 0.5131, 0.62), "no better than guessing"),
        (("BoolQ at 2048", 0.032, 2048, 0.7095, 0.62), ""),
        (("languages at 1024", 0.997, 1024, 0.25, 0.091), ""),
        (("nothing cut, bad", 0.0, 2048, 0.2, 0.25), ""),
    ],
)
def test_a_score_that_its_prompts_length_explains_is_warned_of(case, words):
    _, share, context, accuracy, baseline = case
    count = 1000
    cut = np.arange(count) < share * count
    right = np.random.default_rng(0).permutation(count) < accuracy * count
    lengths = np.where(cut, context + 900, context - 200)
    found = length_warning(figures(lengths, context, accuracy, baseline), right, cut, context, 2048)
    assert bool(found) == bool(words) and words in found
    if words:
        assert f"{share:.1%} of the prompts were cut to {context:,} tokens" in found and "--context" in found


def test_cut_prompts_that_score_worse_are_warned_of():
    cut = np.arange(400) < 120
    right = np.where(cut, np.arange(400) % 4 == 0, np.arange(400) % 4 != 0)  # 25 % and 75 %
    lengths = np.where(cut, 1500, 500)
    found = length_warning(figures(lengths, 1024, right.mean(), 0.25), right, cut, 1024, 2048)
    assert "30.0% of the prompts were cut" in found and "25.0%, the others 75.0%" in found
    assert not length_warning(figures(lengths, 1024, 0.6, 0.25), np.arange(400) % 5 < 3, cut, 1024, 2048)
    beyond = length_warning(figures(lengths, 9999, right.mean(), 0.25, 1024), right, cut, 9999, 1024)
    assert "longer than the 1,024 tokens that the model was trained on" in beyond  # nothing cut, but never trained


def test_lengths_are_those_of_all_prompts():
    found = length_figures(np.array([10] * 80 + [100] * 15 + [1000] * 5), 500, 64)
    assert found["prompt_tokens"] == {"p50": 10, "p90": 100, "max": 1000}
    assert (found["truncated_share"], found["truncated_tokens"]) == (0.05, 500)
    assert found["beyond_training_context_share"] == 0.2


# ---- the bundle's details


@given(st.integers(2, 40), st.integers(0, 12), st.data())
def test_shots_are_drawn_from_all_others_in_order(count, shots, data):
    import random

    index = data.draw(st.integers(0, count - 1))
    others = [i for i in range(count) if i != index]
    wanted = random.Random(1234 + index).sample(others, min(shots, len(others)))
    assert shots_for(index, count, shots) == wanted


def test_a_line_may_hold_any_character_and_gold_must_be_offered(bundle):
    path = bundle / "eval_data" / "choose.jsonl"
    odd = {"query": "one\u2028two\x85three", "choices": ["a", "b"], "gold": 1}
    path.write_text(json.dumps(odd, ensure_ascii=False) + "\n", encoding="utf-8")
    assert core.load_bundle(bundle)[0].examples == [odd]
    path.write_text(json.dumps(odd | {"gold": 2}) + "\n")
    with pytest.raises(UserError, match="choose.jsonl, line 1: gold is 2, there are 2 choices"):
        core.load_bundle(bundle)


def test_the_table_is_nanochats(tmp_path):
    out = {"core": 0.25, "core_tasks": {"hellaswag": {"accuracy": 0.5, "centered": 1 / 3}, "squad": {"accuracy": None}}}
    core.write_csv(tmp_path / "base_eval" / "base_model_000020.csv", out)
    assert (tmp_path / "base_eval" / "base_model_000020.csv").read_text() == (
        "Task                               , Accuracy  , Centered  \n"
        "hellaswag                          , 0.500000  , 0.333333  \n"
        "squad                              ,           ,           \n"
        "CORE                               ,           , 0.250000  \n"
    )


def test_progress_counts_whole_examples():
    told = []
    count = core.whole_units(told.append, parts=10, units=4)  # ten prompts of four examples
    for n in (3, 3, 3, 1):
        count(n)
    assert told == [1, 1, 1, 1] and sum(told) == 4
