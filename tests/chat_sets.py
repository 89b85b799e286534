"""Tiny data sets in the layout that `nanochat data get` leaves: <base>/task_data/<repo>/<subset>/<split>/*.parquet."""

import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from nanochat_lib.hub.sets import path_of

LETTERS = "ABCD"


def put(name: str, split: str, rows: list[dict], files: int = 1, **options: object) -> Path:
    """Writes `rows` as a finished split ("subset/split") of the data set `name`, over several files."""
    folder = path_of(name) / split
    folder.mkdir(parents=True, exist_ok=True)
    share = -(-len(rows) // files)
    table = pa.Table.from_pylist(rows)
    names = [f"{i:05d}.parquet" for i in range(files)]
    for i, file in enumerate(names):
        pq.write_table(table.slice(i * share, share), folder / file, **options)
    (folder / "manifest.json").write_text(json.dumps(names))
    return folder


def sums(count: int, seed: int) -> list[dict]:
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        a, b = rng.randrange(1, 50), rng.randrange(1, 50)
        text = f"{a} plus {b} is {a} + {b} = <<{a}+{b}={a + b}>>{a + b} in all.\n#### {a + b}"
        rows.append({"question": f"Ann has {a} nuts and finds {b}. How many has she?", "answer": text})
    return rows


def talk(count: int, seed: int) -> list[dict]:
    rng = random.Random(seed)
    rows = []
    for i in range(count):
        messages = [{"content": "Be brief.", "role": "system"}] if i % 3 == 0 else []
        for _ in range(rng.randrange(1, 3)):
            messages.append({"content": f"Tell me about {rng.randrange(99)}.", "role": "user"})
            messages.append({"content": f"It is a number, {rng.choice(['odd', 'even'])}.", "role": "assistant"})
        rows.append({"messages": messages, "source": "made"})
    return rows


def choices(count: int, seed: int) -> list[dict]:
    rng = random.Random(seed)
    rows = []
    for _ in range(count):
        a = rng.randrange(20)
        answer = rng.randrange(4)
        offered = [str(a + 1 + i - answer) for i in range(4)]
        rows.append({"question": f"{a} + 1 = ?", "subject": "sums", "choices": offered, "answer": answer})
    return rows


def science(count: int, seed: int) -> list[dict]:
    rows = []
    for i, row in enumerate(choices(count, seed)):
        labels = list("1234") if i % 5 == 0 else list(LETTERS)
        offered = {"text": row["choices"], "label": labels}
        rows.append({"id": str(i), "question": row["question"], "choices": offered, "answerKey": labels[row["answer"]]})
    return rows


PROBLEM = {
    "task_id": "made/0",
    "prompt": 'from typing import List\n\n\ndef total(xs: List[int]) -> int:\n    """ The sum of [1, 2] is 3. """\n',
    "canonical_solution": "    return sum(xs)\n",
    "test": "def check(candidate):\n    assert candidate([1, 2]) == 3\n    assert candidate([]) == 0\n",
    "entry_point": "total",
}


def put_all(talks: int = 60, questions: int = 40) -> None:
    """Every set that the chat stages of nanochat read."""
    put("smoltalk", "default/train", talk(talks, 1), files=2)
    put("smoltalk", "default/test", talk(12, 2))
    put("mmlu", "all/auxiliary_train", choices(questions, 3))
    put("mmlu", "all/test", choices(12, 4))
    put("gsm8k", "main/train", sums(questions, 5))
    put("gsm8k", "main/test", sums(12, 6))
    for level in ("Easy", "Challenge"):
        put("arc", f"ARC-{level}/train", science(12, 7))
        put("arc", f"ARC-{level}/test", science(12, 8))
    put("humaneval", "openai_humaneval/test", [PROBLEM])
