"""`nanochat grade written`: a page on this machine on which written answers are marked, one after the other.

It listens on 127.0.0.1 only, takes requests only with the word that stands in the address it prints, and shows answers
as text, never as what they would be in a browser. Each mark is a row in the gradebook; the newest one counts.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from nanochat_lib.course.grading.gradebook import Gradebook
from nanochat_lib.course.grading.key import Key
from nanochat_lib.course.grading.notebooks import papers
from nanochat_lib.course.grading.page import page
from nanochat_lib.course.grading.rubric import Question, answer
from nanochat_lib.course.grading.submissions import Submission

LONGEST = 20_000  # characters of one answer that are shown
BODY = 1 << 16  # bytes of one request
FORM = """<style>input[type=number] { width: 5rem } textarea { width: 100%; height: 4rem } form { margin: 1rem 0 }
.answer { border: 1px solid var(--line); padding: .8rem; white-space: pre-wrap }</style>"""


@dataclass(frozen=True)
class Item:
    """One answer of one learner to one question."""

    learner: str
    question: Question
    text: str


def items(submissions: list[Submission], questions: list[Question], keys: list[Key]) -> list[Item]:
    """All answers, question by question: who marks one question in a row marks alike."""
    by_learner = {s.learner: {paper.stem: paper for paper in papers(s, keys)[0]} for s in submissions}
    given = {str(cell.metadata.get("id", "")): cell.source.strip() for one in keys for cell in one.right.cells}
    found = []
    for question in questions:
        for learner, theirs in by_learner.items():
            if question.chapter in theirs:
                text = answer(theirs[question.chapter], question)
                text = "" if text == given.get(question.id) else text  # the chapter's own words, left as they were
                found.append(Item(learner, question, text[:LONGEST]))
    return found


class Desk:
    """The page's own state: answers, gradebook, who marks."""

    def __init__(self, found: list[Item], book: Path, who: str, named: bool = False) -> None:
        self.items, self.book, self.who, self.named = found, book, who, named
        self.word = secrets.token_urlsafe(16)

    def marked(self) -> dict[tuple[str, str], tuple[float, str]]:
        """(learner, question/criterion) -> (points, comment); the newest."""
        with Gradebook(self.book) as book:
            return {(n.learner, n.item): (n.points, n.reason) for n in book.notes() if n.kind == "written"}

    def save(self, number: int, fields: dict[str, list[str]]) -> str:
        """Writes the marks of one answer; returns what is wrong with them, or ""."""
        item = self.items[number]
        points = {}
        for i, criterion in enumerate(item.question.criteria):
            try:
                value = float(fields.get(f"c{i}", [""])[0])
            except ValueError:
                return f"{criterion.name}: a number is missing"
            if not 0 <= value <= criterion.points:
                return f"{criterion.name}: from 0 to {criterion.points:g}"
            points[criterion.name] = value
        comment = fields.get("comment", [""])[0].strip()[:2000]
        with Gradebook(self.book) as book:
            for name, value in points.items():
                where = f"{item.question.id}/{name}"
                book.note("written", item.learner, item.question.chapter, where, value, comment or name, self.who)
        return ""

    def show(self, number: int, wrong: str = "") -> str:
        """The page of one answer."""
        if not self.items:
            return page("Written answers", "<h1>Nobody has handed in a written answer</h1>")
        number %= len(self.items)
        item, marked = self.items[number], self.marked()
        done = sum(self._done(one, marked) for one in self.items)
        name = item.learner if self.named else f"answer {number + 1}"
        rows = []
        for i, criterion in enumerate(item.question.criteria):
            before = marked.get((item.learner, f"{item.question.id}/{criterion.name}"))
            value = f"{before[0]:g}" if before else ""
            rows.append(
                f'<p><label><input type="number" name="c{i}" min="0" max="{criterion.points:g}" step="any" required '
                f'value="{value}"> of {criterion.points:g}: {escape(criterion.name)}</label></p>'
            )
        first = marked.get((item.learner, f"{item.question.id}/{item.question.criteria[0].name}"), (0.0, ""))[1]
        comment = "" if first == item.question.criteria[0].name else first
        body = (
            f"{FORM}<p class='dim'>{done} of {len(self.items)} marked</p><h1>{escape(item.question.prompt)}</h1>"
            f"<p>{escape(name)}</p><div class='answer'>{escape(item.text) or '<i>no answer</i>'}</div>"
            f"{f'<p class=bad>{escape(wrong)}</p>' if wrong else ''}"
            f'<form method="post" action="/{self.word}/{number}">{"".join(rows)}'
            f'<p><label>Comment for the learner<br><textarea name="comment">{escape(comment)}</textarea></label></p>'
            f'<p><button>Save and go on</button> <a href="/{self.word}/{(number - 1) % len(self.items)}">back</a> '
            f'<a href="/{self.word}/{(number + 1) % len(self.items)}">skip</a></p></form>'
        )
        return page("Written answers", body)

    def _done(self, item: Item, marked: dict) -> bool:
        return all((item.learner, f"{item.question.id}/{c.name}") in marked for c in item.question.criteria)


def server(desk: Desk, port: int = 0) -> HTTPServer:
    """The server, bound to this machine alone. Its address is http://127.0.0.1:PORT/WORD/0."""

    class Handler(BaseHTTPRequestHandler):
        def _number(self) -> int | None:
            """The answer that the request is about; None for a request that is not from the page itself."""
            parts = urlsplit(self.path).path.strip("/").split("/")
            host = self.headers.get("Host", "")
            ours = host in (f"127.0.0.1:{self.server.server_port}", f"localhost:{self.server.server_port}")
            origin = self.headers.get("Origin")
            ours = ours and (origin in (None, f"http://{host}"))
            if not ours or len(parts) != 2 or not secrets.compare_digest(parts[0].encode(), desk.word.encode()):
                return None
            return int(parts[1]) if parts[1].isdigit() and int(parts[1]) < max(1, len(desk.items)) else None

        def _send(self, code: int, text: str, **headers: str) -> None:
            data = text.encode("utf-8", "replace")
            self.send_response(code)
            more = {"Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(data))}
            more |= {"Referrer-Policy": "no-referrer", "X-Frame-Options": "DENY", "Cache-Control": "no-store"}
            for name, value in {**more, **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            number = self._number()
            if number is None:
                self._send(404, "not found")
            else:
                self._send(200, desk.show(number))

        def do_POST(self) -> None:
            number, size = self._number(), self.headers.get("Content-Length", "")
            if number is None or not size.isdigit() or int(size) > BODY or not desk.items:
                self._send(404, "not found")
                return
            fields = parse_qs(self.rfile.read(int(size)).decode("utf-8", "replace"), keep_blank_values=True)
            if wrong := desk.save(number, fields):
                self._send(200, desk.show(number, wrong))
            else:
                self._send(303, "", Location=f"/{desk.word}/{(number + 1) % len(desk.items)}")

        def log_message(self, *_: object) -> None:
            return

    return HTTPServer(("127.0.0.1", port), Handler)


def serve(desk: Desk, port: int, say: Callable[[str], None] = print) -> None:
    """Until Ctrl-C."""
    with server(desk, port) as running:
        say(f"{len(desk.items)} answers: http://127.0.0.1:{running.server_port}/{desk.word}/0   (Ctrl-C ends it)")
        try:
            running.serve_forever()
        except KeyboardInterrupt:
            say("")
