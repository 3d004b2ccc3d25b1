"""What one strategy saves at one world size, any other loads at any other: the same tensors."""

import itertools
import sys

import cloudpickle
import pytest
import torch

from course_lib.checkpoint import latest, load, save
from tests.checkpoint import engines
from tests.checkpoint.engines import Engine, tensors

for module in (engines, sys.modules[__name__]):
    cloudpickle.register_pickle_by_value(module)

# float64: another strategy sums in another order
TOLERANCE = {"rtol": 1e-10, "atol": 1e-12}
CHAIN = [
    *[(4, "ddp"), (2, "fsdp"), (3, "zero3"), (2, "tp"), (4, "zero1"), (3, "sharded")],
    *[(2, "torch-fsdp"), (4, "zero2"), (3, "tp"), (4, "fsdp"), (3, "ddp"), (2, "zero3")],
]
START, STEPS = 2, 2


def alone(optimizer, folders):
    """One process: save after START steps and after STEPS more; the losses in between."""
    engine = Engine("plain", optimizer)
    for number in range(START):
        engine.step(number)
    save(engine.state, folders[0], step=START)
    losses = [engine.step(START + number) for number in range(STEPS)]
    save(engine.state, folders[1], step=START + STEPS)
    return losses


def go_on(rank, strategy, optimizer, source, target, after):
    """Load into another model, save at once, train on, save again; the losses."""
    engine = Engine(strategy, optimizer, seed=99)
    load(engine.state, source)
    found = save(engine.state, target, step=START)
    losses = [engine.step(START + number) for number in range(STEPS)]
    save(engine.state, after, step=START + STEPS)
    return losses, sorted(found.manifest.files)


@pytest.mark.parametrize(("optimizer", "chain"), [("adamw", CHAIN), ("sgd", CHAIN[:5])])
def test_every_strategy_goes_on_from_what_another_has_saved(pools, tmp_path, optimizer, chain):
    folders = [tmp_path / name for name in ("start", "end")]
    wanted_losses = alone(optimizer, folders)
    start, end = map(tensors, folders)
    assert {name.split(".")[0] for name in start} == {"model", "optimizer"}
    source = folders[0]
    for number, (world_size, strategy) in enumerate(chain):
        target, after = tmp_path / f"{number}", tmp_path / f"after{number}"
        found = pools(world_size).run(go_on, strategy, optimizer, source, target, after)
        losses, files = found[0]
        assert len(files) == world_size, "every rank writes a part"
        same, trained = tensors(target), tensors(after)
        assert same.keys() == start.keys()
        for name, value in start.items():
            assert torch.equal(same[name], value), (strategy, name)
        torch.testing.assert_close(losses, wanted_losses, **TOLERANCE)
        for name, value in end.items():
            torch.testing.assert_close(trained[name], value, **TOLERANCE)
        source = target


def in_16_bits(rank, strategy, source, target):
    """Load bf16 parameters, if there is something to load; a step, and save."""
    engine = Engine(strategy, seed=99 if source else 0, dtype=torch.bfloat16)
    if source:
        load(engine.state, source)
        save(engine.state, f"{target}-same", step=1)
    engine.step(1)
    save(engine.state, target, step=2)


def test_fp32_masters_are_saved_and_a_plain_optimizer_does_without(pools, tmp_path):
    way = [("zero1", 3), ("zero3", 2), ("sharded", 3), ("ddp", 2), ("zero1", 2)]
    folders = [tmp_path / f"{n}{strategy}" for n, (strategy, _) in enumerate(way)]
    for (strategy, size), source, target in zip(way, [None, *folders[:-1]], folders, strict=True):
        pools(size).run(in_16_bits, strategy, source, target)
    has_masters = [any("master" in name for name in tensors(one)) for one in folders]
    assert has_masters == [True, True, True, False, True]
    for before, after in itertools.pairwise(folders):
        wanted, found = tensors(before), tensors(f"{after}-same")
        assert {name for name in found if name not in wanted} <= {
            name for name in found if "master" in name
        }
        for name, value in found.items():
            came_from = name if name in wanted else name.replace("optimizer.fp32_master", "model")
            assert torch.equal(value, wanted[came_from].to(value.dtype)), name


def share_of_bytes(rank, strategy, folder):
    engine = Engine(strategy)
    engine.step(0)
    return {one.bytes for one in save(engine.state, folder, step=1).manifest.files.values()}


@pytest.mark.parametrize("strategy", ["ddp", "fsdp", "zero1"])
def test_the_ranks_write_about_as_much_each_and_nothing_twice(pools, tmp_path, strategy):
    (found, *_) = pools(4).run(share_of_bytes, strategy, tmp_path)
    checkpoint = latest(tmp_path)
    pieces = {
        (piece.file, piece.key): piece.box.numel * (8 if tensor.dtype == "float64" else 4)
        for tensor in checkpoint.manifest.tensors.values()
        for piece in tensor.pieces
    }
    (one,) = {
        sum(x.numel() * x.itemsize for name, x in tensors(tmp_path).items() if "head" not in name)
    }
    assert sum(pieces.values()) == one  # the head is tied to the embedding: written once
    assert max(found) < 1.5 * min(found)
