"""A course of one small chapter to grade: a plain exercise, one in JAX, one that builds on the first."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from nanochat_lib.course import checks, rules
from nanochat_lib.course.grammar import HEADER

STEM = "07_small"
SECRET = "guarded_4711"  # stands in a hidden cell
CHAPTER = (
    HEADER
    + '''
# %% [markdown] id="title"
# # A small chapter

# %% tags=["setup"] id="setup"
import jax
import jax.numpy as jnp
import numpy as np

from nanochat_lib.course import check, mine

NEW = 9

# %% tags=["exercise"] id="small.merge" points=4 minutes=15 level=2 library="nanochat_lib.bpe:merge"
def merge(tokens, pair, new):
    """Replaces every `pair` in `tokens` by `new`."""
    out, i = [], 0
    # --- stub
    raise NotImplementedError
    # --- solution
    while i < len(tokens):
        if i + 1 < len(tokens) and (tokens[i], tokens[i + 1]) == pair:
            out.append(new)
            i += 2
        else:
            out.append(tokens[i])
            i += 1
    # --- end
    return out

# %% id="small.merge.check"
check("small.merge", merge)

# %% tags=["hidden"] id="small.merge.hidden"
from nanochat_lib.course.author import example, hidden, mutant, prop, reference

EXPECTED = [9, 7]  # guarded_4711
hidden(
    "small.merge",
    example("overlap", ([7, 7, 7], (7, 7), 9), EXPECTED),
    reference("random", lambda rng: (rng.integers(0, 3, 60).tolist(), (0, 1), 9)),
    example("called twice", ([1, 2], (1, 2), 3), [[3], [3]], call=lambda fn, *args: [fn(*args), fn(*args)]),
)
mutant("small.merge", "i += 2", "i += 1", says="expected 7, got 9")
mutant("small.merge", "i + 1 < len(tokens) and ", "", says="IndexError")
mutant("small.merge", body="out = list(tokens)", says="expected")

# %% tags=["exercise"] id="small.scale" points=2 minutes=5 level=1
def scale(x, factor):
    """x times factor, in one operation."""
    # --- stub
    raise NotImplementedError
    # --- solution
    return x * factor
    # --- end

# %% id="small.scale.check"
check("small.scale", scale)

# %% tags=["hidden"] id="small.scale.hidden"
hidden(
    "small.scale",
    reference("random", lambda rng: (jnp.asarray(rng.normal(size=5), jnp.float32), 3.0), against=lambda x, f: x * f),
    example("bfloat16", lambda: (jnp.ones(3, jnp.bfloat16), 2.0), jnp.full(3, 2.0, jnp.bfloat16), dtype="bfloat16"),
)
mutant("small.scale", "x * factor", "x + factor", says="differ")
mutant("small.scale", "x * factor", "x / factor", says="differ")
mutant("small.scale", "x * factor", "np.asarray(x, np.float64) * factor", says="expected dtype")

# %% tags=["exercise"] id="small.twice" points=2 minutes=5 level=1
def twice(tokens, pair):
    """Merges, then merges what came of it."""
    # --- stub
    raise NotImplementedError
    # --- solution
    return merge(merge(tokens, pair, NEW), (NEW, NEW), NEW + 1)
    # --- end

# %% id="small.twice.check"
check("small.twice", twice)

# %% tags=["hidden"] id="small.twice.hidden"
hidden("small.twice", example("three pairs", ([1, 2] * 3, (1, 2)), [10, 9]), example("none", ([], (1, 2)), []))
mutant("small.twice", "NEW + 1", "NEW", says="expected")
mutant("small.twice", "(NEW, NEW)", "pair", says="expected")
mutant("small.twice", body="return merge(tokens, pair, NEW)", says="expected")
'''
)
CHECKS = '''
"""The public cases of the small chapter."""

import jax
import jax.numpy as jnp

from nanochat_lib.course.cases import Exercise, budget, example, prop, reference, sign


def operations(fn, x, factor):
    return len(jax.make_jaxpr(lambda y: fn(y, factor))(x).jaxpr.eqns)


EXERCISES = [
    Exercise(
        "small.merge",
        cases=[
            example("one pair", ([1, 2, 3, 1, 2], (1, 2), 9), [9, 3, 9]),
            example("a a a", ([1, 1, 1], (1, 1), 9), [9, 1]),
            budget("a long list", make=lambda rng: (rng.integers(0, 2, 500).tolist(), (0, 1), 9), time=40.0),
        ],
        causes=[sign("a token was used twice", lambda got, want, *args: len(got) > len(want))],
        hints=["look at neighbours", "two at a time", lambda: "[9, 3, 9]"],
        library="nanochat_lib.bpe:merge",
    ),
    Exercise(
        "small.scale",
        cases=[
            example("ones", lambda: (jnp.ones((2, 2)), 2.0), 2 * jnp.ones((2, 2))),
            prop("one operation", make=lambda rng: (jnp.ones(4), 2.0), call=operations,
                 holds=lambda out, x, factor: "" if out == 1 else f"{out} operations"),
        ],
        hints=["multiply", "one sign", lambda: "2"],
        fallback=lambda x, factor: x * factor,
    ),
    Exercise(
        "small.twice",
        cases=[example("two pairs", ([1, 2, 1, 2], (1, 2)), [10])],
        hints=["merge", "merge again", lambda: "[10]"],
        fallback=lambda tokens, pair: None,
    ),
]
'''
MERGE = """
def merge(tokens, pair, new):
    out, i = [], 0
    while i < len(tokens):
        if tuple(tokens[i : i + 2]) == tuple(pair):
            out.append(new)
            i += 2
        else:
            out.append(tokens[i])
            i += 1
    return out
"""
SCALE = "def scale(x, factor):\n    return x * factor"
TWICE = "def twice(tokens, pair):\n    return merge(merge(tokens, pair, NEW), (NEW, NEW), NEW + 1)"
RIGHT = {"small.merge": MERGE, "small.scale": SCALE, "small.twice": TWICE}


def write(root: Path) -> Path:
    """The course's folder."""
    (root / "solutions").mkdir(parents=True)
    (root / "solutions" / f"{STEM}.py").write_text(CHAPTER, encoding="utf-8")
    (root / rules.CHECKS).mkdir(parents=True)
    (root / rules.CHECKS / "small.py").write_text(CHECKS, encoding="utf-8")
    return root


def forget(paths: list[str]) -> None:
    """Takes the small chapter's checks out of the course again."""
    checks.__path__[:] = paths
    sys.modules.pop("nanochat_lib.course.checks.small", None)


def cell(source: str, id: str = "", kind: str = "code", tags: tuple[str, ...] = (), **more: object) -> dict:
    metadata = {"id": id, "tags": list(tags)} if id else {"tags": list(tags)}
    return {"cell_type": kind, "metadata": metadata, "source": source, **more}


def notebook(answers: dict[str, str] | None = None, cells: list[dict] | None = None) -> str:
    """A learner's notebook; answers by exercise, or any cells."""
    found = cells if cells is not None else [cell(text, id, tags=("exercise",)) for id, text in answers.items()]
    return json.dumps({"cells": found, "metadata": {}, "nbformat": 4, "nbformat_minor": 5})


def hand_in(folder: Path, learner: str, answers: dict[str, str] | None = None, **more: object) -> Path:
    path = folder / learner / f"{STEM}.ipynb"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(notebook(answers, **more), encoding="utf-8")
    return path
