"""The types of a GPT's parameters and gradients on a mesh, from one backward pass of real ranks.

No gradient is summed over any axis, so the record shows what each rank has by itself: how an axis
uses a parameter. Notebooks 07_tensor_parallel and 11_mesh.
"""

import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import torch

from course_lib.core.specs import ModelSpec
from course_lib.debugging.gradient_types import (
    INVARIANT,
    MEAN,
    PARTIAL,
    VARYING,
    GradientType,
    gradient_types,
)
from course_lib.debugging.recording import record_run
from course_lib.mesh.mesh import Mesh
from course_lib.mesh.model_part import apply_methods
from course_lib.mesh.rank_mesh import RankMesh
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.pipeline.engine import Pipeline
from course_lib.pipeline.schedules import one_f_one_b
from course_lib.ranks import Ranks
from course_lib.tensor_parallel.cross_entropy import parallel_token_loss

CELLS = {
    INVARIANT: "Invariant",
    VARYING: "Varying",
    PARTIAL: "Replicate: Partial, sum",
    MEAN: "Replicate: Partial, average",
}
ON_ONE = "-"  # only one rank along the axis has it


def types_on_mesh(
    ranks: Ranks, spec: ModelSpec, mesh: Mesh, *, sequence_parallel: bool = False
) -> list[GradientType]:
    """Return the type of each parameter of a GPT over the axes pp, dp and tp of a mesh."""
    with tempfile.TemporaryDirectory() as folder:
        on_mesh, one = Path(folder) / "mesh", Path(folder) / "one"
        ranks.run(_record_unsummed, spec, mesh, sequence_parallel, on_mesh)
        model, (inputs, targets) = _seeded(spec), _batch(spec)
        with record_run(model, one) as recording:
            token_loss(model(inputs), targets).backward()
            recording.gradients()
        return gradient_types(on_mesh, one, local=True)


def type_lines(
    names: Sequence[str], axes: Sequence[str], found: Mapping[str, Sequence[GradientType]]
) -> list[str]:
    """Return a table: a line for each parameter, a column for each mesh and axis."""
    rows = [["", *(f"{title} {axis}".strip() for title in found for axis in axes)]]
    for name in names:
        of = [next(one for one in types if one.name == name) for types in found.values()]
        told = [one.over.get(axis, ON_ONE) for one in of for axis in axes]
        rows.append([name, *(CELLS.get(one, one) for one in told)])
    widths = [max(map(len, column)) + 2 for column in zip(*rows, strict=True)]
    return ["".join(map(str.ljust, row, widths)).rstrip() for row in rows]


def _seeded(spec: ModelSpec) -> GPT:
    torch.manual_seed(0)
    return GPT(spec).double()


def _batch(spec: ModelSpec) -> tuple[torch.Tensor, torch.Tensor]:
    inputs, targets = next_tokens(token_batch(0, batch=4, seq=16, vocab=spec.vocab))
    return inputs, targets


def _record_unsummed(
    rank: int, spec: ModelSpec, mesh: Mesh, sequence_parallel: bool, folder: Path
) -> None:
    here = RankMesh(mesh)
    part = apply_methods(
        _seeded(spec), here, lambda module, _: module, sequence_parallel=sequence_parallel
    )
    loss_fn = partial(parallel_token_loss, group=here.group("tp"))
    pipeline = Pipeline(part.module, loss_fn, here.group("pp"), sums_tied=False)
    mine = (one.chunk(mesh.size("dp"))[here.index("dp")] for one in _batch(spec))
    inputs, targets = ([*one.chunk(2)] for one in mine)
    schedule = one_f_one_b(mesh.size("pp"), 2)
    axes = {axis: (here.index(axis), size) for axis, size in mesh.sizes.items()}
    with record_run(part.module, folder, model=part, axes=axes) as recording:
        pipeline.step(schedule, inputs, targets)
        recording.gradients(local=True)
