"""What every chat task offers: conversations by index, a score for an answer; mixtures and sequences of tasks."""

from __future__ import annotations

import random
import re
from array import array
from collections.abc import Sequence
from string import ascii_uppercase

import numpy as np

from nanochat_lib.calculator import calculate, result_text
from nanochat_lib.errors import UserError

Conversation = dict[str, object]

# What may stand around a number: blanks, emphasis, currency, LaTeX. Possessive (*+), so that no reply takes long.
_AROUND = r"(?:[\s*_`~$\u20ac\u00a3]|\\[$(\[]|\\(?:boxed|text|mathbf)\{)*+"
_SIGN = r"([-+\u2212]?)"
# Digits with separators and at most one fraction; what goes on (3/4, 12:30, 1.2.3, 2^5) is no number of this form.
_NUMBER = r"([0-9][0-9,]*+(?:\.[0-9]++)?|\.[0-9]++)(?![/:^.]?[0-9])"
_ANSWER = re.compile(f"####{_AROUND}{_SIGN}{_AROUND}{_NUMBER}")
_BOXED = re.compile(rf"\\boxed\{{{_AROUND}{_SIGN}{_AROUND}{_NUMBER}")
_THIN = re.compile(r"(?<=[0-9])(?:\{,\}|,?\\[,!;]|[\u00a0\u2009\u202f])(?=[0-9]{3})")  # separators of typeset numbers


def extract_answer(text: str) -> str | None:
    """The number after the first `####`; without any `####`, that of the last `\\boxed{…}`; else None.

    In one form, so that equal numbers are equal texts: '#### $1,234.' -> '1234', '#### -3.50' -> '-3.5',
    '#### 9{,}500' -> '9500', '#### **18.0**' -> '18'. Fractions, times and powers are no numbers: None.
    """
    text = _THIN.sub(",", text)
    match = _ANSWER.search(text)
    if match is None and "####" not in text:
        match = next(reversed(list(_BOXED.finditer(text))), None)
    if match is None:
        return None
    return plain_number(*match.groups())


def plain_number(sign: str, digits: str) -> str:
    """One text for equal numbers: ("", "1,234.50") -> '1234.5', ("-", "007") -> '-7', ("-", ".0") -> '0'.

    `sign` is "", "+", "-" or the typographic minus; `digits` has digits, commas and at most one point.
    """
    number = digits.replace(",", "")
    if "." in number:
        number = number.rstrip("0").rstrip(".")
    number = number.lstrip("0")
    number = f"0{number}" if number == "" or number.startswith(".") else number
    return f"-{number}" if sign in ("-", "\u2212") and number != "0" else number


def call_parts(expression: str) -> list[dict[str, str]]:
    """The parts of an answer that calls the calculator: the call, and what the calculator writes.

    In a chat it is the calculator that writes the result, and a model that met another form in training does not know
    what it reads. Of a call that the calculator does not understand there is no result, as in a chat.
    """
    call, value = {"type": "python", "text": expression}, calculate(expression)
    return [call] if value is None else [call, {"type": "python_output", "text": result_text(value)}]


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


_LETTER = re.compile(r"[\s*_`\"]*(?:\(([A-Z0-9])\)|([A-Z0-9])(?![A-Za-z0-9']|[.,][0-9]))")


def extract_letter(text: str, letters: Sequence[str] = tuple(ascii_uppercase)) -> str | None:
    """'C', 'C. 12', '(C)', '**C**' -> 'C'; None when the reply does not begin with one of `letters` on its own."""
    match = _LETTER.match(text)
    letter = match and (match.group(1) or match.group(2))
    return letter if letter and letter in letters else None


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


def task_of(item: int, ends: np.ndarray) -> tuple[int, int]:
    """(which task, which of its conversations) number `item` of all of them is; the tasks' numbers end at `ends`."""
    task = int(np.searchsorted(ends, item, side="right"))
    return task, item - (int(ends[task - 1]) if task else 0)


class TaskMixture(Task):
    """All conversations of several tasks in one fixed random order (nanochat's). A task listed twice counts twice.

    The order is that of `random.Random(42).shuffle` over the list of all (task, index) pairs, task by task; it is kept
    as one number an item, 4 MB a million, and a conversation is made when it is asked for.
    """

    name = "mixture"

    def __init__(self, tasks: list[Task], **slicing: int) -> None:
        super().__init__(**slicing)
        self.tasks = list(tasks)
        self.ends = np.cumsum([len(task) for task in self.tasks], dtype=np.int64)
        self.order = self.arranged(int(self.ends[-1]) if self.tasks else 0)

    def arranged(self, count: int) -> np.ndarray:
        """(count,) int32: at each place of the mixture the number of the pair that stands there."""
        order = array("i", range(count))
        random.Random(42).shuffle(order)  # which swaps depends on the length alone, not on what is swapped
        return np.array(order, np.int32)

    def num_examples(self) -> int:
        return len(self.order)

    def place(self, index: int) -> tuple[int, int]:
        """(which task, which of its conversations) at `index`, counted before slicing."""
        return task_of(int(self.order[index]), self.ends)

    def get_example(self, index: int) -> Conversation:
        task, local = self.place(index)
        return self.tasks[task][local]


class TaskSequence(TaskMixture):
    """All conversations of several tasks, one task after the other."""

    name = "sequence"

    def arranged(self, count: int) -> np.ndarray:
        return np.arange(count, dtype=np.int32)
