"""report.md and report.html out of the report's data. The page is one file: style and figures inside, no scripts."""

from __future__ import annotations

import html

from nanochat_lib.progress import format_seconds
from nanochat_lib.report import bars, certificate, plots, scores, tables
from nanochat_lib.report.tables import NOT_EVALUATED, STAGE_TITLES, md_escape, number

TITLE = "nanochat training report"
HALF_WIDTH = 5.0  # inches: two figures stand side by side

STYLE = """
:root { color-scheme: light dark; --ink: #222; --paper: #fff; --faint: #6b6b6b; --line: #ddd; --tile: #f5f6f8; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e4e4e4; --paper: #17191c; --faint: #a0a0a0; --line: #383b40; --tile: #202327; }
}
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.5rem 1rem 4rem; max-width: 62rem; color: var(--ink); background: var(--paper);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", sans-serif; }
h1 { font-size: 1.6rem; margin: 0 0 .2rem; } h2 { font-size: 1.2rem; margin: 2.4rem 0 .6rem; }
p { max-width: 46rem; margin: .4rem 0; } .faint { color: var(--faint); }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(11rem, 1fr)); gap: .7rem; margin: 1.2rem 0; }
.tile { background: var(--tile); border-radius: .5rem; padding: .7rem .9rem; }
.tile b { display: block; font-size: 1.3rem; font-weight: 600; white-space: nowrap; }
.tile span { color: var(--faint); font-size: .85rem; }
.figures { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(26rem, 100%), 1fr)); gap: 1rem; }
figure { margin: 0; min-width: 0; } svg { width: 100%; height: auto; display: block; }
.scroll { overflow-x: auto; } table { border-collapse: collapse; font-size: .9rem; margin: .6rem 0; }
th, td { padding: .25rem .7rem; border-bottom: 1px solid var(--line); overflow-wrap: break-word; max-width: 26rem; }
th { color: var(--faint); font-weight: 600; white-space: nowrap !important; }
.pair { display: flex; flex-wrap: wrap; gap: 0 2.5rem; align-items: flex-start; }
.note { border-left: 4px solid #E69F00; padding: .3rem .8rem; background: var(--tile); }
.tokens { font: .85rem/1.9 ui-monospace, Menlo, Consolas, monospace; white-space: pre-wrap; overflow-wrap: anywhere; }
.tokens i { font-style: normal; border-radius: .2rem; padding: .1rem 0; }
.t0 { background: #56B4E966; } .t1 { background: #E69F0066; } .t2 { background: #009E7366; }
.t3 { background: #CC79A766; }
.certificate { border: 3px double var(--faint); border-radius: .5rem; padding: 1.2rem 1.6rem; margin: 3rem 0;
  break-before: page; break-inside: avoid; }
.certificate h2 { margin-top: 0; } .certificate .name { font-size: 1.3rem; border-bottom: 1px solid var(--faint);
  min-height: 2rem; outline: none; } .certificate .name:empty::before { content: attr(data-empty);
  color: var(--faint); font-size: 1rem; } @media print { .certificate .name:empty::before { content: ""; } }
"""


def headline(report: dict) -> list[tuple[str, str]]:
    """The few figures one looks for first: (value, what it is)."""
    stages = {name: stage or {} for name, stage in report["stages"].items()}
    pretrain, base, rl = stages["pretrain"], stages["eval_base"], stages["rl"]
    chat = stages["eval_chat"].get("stages", {})

    def change(before: object, after: object, kind: str) -> str:
        return f"{number(before, kind)} → {number(after, kind)}"

    found = [(format_seconds(report["total_seconds"]), "all stages together")]
    if "val_bpb_last" in pretrain:
        ratio = pretrain["val_bpb_last"] / pretrain["byte_bigram_bpb"] if pretrain.get("byte_bigram_bpb") else None
        note = f"bits per byte, {ratio:.2f} × a byte-bigram model" if ratio else "bits per byte"
        found.append((change(pretrain.get("val_bpb_first"), pretrain["val_bpb_last"], "short"), note))
    if "core" in base:
        found.append((change(base.get("core_before"), base["core"], "short"), "CORE, untrained → trained"))
    if chat.get("base") and chat.get("sft"):
        found.append(
            (change(chat["base"].get("chatcore"), chat["sft"].get("chatcore"), "short"), "ChatCORE, base → SFT")
        )
    if "reward_first" in rl:
        found.append((change(rl["reward_first"], rl.get("reward_last"), "percent"), "held-out reward, SFT → RL"))
    if report.get("mine"):
        count, _, label = share_line(report["mine"]).partition(" exercise ")
        found.append((count, f"exercise {label}"))
    if report["cost_usd"] is not None:
        found.append((tables.usd(report["cost_usd"]), "cost of the rented machine"))
    if lost := report.get("restarts"):
        count = f"{lost['count']} restart{'s' * (lost['count'] > 1)}"
        found.append((format_seconds(lost["lost_seconds"]), f"lost to {count}"))
    return found


def _notes(report: dict) -> list[str]:
    notes = []
    if report["missing"]:
        names = ", ".join(STAGE_TITLES[name] for name in report["missing"])
        notes.append(f"Not run yet, so {NOT_EVALUATED}: {names}. Start the run again to go on.")
    base = report["stages"].get("eval_base") or {}
    return notes + scores.warnings(base.get("core_tasks") or {}) + report["problems"]


def _subtitle(report: dict) -> str:
    seed = "" if report["seed"] is None else f", seed {report['seed']}"
    return f"preset {report['preset']}{seed}"


def to_markdown(report: dict) -> str:
    """The report as Markdown, under the headings of nanochat's own report so that the two can be compared."""
    stages = report["stages"]
    parts = [f"# {TITLE}", md_escape(_subtitle(report))]
    parts += [f"> {md_escape(note)}" for note in _notes(report)]
    parts += ["## Summary", tables.summary_table(report).to_markdown()]
    parts += [f"Total time of the stages: {format_seconds(report['total_seconds'])}"]
    parts += ["## Environment", tables.machine_table(report["machine"]).to_markdown()]
    for name, stage in stages.items():
        parts.append(f"## {STAGE_TITLES[name]}")
        if stage is None:
            parts.append(NOT_EVALUATED)
            continue
        parts += [table.to_markdown() for table in _stage_tables(name, stage, report["samples"]) if table.rows]
    if report.get("mine"):
        parts += ["## Your functions", *map(md_escape, mine_lines(report["mine"]))]
    parts += ["## Time and cost", tables.time_table(report).to_markdown()]
    if report.get("restarts"):
        parts += ["## Restarts", tables.restarts_table(report["restarts"]).to_markdown()]
    if report.get("prediction"):
        parts += ["## Predicted and actual", md_escape(_prediction_title(report))]
        parts += [tables.prediction_table(report["prediction"]).to_markdown()]
    if report.get("certificate"):
        parts += _certificate_markdown(report)
    return "\n\n".join(parts) + "\n"


def _certificate_markdown(report: dict) -> list[str]:
    found = report["certificate"]
    shown = [certificate.goals_table(found), certificate.chapters_table(found)]
    return [
        "## Certificate", *map(md_escape, certificate.lines(found)),
        *(table.to_markdown() for table in shown if table.rows), md_escape(certificate.DISCLAIMER),
    ]  # fmt: skip


def _certificate_html(report: dict) -> str:
    """A page of its own when printed; the name is written into it by whoever prints it."""
    found = report["certificate"]
    empty = "click here and write your name, then print"
    inner = [
        "<h2>Certificate: nanochat in JAX</h2>",
        f'<p class="name" contenteditable="plaintext-only" aria-label="name" data-empty="{empty}"></p>',
        *(f"<p>{html.escape(line)}</p>" for line in certificate.lines(found)),
        _table(certificate.goals_table(found)),
        _table(certificate.chapters_table(found)) if found["course"] else "",
        f'<p class="faint">{html.escape(_subtitle(report))}. {certificate.DISCLAIMER}</p>',
    ]
    return f'<section class="certificate">{"".join(inner)}</section>'


def _prediction_title(report: dict) -> str:
    from nanochat_lib.preflight import outcome

    return f"Pretraining, {outcome.title(**report['prediction'])}."


def share_line(mine: dict) -> str:
    """ "3 of 40 exercise functions in this pipeline are yours: 8 %"."""
    share = f"{100 * mine['share']:.0f} %"
    return f"{len(mine['used'])} of {mine['functions']} exercise functions in this pipeline are yours: {share}"


def mine_lines(mine: dict) -> list[str]:
    """Which functions of the pipeline were the learner's, and which fell back to the library's, with the reason."""
    lines = [f"{share_line(mine)}."]
    if mine["used"]:
        lines.append(f"Yours: {', '.join(mine['used'])}.")
    if mine["refused"]:
        lines.append("The library's: " + "; ".join(f"{name} ({why})" for name, why in mine["refused"].items()) + ".")
    return lines


def _stage_tables(name: str, stage: dict, samples: list[dict]) -> list[tables.Table]:
    found = [tables.figures_table(stage)]
    if name == "pretrain":
        found.append(tables.continuations_table([s for s in samples if "prompt" in s and "kind" not in s]))
    if name == "eval_base":
        found.append(tables.core_table(stage.get("core_tasks") or {}))
        found.append(tables.continuations_table([s for s in samples if "prompt" in s and "kind" in s]))
    if name == "eval_chat":
        models = stage.get("stages") or {}
        found += [tables.chat_table(models), scores.pass_table(models), tables.answers_table(samples)]
    return found


def _stage_figures(name: str, stage: dict, records: list[dict]) -> list:
    half = HALF_WIDTH
    if name == "pretrain":
        return [
            plots.loss_curve(records, "pretrain", width=half),
            plots.bpb_curve(records, stage.get("byte_bigram_bpb"), stage.get("byte_bigram_bpb_world"), width=half),
            plots.schedule_plot(records, "pretrain", width=half),
            plots.throughput_plot(records, width=half),
        ]
    if name == "eval_base":
        return [bars.core_bars(stage.get("core_tasks") or {})]
    if name in ("mid", "sft"):
        return [plots.loss_curve(records, name, width=half), plots.schedule_plot(records, name, width=half)]
    if name == "rl":
        return [plots.reward_curve(records, width=half), plots.schedule_plot(records, "rl", width=half)]
    if name == "eval_chat":
        return [bars.before_after_bars(stage.get("stages") or {})]
    return []


def to_html(report: dict, records: list[dict]) -> str:
    """The report as one HTML page. `records` are the run's metrics, for the curves."""
    stages = report["stages"]
    tiles = "".join(
        f'<div class="tile"><b>{html.escape(value)}</b><span>{html.escape(label)}</span></div>'
        for value, label in headline(report)
    )
    body = [
        f"<h1>{TITLE}</h1>",
        f'<p class="faint">{html.escape(_subtitle(report))}</p>',
        f'<div class="tiles">{tiles}</div>',
    ]
    body += [f'<p class="note">{html.escape(note)}</p>' for note in _notes(report)]
    body += ["<h2>Before and after</h2>", _table(tables.summary_table(report))]
    for name, stage in stages.items():
        title = STAGE_TITLES[name]
        if stage is None:
            partial = _svgs(name, {}, records) if any(r["stage"] == name for r in records) else ""
            body.append(f'<h2>{title}</h2><p class="faint">{NOT_EVALUATED}</p>{partial}')
            continue
        body.append(f"<h2>{title}</h2>")
        body.append(_svgs(name, stage, records))
        if name == "tokenizer":
            body += [_tokens(pieces) for pieces in stage.get("examples") or []]
        body += [_table(table) for table in _stage_tables(name, stage, report["samples"]) if table.rows]
    if report.get("mine"):
        body += ["<h2>Your functions</h2>", *(f"<p>{html.escape(line)}</p>" for line in mine_lines(report["mine"]))]
    times = {STAGE_TITLES[name]: (stage or {}).get("seconds") for name, stage in stages.items()}
    body += ["<h2>Time, cost and machine</h2>", _figures([plots.to_svg(bars.time_bars(times), "time")])]
    body.append(
        f'<div class="pair">{_table(tables.time_table(report))}{_table(tables.machine_table(report["machine"]))}</div>'
    )
    if report.get("restarts"):
        body += ["<h2>Restarts</h2>", _table(tables.restarts_table(report["restarts"]))]
    if report.get("prediction"):
        title = html.escape(_prediction_title(report))
        table = _table(tables.prediction_table(report["prediction"]))
        body += [f'<h2>Predicted and actual</h2><p class="faint">{title}</p>', table]
    if report.get("certificate"):
        body.append(_certificate_html(report))
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"  # nothing in this page may load or run
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{TITLE}: {html.escape(_subtitle(report))}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(part for part in body if part)
        + "\n</body>\n</html>\n"
    )


def _svgs(name: str, stage: dict, records: list[dict]) -> str:
    figures = _stage_figures(name, stage, records)
    return _figures([plots.to_svg(figure, f"{name}{i}") for i, figure in enumerate(figures)])


def _figures(svgs: list[str]) -> str:
    inner = "".join(f"<figure>{svg}</figure>" for svg in svgs)
    return f'<div class="figures">{inner}</div>' if inner else ""


def _table(table: tables.Table) -> str:
    return f'<div class="scroll">{table._repr_html_()}</div>'


def _tokens(pieces: list) -> str:
    """A text with neighbouring tokens in different tints."""
    spans = "".join(
        f'<i class="t{i % 4}">{html.escape(tables.clean(piece)).replace(chr(10), "↵" + chr(10))}</i>'
        for i, piece in enumerate(pieces)
    )
    return f'<p class="tokens">{spans}</p>'
