"""Layers whose matrices are split over ranks: column- and row-parallel linear, embedding, head.

Split by columns, each rank computes some of the outputs from the whole input. Split by rows, each
rank takes some of the inputs and computes a partial sum of every output; the partial sums are added
up. A column-parallel layer followed by a row-parallel one needs no communication in between, if
what happens there is elementwise. (nn.Linear stores its weight as [out, in]: the columns of the
matrix are the rows of `weight`.) Sizes that p does not divide are padded with zeros, which no layer
computes with: they get no gradient, and stay zero. Notebook 07_tensor_parallel.
"""

import math
from collections.abc import Sequence
from typing import ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from course_lib.collectives.group import Group, member_of
from course_lib.core.errors import CourseError, ShapeError
from course_lib.data_parallel.composition import TENSOR_PARALLEL, mark_split
from course_lib.data_parallel.gradients import NotCopied
from course_lib.data_parallel.guarded import guard
from course_lib.tensor_parallel.overlap import WeightAndBias, overlapped_columns
from course_lib.tensor_parallel.regions import (
    ShardAxis,
    copy_to_region,
    gather_columns,
    gather_sequence,
    own_shard,
    reduce_from_region,
    scatter_sequence,
    split_columns,
)


class ShardedLayer(NotCopied, nn.Module):
    """Base class of layers that hold this rank's shard of some of their parameters.

    shards   by parameter name: how it is split
    parts    of that dim on this rank: how much is the whole parameter's, how much is padding
    """

    weight: nn.Parameter
    bias: nn.Parameter | None
    copy_instead = "full_state_dict(model), loaded into another model"

    def __init__(self, group: Group, sequence_parallel: bool) -> None:
        super().__init__()
        self.member = member_of(group, type(self).__name__)
        self.group, self.sequence_parallel = group, sequence_parallel
        self.shards: dict[str, ShardAxis] = {}
        self.parts = 0, 0

    def take_shard(self, name: str, whole: Tensor | None, dim: int, copies: int = 1) -> None:
        """Register this rank's shard of a whole parameter, trainable if that one is.

        copies   as in `Split`: their gradients are partial sums, up to `finish_gradients`
        """
        shard = None
        if whole is not None:
            self.shards[name] = ShardAxis(dim, whole.shape[dim], copies)
            part = own_shard(whole.detach(), dim, self.group, copies)
            shard = nn.Parameter(part, whole.requires_grad)
            size = shard.shape[dim]
            own = min(max(whole.shape[dim] - self.member.rank // copies * size, 0), size)
            self.parts = own, size - own
            mark_split(shard, TENSOR_PARALLEL, self.member.ranks)
            guard(shard, nn.Parameter)
        self.register_parameter(name, shard)

    def without_padding(self, x: Tensor, dim: int) -> Tensor:
        """Return what is not padding of a tensor with a split dim; the padding gets no gradient."""
        return x.split(self.parts, dim)[0] if self.parts[1] else x

    def enter(self, x: Tensor) -> Tensor:
        """Enter the parallel region: every rank gets the whole sequences."""
        return (gather_sequence if self.sequence_parallel else copy_to_region)(x, self.group)

    def leave(self, x: Tensor) -> Tensor:
        """Leave the parallel region: sum over the ranks, of all tokens or of this rank's tokens."""
        return (scatter_sequence if self.sequence_parallel else reduce_from_region)(x, self.group)


class ColumnParallelLinear(ShardedLayer):
    """nn.Linear split by columns: each rank computes its share of the outputs.

    Shapes:  [batch, seq, in] -> [batch, seq, out/tp]; sequence parallel: from [batch, seq/tp, in]
    Cost:    all_reduce of the input in backward; sequence parallel: all_gather of it in forward,
             reduce_scatter in backward
    Source:  Shoeybi et al. 2019 (Megatron-LM), section 3

    gather_output  gather the outputs of all ranks: [..., out], for one more all_gather
    enters         False: the input is already inside the region, as q, k and v share one boundary
    overlap        sum the input's gradient while the weight's is computed; sequence parallel: save
                   this rank's tokens only and gather again in backward (not under autocast)
    copies         ranks in a row that compute the same outputs: heads of keys and values that are
                   fewer than tp; `finish_gradients` sums what each has of their gradient
    whole          layer whose weights are taken; None: initialized as nn.Linear does
    """

    padding: ClassVar[float] = 0.0  # the outputs beyond the last one

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
        overlap: bool = False,
        copies: int = 1,
        whole: nn.Linear | None = None,
    ) -> None:
        super().__init__(group, sequence_parallel)
        if self.member.size % copies or (gather_output and copies > 1):
            raise CourseError(
                "ColumnParallelLinear: need copies as a divisor of the ranks, and no gather_output "
                f"with them; got {copies} of {self.member.size}. Try copies=1."
            )
        whole = whole or nn.Linear(in_features, out_features, bias)
        self.out_features, self.gather_output, self.enters = out_features, gather_output, enters
        self.overlap = overlap
        self.output: Tensor | None = None  # computed beside others' by `columns_together`
        self.take_shard("weight", whole.weight, dim=0, copies=copies)
        self.take_shard("bias", whole.bias, dim=0, copies=copies)

    def forward(self, x: Tensor) -> Tensor:
        """Return this rank's outputs, [..., out/tp]; all of them with gather_output."""
        out = self._columns(x)  # [batch, seq, out/tp without padding]
        if self.parts[1]:
            out = F.pad(out, (0, self.parts[1]), value=self.padding)  # [batch, seq, out/tp]
        return gather_columns(out, self.out_features, self.group) if self.gather_output else out

    def matrix(self) -> WeightAndBias:
        """Return weight and bias without padding."""
        bias = None if self.bias is None else self.without_padding(self.bias, 0)
        return self.without_padding(self.weight, 0), bias

    def _columns(self, x: Tensor) -> Tensor:
        """Enter the region and multiply; or hand over what was computed together with others."""
        if self.output is not None:
            out, self.output = self.output, None
            return out
        if self.overlap and self.enters:
            matrices, way = [self.matrix()], self.sequence_parallel
            return overlapped_columns(x, matrices, self.group, sequence_parallel=way)[0]
        return F.linear(self.enter(x) if self.enters else x, *self.matrix())


def columns_together(columns: Sequence[ColumnParallelLinear], x: Tensor) -> None:
    """Compute the outputs of layers with one input at once, with one overlapped boundary.

    Each layer hands its output over when it is called next.
    """
    matrices, first = [layer.matrix() for layer in columns], columns[0]
    way = first.sequence_parallel
    outputs = overlapped_columns(x, matrices, first.group, sequence_parallel=way)
    for layer, output in zip(columns, outputs, strict=True):
        layer.output = output


class RowParallelLinear(ShardedLayer):
    """nn.Linear split by rows: each rank contributes the partial sum of its share of the inputs.

    Shapes:  [batch, seq, in/tp] -> [batch, seq, out]; sequence parallel: to [batch, seq/tp, out]
    Cost:    all_reduce of the output in forward; sequence parallel: reduce_scatter of it in
             forward, all_gather in backward
    Source:  Shoeybi et al. 2019 (Megatron-LM), section 3

    input_is_split  False: every rank has the whole input, and takes its share itself
    whole           layer whose weights are taken; None: initialized as nn.Linear does
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
        """Return the sum over the ranks; each rank has the whole bias and adds it after the sum."""
        x = x if self.input_is_split else split_columns(x, self.group)  # [batch, seq, in/tp]
        x, weight = (self.without_padding(one, -1) for one in (x, self.weight))
        out = self.leave(F.linear(x, weight))  # [batch, seq, out], or [batch, seq/tp, out]
        return out if self.bias is None else out + self.bias


class VocabParallelEmbedding(ShardedLayer):
    """nn.Embedding with the vocabulary split: each rank looks up its tokens, a sum combines them.

    Shapes:  [batch, seq] -> [batch, seq, hidden]; sequence parallel: to [batch, seq/tp, hidden]
    Cost:    all_reduce of the output in forward; sequence parallel: reduce_scatter of it in
             forward, all_gather in backward
    Raises:  ShapeError for a token outside the vocabulary; CourseError for a `whole` with max_norm,
             scale_grad_by_freq or sparse
    Source:  Shoeybi et al. 2019 (Megatron-LM), section 3

    whole    embedding whose weight and padding_idx are taken; None: one with neither given
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
        whole = whole or nn.Embedding(vocab, hidden)
        for option in ("max_norm", "scale_grad_by_freq", "sparse"):
            if getattr(whole, option):
                raise CourseError(
                    "VocabParallelEmbedding: need an nn.Embedding without max_norm, "
                    f"scale_grad_by_freq and sparse; got {option}={getattr(whole, option)}. "
                    "Try one without it, or an embedding that is not split."
                )
        self.vocab, self.padding_idx = vocab, whole.padding_idx
        self.take_shard("weight", whole.weight, dim=0)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return each token's row of the embedding: look up own tokens, sum over the ranks."""
        _check_tokens(tokens, self.vocab, "VocabParallelEmbedding")
        index, mine = own_tokens(tokens, len(self.weight), self.group)
        rows = F.embedding(index, self.weight).masked_fill(~mine.unsqueeze(-1), 0)
        if self.padding_idx is not None:  # its row is looked up, and gets no gradient
            rows = rows.where((tokens != self.padding_idx).unsqueeze(-1), rows.detach())
        return self.leave(rows)  # [batch, seq, hidden]


class VocabParallelHead(ColumnParallelLinear):
    """Output projection with the vocabulary split over ranks; padding tokens get logit -inf.

    So padding has probability 0 and no gradient, and a vocabulary of any size can be split.

    Shapes:  [batch, seq, hidden] -> [batch, seq, vocab/tp], rounded up
    """

    padding = -math.inf


def own_tokens(tokens: Tensor, size: int, group: Group = None) -> tuple[Tensor, Tensor]:
    """Return each token's index in this rank's shard of `size` rows, and whether it is in there.

    The index is 0 for tokens of other ranks.

    Shapes:  [...] -> [...] int64 and [...] bool
    """
    index = tokens - dist.get_rank(group) * size
    mine = (index >= 0) & (index < size)
    return index.masked_fill(~mine, 0), mine


def _check_tokens(tokens: Tensor, vocab: int, where: str) -> None:
    if tokens.numel() and not tokens.is_meta and not 0 <= tokens.min() <= tokens.max() < vocab:
        raise ShapeError(
            f"rank {dist.get_rank()}, {where}: need tokens from 0 to {vocab - 1}; got "
            f"{tokens.min().item()} to {tokens.max().item()}. Try a larger vocab."
        )
