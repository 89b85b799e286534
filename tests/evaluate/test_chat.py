"""Chat evaluation on scripted models: what is offered is scored by likelihood, what is open by what is written."""

import jax
import numpy as np
import pytest

from nanochat_lib import gpt
from nanochat_lib.conversation import render_conversation, render_for_completion
from nanochat_lib.engine import Engine
from nanochat_lib.errors import UserError
from nanochat_lib.evaluate.chat import Sampling, categorical, chat_samples, evaluate_chat, evaluate_task
from nanochat_lib.evaluate.results import Results
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.tasks.common import Task
from nanochat_lib.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.train(["ab ab ab cd cd red green blue 1 2 3"] * 3, 280, strict=False)


@pytest.fixture(scope="module")
def engine(tokenizer):
    config = GPTConfig(128, tokenizer.vocab_size, 1, 1, 1, 32, "L")
    rng = np.random.default_rng(0)
    params = gpt.init_params(config, jax.random.key(0))
    params = {n: x + rng.normal(0, 0.2, x.shape).astype(np.float32) for n, x in params.items()}
    return Engine(config, params, tokenizer)


class Colours(Task):
    name, eval_type, scored_over, baseline = "colours", "categorical", "text", 0.25

    def num_examples(self):
        return 12

    def get_example(self, i):
        choices = ["red", "green", "blue", "ab cd"]
        messages = [{"role": "user", "content": f"{i}?"}, {"role": "assistant", "content": choices[i % 4]}]
        return {"messages": messages, "choices": choices, "gold": i % 4, "letters": ["A", "B", "C", "D"]}

    def evaluate(self, conversation, completion):
        return float(completion.strip() == conversation["messages"][-1]["content"])


def test_choices_are_ranked_by_mean_likelihood(engine, tokenizer):
    task = Colours()
    chats = [task[i] for i in range(12)]
    forward = jax.jit(lambda params, ids: gpt.apply(engine.setup.config, params, ids))
    right = categorical(engine, tokenizer, task, chats, rows=5)
    for conversation, got in zip(chats, right, strict=True):
        prompt = render_for_completion(tokenizer, conversation)
        scores = []
        for choice in conversation["choices"]:
            ids = prompt + tokenizer.encode(choice)
            padded = np.zeros((1, 32), np.int32)
            padded[0, : len(ids)] = ids
            logits = np.asarray(forward(engine.params, padded), np.float64)[0]
            logp = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
            scores.append(np.mean([logp[t - 1, ids[t]] for t in range(len(prompt), len(ids))]))
        assert got == (int(np.argmax(scores)) == conversation["gold"])
    assert 0 < sum(right) < 12  # a model that always names one colour is right three times of twelve


def test_a_letter_of_two_tokens_is_an_error(engine, tokenizer):
    class Long(Colours):
        scored_over = "letter"

        def get_example(self, i):
            return super().get_example(i) | {
                "letters": ["AB", "B"],
                "messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "B"}],
            }

    with pytest.raises(UserError, match="not one token"):
        categorical(engine, tokenizer, Long(), [Long()[0]], rows=4)


class Echo(Colours):
    eval_type, baseline = "generative", 0.0


class Scripted:
    """Stands for the engine: writes the given texts."""

    def __init__(self, tokenizer, texts):
        self.tokenizer, self.texts = tokenizer, texts

    def generate_batch(self, prompts, **options):
        texts, self.texts = self.texts[: len(prompts)], self.texts[len(prompts) :]

        class Out:
            sequences = [p + self.tokenizer.encode(t) for p, t in zip(prompts, texts, strict=True)]
            finished = ["end"] * len(prompts)

        return Out


def test_gold_answers_score_one_and_empty_ones_zero(tokenizer):
    task = Echo()
    gold = [task[i]["messages"][-1]["content"] for i in range(12)]
    figures, _ = evaluate_task(Scripted(tokenizer, gold), tokenizer, task, -1, 4, 8)
    assert figures["accuracy"] == 1 and figures["stderr"] == 0 and figures["examples"] == 12
    assert evaluate_task(Scripted(tokenizer, [""] * 12), tokenizer, task, -1, 4, 8)[0]["accuracy"] == 0
    half, _ = evaluate_task(Scripted(tokenizer, gold[:5]), tokenizer, task, 5, 4, 8)
    assert half["examples"] == 5 and half["ended_share"] == 1


def test_answers_that_leave_no_room_for_a_question_are_refused(engine, tokenizer):
    with pytest.raises(UserError, match=r"leave no room .* evaluation.chat_max_new_tokens=") as e:
        evaluate_task(engine, tokenizer, Echo(), 2, 4, engine.context - 3)
    assert "\n" not in str(e.value)


def test_chatcore_is_the_mean_of_centred_scores(engine, tokenizer):
    out = evaluate_chat(engine, tokenizer, {"a": Colours(), "b": Echo()}, rows=4, max_new_tokens=4)
    a, b = out["tasks"]["a"], out["tasks"]["b"]
    assert a["centered"] == pytest.approx((a["accuracy"] - 0.25) / 0.75)
    assert out["chatcore"] == pytest.approx((a["centered"] + b["centered"]) / 2)


def test_an_empty_task_is_named(engine, tokenizer):
    with pytest.raises(UserError, match="colours holds no conversations"):
        evaluate_task(engine, tokenizer, Colours(0, 0), -1, 4, 8)


def test_samples_show_question_answer_and_reference(engine, tokenizer):
    (sample,) = chat_samples(engine, tokenizer, [Colours()[1]], "sft", 4)
    assert sample["question"] == "1?" and sample["reference"] == "green" and sample["stage"] == "sft"


LETTERS = ["A", "B", "C", "D"]


def test_the_letter_that_is_scored_is_the_one_that_training_saw(tokenizer):
    """Encoded on its own, as an assistant's message is: ` A` and `=A` are other tokens."""
    question = {
        "role": "user",
        "content": "Multiple Choice question: What?\n- x=A\n- y=B\n\nRespond only with the letter.",
    }
    prompt = render_for_completion(tokenizer, {"messages": [question, {"role": "assistant", "content": ""}]})
    for letter in LETTERS:
        whole = render_conversation(tokenizer, {"messages": [question, {"role": "assistant", "content": letter}]}).ids
        (scored,) = tokenizer.encode(letter)
        assert whole == [*prompt, scored, tokenizer.encode_special("<|assistant_end|>")]


class Asked(Colours):
    """Letters with an answer of their own form."""

    eval_type = "generative"

    def answered(self, conversation, completion):
        return completion.strip() in ("red", "green", "blue", "ab cd")


def test_answers_that_cannot_be_read_are_counted(tokenizer):
    said = ["red", "no idea", "", "blue"] * 3
    figures, right = evaluate_task(Scripted(tokenizer, said), tokenizer, Asked(), -1, 4, 8)
    assert figures["unparsed"] == 6 and right.shape == (12, 1)
    assert figures["accuracy"] == figures["examples"] ** -1 * right.sum() and figures["samples"] == 1
    low, high = figures["interval"]
    assert low < figures["accuracy"] < high and figures["centered_interval"] == [(x - 0.25) / 0.75 for x in (low, high)]


def test_several_answers_a_question_count_as_any_and_as_pass_at_k(tokenizer):
    class Sampled(Scripted):
        def generate_batch(self, prompts, num_samples, seed, temperature, **options):
            assert temperature == 1.0
            seeds.extend(seed)
            texts = ["red" if s % 2 else "no" for s in range(num_samples)]

            class Out:
                sequences = [p + self.tokenizer.encode(t) for p in prompts for t in texts]
                finished = ["end", "length", "length"] * len(prompts)

            return Out

    seeds = []
    sampling = Sampling(samples=3, temperature=1.0)
    figures, right = evaluate_task(Sampled(tokenizer, []), tokenizer, Asked(), -1, 7, 8, sampling=sampling)
    assert right.tolist() == [[0, int(i % 4 == 0), 0] for i in range(12)]
    assert figures["accuracy"] == 0.25 and figures["pass_at_k"] == [0, 0.25, 0.25]
    assert figures["pass_at_k_unbiased"] == pytest.approx([0.25 / 3, 0.25 * 2 / 3, 0.25])
    assert figures["unparsed"] == 24 and figures["ended_share"] == pytest.approx(1 / 3)
    assert len(set(seeds)) == 12  # a question's answers are its own, whoever is asked beside it
    with pytest.raises(UserError, match="would all be the same answer"):
        Sampling(samples=2)
    with pytest.raises(UserError, match="at least 1"):
        Sampling(samples=0)


def test_a_prompt_too_long_for_context_and_answer_keeps_its_end(engine, tokenizer):
    class Long(Echo):
        def get_example(self, i):
            return {"messages": [{"role": "user", "content": "red " * 200}, {"role": "assistant", "content": "red"}]}

    figures, _ = evaluate_task(engine, tokenizer, Long(0, 1), -1, 1, 4)
    assert figures["truncated_share"] == 1.0


def test_a_stopped_chat_evaluation_goes_on(tmp_path, tokenizer):
    gold = [Echo()[i]["messages"][-1]["content"] for i in range(12)]
    tasks = {"a": Echo(), "b": Asked()}
    kept = lambda: Results(tmp_path, "chat", {"step": 1})  # noqa: E731
    with pytest.raises(ValueError):  # the script ends before the second task
        evaluate_chat(Scripted(tokenizer, gold), tokenizer, tasks, results=kept())
    out = evaluate_chat(Scripted(tokenizer, gold), tokenizer, tasks, results=kept())
    assert out["tasks"]["a"]["accuracy"] == out["tasks"]["b"]["accuracy"] == 1.0
    assert evaluate_chat(Scripted(tokenizer, []), tokenizer, tasks, results=kept()) == out
    assert out["chatcore"] == 1.0 and out["chatcore_interval"][0] < 1.0 == out["chatcore_interval"][1]


def test_chatcore_needs_all_tasks(engine, tokenizer):
    part = evaluate_chat(engine, tokenizer, {"a": Colours(0, 2)}, complete=False)
    assert part["chatcore"] is None and part["tasks"]["a"]["examples"] == 2
    both = evaluate_chat(engine, tokenizer, {"a": Colours(0, 2), "b": Echo(0, 1)}, max_new_tokens=2)
    assert both["chatcore_categorical"] == both["tasks"]["a"]["centered"] != both["chatcore"]


def test_a_reference_that_is_not_offered_is_named(engine, tokenizer):
    class Wrong(Colours):
        scored_over = "letter"

    with pytest.raises(UserError, match="'red' is none of the letters A, B, C, D"):
        categorical(engine, tokenizer, Wrong(), [Wrong()[0]], rows=4)
