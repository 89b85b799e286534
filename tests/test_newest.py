"""scripts/newest.py: bounds come off, differences are told, and a weekly run says what broke."""

import subprocess
import tomllib
from pathlib import Path

import pytest
import script_modules
import yaml

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def newest():
    return script_modules.load("newest")


def requirements(text: str) -> list[str]:
    project = tomllib.loads(text)["project"]
    return [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]


def test_upper_bounds_come_off_and_nothing_else_changes(newest):
    before = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    after = newest.loosened(before)
    old, new = requirements(before), requirements(after)
    assert [r.split(",<")[0] for r in old] == new and not any("<" in r for r in new)
    assert sum(a != b for a, b in zip(old, new, strict=True)) > 5
    assert "torch==2.13.0" in new and after.count("\n") == before.count("\n")


def test_what_differs_is_told_with_both_versions(newest):
    known = newest.parsed(["jax==0.10.2 ; python_version == '3.11'", "Flask_Cors==6.0.5", "# a comment"])
    assert known == {"jax": "0.10.2", "flask-cors": "6.0.5"}
    found = {"jax": "0.11.2", "flask-cors": "6.0.5", "new": "1"}
    assert newest.differences(known, found) == ["| jax | 0.10.2 | 0.11.2 |", "| new | none | 1 |"]
    text = newest.report(known, found, "..F\nFAILED tests/a.py::b - assert 1\n= 1 failed in 2 s =\n\n", 1)
    assert text.startswith(
        "# The newest versions break something\n\n1 failed in 2 s\n\n- `FAILED tests/a.py::b - assert"
    )
    assert "pass" in newest.report(known, known, "= 3 passed =\n", 0) and "No version differs" in newest.report(
        known, known, "= 3 passed =\n", 0
    )


@pytest.mark.parametrize("status", [0, 1])
def test_a_copy_is_tested_and_the_report_outlives_it(newest, tmp_path, monkeypatch, capfd, status):
    source = tmp_path / "source"
    (source / "scripts").mkdir(parents=True)
    (source / "pyproject.toml").write_text('dependencies = ["jax>=0.1,<0.2"]\n')
    (source / "scripts/versions.txt").write_text("jax==0.1\n")
    (source / "scripts/test.sh").write_text(f'echo "$NANOCHAT_NEWEST $*"; cat pyproject.toml; exit {status}\n')
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], cwd=source, check=True)
    monkeypatch.setattr(newest, "ROOT", source)
    assert newest.main(["--report", str(tmp_path / "out/new.md"), "--only", "tests/test_cli.py"]) == status
    assert '1 tests/test_cli.py\ndependencies = ["jax>=0.1"]\n' in capfd.readouterr().out
    text = (tmp_path / "out/new.md").read_text()
    assert ("pass" in text.splitlines()[0]) == (status == 0) and "| jax | 0.1 | none |" in text
    assert '"jax>=0.1,<0.2"' in (source / "pyproject.toml").read_text()


def test_what_cannot_work_is_said_in_one_line_before_the_tests(newest, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(newest, "try_newest", lambda *_: pytest.fail("it has begun"))
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit):
        newest.main(["--report", str(tmp_path / "file/new.md")])
    assert "new.md cannot be written" in capsys.readouterr().err.splitlines()[-1]
    monkeypatch.undo()
    monkeypatch.setattr(newest, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="cannot be cloned with git; run this in a clone"):
        newest.main(["--report", str(tmp_path / "new.md")])


def test_every_version_is_of_one_system_and_covers_the_projects_own_list(newest):
    lines = [x for x in (ROOT / newest.LOCK).read_text(encoding="utf-8").splitlines() if not x.startswith("#")]
    assert all(line.endswith(" ; " + newest.WHERE) for line in lines)
    names = newest.parsed(lines).keys()
    wanted = {newest.parsed([f"{r.split('>=')[0].split('[')[0]}==1"]).popitem()[0] for r in requirements(
        (ROOT / "pyproject.toml").read_text(encoding="utf-8")) if ">=" in r}  # fmt: skip
    assert wanted - names <= {"wandb", "nbgrader", "skypilot", "gcsfs", "s3fs"}


def test_the_weekly_job_runs_the_script_and_hands_its_report_on():
    job = yaml.safe_load((ROOT / ".github/workflows/newest.yml").read_text(encoding="utf-8"))
    assert job[True]["schedule"]  # YAML reads the key `on` as true
    steps = job["jobs"]["newest"]["steps"]
    commands = [step["run"] for step in steps if "run" in step]
    assert commands[0] == "python scripts/newest.py --report newest.md" and "--body-file newest.md" in commands[1]
    assert steps[-1]["if"] == "failure()"
