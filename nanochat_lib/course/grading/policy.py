"""How marks are made of results: `grading.yaml` in the course's folder, or these defaults.

weights: {public: 0.4, hidden: 0.4, budget: 0.2}   # shares of an exercise's points; groups without cases drop out
late: {percent_per_day: 10, grace_minutes: 15, most_percent: 50, zero_after_days: 14}
due: {"03": "2026-12-01T23:59+01:00"}              # a chapter without a date is never late
drop_lowest: 1                                     # chapters left out of the total
rubric: rubric.yaml                                # written answers (rubric.py)
"""

from __future__ import annotations

import datetime
import math
from dataclasses import dataclass, field
from pathlib import Path

from nanochat_lib.course.grading.key import GROUPS
from nanochat_lib.errors import UserError
from nanochat_lib.presets import nearest

NAME = "grading.yaml"


@dataclass(frozen=True)
class Late:
    percent_per_day: float = 10.0  # of the mark, for each day that has begun
    grace_minutes: float = 15.0
    most_percent: float = 50.0
    zero_after_days: float = math.inf

    def factor(self, seconds: float) -> float:
        """What is left of a mark handed in so many seconds after the date; 1 for one in time."""
        seconds -= 60 * self.grace_minutes
        if seconds <= 0:
            return 1.0
        if seconds > 86400 * self.zero_after_days:
            return 0.0
        return 1 - min(self.percent_per_day * math.ceil(seconds / 86400), self.most_percent) / 100


@dataclass(frozen=True)
class Policy:
    weights: dict[str, float] = field(default_factory=lambda: {"public": 0.4, "hidden": 0.4, "budget": 0.2})
    late: Late = Late()
    due: dict[str, float] = field(default_factory=dict)  # chapter's number -> seconds since 1970
    drop_lowest: int = 0
    rubric: str = ""

    def points(self, points: float, passed: dict[str, tuple[int, int]]) -> float:
        """An exercise's mark from (passed, all) of each case group, two decimals."""
        groups = [name for name in GROUPS if passed.get(name, (0, 0))[1] and self.weights.get(name)]
        whole = sum(self.weights[name] for name in groups)
        if not whole:
            return 0.0
        share = sum(self.weights[name] * passed[name][0] / passed[name][1] for name in groups) / whole
        return round(points * share, 2)


def load(path: Path) -> Policy:
    """The policy in a file; the defaults where there is none. UserError for what means nothing."""
    if not path.exists():
        return Policy()
    import yaml

    try:
        found = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is not YAML ({str(error).splitlines()[0]})") from None
    if not isinstance(found, dict):
        raise UserError(f"{path} must hold keys such as weights: and late:")
    known = list(Policy.__dataclass_fields__)
    for key in found:
        if key not in known:
            raise UserError(f"{path}: there is no {key!r}; {nearest(str(key), known)}")
    late = found.get("late") or {}
    if not isinstance(late, dict) or (unknown := set(late) - set(Late.__dataclass_fields__)):
        names = ", ".join(Late.__dataclass_fields__)
        raise UserError(f"{path}: late: knows {names}, not {', '.join(sorted(map(str, unknown)))}")
    for key, value in late.items():
        _number(path, f"late: {key}", value)
    weights = found.get("weights", Policy().weights)
    if not isinstance(weights, dict) or set(weights) - set(GROUPS):
        raise UserError(f"{path}: weights: must name groups among {', '.join(GROUPS)}")
    for name, value in weights.items():
        _number(path, f"weights: {name}", value)
    if not sum(weights.values()):
        raise UserError(f"{path}: weights: are all 0, so every mark would be 0")
    due = found.get("due") or {}
    if not isinstance(due, dict):
        raise UserError(f'{path}: due: must name chapters, as in {{"03": "2026-12-01T23:59"}}')
    drop = found.get("drop_lowest", 0)
    if type(drop) is not int or drop < 0:
        raise UserError(f"{path}: drop_lowest must be a whole number, 0 or more, got {drop!r}")
    dates = {str(chapter).zfill(2): moment(date, f"{path}: due: {chapter}") for chapter, date in due.items()}
    return Policy(
        {name: float(v) for name, v in weights.items()}, Late(**late), dates, drop, str(found.get("rubric", ""))
    )


def _number(path: Path, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < math.inf:
        raise UserError(f"{path}: {name} must be a number, 0 or more, got {value!r}")


def moment(date: object, where: str) -> float:
    """Seconds since 1970 of "2026-12-01T23:59" (this machine's time zone unless it names one)."""
    if isinstance(date, datetime.datetime):
        return date.timestamp()
    try:
        found = datetime.datetime.fromisoformat(str(date))
    except ValueError:
        raise UserError(f"{where}: {date!r} is no date; write it as 2026-12-01T23:59") from None
    return found.timestamp()
