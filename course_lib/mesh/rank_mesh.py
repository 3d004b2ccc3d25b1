"""One rank in a mesh: its coordinates, and a process group for each axis.

What `init_device_mesh` does, by hand: all ranks make all groups, and each keeps its own, one for
each axis. Notebook 11_mesh.
"""

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from course_lib.core.errors import MeshError
from course_lib.mesh.mesh import Mesh


class RankMesh:
    """This rank's coordinates in a mesh and its process groups; all ranks make it together.

    rank   this process's global rank

    Cost:    one new_group per group of each axis, on every rank
    Raises:  MeshError unless the mesh has as many ranks as the world
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.rank = mesh, dist.get_rank()
        if mesh.world_size != dist.get_world_size():
            raise MeshError(
                f"rank {self.rank}, RankMesh: need a mesh of the world's {dist.get_world_size()} "
                f"ranks; got {mesh}, {mesh.world_size} ranks."
            )
        self._groups = {axis: self._join(axis) for axis in mesh.sizes}

    def _join(self, axis: str) -> dist.ProcessGroup:
        """Form all groups along an axis, on every rank: a rank may be in more groups than others.

        With use_local_synchronization=True, PyTorch names a group after the number of groups that
        a rank is in, so ranks with different numbers would wait for each other forever.
        """
        groups = [(ranks, dist.new_group(ranks)) for ranks in self.mesh.groups(axis)]
        return next(group for ranks, group in groups if self.rank in ranks)

    def size(self, axis: str) -> int:
        """Return the number of ranks along an axis; 1 for one that the mesh does not have."""
        return self.mesh.size(axis)

    def index(self, axis: str) -> int:
        """Return this rank's coordinate along an axis; 0 for one that the mesh does not have."""
        return self.mesh.coordinates(self.rank).get(axis, 0)

    def group(self, axis: str) -> dist.ProcessGroup:
        """Return the process group of the ranks that differ from this one along that axis only.

        Raises: MeshError for an axis that the mesh does not have
        """
        if axis not in self._groups:
            raise MeshError(
                f"rank {self.rank}: need one of the axes {', '.join(self._groups)}; got {axis!r}."
            )
        return self._groups[axis]

    def device_mesh(self, axis: str, device_type: str = "cpu") -> DeviceMesh:
        """Return the same group as PyTorch's one-dimensional DeviceMesh, as `parallelize` needs."""
        return DeviceMesh.from_group(self.group(axis), device_type, mesh_dim_names=(axis,))
