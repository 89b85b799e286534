"""A small invented world, drawn from a seed: who lives where, with which pet, favourite colour and tool.

The world also says what is held out: a quarter of the facts never occur in a chat or in a question with choices, a
tenth of the words are never spelled, an eighth of the number pairs are never added, in either order. Every generator
of text asks the world, so no wording can leak what a test asks for.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from nanochat_lib.primer.names import COLOURS, PETS, TOOLS, fraction, invent, invent_names

PEOPLE = 32
TOWNS = 8
HELD_OUT_FACTS = 0.25
HELD_OUT_WORDS = 0.10
HELD_OUT_PAIRS = 0.125
SUM_LIMIT = 100  # operands of sums in digits are below this
WORD_SUM_LIMIT = 50  # operands of sums in words are below this

# {p} is the person, {v} the value. The first wording of each kind is the one the tests use.
STATEMENTS = {
    "town": ("{p} lives in {v}.", "The home of {p} is in {v}.", "In {v} lives {p}."),
    "pet": ("{p} has a pet {v}.", "The pet of {p} is a {v}.", "{p} looks after a {v}."),
    "colour": ("The favourite colour of {p} is {v}.", "{p} likes the colour {v}.", "The hat of {p} is {v}."),
    "tool": ("{p} works with a {v}.", "The tool of {p} is a {v}.", "{p} always carries a {v}."),
}
QUESTIONS = {
    "town": ("Where does {p} live?", "In which town does {p} live?", "What is the home of {p}?"),
    "pet": ("What pet does {p} have?", "Which animal does {p} look after?", "What is the pet of {p}?"),
    "colour": (
        "What is the favourite colour of {p}?", "Which colour does {p} like?", "What colour is the hat of {p}?",
    ),
    "tool": ("What tool does {p} work with?", "What does {p} always carry?", "What is the tool of {p}?"),
}  # fmt: skip


@dataclass(frozen=True)
class Fact:
    person: str
    relation: str  # town, pet, colour, tool
    value: str
    held_out: bool  # never in a chat, never in a question with choices

    def statement(self, rng: random.Random | None = None) -> str:
        """The fact as a sentence, in the first wording or in a drawn one."""
        wordings = STATEMENTS[self.relation]
        return (rng.choice(wordings) if rng else wordings[0]).format(p=self.person, v=self.value)

    def open_statement(self) -> str:
        """The first wording, which ends in the value, without the value: 'Domar lives in'."""
        return STATEMENTS[self.relation][0].format(p=self.person, v="").removesuffix(".").strip()

    def question(self, rng: random.Random | None = None) -> str:
        """The question this fact answers, in the first wording or in a drawn one."""
        wordings = QUESTIONS[self.relation]
        return (rng.choice(wordings) if rng else wordings[0]).format(p=self.person)


class World:
    """People, facts, words and sums of one seed. `world.facts` are `Fact`s, ordered by relation, then person."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        rng = self.rng("world")
        taken: set[str] = set()
        self.people = invent_names(rng, PEOPLE, 2, taken)
        self.towns = invent_names(rng, TOWNS, 2, taken)
        self.values = {"town": self.towns, "pet": PETS, "colour": COLOURS, "tool": TOOLS}
        self.facts: list[Fact] = []
        for relation, values in self.values.items():
            # Every value is used equally often: guessing the commonest one gains nothing.
            drawn = [values[i % len(values)] for i in range(PEOPLE)]
            rng.shuffle(drawn)
            held_out = set(rng.sample(range(PEOPLE), int(PEOPLE * HELD_OUT_FACTS)))
            self.facts += [
                Fact(person, relation, value, i in held_out)
                for i, (person, value) in enumerate(zip(self.people, drawn, strict=True))
            ]
        self.train_facts = [fact for fact in self.facts if not fact.held_out]
        self.test_facts = [fact for fact in self.facts if fact.held_out]

    def rng(self, *purpose: object) -> random.Random:
        """A random stream of its own for one purpose, so that no part of the text disturbs another."""
        return random.Random("/".join(map(str, (self.seed, *purpose))))

    def facts_of(self, person: str) -> dict[str, str]:
        """{"town": …, "pet": …, "colour": …, "tool": …} of one person."""
        return {fact.relation: fact.value for fact in self.facts if fact.person == person}

    def choices(self, fact: Fact, rng: random.Random, count: int = 4) -> list[str]:
        """The fact's value among `count - 1` others of its relation, in random order."""
        others = [value for value in self.values[fact.relation] if value != fact.value]
        choices = [fact.value, *rng.sample(others, count - 1)]
        rng.shuffle(choices)
        return choices

    def sample_prompts(self) -> list[str]:
        """Beginnings for the base model to continue: a fact of each relation, a word to spell, a number to follow."""
        prompts = [fact.open_statement() for fact in self.facts[:: PEOPLE + 1]]
        word = self.word(self.rng("sample"), test=True)
        return [*prompts, f"The word {word} is spelled", "41, 42, 43, 44,", "The value of the"]

    def is_test_word(self, word: str) -> bool:
        """Held out of every text and chat that spells."""
        return fraction(self.seed, "word", word) < HELD_OUT_WORDS

    def word(self, rng: random.Random, test: bool = False) -> str:
        """A word of two or three syllables from the wanted side of the split."""
        while self.is_test_word(word := invent(rng, rng.choice((2, 3)))) != test:
            pass
        return word

    def is_test_pair(self, a: int, b: int) -> bool:
        """Held out of every sum, whichever operand stands first."""
        return fraction(self.seed, "pair", min(a, b), max(a, b)) < HELD_OUT_PAIRS

    def pair(self, rng: random.Random, test: bool = False, limit: int = SUM_LIMIT) -> tuple[int, int]:
        """Two operands below `limit` from the wanted side of the split."""
        while self.is_test_pair(*(pair := (rng.randrange(limit), rng.randrange(limit)))) != test:
            pass
        return pair
