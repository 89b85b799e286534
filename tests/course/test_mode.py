"""Fast and strict runs, numbers that the text stands by, and figures and controls outside a notebook."""

import matplotlib.pyplot as plt
import numpy as np
import pytest

from nanochat_lib.course import about, choice, explore, fast, show, slider, text, volatile
from nanochat_lib.course.exploring import bundles
from nanochat_lib.course.mode import CourseError, strict, widgets_wanted
from nanochat_lib.course.showing import words_html
from nanochat_lib.errors import UserError
from nanochat_lib.report.plots import new_figure


def test_modes_come_from_the_environment(monkeypatch) -> None:
    for name, mode in (("COURSE_FAST", fast), ("COURSE_STRICT", strict)):
        monkeypatch.delenv(name, raising=False)
        assert not mode()
        monkeypatch.setenv(name, "1")
        assert mode()
    monkeypatch.setenv("COURSE_WIDGETS", "1")
    monkeypatch.setenv("JPY_SESSION_NAME", "x.ipynb")
    assert not widgets_wanted(), "a script has nowhere to put a widget"


@pytest.mark.parametrize(
    ("value", "within", "inside"),
    [
        (3.7, 0.3, True),
        (np.float32(3.5), 0.3, False),
        (3.6, "10%", True),
        (3.4, "10%", False),
        (float("nan"), 1, False),
    ],
)
def test_a_number_stands_beside_what_the_text_says(capsys, monkeypatch, value, within, inside) -> None:
    monkeypatch.delenv("COURSE_STRICT", raising=False)
    about(value, 3.9, within, name="bytes per token")
    assert (", but the text says 3.9 ±" in capsys.readouterr().out) is not inside
    monkeypatch.setenv("COURSE_STRICT", "1")
    if inside:
        assert about(value, 3.9, within, name="bytes per token") == value
    else:
        with pytest.raises(CourseError, match="bytes per token: "):
            about(value, 3.9, within, name="bytes per token")


def test_about_needs_a_distance() -> None:
    with pytest.raises(UserError, match="within must be positive"):
        about(1, 1, within=0, name="x")


def line(points: int = 3, colour: str = "r", label: str = ""):
    figure, ax = new_figure(height=1)
    ax.plot(range(points), color=colour, label=label)
    return figure


def test_show_outside_a_notebook_prints_the_alternative_text(capsys) -> None:
    figure, _ = plt.subplots()
    show(figure, "and words", volatile("3 s"), [line()], alt="a rising line")
    assert capsys.readouterr().out == "[figure: a rising line]\nand words\n3 s\n[figure: a rising line]\n"
    assert not plt.get_fignums()
    with pytest.raises(TypeError, match="needs alt"):
        show(line())


def test_explore_draws_the_defaults_and_in_strict_runs_every_end_of_every_control(capsys, monkeypatch) -> None:
    drawn = []

    def draw(points, colour, label):
        drawn.append((points, colour, label))
        return line(points, colour, label)

    monkeypatch.delenv("COURSE_STRICT", raising=False)
    controls = {"points": slider(2, 5, 3), "colour": choice(["r", "b"], "r"), "label": text("it")}
    explore(draw, alt="a rising line", **controls)
    assert drawn == [(3, "r", "it")]
    out = capsys.readouterr().out
    assert out.startswith("[figure: a rising line]") and "points=3, colour='r', label='it'" in out
    monkeypatch.setenv("COURSE_STRICT", "1")
    explore(draw, alt="a rising line", **controls)
    assert {(2, "r", "it"), (5, "r", "it"), (3, "b", "it")} < set(drawn)


def test_controls_are_checked() -> None:
    with pytest.raises(UserError, match="needs low <= default <= high"):
        slider(0, 3, 4)
    with pytest.raises(UserError, match="default 'c' is none of"):
        choice(["a", "b"], "c")
    with pytest.raises(TypeError, match="explore needs controls"):
        explore(line, alt="x", points=3)


def test_what_a_drawing_gives_becomes_display_messages() -> None:
    (picture, meta), (words, _) = bundles([line(), "words"], "a line")
    assert set(picture) == {"image/png", "text/plain"} and meta["image/png"]["alt"] == "a line"
    assert words == {"text/plain": "words"}


def test_course_texts_become_html_and_nothing_else_does() -> None:
    assert words_html("use `a<b` and **all**\nnow <b>") == ("use <code>a&lt;b</code> and <b>all</b><br>now &lt;b&gt;")
