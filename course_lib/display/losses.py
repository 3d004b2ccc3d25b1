"""Loss curves of many runs that ought to be one curve: the first is a line, the others dots."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from course_lib.core.errors import CourseError
from course_lib.display.colours import QUIET, SERIES
from course_lib.display.page import page, plain


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


def spread(curves: Mapping[str, Sequence[float]]) -> float:
    """How far apart the curves are at most, over the steps that all of them have."""
    return max(
        (max(at) - min(at) for at in zip(*curves.values(), strict=False)),
        default=0.0,
    )
