"""The second start of the same program compiles nothing, and nothing is kept where the user has said otherwise."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nanochat_lib import compile_cache

ROOT = Path(__file__).parents[1]
PROGRAM = """
import json
from nanochat_lib.compile_cache import keep_compiled
first, second = keep_compiled(), keep_compiled()
import jax, jax.numpy as jnp
found = {"hits": 0, "misses": 0}
def count(event, **_):
    for name in found:
        found[name] += event.endswith(f"compilation_cache/cache_{name}")
jax.monitoring.register_event_listener(count)
value = jax.jit(lambda x: jnp.tanh(x @ x.T).sum() / 7)(jnp.arange(12.0).reshape(4, 3) / 9).item()
same = first == second
report = {"value": value, "folder": str(first), "same": same, "set": jax.config.jax_compilation_cache_dir}
print(json.dumps(found | report))
"""


def start(base: Path, **environment: str) -> dict:
    unset = ("NANOCHAT_COMPILE_CACHE", "JAX_COMPILATION_CACHE_DIR")
    clean = {name: value for name, value in os.environ.items() if name not in unset}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True,
        env=clean | {"NANOCHAT_BASE_DIR": str(base), "JAX_PLATFORMS": "cpu"} | environment,
    )  # fmt: skip
    return json.loads(done.stdout)


def test_the_second_start_compiles_nothing_and_gives_the_same_bits(tmp_path):
    first, second = start(tmp_path), start(tmp_path)
    assert first["misses"] > 0 and first["hits"] == 0
    assert second["misses"] == 0 and second["hits"] == first["misses"]
    assert second["value"] == first["value"]
    assert first["same"] and first["folder"] == first["set"] and Path(first["set"]).parent == tmp_path / "compiled"


def test_a_damaged_program_is_compiled_again(tmp_path):
    first = start(tmp_path)
    for kept in Path(first["folder"]).glob("*-cache"):
        kept.write_bytes(kept.read_bytes()[:100])
    again = start(tmp_path)
    assert again["value"] == first["value"] and again["misses"] == first["misses"]


@pytest.mark.parametrize("said", [{"NANOCHAT_COMPILE_CACHE": "0"}, {"JAX_COMPILATION_CACHE_DIR": "theirs"}])
def test_the_user_has_the_last_word(tmp_path, said):
    said = {name: str(tmp_path / value) if value == "theirs" else value for name, value in said.items()}
    found = start(tmp_path / "base", **said)
    assert found["folder"] == "None" and found["set"] == said.get("JAX_COMPILATION_CACHE_DIR")
    assert not (tmp_path / "base").exists()


def test_a_folder_that_cannot_be_written_is_no_failure(tmp_path):
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert start(tmp_path / "file")["folder"] == "None"


def test_another_processor_has_another_folder(monkeypatch):
    here = compile_cache.folder()
    monkeypatch.setattr(compile_cache, "processor", lambda: "flags: other")
    assert compile_cache.folder() != here and compile_cache.folder().parent == here.parent
