"""Exercise 1 of 04_collectives, with its planted mistakes: the tree, backwards."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib import collectives
from course_lib.checks.collectives.parts import SENDS, WORLD_SIZES, brings, me, run_answer, total
from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import expect_equal, expect_only
from course_lib.core import Event
from course_lib.cost.network import num_doublings
from course_lib.ranks import Ranks

FROM_0 = "The tree ends in rank 0: count with `mine`, not with `rank`."
OVERWRITTEN = "Another rank's number alone: what came replaced your sum. Receive, then add."
MISSING = (  # on so many ranks, who is not in the sum (counted from the root), and why
    (4, (1, 3), "The ranks 1 away never came: the last round is missing."),
    (4, (3,), "The farthest came too late: hand in after adding, so the farthest go first."),
    (4, (2, 3), "The ranks 2 away never came: start with the largest `have`."),
    (3, (2,), "Number 2 never came: `have` starts at a power of two, and p is none here."),
)
WENT_TO_0 = "The sum went to rank 0: count `mine` from the root."


def _reduced(rank: int, answer: Callable[..., Any], root: int) -> tuple[Any, bool]:
    x = brings(rank, 3)
    return answer(x, root), torch.equal(x, brings(rank, 3))


def check_tree_reduce(answer: Callable[..., Any]) -> str:
    """Check every root of 1 to 4 ranks: the sum on the root, None elsewhere, and few messages."""
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            for root in range(p):
                got = run_answer(ranks, _reduced, answer, root)
                _expect_reduced(got, root)
                _expect_tree(ranks.events, p, root)
    return "Any root of 1 to 4 ranks; nobody receives more than log2(p) times."


def _expect_reduced(got: Sequence[tuple[Any, bool]], root: int) -> None:
    p = len(got)
    for rank, (result, untouched) in enumerate(got):
        where = f"rank {rank} of {p}, root {root}"
        if rank == root:
            expect_equal(result, total(p, 3), where=where, causes=_reduce_causes(p, root))
        else:
            gone = (lambda t, r=rank: r == 0 and torch.equal(t, total(len(got), 3)), WENT_TO_0)
            look = "Only the root returns the sum."
            expect_equal(result, None, where=where, causes=[gone], look=look)
        look = "Add to a copy of x."
        expect_equal(untouched, True, where=f"{where}, x is as before", look=look)


def _reduce_causes(p: int, root: int) -> tuple[tuple[Any, str], ...]:
    return (
        (lambda t: t is None and root > 0, WENT_TO_0),
        (lambda t: root > 0 and torch.equal(t, _below(root, p)), FROM_0),
        (lambda t: any(torch.equal(t, brings(r, 3)) for r in range(p) if r != root), OVERWRITTEN),
        *((_without(late, root, p), says) for size, late, says in MISSING if size == p),
    )


def _without(late: Sequence[int], root: int, p: int) -> Tensor:
    """Return the sum without some ranks, counted from the root."""
    return total(p, 3) - sum(brings((root + mine) % p, 3) for mine in late)


def _below(rank: int, p: int) -> Tensor:
    """Return the ranks whose sum a rank holds in the tree with root 0: those that sent to it."""
    held = [brings(r, 3) for r in range(p)]
    for k in reversed(range(num_doublings(p))):
        for sender in range(2**k, min(2 ** (k + 1), p)):
            held[sender - 2**k] += held[sender]
    return held[rank]


def _expect_tree(events: Sequence[Event], p: int, root: int) -> None:
    expect_only(events, *SENDS, says="Build it from send and recv.")
    rounds = num_doublings(p)
    for rank in range(p):
        kinds = [event.kind for event in events if event.rank == rank]
        sends, receives = kinds.count("send"), kinds.count("recv")
        if sends > 1 or receives > rounds:
            raise CheckFailed(
                f"rank {rank} of {p}, root {root}: sends {sends} and receives {receives} messages; "
                f"the budget is 1 and {rounds}. That is a star: let ranks add for each other on "
                "the way to the root."
            )
    needed = _num_rounds(events, p, root)
    if needed > rounds:
        raise CheckFailed(
            f"{p} ranks, root {root}: your messages need {needed} rounds, one after another; a "
            f"tree needs {rounds}. Let ranks that do not wait for each other send in the same "
            "round."
        )


def _num_rounds(events: Sequence[Event], p: int, root: int) -> int:
    """Return the least number of rounds for the messages if a rank receives one at a time.

    The sum is right and nobody sends twice, so a rank sends after all that it receives.
    """
    senders = {(event.rank, event.peer) for event in events if event.kind == "send"}

    def ready(rank: int, hops: int) -> int:
        """The round after which a rank holds all that is handed to it."""
        now, below = 0, [sender for sender, to in senders if to == rank and sender != root]
        for other in sorted(ready(sender, hops + 1) for sender in below if hops < p):
            now = max(now, other) + 1
        return now

    return ready(root, 0)


def _tree(x: Tensor, root: int, rounds: range, sums: Tensor) -> Tensor:
    """Run the right tree over the given rounds."""
    rank, p = me()
    mine, incoming = (rank - root) % p, torch.empty_like(x)
    for k in rounds:
        have = 2**k
        if have <= mine < 2 * have:
            dist.send(sums, (rank - have) % p)
        elif mine < have and mine + have < p:
            dist.recv(incoming, (rank + have) % p)
            sums += incoming
    return sums


def _rounds() -> range:
    return range(num_doublings(dist.get_world_size()))


def _root_is_0(x: Tensor, root: int = 0) -> Tensor | None:
    sums = _tree(x, 0, _rounds()[::-1], x.clone())
    return sums if dist.get_rank() == 0 else None


def _without_last_round(x: Tensor, root: int = 0) -> Tensor | None:
    sums = _tree(x, root, _rounds()[:0:-1], x.clone())
    return sums if dist.get_rank() == root else None


def _nearest_first(x: Tensor, root: int = 0) -> Tensor | None:
    sums = _tree(x, root, _rounds(), x.clone())
    return sums if dist.get_rank() == root else None


def _all_return(x: Tensor, root: int = 0) -> Tensor:
    return _tree(x, root, _rounds()[::-1], x.clone())


def _adds_to_x(x: Tensor, root: int = 0) -> Tensor | None:
    sums = _tree(x, root, _rounds()[::-1], x)
    return sums.clone() if dist.get_rank() == root else None


def _overwrites(x: Tensor, root: int = 0) -> Tensor | None:
    rank, p = me()
    mine, sums = (rank - root) % p, x.clone()
    for k in _rounds()[::-1]:
        have = 2**k
        if have <= mine < 2 * have:
            dist.send(sums, (rank - have) % p)
        elif mine < have and mine + have < p:
            dist.recv(sums, (rank + have) % p)
    return sums if rank == root else None


def _counts_from_0(x: Tensor, root: int = 0) -> Tensor | None:
    sums = _tree(x, 0, _rounds()[::-1], x.clone())
    return sums if dist.get_rank() == root else None


def _starts_too_low(x: Tensor, root: int = 0) -> Tensor | None:
    sums = _tree(x, root, range(dist.get_world_size().bit_length() - 1)[::-1], x.clone())
    return sums if dist.get_rank() == root else None


def _star(x: Tensor, root: int = 0) -> Tensor | None:
    rank, p = me()
    if rank != root:
        dist.send(x, root)
        return None
    sums, incoming = x.clone(), torch.empty_like(x)
    for other in range(p):
        if other != root:
            dist.recv(incoming, other)
            sums += incoming
    return sums


def _chain(x: Tensor, root: int = 0) -> Tensor | None:
    rank, p = me()
    mine, sums, incoming = (rank - root) % p, x.clone(), torch.empty_like(x)
    if mine + 1 < p:
        dist.recv(incoming, (rank + 1) % p)
        sums += incoming
    if mine:
        dist.send(sums, (rank - 1) % p)
    return sums if rank == root else None


TREE = Exercise(
    key="collectives-1",
    title="the tree, backwards",
    check=check_tree_reduce,
    reference=collectives.tree_reduce,
    mistakes=(
        Mistake("root assumed 0", _root_is_0, says="The sum went to rank 0"),
        Mistake("forgets the last round", _without_last_round, says="the last round is missing"),
        Mistake("nearest ranks first", _nearest_first, says="the farthest go first"),
        Mistake("everyone returns something", _all_return, says="Only the root returns the sum"),
        Mistake("adds to x", _adds_to_x, says="Add to a copy of x"),
        Mistake("overwrites", _overwrites, says="what came replaced your sum"),
        Mistake("rank for mine", _counts_from_0, says="not with `rank`"),
        Mistake("starts too low", _starts_too_low, says="starts at a power of two"),
        Mistake("everyone sends to the root", _star, says="That is a star"),
        Mistake("a chain", _chain, says="in the same round"),
    ),
)
