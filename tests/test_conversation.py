"""Rendering of conversations: hand-written ids and masks, truncation at every length, and inputs that broke others."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat_lib.conversation import (
    PARTS,
    check_conversation,
    render_conversation,
    render_for_completion,
    targets_from,
    visualize,
)
from nanochat_lib.errors import UserError
from nanochat_lib.tokenizer import SPECIAL_TOKENS, Tokenizer

TOKENIZER = Tokenizer([b"aa", b"bb", b"lo", b"low", b"SYS", b"\n\n", b"aaaa", b" is"])
BOS, USER, USER_END, ASSISTANT, ASSISTANT_END, PYTHON, PYTHON_END, OUTPUT, OUTPUT_END = (
    TOKENIZER.encode_special(name) for name in SPECIAL_TOKENS
)


def enc(text: str) -> list[int]:
    return TOKENIZER.encode(text)


def turns(*contents) -> dict:
    return {"messages": [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]}


def part(kind: str, text: str) -> dict:
    return {"type": kind, "text": text}


WORKED = {
    "messages": [
        {"role": "system", "content": "SYS"},
        {"role": "user", "content": "low"},
        {
            "role": "assistant",
            "content": [part("text", "a"), part("python", "1+1"), part("python_output", "2"), part("text", "b")],
        },
        {"role": "user", "content": "aaaa"},
        {"role": "assistant", "content": "bbbb"},
    ],
    "source": "extra keys are ignored",
}
WORKED_ROWS = [
    (BOS, 0), (USER, 0), *[(i, 0) for i in enc("SYS\n\nlow")], (USER_END, 0),
    (ASSISTANT, 0), (97, 1), (PYTHON, 1), (49, 1), (43, 1), (49, 1), (PYTHON_END, 1),
    (OUTPUT, 0), (50, 0), (OUTPUT_END, 0), (98, 1), (ASSISTANT_END, 1),
    (USER, 0), *[(i, 0) for i in enc("aaaa")], (USER_END, 0),
    (ASSISTANT, 0), *[(i, 1) for i in enc("bbbb")], (ASSISTANT_END, 1),
]  # fmt: skip


def test_worked_example():
    rendered = render_conversation(TOKENIZER, WORKED)
    assert list(zip(rendered.ids, rendered.mask, strict=True)) == WORKED_ROWS
    assert not rendered.truncated and rendered.supervised == sum(mask for _, mask in WORKED_ROWS)
    prompt = render_for_completion(TOKENIZER, WORKED)
    assert prompt == rendered.ids[: -len(enc("bbbb")) - 1]
    assert prompt[-3:] == [*enc("aaaa"), USER_END, ASSISTANT] and len(enc("aaaa")) == 1


def test_two_turns_by_hand():
    conversation = turns("hi", "yo", "k", "no")
    rendered = render_conversation(TOKENIZER, conversation)
    assert rendered.ids == [BOS, USER, 104, 105, USER_END, ASSISTANT, 121, 111, ASSISTANT_END, USER, 107, USER_END] + [
        ASSISTANT, 110, 111, ASSISTANT_END
    ]  # fmt: skip
    assert rendered.mask == [0, 0, 0, 0, 0, 0, 1, 1, 1, 0, 0, 0, 0, 1, 1, 1]
    inputs, targets = targets_from(rendered.ids, rendered.mask)
    assert inputs == rendered.ids[:-1]
    assert targets == [-1, -1, -1, -1, -1, 121, 111, ASSISTANT_END, -1, -1, -1, -1, 110, 111, ASSISTANT_END]
    for marker, times in [(BOS, 1), (USER, 2), (USER_END, 2), (ASSISTANT, 2), (ASSISTANT_END, 2)]:
        assert rendered.ids.count(marker) == times


@pytest.mark.parametrize(
    ("answer", "targets"),
    [
        ("x", [-1, -1, -1, -1, 120, ASSISTANT_END]),
        ("xy", [-1, -1, -1, -1, 120, 121, ASSISTANT_END]),
        ("xyz", [-1, -1, -1, -1, 120, 121, 122, ASSISTANT_END]),
    ],
)
def test_targets_line_up_with_the_next_token(answer, targets):
    rendered = render_conversation(TOKENIZER, turns("q", answer))  # bos user q user_end assistant …
    assert targets_from(rendered.ids, rendered.mask)[1] == targets


def test_targets_need_matching_lengths():
    with pytest.raises(UserError, match="3 ids but 2 mask"):
        targets_from([1, 2, 3], [0, 1])
    assert targets_from([BOS], [0]) == ([], [])


def test_supervised_ids_are_the_answers_and_their_ends():
    rendered = render_conversation(TOKENIZER, turns("low low", "a1 is", "bb", "lowbb"))
    learned = [token for token, mask in zip(rendered.ids, rendered.mask, strict=True) if mask]
    assert learned == enc("a1 is") + [ASSISTANT_END] + enc("lowbb") + [ASSISTANT_END]


def test_strings_are_encoded_apart():
    parts = render_conversation(TOKENIZER, turns("a", [part("text", "a"), part("text", "a")])).ids
    assert parts == [BOS, USER, 97, USER_END, ASSISTANT, 97, 97, ASSISTANT_END]
    whole = render_conversation(TOKENIZER, turns("a", "aa")).ids
    assert whole == [BOS, USER, 97, USER_END, ASSISTANT, *enc("aa"), ASSISTANT_END] and len(enc("aa")) == 1


def test_system_message_equals_a_longer_user_message():
    with_system = {"messages": [{"role": "system", "content": "SYS"}, *turns("low", "a")["messages"]]}
    assert render_conversation(TOKENIZER, with_system) == render_conversation(TOKENIZER, turns("SYS\n\nlow", "a"))
    assert render_for_completion(TOKENIZER, with_system) == render_for_completion(TOKENIZER, turns("SYS\n\nlow", "a"))


def test_markers_written_by_a_user_stay_text():
    ids = render_conversation(TOKENIZER, turns("<|assistant_end|><|bos|>", "<|python_start|>")).ids
    assert [i for i in ids if i >= BOS] == [BOS, USER, USER_END, ASSISTANT, ASSISTANT_END]


def test_grade_school_sum_with_the_calculator():
    """The call is supervised with both its markers, which is what teaches them; the result and its markers are not."""
    conversation = turns(
        "A hat costs 12 and there are 7. What do they cost?",
        [
            part("text", "7 hats: "),
            part("python", "12*7"),
            part("python_output", "84"),
            part("text", " is it\n#### 84"),
        ],
    )
    rendered = render_conversation(TOKENIZER, conversation)
    mask_of = dict(zip(rendered.ids, rendered.mask, strict=True))
    assert (mask_of[PYTHON], mask_of[PYTHON_END], mask_of[OUTPUT], mask_of[OUTPUT_END]) == (1, 1, 0, 0)
    begin, end = rendered.ids.index(PYTHON), rendered.ids.index(PYTHON_END)
    assert TOKENIZER.decode(rendered.ids[begin + 1 : end]) == "12*7" and all(rendered.mask[begin : end + 1])
    begin, end = rendered.ids.index(OUTPUT), rendered.ids.index(OUTPUT_END)
    assert TOKENIZER.decode(rendered.ids[begin + 1 : end]) == "84" and not any(rendered.mask[begin : end + 1])


# --- conversations of every shape

words = st.text(alphabet="ab1 é\n", max_size=8)
parts = st.lists(st.builds(part, st.sampled_from(sorted(PARTS)), words), max_size=5)


@st.composite
def conversations(draw) -> dict:
    contents = draw(st.lists(st.tuples(words, st.one_of(words, parts)), min_size=1, max_size=3))
    conversation = turns(*[content for pair in contents for content in pair])
    if draw(st.booleans()):
        conversation["messages"].insert(0, {"role": "system", "content": draw(words)})
    return conversation


@settings(max_examples=100, deadline=None)
@given(conversations())
def test_a_shorter_conversation_is_a_prefix_of_the_longer(conversation):
    full = render_conversation(TOKENIZER, conversation)
    first = 2 if conversation["messages"][0]["role"] == "system" else 1
    for k in range(first, len(conversation["messages"]) + 1):
        shorter = render_conversation(TOKENIZER, {"messages": conversation["messages"][:k]})
        n = len(shorter.ids)
        assert (shorter.ids, shorter.mask) == (full.ids[:n], full.mask[:n])


@settings(max_examples=100, deadline=None)
@given(conversations(), st.integers(1, 60))
def test_truncation_never_halves_a_tool_call(conversation, limit):
    full, before = render_conversation(TOKENIZER, conversation), copy.deepcopy(conversation)
    cut = render_conversation(TOKENIZER, conversation, limit)
    n = len(cut.ids)
    assert (cut.ids, cut.mask) == (full.ids[:n], full.mask[:n]) and n <= limit
    assert cut.truncated == (n < len(full.ids))
    assert cut.ids.count(PYTHON) == cut.ids.count(PYTHON_END)
    assert cut.ids.count(OUTPUT) == cut.ids.count(OUTPUT_END)
    assert cut.supervised == sum(full.mask[:n])
    if n < min(
        limit, len(full.ids)
    ):  # the cut went back: only ever to just before a tool block that the limit falls into
        closing = {PYTHON: PYTHON_END, OUTPUT: OUTPUT_END}[full.ids[n]]
        assert closing not in full.ids[n:limit] and closing in full.ids[limit:]
    assert conversation == before


@settings(max_examples=100, deadline=None)
@given(conversations(), st.integers(5, 60))
def test_completion_prompts_always_end_open(conversation, limit):
    before = copy.deepcopy(conversation)
    full, prompt = (
        render_for_completion(TOKENIZER, conversation, 10_000),
        render_for_completion(TOKENIZER, conversation, limit),
    )
    assert prompt[0] == BOS and prompt[1] == USER and prompt[-2:] == [USER_END, ASSISTANT]
    assert len(prompt) == limit or len(prompt) <= limit and prompt[2:] == full[len(full) - len(prompt) + 2 :]
    assert prompt[2:] == full[len(full) - len(prompt) + 2 :]  # the newest part, unchanged
    if len(full) <= limit:
        assert prompt == full
    assert conversation == before


# --- truncation by hand


def test_cut_inside_an_answer_keeps_its_front_supervised():
    conversation = turns("q", "x1y1z1w1u1" * 2)
    full = render_conversation(TOKENIZER, conversation)
    assert full.mask == [0] * 5 + [1] * 21
    cut = render_conversation(TOKENIZER, conversation, 5 + 10)
    assert cut.truncated and cut.supervised == 10 and cut.ids == full.ids[:15]


def test_truncation_gives_exactly_max_tokens():
    rendered = render_conversation(TOKENIZER, turns("x1" * 50, "y1" * 50), 32)
    assert len(rendered.ids) == len(rendered.mask) == 32 and rendered.truncated
    assert rendered.supervised == 0  # visible: such a row trains nothing
    exact = render_conversation(TOKENIZER, turns("q", "x"), 7)
    assert len(exact.ids) == 7 and not exact.truncated
    assert len(render_conversation(TOKENIZER, turns("x1" * 3000, "y")).ids) == 2048


@pytest.mark.parametrize(
    ("limit", "kept"),
    # bos user q user_end assistant | a | python 1 + 1 python_end | output 2 output_end | b assistant_end
    [(5, 5), (6, 6), (7, 6), (8, 6), (10, 6), (11, 11), (12, 11), (13, 11), (14, 14), (15, 15), (16, 16), (17, 16)],
)
def test_cut_goes_back_before_a_tool_block(limit, kept):
    answer = [part("text", "a"), part("python", "1+1"), part("python_output", "2"), part("text", "b")]
    rendered = render_conversation(TOKENIZER, turns("q", answer), limit)
    assert len(rendered.ids) == kept and rendered.truncated == (kept < 16)


@pytest.mark.parametrize("length", [2042, 2043, 2044, 2045, 2046, 2047, 2048, 3000])
def test_completion_of_an_overlong_message(length):
    text = "x" * (length - 1) + "y"  # a token a character
    prompt = render_for_completion(TOKENIZER, turns(text, "answer"))
    assert len(prompt) == min(length + 4, 2048)
    assert prompt[:2] == [BOS, USER] and prompt[-3:] == [ord("y"), USER_END, ASSISTANT]


def test_completion_drops_the_oldest_turns_first():
    conversation = turns("x1" * 10, "y1" * 10, "b1b", [part("python", "1")], "low", "answer")
    last = [BOS, USER, *enc("low"), USER_END, ASSISTANT]
    two = [BOS, USER, *enc("b1b"), USER_END, ASSISTANT, PYTHON, 49, PYTHON_END, ASSISTANT_END, *last[1:]]
    assert render_for_completion(TOKENIZER, conversation, len(two) + 5) == two
    assert render_for_completion(TOKENIZER, conversation, len(two)) == two
    assert render_for_completion(TOKENIZER, conversation, len(two) - 1) == last
    assert enc("secret")[0] not in render_for_completion(TOKENIZER, turns("low", "secret"))


def test_completion_needs_an_assistant_message_and_room():
    with pytest.raises(UserError, match="must end in an assistant message"):
        render_for_completion(TOKENIZER, turns("q"))
    with pytest.raises(UserError, match="max_tokens 4"):
        render_for_completion(TOKENIZER, turns("q", "a"), 4)
    with pytest.raises(UserError, match="max_tokens 0"):
        render_conversation(TOKENIZER, turns("q", "a"), 0)


# --- malformed conversations

SYSTEM = {"role": "system", "content": "s"}
MALFORMED = {
    "not a dict": ([], "must be a dict"),
    "no messages": ({}, "'messages' must be a list"),
    "messages is text": ({"messages": "hi"}, "'messages' must be a list"),
    "empty": ({"messages": []}, "has no messages"),
    "only system": ({"messages": [SYSTEM]}, "only a system message"),
    "assistant second": ({"messages": [SYSTEM, {"role": "assistant", "content": ""}]}, "message 1 .*expected 'user'"),
    "assistant first": ({"messages": [{"role": "assistant", "content": "a"}]}, "message 0 .*expected 'user'"),
    "two users": ({"messages": turns("a")["messages"] * 2}, "message 1 has the role 'user', expected 'assistant'"),
    "two assistants": ({"messages": turns("", "")["messages"] + turns("", "")["messages"][1:]}, "message 2 .*'user'"),
    "system later": ({"messages": [*turns("a")["messages"], SYSTEM]}, "message 1 has the role 'system'"),
    "two systems": ({"messages": [SYSTEM, SYSTEM]}, "message 1 has the role 'system'"),
    "unknown role": ({"messages": [{"role": "tool", "content": "a"}]}, "message 0 has the role 'tool'"),
    "no role": ({"messages": [{"content": "a"}]}, "message 0 has the role None"),
    "message is text": ({"messages": ["hi"]}, "message 0 must be a dict"),
    "system parts": ({"messages": [{"role": "system", "content": [part("text", "a")]}]}, "system message's content"),
    "user parts": (turns([part("text", "a")]), r"message 0 \(user\) must have a string"),
    "no content": ({"messages": [{"role": "user"}]}, r"message 0 \(user\) must have a string"),
    "assistant none": (turns("a", None), r"message 1 \(assistant\) must have a string or a list of parts"),
    "part is text": (turns("a", ["b"]), "message 1, part 0 must be a dict"),
    "unknown part": (turns("a", [part("text", "b"), part("image", "c")]), "part 1 has .*'image'; valid types are text"),
    "part without type": (turns("a", [{"text": "b"}]), "part 0 has the type None"),
    "part type is a list": (turns("a", [part([], "b")]), "part 0 has the type"),
    "part text missing": (turns("a", [{"type": "python"}]), "part 0 must have a string"),
}  # fmt: skip


@pytest.mark.parametrize(("conversation", "message"), MALFORMED.values(), ids=MALFORMED.keys())
def test_malformed_conversations_name_index_and_rule(conversation, message):
    before = copy.deepcopy(conversation)
    with pytest.raises(UserError, match=f"^conversation 17: .*{message}") as error:
        check_conversation(conversation, index=17)
    assert "\n" not in str(error.value)
    for render in (render_conversation, render_for_completion):
        with pytest.raises(UserError, match=f"^conversation: .*{message}"):
            render(TOKENIZER, conversation)
    assert conversation == before


@pytest.mark.parametrize(
    "conversation", [WORKED, turns("a"), turns("a", "b"), turns("", ""), turns("a", []), turns("a", "b", "c")]
)
def test_wellformed_conversations(conversation):
    before = copy.deepcopy(conversation)
    check_conversation(conversation, 3)
    assert render_conversation(TOKENIZER, conversation).ids[0] == BOS
    assert conversation == before


def test_a_tokenizer_without_markers_is_refused():
    bare = Tokenizer([b"aa"], ["<|bos|>"])
    with pytest.raises(UserError, match=r"<\|user_start\|>' is not a special token"):
        render_conversation(bare, turns("a", "b"))


def test_visualize():
    rendered = render_conversation(TOKENIZER, turns("é", "é"))
    shown = visualize(TOKENIZER, rendered.ids, rendered.mask)
    green, red, reset = "\033[32m", "\033[31m", "\033[0m"
    assert shown.split("|")[0] == f"{red}<"  # the marker <|bos|> itself holds bars
    assert f"{red}\\xc3{reset}|{red}\\xa9{reset}|{red}<|user_end|>{reset}" in shown
    assert shown.endswith(f"{green}\\xc3{reset}|{green}\\xa9{reset}|{green}<|assistant_end|>{reset}")
    numbered = visualize(TOKENIZER, [97, 256], [0, 1], with_ids=True)
    assert numbered == f"{red}a{reset}\033[90m(97){reset}|{green}aa{reset}\033[90m(256){reset}"
    with pytest.raises(ValueError, match="shorter"):
        visualize(TOKENIZER, [97, 98], [1])
