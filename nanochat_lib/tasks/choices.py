"""Questions with offered answers from the hub: ARC, easy and hard, and MMLU. The answer is a letter."""

from __future__ import annotations

from nanochat_lib.errors import UserError
from nanochat_lib.primer.documents import LETTERS, multiple_choice
from nanochat_lib.tasks.common import Conversation, Task, extract_letter, last_text
from nanochat_lib.tasks.rows import open_rows


def ask(question: str, choices: list[str], letters: list[str], gold: str) -> Conversation:
    """The conversation of a question; `letters` stand beside the choices and are what a likelihood is taken of."""
    messages = [
        {"role": "user", "content": multiple_choice(question, choices, letters)},
        {"role": "assistant", "content": gold},
    ]
    return {"messages": messages, "letters": letters}


class Choices(Task):
    """A task whose reply is one of the offered letters."""

    eval_type = "categorical"
    baseline = 0.25

    def evaluate(self, conversation: Conversation, completion: str) -> float:
        return float(extract_letter(completion, conversation["letters"]) == last_text(conversation))

    def answered(self, conversation: Conversation, completion: str) -> bool:
        return extract_letter(completion, conversation["letters"]) is not None


class ARC(Choices):
    """Science questions of schools. `level` is "Easy" or "Challenge"; letters are the data's, sometimes 1 … 4."""

    def __init__(self, level: str, split: str, **slicing: int) -> None:
        super().__init__(**slicing)
        if level not in ("Easy", "Challenge"):
            raise UserError(f"unknown level {level!r} of ARC; known: Easy, Challenge")
        self.name = f"ARC-{level}"
        self.rows = open_rows("arc", self.name, split, ("question", "choices", "answerKey"))

    def num_examples(self) -> int:
        return len(self.rows)

    def get_example(self, index: int) -> Conversation:
        row = self.rows[index]
        choices, letters, gold = row["choices"]["text"], row["choices"]["label"], row["answerKey"]
        if gold not in letters or len(letters) != len(choices):
            raise UserError(f"{self.name} question {index}: the answer {gold!r} is not among its labels {letters}")
        return ask(row["question"], choices, letters, gold)


class MMLU(Choices):
    """Questions in 57 fields with four choices. `split` is "auxiliary_train" (99,842 to train on) or "test"."""

    name = "MMLU"

    def __init__(self, split: str, **slicing: int) -> None:
        super().__init__(**slicing)
        self.rows = open_rows("mmlu", "all", split, ("question", "choices", "answer", "subject"))

    def num_examples(self) -> int:
        return len(self.rows)

    def get_example(self, index: int) -> Conversation:
        row = self.rows[index]
        choices, letters = row["choices"], list(LETTERS[: len(row["choices"])])
        if not 0 <= row["answer"] < len(letters):
            raise UserError(f"MMLU question {index}: the answer {row['answer']} is not one of {len(letters)} choices")
        return ask(row["question"], choices, letters, letters[row["answer"]]) | {"subject": row["subject"]}
