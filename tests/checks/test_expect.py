"""The tools of checks: each difference, budget and trouble on ranks is told as what it means."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist

from course_lib.checks import CheckFailed, NotDone
from course_lib.checks.expect import (
    expect_equal,
    held_bytes,
    run,
)
from course_lib.ranks import Ranks

ONE = torch.tensor([1.0, 10.0])


@pytest.mark.parametrize(
    ("got", "says"),
    [
        (None, "got None. Does your function return its result?"),
        ([1, 10], "need a tensor; got [1, 10]"),
        (torch.ones(3), "need shape [2]; got [3]"),
        (torch.ones(2).double(), "need dtype float32; got float64"),
        (torch.tensor([2.0, 20.0]), "need [1, 10]; got [2, 20]. Summed twice."),
        (torch.tensor([0.5, 5.0]), "need [1, 10]; got [0.5, 5]. Halved."),
        (torch.tensor([7.0, 7.0]), "need [1, 10]; got [7, 7]. Look at the loop."),
        (torch.tensor([float("nan"), 10.0]), "need [1, 10]; got [nan, 10]. Look at the loop."),
    ],
)
def test_a_difference_is_named_by_the_first_cause_that_fits(got, says):
    causes = [
        (lambda x: x[0] == 2, "Summed twice."),
        (lambda x: x.no_such_thing, "never"),
        (torch.tensor([0.5, 5.0]), "Halved."),
    ]
    with pytest.raises(CheckFailed) as caught:
        expect_equal(got, ONE, where="rank 1 of 2", causes=causes, look="Look at the loop.")
    assert str(caught.value).startswith("rank 1 of 2: ")
    assert says in str(caught.value)


def test_long_tensors_are_told_by_their_first_difference():
    got = torch.arange(100.0)
    got[7:9] = 1211
    with pytest.raises(CheckFailed, match=r"need 7 at index 7; got 1211 \(2 of 100 numbers"):
        expect_equal(got, torch.arange(100.0), where="here")


@pytest.mark.parametrize(("got", "expected"), [(3, 3), (ONE.clone(), ONE), ([1, 2], [1, 2])])
def test_equal_is_equal(got, expected):
    expect_equal(got, expected, where="here")


def test_true_is_not_one():
    with pytest.raises(CheckFailed, match="need 1; got True"):
        expect_equal(True, 1, where="here")


def test_a_view_holds_what_it_was_cut_from():
    whole = torch.zeros(100)
    assert held_bytes(whole[:2]) == 400
    assert held_bytes(whole[:2].clone()) == 8


def raises_on_one(rank):
    if rank == 1:
        raise ValueError("a bad thing")


def is_a_stub(rank):
    raise NotImplementedError("exercise toy-1: fill it in")


def fails_on_a_rank(rank):
    expect_equal(rank, 0, where=f"rank {rank}")


def calls_on_one_only(rank):
    if rank == 0:
        dist.all_reduce(torch.ones(1))


def calls_with_two_shapes(rank):
    dist.all_reduce(torch.ones(1 + rank))


@pytest.fixture(scope="module")
def two_ranks():
    here = sys.modules[__name__]
    cloudpickle.register_pickle_by_value(here)
    with Ranks(2) as ranks:
        yield ranks
    cloudpickle.unregister_pickle_by_value(here)


@pytest.mark.parametrize(
    ("fn", "kind", "says"),
    [
        (raises_on_one, CheckFailed, "on 2 ranks, your code raised an error. Mine.\n"),
        (raises_on_one, CheckFailed, "ValueError: a bad thing"),
        (is_a_stub, NotDone, "exercise toy-1: fill it in"),
        (fails_on_a_rank, CheckFailed, "rank 1: need 0; got 1"),
        (calls_on_one_only, CheckFailed, "your ranks wait for each other. One rank only.\n"),
        (calls_on_one_only, CheckFailed, "dist.all_reduce(torch.ones(1))"),
        (calls_with_two_shapes, CheckFailed, "do not make the same calls"),
    ],
)
def test_trouble_on_ranks_is_told_as_what_it_means(two_ranks, fn, kind, says):
    with pytest.raises(kind) as caught:
        run(two_ranks, fn, on={"hang": "One rank only.", "raised": "Mine."})
    assert says in str(caught.value)
