"""Messages as the model reads them: ids with nanochat's special tokens around turns and tool calls, and what must fit.

No order of roles is demanded. Text never becomes a special token, with one exception: where an assistant's message
holds a whole tool call by its tokens' names, as this server sends them, it is that call again, so that the model sees
in the history what it wrote. Whoever sends a conversation could make up the assistant's part of it anyway.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from nanochat_lib.conversation import PARTS, user_turn
from nanochat_lib.serve.refusal import Refused

Turn = tuple[str, str]  # role "user" or "assistant", content
CALL = re.compile(
    r"<\|python_start\|>(?P<python>(?:(?!<\|).)*)<\|python_end\|>"
    r"|<\|output_start\|>(?P<python_output>(?:(?!<\|).)*)<\|output_end\|>",
    re.DOTALL,
)


def parts_of(content: str) -> list[tuple[str, str]]:
    """(type, text) of an assistant's message: "text", "python" and "python_output", as in conversation.PARTS."""
    parts, at = [], 0
    for match in CALL.finditer(content):
        parts += [("text", content[at : match.start()])] if match.start() > at else []
        parts.append((match.lastgroup, match[match.lastgroup]))
        at = match.end()
    return parts + ([("text", content[at:])] if at < len(content) else [])


def turn_ids(tokenizer: Any, role: str, content: str) -> tuple[list[int], list[int]]:
    """(ids, mask) of one message; mask 1: what a model writes itself."""
    if role == "user":
        ids = user_turn(tokenizer, content)
        return ids, [0] * len(ids)
    special = tokenizer.encode_special
    ids, mask = [special("<|assistant_start|>")], [0]
    for kind, text in parts_of(content):
        opening, closing, learn = PARTS[kind]
        new = tokenizer.encode(text)
        new = [special(opening), *new, special(closing)] if opening else new
        ids += new
        mask += [learn] * len(new)
    return [*ids, special("<|assistant_end|>")], [*mask, 1]


def exchanges(turns: Sequence[Turn]) -> list[list[Turn]]:
    """The turns in groups; each begins with a user's message (the first group: with whatever comes first)."""
    groups: list[list[Turn]] = []
    for turn in turns:
        if turn[0] == "user" or not groups:
            groups.append([])
        groups[-1].append(turn)
    return groups


def render(
    tokenizer: Any, turns: Sequence[Turn], room: int, *, answer: bool, forget: bool
) -> tuple[list[int], list[int], int]:
    """(ids, mask, exchanges forgotten) of a conversation of at most `room` tokens, begun by <|bos|>.

    `answer`: <|assistant_start|> follows. `forget`: the oldest exchanges go until the rest fits, never the last one;
    otherwise, and when that is not enough, Refused with the numbers.
    """
    groups = []
    for group in exchanges(turns):
        pairs = [turn_ids(tokenizer, *turn) for turn in group]
        groups.append(([i for ids, _ in pairs for i in ids], [m for _, mask in pairs for m in mask]))
    before, after = [tokenizer.bos_id], [tokenizer.encode_special("<|assistant_start|>")] if answer else []
    total = len(before) + len(after) + sum(len(ids) for ids, _ in groups)
    forgotten = 0
    while forget and total > room and forgotten < len(groups) - 1:
        total -= len(groups[forgotten][0])
        forgotten += 1
    if total > room:
        what = "the last message has" if forgotten else "the conversation has"
        raise Refused(
            400,
            f"{what} {total:,} tokens, and there is room for {room:,} in this model's context: "
            + ("shorten it" if len(groups) - forgotten < 2 else "shorten it or start a new one"),
            param="messages",
            code="context_length_exceeded",
        )
    kept = groups[forgotten:]
    ids = before + [i for part, _ in kept for i in part] + after
    mask = [0] + [m for _, part in kept for m in part] + [0] * len(after)
    return ids, mask, forgotten


def room_for_prompt(context: int, max_tokens: int, forget: bool) -> int:
    """Tokens a prompt may have: all but one of the context; where older turns can go, a quarter is kept to answer."""
    return context - (min(max_tokens, max(context // 4, 1)) if forget else 1)
