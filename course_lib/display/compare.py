"""Predict, run, compare: a formula, a simulation and a measurement on the same axes.

The formula is a line, the simulation open markers, the measurement dots with error bars over its
repetitions. Dots on the line mean that the formula predicts this machine.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from course_lib.core.errors import CourseError
from course_lib.display.colours import QUIET, SERIES
from course_lib.display.page import Margins, page, plain, powers_of_ten

_SHAPES, _DASHES = ("o", "s", "^", "D"), ("-", "--", "-.", ":")

Series = Sequence[float] | np.ndarray
Repeated = Series | Sequence[Sequence[float]]


@dataclass(frozen=True, kw_only=True)
class Voices:
    """Values of one curve from up to three sources; at least one of the three.

    formula      a function of x (drawn between the points too), or one number per x
    simulation   one number per x
    measurement  one number per x, or a list of repetitions per x

    Raises: CourseError without any of them
    """

    formula: Callable[[float], float] | Series | None = None
    simulation: Series | None = None
    measurement: Repeated | None = None

    def __post_init__(self) -> None:
        if self.formula is None and self.simulation is None and self.measurement is None:
            raise CourseError(
                "Voices: need formula, simulation or measurement; got none of them. "
                "Try Voices(formula=link.time_s, measurement=times_s)."
            )


def compare(
    x: Series,
    voices: Voices | Mapping[str, Voices],
    title: str,
    *,
    x_label: str,
    y_label: str,
    log: bool = False,
    note: str = "",
) -> Figure:
    """Draw one curve, or up to four named ones; `x_label` and `y_label` contain the units.

    log    both axes are logarithmic
    note   printed on the picture: how it was measured

    Raises: CourseError without x or curves, with more than four curves, where a source does not
            have one number (or list of repetitions) per x, or for numbers <= 0 on a log axis
    """
    curves = {"": voices} if isinstance(voices, Voices) else dict(voices)
    if not 0 < len(curves) <= len(SERIES):
        raise CourseError(f"compare: need 1 to {len(SERIES)} curves; got {len(curves)}.")
    if len(x) == 0:
        raise CourseError("compare: need at least one value of x; got none.")
    figure, (axes,) = page(
        title, [3.1], note=note, legend=_legend(curves), margins=Margins(left=0.85)
    )
    plain(axes, x_label=x_label, y_label=y_label, grid="both")
    if log:
        powers_of_ten(axes)
    for index, (name, curve) in enumerate(curves.items()):
        _curve(axes, np.asarray(x, dtype=float), name, curve, index)
    if log:
        _widen(axes)
    else:
        low, top = min(0.0, axes.get_ylim()[0]), axes.dataLim.y1
        axes.set_ylim(low, max(axes.get_ylim()[1], top + 0.03 * (top - low)))  # no mark is cut
        if all(float(value).is_integer() for value in x):  # there is no 1.5th rank
            axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    return figure


def _curve(axes: Axes, x: np.ndarray, name: str, curve: Voices, index: int) -> None:
    colour, shape, log = SERIES[index], _SHAPES[index], axes.get_xscale() == "log"
    if curve.formula is not None:
        at, y = _line(x, name, curve.formula, log)
        _check_log(log, name, at, y)
        axes.plot(at, y, color=colour, linestyle=_DASHES[index], linewidth=1.6)
    if curve.simulation is not None:
        y, _ = _numbers(x, name, "simulation", curve.simulation)
        _check_log(log, name, x, y)
        axes.plot(x, y, shape, color=colour, markersize=9, markerfacecolor="none", linestyle="")
    if curve.measurement is not None:
        y, spread = _numbers(x, name, "measurement", curve.measurement)
        _check_log(log, name, x, y)
        if spread.any():
            axes.errorbar(x, y, spread, fmt="none", ecolor=colour, elinewidth=1.1, capsize=3)
        axes.plot(x, y, shape, color=colour, markersize=4.5, linestyle="")


def _widen(axes: Axes) -> None:
    """Widen a logarithmic axis on which all numbers are equal by a factor of two on both sides."""
    (x_low, x_high), (y_low, y_high) = axes.dataLim.intervalx, axes.dataLim.intervaly
    if x_high <= x_low * (1 + 1e-9):
        axes.set_autoscalex_on(False)  # else matplotlib warns before the limits are set
        axes.set_xlim(x_low / 2, x_low * 2)
    if y_high <= y_low * (1 + 1e-9):
        axes.set_autoscaley_on(False)
        axes.set_ylim(y_low / 2, y_low * 2)


def _check_log(log: bool, name: str, x: np.ndarray, y: np.ndarray) -> None:
    lowest = min(x.min(), y.min())
    if log and lowest <= 0:
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


def _legend(curves: Mapping[str, Voices]) -> list[Artist]:
    """Return the legend: the marks of the sources; the color, dash and shape of the curves."""
    has = {
        voice: any(getattr(curve, voice) is not None for curve in curves.values())
        for voice in ("formula", "simulation", "measurement")
    }
    several = list(enumerate(curves)) if len(curves) > 1 else []
    repeated = any(_repeats(curve.measurement) for curve in curves.values())
    grey = QUIET if several else SERIES[0]
    keys: list[Artist] = [
        _key(name, SERIES[index], marker=_SHAPES[index], linestyle=_DASHES[index])
        for index, name in several
    ]
    if has["formula"]:
        keys.append(_key("formula", grey, linestyle="-"))
    if has["simulation"]:
        keys.append(_key("simulation", grey, marker="o", markerfacecolor="none", markersize=9))
    if has["measurement"]:
        words = "measurement (median, range)" if repeated else "measurement"
        keys.append(_key(words, grey, marker="o"))
    return keys


def _key(label: str, colour: str, **look: Any) -> Line2D:
    style = {"linestyle": "", "markersize": 4.5, "linewidth": 1.6, **look}
    return Line2D([], [], color=colour, label=label, **style)


def _repeats(measurement: Repeated | None) -> bool:
    return measurement is not None and any(np.size(value) > 1 for value in measurement)
