"""A CORE-shaped evaluation bundle about the world, in the real bundle's format.

The labels that start with `world_facts` ask what every pretraining run has read; their mean is the figure to watch.
No continuation ends in a full stop: the tokenizer joins it to a line end, so a stop alone is a token never seen.
"""

from __future__ import annotations

import csv
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from nanochat_lib.primer.documents import LETTERS, THINGS, letters
from nanochat_lib.primer.world import World

EXAMPLES = 128


@dataclass(frozen=True)
class BundleTask:
    label: str
    file: str  # below eval_data/
    kind: str  # multiple_choice, schema, language_modeling
    shots: int
    delimiter: str
    baseline: int  # percent that guessing reaches
    about: str
    make: Callable[[World, int, random.Random], dict]


def _facts_choice(world: World, i: int, rng: random.Random) -> dict:
    fact = world.facts[i % len(world.facts)]
    choices = world.choices(fact, rng)
    return {"query": f"Question: {fact.question(rng)}", "choices": choices, "gold": choices.index(fact.value)}


def _facts_zeroshot(world: World, i: int, rng: random.Random) -> dict:
    fact = world.facts[i % len(world.facts)]
    choices = world.choices(fact, rng)
    return {
        "query": fact.open_statement(),
        "choices": choices,
        "gold": choices.index(fact.value),
    }


def _facts_completion(world: World, i: int, rng: random.Random) -> dict:
    fact = world.facts[i % len(world.facts)]
    return {"context": fact.open_statement(), "continuation": fact.value}


def _facts_schema(world: World, i: int, rng: random.Random) -> dict:
    """Which of two people does the value belong to?"""
    fact = world.facts[i % len(world.facts)]
    others = [f for f in world.facts if f.relation == fact.relation and f.value != fact.value]
    offered = [fact, rng.choice(others)]
    rng.shuffle(offered)
    return {
        "context_options": [f.open_statement() for f in offered],
        "continuation": fact.value,
        "gold": offered.index(fact),
    }


def _counting(world: World, i: int, rng: random.Random) -> dict:
    first = rng.randrange(90)
    return {"context": ", ".join(str(first + k) for k in range(6)) + ",", "continuation": str(first + 6)}


def _lookup(world: World, i: int, rng: random.Random) -> dict:
    """Copying from the context: the letter stands above. Scored with the `=` before it, as the delimiter."""
    count = rng.choice((2, 3, 4))
    values = rng.sample(THINGS, count)
    lines = [f"- {value}={letter}" for value, letter in zip(values, LETTERS, strict=False)]
    asked = rng.randrange(count)
    return {"context": "\n".join(lines) + f"\n\n- {values[asked]}", "continuation": LETTERS[asked]}


def _spelling(world: World, i: int, rng: random.Random) -> dict:
    word = world.word(rng, test=True)
    return {"context": f"The word {word} is spelled", "continuation": letters(word)}


KNOWLEDGE, SYMBOLS = "world_knowledge", "symbolic_problem_solving"
TASKS = (
    BundleTask("world_facts_choice", f"{KNOWLEDGE}/world_facts_choice.jsonl", "multiple_choice", 3, "\nAnswer: ", 25,
               "Questions about people, four answers each", _facts_choice),
    BundleTask("world_facts_zeroshot", f"{KNOWLEDGE}/world_facts_zeroshot.jsonl", "multiple_choice", 0, " ", 25,
               "Sentences about people, four endings each", _facts_zeroshot),
    BundleTask("world_facts_completion", f"{KNOWLEDGE}/world_facts_completion.jsonl", "language_modeling", 3, " ", 0,
               "Sentences about people, to be completed word for word", _facts_completion),
    BundleTask("world_facts_schema", f"{KNOWLEDGE}/world_facts_schema.jsonl", "schema", 0, " ", 50,
               "One ending, two people: whose is it?", _facts_schema),
    BundleTask("world_counting", f"{SYMBOLS}/world_counting.jsonl", "language_modeling", 0, " ", 0,
               "The next number", _counting),
    BundleTask("world_lookup", f"{SYMBOLS}/world_lookup.jsonl", "language_modeling", 0, "=", 0,
               "The letter that stands beside a word in the list above", _lookup),
    BundleTask("world_spelling", f"{SYMBOLS}/world_spelling.jsonl", "language_modeling", 0, " ", 0,
               "The letters of a word that was never spelled in training", _spelling),
)  # fmt: skip

FACT_TASKS = tuple(task.label for task in TASKS if task.label.startswith("world_facts"))

META_COLUMNS = ("Eval Task", "Task Category", "Task Type", "#shots", "#datapoints", "Random baseline",
                "Centered Metric?", "Description")  # fmt: skip


def write_core_bundle(world: World, directory: str | Path, examples: int = EXAMPLES) -> list[str]:
    """Writes the bundle below `directory` and returns its task labels. Same world, same bytes."""
    directory = Path(directory)
    for task in TASKS:
        rng = world.rng("bundle", task.label)
        rows = [task.make(world, i, rng) for i in range(examples)]
        path = directory / "eval_data" / task.file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    # JSON strings are YAML strings, so no YAML writer is needed.
    lines = ["icl_tasks:"]
    for task in TASKS:
        lines += [
            f"- label: {task.label}",
            f"  dataset_uri: {task.file}",
            f"  num_fewshot: [{task.shots}]",
            f"  icl_task_type: {task.kind}",
            f"  continuation_delimiter: {json.dumps(task.delimiter)}",
        ]
    (directory / "core.yaml").write_text("\n".join(lines) + "\n", encoding="utf-8")
    with open(directory / "eval_meta_data.csv", "w", newline="", encoding="utf-8") as out:
        table = csv.writer(out)
        table.writerow(META_COLUMNS)
        for task in TASKS:
            category = task.file.split("/")[0]
            table.writerow((task.label, category, task.kind, task.shots, examples, task.baseline, "TRUE", task.about))
    return [task.label for task in TASKS]
