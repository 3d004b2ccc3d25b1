"""The mesh: ranks numbered as a grid of named axes, in pure Python.

    mesh = Mesh(pp=2, dp=2, tp=2)          # outermost axis first
    mesh.coordinates(5)                    # {"pp": 1, "dp": 0, "tp": 1}
    mesh.group(5, "dp")                    # [5, 7]: the ranks that differ from 5 along dp only

The last axis is innermost: its neighbours have consecutive ranks, so they share a node. Which axis
communicates most decides which one stands there. Notebook 11_mesh.
"""

import math
from collections.abc import Mapping, Sequence
from itertools import product

from course_lib.core.errors import MeshError

AXES = ("pp", "dp", "cp", "ep", "tp")  # outermost first: what communicates least stands first
COPIES = ("dp", "cp", "ep")  # ranks that differ along these hold the same parameters, but experts


class Mesh:
    """Ranks 0 .. world_size-1 as a grid with named axes, given outermost first.

    sizes        size of each axis by name: dp data, pp pipeline, cp context, ep expert, tp tensor
    world_size   number of ranks, the product of the sizes

    Raises:  MeshError for an axis of another name, or a size that is no whole number above 0
    Source:  NVIDIA Megatron-LM, megatron/core/parallel_state.py, RankGenerator;
             torch.distributed.device_mesh.init_device_mesh, which numbers ranks in the same way
    """

    def __init__(self, **sizes: int) -> None:
        for axis, size in sizes.items():
            if axis not in AXES:
                raise MeshError(f"Mesh: need axes out of {', '.join(AXES)}; got {axis!r}.")
            if isinstance(size, bool) or not isinstance(size, int) or size < 1:
                raise MeshError(
                    f"Mesh: need {axis} as a whole number above 0; got {size!r}. Try {axis}=1."
                )
        self.sizes = dict(sizes)
        self.world_size = math.prod(self.sizes.values())

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Mesh) and [*self.sizes.items()] == [*other.sizes.items()]

    def __hash__(self) -> int:
        return hash(tuple(self.sizes.items()))

    def __repr__(self) -> str:
        return f"Mesh({', '.join(f'{axis}={size}' for axis, size in self.sizes.items())})"

    def size(self, *axes: str) -> int:
        """Return the number of ranks along axes; one that this mesh does not have counts as 1."""
        return math.prod(self.sizes.get(axis, 1) for axis in axes)

    def having(self, *axes: str) -> tuple[str, ...]:
        """Return those of these axes that this mesh has, outermost first."""
        return tuple(axis for axis in self.sizes if axis in axes)

    def stride(self, axis: str) -> int:
        """Return the distance of two ranks that are neighbours along an axis: 1 innermost."""
        names = [*self.sizes]
        return math.prod(self.sizes[inner] for inner in names[names.index(self._known(axis)) + 1 :])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return a rank's index along every axis. Raises: MeshError for a rank outside."""
        if not 0 <= rank < self.world_size:
            raise MeshError(f"{self}: need a rank from 0 to {self.world_size - 1}; got {rank}.")
        return {axis: rank // self.stride(axis) % size for axis, size in self.sizes.items()}

    def rank(self, coordinates: Mapping[str, int]) -> int:
        """Return the rank at these coordinates, one for each axis.

        Raises: MeshError for an axis too many or too few, or an index outside of its axis
        """
        if coordinates.keys() != self.sizes.keys():
            raise MeshError(
                f"{self}: need an index for each of {', '.join(self.sizes)}; got "
                f"{dict(coordinates)}."
            )
        for axis, index in coordinates.items():
            if not 0 <= index < self.sizes[axis]:
                raise MeshError(
                    f"{self}: need {axis} from 0 to {self.sizes[axis] - 1}; got {index}."
                )
        return sum(index * self.stride(axis) for axis, index in coordinates.items())

    def group(self, rank: int, *axes: str) -> list[int]:
        """Return the ranks whose coordinates differ from this rank's along these axes only."""
        here = self.coordinates(rank)
        ways = product(*(range(self.sizes[self._known(axis)]) for axis in axes))
        found = [self.rank(here | dict(zip(axes, way, strict=True))) for way in ways]
        return sorted(found)

    def groups(self, *axes: str) -> list[list[int]]:
        """Return all groups along these axes: every rank is in exactly one.

        One axis: its process groups. Several: the sub-meshes that these axes span.
        """
        found = {tuple(self.group(rank, *axes)) for rank in range(self.world_size)}
        return [list(ranks) for ranks in sorted(found)]

    def axis_of(self, ranks: Sequence[int]) -> str | None:
        """Return the axis along which these ranks communicate, a group or two of its members.

        None for one rank, and for ranks that differ along more than one axis.
        """
        if len(ranks) < 2:
            return None
        found = (axis for axis in self.sizes if {*ranks} <= {*self.group(ranks[0], axis)})
        return next(found, None)

    def crosses_nodes(self, axis: str, ranks_per_node: int) -> bool:
        """Return whether some group of the axis has ranks on more than one node."""
        return any(spans_nodes(ranks, ranks_per_node) for ranks in self.groups(axis))

    def _known(self, axis: str) -> str:
        if axis not in self.sizes:
            raise MeshError(f"{self}: need one of its axes {', '.join(self.sizes)}; got {axis!r}.")
        return axis


def spans_nodes(ranks: Sequence[int], ranks_per_node: int) -> bool:
    """Return whether these ranks are on more than one node of `ranks_per_node` ranks each."""
    return len({rank // ranks_per_node for rank in ranks}) > 1


def read_mesh(text: str) -> Mesh:
    """Return the mesh of a text such as "pp=2,dp=2,tp=2", outermost axis first.

    Raises: MeshError for another form, or an axis that is named twice
    """
    sizes: dict[str, int] = {}
    for part in text.replace(" ", "").split(","):
        axis, _, size = part.partition("=")
        if not size.isdecimal() or axis in sizes:
            raise MeshError(f"mesh: need axes such as dp=2,pp=2,tp=2, each once; got {text!r}.")
        sizes[axis] = int(size)
    return Mesh(**sizes)
