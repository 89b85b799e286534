"""A course of one chapter for the tests: its checks module, its header file, and a learner's folder."""

from __future__ import annotations

import sys
import types
from pathlib import Path

from nanochat_lib.course import registry, saved
from nanochat_lib.course.cases import Exercise

HINTS = ["look at the pairs", "two at a time", lambda: "[9, 3, 9]"]
HEADER = '# %% tags=["exercise"] id="{id}" points=2 minutes=10 level=1{library}\n'


def make_course(monkeypatch, tmp_path: Path, exercises=(), quizzes=(), predictions=(), topic: str = "demo") -> Path:
    """Puts a topic into the course for one test; returns the learner's folder."""
    module = types.ModuleType(f"nanochat_lib.course.checks.{topic}")
    module.EXERCISES, module.QUIZZES, module.PREDICTIONS = list(exercises), list(quizzes), list(predictions)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    place = tmp_path / "source"
    (place / "solutions").mkdir(parents=True, exist_ok=True)
    cells = [
        HEADER.format(id=e.id, library=f' library="{e.library}"' if e.library else "") + "def f(): ...\n"
        for e in exercises
    ]
    number = len(list((place / "solutions").glob("*.py")))
    chapter = place / "solutions" / f"{number:02d}_{topic}.py"
    chapter.write_text("# %% [markdown]\n# # A demo\n\n" + "\n".join(cells), encoding="utf-8")
    monkeypatch.setattr(registry, "PACKAGE", place / "nanochat_lib")
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("COURSE_STRICT", raising=False)
    monkeypatch.setattr(saved, "_modules", {})
    monkeypatch.setattr(saved, "_judged", {})
    return tmp_path / "home"


def exercise(*cases, id: str = "demo.merge", library: str = "nanochat_lib.bpe:merge", **more) -> Exercise:
    return Exercise(id, cases=list(cases), hints=HINTS, library=library, **more)


def merge(tokens, pair, new):
    """A right answer."""
    out, i = [], 0
    while i < len(tokens):
        if tuple(tokens[i : i + 2]) == pair:
            out.append(new)
            i += 2
        else:
            out.append(tokens[i])
            i += 1
    return out
