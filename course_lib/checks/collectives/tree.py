"""Exercise 1 of 04_collectives: the tree, backwards."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.collectives.parts import (
    ALIASED,
    KIND,
    LOOKS,
    MEMORY,
    RECEIVED,
    RETURNS_NEW,
    ROUNDS,
    SENT,
    SHAPE,
    VALUE,
    ByMessages,
    Given,
    both_calls,
    me,
    use,
)
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.properties import CALLERS, DIGITS, NAN
from course_lib.cost.network import num_doublings

WORLDS = (4, 3, 17, 2, 1)  # 17: more rounds than 4 to 16 ranks need

FROM_0 = Cause("The tree ends in rank 0: count with `mine`, not with `rank`.")
WENT_TO_0 = Cause("The sum went to rank 0: count `mine` from the root.")
OVERWRITTEN = Cause("Another rank's number alone: what came replaced your sum. Receive, then add.")
LAST_ROUND = Cause("The ranks 1 away never came: the last round is missing.")
TOO_LATE = Cause("The farthest came too late, after others had sent: let the farthest send first.")
FIRST_ROUND = Cause("The ranks 2 away never came: start with the largest `have`.")
STARTS_LOW = Cause("`mine` = 2 never came: start with the largest power of two below p.")
FIXED = Cause("Some never came: the number of rounds follows from p, whatever it is.")
ONLY_ROOT = Cause("Only the root returns the sum, whatever it is: all others return None.")
ZEROS = Cause("Zeros have a sum, too: the root returns it, whatever the numbers are.")
STAR = Cause("Let ranks add for each other on the way to the root, and send only once.")
ONE_BY_ONE = Cause(
    "In each round, let half of the ranks that still hold sums send them to the others."
)
LOOK = Cause("Read the digits: which ranks are in the sum, and how often?")
ANY_SHAPE = Cause("x has any shape, also one without dims: torch.empty_like(x) has the same.")


def _reduce(
    rank: int, answer: Callable[..., Any], given: Given, call: int, root: int
) -> dict[str, Any]:
    """Call the answer; root 0 is the default."""
    rounds, label = num_doublings(dist.get_world_size()), f"root {root}, {given}"
    budgets = {SENT: 1, RECEIVED: rounds, ROUNDS: rounds}
    roots = [root] if root else []
    return use(answer, given.of(rank, call), *roots, call=call, label=label, budgets=budgets)


def _runs(p: int) -> list[dict[str, Any]]:
    """Return every root, and numbers of other kinds; on the most ranks only one of these."""
    integers = Given((2, 3), torch.int64)
    number = Given((), torch.bfloat16, rank_1=True)
    with_nan = Given((2,), torch.float32, rank_1=True, nan=True)
    if p == max(WORLDS):
        return both_calls(integers, root=p - 1)
    roots = [run for root in range(p) for run in both_calls(Given(), root=root)]
    return [*roots, *both_calls(integers, number, with_nan, root=p - 1)]


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


ROUND_NUMBERS = "(p - 1).bit_length()"
ROUNDS_LEFT = f"reversed(range({ROUND_NUMBERS}))"
FROM_ROOT = "mine = (rank - root) % p"
BOTH, RESULT = "x.clone(), torch.empty_like(x)", "total if rank == root else None"

TREE = Exercise(
    key="collectives-1",
    title="the tree, backwards",
    library=("course_lib.collectives.tree:tree_reduce",),
    check=ByMessages(
        observe_on_rank=_reduce,
        worlds=WORLDS,
        runs=_runs,
        looks=(
            *LOOKS,
            *{
                KIND: ONLY_ROOT,
                SHAPE: ANY_SHAPE,
                MEMORY: ALIASED,
                VALUE: LOOK,
                SENT: STAR,
                RECEIVED: STAR,
                ROUNDS: ONE_BY_ONE,
            }.items(),
        ),
        success="Any root of 1 to 4 ranks, and one of 17, in log2(p) rounds, rounded up.",
    ),
    wrong=(
        Edit(FROM_ROOT, "mine = rank", WENT_TO_0, also=(("rank == root", "rank == 0"),)),
        Edit(FROM_ROOT, "mine = rank", FROM_0),
        Edit(ROUND_NUMBERS, f"1, {ROUND_NUMBERS}", LAST_ROUND),
        Edit(ROUNDS_LEFT, f"range({ROUND_NUMBERS})", TOO_LATE),
        Edit(ROUNDS_LEFT, f"list(range({ROUND_NUMBERS}))[-2::-1]", FIRST_ROUND),
        Edit(ROUND_NUMBERS, "p.bit_length() - 1", STARTS_LOW),
        Edit(ROUNDS_LEFT, "(1, 0)", FIXED),
        Edit("total += incoming", "total = incoming.clone()", OVERWRITTEN),
        Edit(RESULT, "total", ONLY_ROOT),
        Edit(RESULT, "total if rank == root and total.all() else None", ZEROS),
        Edit("x.clone()", "x", CALLERS),
        Edit("x.clone()", "x.clone() if p > 1 else x", ALIASED),
        Edit("x.clone()", "torch.nan_to_num(x)", NAN),
        Edit("torch.empty_like(x)", "torch.empty(x.numel(), dtype=x.dtype)", ANY_SHAPE),
        Edit(
            BOTH,
            "x.double().clone(), torch.empty_like(x.double())",
            DIGITS,
            also=((RESULT, "total.to(x.dtype) if rank == root else None"),),
        ),
        Own(_star, STAR),
        Own(_chain, ONE_BY_ONE),
        *RETURNS_NEW,
    ),
)
