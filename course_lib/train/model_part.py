"""This rank's part of the model, and which shards of the whole model it holds.

A checkpoint names the tensors of the whole model, so a run can resume with any other parallelism.
"""

from torch import nn

from course_lib.checkpoint.model_state import whole_shard
from course_lib.core.shards import ParamShard, Shard
from course_lib.models import BERT, GPT
from course_lib.pipeline.actions import loop_placement, v_placement
from course_lib.pipeline.stage import split_model
from course_lib.tensor_parallel.state import shards_of_split
from course_lib.tensor_parallel.tensor_parallel import parallelize
from course_lib.train.config import V_SCHEDULES, TrainConfig
from course_lib.train.mesh import TrainMesh


class ModelPart:
    """This rank's part of a model that all ranks have built from the same seed.

    module   the model, with tp its layers' shards; with pp the stage of them
    """

    def __init__(self, whole: GPT | BERT, config: TrainConfig, mesh: TrainMesh) -> None:
        if config.tp > 1 and isinstance(whole, GPT):  # a BERT is not split
            parallelize(whole, mesh.tensor_mesh, config.sequence_parallel)
        names: dict[nn.Parameter, tuple[str, ...]] = {}  # a tied one has two
        for name, param in whole.state_dict(keep_vars=True).items():
            names[param] = (*names.get(param, ()), name)
        self.module: nn.Module = whole
        if config.pp > 1 and isinstance(whole, GPT):
            placement = loop_placement(config.pp, config.num_model_chunks)
            if config.schedule in V_SCHEDULES:
                placement = v_placement(config.pp)
            self.module = split_model(whole, config.pp, mesh.index("pp"), placement=placement)
        self._names = {param: names[param] for param in self.module.parameters()}

    def param_shards(self) -> list[ParamShard]:
        """Return this rank's parameters, each with its shard of the whole one."""
        named, splits = dict(self.module.named_parameters()), shards_of_split(self.module)
        return [
            ParamShard(self._names[param], param, splits.get(path, whole_shard))
            for path, param in named.items()
        ]

    def shards(self) -> dict[str, Shard]:
        """Return this rank's shards by their names in the whole model's state dict."""
        found: dict[str, Shard] = {}
        for one in self.param_shards():
            found |= dict.fromkeys(one.names, one.shard_of(one.local))
        return found
