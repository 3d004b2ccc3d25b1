"""Tools for the checks of 04_collectives: what ranks are given, and what their messages take.

Rank r is given a multiple of 10**r, so that a wrong sum tells which ranks are in it. Each run is
one call of the answer, so that no message of one call is taken for one of the next.
"""

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.cases import NO_RESULT
from course_lib.checks.exercise import Cause
from course_lib.checks.judge import ByExample
from course_lib.checks.on_ranks import Run, calls_of
from course_lib.checks.properties import SEEDS, Done, Property, around, result, within
from course_lib.checks.watch import CHANGED, OVERWRITTEN, UNWAITED, Watch
from course_lib.core import Event
from course_lib.ranks import record

WORLDS = (4, 3, 6, 2, 1)  # on few ranks, wrong answers look alike; the lesson shows 4
DIGITS = 1 + 2.0**-30  # times this, numbers need more digits than float32 has
LARGE = 10**17  # with this added, they need more than float64 has
KINDS = ("send", "recv")
Key = tuple[int | None, int | None, int]  # of a message: sender, receiver, number

# facets
KIND, SHAPE, VALUE, AGAIN = "it returns", "shape", "value", "value of a second call"
FIRST, MEMORY = "what the first call returned", "memory of the result"
X, VIEW = "x", "a view of x"
OTHERS, PEERS = "other calls", "sends to"
SENT, RECEIVED, ROUNDS = "messages sent", "messages received", "rounds of all messages together"
BYTES, ALL_BYTES, HELD = "bytes sent", "bytes sent by all ranks", "bytes that the result keeps"
FACETS = (
    *(UNWAITED, OVERWRITTEN, KIND, SHAPE, VALUE, AGAIN, X, VIEW, FIRST, CHANGED, MEMORY),
    *(OTHERS, PEERS, SENT, RECEIVED, BYTES, HELD, ALL_BYTES, ROUNDS),
)

HANG = Cause(
    "Follow the arrows: who waits for whom? If all of them send first, nobody receives: start both "
    "with isend and irecv, then wait for both. Every message needs both its ends, whatever its "
    "numbers are."
)
UNLIKE = Cause(
    "What is sent and what it is received into need the same dtype and the same number of numbers."
)
DROPPED = Cause(
    "isend and irecv return before the message has moved: keep the handle of each, and call wait() "
    "on both, the send's and the receive's, before you return."
)
IN_USE = Cause("Until wait() returns, its tensor is in use: leave it alone, and use another one.")
ALIASED = Cause(
    "Return a new tensor, also on 1 rank: whoever writes into the result must not change the input."
)
KEEPS = Cause(
    "The first call was right: keep nothing for the next one, no numbers and no buffer. Every call "
    "starts afresh, with new tensors."
)
IN_PLACE = Cause("x itself has to become what you return.")
OTHER_MEMORY = Cause(
    "Who holds a view of x still sees the old numbers, as in DDP, where gradients are views of a "
    "bucket: write into x."
)
RETURN_X = Cause("Return x itself, not a copy.")
ONE_TENSOR = Cause("Return one tensor, in one piece: no list, no tuple, no number.")
FROM_MESSAGES = Cause("Build it from messages: send and recv, isend and irecv, or exchange.")
LOOKS = {
    **{"hang": HANG, "mismatch": UNLIKE, UNWAITED: DROPPED, OVERWRITTEN: IN_USE, KIND: ONE_TENSOR},
    **{AGAIN: KEEPS, FIRST: KEEPS, X: IN_PLACE, VIEW: OTHER_MEMORY, OTHERS: FROM_MESSAGES},
}.items()


@dataclass(frozen=True)
class Given:
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
        return f"{name} {list(self.shape)}{which}"

    def of(self, rank: int, call: int) -> Tensor:
        """Return what a rank is given in a call; the second, 1, has other numbers."""
        count = torch.arange(1, torch.Size(self.shape).numel() + 1).view(self.shape) + 5 * call
        times = (count * 10**rank * (rank == 1 or not self.rank_1)).to(self.dtype)
        if self.nan and rank == 0:
            times[..., -1] = torch.nan
        if self.dtype == torch.int64:
            return times + LARGE
        return times * DIGITS if self.dtype == torch.float64 else times


def both_calls(*cases: Given, **options: Any) -> list[dict[str, Any]]:
    """Return the options of two runs for each input, the second with other numbers."""
    return [{"given": case, "call": call, **options} for case in cases for call in (0, 1)]


_kept: dict[str, Any] = {}  # on a rank: the answer, what its first call returned, all handles


def use(
    answer: Callable[..., Any],
    x: Tensor,
    *more: Any,
    call: int,
    label: str,
    budgets: Mapping[str, int],
    in_place: bool = False,
    name: str = "x",
    shape: Sequence[int] = (),
) -> dict[str, Any]:
    """Watch the first call of an answer, 0, or the second of the same, 1, in a run of its own.

    So it finds all that the first one has kept. The handles stay, and so do their messages.
    x is called `name`; what is returned needs this `shape`, by default that of x.
    """
    if not call:
        _kept.clear()
    answer = _kept.get("answer", answer)
    watch, view = Watch(), x.view(-1)
    given = {} if in_place else {name: x}
    with watch.step(label + ", second call" * call, **given) as step, record() as log:
        got = answer(x, *more)
    result = got if isinstance(got, Tensor) else None
    memory = None if result is None else result.untyped_storage()
    is_x = memory is not None and memory.data_ptr() == x.untyped_storage().data_ptr()
    shape = (shape or x.shape) if result is None else result.shape
    kind = type(got).__name__ if got is not result else "Tensor or None"
    step.show(**{KIND: kind, SHAPE: str(list(shape))})
    step.show(**{(VALUE, AGAIN)[call]: result, MEMORY: f"that of {name}" if is_x else "its own"})
    if in_place:
        step.show(**{X: x, VIEW: view})
    if call:
        step.show(**{FIRST: _kept.get("first")})
    calls = calls_of(log.events)
    messages = [event for event in calls if event.kind in KINDS]
    step.show(**{OTHERS: [event.kind for event in calls if event.kind not in KINDS]})
    step.show(messages=messages, budgets=budgets, held=memory.nbytes() if memory else 0)
    _kept.update(answer=answer, first=result)
    _kept.setdefault("steps", []).append(step)
    return watch.seen


# --- what messages take


@dataclass(frozen=True, kw_only=True)
class ByMessages(ByExample):
    """A check by example that also holds what the messages take to their budgets."""

    facets: Sequence[str] = FACETS
    rtol: float | None = 0.0

    def observe(self, answer: Any) -> Iterator[Run]:
        """Run the answer; in what the ranks show, messages become a facet for each budget."""
        for run in super().observe(answer):
            for label in run.by_rank[0] if run.by_rank else ():
                _hold_to_budgets([rank[label] for rank in run.by_rank])
            yield run


def _hold_to_budgets(by_rank: Sequence[dict[str, Any]]) -> None:
    everyones = [seen.pop("messages") for seen in by_rank]
    together = {ROUNDS: _num_rounds(everyones), ALL_BYTES: sum(map(_bytes_sent, everyones))}
    for seen, messages in zip(by_rank, everyones, strict=True):
        sent = sum(event.kind == "send" for event in messages)
        own = {SENT: sent, RECEIVED: len(messages) - sent, BYTES: _bytes_sent(messages)}
        got = together | own | {HELD: seen.pop("held")}
        for name, most in seen.pop("budgets").items():
            seen[name] = f"at most {most}" if got[name] <= most else f"{got[name]}"


def _bytes_sent(messages: Iterable[Event]) -> int:
    return sum(event.num_bytes for event in messages if event.kind == "send")


def _keyed(messages: Iterable[Event]) -> list[tuple[Key, Event]]:
    """Return a rank's messages with what both ends know them by: sender, receiver, number."""
    found, numbers = list[tuple[Key, Event]](), Counter[tuple[int | None, int | None]]()
    for event in messages:
        ends = (event.rank, event.peer) if event.kind == "send" else (event.peer, event.rank)
        found.append(((*ends, numbers[ends]), event))
        numbers[ends] += 1
    return found


def _num_rounds(everyones: Iterable[Sequence[Event]]) -> int:
    """Return how many rounds the messages of all ranks take, one after another.

    A message comes a round after those that one of its two ends had waited for when it started it
    (its event ends when the wait for it returns).
    """
    before = defaultdict[Key, set[Key]](set)
    for messages in map(_keyed, everyones):
        for key, event in messages:
            before[key] |= {k for k, earlier in messages if earlier.end_s <= event.start_s}

    @cache
    def round_of(key: Key) -> int:
        return 1 + max(map(round_of, before[key]), default=0)

    return max(map(round_of, list(before)), default=0)


# --- for planted wrong answers


def _messages(change: Callable[..., Any]) -> Callable[[Any], Any]:
    """Replace send and isend by `change(isend, tensor, to)` while the answer runs."""

    def context() -> AbstractContextManager[Any]:
        changed = partial(change, dist.isend)
        return patch.multiple(dist, send=changed, isend=changed)

    return within(context)


def _not_waited(isend: Callable[..., Any], x: Tensor, *to: Any) -> Done:
    isend(x, *to)
    return Done()


def _one_buffer(answer: Callable[..., Any]) -> Callable[..., Any]:
    buffers = dict[Any, Tensor]()

    def broken(*given: Any) -> Any:
        got = answer(*given)
        if got is None:
            return None
        return buffers.setdefault((got.shape, got.dtype), torch.empty_like(got)).copy_(got)

    return broken


NOT_WAITED = Property("not waited", DROPPED, _messages(_not_waited))
EITHER = (
    Property("returns nothing", NO_RESULT, result(lambda _got: None)),
    Property("returns a list", ONE_TENSOR, result(lambda got: [got])),
    SEEDS,
)
RETURNS_NEW = (*EITHER, NOT_WAITED, Property("into one buffer", KEEPS, around(_one_buffer)))
IN_X = (*EITHER, Property("returns a copy", RETURN_X, result(Tensor.clone)))


def me() -> tuple[int, int]:
    """Return this rank, and the number of ranks."""
    return dist.get_rank(), dist.get_world_size()


def swap(out: Tensor, to: int, incoming: Tensor, source: int) -> None:
    """Send and receive at once, then wait for both."""
    for work in (dist.isend(out, to), dist.irecv(incoming, source)):
        if work is not None:
            work.wait()
