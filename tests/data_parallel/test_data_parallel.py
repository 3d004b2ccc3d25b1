"""Data parallelism: the numbers of one process on the whole batch, with the promised traffic."""

import sys
from collections import Counter, namedtuple

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from course_lib.core import COMMUNICATION_KINDS, CourseError, MeshError, ShapeError
from course_lib.core.specs import ModelSpec
from course_lib.data_parallel import DataParallel, NaiveDDP, RankSampler, fingerprint, weighted_loss
from course_lib.models import GPT, padded_batch, token_loss
from course_lib.ranks import RankError
from tests.law.law import (
    LENGTHS,
    WORLDS,
    Alone,
    Law,
    Replicas,
    assert_laws,
    assert_laws_in_groups,
    every_module,
    lasting,
    ways,
)
from tests.law.modules import numbers

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# float64: the sums over items run in another order on p ranks, and mean * weight rounds once more
TOLERANCE = {"rtol": 1e-11, "atol": 1e-14}
SPEC = ModelSpec(hidden=16, num_layers=2, num_heads=2, ffn_hidden=32, vocab=40, max_seq=6)
Pair = namedtuple("Pair", ["twice", "thrice"])


def mlp():
    return nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 3)).double()


class Branches(nn.Module):
    """One of two layers a rank; a third one nobody uses."""

    def __init__(self):
        super().__init__()
        self.even, self.odd, self.idle = (nn.Linear(5, 3).double() for _ in range(3))

    def forward(self, x, branch):
        return (self.even, self.odd)[branch](x)


def batches(items=11, count=3):
    return [numbers(items, step) for step in range(count)]


# --- the law


class Naive(Replicas):
    name = "NaiveDDP"

    def wrap(self, module):
        return NaiveDDP(module, **{"find_unused": True, **self.options})


WAYS = [
    {"find_unused": False, "clip": 0.05, "optimizer": "adamw"},
    {"parts": 2, "no_sync": True},
    {"parts": 3},
    *({"items": items} for items in (2, 7)),
]


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("p", WORLDS)
def test_naive_ddp_has_the_numbers_of_one_process(pools, p, length):
    laws = [*every_module(), *ways(["in place"], WAYS)]
    assert_laws(pools(p).run, Naive, lasting(length, laws))


def test_each_group_trains_for_itself(pools):
    assert_laws_in_groups(pools(4), Naive, [Law("odd", clip=0.05), Law("odd", items=7)])


class Threads(Alone):
    name = "DataParallel"

    def wrap(self, module):
        return DataParallel(module, self.law.options["num_replicas"])


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("num_replicas", WORLDS)
def test_threads_have_the_numbers_of_one_process(alone, num_replicas, length):
    laws = [
        *every_module(),
        *ways(["in place"], [{"optimizer": "adamw", "parts": 2}, {"items": 2}]),
    ]
    for law in laws:
        law.options["num_replicas"] = num_replicas
    assert_laws(lambda *args: [alone(*args)], Threads, lasting(length, laws))


# --- weights of uneven parts


def uneven_gradient(rank, sizes):
    torch.manual_seed(3)
    model, (x, y) = NaiveDDP(mlp()), batches(items=sum(sizes), count=1)[0]
    part, targets = x.split(sizes)[rank], y.split(sizes)[rank]
    loss = weighted_loss(F.mse_loss(model(part), targets), len(part))
    loss.backward()
    model.finish()
    whole = mlp()
    whole.load_state_dict(model.module.state_dict())
    F.mse_loss(whole(x), y).backward()
    return loss.item(), F.mse_loss(whole(x), y).item(), grads_of(model), grads_of(whole)


def grads_of(model):
    return [param.grad for param in model.parameters()]


@pytest.mark.parametrize("sizes", [[4], [5, 1], [0, 3], [1, 4, 2], [0, 6, 0], [3, 0, 1, 2]])
def test_uneven_parts_are_weighed_by_their_items(pools, sizes):
    got = pools(len(sizes)).run(uneven_gradient, sizes)
    losses, whole, *_ = zip(*got, strict=True)
    assert sum(losses) / len(sizes) == pytest.approx(whole[0], rel=1e-12)
    for _, _, ours, expected in got:
        torch.testing.assert_close(ours, expected, **TOLERANCE)


def test_a_negative_number_of_items_is_told():
    with pytest.raises(CourseError, match="need num_items >= 0; got -1"):
        weighted_loss(torch.ones(()), -1)


# --- traffic


def one_step(rank, **options):
    model = NaiveDDP(GPT(SPEC).double(), **options)
    model.module.blocks[0].requires_grad_(False)
    x, y = padded_batch(0, batch=9, seq=6, vocab=40)
    token_loss(model(x), y).backward()
    model.finish()
    return [p.numel() * 8 for p in model.module.parameters() if p.requires_grad]


@pytest.mark.parametrize("p", WORLDS)
def test_one_all_reduce_a_trainable_parameter(pools, p):
    sizes = pools(p).run(one_step)[0]
    for rank in range(p):
        mine = [e for e in pools(p).events if e.rank == rank and e.kind in COMMUNICATION_KINDS]
        assert [e.num_bytes for e in mine if e.kind == "all_reduce"] == sizes
        every = len(list(GPT(SPEC).parameters()))  # tied: the head is not sent again
        assert Counter(e.kind for e in mine) == {"broadcast": every, "all_reduce": len(sizes)}


def test_find_unused_costs_one_number_a_parameter(pools):
    sizes = pools(2).run(one_step, find_unused=True)[0]
    sent = [e.num_bytes for e in pools(2).events if (e.rank, e.kind) == (0, "all_reduce")]
    assert sent == [8 * len(sizes), *sizes]


def accumulates(rank):
    model, data = NaiveDDP(mlp()), batches()
    with model.no_sync():
        F.mse_loss(model(data[0][0]), data[0][1]).backward()
        model.finish()
    dist.barrier()
    F.mse_loss(model(data[1][0]), data[1][1]).backward()
    model.finish()


def test_no_sync_sends_nothing(pools):
    pools(2).run(accumulates)
    kinds = [e.kind for e in pools(2).events if e.rank == 1 and e.kind in COMMUNICATION_KINDS]
    assert kinds == ["broadcast"] * 4 + ["barrier"] + ["all_reduce"] * 4


# --- parameters without a gradient


def branches(rank):
    torch.manual_seed(rank)
    model = NaiveDDP(Branches())
    x, y = batches(items=4, count=1)[0]
    F.mse_loss(model(x, 0), y).backward()
    model.finish()


def test_a_parameter_without_gradient_is_told(pools):
    with pytest.raises(RankError, match=r"got none for odd.weight, odd.bias, idle.weight"):
        pools(2).run(branches)


# --- buffers


def norm_steps(rank, wrap, options):
    torch.manual_seed(7)
    norm = nn.Sequential(nn.Linear(5, 3), nn.BatchNorm1d(3)).double()
    model, p = wrap(norm, **options), dist.get_world_size()
    seen = []
    for number, (x, y) in enumerate(batches(items=12)):
        sync = number != 1
        with model.no_sync() if not sync else torch.enable_grad():
            F.mse_loss(model(x.tensor_split(p)[rank]), y.tensor_split(p)[rank]).backward()
        if sync and hasattr(model, "finish"):
            model.finish()
        seen.append([buffer.clone() for buffer in model.buffers()])
    return seen


@pytest.mark.parametrize("options", [{}, {"broadcast_buffers": False}])
def test_buffers_go_the_way_of_torch_ddp(pools, options):
    wrap = nn.parallel.DistributedDataParallel
    theirs = pools(2).run(norm_steps, wrap, options)
    ours = pools(2).run(norm_steps, NaiveDDP, options)
    for rank in range(2):
        torch.testing.assert_close(ours[rank], theirs[rank], **TOLERANCE)


# --- the sampler

lengths, worlds, small = st.integers(0, 60), st.integers(1, 9), st.integers(0, 4)


@given(lengths, worlds, small, small, st.booleans(), st.booleans())
def test_the_sampler_equals_torchs(n, p, epoch, seed, shuffle, drop_last):
    for rank in range(p):
        known = {"shuffle": shuffle, "seed": seed, "drop_last": drop_last}
        theirs = DistributedSampler(range(n), p, rank, **known)
        ours = RankSampler(n, rank, p, **known)
        for sampler in (ours, theirs):
            sampler.set_epoch(epoch)
        assert list(ours) == list(theirs)
        assert len(ours) == len(theirs)


def test_every_item_is_read_once_an_epoch_in_another_order():
    data, epochs = TensorDataset(torch.arange(12)), []
    samplers = [RankSampler(12, rank, 3) for rank in range(3)]
    for epoch in range(3):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        loaders = [DataLoader(data, batch_size=2, sampler=sampler) for sampler in samplers]
        epochs.append([int(x) for loader in loaders for (part,) in loader for x in part])
        assert sorted(epochs[-1]) == list(range(12))
    assert epochs[0] != epochs[1] != epochs[2]


def test_a_rank_outside_of_the_world_is_told():
    with pytest.raises(MeshError, match="need a rank from 0 to 2; got 3"):
        RankSampler(12, 3, 3)


# --- threads


def test_threads_keep_what_replica_0_does_to_its_buffers():
    model, alone = nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3).double()
    x = torch.randn(7, 3).double()
    DataParallel(model, 2)(x)
    alone(x[:4])
    torch.testing.assert_close(dict(model.named_buffers()), dict(alone.named_buffers()))
    model.eval()
    torch.testing.assert_close(DataParallel(model, 2)(x), model(x))


class Nested(nn.Module):
    def forward(self, x, *, scale, more):
        assert not torch.is_grad_enabled()
        assert torch.is_autocast_enabled("cpu")
        assert len(more["x"]) == len(x)
        return {"pair": Pair(scale * x, 3 * x), "sizes": [torch.tensor(len(x))], "name": "n"}


def test_outputs_are_gathered_in_their_containers():
    x = torch.arange(5)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = DataParallel(Nested(), 3)(x, scale=2, more={"x": x})
    assert isinstance(out["pair"], Pair)
    assert out["pair"].twice.tolist() == [0, 2, 4, 6, 8]
    assert out["sizes"][0].tolist() == [2, 2, 1]
    assert out["name"] == "n"


def test_fewer_items_than_replicas_leave_some_idle():
    x = torch.randn(2, 5).double()
    model = mlp()
    torch.testing.assert_close(DataParallel(model, 4)(x), model(x))


def test_what_threads_cannot_do_is_told():
    with pytest.raises(CourseError, match="need 1 replica or more; got 0"):
        DataParallel(mlp(), 0)
    with pytest.raises(ShapeError, match="of one length along dim 0; got 2 and 3"):
        DataParallel(mlp(), 2)(torch.zeros(2, 5), torch.zeros(3))


def test_a_fingerprint_changes_with_any_bit():
    model = nn.BatchNorm1d(3).to(torch.bfloat16)
    before = fingerprint(model)
    assert before == fingerprint(model)
    model.running_mean[2] = 1e-30
    assert before != fingerprint(model)
    model.running_mean[2] = 0
    assert before == fingerprint(model)
    model.num_batches_tracked += 1
    assert before != fingerprint(model)
