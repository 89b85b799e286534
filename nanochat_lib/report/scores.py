"""Tables of scores: CORE and chat tasks with their intervals and warnings, two models side by side."""

from __future__ import annotations

from nanochat_lib.report.tables import Table, number

STAGES = {"base": "base", "mid": "mid", "sft": "SFT", "rl": "RL"}


def with_interval(value: object, interval: object, kind: str = "percent") -> str:
    """ "62 % (58 – 66)": a score and its interval at 95 %."""
    text = number(value, kind)
    if not isinstance(interval, (list, tuple)) or text == "–":
        return text
    low, high = (f"{100 * x:.0f}" if kind == "percent" else f"{x:.2f}" for x in interval)
    return f"{text} ({low} – {high})"


def core_table(tasks: dict[str, dict]) -> Table:
    """One row a CORE task: accuracy with its interval, guessing, centred scores, the prompts' lengths, what was cut."""
    columns = ("task", "type", "shots", "examples", "accuracy (95 %)", "guessing", "centred", "untrained",
               "tokens p50 / p90 / max", "truncated", "skipped")  # fmt: skip
    untrained = any("centered_untrained" in t for t in tasks.values())
    rows = []
    for label, t in tasks.items():
        lengths = t.get("prompt_tokens") or {"p50": t.get("median_prompt_tokens"), "p90": None, "max": None}
        rows.append((
            label, str(t.get("type", "–")).replace("_", " "),
            number(t.get("shots"), "count"), number(t.get("examples"), "count"),
            with_interval(t.get("accuracy"), t.get("interval")), number(t.get("baseline"), "percent"),
            number(t.get("centered")), number(t.get("centered_untrained")),
            " / ".join(number(lengths.get(name), "count") for name in ("p50", "p90", "max")),
            number(t.get("truncated_share"), "percent") + (" !" if t.get("warning") else ""),
            number(t.get("skipped"), "count"),
        ))  # fmt: skip
    if not untrained:
        columns = tuple(name for name in columns if name != "untrained")
        rows = [row[:7] + row[8:] for row in rows]
    return Table(columns, rows, wide=("type",))


def warnings(tasks: dict[str, dict]) -> list[str]:
    """The tasks' warnings about their prompts' length, a line each."""
    return [f"{label}: {t['warning']}" for label, t in tasks.items() if t.get("warning")]


def chat_table(stages: dict[str, dict]) -> Table:
    """One row a chat task: accuracy with its interval after each stage; of open tasks also the share of answers that
    came to an end, and how many had no answer of the asked form in them."""
    shown = [stage for stage in STAGES if stage != "mid" or stages.get("mid")]
    names = list(dict.fromkeys(name for stage in stages.values() for name in (stage or {}).get("tasks", {})))
    rows = []

    def each(entries: dict[str, dict], name: str, kind: str) -> str:
        values = [number(entries[stage].get(name), kind) for stage in shown]
        return "" if all(value == "–" for value in values) else " / ".join(values)

    for name in names:
        entries = {stage: (stages.get(stage) or {}).get("tasks", {}).get(name, {}) for stage in shown}
        known = next(entry for entry in entries.values() if entry)
        scores = [with_interval(entry.get("accuracy"), entry.get("interval")) for entry in entries.values()]
        samples = f"{name}, any of {known['samples']}" if known.get("samples", 1) > 1 else name
        rows.append((
            samples, str(known.get("type", "–")), number(known.get("baseline"), "percent"), *scores,
            each(entries, "ended_share", "percent"), each(entries, "unparsed", "count"),
        ))  # fmt: skip
    for label, key in (("ChatCORE", "chatcore"), ("ChatCORE, categorical", "chatcore_categorical")):
        values = [stages.get(stage) or {} for stage in shown]
        scores = [with_interval(value.get(key), value.get(f"{key}_interval"), "number") for value in values]
        if key == "chatcore" or any(score != "–" for score in scores):
            rows.append((label, "", "", *scores, "", ""))
    columns = ("task", "type", "guessing", *(STAGES[stage] for stage in shown), "answers ended", "unreadable")
    return Table(columns, rows, wide=("type",))


def pass_table(stages: dict[str, dict]) -> Table:
    """pass@k of tasks that were answered several times: any of the first k, and Chen's estimate from all samples."""
    rows = []
    for stage, figures in stages.items():
        for name, task in ((figures or {}).get("tasks") or {}).items():
            for label, key in (("any of the first k", "pass_at_k"), ("unbiased", "pass_at_k_unbiased")):
                if task.get(key):
                    rows.append((f"{name}, {STAGES.get(stage, stage)}", label, number(task[key], "percents")))
    return Table(("pass@k, k = 1, 2, …", "how", "share"), rows, wide=("how", "share"))


def comparison_table(found: dict) -> Table:
    """Two models side by side; differences are b − a."""
    rows = []
    for row in found["tasks"] + found["means"]:
        kind = "percent" if "examples" in row else "number"
        interval = row.get("interval")
        paired = "" if "paired" not in row else "paired" if row["paired"] else "unpaired"
        rows.append((
            row["task"], number(row["a"], kind), number(row["b"], kind), signed(row.get("difference"), kind),
            "–" if interval is None else f"{signed(interval[0], kind)} … {signed(interval[1], kind)}",
            paired, row.get("verdict", "no score"),
        ))  # fmt: skip
    columns = ("task", found["a"], found["b"], "difference", "95 %", "test", "verdict")
    return Table(columns, rows, wide=("test", "verdict"))


def signed(value: object, kind: str) -> str:
    if not isinstance(value, (int, float)):
        return "–"
    return f"{100 * value:+.1f}" if kind == "percent" else f"{value:+.3f}"


def text_table(found: dict[str, dict]) -> Table:
    """Bits per byte of files."""
    rows = [
        (name, f"{figures['bpb']:.4f}", number(figures["bytes"], "count"), number(figures["tokens"], "count"),
         number(figures["bytes_per_token"]))
        for name, figures in found.items()
    ]  # fmt: skip
    return Table(("file", "bits per byte", "bytes", "tokens", "bytes a token"), rows)
