"""Exercise 1 of 16_experts: a router, and the gradient of its logits."""

from typing import Any

import torch
from torch import Tensor

from course_lib.checks.cases import Case, Cases
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed

SHAPES = (
    # tokens, experts, top_k, dtype
    (1, 4, 2, torch.float64),
    (5, 8, 2, torch.float64),
    (3, 4, 1, torch.float64),
    (4, 4, 4, torch.float64),
    (6, 5, 3, torch.float32),
    (1, 2, 1, torch.float32),
    (0, 4, 2, torch.float64),
)


def _numbers(tokens: int, width: int, by: int) -> Tensor:
    """Return numbers that are all different, in no order."""
    count = torch.arange(tokens * width).double()
    return ((count * by + 3) % 97 / 20 - 2).view(tokens, width)


def _cases() -> list[Case]:
    example = torch.tensor([[0.0, 5.0, 4.0, -1.0]]).double(), torch.tensor([[1.0, 0.0]]).double(), 2
    ties = torch.tensor([[1.0, 1.0, 1.0, 0.0]]).double(), torch.tensor([[1.0, 0.0]]).double(), 2
    other = -_numbers(5, 8, 29), _numbers(5, 2, 31), 2
    large = 800 + _numbers(3, 4, 41).float(), _numbers(3, 2, 23).float(), 2
    found: list[Case] = [("one token, logits 0, 5, 4 and -1, top_k 2", example)]
    for tokens, experts, top_k, dtype in SHAPES:
        logits, grad = _numbers(tokens, experts, 41).to(dtype), _numbers(tokens, top_k, 23)
        text = f"{tokens} tokens, {experts} experts, top_k {top_k}, {str(dtype)[6:]}"
        found.append((text, (logits, grad.to(dtype), top_k)))
    return [
        *found,
        ("5 tokens, 8 experts, top_k 2, float64, other numbers", other),
        ("three equal logits, any two of which are chosen", ties),
        ("logits of about 800 in float32", large),
    ]


THREE = Cause("Return three tensors: the experts, their weights, and the gradient of the logits.")
EXPERTS = Cause("A token takes the top_k experts with the largest logits, the best one first.")
AMONG = Cause("The weights of the chosen experts add up to 1: softmax over the chosen logits only.")
MEAN = Cause(
    "A weight also depends on the other chosen logits: subtract the weighted mean of the gradients."
)
WEIGHTED = Cause("The mean of the gradients is weighted, with the weights of the experts.")
BY_WEIGHT = Cause("A logit's gradient is multiplied by the weight of its expert.")
PLACES = Cause("The gradient of a weight belongs to the logit of its expert, and to no other one.")
PER_TOKEN = Cause("Each token has a mean of its own: sum over its experts only, dim=-1.")
OVERFLOWS = Cause("exp of a large logit is inf: softmax subtracts the largest one first.")
DIGITS = Cause("Digits are lost: compute in the dtype of the logits.")
DTYPE = Cause("Keep the dtype of the logits.")
KEEPS = Cause("logits and grad_weights belong to the caller: return new tensors.")


def _plain(result: Any, logits: Tensor, grad_weights: Tensor, top_k: int) -> dict[str, Any]:
    """Return experts, weights and gradient as lists. Raises: CheckFailed for anything else"""
    if not (isinstance(result, tuple | list) and len(result) == 3):
        raise failed(f"need three tensors; got {type(result).__name__}", THREE)
    if not all(isinstance(one, Tensor) for one in result):
        raise failed(f"need three tensors; got {[type(one).__name__ for one in result]}", THREE)
    experts, weights, grad = (one.detach() for one in result)
    need = [[*grad_weights.shape]] * 2 + [[*logits.shape]]
    if (got := [[*one.shape] for one in (experts, weights, grad)]) != need:
        raise failed(f"need shapes {need}; got {got}", THREE)
    if {weights.dtype, grad.dtype} != {logits.dtype}:
        raise failed(f"need {logits.dtype}; got {weights.dtype} and {grad.dtype}", DTYPE)
    if logits.requires_grad or logits.grad is not None:
        raise failed("the logits that were given need a gradient, or have one, now", KEEPS)
    if len(logits.unique()) < logits.numel():  # any of the equal ones may be chosen
        experts, grad = torch.zeros_like(experts), grad.sort(-1).values
    named = {"experts": experts.double(), "weights": weights, "gradient": grad}
    shown = {name: list(map(_number, one.flatten())) for name, one in named.items()}
    if logits.dtype == torch.float64:
        values = [round(float(x), 10) + 0.0 for one in (weights, grad) for x in one.flatten()]
        shown["weights and gradient, to 10 digits"] = [f"{x:.10f}" for x in values]
    return shown


def _number(x: Tensor) -> float | str:
    """Return a number to 6 digits (a gradient may cancel); nan as a word, equal to itself."""
    return "nan" if x.isnan() else round(float(x), 6) + 0.0


BEST, SOFTMAX = "logits.topk(top_k, dim=-1)", "best.values.softmax(-1)"
INNER, SCALED = "(weights * grad_weights).sum(-1, keepdim=True)", "weights * (grad_weights - mean)"
SCATTER, RETURN = "scatter(-1, best.indices,", "return best.indices, weights, grad"

ROUTER = Exercise(
    key="experts-1",
    title="a router and its gradient",
    library=("course_lib.models.moe:Router",),
    check=Cases(
        cases=_cases,
        show=_plain,
        rtol=1e-4,
        unchanged=KEEPS,
        look="Go through it with one token, the best expert first, and compare with autograd.",
        success="Right for one expert per token, for several, and for all.",
    ),
    wrong=(
        Edit(BEST, "logits.topk(top_k, dim=-1, largest=False)", EXPERTS),
        Edit(RETURN, "return best.indices.sort(-1).values, weights, grad", EXPERTS),
        Edit(SOFTMAX, "logits.softmax(-1).gather(-1, best.indices)", AMONG),
        Edit(SOFTMAX, "best.values.sigmoid()", AMONG),
        Edit(SOFTMAX, "best.values / best.values.sum(-1, keepdim=True)", AMONG),
        Edit(SOFTMAX, "best.values.exp() / best.values.exp().sum(-1, keepdim=True)", OVERFLOWS),
        Edit(SOFTMAX, "best.values.softmax(0)", AMONG),
        Edit(SOFTMAX, "best.values.softmax(-1, dtype=torch.float32).to(logits.dtype)", DIGITS),
        Edit(SCALED, "weights * grad_weights", MEAN),
        Edit(SCALED, "grad_weights - mean", BY_WEIGHT),
        Edit(SCALED, "weights * (1 - weights) * grad_weights", MEAN),
        Edit(INNER, "grad_weights.mean(-1, keepdim=True)", WEIGHTED),
        Edit(INNER, "(weights * grad_weights).sum()", PER_TOKEN),
        Edit(SCATTER, "scatter(-1, best.indices.flip(-1),", PLACES),
        Edit(
            SOFTMAX,
            "logits.masked_fill(logits < best.values[:, -1:], -torch.inf).softmax(-1)"
            ".gather(-1, best.indices)",
            AMONG,
        ),
        Edit(RETURN, "logits.requires_grad_()\n" + RETURN, KEEPS),
        Edit(SCATTER, "scatter(-1, torch.arange(top_k).expand_as(best.indices),", PLACES),
        Edit(RETURN, "return best.indices, weights", THREE),
        Edit(RETURN, "return best.indices, weights.float(), grad.float()", DTYPE),
        Edit(RETURN, "grad_weights.sub_(mean)\n" + RETURN, KEEPS),
    ),
)
