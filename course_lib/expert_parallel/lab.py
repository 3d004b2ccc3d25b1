"""Measure a layer of experts: bytes on real ranks, the wait for the fullest rank, drops, balance.

`layer_runs` has real ranks, messages and routing, but experts that sleep for each row, so that the
cores of a laptop decide nothing. `train_loads` trains a small GPT on text in which few tokens are
frequent, with a rule that balances, or none. Notebook 16_experts.
"""

import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.context_parallel.cost import PassBytes
from course_lib.context_parallel.lab import sent_by
from course_lib.core.errors import CourseError
from course_lib.core.presets import MODELS
from course_lib.core.records import Event
from course_lib.core.specs import Experts
from course_lib.expert_parallel.cost import RoutedSizes
from course_lib.expert_parallel.model import parallelize_experts
from course_lib.expert_parallel.simulation import draw_choices
from course_lib.models.gpt import GPT, token_loss
from course_lib.models.moe import MoE, Routing, drop, move_bias
from course_lib.ranks import Ranks, record, span
from course_lib.ranks.timing import from_zero

ROW_S = 4e-4  # of an expert that sleeps, in forward; twice as long in backward
RULES = ("none", "auxiliary loss", "moved bias")


def even_choices(tokens: int, experts: int, active: int) -> Tensor:
    """Return choices that give every expert equally many copies: [tokens, active]."""
    return torch.arange(tokens * active).view(tokens, active) % experts


def skewed_choices(tokens: int, experts: int, active: int, skew: float = 1.0) -> Tensor:
    """Return choices of experts of which the first ones are the most popular: [tokens, active]."""
    return torch.from_numpy(draw_choices(tokens, experts, active, skew=skew))


def routing_of(choices: Tensor, num_experts: int) -> Routing:
    """Return the routing that sends tokens to given experts, with equal weights."""
    (tokens, active), device = choices.shape, choices.device
    scores = torch.full((tokens, num_experts), 1 / num_experts, device=device)
    return Routing(choices, torch.full((tokens, active), 1 / active, device=device), scores)


class ChosenRouter(nn.Module):
    """A router that sends each token where it is told."""

    choices: Tensor

    def __init__(self, choices: Tensor, num_experts: int) -> None:
        super().__init__()
        self.register_buffer("choices", choices)
        self.num_experts = num_experts

    def forward(self, _tokens: Tensor) -> Routing:
        return routing_of(self.choices, self.num_experts)


def divided_layer(sizes: RoutedSizes, choices: Tensor) -> MoE:
    """Return a layer whose experts are divided over all ranks; its tokens go where they are told.

    choices   [tokens, active], of this rank's tokens
    """
    experts = Experts(count=sizes.experts, active=sizes.active, ffn_hidden=sizes.hidden)
    layer = MoE(replace(MODELS["moe-tiny"], hidden=sizes.hidden, experts=experts))
    parallelize_experts(layer)
    layer.add_module("router", ChosenRouter(choices, sizes.experts))
    return layer


def measure_bytes(ranks: Ranks, sizes: RoutedSizes) -> list[PassBytes]:
    """Return the bytes of copies that each rank sends, if all experts are chosen equally often."""
    return ranks.run(_sent, sizes)


def _sent(rank: int, sizes: RoutedSizes) -> PassBytes:
    torch.manual_seed(rank)
    layer = divided_layer(sizes, even_choices(sizes.tokens, sizes.experts, sizes.active))
    tokens = torch.randn(sizes.tokens, sizes.hidden, requires_grad=True)
    with record() as forward:
        y = layer(tokens)
    with record() as backward:
        y.sum().backward()
    _, *copies = sorted(forward.events, key=lambda event: event.start_s)  # the first: counts
    return PassBytes(sent_by(copies), sent_by(backward.events))


class _Sleeps(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: Tensor) -> Tensor:
        with span("forward", f"{len(inputs)} rows"):
            time.sleep(ROW_S * len(inputs))
        return inputs.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        with span("backward", f"{len(grad)} rows"):
            time.sleep(2 * ROW_S * len(grad))
        return grad


class SleepingExperts(nn.Module):
    """Experts that take their time for every row, and change nothing."""

    def forward(self, inputs: Tensor, _counts: Tensor) -> Tensor:
        return _Sleeps.apply(inputs)


def layer_runs(ranks: Ranks, choices: Mapping[str, Tensor], experts: int) -> dict[str, list[Event]]:
    """Return the events of a layer's forward and backward on all ranks, for each routing.

    choices   [tokens, active] of all ranks' tokens, rank 0 has the first ones; after a first run,
              the fastest of three counts
    """
    by_rank = ranks.run(_layer_events, dict(choices), experts)
    return {
        name: min(
            (from_zero(e for own in by_rank for e in own[name][turn]) for turn in range(1, 4)),
            key=lambda events: max(event.end_s for event in events),
        )
        for name in choices
    }


def _layer_events(
    rank: int, choices: dict[str, Tensor], experts: int
) -> dict[str, list[list[Event]]]:
    found: dict[str, list[list[Event]]] = {name: [] for name in choices}
    for name, of_all in choices.items():
        own = of_all.chunk(dist.get_world_size())[rank]
        sizes = RoutedSizes(tokens=len(own), hidden=64, experts=experts, active=own.shape[1])
        layer = divided_layer(sizes, own)
        layer.add_module("experts", SleepingExperts())
        for _ in range(4):
            tokens = torch.randn(len(own), sizes.hidden, requires_grad=True)
            dist.barrier()
            with record() as log:
                layer(tokens).sum().backward()
            found[name].append(log.events)
    return found


def dropped_by_layer(choices: Any, experts: int, factor: float) -> float:
    """Return the share of copies that a layer with a capacity factor drops."""
    routing = drop(routing_of(torch.as_tensor(choices), experts), factor)
    return (routing.experts < 0).double().mean().item()


def skewed_batch(n: int, batch: int = 8, seq: int = 32, vocab: int = 256) -> tuple[Tensor, Tensor]:
    """Return tokens and targets of a stream in which token i appears 1 / (i + 1) times as often."""
    random = torch.Generator().manual_seed(n)
    often = 1 / torch.arange(1.0, vocab + 1)
    drawn = torch.multinomial(often, batch * (seq + 1), replacement=True, generator=random)
    drawn = drawn.view(batch, seq + 1)
    return drawn[:, :-1], drawn[:, 1:]


def train_loads(
    rule: str, steps: int = 150, *, alpha: float = 0.05, bias_step: float = 0.01
) -> list[list[int]]:
    """Train a small GPT on the skewed stream; return the tokens of each expert, step by step.

    rule   "none", "auxiliary loss" (alpha times it), or "moved bias" (by bias_step); those of the
           first layer with experts are returned

    Raises: CourseError for another rule
    """
    if rule not in RULES:
        raise CourseError(f"train_loads: need rule as one of {', '.join(RULES)}; got {rule!r}.")
    torch.manual_seed(0)
    spec = MODELS["moe-tiny"]
    if spec.experts is not None:
        spec = replace(spec, experts=replace(spec.experts, router="sigmoid"))
    model = GPT(spec)
    layers = [module for module in model.modules() if isinstance(module, MoE)]
    for layer in layers:
        layer.aux_weight = alpha if rule == "auxiliary loss" else 0.0
    adam, loads = torch.optim.AdamW(model.parameters(), lr=3e-4), []
    for n in range(steps):
        tokens, targets = skewed_batch(n)
        adam.zero_grad()
        token_loss(model(tokens), targets).backward()
        adam.step()
        loads.append(layers[0].tokens_per_expert.tolist())
        for layer in layers:
            bias = layer.router.bias
            if rule == "moved bias" and bias is not None:
                bias.copy_(move_bias(bias, layer.tokens_per_expert, bias_step))
    return loads
