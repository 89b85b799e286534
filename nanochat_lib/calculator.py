"""The tool a chat model may call: arithmetic and counting letters, read by a small parser, never run as code.

Accepted language (nanochat's): sums, differences, products, quotients (`/` and `//`) of decimal numbers with brackets,
and `'text'.count('part')`. Anything else has no result. Unlike in nanochat, commas are dropped only from numbers, so
that a counted text keeps its own. Text, nesting and result are bounded, so every call ends within a millisecond, in any
thread, without a timer.
"""

from __future__ import annotations

import re

MAX_CHARS = 256  # longest text that is read; it keeps every value below 10^256, so no float overflows
MAX_DEPTH = 32  # deepest nesting of brackets
MAX_RESULT_CHARS = 64  # longest result, as printed

ARITHMETIC = re.compile(r"[0-9*+\-/.() ,]*")
COUNTING = re.compile(r"[a-zA-Z0-9'\"(). _,]*")
# nanochat refuses these words even inside a quoted text; models met that behaviour in training, so it is kept.
REFUSED = (
    "__", "import", "exec", "eval", "compile", "open", "file", "input", "raw_input", "globals", "locals", "vars", "dir",
    "getattr", "setattr", "delattr", "hasattr",
)  # fmt: skip
TOKEN = re.compile(
    r" *(?:(?P<number>[0-9]+\.[0-9]*|\.[0-9]+|[0-9]+)"
    r"|(?P<text>'[^']*'|\"[^\"]*\")"
    r"|(?P<sign>\.count\(|//|[-+*/()]))"
)

Value = int | float | str


class NoResult(Exception):
    """The text is not in the accepted language, or its value is not a printable number."""


def calculate(text: str) -> int | float | None:
    """The value of `text`, or None when there is none. `result_text(value)` is what the model gets to see.

    calculate("1,000*2") == 2000; calculate("'strawberry'.count('r')") == 3; calculate("2**3") is None.
    """
    try:
        value = Parser(tokens_of(text)).whole()
    except (NoResult, ZeroDivisionError):
        return None
    return None if isinstance(value, str) or len(str(value)) > MAX_RESULT_CHARS else value


def result_text(value: int | float) -> str:
    """A result as it stands in a conversation, in training and in a chat: 120000.0 is "120000", 10/3 has 12 digits.

    Whole numbers are written as such, whatever way they came about: the solutions a model learns from do so too.
    """
    if isinstance(value, float):
        value = value if value.is_integer() else float(f"{value:.12g}")
        value = int(value) if value.is_integer() and abs(value) < 1e15 else value
    return str(value)


def tokens_of(text: str) -> list[tuple[str, str]]:
    """(kind, text) pairs of the accepted language; NoResult for a foreign character."""
    if not isinstance(text, str) or len(text) > MAX_CHARS:
        raise NoResult
    if ARITHMETIC.fullmatch(text):
        text = re.sub(r"(?<=[0-9]),(?=[0-9])", "", text)  # 1,000 is one number; every other comma is foreign
    elif not COUNTING.fullmatch(text) or ".count(" not in text or any(word in text.lower() for word in REFUSED):
        raise NoResult
    tokens, at, text = [], 0, text.rstrip(" ")
    while at < len(text):
        match = TOKEN.match(text, at)
        if match is None:
            raise NoResult
        tokens.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return tokens + [("end", "")]


def numbers(*values: Value) -> tuple[int | float, ...]:
    """The same values; NoResult when one is a text."""
    if any(isinstance(value, str) for value in values):
        raise NoResult
    return values


class Parser:
    """Recursive descent with Python's precedence: signs, then `* / //`, then `+ -`; left to right."""

    def __init__(self, tokens: list[tuple[str, str]]) -> None:
        self.tokens, self.at, self.depth = tokens, 0, 0

    def take(self, *signs: str) -> str | None:
        kind, sign = self.tokens[self.at]
        if kind != "sign" or sign not in signs:
            return None
        self.at += 1
        return sign

    def whole(self) -> Value:
        value = self.sum()
        if self.tokens[self.at][0] != "end":
            raise NoResult
        return value

    def sum(self) -> Value:
        value = self.product()
        while sign := self.take("+", "-"):
            left, right = numbers(value, self.product())
            value = left + right if sign == "+" else left - right
        return value

    def product(self) -> Value:
        value = self.signed()
        while sign := self.take("*", "/", "//"):
            left, right = numbers(value, self.signed())
            value = left * right if sign == "*" else left / right if sign == "/" else left // right
        return value

    def signed(self) -> Value:
        signs = ""
        while sign := self.take("-", "+"):
            signs += sign
        value = self.counted()
        if signs:
            (value,) = numbers(value)
        return -value if signs.count("-") % 2 else value

    def counted(self) -> Value:
        value = self.atom()
        while self.take(".count("):
            part = self.bracketed()
            if not isinstance(value, str) or not isinstance(part, str):
                raise NoResult
            value = value.count(part)
        return value

    def atom(self) -> Value:
        if self.take("("):
            return self.bracketed()
        kind, text = self.tokens[self.at]
        self.at += 1
        if kind == "text":
            return text[1:-1]
        if kind != "number" or (text.isdigit() and text[0] == "0" and text.strip("0")):  # 007 is no number in Python
            raise NoResult
        return float(text) if "." in text else int(text)

    def bracketed(self) -> Value:
        """What follows an opening bracket, up to and with the closing one."""
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise NoResult
        value = self.sum()
        self.depth -= 1
        if not self.take(")"):
            raise NoResult
        return value
