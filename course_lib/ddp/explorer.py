"""Interactive picture: a DDP step with buckets of one size, predicted and measured.

Every step was measured before, so a slider responds at once. Notebook 06_ddp.
"""

from collections.abc import Mapping
from functools import partial

from matplotlib.figure import Figure

from course_lib.core.chrome_trace import trace_of_events
from course_lib.core.links import Link
from course_lib.core.trace_reading import exposed_s as exposed_in_trace_s
from course_lib.ddp.cost import StepCost, exposed_s
from course_lib.ddp.pictures import one_bucket_size
from course_lib.display.explore import Explore, explore
from course_lib.ranks.timing import Measured

Swept = Mapping[str, Mapping[int, Measured]]


def bucket_explorer(
    cost: StepCost, links: Mapping[str, Link], swept: Swept, num_buckets: int = 8
) -> Explore:
    """Return the step on a clock, with sliders for the number of buckets and the link.

    swept         measured steps by name of the link and bucket size
    num_buckets   where the slider starts, on the first link
    """
    total = sum(cost.grad_bytes)
    numbers = sorted(total // size for size in next(iter(swept.values())))
    return explore(
        partial(draw_step, cost, links, swept),
        partial(exposed_alt, cost, links, swept),
        num_buckets=(numbers, num_buckets),
        link=([*links], next(iter(links))),
    )


def draw_step(
    cost: StepCost, links: Mapping[str, Link], swept: Swept, num_buckets: int, link: str
) -> Figure:
    """Draw the step with this number of buckets on one of the links."""
    size = sum(cost.grad_bytes) // num_buckets
    title = exposed_alt(cost, links, swept, num_buckets, link)
    return one_bucket_size(cost, size, links[link], swept[link][size].events, title)


def exposed_alt(
    cost: StepCost, links: Mapping[str, Link], swept: Swept, num_buckets: int, link: str
) -> str:
    """Return the finding as a sentence: exposed communication, measured and by formula."""
    size = sum(cost.grad_bytes) // num_buckets
    paper_ms = 1e3 * exposed_s(cost, size, 2, links[link])
    ms = 1e3 * exposed_in_trace_s(trace_of_events({"": swept[link][size].events}), 0)
    return (
        f"k = {num_buckets} at {link}: communication on rank 0 is exposed for {ms:.0f} ms, "
        f"by formula {paper_ms:.0f} ms"
    )
