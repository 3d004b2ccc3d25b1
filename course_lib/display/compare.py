"""Predict, run, compare: formula, simulation, measurement and published values on the same axes.

The formula is a line, the simulation open markers, the measurement dots with error bars over its
repetitions, and what others have published are stars. Dots on the line mean that the formula
predicts this machine; stars on the line, that it predicts theirs.
"""

import textwrap
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator, NullLocator

from course_lib.core.errors import CourseError
from course_lib.display.colours import PALE, QUIET, SERIES
from course_lib.display.page import SMALL_PT, WIDTH_IN, Margins, page, plain, powers_of_ten, short

VOICES = ("formula", "simulation", "measurement", "published", "elsewhere")
MOST_TICKS = 8  # on a logarithmic axis, at the values of x
_SHAPES, _DASHES = ("o", "s", "^", "D"), ("-", "--", "-.", ":")
_STAR: dict[str, Any] = {
    "marker": "*",
    "markersize": 13,
    "markerfacecolor": PALE,
    "markeredgewidth": 1.1,
}
_PLUS: dict[str, Any] = {"marker": "+", "markersize": 9, "markeredgewidth": 1.4}
_CROSS: dict[str, Any] = {"marker": "x", "markersize": 7, "markeredgewidth": 1.8}
_MARGINS, _SOURCE_LINE_IN = Margins(left=0.85), 0.17

Series = Sequence[float] | np.ndarray
Repeated = Series | Sequence[Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Voices:
    """Values of one curve from up to four sources; at least one of them. NaN: there is no value.

    formula      a function of x (drawn between the points too), or one number per x
    simulation   one number per x
    measurement  one number per x, or a list of repetitions per x
    published    (xs, ys): what others have measured, at values of x of their own
    elsewhere    (xs, ys): what was measured in another place, at values of x of its own

    Raises: CourseError without any of them
    """

    formula: Callable[[float], float] | Series | None = None
    simulation: Series | None = None
    measurement: Repeated | None = None
    published: tuple[Series, Series] | None = None
    elsewhere: tuple[Series, Series] | None = None

    def __post_init__(self) -> None:
        if all(getattr(self, voice) is None for voice in VOICES):
            raise CourseError(
                "Voices: need formula, simulation, measurement or published; got none of "
                "them. Try Voices(formula=link.time_s, measurement=times_s)."
            )


def compare(
    x: Series,
    voices: Voices | Mapping[str, Voices],
    title: str,
    *,
    x_label: str,
    y_label: str,
    log: bool = False,
    log_x: bool = False,
    note: str = "",
    source: str = "",
    names: Mapping[str, str] | None = None,
) -> Figure:
    """Draw one curve, or up to four named ones; `x_label` and `y_label` contain the units.

    log      both axes are logarithmic; `log_x`: only the axis of x
    note     printed on the picture: how it was measured
    source   who published the `published` values, printed under the axis
    names    the words of the legend for a source of values: {"measurement": "the paper's table"}

    Raises: CourseError without x or curves, with more than four curves, where a source does not
            have one number (or list of repetitions) per x, for numbers <= 0 on a logarithmic axis,
            for published values without `source`, or for a name of something else
    """
    curves = {"": voices} if isinstance(voices, Voices) else dict(voices)
    _check(x, curves, source, names or {})
    lines = textwrap.wrap(_source_words(curves, source), 118)
    bottom = _MARGINS.bottom + (_SOURCE_LINE_IN * len(lines) + 0.08 if lines else 0)
    margins = replace(_MARGINS, bottom=bottom)
    figure, (axes,) = page(
        title, [3.1], note=note, legend=_legend(curves, names or {}), margins=margins
    )
    figure.text(
        0.14 / WIDTH_IN, 0.01, "\n".join(lines), fontsize=SMALL_PT, color=QUIET, va="bottom"
    )
    plain(axes, x_label=x_label, y_label=y_label, grid="both")
    powers_of_ten(axes, ("x", "y") if log else ("x",) if log_x else ())
    for index, (name, curve) in enumerate(curves.items()):
        _curve(axes, np.asarray(x, dtype=float), name, curve, index)
    _widen(axes)
    _ticks(axes, x, curves)
    return figure


def _check(x: Series, curves: Mapping[str, Voices], source: str, names: Mapping[str, str]) -> None:
    if not 0 < len(curves) <= len(SERIES):
        raise CourseError(f"compare: need 1 to {len(SERIES)} curves; got {len(curves)}.")
    own = [
        voice for one in curves.values() for voice in VOICES[:3] if getattr(one, voice) is not None
    ]
    if len(x) == 0 and own:
        raise CourseError(f"compare: need at least one value of x for {own[0]}; got none.")
    published = any(curve.published is not None for curve in curves.values())
    if published and not source.strip():
        raise CourseError(
            "compare: need the source of the published values; got none. "
            'Try source="NCCL tests, 8 x A100: author, year, table".'
        )
    unknown = [name for name in names if name not in VOICES]
    if unknown:
        raise CourseError(f"compare: need names of {', '.join(VOICES)}; got {unknown[0]!r}.")


def _source_words(curves: Mapping[str, Voices], source: str) -> str:
    published = any(curve.published is not None for curve in curves.values())
    return f"{'Published values' if published else 'Source'}: {source}" if source else ""


def _curve(axes: Axes, x: np.ndarray, name: str, curve: Voices, index: int) -> None:
    colour, shape = SERIES[index], _SHAPES[index]
    if curve.formula is not None:
        at, y = _line(x, name, curve.formula, axes.get_xscale() == "log")
        _check_log(axes, name, at, y)
        axes.plot(at, y, color=colour, linestyle=_DASHES[index], linewidth=1.6)
        given = np.isin(at, x)
        _no_value(axes, at[given], y[given], colour)
    if curve.simulation is not None:
        y, _ = _numbers(x, name, "simulation", curve.simulation)
        _check_log(axes, name, x, y)
        axes.plot(x, y, shape, color=colour, markersize=9, markerfacecolor="none", linestyle="")
        _no_value(axes, x, y, colour)
    if curve.measurement is not None:
        y, spread = _numbers(x, name, "measurement", curve.measurement)
        _check_log(axes, name, x, y)
        if spread.any():
            axes.errorbar(x, y, spread, fmt="none", ecolor=colour, elinewidth=1.1, capsize=3)
        axes.plot(x, y, shape, color=colour, markersize=4.5, linestyle="")
        _no_value(axes, x, y, colour)
    for voice, marks in (("published", _STAR), ("elsewhere", _PLUS)):
        if (given := getattr(curve, voice)) is not None:
            at, y = _of_others(name, voice, given)
            _check_log(axes, name, at, y)
            axes.plot(at, y, color=colour, linestyle="", zorder=1.9, **marks)
            _no_value(axes, at, y, colour)


def _no_value(axes: Axes, x: np.ndarray, y: np.ndarray, colour: str) -> None:
    """Draw a cross at the bottom where there is no value."""
    gone = x[np.isnan(y)]
    if gone.size:
        at = axes.get_xaxis_transform()
        axes.plot(gone, [0.03] * gone.size, color=colour, linestyle="", transform=at, **_CROSS)


def _ticks(axes: Axes, x: Series, curves: Mapping[str, Voices]) -> None:
    """Put the ticks of x at its values on a logarithmic axis; at integers where all x are."""
    published = [one.published[0] for one in curves.values() if one.published is not None]
    points = sorted({float(value) for values in (x, *published) for value in values})
    if axes.get_xscale() == "linear":
        if all(value.is_integer() for value in points):  # there is no 1.5th rank
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        return
    for ticks in (points, sorted({float(value) for value in x})):
        if 0 < len(ticks) <= MOST_TICKS and _have_room(axes, ticks):
            axes.set_xticks(ticks, [short(value) for value in ticks])
            axes.xaxis.set_minor_locator(NullLocator())
            return


def _have_room(axes: Axes, ticks: list[float]) -> bool:
    """Return whether the labels of ticks on a logarithmic axis do not touch each other."""
    low, high = np.log(axes.get_xlim())
    inches = (np.log(ticks) - low) / (high - low) * axes.get_position().width * WIDTH_IN
    needed = [0.1 + 0.04 * (len(short(a)) + len(short(b))) for a, b in pairwise(ticks)]
    return bool(np.all(np.diff(inches) > needed))


def _widen(axes: Axes) -> None:
    """Leave room around the marks: from 0 on a linear axis, a factor of two if all are equal."""
    (x_low, x_high), (y_low, y_high) = axes.dataLim.intervalx, axes.dataLim.intervaly
    if axes.get_xscale() == "log" and x_high <= x_low * (1 + 1e-9):
        axes.set_autoscalex_on(False)  # else matplotlib warns before the limits are set
        axes.set_xlim(x_low / 2, x_low * 2)
    if axes.get_yscale() == "linear":
        low, top = min(0.0, axes.get_ylim()[0]), max(y_high, axes.get_ylim()[0])
        axes.set_ylim(low, max(axes.get_ylim()[1], top + 0.03 * (top - low)))  # no mark is cut
    elif np.isfinite(y_low) and y_high <= y_low * (1 + 1e-9):
        axes.set_autoscaley_on(False)
        axes.set_ylim(y_low / 2, y_low * 2)


def _check_log(axes: Axes, name: str, x: np.ndarray, y: np.ndarray) -> None:
    scales = (axes.get_xscale(), x), (axes.get_yscale(), y)
    for lowest in (values.min() for scale, values in scales if scale == "log"):
        if lowest <= 0:
            raise CourseError(
                f"{_where(name)}: need numbers above 0 on logarithmic axes; got {lowest:g}. "
                "Try log=False, or leave that point out."
            )


def _where(name: str) -> str:
    return f"compare, {name}" if name else "compare"


def _line(
    x: np.ndarray, name: str, formula: Callable[[float], float] | Series, log: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Return the points of the formula; a function is evaluated at 100 more x in between."""
    if not callable(formula):
        return x, _numbers(x, name, "formula", formula)[0]
    space = np.geomspace if log and x.min() > 0 else np.linspace
    at = np.sort(np.append(space(x.min(), x.max(), 100), x))
    return at, np.array([formula(float(value)) for value in at])


def _of_others(
    name: str, voice: str, given: tuple[Series, Series]
) -> tuple[np.ndarray, np.ndarray]:
    """Return x and y of values with an x of their own."""
    if len(given) != 2 or len(given[0]) != len(given[1]) or len(given[0]) == 0:
        sizes = " and ".join(str(np.size(one)) for one in given)
        raise CourseError(
            f"{_where(name)}: need {voice}=(xs, ys) with one y for each x; got {sizes} numbers."
        )
    at, y = (np.asarray(one, dtype=float) for one in given)
    return at, y


def _numbers(
    x: np.ndarray, name: str, voice: str, given: Repeated
) -> tuple[np.ndarray, np.ndarray]:
    """Return the medians, and the distances to the least and greatest repetition [2, len(x)]."""
    rows = [np.atleast_1d(np.asarray(value, dtype=float)) for value in given]
    if len(rows) != len(x) or any(row.size == 0 for row in rows):
        raise CourseError(
            f"{_where(name)}: need one number, or a list of repetitions, in {voice} for each of "
            f"the {len(x)} values of x; got {len(rows)}."
        )
    middle = np.array([np.median(row) for row in rows])
    low, high = (np.array([edge(row) for row in rows]) for edge in (np.min, np.max))
    return middle, np.stack([middle - low, high - middle])


def _legend(curves: Mapping[str, Voices], names: Mapping[str, str]) -> list[Artist]:
    """Return the legend: the marks of the sources; the color, dash and shape of the curves."""
    has = {voice for curve in curves.values() for voice in VOICES if _has(curve, voice)}
    several = len(curves) > 1
    grey = QUIET if several else SERIES[0]
    keys: list[Artist] = [
        _key(name, SERIES[index], **_look(curve, index))
        for index, (name, curve) in enumerate(curves.items())
        if several
    ]
    looks: dict[str, dict[str, Any]] = {
        "formula": {"linestyle": "-"},
        "simulation": {"marker": "o", "markerfacecolor": "none", "markersize": 9},
        "measurement": {"marker": "o"},
        "published": _STAR,
        "elsewhere": _PLUS,
    }
    repeated = any(_repeats(curve.measurement) for curve in curves.values())
    for voice in (voice for voice in VOICES if voice in has):
        more = " (median, range)" if voice == "measurement" and repeated else ""
        keys.append(_key(names.get(voice, voice) + more, grey, **looks[voice]))
    if any(_misses_one(curve) for curve in curves.values()):
        keys.append(_key("no value", grey, **_CROSS))
    return keys


def _look(curve: Voices, index: int) -> dict[str, Any]:
    """Return the marks that a curve has: a line for a formula, else its dots or stars."""
    look: dict[str, Any] = {}
    if _has(curve, "measurement"):
        look["marker"] = _SHAPES[index]
    elif _has(curve, "simulation"):
        look |= {"marker": _SHAPES[index], "markerfacecolor": "none", "markersize": 9}
    elif _has(curve, "published"):
        look |= _STAR
    return look | ({"linestyle": _DASHES[index]} if _has(curve, "formula") else {})


def _has(curve: Voices, voice: str) -> bool:
    return getattr(curve, voice) is not None


def _misses_one(curve: Voices) -> bool:
    formula = None if callable(curve.formula) else curve.formula
    published = None if curve.published is None else curve.published[1]
    given = (formula, curve.simulation, curve.measurement, published)
    return any(np.isnan(value).any() for one in given if one is not None for value in one)


def _key(label: str, colour: str, **look: Any) -> Line2D:
    style = {"linestyle": "", "markersize": 4.5, "linewidth": 1.6, **look}
    return Line2D([], [], color=colour, label=label, **style)


def _repeats(measurement: Repeated | None) -> bool:
    return measurement is not None and any(np.size(value) > 1 for value in measurement)
