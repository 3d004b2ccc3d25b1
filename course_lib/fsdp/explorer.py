"""The explorer of notebook 10_fsdp: the timeline of a step with larger or smaller units."""

from dataclasses import replace

from matplotlib.figure import Figure

from course_lib.core.records import Event
from course_lib.core.units import format_seconds
from course_lib.cost.hardware import H100, links_of_rings
from course_lib.display.explore import Explore, explore
from course_lib.display.timeline import timelines
from course_lib.fsdp.cost import UnitTimes, fsdp_step, peak_param_bytes
from course_lib.fsdp.moves import UnitSizes

# a rank computes 6 FLOP per parameter and token, for 2048 tokens and 8.03 billion parameters, at
# 400 TFLOP/s: a third of it in forward
NUM_PARAMS, P, FORWARD_S = 8_030_000_000, 8, 0.082
_LINKS = links_of_rings(H100)


def fsdp_explorer() -> Explore:
    """Return a rank's predicted step, with sliders for units, link, prefetch and resharding."""
    return explore(
        draw_step,
        step_alt,
        units=([1, 2, 4, 8, 16, 32], 8),
        link=([*_LINKS], "NVLink"),
        prefetch=True,
        free_after_forward=True,
    )


def draw_step(units: int, link: str, prefetch: bool, free_after_forward: bool) -> Figure:
    """Draw the timeline of rank 0."""
    events, _ = _step(units, link, prefetch, free_after_forward)
    title = step_alt(units, link, prefetch, free_after_forward)
    return timelines({"": events}, title, link=f"predicted: {_LINKS[link]}, {P} ranks")


def step_alt(units: int, link: str, prefetch: bool, free_after_forward: bool) -> str:
    """Return the finding as a sentence: seconds of the step, peak bytes of parameters."""
    events, peak_bytes = _step(units, link, prefetch, free_after_forward)
    step_s = max(event.end_s for event in events)
    how = f"{units} unit{'s' * (units > 1)}, 8 billion parameters"
    return (
        f"{how}: {format_seconds(step_s)} per step, at most {peak_bytes / 1e9:.1f} GB of parameters"
    )


def _step(
    units: int, link: str, prefetch: bool, free_after_forward: bool
) -> tuple[list[Event], int]:
    sizes = UnitSizes(numels=(0, *[NUM_PARAMS // units] * units), p=P, compute_bytes=2)
    forward_s = (FORWARD_S / units,) * units
    times = UnitTimes(forward_s=forward_s, backward_s=tuple(2 * one for one in forward_s))
    options = {"prefetch": prefetch, "reshard_after_forward": free_after_forward}
    events = fsdp_step(times, sizes, P, _LINKS[link], **options)
    mine = [_short(event) for event in events if event.rank == 0]
    return mine, peak_param_bytes(sizes, **options)


def _short(event: Event) -> Event:
    """Shorten `gather 3` to `3`, which fits into a narrow box."""
    return replace(event, label=event.label.rpartition(" ")[2])
