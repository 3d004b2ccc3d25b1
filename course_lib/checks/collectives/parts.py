"""Tools for the checks of 04_collectives: what ranks are given, what a hang proves, rounds.

Rank r is given a multiple of 10**r, so that a wrong sum tells which ranks are in it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.exercise import Cause
from course_lib.checks.expectations import Demand
from course_lib.checks.on_ranks import At, Trouble
from course_lib.core import Event

WORLDS = (4, 3, 5, 2, 1)  # on few ranks, wrong answers look alike; the lesson shows 4
DIGITS = 1 + 2.0**-30  # times this, numbers need more digits than float32 has
MESSAGES = ("send", "recv")
Key = tuple[int | None, int | None, int]  # of a message: sender, receiver, number

SENDS_FIRST = Cause(
    "All of them send first, and every receiver is busy sending: a circle. Start both with isend "
    "and irecv, then wait for both."
)
DROPPED = Cause(
    "isend and irecv return before the message has moved: keep the handle of each, and wait() for "
    "it before you return."
)
ARROWS = "Follow the arrows: who waits for whom?"
ALL_RECEIVE = Cause(f"{ARROWS} All of them wait to receive: does your source send to you?")
ALL_SEND = Cause(
    f"{ARROWS} All of them wait for a send to end: is a receive started before that, and from the "
    "rank that sends to you?"
)
STUCK = Cause(ARROWS)
OUTSIDE = Cause(
    "Ranks are 0 .. p - 1, and distances between two of them 1 .. p - 1: count modulo "
    "dist.get_world_size(), whatever it is."
)
UNLIKE = Cause(
    "What is sent and what it is received into need the same dtype and the same number of numbers."
)
WRITES = Cause("What you were given has to stay as it is: receive into another tensor.")
ALIASED = Cause(
    "Return a new tensor, also on 1 rank: whoever writes into the result must not change the input."
)
ONE_TENSOR = Cause("Return one tensor, in one piece: no list, no tuple, no number.")
NOT_A_TENSOR = (lambda _at, got, _item: not isinstance(got, Tensor | None), ONE_TENSOR)


@dataclass(frozen=True)
class Given:
    """What the ranks are given: 1, 2, 3 ... times 10**rank, whose sums are exact.

    In float64 they have more digits than float32 keeps. With `rank_1`, all ranks but that one are
    given zeros.
    """

    shape: tuple[int, ...] = (3,)
    dtype: torch.dtype = torch.float64
    rank_1: bool = False

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        return f"{name} {list(self.shape)}" + ", zeros but on rank 1" * self.rank_1

    def of(self, rank: int) -> Tensor:
        """Return what a rank is given."""
        count = torch.arange(1, torch.Size(self.shape).numel() + 1).view(self.shape)
        times = (count * 10**rank * (rank == 1 or not self.rank_1)).to(self.dtype)
        return times * DIGITS if self.dtype == torch.float64 else times

    def total(self, p: int) -> Tensor:
        """Return the sum over p ranks."""
        return torch.stack([self.of(rank) for rank in range(p)]).sum(0)


def given(at: At) -> Given:
    """Return what the ranks of this run were given."""
    return at.options["given"]


# --- what a hang and an error prove


def _circle_of(kind: str, where: str = "") -> Callable[[Trouble], bool]:
    """Return whether all that wait are in such calls, and for each other."""

    def fits(trouble: Trouble) -> bool:
        who = {wait.rank for wait in trouble.waits}
        return bool(who) and all(
            wait.kind == kind and where in wait.where and who.issuperset(wait.waits_for)
            for wait in trouble.waits
        )

    return fits


TROUBLE = (
    ("hang", lambda trouble: bool(trouble.dropped), DROPPED),
    ("hang", _circle_of("send", "dist.send("), SENDS_FIRST),
    ("hang", _circle_of("recv"), ALL_RECEIVE),
    ("hang", _circle_of("send"), ALL_SEND),
    ("hang", "", STUCK),
    ("mismatch", "", UNLIKE),
    ("raised", "need a rank from 0|got itself", OUTSIDE),
)


# --- messages


def count(at: At, kind: str = "send") -> int:
    """Return how many messages a rank sent, or received, and waited for."""
    return sum(event.kind == kind for event in at.seen.events)


def _keyed(at: At) -> list[tuple[Key, Event]]:
    """Return a rank's messages with what both ends know them by: sender, receiver, number."""
    found, numbers = list[tuple[Key, Event]](), Counter[tuple[int | None, int | None]]()
    for event in at.seen.calls:
        if event.kind in MESSAGES:
            ends = (event.rank, event.peer) if event.kind == "send" else (event.peer, event.rank)
            found.append(((*ends, numbers[ends]), event))
            numbers[ends] += 1
    return found


def _both_waited(at: At) -> bool:
    """Return whether both ends of each message waited for it: only then both are recorded."""
    ends = Counter(key for each in at.everyone for key, _ in _keyed(each))
    from_anyone = any(None in key for key in ends)
    return from_anyone or all(number == 2 for number in ends.values())


NOT_ALIASED = Demand(
    lambda at: not at.seen.aliased,
    lambda at: f"what it returns is the memory of {' and '.join(at.seen.aliased)}",
    ALIASED,
)
ALL_WAITED = Demand(_both_waited, "one end of a message did not wait for it", DROPPED)


def waited_for(num_messages: Callable[[int], int]) -> Demand:
    """Demand that each of p ranks waits for so many sends, and so many receives, or for more."""
    return Demand(
        lambda at: min(count(at, "send"), count(at, "recv")) >= num_messages(at.world_size),
        lambda at: (
            f"waits for {count(at, 'send')} sends and {count(at, 'recv')} receives; "
            f"need {num_messages(at.world_size)} of each"
        ),
        DROPPED,
    )


def num_rounds(at: At) -> int:
    """Return how many rounds the messages of all ranks take, one after another.

    A message comes a round after those that one of its two ends had waited for when it started it
    (its event ends when the wait for it returns).
    """
    before = defaultdict[Key, set[Key]](set)
    for each in at.everyone:
        messages = _keyed(each)
        for key, event in messages:
            before[key] |= {k for k, earlier in messages if earlier.end_s <= event.start_s}

    @cache
    def round_of(key: Key) -> int:
        return 1 + max(map(round_of, before[key]), default=0)

    return max(map(round_of, list(before)), default=0)


def rounds(at_most: Callable[[int], int], cause: Cause) -> Demand:
    """Demand that the messages on p ranks take at most so many rounds."""
    return Demand(
        lambda at: at.rank > 0 or num_rounds(at) <= at_most(at.world_size),
        lambda at: (
            f"all messages together need {num_rounds(at)} rounds, one after another; "
            f"the budget is {at_most(at.world_size)}"
        ),
        cause,
    )


# --- for planted wrong answers


def me() -> tuple[int, int]:
    """Return this rank, and the number of ranks."""
    return dist.get_rank(), dist.get_world_size()


def swap(out: Tensor, to: int, incoming: Tensor, source: int) -> None:
    """Send and receive at once, then wait for both."""
    for work in (dist.isend(out, to), dist.irecv(incoming, source)):
        if work is not None:
            work.wait()
