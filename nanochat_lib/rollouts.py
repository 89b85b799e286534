"""Answers of a model to questions of a task, rewarded, and made into the batch of a training step."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from nanochat_lib.conversation import render_for_completion
from nanochat_lib.engine import Engine
from nanochat_lib.presets import RLConfig
from nanochat_lib.rewards import Reward
from nanochat_lib.tasks.common import Task
from nanochat_lib.tokenizer import Tokenizer


def question_order(count: int, seed: int, step: int, per_step: int) -> list[int]:
    """The questions of a step: the training set in a fresh shuffle each epoch, the same for a given seed and step."""
    chosen = []
    for position in range(step * per_step, (step + 1) * per_step):
        epoch, index = divmod(position, count)
        chosen.append(int(np.random.default_rng((seed, epoch)).permutation(count)[index]))
    return chosen


def advantages(rewards: np.ndarray) -> np.ndarray:
    """Rewards (Q, S) of S answers to each of Q questions -> how much better each is than its question's mean."""
    return rewards - rewards.mean(axis=1, keepdims=True)


def collapsed(rewards: np.ndarray) -> float:
    """Share of the questions (Q, S) whose S answers all got the same reward: they teach nothing."""
    return float(np.mean(rewards.max(axis=1) == rewards.min(axis=1)))


@dataclass(frozen=True)
class Rollout:
    """Answers to Q questions, S each, a question's next to each other. Unpacks as (sequences, masks, rewards)."""

    sequences: list[list[int]]  # prompt, answer and end token
    masks: list[list[int]]  # 1 for a token the model sampled
    logprobs: list[list[float]]  # of these, as the sampler computed them, before temperature and top-k
    rewards: np.ndarray  # (Q, S) float32
    correct: np.ndarray  # (Q, S) bool: whether the answer is right, whatever is rewarded
    ended: np.ndarray  # (Q, S) bool: whether the model ended it, before the limit
    lengths: np.ndarray  # (Q, S) int32: tokens of the answer, tool results and the end token included

    def __iter__(self) -> Iterator:
        return iter((self.sequences, self.masks, self.rewards))


def rollout(
    engine: Engine,
    tokenizer: Tokenizer,
    task: Task,
    questions: list[int],
    samples: int,
    stage: RLConfig,
    seed: int | list[int],
    temperature: float | None = None,
    reward: Reward | None = None,
) -> Rollout:
    """Samples answers and rewards them by `reward`, by default the task's own; at most `stage.rollout_rows` at a time.

    With a seed for each question its answers depend on nothing else: not on which questions a process samples, nor on
    how many at a time.
    """
    conversations = [task[i] for i in questions]
    prompts = [render_for_completion(tokenizer, c) for c in conversations]
    out = engine.generate_batch(
        prompts,
        num_samples=samples,
        max_tokens=stage.max_new_tokens,
        temperature=stage.temperature if temperature is None else temperature,
        top_k=stage.top_k,
        seed=seed,
        include_end=True,
        logprobs=True,
        batch_rows=stage.rollout_rows,
    )
    reward = reward or task.reward
    shape = (len(questions), samples)
    rewards, correct, lengths = (np.zeros(shape, dtype) for dtype in (np.float32, bool, np.int32))
    ended = np.array([reason == "end" for reason in out.finished]).reshape(shape)
    for row, ids in enumerate(out.sequences):
        place = divmod(row, samples)
        conversation, prompt = conversations[place[0]], prompts[place[0]]
        lengths[place] = len(ids) - len(prompt)
        answer = tokenizer.decode(ids[len(prompt) : len(ids) - ended[place]])  # the end token is no part of the text
        rewards[place] = reward(conversation, answer)
        correct[place] = task.evaluate(conversation, answer) > 0
    return Rollout(out.sequences, out.masks, out.logprobs, rewards, correct, ended, lengths)


def to_batch(
    sequences: list[list[int]], masks: list[list[int]], weights: np.ndarray, length: int, pad_id: int, micro_rows: int
) -> dict[str, np.ndarray]:
    """Arrays (A, B, T) of a step: every sampled token is a target weighted by its row's advantage.

    Prompt, tool output and padding are not targets. Rows are padded to whole micro-batches of `micro_rows`.
    """
    rows = micro_rows * math.ceil(len(sequences) / micro_rows)
    ids = np.full((rows, length + 1), pad_id, np.int32)
    sampled = np.zeros((rows, length + 1), bool)
    for row, (sequence, mask) in enumerate(zip(sequences, masks, strict=True)):
        ids[row, : len(sequence)] = sequence
        sampled[row, : len(mask)] = mask
    per_token = np.zeros((rows, length), np.float32)
    per_token[: len(sequences)] = weights.reshape(-1, 1)
    shape = (-1, micro_rows, length)
    return {
        "inputs": ids[:, :-1].reshape(shape).copy(),
        "targets": np.where(sampled[:, 1:], ids[:, 1:], -1).astype(np.int32).reshape(shape),
        "weights": per_token.reshape(shape),
    }


def aligned(rows: list[list[float]], like: np.ndarray) -> np.ndarray:
    """Numbers of each token of the sequences as an array (A, B, T) over the targets of a step like `like`."""
    out = np.zeros((like.shape[0] * like.shape[1], like.shape[2]), np.float32)
    for row, values in zip(out, rows, strict=False):  # rows past the last sequence only fill up a micro-batch
        row[: len(values) - 1] = values[1:]
    return out.reshape(like.shape)
