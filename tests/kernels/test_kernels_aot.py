"""The TPU kernels compiled ahead of time for chips that are not here: they fit, and store no matrix of scores."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.aot,
    pytest.mark.skipif(
        importlib.util.find_spec("libtpu") is None, reason="libtpu is not installed: the tpu extra has it"
    ),
]

ROOT = Path(__file__).parents[2]
SCORES_MIB = 32 * 16 * 2048 * 2048 * 4 / 2**20  # what one float32 score matrix for all rows and heads would take


def compile_all(topology: str, cases: list[dict]) -> list[dict]:
    environment = {"JAX_PLATFORMS": "cpu", "TPU_SKIP_MDS_QUERY": "1", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1"}
    done = subprocess.run(
        [sys.executable, ROOT / "tests/kernels/compile_for_tpu.py", topology, json.dumps(cases)],
        cwd=ROOT, env=os.environ | environment | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    results = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert len(results) == len(cases), done.stderr[-2000:]
    return results


def case(backend: str, d: int, window: int, dtype: str = "bfloat16", t: int = 2048) -> dict:
    return {"backend": backend, "d": d, "window": window, "dtype": dtype, "t": t}


def check(cases: list[dict], results: list[dict]) -> None:
    for asked, found in zip(cases, results, strict=True):
        print(asked, found)
    for asked, found in zip(cases, results, strict=True):
        assert "error" not in found, f"{asked}: {found['error']}"
        # Ours is three kernels, splash two: forward, and one backward for all gradients.
        assert found["kernels"] == (3 if asked["backend"] == "pallas" else 2), asked
        scores = SCORES_MIB / (2 if asked["dtype"] == "bfloat16" else 1)
        assert found["temp_mib"] < 0.6 * scores, asked  # a few arrays of queries and gradients, no scores


@pytest.mark.parametrize("backend", ["pallas", "splash"])
@pytest.mark.parametrize(("chip", "topology"), [("v5e", "v5e:2x4"), ("v6e", "v6e:2x4")])
def test_forward_and_backward_compile_for_the_chip(chip, topology, backend):
    name = f"splash:{chip}" if backend == "splash" else backend
    cases = [case(name, d, window) for d in (128, 256) for window in (512, 1024, 2048)]
    cases += [
        case(name, 64, 2048),
        case(name, 256, 2048, "float32"),  # the most fast memory
        case(name, 128, 100, t=1000),  # no whole tiles
        case(name, 80, 128, t=128),
    ]
    check(cases, compile_all(topology, cases))


@pytest.mark.parametrize(("chip", "topology"), [("v5p", "v5p:2x2x2"), ("v4", "v4:2x2x1")])
def test_the_largest_tiles_compile_for_the_older_chips(chip, topology):
    cases = [case(f"splash:{chip}", d, 2048, dtype) for d, dtype in ((128, "bfloat16"), (256, "float32"))]
    check(cases, compile_all(topology, cases))


def test_the_recorded_page_of_chapter_03_is_what_the_compiler_says():
    page = json.loads((ROOT / "assets" / "attention_v6e.json").read_text(encoding="utf-8"))
    names = ["tiles of 1024, 6 heads of 256", "tiles of 2048, 12 heads of 128"]
    done = subprocess.run(
        [sys.executable, ROOT / "scripts/record_attention.py", "--print", *names],
        cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert found, done.stderr[-2000:]
    assert found[0][names[0]]["kernels"] == page["lines"][names[0]]["kernels"] == 3
    assert "fast memory" in found[0][names[1]]["error"] and "fast memory" in page["lines"][names[1]]["error"]
