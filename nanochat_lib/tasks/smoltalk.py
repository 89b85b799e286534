"""SmolTalk: 460 thousand conversations about everything, the bulk of what a chat model is trained on."""

from __future__ import annotations

from nanochat_lib.conversation import check_conversation
from nanochat_lib.tasks.common import Conversation, Task
from nanochat_lib.tasks.rows import open_rows


class SmolTalk(Task):
    """`split` is "train" (460,341 conversations) or "test" (about 24,000). To train on, not to score."""

    name = "SmolTalk"

    def __init__(self, split: str, **slicing: int) -> None:
        super().__init__(**slicing)
        self.rows = open_rows("smoltalk", "default", split, ("messages",))

    def num_examples(self) -> int:
        return len(self.rows)

    def get_example(self, index: int) -> Conversation:
        messages = [{"role": m["role"], "content": m["content"]} for m in self.rows[index]["messages"]]
        conversation = {"messages": messages}
        check_conversation(conversation, index)
        return conversation
