"""The pre-flight's page: findings of the compiler and of the formulas as text."""

from __future__ import annotations

from nanochat_lib.hardware import GIB, PRICE_DATE
from nanochat_lib.progress import format_seconds

ESTIMATE = "estimate of the compiler's cost model, not a measurement"


def gib(size: float) -> str:
    return f"{size / GIB:.2f} GiB" if size >= GIB / 100 else f"{size / 2**20:.2f} MiB"


def table(rows: list[tuple], indent: str = "  ") -> str:
    """Rows of text in columns: the first to the left, the others to the right, long last cells as they are."""
    if not rows:
        return indent + "none"
    widths = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    lines = []
    for row in rows:
        cells = [str(row[0]).ljust(widths[0])] + [str(c).rjust(w) for c, w in zip(row[1:], widths[1:], strict=True)]
        lines.append(indent + "  ".join(cells).rstrip())
    return "\n".join(lines)


def page(report: dict) -> str:
    """Everything of a report, in the order in which one asks: does it fit, what does it do, how fast can it be."""
    parts = [headline(report), memory(report)]
    if report.get("matmuls") is not None:
        parts += [work(report), products(report), messages(report)]
    if report.get("tiles"):
        parts.append("attention tiles\n" + table(list(report["tiles"].items())))
    parts.append(bound(report))
    if report.get("profile"):
        parts.append(profile(report))
    return "\n\n".join(parts)


def headline(report: dict) -> str:
    source = "compiled ahead of time" if report["compiled"] else "by formulas, nothing compiled"
    lines = [
        f"pre-flight of {report['preset']}: {report['devices']} × {report['chip']}"
        f"{' on ' + str(report['hosts']) + ' hosts' if report.get('hosts', 1) > 1 else ''}, {source}",
        f"  {report['model']}",
        f"  {report['micro_batches']} micro-batches of {report['rows_per_device']} × {report['sequence_len']} tokens "
        f"on a device, {report['batch_tokens']:,} tokens a step",
        f"  fsdp {report['fsdp']}, attention {report['attention']}, products in {report['dtype']}",
    ]
    if report["compiled"]:
        lines.append(f"  compiled in {format_seconds(report['compile_seconds'])} on this machine")
    if report.get("note"):
        lines.append(f"  {report['note']}")
    return "\n".join(lines)


def memory(report: dict) -> str:
    verdict = "fits" if report["fits"] else "DOES NOT FIT"
    limit = report["hbm_bytes_limit"]
    lines = [f"memory per device: {gib(report['needed'])} of {gib(limit)} ({report['needed'] / limit:.0%}): {verdict}"]
    if report.get("memory"):
        lines.append(table([(name, gib(size)) for name, size in report["memory"].items()]))
    if report.get("buffers"):
        lines.append("  largest buffers")
        rows = [
            (b["shape"], gib(b["bytes"]), f"×{b.get('count', 1)}", short(b["where"])) for b in report["buffers"][:8]
        ]
        lines.append(table(rows, "    "))
    if not report["fits"]:
        lines.append("  change: " + report["advice"])
    lines.append("  by formulas")
    lines.append(table([(name, gib(size)) for name, size in report["memory_by_formula"].items()], "    "))
    return "\n".join(lines)


def short(where: str) -> str:
    return "/".join(part for part in where.split("/")[-2:] if part)[-60:]


def work(report: dict) -> str:
    rows = [
        ("FLOPs by nanochat's formula", f"{report['formula_flops']:.4e}"),
        ("products in the program, without attention", f"{report['matmul_flops']:.4e}"),
        ("attention, computed tiles", f"{report['attention_flops']:.4e}"),
        ("products of the optimiser", f"{report['optimizer_flops']:.4e}"),
        ("XLA's own count (a loop's body counted once)", f"{report['compiler_flops'] or 0:.4e}"),
        ("memory traffic", gib(report["hbm_bytes"])),
    ]
    return "a step on one device\n" + table(rows)


def products(report: dict, most: int = 14) -> str:
    rows = [("part", "m × k × n", "runs", "in", "out", "FLOPs", "padding")]
    for p in report["matmuls"][:most]:
        waste = "" if p["waste"] is None else f"{p['waste']:.1%}"
        size = f"{p['m']} × {p['k']} × {p['n']}"
        rows.append((p["scope"], size, p["runs"], " ".join(p["operands"]), p["result"], f"{p['flops']:.2e}", waste))
    rest = len(report["matmuls"]) - most
    end = [] if report["padding_waste"] is None else [
        f"  padding to the {report['matrix_unit']} × {report['matrix_unit']} matrix unit wastes "
        f"{report['padding_waste']:.2%} of its work, attention included"
    ]  # fmt: skip
    more = [f"  and {rest} smaller kinds"] if rest > 0 else []
    return "\n".join(["matrix products of a step", table(rows), *more, *end])


def messages(report: dict) -> str:
    rows = [(kind, f"{count:,} ×", gib(size)) for kind, (count, size) in sorted(report["collectives"].items())]
    return "messages between devices in a step, bytes received by one device\n" + table(rows)


def money(value: float | None) -> str:
    return "price unknown" if value is None else f"${value:,.0f}"


def cost(bound: dict) -> tuple[str, str]:
    if bound["usd_given"] is not None:
        return "cost at ops.usd_per_hour", money(bound["usd_given"])
    if bound["usd"] is None and bound["usd_spot"] is None:
        return "cost", "price unknown, set ops.usd_per_hour"
    return f"cost on demand / spot ({PRICE_DATE} prices)", f"{money(bound['usd'])} / {money(bound['usd_spot'])}"


def bound(report: dict) -> str:
    b = report["bound"]
    rows = [
        ("products at the chip's peak", f"{b['product_seconds']:.3f} s"),
        ("memory traffic at its bandwidth", f"{b['memory_seconds']:.3f} s"),
        ("a step takes at least", f"{b['step_seconds']:.3f} s"),
        ("so MFU, of the bfloat16 peak, is at most", f"{b['mfu']:.1%}"),
        ("tokens per second at most", f"{b['tokens_per_s']:,.0f}"),
        (f"{report['steps']:,} steps take at least", f"{b['hours']:.2f} h"),
        cost(b),
    ]
    return "roofline: the floor of a step, which no program can beat\n" + table(rows)


def profile(report: dict) -> str:
    p = report["profile"]
    rows = [("kind", "a micro-batch", "a step")]
    rows += [
        (kind, f"{p['micro'].get(kind, 0) / 1e6:.2f} M", f"{cycles / 1e6:.1f} M") for kind, cycles in p["step"].items()
    ]
    micro, step = sum(p["micro"].values()), sum(p["step"].values())
    rows.append(("together", f"{micro / 1e6:.2f} M", f"{step / 1e6:.1f} M"))
    lines = [f"cycles by kind ({ESTIMATE})", table(rows)]
    if p.get("seconds"):
        lines.append(
            f"  at {p['clock_hz'] / 1e9:.2f} GHz a step takes {p['seconds']:.3f} s, MFU {p['mfu']:.1%} ({ESTIMATE})"
        )
    lines.append(
        "  attention is the kernel's own count of FLOPs and bytes at the chip's rates, and what stands around it"
    )
    if p["uncosted"]:
        lines.append("  not costed by the compiler, with the bytes they move in a step")
        lines.append(table([(name, gib(size)) for name, size in p["uncosted"].items()], "    "))
    return "\n".join(lines)


def precision(report: dict) -> str:
    """Every product of the compiled step with the dtypes that go in and the one in which the sum comes out."""
    total = sum(p["flops"] for p in report["matmuls"]) or 1
    rows = [("part", "m × k × n", "runs", "operands", "sum comes out in", "precision", "share of FLOPs")]
    for p in report["matmuls"]:
        size = f"{p['batch']} × " * (p["batch"] > 1) + f"{p['m']} × {p['k']} × {p['n']}"
        share = f"{p['flops'] / total:.2%}"
        rows.append((p["scope"], size, p["runs"], " × ".join(p["operands"]), p["result"], p["precision"], share))
    by_dtype: dict[str, float] = {}
    for p in report["matmuls"]:
        key = " × ".join(p["operands"])
        by_dtype[key] = by_dtype.get(key, 0) + p["flops"] / total
    shares = ", ".join(f"{share:.1%} in {key}" for key, share in sorted(by_dtype.items(), key=lambda item: -item[1]))
    apart = report["attention"].partition(":")[0] in ("splash", "pallas", "cudnn")
    kernels = (
        f"\n  attention's own products run in a kernel ({report['attention']}), with float32 sums" if apart else ""
    )
    return f"matrix products of the compiled step of {report['preset']}\n{table(rows)}\n  {shares}{kernels}"
