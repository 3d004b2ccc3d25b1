"""Exercise 2 of 09_zero: the right answer, and the wrong ones that its check must name."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.zero.flat_layout import FlatLayout

_MakeOptimizer = Callable[[list[Tensor]], Optimizer]


class ShardedStep:
    """The right answer, in parts that mistakes replace."""

    def __init__(self, module: nn.Module, make_optimizer: _MakeOptimizer) -> None:
        self.params = [param for param in module.parameters() if param.requires_grad]
        self.layout = FlatLayout.of(self.params, dist.get_world_size())
        self.mine = self.layout.shard_slice(dist.get_rank())
        self.make_optimizer = make_optimizer
        self.begin()

    def begin(self) -> None:
        self.shard = self.layout.flatten(self.params)[self.mine].clone()
        self.optimizer = self.make_optimizer([self.shard])

    @torch.no_grad()
    def step(self) -> None:
        self.shard.grad = self.grad_shard()
        self.optimizer.step()
        self.put_back(self.gathered())

    def flat_grads(self) -> Tensor:
        grads = [param.grad for param in self.params if param.grad is not None]
        return self.layout.flatten(grads)

    def grad_shard(self) -> Tensor:
        return self.flat_grads()[self.mine].clone()

    def gathered(self) -> Tensor:
        flat = self.shard.new_empty(self.layout.padded_numel)
        dist.all_gather_single(flat, self.shard)
        return flat

    def put_back(self, flat: Tensor) -> None:
        for param, view in zip(self.params, self.layout.views(flat), strict=True):
            param.copy_(view)


class KeepsEverything(ShardedStep):
    def begin(self) -> None:
        self.whole = self.layout.flatten(self.params)
        self.shard = self.whole[self.mine]
        self.optimizer = self.make_optimizer([self.whole])

    @torch.no_grad()
    def step(self) -> None:
        self.whole.grad = self.flat_grads()
        self.optimizer.step()
        self.put_back(self.gathered())


class AllState(ShardedStep):
    def begin(self) -> None:
        self.optimizer = self.make_optimizer([*self.params])

    def step(self) -> None:
        self.optimizer.step()


class NotGathered(ShardedStep):
    def gathered(self) -> Tensor:
        flat = self.layout.flatten(self.params)
        flat[self.mine] = self.shard
        return flat


class GatheredFirst(ShardedStep):
    @torch.no_grad()
    def step(self) -> None:
        flat = self.gathered()
        self.shard.grad = self.grad_shard()
        self.optimizer.step()
        self.put_back(flat)


class Stale(ShardedStep):
    @torch.no_grad()
    def step(self) -> None:
        flat = self.gathered()
        self.shard.grad = self.grad_shard()
        self.optimizer.step()
        flat[self.mine] = self.shard
        self.put_back(flat)


class ViewOfRow(ShardedStep):
    def begin(self) -> None:
        self.shard = self.layout.flatten(self.params)[self.mine]
        self.optimizer = self.make_optimizer([self.shard])


class ViewOfGrads(ShardedStep):
    def grad_shard(self) -> Tensor:
        return self.flat_grads()[self.mine]


class Renames(ShardedStep):
    def put_back(self, flat: Tensor) -> None:
        self.params = [nn.Parameter(view) for view in self.layout.views(flat)]

    def flat_grads(self) -> Tensor:
        grads = [torch.ones_like(param) if param.grad is None else param.grad
                 for param in self.params]  # fmt: skip
        return self.layout.flatten(grads)


class NoGradient(ShardedStep):
    def grad_shard(self) -> Any:
        return None


class AddsUp(ShardedStep):
    def grad_shard(self) -> Tensor:
        kept = self.shard.grad
        return super().grad_shard() + (0 if kept is None else kept)


class MadeAnew(ShardedStep):
    @torch.no_grad()
    def step(self) -> None:
        self.optimizer = self.make_optimizer([self.shard])
        super().step()


class DividedAgain(ShardedStep):
    def grad_shard(self) -> Tensor:
        return super().grad_shard() / dist.get_world_size()


class SummedAgain(ShardedStep):
    def flat_grads(self) -> Tensor:
        flat = super().flat_grads()
        dist.all_reduce(flat)
        return flat


class AveragesAgain(DividedAgain, SummedAgain):
    pass


class ReduceScatters(ShardedStep):
    def grad_shard(self) -> Tensor:
        shard = torch.empty_like(self.shard)
        dist.reduce_scatter_single(shard, self.flat_grads())
        return shard / dist.get_world_size()


class SumsShards(ShardedStep):
    def gathered(self) -> Tensor:
        flat = self.shard.new_zeros(self.layout.padded_numel)
        flat[self.mine] = self.shard
        dist.all_reduce(flat)
        return flat


class InFloat32(ShardedStep):
    def begin(self) -> None:
        self.shard = self.layout.flatten(self.params)[self.mine].float()
        self.optimizer = self.make_optimizer([self.shard])

    def grad_shard(self) -> Tensor:
        return super().grad_shard().float()


class NextRanks(ShardedStep):
    def begin(self) -> None:
        self.mine = self.layout.shard_slice((dist.get_rank() + 1) % dist.get_world_size())
        super().begin()


class FrozenToo(ShardedStep):
    def __init__(self, module: nn.Module, make_optimizer: _MakeOptimizer) -> None:
        super().__init__(module, make_optimizer)
        self.params = list(module.parameters())
        self.layout = FlatLayout.of(self.params, dist.get_world_size())
        self.mine = self.layout.shard_slice(dist.get_rank())
        self.begin()


class CallAParameter(ShardedStep):
    def put_back(self, flat: Tensor) -> None:
        super().put_back(flat)
        for param in self.params:
            row = param.new_empty(dist.get_world_size() * param.numel())
            dist.all_gather_single(row, param.detach().reshape(-1))


class Broadcasts(ShardedStep):
    def gathered(self) -> Tensor:
        shards = [torch.empty_like(self.shard) for _ in range(dist.get_world_size())]
        shards[dist.get_rank()] = self.shard
        for rank, shard in enumerate(shards):
            dist.broadcast(shard, rank)
        return torch.cat(shards)


class InPlace(ShardedStep):
    @torch.no_grad()
    def step(self) -> None:
        super().step()
        for param in self.params:
            if param.grad is not None:
                param.grad.mul_(0.5)


def mistakes(mistake: Any) -> tuple[Any, ...]:
    """Return all wrong answers, with words of the sentence that names them."""
    return (
        mistake("keeps everything", KeepsEverything, says="Everyone keeps everything"),
        mistake("all state, own shard", AllState, says="Everyone keeps everything"),
        mistake("not gathered", NotGathered, says="Only this rank's own shard is new"),
        mistake("gathered first", GatheredFirst, says="gather after the optimizer's step"),
        mistake("stale shard", Stale, says="from before the step: stale"),
        mistake("a view of the flat tensor", ViewOfRow, says="a slice is a view"),
        mistake("a view of the gradients", ViewOfGrads, says="the shard and its gradient"),
        mistake("names another tensor", Renames, says="only names another tensor"),
        mistake("no gradient", NoGradient, says="the shard had no gradient"),
        mistake("gradients add up", AddsUp, says="Gradients of earlier steps"),
        mistake("optimizer made anew", MadeAnew, says="The momentum is lost"),
        mistake("divided again", DividedAgain, says="Divided by p once more"),
        mistake("summed again", SummedAgain, says="summed once more"),
        mistake("talks too much", AveragesAgain, says="every rank knows all of them"),
        mistake("reduce-scatters again", ReduceScatters, says="every rank knows all of them"),
        mistake("sums shards", SumsShards, says="twice the bytes"),
        mistake("in float32", InFloat32, says="go through float32"),
        mistake("the next rank's shard", NextRanks, says="in the wrong places"),
        mistake("frozen too", FrozenToo, says="your code raised"),
        mistake("a call a parameter", CallAParameter, says="not one per parameter"),
        mistake("broadcasts", Broadcasts, says="One all_gather puts all shards together"),
        mistake("gradients scaled in place", InPlace, says="has changed param.grad"),
    )
