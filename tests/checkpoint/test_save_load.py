"""Saved and loaded: bit for bit what never stopped, in one process and in a world."""

import os
import random
import re
import sys
from itertools import count

import cloudpickle
import numpy
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from course_lib.checkpoint import (
    Broken,
    all_checkpoints,
    latest,
    load,
    ownership,
    read_tensor,
    rng_state,
    save,
    saving,
    set_rng_state,
)
from course_lib.core import CourseError
from course_lib.core.shards import Box, Shard
from tests.checkpoint import engines
from tests.checkpoint.engines import Engine

for module in (engines, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)

CASES = [
    *[("ddp", "adamw"), ("ddp", "sgd"), ("fsdp", "adamw"), ("zero1", "sgd"), ("zero3", "adamw")],
    *[("sharded", "adamw"), ("torch-fsdp", "sgd")],
]


class Tied(nn.Module):
    """Tied, frozen, without dims, in 16 bits, and buffers: what a model may have."""

    def __init__(self):
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 5), nn.Linear(5, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.inner = nn.Linear(5, 5)
        self.inner.bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.low = nn.Parameter(torch.rand(3, dtype=torch.bfloat16))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("mask", torch.tensor([True, False, True]))

    def forward(self, tokens):
        return self.head(self.inner(self.embedding(tokens)) * self.scale) * self.low.sum()


def tied(steps=0, seed=0):
    torch.manual_seed(seed)
    model = Tied()
    optimizer = torch.optim.AdamW([x for x in model.parameters() if x.requires_grad], lr=0.1)
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.arange(7)).square().sum().backward()
        optimizer.step()
    return {"model": model, "optimizer": optimizer}


def all_of(state):
    return {name: one.state_dict() for name, one in state.items()}


# --- one process


def test_a_model_and_its_optimizer_come_back_in_place(tmp_path):
    state, values = tied(steps=3), {"step": 3, "sampler": {"a.b": [1, 2.5, None]}}
    state["optimizer"].param_groups[0]["lr"] = 0.025
    saved = save({**state, **values}, tmp_path, step=3)
    for steps in (0, 5):  # with an optimizer that is new, and with one that has stepped
        other = tied(steps, seed=9)
        weight = other["model"].head.weight
        found = load({**other, "sampler": None}, tmp_path)
        torch.testing.assert_close(all_of(other), all_of(state), rtol=0, atol=0)
        assert other["model"].head.weight is other["model"].embedding.weight is weight
        assert found.values["sampler"] == values["sampler"]
        assert (found.step, found.values["step"], found.path) == (3, 3, saved.path)


def test_a_model_without_its_optimizer_can_be_loaded_and_tensors_by_themselves(tmp_path):
    state = {**tied(steps=1), "deep": {"mean": torch.arange(4.0)}}
    save(state, tmp_path, step=1)
    other, mean = tied(seed=9), torch.zeros(4)
    load({"model": other["model"], "deep": {"mean": mean}}, tmp_path)
    assert torch.equal(other["model"].inner.weight, state["model"].inner.weight)
    assert mean.tolist() == [0.0, 1.0, 2.0, 3.0]
    assert not other["optimizer"].state


def test_the_files_are_safetensors_with_every_tensor_once(tmp_path):
    found = save(tied(steps=1), tmp_path, step=1)
    (name,) = found.manifest.files
    tensors = load_file(f"{found.path}/{name}")
    whole = {name: read_tensor(found, name) for name in found.manifest.tensors}
    assert len(whole) == len(tensors) + 1, "the tied weight has two names, and is written once"
    for key, saved in found.manifest.tensors.items():
        assert torch.equal(tensors[saved.pieces[0].key], whole[key])
    part = read_tensor(found, "model.inner.weight", Box((1, 2), (3, 2)))
    assert torch.equal(part, whole["model.inner.weight"][1:4, 2:4])
    done = []
    found.verify(lambda *bytes_: done.append(bytes_))
    assert done == [(found.num_bytes, found.num_bytes)]
    with pytest.raises(CourseError, match="need the name of a saved tensor"):
        read_tensor(found, "model.missing")


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (
            lambda model: model.register_buffer("more", torch.ones(2)),
            r"with model\.more of float32",
        ),
        (lambda model: delattr(model, "scale"), r"has model\.scale, too"),
        (lambda model: setattr(model, "inner", nn.Linear(5, 4)), r"inner\.weight .*\[4, 5\]"),
        (lambda model: model.inner.double(), r"inner\.weight of float64 .* has float32"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused_and_nothing_is_changed(tmp_path, change, says):
    save({"model": Tied()}, tmp_path, step=1)
    model = Tied()
    change(model)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    with pytest.raises(CourseError, match=says):
        load({"model": model}, tmp_path)
    assert all(torch.equal(x, before[name]) for name, x in model.state_dict().items())


@pytest.mark.parametrize(
    ("state", "says"),
    [
        ({"x": object()}, "got a object as x"),
        ({"a": {"b": torch.ones(2)}, "a.b": torch.zeros(2)}, "got two for 'a.b'"),
        ({"a": nn.Linear(2, 2), "a.weight": torch.zeros(2)}, "got two for 'a.weight'"),
        ({"v": {1: 2, "1": 3}}, "got two for 'v.1'"),
        ({"optimizer": tied()["optimizer"]}, "got 0 modules"),
        ({"model": nn.Linear(2, 2), "optimizer": tied()["optimizer"]}, "of the module beside it"),
        ({"x": torch.zeros(2, dtype=torch.complex64)}, "complex64 for x"),
        ({"x": Shard((3,), [(Box((0,), (2,)), torch.zeros(2))])}, "cover x, of .3., exactly once"),
    ],
)
def test_what_cannot_be_saved_is_said_before_anything_is_written(tmp_path, state, says):
    with pytest.raises(CourseError, match=says):
        save(state, tmp_path / "new", step=1)
    assert not (tmp_path / "new").exists()


def test_an_optimizer_that_does_not_fit_keeps_its_state(tmp_path):
    saved = tied(steps=1)
    save({"model": saved["model"]}, tmp_path / "alone", step=1)
    save(saved, tmp_path / "both", step=1)
    mine = tied(steps=2)
    kept = {key: dict(x) for key, x in mine["optimizer"].state.items()}
    says = r"need AdamW with 1 parameter groups for optimizer; .* has none with 0"
    with pytest.raises(CourseError, match=says):
        load(mine, tmp_path / "alone")
    model = mine["model"]
    model.register_parameter("more", nn.Parameter(torch.zeros(1)))
    with pytest.raises(CourseError, match=r"with model\.more of float32"):
        load(mine, tmp_path / "both")
    assert {key: dict(x) for key, x in mine["optimizer"].state.items()} == kept
    del model.more
    mine["optimizer"] = torch.optim.AdamW([model.scale])
    with pytest.raises(CourseError, match=r"has optimizer\.exp_avg\.\S*, too"):
        load(mine, tmp_path / "both")
    assert not mine["optimizer"].state


def test_old_checkpoints_go_when_the_new_one_is_there(tmp_path):
    numbers = torch.zeros(3)
    for step in range(1, 6):
        save({"x": numbers.fill_(step)}, tmp_path, step=step, keep=None if step < 4 else 2)
        if step == 3:
            assert [one.step for one in all_checkpoints(tmp_path)] == [3, 2, 1]
    assert [one.step for one in all_checkpoints(tmp_path)] == [5, 4]
    assert sorted(os.listdir(tmp_path)) == [".lock", "step-00000004", "step-00000005"]


def test_a_broken_checkpoint_does_not_count_among_those_that_are_kept(tmp_path):
    for step in (1, 2, 3):
        save({"x": torch.zeros(3)}, tmp_path, step=step)
    next((tmp_path / "step-00000003").glob("data*")).unlink()
    save({"x": torch.zeros(3)}, tmp_path, step=4, keep=2)
    assert [(one.step, isinstance(one, Broken)) for one in all_checkpoints(tmp_path)] == [
        (4, False),
        (3, True),
        (2, False),
    ]


def test_who_goes_back_to_an_older_step_leaves_the_later_ones(tmp_path):
    numbers = torch.zeros(3)
    for step in (1, 2, 3):
        save({"x": numbers.fill_(step)}, tmp_path, step=step)
    load({"x": numbers}, tmp_path, step=1)
    assert numbers.tolist() == [1.0] * 3
    save({"x": numbers.fill_(7)}, tmp_path, step=2)
    load({"x": numbers}, tmp_path)
    assert [one.step for one in all_checkpoints(tmp_path)] == [2, 1]
    assert numbers.tolist() == [7.0] * 3
    assert len(os.listdir(tmp_path / "step-00000002")) == 2, "the file that was replaced is gone"


@pytest.mark.parametrize("options", [{"step": -1}, {"step": 1, "keep": 0}])
def test_a_step_or_a_number_to_keep_that_cannot_be_is_refused(tmp_path, options):
    with pytest.raises(CourseError, match="need step >= 0 and keep >= 1"):
        save({"x": torch.zeros(1)}, tmp_path, **options)


def test_an_empty_folder_has_no_checkpoint(tmp_path):
    assert latest(tmp_path) is None
    assert all_checkpoints(tmp_path / "missing") == []
    with pytest.raises(CourseError, match=r"need a whole checkpoint in .*; got none"):
        load({"x": torch.zeros(1)}, tmp_path)
    save({"x": torch.zeros(1)}, tmp_path, step=1)
    with pytest.raises(CourseError, match=r"need a whole checkpoint of step 2 in .*; got none"):
        load({"x": torch.zeros(1)}, tmp_path, step=2)


def test_the_random_numbers_go_on(tmp_path):
    def draw():
        return random.random(), numpy.random.rand(), torch.rand(1).item(), torch.randn(1).item()

    draw()
    save({"rng": {0: rng_state()}}, tmp_path, step=1)
    wanted = draw(), draw()
    assert draw() not in wanted
    set_rng_state(latest(tmp_path).values["rng"]["0"])
    assert (draw(), draw()) == wanted
    with pytest.raises(CourseError, match="need what rng_state"):
        set_rng_state({"python": [3, [1, 2], None], "torch": ""})


# --- two jobs


@pytest.fixture
def another_job(monkeypatch):
    """From now on, this process has not seen what it has written: it is another one."""
    return lambda: monkeypatch.setattr(ownership, "_SEEN", {})


def test_the_second_of_two_jobs_is_stopped_by_a_sentence(tmp_path, another_job):
    numbers = torch.zeros(3)
    save({"x": numbers}, tmp_path, step=1)
    another_job()
    with pytest.raises(CourseError, match=r"only this job writes.*Try load\(\.\.\.\) first"):
        save({"x": numbers}, tmp_path, step=9)
    assert [one.step for one in all_checkpoints(tmp_path)] == [1]
    load({"x": numbers}, tmp_path)
    save({"x": numbers}, tmp_path, step=2)


def test_a_job_that_another_has_overtaken_while_it_wrote_is_stopped_too(
    tmp_path, another_job, monkeypatch
):
    """Both began at the same checkpoint, and both write: the one that publishes first goes on."""
    numbers, write, turn = torch.zeros(3), saving.write_tensors, count()

    def overtaken(*args):
        if next(turn) == 0:
            seen = ownership._SEEN
            another_job()
            load({"x": torch.zeros(3)}, tmp_path)
            save({"x": numbers + 1}, tmp_path, step=2)
            monkeypatch.setattr(ownership, "_SEEN", seen)
        return write(*args)

    save({"x": numbers}, tmp_path, step=1)
    monkeypatch.setattr(saving, "write_tensors", overtaken)
    with pytest.raises(CourseError, match=r"only this job writes.*step-00000002 is of another"):
        save({"x": numbers}, tmp_path, step=3)
    assert [one.step for one in all_checkpoints(tmp_path)] == [2, 1]
    load({"x": numbers}, tmp_path)
    assert numbers.tolist() == [1.0] * 3


def test_a_folder_is_of_one_run(tmp_path):
    save({"x": torch.zeros(3)}, tmp_path, step=1, run={"model": "tiny"})
    with pytest.raises(CourseError, match=r"need a folder of this run.*large.*tiny"):
        save({"x": torch.zeros(3)}, tmp_path, step=2, run={"model": "large"})
    assert latest(tmp_path).run == {"model": "tiny"}


# --- a world


def train(rank, folder, start, stop):
    """Every case: train from step `start`, with dropout, save at `stop`; the losses."""
    found = {}
    for number, case in enumerate(CASES):
        here = f"{folder}/{number}"
        engine = Engine(*case, seed=start, dropout=0.1)
        torch.manual_seed(10**rank)  # every rank has its own masks
        if start:
            values = load(engine.state, here).values
            set_rng_state(values["rng"][str(rank)])
        losses = [engine.step(step, seed=rank) for step in range(start, stop)]
        state = {**engine.state, "rng": {rank: rng_state()}}
        save(state, here, step=stop)
        found[case] = losses, engine.step(stop, seed=rank)
    return found


def test_stopped_and_resumed_is_never_stopped_bit_for_bit(pools, tmp_path):
    ranks = pools(2)
    wanted = ranks.run(train, tmp_path / "whole", 0, 4)
    ranks.run(train, tmp_path / "parts", 0, 2)
    found = ranks.run(train, tmp_path / "parts", 2, 4)
    for rank in range(2):
        for case in CASES:
            assert found[rank][case][0] == wanted[rank][case][0][2:], (rank, case)
            assert found[rank][case][1] == wanted[rank][case][1]
    for number in range(len(CASES)):
        whole, parts = (latest(tmp_path / name / str(number)) for name in ("whole", "parts"))
        assert whole.values == parts.values, "learning rates and every rank's random state"
        assert whole.manifest.tensors.keys() == parts.manifest.tensors.keys()
        for name in whole.manifest.tensors:
            assert torch.equal(read_tensor(whole, name), read_tensor(parts, name)), name


def unlike(rank, folder):
    """Save what the ranks do not have alike; the errors."""
    numbers, said = torch.zeros(3 + rank), []
    for state in ({"x": numbers}, {"x": object() if rank else 1}):
        with pytest.raises(CourseError) as error:
            save(state, folder, step=1)
        said.append(str(error.value))
    save({"step": 10**rank, "of": {rank: rank}}, folder, step=1)
    return said


def test_an_error_of_one_rank_is_said_on_all_and_values_are_merged(pools, tmp_path):
    said = pools(2).run(unlike, tmp_path)
    assert said[0] == said[1]
    assert "one dtype and shape of x on all ranks" in said[0][0]
    assert "got a object as x" in said[0][1]
    assert latest(tmp_path).values == {"step": 1, "of": {"0": 0, "1": 1}}


def test_the_checkpoint_of_another_optimizer_is_refused(tmp_path):
    saved = tied(steps=1)
    save(saved, tmp_path, step=1)
    other = {
        "model": saved["model"],
        "optimizer": torch.optim.SGD(saved["model"].parameters(), lr=0.5),
    }
    with pytest.raises(CourseError, match=r"need SGD with 1 .*; the checkpoint has AdamW with 1"):
        load(other, tmp_path)
    assert other["optimizer"].param_groups[0]["lr"] == 0.5
    manifest = tmp_path / "step-00000001" / "manifest.json"
    manifest.write_text(re.sub(r'"lr": [^,]+,', '"lr": "boom",', manifest.read_text()))
    with pytest.raises(CourseError, match="the checkpoint has AdamW with others"):
        load(saved, tmp_path)


def test_a_save_removes_only_what_saves_have_written(tmp_path):
    (tmp_path / "step-final.txt").write_text("mine")
    (tmp_path / "step-00000005").mkdir()
    (tmp_path / "step-00000005" / "notes").write_text("mine")
    (tmp_path / "step-00000006").mkdir()
    (tmp_path / "step-00000006" / "data-ab-r00000.safetensors").write_bytes(b"never published")
    for step in (1, 2):
        save({"x": torch.ones(2)}, tmp_path, step=step, keep=1)
    assert sorted(path.name for path in tmp_path.iterdir() if path.name != ".lock") == [
        *("step-00000002", "step-00000005", "step-final.txt")
    ]
    assert (tmp_path / "step-00000005" / "notes").read_text() == "mine"
