"""Exercise 6 of 07_tensor_parallel: all-gather in front of a region, reduce-scatter behind it.

Rank r's part multiplies by 10**r, so that a wrong sum tells which ranks are in it. In bfloat16 it
multiplies by r: the sums are exact, and what rank 0 brings is 0. In float32 it is a random matrix.
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
from course_lib.checks.properties import DIGITS, NOT_WAITED, SEEDS
from course_lib.checks.tensor_parallel.parts import NOT_TRAINING
from course_lib.checks.watch import ALWAYS, ORDER, UNWAITED, Watch

PADDING = 99.0  # what the last ranks' tokens hold that are none, where p does not divide seq
# facets
INSIDE, RETURNED, HAS_GRAPH = "what part gets", "what is returned", "it requires a gradient"
GRAD_OF_PART, GRAD_OF_X = "the gradient of what part returns", "the gradient of x"
RUNS, AT_THE_END = "runs of part", "what was there before"

EACH_ONCE = Cause(
    "Are each rank's tokens there once, gathered into a tensor of their own, rank 0's first?"
)
OTHER_DIM = Cause(
    "Tokens are dim 1 of [batch, seq, hidden], and every rank has its part of each sequence: "
    "concatenate and cut along dim 1. (What collectives write one after the other is dim 0.)"
)
PADDING_STAYS = Cause("The padding is still there: the part gets seq tokens, and no others.")
EQUAL_PARTS = Cause(
    "The sum is cut into p equal parts of ceil(seq / p) tokens, along dim 1, each contiguous: "
    "where p does not divide seq, pad it with zeros first. x, too, may be a transposed tensor."
)
OWN_SUM = Cause("That is this rank's own partial sum: sum over the ranks, then keep own tokens.")
OTHERS = Cause("Those are tokens of another rank: rank r keeps part r of the sum.")
MEAN = Cause("Too small: the parts are terms of one sum, and so are gradients. Do not divide.")
SLICED = Cause(
    "That is this rank's own term of the gradient: the other ranks used these tokens, too. "
    "Backward of an all-gather sums over the ranks before it keeps the own tokens: a "
    "reduce-scatter."
)
ONLY_OWN = Cause(
    "Only the own tokens have a gradient: this rank's part has contributed to the sums of all "
    "tokens, and the other ranks hold their gradients. Backward of a reduce-scatter gathers them."
)
TIMES_P = Cause("{p} times too large: each token's gradient is on one rank. Gather it only.")
NO_GRADIENT = Cause("Did detach or no_grad cut the graph? The gradient is what backward returns.")
ADJOINT = Cause(
    "Backward returns what has the shape of forward's input: a gather's backward is the "
    "reduce-scatter, and the reverse."
)
ONCE = Cause("Call part once, with all tokens: its matrices are split, not the tokens.")
PAIR = Cause(
    "Forward and backward have one all_gather and one reduce_scatter each. An all_reduce of which "
    "you keep a part has the right numbers for twice the bytes, and so has gathering what you then "
    "add up."
)
KEEPS = Cause(
    "Other code may still need this tensor: write into a new one each time, and keep no buffer."
)
SOME_RANKS = Cause("Every rank makes each call, with the same shape, also with padding only.")
WHOSE = Cause(
    "Which rank's term is missing, or there twice? With 12 tokens, rank r's part multiplies by "
    "10**r."
)
GATHERED = Cause("A token of the sum has its gradient on one rank: backward gathers all of them.")


@dataclass(frozen=True)
class Use:
    """All tokens, the gradient of all tokens from above, and each rank's matrix."""

    x: Tensor
    above: Tensor
    matrix: Callable[[int], Tensor]
    frozen: bool = False  # x needs no gradient
    no_grad: bool = False
    lies: bool = False  # the own tokens are a transposed tensor: not contiguous

    def own(self, whole: Tensor, rank: int) -> Tensor:
        """Return the tokens that a rank is given, with padding that is no token."""
        size = -(-whole.shape[1] // dist.get_world_size())
        own = whole.new_full((len(whole), size, whole.shape[2]), PADDING)
        part = whole[:, rank * size : (rank + 1) * size]
        own[:, : part.shape[1]] = part
        return own.transpose(0, 1).contiguous().transpose(0, 1) if self.lies else own


def _numbers(*shape: int, first: int = 1) -> Tensor:
    return torch.arange(first, first + torch.Size(shape).numel()).view(shape).double()


def _random(seed: int, *shape: int) -> Tensor:
    """Return positive numbers: where they are added up, no digits cancel."""
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) + 0.5


def _digit(rank: int) -> Tensor:
    return torch.eye(3).double() * 10.0**rank


EVEN = _numbers(2, 12, 3), _numbers(2, 12, 3, first=7) ** 2, _digit
SEVEN = _numbers(2, 7, 3)
USES = {
    "12 tokens": Use(*EVEN),
    "7 tokens": Use(SEVEN, _numbers(2, 7, 3, first=7) ** 2, _digit),
    "7 tokens, one number is nan": Use(SEVEN.where(SEVEN != 4, torch.nan), SEVEN, _digit),
    "7 tokens, not contiguous, in bfloat16": Use(
        _numbers(2, 7, 2).bfloat16(),
        _numbers(2, 7, 2, first=3).bfloat16(),
        lambda rank: torch.eye(2).bfloat16() * rank,
        lies=True,
    ),
    "3 tokens in float32, the part's output is wider": Use(
        _random(100, 1, 3, 2), _random(101, 1, 3, 5), lambda rank: _random(rank, 2, 5)
    ),
    "an x that needs no gradient": Use(*EVEN, frozen=True),
    "under torch.no_grad()": Use(*EVEN, frozen=True, no_grad=True),
}


def observe(rank: int, answer: Callable[..., Any], backward: bool) -> dict[str, Any]:
    """Use the pair, at first only forward: so no rank is in a backward that others cannot do.

    At the end, look again at everything that other code may still need.
    """
    watch, everything = Watch(), {}
    for label, use in USES.items():
        with torch.set_grad_enabled(not use.no_grad):
            everything[label] = _use(rank, answer, use, watch, label, backward)
            if backward:
                _use_twice(rank, answer, use, watch, label)
    with watch.step("at the end") as step:
        step.show(**{AT_THE_END: everything})
    return watch.seen


def _use(
    rank: int, answer: Callable[..., Any], use: Use, watch: Watch, label: str, backward: bool
) -> dict[str, Any]:
    """Return what other code may still need."""
    x, above = use.own(use.x, rank).requires_grad_(not use.frozen), use.own(use.above, rank)
    matrix, seen, outs = use.matrix(rank).requires_grad_(), dict[str, Any](), list[Any]()

    def part(inside: Tensor) -> Tensor:
        seen[INSIDE] = inside
        out = (inside if inside.shape == use.x.shape else inside.sum().expand_as(use.x)) @ matrix
        if out.requires_grad:
            out.register_hook(lambda grad: seen.__setitem__(GRAD_OF_PART, grad.clone()))
        outs.append(out)
        return out

    with watch.step(label, x=x, the_gradient_from_above=above) as step:
        returned = answer(x, part, use.x.shape[1])
        step.show(**{RETURNED: returned, HAS_GRAPH: getattr(returned, "requires_grad", None)})
        if backward and returned.requires_grad:
            watch.mark("backward begins")
            returned.backward(above)
    step.show(**seen, **{RUNS: len(outs), GRAD_OF_X: x.grad})
    if dist.get_world_size() == 1:  # then it may do without any call
        step.show(**{ORDER: []})
    return {"what part returned": outs, "what was returned": returned, GRAD_OF_X: x.grad}


def _use_twice(rank: int, answer: Callable[..., Any], use: Use, watch: Watch, label: str) -> None:
    """Use an x as it is, and times 3."""
    x, seq = use.own(use.x, rank).requires_grad_(not use.frozen), use.x.shape[1]
    with watch.step(f"{label}, x is used twice", x=x) as step:
        out = answer(x, lambda inside: inside * 1.0, seq)
        out = out + answer(x, lambda inside: inside * 3.0, seq)
        if out.requires_grad:
            out.backward(torch.ones_like(out))
    step.show(**{RETURNED: out, GRAD_OF_X: x.grad, ORDER: []})


GATHER = "dist.all_gather(parts, x)"
SCATTER = "dist.reduce_scatter(own, [part.contiguous() for part in parts])"
CAT = "torch.cat(parts, dim=1)"
PADDED = "F.pad(x, (0, 0, 0, -x.shape[1] % p))"
OWN = "own = torch.empty_like(parts[0])"
ENTER = "Boundary.apply(x, gather, scatter_sum)"
LEAVE = "Boundary.apply(out, scatter_sum, gather)"
P, RANK = "dist.get_world_size()", "dist.get_rank()"
SLICE = f"lambda whole: F.pad(whole, (0, 0, 0, -seq % {P})).chunk({P}, 1)[{RANK}].clone()"
BUFFER = "in_region.__dict__.setdefault(str({0}.shape), torch.empty_like({0}).contiguous())"


def _enter_back(backward: str, cause: Cause) -> Edit:
    """Return the right answer with another backward in front of the region."""
    return Edit(ENTER, ENTER.replace("scatter_sum", f"lambda grad: {backward}"), cause)


def _leave_back(backward: str, cause: Cause) -> Edit:
    return Edit(LEAVE, LEAVE.replace("gather)", f"lambda grad: {backward})"), cause)


SEQUENCE = Exercise(
    key="tensor_parallel-6",
    title="the pair of sequence parallelism",
    check=ByExample(
        observe_on_rank=observe,
        runs=lambda _p: ({"backward": False}, {"backward": True}),
        facets=(
            *(UNWAITED, INSIDE, RETURNED, HAS_GRAPH, GRAD_OF_PART, GRAD_OF_X),
            *(RUNS, ORDER, *ALWAYS, AT_THE_END),
        ),
        looks=(
            (UNWAITED, NOT_WAITED),
            (INSIDE, EACH_ONCE),
            (RETURNED, WHOSE),
            (HAS_GRAPH, NO_GRADIENT),
            (GRAD_OF_PART, GATHERED),
            (GRAD_OF_X, WHOSE),
            (RUNS, ONCE),
            (ORDER, PAIR),
            (AT_THE_END, KEEPS),
            ("raised", EQUAL_PARTS),
            ("hang", SOME_RANKS),
            ("mismatch", SOME_RANKS),
        ),
        success="Sums and gradients on 1 to 4 ranks; a gather and a reduce-scatter in each pass.",
    ),
    wrong=(
        _enter_back(f"({SLICE})(grad)", SLICED),
        _enter_back(f"scatter_sum(grad / {P})", MEAN),
        _leave_back(f"gather(grad) * {P}", TIMES_P),
        _leave_back(f"gather(grad) / {P}", MEAN),
        _leave_back(f"torch.cat([grad * (r == {RANK}) for r in range({P})], 1)[:, :seq]", ONLY_OWN),
        Edit(LEAVE, "scatter_sum(out)", NO_GRADIENT),
        Edit(ENTER, "gather(x)", NO_GRADIENT),
        Edit("out, scatter_sum", f"out / {P}, scatter_sum", MEAN),
        Edit("out, scatter_sum", f"out, {SLICE}", OWN_SUM),
        Edit("parts])", "parts[1:] + parts[:1]])", OTHERS),
        Edit(CAT, "torch.cat(parts[::-1], dim=1)", EACH_ONCE),
        Edit("_like(x) for _ in range(dist.get_world_size())]", f"_like(x)] * {P}", EACH_ONCE),
        Edit(CAT, "torch.cat(parts)", OTHER_DIM),
        Edit(CAT, "torch.cat(parts).reshape(len(x), -1, x.shape[2])", OTHER_DIM),
        Edit("chunk(p, dim=1)", "chunk(p, dim=2)", EQUAL_PARTS),
        Edit(PADDED, "x", EQUAL_PARTS),
        Edit(PADDED, "x[:, : x.shape[1] // p * p]", EQUAL_PARTS),
        Edit("x = x.contiguous()", "x = x.view(-1).view(x.shape)", EQUAL_PARTS),
        Edit("[:, :seq]", "", PADDING_STAYS),
        Edit(PADDED, PADDED.replace("x,", "x.float(),"), DIGITS),
        Edit(
            SCATTER,
            "total = torch.cat(parts, 1)\ndist.all_reduce(total)\n"
            f"own.copy_(total.chunk(p, 1)[{RANK}])",
            PAIR,
        ),
        Edit(OWN, f"own = {BUFFER.format('parts[0]')}", KEEPS),
        _enter_back(f"{BUFFER.format('x')}.copy_(scatter_sum(grad))", KEEPS),
        Edit(SCATTER, f"{SCATTER}\nx.zero_()", KEEPS),
        Edit(GATHER, GATHER.replace("x)", "x, async_op=True)"), NOT_WAITED),
        Edit(SCATTER, f"if x.any():\n    {SCATTER}", SOME_RANKS),
        Edit(ENTER, ENTER.replace("scatter_sum", "gather"), ADJOINT),
        Edit(LEAVE, LEAVE.replace("gather", "scatter_sum"), ADJOINT),
        Edit(
            f"return {LEAVE}",
            f"return {LEAVE} if torch.is_grad_enabled() else ({SLICE})(out)",
            NOT_TRAINING,
        ),
        SEEDS,
    ),
)
