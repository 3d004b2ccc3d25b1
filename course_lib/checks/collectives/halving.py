"""Exercise 5 of 04_collectives: all-reduce by halving and doubling."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.collectives.parts import (
    ALL_BYTES,
    BYTES,
    IN_PLACE,
    IN_X,
    LOOKS,
    MEMORY,
    NOT_WAITED,
    OTHER_MEMORY,
    RETURN_X,
    ROUNDS,
    SENT,
    VALUE,
    ByMessages,
    Given,
    both_calls,
    me,
    swap,
    use,
)
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.cost.network import num_doublings

WORLDS = (4, 8, 2, 1)  # powers of two; on 8 ranks, the partner is a third bit away

HALF_ONLY = Cause(
    "The doubling is missing: after the halving each rank has the sum of one part only. Send it "
    "back the way the halves came."
)
FORWARDS = Cause(
    "The doubling goes backwards: start with the last partner, since only your last part is "
    "complete."
)
ADDED_BACK = Cause("What comes back is a sum already: store it, do not add it.")
STORED = Cause("In the halving, what arrives is one rank's share: add it to yours.")
SAME_HALF = Cause(
    "Both partners keep the same half: let the bit in which they differ decide, rank & 2**k."
)
NOT_WRITTEN = Cause(
    "part = part + incoming makes a new tensor, and x never learns of the sum: part += incoming "
    "writes into x, whose view part is."
)
FIXED = Cause("The number of rounds follows from p: log2(p) to halve, and as many to double.")
UNEVEN = Cause(
    "What is sent and what it is received into need the same length and dtype. The halves of an "
    "odd part differ: you receive as many numbers as the half that you keep has."
)
TAIL = Cause("An odd part has one number more than two equal halves: one of the halves takes it.")
OWN = Cause("That is this rank's own: what comes in has to be added to x, in x.")
SENT_OWN = Cause("You send the half that you keep: keep one half, and send the other one.")
PARTLY = Cause(
    "Some numbers are sums over all ranks, others over fewer: send complete parts only, and "
    "receive each into its place in x."
)
WHOLE = Cause(
    "You send more than the halves: round k of the halving carries n / 2**(k+1) bytes, and the "
    "doubling the same ones back."
)
PADDED = Cause("Parts may differ in length: send their own bytes, without padding.")
TOO_MANY = Cause("Halve log2(p) times and double log2(p) times, with one message in each round.")
ONE_ROUND = Cause("In each round, start the send and the receive before you wait: use exchange.")
LOOK = Cause("Read the digits: which ranks are in it, and how often?")


def _sum(rank: int, answer: Callable[..., Any], given: Given, call: int) -> dict[str, Any]:
    x, p = given.of(rank, call), dist.get_world_size()
    messages, whole = 2 * num_doublings(p), 2 * (p - 1) * x.nbytes
    budgets = {SENT: messages, ROUNDS: messages, ALL_BYTES: whole}
    budgets[BYTES] = whole // p if len(x) % p == 0 else whole
    return use(answer, x, call=call, label=f"{given}", budgets=budgets, in_place=True)


def _runs(p: int) -> list[dict[str, Any]]:
    """Return lengths that p divides or not, one with empty parts, and other numbers.

    On 8 ranks the sums have more digits than float64 keeps exactly: there they are integers.
    """
    if p == 8:
        return both_calls(*(Given((n,), torch.int64) for n in (16, 13)))
    cases = [Given((n,)) for n in dict.fromkeys((2 * p, p + 1, 2 * p + 3, 1))]
    cases += [Given((p,), torch.int64), Given((2 * p,), torch.float32, rank_1=True)]
    return both_calls(*cases)


def _on_a_ring(x: Tensor) -> Tensor:
    rank, p = me()
    shards = x.tensor_split(p)
    for step in range(1, p):
        mine = shards[(rank - step - 1) % p]
        incoming = torch.empty_like(mine)
        swap(shards[(rank - step) % p], (rank + 1) % p, incoming, (rank - 1) % p)
        mine += incoming
    for step in range(p - 1):
        out, into = shards[(rank - step) % p], shards[(rank - step - 1) % p]
        swap(out, (rank + 1) % p, into, (rank - 1) % p)
    return x


def _doubling_only(x: Tensor) -> Tensor:
    rank, p = me()
    for k in range(num_doublings(p)):
        incoming = torch.empty_like(x)
        swap(x, rank ^ 2**k, incoming, rank ^ 2**k)
        x += incoming
    return x


SPLIT = "part.tensor_split(2)"
KEPT = "(high, low) if rank & 2**k else (low, high)"
HALVES = "exchange(given, partner, incoming, partner)"
DOUBLES = "exchange(mine, partner, theirs, partner)"
FIRST_LINE = "part, halvings = x, []"
ADDS = "part += incoming"

HALVING = Exercise(
    key="collectives-5",
    title="halving and doubling",
    library=("course_lib.collectives.halving:halving_doubling_all_reduce",),
    check=ByMessages(
        observe_on_rank=_sum,
        worlds=WORLDS,
        runs=_runs,
        looks=(
            *LOOKS,
            *{MEMORY: RETURN_X, VALUE: LOOK, "mismatch": UNEVEN, SENT: TOO_MANY}.items(),
            *{BYTES: WHOLE, ALL_BYTES: PADDED, ROUNDS: ONE_ROUND}.items(),
        ),
        success="The sum in place on 1, 2, 4 and 8 ranks, up to 16 numbers, in 2 log2(p) rounds.",
    ),
    wrong=(
        Edit("reversed(halvings)", "()", HALF_ONLY),
        Edit("reversed(halvings)", "halvings", FORWARDS),
        Edit("reversed(halvings)", "reversed(halvings[1:])", PARTLY),
        Edit(
            DOUBLES,
            "incoming = torch.empty_like(theirs)\n"
            "exchange(mine, partner, incoming, partner)\n"
            "theirs += incoming",
            ADDED_BACK,
        ),
        Edit(ADDS, "part.copy_(incoming)", STORED),
        Edit(ADDS, "part = part + incoming", NOT_WRITTEN),
        Edit(KEPT, "low, high", SAME_HALF),
        Edit(HALVES, "exchange(part, partner, incoming, partner)", SENT_OWN),
        Edit("range((p - 1).bit_length())", "range(2 if p > 2 else p - 1)", FIXED),
        Edit("torch.empty_like(part)", "torch.empty_like(given)", UNEVEN),
        Edit(SPLIT, "part[: len(part) // 2], part[len(part) // 2 : len(part) // 2 * 2]", TAIL),
        Edit(FIRST_LINE, f"if p > 1:\n    return x\n{FIRST_LINE}", OWN),
        Own(_on_a_ring, TOO_MANY),
        Own(_doubling_only, WHOLE),
        Edit(
            FIRST_LINE,
            "whole, n = x, len(x)\nx = torch.cat([x, x.new_zeros(-n % p)])\npart, halvings = x, []",
            PADDED,
            also=(("return x", "whole.copy_(x[:n])\nreturn whole"),),
        ),
        Edit(FIRST_LINE, f"x = x.clone()\n{FIRST_LINE}", IN_PLACE),
        Edit(
            FIRST_LINE,
            f"whole, x = x, x.clone()\n{FIRST_LINE}",
            OTHER_MEMORY,
            also=(("return x", "whole.data = x\nreturn whole"),),
        ),
        *(*IN_X, NOT_WAITED),
    ),
)
