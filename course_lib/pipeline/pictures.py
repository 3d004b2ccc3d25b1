"""Pipelines: who computes what when, and under it what every rank holds meanwhile.

Both lanes are read off the same events, whether a schedule was played on paper or run on real
ranks: a forward begins to hold the activations of its micro-batch, its backward (or the weight's
half of it) lets them go. Notebook 08_pipeline.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_lib.core.links import Link, TwoLevelLink
from course_lib.core.records import Event
from course_lib.display.colours import KIND, QUIET
from course_lib.display.lanes import visible
from course_lib.display.page import SMALL_PT, TEXT_PT, Margins, page, plain, time_unit
from course_lib.display.timeline import draw_events, event_legend, link_note

PIPELINE_KINDS = ("forward", "backward", "backward_input", "backward_weight")


@dataclass(frozen=True)
class DrawnRun:
    """The events of one step, and what can be read off them."""

    events: list[Event]

    @property
    def step_s(self) -> float:
        """Seconds until the last rank has computed what it has to."""
        return max((event.end_s for event in self.computed()), default=0.0)

    @property
    def ranks(self) -> list[int]:
        return sorted({event.rank for event in self.events})

    def computed(self, rank: int | None = None) -> list[Event]:
        """What a rank computed, or all of them, from the first to the last."""
        found = [e for e in self.events if e.kind in PIPELINE_KINDS and rank in (None, e.rank)]
        return sorted(found, key=lambda event: event.start_s)

    @property
    def bubble_fraction(self) -> float:
        """The part of all ranks' time in which they do not compute."""
        busy_s = sum(event.duration_s for event in self.computed())
        return 1 - busy_s / (len(self.ranks) * self.step_s or 1.0)

    @property
    def num_model_chunks(self) -> int:
        """Read off the labels: F3.1 is in chunk 1."""
        return 1 + max((int(e.label.partition(".")[2] or 0) for e in self.computed()), default=0)

    def in_flight(self, rank: int) -> tuple[list[float], list[float]]:
        """Moments, and how many micro-batches' activations the rank holds from each of them on.

        With model chunks, what one of them holds is a part of a micro-batch.
        """
        part = 1 / self.num_model_chunks
        changes = [(0.0, 0.0)]
        for event in self.computed(rank):
            if event.kind == "forward":
                changes.append((event.start_s, part))
            elif event.kind != "backward_input":
                changes.append((event.end_s, -part))
        changes.sort()
        held, counts = 0.0, []
        for _, change in changes:
            held += change
            counts.append(held)
        return [moment for moment, _ in changes] + [self.step_s], [*counts, held]

    def peak_in_flight(self, rank: int) -> float:
        """The most that a rank holds at once, in micro-batches."""
        return max(self.in_flight(rank)[1])


def pipelines(
    runs: Mapping[str, Iterable[Event]],
    title: str,
    *,
    link: Link | TwoLevelLink | str | None = None,
    unit: str = "",
) -> Figure:
    """Draw steps of a pipeline under one another: for each a lane of time, and one of memory.

    `runs` gives each its name: {"GPipe": ..., "1F1B": ...}. Over the time stands what part of it
    the ranks are idle; beside the memory, how many micro-batches each rank holds at most. The rest
    is as in `timelines`.
    """
    by_run = {name: DrawnRun(visible(events)) for name, events in runs.items()}
    everything = [event for run in by_run.values() for event in run.events]
    ranks = sorted({event.rank for event in everything}) or [0]
    span_s = max((event.end_s for event in everything), default=0.0) or 1.0
    scale, word = time_unit(span_s, unit)
    tall = 0.34 if len(ranks) <= 4 else 0.27
    heights = [tall * len(ranks), 0.8 * tall * len(ranks)] * len(by_run)
    margins = Margins(top=0.32, between=0.42, right=0.5)
    figure, panels = page(
        title, heights, note=link_note(link), legend=_legend(everything), margins=margins
    )
    most = max((run.peak_in_flight(rank) for run in by_run.values() for rank in ranks), default=1)
    for number, (name, run) in enumerate(by_run.items()):
        above, beneath = panels[2 * number : 2 * number + 2]
        idle = f"{name}: {run.bubble_fraction:.0%} of the time idle" if run.events else name
        draw_events(above, idle, run.events, ranks, (span_s * scale, scale))
        _draw_held(beneath, run, ranks, (span_s * scale, scale), most or 1)
    for axes in panels[:-1]:
        axes.tick_params(axis="x", labelbottom=False)
    panels[-1].set_xlabel(f"time ({word})", fontsize=TEXT_PT)
    return figure


def _legend(events: Sequence[Event]) -> list[Artist]:
    """Forward and the activations it leaves share a colour, and so an entry."""
    entries = event_legend(events)
    if entries and entries[0].get_label() == "forward":
        entries[0].set_label("forward (beneath: activations held)")
    return entries


def _draw_held(
    axes: Axes, run: DrawnRun, ranks: Sequence[int], time: tuple[float, float], most: float
) -> None:
    """One row a rank, as high as what it holds; all rows on one scale."""
    span, scale = time
    plain(axes)
    axes.set_xlim(0, span * 1.005)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_yticks(range(len(ranks)), [str(rank) for rank in ranks])
    axes.tick_params(axis="y", length=0)
    axes.set_title("micro-batches in flight (right: the most)", loc="left", fontsize=TEXT_PT, pad=5)
    for row, rank in enumerate(ranks):
        moments, counts = run.in_flight(rank)
        floor = row + 0.44
        tops = [floor - 0.84 * count / most for count in counts]
        at = [moment * scale for moment in moments]
        axes.fill_between(at, floor, tops, step="post", color=KIND["activations"].fill, lw=0)
        axes.plot([0, span], [floor, floor], color=QUIET, linewidth=0.5)
        axes.annotate(
            f"{run.peak_in_flight(rank):g}",
            (span * 1.005, row),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=SMALL_PT,
            annotation_clip=False,
        )
