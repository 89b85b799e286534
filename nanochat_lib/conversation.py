"""Chat conversations as token ids with a mask that says which of them the model learns to write.

    {"messages": [{"role": "system" | "user" | "assistant", "content": str | list of parts}, …]}   (other keys: ignored)
    part = {"type": "text" | "python" | "python_output", "text": str}                              (assistants only)

Special tokens stand around turns and tool calls; every string is encoded on its own, so no token spans two of them. The
assistant's words, its tool calls and its <|assistant_end|> have mask 1: the last is how a model learns to stop. What
others write, tool results included, has mask 0. This is nanochat's format.
"""

from __future__ import annotations

from dataclasses import dataclass

from nanochat_lib.errors import UserError
from nanochat_lib.tokenizer import Tokenizer

# part type → (opening token, closing token, mask of the part and of both tokens)
PARTS = {
    "text": (None, None, 1),
    "python": ("<|python_start|>", "<|python_end|>", 1),
    "python_output": ("<|output_start|>", "<|output_end|>", 0),
}
GREEN, RED, GREY, RESET = "\033[32m", "\033[31m", "\033[90m", "\033[0m"


@dataclass(frozen=True)
class Rendered:
    """A conversation as the model reads it. ids and mask have one length, at most max_tokens."""

    ids: list[int]
    mask: list[int]  # 1 where the token of the same index is one to learn, else 0
    truncated: bool  # max_tokens cut something off

    @property
    def supervised(self) -> int:
        """Tokens to learn. 0 (the cut fell before the first answer) trains nothing: drop such a row and count it."""
        return sum(self.mask)


def user_turn(tokenizer: Tokenizer, content: str) -> list[int]:
    """A user's message between its two special tokens. Whatever `content` says, it holds no third one."""
    return tokenizer.encode(content, prepend="<|user_start|>", append="<|user_end|>")


def render_turns(tokenizer: Tokenizer, messages: list[dict]) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """(ids, mask, spans [begin, end) of tool calls and results) of checked messages without a system message."""
    ids: list[int] = [tokenizer.bos_id]
    mask: list[int] = [0]
    tool_spans = []

    def special(name: str, learn: int) -> None:
        ids.append(tokenizer.encode_special(name))
        mask.append(learn)

    def text(string: str, learn: int) -> None:
        new = tokenizer.encode(string)
        ids.extend(new)
        mask.extend([learn] * len(new))

    for message in messages:
        role, content = message["role"], message["content"]
        if role == "user":
            turn = user_turn(tokenizer, content)
            ids.extend(turn)
            mask.extend([0] * len(turn))
            continue
        special("<|assistant_start|>", 0)
        for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
            opening, closing, learn = PARTS[part["type"]]
            begin = len(ids)
            if opening:
                special(opening, learn)
            text(part["text"], learn)
            if closing:
                special(closing, learn)
                tool_spans.append((begin, len(ids)))
        special("<|assistant_end|>", 1)
    return ids, mask, tool_spans


def cut_point(length: int, tool_spans: list[tuple[int, int]], max_tokens: int) -> int:
    """How many of `length` tokens stay: at most `max_tokens`, and never a part of a tool span [begin, end)."""
    cut = min(max_tokens, length)
    for begin, end in tool_spans:
        if begin < cut < end:
            cut = begin
    return cut


def render_conversation(tokenizer: Tokenizer, conversation: dict, max_tokens: int = 2048) -> Rendered:
    """Renders a whole conversation for training.

    A system message is put in front of the first user message. A longer conversation ends after `max_tokens`, wherever
    that is, and what is left of an answer stays supervised; only a tool call or a tool result is never cut in two: the
    cut goes back to before its opening token, so that no model learns an unfinished call. `truncated` and `supervised`
    tell. Raises UserError for a malformed conversation; the given object is not changed.
    """
    if max_tokens < 1:
        raise UserError(f"max_tokens {max_tokens} must be at least 1")
    ids, mask, tool_spans = render_turns(tokenizer, _merged(conversation))
    cut = cut_point(len(ids), tool_spans, max_tokens)
    return Rendered(ids[:cut], mask[:cut], truncated=cut < len(ids))


def render_for_completion(tokenizer: Tokenizer, conversation: dict, max_tokens: int = 2048) -> list[int]:
    """The prompt for which the model is to write the last assistant message: all before it, then <|assistant_start|>.

    At most `max_tokens` ids. Of a longer conversation the newest part is kept, since that is what the answer answers:
    first the oldest turns go, a user message with its answer at a time, then the front of the last user message. A
    system message belongs to the first user message and goes with it. Raises UserError for a malformed conversation or
    one that does not end in an assistant message; the given object is not changed.
    """
    if max_tokens < 5:
        raise UserError(f"max_tokens {max_tokens} must be at least 5: a prompt has four special tokens and some text")
    messages = _merged(conversation)
    if messages[-1]["role"] != "assistant":
        raise UserError("a conversation to complete must end in an assistant message (empty if there is none yet)")
    start = tokenizer.encode_special("<|assistant_start|>")
    for oldest in range(0, len(messages) - 1, 2):
        ids = render_turns(tokenizer, messages[oldest:-1])[0] + [start]
        if len(ids) <= max_tokens:
            return ids
    # bos, user_start | newest text | user_end, assistant_start
    return ids[:2] + ids[2 + len(ids) - max_tokens :]


def targets_from(ids: list[int], mask: list[int]) -> tuple[list[int], list[int]]:
    """(inputs, targets), each one shorter than `ids`: position t reads ids[t] and learns ids[t + 1] if mask[t + 1].

    Targets that are not to be learned are -1, which the loss ignores.
    """
    if len(ids) != len(mask):
        raise UserError(f"{len(ids)} ids but {len(mask)} mask entries: both must come from one rendered conversation")
    return ids[:-1], [token if learn else -1 for token, learn in zip(ids[1:], mask[1:], strict=True)]


def visualize(tokenizer: Tokenizer, ids: list[int], mask: list[int], with_ids: bool = False) -> str:
    """The tokens joined by `|` for a terminal or notebook: green where supervised, red where not.

    The bytes of a character that is split over tokens appear as \\x….
    """
    shown = []
    for token, learn in zip(ids, mask, strict=True):
        text = tokenizer.id_to_bytes(token).decode("utf-8", "backslashreplace")
        number = f"{GREY}({token}){RESET}" if with_ids else ""
        shown.append(f"{GREEN if learn else RED}{text}{RESET}{number}")
    return "|".join(shown)


def check_conversation(conversation: dict, index: int | None = None) -> None:
    """Raises UserError that names the conversation (by `index`, if given), the message and the rule it breaks."""
    where = "conversation" if index is None else f"conversation {index}"

    def require(holds: bool, problem: str) -> None:
        if not holds:
            raise UserError(f"{where}: {problem}")

    require(isinstance(conversation, dict), f"must be a dict with 'messages', got {type(conversation).__name__}")
    messages = conversation.get("messages")
    require(isinstance(messages, list | tuple), "'messages' must be a list of messages")
    require(len(messages) > 0, "has no messages; it needs at least one user message")
    first = 0
    for i, message in enumerate(messages):
        require(isinstance(message, dict), f"message {i} must be a dict with 'role' and 'content'")
        role, content = message.get("role"), message.get("content")
        if i == 0 and role == "system":
            first = 1
            require(isinstance(content, str), "the system message's content must be a string")
            require(len(messages) > 1, "has only a system message; a user message must follow it")
            continue
        expected = ("user", "assistant")[(i - first) % 2]
        require(
            role == expected,
            f"message {i} has the role {role!r}, expected {expected!r}: user and assistant alternate, the user begins, "
            "one system message may come first",
        )
        if role == "user" or isinstance(content, str):
            require(isinstance(content, str), f"message {i} (user) must have a string as content")
            continue
        require(isinstance(content, list | tuple), f"message {i} (assistant) must have a string or a list of parts")
        for j, part in enumerate(content):
            require(isinstance(part, dict), f"message {i}, part {j} must be a dict with 'type' and 'text'")
            kind = part.get("type")
            require(
                kind in list(PARTS), f"message {i}, part {j} has the type {kind!r}; valid types are {', '.join(PARTS)}"
            )
            require(isinstance(part.get("text"), str), f"message {i}, part {j} must have a string as 'text'")


def _merged(conversation: dict) -> list[dict]:
    """The checked messages, a system message merged into the user message after it, in a new list."""
    check_conversation(conversation)
    first, *rest = conversation["messages"]
    if first["role"] != "system":
        return [first, *rest]
    user, *rest = rest
    return [{"role": "user", "content": first["content"] + "\n\n" + user["content"]}, *rest]
