"""Exercise 1 of 07_tensor_parallel: the pair f and g.

Rank r's part multiplies by 10**r, so that a wrong sum tells which ranks are in it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.on_ranks import copied
from course_lib.checks.properties import CALLERS, DIGITS, EVERY_RANK, KEEPS_DTYPE, REDUCES
from course_lib.checks.tensor_parallel.parts import (
    APART,
    NOT_TRAINING,
    OUTSIDE,
    backward,
    bits_on_all,
    is_outside,
)
from course_lib.checks.watch import ALWAYS, ORDER, UNWAITED, Watch

Answer = Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]

RUNS, GETS, RETURNED, SUM = "runs of part", "what part gets", "what part returned", "the sum"
PART_GRAD, X_GRAD, BITS = "the gradient that part gets", "the gradient of x", "the bits"
AROUND, TWICE = "the gradient of x with a way around", "the gradient of x with two parts"
WARNS = "PyTorch warns of a wrong gradient"

F_COPIES = Cause("f returns x unchanged in forward, and sums in backward.")
EACH_ONCE = Cause("g sums in forward, every rank's part once: all_reduce a clone, and return that.")
NO_SUM_BACK = Cause(
    "That is this rank's own term of the gradient: x was used on every rank, so backward of f has "
    "to sum the gradients of all ranks. Nothing fails without it; the weights before x train on "
    "one term of their gradient. Do you return the tensor that was summed?"
)
EACH_TERM = Cause("x was used on every rank: backward of f sums their gradients, each once.")
MEAN = Cause("That is the mean: terms of a sum add up, and so do gradients. Divide nothing.")
HANDS_ON = Cause(
    "Every rank already has the whole gradient of the sum: in backward, g passes it on unchanged."
)
NO_GRADIENT = Cause("Did detach or no_grad cut the graph? The gradient is what backward returns.")
KEEPS = Cause(
    "Other code may still need this tensor, and all_reduce works in place: give it a new clone "
    "each time."
)
SHARED = Cause(
    "The gradient that reaches x around the part was summed, too. Either the tensor was changed in "
    "place (sum a clone), or you sum at x itself: sum only the gradient that comes from the part."
)
TWO_USES = Cause("Two uses of x share a tensor: both sums need a new tensor each time.")
ANY_SHAPE = Cause(
    "x has any shape, and what part returns may have another one: take that of the tensor you sum."
)
RUNS_ONCE = Cause(
    "Call part once, and keep what it returns: each further call draws other random numbers "
    "(dropout), updates buffers, and takes the time of one more forward."
)
BUDGET = Cause(
    "One all_reduce in each pass, of what is summed, in its own dtype: g in forward, f in backward."
)


@dataclass(frozen=True)
class Use:
    """An x, the gradient from above, and what each rank's part multiplies by: number or matrix."""

    x: Tensor
    up: Tensor
    factor: Callable[[int], Tensor]
    frozen: bool = False  # x needs no gradient
    no_grad: bool = False


def _digit(rank: int) -> Tensor:
    return torch.tensor(10.0**rank).double()


def _positive(seed: int, *shape: int) -> Tensor:
    """Return numbers in float32 that do not cancel when they are added up."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


X, UP = torch.arange(1, 7).view(2, 3).double(), torch.arange(3, 9).view(2, 3).double()
USES = {
    "x of [2, 3]": Use(X, UP, _digit),
    "x of [1, 3, 5] in bfloat16": Use(  # all sums are exact; rank 0 contributes zeros
        torch.arange(1, 16).view(1, 3, 5).bfloat16(),
        torch.arange(2, 17).view(1, 3, 5).bfloat16(),
        lambda rank: torch.tensor(rank).bfloat16(),
    ),
    "x of [20, 3] in float32, the part's output of [20, 7]": Use(
        _positive(100, 20, 3), _positive(101, 20, 7), lambda rank: _positive(rank, 3, 7)
    ),
    "x of []": Use(torch.tensor(3.0).double(), torch.tensor(7.0).double(), _digit),
    "x and the gradient from above are nan": Use(X * torch.nan, UP * torch.nan, _digit),
    "x and the gradient from above are inf": Use(X * torch.inf, UP * torch.inf, _digit),
    "an x that needs no gradient": Use(X, UP, _digit, frozen=True),
    "under torch.no_grad()": Use(X, UP, _digit, frozen=True, no_grad=True),
}


class Part:
    """A rank's part: notes what it gets and returns, and the gradient that comes back to it."""

    def __init__(self, factor: Tensor) -> None:
        self.factor, self.runs = factor.requires_grad_(), 0
        self.gets: Any = None
        self.returned: Any = None
        self.grad: Any = None

    def __call__(self, inside: Tensor) -> Tensor:
        self.runs, self.gets = self.runs + 1, copied(inside)
        self.returned = inside @ self.factor if self.factor.dim() else inside * self.factor
        if self.returned.requires_grad:
            self.returned.register_hook(lambda grad: setattr(self, "grad", copied(grad)))
        return self.returned


def _observe(rank: int, answer: Answer, twice: bool) -> dict[str, Any]:
    """Use f and g forward and backward; `twice`: with an x that is used around them, too."""
    watch = Watch()
    if twice:
        _use_twice(watch, answer)
    for label, use in () if twice else USES.items():
        with torch.set_grad_enabled(not use.no_grad):
            _use(watch, answer, label, use, Part(use.factor(rank)))
    if dist.get_world_size() == 1:  # then it may do without any call
        for seen in watch.seen.values():
            seen |= {UNWAITED: [], ORDER: []}
    return watch.seen


def _use(watch: Watch, answer: Answer, label: str, use: Use, part: Part) -> None:
    x, up = use.x.clone().requires_grad_(not use.frozen), use.up.clone()
    with watch.step(f"{label}, forward", x=x) as step:
        out = answer(x, part)
    step.show(**{RUNS: part.runs, GETS: part.gets, RETURNED: part.returned, SUM: out})
    step.show(**{BITS: bits_on_all(out)})
    before = {"what part returned": part.returned, "the sum": out, "the gradient from above": up}
    with watch.step(f"{label}, backward", x=x, **before) as step:
        backward(out, up)
    step.show(**{RUNS: part.runs, PART_GRAD: part.grad, X_GRAD: x.grad, BITS: bits_on_all(x.grad)})
    if use.frozen:  # then f has nothing to sum, but may
        step.show(**{UNWAITED: [], ORDER: []})


def _use_twice(watch: Watch, answer: Answer) -> None:
    """Use an x twice; in the last use, nothing is watched, so that PyTorch's warning comes."""

    def a(inside: Tensor) -> Tensor:
        return inside.view_as(inside)  # then its gradient is the very tensor that comes from above

    b = Part(_digit(1))
    losses = (
        ("x + together(x, a)", AROUND, lambda x: x + answer(x, a)),
        ("together(x, a) + together(x, b)", TWICE, lambda x: answer(x, a) + answer(x, b)),
    )
    for label, facet, loss in losses:
        x = X.clone().requires_grad_()
        with watch.step(label, x=x) as step:
            out = loss(x)
            out.backward(torch.ones_like(out))
        step.show(**{SUM: out, facet: x.grad, BITS: bits_on_all(x.grad)})
    out = answer(X.clone().requires_grad_(), b)
    with watch.step("one more use") as step:
        step.show(**{WARNS: is_outside(lambda: backward(out, UP)), BITS: bits_on_all(out)})


F, G = "total = grad.clone()", "total = x.clone()"  # backward of f, forward of g
TOGETHER = "return ReduceFromRegion.apply(part(CopyToRegion.apply(x)))"
SKIPS = f"if {{}}:\n    return part(x)\n{TOGETHER}"
BUFFER = "sums = together.__dict__\ntotal = sums.setdefault(str({0}.shape), {0}.clone()).copy_({0})"

PAIR = Exercise(
    key="tensor_parallel-1",
    title="f and g",
    check=ByExample(
        observe_on_rank=_observe,
        runs=lambda _p: ({"twice": False}, {"twice": True}),
        facets=(
            *(RUNS, UNWAITED, GETS, SUM, RETURNED, PART_GRAD, X_GRAD, BITS),
            *(*ALWAYS, ORDER, AROUND, TWICE, WARNS),
        ),
        equal=(BITS,),
        looks=(
            *((RUNS, RUNS_ONCE), (GETS, F_COPIES), (SUM, EACH_ONCE), (RETURNED, KEEPS)),
            *((PART_GRAD, HANDS_ON), (X_GRAD, EACH_TERM), (BITS, APART), (ORDER, BUDGET)),
            *((AROUND, SHARED), (TWICE, TWO_USES), (WARNS, OUTSIDE)),
            ("mismatch", EVERY_RANK),
        ),
        success=("Sums and gradients on 1 to 4 ranks; one all_reduce in forward, one in backward."),
    ),
    wrong=(
        Edit(F, "return grad", NO_SUM_BACK),
        Edit(G, "return x.clone()", EACH_ONCE),
        Edit("return grad", f"{F}\ndist.all_reduce(total)\nreturn total", HANDS_ON),
        Edit(G, "total = x / dist.get_world_size()", MEAN),
        Edit(F, "total = grad / dist.get_world_size()", MEAN),
        Edit("return grad", "return grad / dist.get_world_size()", HANDS_ON),
        Edit(
            "ReduceFromRegion.apply(part(CopyToRegion.apply(x)))",
            "CopyToRegion.apply(part(ReduceFromRegion.apply(x)))",
            F_COPIES,
        ),
        Edit(G, "total = x", KEEPS),
        Edit(F, "total = grad", SHARED),
        Edit(F, BUFFER.format("grad"), TWO_USES),
        Edit(G, BUFFER.format("x"), TWO_USES),
        Edit("return grad", "kept = grad.clone()\ngrad.zero_()\nreturn kept", CALLERS),
        Edit("return grad", "pass", NO_GRADIENT),
        Edit("ReduceFromRegion.apply(part(", "ReduceFromRegion.forward(None, part(", OUTSIDE),
        Edit(F, "total = grad.float()", DIGITS),
        Edit(TOGETHER, f"{TOGETHER}.view_as(x)", ANY_SHAPE),
        Edit(TOGETHER, f"part(x)\n{TOGETHER}", RUNS_ONCE),
        Edit(
            G,
            "parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]\n"
            "dist.all_gather(parts, x.contiguous())\nreturn torch.stack(parts).sum(0)",
            BUDGET,
        ),
        Edit(TOGETHER, SKIPS.format("not torch.is_grad_enabled()"), NOT_TRAINING),
        Edit(TOGETHER, SKIPS.format("not x.requires_grad"), NOT_TRAINING),
        Edit(
            TOGETHER,
            "y = part(CopyToRegion.apply(x))\n"
            "return y + (ReduceFromRegion.forward(None, y.detach()) - y.detach())",
            APART,
        ),
        *(one for one in REDUCES if one.name not in ("waits at once", "four ranks")),
        *KEEPS_DTYPE,
    ),
)
