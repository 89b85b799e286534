"""Reinforcement learning on a task with a checkable answer: sample, reward, compare within the group, step.

A simplified GRPO that comes close to REINFORCE with the group's mean as baseline, as in nanochat: on-policy, no
reference model, no ratio clipping, advantages not divided by their deviation, the loss normalised over tokens
(DAPO, arXiv:2503.14476). Unlike nanochat, the end token that the model sampled is trained too.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from nanochat_lib import distributed, guards, optim, schedules
from nanochat_lib.checkpoint import load_model
from nanochat_lib.conversation import render_for_completion
from nanochat_lib.engine import Engine
from nanochat_lib.errors import UserError
from nanochat_lib.gpt import param_shapes
from nanochat_lib.metrics import MetricsLog, first_and_last
from nanochat_lib.plan import compute_here
from nanochat_lib.presets import OptimConfig, RLConfig, RunConfig
from nanochat_lib.price import price_here
from nanochat_lib.sharding import check_parameters, replicate
from nanochat_lib.tasks.common import Task
from nanochat_lib.tokenizer import Tokenizer
from nanochat_lib.train_step import TrainState, init_train_state, make_train_step
from nanochat_lib.trainer import Stage, StepBatch, open_mesh, train

PAD_LENGTH = 16  # rollouts are padded to a multiple of this, so that few shapes compile
EVAL_SEED = 42


def advantages(rewards: np.ndarray) -> np.ndarray:
    """Rewards (Q, S) of S answers to each of Q questions -> how much better each is than its question's mean."""
    return rewards - rewards.mean(axis=1, keepdims=True)


def rl_rates(stage: RLConfig) -> OptimConfig:
    """The stage's own learning rates in the optimiser's form; no decay."""
    names = ("embedding_lr", "unembedding_lr", "matrix_lr", "scalar_lr", "smear_lr")
    return OptimConfig(**{name: getattr(stage, name) for name in names}, weight_decay=0.0, transfer=False)


def rollout(
    engine: Engine,
    tokenizer: Tokenizer,
    task: Task,
    questions: list[int],
    samples: int,
    stage: RLConfig,
    seed: int | list[int],
    temperature: float | None = None,
) -> tuple[list[list[int]], list[list[int]], np.ndarray]:
    """Samples answers: (sequences, masks, rewards (Q, S)). Sequences hold prompt, answer and end token.

    With a seed for each question its answers depend on nothing else: not on which questions a process samples.
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
    )
    rewards = np.zeros((len(questions), samples), np.float32)
    for row, ids in enumerate(out.sequences):
        question = row // samples
        answer = tokenizer.decode(ids[len(prompts[question]) :])
        rewards[question, row % samples] = task.reward(conversations[question], answer)
    return out.sequences, out.masks, rewards


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


def pass_at_k(rewards: np.ndarray) -> list[float]:
    """Share of questions with a right answer among the first k samples, k = 1 … S, from rewards (Q, S)."""
    right = np.maximum.accumulate(rewards > 0, axis=1)
    return [float(share) for share in right.mean(axis=0)]


def held_out_reward(engine: Engine, tokenizer: Tokenizer, task: Task, stage: RLConfig) -> dict:
    """Mean reward and pass@k on held-out questions, sampled as in training, and the greedy answer's reward."""
    questions = list(range(min(stage.eval_questions, len(task))))
    *_, sampled = rollout(engine, tokenizer, task, questions, stage.eval_samples, stage, EVAL_SEED)
    *_, greedy = rollout(engine, tokenizer, task, questions, 1, stage, EVAL_SEED, temperature=0.0)
    return {
        "reward_heldout": float(sampled.mean()),
        "reward_greedy": float(greedy.mean()),
        "pass_at_k": pass_at_k(sampled),
    }


def question_order(count: int, seed: int, step: int, per_step: int) -> list[int]:
    """The questions of a step: the training set in a fresh shuffle each epoch, the same for a given seed and step."""
    chosen = []
    for position in range(step * per_step, (step + 1) * per_step):
        epoch, index = divmod(position, count)
        chosen.append(int(np.random.default_rng((seed, epoch)).permutation(count)[index]))
    return chosen


def rl(
    config: RunConfig,
    tokenizer: Tokenizer,
    task: Task,
    held_out: Task,
    sft_folder: Path,
    folder: Path,
    metrics: MetricsLog,
) -> dict:
    """Improves the newest SFT model on `task` by its own samples, checkpoints in `folder`; returns the figures.

    `held_out` shares no question with `task`. Everything a step draws follows from (seed, step), so a resumed run
    repeats what an uninterrupted one does.
    """
    stage = config.rl
    mesh = open_mesh(config, tokenizer)
    model, params, sft_step = load_model(sft_folder, tokenizer)
    check_parameters(mesh, param_shapes(model))
    compute = compute_here(config.compute, model, mesh, config.pretrain.device_rows)
    dtype = compute.dtype
    per_step, samples = min(stage.questions_per_step, len(task)), stage.samples
    rank, world = distributed.index(), distributed.count()
    if per_step % world:
        raise UserError(
            f"rl.questions_per_step {per_step} does not divide over {world} processes; "
            f"use {per_step // world * world or world} or {(per_step // world + 1) * world}"
        )
    steps = stage.steps if stage.steps > 0 else max(len(task) // per_step, 1)
    optimizer = optim.make_optimizer(model, rl_rates(stage), dtype, mesh=mesh)
    engine = Engine(model, params, tokenizer, dtype=dtype)
    longest = max(len(render_for_completion(tokenizer, task[i])) for i in range(len(task)))
    length = PAD_LENGTH * math.ceil((longest + stage.max_new_tokens) / PAD_LENGTH)
    if longest + stage.max_new_tokens > model.sequence_len:
        raise UserError(
            f"rl: the longest prompt ({longest} tokens) and rl.max_new_tokens {stage.max_new_tokens} exceed the "
            f"context of {model.sequence_len}; lower rl.max_new_tokens to {max(model.sequence_len - longest, 0)}"
        )
    devices = len(mesh.local_devices) if mesh else 1
    own = per_step // world
    micro_rows = devices * min(math.ceil(own * samples / devices), config.pretrain.device_rows)
    state = init_train_state(model, optimizer, params, mesh=mesh, masters=config.compute.masters)

    def batches(_loader_state: dict | None, present: Callable[[], TrainState]) -> Iterator[StepBatch]:
        while True:
            state = present()
            step = int(state.step)
            engine.params = replicate(state.params, dtype)
            # Each process samples answers to its own questions; what is compared is within a question.
            part = slice(rank * own, (rank + 1) * own)
            questions = question_order(len(task), config.seed, step, per_step)[part]
            seeds = np.random.default_rng((config.seed, step)).integers(2**31, size=per_step)[part].tolist()
            with distributed.own_pace():
                sequences, masks, rewards = rollout(engine, tokenizer, task, questions, samples, stage, seeds)
            arrays = to_batch(sequences, masks, advantages(rewards), length, tokenizer.bos_id, micro_rows)
            rewards = distributed.gather(rewards)
            collapsed = float(np.mean(rewards.max(axis=1) == rewards.min(axis=1)))
            epoch = 1 + step * per_step // len(task)
            log = {"reward": float(rewards.mean()), "collapsed": collapsed}
            yield StepBatch(arrays, epoch, log=log)

    def evaluate(_step: int, state: TrainState) -> dict:
        engine.params = replicate(state.params, dtype)
        with distributed.own_pace():
            return held_out_reward(engine, tokenizer, held_out, stage)

    train(
        Stage.of(
            stage, model, tokenizer, {"sft_step": sft_step},
            name="rl", folder=folder, durable=config.ops.durable,
            steps=steps, metrics=metrics, mesh=mesh, batches=batches, evaluate=evaluate,
            step_fn=make_train_step(model, optimizer, compute=compute, mesh=mesh),
            hyper=lambda step, _batch: schedules.rl_schedule(step, steps, stage),
            usd_hour=price_here(config.ops), guard_steps=config.ops.guard_steps, own_samples=True,
            first_loss=guards.not_worse_than(model.vocab_size),
        ),
        state,
    )  # fmt: skip
    figures = first_and_last(metrics, "rl", ["reward_heldout", "reward_greedy", "pass_at_k"])
    records = distributed.from_first(lambda: metrics.read("rl"))
    collapsed = [r["collapsed"] for r in records if "collapsed" in r]
    return figures | {
        "task": stage.task,
        "steps": steps,
        "questions": per_step * steps,
        "reward_first": figures["reward_heldout_first"],
        "reward_last": figures["reward_heldout_last"],
        "collapsed_share": float(np.mean(collapsed)) if collapsed else None,
    }
