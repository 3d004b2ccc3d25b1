"""The page of every picture: its width, its title as a sentence, notes, legend, axes.

Margins are given in inches instead of computed by a layout engine, so that a picture is drawn in
milliseconds and is the same every time.
"""

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter

from course_lib.core.errors import CourseError
from course_lib.display.colours import GRID, QUIET, Ink

WIDTH_IN = 8.0
TITLE_PT, TEXT_PT, SMALL_PT = 11.5, 9.5, 8.5
_TITLE_LINE_IN, _NOTE_LINE_IN, _LEGEND_LINE_IN = 0.23, 0.19, 0.25
_EDGE_IN = 0.14
_RAISED = str.maketrans(
    "-0123456789", "\u207b\u2070\u00b9\u00b2\u00b3\u2074\u2075\u2076\u2077\u2078\u2079"
)


@dataclass(frozen=True, kw_only=True)
class Margins:
    """Inches left free around and between the axes."""

    left: float = 0.8
    right: float = 0.3
    top: float = 0.1
    bottom: float = 0.55
    between: float = 0.35


def page(
    title: str,
    heights_in: Sequence[float],
    *,
    note: str = "",
    legend: Sequence[Artist] = (),
    margins: Margins | None = None,
) -> tuple[Figure, list[Axes]]:
    """Return a figure with one axes per height, from top to bottom, under a title: the finding.

    Raises: CourseError without a title
    """
    if not title.strip():
        raise CourseError("picture: need a title that says the finding; got none. Try one sentence")
    margins = margins or Margins()
    title_lines = textwrap.wrap(title, 80)
    note_lines = textwrap.wrap(note, 118)
    rows = _legend_rows(legend)
    below_title = _EDGE_IN + _TITLE_LINE_IN * len(title_lines)
    below_note = below_title + _NOTE_LINE_IN * len(note_lines)
    top = below_note + _LEGEND_LINE_IN * len(rows) + margins.top
    height = top + sum(heights_in) + margins.between * (len(heights_in) - 1) + margins.bottom
    figure = Figure(figsize=(WIDTH_IN, height), facecolor="white")
    x, y = _EDGE_IN / WIDTH_IN, 1 - _EDGE_IN / height
    figure.text(x, y, "\n".join(title_lines), fontsize=TITLE_PT, fontweight="bold", va="top")
    y = 1 - (below_title + 0.02) / height
    figure.text(x, y, "\n".join(note_lines), fontsize=SMALL_PT, color=QUIET, va="top")
    for index, row in enumerate(rows):
        y = 1 - (below_note + 0.03 + _LEGEND_LINE_IN * index) / height
        _add_legend(figure, row, (x, y))
    return figure, _axes(figure, top, heights_in, margins)


def plain(axes: Axes, *, x_label: str = "", y_label: str = "", grid: str = "x") -> None:
    """Style an axes: two thin lines, a pale grid along one axis, labels with units."""
    axes.set_xlabel(x_label, fontsize=TEXT_PT)
    axes.set_ylabel(y_label, fontsize=TEXT_PT)
    axes.tick_params(labelsize=TEXT_PT, length=3, color=QUIET, which="major")
    axes.tick_params(length=0, which="minor")
    axes.spines[["top", "right"]].set_visible(False)
    axes.spines[["left", "bottom"]].set_color(QUIET)
    if grid:
        axes.grid(axis=grid, color=GRID, linewidth=0.8)  # type: ignore[arg-type]
    axes.set_axisbelow(True)


def powers_of_ten(axes: Axes, names: Sequence[str] = ("x", "y")) -> None:
    """Make both axes logarithmic, or one."""
    scales = {"x": (axes.set_xscale, axes.xaxis), "y": (axes.set_yscale, axes.yaxis)}
    for name in names:
        set_scale, axis = scales[name]
        set_scale("log")
        axis.set_major_formatter(FuncFormatter(partial(_at_power, axis)))
        axis.set_minor_formatter(FuncFormatter(partial(_between_powers, axis)))
        axis.set_tick_params(labelsize=TEXT_PT, pad=6.5, which="minor")


def _at_power(axis: Axis, value: float, _position: int) -> str:
    return f"{value:g}" if _is_short(axis) else _power(value)


def _is_short(axis: Axis) -> bool:
    """Return whether an axis has numbers that are easier to read written out."""
    low, high = sorted(axis.get_view_interval())
    return low > 0.009 and high < 10_000 and high < 200 * low


def _power(value: float) -> str:
    """Format a power: `1e-3 -> '10\u207b\u00b3'`; plain text draws ten times faster."""
    exponent = math.log10(value)
    return f"10{str(round(exponent)).translate(_RAISED)}" if abs(exponent % 1) < 1e-9 else ""


def _between_powers(axis: Axis, value: float, _position: int) -> str:
    """Format `2e-3 -> '2\u00b710\u207b\u00b3'` where an axis is too short for two powers."""
    low, high = (math.log10(end) for end in sorted(axis.get_view_interval()))
    power = 10.0 ** math.floor(math.log10(value))
    digit = round(value / power)
    if _is_short(axis):
        return f"{value:g}" if high - low < 0.5 or digit in (2, 5) else ""
    shown = high - low < 0.5 or (math.floor(high) - math.ceil(low) < 1 and digit in (2, 5))
    return f"{digit}\u00b7{_power(power)}" if shown else ""


def short(value: float) -> str:
    """Format a number for a tick: `4096 -> '4,096'`, `65536 -> '2\u00b9\u2076'`."""
    if 1e-3 <= abs(value) < 1e4:
        return f"{value:,.6g}"
    mantissa, exponent = math.frexp(value)
    if mantissa == 0.5 and exponent > 0:
        return f"2{str(exponent - 1).translate(_RAISED)}"
    digits, _, power = f"{value:.2e}".partition("e")
    digits = digits.rstrip("0").rstrip(".")
    ten = f"10{str(int(power)).translate(_RAISED)}"
    return ten if digits == "1" else f"{digits}\u00b7{ten}"


def swatches(inks: Sequence[Ink], names: Sequence[str] = ()) -> list[Artist]:
    """Return one legend entry per ink, in the given order, each once."""
    labels = names or [ink.name for ink in inks]
    return [
        Patch(
            facecolor=ink.fill, edgecolor=ink.line, hatch=ink.hatch * 2, label=label, linewidth=0.5
        )
        for ink, label in dict(zip(inks, labels, strict=True)).items()
    ]


def empty(axes: Axes, sentence: str) -> None:
    """Print in the middle of an axes why it is empty."""
    axes.text(
        0.5,
        0.5,
        sentence,
        transform=axes.transAxes,
        ha="center",
        va="center",
        fontsize=TEXT_PT,
        color=QUIET,
    )


def time_unit(span_s: float, unit: str = "") -> tuple[float, str]:
    """Return the factor from seconds to a fitting unit, and its name; other words pass."""
    factors = {"s": 1.0, "ms": 1e3, "us": 1e6}
    if not unit:
        unit = "s" if span_s >= 1 else "ms" if span_s >= 1e-3 else "us"
    return factors.get(unit, 1.0), unit


def _axes(figure: Figure, top: float, heights_in: Sequence[float], margins: Margins) -> list[Axes]:
    height = figure.get_figheight()
    width = WIDTH_IN - margins.left - margins.right
    tops = [top]
    for above in heights_in[:-1]:
        tops.append(tops[-1] + above + margins.between)
    return [
        figure.add_axes(
            (
                margins.left / WIDTH_IN,
                1 - (start + tall) / height,
                width / WIDTH_IN,
                tall / height,
            )
        )
        for start, tall in zip(tops, heights_in, strict=True)
    ]


def _legend_rows(legend: Sequence[Artist]) -> list[list[Artist]]:
    """Split the entries into rows that fit the page."""
    rows: list[list[Artist]] = []
    free_in = 0.0
    for entry in legend:
        needs_in = 0.6 + 0.078 * len(str(entry.get_label()))
        if needs_in > free_in:
            rows.append([])
            free_in = WIDTH_IN - 2 * _EDGE_IN
        rows[-1].append(entry)
        free_in -= needs_in
    return rows


def _add_legend(figure: Figure, row: Sequence[Artist], corner: tuple[float, float]) -> None:
    figure.add_artist(
        Legend(
            figure,
            list(row),
            [str(entry.get_label()) for entry in row],
            ncols=len(row),
            loc="upper left",
            bbox_to_anchor=corner,
            frameon=False,
            fontsize=SMALL_PT,
            borderpad=0,
            borderaxespad=0,
            columnspacing=1.6,
            handlelength=1.8,
            handleheight=1.0,
            handletextpad=0.5,
        )
    )
