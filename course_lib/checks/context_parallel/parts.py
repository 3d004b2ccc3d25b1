"""Exercise 1 of 15_context_parallel: merge the attention to two sets of keys."""

from typing import Any

import torch
from torch import Tensor

from course_lib.checks.cases import Case, Cases
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise, failed

INF = torch.inf


def _numbers(*shape: int, first: float = 1.0) -> Tensor:
    """Return positive numbers, so that sums do not cancel."""
    return torch.arange(torch.Size(shape).numel()).double().view(shape) % 7 + first


def _cases() -> list[Case]:
    one = torch.tensor([[10.0]]), torch.tensor([[20.0]])
    row = torch.tensor([1.0, -2.0, 0.5]).double()
    square = _numbers(3, 3), row, _numbers(3, 3, first=4.0), -row
    tens, up = _numbers(2, 2).float(), torch.tensor([150.0, -151.0])
    far = tens, up, 10 * tens, up + 1
    close = one[0].double(), _numbers(1, first=1e5), one[1].double(), _numbers(1, first=1e5 + 3e-3)
    many = _numbers(2, 3, 2, 4), _numbers(2, 3, 2) / 3, _numbers(2, 3, 2, 4, first=9.0)

    def apart(lse1: float, lse2: float) -> tuple[Tensor, ...]:
        return one[0].clone(), torch.tensor([lse1]), one[1].clone(), torch.tensor([lse2])

    return [
        ("o 10 and 20, lse 1 and 3", apart(1.0, 3.0)),
        ("o [3, 3], lse [3]", square),
        ("o [2, 3, 2, 4], lse [2, 3, 2]", (*many, _numbers(2, 3, 2, first=0.0) / 2)),
        ("lse 200 and 201 in float32", apart(200.0, 201.0)),
        ("lse -200 and -203 in float32", apart(-200.0, -203.0)),
        ("lse of one query 150 and 151, of another -151 and -150", far),
        ("lse 100000 and 100000.003 in float64", close),
        ("an empty second part", apart(2.0, -INF)),
        ("an empty first part", apart(-INF, 2.0)),
        (
            "of two queries, the second has seen no key at all",
            (
                torch.tensor([[10.0, 30.0], [0.0, 0.0]]),
                torch.tensor([1.0, -INF]),
                torch.tensor([[20.0, 60.0], [0.0, 0.0]]),
                torch.tensor([1.0, -INF]),
            ),
        ),
    ]


PAIR = Cause("Return both, the output and the lse: the next merge needs both.")
SHAPES = Cause("o keeps the shape of o1, and lse that of lse1: one number per query.")
MEAN = Cause("A part whose scores are higher weighs more: its weight is exp(its lse - merged lse).")
SWAPPED = Cause("Each output is multiplied by the weight of the other part.")
LOGARITHM = Cause("lse is a logarithm: the sums of exponentials add up, so add exp(lse), then log.")
OVERFLOWS = Cause("exp(lse) is inf above 88, and 0 below -103, in float32: torch.logaddexp is not.")
PER_QUERY = Cause("Each query has its own maximum: what is far below another's becomes exp = 0.")
PRECISION = Cause("Keep the dtype that you were given: float32 has 8 digits, and float64 has 16.")
EMPTY = Cause("For a query without any key, -inf - (-inf) is nan: there, subtract 0 instead.")
BROADCAST = Cause("A weight belongs to a query, so it needs one more dimension: weight[..., None].")
NOT_DIVIDED = Cause("The weights of the two parts have to add up to 1: subtract the merged lse.")
KEEPS = Cause("The parts belong to the caller: return new tensors.")


def _as_lists(result: Any, o1: Tensor, lse1: Tensor, *_others: Tensor) -> dict[str, Any]:
    """Return the two tensors as lists of numbers. Raises: CheckFailed for anything else"""
    if not (isinstance(result, tuple | list) and len(result) == 2):
        raise failed(f"need a pair of o and lse; got {type(result).__name__}", PAIR)
    o, lse = result
    if not (isinstance(o, Tensor) and isinstance(lse, Tensor)):
        raise failed(f"need two tensors; got {type(o).__name__}, {type(lse).__name__}", PAIR)
    if o.shape != o1.shape or lse.shape != lse1.shape:
        seen = f"need shapes {[*o1.shape]} and {[*lse1.shape]}; got {[*o.shape]}, {[*lse.shape]}"
        raise failed(seen, SHAPES)
    if (o.dtype, lse.dtype) != (o1.dtype, lse1.dtype):
        raise failed(f"need {o1.dtype} and {lse1.dtype}; got {o.dtype}, {lse.dtype}", PRECISION)
    return {"o": list(map(_plain, o.flatten())), "lse": list(map(_plain, lse.flatten()))}


def _plain(number: Tensor) -> float | str:
    """Return a number; nan as a word, which is equal to itself."""
    return "nan" if number.isnan() else float(number)


def _mean(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    return (o1 + o2) / 2, torch.logaddexp(lse1, lse2)


def _by_lse(o1: Tensor, lse1: Tensor, o2: Tensor, lse2: Tensor) -> tuple[Tensor, Tensor]:
    weight = (lse1 / (lse1 + lse2))[..., None]
    return weight * o1 + (1 - weight) * o2, torch.logaddexp(lse1, lse2)


TOP = "max(lse1.max(), lse2.max())"
WEIGHTS = "(lse1 - safe).exp(), (lse2 - safe).exp()"
SAFE, BOTH = "both.masked_fill(both == -torch.inf, 0.0)", "torch.logaddexp(lse1, lse2)"
SUM = "weight1[..., None] * o1 + weight2[..., None] * o2"

PARTS = Exercise(
    key="context_parallel-1",
    title="merge two parts",
    library=("course_lib.context_parallel.partial:merge",),
    check=Cases(
        cases=_cases,
        show=_as_lists,
        rtol=1e-5,
        unchanged=KEEPS,
        look="Go through it with the example: the weights of the two parts add up to 1.",
        success="Right for large, small and empty parts.",
    ),
    wrong=(
        Own(_mean, MEAN),
        Own(_by_lse, MEAN),
        Edit(WEIGHTS, "(lse2 - safe).exp(), (lse1 - safe).exp()", SWAPPED),
        Edit(BOTH, "lse1 + lse2", LOGARITHM),
        Edit(BOTH, "(lse1.exp() + lse2.exp()).log()", OVERFLOWS),
        Edit(BOTH, "torch.maximum(lse1, lse2)", NOT_DIVIDED),
        Edit(BOTH, f"{TOP} + ((lse1 - {TOP}).exp() + (lse2 - {TOP}).exp()).log()", PER_QUERY),
        Edit(
            f"both = {BOTH}",
            f"lse1, lse2 = lse1.float(), lse2.float()\nboth = {BOTH}",
            PRECISION,
            also=((f"return {SUM}, both", f"return {SUM}, both.to(o1.dtype)"),),
        ),
        Edit(f"return {SUM}, both", f"return ({SUM}).float(), both.float()", PRECISION),
        Edit(SAFE, "both", EMPTY),
        Edit(SUM, "weight1 * o1 + weight2 * o2", BROADCAST),
        Edit(f"return {SUM}, both", f"return {SUM}", PAIR),
        Edit(f"return {SUM}, both", f"return {SUM}, both[..., None]", SHAPES),
        Edit(f"return {SUM}, both", f"o1 *= weight1[..., None]\nreturn {SUM}, both", KEEPS),
    ),
)
