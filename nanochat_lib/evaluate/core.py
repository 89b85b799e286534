"""The CORE method: few-shot prompts, answers chosen by the model's own likelihood, scores centred on chance.

Source of the metric: DataComp-LM (arXiv:2406.11794). Prompts are rendered, sampled and scored as in nanochat
(`bundle`, `spans`); they are computed many at a time, each process its share (`scorer`, `results`).
"""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from nanochat_lib import distributed
from nanochat_lib.errors import UserError
from nanochat_lib.evaluate.bundle import (
    SHOTS_SEED,
    SHUFFLE_SEED,
    CoreTask,
    candidates,
    load_bundle,
    render_prompts,
    shots_for,
)
from nanochat_lib.evaluate.results import Results, gather_shares, own_share
from nanochat_lib.evaluate.scorer import Scorer, scorer_for
from nanochat_lib.evaluate.scores import centered, centered_interval, mean_interval, wilson
from nanochat_lib.evaluate.spans import Span, common_prefix, length_figures, length_warning, spans, spans_of
from nanochat_lib.progress import Progress
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.storage import atomic_write_text
from nanochat_lib.tokenizer import Tokenizer

__all__ = [
    "SHOTS_SEED", "SHUFFLE_SEED", "CoreTask", "Span", "common_prefix", "evaluate_core", "load_bundle", "render_prompts",
    "score_spans", "scorer_for", "shots_for", "spans", "write_csv",
]  # fmt: skip

ROTARY_FACTOR = 10  # prompts may be this many training contexts long
BLOCK = 2048  # examples whose prompts are in memory at a time


def score_spans(
    scorer: Scorer, params: dict, items: list[Span], pad_id: int, advance: Callable[[int], None] = lambda spans: None
) -> tuple[np.ndarray, np.ndarray]:
    """(mean nll, exact match) of every span; `params` as scorer.place left them. `advance(n)`: n spans are done."""
    return scorer(params, items, pad_id, advance)


def encode_block(
    task: CoreTask, examples: list[dict], block: list[int], tokenizer: Tokenizer
) -> list[list[np.ndarray]]:
    """The encoded prompts of the examples in `block`, a list each. One call: the tokenizer works in several threads."""
    texts = [render_prompts(task, examples, i) for i in block]
    rows = iter(tokenizer.encode_arrays([text for group in texts for text in group], prepend=tokenizer.bos_id))
    return [[next(rows) for _ in group] for group in texts]


def whole_units(advance: Callable[[int], None], parts: int, units: int) -> Callable[[int], None]:
    """Of something that counts `parts`, something that counts the `units` they make up, in whole ones."""
    done = 0

    def count(more: int) -> None:
        nonlocal done
        done += more
        advance(done * units // parts - (done - more) * units // parts)

    return count


def answer_examples(
    task: CoreTask,
    examples: list[dict],
    mine: list[int],
    scorer: Scorer,
    params: dict,
    tokenizer: Tokenizer,
    context: int,
    advance: Callable[[int], None],
) -> tuple[np.ndarray, np.ndarray]:
    """Of the examples in `mine`: right (n,), 1 or 0, -1 where an answer is longer than the context and nothing can be
    scored; and the lengths of their prompts in tokens (n, prompts of an example), -1 where an example has fewer."""
    right = np.full(len(mine), -1, np.int8)
    lengths = np.full((len(mine), candidates(task, examples)), -1, np.int32)
    for first in range(0, len(mine), BLOCK):
        block = mine[first : first + BLOCK]
        groups = [spans_of(task.kind, rows, context) for rows in encode_block(task, examples, block, tokenizer)]
        for place, group in enumerate(groups, first):
            lengths[place, : len(group)] = [span.length for span in group]
        whole = [place for place, group in enumerate(groups) if all(span.fits for span in group)]
        items = [span for place in whole for span in groups[place]]
        nll, exact = score_spans(scorer, params, items, tokenizer.bos_id, whole_units(advance, len(items), len(block)))
        at = 0
        for place in whole:
            count = len(groups[place])
            if task.kind == "language_modeling":
                right[first + place] = exact[at]
            else:
                right[first + place] = int(np.argmin(nll[at : at + count])) == examples[block[place]]["gold"]
            at += count
    return right, lengths


def task_figures(
    task: CoreTask, right: np.ndarray, lengths: np.ndarray, context: int, training_context: int
) -> dict:  # fmt: skip
    """The figures of a task from `answer_examples` of all its examples."""
    scored, guess = right >= 0, task.baseline / 100
    count, correct = int(scored.sum()), int((right > 0).sum())
    accuracy = correct / count if count else None
    interval = wilson(correct, count) if count else None
    figures = {
        "accuracy": accuracy,
        "interval": interval and list(interval),
        "centered": centered(accuracy, guess) if count else None,
        "centered_interval": interval and list(centered_interval(interval, guess)),
        "baseline": guess,
        "examples": count,
        "skipped": int((~scored).sum()),
        "shots": task.shots,
        "type": task.kind,
        "context": context,
        **length_figures(lengths[lengths >= 0], context, training_context),
    }
    if not count:
        figures["warning"] = f"no answer fits into the context of {context:,} tokens: nothing was scored"
        return figures
    limit = context if figures["truncated_share"] else training_context
    longer = (lengths > limit).any(axis=1)[scored]
    figures["warning"] = length_warning(figures, right[scored] > 0, longer, context, training_context)
    return figures


def evaluate_core(
    config: GPTConfig,
    params: dict,
    tokenizer: Tokenizer,
    bundle: Path,
    *,
    max_per_task: int = -1,
    rows: int = 32,
    context: int | None = None,
    dtype: jnp.dtype = jnp.float32,
    attention: str = "xla",
    results: Results | None = None,
    title: str = "core",
) -> dict:
    """Scores `params` on every task of `bundle`: {"core": mean centred score, "core_interval", "core_tasks": figures}.

    `context` is the longest prompt in tokens; longer ones lose their front, and the share of such prompts is in each
    task's `truncated_share`. The default is nanochat's: whole prompts, up to ten times the training context. An
    example whose answer alone is longer than the context is left out and counted (`skipped`); a task without any other
    has no score and is left out of the mean. `rows` prompts of the training context are computed at a time on each of
    this process's devices, with the `attention` backend for long ones. All processes call this together, each answers
    its share of the examples, and all get the same result. Tasks that `results` holds already are not computed again.
    """
    tasks = load_bundle(bundle)
    context = min(context or ROTARY_FACTOR * config.sequence_len, ROTARY_FACTOR * config.sequence_len)
    if context < 2:
        raise UserError(f"core: context {context} is too short, a prompt needs at least 2 tokens")
    results = results or Results(None, "core", {})
    identities = {task.label: task.identity(max_per_task) for task in tasks}
    found = {label: stored["figures"] for label, stored in results.done(identities).items()}
    left = [task for task in tasks if task.label not in found]
    if found and left:
        distributed.say(f"{title}: {len(found)} of {len(tasks)} tasks were done before")
    shares = {task.label: own_share(len(task.first(max_per_task))) for task in left}
    scorer = scorer_for(config, jnp.dtype(dtype).name, attention, rows)
    placed = scorer.place(params) if left else params
    with Progress(sum(map(len, shares.values())), title, unit="example") as bar:
        for task in left:
            examples, mine = task.first(max_per_task), shares[task.label]
            advance = functools.partial(bar.update, task=task.label)
            with distributed.own_pace():
                right, lengths = answer_examples(task, examples, mine, scorer, placed, tokenizer, context, advance)
            right, lengths = gather_shares(right, len(examples)), gather_shares(lengths, len(examples))
            figures = task_figures(task, right, lengths, context, config.sequence_len)
            found[task.label] = figures
            results.save(task.label, identities[task.label], figures, right)
    return summary({task.label: found[task.label] for task in tasks})


def summary(tasks: dict[str, dict]) -> dict:
    """CORE, the mean of the tasks' centred scores, with its interval. None when no task has a score."""
    scored = [figures for figures in tasks.values() if figures["centered"] is not None]
    values = [figures["centered"] for figures in scored]
    interval = list(mean_interval(values, [figures["centered_interval"] for figures in scored])) if scored else None
    return {"core": statistics.mean(values) if scored else None, "core_interval": interval, "core_tasks": tasks}


def write_csv(path: Path, out: dict) -> None:
    """The scores as nanochat's table: task, accuracy, centred, and CORE in the last line; blank where there is none."""

    def line(name: str, accuracy: object, score: object) -> str:
        numbers = (f"{x:.6f}" if isinstance(x, float) else x or "" for x in (accuracy, score))
        return f"{name:<35}, " + ", ".join(f"{number:<10}" for number in numbers) + "\n"

    text = line("Task", "Accuracy", "Centered")
    for label, figures in out["core_tasks"].items():
        text += line(label, figures.get("accuracy"), figures.get("centered"))
    path.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(path, text + line("CORE", "", out["core"]))
