"""Exercise 1 of 06_ddp, with its planted mistakes: which parameter goes into which bucket."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn

from course_lib.checks.exercise import CheckFailed, Exercise, Mistake

Buckets = list[list[nn.Parameter]]


def buckets_of(module: nn.Module, bucket_bytes: int) -> Buckets:
    """The right answer: trainable parameters from the last to the first, packed in this order."""
    trainable = [param for param in module.parameters() if param.requires_grad]
    return _packed(reversed(trainable), bucket_bytes)


def _bytes_of(param: nn.Parameter) -> int:
    return param.numel() * param.element_size()


def _packed(
    params: Iterable[nn.Parameter],
    bucket_bytes: int,
    size: Callable[[nn.Parameter], int] = _bytes_of,
) -> Buckets:
    buckets: Buckets = []
    filled = 0
    for param in params:
        if not buckets or filled + size(param) > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(param)
        filled += size(param)
    return buckets


# --- planted mistakes, which are also what the check compares a wrong answer with


def _trainable(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters() if param.requires_grad]


def _in_forward_order(module: nn.Module, bucket_bytes: int) -> Buckets:
    return _packed(_trainable(module), bucket_bytes)


def _cut_forward(module: nn.Module, bucket_bytes: int) -> Buckets:
    return _packed(_trainable(module), bucket_bytes)[::-1]


def _forward_inside(module: nn.Module, bucket_bytes: int) -> Buckets:
    return [bucket[::-1] for bucket in buckets_of(module, bucket_bytes)]


def _with_frozen(module: nn.Module, bucket_bytes: int) -> Buckets:
    return _packed(reversed(list(module.parameters())), bucket_bytes)


def _tied_twice(module: nn.Module, bucket_bytes: int) -> Buckets:
    named = module.named_parameters(remove_duplicate=False)
    return _packed(reversed([param for _, param in named if param.requires_grad]), bucket_bytes)


def _over_the_limit(module: nn.Module, bucket_bytes: int) -> Buckets:
    buckets: Buckets = []
    filled = bucket_bytes
    for param in reversed(_trainable(module)):
        if filled >= bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(param)
        filled += _bytes_of(param)
    return buckets


def _never_exactly_full(module: nn.Module, bucket_bytes: int) -> Buckets:
    return _packed(reversed(_trainable(module)), bucket_bytes - 1)


def _by_elements(module: nn.Module, bucket_bytes: int) -> Buckets:
    return _packed(reversed(_trainable(module)), bucket_bytes, nn.Parameter.numel)


def _four_bytes_each(module: nn.Module, bucket_bytes: int) -> Buckets:
    return _packed(reversed(_trainable(module)), bucket_bytes, lambda param: 4 * param.numel())


def _last_one_lost(module: nn.Module, bucket_bytes: int) -> Buckets:
    return buckets_of(module, bucket_bytes)[:-1]


def _with_empties(module: nn.Module, bucket_bytes: int) -> Buckets:
    """What comes out if the list starts with an empty bucket, and one too large follows it."""
    buckets: Buckets = [[]]
    filled = 0
    for param in reversed(_trainable(module)):
        if filled + _bytes_of(param) > bucket_bytes:
            buckets.append([])
            filled = 0
        buckets[-1].append(param)
        filled += _bytes_of(param)
    return buckets


def _large_left_out(module: nn.Module, bucket_bytes: int) -> Buckets:
    small = [param for param in _trainable(module) if _bytes_of(param) <= bucket_bytes]
    return _packed(reversed(small), bucket_bytes)


def _one_each(module: nn.Module, bucket_bytes: int) -> Buckets:
    return [[param] for param in reversed(_trainable(module))]


WRONG: tuple[tuple[str, Callable[[nn.Module, int], Buckets], str], ...] = (
    ("forward order", _in_forward_order, "Backward begins at the end: last parameter first."),
    (
        "cut in forward order",
        _cut_forward,
        "Packed from the first parameter on, and the list turned around: the bucket that is not "
        "full has to be the last one to leave. Reverse the parameters, then pack.",
    ),
    (
        "forward order inside",
        _forward_inside,
        "Inside a bucket, too, the parameter that is ready first comes first.",
    ),
    (
        "frozen parameters",
        _with_frozen,
        "A frozen parameter never gets a gradient, and its bucket would wait for ever: leave out "
        "what does not require one.",
    ),
    (
        "tied weight twice",
        _tied_twice,
        "A tied weight has two names, and one gradient: it would be reduced twice. "
        "module.parameters() gives it once.",
    ),
    (
        "over the limit",
        _over_the_limit,
        "Over the limit: open a new bucket before a parameter that does not fit any more.",
    ),
    ("never exactly full", _never_exactly_full, "A bucket may be exactly full, not only below."),
    ("elements for bytes", _by_elements, "Those are elements: multiply by element_size()."),
    ("always 4 bytes", _four_bytes_each, "Not every number has 4 bytes: ask element_size()."),
    (
        "last bucket lost",
        _last_one_lost,
        "The last bucket, which is not full, is missing: its gradients would never be sent.",
    ),
    (
        "an empty bucket",
        _with_empties,
        "There is an empty bucket: open one only when there is a parameter to put into it.",
    ),
    (
        "large ones left out",
        _large_left_out,
        "A parameter larger than the limit travels alone, but it has to travel.",
    ),
    ("one each", _one_each, "A bucket a parameter: what fits goes into the same bucket."),
)


# --- the check


class Tower(nn.Module):
    """Parameters of these sizes; some frozen, and the first one tied to the end under two names."""

    def __init__(
        self, sizes: Iterable[int], *, frozen: Iterable[int] = (), tied: bool = False
    ) -> None:
        super().__init__()
        params = [nn.Parameter(torch.ones(size)) for size in sizes]
        self.layers = nn.ParameterList(params)
        for index in frozen:
            params[index].requires_grad_(False)
        if tied:
            self.head = params[0]


def _cases() -> list[tuple[str, nn.Module, int]]:
    plain = Tower((6, 2, 3, 1, 4))
    return [
        ("5 parameters of 24, 8, 12, 4 and 16 bytes", plain, 24),
        ("5 parameters of 24, 8, 12, 4 and 16 bytes", plain, 20),
        ("5 parameters of 24, 8, 12, 4 and 16 bytes", plain, 1),
        ("5 parameters of 24, 8, 12, 4 and 16 bytes", plain, 1000),
        ("4 parameters in float64", Tower((3, 3, 2, 2)).double(), 33),
        ("a frozen parameter in the middle", Tower((2, 1, 2), frozen=[1]), 16),
        ("the first weight tied to the last one", Tower((2, 1, 3), tied=True), 16),
        ("nothing but frozen parameters", Tower((2, 1), frozen=[0, 1]), 16),
    ]


def check_buckets(answer: Callable[..., Any]) -> str:
    """Small models with all that can be uneven, frozen, tied, or larger than the limit."""
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
    """The cause that fits every case."""
    for _, wrong, says in WRONG:
        if got == [_named(wrong(module, limit), module) for _, module, limit in _cases()]:
            return says
    return "Go through it by hand: which parameter comes first, and does the next one fit?"


def _named(buckets: Any, module: nn.Module) -> str:
    """The numbers of the parameters, bucket by bucket: `4 3 | 2 1 | 0`."""
    if buckets is None:
        raise CheckFailed("need a list of buckets; got None. Does your function return it?")
    names = {id(param): str(i) for i, param in enumerate(module.parameters())}
    rows = (" ".join(names[id(param)] for param in bucket) for bucket in buckets)
    return " | ".join(row or "(none)" for row in rows)


BUCKETS = Exercise(
    key="ddp-1",
    title="which bucket",
    check=check_buckets,
    reference=buckets_of,
    mistakes=tuple(Mistake(name, wrong, says[:40]) for name, wrong, says in WRONG),
)
