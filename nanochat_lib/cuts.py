"""Where to cut a text so that its parts need no look-ahead to be split into pieces, which makes encoding twice as fast.

The only part of `bpe.split_pattern` that looks ahead leaves the last of several blanks to what follows them, and one
such part makes the pattern engine try all of the pattern step by step, where it could run a table. A text that is cut
before each last blank needs it nowhere: what is left of the blanks is the end of a part and one piece.

The pattern's possessive signs slow the engine too and decide nothing. What may be taken before a word is no letter, so
that giving it back helps no word, and behind a run of punctuation nothing has to follow.
"""

from __future__ import annotations

import re

from nanochat_lib import bpe

LINES = r"\n\r"
RARE = (
    "\t\x0b\x0c\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000"  # blanks beside ' ': what tiktoken calls \s
)
_RUN = re.compile(rf"[ {RARE}]{{2,}}(?=[^ {RARE}{LINES}])")
_SPACES = re.compile(rf"  +(?=[^ {LINES}])")  # the same where no rare blank occurs: it finds the next run much faster
PART = 50  # characters; parts that are shorter on average cost more calls than they save


def without_look_ahead(pattern: str) -> str | None:
    """The pattern that splits the parts of `cut` as `pattern` splits their whole; None when it is not known."""
    if pattern not in map(bpe.split_pattern, range(1, 10)):
        return None
    return pattern.replace("?+", "?").replace("++", "+").replace(r"|\s+(?!\S)|", "|")


def cut(text: str, shortest: int = PART) -> list[str] | None:
    """The parts of a text, joined the text again; None when they are shorter than `shortest` characters on average."""
    simple = text.isascii() and not any(blank in text for blank in "\t\x0b\x0c")
    run = _SPACES if simple else _RUN
    parts, start = [], 0
    for found in run.finditer(text):
        end = found.end() - 1
        parts.append(text[start:end])
        start = end
    parts.append(text[start:])
    return parts if len(parts) * shortest <= len(text) or len(parts) == 1 else None
