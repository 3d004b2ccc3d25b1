"""Interactive picture: sizes and order of the axes; which links they cross, what that costs.

Everything is a formula, so a slider responds at once. Notebook 11_mesh.
"""

from itertools import permutations

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from course_lib.core.presets import MODELS
from course_lib.core.units import format_seconds
from course_lib.cost.hardware import H100, nodes_of
from course_lib.display.colours import SERIES
from course_lib.display.explore import Explore, explore
from course_lib.display.page import SMALL_PT, Margins, page, plain
from course_lib.mesh.cost import MeshStep, axis_seconds, axis_sent_bytes
from course_lib.mesh.mesh import Mesh
from course_lib.mesh.pictures import draw_grid, grid_height_in, grid_note

NUM_RANKS, RANKS_PER_NODE, SEQUENCES, SEQ = 64, 8, 256, 4096
ORDERS = [" ".join(order) for order in permutations(("pp", "dp", "tp"))]
CLUSTER = nodes_of(H100, RANKS_PER_NODE)


def mesh_explorer() -> Explore:
    """Return a picture with sliders for the model, the degrees and the order; dp is the rest."""
    return explore(
        draw_mesh,
        mesh_alt,
        model=(["llama2-7b", "megatron-22b"], "llama2-7b"),
        tp=([1, 2, 4, 8, 16], 8),
        pp=([1, 2, 4], 2),
        outer_to_inner=(ORDERS, "pp dp tp"),
    )


def step_of(model: str, tp: int, pp: int, outer_to_inner: str) -> MeshStep:
    """Return the step of 256 sequences on 64 ranks, in bf16, one sequence per micro-batch."""
    sizes = {"tp": tp, "pp": pp, "dp": NUM_RANKS // (tp * pp)}
    mesh = Mesh(**{axis: sizes[axis] for axis in outer_to_inner.split()})
    return MeshStep(
        spec=MODELS[model],
        mesh=mesh,
        batch=SEQUENCES,
        seq=SEQ,
        num_micro_batches=SEQUENCES // sizes["dp"],
        number_bytes=2,
    )


def communication_s(tp: int, model: str = "llama2-7b") -> float:
    """Return the seconds of rank 0's communication in two stages, tp innermost."""
    return sum(axis_seconds(step_of(model, tp, 2, "pp dp tp"), CLUSTER).values())


def mesh_alt(model: str, tp: int, pp: int, outer_to_inner: str) -> str:
    """Return the finding as a sentence: rank 0's seconds, and the axis that takes most of them."""
    step = step_of(model, tp, pp, outer_to_inner)
    seconds = axis_seconds(step, CLUSTER)
    most = max(seconds, key=seconds.__getitem__)
    total_s = sum(seconds.values())
    sizes = ", ".join(f"{axis} {size}" for axis, size in step.mesh.sizes.items())
    return (
        f"{model}, {sizes}: {format_seconds(total_s)} of communication, "
        f"{seconds[most] / total_s:.0%} of it along {most}"
    )


def draw_mesh(model: str, tp: int, pp: int, outer_to_inner: str) -> Figure:
    """Draw the groups of rank 0 in the cluster, and the seconds of each axis."""
    step = step_of(model, tp, pp, outer_to_inner)
    mesh = step.mesh
    title = mesh_alt(model, tp, pp, outer_to_inner)
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
