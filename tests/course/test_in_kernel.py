"""The same cells in a real kernel: text and pictures everywhere, widgets in JupyterLab only, functions saved."""

import os
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

WIDGET = "application/vnd.jupyter.widget-view+json"
ROOT = Path(__file__).parents[2]

SETUP = """
import sys, types
sys.path.insert(0, "tests/course")
from nanochat_lib.course.cases import Option, Prediction, Quiz, example
from demo_course import exercise
module = types.ModuleType("nanochat_lib.course.checks.demo")
case = example("one pair", ([1, 2, 3, 1, 2], (1, 2), 9), [9, 3, 9])
module.EXERCISES = [exercise(case)]
module.QUIZZES = [Quiz("demo.q", "Which?", [Option("this", "no"), Option("that", "yes", right=True)])]
module.PREDICTIONS = [Prediction("demo.p", "How many?"), Prediction("demo.p2", "How long?", unit="m")]
sys.modules[module.__name__] = module
from nanochat_lib.course import check, explore, hint, mine, predict, progress, quiz, reveal, show, slider, volatile
from nanochat_lib.report.plots import new_figure
"""

EXERCISE = """
from collections import deque
END = object

def starts(tokens, i, pair):
    return tuple(tokens[i : i + 2]) == pair

def merge(tokens, pair, new):
    rest, out, i = deque(tokens), [], 0
    while i < len(tokens):
        if starts(tokens, i, pair):
            out.append(new)
            i += 2
        else:
            out.append(tokens[i])
            i += 1
    return out
"""

TOUCH = """
import ipywidgets
widgets = list(ipywidgets.widgets.widget._instances.values())
[w for w in widgets if isinstance(w, ipywidgets.IntSlider)][0].value = 9
[w for w in widgets if isinstance(w, ipywidgets.ToggleButtons)][0].value = "b"
[w for w in widgets if isinstance(w, ipywidgets.Text)][0].value = "1,500"
"""

DRAW = """
def draw(points):
    figure, ax = new_figure(height=1)
    ax.plot(range(points))
    return figure
explore(draw, alt="a rising line", points=slider(2, 9, 4))
"""

FIGURE = """
from matplotlib import pyplot as plt
figure, ax = plt.subplots()
show(figure, alt="nothing yet")
plt.get_fignums()
"""

CELLS = {
    "setup": SETUP,
    "wrong": 'def merge(tokens, pair, new):\n    return tokens[:1]\ncheck("demo.merge", merge)',
    "exercise": EXERCISE,
    "check": 'check("demo.merge", merge)',
    "mine": 'merge = mine("demo.merge")\nmerge([1, 2], (1, 2), 7)',
    "hint": 'hint("demo.merge")',
    "quiz": 'quiz("demo.q")',
    "answer": 'quiz("demo.q", "b")',
    "guess": 'predict("demo.p", 3)\nreveal("demo.p", 4)',
    "progress": "progress()",
    "figure": FIGURE,
    "volatile": 'show(volatile("3.2 s"))',
    "volatile at the end": 'volatile("3.2 s")',
    "explore": DRAW,
}
LIVE = {
    "lab": 'import os\nos.environ["JPY_SESSION_NAME"] = "chapters/01.ipynb"',
    "live explore": DRAW,
    "live quiz": 'quiz("demo.q")',
    "live guess": 'predict("demo.p2")',
    "touched": TOUCH,
    "live reveal": 'reveal("demo.p2", 1000)',
    "live guess again": 'predict("demo.p2")',
    "driven": 'os.environ["NANOCHAT_PROGRESS_FILE"] = os.devnull',
    "driven quiz": 'quiz("demo.q")',
    "off": 'del os.environ["NANOCHAT_PROGRESS_FILE"]; os.environ["COURSE_WIDGETS"] = "0"',
    "off quiz": 'quiz("demo.q")',
}  # fmt: skip


@pytest.fixture(scope="module")
def ran(tmp_path_factory):
    """(outputs by cell, the learner's folder) of one kernel that ran every cell."""
    home = tmp_path_factory.mktemp("home")
    cells = CELLS | LIVE
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(source) for source in cells.values()])
    gone = ("JPY_SESSION_NAME", "COURSE_WIDGETS", "COURSE_STRICT", "COURSE_FAST")
    env = {name: value for name, value in os.environ.items() if name not in gone}
    env |= {"COURSE_HOME": str(home), "PYTHONPATH": str(ROOT)}
    client = NotebookClient(notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(ROOT)}})
    client.execute(env=env)
    return {name: cell.outputs for name, cell in zip(cells, notebook.cells, strict=True)}, home


def text(outputs: list) -> str:
    return "\n".join(o.get("text") or o.get("data", {}).get("text/plain", "") for o in outputs)


def types(outputs: list) -> set[str]:
    return {kind for output in outputs for kind in output.get("data", {})}


def test_every_cell_speaks_once_and_without_addresses(ran) -> None:
    outputs, _ = ran
    assert not outputs["setup"]
    assert [o.output_type for o in outputs["wrong"]] == ["display_data"], "the result is not printed a second time"
    assert types(outputs["wrong"]) == {"text/plain", "text/html"}
    for name in CELLS:
        assert " at 0x" not in text(outputs[name]) and "stderr" not in [o.get("name") for o in outputs[name]], name
    assert "expected:         [9, 3, 9]" in text(outputs["wrong"])
    assert "Right. (b) that: yes" in text(outputs["answer"]) and "Your guess is 25% too low" in text(outputs["guess"])
    assert 'quiz("demo.q", "a")' in text(outputs["quiz"]) and "Hint 1 of 3" in text(outputs["hint"])


def test_a_function_written_in_cells_is_saved_with_its_helper(ran) -> None:
    outputs, home = ran
    assert "Saved in my_nanochat/demo.py." in text(outputs["check"])
    kept = (home / "my_nanochat" / "demo.py").read_text(encoding="utf-8")
    assert "from collections import deque" in kept and "def starts(" in kept and kept.count("def merge(") == 1
    assert text(outputs["mine"]) == "demo.merge: yours\n\n[7]"


def test_no_widget_outside_lab_and_a_picture_everywhere(ran) -> None:
    outputs, _ = ran
    for name in CELLS:
        assert WIDGET not in types(outputs[name]), name
    picture = next(o for o in outputs["explore"] if "image/png" in o.get("data", {}))
    assert picture.metadata["image/png"]["alt"] == picture.data["text/plain"][9:-1] == "a rising line"
    assert "in JupyterLab this cell has controls" in text(outputs["explore"])
    assert text(outputs["figure"]).endswith("[]"), "pyplot lets the figure go"


def test_in_lab_there_are_controls_above_the_picture_and_a_line_that_wakes_them(ran) -> None:
    outputs, _ = ran
    kinds = [set(o.get("data", {})) for o in outputs["live explore"]]
    assert WIDGET in kinds[0] and "image/png" in kinds[-1]
    html = "".join(o.get("data", {}).get("text/html", "") for o in outputs["live explore"])
    assert "Run this cell again" in html
    assert WIDGET in types(outputs["live quiz"]) and "Which?" in text(outputs["live quiz"])
    assert WIDGET not in types(outputs["off quiz"]) | types(outputs["driven quiz"])


def test_touching_a_control_redraws_the_picture_that_is_kept(ran) -> None:
    outputs, _ = ran
    still, live = (next(o.data["image/png"] for o in outputs[name] if "image/png" in o.get("data", {}))
                   for name in ("explore", "live explore"))  # fmt: skip
    assert still != live and len(live) > 1000
    assert "Right. (b) that: yes" in text(outputs["live quiz"])
    assert WIDGET in types(outputs["live guess"]) and text(outputs["live guess"]).startswith("How long?")
    assert text(outputs["live guess"]).endswith("Your guess: 1,500 m")
    assert text(outputs["live guess again"]).endswith("Your guess so far: 1,500 m")
    assert "You guessed 1,500 m; it is 1,000 m." in text(outputs["live reveal"])


def test_in_lab_a_figure_has_its_words_as_an_alt_attribute(ran) -> None:
    outputs, _ = ran
    (still,), (live,) = ([o for o in outputs[name] if "image/png" in o.get("data", {})]
                         for name in ("explore", "live explore"))  # fmt: skip
    assert "text/html" not in still.data, "elsewhere the picture is kept once"
    assert live.data["text/html"].startswith('<img alt="a rising line" src="data:image/png;base64,')


def test_what_differs_from_run_to_run_is_marked(ran) -> None:
    outputs, _ = ran
    for name in ("volatile", "volatile at the end"):
        (output,) = outputs[name]
        assert output.metadata == {"course": {"volatile": True}} and text([output]) == "3.2 s"
