"""Exercise 4 of 04_collectives: the mean."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.collectives.parts import (
    ALL_WAITED,
    KEEPS,
    MESSAGES,
    NOT_A_TENSOR,
    NOT_AFRESH,
    OTHER_MEMORY,
    RETURN_X,
    RETURNS_X,
    SAME_MEMORY,
    STILL_THERE,
    TROUBLE,
    WORLDS,
    Given,
    both_calls,
    bytes_of_all,
    given,
    me,
    swap,
    watch_in_place,
)
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expect import difference
from course_lib.checks.expectations import (
    DIGITS_LOST,
    Demand,
    Numbers,
    Traffic,
)
from course_lib.checks.on_ranks import At, OnRanks
from course_lib.collectives import ring_all_gather

ROUNDING = 1e-12  # dividing before or after the sum may round the last digits differently

SUM = Cause("{p} times too large: that is the sum. Divide by the number of ranks.")
TWICE = Cause("{p} times too small: divided by p twice. Once is enough.")
TAIL = Cause("Only the tail is wrong: p does not divide the length, so shards differ.")
BY_FOUR = Cause("Divide by the number of ranks, whatever it is, not by 4.")
AT_MOST = Cause("The divisor stops short of p: divide by the number of ranks, whatever it is.")
BY_LENGTH = Cause("Divide by the number of ranks, not of numbers.")
FLOORED = Cause("The fraction is dropped: divide with /, not with //.")
SHRINKS = Cause("Divided at every hop, the first terms shrink most: divide the complete sum, once.")
UNEVEN = Cause("Shards differ if p does not divide the length of x: pass out=x to the all-gather.")
LENGTHS = Cause("Two tensors differ in length: give the all-gather this rank's shard, and out=x.")
OWN = Cause("That is this rank's own: pass out=x, so that what is gathered gets into x.")
OTHER_SHARD = Cause("The all-gather writes into x: hand it this rank's shard of x, in its dtype.")
IN_PLACE = Cause("x itself has to become the mean.")
HALVES = Cause("Here, call ring_reduce_scatter and ring_all_gather: they send shards.")
STEPS = Cause("Each half takes p - 1 steps: call each once.")
SHARDS = Cause(
    "Shards of x are enough, first for the reduce-scatter, then for the all-gather: send no whole "
    "tensor, no padding and no wider dtype than x's."
)
PADDED = Cause("Shards may differ in length: send their own bytes, without padding.")


def _num_bytes(at: At) -> int:
    """Return the bytes of 2 (p - 1) shards, of the longer ones where they differ."""
    x, p = given(at).of(0), at.world_size
    return 2 * (p - 1) * -(-len(x) // p) * x.itemsize


def _all_shards(at: At) -> int:
    """Return the bytes of all shards on their way to all other ranks, in both halves."""
    return 2 * (at.world_size - 1) * given(at).of(0).nbytes


def _other_calls(at: At) -> list[str]:
    return [call.kind for call in at.seen.calls if call.kind not in MESSAGES]


def _runs(p: int) -> list[dict[str, Given]]:
    """Return lengths that p divides or not, one that leaves shards empty, and other inputs."""
    cases = [Given((n,)) for n in (p, p + 1, 2 * p - 1, 1)]
    cases.append(Given((2 * p,), rank_1=True))
    if p in (1, 2, 4):  # where every way of dividing is exact
        cases.append(Given((p + 1,), torch.float32))
    return [{"given": case} for case in dict.fromkeys(cases)]


def _sum_by(divisor: Callable[[At], int]) -> Callable[[At], Tensor]:
    return lambda at: given(at).total(at.world_size) / divisor(at)


_mean = _sum_by(lambda at: at.world_size)


def _hops(divisor: Callable[[At], int]) -> Callable[[At], Tensor]:
    """Return the result if a sum is divided at every hop on its way from rank s + 1 to rank s."""

    def value(at: At) -> Tensor:
        p, shards = at.world_size, list[Tensor]()
        for s in range(p):
            parts = [given(at).of((s + 1 + hop) % p).tensor_split(p)[s] for hop in range(p)]
            shards.append(parts[0])
            for part in parts[1:]:
                shards[s] = (shards[s] + part) / divisor(at)
        return torch.cat(shards)

    return value


def _roughly(at: At, got: Any, _item: None) -> bool:
    return torch.allclose(got, _mean(at), rtol=0.02, atol=0)


def _tail_is_wrong(at: At, got: Any, _item: None) -> bool:
    n, p = len(given(at).of(0)), at.world_size
    even = n // p * p
    return 0 < even < n and torch.allclose(got[:even], _mean(at)[:even], rtol=ROUNDING, atol=0)


def _divided_at_every_hop(x: Tensor) -> Tensor:
    rank, p = me()
    shards = list(x.clone().tensor_split(p))
    for step in range(1, p):
        mine = shards[(rank - step - 1) % p]
        incoming = torch.empty_like(mine)
        swap(shards[(rank - step) % p], (rank + 1) % p, incoming, (rank - 1) % p)
        mine.add_(incoming).div_(2)
    return ring_all_gather(shards[rank], out=x)


SCATTERS = "shard = ring_reduce_scatter(x)"
DIVIDED = "shard / dist.get_world_size()"
GATHERS = f"ring_all_gather({DIVIDED}, out=x)"

MEAN = Exercise(
    key="collectives-4",
    title="the mean",
    library=(
        "course_lib.collectives.ring:ring_all_reduce",
        "course_lib.collectives.collectives:all_reduce",
    ),
    check=OnRanks(
        observe_on_rank=watch_in_place,
        worlds=WORLDS,
        runs=both_calls(_runs),
        trouble=(
            ("mismatch", "", UNEVEN),
            ("raised", "need a shard like shard", OTHER_SHARD),
            ("raised", "must match the size|broadcast", LENGTHS),
            *TROUBLE,
        ),
        expect=(
            ALL_WAITED,
            Numbers(
                "value",
                _mean,
                rtol=ROUNDING,
                predicates=(NOT_AFRESH, NOT_A_TENSOR),
                causes=(
                    (SUM, _sum_by(lambda _at: 1)),
                    (TWICE, _sum_by(lambda at: at.world_size**2)),
                    (BY_FOUR, _sum_by(lambda _at: 4)),
                    (AT_MOST, _sum_by(lambda at: at.world_size - 1)),
                    (BY_LENGTH, _sum_by(lambda at: len(given(at).of(0)))),
                    (FLOORED, lambda at: _mean(at).floor()),
                    (SHRINKS, _hops(lambda _at: 2)),
                    (SHRINKS, _hops(lambda at: at.world_size)),
                    (OWN, lambda at: given(at).of(at.rank)),
                ),
                otherwise=((_roughly, DIGITS_LOST), (_tail_is_wrong, TAIL)),
                look=Cause(
                    "Print the sum before you divide it: its digits show which ranks are in it."
                ),
            ),
            SAME_MEMORY,
            Demand(
                lambda at: not difference(at.seen.x, _mean(at), ROUNDING)[0],
                "what it returns is the mean, but x does not hold it",
                IN_PLACE,
            ),
            RETURNS_X,
            STILL_THERE,
            Demand(
                lambda at: not _other_calls(at),
                lambda at: f"calls dist.{_other_calls(at)[0]}",
                HALVES,
            ),
            Traffic(STEPS, max_messages=lambda at: 2 * (at.world_size - 1)),
            Traffic(SHARDS, max_bytes=_num_bytes),
            Demand(
                lambda at: bytes_of_all(at) <= _all_shards(at),
                lambda at: (
                    f"all ranks together send {bytes_of_all(at)} bytes; the budget is "
                    f"{_all_shards(at)}"
                ),
                PADDED,
            ),
        ),
        success="The mean in place on 1 to 4 and 6 ranks, up to 12 floats, 2 (p - 1) shards sent.",
    ),
    wrong=(
        Edit(DIVIDED, "shard", SUM),
        Edit(DIVIDED, "shard / 4", BY_FOUR),
        Edit(DIVIDED, "shard / len(x)", BY_LENGTH),
        Edit(DIVIDED, "shard // dist.get_world_size()", FLOORED),
        Edit(SCATTERS, 'shard = ring_reduce_scatter(x, "mean")', TWICE),
        Own(_divided_at_every_hop, SHRINKS),
        Edit(
            SCATTERS,
            "p = dist.get_world_size()\n"
            "even = x[: len(x) // p * p]\n"
            "shard = ring_reduce_scatter(even)",
            TAIL,
            also=(("out=x", "out=even"),),
        ),
        Edit(GATHERS, f"x.copy_(ring_all_gather({DIVIDED}))", UNEVEN),
        Edit(
            SCATTERS,
            "shard = ring_all_gather(x)",
            LENGTHS,
            also=((GATHERS, f"x.copy_({DIVIDED})"),),
        ),
        Edit(SCATTERS, f"x = x.clone()\n{SCATTERS}", IN_PLACE),
        Edit(GATHERS, f"x.data = ring_all_gather({DIVIDED}, out=x.clone())", OTHER_MEMORY),
        Edit(GATHERS, f"{GATHERS}\nx = x.clone()", RETURN_X),
        Edit(GATHERS, f"ring_all_gather({DIVIDED})", OWN),
        Edit(
            SCATTERS,
            "dist.all_reduce(x)",
            HALVES,
            also=((GATHERS, "x /= dist.get_world_size()"),),
        ),
        Edit(
            SCATTERS,
            "every = ring_all_gather(x).view(-1, len(x))",
            SHARDS,
            also=((GATHERS, "x.copy_(every.mean(0))"),),
        ),
        Edit(SCATTERS, f"{SCATTERS}\n{SCATTERS}", STEPS),
        Edit(
            SCATTERS,
            "p = dist.get_world_size()\n"
            "padded = torch.zeros(-(-len(x) // p) * p, dtype=x.dtype)\n"
            "padded[: len(x)] = x\n"
            "shard = ring_reduce_scatter(padded)",
            PADDED,
            also=((GATHERS, f"x.copy_(ring_all_gather({DIVIDED}, out=padded)[: len(x)])"),),
        ),
        Edit(
            SCATTERS,
            "wide = x.double()\nshard = ring_reduce_scatter(wide)",
            SHARDS,
            also=((GATHERS, f"x.copy_(ring_all_gather({DIVIDED}, out=wide))"),),
        ),
        Edit(DIVIDED, "shard / min(5, dist.get_world_size())", AT_MOST),
        Edit(
            "(x):",
            "(x, done=[]):",
            KEEPS,
            also=(
                (SCATTERS, f"if len(x) in done:\n    return x\ndone.append(len(x))\n{SCATTERS}"),
            ),
        ),
        Edit(
            "(x):",
            "(x, sums={}):",
            KEEPS,
            also=((SCATTERS, f"{SCATTERS}\nshard += sums.get(len(x), 0)\nsums[len(x)] = shard"),),
        ),
        Edit(
            SCATTERS,
            "shard = ring_reduce_scatter(x.float()).double()",
            DIGITS_LOST,
        ),
        Edit(SCATTERS, "shard = ring_reduce_scatter(x.bfloat16()).double()", DIGITS_LOST),
        Edit(DIVIDED, "(shard / dist.get_world_size()).double()", OTHER_SHARD),
    ),
)
