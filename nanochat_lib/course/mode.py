"""How the course is being run: fast, strict, in JupyterLab or elsewhere; and numbers that the prose stands by."""

from __future__ import annotations

import os

from nanochat_lib.errors import UserError
from nanochat_lib.progress import in_notebook


class CourseError(AssertionError):
    """With COURSE_STRICT=1: a check, quiz or number of the course that does not hold."""

    def _render_traceback_(self) -> list[str]:
        return [f"CourseError: {self}"]


def fast() -> bool:
    """True when COURSE_FAST=1: do less, to see that it works."""
    return os.environ.get("COURSE_FAST", "") == "1"


def strict() -> bool:
    """True when COURSE_STRICT=1: whatever fails raises, for automatic runs of the solved chapters."""
    return os.environ.get("COURSE_STRICT", "") == "1"


def widgets_wanted() -> bool:
    """True in a kernel that JupyterLab started (its server names the session); COURSE_WIDGETS=0 or 1 decides otherwise.

    Elsewhere (papermill, nbclient, scripts) a widget would be a dead rectangle in the saved file. Where
    NANOCHAT_PROGRESS_FILE is set, another program drives this kernel, which may have inherited the session's name.
    """
    chosen = os.environ.get("COURSE_WIDGETS", "")
    if chosen in ("0", "1"):
        return chosen == "1" and in_notebook()
    driven = "NANOCHAT_PROGRESS_FILE" in os.environ
    return in_notebook() and bool(os.environ.get("JPY_SESSION_NAME")) and not driven


def about(value: float, expected: float, within: float | str, name: str) -> float:
    """Prints a measured number beside the one that the text states, and returns it.

    `within` is the largest distance: a number, or a share such as "10%". Outside it the line says so; with
    COURSE_STRICT=1 it raises CourseError, so that the prose cannot go stale.
    """
    value = float(value)
    distance = abs(expected) * float(within[:-1]) / 100 if isinstance(within, str) else float(within)
    if distance <= 0:
        raise UserError(f"about({name!r}): within must be positive, got {within!r}")
    line = f"{name}: {value:.4g} (the text says {expected:g} ± {distance:.3g})"
    if not abs(value - expected) <= distance:
        line = f"{name}: {value:.4g}, but the text says {expected:g} ± {distance:.3g}"
        if strict():
            raise CourseError(line)
    print(line)
    return value
