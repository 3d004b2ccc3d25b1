"""Exercise 2 of 16_experts: dispatch and combine by uneven all-to-alls."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from course_lib.checks.edits import Edit
from course_lib.checks.exercise import Cause, Exercise
from course_lib.checks.judge import ByExample
from course_lib.checks.properties import CALLERS, SEEDS
from course_lib.checks.watch import ALWAYS, UNWAITED, Watch

GETS, OUTPUT, SENT = "what this rank's experts get", "the output", "the calls"
CALLS = (
    # label, tokens of rank 0 (one more on each next rank), top_k, experts per rank, how chosen
    ("top_k 1, 2 experts per rank", 3, 1, 2, "mixed"),
    ("top_k 2", 2, 2, 2, "mixed"),
    ("top_k 2, the same shape, other numbers", 2, 2, 2, "other"),
    ("all tokens to the last two experts", 2, 2, 3, "last"),
    ("no tokens on rank 0", 0, 1, 1, "mixed"),
)

NOT_SORTED = Cause(
    "all_to_all_single cuts its input into consecutive parts, one per rank: so sort the copies by "
    "expert first."
)
WHOSE = Cause(
    "Those are rows of other tokens: copy n belongs to token n // top_k, so order // top_k lists "
    "the tokens in the order of their experts."
)
WHICH = Cause(
    "Rows are for another expert: they arrive rank by rank, and from each rank expert by expert. "
    "`which` counts this rank's experts from 0."
)
COUNTS = Cause(
    "Received are other numbers of rows than sent: exchange the counts first, and sum them by rank."
)
BACK = Cause("On the way back the split sizes are swapped: what was received is sent.")
PLACES = Cause(
    "Results come back in the order in which copies were sent: add them to their tokens, with "
    "index_add and order // top_k."
)
WEIGHTS = Cause("Weights are in the order of tokens, results in that of experts: use order here.")
NO_WEIGHTS = Cause("Each result is multiplied by the weight that its token gives this expert.")
ADD = Cause("A token's results add up: with top_k of 2, assigning keeps only one of them.")
BUDGET = Cause("Three all_to_all_single: the counts, the copies, the results.")
LOOK = Cause("Follow one token: its copies go to its experts' ranks, and its results come back.")


def _observe(rank: int, answer: Callable[..., Any]) -> dict[str, Any]:
    """Return the facets of several calls; a row says its token, a result its expert too."""
    watch, p = Watch(), dist.get_world_size()
    for number, (label, first, top_k, held, how) in enumerate(CALLS):
        num_tokens, num_experts, got = first + rank, held * p, list[list[float]]()
        tokens = _rows(rank, num_tokens, number)
        experts = _chosen(rank, num_tokens, top_k, num_experts, how)
        weights = torch.linspace(0.25, 2, num_tokens * top_k).double().view(-1, top_k)

        def run(inputs: Tensor, which: Tensor, got: Any = got, held: int = held) -> Tensor:
            """Add up to the output of this rank's expert, and note whose rows it was given."""
            own = torch.as_tensor(which).to(inputs.dtype)
            if own.shape != inputs.shape[:1]:
                raise ValueError(
                    f"run: need an expert for each of {len(inputs)} rows; got {[*own.shape]}"
                )
            got += sorted(
                [expert, *row] for expert, row in zip(own.tolist(), inputs.tolist(), strict=True)
            )
            return inputs * (1 + rank * held + own)[:, None]

        with watch.step(label, tokens=tokens, experts=experts, weights=weights) as step:
            out = answer(tokens, experts, weights, run, num_experts)
        counts, *later = [line for line in step.order if line != "wait"] or [""]
        step.show(**{GETS: got, OUTPUT: out, SENT: [counts.split(" of ")[0], *later]})
        if p == 1:  # then it may do without any call
            step.show(**{UNWAITED: [], SENT: []})
    return watch.seen


def _rows(rank: int, num_tokens: int, number: int) -> Tensor:
    at = torch.arange(num_tokens * 2).double().view(-1, 2)
    return 100.0 * (rank + 1) + at + 40 * number


def _chosen(rank: int, num_tokens: int, top_k: int, num_experts: int, how: str) -> Tensor:
    """Return different experts for each token; "last": all tokens go to the last two."""
    at = torch.arange(num_tokens)
    first = {"mixed": 5 * at + 3 * rank + 1, "other": 3 * at + rank}.get(how)
    if first is None:
        first = torch.full((num_tokens,), num_experts - 1)
    step = 1 + (at % (num_experts - 1) if how != "last" and num_experts > 1 else 0)
    second = first - step
    return torch.stack([first, second][:top_k], dim=1) % num_experts


COPIES, WEIGHTED = "tokens[order // top_k]", "weights.flatten()[order, None]"
GO, WAY_BACK = "received, sent)", "sent, received)"
WHICH_CODE = "torch.arange(num_experts // p).repeat(p).repeat_interleave(arriving)"
INDEX_ADD = "torch.zeros_like(tokens).index_add(0, order // top_k, weighted)"
CODE = "dist.all_to_all_single(arriving, counts)"
GATHER_COUNTS = (
    "everyones = [torch.empty_like(counts) for _ in range(p)]\n"
    "dist.all_gather(everyones, counts)\n"
    "arriving = torch.cat([one.view(p, -1)[dist.get_rank()] for one in everyones])"
)

DISPATCH = Exercise(
    key="experts-2",
    title="dispatch and combine",
    library=("course_lib.expert_parallel:parallelize_experts",),
    check=ByExample(
        observe_on_rank=_observe,
        facets=(GETS, OUTPUT, *ALWAYS, SENT),
        looks=((GETS, LOOK), (OUTPUT, PLACES), (SENT, BUDGET), ("mismatch", COUNTS)),
        rtol=1e-9,  # results of a token may be added in another order
        success="There and back on 1 to 4 ranks, whatever the tokens choose; three all-to-alls.",
    ),
    wrong=(
        Edit("experts.flatten().argsort(stable=True)", "torch.arange(experts.numel())", NOT_SORTED),
        Edit(COPIES, "tokens.repeat_interleave(top_k, 0)", NOT_SORTED),
        Edit(COPIES, "tokens.repeat(top_k, 1)[order]", WHOSE),
        Edit(
            WHICH_CODE,
            "torch.arange(num_experts // p).repeat_interleave(arriving.view(p, -1).sum(0))",
            WHICH,
        ),
        Edit(WHICH_CODE, "torch.arange(num_experts).repeat_interleave(arriving)", WHICH),
        Edit(WHICH_CODE, "torch.zeros(len(inputs), dtype=torch.int64)", WHICH),
        Edit(CODE, "arriving = counts", COUNTS),
        Edit("for c in (counts, arriving))", "for c in (counts, counts))", COUNTS),
        Edit(WAY_BACK, "received, sent)", BACK),
        Edit(INDEX_ADD, "weighted.view(-1, top_k, tokens.shape[1]).sum(1)", PLACES),
        Edit(INDEX_ADD, "torch.zeros_like(tokens).index_copy(0, order // top_k, weighted)", ADD),
        Edit(WEIGHTED, "weights.flatten()[:, None]", WEIGHTS),
        Edit(f"results * {WEIGHTED}", "results", NO_WEIGHTS),
        Edit(CODE, GATHER_COUNTS, BUDGET),
        Edit("sent, received = ", "tokens.mul_(1.0)\nweights.zero_()\nsent, received = ", CALLERS),
        SEEDS,
    ),
)
