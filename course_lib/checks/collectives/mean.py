"""Exercise 4 of 04_collectives: the mean."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from course_lib.checks.collectives.parts import (
    ALL_BYTES,
    BYTES,
    IN_PLACE,
    IN_X,
    LOOKS,
    MEMORY,
    OTHER_MEMORY,
    OTHERS,
    RETURN_X,
    SENT,
    VALUE,
    WORLDS,
    ByMessages,
    Given,
    both_calls,
    use,
)
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.properties import DIGITS

SUM = Cause("{p} times too large: that is the sum. Divide by the number of ranks.")
TWICE = Cause("{p} times too small: divided by p twice. Once is enough.")
TAIL = Cause("Only the tail is wrong: p does not divide the length, so shards differ.")
BY_FOUR = Cause("Divide by the number of ranks, whatever it is, not by 4.")
BY_LENGTH = Cause("Divide by the number of ranks, not of numbers.")
FLOORED = Cause("The fraction is dropped: divide with /, not with //.")
UNEVEN = Cause("Shards differ if p does not divide the length of x: pass out=x to the all-gather.")
LENGTHS = Cause("Two tensors differ in length: give the all-gather this rank's shard, and out=x.")
OWN = Cause("That is this rank's own: pass out=x, so that what is gathered gets into x.")
OTHER_SHARD = Cause("The all-gather writes into x: hand it this rank's shard of x, in its dtype.")
HALVES = Cause("Here, call ring_reduce_scatter and ring_all_gather: they send shards.")
STEPS = Cause("Each half takes p - 1 steps: call each once.")
SHARDS = Cause(
    "Shards of x are enough, first for the reduce-scatter, then for the all-gather: send no whole "
    "tensor, no padding and no wider dtype than x's."
)
PADDED = Cause("Shards may differ in length: send their own bytes, without padding.")
LOOK = Cause("Print the sum before you divide it: its digits show which ranks are in it.")


def _average(rank: int, answer: Callable[..., Any], given: Given, call: int) -> dict[str, Any]:
    x, steps = given.of(rank, call), 2 * (dist.get_world_size() - 1)
    longest = -(-len(x) // dist.get_world_size()) * x.itemsize
    budgets = {SENT: steps, BYTES: steps * longest, ALL_BYTES: steps * x.nbytes}
    return use(answer, x, call=call, label=f"{given}", budgets=budgets, in_place=True)


def _runs(p: int) -> list[dict[str, Any]]:
    """Return lengths that p divides or not, one that leaves shards empty, and other inputs."""
    cases = [Given((n,)) for n in (p, p + 1, 2 * p - 1, 1)]
    cases.append(Given((2 * p,), rank_1=True))
    if p in (1, 2, 4):  # where every way of dividing is exact
        cases.append(Given((p + 1,), torch.float32))
    return both_calls(*dict.fromkeys(cases))


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
    check=ByMessages(
        observe_on_rank=_average,
        worlds=WORLDS,
        runs=_runs,
        rtol=1e-12,  # dividing before or after the sum may round the last digits differently
        looks=(
            *LOOKS,
            *{MEMORY: RETURN_X, VALUE: LOOK, "mismatch": UNEVEN, OTHERS: HALVES}.items(),
            *{SENT: STEPS, BYTES: SHARDS, ALL_BYTES: PADDED}.items(),
        ),
        success="The mean in place on 1 to 4 and 6 ranks, up to 12 floats, 2 (p - 1) shards sent.",
    ),
    wrong=(
        Edit(DIVIDED, "shard", SUM),
        Edit(DIVIDED, "shard / 4", BY_FOUR),
        Edit(DIVIDED, "shard / len(x)", BY_LENGTH),
        Edit(DIVIDED, "shard // dist.get_world_size()", FLOORED),
        Edit(SCATTERS, 'shard = ring_reduce_scatter(x, "mean")', TWICE),
        Edit(
            SCATTERS,
            "p = dist.get_world_size()\n"
            "even = x[: len(x) // p * p]\n"
            "shard = ring_reduce_scatter(even)",
            TAIL,
            also=(("out=x", "out=even"),),
        ),
        Edit(GATHERS, f"ring_all_gather({DIVIDED})", OWN),
        Edit(GATHERS, f"x.copy_(ring_all_gather({DIVIDED}))", UNEVEN),
        Edit(
            SCATTERS,
            "shard = ring_all_gather(x)",
            LENGTHS,
            also=((GATHERS, f"x.copy_({DIVIDED})"),),
        ),
        Edit(DIVIDED, f"({DIVIDED}).float()", OTHER_SHARD),
        Edit(SCATTERS, "shard = ring_reduce_scatter(x.bfloat16()).double()", DIGITS),
        Edit(SCATTERS, f"x = x.clone()\n{SCATTERS}", IN_PLACE),
        Edit(GATHERS, f"x.data = ring_all_gather({DIVIDED}, out=x.clone())", OTHER_MEMORY),
        Edit(
            SCATTERS,
            "dist.all_reduce(x)",
            HALVES,
            also=((GATHERS, "x /= dist.get_world_size()"),),
        ),
        Edit(SCATTERS, f"{SCATTERS}\n{SCATTERS}", STEPS),
        Edit(
            SCATTERS,
            "every = ring_all_gather(x).view(-1, len(x))",
            SHARDS,
            also=((GATHERS, "x.copy_(every.mean(0))"),),
        ),
        Edit(
            SCATTERS,
            "p = dist.get_world_size()\n"
            "padded = torch.zeros(-(-len(x) // p) * p, dtype=x.dtype)\n"
            "padded[: len(x)] = x\n"
            "shard = ring_reduce_scatter(padded)",
            PADDED,
            also=((GATHERS, f"x.copy_(ring_all_gather({DIVIDED}, out=padded)[: len(x)])"),),
        ),
        *IN_X,
    ),
)
