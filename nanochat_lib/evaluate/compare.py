"""Two models side by side, from the results that their evaluations left: is the difference more than noise?

Where both kept their answers to the same questions, question by question, the test is a paired one; where only the
accuracies are known, it is not. Differences of many tasks are looked at together, so p values are raised by Holm's rule
before one is called more than noise: of 22 tasks one would be below 0.05 by chance alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from nanochat_lib.errors import UserError
from nanochat_lib.evaluate.results import FOLDER, OPTIONS, read_result, unpack
from nanochat_lib.evaluate.scores import (
    Difference,
    holm,
    mean_interval,
    paired_difference,
    unpaired_difference,
)
from nanochat_lib.storage import TEMPORARY, read_json

KINDS = {"core": "CORE", "chat": "ChatCORE"}
MODELS = ("rl", "sft", "mid", "base")  # the furthest first
SURE = 0.05


@dataclass(frozen=True)
class Found:
    """A task's result: figures, options of its evaluation, and the file with the single answers (None: not kept)."""

    kind: str
    figures: dict
    options: dict
    identity: str | None
    path: Path | None
    standard: bool  # of the run's report, or of an evaluation by other choices


@dataclass(frozen=True)
class Side:
    """One of the two: how it was named, its model, and everything that is known of it."""

    name: str
    folder: Path
    model: str
    found: dict[tuple[str, str], list[Found]]  # by (kind, task)


def open_side(name: str) -> Side:
    """The results of `RUN` (its last model that was evaluated) or `RUN:MODEL`. UserError when there are none."""
    folder, model = Path(name), ""
    if not folder.is_dir() and ":" in name:
        before, _, model = name.rpartition(":")
        folder = Path(before)
    if not (folder / "config.json").exists():
        raise UserError(f"{folder} holds no run (config.json is missing); name a run's folder, or RUN:MODEL")
    if model and model not in MODELS:
        raise UserError(f"{name}: unknown model {model!r}; known: {', '.join(reversed(MODELS))}")
    every = {m: results_of(folder, m) for m in ([model] if model else MODELS)}
    model = next((m for m, found in every.items() if found), "")
    if not model:
        raise UserError(f"{name} holds no results; evaluate it first: nanochat eval --run-dir {folder}")
    return Side(f"{folder}:{model}", folder, model, every[model])


def results_of(folder: Path, model: str) -> dict[tuple[str, str], list[Found]]:
    """{(kind, task): results of the newest checkpoint that was evaluated}, from stored tasks and stage records."""
    found: dict[tuple[str, str], list[Found]] = {}
    steps = sorted(path for path in (folder / FOLDER / model).glob("step_*") if path.is_dir())
    recorded = stage_figures(folder, model)
    written = lambda path: (path.stat().st_mtime_ns, path.name)  # noqa: E731
    for path in sorted(steps[-1].glob("*/*.json"), key=written) if steps else ():  # in the evaluation's order
        if path.name == OPTIONS or TEMPORARY in path.name:
            continue
        stored = read_result(path)
        options = read_json(path.parent / OPTIONS) if stored else {}
        kind = options.get("kind")
        if kind in KINDS:
            standard = recorded.get((kind, stored["task"]), {}).get("accuracy") == stored["figures"]["accuracy"]
            entry = Found(kind, stored["figures"], options, stored["identity"], path, standard)
            found.setdefault((kind, stored["task"]), []).append(entry)
    for key, figures in recorded.items():
        if key not in found:  # evaluated before single answers were kept
            found[key] = [Found(key[0], figures, {}, None, None, True)]
    return found


def stage_figures(folder: Path, model: str) -> dict[tuple[str, str], dict]:
    """{(kind, task): figures} of a model in the run's stage records."""

    def figures(name: str) -> dict:
        path = folder / "stages" / f"{name}.json"
        record = read_json(path) if path.exists() else {}
        return record.get("figures") or {}

    chat = (figures("eval_chat").get("stages") or {}).get(model) or {}
    found = {("chat", task): values for task, values in (chat.get("tasks") or {}).items()}
    if model == "base":
        found |= {("core", task): values for task, values in (figures("eval_base").get("core_tasks") or {}).items()}
    return found


def pair_up(a: list[Found], b: list[Found]) -> tuple[Found, Found] | None:
    """Results of the same questions, preferably evaluated alike and of the reports; None when there are none."""
    pairs = [(x, y) for x in a for y in b if x.identity == y.identity or None in (x.identity, y.identity)]

    def worth(pair: tuple[Found, Found]) -> tuple:
        x, y = pair
        same = all(x.figures.get(name) == y.figures.get(name) for name in ("context", "samples"))
        kept = x.path is not None and y.path is not None
        return kept, same, x.standard + y.standard, x.figures.get("examples") or 0, str(x.path), str(y.path)

    return max(pairs, key=worth) if pairs else None


def difference(x: Found, y: Found) -> Difference | None:
    """Of two results of one task; None when one has no score."""
    if x.figures.get("accuracy") is None or y.figures.get("accuracy") is None:
        return None
    if x.identity is not None and x.identity == y.identity:
        a, b = (unpack(read_result(found.path)) for found in (x, y))
        a, b = ((answers.max(axis=1) if answers.ndim > 1 else answers) for answers in (a, b))
        both = (a >= 0) & (b >= 0)  # left out by one's context: no pair
        if both.any():
            return paired_difference(a[both] > 0, b[both] > 0)
    figures = ((found.figures["accuracy"], found.figures["examples"]) for found in (x, y))
    (accuracy_a, count_a), (accuracy_b, count_b) = figures
    return unpaired_difference(accuracy_a, count_a, accuracy_b, count_b)


def verdict(raised: float, p: float) -> str:
    if raised < SURE:
        return "more than noise"
    return "perhaps" if p < SURE else "noise"


def compare(name_a: str, name_b: str) -> dict:
    """{"a", "b", "tasks": [row], "means": [row], "notes"} of two models; b − a in every row.

    UserError when they share no task, or answered other questions of one.
    """
    a, b = open_side(name_a), open_side(name_b)
    shared = [key for key in a.found if key in b.found]
    if not shared:
        raise UserError(
            f"{a.name} and {b.name} share no task: one has {_listing(a.found)}, the other {_listing(b.found)}; "
            "evaluate both alike"
        )
    pairs = {key: pair_up(a.found[key], b.found[key]) for key in shared}
    if other := [task for (_, task), pair in pairs.items() if pair is None]:
        raise UserError(
            f"{a.name} and {b.name} answered different questions of {', '.join(other[:3])}"
            f"{f' and {len(other) - 3} more tasks' if len(other) > 3 else ''}: another bundle, seed or number of "
            "examples; evaluate both on the same (--bundle, --max-per-task)"
        )
    found = {key: difference(*pair) for key, pair in pairs.items()}
    known = {key: one for key, one in found.items() if one is not None}
    raised = dict(zip(known, holm([one.p for one in known.values()]), strict=True))
    rows = []
    for key in sorted(shared, key=lambda key: list(KINDS).index(key[0])):
        (x, y), one = pairs[key], found[key]
        row = {"kind": key[0], "task": key[1], "a": x.figures.get("accuracy"), "b": y.figures.get("accuracy"),
               "examples": min(f.figures.get("examples") or 0 for f in (x, y))}  # fmt: skip
        if one is not None:
            row |= {"difference": one.value, "interval": list(one.interval), "p": one.p, "p_holm": raised[key],
                    "paired": one.paired, "verdict": verdict(raised[key], one.p)}  # fmt: skip
        rows.append(row)
    means = [mean_row(kind, pairs, known) for kind in KINDS if any(key[0] == kind for key in known)]
    return {"a": a.name, "b": b.name, "tasks": rows, "means": means, "notes": notes(a, b, pairs)}


def mean_row(kind: str, pairs: dict, known: dict[tuple[str, str], Difference]) -> dict:
    """The mean centred score of the tasks that both have, its difference, and the interval carried over from them."""
    chosen = {key: one for key, one in known.items() if key[0] == kind}
    scale = {key: 1 / (1 - pairs[key][0].figures["baseline"]) for key in chosen}
    values = [one.value * scale[key] for key, one in chosen.items()]
    intervals = [(one.interval[0] * scale[key], one.interval[1] * scale[key]) for key, one in chosen.items()]
    mean = [sum(pairs[key][i].figures["centered"] for key in chosen) / len(chosen) for i in (0, 1)]
    low, high = mean_interval(values, intervals)
    return {
        "kind": kind, "task": f"{KINDS[kind]}, {len(chosen)} tasks", "a": mean[0], "b": mean[1],
        "difference": sum(values) / len(values), "interval": [low, high],
        "paired": all(one.paired for one in chosen.values()),
        "verdict": "noise" if low <= 0 <= high else "more than noise",
    }  # fmt: skip


def notes(a: Side, b: Side, pairs: dict) -> list[str]:
    """What a reader should know before trusting the table."""
    said = []
    for kind in KINDS:
        for side, other in ((a, b), (b, a)):
            alone = [task for k, task in side.found if k == kind and (k, task) not in other.found]
            if alone and any(k == kind for k, _ in other.found):
                said.append(f"only {side.name} has {', '.join(alone)}: left out")
    for name in ("context", "samples"):
        values = {tuple(found.figures.get(name) for found in pair) for pair in pairs.values()}
        for x, y in sorted((x, y) for x, y in values if x != y and None not in (x, y)):
            said.append(f"evaluated with {name} {x:,} and {y:,}")
    if any(None in (found.identity for found in pair) for pair in pairs.values()):
        said.append(
            "single answers were not kept by both: differences are taken as if the questions were different ones"
        )
    return said


def _listing(keys: Iterable[tuple[str, str]]) -> str:
    kinds = dict.fromkeys(kind for kind, _ in keys)
    return " and ".join({"core": "CORE tasks", "chat": "chat tasks"}[kind] for kind in kinds)
