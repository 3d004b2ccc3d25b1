"""A picture with sliders, drawn again when one is moved.

The notebook saves the picture of the start values and its text, so that a reader without a kernel,
a converter and a screen reader get the finding too.
"""

import base64
import html
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import anywidget
import ipywidgets
import traitlets
from matplotlib.figure import Figure
from matplotlib.text import Text

from course_lib.core.errors import CourseError
from course_lib.display.show import css_width, has_widgets, picture, png_bytes, widget_data

_JS = Path(__file__).with_name("picture.js").read_text(encoding="utf-8")


class Picture(anywidget.AnyWidget):
    """Image that can be replaced without flicker; `picture` is {png, width, alt, is_title, failed}.

    The text below the picture is not to be seen where it is the title in the picture.
    """

    _esm = _JS
    picture = traitlets.Dict().tag(sync=True)


class Explore:
    """Figure with sliders, which a notebook displays; `sliders` are the widgets by name."""

    def __init__(
        self, draw: Callable[..., Figure], alt: Callable[..., str] | str, sliders: dict[str, Any]
    ) -> None:
        self._draw, self._alt = draw, alt
        look = _look(sliders)
        self.sliders = {name: _slider(name, given, look) for name, given in sliders.items()}
        self._start_values = self.values()
        self.figure = self._drawn()
        self.alt = self._say()
        self._start = picture(self.figure, self.alt)
        png = base64.b64decode(self._start[0]["image/png"])
        self.image = Picture(picture=_state(png, self.figure, self.alt))
        for slider in self.sliders.values():
            slider.observe(self._update, "value")

    def values(self) -> dict[str, Any]:
        """Return the values of the sliders by name."""
        return {name: slider.value for name, slider in self.sliders.items()}

    def _drawn(self) -> Figure:
        figure = self._draw(**self.values())
        if not isinstance(figure, Figure):
            raise CourseError(
                f"explore: need a draw that returns a figure; got {type(figure).__name__}. "
                "Try lambda p: timeline(events_of(p), title)."
            )
        return figure

    def _say(self) -> str:
        values = self.values()
        return self._alt(**values) if callable(self._alt) else self._alt.format(**values)

    def _update(self, _change: Any) -> None:
        """Draw again; show an error in place of the picture, since nothing else would show it."""
        try:
            self.figure = self._drawn()
            self.alt = self._say()
            self.image.picture = _state(png_bytes(self.figure), self.figure, self.alt)
        except Exception as problem:
            words = f"This picture cannot be drawn: {type(problem).__name__}: {problem}"
            self.image.picture = {**self.image.picture, "alt": words, "failed": True}

    def _repr_mimebundle_(self, **_options: Any) -> tuple[dict[str, Any], dict[str, Any]]:
        data, metadata = self._start
        stands = ", ".join(f"{name} = {value}" for name, value in self._start_values.items())
        still = f"<p>{html.escape(stands)}. Run this cell in JupyterLab to move the sliders.</p>"
        data = {**data, "text/html": data["text/html"] + still}
        if has_widgets():
            data |= widget_data(ipywidgets.VBox([*self._controls(), self.image]))
        return data, metadata

    def _controls(self) -> list[Any]:
        """Return the sliders below each other; more than four in two columns, to fit a screen."""
        sliders = [*self.sliders.values()]
        if len(sliders) <= 4:
            return sliders
        for slider in sliders:
            slider.layout.width = "auto"
        columns = ipywidgets.Layout(grid_template_columns="repeat(2, minmax(0, 1fr))", width="98%")
        return [ipywidgets.GridBox(sliders, layout=columns)]


def explore(draw: Callable[..., Figure], alt: Callable[..., str] | str, **sliders: Any) -> Explore:
    """Return a figure that follows its sliders.

    draw     called with the sliders' values by name; returns a figure, for example `timeline(...)`
    alt      the finding and one number: a function of the same values, or a text with {names}
    sliders  (lowest, highest, start), a list of choices or (choices, start), True or False, or an
             ipywidget

    Raises: CourseError without a slider, for one that cannot be made, or where `draw` returns no
            figure; whatever `draw` raises for the start values
    """
    if not sliders:
        raise CourseError("explore: need at least one slider; got none. Try p=(2, 8, 4).")
    return Explore(draw, alt, sliders)


def _state(png: bytes, figure: Figure, alt: str) -> dict[str, Any]:
    written = {"".join(text.get_text().split()) for text in figure.findobj(Text)}
    is_title = "".join(alt.split()) in written  # then only a screen reader needs it a second time
    return {
        "png": png,
        "width": css_width(figure),
        "alt": alt,
        "is_title": is_title,
        "failed": False,
    }


def _look(sliders: Mapping[str, Any]) -> dict[str, Any]:
    """Return one layout for all: as wide as the longest name, a slider, and the longest choice."""
    names_em = 0.6 * max(map(len, sliders)) + 1
    offered = [options for given in sliders.values() for options, _ in _choices(given)]
    choices = [str(one) for options in offered for one in options]
    choices_em = 0.6 * max(map(len, choices), default=0)
    return {
        "style": {"description_width": f"{names_em:g}em"},
        "layout": {"width": f"{names_em + max(6.0, choices_em) + 14:g}em"},
        "continuous_update": True,
    }


def _slider(name: str, given: Any, look: Mapping[str, Any]) -> Any:
    """Return a widget for the given range, choices, bool or widget."""
    look = {**look, "description": name.replace("_", " ")}
    if isinstance(given, ipywidgets.Widget):
        given.description = given.description or look["description"]
        return given
    if isinstance(given, bool):
        return ipywidgets.Checkbox(value=given, description=look["description"], indent=False)
    for options, start in _choices(given):
        return ipywidgets.SelectionSlider(options=options, value=start, **look)
    if isinstance(given, tuple) and len(given) == 3 and given[0] <= given[2] <= given[1]:
        low, high, start = given
        if all(isinstance(number, int) for number in given):
            return ipywidgets.IntSlider(value=start, min=low, max=high, **look)
        step = (high - low) / 100 or 1.0
        return ipywidgets.FloatSlider(value=start, min=low, max=high, step=step, **look)
    raise CourseError(
        f"explore: need (lowest, highest, start) or (choices, start) for {name}; got {given!r}. "
        f"Try {name}=(1, 8, 4)."
    )


def _choices(given: Any) -> list[tuple[list[Any], Any]]:
    """Return [(options, start)] if a list of choices was given, else []."""
    if isinstance(given, list) and given:
        return [(given, given[0])]
    pair = isinstance(given, tuple) and len(given) == 2 and isinstance(given[0], list)
    return [given] if pair and given[1] in given[0] else []
