"""The report's certificate: how much of a run's code is the learner's, what passed, which goals were reached.

A goal is reached when a figure is better than its bar by more than noise: the bar lies outside its interval at 95 %.
"""

from __future__ import annotations

from pathlib import Path

from nanochat_lib.errors import UserError
from nanochat_lib.evaluate.scores import unpaired_difference
from nanochat_lib.report.scores import with_interval
from nanochat_lib.report.tables import Table, number
from nanochat_lib.storage import read_json

FILE = "course.json"  # written by course/standing.py
COUNTS = ("passed", "exercises", "points", "all_points")
GPT2_CORE = 0.256525  # CORE of GPT-2, 1.6 billion parameters, over the bundle's 22 tasks
BUNDLE_TASKS = 22
DISCLAIMER = (
    "This page is made by the run itself, from files on the learner's own machine. An instructor's marks come from "
    "nanochat grade, which runs the exercises again with cases that are not in the notebooks."
)


def of_run(folder: Path, stages: dict, mine: dict | None, problems: list[str]) -> dict | None:
    """`own` (the share of the pipeline's exercise functions that are the learner's), `course` (what has passed) and
    `goals`; None where the learner has neither passed an exercise nor put a function of theirs into the run."""
    course = _course(Path(folder) / FILE, problems)
    own = {"functions": mine["functions"], "used": len(mine["used"]), "share": mine["share"]} if mine else None
    if not course and not (own and own["used"]):
        return None
    return {"own": own, "course": course, "goals": goals(stages)}


def _course(path: Path, problems: list[str]) -> dict | None:
    if not path.exists():
        return None
    try:
        record = read_json(path)
        chapters = [
            {"number": str(c["number"]), "title": str(c["title"])} | {key: int(c[key]) for key in COUNTS}
            for c in record["chapters"]
        ]
        return {key: int(record[key]) for key in COUNTS} | {"chapters": chapters}
    except (UserError, KeyError, TypeError, ValueError):
        problems.append(f"{path.name} cannot be read, so the certificate lacks the exercises")
        return None


def goals(stages: dict) -> list[dict]:
    """What a run wants to reach: `label`, `value` and `bar` as text, `reached` (None: the stage has no such figure)."""
    stages = {name: stage or {} for name, stage in stages.items()}
    pretrain, base, rl = (stages.get(name, {}) for name in ("pretrain", "eval_base", "rl"))
    chat = stages.get("eval_chat", {}).get("stages") or {}
    last = next((chat[name] for name in ("rl", "sft") if chat.get(name)), {})
    found = [
        _bits(pretrain),
        _above("CORE", base.get("core"), base.get("core_interval"), 0.0, "above 0, which is guessing"),
    ]
    if len(base.get("core_tasks") or {}) == BUNDLE_TASKS:
        bar = f"above {GPT2_CORE:.4f}, GPT-2's"
        found.append(_above("CORE against GPT-2", base.get("core"), base.get("core_interval"), GPT2_CORE, bar))
    found.append(
        _above("ChatCORE", last.get("chatcore"), last.get("chatcore_interval"), 0.0, "above 0, which is guessing")
    )
    found.append(_reward(rl))
    return found


def _goal(label: str, value: str, bar: str, reached: bool | None) -> dict:
    return {"label": label, "value": value, "bar": bar, "reached": reached}


def _bits(pretrain: dict) -> dict:
    last, first, bigram = (pretrain.get(name) for name in ("val_bpb_last", "val_bpb_first", "byte_bigram_bpb"))
    bar = bigram or first
    what = "that of a byte-bigram model" if bigram else "where it began"
    reached = last < bar if last is not None and bar is not None else None
    return _goal("bits per byte", number(last, "short"), f"below {number(bar, 'short')}, {what}", reached)


def _above(label: str, value: float | None, interval: list | None, bar: float, words: str) -> dict:
    reached = interval[0] > bar if value is not None and interval else None
    return _goal(label, with_interval(value, interval, "short"), words, reached)


def _reward(rl: dict) -> dict:
    """RL's held-out reward rose by more than noise; every question counts once, however many answers it had.

    Judged only where the reward is a share of right answers: one's own function may give any number.
    """
    first, last, count = (rl.get(name) for name in ("reward_first", "reward_last", "heldout_questions"))
    reached = None
    if None not in (first, last, count) and 0 <= min(first, last) and max(first, last) <= 1:
        reached = unpaired_difference(first, count, last, count).interval[0] > 0
    return _goal("held-out reward of RL", f"{number(first, 'percent')} → {number(last, 'percent')}", "rises", reached)


def lines(found: dict) -> list[str]:
    """The certificate's three sentences."""
    own, course, reached = found["own"], found["course"], [g["reached"] for g in found["goals"]]
    functions = f"{own['used']} of {own['functions']} ({100 * own['share']:.0f} %)" if own else "none"
    said = [f"Own code: {functions} of the exercise functions in this pipeline."]
    if course:
        said.append(
            f"Exercises: {course['passed']} of {course['exercises']} passed, "
            f"{course['points']} of {course['all_points']} points."
        )
    return [*said, f"Goals: {reached.count(True)} of {len(reached)} reached."]


def goals_table(found: dict) -> Table:
    words = {True: "reached", False: "not reached", None: "not evaluated"}
    rows = [(g["label"], words[g["reached"]], g["value"], g["bar"]) for g in found["goals"]]
    return Table(("goal", "verdict", "this run", "the bar"), rows, wide=("verdict", "the bar"))


def chapters_table(found: dict) -> Table:
    chapters = (found["course"] or {}).get("chapters", [])
    rows = [
        (f"{c['number']} {c['title']}", f"{c['passed']} of {c['exercises']}", f"{c['points']} of {c['all_points']}")
        for c in chapters
    ]
    return Table(("chapter", "exercises", "points"), rows)
