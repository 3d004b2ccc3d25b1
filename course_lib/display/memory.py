"""Memory of ranks by kind: over time, or as bars at each ledger's peak.

A dashed line is the memory of the device. What exceeds it is crossed out and printed.
"""

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_lib.core.errors import CourseError
from course_lib.core.records import MEMORY_KINDS, Ledger
from course_lib.core.units import GIB, KIB, MIB, format_bytes
from course_lib.display.colours import BLACK, KIND, WHITE
from course_lib.display.page import (
    SMALL_PT,
    WIDTH_IN,
    Margins,
    empty,
    page,
    plain,
    swatches,
    time_unit,
)

_NARROWEST = 1 / 400  # of the time axis: a peak that lasts for less is drawn that wide
_WORDS_IN = 1.2  # free space next to the longest bar for its label
_OVER: dict[str, Any] = {"facecolor": "none", "edgecolor": BLACK, "hatch": "xx", "linewidth": 0.0}


def memory(
    ledgers: Ledger | Sequence[Ledger] | Mapping[str, Ledger],
    title: str,
    *,
    limit_bytes: float | None = None,
    scale_bytes: float = 0,
) -> Figure:
    """Draw bytes by memory kind: one ledger over its time, several as bars at their peaks.

    Several ledgers are named by their keys, or by their ranks in a plain list. A ledger with a
    single time is drawn as a bar.

    limit_bytes   the memory of the device: a dashed line
    scale_bytes   the axis reaches at least that far, so that several pictures share one scale

    Raises: CourseError for a plain list with two ledgers of one rank
    """
    named = _named(ledgers)
    kinds = [k for k in MEMORY_KINDS if any(any(one.bytes_by_kind[k]) for one in named.values())]
    legend = swatches([KIND[kind] for kind in kinds], kinds)
    most = max([limit_bytes or 0, scale_bytes, *(ledger.peak_bytes() for ledger in named.values())])
    only = next(iter(named.values())) if isinstance(ledgers, Ledger) else None
    if only is not None and len(set(only.times_s)) > 1:
        return _over_time(only, title, kinds, legend, most, limit_bytes)
    return _bars(named, title, kinds, legend, most, limit_bytes)


def _named(ledgers: Ledger | Sequence[Ledger] | Mapping[str, Ledger]) -> dict[str, Ledger]:
    if isinstance(ledgers, Mapping):
        return dict(ledgers)
    several = [ledgers] if isinstance(ledgers, Ledger) else list(ledgers)
    named = {f"rank {ledger.rank}": ledger for ledger in several}
    if len(named) < len(several):
        raise CourseError(
            "memory: need one ledger a rank in a plain list; got a rank twice. "
            'Try names: memory({"ZeRO-1": ledger, "ZeRO-3": other}, ...).'
        )
    return named


def _over_time(
    ledger: Ledger,
    title: str,
    kinds: Sequence[str],
    legend: list[Artist],
    most: float,
    limit_bytes: float | None,
) -> Figure:
    """Draw stacked steps: the bytes of each time hold until the next one."""
    figure, (axes,) = page(title, [2.6], legend=legend, margins=Margins(left=0.75))
    unit, word = _unit(most)
    factor, time_word = time_unit(ledger.times_s[-1])
    first, last = ledger.times_s[0], ledger.times_s[-1]
    times = np.array([*ledger.times_s, last + 0.02 * (last - first)]) * factor  # the last one shows
    plain(axes, x_label=f"time ({time_word})", y_label=f"memory ({word})", grid="y")
    totals = ledger.totals()
    peak = totals.index(max(totals))
    width = max(times[peak + 1] - times[peak], _NARROWEST * (times[-1] - times[0]))
    floor = np.zeros(len(times))
    for kind in kinds:
        held = ledger.bytes_by_kind[kind]
        top = floor + np.array([*held, held[-1]]) / unit
        look: dict[str, Any] = {"color": KIND[kind].fill, "linewidth": 0}
        axes.fill_between(times, floor, top, step="post", **look)
        axes.bar(times[peak], top[peak] - floor[peak], width, floor[peak], align="edge", **look)
        floor = top
    axes.set_xlim(times[0], times[-1])
    axes.set_ylim(0, (most or 1) / unit * 1.12)
    axes.annotate(
        f"peak {format_bytes(ledger.peak_bytes())}",
        (times[peak], floor[peak]),
        xytext=(0, 3),
        textcoords="offset points",
        fontsize=SMALL_PT,
        ha="left" if peak < len(times) / 2 else "right",
    )
    if limit_bytes is not None:
        limit = limit_bytes / unit
        axes.axhline(limit, color=BLACK, linestyle="--", linewidth=1.2)
        axes.fill_between(times, limit, np.maximum(floor, limit), step="post", **_OVER)
        emptier = 0 if floor[0] <= floor[-1] else -1
        _say_limit(axes, limit_bytes, (times[emptier], limit), "left" if emptier == 0 else "right")
    return figure


def _bars(
    named: Mapping[str, Ledger],
    title: str,
    kinds: Sequence[str],
    legend: list[Artist],
    most: float,
    limit_bytes: float | None,
) -> Figure:
    """Draw one bar per ledger, at the time of its peak."""
    longest = max((len(name) for name in named), default=0)
    margins = Margins(left=min(2.4, 0.3 + 0.085 * longest), right=0.3)
    above = 0.3 if limit_bytes is not None else 0.0
    figure, (axes,) = page(
        title, [0.42 * max(1, len(named)) + above], legend=legend, margins=margins
    )
    unit, word = _unit(most)
    plain(axes, x_label=f"memory ({word})")
    wide = WIDTH_IN - margins.left - margins.right
    axes.set_xlim(0, (most or 1) / unit * wide / (wide - _WORDS_IN))
    axes.set_ylim(max(1, len(named)) - 0.5, -0.5 - above / 0.42)
    axes.set_yticks(range(len(named)), list(named))
    axes.tick_params(axis="y", length=0)
    for row, ledger in enumerate(named.values()):
        _bar(axes, row, ledger, kinds, unit, limit_bytes)
    if limit_bytes is not None:
        axes.axvline(limit_bytes / unit, color=BLACK, linestyle="--", linewidth=1.2)
        _say_limit(axes, limit_bytes, (limit_bytes / unit, -0.55), "right")
    if not named:
        empty(axes, "no ledger was given")
    return figure


def _bar(
    axes: Axes,
    row: int,
    ledger: Ledger,
    kinds: Sequence[str],
    unit: float,
    limit_bytes: float | None,
) -> None:
    totals = ledger.totals()
    peak = totals.index(max(totals)) if totals else None
    parts = [0 if peak is None else ledger.bytes_by_kind[kind][peak] for kind in kinds]
    starts = [0, *accumulate(parts)]
    for kind, start, part in zip(kinds, starts, parts, strict=False):
        ink = KIND[kind]
        axes.barh(row, part / unit, 0.66, start / unit, color=ink.fill, edgecolor=WHITE, lw=0.7)
        low, high = _clear_of(limit_bytes, start, start + part)
        if (high - low) / unit > 0.085 * axes.get_xlim()[1] and part < starts[-1]:
            axes.text(
                (low + high) / 2 / unit,
                row,
                format_bytes(part),
                ha="center",
                va="center",
                fontsize=SMALL_PT,
                color=ink.text,
                bbox={"facecolor": ink.fill, "edgecolor": "none", "pad": 1.0},
            )
    words = format_bytes(starts[-1])
    if limit_bytes is not None and starts[-1] > limit_bytes:
        over = starts[-1] - limit_bytes
        axes.barh(row, over / unit, 0.66, limit_bytes / unit, **_OVER)
        words += f"\n{format_bytes(over)} too much"
    axes.annotate(
        words,
        (starts[-1] / unit, row),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=SMALL_PT,
        bbox={"facecolor": WHITE, "edgecolor": "none", "pad": 0.5},  # over the limit's line
    )


def _clear_of(limit: float | None, start: float, end: float) -> tuple[float, float]:
    """Return the larger piece of a part of a bar that the limit cuts in two."""
    if limit is None or not start < limit < end:
        return start, end
    return (start, limit) if limit - start >= end - limit else (limit, end)


def _say_limit(axes: Axes, limit_bytes: float, where: tuple[float, float], side: str) -> None:
    axes.annotate(
        f"limit {format_bytes(limit_bytes)}",
        where,
        xytext=(4 if side == "left" else -4, 3),
        textcoords="offset points",
        ha=side,
        va="bottom",
        fontsize=SMALL_PT,
        fontweight="bold",
    )


def _unit(most: float) -> tuple[float, str]:
    """Return the largest unit in which the peak is at least 1."""
    for size, word in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if most >= size:
            return size, word
    return 1, "B"
