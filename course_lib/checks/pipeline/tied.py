"""Exercise 5 of 08_pipeline: one weight on two stages; mistakes in `tied_answers.py`."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.ddp.parts import row
from course_lib.checks.exercise import CheckFailed, Exercise
from course_lib.checks.expect import told
from course_lib.checks.pipeline.tied_answers import MISTAKES, NUM_NUMBERS, Weight, sum_tied
from course_lib.core import COMMUNICATION_KINDS, Event
from course_lib.ranks import RankError, Ranks, record

WORLD_SIZES = (3, 2, 4, 1)


@dataclass
class Seen:
    """The results of one rank after one call."""

    grad: Tensor | None
    changed: bool
    calls: list[Event]


def _sums(rank: int, answer: Callable[..., Any], p: int) -> list[Seen]:
    """Check a trained weight in two steps, then a frozen one."""
    members = sorted({0, p - 1})
    ends = dist.new_group(members)
    weight = nn.Parameter(_numbers()) if rank in members else None
    return [_one(answer, weight, ends, slope) for slope in (10.0**rank, 2 * 10.0**rank, None)]


def _numbers() -> Tensor:
    """Return 1, 2, 3 and so on, and a little more than float32 can hold."""
    return torch.arange(1.0, NUM_NUMBERS + 1).double() * (1 + 1e-9)


def _one(answer: Callable[..., Any], weight: Weight, ends: Any, slope: float | None) -> Seen:
    """Call the answer once, with a gradient of `slope` times the weight, or with none."""
    before = torch.empty(0) if weight is None else weight.detach().clone()
    if weight is not None:
        weight.requires_grad_(slope is not None)
        weight.grad = None if slope is None else before * slope
    with record() as log:
        answer(weight, ends)
    calls = [event for event in log.events if event.kind in COMMUNICATION_KINDS]
    if weight is None:
        return Seen(None, False, calls)
    return Seen(weight.grad, not torch.equal(weight.detach(), before), calls)


def check_tied(answer: Callable[..., Any]) -> str:
    """Check 1 to 4 ranks: the sum on both ends, nothing between, a frozen weight unchanged."""
    for p in WORLD_SIZES:
        with Ranks(p) as ranks:
            try:
                by_rank = ranks.run(_sums, answer, p)
            except RankError as error:
                raise told(error, p, _why_stuck(error, p)) from None
        for step in range(3):
            for rank, steps in enumerate(by_rank):
                _judge(steps[step], rank, p, step)
    return "The gradient of both uses, on both ends, with one message each; the middle is silent."


def _judge(seen: Seen, rank: int, p: int, step: int) -> None:
    where = f"rank {rank} of {p}" + (", a frozen weight" if step == 2 else f", step {step + 1}")
    if seen.changed:
        raise CheckFailed(
            f"{where}: the weight has changed. Add up the gradients: then the optimizer takes the "
            "same step on both copies, and they stay equal by themselves."
        )
    if 0 < rank < p - 1 and seen.calls:
        raise CheckFailed(
            f"{where} calls {seen.calls[0].kind}; it holds no copy. Only the group `ends` talks."
        )
    if step == 2 and seen.grad is not None:
        raise CheckFailed(
            f"{where}: need no gradient; got {row(seen.grad)}. With one, an optimizer steps, and "
            "weight decay or momentum moves what is frozen: leave weight.grad None."
        )
    if step < 2 and rank in (0, p - 1):
        _expect_sum(where, seen.grad, rank, p, 1.0 + step)
    budget = 0 if step == 2 else 2 * 8 * NUM_NUMBERS
    num_bytes = sum(call.num_bytes for call in seen.calls)
    if num_bytes > budget:
        raise CheckFailed(f"{where}: {num_bytes} bytes in messages; need at most {budget}.")


def _expect_sum(where: str, got: Tensor | None, rank: int, p: int, turn: float) -> None:
    one = _numbers() * turn
    first, last = one, one * 10.0 ** (p - 1)
    total = first if p == 1 else first + last
    if isinstance(got, Tensor) and torch.allclose(got, total, rtol=1e-12):
        return
    causes = [
        (total / 2, "That is the mean: the two uses of one weight add up."),
        (first if rank == 0 else last, f"That is this rank's own half: {OTHER_HALF}"),
        (first, "That is the first stage's half alone: the two have to be added."),
        (last, "That is the last stage's half alone: the two have to be added."),
        (2 * total, "Added twice: once is enough."),
        (total, "Its last digits are lost: add in the gradient's own dtype."),
    ]
    says = "With one stage there is one copy, and its gradient is whole." if p == 1 else ""
    if not says and isinstance(got, Tensor):
        says = next((why for wrong, why in causes if torch.allclose(got, wrong)), BOTH_ENDS)
    raise CheckFailed(f"{where}: need the gradient {row(total)}; got {row(got)}. {says}".rstrip())


OTHER_HALF = "where is the other one's? It has to be in weight.grad itself when you return."
BOTH_ENDS = "Both ends need the sum: the collective that leaves it on all members of a group?"


def _why_stuck(error: RankError, p: int) -> str:
    raised = " ".join(message for _, message in error.failures.values())
    if error.kind == "hang":
        return "Only the ranks of `ends` hold a copy: give the call group=ends."
    if "NoneType" in raised or "None" in raised:
        return (
            "In the middle weight is None, and a frozen weight has no gradient (grad is None): "
            "both have nothing to add."
        )
    return ""


TIED = Exercise(
    key="pipeline-5",
    title="add up a tied weight",
    check=check_tied,
    reference=sum_tied,
    mistakes=MISTAKES,
)
