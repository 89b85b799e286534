"""`show(…)`: figures with their alternative text, tables and text, the same in JupyterLab, papermill and a terminal."""

from __future__ import annotations

import sys

from nanochat_lib.course.mode import widgets_wanted
from nanochat_lib.progress import in_notebook

VOLATILE = {"course": {"volatile": True}}  # metadata of an output that may differ from run to run


class Volatile:
    """Text with measured seconds or the like in it, which a second run will not repeat."""

    def __init__(self, text: str) -> None:
        self.text = str(text)

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__

    def _repr_mimebundle_(self, **_: object) -> tuple[dict, dict]:
        return {"text/plain": self.text}, VOLATILE


def volatile(text: str) -> Volatile:
    """Marks text that differs from run to run; `show(volatile(…))` prints it."""
    return Volatile(text)


def show(*things: object, alt: str = "") -> None:
    """Shows figures, text, and whatever has an HTML form, one below the other.

    `alt` says what one sees in a figure, for those who do not see it; every figure needs it.
    """
    for thing in things:
        if isinstance(thing, (list, tuple)):
            show(*thing, alt=alt)
        elif (figure := as_figure(thing)) is not None:
            if not alt.strip():
                raise TypeError('show(figure) needs alt="what one sees"')
            _show_figure(figure, alt)
        elif isinstance(thing, Volatile):
            emit(thing.text, metadata=VOLATILE)
        elif isinstance(thing, str):
            emit(thing)
        elif hasattr(thing, "text") and hasattr(thing, "html"):
            emit(thing.text, thing.html)
        else:
            _show_any(thing)


def as_figure(thing: object) -> object | None:
    """The matplotlib figure that `thing` is or lies in, else None."""
    if "matplotlib" not in sys.modules:
        return None
    from matplotlib.figure import Figure

    if isinstance(thing, Figure):
        return thing
    figure = getattr(thing, "figure", None)
    return figure if isinstance(figure, Figure) else None


def png(figure: object) -> bytes:
    """The figure as PNG on white, at the course's resolution; pyplot forgets it."""
    from nanochat_lib.report.plots import to_png

    data = to_png(figure, dpi=110)
    if "matplotlib.pyplot" in sys.modules:
        sys.modules["matplotlib.pyplot"].close(figure)
    return data


def _show_figure(figure: object, alt: str) -> None:
    if in_notebook():
        from IPython.display import display

        data, metadata = figure_bundle(figure, alt)
        display(data, metadata=metadata, raw=True)
    else:
        png(figure)  # whoever runs the chapter as a script learns of a figure that cannot be drawn
        print(f"[figure: {alt}]")


def figure_bundle(figure: object, alt: str) -> tuple[dict, dict]:
    """(data, metadata) of a display message.

    nbconvert reads the alternative text from the metadata. JupyterLab shows PNGs without it, so there the same picture
    comes as HTML, too.
    """
    import base64
    from html import escape

    picture = base64.b64encode(png(figure)).decode("ascii")
    data = {"image/png": picture, "text/plain": f"[figure: {alt}]"}
    if widgets_wanted():
        data["text/html"] = f'<img alt="{escape(alt)}" src="data:image/png;base64,{picture}">'
    return data, {"image/png": {"alt": alt}}


def _show_any(thing: object) -> None:
    if in_notebook():
        from IPython.display import display

        display(thing)
    else:
        print(thing)


def emit(text: str, html: str = "", metadata: dict | None = None, handle: object = None) -> None:
    """Text for all, and HTML for those who can show it. `handle` (of a display) is written over."""
    if not in_notebook():
        print(text)
        return
    from IPython.display import display

    data = {"text/plain": text}
    if html:  # JupyterLab indents text by this much, but not HTML
        data["text/html"] = f'<div style="padding:0 5px">{html}</div>'
    if not html and metadata is None and handle is None:
        print(text)
    elif handle is not None:
        handle.update(data, metadata=metadata or {}, raw=True)
    else:
        display(data, metadata=metadata or {}, raw=True)


def words_html(text: str) -> str:
    """A course text as HTML: `code`, **bold** and paragraphs, everything else as it stands."""
    import re
    from html import escape

    html = escape(text.strip())
    html = re.sub(r"`([^`\n]+)`", r"<code>\1</code>", html)
    html = re.sub(r"\*\*([^*\n]+)\*\*", r"<b>\1</b>", html)
    html = re.sub(r"(?<![\w*])\*([^*\s][^*\n]*?)\*(?![\w*])", r"<i>\1</i>", html)
    return html.replace("\n\n", "<br><br>").replace("\n", "<br>")
