"""Frameworks in the trainer: learning rates by the step, and checkpoints in their own format."""

import sys
from dataclasses import replace
from importlib.util import find_spec

import cloudpickle
import pytest
import torch

from course_lib.core import CourseError, ModelSpec
from course_lib.frameworks import accelerate_ddp
from course_lib.train.config import TrainConfig
from course_lib.train.strategies import FRAMEWORKS
from course_lib.train.trainer import Trainer
from tests.train.training_runs import losses, refused, same

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SPEC = ModelSpec(hidden=8, num_layers=2, num_heads=2, ffn_hidden=16, vocab=20, max_seq=8)
CASES = {
    "deepspeed": [
        "deepspeed-0",
        "deepspeed-1",
        "deepspeed-2",
        "deepspeed-3",
        "deepspeed-2-offload",
    ],
    "accelerate": ["accelerate-ddp", "accelerate-fsdp", "accelerate-deepspeed"],
    "lightning_fabric": ["lightning-ddp", "lightning-fsdp"],
    "megatron": ["megatron"],
}
RUN = TrainConfig(model=SPEC, steps=4, global_batch=8, seq=8, every=0, lr=0.01)


def configs_of(package, **changes):
    pytest.importorskip(package)
    names = [name for name in CASES[package] if "deepspeed" not in name or find_spec("deepspeed")]
    return [replace(RUN, strategy=name, **changes) for name in names]


def weights_of(rank, config):
    trainer = Trainer(rank, config)
    record = trainer.run()
    return losses(record), trainer.adapter.engine.weights()


def went_on(rank, configs):
    """Each run once without a stop, and once from its checkpoint after two steps."""
    found = []
    for config in configs:
        whole = weights_of(rank, replace(config, out=None, save_every=0))
        weights_of(rank, replace(config, steps=2, lr_decay=None))
        found.append((whole, weights_of(rank, replace(config, resume=True))))
    return found


@pytest.mark.parametrize("package", CASES)
def test_a_resumed_run_never_stopped(pools, tmp_path, package):
    configs = [
        replace(one, out=str(tmp_path / one.strategy), save_every=1, warmup=3)
        for one in configs_of(package)
    ]
    if package == "megatron":
        configs += [replace(configs[0], tp=2, out=str(tmp_path / "tp"))]
        configs += [replace(configs[0], pp=2, out=str(tmp_path / "pp"))]
    for whole, resumed in pools(2).run(went_on, configs)[0]:
        assert whole[0][2:] == resumed[0]
        same(whole[1], resumed[1])


# -- learning rates ------------------------------------------------------------------------------


def losses_of(rank, configs):
    return [losses(Trainer(rank, config).run()) for config in configs]


@pytest.mark.parametrize("package", CASES)
def test_the_learning_rate_of_a_framework_grows_as_pytorch_says(pools, by_hand, package, capsys):
    configs = configs_of(package, warmup=3, optimizer="sgd", lr=1.0, every=4)
    expected, _ = by_hand(configs[0])
    steady, _ = by_hand(replace(configs[0], warmup=0))
    assert abs(expected[-1] - steady[-1]) > 1e-3
    for found in pools(2).run(losses_of, configs)[0]:
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    told = capsys.readouterr().out
    notes = [line for line in told.splitlines() if "learning rate is set by the step" in line]
    assert len(notes) == (0 if package == "lightning_fabric" else len(configs))
    if package == "accelerate":
        assert "accelerate-ddp: accelerator.prepare(scheduler) steps it 2 times a step" in told


def told_by(rank, configs):
    """The losses and the validation losses of each run."""
    records = [Trainer(rank, config).run() for config in configs]
    return [(losses(record), record.run["validation"]) for record in records]


@pytest.mark.parametrize("package", ["deepspeed", "accelerate", "lightning_fabric"])
def test_a_framework_clips_and_validates_as_one_process_does(pools, by_hand, package):
    how = {"optimizer": "sgd", "lr": 1.0, "clip_norm": 0.05, "eval_every": 2}
    configs = configs_of(package, **how)
    expected, _ = by_hand(configs[0])
    free, _ = by_hand(replace(configs[0], clip_norm=None))
    assert abs(expected[-1] - free[-1]) > 1e-3
    configs.append(replace(configs[0], strategy="ddp"))
    *found, (_, validation) = pools(2).run(told_by, configs)[0]
    for theirs in found:
        torch.testing.assert_close(theirs, (expected, validation), rtol=1e-5, atol=1e-6)


def counts(rank):
    """How far Accelerate moves a scheduler in one step."""
    from accelerate.scheduler import AcceleratedScheduler

    engine = accelerate_ddp(torch.nn.Linear(2, 2), torch.optim.SGD)
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer.optimizer, 1)
    engine.step(engine.model(torch.ones(1, 2)).sum())
    AcceleratedScheduler(scheduler, engine.optimizer).step()
    return scheduler.last_epoch


def test_accelerate_steps_a_scheduler_once_for_each_rank(pools):
    pytest.importorskip("accelerate")
    assert pools(2).run(counts) == [2, 2]


# -- what is refused -----------------------------------------------------------------------------


def test_a_checkpoint_of_a_framework_is_for_itself_and_as_many_ranks(pools, tmp_path):
    pytest.importorskip("accelerate")
    config = replace(RUN, strategy="accelerate-ddp", steps=1, out=str(tmp_path), save_every=1)
    pools(2).run(refused, [config])
    again = replace(config, resume=True, steps=2)
    for (ranks,) in pools(3).run(refused, [again]):
        assert "need the ranks of" in ranks
        assert ", 2; got 3." in ranks
    note = next(tmp_path.glob("checkpoints/framework-*/course.json"))
    next(note.parent.glob("model*")).write_bytes(b"")
    configs = [replace(again, strategy="lightning-ddp"), replace(again, resume=False), again]
    for other, fresh, damaged in pools(2).run(refused, configs):
        assert "need the strategy of" in other
        assert "'accelerate-ddp'; got 'lightning-ddp'" in other
        assert "need a folder without a checkpoint" in fresh
        assert "load: need files that the framework can read; got" in damaged


def test_every_framework_is_tested_here():
    tested = {name for names in CASES.values() for name in names}
    assert {name.removesuffix("-offload") for name in FRAMEWORKS} <= tested


def test_another_format_is_refused():
    with pytest.raises(CourseError, match="--checkpoint-format: need a strategy of the course or"):
        replace(RUN, strategy="megatron", checkpoint_format="dcp")
