"""Reinforcement learning on a task with a checkable answer: sample, reward, compare within the group, step.

A simplified GRPO that comes close to REINFORCE with the group's mean as baseline, as in nanochat: on-policy, no
reference model, no ratio clipping, advantages not divided by their deviation. Unlike in nanochat, the loss is averaged
over all tokens of the step (DAPO, arXiv:2503.14476), not within each pass, the end token that the model sampled is
trained too, the rate of a step in which no answer was better than another is zero, every step compares the
log-probabilities of sampler and trainer, questions come in a new random order each epoch, and held-out questions are
answered greedily as well.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from nanochat_lib import distributed, gpt, guards, optim, rewards, schedules
from nanochat_lib.checkpoint import load_model
from nanochat_lib.conversation import render_for_completion
from nanochat_lib.engine import Engine
from nanochat_lib.errors import UserError
from nanochat_lib.evaluate.results import gather_shares, own_share
from nanochat_lib.evaluate.scores import pass_at_k, unbiased_pass_at_k
from nanochat_lib.gpt import param_shapes
from nanochat_lib.losses import token_nll
from nanochat_lib.metrics import MetricsLog, first_and_last
from nanochat_lib.plan import compute_here
from nanochat_lib.presets import OptimConfig, RLConfig, RunConfig
from nanochat_lib.price import price_here
from nanochat_lib.rewards import Reward
from nanochat_lib.rollouts import advantages, aligned, collapsed, question_order, rollout, to_batch
from nanochat_lib.sharding import check_parameters, global_batch, replicate
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.tasks.common import Task
from nanochat_lib.tokenizer import Tokenizer
from nanochat_lib.train_step import TrainState, init_train_state, make_train_step
from nanochat_lib.trainer import Stage, StepBatch, open_mesh, train

PAD_LENGTH = 16  # rollouts are padded to a multiple of this, so that few shapes compile
EVAL_SEED = 42
MOST_NATS = 20.0  # a log-probability's difference above it counts as this in the importance ratio


def rl_rates(stage: RLConfig) -> OptimConfig:
    """The stage's own learning rates in the optimiser's form; no decay."""
    names = ("embedding_lr", "unembedding_lr", "matrix_lr", "scalar_lr", "smear_lr")
    return OptimConfig(**{name: getattr(stage, name) for name in names}, weight_decay=0.0, transfer=False)


def apart(logprobs: jax.Array, sampled: jax.Array, trained: jax.Array) -> tuple:
    """(Σ|d|, max|d|, Σ exp d, how many) of d = logprobs − sampled at the positions that are `trained`; all (B, T).

    |d| above MOST_NATS counts as MOST_NATS in exp d, so that one token that the sampler should never have drawn does
    not make the sum infinite.
    """
    difference = jnp.where(trained, logprobs - sampled, 0.0)
    ratio = jnp.where(trained, jnp.exp(jnp.clip(difference, -MOST_NATS, MOST_NATS)), 0.0)
    away = jnp.abs(difference)
    return away.sum(), away.max(), ratio.sum(), trained.sum(dtype=jnp.int32)


def make_compare_step(config: GPTConfig, dtype: Any) -> Callable[..., tuple]:
    """The compiled `(params, inputs, targets, sampled) -> (Σ|d|, max|d|, Σ exp d, targets)` of a micro-batch (B, T).

    d is the log-probability of a target by the training forward pass minus `sampled`, what the sampler gave the same
    token. Apart from rounding it is 0: prompt, cache, positions and weights are then the same to both. exp d is the
    importance ratio, which is taken to be 1 where no correction is made.
    """

    def compare(params: dict, inputs: jax.Array, targets: jax.Array, sampled: jax.Array) -> tuple:
        logprobs = -token_nll(gpt.apply(config, params, inputs, dtype=dtype), targets)
        return apart(logprobs, sampled, targets >= 0)

    return jax.jit(compare)


def compared(compare: Callable, params: dict, mesh: Mesh | None, arrays: dict, logprobs: list[list[float]]) -> dict:
    """How far sampler and trainer are apart on the tokens of a step: mean and largest difference, mean ratio.

    All processes call this together, with what each of them has sampled.
    """
    sampled = aligned(logprobs, arrays["targets"])
    total, most, ratio, count = 0.0, 0.0, 0.0, 0
    for part in zip(arrays["inputs"], arrays["targets"], sampled, strict=True):
        if mesh is not None:
            part = global_batch(mesh, dict(zip("its", part, strict=True))).values()
        found = jax.device_get(compare(params, *part))
        total, most = total + float(found[0]), max(most, float(found[1]))
        ratio, count = ratio + float(found[2]), count + int(found[3])
    count = max(count, 1)
    return {"logprob_diff": total / count, "logprob_diff_max": most, "ratio": ratio / count}


def held_out_reward(
    engine: Engine, tokenizer: Tokenizer, task: Task, stage: RLConfig, reward: Reward | None = None
) -> dict:
    """Mean reward and pass@k on held-out questions, sampled as in training, and the greedy answers' reward.

    The processes share the questions; each question has a seed of its own, so their number changes no answer.
    """
    count = min(stage.eval_questions, len(task))
    questions = own_share(count)
    seeds = np.random.default_rng(EVAL_SEED).integers(2**31, size=count)[questions].tolist()
    with distributed.own_pace():
        sampled = rollout(engine, tokenizer, task, questions, stage.eval_samples, stage, seeds, reward=reward)
        greedy = rollout(engine, tokenizer, task, questions, 1, stage, seeds, temperature=0.0, reward=reward)

    def everyones(values: np.ndarray) -> np.ndarray:
        return gather_shares(np.asarray(values, np.float32), count)

    correct = everyones(sampled.correct)
    return {
        "reward_heldout": float(everyones(sampled.rewards).mean()),
        "reward_greedy": float(everyones(greedy.rewards).mean()),
        "pass_at_k": pass_at_k(correct),
        "pass_at_k_unbiased": unbiased_pass_at_k(correct),
        "ended_heldout": float(everyones(sampled.ended).mean()),
    }


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
    reward = rewards.load(stage.reward, task)
    reward_heldout = rewards.load(stage.reward, held_out)
    optimizer = optim.make_optimizer(model, rl_rates(stage), dtype, mesh=mesh)
    compare = make_compare_step(model, dtype)
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
                out = rollout(engine, tokenizer, task, questions, samples, stage, seeds, reward=reward)
            gains = advantages(out.rewards)
            arrays = to_batch(out.sequences, out.masks, gains, length, tokenizer.bos_id, micro_rows)
            log = compared(compare, state.params, mesh, arrays, out.logprobs)
            shares = [out.rewards, out.correct, out.ended, out.lengths]
            every = distributed.gather(np.concatenate(shares, axis=1, dtype=np.float32))
            given, right, ended, lengths = np.split(every, 4, axis=1)
            log |= {
                "correct": float(right.mean()),
                "ended": float(ended.mean()),
                "answer_tokens": float(lengths.mean()),
            }
            shown = {"reward": float(given.mean()), "collapsed": collapsed(given)}
            yield StepBatch(arrays, 1 + step * per_step // len(task), log=shown, quiet=log)

    def hyper(step: int, batch: StepBatch) -> schedules.Hyper:
        found = schedules.rl_schedule(step, steps, stage)
        # All groups collapsed: there is nothing to learn, and what earlier steps left in the momentum must not move.
        return found._replace(lr=0.0) if batch.log["collapsed"] == 1 else found

    def evaluate(_step: int, state: TrainState) -> dict:
        engine.params = replicate(state.params, dtype)
        return held_out_reward(engine, tokenizer, held_out, stage, reward_heldout)

    train(
        Stage.of(
            stage, model, tokenizer, {"sft_step": sft_step},
            name="rl", folder=folder, durable=config.ops.durable,
            steps=steps, metrics=metrics, mesh=mesh, batches=batches, evaluate=evaluate,
            step_fn=make_train_step(model, optimizer, compute=compute, mesh=mesh),
            hyper=hyper,
            usd_hour=price_here(config.ops), guard_steps=config.ops.guard_steps, own_samples=True,
            first_loss=guards.not_worse_than(model.vocab_size),
        ),
        state,
    )  # fmt: skip
    names = ["reward_heldout", "reward_greedy", "pass_at_k", "pass_at_k_unbiased", "ended_heldout"]
    figures = first_and_last(metrics, "rl", names)
    records = [r for r in distributed.from_first(lambda: metrics.read("rl")) if "collapsed" in r]

    def mean(name: str) -> float | None:
        return float(np.mean([r[name] for r in records])) if records else None

    return figures | {
        "task": stage.task,
        "reward": stage.reward,
        "steps": steps,
        "questions": per_step * steps,
        "heldout_questions": len(held_out),
        "reward_first": figures["reward_heldout_first"],
        "reward_last": figures["reward_heldout_last"],
        "answer_tokens_first": records[0].get("answer_tokens") if records else None,
        "answer_tokens_last": records[-1].get("answer_tokens") if records else None,
        "collapsed_share": mean("collapsed"),
        "idle_steps": sum(r["collapsed"] == 1 for r in records),
        "logprob_diff": mean("logprob_diff"),
        "logprob_diff_max": max((r["logprob_diff_max"] for r in records), default=None),
        "ratio": mean("ratio"),
    }
