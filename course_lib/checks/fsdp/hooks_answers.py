"""Exercise 2 of 10_fsdp: the right answer, and the wrong ones that its check must name."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Hooks:
    """The right answer, in parts that mistakes replace."""

    def __init__(self, module: nn.Module, unit: Any) -> None:
        self.unit, self.missing = unit, set(unit.params)
        module.register_forward_pre_hook(self.before_forward)
        module.register_forward_hook(self.after_forward)
        for param in unit.params:
            param.register_post_accumulate_grad_hook(self.on_grad)

    def before_forward(self, module: nn.Module, args: Any) -> None:
        self.unit.gather()

    def after_forward(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.unit.free()
        if output.requires_grad:
            output.register_hook(self.before_backward)

    def before_backward(self, grad: Tensor) -> None:
        self.unit.gather()

    def on_grad(self, param: Tensor) -> None:
        self.missing.discard(param)
        if not self.missing:
            self.add(self.mean(self.row()))
            self.clear()
            self.unit.free()

    def row(self) -> Tensor:
        return self.unit.layout.flatten([param.grad for param in self.unit.params])

    def mean(self, row: Tensor) -> Tensor:
        mean = torch.empty_like(self.unit.shard)
        dist.reduce_scatter_single(mean, row)
        return mean / dist.get_world_size()

    def add(self, mean: Tensor) -> None:
        grad = self.unit.shard.grad
        self.unit.shard.grad = mean if grad is None else grad + mean

    def clear(self) -> None:
        self.missing = set(self.unit.params)
        for param in self.unit.params:
            param.grad = None


class _NeverFreed(Hooks):
    def after_forward(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            output.register_hook(self.before_backward)
        else:
            self.unit.free()


class _NotAfterBackward(Hooks):
    def on_grad(self, param: Tensor) -> None:
        self.missing.discard(param)
        if not self.missing:
            self.add(self.mean(self.row()))
            self.clear()


class _NotGatheredAgain(Hooks):
    def before_backward(self, grad: Tensor) -> None:
        pass


class _GatheredTooLate(Hooks):
    def before_backward(self, grad: Tensor) -> None:
        pass

    def on_grad(self, param: Tensor) -> None:
        if len(self.missing) == len(self.unit.params):
            self.unit.gather()
        super().on_grad(param)


class _Summed(Hooks):
    def mean(self, row: Tensor) -> Tensor:
        return super().mean(row) * dist.get_world_size()


class _MeanTwice(Hooks):
    def mean(self, row: Tensor) -> Tensor:
        return super().mean(row) / dist.get_world_size()


class _OwnOnly(Hooks):
    def mean(self, row: Tensor) -> Tensor:
        return row[self.unit.layout.shard_slice(dist.get_rank())].clone()


class _AllReduce(Hooks):
    def mean(self, row: Tensor) -> Tensor:
        dist.all_reduce(row)
        mine = row[self.unit.layout.shard_slice(dist.get_rank())]
        return mine.clone() / dist.get_world_size()


class _PaddedTail(Hooks):
    def row(self) -> Tensor:
        row = super().row()
        row[self.unit.layout.numel :] = 1.0  # whatever was in the memory
        return row


class _Overwritten(Hooks):
    def add(self, mean: Tensor) -> None:
        self.unit.shard.grad = mean


class _GradsKept(Hooks):
    def clear(self) -> None:
        self.missing = set(self.unit.params)


class _NotReset(Hooks):
    def clear(self) -> None:
        for param in self.unit.params:
            param.grad = None


class _FirstGrad(Hooks):
    def on_grad(self, param: Tensor) -> None:
        self.missing.discard(param)
        if len(self.missing) == len(self.unit.params) - 1:
            grads = [
                torch.zeros_like(one) if one.grad is None else one.grad for one in self.unit.params
            ]
            self.add(self.mean(self.unit.layout.flatten(grads)))
            self.unit.free()
        if not self.missing:
            self.clear()


class _FirstParam(Hooks):
    def on_grad(self, param: Tensor) -> None:
        if param is self.unit.params[0]:
            grads = [
                torch.zeros_like(one) if one.grad is None else one.grad for one in self.unit.params
            ]
            self.add(self.mean(self.unit.layout.flatten(grads)))
            self.clear()
            self.unit.free()


class _Params(Hooks):
    def row(self) -> Tensor:
        return self.unit.layout.flatten(self.unit.params)


class _MeanOfPasses(Hooks):
    def add(self, mean: Tensor) -> None:
        grad = self.unit.shard.grad
        self.unit.shard.grad = mean if grad is None else (grad + mean) / 2


class _FreedInTraining(Hooks):
    def after_forward(self, module: nn.Module, args: Any, output: Tensor) -> None:
        if output.requires_grad:
            self.unit.free()
            output.register_hook(self.before_backward)


class _WholeMean(Hooks):
    def mean(self, row: Tensor) -> Tensor:
        dist.all_reduce(row)
        return row / dist.get_world_size()


class _AlwaysHook(Hooks):
    def after_forward(self, module: nn.Module, args: Any, output: Tensor) -> None:
        self.unit.free()
        output.register_hook(self.before_backward)


class _RowKept(Hooks):
    def row(self) -> Tensor:
        row = super().row()
        self.__dict__.setdefault("rows", []).append(row)
        return row


class _AMessageEach(Hooks):
    def mean(self, row: Tensor) -> Tensor:
        for param in self.unit.params:
            dist.all_reduce(param.grad)
        mine = self.unit.layout.shard_slice(dist.get_rank())
        return super().row()[mine].clone() / dist.get_world_size()


class _NotGathered(Hooks):
    def before_forward(self, module: nn.Module, args: Any) -> None:
        pass


WRONG: tuple[tuple[str, type[Hooks], str], ...] = (
    ("not gathered", _NotGathered, "gather() in before_forward"),
    ("never freed", _NeverFreed, "Never freed"),
    ("not freed after backward", _NotAfterBackward, "after its last gradient"),
    ("backward without a gather", _NotGatheredAgain, "output.register_hook"),
    ("gathered too late", _GatheredTooLate, "output.register_hook"),
    ("summed", _Summed, "Summed, not averaged"),
    ("averaged twice", _MeanTwice, "Averaged twice"),
    ("own gradient only", _OwnOnly, "own tokens"),
    ("all_reduce", _AllReduce, "twice the bytes"),
    ("gradient of the padded tail", _PaddedTail, "the padding has a gradient"),
    ("overwritten", _Overwritten, "adds up"),
    ("gradients kept", _GradsKept, "param.grad = None"),
    ("not reset", _NotReset, "begin anew"),
    ("at the first gradient", _FirstGrad, "not before"),
    ("at the first parameter's gradient", _FirstParam, "not before"),
    ("parameters, not gradients", _Params, "each param.grad"),
    ("mean of passes", _MeanOfPasses, "two backward passes add up"),
    ("not freed in evaluation", _FreedInTraining, "in after_forward, always"),
    ("the whole mean", _WholeMean, "as long as the shard"),
    ("a hook without a gradient", _AlwaysHook, "no gradient is wanted"),
    ("flat gradients kept", _RowKept, "whole flat gradient"),
    ("a message a parameter", _AMessageEach, "one reduce_scatter"),
)


def mistakes(make: Callable[..., Any]) -> tuple[Any, ...]:
    """Return all wrong answers, as `make(name, answer, says)`."""
    return tuple(make(name, answer, says) for name, answer, says in WRONG)
