"""Exercise 5 of 08_pipeline: one weight on the first and on the last stage."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import DIGITS_LOST, Demand, Numbers, Untouched
from course_lib.checks.on_ranks import At, OnRanks, Trouble, calls_of
from course_lib.checks.pipeline import wrong_sums
from course_lib.checks.pipeline.sends import (
    NO_HANDLE,
    NOT_CHANGED_UNDER_WAY,
    UNDER_WAY,
    watched_sends,
)
from course_lib.core import Event
from course_lib.ranks import record

GROUP = Cause("Both ranks of `ends`, and only they, make the call: give it group=ends.")
EACH_OTHER = Cause(
    "The two ends wait for each other: let one send first and the other receive first, or use a "
    "collective."
)
NOT_THE_WORLD = Cause(
    "Here the world holds two pipelines, and `ends` is not its first and its last rank: ask the "
    "group `ends` who is in it, or leave it to a collective."
)
SKIPPED = Cause(
    "One end makes the call, the other does not: let each end that has a gradient make it, "
    "whatever its rank and its values are."
)
NOTHING_TO_ADD = Cause(
    "In the middle weight is None, and a frozen weight has no gradient (grad is None): both have "
    "nothing to add."
)
WEIGHTS = Cause(
    "Add up the gradients: then the optimizer takes the same step on both copies, and they stay "
    "equal by themselves."
)
MIDDLE = Cause("This rank holds no copy. Only the group `ends` communicates.")
FROZEN = Cause(
    "Given a gradient, an optimizer steps, and weight decay or momentum changes a frozen weight: "
    "leave weight.grad None, and send nothing."
)
IN_PLACE = Cause("weight.grad is gone: all_reduce works in place, and returns None.")
ONE_COPY = Cause("With one stage there is one copy, and its gradient is whole.")
MEAN = Cause("That is the mean: the two uses of one weight add up.")
OTHER_HALF = Cause(
    "That is this rank's own half; the other rank's is missing. The sum has to be in weight.grad "
    "itself when you return."
)
FIRST_ALONE = Cause("That is the first stage's half alone: the two have to be added.")
LAST_ALONE = Cause("That is the last stage's half alone: the two have to be added.")
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
HIDDEN = Cause(
    "One half is nan, as in a model that has diverged, but the sum is a number: that hides the "
    "failure. Leave nan as it is."
)
BOTH_ENDS = Cause(
    "Both ends need the sum of the two gradients, undivided: use an all-reduce over `ends`."
)
ONE_MESSAGE = Cause("Send the whole gradient in one message each way.")


# --- on the ranks


ZEROS, FROZEN_WEIGHT, MATRIX = "zeros on the first stage", "a frozen weight", "a bfloat16 matrix"
LAYOUTS = TRANSPOSED, MIXED = "a transposed weight", "a gradient transposed on one end"
NAN = "nan on the first stage"
STEPS = ("step 1", "step 2", ZEROS, NAN)


@dataclass
class Seen:
    """The results of one call on one rank, which belongs to the pipeline of the ranks `ends`."""

    ends: tuple[int, int]
    grad: Any
    changed: tuple[str, ...]
    sends_changed: list[list[int]]
    calls: list[Event]


def _sums(
    rank: int, answer: Callable[..., Any], labels: Sequence[str] = STEPS, pipelines: int = 1
) -> dict[str, Seen]:
    """Call the answer with each of these weights, in a world of one or more pipelines."""
    p = dist.get_world_size() // pipelines
    all_ends = [(first, first + p - 1) for first in range(0, p * pipelines, p)]
    groups = [dist.new_group(sorted(set(ends))) for ends in all_ends]
    mine, group = all_ends[rank // p], groups[rank // p]
    seen = dict[str, Seen]()
    for label in labels:
        if (each := _one(answer, rank, mine, group, label)) is None:
            break
        seen[label] = each
    return seen


def _one(
    answer: Callable[..., Any], rank: int, ends: tuple[int, int], group: Any, label: str
) -> Seen | None:
    """Call the answer once; return None where a transposed tensor was refused, not lost."""
    weight = nn.Parameter(_numbers(label)) if rank in ends else None
    if weight is not None and label == FROZEN_WEIGHT:
        weight.requires_grad_(False)
    elif weight is not None:
        weight.grad = _half(rank, ends, label)
    with record() as log, watched_sends() as sends_changed:
        try:
            answer(weight, group)
        except (RuntimeError, ValueError) as error:
            if label == TRANSPOSED and "contiguous" in str(error):
                return None
            raise
    changed = weight is not None and not torch.equal(weight, _numbers(label))
    grad = None if weight is None or weight.grad is None else weight.grad.clone()
    return Seen(ends, grad, ("the weight",) * changed, sends_changed, calls_of(log.events))


def _numbers(label: str) -> Tensor:
    """Return 1 to 6, and a little more than float32 can hold; or a matrix of 1 to 6."""
    if label == MATRIX:
        return torch.arange(1, 7).bfloat16().view(2, 3)
    if label in LAYOUTS:
        return torch.arange(1, 7).double().view(2, 3).t()
    return torch.arange(1, 7).double() * (1 + 1e-9)


def _half(rank: int, ends: tuple[int, int], label: str) -> Tensor:
    """Return the gradient that backward left on a rank."""
    first = rank == ends[0]
    times = {"step 2": 2.0, ZEROS: float(not first), NAN: math.nan if first else 1.0}.get(label, 1)
    half = _numbers(label) * times * 10**rank
    return half if first or label != MIXED else half.contiguous()


def _runs(p: int) -> list[Mapping[str, Any]]:
    two = [{"pipelines": 2}] if p == 4 else []
    return [{}, {"labels": [FROZEN_WEIGHT]}, {"labels": [MATRIX]}, *two, {"labels": LAYOUTS}]


# --- what is expected


def _sum_of(*factors: float) -> Callable[[At], Tensor | None]:
    """Return first * factors[0] + last * factors[1]; None where there is no gradient."""

    def value(at: At) -> Tensor | None:
        ends = at.seen.ends
        if at.rank not in ends or at.label == FROZEN_WEIGHT:
            return None
        pairs = zip(dict.fromkeys(ends), factors, strict=False)
        halves = [_half(end, ends, at.label) * factor for end, factor in pairs]
        return sum(halves[1:], halves[0])

    return value


def _with_mirrored(at: At) -> Tensor:
    """Return the sum with the gradient of rank p - 1 - rank."""
    other = at.world_size - 1 - at.rank
    ends = next(one.seen.ends for one in at.everyone if one.rank == other)
    return _half(at.rank, at.seen.ends, at.label) + _half(other, ends, at.label)


def _is_own_half_of_a_transposed(at: At, got: Tensor, _item: Any) -> bool:
    own = at.label == TRANSPOSED and _half(at.rank, at.seen.ends, at.label)
    return isinstance(own, Tensor) and torch.equal(got, own)


def _is_moved(at: At, got: Tensor, _item: Any) -> bool:
    need = _sum_of(1, 1)(at)
    return need is not None and torch.equal(got.flatten().sort()[0], need.flatten().sort()[0])


def _near(at: At, got: Tensor, _item: Any) -> bool:
    """Return whether about two digits are right: what bfloat16 keeps."""
    need = _sum_of(1, 1)(at)
    return need is not None and torch.allclose(got.double(), need.double(), rtol=5e-3)


def _in_two_pipelines(trouble: Trouble) -> bool:
    """Return whether ranks 1 and 2 of four are in it: they are ends only of two pipelines."""
    stuck = {rank for wait in trouble.waits for rank in (wait.rank, *wait.waits_for)}
    return len(trouble.waits) + len(trouble.returned) == 4 and bool(stuck & {1, 2})


def _for_each_other(trouble: Trouble) -> bool:
    pairs = {(wait.rank, other) for wait in trouble.waits for other in wait.waits_for}
    return any((other, rank) in pairs for rank, other in pairs)


LAYS_OUT = "weight.grad = weight.grad.contiguous()"
SUMS = "dist.all_reduce(weight.grad, group=ends)"
BACK = "weight.grad.copy_(total.view_as(weight.grad))"
ASKS = "if weight is not None and weight.grad is not None:"

TIED = Exercise(
    key="pipeline-5",
    title="add up a tied weight",
    library=("course_lib.pipeline.stage:tied_summed",),
    check=OnRanks(
        observe_on_rank=_sums,
        runs=_runs,
        trouble=(
            ("raised", "NoneType.*'wait'", NO_HANDLE),
            ("raised", "None", NOTHING_TO_ADD),
            ("hang", _in_two_pipelines, NOT_THE_WORLD),
            ("hang", _for_each_other, EACH_OTHER),
            ("hang", lambda trouble: len(trouble.waits) == 1, SKIPPED),
            ("hang", "", GROUP),
        ),
        expect=(
            Untouched(WEIGHTS),
            Demand(
                lambda at: at.rank in at.seen.ends or not at.seen.calls,
                lambda at: f"calls {at.seen.calls[0].kind}",
                MIDDLE,
            ),
            NOT_CHANGED_UNDER_WAY,
            Numbers(
                "grad",
                _sum_of(1, 1),
                rtol=1e-12,
                what="the gradient",
                predicates=(
                    (lambda at, _got, _i: at.label == FROZEN_WEIGHT, FROZEN),
                    (lambda _at, got, _i: got is None, IN_PLACE),
                    (lambda at, got, _i: at.label == NAN and got.isfinite().all(), HIDDEN),
                    (_is_own_half_of_a_transposed, COPY_SENT),
                    (_is_moved, MOVED),
                    (lambda at, _got, _i: at.seen.ends[0] == at.seen.ends[1], ONE_COPY),
                ),
                causes=(
                    (MEAN, _sum_of(0.5, 0.5)),
                    (OTHER_HALF, lambda at: _half(at.rank, at.seen.ends, at.label)),
                    (FIRST_ALONE, _sum_of(1, 0)),
                    (LAST_ALONE, _sum_of(0, 1)),
                    (TWICE, _sum_of(2, 2)),
                    (NOT_THE_WORLD, _with_mirrored),
                ),
                otherwise=((_near, DIGITS_LOST), (lambda at, *_: at.label == MIXED, LAYOUT)),
                look=BOTH_ENDS,
            ),
            Demand(
                lambda at: at.label != FROZEN_WEIGHT or not at.seen.calls,
                lambda at: f"calls {at.seen.calls[0].kind}",
                FROZEN,
            ),
            Demand(
                lambda at: (
                    len(at.seen.calls) <= 2
                    and sum(call.num_bytes for call in at.seen.calls)
                    <= 2 * _numbers(at.label).nbytes
                ),
                lambda at: (
                    f"{len(at.seen.calls)} messages of "
                    f"{sum(call.num_bytes for call in at.seen.calls)} bytes; need 2 of "
                    f"{2 * _numbers(at.label).nbytes}, or one all-reduce"
                ),
                ONE_MESSAGE,
            ),
        ),
        success="The gradient of both uses, on both ends, one message each; the middle is silent.",
    ),
    wrong=(
        Edit(SUMS, f"{SUMS}\nweight.grad /= dist.get_world_size(ends)", MEAN),
        Edit(SUMS, f"{SUMS}\nweight.grad /= dist.get_world_size()", BOTH_ENDS),
        Own(wrong_sums.everybody, MIDDLE),
        Edit(", group=ends", "", GROUP),
        Own(wrong_sums.one_way, OTHER_HALF),
        Own(wrong_sums.send_first, EACH_OTHER),
        Own(wrong_sums.by_ranks_of_the_world, NOT_THE_WORLD),
        Edit(
            ASKS,
            f"{ASKS[:-1]} and dist.get_rank() in (0, dist.get_world_size() - 1):",
            NOT_THE_WORLD,
        ),
        Edit(SUMS, "dist.broadcast(weight.grad, group=ends, group_src=0)", FIRST_ALONE),
        Edit(
            SUMS, "dist.broadcast(weight.grad, group=ends, group_src=ends.size() - 1)", LAST_ALONE
        ),
        Edit(SUMS, "dist.all_reduce(weight.data, group=ends)", WEIGHTS),
        Edit(
            SUMS,
            "dist.all_reduce(weight.data, group=ends)\nweight.data /= dist.get_world_size(ends)",
            OTHER_HALF,
        ),
        Edit(SUMS, "pass", OTHER_HALF),
        Edit(ASKS, "if weight is not None:", NOTHING_TO_ADD),
        Edit(ASKS, "if weight.grad is not None:", NOTHING_TO_ADD),
        Edit(SUMS, f"{SUMS}\nif dist.get_world_size() == 1:\n    weight.grad *= 2", ONE_COPY),
        Edit(SUMS, f"{SUMS}\n{SUMS}", TWICE),
        Edit(
            ASKS,
            "if weight is not None:\n"
            "    if weight.grad is None:\n"
            "        weight.grad = torch.zeros_like(weight)",
            FROZEN,
        ),
        Edit(ASKS, f"{ASKS[:-1]} and weight.grad.any():", SKIPPED),
        Edit(ASKS, f"{ASKS[:-1]} and dist.get_rank() == 0:", SKIPPED),
        Edit(ASKS, f"{ASKS[:-1]} and dist.get_rank() == dist.get_world_size() - 1:", SKIPPED),
        Edit(SUMS, f"{SUMS}.wait()", NO_HANDLE),
        *(
            Edit(
                SUMS,
                f"grad = weight.grad.{dtype}()\n"
                "dist.all_reduce(grad, group=ends)\nweight.grad.copy_(grad)",
                DIGITS_LOST,
            )
            for dtype in ("float", "bfloat16")
        ),
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
        Edit(SUMS, f"weight.grad.nan_to_num_()\n{SUMS}", HIDDEN),
        Edit(SUMS, f"{SUMS}\nweight.grad.nan_to_num_()", HIDDEN),
        Own(wrong_sums.adds_too_early, UNDER_WAY),
        Edit("weight.grad, group", "weight.grad.clone(), group", OTHER_HALF),
        Edit(SUMS, f"weight.grad = {SUMS}", IN_PLACE),
        Edit(SUMS, "dist.reduce(weight.grad, group=ends, group_dst=0)", BOTH_ENDS),
        Edit(
            SUMS,
            "for part in weight.grad.view(-1).split(1):\n    dist.all_reduce(part, group=ends)",
            ONE_MESSAGE,
        ),
    ),
)
