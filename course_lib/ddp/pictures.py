"""Pictures of DDP: ready order, a step on the clock, the sweep of bucket sizes, compression.

Every function takes what the notebook has measured and draws it beside the prediction.
Notebook 06_ddp.
"""

from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from torch import Tensor

from course_lib.core.links import Link
from course_lib.core.records import Event
from course_lib.ddp.cost import StepCost, ddp_step, equal_buckets_s, on_the_wire, step_s
from course_lib.display.compare import Voices, compare
from course_lib.display.timeline import timelines
from course_lib.ranks.timing import Measured


def ready_order(registered: Sequence[str], ready: Sequence[str], title: str) -> Figure:
    """Draw when each gradient is complete, over its place in `parameters()`."""
    last = len(registered) - 1
    voices = Voices(
        formula=lambda place: last - place, measurement=[ready.index(name) for name in registered]
    )
    return compare(
        range(len(registered)),
        voices,
        title,
        x_label="place in parameters()",
        y_label="place in the ready order",
        names={"formula": "reverse parameters()", "measurement": "order of the hooks"},
    )


def num_out_of_line(registered: Sequence[str], ready: Sequence[str]) -> int:
    """Return how many gradients are not complete in the reverse order of `parameters()`."""
    return sum(one != other for one, other in zip(registered[::-1], ready, strict=True))


def overlap_on_the_clock(
    cost: StepCost, bucket_bytes: float, link: Link, late: Measured, early: Measured, title: str
) -> Figure:
    """Draw a step without overlap, and one with overlap: predicted and measured."""
    rows = {
        "measured, all sent after backward": on_the_wire(late.events),
        "predicted, with overlap": ddp_step(cost, bucket_bytes, 2, link),
        "measured, with overlap": on_the_wire(early.events),
    }
    return timelines(rows, title, link=link)


def one_bucket_size(
    cost: StepCost, bucket_bytes: float, link: Link, events: Sequence[Event], title: str
) -> Figure:
    """Draw the step with buckets of one size: predicted and measured."""
    rows = {
        "predicted": ddp_step(cost, bucket_bytes, 2, link),
        "measured": on_the_wire(events),
    }
    return timelines(rows, title, link=link)


def sweep(
    cost: StepCost,
    links: Mapping[str, Link],
    swept: Mapping[str, Mapping[int, Measured]],
    title: str,
) -> Figure:
    """Draw the time of a step over the number of buckets, a curve for each link."""
    total = sum(cost.grad_bytes)
    numbers = sorted(total // size for size in next(iter(swept.values())))
    curves = {}
    for name, link in links.items():
        curves[name] = Voices(
            formula=lambda k, link=link: 1e3 * equal_buckets_s(cost, k, 2, link),  # type: ignore[misc]
            simulation=[1e3 * step_s(cost, total // k, 2, link) for k in numbers],
            measurement=[[1e3 * s for s in swept[name][total // k].seconds] for k in numbers],
        )
    note = f"2 ranks, {len(cost.grad_bytes)} emulated layers, links of {_latency(links)} latency"
    labels = {"x_label": "buckets k", "y_label": "step (ms)"}
    figure = compare(numbers, curves, title, note=note, log_x=True, **labels)  # type: ignore[arg-type]
    figure.axes[0].set_ylim(bottom=0.95e3 * cost.compute_s)  # a sweep shows its minimum
    return figure


def errors_of(means: Mapping[str, Sequence[Tensor]], right: Tensor) -> dict[str, list[float]]:
    """Return, for each hook, how much of the gradient its means lack, in % of its norm."""
    return {
        name: [100 * ((mean - right).norm() / right.norm()).item() for mean in found]
        for name, found in means.items()
    }


def delivered(
    steps: Sequence[int],
    errors: Mapping[str, Sequence[float]],
    share: Mapping[str, float],
    title: str,
) -> Figure:
    """Draw what the mean of all delivered gradients still lacks, over the steps."""
    curves = {name: Voices(measurement=values) for name, values in errors.items()}
    note = "bytes sent: " + ", ".join(f"{name} {part:.1f} %" for name, part in share.items())
    y_label = "missing (% of the gradient)"
    return compare(steps, curves, title, x_label="steps", y_label=y_label, log=True, note=note)


def _latency(links: Mapping[str, Link]) -> str:
    return " or ".join(sorted({f"{1e3 * link.latency_s:g} ms" for link in links.values()}))
