"""`nanochat run` without the run: what it hands to the notebook, and how it shows progress."""

import io
import shlex
import sys
import time

import pytest

from nanochat_lib import capstone, presets
from nanochat_lib.course.parameters import parse_overrides
from nanochat_lib.errors import UserError


def test_overrides_reach_the_notebook_unchanged():
    config = presets.override(
        presets.preset("cpu-smoke"),
        {
            "seed": 3,
            "data.corpus": "/tmp/my text's folder",
            "pretrain.optim.matrix_lr": 0.05,
            "evaluation.bigram": False,
        },
    )
    text = capstone.overrides(config)
    assert presets.override(presets.preset("cpu-smoke"), parse_overrides(text)) == config
    assert len(shlex.split(text)) == 4
    assert capstone.overrides(presets.preset("cpu")) == ""


def test_progress_lines_come_through_once(tmp_path, monkeypatch):
    out = io.StringIO()
    monkeypatch.setattr(sys, "stderr", out)
    monkeypatch.setattr(capstone, "POLL_SECONDS", 0.01)
    view = capstone.ProgressView(tmp_path / "progress")
    view.start()
    for line in ("pretrain: 1/5", "pretrain: 2/5", "sft: 1/9"):
        (tmp_path / "progress").write_text(line)
        time.sleep(0.2)
    view.stop()
    # In a log: the first line of every stage at once, the rest only every ten seconds.
    assert out.getvalue() == "pretrain: 1/5\nsft: 1/9\n"


def test_bad_input_is_found_before_a_kernel_starts(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "papermill", None)  # importing it would fail
    config = presets.override(presets.preset("cpu-smoke"), {"data.corpus": str(tmp_path / "nothing.txt")})
    with pytest.raises(UserError, match="nothing.txt"):
        capstone.run_capstone(config, tmp_path / "r")


def test_several_processes_are_told_to_start_the_stages(tmp_path, monkeypatch):
    for name, value in (("COORDINATOR", "127.0.0.1"), ("PROCESSES", "2"), ("PROCESS_ID", "1")):
        monkeypatch.setenv(f"NANOCHAT_{name}", value)
    with pytest.raises(UserError, match="one process, 2 were asked for; start the stages instead.*nanochat pretrain"):
        capstone.run_capstone(presets.preset("cpu-smoke"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_clone_without_chapters_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(capstone, "NOTEBOOK", tmp_path / "12_capstone.ipynb")
    with pytest.raises(UserError, match="12_capstone.ipynb is missing"):
        capstone.run_capstone(presets.preset("cpu-smoke"), tmp_path / "r")
