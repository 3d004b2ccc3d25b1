"""The mesh of ranks of a training run, with the axes dp, pp and tp.

The tp axis is innermost, as it communicates most: ranks 0 and 1 share layers, then come the stages
of the same copy of the model, then the next copy.
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from course_lib.core.parallelism import Parallelism


class TrainMesh:
    """The ranks of a run as one DeviceMesh with the axes dp, pp, tp.

    An axis of one rank, other than dp, is left out: it needs no group.

    loss_stage   index along pp of the rank with the last layers, which computes the loss
    """

    def __init__(self, parallelism: Parallelism, device: torch.device, loss_stage: int) -> None:
        self.parallelism, self.loss_stage = parallelism, loss_stage
        sizes = {"dp": parallelism.dp, "pp": parallelism.pp, "tp": parallelism.tp}
        names = tuple(name for name, size in sizes.items() if size > 1 or name == "dp")
        shape = tuple(sizes[name] for name in names)
        self.device_mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
        self._names = names

    def number(self, name: str) -> int:
        """Return this rank's index along an axis."""
        return self.device_mesh.get_local_rank(name) if name in self._names else 0

    def group(self, name: str) -> dist.ProcessGroup:
        """Return the process group of the ranks that differ from this one along that axis only."""
        return self.device_mesh.get_group(name)

    @property
    def reports(self) -> bool:
        """Whether this rank reports its copy's loss and tokens: one rank of each copy does."""
        return self.number("pp") == self.loss_stage and self.number("tp") == 0
