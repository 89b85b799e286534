"""`solutions/exercises.lock`: every exercise id that was ever published. Learners' saved work goes by these ids.

One line an id. An exercise that was renamed or given up on purpose keeps its line, with what became of it:

    tokenizer.merge
    tokenizer.pairs -> tokenizer.count_pairs
    muon.polynomial -> (gone)
"""

from __future__ import annotations

from nanochat_lib.errors import UserError

NAME = "solutions/exercises.lock"
HEADER = "# Every exercise id ever published; `nanochat course build` adds new ones. See nanochat_lib/course/lock.py.\n"
GONE = "(gone)"


def parse(text: str) -> dict[str, str]:
    """Lock file -> {id: what became of it, "" for an id in use}."""
    entries: dict[str, str] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.split("#")[0].strip()
        if not line:
            continue
        old, arrow, new = (part.strip() for part in line.partition("->"))
        if " " in old or bool(arrow) != bool(new) or entries.get(old, new) != new:
            raise UserError(f"{NAME}:{number}: write one id a line, or `old -> new`, or `old -> {GONE}`; got {line!r}")
        entries[old] = new
    return entries


def update(text: str, ids: list[str]) -> tuple[str, list[str]]:
    """(the lock file with the chapters' `ids` added, problems: published ids that no chapter has any more)."""
    entries = parse(text)
    problems = []
    for old, new in entries.items():
        if old in ids and new:
            problems.append(f"{NAME} says that {old} became {new}, but a chapter has {old}")
        elif old not in ids and not new:
            problems.append(
                f"exercise {old} is published and learners' work goes by its id, but no chapter has it; put it back, "
                f"or say in {NAME} what became of it: `{old} -> its.new_name` or `{old} -> {GONE}`"
            )
        elif new and new != GONE and new not in ids:
            problems.append(f"{NAME} says that {old} became {new}, but no chapter has {new}")
    entries = dict.fromkeys(ids, "") | entries
    lines = [f"{old} -> {new}" if new else old for old, new in sorted(entries.items())]
    return HEADER + "".join(f"{line}\n" for line in lines), problems
