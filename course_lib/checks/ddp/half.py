"""Exercise 5 of 06_ddp: a hook that sends half the bytes."""

import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.ddp.parts import come_late
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import Calls, Demand, Numbers
from course_lib.checks.on_ranks import At, OnRanks, calls_of
from course_lib.core import Event
from course_lib.ranks import record

SCALE = 300.0  # sums of 10**rank times this do not fit into float16
TOLERANCE = 0.02  # bfloat16 keeps 8 bits: each rounding is off by at most 0.4 %


@dataclass(frozen=True)
class OneBucket:
    """Numbers to send: 1, 2, 3 ... times `factor`, times 10**rank; on rank 0 times `first`."""

    label: str
    length: int
    factor: float = SCALE
    first: float = 1.0

    def on(self, rank: int) -> Tensor:
        """Return the numbers of a rank."""
        return self.ones() * self.of(rank)

    def ones(self) -> Tensor:
        """Return 1, 2, 3 ..."""
        return torch.arange(1.0, self.length + 1)

    def of(self, rank: int) -> float:
        """Return what the numbers of a rank are multiplied with."""
        return self.factor * 10.0**rank * (1.0 if rank else self.first)


ROUNDS = (
    (OneBucket("a bucket of 3 numbers", 3),),
    (OneBucket("a bucket of 1 number", 1),),
    (OneBucket("a bucket of 8 numbers", 8),),
    (OneBucket("the same memory with the next step's numbers, of 1e-7", 8, 1e-7 / 3),),
    (
        OneBucket("the first of two buckets in flight", 8, -SCALE),
        OneBucket("the second of two buckets in flight", 8, SCALE / 3),
    ),
    (OneBucket("a bucket with nan on rank 0", 3, first=float("nan")),),
    (OneBucket("a bucket with zeros on rank 0", 3, first=0.0),),
)
BUCKETS = [bucket for together in ROUNDS for bucket in together]

LATER = 3  # from this one on, there was a bucket of the same length before

EQUAL = Cause(
    "The ranks differ in the last digits, and so would their weights: on every rank the mean is "
    "what came back, and nothing of its own."
)
STALE = Cause(
    "The first buckets were right: these are numbers of another bucket, or of the step before. "
    "Convert flat in every call, into memory of its own."
)
TINY = Cause("Small numbers got lost: bfloat16 keeps 1e-8, too, so send them as they are.")
HIDES = Cause(
    "nan has to stay: it tells that a step went wrong. Convert, divide, and change nothing else."
)
EVERY_BUCKET = Cause("Every rank sends every bucket, also one of zeros: the others wait for it.")
DIVISOR = Cause("{x:.3g} times the mean: divided by something else than the size of the group.")
LEFT_OUT = Cause("Some of the numbers are right: send all of them, whatever their count is.")
OWN = Cause(
    "That is this rank's own gradient: flat is not what was sent. Wait, then copy what came back "
    "into flat; copy_ converts to float32."
)
STAYS = Cause("flat stays float32: copy_ converts.")
RANGE = Cause("float16 ends at 65504: the sum does not fit. bfloat16 has the range of float32.")
WHOLE_WORLD = Cause("Ranks of other groups are in it: pass group=group to all_reduce.")
WORLD_SIZE = Cause("Divide by the size of the group, not by that of the world.")
SUMMED = Cause("{p} times too large: hooks leave the mean, not the sum.")
MEAN_TWICE = Cause("{p} times too small: the mean was taken twice.")
FLOAT32 = Cause("That is float32: convert first, then send.")
NOT_WAITED = Cause("Other ranks are not in it: wait, then copy the sum.")
NOT_ENDED = Cause("It had not ended when wait() returned. Wait, then copy.")
ALL_REDUCE = Cause("One all_reduce per bucket does it.")
AT_THE_END = Cause("No overlap: start in __init__.")
OTHER_MEMORY = Cause(
    "What looked into flat still sees the old memory (in DDP every param.grad is a view of it). "
    "Write into it: flat.copy_(...)."
)
WAITS = Cause("No overlap: start with async_op=True; wait, and convert back, in wait().")


@dataclass
class Sent:
    """The result and traffic of one use of the hook on one rank, in a group of `members`."""

    members: list[int]
    flat: Tensor
    events: list[Event]
    returned_s: float
    windows: tuple[tuple[float, float], ...] = ()
    same_memory: bool = True

    def made(self, event: Event) -> bool:
        """Return whether this hook was running when the event began."""
        return any(start_s <= event.start_s <= end_s for start_s, end_s in self.windows)

    @property
    def calls(self) -> list[Event]:
        """The communication calls, in the order in which they started."""
        return calls_of(self.events)


def _use(rank: int, answer: Callable[..., Any], grouped: bool = False) -> dict[str, Sent]:
    """Send the buckets, the last rank late in the first one; in two groups, three of them."""
    p, group = dist.get_world_size(), dist.group.WORLD
    members, half = list(range(p)), p // 2
    if grouped:
        parts = [list(range(half)), list(range(half, p))]
        groups = [dist.new_group(part) for part in parts]
        members, group = parts[rank >= half], groups[rank >= half]
    used: dict[str, Sent] = {}
    memory: dict[int, Tensor] = {}
    for together in ROUNDS[:3] if grouped else ROUNDS:
        launched = []
        with record() as log:
            for bucket in together:
                flat = memory.setdefault(bucket.length, torch.empty(bucket.length))
                flat = (flat if len(together) == 1 else flat.clone()).copy_(bucket.on(rank))
                address, began_s = flat.data_ptr(), time.perf_counter()
                if not used:
                    come_late(rank)
                handle = answer(flat, group)
                sent = Sent(members, flat, [], time.perf_counter())
                launched.append((bucket, sent, handle, address, began_s))
            for bucket, sent, handle, address, began_s in launched:
                waits_s = time.perf_counter()
                handle.wait()
                sent.windows = ((began_s, sent.returned_s), (waits_s, time.perf_counter()))
                sent.same_memory, sent.flat = sent.flat.data_ptr() == address, sent.flat.clone()
                used[bucket.label + (", in a group" if grouped else "")] = sent
        for _, sent, *_ in launched:
            sent.events = [event for event in log.events if sent.made(event)]
    return used


def _times(factor: Callable[[At], float]) -> Callable[[At], Tensor]:
    return lambda at: BUCKETS[at.number].ones() * factor(at)


def _sum(at: At, ranks: Iterable[int]) -> float:
    return sum(BUCKETS[at.number].of(rank) for rank in ranks)


def _total(at: At) -> float:
    return _sum(at, at.seen.members)


def _everyone(at: At) -> float:
    return _sum(at, range(at.world_size))


def _own(at: At) -> float:
    return BUCKETS[at.number].of(at.rank)


def _mean(at: At) -> float:
    return _total(at) / len(at.seen.members)


def _grouped(factor: Callable[[At], float]) -> Callable[[At], Tensor]:
    """Return a wrong value that only a group smaller than the world can have."""
    return _times(lambda at: factor(at) if len(at.seen.members) < at.world_size else float("nan"))


def _loses_small_ones(at: At, got: Tensor, _item: int | None) -> bool:
    right = _times(_mean)(at)
    return BUCKETS[at.number].factor < 1e-6 and bool((got.abs() <= right * (1 + TOLERANCE)).all())


def _is_bounded(at: At, got: Tensor, _item: int | None) -> bool:
    return not math.isfinite(_mean(at)) and bool(got.isfinite().all())


def _overflows(at: At, got: Tensor, _item: int | None) -> bool:
    return math.isfinite(_mean(at)) and not got.isfinite().all()


def _unknown(at: At) -> Cause:
    """Return what to say about numbers that no known mistake leads to."""
    times = at.seen.flat / _times(_mean)(at)
    if at.number >= LATER:
        return STALE
    if ((times / times[0] - 1).abs() < TOLERANCE).all():
        return DIVISOR.of(x=times[0].item())
    right = (times - 1).abs() < TOLERANCE
    return LEFT_OUT if right.any() else Cause("Print flat before and after: what is in it?")


def _calls(at: At) -> list[tuple[str, int]]:
    """Return the calls that are needed: alone in its group, a rank may do without any."""
    alone = len(at.seen.members) == 1 and not at.seen.calls
    return [] if alone else [("all_reduce", 2 * BUCKETS[at.number].length)]


def _all_equal(at: At) -> bool:
    same = [other.seen.flat for other in at.everyone if other.seen.members == at.seen.members]
    return all(torch.allclose(at.seen.flat, x, rtol=0, atol=0, equal_nan=True) for x in same)


SMALL, COPY = "self.small = flat.bfloat16()", "self.flat.copy_(self.small)"
KEPT = ("def __init__(self, flat, group):", "kept = {}\n\ndef __init__(self, flat, group):")

HALF = Exercise(
    key="ddp-5",
    title="half the bytes",
    check=OnRanks(
        observe_on_rank=_use,
        worlds=(3, 4, 2, 1),
        runs=lambda p: ({}, {"grouped": True}) if p > 2 else ({},),
        trouble=(("hang", "", EVERY_BUCKET), ("mismatch", "", EVERY_BUCKET)),
        expect=(
            Numbers(
                "flat",
                _times(_mean),
                rtol=TOLERANCE,
                what="the mean",
                dtype=STAYS,
                predicates=((_overflows, RANGE), (_is_bounded, HIDES), (_loses_small_ones, TINY)),
                causes=(
                    (WHOLE_WORLD, _grouped(lambda at: _everyone(at) / at.world_size)),
                    (WHOLE_WORLD, _grouped(lambda at: _everyone(at) / len(at.seen.members))),
                    (WORLD_SIZE, _grouped(lambda at: _total(at) / at.world_size)),
                    (OWN, _times(_own)),
                    (SUMMED, _times(_total)),
                    (MEAN_TWICE, _times(lambda at: _mean(at) / len(at.seen.members))),
                    (NOT_WAITED, _times(lambda at: _own(at) / len(at.seen.members))),
                ),
                look=_unknown,
            ),
            Calls(
                _calls,
                other_kind=ALL_REDUCE,
                symptoms=(
                    (lambda got, need: got == [2 * need[0]], FLOAT32),
                    (lambda got, _need: not got, NOT_ENDED),
                ),
                look=ALL_REDUCE,
            ),
            Demand(
                lambda at: all(call.start_s < at.seen.returned_s for call in at.seen.calls),
                "nothing is sent before wait() is called",
                AT_THE_END,
            ),
            Demand(_all_equal, "the mean is near, but not equal on all ranks", EQUAL),
            Demand(lambda at: at.seen.same_memory, "flat has got other memory", OTHER_MEMORY),
            Demand(
                lambda at: (
                    not any(
                        event.kind == "wait" and event.start_s < at.seen.returned_s
                        for event in at.seen.events
                    )
                ),
                "it waits before wait() is called",
                WAITS,
            ),
        ),
        success="The mean within 2 %, from half the bytes, on 1 to 4 ranks, also in a group.",
    ),
    wrong=(
        Edit("self.flat.copy_(self.small)", "self.flat = (self.small.float())", OWN),
        Edit("self.work.wait()", "pass", NOT_WAITED),
        Edit("all_reduce(self.small,", "all_reduce(self.small.clone(),", NOT_WAITED),
        Edit(".div_(self.p)", "", SUMMED),
        Edit(".div_(self.p)", ".div_(self.p).div_(self.p)", MEAN_TWICE),
        Edit(
            "self.small = flat.bfloat16()",
            "self.small = flat",
            FLOAT32,
            also=(("copy_(self.small)", "copy_(self.small.bfloat16())"),),
        ),
        Edit("async_op=True)", "async_op=True)\nself.work.wait()", WAITS),
        Edit(
            "self.flat.copy_(",
            "self.flat.data = (",
            OTHER_MEMORY,
            also=((".div_", ".float().div_"),),
        ),
        Edit(
            "self.work = dist.all_reduce(self.small, group=group, async_op=True)",
            "self.group = group",
            AT_THE_END,
            also=(("self.work.wait()", "dist.all_reduce(self.small, group=self.group)"),),
        ),
        Edit("flat.bfloat16()", "flat.half()", RANGE),
        Edit(
            SMALL,
            f"{SMALL}\nself.mine = flat - self.small",
            EQUAL,
            also=((COPY, f"{COPY}.add_(self.mine)"),),
        ),
        Edit(
            SMALL,
            "self.small = self.kept.setdefault(flat.data_ptr(), flat.bfloat16())",
            STALE,
            also=(KEPT,),
        ),
        Edit(
            SMALL,
            "self.small = self.kept.setdefault(len(flat), flat.bfloat16()).copy_(flat)",
            STALE,
            also=(KEPT,),
        ),
        Edit("flat.bfloat16()", "flat.where(flat.abs() > 1e-6, 0).bfloat16()", TINY),
        Edit("flat.bfloat16()", "flat.nan_to_num().bfloat16()", HIDES),
        Edit(
            "self.work = dist",
            "self.work = flat.any() and dist",
            EVERY_BUCKET,
            also=(("self.work.wait()", "self.work and self.work.wait()"),),
        ),
        Edit("div_(self.p)", "div_(2)", DIVISOR),
        Edit(
            "flat.bfloat16()",
            "flat[: len(flat) // 2 * 2].bfloat16()",
            LEFT_OUT,
            also=((COPY, "self.flat[: len(self.small)].copy_(self.small)"),),
        ),
        Edit("group=group, ", "", WHOLE_WORLD),
        Edit("dist.get_world_size(group)", "dist.get_world_size()", WORLD_SIZE),
    ),
)
