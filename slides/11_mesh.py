"""The pictures of the deck 11_mesh, drawn by the functions that the notebook calls."""

from dataclasses import replace

from course_lib.core import MODELS
from course_lib.display.paired_bars import Pair, paired_bars
from course_lib.mesh import Mesh
from course_lib.mesh.cost import MeshStep, all_orders, axis_seconds, axis_sent_bytes
from course_lib.mesh.live import CLUSTER
from course_lib.mesh.pictures import axis_dots, best_by_tensor_degree, groups_across_nodes

STEP = MeshStep(
    spec=MODELS["llama-70b"],
    mesh=Mesh(pp=2, dp=4, tp=8),
    batch=256,
    seq=4096,
    num_micro_batches=64,
    number_bytes=2,
)


def groups():
    """The groups of eight ranks."""
    return groups_across_nodes(Mesh(pp=2, dp=2, tp=2), 4)[0]


def misplaced():
    """The same with tp outermost."""
    return groups_across_nodes(Mesh(tp=2, pp=2, dp=2), 4)[0]


def traffic():
    """Bytes by axis of a 70B model."""
    return axis_dots(axis_sent_bytes(STEP), who="70B on 64 GPUs: a rank")[0]


def orders():
    """Seconds of all orders."""
    steps = [replace(STEP, mesh=mesh) for mesh in all_orders(STEP.mesh)]
    seconds = {step.mesh: sum(axis_seconds(step, CLUSTER).values()) for step in steps}
    ranked = sorted(seconds, key=seconds.__getitem__)
    pairs = [Pair(name=" ".join(mesh.sizes), predicted=seconds[mesh]) for mesh in ranked]
    worst, best = seconds[ranked[-1]], seconds[ranked[0]]
    title = f"70B on 8 nodes: the slowest order communicates {worst / best:.1f} times as long "
    title += "as the fastest"
    return paired_bars(
        pairs, title, x_label="communication of rank 0 per step, none overlapped (s)"
    )


def published():
    """Runs on H100."""
    return best_by_tensor_degree()[0]


def pictures():
    """All pictures by the names the deck calls them."""
    return {draw.__name__: draw() for draw in (groups, misplaced, traffic, orders, published)}
