"""Pictures of DDP: ready order, a step on the clock, the sweep of bucket sizes, compression.

Every function takes what the notebook has measured and draws it beside the prediction. Most return
a figure and its alt text. Notebook 06_ddp.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib.figure import Figure
from torch import Tensor

from course_lib.core.links import Link
from course_lib.core.records import Event
from course_lib.ddp.cost import (
    StepCost,
    best_bucket_bytes,
    ddp_step,
    equal_buckets_s,
    on_the_wire,
    step_s,
)
from course_lib.display.compare import Voices, compare
from course_lib.display.on_ranks import compare_on_ranks, measured_over
from course_lib.display.timeline import timelines
from course_lib.ranks.timing import Measured


def ready_order(registered: Sequence[str], ready: Sequence[str]) -> tuple[Figure, str]:
    """Draw when each gradient is complete, over its place in `parameters()`."""
    last, moved = len(registered) - 1, num_out_of_line(registered, ready)
    voices = Voices(
        formula=lambda place: last - place, measurement=[ready.index(name) for name in registered]
    )
    title = f"The hooks run in reverse order of parameters(), except for {moved} of {len(ready)}"
    figure = compare(
        range(len(registered)),
        voices,
        title,
        x_label="place in parameters()",
        y_label="place in the ready order",
        names={"formula": "reverse parameters()", "measurement": "order of the hooks"},
    )
    return figure, f"{title}; the others lie on a falling line"


def num_out_of_line(registered: Sequence[str], ready: Sequence[str]) -> int:
    """Return how many gradients are not complete in the reverse order of `parameters()`."""
    return sum(one != other for one, other in zip(registered[::-1], ready, strict=True))


def overlap_on_the_clock(
    cost: StepCost, bucket_bytes: float, link: Link, late: Measured, early: Measured
) -> tuple[Figure, str]:
    """Draw a step without overlap, and one with overlap: predicted and measured."""
    rows = {
        "measured, all sent after backward": on_the_wire(late.events),
        "predicted, with overlap": ddp_step(cost, bucket_bytes, 2, link),
        "measured, with overlap": on_the_wire(early.events),
    }
    late_ms, early_ms = 1e3 * late.step_s, 1e3 * early.step_s
    title = f"Overlap: a step takes {early_ms:.0f} ms instead of {late_ms:.0f} ms"
    predicted_ms = 1e3 * step_s(cost, bucket_bytes, 2, link)
    alt = f"{title}, predicted {predicted_ms:.0f} ms; the first bucket is sent early in backward"
    return timelines(rows, title, link=measured_over(link)), alt


def one_bucket_size(
    cost: StepCost, bucket_bytes: float, link: Link, events: Sequence[Event], title: str
) -> Figure:
    """Draw the step with buckets of one size: predicted and measured."""
    rows = {
        "predicted": ddp_step(cost, bucket_bytes, 2, link),
        "measured": on_the_wire(events),
    }
    return timelines(rows, title, link=measured_over(link))


def sweep(
    cost: StepCost,
    links: Mapping[str, Link],
    numbers: Sequence[int],
    swept: Mapping[str, Mapping[int, Measured]] | None = None,
) -> tuple[Figure, str]:
    """Draw the time of a step over the number of buckets, a curve for each link.

    swept   the measured steps by link and bucket size, if there are any
    """
    total = sum(cost.grad_bytes)
    curves, best = {}, {}
    for name, link in links.items():
        best[name] = total // best_bucket_bytes(cost, 2, link, [total // k for k in numbers])
        runs = [swept[name][total // k].seconds for k in numbers] if swept else None
        curves[name] = Voices(
            formula=lambda k, link=link: 1e3 * equal_buckets_s(cost, k, 2, link),  # type: ignore[misc]
            simulation=[1e3 * step_s(cost, total // k, 2, link) for k in numbers],
            measurement=runs and [[1e3 * s for s in seconds] for seconds in runs],
        )
    title = "Predicted best number of buckets: "
    title += ", ".join(f"{k} at {name}" for name, k in best.items())
    layers = f"{len(cost.grad_bytes)} {'emulated layers' if swept else 'layers'}"
    note = f"2 ranks, {layers}, links of {_latency(links)} latency"
    labels: dict[str, Any] = {"x_label": "buckets k", "y_label": "step (ms)"}
    figure = compare_on_ranks("sweep", numbers, curves, title, note=note, log_x=True, **labels)
    figure.axes[0].set_ylim(bottom=0.95e3 * cost.compute_s)  # a sweep shows its minimum
    name, link = next(iter(links.items()))
    few, least, many = (
        1e3 * step_s(cost, total // k, 2, link) for k in (min(numbers), best[name], max(numbers))
    )
    ends = f"{few:.0f} ms with {min(numbers)}, {many:.0f} ms with {max(numbers)}"
    return figure, f"{title}; the predicted step at {name}: {least:.0f} ms, {ends}"


def errors_of(means: Mapping[str, Sequence[Tensor]], right: Tensor) -> dict[str, list[float]]:
    """Return, for each hook, how much of the gradient its means lack, in % of its norm."""
    return {
        name: [100 * ((mean - right).norm() / right.norm()).item() for mean in found]
        for name, found in means.items()
    }


def delivered(
    steps: Sequence[int], means: Mapping[str, Sequence[Tensor]], share: Mapping[str, float]
) -> tuple[Figure, str]:
    """Draw what the mean of all delivered gradients still lacks, over the steps.

    means   by hook, the mean after each of `steps`: first without a hook, which is exact, and last
            the hook that the title is about
    share   bytes that each hook sends, in % of those without a hook
    """
    exact, *hooks = means
    errors = errors_of({name: means[name] for name in hooks}, means[exact][0])
    curves = {name: Voices(measurement=values) for name, values in errors.items()}
    first, end = errors[hooks[-1]][0], errors[hooks[-1]][-1]
    title = (
        f"{hooks[-1]}, constant gradient: {first:.0f} % missing after step {steps[0]}, "
        f"{end:.0f} % after step {steps[-1]}"
    )
    note = "bytes sent: " + ", ".join(f"{name} {share[name]:.1f} %" for name in hooks)
    y_label = "missing (% of the gradient)"
    figure = compare(steps, curves, title, x_label="steps", y_label=y_label, log=True, note=note)
    return figure, f"{title}; " + ", ".join(f"{n} {errors[n][-1]:.1f} %" for n in hooks[:-1])


def _latency(links: Mapping[str, Link]) -> str:
    return " or ".join(sorted({f"{1e3 * link.latency_s:g} ms" for link in links.values()}))
