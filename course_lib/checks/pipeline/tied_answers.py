"""The right answer to exercise 5 of 08_pipeline, and wrong ones that its check must name."""

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from course_lib.checks.exercise import Mistake

NUM_NUMBERS = 6
Weight = nn.Parameter | None


def sum_tied(weight: Weight, ends: Any) -> None:
    """Sum the gradients of the two ranks that hold a copy: the right answer."""
    if weight is not None and weight.grad is not None:
        dist.all_reduce(weight.grad, group=ends)


def _mean(weight: Weight, ends: Any) -> None:
    sum_tied(weight, ends)
    if weight is not None and weight.grad is not None:
        weight.grad /= dist.get_world_size(ends)


def _everybody(weight: Weight, ends: Any) -> None:
    grad = torch.zeros(NUM_NUMBERS).double() if weight is None else weight.grad
    if grad is not None:
        dist.all_reduce(grad)


def _no_group(weight: Weight, ends: Any) -> None:
    if weight is not None and weight.grad is not None:
        dist.all_reduce(weight.grad)


def _one_way(weight: Weight, ends: Any) -> None:
    """Send to the last stage, and not back."""
    last = dist.get_world_size() - 1
    if weight is not None and weight.grad is not None and last > 0:
        if dist.get_rank() == 0:
            dist.send(weight.grad, last)
        else:
            half = torch.empty_like(weight.grad)
            dist.recv(half, 0)
            weight.grad += half


def _copied(weight: Weight, ends: Any) -> None:
    """Put the first stage's gradient in place of the last one's."""
    if weight is not None and weight.grad is not None:
        dist.broadcast(weight.grad, src=0, group=ends)


def _weights(weight: Weight, ends: Any) -> None:
    if weight is not None:
        dist.all_reduce(weight.data, group=ends)


def _weights_mean(weight: Weight, ends: Any) -> None:
    """Make the copies equal after the step by averaging them."""
    if weight is not None:
        dist.all_reduce(weight.data, group=ends)
        weight.data /= dist.get_world_size(ends)


def _nothing(weight: Weight, ends: Any) -> None:
    pass


def _frozen_forgotten(weight: Weight, ends: Any) -> None:
    if weight is not None:
        grad: Any = weight.grad
        dist.all_reduce(grad, group=ends)


def _middle_forgotten(weight: Weight, ends: Any) -> None:
    copy: Any = weight
    if copy.grad is not None:
        dist.all_reduce(copy.grad, group=ends)


def _doubled(weight: Weight, ends: Any) -> None:
    """Double the gradient, which is right for two copies; with one process there is one."""
    sum_tied(weight, ends)
    if weight is not None and weight.grad is not None and dist.get_world_size() == 1:
        weight.grad *= 2


def _twice(weight: Weight, ends: Any) -> None:
    sum_tied(weight, ends)
    sum_tied(weight, ends)


def _frozen_zeros(weight: Weight, ends: Any) -> None:
    if weight is not None and weight.grad is None:
        weight.grad = torch.zeros_like(weight)
    elif weight is not None:
        sum_tied(weight, ends)


def _rounded(weight: Weight, ends: Any) -> None:
    if weight is not None and weight.grad is not None:
        grad = weight.grad.float()
        dist.all_reduce(grad, group=ends)
        weight.grad.copy_(grad)


def _copy_summed(weight: Weight, ends: Any) -> None:
    if weight is not None and weight.grad is not None:
        dist.all_reduce(weight.grad.clone(), group=ends)


def _to_the_first(weight: Weight, ends: Any) -> None:
    if weight is not None and weight.grad is not None:
        dist.reduce(weight.grad, 0, group=ends)


MISTAKES = (
    Mistake("the mean", _mean, "That is the mean"),
    Mistake("everybody takes part", _everybody, "Only the ranks of `ends`"),
    Mistake("no group", _no_group, "group=ends"),
    Mistake("one way", _one_way, "this rank's own half"),
    Mistake("copied", _copied, "where is the other one's"),
    Mistake("the weights", _weights, "the weight has changed"),
    Mistake("the mean of the weights", _weights_mean, "this rank's own half"),
    Mistake("nothing", _nothing, "this rank's own half"),
    Mistake("frozen forgotten", _frozen_forgotten, "grad is None"),
    Mistake("middle forgotten", _middle_forgotten, "In the middle weight is None"),
    Mistake("doubled on one rank", _doubled, "there is one copy"),
    Mistake("added twice", _twice, "Added twice"),
    Mistake("frozen with zeros", _frozen_zeros, "leave weight.grad None"),
    Mistake("half of the digits", _rounded, "last digits are lost"),
    Mistake("a copy summed", _copy_summed, "in weight.grad itself"),
    Mistake("to the first stage only", _to_the_first, "Both ends need the sum"),
)
