"""Exercise ranks-3 of notebook 00_ranks: the mean over all ranks, the first collective.

Rank r contributes ONE * 10**r. Every sum, and every third or quarter of one, is exact in float32,
and no mean is a whole number.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
import torch.distributed as dist

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import Cause, expect_equal, expect_held, held_bytes, run
from course_lib.core import COMMUNICATION_KINDS, Event
from course_lib.ranks import Ranks

Tensor = torch.Tensor
WORLD_SIZES = (1, 2, 3, 4)
ONE = torch.tensor([1.5, 3.75, 8.25])
RTOL = 5e-7  # 1/3 is no float32: the 8 roundings of `x * (1 / p)` on 4 ranks, 6e-8 each


def calls_of(events: Iterable[Event], rank: int) -> list[Event]:
    """Return the calls with which one rank communicates."""
    return [event for event in events if event.rank == rank and event.kind in COMMUNICATION_KINDS]


def expect_one_call(events: Sequence[Event], p: int, num_bytes: int, says: str) -> None:
    """Demand that each rank makes at most one call, with at most about that many bytes."""
    for rank in range(p):
        calls = calls_of(events, rank)
        for call in calls:
            if len(calls) > 1 or call.num_bytes > num_bytes:
                many = f"{len(calls)} calls, the first" if len(calls) > 1 else "one call:"
                raise CheckFailed(
                    f"rank {rank} of {p} makes {many} {call.kind} of {call.num_bytes} bytes; "
                    f"the budget is one call of {num_bytes} bytes. {says}"
                )


def mean_over_ranks(x: Tensor) -> Tensor:
    """Return the mean of x over all ranks, on every rank; x stays as it is."""
    mean = x.clone()
    dist.all_reduce(mean)
    return mean / dist.get_world_size()


def _mean(rank: int, answer: Callable[[Tensor], Tensor]) -> tuple[Tensor, Tensor, int]:
    x = ONE * 10.0**rank
    mean = answer(x)
    return mean, x, held_bytes(mean) if isinstance(mean, Tensor) else 0


def check_mean_over_ranks(answer: Callable[[Tensor], Tensor]) -> str:
    """Check value, x untouched, one call of the size of x, only the result kept alive."""
    budget = "all_reduce brings the sum to every rank; nobody needs a copy of everybody's tensor."
    for p in WORLD_SIZES:
        total = ONE * sum(10.0**rank for rank in range(p))
        with Ranks(p) as ranks:
            found = run(ranks, _mean, answer)
            events = ranks.events
        for rank, (mean, x, held) in enumerate(found):
            where = f"rank {rank} of {p}"
            look = "Print what you have before and after the all_reduce."
            own = ONE * 10.0**rank
            if not _close(mean, total / p):
                causes = _mean_causes(total, p, rank, own)
                expect_equal(mean, total / p, where=where, causes=causes, look=look)
            changed = "all_reduce works in place: give it a clone of x."
            expect_equal(x, own, where=f"{where}, x afterwards", look=changed)
            expect_held(held, mean.numel() * mean.element_size(), where=where)
        expect_one_call(events, p, 12, budget)
    return "The same mean on 1 to 4 ranks, in one call of 12 bytes; x stays as it was."


def _close(mean: object, expected: Tensor) -> bool:
    if not isinstance(mean, Tensor) or (mean.dtype, mean.shape) != (expected.dtype, expected.shape):
        return False
    return torch.allclose(mean, expected, rtol=RTOL, atol=0)


def _mean_causes(total: Tensor, p: int, rank: int, own: Tensor) -> list[Cause]:
    rounds = "`//` rounds down to a whole number; divide with `/`."
    rounded_first = ONE * 0 + sum(ONE * 10.0**other // p for other in range(p))
    causes: list[Cause] = [
        (total // p, rounds),
        (rounded_first, rounds),
        (total / p / p, "That is divided by the number of ranks twice."),
        (total, "That is the sum; for the mean, divide it by the number of ranks."),
        (own, "That is this rank's own x: nothing came from the others."),
        (own / p, "That is this rank's own x, divided: nothing came from the others."),
    ]
    if p == 1:
        always_4 = "You divide by 4, which is right on 4 ranks only: use dist.get_world_size()."
        causes.append((total / 4, always_4))
    if rank > 0:
        only_one = "Rank 0 is right and this one is not: every rank has to end with the mean."
        causes.append((lambda mean: mean.shape == total.shape, only_one))
    return causes


def _sum(x: Tensor) -> Tensor:
    total = x.clone()
    dist.all_reduce(total)
    return total


def _in_place(x: Tensor) -> Tensor:
    dist.all_reduce(x)
    return x / dist.get_world_size()


def _divides_by_four(x: Tensor) -> Tensor:
    return _sum(x) / 4


def _rounds_down(x: Tensor) -> Tensor:
    return _sum(x) // dist.get_world_size()


def _divides_twice(x: Tensor) -> Tensor:
    return mean_over_ranks(x) / dist.get_world_size()


def _nothing_sent(x: Tensor) -> Tensor:
    return x / dist.get_world_size()


def _on_rank_0_only(x: Tensor) -> Tensor:
    total = x.clone()
    dist.reduce(total, dst=0)
    return total / dist.get_world_size()


def _gathers_everything(x: Tensor) -> Tensor:
    everybody = [torch.empty_like(x) for _ in range(dist.get_world_size())]
    dist.all_gather(everybody, x)
    return torch.stack(everybody).mean(0)


MEAN = Exercise(
    key="ranks-3",
    title="the mean over all ranks",
    check=check_mean_over_ranks,
    reference=mean_over_ranks,
    mistakes=(
        Mistake("the sum", _sum, "That is the sum; for the mean, divide"),
        Mistake("x is overwritten", _in_place, "all_reduce works in place"),
        Mistake("divides by 4", _divides_by_four, "right on 4 ranks only"),
        Mistake("rounds down", _rounds_down, "`//` rounds down"),
        Mistake("divides twice", _divides_twice, "divided by the number of ranks twice"),
        Mistake("nothing is sent", _nothing_sent, "nothing came from the others"),
        Mistake("on rank 0 only", _on_rank_0_only, "Rank 0 is right and this one is not"),
        Mistake("gathers everything", _gathers_everything, "a copy of everybody's tensor"),
    ),
)
