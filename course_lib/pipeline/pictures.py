"""Pictures of pipeline steps: a timeline of all ranks, and under it their micro-batches in flight.

Both are drawn from the same events, whether the schedule was simulated or executed on real ranks:
a micro-batch is in flight from the start of its forward to the end of its backward (of its
backward_weight, if that is split). Below: the pictures of the lesson, of which each function
returns a figure and its alt text, and published throughput. Notebook 08_pipeline.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_lib.core.links import Link, TwoLevelLink
from course_lib.core.records import COMPUTE_KINDS, Event
from course_lib.display.colours import KIND, QUIET
from course_lib.display.compare import Voices, compare
from course_lib.display.lanes import visible
from course_lib.display.on_ranks import compare_on_ranks, measured_over
from course_lib.display.page import SMALL_PT, TEXT_PT, Margins, page, plain, time_unit
from course_lib.display.timeline import draw_events, event_legend, link_note, timeline
from course_lib.pipeline import schedules
from course_lib.pipeline.cost import (
    H100_RUN,
    ZERO_BUBBLE_RUN,
    BatchCost,
    H100Stages,
    Throughput,
    bubble_overhead,
    step_parts,
)
from course_lib.pipeline.simulation import SimulatedStep, simulate

PIPELINE_KINDS = ("forward", "backward", "backward_input", "backward_weight")


@dataclass(frozen=True)
class DrawnRun:
    """Events of one step, and the quantities derived from them."""

    events: list[Event]

    @property
    def step_s(self) -> float:
        """Seconds until the last rank has finished computing."""
        return max((event.end_s for event in self.computed()), default=0.0)

    @property
    def ranks(self) -> list[int]:
        """Ranks that have events."""
        return sorted({event.rank for event in self.events})

    def computed(self, rank: int | None = None) -> list[Event]:
        """Return the compute events of one rank, or of all, sorted by start."""
        found = [e for e in self.events if e.kind in PIPELINE_KINDS and rank in (None, e.rank)]
        return sorted(found, key=lambda event: event.start_s)

    @property
    def bubble_fraction(self) -> float:
        """Idle time of all ranks divided by their total time."""
        busy_s = sum(self._busy_s(rank) for rank in self.ranks)
        return 1 - busy_s / (len(self.ranks) * self.step_s or 1.0)

    def _busy_s(self, rank: int) -> float:
        """Return the seconds in which a rank computes; two actions at once count once."""
        busy_s = until_s = 0.0
        for event in self.computed(rank):
            busy_s += max(0.0, event.end_s - max(until_s, event.start_s))
            until_s = max(until_s, event.end_s)
        return busy_s

    @property
    def num_model_chunks(self) -> int:
        """Number of model chunks, from the labels: F3.1 is in chunk 1."""
        return 1 + max((int(e.label.partition(".")[2] or 0) for e in self.computed()), default=0)

    def in_flight(self, rank: int) -> tuple[list[float], list[float]]:
        """Return times of change (s), and the micro-batches in flight from each of them on.

        With v model chunks, a micro-batch in one of them counts 1/v.
        """
        part = 1 / self.num_model_chunks
        changes = [(0.0, 0.0)]
        for event in self.computed(rank):
            if event.kind == "forward":
                changes.append((event.start_s, part))
            elif event.kind != "backward_input":
                changes.append((event.end_s, -part))
        changes.sort()
        count, counts = 0.0, []
        for _, change in changes:
            count += change
            counts.append(count)
        return [time_s for time_s, _ in changes] + [self.step_s], [*counts, count]

    def peak_in_flight(self, rank: int) -> float:
        """Return the largest number of micro-batches in flight on a rank."""
        return max(self.in_flight(rank)[1])


def pipelines(
    runs: Mapping[str, Iterable[Event]],
    title: str,
    *,
    link: Link | TwoLevelLink | str | None = None,
    unit: str = "",
) -> Figure:
    """Draw pipeline steps below one another: for each a timeline and the micro-batches in flight.

    `runs` maps names to events: {"GPipe": ..., "1F1B": ...}. The idle fraction is printed above
    each timeline, each rank's peak beside its memory. `link` and `unit` are those of `timelines`.
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
        _draw_in_flight(beneath, run, ranks, (span_s * scale, scale), most or 1)
    for axes in panels[:-1]:
        axes.tick_params(axis="x", labelbottom=False)
    panels[-1].set_xlabel(f"time ({word})", fontsize=TEXT_PT)
    return figure


def _legend(events: Sequence[Event]) -> list[Artist]:
    """Return the legend; forward and the activations it saves share a color, so one entry."""
    entries = event_legend(events)
    if entries and entries[0].get_label() == "forward":
        chunked = any("." in event.label for event in events)
        more = "F3.1: micro-batch 3, chunk 1" if chunked else "beneath: activations held"
        entries[0].set_label(f"forward ({more})")
    return entries


def _draw_in_flight(
    axes: Axes, run: DrawnRun, ranks: Sequence[int], time: tuple[float, float], most: float
) -> None:
    """Draw one row per rank, as high as its number in flight; all rows have the same scale."""
    span, scale = time
    plain(axes)
    axes.set_xlim(0, span * 1.005)
    axes.set_ylim(len(ranks) - 0.5, -0.5)
    axes.set_yticks(range(len(ranks)), [str(rank) for rank in ranks])
    axes.tick_params(axis="y", length=0)
    axes.set_title("micro-batches in flight (right: maximum)", loc="left", fontsize=TEXT_PT, pad=5)
    for row, rank in enumerate(ranks):
        times_s, counts = run.in_flight(rank)
        floor = row + 0.44
        tops = [floor - 0.84 * count / most for count in counts]
        at = [time_s * scale for time_s in times_s]
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


def one_batch(played: SimulatedStep) -> tuple[Figure, str]:
    """Draw the step of a batch that is not divided: only one rank computes at a time."""
    events, idle = played.events(), f"{played.bubble_fraction:.0%}"
    title = f"One batch at a time: {len(played.schedule)} ranks are idle for {idle} of their time"
    took_s = {event.kind: event.duration_s for event in events}
    backward = f"a backward takes {took_s['backward'] / took_s['forward']:g} F"
    return timeline(events, title, unit="F"), f"{title}; {backward}"


def gpipe_bubble(
    num_stages: int,
    numbers: Sequence[int],
    measured: Sequence[Sequence[float]] | None = None,
    *,
    log: bool = False,
) -> tuple[Figure, str]:
    """Draw GPipe's bubble, in % of the computing time, against the number of micro-batches.

    measured   the repetitions for each number, with emulated layers
    """
    voices = Voices(
        formula=lambda m: 100 * bubble_overhead(num_stages, m),
        simulation=[
            100 * simulate(schedules.gpipe(num_stages, m)).bubble_overhead for m in numbers
        ],
        measurement=measured,
    )
    half = "about half" if measured else "half"
    title = f"{num_stages} stages: twice as many micro-batches, {half} the bubble"
    figure = compare_on_ranks(
        "gpipe_bubble",
        numbers,
        voices,
        title,
        x_label="micro-batches",
        y_label="bubble (% of the computing time)",
        log=log,
        note="emulated layers" if measured else "",
    )
    paper = f"{100 * bubble_overhead(num_stages, numbers[-1]):.1f} % by formula"
    found = f", measured {median(measured[-1]):.1f} %" if measured else ""
    return figure, f"{title}; with {numbers[-1]} micro-batches {paper}{found}"


def fewer_in_flight(runs: Mapping[str, Iterable[Event]]) -> tuple[Figure, str]:
    """Draw measured steps of GPipe and 1F1B, and the micro-batches that they have in flight."""
    computed = {
        name: [event for event in events if event.kind in COMPUTE_KINDS]
        for name, events in runs.items()
    }
    title = "1F1B: the same bubble, fewer activations"
    shown = {f"{name}, measured": events for name, events in computed.items()}
    held = [f"{DrawnRun(made).peak_in_flight(0):g} with {name}" for name, made in computed.items()]
    figure = pipelines(shown, title, link=measured_over("emulated layers"))
    return figure, f"{title}: micro-batches in flight on rank 0: at most {', '.join(held)}"


def steps_on_link(
    num_stages: int,
    numbers: Sequence[int],
    batch: BatchCost,
    link: Link,
    measured: Mapping[tuple[str, int], Sequence[float]] | None = None,
) -> tuple[Figure, str]:
    """Draw the step of 1F1B and of GPipe over a link, against the number of micro-batches.

    measured   seconds of the repetitions by name and number, with emulated layers
    """
    curves, middle_ms = {}, {}
    for name, make in {"1F1B": schedules.one_f_one_b, "GPipe": schedules.gpipe}.items():
        steps = [step_parts(num_stages, m, batch, link, make).step_s * 1e3 for m in numbers]
        found = [[1e3 * s for s in measured[name, m]] for m in numbers] if measured else None
        curves[name] = Voices(simulation=steps, measurement=found)
        middle_ms[name] = [median(times) for times in found] if found else steps
    first, *_, last = (f"{ms:.0f} ms with m = " for ms in middle_ms["1F1B"])
    title = f"1F1B on a slow link: {first}{numbers[0]}, {last}{numbers[-1]}"
    compute_ms = 1e3 * (batch.forward_s + batch.backward_s)
    layers = "emulated layers, " if measured else ""
    figure = compare_on_ranks(
        "steps_on_link",
        numbers,
        curves,
        title,
        x_label="micro-batches",
        y_label="step (ms)",
        note=f"{link}; {layers}{compute_ms:.0f} ms of computing per stage",
    )
    first_ms, *_, last_ms = middle_ms["GPipe"]
    return figure, f"{title}; GPipe: {first_ms:.0f} and {last_ms:.0f} ms"


def smaller_bubbles(played: Mapping[str, SimulatedStep]) -> tuple[Figure, str]:
    """Draw simulated steps of schedules with chunks and with deferred weight gradients."""
    title = "Chunks shorten the bubble, weight gradients fill part of it"
    figure = pipelines({name: one.events() for name, one in played.items()}, title, unit="F")
    idle = ", ".join(f"{name} {one.bubble_fraction:.0%}" for name, one in played.items())
    return figure, f"{title}; idle: {idle} of the time"


def throughput_picture(one: Throughput, title: str) -> Figure:
    """Draw what other schedules gain over 1F1B: published, and simulated for ZB-H1."""
    x, plain = one.num_micro_batches, one.published["1F1B"]

    def gain(values: Sequence[float], base: Sequence[float]) -> list[float]:
        return [100 * (value / less - 1) for value, less in zip(values, base, strict=True)]

    curves = {
        "interleaved": Voices(published=(x, gain(one.published["1F1B-I"], plain))),
        "ZB-H1 (published: ZB-1p)": Voices(
            simulation=gain(one.simulated["ZB-H1"], one.simulated["1F1B"]),
            published=(x, gain(one.published["ZB-1p"], plain)),
        ),
    }
    return compare(
        x,
        curves,
        title,
        x_label="micro-batches",
        y_label="samples/s above those of 1F1B (%)",
        log_x=True,
        source=ZERO_BUBBLE_RUN,
    )


def h100_picture(one: H100Stages, title: str) -> Figure:
    """Draw published tokens/s per GPU over the number of stages, beside two formulas."""
    curves = {
        "bubble alone": Voices(formula=one.bubble_only),
        "bubble and slowest stage": Voices(
            formula=one.formula, published=(one.stages, one.published)
        ),
    }
    return compare(
        one.stages,
        curves,
        title,
        x_label="stages p (dp = 8 / p)",
        y_label="tokens/s per GPU",
        log_x=True,
        source=H100_RUN,
    )
