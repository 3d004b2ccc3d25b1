"""Right answers to the exercises of 02_accumulation, and the wrong ones their checks must name."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from course_lib.accumulation.accumulation import accumulated_step, by_tokens
from course_lib.accumulation.accumulation import split_micro_batches as split
from course_lib.models import IGNORED, token_loss

_Parts = Sequence[tuple[Tensor, Tensor]]
Loss = Callable[[Tensor, Tensor], Tensor]
_Batch = tuple[Tensor, Tensor]
SGD = torch.optim.Optimizer
step = accumulated_step


def not_divided(model: nn.Module, loss_fn: Loss, optimizer: SGD, batch: _Batch, m: int) -> Any:
    optimizer.zero_grad()
    total = torch.zeros(())
    for x, y in split(batch, m):
        loss = loss_fn(model(x), y)
        loss.backward()
        total = total + loss.detach() / m
    optimizer.step()
    return total


def divided_twice(model: nn.Module, loss_fn: Loss, optimizer: SGD, batch: _Batch, m: int) -> Any:
    optimizer.zero_grad()
    for x, y in split(batch, m):
        (loss_fn(model(x), y) / m).backward()
    for param in model.parameters():
        if param.grad is not None:
            param.grad /= m
    loss = loss_fn(model(batch[0]), batch[1]).detach()
    optimizer.step()
    return loss


def zero_grad_inside(model: nn.Module, loss_fn: Loss, optimizer: SGD, batch: _Batch, m: int) -> Any:
    total = torch.zeros(())
    for x, y in split(batch, m):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y) / m
        loss.backward()
        total = total + loss.detach()
    optimizer.step()
    return total


def backward_after(model: nn.Module, loss_fn: Loss, optimizer: SGD, batch: _Batch, m: int) -> Any:
    optimizer.zero_grad()
    losses = [loss_fn(model(x), y) / m for x, y in split(batch, m)]
    losses[-1].backward()
    optimizer.step()
    return torch.stack(losses).sum()


def no_zero_grad(model: nn.Module, loss_fn: Loss, optimizer: SGD, batch: _Batch, m: int) -> Any:
    for x, y in split(batch, m):
        (loss_fn(model(x), y) / m).backward()
    optimizer.step()


def step_inside(model: nn.Module, loss_fn: Loss, optimizer: SGD, batch: _Batch, m: int) -> Any:
    total = 0.0
    for x, y in split(batch, m):
        optimizer.zero_grad()
        loss = loss_fn(model(x), y) / m
        loss.backward()
        optimizer.step()
        total += loss.item()
    return total


def no_step(model: nn.Module, loss_fn: Loss, optimizer: SGD, batch: _Batch, m: int) -> Any:
    optimizer.zero_grad()
    for x, y in split(batch, m):
        (loss_fn(model(x), y) / m).backward()


def one_backward(model: nn.Module, loss_fn: Loss, optimizer: SGD, batch: _Batch, m: int) -> Any:
    optimizer.zero_grad()
    (loss := torch.stack([loss_fn(model(x), y) for x, y in split(batch, m)]).mean()).backward()
    optimizer.step()
    return loss


def zero_grad_late(model: nn.Module, loss_fn: Loss, optimizer: SGD, batch: _Batch, m: int) -> Any:
    for x, y in split(batch, m):
        (loss_fn(model(x), y) / m).backward()
    optimizer.zero_grad()
    optimizer.step()


def full_batch(model: nn.Module, loss_fn: Loss, optimizer: SGD, batch: _Batch, m: int) -> Any:
    optimizer.zero_grad()
    (loss := loss_fn(model(batch[0]), batch[1])).backward()
    optimizer.step()
    return loss


def sums_losses(model: nn.Module, loss_fn: Loss, optimizer: SGD, batch: _Batch, m: int) -> Any:
    return accumulated_step(model, loss_fn, optimizer, batch, m) * m


def uneven(model: nn.Module, loss_fn: Loss, parts: _Parts) -> None:
    num_items = sum(len(y) for _, y in parts)
    for x, y in parts:
        (loss_fn(model(x), y) * len(y) / num_items).backward()


def mean_of_means(model: nn.Module, loss_fn: Loss, parts: _Parts) -> None:
    for x, y in parts:
        (loss_fn(model(x), y) / len(parts)).backward()


def sum_of_means(model: nn.Module, loss_fn: Loss, parts: _Parts) -> None:
    for x, y in parts:
        loss_fn(model(x), y).backward()


def divided_only(model: nn.Module, loss_fn: Loss, parts: _Parts) -> None:
    for x, y in parts:
        (loss_fn(model(x), y) / sum(len(other) for _, other in parts)).backward()


def put_together(model: nn.Module, loss_fn: Loss, parts: _Parts) -> None:
    inputs, targets = (torch.cat(tensors) for tensors in zip(*parts, strict=True))
    loss_fn(model(inputs), targets).backward()


def like_the_first(model: nn.Module, loss_fn: Loss, parts: _Parts) -> None:
    num_items = len(parts) * len(parts[0][1])
    for x, y in parts:
        (loss_fn(model(x), y) * len(y) / num_items).backward()


def tokens(model: nn.Module, parts: _Parts) -> Tensor:
    whole = torch.cat([y for _, y in parts])
    return _weighed(model, parts, [by_tokens(y, whole) for _, y in parts])


def token_mean_of_means(model: nn.Module, parts: _Parts) -> Tensor:
    return _weighed(model, parts, [1 / len(parts)] * len(parts))


def by_sequences(model: nn.Module, parts: _Parts) -> Tensor:
    num_sequences = sum(len(y) for _, y in parts)
    return _weighed(model, parts, [len(y) / num_sequences for _, y in parts])


def counts_padding(model: nn.Module, parts: _Parts) -> Tensor:
    num_targets = sum(y.numel() for _, y in parts)
    return _weighed(model, parts, [int((y != IGNORED).sum()) / num_targets for _, y in parts])


def nan_of_no_tokens(model: nn.Module, parts: _Parts) -> Tensor:
    whole, total = torch.cat([y for _, y in parts]), torch.zeros(())
    for x, y in parts:
        loss = token_loss(model(x), y) * by_tokens(y, whole)
        loss.backward()
        total = total + loss.detach()
    return total


def _weighed(model: nn.Module, parts: _Parts, shares: Sequence[float]) -> Tensor:
    total = torch.zeros(())
    for (x, y), share in zip(parts, shares, strict=True):
        if (y != IGNORED).any():
            loss = token_loss(model(x), y) * share
            loss.backward()
            total = total + loss.detach()
    return total


def clipped(
    model: nn.Module, loss_fn: Loss, optimizer: SGD, batch: _Batch, m: int, max_norm: float
) -> Any:
    return accumulated_step(model, loss_fn, optimizer, batch, m, max_norm=max_norm)


def clips_running(
    model: nn.Module, loss_fn: Loss, optimizer: SGD, batch: _Batch, m: int, max_norm: float
) -> Any:
    optimizer.zero_grad()
    for x, y in split(batch, m):
        (loss_fn(model(x), y) / m).backward()
        nn.utils.clip_grad_norm_(model.parameters(), max_norm)
    optimizer.step()


def clips_each(
    model: nn.Module, loss_fn: Loss, optimizer: SGD, batch: _Batch, m: int, max_norm: float
) -> Any:
    params = list(model.parameters())
    sums = [torch.zeros_like(param) for param in params]
    for x, y in split(batch, m):
        grads = torch.autograd.grad(loss_fn(model(x), y) / m, params)
        factor = max_norm / torch.cat([grad.flatten() for grad in grads]).norm()
        sums = [s + grad * factor.clamp(max=1) for s, grad in zip(sums, grads, strict=True)]
    for param, total in zip(params, sums, strict=True):
        param.grad = total
    optimizer.step()


def clips_late(
    model: nn.Module, loss_fn: Loss, optimizer: SGD, batch: _Batch, m: int, max_norm: float
) -> Any:
    accumulated_step(model, loss_fn, optimizer, batch, m)
    nn.utils.clip_grad_norm_(model.parameters(), max_norm)


def _accumulated(model: nn.Module, loss_fn: Loss, optimizer: SGD, batch: _Batch, m: int) -> None:
    optimizer.zero_grad()
    for x, y in split(batch, m):
        (loss_fn(model(x), y) / m).backward()


def clips_parameters(
    model: nn.Module, loss_fn: Loss, optimizer: SGD, batch: _Batch, m: int, max_norm: float
) -> Any:
    _accumulated(model, loss_fn, optimizer, batch, m)
    for param in model.parameters():
        nn.utils.clip_grad_norm_([param], max_norm)
    optimizer.step()


def clips_numbers(
    model: nn.Module, loss_fn: Loss, optimizer: SGD, batch: _Batch, m: int, max_norm: float
) -> Any:
    _accumulated(model, loss_fn, optimizer, batch, m)
    nn.utils.clip_grad_value_(model.parameters(), max_norm)
    optimizer.step()


def clips_full(
    model: nn.Module, loss_fn: Loss, optimizer: SGD, batch: _Batch, m: int, max_norm: float
) -> Any:
    return clipped(model, loss_fn, optimizer, batch, 1, max_norm)


def clips_sum(
    model: nn.Module, loss_fn: Loss, optimizer: SGD, batch: _Batch, m: int, max_norm: float
) -> Any:
    summed: Loss = lambda y_pred, y: loss_fn(y_pred, y) * m  # noqa: E731
    return clipped(model, summed, optimizer, batch, m, max_norm)
