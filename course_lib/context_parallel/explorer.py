"""Interactive picture: one layer's causal attention on a clock, by form, layout, ranks and length.

Everything is a formula (`live.py`), so a slider responds at once. Notebook 15_context_parallel.
"""

from matplotlib.figure import Figure

from course_lib.context_parallel.live import FORWARD, forward_events
from course_lib.display.explore import Explore, explore
from course_lib.display.timeline import timeline


def attention_explorer() -> Explore:
    """Return a picture with sliders for ranks, length, form, layout and link."""
    return explore(draw_forward, FORWARD.finding, **FORWARD.choices)


def draw_forward(p: int, seq: int, form: str, layout: str, link: str) -> Figure:
    """Draw the forward pass on all ranks."""
    values = {"p": p, "seq": seq, "form": form, "layout": layout, "link": link}
    events = forward_events(p, seq, form, layout, link)
    return timeline(events, FORWARD.finding(**values), link=link)
