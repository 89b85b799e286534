"""nanochat's chat tasks: rows of parquet files in the fixed order, exact prompts, extraction, each task's sanity."""

import json
import random
import sys

import chat_sets
import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nanochat_lib.calculator import calculate, result_text
from nanochat_lib.conversation import check_conversation
from nanochat_lib.errors import UserError
from nanochat_lib.run_config import RUN_CODE
from nanochat_lib.tasks import rows as rows_module
from nanochat_lib.tasks.choices import ARC, MMLU
from nanochat_lib.tasks.common import Task, TaskMixture, extract_answer, extract_letter, last_text
from nanochat_lib.tasks.custom_json import CustomJSON
from nanochat_lib.tasks.gsm8k import GSM8K, parts_of
from nanochat_lib.tasks.humaneval import HumanEval, code_blocks, extract_code, imports_of
from nanochat_lib.tasks.rows import Rows, open_rows
from nanochat_lib.tasks.smoltalk import SmolTalk
from nanochat_lib.tasks.spelling import TEMPLATES, SimpleSpelling, SpellingBee
from nanochat_lib.tasks.words import word_list


@pytest.fixture
def base(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    return tmp_path


@pytest.fixture(scope="module")
def everything(tmp_path_factory):
    """A folder with all sets."""
    patch = pytest.MonkeyPatch()
    patch.setenv("NANOCHAT_BASE_DIR", str(tmp_path_factory.mktemp("sets")))
    chat_sets.put_all()
    yield
    patch.undo()


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    path = tmp_path_factory.mktemp("words") / "list.txt"
    rng = random.Random(0)
    made = {"".join(rng.choices("abcdeinrst", k=rng.randrange(3, 9))) for _ in range(400)}
    path.write_text("\n".join(["Aaron's", "naïve", "two words", "", *sorted(made)]))
    return str(path)


# ---- rows


def numbered(count: int) -> list[dict]:
    return [{"id": i, "text": f"row {i}", "list": [i, i + 1]} for i in range(count)]


@pytest.mark.parametrize("mapped", [False, True])
@pytest.mark.parametrize(("count", "files"), [(1, 1), (100, 1), (3000, 3)])
def test_rows_come_in_the_order_of_seed_42(base, monkeypatch, mapped, count, files):
    folder = chat_sets.put("gsm8k", "main/train", numbered(count), files)
    monkeypatch.setattr(rows_module, "SMALL", 0 if mapped else 2**30)
    rows = Rows(folder, ("id", "text", "list"))
    order = np.random.default_rng(42).permutation(count)
    assert [row["id"] for row in rows] == order.tolist() and len(rows) == count
    assert rows[0] == {"id": order[0], "text": f"row {order[0]}", "list": [order[0], order[0] + 1]}
    if count == 100:  # as the hub's own library shuffles
        assert [row["id"] for row in rows][:11] == [59, 21, 56, 18, 33, 42, 50, 27, 92, 71, 2]
    assert (folder / "rows.arrow").exists() == mapped


def test_a_large_split_is_mapped_not_held(base, monkeypatch):
    text = [{"text": f"{i} " + "x" * 4000} for i in range(5000)]  # 20 MB decoded
    folder = chat_sets.put("smoltalk", "default/train", text)
    monkeypatch.setattr(rows_module, "SMALL", 0)
    before = pa.total_allocated_bytes()
    rows = Rows(folder, ("text",))
    assert sum(len(row["text"]) for row in rows) > 20e6
    assert pa.total_allocated_bytes() - before < 1e6
    written = (folder / "rows.arrow").stat().st_mtime_ns
    assert Rows(folder, ("text",))[7] == rows[7] and (folder / "rows.arrow").stat().st_mtime_ns == written
    chat_sets.put("smoltalk", "default/train", text[:50])  # other files: the old copy does not stand in for them
    assert len(Rows(folder, ("text",))) == 50
    (folder / "rows.arrow").write_bytes(b"half")  # and a broken one is made anew
    assert len(Rows(folder, ("text",))) == 50


@pytest.mark.parametrize("mapped", [False, True])
def test_what_is_wrong_with_a_split_is_said_in_one_line(base, monkeypatch, mapped):
    monkeypatch.setattr(rows_module, "SMALL", 0 if mapped else 2**30)

    def refused() -> str:
        with pytest.raises(UserError) as e:
            GSM8K("train")
        assert "\n" not in str(e.value)
        return str(e.value)

    assert refused().endswith("run `nanochat data get gsm8k`")
    folder = chat_sets.put("gsm8k", "main/train", [{"question": "?", "reply": "!"}])
    assert "no column 'answer' (columns: question, reply)" in refused()
    folder = chat_sets.put("gsm8k", "main/train", chat_sets.sums(500, 0))
    file = folder / "00000.parquet"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    assert str(file) in refused() and "cut short" in refused()
    file.unlink()
    assert f"{file} is missing" in refused()
    (folder / "manifest.json").write_text("[]")
    assert "names no files" in refused()


def test_text_that_is_not_utf8_is_said_in_one_line(base):
    """Bytes that are damaged inside a page are still whole parquet."""
    rows = [{"question": "Who?", "answer": f"No{mark}one"} for mark in "ab"]
    folder = chat_sets.put("gsm8k", "main/test", rows, compression="none", use_dictionary=False)
    (file,) = folder.glob("*.parquet")
    file.write_bytes(file.read_bytes().replace(b"Noaone", b"No\xffone"))
    with pytest.raises(UserError, match="not UTF-8.*fetch it again") as error:
        list(open_rows("gsm8k", "main", "test", ("question", "answer")))
    assert str(folder) in str(error.value) and "\n" not in str(error.value)


def test_slices_are_of_the_shuffled_order(everything):
    whole = GSM8K("train")
    assert list(GSM8K("train", stop=5)) == [whole[i] for i in range(5)]
    assert list(GSM8K("train", start=2, stop=9, step=3)) == [whole[2], whole[5], whole[8]]


class Numbers(Task):
    def __init__(self, size: int):
        super().__init__()
        self.size = size

    def num_examples(self):
        return self.size

    def get_example(self, index):
        return (self.size, index)


@given(st.lists(st.integers(0, 400), max_size=6))
def test_a_mixture_of_numbers_has_the_order_of_a_list_of_pairs(sizes):
    pairs = [(t, i) for t, size in enumerate(sizes) for i in range(size)]
    random.Random(42).shuffle(pairs)
    mixture = TaskMixture([Numbers(size) for size in sizes])
    assert [mixture.place(i) for i in range(len(mixture))] == pairs
    assert list(mixture) == [(sizes[t], i) for t, i in pairs]


def test_a_million_conversations_are_four_megabytes():
    mixture = TaskMixture([Numbers(460_341), *[Numbers(99_842)] * 3, *[Numbers(7_473)] * 4])
    assert len(mixture) == 789_759 and mixture.order.nbytes == 4 * 789_759  # "789.8 K"


# ---- prompts and parts


def test_prompts_of_choices_are_exact(everything):
    row = open_rows("arc", "ARC-Easy", "test", ("question", "choices", "answerKey"))[0]
    conversation = ARC("Easy", "test")[0]
    lines = "".join(f"- {c}={x}\n" for c, x in zip(row["choices"]["text"], row["choices"]["label"], strict=True))
    asked = f"Multiple Choice question: {row['question']}\n{lines}\nRespond only with the letter of the correct answer."
    assert conversation["messages"][0]["content"] == asked
    assert conversation["letters"] == row["choices"]["label"] and last_text(conversation) == row["answerKey"]
    assert {tuple(c["letters"]) for c in ARC("Easy", "test")} == {tuple("1234"), tuple("ABCD")}
    row = open_rows("mmlu", "all", "test", ("question", "choices", "answer"))[3]
    conversation = MMLU("test")[3]
    assert last_text(conversation) == "ABCD"[row["answer"]]
    assert f"- {row['choices'][2]}=C\n- {row['choices'][3]}=D\n\nRespond" in conversation["messages"][0]["content"]


def test_an_answer_that_is_not_offered_is_a_data_error(base):
    broken = chat_sets.science(1, 0)[0] | {"answerKey": "E"}
    chat_sets.put("arc", "ARC-Easy/test", [broken])
    with pytest.raises(UserError, match="'E' is not among its labels"):
        ARC("Easy", "test")[0]
    with pytest.raises(UserError, match="known: Easy, Challenge"):
        ARC("easy", "test")


def test_parts_of_a_solution():
    solution = "He has 48/2 = <<48/2=24>>24 left.\nAnd <<24*.5=12>>12, <<x+1>>so\n#### 12"
    assert [(p["type"], p["text"]) for p in parts_of(solution)] == [
        ("text", "He has 48/2 = "), ("python", "48/2"), ("python_output", "24"), ("text", "24 left.\nAnd "),
        ("python", "24*.5"), ("python_output", "12"), ("text", "12, "), ("python", "x+1"), ("text", "so\n#### 12"),
    ]  # fmt: skip
    assert [p["type"] for p in parts_of("<<1+1=2>>")] == ["text", "python", "python_output", "text"]
    assert [p["text"] for p in parts_of("<<2*3=1+5=6>>6")] == ["", "2*3=1+5", "6"]  # cut at the last =; no result


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (9, "9"), (120000.0, "120000"), (99.00000000000001, "99"), (10 / 3, "3.33333333333"),
        (0.1 + 0.2, "0.3"), (-0.0, "0"), (1234567890.55, "1234567890.55"),
        (1e20, "1e+20"), (2.5, "2.5"), (10**20, str(10**20)), (-7.0, "-7"),
    ],
)  # fmt: skip
def test_results_are_written_in_one_form(value, text):
    assert result_text(value) == text


def test_the_tool_answers_in_training_what_it_answers_in_a_chat(everything, words):
    for task in (GSM8K("train"), SpellingBee(60, "train", words)):
        for conversation in task:
            parts = conversation["messages"][-1]["content"]
            for call, after in zip(parts, [*parts[1:], {"type": "end"}], strict=True):
                if call["type"] == "python":
                    value = calculate(call["text"])
                    assert (after["type"] == "python_output") == (value is not None)
                    assert value is None or after["text"] == result_text(value)


# ---- extraction: kinds, not strings

PLAIN = st.tuples(st.integers(0, 10**9), st.sampled_from(["", ".0", ".00", ".5", ".25"]))
DRESSES = (
    "{}", "{}.", "{}, altogether", "${}", "$ {}", "**{}**", "`{}`", "*{}*", "\\boxed{{{}}}", "$\\boxed{{{}}}$", "\\${}",
    "\\text{{{}}}", " {} ", "{} dollars", "{}%", "\n{}", "€{}", "\\({}\\)",
)  # fmt: skip


def grouped(number: int, separator: str) -> str:
    return f"{number:,}".replace(",", separator)


@given(PLAIN, st.booleans(), st.sampled_from(DRESSES), st.sampled_from(["", ",", "{,}", "\\,", ",\\!", "\u202f"]))
def test_a_number_is_found_in_any_dress(parts, negative, dress, separator):
    number, fraction = parts
    shown = dress.format(("-" if negative else "") + grouped(number, separator) + fraction)
    value = f"{number}{fraction.rstrip('0').rstrip('.')}"
    want = f"-{value}" if negative and float(value) else value
    for text in (
        f"So it is\n#### {shown}",
        f"####{shown}\n",
        f"```\n#### {shown}\n```",
        f"#### {shown}<|assistant_end|>",
    ):
        assert extract_answer(text) == want, text
    if "boxed" in dress:
        assert extract_answer(f"2+2 \\boxed{{7}}, no: {shown}") == want


@pytest.mark.parametrize(
    "text",
    ["#### 3/4", "#### 12:30", "#### 1.2.3", "#### 2^5", "#### x", "####", "#### no \\boxed{5}", "5", "$5", "boxed{5}"],
)
def test_what_is_no_number_is_none(text):
    assert extract_answer(text) is None


def test_no_reply_takes_long():
    for text in (
        "#" * 20000,
        "####" + " " * 50000,
        "####" + "*$" * 20000,
        "#### " * 8000,
        "#### " + "1," * 20000 + "/3",
    ):
        found = extract_answer(text), extract_letter(text), code_blocks(text)
        assert found == (None, None, [])  # a pattern that backtracks would not end


@given(
    st.sampled_from("ABCD"),
    st.sampled_from(["{}", " {}\n", "{}.", "{}. 12", "({})", "({}) x", "**{}**", "`{}`", "{}) y", "{}: z"]),
)
def test_a_letter_is_found_in_any_dress(letter, dress):
    assert extract_letter(dress.format(letter), "ABCD") == letter
    assert extract_letter(dress.format(letter), "WXYZ") is None


@pytest.mark.parametrize(
    ("text", "letters", "found"), [("3", "1234", "3"), ("3.", "1234", "3"), ("3.5", "1234", None), ("34", "1234", None)]
)
def test_letters_may_be_digits(text, letters, found):
    assert extract_letter(text, letters) == found


CODE = 'def f(x):\n    """ a ` tick """\n    return x'
FENCES = {
    "plain": "```\n{}\n```", "python": "```python\n{}\n```", "py": "```py\n{}\n```", "Python": "```Python\n{}\n```",
    "python3": "```python3\n{}\n```", "blank before the word": "``` python \n{}\n```", "tilde": "~~~\n{}\n~~~",
    "tilde with a word": "~~~python\n{}\n~~~", "four": "````python\n{}\n````", "unclosed": "```python\n{}",
    "unclosed tilde": "~~~\n{}\n", "words around": "Sure!\n\n```python\n{}\n```\nThat is it.", "none": "{}\n",
    "after words": "Here you are: ```python\n{}\n```", "closed at the end of the code": "```python\n{}```",
    "two": "```python\n{}\n```\nUse it:\n```python\nprint(f(1))\n```", "a title": "```python title=x\n{}\n```",
    "the second": "```bash\nls\n```\n```python\n{}\n```", "an empty one first": "```\n```\n```py\n{}\n```",
}  # fmt: skip


@pytest.mark.parametrize("ends", ["\n", "\r\n"])
@pytest.mark.parametrize("fence", FENCES)
def test_code_comes_out_of_any_fence(fence, ends):
    reply = FENCES[fence].format(CODE).replace("\n", ends)
    assert extract_code(reply, "f") == CODE
    compile(extract_code(reply, "f"), "reply", "exec")


def test_rules_of_blocks():
    two = "```python\na = 1\n```\n```python\ndef g():\n    pass\n```"
    assert extract_code(two, "g") == "def g():\n    pass"  # the first that defines the function
    assert extract_code(two, "h") == extract_code(two) == "a = 1"  # else the first
    assert code_blocks("- so\n  ```py\n  if x:\n      y()\n  ```") == ["if x:\n    y()"]
    assert code_blocks("````md\n```python\nx\n```\n````") == ["```python\nx\n```"]
    assert code_blocks("```x = 1```") == ["x = 1"] and code_blocks("no `code` here, nor ```") == [""]
    assert extract_code("", "f") == "" and extract_code("```\n```", "f") == "```\n```"
    assert (
        imports_of("# a\nimport os\n\nfrom math import pi\ndef f(): import sys\nimport re")
        == "import os\nfrom math import pi"
    )


# ---- each task: the gold reply scores 1, the empty one 0


def replies(conversation):
    """The gold reply as a model would write it, and wrong ones."""
    names = {"python": "python", "python_output": "output"}
    content = conversation["messages"][-1]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    gold = "".join(
        p["text"] if p["type"] == "text" else f"<|{names[p['type']]}_start|>{p['text']}<|{names[p['type']]}_end|>"
        for p in parts
    )
    return gold, ["", " ", "no idea", "####", "None", "\\boxed{}"]


def scored(words):
    return [
        ARC("Easy", "test"), ARC("Challenge", "test"), MMLU("test"), MMLU("auxiliary_train"), GSM8K("train"),
        GSM8K("test"), HumanEval(RUN_CODE[1]), SpellingBee(40, "train", words), SpellingBee(40, "test", words),
        SimpleSpelling(40, "train", words),
    ]  # fmt: skip


def test_gold_scores_one_and_nothing_scores_zero(everything, words):
    for task in scored(words):
        assert len(task)
        for conversation in task:
            check_conversation(conversation)
            gold, wrong = replies(conversation)
            assert task.evaluate(conversation, gold) == 1.0 and task.answered(conversation, gold), task.name
            for reply in wrong[:2] if task.name == "HumanEval" else wrong:
                assert task.evaluate(conversation, reply) == 0.0, (task.name, reply)
                if task.name not in ("SimpleSpelling", "HumanEval"):
                    assert not task.answered(conversation, reply)


def test_training_and_test_sides_differ(everything, words):
    assert SpellingBee(5, "train", words)[0] != SpellingBee(5, "test", words)[0]
    assert SpellingBee(5, "train", words)[0] == SpellingBee(900, "train", words)[0]
    with pytest.raises(UserError, match="known: train, test"):
        SpellingBee(5, "val", words)


# ---- HumanEval


def test_nothing_is_run_unless_it_is_allowed(everything, monkeypatch):
    monkeypatch.setitem(sys.modules, "nanochat_lib.sandbox", None)  # an import of it would fail
    task = HumanEval()
    for run_code in ("no", "", "yes"):
        task.run_code = run_code
        for reply in ("print(1)", replies(task[0])[0]):
            with pytest.raises(UserError, match="has to be allowed: set evaluation.run_code to the weakest isolation"):
                task.evaluate(task[0], reply)


def test_the_levels_are_the_sandbox_s():
    from nanochat_lib import sandbox

    assert RUN_CODE == ("no", *sandbox.LEVELS)
    assert HumanEval.isolation.fget(None) == sandbox.level()


@pytest.mark.parametrize(
    ("body", "score"),
    [
        ("return sum(xs)", 1.0), ("return 3", 0.0), ("raise ValueError", 0.0), ("return sum(xs", 0.0),
        ("return sum(xs)\nimport sys; sys.exit(0)", 0.0), ("return 0\nimport os; os._exit(0)", 0.0),
        ("return 0\ndef check(f): pass\nimport builtins; print('ok'); raise SystemExit", 0.0),
    ],
)  # fmt: skip
def test_programs_are_judged_by_their_tests(everything, body, score):
    """A program that ends itself with success before its tests has not passed them."""
    head, *rest = body.split("\n")
    reply = "```py\ndef total(xs):\n    {}\n{}\n```".format(head, "\n".join(rest))
    assert HumanEval("limits").evaluate(HumanEval()[0], reply) == score


# ---- spelling


def test_spelling_is_drawn_in_nanochat_s_order(words):
    listed = word_list(words)
    assert len(TEMPLATES) == len(set(TEMPLATES)) == 51 and all("{letter}" in t and "{word}" in t for t in TEMPLATES)
    assert sum(t.isascii() for t in TEMPLATES) >= 30
    for split, seed in (("train", 0), ("test", 10_000_000)):
        task = SpellingBee(30, split, words)
        for index in range(30):
            rng = random.Random(seed + index)
            word = rng.choice(listed)
            letter = rng.choice(word) if rng.random() < 0.9 else rng.choice("abcdefghijklmnopqrstuvwxyz")
            template = rng.choice(TEMPLATES)
            template = template.lower() if rng.random() < 0.3 else template
            q, r = rng.choice(["", "'", '"']), rng.choice(["", "'", '"'])
            asked = template.replace("{letter}", q + letter + q).replace("{word}", r + word + r)
            asked += "?" if rng.random() < 0.5 else ""
            user, assistant = task[index]["messages"]
            count = word.count(letter)
            assert user["content"] == asked
            first, _, call, output, last = assistant["content"]
            assert f"\n{word}:{','.join(word)}\n" in first["text"] and f"'{letter}'" in first["text"]
            lines = [line for line in first["text"].split("\n") if line[:1].isdigit()]
            assert [line.split(" ")[0] for line in lines] == [f"{i}:{c}" for i, c in enumerate(word, 1)]
            hits = [line for line in lines if "hit!" in line]
            assert [h.split(" ", 1)[1] for h in hits] == [f"hit! count={n}" for n in range(1, count + 1)]
            assert (call["text"], output["text"]) == (f"'{word}'.count('{letter}')", str(count))
            assert last["text"].endswith(f"\n\n#### {count}")
    shuffled = list(listed)
    random.Random(42).shuffle(shuffled)
    word = random.Random(7).choice(shuffled)
    asked, answer = SimpleSpelling(8, "train", words)[7]["messages"]
    assert (asked["content"], answer["content"]) == (f"Spell the word: {word}", f"{word}:{','.join(word)}")


def test_word_lists(words, tmp_path):
    listed = word_list(words)
    assert all(w.isascii() and w.isalpha() and w.islower() for w in listed) and list(listed) == sorted(set(listed))
    short = tmp_path / "short.txt"
    short.write_text("one\ntwo\n")
    with pytest.raises(UserError, match="holds 2 words"):
        word_list(str(short))
    with pytest.raises(UserError, match="cannot be read"):
        word_list(str(tmp_path / "none.txt"))


# ---- SmolTalk, files of one's own


def test_smoltalk_keeps_roles_and_refuses_what_does_not_alternate(base):
    chat_sets.put("smoltalk", "default/train", chat_sets.talk(9, 0), files=3)
    assert {m["role"] for c in SmolTalk("train") for m in c["messages"]} == {"system", "user", "assistant"}
    chat_sets.put("smoltalk", "default/test", [{"messages": [{"role": "assistant", "content": "x"}], "source": ""}])
    with pytest.raises(UserError, match="conversation 0: message 0 has the role 'assistant'"):
        SmolTalk("test")[0]


def test_conversations_of_a_file(tmp_path):
    turns = [{"role": "user", "content": "é?"}, {"role": "assistant", "content": "a"}]
    system = [{"role": "system", "content": "s"}]
    path = tmp_path / "own.jsonl"
    lines = [turns, [], system + turns + turns, {"messages": turns, "source": "x"}]
    path.write_text("\n".join(json.dumps(line, ensure_ascii=False) if line else "" for line in lines), encoding="utf-8")
    task = CustomJSON(path)
    assert [c["messages"] for c in task] == [turns, system + turns + turns, turns]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "line 2 is not JSON"), ("[]", "has no messages"), ("3", "must be a list"), ("null", "must be a list"),
        ('[{"role": "user", "content": "q"}]', "ends without an answer"),
        ('[{"role": "assistant", "content": "q"}]', "message 0 has the role 'assistant'"),
        ('[{"role": "user", "content": "q"}, {"role": "assistant", "content": " "}]', "must have text"),
        ('[{"role": "user", "content": "q"}, {"role": "assistant", "content": []}]', "must have text"),
        ('[{"role": "user", "content": 3}, {"role": "assistant", "content": "a"}]', "must have a string"),
    ],
)  # fmt: skip
def test_a_broken_line_is_named(tmp_path, line, words):
    path = tmp_path / "own.jsonl"
    good = json.dumps([{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}])
    path.write_text(f"{good}\n{line}\n{good}\n")
    with pytest.raises(UserError) as e:
        CustomJSON(path)
    assert words in str(e.value) and f"{path} line 2" in str(e.value) and "\n" not in str(e.value)


def test_an_empty_or_missing_file_is_an_error(tmp_path):
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(UserError, match="holds no conversations"):
        CustomJSON(tmp_path / "empty.jsonl")
    with pytest.raises(UserError, match="cannot be read"):
        CustomJSON(tmp_path / "none.jsonl")
