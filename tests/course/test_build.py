"""The course build: grammar, both directions of py:percent, what learners get, leaks, and byte-identical results."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import demo
import jupytext
import nbformat
import pytest

from nanochat_lib.course.build import build, cell_ids, notebook, render
from nanochat_lib.course.grammar import (
    HEADER,
    Cell,
    for_instructor,
    for_learner,
    parse,
    read,
    secrets,
    solution,
    stub,
    write_cell,
)
from nanochat_lib.errors import UserError

ROOT = Path(__file__).parents[2]

EXERCISE = demo.CHAPTER


def course(tmp_path: Path, text: str = EXERCISE, stem: str = demo.STEM) -> Path:
    return demo.write(tmp_path, text, stem=stem)


def write(cells: list[Cell]) -> str:
    return HEADER + "\n" + "\n".join(map(write_cell, cells))


def test_parse_and_write_are_inverse():
    cells = parse(EXERCISE, "x.py")
    again = read(write(cells), "x.py")
    assert [(c.kind, c.source, c.metadata) for c in again] == [(c.kind, c.source, c.metadata) for c in cells]
    assert [c.kind for c in cells] == ["markdown", "code", "markdown", *["code"] * 8, "raw"]
    assert cells[-1].source == "left as it is\n\n  indented"
    assert cells[3].metadata == {
        "tags": ["exercise"], "id": "pairs.merge", "points": 2, "minutes": 15, "level": 2,
        "library": "nanochat_lib.bpe:merge",
    }  # fmt: skip


def test_jupytext_reads_the_same_cells_and_keeps_them_on_a_round_trip():
    text = write(for_learner(parse(EXERCISE, "x.py")))
    ours = read(text, "x.py")

    def cells(nb: nbformat.NotebookNode) -> list[tuple]:
        blank_lines = ("lines_to_next_cell",)
        return [
            (c.cell_type, c.source, {k: v for k, v in c.metadata.items() if k not in blank_lines}) for c in nb.cells
        ]

    theirs = jupytext.reads(text, "py:percent")
    assert cells(theirs) == [(c.kind, c.source, c.metadata) for c in ours]
    assert theirs.metadata["kernelspec"]["name"] == "python3"
    assert cells(jupytext.reads(jupytext.writes(theirs, "py:percent"), "py:percent")) == cells(theirs)
    # and the notebook that is built beside it holds the very same cells
    assert cells(nbformat.reads(notebook(ours, "03_pairs"), 4)) == cells(theirs)


def test_a_learner_gets_stubs_and_an_instructor_answers():
    cells = parse(EXERCISE, "x.py")
    learner, instructor = write(for_learner(cells)), write(for_instructor(cells))
    assert "NotImplementedError" in learner and "while i < len(tokens)" not in learner
    assert "hidden(" not in learner and "pairs.merge.hidden" not in learner
    assert "while i < len(tokens)" in instructor and "NotImplementedError" not in instructor
    assert "hidden(" in instructor
    assert "# ---" not in learner.removeprefix(HEADER) + instructor.removeprefix(HEADER)
    namespace: dict = {}
    exec(solution(cells[3]).source, namespace)
    assert namespace["merge"]([1, 2, 1, 2, 1], (1, 2), 3) == [3, 3, 1]


def test_several_regions_in_one_exercise():
    first = "# --- stub\nb = 1\n# --- solution\nb = 2\n# --- end"
    second = "# --- stub\n# --- solution\nc = 3\n# --- end"
    cell = Cell("code", f"a = 0\n{first}\n{second}\nd = 4")
    assert stub(cell).source == "a = 0\nb = 1\nd = 4"
    assert secrets([cell]) == ["b = 2", "c = 3"]


def test_build_writes_its_files_twice_the_same(tmp_path):
    course(tmp_path)
    written = build(root=tmp_path)
    names = ["solutions/03_pairs.ipynb", "chapters/03_pairs.py", "chapters/03_pairs.ipynb"]
    names += ["nanochat_lib/course/checks/pairs.json", "solutions/exercises.lock"]
    assert [p.relative_to(tmp_path).as_posix() for p in written] == names
    first = {name: (tmp_path / name).read_bytes() for name in names}
    assert [b"while i < len(tokens)" in first[name] for name in names] == [True, False, False, False, False]
    assert [b"NotImplementedError" in first[name] for name in names] == [False, True, True, False, False]
    assert build(root=tmp_path) == []
    for name in names:
        (tmp_path / name).unlink()
    build(root=tmp_path)
    assert {name: (tmp_path / name).read_bytes() for name in names} == first
    assert build(check=True, root=tmp_path) == []


def test_notebooks_are_valid_have_a_kernel_no_outputs_and_stable_ids(tmp_path):
    build(root=course(tmp_path))
    for name in ("chapters/03_pairs.ipynb", "solutions/03_pairs.ipynb"):
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            nb = nbformat.read(tmp_path / name, 4)
            nbformat.validate(nb)
        assert nb.metadata.kernelspec.name == "python3" and nb.metadata.language_info.name == "python"
        assert all(not c.get("outputs") and c.get("execution_count") is None for c in nb.cells)
        ids = ["pairs-title", "pairs-setup", "pairs-the-rule", "pairs-merge", "pairs-merge-check"]
        assert [c.id for c in nb.cells[:5]] == ids
        assert nb.cells[1].metadata.tags == ["setup"]
        assert nb.cells[3].metadata.nbgrader == {
            "cell_type": "code", "grade": False, "grade_id": "pairs-merge", "locked": False, "schema_version": 3,
            "solution": True, "task": False,
        }  # fmt: skip
        graded = nb.cells[4].metadata.nbgrader
        assert graded.grade and graded.locked and not graded.solution and graded.points == 2


def test_renumbering_a_chapter_keeps_the_ids():
    cells = parse(EXERCISE, "x.py")
    assert cell_ids(cells, "03_pairs") == cell_ids(cells, "04_pairs")


@pytest.mark.parametrize("name", ["solutions/03_pairs.ipynb", "chapters/03_pairs.py", "chapters/03_pairs.ipynb"])
@pytest.mark.parametrize("damage", ["edited", "missing", "crlf"])
def test_check_names_the_file_that_differs_and_writes_nothing(tmp_path, name, damage):
    build(root=course(tmp_path))
    path = tmp_path / name
    if damage == "missing":
        path.unlink()
    else:
        old = path.read_bytes()
        path.write_bytes(old.replace(b"NEW = 9", b"NEW = 8") if damage == "edited" else old.replace(b"\n", b"\r\n"))
        assert path.read_bytes() != old
    before = path.read_bytes() if path.exists() else None
    with pytest.raises(UserError, match=name):
        build(check=True, root=tmp_path)
    assert (path.read_bytes() if path.exists() else None) == before


def test_check_names_files_without_a_source(tmp_path):
    build(root=course(tmp_path))
    (tmp_path / "chapters" / "02_gone.ipynb").write_text("{}", encoding="utf-8")
    with pytest.raises(UserError, match=r"chapters/02_gone\.ipynb has no source"):
        build(check=True, root=tmp_path)


@pytest.mark.parametrize(
    "leak",
    [
        'answer = """\n        if i + 1 < len(tokens) and (tokens[i], tokens[i + 1]) == pair:\n"""',
        'print(\n    example("overlap", ([7, 7, 7], (7, 7), 9), [9, 7]),\n)',
        "# while i < len(tokens):\n#         if i + 1 < len(tokens) and (tokens[i], tokens[i + 1]) == pair:",
    ],
)
@pytest.mark.parametrize("where", ["source", "notes.md", "metadata", "output"])
def test_an_answer_or_hidden_text_in_chapters_is_found(tmp_path, leak, where):
    text = EXERCISE
    if where == "source":  # the author copied it into a cell that everybody sees
        text = text.replace("NEW = 9\n", f"NEW = 9\nfrom nanochat_lib.course.cases import example\n{leak}\n")
    course(tmp_path, text)
    if where == "source":
        with pytest.raises(UserError, match="shows an answer or hidden text"):
            build(root=tmp_path)
        return
    build(root=tmp_path)
    if where == "notes.md":
        (tmp_path / "chapters" / "notes.md").write_text(leak, encoding="utf-8")
    else:
        path = tmp_path / "chapters" / "extra.ipynb"
        nb = json.loads((tmp_path / "chapters" / "03_pairs.ipynb").read_text(encoding="utf-8"))
        if where == "metadata":
            nb["metadata"]["note"] = leak
        else:
            nb["cells"][1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": leak.splitlines(True)}]
        path.write_text(json.dumps(nb), encoding="utf-8")
    with pytest.raises(UserError, match="shows an answer or hidden text of 03_pairs"):
        build(check=True, root=tmp_path)


def test_outputs_in_chapters_are_found(tmp_path):
    build(root=course(tmp_path))
    nb = json.loads((tmp_path / "chapters" / "03_pairs.ipynb").read_text(encoding="utf-8"))
    nb["cells"][1]["execution_count"] = 1
    (tmp_path / "chapters" / "extra.ipynb").write_text(json.dumps(nb), encoding="utf-8")
    with pytest.raises(UserError, match="holds outputs"):
        build(check=True, root=tmp_path)


def cell(head: str, body: str = "x = 1") -> str:
    return f"{HEADER}\n# %%{head}\n{body}\n"


EX = ' tags=["exercise"] id="a.b" points=1 minutes=5 level=1'
REGION = "# --- stub\npass\n# --- solution\nx = 1\n# --- end"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x = 1\n", "header"),
        (HEADER + "\nx = 1\n\n# %%\n", "before the first cell"),
        (cell(" A title"), "key=value"),
        (cell(" [latex]"), "not a cell header"),
        (cell(' colour="red"'), "key=value"),
        (cell(' id="a" id="b"'), "key=value"),
        (cell(" points=two"), "not JSON"),
        (cell(' tags=["secret"]'), "tags"),
        (cell("", "%matplotlib inline"), "magic"),
        (cell("", "x = 1\n!pip install jax"), "magic"),
        (cell("", "%%bash\nls"), "magic"),
        (cell("", "print?"), "magic"),
        (cell("", "def f(:\n    pass"), "not valid Python"),
        (cell("", 'open("/home/me/data.txt")'), "path on one machine"),
        (cell("", 'open(r"C:\\data\\x.txt")'), "path on one machine"),
        (cell("", 'open("~/data.txt")'), "path on one machine"),
        (cell(" [markdown]", "# see /home/me/notes"), "one machine"),
        (cell(" [markdown]", "no comment sign"), "must start with '# '"),
        (cell(" [markdown]", "# before\n# %% a diagram's comment\n# after"), "key=value"),
        (cell(' tags=["exercise"] id="a.b" points=1', REGION), "lacks minutes, level"),
        (cell(EX, "x = 1"), "no '# --- stub'"),
        (cell(EX, "# --- stub\npass\n# --- end"), "markers"),
        (cell(EX, "# --- solution\nx = 1\n# --- stub\npass\n# --- end"), "markers"),
        (cell(EX, REGION.replace("pass", "def")), "not valid Python"),
        (cell("", REGION), "tagged exercise"),
        (cell(' points=2'), "without the tag exercise"),
        (cell(' nbgrader={"grade": true}'), "written by the build"),
        (cell(EX.replace('"a.b"', '"merge"'), REGION), "topic.name"),
        (cell(EX.replace('"a.b"', '"a.B"'), REGION), "topic.name"),
        (cell(EX.replace("points=1", "points=6"), REGION), "points must be a whole number from 1 to 5, got 6"),
        (cell(EX.replace("level=1", "level=true"), REGION), "level must be"),
        (cell(EX + ' library="numpy:sum"', REGION), "library must name a symbol"),
        (cell(' tags=["parameters"]') + '\n# %% tags=["parameters"]\ny = 2\n', "more than one"),
    ],
)  # fmt: skip
def test_what_the_grammar_does_not_know_is_refused(text, message):
    with pytest.raises(UserError, match=message):
        parse(text, "x.py")


def test_routes_and_urls_are_not_paths():
    text = 'fetch = ["/chat/completions", "https://example.org/home/x", "a/home/b", "/"]'
    assert parse(cell("", text) + "\n# %% [markdown]\n# `GET /health`, see https://example.org/usr/bin\n", "x.py")


def test_two_cells_of_one_name_are_refused():
    text = HEADER + '\n# %% [markdown]\n# ## Loss\n\n# %% id="loss"\nx = 1\n'
    with pytest.raises(UserError, match=r"03_pairs\.py:12: two cells are called pairs-loss .*line 9"):
        render(parse(text, "x.py"), "03_pairs")


def test_windows_line_ends_and_a_byte_order_mark_read_the_same():
    strange = "\ufeff" + EXERCISE.replace("\n", "\r\n")
    assert parse(strange, "x.py") == parse(EXERCISE, "x.py")


def test_a_chapter_needs_a_number_and_a_folder_needs_chapters(tmp_path):
    with pytest.raises(UserError, match="no chapter"):
        build(root=tmp_path)
    with pytest.raises(UserError, match="NN_topic"):
        build(root=course(tmp_path, stem="pairs"))


def test_the_course_in_this_repository_is_up_to_date():
    assert build(check=True, root=ROOT) == []


def test_the_course_can_be_run_by_papermill():
    for path in sorted((ROOT / "chapters").glob("*.ipynb")):
        nb = nbformat.read(path, 4)
        tagged = [c for c in nb.cells if "parameters" in c.metadata.get("tags", [])]
        assert len(tagged) <= 1 and len({c.id for c in nb.cells}) == len(nb.cells)


def test_only_learners_notebooks_are_paired():
    """Saving a chapter in JupyterLab may write its .py; saving a solution must never touch the hand-edited source."""
    from jupytext.config import load_jupytext_config, notebook_formats

    for folder, wanted in (("chapters", {"ipynb", "py"}), ("solutions", {"ipynb"}), ("docs", {"ipynb"})):
        path = str(ROOT / folder / "12_capstone.ipynb")
        formats = notebook_formats(nbformat.v4.new_notebook(), load_jupytext_config(path), path)
        assert {f["extension"].strip(".") for f in formats} == wanted, folder


def test_jupyterlab_opens_the_chapters_from_the_projects_root(tmp_path):
    """A pairing that jupytext's contents manager cannot resolve shows nothing but an error box."""
    import asyncio
    import shutil

    from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager
    from jupytext.async_contentsmanager import build_async_jupytext_contents_manager_class

    for name in ("chapters", "solutions"):
        shutil.copytree(ROOT / name, tmp_path / name)
    shutil.copy(ROOT / "jupytext.toml", tmp_path)
    manager = build_async_jupytext_contents_manager_class(AsyncLargeFileManager)(root_dir=str(tmp_path))
    source = (tmp_path / "solutions" / "12_capstone.py").read_bytes()
    for name in ("chapters/12_capstone.ipynb", "chapters/12_capstone.py", "solutions/12_capstone.ipynb"):
        model = asyncio.run(manager.get(name, type="notebook", content=True))
        assert len(model["content"]["cells"]) > 30, name
        asyncio.run(manager.save(model, name))
    assert (tmp_path / "solutions" / "12_capstone.py").read_bytes() == source


@pytest.mark.parametrize("newer", [".ipynb", ".py"])
def test_a_first_save_in_jupyterlab_changes_no_line_of_the_py(tmp_path, newer):
    """Whichever of the two files JupyterLab reads the cells from."""
    import asyncio
    import os
    import shutil

    from ipykernel.kernelspec import get_kernel_dict
    from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager
    from jupytext.async_contentsmanager import build_async_jupytext_contents_manager_class

    shutil.copytree(ROOT / "chapters", tmp_path / "chapters")
    manager = build_async_jupytext_contents_manager_class(AsyncLargeFileManager)(root_dir=str(tmp_path))
    language = {"name": "python", "file_extension": ".py", "mimetype": "text/x-python", "version": "3.12.1"}
    for path in sorted((tmp_path / "chapters").glob("*.ipynb")):
        pair = path.with_suffix(".py")
        built = pair.read_bytes()
        os.utime(path, (1e9, 1e9 + 0.5 * (newer == ".ipynb")))  # jupytext refuses a difference of more than a second
        os.utime(pair, (1e9, 1e9 + 0.5 * (newer == ".py")))
        name = f"chapters/{path.name}"
        model = asyncio.run(manager.get(name, type="notebook", content=True))
        spec = {"name": "python3", "language": "python", "display_name": get_kernel_dict()["display_name"]}
        model["content"]["metadata"] |= {"kernelspec": spec, "language_info": language}
        asyncio.run(manager.save(model, name))
        assert pair.read_bytes() == built, f"{pair.name}, {newer} newer"


def test_a_learners_py_may_name_its_kernel_differently():
    other = EXERCISE.replace("Python 3 (ipykernel)", "Python [conda env:course]")
    assert other != EXERCISE and read(other, "x.py") == read(EXERCISE, "x.py")
