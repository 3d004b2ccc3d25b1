"""A linear layer whose matrix is split over ranks, by columns or by rows.

Split by columns, each rank computes some of the outputs from the whole input; split by rows, each
takes some of the inputs and computes a part of every output, and the parts are added up. Columns
first and rows after it need nothing in between, whatever is done to each number there. (A linear
layer keeps its weight transposed, [out, in]: its columns are the rows of `weight`.) Sizes that p
does not divide are filled up with zeros, which stay zero. Notebook 07_tensor_parallel.
"""

import math
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.collectives.group import Group, member_of
from course_lib.core.errors import ShapeError
from course_lib.tensor_parallel.regions import (
    copy_to_region,
    gather_columns,
    gather_sequence,
    own_shard,
    reduce_from_region,
    scatter_sequence,
    split_columns,
)


class ShardedLayer(nn.Module):
    """A layer that holds this rank's shard of some of its parameters.

    shards   for each of them, by name: the dim it is split along, and that dim's whole size
    """

    weight: nn.Parameter
    bias: nn.Parameter | None

    def __init__(self, group: Group, sequence_parallel: bool) -> None:
        super().__init__()
        self.member = member_of(group, type(self).__name__)
        self.group, self.sequence_parallel = group, sequence_parallel
        self.shards: dict[str, tuple[int, int]] = {}

    def take_shard(self, name: str, whole: Tensor | None, dim: int) -> None:
        """Keep this rank's shard of a whole parameter, trainable if that one is."""
        shard = None
        if whole is not None:
            self.shards[name] = (dim, whole.shape[dim])
            shard = nn.Parameter(own_shard(whole.detach(), dim, self.group), whole.requires_grad)
        self.register_parameter(name, shard)

    def enter(self, x: Tensor) -> Tensor:
        """The way into the region where ranks differ: whole sequences on every rank."""
        return (gather_sequence if self.sequence_parallel else copy_to_region)(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """The way out: the sum over the ranks, of all tokens or of this rank's."""
        return (scatter_sequence if self.sequence_parallel else reduce_from_region)(x, self.group)


class ColumnParallelLinear(ShardedLayer):
    """nn.Linear split by columns: this rank computes its share of the outputs.

    Shapes:  [batch, seq, in] -> [batch, seq, out/tp]; sequence parallel: from [batch, seq/tp, in]
    Cost:    all_reduce of the input in backward; sequence parallel: all_gather of it in forward,
             reduce_scatter in backward
    Source:  Shoeybi et al. 2019 (Megatron-LM), section 3

    gather_output  gather the outputs of all ranks: [..., out], for one more all_gather
    enters         False: the input has gone through the boundary already, as q, k and v share one
    whole          take its weights; None: those that nn.Linear would begin with
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group: Group = None,
        *,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        enters: bool = True,
        whole: nn.Linear | None = None,
    ) -> None:
        super().__init__(group, sequence_parallel)
        whole = whole or nn.Linear(in_features, out_features, bias)
        self.out_features, self.gather_output, self.enters = out_features, gather_output, enters
        self.take_shard("weight", whole.weight, dim=0)
        self.take_shard("bias", whole.bias, dim=0)

    def forward(self, x: Tensor) -> Tensor:
        """Its share of the outputs."""
        out = F.linear(self.enter(x) if self.enters else x, self.weight, self.bias)
        return gather_columns(out, self.out_features, self.group) if self.gather_output else out


class RowParallelLinear(ShardedLayer):
    """nn.Linear split by rows: this rank adds what its share of the inputs gives.

    Shapes:  [batch, seq, in/tp] -> [batch, seq, out]; sequence parallel: to [batch, seq/tp, out]
    Cost:    all_reduce of the output in forward; sequence parallel: reduce_scatter of it in
             forward, all_gather in backward
    Source:  Shoeybi et al. 2019 (Megatron-LM), section 3

    input_is_split  False: every rank has the whole input, and takes its share itself
    whole           take its weights; None: those that nn.Linear would begin with
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        group: Group = None,
        *,
        input_is_split: bool = True,
        sequence_parallel: bool = False,
        whole: nn.Linear | None = None,
    ) -> None:
        super().__init__(group, sequence_parallel)
        whole = whole or nn.Linear(in_features, out_features, bias)
        self.input_is_split = input_is_split
        self.take_shard("weight", whole.weight, dim=1)
        self.bias = whole.bias

    def forward(self, x: Tensor) -> Tensor:
        """The sum over the ranks; every rank has the whole bias, and adds it after the sum."""
        x = x if self.input_is_split else split_columns(x, self.group)
        out = self.leave(F.linear(x, self.weight))
        return out if self.bias is None else out + self.bias


class VocabParallelEmbedding(ShardedLayer):
    """nn.Embedding split by tokens: this rank looks up its own, and the sum has them all.

    Shapes:  [batch, seq] -> [batch, seq, hidden]; sequence parallel: to [batch, seq/tp, hidden]
    Cost:    all_reduce of the output in forward; sequence parallel: reduce_scatter of it in
             forward, all_gather in backward
    Raises:  ShapeError for a token outside the vocabulary
    Source:  Shoeybi et al. 2019 (Megatron-LM), section 3
    """

    def __init__(
        self,
        vocab: int,
        hidden: int,
        group: Group = None,
        *,
        sequence_parallel: bool = False,
        whole: nn.Embedding | None = None,
    ) -> None:
        super().__init__(group, sequence_parallel)
        self.vocab = vocab
        self.take_shard("weight", (whole or nn.Embedding(vocab, hidden)).weight, dim=0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Each token's row."""
        _check_tokens(tokens, self.vocab, "VocabParallelEmbedding")
        index, mine = own_tokens(tokens, len(self.weight), self.group)
        rows = F.embedding(index, self.weight)
        return self.leave(rows.masked_fill(~mine.unsqueeze(-1), 0))


class VocabParallelHead(ColumnParallelLinear):
    """The output projection split by tokens; tokens that only fill up the shard get logit -inf.

    So they have probability 0 and no gradient, and any vocabulary can be split.

    Shapes:  [batch, seq, hidden] -> [batch, seq, vocab/tp], rounded up
    """

    filled_up: Tensor | None

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        size = len(self.weight)
        token = torch.arange(size, device=self.weight.device) + self.member.rank * size
        none = torch.zeros(size, dtype=self.weight.dtype, device=self.weight.device)
        minus_inf = none.masked_fill(token >= self.out_features, -math.inf)
        any_filled = minus_inf.isinf().any()
        self.register_buffer("filled_up", minus_inf if any_filled else None, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """The logits of this rank's tokens."""
        logits = F.linear(self.enter(x), self.weight, self.filled_up)
        if self.gather_output:
            return gather_columns(logits, self.out_features, self.group)
        return logits


def own_tokens(tokens: Tensor, size: int, group: Group = None) -> tuple[Tensor, Tensor]:
    """Where each token stands in this rank's shard of `size` (0 if elsewhere), and if it does."""
    index = tokens - dist.get_rank(group) * size
    mine = (index >= 0) & (index < size)
    return index.masked_fill(~mine, 0), mine


def _check_tokens(tokens: Tensor, vocab: int, where: str) -> None:
    if tokens.numel() and not 0 <= tokens.min() <= tokens.max() < vocab:
        raise ShapeError(
            f"rank {dist.get_rank()}, {where}: need tokens from 0 to {vocab - 1}; got "
            f"{tokens.min().item()} to {tokens.max().item()}. Try a larger vocab."
        )
