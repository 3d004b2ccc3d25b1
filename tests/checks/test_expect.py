"""How a value differs from the right one: the kind of the first difference, and its words."""

import pytest
import torch

from course_lib.checks.expect import difference

ONE = torch.tensor([1.0, 10.0])


@pytest.mark.parametrize(
    ("got", "kind", "words"),
    [
        (None, "none", "need [1, 10]; got None"),
        ([1, 10], "type", "need a tensor; got [1, 10]"),
        (torch.ones(3), "shape", "need shape [2]; got [3]"),
        (torch.ones(2).double(), "dtype", "need dtype float32; got float64"),
        (torch.tensor([7.0, 7.0]), "numbers", "need [1, 10]; got [7, 7]"),
        (torch.tensor([float("nan"), 10.0]), "numbers", "need [1, 10]; got [nan, 10]"),
    ],
)
def test_a_difference_has_a_kind_and_words(got, kind, words):
    assert difference(got, ONE) == (kind, words)


def test_long_tensors_are_told_by_their_first_difference():
    got = torch.arange(100.0)
    got[7:9] = 1211
    _, words = difference(got, torch.arange(100.0))
    assert words == "need 7 at index 7; got 1211 (2 of 100 numbers are wrong)"


def test_whole_numbers_are_told_in_full():
    large = torch.full((9,), 8 * 10**17)
    _, words = difference(large + 1, large)
    assert words.startswith("need 800000000000000000 at index 0; got 800000000000000001 ")


@pytest.mark.parametrize(("got", "expected"), [(3, 3), (ONE.clone(), ONE), ([1, 2], [1, 2])])
def test_equal_is_equal(got, expected):
    assert difference(got, expected) == ("", "")


def test_true_is_not_one():
    assert difference(True, 1) == ("type", "need 1; got True")
