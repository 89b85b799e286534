"""Chat tasks of the embedded primer. Training and test sides share no fact, word or number pair."""

from __future__ import annotations

import re
from random import Random

from nanochat_lib.errors import UserError
from nanochat_lib.primer import conversations as chats
from nanochat_lib.primer.world import Fact, World
from nanochat_lib.tasks.common import (
    Conversation,
    Task,
    TaskMixture,
    extract_answer,
    extract_letter,
    last_text,
    same_number,
)

TEST_SIZE = 256


class PrimerTask(Task):
    """`size` conversations about `world`, from the side `split` ("train" or "test"); item i is always the same."""

    def __init__(self, world: World, split: str, size: int = TEST_SIZE, **slicing: int) -> None:
        super().__init__(**slicing)
        if split not in ("train", "test"):
            raise UserError(f"unknown split {split!r} of {self.name}; known: train, test")
        self.world, self.split, self.size = world, split, size

    def num_examples(self) -> int:
        return self.size

    def get_example(self, index: int) -> Conversation:
        return self.make(index, self.world.rng(self.name, self.split, index))

    def make(self, index: int, rng: Random) -> Conversation:
        """Conversation `index`, drawn with a random stream of its own."""
        raise NotImplementedError

    def fact(self, index: int) -> Fact:
        """Facts in turn, so that each is asked equally often."""
        facts = self.world.test_facts if self.split == "test" else self.world.train_facts
        return facts[index % len(facts)]


class PrimerChoiceText(PrimerTask):
    """Questions with four choices; the answer is the text of a choice."""

    name = "primer-choice-text"
    eval_type = "categorical"
    scored_over = "text"
    baseline = 0.25

    def make(self, index: int, rng: Random) -> Conversation:
        return chats.choice_by_text(self.world, self.fact(index), rng)

    def evaluate(self, conversation: Conversation, completion: str) -> float:
        return float(completion.strip() == last_text(conversation))


class PrimerChoiceLetter(PrimerTask):
    """Questions with four choices; the answer is a letter."""

    name = "primer-choice-letter"
    eval_type = "categorical"
    baseline = 0.25

    def make(self, index: int, rng: Random) -> Conversation:
        return chats.choice_by_letter(self.world, self.fact(index), rng)

    def evaluate(self, conversation: Conversation, completion: str) -> float:
        return float(extract_letter(completion) == last_text(conversation))

    def answered(self, conversation: Conversation, completion: str) -> bool:
        return extract_letter(completion, conversation["letters"]) is not None


class PrimerSpelling(PrimerTask):
    """Spell a word that was never spelled before."""

    name = "primer-spelling"

    def make(self, index: int, rng: Random) -> Conversation:
        return chats.spelling(self.world, rng, self.split == "test")

    def evaluate(self, conversation: Conversation, completion: str) -> float:
        """Single letters, whatever separates them, after the last colon (or all there is)."""
        answer = completion.rpartition(":")[2].strip().rstrip(".")
        spelled = re.split(r"[\s,.-]+", answer)
        return float(all(len(letter) == 1 for letter in spelled) and "".join(spelled) == conversation["word"])


class PrimerSums(PrimerTask):
    """Add two numbers with the calculator."""

    name = "primer-sums"

    def make(self, index: int, rng: Random) -> Conversation:
        return chats.sums(self.world, rng, self.split == "test")

    def evaluate(self, conversation: Conversation, completion: str) -> float:
        return same_number(conversation, completion)

    def answered(self, conversation: Conversation, completion: str) -> bool:
        return extract_answer(completion) is not None


class PrimerWordSums(PrimerSums):
    """Add two numbers that are written as words."""

    name = "primer-word-sums"

    def make(self, index: int, rng: Random) -> Conversation:
        return chats.word_sums(self.world, rng, self.split == "test")


class PrimerTalk(PrimerTask):
    """Greetings, who are you, and plain questions about people; to train on, not to score."""

    name = "primer-talk"

    def make(self, index: int, rng: Random) -> Conversation:
        return chats.small_talk(self.world, rng)

    def evaluate(self, conversation: Conversation, completion: str) -> float:
        return float(completion.strip() == last_text(conversation))


TASKS = {task.name: task for task in (PrimerChoiceText, PrimerChoiceLetter, PrimerSpelling, PrimerSums, PrimerWordSums)}

# Shares of the conversations. Word sums are rare on purpose: reinforcement learning has something left to improve.
SFT_SHARES = (
    (PrimerChoiceText, 0.14),
    (PrimerChoiceLetter, 0.14),
    (PrimerSpelling, 0.43),
    (PrimerSums, 0.24),
    (PrimerWordSums, 0.01),
    (PrimerTalk, 0.04),
)
SFT_CONVERSATIONS = 8000
SFT_HELD_OUT = 800
RL_TRAIN_SIZE = 2048


def primer_task(name: str, world: World, split: str, size: int = TEST_SIZE) -> PrimerTask:
    """The named task; an unknown name is a UserError that lists the known ones."""
    if name not in TASKS:
        raise UserError(f"unknown task {name!r}; known: {', '.join(TASKS)}")
    return TASKS[name](world, split, size)


def rl_task(name: str, world: World, split: str) -> PrimerTask:
    """The questions of reinforcement learning; only tasks whose answers are written, not chosen."""
    task = primer_task(name, world, split, RL_TRAIN_SIZE if split == "train" else TEST_SIZE)
    if task.eval_type != "generative":
        known = ", ".join(name for name, kind in TASKS.items() if kind.eval_type == "generative")
        raise UserError(f"{name} is answered by choosing, there is nothing to sample; known: {known}")
    return task


def _mixture(world: World, conversations: int, split: str) -> TaskMixture:
    return TaskMixture([task(world, split, max(1, round(share * conversations))) for task, share in SFT_SHARES])


def sft_mixture(world: World, conversations: int = -1) -> TaskMixture:
    """What the chat is trained on; -1 is the default number of conversations."""
    return _mixture(world, SFT_CONVERSATIONS if conversations < 0 else conversations, "train")


def sft_validation(world: World) -> TaskMixture:
    """The same mixture of the held-out side, for the loss that is shown while training."""
    return _mixture(world, SFT_HELD_OUT, "test")


def sample_questions(world: World) -> list[Conversation]:
    """A few held-out questions of each kind, and a greeting, whose answers are worth reading."""
    return [PrimerTalk(world, "test")[0]] + [task[i] for task in chat_eval_tasks(world).values() for i in range(2)]


def chat_eval_tasks(world: World, size: int = TEST_SIZE) -> dict[str, PrimerTask]:
    """{name: task} of the held-out side, each with its `baseline`, for the chat evaluation."""
    return {name: task(world, "test", size) for name, task in TASKS.items()}
