"""A training run that ends can go on: killed, preempted, on other ranks, out of room."""

import os
import re
import resource
import shutil
import signal
import sys
from dataclasses import replace
from pathlib import Path
from unittest import mock

import cloudpickle
import pytest
import torch

from course_lib.checkpoint import latest
from course_lib.core import CourseError
from course_lib.core.records import read_runs
from course_lib.train.checkpoint import lock_folder
from course_lib.train.progress import Progress
from course_lib.train.trainer import Trainer, train
from tests.train.training_runs import (
    EXACT,
    SPEC,
    TOLERANCE,
    losses,
    own_state,
    refused,
    same,
    trained,
)

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SAVED = [
    ("single", 1, {}),
    ("ddp", 2, {"async_save": True}),
    ("torch-ddp", 2, {"checkpoint_format": "dcp"}),
]


@pytest.mark.parametrize(("strategy", "p", "how"), SAVED)
def test_a_resumed_run_is_bit_equal_to_one_that_never_stopped(
    alone, pools, tmp_path, strategy, p, how
):
    config = replace(
        EXACT, strategy=strategy, optimizer="adamw", dtype="float32", dropout=0.1, lr=None, steps=6
    )
    config = replace(config, micro_batch=3, out=str(tmp_path / "whole"), save_every=2, **how)
    part = replace(config, out=str(tmp_path / "parts"))
    runs = [config, replace(part, steps=4), replace(part, resume=True)]
    whole, first, second = (
        [alone(trained, run)] if p == 1 else pools(p).run(trained, run) for run in runs
    )
    for one, before, after in zip(whole, first, second, strict=True):
        assert losses(one[0]) == losses(before[0]) + losses(after[0])
        same(dict(one[1]), dict(after[1]))
        same(one[2], after[2])
        assert one[3] == after[3] == Progress(step=6, tokens=6 * 12 * 8)
    names = [f"rank{r}{more}.jsonl" for r in range(p) for more in ("-from4", "")]
    assert sorted(path.name for path in Path(part.out).glob("*.jsonl")) == names
    steps = [step["step"] for record in read_runs(part.out)[:2] for step in record.steps]
    assert sorted(steps) == [0, 1, 2, 3, 4, 5]
    kept = sorted(int(path.name.rpartition("-")[2]) for path in part.checkpoints.glob("*-*"))
    assert kept == [4, 6]


def test_what_is_done_again_is_not_recorded_twice(pools, tmp_path):
    config = replace(EXACT, strategy="ddp", steps=3, out=str(tmp_path), save_every=2)
    pools(2).run(train, config)
    shutil.copytree(config.checkpoints, tmp_path / "before")
    pools(2).run(train, replace(config, steps=5, resume=True))
    shutil.rmtree(config.checkpoints)  # as if it had been killed before step 4
    (tmp_path / "before").rename(config.checkpoints)
    pools(2).run(train, replace(config, steps=6, resume=True))
    pools(2).run(train, replace(config, steps=7, resume=True))
    done = [step["step"] for record in read_runs(tmp_path)[:3] for step in record.steps]
    assert sorted(done) == list(range(7))


def test_a_run_can_go_on_with_other_ranks_and_another_strategy(alone, pools, by_hand, tmp_path):
    config = replace(EXACT, strategy="ddp", steps=6, out=str(tmp_path), save_every=3)
    expected, whole = by_hand(config)
    pools(3).run(train, replace(config, steps=3))
    other = replace(config, strategy="torch-ddp", resume=True, micro_batch=2)
    record, state, _, progress = pools(2).run(trained, other)[0]
    torch.testing.assert_close(losses(record), expected[3:], **TOLERANCE)
    same(dict(state), whole["model"], **TOLERANCE)
    assert progress.tokens == 6 * 12 * 8
    record = alone(train, replace(other, strategy="single"))
    assert record.steps == []  # there is nothing left to do


OTHER_RUNS = [
    ({"optimizer": "adamw"}, "need the optimizer of .*, 'sgd'; got 'adamw'"),
    ({"model": replace(SPEC, num_layers=1)}, "need the model's num_layers of .*, 2; got 1"),
    ({"seed": 1}, "need the seed of .*, 0; got 1"),
    ({"resume": False}, "need a folder without a checkpoint"),
    ({"out": "nowhere"}, "need a whole checkpoint; there is none in nowhere/checkpoints"),
]


def test_a_checkpoint_of_another_run_is_refused(pools, checkpoint):
    config = replace(checkpoint, resume=True, steps=4)
    for told in pools(2).run(refused, [replace(config, **changes) for changes, _ in OTHER_RUNS]):
        for (_, says), sentence in zip(OTHER_RUNS, told, strict=True):
            assert re.search(says, sentence)


@pytest.fixture(scope="module")
def checkpoint(pools, tmp_path_factory):
    """A run of two steps that left its checkpoint."""
    folder = tmp_path_factory.mktemp("run")
    config = replace(EXACT, strategy="ddp", steps=2, out=str(folder), save_every=2)
    pools(2).run(train, config)
    return config


def test_a_damaged_checkpoint_is_one_sentence(pools, checkpoint, tmp_path):
    configs = []
    for number, damage in enumerate((lambda b: b"", lambda b: b[: len(b) // 2], flipped)):
        configs.append(replace(checkpoint, out=str(tmp_path / f"{number}"), resume=True))
        shutil.copytree(checkpoint.checkpoints, configs[-1].checkpoints)
        data = next(configs[-1].checkpoints.glob("*/data-*"))
        data.write_bytes(damage(data.read_bytes()))
    for told in pools(2).run(refused, configs):
        for sentence in told:
            assert "need a whole checkpoint" in sentence
            assert len(sentence.splitlines()) == 1


def flipped(content):
    return content[:-1] + bytes([content[-1] ^ 1])


def test_a_second_job_in_a_folder_is_refused_while_the_first_one_runs(pools, tmp_path):
    config = replace(EXACT, strategy="ddp", steps=1, out=str(tmp_path))
    with lock_folder(tmp_path):
        told = pools(2).run(refused, [config])
    assert told == 2 * [[told[0][0]]]
    assert re.search("--out: need a folder to which no other run writes; one does to ", told[0][0])
    assert pools(2).run(refused, [config]) == 2 * [["it was trained"]]


def interrupted(rank, config, at_step, interrupt):
    """Train, and let something happen on rank 1 in a step; the error if any, and what was done."""
    before = Trainer.step

    def step(self):
        if rank == 1 and self.progress.step == at_step:
            interrupt()
        before(self)

    trainer, limits = Trainer(rank, config), resource.getrlimit(resource.RLIMIT_FSIZE)
    with mock.patch.object(Trainer, "step", step):
        try:
            trainer.run()
            told = None
        except CourseError as error:
            told = str(error)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    return told, trainer.progress.step, trainer.is_done, own_state(trainer.model)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_to_one_rank_saves_on_all_and_ends_the_run_early(pools, tmp_path, number):
    config = replace(EXACT, strategy="ddp", steps=9, dropout=0.1, every=1)
    config = replace(config, out=str(tmp_path), save_every=100)
    handler = pools(2).run(lambda rank: str(signal.getsignal(number)))
    ends = pools(2).run(interrupted, config, 2, lambda: os.kill(os.getpid(), number))
    stopped = {step for _, step, *_ in ends}
    assert stopped <= {3, 4}  # the step of the signal, or the one after it
    assert len(stopped) == 1
    assert not any(is_done for *_, is_done, _ in ends)
    assert latest(config.checkpoints).step == stopped.pop()
    assert pools(2).run(lambda rank: str(signal.getsignal(number))) == handler
    again = pools(2).run(trained, replace(config, resume=True))[0]
    never = pools(2).run(trained, replace(config, out=None, save_every=0))[0]
    same(dict(again[1]), dict(never[1]))


def test_a_full_disk_is_one_sentence_and_the_checkpoint_before_stays(pools, tmp_path):
    config = replace(EXACT, strategy="fsdp", steps=4, out=str(tmp_path), save_every=2)
    config = replace(config, model=replace(SPEC, hidden=64))
    ends = pools(2).run(interrupted, config, 3, only_small_files)
    for told, *_ in ends:
        assert re.search("^save: need room and permission .* got: File too large", told)
        assert len(told.splitlines()) == 1
    assert latest(config.checkpoints).step == 2
    never = pools(2).run(trained, replace(config, out=None, save_every=0))
    resumed = pools(2).run(trained, replace(config, resume=True))
    for one, other in zip(resumed, never, strict=True):
        same(dict(one[1]), dict(other[1]))


def only_small_files():
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
