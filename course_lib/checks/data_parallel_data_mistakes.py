"""Exercises 3 to 5 of 05_data_parallel: the wrong answers that their checks must name."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.data_parallel import weighted_loss

# --- data_parallel-3: the sampler


def same_on_every_rank(n: int, rank: int, p: int, epoch: int) -> list[int]:
    return _shuffled(n, epoch)[: -(-n // p)]


def own_shuffle(n: int, rank: int, p: int, epoch: int) -> list[int]:
    order = _shuffled(n, 100 * rank + epoch)
    return _dealt(order, rank, p)


def epoch_forgotten(n: int, rank: int, p: int, epoch: int) -> list[int]:
    return _dealt(_shuffled(n, 0), rank, p)


def not_filled_up(n: int, rank: int, p: int, epoch: int) -> list[int]:
    return _shuffled(n, epoch)[rank::p]


def tail_dropped(n: int, rank: int, p: int, epoch: int) -> list[int]:
    return _shuffled(n, epoch)[rank : n // p * p : p]


def never_shuffled(n: int, rank: int, p: int, epoch: int) -> list[int]:
    return _dealt(list(range(n)), rank, p)


def everything(n: int, rank: int, p: int, epoch: int) -> list[int]:
    order = _shuffled(n, epoch)
    return order[rank:] + order[:rank]


def by_chance(n: int, rank: int, p: int, epoch: int) -> list[int]:
    return _dealt(torch.randperm(n).tolist(), rank, p)


def _shuffled(n: int, seed: int) -> list[int]:
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed)).tolist()


def _dealt(order: Sequence[int], rank: int, p: int) -> list[int]:
    return [order[i % len(order)] for i in range(rank, -(-len(order) // p) * p, p)]


# --- data_parallel-4: the weight of an uneven batch


def equal_weights(loss: Tensor, num_items: int) -> Tensor:
    return loss if num_items else loss.nan_to_num() * 0


def part_of_all(loss: Tensor, num_items: int) -> Tensor:
    return weighted_loss(loss, num_items) / dist.get_world_size()


def times_items(loss: Tensor, num_items: int) -> Tensor:
    return loss * num_items if num_items else loss.nan_to_num() * 0


def sums_the_losses(loss: Tensor, num_items: int) -> Tensor:
    total = weighted_loss(loss, num_items)
    mean = total.detach().clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size() + 0 * total


def nan_of_no_items(loss: Tensor, num_items: int) -> Tensor:
    total = torch.tensor(num_items)
    dist.all_reduce(total)
    return loss * (num_items * dist.get_world_size() / total.item())


def skips_no_items(loss: Tensor, num_items: int) -> Tensor:
    return weighted_loss(loss, num_items) if num_items else loss.nan_to_num() * 0


def detached(loss: Tensor, num_items: int) -> Tensor:
    return weighted_loss(loss, num_items).detach()


def items_of_the_first(loss: Tensor, num_items: int) -> Tensor:
    first = torch.tensor(num_items)
    dist.broadcast(first, 0)
    return loss.nan_to_num() * (num_items / max(1, first.item()))


def gathers_all(loss: Tensor, num_items: int) -> Tensor:
    everyones = [torch.zeros(8) for _ in range(dist.get_world_size())]
    dist.all_gather(everyones, torch.full((8,), float(num_items)))
    return weighted_loss(loss, num_items)


# --- data_parallel-5: staleness


def always_the_others(order: Sequence[int]) -> list[int]:
    return [len(set(order)) - 1] * len(order)


def own_counted(order: Sequence[int]) -> list[int]:
    return [
        number - max((k for k in range(number) if order[k] == worker), default=-1)
        for number, worker in enumerate(order)
    ]


def never_pulls_again(order: Sequence[int]) -> list[int]:
    return list(range(len(order)))


def different_others(order: Sequence[int]) -> list[int]:
    found = []
    for number, worker in enumerate(order):
        since = max((k + 1 for k in range(number) if order[k] == worker), default=0)
        found.append(len(set(order[since:number])))
    return found


def first_is_fresh(order: Sequence[int]) -> list[int]:
    found = []
    for number, worker in enumerate(order):
        since = max((k + 1 for k in range(number) if order[k] == worker), default=number)
        found.append(number - since)
    return found


def own_steps(order: Sequence[int]) -> list[int]:
    return [list(order[:number]).count(worker) for number, worker in enumerate(order)]
