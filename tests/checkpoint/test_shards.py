"""Boxes: a range of a flat parameter is covered in order, and every element once."""

import itertools
from math import prod

import pytest
import torch

from course_lib.core.shards import Box, boxes_of_range, covers_once
from course_lib.fsdp.dim0_layout import Dim0Layout
from course_lib.fsdp.state import dim0_shard
from course_lib.zero.state import range_shard

SHAPES = [(), (1,), (7,), (3, 4), (1, 5), (5, 1), (2, 3, 4), (3, 1, 2), (2, 2, 2, 2)]


def elements(box):
    """The indices of a box's elements, in row-major order."""
    return list(itertools.product(*(range(one.start, one.stop) for one in box.slices())))


@pytest.mark.parametrize("shape", SHAPES)
def test_the_boxes_of_a_range_are_its_elements_in_order(shape):
    order = elements(Box.whole(shape))
    for start, stop in itertools.combinations_with_replacement(range(len(order) + 1), 2):
        boxes = boxes_of_range(shape, start, stop)
        assert [one for box in boxes for one in elements(box)] == order[start:stop]
        assert len(boxes) <= max(1, 2 * len(shape) - 1)
        assert covers_once(shape, boxes) == ((start, stop) == (0, len(order)))


def test_a_shape_without_elements_has_no_boxes():
    assert boxes_of_range((3, 0), 0, 0) == []
    assert covers_once((3, 0), [])


def test_boxes_intersect_where_they_share_elements():
    shape = (3, 4)
    boxes = [
        Box((a, b), (c, d))
        for a, b in itertools.product(range(3), range(4))
        for c, d in itertools.product(range(1, 4 - a), range(1, 5 - b))
    ]
    for one, other in itertools.product(boxes, boxes):
        both = one.intersect(other)
        assert (elements(both) if both else []) == [
            x for x in elements(one) if x in elements(other)
        ]
    assert Box((), ()).intersect(Box((), ())) == Box((), ())
    assert Box((1, 2), (2, 2)).within(Box((1, 1), (2, 3))) == Box((0, 1), (2, 2))
    assert prod(shape) == Box.whole(shape).numel


@pytest.mark.parametrize(
    "boxes",
    [
        [Box((0, 0), (3, 2)), Box((0, 2), (2, 2))],  # two elements are missing
        [Box((0, 0), (3, 3)), Box((0, 2), (3, 2))],  # a column twice
        [Box((0, 0), (2, 4)), Box((1, 0), (1, 4))],  # as many elements, a row twice
        [Box((0, 0), (4, 3))],  # outside
        [Box((-1, 0), (4, 3))],
        [Box((0,), (12,))],  # another number of dims
        [Box((0, 0), (3, 4)), Box((0, 0), (0, 4))],  # an empty one
        [],
    ],
)
def test_what_does_not_cover_each_element_once_is_seen(boxes):
    assert not covers_once((3, 4), boxes)
    assert covers_once((3, 4), [Box((0, 0), (3, 2)), Box((0, 2), (3, 2))])


@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("shape", SHAPES)
def test_shards_of_rows_and_of_ranges_are_live_and_cover_the_whole(shape, p):
    whole = torch.arange(float(prod(shape))).view(shape)
    layout, flat = Dim0Layout(shape, p), whole.clone().view(-1)
    cuts = [len(flat) * n // p for n in range(p + 1)]
    rows = [dim0_shard(layout, n, layout.shard_of(whole.clone(), n)) for n in range(p)]
    ranges = [range_shard(shape, a, flat[a:b]) for a, b in itertools.pairwise(cuts)]
    for shards in (rows, ranges):
        pieces = [piece for shard in shards for piece in shard.pieces]
        assert covers_once(shape, [box for box, _ in pieces])
        for box, tensor in pieces:
            assert torch.equal(tensor, whole[box.slices()])
    for shard in ranges:
        for _, tensor in shard.pieces:
            tensor.fill_(-1)
    assert flat.tolist() == [-1.0] * len(flat)
