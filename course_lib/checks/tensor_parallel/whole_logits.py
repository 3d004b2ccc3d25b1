"""The loss that exercise 4 of 07_tensor_parallel splits: the right one, and some wrong ones."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from course_lib.checks.on_ranks import At
from course_lib.checks.tensor_parallel.parts import shard_of
from course_lib.models import IGNORED

SCALE = 7.0  # the gradient from above


@dataclass(frozen=True)
class Case:
    """Whole logits and targets, the same on every rank; `backwards`: rank 0 has the last part.

    With further targets, the loss is that of three calls: see `total`.
    """

    logits: Tensor
    targets: Tensor
    backwards: bool = False
    further: Tensor | None = None
    frozen: bool = False  # logits need no gradient
    no_grad: bool = False

    @property
    def num_losses(self) -> int:
        """Return how often the loss is asked for."""
        return 1 if self.further is None else 3

    def total(self, loss: Callable[..., Any], logits: Tensor, targets: Tensor) -> Any:
        """Return the loss; with further targets, that of other logits and other targets is in it.

        What a loss keeps for backward is needed after the next one was computed. Each of the three
        has another number of targets that count, or other logits of the same shape.
        """
        total = loss(logits, targets)
        if self.further is None:
            return total
        return total + loss(logits.flip(0), targets) + loss(logits, self.further)

    def shard(self, p: int, rank: int) -> Tensor:
        """Return which tokens of the vocabulary a rank has."""
        return shard_of(self.logits.shape[1], p, p - 1 - rank if self.backwards else rank)

    @property
    def counted(self) -> Tensor:
        """Return which targets have a loss."""
        return self.targets != IGNORED


@cache
def cases() -> dict[str, Case]:
    """Return the cases by their labels."""
    logits = _random(6, 23)
    targets = torch.tensor([0, 22, 8, 12, 5, 17])
    ignored = torch.tensor([0, IGNORED, 8, 12, IGNORED, 17])
    tall = logits.clone()
    tall[:, 20] += 900.0  # no exponential of it fits, and rank 0 knows nothing of it
    apart = logits + torch.tensor([-900.0, 0.0, 900.0]).double().repeat(2)[:, None]
    return {
        "plain logits": Case(logits, targets),
        "two targets of -100": Case(logits, ignored),
        "three losses, one backward": Case(
            logits, ignored, further=torch.tensor([IGNORED, IGNORED, 1, IGNORED, 22, 9])
        ),
        "logits that need no gradient": Case(logits, ignored, frozen=True),
        "under torch.no_grad()": Case(logits, ignored, frozen=True, no_grad=True),
        "float32": Case(_random(40, 11).float(), torch.arange(40) % 11),
        "a logit of 900": Case(tall, targets),
        "a token near 900, one near -900": Case(apart, targets),
        "5 tokens, rank 0 has the last part of 10": Case(
            _random(5, 10), torch.tensor([3, 9, 4, 6, IGNORED]), backwards=True
        ),
        "one token, all logits zero": Case(torch.zeros(1, 9).double(), torch.tensor([4])),
        "all targets on one rank": Case(_random(3, 37), torch.tensor([36, 35, 36])),
        # these targets have the largest logit; y + (total - y) is not total on 3 ranks
        "bfloat16": Case(_random(4, 12, seed=107).bfloat16(), torch.tensor([9, 2, 3, IGNORED])),
    }


def _random(*shape: int, seed: int = 7) -> Tensor:
    random = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=random, dtype=torch.double) * 3


def case_of(at: At) -> Case:
    """Return the case of this label."""
    return cases()[at.label]


def _mine(at: At) -> Tensor:
    return case_of(at).shard(at.world_size, at.rank)


@cache
def _whole(name: str) -> tuple[Tensor, Tensor]:
    """Return the loss of one process, and the gradient of its logits."""
    case = cases()[name]
    logits = case.logits.double().requires_grad_()
    loss = case.total(F.cross_entropy, logits, case.targets)
    (grad,) = torch.autograd.grad(SCALE * loss, logits)
    return loss.detach().to(case.logits.dtype), grad.to(case.logits.dtype)


def loss_of(at: At) -> Tensor:
    """Return the right loss."""
    return _whole(at.label)[0]


def grad_of(at: At) -> Any:
    """Return the right gradient of this rank's logits; None where they need none."""
    return None if case_of(at).frozen else _whole(at.label)[1][:, _mine(at)]


def _mean(at: At, losses: Tensor) -> Tensor:
    """Return the mean over the targets that count."""
    counted = case_of(at).counted
    return torch.where(counted, losses, 0.0).sum() / counted.sum()


def _here(at: At) -> Tensor:
    """Return which targets are on this rank."""
    return torch.isin(case_of(at).targets, _mine(at))


def _target_logits(at: At) -> Tensor:
    case = case_of(at)
    return case.logits.gather(-1, case.targets.where(case.counted, 0)[:, None])[:, 0]


def _own_losses(at: At, shift: float) -> Tensor:
    """Return losses over this rank's own logits, less `shift` times the largest of them."""
    own = case_of(at).logits[:, _mine(at)]
    top = own.max(-1).values * shift
    return own.logsumexp(-1) - top - (_target_logits(at) - top) * _here(at)


own_vocabulary: tuple[Callable[[At], Tensor], ...] = (
    lambda at: _mean(at, _own_losses(at, 0.0)),
    lambda at: _mean(at, _own_losses(at, 1.0)),
    lambda at: _own_losses(at, 0.0)[_here(at)].mean(),
)


own_tokens: tuple[Callable[[At], Tensor], ...] = (
    lambda at: _of_own_tokens(at).sum() / case_of(at).counted.sum(),
    lambda at: _of_own_tokens(at).mean(),
)


def _of_own_tokens(at: At) -> Tensor:
    """Return the losses of the tokens whose target is on this rank."""
    losses = F.cross_entropy(case_of(at).logits, case_of(at).targets, reduction="none")
    return losses[_here(at)]


def mean_maximum(at: At) -> Tensor:
    """Return the mean of the largest logits."""
    return _mean(at, case_of(at).logits.max(-1).values)


def own_maximum(at: At) -> Tensor:
    """Return the loss where each rank subtracts its own maximum from all of its logits."""
    case, total, owned = case_of(at), torch.tensor(0.0), torch.tensor(0.0)
    for other in at.everyone:
        own = case.logits[:, _mine(other)]
        top = own.max(-1).values
        total = total + (own - top[:, None]).exp().sum(-1)
        owned = owned + (_target_logits(at) - top) * _here(other)
    return _mean(at, total.log() - owned)


def _brought(at: At, first_of: Callable[[At], int], anyone: bool) -> Tensor:
    """Return the loss where rank r takes its part to begin at first_of(r).

    `anyone`: where it does not have the target, it brings the logit that is nearest to it.
    """
    case = case_of(at)
    shifted = case.logits - case.logits.max(-1, keepdim=True).values
    brought = torch.zeros_like(_target_logits(at))
    for other in at.everyone:
        own, local = shifted[:, _mine(other)], case.targets - first_of(other)
        index = local.clamp(0, own.shape[1] - 1)
        brought = brought + own.gather(-1, index[:, None])[:, 0] * ((index == local) | anyone)
    return _mean(at, shifted.logsumexp(-1) - brought)


def nearest(at: At) -> Tensor:
    """Return the loss where each rank brings the logit that is nearest to the target."""
    return _brought(at, lambda other: int(_mine(other)[0]), anyone=True)


def from_rank(at: At) -> Tensor:
    """Return the loss where a part is taken to begin at rank * its size."""
    return _brought(at, lambda other: other.rank * len(_mine(other)), anyone=False)


def from_last_call(at: At) -> Tensor:
    """Return the loss where a part is taken to begin where that of the first case does."""
    kept = next(iter(cases().values()))
    return _brought(at, lambda o: int(kept.shard(o.world_size, o.rank)[0]), anyone=False)


def own_logit(at: At) -> Tensor:
    """Return the loss where a target's logit is known on its own rank only."""
    top = case_of(at).logits.max(-1).values
    return _mean(
        at, case_of(at).logits.logsumexp(-1) - top - (_target_logits(at) - top) * _here(at)
    )


left_out_after_shift: tuple[Callable[[At], Tensor], ...] = (
    lambda at: _of_those(at, lambda shifted: shifted != IGNORED),
    lambda at: _of_those(at, lambda shifted: shifted >= 0),
)


def _of_those(at: At, counts: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the mean over the tokens that count by their targets, less the rank's first entry."""
    case = case_of(at)
    shifted = case.logits - case.logits.max(-1, keepdim=True).values
    own = case.counted * (_target_logits(at) - case.logits.max(-1).values)
    return (shifted.logsumexp(-1) - own)[counts(case.targets - _mine(at)[0])].mean()


def through_maximum(at: At) -> Tensor:
    """Return the gradient that a maximum which is not detached leads to."""
    case, mine = case_of(at), _mine(at)
    share = case.logits.softmax(-1)[:, mine].sum(-1)
    top = F.one_hot(case.logits[:, mine].argmax(-1), len(mine))
    scale = SCALE * case.counted.double() / case.counted.sum()
    return grad_of(at) + ((_here(at).double() - share) * scale)[:, None] * top


def is_own_tokens(at: At, got: Tensor, _item: Any) -> bool:
    """Return whether the gradient is there only where the target is on this rank."""
    here = _here(at)
    same = torch.allclose(got[here], grad_of(at)[here])
    return not here.all() and not got[~here].any() and same


def is_unmasked(at: At, got: Tensor, _item: Any) -> bool:
    """Return whether the gradient is wrong where the target is -100, and nowhere else."""
    counted = case_of(at).counted
    return torch.allclose(got[counted], grad_of(at)[counted]) and bool(got[~counted].any())
