"""Pictures of lesson 14, of which each returns a figure and its alt text.

Saves through one rank and by all, boxes before and after resharding, an asynchronous save, what
checkpoints cost without failures, and the best interval.

Notebook 14_checkpoint.
"""

import math
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from course_lib.checkpoint.cost import (
    best_interval_daly,
    best_interval_young,
    expected_overhead,
    extra_s,
    simulated_overhead,
)
from course_lib.checkpoint.live import (
    MOST_ATTEMPT,
    interval_note,
    interval_words,
    tried_intervals_s,
)
from course_lib.core.records import Event
from course_lib.core.shards import Box
from course_lib.core.units import format_bytes
from course_lib.display.colours import RANK
from course_lib.display.compare import Voices, compare
from course_lib.display.page import TEXT_PT, page
from course_lib.display.timeline import timelines

# Daly 2006, captions of figures 3 to 5: saves of 5 min, restarts of 10 min; MTBF, best interval
DALY_SAVE_MIN, DALY = 5.0, ((15.0, 9.1), (360.0, 57.0), (1440.0, 117.0))
DALY_SOURCE = "Daly 2006, figures 3 to 5 (saves of 5 minutes, restarts of 10)"


def saves(runs: Mapping[str, Sequence[Event]], num_bytes: int, link: str) -> tuple[Figure, str]:
    """Draw a save through rank 0 above a save by every rank.

    runs   the events of both, in this order, measured or predicted
    """
    one_ms, all_ms = (1e3 * max(event.end_s for event in events) for events in runs.values())
    title = f"A save of {format_bytes(num_bytes)}: {one_ms:.0f} ms through rank 0, "
    title += f"{all_ms:.0f} ms by every rank"
    return timelines(runs, title, link=link), title


def boxes(
    shape: tuple[int, int], saved: Sequence[Box], wanted: Sequence[Box]
) -> tuple[Figure, str]:
    """Draw which rank has which box of a matrix, and say what is read.

    saved    the boxes of the ranks that saved, in the upper panel
    wanted   the boxes of the ranks that load, in the lower one
    """
    by_run = {f"saved by {len(saved)} ranks": saved, f"loaded by {len(wanted)} ranks": wanted}
    reads = [[n for n, one in enumerate(saved) if one.intersect(box)] for box in wanted]
    num_reads = sum(map(len, reads))
    title = f"{len(wanted)} ranks read {num_reads} intersections with {len(saved)} saved boxes"
    figure, panels = page(title, [1.5] * len(by_run))
    for axes, (name, owned) in zip(panels, by_run.items(), strict=True):
        axes.set(xlim=(0, shape[1] * 1.4), ylim=(shape[0], 0))
        axes.set_axis_off()
        for rank, box in enumerate(owned):
            (top, left), (rows, columns) = box.offsets, box.sizes
            axes.add_patch(
                Rectangle((left, top), columns, rows, facecolor=RANK[rank], edgecolor="black")
            )
            axes.text(left + columns / 2, top + rows / 2, f"rank {rank}", ha="center",
                      va="center", fontsize=TEXT_PT)  # fmt: skip
        axes.text(shape[1] * 1.03, shape[0] / 2, name, va="center", fontsize=TEXT_PT)
    words = "; ".join(
        f"rank {rank} reads from boxes {', '.join(map(str, files))}"
        for rank, files in enumerate(reads)
    )
    return figure, f"{title}: {words}"


def overlap(runs: Mapping[str, Sequence[Event]], link: str = "") -> tuple[Figure, str]:
    """Draw steps beside a plain save, above steps beside an asynchronous one.

    runs   the events of rank 0, in this order; an event of kind "wait" stops the training
    """
    plain_ms, async_ms = (
        1e3 * sum(event.end_s - event.start_s for event in events if event.kind == "wait")
        for events in runs.values()
    )
    title = f"A plain save stops training for {plain_ms:.0f} ms, "
    title += f"an asynchronous one for {async_ms:.0f} ms"
    return timelines(runs, title, link=link or None), title


def extra_time(
    num_steps: int, measured_s: Mapping[int, float], save_s: float
) -> tuple[Figure, str]:
    """Draw what checkpoints add to a run without failures, by formula and as it was measured.

    measured_s   seconds that all saves of the run took, by the steps between two saves
    save_s       seconds of one save, for the formula
    """
    formula = {every: extra_s(num_steps, every, save_s) for every in measured_s}
    most = max(abs(formula[every] / seconds - 1) for every, seconds in measured_s.items())
    title = f"With {1e3 * save_s:.0f} ms per save, the formula is within {100 * most:.0f} % "
    title += "of each measurement"
    figure = compare(
        list(measured_s),
        Voices(formula=list(formula.values()), measurement=list(measured_s.values())),
        title,
        x_label="steps between checkpoints",
        y_label="extra time (s)",
        log_x=True,
    )
    return figure, title


def overhead_curve(
    save_s: float, mtbf_s: float, restart_s: float, name: str = ""
) -> tuple[Figure, str]:
    """Draw the expected overhead over the interval, by formula and by simulation.

    Intervals in which hardly any attempt ends without a failure are left out: to simulate one would
    take exp(attempt / mtbf) draws. So there may be no simulated value at all, or fewer intervals.
    """
    longest_s = MOST_ATTEMPT * mtbf_s - save_s - restart_s
    intervals_s = tried_intervals_s(save_s, mtbf_s, restart_s)

    def percent(interval_min: float) -> float:
        return 100 * expected_overhead(60 * interval_min, save_s, mtbf_s, restart_s)

    played = [
        100 * simulated_overhead(one, save_s, mtbf_s, restart_s, num_intervals=5000)
        if one <= longest_s
        else math.nan
        for one in intervals_s
    ]
    title = interval_words(save_s, mtbf_s, restart_s, name)
    figure = compare(
        [one / 60 for one in intervals_s],
        Voices(formula=percent, simulation=played),
        title,
        x_label="work between two checkpoints (min)",
        y_label="overhead (%)",
        log_x=True,
        note=interval_note(save_s, restart_s),
    )
    times = intervals_s[-1] / best_interval_daly(save_s, mtbf_s)
    most = percent(intervals_s[-1] / 60)
    return figure, f"{title}; at {times:g} times the interval, {most:.3g} %"


def best_intervals() -> tuple[Figure, str]:
    """Draw the best interval over the time between failures: Young, Daly, and published values."""
    mtbf_min = [10.0, 15, 30, 60, 120, 360, 720, 1440]
    curves = {
        "Young": Voices(formula=[best_interval_young(DALY_SAVE_MIN, one) for one in mtbf_min]),
        "Daly": Voices(
            formula=[best_interval_daly(DALY_SAVE_MIN, one) for one in mtbf_min],
            published=tuple(zip(*DALY, strict=True)),  # type: ignore[arg-type]
        ),
    }
    far, near = (
        best_interval_young(DALY_SAVE_MIN, one) / best_interval_daly(DALY_SAVE_MIN, one)
        for one in (15, 1440)
    )
    title = f"With saves of {DALY_SAVE_MIN:g} min, Young's interval is {far:.2f} times Daly's "
    title += f"if M is 15 min, and {near:.2f} times if M is a day"
    figure = compare(
        mtbf_min,
        curves,
        title,
        x_label="mean time between failures (min)",
        y_label="best interval (min)",
        log=True,
        source=DALY_SOURCE,
    )
    return figure, f"{title}; the published values lie on Daly's line"
