"""Byte-pair encoding in plain Python: the few lines that the fast trainer and the fast encoder must agree with.

Text is cut into pieces by a pattern, a piece becomes its UTF-8 bytes, and the commonest adjacent pair of tokens becomes
a new token, again and again (Gage 1994; Sennrich et al. 2016; over bytes: GPT-2). Slow and easy to check: use it to
learn from and to test against, and `tokenizer.Tokenizer` for real work.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from itertools import pairwise

import regex

BLANKS = r"\s*[\r\n]|\s+(?!\S)|\s+"  # up to the last line break | all but the last, which goes to what follows | all


def split_pattern(digits: int = 2) -> str:
    """The pattern that cuts text into pieces: GPT-4's, with digits in runs of up to `digits` (GPT-4: three).

    The first alternative that matches wins. nanochat takes two: a small vocabulary has no room for a thousand
    three-digit tokens.
    """
    contractions = r"'(?i:[sdmt]|ll|ve|re)"  # 's 'd 'm 't 'll 've 're, in any case
    letters = r"[^\r\n\p{L}\p{N}]?+\p{L}+"  # with one space or other sign glued to their front
    numbers = r"\p{N}{1," + str(digits) + "}"  # without a space
    punctuation = r" ?[^\s\p{L}\p{N}]++[\r\n]*"  # with a space before and line breaks after
    return "|".join((contractions, letters, numbers, punctuation, BLANKS))


SPLIT_PATTERN = split_pattern()


def split(text: str) -> list[str]:
    """Cuts text into the pieces inside which merges happen. Joined again they are the text."""
    return regex.findall(SPLIT_PATTERN, text)


def count_pairs(words: Iterable[tuple[list[int], int]]) -> Counter[tuple[int, int]]:
    """How often each pair of neighbours occurs in words given as (token ids, occurrences).

    Every adjacent position counts, overlapping ones too: `aaaa` holds the pair (a, a) three times.
    """
    pairs: Counter[tuple[int, int]] = Counter()
    for ids, occurrences in words:
        for pair in pairwise(ids):
            pairs[pair] += occurrences
    return pairs


def merge(tokens: list, pair: tuple, new: object) -> list:
    """Puts `new` wherever `pair` stands, from left to right, never overlapping: `a a a` becomes `aa a`."""
    out, i = [], 0
    while i < len(tokens):
        if i + 1 < len(tokens) and (tokens[i], tokens[i + 1]) == pair:
            out.append(new)
            i += 2
        else:
            out.append(tokens[i])
            i += 1
    return out


def learn_merges(texts: Iterable[str], count: int) -> list[bytes]:
    """Learns up to `count` merges and returns the new tokens' bytes in the order learned; token i has the id 256 + i.

    Each round takes the commonest pair, among equals the smallest pair of ids. Fewer come back when no pair is left.
    """
    pieces = Counter(piece for text in texts for piece in split(text))
    words = [(list(piece.encode()), occurrences) for piece, occurrences in pieces.items()]
    tokens = [bytes([byte]) for byte in range(256)]
    for _ in range(count):
        pairs = count_pairs(words)
        if not pairs:
            break
        pair = min(pairs, key=lambda p: (-pairs[p], p))
        new_id = len(tokens)
        tokens.append(tokens[pair[0]] + tokens[pair[1]])
        words = [(merge(ids, pair, new_id), occurrences) for ids, occurrences in words]
    return tokens[256:]


def encode_piece(piece: bytes, ranks: dict[bytes, int]) -> list[int]:
    """Encodes one piece: joins the neighbours whose joint bytes have the lowest rank, until no neighbours form a token.

    All places of the lowest rank are joined in one round, which changes nothing, since a new token only takes part in
    pairs of a higher rank; so the time grows with the length of the piece, not with its square.
    """
    parts = [bytes([byte]) for byte in piece]
    while True:
        known = {(a, b): ranks[a + b] for a, b in set(pairwise(parts)) if a + b in ranks}
        if not known:
            return [ranks[part] for part in parts]
        a, b = min(known, key=known.get)
        parts = merge(parts, (a, b), a + b)


def encode(text: str, merges: list[bytes]) -> list[int]:
    """The ids of a text under merges from `learn_merges`, special tokens treated as plain text."""
    ranks = {token: rank for rank, token in enumerate([bytes([byte]) for byte in range(256)] + merges)}
    return [token_id for piece in split(text) for token_id in encode_piece(piece.encode(), ranks)]
