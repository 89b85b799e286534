"""What a learner has done, on their own disk: `.course/progress.json` and every attempt's source. Nothing leaves it.

Both lie in the course's folder, or in COURSE_HOME. Two notebooks may write at once; a file that cannot be read is set
aside and what the attempts show is counted again.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from nanochat_lib.course.parameters import project_root
from nanochat_lib.errors import UserError
from nanochat_lib.storage import atomic_write_text

TABLES = ("exercises", "quizzes", "predictions", "hints")
ATTEMPT = re.compile(r"(\d{4})\.(passed|failed)\.py")
KEPT = 50  # attempts of one exercise; the oldest failed ones go first
LOCK_SECONDS = 20.0


def home() -> Path:
    """The folder that holds .course/ and my_nanochat/."""
    chosen = os.environ.get("COURSE_HOME")
    return Path(chosen).expanduser().resolve() if chosen else project_root()


def folder() -> Path:
    return home() / ".course"


def read() -> dict:
    """The record as it is now: {"exercises": {id: …}, "quizzes": …, "predictions": …, "hints": …}."""
    path = folder() / "progress.json"
    try:
        text = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return _recovered()
    except (OSError, UnicodeDecodeError) as error:
        return _set_aside(path, str(error))
    try:
        data = json.loads(text)
        if not isinstance(data, dict) or not all(isinstance(data.get(t, {}), dict) for t in TABLES):
            raise ValueError("it is not a progress record")
        if not all(isinstance(item, dict) for t in TABLES for item in data.get(t, {}).values()):
            raise ValueError("it is not a progress record")
    except ValueError as error:
        return _set_aside(path, str(error))
    return {**data, **{table: data.get(table, {}) for table in TABLES}}


def _set_aside(path: Path, why: str) -> dict:
    """Keeps an unreadable record under another name and starts from what the attempts show."""
    number = 1
    while (kept := path.with_name(f"progress.broken-{number}.json")).exists():
        number += 1
    try:
        os.replace(path, kept)
    except FileNotFoundError:  # another process was faster
        return read()
    except OSError as error:
        raise UserError(f"{path} cannot be read ({why}) or moved ({error.strerror}); move it away yourself") from None
    print(f"course: progress.json could not be read; kept as .course/{kept.name}; your attempts are counted again")
    data = _recovered()
    _write(data)
    return data


def _recovered() -> dict:
    """A record from the attempts on disk, which is empty where there are none."""
    data: dict = {table: {} for table in TABLES}
    for place in sorted((folder() / "attempts").glob("*")):
        found = attempts(place.name)
        if found:
            passed = [number for number, status, _ in found if status == "passed"]
            data["exercises"][place.name] = {
                "status": found[-1][1],
                "attempts": found[-1][0],
                "passed": bool(passed),
                **({"saved": passed[-1]} if passed else {}),
            }
    return data


def _write(data: dict) -> None:
    folder().mkdir(parents=True, exist_ok=True)
    text = json.dumps(data, indent=1, ensure_ascii=False, sort_keys=True)
    atomic_write_text(folder() / "progress.json", text + "\n")


@contextmanager
def change() -> Iterator[dict]:
    """The record to change in place; written when the block ends without an exception. One process at a time."""
    with locked():
        data = read()
        yield data
        _write(data)


@contextmanager
def locked() -> Iterator[None]:
    """Holds the course's lock, for my_nanochat/ as well."""
    try:
        folder().mkdir(parents=True, exist_ok=True)
        handle = open(folder() / "lock", "a+b")  # closed below
    except OSError as error:
        raise UserError(
            f"cannot write in {folder()} ({error.strerror}); set COURSE_HOME to a folder of your own"
        ) from None
    with handle:
        _lock(handle)
        yield  # closing the file lets the lock go, also when the process dies


def _lock(handle: object) -> None:
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        handle.seek(0)
        msvcrt.locking(handle.fileno(), msvcrt.LK_LOCK, 1)
        return
    until = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            if time.monotonic() > until:
                raise UserError("another process keeps the course's record locked; end it and try again") from None
            time.sleep(0.02)
        except OSError:  # a file system without locks: one learner, so go on
            return


def attempts(exercise_id: str) -> list[tuple[int, str, Path]]:
    """(number, "passed" or "failed", file) of every attempt kept, oldest first."""
    place = folder() / "attempts" / exercise_id
    found = []
    for path in place.glob("*.py") if place.is_dir() else ():
        if match := ATTEMPT.fullmatch(path.name):
            found.append((int(match[1]), match[2], path))
    return sorted(found)


def add_attempt(exercise_id: str, status: str, source: str) -> int:
    """Keeps the source of an attempt and counts it; returns its number. The same source and outcome is kept once."""
    with change() as data:
        record = data["exercises"].setdefault(exercise_id, {})
        known = attempts(exercise_id)
        if known and known[-1][1] == status and known[-1][2].read_text(encoding="utf-8") == source:
            number = known[-1][0]
        else:
            number = max([record.get("attempts", 0), *[n for n, _, _ in known]]) + 1
            place = folder() / "attempts" / exercise_id
            place.mkdir(parents=True, exist_ok=True)
            atomic_write_text(place / f"{number:04d}.{status}.py", source)
            for old in [path for _, s, path in known if s == "failed"][: max(len(known) + 1 - KEPT, 0)]:
                old.unlink(missing_ok=True)
        record["attempts"] = max(number, record.get("attempts", 0))
        record["status"] = status
        record["passed"] = record.get("passed", False) or status == "passed"
    return number


def set_status(exercise_id: str, **fields: object) -> None:
    """Changes fields of an exercise's record."""
    with change() as data:
        data["exercises"].setdefault(exercise_id, {}).update(fields)


def exercise_record(exercise_id: str) -> dict:
    return read()["exercises"].get(exercise_id, {})
