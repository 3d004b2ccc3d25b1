"""The right answer to exercise 2 of 06_ddp, and the wrong ones that its check must name."""

from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

Buckets = list[list[nn.Parameter]]


class Overlapped:
    """Data parallelism for `module`: buckets are launched in backward, finish() is after it."""

    def __init__(self, module: nn.Module, buckets: Buckets) -> None:
        self.module, self.buckets = module, buckets
        self.ready: set[nn.Parameter] = set()
        self.next = 0
        self.in_flight: list[tuple[Any, Tensor]] = []
        for bucket in buckets:
            for param in bucket:
                param.register_post_accumulate_grad_hook(self.on_grad)

    def on_grad(self, param: Any) -> None:
        self.ready.add(param)
        while self.next < len(self.buckets) and self.ready.issuperset(self.buckets[self.next]):
            self.send(self.buckets[self.next])
            self.next += 1

    def send(self, bucket: list[nn.Parameter]) -> None:
        flat = torch.cat([_grad(param).flatten() for param in bucket])
        self.in_flight.append((dist.all_reduce(flat, async_op=True), flat))

    def finish(self) -> None:
        for bucket, (work, flat) in zip(self.buckets, self.in_flight, strict=False):
            self.wait(work)
            self.take(bucket, flat)
        self.clear()

    def wait(self, work: Any) -> None:
        work.wait()

    def take(self, bucket: list[nn.Parameter], flat: Tensor) -> None:
        for param, grad in pieces(bucket, flat / dist.get_world_size()):
            param.grad = grad

    def clear(self) -> None:
        self.ready.clear()
        self.in_flight.clear()
        self.next = 0


def pieces(bucket: list[nn.Parameter], flat: Tensor) -> Iterator[tuple[nn.Parameter, Tensor]]:
    """Yield each parameter of a bucket with its part of the flat tensor."""
    parts = flat.split([param.numel() for param in bucket])
    for param, part in zip(bucket, parts, strict=True):
        yield param, part.view_as(param)


def _grad(param: nn.Parameter) -> Tensor:
    grad: Any = param.grad
    return grad  # None is for whoever sends too early


class NotWaiting(Overlapped):
    def wait(self, work: Any) -> None:
        pass


class LastNeverLeaves(Overlapped):
    """Sends when a number of bytes is reached, which the last bucket never does."""

    def on_grad(self, param: Any) -> None:
        self.ready.add(param)
        limit = sum(each.numel() for each in self.buckets[0])
        while self.next < len(self.buckets) and self.ready.issuperset(self.buckets[self.next]):
            if sum(each.numel() for each in self.buckets[self.next]) < limit:
                break
            self.send(self.buckets[self.next])
            self.next += 1


class Summed(Overlapped):
    def take(self, bucket: list[nn.Parameter], flat: Tensor) -> None:
        super().take(bucket, flat * dist.get_world_size())


class MeanTwice(Overlapped):
    def take(self, bucket: list[nn.Parameter], flat: Tensor) -> None:
        super().take(bucket, flat / dist.get_world_size())


class ByFour(Overlapped):
    def take(self, bucket: list[nn.Parameter], flat: Tensor) -> None:
        super().take(bucket, flat * dist.get_world_size() / 4)


class ReducesParam(Overlapped):
    """Takes the argument of the hook for the gradient."""

    def send(self, bucket: list[nn.Parameter]) -> None:
        flat = torch.cat([param.detach().flatten() for param in bucket])
        self.in_flight.append((dist.all_reduce(flat, async_op=True), flat))


class ChangesParam(Overlapped):
    def take(self, bucket: list[nn.Parameter], flat: Tensor) -> None:
        for param, grad in pieces(bucket, flat / dist.get_world_size()):
            param.data.copy_(grad)


class OwnOrder(Overlapped):
    """Sends whichever bucket is full, so that ranks send in different orders."""

    def on_grad(self, param: Any) -> None:
        self.ready.add(param)
        for bucket in self.buckets:
            if any(param is each for each in bucket) and self.ready.issuperset(bucket):
                self.send(bucket)


class SomeRanks(Overlapped):
    def send(self, bucket: list[nn.Parameter]) -> None:
        if dist.get_rank() == 0:
            super().send(bucket)


class WaitsInHook(Overlapped):
    def send(self, bucket: list[nn.Parameter]) -> None:
        super().send(bucket)
        self.in_flight[-1][0].wait()


class AllInFinish(Overlapped):
    def on_grad(self, param: Any) -> None:
        pass

    def finish(self) -> None:
        for bucket in self.buckets:
            self.send(bucket)
        super().finish()


class OneEach(Overlapped):
    def send(self, bucket: list[nn.Parameter]) -> None:
        parts = [_grad(param).flatten().clone() for param in bucket]
        for part in parts:
            dist.all_reduce(part, async_op=True).wait()
        self.in_flight.append((_Done(), torch.cat(parts)))

    def on_grad(self, param: Any) -> None:
        if not self.ready:
            super().on_grad(param)
        else:
            self.ready.add(param)

    def finish(self) -> None:
        for bucket in self.buckets[self.next :]:
            self.send(bucket)
        super().finish()


class _Done:
    def wait(self) -> None:
        pass


class NotWritten(Overlapped):
    def take(self, bucket: list[nn.Parameter], flat: Tensor) -> None:
        flat /= dist.get_world_size()


class WorksOnce(Overlapped):
    """Parameters stay ready for good: the next step sends buckets that are not full."""

    def clear(self) -> None:
        self.in_flight.clear()
        self.next = 0


class NextNotReset(Overlapped):
    def clear(self) -> None:
        self.ready.clear()
        self.in_flight.clear()


class KeepsAll(Overlapped):
    """Keeps everything that was in flight."""

    def finish(self) -> None:
        for bucket, (work, flat) in zip(self.buckets, self.in_flight[-self.next :], strict=True):
            work.wait()
            self.take(bucket, flat)
        self.ready.clear()
        self.next = 0


class WaitsForLast(Overlapped):
    """Waits for the last handle only: in gloo they may complete in any order."""

    def finish(self) -> None:
        self.in_flight[-1][0].wait()
        super().finish()

    def wait(self, work: Any) -> None:
        pass


class FullByLast(Overlapped):
    """Takes the last parameter of a bucket for the one whose gradient comes last."""

    def on_grad(self, param: Any) -> None:
        self.ready.add(param)
        while self.next < len(self.buckets) and self.buckets[self.next][-1] in self.ready:
            self.send(self.buckets[self.next])
            self.next += 1


class NoViewAs(Overlapped):
    def take(self, bucket: list[nn.Parameter], flat: Tensor) -> None:
        parts = (flat / dist.get_world_size()).split([param.numel() for param in bucket])
        for param, part in zip(bucket, parts, strict=True):
            param.grad = part


class NoFlatten(Overlapped):
    def send(self, bucket: list[nn.Parameter]) -> None:
        flat = torch.cat([_grad(param) for param in bucket])
        self.in_flight.append((dist.all_reduce(flat, async_op=True), flat))


class PastTheEnd(Overlapped):
    def on_grad(self, param: Any) -> None:
        self.ready.add(param)
        while self.ready.issuperset(self.buckets[self.next]):
            self.send(self.buckets[self.next])
            self.next += 1


class Added(Overlapped):
    def take(self, bucket: list[nn.Parameter], flat: Tensor) -> None:
        for param, grad in pieces(bucket, flat / dist.get_world_size()):
            _grad(param).add_(grad)


class SplitReversed(Overlapped):
    def take(self, bucket: list[nn.Parameter], flat: Tensor) -> None:
        super().take(bucket[::-1], flat)
