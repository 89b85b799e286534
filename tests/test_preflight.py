"""The pre-flight page: what fits, what it costs, what to change; and the real step compiled for a TPU."""

import importlib.util
import io
import json
import subprocess
import sys
from dataclasses import replace

import pytest

from nanochat_lib import cli, preflight
from nanochat_lib.errors import UserError
from nanochat_lib.hardware import CHIPS, GIB
from nanochat_lib.preflight import analytic, compile_step, page
from nanochat_lib.preflight.attention_cost import attention_cost
from nanochat_lib.preflight.compile_step import exhausted
from nanochat_lib.presets import PRESETS, Target, override, preset, to_dict
from nanochat_lib.sizing import GPTConfig, count_params, flops_per_token

CHIP = {chip.name: chip for chip in CHIPS}


@pytest.mark.parametrize("name", [name for name, config in PRESETS.items() if config.target.kind != "cpu"])
def test_every_large_preset_has_a_page_by_formulas(name):
    config = preset(name)
    report = preflight.preflight(config, compile_it=False)
    text = page.page(report)
    assert report["fits"] and report["needed"] == pytest.approx(sum(report["memory_by_formula"].values()))
    assert name in text and "memory per device" in text and f"{report['bound']['mfu']:.1%}" in text
    tokens = config.horizon().batch_tokens
    assert report["formula_flops"] * config.target.devices == pytest.approx(
        flops_per_token(config.gpt_config()) * tokens
    )


def test_state_and_gradients_are_counted_once_over_the_devices():
    config = preset("tpu-v6e-8-d24-h128")
    found = analytic.memory(config, 2, 1)
    groups = count_params(config.gpt_config())
    assert found["master weights"] * 8 == groups["total"] * 4 == 1_384_124_976 * 4
    assert found["working copy"] == groups["total"] * 2
    assert found["gradients"] == (679_481_856 + 50_331_648 + 48) * 4
    sharded = analytic.memory(replace(config, compute=replace(config.compute, fsdp=8)), 2, 1)
    assert sharded["working copy"] * 8 == found["working copy"] and sharded["gradients"] * 8 == found["gradients"]
    halved = analytic.memory(replace(config, compute=replace(config.compute, masters="bfloat16")), 2, 1)
    assert halved["master weights"] * 2 == found["master weights"]


def test_the_step_is_compiled_for_the_target_that_was_asked_for(tmp_path, monkeypatch):
    asked = replace(preset("cpu"), target=Target("tpu", "v5e", 8))
    monkeypatch.setattr(compile_step, "findings", to_dict)
    monkeypatch.setattr(sys, "stdin", io.StringIO(json.dumps(to_dict(asked))))
    compile_step.main(str(tmp_path / "found.json"))
    assert json.loads((tmp_path / "found.json").read_text()) == json.loads(json.dumps(to_dict(asked)))


def test_what_does_not_fit_says_so_and_what_to_change(capsys):
    config = override(preset("gpu-8-d24"), {"pretrain.device_rows": 64})
    assert preflight.print_preflight(config) == 1
    text = capsys.readouterr().out
    assert "DOES NOT FIT" in text and "-s pretrain.device_rows=32, then -s compute.remat=blocks" in text


def test_the_command_line_ends_with_1_when_it_does_not_fit(capsys):
    assert cli.main(["preflight", "--preset", "gpu-8-d24", "-s", "pretrain.device_rows=64", "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["fits"] is False
    assert cli.main(["preflight", "--preset", "gpu-8-d24", "--json"]) == 0
    assert cli.main(["preflight", "--preset", "gpu-8-d24", "--precision"]) == 2
    assert "no compiler for a GPU" in capsys.readouterr().err


def test_search_doubles_until_it_no_longer_fits(capsys):
    assert preflight.print_preflight(preset("gpu-8-d24"), search_rows=True) == 0
    lines = capsys.readouterr().out.splitlines()
    rows = [int(line.split()[0]) for line in lines[:-1]]
    assert rows == [2**i for i in range(len(rows))] and "does not fit" in lines[-2]
    assert (
        lines[-1] == f"largest micro-batch that fits: {rows[-2]} rows; use it with -s pretrain.device_rows={rows[-2]}"
    )


def test_fp8_shortens_the_blocks_products_only():
    config = preset("gpu-8-d24")
    plain = analytic.product_seconds(config, CHIP["h100"])
    quick = analytic.product_seconds(replace(config, compute=replace(config.compute, fp8=True)), CHIP["h100"])
    saved = 6 * 679_478_976 * config.horizon().batch_tokens / 8 * (1 / 989e12 - 1 / 1979e12)
    assert plain - quick == pytest.approx(saved, rel=1e-6)
    assert analytic.step_flops(config) == plain * 989e12


def test_attention_counts_whole_tiles_and_wide_heads_fill_the_matrix_unit():
    narrow, wide = (GPTConfig(2048, 512, 1, heads, heads, 1536, window_pattern="L") for heads in (12, 6))
    a, b = attention_cost(narrow, CHIP["v6e"], 2), attention_cost(wide, CHIP["v6e"], 2)
    scores = 3 * 1024 * 1024  # of four tiles of 1024 × 1024 a causal mask leaves three
    assert a.flops == b.flops == 2 * 12 * 128 * 2 * scores * 7
    assert a.padded_flops == 2 * a.flops and b.padded_flops == b.flops
    assert attention_cost(narrow, CHIP["v5e"], 2).padded_flops == a.flops  # a unit of 128


def test_the_compilers_complaint_about_memory_is_read():
    found = exhausted(
        "RESOURCE_EXHAUSTED: Ran out of memory in memory space hbm. Used 40.10G of 31.25G hbm. Exceeded by 8.85G.\n"
        '  1. Size: 3.00G\n     Operator: op_name="jit(step)/while/body/mlp/dot_general" \n'
        "     Shape: bf16[8,2048,6144]{2,1,0:T(8,128)(2,1)}\n"
    )
    assert found["fits"] is False and found["needed"] == pytest.approx(40.10 * GIB)
    assert found["buffers"] == [
        {"bytes": 3 * GIB, "shape": "bf16[8,2048,6144]", "where": "jit(step)/while/body/mlp/dot_general"}
    ]


def test_a_slice_that_does_not_exist_is_a_user_error(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    config = preset("tpu-v6e-8-d24")
    with pytest.raises(UserError, match="no slice of 7 × v6e"):
        preflight.preflight(replace(config, target=replace(config.target, devices=7)))


def test_the_cpus_step_is_compiled_and_every_product_is_listed(capsys, monkeypatch):
    small = {"model.depth": 1, "pretrain.device_rows": 2, "pretrain.batch_tokens": 512, "pretrain.steps": 2}
    config = override(preset("cpu-smoke"), small)
    report = preflight.preflight(config, quiet=True)
    monkeypatch.setattr(preflight, "preflight", lambda *_, **__: report)  # compiled once is enough
    assert preflight.print_preflight(config, precision=True) == 0
    text = capsys.readouterr().out
    assert "100.0% in f32 × f32" in text and "optimizer" in text and "mlp" in text
    model = config.gpt_config()
    attention = 12 * model.n_embd * model.n_layer * model.sequence_len
    useful = (flops_per_token(model) - attention) * 512
    # The tiled attention computes less than the formula's full window, and makes its scores again going backward.
    assert useful < report["matmul_flops"] < useful + 2 * attention * 512


TPU = """
import json, sys
from nanochat_lib import preflight
from nanochat_lib.presets import override, preset
full = preset(sys.argv[1])
batch = 2 * 2048 * full.pretrain.device_rows * full.target.devices
small = {"model.depth": 2, "model.n_embd": 768, "pretrain.steps": 10, "pretrain.batch_tokens": batch}
config = override(full, small)
json.dump(preflight.preflight(config, quiet=True), sys.stdout)
"""


@pytest.mark.aot
@pytest.mark.parametrize("name", ["tpu-v6e-8-d24", "tpu-v5e-8-d20", "tpu-v5p-8-d24", "tpu-v6e-64-d32"])
def test_the_real_step_compiles_for_a_tpu(name):
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the TPU's compiler (extra tpu) is not installed")
    done = subprocess.run([sys.executable, "-c", TPU, name], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    text = page.page(report)
    assert report["compiled"] and report["fits"]
    assert report["aliased"] > 0.95 * report["memory"]["arguments"]  # the state is updated in place
    assert report["padding_waste"] < 0.02 or name == "tpu-v5p-8-d24"
    assert report["attention"].startswith("splash:") and "attention tiles" in text
    # No T × T scores outside of the kernel, and the state is updated in place.
    assert not [b for b in report["buffers"] if b["shape"].count("2048,2048")]
    model = override(preset(name), {"model.depth": 2, "model.n_embd": 768}).gpt_config()
    attention = sum(12 * model.n_embd * min(w, model.sequence_len) for w in model.windows)
    tokens = report["batch_tokens"] / report["devices"]
    assert report["matmul_flops"] == pytest.approx((flops_per_token(model) - attention) * tokens, rel=0.01)
    # On a v5p's cube the compiler sums gradients everywhere and cuts them afterwards; elsewhere it scatters the sums.
    assert report["collectives"]["all-reduce" if name == "tpu-v5p-8-d24" else "reduce-scatter"][0] > 0
    assert report["profile"]["step"]["matmul"] > 0
    dtypes = {tuple(p["operands"]) for p in report["matmuls"] if p["scope"] != "optimizer"}
    assert dtypes == {("bf16", "bf16")}
