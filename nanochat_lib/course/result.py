"""What a check found: one row a case, as text for terminals and as an HTML table that fits light and dark pages."""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape

from nanochat_lib.course.compare import Difference
from nanochat_lib.course.showing import words_html

PASSED, FAILED, NOT_ATTEMPTED, NOT_RUN = "passed", "failed", "not attempted", "not run"
MARKS = {PASSED: "✓", FAILED: "✗", NOT_ATTEMPTED: "·", NOT_RUN: "–"}
COLOURS = {PASSED: "#009E73", FAILED: "#D55E00", NOT_ATTEMPTED: "#8a8a8a", NOT_RUN: "#8a8a8a"}
SHADES = " ░▒▓█"


@dataclass
class Row:
    case: str
    kind: str  # example, property, reference, budget
    status: str
    called: str = ""  # name=value, … of the call
    expected: str = ""
    got: str = ""
    where: str = ""  # the first difference, or what is over budget, or the line that raised
    index: tuple[int, ...] | None = None
    step: str = ""  # first wrong intermediate
    cause: str = ""
    heat: list[list[float]] | None = None
    difference: Difference | None = None
    endless: bool = False  # stopped, because it ran too long

    def fail(self, **fields: str) -> None:
        self.status = FAILED
        for name, value in fields.items():
            setattr(self, name, value)

    def details(self, brief: bool = False) -> list[tuple[str, str]]:
        """(label, text) of a failed row, in reading order; brief: only what is wrong and the likely cause."""
        pairs = [
            ("called with", self.called),
            ("expected", self.expected),
            ("got", self.got),
            ("difference", self.where),
            ("first wrong step", self.step),
            ("likely cause", self.cause),
        ]
        if brief:
            pairs = pairs[-3:] if self.where and not self.where.startswith("raised at") else pairs[2:]
        return [(label, text) for label, text in pairs if text]


@dataclass
class Result:
    """Rows of one exercise. Shown already by `check`, so a notebook does not print it a second time."""

    exercise: str
    rows: list[Row]
    footer: list[str] = field(default_factory=list)  # what became of it: saved, or why not

    @property
    def status(self) -> str:
        found = {row.status for row in self.rows}
        return next(s for s in (NOT_ATTEMPTED, FAILED, PASSED, NOT_RUN) if s in found)

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.status == PASSED for row in self.rows)

    @property
    def headline(self) -> str:
        if self.status == NOT_ATTEMPTED:
            return f"{self.exercise}: not attempted yet"
        right = sum(row.status == PASSED for row in self.rows)
        if self.passed:
            return f"{self.exercise}: passed, {'its case' if right == 1 else f'all {right} cases'}"
        return f"{self.exercise}: {right} of {len(self.rows)} cases pass"

    @property
    def text(self) -> str:
        lines = [self.headline]
        if self.status == NOT_ATTEMPTED:
            return "\n".join([*lines, *self.footer])
        for row, brief in self._in_order():
            lines.append(f"  {MARKS[row.status]} {row.case}{_after(row)}")
            if row.status == FAILED:
                lines += [f"      {label + ':':<17} {text}" for label, text in row.details(brief)]
                lines += [] if brief else [f"      {line}" for line in _heat_text(row.heat)]
        return "\n".join([*lines, *self.footer])

    @property
    def html(self) -> str:
        parts = [
            f'<div style="margin:.3em 0"><b style="color:{COLOURS[self.status]}">{escape(self.headline)}</b></div>'
        ]
        if self.status != NOT_ATTEMPTED:
            rows = "".join(_row_html(row, brief) for row, brief in self._in_order())
            parts.append(f'<table style="border-collapse:collapse;margin:0">{rows}</table>')
        parts += [f'<div style="opacity:.75;margin-top:.3em">{escape(line)}</div>' for line in self.footer]
        return f'<div style="text-align:left">{"".join(parts)}</div>'

    def _in_order(self) -> list[tuple[Row, bool]]:
        """Rows with whether to be brief: the first failure is told in full, of later ones what is wrong and why."""
        first = next((row for row in self.rows if row.status == FAILED), None)
        return [(row, row is not first) for row in self.rows]

    def __repr__(self) -> str:
        return f"<check of {self.exercise}: {self.status}>"

    def _ipython_display_(self) -> None:
        return None


def _after(row: Row) -> str:
    if row.status != NOT_RUN:
        return ""
    return "  (measured once the results are right)" if row.kind == "budget" else "  (not run after an endless one)"


def _heat_text(heat: list[list[float]] | None) -> list[str]:
    """Differences as shades, dark where they are large; one value needs no picture."""
    if not heat or len(heat) * len(heat[0]) < 2:
        return []
    rows = ["".join(SHADES[0 if v <= 0 else min(1 + int(v * 4), 4)] for v in row) for row in heat]
    return ["where it differs (dark: most):", *[f"  |{row}|" for row in rows]]


def _heat_html(heat: list[list[float]] | None) -> str:
    if not heat or len(heat) * len(heat[0]) < 2:
        return ""
    size = "width:11px;height:11px;padding:0;border:1px solid rgba(128,128,128,.3)"
    body = "".join(
        "<tr>" + "".join(f'<td style="{size};background:rgba(213,94,0,{_alpha(v)})"></td>' for v in row) + "</tr>"
        for row in heat
    )
    label = "where it differs; the darker, the more"
    return f'<table style="border-collapse:collapse;margin:.4em 0" title="{label}" aria-label="{label}">{body}</table>'


def _alpha(value: float) -> str:
    return f"{0.15 + 0.85 * value:.2f}" if value > 0 else "0"


def _row_html(row: Row, brief: bool) -> str:
    cell = 'style="text-align:left;vertical-align:top;padding:.15em .6em;background:transparent"'
    mark = f'<td {cell}><b style="color:{COLOURS[row.status]}">{MARKS[row.status]}</b></td>'
    name = f"{escape(row.case)}{escape(_after(row))}"
    if row.status != FAILED:
        return f'<tr style="background:transparent">{mark}<td {cell}>{name}</td></tr>'
    lines = "".join(_detail_html(label, text) for label, text in row.details(brief))
    inner = (
        f'<table style="border-collapse:collapse;margin:.2em 0">{lines}</table>{"" if brief else _heat_html(row.heat)}'
    )
    return f'<tr style="background:transparent">{mark}<td {cell}>{name}{inner}</td></tr>'


def _detail_html(label: str, text: str) -> str:
    left = "text-align:left;vertical-align:top;padding:0 .8em 0 0;opacity:.75;white-space:nowrap"
    shown = f"<b>{words_html(text)}</b>" if label == "likely cause" else f"<code>{escape(text)}</code>"
    return (
        f'<tr style="background:transparent"><td style="{left}">{escape(label)}</td>'
        f'<td style="text-align:left;padding:0;white-space:pre-wrap">{shown}</td></tr>'
    )
