"""Tensor parallelism: `parallelize` splits the matrices of a GPT over the ranks of a group.

Of each pair of matrices the first is split by columns and the second by rows: attention by whole
heads, the MLP by its hidden units. Heads of keys and values that are fewer than ranks are on
several of them. All ranks get the same tokens, and each block costs two all_reduces forward and two
backward; or, with sequence parallelism, an all_gather and a reduce_scatter instead of each, while
norms and dropout see only this rank's tokens.
Notebook 07_tensor_parallel.
"""

import zlib
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from course_lib.collectives.group import Group
from course_lib.core.errors import CourseError, MeshError
from course_lib.data_parallel.composition import check_wrappable
from course_lib.data_parallel.guarded import SplitParameter, guard
from course_lib.models.gpt import GPT, MLP, Attention, Dropout
from course_lib.models.moe import MoE
from course_lib.tensor_parallel.finish_watch import watch_finish
from course_lib.tensor_parallel.layers import (
    ColumnParallelLinear,
    RowParallelLinear,
    ShardedLayer,
    VocabParallelEmbedding,
    VocabParallelHead,
    columns_together,
)
from course_lib.tensor_parallel.regions import all_gather, own_sequence, replicate_sequence
from course_lib.tensor_parallel.state import partial_params


class ShardedDropout(Dropout):
    """Dropout of a tensor whose dim 1 (heads or tokens) is split over the group.

    Every rank draws the mask of the whole tensor and keeps its own part. So the parts differ, the
    random states of all ranks stay equal, as replicated dropout needs, and the mask is the one of
    the unsplit model. Megatron draws only its own part, from a second random state that is seeded
    with the rank: p times fewer random numbers, but masks that no unsplit model has.

    Shapes:  [batch, heads/tp or seq/tp, ...] -> the same
    Cost:    p times the random numbers, and temporarily the whole mask (1 byte per number)
    Source:  NVIDIA Megatron-LM, megatron/core/tensor_parallel/random.py (the second state)
    """

    def __init__(self, p: float, group: Group = None) -> None:
        super().__init__(p)
        self.group = group

    def forward(self, x: Tensor) -> Tensor:
        """Set numbers to zero with probability p and scale the others by 1 / (1 - p)."""
        if not self.training or self.p == 0:
            return x
        batch, part, *rest = x.shape
        p, rank = dist.get_world_size(self.group), dist.get_rank(self.group)
        whole = torch.empty(batch, part * p, *rest, dtype=torch.bool, device=x.device)
        keep = whole.bernoulli_(1 - self.p).narrow(1, rank * part, part).clone()  # own part
        return x * keep / (1 - self.p)


# --- splitting a model


def parallelize(
    model: GPT,
    mesh: DeviceMesh,
    sequence_parallel: bool = False,
    *,
    gather_output: bool = False,
    overlap: bool = False,
) -> GPT:
    """Split a GPT in place over the ranks of a mesh with one axis; all start with equal weights.

    logits = parallelize(model, mesh)(tokens)
    parallel_token_loss(logits, targets, mesh.get_group()).backward()
    finish_gradients(model)  # for sequence parallelism, normed heads and shared ones

    sequence_parallel  norms, dropout and the residual stream hold seq/tp tokens per rank; a layer
                       of experts gathers all of them, which each rank then routes
    gather_output      logits [batch, seq, vocab] on every rank, for `token_loss`
    overlap            backward sums the gradient of each region's input while it computes the
                       gradients of the weights: equal to the last bit (not under autocast); with
                       sequence_parallel as Megatron: inputs are gathered again, not kept

    Shapes:  tokens [batch, seq] -> [batch, seq, vocab/tp], rounded up
    Cost:    here one small all_gather, as a check; `tensor_traffic` lists those of a step
    Raises:  MeshError for more than one axis, heads that cannot be shared out, and ranks whose
             weights or random states differ; CourseError for a model that is split already
    Source:  Shoeybi et al. 2019 (Megatron-LM), section 3; Korthikanti et al. 2022, section 4
    """
    group = _group_for(model, mesh)
    _check_same_start(model, group)
    before = [*model.parameters()]
    options: dict[str, Any] = {"group": group, "sequence_parallel": sequence_parallel}
    _split_ends(model, options, gather_output=gather_output, overlap=overlap)
    _split_layers(model, options, overlap)
    if sequence_parallel:
        for part in (model, *model.blocks):
            part.add_module("dropout", ShardedDropout(part.dropout.p, group))
        if model.positions is not None:
            model.positions.register_forward_hook(partial(_own_rows, group))
    watch_finish(model, partial_params(model))
    for param in {*before} - {*model.parameters()}:
        guard(param, SplitParameter)  # an optimizer of it would train nothing
    return model.train(model.training)


def _split_ends(
    model: GPT, options: Mapping[str, Any], *, gather_output: bool, overlap: bool
) -> None:
    """Split embedding and head along the vocabulary; tied weights stay tied."""
    tied = model.head.weight is model.embedding.weight
    sizes = model.spec.padded_vocab, model.spec.hidden
    embedding = VocabParallelEmbedding(*sizes, whole=model.embedding, **options)
    how: dict[str, Any] = {"gather_output": gather_output, "overlap": overlap, **options}
    head = VocabParallelHead(*sizes[::-1], False, whole=model.head, **how)
    if tied:
        head.weight = embedding.weight
    model.add_module("embedding", embedding)
    model.add_module("head", head)


def _split_layers(model: GPT, options: Mapping[str, Any], overlap: bool) -> None:
    """Split attention and MLPs; experts are split inside a layer that sees all tokens."""
    group, splits_tokens = options["group"], options["sequence_parallel"]
    routed = {part for one in model.modules() if isinstance(one, MoE) for part in one.modules()}
    for module in list(model.modules()):
        if isinstance(module, Attention):
            _split_pair(module, ("q", "k", "v"), options, overlap)
            module.dropout = ShardedDropout(module.dropout.p, group)
        elif isinstance(module, MLP):
            own = splits_tokens and module not in routed
            _split_pair(module, ("gate", "up"), {**options, "sequence_parallel": own}, overlap)
        elif isinstance(module, MoE) and splits_tokens:
            module.register_forward_pre_hook(partial(_gather_in_front, group))
            module.register_forward_hook(partial(_keep_own, group))


def _split_pair(
    module: Attention | MLP, names: tuple[str, ...], options: Mapping[str, Any], overlap: bool
) -> None:
    """Split the named matrices by columns and `out` by rows; they share one entry boundary.

    Heads of keys and values that are fewer than tp are on several ranks, each with the queries that
    need them.
    """
    columns = []
    for name in names:
        linear = getattr(module, name)
        if linear is not None:  # an MLP without a gate
            copies = 1
            if isinstance(module, Attention) and name in ("k", "v"):
                copies = max(1, dist.get_world_size(options["group"]) // module.spec.kv_heads)
            how = {"enters": False, "copies": copies, "whole": linear, **options}
            column = ColumnParallelLinear(*_sizes(linear), **how)
            module.add_module(name, column)
            columns.append(column)
    out = RowParallelLinear(*_sizes(module.out), whole=module.out, **options)
    module.add_module("out", out)
    enter = partial(_compute_columns, columns) if overlap else partial(_enter, out)
    module.register_forward_pre_hook(enter)


def _sizes(linear: nn.Linear) -> tuple[int, int, bool]:
    return linear.in_features, linear.out_features, linear.bias is not None


def _enter(layer: ShardedLayer, module: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """Apply the boundary that all matrices with this input share."""
    return (layer.enter(args[0]),)


def _compute_columns(
    columns: list[ColumnParallelLinear], module: nn.Module, args: tuple[Tensor]
) -> None:
    """Compute all matrices with this input, and the overlapped boundary in front of them."""
    columns_together(columns, args[0])


def _own_rows(group: Group, positions: nn.Module, args: Any, rows: Tensor) -> Tensor:
    """Return the position rows of this rank's tokens: [seq, hidden] -> [seq/tp, hidden]."""
    return rows.chunk(dist.get_world_size(group))[dist.get_rank(group)]


def _gather_in_front(group: Group, layer: nn.Module, args: tuple[Tensor]) -> tuple[Tensor]:
    """Give a layer of experts the tokens of all ranks: each routes all of them, alike."""
    return (replicate_sequence(args[0], group),)


def _keep_own(group: Group, layer: nn.Module, args: Any, y: Tensor) -> Tensor:
    """Keep this rank's tokens of a layer's output: [batch, seq, hidden] -> [..., seq/tp, ...]."""
    return own_sequence(y, group)


# --- checks


def _group_for(model: GPT, mesh: DeviceMesh) -> dist.ProcessGroup:
    """Return the group of the mesh's one axis, if the model can be split over it."""
    if not isinstance(mesh, DeviceMesh) or mesh.ndim != 1:
        got = f"{mesh.ndim} axes" if isinstance(mesh, DeviceMesh) else type(mesh).__name__
        raise MeshError(
            f"parallelize: need a DeviceMesh of one axis; got {got}. "
            'Try mesh["tp"], or init_device_mesh("cpu", (p,), mesh_dim_names=("tp",)).'
        )
    if not isinstance(model, GPT) or isinstance(model.embedding, ShardedLayer):
        got = "one that is split already" if isinstance(model, GPT) else type(model).__name__
        raise CourseError(
            f"parallelize: need an unsplit GPT; got {got}. Try parallelize(GPT(spec), mesh)."
        )
    check_wrappable(model, mesh.get_group(), "parallelize")
    tp, spec = mesh.size(), model.spec
    if spec.num_heads % tp:
        raise MeshError(
            f"parallelize: need num_heads of {spec.name} divisible by tp, as a head stays whole; "
            f"got {spec.num_heads} and {tp}. Try a smaller tp."
        )
    if spec.kv_heads % tp and tp % spec.kv_heads:
        raise MeshError(
            f"parallelize: need kv_heads of {spec.name} as a multiple or a divisor of tp, as a "
            f"head stays whole; got {spec.kv_heads} and {tp}. Try a smaller tp."
        )
    return mesh.get_group()


def _check_same_start(model: GPT, group: Group) -> None:
    """Check that all ranks hold equal weights and, if there is dropout, equal random states."""
    device = model.head.weight.device
    if device.type == "meta":
        return  # a dry run has no weights
    random = torch.get_rng_state() if device.type == "cpu" else torch.cuda.get_rng_state(device)
    draws = any(module.p for module in model.modules() if isinstance(module, Dropout))
    own = _checksum(model.parameters()), _checksum([random] if draws else [])
    gathered = all_gather(torch.tensor(own, device=device), 0, group).view(-1, 2)
    for number, others in enumerate(gathered.tolist()):
        for what, mine, other in zip(("weights", "random state"), own, others, strict=True):
            if other != mine:
                raise MeshError(
                    f"rank {dist.get_rank()}, parallelize: need the same {what} on all ranks of "
                    f"the group; number {number} of it has another. Try torch.manual_seed(seed) "
                    "with one seed for all of them, before GPT(spec)."
                )


def _checksum(tensors: Iterable[Tensor]) -> int:
    """Return a CRC-32 of all bits of the tensors."""
    checksum = 0
    for tensor in tensors:
        data = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
        checksum = zlib.crc32(data.numpy().tobytes(), checksum)
    return checksum
