"""A picture with choices, defined once: for the sliders of a notebook, and for a page of the site.

`Live` names the choices, as `course_lib.display.explore` takes them, and computes a `Drawing`: one
sentence, and panels of plain data. A notebook draws the same values with matplotlib; a page runs
`Live.answer` where there is only Python, and draws the panels.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from course_lib.core.errors import CourseError
from course_lib.core.records import COMMUNICATION_KINDS, Event


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Lines over the same x; `log` names the axes with a logarithmic scale: "", "x" or "xy"."""

    x: Sequence[float]
    ys: Mapping[str, Sequence[float]]
    x_label: str
    y_label: str
    log: str = ""


@dataclass(frozen=True, kw_only=True)
class Bars:
    """Stacked bars by name: values by kind; `limit` is a line across, with its name."""

    rows: Mapping[str, Mapping[str, float]]
    x_label: str
    limit: tuple[float, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Lanes:
    """Boxes on a clock, by the name of the lane: start, end, kind and label of each."""

    rows: Mapping[str, Sequence[tuple[float, float, str, str]]]
    x_label: str


@dataclass(frozen=True, kw_only=True)
class Squares:
    """Rows of boxes by name: the words of each, and the number of its color; -1: pale."""

    rows: Mapping[str, Sequence[tuple[str, int]]]
    x_label: str = ""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Rows of words below a header; `chosen` is the number of the row that stands out."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    chosen: int = -1


Panel = Curves | Bars | Lanes | Squares | Table


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """What is drawn: the finding as a sentence with its number, panels, and a note below them.

    command   what does the same in a terminal or a notebook, if something does
    buttons   by row: words, a choice, the value that a press gives it, or why it is refused
    """

    finding: str
    panels: Sequence[Panel]
    note: str = ""
    command: str = ""
    buttons: Mapping[str, Sequence[tuple[str, str, Any, str]]] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Live:
    """One picture with choices.

    name      of the function that shows it in a notebook, if one does; also of its place in a page
    lesson    the lesson's number and name, such as 08_pipeline
    question  what a reader can find out with it
    choices   by name: a list, (list, start), (lowest, highest, start), True or False; a text, to be
              written freely, is for pages only
    compute   called with a value for each choice
    hidden    choices without a slider, which buttons change
    """

    name: str
    lesson: str
    question: str
    choices: Mapping[str, Any]
    compute: Callable[..., Drawing]
    hidden: tuple[str, ...] = ()

    def options(self) -> dict[str, tuple[list[Any], Any]]:
        """Return for each choice all values, and the one at the start."""
        return {name: _options(given) for name, given in self.choices.items()}

    def start(self) -> dict[str, Any]:
        """Return the values at the start."""
        return {name: value for name, (_, value) in self.options().items()}

    def finding(self, **values: Any) -> str:
        """Return the sentence for these values."""
        return self.compute(**values).finding

    def answer(self, values: Mapping[str, Any]) -> str:
        """Return the drawing for these values as JSON, or {"problem": the sentence of the error}.

        Numbers have 12 digits, in which every Python agrees: 3.12 made `sum` more exact.

        Raises: ValueError for a drawing with a number that is not finite
        """
        try:
            unknown = {name: values[name] for name in values if name not in self.choices}
            if unknown:
                raise CourseError(f"{self.name}: need {', '.join(self.choices)}; got {unknown}.")
            drawing = self.compute(**{**self.start(), **values})
        except CourseError as problem:
            return json.dumps({"problem": str(problem)})
        panels = [{"kind": type(one).__name__, **asdict(one)} for one in drawing.panels]
        plain = _rounded({**asdict(drawing), "panels": panels})
        return json.dumps(plain, allow_nan=False)


def _rounded(plain: Any) -> Any:
    if isinstance(plain, float):
        return float(f"{plain:.12g}")
    if isinstance(plain, dict):
        return {name: _rounded(value) for name, value in plain.items()}
    return [*map(_rounded, plain)] if isinstance(plain, list | tuple) else plain


def _options(given: Any) -> tuple[list[Any], Any]:
    if isinstance(given, bool | str):
        return [False, True] if isinstance(given, bool) else [], given
    if isinstance(given, list):
        return given, given[0]
    if len(given) == 2:
        return given[0], given[1]
    low, high, start = given
    return list(range(low, high + 1)), start


def lanes_of(events: Iterable[Event], x_label: str, names: Sequence[str] = ()) -> Lanes:
    """Return the events of each rank on a lane, and those that communicate on one below it.

    names   of the ranks; by default `rank 0`, `rank 1`, ...
    """
    rows: dict[str, list[tuple[float, float, str, str]]] = {}
    for event in sorted(events, key=lambda one: (one.rank, one.kind in COMMUNICATION_KINDS)):
        name = names[event.rank] if names else f"rank {event.rank}"
        lane = f"{name}, link" if event.kind in COMMUNICATION_KINDS else name
        box = (event.start_s, event.end_s, event.kind, event.label)
        rows.setdefault(lane, []).append(box)
    return Lanes(rows=rows, x_label=x_label)
