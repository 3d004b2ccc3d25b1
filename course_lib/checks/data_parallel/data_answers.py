"""Exercises 3 to 5 of 05_data_parallel: the wrong answers that their checks must name."""

from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.data_parallel.naive_ddp import weighted_loss

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


def global_seed(n: int, rank: int, p: int, epoch: int) -> list[int]:
    torch.manual_seed(epoch)
    return _dealt(torch.randperm(n).tolist(), rank, p)


def own_part(n: int, rank: int, p: int, epoch: int) -> list[int]:
    part = _dealt(list(range(n)), rank, p)
    return [part[i] for i in _shuffled(len(part), epoch)]


def own_fill(n: int, rank: int, p: int, epoch: int) -> list[int]:
    order = _shuffled(n, epoch)
    mine = order[rank::p] or order[:1]
    return (mine + mine)[: -(-n // p)]


def last_fill(n: int, rank: int, p: int, epoch: int) -> list[int]:
    order = _shuffled(n, epoch)
    return (order + order[-1:] * (-n % p))[rank::p]


def filled_once(n: int, rank: int, p: int, epoch: int) -> list[int]:
    order = _shuffled(n, epoch)
    return (order + order[: -n % p])[rank::p]


def iterator(n: int, rank: int, p: int, epoch: int) -> Iterator[int]:
    return iter(_dealt(_shuffled(n, epoch), rank, p))


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


def hides_nan(loss: Tensor, num_items: int) -> Tensor:
    p = dist.get_world_size()
    return loss.nan_to_num() * (num_items * p / _reduced(num_items, dist.ReduceOp.SUM))


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


def like_the_longest(loss: Tensor, num_items: int) -> Tensor:
    return loss.nan_to_num() * (num_items / _reduced(num_items, dist.ReduceOp.MAX))


def own_total(loss: Tensor, num_items: int) -> Tensor:
    p = dist.get_world_size()
    return loss.nan_to_num() * (num_items * p / max(1, torch.tensor(num_items).item()))


def times_4(loss: Tensor, num_items: int) -> Tensor:
    return loss.nan_to_num() * (num_items * 4 / _reduced(num_items, dist.ReduceOp.SUM))


def rounded_down(loss: Tensor, num_items: int) -> Tensor:
    total = _reduced(num_items, dist.ReduceOp.SUM)
    return loss.nan_to_num() * (num_items * dist.get_world_size() // total)


def upside_down(loss: Tensor, num_items: int) -> Tensor:
    total = _reduced(num_items, dist.ReduceOp.SUM)
    return loss.nan_to_num() * (total / max(1, num_items * dist.get_world_size()))


def plain_zero(loss: Tensor, num_items: int) -> Tensor | float:
    total = _reduced(num_items, dist.ReduceOp.SUM)
    return loss * (num_items * dist.get_world_size() / total) if num_items else 0.0


def _reduced(num_items: int, op: dist.ReduceOp.RedOpType) -> int:
    number = torch.tensor(num_items)
    dist.all_reduce(number, op)
    return int(number.item())


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


def all_earlier(order: Sequence[int]) -> list[int]:
    return [sum(other != who for other in order[:number]) for number, who in enumerate(order)]


def until_the_next(order: Sequence[int]) -> list[int]:
    found = []
    for number, worker in enumerate(order):
        later = list(order[number + 1 :])
        found.append(later.index(worker) if worker in later else len(later))
    return found


def first_one_too_few(order: Sequence[int]) -> list[int]:
    last: dict[int, int] = {}
    found = []
    for number, worker in enumerate(order):
        found.append(max(0, number - last.get(worker, 0) - 1))
        last[worker] = number
    return found


def own_push_counted(order: Sequence[int]) -> list[int]:
    last: dict[int, int] = {}
    found = []
    for number, worker in enumerate(order):
        found.append(number - last.get(worker, 0))
        last[worker] = number
    return found
