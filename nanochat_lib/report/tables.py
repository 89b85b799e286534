"""The report's tables: plain rows that show themselves in a notebook, in Markdown and in the HTML page.

Every cell is text by the time it is in a Table, and escaped when it is written: what a model said can never run.
"""

from __future__ import annotations

import html
import math
import re
from dataclasses import dataclass

from nanochat_lib.progress import format_seconds

NOT_EVALUATED = "not evaluated"
STAGE_TITLES = {
    "tokenizer": "Tokenizer training",
    "pretrain": "Base model training",
    "eval_base": "Base model evaluation",
    "mid": "Midtraining",  # only in runs that have it
    "sft": "Chat SFT",
    "rl": "Chat RL",
    "eval_chat": "Chat evaluation",
}
INTERVAL = re.compile(r"(\(\S+ – \S+\))")  # stays on its line in the page
MAX_TEXT = 400  # characters of a model's answer that a table shows
FIGURES = {  # name in report.json -> (label, kind)
    "vocab_size": ("vocabulary", "count"),
    "bytes_per_token": ("bytes per token, held-out text", "number"),
    "documents": ("documents", "count"),
    "characters": ("characters", "count"),
    "empty": ("empty documents left out", "count"),
    "params": ("parameters", "count"),
    "steps": ("optimiser steps", "count"),
    "tokens": ("tokens read in training", "count"),
    "epochs": ("epoch reached", "count"),
    "val_bpb_first": ("bits per byte before, real text", "number"),
    "val_bpb_last": ("bits per byte after, real text", "number"),
    "byte_bigram_bpb": ("bits per byte of a byte-bigram model", "number"),
    "bigram_ratio": ("after ÷ bigram", "number"),
    "val_bpb_world_first": ("bits per byte before, world", "number"),
    "val_bpb_world_last": ("bits per byte after, world", "number"),
    "tokens_per_s": ("tokens per second", "count"),
    "mfu": ("MFU (share of the machine's peak)", "percent"),
    "flops_per_token": ("FLOPs per token", "big"),
    "attention": ("attention backend and tiles", "text"),
    "train_seconds": ("seconds in training steps", "count"),
    "train_bpb": ("bits per byte, training text", "number"),
    "val_bpb": ("bits per byte, validation text", "number"),
    "val_bpb_world": ("bits per byte, world", "number"),
    "core": ("CORE", "number"),
    "core_interval": ("CORE, interval at 95 %", "numbers"),
    "core_before": ("CORE of the untrained model", "number"),
    "core_facts": ("CORE on the world's facts", "number"),
    "core_facts_before": ("the same, untrained", "number"),
    "mixture": ("mixture", "text"),
    "conversations": ("conversations", "count"),
    "dropped": ("conversations dropped", "count"),
    "truncated": ("conversations truncated", "count"),
    "val_loss_first": ("held-out loss before (nats per token)", "number"),
    "val_loss_last": ("held-out loss after", "number"),
    "val_bpb_chat_first": ("held-out bits per byte of what is trained, before", "number"),
    "val_bpb_chat_last": ("the same, after", "number"),
    "task": ("task", "text"),
    "reward": ("reward", "text"),
    "questions": ("questions", "count"),
    "reward_first": ("held-out reward before", "percent"),
    "reward_last": ("held-out reward after", "percent"),
    "reward_greedy_first": ("greedy reward before", "percent"),
    "reward_greedy_last": ("greedy reward after", "percent"),
    "pass_at_k_first": ("pass@1…k before", "percents"),
    "pass_at_k_last": ("pass@1…k after", "percents"),
    "pass_at_k_unbiased_last": ("the same, unbiased", "percents"),
    "ended_heldout_last": ("held-out answers that came to an end", "percent"),
    "answer_tokens_first": ("tokens of a sampled answer, first step", "number"),
    "answer_tokens_last": ("the same, last step", "number"),
    "collapsed_share": ("groups that taught nothing (equal rewards)", "percent"),
    "idle_steps": ("steps in which all groups did", "count"),
    "logprob_diff": ("sampler against trainer, nats a token", "big"),
    "logprob_diff_max": ("the largest such difference", "big"),
    "ratio": ("importance ratio, 1 = on-policy", "number"),
    "peak_memory_gb": ("peak memory so far (GB)", "number"),
    "device_peak_gb": ("peak memory of a device so far (GB)", "number"),
}


def number(value: object, kind: str = "number") -> str:
    """A figure as text; None and NaN are "–"."""
    if isinstance(value, list):
        return " / ".join(number(v, kind.rstrip("s")) for v in value)
    if kind == "text" or isinstance(value, (str, bool)):
        return str(value)
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return "–"
    if kind == "percent":
        return f"{value:.1%}" if 0 < abs(value) < 0.1 else f"{value:.0%}"
    if kind == "count":
        return f"{value:,.0f}"
    if kind == "short":
        return f"{value:.2f}"
    if kind == "big":
        return f"{value:.2e}"
    return f"{value:.3f}" if abs(value) < 10 else f"{value:,.1f}"


def clean(text: object) -> str:
    """Text with control characters made visible, cut after MAX_TEXT characters."""
    shown = "".join(
        c if c.isprintable() or c == "\n" else "�" for c in str(text).replace("\r\n", "\n").replace("\t", " ")
    )
    return shown if len(shown) <= MAX_TEXT else shown[:MAX_TEXT] + "…"


def one_line(text: object) -> str:
    """Text with its line ends shown as ↵: an untrained model's endless lists would fill the page."""
    return str(text).strip("\n").replace("\n", " ↵ ")


def md_escape(text: object) -> str:
    """Text as literal Markdown, safe inside a table cell."""
    escaped = re.sub(r"([\\`*_{}\[\]<>#|~$!])", r"\\\1", clean(text).replace("&", "&amp;"))
    return escaped.strip("\n").replace("\n", "<br>")


@dataclass(frozen=True)
class Table:
    """Column names and rows of text. Columns named in `wide` hold prose, the others are numbers, set to the right."""

    columns: tuple[str, ...]
    rows: list[tuple[str, ...]]
    wide: tuple[str, ...] = ()

    def _left(self, index: int) -> bool:
        return index == 0 or self.columns[index] in self.wide

    def _repr_html_(self) -> str:
        def cell(tag: str, index: int, text: str) -> str:
            side = "left" if self._left(index) else "right"
            style = f"text-align:{side};white-space:pre-wrap;vertical-align:top"
            shown = INTERVAL.sub(r'<span style="white-space:nowrap">\1</span>', html.escape(clean(text)))
            return f'<{tag} style="{style}">{shown}</{tag}>'

        head = "".join(cell("th", i, name) for i, name in enumerate(self.columns))
        body = "".join(
            "<tr>" + "".join(cell("td", i, text) for i, text in enumerate(row)) + "</tr>\n" for row in self.rows
        )
        return f"<table><thead><tr>{head}</tr></thead><tbody>\n{body}</tbody></table>"

    def to_markdown(self) -> str:
        marks = [":---" if self._left(i) else "---:" for i in range(len(self.columns))]
        rows = [self.columns, None, *self.rows]
        return "\n".join("| " + " | ".join(marks if row is None else map(md_escape, row)) + " |" for row in rows)

    def __repr__(self) -> str:
        rows = [self.columns, *self.rows]
        widths = [max(len(row[i]) for row in rows) for i in range(len(self.columns))]
        return "\n".join("  ".join(text.ljust(w) for text, w in zip(row, widths, strict=True)) for row in rows)


def figures_table(figures: dict) -> Table:
    """The known single figures of a stage, in a fixed order; what a stage did not measure is left out."""
    flat = dict(figures)
    if isinstance(flat.get("params"), dict):
        flat["params"] = flat["params"].get("total")
    if flat.get("val_bpb_last") and flat.get("byte_bigram_bpb"):
        flat["bigram_ratio"] = flat["val_bpb_last"] / flat["byte_bigram_bpb"]
    rows = [
        (label, number(flat[name], kind)) for name, (label, kind) in FIGURES.items() if flat.get(name) not in (None, [])
    ]
    return Table(("figure", "value"), rows)


def core_table(tasks: dict[str, dict]) -> Table:
    """One row a CORE task (scores.core_table)."""
    from nanochat_lib.report import scores

    return scores.core_table(tasks)


def chat_table(stages: dict[str, dict]) -> Table:
    """One row a chat task, and ChatCORE (scores.chat_table)."""
    from nanochat_lib.report import scores

    return scores.chat_table(stages)


def summary_table(report: dict) -> Table:
    """Before and after, per model: CORE, each chat task, ChatCORE, and RL's held-out reward."""
    from nanochat_lib.report import scores

    stages = report["stages"]
    chat = (stages.get("eval_chat") or {}).get("stages", {})
    base, rl = stages.get("eval_base") or {}, stages.get("rl") or {}
    core = scores.with_interval(base["core"], base.get("core_interval"), "number") if "core" in base else NOT_EVALUATED
    rows = [("CORE", core, "", "")]
    if chat:
        rows += [(row[0], *row[3:6]) for row in chat_table({s: chat.get(s) for s in ("base", "sft", "rl")}).rows]
    else:
        rows.append(("ChatCORE", *[NOT_EVALUATED] * 3))
    if "reward_first" in rl:
        label = f"reward, {rl.get('task', 'RL task')}"
        rows.append((label, "", number(rl["reward_first"], "percent"), number(rl.get("reward_last"), "percent")))
    return Table(("Metric", "BASE", "SFT", "RL"), rows)


def time_table(report: dict) -> Table:
    """Seconds and cost of each stage, and their sum, stages that have not finished included."""
    unknown = report["machine"].get("price", "own machine")

    def row(title: str, part: dict, seconds: str) -> tuple[str, str, str]:
        return title, format_seconds(part[seconds]), usd(part.get("cost_usd"), unknown)

    rows = []
    for name in report["stages"]:
        title, stage = STAGE_TITLES[name], report["stages"][name]
        rows.append(row(title, stage, "seconds") if stage else (title, "not run", ""))
    rows.append(row("total", report, "total_seconds"))
    return Table(("stage", "time", "cost"), rows)


def usd(value: float | None, unknown: str = "–") -> str:
    return f"${value:,.2f}" if value is not None else unknown


def restarts_table(restarts: dict) -> Table:
    """What stops and restarts cost: steps computed a second time, and waiting for the restart."""
    lost, waiting = usd(restarts["lost_usd"]), usd(restarts["waiting_usd"])
    rows = [
        (f"{restarts['steps_twice']:,} steps computed twice", format_seconds(restarts["again_seconds"]), lost),
        (
            "waiting, from the last step to the restart", format_seconds(restarts["waiting_seconds"]),
            f"{waiting} if the machine stayed on" if restarts["waiting_usd"] else waiting,
        ),
        ("together", format_seconds(restarts["lost_seconds"]), ""),
    ]  # fmt: skip
    plural = "s" * (restarts["count"] > 1)
    return Table((f"lost to {restarts['count']} restart{plural}", "time", "cost"), rows)


def prediction_table(prediction: dict) -> Table:
    """What pretraining was expected to do, beside what it did."""
    from nanochat_lib.preflight import outcome

    return Table(("", "predicted", "actual", "ratio"), outcome.rows(prediction["predicted"], prediction["actual"]))


def continuations_table(samples: list[dict]) -> Table:
    """What the base model wrote after each prompt, or from nothing."""
    rows = [
        (s.get("prompt") or "(nothing)", one_line(s.get("text", "")))
        for s in samples
        if s.get("stage", "base") == "base"
    ]
    return Table(("prompt", "the base model continues"), rows, wide=("the base model continues",))


def answers_table(samples: list[dict]) -> Table:
    """The same questions to each model, side by side."""
    questions = list(dict.fromkeys(s["question"] for s in samples if "question" in s))
    rows = []
    for question in questions:
        mine = [s for s in samples if s.get("question") == question]
        answers = {s.get("stage"): one_line(s.get("answer", "")) for s in mine}
        rows.append(
            (question, *(answers.get(s, "–") for s in ("base", "sft", "rl")), str(mine[0].get("reference", "")))
        )
    columns = ("question", "base", "after SFT", "after RL", "reference")
    return Table(columns, rows, wide=columns)


def hourly_rate(machine: dict) -> str | None:
    """The price with its source; what to set where a rented machine's is not known; None for an own machine."""
    source = machine.get("price")
    if machine.get("usd_hour"):
        return f"${machine['usd_hour']:.2f}" + (f" ({source})" if source else "")
    return "unknown, set ops.usd_per_hour" if source == "price unknown" else None


def machine_table(machine: dict) -> Table:
    """The machine, in the words a person would use."""
    gib = 2**30
    known = (
        ("system", machine.get("system")),
        ("processor", machine.get("cpu")),
        ("cores", machine.get("cores")),
        ("memory", f"{machine['memory_bytes'] / gib:.1f} GiB" if machine.get("memory_bytes") else None),
        ("devices", f"{machine['devices']} × {machine.get('device_kind')}" if machine.get("devices") else None),
        ("hourly rate", hourly_rate(machine)),
        ("Python", machine.get("python")),
    )
    return Table(("machine", "value"), [(name, str(value)) for name, value in known if value is not None])
