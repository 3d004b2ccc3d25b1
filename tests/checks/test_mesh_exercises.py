"""The exercises of lesson 11: right answers in another style pass, subtle wrong ones do not."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from course_lib.checks import CheckFailed, find_exercise


def by_table(sizes, rank, axis):
    grid = np.arange(int(np.prod(list(sizes.values())))).reshape(list(sizes.values()))
    place = [index[0] for index in np.where(grid == rank)]
    number = list(sizes).index(axis)
    place[number] = slice(None)
    return tuple(grid[tuple(place)])


def together(mesh, loss, grads):
    """One flat message, in another order, and a float."""
    flat = torch.cat([grad.flatten() for grad in reversed(grads)])
    flat /= mesh.size("dp")
    dist.all_reduce(flat, group=mesh.group("dp"))
    for grad in reversed(grads):
        grad.copy_(flat[: grad.numel()].view_as(grad))
        flat = flat[grad.numel() :]
    total = torch.tensor(0.0 if loss is None else float(loss), dtype=torch.float64)
    dist.all_reduce(total)
    return total.item() / mesh.size("dp") / mesh.size("tp")


def over_the_world(mesh, parts, max_norm):
    """Adds over all ranks, also along dp, and takes one dp-th."""
    here = [g for g, split, first in parts if first and (split or not mesh.index("tp"))]
    squares = torch.tensor(sum((float(grad.double().square().sum()) for grad in here), start=0.0))
    dist.all_reduce(squares)
    norm = (squares / mesh.size("dp")).sqrt().item()
    if norm > max_norm:
        for grad, _, _ in parts:
            grad.mul_(max_norm / (norm + 1e-6))
    return norm


def by_group(mesh, events, ranks_per_node):
    seconds = {}
    for event in events:
        if event.rank or len(event.group) < 2:
            continue
        if event.group[0] // ranks_per_node == event.group[-1] // ranks_per_node:
            continue
        here, there = (mesh.coordinates(rank) for rank in (event.group[0], event.group[-1]))
        axis, *more = (name for name in mesh.sizes if here[name] != there[name])
        if more:
            continue
        seconds[axis] = seconds.get(axis, 0) + (event.end_s - event.start_s)
    return sorted(seconds, key=lambda axis: -seconds[axis])[0] if seconds else None


RIGHT = {"1": by_table, "2": together, "3": over_the_world, "4": by_group}


@pytest.mark.parametrize("number", RIGHT)
def test_a_right_answer_in_another_style_passes(number):
    assert find_exercise(f"mesh-{number}").verdict(RIGHT[number])


def only_on_tp_0(mesh, parts, max_norm):
    """Right norm, but only the rank that counts scales what is whole along tp."""
    here = [g for g, split, first in parts if first and (split or not mesh.index("tp"))]
    squares = sum(((grad**2).sum() for grad in here), torch.zeros((), dtype=torch.float64))
    for axis in ("tp", "pp"):
        dist.all_reduce(squares, group=mesh.group(axis))
    norm = squares.sqrt()
    for grad in here:
        grad *= min(1.0, max_norm / norm)
    return norm


def loss_of_the_first_stage(mesh, loss, grads):
    """Broadcasts along pp from rank 0 of the group, which is the first stage."""
    total = torch.zeros((), dtype=torch.float64) if loss is None else loss.clone()
    group = mesh.group("pp")
    dist.broadcast(total, dist.get_process_group_ranks(group)[0], group=group)
    for value in (total, *grads):
        dist.all_reduce(value, group=mesh.group("dp"))
        value /= mesh.size("dp")
    return total


@pytest.mark.parametrize(
    ("number", "answer"), [("3", only_on_tp_0), ("2", loss_of_the_first_stage)]
)
def test_a_subtle_wrong_one_does_not(number, answer):
    with pytest.raises(CheckFailed):
        find_exercise(f"mesh-{number}").verdict(answer)
