"""Exercise 4 of 16_experts: an auxiliary loss, and a bias that is moved against the load."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from course_lib.checks.cases import Case, Cases
from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise, failed
from course_lib.checks.properties import CALLERS, TRAINS

MOST = 1.1  # the fullest of 4 ranks, in tokens of the last batches, divided by the mean
STREAMS = (
    # batches, tokens, experts, top_k, step, how skewed
    (1, 8, 5, 1, 0.1, 1.0),  # shares of 2**n copies are exact in float32
    (2, 4, 5, 2, 1.25, 0.5),
    (1, 8, 4, 4, 0.1, 0.0),
    (120, 256, 8, 2, 0.01, 2.0),
    (120, 1024, 8, 1, 0.01, 1.0),  # counts that 8 bits of bfloat16 do not hold
)


def _scores(batches: int, tokens: int, experts: int, skew: float) -> list[Tensor]:
    """Return scores between 0 and 1, larger for the first experts, from a fixed rule."""
    found = []
    for batch in range(batches):
        count = torch.arange(tokens * experts).view(tokens, experts) + 7919 * batch
        noise = ((count * count * 31 + count * 17) % 1009).double() / 1009
        scores = (noise * 2 - skew * torch.arange(experts) / experts * 1.5).sigmoid()
        found.append(scores.requires_grad_())
    return found


def _cases() -> list[Case]:
    lost = [torch.tensor([[0.75, 0.25]] * 4).double().requires_grad_()]
    return [
        ("4 tokens that all choose expert 0", (lost, 1, 0.1)),
        *(
            (
                f"{batches} batches of {tokens} tokens, {experts} experts, top_k {top_k}",
                (_scores(batches, tokens, experts, skew), top_k, step),
            )
            for batches, tokens, experts, top_k, step, skew in STREAMS
        ),
    ]


SHARES = Cause("f is the share of an expert in all copies of tokens: they add up to 1.")
TIMES_E = Cause("The sum is multiplied by the number of experts, so that it is 1 at balance.")
MEAN = Cause("P is the mean probability over all tokens, chosen or not.")
BOTH = Cause("f comes from the choice, P from the probabilities: their product is the loss.")
AWAY = Cause("The bias is moved the wrong way: an expert with too few tokens needs a larger one.")
CONSTANT = Cause("The bias moves by step, however far the load is from the mean: use sign.")
FROM_MEAN = Cause("Compare each expert's tokens with the mean of all experts.")
ADDS_UP = Cause("The bias adds up over the steps: begin with the one that you are given.")
MEANT = Cause("The bias is never moved: then a skewed stream stays skewed.")
ONE_NUMBER = Cause("The auxiliary loss is one number, a tensor of shape [].")
GRADIENT = Cause("The loss needs a gradient for the probabilities: compute with tensors only.")
DTYPE = Cause("Keep the dtype of what you were given.")
OF_A_STREAM = ("zeroes its input", "empties the list")


class Following(Cases):
    """Cases of an answer that calls two functions, which leave what they are given as it was."""

    def _result(self, answer: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        names = getattr(answer, "__globals__", {})
        own = {name: names[name] for name in ("auxiliary_loss", "moved_bias") if name in names}
        names |= {name: _keeping(one) for name, one in own.items()}
        try:
            return super()._result(answer, arguments)
        finally:
            names |= own


def _keeping(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the function, which raises CheckFailed if a tensor that it was given has changed."""

    def kept(*given: Any, **named: Any) -> Any:
        tensors = [one for one in (*given, *named.values()) if isinstance(one, Tensor)]
        before = [one.detach().clone() for one in tensors]
        result = function(*given, **named)
        if not all(map(torch.equal, tensors, before)):
            raise failed("a tensor that your function was given has changed", CALLERS)
        return result

    return kept


def _plain(result: Any, stream: list[Tensor], top_k: int, step: float) -> dict[str, Any]:
    """Return what the first batches show, and whether the stream ends balanced.

    Raises: CheckFailed
    """
    losses, biases = [one for _, one, _ in result], [one for _, _, one in result]
    if any(not isinstance(one, Tensor) or one.dim() for one in losses):
        raise failed(f"need a tensor of shape []; got {losses[0]!r}", ONE_NUMBER)
    shapes = {(*one.shape,) if isinstance(one, Tensor) else type(one).__name__ for one in biases}
    if shapes != {(stream[0].shape[1],)}:
        raise failed(f"need a bias of shape [{stream[0].shape[1]}]; got {shapes}", ADDS_UP)
    grads = torch.autograd.grad(losses[0], stream[0]) if losses[0].requires_grad else [None]
    shown = {
        "bias": _rounded(torch.cat(biases[:3]).detach(), 6),
        "auxiliary loss": _rounded(torch.stack(losses[:3]).detach()),
        "its gradient": "none" if grads[0] is None else _rounded(grads[0].flatten()[:8]),
        "dtypes": sorted({str(one.dtype) for one in (*losses, *biases)}),
    }
    if len(stream) < 100:
        return shown
    loads = torch.stack([load for load, _, _ in result[-20:]]).sum(0).double()
    by_rank = loads.view(4, -1).sum(1)
    fullest = float(by_rank.max() / by_rank.mean())
    return shown | {"fullest rank at the end": "balanced" if fullest < MOST else f"{fullest:.2f}"}


def _rounded(numbers: Tensor, digits: int = 12) -> list[float]:
    """Return numbers to 12 digits: what cancels is 0, whatever the order of the terms."""
    return [round(x, digits) + 0.0 for x in numbers.tolist()]


SHARE_CODE = "torch.bincount(experts.flatten(), minlength=num_experts) / experts.numel()"
LOSS_CODE = "num_experts * (shares * probabilities.mean(0)).sum()"
BIAS_CODE = "bias + step * (load.mean() - load).sign()"

BALANCE = Exercise(
    key="experts-4",
    title="two rules that balance",
    library=("course_lib.models.moe:aux_loss", "course_lib.models.moe:move_bias"),
    check=Following(
        cases=_cases,
        show=_plain,
        rtol=1e-10,
        unchanged=CALLERS,
        look="Go through it with the example: 4 tokens, 2 experts. Then think of k: all choices of "
        "a token count. An expert that has exactly the mean is not moved. Keep the dtypes.",
        success="Both rules are right, and the bias balances a skewed stream within 10 %.",
    ),
    wrong=(
        Edit(
            SHARE_CODE,
            "torch.bincount(experts.flatten(), minlength=num_experts) / len(experts)",
            SHARES,
        ),
        Edit(SHARE_CODE, "torch.bincount(experts.flatten(), minlength=num_experts)", SHARES),
        Edit(LOSS_CODE, "(shares * probabilities.mean(0)).sum()", TIMES_E),
        Edit(LOSS_CODE, "num_experts * (shares * probabilities.mean(0)).mean()", TIMES_E),
        Edit(LOSS_CODE, "num_experts * (shares * probabilities.sum(0)).sum()", MEAN),
        Edit(LOSS_CODE, "num_experts * (shares * shares).sum()", BOTH),
        Edit(LOSS_CODE, "num_experts * (probabilities.mean(0) ** 2).sum()", BOTH),
        Edit(LOSS_CODE, "num_experts * shares * probabilities.mean(0)", ONE_NUMBER),
        Edit(LOSS_CODE, "num_experts * (shares * probabilities.detach().mean(0)).sum()", GRADIENT),
        Edit(LOSS_CODE, f"({LOSS_CODE}).float()", DTYPE),
        Edit(BIAS_CODE, "bias + step * (load - load.mean()).sign()", AWAY),
        Edit(BIAS_CODE, "bias + step * (load.mean() - load)", CONSTANT),
        Edit(BIAS_CODE, "bias + step * (load.mean() - load) / load.mean()", CONSTANT),
        Edit(BIAS_CODE, "bias + step * (load.median() - load).sign()", FROM_MEAN),
        Edit(BIAS_CODE, "bias + step * (1 / len(load) - load).sign()", FROM_MEAN),
        Edit(BIAS_CODE, "step * (load.mean() - load).sign()", ADDS_UP),
        Edit(BIAS_CODE, "bias", MEANT),
        Edit(BIAS_CODE, "bias.add_(step * (load.mean() - load).sign())", CALLERS),
        Edit(f"return {BIAS_CODE}", f"experts.zero_()\nreturn {BIAS_CODE}", CALLERS),
        Edit(
            f"return {LOSS_CODE}",
            f"loss = {LOSS_CODE}\nprobabilities.data.zero_()\nreturn loss",
            CALLERS,
        ),
        *(one for one in TRAINS if one.name in OF_A_STREAM),
    ),
)
