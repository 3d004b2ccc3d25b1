"""Stages of a pipeline: `split_model` decides which layers each rank holds.

Layers stay in order. With p stages and v model chunks per rank, the model is cut into p v chunks,
and rank r holds chunks r, r + p, r + 2p and so on; or, in a V, chunks r and 2p - 1 - r. A tied
parameter whose layers are on several stages has a copy on each; their gradients are summed, so that
the copies stay equal.
Notebook 08_pipeline.
"""

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from course_lib.collectives.group import GroupMember
from course_lib.core.errors import CourseError
from course_lib.core.specs import ModelSpec
from course_lib.cost.flops import forward_flop, layers_flop
from course_lib.data_parallel.composition import PIPELINE, mark_split, splits_of
from course_lib.data_parallel.guarded import guard
from course_lib.models import GPT
from course_lib.pipeline.actions import depths_of, loop_placement
from course_lib.pipeline.balance import balance_stages

Model = ModelSpec | GPT | Sequence[nn.Module] | nn.Sequential


@dataclass(frozen=True)
class Tied:
    """Tied parameter of which several stages hold a copy."""

    param: nn.Parameter
    stages: tuple[int, ...]


class Stage(nn.Module):
    """Model chunks of one rank, in the order of the layers, and the parameters tied to others'.

    depths   position of each chunk among all chunks of the model; empty: unknown
    """

    def __init__(
        self,
        chunks: Sequence[nn.Module],
        tied: Sequence[Tied] = (),
        depths: Sequence[int] = (),
    ) -> None:
        super().__init__()
        self.chunks = nn.ModuleList(chunks)
        self.tied, self.depths = list(tied), list(depths)


def mark_stage(stage: Stage, member: GroupMember) -> None:
    """Note that other ranks hold other stages: the norm of this one's gradient is no whole one."""
    for param in stage.parameters():
        if (PIPELINE, member.ranks) not in splits_of(param):
            mark_split(param, PIPELINE, member.ranks)
        if type(param) is nn.Parameter:
            guard(param, nn.Parameter)


class GPTChunk(GPT):
    """Consecutive layers of a GPT, with the parameter names of the whole model.

    Layer 0 is the embedding, then come the blocks; the last layer is the norm with the head.

    Shapes:  tokens [batch, seq] or [batch, seq, hidden] -> [batch, seq, hidden] or logits
    """

    def __init__(self, whole: GPT, first: int, end: int) -> None:
        nn.Module.__init__(self)  # GPT.__init__ would build all layers again
        self.spec = whole.spec
        if "run_blocks" in vars(whole):  # recomputation has replaced it
            vars(self)["run_blocks"] = whole.run_blocks
        self.begins, self.ends = first == 0, end == len(whole.blocks) + 2
        if self.begins:
            self.embedding, self.positions = whole.embedding, whole.positions
            self.dropout = whole.dropout
        self.blocks = nn.ModuleList()
        for number, block in enumerate(whole.blocks):
            if first <= number + 1 < end:
                self.blocks.add_module(str(number), block)
        if self.ends:
            self.norm, self.head = whole.norm, whole.head

    def forward(self, x: Tensor) -> Tensor:
        """Apply these layers to tokens (first chunk) or to activations."""
        x = self.run_blocks(self.blocks, self.embed(x) if self.begins else x)
        return self.head(self.norm(x)) if self.ends else x


def split_model(
    model: Model,
    num_stages: int,
    stage: int,
    *,
    num_layers: Sequence[int] | None = None,
    layer_times: Sequence[float] | None = None,
    num_model_chunks: int = 1,
    placement: Sequence[int] | None = None,
) -> Stage:
    """Return one stage of a model that all ranks have built from the same seed.

    model        a ModelSpec or GPT, whose layers are embedding, blocks, head; or a list of layers
    num_layers   number of layers in each of the p v model chunks, in the order of the layers
    layer_times  used without num_layers: time of each layer; the slowest chunk is made as fast as
                 possible. By default a GPT's layers count by their FLOP, other layers equally
    placement    rank of each chunk, in the order of the layers, such as `v_placement(num_stages)`;
                 by default the ranks in order, once for each of `num_model_chunks`

    Cost:    the whole model once; the other stages' layers are freed when the caller frees `model`
    Raises:  CourseError if the chunks do not fit the layers
    """
    if not 0 <= stage < num_stages:
        raise CourseError(
            f"split_model: need a stage from 0 to {num_stages - 1}; got {stage}. Try the rank."
        )
    whole = GPT(model) if isinstance(model, ModelSpec) else model
    if placement is None:
        placement = loop_placement(num_stages, num_model_chunks)
    if num_layers is None:
        times = _layer_times(whole) if layer_times is None else layer_times
        _check_layers(len(times), _num_layers(whole), "layer_times")
        num_layers = balance_stages(times, len(placement))
    if len(num_layers) != len(placement) or min(num_layers) < 1:
        raise CourseError(
            f"split_model: need layers for {num_stages} stages x "
            f"{len(placement) // num_stages} model chunks, "
            f"none empty; got num_layers = {list(num_layers)}. Try num_layers=None."
        )
    _check_layers(sum(num_layers), _num_layers(whole), "num_layers")
    ends = pairwise(accumulate(num_layers, initial=0))
    pieces = [_piece(whole, first, end) for first, end in ends]
    depths = depths_of(stage, placement)
    tied = [tied for tied in _tied(pieces, placement) if stage in tied.stages]
    return Stage([pieces[depth] for depth in depths], tied, depths)


def _num_layers(whole: GPT | Sequence[nn.Module] | nn.Sequential) -> int:
    return len(whole.blocks) + 2 if isinstance(whole, GPT) else len(whole)


def _layer_times(whole: GPT | Sequence[nn.Module] | nn.Sequential) -> list[float]:
    """Return the forward FLOP of each layer of a GPT; 1 per layer for other models."""
    if not isinstance(whole, GPT):
        return [1.0] * len(whole)
    spec = whole.spec
    head = forward_flop(spec, 1, spec.max_seq)["logits"]
    return [0, *layers_flop(spec, 1, spec.max_seq), head]


def _piece(whole: GPT | Sequence[nn.Module] | nn.Sequential, first: int, end: int) -> nn.Module:
    if isinstance(whole, GPT):
        return GPTChunk(whole, first, end)
    return nn.Sequential(OrderedDict((str(n), whole[n]) for n in range(first, end)))


def _tied(pieces: Sequence[nn.Module], placement: Sequence[int]) -> list[Tied]:
    """Return the parameters that several stages share, in the same order on every rank."""
    holders: dict[nn.Parameter, list[int]] = {}
    for piece, holder in zip(pieces, placement, strict=True):
        for param in piece.parameters():
            holders.setdefault(param, []).append(holder)
    return [Tied(p, tuple(sorted({*s}))) for p, s in holders.items() if len({*s}) > 1]


def _check_layers(got: int, wanted: int, what: str) -> None:
    if got != wanted:
        raise CourseError(
            f"split_model: need {what} for {wanted} layers (of a GPT: embedding, blocks, head); "
            f"got {got}. Try {what}=None."
        )


# --- copies of one parameter on several stages


@torch.no_grad()
def share_tied(stage: Stage, member: GroupMember) -> None:
    """Broadcast each tied parameter from the first stage that holds it to the others."""
    for tied in stage.tied:
        root, *others = tied.stages
        if member.rank == root:
            works = [member.isend(tied.param.detach(), to) for to in others]
        else:
            works = [member.irecv(tied.param.detach(), root)]
        for work in works:
            work.wait()


@contextmanager
def tied_summed(stage: Stage, member: GroupMember) -> Iterator[None]:
    """Sum the gradients that the copies of a tied parameter get inside this context.

    Gradients from before are set aside and added again, as they have been summed already.

    Cost:    at the end, one message each way between any two stages that hold a copy
    """
    tied_params = [tied for tied in stage.tied if tied.param.requires_grad]
    before = [tied.param.grad for tied in tied_params]
    for tied in tied_params:
        tied.param.grad = None
    yield
    for tied, old in zip(tied_params, before, strict=True):
        grad = tied.param.grad
        own = torch.zeros_like(tied.param) if grad is None else grad
        total = sum_copies(own, tied.stages, member)
        tied.param.grad = total if old is None else old + total


def sum_copies(grad: Tensor, stages: Sequence[int], member: GroupMember) -> Tensor:
    """Exchange the gradients of a tied parameter's copies, or equal shards of them, and sum them.

    stages   that hold a copy; the sum goes in their order: the same bits on every rank
    """
    mine = grad.detach().contiguous()
    grads = {to: mine if to == member.rank else torch.empty_like(mine) for to in stages}
    works = [member.isend(mine, to) for to in stages if to != member.rank]
    works += [member.irecv(grads[other], other) for other in stages if other != member.rank]
    for work in works:
        work.wait()
    return torch.stack([grads[number] for number in stages]).sum(0)
