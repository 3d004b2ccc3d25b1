"""Exercise 5 of 06_ddp, with its planted mistakes: a hook that sends half the bytes."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.ddp.parts import LATE_S, come_late, digits, row
from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import run
from course_lib.core import COMMUNICATION_KINDS, Event
from course_lib.ranks import Ranks, record

WORLD_SIZES = (3, 4, 2, 1)
LENGTHS = (3, 1, 8)
SCALE = 300.0  # sums of 10**rank times this do not fit into float16
TOLERANCE = 0.02  # bfloat16 keeps 8 bits: each rounding is off by at most 0.4 %
OWN = (
    "That is this rank's own gradient: flat is not what was sent. Wait, then copy what came back "
    "into flat; copy_ converts to float32."
)


class HalfTheBytes:
    """The right answer: all-reduces a bfloat16 copy; wait() copies its mean back into flat."""

    def __init__(self, flat: Tensor, group: Any) -> None:
        self.flat, self.p = flat, dist.get_world_size(group)
        self.small = flat.bfloat16()
        self.work = dist.all_reduce(self.small, group=group, async_op=True)

    def wait(self) -> None:
        self.work.wait()
        self.flat.copy_(self.small).div_(self.p)


# --- the check


@dataclass
class Sent:
    """The result and traffic of one use of the hook on one rank."""

    flat: Tensor
    calls: list[Event]
    waited_s: float
    started: bool
    same: bool


def _use(rank: int, answer: Callable[..., Any], pairs: bool) -> list[Sent]:
    """Send a bucket of each length, the last rank late in the first; in pairs of ranks, or all."""
    group: Any = dist.group.WORLD
    if pairs:
        group = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    used = []
    for number, n in enumerate(LENGTHS):
        flat = torch.arange(1, n + 1) * SCALE * 10.0**rank
        memory = flat.data_ptr()
        with record() as log:
            if number == 0:
                come_late(rank)
            handle = answer(flat, group)
            moment_s = time.perf_counter()
            handle.wait()
        waits = [e for e in log.events if e.kind == "wait" and e.end_s <= moment_s]
        calls = [event for event in log.events if event.kind in COMMUNICATION_KINDS]
        started = any(call.start_s <= moment_s for call in calls)
        waited_s = sum(event.duration_s for event in waits)
        used.append(Sent(flat, calls, waited_s, started, flat.data_ptr() == memory))
    return used


def check_half(answer: Callable[..., Any]) -> str:
    """Check 1 to 4 ranks, all or in pairs: the mean, with half the bytes, without waiting."""
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            _judge(run(ranks, _use, answer, False), p, list(range(p)))
            if p == 4:
                by_rank = run(ranks, _use, answer, True)
                _judge(by_rank[:2], 2, [0, 1], "in a group of 2, ")
                _judge(by_rank[2:], 2, [2, 3], "in a group of 2, ")
    return "The mean within 2 %, from half the bytes, on 1 to 4 ranks, also in a group."


def _judge(
    by_rank: Sequence[Sequence[Sent]], p: int, members: Sequence[int], how: str = ""
) -> None:
    total = sum(10.0**rank for rank in members)
    for number, n in enumerate(LENGTHS):
        one = torch.arange(1, n + 1) * SCALE
        for rank, uses in zip(members, by_rank, strict=True):
            used, where = uses[number], f"{how}rank {rank}, a bucket of {n} numbers, {p} ranks"
            mean = one * total / p
            if used.flat.dtype != torch.float32:
                raise CheckFailed(f"{where}: flat is {used.flat.dtype} now; it stays float32.")
            if not _near(used.flat, mean):
                raise CheckFailed(
                    f"{where}: need the mean {row(mean)} within 2 %; got {row(used.flat)}. "
                    f"{_why(used.flat, one, rank, p, total, bool(how))}"
                )
            _expect_half(used, where, n)


def _expect_half(used: Sent, where: str, n: int) -> None:
    sizes = [call.num_bytes for call in used.calls]
    if sizes == [4 * n]:
        raise CheckFailed(
            f"{where}: {4 * n} bytes were sent, in float32; need {2 * n}. Convert first, then send."
        )
    if sizes != [2 * n] or used.calls[0].kind != "all_reduce":
        calls = ", ".join(f"{call.kind} of {call.num_bytes} bytes" for call in used.calls)
        got = calls or "none that had ended when wait() returned. Wait, then copy"
        raise CheckFailed(f"{where}: need one all_reduce of {2 * n} bytes; got {got}.")
    if not used.started:
        raise CheckFailed(
            f"{where}: nothing is sent before wait() is called: no overlap. Start in __init__."
        )
    if not used.same:
        raise CheckFailed(
            f"{where}: flat has got other memory, and what looked into it still sees the old one "
            "(in DDP every param.grad is a view of flat). Write into it: flat.copy_(...)."
        )
    if used.waited_s > LATE_S / 2:
        raise CheckFailed(
            f"{where}: {used.waited_s:.2f} s of waiting before wait() was called: no overlap. "
            "Start with async_op=True; wait, and convert back, in wait()."
        )


def _near(got: Any, wanted: Tensor) -> bool:
    return torch.allclose(got, wanted, rtol=TOLERANCE, atol=0)


def _why(got: Tensor, one: Tensor, rank: int, p: int, total: float, grouped: bool) -> str:
    mean, own = one * total / p, one * 10**rank
    if not torch.isfinite(got).all():
        return "float16 ends at 65504: the sum does not fit. bfloat16 has the range of float32."
    if grouped and _near(got, one * digits(4) / 4):
        return "That is the mean over all ranks: pass group=group to all_reduce."
    if grouped and _near(got, mean * p / 4):
        return "Divide by the size of the group, which is not that of the world."
    causes = [
        (own, OWN),
        (mean * p, f"{p} times too large: hooks leave the mean, not the sum."),
        (mean / p, f"{p} times too small: the mean was taken twice."),
        (own / p, OWN),
    ]
    return next((says for wrong, says in causes if _near(got, wrong)), "Which digits are lost?")


# --- planted mistakes


class _NotConvertedBack(HalfTheBytes):
    def wait(self) -> None:
        self.work.wait()
        self.flat = self.small.float() / self.p


class _NotWaiting(HalfTheBytes):
    def wait(self) -> None:
        self.flat.copy_(self.small).div_(self.p)


class _Summed(HalfTheBytes):
    def wait(self) -> None:
        self.work.wait()
        self.flat.copy_(self.small)


class _MeanTwice(HalfTheBytes):
    def wait(self) -> None:
        super().wait()
        self.flat.div_(self.p)


class _ConvertsAfterwards(HalfTheBytes):
    def __init__(self, flat: Tensor, group: Any) -> None:
        self.flat, self.p = flat, dist.get_world_size(group)
        self.work = dist.all_reduce(flat, group=group, async_op=True)

    def wait(self) -> None:
        self.work.wait()
        self.flat.copy_(self.flat.bfloat16()).div_(self.p)


class _Waits(HalfTheBytes):
    def __init__(self, flat: Tensor, group: Any) -> None:
        super().__init__(flat, group)
        self.work.wait()


class _OtherMemory(HalfTheBytes):
    def wait(self) -> None:
        self.work.wait()
        self.flat.data = self.small.float() / self.p


class _AllInWait(HalfTheBytes):
    def __init__(self, flat: Tensor, group: Any) -> None:
        self.flat, self.group = flat, group

    def wait(self) -> None:
        HalfTheBytes(self.flat, self.group).wait()


class _Float16(HalfTheBytes):
    def __init__(self, flat: Tensor, group: Any) -> None:
        self.flat, self.p = flat, dist.get_world_size(group)
        self.small = flat.half()
        self.work = dist.all_reduce(self.small, group=group, async_op=True)


class _WholeWorld(HalfTheBytes):
    def __init__(self, flat: Tensor, group: Any) -> None:
        super().__init__(flat, None)


class _WorldSize(HalfTheBytes):
    def __init__(self, flat: Tensor, group: Any) -> None:
        super().__init__(flat, group)
        self.p = dist.get_world_size()


HALF = Exercise(
    key="ddp-5",
    title="half the bytes",
    check=check_half,
    reference=HalfTheBytes,
    mistakes=(
        Mistake("not converted back", _NotConvertedBack, says="copy what came back into flat"),
        Mistake("not waiting", _NotWaiting, says="Wait, then copy"),
        Mistake("sum for mean", _Summed, says="the mean, not the sum"),
        Mistake("mean twice", _MeanTwice, says="the mean was taken twice"),
        Mistake("converts afterwards", _ConvertsAfterwards, says="Convert first, then send"),
        Mistake("waits at once", _Waits, says="before wait() was called"),
        Mistake("all in wait", _AllInWait, says="Start in __init__"),
        Mistake("other memory", _OtherMemory, says="flat has got other memory"),
        Mistake("float16", _Float16, says="float16 ends at 65504"),
        Mistake("whole world", _WholeWorld, says="pass group=group"),
        Mistake("size of the world", _WorldSize, says="which is not that of the world"),
    ),
)
