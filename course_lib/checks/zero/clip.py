"""Exercise 5 of 09_zero: clip by the norm of the whole gradient.

The planted mistakes are in `clip_answers.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake
from course_lib.checks.expect import run
from course_lib.checks.zero import clip_answers as planted
from course_lib.checks.zero.parts import WORLD_SIZES, calls_in
from course_lib.ranks import Ranks, record

LIMITS = (6.0, 1e6)  # the first one clips
NEAR = 1e-5  # PyTorch adds 1e-6 to the norm it divides by
HANG = (
    "A rank that sees a small norm of its own must take part, too: call all_reduce on every rank, "
    "before you decide."
)


@dataclass
class Clipped:
    """The results of one call on one rank."""

    norm: Any
    grads: list[Tensor]
    calls: list[tuple[str, int]]


def shards(rank: int) -> list[Tensor]:
    """Return shards of gradients, different on every rank; one of zeros is padding.

    Rank 0's own norm is below the limit that clips.
    """
    one = torch.tensor([3.0, -4.0, 0.0]).double() * 10**rank
    return [one, torch.tensor([[2.0], [1.0]]).double() * 10**rank, torch.zeros(2).double()]


def _clip(rank: int, answer: Callable[..., Any]) -> list[Clipped]:
    found = []
    for limit in LIMITS:
        grads = shards(rank)
        with record() as log:
            norm = answer([*grads], limit)  # a list of its own: who rebinds in it scales nothing
        found.append(Clipped(norm, grads, calls_in(log.events)))
    return found


def check_clip(answer: Callable[..., Any]) -> str:
    """Check 1 to 4 ranks, a limit that clips and one that does not; a single number is sent."""
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            by_rank = run(ranks, _clip, answer, on={"hang": HANG, "mismatch": HANG})
        for number, limit in enumerate(LIMITS):
            for rank, clipped in sorted(enumerate(by_rank), key=lambda one: -(one[0] == p // 2)):
                where = f"rank {rank} of {p}, max_norm {limit:g}"
                _judge(clipped[number], where, rank, p, limit)
    return "One norm for all shards, one number on the wire, and nothing is scaled up."


def norms(p: int) -> list[float]:
    """Return every rank's own norm."""
    return [torch.cat([g.flatten() for g in shards(rank)]).norm().item() for rank in range(p)]


def _judge(got: Clipped, where: str, rank: int, p: int, limit: float) -> None:
    own = norms(p)
    norm = sum(one**2 for one in own) ** 0.5
    wanted = [grad * min(1.0, limit / norm) for grad in shards(rank)]
    if got.norm is None:
        raise CheckFailed(f"{where}: need the norm; got None. Does your function return it?")
    told = float(got.norm)
    if abs(told / norm - 1) > 1e-5:
        raise CheckFailed(
            f"{where}: the whole gradient has a norm of {norm:g}; got {told:g}. "
            f"{_why_norm(told, own, rank, norm, limit)}"
        )
    big = [call for call in got.calls if call[1] > 8]
    if big or len(got.calls) > 1:
        raise CheckFailed(
            f"{where}: {len(got.calls)} call{'s' * (len(got.calls) > 1)} of "
            f"{sum(size for _, size in got.calls)} bytes; need "
            "one all_reduce of one number. The squares of the shards add up: sum them first."
        )
    for is_now, need in zip(got.grads, wanted, strict=True):
        if not torch.allclose(is_now, need, rtol=NEAR):
            raise CheckFailed(
                f"{where}: need the shard {need.flatten().tolist()}; got "
                f"{is_now.flatten().tolist()}. {_why_grads(got, rank, norm, own, limit)}"
            )


def _why_norm(told: float, own: Sequence[float], rank: int, norm: float, limit: float) -> str:
    p = len(own)
    causes = [
        (sum(own), "Norms do not add up, their squares do: take the root after the all_reduce."),
        (sum(own) / p, "That is a mean of norms: the squares add up, and then comes the root."),
        (norm / p**0.5, "A mean of the squares: they are parts of one sum. Do not divide by p."),
        (norm**2, "The root is missing."),
        (own[rank], "That is this rank's own norm: each rank would scale by another factor."),
        (max(own), "That is the largest norm of a rank: the squares add up."),
        (min(norm, limit), "That is the norm after clipping: return what it was before."),
    ]
    look = "The squares of all numbers of all shards add up, on every rank; then comes the root."
    return next((says for wrong, says in causes if abs(told / wrong - 1) < 1e-5), look)


def _why_grads(got: Clipped, rank: int, norm: float, own: Sequence[float], limit: float) -> str:
    before = shards(rank)
    causes = [
        (1.0, "Nothing has changed: scale in place, with mul_."),
        (limit / norm, "A small gradient is scaled up: the factor is 1 at most."),
        (min(1.0, limit / own[rank]), "Scaled by this rank's own norm: the ranks drift apart."),
        (norm / limit, "The wrong way round: the factor is max_norm / norm."),
        (min(1.0, limit / norm**2), "Divided by the square of the norm: take the root first."),
        (1 / norm, "Scaled to a norm of 1, not of max_norm."),
    ]
    for factor, says in causes:
        if all(
            torch.allclose(a, b * factor, rtol=NEAR) for a, b in zip(got.grads, before, strict=True)
        ):
            return says
    return "One factor for all shards on all ranks: min(1, max_norm / norm)."


CLIP = Exercise(
    key="zero-5",
    title="clip by the whole norm",
    check=check_clip,
    reference=planted.clip_shards,
    mistakes=planted.mistakes(Mistake),
)
