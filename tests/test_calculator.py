"""The calculator: nanochat's accepted language, without evaluating anything as code."""

import os
import subprocess
import threading
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from nanochat_lib.calculator import MAX_CHARS, MAX_DEPTH, MAX_RESULT_CHARS, calculate


@pytest.mark.parametrize(
    ("text", "printed"),
    [
        ("12/60", "0.2"),
        ("1,000*2", "2000"),
        ("1,000+1", "1001"),
        ("1,234,567-1", "1234566"),
        ("10/2", "5.0"),
        ("7//2", "3"),
        ("-7//2", "-4"),
        ("7.5//2", "3.0"),
        ("2*-3", "-6"),
        ("--5", "5"),
        ("2-3-4", "-5"),
        ("100/10/2", "5.0"),
        ("2+3*4", "14"),
        ("(2+3)*4", "20"),
        (" ( 1 + 2 ) ", "3"),
        ("0.1+0.2", "0.30000000000000004"),
        (".5+1.", "1.5"),
        ("00", "0"),
        ("08.5", "8.5"),
        ("'strawberry'.count('r')", "3"),
        ('"strawberry".count("rr")', "1"),
        ("('strawberry').count('r')", "3"),
        ("'a,b,c'.count(',')", "2"),
        ("\"a,b\".count(',')", "1"),
        ("'1,000'.count('0')", "3"),
        ("'New York'.count('w Y')", "1"),
        ('"it\'s".count("\'")', "1"),
        ("'abc'.count('')", "4"),
    ],
)
def test_results_are_printed_as_python_prints_them(text: str, printed: str) -> None:
    assert str(calculate(text)) == printed


@pytest.mark.parametrize(
    "text",
    ["", " ", "2**3", "2**10", "99999**99999", "1/0", "1//0", "1.0/0", "(1", "1)", "()", "1e3", "1 2", "1.2.3", "007",
     "(1)(2)", "*1", "1+", "1,", ",1", "1,,2", "1, 2", "(1,)", "1_000", "0x10", "1;2", "1\n+1", "5%2", "1<2", "٣+1",
     "²", "'x'.upper()", "len('abc').count('a')", "'open'.count('o')", "'ab'", "'a'+'b'", "'a'*3", "-'a'.count('a')",
     "1 .count('1')", "'a'.count(1)", "'a'.count('a').count('a')", "'a'.count('a', 0)", "'a'.count('a'",
     "'a.count('a')"],
)  # fmt: skip
def test_outside_of_the_language_there_is_no_result(text: str) -> None:
    assert calculate(text) is None


HOSTILE = [
    "__import__('os').system('echo hi')",
    "__import__('os')",
    "().__class__.__base__.__subclasses__()",
    "().__class__.__bases__[0].__subclasses__().count(1)",
    "''.__class__.__mro__",
    "'a'.__class__.count('a')",
    "os.system('x').count('x')",
    "open('/etc/passwd').read().count('r')",
    "exec('1').count('1')",
    "eval('1+1').count('1')",
    "compile('1', 'a', 'eval').count('1')",
    "getattr('a', 'count')('a').count('a')",
    "globals().count('a')",
    "print('a').count('a')",
    "str.count('a', 'a')",
    "str('a').count('a')",
    "'a'.format.count('a')",
    "'{0.__class__}'.format('a').count('a')",
    "f'{1}'.count('1')",
    "b'a'.count(b'a')",
    "'a'.join('b').count('b')",
    "'a'.encode().count('a')",
    "'\\x61'.count('a')",
    "[1].count(1)",
    "(1).count(1)",
    "[x for x in ().__class__.__base__.__subclasses__()].count(1)",
    "(lambda: 1)().count(1)",
    "'a'.count('a') if 1 else 2",
    "'a'.count('a') or 1",
    "not 'a'.count('a')",
    "x.count('a')",
    "exit().count('a')",
    "'a'.count(input())",
    "'a'.count(exit())",
    "breakpoint().count('a')",
    "'a'.count('a');import os",
    "'a'.count('a')\nimport os",
    "'a'.count('a')#",
    "a='a'.count('a')",
    "(a:='a').count('a')",
    "9" * 300 + "*9",
    "(" * 200 + "1" + ")" * 200,
    "-" * 10_000 + "1",
    "9" * 100_000,
    "1/" + "9" * 200 + "/0",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_hostile_text_has_no_result_and_no_effect(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def touched(*_args: object, **_named: object) -> None:
        pytest.fail("the calculator ran something")

    with monkeypatch.context() as patch:
        for owner, names in ((os, ("system", "popen")), (subprocess, ("Popen",))):
            for name in names:
                patch.setattr(owner, name, touched)
        for name in ("eval", "exec", "compile", "open", "input", "print", "getattr", "globals", "__import__"):
            patch.setitem(calculate.__globals__, name, touched)
        value = calculate(text)
    assert value is None


@pytest.mark.parametrize("value", [None, 12, b"1+1", ["1"]])
def test_something_that_is_no_text_has_no_result(value: object) -> None:
    assert calculate(value) is None


def test_text_nesting_and_result_are_bounded() -> None:
    assert calculate("1" + " " * (MAX_CHARS - 1)) == 1
    assert calculate("1" + " " * MAX_CHARS) is None
    assert calculate("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH) == 1
    assert calculate("(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1)) is None
    assert calculate("1" * MAX_RESULT_CHARS) == int("1" * MAX_RESULT_CHARS)
    assert calculate("1" * (MAX_RESULT_CHARS + 1)) is None
    assert calculate("*".join(["99999"] * 40)) is None
    assert calculate("+".join(["1"] * (MAX_CHARS // 2))) == MAX_CHARS // 2


@pytest.mark.parametrize(
    "text", ["9" * 127 + ".*" + "9" * 127, "9" * 127 + "/." + "0" * 126 + "1", "*".join(["9."] * 85), "9" + "/.1" * 85]
)
def test_the_largest_values_stay_finite(text: str) -> None:
    value = calculate(text)
    assert isinstance(value, float)
    assert 1e80 < value < float("inf")


def test_the_same_result_in_any_thread() -> None:
    results: list[object] = []
    thread = threading.Thread(target=lambda: results.extend([calculate("1+1"), calculate("'aa'.count('a')")]))
    thread.start()
    thread.join()
    assert results == [2, 2]


@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@given(st.text(alphabet="0123456789+-*/() .", max_size=14))
@settings(max_examples=1500, deadline=None)
def test_arithmetic_equals_pythons_own(text: str) -> None:
    try:
        expected = eval(text, {"__builtins__": {}}, {}) if "**" not in text else None  # only arithmetic gets here
    except (SyntaxError, TypeError, ZeroDivisionError, OverflowError):
        expected = None
    if not isinstance(expected, int | float):
        expected = None
    assert repr(calculate(text)) == repr(expected)


@given(st.text(max_size=300))
@settings(max_examples=500, deadline=None)
def test_any_text_ends_quickly_without_an_exception(text: str) -> None:
    for wrapped in (text, f"'{text}'.count('a')"):
        started = time.process_time()
        value = calculate(wrapped)
        assert value is None or isinstance(value, int | float)
        assert time.process_time() - started < 5
