"""Display of figures: each with an alt text that says what it shows.

JupyterLab shows the HTML, whose `<img>` has the alt text; converters that need a PNG find one, with
the same text in its metadata; a screen reader or a plain terminal reads the text alone.
"""

import base64
import html
import io
import os
import re
import sys
from typing import Any

import ipywidgets
import numpy as np
from IPython.core.getipython import get_ipython
from IPython.display import display
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from PIL import Image

from course_lib.core.errors import CourseError
from course_lib.display.trace_button import trace_button

DPI = 144
NAMED = re.compile(r"\bguess(?:_\w+)?\b")  # what lessons call their predictions
COMMIT_FIRST = "The picture of it is folded: commit to a prediction first."
FOLDED = "Show the picture anyway"
_CSS_PIXELS_PER_INCH = 96
_COLOURS = 96


def show(fig: Figure, alt: str = "") -> None:
    """Display a figure with its alt text: the finding and one number.

    In a live notebook a timeline has a button, which saves its events as a trace. In a cell that
    reveals a prediction to which nobody has committed, the picture is folded as the truth is.

    Raises: CourseError without alt text
    """
    data, metadata = picture(fig, alt)
    if _is_asked_first():
        folded = f"<details><summary>{FOLDED}</summary>{data['text/html']}</details>"
        data, metadata = {"text/html": folded, "text/plain": COMMIT_FIRST}, {}
    if has_widgets() and (button := trace_button(fig)):  # saved, it is the picture alone
        data |= widget_data(ipywidgets.VBox([ipywidgets.HTML(data["text/html"]), button]))
    put(data, metadata)
    if "matplotlib.pyplot" in sys.modules:  # else the notebook would draw it a second time
        sys.modules["matplotlib.pyplot"].close(fig)


def _is_asked_first() -> bool:
    """Return whether the running cell reveals a prediction to which nobody has committed."""
    names = getattr(get_ipython(), "user_ns", {})
    cell = names.get("In", [""])[-1]
    asked = map(names.get, NAMED.findall(cell)) if "reveal(" in cell else ()
    return any(getattr(one, "value", "") is None for one in asked)


def picture(fig: Figure, alt: str) -> tuple[dict[str, str], dict[str, Any]]:
    """Return what `show` displays: data and metadata by MIME type."""
    png = base64.b64encode(png_bytes(fig)).decode("ascii")
    width = css_width(fig)
    data = {
        "text/html": image_html(f"data:image/png;base64,{png}", alt, width),
        "image/png": png,
        "text/plain": alt,
    }
    return data, {"image/png": {"alt": alt, "width": width}}


def figure_html(fig: Figure, alt: str) -> str:
    """Return a figure for a page of HTML, with the picture inside."""
    return f"<figure>{picture(fig, alt)[0]['text/html']}</figure>"


def css_width(fig: Figure) -> int:
    """Return the width of a figure on a page, in CSS pixels."""
    return round(fig.get_figwidth() * _CSS_PIXELS_PER_INCH)


def image_html(source: str, alt: str, width: int) -> str:
    """Return an `<img>` with an alt text, never wider than the page.

    Raises: CourseError without alt text
    """
    if not isinstance(alt, str) or not alt.strip():
        raise CourseError(
            "show: need alt text, the finding and one number in a sentence; got none. "
            'Try show(fig, alt="the ring sends 6 messages, the tree 4").'
        )
    text = html.escape(alt)
    return f'<img alt="{text}" width="{width}" style="max-width:100%;height:auto" src="{source}">'


def png_bytes(fig: Figure) -> bytes:
    """Return the figure as a PNG: few colors, no date, no program's name, the same every time."""
    fig.set_dpi(DPI)
    canvas = FigureCanvasAgg(fig)
    canvas.draw()
    pixels = Image.fromarray(np.asarray(canvas.buffer_rgba())).convert("RGB")
    few = pixels.quantize(_COLOURS, method=Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
    _restore_white(few)
    file = io.BytesIO()
    few.save(file, "PNG", compress_level=9)
    return file.getvalue()


def _restore_white(few: Image.Image) -> None:
    """Make the lightest color white again, which the quantization has darkened a little."""
    flat = few.getpalette() or []
    colours = [flat[at : at + 3] for at in range(0, len(flat), 3)]
    lightest = max(range(len(colours)), key=lambda index: sum(colours[index]))
    colours[lightest] = [255, 255, 255]
    few.putpalette([part for colour in colours for part in colour])


def has_widgets() -> bool:
    """Return whether to show widgets: in a notebook's kernel, unless COURSE_NO_WIDGETS=1."""
    shell = get_ipython()
    wanted = os.environ.get("COURSE_NO_WIDGETS", "0") in ("", "0")
    return wanted and hasattr(shell, "kernel")


def put(data: dict[str, Any], metadata: dict[str, Any] | None = None) -> None:
    """Display data by MIME type; outside IPython print its text."""
    if get_ipython() is None:
        print(data["text/plain"])
    else:
        display(data, metadata=metadata or {}, raw=True)


def widget_data(widget: Any) -> dict[str, Any]:
    """Return the data of a widget by MIME type, without its technical text."""
    bundle = widget._repr_mimebundle_()
    data = dict(bundle[0] if isinstance(bundle, tuple) else bundle or {})
    data.pop("text/plain", None)
    return data
