"""The files that grade in parts: by their own schemas and parsers, and run with a pretended program."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml

from nanochat_lib.cli import build_parser

FOLDER = Path(__file__).parents[2] / "scripts" / "grading"
SLURM = FOLDER / "slurm-array.sbatch"


def pretended(tmp_path: Path) -> Path:
    """A program that writes down how it was called."""
    program = tmp_path / "nanochat"
    program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" > "{tmp_path}/called"\n')
    program.chmod(0o755)
    return program


def parsed(words: list[str]):
    assert words[0] == "grade"
    return build_parser().parse_args(words)


def array(tmp_path: Path, task: int, count: int, first: int = 1) -> subprocess.CompletedProcess:
    variables = {"SLURM_SUBMIT_DIR": str(tmp_path), "SLURM_ARRAY_TASK_ID": str(task), "SLURM_CPUS_PER_TASK": "3"}
    variables |= {"SLURM_ARRAY_TASK_COUNT": str(count), "SLURM_ARRAY_TASK_MIN": str(first)}
    variables |= {"SLURM_ARRAY_TASK_MAX": str(first + count - 1), "NANOCHAT": str(pretended(tmp_path))}
    words = ["bash", str(SLURM), "my submissions", "--chapter", "03"]
    return subprocess.run(words, env=os.environ | variables, capture_output=True, text=True)


def test_every_task_of_the_array_grades_its_part(tmp_path):
    seen = []
    for task in (1, 2, 3):
        done = array(tmp_path, task, 3)
        assert done.returncode == 0, done.stderr
        args = parsed((tmp_path / "called").read_text().splitlines())
        assert (args.submissions, args.chapter, args.jobs, args.require_isolation) == (
            "my submissions",
            "03",
            3,
            "strong",
        )
        seen.append((args.shard, args.book))
    assert [shard for shard, _ in seen] == ["1/3", "2/3", "3/3"] and len({book for _, book in seen}) == 3
    assert (tmp_path / "parts").is_dir()


def test_an_array_that_would_leave_learners_out_is_refused(tmp_path):
    done = array(tmp_path, 0, 3, first=0)
    assert done.returncode == 2 and "--array=1-3" in done.stderr and not (tmp_path / "called").exists()


def test_sbatch_s_options():
    options = dict(re.findall(r"^#SBATCH --([a-z-]+)(?:=(\S+))?$", SLURM.read_text(), re.M))
    assert len(options) == SLURM.read_text().count("\n#SBATCH")
    known = {"job-name", "array", "nodes", "ntasks", "cpus-per-task", "mem", "time", "requeue", "output"}
    assert set(options) == known and options["array"].startswith("1-") and "%a" in options["output"]


def test_shellcheck_finds_nothing():
    program = Path(sys.executable).parent / "shellcheck"
    done = subprocess.run([program, "-s", "bash", str(SLURM)], capture_output=True, text=True)
    assert done.returncode == 0, done.stdout


@pytest.fixture
def job() -> dict:
    return yaml.safe_load((FOLDER / "kubernetes-job.yaml").read_text())


def test_the_job_fits_the_schemas(job):
    for version in ("1.31", kubernetes_validate.latest_version()):
        kubernetes_validate.validate(job, version, strict=True)
    job["spec"]["completionmode"] = "Indexed"
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(job, "1.31", strict=True)


def test_every_pod_grades_its_part(job, tmp_path):
    (container,) = job["spec"]["template"]["spec"]["containers"]
    parts = int({one["name"]: one["value"] for one in container["env"]}["PARTS"])
    assert job["spec"]["completionMode"] == "Indexed" and job["spec"]["completions"] == parts
    program, shards = pretended(tmp_path), []
    command = container["args"][0].replace("cd /class", f"cd '{tmp_path}'")
    for index in (0, parts - 1):
        env = os.environ | {"JOB_COMPLETION_INDEX": str(index), "PARTS": str(parts)}
        env["PATH"] = f"{program.parent}{os.pathsep}{env['PATH']}"
        subprocess.run([*container["command"], command], env=env, check=True)
        args = parsed((tmp_path / "called").read_text().splitlines())
        shards.append(args.shard)
        assert args.book == f"parts/{index + 1}-of-{parts}.sqlite" and args.require_isolation == "strong"
    assert shards == [f"1/{parts}", f"{parts}/{parts}"]
    assert job["spec"]["template"]["spec"]["automountServiceAccountToken"] is False


def test_the_container_s_recipe_names_what_is_there():
    text = (FOLDER / "Containerfile").read_text()
    copied = [word for line in re.findall(r"^COPY (.+)$", text, re.M) for word in line.split()[:-1]]
    assert copied and all((FOLDER.parents[1] / word).exists() for word in copied)
    python = re.search(r"^FROM \S*python:(\d+\.\d+)", text, re.M)[1]
    assert (
        f"python_version == '{python}'" in (FOLDER.parent / "versions.txt").read_text()
        and "-c /course/scripts/" in text
    )
    assert "bubblewrap" in text and re.search(r"^USER (?!root)", text, re.M)
    assert parsed(json.loads(re.search(r"^CMD (.+)$", text, re.M)[1])[1:-1] + ["audit"]).act
    shown = re.sub(r" \\\n#", "", text)  # one line a command
    command = re.search(r"nanochat-grade +nanochat (grade run .+)$", shown, re.M)[1]
    assert parsed(command.split()).require_isolation == "strong"


def test_the_hub_s_values():
    """The keys that the chart knows (its own documentation's reference), each with the type that it takes."""
    found = yaml.safe_load((FOLDER / "jupyterhub.yaml").read_text())
    assert set(found) == {"hub", "singleuser", "cull"}
    known = {
        "image": dict, "defaultUrl": str, "cpu": dict, "memory": dict, "storage": dict, "extraEnv": dict,
        "cmd": list, "networkPolicy": dict,
    }  # fmt: skip
    single = found["singleuser"]
    assert set(single) == set(known) and all(isinstance(single[key], kind) for key, kind in known.items())
    assert set(single["image"]) == {"name", "tag"} and isinstance(single["image"]["tag"], str)
    assert all(isinstance(value, str) for value in single["extraEnv"].values())
    chapter = single["defaultUrl"].removeprefix("/lab/tree/")
    assert (FOLDER.parents[1] / chapter).exists()
    assert single["memory"]["limit"] == "4G" and found["hub"]["config"]["Authenticator"]["allow_all"] is False


def test_the_hub_s_server_starts_in_the_learner_s_own_folder(tmp_path):
    """The image's files are there, and once changed they stay as they are."""
    image, home, tools = tmp_path / "image", tmp_path / "home", tmp_path / "bin"
    (image / "chapters").mkdir(parents=True), home.mkdir(), tools.mkdir()
    (image / "chapters" / "00_start.ipynb").write_text("as handed out")
    (tools / "jupyterhub-singleuser").write_text('#!/bin/sh\npwd\necho "$@"\ncat chapters/00_start.ipynb\n')
    (tools / "jupyterhub-singleuser").chmod(0o755)
    command = yaml.safe_load((FOLDER / "jupyterhub.yaml").read_text())["singleuser"]["cmd"]
    words = [word.replace("/srv/course", str(image)) for word in command]
    env = os.environ | {"HOME": str(home), "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}

    def start() -> list[str]:
        return subprocess.run([*words, "--a", "b c"], env=env, cwd=image, capture_output=True, text=True).stdout.split(
            "\n"
        )

    assert start() == [str(home / "course"), "--a b c", "as handed out"]
    (home / "course" / "chapters" / "00_start.ipynb").write_text("my work")
    (image / "chapters" / "01_new.ipynb").write_text("new")
    assert start()[-1] == "my work" and (home / "course" / "chapters" / "01_new.ipynb").exists()
