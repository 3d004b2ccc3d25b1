"""Exercise 1 of 04_collectives: the tree, backwards."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.collectives.parts import (
    ALIASED,
    ALL_WAITED,
    DROPPED,
    MESSAGES,
    NOT_A_TENSOR,
    NOT_ALIASED,
    TROUBLE,
    UNLIKE,
    WORLDS,
    Given,
    count,
    given,
    me,
    rounds,
)
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import (
    DIGITS_LOST,
    Demand,
    Numbers,
    OnlyKinds,
    Untouched,
)
from course_lib.checks.on_ranks import At, Observed, OnRanks, watch
from course_lib.cost.network import num_doublings

FROM_0 = Cause("The tree ends in rank 0: count with `mine`, not with `rank`.")
WENT_TO_0 = Cause("The sum went to rank 0: count `mine` from the root.")
OVERWRITTEN = Cause("Another rank's number alone: what came replaced your sum. Receive, then add.")
LAST_ROUND = Cause("The ranks 1 away never came: the last round is missing.")
TOO_LATE = Cause("The farthest came too late: hand in after adding, so the farthest go first.")
FIRST_ROUND = Cause("The ranks 2 away never came: start with the largest `have`.")
STARTS_LOW = Cause("Number 2 never came: `have` starts at a power of two, and p is none here.")
FOUR_RANKS = Cause("Number 4 never came: the number of rounds follows from p, whatever it is.")
ONLY_ROOT = Cause("Only the root returns the sum, whatever it is: all others return None.")
ADDS_TO_X = Cause("Add to a copy of x.")
ZEROS = Cause("Zeros have a sum, too: the root returns it, whatever the numbers are.")
KEEP_DTYPE = Cause("Add up in the dtype of x: x.clone() and torch.empty_like(x) have it.")
STAR = Cause("That is a star: let ranks add for each other on the way to the root.")
ONE_BY_ONE = Cause("Let ranks that do not wait for each other send in the same round.")
FROM_MESSAGES = Cause("Build it from send and recv.")


def _reduce(rank: int, answer: Callable[..., Any], given: Given, root: int) -> dict[str, Observed]:
    """Call the answer; root 0 is the default."""
    x, roots = given.of(rank), [root] if root else []
    return {f"root {root}, {given}": watch(answer, x, *roots, x=x)}


def _runs(p: int) -> list[dict[str, Any]]:
    others = Given((2, 3), torch.int64), Given(dtype=torch.float32, rank_1=True)
    return [
        *({"given": Given(), "root": root} for root in range(p)),
        *({"given": given, "root": p - 1} for given in others),
    ]


def _on_root(value: Callable[[At], Tensor]) -> Callable[[At], Tensor | None]:
    return lambda at: value(at) if at.rank == at.options["root"] else None


def _total(at: At) -> Tensor:
    return given(at).total(at.world_size)


def _without(p: int, *late: int) -> Callable[[At], Any]:
    """Return the sum on p ranks without some, counted from the root."""

    def value(at: At) -> Tensor:
        late_ranks = [(at.options["root"] + mine) % p for mine in late]
        missing = [given(at).of(rank) for rank in late_ranks]
        return _total(at) - sum(missing) if at.world_size == p else torch.empty(0)

    return _on_root(value)


def _held(at: At) -> Tensor:
    """Return what a rank holds in the tree with root 0: its own, and what was sent to it."""
    held = [given(at).of(rank) for rank in range(at.world_size)]
    for k in reversed(range(num_doublings(at.world_size))):
        for sender in range(2**k, min(2 ** (k + 1), at.world_size)):
            held[sender - 2**k] += held[sender]
    return held[at.rank]


def _of_another(at: At, got: Any, _item: None) -> bool:
    others = set(range(at.world_size)) - {at.rank}
    return any(torch.equal(got, given(at).of(rank)) for rank in others)


def _none_for_zeros(at: At, got: Any, _item: None) -> bool:
    return got is None and given(at).rank_1


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


ROUNDS = "(p - 1).bit_length()"
FROM_ROOT = "mine = (rank - root) % p"
RESULT = "total if rank == root else None"

TREE = Exercise(
    key="collectives-1",
    title="the tree, backwards",
    check=OnRanks(
        observe_on_rank=_reduce,
        worlds=WORLDS,
        runs=_runs,
        trouble=TROUBLE,
        expect=(
            ALL_WAITED,
            Numbers(
                "value",
                _on_root(_total),
                dtype=KEEP_DTYPE,
                causes=(
                    (WENT_TO_0, lambda at: None if at.rank else _total(at)),
                    (FROM_0, _on_root(_held)),
                    (LAST_ROUND, _without(4, 1, 3)),
                    (TOO_LATE, _without(4, 3)),
                    (FIRST_ROUND, _without(4, 2, 3)),
                    (STARTS_LOW, _without(3, 2)),
                    (FOUR_RANKS, _without(5, 4)),
                ),
                predicates=(NOT_A_TENSOR, (_none_for_zeros, ZEROS)),
                otherwise=(
                    (lambda at, _got, _item: at.rank != at.options["root"], ONLY_ROOT),
                    (_of_another, OVERWRITTEN),
                ),
                look=Cause("Read the digits: which ranks are in the sum, and how often?"),
            ),
            Untouched(ADDS_TO_X),
            NOT_ALIASED,
            OnlyKinds(MESSAGES, FROM_MESSAGES),
            Demand(
                lambda at: count(at) <= 1 and count(at, "recv") <= num_doublings(at.world_size),
                lambda at: (
                    f"sends {count(at)} and receives {count(at, 'recv')} messages; "
                    f"the budget is 1 and {num_doublings(at.world_size)}"
                ),
                STAR,
            ),
            rounds(num_doublings, ONE_BY_ONE),
        ),
        success="Any root of 1 to 5 ranks, in log2(p) rounds.",
    ),
    wrong=(
        Edit(FROM_ROOT, "mine = rank", WENT_TO_0, also=(("rank == root", "rank == 0"),)),
        Edit(ROUNDS, f"1, {ROUNDS}", LAST_ROUND),
        Edit(f"reversed(range({ROUNDS}))", f"range({ROUNDS})", TOO_LATE),
        Edit(f"reversed(range({ROUNDS}))", f"list(range({ROUNDS}))[-2::-1]", FIRST_ROUND),
        Edit(RESULT, "total", ONLY_ROOT),
        Edit("x.clone()", "x", ADDS_TO_X),
        Edit("x.clone()", "x.clone() if p > 1 else x", ALIASED),
        Edit("total += incoming", "total = incoming.clone()", OVERWRITTEN),
        Edit(FROM_ROOT, "mine = rank", FROM_0),
        Edit(ROUNDS, "p.bit_length() - 1", STARTS_LOW),
        Edit(f"reversed(range({ROUNDS}))", "(1, 0)", FOUR_RANKS),
        Own(_star, STAR),
        Own(_chain, ONE_BY_ONE),
        Edit("x.clone()", "x.clone().double()", UNLIKE),
        Edit(
            "x.clone(), torch.empty_like(x)",
            "x.float(), torch.empty_like(x.float())",
            DIGITS_LOST,
            also=((RESULT, "total.to(x.dtype) if rank == root else None"),),
        ),
        Edit(RESULT, "total.double() if rank == root else None", KEEP_DTYPE),
        Edit("dist.send", "dist.isend", DROPPED),
        Edit(RESULT, "total if rank == root and total.all() else None", ZEROS),
    ),
)
