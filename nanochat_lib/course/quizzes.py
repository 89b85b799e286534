"""`quiz(id)`: a question with explained options, offline; buttons in JupyterLab, text and quiz(id, "b") elsewhere."""

from __future__ import annotations

from html import escape

from nanochat_lib.course import registry, state
from nanochat_lib.course.cases import Quiz
from nanochat_lib.course.mode import widgets_wanted
from nanochat_lib.course.showing import emit, words_html
from nanochat_lib.errors import UserError

LETTERS = "abcdefgh"


def quiz(quiz_id: str, answer: str | None = None) -> bool | None:
    """Asks a question; with an answer ("a", "b", …) says whether and why it is right, and returns whether."""
    data = registry.quiz_data(quiz_id)
    if answer is None:
        _ask(data)
        return None
    letters = LETTERS[: len(data.options)]
    letter = str(answer).strip().lower()
    if len(letter) != 1 or letter not in letters:
        raise UserError(f"quiz({quiz_id!r}): answer with one letter from {letters[0]} to {letters[-1]}, got {answer!r}")
    index = letters.index(letter)
    right = record(data, index)
    emit(*verdict(data, index))
    return right


def record(data: Quiz, index: int) -> bool:
    """Keeps an answer; returns whether it is right."""
    right = data.options[index].right
    with state.change() as progress:
        kept = progress["quizzes"].setdefault(data.id, {"tries": 0, "right": False})
        kept["tries"] += 0 if kept["right"] else 1
        kept["answer"], kept["right"] = LETTERS[index], kept["right"] or right
    return right


def verdict(data: Quiz, index: int) -> tuple[str, str]:
    """(text, HTML) about the option chosen."""
    option = data.options[index]
    word, colour = ("Right", "#009E73") if option.right else ("Not quite", "#D55E00")
    text = f"{word}. ({LETTERS[index]}) {option.text}: {option.why}"
    html = (
        f'<b style="color:{colour}">{word}.</b> ({LETTERS[index]}) {words_html(option.text)}: {words_html(option.why)}'
    )
    return text, html


def question(data: Quiz) -> tuple[str, str]:
    """(text, HTML) of the question and its options."""
    options = [f"  ({letter}) {option.text}" for letter, option in zip(LETTERS, data.options, strict=False)]
    items = "".join(
        f'<div style="margin-left:1.2em">({letter}) {words_html(option.text)}</div>'
        for letter, option in zip(LETTERS, data.options, strict=False)
    )
    return "\n".join([data.question, *options]), f"<b>{words_html(data.question)}</b>{items}"


def _ask(data: Quiz) -> None:
    text, html = question(data)
    how = f'answer with quiz("{data.id}", "a")'
    if not widgets_wanted():
        emit(f"{text}\n({how})", f'{html}<div style="opacity:.65">{escape(how)}</div>')
        return
    import ipywidgets
    from IPython.display import display

    emit(text, html)
    letters = list(LETTERS[: len(data.options)])
    buttons = ipywidgets.ToggleButtons(options=letters, value=None, style={"button_width": "3em"})
    buttons.index = None
    display(buttons)
    wait = "Choose a letter. No buttons? Run this cell again, or " + how + "."
    handle = display(
        {"text/plain": wait, "text/html": f'<div style="opacity:.65">{escape(wait)}</div>'}, raw=True, display_id=True
    )

    def chosen(change: dict) -> None:
        if change["new"] in letters:
            index = letters.index(change["new"])
            record(data, index)
            emit(*verdict(data, index), handle=handle)

    buttons.observe(chosen, names="value")
