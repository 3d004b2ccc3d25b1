"""Exercise 5 of 08_pipeline: one weight on the first and on the last stage."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.pipeline.parts import NO_HANDLE, UNDER_WAY
from course_lib.checks.properties import (
    DIGITS,
    FROZEN,
    KEEPS_DTYPE,
    NAN,
    NOT_WAITED,
    ONE_CALL,
    REDUCES,
    SEEDS,
    TRAINS,
)
from course_lib.checks.watch import ALWAYS, OVERWRITTEN, WAIT, Step, Watch

ZEROS, NAN_FIRST, FROZEN_WEIGHT = (
    "zeros on the first stage",
    "nan on the first stage",
    "a frozen weight",
)
MATRIX, TRANSPOSED = "a bfloat16 matrix", "a transposed weight"
MIXED = "a gradient transposed on one end"
STEPS = ("step 1", "step 2", ZEROS, NAN_FIRST)
GRADIENT, MESSAGES = "gradient", "messages"
BOTH_WAYS = ("all_", "barrier")  # calls that send a message each way

ENDS = Cause(
    "Both ranks of the group `ends`, and only they, make the call, whatever their numbers are: "
    "give it group=ends, which need not be the first and the last rank of the world. With send and "
    "recv, one end sends first while the other one receives."
)
NOT_THE_WORLD = Cause(
    "Here the world holds two pipelines, and `ends` is not its first and its last rank: ask the "
    "group `ends` who is in it, or leave it to a collective."
)
NOTHING_TO_ADD = Cause(
    "In the middle weight is None, and a frozen weight has no gradient (grad is None): both have "
    "nothing to add."
)
WEIGHTS = Cause(
    "Add up the gradients: then the optimizer takes the same step on both copies, and they stay "
    "equal by themselves."
)
IN_PLACE = Cause("weight.grad is gone: all_reduce works in place, and returns None.")
ONE_COPY = Cause("With one stage there is one copy, and its gradient is whole.")
MEAN = Cause("That is the mean: the two uses of one weight add up.")
OTHER_HALF = Cause(
    "That is this rank's own half; the other rank's is missing. The sum has to be in weight.grad "
    "itself when you return."
)
ONE_ALONE = Cause("That is the half of one end alone: the two have to be added.")
TWICE = Cause("Added twice: add it once.")
COPY_SENT = Cause(
    "contiguous(), reshape() and flatten() copy a transposed gradient, and the sum went into the "
    "copy: write it back into weight.grad."
)
LAYOUT = Cause(
    "A collective adds what stands at the same place in memory, and one end's gradient is "
    "transposed: make it contiguous() first."
)
MOVED = Cause(
    "The right numbers at wrong places: transpose the sum back, as the gradient was transposed, or "
    "use contiguous(), which leaves every number at its index."
)
BOTH_ENDS = Cause(
    "Both ends need the sum of the two gradients, undivided: use an all-reduce over `ends`."
)
ONE_MESSAGE = Cause(
    "Send the whole gradient in one message each way. A rank without a gradient, as in the middle "
    "or with a frozen weight, sends nothing."
)


# --- on the ranks


def _sums(
    rank: int, answer: Callable[..., Any], labels: Sequence[str] = STEPS, pipelines: int = 1
) -> dict[str, Any]:
    """Call the answer with each of these weights, in a world of one or more pipelines.

    It may refuse transposed tensors, as messages do: then it gets contiguous ones.
    """
    watch, refuses, p = Watch(), False, dist.get_world_size() // pipelines
    all_ends = [(first, first + p - 1) for first in range(0, p * pipelines, p)]
    groups = [dist.new_group(sorted(set(ends))) for ends in all_ends]
    ends, group = all_ends[rank // p], groups[rank // p]
    for label in labels:
        weight = _weight(label, rank, ends) if rank in ends else None
        if refuses:
            _lay_out(weight)
        num_bytes = weight.nbytes if weight is not None and weight.grad is not None else 0
        with watch.step(label, weight=weight) as step:
            try:
                answer(weight, group)
            except (RuntimeError, ValueError) as error:
                if label != TRANSPOSED or "contiguous" not in str(error):
                    raise
                refuses = True
                _lay_out(weight)
                answer(weight, group)
        grad = None if weight is None else weight.grad
        step.show(**{GRADIENT: grad, MESSAGES: _messages(step, num_bytes)})
    return watch.seen


def _weight(label: str, rank: int, ends: tuple[int, int]) -> nn.Parameter:
    """Return the weight of one end, with the gradient that backward left there."""
    first, numbers = rank == ends[0], _numbers(label)
    weight = nn.Parameter(numbers.clone(), requires_grad=label != FROZEN_WEIGHT)
    times = {"step 2": 2.0, ZEROS: float(not first), NAN_FIRST: math.nan if first else 1.0}
    if weight.requires_grad:
        half = numbers * times.get(label, 1.0) * 10**rank
        weight.grad = half if first or label != MIXED else half.contiguous()
    return weight


def _numbers(label: str) -> Tensor:
    """Return 1 to 6, and a little more than float32 can hold; or a matrix of 1 to 6."""
    if label == MATRIX:
        return torch.arange(1, 7).bfloat16().view(2, 3)
    if label in (TRANSPOSED, MIXED):
        return torch.arange(1, 7).double().view(2, 3).t()
    return torch.arange(1, 7).double() * (1 + 1e-9)


def _lay_out(weight: nn.Parameter | None) -> None:
    if weight is not None and weight.grad is not None:
        weight.data, weight.grad = weight.data.contiguous(), weight.grad.contiguous()


def _messages(step: Step, num_bytes: int) -> str:
    """Return whether a rank has kept to the budget: one message of so many bytes each way."""
    calls = [line for line in step.order if line != WAIT]
    messages = sum(2 if line.startswith(BOTH_WAYS) else 1 for line in calls)
    sent_bytes = sum(int(line.split()[2]) for line in calls)
    most = 2 if num_bytes else 0
    if messages <= most and sent_bytes <= most * num_bytes:
        return "in the budget"
    return f"{messages} of {sent_bytes} bytes; the budget is {most} of {most * num_bytes} bytes"


def _runs(p: int) -> list[Mapping[str, Any]]:
    two = [{"pipelines": 2}] if p == 4 else []
    apart = [{"labels": labels} for labels in ((FROZEN_WEIGHT,), (MATRIX,), (TRANSPOSED, MIXED))]
    return [{}, *apart[:2], *two, apart[2]]


# --- mistakes

Weight = nn.Parameter | None


def _everybody(weight: Weight, _ends: Any) -> None:
    grad = torch.zeros(6).double() if weight is None else weight.grad
    if grad is not None:
        dist.all_reduce(grad)


def _exchanged(weight: Any, other: int, message: Tensor) -> None:
    theirs, sending = torch.empty_like(weight.grad), dist.isend(message, other)
    dist.recv(theirs, other)
    weight.grad += theirs
    if sending:
        sending.wait()


def _by_ranks_of_the_world(weight: Weight, _ends: Any) -> None:
    other = dist.get_world_size() - 1 - dist.get_rank()
    if weight is not None and weight.grad is not None and other != dist.get_rank():
        _exchanged(weight, other, weight.grad.clone())


def _adds_while_it_sends(weight: Weight, ends: Any) -> None:
    if weight is not None and weight.grad is not None and dist.get_world_size(ends) > 1:
        members = dist.get_process_group_ranks(ends)
        _exchanged(weight, members[dist.get_rank() == members[0]], weight.grad)


LAYS_OUT = "weight.grad = weight.grad.contiguous()"
SUMS = "dist.all_reduce(weight.grad, group=ends)"
BACK = "weight.grad.copy_(total.view_as(weight.grad))"
ASKS = "if weight is not None and weight.grad is not None:"
KINDS = (NOT_WAITED, ONE_CALL, NAN, DIGITS, FROZEN)

TIED = Exercise(
    key="pipeline-5",
    title="add up a tied weight",
    library=("course_lib.pipeline.stage:tied_summed",),
    check=ByExample(
        observe_on_rank=_sums,
        runs=_runs,
        facets=(*ALWAYS, GRADIENT, MESSAGES),
        looks=(
            ("hang", ENDS),
            ("mismatch", ENDS),
            (OVERWRITTEN, UNDER_WAY),
            (GRADIENT, BOTH_ENDS),
            (MESSAGES, ONE_MESSAGE),
        ),
        success="The gradient of both uses, on both ends, one message each; the middle is silent.",
    ),
    wrong=(
        Edit(SUMS, f"{SUMS}\nweight.grad /= dist.get_world_size(ends)", MEAN),
        Edit(SUMS, "pass", OTHER_HALF),
        Edit("weight.grad, group", "weight.grad.clone(), group", OTHER_HALF),
        Edit(SUMS, "dist.broadcast(weight.grad, group=ends, group_src=0)", ONE_ALONE),
        Edit(SUMS, f"{SUMS}\n{SUMS}", TWICE),
        Edit(SUMS, f"{SUMS}\nif dist.get_world_size() == 1:\n    weight.grad *= 2", ONE_COPY),
        Edit(SUMS, "dist.reduce(weight.grad, group=ends, group_dst=0)", BOTH_ENDS),
        Edit(SUMS, "dist.all_reduce(weight.data, group=ends)", WEIGHTS),
        Edit(", group=ends", "", ENDS),
        Edit(f"{ASKS[:-1]}", f"{ASKS[:-1]} and weight.grad.any()", ENDS),
        Own(_by_ranks_of_the_world, NOT_THE_WORLD),
        Own(_adds_while_it_sends, UNDER_WAY),
        Own(_everybody, ONE_MESSAGE),
        Edit(ASKS, "if weight is not None:", NOTHING_TO_ADD),
        Edit(ASKS, "if weight.grad is not None:", NOTHING_TO_ADD),
        Edit(SUMS, f"{SUMS}.wait()", NO_HANDLE),
        Edit(SUMS, f"weight.grad = {SUMS}", IN_PLACE),
        Edit(
            LAYS_OUT,
            "total = weight.grad.reshape(-1)",
            COPY_SENT,
            (("weight.grad, g", "total, g"),),
        ),
        Edit(LAYS_OUT, "pass", LAYOUT),
        Edit(
            LAYS_OUT,
            "total = weight.grad.t().contiguous()",
            MOVED,
            ((SUMS, f"{SUMS.replace('weight.grad', 'total')}\n{BACK}"),),
        ),
        *KEEPS_DTYPE,
        *(one for one in (*REDUCES, *TRAINS) if one.cause in KINDS),
        SEEDS,
    ),
)
