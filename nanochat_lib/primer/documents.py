"""Pretraining text about the invented world: facts, stories, counting, sums, spelling, and text that rewards copying.

Each generator returns one document that fits a short context. None of them contains a chat, a test word, a test pair,
or a question with choices about a held-out fact.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from nanochat_lib.primer.names import COLOURS, PETS, TOOLS, number_word
from nanochat_lib.primer.world import World

LETTERS = tuple("ABCDEFGH")
THINGS = COLOURS + PETS + TOOLS


def facts(world: World, rng: random.Random) -> str:
    """Facts as sentences and as questions with plain answers, in several wordings."""
    lines = []
    for fact in rng.sample(world.facts, 6):
        form = rng.randrange(5)
        if form < 2:
            lines.append(fact.statement(rng))
        elif form == 2:
            lines.append(f"Question: {fact.question(rng)}\nAnswer: {fact.value}")
        else:  # the bare value, as it is said in a chat
            lines.append(f"{fact.question(rng)}\n{fact.value}")
    return "\n".join(lines)


_OPENINGS = (
    "One morning {p} woke up early in {town}.",
    "It was raining in {town}, where {p} lives.",
    "{p} lives in {town} and loves to walk.",
    "Far away in {town} there is the house of {p}.",
)
_MIDDLES = (
    "The {pet} of {p} was hungry, so {p} went to the market.",
    "{p} took the {tool} and began to work.",
    "A friend called {q} came from {qtown} to help.",
    "{p} found an old box and painted it {colour}.",
    "The {pet} ran away with the {tool}.",
    "{q} brought a {qpet} and the animals played all day.",
)
_ENDINGS = (
    "In the evening everything was {colour} and everyone was happy.",
    "Then {p} and the {pet} went home to {town}.",
    "That night {p} put the {tool} away and slept well.",
    "From that day on {q} and {p} were good friends.",
)


def story(world: World, rng: random.Random) -> str:
    """A few sentences that use the facts of two people."""
    p, q = rng.sample(world.people, 2)
    other = world.facts_of(q)
    names = {"p": p, "q": q, "qtown": other["town"], "qpet": other["pet"], **world.facts_of(p)}
    parts = [rng.choice(_OPENINGS), *rng.sample(_MIDDLES, rng.choice((2, 3))), rng.choice(_ENDINGS)]
    return " ".join(parts).format(**names)


def counting(world: World, rng: random.Random) -> str:
    """Counting up and down in digits and words, and which word is which number."""
    lines = []
    for _ in range(3):
        first, step = rng.randrange(80), rng.choice((1, 1, 1, 2, -1))
        numbers = [n for n in range(first, first + 8 * step, step) if 0 <= n < 100]
        form = rng.randrange(3)
        if form == 0:
            lines.append(", ".join(map(str, numbers)))
        elif form == 1:
            lines.append(", ".join(map(number_word, numbers)))
        else:
            lines += [f"{number_word(n)} is {n}" for n in rng.sample(range(100), 4)]
    return "\n".join(lines)


def sums(world: World, rng: random.Random) -> str:
    """Sums in digits; only pairs that are not held out."""
    lines = []
    for _ in range(8):
        a, b = world.pair(rng)
        lines.append(rng.choice((f"{a} + {b} = {a + b}", f"{a} plus {b} is {a + b}")))
    return "\n".join(lines)


def letters(word: str) -> str:
    """'domari' -> 'd o m a r i': a letter and the space before it are one token, always the same."""
    return " ".join(word)


def spelling(world: World, rng: random.Random) -> str:
    """Words and their letters."""
    form = rng.choice(
        ("{w}: {l}", "The word {w} is spelled {l}.", "Spell the word {w}\nLetters: {l}", "Spell {w}: {l}")
    )
    return "\n".join(form.format(w=word, l=letters(word)) for word in (world.word(rng) for _ in range(5)))


def repeats(world: World, rng: random.Random) -> str:
    """A short random line, again and again: whoever looks back one round knows every next word."""
    pool = rng.choice((THINGS, LETTERS, THINGS + LETTERS))
    length = rng.randint(3, 8)
    return "\n".join([" ".join(rng.sample(pool, length))] * max(2, 40 // length))


def _choices(world: World, rng: random.Random, count: int) -> list[str]:
    return rng.sample(THINGS if rng.random() < 0.8 else world.towns, count)


def lookup(world: World, rng: random.Random) -> str:
    """A list of `value=letter` lines, then the same pairs asked in random order: the answer stands above."""
    count = rng.choice((2, 2, 3, 3, 4, 4, 5))
    labels = rng.sample(LETTERS, count) if rng.random() < 0.7 else LETTERS[:count]
    pairs = [f"- {value}={label}" for value, label in zip(_choices(world, rng, count), labels, strict=True)]
    asked = [rng.choice(pairs) for _ in range(14 - count)]
    return "\n".join(pairs) + "\n\n" + "\n".join(asked)


_FIND = ("Which letter is {v}?", "Find {v}.", "Which of these is {v}?", "{v}")


def find_letters(world: World, rng: random.Random) -> str:
    """Many short questions under one list: the answer is the bare letter, not the letter with its `=`."""
    count = rng.choice((2, 3, 4, 5))
    choices = _choices(world, rng, count)
    labels = rng.sample(LETTERS, count) if rng.random() < 0.7 else LETTERS[:count]
    lines = [f"- {choice}={label}" for choice, label in zip(choices, labels, strict=True)]
    lines.append("")
    for _ in range(8):
        asked = rng.randrange(count)
        lines.append(f"{rng.choice(_FIND).format(v=choices[asked])}\n{labels[asked]}")
    return "\n".join(lines)


def find_letter(world: World, rng: random.Random) -> str:
    """Multiple-choice questions that name the value themselves: what is left is to read the letter beside it."""
    questions = []
    for _ in range(2):
        choices = _choices(world, rng, rng.choice((2, 3, 4, 4)))
        asked = rng.randrange(len(choices))
        question = multiple_choice(rng.choice(_FIND[:3]).format(v=choices[asked]), choices)
        questions.append(f"{question}\n{LETTERS[asked]}")
    return "\n\n".join(questions)


def choices(world: World, rng: random.Random) -> str:
    """Questions with offered answers, answered with the words of one; only facts that may be asked so.

    The chat asks in other words. What carries over is to look past a list, back to the question.
    """
    parts = []
    for fact in rng.sample(world.train_facts, 2):
        offered = world.choices(fact, rng, rng.choice((3, 4)))
        if rng.random() < 0.5:
            parts.append(f"{fact.question(rng)}\n" + "\n".join(f"* {c}" for c in offered) + f"\n{fact.value}")
        else:
            parts.append(f"Question: {fact.question(rng)}\nOne of: {', '.join(offered)}\nAnswer: {fact.value}")
    return "\n\n".join(parts)


def multiple_choice(question: str, choices: Sequence[str], letters: Sequence[str] = LETTERS) -> str:
    """nanochat's prompt for answers by letter: `letters` in the order of the `choices`, none fewer."""
    lines = "".join(f"- {choice}={letter}\n" for choice, letter in zip(choices, letters[: len(choices)], strict=True))
    return f"Multiple Choice question: {question}\n{lines}\nRespond only with the letter of the correct answer."


# Share of the world's characters. The last four reward looking back and copying. The tokenizer reads them too and makes
# `=A` one token, so that a choice and its letter are neighbours: the model's smear hands each token its predecessor,
# and finding what stood beside a word takes one attention step. Looking up a letter was at chance after 700 steps of
# the cpu preset, with one token as with two, and learned after 1500 with one; two were not tried that long.
Generator = Callable[[World, random.Random], str]
SHARES: tuple[tuple[Generator, float], ...] = (
    (facts, 0.34),
    (choices, 0.07),
    (story, 0.07),
    (counting, 0.05),
    (sums, 0.06),
    (spelling, 0.15),
    (repeats, 0.04),
    (lookup, 0.06),
    (find_letters, 0.12),
    (find_letter, 0.04),
)


def world_documents(world: World, characters: int, stream: str = "train") -> list[str]:
    """About `characters` of documents in a fixed random order.

    `stream` names an independent draw: "val" has other documents than "train".
    """
    documents: list[str] = []
    for generate, share in SHARES:
        rng = world.rng(stream, generate.__name__)
        size = 0
        while size < share * characters:
            documents.append(generate(world, rng))
            size += len(documents[-1])
    world.rng(stream, "order").shuffle(documents)
    return documents
