"""The timeline of an FSDP step with larger or smaller units. Notebook 10_fsdp."""

from dataclasses import replace

from course_lib.core.live import Drawing, Live, lanes_of
from course_lib.core.records import Event
from course_lib.core.units import format_seconds
from course_lib.cost.hardware import H100, links_of_rings
from course_lib.fsdp.cost import UnitTimes, fsdp_step, peak_param_bytes
from course_lib.fsdp.moves import UnitSizes

# a rank computes 6 FLOP per parameter and token, for 2048 tokens and 8.03 billion parameters, at
# 400 TFLOP/s: a third of it in forward
NUM_PARAMS, P, FORWARD_S = 8_030_000_000, 8, 0.082
LINKS = links_of_rings(H100)


def units_step(
    units: int, link: str, prefetch: bool, free_after_forward: bool
) -> tuple[list[Event], int]:
    """Return the events of rank 0, and the peak bytes of its parameters."""
    sizes = UnitSizes(numels=(0, *[NUM_PARAMS // units] * units), p=P, compute_bytes=2)
    forward_s = (FORWARD_S / units,) * units
    times = UnitTimes(forward_s=forward_s, backward_s=tuple(2 * one for one in forward_s))
    options = {"prefetch": prefetch, "reshard_after_forward": free_after_forward}
    events = fsdp_step(times, sizes, P, LINKS[link], **options)
    mine = [_short(event) for event in events if event.rank == 0]
    return mine, peak_param_bytes(sizes, **options)


def units_drawing(units: int, link: str, prefetch: bool, free_after_forward: bool) -> Drawing:
    """Return the lanes of rank 0; the finding has seconds of the step, peak bytes of parameters."""
    events, peak_bytes = units_step(units, link, prefetch, free_after_forward)
    step_s = max(event.end_s for event in events)
    how = f"{units} unit{'s' * (units > 1)}, 8 billion parameters: {format_seconds(step_s)}"
    return Drawing(
        finding=f"{how} per step, at most {peak_bytes / 1e9:.1f} GB of parameters",
        panels=[lanes_of(events, "time (s)")],
        note=f"predicted: {LINKS[link]}, {P} ranks",
    )


def _short(event: Event) -> Event:
    """Shorten `gather 3` to `3`, which fits into a narrow box."""
    return replace(event, label=event.label.rpartition(" ")[2])


UNITS = Live(
    name="fsdp_explorer",
    lesson="10_fsdp",
    question="Which units are small enough for the memory, and large enough for the link?",
    choices={
        "units": ([1, 2, 4, 8, 16, 32], 8),
        "link": ([*LINKS], "NVLink"),
        "prefetch": True,
        "free_after_forward": True,
    },
    compute=units_drawing,
)
