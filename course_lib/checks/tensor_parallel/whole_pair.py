"""The uses of f and g in exercise 1 of 07_tensor_parallel, and what they lead to.

Rank r's part multiplies by 10**r, so that a wrong sum tells which ranks are in it. In bfloat16 it
multiplies by r: the sums are exact, and what rank 0 brings is 0. In float32 it is a random matrix.
An x without dims is multiplied by a number.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.on_ranks import At


@dataclass(frozen=True)
class Use:
    """An x, the gradient from above, and the matrix that each rank's part multiplies x by."""

    x: Tensor
    up: Tensor
    matrix: Callable[[int], Tensor]
    frozen: bool = False  # x needs no gradient
    no_grad: bool = False


def _random(seed: int, *shape: int) -> Tensor:
    """Return positive numbers: where they are added up, no digits cancel."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def _digit(rank: int) -> Tensor:
    return torch.eye(3).double() * 10.0**rank


def _number(rank: int) -> Tensor:
    return torch.tensor(10.0**rank).double()


X = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]]).double()
UP = torch.tensor([[2.0, 3.0, 5.0], [7.0, 11.0, 13.0]]).double()
INF = "x of [] and the gradient from above are inf"
USES = {
    "x of [2, 3]": Use(X, UP, _digit),
    "x of [1, 3, 5] in bfloat16": Use(
        torch.arange(1, 16).view(1, 3, 5).bfloat16(),
        torch.arange(2, 17).view(1, 3, 5).bfloat16(),
        lambda rank: torch.eye(5).bfloat16() * rank,
    ),
    "x of [20, 3] in float32, the part's output of [20, 7]": Use(
        _random(100, 20, 3), _random(101, 20, 7), lambda rank: _random(rank, 3, 7)
    ),
    "x of []": Use(torch.tensor(3.0).double(), torch.tensor(7.0).double(), _number),
    INF: Use(torch.tensor(math.inf).double(), torch.tensor(math.inf).double(), _number),
    "an x that needs no gradient": Use(X, UP, _digit, frozen=True),
    "under torch.no_grad()": Use(X, UP, _digit, frozen=True, no_grad=True),
}


def product(x: Tensor, matrix: Tensor) -> Tensor:
    """Return what a part with this matrix returns for x."""
    return x @ matrix if x.dim() else x * matrix


def out_of(matrix: Callable[[At], Tensor]) -> Callable[[At], Tensor]:
    """Return a function of At: the output, if the parts add up to this matrix."""
    return lambda at: product(use_of(at).x, matrix(at))


def part_grad_of(times: Callable[[At], float]) -> Callable[[At], Any]:
    """Return a function of At: the gradient of what part returned, times something."""
    return lambda at: None if use_of(at).no_grad else use_of(at).up * times(at)


def x_grad_of(matrix: Callable[[At], Tensor]) -> Callable[[At], Any]:
    """Return a function of At: the gradient of x, if the parts add up to this matrix."""
    return lambda at: None if use_of(at).frozen else product(use_of(at).up, matrix(at).t())


def ones_of(times: Callable[[At], float]) -> Callable[[At], Any]:
    """Return a function of At: a gradient of x that is the same number everywhere."""
    return lambda at: None if use_of(at).frozen else torch.ones_like(use_of(at).x) * times(at)


def use_of(at: At) -> Use:
    """Return the use of this label."""
    return USES[at.label]


def own_matrix(at: At) -> Tensor:
    """Return the matrix of this rank's part."""
    return use_of(at).matrix(at.rank)


def total_matrix(at: At) -> Tensor:
    """Return the sum of all ranks' matrices."""
    return torch.stack([use_of(at).matrix(rank) for rank in range(at.world_size)]).sum(0)


def p_of(at: At) -> float:
    """Return the number of ranks."""
    return at.world_size
