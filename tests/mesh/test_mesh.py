"""The mesh: ranks and coordinates, groups, the groups of PyTorch's DeviceMesh, bad input."""

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import init_device_mesh

from course_lib.core.errors import MeshError
from course_lib.mesh import Mesh, RankMesh, read_mesh
from course_lib.mesh.mesh import AXES, spans_nodes

MESHES = st.lists(
    st.tuples(st.sampled_from(AXES), st.integers(1, 4)), max_size=4, unique_by=lambda pair: pair[0]
).map(lambda pairs: Mesh(**dict(pairs)))


@given(MESHES)
def test_ranks_and_coordinates_are_inverse_and_every_rank_has_its_own(mesh):
    places = [mesh.coordinates(rank) for rank in range(mesh.world_size)]
    assert [mesh.rank(place) for place in places] == list(range(mesh.world_size))
    assert [tuple(place.values()) for place in places] == sorted(
        tuple(place.values()) for place in places
    )


@given(MESHES, st.data())
def test_a_group_differs_along_its_axes_only_and_groups_share_no_rank(mesh, data):
    axes = data.draw(st.lists(st.sampled_from([*mesh.sizes]), unique=True)) if mesh.sizes else []
    groups = mesh.groups(*axes)
    assert sorted(rank for group in groups for rank in group) == list(range(mesh.world_size))
    for group in groups:
        places = [mesh.coordinates(rank) for rank in group]
        for axis in mesh.sizes.keys() - set(axes):
            assert len({place[axis] for place in places}) == 1
        assert all(mesh.group(rank, *axes) == group for rank in group)


@given(MESHES)
def test_neighbours_along_an_axis_are_a_stride_apart(mesh):
    for axis, size in mesh.sizes.items():
        for group in mesh.groups(axis):
            assert group == [group[0] + n * mesh.stride(axis) for n in range(size)]


def test_the_innermost_axis_stays_in_a_node():
    mesh = Mesh(pp=2, dp=2, tp=4)
    assert [axis for axis in mesh.sizes if mesh.crosses_nodes(axis, 4)] == ["pp", "dp"]
    assert [axis for axis in mesh.sizes if mesh.crosses_nodes(axis, 8)] == ["pp"]
    wrong = Mesh(tp=4, dp=2, pp=2)
    assert [axis for axis in wrong.sizes if wrong.crosses_nodes(axis, 4)] == ["tp"]
    assert spans_nodes([3, 4], 4)
    assert not spans_nodes([4, 7], 4)


def test_ranks_of_a_message_or_a_group_name_their_axis():
    mesh = Mesh(pp=3, dp=2, tp=2)
    assert [mesh.axis_of(ranks) for ranks in ([0, 4], [4, 8], [0, 4, 8])] == ["pp"] * 3
    assert mesh.axis_of((5, 7)) == "dp"
    assert mesh.axis_of((6, 7)) == "tp"
    assert mesh.axis_of((0, 7)) is mesh.axis_of((3,)) is mesh.axis_of(()) is None


def test_a_mesh_is_equal_to_one_with_the_same_sizes_in_the_same_order():
    assert Mesh(pp=2, tp=4) == read_mesh("pp=2, tp=4")
    assert Mesh(pp=2, tp=4) != Mesh(tp=4, pp=2)
    assert len({Mesh(pp=2, tp=4), read_mesh("pp=2,tp=4"), Mesh(tp=4, pp=2)}) == 2
    assert str(Mesh(pp=2, tp=4)) == "Mesh(pp=2, tp=4)"


@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: Mesh(zp=2), "need axes out of pp, dp, cp, ep, tp; got 'zp'"),
        (lambda: Mesh(dp=0), "need dp as a whole number above 0; got 0. Try dp=1"),
        (lambda: Mesh(dp=2.0), "need dp as a whole number above 0; got 2.0"),
        (lambda: Mesh(dp=True), "got True"),
        (lambda: Mesh(dp=2).coordinates(2), "need a rank from 0 to 1; got 2"),
        (lambda: Mesh(dp=2).coordinates(-1), "need a rank from 0 to 1; got -1"),
        (lambda: Mesh(dp=2).rank({"tp": 0}), "need an index for each of dp; got {'tp': 0}"),
        (lambda: Mesh(dp=2).rank({"dp": 2}), "need dp from 0 to 1; got 2"),
        (lambda: Mesh(dp=2).rank({"dp": -1}), "need dp from 0 to 1; got -1"),
        (lambda: Mesh(dp=2).group(0, "tp"), "need one of its axes dp; got 'tp'"),
        (lambda: read_mesh("dp"), "need axes such as dp=2,pp=2,tp=2, each once; got 'dp'"),
        (lambda: read_mesh("dp=2,dp=2"), "each once"),
        (lambda: read_mesh("dp=-2"), "each once; got 'dp=-2'"),
        (lambda: read_mesh(""), "each once; got ''"),
    ],
)
def test_bad_input_is_told_in_one_sentence(make, told):
    with pytest.raises(MeshError) as caught:
        make()
    assert told in str(caught.value)
    assert "\n" not in str(caught.value)


def groups_beside_torch(rank, sizes):
    ours = RankMesh(Mesh(**sizes))
    theirs = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    found = {}
    for axis in sizes:
        pair = [
            dist.get_process_group_ranks(ours.group(axis)),
            dist.get_process_group_ranks(theirs.get_group(axis)),
        ]
        found[axis] = (*pair, ours.index(axis), theirs.get_local_rank(axis))
        assert ours.device_mesh(axis).size() == theirs[axis].size()
    return found


@pytest.mark.parametrize(
    "sizes", [{"pp": 2, "dp": 2, "tp": 2}, {"tp": 4, "dp": 2}, {"dp": 8}, {"pp": 1, "tp": 8}]
)
def test_groups_and_indices_are_those_of_torch(pools, sizes):
    mesh = Mesh(**sizes)
    for rank, found in enumerate(pools(8).run(groups_beside_torch, sizes)):
        for axis, (ours, theirs, index, their_index) in found.items():
            assert ours == theirs == mesh.group(rank, axis)
            assert index == their_index == mesh.coordinates(rank)[axis]


def several_axes(rank, sizes):
    ours = RankMesh(Mesh(**sizes), ("tp", "dp"))
    groups = ours.copies, ours.group("dp", "tp")
    return [dist.get_process_group_ranks(group) for group in groups], ours.num_copies


@pytest.mark.parametrize("sizes", [{"dp": 2, "cp": 2, "tp": 2}, {"cp": 4, "dp": 1, "tp": 2}])
def test_the_ranks_with_the_same_parameters_are_one_group_of_several_axes(pools, sizes):
    mesh = Mesh(**sizes)
    for rank, (groups, num_copies) in enumerate(pools(8).run(several_axes, sizes)):
        assert groups == [mesh.group(rank, "dp", "cp"), mesh.group(rank, "dp", "tp")]
        assert num_copies == len(groups[0]) == 4


def wrong_world(rank):
    with pytest.raises(MeshError, match="need a mesh of the world's 8 ranks; got Mesh"):
        RankMesh(Mesh(dp=4))
    with pytest.raises(MeshError, match=r"need one of the axes dp; got 'tp'"):
        RankMesh(Mesh(dp=8)).group("tp")
    with pytest.raises(MeshError, match="need one of the axes pp, dp, tp; got 'pp x tp'"):
        RankMesh(Mesh(pp=2, dp=2, tp=2)).group("pp", "tp")


def test_a_mesh_of_another_size_is_refused(pools):
    pools(8).run(wrong_world)
