"""Pairs of bars: measured (solid) and predicted by a formula (hollow)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from course_lib.core.errors import CourseError
from course_lib.display.colours import BLACK, QUIET, SERIES, WHITE
from course_lib.display.page import SMALL_PT, Margins, page, plain

_LINE_IN = 0.36
_FREE = 0.12  # of the axis, for the number behind the longest bar


@dataclass(frozen=True, kw_only=True)
class Pair:
    """One pair: its name, measured and predicted value, and the ideal; None: not known."""

    name: str
    measured: float | None = None
    predicted: float | None = None
    ideal: float | None = None


def paired_bars(
    pairs: Sequence[Pair],
    title: str,
    *,
    x_label: str,
    words: Callable[[float], str] = "{:,.3g}".format,
    limit: float | None = None,
    limit_words: str = "",
    note: str = "",
) -> Figure:
    """Draw the pairs from top to bottom. `limit` is a dashed line through all of them.

    words   formats the number behind a bar

    Raises: CourseError without a number to draw
    """
    numbers = [one for pair in pairs for one in (pair.measured, pair.predicted, pair.ideal)]
    known = [one for one in numbers if one is not None]
    if not known:
        raise CourseError("paired_bars: need a number in one pair at least; got none.")
    longest = max(len(pair.name) for pair in pairs)
    figure, (axes,) = page(
        title,
        [_LINE_IN * len(pairs) + 0.3],
        note=note,
        legend=_legend(pairs),
        margins=Margins(left=0.35 + 0.082 * longest),
    )
    plain(axes, x_label=x_label)
    low, high = min(0.0, *known), max(0.0, limit or 0.0, *known)
    free = (high - low or 1.0) * _FREE
    axes.set_xlim(low - free * (low < 0), high + free)
    axes.set_ylim(len(pairs) - 0.5, -0.5 - (0.3 / _LINE_IN if limit is not None else 0))
    axes.set_yticks(range(len(pairs)), [pair.name for pair in pairs])
    axes.tick_params(axis="y", length=0)
    for row, pair in enumerate(pairs):
        _draw(axes, row, pair, words)
    if limit is not None:
        axes.axvline(limit, color=BLACK, linestyle="--", linewidth=1.2, zorder=1)
        axes.text(limit, -0.55, f"{limit_words} ", ha="right", fontsize=SMALL_PT, weight="bold")
    return figure


def _draw(axes: Axes, row: int, pair: Pair, words: Callable[[float], str]) -> None:
    if pair.ideal is not None:
        axes.plot([pair.ideal] * 2, [row - 0.4, row + 0.4], "--", color=QUIET, linewidth=1.1)
    for at, value, fill in (
        (row - 0.19, pair.measured, SERIES[0]),
        (row + 0.19, pair.predicted, WHITE),
    ):
        if value is None:
            continue
        axes.barh(at, value, 0.34, color=fill, edgecolor=SERIES[0], linewidth=0.9)
        axes.annotate(
            words(value),
            (max(value, 0.0), at),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL_PT - 1,
            color=BLACK if fill != WHITE else QUIET,
            bbox={"facecolor": WHITE, "edgecolor": "none", "pad": 0.5},
        )


def _legend(pairs: Sequence[Pair]) -> list[Artist]:
    keys: list[Artist] = []
    if any(pair.measured is not None for pair in pairs):
        keys.append(Patch(facecolor=SERIES[0], edgecolor=SERIES[0], label="measured"))
    if any(pair.predicted is not None for pair in pairs):
        keys.append(Patch(facecolor=WHITE, edgecolor=SERIES[0], label="predicted"))
    if any(pair.ideal is not None for pair in pairs):
        keys.append(Line2D([], [], color=QUIET, linestyle="--", label="ideal"))
    return keys
