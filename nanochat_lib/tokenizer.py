"""Text to token ids and back: byte-level BPE in the GPT-4 family with nanochat's nine special tokens.

rustbpe learns the merges, tiktoken encodes with them (`bpe` holds the same two algorithms in plain Python). Ids 0..255
are the bytes, then come the merges in the order learned, then the special tokens. Nothing is normalised (no Unicode
form, no lower case, no blanks), so decode(encode(text)) == text for every text of whole characters;
`replace_surrogates` says what becomes of halves of characters.
"""

from __future__ import annotations

import codecs
import hashlib
import io
import json
import operator
import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import regex
import tiktoken

from nanochat_lib import bpe, cuts, storage
from nanochat_lib.bpe import SPLIT_PATTERN
from nanochat_lib.errors import UserError
from nanochat_lib.tokenizer_input import capped, replace_surrogates, shown

SPECIAL_TOKENS = (
    "<|bos|>",  # first token of every document and conversation; fills what is left of a row
    "<|user_start|>",
    "<|user_end|>",
    "<|assistant_start|>",
    "<|assistant_end|>",  # ends a generated answer
    "<|python_start|>",  # the assistant calls the tool …
    "<|python_end|>",
    "<|output_start|>",  # … and its result is put in between these
    "<|output_end|>",
)
FORMAT = "nanochat tokenizer 1"
LONG_BLANKS = 100_000  # runs of blanks from this length on are cut by us


def byte_lengths(tokens: Sequence[bytes], special: int) -> np.ndarray:
    """(V,) int32: the length of each of `tokens`, then a 0 for each of `special` tokens, which stand for no text."""
    return np.array([len(token) for token in tokens] + [0] * special, np.int32)


class Tokenizer:
    """Encodes and decodes with a fixed list of merges. Safe to use from several threads at once."""

    def __init__(
        self, merges: Sequence[bytes], special_tokens: Sequence[str] = SPECIAL_TOKENS, pattern: str = SPLIT_PATTERN
    ) -> None:
        """`merges`: the bytes of every learned token, in the order learned (rank = id = 256 + index).

        Raises UserError when a merge is no new token made of two or more bytes, or a special token stands there twice.
        """
        ordinary = [bytes([byte]) for byte in range(256)] + [bytes(token) for token in merges]
        ranks = {token: rank for rank, token in enumerate(ordinary)}
        if len(ranks) < len(ordinary) or b"" in ranks:
            raise UserError("the merges of a tokenizer must be different tokens of two or more bytes; train it again")
        if len(set(special_tokens)) < len(special_tokens):
            raise UserError(f"a special token is listed twice: {', '.join(special_tokens)}")
        self.pattern = pattern
        self.merges = tuple(ordinary[256:])
        self.special_tokens = {name: len(ordinary) + i for i, name in enumerate(special_tokens)}
        self._bytes = ordinary + [name.encode() for name in special_tokens]
        self._encoding = self._with(pattern)

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        vocab_size: int,
        *,
        max_chars: int = 2_000_000_000,
        doc_cap: int = 10_000,
        strict: bool = True,
        pattern: str = SPLIT_PATTERN,
        total_chars: int | None = None,
    ) -> Tokenizer:
        """Learns `vocab_size` tokens (special ones included) from a stream of documents.

        Reads `doc_cap` characters of each document and stops after `max_chars`; see `capped`. `total_chars`, where the
        caller knows the corpus's size, makes the progress line's time left right. Raises UserError for a corpus without
        text, and, if `strict`, when the text holds fewer pairs than asked for, with the largest size it allows;
        otherwise the tokenizer is smaller than asked: read its `vocab_size`.
        """
        import rustbpe

        smallest = 256 + len(SPECIAL_TOKENS)
        if vocab_size < smallest:
            raise UserError(f"vocab_size {vocab_size:,} is too small: bytes and special tokens alone take {smallest}")
        trainer = rustbpe.Tokenizer()
        documents = shown(capped(texts, max_chars, doc_cap), min(max_chars, total_chars or max_chars))
        trainer.train_from_iterator(documents, vocab_size - len(SPECIAL_TOKENS), pattern=pattern)
        ranked = sorted((rank, bytes(token)) for token, rank in trainer.get_mergeable_ranks())
        tokenizer = cls([token for _, token in ranked[256:]], pattern=pattern)
        if strict and tokenizer.vocab_size < vocab_size:
            raise UserError(
                f"vocab_size {vocab_size:,} is more than this text allows: "
                f"ask for at most {tokenizer.vocab_size:,}, or give more text"
            )
        return tokenizer

    @property
    def vocab_size(self) -> int:
        """V, special tokens included: the real size, which may be below the one asked for in training."""
        return len(self._bytes)

    @property
    def bos_id(self) -> int:
        return self.encode_special("<|bos|>")

    @property
    def fingerprint(self) -> str:
        """SHA-256 (hex) over all that decides ids: pattern, merges, special tokens. Equal ones encode equally."""
        content = [self.pattern, [token.hex() for token in self.merges], list(self.special_tokens)]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()

    def encode(
        self,
        text: str | Sequence[str],
        prepend: int | str | None = None,
        append: int | str | None = None,
        num_threads: int = 8,
    ) -> list[int] | list[list[int]]:
        """Ids of a string, or a list of ids for each of several strings, in their order.

        The names of special tokens inside a text are ordinary text. `prepend` and `append` (an id or the name of a
        special token) go to the front and the back of every row.
        """
        front, back = self._affix(prepend), self._affix(append)
        if isinstance(text, str):
            return front + self._encode(text) + back
        rows = list(text) if isinstance(text, Iterable) else [text]
        for i, row in enumerate(rows):
            if not isinstance(row, str):
                raise UserError(f"encode takes a string or a list of strings; item {i} is a {type(row).__name__}")
        return _in_threads(lambda row: front + self._encode(row) + back, rows, num_threads)

    __call__ = encode

    def encode_arrays(self, texts: Sequence[str], prepend: int, num_threads: int = 8) -> list[np.ndarray]:
        """`encode` of several strings as int32 arrays, in half the time: no Python numbers, no look-ahead (`cuts`)."""
        first = np.array([prepend], np.int32)

        def row(text: str) -> np.ndarray:
            text = replace_surrogates(text)
            if len(text) >= LONG_BLANKS:
                return np.concatenate([first, self._encode(text)], dtype=np.int32)
            parts = cuts.cut(text) if self._quick else None
            encoding = self._quick if parts else self._encoding
            ids = [encoding.encode_to_numpy(part, disallowed_special=()) for part in parts or [text]]
            return np.concatenate([first, *ids], dtype=np.int32, casting="unsafe")

        return _in_threads(row, texts, num_threads)

    @cached_property
    def _quick(self) -> tiktoken.Encoding | None:
        """For the parts that `cuts.cut` makes of a text; None for a pattern that it does not know."""
        pattern = cuts.without_look_ahead(self.pattern)
        return pattern and self._with(pattern)

    def _with(self, pattern: str) -> tiktoken.Encoding:
        ranks = {token: rank for rank, token in enumerate(self._bytes[: self.vocab_size - len(self.special_tokens)])}
        return tiktoken.Encoding("nanochat", pat_str=pattern, mergeable_ranks=ranks, special_tokens=self.special_tokens)

    def encode_special(self, name: str) -> int:
        """The id of a special token. UserError, with the valid names, for anything else."""
        if name not in self.special_tokens:
            valid = ", ".join(self.special_tokens)
            raise UserError(f"{name!r} is not a special token of this tokenizer; it has {valid}")
        return self.special_tokens[name]

    def id_to_bytes(self, token_id: int) -> bytes:
        """The bytes of one token; a special token's are its name. UserError for an id outside the vocabulary."""
        index = operator.index(token_id)
        if not 0 <= index < len(self._bytes):
            raise UserError(
                f"token id {index} is outside the vocabulary of {len(self._bytes):,} tokens (ids 0 to "
                f"{len(self._bytes) - 1:,}): it comes from another tokenizer or from logits of a padded vocabulary"
            )
        return self._bytes[index]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; special tokens appear by name, bytes that form no character become U+FFFD."""
        return b"".join(self.id_to_bytes(i) for i in ids).decode("utf-8", errors="replace")

    def token_bytes(self) -> np.ndarray:
        """(V,) int32: bytes of text behind each id, 0 for special tokens. The divisor of bits per byte.

        Counted on the raw bytes: decoding first would turn the half of a character into the three bytes of U+FFFD.
        """
        special = len(self.special_tokens)
        return byte_lengths(self._bytes[: self.vocab_size - special], special)

    def save(self, folder: str | Path) -> None:
        """Writes tokenizer.json (plain data) and token_bytes.npy into `folder`, each whole or not at all."""
        folder = Path(folder)
        table = io.BytesIO()
        np.save(table, self.token_bytes(), allow_pickle=False)
        storage.atomic_write_bytes(folder / "token_bytes.npy", table.getvalue())
        content = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "pattern": self.pattern,
            "special_tokens": self.special_tokens,
            "merges": [token.hex() for token in self.merges],
        }
        storage.atomic_write_json(folder / "tokenizer.json", content)

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Reads what `save` wrote. UserError, naming the file, if either file is missing, damaged or edited."""
        path, table = Path(folder) / "tokenizer.json", Path(folder) / "token_bytes.npy"
        content = storage.read_json(path)
        found = content.get("format") if isinstance(content, dict) else None
        if found != FORMAT:
            raise UserError(f"{path} has the format {found!r}, not {FORMAT!r}: train the tokenizer again")
        try:
            specials = sorted(content["special_tokens"], key=content["special_tokens"].__getitem__)
            tokenizer = cls([bytes.fromhex(token) for token in content["merges"]], specials, content["pattern"])
            intact = content["fingerprint"] == tokenizer.fingerprint
            intact = intact and content["special_tokens"] == tokenizer.special_tokens
        except (UserError, KeyError, TypeError, ValueError, AttributeError):
            intact = False
        if not intact:
            raise UserError(f"{path} was changed or damaged after saving: restore it or train the tokenizer again")
        try:
            belongs = np.array_equal(np.load(table, allow_pickle=False), tokenizer.token_bytes())
        except (OSError, ValueError, EOFError):
            belongs = False
        if not belongs:
            raise UserError(
                f"{table} is missing, damaged or another tokenizer's: restore it or train the tokenizer again"
            )
        return tokenizer

    def _affix(self, token: int | str | None) -> list[int]:
        if token is None:
            return []
        if isinstance(token, str):
            return [self.encode_special(token)]
        self.id_to_bytes(token)
        return [operator.index(token)]

    def _encode(self, text: str) -> list[int]:
        text = replace_surrogates(text)
        if len(text) < LONG_BLANKS or not self.pattern.endswith(bpe.BLANKS):
            return self._encoding.encode_ordinary(text)
        return self._encode_long(text)

    def _encode_long(self, text: str) -> list[int]:
        """Same ids as tiktoken's own, also for runs of blanks so long that its pattern engine overflows its stack.

        Such runs are cut here, where the pattern cuts them (see `bpe.BLANKS`); the text between goes the usual way.
        """
        ids, start = [], 0
        for run in regex.finditer(rf"(?<!\s)\s{{{LONG_BLANKS},}}", text):
            begin, end = run.span()
            if begin and regex.match(r"[^\s\p{L}\p{N}]", text[begin - 1]):  # punctuation takes the line breaks after it
                begin = regex.compile(r"[\r\n]*").match(text, begin).end()
            ids += self._encoding.encode_ordinary(text[start:begin])
            last_break = max(text.rfind("\n", begin, end), text.rfind("\r", begin, end)) + 1
            middle = max(begin, last_break)  # up to the last line break: one piece
            start = end if end == len(text) else max(end - 1, middle)  # the last blank belongs to what follows
            for piece in (text[begin:middle], text[middle:start]):
                ids += self._encoding._encode_single_piece(piece) if piece else []
        return ids + self._encoding.encode_ordinary(text[start:])


def _in_threads(encode: Callable[[str], Any], texts: Sequence[str], most: int) -> list:
    """`encode` of each text, in up to `most` threads: tiktoken lets go of the interpreter's lock meanwhile."""
    threads = min(most, os.cpu_count() or 1)  # more than cores only hand the lock to each other
    if len(texts) < threads or threads == 1:
        return [encode(text) for text in texts]
    share = -(-len(texts) // threads)  # texts a thread; handing over each alone costs more than encoding it
    shares = [texts[i : i + share] for i in range(0, len(texts), share)]
    with ThreadPoolExecutor(threads) as pool:
        return [ids for part in pool.map(lambda part: [encode(text) for text in part], shares) for ids in part]


class StreamDecoder:
    """Decodes a growing answer token by token: `push(id)` returns the text that has become whole, possibly "".

    A character whose bytes are spread over several tokens is held back until it is complete. What all calls return,
    joined, equals `decode` of all ids.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def push(self, token_id: int) -> str:
        return self._decoder.decode(self._tokenizer.id_to_bytes(token_id))

    def flush(self) -> str:
        """The rest at the end: "" unless the answer stopped inside a character, which shows as U+FFFD."""
        return self._decoder.decode(b"", final=True)


def train_bpe_python(texts: Iterable[str], vocab_size: int) -> list[bytes]:
    """The merges of `Tokenizer.train(texts, vocab_size)`, learned by the plain Python of `bpe`: slow, to compare."""
    return bpe.learn_merges(map(replace_surrogates, texts), vocab_size - 256 - len(SPECIAL_TOKENS))


def single_token_after(tokenizer: Tokenizer, prefix: str, text: str) -> int:
    """The one id that `text` adds when it follows `prefix`: the id to score for an answer such as a letter.

    `A` and ` A` are different tokens, and a token may even swallow the end of the prefix (`=A`). Raises UserError
    unless encode(prefix + text) is encode(prefix) and exactly one id more.
    """
    before, both = tokenizer.encode(prefix), tokenizer.encode(prefix + text)
    if both[:-1] != before or len(both) != len(before) + 1:
        tail = [tokenizer.id_to_bytes(i).decode("utf-8", "backslashreplace") for i in both[-4:]]
        raise UserError(
            f"{text!r} is not one token after {prefix[-20:]!r}: together they end in the tokens {tail}; "
            "change the blank before the answer, or the answer"
        )
    return both[-1]
