"""The learner's zip: all that the learner's commands and pages name is in it, no script that only maintainers need."""

from __future__ import annotations

import json
import re
import zipfile
from pathlib import Path

import pytest

from nanochat_lib.course import leaks
from nanochat_lib.course.grading import grade, handout

ROOT = Path(grade.__file__).parents[3]
NAMED = re.compile(r"\bscripts/[\w./-]*\w")
FOR_OTHERS = {"scripts/test.sh", "scripts/bench", "scripts/grading"}  # the README's last section, docs/grading.md


@pytest.fixture(scope="module")
def names():
    return {path.relative_to(ROOT).as_posix() for path in leaks.bundle(ROOT)}


def mentions(text: str) -> set[str]:
    return set(NAMED.findall(text))


def test_every_script_that_a_learner_s_page_names_is_there(names):
    pages = [name for name in names if name.endswith((".md", ".sh", ".yml")) or name.startswith(("chapters/", ".dev"))]
    pages = sorted({*pages, "postBuild"} - {"CONTRIBUTING.md", "CHANGELOG.md"})
    assert {"README.md", "environment.yml", "scripts/lab.sh", "chapters/06_tpu_step.py"} <= set(pages)
    for page in pages:
        for one in mentions((ROOT / page).read_text(encoding="utf-8")):
            if not any(one == other or one.startswith(f"{other}/") for other in FOR_OTHERS):
                assert one in names or any(name.startswith(f"{one.rstrip('/.')}/") for name in names), (page, one)


def test_every_script_in_it_is_named_somewhere_in_it(names):
    texts = [
        (ROOT / name).read_text(encoding="utf-8") for name in names if name.endswith((".md", ".sh", ".yml", ".py"))
    ]
    told = mentions("\n".join([*texts, (ROOT / "postBuild").read_text()]))
    beside = {name for name in names if name.startswith(("scripts/lab/", "scripts/cloud/"))}
    for name in {name for name in names if name.startswith("scripts/")} - beside:
        assert name in told, f"{name} is named nowhere: is it of use to a learner?"


def test_what_only_maintainers_and_instructors_need_stays_here(names):
    gone = ("scripts/newest.py", "scripts/solve_course.py", "scripts/test.sh", "scripts/grading", "scripts/bench")
    assert all((ROOT / name).exists() for name in gone)
    assert not [name for name in names if name.startswith(gone) or name.startswith(("tests/", "solutions/", ".ci/"))]
    assert {"postBuild", "environment.yml", "scripts/setup.sh", "scripts/versions.txt"} <= names  # the hub's image


def test_every_path_that_a_page_of_the_zip_names_is_in_it_or_named_as_missing(tmp_path, monkeypatch):
    monkeypatch.setattr(handout, "build", lambda check, root: None)
    handout.bundle(ROOT, tmp_path / "course.zip")
    with zipfile.ZipFile(tmp_path / "course.zip") as archive:
        texts = {name.removeprefix("course/"): archive.read(name) for name in archive.namelist()}
    there = {"/".join(name.split("/")[:n]) for name in texts for n in range(1, name.count("/") + 2)}
    pages = {name: data.decode() for name, data in texts.items() if name.endswith(".md")}
    assert {"README.md", "docs/grading.md", "docs/data.md"} <= set(pages)
    for name, text in pages.items():
        note = "".join(re.findall(r"^> This is a learner's copy of the project, without .*$", text, re.M)[:1])
        gone = re.findall(r"`([^`]+)`", note)
        assert all(not (there & {one.rstrip("/")}) and (ROOT / one).exists() for one in gone), (name, gone)
        told = re.findall(r"(?<![\w./~-])(?:scripts|docs|tests|solutions|assets|\.ci|\.github)/[\w./-]*", text)
        for path in {one.rstrip("./") for one in told}:
            assert path in there or any(f"{path}/".startswith(f"{one.rstrip('/')}/") for one in gone), (name, path)
        for link in re.findall(r"\]\(([\w./-]+)\)", text):
            assert (Path(name).parent / link).as_posix() in there, (name, link)
    assert "`scripts/test.sh`" in pages["README.md"] and pages["README.md"].startswith("# ")
    assert "without `tests/`.\n" in pages["docs/sandbox.md"]  # a folder that is missing as a whole stands there once
    whole = "docs/many-devices.md"  # it names nothing that is not there
    assert pages[whole] == (ROOT / whole).read_text(encoding="utf-8")


def test_the_zip_says_what_it_is_and_keeps_rights(tmp_path, monkeypatch):
    monkeypatch.setattr(handout, "build", lambda check, root: None)  # test_build.py builds
    about = handout.bundle(ROOT, tmp_path / "course.zip")
    with zipfile.ZipFile(tmp_path / "course.zip") as archive:
        assert json.loads(archive.read("course/BUNDLE.json")) == about
        assert archive.getinfo("course/postBuild").external_attr >> 16 & 0o111
        assert len(archive.namelist()) == about["files"] + 1
