"""Interactive picture: the time of one layer of experts, over the ranks that share it.

Everything is a formula, so a slider responds at once. Notebook 16_experts.
"""

from matplotlib.figure import Figure

from course_lib.display.compare import Voices, compare
from course_lib.display.explore import Explore, explore
from course_lib.expert_parallel.live import EXPERTS, experts_curves


def expert_explorer() -> Explore:
    """Return a picture with sliders: model, load of the fullest rank, limit on nodes per token."""
    return explore(by_ep, EXPERTS.finding, **EXPERTS.choices)


def by_ep(model: str, fullest: float, sends_once: bool, most_nodes: str) -> Figure:
    """Draw both times over ep, for equal tokens on each rank."""
    values = {"model": model, "fullest": fullest, "sends_once": sends_once}
    drawing = EXPERTS.compute(**values, most_nodes=most_nodes)
    curves = experts_curves(model, fullest, sends_once, most_nodes)
    return compare(
        curves.x,
        {name: Voices(formula=ys) for name, ys in curves.ys.items()},
        drawing.finding,
        x_label=curves.x_label,
        y_label=curves.y_label,
        log_x=True,
        note=drawing.note,
    )
