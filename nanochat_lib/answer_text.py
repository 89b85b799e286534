"""The text of an answer while it grows: whole characters only, and no part of a stop string ever leaves."""

from __future__ import annotations

import codecs
from typing import Any, NamedTuple


class Part(NamedTuple):
    """What became ready: tokens, their mask (1 sampled, 0 inserted by a tool), and text."""

    tokens: list[int]
    mask: list[int]
    text: str


class AnswerText:
    """Takes tokens one by one; `take` returns what may be shown.

    Text ends before the first of the `stop` strings, wherever the borders of tokens are: the one that is complete
    first, and of several the longest. As long as the end of the text may become a stop string it is held back. A token
    is ready when all of its text is; one that reaches into the stop string never is, though text before the stop
    string that it holds is shown.
    """

    def __init__(self, tokenizer: Any, stop: tuple[str, ...] = ()) -> None:
        self.tokenizer, self.stop, self.stopped = tokenizer, stop, False
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._text = ""  # decoded and not taken yet
        self._tokens: list[tuple[int, int, int]] = []  # (token, mask, where its text ends in _text)

    def push(self, token: int, mask: int) -> bool:
        """One more token. True when it completes a stop string: the answer is over."""
        searched = len(self._text)
        self._text += self._decoder.decode(self.tokenizer.id_to_bytes(token))
        unfinished = bool(self._decoder.getstate()[0])  # its last character is still to come
        self._tokens.append((token, mask, len(self._text) + unfinished))
        if found := self._first_stop(searched):
            self.stopped, self._text = True, self._text[: found[1]]
        return self.stopped

    def take(self, final: bool = False) -> Part:
        """What is ready. `final`: nothing follows, so all the rest; half a character becomes U+FFFD."""
        if final and not self.stopped:
            self._text += self._decoder.decode(b"", final=True)
        ready = len(self._text) - (0 if final or self.stopped else self._may_become_stop())
        tokens = [t for t in self._tokens if t[2] <= ready]
        self._tokens = [(token, mask, end - ready) for token, mask, end in self._tokens[len(tokens) :]]
        text, self._text = self._text[:ready], self._text[ready:]
        return Part([t[0] for t in tokens], [t[1] for t in tokens], text)

    def _first_stop(self, searched: int) -> tuple[int, int] | None:
        """(end, start) of the stop string that ends first; none ends in the first `searched` characters."""
        places = []
        for stop in self.stop:
            start = self._text.find(stop, max(searched - len(stop) + 1, 0))
            if start >= 0:
                places.append((start + len(stop), start))
        return min(places, default=None)

    def _may_become_stop(self) -> int:
        """Length of the longest end of the text that is the beginning of a stop string."""
        longest = max((len(stop) for stop in self.stop), default=0)
        ends = (self._text[-n:] for n in range(min(longest - 1, len(self._text)), 0, -1))
        return next((len(end) for end in ends if any(stop.startswith(end) for stop in self.stop)), 0)
