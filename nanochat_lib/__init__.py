"""A small ChatGPT, trained from raw text in JAX: the library behind the course.

The names below load their module on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

__version__ = "0.1.0"

EXPORTS = {
    "GPTConfig": "sizing",
    "GPT": "gpt",
    "Tokenizer": "tokenizer",
    "render_conversation": "conversation",
    "attention": "attention",
    "muon": "optim",
    "make_optimizer": "optim",
    "make_train_step": "train_step",
    "Engine": "engine",
}

MODULES = ("upstream",)  # upstream.load, upstream.save

__all__ = ["__version__", *EXPORTS, *MODULES]


def __getattr__(name: str) -> object:
    if name in MODULES:
        return importlib.import_module(f"{__name__}.{name}")
    if name not in EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{EXPORTS[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *EXPORTS, *MODULES})


class _Package(ModuleType):
    def __setattr__(self, name: str, value: object) -> None:
        # Importing the submodule `attention` would put the module where the function of that name is promised.
        if name in EXPORTS and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
