"""Exercise 3 of 04_collectives, with its planted mistakes: all-gather."""

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
    run_answer,
    shared_cause,
    swap,
)
from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import (
    expect_equal,
    expect_held,
    expect_only,
    expect_traffic,
    held_bytes,
)
from course_lib.core import Event
from course_lib.ranks import RankError, Ranks

INTO_WHOLE = (
    "Receive into shards[i], or shards[i].copy_() it: shards[i] = ... writes nothing there."
)
OFF_BY_ONE = "A shard is in the wrong place, or left before it came: is an index off by one?"
ONE_SHARD = "Send one shard a step, not the whole tensor."
Causes = tuple[tuple[Any, str], ...]


def _gathered(rank: int, answer: Callable[..., Any]) -> tuple[Any, int]:
    whole = answer(brings(rank, 2))
    return whole, held_bytes(whole) if isinstance(whole, Tensor) else 0


def check_ring_all_gather(answer: Callable[..., Any]) -> str:
    """Check 1 to 4 ranks: all shards in order, p - 1 messages of one shard to the right."""
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            got = run_answer(ranks, _gathered, answer, raised=_why_raised)
            events = ranks.events
        wanted = torch.cat([brings(rank, 2) for rank in range(p)])
        found = [whole for whole, _ in got]
        look = shared_cause(found, [_gather_causes(rank, p) for rank in range(p)]) or OFF_BY_ONE
        for rank, (whole, held) in enumerate(got):
            expect_equal(whole, wanted, where=f"rank {rank} of {p}", look=look)
            expect_held(held, 16 * p, where=f"rank {rank} of {p}")
        expect_only(events, *SENDS, says="Build it from exchange.")
        expect_traffic(events, p, max_messages=p - 1, max_bytes=16 * (p - 1), says=ONE_SHARD)
        _expect_ring(events, p)
    return "1 to 4 ranks, p - 1 messages of one shard to the right."


def _why_raised(error: RankError) -> str:
    assigned = ("TypeError", "'tuple' object does not support item assignment")
    return INTO_WHOLE if assigned in error.failures.values() else ""


def _gather_causes(rank: int, p: int) -> Causes:
    forth, back = (
        torch.cat([brings((rank + sign * i) % p, 2) for i in range(p)]) for sign in (1, -1)
    )
    unfinished = torch.cat([brings(r, 2) * (r != (rank + 1) % p) for r in range(p)])
    alone = torch.cat([brings(r, 2) * (r == rank) for r in range(p)])
    rotated = "Yours comes first on every rank: shard i belongs to place i, wherever it is."
    return (
        (forth, rotated),
        (back, rotated),
        (unfinished, "The right neighbour's shard never came: the last step is missing."),
        (alone, "Only your own is there: what came was not written into whole. " + INTO_WHOLE),
    )


def _expect_ring(events: Sequence[Event], p: int) -> None:
    for event in events:
        if event.kind == "send" and event.peer != (event.rank + 1) % p:
            if event.peer == (event.rank - 1) % p:
                raise CheckFailed(
                    f"rank {event.rank} of {p} sends to rank {event.peer}, its left neighbour. "
                    "Send to the right neighbour, and receive from the left one."
                )
            raise CheckFailed(
                f"rank {event.rank} of {p} sends to rank {event.peer}. On a ring you talk to your "
                "neighbours only: pass on what came from the left."
            )


def _gather(shard: Tensor, num_steps: int, late: int = 0) -> Tensor:
    """Run an all-gather of `num_steps` steps that stores received shards `late` indices off."""
    rank, p = me()
    whole = shard.new_zeros(p, len(shard))
    whole[rank] = shard
    for step in range(num_steps):
        place = whole[(rank - 1 - step + late) % p]
        swap(whole[(rank - step) % p].clone(), (rank + 1) % p, place, (rank - 1) % p)
    return whole.flatten()


def _index_off_by_one(shard: Tensor) -> Tensor:
    return _gather(shard, dist.get_world_size() - 1, late=1)


def _without_last_step(shard: Tensor) -> Tensor:
    return _gather(shard, dist.get_world_size() - 2)


def _sends_the_whole_tensor(shard: Tensor) -> Tensor:
    rank, p = me()
    whole = shard.new_zeros(p, len(shard))
    whole[rank] = shard
    for step in range(p - 1):
        incoming, left = torch.empty_like(whole), (rank - 1 - step) % p
        swap(whole, (rank + 1) % p, incoming, (rank - 1) % p)
        whole[left] = incoming[left]
    return whole.flatten()


def _own_shard_first(shard: Tensor) -> Tensor:
    rank, p = me()
    right = _gather(shard, p - 1).view(p, -1)
    return right[[(rank - i) % p for i in range(p)]].flatten()


def _to_everyone(shard: Tensor) -> Tensor:
    return torch.cat(everyones(shard))


def _keeps_too_much(shard: Tensor) -> Tensor:
    right = _gather(shard, dist.get_world_size() - 1)
    return torch.cat([right, right])[: len(right)]


def _not_written(shard: Tensor) -> Tensor:
    rank, p = me()
    whole = shard.new_zeros(p * len(shard))
    shards = list(whole.tensor_split(p))
    shards[rank].copy_(shard)
    for step in range(p - 1):
        incoming = torch.empty_like(shard)
        swap(shards[(rank - step) % p], (rank + 1) % p, incoming, (rank - 1) % p)
        shards[(rank - step - 1) % p] = incoming
    return whole


def _to_the_left(shard: Tensor) -> Tensor:
    rank, p = me()
    whole = shard.new_zeros(p, len(shard))
    whole[rank] = shard
    for step in range(p - 1):
        place = whole[(rank + 1 + step) % p]
        swap(whole[(rank + step) % p], (rank - 1) % p, place, (rank + 1) % p)
    return whole.flatten()


GATHER = Exercise(
    key="collectives-3",
    title="all-gather",
    check=check_ring_all_gather,
    reference=collectives.ring_all_gather,
    mistakes=(
        Mistake("shard index off by one", _index_off_by_one, says="is an index off by one"),
        Mistake("sends the whole tensor", _sends_the_whole_tensor, says="Send one shard a step"),
        Mistake("forgets the last step", _without_last_step, says="the last step is missing"),
        Mistake("own shard first", _own_shard_first, says="Yours comes first on every rank"),
        Mistake("sends to everyone", _to_everyone, says="talk to your neighbours only"),
        Mistake("not written into whole", _not_written, says="was not written into whole"),
        Mistake("to the left", _to_the_left, says="Send to the right neighbour"),
        Mistake("keeps twice the memory", _keeps_too_much, says="return a clone"),
    ),
)
