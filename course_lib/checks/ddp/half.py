"""Exercise 5 of 06_ddp: a hook that sends half the bytes."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.ddp.parts import come_late, digits
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import Calls, Demand, Numbers
from course_lib.checks.on_ranks import At, OnRanks, calls_of
from course_lib.core import Event
from course_lib.ranks import record

LENGTHS = (3, 1, 8)
SCALE = 300.0  # sums of 10**rank times this do not fit into float16
TOLERANCE = 0.02  # bfloat16 keeps 8 bits: each rounding is off by at most 0.4 %

OWN = Cause(
    "That is this rank's own gradient: flat is not what was sent. Wait, then copy what came back "
    "into flat; copy_ converts to float32."
)
STAYS = Cause("flat stays float32: copy_ converts.")
RANGE = Cause("float16 ends at 65504: the sum does not fit. bfloat16 has the range of float32.")
WHOLE_WORLD = Cause("That is the mean over all ranks: pass group=group to all_reduce.")
WORLD_SIZE = Cause("Divide by the size of the group, which is not that of the world.")
SUMMED = Cause("{p} times too large: hooks leave the mean, not the sum.")
MEAN_TWICE = Cause("{p} times too small: the mean was taken twice.")
FLOAT32 = Cause("That is float32: convert first, then send.")
NOT_WAITED = Cause("It had not ended when wait() returned. Wait, then copy.")
ALL_REDUCE = Cause("One all_reduce a bucket does it.")
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
    same_memory: bool

    @property
    def calls(self) -> list[Event]:
        """The communication calls, in the order in which they started."""
        return calls_of(self.events)


def _use(rank: int, answer: Callable[..., Any], grouped: bool = False) -> dict[str, Sent]:
    """Send a bucket of each length, the last rank late in the first; in two groups, or all."""
    p, group = dist.get_world_size(), dist.group.WORLD
    members, half = list(range(p)), p // 2
    if grouped:
        parts = [list(range(half)), list(range(half, p))]
        groups = [dist.new_group(part) for part in parts]
        members, group = parts[rank >= half], groups[rank >= half]
    used: dict[str, Sent] = {}
    for n in LENGTHS:
        flat = _one(n) * 10.0**rank
        memory = flat.data_ptr()
        with record() as log:
            if not used:
                come_late(rank)
            handle = answer(flat, group)
            returned_s = time.perf_counter()
            handle.wait()
        where = f"a bucket of {n} numbers" + (", in a group" if grouped else "")
        same = flat.data_ptr() == memory
        used[where] = Sent(members, flat, list(log.events), returned_s, same)
    return used


def _one(n: int) -> Tensor:
    return torch.arange(1, n + 1) * SCALE


def _times(factor: Callable[[At], float]) -> Callable[[At], Tensor]:
    return lambda at: _one(LENGTHS[at.number]) * factor(at)


def _total(at: At) -> float:
    return sum(10.0**rank for rank in at.seen.members)


def _mean(at: At) -> float:
    return _total(at) / len(at.seen.members)


def _grouped(factor: Callable[[At], float]) -> Callable[[At], Tensor]:
    """Return a wrong value that only a group smaller than the world can have."""
    return _times(lambda at: factor(at) if len(at.seen.members) < at.world_size else float("nan"))


HALF = Exercise(
    key="ddp-5",
    title="half the bytes",
    check=OnRanks(
        observe_on_rank=_use,
        worlds=(3, 4, 2, 1),
        runs=lambda p: ({}, {"grouped": True}) if p > 2 else ({},),
        expect=(
            Numbers(
                "flat",
                _times(_mean),
                rtol=TOLERANCE,
                what="the mean",
                dtype=STAYS,
                predicates=((lambda _at, got, _item: not got.isfinite().all(), RANGE),),
                causes=(
                    (WHOLE_WORLD, _grouped(lambda at: digits(at.world_size) / at.world_size)),
                    (
                        WHOLE_WORLD,
                        _grouped(lambda at: digits(at.world_size) / len(at.seen.members)),
                    ),
                    (WORLD_SIZE, _grouped(lambda at: _total(at) / at.world_size)),
                    (OWN, _times(lambda at: 10.0**at.rank)),
                    (SUMMED, _times(_total)),
                    (MEAN_TWICE, _times(lambda at: _mean(at) / len(at.seen.members))),
                    (NOT_WAITED, _times(lambda at: 10.0**at.rank / len(at.seen.members))),
                ),
                look=Cause("Which digits are lost?"),
            ),
            Calls(
                lambda at: [("all_reduce", 2 * LENGTHS[at.number])],
                other_kind=ALL_REDUCE,
                symptoms=(
                    (lambda got, need: got == [2 * need[0]], FLOAT32),
                    (lambda got, _need: not got, NOT_WAITED),
                ),
                look=ALL_REDUCE,
            ),
            Demand(
                lambda at: at.seen.calls[0].start_s < at.seen.returned_s,
                "nothing is sent before wait() is called",
                AT_THE_END,
            ),
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
        Edit("group=group, ", "", WHOLE_WORLD),
        Edit("dist.get_world_size(group)", "dist.get_world_size()", WORLD_SIZE),
    ),
)
