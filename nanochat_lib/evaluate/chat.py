"""Chat tasks: questions with offered answers are scored by likelihood, open ones by what the model writes.

ChatCORE is the mean over tasks of (accuracy − baseline) / (1 − baseline), as in nanochat.
"""

from __future__ import annotations

import functools
import hashlib
import json
import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from nanochat_lib import distributed
from nanochat_lib.conversation import render_for_completion
from nanochat_lib.engine import Engine
from nanochat_lib.errors import UserError
from nanochat_lib.evaluate.core import ROTARY_FACTOR, score_spans, whole_units
from nanochat_lib.evaluate.results import Results, gather_shares, own_share
from nanochat_lib.evaluate.scorer import scorer_for
from nanochat_lib.evaluate.scores import (
    centered,
    centered_interval,
    mean_interval,
    pass_at_k,
    unbiased_pass_at_k,
    wilson,
)
from nanochat_lib.evaluate.spans import Span
from nanochat_lib.progress import Progress
from nanochat_lib.runtime import check_preempted
from nanochat_lib.settings import least_room
from nanochat_lib.tasks.common import Conversation, Task, last_text
from nanochat_lib.tokenizer import Tokenizer

SEED = 42
LONGEST = 10**9  # tokens: nothing is cut


@dataclass(frozen=True)
class Sampling:
    """How open questions are answered. `samples` answers each; a question counts as right when one of them is."""

    samples: int = 1
    max_new_tokens: int = 512
    temperature: float = 0.0
    top_k: int = 50

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise UserError(f"samples {self.samples} must be at least 1")
        if self.samples > 1 and self.temperature == 0:
            raise UserError(
                f"{self.samples} samples at temperature 0 would all be the same answer; use a temperature above 0"
            )


def offered(conversation: Conversation, task: Task) -> tuple[list[str], int]:
    """(the answers that are offered, the index of the right one) of a categorical conversation."""
    if task.scored_over == "text":
        return conversation["choices"], conversation["gold"]
    letters, right = list(conversation["letters"]), last_text(conversation)
    if right not in letters:
        raise UserError(f"{task.name}: the reference answer {right!r} is none of the letters {', '.join(letters)}")
    return letters, letters.index(right)


def categorical(
    engine: Engine,
    tokenizer: Tokenizer,
    task: Task,
    conversations: list[Conversation],
    rows: int,
    advance: Callable[[int], None] = lambda questions: None,
) -> list[bool]:
    """Whether the likeliest of the offered answers is the right one: mean NLL over the answer's tokens.

    Nothing is sampled, and a question is one row: the prompt once, the answers as its branches. An answer is encoded on
    its own, as an assistant's message is in training, so its first id is what truly follows the prompt there. Raises
    UserError when a letter is not a single token: its likelihood would mean nothing.
    """
    items, groups = [], []
    longest = ROTARY_FACTOR * engine.setup.config.sequence_len  # as for CORE's prompts
    for conversation in conversations:
        prompt = render_for_completion(tokenizer, conversation, longest)
        answers, gold = offered(conversation, task)
        encoded = [tokenizer.encode(answer) for answer in answers]
        if task.scored_over == "letter" and any(len(ids) != 1 for ids in encoded):
            raise UserError(f"{task.name}: a letter of {answers} is not one token of this tokenizer")
        items += [Span(np.array(prompt + ids), len(prompt), len(prompt) + len(ids)) for ids in encoded]
        groups.append((len(answers), gold))
    scorer = scorer_for(engine.setup.config, engine.setup.dtype, rows=rows)
    placed = scorer.place(engine.params)
    counted = whole_units(advance, len(items), len(conversations))
    nll, _ = score_spans(scorer, placed, items, tokenizer.bos_id, counted)
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
    sampling: Sampling,
    seeds: list[int],
    advance: Callable[[int], None] = lambda questions: None,
) -> dict[str, np.ndarray]:
    """Of the answers that the model writes, (Q, samples) each: "right", "ended", whether it came to its own end, and
    "read", whether there was an answer in the asked form at all; "cut" (Q, 1), whether the prompt was.

    `seeds`: one a question, so that its answers do not depend on which others are asked beside it.
    """
    context = getattr(engine, "context", LONGEST)
    room = context - sampling.max_new_tokens
    if room < least_room(context):
        raise UserError(
            f"{task.name}: answers of {sampling.max_new_tokens} tokens leave no room for a question in the context of "
            f"{context}; use -s evaluation.chat_max_new_tokens={context // 2}"
        )
    whole = [render_for_completion(tokenizer, conversation, LONGEST) for conversation in conversations]
    prompts = [
        ids if len(ids) <= room else render_for_completion(tokenizer, conversation, room)
        for conversation, ids in zip(conversations, whole, strict=True)
    ]
    shape = len(conversations), sampling.samples
    found = {name: np.zeros(shape, np.int8) for name in ("right", "ended", "read")}
    found["cut"] = np.array([[len(ids) > room] for ids in whole], np.int8).reshape(len(conversations), 1)
    at_once = max(rows // sampling.samples, 1)
    for first in range(0, len(conversations), at_once):
        check_preempted()
        part = slice(first, first + at_once)
        out = engine.generate_batch(
            prompts[part], num_samples=sampling.samples, max_tokens=sampling.max_new_tokens, batch_rows=rows,
            temperature=sampling.temperature, top_k=sampling.top_k, seed=seeds[part],
        )  # fmt: skip
        for i, (ids, reason) in enumerate(zip(out.sequences, out.finished, strict=True)):
            question, sample = first + i // sampling.samples, i % sampling.samples
            answer = tokenizer.decode(ids[len(prompts[question]) :])
            found["right"][question, sample] = task.evaluate(conversations[question], answer) > 0
            found["ended"][question, sample] = reason == "end"
            found["read"][question, sample] = task.answered(conversations[question], answer)
        advance(len(prompts[part]))
    return found


def evaluate_task(
    engine: Engine,
    tokenizer: Tokenizer,
    task: Task,
    max_examples: int,
    rows: int,
    max_new_tokens: int,
    *,
    sampling: Sampling | None = None,
    advance: Callable[[int], None] = lambda questions: None,
) -> tuple[dict, np.ndarray]:
    """(figures, right or wrong) of one task: accuracy with its interval, what guessing reaches, how answers ended."""
    sampling = sampling or Sampling(max_new_tokens=max_new_tokens)
    count = task_size(task, max_examples)
    mine = own_share(count)
    conversations = [task[i] for i in mine]
    with distributed.own_pace():
        if task.eval_type == "categorical":
            right = categorical(engine, tokenizer, task, conversations, rows, advance) if mine else []
            found = {"right": np.array(right, np.int8).reshape(len(mine), 1)}
        else:
            seeds = [SEED + i for i in mine]
            found = generative(engine, tokenizer, task, conversations, rows, sampling, seeds, advance)
    found = {name: gather_shares(values, count) for name, values in found.items()}
    return task_figures(task, found), found["right"]


def task_size(task: Task, max_examples: int) -> int:
    count = min(max_examples, len(task)) if max_examples > 0 else len(task)
    if count == 0:
        raise UserError(f"{task.name} holds no conversations: nothing to evaluate")
    return count


def task_figures(task: Task, found: dict[str, np.ndarray]) -> dict:
    """The figures from right or wrong (Q, samples) of all questions, and of open ones what `generative` tells."""
    right, count = found["right"], len(found["right"])
    samples = right.shape[1]
    correct = int((right > 0).any(axis=1).sum())
    accuracy, interval = correct / count, wilson(correct, count)
    figures = {
        "accuracy": accuracy,
        "interval": list(interval),
        "baseline": task.baseline,
        "centered": centered(accuracy, task.baseline),
        "centered_interval": list(centered_interval(interval, task.baseline)),
        "examples": count,
        "stderr": math.sqrt(accuracy * (1 - accuracy) / count),
        "ended_share": float(found["ended"].mean()) if "ended" in found else None,
        "unparsed": int((found["read"] == 0).sum()) if "read" in found else None,
        "samples": samples,
        "truncated_share": float(found["cut"].mean()) if "cut" in found else 0.0,
        "type": task.eval_type,
    }
    if samples > 1:
        figures |= {"pass_at_k": pass_at_k(right), "pass_at_k_unbiased": unbiased_pass_at_k(right)}
    return figures


def identity(task: Task, max_examples: int) -> str:
    """A hash of the questions that are asked: results of equal ones can be paired."""
    asked = [task[i] for i in range(task_size(task, max_examples))]
    text = json.dumps([task.name, task.eval_type, asked], sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def evaluate_chat(
    engine: Engine,
    tokenizer: Tokenizer,
    tasks: dict[str, Task],
    *,
    max_per_task: int = -1,
    rows: int = 32,
    max_new_tokens: int = 512,
    sampling: Sampling | None = None,
    complete: bool = True,
    results: Results | None = None,
    title: str = "chat",
) -> dict:
    """Every task on the engine's model: {"chatcore": mean centred accuracy, "chatcore_categorical": of those with
    offered answers, both with their intervals, "tasks": {name: figures}}.

    ChatCORE is None when `tasks` are not all of them (`complete`). Each process answers its share, all get the same
    result. Tasks that `results` holds already are not asked again.
    """
    results = results or Results(None, "chat", {})
    identities = {name: identity(task, max_per_task) for name, task in tasks.items()}
    found = {name: stored["figures"] for name, stored in results.done(identities).items()}
    left = {name: task for name, task in tasks.items() if name not in found}
    if found and left:
        distributed.say(f"{title}: {len(found)} of {len(tasks)} tasks were done before")
    total = sum(len(own_share(task_size(task, max_per_task))) for task in left.values())
    with Progress(total, title, unit="question") as bar:
        for name, task in left.items():
            figures, right = evaluate_task(
                engine, tokenizer, task, max_per_task, rows, max_new_tokens, sampling=sampling,
                advance=functools.partial(bar.update, task=name),
            )  # fmt: skip
            found[name] = figures
            results.save(name, identities[name], figures, right)
    return chat_summary({name: found[name] for name in tasks}, complete)


def chat_summary(tasks: dict[str, dict], complete: bool = True) -> dict:
    """ChatCORE of all tasks and of those with offered answers, with their intervals."""

    def mean(chosen: list[dict]) -> tuple[float | None, list[float] | None]:
        if not chosen or not complete:
            return None, None
        values = [figures["centered"] for figures in chosen]
        return statistics.mean(values), list(mean_interval(values, [f["centered_interval"] for f in chosen]))

    whole, whole_interval = mean(list(tasks.values()))
    choosing, choosing_interval = mean([f for f in tasks.values() if f["type"] == "categorical"])
    return {
        "chatcore": whole, "chatcore_interval": whole_interval, "chatcore_categorical": choosing,
        "chatcore_categorical_interval": choosing_interval, "tasks": tasks,
    }  # fmt: skip


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
