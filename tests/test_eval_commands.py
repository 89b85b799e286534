"""`nanochat eval`: which evaluation an option asks for, and mistakes that are one line."""

import json
import types

import pytest

from nanochat_lib import evaluations, pipeline, presets
from nanochat_lib.cli import main
from nanochat_lib.errors import UserError
from nanochat_lib.presets import preset, to_dict


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run's folder; what is measured of it is noted, not computed."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(to_dict(preset("cpu-smoke"))))
    measured = []

    def measure(self, kind, wanted):
        measured.append((kind, wanted))
        return {"sft": {"step": 3, "chatcore": None, "tasks": {}}}

    monkeypatch.setattr(pipeline.Run, "measure", measure)
    return types.SimpleNamespace(folder=str(folder), measured=measured)


@pytest.mark.parametrize(
    ("options", "kinds", "fields"),
    [
        ("--only core,bpb", ["base"], {"only": ("core", "bpb")}),
        ("--context 64 --model sft,rl", ["base"], {"context": 64, "models": ("sft", "rl")}),
        ("--samples 4 --tasks a,b", ["chat"], {"samples": 4, "tasks": ("a", "b"), "temperature": None}),
        ("--max-per-task 9", ["base", "chat"], {"max_per_task": 9, "only": ()}),
        ("--model sft --stage chat", ["chat"], {"models": ("sft",)}),
    ],
)
def test_options_choose_the_evaluation(run, options, kinds, fields):
    assert main(["eval", "--run-dir", run.folder, *options.split()]) == 0
    assert [kind for kind, _ in run.measured] == kinds
    for _, wanted in run.measured:
        assert {name: getattr(wanted, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ("--only cor", "--only 'cor' is unknown; did you mean core?"),
        ("--only core,", "--only '' is unknown"),
        ("--context 64 --stage chat", "--context is a choice of the base evaluation"),
        ("--samples 3 --stage base", "--samples is a choice of the chat evaluation"),
        ("--only core --tasks a", "--only is a choice of the base evaluation"),
        ("--samples 0", "--samples 0 must be at least 1"),
        ("--temperature nan", "--temperature nan must be"),
    ],
)
def test_mistakes_are_one_line_and_nothing_is_measured(run, capsys, options, words):
    assert main(["eval", "--run-dir", run.folder, *options.split()]) == 2
    err = capsys.readouterr().err
    assert words in err and err.count("\n") == 1 and not run.measured


def test_a_folder_without_a_run_is_left_alone(tmp_path, capsys):
    for words in (["--only", "core"], ["bpb", "book.txt"]):
        assert main(["eval", *words, "--run-dir", str(tmp_path / "none")]) == 2
        assert "holds no run" in capsys.readouterr().err and not (tmp_path / "none").exists()


def test_the_real_bundle_is_asked_for_by_its_command(tmp_path, monkeypatch):
    monkeypatch.setenv("NANOCHAT_BASE_DIR", str(tmp_path))
    large = types.SimpleNamespace(config=presets.preset("gpu-8-d24"))
    with pytest.raises(UserError) as e:
        evaluations.bundle_of(large)
    assert str(tmp_path / "eval_bundle") in str(e.value) and "`nanochat data get core`" in str(e.value)
    assert evaluations.standard_parts(large) == ("core", "bpb", "sample")
    (tmp_path / "eval_bundle").mkdir()
    (tmp_path / "eval_bundle" / "core.yaml").touch()
    assert evaluations.bundle_of(large) == tmp_path / "eval_bundle"
    small = types.SimpleNamespace(config=presets.preset("cpu"))
    assert evaluations.standard_parts(small) == ("core",) and evaluations.has_own_bundle(small)


def test_unknown_models_are_named(tmp_path):
    opened = pipeline.open_run(tmp_path / "r", presets.preset("cpu-smoke"))
    try:
        with pytest.raises(UserError, match="unknown model 'rll'"):
            opened.measure("chat", evaluations.Wanted(models=("rll",)))
        with pytest.raises(UserError, match="holds no trained model"):
            opened.measure("chat", evaluations.Wanted())
    finally:
        opened.close()
