"""What a training loop does beside its steps: scenarios with a law that every engine has to keep.

A scenario trains through a `Loop`: a plain module in one process, or the same one under an engine.
All ranks see the same inputs, so the weights are those of one process.
"""

import warnings
from collections.abc import Callable
from contextlib import nullcontext, suppress
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from course_lib.core import CourseError

# float64: a mean over ranks rounds once more than one process
TOLERANCE = {"rtol": 1e-12, "atol": 1e-12}


class Net(nn.Module):
    """Two blocks, and a head outside of them."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(3, 3) for _ in range(2))
        self.head = nn.Linear(3, 2)

    def forward(self, x):
        for block in self.blocks:
            x = torch.tanh(block(x))
        return self.head(x)


class Complex(nn.Module):
    """Complex weights beside real ones."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.scale = nn.Parameter(torch.randn(3, dtype=torch.float64))

    def forward(self, x):
        return torch.view_as_real(x * self.scale * self.turn)


class Normed(Net):
    """A block whose weight a hook computes from others before forward."""

    def __init__(self):
        super().__init__()
        with warnings.catch_warnings(action="ignore"):  # this weight_norm is old, and still used
            nn.utils.weight_norm(self.blocks[1])


class Penalized(nn.Linear):
    """It leaves a term of the loss in an attribute, as routers of experts do."""

    def forward(self, x):
        output = super().forward(x)
        self.penalty = self.weight.square().sum()  # after the output: backward begins with it
        return output


class PenalizedInDict(Penalized):
    """The term lies in an object, in a dict."""

    class Stats:
        penalty = 0.0

    @property
    def penalty(self):
        return self.stats["terms"][0].penalty

    @penalty.setter
    def penalty(self, value):
        stats = self.Stats()
        stats.penalty = value
        self.stats = {"terms": [stats]}


class Penalizing(Net):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Penalized(3, 3), PenalizedInDict(3, 3)])


class InPlace(Net):
    """A block that changes its input, a part it may leave out, and a buffer of one number."""

    class Block(nn.Linear):
        def forward(self, x):
            x += self.bias
            return super().forward(x)

    def __init__(self):
        super().__init__()
        self.skips = False
        self.blocks[1] = self.Block(3, 3)
        self.register_buffer("expanded", torch.randn(1, 1).expand(3, 3))

    def forward(self, x):
        for block in self.blocks[int(self.skips) :]:
            x = torch.tanh(block(x * 2)) @ self.expanded
        return self.head(x)


class Loop:
    """A plain module with SGD in one process; an engine's loop overrides what it does otherwise."""

    SGD: ClassVar = {"lr": 0.1, "weight_decay": 0.1}  # so it matters who is not stepped

    def __init__(self, build: Callable[[], nn.Module] = Net, frozen: str = "nothing") -> None:
        torch.manual_seed(0)
        self.module = build().to(torch.float64) if build is not Complex else build()
        for name, param in self.module.named_parameters():
            param.requires_grad_(frozen not in name)
        self.wrap()

    def wrap(self) -> None:
        self.model: Any = self.module
        self.optimizer: Any = torch.optim.SGD(self.module.parameters(), **self.SGD)

    def params(self) -> list[torch.Tensor]:
        return list(self.model.parameters())

    def loss(self, scale: float = 1.0) -> torch.Tensor:
        x = torch.arange(6.0, dtype=torch.float64).view(2, 3) * scale
        loss = self.model(x).square().sum()
        return loss + sum(x.penalty for x in self.module.modules() if isinstance(x, Penalized))

    def no_sync(self):
        return nullcontext()

    def finish(self) -> None:
        """Complete the gradients."""

    def clip(self, max_norm: float) -> None:
        nn.utils.clip_grad_norm_(self.params(), max_norm)

    def zero_grad(self, **options: bool) -> None:
        self.optimizer.zero_grad(**options)

    def step(self) -> None:
        self.loss().backward()
        self.finish()
        self.optimizer.step()

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in self.model.state_dict().items()}


# --- scenarios, which train a loop


def fail(loop):
    """A backward that raises an error when it comes to the first block."""

    def fault(_grad):
        raise ZeroDivisionError

    def watch(_module, _args, output):
        output.register_hook(fault)

    hook = loop.module.blocks[0].register_forward_hook(watch)
    with suppress(ZeroDivisionError):
        loop.loss(10.0).backward()
    hook.remove()


def failed_backward(loop, **options):
    for _ in range(2):
        loop.step()
        loop.zero_grad()
        fail(loop)
        loop.zero_grad(**options)
    loop.step()


def failed_among_others(loop, clear=lambda loop: None):
    """A backward that raises an error after one whose gradients it was to be added to."""
    with loop.no_sync():
        loop.loss(2.0).backward()
    fail(loop)
    clear(loop)
    loop.step()


def failed_in_no_sync(loop, clear=lambda loop: None):
    with loop.no_sync():
        fail(loop)
    clear(loop)
    loop.step()


def changed_through_data(loop):
    """A forward without a backward, as of a validation loss, then an average of weights."""
    loop.loss()
    for param in loop.params():
        param.data.mul_(1.5)
    loop.step()


def freeze_and_unfreeze(loop):
    for trains in (True, False, True):
        loop.module.blocks[0].requires_grad_(trains)
        loop.zero_grad()
        loop.step()


def freeze_what_is_gathered(loop):
    """The head is frozen, then trained again, while a forward has left it whole."""
    for trains in (False, True):
        loop.loss()
        loop.module.head.requires_grad_(trains)
        loop.zero_grad()
        loop.step()


def unfreeze(loop):
    loop.step()
    loop.zero_grad()
    loop.module.head.requires_grad_(True)
    loop.step()


def cleared_in_no_sync(loop):
    """As the generator's step of a GAN goes through the discriminator."""
    for _ in range(2):
        with loop.no_sync():
            loop.loss(10.0).backward()
        loop.zero_grad()
        loop.step()


def accumulated(loop):
    with loop.no_sync():
        for _ in range(2):
            loop.loss().backward()
    loop.step()


def dropped(loop):
    """A backward whose gradients nobody wants: the loss is not finite, the weights shrink."""
    loop.loss(10.0).backward()
    loop.model.zero_grad()
    with torch.no_grad():
        for param in loop.params():
            param.mul_(0.5)
    loop.step()


def penalized(loop):
    """A term of the loss that reads parameters outside of the model."""
    (loop.loss() + sum(param.norm() for param in loop.params())).backward()
    loop.finish()
    loop.optimizer.step()


def hooked(loop):
    """A hook that scales gradients, one that removes itself, and an optimizer in backward."""

    def once(param):
        once_of.pop(param).remove()

    def step(param):
        optimizers[param].step()
        optimizers[param].zero_grad()

    params = loop.params()
    optimizers = {param: torch.optim.SGD([param], **loop.SGD) for param in params}
    once_of = {param: param.register_post_accumulate_grad_hook(once) for param in params}
    for param in params:
        param.register_hook(lambda grad: grad * 2)
        param.register_post_accumulate_grad_hook(step)
    for _ in range(2):
        loop.loss().backward()


def skipped(loop, **options):
    """A block without a gradient after one of zeros, or after none."""
    loop.step()
    loop.zero_grad(**options)
    loop.module.skips = True
    loop.step()


def by_the_optimizer(loop):
    """Everything through the optimizer, as in one process."""
    for _ in range(2):
        loop.optimizer.zero_grad()
        loop.loss().backward()
        loop.finish()
        loop.clip(0.5)
        loop.optimizer.step()


def steps(loop):
    for _ in range(2):
        loop.zero_grad()
        loop.step()


# --- the law, and what is told


def trained(loop: type[Loop], scenario, options, arguments) -> dict[str, torch.Tensor]:
    made = loop(**options)
    scenario(made, **arguments)
    return made.weights()


def assert_law(pools, world_size, loop, scenario, options=None, arguments=None):
    """The ranks end with the weights of one process."""
    how = scenario, options or {}, arguments or {}
    wanted = trained(Loop, *how)
    for found in pools(world_size).run(lambda rank: trained(loop, *how)):
        torch.testing.assert_close(found, wanted, **TOLERANCE)


def assert_told(pools, world_size, table):
    """Every rank raises a CourseError with these words in it: {words: function of a rank}."""

    def told(rank):
        found = []
        for broken in table.values():
            with pytest.raises(CourseError) as caught:
                broken(rank)
            found.append(str(caught.value))
        return found

    for found in pools(world_size).run(told):
        for words, sentence in zip(table, found, strict=True):
            assert words in sentence, sentence
