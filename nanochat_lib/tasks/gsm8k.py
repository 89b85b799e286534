"""GSM8K: sums in words, solved step by step with the calculator, the result after `####`. Training data and test."""

from __future__ import annotations

import re

from nanochat_lib.tasks.common import Conversation, Task, call_parts, extract_answer, same_number
from nanochat_lib.tasks.rows import open_rows

CALL = re.compile(r"(<<[^>]+>>)")


def parts_of(solution: str) -> list[dict[str, str]]:
    """A solution with `<<48/2=24>>` in it as an answer's parts: text, the call `48/2`, its result, text, …

    The result is what the calculator writes, not what the data say (`call_parts`): `30*.5` is 15 to both, but `10/3` is
    3.33 in the data. The number that the data repeat after `>>` stays in the next text.
    """
    parts = []
    for piece in CALL.split(solution):
        if not CALL.fullmatch(piece):
            parts.append({"type": "text", "text": piece})
            continue
        inner = piece[2:-2]
        expression = inner.rpartition("=")[0] if "=" in inner else inner
        parts += call_parts(expression)
    return parts


class GSM8K(Task):
    """7,473 questions to train on ("train"), 1,319 to test."""

    name = "GSM8K"

    def __init__(self, split: str, **slicing: int) -> None:
        super().__init__(**slicing)
        self.rows = open_rows("gsm8k", "main", split, ("question", "answer"))

    def num_examples(self) -> int:
        return len(self.rows)

    def get_example(self, index: int) -> Conversation:
        row = self.rows[index]
        return {
            "messages": [
                {"role": "user", "content": row["question"]},
                {"role": "assistant", "content": parts_of(row["answer"])},
            ]
        }

    def evaluate(self, conversation: Conversation, completion: str) -> float:
        return same_number(conversation, completion)

    def answered(self, conversation: Conversation, completion: str) -> bool:
        return extract_answer(completion) is not None
