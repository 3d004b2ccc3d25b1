"""Exercise 5 of 06_ddp: a hook that sends half the bytes."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.properties import AT_ONCE, EVERY_RANK, IN_A_GROUP, REDUCES
from course_lib.checks.watch import ALWAYS, ORDER, UNWAITED, Watch, bits_of

SCALE = 300.0  # sums of 10**rank times this do not fit into float16
# buckets in flight together: a label, the count of numbers, their scale, what rank 0 multiplies
ROUNDS = (
    (("a bucket of 3 numbers", 3, SCALE, 1.0),),
    (("a bucket of 1 number", 1, SCALE, 1.0),),
    (("a bucket of 8 numbers", 8, SCALE, 1.0),),
    (("the same memory with the next step's numbers, of 1e-7", 8, 1e-7 / 3, 1.0),),
    (
        ("the first of two buckets in flight", 8, -SCALE, 1.0),
        ("the second of two buckets in flight", 8, SCALE / 3, 1.0),
    ),
    (("a bucket with nan on rank 0", 3, SCALE, torch.nan),),
    (("a bucket with zeros on rank 0", 3, SCALE, 0.0),),
)

EQUAL = Cause(
    "The ranks differ in the last digits, and so would their weights: on every rank the mean is "
    "what came back, and nothing of its own."
)
STALE = Cause(
    "The first buckets were right: these are numbers of another bucket, or of the step before. "
    "Convert flat in every call, into memory of its own."
)
TINY = Cause("Small numbers got lost: bfloat16 keeps 1e-8, too, so send them as they are.")
DIVISOR = Cause("Divided by 2: divide by the size of the group, whatever it is.")
LEFT_OUT = Cause("Some of the numbers are right: send all of them, whatever their count is.")
OWN = Cause(
    "That is this rank's own gradient: flat is not what was sent. Wait, then copy what came back "
    "into flat; copy_ converts to float32."
)
OTHER_TENSOR = Cause("Other ranks are not in it: read the very tensor that all_reduce is given.")
RANGE = Cause("float16 ends at 65504: the sum does not fit. bfloat16 has the range of float32.")
SUMMED = Cause("{p} times too large: hooks leave the mean, not the sum.")
MEAN_TWICE = Cause("{p} times too small: the mean was taken twice.")
FLOAT32 = Cause("That is float32: convert first, then send.")
AT_THE_END = Cause("No overlap: start in __init__.")
OTHER_MEMORY = Cause(
    "What looked into flat still sees the old memory (in DDP every param.grad is a view of it). "
    "Write into it: flat.copy_(...)."
)


def send(rank: int, answer: Callable[..., Any], grouped: bool = False) -> dict[str, Any]:
    """Send the buckets, `grouped` only the first ones: in two groups, which halve the world."""
    p, group = dist.get_world_size(), dist.group.WORLD
    if grouped:
        parts = [list(range(p // 2)), list(range(p // 2, p))]
        group = [dist.new_group(part) for part in parts][rank >= p // 2]
    watch, memory, alone = Watch(), dict[int, Any](), dist.get_world_size(group) == 1
    for together in ROUNDS[:3] if grouped else ROUNDS:
        flats = []
        for _, n, scale, first in together:
            flat = memory.setdefault(n, torch.empty(n))
            flat = flat if len(together) == 1 else flat.clone()
            factor = scale * 10.0**rank * (1.0 if rank else first)
            flats.append(flat.copy_(torch.arange(1.0, n + 1) * factor))
        addresses = [flat.data_ptr() for flat in flats]
        label = " and ".join(label for label, *_ in together) + (", in a group" if grouped else "")
        with watch.step(label) as step:
            handles = [answer(flat, group) for flat in flats]
            watch.mark("wait() is called")
            for handle in handles:
                handle.wait()
        step.show(
            mean=dict(zip((label for label, *_ in together), flats, strict=True)),
            memory="its own" if addresses == [flat.data_ptr() for flat in flats] else "another",
            bits=[dist.get_process_group_ranks(group), bits_of(*flats)],
        )
        if alone:  # then it may do without any call
            step.show(**{UNWAITED: [], ORDER: []})
    return watch.seen


SMALL, COPY = "self.small = flat.bfloat16()", "self.flat.copy_(self.small)"
KEPT = ("def __init__(self, flat, group):", "kept = {}\n\ndef __init__(self, flat, group):")

HALF = Exercise(
    key="ddp-5",
    title="half the bytes",
    check=ByExample(
        observe_on_rank=send,
        worlds=(3, 4, 2, 1),
        runs=lambda p: ({}, {"grouped": True}) if p > 2 else ({},),
        facets=(*ALWAYS, "mean", ORDER, "bits", "memory"),
        equal=("bits",),
        looks=(("mismatch", EVERY_RANK),),
        rtol=0.03,  # bfloat16 keeps 8 bits: each rounding is off by at most 0.4 %
        success="The mean within 2 %, from half the bytes, on 1 to 4 ranks, also in a group.",
    ),
    wrong=(
        Edit("self.flat.copy_(self.small)", "self.flat = (self.small.float())", OWN),
        Edit("all_reduce(self.small,", "all_reduce(self.small.clone(),", OTHER_TENSOR),
        Edit(".div_(self.p)", "", SUMMED),
        Edit(".div_(self.p)", ".div_(self.p).div_(self.p)", MEAN_TWICE),
        Edit(
            "self.small = flat.bfloat16()",
            "self.small = flat",
            FLOAT32,
            also=(("copy_(self.small)", "copy_(self.small.bfloat16())"),),
        ),
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
        Edit("async_op=True)", "async_op=True)\nself.work.wait()", AT_ONCE),
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
        Edit("div_(self.p)", "div_(2)", DIVISOR),
        Edit(
            "flat.bfloat16()",
            "flat[: len(flat) // 2 * 2].bfloat16()",
            LEFT_OUT,
            also=((COPY, "self.flat[: len(self.small)].copy_(self.small)"),),
        ),
        *(*REDUCES, *IN_A_GROUP),
    ),
)
