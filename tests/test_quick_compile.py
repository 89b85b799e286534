"""Fast mode compiles quickly, nothing else does, and the numbers stay."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat_lib import quick_compile

PROGRAM = """
import json, os
import jax, jax.numpy as jnp  # before the course, as chapters import them
import nanochat_lib.course
x = jnp.arange(12.0).reshape(4, 3) / 9
value = jax.jit(lambda x: jnp.tanh(x @ x.T).sum() / 7)(x).item()
print(json.dumps({"flags": os.environ.get("XLA_FLAGS", "").split(), "value": value}))
"""


@pytest.fixture(autouse=True)
def flags(monkeypatch):
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("XLA_FLAGS", "")


def start(fast: str) -> dict:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=Path(__file__).parents[1], capture_output=True, text=True, check=True,
        env=os.environ | {"COURSE_FAST": fast, "NANOCHAT_COMPILE_CACHE": "0"},
    )  # fmt: skip
    return json.loads(done.stdout)


def test_fast_mode_compiles_quickly_and_right():
    fast, full = start("1"), start("")
    assert quick_compile.LEVEL in fast["flags"] and full["flags"] == []
    assert fast["value"] == pytest.approx(full["value"], rel=1e-6)


def test_what_the_user_has_set_stays(monkeypatch):
    mine = "--xla_backend_optimization_level=2 --xla_force_host_platform_device_count=8"
    monkeypatch.setenv("XLA_FLAGS", mine)
    assert quick_compile.LEVEL not in quick_compile.compile_quickly()
    assert os.environ["XLA_FLAGS"].startswith(mine) and os.environ["XLA_FLAGS"].count("optimization_level") == 1
    once = os.environ["XLA_FLAGS"]
    assert quick_compile.compile_quickly() == [] and os.environ["XLA_FLAGS"] == once


@pytest.mark.parametrize("platform", ["", "tpu", "cuda,cpu"])
def test_other_chips_are_left_alone(monkeypatch, platform):
    monkeypatch.setenv("JAX_PLATFORMS", platform)
    assert quick_compile.compile_quickly() == [] and os.environ["XLA_FLAGS"] == ""


@pytest.mark.parametrize(("version", "known"), [("0.10.2", True), ("0.11.2", False), ("0.100.0", False)])
def test_an_option_goes_only_to_a_version_that_knows_it(monkeypatch, version, known):
    monkeypatch.setattr(quick_compile, "version", lambda _: version)
    assert (quick_compile.OLD_EMITTERS in quick_compile.compile_quickly()) is known
