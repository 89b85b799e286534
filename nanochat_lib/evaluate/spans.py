"""From a prompt's text to the tokens that are scored, and what a limited context does to them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from nanochat_lib.evaluate.bundle import CoreTask
from nanochat_lib.evaluate.scores import wilson
from nanochat_lib.tokenizer import Tokenizer


@dataclass
class Span:
    """Ids of one prompt and the part [start, end) that is scored; `cut` ids were dropped from its front."""

    ids: np.ndarray
    start: int
    end: int
    cut: int = 0
    length: int = 0  # before cutting

    @property
    def fits(self) -> bool:
        """Whether the scored part is whole and has at least one id before it. If not, nothing may be scored."""
        return 1 <= self.start < self.end


def common_prefix(rows: Sequence[Sequence[int]]) -> int:
    """How many leading ids all rows share."""
    shortest = min(len(row) for row in rows)
    block = np.stack([np.asarray(row[:shortest]) for row in rows])
    same = (block == block[0]).all(axis=0)
    return int(shortest if same.all() else same.argmin())


def spans(task: CoreTask, texts: list[str], tokenizer: Tokenizer, context: int) -> list[Span]:
    """Token spans to score for one example's prompts, the front cut away beyond `context` ids."""
    return spans_of(task.kind, tokenizer.encode_arrays(texts, prepend=tokenizer.bos_id), context)


def spans_of(kind: str, rows: list[np.ndarray], context: int) -> list[Span]:
    """`spans` of prompts that are encoded already."""
    return [cut_front(span, context) for span in scored_parts(kind, rows)]


def scored_parts(kind: str, rows: list[np.ndarray]) -> list[Span]:
    """What is scored of one example's encoded prompts, whole as they are: a span a row, of completions only the last.

    multiple_choice: from where the rows part to their ends. schema: the common end. language_modeling: `rows` are the
    prompt without and with its continuation, what the second has more. At least one id is scored, and one is before it.
    """
    if kind == "multiple_choice":
        # A choice that is the prefix of another would leave nothing to score: keep at least its last token.
        start = min(common_prefix(rows), min(len(row) for row in rows) - 1)
        return [Span(row, max(start, 1), len(row)) for row in rows]
    if kind == "schema":
        suffix = max(common_prefix([row[::-1] for row in rows]), 1)
        return [Span(row, max(len(row) - suffix, 1), len(row)) for row in rows]
    # Where the continuation merges with the prompt's last token, the scored span starts where the ids part.
    start = min(common_prefix(rows), len(rows[1]) - 1)
    return [Span(rows[1], max(start, 1), len(rows[1]))]


def cut_front(span: Span, context: int) -> Span:
    """The last `context` ids of a span that is whole; its scored part moves along, before 0 where it does not fit."""
    length = len(span.ids)
    cut = max(0, length - context)
    return Span(span.ids[cut:], span.start - cut, span.end - cut, cut, length)


# ---- what the context did to a task's score

MOSTLY = 0.5  # of the prompts
NO_BETTER = 0.05  # centred score: this close to guessing counts as guessing
FEWEST = 20  # whole and shortened examples each, to compare their accuracies


def length_figures(lengths: np.ndarray, context: int, training_context: int) -> dict:
    """Distribution of the prompts' lengths in tokens, and what the two contexts do to them."""
    over = lengths[lengths > context] - context
    return {
        "median_prompt_tokens": float(np.median(lengths)),
        "prompt_tokens": {"p50": int(np.median(lengths)), "p90": int(np.percentile(lengths, 90)),
                          "max": int(lengths.max())},
        "truncated_share": len(over) / len(lengths),
        "truncated_tokens": float(np.median(over)) if len(over) else 0.0,
        "beyond_training_context_share": float(np.mean(lengths > training_context)),
    }  # fmt: skip


def length_warning(figures: dict, right: np.ndarray, longer: np.ndarray, context: int, training_context: int) -> str:
    """Why a task's score may be an artefact of its prompts' length, "" if nothing says so.

    Prompts count as hurt when they lost their front, or, where nothing was cut, when they are longer than the model's
    training context. Either of two signs is enough: at least half of them are hurt and the score is no better than
    guessing (centred at most 0.05); or examples with hurt prompts score lower than the others by more than noise
    (Wilson intervals of the two accuracies that do not touch, at least 20 examples each).
    `right` and `longer` (N,): of each scored example, whether it is right and whether a prompt of it is hurt.
    """
    cut = figures["truncated_share"] > 0
    share = figures["truncated_share"] if cut else figures["beyond_training_context_share"]
    if not share or not len(right):
        return ""
    limit = context if cut else training_context
    what = f"{share:.1%} of the prompts were cut to {limit:,} tokens" if cut else (
        f"{share:.1%} of the prompts are longer than the {limit:,} tokens that the model was trained on"
    )  # fmt: skip
    if share >= MOSTLY and figures["centered"] <= NO_BETTER:
        longest = figures["prompt_tokens"]["p90"]
        advice = f"; 90 % of them have at most {longest:,} tokens (--context)" if cut else ""
        return f"{what} and the score is no better than guessing, so it says little about the model{advice}"
    whole = right[~longer]
    hurt = right[longer]
    if min(len(whole), len(hurt)) >= FEWEST:
        if wilson(float(hurt.sum()), len(hurt))[1] < wilson(float(whole.sum()), len(whole))[0]:
            return f"{what}: examples with such prompts score {hurt.mean():.1%}, the others {whole.mean():.1%}"
    return ""
