"""Tools for the checks of 02 and 03: small models, their gradients, one step of SGD."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.checks.exercise import CheckFailed
from course_lib.checks.expect import Cause, expect_equal
from course_lib.memory.saved_tensors import activation_ledger

OLD = 1000.0  # what every gradient holds before a step


def one_step(
    answer: Callable[..., Any], where: str, batch: tuple[Tensor, Tensor], *more: Any
) -> tuple[Any, Tensor]:
    """Return the answer's result, and the gradient that its one optimizer step used."""
    model, steps = line(), list[int]()
    for param in model.parameters():
        param.grad = torch.full_like(param, OLD)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    optimizer.register_step_pre_hook(lambda *_: steps.append(1))
    before = flat(model.parameters())
    loss = answer(model, F.mse_loss, optimizer, batch, *more)
    if len(steps) != 1:
        says = "It stands inside the loop." if steps else "Did you forget it?"
        raise CheckFailed(f"{where}: need one optimizer.step(); got {len(steps)}. {says}")
    return loss, before - flat(model.parameters())


def expect_low_peak(answer: Callable[..., Any]) -> None:
    """Demand that four micro-batches keep no more memory than one of them."""

    def peak(items: int, count: int) -> int:
        torch.manual_seed(0)
        model, x = (
            nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1)),
            torch.ones(items, 2),
        )
        batch, optimizer = (x, x[:, :1]), torch.optim.SGD(model.parameters(), lr=0.0)
        given = [*model.parameters(), *batch]
        step = lambda: answer(model, F.mse_loss, optimizer, batch, count)  # noqa: E731
        return activation_ledger(step, given=given).peak_bytes()

    one, four = peak(4, 1), peak(16, 4)
    if four > one:
        raise CheckFailed(
            f"16 items in 4 micro-batches hold {four} bytes for backward, 4 items in one hold "
            f"{one}. The graphs of all micro-batches are alive: call backward in the loop."
        )


def expect_near(
    got: Any, expected: Tensor, where: str, causes: Sequence[Cause], look: str = ""
) -> None:
    """Demand equality within 1e-9: the sums run in another order."""
    if isinstance(got, float | int):
        got = torch.tensor(float(got)).double()
    if isinstance(got, Tensor):
        got = got.detach().to(expected.dtype)
        if got.shape == expected.shape and near(expected)(got):
            return
    expect_equal(got, expected, where=where, causes=causes, look=look)


FULL_BATCH = "Compare with one backward of the full batch."


def parts_of(items: int, count: int) -> str:
    """Describe a check's case: `2 items in 1 micro-batch`."""
    return f"{items} items in {count} micro-batch{'es' if count > 1 else ''}"


def near(wrong: Any) -> Callable[[Any], bool]:
    """Return a cause: the result is this value, up to rounding."""
    return lambda got: bool(torch.allclose(got, wrong, rtol=1e-5, atol=1e-9))


def batch_of(items: int) -> tuple[Tensor, Tensor]:
    """Return inputs [items, 2] and targets [items, 1], the same every time."""
    random = torch.Generator().manual_seed(items)
    x = torch.randint(1, 6, (items, 2), generator=random).double()
    return x, torch.randint(-20, 20, (items, 1), generator=random).double()


def split(batch: tuple[Tensor, Tensor], count: int) -> list[tuple[Tensor, Tensor]]:
    """Split the batch into `count` parts."""
    return list(zip(*(tensor.tensor_split(count) for tensor in batch), strict=True))


def line() -> nn.Linear:
    """Return a linear model with known weights, in float64."""
    model = nn.Linear(2, 1).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, -2.0]]))
        model.bias.fill_(0.5)
    return model


def gradient(batch: tuple[Tensor, Tensor]) -> Tensor:
    """Return the gradient of a whole batch's mean squared error on `line()`."""
    model = line()
    F.mse_loss(model(batch[0]), batch[1]).backward()
    return flat_grads(model)


def clip(gradient: Tensor, max_norm: float) -> Tensor:
    """Return the gradient, shortened to max_norm if it is longer."""
    return gradient * min(1.0, max_norm / (gradient.norm().item() + 1e-6))


def flat(tensors: Any) -> Tensor:
    """Return all numbers of some tensors in one tensor."""
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def flat_grads(model: nn.Module) -> Tensor:
    """Return all gradients of a model in one tensor."""
    if all(param.grad is None for param in model.parameters()):
        raise CheckFailed("No parameter has a gradient. Call backward on the loss of each part.")
    return flat(param.grad for param in model.parameters())
