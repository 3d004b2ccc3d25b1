"""Sizes and order of the axes: which links they cross, what that costs. Notebook 11_mesh."""

from itertools import permutations

from course_lib.core.live import Bars, Drawing, Live, Squares
from course_lib.core.presets import MODELS
from course_lib.core.units import format_seconds
from course_lib.cost.hardware import H100, nodes_of
from course_lib.mesh.cost import MeshStep, axis_seconds, axis_sent_bytes
from course_lib.mesh.mesh import Mesh

NUM_RANKS, RANKS_PER_NODE, SEQUENCES, SEQ = 64, 8, 256, 4096
ORDERS = [" ".join(order) for order in permutations(("pp", "dp", "tp"))]
CLUSTER = nodes_of(H100, RANKS_PER_NODE)


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


def mesh_drawing(model: str, tp: int, pp: int, outer_to_inner: str) -> Drawing:
    """Return the groups of rank 0 and the seconds of each axis; the finding is their sum."""
    step = step_of(model, tp, pp, outer_to_inner)
    seconds, sent = axis_seconds(step, CLUSTER), axis_sent_bytes(step)
    most = max(seconds, key=seconds.__getitem__)
    total_s = sum(seconds.values())
    sizes = ", ".join(f"{axis} {size}" for axis, size in step.mesh.sizes.items())
    rows = {
        f"{axis}, {sent[axis] / 1e9:.3g} GB": {"communication": s} for axis, s in seconds.items()
    }
    return Drawing(
        finding=f"{model}, {sizes}: {format_seconds(total_s)} of communication, "
        f"{seconds[most] / total_s:.0%} of it along {most}",
        panels=[
            Squares(
                rows=_groups(step.mesh), x_label="ranks, a node in a row; named: those with rank 0"
            ),
            Bars(rows=rows, x_label="exposed communication of rank 0 per step (s)"),
        ],
        note="H100 nodes of 8, nothing overlapped",
    )


def _groups(mesh: Mesh) -> dict[str, list[tuple[str, int]]]:
    """Return each node's ranks; those that share a group with rank 0 have the name of its axis."""
    named = {
        rank: (axis, number)
        for number, axis in enumerate(("tp", "pp", "dp"))
        for rank in mesh.group(0, axis)
    }
    named[0] = ("0", 3)
    cells = [named.get(rank, (str(rank), -1)) for rank in range(NUM_RANKS)]
    starts = range(0, NUM_RANKS, RANKS_PER_NODE)
    return {
        f"node {number}": cells[first : first + RANKS_PER_NODE]
        for number, first in enumerate(starts)
    }


AXES = Live(
    name="mesh_explorer",
    lesson="11_mesh",
    question="Which axis should be innermost, and how many ranks should it have?",
    choices={
        "model": (["llama2-7b", "megatron-22b"], "llama2-7b"),
        "tp": ([1, 2, 4, 8, 16], 8),
        "pp": ([1, 2, 4], 2),
        "outer_to_inner": (ORDERS, "pp dp tp"),
    },
    compute=mesh_drawing,
)
