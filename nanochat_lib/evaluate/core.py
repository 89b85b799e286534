"""The CORE method: few-shot prompts, answers chosen by the model's own likelihood, scores centred on chance.

Reads any bundle in the layout of the DCLM evaluation bundle that nanochat uses: core.yaml, eval_meta_data.csv and
eval_data/. Source of the metric: DataComp-LM (arXiv:2406.11794). Prompts are rendered, sampled and scored as in
nanochat; here all prompts of a task are batched by length, so that a handful of shapes is compiled.
"""

from __future__ import annotations

import csv
import functools
import json
import random
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import yaml

from nanochat_lib import gpt
from nanochat_lib.errors import UserError
from nanochat_lib.losses import token_nll
from nanochat_lib.progress import Progress
from nanochat_lib.runtime import check_preempted
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.tokenizer import Tokenizer

SHUFFLE_SEED = 1337  # order of a task's examples
SHOTS_SEED = 1234  # plus the example's index: which examples it gets as shots
BUCKET = 32  # prompts are padded to a multiple of this
ROTARY_FACTOR = 10  # the rotary table reaches this many training contexts


@dataclass(frozen=True)
class CoreTask:
    """One task of a bundle. `baseline` is the score of guessing, in percent."""

    label: str
    kind: str  # multiple_choice, schema, language_modeling
    shots: int
    delimiter: str
    baseline: float
    examples: list[dict]


def load_bundle(folder: Path) -> list[CoreTask]:
    """Reads every task of the bundle at `folder`. Raises UserError naming the file and what it lacks."""
    folder = Path(folder)
    try:
        listing = yaml.safe_load((folder / "core.yaml").read_text(encoding="utf-8"))["icl_tasks"]
        with open(folder / "eval_meta_data.csv", encoding="utf-8", newline="") as rows:
            baselines = {row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(rows)}
    except FileNotFoundError as e:
        raise UserError(f"{e.filename} is missing; a CORE bundle holds core.yaml and eval_meta_data.csv") from None
    except (KeyError, TypeError, ValueError, yaml.YAMLError) as e:
        raise UserError(
            f"{folder}: core.yaml or eval_meta_data.csv is broken ({e!r}); fetch the bundle again"
        ) from None
    return [_read_task(folder, entry, baselines) for entry in listing]


FIELDS = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}


def _read_task(folder: Path, entry: dict, baselines: dict[str, float]) -> CoreTask:
    label, kind = entry["label"], entry["icl_task_type"]
    if kind not in FIELDS:
        raise UserError(f"core.yaml: task {label} has type {kind!r}; known: {', '.join(FIELDS)}")
    if label not in baselines:
        raise UserError(f"eval_meta_data.csv has no row for task {label}")
    path = folder / "eval_data" / entry["dataset_uri"]
    if not path.exists():
        raise UserError(f"{path} is missing: task {label} cannot be scored")
    examples = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
            missing = [name for name in FIELDS[kind] if name not in example]
        except json.JSONDecodeError as e:
            raise UserError(f"{path}, line {number}: not JSON ({e.msg})") from None
        if missing:
            raise UserError(f"{path}, line {number}: lacks {', '.join(missing)}")
        examples.append(example)
    if not examples:
        raise UserError(f"{path} holds no examples: task {label} cannot be scored")
    random.Random(SHUFFLE_SEED).shuffle(examples)
    shots = entry["num_fewshot"][0]
    return CoreTask(label, kind, shots, entry.get("continuation_delimiter", " "), baselines[label], examples)


def shots_for(index: int, count: int, shots: int) -> list[int]:
    """Indices of the examples shown before example `index`, drawn without it from `count` examples."""
    others = [i for i in range(count) if i != index]
    return random.Random(SHOTS_SEED + index).sample(others, min(shots, len(others)))


def render_prompts(task: CoreTask, examples: list[dict], index: int) -> list[str]:
    """The texts that are scored for one example: one per choice, one per context, or without/with the continuation."""
    example, delta = examples[index], task.delimiter
    shots = [examples[i] for i in shots_for(index, len(examples), task.shots)]
    if task.kind == "multiple_choice":
        head = "".join(f"{s['query']}{delta}{s['choices'][s['gold']]}\n\n" for s in shots)
        return [f"{head}{example['query']}{delta}{choice}" for choice in example["choices"]]
    if task.kind == "schema":
        head = "".join(f"{s['context_options'][s['gold']]}{delta}{s['continuation']}\n\n" for s in shots)
        return [f"{head}{context}{delta}{example['continuation']}" for context in example["context_options"]]
    head = "".join(f"{s['context'].strip()}{delta}{s['continuation']}\n\n" for s in shots)
    without = f"{head}{example['context'].strip()}{delta}"
    return [without.strip(), without + example["continuation"]]


def common_prefix(rows: list[list[int]]) -> int:
    """How many leading ids all rows share."""
    count = 0
    for column in zip(*rows, strict=False):
        if len(set(column)) > 1:
            break
        count += 1
    return count


@dataclass
class Span:
    """Ids of one prompt and the part [start, end) that is scored; `cut` ids were dropped from its front."""

    ids: list[int]
    start: int
    end: int
    cut: int = 0
    length: int = 0  # before cutting


def spans(task: CoreTask, texts: list[str], tokenizer: Tokenizer, context: int) -> list[Span]:
    """Token spans to score for one example's prompts, the front cut away beyond `context` ids."""
    rows = [tokenizer.encode(text, prepend=tokenizer.bos_id) for text in texts]
    if task.kind == "multiple_choice":
        # A choice that is the prefix of another would leave nothing to score: keep at least its last token.
        start = min(common_prefix(rows), min(len(row) for row in rows) - 1)
        found = [Span(row, start, len(row)) for row in rows]
    elif task.kind == "schema":
        suffix = max(common_prefix([row[::-1] for row in rows]), 1)
        found = [Span(row, len(row) - suffix, len(row)) for row in rows]
    else:
        # Where the continuation merges with the prompt's last token, the scored span starts where the ids part.
        found = [Span(rows[1], min(common_prefix(rows), len(rows[1]) - 1), len(rows[1]))]
    for span in found:
        span.length = len(span.ids)
        span.cut = max(0, span.length - context)
        span.ids = span.ids[span.cut :]
        span.start, span.end = max(span.start - span.cut, 1), span.end - span.cut
    return found


@functools.lru_cache(maxsize=4)
def scorer_for(config: GPTConfig, dtype: jnp.dtype) -> Callable:
    """Compiled (params, ids (R, T), start (R,), end (R,)) -> (mean nll (R,), exact (R,)) over targets [start, end)."""

    @jax.jit
    def score(params, ids, start, end):
        logits = gpt.apply(config, params, ids, dtype=dtype)
        targets = jnp.roll(ids, -1, axis=1)
        place = jnp.arange(ids.shape[1])
        inside = (place >= start[:, None] - 1) & (place < end[:, None] - 1)
        nll = token_nll(logits, targets)
        mean = jnp.sum(nll * inside, axis=1) / jnp.maximum(jnp.sum(inside, axis=1), 1)
        exact = jnp.all((jnp.argmax(logits, axis=-1) == targets) | ~inside, axis=1)
        return mean, exact

    return score


def score_spans(
    scorer: Callable, params: dict, items: list[Span], pad_id: int, rows: int, advance: Callable[[int], None]
) -> tuple[np.ndarray, np.ndarray]:
    """(mean nll, exact match) of every span, computed in batches of `rows` prompts of similar length."""
    nll, exact = np.zeros(len(items)), np.zeros(len(items), bool)
    order = sorted(range(len(items)), key=lambda i: len(items[i].ids))
    for first in range(0, len(order), rows):
        check_preempted()
        chosen = order[first : first + rows]
        longest = max(len(items[i].ids) for i in chosen)
        ids = np.full((rows, BUCKET * -(-longest // BUCKET)), pad_id, np.int32)
        bounds = np.ones((rows, 2), np.int32)
        for row, i in enumerate(chosen):
            ids[row, : len(items[i].ids)] = items[i].ids
            bounds[row] = items[i].start, items[i].end
        out = jax.device_get(scorer(params, ids, bounds[:, 0], bounds[:, 1]))
        nll[chosen], exact[chosen] = out[0][: len(chosen)], out[1][: len(chosen)]
        advance(len(chosen))
    return nll, exact


def evaluate_task(
    task: CoreTask,
    scorer: Callable,
    params: dict,
    tokenizer: Tokenizer,
    context: int,
    training_context: int,
    max_examples: int,
    rows: int,
    advance: Callable[[int], None],
) -> dict:
    """Accuracy, centred score and prompt lengths of one task."""
    examples = task.examples[:max_examples] if max_examples > 0 else task.examples
    groups = [spans(task, render_prompts(task, examples, i), tokenizer, context) for i in range(len(examples))]
    items = [span for group in groups for span in group]
    nll, exact = score_spans(scorer, params, items, tokenizer.bos_id, rows, advance)
    correct, place = 0, 0
    for example, group in zip(examples, groups, strict=True):
        if task.kind == "language_modeling":
            correct += bool(exact[place])
        else:
            correct += int(np.argmin(nll[place : place + len(group)])) == example["gold"]
        place += len(group)
    accuracy, guess = correct / len(examples), task.baseline / 100
    lengths = [span.length for span in items]
    return {
        "accuracy": accuracy,
        "centered": (accuracy - guess) / (1 - guess),
        "baseline": guess,
        "examples": len(examples),
        "shots": task.shots,
        "type": task.kind,
        "median_prompt_tokens": statistics.median(lengths),
        "truncated_share": sum(span.cut > 0 for span in items) / len(items),
        "beyond_training_context_share": sum(n > training_context for n in lengths) / len(lengths),
    }


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
    title: str = "core",
) -> dict:
    """Scores `params` on every task of `bundle`: {"core": mean centred score, "core_tasks": {label: figures}}.

    `context` is the longest prompt in tokens; longer ones lose their front, and the share of such prompts is in each
    task's `truncated_share`. The default is what the rotary table holds, ten times the training context.
    """
    tasks = load_bundle(bundle)
    context = min(context or ROTARY_FACTOR * config.sequence_len, ROTARY_FACTOR * config.sequence_len)
    if context < 2:
        raise UserError(f"core: context {context} is too short, a prompt needs at least 2 tokens")
    scorer = scorer_for(config, jnp.dtype(dtype))
    results = {}
    with Progress(len(tasks), title, unit="task") as bar:
        for task in tasks:
            results[task.label] = evaluate_task(
                task,
                scorer,
                params,
                tokenizer,
                context,
                config.sequence_len,
                max_per_task,
                rows,
                lambda n: bar.update(0),
            )
            bar.update(1, last=f"{task.label} {results[task.label]['accuracy']:.0%}")
    return {"core": statistics.mean(r["centered"] for r in results.values()), "core_tasks": results}
