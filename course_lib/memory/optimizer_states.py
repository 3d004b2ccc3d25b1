"""Bytes of optimizer state that need not be two fp32 moments per parameter. Notebook 01_memory."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

BLOCK = 2048  # numbers that share one scale
SMALLEST = 4096  # numbers from which bitsandbytes stores a tensor's moments in 8 bits


def adam_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of two fp32 moments: 8 per number."""
    return 8 * _numel(shape)


def adam_8bit_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of two 8-bit moments, with an fp32 scale per block of 2,048 numbers.

    Source:  Dettmers et al. 2022 (8-bit Optimizers via Block-wise Quantization), section 2.1;
             bitsandbytes keeps tensors of less than 4,096 numbers in fp32
    """
    numel = _numel(shape)
    return adam_bytes(shape) if numel < SMALLEST else 2 * (numel + 4 * -(-numel // BLOCK))


def adafactor_bytes(shape: tuple[int, ...]) -> int:
    """Return the bytes of a second moment kept as sums over rows and columns, in fp32.

    A vector keeps all of it. There is no first moment.

    Source:  Shazeer and Stern 2018 (Adafactor), section 3 and algorithm 4
    """
    if len(shape) < 2:
        return 4 * _numel(shape)
    *stacked, rows, columns = shape
    return 4 * _numel(tuple(stacked)) * (rows + columns)


def muon_bytes(shape: tuple[int, ...], hidden_matrix: bool) -> int:
    """Return the bytes of one fp32 momentum for a hidden matrix, of Adam's moments for the others.

    Source:  Jordan et al. 2024 (Muon: an optimizer for hidden layers); embedding, output layer and
             vectors are trained by AdamW
    """
    return 4 * _numel(shape) if hidden_matrix else adam_bytes(shape)


def state_table(model: nn.Module) -> dict[str, tuple[int, int | None]]:
    """Return for each optimizer the bytes of its state by formula, and of a real one after a step.

    None where this environment has no such optimizer (8-bit Adam needs another package).
    """
    shapes = {name: tuple(param.shape) for name, param in model.named_parameters()}
    hidden = {name for name in shapes if is_hidden_matrix(name, shapes[name])}
    formula = {
        "AdamW": sum(adam_bytes(shape) for shape in shapes.values()),
        "8-bit Adam": sum(adam_8bit_bytes(shape) for shape in shapes.values()),
        "Adafactor": sum(adafactor_bytes(shape) for shape in shapes.values()),
        "Muon + AdamW": sum(muon_bytes(shape, name in hidden) for name, shape in shapes.items()),
    }
    params = dict(model.named_parameters())
    matrices = [params[name] for name in sorted(hidden)]
    others = [param for name, param in params.items() if name not in hidden]
    real: dict[str, list[torch.optim.Optimizer]] = {
        "AdamW": [torch.optim.AdamW(params.values())],
        "Adafactor": [torch.optim.Adafactor(params.values())],
        "Muon + AdamW": [torch.optim.Muon(matrices), torch.optim.AdamW(others)],
    }
    for param in params.values():
        param.grad = torch.ones_like(param)
    measured = {name: sum(map(_held_after_step, used)) for name, used in real.items()}
    return {name: (num_bytes, measured.get(name)) for name, num_bytes in formula.items()}


def state_rows(model: nn.Module) -> str:
    """Return the table of `state_table`, with the bytes per parameter."""
    num_params = sum(param.numel() for param in model.parameters())
    lines = [f"{'optimizer state':<14}{'bytes per parameter':>22}{'formula':>14}{'measured':>14}"]
    for name, (formula, measured) in state_table(model).items():
        held = "not measured" if measured is None else f"{measured:,}"
        lines.append(f"{name:<14}{formula / num_params:>23.3g}{formula:>14,}{held:>14}")
    return "\n".join(lines)


def is_hidden_matrix(name: str, shape: tuple[int, ...]) -> bool:
    """Say whether Muon trains a parameter: a matrix, but neither an embedding nor the output."""
    return len(shape) == 2 and not any(part in name for part in ("embed", "head", "position"))


def _held_after_step(optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the state after one step, without the step counters."""
    optimizer.step()
    states: Iterable[dict[str, Tensor]] = optimizer.state.values()
    return sum(t.numel() * t.element_size() for s in states for k, t in s.items() if k != "step")


def _numel(shape: tuple[int, ...]) -> int:
    return torch.Size(shape).numel()
