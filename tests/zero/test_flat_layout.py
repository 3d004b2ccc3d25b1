"""Flat layouts: nothing is lost, nothing is owned twice, and shards are equal for any shapes."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from course_lib.collectives.coalesced import group_alike
from course_lib.core import MeshError, ShapeError
from course_lib.zero import FlatLayout, Piece

SHAPES = st.lists(st.lists(st.integers(0, 4), max_size=3).map(tuple), max_size=6)
SIZES = st.integers(1, 7)


def numbered(shapes, first=1):
    """Tensors of these shapes whose numbers are all different, and none is zero."""
    tensors = []
    for shape in shapes:
        numel = math.prod(shape)
        tensors.append(torch.arange(first, first + numel, dtype=torch.float64).view(shape))
        first += numel
    return tensors


@given(SHAPES, SIZES)
def test_shards_are_equal_and_hold_every_number_once(shapes, group_size):
    layout = FlatLayout.of(numbered(shapes), group_size)
    flat = layout.flatten(numbered(shapes))
    shards = [flat[layout.shard_slice(rank)] for rank in range(group_size)]
    assert {len(shard) for shard in shards} == {layout.shard_numel}
    assert 0 <= layout.padded_numel - layout.numel < group_size
    wanted = list(range(1, layout.numel + 1)) + [0] * (layout.padded_numel - layout.numel)
    assert torch.cat(shards).tolist() == wanted


@given(SHAPES, SIZES)
def test_views_are_the_tensors_and_share_their_memory_with_the_flat_tensor(shapes, group_size):
    tensors = numbered(shapes)
    layout = FlatLayout.of(tensors, group_size)
    flat = layout.flatten(tensors)
    views = layout.views(flat)
    assert len(views) == len(tensors)
    assert all(map(torch.equal, views, tensors))
    flat.mul_(-1)
    assert all(torch.equal(view, -tensor) for view, tensor in zip(views, tensors, strict=True))


@given(SHAPES, SIZES)
def test_pieces_are_where_the_shard_says_and_cover_all(shapes, group_size):
    tensors = numbered(shapes)
    layout = FlatLayout.of(tensors, group_size)
    flat = layout.flatten(tensors)
    rebuilt = [torch.zeros_like(tensor).view(-1) for tensor in tensors]
    for rank in range(group_size):
        shard = flat[layout.shard_slice(rank)]
        for piece in layout.pieces(rank):
            mine = piece.of(tensors[piece.index])
            assert len(mine) > 0
            assert torch.equal(piece.within(shard), mine)
            rebuilt[piece.index][piece.start : piece.stop] += mine
    assert all(torch.equal(a, b.view(-1)) for a, b in zip(rebuilt, tensors, strict=True))


def test_pieces_of_an_uneven_layout():
    layout = FlatLayout(((2, 3), (), (5,)), 4)  # 12 numbers: 3 a rank
    assert layout.pieces(0) == [Piece(0, 0, 3, 0)]
    assert layout.pieces(2) == [Piece(1, 0, 1, 0), Piece(2, 0, 2, 1)]
    assert layout.pieces(3) == [Piece(2, 2, 5, 0)]


def test_fewer_numbers_than_ranks():
    layout = FlatLayout(((2,),), 4)
    assert (layout.shard_numel, layout.padded_numel) == (1, 4)
    assert [len(layout.pieces(rank)) for rank in range(4)] == [1, 1, 0, 0]


def test_a_tensor_that_is_not_contiguous_is_laid_out_in_row_major_order():
    turned = torch.arange(6.0).view(3, 2).t()
    layout = FlatLayout.of([turned], 2)
    assert layout.flatten([turned]).tolist() == [0, 2, 4, 1, 3, 5]
    assert torch.equal(layout.views(layout.flatten([turned]))[0], turned)
    assert layout.pieces(1)[0].of(turned).tolist() == [1, 3, 5]


def test_tensors_are_grouped_by_dtype_up_to_a_size():
    tensors = [torch.zeros(4), torch.zeros(4).bfloat16(), torch.zeros(2), torch.zeros(9)]
    assert group_alike(tensors) == [[0, 2, 3], [1]]
    assert group_alike(tensors, 24) == [[0, 2], [3], [1]]
    assert group_alike(tensors, 1) == [[0], [2], [3], [1]]


@pytest.mark.parametrize(
    ("wrong", "error", "words"),
    [
        (lambda: FlatLayout(((2,),), 0), MeshError, "need a group_size of 1 or more; got 0"),
        (lambda: FlatLayout(((2,),), 2).pieces(2), MeshError, "need a rank from 0 to 1; got 2"),
        (
            lambda: FlatLayout(((2, 3),), 2).flatten([torch.zeros(3, 2)]),
            ShapeError,
            r"need tensors of shapes \[\[2, 3\]\]; got \[\[3, 2\]\]",
        ),
        (
            lambda: FlatLayout(((5,),), 2).views(torch.zeros(5)),
            ShapeError,
            r"need a flat tensor of \[6\]; got \[5\]",
        ),
    ],
)
def test_what_does_not_fit_is_told_in_one_sentence(wrong, error, words):
    with pytest.raises(error, match=words):
        wrong()
