"""Pre-flight: what a training step will need and can reach on a machine that is not here.

For a TPU the real step is compiled ahead of time for the real chip (the extra `tpu` brings its compiler; no TPU is
needed); for other machines the same page comes from formulas.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from nanochat_lib.compute import loss_chunks
from nanochat_lib.errors import UserError
from nanochat_lib.hardware import CHIPS, TOPOLOGIES, Chip, compute_dtype, cpu_chip, find_chip
from nanochat_lib.preflight import analytic, page
from nanochat_lib.presets import RunConfig, override, to_dict
from nanochat_lib.sizing import count_params, flops_per_token

EXTRA = "the TPU's compiler is missing: pip install -e '.[tpu]' in the project's folder (no TPU is needed)"


def chip_of(config: RunConfig) -> Chip:
    """The chip a preset is meant for."""
    name = config.target.chip
    if config.target.kind == "cpu":
        return cpu_chip()
    name = "h100" if name == "any" else name
    chip = next((chip for chip in CHIPS if chip.name == name), None) or find_chip(name)
    if chip is None:
        raise UserError(f"pre-flight: chip {name!r} is unknown; known: {', '.join(c.name for c in CHIPS)}")
    return chip


def preflight(config: RunConfig, *, compile_it: bool = True, quiet: bool = False) -> dict:
    """The report of one configuration: plain data, see page.py for its parts."""
    kind = config.target.kind
    report = base_report(config)
    if kind == "gpu" or not compile_it:
        return report | {
            "note": "no compiler for this chip here; memory and time are estimates" if kind == "gpu" else ""
        }
    if kind == "tpu" and importlib.util.find_spec("libtpu") is None:
        return report | {"note": EXTRA + "; until then these are estimates"}
    if kind == "tpu" and (config.target.chip, config.target.devices) not in TOPOLOGIES:
        known = ", ".join(f"{devices} × {chip}" for chip, devices in TOPOLOGIES)
        raise UserError(f"pre-flight: no slice of {config.target.devices} × {config.target.chip}; known: {known}")
    return merge(config, report, compile_apart(config, quiet))


def base_report(config: RunConfig) -> dict:
    """What follows from the configuration alone."""
    chip, model, horizon, target = chip_of(config), config.gpt_config(), config.horizon(), config.target
    dtype = compute_dtype(config.compute.dtype, target.kind)
    width = 2 if dtype == "bfloat16" else 4
    rows, length = config.pretrain.device_rows, model.sequence_len
    chunks = loss_chunks(config.compute.loss_chunks, target.kind, rows, length, model.padded_vocab_size)
    by_formula = analytic.memory(config, width, chunks)
    limit = chip.hbm_bytes or machine_memory()
    needed = sum(by_formula.values())
    report = {
        "preset": config.preset, "chip": chip.name, "devices": target.devices, "compiled": False, "dtype": dtype,
        "hosts": TOPOLOGIES[target.chip, target.devices].hosts if (target.chip, target.devices) in TOPOLOGIES else 1,
        "model": describe(config), "sequence_len": length, "rows_per_device": rows, "fsdp": config.compute.fsdp,
        "micro_batches": max(horizon.batch_tokens // (rows * length * target.devices), 1),
        "batch_tokens": horizon.batch_tokens, "steps": horizon.steps, "attention": config.compute.attention,
        "matrix_unit": chip.matrix_unit, "memory_by_formula": by_formula, "needed": needed, "hbm_bytes_limit": limit,
        "fits": needed <= limit, "advice": advice(config), "formula_flops": analytic.step_flops(config),
    }  # fmt: skip
    times = analytic.seconds(config, chip, width) if "bfloat16" in chip.peak else cpu_seconds(config, chip)
    return report | {"bound": roofline(config, chip, times["products"], times["memory"])}


def machine_memory() -> int:
    from nanochat_lib.hardware import memory

    return memory()[0] or 2**63


def cpu_seconds(config: RunConfig, chip: Chip) -> dict[str, float]:
    return {"products": analytic.step_flops(config) / chip.peak["float32"], "memory": 0.0}


def describe(config: RunConfig) -> str:
    model, groups = config.gpt_config(), count_params(config.gpt_config())
    heads = f"{model.n_head} × {model.head_dim} heads" + (
        f", {model.n_kv_head} for keys and values" if model.n_kv_head < model.n_head else ""
    )
    return (
        f"{model.n_layer} layers × {model.n_embd}, {heads}, vocabulary {model.padded_vocab_size:,}, recipe "
        f"{model.recipe}: {groups['total']:,} parameters, {flops_per_token(model):.4e} FLOPs a token"
    )


def advice(config: RunConfig) -> str:
    """What to change when a step does not fit, the cheapest first."""
    ideas = []
    if config.pretrain.device_rows > 1:
        ideas.append(f"-s pretrain.device_rows={config.pretrain.device_rows // 2}")
    if config.compute.remat != "blocks":
        ideas.append("-s compute.remat=blocks")
    if config.compute.fsdp < config.target.devices:
        ideas.append(f"-s compute.fsdp={config.target.devices}")
    if config.compute.masters == "float32":
        ideas.append("-s compute.masters=bfloat16")
    return ", then ".join(ideas) or "a smaller model or more devices"


def roofline(config: RunConfig, chip: Chip, products: float, memory: float) -> dict:
    """The floor of a step: products and memory traffic overlap at best, so the slower one decides."""
    seconds, horizon, devices = max(products, memory), config.horizon(), config.target.devices
    peak = chip.peak.get("bfloat16") or chip.peak["float32"]
    hours = seconds * horizon.steps / 3600
    price = lambda usd: None if usd is None else usd * devices * hours  # noqa: E731
    return {
        "product_seconds": products, "memory_seconds": memory, "step_seconds": seconds,
        "mfu": analytic.step_flops(config) / peak / seconds, "tokens_per_s": horizon.batch_tokens / seconds,
        "hours": hours, "usd": price(chip.usd_hour), "usd_spot": price(chip.usd_hour_spot),
        "usd_given": config.ops.usd_per_hour * hours if config.ops.usd_per_hour > 0 else None,
    }  # fmt: skip


def compile_apart(config: RunConfig, quiet: bool) -> dict:
    """compile_step.py's findings, from a process of its own, with a line now and then while it works."""
    from nanochat_lib.preflight.compile_step import environment

    kind, devices = config.target.kind, config.target.devices
    with tempfile.TemporaryDirectory() as folder:
        output, log = Path(folder) / "findings.json", Path(folder) / "log.txt"
        with open(log, "wb") as errors:
            child = subprocess.Popen(
                [sys.executable, "-m", "nanochat_lib.preflight.compile_step", str(output)],
                stdin=subprocess.PIPE, stdout=errors, stderr=errors, env=os.environ | environment(kind, devices),
            )  # fmt: skip
            try:
                child.stdin.write(json.dumps(to_dict(config)).encode())
                child.stdin.close()
                wait(child, f"compiling {config.preset} for {devices} × {config.target.chip}", quiet)
            finally:
                if child.poll() is None:
                    child.kill()
                    child.wait()
        if not output.exists():
            lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
            raise RuntimeError(
                f"the compiling process ended with {child.returncode}: {lines[-1] if lines else 'silence'}"
            )
        return json.loads(output.read_text(encoding="utf-8"))


def wait(child: subprocess.Popen, what: str, quiet: bool) -> None:
    began, told = time.monotonic(), 0.0
    while child.poll() is None:
        time.sleep(0.2)
        passed = time.monotonic() - began
        if not quiet and passed - told >= 10:
            told = passed
            print(f"{what}: {passed:.0f} s", file=sys.stderr)


def merge(config: RunConfig, report: dict, found: dict) -> dict:
    """The formulas' report with the compiler's findings in place of its estimates."""
    chip = chip_of(config)
    report = report | found | {"compiled": True}
    report["fits"] = found["fits"] and found["needed"] <= report["hbm_bytes_limit"]
    if not found["fits"]:
        return report
    model, micro = config.gpt_config(), found["micro_batches"]
    unit = chip.matrix_unit
    attention_flops = attention_padded = attention_bytes = attention_seconds = 0.0
    if config.target.kind == "tpu" and found["attention"].startswith("splash"):
        from nanochat_lib.kernels.tiles import describe as describe_tiles
        from nanochat_lib.preflight.attention_cost import attention_cost

        cost = attention_cost(model, chip, config.pretrain.device_rows)
        attention_flops, attention_padded = cost.flops * micro, cost.padded_flops * micro
        attention_bytes, attention_seconds = cost.hbm_bytes * micro, cost.seconds(chip)
        report["tiles"] = describe_tiles(chip.name, model.head_dim, model.sequence_len, model.windows)
    done = sum(p["flops"] for p in found["matmuls"])
    spent = sum(p["flops"] / (1 - p["waste"]) for p in found["matmuls"] if p["waste"] is not None)
    report["attention_flops"] = attention_flops
    report["padding_waste"] = 1 - (done + attention_flops) / (spent + attention_padded) if unit else None
    peak = chip.peak.get("bfloat16") or chip.peak["float32"]
    products = (spent + attention_padded if unit else done + attention_flops) / peak
    memory = (found["hbm_bytes"] + attention_bytes) / chip.bandwidth if chip.bandwidth else 0.0
    report["bound"] = roofline(config, chip, products, memory)
    if cycles := found.get("cycles"):
        report["profile"] = profile(config, chip, cycles, attention_seconds, micro)
    return report


def profile(config: RunConfig, chip: Chip, cycles: dict, attention_seconds: float, micro_batches: int) -> dict:
    """Estimated cycles by kind, the attention kernels' own estimate added."""
    kernel = attention_seconds * chip.clock_hz if chip.clock_hz else 0.0
    micro = dict(cycles["micro"]) | {"attention": cycles["micro"].get("attention", 0) + kernel}
    step = dict(cycles["step"]) | {"attention": cycles["step"].get("attention", 0) + kernel * micro_batches}
    found = {
        "micro": micro,
        "step": dict(sorted(step.items(), key=lambda item: -item[1])),
        "uncosted": cycles["uncosted"],
    }
    if chip.clock_hz:
        seconds = sum(step.values()) / chip.clock_hz
        found |= {"clock_hz": chip.clock_hz, "seconds": seconds}
        found["mfu"] = analytic.step_flops(config) / chip.peak["bfloat16"] / seconds
    return found


def search(config: RunConfig, quiet: bool = False) -> Iterator[tuple[int, dict]]:
    """(rows, report) of every micro-batch tried on the way to the largest that fits: powers of two that divide the
    step's batch, upwards until one does not fit. Ends without a result when a single row is too much."""
    horizon, length, devices = config.horizon(), config.model.sequence_len, config.target.devices
    rows = 1
    while horizon.batch_tokens % (rows * length * devices) == 0:
        tried = override(config, {"pretrain.device_rows": rows})
        report = preflight(tried, quiet=quiet)
        yield rows, report
        if not report["fits"]:
            return
        rows *= 2


def print_preflight(
    config: RunConfig,
    *,
    as_json: bool = False,
    profile: bool = False,
    precision: bool = False,
    search_rows: bool = False,
    run_dir: str | None = None,
    save: bool = False,
) -> int:
    """Prints the page; 0 when the step fits, 1 when it does not.

    With `run_dir`, what its run was expected to do stands beside what it did; `save` keeps this page's figures there.
    """
    from nanochat_lib.metrics import MetricsLog
    from nanochat_lib.preflight import outcome

    if save and (not run_dir or search_rows):
        raise UserError("preflight --save keeps the page's figures in a run's folder; name it with --run-dir")
    if search_rows:
        return print_search(config, as_json)
    if precision and config.target.kind == "gpu":
        raise UserError(
            "preflight --precision reads the compiled step, and no compiler for a GPU is here; use a tpu or cpu preset"
        )
    report = preflight(config, quiet=as_json)
    if precision and not report["compiled"]:
        raise UserError(f"preflight --precision reads the compiled step; {EXTRA}")
    if precision and not report.get("matmuls"):
        raise UserError(f"the step does not fit, so there is none to read; change: {report['advice']}")
    if save:
        outcome.save(run_dir, config, report)
    compared = None
    if run_dir:
        records = MetricsLog(Path(run_dir) / "metrics.jsonl").read("pretrain")
        compared = outcome.compare(run_dir, records, outcome.prediction(config, report))
    if as_json:
        print(json.dumps(report | ({"outcome": compared} if compared else {}), indent=1))
    elif precision:
        print(page.precision(report))
    else:
        shown = report if profile else {name: value for name, value in report.items() if name != "profile"}
        print(page.page(shown))
    if compared and not as_json:
        heads = [("", "predicted", "actual", "ratio")]
        print(f"\n{outcome.title(*compared.values())}")
        print(page.table(heads + outcome.rows(*compared.values())))
    return 0 if report["fits"] else 1


def print_search(config: RunConfig, as_json: bool) -> int:
    best, tried = 0, []
    for rows, report in search(config, quiet=as_json):
        tried.append({"rows": rows, "needed": report["needed"], "fits": report["fits"], "bound": report["bound"]})
        best = rows if report["fits"] else best
        if not as_json:
            state = "fits" if report["fits"] else "does not fit"
            size = f"{page.gib(report['needed'])} of {page.gib(report['hbm_bytes_limit'])}"
            print(f"{rows:4d} rows a device: {size}, {state}")
    if as_json:
        print(json.dumps({"largest": best, "tried": tried}, indent=1))
    elif best:
        print(f"largest micro-batch that fits: {best} rows; use it with -s pretrain.device_rows={best}")
    else:
        one = replace(config, pretrain=replace(config.pretrain, device_rows=1))
        print(f"not even one row fits; change: {advice(one)}")
    return 0 if best else 1
