"""Exercise 5 of 04_collectives: all-reduce by halving and doubling."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.collectives.parts import (
    ALL_WAITED,
    DROPPED,
    KEEPS,
    MESSAGES,
    NOT_A_TENSOR,
    NOT_AFRESH,
    OTHER_MEMORY,
    RETURN_X,
    RETURNS_X,
    SAME_MEMORY,
    SENDS_FIRST,
    STILL_THERE,
    TROUBLE,
    Given,
    both_calls,
    bytes_of_all,
    count,
    given,
    me,
    rounds,
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
    OnlyKinds,
    Traffic,
)
from course_lib.checks.on_ranks import At, OnRanks
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
IN_PLACE = Cause("x itself has to become the sum.")
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
NO_PARTNER = Cause(
    "There is no such partner: partners differ in one bit, rank ^ 2**k, for k = 0 .. log2(p) - 1."
)
LOOK = Cause("Read the digits: which ranks are in it, and how often?")
FROM_MESSAGES = Cause("Build it from exchange.")


def _runs(p: int) -> list[dict[str, Given]]:
    """Return lengths that p divides or not, one with empty parts, and other numbers.

    On 8 ranks the sums have more digits than float64 keeps exactly: there they are integers.
    """
    if p == 8:
        return [{"given": Given((n,), torch.int64)} for n in (16, 13)]
    cases = [Given((n,)) for n in dict.fromkeys((2 * p, p + 1, 2 * p + 3, 1))]
    cases += [Given((p,), torch.int64), Given((2 * p,), torch.float32, rank_1=True)]
    return [{"given": case} for case in cases]


def _total(at: At) -> Tensor:
    return given(at).total(at.world_size)


def _played(
    *,
    num_rounds: int | None = None,
    both_keep: int | None = None,
    sends_kept: bool = False,
    adds: bool = True,
    in_place: bool = True,
    back: Callable[[list[Any]], Iterable[Any]] = reversed,
    adds_back: bool = False,
) -> Callable[[At], Tensor]:
    """Return a function that plays all ranks of an answer with one mistake; it returns a rank's x.

    num_rounds   of the halving, whatever p is
    both_keep    the half, 0 or 1, that both partners keep
    sends_kept   the half that a rank keeps is what it sends
    adds         False: what arrives in the halving replaces the rank's own
    in_place     False: sums are new tensors, and no views of x
    back         the order of the doubling
    adds_back    the doubling adds
    """

    def value(at: At) -> Tensor:
        p = at.world_size
        x = [given(at).of(rank) for rank in range(p)]
        parts, halvings = list(x), list[Any]()
        for k in range(num_doublings(p) if num_rounds is None else num_rounds):
            keeps = [rank >> k & 1 if both_keep is None else both_keep for rank in range(p)]
            halves = [part.tensor_split(2) for part in parts]
            mine = [halves[rank][keeps[rank]] for rank in range(p)]
            theirs = [halves[rank][1 - keeps[rank]] for rank in range(p)]
            sent = mine if sends_kept else theirs
            came = [sent[rank ^ 2**k].clone() for rank in range(p)]
            for rank in range(p):
                sums = mine[rank] + came[rank] if adds else came[rank]
                mine[rank] = mine[rank].copy_(sums) if in_place else sums
            parts = mine
            halvings.append((k, mine, theirs))
        for k, mine, theirs in back(halvings):
            came = [mine[rank ^ 2**k].clone() for rank in range(p)]
            for rank in range(p):
                theirs[rank].copy_(theirs[rank] + came[rank] if adds_back else came[rank])
        return x[at.rank]

    def or_nothing(at: At) -> Tensor:
        try:
            return value(at)
        except RuntimeError:  # halves of other lengths: such an answer raises, too
            return torch.empty(0)

    return or_nothing


def _half_only(at: At, got: Tensor, _item: None) -> bool:
    """Return whether a rank has sent no more than the halving needs, and has some sums."""
    sums = bool((got == _total(at)).any())
    return sums and at.world_size > 1 and count(at) <= num_doublings(at.world_size)


def _tail_is_own(at: At, got: Tensor, _item: None) -> bool:
    odd = len(got) % at.world_size > 0
    return odd and bool(got[0] == _total(at)[0]) and bool(got[-1] == given(at).of(at.rank)[-1])


def _partly(at: At, got: Tensor, _item: None) -> bool:
    return bool((got == _total(at)).any())


def _rounded(at: At, got: Tensor, _item: None) -> bool:
    """Return whether it is near the sum; on 8 ranks, where every sum of 8 terms is, never."""
    is_near = torch.allclose(got.double(), _total(at).double(), rtol=1e-2, atol=0)
    return is_near and at.world_size < 8


def _even_bytes(at: At) -> int:
    """Return the bytes of 2 (p-1)/p of x, where p divides it; else of whole tensors."""
    x, p = given(at).of(0), at.world_size
    return 2 * (p - 1) * (x.nbytes // p if len(x) % p == 0 else x.nbytes)


def _all_bytes(at: At) -> int:
    """Return the bytes that all ranks together need: the halves of a round add up to wholes."""
    return 2 * (at.world_size - 1) * given(at).of(0).nbytes


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


def _first_one_then_the_other(x: Tensor) -> Tensor:
    """In each pair the lower rank sends first, and the higher one answers: two rounds for one."""
    rank, p = me()
    part, halvings = x, list[Any]()

    def one_by_one(out: Tensor, incoming: Tensor, partner: int) -> None:
        for sender in sorted((rank, partner)):
            if sender == rank:
                torch.distributed.send(out, partner)
            else:
                torch.distributed.recv(incoming, partner)

    for k in range(num_doublings(p)):
        halves = part.tensor_split(2)
        mine, theirs = halves[rank >> k & 1], halves[1 - (rank >> k & 1)]
        incoming = torch.empty_like(mine)
        one_by_one(theirs, incoming, rank ^ 2**k)
        part = mine.add_(incoming)
        halvings.append((rank ^ 2**k, mine, theirs))
    for partner, mine, theirs in reversed(halvings):
        one_by_one(mine, theirs, partner)
    return x


SPLIT = "part.tensor_split(2)"
KEPT = "(high, low) if rank & 2**k else (low, high)"
HALVES = "exchange(given, partner, incoming, partner)"
DOUBLES = "exchange(mine, partner, theirs, partner)"
ROUNDS = "range((p - 1).bit_length())"
FIRST_LINE = "part, halvings = x, []"
ADDS = "part += incoming"

HALVING = Exercise(
    key="collectives-5",
    title="halving and doubling",
    library=("course_lib.collectives.halving:halving_doubling_all_reduce",),
    check=OnRanks(
        observe_on_rank=watch_in_place,
        worlds=WORLDS,
        runs=both_calls(_runs),
        trouble=(
            ("mismatch", "", UNEVEN),
            ("raised", "must match|broadcast", UNEVEN),
            ("raised", "need a rank from 0|got itself", NO_PARTNER),
            *TROUBLE,
        ),
        expect=(
            ALL_WAITED,
            Numbers(
                "value",
                _total,
                predicates=(NOT_AFRESH, NOT_A_TENSOR, (_half_only, HALF_ONLY)),
                causes=(
                    (FORWARDS, _played(back=list)),
                    (ADDED_BACK, _played(adds_back=True)),
                    (STORED, _played(adds=False)),
                    (SAME_HALF, _played(both_keep=0)),
                    (SAME_HALF, _played(both_keep=1)),
                    (SENT_OWN, _played(sends_kept=True)),
                    (NOT_WRITTEN, _played(in_place=False)),
                    (OWN, lambda at: given(at).of(at.rank)),
                    *((FIXED, _played(num_rounds=fixed)) for fixed in (1, 2)),
                ),
                otherwise=((_rounded, DIGITS_LOST), (_tail_is_own, TAIL), (_partly, PARTLY)),
                look=LOOK,
            ),
            SAME_MEMORY,
            Demand(
                lambda at: not difference(at.seen.x, _total(at))[0],
                "what it returns is the sum, but x does not hold it",
                IN_PLACE,
            ),
            RETURNS_X,
            STILL_THERE,
            OnlyKinds(MESSAGES, FROM_MESSAGES),
            Traffic(TOO_MANY, max_messages=lambda at: 2 * num_doublings(at.world_size)),
            Traffic(WHOLE, max_bytes=_even_bytes),
            Demand(
                lambda at: bytes_of_all(at) <= _all_bytes(at),
                lambda at: (
                    f"all ranks together send {bytes_of_all(at)} bytes; the budget is "
                    f"{_all_bytes(at)}"
                ),
                PADDED,
            ),
            rounds(lambda p: 2 * num_doublings(p), ONE_ROUND),
        ),
        success="The sum in place on 1, 2, 4 and 8 ranks, up to 16 numbers, in 2 log2(p) rounds.",
    ),
    wrong=(
        Edit("reversed(halvings)", "()", HALF_ONLY),
        Edit("reversed(halvings)", "halvings", FORWARDS),
        Edit(
            DOUBLES,
            "incoming = torch.empty_like(theirs)\n"
            "exchange(mine, partner, incoming, partner)\n"
            "theirs += incoming",
            ADDED_BACK,
        ),
        Edit(ADDS, "part.copy_(incoming)", STORED),
        Edit(KEPT, "low, high", SAME_HALF),
        Edit(KEPT, "high, low", SAME_HALF),
        Edit(ADDS, "part = part + incoming", NOT_WRITTEN),
        Edit(ROUNDS, "range(2 if p > 2 else p - 1)", FIXED),
        Edit(ROUNDS, "range(3)", NO_PARTNER),
        Edit("partner = rank ^ 2**k", "partner = rank ^ (k + 1)", LOOK),
        Edit(HALVES, "exchange(part, partner, incoming, partner)", SENT_OWN),
        Edit("torch.empty_like(part)", "torch.empty_like(given)", UNEVEN),
        Edit("torch.empty_like(part)", "torch.empty(len(part))", UNEVEN),
        Edit(SPLIT, "part[: len(part) // 2], part[len(part) // 2 : len(part) // 2 * 2]", TAIL),
        Edit("reversed(halvings)", "reversed(halvings[1:])", PARTLY),
        Edit(FIRST_LINE, f"if p > 1:\n    return x\n{FIRST_LINE}", OWN),
        Own(_on_a_ring, TOO_MANY),
        Own(_doubling_only, WHOLE),
        Own(_first_one_then_the_other, ONE_ROUND),
        Edit(
            FIRST_LINE,
            "whole, n = x, len(x)\nx = torch.cat([x, x.new_zeros(-n % p)])\npart, halvings = x, []",
            PADDED,
            also=(("return x", "whole.copy_(x[:n])\nreturn whole"),),
        ),
        Edit(FIRST_LINE, f"x = x.clone()\n{FIRST_LINE}", IN_PLACE),
        Edit("return x", "return x.clone()", RETURN_X),
        Edit(
            FIRST_LINE,
            "whole, x = x, x.clone()\npart, halvings = x, []",
            OTHER_MEMORY,
            also=(("return x", "whole.data = x\nreturn whole"),),
        ),
        Edit(DOUBLES, "dist.isend(mine, partner)\ndist.recv(theirs, partner)", DROPPED),
        Edit(
            HALVES,
            "dist.send(given, partner)\ndist.recv(incoming, partner)",
            SENDS_FIRST,
        ),
        Edit(FIRST_LINE, f"dist.all_reduce(x)\nreturn x\n{FIRST_LINE}", FROM_MESSAGES),
        Edit(
            FIRST_LINE,
            "whole, x = x, x.float()\npart, halvings = x, []",
            DIGITS_LOST,
            also=(("return x", "return whole.copy_(x)"),),
        ),
        Edit(
            "(x):",
            "(x, sums={}):",
            KEEPS,
            also=(
                (
                    FIRST_LINE,
                    "key = (len(x), x.dtype)\n"
                    "if key in sums:\n"
                    "    return x.copy_(sums[key])\n"
                    "sums[key] = x\n"
                    "part, halvings = x, []",
                ),
            ),
        ),
        Edit(
            "(x):",
            "(x, last={}):",
            KEEPS,
            also=(
                (
                    ADDS,
                    "key = (k, len(part), part.dtype)\n"
                    "part += incoming + last.get(key, 0)\n"
                    "last[key] = incoming",
                ),
            ),
        ),
    ),
)
