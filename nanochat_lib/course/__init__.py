"""The course around the library: building chapters from their source and what their cells need.

The functions that chapters call load on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib

from nanochat_lib.course.mode import fast
from nanochat_lib.progress import in_notebook

EXPORTS = {
    "check": "checker",
    "hint": "helping",
    "quiz": "quizzes",
    "predict": "predicting",
    "reveal": "predicting",
    "mine": "saved",
    "undo": "saved",
    "note": "notes",
    "progress": "overview",
    "about": "mode",
    "show": "showing",
    "volatile": "showing",
    "explore": "exploring",
    "slider": "exploring",
    "choice": "exploring",
    "text": "exploring",
}

__all__ = [*EXPORTS, "fast"]

if in_notebook():  # a chapter that is opened again need not compile again
    from nanochat_lib.compile_cache import keep_compiled

    keep_compiled()

if fast():
    from nanochat_lib.quick_compile import compile_quickly

    compile_quickly()


def __getattr__(name: str) -> object:
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *EXPORTS})
