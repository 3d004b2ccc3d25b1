"""Exercise 1 of 07_tensor_parallel: the pair f and g."""

from collections.abc import Callable
from typing import Any

import torch

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.expectations import DTYPE, Demand, Numbers, Untouched
from course_lib.checks.on_ranks import At, OnRanks
from course_lib.checks.tensor_parallel.parts import (
    APART,
    NEARLY,
    NOT_A_NAME,
    NOT_TRAINING,
    NOT_WAITED,
    OTHER_SIZE,
    OUTSIDE,
    ROUNDING,
    nearly,
    one_sum,
    same_bits,
)
from course_lib.checks.tensor_parallel.seen_pair import observe_uses
from course_lib.checks.tensor_parallel.whole_pair import (
    INF,
    ones_of,
    out_of,
    own_matrix,
    p_of,
    part_grad_of,
    total_matrix,
    use_of,
    x_grad_of,
)

F_COPIES = Cause("Your f sums in forward: it should return x unchanged, and sum in backward.")
NO_SUM = Cause("Does forward of g return the sum?")
OWN_SUM = Cause(
    "That is this rank's own partial sum: g has to sum in forward. Do you return the tensor that "
    "was summed?"
)
NO_SUM_BACK = Cause(
    "That is this rank's own term of the gradient: x was used on every rank, so backward of f "
    "has to sum the gradients of all ranks. Nothing fails without it; the weights before x train "
    "on one term of their gradient. Do you return the tensor that was summed?"
)
DIGITS = Cause("Each rank contributes its own digit: which one is missing, or counted twice?")
MEAN = Cause("That is the mean. The parts are terms of one sum, so do not divide.")
BY_FOUR = Cause("Divided by 4. The parts are terms of one sum, on any number of ranks.")
TWICE = Cause("{p} times too large: summed twice.")
WHOLE_ALREADY = Cause(
    "{p} times too large: every rank already has the whole gradient of the sum, so g passes it on "
    "unchanged."
)
HANDS_ON = Cause("In backward of g, each rank's part gets the gradient of the sum, unchanged.")
DIVIDED_BACK = Cause("A term of a sum has the gradient of the sum: there is nothing to divide by.")
MEAN_BACK = Cause("That is the mean: x was used {p} times, and the gradients add up.")
NO_GRADIENT = Cause("Did detach or no_grad cut the graph? The gradient is what backward returns.")
KEEPS = Cause(
    "Other code may still need this tensor, and all_reduce works in place: give it a new clone "
    "each time."
)
SHARED = Cause(
    "The gradient that reaches x around the part was summed, too. Either the tensor was changed in "
    "place (sum a clone), or you sum at x itself: sum only the gradient that comes from the part."
)
TWO_USES = Cause(
    "Both gradients were in one tensor, and the second one overwrote the first: backward of f "
    "needs a new tensor each time."
)
ANY_SHAPE = Cause(
    "x has any shape, and what part returns may have another one: take that of the tensor you sum."
)
INF_STAYS = Cause(
    "inf and nan have to stay: they show that something overflowed, and code that looks for them, "
    "like a loss scaler, would otherwise continue."
)
RUNS_ONCE = Cause(
    "Call part once, and keep what it returns: each further call draws other random numbers "
    "(dropout), updates buffers, and takes the time of one more forward."
)
G_SUMS = Cause("In forward g sums the output of part with one all_reduce, and f sends nothing.")
F_SUMS = Cause("In backward f sums the gradients with one all_reduce, and g sends nothing.")
SOME_RANKS = Cause(
    "Only some ranks called all_reduce. Every rank has to call it, even if it contributes zeros."
)


def _close(value: str, right: Callable[[At], Any], **more: Any) -> Numbers:
    """Demand numbers up to the rounding of their dtype; the sums of bfloat16 are exact."""
    more["otherwise"] = ((nearly(right), NEARLY),)
    return Numbers(value, right, rtol=_rounding, **more)


def _rounding(at: At) -> float:
    return 1e-5 if use_of(at).x.dtype == torch.float32 else ROUNDING


def _arrives(at: At) -> bool:
    """Return whether the gradients that are needed are there."""
    at_part = at.seen.part_grad is not None or use_of(at).no_grad
    return at_part and (at.seen.x_grad is not None or use_of(at).frozen)


def _in_backward(at: At) -> None:
    """Demand the sum of f, where x needs a gradient."""
    if not use_of(at).frozen:
        one_sum("backward", lambda at: use_of(at).x.nbytes, F_SUMS)(at)


AT_INF = ((lambda at, *_: at.label == INF, INF_STAYS),)
LATE = ((lambda at, *_: at.seen.never_waited > 0, NOT_WAITED),)
F, G = "total = grad.clone()", "total = x.clone()"  # backward of f, forward of g
NOT_WAITING = "dist.all_reduce(total, async_op=True)\nreturn total.clone()"
IN_BFLOAT16 = (
    "low = total.bfloat16() if total.dtype == torch.float32 else total\n"
    "dist.all_reduce(low)\nreturn low.to(total.dtype)"
)
TOGETHER = "return ReduceFromRegion.apply(part(CopyToRegion.apply(x)))"
ONLY_ON_SOME = "if not total.any():\n    return total"

PAIR = Exercise(
    key="tensor_parallel-1",
    title="f and g",
    check=OnRanks(
        observe_on_rank=observe_uses,
        trouble=(
            ("hang", "", SOME_RANKS),
            ("mismatch", "", SOME_RANKS),
            ("raised", f"{NOT_A_NAME}(shape|size|unpack|index|dimension|0-d)", ANY_SHAPE),
        ),
        expect=(
            Demand(
                lambda at: at.seen.num_runs == 1,
                lambda at: f"part ran {at.seen.num_runs} times",
                RUNS_ONCE,
            ),
            _close(
                "inside",
                lambda at: use_of(at).x,
                what="what part gets",
                predicates=AT_INF,
                causes=((F_COPIES, lambda at: use_of(at).x * p_of(at)),),
            ),
            _close(
                "out",
                out_of(total_matrix),
                what="the sum",
                predicates=(
                    (lambda _at, got, _: got is None, NO_SUM),
                    *LATE,
                    *AT_INF,
                    (lambda at, *_: use_of(at).frozen, NOT_TRAINING),
                ),
                causes=(
                    (OWN_SUM, out_of(own_matrix)),
                    (MEAN, out_of(lambda at: total_matrix(at) / at.world_size)),
                    (BY_FOUR, out_of(lambda at: total_matrix(at) / 4)),
                    (TWICE, out_of(lambda at: total_matrix(at) * at.world_size)),
                ),
                look=DIGITS,
            ),
            same_bits("out", "the sum"),
            Untouched(KEEPS),
            one_sum("forward", lambda at: out_of(total_matrix)(at).nbytes, G_SUMS),
            Demand(_arrives, "no gradient arrives", NO_GRADIENT),
            _close(
                "part_grad",
                part_grad_of(lambda _at: 1.0),
                what="the gradient that part gets",
                predicates=AT_INF,
                causes=(
                    (WHOLE_ALREADY, part_grad_of(p_of)),
                    (DIVIDED_BACK, part_grad_of(lambda at: 1 / at.world_size)),
                ),
                look=HANDS_ON,
            ),
            _close(
                "x_grad",
                x_grad_of(total_matrix),
                what="the gradient of x",
                predicates=(*LATE, *AT_INF),
                causes=(
                    (NO_SUM_BACK, x_grad_of(own_matrix)),
                    (MEAN_BACK, x_grad_of(lambda at: total_matrix(at) / at.world_size)),
                    (TWICE, x_grad_of(lambda at: total_matrix(at) * at.world_size)),
                ),
                look=DIGITS,
            ),
            same_bits("x_grad", "the gradient of x"),
            _in_backward,
            _close(
                "around",
                ones_of(lambda at: at.world_size + 1),
                what="the gradient of x + part(x)",
                look=SHARED,
            ),
            _close(
                "twice",
                ones_of(lambda at: 4 * at.world_size),
                what="the gradient of together(x, a) + together(x, b)",
                look=TWO_USES,
            ),
            Demand(
                lambda at: not at.seen.outside,
                "all_reduce got a tensor that requires a gradient",
                OUTSIDE,
            ),
        ),
        success=("Sums and gradients on 1 to 4 ranks; one all_reduce in forward, one in backward."),
    ),
    wrong=(
        Edit(F, "return grad", NO_SUM_BACK),
        Edit("part(CopyToRegion.apply(x))", "part(x)", NO_SUM_BACK),
        Edit(
            "return grad",
            "total = grad.clone()\ndist.all_reduce(total)\nreturn total",
            WHOLE_ALREADY,
        ),
        Edit("return grad", "return grad / dist.get_world_size()", DIVIDED_BACK),
        Edit(G, "total = x / dist.get_world_size()", MEAN),
        Edit(G, "total = x / 4", BY_FOUR),
        Edit(F, "total = grad / dist.get_world_size()", MEAN_BACK),
        Edit(G, "return x.clone()", OWN_SUM),
        Edit(G, f"{G}\n{NOT_WAITING}", NOT_WAITED),
        Edit(F, f"{F}\n{NOT_WAITING}", NOT_WAITED),
        Edit(
            "ReduceFromRegion.apply(part(CopyToRegion.apply(x)))",
            "CopyToRegion.apply(part(ReduceFromRegion.apply(x)))",
            F_COPIES,
        ),
        Edit(G, "total = x", KEEPS),
        Edit(
            G,
            "sums = together.__dict__\n"
            "total = sums.setdefault(str(x.shape), torch.empty_like(x)).copy_(x)",
            KEEPS,
        ),
        Edit(F, "total = grad", SHARED),
        Edit("return grad", "kept = grad.clone()\ngrad.zero_()\nreturn kept", KEEPS),
        Edit(
            G,
            "parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]\n"
            "dist.all_gather(parts, x.contiguous())\nreturn torch.stack(parts).sum(0)",
            G_SUMS,
        ),
        Edit(G, "total = x.clone()\ndist.all_reduce(total)\nreturn None", NO_SUM),
        Edit("return grad", "pass", NO_GRADIENT),
        Edit(G, "total = x.clone()\ndist.all_reduce(total)\nreturn x.clone()", OWN_SUM),
        Edit(
            "ReduceFromRegion.apply(part(CopyToRegion.apply(x)))",
            "ReduceFromRegion.forward(None, part(x).detach())",
            NO_GRADIENT,
        ),
        Edit(
            "ReduceFromRegion.apply(part(",
            "ReduceFromRegion.forward(None, part(",
            OUTSIDE,
        ),
        Edit(G, "total = x.float()", DTYPE),
        Edit(G, "total = x.clone().double()", DTYPE),
        Edit(F, "total = grad.float()", OTHER_SIZE),
        Edit(G, f"{G}\n{ONLY_ON_SOME}", SOME_RANKS),
        Edit(F, f"{F}\n{ONLY_ON_SOME}", SOME_RANKS),
        Edit(G, f"{G}\n{IN_BFLOAT16}", NEARLY),
        Edit(F, f"{F}\n{IN_BFLOAT16}", NEARLY),
        Edit(
            F,
            "sums = together.__dict__\n"
            "total = sums.setdefault(str(grad.shape), torch.empty_like(grad)).copy_(grad)",
            TWO_USES,
        ),
        Edit(
            TOGETHER,
            f"if not torch.is_grad_enabled():\n    return part(x)\n{TOGETHER}",
            NOT_TRAINING,
        ),
        Edit(
            TOGETHER,
            f"if torch.is_grad_enabled() and not x.requires_grad:\n    return part(x)\n{TOGETHER}",
            NOT_TRAINING,
        ),
        Edit(
            TOGETHER,
            "if not torch.is_grad_enabled():\n"
            "    total = part(x)\n    dist.all_reduce(total)\n    return total\n"
            f"{TOGETHER}",
            KEEPS,
        ),
        Edit(
            TOGETHER,
            "y = part(CopyToRegion.apply(x))\n"
            "return y + (ReduceFromRegion.forward(None, y.detach()) - y.detach())",
            APART,
        ),
        Edit(TOGETHER, f"{TOGETHER}.view_as(x)", ANY_SHAPE),
        Edit(
            F,
            "total = grad.reshape(-1, grad.shape[-1]).clone()\n"
            "dist.all_reduce(total)\nreturn total.view(grad.shape)",
            ANY_SHAPE,
        ),
        Edit("return grad", "return grad.nan_to_num()", INF_STAYS),
        Edit(F, "total = grad.nan_to_num()", INF_STAYS),
        Edit(G, "total = x.nan_to_num()", INF_STAYS),
        Edit(TOGETHER, f"part(x)\n{TOGETHER}", RUNS_ONCE),
        Edit(
            TOGETHER,
            "if x.requires_grad:\n"
            "    x.register_hook(lambda grad: ReduceFromRegion.forward(None, grad))\n"
            "return ReduceFromRegion.apply(part(x))",
            SHARED,
        ),
    ),
)
