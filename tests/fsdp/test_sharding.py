"""Each parameter is its own shard on dim 0, as in PyTorch's fully_shard, and steps by itself."""

import math
import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from course_lib.fsdp import FSDP, MixedPrecisionPolicy, merge_shards
from course_lib.fsdp.dim0_layout import Dim0Layout
from course_lib.fsdp.mesh import hybrid_ranks

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES = (1, 2, 3, 4)
shapes = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@given(shapes, st.integers(1, 6))
def test_a_layout_is_torch_chunk_on_dim_0(shape, p):
    layout, whole = Dim0Layout(shape, p), torch.randn(shape)
    slots = torch.full((p, layout.slot_numel), math.nan)
    layout.copy_to_slots(whole, slots)
    chunks = whole.reshape(layout.rows).chunk(p)
    for rank, slot in enumerate(slots):
        shard = layout.shard_in(slot, rank)
        assert torch.equal(shard, layout.shard_of(whole, rank))
        assert shard.shape == layout.shard_shape(rank)
        if rank < len(chunks):
            assert torch.equal(shard, chunks[rank])
        assert not slot[shard.numel() :].any(), "padding is zero"
    assert torch.equal(layout.whole_in(slots.flatten()), whole)


class Parts(nn.Module):
    """Rows that nobody divides, fewer rows than ranks, no dims, a tie, a frozen weight."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(nn.Linear(7, 7) for _ in range(2))
        self.blocks[1].bias.requires_grad_(False)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.gain = nn.Parameter(torch.tensor([1.0, 2.0]))
        self.again = self.first

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = torch.tanh(block(x))
        return (x * self.scale).sum(-1, keepdim=True) * self.gain


def parts():
    torch.manual_seed(0)
    return Parts().double()


def batch():
    torch.manual_seed(9)
    return torch.randn(12, 5).double(), torch.randn(12, 2).double()


def mine(rank):
    return (whole.tensor_split(dist.get_world_size())[rank] for whole in batch())


def shapes_of(rank):
    """Names and shapes of our shards, and of fully_shard's; a scalar it does not shard."""
    from torch.distributed.fsdp import fully_shard  # seconds of imports

    theirs = parts()
    theirs.scale = nn.Parameter(theirs.scale[None].detach())
    for block in theirs.blocks:
        fully_shard(block)
    fully_shard(theirs)
    model = FSDP(parts())
    inner = [(name, tuple(p.shape)) for name, p in model.module.named_parameters()]
    outer = [(name, tuple(p.shape)) for name, p in model.named_parameters()]
    local = [(name, tuple(p.to_local().shape)) for name, p in theirs.named_parameters()]
    return inner, outer, local


@pytest.mark.parametrize("world_size", [1, 3, 4])
def test_names_and_shapes_are_those_of_fully_shard(pools, world_size):
    for inner, outer, local in pools(world_size).run(shapes_of):
        assert inner == outer == local


def grouped(params):
    """Matrices decay, vectors do not."""
    groups = [[p for p in params if (p.dim() > 1) is decays] for decays in (True, False)]
    return torch.optim.AdamW(
        [
            {"params": groups[0], "weight_decay": 0.5, "lr": 0.02},
            {"params": groups[1], "weight_decay": 0.0, "lr": 0.05},
        ]
    )


class EachItsOwn:
    """One optimizer per parameter, each with its own learning rate."""

    def __init__(self, params):
        self.all = [torch.optim.SGD([p], lr=0.02 * (n + 1)) for n, p in enumerate(params)]

    def step(self):
        for one in self.all:
            one.step()
            one.zero_grad()

    def zero_grad(self):
        pass


OPTIMIZERS = {"groups": grouped, "each its own": EachItsOwn}


def steps(model, optim, x, y):
    optimizer = optim(list(model.parameters()))
    for _ in range(3):
        optimizer.zero_grad()
        F.mse_loss(model(x), y).backward()
        optimizer.step()


def sharded_steps(rank):
    found = {}
    for name, optim in OPTIMIZERS.items():
        model = FSDP(parts())
        steps(model, optim, *mine(rank))
        found[name] = model.full_state_dict()
    return found


@pytest.mark.parametrize("world_size", SIZES)
def test_decay_groups_and_an_optimizer_for_each_parameter(pools, world_size):
    wanted = {}
    for name, optim in OPTIMIZERS.items():
        plain = parts()
        steps(plain, optim, *batch())
        wanted[name] = plain.state_dict()
    for found in pools(world_size).run(sharded_steps):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)


# --- parameters that only some ranks use


class Choosing(nn.Module):
    """Blocks of three heads; a rank chooses which of them take part in each."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleDict({name: nn.Linear(4, 4) for name in "abc"})

        def forward(self, x, heads):
            return x + sum(self.heads[name](x) for name in heads)

    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(self.Block() for _ in range(3))

    def forward(self, x, heads):
        x = self.body(x)
        for block, some in zip(self.blocks, heads, strict=True):
            x = block(x, some)
        return x


CHOICES = [("a", "ab", "b"), ("ab", "b", "b")]  # of each rank, for each block


def choosing():
    torch.manual_seed(0)
    return Choosing().double()


def some_grads(rank, options):
    model, x = FSDP(choosing(), **options), torch.ones(2, 4).double()
    choice = CHOICES[rank % 2]
    (model(x, choice).square().sum() * (rank % 2 + 1)).backward()
    model.finish()
    found = {}
    for (name, shard), slot in zip(
        model.module.named_parameters(), model.parameters(), strict=True
    ):
        assert shard is slot
        assert shard.grad is None or (shard.grad.shape, shard.grad.dtype) == (
            shard.shape,
            shard.dtype,
        )
        found[name] = shard.grad
    return found


@pytest.mark.parametrize("options", [{}, {"mesh": (2, 1)}, {"mixed_precision": None}])
def test_what_no_rank_uses_has_no_gradient_and_what_one_uses_has_its_mean(pools, options):
    plain, x = choosing(), torch.ones(2, 4).double()
    for number, choice in enumerate(CHOICES):
        (plain(x, choice).square().sum() * (number + 1) / 2).backward()
    by_rank = pools(2).run(some_grads, options)
    for name, param in plain.named_parameters():
        shards = [found[name] for found in by_rank]
        if param.grad is None:
            assert shards == [None, None], name
        else:
            whole = shards[0] if options.get("mesh") else torch.cat(shards)
            torch.testing.assert_close(whole, param.grad, rtol=1e-12, atol=1e-12)


def negative_zeros(rank):
    model = FSDP(nn.Linear(2, 2, bias=False))
    (model(torch.ones(1, 2)) * -0.0).sum().backward()
    return [shard.grad for shard in model.parameters()]


def test_a_gradient_of_zeros_is_one(pools):
    for [grad] in pools(2).run(negative_zeros):
        assert not grad.any()


# --- dtypes


def dtypes_of(rank):
    """Of a policy: what a block gets, what comes out, and the shards and their gradients."""
    seen = []
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, output_dtype=torch.float64
    )
    model = FSDP(parts().float(), mixed_precision=policy)
    model.module.blocks[0].register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    out = model(torch.ones(2, 5))
    out.sum().backward()
    kept = {one.dtype for p in model.parameters() for one in (p, p.grad) if one is not None}
    return seen[0].dtype, out.dtype, kept


def test_a_policy_names_three_dtypes_and_shards_keep_theirs(pools):
    wanted = (torch.bfloat16, torch.float64, {torch.float32})
    assert pools(2).run(dtypes_of) == [wanted] * 2


# --- groups


def test_rows_shard_and_columns_replicate():
    assert hybrid_ranks([0, 1, 2, 3, 4, 5], 2) == (
        [[0, 1, 2], [3, 4, 5]],
        [[0, 3], [1, 4], [2, 5]],
    )


def on_grids(rank):
    """Shapes of the shards on a grid, given by its sizes and as PyTorch's mesh."""
    from torch.distributed.device_mesh import init_device_mesh  # seconds of imports

    grids = ((2, 2), init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard")))
    return [FSDP(parts(), mesh=mesh).state_dict() for mesh in grids]


def test_a_grid_is_two_sizes_or_a_device_mesh_and_its_replicas_are_equal(pools):
    by_rank = pools(4).run(on_grids)
    for number, wanted in ((0, 0), (1, 1), (2, 0), (3, 1)):
        pair, mesh = by_rank[number]
        torch.testing.assert_close(pair, by_rank[wanted][0], rtol=0, atol=0)
        torch.testing.assert_close(mesh, pair, rtol=0, atol=0)
    merged = merge_shards([pair for pair, _ in by_rank])
    torch.testing.assert_close(merged, dict(parts().state_dict()), rtol=0, atol=0)
