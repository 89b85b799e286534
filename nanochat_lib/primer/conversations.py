"""Chats about the world, as plain conversations: {"messages": [{"role", "content"}, …], extras}.

Every maker takes the world, a random stream and the side of the split; the answer that scores is the last message.
"""

from __future__ import annotations

import random

from nanochat_lib.primer.documents import LETTERS, letters, multiple_choice
from nanochat_lib.primer.names import number_word
from nanochat_lib.primer.world import WORD_SUM_LIMIT, Fact, World

Conversation = dict[str, object]


def chat(question: str, answer: str | list[dict[str, str]], **extras: object) -> Conversation:
    """One question, one answer."""
    messages = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": messages, **extras}


def choice_by_letter(world: World, fact: Fact, rng: random.Random) -> Conversation:
    """Answer with a letter; `letters` are the offered ones."""
    choices = world.choices(fact, rng)
    question = multiple_choice(fact.question(rng), choices)
    return chat(question, LETTERS[choices.index(fact.value)], letters=list(LETTERS[: len(choices)]))


def choice_by_text(world: World, fact: Fact, rng: random.Random) -> Conversation:
    """Answer with the words of a choice; `choices` are the offered texts, `gold` the index of the right one."""
    choices = world.choices(fact, rng)
    lines = "".join(f"- {choice}\n" for choice in choices)
    question = f"Multiple Choice question: {fact.question(rng)}\n{lines}\nRespond only with the correct answer."
    return chat(question, fact.value, choices=choices, gold=choices.index(fact.value))


_SPELL = ("Spell the word {w}", "Spell {w}", "How do you spell {w}", "What are the letters of {w}")


def spelling(world: World, rng: random.Random, test: bool) -> Conversation:
    """`word` is what has to be spelled."""
    word = world.word(rng, test)
    return chat(rng.choice(_SPELL).format(w=word), f"Letters: {letters(word)}", word=word)


def _tool_answer(a: int, b: int) -> list[dict[str, str]]:
    """The parts of a worked answer in GSM8K's form: the call, its output, the final line."""
    return [
        {"type": "python", "text": f"{a}+{b}"},
        {"type": "python_output", "text": str(a + b)},
        {"type": "text", "text": f"#### {a + b}"},
    ]


_SUMS = ("What is {a} + {b}?", "What is {a} plus {b}?", "Add {a} and {b}.", "How much is {a} + {b}?")


def sums(world: World, rng: random.Random, test: bool) -> Conversation:
    """A sum in digits, answered with the calculator."""
    a, b = world.pair(rng, test)
    return chat(rng.choice(_SUMS).format(a=a, b=b), _tool_answer(a, b))


def word_sums(world: World, rng: random.Random, test: bool) -> Conversation:
    """A sum in words, answered with the calculator: the numbers must be translated first."""
    a, b = world.pair(rng, test, WORD_SUM_LIMIT)
    return chat(f"What is {number_word(a)} plus {number_word(b)}?", _tool_answer(a, b))


_TALK = (
    (
        ("Hi", "Hello", "Hello!", "Hi there", "Good morning", "Hey"),
        ("Hello! How can I help you?", "Hi! Ask me anything."),
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Are you a human?"),
        ("I am nanochat, a small language model that you trained yourself.",),
    ),
    (
        ("What can you do?", "Help", "What can I ask you?"),
        ("I can spell words, add numbers and tell you about the people I read about.",),
    ),
    (("How are you?", "How do you do?"), ("I am fine, thank you.",)),
    (("Thank you", "Thanks", "Thanks a lot!"), ("You are welcome!",)),
    (("Bye", "Goodbye", "See you later"), ("Goodbye!",)),
)


def small_talk(world: World, rng: random.Random) -> Conversation:
    """A greeting, who am I, or (half of them) a plain question about a fact that may be asked in chats."""
    if rng.random() < 0.5:
        questions, answers = rng.choice(_TALK)
        return chat(rng.choice(questions), rng.choice(answers))
    fact = rng.choice(world.train_facts)
    return chat(fact.question(rng), fact.statement())
