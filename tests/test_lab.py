"""JupyterLab as a learner first meets it: start page, defaults, pairing; and the files for Binder and containers.

scripts/lab.sh runs here against a pretended Python that writes down how it was started; JupyterLab's own code then
says what such a start means.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
OVERRIDES = "labconfig/default_setting_overrides.json"
THEMES, NEWS = "@jupyterlab/apputils-extension:themes", "@jupyterlab/apputils-extension:notification"
WIDGET = "application/vnd.jupyter.widget-view+json"
SCHEMAS = Path(sys.prefix, "share/jupyter/lab/schemas")


def start_lab(folder: Path, *args: str, **env: str) -> dict[str, str]:
    """Runs scripts/lab.sh of a copy of the project that is already set up; returns the environment and "ARGS".

    "CALLED" has the calls of Python before that, one a line.
    """
    shutil.copytree(ROOT / "scripts", folder / "scripts")
    shutil.copy(ROOT / "pyproject.toml", folder)
    (folder / ".venv/bin").mkdir(parents=True)
    python = folder / ".venv/bin/python"
    python.write_text(
        "#!/bin/bash\n"
        'if [ "$1" = -c ]; then echo 3.12; exit; fi\n'
        'if [ "$2" != jupyterlab ]; then echo "$*" >>"${0%/*}/called"; exit; fi\n'
        'env -0; printf "ARGS=%s\\0" "$*"\n'
    )
    python.chmod(0o755)
    read = f"cd '{folder}' && cat pyproject.toml scripts/setup.sh scripts/versions.txt | cksum"
    checksum = subprocess.run(["bash", "-c", read], capture_output=True, text=True, check=True).stdout.strip()
    (folder / ".venv/nanochat-setup").write_text(f"checksum={checksum}\nroot={folder}\nextras=\n")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "NANOCHAT_NEWEST"))}
    done = subprocess.run(
        ["bash", str(folder / "scripts/lab.sh"), *args], env=clean | env, capture_output=True, text=True, check=True
    )
    called = folder / ".venv/bin/called"
    started = dict(item.split("=", 1) for item in done.stdout.split("\0") if item)
    return started | {"CALLED": called.read_text() if called.exists() else ""}


@pytest.fixture
def themes(tmp_path: Path, monkeypatch):
    """Asks JupyterLab's server for the theme settings: {"schema": with the defaults, "settings": the user's own}."""
    if not SCHEMAS.is_dir():
        pytest.skip("JupyterLab is not installed in this environment")
    from jupyterlab_server.settings_utils import get_settings

    for name in [name for name in os.environ if name.startswith("JUPYTER")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("JUPYTER_CONFIG_DIR", str(tmp_path / "nobody"))
    user = tmp_path / "user"
    user.mkdir()

    def ask(config_path: str = "") -> dict:
        monkeypatch.setenv("JUPYTER_CONFIG_PATH", config_path)
        found, warnings = get_settings(str(user), str(SCHEMAS), str(user), schema_name=THEMES)
        assert warnings == [None]
        return found

    return ask


def test_lab_opens_at_a_chapter_that_is_there(tmp_path: Path) -> None:
    started = start_lab(tmp_path / "a b", "--no-browser")
    page = re.fullmatch(r"-m jupyterlab --LabApp.default_url=/lab/tree/(\S+) --no-browser", started["ARGS"])[1]
    assert page == min(str(p.relative_to(ROOT)) for p in (ROOT / "chapters").glob("*.ipynb"))
    kernel = json.loads((ROOT / page).read_text(encoding="utf-8"))["metadata"]["kernelspec"]
    assert kernel["name"] == "python3" and started["JUPYTER_PREFER_ENV_PATH"] == "1"  # the kernel of .venv, not ~'s
    assert started["PATH"].split(":")[0] == str(tmp_path / "a b/.venv/bin")


def test_lab_starts_with_the_courses_defaults_and_the_users_own_settings_win(tmp_path: Path, themes) -> None:
    path = start_lab(tmp_path / "project")["JUPYTER_CONFIG_PATH"]
    assert themes()["schema"]["properties"]["adaptive-theme"]["default"] is False  # else the file could go
    assert themes(path)["schema"]["properties"]["adaptive-theme"]["default"] is True
    mine = tmp_path / "user/@jupyterlab/apputils-extension/themes.jupyterlab-settings"
    mine.parent.mkdir(parents=True)
    mine.write_text('{"adaptive-theme": false}')
    assert themes(path)["settings"] == {"adaptive-theme": False}


def test_every_default_is_a_setting_of_the_installed_jupyterlab() -> None:
    """JupyterLab says nothing about a name that it does not know."""
    if not SCHEMAS.is_dir():
        pytest.skip("JupyterLab is not installed in this environment")
    from jsonschema import Draft7Validator

    chosen = json.loads((ROOT / "scripts/lab" / OVERRIDES).read_text(encoding="utf-8"))
    assert chosen[NEWS]["fetchNews"] == "false"  # nothing is fetched, and nobody is asked about it
    for plugin, values in chosen.items():
        schema = json.loads((SCHEMAS / f"{plugin.replace(':', '/')}.json").read_text(encoding="utf-8"))
        assert set(values) <= set(schema["properties"]), plugin
        Draft7Validator(schema).validate(values)


def test_the_users_config_path_comes_first(tmp_path: Path) -> None:
    started = start_lab(tmp_path / "project", JUPYTER_CONFIG_PATH="/mine")
    assert started["JUPYTER_CONFIG_PATH"] == f"/mine:{tmp_path}/project/scripts/lab"
    assert "JUPYTERLAB_SETTINGS_DIR" not in started and "JUPYTER_CONFIG_DIR" not in started


def test_a_notebook_changed_elsewhere_still_opens_with_its_change(tmp_path: Path) -> None:
    """Newer than the .py beside it, jupytext would refuse to open it: lab.sh writes the .py anew, and only that."""
    chapters = tmp_path / "project/chapters"
    chapters.mkdir(parents=True)
    for name in ("a", "b"):
        (chapters / f"{name}.py").write_text("")
        (chapters / f"{name}.ipynb").write_text("{}")
    os.utime(chapters / "a.py", (1000, 1000))
    os.utime(chapters / "b.ipynb", (1000, 1000))
    started = start_lab(tmp_path / "project")
    assert started["CALLED"].splitlines() == ["-m jupytext --quiet --to py:percent chapters/a.ipynb"]
    assert started["ARGS"].startswith("-m jupyterlab ")


def test_a_save_in_lab_writes_the_chapter_as_py_and_never_a_solution(tmp_path: Path) -> None:
    from jupyter_server.services.contents.largefilemanager import LargeFileManager
    from jupytext.sync_contentsmanager import build_sync_jupytext_contents_manager_class
    from nbformat import NotebookNode
    from traitlets.config.loader import PyFileConfigLoader

    for folder in ("chapters", "solutions"):
        (tmp_path / folder).mkdir()
        shutil.copy(ROOT / folder / "00_start.ipynb", tmp_path / folder)
        shutil.copy(ROOT / folder / "00_start.py", tmp_path / folder)
    shutil.copy(ROOT / "jupytext.toml", tmp_path)
    shutil.copy(ROOT / "chapters/jupytext.toml", tmp_path / "chapters")
    before = (tmp_path / "solutions/00_start.py").read_bytes()
    config = PyFileConfigLoader("jupyter_server_config.py", str(ROOT / "scripts/lab")).load_config()
    manager = build_sync_jupytext_contents_manager_class(LargeFileManager)(root_dir=str(tmp_path), config=config)
    picture = {"output_type": "display_data", "metadata": {}, "data": {"image/png": "", "text/plain": "picture"}}
    slider = {
        "output_type": "display_data",
        "metadata": {},
        "data": {WIDGET: {"model_id": "1"}, "text/plain": "slider"},
    }
    for folder in ("chapters", "solutions"):
        model = manager.get(f"{folder}/00_start.ipynb")
        model["content"]["cells"][1]["source"] += "\nlearners_line = 1"
        model["content"]["cells"][1]["outputs"] = [NotebookNode(slider), NotebookNode(picture)]
        manager.save(model, f"{folder}/00_start.ipynb")
    assert "\nlearners_line = 1\n" in (tmp_path / "chapters/00_start.py").read_text(encoding="utf-8")
    saved = json.loads((tmp_path / "chapters/00_start.ipynb").read_text(encoding="utf-8"))["cells"][1]["outputs"]
    assert [output["data"]["text/plain"] for output in saved] == [["picture"]]  # a control would be dead on reopening
    assert (tmp_path / "solutions/00_start.py").read_bytes() == before
    files = {p.name for p in (tmp_path / "solutions").iterdir() if p.is_file()}
    assert files == {"00_start.ipynb", "00_start.py"}


# --- Binder, JupyterHub, containers -----------------------------------------------------------------------------------


def test_binder_finds_its_files_in_the_root() -> None:
    """With a folder binder/ or .binder/, repo2docker would not look at environment.yml in the root."""
    assert not (ROOT / "binder").exists() and not (ROOT / ".binder").exists() and not (ROOT / "Dockerfile").exists()
    python = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"][0]
    assert re.fullmatch(r"python=3\.\d+", python)  # repo2docker understands one version, not a range
    assert os.access(ROOT / "postBuild", os.X_OK)


def test_post_build_gives_the_image_the_defaults_of_lab_sh(tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/python").write_text(f"#!/bin/bash\necho '{tmp_path}/env'\n")
    (tmp_path / "bin/python").chmod(0o755)
    env = {"PATH": f"{tmp_path}/bin:/usr/bin:/bin", "HOME": str(tmp_path)}
    for _ in range(2):
        subprocess.run([str(ROOT / "postBuild")], cwd=tmp_path, env=env, check=True)
    for name in (OVERRIDES, "jupyter_server_config.py"):
        assert (tmp_path / "env/etc/jupyter" / name).read_bytes() == (ROOT / "scripts/lab" / name).read_bytes()
    assert (ROOT / "postBuild").read_text().startswith("#!/usr/bin/env bash\n# ")


def test_the_devcontainer_calls_the_same_set_up() -> None:
    folder = ROOT / ".devcontainer"
    container = json.loads((folder / "devcontainer.json").read_text(encoding="utf-8"))
    command, script = container["postCreateCommand"].split()
    assert command == "bash" and script == "scripts/setup.sh" and (ROOT / script).is_file()
    interpreter = container["customizations"]["vscode"]["settings"]["python.defaultInterpreterPath"]
    assert interpreter == "${containerWorkspaceFolder}/.venv/bin/python"
    recipe = (folder / container["build"]["dockerfile"]).read_text(encoding="utf-8")
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"][0]
    tested = (ROOT / "scripts/versions.txt").read_text(encoding="utf-8")
    for python in (re.search(r"^FROM python:([\d.]+)$", recipe, re.MULTILINE)[1], environment.removeprefix("python=")):
        assert f"python_version == '{python}' and sys_platform == 'linux'\n" in tested
    assert f"useradd --create-home --shell /bin/bash {container['remoteUser']}\n" in recipe
    assert "pip install" not in recipe + json.dumps(container)  # one list of dependencies
