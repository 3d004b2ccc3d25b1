"""Exercise 2 of 04_collectives, with its planted mistakes: break the circle."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

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
from course_lib.checks.exercise import Exercise, Mistake
from course_lib.checks.expect import expect_equal, expect_only, expect_traffic
from course_lib.collectives.group import exchange, member_of
from course_lib.ranks import Ranks


def pass_right(x: Tensor) -> Tensor:
    """Pass a tensor to the right in one exchange, as the course does."""
    place, incoming = member_of(None, "pass_right"), torch.empty_like(x)
    exchange(place, x, place.rank + 1, incoming, place.rank - 1)
    return incoming


def _passed(rank: int, answer: Callable[..., Any]) -> tuple[Any, bool]:
    x = brings(rank, 3)
    return answer(x), torch.equal(x, brings(rank, 3))


def check_pass_right(answer: Callable[..., Any]) -> str:
    """Check 2, 3 and 4 ranks: the left neighbor's tensor, with one message per rank."""
    for p in WORLD_SIZES[:-1]:
        with Ranks(p) as ranks:
            got = run_answer(ranks, _passed, answer)
            events = ranks.events
        says = shared_cause([incoming for incoming, _ in got], _passed_causes(p))
        for rank, (incoming, untouched) in enumerate(got):
            _expect_passed(incoming, untouched, rank, p, says)
        expect_only(events, *SENDS, says="Build it from isend and irecv.")
        expect_traffic(events, p, max_messages=1, says="Only the left neighbour's x is needed.")
    return "2, 3 and 4 ranks, one message each, no circle."


def _passed_causes(p: int) -> list[list[tuple[Any, str]]]:
    own = "That is your own tensor: return what came in."
    right = "That is the right neighbour's: receive from rank - 1."
    return [[(brings(r, 3), own), (brings((r + 1) % p, 3), right)] for r in range(p)]


def _expect_passed(incoming: Any, untouched: bool, rank: int, p: int, says: str) -> None:
    where = f"rank {rank} of {p}"
    look = says or "Did you wait for the receive before you returned?"
    left = brings((rank - 1) % p, 3)
    expect_equal(incoming, left, where=where, look=look)
    look = "Receive into another tensor: this one is still being sent."
    expect_equal(untouched, True, where=f"{where}, x is as before", look=look)


def _send_then_receive(x: Tensor) -> Tensor:
    rank, p = me()
    incoming = torch.empty_like(x)
    dist.send(x, (rank + 1) % p)
    dist.recv(incoming, (rank - 1) % p)
    return incoming


def _from_the_right(x: Tensor) -> Tensor:
    rank, p = me()
    incoming = torch.empty_like(x)
    swap(x, (rank - 1) % p, incoming, (rank + 1) % p)
    return incoming


def _own(x: Tensor) -> Tensor:
    rank, p = me()
    swap(x, (rank + 1) % p, torch.empty_like(x), (rank - 1) % p)
    return x


def _into_x(x: Tensor) -> Tensor:
    rank, p = me()
    swap(x.clone(), (rank + 1) % p, x, (rank - 1) % p)
    return x


def _to_everyone(x: Tensor) -> Tensor:
    rank, p = me()
    return everyones(x)[(rank - 1) % p]


CIRCLE = Exercise(
    key="collectives-2",
    title="break the circle",
    check=check_pass_right,
    reference=pass_right,
    mistakes=(
        Mistake("blocking send on all ranks", _send_then_receive, says="All of you send first"),
        Mistake("from the right", _from_the_right, says="receive from rank - 1"),
        Mistake("returns its own", _own, says="That is your own tensor"),
        Mistake("receives into x", _into_x, says="this one is still being sent"),
        Mistake("sends to everyone", _to_everyone, says="Only the left neighbour's"),
    ),
)
