"""`explore(draw, …)`: a picture with controls in JupyterLab, and the same picture alone everywhere else.

The picture is an ordinary image below the controls, so a notebook that is opened again still shows it, and a line says
how to wake the controls.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from nanochat_lib.course.mode import strict, widgets_wanted
from nanochat_lib.course.showing import Volatile, as_figure, figure_bundle, show
from nanochat_lib.errors import UserError

WAKE = "No controls, or no answer from them? Run this cell again (Shift+Enter). The picture shows the last values."


@dataclass(frozen=True)
class Control:
    """One value that the reader may change."""

    default: object
    low: float | None = None
    high: float | None = None
    step: float | None = None
    options: tuple = ()


def slider(low: float, high: float, default: float, step: float = 1) -> Control:
    """A number between low and high; whole when all four are."""
    if not low <= default <= high or step <= 0:
        raise UserError(f"slider({low}, {high}, {default}, {step}): needs low <= default <= high and step > 0")
    return Control(default, low, high, step)


def choice(options: Sequence, default: object) -> Control:
    """One of a few options."""
    if default not in options:
        raise UserError(f"choice: the default {default!r} is none of {list(options)!r}")
    return Control(default, options=tuple(options))


def text(default: str) -> Control:
    """A line of text."""
    return Control(str(default))


def explore(draw: Callable, alt: str, **controls: Control) -> None:
    """Shows `draw(**values)`, a matplotlib Figure or a list of things to show, and lets the reader change the values.

    `controls` are slider(…), choice(…) and text(…) by the names of draw's arguments. `alt` says what one sees.
    """
    if not controls or not all(isinstance(control, Control) for control in controls.values()):
        raise TypeError(
            "explore needs controls: name=slider(low, high, default, step), choice([…], default) or text(…)"
        )
    defaults = {name: control.default for name, control in controls.items()}
    if widgets_wanted():
        _explore_live(draw, alt, controls, defaults)
        return
    show(draw(**defaults), alt=alt)
    values = ", ".join(f"{name}={value!r}" for name, value in defaults.items())
    print(f"(drawn with {values}; in JupyterLab this cell has controls)")
    if strict():  # each end of each control must draw, too
        for name, control in controls.items():
            for value in {control.low, control.high, *control.options} - {None, control.default}:
                _close(draw(**{**defaults, name: value}))


def _close(drawn: object) -> None:
    import sys

    if "matplotlib.pyplot" in sys.modules:
        for thing in drawn if isinstance(drawn, (list, tuple)) else [drawn]:
            if (figure := as_figure(thing)) is not None:
                sys.modules["matplotlib.pyplot"].close(figure)


def _explore_live(draw: Callable, alt: str, controls: dict[str, Control], defaults: dict) -> None:
    import ipywidgets
    from IPython.display import HTML, display

    words = f"{max(map(len, controls)) + 3}ch"  # one width for all names, so that the sliders stand in a column
    widgets = {name: _widget(ipywidgets, name, control, words) for name, control in controls.items()}
    display(ipywidgets.VBox(list(widgets.values())))
    display(HTML(f'<div style="opacity:.65;font-size:90%">{WAKE}</div>'))
    handles = [display(data, metadata=meta, raw=True, display_id=True) for data, meta in bundles(draw(**defaults), alt)]

    def redraw(_change: object) -> None:
        try:
            fresh = bundles(draw(**{name: widget.value for name, widget in widgets.items()}), alt)
        except Exception as error:  # shown in the picture's place; the controls stay alive
            fresh = [({"text/plain": f"{type(error).__name__}: {error}"}, {})]
        for handle, (data, meta) in zip(handles, fresh, strict=False):
            handle.update(data, metadata=meta, raw=True)

    for widget in widgets.values():
        widget.observe(redraw, names="value")


def bundles(drawn: object, alt: str) -> list[tuple[dict, dict]]:
    """What was drawn as (data, metadata) of display messages."""
    found = []
    for thing in drawn if isinstance(drawn, (list, tuple)) else [drawn]:
        if (figure := as_figure(thing)) is not None:
            found.append(figure_bundle(figure, alt))
        elif hasattr(thing, "html") and hasattr(thing, "text") and not isinstance(thing, Volatile):
            found.append(({"text/plain": thing.text, "text/html": thing.html}, {}))
        else:
            found.append(({"text/plain": str(thing)}, {}))
    return found


def _widget(ipywidgets: object, name: str, control: Control, words: str) -> object:
    """The ipywidget of a control. Sliders answer when they are let go, so that slow drawings do not queue up."""
    look = {"description": name.replace("_", " "), "style": {"description_width": words}}
    if control.low is None and not control.options:
        wide = ipywidgets.Layout(width="95%")
        return ipywidgets.Text(value=control.default, continuous_update=False, layout=wide, **look)
    look["layout"] = ipywidgets.Layout(width="26em")
    if control.options:
        return ipywidgets.Dropdown(options=list(control.options), value=control.default, **look)
    numbers = (control.low, control.high, control.default, control.step)
    whole = all(isinstance(number, int) for number in numbers)
    kind = ipywidgets.IntSlider if whole else ipywidgets.FloatSlider
    more = {} if whole else {"readout_format": ".3g"}
    return kind(
        value=control.default,
        min=control.low,
        max=control.high,
        step=control.step,
        continuous_update=False,
        **more,
        **look,
    )
