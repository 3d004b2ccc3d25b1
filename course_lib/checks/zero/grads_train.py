"""Run zero-3 on a rank: backward passes, with hooks around the answer's own."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.ddp.parts import Bag
from course_lib.checks.on_ranks import calls_of, copied
from course_lib.checks.zero.parts import (
    BESIDE,
    alive_bytes,
    named,
    only_new,
    shard_numel,
    telling,
    unwaited_calls,
)
from course_lib.core import Event
from course_lib.ranks import record

SIZES = (4, 2, 2, 1, 5)
BUCKETS = ((4, 2), (3,), (0,))  # numbers of parameters; the second one is frozen
NUMELS = [sum(SIZES[i] for i in bucket) for bucket in BUCKETS]
FULL = (1, 0, 2)  # in this order they become full: backward goes from 4 to 0
OTHER_ORDER = (0, 1, 4, 2, 3)  # of forward; on odd ranks, backward goes from 3 to 2, 4 and 0
ROUNDS = ((1,), (1, 2), (3,), (3, 4), (3, 4, 5), (3, 4, 5, 6))  # passes in the shards
OTHER_SIZES, OTHER_BUCKETS_OF = (3, 1, 4), ((2,), (0,))  # of an object that is alive beside it


@dataclass
class Backward:
    """One backward pass on one rank; `filled_s`: when the hook that filled a bucket ran."""

    shards: Any
    calls: list[Event]
    unwaited: list[str]
    filled_s: list[tuple[float, float]]
    num_kept: int  # whole gradients that outlive their bucket
    alive_bytes: int
    beside: Any  # the shards of the other object, if there is one


def scale(number: int, rank: int, p: int) -> float:
    """Return the gradients of a pass, in slopes: the last ones have zeros, and a nan."""
    odd_ones = {4: 0.0, 5: 0.0 if rank == 0 else 5.0, 6: math.nan if rank == p - 1 else 6.0}
    return odd_ones.get(number, 10.0**rank * number)


class _Watch:
    """Hooks before and after the answer's own: when a gradient came, and what was left then."""

    def __init__(self, module: Bag) -> None:
        self.module = module
        self.begin()

    def begin(self) -> None:
        self.began_s, self.ended_s, self.num_kept = dict[int, float](), dict[int, float](), 0

    def register(self, note: Callable[[int, Tensor], None]) -> None:
        for i in self.module.trained:
            self.module.weights[i].register_post_accumulate_grad_hook(partial(note, i))

    def before(self, i: int, _param: Tensor) -> None:
        self.began_s[i] = time.perf_counter()

    def after(self, i: int, _param: Tensor) -> None:
        self.ended_s[i] = time.perf_counter()
        bucket = next(bucket for bucket in BUCKETS if i in bucket)
        if self.ended_s.keys() >= set(bucket):
            self.num_kept += sum(self.module.weights[k].grad is not None for k in bucket)

    def filled_s(self) -> list[tuple[float, float]]:
        return [
            (max(self.began_s[i] for i in BUCKETS[n]), max(self.ended_s[i] for i in BUCKETS[n]))
            for n in FULL
        ]


def train(
    rank: int, answer: Callable[..., Any], dtype: torch.dtype, beside: bool
) -> dict[str, Backward]:
    """Run the backward passes, of another module in between or not; clear before the third one."""
    p = dist.get_world_size()
    module = Bag(SIZES, order=OTHER_ORDER if rank % 2 else (), odd=True).to(dtype)
    second, enough = Bag(OTHER_SIZES).to(dtype), shard_bytes(p, dtype)
    watch, passes = _Watch(module), dict[str, Backward]()
    where = f"{named(dtype)}, {BESIDE}" if beside else named(dtype)
    with telling(where), only_new():
        watch.register(watch.before)
        sharded = answer([[module.weights[i] for i in bucket] for bucket in BUCKETS])
        watch.register(watch.after)
        params = [[second.weights[i] for i in bucket] for bucket in OTHER_BUCKETS_OF]
        other = answer(params) if beside else None
        for number in range(len(ROUNDS)):
            if number == 2 and isinstance(getattr(sharded, "shards", None), list):
                sharded.shards[:] = [None] * len(BUCKETS)
            watch.begin()
            with record() as log, unwaited_calls() as unwaited:
                module(scale(number + 1, rank, p)).backward()
            whole = sum(module.weights[i].grad is not None for i in module.trained)
            one = passes[f"{where}, backward {number + 1}"] = Backward(
                copied(getattr(sharded, "shards", None)),
                calls_of(log.events),
                list(unwaited.values()),
                watch.filled_s(),
                max(watch.num_kept, whole),
                0,
                None,
            )
            if not whole:
                shards = [each for seen in passes.values() for each in (seen.shards, seen.beside)]
                shards.append(getattr(other, "shards", None))
                lists = [each for each in shards if isinstance(each, list)]
                known = [shard for each in lists for shard in each if shard is not None]
                one.alive_bytes = alive_bytes(module, second, *known, enough=enough)
            if beside:
                second(1.0).backward()
                one.beside = copied(getattr(other, "shards", None))
    return passes


def shard_bytes(p: int, dtype: torch.dtype) -> int:
    """Return the bytes of the shards of all buckets."""
    return sum(shard_numel(NUMELS[n], p) for n in FULL) * dtype.itemsize
