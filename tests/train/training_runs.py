"""What the tests of training share: runs that are refused, losses, and whole states that agree."""

import sys

import cloudpickle
import torch
import torch.distributed as dist

from course_lib.checkpoint import latest, read_tensor
from course_lib.checkpoint.local_state import collect
from course_lib.core import CourseError, ModelSpec
from course_lib.train.config import TrainConfig
from course_lib.train.trainer import Trainer, train

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SPEC = ModelSpec(hidden=16, num_layers=2, num_heads=2, ffn_hidden=32, vocab=40, max_seq=8)
EXACT = TrainConfig(
    model=SPEC, steps=3, global_batch=12, seq=8, optimizer="sgd", dtype="float64", every=0
)
# the sums over the batch run in another order on other ranks; float64 rounds at 1e-16
TOLERANCE = {"rtol": 1e-9, "atol": 1e-12}


def trained(rank, config):
    """What a rank has after training: its record, weights and optimizer state."""
    trainer = Trainer(rank, config)
    record = trainer.run()
    moments = trainer.adapter.optimizer.state_dict()["state"]
    return record, own_state(trainer.model), moments, trainer.progress


def own_state(model):
    """What this rank has of a model's state: under FSDP its shards."""
    return {name: x.detach() for name, x in model.state_dict(keep_vars=True).items()}


def same(state, other, **tolerance):
    """Are two dictionaries of tensors, however deep, equal (to the last bit by default)?"""
    torch.testing.assert_close(state, other, **({"rtol": 0, "atol": 0} | tolerance))


def refused(rank, configs):
    """What each run is told that cannot be; ranks that raise would have to start again."""
    told = []
    for config in configs:
        try:
            train(rank, config)
        except CourseError as error:
            told.append(str(error))
        else:
            told.append("it was trained")
    return told


def losses(record):
    return [step["loss"] for step in record.steps]


def whole_state(trainer):
    """Every tensor of a trainer's state by name, put together on rank 0 from all ranks' shards."""
    state = trainer.adapter.state()
    state.pop("engine", None)  # a framework keeps its state to itself
    shards = collect(state).shards
    parts = {name: (shard.shape, shard.pieces) for name, shard in shards.items()}
    by_rank = [None] * dist.get_world_size()
    dist.all_gather_object(by_rank, parts)
    if dist.get_rank():
        return None
    whole = {}
    for name in {name for one in by_rank for name in one}:
        for shape, pieces in (one[name] for one in by_rank if name in one):
            for box, tensor in pieces:
                empty = torch.full(shape, torch.nan, dtype=tensor.dtype)
                whole.setdefault(name, empty)[box.slices()] = tensor
    return whole


def saved_state(config):
    """Every tensor of the latest checkpoint by name."""
    found = latest(config.checkpoints)
    return {name: read_tensor(found, name) for name in found.manifest.tensors}


def by_name(state, model):
    """State dicts of a plain model and its optimizer, as the tensors of a checkpoint."""
    found = {f"model.{name}": tensor for name, tensor in state["model"].items()}
    names = [name for name, _ in model.named_parameters()]
    for number, kinds in state["optimizer"].get("state", state["optimizer"]).items():
        found |= {f"optimizer.{kind}.{names[number]}": x for kind, x in kinds.items()}
    return found
