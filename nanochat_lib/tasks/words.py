"""Words to spell: a list given by its path, else the words of the texts that every Python carries.

A run's spelling is reproducible only with the same list, so no list is picked up from the system by itself: its own
dictionary differs from machine to machine. Name it (`sft.words=/usr/share/dict/words`), or nanochat's list of 370
thousand words, one a line, to get its conversations.
"""

from __future__ import annotations

import functools
import re
from collections import Counter
from pathlib import Path

from nanochat_lib.errors import UserError
from nanochat_lib.primer.real_text import real_text

FEWEST = 100  # words; fewer would be learned by heart
SHORTEST, OFTEN = 3, 3  # of Python's own texts: letters of a word, and how often it must occur (names of one function)


@functools.lru_cache(maxsize=4)
def word_list(path: str = "") -> tuple[str, ...]:
    """Lower-case words of the letters a to z, each once: of the file `path` in its order, else ours in alphabetical.

    Lines that hold anything else (apostrophes, accents, several words) are left out. UserError for a file that cannot
    be read or has fewer than FEWEST words.
    """
    if not path:
        return own_words()
    place = Path(path).expanduser()
    try:
        lines = place.read_text(encoding="utf-8", errors="replace").split("\n")
    except OSError as error:
        raise UserError(f"{place} cannot be read ({error.strerror}); give a list with one word a line") from None
    plain = (line.strip().lower() for line in lines)
    words = tuple(dict.fromkeys(word for word in plain if word.isascii() and word.isalpha()))
    if len(words) < FEWEST:
        raise UserError(f"{place} holds {len(words)} words of the letters a to z, at least {FEWEST} are needed")
    return words


def own_words() -> tuple[str, ...]:
    """A few thousand English words: those that occur again and again in Python's own documentation."""
    counts: Counter[str] = Counter()
    for text in real_text().train:
        counts.update(re.findall(rf"(?<![\w.'-])[a-z]{{{SHORTEST},}}(?![\w(=]|\.\w|['-]\w)", text))
    return tuple(sorted(word for word, count in counts.items() if count >= OFTEN))
