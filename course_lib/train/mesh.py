"""The mesh of ranks of a training run, with the axes pp, dp, cp and tp. Notebook 11_mesh.

The tp axis is innermost, as it communicates most: ranks 0 and 1 share layers, then come those that
have other tokens of the same sequences, then the other copies of these layers, then the next stage.
"""

from collections.abc import Sequence

from torch import Tensor

from course_lib.context_parallel.layouts import shard
from course_lib.core.parallelism import Parallelism
from course_lib.mesh.mesh import Mesh
from course_lib.mesh.rank_mesh import RankMesh
from course_lib.pipeline.actions import loop_placement, v_placement
from course_lib.train.config import V_SCHEDULES, TrainConfig

ORDER = ("pp", "dp", "cp", "tp")


class TrainMesh(RankMesh):
    """This rank in the mesh of a run.

    An axis of one rank, other than dp, is left out: it needs no group.

    order        of the axes, outermost first
    loss_stage   index along pp of the rank with the last layers, which computes the loss
    layout       of the tokens of a sequence over the ranks of cp
    """

    def __init__(
        self,
        parallelism: Parallelism,
        loss_stage: int,
        layout: str,
        order: Sequence[str] = ORDER,
    ) -> None:
        sizes = {axis: getattr(parallelism, axis) for axis in order}
        super().__init__(Mesh(**{n: size for n, size in sizes.items() if size > 1 or n == "dp"}))
        self.loss_stage, self.layout = loss_stage, layout

    @property
    def reports(self) -> bool:
        """Whether this rank reports the loss of its tokens: of all that have them one does."""
        return self.index("pp") == self.loss_stage and self.index("tp") == 0

    def part_of(self, whole: Tensor) -> Tensor:
        """Return this rank's part of a batch: dp splits the sequences, cp the tokens of each.

        Shapes:  [batch, seq] -> [batch/dp, seq/cp]
        """
        sequences = whole.tensor_split(self.size("dp"))[self.index("dp")]
        return shard(sequences, self.index("cp"), self.size("cp"), self.layout)


def placement_of(config: TrainConfig) -> list[int]:
    """Return the stage of each model chunk, in the order of the layers."""
    if config.schedule in V_SCHEDULES:
        return list(v_placement(config.pp))
    return list(loop_placement(config.pp, config.num_model_chunks))
