"""ZeRO: the numbers of one process, in shards that are owned once, by as many bytes as on paper."""

import sys

import cloudpickle
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from course_lib.core import ModelSpec
from course_lib.data_parallel import weighted_loss
from course_lib.models import GPT, next_tokens, token_batch, token_loss
from course_lib.zero import ZeRO1, ZeRO2, ZeRO3

cloudpickle.register_pickle_by_value(sys.modules[__name__])

# float64: the sum over items runs in another order, and the mean over ranks rounds once more
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}
SIZES = (1, 2, 3, 4)
STAGES = (ZeRO1, ZeRO2, ZeRO3)
SPEC = ModelSpec(
    hidden=12,
    num_layers=2,
    num_heads=2,
    ffn_hidden=20,
    vocab=23,
    max_seq=6,
    norm="rms",
    bias=False,
    tied=True,
)


def mlp():
    return nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3))


def tied_gpt():
    return GPT(SPEC)


def frozen_gpt():
    model = GPT(SPEC)
    model.blocks[0].requires_grad_(False)
    return model


class Odd(nn.Module):
    """Parameters of its own around modules, turned ones, one number only; keywords and dicts."""

    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.inner = Inner()

    def forward(self, x):
        hidden = self.inner(x * self.scale, bias=x[:, :1])["hidden"]
        return (hidden + x) @ self.turned * self.scale


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 5)
        self.weight = nn.Parameter(torch.randn(5))

    def forward(self, x, *, bias):
        return {"hidden": self.layer(x) * self.weight + bias, "none": None}


class Normed(nn.Module):
    """Batch norm: its buffers are not equal by themselves."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(5, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 3))
        self.register_buffer("shift", torch.randn(3))

    def forward(self, x):
        return self.layers(x) - self.shift


def numbers(items):
    torch.manual_seed(99)
    return torch.randn(items, 5).double(), torch.randn(items, 3).double()


def tokens(items):
    return next_tokens(token_batch(0, batch=items, seq=6, vocab=23))


BUILDS = {
    "mlp": (mlp, numbers, F.mse_loss),
    "odd": (Odd, numbers, F.mse_loss),
    "buffer": (Normed, numbers, F.mse_loss),
    "tied": (tied_gpt, tokens, token_loss),
    "frozen": (frozen_gpt, tokens, token_loss),
}
OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
}


def build(name, seed):
    torch.manual_seed(seed)
    return BUILDS[name][0]().double()


def groups_of(module):
    """No weight decay on what has one dim or none."""
    trained = [param for param in module.parameters() if param.requires_grad]
    flat = [param for param in trained if param.dim() < 2]
    return [
        {"params": [param for param in trained if param.dim() >= 2]},
        {"params": flat, "weight_decay": 0.0, "lr": 0.02},
    ]


def alone(name, optimizer="sgd", items=24, clip=None, grouped=False, schedule=False, dtype=None):
    """One process, the whole batch, seed 0: the weights after every step."""
    module, (x, y) = build(name, seed=0), BUILDS[name][1](items)
    cls, options = OPTIMIZERS[optimizer]
    stepper = cls(groups_of(module) if grouped else module.parameters(), **options)
    lr = torch.optim.lr_scheduler.ExponentialLR(stepper, 0.5) if schedule else None
    found = []
    for _ in range(3):
        stepper.zero_grad()
        BUILDS[name][2](module(x), y).backward()
        if clip:
            norm = nn.utils.clip_grad_norm_(module.parameters(), clip)
            assert norm > 2 * clip, "it does not clip"
        stepper.step()
        if lr:
            lr.step()
        found.append([param.detach().clone() for param in module.parameters()])
    return found


def whole(engine):
    """The parameters, gathered where they are sharded."""
    for row in engine.param_rows:
        if row.is_free:
            row.gather()
    found = [param.detach().clone() for param in engine.module.parameters()]
    for row in engine.param_rows:
        row.free()
    return found


def together(
    rank, stage, name, optimizer="sgd", items=24, clip=None, grouped=False, schedule=False,
    parts=1, **options,
):  # fmt: skip
    """The same by ZeRO: each rank has its part of the batch, and weights of its own at first."""
    module, p = build(name, seed=rank), dist.get_world_size()
    cls, defaults = OPTIMIZERS[optimizer]
    groups = groups_of(module) if grouped else None
    engine = stage(module, cls, param_groups=groups, **options, **defaults)
    lr = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5) if schedule else None
    x, y = (t.tensor_split(p)[rank].tensor_split(parts) for t in BUILDS[name][1](items))
    found = []
    for _ in range(3):
        engine.zero_grad()
        for part_x, part_y in zip(x, y, strict=True):
            loss = BUILDS[name][2](engine(part_x), part_y) / parts
            (weighted_loss(loss, len(part_y)) if items % p else loss).backward()
        if clip:
            engine.clip_grad_norm_(clip)
        engine.step()
        if lr:
            lr.step()
        found.append(whole(engine))
    return found


CASES = [
    *({"name": name, "optimizer": how} for name in BUILDS for how in OPTIMIZERS),
    {"name": "mlp", "parts": 2, "bucket_bytes": 100},
    {"name": "tied", "parts": 2, "clip": 0.01, "optimizer": "adamw"},
    {"name": "tied", "clip": 0.01, "offload": True, "grouped": True, "schedule": True},
    {"name": "odd", "optimizer": "adamw", "bucket_bytes": 1, "grouped": True, "schedule": True},
    {"name": "mlp", "items": 7, "find_unused": True},
    {"name": "frozen", "parts": 2, "offload": True, "optimizer": "adamw"},
]
MINE = ("parts", "bucket_bytes", "offload", "find_unused")


def all_cases(rank):
    return [[together(rank, stage, **case) for case in CASES] for stage in STAGES]


@pytest.mark.parametrize("world_size", SIZES)
def test_zero_matches_one_process(pools, world_size):
    by_rank = pools(world_size).run(all_cases)
    wanted = [alone(**{k: v for k, v in case.items() if k not in MINE}) for case in CASES]
    for rank, stages in enumerate(by_rank):
        for stage, found in zip(STAGES, stages, strict=True):
            for case, got, want in zip(CASES, found, wanted, strict=True):
                where = f"rank {rank}, {stage.__name__}, {case}: "
                assert_equal(got, want, where)
        assert torch.equal(flat(stages), flat(by_rank[0])), "ranks differ"


def assert_equal(got, want, where):
    torch.testing.assert_close(got, want, **TOLERANCE, msg=lambda words: where + words)


def flat(nested):
    if isinstance(nested, torch.Tensor):
        return nested.reshape(-1)
    return torch.cat([flat(part) for part in nested])
