"""The gradebook: an SQLite file to which rows are only ever added.

A result belongs to a learner's submission (hash), a chapter and a bundle (hash of all that decides on marks); it is
there once, however often the same is graded or two gradebooks are merged. Adjustments and written marks are rows of
their own, with a reason and a name; the newest counts, the older ones stay. Triggers refuse to change or delete rows.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from nanochat_lib.errors import UserError

VERSION = 1
SCHEMA = """
CREATE TABLE IF NOT EXISTS results (
    learner TEXT NOT NULL, chapter TEXT NOT NULL, submission TEXT NOT NULL, bundle TEXT NOT NULL, salted TEXT NOT NULL,
    path TEXT NOT NULL, handed_in REAL NOT NULL, graded REAL NOT NULL, isolation TEXT NOT NULL, engine TEXT NOT NULL,
    exercises TEXT NOT NULL, remarks TEXT NOT NULL,
    UNIQUE (learner, chapter, submission, bundle, salted)
);
CREATE TABLE IF NOT EXISTS learners (
    learner TEXT NOT NULL, kind TEXT NOT NULL, value TEXT NOT NULL, at REAL NOT NULL,
    UNIQUE (learner, kind, value)
);
CREATE TABLE IF NOT EXISTS notes (
    id TEXT NOT NULL UNIQUE, kind TEXT NOT NULL, learner TEXT NOT NULL, chapter TEXT NOT NULL, item TEXT NOT NULL,
    points REAL NOT NULL, reason TEXT NOT NULL, who TEXT NOT NULL, at REAL NOT NULL
);
"""
TABLES = {"results": 12, "learners": 4, "notes": 9}  # columns


@dataclass
class Result:
    """One chapter of one learner as it was graded. `exercises`: id -> {"status", "groups", "rows", "points"}."""

    learner: str
    chapter: str  # "03_attention"
    submission: str
    bundle: str
    salted: str  # short hash of the salt, "" without one
    path: str
    handed_in: float
    graded: float
    isolation: str
    engine: str
    exercises: dict
    remarks: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Note:
    """A mark given by hand. kind "adjust": points added to an exercise (item: its id, or "" for the chapter);
    "written": points for a criterion (item: question/criterion); "answer": which answer (reason: its hash) the marks of a
    question (item) were given for."""

    id: str
    kind: str
    learner: str
    chapter: str
    item: str
    points: float
    reason: str
    who: str
    at: float


class Gradebook:
    """An open gradebook; a context manager."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.db = sqlite3.connect(path, timeout=60, isolation_level=None)
            version = self.db.execute("PRAGMA user_version").fetchone()[0]
            if version > VERSION:
                raise UserError(f"{path} was written by a newer version of nanochat; update this one")
            self.db.execute("PRAGMA journal_mode=WAL")
            self.db.executescript(SCHEMA)
            for table in TABLES:
                for action in ("UPDATE", "DELETE"):
                    self.db.execute(
                        f"CREATE TRIGGER IF NOT EXISTS {table}_{action.lower()} BEFORE {action} ON {table} "
                        "BEGIN SELECT RAISE(ABORT, 'the gradebook is append-only'); END"
                    )
            self.db.execute(f"PRAGMA user_version={VERSION}")
        except sqlite3.DatabaseError as error:
            raise UserError(f"{path} is not a gradebook, or cannot be written ({error})") from None

    def close(self) -> None:
        self.db.close()

    def __enter__(self) -> Gradebook:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- writing

    def add(self, result: Result) -> bool:
        """False when the very same was there already."""
        row = (
            result.learner, result.chapter, result.submission, result.bundle, result.salted, result.path,
            result.handed_in, result.graded, result.isolation, result.engine, json.dumps(result.exercises),
            json.dumps(result.remarks),
        )  # fmt: skip
        done = self.db.execute(f"INSERT OR IGNORE INTO results VALUES ({','.join('?' * len(row))})", row)
        return done.rowcount > 0

    def know(self, learner: str, kind: str, value: str) -> None:
        """Something lasting about a learner: an id of Moodle or Canvas, that nothing could be read."""
        self.db.execute("INSERT OR IGNORE INTO learners VALUES (?,?,?,?)", (learner, kind, value, time.time()))

    def note(self, kind: str, learner: str, chapter: str, item: str, points: float, reason: str, who: str) -> Note:
        """Adds a mark given by hand."""
        if not reason.strip():
            raise UserError("a mark given by hand needs a reason; it stays on record")
        at = time.time()
        text = json.dumps([kind, learner, chapter, item, points, reason, who, at])
        row = Note(
            hashlib.sha256(text.encode()).hexdigest()[:24], kind, learner, chapter, item, points, reason, who, at
        )
        self.db.execute("INSERT OR IGNORE INTO notes VALUES (?,?,?,?,?,?,?,?,?)", tuple(vars(row).values()))
        return row

    def merge(self, other: Path) -> dict[str, int]:
        """Takes over every row of another gradebook that is not here; returns how many, by table."""
        if not other.exists():
            raise UserError(f"{other} does not exist")
        if other.resolve() == self.path.resolve():
            return dict.fromkeys(TABLES, 0)
        found = {}
        with Gradebook(other) as there:
            for table, columns in TABLES.items():
                rows = there.db.execute(f"SELECT * FROM {table}").fetchall()
                before = self.db.total_changes
                with self.at_once():
                    self.db.executemany(f"INSERT OR IGNORE INTO {table} VALUES ({','.join('?' * columns)})", rows)
                found[table] = self.db.total_changes - before
        return found

    @contextmanager
    def at_once(self) -> Iterator[None]:
        """All that is written within, or nothing; nobody else writes meanwhile."""
        self.db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self.db.execute("ROLLBACK")
            raise
        self.db.execute("COMMIT")

    # ---- reading

    def has(self, learner: str, chapter: str, submission: str, bundle: str, salted: str) -> bool:
        where = (learner, chapter, submission, bundle, salted)
        query = "SELECT 1 FROM results WHERE learner=? AND chapter=? AND submission=? AND bundle=? AND salted=?"
        return self.db.execute(query, where).fetchone() is not None

    def results(self) -> list[Result]:
        """Everything that was ever graded, oldest first."""
        rows = self.db.execute("SELECT * FROM results ORDER BY graded, learner, chapter").fetchall()
        return [Result(*row[:10], json.loads(row[10]), json.loads(row[11])) for row in rows]

    def current(self) -> dict[tuple[str, str], Result]:
        """(learner, chapter) -> the result that counts: of the submission handed in last, as graded last."""
        found: dict[tuple[str, str], Result] = {}
        for result in self.results():
            key = result.learner, result.chapter
            rank = result.handed_in, result.graded, result.submission
            if key not in found or rank >= (found[key].handed_in, found[key].graded, found[key].submission):
                found[key] = result
        return found

    def known(self) -> dict[str, dict[str, str]]:
        """Learner -> what is known of them, by kind; newest last."""
        found: dict[str, dict[str, str]] = {}
        for learner, kind, value, _ in self.db.execute("SELECT * FROM learners ORDER BY at, value"):
            found.setdefault(learner, {})[kind] = value
        return found

    def notes(self) -> list[Note]:
        """Marks given by hand, oldest first."""
        return [Note(*row) for row in self.db.execute("SELECT * FROM notes ORDER BY at, id")]
