"""Exercise 3 of 09_zero: gradients are reduced in buckets during backward, and only shards stay.

The planted mistakes are in `grads_answers.py`.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch import Tensor

from course_lib.checks.ddp.parts import Bag, digits, row
from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import run
from course_lib.checks.zero import grads_answers as planted
from course_lib.checks.zero.parts import (
    NUMBER_BYTES,
    WORLD_SIZES,
    alive_bytes,
    calls_in,
    close,
    expect_calls,
    flat,
    only_new,
    shard_numel,
    shard_of,
)
from course_lib.core import COMMUNICATION_KINDS
from course_lib.ranks import Ranks, record

SIZES = (4, 2, 2, 1, 5)
BUCKETS = ((4, 2), (3,), (0,))  # numbers of parameters; the second one is frozen
FULL = (1, 0, 2)  # in this order they become full: backward goes from 4 to 0
# the numbers of backward passes that are in the shards after each pass; they are cleared before
# the third
ROUNDS = ((1,), (1, 2), (3,))
WHOLE = (
    "Whole gradients outlive their bucket: set param.grad = None for each of its parameters as "
    "soon as it is sent. (zero_() keeps the memory.)"
)
REFERENCED = (
    "Freed, but still referenced: something else keeps the whole gradients, such as a list of flat "
    "buckets, or a shard that is a view of one."
)


@dataclass
class GradsPass:
    """The results of one backward pass on one rank."""

    shards: list[Any]
    calls: list[tuple[str, int]]
    starts_s: list[float] = field(default_factory=list)  # of the calls
    full_s: list[float] = field(default_factory=list)  # when a bucket had been full, and seen to
    kept: list[tuple[int, list[int]]] = field(default_factory=list)  # by bucket, too long
    whole: list[int] = field(default_factory=list)  # parameters with a gradient afterwards
    alive_bytes: int = 0


def _passes(rank: int, answer: Callable[..., Any]) -> list[GradsPass]:
    module = Bag(SIZES)
    with only_new():
        return _watched(rank, answer, module)


def _watched(rank: int, answer: Callable[..., Any], module: Bag) -> list[GradsPass]:
    buckets = [[module.weights[i] for i in bucket] for bucket in BUCKETS]
    sharded, found = answer(buckets), list[GradsPass]()
    watch = _Watch(module)
    for number in range(len(ROUNDS)):
        if number == 2:
            sharded.shards = [None] * len(BUCKETS)
        with record() as log:
            watch.begin()
            module(10.0**rank * (number + 1)).backward()
        shards = [x.detach().clone() if isinstance(x, Tensor) else x for x in sharded.shards]
        whole = [i for i in module.trained if module.weights[i].grad is not None]
        starts_s = sorted(e.start_s for e in log.events if e.kind in COMMUNICATION_KINDS)
        one = GradsPass(shards, calls_in(log.events), starts_s, watch.full_s, watch.kept, whole)
        known = [tensor for each in [*found, one] for tensor in each.shards if tensor is not None]
        one.alive_bytes = (
            alive_bytes(module, *known, enough=_own_bytes(dist.get_world_size()))
            if not whole
            else 0
        )
        found.append(one)
    return found


def _own_bytes(p: int) -> int:
    """Return the bytes of the shards of all buckets."""
    return sum(shard_numel(sum(SIZES[i] for i in one), p) for one in BUCKETS) * NUMBER_BYTES


class _Watch:
    """A hook after the answer's own, which records the gradients that are whole, and when."""

    def __init__(self, module: Bag) -> None:
        self.module = module
        for i in module.trained:
            module.weights[i].register_post_accumulate_grad_hook(self._look_for(i))

    def begin(self) -> None:
        self.arrived, self.full_s = set[int](), list[float]()
        self.kept = list[tuple[int, list[int]]]()

    def _look_for(self, i: int) -> Callable[[Tensor], None]:
        def look(_param: Tensor) -> None:
            self.arrived.add(i)
            full = [n for n, bucket in enumerate(BUCKETS) if self.arrived.issuperset(bucket)]
            for n in full:
                whole = [one for one in BUCKETS[n] if self.module.weights[one].grad is not None]
                if whole:
                    self.kept.append((n, whole))
            if len(full) > len(self.full_s):
                self.full_s.append(time.perf_counter())

        return look


def check_grads(answer: Callable[..., Any]) -> str:
    """Check 1 to 4 ranks, two passes that add up, a third one: shards, bytes, what is alive."""
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            by_rank = run(ranks, _passes, answer)
        for number in range(len(ROUNDS)):
            for rank, passes in enumerate(by_rank):
                _judge(passes, number, rank, p)
    return (
        "Shards of the mean, added up over backward passes; no whole gradient outlives its bucket."
    )


def _judge(passes: Sequence[GradsPass], number: int, rank: int, p: int) -> None:
    got, where = passes[number], f"rank {rank} of {p}, backward {number + 1}"
    module = Bag(SIZES)
    rows = [flat([module.slope(i) for i in bucket]) for bucket in BUCKETS]
    if len(got.shards) != len(BUCKETS):
        raise CheckFailed(f"{where}: need a shard for each of {len(BUCKETS)} buckets in `shards`.")
    row_bytes = [shard_numel(one.numel(), p) * p * NUMBER_BYTES for one in rows]
    needed = [("reduce_scatter", row_bytes[n]) for n in FULL]
    if p > 1 and not got.calls:
        raise CheckFailed(
            f"{where}: nothing was sent and waited for. When is a bucket full? {SEND}"
        )
    for n, one in enumerate(rows):
        wanted = shard_of(one, rank, p) * digits(p) / p * sum(ROUNDS[number])
        if not close(got.shards[n], wanted):
            raise CheckFailed(
                f"{where}, bucket {n}: need the shard {row(wanted)}; got {row(got.shards[n])}. "
                f"{_why(got.shards[n], one, number, rank, p)}"
            )
    for n, start_s, full_s in zip(FULL, got.starts_s, got.full_s, strict=False):
        if start_s > full_s:
            raise CheckFailed(
                f"{where}: bucket {n} is full, and backward goes on before it is sent. {SEND}"
            )
    expect_calls(where, got.calls, needed, _why_calls(got.calls, needed))
    if got.kept or got.whole:
        n, names = got.kept[0] if got.kept else (len(BUCKETS) - 1, got.whole)
        raise CheckFailed(
            f"{where}: bucket {n} is sent, and param.grad of {len(names)} of its parameters is "
            f"still there. {WHOLE}"
        )
    own = _own_bytes(p)
    if got.alive_bytes > own:
        raise CheckFailed(
            f"{where}: the shards are {own} bytes; {got.alive_bytes} are alive after backward. "
            f"{REFERENCED}"
        )


SEND = "Send in the hook of its last gradient: that is when the memory is needed."


def _why(got: Any, one: Tensor, number: int, rank: int, p: int) -> str:
    if got is None:
        return LOST
    if not isinstance(got, Tensor) or got.shape != (shard_numel(one.numel(), p),):
        return "A shard is [shard_numel]: this rank's part of the flat gradient, and no more."
    total, mine = sum(ROUNDS[number]), shard_of(one, rank, p)
    mean = mine * digits(p) / p
    causes = [
        (mean * total / p, "Averaged twice: divide by the number of ranks once."),
        (mean * total * p, "Summed, not averaged: divide by the number of ranks."),
        (mine * 10**rank * total / p, "Only this rank's own gradient is in it."),
        (mine * 10**rank * total, "Only this rank's own gradient is in it."),
        (mean * ROUNDS[number][-1], OVERWRITTEN),
    ]
    for other in range(p):
        theirs = shard_of(one, other, p) * digits(p) / p * total
        causes.append((theirs, f"That is the shard of rank {other}."))
    if number == 1:
        again = (mean / p + mean * 2 / p, "Averaged twice: divide each new shard once.")
        first_again = (
            mean / p + mean * 2,
            "The sum so far is divided again: only divide what is new.",
        )
        half = (mean * 3 / 2, "The shards add up; there is no mean of backward passes.")
        causes += [again, first_again, half]
    return next(
        (says for wrong, says in causes if close(got, wrong)),
        "The bucket's gradients in the order of its parameters, filled up with zeros: flatten.",
    )


LOST = (
    "No shard: was this bucket sent, and its part kept? A bucket that is sent takes only its own "
    "parameters out of `ready`: those of others may have come already."
)
OVERWRITTEN = (
    "Only the last backward is in it: a shard that is there already has to be added to, as "
    "backward adds to param.grad."
)


def _why_calls(calls: Sequence[tuple[str, int]], needed: Sequence[tuple[str, int]]) -> str:
    kinds = {kind for kind, _ in calls}
    if "all_reduce" in kinds:
        return (
            "An all_reduce leaves the whole mean on every rank: twice the bytes, and memory for "
            "all of it. reduce_scatter leaves a shard."
        )
    if kinds == {"reduce_scatter"} and len(calls) > len(needed):
        return "One message a bucket, when it is full; then forget what was ready."
    return "One reduce_scatter a bucket, in the order in which they become full."


GRADS = Exercise(
    key="zero-3",
    title="shards of gradients",
    check=check_grads,
    reference=planted.ShardedGrads,
    mistakes=planted.mistakes(Mistake),
)
