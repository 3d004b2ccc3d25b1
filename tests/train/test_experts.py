"""Runs of models with experts: their load in the record, the rules of balance, what is refused."""

import sys
from dataclasses import replace

import cloudpickle
import pytest
import torch

from course_lib.core import CourseError, ModelSpec
from course_lib.core.presets import MODELS
from course_lib.core.specs import Experts
from course_lib.models.moe import move_bias
from course_lib.train.config import TrainConfig
from course_lib.train.trainer import Trainer
from tests.train.training_runs import TOLERANCE, losses, same, whole_state

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIGMOID = Experts(count=4, active=2, ffn_hidden=6, dense_layers=(1,), router="sigmoid")
SPEC = ModelSpec(
    **{"hidden": 8, "num_layers": 4, "num_heads": 2, "ffn_hidden": 16, "vocab": 21, "max_seq": 8},
    **{"tied": False, "positions": "rope", "norm": "rms", "gated": True, "bias": False},
    experts=SIGMOID,
)
RUN = TrainConfig(
    **{"model": SPEC, "steps": 4, "global_batch": 8, "micro_batch": 2, "seq": 8, "lr": 0.5},
    **{"optimizer": "sgd", "dtype": "float64", "every": 0, "aux_weight": 0.1, "bias_step": 0.01},
)


def trained(rank, config):
    trainer = Trainer(rank, config)
    record = trainer.run()
    biases = {
        str(number): layer.router.bias.tolist()
        for number, layer in trainer.routed.layers.items()
        if layer.router.bias is not None
    }
    return record, whole_state(trainer), biases


def loads_of(by_rank):
    """The tokens per expert of each step; of all pipeline stages together."""
    steps = zip(*(record.steps for record, *_ in by_rank), strict=True)
    return [
        {n: load for step in ranks for n, load in step["tokens_per_expert"].items()}
        for ranks in steps
    ]


MESHES = [
    (4, {"strategy": "ddp", "ep": 2}),
    (2, {"strategy": "zero2", "ep": 2}),
    (4, {"strategy": "fsdp", "pp": 2, "ep": 2}),
    (2, {"strategy": "single", "tp": 2}),
    (4, {"strategy": "zero1", "tp": 2, "ep": 2, "sequence_parallel": True}),
]


@pytest.fixture
def wanted(alone):
    return [alone(trained, RUN)]


@pytest.mark.parametrize(("ranks", "changes"), MESHES)
def test_load_and_balance_are_those_of_one_process(pools, wanted, ranks, changes):
    ((record, state, biases),) = wanted
    by_rank = pools(ranks).run(trained, replace(RUN, **changes))
    for found, *_ in by_rank:
        torch.testing.assert_close(losses(found), losses(record), **TOLERANCE)
    same(by_rank[0][1], state, **TOLERANCE)
    assert loads_of(by_rank) == loads_of(wanted)
    for *_, own in by_rank:
        same(own, {n: biases[n] for n in own}, **TOLERANCE)


def test_the_record_has_every_copy_of_a_token_and_the_biases_follow_from_it(wanted):
    ((_, _, biases),) = wanted
    assert set(biases) == {"0", "2", "3"}
    for number, bias in biases.items():
        expected = torch.zeros(4)
        for step in loads_of(wanted):
            assert sum(step[number]) == 8 * 8 * 2
            expected = move_bias(expected, torch.tensor(step[number]), 0.01)
        torch.testing.assert_close(torch.tensor(bias), expected)


def test_the_two_rules_change_the_run(alone, wanted):
    ((record, *_),) = wanted
    for changes in ({"aux_weight": 0.0}, {"bias_step": 0.0}, {"micro_batch": 8}):
        other, *_ = alone(trained, replace(RUN, **changes))
        assert max(abs(a - b) for a, b in zip(losses(other), losses(record), strict=True)) > 1e-9


def went_on(rank, config, other):
    """A run that was stopped after two steps, and went on as `other`."""
    Trainer(rank, replace(config, steps=2)).run()
    return trained(rank, replace(other, resume=True))


def test_a_run_goes_on_with_its_biases_on_another_mesh(pools, wanted, tmp_path):
    ((record, state, _),) = wanted
    before = replace(RUN, strategy="ddp", ep=4, out=str(tmp_path), save_every=2)
    found = pools(4).run(went_on, before, replace(before, strategy="fsdp", ep=2))
    for resumed, *_ in found:
        torch.testing.assert_close(losses(resumed), losses(record)[2:], **TOLERANCE)
    same(found[0][1], state, **TOLERANCE)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": MODELS["tiny"], "ep": 2}, "need ep=1 for a dense model"),
        ({"model": MODELS["tiny"]}, "--aux-weight, --bias-step: need 0 for a dense model"),
        ({"model": MODELS["moe-tiny"]}, "--bias-step: need a router of sigmoids"),
        ({"ep": 3, "strategy": "ddp"}, "need the 4 experts divisible by ep"),
        ({"ep": 2, "strategy": "torch-ddp"}, "--strategy torch-ddp: need ep=1"),
        ({"strategy": "megatron"}, "--strategy megatron: need a dense model"),
        ({"aux_weight": -1.0}, "--aux-weight: need 0 or more"),
    ],
)
def test_what_experts_cannot_be_together_with_is_refused(changes, says):
    with pytest.raises(CourseError, match=says):
        replace(RUN, **changes)


def test_ep_reuses_the_ranks_of_dp_and_cp():
    with pytest.raises(CourseError, match=r"need ep as a divisor of dp \* cp.* got 4 and 2 \* 1"):
        replace(RUN, ep=4, strategy="ddp").check_ranks(2)
    replace(RUN, ep=4, strategy="ddp", cp=2).check_ranks(4)
