"""`nanochat grade written`: a page on this machine on which written answers are marked, one after the other.

It listens on 127.0.0.1 only, takes requests only with the word that stands in the address it prints, and shows answers
as text, never as what they would be in a browser. Each mark is a row in the gradebook; the newest one counts. Two
people may mark at a time: who would replace marks that they have not seen is shown them first.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Callable
from dataclasses import dataclass
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

from nanochat_lib.course.grading.gradebook import Gradebook, Note
from nanochat_lib.course.grading.key import Key
from nanochat_lib.course.grading.notebooks import papers
from nanochat_lib.course.grading.page import page
from nanochat_lib.course.grading.rubric import Question, answer
from nanochat_lib.course.grading.submissions import Submission
from nanochat_lib.errors import UserError

LONGEST = 20_000  # characters of one answer that are shown
BODY = 1 << 16  # bytes of one request
PATIENCE = 20.0  # seconds for a connection that says nothing: browsers open some in advance
ELSEWHERE = "not found; the address is the one that nanochat grade written printed when it was started last"
FORM = """<style>input[type=number] { width: 5rem } textarea { width: 100%; height: 4rem } form { margin: 1rem 0 }
.answer { border: 1px solid var(--line); padding: .8rem; white-space: pre-wrap;
  overflow-wrap: anywhere; max-height: 60vh; overflow: auto }</style>"""


@dataclass(frozen=True)
class Item:
    """One answer of one learner to one question."""

    learner: str
    question: Question
    text: str
    length: int = 0  # characters of all that was handed in
    digest: str = ""  # of all of them


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
                digest = hashlib.sha256(text.encode("utf-8", "replace")).hexdigest()
                found.append(Item(learner, question, text[:LONGEST], len(text), digest))
    return found


class Desk:
    """The page's own state: answers, gradebook, who marks."""

    def __init__(self, found: list[Item], book: Path, who: str, named: bool = False) -> None:
        self.items, self.book, self.who, self.named = found, book, who, named
        self.word = secrets.token_urlsafe(16)

    def marked(self, book: Gradebook | None = None) -> dict[tuple[str, str], Note]:
        """(learner, question/criterion) -> the newest mark; (learner, question) -> which answer that was given for."""
        if book is None:
            with Gradebook(self.book) as opened:
                return self.marked(opened)
        return {(note.learner, note.item): note for note in book.notes() if note.kind in ("written", "answer")}

    def save(self, number: int, fields: dict[str, list[str]]) -> str:
        """Writes the marks of one answer, all or none; returns what is wrong with them, or ""."""
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
        with Gradebook(self.book) as book, book.at_once():
            now = self._notes(item, self.marked(book))
            if "seen" in fields and now and fields["seen"][0] != now[0].id:
                said = ", ".join(f"{note.points:g}" for note in now)
                return f"{now[0].who} marked this answer meanwhile ({said}); save again to put yours in place of that"
            for name, value in points.items():
                where = f"{item.question.id}/{name}"
                book.note("written", item.learner, item.question.chapter, where, value, comment or name, self.who)
            if item.digest:
                book.note("answer", item.learner, item.question.chapter, item.question.id, 0.0, item.digest, self.who)
        return ""

    def after(self, number: int) -> int:
        """Where to go on: the next answer without marks, else the next one."""
        marked, count = self.marked(), max(1, len(self.items))
        order = [(number + i) % count for i in range(1, count + 1)]
        return next((i for i in order if self.items and not self._done(self.items[i], marked)), order[0])

    def show(self, number: int, wrong: str = "", typed: dict[str, list[str]] | None = None) -> str:
        """The page of one answer. `typed`: what stood in its form when it was `wrong`."""
        if not self.items:
            return page("Written answers", "<h1>Nobody has handed in a written answer</h1>")
        number %= len(self.items)
        item, marked = self.items[number], self.marked()
        done = sum(self._done(one, marked) for one in self.items)
        name = item.learner if self.named else f"answer {number + 1}"
        notes, rows = self._notes(item, marked), []
        for i, criterion in enumerate(item.question.criteria):
            before = marked.get((item.learner, f"{item.question.id}/{criterion.name}"))
            value = (typed or {}).get(f"c{i}", [f"{before.points:g}" if before else ""])[0]
            rows.append(
                f'<p><label><input type="number" name="c{i}" min="0" max="{criterion.points:g}" step="any" required '
                f'value="{escape(value)}"> of {criterion.points:g}: {escape(criterion.name)}</label></p>'
            )
        named = notes and notes[0].item == f"{item.question.id}/{notes[0].reason}"  # no comment: the criterion's name
        comment = (typed or {}).get("comment", ["" if named or not notes else notes[0].reason])[0]
        if self._older(item, marked):
            wrong = wrong or "this answer has changed since it was marked; the marks below are those of the older one"
        cut = f"the first {LONGEST:,} of {item.length:,} characters" if item.length > LONGEST else ""
        body = (
            f"{FORM}<p class='dim'>{done} of {len(self.items)} marked</p>"
            f"{f'<p class=bad>{escape(wrong)}</p>' if wrong else ''}<h1>{escape(item.question.prompt)}</h1>"
            f"<p>{escape(name)}</p><div class='answer'>{escape(item.text) or '<i>no answer</i>'}</div>"
            f"{f'<p class=dim>{cut}</p>' if cut else ''}"
            f'<form method="post" action="/{self.word}/{number}">{"".join(rows)}'
            f'<input type="hidden" name="seen" value="{notes[0].id if notes else ""}">'
            f'<p><label>Comment for the learner<br><textarea name="comment">{escape(comment)}</textarea></label></p>'
            f'<p><button>Save and go on</button> <a href="/{self.word}/{(number - 1) % len(self.items)}">back</a> '
            f'<a href="/{self.word}/{(number + 1) % len(self.items)}">skip</a></p></form>'
        )
        return page("Written answers", body)

    def _notes(self, item: Item, marked: dict[tuple[str, str], Note]) -> list[Note]:
        """The marks that an answer has, in the rubric's order."""
        keys = [(item.learner, f"{item.question.id}/{criterion.name}") for criterion in item.question.criteria]
        return [marked[key] for key in keys if key in marked]

    def _done(self, item: Item, marked: dict[tuple[str, str], Note]) -> bool:
        return len(self._notes(item, marked)) == len(item.question.criteria) and not self._older(item, marked)

    def _older(self, item: Item, marked: dict[tuple[str, str], Note]) -> bool:
        """Whether its marks were given for another answer, which the learner has replaced since."""
        note = marked.get((item.learner, item.question.id))
        return note is not None and note.reason != item.digest


class Quiet(ThreadingHTTPServer):
    """A thread a connection, since a browser keeps some open on which it says nothing yet."""

    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """A reader who went away is no news."""
        if not isinstance(sys.exception(), OSError):
            super().handle_error(request, client_address)


def whole(text: str, most: int) -> int | None:
    """A number of plain digits up to `most`; None for anything else."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        return None
    return int(text) if int(text) <= most else None


def server(desk: Desk, port: int = 0) -> Quiet:
    """The server, bound to this machine alone. Its address is http://127.0.0.1:PORT/WORD/0."""

    class Handler(BaseHTTPRequestHandler):
        timeout = PATIENCE

        def _number(self) -> int | None:
            """The answer that the request is about; None for a request that is not from the page itself."""
            parts = urlsplit(self.path).path.strip("/").split("/")
            host = self.headers.get("Host", "")
            ours = host in (f"127.0.0.1:{self.server.server_port}", f"localhost:{self.server.server_port}")
            origin = self.headers.get("Origin")
            ours = ours and (origin in (None, f"http://{host}"))
            if not ours or len(parts) != 2 or not secrets.compare_digest(parts[0].encode(), desk.word.encode()):
                return None
            return whole(parts[1], max(0, len(desk.items) - 1))

        def _send(self, code: int, text: str, **headers: str) -> None:
            data = text.encode("utf-8", "replace")
            self.send_response(code)
            more = {"Content-Type": "text/html; charset=utf-8", "Content-Length": str(len(data))}
            # With no-referrer a browser calls the origin of a form `null`, and nothing could be saved.
            more |= {"Referrer-Policy": "same-origin", "X-Frame-Options": "DENY", "Cache-Control": "no-store"}
            for name, value in {**more, **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            number = self._number()
            if number is None:
                self._send(404, ELSEWHERE)
            else:
                self._send(200, desk.show(number))

        def do_POST(self) -> None:
            number, size = self._number(), whole(self.headers.get("Content-Length", ""), BODY)
            if number is None or size is None or not desk.items:
                self._send(404, ELSEWHERE)
                return
            fields = parse_qs(self.rfile.read(size).decode("utf-8", "replace"), keep_blank_values=True)
            if wrong := desk.save(number, fields):
                self._send(200, desk.show(number, wrong, fields))
            else:
                self._send(303, "", Location=f"/{desk.word}/{desk.after(number)}")

        def log_message(self, *_: object) -> None:
            return

    try:
        return Quiet(("127.0.0.1", port), Handler)
    except (OSError, OverflowError) as error:
        raise UserError(f"port {port} cannot be used ({error}); leave --port out to take any that is free") from None


def serve(desk: Desk, port: int, say: Callable[[str], None] = print) -> None:
    """Until Ctrl-C. The address is that of the first answer without marks."""
    with server(desk, port) as running:
        first = desk.after(-1)
        say(f"{len(desk.items)} answers: http://127.0.0.1:{running.server_port}/{desk.word}/{first}   (Ctrl-C ends it)")
        try:
            running.serve_forever()
        except KeyboardInterrupt:
            say("")
