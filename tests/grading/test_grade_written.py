"""Written answers: the rubric's file, the page that marks them, what it refuses."""

from __future__ import annotations

import argparse
import json
import socket
import threading
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import replace
from pathlib import Path

import chromium
import pytest
from grade_course import RIGHT, STEM, cell, hand_in
from test_grade_book import result

from nanochat_lib.course.grading import commands, exports, feedback, policy, rubric, written
from nanochat_lib.course.grading.gradebook import Gradebook
from nanochat_lib.course.grading.key import keys
from nanochat_lib.course.grading.marks import marks
from nanochat_lib.course.grading.submissions import collect
from nanochat_lib.errors import UserError

ROOT = Path(commands.__file__).parents[3]
TEXT = f"""
questions:
  - id: small.why
    chapter: {STEM}
    prompt: Why <two> at a time?
    criteria:
      - {{name: names the overlap, points: 2}}
      - {{name: "short & clear", points: 0.5}}
"""


@pytest.fixture
def questions(tmp_path):
    (tmp_path / "rubric.yaml").write_text(TEXT)
    return rubric.load(tmp_path / "rubric.yaml", [STEM])


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("questions:", "question:", "must hold questions"),
        ("small.why", "", "lacks id"),
        ("prompt:", "promt:", "did you mean prompt|there is no 'promt'"),
        (STEM, "03_data", "there is no chapter '03_data'"),
        ("points: 2", "points: -1", "above 0"),
        ("points: 2", "points: .nan", "above 0"),
        ("points: 2", "weight: 2", "a criterion is"),
        ('"short & clear"', "names the overlap", "same name"),
        ("questions:", "a: [", "not YAML"),
        ("    criteria:", "    criteria: 3\n    x:", "there is no 'x'"),
    ],
)
def test_a_rubric_that_means_nothing_is_refused(tmp_path, old, new, says):
    (tmp_path / "rubric.yaml").write_text(TEXT.replace(old, new, 1))
    with pytest.raises(UserError, match=says):
        rubric.load(tmp_path / "rubric.yaml", [STEM])
    with pytest.raises(UserError, match="cannot be read"):
        rubric.load(tmp_path / "none.yaml", [STEM])


@pytest.fixture
def desk(course, questions, tmp_path):
    folder = tmp_path / "in"
    code = [cell(text, id) for id, text in RIGHT.items()]
    hand_in(folder, "ada", cells=[*code, cell("<script>alert(1)</script> overlap", "small.why", "markdown")])
    hand_in(folder, "bob", cells=[*code, cell("", "small-why", "raw"), cell("two", "small-why", "raw")])
    hand_in(folder, "cy", RIGHT)
    found = written.items(collect(folder), questions, keys(course))
    with Gradebook(tmp_path / "book.sqlite") as book:
        for name in ("ada", "bob", "cy"):
            book.add(result(name, STEM))
    return written.Desk(found, tmp_path / "book.sqlite", "me")


@pytest.fixture
def address(desk):
    running = written.server(desk)
    assert running.server_address[0] == "127.0.0.1"
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{running.server_port}"
    running.shutdown()
    running.server_close()
    thread.join()


def ask(url, fields=None, **headers):
    data = urllib.parse.urlencode(fields).encode() if fields is not None else None
    request = urllib.request.Request(url, data, headers=headers)
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=10) as reply:
            return reply.status, reply.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def answered(address, line):
    """The status of a request of these very bytes."""
    host = address.removeprefix("http://")
    with socket.create_connection(("127.0.0.1", int(host.rpartition(":")[2])), timeout=10) as sent:
        sent.sendall(f"{line}\r\nHost: {host}\r\n\r\n".encode("latin1"))
        return sent.makefile("rb").readline()


def test_answers_are_found_and_marked(desk, address, questions):
    assert [(item.learner, item.text[:8]) for item in desk.items] == [("ada", "<script>"), ("bob", "two"), ("cy", "")]
    code, page = ask(f"{address}/{desk.word}/0")
    assert code == 200 and "0 of 3 marked" in page and "Why &lt;two&gt;" in page and "&lt;script&gt;alert" in page
    assert "<script" not in page and "ada" not in page and "short &amp; clear" in page
    code, page = ask(f"{address}/{desk.word}/0", {"c0": "1.5", "c1": "0.5", "comment": "fine"})
    assert code == 200 and "1 of 3 marked" in page and "answer 2" in page
    ask(f"{address}/{desk.word}/0", {"c0": "2", "c1": "0.5", "comment": "seen again"})
    assert 'value="2"' in ask(f"{address}/{desk.word}/0")[1] and "seen again" in ask(f"{address}/{desk.word}/0")[1]
    with Gradebook(desk.book) as book:
        ada, bob, _cy = marks(book, policy.Policy(), rubric.most(questions))
        assert sum(note.kind == "written" for note in book.notes()) == 4
    assert ada.chapters[STEM].written == 2.5 and ada.chapters[STEM].possible == 6.5 and bob.chapters[STEM].written == 0
    assert "small.why/names the overlap: 2 points (seen again)" in feedback.learner_page(ada)
    (test,) = [one for one in exports.as_gradescope(ada)["tests"] if one["name"] == "written answers"]
    assert (test["score"], test["max_score"]) == (2.5, 2.5) and "seen again" in test["output"]


def test_a_port_that_cannot_be_had(desk):
    with written.server(desk) as running:
        for port in (running.server_port, 99_999):
            with pytest.raises(UserError, match=f"port {port} cannot be used"):
                written.server(desk, port)


def test_marks_of_two_people_replace_nothing_unseen(desk, address):
    code, page = ask(f"{address}/{desk.word}/0", {"c0": "1", "c1": "0", "seen": ""})
    assert code == 200 and "answer 2" in page
    typed = {"c0": "2", "c1": "0.25", "comment": 'mine & "yours"', "seen": ""}
    code, page = ask(f"{address}/{desk.word}/0", typed)
    assert "me marked this answer meanwhile (1, 0)" in page and "answer 1" in page
    assert 'value="2"' in page and 'value="0.25"' in page and "mine &amp; &quot;yours&quot;" in page  # nothing is lost
    assert page.index("meanwhile") < page.index("class='answer'")  # where it is seen above a long answer
    with Gradebook(desk.book) as book:
        assert [note.points for note in book.notes() if note.kind == "written"] == [1, 0]
    seen = page.split('name="seen" value="')[1].split('"')[0]
    assert "answer 2" in ask(f"{address}/{desk.word}/0", typed | {"seen": seen})[1]
    with Gradebook(desk.book) as book:
        assert [note.points for note in book.notes() if note.kind == "written"] == [1, 0, 2, 0.25]


def test_all_marks_of_an_answer_are_written_or_none(desk, monkeypatch):
    before, calls = Gradebook.note, []

    def note(self, *words):
        calls.append(words)
        if len(calls) == 2:
            raise OSError("no space left")
        return before(self, *words)

    monkeypatch.setattr(Gradebook, "note", note)
    with pytest.raises(OSError, match="no space"):
        desk.save(0, {"c0": ["1"], "c1": ["0"]})
    with Gradebook(desk.book) as book:
        assert len(calls) == 2 and book.notes() == []


def test_it_goes_on_with_what_has_no_marks(desk, monkeypatch):
    assert desk.save(0, {"c0": ["1"], "c1": ["0"]}) == desk.save(2, {"c0": ["1"], "c1": ["0"]}) == ""
    assert (desk.after(-1), desk.after(0), desk.after(1), desk.after(2)) == (1, 1, 1, 1)
    said = []
    monkeypatch.setattr(written.Quiet, "serve_forever", lambda self: None)
    written.serve(desk, 0, said.append)
    assert f"/{desk.word}/1 " in said[0] and said[0].startswith("3 answers: http://127.0.0.1:")
    assert desk.save(1, {"c0": ["1"], "c1": ["0"]}) == ""
    assert (desk.after(-1), desk.after(0), desk.after(2)) == (0, 1, 0)  # all done: one after the other


def test_an_answer_that_was_replaced_is_to_be_marked_again(desk):
    for number in range(3):
        assert desk.save(number, {"c0": ["1"], "c1": ["0.5"], "comment": ["good"]}) == ""
    again = [replace(desk.items[0], text="another", digest="another"), *desk.items[1:]]
    later = written.Desk(again, desk.book, "me")
    assert (later.after(-1), later.after(0)) == (0, 0)
    shown = later.show(0)
    assert "2 of 3 marked" in shown and "has changed since it was marked" in shown and 'value="1"' in shown
    assert "has changed" not in later.show(1)
    with Gradebook(desk.book) as book:  # until then the old marks count, and no line says more than they do
        (mark,) = (one for one in marks(book, policy.Policy()) if one.learner == desk.items[0].learner)
        assert mark.chapters[STEM].written == 1.5 and len(mark.chapters[STEM].comments) == 2
    assert later.save(0, {"c0": ["2"], "c1": ["0.5"]}) == ""
    assert "3 of 3 marked" in later.show(0) and "has changed" not in later.show(0)


def test_a_cut_answer_says_so(desk):
    long = written.Item("ada", desk.items[0].question, "x" * written.LONGEST, 95_000)
    assert "the first 20,000 of 95,000 characters" in written.Desk([long], desk.book, "me").show(0)
    assert "characters" not in desk.show(0)


def test_a_silent_connection_keeps_nobody_waiting(desk, address):
    port = int(address.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)), socket.create_connection(("127.0.0.1", port)) as half:
        half.sendall(b"POST / HTTP/1.1\r\nContent-Length: 9\r\n\r\nc0")
        assert ask(f"{address}/{desk.word}/0")[0] == 200


@pytest.mark.skipif(not chromium.path(), reason="no Chromium here: install it or name it in $CHROMIUM")
def test_marking_in_a_real_browser(desk, address):
    with chromium.browser() as page:
        page.call("Page.navigate", url=f"{address}/{desk.word}/0")
        page.until("document.querySelector('.answer')?.innerText.startsWith('<script>alert')")
        for name, value in (("c0", "1.5"), ("c1", "0.5"), ("comment", "<b>good</b>")):
            page.run(f"document.forms[0].{name}.focus()")
            page.type(value)
        page.click("button")
        page.until("document.body?.innerText.includes('1 of 3 marked')")
        assert page.run("location.pathname") == f"/{desk.word}/1"
        page.click("a")  # back
        page.until("document.forms[0]?.comment?.value === '<b>good</b>'")
        assert page.problems() == []
    with Gradebook(desk.book) as book:
        assert [(note.learner, note.points, note.reason) for note in book.notes() if note.kind == "written"] == [
            ("ada", 1.5, "<b>good</b>"), ("ada", 0.5, "<b>good</b>")
        ]  # fmt: skip


@pytest.mark.parametrize(
    "fields",
    [{"c0": "3", "c1": "0"}, {"c0": "-1", "c1": "0"}, {"c0": "nan", "c1": "0"}, {"c0": "1"}, {"c0": "x", "c1": "0"}],
)
def test_marks_outside_the_rubric_are_not_written(desk, address, fields):
    code, page = ask(f"{address}/{desk.word}/0", fields)
    assert code == 200 and "class=bad" in page
    with Gradebook(desk.book) as book:
        assert book.notes() == []


def test_only_the_page_itself_is_answered(desk, address):
    right = {"c0": "1", "c1": "0"}
    for path in (
        "/",
        "/0",
        "/wrong/0",
        f"/{desk.word}",
        f"/{desk.word}/9",
        f"/{desk.word}/x",
        f"/{desk.word}/../0",
        f"/{desk.word}/{'9' * 5000}",
    ):
        assert ask(address + path)[0] == 404 and ask(address + path, right)[0] == 404
    assert ask(f"{address}/{desk.word}/0", Host="evil.example")[0] == 404
    assert ask(f"{address}/{desk.word}/0", right, Origin="http://evil.example")[0] == 404
    assert answered(address, f"GET /{desk.word}/\xb2 HTTP/1.1") == answered(address, "GET / HTTP/1.1")
    assert ask(f"{address}/{desk.word}/0", {"c0": "1" * 99_999, "c1": "0"})[0] == 404
    with Gradebook(desk.book) as book:
        assert book.notes() == []


def test_nobody_wrote_anything(tmp_path):
    assert "Nobody" in written.Desk([], tmp_path / "b.sqlite", "me").show(0)


def test_the_courses_own_questions_work_as_they_are(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    args = argparse.Namespace(policy=str(tmp_path / "grading.yaml"), book=str(tmp_path / "book.sqlite"))
    asked = commands.questions(args)
    assert {question.chapter for question in asked} == {"05_muon", "11_scale"}
    found = {question.id: [one] for question in asked for one in keys(ROOT, question.chapter[:2])}
    for question in asked:
        handed_in = json.loads((ROOT / "chapters" / f"{question.chapter}.ipynb").read_text(encoding="utf-8"))
        for learner in ("untouched", "wrote"):
            for one in handed_in["cells"]:
                if one["metadata"].get("id") == question.id and learner == "wrote":
                    one["source"] = "because"
            path = tmp_path / question.id / learner / f"{question.chapter}.ipynb"
            path.parent.mkdir(parents=True)
            path.write_text(json.dumps(handed_in), encoding="utf-8")
        items = written.items(collect(tmp_path / question.id), [question], found[question.id])
        assert [(item.learner, item.text) for item in items] == [("untouched", ""), ("wrote", "because")]
    with Gradebook(tmp_path / "book.sqlite") as book:
        book.add(result("ada", "05_muon"))
        book.note("adjust", "ada", "05_muon", "", 0.5, "a bonus", "me")
        before = commands.everybody(args)[0].chapters["05_muon"].possible
        assert before == sum(entry["most"] for entry in result("ada", "05_muon").exercises.values())
        book.note("written", "ada", "05_muon", f"{asked[0].id}/{asked[0].criteria[0].name}", 1.0, "yes", "me")
    after = commands.everybody(args)[0].chapters["05_muon"]
    assert after.possible == before + asked[0].most == before + 3 and after.written == 1.0
