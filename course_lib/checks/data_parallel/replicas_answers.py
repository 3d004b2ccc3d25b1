"""Exercises 1 and 2 of 05_data_parallel: a right answer, and wrong ones to be named."""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.data_parallel.parts import state_of

# --- data_parallel-1: an equal start


def only_parameters(module: nn.Module) -> None:
    for param in module.parameters():
        dist.broadcast(param.data, 0)


def only_trained(module: nn.Module) -> None:
    for tensor in [*module.parameters(), *module.buffers()]:
        if tensor.requires_grad or not isinstance(tensor, nn.Parameter):
            dist.broadcast(tensor.data, 0)


def mean_of_states(module: nn.Module) -> None:
    for tensor in state_of(module).values():
        dist.all_reduce(tensor)
        tensor.copy_(tensor / dist.get_world_size())


def from_the_last(module: nn.Module) -> None:
    for tensor in state_of(module).values():
        dist.broadcast(tensor, dist.get_world_size() - 1)


def into_new_tensors(module: nn.Module) -> None:
    for name, tensor in state_of(module).items():
        new = tensor.clone()
        dist.broadcast(new, 0)
        owner = module.get_submodule(name.rpartition(".")[0])
        getattr(owner, name.rpartition(".")[2]).data = new


def whole_state_dict(module: nn.Module) -> None:
    for tensor in module.state_dict().values():
        dist.broadcast(tensor, 0)


def only_rank_0(module: nn.Module) -> None:
    for tensor in state_of(module).values():
        if dist.get_rank() == 0:
            dist.broadcast(tensor, 0)


def watched(module: nn.Module) -> None:
    for tensor in [*module.parameters(), *module.buffers()]:
        dist.broadcast(tensor, 0)


def order_of_a_set(module: nn.Module) -> None:
    """Return tensors in the order of a set, which goes by address: another order on every rank."""
    tensors = list(state_of(module).values())
    alike = [tensor for tensor in tensors if tensor.shape == tensors[1].shape]
    others = [tensor for tensor in tensors if tensor.shape != tensors[1].shape]
    for tensor in others + (alike[::-1] if dist.get_rank() else alike):
        dist.broadcast(tensor, 0)


def own_source(module: nn.Module) -> None:
    for tensor in state_of(module).values():
        dist.broadcast(tensor, dist.get_rank())


def only_buffers(module: nn.Module) -> None:
    for tensor in module.buffers():
        dist.broadcast(tensor, 0)


# --- data_parallel-2: the mean gradient


def average_gradients(module: nn.Module) -> None:
    """Average gradients as the course does."""
    for param in module.parameters():
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def sum_of_gradients(module: nn.Module) -> None:
    for grad in _grads(module):
        dist.all_reduce(grad)


def mean_of_parameters(module: nn.Module) -> None:
    for param in module.parameters():
        if param.grad is not None:
            dist.all_reduce(param.data)
            param.data /= dist.get_world_size()


def mean_of_clones(module: nn.Module) -> None:
    for grad in _grads(module):
        mean = grad.clone()
        dist.all_reduce(mean)
        mean /= dist.get_world_size()


def divided_alone(module: nn.Module) -> None:
    for grad in _grads(module):
        grad /= dist.get_world_size()


def divided_twice(module: nn.Module) -> None:
    for grad in _grads(module):
        grad /= dist.get_world_size()
        dist.all_reduce(grad)
        grad /= dist.get_world_size()


def always_by_4(module: nn.Module) -> None:
    for grad in _grads(module):
        dist.all_reduce(grad)
        grad /= 4


def frozen_too(module: nn.Module) -> None:
    for param in module.parameters():
        dist.all_reduce(param.grad)
        param.grad.div_(dist.get_world_size())  # type: ignore[union-attr]


def zeros_for_frozen(module: nn.Module) -> None:
    for param in module.parameters():
        if param.grad is None:
            param.grad = torch.zeros_like(param)
        dist.all_reduce(param.grad)
        param.grad.div_(dist.get_world_size())


def tied_twice(module: nn.Module) -> None:
    for _, param in module.named_parameters(remove_duplicate=False):
        if param.grad is not None:
            dist.all_reduce(param.grad)
            param.grad /= dist.get_world_size()


def first_only(module: nn.Module) -> None:
    for grad in _grads(module)[:1]:
        dist.all_reduce(grad)
        grad /= dist.get_world_size()


def both_averaged(module: nn.Module) -> None:
    average_gradients(module)
    with torch.no_grad():
        for param in module.parameters():
            param.mul_(1.5)


def views_of_one(module: nn.Module) -> None:
    trained = [param for param in module.parameters() if param.grad is not None]
    flat = torch.cat([grad.flatten() for grad in _grads(module)])
    dist.all_reduce(flat)
    parts = (flat / dist.get_world_size()).split([param.numel() for param in trained])
    for param, part in zip(trained, parts, strict=True):
        param.grad = part.view(param.shape)


def largest(module: nn.Module) -> None:
    for grad in _grads(module):
        dist.all_reduce(grad, op=dist.ReduceOp.MAX)


def in_float32(module: nn.Module) -> None:
    for grad in _grads(module):
        small = grad.float()
        dist.all_reduce(small)
        grad.copy_(small / dist.get_world_size())


def not_waiting(module: nn.Module) -> None:
    """Divide part of the sum before it is complete, as a late wait() would."""
    for grad in _grads(module):
        dist.all_reduce(grad)
        grad.flatten()[:1].mul_(0.5)


def _grads(module: nn.Module) -> list[Tensor]:
    return [param.grad for param in module.parameters() if param.grad is not None]
