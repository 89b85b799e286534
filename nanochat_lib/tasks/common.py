"""What every chat task offers: conversations by index, a score for an answer; mixtures and sequences of tasks."""

from __future__ import annotations

import random
import re

from nanochat_lib.errors import UserError

Conversation = dict[str, object]

# After the marker: sign and currency in either order, then digits with separators and at most one fraction.
_ANSWER = re.compile(r"####\s*([-+\u2212]?\s*\$?\s*[-+\u2212]?)\s*([0-9][0-9,]*(?:\.[0-9]+)?|\.[0-9]+)")


def extract_answer(text: str) -> str | None:
    """The number after the first `####`, or None, in one form: '#### $1,234.' -> '1234', '#### -3.50' -> '-3.5'."""
    match = _ANSWER.search(text.replace("{,}", ","))
    if match is None:
        return None
    sign, number = match.groups()
    number = number.replace(",", "")
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    number = number.lstrip("0")
    number = f"0{number}" if number == "" or number.startswith(".") else number
    negative = ("-" in sign or "\u2212" in sign) and number != "0"
    return f"-{number}" if negative else number


def last_text(conversation: Conversation) -> str:
    """The reference answer's text; of an answer in parts, the last text part."""
    content = conversation["messages"][-1]["content"]
    if isinstance(content, str):
        return content
    return next((part["text"] for part in reversed(content) if part["type"] == "text"), "")


def same_number(conversation: Conversation, completion: str) -> float:
    """1.0 when both `####` numbers agree. A missing answer is never right; a missing reference is a UserError."""
    reference = extract_answer(last_text(conversation))
    if reference is None:
        raise UserError(f"the reference answer has no '#### number' line: {last_text(conversation)[:80]!r}")
    return float(extract_answer(completion) == reference)


_LETTER = re.compile(r"\s*(?:\(([A-Z])\)|([A-Z])(?![A-Za-z0-9']))")


def extract_letter(text: str) -> str | None:
    """'C', 'C. 12', '(C)' -> 'C'; None when the answer does not begin with a letter of its own."""
    match = _LETTER.match(text)
    return match and (match.group(1) or match.group(2))


class Task:
    """A list of conversations, the last message of each being the reference answer.

    `start`, `stop`, `step` pick a slice of the examples: item i is example start + i·step.
    eval_type is "categorical" (the answer is one of a few that are offered) or "generative" (the answer is sampled).
    A categorical conversation carries "letters", or "choices" and "gold" when `scored_over` is "text".
    """

    name = "task"
    eval_type = "generative"
    scored_over = "letter"
    baseline = 0.0  # the score that guessing reaches

    def __init__(self, start: int = 0, stop: int | None = None, step: int = 1) -> None:
        if start < 0 or step < 1 or (stop is not None and stop < start):
            raise UserError(f"bad slice start={start} stop={stop} step={step}; needs 0 <= start <= stop and step >= 1")
        self.start, self.stop, self.step = start, stop, step

    def num_examples(self) -> int:
        """Examples before slicing."""
        raise NotImplementedError

    def get_example(self, index: int) -> Conversation:
        """Conversation `index`, counted before slicing."""
        raise NotImplementedError

    def __len__(self) -> int:
        total = self.num_examples()
        stop = total if self.stop is None else min(self.stop, total)
        return max(0, -(-(stop - self.start) // self.step))

    def __getitem__(self, index: int) -> Conversation:
        if not 0 <= index < len(self):
            raise IndexError(f"{self.name} has {len(self)} conversations, asked for {index}")
        return self.get_example(self.start + index * self.step)

    def evaluate(self, conversation: Conversation, completion: str) -> float:
        """1.0 when `completion` answers the conversation's question, else 0.0."""
        raise NotImplementedError

    def answered(self, conversation: Conversation, completion: str) -> bool:
        """Whether `completion` holds an answer in the form that is asked for, right or wrong."""
        return bool(completion.strip())

    def reward(self, conversation: Conversation, completion: str) -> float:
        """What reinforcement learning maximises; the score unless a task says otherwise."""
        return self.evaluate(conversation, completion)


class TaskMixture(Task):
    """All conversations of several tasks in one fixed random order (nanochat's). A task listed twice counts twice."""

    name = "mixture"

    def __init__(self, tasks: list[Task], **slicing: int) -> None:
        super().__init__(**slicing)
        self.tasks = list(tasks)
        self.order = [(t, i) for t, task in enumerate(self.tasks) for i in range(len(task))]
        random.Random(42).shuffle(self.order)

    def num_examples(self) -> int:
        return len(self.order)

    def get_example(self, index: int) -> Conversation:
        task, local = self.order[index]
        return self.tasks[task][local]


class TaskSequence(TaskMixture):
    """All conversations of several tasks, one task after the other."""

    name = "sequence"

    def __init__(self, tasks: list[Task], **slicing: int) -> None:
        super().__init__(tasks, **slicing)
        self.order.sort()
