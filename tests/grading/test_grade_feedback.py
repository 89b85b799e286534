"""What learners and instructors read: no hidden value ever, whatever a submission does; the class; who is like whom."""

from __future__ import annotations

import contextlib
import json
import re
import zipfile
from pathlib import Path

import grade_course
import pytest
from grade_course import MERGE, RIGHT, SCALE, TWICE, hand_in

from nanochat_lib.course import leaks
from nanochat_lib.course.grading import (
    attacks,
    audit,
    classpage,
    feedback,
    grade,
    handout,
    policy,
    regrade,
    resemble,
    similarity,
    similarpage,
)
from nanochat_lib.course.grading.gradebook import Gradebook
from nanochat_lib.course.grading.marks import LearnerMark, marks
from nanochat_lib.errors import UserError

WRONG = MERGE.replace("i += 2", "i += 1")
# Answers that carry the arguments of hidden cases out as far as they can.
SPIES = {
    "in its result": {
        "small.merge": "SEEN = []\ndef merge(*a):\n    SEEN.append(repr(a))\n    return ['spy' + x for x in SEEN]"
    },
    "in an exception": {"small.merge": "def merge(*a):\n    raise ValueError('spy' + repr(a))"},
    "in an exception's name": {"small.merge": "def merge(*a):\n    raise type('spy' + repr(a[0]), (Exception,), {})()"},
    "in a later exercise's result": RIGHT
    | {
        "small.merge": MERGE.replace("def merge", "SEEN = []\ndef merge").replace(
            "    out, i", "    SEEN.append(tokens)\n    out, i"
        )
    }
    | {"small.scale": "def scale(x, factor):\n    return 'spy' + repr(SEEN)"},
    "in a later cell's exception": RIGHT
    | {
        "small.merge": MERGE.replace("def merge", "SEEN = []\ndef merge").replace(
            "    out, i", "    SEEN.append(tokens)\n    out, i"
        )
    }
    | {"small.twice": "raise ValueError('spy' + repr(SEEN))\n" + TWICE},
    "in the name of a changed argument": {
        "small.merge": "import nanochat_lib.course.checker as k\n"
        "k.mutated = lambda used, args, fn: 'spy' + repr(args[0])\n" + MERGE
    },
    "on the line": {"small.merge": "import os\ndef merge(*a):\n    os.write(3, b'%020d' % len(a[0]))"},
}


@pytest.fixture(scope="module")
def book(desk, tmp_path_factory):
    folder = tmp_path_factory.mktemp("in")
    hand_in(folder, "<b>ada", RIGHT)
    hand_in(folder, "bob", RIGHT | {"small.merge": WRONG, "small.scale": SCALE.replace("*", "+")})
    hand_in(folder, "cy", {"small.merge": "def merge(tokens, pair, new):\n    return list(tokens)"})
    for name, answers in SPIES.items():
        hand_in(folder, f"spy {name}", answers)
    (folder / "dora").mkdir()
    with Gradebook(tmp_path_factory.mktemp("book") / "book.sqlite") as found:
        for _task, result in grade.graded(list(grade.tasks(grade.learners(folder), desk, found)), desk, 4):
            assert not isinstance(result, Exception), result
            found.add(result)
        yield found


@pytest.fixture(scope="module")
def pages(book):
    return {mark.learner: feedback.learner_page(mark) for mark in marks(book, policy.Policy())}


def hidden_values(desk):
    one = next(iter(desk.keys.values()))
    for question in one.questions.values():
        for case in question.cases:
            if case.name in question.hidden:
                put = one.put(question, case, 0)
                for value in (*put.args, put.want):
                    text = repr(value)
                    if isinstance(value, list) and len(text) > 6:
                        yield case.name, text


def test_no_page_holds_a_hidden_value(pages, desk):
    values = dict.fromkeys(hidden_values(desk))
    assert len(values) >= 4
    public = {"[1, 2, 3, 1, 2]", "[9, 3, 9]", "[1, 1, 1]", "[9, 1]", "[1, 2, 1, 2]"}
    for learner, page in pages.items():
        text = re.sub(r"\s+", " ", page.replace("&#x27;", "'").replace("&lt;", "<"))
        for case, value in values:
            assert value in public or value not in text, f"{learner}: {case}: {value}"
        assert grade_course.SECRET not in text


@pytest.mark.parametrize("name", SPIES)
def test_nothing_that_a_spy_put_together_from_hidden_cases_is_shown(pages, name):
    """Of hidden rows only fixed words are shown; what a spy says in public rows it said before it saw a hidden case."""
    page = pages[f"spy {name}"]
    for item in re.findall(r"<li>[^<]*\(a hidden case\)(.*?)</li>", page):
        assert "spy" not in item and not re.search(r"\d", item), item
    assert "[7, 7, 7]" not in page and "three pairs: " not in page.replace("(a hidden case)", "")


def test_a_page_says_what_why_and_a_hint(pages):
    page = pages["bob"]
    assert "a token was used twice" in page and "look at neighbours" in page and "one pair" in page
    assert (
        "overlap (a hidden case)" in page
        and "small.twice" in page
        and "2 of 3" not in page.split("small.twice")[1][:80]
    )
    assert "&lt;b&gt;ada" in pages["<b>ada"] and "<b>ada" not in pages["<b>ada"]
    assert "every value is" in page and "multiply" in page
    assert "not handed in" in pages["dora"] and "its cell is not in the notebook" in pages["cy"]
    assert "<script" not in "".join(pages.values()) and "http" not in re.sub(r"http-equiv", "", page)


def test_the_class_page(book, desk, tmp_path):
    one = next(iter(desk.keys.values()))
    known = resemble.signatures(desk, one, tmp_path, 2, say=lambda words: None)
    assert set(known["small.merge"]) == {m.label for m in one.right.notes["small.merge"].mutants}
    assert resemble.signatures(desk, one, tmp_path, 2, say=lambda words: pytest.fail("run again")) == known
    found = marks(book, policy.Policy())
    page = classpage.class_page(found, known)
    assert (
        "`i += 2` → `i += 1` (1)" in page
        and "body `out = list(tokens)" in page
        and "`x * factor` → `x + factor` (1)" in page
    )
    assert "learners by percent" in page and "dora" in page and "&lt;b&gt;" not in page.split("<svg")[0]
    assert classpage.class_page([], {}) and "0 learners" in classpage.class_page([], {})
    without = classpage.class_page(found, {})
    assert "none of them" not in without and "<td>–</td>" in without  # nothing was compared
    lost = classpage.class_page([LearnerMark("ivo", ids={"problem": "n.ipynb is <damaged>"})], {})
    assert "Nothing to grade" in lost and "n.ipynb is &lt;damaged&gt;" in lost
    assert len(feedback.write(found, tmp_path / "out", page)) == len(found) + 1
    assert len(list((tmp_path / "out" / "learners").iterdir())) == len(found)


def test_discrimination():
    assert classpage.correlation([0, 0, 1, 1, 1], [1, 2, 8, 9, 9]) == "0.99"
    assert classpage.correlation([1, 1, 0, 0, 0], [1, 2, 8, 9, 9]) == "-0.99"
    assert classpage.correlation([1] * 9, list(range(9))) == "–" == classpage.correlation([0, 1], [0, 1])


# ---- grading again


def test_regrading_shows_first_and_writes_only_when_asked(course, desk, tmp_path, monkeypatch):
    monkeypatch.setattr(grade, "open_desk", lambda *args, **more: contextlib.nullcontext(desk))
    folder, path, said = tmp_path / "in", tmp_path / "book.sqlite", []
    hand_in(folder, "ada", RIGHT)
    hand_in(folder, "bob", RIGHT | {"small.scale": SCALE.replace("*", "+")})
    grade.run(folder, path, course, say=said.append)
    one = next(iter(desk.keys.values()))
    monkeypatch.setattr(one, "bundle", "another")
    question = one.questions["small.scale"]
    kept = tuple(case for case in question.cases if case.name != "ones")
    monkeypatch.setitem(
        one.questions, "small.scale", type(question)(question.unit, question.exercise, kept, question.hidden)
    )
    said.clear()
    changes = regrade.regrade(folder, path, policy.Policy(), False, course, say=said.append)
    assert [(c.learner, c.before == c.after) for c in changes] == [("ada", True), ("bob", False)]
    assert said[0].startswith("bob  07_small  6.5 -> 7") and "small.scale" in said[0] and "--write" in said[-1]
    with Gradebook(path) as found:
        assert len(found.results()) == 2
    regrade.regrade(folder, path, policy.Policy(), True, course, say=said.append)
    with Gradebook(path) as found:
        assert len(found.results()) == 4 and found.current()["bob", "07_small"].bundle == "another"
    assert regrade.regrade(folder, path, policy.Policy(), True, course, say=said.append) == []
    assert "0 marks change, 2 papers keep theirs" in said
    with pytest.raises(UserError, match="nothing to grade again"):
        regrade.regrade(folder, tmp_path / "none", policy.Policy(), True, course)


# ---- who is like whom

LONG = '''
def learn(texts, count):
    """Learns merges."""
    pieces = {}
    for text in texts:
        for word in text.split():
            pieces[word] = pieces.get(word, 0) + 1
    merges = []
    while len(merges) < count:
        pairs = {}
        for word, times in pieces.items():
            for left, right in zip(word, word[1:]):
                pairs[left, right] = pairs.get((left, right), 0) + times
        if not pairs:
            break
        best = max(sorted(pairs), key=lambda pair: pairs[pair])
        merges.append("".join(best))
        pieces = {word.replace(merges[-1], chr(200 + len(merges))): n for word, n in pieces.items()}
    return merges
'''
OTHER = """
def learn(texts, count):
    words = sorted(" ".join(texts).split())
    result, seen = [], set()
    for _ in range(count):
        candidates = [(w[i] + w[i + 1], len(w)) for w in words for i in range(len(w) - 1) if w[i:i + 2] not in seen]
        if candidates == []:
            return result
        candidates.sort(key=lambda item: (-item[1], item[0]))
        top, _size = candidates.pop(0)
        seen |= {top}
        result = result + [top]
    else:
        return result
"""


def disguised(text: str) -> str:
    for old, new in (
        ("pieces", "counts"),
        ("merges", "out"),
        ("pairs", "table"),
        ("word", "token"),
        ("best", "winner"),
    ):
        text = re.sub(rf"\b{old}\b", new, text)
    return text.replace('"""Learns merges."""', "# my own work\n    'doc'").replace(
        "texts, count", "texts: list, count: int"
    )


def test_names_comments_and_annotations_do_not_hide_a_copy():
    assert similarity.fingerprints(LONG) == similarity.fingerprints(disguised(LONG)) and LONG != disguised(LONG)
    answers = {"x.learn": {"ada": LONG, "bob": disguised(LONG), "cy": OTHER}}
    (pair,) = similarity.alike(answers, {})
    assert (pair.first, pair.second, pair.share, pair.same_text) == ("ada", "bob", 1.0, False)
    assert "chat model" in similarity.report([pair]) and "ada, bob: 1 exercise" in similarity.report([pair])


def test_boilerplate_and_what_everybody_has_do_not_count():
    assert similarity.alike({"x": {"ada": LONG, "bob": LONG}}, {"x": [LONG]}) == []
    everybody = {f"l{i}": LONG for i in range(6)}
    assert similarity.alike({"x": everybody}, {}) == []
    assert similarity.alike({"x": {"ada": "def f(x):\n    return x", "bob": "def f(x):\n    return x"}}, {}) == []
    assert similarity.alike({"x": {"ada": "def (", "bob": "def ("}}, {}) == [] and "alike" in similarity.report([])


def test_similarity_of_a_folder(course, tmp_path):
    for name, text in (("ada", LONG), ("bob", disguised(LONG)), ("cy", OTHER)):
        hand_in(tmp_path, name, {"small.merge": text.replace("def learn(texts", "def merge(tokens, pair, new, texts")})
    found, answers = similarity.compared(tmp_path, course)
    assert [(p.first, p.second, p.exercise) for p in found] == [("ada", "bob", "small.merge")]
    assert set(answers["small.merge"]) == {"ada", "bob", "cy"}


def test_the_page_of_alike_answers_shows_both_as_they_were_compared(monkeypatch):
    assert similarpage.plain(LONG) == similarpage.plain(disguised(LONG)) != LONG
    assert "jnp.sum(v1)" in similarpage.plain("def f(x: int) -> int:\n    # why\n    return jnp.sum(x)")
    assert similarpage.plain("def (") == "def (" and "pass" in similarpage.plain("def f():\n    'only a text'")
    answers = {"x.learn": {"<ada>": LONG, "bob": disguised(LONG), "cy": OTHER}}
    pairs = [similarity.Pair("x.learn", "<ada>", "bob", 1.0, 20, False)]
    pairs += [similarity.Pair("x.learn", "bob", "cy", 0.6, 9, True)]
    shown = similarpage.similarity_page(pairs, answers)
    assert "chat model" in shown and "&lt;ada&gt;" in shown and "<ada>" not in shown and "<script" not in shown
    first, second = shown.split('<h2 id="pair-0">')[1].split('<h2 id="pair-1">')
    assert first.count("<mark>") == 2 * len(similarpage.plain(LONG).splitlines()) and "<span>" not in first
    assert "<span>" in second and shown.index("100%") < shown.index("60%") and "the same text" in shown
    assert "No two answers" in similarpage.similarity_page([], {})
    monkeypatch.setattr(similarpage, "SHOWN", 1)
    shown = similarpage.similarity_page(pairs, answers)
    assert shown.count("pair-0") == 2 and "pair-1" not in shown and "60%" in shown


# ---- handing out

ROOT = Path(grade.__file__).parents[3]


def test_the_bundle_holds_no_answer_and_is_the_same_each_time(tmp_path, monkeypatch):
    monkeypatch.setattr(handout, "build", lambda **more: None)  # tested by the course's own tests
    about = handout.bundle(ROOT, tmp_path / "course.zip", "salt")
    first = (tmp_path / "course.zip").read_bytes()
    names = zipfile.ZipFile(tmp_path / "course.zip").namelist()
    assert "course/chapters/03_attention.ipynb" in names and "course/nanochat_lib/bpe.py" in names
    assert not [n for n in names if "solutions/" in n or "tests/" in n or n.endswith(("attacks.py", ".sqlite"))]
    inside = json.loads(zipfile.ZipFile(tmp_path / "course.zip").read(f"course/{handout.NAME}"))
    assert inside == about and len(about["hash"]) == 16 and about["salted"] and "salt" not in about["salted"]
    monkeypatch.setattr(handout, "prove", lambda *args: None)
    handout.bundle(ROOT, tmp_path / "course.zip", "salt")
    assert (tmp_path / "course.zip").read_bytes() == first


def test_a_leak_in_the_zip_itself_is_found(tmp_path, monkeypatch):
    secret = (ROOT / "solutions" / "01_tokenizer.py").read_text(encoding="utf-8")
    hidden = secret[secret.index('hidden(\n    "tokenizer.merge"') :][:400]
    for name, data in (("course/docs/notes.md", hidden), ("course/solutions/01_tokenizer.py", "x")):
        path = tmp_path / "course.zip"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("course/nanochat_lib/__init__.py", "")
            archive.writestr(name, data)
        monkeypatch.setattr(leaks, "_library", lambda root: "")
        with pytest.raises(UserError, match="course.zip"):
            handout.prove(path, ROOT)


# ---- the audit


def test_the_audit_finds_what_earns_and_what_costs(desk, monkeypatch):
    one = next(iter(desk.keys.values()))
    cases = {"an attack": "def merge(*a):\n    return a", "one that works": MERGE}
    found = {f.what: f.wrong for f in audit._judged(one, "small.merge", cases, desk, 2)}
    assert found["an attack"] == "" and found["one that works"].startswith("it passed") and found["honest 0"] == ""
    every, said = attacks.attacks("", 0), []
    assert attacks.HARMFUL < set(every) and audit._harmless(every, "namespaces", said.append) == every and not said
    assert set(audit._harmless(every, "limits", said.append)) == set(every) - attacks.HARMFUL
    assert "a signal to all" in said.pop()
    monkeypatch.setattr(audit, "_leaks", lambda root: audit.Finding("the bundle", "holds an answer"))
    monkeypatch.setattr(audit, "_attacked", lambda *args: [audit.Finding("network")])
    assert audit.audit(Path("."), Path("."), say=said.append) == 1
    assert said == ["NOT SAFE  the bundle: holds an answer", "1 of 2 findings are as they should be"]
