"""Exercise 2 of 09_zero: the right answer, and the wrong ones that its check must name."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim import Optimizer

from course_lib.flat_shards import FlatLayout

MakeOptimizer = Callable[[list[Tensor]], Optimizer]


class ShardedStep:
    """The right answer, in parts that mistakes replace."""

    def __init__(self, module: nn.Module, make_optimizer: MakeOptimizer) -> None:
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


class AveragesAgain(SummedAgain):
    def grad_shard(self) -> Tensor:
        return super().grad_shard() / dist.get_world_size()


class NextRanks(ShardedStep):
    def begin(self) -> None:
        p = dist.get_world_size()
        self.mine = self.layout.shard_slice((dist.get_rank() + 1) % p)
        super().begin()


class FrozenToo(ShardedStep):
    def __init__(self, module: nn.Module, make_optimizer: MakeOptimizer) -> None:
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
