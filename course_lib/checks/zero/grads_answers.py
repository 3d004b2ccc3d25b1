"""Exercise 3 of 09_zero: the right answer, and the wrong ones that its check must name."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.zero.flat_layout import FlatLayout


class ShardedGrads:
    """The right answer, in parts that mistakes replace."""

    def __init__(self, buckets: Sequence[Sequence[Tensor]]) -> None:
        p = dist.get_world_size()
        self.buckets, self.layouts = buckets, [FlatLayout.of(bucket, p) for bucket in buckets]
        self.shards: list[Tensor | None] = [None] * len(buckets)
        self.ready: set[Tensor] = set()
        for param in [param for bucket in buckets for param in bucket]:
            param.register_post_accumulate_grad_hook(self.on_grad)

    def on_grad(self, param: Tensor) -> None:
        self.ready.add(param)
        for number, bucket in enumerate(self.buckets):
            if self.ready.issuperset(bucket):
                self.send(number)
                self.clear(number)

    def send(self, number: int) -> None:
        self.keep(number, self.mean(self.flat(number), self.layouts[number]))
        self.free(number)

    def flat(self, number: int) -> Tensor:
        grads = [param.grad for param in self.buckets[number]]
        return self.layouts[number].flatten([grad for grad in grads if grad is not None])

    def mean(self, flat: Tensor, layout: FlatLayout) -> Tensor:
        shard = flat.new_empty(layout.shard_numel)
        dist.reduce_scatter_single(shard, flat)
        return shard / dist.get_world_size()

    def keep(self, number: int, shard: Tensor) -> None:
        kept = self.shards[number]
        self.shards[number] = shard if kept is None else kept + shard

    def free(self, number: int) -> None:
        for param in self.buckets[number]:
            param.grad = None

    def clear(self, number: int) -> None:
        self.ready.difference_update(self.buckets[number])


class KeptWhole(ShardedGrads):
    def free(self, number: int) -> None:
        pass


class Zeroed(ShardedGrads):
    def free(self, number: int) -> None:
        for param in self.buckets[number]:
            if param.grad is not None:
                param.grad.zero_()


class Referenced(ShardedGrads):
    def flat(self, number: int) -> Tensor:
        flat = super().flat(number)
        self.__dict__.setdefault("sent", []).append(flat)
        return flat


class ViewOfBucket(ShardedGrads):
    def mean(self, flat: Tensor, layout: FlatLayout) -> Tensor:
        dist.all_reduce(flat)
        return (flat / dist.get_world_size())[layout.shard_slice(dist.get_rank())]


class ViewAfterAll(ShardedGrads):
    def mean(self, flat: Tensor, layout: FlatLayout) -> Tensor:
        mine = flat[layout.shard_slice(dist.get_rank())]
        mine.copy_(super().mean(flat, layout))
        return mine

    def keep(self, number: int, shard: Tensor) -> None:
        kept = self.shards[number]
        self.shards[number] = shard if kept is None else kept.add_(shard)


class AveragedTwice(ShardedGrads):
    def mean(self, flat: Tensor, layout: FlatLayout) -> Tensor:
        return super().mean(flat, layout) / dist.get_world_size()


class Summed(ShardedGrads):
    def mean(self, flat: Tensor, layout: FlatLayout) -> Tensor:
        return super().mean(flat, layout) * dist.get_world_size()


class Overwritten(ShardedGrads):
    def keep(self, number: int, shard: Tensor) -> None:
        self.shards[number] = shard


class DividedAgain(ShardedGrads):
    def keep(self, number: int, shard: Tensor) -> None:
        p, kept = dist.get_world_size(), self.shards[number]
        self.shards[number] = shard if kept is None else (kept + shard * p) / p


class Halved(ShardedGrads):
    def keep(self, number: int, shard: Tensor) -> None:
        kept = self.shards[number]
        self.shards[number] = shard if kept is None else (kept + shard) / 2


class OwnOnly(ShardedGrads):
    def mean(self, flat: Tensor, layout: FlatLayout) -> Tensor:
        return flat[layout.shard_slice(dist.get_rank())] / dist.get_world_size()


class AMessageEach(ShardedGrads):
    def send(self, number: int) -> None:
        super().send(number)
        if len(self.buckets[number]) > 1:
            dist.reduce_scatter_single(torch.empty(1), torch.empty(dist.get_world_size()))


class NotCleared(ShardedGrads):
    def clear(self, number: int) -> None:
        pass


class ClearsAll(ShardedGrads):
    def clear(self, number: int) -> None:
        self.ready.clear()


class NotWaited(ShardedGrads):
    def mean(self, flat: Tensor, layout: FlatLayout) -> Tensor:
        shard = flat.new_empty(layout.shard_numel)
        dist.reduce_scatter_single(shard, flat, async_op=True)
        return shard / dist.get_world_size()


class AtTheEnd(ShardedGrads):
    def on_grad(self, param: Tensor) -> None:
        self.ready.add(param)
        if all(self.ready.issuperset(bucket) for bucket in self.buckets):
            for number in range(len(self.buckets)):
                self.send(number)
                self.clear(number)


class Never(ShardedGrads):
    def on_grad(self, param: Tensor) -> None:
        self.ready.add(param)


class WholeMean(ShardedGrads):
    def mean(self, flat: Tensor, layout: FlatLayout) -> Tensor:
        dist.all_reduce(flat)
        return flat / dist.get_world_size()


def mistakes(mistake: Any) -> tuple[Any, ...]:
    """Return all wrong answers, with words of the sentence that names them."""
    return (
        mistake("whole gradients kept", KeptWhole, says="outlive their bucket"),
        mistake("zeros in place of None", Zeroed, says="zero_() keeps the memory"),
        mistake("freed but referenced", Referenced, says="Freed, but still referenced"),
        mistake("a view of the bucket", ViewOfBucket, says="twice the bytes"),
        mistake("a view, reduce-scattered", ViewAfterAll, says="a view of one"),
        mistake("averaged twice", AveragedTwice, says="Averaged twice"),
        mistake("summed", Summed, says="Summed, not averaged"),
        mistake("overwritten", Overwritten, says="Only the last backward"),
        mistake("sum divided again", DividedAgain, says="only divide what is new"),
        mistake("halved", Halved, says="no mean of backward passes"),
        mistake("own gradient only", OwnOnly, says="nothing was sent"),
        mistake("a message a parameter", AMessageEach, says="One message a bucket"),
        mistake("ready not cleared", NotCleared, says="your code raised"),
        mistake("all of ready cleared", ClearsAll, says="only its own parameters out of"),
        mistake("not waited for", NotWaited, says="and waited for"),
        mistake("at the end", AtTheEnd, says="backward goes on before it is sent"),
        mistake("never", Never, says="nothing was sent"),
        mistake("the whole mean", WholeMean, says="and no more"),
    )
