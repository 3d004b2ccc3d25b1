"""The button under a timeline in a live notebook: it saves the drawn events as a trace."""

import hashlib
import html
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakKeyDictionary

import ipywidgets
from matplotlib.figure import Figure

from course_lib.core.chrome_trace import HOW_TO_OPEN, trace_of_events, write_trace
from course_lib.core.errors import CourseError
from course_lib.core.records import Event

FOLDER = "traces"  # beside the notebook
LONGEST = 60  # letters of a title in a file name


@dataclass(frozen=True)
class _Drawn:
    runs: dict[str, list[Event]]
    title: str
    unit: str

    @property
    def path(self) -> Path:
        """The path of the trace; a checksum keeps titles apart whose letters do not all fit."""
        words = re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")
        name = words[:LONGEST].strip("-") or "timeline"
        other_letters = any(letter.isalnum() and not letter.isascii() for letter in self.title)
        if not words or len(words) > LONGEST or other_letters:
            name += f"-{hashlib.sha256(self.title.encode()).hexdigest()[:8]}"
        return Path(FOLDER, f"{name}.json")


_DRAWN: WeakKeyDictionary[Figure, _Drawn] = WeakKeyDictionary()


def offer_trace(figure: Figure, runs: Mapping[str, list[Event]], title: str, unit: str) -> None:
    """Remember the events of a figure, so that `show` puts a button under it."""
    _DRAWN[figure] = _Drawn(dict(runs), title, unit)


def trace_button(figure: Figure) -> ipywidgets.Widget | None:
    """Return the button of a figure of events; None for any other figure.

    It writes `traces/TITLE.json` in the folder of the notebook, and says how to open it.
    """
    drawn = _DRAWN.get(figure)
    if drawn is None or not any(drawn.runs.values()):
        return None
    button = ipywidgets.Button(
        description="Save as a trace",
        tooltip=f"Write {drawn.path}, for Perfetto, TensorBoard or Chrome",
    )
    said = ipywidgets.HTML()

    def save(_button: object) -> None:
        try:
            write_trace(trace_of_events(drawn.runs, drawn.unit), drawn.path)
            said.value = f"Saved as <code>{html.escape(str(drawn.path))}</code>. {HOW_TO_OPEN}"
        except CourseError as problem:
            said.value = html.escape(str(problem))

    button.on_click(save)
    return ipywidgets.HBox([button, said])
