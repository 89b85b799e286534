"""`predict` and `reveal`: write a guess down before the cell that computes the answer, then see both side by side.

In JupyterLab there is a box for the guess. What stands beside it, also in a notebook that is opened again, is text.
"""

from __future__ import annotations

import math
import re

from nanochat_lib.course import registry, state
from nanochat_lib.course.cases import Prediction
from nanochat_lib.course.mode import widgets_wanted
from nanochat_lib.course.showing import emit, words_html
from nanochat_lib.course.values import describe, is_array, to_numpy


def predict(prediction_id: str, guess: object = None) -> None:
    """Asks the question, and keeps your guess where one is given. In JupyterLab a box takes it, too."""
    data = registry.prediction(prediction_id)
    if guess is not None:
        said = keep(data, guess)
        emit(f"{data.question}\n{said}", f"<b>{words_html(data.question)}</b><br>{words_html(said)}")
        return
    kept = state.read()["predictions"].get(prediction_id, {})
    said = f"your guess so far: {_value(kept['guess'], data.unit)}" if "guess" in kept else ""
    if widgets_wanted():
        _ask(data, said)
        return
    said = said or f'write your guess into this cell: predict("{prediction_id}", …)'
    emit(
        f"{data.question}\n({said})",
        f'<b>{words_html(data.question)}</b><div style="opacity:.65">{words_html(said)}</div>',
    )


def keep(data: Prediction, guess: object) -> str:
    """Records a guess; returns it in words."""
    with state.change() as progress:
        progress["predictions"].setdefault(data.id, {})["guess"] = _plain(guess)
    return f"Your guess: {_value(_plain(guess), data.unit)}"


def read_guess(words: str, unit: str = "") -> object:
    """What somebody typed, as a number where it is one: "1,500", "12 %", "2.5 nats" with that unit."""
    number = words.strip().removesuffix(unit).strip().removesuffix("%")
    number = re.sub(r"[,\s]", "", number).replace("−", "-")
    if re.fullmatch(r"[+-]?\d+", number):
        return int(number)
    try:
        return float(number)
    except ValueError:
        return words.strip()


def _ask(data: Prediction, said: str) -> None:
    """The question with a box. The box lives in this kernel only; the lines above and below it stay."""
    import ipywidgets
    from IPython.display import display

    emit(data.question, f"<b>{words_html(data.question)}</b>")
    box = ipywidgets.Text(
        placeholder=f"your guess{f' ({data.unit})' if data.unit else ''}, then Enter", continuous_update=False
    )
    display(box)
    wait = f'No box? Run this cell again, or write the guess into it: predict("{data.id}", …)'
    said = said[:1].upper() + said[1:] or wait

    def line(text: str) -> dict:
        return {"text/plain": text, "text/html": f'<div style="padding:0 5px;opacity:.65">{words_html(text)}</div>'}

    handle = display(line(said), raw=True, display_id=True)

    def typed(change: dict) -> None:
        if not change["new"].strip():
            return
        guess = read_guess(change["new"], data.unit)
        wrong = data.unit and isinstance(guess, str)
        text = f"A number, please, in {data.unit}." if wrong else keep(data, guess)
        emit(text, words_html(text), handle=handle)

    box.observe(typed, names="value")


def reveal(prediction_id: str, value: object) -> None:
    """Shows the true value beside your guess; without a guess, the true value alone."""
    data = registry.prediction(prediction_id)
    true = _plain(value)
    kept = state.read()["predictions"].get(prediction_id, {})
    lines = [f"It is {_value(true, data.unit)}."]
    if "guess" in kept:
        lines = [
            f"You guessed {_value(kept['guess'], data.unit)}; it is {_value(true, data.unit)}. "
            + compared(kept["guess"], true)
        ]
    with state.change() as progress:
        progress["predictions"].setdefault(prediction_id, {})["value"] = true
    emit("\n".join(lines), "<br>".join(map(words_html, lines)))


def compared(guess: object, true: object) -> str:
    """The distance of a guess in words."""
    numbers = all(isinstance(v, (int, float)) and not isinstance(v, bool) for v in (guess, true))
    if not numbers or not all(map(math.isfinite, (guess, true))):
        return "Right." if str(guess).strip().lower() == str(true).strip().lower() else "Not the same."
    if guess == true or (isinstance(true, float) and abs(guess - true) <= 0.02 * abs(true)):
        return "Right."
    if true != 0 and guess / true > 0:
        ratio = guess / true
        if 0.5 <= ratio <= 2:
            return f"Your guess is {abs(ratio - 1):.0%} too {'high' if ratio > 1 else 'low'}."
        return f"Your guess is {max(ratio, 1 / ratio):,.3g} times too {'high' if ratio > 1 else 'low'}."
    return f"Your guess is off by {abs(guess - true):,.4g}."


def _plain(value: object) -> object:
    """A number or text that JSON can keep."""
    if is_array(value) and not getattr(value, "ndim", 1):
        value = to_numpy(value).item()
    if hasattr(value, "item") and not is_array(value):
        value = value.item()
    if isinstance(value, (bool, int, str)) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return describe(value)


def _value(value: object, unit: str) -> str:
    if isinstance(value, str):
        return value  # in its own words, with its own unit or none
    text = f"{value:,.4g}" if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)
    return f"{text} {unit}".strip()
