"""Right answers to the exercises of 03_recompute, and the wrong ones their checks must name."""

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from course_lib.recompute.activations import recompute
from course_lib.recompute.mixed_precision import LossScale, MixedPrecisionOptimizer

Fn = Callable[[Tensor], Tensor]


def redo(fn: Fn, x: Tensor, random_state: Tensor, grad: Tensor) -> Tensor | None:
    x = x.detach().requires_grad_()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.set_rng_state(random_state)
        y = fn(x)
    torch.autograd.backward(y, grad)
    return x.grad


def other_masks(fn: Fn, x: Tensor, random_state: Tensor, grad: Tensor) -> Tensor | None:
    x = x.detach().requires_grad_()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        y = fn(x)
    torch.autograd.backward(y, grad)
    return x.grad


def without_gradients(fn: Fn, x: Tensor, random_state: Tensor, grad: Tensor) -> Tensor | None:
    x = x.detach().requires_grad_()
    with torch.random.fork_rng(devices=[]):
        torch.set_rng_state(random_state)
        y = fn(x)
    torch.autograd.backward(y, grad)
    return x.grad


def reaches_x(fn: Fn, x: Tensor, random_state: Tensor, grad: Tensor) -> Tensor | None:
    x = x.detach().requires_grad_()
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.set_rng_state(random_state)
        y = fn(x)
    return torch.autograd.grad(y, x, grad)[0]


def moves_on(fn: Fn, x: Tensor, random_state: Tensor, grad: Tensor) -> Tensor | None:
    x = x.detach().requires_grad_()
    torch.set_rng_state(random_state)
    with torch.enable_grad():
        y = fn(x)
    torch.autograd.backward(y, grad)
    return x.grad


def not_detached(fn: Fn, x: Tensor, random_state: Tensor, grad: Tensor) -> Tensor | None:
    with torch.random.fork_rng(devices=[]), torch.enable_grad():
        torch.set_rng_state(random_state)
        y = fn(x)
    torch.autograd.backward(y, grad)
    return x.grad


def walks_on(fn: Fn, x: Tensor, random_state: Tensor, grad: Tensor) -> Tensor | None:
    x.retain_grad()
    return not_detached(fn, x, random_state, grad)


def best(num_layers: int, input_bytes: int, block_bytes: int) -> int:
    def held(k: int) -> int:
        return -(-num_layers // k) * input_bytes + k * block_bytes

    return min(range(1, num_layers + 1), key=held)


def root(num_layers: int, input_bytes: int, block_bytes: int) -> int:
    return math.isqrt(num_layers)


def least_bytes(num_layers: int, input_bytes: int, block_bytes: int) -> int:
    k = best(num_layers, input_bytes, block_bytes)
    return math.ceil(num_layers / k) * input_bytes + k * block_bytes


def fewest_inputs(num_layers: int, input_bytes: int, block_bytes: int) -> int:
    return num_layers


def best_as_float(num_layers: int, input_bytes: int, block_bytes: int) -> float:
    return math.sqrt(num_layers * input_bytes / block_bytes)


def rounded_root(num_layers: int, input_bytes: int, block_bytes: int) -> int:
    return max(1, round(math.sqrt(num_layers * input_bytes / block_bytes) + 0.1))


def inputs_of_one(num_layers: int, input_bytes: int, block_bytes: int) -> int:
    return best(num_layers, 1, block_bytes)


def best_rounded_down(num_layers: int, input_bytes: int, block_bytes: int) -> int:
    return min(
        range(1, num_layers + 1), key=lambda k: num_layers // k * input_bytes + k * block_bytes
    )


def best_index(num_layers: int, input_bytes: int, block_bytes: int) -> int:
    return best(num_layers, input_bytes, block_bytes) - 1


def last_best(num_layers: int, input_bytes: int, block_bytes: int) -> int:
    return min(
        range(num_layers, 0, -1),
        key=lambda k: math.ceil(num_layers / k) * input_bytes + k * block_bytes,
    )


Blocks = Sequence[nn.Module]


def _run(blocks: Blocks, x: Tensor) -> Tensor:
    for block in blocks:
        x = block(x)
    return x


def segments(blocks: Blocks, k: int, x: Tensor) -> Tensor:
    for start in range(0, len(blocks), k):
        x = recompute(_run, blocks[start : start + k], x)
    return x


def each_block(blocks: Blocks, k: int, x: Tensor) -> Tensor:
    for block in blocks:
        x = recompute(block, x)
    return x


def some_blocks(blocks: Blocks, k: int, x: Tensor) -> Tensor:
    for index, block in enumerate(blocks):
        x = recompute(block, x) if index % k == 0 else block(x)
    return x


def late_names(blocks: Blocks, k: int, x: Tensor) -> Tensor:
    for start in range(0, len(blocks), k):
        x = recompute(lambda x: _run(blocks[start : start + k], x), x)  # noqa: B023
    return x


def one_segment(blocks: Blocks, k: int, x: Tensor) -> Tensor:
    return recompute(_run, blocks, x)


def drops_the_rest(blocks: Blocks, k: int, x: Tensor) -> Tensor:
    for number in range(len(blocks) // k):
        x = recompute(_run, blocks[number * k : number * k + k], x)
    return x


SGD = torch.optim.Optimizer


def half_step(
    param: nn.Parameter, master: Tensor, optimizer: SGD, scale: float, max_norm: float
) -> bool:
    mixed = MixedPrecisionOptimizer([param], lambda _: optimizer, loss_scale=LossScale(scale))
    mixed.masters = [master]
    return mixed.step(max_norm)


def _step(
    param: nn.Parameter, master: Tensor, optimizer: SGD, grad: Tensor, max_norm: float
) -> bool:
    """Return the common part of the wrong answers: all but how they compute the gradient."""
    master.grad = grad
    if not grad.isfinite().all():
        return False
    nn.utils.clip_grad_norm_([master], max_norm)
    optimizer.step()
    param.data.copy_(master.data)
    return True


def clips_scaled(
    param: nn.Parameter, master: Tensor, optimizer: SGD, scale: float, max_norm: float
) -> bool:
    nn.utils.clip_grad_norm_([param], max_norm)
    return _step(param, master, optimizer, param.grad.float() / scale, math.inf)  # type: ignore[union-attr]


def never_unscales(
    param: nn.Parameter, master: Tensor, optimizer: SGD, scale: float, max_norm: float
) -> bool:
    return _step(param, master, optimizer, param.grad.float(), max_norm)  # type: ignore[union-attr]


def unscales_in_half(
    param: nn.Parameter, master: Tensor, optimizer: SGD, scale: float, max_norm: float
) -> bool:
    grad = param.grad.div(scale).float()  # type: ignore[union-attr]
    return _step(param, master, optimizer, grad, max_norm)


def half_master(
    param: nn.Parameter, master: Tensor, optimizer: SGD, scale: float, max_norm: float
) -> bool:
    stepped = _step(param, master, optimizer, param.grad.float() / scale, max_norm)  # type: ignore[union-attr]
    master.data.copy_(param.data)
    return stepped


def steps_anyway(
    param: nn.Parameter, master: Tensor, optimizer: SGD, scale: float, max_norm: float
) -> bool:
    master.grad = param.grad.float() / scale  # type: ignore[union-attr]
    nn.utils.clip_grad_norm_([master], max_norm)
    optimizer.step()
    param.data.copy_(master.data)
    return True


def never_steps(
    param: nn.Parameter, master: Tensor, optimizer: SGD, scale: float, max_norm: float
) -> bool:
    master.grad = param.grad.float() / scale  # type: ignore[union-attr]
    return True


def never_clips(
    param: nn.Parameter, master: Tensor, optimizer: SGD, scale: float, max_norm: float
) -> bool:
    return _step(param, master, optimizer, param.grad.float() / scale, math.inf)  # type: ignore[union-attr]


def any_finite(
    param: nn.Parameter, master: Tensor, optimizer: SGD, scale: float, max_norm: float
) -> bool:
    grad = param.grad.float() / scale  # type: ignore[union-attr]
    return bool(grad.isfinite().any()) and steps_anyway(param, master, optimizer, scale, max_norm)


def stale_param(
    param: nn.Parameter, master: Tensor, optimizer: SGD, scale: float, max_norm: float
) -> bool:
    before = param.detach().clone()
    stepped = half_step(param, master, optimizer, scale, max_norm)
    param.data.copy_(before)
    return stepped
