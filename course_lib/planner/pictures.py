"""Pictures of lesson 12: bills, memory, all plans of a search, and predictions beside measurements.

Each returns a figure and its alt text: the finding as a sentence. Notebook 12_planner.
"""

from collections.abc import Container, Mapping, Sequence
from itertools import accumulate
from statistics import median
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from course_lib.core.records import Ledger
from course_lib.core.units import GIB, format_bytes, format_seconds
from course_lib.display.colours import BLACK, KIND, QUIET, SERIES, WHITE, Ink
from course_lib.display.memory import memory
from course_lib.display.page import (
    SMALL_PT,
    Margins,
    page,
    plain,
    powers_of_ten,
    swatches,
    time_unit,
)
from course_lib.display.paired_bars import Pair, paired_bars
from course_lib.planner.live import bill_parts, bill_title, bill_where, bill_words, memory_words
from course_lib.planner.prediction import CAUSE_NAMES, PredictedStep
from course_lib.planner.published_runs import PublishedRun
from course_lib.planner.searching import SearchResult

_Picture = tuple[Figure, str]  # and what it shows, in words
_LINE_IN = 0.36
CAUSE_KINDS = {  # for the color of a row
    "compute_s": "compute",
    "launch_s": "wait",
    "tp_s": "all_reduce",
    "ep_s": "all_reduce",
    "bubble_s": "wait",
    "pp_s": "all_reduce",
    "dp_s": "all_reduce",
    "optimizer_s": "optimizer",
}
_SCHEDULES = {"1f1b": "1F1B", "zb-h1": "ZB-H1"}
EFFICIENT = 0.3  # published MFU from which the predictions were promised
NEAR = 0.2  # a band around the diagonal


def bill_waterfall(predicted: PredictedStep) -> _Picture:
    """Draw the seconds of a step by cause, each beginning where the last one ends.

    The dashed line is the step of GPUs that compute at their peak all the time.
    """
    parts = bill_parts(predicted)
    figure, (axes,) = page(
        bill_title(predicted),
        [_LINE_IN * (len(parts) + 1) + 0.3],
        note=bill_where(predicted),
        legend=_cause_legend(parts),
        margins=Margins(left=1.2),
    )
    _draw_bill(axes, predicted)
    return figure, bill_words(predicted)


def bill_and_memory(predicted: PredictedStep) -> _Picture:
    """Draw the bill of a step, and under it the memory of the fullest rank."""
    parts = bill_parts(predicted)
    kinds = [kind for kind, num_bytes in predicted.memory.items() if num_bytes]
    figure, (above, below) = page(
        bill_title(predicted),
        [_LINE_IN * (len(parts) + 1) + 0.3, _LINE_IN + 0.3],
        note=bill_where(predicted),
        legend=[*_cause_legend(parts), *swatches([KIND[kind] for kind in kinds], kinds)],
        margins=Margins(left=1.2, between=0.65),
    )
    _draw_bill(above, predicted)
    limit = predicted.cluster.usable_bytes / GIB
    plain(below, x_label="memory of the fullest rank (GiB)")
    starts = [0.0, *accumulate(predicted.memory.values())]
    for kind, start in zip(predicted.memory, starts, strict=False):
        _box(below, 0, start / GIB, predicted.memory[kind] / GIB, KIND[kind])
    _words(below, starts[-1] / GIB, 0, format_bytes(predicted.memory_bytes))
    _rows(below, ["memory"])
    below.set_xlim(0, 1.13 * max(limit, starts[-1] / GIB))
    _limit(below, limit, -0.55, f"usable {limit:.0f} GiB ")
    return figure, f"{bill_words(predicted)}; memory {memory_words(predicted)}"


def _draw_bill(axes: Axes, predicted: PredictedStep) -> None:
    parts = bill_parts(predicted)
    factor, unit = time_unit(predicted.step_s)
    plain(axes, x_label=f"predicted time of a step ({unit})")
    starts = [0.0, *accumulate(parts.values())]
    for row, (name, start) in enumerate(zip(parts, starts, strict=False)):
        _box(axes, row, start * factor, parts[name] * factor, KIND[CAUSE_KINDS[name]])
        end = (start + parts[name]) * factor
        _words(axes, end, row, f"{parts[name] * factor:.3g} {unit}")
        axes.plot([end, end], [row, row + 1], color=QUIET, linewidth=0.8, zorder=3)
    whole = predicted.step_s * factor
    axes.barh(len(parts), whole, 0.66, color=WHITE, edgecolor=BLACK)
    _words(axes, whole, len(parts), f"{whole:.3g} {unit}")
    _rows(axes, [*(CAUSE_NAMES[name] for name in parts), "step"])
    axes.set_xlim(0, whole * 1.13)
    _limit(axes, whole * predicted.mfu, -0.55, "all FLOP at the peak ")


def bills(steps: Mapping[str, PredictedStep], title: str) -> _Picture:
    """Draw the bills of several plans, a bar each, on one scale."""
    factor, unit = time_unit(max(step.step_s for step in steps.values()))
    longest = max(map(len, steps))
    found = {name for step in steps.values() for name, seconds in step.seconds.items() if seconds}
    figure, (axes,) = page(
        title,
        [_LINE_IN * len(steps) + 0.05],
        legend=_cause_legend(found),
        margins=Margins(left=min(3.6, 0.35 + 0.078 * longest)),
    )
    plain(axes, x_label=f"predicted time of a step ({unit})")
    axes.set_xlim(0, max(step.step_s for step in steps.values()) * factor * 1.13)
    for row, step in enumerate(steps.values()):
        starts = [0.0, *accumulate(step.seconds.values())]
        for (name, seconds), start in zip(step.seconds.items(), starts, strict=False):
            _box(axes, row, start * factor, seconds * factor, KIND[CAUSE_KINDS[name]])
        _words(axes, step.step_s * factor, row, f"{step.step_s * factor:.3g} {unit}")
    _rows(axes, list(steps))
    words = "; ".join(f"{name}: {format_seconds(step.step_s)}" for name, step in steps.items())
    return figure, f"{title}. {words}"


def bills_that_fit(steps: Mapping[str, PredictedStep]) -> _Picture:
    """Draw the bills of those plans that fit; the title compares the slowest with the fastest."""
    fitting = {name: step for name, step in steps.items() if step.fits}
    fast = min(fitting, key=lambda name: fitting[name].step_s)
    slow = max(fitting, key=lambda name: fitting[name].step_s)
    times = fitting[slow].step_s / fitting[fast].step_s
    return bills(
        fitting, f"Of the plans that fit, {slow} takes {times:.1f} times as long as {fast}"
    )


def bills_of_choices(chosen: Mapping[str, PredictedStep], forgot: str) -> _Picture:
    """Draw the full bills of the plans that several planners choose; the title names the worst.

    forgot   what the planner of the slowest plan leaves out
    """
    fast_s, slow_s = (pick(step.step_s for step in chosen.values()) for pick in (min, max))
    title = f"Forgetting the {forgot} leads to {slow_s:.1f} s per step instead of {fast_s:.1f} s"
    return bills(chosen, title)


def pipelines_in_miniature(
    measured: Mapping[str, Sequence[float]], predicted_s: Mapping[str, float], divided_by: float
) -> _Picture:
    """Draw the measured pipeline of each schedule beside its predicted time.

    measured     seconds of each turn by schedule, at full length
    divided_by   how many times shorter the ranks' seconds were
    """
    rows = {name: _SCHEDULES.get(name, name) for name in measured}
    pairs = [
        Pair(name=rows[name], measured=median(seconds), predicted=predicted_s[name])
        for name, seconds in measured.items()
    ]
    first, *_, last = (f"{median(measured[name]):.1f} s with {row}" for name, row in rows.items())
    title = f"The measured pipeline takes {first}, {last}"
    x_label = f"time of the pipeline (s; measured times are multiplied by {divided_by:g})"
    words = ", ".join(f"{predicted_s[name]:.1f} s with {row}" for name, row in rows.items())
    return paired_bars(pairs, title, x_label=x_label), f"{title}; predicted: {words}"


def memory_by_kind(steps: Mapping[str, PredictedStep]) -> _Picture:
    """Draw the bytes of plans on their fullest rank, with what a step can use as the limit."""
    ledgers = {}
    for name, step in steps.items():
        ledgers[name] = Ledger()
        ledgers[name].add(0.0, **step.memory)
    usable = min(step.cluster.usable_bytes for step in steps.values())
    least = min(steps.values(), key=lambda step: step.memory_bytes)
    held = format_bytes(least.memory_bytes)
    if len(steps) == 1:
        verb = "fits" if least.fits else "does not fit"
        title = f"{least.plan}: {held} on the fullest rank {verb} into {format_bytes(usable)}"
    else:
        fit = sum(step.fits for step in steps.values())
        where = f"{fit} of {len(steps)} plans fit into {format_bytes(usable)}"
        title = f"{where}; the smallest needs {held}"
    each = ", ".join(f"{name} {format_bytes(step.memory_bytes)}" for name, step in steps.items())
    return memory(ledgers, title, limit_bytes=usable), f"{title}. {each}"


def time_against_memory(
    found: SearchResult, named: Mapping[str, PredictedStep] | None = None
) -> _Picture:
    """Draw every plan that fits, and the Pareto front: no other plan is faster and smaller.

    named   plans to point at
    """
    front = found.pareto_front
    small, fast = front[-1], front[0]
    title = (
        f"{len(front)} of {len(found.steps):,} plans are on the front: from "
        f"{format_seconds(fast.step_s)} in {format_bytes(fast.memory_bytes)} to "
        f"{format_seconds(small.step_s)} in {format_bytes(small.memory_bytes)}"
    )
    dot: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 2.8, "color": "#9A9A9A"}
    line: dict[str, Any] = {"marker": "s", "markersize": 4, "color": SERIES[1], "linewidth": 1.2}
    star: dict[str, Any] = {"linestyle": "", "marker": "o", "markersize": 9, "color": BLACK}
    star |= {"markerfacecolor": "none", "markeredgewidth": 1.6}
    legend: list[Artist] = [Line2D([], [], label="a plan that fits", **dot)]
    legend.append(Line2D([], [], label="Pareto front", **line))
    slowest_s = small.step_s * 1.05
    note = f"Plans slower than {format_seconds(slowest_s)} are not drawn."
    figure, (axes,) = page(title, [3.1], note=note, legend=legend)
    y_label = "predicted time of a step (s)"
    plain(axes, x_label="memory of the fullest rank (GiB)", y_label=y_label, grid="both")
    axes.plot(*_points(found.steps), **dot)
    axes.plot(*_points(front), drawstyle="steps-pre", **line)
    for name, step in (named or {}).items():
        axes.plot(*_points([step]), **star)
        where = step.memory_bytes / GIB, step.step_s
        axes.annotate(
            f"{name} ",
            where,
            (-4, -14),
            textcoords="offset points",
            ha="right",
            fontsize=SMALL_PT,
            weight="bold",
            bbox={"facecolor": WHITE, "edgecolor": "none", "pad": 0.5},
        )
    usable = fast.cluster.usable_bytes / GIB
    axes.set_xlim(0, usable * 1.05)
    axes.set_ylim(0, slowest_s)
    _limit(axes, usable, small.step_s * 1.06, f"usable {usable:.0f} GiB ")
    return figure, title


def predicted_against_published(tables: Mapping[str, Sequence[PublishedRun]]) -> _Picture:
    """Draw the predicted step of published runs against the measured one, up to four tables."""
    errors = [
        abs(run.predicted().step_s / run.step_s - 1) for runs in tables.values() for run in runs
    ]
    near = sum(error <= NEAR for error in errors)
    title = (
        f"{near} of {len(errors)} predicted steps are within {100 * NEAR:.0f} % of published "
        f"ones; median error {100 * median(errors):.1f} %"
    )
    looks = dict(zip(tables, zip(SERIES, "os^D", strict=True), strict=False))
    legend: list[Artist] = [
        Line2D([], [], label=name, color=color, marker=shape, linestyle="", markersize=5)
        for name, (color, shape) in looks.items()
    ]
    note = f"Dotted lines: {100 * NEAR:.0f} % shorter or longer than published."
    figure, (axes,) = page(title, [3.4], note=note, legend=legend)
    plain(axes, x_label="published step (s)", y_label="predicted step (s)", grid="both")
    powers_of_ten(axes)
    for name, (color, shape) in looks.items():
        at = [run.step_s for run in tables[name]]
        said = [run.predicted().step_s for run in tables[name]]
        axes.plot(at, said, shape, color=color, markersize=3.5)
    ends = [min(run.step_s for runs in tables.values() for run in runs)]
    ends.append(max(run.step_s for runs in tables.values() for run in runs))
    for share, dash in ((1, "-"), (1 - NEAR, ":"), (1 + NEAR, ":")):
        axes.plot(ends, [share * end for end in ends], dash, color=QUIET, linewidth=1)
    return figure, title


def errors_by_mfu(runs: Sequence[PublishedRun]) -> _Picture:
    """Draw predicted divided by published step, against the published MFU."""
    ratios = [run.predicted().step_s / run.step_s for run in runs]
    good = [ratio for ratio, run in zip(ratios, runs, strict=True) if run.mfu >= EFFICIENT]
    rest = [ratio for ratio, run in zip(ratios, runs, strict=True) if run.mfu < EFFICIENT]
    title = (
        f"Predicted / published step: median {median(good):.2f} at an MFU of "
        f"{100 * EFFICIENT:.0f} % or more, else {median(rest):.2f}"
    )
    note = "The constants were fitted on runs with an MFU of 20 % or more and a tp of at most 8."
    figure, (axes,) = page(title, [3.0], note=note)
    plain(
        axes,
        x_label="published MFU (%)",
        y_label="predicted / published step",
        grid="both",
    )
    powers_of_ten(axes, ("y",))
    axes.plot([100 * run.mfu for run in runs], ratios, "o", color=SERIES[0], markersize=3)
    axes.axhline(1, color=QUIET, linewidth=1)
    axes.axvline(100 * EFFICIENT, color=BLACK, linestyle="--", linewidth=1.2)
    axes.set_xlim(left=0)
    return figure, f"{title}; {len(good)} and {len(rest)} runs"


def _points(steps: Sequence[PredictedStep]) -> tuple[list[float], list[float]]:
    return [step.memory_bytes / GIB for step in steps], [step.step_s for step in steps]


def _cause_legend(causes: Container[str]) -> list[Artist]:
    """Return one entry per color, named by what it stands for."""
    words = {"compute": "compute", "wait": "waiting", "all_reduce": "exposed messages"}
    kinds = [kind for name, kind in CAUSE_KINDS.items() if name in causes]
    once = list(dict.fromkeys(kinds))
    return swatches([KIND[kind] for kind in once], [words.get(kind, kind) for kind in once])


def _box(axes: Axes, row: float, start: float, length: float, ink: Ink) -> None:
    axes.barh(
        row,
        length,
        0.66,
        start,
        color=ink.fill,
        edgecolor=ink.line,
        hatch=ink.hatch * 2,
        linewidth=0.5,
    )


def _limit(axes: Axes, x: float, y: float, words: str) -> None:
    """Draw a dashed line, with its words to the left of it at the height y."""
    axes.axvline(x, color=BLACK, linestyle="--", linewidth=1.2)
    axes.text(x, y, words, ha="right", fontsize=SMALL_PT, weight="bold")


def _words(axes: Axes, at: float, row: float, words: str) -> None:
    axes.annotate(
        words,
        (at, row),
        xytext=(4, 0),
        textcoords="offset points",
        va="center",
        fontsize=SMALL_PT,
        bbox={"facecolor": WHITE, "edgecolor": "none", "pad": 0.5},
    )


def _rows(axes: Axes, names: list[str]) -> None:
    axes.set_yticks(range(len(names)), names)
    axes.tick_params(axis="y", length=0)
    axes.set_ylim(len(names) - 0.5, -0.9)
