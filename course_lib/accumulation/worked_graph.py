"""Worked example: a model of three parameters on two items, with every value and gradient.

y_pred = x1 * w1 + x2 * w2 + b and loss = (y_pred - target)**2. All numbers come from autograd,
after each forward, each backward and each optimizer step. Notebook 02_accumulation.

Source:  U. Jamil, pytorch-transformer-distributed, notes on computing gradients from scratch
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `live.py` stands on this file, and needs no PyTorch
    from torch import Tensor

PARAMS = ("w1", "w2", "b")
# node -> the nodes it is computed from
GRAPH: dict[str, tuple[str, ...]] = {
    "x1": (),
    "w1": (),
    "x2": (),
    "w2": (),
    "b": (),
    "target": (),
    "x1 * w1": ("x1", "w1"),
    "x2 * w2": ("x2", "w2"),
    "y_pred": ("x1 * w1", "x2 * w2", "b"),
    "error": ("y_pred", "target"),
    "loss": ("error",),
}


@dataclass(frozen=True, kw_only=True)
class Item:
    """Training example: two inputs and a target."""

    x1: float
    x2: float
    target: float


START, LR = (0.773, 0.321, 0.067), 1e-3
ITEMS = (Item(x1=6, x2=2, target=15), Item(x1=5, x2=2, target=12))


@dataclass(frozen=True, kw_only=True)
class GraphState:
    """State of the graph after one event of training.

    words    the event
    values   by node
    grads    by node; those of parameters accumulate
    fresh    nodes that the event has changed
    """

    words: str
    values: dict[str, float] = field(default_factory=dict)
    grads: dict[str, float] = field(default_factory=dict)
    fresh: tuple[str, ...] = ()


def graph_words(state: GraphState) -> str:
    """Describe the state in words: its event, and the numbers of the parameters."""
    parts = []
    for name in PARAMS:
        grad = f" with gradient {number_text(state.grads[name])}" if name in state.grads else ""
        parts.append(f"{name} {number_text(state.values[name])}{grad}")
    loss = f"; loss {number_text(state.values['loss'])}" if "loss" in state.values else ""
    return f"{state.words}: {', '.join(parts)}{loss}"


def number_text(value: float) -> str:
    """Format with four decimals, without trailing zeros: `93.1804`, `-115.836`, `6`."""
    text = f"{value:.4f}"
    return (text.rstrip("0").rstrip(".") if "." in text else text) or "0"


def graph_states(
    items: Sequence[Item] = ITEMS,
    *,
    items_per_step: int = 1,
    start: tuple[float, float, float] = START,
    lr: float = LR,
) -> list[GraphState]:
    """Train on the items one after another; return the state of the graph after each event.

    items_per_step   number of items whose gradients accumulate before each optimizer step
    """
    import torch

    params = {name: torch.tensor(value, dtype=torch.float64, requires_grad=True)
              for name, value in zip(PARAMS, start, strict=True)}  # fmt: skip
    optimizer = torch.optim.SGD(params.values(), lr=lr)
    seen = [GraphState(words="start", values=_numbers(params), fresh=PARAMS)]
    for number, item in enumerate(items, start=1):
        old = _grads(params)
        nodes = _forward(params, item)
        values = _numbers(nodes)
        fresh = tuple(name for name in GRAPH if name not in PARAMS)
        words = f"item {number}: forward"
        seen.append(GraphState(words=words, values=values, grads=old, fresh=fresh))
        nodes["loss"].backward()
        grads, added = _grads(nodes), " adds its gradients" if old else ""
        words = f"item {number}: backward{added}"
        seen.append(GraphState(words=words, values=values, grads=grads, fresh=tuple(grads)))
        if number % items_per_step == 0:
            optimizer.step()
            optimizer.zero_grad()
            words = f"the optimizer steps after item {number}"
            seen.append(GraphState(words=words, values=_numbers(params), fresh=PARAMS))
    return seen


def _forward(params: dict[str, "Tensor"], item: Item) -> dict[str, "Tensor"]:
    """Compute all nodes of the graph; intermediate ones retain their gradients."""
    import torch

    given = {name: torch.tensor(float(getattr(item, name)), dtype=torch.float64)
             for name in ("x1", "x2", "target")}  # fmt: skip
    nodes = params | given
    nodes["x1 * w1"] = nodes["x1"] * nodes["w1"]
    nodes["x2 * w2"] = nodes["x2"] * nodes["w2"]
    nodes["y_pred"] = nodes["x1 * w1"] + nodes["x2 * w2"] + nodes["b"]
    nodes["error"] = nodes["y_pred"] - nodes["target"]
    nodes["loss"] = nodes["error"] ** 2
    for node in nodes.values():
        if node.requires_grad:
            node.retain_grad()
    return nodes


def _numbers(nodes: dict[str, "Tensor"]) -> dict[str, float]:
    return {name: node.item() for name, node in nodes.items()}


def _grads(nodes: dict[str, "Tensor"]) -> dict[str, float]:
    """Return the gradients that exist; inputs and targets have none."""
    tensors = {name: node for name, node in nodes.items() if node.requires_grad}
    return {name: node.grad.item() for name, node in tensors.items() if node.grad is not None}
