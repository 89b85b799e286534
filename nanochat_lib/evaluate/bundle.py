"""A CORE bundle: its tasks, and the prompts they make.

The layout is that of the DCLM evaluation bundle that nanochat uses: core.yaml, eval_meta_data.csv and eval_data/.
Prompts are rendered, and shots are drawn, as in nanochat.
"""

from __future__ import annotations

import csv
import hashlib
import json
import random
from dataclasses import dataclass
from pathlib import Path

import yaml

from nanochat_lib.errors import UserError

SHUFFLE_SEED = 1337  # order of a task's examples
SHOTS_SEED = 1234  # plus the example's index: which examples it gets as shots


@dataclass(frozen=True)
class CoreTask:
    """One task of a bundle. `baseline` is the score of guessing, in percent."""

    label: str
    kind: str  # multiple_choice, schema, language_modeling
    shots: int
    delimiter: str
    baseline: float
    examples: list[dict]

    def first(self, count: int) -> list[dict]:
        """The examples of a run that is limited to `count` (-1 or 0: all)."""
        return self.examples[:count] if count > 0 else self.examples

    def identity(self, count: int) -> str:
        """A hash of all that decides which questions `first(count)` asks: results of equal ones can be paired."""
        content = [self.label, self.kind, self.shots, self.delimiter, self.baseline, self.first(count)]
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def load_bundle(folder: Path) -> list[CoreTask]:
    """Reads every task of the bundle at `folder`. Raises UserError naming the file and what it lacks."""
    folder = Path(folder)
    try:
        listing = yaml.safe_load((folder / "core.yaml").read_text(encoding="utf-8"))["icl_tasks"]
        with open(folder / "eval_meta_data.csv", encoding="utf-8", newline="") as rows:
            baselines = {row["Eval Task"]: float(row["Random baseline"]) for row in csv.DictReader(rows)}
    except (FileNotFoundError, NotADirectoryError) as e:
        raise UserError(f"{e.filename} is missing; a CORE bundle holds core.yaml and eval_meta_data.csv") from None
    except OSError as e:
        raise UserError(f"{e.filename} cannot be read ({e.strerror}); fetch the bundle again") from None
    except (KeyError, TypeError, ValueError, RecursionError, csv.Error, yaml.YAMLError) as e:
        said = " ".join(f"{type(e).__name__}: {e}".split())[:200]
        raise UserError(
            f"{folder}: core.yaml or eval_meta_data.csv is broken ({said}); fetch the bundle again"
        ) from None
    if not isinstance(listing, list) or not listing:
        raise UserError(f"{folder}: core.yaml lists no tasks under icl_tasks; fetch the bundle again")
    return [_read_task(folder, entry, baselines) for entry in listing]


FIELDS = {
    "multiple_choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "language_modeling": ("context", "continuation"),
}
OFFERED = {"multiple_choice": "choices", "schema": "context_options"}


def _read_task(folder: Path, entry: dict, baselines: dict[str, float]) -> CoreTask:
    try:
        label, kind = str(entry["label"]), str(entry["icl_task_type"])
        path, shots = folder / "eval_data" / entry["dataset_uri"], int(entry["num_fewshot"][0])
        if shots < 0:
            raise ValueError(f"num_fewshot {shots} is negative")
        delimiter = entry.get("continuation_delimiter", " ")
        if not isinstance(delimiter, str):
            raise TypeError(f"continuation_delimiter {delimiter!r} is no text")
    except (AttributeError, KeyError, TypeError, ValueError, IndexError, OverflowError) as e:
        raise UserError(f"{folder}: core.yaml has a broken entry, {str(entry)[:80]!r} ({e!r})") from None
    if kind not in FIELDS:
        raise UserError(f"core.yaml: task {label} has type {kind!r}; known: {', '.join(FIELDS)}")
    if label not in baselines:
        raise UserError(f"eval_meta_data.csv has no row for task {label}")
    if not 0 <= baselines[label] < 100:
        raise UserError(f"eval_meta_data.csv: task {label} has the baseline {baselines[label]:g}, must be 0 … 100 %")
    if not path.is_file():
        raise UserError(f"{path} is missing: task {label} cannot be scored")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as e:
        raise UserError(f"{path} is not UTF-8 (byte {e.start:,}); fetch the bundle again") from None
    examples = []
    # Not splitlines(): it also cuts at characters that may stand inside a JSON string, such as U+2028.
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            example = json.loads(line)
            if not isinstance(example, dict):
                raise UserError(f"{path}, line {number}: must be a JSON object")
            missing = [name for name in FIELDS[kind] if name not in example]
        except json.JSONDecodeError as e:
            raise UserError(f"{path}, line {number}: not JSON ({e.msg})") from None
        if missing:
            raise UserError(f"{path}, line {number}: lacks {', '.join(missing)}")
        if kind in OFFERED and not (isinstance(example["gold"], int) and isinstance(example[OFFERED[kind]], list)):
            raise UserError(f"{path}, line {number}: gold must be a whole number and {OFFERED[kind]} a list")
        if kind in OFFERED and not 0 <= example["gold"] < len(example[OFFERED[kind]]):
            offered = len(example[OFFERED[kind]])
            raise UserError(f"{path}, line {number}: gold is {example['gold']}, there are {offered} {OFFERED[kind]}")
        examples.append(example)
    if not examples:
        raise UserError(f"{path} holds no examples: task {label} cannot be scored")
    random.Random(SHUFFLE_SEED).shuffle(examples)
    return CoreTask(label, kind, shots, delimiter, baselines[label], examples)


def shots_for(index: int, count: int, shots: int) -> list[int]:
    """Indices of the examples shown before example `index`, drawn without it from `count` examples."""
    # The draw only sees how many candidates there are: place p of the list without `index` is p, or p + 1 from it on.
    drawn = random.Random(SHOTS_SEED + index).sample(range(count - 1), min(shots, count - 1))
    return [place + (place >= index) for place in drawn]


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


def candidates(task: CoreTask, examples: list[dict]) -> int:
    """The most prompts that one example is scored on."""
    return max((len(example[OFFERED[task.kind]]) for example in examples), default=1) if task.kind in OFFERED else 1
