"""Loss curves: of runs that ought to be one curve, and of runs that come down at their own pace."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from course_lib.core.errors import CourseError
from course_lib.display.colours import BLACK, QUIET, SERIES
from course_lib.display.page import SMALL_PT, page, plain

EVERY = 10  # steps between two dots


def losses(curves: Mapping[str, Sequence[float]], title: str, *, note: str = "") -> Figure:
    """Draw the losses of each run over its steps.

    Raises: CourseError without a curve
    """
    if not curves:
        raise CourseError("losses: need one curve at least; got none.")
    (first, whole), *others = curves.items()
    legend = [Line2D([], [], color=SERIES[1], label=first)]
    if others:
        word = others[0][0] if len(others) == 1 else f"{len(others)} other runs"
        legend.append(Line2D([], [], color=QUIET, marker="o", linestyle="", ms=3, label=word))
    figure, (axes,) = page(title, [2.6], note=note, legend=legend)
    plain(axes, x_label="step", y_label="loss", grid="both")
    for _, curve in others:
        axes.plot(range(1, len(curve) + 1), curve, "o", color=QUIET, markersize=3, zorder=2)
    axes.plot(range(1, len(whole) + 1), whole, color=SERIES[1], linewidth=1.6, zorder=3)
    return figure


def descents(
    curves: Mapping[str, Sequence[Sequence[float]]],
    title: str,
    *,
    target: float,
    target_words: str,
    note: str = "",
) -> Figure:
    """Draw how losses come down: of each name the first curve is a line, the others dots on it.

    target   a loss that all of them want to reach: a dashed line

    Raises: CourseError without a curve, or with more names than can be told apart
    """
    if not 0 < len(curves) <= len(SERIES):
        raise CourseError(f"descents: need 1 to {len(SERIES)} names; got {len(curves)}.")
    colours = dict(zip(curves, SERIES, strict=False))
    legend = [Line2D([], [], color=colour, label=name) for name, colour in colours.items()]
    figure, (axes,) = page(title, [3.0], note=note, legend=legend)
    plain(axes, x_label="step", y_label="loss", grid="both")
    for name, (whole, *others) in curves.items():
        axes.plot(range(1, len(whole) + 1), whole, color=colours[name], linewidth=1.6, zorder=3)
        for curve in others:
            steps = range(1, len(curve) + 1)[::EVERY]
            axes.plot(steps, curve[::EVERY], "o", color=colours[name], markersize=4, zorder=4)
    axes.axhline(target, color=BLACK, linestyle="--", linewidth=1.1, zorder=2)
    axes.annotate(
        target_words, (1, target), xytext=(0, 4), textcoords="offset points", fontsize=SMALL_PT
    )
    return figure
