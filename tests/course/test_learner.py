"""A learner's notebook in every state it may be in: nothing is lost, and what is odd is one line."""

from __future__ import annotations

import json
import sys

import demo
import pytest

from nanochat_lib.course import checks, learner, rules
from nanochat_lib.course.build import build
from nanochat_lib.course.pull import pull
from nanochat_lib.errors import UserError

WANTED = {"pairs.merge": "merge", "pairs.twice": "twice"}
MERGE = "def merge(tokens, pair, new):\n    from nanochat_lib import bpe\n\n    return bpe.merge(tokens, pair, new)"
WRONG = "def merge(tokens, pair, new):\n    return list(tokens)"
TWICE = "def twice(tokens, pair):\n    return merge(merge(tokens, pair, NEW), (NEW, NEW), NEW + 1)"


@pytest.fixture
def course(tmp_path, monkeypatch):
    monkeypatch.setattr(checks, "__path__", list(checks.__path__))
    monkeypatch.setenv("COURSE_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("COURSE_STRICT", raising=False)
    sys.modules.pop("nanochat_lib.course.checks.pairs", None)
    build(root=demo.write(tmp_path))
    rules.add_checks(tmp_path)
    yield tmp_path
    sys.modules.pop("nanochat_lib.course.checks.pairs", None)


def edited(course, change=lambda nb: None, **answers: str):
    """The learner's notebook with answers in the cells of that name and any other change; its path."""
    path = course / "chapters" / "03_pairs.ipynb"
    nb = json.loads(path.read_text(encoding="utf-8"))
    for cell in nb["cells"]:
        name = cell["metadata"].get("id", "").removeprefix("pairs.")
        if name in answers:
            cell["source"] = answers[name].splitlines(True)
    change(nb)
    path.write_text(json.dumps(nb), encoding="utf-8")
    return path


def said(path, capsys, only=None):
    code = learner.print_checks(path, WANTED, only)
    return code, capsys.readouterr().out


def at(nb, name):
    return next(i for i, cell in enumerate(nb["cells"]) if cell["metadata"].get("id") == name)


def test_an_untouched_notebook_has_nothing_that_fails(course, capsys):
    code, out = said(edited(course), capsys)
    assert code == 0 and out.endswith("0 passed, 0 failed, 2 not attempted\n")


def test_right_and_wrong_answers(course, capsys):
    code, out = said(edited(course, merge=MERGE), capsys)
    assert code == 0 and "1 passed, 0 failed, 1 not attempted" in out
    assert (course / "home" / "my_nanochat" / "pairs.py").exists()
    code, out = said(edited(course, merge=WRONG), capsys)
    assert code == 1 and "0 passed, 1 failed, 1 not attempted" in out and "one pair" in out


@pytest.mark.parametrize("leave", ["import os; os._exit(0)", "import sys; sys.exit(0)"])
@pytest.mark.parametrize("inside", [True, False])
def test_code_that_leaves_python_fails_and_the_rest_goes_on(course, capsys, leave, inside):
    answer = f"def merge(tokens, pair, new):\n    {leave}" if inside else f"{WRONG}\n{leave}"
    code, out = said(edited(course, merge=answer, twice=TWICE), capsys)
    assert code == 1 and "SystemExit" in out and out.endswith("1 passed, 1 failed, 0 not attempted\n")


def test_later_exercises_build_on_the_library_where_the_earlier_is_wrong(course, capsys):
    code, out = said(edited(course, merge=WRONG, twice=TWICE), capsys)
    assert code == 1 and "1 passed, 1 failed" in out
    assert said(edited(course), capsys, "pairs.twice")[1].endswith("1 passed, 0 failed, 0 not attempted\n")


def copied(nb):
    nb["cells"].append(json.loads(json.dumps(nb["cells"][at(nb, "pairs.merge")])) | {"id": "copy"})


def retyped(nb):
    cell = nb["cells"][at(nb, "pairs.merge")]
    cell["cell_type"] = "markdown"
    del cell["outputs"], cell["execution_count"]


def split(nb):
    i = at(nb, "pairs.merge")
    nb["cells"].insert(i + 1, json.loads(json.dumps(nb["cells"][i])) | {"source": "# my notes", "id": "half"})


def bare(nb):
    for cell in nb["cells"]:
        if "setup" not in cell["metadata"].get("tags", []):
            cell["metadata"] = {}
        cell.pop("id")


def only_nbgrader(nb):
    cell = nb["cells"][at(nb, "pairs.merge")]
    cell["metadata"] = {"nbgrader": cell["metadata"]["nbgrader"]}
    cell["id"] = "other"


def deleted(nb):
    del nb["cells"][at(nb, "pairs.twice")]


def magic(nb):
    nb["cells"].append({"cell_type": "code", "id": "m", "metadata": {}, "source": "%time x = 1\n!ls"})


def broken_elsewhere(nb):
    nb["cells"].append({"cell_type": "code", "id": "m", "metadata": {}, "source": "def half("})


@pytest.mark.parametrize(
    ("change", "remark"),
    [
        (copied, "cells 4, 11 carry its id; cell 11 counts"),
        (retyped, "cell 4 has become a markdown cell"),
        (split, "cells 4, 5 carry its id; cell 4 counts"),
        (bare, "cell 4 defines merge and counts as its cell"),
        (only_nbgrader, ""),
        (deleted, "pairs.twice: its cell is not in the notebook"),
        (magic, ""),
        (broken_elsewhere, "cell 11 does not run (SyntaxError"),
    ],
)
def test_a_changed_notebook_keeps_its_answers(course, capsys, change, remark):
    code, out = said(edited(course, change, merge=MERGE), capsys)
    assert code == 0 and "1 passed, 0 failed, 1 not attempted" in out
    assert (f"note: {remark}" in out or f": {remark}" in out) if remark else "note:" not in out


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ("def merge(tokens:\n    pass", "cell 4 does not run (SyntaxError"),
        ("def join(tokens, pair, new):\n    return tokens", "cell 4 defines no merge"),
        ("import nosuch\ndef merge(tokens, pair, new):\n    return tokens", "cell 4 does not run (ModuleNotFoundError"),
    ],
)
def test_a_broken_exercise_cell_is_one_line_and_the_others_go_on(course, capsys, source, line):
    code, out = said(edited(course, merge=source, twice=TWICE), capsys)
    assert code == 1 and f"pairs.merge: {line}" in out and "1 passed, 1 failed" in out


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"{ no", "is damaged"),
        (b"[]", "is damaged"),
        (b'{"nbformat": 3, "worksheets": []}', "format 3"),
        (b'{"nbformat": 4}', "is damaged"),
        (b"\xff\xfe\x00", "not a text file"),
        (None, "does not exist"),
    ],
)
def test_what_is_no_notebook_is_one_line(tmp_path, content, message):
    path = tmp_path / "x.ipynb"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=message) as error:
        learner.read(path)
    assert "\n" not in str(error.value)


def test_a_script_is_read_too_and_an_unknown_exercise_refused(course, capsys):
    path = course / "chapters" / "03_pairs.py"
    text = path.read_text(encoding="utf-8")
    start = text.index("def merge")
    path.write_text(text[:start] + MERGE + "\n\n" + text[text.index("# %%", start) :], encoding="utf-8")
    assert said(path, capsys)[0] == 0
    with pytest.raises(UserError, match=r"no exercise 'pairs\.nosuch'"):
        learner.print_checks(path, WANTED, "pairs.nosuch")


# --- pull -------------------------------------------------------------------------------------------------------------


def diff(course, change=lambda nb: None, **answers):
    source = course / "solutions" / "03_pairs.py"
    before = source.read_bytes()
    text = pull(source, edited(course, change, **answers))
    assert source.read_bytes() == before
    return [line for line in text.split("\n") if line[:1] in ("+", "-") and line[:3] not in ("+++", "---")], text


def test_pull_of_an_untouched_notebook_is_empty(course):
    assert diff(course) == ([], "")


def test_pull_shows_words_code_and_new_cells_at_the_sources_lines(course):
    def change(nb):
        nb["cells"][0]["source"][-1] = "Merge it."
        nb["cells"].insert(3, {"cell_type": "markdown", "id": "n", "metadata": {"collapsed": True}, "source": "New."})

    lines, text = diff(course, change, quiz='quiz("pairs.q_ties")\nprint()')
    assert [line for line in lines if line != "+"] == [
        "-# Merge the *most frequent* pair. In a diagram, %% is a comment.", "+# Merge it.",
        "+# %% [markdown]", "+# New.", "+print()",
    ]  # fmt: skip
    number = demo.CHAPTER.split("\n").index("# Merge the *most frequent* pair. In a diagram, %% is a comment.") + 1
    assert f"@@ -{number - 3}," in text


def test_pull_keeps_answers_and_hidden_cells_where_they_are(course):
    stub = [
        "def merge(tokens, pair, new):", '    """New words."""', "    out, i = [], 0", "    more = 1",
        '    raise NotImplementedError("think")', "    return out",
    ]  # fmt: skip
    lines, _ = diff(course, merge="\n".join(stub))
    assert lines == [
        '-    """Replaces every `pair` in `tokens` by `new`."""', '+    """New words."""',
        '-    raise NotImplementedError("your turn")', "+    more = 1", '+    raise NotImplementedError("think")',
    ]  # fmt: skip


def test_pull_of_a_deleted_exercise_takes_its_hidden_cell_along(course):
    lines, _ = diff(course, lambda nb: nb["cells"].pop(at(nb, "pairs.twice.check")))
    assert lines[0] == '-# %% id="pairs.twice.check"' and all(line[0] == "-" for line in lines)
