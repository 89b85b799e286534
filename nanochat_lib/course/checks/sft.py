"""Checks, hints, quizzes and predictions of chapter 08, SFT."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

from nanochat_lib import conversation, packing
from nanochat_lib.course.cases import (
    Exercise,
    Option,
    Prediction,
    Quiz,
    example,
    prop,
    raises,
    reference,
    sign,
    suspect,
)
from nanochat_lib.errors import UserError
from nanochat_lib.tasks import common, gsm8k
from nanochat_lib.tokenizer import Tokenizer


@cache
def small_tokenizer() -> Tokenizer:
    """A few merges, so that tokens are longer than a byte and can be told from the pieces that they stand in."""
    return Tokenizer([b"lo", b"low", b"is", b" is", b"12", b"+3", b"ok"])


# ---- the format


def spoken(fn: Callable, messages: list[dict]) -> tuple[list[str], list[tuple[int, int]]]:
    """What `fn` renders, readable: ("token mask" of each token, spans)."""
    ids, mask, spans = fn(small_tokenizer(), messages)
    if len(ids) != len(mask):
        raise ValueError(f"{len(ids)} ids but {len(mask)} entries in the mask: each token has one")
    tokens = [small_tokenizer().id_to_bytes(i).decode("utf-8", "backslashreplace") for i in ids]
    return [f"{token} {m}" for token, m in zip(tokens, mask, strict=True)], [tuple(map(int, span)) for span in spans]


def some_messages(rng: np.random.Generator, count: int) -> list[dict]:
    """`count` messages, the first a user's; answers with calls, results and text in any order, or plain."""
    words = ["low", "lo", " is", "12", "+3", "ok", "é", "\n", "<|bos|>"]

    def string() -> str:
        return "".join(rng.choice(words, rng.integers(1, 5)))

    messages = []
    for i in range(count):
        kinds = [("text", "python", "python_output")[k] for k in rng.integers(0, 3, 4)]
        parts = [{"type": kind, "text": string()} for kind in (*kinds, "python", "python_output")]
        content = string() if i % 2 == 0 or i % 4 == 3 else parts
        messages.append({"role": ("user", "assistant")[i % 2], "content": content})
    return messages


def _tokens(out: object) -> list[str]:
    return list(out[0]) if isinstance(out, tuple) and out and isinstance(out[0], list) else []


def _other_mask(*names: str) -> Callable:
    """Whether the first difference is the mask of one of these tokens (of any token when there are none)."""

    def seen(got: object, want: object, messages: list[dict]) -> bool:
        differing = [(a, b) for a, b in zip(_tokens(got), _tokens(want), strict=False) if a != b]
        if len(_tokens(got)) != len(_tokens(want)) or not differing:
            return False
        first, other = differing[0]
        token = first[:-2]
        return token == other[:-2] and (not names or token in names)

    return seen


def _wrong_in(marker: str) -> Callable:
    """Whether the first differing mask is that of a plain token which stands after `marker`, before any other one."""

    def seen(got: object, want: object, messages: list[dict]) -> bool:
        ours, theirs = _tokens(got), _tokens(want)
        at = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), None)
        if len(ours) != len(theirs) or at is None:
            return False
        special = [token[:-2] for token in theirs[:at] if token.startswith("<|") and token[:-2].endswith("|>")]
        return bool(special) and special[-1] == marker and ours[at][:-2] == theirs[at][:-2]

    return seen


def _spelled_out(got: object, want: object, messages: list[dict]) -> bool:
    return (
        len(_tokens(got)) > len(_tokens(want)) > 0 and _tokens(got).count("<|user_start|> 0") < len(messages) // 2 + 1
    )


def _spans_differ(got: object, want: object, messages: list[dict]) -> bool:
    return bool(_tokens(got)) and _tokens(got) == _tokens(want) and got[1] != want[1]


def _mask_shown() -> object:
    from nanochat_lib.report.strips import mask_strip

    messages = [
        {"role": "user", "content": "is 12+3 low?"},
        {
            "role": "assistant",
            "content": [
                {"type": "text", "text": "ok "},
                {"type": "python", "text": "12+3"},
                {"type": "python_output", "text": "15"},
                {"type": "text", "text": "low"},
            ],
        },
    ]
    ids, mask, _ = conversation.render_turns(small_tokenizer(), messages)
    return mask_strip([small_tokenizer().decode([i]) for i in ids], mask, title="The right answer")


def _targets_shown() -> str:
    ids, mask = [10, 20, 30, 40, 50], [0, 0, 1, 1, 0]
    inputs, targets = conversation.targets_from(ids, mask)
    return f"ids     {ids}\nmask    {mask}\ninputs  {inputs}\ntargets {targets}"


# ---- tool calls


def some_solution(rng: np.random.Generator) -> tuple[str]:
    a, b, c = (int(n) for n in rng.integers(2, 60, 3))
    return (f"First {a}*{b} = <<{a}*{b}={a * b}>>{a * b}.\nThen <<{c}/7={c / 7:.2f}>>\n<<{a}-{b}>>#### {a - b}",)


def _parts(solution: str, expression: Callable, made: Callable) -> list[dict[str, str]]:
    """The parts with another rule for the expression, or for what becomes of it."""
    parts: list[dict[str, str]] = []
    for piece in gsm8k.CALL.split(solution):
        if not gsm8k.CALL.fullmatch(piece):
            parts.append({"type": "text", "text": piece})
        else:
            parts += made(expression(piece[2:-2]), piece[2:-2])
    return parts


def _up_to_last(inner: str) -> str:
    return inner.rpartition("=")[0] if "=" in inner else inner


def _of_the_data(call: str, inner: str) -> list[dict[str, str]]:
    return [{"type": "python", "text": call}, {"type": "python_output", "text": inner.rpartition("=")[2]}]


def _parts_shown() -> str:
    solution = "They pay 50/6 = <<50/6=8.33>>8.33 each.\n#### 8"
    return "\n".join(f"{part['type']:<14} {part['text']!r}" for part in gsm8k.parts_of(solution))


# ---- the cut


def spans_and_limit(rng: np.random.Generator) -> tuple[int, list[tuple[int, int]], int]:
    """Spans of three tokens or more, some of them next to each other, and a limit that falls anywhere."""
    spans, at = [], int(rng.integers(1, 4))
    for _ in range(5):
        size = int(rng.integers(3, 7))
        spans.append((at, at + size))
        at += size + int(rng.integers(0, 4))
    return at + 3, spans, int(rng.integers(2, at + 6))


def _cut_right(out: int, length: int, spans: list[tuple[int, int]], max_tokens: int) -> str:
    if not 0 <= out <= min(length, max_tokens):
        return f"{out} tokens stay of {length}, at most {max_tokens} may"
    if broken := [span for span in spans if span[0] < out < span[1]]:
        return f"the cut at {out} lies inside of the span {broken[0]}"
    right = conversation.cut_point(length, spans, max_tokens)
    return "" if out == right else f"the cut at {out} loses tokens that could stay: {right} do"


def _cuts_shown() -> str:
    spans = [(5, 9), (9, 12)]
    cuts = [conversation.cut_point(15, spans, limit) for limit in range(3, 17)]
    return f"15 tokens, spans {spans}\nlimit {list(range(3, 17))}\nstay  {cuts}"


# ---- mixtures


def _place_of(item: int, ends: np.ndarray, side: str = "right", before: Callable = lambda ends, task: 0) -> tuple:
    task = int(np.searchsorted(ends, item, side=side))
    return task, item - before(ends, task)


def _places_shown() -> str:
    ends = np.array([3, 3, 8])
    lines = [f"tasks of 3, 0 and 5 conversations, ends {ends.tolist()}"]
    lines += [f"number {item} is (task, conversation) {common.task_of(item, ends)}" for item in range(8)]
    return "\n".join(lines)


# ---- packing


def some_chats(rng: np.random.Generator, count: int, longest: int, shortest: int = 2) -> list:
    """(ids, mask) of `count` chats; each has ids of its own, so that a mix-up shows."""
    lengths = rng.integers(shortest, longest + 1, count)
    return [([10 + k] * int(n), rng.integers(0, 2, int(n)).tolist()) for k, n in enumerate(lengths)]


def packed(chats: list, capacity: int, pad: int) -> tuple[np.ndarray, np.ndarray]:
    """`pack_chats` with the library's packer. Also its fallback."""
    packer = packing.BestFitPacker(capacity, max(len(chats), 1), crop=False, pad_id=pad)
    for ids, mask in chats:
        packer.add(ids, mask)
    rows, masks = [], []
    while len(packer):
        row, mask = np.empty(capacity, np.int32), np.empty(capacity, np.int8)
        packer.fill_row(row, mask, lambda: False)
        rows.append(row)
        masks.append(mask)
    return np.array(rows, np.int32), np.array(masks, np.int8)


def _both(out: object) -> tuple[np.ndarray, np.ndarray] | None:
    if isinstance(out, tuple) and len(out) == 2 and all(isinstance(part, np.ndarray) for part in out):
        return out
    return None


def _pad_differs(got: object, want: object, chats: list, capacity: int, pad: int) -> bool:
    ours, theirs = _both(got), _both(want)
    if not ours or not theirs or ours[0].shape != theirs[0].shape:
        return False
    wrong = ours[0] != theirs[0]
    return bool(wrong.any()) and bool((theirs[0][wrong] == pad).all()) and bool((theirs[1][wrong] == 0).all())


def _mask_differs(padding: bool) -> Callable:
    def seen(got: object, want: object, chats: list, capacity: int, pad: int) -> bool:
        ours, theirs = _both(got), _both(want)
        if not ours or not theirs or ours[0].shape != theirs[0].shape or not (ours[0] == theirs[0]).all():
            return False
        wrong = ours[1] != theirs[1]
        return bool(wrong.any()) and bool((theirs[0][wrong] == pad).all()) == padding

    return seen


def _sizes(rows: np.ndarray) -> list[int]:
    """Length of the first chat of every row."""
    return [int((row == row[0]).sum()) for row in rows]


def _shorter_first(got: object, want: object, chats: list, capacity: int, pad: int) -> bool:
    ours, theirs = _both(got), _both(want)
    return bool(ours and theirs and len(ours[0])) and _sizes(ours[0])[0] < _sizes(theirs[0])[0]


def _ties_differ(got: object, want: object, chats: list, capacity: int, pad: int) -> bool:
    ours, theirs = _both(got), _both(want)
    if not ours or not theirs or ours[0].shape != theirs[0].shape:
        return False
    return _sizes(ours[0]) == _sizes(theirs[0]) and bool((ours[0] != theirs[0]).any())


def _packed_shown() -> object:
    from nanochat_lib.report.strips import batch_grid

    lengths = [9, 5, 3, 8, 4, 4, 7, 2]
    chats = [([0] + [k + 1] * (n - 1), [0] * (n // 2) + [1] * (n - n // 2)) for k, n in enumerate(lengths)]
    rows, masks = packed(chats, 13, 0)
    return batch_grid(rows, 0, np.where(masks == 1, rows, -1), title="Chats of 9, 5, 3, 8, 4, 4, 7 and 2 tokens")


# ---- the loss


def some_nll(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """(nll, targets), (4, 3, 7): few targets in the first micro-batch, none in the last, the id 0 among them."""
    nll = rng.uniform(0.1, 6, (4, 3, 7)).astype(np.float32)
    targets = rng.integers(0, 4, nll.shape)
    targets[0][rng.random((3, 7)) < 0.8] = -1
    targets[0, 0, 0] = 1
    targets[1][rng.random((3, 7)) < 0.3] = -1
    targets[3] = -1
    return nll, targets


def mean_over_targets(nll: np.ndarray, targets: np.ndarray) -> float:
    """`step_loss`, one position at a time. Also its fallback."""
    found = [float(x) for x, target in zip(np.ravel(nll), np.ravel(targets), strict=True) if target >= 0]
    return math.fsum(found) / len(found) if found else 0.0


def _mean_of_means(nll: np.ndarray, targets: np.ndarray) -> float:
    return float(np.mean([mean_over_targets(n, t) for n, t in zip(nll, targets, strict=True)]))


def _losses_shown() -> str:
    nll = np.array([[[4.0, 9.0]], [[1.0, 2.0]]])
    targets = np.array([[[5, -1]], [[6, 0]]])
    return (
        f"nll {nll.tolist()}\ntargets {targets.tolist()}\nstep_loss {mean_over_targets(nll, targets):.4f}, and "
        f"{mean_over_targets(nll, 0 * targets - 1)} when all targets are -1"
    )


# ---- faults


def some_rows(rng: np.random.Generator, batch: int = 3, time: int = 11) -> tuple:
    """(inputs, targets, foreign, start): ids 0 … 9, of which 1, 4 and 8 are foreign, and 4 asks for an answer."""
    ids = rng.integers(0, 10, (batch, time + 1))
    targets = np.where(rng.random((batch, time)) < 0.5, ids[:, 1:], -1)
    return ids[:, :-1], targets, [1, 4, 8], 4


def faults_slowly(inputs: np.ndarray, targets: np.ndarray, foreign: Sequence[int], start: int) -> tuple[int, int]:
    """`mask_faults`, one position at a time. Also its fallback."""
    strange = headless = 0
    for read, said in zip(np.ravel(inputs).tolist(), np.ravel(targets).tolist(), strict=True):
        strange += said in foreign
        headless += read == start and said < 0
    return strange, headless


def _faults(first: Callable, second: Callable) -> Callable:
    def wrong(inputs: np.ndarray, targets: np.ndarray, foreign: list[int], start: int) -> tuple[int, int]:
        right = faults_slowly(inputs, targets, foreign, start)
        return (
            int(first(inputs, targets, foreign, start).sum()) if first else right[0],
            int(second(inputs, targets, foreign, start).sum()) if second else right[1],
        )

    return wrong


def _faults_shown() -> str:
    inputs = np.array([[0, 3, 7, 4, 5, 6, 0]])
    rows = {"right": [-1, -1, -1, 5, 6, -1, -1], "off by one": [-1, -1, -1, -1, 6, 0, -1]}
    lines = [f"inputs {inputs[0].tolist()}, foreign [0, 3, 4], start 4"]
    for name, targets in rows.items():
        lines.append(f"{name:<10} targets {targets}: {faults_slowly(inputs, np.array([targets]), [0, 3, 4], 4)}")
    return "\n".join(lines)


EXERCISES = [
    Exercise(
        "sft.render_turns",
        cases=[
            example(
                "a question and a plain answer",
                ([{"role": "user", "content": "low"}, {"role": "assistant", "content": "ok is"}],),
                (
                    [
                        "<|bos|> 0",
                        "<|user_start|> 0",
                        "low 0",
                        "<|user_end|> 0",
                        "<|assistant_start|> 0",
                        "ok 1",
                        " is 1",
                        "<|assistant_end|> 1",
                    ],
                    [],
                ),
            ),
            example(
                "a call, its result, and text",
                (
                    [
                        {"role": "user", "content": "12+3"},
                        {
                            "role": "assistant",
                            "content": [
                                {"type": "python", "text": "12+3"},
                                {"type": "python_output", "text": "15"},
                                {"type": "text", "text": "ok"},
                            ],
                        },
                    ],
                ),
                (
                    [
                        "<|bos|> 0",
                        "<|user_start|> 0",
                        "12 0",
                        "+ 0",
                        "3 0",
                        "<|user_end|> 0",
                        "<|assistant_start|> 0",
                        "<|python_start|> 1",
                        "12 1",
                        "+ 1",
                        "3 1",
                        "<|python_end|> 1",
                        "<|output_start|> 0",
                        "1 0",
                        "5 0",
                        "<|output_end|> 0",
                        "ok 1",
                        "<|assistant_end|> 1",
                    ],
                    [(7, 12), (12, 16)],
                ),
            ),
            reference("two questions, two answers", lambda rng: (some_messages(rng, 4),)),
        ],
        causes=[
            sign(
                "<|assistant_end|> must have mask 1: a model that is not trained to say it never learns to stop",
                _other_mask("<|assistant_end|>"),
            ),
            sign(
                "<|assistant_start|> must have mask 0: the program writes it when it asks for an answer",
                _other_mask("<|assistant_start|>"),
            ),
            sign("BOS must have mask 0: nobody but the program begins a conversation", _other_mask("<|bos|>")),
            sign(
                "a tool's result and both its markers have mask 0: the calculator writes them",
                _other_mask("<|output_start|>", "<|output_end|>"),
            ),
            sign("the text of a tool's result has mask 0: the calculator writes it", _wrong_in("<|output_start|>")),
            sign(
                "a tool call and both its markers have mask 1: the model writes them",
                _other_mask("<|python_start|>", "<|python_end|>"),
            ),
            sign(
                "the user's words and markers have mask 0: the model only reads the user's words",
                _other_mask("<|user_start|>", "<|user_end|>"),
            ),
            sign("the user's words have mask 0: the model only reads them", _wrong_in("<|user_start|>")),
            sign(
                "the special tokens are spelled as text: `user_turn` and `encode_special` give the one id of each",
                _spelled_out,
            ),
            sign(
                "ids and mask are right, the spans are not: (index of the opening token, index after the closing one)",
                _spans_differ,
            ),
            sign("a mask differs: see the table for who writes this token", _other_mask()),
        ],
        hints=[
            "Two lists that grow together, ids and mask. Write two helpers: one appends a special token, the other the "
            "ids of a string; both take the mask.",
            "Loop over the messages. A user's turn is `user_turn(…)` with mask 0. An assistant's starts with its "
            "marker; "
            "make a list of one text part of a plain string, then all parts go the same way: `PARTS[type]` gives "
            "opening, closing and mask. A part with markers is a span, from the length before to the length after.",
            _mask_shown,
        ],
        call=spoken,
    ),
    Exercise(
        "sft.targets_from",
        cases=[
            example("the second half is an answer", ([9, 5, 6, 7], [0, 0, 1, 1]), ([9, 5, 6], [-1, 6, 7])),
            example("an answer in the middle", ([1, 2, 3, 4, 5], [0, 1, 1, 0, 0]), ([1, 2, 3, 4], [2, 3, -1, -1])),
            reference("ten tokens", lambda rng: (rng.integers(0, 99, 10).tolist(), rng.integers(0, 2, 10).tolist())),
            example("lists of different length", ([1, 2, 3], [0, 1]), raises(UserError)),
        ],
        causes=[
            suspect(
                "this is the mask of the token that is read; a target has a mask of its own, one place further",
                lambda ids, mask: (ids[:-1], [i if m else -1 for i, m in zip(ids[1:], mask[:-1], strict=False)]),
            ),
            suspect(
                "targets are the *next* tokens: with the same ones the model learns to copy what it reads",
                lambda ids, mask: (ids[:-1], [i if m else -1 for i, m in zip(ids[:-1], mask[1:], strict=False)]),
            ),
            suspect(
                "a target that is not trained is -1; 0 is the id of a token",
                lambda ids, mask: (ids[:-1], [i if m else 0 for i, m in zip(ids[1:], mask[1:], strict=False)]),
            ),
            sign(
                "inputs are all ids but the last: nothing follows that one",
                lambda got, want, *_: isinstance(got, tuple) and isinstance(want, tuple) and list(got[0]) != want[0],
            ),
        ],
        hints=[
            "Write the ids twice, one under the other, the second list moved by one. Which mask belongs to the "
            "lower one?",
            "Inputs lose the last id; targets are the ids without the first, each with the mask of the same index, and "
            "-1 where that is 0. Compare the lengths before anything else.",
            _targets_shown,
        ],
    ),
    Exercise(
        "sft.parts_of",
        cases=[
            example(
                "one sum",
                ("It is 48/2 = <<48/2=24>>24.",),
                [
                    {"type": "text", "text": "It is 48/2 = "},
                    {"type": "python", "text": "48/2"},
                    {"type": "python_output", "text": "24"},
                    {"type": "text", "text": "24."},
                ],
            ),
            example("no sum", ("#### 24",), [{"type": "text", "text": "#### 24"}]),
            reference("what the data rounded", lambda rng: (f"<<{rng.integers(1, 9)}/7=0.14>>0.14",)),
            reference("no equals sign", lambda rng: (f"so <<{rng.integers(1, 9)}*3>> it is",)),
            reference("two equals signs", lambda rng: (f"<<2*{rng.integers(1, 9)}=4+1=5>>",)),
        ],
        causes=[
            suspect(
                "the expression goes up to the last equals sign of the mark",
                lambda s: _parts(s, lambda i: i.partition("=")[0], lambda c, i: common.call_parts(c)),
            ),
            suspect(
                "the person's answer is a part of the call: you write the answer into the call, then nobody needs a "
                "tool",
                lambda s: _parts(s, lambda i: i, lambda c, i: common.call_parts(c)),
            ),
            suspect(
                "this is the result of the data; in a chat the calculator writes it, so take what `call_parts` gives",
                lambda s: _parts(s, _up_to_last, _of_the_data),
            ),
            suspect(
                "the result is missing: `call_parts` gives the call *and* its result",
                lambda s: _parts(s, _up_to_last, lambda c, i: common.call_parts(c)[:1]),
            ),
            sign(
                "there is a list in the list: `call_parts` gives a list of parts, add them one by one",
                lambda got, want, *_: isinstance(got, list) and any(isinstance(part, list) for part in got),
            ),
        ],
        hints=[
            "`CALL.split(solution)` gives texts and marks in turn. `CALL.fullmatch(piece)` says which a piece is.",
            "A text becomes one part as it is. Of a mark take off two signs on either side; `rpartition('=')` "
            "splits at "
            "the last equals sign. Add what `call_parts` returns to the list.",
            _parts_shown,
        ],
    ),
    Exercise(
        "sft.cut_point",
        cases=[
            example("inside of a call", (20, [(5, 9)], 7), 5),
            example("a call that ends right at the cut", (20, [(5, 9)], 9), 9),
            example("a call that begins right at the cut", (20, [(5, 9)], 5), 5),
            example("long enough for all", (12, [(3, 6)], 40), 12),
            example("the third of three", (30, [(3, 8), (8, 11), (15, 20)], 17), 15),
            prop("any spans, any limit", spans_and_limit, _cut_right),
        ],
        causes=[
            sign(
                "a span that ends right at the cut is whole: ids[begin:end] does not hold the token `end`",
                lambda got, want, length, spans, most: (
                    isinstance(got, int) and any(begin == got and end == most for begin, end in spans)
                ),
            ),
            sign(
                "that is more than max_tokens: go back to before the opening token, not on to the closing one",
                lambda got, want, length, spans, most: isinstance(got, int) and length >= got > most,
            ),
            sign(
                "that is more tokens than there are",
                lambda got, want, length, spans, most: isinstance(got, int) and got > length,
            ),
            sign(
                "the whole conversation is thrown away; only the broken call has to go",
                lambda got, want, *_: got == 0 and (want or 1) > 0,
            ),
            sign(
                "whole calls before the cut are lost: only one that the cut falls into has to go",
                lambda got, want, length, spans, most: (
                    isinstance(got, int) and got < (want if isinstance(want, int) else most)
                ),
            ),
        ],
        hints=[
            "Start with the smaller of the two lengths. When does a cut at n split the span (begin, end)?",
            "It splits it when begin < n < end, both strictly. Then n becomes begin.",
            _cuts_shown,
        ],
    ),
    Exercise(
        "sft.task_of",
        cases=[
            example("the first of all", (0, np.array([3, 8])), (0, 0)),
            example("the last of the first task", (2, np.array([3, 8])), (0, 2)),
            example("the first of the second task", (3, np.array([3, 8])), (1, 0)),
            example("a task without conversations", (3, np.array([3, 3, 8])), (2, 0)),
            reference("five tasks", lambda rng: (int(rng.integers(0, 90)), np.array([7, 30, 31, 60, 90]))),
        ],
        causes=[
            suspect(
                "ends[0] is the first number of the next task: look for the place to the right of equal ends",
                lambda item, ends: _place_of(item, ends, "left", lambda e, task: int(e[task - 1]) if task else 0),
            ),
            suspect(
                "the first task has nothing before it: ends[-1] is the end of the last one",
                lambda item, ends: _place_of(item, ends, before=lambda e, task: int(e[task - 1])),
            ),
            suspect(
                "a task begins where the one before ends: take off the end of the task before, not its own",
                lambda item, ends: _place_of(item, ends, before=lambda e, task: int(e[task]) if task else 0),
            ),
            suspect("a conversation is counted within its task: take off all that comes before", _place_of),
        ],
        hints=[
            "Number 3 with ends [3, 8] is the first one of task 1. How many ends are at most 3?",
            "That count is the task: `searchsorted` gives it with side='right'. From the number take off the end "
            "of the "
            "task before, or 0 for the first.",
            _places_shown,
        ],
    ),
    Exercise(
        "sft.pack_chats",
        cases=[
            example(
                "a row that is exactly full",
                ([([5, 5], [0, 1]), ([6, 6, 6], [0, 1, 1])], 5, 9),
                (np.array([[6, 6, 6, 5, 5]], np.int32), np.array([[0, 1, 1, 0, 1]], np.int8)),
            ),
            example(
                "nothing fits: padding",
                ([([5, 5, 5], [0, 1, 1]), ([6, 6], [0, 1])], 4, 9),
                (np.array([[5, 5, 5, 9], [6, 6, 9, 9]], np.int32), np.array([[0, 1, 1, 0], [0, 1, 0, 0]], np.int8)),
            ),
            reference("twenty chats", lambda rng: (some_chats(rng, 20, 12), 17, 3), against=packed),
            example("a chat that never fits", ([([1, 2], [0, 1]), ([1] * 6, [1] * 6)], 4, 0), raises(UserError)),
        ],
        causes=[
            sign(
                "a chat that is longer than a row never fits: a UserError, before anything waits for ever",
                lambda got, want, chats, capacity, pad: any(len(ids) > capacity for ids, _ in chats),
            ),
            sign("padding is the token `pad`, whatever its id", _pad_differs),
            sign("padding has mask 0: nobody says it", _mask_differs(padding=True)),
            sign("the mask of each chat goes into the row beside its ids", _mask_differs(padding=False)),
            sign("the *longest* that fits goes first", _shorter_first),
            sign("of chats of equal length the first of equals in the list goes first", _ties_differ),
            sign(
                "a chat of exactly the room fits",
                lambda got, want, chats, capacity, pad: _both(got) is None or len(got[0]) != len(want[0]),
            ),
        ],
        hints=[
            "Two loops: rows, and inside of a row the placements, until none of the waiting chats fits.",
            "List the waiting chats that are at most as long as the room; `max(…, key=…)` takes the longest, the first "
            "of equals. Then fill ids with `pad` and mask with 0. A row that is still empty, though chats wait: raise.",
            _packed_shown,
        ],
        fallback=packed,
    ),
    Exercise(
        "sft.step_loss",
        cases=[
            example(
                "one target beside three",
                (np.array([[[6.0, 9.0, 9.0]], [[1.0, 2.0, 3.0]]], np.float32), np.array([[[4, -1, -1]], [[1, 2, 3]]])),
                3.0,
            ),
            example("the id 0", (np.array([[[2.0, 4.0]]], np.float32), np.array([[[0, 1]]])), 3.0),
            example("a step without any target", (np.ones((2, 1, 3), np.float32), np.full((2, 1, 3), -1)), 0.0),
            reference("micro-batches of all kinds", some_nll, against=mean_over_targets),
        ],
        causes=[
            sign(
                "a step without any target has loss 0, not 0 / 0",
                lambda got, want, nll, targets: bool((targets < 0).all()) and got != 0,
            ),
            suspect(
                "this is the mean of means: a target of a nearly empty micro-batch weighs more than others; divide "
                "once",
                _mean_of_means,
            ),
            suspect(
                "id 0 is a token like others: not trained is what is below 0",
                lambda nll, targets: mean_over_targets(nll, np.where(targets == 0, -1, targets)),
            ),
            suspect(
                "you divide by all positions: count those with a target",
                lambda nll, targets: float(np.sum(nll, where=targets >= 0) / targets.size),
            ),
            suspect(
                "losses of positions that are not trained are in the sum",
                lambda nll, targets: float(np.sum(nll) / max((targets >= 0).sum(), 1)),
            ),
        ],
        hints=[
            "Two sums over everything, A, B and T: the losses of the trained positions, and how many they are.",
            "`targets >= 0` marks the trained ones. `np.sum(nll, where=…)` adds up only those, whatever stands "
            "elsewhere. "
            "Never divide by less than 1.",
            _losses_shown,
        ],
        fallback=mean_over_targets,
    ),
    Exercise(
        "sft.mask_faults",
        cases=[
            example(
                "a right mask",
                (np.array([[0, 3, 7, 4, 5, 6]]), np.array([[-1, -1, -1, 5, 6, -1]]), [0, 3, 4], 4),
                (0, 0),
            ),
            example(
                "off by one",
                (np.array([[0, 3, 7, 4, 5, 6, 0]]), np.array([[-1, -1, -1, -1, 6, 0, -1]]), [0, 3, 4], 4),
                (1, 1),
            ),
            reference("three rows", some_rows, against=faults_slowly),
        ],
        causes=[
            suspect(
                "foreign tokens may well be read: count those that are trained as targets, not what is read",
                _faults(lambda i, t, f, s: np.isin(i, f), None),
            ),
            suspect(
                "the second count is of positions that read `start` and train nothing: targets below 0",
                _faults(None, lambda i, t, f, s: (i == s) & (t >= 0)),
            ),
            suspect(
                "the second count is of positions whose input reads `start`",
                _faults(None, lambda i, t, f, s: (t == s) & (t < 0)),
            ),
            suspect(
                "look for all of `foreign`, not only for its first id",
                _faults(lambda i, t, f, s: t == f[0], None),
            ),
            sign(
                "count them: how many, not whether",
                lambda got, want, *_: (
                    isinstance(got, tuple) and isinstance(want, tuple) and got[1:] == want[1:] and got[0] in (0, 1)
                ),
            ),
        ],
        hints=[
            "Two arrays of truth values, (B, T) each, and their sums.",
            "`np.isin(array, list)` marks the elements that the list holds. The second: `inputs` equal to `start`, and "
            "at the same place a target below 0.",
            _faults_shown,
        ],
        fallback=faults_slowly,
    ),
]

QUIZZES = [
    Quiz(
        "sft.q_stop",
        "By mistake <|assistant_end|> has mask 0. All else is right. What will the model do in a chat?",
        [
            Option(
                "Answer well and stop: end tokens are easy",
                why="Easy to learn, but nobody teaches it: a token that is never a target never becomes likely.",
            ),
            Option(
                "Answer, and then go on: more text, until the limit of tokens ends it",
                right=True,
                why="After the answer it has to say something, and the one thing that is right was never trained.",
            ),
            Option(
                "Say nothing at all",
                why="The answer's own tokens are trained as before; only the end is not.",
            ),
        ],
    ),
    Quiz(
        "sft.q_tool",
        "Why is a tool's result not trained?",
        [
            Option(
                "Numbers cannot be learned",
                why="They can, badly. Calls hold numbers too, and those are trained.",
            ),
            Option(
                "The model shall not write it: it would learn to make results up instead of waiting for them",
                right=True,
                why="What it writes itself it need not ask for. And each result is sure as soon as the calculator says "
                "it, "
                "so a loss on it would be spent on adding in the head.",
            ),
            Option(
                "The model does not read it",
                why="It does: the result stands in the context, and the rest of the answer depends on it.",
            ),
        ],
    ),
    Quiz(
        "sft.q_copies",
        "GSM8K is listed four times, the mixture is read once. How often is each of its problems trained on?",
        [
            Option("Once: it was one pass", why="One pass of the mixture, in which each problem has four numbers."),
            Option(
                "Four times, spread over the pass",
                right=True,
                why="Copies have numbers of their own, and the shuffle spreads them. Were it listed twice and read "
                "twice, it "
                "would be the same dose for GSM8K, and twice as much of everything else.",
            ),
            Option(
                "Four times in a row",
                why="Only if nothing were shuffled; the order is drawn over all numbers.",
            ),
        ],
    ),
    Quiz(
        "sft.q_bpb",
        "A log shows 0.81 bits per byte at the end of pretraining, and 0.40 at the end of SFT. What follows?",
        [
            Option(
                "The model has become twice as good",
                why="At what? The text is another one: chats have fixed phrases, letters as answers, repeated forms.",
            ),
            Option(
                "Nothing: other text and another mask, so another measurement",
                right=True,
                why="Masked, it counts the assistant's bytes only. Measure the *same* text and mask before and after.",
            ),
            Option(
                "SFT used too high a rate",
                why="The numbers do not say so. A rate that is too high shows in the tasks, and in the documents' "
                "loss.",
            ),
        ],
    ),
]

PREDICTIONS = [
    Prediction("sft.p_share", "What share of all tokens of the primer's chats is trained (mask 1)?", unit="%"),
    Prediction(
        "sft.p_weight",
        "Mean of means over two micro-batches with 24 and 480 trained targets: how many times as much does a "
        "target of the "
        "first weigh as one of the second?",
        unit="times",
    ),
]
