"""The frame of every page that grading writes: one file, no scripts, nothing from the network, light and dark."""

from __future__ import annotations

from html import escape

STYLE = """
:root { color-scheme: light dark; --line: #8885; --soft: #8882; --good: #009e73; --bad: #d55e00; --dim: #888; }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem } h2 { font-size: 1.15rem; margin-top: 2rem } h3 { font-size: 1rem; margin: 1.2rem 0 .2rem }
table { border-collapse: collapse; margin: .5rem 0 } th, td { text-align: left; padding: .2rem .8rem .2rem 0;
  vertical-align: top; border-bottom: 1px solid var(--line) } td.n, th.n { text-align: right }
code, pre { font: .9em ui-monospace, monospace; background: var(--soft); padding: 0 .2em; white-space: pre-wrap }
.good { color: var(--good) } .bad { color: var(--bad) } .dim { color: var(--dim) } ul { padding-left: 1.2rem }
figure { margin: 1rem 0 } figcaption { color: var(--dim) }
"""


def page(title: str, body: str) -> str:
    """A whole HTML document; `body` is HTML already."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>\n<body>\n{body}\n</body></html>\n"
    )


def table(head: list[str], rows: list[list[object]], numbers: tuple[int, ...] = ()) -> str:
    """A table; a cell that starts with `<` and was made by this room is HTML (see `raw`), all else is text."""
    mark = lambda i: ' class="n"' if i in numbers else ""  # noqa: E731
    top = "".join(f"<th{mark(i)}>{escape(text)}</th>" for i, text in enumerate(head))
    lines = ("".join(f"<td{mark(i)}>{text(value)}</td>" for i, value in enumerate(row)) for row in rows)
    return f"<table><tr>{top}</tr>{''.join(f'<tr>{line}</tr>' for line in lines)}</table>"


class Raw(str):
    """HTML that needs no escaping."""


def text(value: object) -> str:
    return value if isinstance(value, Raw) else escape(f"{value:g}" if isinstance(value, float) else str(value))


def bars(counts: list[int], labels: list[str], title: str) -> str:
    """A bar chart as SVG, with its numbers in words for those who cannot see it."""
    most, width = max(counts, default=1) or 1, 44
    parts = []
    for i, count in enumerate(counts):
        height = 120 * count / most
        middle, label = f'x="{i * width + width / 2}" text-anchor="middle" fill="currentColor"', escape(labels[i])
        box = f'x="{i * width + 4}" y="{130 - height:.1f}" width="{width - 8}" height="{height:.1f}"'
        parts.append(
            f'<rect {box} fill="#0072b2"/>'
            f'<text {middle} y="{124 - height:.1f}" font-size="12">{count or ""}</text>'
            f'<text {middle} y="148" font-size="11">{label}</text>'
        )
    words = ", ".join(f"{label}: {count}" for label, count in zip(labels, counts, strict=True) if count)
    size = f"0 -10 {width * len(counts)} 165"  # the number above the tallest bar, too
    return (
        f'<figure><svg viewBox="{size}" width="100%" style="max-width:{width * len(counts)}px" role="img" '
        f'aria-label="{escape(title)}: {escape(words)}">{"".join(parts)}</svg>'
        f"<figcaption>{escape(title)}</figcaption></figure>"
    )
