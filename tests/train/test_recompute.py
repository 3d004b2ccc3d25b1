"""Recomputation in the trainer: the same bits under every strategy, and less memory."""

import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import replace

import cloudpickle
import pytest
import torch

from course_lib.core import CourseError, ModelSpec
from course_lib.models.gpt import Attention, Block
from course_lib.train.config import TrainConfig
from course_lib.train.trainer import Trainer
from tests.train.training_runs import losses, same, whole_state

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SPEC = ModelSpec(hidden=8, num_layers=4, num_heads=2, ffn_hidden=16, vocab=21, max_seq=8)
DRAWN = TrainConfig(model=SPEC, steps=2, global_batch=8, seq=8, every=0, lr=0.01, dropout=0.1)

WAYS = [
    {"strategy": "ddp", "tp": 2, "sequence_parallel": True},
    {"strategy": "torch-ddp", "micro_batch": 1},
    {"strategy": "naive-dp", "masked": True},
    {"strategy": "zero1", "tp": 2},
    {"strategy": "zero2", "pp": 2},
    {"strategy": "zero3", "tp": 2},
    {"strategy": "fsdp", "tp": 2, "sequence_parallel": True},
    {"strategy": "fsdp", "pp": 2, "schedule": "interleaved", "clip_norm": 0.1},
    {"strategy": "fsdp", "pp": 2, "reshard": False},
    {"strategy": "single", "tp": 2, "pp": 2},
    {"strategy": "torch-fsdp"},
]


@contextmanager
def counted(calls):
    """Count the forward passes of blocks and of attention alone."""
    with pytest.MonkeyPatch.context() as patch:
        for kind, name in ((Block, "forward"), (Attention, "attend")):
            patch.setattr(kind, name, counting(getattr(kind, name), calls))
        yield


def counting(method, calls):
    def count(self, *args):
        calls[method.__name__] += 1
        return method(self, *args)

    return count


def computed(rank, configs):
    """For each run: its losses, on rank 0 the whole state, and how often it has computed what."""
    found = []
    for config in configs:
        calls = Counter()
        with counted(calls):
            trainer = Trainer(rank, config)
            record = trainer.run()
        found.append((losses(record), whole_state(trainer), calls))
    return found


@pytest.mark.parametrize("kind", ["full", "selective"])
def test_what_is_computed_twice_has_the_same_bits(pools, kind):
    ways = WAYS if kind == "full" else WAYS[::3]
    configs = [replace(DRAWN, **way, recompute=how) for way in ways for how in (None, kind)]
    for results in pools(4).run(computed, configs):
        for way, once, twice in zip(ways, results[::2], results[1::2], strict=True):
            assert once[0] == twice[0], way
            assert (once[1] is None) == (twice[1] is None)
            if once[1] is not None:
                same(once[1], twice[1])
            assert twice[2]["attend"] == 2 * once[2]["attend"] > 0, way
            assert twice[2]["forward"] == (1 + (kind == "full")) * once[2]["forward"], way


def peak_of(rank, config):
    """The most bytes that autograd has saved at a time, in tensors that are no parameters."""
    trainer, saved, peak = Trainer(rank, config), [0], [0]
    own = {param.untyped_storage().data_ptr() for param in trainer.model.parameters()}

    class Held:
        def __init__(self, tensor):
            self.tensor = tensor
            self.size = tensor.nbytes * (tensor.untyped_storage().data_ptr() not in own)
            saved[0] += self.size
            peak[0] = max(peak[0], saved[0])

        def __del__(self):
            saved[0] -= self.size

    with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
        trainer.run()
    return peak[0]


def test_a_rank_holds_less(alone):
    config = replace(DRAWN, model=replace(SPEC, num_layers=8), dropout=0.0, steps=1)
    full, selective, everything = (
        alone(peak_of, replace(config, recompute=kind)) for kind in ("full", "selective", None)
    )
    assert full < 0.4 * everything
    assert full < selective < everything


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"recompute": "some"}, "--recompute: need one of full, selective; got 'some'"),
        ({"pp": 2, "schedule": "zb-h1"}, "--recompute: need --schedule .* got zb-h1. Try --schedu"),
        ({"strategy": "megatron", "dropout": 0.0}, "--recompute: need none with megatron"),
    ],
)
def test_what_cannot_be_recomputed_is_refused(changes, says):
    with pytest.raises(CourseError, match=says):
        replace(DRAWN, **{"recompute": "full"} | changes)
