"""Interactive picture: sizes and order of the axes; which links they cross, what that costs.

Everything is a formula (`live.py`), so a slider responds at once. Notebook 11_mesh.
"""

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_lib.core.units import format_seconds
from course_lib.display.colours import SERIES
from course_lib.display.explore import Explore, explore
from course_lib.display.page import SMALL_PT, Margins, page, plain
from course_lib.mesh.cost import MeshStep, axis_seconds, axis_sent_bytes
from course_lib.mesh.live import AXES, CLUSTER, RANKS_PER_NODE, step_of
from course_lib.mesh.pictures import draw_grid, grid_height_in, grid_note


def mesh_explorer() -> Explore:
    """Return a picture with sliders for the model, the degrees and the order; dp is the rest."""
    return explore(draw_mesh, AXES.finding, **AXES.choices)


def draw_mesh(model: str, tp: int, pp: int, outer_to_inner: str) -> Figure:
    """Draw the groups of rank 0 in the cluster, and the seconds of each axis."""
    step = step_of(model, tp, pp, outer_to_inner)
    mesh = step.mesh
    title = AXES.compute(model, tp, pp, outer_to_inner).finding
    heights = [grid_height_in(mesh, RANKS_PER_NODE), 1.0]
    note = f"{grid_note(mesh)}; seconds: of rank 0, H100 nodes of 8, nothing overlapped"
    margins = Margins(left=0.6, right=2.2, top=0)
    figure, (grid, bars) = page(title, heights, note=note, margins=margins)
    draw_grid(grid, mesh, RANKS_PER_NODE)
    _bars(bars, step)
    return figure


def _bars(axes: Axes, step: MeshStep) -> None:
    seconds, sent = axis_seconds(step, CLUSTER), axis_sent_bytes(step)
    names = list(seconds)
    axes.barh(names, list(seconds.values()), 0.6, color=SERIES[0])
    for row, axis in enumerate(names):
        words = f"{format_seconds(seconds[axis])}, {sent[axis] / 1e9:.3g} GB sent"
        at = (seconds[axis], row)
        axes.annotate(
            words, at, xytext=(4, 0), textcoords="offset points", va="center", fontsize=SMALL_PT
        )
    axes.invert_yaxis()
    plain(axes, x_label="exposed communication per step (s)")
