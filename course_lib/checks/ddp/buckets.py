"""Exercise 1 of 06_ddp: the bucket of each parameter."""

from collections.abc import Iterable
from random import Random
from typing import Any

import torch
from torch import nn

from course_lib.checks.cases import TOO_NARROW, Case, Cases
from course_lib.checks.edits import Edit, Own
from course_lib.checks.exercise import Cause, Exercise, failed

Buckets = list[list[nn.Parameter]]


class Tower(nn.Module):
    """A model with parameters of these shapes, all of them parts of one tensor.

    Some are frozen, others will be `later`: once buckets were made. The first may be tied to the
    end, or belong to the model itself, to no layer.
    """

    def __init__(
        self,
        *shapes: int | tuple[int, ...],
        frozen: Iterable[int] = (),
        later: Iterable[int] = (),
        tied: bool = False,
        own: bool = False,
    ) -> None:
        super().__init__()
        like = [torch.empty(shape) for shape in shapes]
        parts = torch.ones(sum(x.numel() for x in like)).split([x.numel() for x in like])
        params = [nn.Parameter(part.view_as(x)) for part, x in zip(parts, like, strict=True)]
        if own:
            self.scale = params[0]
        self.layers = nn.ParameterList(params[own:])
        for index in frozen:
            params[index].requires_grad_(False)
        if tied:
            self.head = nn.ParameterList(params[:1])
        self.frozen_later = [params[index] for index in later]

    def freeze(self) -> None:
        """Freeze what is frozen later."""
        for param in self.frozen_later:
            param.requires_grad_(False)


def _cases() -> list[Case]:
    plain, mixed = Tower(6, 2, 3, 1, 4), Tower(1, 3, 2, 2)
    mixed.layers[2:].bfloat16()
    twice = Tower(2, 1, 3, later=[1])
    with torch.device("meta"):  # shapes without memory
        huge = Tower(1, 2**24)
    models = [
        ("5 parameters of 24, 8, 12, 4 and 16 bytes", plain, 24),
        ("5 parameters of 24, 8, 12, 4 and 16 bytes", plain, 20),
        ("5 parameters of 24, 8, 12, 4 and 16 bytes", plain, 1),
        ("5 parameters of 24, 8, 12, 4 and 16 bytes", plain, 1000),
        ("3 parameters of 4, 12 and 16 bytes", Tower(1, 3, 4), 20),
        ("4 parameters in float64", Tower(3, 3, 2, 2).double(), 33),
        ("a frozen parameter in the middle", Tower(2, 1, 2, frozen=[1]), 16),
        ("the first weight tied to the last one", Tower(2, 1, 3, tied=True), 16),
        ("nothing but frozen parameters", Tower(2, 1, frozen=[0, 1]), 16),
        ("5 parameters of 4, 8, 36, 4 and 8 bytes", Tower(1, 2, 9, 1, 2), 16),
        ("4 and 12 bytes of float32, then 4 and 4 of bfloat16", mixed, 8),
        ("a matrix of 16 bytes, a number without a dimension", Tower((2, 2), (), 2), 20),
        ("3 parameters of 8, 4 and 12 bytes", twice, 16),
        ("the same model, its second parameter frozen since", twice, 16),
        ("2 parameters of 4 and 67,108,864 bytes", huge, 2**26),
        ("the first parameter is the model's own", Tower(1, 2, 3, own=True), 16),
    ]
    return [(f"{what}, {limit} bytes a bucket", (module, limit)) for what, module, limit in models]


def _drawn(random: Random) -> list[Case]:
    def one(count: int) -> Case:
        sizes, limit = [random.randint(1, 12) for _ in range(count)], 4 * random.randint(4, 20)
        what = f"{count} parameters of {', '.join(str(4 * size) for size in sizes)} bytes"
        return f"{what}, {limit} bytes a bucket", (Tower(*sizes), limit)

    return [one(count) for count in (4, 6, 9)]


ITS_DTYPE = Cause("Numbers have 8, 4 or 2 bytes, also in one model: ask each its element_size().")
EMPTY = Cause("There is an empty bucket: open one only when there is something to put in.")
NO_PARAMETER = Cause("Put in the parameters themselves: no names, no copies.")
NO_LISTS = Cause("Return a list of buckets, each a list of parameters.")


def _numbers(buckets: Any, module: Tower, _limit: int) -> str:
    """Return the numbers of the parameters, bucket by bucket: `the parameters 4 3 | 2 1 | 0`.

    The buckets are made: freezes what the module freezes after that.
    """
    module.freeze()
    names = {id(param): str(i) for i, param in enumerate(module.parameters())}
    if not isinstance(buckets, list | tuple):
        raise failed(f"got {type(buckets).__name__}", NO_LISTS)
    if not all(isinstance(bucket, list | tuple) for bucket in buckets):
        raise failed("some bucket is no list", NO_LISTS)
    if any(id(param) not in names for bucket in buckets for param in bucket):
        raise failed("a bucket holds something that is no parameter of the module", NO_PARAMETER)
    lists = (" ".join(names[id(param)] for param in bucket) for bucket in buckets)
    shown = " | ".join(one or "(empty)" for one in lists)
    return f"the parameters {shown}" if shown else "no bucket"


def _into_any_bucket(module: nn.Module, bucket_bytes: int) -> Buckets:
    buckets: Buckets = []
    for param in reversed([param for param in module.parameters() if param.requires_grad]):
        room = bucket_bytes - param.nbytes
        fits = [bucket for bucket in buckets if sum(each.nbytes for each in bucket) <= room]
        if not fits:
            fits = [[]]
            buckets.append(fits[0])
        fits[0].append(param)
    return buckets


TRAINED = "[param for param in module.parameters() if param.requires_grad]"
OPENS = "if not buckets or filled + num_bytes > bucket_bytes:"
RESET = "buckets.append([])\n            filled = 0"

BUCKETS = Exercise(
    key="ddp-1",
    title="which bucket",
    library=(
        "course_lib.ddp.buckets:make_buckets",
        "course_lib.cost.packing:fill_buckets",
    ),
    check=Cases(
        cases=_cases,
        drawn=_drawn,
        show=_numbers,
        look="Go through it by hand: which parameter comes first, and does the next one fit?",
        success="From the last parameter to the first, never over the limit unless alone.",
    ),
    wrong=(
        Edit("reversed", "list", Cause("Backward begins at the end: last parameter first.")),
        Edit(
            "reversed",
            "list",
            Cause(
                "Packed from the first parameter on, and the list turned around: the bucket that "
                "is not full has to be the last one to be sent. Reverse the parameters, then pack."
            ),
            also=(("return buckets", "return buckets[::-1]"),),
        ),
        Edit(
            "return buckets",
            "return [bucket[::-1] for bucket in buckets]",
            Cause("Inside a bucket, too, the parameter that is ready first comes first."),
        ),
        Edit(
            TRAINED,
            "list(module.parameters())",
            Cause(
                "A frozen parameter never gets a gradient, and its bucket would never be full: "
                "leave out what does not require one."
            ),
        ),
        Edit(
            TRAINED,
            "[p for _, p in module.named_parameters(remove_duplicate=False) if p.requires_grad]",
            Cause(
                "A tied weight has two names, and one gradient: it would be reduced twice. "
                "module.parameters() lists it once."
            ),
        ),
        Edit(
            "filled + num_bytes > bucket_bytes",
            "filled >= bucket_bytes",
            Cause("Over the limit: open a new bucket before a parameter that does not fit."),
        ),
        Edit("num_bytes > b", "num_bytes >= b", Cause("A bucket may be exactly full.")),
        Edit(
            " * param.element_size()", "", Cause("Those are elements: multiply by element_size().")
        ),
        Edit(
            "param.element_size()",
            "4",
            ITS_DTYPE,
        ),
        Edit(
            "param.element_size()",
            "next(reversed([*module.parameters()])).element_size()",
            ITS_DTYPE,
        ),
        Edit(
            "param.numel()",
            "param.shape[:1].numel()",
            Cause("A matrix has more numbers than rows: numel() counts all of them."),
        ),
        Edit(
            RESET,
            f"{RESET[:-1]}-num_bytes",
            Cause("The parameter that opens a bucket fills it, too: count its bytes."),
        ),
        Edit(
            "module.parameters()",
            "nn.ModuleList(module.children()).parameters()",
            Cause(
                "The model itself may have parameters, too: module.parameters() has all of them."
            ),
        ),
        Edit(
            TRAINED,
            "list(dict.fromkeys(p for _, p in list(module.named_parameters(remove_duplicate=False))"
            "[::-1] if p.requires_grad))[::-1]",
            Cause(
                "A tied weight is complete with its first use, which backward reaches last: it "
                "belongs where its first name is."
            ),
        ),
        Edit(
            "return buckets",
            "return sorted(buckets, key=lambda bucket: bucket[0].nbytes > bucket_bytes)",
            Cause("A parameter larger than the limit keeps its place: send it in its turn."),
        ),
        Edit("return buckets", "return buckets or [[]]", EMPTY),
        Edit(
            OPENS,
            OPENS.replace("filled + num_bytes", "torch.tensor(filled + num_bytes).float()"),
            TOO_NARROW,
        ),
        Edit(
            "return buckets",
            "return buckets[:-1]",
            Cause(
                "The last bucket, which is not full, is missing: its gradients would never be sent."
            ),
        ),
        Edit(
            "buckets, filled = [], 0",
            "buckets, filled = [[]], 0",
            EMPTY,
        ),
        Edit(
            TRAINED,
            "[p for p in module.parameters() if p.requires_grad and p.nbytes <= bucket_bytes]",
            Cause("A parameter larger than the limit is sent alone, but it has to be sent."),
        ),
        Edit(RESET, "buckets.append([])", Cause("A new bucket is empty: count its bytes from 0.")),
        Own(
            _into_any_bucket,
            Cause(
                "A parameter went back into an earlier bucket, which then has to wait for it: only "
                "the newest bucket takes more."
            ),
        ),
        Edit(
            "filled += num_bytes",
            "filled += num_bytes if num_bytes <= bucket_bytes else 0",
            Cause("A parameter larger than the limit is sent alone: nothing may join it."),
        ),
        Edit(
            "param.numel() * param.element_size()",
            "param.untyped_storage().nbytes()",
            Cause(
                "Those are the bytes of the memory it lies in, which others share: count its "
                "numbers, numel(), times element_size()."
            ),
        ),
        Edit(
            "buckets, filled = [], 0",
            "kept = vars(module).setdefault((module, bucket_bytes), [])\n"
            "if kept:\n"
            "    return kept\n"
            "buckets, filled = kept, 0",
            Cause(
                "Those are the buckets of the call before: since then a layer may have been frozen "
                "or added. Keep nothing, make them anew."
            ),
        ),
        Edit(OPENS, "if True:", Cause("One bucket per parameter: what fits shares a bucket.")),
    ),
)
