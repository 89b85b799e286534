"""`hint(id)`: three steps towards an exercise, the last a picture or output of the right answer, never its code."""

from __future__ import annotations

from nanochat_lib.course import registry, state
from nanochat_lib.course.showing import emit, show, words_html
from nanochat_lib.errors import UserError

LAST = 3


def hint(exercise_id: str, level: int | None = None) -> None:
    """Shows the next hint of an exercise, or the one asked for (1, 2 or 3)."""
    hints = registry.exercise(exercise_id).hints
    if level is None:
        level = min(state.read()["hints"].get(exercise_id, {}).get("level", 0) + 1, LAST)
    if level not in (1, 2, LAST):
        raise UserError(f"hint({exercise_id!r}): there are hints 1, 2 and 3, not {level!r}")
    with state.change() as data:
        record = data["hints"].setdefault(exercise_id, {})
        record["level"] = max(level, record.get("level", 0))
    title = f"Hint {level} of {LAST} for {exercise_id}"
    if level == LAST:
        emit(f"{title}: what the right answer gives", f"<b>{title}</b>: what the right answer gives")
        show(hints[2](), alt=f"output of the right answer of {exercise_id}")
        return
    more = "" if level == LAST else f'\n(more: hint("{exercise_id}"))'
    emit(f"{title}: {hints[level - 1]}{more}", f"<b>{title}</b><br>{words_html(str(hints[level - 1]))}")
