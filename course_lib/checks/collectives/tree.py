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
    KEEPS,
    MESSAGES,
    NOT_A_TENSOR,
    NOT_AFRESH,
    NOT_ALIASED,
    STILL_THERE,
    TROUBLE,
    UNLIKE,
    Given,
    both_calls,
    count,
    given,
    me,
    rounds,
    watch_call,
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
from course_lib.checks.on_ranks import At, Observed, OnRanks
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
ADDS_TO_X = Cause("Add to a copy of x.")
ZEROS = Cause("Zeros have a sum, too: the root returns it, whatever the numbers are.")
KEEP_DTYPE = Cause("Add up in the dtype of x: x.clone() and torch.empty_like(x) have it.")
NAN_STAYS = Cause("A sum with a nan is nan: whoever looks for errors in the numbers has to see it.")
ANY_SHAPE = Cause("x has any shape, also one without dims: torch.empty_like(x) has the same.")
NO_NUMPY = Cause("NumPy does not know every dtype of torch: stay in torch.")
STAR = Cause("Let ranks add for each other on the way to the root, and send only once.")
ONE_BY_ONE = Cause(
    "In each round, let half of the ranks that still hold sums send them to the others."
)
FROM_MESSAGES = Cause("Build it from send and recv.")


def _reduce(rank: int, answer: Callable[..., Any], given: Given, root: int) -> dict[str, Observed]:
    """Call the answer; root 0 is the default."""
    x, roots = given.of(rank), [root] if root else []
    return {f"root {root}, {given}": watch_call(given.call, answer, x, *roots, x=x)}


def _runs(p: int) -> list[dict[str, Any]]:
    """Return every root, and numbers of other kinds; on the most ranks only one of these."""
    others = [
        {"given": Given((2, 3), torch.int64), "root": p - 1},
        {"given": Given((), torch.bfloat16, rank_1=True), "root": p - 1},
        {"given": Given((2,), torch.float32, rank_1=True, nan=True), "root": p - 1},
    ]
    if p == max(WORLDS):
        return others[:1]
    return [*({"given": Given(), "root": root} for root in range(p)), *others]


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


def _not_root(at: At, _got: Any, _item: None) -> bool:
    return at.rank != at.options["root"]


def _no_tensor_off_root(at: At, got: Any, _item: None) -> bool:
    return _not_root(at, got, _item) and not isinstance(got, Tensor)


def _of_another(at: At, got: Any, _item: None) -> bool:
    others = set(range(at.world_size)) - {at.rank}
    return any(torch.equal(got, given(at).of(rank)) for rank in others)


def _rounded(at: At, got: Any, _item: None) -> bool:
    return torch.allclose(got.double(), _total(at).double(), rtol=1e-12, atol=0)


def _none_for_zeros(at: At, got: Any, _item: None) -> bool:
    return got is None and given(at).rank_1


def _nan_is_lost(at: At, got: Any, _item: None) -> bool:
    return given(at).nan and not got[-1].isnan().item()


def _below_a_chain(x: Tensor, root: int = 0) -> Tensor | None:
    """Hand in from the last to number 2, one by one; 1 and 2 hand in to the root."""
    rank, p = me()
    mine, sums, incoming = (rank - root) % p, x.clone(), torch.empty_like(x)
    from_numbers = [n for n in ((1, 2) if mine == 0 else (mine + 1,)) if n < p and mine != 1]
    for number in from_numbers:
        dist.recv(incoming, (root + number) % p)
        sums += incoming
    if mine:
        dist.send(sums, root if mine <= 2 else (rank - 1) % p)
    return sums if rank == root else None


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
    library=("course_lib.collectives.tree:tree_reduce",),
    check=OnRanks(
        observe_on_rank=_reduce,
        worlds=WORLDS,
        runs=both_calls(_runs),
        trouble=(
            ("raised", "0-d tensor|must match|broadcast", ANY_SHAPE),
            ("raised", "unsupported ScalarType", NO_NUMPY),
            *TROUBLE,
        ),
        expect=(
            ALL_WAITED,
            Numbers(
                "value",
                _on_root(_total),
                shape=ANY_SHAPE,
                dtype=KEEP_DTYPE,
                causes=(
                    (WENT_TO_0, lambda at: None if at.rank else _total(at)),
                    (FROM_0, _on_root(_held)),
                    (LAST_ROUND, _without(4, 1, 3)),
                    (TOO_LATE, _without(4, 3)),
                    (FIRST_ROUND, _without(4, 2, 3)),
                    (STARTS_LOW, _without(3, 2)),
                    *((FIXED, _without(17, *range(late, 17))) for late in (4, 8, 16)),
                ),
                predicates=(
                    NOT_AFRESH,
                    (_no_tensor_off_root, ONLY_ROOT),
                    NOT_A_TENSOR,
                    (_none_for_zeros, ZEROS),
                    (_nan_is_lost, NAN_STAYS),
                ),
                otherwise=(
                    (_not_root, ONLY_ROOT),
                    (_of_another, OVERWRITTEN),
                    (_rounded, DIGITS_LOST),
                ),
                look=Cause("Read the digits: which ranks are in the sum, and how often?"),
            ),
            STILL_THERE,
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
        success="Any root of 1 to 4 ranks, and one of 17, in log2(p) rounds, rounded up.",
    ),
    wrong=(
        Edit(FROM_ROOT, "mine = rank", WENT_TO_0, also=(("rank == root", "rank == 0"),)),
        Edit(ROUNDS, f"1, {ROUNDS}", LAST_ROUND),
        Edit(f"reversed(range({ROUNDS}))", f"range({ROUNDS})", TOO_LATE),
        Edit(f"reversed(range({ROUNDS}))", f"list(range({ROUNDS}))[-2::-1]", FIRST_ROUND),
        Edit(RESULT, "total", ONLY_ROOT),
        Edit(RESULT, "total if rank == root else 0", ONLY_ROOT),
        Edit(RESULT, "rank == root and total", ONLY_ROOT),
        Edit("x.clone()", "x", ADDS_TO_X),
        Edit("x.clone()", "x.clone() if p > 1 else x", ALIASED),
        Edit("total += incoming", "total = incoming.clone()", OVERWRITTEN),
        Edit(FROM_ROOT, "mine = rank", FROM_0),
        Edit(ROUNDS, "p.bit_length() - 1", STARTS_LOW),
        Edit(f"reversed(range({ROUNDS}))", "(1, 0)", FIXED),
        Edit(f"reversed(range({ROUNDS}))", "(3, 2, 1, 0)", FIXED),
        Edit("total += incoming", "total = torch.stack([total, incoming]).nansum(0)", NAN_STAYS),
        Edit("x.clone()", "torch.nan_to_num(x)", NAN_STAYS),
        Edit(f"reversed(range({ROUNDS}))", "(2, 1, 0)", FIXED),
        Own(_star, STAR),
        Own(_chain, ONE_BY_ONE),
        Own(_below_a_chain, ONE_BY_ONE),
        Edit("x.clone()", "x.clone().double()", UNLIKE),
        Edit(
            "x.clone(), torch.empty_like(x)",
            "x.float(), torch.empty_like(x.float())",
            DIGITS_LOST,
            also=((RESULT, "total.to(x.dtype) if rank == root else None"),),
        ),
        Edit(RESULT, "total.double() if rank == root else None", KEEP_DTYPE),
        Edit(
            "x.clone(), torch.empty_like(x)",
            "x.double().clone(), torch.empty_like(x.double())",
            DIGITS_LOST,
            also=((RESULT, "total.to(x.dtype) if rank == root else None"),),
        ),
        Edit("torch.empty_like(x)", "torch.empty(x.numel(), dtype=x.dtype)", ANY_SHAPE),
        Edit(
            "x.clone(), torch.empty_like(x)",
            "torch.atleast_1d(x).clone(), torch.empty_like(torch.atleast_1d(x))",
            ANY_SHAPE,
        ),
        Edit("torch.empty_like(x)", "torch.from_numpy(x.numpy().copy())", NO_NUMPY),
        Edit(
            "x, root=0):",
            "x, root=0, sums={}):",
            KEEPS,
            also=(("x.clone()", "sums.setdefault((x.shape, x.dtype), x.clone()).copy_(x)"),),
        ),
        Edit(
            "x, root=0):",
            "x, root=0, sums={}):",
            KEEPS,
            also=(
                ("x.clone()", "sums.setdefault((x.shape, x.dtype), torch.zeros_like(x)).add_(x)"),
                (RESULT, "total.clone() if rank == root else None"),
            ),
        ),
        Edit("dist.send", "dist.isend", DROPPED),
        Edit(RESULT, "total if rank == root and total.all() else None", ZEROS),
    ),
)
