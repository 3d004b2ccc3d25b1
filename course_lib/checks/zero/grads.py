"""Exercise 3 of 09_zero: gradients are reduced in buckets during backward, and only shards stay.

On odd ranks, gradients become ready in another order; buckets are full in the same order.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.ddp.parts import Bag
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.memory_watch import MemoryWatch
from course_lib.checks.properties import HAS_STATE, NOT_WAITED, SEEDS, SHARED
from course_lib.checks.watch import CHANGED, ORDER, OVERWRITTEN, UNWAITED, Watch
from course_lib.checks.zero.parts import named, shard_numel

SIZES = (4, 2, 2, 1, 5)
BUCKETS = ((4, 2), (3,), (0,))  # numbers of parameters; the second one is frozen
OTHER_ORDER = (0, 1, 4, 2, 3)  # of forward; on odd ranks, backward goes from 3 to 2, 4 and 0
PASSES, CLEARED = 6, 2  # backward passes; before this one, the caller clears the shards
SHARDS, BYTES = "shards", "bytes too many that are alive"  # facets

OTHER_BUCKETS = Cause(
    "Not every rank sends the same buckets: gradients become ready in different orders. A bucket "
    "that is sent takes only its own parameters out of `ready`: others may have come already. "
    "Send one of zeros, too."
)
IN_THE_HOOK = Cause(
    "One reduce_scatter of its flat gradient for each bucket, in the hook of its last gradient, "
    "which returns when it is done: that is when the memory is needed."
)
EARLY = Cause(
    "A bucket was sent before all of its gradients had come in this backward. Their order may "
    "differ from rank to rank: note each parameter that comes, send when none is missing, and then "
    "take them out of `ready`, for the next backward begins anew."
)
WHOLE = Cause(
    "Whole gradients outlive their bucket: set param.grad = None for each of its parameters as "
    "soon as it is sent. (zero_() keeps the memory.)"
)
WHOLE_MEAN = Cause(
    "An all_reduce leaves the whole mean on every rank: twice the bytes, and memory for all of it. "
    "reduce_scatter leaves a shard."
)
LOST = Cause("No shard: was this bucket sent, and its part kept in `shards`?")
FIRST = Cause(
    "An item of `shards` is None until its bucket is sent: keep the first shard as it is."
)
AVERAGED_TWICE = Cause("Averaged twice: divide each new shard by the number of ranks once.")
SUMMED = Cause("{p} times too large: summed, not averaged. Divide by the number of ranks.")
OVERWRITTEN_SHARD = Cause(
    "Only the last backward is in it: a shard that is there already has to be added to, as "
    "backward adds to param.grad."
)
NOT_CLEARED = Cause(
    "Gradients of the step before are in it: where an item of `shards` is None again, begin anew."
)
FLATTEN = Cause(
    "A shard is this rank's part of the mean, added up over the passes since the caller has "
    "cleared `shards`. Flat are the bucket's gradients in the order of its parameters, then zeros: "
    "layout.flatten(grads)."
)
REFERENCED = Cause(
    "Still referenced: something else keeps whole gradients, such as a list of flat "
    "buckets, or a shard that is a view of one."
)


def train(rank: int, answer: Callable[..., Any], dtype: torch.dtype, beside: bool) -> Any:
    """Run the backward passes, of another module in between or not."""
    p = dist.get_world_size()
    module = Bag(SIZES, order=OTHER_ORDER if rank % 2 else (), odd=True).to(dtype)
    numels = [sum(SIZES[i] for i in bucket) for bucket in BUCKETS]
    enough = sum(shard_numel(numel, p) for numel in numels) * dtype.itemsize
    with MemoryWatch() as watch:
        sharded = _marked(watch, module, answer)
        backward_other = _other(answer, watch, dtype) if beside else None
        for number in range(PASSES):
            if number == CLEARED:
                sharded.shards[:] = [None] * len(BUCKETS)
            label = f"{named(dtype)}, backward {number + 1}"
            with watch.step(label, module=module) as step:
                module(_scale(number + 1, rank, p)).backward()
            step.show(shards=sharded.shards)
            if p == 1:  # then it may do without any call
                step.show(**{UNWAITED: [], ORDER: []})
            if backward_other:
                backward_other()
            elif not any(seen.get(BYTES) for seen in watch.seen.values()):
                step.show(**{BYTES: watch.bytes_too_many(enough, *module.parameters())})
    return watch.seen


def _scale(number: int, rank: int, p: int) -> float:
    """Return the gradients of a pass, in slopes: the last ones have zeros, and a nan."""
    odd_ones = {4: 0.0, 5: 0.0 if rank == 0 else 5.0, 6: math.nan if rank == p - 1 else 6.0}
    return odd_ones.get(number, 10.0**rank * number)


def _marked(watch: Watch, module: Bag, answer: Callable[..., Any]) -> Any:
    """Return an object for the module's buckets, with a mark before and after the hook of each."""
    come = set[int]()

    def register(note: Callable[[int, Tensor], None]) -> None:
        for i in module.trained:
            module.weights[i].register_post_accumulate_grad_hook(partial(note, i))

    def begins(i: int, _param: Tensor) -> None:
        come.add(i)
        bucket = next(bucket for bucket in BUCKETS if i in bucket)
        if come.issuperset(bucket):
            watch.mark(f"bucket {BUCKETS.index(bucket)} full")

    def ends(i: int, _param: Tensor) -> None:
        bucket = next(bucket for bucket in BUCKETS if i in bucket)
        if come.issuperset(bucket):
            come.difference_update(bucket)
            left = sum(module.weights[k].grad is not None for k in bucket)
            watch.mark(f"the hook ends{f' ({left} param.grad left)' if left else ''}")

    register(begins)
    sharded = answer([[module.weights[i] for i in bucket] for bucket in BUCKETS])
    register(ends)
    return sharded


def _other(answer: Callable[..., Any], watch: Watch, dtype: torch.dtype) -> Callable[[], None]:
    """Make an object of another module; return what runs its backward."""
    module = Bag((3, 1, 4)).to(dtype)
    sharded = answer([[module.weights[2]], [module.weights[0]]])

    def backward() -> None:
        with watch.step("the 2nd object", module=module) as step:
            module(1.0).backward()
        step.show(shards=sharded.shards)

    return backward


def _runs(p: int) -> list[dict[str, Any]]:
    """Return the runs on p ranks: three ranks are enough for a second object."""
    runs = [(torch.float64, False), (torch.float64, True), (torch.bfloat16, False)]
    return [{"dtype": dtype, "beside": two} for dtype, two in runs if p == 3 or not two]


IS_FULL = "self.ready.issuperset(bucket)"
MEAN = "mean = shard / dist.get_world_size()"
SENDS = "dist.reduce_scatter_single(shard, flat)"
KEEPS = "self.shards[n] = mean if self.shards[n] is None else self.shards[n] + mean"
FREES, ADDS = "param.grad = None", "self.shards[n] + mean"
CLEARS = "self.ready.difference_update(bucket)"
FLATTENS, ALL_GRADS = "layout.flatten(", "[param.grad for param in bucket]"
OR_ZEROS = "[torch.zeros_like(p) if p.grad is None else p.grad for p in bucket]"
MINE = "flat[layout.shard_slice(dist.get_rank())]"

GRADS = Exercise(
    key="zero-3",
    title="shards of gradients",
    check=ByExample(
        observe_on_rank=train,
        runs=_runs,
        facets=(UNWAITED, ORDER, OVERWRITTEN, SHARDS, CHANGED, BYTES),
        looks=(
            *(("mismatch", OTHER_BUCKETS), ("hang", OTHER_BUCKETS), (ORDER, IN_THE_HOOK)),
            *((SHARDS, FLATTEN), (BYTES, REFERENCED)),
        ),
        success="Shards of the mean, added up over passes; no whole gradient outlives its bucket.",
    ),
    wrong=(
        Edit(FREES, "pass", WHOLE),
        Edit(SENDS, f"dist.all_reduce(flat)\nshard = {MINE}", WHOLE_MEAN),
        Edit(
            "shard = flat.new_empty(layout.shard_numel)",
            f"shard = {MINE}",
            REFERENCED,
            also=(
                (MEAN, "mean = shard.div_(dist.get_world_size())"),
                (ADDS, "self.shards[n].add_(mean)"),
            ),
        ),
        Edit(SENDS, "dist.reduce_scatter_single(shard, flat, async_op=True)", NOT_WAITED),
        Edit(MEAN, f"{MEAN} ** 2", AVERAGED_TWICE),
        Edit(MEAN, "mean = shard", SUMMED),
        Edit(KEEPS, "self.shards[n] = mean", OVERWRITTEN_SHARD),
        Edit(
            KEEPS,
            "self.sums = getattr(self, 'sums', {})\nself.sums[n] = self.sums.get(n, 0) + mean\n"
            "self.shards[n] = self.sums[n]",
            NOT_CLEARED,
        ),
        Edit(CLEARS, "pass", EARLY),
        Edit(IS_FULL, "bucket[-1] in self.ready", EARLY),
        Edit(IS_FULL, "bucket[-1] in self.ready", EARLY, also=((ALL_GRADS, OR_ZEROS),)),
        Edit(CLEARS, "self.ready.clear()", OTHER_BUCKETS),
        Edit(SENDS, f"if flat.any():\n    {SENDS}\nelse:\n    shard.zero_()", OTHER_BUCKETS),
        Edit(KEEPS, "self.mean = mean", LOST),
        Edit(KEEPS, "self.shards[n] += mean", FIRST),
        Edit(
            IS_FULL,
            "len(self.ready) == sum(map(len, self.buckets))",
            IN_THE_HOOK,
            also=((CLEARS, "if n == len(self.buckets) - 1:\n    self.ready.clear()"),),
        ),
        Edit(
            "[None] * len(buckets), set()",
            "vars(ShardedGrads).get('lists', [None] * len(buckets)), set()\n"
            "ShardedGrads.lists = self.shards",
            SHARED,
        ),
        Edit(
            f"{FLATTENS}{ALL_GRADS})",
            "torch.cat([param.grad.flatten() for param in bucket[::-1]])\n"
            "flat = F.pad(flat, (0, layout.padded_numel - layout.numel))",
            FLATTEN,
        ),
        *(*HAS_STATE, SEEDS),
    ),
)
