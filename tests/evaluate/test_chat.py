"""Chat evaluation on scripted models: what is offered is scored by likelihood, what is open by what is written."""

import jax
import numpy as np
import pytest

from nanochat_lib import gpt
from nanochat_lib.conversation import render_for_completion
from nanochat_lib.engine import Engine
from nanochat_lib.errors import UserError
from nanochat_lib.evaluate.chat import categorical, chat_samples, evaluate_chat, evaluate_task
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
    right = categorical(engine, tokenizer, task, chats, rows=5)
    for conversation, got in zip(chats, right, strict=True):
        prompt = render_for_completion(tokenizer, conversation)
        scores = []
        for choice in conversation["choices"]:
            ids = prompt + tokenizer.encode(choice)
            logits = np.asarray(gpt.apply(engine.setup.config, engine.params, np.array([ids])), np.float64)[0]
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
