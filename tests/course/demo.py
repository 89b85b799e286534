"""A course of one small chapter, to build, to break and to run: two exercises, the second one uses the first."""

from __future__ import annotations

from pathlib import Path

from nanochat_lib.course.grammar import HEADER

STEM = "03_pairs"
CHAPTER = (
    HEADER
    + '''
# %% [markdown] id="title"
# # Byte pairs
#
# Merge the *most frequent* pair. In a diagram, %% is a comment.

# %% tags=["setup"] id="setup"
from nanochat_lib.course import check, mine, predict, quiz, reveal

NEW = 9

# %% [markdown]
# ## The rule

# %% tags=["exercise"] id="pairs.merge" points=2 minutes=15 level=2 library="nanochat_lib.bpe:merge"
def merge(tokens, pair, new):
    """Replaces every `pair` in `tokens` by `new`."""
    out, i = [], 0
    # --- stub
    raise NotImplementedError("your turn")
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


# %% id="pairs.merge.check"
check("pairs.merge", merge)

# %% tags=["hidden"] id="pairs.merge.hidden"
from nanochat_lib.course.author import example, hidden, mutant

hidden(
    "pairs.merge",
    example("overlap", ([7, 7, 7], (7, 7), 9), [9, 7]),
    example("nothing to do", ([], (1, 2), 3), []),
)
mutant("pairs.merge", "i += 2", "i += 1", says="expected 7, got 9")
mutant("pairs.merge", "i + 1 < len(tokens) and ", "", says="IndexError")
mutant("pairs.merge", body="out = list(tokens)", says="expected")

# %%
predict("pairs.p_twice")
merge = mine("pairs.merge")
reveal("pairs.p_twice", len(merge([1, 2, 1, 2], (1, 2), NEW)))

# %% tags=["exercise"] id="pairs.twice" points=1 minutes=5 level=1
def twice(tokens, pair):
    # --- stub
    raise NotImplementedError
    # --- solution
    return merge(merge(tokens, pair, NEW), (NEW, NEW), NEW + 1)
    # --- end


# %% id="pairs.twice.check"
check("pairs.twice", twice)

# %% tags=["hidden"] id="pairs.twice.hidden"
hidden("pairs.twice", example("nothing", ([], (1, 2)), []), example("one", ([1, 2, 3], (1, 2)), [9, 3]))
mutant("pairs.twice", "NEW + 1", "NEW + 2", says="11")
mutant("pairs.twice", body="def twice(tokens, pair):\\n    return tokens", says="expected")
mutant("pairs.twice", body="return merge(tokens, pair, NEW)", says="expected")

# %% id="quiz"
quiz("pairs.q_ties")

# %% [raw]
# left as it is
#
#   indented
'''
)
CHECKS = """
from nanochat_lib.course.cases import Exercise, Option, Prediction, Quiz, example

EXERCISES = [
    Exercise(
        "pairs.merge",
        cases=[example("one pair", ([1, 2, 3, 1, 2], (1, 2), 9), [9, 3, 9])],
        hints=["look", "look at two", lambda: "[9, 3]"],
        library="nanochat_lib.bpe:merge",
    ),
    Exercise(
        "pairs.twice",
        cases=[example("both", ([1, 2, 1, 2], (1, 2)), [10])],
        hints=["merge", "merge again", lambda: "[10]"],
        fallback=lambda tokens, pair: [10],
    ),
]
QUIZZES = [Quiz("pairs.q_ties", "Which pair wins?", [Option("first", right=True, why="so"), Option("no", why="no")])]
PREDICTIONS = [Prediction("pairs.p_twice", "How many tokens are left?", unit="tokens")]
"""


def write(root: Path, chapter: str = CHAPTER, checks: str = CHECKS, stem: str = STEM) -> Path:
    """Writes the course's sources below `root`; returns it."""
    topic = stem.split("_", 1)[-1]
    for name, text in ((f"solutions/{stem}.py", chapter), (f"nanochat_lib/course/checks/{topic}.py", checks)):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return root
