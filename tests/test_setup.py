"""Set-up: scripts/setup.sh against a pretended Python, and the one list of dependencies.

Nothing is installed here. The pretended Python records what is asked of it and fails as the real ones do, in a PATH
that holds only the tools named in TOOLS, so the scripts cannot reach for anything else.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
SCRIPTS = ["setup", "capstone", "test", "lab"]
TOOLS = "awk bash cat cksum cut df dirname grep mkdir mv rm sed sleep tail tee touch tr".split()

FAKE_PYTHON = r"""#!/bin/bash
# A Python that only says its version, makes environments and installs: as the FAKE_ variables tell.
PATH="/usr/bin:/bin:$PATH"
here="$(cd "$(dirname "$0")" && pwd)"
version="${FAKE_VERSION:-3.12}"
case "${0##*/}" in python3.*) [ -n "${FAKE_BESIDE:-}" ] && version="${0##*/python}" ;; esac
[ -f "$here/version" ] && version="$(cat "$here/version")"
echo "${0##*/} $*" >>"$FAKE_LOG"
case "$*" in
  "-c import sys"*) echo "$version" ;;
  "-m venv "*)
    [ "${FAKE_VENV:-}" = missing ] && echo "Not created because ensurepip is not available." && exit 1
    mkdir -p "$3/bin" && cp "$0" "$3/bin/python" && echo "$version" >"$3/bin/version" ;;
  "-m pip install"*)
    case "${FAKE_PIP:-}" in
      unreachable)
        echo "WARNING: Retrying: Failed to establish a new connection: [Errno -3] Temporary failure in name resolution"
        echo "ERROR: No matching distribution found for jax" && exit 1 ;;
      refused) echo "ERROR: HTTPSConnectionPool: NewConnectionError: Connection refused" && exit 1 ;;
      full) echo "ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device" && exit 1 ;;
      conflict) echo "ERROR: Cannot install a and b because they have conflicting dependencies." && exit 1 ;;
      slow) echo "Collecting jax"; touch "$FAKE_LOG.slow"; exec sleep 60 ;;
    esac
    echo "PIP_TARGET=${PIP_TARGET-unset} PIP_USER=${PIP_USER-unset}" >>"$FAKE_LOG"
    echo "Successfully installed" ;;
  *) echo "ran in $PWD" >>"$FAKE_LOG"; exit "${FAKE_EXIT:-0}" ;;
esac
"""
FAKE_UV = """#!/bin/bash
echo "uv $*" >>"$FAKE_LOG"
[ -z "${FAKE_PIP:-}" ] || { echo "error: dns error: failed to lookup"; exit 2; }
"""
FAKE_DF = """#!/bin/bash
echo 'Filesystem 1024-blocks Used Available Capacity Mounted'
echo "/dev/x 9 9 $FAKE_FREE 9% /"
"""


class Place:
    """A copy of the project's scripts in a folder whose name has spaces, and a PATH of pretended tools."""

    def __init__(self, tmp_path: Path) -> None:
        self.root, self.bin, self.log = tmp_path / "my project", tmp_path / "bin", tmp_path / "log"
        shutil.copytree(ROOT / "scripts", self.root / "scripts")
        shutil.copy(ROOT / "pyproject.toml", self.root)
        (self.root / "chapters").mkdir()
        self.bin.mkdir()
        self.log.touch()
        for tool in TOOLS:
            (self.bin / tool).symlink_to(shutil.which(tool))
        self.add("python3", FAKE_PYTHON)
        self.env = {"PATH": str(self.bin), "FAKE_LOG": str(self.log), "HOME": str(tmp_path)}

    def add(self, name: str, text: str) -> None:
        (self.bin / name).unlink(missing_ok=True)
        (self.bin / name).write_text(text)
        (self.bin / name).chmod(0o755)

    def run(
        self, script: str = "setup", *args: str, cwd: Path | None = None, **env: str
    ) -> subprocess.CompletedProcess:
        self.log.write_text("")
        command = [shutil.which("bash"), str(self.root / "scripts" / f"{script}.sh"), *args]
        return subprocess.run(
            command, cwd=cwd or self.root, env=self.env | env, capture_output=True, text=True, check=False, timeout=60
        )

    def asked(self) -> list[str]:
        """What was asked of Python and uv in the last run, without the questions for the version."""
        return [line for line in self.log.read_text().splitlines() if "-c import sys" not in line]

    def installs(self) -> list[str]:
        return [line.split(" -e ")[1] for line in self.asked() if " -e " in line]


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


def one_line(done: subprocess.CompletedProcess) -> str:
    """The message of a set-up that gave up: the last line, with no noise from tools."""
    assert done.returncode == 1, done.stderr
    lines = done.stderr.splitlines()
    assert all(line.startswith("setup: ") for line in lines) and len(lines) <= 2, done.stderr
    return lines[-1]


def test_first_time_then_nothing_to_do(place: Place) -> None:
    done = place.run()
    assert done.returncode == 0, done.stderr
    assert place.installs() == ["."] and done.stderr.splitlines()[-1] == "setup: ready" and done.stdout == ""
    again = place.run()
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "") and place.asked() == []
    assert sorted(p.name for p in place.root.iterdir()) == [".venv", "chapters", "pyproject.toml", "scripts"]


def test_from_another_folder(place: Place, tmp_path: Path) -> None:
    assert place.run(cwd=tmp_path).returncode == 0 and (place.root / ".venv").is_dir()
    assert not (tmp_path / ".venv").exists()


def test_a_changed_pyproject_updates_and_keeps_the_extras(place: Place) -> None:
    place.run(NANOCHAT_EXTRAS="dev")
    with (place.root / "pyproject.toml").open("a") as file:
        file.write("\n# changed\n")
    done = place.run()
    assert done.returncode == 0 and place.installs() == [".[dev]"] and "updating" in done.stderr


def test_extras_add_up_and_stay(place: Place) -> None:
    place.run(NANOCHAT_EXTRAS="cuda12")
    assert place.installs() == [".[cuda12]"]
    place.run(NANOCHAT_EXTRAS="dev, cuda12")
    assert place.installs() == [".[cuda12,dev]"]
    for asked in ("", "dev", "cuda12", "dev cuda12"):
        assert place.run(NANOCHAT_EXTRAS=asked).stderr == "" and place.installs() == []


def test_an_unknown_extra(place: Place) -> None:
    assert "extra 'cuda11' is not in pyproject.toml" in one_line(place.run(NANOCHAT_EXTRAS="cuda11"))
    assert not (place.root / ".venv").exists()


def test_two_accelerators_in_one_environment(place: Place) -> None:
    place.run(NANOCHAT_EXTRAS="cuda12")
    message = one_line(place.run(NANOCHAT_EXTRAS="cuda13"))
    assert "only one of tpu, cuda12, cuda13" in message and "--rebuild" in message
    assert place.run().stderr == ""  # the old one still serves
    assert place.run("setup", "--rebuild", NANOCHAT_EXTRAS="cuda13").returncode == 0
    assert place.installs() == [".[cuda13]"]


def test_rebuild_starts_afresh_with_the_same_extras(place: Place) -> None:
    place.run(NANOCHAT_EXTRAS="dev")
    (place.root / ".venv/leftover").touch()
    assert place.run("setup", "--rebuild").returncode == 0
    assert place.installs() == [".[dev]"] and not (place.root / ".venv/leftover").exists()


# --- Python -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["2.7", "3.6", "3.9", "3.10"])
def test_python_is_too_old(place: Place, version: str) -> None:
    message = one_line(place.run(FAKE_VERSION=version))
    assert "Python 3.11 or newer is needed" in message and f"python3 is {version}" in message and "PYTHON=" in message
    assert not (place.root / ".venv").exists()


@pytest.mark.parametrize("version", ["3.11", "3.12", "3.13", "3.20", "3.100"])
def test_python_is_new_enough(place: Place, version: str) -> None:
    ok = version != "3.100"  # no such thing yet; refused rather than guessed
    assert (place.run(FAKE_VERSION=version).returncode == 0) is ok


def test_no_python_at_all(place: Place) -> None:
    (place.bin / "python3").unlink()
    assert "no Python found" in one_line(place.run())


def test_a_newer_python_beside_an_old_one_is_found(place: Place) -> None:
    place.add("python3.12", FAKE_PYTHON)
    done = place.run(FAKE_VERSION="3.9", FAKE_BESIDE="1")
    assert done.returncode == 0 and "with Python 3.12" in done.stderr
    assert any(line.startswith("python3.12 -m venv") for line in place.asked())


def test_python_can_be_named_and_is_then_the_only_candidate(place: Place) -> None:
    place.add("python3.13", FAKE_PYTHON)
    done = place.run(PYTHON=str(place.bin / "python3.13"), FAKE_BESIDE="1")
    assert done.returncode == 0 and "with Python 3.13" in done.stderr
    place.run("setup", "--rebuild")
    message = one_line(place.run("setup", "--rebuild", PYTHON="/no/such/python"))
    assert "Python 3.11 or newer is needed" in message
    assert (place.root / ".venv/bin/python").exists()  # the environment that works is still there
    assert place.run().stderr == ""


def test_another_named_python_makes_the_environment_anew(place: Place) -> None:
    place.run(FAKE_VERSION="3.11")
    place.add("python3.13", FAKE_PYTHON)
    done = place.run(PYTHON="python3.13", FAKE_BESIDE="1")
    assert done.returncode == 0 and "making .venv anew" in done.stderr and "with Python 3.13" in done.stderr
    assert place.run(PYTHON="python3.13", FAKE_BESIDE="1").stderr == ""


def test_a_python_without_venv(place: Place) -> None:
    assert "apt install python3-venv" in one_line(place.run(FAKE_VENV="missing"))
    assert place.run().returncode == 0  # repaired


def test_an_environment_of_an_old_python_is_named_not_deleted(place: Place) -> None:
    made = place.root / ".venv/bin"
    made.mkdir(parents=True)
    shutil.copy(place.bin / "python3", made / "python")
    (made / "version").write_text("3.9")
    assert "the Python of .venv is 3.9" in one_line(place.run())
    assert (made / "version").exists()


def test_an_environment_made_by_hand_is_used(place: Place) -> None:
    made = place.root / ".venv/bin"
    made.mkdir(parents=True)
    shutil.copy(place.bin / "python3", made / "python")
    (made / "mine").touch()
    assert place.run().returncode == 0 and place.installs() == ["."] and (made / "mine").exists()


# --- Disk, network, other failures ------------------------------------------------------------------------------------


def test_the_disk_is_short(place: Place) -> None:
    place.add("df", FAKE_DF)
    message = one_line(place.run(FAKE_FREE=str(2 * 2**20)))
    assert "2 GB of disk are free" in message and "3 GB are needed" in message
    assert not (place.root / ".venv").exists()
    assert "8 GB are needed" in one_line(place.run(FAKE_FREE=str(4 * 2**20), NANOCHAT_EXTRAS="cuda12"))
    assert place.run(FAKE_FREE=str(4 * 2**20)).returncode == 0
    assert place.run(FAKE_FREE="0").returncode == 0  # nothing to install, nothing needed


@pytest.mark.parametrize("way", ["unreachable", "refused"])
@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_the_index_is_unreachable(place: Place, way: str, installer: str) -> None:
    place.add("uv", FAKE_UV)
    message = one_line(place.run(FAKE_PIP=way, NANOCHAT_INSTALLER=installer))
    assert "the package index cannot be reached" in message and "proxy" in message
    assert place.run().returncode == 0 and place.run().stderr == ""


def test_the_disk_fills_up_while_installing(place: Place) -> None:
    assert "the disk is full" in one_line(place.run(FAKE_PIP="full"))


def test_another_failure_shows_the_installers_own_words(place: Place) -> None:
    message = one_line(place.run(FAKE_PIP="conflict"))
    assert "conflicting dependencies" in message and ".venv/nanochat-setup.log" in message
    assert "conflicting" in (place.root / ".venv/nanochat-setup.log").read_text()


def test_a_folder_that_cannot_be_written(place: Place) -> None:
    """Read-only, or on a full disk: root ignores permissions, so mkdir is made to fail."""
    place.add("mkdir", "#!/bin/bash\nexit 1\n")
    assert "cannot write to" in one_line(place.run())


# --- Interrupted, moved, twice at once --------------------------------------------------------------------------------


def start_slow(place: Place) -> subprocess.Popen:
    """A set-up that hangs while installing."""
    flag = Path(f"{place.log}.slow")
    flag.unlink(missing_ok=True)
    process = subprocess.Popen(
        [shutil.which("bash"), str(place.root / "scripts/setup.sh")], cwd=place.root,
        env=place.env | {"FAKE_PIP": "slow"}, stderr=subprocess.PIPE, text=True, start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a background job may be born deaf to Ctrl-C
    )  # fmt: skip
    end = time.monotonic() + 30
    while not flag.exists():
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.02)
    return process


def kill(process: subprocess.Popen) -> None:
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def test_a_killed_set_up_is_repaired_by_the_next(place: Place) -> None:
    kill(start_slow(place))
    (place.root / ".venv/half").touch()
    assert (place.root / ".venv.lock").exists()
    done = place.run()
    assert done.returncode == 0 and place.installs() == ["."]
    assert not (place.root / ".venv/half").exists() and not (place.root / ".venv.lock").exists()
    assert place.run().stderr == ""


def test_a_killed_update_is_repaired_and_keeps_its_extras(place: Place) -> None:
    place.run(NANOCHAT_EXTRAS="cuda12")
    (place.root / ".venv/mine").touch()
    (place.root / "pyproject.toml").open("a").write("\n# changed\n")
    kill(start_slow(place))
    assert place.run().returncode == 0 and place.installs() == [".[cuda12]"]
    assert (place.root / ".venv/mine").exists() and place.run().stderr == ""


def test_an_interrupt_stops_it_at_once_and_frees_the_lock(place: Place) -> None:
    process = start_slow(place)
    os.killpg(process.pid, signal.SIGINT)
    process.communicate(timeout=20)
    assert process.returncode not in (0, None) and not (place.root / ".venv.lock").exists()


def test_two_at_once(place: Place) -> None:
    first = start_slow(place)
    second = subprocess.Popen(
        [shutil.which("bash"), str(place.root / "scripts/setup.sh")], cwd=place.root, env=place.env,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert "another set-up" in second.stderr.readline()
    kill(first)
    assert second.wait(timeout=30) == 0 and place.run().stderr == ""


def test_a_moved_project_gets_a_new_environment(place: Place, tmp_path: Path) -> None:
    place.run(NANOCHAT_EXTRAS="dev")
    place.root = place.root.rename(tmp_path / "elsewhere")
    done = place.run()
    assert done.returncode == 0 and "was moved" in done.stderr and place.installs() == [".[dev]"]


def test_a_python_that_went_away(place: Place) -> None:
    place.run()
    (place.root / ".venv/bin/python").unlink()
    assert "no longer runs" in place.run().stderr and place.run().stderr == ""


# --- The user's own things --------------------------------------------------------------------------------------------


def test_the_users_pip_settings_do_not_lead_elsewhere(place: Place) -> None:
    place.run(PIP_TARGET="/somewhere", PIP_USER="1", PIP_PREFIX="/x")
    assert "PIP_TARGET=unset PIP_USER=0" in place.asked()
    assert all(".venv" in line or line.startswith(("python -m pip", "PIP_")) for line in place.asked())


def test_uv_is_used_when_it_is_there(place: Place) -> None:
    place.add("uv", FAKE_UV)
    place.run()
    line = next(line for line in place.asked() if line.startswith("uv "))
    assert line == f"uv pip install --python {place.root}/.venv/bin/python -c {place.root}/scripts/versions.txt -e ."
    place.run("setup", "--rebuild", NANOCHAT_INSTALLER="pip")
    assert place.installs() == ["."] and not any(line.startswith("uv ") for line in place.asked())


@pytest.mark.parametrize(
    ("env", "file"),
    [
        ({}, "scripts/versions.txt"),
        ({"NANOCHAT_EXTRAS": "dev site"}, "scripts/versions.txt"),
        ({"NANOCHAT_EXTRAS": "dev nbgrader"}, "/dev/null"),  # it wants older notebook packages
        ({"NANOCHAT_NEWEST": "1"}, "/dev/null"),
    ],
)
def test_the_versions_that_the_tests_passed_with_are_installed(place: Place, env: dict[str, str], file: str) -> None:
    place.run(**env)
    (line,) = [line for line in place.asked() if "-m pip install" in line]
    assert f" -c {place.root / file} -e " in line


def test_versions_that_are_not_there_are_named(place: Place) -> None:
    (place.root / "scripts/versions.txt").unlink()
    assert "versions.txt is missing" in one_line(place.run()) and place.installs() == []
    assert place.run(NANOCHAT_NEWEST="1").returncode == 0 and place.installs() == ["."]


def test_other_versions_are_a_reason_to_install_again(place: Place) -> None:
    place.run()
    (place.root / "scripts/versions.txt").write_text("jax==0.10.3\n")
    place.run()
    assert place.installs() == ["."]


# --- The other scripts ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("script", "args", "called"),
    [
        ("capstone", [], "-m nanochat_lib run --preset cpu"),
        ("capstone", ["cpu-smoke"], "-m nanochat_lib run --preset cpu-smoke"),
        ("capstone", ["--seed", "1"], "-m nanochat_lib run --preset cpu --seed 1"),
        ("capstone", ["cpu", "--corpus", "a b", "-s", "x=1"], "-m nanochat_lib run --preset cpu --corpus a b -s x=1"),
        (
            "test",
            ["-x", "tests/test_cli.py"],
            "-m pytest -n 2 --dist loadfile --no-loadscope-reorder -x tests/test_cli.py",
        ),
        (
            "lab",
            ["--no-browser"],
            "-m jupyterlab --LabApp.default_url=/lab/tree/chapters/00_start.ipynb --no-browser",
        ),
    ],
)
def test_scripts_set_up_and_pass_their_arguments_on(place: Place, script: str, args: list[str], called: str) -> None:
    done = place.run(script, *args)
    assert done.returncode == 0, done.stderr
    assert place.installs() == [".[dev]" if script == "test" else "."]
    assert f"python {called}" in place.asked()
    assert place.run(script, *args, FAKE_EXIT="3").returncode == 3  # the exit code is the command's
    assert place.installs() == []


def test_the_capstone_runs_where_the_user_stands(place: Place, tmp_path: Path) -> None:
    """So that `--corpus my_texts` and `--run-dir` mean what they say."""
    place.run("capstone", cwd=tmp_path)
    assert f"ran in {tmp_path}" in place.asked()
    place.run("test", cwd=tmp_path)
    assert f"ran in {place.root}" in place.asked()


def test_a_set_up_that_failed_runs_nothing(place: Place) -> None:
    for script in ("capstone", "test", "lab"):
        assert place.run(script, FAKE_VERSION="3.9").returncode == 1
        assert place.asked() == []


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_say_what_they_are_for(place: Place, script: str) -> None:
    text = (ROOT / "scripts" / f"{script}.sh").read_text()
    assert text.startswith("#!/usr/bin/env bash\n# ") and re.search(r"^set -eu", text, re.MULTILINE)
    if script != "test":  # there, --help is pytest's
        done = place.run(script, "--help")
        assert done.returncode == 0 and f"bash scripts/{script}.sh" in done.stdout and "#" not in done.stdout
        assert place.asked() == [] and not (place.root / ".venv").exists()


def test_setup_refuses_an_unknown_option(place: Place) -> None:
    done = place.run("setup", "--nosuch")
    assert done.returncode == 2 and not (place.root / ".venv").exists()


def test_shellcheck_is_content() -> None:
    files = [*(str(p) for p in sorted((ROOT / "scripts").glob("*.sh"))), str(ROOT / ".ci/run"), str(ROOT / "postBuild")]
    shellcheck = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([str(shellcheck), *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


# --- One list of dependencies -----------------------------------------------------------------------------------------

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]


def test_environment_yml_adds_no_second_list() -> None:
    environment = yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))
    *conda, pip = environment["dependencies"]
    assert [re.split(r"[=<>]", name)[0] for name in conda] == ["python", "pip"]
    assert pip == {"pip": ["-c scripts/versions.txt", "-e ."]}
    wanted = re.search(r"python=(\d+)\.(\d+)$", conda[0])
    assert (int(wanted[1]), int(wanted[2])) >= (3, 11)


def test_pyproject_has_the_owners_packages_and_extras() -> None:
    names = {re.split(r"[\[<>=!~; ]", line)[0] for line in PROJECT["dependencies"]}
    assert {"jupyterlab", "jupytext", "jax", "flax", "optax", "torch", "matplotlib", "ipywidgets", "papermill"} <= names
    extras = PROJECT["optional-dependencies"]
    assert set(extras) == {"tpu", "cuda12", "cuda13", "wandb", "nbgrader", "cloud", "site", "store", "dev"}
    jax = next(line for line in PROJECT["dependencies"] if line.startswith("jax"))
    for name in ("tpu", "cuda12", "cuda13"):
        assert extras[name] == [jax.replace("jax", f"jax[{name}]", 1)]  # the plugin comes with JAX, at JAX's version


def test_every_import_of_the_library_is_in_the_list() -> None:
    known = {re.split(r"[\[<>=!~; ]", line)[0].lower().replace("-", "_") for line in PROJECT["dependencies"]}
    known |= {"ipython"}  # comes with ipykernel
    renamed = {"orbax": "orbax_checkpoint", "yaml": "pyyaml", "IPython": "ipython", "mpl_toolkits": "matplotlib"}
    for path in (ROOT / "nanochat_lib").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for name in re.findall(r"^\s*(?:from|import) ([A-Za-z_]\w*)", text, re.MULTILINE):
            if name not in sys.stdlib_module_names and name not in ("nanochat_lib", "__future__"):
                assert renamed.get(name, name).lower() in known, f"{path.name} imports {name}"


def test_the_installed_jax_is_in_the_range_that_python_allows() -> None:
    from importlib.metadata import version

    major, minor = (int(part) for part in version("jax").split(".")[:2])
    assert (0, 10) <= (major, minor) < (0, 12)


def test_ci_runs_what_the_readme_tells_everybody() -> None:
    lines = [line for line in (ROOT / ".ci/run").read_text().splitlines() if line and not line.startswith("#")]
    assert lines == ["set -eu", 'cd "$(dirname "$0")/.."', "bash scripts/test.sh"]
    assert "bash scripts/test.sh" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_no_file_names_a_package_host_or_a_machines_path() -> None:
    hosts = re.compile(rf"index-url|find-links|/root/|/home/\w|{re.escape(str(ROOT))}")
    files = [ROOT / name for name in ("pyproject.toml", "environment.yml", "README.md", "CONTRIBUTING.md", ".ci/run")]
    files += [*(ROOT / "scripts").rglob("*.sh"), *(ROOT / "nanochat_lib").rglob("*.py")]
    for path in files:
        assert not hosts.search(path.read_text(encoding="utf-8")), path
