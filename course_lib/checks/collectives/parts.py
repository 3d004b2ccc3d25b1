"""Tools for the checks of 04_collectives: what ranks are given, what a hang proves, rounds.

Rank r is given a multiple of 10**r, so that a wrong sum tells which ranks are in it.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.exercise import Cause
from course_lib.checks.expect import difference
from course_lib.checks.expectations import Demand
from course_lib.checks.on_ranks import At, Observed, Trouble, watch
from course_lib.core import Event

WORLDS = (4, 3, 6, 2, 1)  # on few ranks, wrong answers look alike; the lesson shows 4
DIGITS = 1 + 2.0**-30  # times this, numbers need more digits than float32 has
LARGE = 10**17  # with this added, they need more than float64 has
MESSAGES = ("send", "recv")
Key = tuple[int | None, int | None, int]  # of a message: sender, receiver, number

SENDS_FIRST = Cause(
    "All of them send first, and every receiver is busy sending: a circle. Start both with isend "
    "and irecv, then wait for both."
)
DROPPED = Cause(
    "{seen}: keep the handle of each, and call wait() on both, the send's and the receive's, "
    "before you return.",
    {"seen": "isend and irecv return before the message has moved"},
)
RETURNED = DROPPED.of(seen="A rank returned before its send was taken")
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
OTHER_MEMORY = Cause(
    "Who holds a view of x still sees the old numbers, as in DDP, where gradients are views of a "
    "bucket: write into x."
)
RETURN_X = Cause("Return x itself, not a copy.")
SECOND = ", second call"
KEEPS = Cause(
    "The first call was right: keep nothing for the next one, no numbers and no buffer. Every call "
    "starts afresh, with new tensors."
)
NOT_AFRESH = (lambda at, _got, _item: SECOND in at.label, KEEPS)
NOT_A_TENSOR = (lambda _at, got, _item: not isinstance(got, Tensor | None), ONE_TENSOR)


@dataclass(frozen=True)
class Numbered:
    """Input of the ranks in a `call`: the second, 1, has other numbers than the first, 0."""

    call: int = field(default=0, kw_only=True)

    @property
    def which(self) -> str:
        """A few words for labels, if this is the second call."""
        return SECOND * self.call


@dataclass(frozen=True)
class Given(Numbered):
    """Input of the ranks: 1, 2, 3 ... times 10**rank, whose sums are exact.

    In float64 they have more digits than float32 keeps, in int64 more than float64 does. With
    `rank_1`, all ranks but that one are given zeros; with `nan`, rank 0's last number is none.
    """

    shape: tuple[int, ...] = (3,)
    dtype: torch.dtype = torch.float64
    rank_1: bool = False
    nan: bool = False

    def __str__(self) -> str:
        name = str(self.dtype).removeprefix("torch.")
        which = ", zeros but on rank 1" * self.rank_1 + ", a nan on rank 0" * self.nan
        return f"{name} {list(self.shape)}{which}{self.which}"

    def of(self, rank: int) -> Tensor:
        """Return what a rank is given."""
        count = torch.arange(1, torch.Size(self.shape).numel() + 1).view(self.shape) + 5 * self.call
        times = (count * 10**rank * (rank == 1 or not self.rank_1)).to(self.dtype)
        if self.nan and rank == 0:
            times[..., -1] = torch.nan
        if self.dtype == torch.int64:
            return times + LARGE
        return times * DIGITS if self.dtype == torch.float64 else times

    def total(self, p: int) -> Tensor:
        """Return the sum over p ranks."""
        return torch.stack([self.of(rank) for rank in range(p)]).sum(0)


def given(at: At) -> Given:
    """Return what the ranks of this run were given."""
    return at.options["given"]


def both_calls(
    runs: Callable[[int], Sequence[dict[str, Any]]],
) -> Callable[[int], list[dict[str, Any]]]:
    """Return these runs, each followed by one with other numbers of the same shape and dtype."""

    def doubled(p: int) -> list[dict[str, Any]]:
        return [
            {
                name: replace(o, call=call) if isinstance(o, Numbered) else o
                for name, o in run.items()
            }
            for run in runs(p)
            for call in (0, 1)
        ]

    return doubled


@dataclass
class InPlace(Observed):
    """One use of an answer that writes into x: what x holds after it, and whether in its memory."""

    x: Any = None
    same_memory: bool = True


def watch_in_place(rank: int, answer: Callable[..., Any], given: Given) -> dict[str, InPlace]:
    """Watch an answer that is to replace x by its result, in x's own memory."""
    x = given.of(rank)
    memory = x.data_ptr()
    seen = watch_call(given.call, answer, x, x=x)
    same_memory = x.data_ptr() == memory
    return {str(given): InPlace(**vars(seen), x=x.clone(), same_memory=same_memory)}


FIRST = "what the first call returned"
STILL_THERE = Demand(lambda at: FIRST not in at.seen.changed, f"{FIRST} has changed", KEEPS)
_kept: dict[str, Any] = {}  # on a rank: the answer, what it returned last, and a copy of that


def watch_call(
    call: int, answer: Callable[..., Any], *arguments: Any, **inputs: Tensor
) -> Observed:
    """Watch one of two calls, in runs of their own; the second is of the answer of the first run.

    So it finds all that the first call has kept. If it changes what that has returned, this is
    among what it changed.
    """
    answer, results = _kept["answer"] if call else answer, list[Any]()

    def noted(*arguments: Any) -> Any:
        results.append(answer(*arguments))
        return results[-1]

    seen = watch(noted, *arguments, **inputs)
    if call and isinstance(_kept["result"], Tensor):
        seen.changed += (FIRST,) * bool(difference(_kept["result"], _kept["copy"])[0])
    _kept.update(answer=answer, result=results[0], copy=seen.value)
    return seen


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


def _returned(trouble: Trouble) -> bool:
    """Return whether all whose message was lost have returned."""
    lost = {rank for rank, _ in trouble.dropped}
    return bool(lost) and lost.issubset(trouble.returned)


TROUBLE = (
    ("hang", _returned, RETURNED),
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
ALL_WAITED = Demand(
    _both_waited,
    lambda at: "all ranks together wait for {} sends, and for {} receives".format(
        *(sum(count(each, kind) for each in at.everyone) for kind in MESSAGES)
    ),
    DROPPED,
)


SAME_MEMORY = Demand(lambda at: at.seen.same_memory, "x has got other memory", OTHER_MEMORY)
RETURNS_X = Demand(lambda at: at.seen.aliased, "it returns another tensor than x", RETURN_X)


def bytes_of_all(at: At) -> int:
    """Return the bytes that all ranks together send."""
    events = (event for each in at.everyone for event in each.seen.events)
    return sum(event.num_bytes for event in events if event.kind == "send")


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
