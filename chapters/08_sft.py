# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3 (ipykernel)
#     language: python
#     name: python3
# ---

# %% [markdown] id="title"
# # SFT: from text that goes on to answers that stop
#
# Why does a model that has read **6 billion tokens** not answer a single question?
#
# Because nobody showed it where an answer begins, and where it ends. Supervised fine-tuning shows it both, in minutes.
# It needs a format for conversations, and a mask that says which tokens are the model's own. One token to the left,
# and you train something else: you will do that too, and catch it.
#
# When you are through you can
#
# - turn a conversation with tool calls into ids and a mask, and say for each token why it is trained or not,
# - mix data sets so that small ones count, and name the mixture of nanochat's full-size run,
# - pack whole conversations into rows, and cut one that is too long without teaching half a tool call,
# - average a loss over batches whose number of targets differs, and survive a batch that has none,
# - read what fine-tuning did to a small model, and find a mask that is off by one *before* training.
#
# Eight exercises, about 125 minutes; with the reading some 160 minutes. The solved chapter runs in under three.

# %% id="setup" tags=["setup"]
import random
from bisect import bisect_right, insort

import jax
import jax.numpy as jnp
import numpy as np

# %% [markdown] id="format-text" tags=["slide"]
# ## 1. The format
#
# A conversation is data: a list of messages, each with a role and a content. An assistant's content is a string or a
# list of *parts*, because an assistant may call a tool in the middle of an answer.

# %% id="imports"
from nanochat_lib.conversation import PARTS, render_conversation, render_for_completion, user_turn
from nanochat_lib.course import (  # noqa: F401
    about,
    check,
    choice,
    explore,
    fast,
    hint,
    mine,
    note,
    predict,
    progress,
    quiz,
    reveal,
    show,
    slider,
    text,
    undo,
)
from nanochat_lib.course.token_figures import token_map
from nanochat_lib.errors import UserError
from nanochat_lib.primer.documents import world_documents
from nanochat_lib.primer.world import World
from nanochat_lib.report.plots import BLUE, GREEN, ORANGE, RED, SKY, new_figure
from nanochat_lib.report.strips import batch_grid, mask_strip
from nanochat_lib.tasks.common import call_parts
from nanochat_lib.tasks.gsm8k import CALL
from nanochat_lib.tokenizer import Tokenizer

world = World(0)
documents = world_documents(world, 150_000 if fast() else 600_000)
tokenizer = Tokenizer.train(documents, 512)
chat = {
    "messages": [
        {"role": "user", "content": "What is 12 + 30?"},
        {
            "role": "assistant",
            "content": [
                {"type": "python", "text": "12+30"},
                {"type": "python_output", "text": "42"},
                {"type": "text", "text": "#### 42"},
            ],
        },
        {"role": "user", "content": "Thank you"},
        {"role": "assistant", "content": "You are welcome!"},
    ]
}
for message in chat["messages"]:
    print(f"{message['role']:<10} {message['content']}")

# %% [markdown] id="special-text"
# A model reads one list of ids. So nine special tokens, which no text can contain (chapter 01), mark who speaks. `PARTS`
# says what stands around each part of an answer, and its mask.

# %% id="special"
print(", ".join(tokenizer.special_tokens))
for kind, (opening, closing, learn) in PARTS.items():
    print(f"{kind:<14} {opening or '-':<18} {closing or '-':<16} mask {learn}")


# %% [markdown] id="mask-text"
# The **mask** has a number for each id: 1 when this token is one that the *model* must learn to write.
#
# | token | mask | why |
# |---|---|---|
# | `bos`, `user_start`, the user's text, `user_end` | 0 | others write them |
# | `assistant_start` | 0 | the program writes it, to ask for an answer |
# | the assistant's text, and tool calls with both their markers | 1 | the model's own words |
# | tool results with both their markers | 0 | the calculator writes them |
# | `assistant_end` | 1 | the model's way to stop |
#
# Every string is encoded on its own. Nothing is put between the pieces, not even a space.

# %% id="sft.render_turns" level=3 library="nanochat_lib.conversation:render_turns" minutes=30 nbgrader={"cell_type": "code", "grade": false, "grade_id": "sft-render_turns", "locked": false, "schema_version": 3, "solution": true, "task": false} points=4 tags=["exercise"]
def render_turns(tokenizer: Tokenizer, messages: list[dict]) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """(ids, mask, tool spans) of `messages` (user, assistant, user, …; no system message).

    BOS stands once, in front. `user_turn(tokenizer, content)` gives a user's ids with both markers. An assistant's
    content is a string or a list of {"type", "text"}; see `PARTS` for the markers and masks of each type.
    `tokenizer.encode(string)` and `tokenizer.encode_special(name)` give ids. A tool span is (begin, end): ids[begin:end]
    is one tool call or one tool result, with its markers.
    """
    raise NotImplementedError


# %% id="sft.render_turns.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "sft-render_turns-check", "locked": true, "points": 4, "schema_version": 3, "solution": false, "task": false}
check("sft.render_turns", render_turns)

# %% [markdown] id="coloured-text"
# Here is the conversation of above, token by token. Green is trained.

# %% id="coloured" tags=["slide"]
turns = mine("sft.render_turns")
ids, mask, spans = turns(tokenizer, chat["messages"])
pieces = [tokenizer.decode([i]) for i in ids]
show(
    mask_strip(pieces, mask),
    alt="the tokens of the conversation as text; the assistant's words, its tool call and both of its end tokens are "
    "green, the user's words, the tool's result and the other markers are not",
)

# %% [markdown] id="stop-text"
# Look at the last green token of each answer. A base model has never seen it. Everything else in an answer is text, and
# text it knows; *that* one is new.

# %% id="stop-quiz"
quiz("sft.q_stop")

# %% [markdown] id="share-text"
# How much of a chat is green? Questions with choices are long, their answers short. Take the primer's mixture of six
# kinds of chats. What share of all tokens is trained? `predict("sft.p_share", 50)`.

# %% id="share-predict"
predict("sft.p_share")

# %% id="share"
from nanochat_lib.tasks.primer import sft_mixture, sft_validation

mixture = sft_mixture(world, 300 if fast() else 2000)
chats = []
for conversation in mixture:
    ids, mask, _ = turns(tokenizer, conversation["messages"])
    chats.append((ids, mask))
trained = sum(sum(mask) for _, mask in chats)
total = sum(len(ids) for ids, _ in chats)
reveal("sft.p_share", round(100 * trained / total))


# %% [markdown] id="widget-text"
# Now any conversation of yours. Write a special token's name into the question: it stays text. Leave `call` empty for
# an answer without a tool. Make the row short and watch where the cut falls.

# %% id="widget"
def draw_chat(system="", question="What is 7 + 35?", before="", call="7+35", after="#### 42", row_tokens=200):
    parts = [{"type": "text", "text": before}] if before else []
    parts += call_parts(call) if call else []
    parts += [{"type": "text", "text": after}] if after else []
    messages = [{"role": "system", "content": system}] if system else []
    messages += [{"role": "user", "content": question}, {"role": "assistant", "content": parts}]
    shown = render_conversation(tokenizer, {"messages": messages}, row_tokens)
    return token_map(shown.ids, tokenizer, shown.mask)


explore(
    draw_chat,
    alt="every token of a conversation as a box with its text, id and mask; the tool call, the answer and the end token "
    "are green, all others grey",
    system=text(""),
    question=text("What is 7 + 35?"),
    before=text(""),
    call=text("7+35"),
    after=text("#### 42"),
    row_tokens=slider(5, 200, 200, 1),
)


# %% [markdown] id="system-text"
# A *system message* comes before the first question and sets the scene: "You are a helpful tutor." nanochat has no
# token for it. It is put in front of the first user message, with an empty line between. So a system message is
# something the user says, and weighs no more than that.

# %% [markdown] id="targets-text"
# ## 2. From mask to targets
#
# A model that reads `ids[t]` says what comes next: `ids[t + 1]`. That is its **target**. The mask belongs to the token
# *as a target*. So is position $t$ trained when `mask[t]` is 1, or when `mask[t + 1]` is? Targets that are not
# trained are −1, and the loss leaves them out.

# %% id="sft.targets_from" level=1 library="nanochat_lib.conversation:targets_from" minutes=10 nbgrader={"cell_type": "code", "grade": false, "grade_id": "sft-targets_from", "locked": false, "schema_version": 3, "solution": true, "task": false} points=1 tags=["exercise"]
def targets_from(ids: list[int], mask: list[int]) -> tuple[list[int], list[int]]:
    """(inputs, targets), each one shorter than `ids`: what each position reads, and what it learns to say.

    Targets whose own mask is 0 are -1. Lists of different length are a UserError.
    """
    raise NotImplementedError


# %% id="sft.targets_from.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "sft-targets_from-check", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
check("sft.targets_from", targets_from)

# %% id="targets-run" tags=["slide"]
align = mine("sft.targets_from")
ids, mask, spans = turns(tokenizer, chat["messages"])
inputs, targets = align(ids, mask)
at = ids.index(tokenizer.encode_special("<|assistant_start|>"))
print("reads                 learns to say")
for t in range(at - 1, at + 9):
    wanted = tokenizer.decode([targets[t]]) if targets[t] >= 0 else "(not trained)"
    print(f"{tokenizer.decode([inputs[t]]):<21} {wanted}")

# %% [markdown] id="targets-look"
# The model reads `<|assistant_start|>`, which is not trained itself, and *there* it learns to say the first token of an
# answer. This one position per answer is the most valuable of all: it decides what kind of answer follows. Keep it in
# mind, since it is the one that a mistake takes away.

# %% [markdown] id="tools-text"
# ## 3. Tool calls
#
# A model of this size adds badly. It can learn to *call*: write `<|python_start|>`, an expression, `<|python_end|>`, and
# wait. The engine (chapter 10) sees the closing token, asks a calculator, and puts the result into the text between
# `<|output_start|>` and `<|output_end|>`. Then the model goes on, and reads the result like anything else.
#
# GSM8K, 7,473 school problems with worked solutions, has its sums marked: `<<48/2=24>>`. A regular expression,
# `CALL`, finds the marks.

# %% id="gsm8k"
solution = "She sold 48/2 = <<48/2=24>>24 clips in May.\nEach friend pays 10/3 = <<10/3=3.33>>3.33.\n#### 24"
print("\n".join(map(repr, CALL.split(solution))))


# %% [markdown] id="call-parts-text"
# What comes after the last `=` in a mark was written by a person, who rounds. In a chat it is the *calculator* that
# writes the result. `call_parts("10/3")` gives both parts as they will be then. A model that met `3.33` in training and
# meets `3.33333333333` in a chat reads a text of a kind that it has never seen.

# %% id="sft.parts_of" level=2 library="nanochat_lib.tasks.gsm8k:parts_of" minutes=15 nbgrader={"cell_type": "code", "grade": false, "grade_id": "sft-parts_of", "locked": false, "schema_version": 3, "solution": true, "task": false} points=2 tags=["exercise"]
def parts_of(solution: str) -> list[dict[str, str]]:
    """The parts of a GSM8K solution: {"type": "text", "text": …} for what stands between the marks, also when it is empty.

    A mark `<<expression=number>>` becomes `call_parts(expression)`, a list of parts. The expression ends at the *last*
    equals sign; without one it is all that stands in the mark.
    """
    raise NotImplementedError


# %% id="sft.parts_of.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "sft-parts_of-check", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("sft.parts_of", parts_of)

# %% id="parts-run"
split_solution = mine("sft.parts_of")
for part in split_solution(solution):
    print(f"{part['type']:<14} {part['text']!r}")

# %% id="tool-quiz"
quiz("sft.q_tool")


# %% [markdown] id="cut-text"
# ## 4. A conversation that is too long
#
# A row has $T+1$ places. A longer conversation is cut, and what is left of the last answer stays a fair lesson: each of
# its tokens follows from the ones before. With one exception. Cut inside a tool call, and the row teaches to open a
# call, and shows no end of it: after `12+` comes padding. nanochat cuts anywhere. This library goes back to before the
# opening token.
#
# `render_turns` has noted where calls and results lie.

# %% id="sft.cut_point" level=2 library="nanochat_lib.conversation:cut_point" minutes=10 nbgrader={"cell_type": "code", "grade": false, "grade_id": "sft-cut_point", "locked": false, "schema_version": 3, "solution": true, "task": false} points=2 tags=["exercise"]
def cut_point(length: int, tool_spans: list[tuple[int, int]], max_tokens: int) -> int:
    """How many of `length` tokens stay: as many as possible, at most `max_tokens`, and no span cut in two.

    Each span (begin, end) covers the tokens begin, …, end - 1. Spans come in order and do not overlap.
    """
    raise NotImplementedError


# %% id="sft.cut_point.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "sft-cut_point-check", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("sft.cut_point", cut_point)

# %% id="cut-run" tags=["slide"]
cut_at = mine("sft.cut_point")
sums = [conversation for conversation in mixture if isinstance(conversation["messages"][-1]["content"], list)]
rendered = [turns(tokenizer, conversation["messages"]) for conversation in sums]
limits = np.arange(8, 60)
inside = [100 * np.mean([any(b < n < e for b, e in spans) for _, _, spans in rendered]) for n in limits]
mended = [100 * np.mean([any(b < cut_at(len(i), s, n) < e for b, e in s) for i, _, s in rendered]) for n in limits]

figure, ax = new_figure(height=2.5, width=6.4)
ax.plot(limits, inside, color=RED, label="cut anywhere")
ax.plot(limits, mended, color=BLUE, label="cut before the call")
ax.set_title("Sums cut inside a tool call or result", loc="left", fontweight="bold", fontsize=10)
ax.set_xlabel("tokens that a row has room for")
ax.set_ylabel("% of the sums")
ax.legend(fontsize=8.5)
show(
    figure,
    alt="share of the sums whose tool call or result is cut in two, against the length of a row: a hump of many per cent "
    "when cut anywhere, zero at all lengths when the cut goes back to before the call",
)
print(f"{len(sums)} sums; cut in two at worst: {max(inside):.0f} %, and {max(mended):.0f} % with the rule")


# %% [markdown] id="mixture-text"
# ## 5. Mixtures and epochs
#
# What is a chat model trained on? This is nanochat's mixture since July 2026.
#
# | data set | what it is | conversations | copies |
# |---|---|---|---|
# | SmolTalk | chats about everything, mostly written by larger models | 460,341 | 1 |
# | MMLU, `auxiliary_train` | questions with four choices, answered by a letter | 99,842 | 3 |
# | GSM8K, `main` | school problems, solved with the calculator | 7,473 | 4 |
#
# GSM8K would be 1.3 % of it, and the calculator would hardly be learned. So it is listed four times, which was the best
# of the numbers that were tried. A *copy* is an epoch of this one data set within one pass of the whole.
#
# All conversations get a number, task by task, and the numbers are shuffled once, with a fixed seed. A conversation is
# made only when its number comes up. Which one is it?

# %% id="sft.task_of" level=1 library="nanochat_lib.tasks.common:task_of" minutes=10 nbgrader={"cell_type": "code", "grade": false, "grade_id": "sft-task_of", "locked": false, "schema_version": 3, "solution": true, "task": false} points=1 tags=["exercise"]
def task_of(item: int, ends: np.ndarray) -> tuple[int, int]:
    """(which task, which of its conversations) number `item` of all conversations is, as Python integers.

    Task 0 has the numbers 0 … ends[0] - 1, task 1 those from ends[0] to ends[1] - 1, and so on; `ends` ascends.
    `np.searchsorted(ends, item, side=…)` finds the place of a number in a sorted array.
    """
    raise NotImplementedError


# %% id="sft.task_of.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "sft-task_of-check", "locked": true, "points": 1, "schema_version": 3, "solution": false, "task": false}
check("sft.task_of", task_of)

# %% id="mixture-run"
find = mine("sft.task_of")
parts = {"SmolTalk": (460_341, 1), "MMLU": (99_842, 3), "GSM8K": (7_473, 4)}
listed = [(name, count) for name, (count, copies) in parts.items() for _ in range(copies)]
ends = np.cumsum([count for _, count in listed])
order = list(range(ends[-1]))
random.Random(42).shuffle(order)
print(f"{ends[-1]:,} conversations in one pass")
for place in range(4):
    task, local = find(order[place], ends)
    print(f"place {place}: number {order[place]:,} is {listed[task][0]} {local:,}")

# %% id="mixture-figure" tags=["slide"]
colours = {"SmolTalk": SKY, "MMLU": ORANGE, "GSM8K": GREEN}
figure, (left, right) = new_figure(1, 2, height=2.5, width=7.6, width_ratios=(1, 1.25))
for row, (name, (count, copies)) in enumerate(parts.items()):
    for copy in range(copies):
        left.barh(row, count / 1000, left=copy * count / 1000, color=colours[name], edgecolor="white", height=0.7)
    left.text(count * copies / 1000 + 8, row, f"{count * copies / ends[-1]:.1%}", va="center", fontsize=8.5)
left.set_yticks(range(3), parts)
left.set_ylim(2.5, -0.5)
left.set_xlim(0, 560)
left.set_xlabel("thousands of conversations")
left.set_title("One pass, copy by copy", loc="left", fontweight="bold", fontsize=10)
codes = np.array([list(parts).index(listed[find(order[place], ends)[0]][0]) for place in range(480)]).reshape(12, 40)
right.imshow([[tuple(int(list(colours.values())[c][k : k + 2], 16) for k in (1, 3, 5)) for c in row] for row in codes])
right.set_title("The first 480, row by row", loc="left", fontweight="bold", fontsize=10)
right.set_xticks([])
right.set_yticks([])
show(
    figure,
    alt="left: bars of 460, 300 and 30 thousand conversations, cut into one, three and four copies. right: the first 480 "
    "of the shuffled order as coloured cells; the three kinds are well mixed, GSM8K is rare",
)
_ = about(100 * 4 * 7_473 / ends[-1], 3.8, within=0.05, name="GSM8K in the mixture, %")

# %% id="copies-quiz"
quiz("sft.q_copies")


# %% [markdown] id="history-text"
# **How it came to this.** nanochat began in October 2025 with *two* stages after pretraining.
#
# | stage | conversations | trained | rates | d20 on 8×H100 |
# |---|---|---|---|---|
# | midtraining | 568 thousand, later 848 thousand | every token | 1.0, falling over the last fifth | 809 steps, 8 minutes |
# | SFT | 22,439, one a row | the assistant's tokens | 0.02, falling from the start | 701 steps, 7 minutes |
#
# Midtraining taught the format and questions with choices; SFT, gently, the role. At the end of January 2026 midtraining
# was removed. Rows that start at a document's beginning had made it unnecessary. One stage on the large mixture, at 0.8
# of the pretraining rates and with the optimiser's state taken over, did the work of both. The small sets for identity
# and spelling left in July. All of these are settings here: `mid.mixture`, `sft.mixture`.
#
# The gain is real and modest: the launch model went from 0.0730 to 0.0884 in ChatCORE with SFT. Fine-tuning gives a
# model a *form*. What it knows comes from pretraining.

# %% [markdown] id="pack-text"
# ## 6. Packing conversations
#
# Chapter 04 cut documents to fill rows. A conversation that is cut loses its answer, so here nothing is cropped: the
# longest that fits is placed, and when none fits, the rest of the row is **padding**, BOS tokens with mask 0.

# %% id="sft.pack_chats" level=2 minutes=20 nbgrader={"cell_type": "code", "grade": false, "grade_id": "sft-pack_chats", "locked": false, "schema_version": 3, "solution": true, "task": false} points=3 tags=["exercise"]
def pack_chats(chats: list, capacity: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """(rows int32, masks int8), both (number of rows, capacity), of `chats`, a list of (ids, mask).

    Row by row, until no chat is left: place the longest that fits into what is left of the row, of equals the first in
    the list; when none fits, the rest is `pad` with mask 0. A chat longer than `capacity` is a UserError.
    """
    raise NotImplementedError


# %% id="sft.pack_chats.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "sft-pack_chats-check", "locked": true, "points": 3, "schema_version": 3, "solution": false, "task": false}
check("sft.pack_chats", pack_chats)

# %% id="pack-run" tags=["slide"]
T = 128
pack = mine("sft.pack_chats")
fitting = [(ids, mask) for ids, mask in chats if len(ids) <= T + 1 and sum(mask)]
rows, masks = pack(fitting[:300], T + 1, tokenizer.bos_id)
alone = [(ids + [tokenizer.bos_id] * (T + 1 - len(ids)), mask + [0] * (T + 1 - len(ids))) for ids, mask in fitting[:12]]
single, single_masks = np.array([ids for ids, _ in alone]), np.array([mask for _, mask in alone])
for title, some, their in (("One a row", single, single_masks), ("Packed", rows[5::7][:12], masks[5::7][:12])):
    shown = np.where(their[:, 1:] == 1, some[:, 1:], -1)
    show(
        batch_grid(some[:, :-1], tokenizer.bos_id, shown, title=title),
        alt=f"{title}: twelve rows of 128 positions, coloured where trained, grey where not; "
        + ("colour only near the left edge" if title == "One a row" else "colour all over the rows"),
    )
print(f"300 chats in {len(rows)} rows of {T} instead of 300; trained positions: {(single_masks[:, 1:] == 1).mean():.0%} "
      f"one a row, {(masks[:, 1:] == 1).mean():.0%} packed")  # fmt: skip


# %% [markdown] id="pack-look"
# Each step costs the same, however grey it is. nanochat's first SFT had one conversation a row, so most of what it
# computed was thrown away. Between chats of a row there is no wall: a later chat sees the earlier ones. As in
# pretraining, BOS says that they do not matter.

# %% [markdown] id="clog-text"
# **What goes wrong: a row that nothing fits.** Your function refuses a chat that is longer than a row. nanochat's
# loader does not: it renders at most 2,048 tokens, whatever the length of a row, and keeps a buffer of 100. With rows
# of 2,048 all is well. With shorter ones, a conversation that never fits is never placed, and *stays*. Suppose one in
# forty is too long.

# %% id="clog" tags=["slide"]
def trained_share(too_long: float, steps: int, seed: int = 0) -> tuple[list, list]:
    """(share of each row that is content, share of the buffer that no row can hold), with nanochat's buffer of 100."""
    rng = np.random.default_rng(seed)
    capacity, buffer, filled, stuck = 1025, [], [], []
    for _ in range(steps):
        room = capacity
        while True:
            while len(buffer) < 100:
                insort(buffer, int(rng.integers(1026, 2049) if rng.random() < too_long else rng.integers(50, 1025)))
            at = bisect_right(buffer, room)
            if not at:
                break
            room -= buffer.pop(at - 1)
        filled.append(1 - room / capacity)
        stuck.append((100 - bisect_right(buffer, capacity)) / 100)
    return filled, stuck


filled, stuck = trained_share(1 / 40, 3000)
end = next(i for i, share in enumerate(filled) if share == 0)
figure, ax = new_figure(height=2.5, width=6.4)
ax.plot(100 * np.array(filled[: end + 150]), color=BLUE, linewidth=0.5, label="row that is content")
ax.plot(100 * np.array(stuck[: end + 150]), color=RED, label="buffer that no row can hold")
ax.set_xlabel("rows made")
ax.set_ylabel("%")
ax.set_title("The buffer clogs", loc="left", fontweight="bold", fontsize=10)
ax.legend(fontsize=8.5, loc="lower center")
show(
    figure,
    alt="over the rows made, the share of the buffer that no row can hold climbs to 100 per cent; each row is nearly full "
    "all that time, and from then on every row is empty",
)
_ = about(end, 1940, within=100, name="rows until nothing but padding comes")

# %% [markdown] id="clog-look"
# Nothing warns. The rows stay nearly full while the choice of what to place shrinks; then, from one row to the next, all
# is padding, and the loss of padding is 0 / 0. It never ends either, for progress is counted in conversations placed. This library cuts at the length of a row when it renders, and its
# packer raises an error for anything longer. Which brings us to the 0 / 0.

# %% [markdown] id="loss-text"
# ## 7. The loss: divided by what?
#
# A step adds up several micro-batches, on several chips. In pretraining each has the same number of targets. Here one
# may hold a long essay, the next questions with choices, answered by a letter. nanochat takes the mean of each
# micro-batch, and then the mean of the means.
#
# Two micro-batches: 24 trained targets in one, 480 in the other. How many times as much does a target of the first weigh
# as one of the second? `predict("sft.p_weight", 1)`

# %% id="weight-predict"
predict("sft.p_weight")

# %% id="weight"
reveal("sft.p_weight", (1 / (2 * 24)) / (1 / (2 * 480)))


# %% [markdown] id="loss-exercise-text"
# Whether a letter of MMLU may weigh as much as a paragraph is a choice. But it should be *yours*, and not depend on how
# many chips you have: deal the same conversations to other micro-batches, and the gradient is another one. So this
# library adds up all losses of a step and divides once, by all of its targets.

# %% id="sft.step_loss" level=2 minutes=15 nbgrader={"cell_type": "code", "grade": false, "grade_id": "sft-step_loss", "locked": false, "schema_version": 3, "solution": true, "task": false} points=2 tags=["exercise"]
def step_loss(nll: np.ndarray, targets: np.ndarray) -> float:
    """The loss of a step, a Python float: each trained target of all micro-batches weighs the same.

    nll (A, B, T): nats of each position; targets (A, B, T): the id, or -1 where nothing is trained. What nll says there
    does not matter. A step without any target has loss 0.
    """
    raise NotImplementedError


# %% id="sft.step_loss.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "sft-step_loss-check", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("sft.step_loss", step_loss)

# %% id="loss-run"
whole_loss = mine("sft.step_loss")
nll = np.stack([np.full((1, 480), 3.0), np.full((1, 480), 1.0)])
lesson = np.full((2, 1, 480), -1)
lesson[0, 0, :24] = lesson[1, 0, :] = 7
means = [whole_loss(nll[i : i + 1], lesson[i : i + 1]) for i in range(2)]
print(f"mean of means {np.mean(means):.2f}; over all targets {whole_loss(nll, lesson):.2f}")

# %% [markdown] id="masked-text"
# **What goes wrong: a batch without a target.** A question longer than a row is cut before its answer: the mask is all 0.
# A row of such questions has nothing to learn, and its mean is 0 / 0. One NaN in one gradient, and every weight is NaN
# after the step.

# %% id="masked"
long_question = {
    "messages": [
        {"role": "user", "content": "Tell me about " + ", ".join(world.people * 2)},
        {"role": "assistant", "content": "They are all fine."},
    ]
}
shown = render_conversation(tokenizer, long_question, T + 1)
_, lost = align(shown.ids, shown.mask)
nothing = np.array(lost)[None, None]
with np.errstate(invalid="ignore"):
    naive = np.sum(np.where(nothing >= 0, 1.0, 0.0)) / np.float64((nothing >= 0).sum())
print(
    f"{len(shown.ids)} tokens, trained: {shown.supervised}; naive mean {naive}, yours {whole_loss(nothing * 0.0, nothing)}"
)

# %% [markdown] id="masked-look"
# A loss of 0 does no harm, but a step that trains nothing is not what you paid for. So the library acts three times: a
# conversation without a trained token is dropped and *counted* when it is read, the division is safe, and the guard of
# the first steps stops a run whose batch has no target.

# %% id="masked-guard"
from nanochat_lib.guards import Guards

try:
    Guards("sft", 512).after(0, {"tokens": 0, "loss": 0.0, "grad_norm": 0.0}, 2048)
except UserError as error:
    print(f"UserError: {error}")

# %% [markdown] id="train-text"
# ## 8. Before and after
#
# Now train. First a base model, on the primer's documents: stories, facts, sums, words spelled; no chats. Then the
# chats, with one and the same compiled step: to it SFT is pretraining with a few −1 among the targets.

# %% id="train-base"
from nanochat_lib import optim
from nanochat_lib.presets import CPU_OPTIM
from nanochat_lib.sizing import GPTConfig
from nanochat_lib.train_step import init_train_state, make_eval_step, make_train_step

B = 16
BASE_STEPS, SFT_STEPS = (3, 3) if fast() else (240, 90)
small = GPTConfig(
    sequence_len=T, vocab_size=512, n_layer=2, n_head=2, n_kv_head=2, n_embd=64 if fast() else 128, window_pattern="L"
)
optimizer = optim.make_optimizer(small, CPU_OPTIM)
compiled = make_train_step(small, optimizer, donate=False)


def train(state, rows, targets, steps, rate=1.0):
    """(state, losses) after so many steps of B rows: the rate is constant, then falls to 0 over the last half."""
    losses = []
    for i in range(steps):
        pick = np.arange(i * B, (i + 1) * B) % len(rows)
        batch = {"inputs": rows[pick][None, :, :-1], "targets": targets[pick][None]}
        hyper = {"lr": rate * min(1, 2 * (1 - i / steps)), "momentum": 0.95, "weight_decay": 0.0}
        state, out = compiled(state, batch, {name: jnp.float32(value) for name, value in hyper.items()})
        losses.append(float(out["loss"]))
    return state, losses


stream = np.concatenate([tokenizer.encode(document, prepend=tokenizer.bos_id) for document in documents])
base_rows = stream[: len(stream) // (T + 1) * (T + 1)].reshape(-1, T + 1).astype(np.int32)
held_rows, base_rows = base_rows[:B], base_rows[B:]
fresh = init_train_state(small, optimizer, jax.random.key(0))
base, base_losses = train(fresh, base_rows, base_rows[:, 1:], BASE_STEPS)
if not fast():
    _ = about(np.mean(base_losses[-20:]), 0.85, within=0.15, name="base loss of the last 20 steps, nats a token")

# %% id="train-sft"
rows, masks = pack(fitting, T + 1, tokenizer.bos_id)
shuffled = np.random.default_rng(0).permutation(len(rows))  # packing puts long chats first
rows, masks = rows[shuffled], masks[shuffled]
right_targets = np.where(masks[:, 1:] == 1, rows[:, 1:], -1)
tuned, losses = train(base, rows, right_targets, SFT_STEPS, rate=0.4)
print(f"{len(fitting)} chats in {len(rows)} rows, {SFT_STEPS} steps of {B} rows")

# %% [markdown] id="answers-text"
# The same prompts to both. `render_for_completion` gives the prompt: the conversation up to the last answer, then
# `<|assistant_start|>`. Each model writes until it says `<|assistant_end|>`, or for 48 tokens.

# %% id="answers" tags=["slide"]
from nanochat_lib.engine import Engine
from nanochat_lib.tasks.primer import PrimerSpelling, PrimerSums, PrimerTalk

asked = [PrimerTalk(world, "test")[0]]
asked += [
    {"messages": [{"role": "user", "content": q}, {"role": "assistant", "content": ""}]} for q in ("Who are you?",)
]
asked += [PrimerSums(world, "test")[0], PrimerSpelling(world, "test")[0]]
count = 2 if fast() else 40
graded = [
    (task, task[i + 1]) for task in (PrimerSums(world, "test"), PrimerSpelling(world, "test")) for i in range(count)
]
prompts = [render_for_completion(tokenizer, conversation) for conversation in [*asked, *(c for _, c in graded)]]
engine = Engine(small, base.params, tokenizer)


def answers(params) -> tuple[list[str], float, float]:
    """(texts of all answers, share of the graded ones that end by themselves, share that is right)."""
    engine.params = params
    done = engine.generate_batch(prompts, max_tokens=48, temperature=0.0)
    texts = [tokenizer.decode(ids[len(prompt) :]) for ids, prompt in zip(done.sequences, prompts, strict=True)]
    marks = [task.evaluate(c, text) for (task, c), text in zip(graded, texts[len(asked) :], strict=True)]
    return texts, float(np.mean([how == "end" for how in done.finished[len(asked) :]])), float(np.mean(marks))


before, after = answers(base.params), answers(tuned.params)
for i, conversation in enumerate(asked):
    print(f"> {conversation['messages'][0]['content']}")
    print(f"  base: {before[0][i]!r}\n  SFT:  {after[0][i]!r}\n")

# %% [markdown] id="answers-look" tags=["slide"]
# The base model goes on with text, of the kind it has read, and hardly ever stops. After fine-tuning it answers in the right
# form, calls the calculator and ends. None of the sums and words that are graded here was in its training.
#
# Did it learn to spell in 90 steps? No: the base model has spelled thousands of words, and has no way to be asked.
# Fine-tuning gave it the form; the adding is done by the calculator. (In fast mode both have hardly learned anything.)

# %% id="answers-numbers"
print(f"ends by itself: base {before[1]:.0%}, SFT {after[1]:.0%}; right: base {before[2]:.0%}, SFT {after[2]:.0%}")
if not fast():
    about(100 * before[1], 14, within=14, name="base answers that end by themselves, %")
    about(100 * after[1], 99, within=4, name="SFT answers that end by themselves, %")
    _ = about(100 * after[2], 90, within=10, name="SFT answers that are right, %")

# %% [markdown] id="bpb-text"
# **Bits per byte?** The same two models, measured on three things: held-out documents, all tokens of held-out chats, and
# the assistant's tokens of the same chats.

# %% id="bpb"
from nanochat_lib.evaluate.bpb import loss_and_bits

measure = make_eval_step(small)
held_chats = []
for conversation in sft_validation(world):
    ids, mask, _ = turns(tokenizer, conversation["messages"])
    held_chats.append((ids, mask))
held_chats = [(ids, mask) for ids, mask in held_chats if len(ids) <= T + 1][: 60 if fast() else 240]
chat_rows, chat_masks = pack(held_chats, T + 1, tokenizer.bos_id)
_, chat_content = pack([(ids, [1] * len(ids)) for ids, _ in held_chats], T + 1, tokenizer.bos_id)
chat_rows, chat_masks, chat_content = chat_rows[:B], chat_masks[:B], chat_content[:B]
answer_targets = np.where(chat_masks[:, 1:] == 1, chat_rows[:, 1:], -1)
measured = {
    "documents": (held_rows[:, :-1], held_rows[:, 1:]),
    "chats, all tokens": (chat_rows[:, :-1], np.where(chat_content[:, 1:] == 1, chat_rows[:, 1:], -1)),
    "chats, answers": (chat_rows[:, :-1], answer_targets),
}
bits = {
    name: [loss_and_bits(measure, s.params, [batch], tokenizer.token_bytes())[1] for s in (base, tuned)]
    for name, batch in measured.items()
}
if not fast():
    for name, (first, second) in bits.items():
        print(f"{name:<18} base {first:.2f}   SFT {second:.2f} bits per byte")
    _ = about(bits["documents"][1] / bits["documents"][0], 2.7, within=0.6, name="documents, after beside before")

# %% [markdown] id="bpb-look"
# Three numbers for one model, and none can stand in for another. The answers are short and their words few, so after
# SFT they cost almost nothing. The documents cost nearly *three times* as much as before: the model has been taught
# chats at a high rate and has begun to forget the rest. In nanochat's log of a d20 model the curve falls from 0.81
# at the end of pretraining to 0.395 in midtraining: other text, no better model. Compare bits per byte within one stage, on one
# set, with one mask.

# %% id="bpb-quiz"
quiz("sft.q_bpb")

# %% [markdown] id="faults-text"
# ## 9. Field lesson: a month without a mask
#
# From January 31 to March 3, 2026, nanochat's SFT made the mask and did not apply it: every token was trained, questions
# and tool results too. No error; the loss fell; it took 31 days to be seen. And there is a smaller sister of this
# mistake, harder to see: the mask of the token that is *read* instead of the token that is *said*. Let us make both, on
# the same base model, with the same chats and steps.

# %% id="faults-train" tags=["slide"]
_, content = pack([(ids, [1] * len(ids)) for ids, _ in fitting], T + 1, tokenizer.bos_id)
content = content[shuffled]
wrong_targets = {
    "no mask": np.where(content[:, 1:] == 1, rows[:, 1:], -1),
    "off by one": np.where(masks[:, :-1] == 1, rows[:, 1:], -1),
}
runs = {"right": (tuned, losses, after)}
for name, their_targets in wrong_targets.items():
    state, their_losses = train(base, rows, their_targets, SFT_STEPS, rate=0.4)
    runs[name] = (state, their_losses, answers(state.params))

held_loss = {
    name: loss_and_bits(measure, s.params, [measured["chats, answers"]], tokenizer.token_bytes())[0]
    for name, (s, _, _) in runs.items()
}
shades = {"right": BLUE, "no mask": ORANGE, "off by one": RED}
figure, (left, middle, right) = new_figure(1, 3, height=2.7, width=7.8)
for name, (_, curve, _) in runs.items():
    smooth = np.convolve(curve, np.ones(8) / 8, "valid") if len(curve) > 8 else curve
    left.plot(smooth, color=shades[name], label=name, linestyle="--" if name == "off by one" else "-")
left.set_title("What each run logs", loc="left", fontweight="bold", fontsize=9.5)
left.set_xlabel("step")
left.set_ylabel("loss (nats a trained token)")
left.legend(fontsize=8)
for ax, heights, title in (
    (middle, held_loss, "Loss of held-out answers"),
    (right, {name: 100 * found[2] for name, (_, _, found) in runs.items()}, "Right answers, %"),
):
    ax.bar(range(3), heights.values(), color=[shades[name] for name in heights], width=0.6)
    ax.set_xticks(range(3), heights, fontsize=7.5)
    ax.set_title(title, loc="left", fontweight="bold", fontsize=9.5)
show(
    figure,
    alt="left: training losses of the three runs all fall, that with the mask off by one lies lowest. middle: its loss on "
    "held-out answers is the highest by far. right: it answers hardly anything right; the other two nearly all",
)

# %% id="faults-answers"
for name, (_, _, found) in runs.items():
    print(f"{name:<11} {found[0][1]!r}")


# %% [markdown] id="faults-look" tags=["slide"]
# Look at the left picture alone. The run with the mask off by one looks like the *best* of the three. It leaves out the
# hardest target, the first token of each answer, and adds easy ones, such as the `<|user_start|>` or BOS that follows
# every answer. What it never learned, how to begin, shows only when it must answer: it gets one answer in ten right.
#
# The run without a mask logs the highest loss, for a question is harder to guess than its answer. Three quarters of each
# of its steps go into questions that it will never have to ask, and its held-out answers cost about twice as much. Yet it
# gets as many of them right, and the cost fades: after a longer base training and 160 steps instead of 90 it was 0.005
# nats. That is how such a mistake lives for a month.
#
# The loss does not tell. The targets do: some tokens are never the model's to say, and after
# `<|assistant_start|>` it always is the model's turn.

# %% id="sft.mask_faults" level=2 minutes=15 nbgrader={"cell_type": "code", "grade": false, "grade_id": "sft-mask_faults", "locked": false, "schema_version": 3, "solution": true, "task": false} points=2 tags=["exercise"]
def mask_faults(inputs: np.ndarray, targets: np.ndarray, foreign: list[int], start: int) -> tuple[int, int]:
    """Two counts of what a right mask never does. inputs, targets: (B, T) ids, targets -1 where nothing is trained.

    First: trained targets that are among `foreign`, the ids that only others write. Second: positions that read
    `start`, the id of <|assistant_start|>, and train nothing. Python integers.
    """
    raise NotImplementedError


# %% id="sft.mask_faults.check" nbgrader={"cell_type": "code", "grade": true, "grade_id": "sft-mask_faults-check", "locked": true, "points": 2, "schema_version": 3, "solution": false, "task": false}
check("sft.mask_faults", mask_faults)

# %% id="faults-run"
faults = mine("sft.mask_faults")
names = ("bos", "user_start", "user_end", "assistant_start", "output_start", "output_end")
foreign = [tokenizer.encode_special(f"<|{name}|>") for name in names]
start = tokenizer.encode_special("<|assistant_start|>")
for name, their_targets in {"right": right_targets, **wrong_targets}.items():
    strange, headless = faults(rows[:, :-1], their_targets, foreign, start)
    print(f"{name:<11} foreign tokens trained: {strange:>5}   answers without a first token: {headless:>5}")

# %% [markdown] id="faults-caught"
# One line, before the first step, and both mistakes are in the open. A check of what you *feed* the model finds in a
# second what its loss hides for a month.

# %% id="faults-numbers"
if not fast():
    late = {name: np.mean(curve[SFT_STEPS // 3 :]) for name, (_, curve, _) in runs.items()}
    about(late["right"] - late["off by one"], 0.07, within=0.05, name="off by one logs less by, nats")
    about(held_loss["no mask"] - held_loss["right"], 0.09, within=0.08, name="what no mask costs on answers, nats")
    about(held_loss["off by one"] - held_loss["right"], 0.9, within=0.4, name="what off by one costs, nats")
    about(100 * runs["no mask"][2][2], 92, within=10, name="answers without a mask that are right, %")
    _ = about(100 * runs["off by one"][2][2], 11, within=12, name="answers of off by one that are right, %")

# %% [markdown] id="own-text"
# **Your own run.** When you have one (`nanochat run --preset cpu --run-dir runs/mine`, about ten minutes), ask the model
# before and after:
#
# ```
# nanochat chat --run-dir runs/mine --stage base -p "Who are you?"
# nanochat chat --run-dir runs/mine --stage sft -p "Who are you?"
# ```

# %% [markdown] id="takeaway" tags=["slide"]
# > **Takeaway.** Fine-tuning is pretraining with −1 in the targets. The mask says which tokens are the model's own: its
# > words, its calls, its end; and it belongs to the token that is *said*. Small sets count by copies, conversations are packed
# > whole, losses are divided once by all targets of a step. A falling loss proves nothing about the mask: count foreign
# > tokens and headless answers before step 0. Bits per byte of chats compare with nothing but themselves.

# %% [markdown] id="simplified"
# ## What was simplified
#
# - `render_conversation` in `nanochat_lib/conversation.py` also checks a conversation and merges the system message;
#   `render_for_completion` cuts the *oldest* turns of a long prompt, where nanochat cuts the newest.
# - The loader packs from a buffer of 100, resumes to the token, and counts what it dropped and cut: `ChatLoader` in
#   `nanochat_lib/loader.py`, `ConversationRows` in `nanochat_lib/streams.py`. One pass or many: `one_pass`.
# - The stage itself, warm start of the optimiser included: `nanochat_lib/sft.py`; `all_tokens` is the run without a mask,
#   as midtraining had it on purpose. Momentum restarts at 0.85 there: `sft_schedule` in `nanochat_lib/schedules.py`.
# - nanochat averages micro-batches and ranks with equal weight; here one division: `loss_and_gradients` in
#   `nanochat_lib/train_step.py`.
# - SmolTalk, MMLU, GSM8K from the hub: `nanochat_lib/tasks/` and `nanochat_lib/chat_data.py`; `nanochat data get`.
# - Figures of nanochat are from its own documentation and reports. SmolTalk: Allal et al., arXiv:2502.02737; MMLU:
#   Hendrycks et al., arXiv:2009.03300; GSM8K: Cobbe et al., arXiv:2110.14168.

# %% id="end"
progress()
