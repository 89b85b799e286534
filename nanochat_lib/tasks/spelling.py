"""Spelling: count a letter in a word, by hand and with the calculator (SpellingBee), and write a word letter by letter.

Models read tokens, not letters. These conversations teach to take a word apart. Drawn by nanochat's rules, in our own
words; `count` of a few languages, so that a model does not go by the English wording.
"""

from __future__ import annotations

import random
from string import ascii_lowercase

from nanochat_lib.errors import UserError
from nanochat_lib.tasks.common import Conversation, Task, call_parts, extract_answer, last_text, same_number
from nanochat_lib.tasks.words import word_list

TEST_SEED = 10_000_000  # added to an example's index on the test side
IN_WORD = 0.9  # share of the questions whose letter is in the word

TEMPLATES = (
    # English
    "How many {letter} are in {word}",
    "How many times does {letter} occur in {word}",
    "How often does the letter {letter} appear in {word}",
    "Count the {letter} in {word}",
    "Count how many {letter} there are in the word {word}",
    "What is the number of {letter} in {word}",
    "In the word {word}, how many {letter} are there",
    "Tell me how many {letter} the word {word} has",
    "How many letters {letter} does {word} have",
    "How many {letter} does {word} contain",
    "Can you count the {letter} in {word} for me",
    "Please count each {letter} in {word}",
    "I need the number of {letter} in {word}",
    "Do you know how many {letter} are in {word}",
    "Find out how many {letter} are in {word}",
    "Look at {word} and count the letter {letter}",
    "Spell {word} and count the {letter}",
    "If you spell {word}, how many {letter} do you write",
    "The letter {letter}: how often is it in {word}",
    "{word} has how many {letter}",
    "How many of the letters in {word} are {letter}",
    "What's the count of {letter} in {word}",
    "Give me the count of the letter {letter} in {word}",
    "Number of {letter} in {word}",
    "Letter {letter} in word {word}: how many",
    "Say how many times {word} uses {letter}",
    "Quick question: how many {letter} in {word}",
    "When I write {word}, how many times do I write {letter}",
    "Is there a {letter} in {word}, and how many",
    "Could you check how many {letter} {word} is written with",
    # Spanish
    "¿Cuántas {letter} hay en {word}",
    "¿Cuántas veces aparece la letra {letter} en {word}",
    "Cuenta las {letter} de la palabra {word}",
    "¿Cuántas {letter} tiene la palabra {word}",
    # Chinese
    "{word}里有几个{letter}",
    "单词{word}中字母{letter}出现了多少次",
    "数一数{word}里有多少个{letter}",
    "请问{word}一共有几个字母{letter}",
    # Korean
    "{word}에 {letter}가 몇 개 있나요",
    "단어 {word}에서 {letter}는 몇 번 나오나요",
    "{word}에 들어 있는 {letter}의 개수를 세어 주세요",
    "{word}라는 단어에는 글자 {letter}가 몇 번 쓰이나요",
    # French
    "Combien de {letter} y a-t-il dans {word}",
    "Combien de fois la lettre {letter} est-elle dans {word}",
    "Compte les {letter} du mot {word}",
    # German
    "Wie viele {letter} sind in {word}",
    "Wie oft kommt der Buchstabe {letter} in {word} vor",
    "Zähle die {letter} im Wort {word}",
    # Japanese
    "{word}には{letter}がいくつありますか",
    "{word}という単語に{letter}は何回出てきますか",
    "{word}の中の{letter}の数を数えてください",
)
QUOTES = ("", "'", '"')


def spelled(word: str) -> str:
    """'word' -> 'word:w,o,r,d': no blanks, so that each letter is a token of its own."""
    return f"{word}:{','.join(word)}"


def counted(word: str, letter: str) -> tuple[str, int]:
    """(one line a letter, '3:r hit! count=1' where it is the one looked for; how many there are)."""
    lines, count = [], 0
    for place, found in enumerate(word, 1):
        count += found == letter
        lines.append(f"{place}:{found}" + (f" hit! count={count}" if found == letter else ""))
    return "\n".join(lines), count


class _Spelling(Task):
    """`size` conversations of a side, each from a random stream of its own; `words` is the path of a list."""

    def __init__(self, size: int, split: str = "train", words: str = "", **slicing: int) -> None:
        super().__init__(**slicing)
        if split not in ("train", "test"):
            raise UserError(f"unknown split {split!r} of {self.name}; known: train, test")
        self.size, self.split, self.words = size, split, word_list(words)

    def num_examples(self) -> int:
        return self.size

    def get_example(self, index: int) -> Conversation:
        return self.make(random.Random(index + (TEST_SEED if self.split == "test" else 0)))

    def make(self, rng: random.Random) -> Conversation:
        """The conversation of a random stream."""
        raise NotImplementedError


class SpellingBee(_Spelling):
    """How often is a letter in a word? Counted by hand, then with the calculator. nanochat tests 256."""

    name = "SpellingBee"

    def __init__(self, size: int = 1000, split: str = "train", words: str = "", **slicing: int) -> None:
        super().__init__(size, split, words, **slicing)

    def make(self, rng: random.Random) -> Conversation:
        word = rng.choice(self.words)
        letter = rng.choice(word) if rng.random() < IN_WORD else rng.choice(ascii_lowercase)
        template = rng.choice(TEMPLATES)
        if rng.random() < 0.3:
            template = template.lower()
        around_letter, around_word = rng.choice(QUOTES), rng.choice(QUOTES)
        question = template.format(
            letter=f"{around_letter}{letter}{around_letter}", word=f"{around_word}{word}{around_word}"
        )
        if rng.random() < 0.5:
            question += "?"
        lines, count = counted(word, letter)
        by_hand = (
            f"We look for the letter '{letter}' in the word '{word}'. By hand first: I write the word out and go "
            f"through it.\n\n{spelled(word)}\n\n{lines}\n\nBy hand I find {count}."
        )
        answer = [
            {"type": "text", "text": by_hand},
            {"type": "text", "text": "\n\nLet me check that with Python.\n\n"},
            *call_parts(f"'{word}'.count('{letter}')"),
            {"type": "text", "text": f"\n\nPython finds {count}.\n\nThe answer is:\n\n#### {count}"},
        ]
        return {"messages": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]}

    def evaluate(self, conversation: Conversation, completion: str) -> float:
        return same_number(conversation, completion)

    def answered(self, conversation: Conversation, completion: str) -> bool:
        return extract_answer(completion) is not None


class SimpleSpelling(_Spelling):
    """Spell a word. The words are shuffled, so that a small part of the list is not all from its beginning."""

    name = "SimpleSpelling"

    def __init__(self, size: int = 1000, split: str = "train", words: str = "", **slicing: int) -> None:
        super().__init__(size, split, words, **slicing)
        shuffled = list(self.words)
        random.Random(42).shuffle(shuffled)
        self.words = tuple(shuffled)

    def make(self, rng: random.Random) -> Conversation:
        word = rng.choice(self.words)
        messages = [
            {"role": "user", "content": f"Spell the word: {word}"},
            {"role": "assistant", "content": spelled(word)},
        ]
        return {"messages": messages}

    def evaluate(self, conversation: Conversation, completion: str) -> float:
        return float(completion.strip() == last_text(conversation))
