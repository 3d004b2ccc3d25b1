"""FSDP: the numbers of one process after every step, in as many messages as the formula says."""

import sys
from contextlib import nullcontext

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from course_lib.core import ModelSpec
from course_lib.data_parallel import weighted_loss
from course_lib.fsdp import FSDP
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.recompute import recompute, recompute_full, recompute_selective

cloudpickle.register_pickle_by_value(sys.modules[__name__])

SIZES = (1, 2, 3, 4)
SPEC = ModelSpec(hidden=16, num_layers=3, num_heads=2, ffn_hidden=32, vocab=40, max_seq=6)
LLAMA = ModelSpec(
    hidden=16,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    ffn_hidden=24,
    vocab=30,
    max_seq=6,
    gated=True,
    bias=False,
    norm="rms",
    positions="rope",
    tied=False,
)


# --- modules that are hard on an FSDP


class Blocks(nn.Module):
    """x through a list of blocks, between two layers of the root."""

    def __init__(self, *blocks):
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(5, 4), nn.ModuleList(blocks), nn.Linear(4, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


class Residual(nn.Module):
    """x + tanh(layer(x)) * scale, with a scale of no dims and a weight that is not contiguous."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.layer.weight = nn.Parameter(torch.randn(4, 4).t())
        self.scale = nn.Parameter(torch.tensor(0.5))

    def forward(self, x):
        return x + torch.tanh(self.layer(x)) * self.scale


class Nested(nn.Module):
    """Lists in lists, blocks that return dicts and tuples, and take keywords."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Linear(5, 4), nn.Linear(5, 4)

        def forward(self, *, x):
            return {"left": self.left(x), "both": (self.right(x), None)}

    def __init__(self):
        super().__init__()
        self.groups = nn.ModuleList(
            nn.ModuleList([Nested.Pair(), nn.Linear(4, 5)]) for _ in range(2)
        )
        self.last = nn.Linear(5, 3)

    def forward(self, x):
        for pair, layer in self.groups:
            made = pair(x=x)
            x = x + layer(made["left"] * torch.tanh(made["both"][0]))
        return self.last(x)


class Adapted(nn.Module):
    """A frozen weight and two that are trained, in one unit."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 1, bias=False), nn.Linear(1, 4, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class Redone(Residual):
    """A part of the block is computed again in backward."""

    def forward(self, x):
        return x + recompute(lambda x: torch.tanh(self.layer(x)) * self.scale, x)


class Skips(Blocks):
    """One block is never called, and a layer of another one neither."""

    def __init__(self):
        super().__init__(Residual(), Residual(), Residual())
        self.blocks[0].unused = nn.Linear(2, 2)

    def forward(self, x):
        return self.last(self.blocks[2](self.blocks[0](self.first(x))))


class Twice(Blocks):
    """Each block is used twice, and the model as well."""

    def forward(self, x):
        return super().forward(x) - super().forward(super().forward(-x) @ x.new_ones(3, 5) / 9)


class Checkpointed(Blocks):
    """Blocks that are computed again in backward: ours, torch's, and one that does it inside."""

    def forward(self, x):
        x = recompute(self.blocks[0], self.first(x))
        x = checkpoint(self.blocks[1], x, use_reentrant=False)
        return self.last(self.blocks[2](x))


class Recurrent(nn.Module):
    """A module that keeps lists of its weights."""

    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTM(5, 4, num_layers=2, batch_first=True)])
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.cells[0](x[:, None])[0][:, 0])


def blocks():
    return Blocks(*(Residual() for _ in range(3)))


def gpt(spec=SPEC, change=None):
    model = GPT(spec)
    if change:
        change(model)
    return model


def freeze_some(model):
    model.blocks[0].requires_grad_(False)
    model.blocks[2].attention.requires_grad_(False)
    model.embedding.requires_grad_(False)


def freeze_blocks(model):
    model.blocks.requires_grad_(False)


def numbers(items):
    torch.manual_seed(99)
    return torch.randn(items, 5).double(), torch.randn(items, 3).double()


def tokens(items):
    return next_tokens(token_batch(0, batch=items, seq=6, vocab=30))


def is_linear(module):
    return isinstance(module, nn.Linear)


BUILDS = {
    "gpt": (gpt, tokens, token_loss),
    "llama": (lambda: gpt(LLAMA), tokens, token_loss),
    "frozen": (lambda: gpt(change=freeze_some), tokens, token_loss),
    "frozen blocks": (lambda: gpt(change=freeze_blocks), tokens, token_loss),
    "recomputed": (lambda: gpt(change=recompute_full), tokens, token_loss),
    "attention recomputed": (lambda: gpt(change=recompute_selective), tokens, token_loss),
    "blocks": (blocks, numbers, F.mse_loss),
    "one linear": (lambda: nn.Linear(5, 3), numbers, F.mse_loss),
    "nested": (Nested, numbers, F.mse_loss),
    "adapted": (lambda: Blocks(Adapted(), Adapted()), numbers, F.mse_loss),
    "skips": (Skips, numbers, F.mse_loss),
    "twice": (lambda: Twice(Residual(), Residual()), numbers, F.mse_loss),
    "checkpointed": (
        lambda: Checkpointed(Residual(), Residual(), Redone()),
        numbers,
        F.mse_loss,
    ),
    "recurrent": (Recurrent, numbers, F.mse_loss),
}


# --- the law: the numbers of one process


def build(name, seed, dtype=torch.float64):
    torch.manual_seed(seed)
    return BUILDS[name][0]().to(dtype)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adamw(params):
    return torch.optim.AdamW(params, lr=0.01, weight_decay=0.1)


def data(name, items, dtype):
    return [t.to(dtype) if t.is_floating_point() else t for t in BUILDS[name][1](items)]


def alone(name, items=24, optim=sgd, clip=None, dtype=torch.float64, steps=3):
    """One process, the whole batch, seed 0: the weights after every step."""
    module, (x, y), found = build(name, 0, dtype), data(name, items, dtype), []
    optimizer = optim(module.parameters())
    for _ in range(steps):
        optimizer.zero_grad()
        BUILDS[name][2](module(x), y).backward()
        if clip:
            assert nn.utils.clip_grad_norm_(module.parameters(), clip) > 1.5 * clip
        optimizer.step()
        found.append({key: value.clone() for key, value in module.state_dict().items()})
    return found


def together(
    rank,
    name,
    items=24,
    parts=1,
    sync=True,
    optim=sgd,
    clip=None,
    dtype=torch.float64,
    wrap=FSDP,
    **options,
):
    """The same by FSDP: each rank has its part of the batch, and weights of its own at first."""
    model, p, found = wrap(build(name, rank, dtype), **options), dist.get_world_size(), []
    optimizer = optim(model.parameters())
    x, y = (whole.tensor_split(p)[rank].tensor_split(parts) for whole in data(name, items, dtype))
    for _ in range(3):
        optimizer.zero_grad()
        for index in range(parts):
            loss = BUILDS[name][2](model(x[index]), y[index]) / parts
            if items % p:
                loss = weighted_loss(loss, len(y[index]))
            with nullcontext() if sync or index == parts - 1 else model.no_sync():
                loss.backward()
        if clip:
            model.clip_grad_norm_(clip)
        optimizer.step()
        found.append(model.full_state_dict())
        assert not any(row.is_whole for row in model.rows), "something was not freed"
    return found


def assert_law(by_rank, wanted, tolerance=1e-12):
    for found in by_rank:
        torch.testing.assert_close(found, by_rank[0], rtol=0, atol=0)
    torch.testing.assert_close(by_rank[0], wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("name", BUILDS)
def test_fsdp_matches_one_process(pools, name, world_size):
    assert_law(pools(world_size).run(together, name), alone(name))


@pytest.mark.parametrize(
    "options",
    [
        {"reshard_after_forward": False},
        {"prefetch": False},
        {"reshard_after_forward": False, "prefetch": False},
        {"units": []},
        {"units": is_linear},
        {"parts": 2},
        {"parts": 2, "sync": False},
        {"parts": 2, "sync": False, "reshard_after_forward": False},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("name", "world_size"), [("blocks", 1), ("blocks", 3), ("adapted", 2), ("checkpointed", 2)]
)
def test_no_option_changes_the_numbers(pools, name, options, world_size):
    assert_law(pools(world_size).run(together, name, **options), alone(name))


@pytest.mark.parametrize("world_size", SIZES)
@pytest.mark.parametrize("name", ["llama", "blocks"])
def test_adamw_and_clipping_by_the_norm_of_all_shards(pools, name, world_size):
    options = {"optim": adamw, "clip": 0.05}
    assert_law(pools(world_size).run(together, name, **options), alone(name, **options))


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("items", [3, 7])
def test_an_uneven_batch_weighs_every_item_alike(pools, items, world_size):
    assert_law(pools(world_size).run(together, "blocks", items), alone("blocks", items))


@pytest.mark.parametrize("world_size", SIZES)
def test_float32_to_its_own_accuracy(pools, world_size):
    by_rank = pools(world_size).run(together, "gpt", dtype=torch.float32)
    assert_law(by_rank, alone("gpt", dtype=torch.float32), tolerance=1e-6)
