"""Pictures of lesson 00, of which each function returns a figure and its alt text.

They are in this package because the lesson's own, `ranks`, stands below it and draws nothing.
Notebook 00_ranks.
"""

from collections.abc import Sequence
from statistics import median

from matplotlib.figure import Figure

from course_lib.core.links import Link
from course_lib.core.records import Event, RunRecord
from course_lib.display.compare import Voices, compare
from course_lib.display.timeline import timeline
from course_lib.display.waiting import Waiting, names_of, waiting


def order_of_ranks(events: Sequence[Event]) -> tuple[Figure, str]:
    """Draw what ranks did that do not wait for each other; `events` are in order of their start."""
    title = f"Rank {events[0].rank} prints first, rank {events[-1].rank} last"
    return timeline(events, title), f"{title}; the notebook lists them by rank"


def message_times(
    link: Link,
    sizes_mb: Sequence[float],
    formula_s: Sequence[float],
    times_s: Sequence[Sequence[float]],
) -> tuple[Figure, str]:
    """Draw the times of messages on an emulated link, by the formula and as measured.

    times_s   the repetitions of each size
    """
    title = (
        f"{sizes_mb[-1]:g} MB take {median(times_s[-1]):.3f} s; "
        f"the formula says {formula_s[-1]:.3f} s"
    )
    figure = compare(
        sizes_mb,
        Voices(formula=formula_s, measurement=times_s),
        title,
        x_label="message (MB)",
        y_label="time (s)",
        note=f"emulated {link}",
    )
    return figure, title


def late_all_reduce(events: Sequence[Event]) -> tuple[Figure, str]:
    """Draw an all-reduce that ranks call at different times, and say how long rank 0 waits."""
    durations_s = {event.rank: event.duration_s for event in events if event.kind == "all_reduce"}
    title = (
        f"Rank 0 is in all_reduce for {durations_s[0]:.2f} s: it waits until the last rank calls"
    )
    alt = f"{title}; all {len(durations_s)} calls return at about the same time"
    return timeline(events, title), alt


def who_waits(waits: Sequence[Waiting], world_size: int) -> tuple[Figure, str]:
    """Draw the wait-for graph of a hang; its alt text lists the arrows."""
    arrows = [f"rank {w.rank} in {w.kind} for {names_of(w.waits_for)}" for w in waits]
    verb = "waits" if len(waits) == 1 else "wait"
    told = f"{len(waits)} of {world_size} ranks {verb}: {', '.join(arrows)}"
    return waiting(waits, world_size), told


def recorded_run(records: Sequence[RunRecord]) -> tuple[Figure, str]:
    """Draw the ranks of a script that torchrun has started, from their run records."""
    title = f"{len(records)} ranks started by torchrun, drawn from their run records"
    events = [event for record in records for event in record.events]
    return timeline(events, title), f"{title}: they print one after another"
