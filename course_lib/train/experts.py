"""Experts in a training run: their load, step by step, and the two rules that keep it even.

The auxiliary loss has the weight that a micro-batch's loss has, and its gradient is added in
backward: a pipeline stage needs no loss for it. It is computed from the tokens of one forward on
one rank, as is the capacity: so its numbers follow the micro-batches, and not how many ranks share
them. Notebook 16_experts.
"""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import nn

from course_lib.collectives.group import Group
from course_lib.models.moe import MoE, move_bias
from course_lib.ranks.world import is_dry


class RoutedLayers:
    """The layers of experts on this rank, by their number in the whole model."""

    def __init__(self, whole: nn.Module) -> None:
        blocks = enumerate(getattr(whole, "blocks", ()))
        self.layers = {n: block.mlp for n, block in blocks if isinstance(block.mlp, MoE)}

    def keep(self, part: nn.Module) -> None:
        """Forget the layers of other pipeline stages."""
        own = {*part.modules()}
        self.layers = {n: layer for n, layer in self.layers.items() if layer in own}

    def begin(self, aux_weight: float, shares: Sequence[float]) -> None:
        """Before a step's first forward: forget the load, weigh the auxiliary loss.

        shares   of the micro-batches' losses, whose mean is used: they are equal, or nearly so
        """
        for layer in self.layers.values():
            layer.load.zero_()
            layer.aux_weight = aux_weight * sum(shares) / len(shares)

    @torch.no_grad()
    def end(self, group: Group, bias_step: float) -> dict[str, list[int]]:
        """After a step: add up the load of all ranks of a group, and move the biases against it.

        Return the tokens per expert by layer.

        Cost:    one all_reduce of num_experts numbers for each layer
        """
        if not self.layers:
            return {}
        loads = torch.stack([layer.load for layer in self.layers.values()])  # [layers, experts]
        dist.all_reduce(loads, group=group)
        for layer, load in zip(self.layers.values(), loads, strict=True):
            if layer.router.bias is not None and bias_step:
                layer.router.bias.copy_(move_bias(layer.router.bias, load, bias_step))
        if is_dry():
            return {}
        return {str(n): load for n, load in zip(self.layers, loads.tolist(), strict=True)}
