"""Calls that do not match: named before anything is sent, with the rank and the line of each."""

import pytest
import torch
import torch.distributed as dist

from course_lib.ranks import Ranks
from tests.ranks.pools import fails


@pytest.fixture(scope="module")
def ranks():
    with Ranks(4) as four:
        yield four


def other_kind(rank):
    dist.broadcast(torch.ones(4), 0) if rank == 1 else dist.all_reduce(torch.ones(4))


def other_shape(rank):
    dist.all_reduce(torch.ones(5 if rank == 1 else 4))


def other_dtype(rank):
    dist.all_reduce(torch.ones(4, dtype=torch.float64 if rank == 1 else torch.float32))


def other_root(rank):
    dist.broadcast(torch.ones(4), 1 if rank == 1 else 0)


def other_op(rank):
    dist.all_reduce(torch.ones(4), dist.ReduceOp.MAX if rank == 1 else dist.ReduceOp.SUM)


def other_order(rank):
    gathered = [torch.ones(4)] * 4
    calls = [
        lambda: dist.all_reduce(torch.ones(4)),
        lambda: dist.all_gather(gathered, torch.ones(4)),
    ]
    for call in reversed(calls) if rank == 1 else calls:
        call()


def other_size_sent(rank):
    if rank == 0:
        dist.send(torch.ones(4), 1)
    if rank == 1:
        dist.recv(torch.ones(5), 0)


def other_split(rank):
    sends = [1, 1, 1, 3] if rank == 0 else None
    expects = None if rank == 1 else [1, 1, 1, 2] if rank == 3 else [1, 1, 1, 1]
    received = torch.zeros(5 if rank == 3 else 4)
    dist.all_to_all_single(received, torch.ones(6 if rank == 0 else 4), expects, sends)


def test_sizes_of_an_all_to_all_that_do_not_fit_are_named_by_rank(ranks):
    error = fails(ranks, other_split)
    assert error.kind == "mismatch"
    says = "rank 0 sends 3 elements to rank 3, which expects 1"
    assert str(error).startswith(f"mismatch: {says}")
    sizes = "sends [1, 1, 1, 3] and expects [1, 1, 1, 1] elements"
    assert f"rank 0 calls all_to_all float32 that {sizes}\n" in str(error)
    assert "expects [1, 1, 1, 2] elements\n" in str(error)


def unequal_list(rank):
    tensors = [torch.ones(2 + (peer == rank)) for peer in range(4)]
    dist.all_to_all([torch.ones(2)] * 4, tensors)


def short_list(rank):
    dist.all_to_all([torch.ones(2)] * 4, [torch.ones(2)] * 3)


def splits_of_other_rows(rank):
    dist.all_to_all_single(torch.ones(4, 2), torch.ones(6, 2), input_split_sizes=[1, 2, 2, 2])


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (unequal_list, "got outputs of [2, 2, 2, 2] and inputs of [2, 2, 2, 3] elements. Try all_"),
        (short_list, "need lists of 4 tensors, one for each rank; got 4 outputs and 3 inputs"),
        (splits_of_other_rows, "rows of the input; got [1, 2, 2, 2]. Try input_split_sizes=[2, 2,"),
    ],
)
def test_an_all_to_all_that_a_rank_cannot_make_is_told(ranks, wrong, says):
    error = fails(ranks, wrong)
    assert error.failures[3][0] == "ShapeError"
    assert error.failures[3][1].startswith("rank 3, all_to_all: ")
    assert says in error.failures[3][1]


def test_uneven_sizes_of_an_all_to_all_that_fit_work(ranks):
    """Many more than the call board keeps, and in a group of some of the ranks."""

    def exchange(rank):
        pair = dist.new_group([1, 3])
        for _ in range(100):
            received = torch.zeros(4 * (rank + 1))
            sent = torch.full((10,), 10.0**rank)
            dist.all_to_all_single(received, sent, [rank + 1] * 4, [1, 2, 3, 4])
        if rank in (1, 3):
            sizes = [2, 1] if rank == 1 else [1, 3]
            expects = [2, 1] if rank == 1 else [1, 3]
            dist.all_to_all_single(
                torch.zeros(sum(expects)), torch.ones(sum(sizes)), expects, sizes, pair
            )
        return received.tolist()

    assert ranks.run(exchange) == [
        [10.0**sender for sender in range(4) for _ in range(rank + 1)] for rank in range(4)
    ]


@pytest.mark.parametrize(
    ("mismatch", "one", "other"),
    [
        (other_kind, "all_reduce(sum) float32 [4]", "broadcast root 0 float32 [4]"),
        (other_shape, "all_reduce(sum) float32 [4]", "all_reduce(sum) float32 [5]"),
        (other_dtype, "all_reduce(sum) float32 [4]", "all_reduce(sum) float64 [4]"),
        (other_root, "broadcast root 0 float32 [4]", "broadcast root 1 float32 [4]"),
        (other_op, "all_reduce(sum) float32 [4]", "all_reduce(max) float32 [4]"),
        (other_order, "all_reduce(sum) float32 [4]", "all_gather float32 [4]"),
        (other_size_sent, "send float32 [4] 0->1", "recv float32 [5] 0->1"),
    ],
)
def test_a_mismatch_is_named_before_anything_is_sent(ranks, mismatch, one, other):
    error = fails(ranks, mismatch)
    assert error.kind == "mismatch"
    assert str(error).startswith("mismatch: ")
    assert one in str(error)
    assert f"rank 1 calls {other}" in str(error)
    assert str(error).count("test_mismatches.py line") >= 2


def test_swapped_calls_that_fail_nowhere_are_told(ranks, capsys):
    def swapped(rank):
        first, second = torch.ones(1), torch.ones(1)
        if rank == 1:
            dist.all_reduce(second)
            dist.all_reduce(first)
        else:
            dist.all_reduce(first)
            dist.all_reduce(second)

    ranks.run(swapped)
    out = capsys.readouterr().out
    assert "swapped: ranks 0 and 1 made two calls of all_reduce in opposite orders" in out
    assert "dist.all_reduce(first)" in out


def test_same_calls_in_the_same_order_are_not_called_swapped(ranks, capsys):
    def fine(rank):
        for _ in range(3):
            dist.all_reduce(torch.ones(1))
            dist.all_reduce(torch.ones(1))

    ranks.run(fine)
    assert capsys.readouterr().out == ""


def test_many_calls_are_never_taken_for_a_mismatch(ranks):
    def many(rank):
        for _ in range(1500):
            dist.all_reduce(torch.ones(3))
        return True

    assert all(ranks.run(many))
