"""The capstone's parameters: names, types and settings are checked before anything runs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nanochat_lib.course.grammar import read
from nanochat_lib.course.parameters import (
    PARAMETERS,
    check_parameters,
    injected_names,
    parse_overrides,
    project_root,
)
from nanochat_lib.errors import UserError

ROOT = Path(__file__).parents[2]
DEFAULTS = {"preset": "cpu", "run_dir": "", "overrides": "", "seed": 0, "corpus": "", "mine": ""}


def test_the_notebook_declares_exactly_these_parameters():
    cells = read((ROOT / "solutions" / "12_capstone.py").read_text(encoding="utf-8"), "12_capstone.py")
    (cell,) = [c for c in cells if "parameters" in c.tags]
    namespace: dict = {}
    exec(cell.source, namespace)
    assert {name: type(namespace[name]) for name in PARAMETERS} == PARAMETERS
    assert set(namespace) - {"__builtins__", "__annotations__"} == set(PARAMETERS)
    assert check_parameters(namespace).preset == "cpu"


def test_papermill_lists_every_parameter_with_its_help():
    from papermill.inspection import _infer_parameters
    from papermill.iorw import load_notebook_node

    found = _infer_parameters(load_notebook_node(str(ROOT / "chapters" / "12_capstone.ipynb")))
    assert {p.name: p.inferred_type_name for p in found} == {n: t.__name__ for n, t in PARAMETERS.items()}
    assert all(p.help for p in found)


def test_parameters_and_overrides_become_settings():
    config = check_parameters(DEFAULTS | {"seed": 3, "corpus": "texts", "overrides": "pretrain.steps=7 rl.lr_frac=0.1"})
    assert (config.seed, config.pretrain.steps, config.rl.lr_frac) == (3, 7, 0.1)
    assert config.data.corpus == str(project_root() / "texts")  # as seen from the course, not from chapters/
    assert check_parameters(DEFAULTS | {"seed": 3, "overrides": "seed=4"}).seed == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"preset": "cpu-smok"}, "unknown preset 'cpu-smok'; did you mean cpu-smoke"),
        ({"preset": 7}, "preset must be str, got 7 .int..*-r preset"),
        ({"seed": "1"}, "seed must be int, got '1' .str."),
        ({"seed": True}, "seed must be int, got True .bool."),
        ({"seed": 1.0}, "seed must be int"),
        ({"corpus": None}, "corpus must be str"),
        ({"overrides": "pretrain.stpes=3"}, "unknown setting 'pretrain.stpes'; did you mean pretrain.steps"),
        ({"overrides": "pretrain.steps=many"}, "pretrain.steps must be int"),
        ({"overrides": "pretrain.steps"}, "has no value"),
        ({"overrides": "data.corpus='my"}, "cannot be read"),
        ({"overrides": "preset=cpu"}, "unknown setting 'preset'"),
    ],
)
def test_bad_values_are_one_clear_line(changes, message):
    with pytest.raises(UserError, match=message) as error:
        check_parameters(DEFAULTS | changes)
    assert "\n" not in str(error.value)


def test_a_missing_parameter_is_named():
    with pytest.raises(UserError, match="parameter seed is missing"):
        check_parameters({name: value for name, value in DEFAULTS.items() if name != "seed"})


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ('# Parameters\npreset = "cpu"\nsede = 1\n', "unknown parameter 'sede'; did you mean seed"),
        ("# Parameters\nsteps = 5\n", r"unknown parameter 'steps'; .*overrides.*\.steps="),
        ("# Parameters\nzzzzz = 5\n", "unknown parameter 'zzzzz'; known: preset"),
    ],
)
def test_a_name_that_papermill_injected_must_exist(source, message):
    with pytest.raises(UserError, match=message):
        check_parameters(DEFAULTS | {"In": ["", 'preset: str = "cpu"', source, "check"]})


def test_only_the_newest_injected_cell_counts_and_a_learners_own_names_are_free():
    cells = ["", "# Parameters\nsede = 1", "# Parameters\nseed = 1", "x = 5", "# Parameters of my own plot\ncolour = 1"]
    assert injected_names(cells) == ["seed"]
    assert check_parameters(DEFAULTS | {"In": cells, "x": 5, "run": object()}).seed == 0


def test_override_values_may_hold_spaces():
    assert parse_overrides("data.corpus='my texts/a b' seed=1") == {"data.corpus": "my texts/a b", "seed": "1"}
    assert parse_overrides("  ") == {}


def test_every_folder_of_the_course_finds_its_root(tmp_path):
    (tmp_path / "course" / "chapters").mkdir(parents=True)
    (tmp_path / "course" / "nanochat_lib").mkdir()
    (tmp_path / "course" / "runs" / "cpu").mkdir(parents=True)
    root = (tmp_path / "course").resolve()
    for folder in ("", "chapters", "runs/cpu"):
        assert project_root(root / folder) == root
    assert project_root(tmp_path) == tmp_path.resolve()


def notebook(tmp_path: Path, *sources: str) -> Path:
    """A small notebook whose first cell holds the capstone's parameters."""
    cells = [
        {"cell_type": "code", "id": f"c{i}", "metadata": {"tags": ["parameters"]} if not i else {}, "source": source,
         "outputs": [], "execution_count": None}
        for i, source in enumerate(sources)
    ]  # fmt: skip
    kernel = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}
    path = tmp_path / "in.ipynb"
    path.write_text(json.dumps({"cells": cells, "metadata": kernel, "nbformat": 4, "nbformat_minor": 5}))
    return path


def test_papermill_stops_at_the_check(tmp_path, monkeypatch):
    """papermill itself only warns about a parameter that does not exist."""
    import papermill

    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    declared = "\n".join(f"{name} = {value!r}" for name, value in DEFAULTS.items())
    check = "from nanochat_lib.course.parameters import check_parameters\nconfig = check_parameters(globals())"
    path = notebook(tmp_path, declared, check, "open('ran', 'w')")
    with pytest.raises(papermill.PapermillExecutionError) as error:
        papermill.execute_notebook(
            str(path), str(tmp_path / "out.ipynb"), {"sede": 1}, cwd=str(tmp_path), kernel_name="python3",
            progress_bar=False,
        )  # fmt: skip
    assert error.value.ename == "UserError" and error.value.evalue == "unknown parameter 'sede'; did you mean seed?"
    assert not (tmp_path / "ran").exists()
