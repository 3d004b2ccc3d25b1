"""Exercise 1 of 06_ddp: the bucket of each parameter.

The planted mistakes are in `buckets_answers.py`.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from course_lib.checks.ddp.buckets_answers import WRONG, buckets_of
from course_lib.checks.exercise import CheckFailed, Exercise, Mistake

# --- the check


class Tower(nn.Module):
    """A model with parameters of these sizes; some frozen, the first tied to the end."""

    def __init__(
        self, sizes: Iterable[int], *, frozen: Iterable[int] = (), tied: bool = False
    ) -> None:
        super().__init__()
        params = [nn.Parameter(torch.ones(size)) for size in sizes]
        self.layers = nn.ParameterList(params)
        for index in frozen:
            params[index].requires_grad_(False)
        if tied:
            self.head = nn.ParameterList(params[:1])


def _cases() -> list[tuple[str, nn.Module, int]]:
    plain = Tower((6, 2, 3, 1, 4))
    return [
        ("5 parameters of 24, 8, 12, 4 and 16 bytes", plain, 24),
        ("5 parameters of 24, 8, 12, 4 and 16 bytes", plain, 20),
        ("5 parameters of 24, 8, 12, 4 and 16 bytes", plain, 1),
        ("5 parameters of 24, 8, 12, 4 and 16 bytes", plain, 1000),
        ("3 parameters of 4, 12 and 16 bytes", Tower((1, 3, 4)), 20),
        ("4 parameters in float64", Tower((3, 3, 2, 2)).double(), 33),
        ("a frozen parameter in the middle", Tower((2, 1, 2), frozen=[1]), 16),
        ("the first weight tied to the last one", Tower((2, 1, 3), tied=True), 16),
        ("nothing but frozen parameters", Tower((2, 1), frozen=[0, 1]), 16),
    ]


def check_buckets(answer: Callable[..., Any]) -> str:
    """Check small models with parameters that are uneven, frozen, tied, or above the limit."""
    cases = _cases()
    got = [_named(answer(module, limit), module) for _, module, limit in cases]
    for (what, module, limit), is_now in zip(cases, got, strict=True):
        wanted = _named(buckets_of(module, limit), module)
        if is_now != wanted:
            raise CheckFailed(
                f"{what}, {limit} bytes a bucket: need the parameters {wanted or 'in no bucket'}; "
                f"got {is_now or 'no bucket'}. {_why(got)}"
            )
    return "From the last parameter to the first, never over the limit unless alone."


def _why(got: list[str]) -> str:
    """Return the cause that fits every case."""
    for _, wrong, says in WRONG:
        if got == [_named(wrong(module, limit), module) for _, module, limit in _cases()]:
            return says
    return "Go through it by hand: which parameter comes first, and does the next one fit?"


def _named(buckets: Any, module: nn.Module) -> str:
    """Return the numbers of the parameters, bucket by bucket: `4 3 | 2 1 | 0`."""
    if buckets is None:
        raise CheckFailed("need a list of buckets; got None. Does your function return it?")
    names = {id(param): str(i) for i, param in enumerate(module.parameters())}
    if not all(isinstance(bucket, list | tuple) for bucket in buckets):
        raise CheckFailed("need a list of buckets, each a list of parameters; got something else.")
    if any(id(param) not in names for bucket in buckets for param in bucket):
        raise CheckFailed(
            "a bucket holds something that is no parameter of the module. Put in the parameters "
            "themselves: no names, no copies."
        )
    rows = (" ".join(names[id(param)] for param in bucket) for bucket in buckets)
    return " | ".join(row or "(none)" for row in rows)


BUCKETS = Exercise(
    key="ddp-1",
    title="which bucket",
    check=check_buckets,
    reference=buckets_of,
    mistakes=tuple(Mistake(name, wrong, says[:40]) for name, wrong, says in WRONG),
)
