"""Loss curves: of runs that should coincide, and of runs that converge at different speeds."""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from course_lib.core.errors import CourseError
from course_lib.display.colours import BLACK, QUIET, SERIES
from course_lib.display.page import SMALL_PT, page, plain

EVERY = 10  # steps between two dots
DASHES = ("-", "--", "-.")


def losses(curves: Mapping[str, Sequence[float]], title: str, *, note: str = "") -> Figure:
    """Draw the losses of the first run over its steps, and below how far the others are from it.

    Raises: CourseError without a curve
    """
    if not curves:
        raise CourseError("losses: need one curve at least; got none.")
    (first, whole), *others = curves.items()
    legend = [Line2D([], [], color=SERIES[1], label=first)]
    if others:
        word = others[0][0] if len(others) == 1 else f"{len(others)} other runs"
        legend.append(Line2D([], [], color=QUIET, marker="o", linestyle="", ms=3, label=word))
    figure, (axes, *below) = page(title, [1.8, 1.2] if others else [2.6], note=note, legend=legend)
    plain(axes, x_label="" if others else "step", y_label="loss", grid="both")
    axes.plot(range(1, len(whole) + 1), whole, color=SERIES[1], linewidth=1.6)
    for apart in below:
        plain(apart, x_label="step", y_label="difference", grid="both")
        apart.axhline(0, color=SERIES[1], linewidth=1.6)
        for _, curve in others:
            differences = [loss - alone for loss, alone in zip(curve, whole, strict=False)]
            apart.plot(range(1, len(differences) + 1), differences, "o", color=QUIET, markersize=3)
    return figure


def descents(
    curves: Mapping[tuple[str, str], Sequence[Sequence[float]]],
    title: str,
    *,
    target: float,
    target_words: str,
    note: str = "",
) -> Figure:
    """Draw how losses decrease: a color for the first word of a name, a dash for the second.

    Of each name the first curve is a line, the others are dots.

    target   a loss for all of them to reach: a dotted line

    Raises: CourseError without a curve, or with more words than colors or dashes
    """
    colours = dict(zip(dict.fromkeys(first for first, _ in curves), SERIES, strict=False))
    dashes = dict(zip(dict.fromkeys(second for _, second in curves), DASHES, strict=False))
    if not curves or any(a not in colours or b not in dashes for a, b in curves):
        raise CourseError(
            f"descents: need 1 to {len(SERIES)} first and 1 to {len(DASHES)} second words; got "
            f"the names {', '.join(map(str, curves)) or 'of nothing'}."
        )
    legend = [Line2D([], [], color=colour, label=word) for word, colour in colours.items()]
    legend += [Line2D([], [], color=QUIET, ls=dash, label=word) for word, dash in dashes.items()]
    figure, (axes,) = page(title, [3.0], note=note, legend=legend)
    plain(axes, x_label="step", y_label="loss", grid="both")
    for (first, second), (whole, *others) in curves.items():
        colour, dash = colours[first], dashes[second]
        axes.plot(range(1, len(whole) + 1), whole, ls=dash, color=colour, linewidth=1.6, zorder=3)
        for curve in others:
            steps = range(1, len(curve) + 1)[::EVERY]
            axes.plot(steps, curve[::EVERY], "o", color=colour, markersize=4, zorder=3)
    axes.axhline(target, color=BLACK, linestyle=":", linewidth=1.1, zorder=2)
    axes.annotate(
        target_words, (1, target), xytext=(0, 4), textcoords="offset points", fontsize=SMALL_PT
    )
    return figure
