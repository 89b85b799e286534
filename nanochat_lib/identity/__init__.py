"""Identity conversations: what a chat model says of itself, made from templates, so that it knows its own name.

nanochat lets a large model write them; these need no other model and no network. Each conversation is drawn by its own
number: who asks (PERSONAS), about what (TOPICS, by category) and how it goes on (DYNAMICS).
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from pathlib import Path

from nanochat_lib.errors import UserError
from nanochat_lib.identity.texts import (
    ASSURANCES,
    BRIDGES,
    CLOSINGS,
    DOUBTS,
    GREETINGS,
    OPENERS,
    PERSONAS,
    THANKS,
    TOPICS,
    Persona,
    Topic,
)
from nanochat_lib.storage import atomic_write_text

COUNT = 1000  # conversations of nanochat's own file
MOST_TRIES = 1000  # draws for a conversation that is not there yet
LONGEST_NAME = 100  # characters

_FIRST = re.compile(r"((?:^|[.!?] ))\{maker\}")

Message = dict[str, str]
Turns = list[tuple[str, str]]  # (user, assistant)


class Draw:
    """The choices of one conversation."""

    def __init__(self, rng: random.Random, names: dict[str, str]) -> None:
        self.rng, self.names = rng, names
        self.persona: Persona = PERSONAS[rng.choice(list(PERSONAS))]
        self.category = rng.choice(list(TOPICS))
        self.topics = rng.sample(TOPICS[self.category], len(TOPICS[self.category]))

    def fill(self, text: str, **more: str) -> str:
        text = _FIRST.sub(r"\1{Maker}", text)  # "our class" begins a sentence as "Our class"
        return text.format(**self.names, **more)

    def pair(self, topic: Topic) -> tuple[str, str]:
        return self.fill(self.rng.choice(topic.asks)), self.fill(self.rng.choice(topic.answers))

    def opening(self, topic: Topic) -> tuple[str, str]:
        """A first question in the persona's manner."""
        ask, answer = self.pair(topic)
        words = (self.rng.choice(self.persona.before), ask, self.rng.choice(self.persona.after))
        text = " ".join(word for word in words if word).replace(" !!", "!!")
        return self.styled(text), answer

    def following(self, topic: Topic, bridges: bool = True) -> tuple[str, str]:
        ask, answer = self.pair(topic)
        bridge = self.rng.choice(BRIDGES) if bridges else ""
        ask = ask[0].lower() + ask[1:] if bridge == "And" and not ask.startswith("I ") else ask
        return self.styled(f"{bridge} {ask}".strip()), answer

    def elsewhere(self) -> Topic:
        """A topic of another category."""
        other = self.rng.choice([category for category in TOPICS if category != self.category])
        return self.rng.choice(TOPICS[other])

    def styled(self, text: str) -> str:
        if self.persona.look in ("lower", "loose"):
            text = text.lower()
        if self.persona.look == "loose":
            text = text.rstrip("?.!")
        return text.replace("?", "?!") if self.persona.look == "loud" else text


def one_question(draw: Draw) -> Turns:
    return [draw.opening(draw.topics[0])]


def two_of_a_kind(draw: Draw) -> Turns:
    return [draw.opening(draw.topics[0]), draw.following(draw.topics[1])]


def change_of_subject(draw: Draw) -> Turns:
    return [draw.opening(draw.topics[0]), draw.following(draw.elsewhere())]


def three_questions(draw: Draw) -> Turns:
    return [draw.opening(draw.topics[0]), draw.following(draw.topics[1]), draw.following(draw.elsewhere())]


def greeting_first(draw: Draw) -> Turns:
    hello = draw.styled(draw.rng.choice(OPENERS)), draw.fill(draw.rng.choice(GREETINGS))
    return [hello, draw.following(draw.topics[0], bridges=False)]


def doubt(draw: Draw) -> Turns:
    """The first answer is doubted, and said again in other words."""
    topic = draw.topics[0]
    question, answer = draw.opening(topic)
    again = draw.rng.choice([text for text in map(draw.fill, topic.answers) if text != answer])
    return [
        (question, answer),
        (draw.styled(draw.rng.choice(DOUBTS)), draw.fill(draw.rng.choice(ASSURANCES), again=again)),
    ]


def thanks(draw: Draw) -> Turns:
    return [draw.opening(draw.topics[0]), (draw.styled(draw.rng.choice(THANKS)), draw.rng.choice(CLOSINGS))]


def two_at_once(draw: Draw) -> Turns:
    """Two questions in one message, answered together."""
    (first, answer), (second, more) = draw.opening(draw.topics[0]), draw.pair(draw.topics[1])
    return [(f"{first} {draw.styled(second)}", f"{answer} {more}")]


def full_visit(draw: Draw) -> Turns:
    return [*greeting_first(draw), draw.following(draw.elsewhere()), thanks(draw)[1]]


def asked_again(draw: Draw) -> Turns:
    """The same question in other words: the same thing is true."""
    topic = draw.topics[0]
    return [draw.opening(topic), draw.following(topic)]


DYNAMICS: tuple[Callable[[Draw], Turns], ...] = (
    one_question, two_of_a_kind, change_of_subject, three_questions, greeting_first, doubt, thanks, two_at_once,
    full_visit, asked_again,
)  # fmt: skip


def conversations(name: str, maker: str, count: int = COUNT, seed: int = 0) -> list[list[Message]]:
    """`count` different conversations, each a list of messages, user and assistant in turn.

    The same for the same arguments; the first n of a longer list are the shorter list. Raises UserError for an empty or
    overlong name or maker and a count below 1.
    """
    for what, value in (("name", name), ("maker", maker)):
        if not value.strip() or len(value) > LONGEST_NAME or any(not c.isprintable() for c in value):
            raise UserError(f"--{what} {value!r} must be 1 to {LONGEST_NAME} printable characters")
    if count < 1:
        raise UserError(f"--count {count} must be at least 1")
    name, maker = name.strip(), maker.strip()
    names = {"name": name, "maker": maker, "Maker": maker[0].upper() + maker[1:]}
    found: list[list[Message]] = []
    seen: set[str] = set()
    for index in range(count):
        for attempt in range(MOST_TRIES):
            rng = random.Random(f"{seed}/{index}/{attempt}")
            turns = rng.choice(DYNAMICS)(Draw(rng, names))
            messages = [
                {"role": role, "content": text}
                for turn in turns
                for role, text in zip(("user", "assistant"), turn, strict=True)
            ]
            line = json.dumps(messages)
            if line not in seen:
                break
        else:
            raise UserError(f"--count {count} is more than the templates give: about {index:,} different conversations")
        seen.add(line)
        found.append(messages)
    return found


def write(path: str | Path, name: str, maker: str, count: int = COUNT, seed: int = 0, force: bool = False) -> int:
    """Writes them to `path`, one JSON list of messages a line; returns how many. An existing file needs `force`."""
    path = Path(path)
    if path.exists() and not force:
        raise UserError(f"{path} exists: choose another file with --out, or replace it with --force")
    made = conversations(name, maker, count, seed)
    atomic_write_text(path, "".join(json.dumps(messages, ensure_ascii=False) + "\n" for messages in made))
    return len(made)
