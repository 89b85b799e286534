"""Checks, hints, quizzes and predictions of chapter 07, evaluation."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from nanochat_lib.course.cases import Exercise, Option, Prediction, Quiz, example, prop, reference, sign, suspect
from nanochat_lib.evaluate import bpb, bundle, scores, spans
from nanochat_lib.evaluate.bundle import CoreTask
from nanochat_lib.evaluate.spans import Span
from nanochat_lib.tasks import common

# ---- losses to figures


def some_sums(rng: np.random.Generator) -> tuple[list]:
    """Four sums of five batches, small and large ones, with a special token in each."""
    sums = []
    for count in (3, 400, 12, 50, 900):
        nats = float(rng.uniform(0.5, 4) * count)
        special = float(rng.uniform(1, 9))
        sums.append((nats, int(count * rng.integers(2, 6)), nats + special, count + 1))
    return (sums,)


def _two(loss: Callable, byte: Callable) -> Callable:
    """A wrong pair: `loss` and `byte` get the four columns as arrays; None: the right one."""

    def wrong(sums: list) -> tuple[float, float]:
        right = bpb.per_token_and_byte(sums)
        if not sums:
            return right
        columns = np.array(sums, float).reshape(-1, 4).T
        with np.errstate(all="ignore"):
            return tuple(
                float(given(*columns)) if given else figure for given, figure in zip((loss, byte), right, strict=True)
            )

    return wrong


def _sums_shown() -> str:
    sums = [(30.0, 60, 33.0, 11), (8.0, 10, 12.0, 5)]
    loss, bits = bpb.per_token_and_byte(sums)
    return f"sums {sums}\nloss {loss:.4f} nats a token, {bits:.4f} bits a byte"


# ---- prompts


def some_task(rng: np.random.Generator, kind: str, shots: int = 3, delimiter: str = "\nAnswer: ") -> tuple:
    """(task, examples, index) of a kind; blanks around contexts, as real data have them."""
    words = ["low", "owl", "wet", "elm", "tow", "oat"]

    def string() -> str:
        return " ".join(rng.choice(words, int(rng.integers(1, 4))))

    examples = []
    for _ in range(9):
        gold = int(rng.integers(0, 3))
        if kind == "multiple_choice":
            examples.append({"query": string(), "choices": [string() for _ in range(3)], "gold": gold})
        elif kind == "schema":
            examples.append({"context_options": [string() for _ in range(3)], "continuation": string(), "gold": gold})
        else:
            examples.append({"context": f" {string()}\n", "continuation": string()})
    return CoreTask("made up", kind, shots, delimiter, 0.0, examples), examples, int(rng.integers(0, 9))


def rendered(task: CoreTask, examples: list[dict], index: int, **change: bool) -> list[str]:
    """`render_prompts`, with one rule broken at will."""
    example, delta = examples[index], task.delimiter
    chosen = bundle.shots_for(index, len(examples), task.shots)
    if change.get("first"):
        chosen = list(range(min(task.shots, len(examples))))
    shots = [examples[i] for i in chosen]
    between = "\n" if change.get("near") else "\n\n"
    gold = (lambda shot: 0) if change.get("zero") else (lambda shot: shot["gold"])
    strip = (lambda text: text) if change.get("raw") else str.strip
    if task.kind == "multiple_choice":
        head = "".join(f"{s['query']}{delta}{s['choices'][gold(s)]}{between}" for s in shots)
        return [f"{head}{example['query']}{delta}{choice}" for choice in example["choices"]]
    if task.kind == "schema":
        head = "".join(f"{s['context_options'][gold(s)]}{delta}{s['continuation']}{between}" for s in shots)
        return [f"{head}{context}{delta}{example['continuation']}" for context in example["context_options"]]
    head = "".join(f"{strip(s['context'])}{delta}{s['continuation']}{between}" for s in shots)
    without = f"{head}{strip(example['context'])}{delta}"
    return [without if change.get("open") else without.strip(), without + example["continuation"]]


def _unlike(**change: bool) -> Callable:
    return lambda task, examples, index: rendered(task, examples, index, **change)


def _prompts_shown() -> str:
    task = CoreTask("made up", "language_modeling", 1, " ", 0.0, [])
    examples = [
        {"context": "One, two,", "continuation": "three"},
        {"context": " Red, green,\n", "continuation": "blue"},
    ]
    without, whole = bundle.render_prompts(task, examples, 1)
    choice = CoreTask("made up", "multiple_choice", 1, "\nAnswer: ", 50.0, [])
    asked = [
        {"query": "Sky?", "choices": ["red", "blue"], "gold": 1},
        {"query": "Grass?", "choices": ["green", "pink"], "gold": 0},
    ]
    lines = [f"without {without!r}", f"with    {whole!r}"]
    return "\n".join(lines + [f"choice  {prompt!r}" for prompt in bundle.render_prompts(choice, asked, 1)])


# ---- spans


def plain(found: list[Span]) -> list[tuple]:
    """Spans as plain data: (ids, start, end)."""
    return [([int(i) for i in span.ids], int(span.start), int(span.end)) for span in found]


def plain_parts(fn: Callable, kind: str, rows: list) -> list[tuple]:
    return plain(fn(kind, [np.array(row) for row in rows]))


def plain_cut(fn: Callable, ids: list[int], start: int, end: int, context: int) -> dict:
    span = fn(Span(np.array(ids), start, end), context)
    names = ("start", "end", "cut", "length")
    return {"ids": [int(i) for i in span.ids]} | {name: int(getattr(span, name)) for name in names}


def some_rows(rng: np.random.Generator, kind: str) -> tuple[str, list]:
    """(kind, rows of ids): a shared head and other ends, or other heads and a shared end."""
    shared = rng.integers(20, 60, int(rng.integers(4, 9))).tolist()
    own = [[100 + 10 * k, *rng.integers(200, 300, int(rng.integers(1, 5))).tolist(), 105 + 10 * k] for k in range(3)]
    if kind == "multiple_choice":
        return kind, [[7, *shared, *part] for part in own]
    if kind == "schema":
        return kind, [[7, *part, *shared] for part in own]
    return kind, [[7, *shared], [7, *shared, *own[0]]]


def _parts(kind: str, rows: list, **change: bool) -> list[tuple]:
    """`scored_parts` as plain data, with one rule broken at will."""
    rows = [np.array(row) for row in rows]
    prefix, shortest = spans.common_prefix(rows), min(map(len, rows))
    if kind == "multiple_choice":
        start = prefix if change.get("empty") else min(prefix, shortest - 1)
        start = start + bool(change.get("late")) - bool(change.get("early"))
        return plain([Span(row, max(start, 0 if change.get("bare") else 1), len(row)) for row in rows])
    if kind == "schema":
        suffix = spans.common_prefix([row[::-1] for row in rows])
        found = [len(row) - (0 if change.get("none") else max(suffix, 1)) for row in rows]
        if change.get("prefix"):
            found = [min(prefix, shortest - 1)] * len(rows)
        return plain(
            [
                Span(row, max(start, 0 if change.get("bare") else 1), len(row))
                for row, start in zip(rows, found, strict=True)
            ]
        )
    start = len(rows[0]) if change.get("length") else min(prefix, len(rows[1]) - 1)
    if change.get("both"):
        return plain([Span(row, max(start, 1), len(row)) for row in rows])
    return plain([Span(rows[1], max(start, 1), len(rows[1]))])


def _parts_unlike(**change: bool) -> Callable:
    return lambda kind, rows: _parts(kind, rows, **change)


def _parts_shown() -> str:
    lines = []
    for kind, rows in (
        ("multiple_choice", [[0, 5, 6, 11], [0, 5, 6, 12, 13]]),
        ("schema", [[0, 11, 5, 6], [0, 12, 13, 5, 6]]),
        ("language_modeling", [[0, 5, 6], [0, 5, 6, 11, 12]]),
    ):
        lines.append(f"{kind}, rows {rows}")
        found = plain_parts(spans.scored_parts, kind, rows)
        lines += [f"  start {start}, end {end}: scored {ids[start:end]}" for ids, start, end in found]
    return "\n".join(lines)


def some_span(rng: np.random.Generator) -> tuple:
    """(ids, start, end, context): a prompt of 30 ids or so, and a context that is longer or shorter."""
    length = int(rng.integers(20, 40))
    end = length - int(rng.integers(0, 3))
    return list(range(100, 100 + length)), end - int(rng.integers(1, 6)), end, int(rng.integers(8, 45))


def _cut(ids: list[int], start: int, end: int, context: int, **change: bool) -> dict:
    cut = max(0, len(ids) - context)
    cut = min(cut, start) if change.get("kept") else cut
    moved = 0 if change.get("still") else cut
    shown = ids[: len(ids) - cut] if change.get("tail") else ids[cut:]
    length = len(shown) if change.get("after") else len(ids)
    return {"ids": shown, "start": start - moved, "end": end - moved, "cut": cut, "length": length}


def _cut_unlike(**change: bool) -> Callable:
    return lambda ids, start, end, context: _cut(ids, start, end, context, **change)


def _clipped(got: object, want: object, *_: object) -> bool:
    return isinstance(got, dict) and got.get("start") == 0 and want["start"] < 0


def _cut_shown() -> str:
    lines = ["ids 100 … 109, scored 107 and 108: start 7, end 9"]
    for context in (12, 6, 2):
        shown = plain_cut(spans.cut_front, list(range(100, 110)), 7, 9, context)
        lines.append(f"context {context:>2}: {shown}")
    return "\n".join(lines)


# ---- how sure


def _wrong_wilson(right: float, count: int) -> tuple[float, float]:
    share = right / count
    half = scores.Z * math.sqrt(share * (1 - share) / count)
    return share - half, share + half


def _wilson(right: float, count: int, z: float = scores.Z, **change: bool) -> tuple[float, float]:
    share = right / count
    middle = (share + z**2 / (2 * count)) / (1 if change.get("undivided") else 1 + z**2 / count)
    middle = share if change.get("centre") else middle
    inner = share * (1 - share) / count + (0 if change.get("thin") else z**2 / (4 * count**2))
    half = z / (1 + z**2 / count) * math.sqrt(inner)
    return min(max(middle - half, 0.0), share), max(min(middle + half, 1.0), share)


def _inside(out: object, right: float, count: int) -> str:
    low, high = out
    if not 0 <= low <= right / count <= high <= 1:
        return f"the interval {low:.6g} … {high:.6g} must lie in 0 … 1 and hold {right / count:.6g}"
    return ""


def _wilson_shown() -> str:
    cases = ((5, 10), (50, 100), (500, 1000), (0, 20), (20, 20))
    return "\n".join("{:>4} of {:>4}: {:.4f} … {:.4f}".format(r, n, *scores.wilson(r, n)) for r, n in cases)


def _centered_shown() -> str:
    cases = ((0.25, 0.25), (0.5, 0.25), (1.0, 0.62), (0.5, 0.62))
    return "\n".join(f"accuracy {a:.2f}, baseline {b:.2f}: {scores.centered(a, b):.4f}" for a, b in cases)


# ---- answers


def _number(sign: str, digits: str, **change: bool) -> str:
    number = digits if change.get("commas") else digits.replace(",", "")
    if change.get("whole") or ("." in number and not change.get("zeros")):
        number = number.rstrip("0").rstrip(".")
    number = number if change.get("leading") else number.lstrip("0")
    if number == "" or (number.startswith(".") and not change.get("bare")):
        number = f"0{number}"
    minus = ("-",) if change.get("typographic") else ("-", "\u2212")
    return f"-{number}" if sign in minus and (number != "0" or change.get("negative")) else number


def _number_unlike(**change: bool) -> Callable:
    return lambda sign, digits: _number(sign, digits, **change)


def some_number(rng: np.random.Generator) -> tuple[str, str]:
    sign = ("", "+", "-", "\u2212")[int(rng.integers(0, 4))]
    digits = "0" * int(rng.integers(0, 3)) + f"{int(rng.integers(1, 200)) * 10 ** int(rng.integers(0, 4)):,}"
    return sign, digits + ("", ".", ".50", ".0", ".04")[int(rng.integers(0, 5))]


def _numbers_shown() -> str:
    cases = (("", "1,234.50"), ("-", "007"), ("\u2212", ".5"), ("-", "0.0"), ("+", "100"), ("", "12."))
    return "\n".join(f"({sign!r}, {digits!r}) -> {common.plain_number(sign, digits)!r}" for sign, digits in cases)


# ---- pass@k


def some_samples(rng: np.random.Generator, questions: int = 7, samples: int = 6) -> tuple[np.ndarray]:
    """Right or wrong (Q, S): questions that never, sometimes and always succeed."""
    chance = np.linspace(0, 1, questions)[:, None]
    return ((rng.random((questions, samples)) < chance).astype(np.int8),)


def _first(correct: np.ndarray, how: Callable) -> list[float]:
    correct = np.asarray(correct) > 0
    return [float(how(correct, k)) for k in range(1, correct.shape[1] + 1)]


def _independent(correct: np.ndarray) -> list[float]:
    share = (np.asarray(correct) > 0).mean(axis=1)
    return [float(np.mean(1 - (1 - share) ** k)) for k in range(1, np.shape(correct)[1] + 1)]


def _of_the_mean(correct: np.ndarray) -> list[float]:
    """Chen's formula for the mean number of right samples."""
    samples = np.shape(correct)[1]
    wrong, none, found = samples - float((np.asarray(correct) > 0).sum(axis=1).mean()), 1.0, []
    for k in range(1, samples + 1):
        none *= max(wrong - k + 1, 0) / (samples - k + 1)
        found.append(1 - none)
    return found


def counted(correct: np.ndarray) -> list[float]:
    """`unbiased_pass_at_k` with binomial coefficients."""
    rows, samples = np.asarray(correct) > 0, np.shape(correct)[1]
    wrong = [samples - int(row.sum()) for row in rows]
    return [float(np.mean([1 - math.comb(w, k) / math.comb(samples, k) for w in wrong])) for k in range(1, samples + 1)]


def _rising(out: object, correct: np.ndarray) -> str:
    if any(not 0 <= share <= 1 for share in out):
        return f"a share lies outside 0 … 1: {[round(float(share), 4) for share in out]}"
    if any(b < a - 1e-12 for a, b in zip(out, out[1:], strict=False)):
        return "with more samples pass@k never falls"
    return ""


def _passes_shown() -> str:
    correct = np.array([[0, 0, 1, 0], [0, 1, 1, 0]])
    first, unbiased = scores.pass_at_k(correct), scores.unbiased_pass_at_k(correct)
    return f"correct {correct.tolist()}\nfirst k  {first}\nunbiased {[round(x, 4) for x in unbiased]}"


EXERCISES = [
    Exercise(
        "evaluation.per_token_and_byte",
        cases=[
            example("one batch", ([(math.log(2) * 12, 6, 20.0, 8)],), (2.5, 2.0)),
            example(
                "a small and a large batch", ([(math.log(2), 1, 4.0, 2), (math.log(2) * 3, 7, 6.0, 8)],), (1.0, 0.5)
            ),
            reference("five batches", some_sums),
            example("nothing at all", ([],), (math.nan, math.nan)),
        ],
        causes=[
            sign(
                "with nothing to count both are NaN: no number is right",
                lambda got, want, sums: not sums and not (isinstance(got, tuple) and all(map(math.isnan, got))),
            ),
            suspect(
                "this is the mean of the batches' means: a small batch weighs as much as a large one. Add up first",
                _two(lambda n, b, t, c: np.mean(t / c), lambda n, b, t, c: np.mean(n / b) / math.log(2)),
            ),
            suspect("bits, not nats: divide by ln 2", _two(None, lambda n, b, t, c: n.sum() / b.sum())),
            suspect(
                "bits are *more* than nats: divide by ln 2, do not multiply",
                _two(None, lambda n, b, t, c: n.sum() * math.log(2) / b.sum()),
            ),
            suspect(
                "the nats of special tokens do not belong to any byte: use the first sum",
                _two(None, lambda n, b, t, c: t.sum() / b.sum() / math.log(2)),
            ),
            suspect(
                "the loss is of all targets: third and fourth sum", _two(lambda n, b, t, c: n.sum() / c.sum(), None)
            ),
            suspect("per byte means divided by bytes", _two(None, lambda n, b, t, c: n.sum() / c.sum() / math.log(2))),
        ],
        hints=[
            "Four running sums over the batches, and two divisions after the loop.",
            "Loss: third sum by fourth. Bits: first sum by second, by `math.log(2)`. `math.nan` where a divisor is 0.",
            _sums_shown,
        ],
    ),
    Exercise(
        "evaluation.render_prompts",
        cases=[
            example(
                "choices after one shot",
                (
                    CoreTask("t", "multiple_choice", 1, "\nAnswer: ", 50.0, []),
                    [
                        {"query": "S", "choices": ["x", "y"], "gold": 1},
                        {"query": "Q", "choices": ["a", "b"], "gold": 0},
                    ],
                    1,
                ),
                ["S\nAnswer: y\n\nQ\nAnswer: a", "S\nAnswer: y\n\nQ\nAnswer: b"],
            ),
            example(
                "a schema after one shot",
                (
                    CoreTask("t", "schema", 1, " ", 50.0, []),
                    [
                        {"context_options": ["d1", "d2"], "continuation": "w", "gold": 1},
                        {"context_options": ["c1", "c2"], "continuation": "z", "gold": 0},
                    ],
                    1,
                ),
                ["d2 w\n\nc1 z", "d2 w\n\nc2 z"],
            ),
            example(
                "a completion after one shot",
                (
                    CoreTask("t", "language_modeling", 1, " ", 0.0, []),
                    [{"context": " e f\n", "continuation": "g"}, {"context": "ctx ", "continuation": "k"}],
                    1,
                ),
                ["e f g\n\nctx", "e f g\n\nctx k"],
            ),
            reference("choices, three shots", lambda rng: some_task(rng, "multiple_choice")),
            reference("completions, no shots", lambda rng: some_task(rng, "language_modeling", 0, " ")),
        ],
        causes=[
            suspect("`shots_for` says which examples are shown, and in which order", _unlike(first=True)),
            suspect("after each shot comes an empty line: two line ends", _unlike(near=True)),
            suspect("a shot shows its *right* answer, number `gold`", _unlike(zero=True)),
            suspect("contexts of completions are stripped of blanks on both sides", _unlike(raw=True)),
            suspect(
                "the prompt without the continuation is stripped at the end: its last delimiter's blank belongs to the "
                "answer's first token",
                _unlike(open=True),
            ),
            sign(
                "one prompt an offered answer (choices) or context (schema); two for a completion",
                lambda got, want, *_: isinstance(got, list) and len(got) != len(want),
            ),
            sign(
                "each of the shots stands in front of the question",
                lambda got, want, task, examples, index: (
                    task.shots > 0
                    and isinstance(got, list)
                    and all(len(g) < len(w) for g, w in zip(got, want, strict=False))
                ),
            ),
        ],
        hints=[
            "First a `head` of all shots, the same for every prompt. Then a list with one text a choice, a context, or "
            "the two texts of a completion.",
            "A shot is question, delimiter, right answer, two line ends. Choices: `query` + delimiter + choice. "
            "Schema: the context varies, the continuation stays. Completions: `context.strip()`; the first text is "
            "stripped once more.",
            _prompts_shown,
        ],
    ),
    Exercise(
        "evaluation.scored_parts",
        cases=[
            example(
                "two answers",
                ("multiple_choice", [[0, 5, 6, 11], [0, 5, 6, 12, 13]]),
                [([0, 5, 6, 11], 3, 4), ([0, 5, 6, 12, 13], 3, 5)],
            ),
            example(
                "two contexts, one continuation",
                ("schema", [[0, 11, 5, 6], [0, 12, 13, 5, 6]]),
                [([0, 11, 5, 6], 2, 4), ([0, 12, 13, 5, 6], 3, 5)],
            ),
            example("a completion", ("language_modeling", [[0, 5, 6], [0, 5, 6, 11, 12]]), [([0, 5, 6, 11, 12], 3, 5)]),
            example(
                "an answer that begins another one",
                ("multiple_choice", [[0, 5, 11], [0, 5, 11, 12]]),
                [([0, 5, 11], 2, 3), ([0, 5, 11, 12], 2, 4)],
            ),
            reference("three answers", lambda rng: some_rows(rng, "multiple_choice")),
            reference("three contexts", lambda rng: some_rows(rng, "schema")),
        ],
        causes=[
            suspect(
                "where one answer begins another, nothing of the shorter is left to score: keep at least its last id",
                _parts_unlike(empty=True),
            ),
            suspect("you begin one id too late: `start` is the first id that is scored", _parts_unlike(late=True)),
            suspect("the last id that all share is not scored", _parts_unlike(early=True)),
            suspect("of a schema the *end* is shared: compare the rows from behind", _parts_unlike(prefix=True)),
            suspect("contexts without a common end: score at least the last id", _parts_unlike(none=True)),
            suspect(
                "the first id has nothing before it that could predict it: start at 1 at least",
                _parts_unlike(bare=True),
            ),
            suspect(
                "the continuation's first letters may merge with the prompt's last token: the scored part starts where "
                "the ids part, not at the shorter one's length",
                _parts_unlike(length=True),
            ),
            suspect("of a completion only the second row is scored", _parts_unlike(both=True)),
        ],
        hints=[
            "`common_prefix(rows)` is where rows part. Rows turned round (`row[::-1]`) have their common end in front.",
            "Choices: start at the common prefix, but leave the shortest row one id. Schema: start at len(row) minus "
            "the common end. Completions: the common prefix of the two. Never below 1.",
            _parts_shown,
        ],
        call=plain_parts,
    ),
    Exercise(
        "evaluation.cut_front",
        cases=[
            example(
                "four of ten are lost",
                (list(range(100, 110)), 7, 9, 6),
                {"ids": list(range(104, 110)), "start": 3, "end": 5, "cut": 4, "length": 10},
            ),
            example(
                "it fits",
                ([1, 2, 3, 4], 2, 4, 4),
                {"ids": [1, 2, 3, 4], "start": 2, "end": 4, "cut": 0, "length": 4},
            ),
            example(
                "the scored part does not fit",
                ([1, 2, 3, 4, 5], 1, 5, 3),
                {"ids": [3, 4, 5], "start": -1, "end": 3, "cut": 2, "length": 5},
            ),
            reference("any length", some_span),
        ],
        causes=[
            suspect(
                "the scored part moves with the ids: start and end become smaller by what was cut",
                _cut_unlike(still=True),
            ),
            suspect("cut the front: the answer stands at the end", _cut_unlike(tail=True)),
            suspect("`length` is that of the whole prompt, before the cut", _cut_unlike(after=True)),
            suspect("the context is the limit, even where it reaches into the scored part", _cut_unlike(kept=True)),
            sign("a start below 0 is not hidden: it says that the scored part is not whole", _clipped),
            sign(
                "a prompt that fits loses nothing: cut is never negative",
                lambda got, want, *_: isinstance(got, dict) and (got.get("cut", 0) < 0 or want["cut"] == 0),
            ),
        ],
        hints=[
            "How many ids are too many? That many go, from the front, and both ends of the span move by as much.",
            "`cut = max(0, len(span.ids) - context)`, then a new `Span` of five values, in the order of its fields.",
            _cut_shown,
        ],
        call=plain_cut,
    ),
    Exercise(
        "evaluation.centered",
        cases=[
            example("guessing", (0.25, 0.25), 0.0),
            example("perfect", (1.0, 0.62), 1.0),
            example("half way", (0.625, 0.25), 0.5),
            example("worse than guessing", (0.0, 0.5), -1.0),
            reference("any", lambda rng: (float(rng.random()), float(rng.uniform(0, 0.9)))),
        ],
        causes=[
            suspect("divide by what is left above guessing, 1 − baseline", lambda value, base: value - base),
            suspect(
                "below guessing is below 0: do not cut it off, or noise counts upwards only",
                lambda value, base: max((value - base) / (1 - base), 0.0),
            ),
            suspect(
                "divide by 1 − baseline, not by the baseline", lambda value, base: (value - base) / base if base else 0
            ),
            suspect(
                "the baseline is a share here, not per cent",
                lambda value, base: (value - base / 100) / (1 - base / 100),
            ),
        ],
        hints=[
            "A straight line: the baseline becomes 0, and 1 stays 1.",
            "How far above the baseline, as a share of how far one can be.",
            _centered_shown,
        ],
    ),
    Exercise(
        "evaluation.wilson",
        cases=[
            example("half of ten", (5, 10), (0.23659309, 0.76340691), rtol=1e-6),
            example("none of twenty", (0, 20), (0.0, 0.16112516), rtol=1e-6),
            example("all of twenty", (20, 20), (0.83887484, 1.0), rtol=1e-6),
            example("nothing was counted", (0, 0), (0.0, 1.0)),
            prop("inside of 0 … 1", lambda rng: (int(rng.integers(0, 31)), 30), _inside),
            reference("a task of CORE", lambda rng: (int(rng.integers(0, 500)), 500)),
        ],
        causes=[
            sign(
                "of nothing nothing is known: (0, 1)",
                lambda got, want, right, count: count == 0 and got != want,
            ),
            suspect(
                "that is ± 1.96 standard errors: at 0 or all right it says that nothing is uncertain", _wrong_wilson
            ),
            suspect("the middle is not the share: it is drawn towards 1/2", lambda r, n: _wilson(r, n, centre=True)),
            suspect("the second term under the root, Z²/(4 n²), is missing", lambda r, n: _wilson(r, n, thin=True)),
            suspect("the middle is divided by 1 + Z²/n, too", lambda r, n: _wilson(r, n, undivided=True)),
            suspect("1.645 is for 90 %; `Z` is the 97.5 % point, for 95 %", lambda r, n: _wilson(r, n, z=1.645)),
            sign(
                "rounding: keep the bounds inside of 0 … 1, and the share inside of the bounds",
                lambda got, want, right, count: count > 0 and right in (0, count),
            ),
        ],
        hints=[
            "Three lines: the share, the middle, the half width. Then low and high.",
            "middle = (share + Z²/2n) / (1 + Z²/n), half = Z / (1 + Z²/n) · √(share (1 − share)/n + Z²/4n²). `min` and "
            "`max` keep the bounds in 0 … 1; first of all, a count of 0.",
            _wilson_shown,
        ],
    ),
    Exercise(
        "evaluation.plain_number",
        cases=[
            example("separators and a fraction", ("", "1,234.50"), "1234.5"),
            example("a negative number", ("-", "12"), "-12"),
            example("a whole number that ends in zeros", ("", "100"), "100"),
            example("leading zeros", ("-", "007"), "-7"),
            example("no digit before the point", ("", ".5"), "0.5"),
            example("minus nothing", ("-", "0.0"), "0"),
            reference("any", some_number),
        ],
        causes=[
            suspect("commas are separators of thousands: they go", _number_unlike(commas=True)),
            suspect("2.50 is 2.5, and 3.0 is 3: zeros at the end of a fraction go", _number_unlike(zeros=True)),
            suspect("100 is not 1: zeros at the end go only behind a point", _number_unlike(whole=True)),
            suspect("007 is 7: leading zeros go", _number_unlike(leading=True)),
            suspect(".5 is 0.5: a digit stands before the point", _number_unlike(bare=True)),
            suspect("there is no −0: zero has no sign", _number_unlike(negative=True)),
            suspect("models write the typographic minus \u2212, too", _number_unlike(typographic=True)),
            sign("the result is a text, not a number", lambda got, want, *_: not isinstance(got, str)),
        ],
        hints=[
            "Texts in, text out. What says nothing: commas, zeros behind a fraction, a bare point, zeros in front go.",
            "`rstrip` for the zeros of a fraction (only if there is a point) and then for the point, `lstrip` for "
            "those in front. What is empty now, or begins with a point, gets a 0. The sign last, none for 0.",
            _numbers_shown,
        ],
    ),
    Exercise(
        "evaluation.pass_at_k",
        cases=[
            example("two questions", (np.array([[0, 0, 1], [0, 1, 0]]),), [0.0, 0.5, 1.0]),
            example("right at once, then wrong", (np.array([[1, 0, 0, 0]]),), [1.0, 1.0, 1.0, 1.0]),
            prop("it never falls", some_samples, _rising),
            reference("seven questions", some_samples),
        ],
        causes=[
            suspect(
                "one right answer among the *first* k is enough: not the k-th alone",
                lambda c: _first(c, lambda x, k: x[:, k - 1].mean()),
            ),
            suspect(
                "one right answer is enough: not all k, and not their mean",
                lambda c: _first(c, lambda x, k: x[:, :k].mean()),
            ),
            suspect(
                "one right answer is enough, all k need not be",
                lambda c: _first(c, lambda x, k: x[:, :k].all(axis=1).mean()),
            ),
            suspect(
                "the share of questions, not the number", lambda c: _first(c, lambda x, k: x[:, :k].any(axis=1).sum())
            ),
            sign(
                "k is 1 … S: one share for every number of samples",
                lambda got, want, *_: isinstance(got, list) and want is not None and len(got) != len(want),
            ),
            sign("a list of Python floats", lambda got, want, *_: not isinstance(got, list)),
        ],
        hints=[
            "For each question and each k: is any of the first k samples right?",
            "`np.maximum.accumulate(…, axis=1)` answers that for all k at once; then the mean over questions.",
            _passes_shown,
        ],
    ),
    Exercise(
        "evaluation.unbiased_pass_at_k",
        cases=[
            example("one of four is right", (np.array([[0, 0, 1, 0]]),), [0.25, 0.5, 0.75, 1.0]),
            example("two questions", (np.array([[0, 0, 1], [1, 1, 0]]),), [0.5, 5 / 6, 1.0]),
            prop("it never falls", some_samples, _rising),
            reference("many samples", lambda rng: some_samples(rng, 5, 20), against=counted),
        ],
        causes=[
            suspect("that is the first k; here every choice of k samples counts", scores.pass_at_k),
            suspect("samples are drawn *without* putting them back: 1 − (1 − c/S)^k is too small", _independent),
            suspect("the formula belongs to each question: take the mean over questions last", _of_the_mean),
            sign(
                "with fewer wrong ones than k there is no way to miss: the chance of none right is 0, not below",
                lambda got, want, *_: isinstance(got, list) and any(not 0 <= float(x) <= 1 for x in got),
            ),
            sign(
                "the chance that k draws are all wrong: of the wrong ones left by those that are left, draw after draw",
                lambda got, want, *_: isinstance(got, list) and (want is None or len(got) == len(want)),
            ),
            sign("one share for every k from 1 to S", lambda got, want, *_: True),
        ],
        hints=[
            "Draw one sample after another, without putting back. What is the chance that the first is wrong? That the "
            "second is, if the first was?",
            "`none` (Q,) begins at 1 and is multiplied by (wrong − k + 1) / (S − k + 1) for k = 1 … S, never below 0. "
            "pass@k is the mean of 1 − none.",
            _passes_shown,
        ],
    ),
]

QUIZZES = [
    Quiz(
        "evaluation.q_loss",
        "Two models report the same held-out text: A 2.9 nats a token, B 3.3 nats a token. Which one is better?",
        [
            Option("A: its loss is lower", why="Per *token*, and whose tokens? With finer tokens every loss is lower."),
            Option(
                "Nobody can say without the bytes a token has in each of the two",
                right=True,
                why="At 3.9 bytes a token A has 1.07 bits a byte; at 4.7 bytes B has 1.01. Then B is better.",
            ),
            Option("B: its vocabulary must be larger", why="It may be, but a larger vocabulary is no merit by itself."),
        ],
    ),
    Quiz(
        "evaluation.q_mean",
        "Choices are compared by the *mean* of their tokens' nats. What would the sum do?",
        [
            Option(
                "Prefer short answers: every further token adds to the sum",
                right=True,
                why="Nats are never negative. `rope` would beat `a long rope of hemp`, whatever the question is.",
            ),
            Option("Prefer long answers", why="More tokens, more nats, so a larger sum, and the lowest one wins."),
            Option("Nothing: it is the mean times a constant", why="The constant is the answer's own length."),
        ],
    ),
    Quiz(
        "evaluation.q_noise",
        "You change the recipe, train once, and get 0.2602 instead of 0.2565. What do you know?",
        [
            Option(
                "That the change helps: 0.0037 is a lot on CORE",
                why="It is less than the spread of single runs of *one* recipe, 0.0052.",
            ),
            Option(
                "Next to nothing: both are single draws that differ by that much without any change",
                right=True,
                why="Two runs of one recipe typically differ by 0.007. Repeat both, or look at bits per byte.",
            ),
            Option(
                "That the questions of CORE are too few",
                why="With many more questions the training's own noise would be left: another seed is another model.",
            ),
        ],
    ),
    Quiz(
        "evaluation.q_cut",
        "A stronger model scores 0.00 on a task on which a weaker one scores 0.12. What do you look at first?",
        [
            Option(
                "The learning rate: the training went wrong", why="Then other tasks and the loss would say so, too."
            ),
            Option(
                "The prompts: how many were cut, and what of them was left",
                right=True,
                why="Exactly 0 is suspicious: luck alone is above it. Something keeps the right answer out of reach.",
            ),
            Option(
                "The interval: 0.00 and 0.12 may be the same",
                why="Check it, but with hundreds of questions Wilson's intervals of these two do not touch.",
            ),
        ],
    ),
]

PREDICTIONS = [
    Prediction(
        "evaluation.p_boolq", "Which accuracy on BoolQ (baseline 62 %) has the centred score -0.4172?", unit="%"
    ),
    Prediction(
        "evaluation.p_width", "How wide is the 95 % interval of the seven runs' mean, from low to high?", unit=""
    ),
    Prediction("evaluation.p_cut", "What does the last checkpoint get right when its prompts are cut?", unit="%"),
]
