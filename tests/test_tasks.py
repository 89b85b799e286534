"""Tasks: slicing, mixtures, answer extraction, gold and empty answers, prompts, train against test."""

import pytest

from nanochat_lib.conversation import check_conversation
from nanochat_lib.errors import UserError
from nanochat_lib.primer.documents import multiple_choice
from nanochat_lib.primer.world import World
from nanochat_lib.tasks.common import (
    Task,
    TaskMixture,
    TaskSequence,
    extract_answer,
    extract_letter,
    last_text,
    plain_number,
)
from nanochat_lib.tasks.primer import (
    TASKS,
    PrimerSpelling,
    PrimerTalk,
    chat_eval_tasks,
    primer_task,
    rl_task,
    sample_questions,
    sft_mixture,
    sft_validation,
)


class Numbers(Task):
    """Conversation i is the pair (tag, i)."""

    def __init__(self, tag, size, **slicing):
        super().__init__(**slicing)
        self.tag, self.size = tag, size

    def num_examples(self):
        return self.size

    def get_example(self, index):
        return (self.tag, index)


@pytest.fixture(scope="module")
def world():
    return World(0)


def test_slices_match_python():
    for size in (0, 1, 7, 10):
        for start in range(12):
            for stop in (None, *range(start, 13)):
                for step in (1, 2, 3, 20):
                    task = Numbers("a", size, start=start, stop=stop, step=step)
                    expected = list(range(size))[start:stop:step]
                    assert len(task) == len(expected)
                    assert [i for _, i in task] == expected


@pytest.mark.parametrize("bad", [{"start": -1}, {"step": 0}, {"step": -1}, {"start": 5, "stop": 4}])
def test_bad_slices(bad):
    with pytest.raises(UserError, match="start"):
        Numbers("a", 10, **bad)


@pytest.mark.parametrize("index", [-1, 5, 100])
def test_out_of_range(index):
    with pytest.raises(IndexError):
        Numbers("a", 10, step=2)[index]


def test_mixture_order():
    """nanochat's order for lengths 3 and 5."""
    mixture = TaskMixture([Numbers(0, 3), Numbers(1, 5)])
    assert list(mixture) == [(1, 0), (1, 1), (1, 3), (1, 4), (0, 2), (1, 2), (0, 0), (0, 1)]
    assert list(TaskSequence([Numbers(0, 3), Numbers(1, 5)])) == [(0, 0), (0, 1), (0, 2)] + [(1, i) for i in range(5)]


def test_mixture_counts_repeated_and_sliced_tasks():
    a = Numbers("a", 6, start=1, step=2)
    mixture = TaskMixture([a, a, Numbers("b", 0), Numbers("c", 2)])
    assert sorted(mixture) == [("a", 1), ("a", 1), ("a", 3), ("a", 3), ("a", 5), ("a", 5), ("c", 0), ("c", 1)]
    assert len(TaskMixture([])) == 0
    assert list(TaskMixture([Numbers(0, 3), Numbers(1, 5)], start=1, step=3)) == [(1, 1), (0, 2), (0, 1)]


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("#### 72", "72"),
        ("so it is 72\n#### 72\n", "72"),
        ("####72", "72"),
        ("#### 1,234.", "1234"),
        ("#### 72, altogether", "72"),
        ("#### $10", "10"),
        ("#### -$10", "-10"),
        ("#### $-10", "-10"),
        ("#### - 3", "-3"),
        ("#### -3", "-3"),
        ("#### \u22123", "-3"),
        ("#### +3", "3"),
        ("#### 8{,}000", "8000"),
        ("#### $1,000,000.00", "1000000"),
        ("#### 3.50", "3.5"),
        ("#### .5", "0.5"),
        ("#### 007", "7"),
        ("#### 0", "0"),
        ("#### 0.0", "0"),
        ("#### -0", "0"),
        ("#### 12%", "12"),
        ("#### 5\n#### 6", "5"),
        ("#### ", None),
        ("#### none", None),
        ("### 5", None),
        ("the answer is 72", None),
        ("####\u0665", None),
        ("", None),
    ],
)
def test_extract_answer(text, answer):
    assert extract_answer(text) == answer


def test_equal_numbers_are_equal_texts():
    for value in (0, 7, 100, 1234, 1_000_000, 0.5, 12.04, 1234.5):
        digits = f"{value:,}"
        spellings = {digits, digits.replace(",", ""), f"00{digits}", digits + ("0" if "." in digits else ".00")}
        for sign in ("", "+", "-", "\u2212"):
            found = {plain_number(sign, spelling) for spelling in spellings}
            assert len(found) == 1 and float(found.pop()) == (-value if sign in ("-", "\u2212") else value)
    assert plain_number("-", ".0") == "0" and plain_number("", ".5") == "0.5" and plain_number("", "12.") == "12"


@pytest.mark.parametrize(
    ("text", "letter"),
    [
        ("C", "C"), (" C\n", "C"), ("C. 12", "C"), ("(C)", "C"), ("(C) twelve", "C"), ("C)", "C"), ("C: x", "C"),
        ("Cat", None), ("A's", None), ("A1", None), ("the answer is C", None), ("c", None), ("", None), ("(C", None),
    ],
)  # fmt: skip
def test_extract_letter(text, letter):
    assert extract_letter(text) == letter


def test_missing_answers_never_agree(world):
    task = chat_eval_tasks(world)["primer-sums"]
    without = {"messages": [{"role": "user", "content": "?"}, {"role": "assistant", "content": "no marker"}]}
    with pytest.raises(UserError, match="####"):
        task.evaluate(without, "no idea")
    assert task.evaluate(task[0], "no idea") == 0.0


def wrong_answers(conversation):
    gold = last_text(conversation)
    yield from ("", " ", "no idea", gold[:-1], "#### ", "None")
    if "####" in gold:
        number = int(gold.split()[-1])
        yield from (f"#### -{number + 1}", f"#### {number + 1}", f"{number}", f"#### {number}1")
        if number:
            yield f"#### -{number}"
    if "word" in conversation:
        word = conversation["word"]
        yield from (word, f"Letters: {word}", f"Letters: {' '.join(reversed(word))}!", f"Letters: {' '.join(word)} x")


@pytest.mark.parametrize("name", TASKS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_gold_scores_one_and_wrong_answers_zero(world, name, split):
    task = primer_task(name, world, split, 64)
    for conversation in task:
        check_conversation(conversation)
        assert task.evaluate(conversation, last_text(conversation)) == 1.0
        assert task.reward(conversation, last_text(conversation)) == 1.0
        for answer in wrong_answers(conversation):
            assert task.evaluate(conversation, answer) == 0.0, (conversation, answer)


def test_whole_reply_with_its_tool_call_scores_one(world):
    for name in ("primer-sums", "primer-word-sums"):
        task = primer_task(name, world, "test", 64)
        for conversation in task:
            parts = conversation["messages"][-1]["content"]
            assert [part["type"] for part in parts] == ["python", "python_output", "text"]
            reply = "<|python_start|>{}<|python_end|><|output_start|>{}<|output_end|>{}".format(
                *(p["text"] for p in parts)
            )
            assert task.evaluate(conversation, reply) == 1.0
            a, b = map(int, parts[0]["text"].split("+"))
            assert str(a + b) == parts[1]["text"] and parts[2]["text"] == f"#### {a + b}"


def test_spelling_takes_any_separator(world):
    task = PrimerSpelling(world, "test")
    chat = {"word": "domari"}
    for answer in (
        "Letters: d o m a r i",
        "d o m a r i",
        "d,o,m,a,r,i",
        "Letters: d-o-m-a-r-i.",
        "domari: d, o, m, a, r, i",
    ):
        assert task.evaluate(chat, answer) == 1.0
    for answer in ("domari", "Letters: domari", "d o m a r", "d o m a r i i", "D O M A R I", "Letters:", "do ma ri"):
        assert task.evaluate(chat, answer) == 0.0


def test_categorical_conversations_offer_what_they_ask(world):
    counts = [0] * 4
    for conversation in primer_task("primer-choice-text", world, "test", 256):
        choices, gold = conversation["choices"], conversation["gold"]
        assert len(set(choices)) == 4 and choices[gold] == last_text(conversation)
        assert all(f"- {choice}\n" in conversation["messages"][0]["content"] for choice in choices)
        counts[gold] += 1
    for conversation in primer_task("primer-choice-letter", world, "test", 256):
        assert conversation["letters"] == ["A", "B", "C", "D"]
        counts["ABCD".index(last_text(conversation))] += 1
    assert min(counts) > 80, "the right answer has a favourite place"


def test_letter_prompt_is_nanochats():
    assert multiple_choice("What?", ["x", "y"]) == (
        "Multiple Choice question: What?\n- x=A\n- y=B\n\nRespond only with the letter of the correct answer."
    )


def test_tasks_are_reproducible_and_indexed_one_by_one(world):
    for task in TASKS.values():
        a, b = task(world, "train", 20), task(World(0), "train", 20)
        assert [a[i] for i in reversed(range(20))] == [b[i] for i in range(20)][::-1]
        assert a[3] != a[4]
        assert task(World(1), "train", 20)[0] != a[0]
        assert list(task(world, "train", 20, start=4, step=5)) == [a[4], a[9], a[14], a[19]]


def test_train_and_test_share_no_question(world):
    for name, task in chat_eval_tasks(world).items():
        first = {c["messages"][0]["content"].split("\n")[0] for c in task}
        assert not first & {c["messages"][0]["content"].split("\n")[0] for c in primer_task(name, world, "train", 3000)}


def test_mixture_shares_and_sizes(world):
    mixture = sft_mixture(world)
    assert len(mixture) == 8000
    shares = {task.name: len(task) / len(mixture) for task in mixture.tasks}
    assert 0.25 < shares["primer-choice-text"] + shares["primer-choice-letter"] < 0.35
    assert 0.4 < shares["primer-spelling"] < 0.5 and 0.2 < shares["primer-sums"] < 0.3
    assert 0 < shares["primer-word-sums"] < 0.05, "reinforcement learning needs room"
    assert all(task.split == "train" for task in mixture.tasks)
    assert all(task.split == "test" for task in sft_validation(world).tasks)
    assert len(sft_mixture(world, 100)) == pytest.approx(100, abs=5)
    assert all(len(task) for task in sft_mixture(world, 5).tasks)
    for conversation in mixture:
        check_conversation(conversation)


def test_unknown_names_list_the_known(world):
    with pytest.raises(UserError, match="primer-sums"):
        primer_task("sums", world, "train")
    with pytest.raises(UserError, match="train, test"):
        primer_task("primer-sums", world, "val")
    with pytest.raises(UserError, match="primer-word-sums"):
        rl_task("primer-choice-text", world, "train")
    assert len(rl_task("primer-word-sums", world, "train")) > 1000


def test_sample_questions_can_be_asked(world):
    questions = sample_questions(world)
    assert len(questions) == 1 + 2 * len(TASKS)
    for question in questions:
        check_conversation(question)
    assert PrimerTalk(world, "test").evaluate(questions[0], last_text(questions[0])) == 1.0
