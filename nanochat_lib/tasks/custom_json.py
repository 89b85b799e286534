"""Conversations from a file of one's own: a JSON list of messages a line, as in nanochat's identity conversations."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from nanochat_lib.conversation import check_conversation
from nanochat_lib.errors import UserError
from nanochat_lib.tasks.common import Conversation, Task


class CustomJSON(Task):
    """The conversations of a .jsonl file, in its order; to train on, not to score.

    Each line is a list of at least two messages, user and assistant in turn, one system message may come first, every
    content a string; {"messages": [...]} is accepted too, blank lines are skipped. The whole file is checked when it is
    opened, but only the lines' places are kept. Raises UserError that names file, line and rule.
    """

    name = "CustomJSON"

    def __init__(self, path: str | Path, **slicing: int) -> None:
        super().__init__(**slicing)
        self.path = Path(path).expanduser()
        places, at = [], 0
        try:
            with open(self.path, "rb") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        self._read(line, number)
                        places.append(at)
                    at += len(line)
        except OSError as error:
            raise UserError(f"{self.path} cannot be read ({error.strerror}); give a .jsonl of conversations") from None
        if not places:
            raise UserError(f"{self.path} holds no conversations: a JSON list of messages is needed on each line")
        self.places = np.array(places, np.int64)

    def _read(self, line: bytes, number: int) -> Conversation:
        where = f"{self.path} line {number}"
        try:
            found = json.loads(line)
        except ValueError as error:
            raise UserError(f"{where} is not JSON ({error})") from None
        messages = found.get("messages") if isinstance(found, dict) else found
        try:
            check_conversation({"messages": messages})
            if messages[-1]["role"] != "assistant":
                raise UserError("it ends without an answer of the assistant")
            if any(not isinstance(m["content"], str) or not m["content"].strip() for m in messages):
                raise UserError("every message must have text")
        except UserError as error:
            raise UserError(f"{where}: {str(error).removeprefix('conversation: ')}") from None
        return {"messages": messages}

    def num_examples(self) -> int:
        return len(self.places)

    def get_example(self, index: int) -> Conversation:
        with open(self.path, "rb") as file:
            file.seek(self.places[index])
            return self._read(file.readline(), index + 1)
