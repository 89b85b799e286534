"""What learners hand in, in every shape: graded or explained, nobody lost."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import struct
import sys
import zipfile
from pathlib import Path

import pytest
from grade_course import MERGE, RIGHT, SCALE, TWICE, cell, notebook

from nanochat_lib.course.grading import archives, notebooks
from nanochat_lib.course.grading.answers import gather, skeleton
from nanochat_lib.course.grading.archives import Member
from nanochat_lib.course.grading.borrowed import borrowed
from nanochat_lib.course.grading.key import keys
from nanochat_lib.course.grading.submissions import Submission, collect, learner_name
from nanochat_lib.errors import UserError

WANTED = {"small.merge": "merge", "small.scale": "scale", "small.twice": "twice"}
KNOWN = frozenset({"jax", "jnp", "np", "check", "mine", "NEW"})
PAPER = notebook(RIGHT)


@pytest.fixture(scope="module")
def key(course):
    return keys(course)[0]


def read(text, path="07_small.ipynb"):
    return notebooks.read(Member(path, text.encode() if isinstance(text, str) else text, 0.0))


def answers(*cells, wanted=WANTED):
    return gather(read(notebook(cells=list(cells))), wanted, KNOWN)


# ---- layouts


def names(folder):
    return {s.learner: sorted(file.path for file in s.files) for s in collect(folder)}


def put(path, text=PAPER):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def zipped(path, **members):
    path.parent.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return path


def test_a_folder_a_file_and_a_zip_a_learner(tmp_path):
    put(tmp_path / "ada" / "07_small.ipynb")
    put(tmp_path / "bob.ipynb")
    put(tmp_path / "cy_07_small.py", MERGE)
    zipped(
        tmp_path / "dora.zip", **{"work/07_small.ipynb": PAPER, "work/.ipynb_checkpoints/x.ipynb": PAPER, "a.txt": "x"}
    )
    put(tmp_path / ".DS_Store", b"x")
    put(tmp_path / "notes.txt", b"x")
    assert names(tmp_path) == {
        "ada": ["07_small.ipynb"], "bob": ["bob.ipynb"], "cy": ["cy_07_small.py"], "dora": ["work/07_small.ipynb"],
    }  # fmt: skip


def test_moodle_s_download(tmp_path):
    put(tmp_path / "Ada Byron_412_assignsubmission_file_" / "07_small.ipynb")
    put(tmp_path / "Bo Ek_413_assignsubmission_onlinetext" / "onlinetext.html", b"x")
    zipped(tmp_path / "Cy D_414_assignsubmission_file" / "all.zip", **{"07_small.ipynb": PAPER})
    found = {s.learner: s for s in collect(tmp_path)}
    assert set(found) == {"Ada Byron", "Bo Ek", "Cy D"}
    assert found["Ada Byron"].ids == {"moodle": "412"} and len(found["Cy D"].files) == 1 and not found["Bo Ek"].files


def test_canvas_s_download(tmp_path):
    put(tmp_path / "byronada_4711_99_07_small.ipynb")
    put(tmp_path / "ekbo_LATE_4712_98_07_small-1.ipynb")
    found = {s.learner: s for s in collect(tmp_path)}
    assert found["byronada"].ids == {"canvas": "4711"} and not found["byronada"].late and found["ekbo"].late
    assert found["ekbo"].files[0].path == "07_small-1.ipynb"


def test_one_zip_of_everybody(tmp_path):
    inner = zipped(tmp_path / "inner.zip", **{"07_small.ipynb": PAPER}).read_bytes()
    path = zipped(tmp_path / "all.zip", **{
        "Ada B_1_assignsubmission_file_/07_small.ipynb": PAPER, "ekbo_4_5_07_small.ipynb": PAPER, "cy.zip": inner,
    })  # fmt: skip
    assert names(path) == {"Ada B": ["07_small.ipynb"], "cy": ["07_small.ipynb"], "ekbo": ["07_small.ipynb"]}
    for bad in (tmp_path / "no.zip", put(tmp_path / "x.zip", b"no zip"), put(tmp_path / "x.txt", b"")):
        with pytest.raises(UserError):
            collect(bad)


# ---- archives of strangers


def test_a_bomb_ends_at_the_limit(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MEMBER_BYTES", 1 << 16)
    path = zipped(tmp_path / "ada.zip", **{"07_small.ipynb": bytes(1 << 22), "ok.ipynb": PAPER})
    members, remarks = archives.read(path)
    assert [m.path for m in members] == ["ok.ipynb"] and "larger than any notebook" in remarks[0]


def test_a_size_that_lies_does_not_help(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MEMBER_BYTES", 1 << 16)
    path = zipped(tmp_path / "ada.zip", **{"07_small.ipynb": bytes(1 << 20)})
    data = path.read_bytes().replace(struct.pack("<I", 1 << 20), struct.pack("<I", 10))
    path.write_bytes(data)
    try:
        members, remarks = archives.read(path)
    except archives.Refused:
        return
    assert not members and remarks


def test_paths_links_and_archives_inside_are_refused(tmp_path):
    path = tmp_path / "ada.zip"
    with zipfile.ZipFile(path, "w") as archive:
        for name in ("../../etc/x.ipynb", "/etc/x.ipynb", "C:/x.ipynb", "a/../../x.ipynb"):
            archive.writestr(name, PAPER)
        link = zipfile.ZipInfo("link.ipynb")
        link.external_attr = 0o120777 << 16
        archive.writestr(link, "/etc/passwd")
        archive.writestr("more.zip", "PK")
        archive.writestr("fine.ipynb", PAPER)
    members, remarks = archives.read(path)
    assert [m.path for m in members] == ["fine.ipynb"] and len(remarks) == 6
    assert sum("leads out" in line for line in remarks) == 4


def test_many_members_damage_and_encryption_are_explained(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MEMBERS", 3)
    with pytest.raises(archives.Refused, match="holds 4 files"):
        archives.read(zipped(tmp_path / "a.zip", a="", b="", c="", d=""))
    whole = zipped(tmp_path / "b.zip", **{"x.ipynb": PAPER}).read_bytes()
    put(tmp_path / "cut" / "b.zip", whole[: len(whole) // 2])
    put(tmp_path / "changed" / "c.zip", whole.replace(whole[60:64], b"\xff\xff\xff\xff"))
    found = collect(tmp_path)
    assert {s.learner for s in found} >= {"cut", "changed"}
    assert all(s.remarks or s.files for s in found)


def test_links_in_a_folder_are_not_followed(tmp_path):
    secret = put(tmp_path / "secret" / "07_small.ipynb")
    folder = tmp_path / "in"
    put(folder / "ada" / "x.ipynb")
    os.symlink(secret, folder / "ada" / "07_small.ipynb")
    os.symlink(secret.parent, folder / "ada" / "more")
    os.symlink(secret.parent, folder / "bob")
    found = {s.learner: s for s in collect(folder)}
    assert [f.path for f in found["ada"].files] == ["x.ipynb"] and len(found["ada"].remarks) == 2
    assert not found["bob"].files and "link" in found["bob"].remarks[0]


# ---- notebooks


@pytest.mark.parametrize("shape", ["v4.5", "v4 without ids", "v3", "string sources", "percent", "plain python", "bom"])
def test_every_format_is_read(shape):
    cells = [cell(text, id, tags=("exercise",)) for id, text in RIGHT.items()]
    if shape == "v4.5":
        text = notebook(cells=[one | {"id": f"c{i}"} for i, one in enumerate(cells)])
    elif shape == "v3":
        old = [{"cell_type": "code", "input": c["source"].splitlines(True), "language": "python"} for c in cells]
        text = json.dumps({"nbformat": 3, "metadata": {}, "worksheets": [{"cells": old}]})
    elif shape == "percent":
        text = "# %%\nimport math\n" + "".join(f'\n# %% tags=["exercise"] id="{id}"\n{c}' for id, c in RIGHT.items())
        assert len(gather(read(text, "a.py"), WANTED, KNOWN).found) == 3
        return
    elif shape == "plain python":
        assert len(gather(read("\n\n".join(RIGHT.values()), "a.py"), WANTED, KNOWN).found) == 3
        return
    elif shape == "string sources":
        text = notebook(cells=[one | {"source": one["source"].splitlines(True)} for one in cells])
    else:
        text = ("\ufeff" if shape == "bom" else "") + PAPER
    found = gather(read(text), WANTED, KNOWN)
    assert not any(answer.problem for answer in found.found.values()) and len(found.found) == 3


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"cells": 3}', '{"nbformat": 3}', b"\xff\xfe\x00", "[" * 100_000, '{"worksheets": 1}'],
)
def test_what_is_no_notebook_is_said_in_one_line(text):
    with pytest.raises(UserError) as error:
        read(text)
    assert "\n" not in str(error.value) and "07_small.ipynb" in str(error.value)


def test_strange_cells_do_not_stop_the_reading():
    odd = [3, None, {}, {"cell_type": "code"}, {"cell_type": "code", "source": {"a": 1}, "metadata": [1]},
           {"cell_type": "code", "source": ["x", 3], "metadata": {"tags": 5, "nbgrader": 7}, "id": 9}]  # fmt: skip
    found = gather(read(json.dumps({"cells": [*odd, cell(MERGE, "small.merge")], "nbformat": 4})), WANTED, KNOWN)
    assert list(found.found) == ["small.merge"]


def test_copied_cells_the_last_counts():
    found = answers(cell("def merge(t, p, n):\n    return 1", "small.merge"), cell(MERGE, "small.merge"))
    assert "tuple" in found.found["small.merge"].source and any("cells 1, 2" in line for line in found.remarks)


def test_deleted_cells_are_said():
    assert "small.scale: its cell is not in the notebook" in " ".join(answers(cell(MERGE, "small.merge")).remarks)


def test_a_cell_that_became_text_is_code_again():
    found = answers(cell(MERGE, "small.merge", kind="markdown"))
    assert found.found["small.merge"].source.strip() == MERGE.strip() and "markdown" in " ".join(found.remarks)


def test_cells_without_ids_or_renamed_are_found_by_their_function():
    found = answers(cell(TWICE), cell(SCALE, "my-scale"), cell(MERGE))
    assert set(found.found) == set(WANTED)


def test_an_id_that_only_looks_right_is_said_and_does_not_count_as_one():
    found = answers(cell("x = 1", "small.m\u0435rge"))  # a Cyrillic е
    assert "small.merge" not in found.found and "U+0435" in " ".join(found.remarks)
    assert skeleton("ѕmаll.mеrge") == skeleton("small.merge") and skeleton("sm\u200ball") == "small"


def test_a_function_whose_name_only_looks_right_is_not_taken():
    found = answers(cell("def m\u0435rge(tokens, pair, new):\n    return 1", "other"))
    assert "small.merge" not in found.found
    assert "small.merge" in answers(cell("def \uff4derge(t, p, n):\n    return 1")).found  # Python itself reads m


def test_helpers_in_other_cells_are_taken_along():
    found = answers(
        cell("import string, os.path as where\nfrom itertools import pairwise"),
        cell("SIZE = 2\n@staticmethod\ndef half(x):\n    return x // SIZE\nprint('never run')"),
        cell("def merge(tokens, pair, new):\n    return [half(t) for t in pairwise(tokens)], where", "small.merge"),
    )
    code = "\n".join(text for text, _ in found.found["small.merge"].pieces)
    assert "from itertools import pairwise" in code and "SIZE = 2" in code and "@staticmethod\ndef half" in code
    assert "import os.path as where" in code and "never run" not in code and "string" not in code


def test_magics_and_syntax_errors():
    found = answers(cell("%time\n!ls\n" + MERGE, "small.merge"), cell("def scale(x, factor:\n", "small.scale"))
    assert not found.found["small.merge"].problem and "not valid Python" in found.found["small.scale"].problem


def test_two_files_for_one_chapter(key):
    old = Member("07_small.ipynb", notebook({"small.merge": "def merge(t, p, n): return 0"}).encode(), 1000.0)
    new = Member("old/Copy of 07_small (2).ipynb", PAPER.encode(), 9000.0)
    (paper,), _ = notebooks.papers(Submission("ada", [new, old]), [key])
    assert paper.path == new.path and "several files" in paper.remarks[0]
    same = [Member("07_small.ipynb", PAPER.encode(), 1000.0), Member("07_small.py", b"def merge(): ...", 1000.0)]
    (paper,), _ = notebooks.papers(Submission("ada", same), [key])
    assert paper.path == "07_small.ipynb"


def test_a_file_s_name_does_not_decide_its_chapter(key):
    (paper,), _ = notebooks.papers(Submission("ada", [Member("Untitled1.ipynb", PAPER.encode(), 0.0)]), [key])
    assert paper.stem == "07_small"
    found, remarks = notebooks.papers(
        Submission("bo", [Member("x.ipynb", notebook(cells=[cell("1")]).encode(), 0.0)]), [key]
    )
    assert not found and "none of the exercises" in remarks[0]
    other = notebook(cells=[cell("1")]).encode()
    beside = [Member(name, other, 0.0) for name in ("03_attention.ipynb", "Copy of 04_data (1).ipynb", "notes.ipynb")]
    found, remarks = notebooks.papers(Submission("cy", [Member("07_small.ipynb", PAPER.encode(), 0.0), *beside]), [key])
    assert len(found) == 1 and remarks == ["notes.ipynb has none of the exercises that are graded"]
    found, remarks = notebooks.papers(Submission("dora", beside), [key])  # nothing else: then every file is named
    assert not found and len(remarks) == 3


def test_names_of_learners():
    assert learner_name("  Ada\u0301  By\tron/../x ") == "Adá By ron .. x" and learner_name("\u200b") == "nameless"
    assert learner_name("Ada\u0301") == learner_name("Ad\u00e1")


# ---- the library's own


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("from nanochat_lib.bpe import merge", True),
        ("from nanochat_lib import bpe\ndef merge(t, p, n):\n    return bpe.merge(t, p, n)", True),
        ("import nanochat_lib.bpe as b\nmerge = b.merge", True),
        ("import nanochat_lib.bpe\ndef merge(t, p, n):\n    return nanochat_lib.bpe.merge(t, p, n)", True),
        ("def merge(t, p, n):\n    from nanochat_lib.bpe import merge as m\n    return m(t, p, n)", True),
        ("from nanochat_lib import bpe\ndef merge(t, p, n):\n    return bpe.count_pairs(t)", False),
        ("from nanochat_lib.course.token_figures import merge", True),
        ("from nanochat_lib.course.token_figures import nothing", False),
        ("from nanochat_lib.not_there import merge", False),
        (MERGE, False),
        ("def merge(t, p, n):\n    return merge(t, p, n)", False),
        ("import os\nmerge = os.path.join", False),
        ("def (", False),
    ],
)
@pytest.mark.parametrize("loaded", [True, False])
def test_the_library_s_own_answer_is_seen(text, found, loaded, monkeypatch):
    for name in ("nanochat_lib.bpe", "nanochat_lib.course.token_figures"):
        importlib.import_module(name)
        if not loaded:  # as in a grader that has not needed it yet
            monkeypatch.delitem(sys.modules, name)
    assert bool(borrowed(text, [], "nanochat_lib.bpe:merge")) is found


@pytest.mark.parametrize("graded", ["00", "02"])
def test_a_whole_folder_of_chapters_beside_the_one_that_is_graded(tmp_path, graded):
    """Chapters 00 and 02 both define softcap; the other one is saved last, and still does not count."""
    root = Path(notebooks.__file__).parents[3]
    (tmp_path / "ada").mkdir()
    for i, path in enumerate(sorted((root / "chapters").glob("*.ipynb"), key=lambda path: path.name[:2] != graded)):
        shutil.copy(path, tmp_path / "ada")
        os.utime(tmp_path / "ada" / path.name, (1_000_000 + 600 * i,) * 2)
    (found,), remarks = notebooks.papers(collect(tmp_path)[0], keys(root, graded))
    assert found.path.startswith(f"{graded}_") and found.remarks == [] and remarks == []
    strange = tmp_path / "ada" / f"{'02_model' if graded == '00' else '00_start'}.ipynb"
    shutil.copy(tmp_path / "ada" / found.path, strange)  # under another chapter's name, with this one's cells
    os.utime(strange, (9_000_000, 9_000_000))
    assert notebooks.papers(collect(tmp_path)[0], keys(root, graded))[0][0].path == strange.name
