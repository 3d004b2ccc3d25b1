"""The types of parameters over the axes of a mesh are what their use says, from real ranks."""

import pytest

from course_lib.core import ModelSpec
from course_lib.debugging.type_tables import type_lines, types_on_mesh
from course_lib.mesh import Mesh

SPEC = ModelSpec(hidden=8, num_layers=2, num_heads=4, ffn_hidden=16, vocab=20, max_seq=16)
BIAS, UP, NORM = "blocks.0.mlp.out.bias", "blocks.0.mlp.up.weight", "norm.weight"
P, M, INV, VAR = "Partial", "Mean", "Invariant", "Varying"


@pytest.mark.parametrize(
    ("sizes", "sequence_parallel", "wanted"),
    [
        ((1, 1, 2), False, {UP: {"tp": VAR}, BIAS: {"tp": INV}, NORM: {"tp": INV}}),
        ((1, 1, 2), True, {UP: {"tp": VAR}, BIAS: {"tp": P}, NORM: {"tp": P}}),
        ((2, 2, 1), False, {UP: {"dp": M}, "embedding.weight": {"dp": M, "pp": P}}),
        ((1, 2, 2), True, {UP: {"dp": M, "tp": VAR}, NORM: {"dp": M, "tp": P}}),
    ],
)
def test_the_type_says_how_the_ranks_use_a_parameter(pools, sizes, sequence_parallel, wanted):
    mesh = Mesh(**dict(zip(("pp", "dp", "tp"), sizes, strict=True)))
    found = types_on_mesh(pools(mesh.world_size), SPEC, mesh, sequence_parallel=sequence_parallel)
    assert {one.name: one.over for one in found if one.name in wanted} == wanted
    head, *rows = type_lines([*wanted], ["dp", "tp"], {"": found})
    assert head.split() == ["dp", "tp"]
    assert [row.split()[0] for row in rows] == [*wanted]
    assert ("Replicate: Partial, sum" in rows[-1]) == (wanted[[*wanted][-1]].get("tp") == P)
