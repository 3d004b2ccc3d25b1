"""Predictions: commit to a number before the result is shown.

Learners remember a result better once they have predicted it. Nothing here stops a notebook: who
has not committed to a prediction is asked for one, and can show the result anyway.
"""

import html
import linecache
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from pathlib import Path
from typing import Any

import anywidget
import traitlets
from IPython.core.getipython import get_ipython

from course_lib.core.errors import CourseError
from course_lib.display.show import NAMED, has_widgets, put, widget_data

YES_NO = ("yes", "no")
ASK = "You have not committed to a prediction yet."
NOT_RUN = "The cell above that asks for this prediction was not run."
_JS = Path(__file__).with_name("predict.js").read_text(encoding="utf-8")


@dataclass
class Prediction:
    """A question, and the learner's prediction: a number, one of `choices`, or None so far."""

    question: str
    unit: str = ""
    choices: Sequence[str] = field(default=())
    value: float | str | None = None
    name: str = "guess"
    truth: str = ""  # as `reveal` was told, with its unit
    cell: str = ""  # the cell that reveals it

    def commit(self, value: object) -> None:
        """Set the prediction; a later one replaces it.

        Raises: CourseError when it is no number, or none of the choices
        """
        self.value = self._read(value)
        put({"text/plain": f"Committed: {self.words(self.value)}"})

    def words(self, value: object) -> str:
        """Return a value with its unit."""
        return value if isinstance(value, str) else f"{_number(value)} {self.unit}".strip()

    def _read(self, value: object) -> float | str:
        if self.choices:
            word = _word(value)
            if word not in self.choices:
                raise CourseError(
                    f"predict: need one of {', '.join(self.choices)}; got {value!r}. "
                    f"Try {self.name}.commit({self.choices[0]!r})."
                )
            return word
        try:
            return _float(value, self.unit)
        except (ValueError, TypeError, ZeroDivisionError, OverflowError):
            raise CourseError(
                f"predict: need a number{f' of {self.unit}' if self.unit else ''}; got {value!r}. "
                f"Try {self.name}.commit(12), or .commit(1.5e9), or .commit('3/4')."
            ) from None


def predict(
    question: str, unit: str = "", value: object = None, *, choices: Sequence[str] = ()
) -> Prediction:
    """Ask for a prediction: a form in a notebook, else a line that says how to commit.

    `choices=YES_NO` (or other words) asks for a word instead of a number. A `value` commits at
    once; what was committed to the same question stays when its cell is run again.

    Raises: CourseError for a `value` that is no number, or none of the choices
    """
    prediction = Prediction(question, unit, tuple(choices), name=_name_in_caller())
    before = sys._getframe(1).f_globals.get(prediction.name)
    if isinstance(before, Prediction) and before.question == question:
        prediction.value = before.value
    if value is not None:
        prediction.value = prediction._read(value)
        put({"text/plain": f"{question}: you predict {prediction.words(prediction.value)}."})
        return prediction
    data: dict[str, Any] = {"text/plain": _invitation(prediction)}
    if has_widgets():
        data.update(widget_data(Form(prediction)))
    put(data)
    return prediction


def reveal(prediction: Prediction, truth: object) -> None:
    """Show the prediction, the truth and their ratio; without a prediction, ask for one first."""
    if prediction.choices or isinstance(truth, bool):
        truth = _word(truth)
    prediction.truth = prediction.words(truth)
    if prediction.value is None:
        return _ask_first(prediction)
    cells = {"yours": prediction.words(prediction.value), "true": prediction.truth}
    cells |= _verdict(prediction, truth)
    asked = prediction.question + ("" if prediction.question.endswith("?") else ":")
    text = f"{asked} " + ", ".join(f"{name} {cell}" for name, cell in cells.items())
    put({"text/plain": f"{text}.", "text/html": _table(prediction, cells)})


def _ask_first(prediction: Prediction) -> None:
    """Ask for a prediction; the truth is folded, and plain text says how to print it."""
    ask = f"{ASK} Please do, above, then run this again"
    asked = f"{prediction.question}: "
    if not prediction.question:
        ask, asked = f"{NOT_RUN} Run it, commit to a prediction, then run this again", ""
    shown = f"print({prediction.name}.truth)"
    put(
        {
            "text/plain": f"{asked}{ask}, or show it anyway: {shown}.",
            "text/html": f"<p>{html.escape(ask)}.</p><details><summary>Show anyway</summary>"
            f"{_table(prediction, {'true': prediction.truth})}</details>",
        }
    )


def stand_in(names: dict[str, Any], cell: str, cell_id: str | None) -> None:
    """Give a cell that reveals predictions one without a question for each that was not asked.

    So a skipped cell costs a sentence, not the measurement below it. A prediction that another cell
    has revealed counts as not asked: the name is that of an earlier question.
    """
    if "reveal(" not in cell:
        return
    for name in NAMED.findall(cell):
        asked = names.get(name)
        if asked is None or (isinstance(asked, Prediction) and asked.cell not in ("", cell_id)):
            asked = names[name] = Prediction("", name=name)
        if isinstance(asked, Prediction):
            asked.cell = cell_id or ""


def _before(cell: Any) -> None:
    if (shell := get_ipython()) is not None:
        stand_in(shell.user_ns, cell.raw_cell, cell.cell_id)


if (_shell := get_ipython()) is not None:
    _shell.events.register("pre_run_cell", _before)


class Form(anywidget.AnyWidget):
    """Form with a question, a field or choices, and a button that commits; `answer` shows it."""

    _esm = _JS
    question = traitlets.Unicode().tag(sync=True)
    label = traitlets.Unicode().tag(sync=True)
    choices: Any = traitlets.List().tag(sync=True)
    answer = traitlets.Unicode().tag(sync=True)

    def __init__(self, prediction: Prediction) -> None:
        unit = f" ({prediction.unit})" if prediction.unit else ""
        super().__init__(
            question=prediction.question,
            label=f"your prediction{unit}",
            choices=list(prediction.choices),
        )
        self._prediction = prediction
        if prediction.value is not None:
            self.answer = f"Committed: {prediction.words(prediction.value)}"
        self.on_msg(self._hear)

    def _hear(self, _widget: object, content: dict[str, Any], _buffers: object) -> None:
        prediction = self._prediction
        try:
            prediction.value = prediction._read(content["commit"])
            self.answer = f"Committed: {prediction.words(prediction.value)}"
        except CourseError:
            words = " or ".join(prediction.choices)
            self.answer = f"Choose {words}." if words else "Type a number: 12, 1.5e9 or 3/4."


def _name_in_caller() -> str:
    """Return the variable to which the caller of `predict` assigns its result, or `guess`."""
    frame = sys._getframe(2)
    line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
    match = re.match(r"\s*(\w+) *= *predict\(", line)
    return match[1] if match else "guess"


def _invitation(prediction: Prediction) -> str:
    kind = f" ({' or '.join(prediction.choices)})" if prediction.choices else ""
    unit = f", in {prediction.unit}" if prediction.unit else ""
    example = repr(prediction.choices[0]) if prediction.choices else "12"
    asked = f"{prediction.question}{unit}{kind}"
    stop = "" if asked.endswith("?") else "."
    return f"Predict: {asked}{stop} Commit with {prediction.name}.commit({example})."


def _verdict(prediction: Prediction, truth: object) -> dict[str, str]:
    """Return right or not for words, the ratio of numbers, or their difference for 0 and signs."""
    if prediction.choices:
        return {"so you are": "right" if prediction.value == truth else "not right this time"}
    yours, true = _float(prediction.value), _float(truth)
    if true == 0 or yours * true < 0:
        return {"difference": prediction.words(yours - true)}
    return {"ratio": f"{yours / true:.3g}"}


def _table(prediction: Prediction, cells: dict[str, str]) -> str:
    head = "".join(f"<th scope='col'>{html.escape(name)}</th>" for name in cells)
    body = "".join(f"<td>{html.escape(cell)}</td>" for cell in cells.values())
    caption = html.escape(prediction.question)
    return (
        f"<table><caption style='white-space:nowrap;text-align:left'>{caption}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody><tr>{body}</tr></tbody></table>"
    )


def _word(value: object) -> str:
    return ("yes" if value else "no") if isinstance(value, bool) else str(value)


def _float(value: Any, unit: str = "") -> float:
    """Convert a number, or what people type: `12`, `1.5e9`, `3/4`, `12 GiB`."""
    if isinstance(value, str):
        return float(Fraction(value.strip().removesuffix(unit).strip()))
    if isinstance(value, bool) or value is None or not math.isfinite(value):
        raise ValueError(value)
    return float(value)


def _number(value: Any) -> str:
    """Format four significant digits: `1234567 -> '1,235,000'`, `0.8125 -> '0.8125'`."""
    number = float(value)
    if number == 0 or not 1e-3 <= abs(number) < 1e15:
        return f"{number:.4g}"
    digits = max(0, 3 - math.floor(math.log10(abs(number))))
    text = f"{number:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
