"""The right answer to exercise 2 of 07_tensor_parallel, and the wrong ones its check must name."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.checks.tensor_parallel.parts import copy_to_region, mine_of, reduce_from_region


class SplitMLP(nn.Module):
    """This rank's part of down(gelu(up(x))): some outputs of up, and those as inputs of down."""

    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__()
        mine = self.mine(up.out_features)
        self.up_weight = nn.Parameter(up.weight.detach()[mine])
        self.up_bias = nn.Parameter(up.bias.detach()[mine])
        self.down_weight = nn.Parameter(down.weight.detach()[:, mine])
        self.down_bias = nn.Parameter(down.bias.detach().clone())

    def mine(self, width: int) -> Tensor:
        return mine_of(width)

    def forward(self, x: Tensor) -> Tensor:
        return reduce_from_region(self.part(copy_to_region(x))) + self.down_bias

    def part(self, x: Tensor) -> Tensor:
        return F.gelu(x @ self.up_weight.T + self.up_bias) @ self.down_weight.T


class BiasEach(SplitMLP):
    def forward(self, x: Tensor) -> Tensor:
        return reduce_from_region(self.part(copy_to_region(x)) + self.down_bias)


class BiasParts(SplitMLP):
    def forward(self, x: Tensor) -> Tensor:
        return reduce_from_region(
            self.part(copy_to_region(x)) + self.down_bias / dist.get_world_size()
        )


class BiasFirst(SplitMLP):
    def forward(self, x: Tensor) -> Tensor:
        part = self.part(copy_to_region(x))
        return reduce_from_region(part + self.down_bias if dist.get_rank() == 0 else part)


class WrongWay(SplitMLP):
    """Cuts up by its inputs and down by its outputs: up gives parts of sums."""

    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__(up, down)
        mine = mine_of(up.in_features)
        self.x_part = (int(mine[0]), len(mine)) if len(mine) else (0, 0)
        self.up_weight = nn.Parameter(up.weight.detach()[:, mine])
        self.up_bias = nn.Parameter(up.bias.detach().clone())
        self.down_weight = nn.Parameter(down.weight.detach().clone())

    def part(self, x: Tensor) -> Tensor:
        return super().part(x.narrow(-1, *self.x_part))


class NoCopyIn(SplitMLP):
    def forward(self, x: Tensor) -> Tensor:
        return reduce_from_region(self.part(x)) + self.down_bias


class NoSumOut(SplitMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.part(copy_to_region(x)) + self.down_bias


class LateCopy(SplitMLP):
    """Lets the hidden layer through f, of which every rank has another part."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = copy_to_region(F.gelu(x @ self.up_weight.T + self.up_bias))
        return reduce_from_region(hidden @ self.down_weight.T) + self.down_bias


class LateBias(SplitMLP):
    def part(self, x: Tensor) -> Tensor:
        return (F.gelu(x @ self.up_weight.T) + self.up_bias) @ self.down_weight.T


class MeanOfParts(SplitMLP):
    def forward(self, x: Tensor) -> Tensor:
        return (
            reduce_from_region(self.part(copy_to_region(x))) / dist.get_world_size()
            + self.down_bias
        )


class Gathers(SplitMLP):
    """Gathers the whole hidden layer on every rank, which then takes its own part of it again."""

    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__(up, down)
        self.width = up.out_features

    def part(self, x: Tensor) -> Tensor:
        hidden, mine = F.gelu(x @ self.up_weight.T + self.up_bias), self.mine(self.width)
        whole = hidden.new_zeros(*hidden.shape[:-1], self.width).index_copy(-1, mine, hidden)
        return reduce_from_region(whole)[..., mine] @ self.down_weight.T


class EvenOnly(SplitMLP):
    def mine(self, width: int) -> Tensor:
        n = width // dist.get_world_size()
        return torch.arange(dist.get_rank() * n, (dist.get_rank() + 1) * n)


class Views(SplitMLP):
    """Slices instead of indices: the part is a view, and the whole stays alive."""

    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__(up, down)
        p, rank = dist.get_world_size(), dist.get_rank()
        self.up_weight = nn.Parameter(up.weight.detach().tensor_split(p)[rank])
        self.down_weight = nn.Parameter(down.weight.detach().tensor_split(p, dim=1)[rank])


class KeepsLayers(SplitMLP):
    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__(up, down)
        self.layers = [up, down]


class AllOfUp(SplitMLP):
    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__(up, down)
        self.up_weight = nn.Parameter(up.weight.detach().clone())
        self.up_bias = nn.Parameter(up.bias.detach().clone())
        self.first, self.count = int(mine_of(up.out_features)[0]), len(mine_of(up.out_features))

    def part(self, x: Tensor) -> Tensor:
        hidden = F.gelu(x @ self.up_weight.T + self.up_bias)
        return hidden.narrow(-1, self.first, self.count) @ self.down_weight.T


class OnlyTensors(SplitMLP):
    """Plain tensors: no optimizer would ever find them."""

    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__(up, down)
        weight = self.up_weight.detach()
        del self.up_weight
        self.up_weight = weight  # type: ignore[assignment]


class KeepsBiasParts(BiasEach):
    """Right until the first step of an optimizer: every part gets the whole gradient."""

    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__(up, down)
        self.down_bias = nn.Parameter(down.bias.detach() / dist.get_world_size())


class KeepsBiasFirst(BiasEach):
    """The same: rank 0 has the bias, the others train a bias that began at 0."""

    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__(up, down)
        self.down_bias = nn.Parameter(down.bias.detach() * (dist.get_rank() == 0))


class Transposed(SplitMLP):
    """Keeps up.weight as [in, out], which is square where 3 numbers are a rank's part."""

    def __init__(self, up: nn.Linear, down: nn.Linear) -> None:
        super().__init__(up, down)
        self.up_weight = nn.Parameter(self.up_weight.detach().T.contiguous())

    def part(self, x: Tensor) -> Tensor:
        return F.gelu(x @ self.up_weight + self.up_bias) @ self.down_weight.T


class EveryPth(SplitMLP):
    def mine(self, width: int) -> Tensor:
        return torch.arange(dist.get_rank(), width, dist.get_world_size())


class NoGelu(SplitMLP):
    def part(self, x: Tensor) -> Tensor:
        return (x @ self.up_weight.T + self.up_bias) @ self.down_weight.T


class NoUpBias(SplitMLP):
    def part(self, x: Tensor) -> Tensor:
        return F.gelu(x @ self.up_weight.T) @ self.down_weight.T


class Swapped(SplitMLP):
    def forward(self, x: Tensor) -> Tensor:
        return copy_to_region(self.part(reduce_from_region(x))) + self.down_bias


class LeftTheGraph(SplitMLP):
    @torch.no_grad()
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


class InTheGraph(SplitMLP):
    """Backward passes the sum by, which is what g does; PyTorch warns of it."""

    def forward(self, x: Tensor) -> Tensor:
        out = self.part(copy_to_region(x))
        dist.all_reduce(out)
        return out + self.down_bias
