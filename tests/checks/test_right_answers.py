"""Right answers in another style pass: fractions, a shorter dtype, the library's own value."""

from fractions import Fraction

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

from course_lib.accumulation.noise_scale import estimate_noise, noise_scale
from course_lib.checks import find_exercise
from course_lib.checks.right_answer import right_answer


def in_fractions(num_params, dp, tp, pp, zero):
    states = {3: 2, 2: 4, 1: 12}
    return sum(
        Fraction(num_params * each, tp * pp * (dp if zero >= stage else 1) * 2**30)
        for stage, each in states.items()
    )


def inf_without_a_gradient(steps, micro_batch):
    """Returns inf, as the library, where the estimate of |G|^2 is not above 0."""
    sizes = [(micro_batch, len(grads) * micro_batch) for grads in steps]
    return noise_scale(
        estimate_noise(
            grads.square().sum(1).mean().item(),
            grads.mean(0).square().sum().item(),
            small_batch=small,
            big_batch=big,
        )
        for grads, (small, big) in zip(steps, sizes, strict=True)
    )


def squares_in_float32(grads, max_norm):
    norms = [grad.float().norm() for grad in grads]
    squares = sum((norm.square() for norm in norms), torch.zeros(()))
    dist.all_reduce(squares)
    norm = squares.sqrt().item()
    for grad in grads:
        grad.mul_(max_norm / norm if norm > max_norm else 1)
    return norm


def in_whole_bytes(num_params, dp, tp, pp, zero):
    mine = num_params // (tp * pp)
    parts = zip((12, 4, 2), (1, 2, 3), strict=True)
    return sum(each * mine // (dp if zero >= stage else 1) for each, stage in parts) / 2**30


def in_padded_shards(num_params, dp, tp, pp, zero):
    mine = -(-num_params // (tp * pp))
    parts = zip((12, 4, 2), (1, 2, 3), strict=True)
    return sum(each * -(-mine // (dp if zero >= stage else 1)) for each, stage in parts) / 2**30


def as_a_str_of_numpy(mesh, events, ranks_per_node):
    found = right_answer("mesh-4")(mesh, events, ranks_per_node)
    return found and np.str_(found)


def norm_in_the_gradients_dtype(mesh, parts, max_norm):
    own = [grad for grad, split, first in parts if first and (split or not mesh.index("tp"))]
    squares = sum((grad.norm().float() ** 2 for grad in own), torch.zeros(()))
    for axis in ("pp", "tp"):
        dist.all_reduce(squares, group=mesh.group(axis))
    norm = squares.sqrt()
    for grad, _, _ in parts:
        grad.mul_(max_norm / norm if norm > max_norm else 1)
    return norm


def clips_as_torch_does(mesh, parts, max_norm):
    own = [grad for grad, split, first in parts if first and (split or not mesh.index("tp"))]
    squares = sum((grad.double().square().sum() for grad in own), torch.zeros(()).double())
    for axis in ("tp", "pp"):
        dist.all_reduce(squares, group=mesh.group(axis))
    norm = squares.sqrt()
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for grad, *_ in parts:
        grad.mul_(factor.to(grad.dtype))
    return norm


class OfTheData:
    """Gathers what is in shard.data at the time."""

    def __init__(self, param):
        self.shape, self.p = param.shape, dist.get_world_size()
        parts = [*param.data.chunk(self.p), *[param.data[:0]] * self.p]
        self.rows = len(parts[0])
        self.shard = nn.Parameter(parts[dist.get_rank()].clone(), param.requires_grad)

    def gather(self):
        parts = [self.shard.data.new_zeros(self.rows, *self.shape[1:]) for _ in range(self.p)]
        mine = torch.zeros_like(parts[0])
        mine[: len(self.shard)] = self.shard.data
        dist.all_gather(parts, mine)
        return torch.cat(parts)[: self.shape[0]].clone()


class ShapeOnMeta:
    """Keeps the shape as a tensor without memory."""

    def __init__(self, param):
        self.like, p = param.detach().to("meta"), dist.get_world_size()
        parts = [*param.detach().chunk(p), *[param.detach()[:0]] * p]
        self.rows, mine = len(parts[0]), parts[dist.get_rank()]
        self.shard = nn.Parameter(mine.clone(), param.requires_grad)

    def gather(self):
        padded = self.shard.new_zeros(self.rows, *self.like.shape[1:])
        padded[: len(self.shard)] = self.shard.detach()
        whole = padded.new_empty(dist.get_world_size() * self.rows, *self.like.shape[1:])
        dist.all_gather_single(whole, padded)
        return whole[: len(self.like)]


@pytest.mark.parametrize(
    ("key", "answer"),
    [
        ("planner-1", in_fractions),
        ("planner-1", in_whole_bytes),
        ("planner-1", in_padded_shards),
        ("mesh-3", norm_in_the_gradients_dtype),
        ("mesh-3", clips_as_torch_does),
        ("mesh-4", as_a_str_of_numpy),
        ("fsdp-1", OfTheData),
        ("accumulation-6", inf_without_a_gradient),
        ("zero-5", squares_in_float32),
        ("fsdp-1", ShapeOnMeta),
    ],
)
def test_another_right_answer_passes(key, answer):
    assert find_exercise(key).verdict(answer)
