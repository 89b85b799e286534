"""What the invented world is made of: syllables, words, names, number words; and the hash that decides the split.

Words for spelling are chains of a few dozen syllables. A byte-pair tokenizer then learns pieces of a few letters, so
a word never seen before is a new order of pieces that were seen: spelling it is a skill, not a memory. (Whole
English words become single tokens that hide their letters; a small model does not learn to spell unseen ones.)
"""

from __future__ import annotations

import random
from hashlib import blake2b

ONSETS, VOWELS = "bdfgklmnprstvz", "aeiou"
CLOSED = ("ban", "del", "fir", "gon", "kum", "lan", "mer", "nil", "por", "run", "sal", "tem")
# Two of every three open syllables, evenly over onsets and vowels, so that the pairs inside a syllable are more
# frequent than the pairs across a border and the tokenizer's first merges are the syllables.
SYLLABLES = tuple(
    onset + vowel for i, onset in enumerate(ONSETS) for j, vowel in enumerate(VOWELS) if (i + 2 * j) % 3 != 0
)
SYLLABLES += CLOSED

COLOURS = ("red", "blue", "green", "pink", "white", "black", "grey", "brown")
PETS = ("cat", "dog", "fox", "hen", "horse", "goat", "duck", "mouse")
TOOLS = ("saw", "hammer", "brush", "spade", "knife", "rope", "drill", "pen")

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()


def fraction(*key: object) -> float:
    """A number in [0, 1) that depends on nothing but the key: the same on every machine, in every process."""
    digest = blake2b("/".join(map(str, key)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") / 2**64


def number_word(n: int) -> str:
    """0 -> 'zero', 42 -> 'forty-two'; 0 <= n < 100."""
    if n < 20:
        return _ONES[n]
    tens, ones = divmod(n, 10)
    return _TENS[tens - 2] + (f"-{_ONES[ones]}" if ones else "")


def invent(rng: random.Random, syllables: int) -> str:
    """A word of that many syllables, no syllable twice in a row."""
    word = [rng.choice(SYLLABLES)]
    while len(word) < syllables:
        if (piece := rng.choice(SYLLABLES)) != word[-1]:
            word.append(piece)
    return "".join(word)


def invent_names(rng: random.Random, count: int, syllables: int, taken: set[str]) -> tuple[str, ...]:
    """`count` capitalised names with different first three letters, none in `taken` (which grows)."""
    names: list[str] = []
    while len(names) < count:
        name = invent(rng, syllables).capitalize()
        if name not in taken and name[:3] not in {n[:3] for n in names}:
            names.append(name)
            taken.add(name)
    return tuple(names)
