"""Exercise 5 of 04_collectives: right answers in another style pass."""

import pytest
import torch
import torch.distributed as dist

from course_lib.checks import find_exercise


def swap(out, incoming, partner):
    for work in (dist.irecv(incoming, partner), dist.isend(out, partner)):
        work.wait()


def farthest_first(x):
    """The partner half of all ranks away first: rank r ends with shard r."""
    rank, p = dist.get_rank(), dist.get_world_size()
    shards = list(x.tensor_split(p))
    low, high, distance = 0, p, p // 2
    bounds = []
    while distance:
        middle = (low + high) // 2
        mine, theirs = (low, middle), (middle, high)
        if rank & distance:
            mine, theirs = theirs, mine
        incoming = torch.empty_like(torch.cat(shards[slice(*mine)]))
        swap(torch.cat(shards[slice(*theirs)]), incoming, rank ^ distance)
        at = 0
        for shard in shards[slice(*mine)]:
            shard += incoming[at : at + len(shard)]
            at += len(shard)
        bounds.append((rank ^ distance, mine, theirs))
        (low, high), distance = mine, distance // 2
    for partner, mine, theirs in reversed(bounds):
        incoming = torch.empty_like(torch.cat(shards[slice(*theirs)]))
        swap(torch.cat(shards[slice(*mine)]), incoming, partner)
        for shard, values in zip(
            shards[slice(*theirs)],
            incoming.split([len(s) for s in shards[slice(*theirs)]]),
            strict=True,
        ):
            shard.copy_(values)
    return x


def by_recursion(x, k=0, part=None):
    """Halve, let the rest be summed, send the sums back; the high half is the longer one."""
    rank, p = dist.get_rank(), dist.get_world_size()
    part = x if part is None else part
    if 2**k < p:
        middle = len(part) // 2
        mine, theirs = part[:middle], part[middle:]
        if rank & 2**k:
            mine, theirs = theirs, mine
        incoming = torch.zeros_like(mine)
        swap(theirs, incoming, rank ^ 2**k)
        mine.add_(incoming)
        by_recursion(x, k + 1, mine)
        swap(mine, theirs, rank ^ 2**k)
    return x


@pytest.mark.parametrize("answer", [farthest_first, by_recursion])
def test_another_right_answer_passes(answer):
    verdict = find_exercise("collectives-5").verdict(answer)
    assert verdict, verdict
