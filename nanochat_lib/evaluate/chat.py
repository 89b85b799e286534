"""Chat tasks: questions with offered answers are scored by likelihood, open ones by what the model writes.

ChatCORE is the mean over tasks of (accuracy − baseline) / (1 − baseline), as in nanochat.
"""

from __future__ import annotations

import math
import statistics

import jax.numpy as jnp
import numpy as np

from nanochat_lib.conversation import render_for_completion
from nanochat_lib.engine import Engine
from nanochat_lib.errors import UserError
from nanochat_lib.evaluate.core import Span, score_spans, scorer_for
from nanochat_lib.progress import Progress
from nanochat_lib.tasks.common import Conversation, Task, last_text
from nanochat_lib.tokenizer import Tokenizer


def offered(conversation: Conversation, task: Task) -> tuple[list[str], int]:
    """(the answers that are offered, the index of the right one) of a categorical conversation."""
    if task.scored_over == "text":
        return conversation["choices"], conversation["gold"]
    letters = conversation["letters"]
    return letters, letters.index(last_text(conversation))


def categorical(
    engine: Engine, tokenizer: Tokenizer, task: Task, conversations: list[Conversation], rows: int
) -> list[bool]:
    """Whether the likeliest of the offered answers is the right one: mean NLL over the answer's tokens.

    Nothing is sampled. Raises UserError when a letter is not a single token: its likelihood would mean nothing.
    """
    items, groups = [], []
    for conversation in conversations:
        prompt = render_for_completion(tokenizer, conversation)
        answers, gold = offered(conversation, task)
        encoded = [tokenizer.encode(answer) for answer in answers]
        if task.scored_over == "letter" and any(len(ids) != 1 for ids in encoded):
            raise UserError(f"{task.name}: a letter of {answers} is not one token of this tokenizer")
        items += [Span(prompt + ids, len(prompt), len(prompt) + len(ids)) for ids in encoded]
        groups.append((len(answers), gold))
    scorer = scorer_for(engine.setup.config, jnp.dtype(engine.setup.dtype))
    nll, _ = score_spans(scorer, engine.params, items, tokenizer.bos_id, rows, lambda n: None)
    right, place = [], 0
    for count, gold in groups:
        right.append(int(np.argmin(nll[place : place + count])) == gold)
        place += count
    return right


def generative(
    engine: Engine,
    tokenizer: Tokenizer,
    task: Task,
    conversations: list[Conversation],
    rows: int,
    max_new_tokens: int,
) -> tuple[list[bool], float]:
    """(whether the greedy answer is right, share of answers that reached their end) over the conversations."""
    prompts = [render_for_completion(tokenizer, conversation) for conversation in conversations]
    out = engine.generate_batch(prompts, max_tokens=max_new_tokens, temperature=0.0, batch_rows=rows)
    right = []
    for conversation, prompt, ids in zip(conversations, prompts, out.sequences, strict=True):
        right.append(task.evaluate(conversation, tokenizer.decode(ids[len(prompt) :])) > 0)
    return right, statistics.mean(reason == "end" for reason in out.finished)


def evaluate_task(
    engine: Engine, tokenizer: Tokenizer, task: Task, max_examples: int, rows: int, max_new_tokens: int
) -> dict:
    """Accuracy of one task with its standard error and what guessing reaches."""
    count = min(max_examples, len(task)) if max_examples > 0 else len(task)
    if count == 0:
        raise UserError(f"{task.name} holds no conversations: nothing to evaluate")
    conversations = [task[i] for i in range(count)]
    ended = None
    if task.eval_type == "categorical":
        right = categorical(engine, tokenizer, task, conversations, rows)
    else:
        right, ended = generative(engine, tokenizer, task, conversations, rows, max_new_tokens)
    accuracy = statistics.mean(right)
    return {
        "accuracy": accuracy,
        "baseline": task.baseline,
        "centered": (accuracy - task.baseline) / (1 - task.baseline),
        "examples": count,
        "stderr": math.sqrt(accuracy * (1 - accuracy) / count),
        "ended_share": ended,
        "type": task.eval_type,
    }


def evaluate_chat(
    engine: Engine,
    tokenizer: Tokenizer,
    tasks: dict[str, Task],
    *,
    max_per_task: int = -1,
    rows: int = 32,
    max_new_tokens: int = 512,
    title: str = "chat",
) -> dict:
    """Every task on the engine's model: {"chatcore": mean centred accuracy, "tasks": {name: figures}}."""
    results = {}
    with Progress(len(tasks), title, unit="task") as bar:
        for name, task in tasks.items():
            results[name] = evaluate_task(engine, tokenizer, task, max_per_task, rows, max_new_tokens)
            bar.update(1, last=f"{name} {results[name]['accuracy']:.0%}")
    return {"chatcore": statistics.mean(r["centered"] for r in results.values()), "tasks": results}


def chat_samples(
    engine: Engine, tokenizer: Tokenizer, questions: list[Conversation], stage: str, max_new_tokens: int
) -> list[dict]:
    """The model's greedy answers to `questions`, beside the reference answers."""
    prompts = [render_for_completion(tokenizer, question) for question in questions]
    out = engine.generate_batch(prompts, max_tokens=max_new_tokens, temperature=0.0)
    return [
        {
            "stage": stage,
            "question": question["messages"][0]["content"],
            "answer": tokenizer.decode(ids[len(prompt) :]),
            "reference": last_text(question),
        }
        for question, prompt, ids in zip(questions, prompts, out.sequences, strict=True)
    ]
