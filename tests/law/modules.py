"""Modules that are hard on a method of distributed training, and the batches they train on.

All take five numbers an item and return three, or are language models. `HARD` names each once;
every method trains every one of them (`law.py`), but for what `EXCEPTIONS` names.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from course_lib.core import ModelSpec
from course_lib.core.specs import Rope
from course_lib.models import BERT, GPT, padded_batch, token_loss
from course_lib.recompute import recompute, recompute_full, recompute_selective

# 12 heads: 1, 2, 3 and 4 ranks can share them
TINY = ModelSpec(hidden=24, num_layers=2, num_heads=12, ffn_hidden=36, vocab=48, max_seq=12)
LLAMA = replace(TINY, gated=True, norm="rms", positions="rope", bias=False)
GROUPED = replace(LLAMA, hidden=48, num_heads=24, num_kv_heads=12, tied=False)
UNEVEN = replace(TINY, vocab=41, ffn_hidden=31, gated=True, tied=False)  # no p divides either
# what decoders of today have: heads of their own size, one of keys for all, a window in a layer
SCALING = {
    **{"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "original_max_position_embeddings": 8,
}
TODAY = replace(
    LLAMA,
    **{"tied": False, "num_kv_heads": 1, "head_dim": 4, "qk_norm": "head", "bias": ("qkv",)},
    **{"window": 5, "window_layers": (1,), "nope_layers": (0,), "norm_eps": 1e-3},
    **{"activation": "gelu_tanh", "rope": Rope(theta=300.0, scaling=tuple(SCALING.items()))},
)
NEOX = replace(
    TINY,
    **{"parallel": True, "norms_per_layer": 1, "positions": "rope", "rope": Rope(share=0.5)},
    **{"head_dim": 4, "activation": "relu", "tied": False, "vocab_multiple": 16},
)
# 8 layers: two chunks on each of 4 stages
DEEP = replace(TINY, num_layers=6, ffn_hidden=16, bias=False, norm="rms")


class Odd(nn.Module):
    """A turned weight, a scalar and a row beside modules; keywords, and outputs in containers."""

    def __init__(self):
        super().__init__()
        self.turned = nn.Parameter(torch.randn(3, 5).t())
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.row = nn.Parameter(torch.randn(1, 3))
        self.pairs = nn.ModuleList(nn.ModuleList([Pair(), nn.Linear(4, 5)]) for _ in range(2))

    def forward(self, x):
        for pair, layer in self.pairs:
            made = pair(x=x, shift=x[:, :1])
            x = x + layer(made["left"] * torch.tanh(made["both"][0]))
        return x @ self.turned * self.scale + self.row


class Pair(nn.Module):
    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Linear(5, 4), nn.Linear(5, 4)

    def forward(self, *, x, shift):
        return {"left": self.left(x) + shift, "both": (self.right(x), None)}


class Buffered(nn.Module):
    """Buffers that ranks begin with differently, a counter, and one that is not saved."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.register_buffer("shift", torch.randn(3))
        self.register_buffer("calls", torch.tensor(0))
        self.register_buffer("scratch", torch.ones(3), persistent=False)

    def forward(self, x):
        self.calls += 1
        return (self.layer(x) - self.shift) * self.scratch


class Unused(nn.Module):
    """A parameter, a layer and a block that nobody uses; what is used is used twice."""

    def __init__(self):
        super().__init__()
        self.never = nn.Parameter(torch.randn(5, 2))
        self.layer, self.out = nn.Linear(5, 5), nn.Linear(5, 3)
        self.blocks = nn.ModuleList([Residual(5), Residual(5)])
        self.blocks[0].unused = nn.Linear(2, 2)

    def forward(self, x):
        hidden = self.blocks[0](self.layer(x).tanh())
        return self.out(self.layer(hidden)) - self.out(-x)


class Choice(nn.Module):
    """Each item uses one of two layers, and nobody the last: its first number chooses."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleDict({name: nn.Linear(5, 3) for name in ("low", "high", "never")})

    def forward(self, x):
        masks = {"low": x[:, 0] < 0, "high": x[:, 0] >= 0}  # sorted: the low ones come first
        parts = [self.layers[name](x[mask]) for name, mask in masks.items() if mask.any()]
        return torch.cat(parts) if parts else self.layers["low"](x)


class Residual(nn.Module):
    """x + tanh(layer(x)) * scale, with a scale of no dims."""

    def __init__(self, width=4):
        super().__init__()
        self.layer = nn.Linear(width, width)
        self.scale = nn.Parameter(torch.tensor(0.5))

    def part(self, x):
        return torch.tanh(self.layer(x)) * self.scale

    def forward(self, x):
        return x + self.part(x)


class Redone(Residual):
    """A part of the block is computed again in backward."""

    def forward(self, x):
        return x + recompute(self.part, x)


class Blocks(nn.Module):
    """x through a list of blocks, between two layers."""

    def __init__(self, *blocks):
        super().__init__()
        self.first, self.blocks, self.last = nn.Linear(5, 4), nn.ModuleList(blocks), nn.Linear(4, 3)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


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


class Reentrant(Blocks):
    """Blocks that the older way of checkpointing computes again."""

    def forward(self, x):
        x = self.first(x)
        if torch.is_grad_enabled():  # else it warns
            return self.last(checkpoint(self.blocks[0], x, use_reentrant=True))
        return self.last(self.blocks[0](x))


class Adapter(nn.Module):
    """A frozen weight and two that are trained, without bias: fewer rows than ranks."""

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(4, 4).requires_grad_(False)
        self.down, self.up = nn.Linear(4, 1, bias=False), nn.Linear(1, 4, bias=False)

    def forward(self, x):
        return torch.tanh(self.base(x) + self.up(self.down(x)))


class InFloat32(nn.Linear):
    """A layer in float32 among others in float64."""

    def _apply(self, fn, recurse=True):
        return self

    def forward(self, x):
        return super().forward(x.float()).to(x.dtype)


class Counted(nn.Module):
    """Whole numbers, which nothing trains, beside a layer."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)
        self.steps = nn.Parameter(torch.tensor([1, 2, 3]), requires_grad=False)

    def forward(self, x):
        return self.layer(x) + self.steps[1]


class Row(nn.Module):
    """One parameter of one row."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(1, 3))

    def forward(self, x):
        return x[:, :3] * self.weight


class Recurrent(nn.Module):
    """A module that keeps lists of its weights."""

    def __init__(self):
        super().__init__()
        self.cells = nn.ModuleList([nn.LSTM(5, 4, num_layers=2, batch_first=True)])
        self.last = nn.Linear(4, 3)

    def forward(self, x):
        return self.last(self.cells[0](x[:, None])[0][:, 0])


def layers():
    """Eight layers for the stages of a pipeline, of widths that no world divides."""
    hidden = [nn.Sequential(nn.Linear(5, 7), nn.GELU(), nn.Linear(7, 5)) for _ in range(7)]
    return nn.Sequential(*hidden, nn.Linear(5, 3))


def tied():
    """One weight under two names, and one block under two names."""
    block, first, second = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 5)
    second.weight = first.weight
    tanhs = [nn.Tanh() for _ in range(3)]
    return nn.Sequential(first, tanhs[0], block, tanhs[1], second, tanhs[2], block, nn.Linear(5, 3))


def mixed():
    return nn.Sequential(*(nn.Linear(5, 5) for _ in range(6)), InFloat32(5, 6), nn.Linear(6, 3))


def gpt(spec, *frozen, change=None, **options):
    """A GPT whose parameters with one of these words in their name are not trained."""
    model = GPT(spec, **options)
    for name, param in model.named_parameters():
        param.requires_grad_(not any(word in name for word in frozen))
    if change:
        change(model)
    return model


def numbers(items: int, step: int) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(99 + step)
    x, y = (torch.randn(items, n, generator=random, dtype=torch.float64) for n in (5, 3))
    x[:, 0] = torch.linspace(-1, 1, items)  # sorted: the ranks of a Choice choose differently
    return x, y


def tokens(items: int, step: int) -> tuple[Tensor, Tensor]:
    """Sequences whose ends do not count."""
    return padded_batch(step, batch=items, seq=12, vocab=41)


@dataclass(frozen=True)
class Hard:
    """How a module is built, what it trains on, and its loss: a mean over what counts."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], tuple[Tensor, Tensor]] = numbers
    loss: Callable[[Tensor, Tensor], Tensor] = F.mse_loss
    # float64: the sums over items run in another order, and means round once more
    tolerance: float = 1e-11
    steps: int = 3


def language(build: Callable[[], nn.Module]) -> Hard:
    return Hard(build, tokens, token_loss, steps=2)


HARD = {
    "one layer": Hard(lambda: nn.Linear(5, 3)),
    "in place": Hard(
        lambda: nn.Sequential(nn.Linear(5, 7), nn.ReLU(inplace=True), nn.Linear(7, 3))
    ),
    "fewer rows than ranks": Hard(Row),
    "layers": Hard(layers),
    "blocks": Hard(lambda: Blocks(Residual(), Residual(), Residual())),
    "odd": Hard(Odd),
    "tied": Hard(tied),
    "adapted": Hard(lambda: Blocks(Adapter(), Adapter())),
    "unused": Hard(Unused),
    "choice": Hard(Choice),
    "twice": Hard(lambda: Twice(Residual(), Residual())),
    "buffers": Hard(Buffered),
    "two dtypes": Hard(mixed, tolerance=1e-5),
    "whole numbers": Hard(Counted),
    "recurrent": Hard(Recurrent),
    "recomputed": Hard(lambda: Checkpointed(Residual(), Residual(), Redone())),
    "recomputed, reentrant": Hard(lambda: Reentrant(Residual())),
    "dropout": Hard(lambda: nn.Sequential(nn.Linear(5, 7), nn.Dropout(0.3), nn.Linear(7, 3))),
    "GPT": language(lambda: gpt(DEEP)),
    "GPT, grouped keys": language(lambda: gpt(GROUPED, flash=False)),
    "GPT, uneven": language(lambda: gpt(UNEVEN)),
    "GPT, of today": language(lambda: gpt(TODAY)),
    "GPT, parallel": language(lambda: gpt(NEOX, flash=False)),
    "GPT, frozen ends": language(lambda: gpt(DEEP, "embedding", "positions", "blocks.0")),
    "GPT, frozen norms": language(lambda: gpt(TINY, "norm", "out.bias", "1.attention")),
    "GPT, recomputed": language(lambda: gpt(TINY, change=recompute_full)),
    "GPT, attention recomputed": language(lambda: gpt(TINY, change=recompute_selective)),
    "GPT, dropout": language(lambda: gpt(TINY, flash=False, dropout=0.2, change=recompute_full)),
    "BERT": language(lambda: BERT(TINY)),
}


def build(name: str, seed: int, dtype: torch.dtype = torch.float64) -> nn.Module:
    """The module of this name, from a seed."""
    torch.manual_seed(seed)
    return HARD[name].build().to(dtype)
