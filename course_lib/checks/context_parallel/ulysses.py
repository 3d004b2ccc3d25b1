"""Exercise 4 of 15_context_parallel: swap tokens for heads, and back."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.properties import CALLERS, SEEDS
from course_lib.checks.watch import ALWAYS, ORDER, UNWAITED, Watch

GETS, SHAPES, OUTPUT = "what attend gets", "the shapes that attend gets", "the output"
CALLS = (
    # label, batch, heads of q and of k and v (times p), tokens of a rank, head_dim, dtype
    ("3 tokens per rank", 1, (2, 1), 3, 2, torch.float64),
    ("the same shape, other numbers", 1, (2, 1), 3, 2, torch.float64),
    ("batch 2, 1 token per rank, bfloat16", 2, (1, 1), 1, 4, torch.bfloat16),
)

HEADS_FIRST = Cause(
    "attend needs all tokens of this rank's heads: the tokens of rank 0 come first."
)
WRONG_HEADS = Cause("Rank 0 gets the first heads / p heads, rank 1 the next ones.")
NO_EXCHANGE = Cause("Those are this rank's own numbers: use what all_to_all_single has received.")
RESHAPED = Cause(
    "The shape is right, but numbers are in the wrong places: the received parts stand along dim "
    "0, so a reshape mixes them with the batch. Concatenate them."
)
BACK = Cause("On the way back, cut the tokens for their ranks, and put the heads together.")
BUDGET = Cause("One all_to_all_single per tensor: a rank sends only what the others need.")


def _observe(rank: int, answer: Callable[..., Any]) -> dict[str, Any]:
    """Return the facets of three calls; each number says its batch, head, token and place."""
    watch, p = Watch(), dist.get_world_size()
    for number, (label, batch, kinds, n, head_dim, dtype) in enumerate(CALLS):
        got: list[Tensor] = []

        def attend(*qkv: Tensor, got: list[Tensor] = got) -> Tensor:
            got += qkv
            return (2 * qkv[0]).transpose(1, 2).contiguous().transpose(1, 2)

        q, k, v = (
            _numbers((batch, heads * p, n, head_dim), rank * n, number + kind).to(dtype)
            for kind, heads in enumerate((kinds[0], kinds[1], kinds[1]))
        )
        with watch.step(label, q=q, k=k, v=v) as step:
            out = answer(q, k, v, attend)
        step.show(**{SHAPES: [[*x.shape] for x in got], GETS: got, OUTPUT: out})
        if p == 1:  # then it may do without any call
            step.show(**{UNWAITED: [], ORDER: []})
    return watch.seen


def _numbers(shape: tuple[int, ...], first_token: int, sign: int) -> Tensor:
    """Return 1 + 64 batch + 16 place + 4 head + token, exact in bfloat16 up to 256."""
    batch, heads, n, head_dim = (torch.arange(size) for size in shape)
    at = 64 * batch[:, None, None, None] + 16 * head_dim + 4 * heads[:, None, None]
    return (at + n[:, None] + first_token + 1).double() * (1 + sign)


CUT, PUT = "x.chunk(dist.get_world_size(), dim=1)", "torch.cat(list(into), dim=2)"
CUT_BACK, PUT_BACK = "x.chunk(dist.get_world_size(), dim=2)", "torch.cat(list(received), dim=1)"
RESHAPE = "into.reshape(x.shape[0], -1, dist.get_world_size() * x.shape[2], x.shape[3])"
DEALT = "[x[:, r :: dist.get_world_size()] for r in range(dist.get_world_size())]"
GATHERS = (
    "received_all = [torch.empty_like(parts) for _ in range(len(parts))]\n"
    "dist.all_gather(received_all, parts)\n"
    "into = torch.stack([one[dist.get_rank()] for one in received_all])"
)

ULYSSES = Exercise(
    key="context_parallel-4",
    title="two all-to-alls",
    library=("course_lib.context_parallel.ulysses:ulysses_attention",),
    check=ByExample(
        observe_on_rank=_observe,
        facets=(SHAPES, GETS, OUTPUT, *ALWAYS, ORDER),
        looks=((SHAPES, HEADS_FIRST), (GETS, HEADS_FIRST), (OUTPUT, BACK), (ORDER, BUDGET)),
        success="All tokens of some heads, and back, on 1 to 4 ranks; one all-to-all per tensor.",
    ),
    wrong=(
        Edit(PUT, "torch.cat(list(into), dim=1)", HEADS_FIRST),
        Edit(PUT, "torch.cat(list(into.flip(0)), dim=2)", HEADS_FIRST),
        Edit(PUT, RESHAPE, RESHAPED),
        Edit(PUT, "torch.cat(list(parts), dim=2)", NO_EXCHANGE),
        Edit(CUT, DEALT, WRONG_HEADS),
        Edit(CUT_BACK, "x.chunk(dist.get_world_size(), dim=1)", BACK),
        Edit(PUT_BACK, "torch.cat(list(received), dim=2)", BACK),
        Edit(PUT_BACK, "torch.cat(list(received.flip(0)), dim=1)", BACK),
        Edit(PUT_BACK, "torch.cat(list(pieces), dim=1)", NO_EXCHANGE),
        Edit("dist.all_to_all_single(into, parts)", GATHERS, BUDGET),
        Edit(
            "parts = torch.stack",
            "kept = x.clone()\nx.zero_()\nx = kept\nparts = torch.stack",
            CALLERS,
        ),
        SEEDS,
    ),
)
