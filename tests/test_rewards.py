"""Reward functions: by name, by module, by file, and as sums; what is wrong with one is said in one line."""

import math

import pytest

from nanochat_lib import rewards
from nanochat_lib.errors import UserError
from nanochat_lib.primer.world import World
from nanochat_lib.tasks.common import last_text
from nanochat_lib.tasks.primer import rl_task

MINE = """
import math
calls = []
def short(conversation, completion):
    conversation["messages"].clear()
    return 1 if len(completion) < 20 else 0
def one(conversation, completion): return True
def text(conversation, completion): return "1"
def nothing(conversation, completion): pass
def nan(conversation, completion): return math.nan
def broken(conversation, completion): raise KeyError("oh")
def lines(conversation, completion): raise ValueError("one\\ntwo" + "x" * 9999)
def stops(conversation, completion): raise SystemExit(0)
def long(conversation, completion): return [0] * 9999
def wide(conversation, completion): return 10**400
def large(conversation, completion): return -1e7
def alone(completion): return 1
number = 3
"""


@pytest.fixture(scope="module")
def task():
    return rl_task("primer-sums", World(0), "train")


@pytest.fixture
def mine(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    (tmp_path / "bad.py").write_text("1 / 0")
    (tmp_path / "script.py").write_text("def f(a, b): return 1\nraise SystemExit(0)")
    return tmp_path


def refused(work) -> str:
    with pytest.raises(UserError) as e:
        work()
    assert "\n" not in str(e.value)
    return str(e.value)


def test_exact_and_format(task):
    conversation = task[0]
    gold = last_text(conversation)
    exact, form = rewards.load("exact", task), rewards.load("format", task)
    assert [exact(conversation, text) for text in (gold, "#### 123456", "no")] == [1, 0, 0]
    assert [form(conversation, text) for text in (gold, "#### 123456", "no", "")] == [1, 1, 0, 0]


def test_sums_of_functions(task, mine):
    conversation = task[0]
    gold = last_text(conversation)
    both = rewards.load("exact + 0.25*format+ -2*mine.py:short", task)
    assert both(conversation, gold) == pytest.approx(1 + 0.25 - 2)
    assert both(conversation, gold + " " * 20) == pytest.approx(1.25)
    assert both(conversation, "no") == -2 and last_text(conversation) == gold  # what the function clears is a copy
    assert rewards.terms("1e-1*exact") == [(0.1, "exact")]


def test_functions_of_modules(task):
    assert rewards.load("operator:ne", task)({"messages": []}, "x") == 1.0  # anything that takes two arguments


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("exakt", "unknown function 'exakt'; did you mean exact?"), ("", "be read"), ("exact+", "cannot be read"),
        ("2x*exact", "unknown function '2x*exact'"), ("1e999*exact", "cannot be read"), ("mine.py", "unknown function"),
        ("none.py:f", "there is no file none.py"), ("mine.py:shot", "has no function 'shot'; it has short, one"),
        ("mine.py:number", "has no function 'number'"), ("bad.py:f", "cannot be imported (ZeroDivisionError: division"),
        ("script.py:f", "cannot be imported (SystemExit: 0)"),  # must not end the run as if all was well
        ("no.such.module:f", "cannot be imported (ModuleNotFoundError"),
        ("mine.py:alone", "must take (conversation, completion), it takes (completion)"),
        ("mine.py:a b", "unknown function"),
    ],
)  # fmt: skip
def test_what_cannot_be_found_is_said_before_anything_is_spent(task, mine, spec, words):
    assert words in refused(lambda: rewards.load(spec, task))
    assert words in refused(lambda: rewards.check(spec))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("text", "returned '1', it must return a finite number"), ("nothing", "returned None"), ("nan", "returned nan"),
        ("broken", "failed with KeyError: 'oh' (question"), ("lines", "failed with ValueError: one twoxx"),
        ("stops", "failed with SystemExit: 0 (question"), ("long", "returned [0, 0"), ("wide", "returned 1000000"),
        ("large", "came to -1e+07, it must stay within"),  # float32 and its squares must hold it
    ],
)  # fmt: skip
def test_what_a_function_returns_is_checked(task, mine, name, words):
    reward = rewards.load(f"mine.py:{name}", task)
    said = refused(lambda: reward(task[0], "x"))
    assert f"mine.py:{name} {words}" in said and len(said) < 400
    assert rewards.load("mine.py:one", task)(task[0], "x") == 1.0


def test_paths_and_fingerprints(mine):
    assert rewards.absolute("exact+0.5*mine.py:short") == f"exact+0.5*{mine}/mine.py:short"
    assert rewards.absolute("exact") == "exact" and rewards.absolute("a.b:c") == "a.b:c"
    assert rewards.terms(rewards.absolute("-0.125*mine.py:one")) == [(-0.125, f"{mine}/mine.py:one")]
    assert rewards.fingerprint("exact+a:b") is None
    before = rewards.fingerprint("exact+mine.py:short")
    (mine / "mine.py").write_text(MINE + "\n")
    assert rewards.fingerprint("exact+mine.py:short") != before
    assert "cannot be read" in refused(lambda: rewards.fingerprint("gone.py:f"))
    assert not math.isnan(rewards.terms("exact")[0][0])
