"""Every rule of a chapter, broken once: the build says which exercise, what is wrong and how to mend it."""

from __future__ import annotations

import ast
import re

import demo
import pytest

from nanochat_lib.course import lock
from nanochat_lib.course.build import build
from nanochat_lib.course.names import imports, needed
from nanochat_lib.course.symbols import difference
from nanochat_lib.errors import UserError


def test_a_chapter_that_keeps_the_rules_is_built(tmp_path):
    assert len(build(root=demo.write(tmp_path))) == 5


HIDDEN = 'hidden("pairs.twice", example("nothing", ([], (1, 2)), []), example("one", ([1, 2, 3], (1, 2)), [9, 3]))'
CHAPTER_RULES = {
    "no check cell": ('check("pairs.merge", merge)', "merge([1], (1, 1), 2)", r"pairs\.merge has no check cell"),
    "check not next": (
        '# %% id="pairs.merge.check"\n', "# %% [markdown]\n# Words.\n\n# %%\n", r"pairs\.merge has no check cell"
    ),
    "no hidden cell": ('# %% tags=["hidden"] id="pairs.twice.hidden"', "# %%", "twice has no cell tagged hidden"),
    "one hidden case": (HIDDEN, 'hidden("pairs.twice", example("nothing", ([], (1, 2)), []))', "has 1 hidden cases"),
    "two mutants": ('mutant("pairs.twice", "NEW + 1", "NEW + 2", says="11")\n', "", "has 2 mutants, it needs 3 to 8"),
    "nine mutants": (
        'mutant("pairs.twice", "NEW',
        'mutant("pairs.twice", "a", "b", says="x")\n' * 6 + 'mutant("pairs.twice", "NEW',
        "has 9 mutants",
    ),
    "another's": ('mutant("pairs.twice", body="return', 'mutant("pairs.merge", body="return', "speaks of pairs.merge"),
    "drifted answer": ("i += 2", "i += 3", r"not nanochat_lib\.bpe:merge: `i \+= 3` here, `i \+= 2` there"),
    "no such symbol": ("nanochat_lib.bpe:merge", "nanochat_lib.bpe:nosuch", "nosuch"),
    "other name": ("def twice(", "def two(", r"its stub defines no twice"),
    "topic": ('id="pairs.twice" points', 'id="other.twice" points', "twice must start with the chapter's topic"),
    "unknown name": ("return merge(merge(", "return merge(numpy.sort(", "uses numpy, which no import"),
    "later setup": ("NEW = 9", "NEW = OLD", "uses OLD, which no import"),
    "no exercise": ('mine("pairs.merge")', 'mine("pairs.merg")', r"no exercise is called pairs\.merg"),
    "unknown quiz": ('quiz("pairs.q_ties")', 'quiz("pairs.q_tie")', "no such quiz"),
    "unused quiz": ('quiz("pairs.q_ties")', "pass", r"quiz pairs\.q_ties is never given to quiz\(\)"),
    "unrevealed": ('reveal("pairs.p_twice", ', "print(", r"never given to reveal\(\)"),
    "same id": ('id="pairs.twice" points', 'id="pairs.merge" points', "two cells are called pairs-merge"),
}  # fmt: skip


@pytest.mark.parametrize("rule", CHAPTER_RULES)
def test_a_chapter_that_breaks_a_rule_is_refused(tmp_path, rule):
    old, new, message = CHAPTER_RULES[rule]
    assert old in demo.CHAPTER
    with pytest.raises(UserError, match=message):
        build(root=demo.write(tmp_path, demo.CHAPTER.replace(old, new)))
    assert not (tmp_path / "chapters").exists()  # nothing is written


CHECK_RULES = {
    "no such exercise": ('"pairs.twice",', '"pairs.thrice",', r"no Exercise\('pairs\.twice'"),
    "one too many": ('"pairs.twice",', '"pairs.thrice",', r"checks for pairs\.thrice, which 03_pairs\.py has no"),
    "no public case": ('[example("both", ([1, 2, 1, 2], (1, 2)), [10])]', "[]", r"pairs\.twice has no public case"),
    "two hints": ('"merge", "merge again", ', '"merge", ', "hints are exactly three"),
    "no picture": ('lambda: "[10]"', '"[10]"', "hints are exactly three"),
    "needless fallback": ('library="nanochat_lib', 'fallback=max, library="nanochat_lib', "needs no fallback"),
    "broken": ("EXERCISES = [", "EXERCISES = [nosuch,", "pairs.py cannot be imported"),
    "twice": ("QUIZZES", "EXERCISES += EXERCISES[:1]\nQUIZZES", "stands there twice"),
}  # fmt: skip


@pytest.mark.parametrize("rule", CHECK_RULES)
def test_a_checks_module_that_breaks_a_rule_is_refused(tmp_path, rule):
    old, new, message = CHECK_RULES[rule]
    assert old in demo.CHECKS
    with pytest.raises(UserError, match=message):
        build(root=demo.write(tmp_path, checks=demo.CHECKS.replace(old, new, 1)))


def test_a_chapter_with_exercises_needs_checks_and_another_does_not(tmp_path):
    demo.write(tmp_path)
    (tmp_path / "nanochat_lib/course/checks/pairs.py").unlink()
    with pytest.raises(UserError, match=r"checks/pairs\.py with their checks is missing"):
        build(root=tmp_path)


def test_two_chapters_of_one_topic_are_refused(tmp_path):
    demo.write(demo.write(tmp_path), stem="04_pairs")
    with pytest.raises(UserError, match=r"04_pairs\.py: pairs is taken by 03_pairs\.py"):
        build(root=tmp_path)


# --- Published ids ----------------------------------------------------------------------------------------------------


def test_an_exercise_that_vanishes_or_is_renamed_is_refused_until_the_lock_says_so(tmp_path):
    build(root=demo.write(tmp_path))
    path = tmp_path / lock.NAME
    assert path.read_text(encoding="utf-8").splitlines()[1:] == ["pairs.merge", "pairs.twice"]
    renamed = [
        text.replace("pairs.twice", "pairs.again").replace("def twice", "def again")
        for text in (demo.CHAPTER, demo.CHECKS)
    ]
    demo.write(tmp_path, renamed[0].replace(", twice)", ", again)"), renamed[1])
    with pytest.raises(UserError, match=r"exercise pairs\.twice is published"):
        build(root=tmp_path)
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("pairs.twice", "pairs.twice -> pairs.again"), encoding="utf-8")
    build(root=tmp_path)
    assert path.read_text(encoding="utf-8").splitlines()[1:] == [
        "pairs.again",
        "pairs.merge",
        "pairs.twice -> pairs.again",
    ]
    assert build(root=tmp_path, check=True) == []


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a.b -> a.c\n", "became a.c, but no chapter has a.c"),
        ("x.y -> a.c\nx.y\n", "write one id a line"),
        ("x.y ->\n", "write one id a line"),
        ("x y\n", "write one id a line"),
        ("a.a -> (gone)\n", "but a chapter has a.a"),
    ],
)
def test_a_lock_that_means_nothing_is_refused(text, message):
    with pytest.raises(UserError, match=re.escape(message)):
        _, problems = lock.update(text, ["a.a"])
        raise UserError("; ".join(problems))


def test_both_sides_of_a_merge_may_add_the_same_line():
    assert lock.update("b.b\na.a\nb.b\nc.c -> (gone)\n", ["a.a", "b.b"]) == (
        lock.HEADER + "a.a\nb.b\nc.c -> (gone)\n", []
    )  # fmt: skip


# --- Syntax trees and names -------------------------------------------------------------------------------------------

MERGE = next(c for c in demo.CHAPTER.split("# --- solution\n")[1:])


@pytest.mark.parametrize(
    ("change", "same"),
    [
        (("def merge(", "@staticmethod\ndef merge("), True),
        (("tokens: list", "tokens: tuple[int, ...]"), True),
        (("-> list:", "-> dict:"), True),
        (('"""Puts', '"""Other words. Puts'), True),
        (("            i += 2", '            note("i", i)\n            i += 2'), True),
        (("out, i = [], 0", "out, i = [], 0  # a comment"), True),
        (("out, i = [], 0", "out, i = [], 1"), False),
        (("        else:\n            out.append(tokens[i])\n            i += 1", "        i += 1"), False),
        (("def merge(tokens", "def merge(ids"), False),
        (("new: object", "new: object = 0"), False),
        (("            i += 2", "            print(i)\n            i += 2"), False),
    ],
)
def test_what_makes_an_answer_another(change, same):
    from nanochat_lib.course import symbols

    text = (symbols.PACKAGE / "bpe.py").read_text(encoding="utf-8")
    node = symbols.find(ast.parse(text), "merge")
    source = "\n".join(text.split("\n")[node.lineno - 1 : node.end_lineno])
    assert change[0] in source
    assert (difference(source.replace(*change), "nanochat_lib.bpe:merge") == "") is same


def test_names_that_a_cell_needs():
    assert needed(
        "import a\nb = a.c + d\ndef f(x, y=e):\n    global h\n    h = x\n    return [g for g in z if g]"
    ) == set("dez")
    assert needed("class A(B):\n    x = 1\n    def f(self):\n        return len(self.x) + y") == {"B", "y"}
    assert (
        imports("import a\nx = 1; import b\nif x:\n    import c\nfrom d import e")
        == "import a\nimport b\n\n\nfrom d import e"
    )
