"""The explorer of notebook 10_fsdp: the timeline of a step with larger or smaller units."""

from matplotlib.figure import Figure

from course_lib.display.explore import Explore, explore
from course_lib.display.timeline import timelines
from course_lib.fsdp.live import UNITS, units_step


def fsdp_explorer() -> Explore:
    """Return a rank's predicted step, with sliders for units, link, prefetch and resharding."""
    return explore(draw_step, UNITS.finding, **UNITS.choices)


def draw_step(units: int, link: str, prefetch: bool, free_after_forward: bool) -> Figure:
    """Draw the timeline of rank 0."""
    values = (units, link, prefetch, free_after_forward)
    events, drawing = units_step(*values)[0], UNITS.compute(*values)
    return timelines({"": events}, drawing.finding, link=drawing.note)
