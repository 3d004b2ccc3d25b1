"""One rank in a mesh: its coordinates, and a process group for each axis, or several together.

What `init_device_mesh` does, by hand: all ranks make all groups, and each keeps its own. One more
than the axes have is that of the ranks with the same parameters, over which gradients are averaged
and ZeRO and FSDP shard. Notebook 11_mesh.
"""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from course_lib.core.errors import MeshError
from course_lib.mesh.mesh import COPIES, Mesh


class RankMesh:
    """This rank's coordinates in a mesh and its process groups; all ranks make it together.

    rank       this process's global rank
    together   further groups to make, of axes together

    Cost:    one new_group per group of each axis, on every rank
    Raises:  MeshError unless the mesh has as many ranks as the world
    """

    def __init__(self, mesh: Mesh, *together: tuple[str, ...]) -> None:
        self.mesh, self.rank = mesh, dist.get_rank()
        if mesh.world_size != dist.get_world_size():
            raise MeshError(
                f"rank {self.rank}, RankMesh: need a mesh of the world's {dist.get_world_size()} "
                f"ranks; got {mesh}, {mesh.world_size} ranks."
            )
        several = [mesh.having(*axes) for axes in (COPIES, *together)]
        wanted = [*((axis,) for axis in mesh.sizes), *filter(None, several)]
        self._groups = {axes: self._join(*axes) for axes in dict.fromkeys(wanted)}

    def _join(self, *axes: str) -> dist.ProcessGroup:
        """Form all groups along axes, on every rank: a rank may be in more groups than others.

        With use_local_synchronization=True, PyTorch names a group after the number of groups that
        a rank is in, so ranks with different numbers would wait for each other forever.
        """
        groups = [(ranks, dist.new_group(ranks)) for ranks in self.mesh.groups(*axes)]
        return next(group for ranks, group in groups if self.rank in ranks)

    def size(self, *axes: str) -> int:
        """Return the number of ranks along axes; one that the mesh does not have counts as 1."""
        return self.mesh.size(*axes)

    def index(self, axis: str) -> int:
        """Return this rank's coordinate along an axis; 0 for one that the mesh does not have."""
        return self.mesh.coordinates(self.rank).get(axis, 0)

    def group(self, *axes: str) -> dist.ProcessGroup:
        """Return the process group of the ranks that differ from this one along these axes only.

        Raises: MeshError for an axis that the mesh does not have, or axes without such a group
        """
        found = self._groups.get(self.mesh.having(*axes))
        if found is None or {*axes} - {*self.mesh.sizes}:
            known = ", ".join(" x ".join(axes) for axes in self._groups)
            raise MeshError(
                f"rank {self.rank}: need one of the axes {known}; got {' x '.join(axes)!r}."
            )
        return found

    @property
    def copies(self) -> dist.ProcessGroup:
        """The process group of the ranks that hold the same parameters. Raises: MeshError"""
        return self.group(*(self.mesh.having(*COPIES) or ("dp",)))

    @property
    def num_copies(self) -> int:
        """The number of ranks that hold the same parameters."""
        return self.size(*COPIES)

    def device_mesh(self, axis: str, device_type: str = "cpu") -> DeviceMesh:
        """Return the same group as PyTorch's one-dimensional DeviceMesh, as `parallelize` needs."""
        return DeviceMesh.from_group(self.group(axis), device_type, mesh_dim_names=(axis,))
