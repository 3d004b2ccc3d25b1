"""The mesh of ranks of a training run, with the axes pp, dp and tp. Notebook 11_mesh.

The tp axis is innermost, as it communicates most: ranks 0 and 1 share layers, then come the other
copies of these layers, then the next stage.
"""

from course_lib.core.parallelism import Parallelism
from course_lib.mesh.mesh import Mesh
from course_lib.mesh.rank_mesh import RankMesh
from course_lib.pipeline.actions import loop_placement, v_placement
from course_lib.train.config import V_SCHEDULES, TrainConfig


class TrainMesh(RankMesh):
    """This rank in the mesh of a run.

    An axis of one rank, other than dp, is left out: it needs no group.

    loss_stage   index along pp of the rank with the last layers, which computes the loss
    """

    def __init__(self, parallelism: Parallelism, loss_stage: int) -> None:
        sizes = {"pp": parallelism.pp, "dp": parallelism.dp, "tp": parallelism.tp}
        super().__init__(Mesh(**{n: size for n, size in sizes.items() if size > 1 or n == "dp"}))
        self.loss_stage = loss_stage

    @property
    def reports(self) -> bool:
        """Whether this rank reports its copy's loss and tokens: one rank of each copy does."""
        return self.index("pp") == self.loss_stage and self.index("tp") == 0


def placement_of(config: TrainConfig) -> list[int]:
    """Return the stage of each model chunk, in the order of the layers."""
    if config.schedule in V_SCHEDULES:
        return list(v_placement(config.pp))
    return list(loop_placement(config.pp, config.num_model_chunks))
