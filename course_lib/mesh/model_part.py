"""One rank's part of a model, and the one order in which the methods are applied to it.

`apply_methods` is that order: tensor, expert and context parallelism, recomputation, pipeline, then
copies or shards over the ranks that hold the same part, those of dp and cp. Each method sees what
the one before it has left, and only its own axes of the mesh. Notebook 11_mesh.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch.distributed as dist
from torch import Tensor, nn

from course_lib.context_parallel.model import parallelize_context
from course_lib.core.shards import InWhole, ParamShard, Shard, same_shard
from course_lib.mesh.rank_mesh import RankMesh
from course_lib.models import BERT, GPT
from course_lib.pipeline.stage import Stage, split_model
from course_lib.tensor_parallel.state import shards_of_split
from course_lib.tensor_parallel.tensor_parallel import parallelize

OverDp = TypeVar("OverDp")
ShardOf = Callable[[Tensor], Shard]


@dataclass(eq=False)
class ModelPart(Generic[OverDp]):
    """This rank's part of a model that all ranks have built from the same seed.

    module    the model, with tp its layers' shards; with pp the stage of them
    places    where each of its parameters, and saved buffers, stands in the whole model
    wrapped   what averages, or shards, over the ranks that hold the same part
    shard_of  of a parameter that is sharded over copies: the shard of the module's parameter that a
              tensor laid out like it is; others are whole
    """

    module: nn.Module
    places: Mapping[Tensor, InWhole]
    wrapped: OverDp
    shard_of: dict[Tensor, ShardOf] = field(default_factory=dict)

    def param_shards(self) -> list[ParamShard]:
        """Return this rank's parameters, each with its shard of the whole one."""
        found = self.places.items()
        return [
            ParamShard((), param, self.shard_of.get(param, Shard.of)).at(place)
            for param, place in found
        ]

    def shards(self) -> dict[str, Shard]:
        """Return this rank's shards by their names in the whole model's state dict.

        A checkpoint names the tensors of the whole model, so a run can resume with any other
        parallelism.
        """
        found: dict[str, Shard] = {}
        for one in self.param_shards():
            found |= dict.fromkeys(one.names, one.shard_of(one.local))
        return found

    def full_state(self) -> dict[str, Tensor]:
        """Return the state dict of the whole model, on every rank; all ranks call it.

        Cost:    one all_gather_object of all ranks' shards
        """
        by_rank: list[dict[str, Shard]] = [{}] * dist.get_world_size()
        dist.all_gather_object(by_rank, self.shards())
        found: dict[str, Tensor] = {}
        for name, shard in (named for shards in by_rank for named in shards.items()):
            for box, piece in shard.pieces:
                whole = found.setdefault(name, piece.new_empty(shard.shape))
                whole[box.slices()] = piece
        return found


def apply_methods(
    whole: GPT | BERT,
    mesh: RankMesh,
    over_dp: Callable[[nn.Module, dist.ProcessGroup], OverDp],
    *,
    over_cp: Callable[[GPT, dist.ProcessGroup], object] = parallelize_context,
    over_ep: Callable[[GPT], object] | None = None,
    splits: bool = True,
    sequence_parallel: bool = False,
    recompute: Callable[[GPT | BERT], None] | None = None,
    num_layers: Sequence[int] | None = None,
    placement: Sequence[int] | None = None,
) -> ModelPart[OverDp]:
    """Apply every method to a model in place, from the inside out; return this rank's part.

    over_dp      wraps the part for the ranks that hold the same one: DDP, ZeRO, FSDP. Inside a
                 stage it may put wrappers in the place of the model chunks
    over_cp      lets attention see the tokens of all ranks of cp: `parallelize_context` with its
                 form, layout and sequence length
    over_ep      keeps this rank's experts of every layer: `parallelize_experts` with its groups
    splits       False: it also splits the model over tp and pp, as Megatron-Core does
    recompute    changes which activations are saved for backward, such as `recompute_full`
    num_layers   of the stages, and their ranks, as in `split_model`

    Raises: CourseError for a model that the axes cannot split
    """
    tp, pp = (mesh.size(axis) if splits else 1 for axis in ("tp", "pp"))
    if tp > 1 and isinstance(whole, GPT):  # 1. split every matrix
        device = next(whole.parameters()).device.type
        parallelize(whole, mesh.device_mesh("tp", device), sequence_parallel)
    if over_ep is not None and isinstance(whole, GPT):  # 2. keep this rank's experts
        over_ep(whole)
    if mesh.size("cp") > 1 and isinstance(whole, GPT):  # 3. attend to the tokens of all of cp
        over_cp(whole, mesh.group("cp"))
    if recompute is not None:  # 4. save less of each layer
        recompute(whole)
    places = _places_in(whole)
    module: nn.Module = whole
    if pp > 1 and isinstance(whole, GPT):  # 5. keep this rank's layers of the result
        stage = mesh.index("pp")
        module = split_model(whole, pp, stage, num_layers=num_layers, placement=placement)
    before = list(module.parameters())
    buffers = [one for one in module.buffers() if one in places]  # such as a router's bias
    wrapped = over_dp(module, mesh.copies)  # 6. copy or shard what is left
    after = dict(zip(before, module.parameters(), strict=True))  # FSDP has replaced them by shards
    if isinstance(module, Stage):
        module.tied = [replace(tied, param=after[tied.param]) for tied in module.tied]
    found: dict[Tensor, InWhole] = {after[param]: places[param] for param in before}
    return ModelPart(module, found | {one: places[one] for one in buffers}, wrapped)


def _places_in(whole: nn.Module) -> dict[Tensor, InWhole]:
    """Return the places of a model's parameters, which tensor parallelism may have split."""
    splits, names = shards_of_split(whole), dict[Tensor, tuple[str, ...]]()
    for name, param in whole.state_dict(keep_vars=True).items():
        names[param] = (*names.get(param, ()), name)  # a tied one has two
    return {param: InWhole(of, splits.get(of[0], same_shard)) for param, of in names.items()}
