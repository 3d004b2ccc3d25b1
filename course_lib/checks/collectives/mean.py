"""Exercise 4 of 04_collectives, with its planted mistakes: the mean."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import collectives
from course_lib.checks.collectives.parts import (
    SENDS,
    WORLD_SIZES,
    brings,
    everyones,
    me,
    rounded,
    run_answer,
    shared_cause,
    swap,
    total,
)
from course_lib.checks.exercise import Exercise, Mistake
from course_lib.checks.expect import expect_equal, expect_only, expect_traffic
from course_lib.ranks import Ranks

SHRINKS = "Ranks count differently: divided at every hop, the first ones shrink on the way."
Causes = tuple[tuple[Any, str], ...]


def _averaged(rank: int, answer: Callable[..., Any], n: int) -> tuple[Any, Tensor]:
    x = brings(rank, n)
    return answer(x), x


def check_mean_all_reduce(answer: Callable[..., Any]) -> str:
    """Check 1 to 4 ranks and lengths that p does and does not divide: the mean, in place."""
    uneven = "p does not divide this length, so shards differ: pass out=x to the all-gather."
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            for n in (p, p + 1, 2 * p - 1):
                raised = uneven if n % p else ""
                got = run_answer(ranks, _averaged, answer, n, raised=raised)
                _expect_mean(got, n)
                expect_only(ranks.events, *SENDS, says="Call the two halves: they send shards.")
                max_bytes = 2 * (p - 1) * -(-n // p) * 8
                says = "Send shards, not the whole tensor: reduce-scatter, then all-gather."
                expect_traffic(
                    ranks.events, p, max_messages=2 * (p - 1), max_bytes=max_bytes, says=says
                )
    return "The mean in place on 1 to 4 ranks, any length, 2 (p - 1) shards sent."


def _expect_mean(got: Sequence[tuple[Any, Tensor]], n: int) -> None:
    p = len(got)
    mean = total(p, n) / p
    says = shared_cause([returned for returned, _ in got], [_mean_causes(p, n)] * p)
    for rank, (returned, x) in enumerate(got):
        where = f"rank {rank} of {p}, {n} numbers"
        found = rounded(returned, mean, where)
        expect_equal(found, mean, where=where, look=says)
        look = "x itself has to become the mean."
        where = f"{where}, in place"
        expect_equal(rounded(x, mean, where), mean, where=where, look=look)


def _mean_causes(p: int, n: int) -> Causes:
    sums, even = total(p, n), n // p * p
    return (
        (sums, f"{p} times too large: that is the sum. Divide by the number of ranks."),
        (sums / p**2, f"{p} times too small: divided in both halves. Once is enough."),
        (
            lambda t: (
                even < n and t.shape == sums.shape and torch.equal(t[:even], (sums / p)[:even])
            ),
            "The tail is not done: p does not divide the length, so shards differ.",
        ),
        (sums / 4, "Divide by the number of ranks, whatever it is, not by 4."),
        ((sums / p).floor(), "// drops the fraction: divide with /."),
        *((_hops(p, n, by), SHRINKS) for by in (2, p)),
    )


def _hops(p: int, n: int, by: int) -> Tensor:
    """Return the result if a sum is divided at every hop on its way from rank s + 1 to rank s."""
    shards = []
    for s in range(p):
        parts = [brings((s + 1 + hop) % p, n).tensor_split(p)[s] for hop in range(p)]
        shard = parts[0]
        for part in parts[1:]:
            shard = (shard + part) / by
        shards.append(shard)
    return torch.cat(shards)


def _sum_only(x: Tensor) -> Tensor:
    return collectives.ring_all_reduce(x)


def _by_4(x: Tensor) -> Tensor:
    return collectives.ring_all_reduce(x).div_(4)


def _floored(x: Tensor) -> Tensor:
    return collectives.ring_all_reduce(x).floor_divide_(dist.get_world_size())


def _divided_twice(x: Tensor) -> Tensor:
    return collectives.ring_all_reduce(x, "mean").div_(dist.get_world_size())


def _divided_at_every_hop(x: Tensor) -> Tensor:
    rank, p = me()
    shards = list(x.clone().tensor_split(p))
    for step in range(1, p):
        mine = shards[(rank - step - 1) % p]
        incoming = torch.empty_like(mine)
        swap(shards[(rank - step) % p], (rank + 1) % p, incoming, (rank - 1) % p)
        mine.add_(incoming).div_(2)
    return collectives.ring_all_gather(shards[rank], out=x)


def _drops_the_tail(x: Tensor) -> Tensor:
    even = len(x) // dist.get_world_size() * dist.get_world_size()
    collectives.ring_all_reduce(x[:even], "mean")
    return x


def _without_out(x: Tensor) -> Tensor:
    shard = collectives.ring_reduce_scatter(x, "mean")
    return x.copy_(collectives.ring_all_gather(shard))


def _not_in_place(x: Tensor) -> Tensor:
    return collectives.ring_all_reduce(x.clone(), "mean")


def _built_in(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x.div_(dist.get_world_size())


def _whole_tensors(x: Tensor) -> Tensor:
    return x.copy_(torch.stack(everyones(x)).mean(0))


MEAN = Exercise(
    key="collectives-4",
    title="the mean",
    check=check_mean_all_reduce,
    reference=lambda x: collectives.ring_all_reduce(x, "mean"),
    mistakes=(
        Mistake("sum for mean", _sum_only, says="that is the sum"),
        Mistake("divided twice", _divided_twice, says="divided in both halves"),
        Mistake("mean divided at every hop", _divided_at_every_hop, says="divided at every hop"),
        Mistake("always by 4", _by_4, says="not by 4"),
        Mistake("whole numbers only", _floored, says="drops the fraction"),
        Mistake("drops the tail", _drops_the_tail, says="The tail is not done"),
        Mistake("gathers without out", _without_out, says="pass out=x to the all-gather"),
        Mistake("not in place", _not_in_place, says="x itself has to become the mean"),
        Mistake("the built-in one", _built_in, says="Call the two halves"),
        Mistake("sends whole tensors", _whole_tensors, says="Send shards, not the whole tensor"),
    ),
)
