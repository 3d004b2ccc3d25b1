"""A collective step by step: the shards move from rank to rank.

In a live notebook it plays; saved, printed or read aloud, it is one picture of all steps and one
sentence per step.
"""

import base64
import html
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anywidget
import traitlets

from course_lib.core.errors import CourseError
from course_lib.display.frames import Frame
from course_lib.display.shards import all_frames_svg, frame_svg
from course_lib.display.show import has_widgets, image_html, widget_data

_JS = Path(__file__).with_name("stepper.js").read_text(encoding="utf-8")


class Player(anywidget.AnyWidget):
    """Player with play, step, back and a slider; `frames` is a list of {svg, text}."""

    _esm = _JS
    title = traitlets.Unicode().tag(sync=True)
    frames: Any = traitlets.List().tag(sync=True)


class Stepper:
    """Collective step by step, which a notebook displays; `svg` and `text` hold all steps."""

    def __init__(self, frames: Sequence[Frame], title: str) -> None:
        self.frames, self.title = list(frames), title
        self.svg = all_frames_svg(self.frames, title)
        self.text = "\n".join([title, *(frame.text for frame in self.frames)])

    def _repr_mimebundle_(self, **_options: Any) -> dict[str, Any]:
        data = {"text/html": self._still(), "image/svg+xml": self.svg, "text/plain": self.text}
        if has_widgets():
            drawn = [{"svg": frame_svg(f, self.title), "text": f.text} for f in self.frames]
            data |= widget_data(Player(title=self.title, frames=drawn))
        return data

    def _still(self) -> str:
        """Return the picture of all steps with its text as HTML, for a page without widgets."""
        source = base64.b64encode(self.svg.encode("utf-8")).decode("ascii")
        width = int(self.svg.split('width="', 1)[1].split('"', 1)[0])
        image = image_html(f"data:image/svg+xml;base64,{source}", self.title, width)
        steps = "".join(f"<li>{html.escape(frame.text)}</li>" for frame in self.frames)
        return f"{image}<ol>{steps}</ol>"


def stepper(frames: Sequence[Frame], title: str) -> Stepper:
    """Return a player of frames, as `frames_from_messages` returns them, under a title.

    Raises: CourseError without frames or title
    """
    if not frames or not title.strip():
        raise CourseError(
            "stepper: need frames and a title that says the finding; got "
            f"{len(frames)} frames and {title!r}. Try stepper(frames_from_messages(...), '...')."
        )
    return Stepper(frames, title)
