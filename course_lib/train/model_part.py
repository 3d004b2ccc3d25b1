"""This rank's part of the model, and how checkpoints of the whole model are gathered and loaded.

A checkpoint equals that of one rank with the whole model, so a run can resume with any other
parallelism: the shards of a layer are gathered over tp, the layers of the stages over pp.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.models import BERT, GPT
from course_lib.pipeline.actions import loop_placement, v_placement
from course_lib.pipeline.stage import split_model
from course_lib.tensor_parallel.state import gather_tensors, shard_tensors
from course_lib.tensor_parallel.tensor_parallel import parallelize
from course_lib.train.config import V_SCHEDULES, TrainConfig
from course_lib.train.mesh import TrainMesh

Tensors = Mapping[str, Tensor]


class ModelPart:
    """This rank's part of a model that all ranks have built from the same seed.

    module   the model, with tp its layers' shards; with pp the stage of them
    params   its parameters, by their names in the whole model
    """

    def __init__(self, whole: GPT | BERT, config: TrainConfig, mesh: TrainMesh) -> None:
        self.mesh = mesh
        if config.tp > 1 and isinstance(whole, GPT):  # a BERT is not split
            parallelize(whole, mesh.device_mesh["tp"], config.sequence_parallel)
        name_of = {param: name for name, param in whole.named_parameters()}
        self._names = list(name_of.values())
        keys = whole.state_dict(keep_vars=True).items()
        self._keys = {key: name_of[param] for key, param in keys}  # a tied one has two keys
        self.module: nn.Module = whole
        chunks: list[nn.Module] = [whole]
        if config.pp > 1 and isinstance(whole, GPT):
            placement = loop_placement(config.pp, config.num_model_chunks)
            if config.schedule in V_SCHEDULES:
                placement = v_placement(config.pp)
            stage = split_model(whole, config.pp, mesh.number("pp"), placement=placement)
            self.module, chunks = stage, list(stage.chunks)
        self._chunks = [
            (chunk, {path: name_of[param] for path, param in chunk.named_parameters()})
            for chunk in chunks
        ]
        self.params = {name_of[param]: param for param in self.module.parameters()}

    @torch.no_grad()
    def gather(self, optimizer: torch.optim.Optimizer) -> dict[str, Any] | None:
        """Return the whole state dicts `model` and `optimizer` on rank 0's CPU; elsewhere None.

        Cost: in the first copy of the model, an all_gather a tensor over tp; then each stage's
              tensors to rank 0
        """
        if self.mesh.number("dp"):
            return None
        kinds: dict[str, dict[str, Tensor]] = defaultdict(dict, model=dict(self.params))
        for name, param in self.params.items():
            for kind, value in optimizer.state[param].items():
                kinds[kind][name] = value
        wholes = {kind: self._changed(gather_tensors, tensors) for kind, tensors in kinds.items()}
        mine = {kind: {k: v.detach().cpu() for k, v in wholes[kind].items()} for kind in wholes}
        stages = self._of_all_stages(mine)
        if dist.get_rank():
            return None
        whole = {kind: {k: v for stage in stages for k, v in stage[kind].items()} for kind in mine}
        model = whole.pop("model")
        state = {
            number: {kind: tensors[name] for kind, tensors in whole.items()}
            for number, name in enumerate(self._names if whole else ())
        }
        groups = groups_of(optimizer.state_dict(), len(self._names))
        return {
            "model": {key: model[name] for key, name in self._keys.items()},
            "optimizer": {"state": state, "param_groups": groups},
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any], optimizer: torch.optim.Optimizer) -> None:
        """Load this rank's part of a state that `gather` returned; no communication."""
        model = {name: state["model"][name] for name in self.params}
        for name, tensor in self._changed(shard_tensors, model).items():
            self.params[name].copy_(tensor)
        kinds: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for number, values in state["optimizer"]["state"].items():
            if self._names[number] in self.params:
                for kind, value in values.items():
                    kinds[kind][self._names[number]] = value
        mine = {kind: self._changed(shard_tensors, tensors) for kind, tensors in kinds.items()}
        own = {
            number: {kind: tensors[name] for kind, tensors in mine.items()}
            for number, name in enumerate(self.params if mine else ())
        }
        groups = groups_of(state["optimizer"], len(self.params))
        optimizer.load_state_dict({"state": own, "param_groups": groups})

    def _changed(
        self, change: Callable[[nn.Module, Tensors], dict[str, Tensor]], tensors: Tensors
    ) -> dict[str, Tensor]:
        """Gather shards into whole tensors or the reverse; scalars, such as step counts, stay."""
        changed = dict(tensors)
        for chunk, names in self._chunks if self.mesh.parallelism.tp > 1 else ():
            paths = {path: tensors[name] for path, name in names.items() if tensors[name].dim()}
            changed |= {names[path]: tensor for path, tensor in change(chunk, paths).items()}
        return changed

    def _of_all_stages(self, mine: Any) -> list[Any]:
        """Gather every stage's part on rank 0; elsewhere the list holds None."""
        if self.mesh.parallelism.pp == 1 or self.mesh.number("tp"):
            return [mine]
        stages: list[Any] = [None] * self.mesh.parallelism.pp
        into = stages if dist.get_rank() == 0 else None
        dist.gather_object(mine, into, dst=0, group=self.mesh.group("pp"))
        return stages


def groups_of(state: Mapping[str, Any], num_params: int) -> list[dict[str, Any]]:
    """Return an optimizer's parameter groups for that many parameters."""
    return [{**group, "params": list(range(num_params))} for group in state["param_groups"]]
